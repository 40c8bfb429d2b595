#include "transport/cuda/copy_plan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <map>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "transport/base/status.h"
#include "transport/bound_moves.h"
#include "transport/cuda/derive_plan.h"

namespace refitd {
namespace {

constexpr int64_t kVectorBytes = 16;
// Runs are cut at multiples of this, so that the parts stay aligned as the run is, in memory and in
// blocks of the digest.
constexpr int64_t kCutBytes = 512;
constexpr int64_t kMostSlices = 16;     // of the first tasks, which have 1 MiB
constexpr int64_t kMostCount = 65'535;  // the largest value of CopyTask::count
// Runs of at most this number of elements are copied one element at a time, because the fixed cost
// of a run would be higher.
constexpr int64_t kShortRun = 4;
// The cost of an element that is copied alone: each of its bytes costs as much as this number of
// bytes of a long run.
constexpr int64_t kElementCost = 4;

// ---- boxes as loops ----

// One dimension of a box, or several that are contiguous with each other in memory (and, if
// digested, in the index).
struct Loop {
  int64_t extent = 1;
  int64_t from = 0;  // bytes
  int64_t to = 0;    // bytes
  int64_t p = 0;     // elements of the global index
};

// The loops outside the run, innermost first.
using Loops = absl::InlinedVector<Loop, 2>;

// A box to be cut into tasks. `task` has everything but the loops; its run may be too long.
struct Strip {
  CopyTask task;
  int64_t run = 1;  // elements
  Loops loops;
};

int64_t RunBytes(const Strip& strip) { return strip.run * strip.task.element_bytes; }

bool Continues(const Loop& inner, const Loop& next, bool digested) {
  return next.from == inner.extent * inner.from && next.to == inner.extent * inner.to &&
         (!digested || next.p == inner.extent * inner.p);
}

// Returns the box's dimensions, joined to as few loops as possible. A pass that only copies may use
// any order of dimensions, so it takes that of the destination.
Loops Collapse(const Box& box, const Dims& shape, const Dims& from_strides, const Dims& to_strides,
               int64_t element_bytes, bool digested) {
  Loops dims;
  int64_t p = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    if (box.extent[d] > 1) {
      dims.push_back({.extent = box.extent[d],
                      .from = from_strides[d] * element_bytes,
                      .to = to_strides[d] * element_bytes,
                      .p = p});
    }
    p *= shape[d];
  }
  if (!digested) {
    std::stable_sort(dims.begin(), dims.end(),
                     [](const Loop& a, const Loop& b) { return a.to < b.to; });
  }
  Loops loops;
  for (const Loop& dim : dims) {
    if (!loops.empty() && Continues(loops.back(), dim, digested)) {
      loops.back().extent *= dim.extent;
    } else {
      loops.push_back(dim);
    }
  }
  return loops;
}

// Makes the strip of `box`. `task` must have its addresses and sums. A pass that stores nothing
// gives the piece's own strides as `to_strides`.
Strip MakeStrip(const CopyTask& task, const BoundPiece& piece, const Box& box,
                const Dims& to_strides) {
  const int64_t element_bytes = ElementBytes(piece.dtype);
  const bool digested = task.sum != kNoSum || task.proof_sum != kNoSum;
  Strip strip = {
      .task = task,
      .run = 1,
      .loops = Collapse(box, piece.shape, piece.strides, to_strides, element_bytes, digested)};
  Loops& loops = strip.loops;
  if (!loops.empty() && loops[0].from == element_bytes && loops[0].to == element_bytes &&
      (!digested || loops[0].p == 1)) {
    strip.run = loops[0].extent;
    loops.erase(loops.begin());
  }
  strip.task.index = static_cast<uint64_t>(FirstIndex(box, piece.shape));
  strip.task.element_bytes = static_cast<uint8_t>(std::min<int64_t>(element_bytes, 4));
  if (element_bytes == 8) {  // two words, low word first
    strip.run *= 2;
    strip.task.index *= 2;
    for (Loop& loop : loops) loop.p *= 2;
  }
  const int64_t bytes = strip.task.element_bytes;
  if (strip.run > 1 && strip.run <= kShortRun && RunBytes(strip) < kVectorBytes && !loops.empty() &&
      loops.size() < kTaskDims) {
    loops.insert(loops.begin(), {.extent = strip.run, .from = bytes, .to = bytes, .p = 1});
    strip.run = 1;
  }
  return strip;
}

int64_t StripBytes(const Strip& strip) {
  int64_t bytes = RunBytes(strip);
  for (const Loop& loop : strip.loops) bytes *= loop.extent;
  return bytes;
}

int64_t TaskBytes(const CopyTask& task) {
  return int64_t{task.run} * task.element_bytes * task.count[0] * task.count[1] * task.count[2];
}

int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Multiplies counts, which must not be negative; too large products become the greatest value.
int64_t SaturatingMultiply(int64_t a, int64_t b) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return std::numeric_limits<int64_t>::max();
  return product;
}

// ---- tasks ----

void Advance(CopyTask* task, const Loop& loop, int64_t steps) {
  const auto move = [steps](uint64_t* address, int64_t step) {
    if (*address != 0) *address += static_cast<uint64_t>(steps * step);
  };
  move(&task->source, loop.from);
  move(&task->proof, loop.from);
  move(&task->destination, loop.to);
  task->index += static_cast<uint64_t>(steps * loop.p);
}

void SetDim(CopyTask* task, int at, const Loop& loop, int64_t count) {
  task->count[at] = static_cast<uint16_t>(count);
  task->source_step[at] = loop.from;
  task->destination_step[at] = loop.to;
  task->index_step[at] = loop.p;
}

// Cuts a strip into tasks of at most `most` bytes and calls add(task). A run costs as much as the
// vectors that it may touch, or as an element that is copied alone: short runs cost more than their
// bytes.
class Cutter {
 public:
  Cutter(const Strip& strip, int64_t most)
      : strip_(strip), most_(std::min(most, MostCost(strip))), run_cost_(RunCost(strip)) {}

  // The number of tasks that Run adds.
  int64_t Count() const {
    if (RunBytes(strip_) > most_) return Times(CeilDivide(strip_.run, RunStep()), 0);
    const auto [whole, cost] = Whole();
    if (whole == strip_.loops.size() || whole == kTaskDims) return Times(1, whole);
    const int64_t extent = strip_.loops[whole].extent;
    return Times(CeilDivide(extent, LoopStep(extent, cost)), whole + 1);
  }

  // Adds the strip's tasks. As many inner loops as fit go into each task whole; the next loop is
  // cut into equal parts; each step of the loops outside it has tasks of its own.
  template <typename Add>
  void Run(Add add) const {
    CopyTask task = strip_.task;
    // If a single run is too large for a task, the run itself is cut.
    if (RunBytes(strip_) > most_) {
      const Loop run = {.extent = strip_.run,
                        .from = strip_.task.element_bytes,
                        .to = strip_.task.element_bytes,
                        .p = 1};
      return ForEach(task, 0, [&](const CopyTask& at) { CutRun(at, run, add); });
    }
    task.run = static_cast<uint32_t>(strip_.run);
    const auto [whole, cost] = Whole();
    for (size_t i = 0; i < whole; ++i) {
      SetDim(&task, kTaskDims - 1 - static_cast<int>(i), strip_.loops[i], strip_.loops[i].extent);
    }
    // No loop is left to cut, or the task has no dimension left for a part of one.
    if (whole == strip_.loops.size() || whole == kTaskDims) return ForEach(task, whole, add);
    const size_t cut = whole;
    const int64_t each = cost;
    ForEach(task, cut + 1, [&](const CopyTask& at) { CutLoop(at, cut, each, add); });
  }

 private:
  static int64_t RunCost(const Strip& strip) {
    if (strip.run == 1) return kElementCost * RunBytes(strip);
    return (RunBytes(strip) / kVectorBytes + 2) * kVectorBytes;
  }
  // The greatest cost of a task for which its index arithmetic is exact (kMaxTaskVectors).
  static int64_t MostCost(const Strip& strip) {
    if (strip.run == 1) return kMaxTaskVectors * RunCost(strip);
    return (kMaxTaskVectors - 2) * kVectorBytes;
  }

  // The number of loops that fit into a task completely, and the cost of one step of the next loop.
  std::pair<size_t, int64_t> Whole() const {
    size_t whole = 0;
    int64_t cost = run_cost_;
    while (whole < strip_.loops.size() && whole < kTaskDims &&
           strip_.loops[whole].extent <= kMostCount && cost * strip_.loops[whole].extent <= most_) {
      cost *= strip_.loops[whole++].extent;
    }
    return {whole, cost};
  }

  int64_t RunStep() const {
    const int64_t parts = CeilDivide(RunBytes(strip_), most_);
    const int64_t unit = kCutBytes / strip_.task.element_bytes;
    return std::min(CeilDivide(CeilDivide(strip_.run, parts), unit) * unit, strip_.run);
  }

  // Returns how many steps of a loop each task gets; parts differ by at most one step.
  int64_t LoopStep(int64_t extent, int64_t cost) const {
    const int64_t fit = std::clamp<int64_t>(most_ / cost, 1, kMostCount);
    return CeilDivide(extent, CeilDivide(extent, fit));
  }

  // Returns `count` times the number of indices of the loops from `begin` on.
  int64_t Times(int64_t count, size_t begin) const {
    for (size_t i = begin; i < strip_.loops.size(); ++i) {
      count = SaturatingMultiply(count, strip_.loops[i].extent);
    }
    return count;
  }

  template <typename Add>
  void CutRun(CopyTask task, const Loop& run, const Add& add) const {
    const int64_t step = RunStep();
    for (int64_t done = 0; done < run.extent; done += step) {
      task.run = static_cast<uint32_t>(std::min(step, run.extent - done));
      add(task);
      Advance(&task, run, task.run);
    }
  }

  // Cuts loop `cut` into parts, and adds a task for each. `cost`: of one step of that loop (Whole).
  template <typename Add>
  void CutLoop(CopyTask task, size_t cut, int64_t cost, const Add& add) const {
    const Loop& loop = strip_.loops[cut];
    const int64_t step = LoopStep(loop.extent, cost);
    for (int64_t done = 0; done < loop.extent; done += step) {
      const int64_t count = std::min(step, loop.extent - done);
      SetDim(&task, kTaskDims - 1 - static_cast<int>(cut), loop, count);
      add(task);
      Advance(&task, loop, count);
    }
  }

  // Calls visit(task) for each index of the loops from `begin` on, in ascending order.
  template <typename Visit>
  void ForEach(CopyTask task, size_t begin, const Visit& visit) const {
    const Loops& loops = strip_.loops;
    std::array<int64_t, kMaxDims + 1> index = {};
    while (true) {
      visit(task);
      size_t d = begin;
      while (d < loops.size() && index[d] + 1 == loops[d].extent) {
        Advance(&task, loops[d], -index[d]);
        index[d++] = 0;
      }
      if (d == loops.size()) return;
      Advance(&task, loops[d], 1);
      ++index[d];
    }
  }

  const Strip& strip_;
  const int64_t most_;
  const int64_t run_cost_;
};

// ---- order ----

SumRange RangeOf(const std::vector<CopyTask>& tasks, uint32_t CopyTask::*sum) {
  uint32_t first = kNoSum;
  uint32_t last = 0;
  for (const CopyTask& task : tasks) {
    if (task.*sum == kNoSum) continue;
    first = std::min(first, task.*sum);
    last = std::max(last, task.*sum);
  }
  return first == kNoSum ? SumRange() : SumRange{first, last - first + 1};
}

// Returns how many slices of kSliceBytes a plain task of mean size has. For copies within a device
// only; over links slices gain nothing.
uint32_t SlicesOf(const DeviceTasks& device) {
  const auto count = static_cast<int64_t>(device.counts[static_cast<size_t>(CopyKernel::kPlain)]);
  int64_t bytes = 0;
  for (const CopyTask& task : device.tasks) {
    if (KernelOf(task) == CopyKernel::kPlain) bytes += TaskBytes(task);
  }
  const int64_t slices = bytes / std::max<int64_t>(count, 1) / int64_t{kSliceBytes};
  return static_cast<uint32_t>(std::clamp<int64_t>(slices, 1, kMostSlices));
}

// The work that one device runs, by the devices to which it stores.
class DeviceQueues {
 public:
  void Add(int target, const Strip& strip) {
    Target& to = targets_[target];
    to.strips.push_back(strip);
    to.bytes += StripBytes(strip);
    bytes_ += StripBytes(strip);
    digests_ = digests_ || strip.task.sum != kNoSum || strip.task.proof_sum != kNoSum;
  }
  void AddCopy(int target, uint64_t source, uint64_t destination, int64_t bytes) {
    EngineCopies& copies = copies_[target];
    copies.sources.push_back(source);
    copies.destinations.push_back(destination);
    copies.bytes.push_back(static_cast<size_t>(bytes));
    copied_ += bytes;
  }
  // Tasks for the derive kernel are made here. `bytes`: what they store.
  absl::Status AddDerived(int target, const DeriveMove& move, int64_t bytes) {
    targets_[target].bytes += bytes;
    bytes_ += bytes;
    return AddDeriveTasks(move, kMaxDeviceTasks, &derived_);
  }
  bool has_copies() const { return !copies_.empty(); }
  bool empty() const { return targets_.empty() && copies_.empty(); }

  // The number of tasks that Take makes; if that is more than kMaxDeviceTasks, any number greater
  // than kMaxDeviceTasks.
  int64_t CountTasks(int device, const CopyPlanOptions& options) const {
    const Sizes sizes = TaskSizes(device, options);
    auto count = static_cast<int64_t>(derived_.size());
    for (const auto& [number, target] : targets_) {
      Cut cut(target, sizes);
      for (const Strip& strip : target.strips) {
        count += std::min(Cutter(strip, cut.Next(strip)).Count(), kMaxDeviceTasks + 1);
        if (count > kMaxDeviceTasks) return count;
      }
    }
    return count;
  }

  // `position` is the device's position among the plan's devices that have copies for engines.
  DeviceTasks Take(int device, size_t position, const CopyPlanOptions& options) {
    const Sizes sizes = TaskSizes(device, options);
    const auto count = static_cast<size_t>(CountTasks(device, options));
    DeviceTasks result = {.device = device,
                          .local = sizes.local,
                          .tasks = {},
                          .counts = {},
                          .slices = 1,
                          .sums = {},
                          .proof_sums = {},
                          .lanes = TakeLanes(position)};
    std::vector<Queue> queues;
    for (const auto& [number, target] : targets_) queues.emplace_back(target, sizes);
    result.tasks.reserve(count);
    // Sources that start together start with different targets.
    if (!queues.empty()) {
      const auto first = static_cast<size_t>(std::max(device, 0)) % queues.size();
      std::rotate(queues.begin(), queues.begin() + static_cast<std::ptrdiff_t>(first),
                  queues.end());
    }
    TakeTurns(&queues, &result.tasks);
    for (const DeriveTask& task : derived_) {
      result.tasks.push_back(std::bit_cast<CopyTask>(task));
    }
    REFITD_CHECK(result.tasks.size() == count);
    result.counts = SortByKernel(&result.tasks);
    if (sizes.local) result.slices = SlicesOf(result);
    result.sums = RangeOf(result.tasks, &CopyTask::sum);
    result.proof_sums = RangeOf(result.tasks, &CopyTask::proof_sum);
    return result;
  }

 private:
  static constexpr int64_t kLocalShare = 16;
  static constexpr double kFirstTasks = 0.8;  // share of a target's bytes

  struct Target {
    std::vector<Strip> strips;
    int64_t bytes = 0;
  };

  // The most bytes of a target's first tasks, of its other tasks, and of tasks that are sliced.
  struct Sizes {
    bool local = false;
    int64_t first = 0;
    int64_t others = 0;
    int64_t sliced = 0;  // 0: none is
  };

  Sizes TaskSizes(int device, const CopyPlanOptions& options) const {
    const auto own = targets_.find(device);
    const int64_t away = bytes_ - (own == targets_.end() ? 0 : own->second.bytes) + copied_;
    const bool local = away <= (bytes_ + copied_) / kLocalShare;
    const int64_t wanted = bytes_ / std::max<int64_t>(options.tasks_wanted, 1);
    const int64_t most = std::clamp(wanted, options.least_task_bytes,
                                    std::max(options.least_task_bytes, options.most_task_bytes));
    const int64_t first = std::clamp(wanted, most, std::max(most, options.most_first_task_bytes));
    // Slices are small whatever the size of their task, and few tasks are planned sooner.
    const int64_t sliced = local && !digests_ ? std::max(most, options.most_first_task_bytes) : 0;
    return {.local = local, .first = first, .others = most, .sliced = sliced};
  }

  // Tells how large the tasks of a target's strips may be, one strip after the other.
  class Cut {
   public:
    Cut(const Target& target, const Sizes& sizes)
        : sizes_(sizes), share_(1 / static_cast<double>(std::max<int64_t>(target.bytes, 1))) {}
    int64_t Next(const Strip& strip) {
      done_ += static_cast<double>(StripBytes(strip)) * share_;
      if (sizes_.sliced > 0 && RunBytes(strip) >= int64_t{kSliceBytes}) return sizes_.sliced;
      return done_ < kFirstTasks ? sizes_.first : sizes_.others;
    }
    double share() const { return share_; }

   private:
    Sizes sizes_;
    double share_;     // share of one byte
    double done_ = 0;  // share of the target's bytes
  };

  // The tasks of one target, cut as they are taken.
  class Queue {
   public:
    Queue(const Target& target, const Sizes& sizes) : strips_(&target.strips), cut_(target, sizes) {
      Refill();
    }
    bool empty() const { return next_ == tasks_.size(); }
    double progress() const { return progress_; }
    void MoveTo(std::vector<CopyTask>* tasks) {
      const CopyTask& task = tasks_[next_++];
      progress_ += static_cast<double>(TaskBytes(task)) * cut_.share();
      tasks->push_back(task);
      if (empty()) Refill();
    }

   private:
    void Refill() {
      tasks_.clear();
      next_ = 0;
      while (tasks_.empty() && next_strip_ < strips_->size()) {
        const Strip& strip = (*strips_)[next_strip_++];
        Cutter(strip, cut_.Next(strip)).Run([this](const CopyTask& task) {
          tasks_.push_back(task);
        });
      }
    }

    const std::vector<Strip>* strips_;
    Cut cut_;
    double progress_ = 0;  // share of its bytes
    std::vector<CopyTask> tasks_;
    size_t next_ = 0;
    size_t next_strip_ = 0;
  };

  // Returns the lanes of copies. The copies to one target stay in one lane, one after the other.
  std::vector<EngineCopies> TakeLanes(size_t position) {
    std::vector<const EngineCopies*> turns;
    for (const auto& [target, copies] : copies_) turns.push_back(&copies);
    std::vector<EngineCopies> lanes(std::min(turns.size(), kEngineLanes));
    const auto append = [](auto* to, const auto& from) {
      to->insert(to->end(), from.begin(), from.end());
    };
    for (size_t turn = 0; turn < turns.size(); ++turn) {
      const EngineCopies& copies = *turns[(turn + position) % turns.size()];
      EngineCopies& lane = lanes[turn % kEngineLanes];
      append(&lane.sources, copies.sources);
      append(&lane.destinations, copies.destinations);
      append(&lane.bytes, copies.bytes);
    }
    copies_.clear();
    return lanes;
  }

  // The target that has received the smallest share of its bytes is next, so that all end together.
  static void TakeTurns(std::vector<Queue>* queues, std::vector<CopyTask>* tasks) {
    while (true) {
      Queue* least = nullptr;
      for (Queue& queue : *queues) {
        if (queue.empty()) continue;
        if (least == nullptr || queue.progress() < least->progress()) least = &queue;
      }
      if (least == nullptr) return;
      least->MoveTo(tasks);
    }
  }

  std::map<int, Target> targets_;
  std::vector<DeriveTask> derived_;
  std::map<int, EngineCopies> copies_;  // by target
  int64_t copied_ = 0;                  // bytes of these copies
  int64_t bytes_ = 0;
  bool digests_ = false;
};

using Devices = std::map<int, DeviceQueues>;

absl::Status TooManyTasks(int device) {
  return Error(absl::StatusCode::kResourceExhausted,
               "device {} would run more than {} tasks: the pieces' strides leave too few elements "
               "together",
               device, kMaxDeviceTasks);
}

absl::StatusOr<std::vector<DeviceTasks>> TakeAll(Devices* devices, const CopyPlanOptions& options) {
  // The number of tasks is checked before any task is made (P10).
  for (const auto& [device, queues] : *devices) {
    if (queues.CountTasks(device, options) > kMaxDeviceTasks) return TooManyTasks(device);
  }
  std::vector<DeviceTasks> all;
  size_t position = 0;
  for (auto& [device, queues] : *devices) {
    const bool copies = queues.has_copies();
    if (!queues.empty()) all.push_back(queues.Take(device, position, options));
    if (copies) ++position;
  }
  return all;
}

// Refuses a piece that alone needs too many tasks, by an error that names the piece.
absl::Status CheckStrip(const Strip& strip, const BoundPiece& piece,
                        const CopyPlanOptions& options) {
  const int64_t most =
      std::max({options.least_task_bytes, options.most_task_bytes, options.most_first_task_bytes});
  const int64_t count = Cutter(strip, most).Count();
  if (count <= kMaxDeviceTasks) return absl::OkStatus();
  return Error(absl::StatusCode::kResourceExhausted,
               "\"{}\" would take {} tasks, at most {} a device: its strides leave too few "
               "elements together",
               piece.name, count, kMaxDeviceTasks);
}

// ---- addresses ----

// The device and the addresses of one piece. CopyAddresses is asked for the device once, and for
// each address once.
class Endpoint {
 public:
  absl::StatusOr<int> Device(const BoundPiece& piece, CopyAddresses* addresses) {
    if (known_) return device_;
    REFITD_ASSIGN_OR_RETURN(device_, addresses->DeviceOf(piece));
    known_ = true;
    return device_;
  }
  absl::StatusOr<uint64_t> On(int device, const BoundPiece& piece, CopyAddresses* addresses) {
    for (const auto& [known, address] : addresses_) {
      if (known == device) return address;
    }
    REFITD_ASSIGN_OR_RETURN(const uint64_t address, addresses->On(device, piece));
    addresses_.emplace_back(device, address);
    return address;
  }

 private:
  bool known_ = false;
  int device_ = 0;
  absl::InlinedVector<std::pair<int, uint64_t>, 1> addresses_;
};

// Makes a strip that reads `box` of `piece` at the address that the piece's own metadata gives.
Strip SourcePass(const BoundPiece& piece, const Box& box, uint64_t address, size_t sum) {
  CopyTask task;
  task.proof = address + static_cast<uint64_t>(ByteDistance(box, piece.box, piece.strides,
                                                            ElementBytes(piece.dtype)));
  task.proof_sum = static_cast<uint32_t>(sum);
  return MakeStrip(task, piece, box, piece.strides);
}

// ---- transfers ----

class CopyPlanner {
 public:
  CopyPlanner(const Transfer& transfer, Verification verification, CopyAddresses* addresses,
              const CopyPlanOptions& options)
      : transfer_(transfer),
        verification_(verification),
        addresses_(addresses),
        options_(options) {}

  absl::StatusOr<CudaCopyPlan> Plan() {
    REFITD_ASSIGN_OR_RETURN(const BoundMoves bound, BindMoves(transfer_));
    const size_t sums =
        bound.sums.size() + (transfer_.want_source_digests ? transfer_.source.size() : 0);
    if (sums >= kNoSum) {
      return Error(absl::StatusCode::kInternal, "program: {} digests, more than tasks can number",
                   sums);
    }
    sources_.resize(transfer_.source.size());
    destinations_.resize(bound.sums.size());
    for (const BoundMove& move : bound.moves) REFITD_RETURN_IF_ERROR(AddMove(move));
    if (transfer_.want_source_digests) {
      REFITD_RETURN_IF_ERROR(AddSourceDigests(bound.sums.size()));
    }
    CudaCopyPlan plan;
    REFITD_ASSIGN_OR_RETURN(plan.devices, TakeAll(&devices_, options_));
    REFITD_ASSIGN_OR_RETURN(plan.readback, TakeAll(&readback_, options_));
    plan.sums = bound.sums;
    plan.bytes = bound.bytes;
    plan.source_sums = static_cast<uint32_t>(sums - bound.sums.size());
    return plan;
  }

 private:
  // The piece that lies in memory; of a computed one, the first shard.
  static const BoundPiece& PlaceOf(const BoundPiece& source) {
    return source.held == nullptr ? source : source.held->shards.front();
  }
  // Returns the addresses at which a device reaches the shards of a computed piece. `first`: that
  // of the first shard.
  absl::StatusOr<std::vector<uint64_t>> ShardsOn(int device, const HeldPiece& held,
                                                 uint64_t first) {
    std::vector<uint64_t> addresses = {first};
    for (size_t i = 1; i < held.shards.size(); ++i) {
      const BoundPiece& shard = held.shards[i];
      REFITD_ASSIGN_OR_RETURN(addresses.emplace_back(),
                              shards_[&shard].On(device, shard, addresses_));
    }
    return addresses;
  }
  size_t Number(const BoundPiece& source) const {
    return static_cast<size_t>(&source - transfer_.source.data());
  }

  absl::Status AddMove(const BoundMove& move) {
    Endpoint& source = sources_[Number(*move.source)];
    Endpoint& destination = destinations_[move.sum];
    REFITD_ASSIGN_OR_RETURN(const int from, source.Device(PlaceOf(*move.source), addresses_));
    REFITD_ASSIGN_OR_RETURN(const int to, destination.Device(*move.destination, addresses_));
    if (to == CopyAddresses::kHostMemory) {
      return Error(absl::StatusCode::kUnimplemented,
                   "\"{}\" at destination {} is in host memory: only device memory is written",
                   move.destination->name, move.destination_index);
    }
    const int device = from == CopyAddresses::kHostMemory ? to : from;
    REFITD_ASSIGN_OR_RETURN(const uint64_t source_address,
                            source.On(device, PlaceOf(*move.source), addresses_));
    REFITD_ASSIGN_OR_RETURN(const uint64_t destination_address,
                            destination.On(device, *move.destination, addresses_));
    const CopyTask task = TaskOf(move, source_address, destination_address);
    if (move.source->held != nullptr) {
      REFITD_ASSIGN_OR_RETURN(std::vector<uint64_t> held,
                              ShardsOn(device, *move.source->held, source_address));
      const DeriveMove derived = {.source = move.source,
                                  .piece = static_cast<uint32_t>(Number(*move.source)),
                                  .box = move.box,
                                  .held_addresses = std::move(held),
                                  .destination = task.destination,
                                  .destination_strides = move.destination->strides,
                                  .sum = task.sum,
                                  .proof_sum = task.proof_sum};
      REFITD_RETURN_IF_ERROR(devices_[device].AddDerived(to, derived, BytesOf(move)));
    } else if (AddToEngine(device, to, move, task)) {
      if (task.proof_sum != kNoSum) {
        const Strip pass = SourcePass(*move.source, *move.box, source_address, move.sum);
        REFITD_RETURN_IF_ERROR(CheckStrip(pass, *move.source, options_));
        devices_[device].Add(device, pass);
      }
    } else {
      const Strip strip = MakeStrip(task, *move.source, *move.box, move.destination->strides);
      REFITD_RETURN_IF_ERROR(CheckStrip(strip, *move.destination, options_));
      devices_[device].Add(to, strip);
    }
    if (!ReadbackNow(move)) return absl::OkStatus();
    REFITD_ASSIGN_OR_RETURN(const uint64_t own, destination.On(to, *move.destination, addresses_));
    const Strip pass = SourcePass(*move.destination, *move.box, own, move.sum);
    REFITD_RETURN_IF_ERROR(CheckStrip(pass, *move.destination, options_));
    readback_[to].Add(to, pass);
    return absl::OkStatus();
  }

  CopyTask TaskOf(const BoundMove& move, uint64_t source, uint64_t destination) const {
    CopyTask task;
    task.source = source + static_cast<uint64_t>(move.from);
    task.destination = destination + static_cast<uint64_t>(move.to);
    if (verification_ == Verification::kOff) return task;
    const BoundPiece& piece = *move.source;
    task.proof = source + static_cast<uint64_t>(ByteDistance(*move.box, piece.box, piece.strides,
                                                             ElementBytes(piece.dtype)));
    task.proof_sum = static_cast<uint32_t>(move.sum);
    // Under kReadback the second pass reads the destination, so the copy needs no digest.
    if (verification_ == Verification::kTransfer) task.sum = static_cast<uint32_t>(move.sum);
    return task;
  }

  // P1: only the kernel digests what it stores, so copy engines can't be used where a digest of the
  // stored bytes is wanted.
  bool AddToEngine(int device, int to, const BoundMove& move, const CopyTask& task) {
    if (options_.engine_bytes <= 0 || device == to || task.sum != kNoSum) return false;
    CopyTask bytes;
    bytes.source = task.source;
    bytes.destination = task.destination;
    const Strip strip = MakeStrip(bytes, *move.source, *move.box, move.destination->strides);
    if (!strip.loops.empty() || RunBytes(strip) < options_.engine_bytes) return false;
    devices_[device].AddCopy(to, task.source, task.destination, RunBytes(strip));
    return true;
  }

  static int64_t BytesOf(const BoundMove& move) {
    return ElementCount(*move.box) * ElementBytes(move.destination->dtype);
  }

  bool ReadbackNow(const BoundMove& move) const {
    return verification_ == Verification::kReadback &&
           move.destination_index < transfer_.readback_now.size() &&
           transfer_.readback_now[move.destination_index];
  }

  // Pieces in host memory are digested by the first device that runs tasks.
  absl::Status AddSourceDigests(size_t first_sum) {
    const int spare = devices_.empty() ? 0 : devices_.begin()->first;
    for (size_t i = 0; i < transfer_.source.size(); ++i) {
      const BoundPiece& piece = transfer_.source[i];
      if (ElementCount(piece.box) <= 0 || !WantsDigest(transfer_, piece)) continue;
      REFITD_ASSIGN_OR_RETURN(const int home, sources_[i].Device(PlaceOf(piece), addresses_));
      const int device = home == CopyAddresses::kHostMemory ? spare : home;
      REFITD_ASSIGN_OR_RETURN(const uint64_t address,
                              sources_[i].On(device, PlaceOf(piece), addresses_));
      if (piece.held != nullptr) {
        REFITD_ASSIGN_OR_RETURN(std::vector<uint64_t> held, ShardsOn(device, *piece.held, address));
        const DeriveMove digest = {.source = &piece,
                                   .piece = static_cast<uint32_t>(i),
                                   .box = &piece.box,
                                   .held_addresses = std::move(held),
                                   .proof_sum = static_cast<uint32_t>(first_sum + i)};
        REFITD_RETURN_IF_ERROR(devices_[device].AddDerived(
            device, digest, ElementCount(piece.box) * ElementBytes(piece.dtype)));
        continue;
      }
      const Strip pass = SourcePass(piece, piece.box, address, first_sum + i);
      REFITD_RETURN_IF_ERROR(CheckStrip(pass, piece, options_));
      devices_[device].Add(device, pass);
    }
    return absl::OkStatus();
  }

  const Transfer& transfer_;
  const Verification verification_;
  CopyAddresses* const addresses_;
  const CopyPlanOptions options_;
  std::vector<Endpoint> sources_;                            // per source piece
  absl::flat_hash_map<const BoundPiece*, Endpoint> shards_;  // of computed pieces, not the first
  std::vector<Endpoint> destinations_;  // per sum: destination pieces that are written
  Devices devices_;
  Devices readback_;
};

}  // namespace

std::array<size_t, kCopyKernels> SortByKernel(std::vector<CopyTask>* tasks) {
  std::array<size_t, kCopyKernels> counts{};
  for (const CopyTask& task : *tasks) ++counts[static_cast<size_t>(KernelOf(task))];
  auto begin = tasks->begin();
  for (int k = 0; k < kCopyKernels; ++k) {
    const auto count = static_cast<std::ptrdiff_t>(counts[static_cast<size_t>(k)]);
    if (count > 0 && count < tasks->end() - begin) {
      std::stable_partition(begin, tasks->end(), [k](const CopyTask& task) {
        return KernelOf(task) == static_cast<CopyKernel>(k);
      });
    }
    begin += count;
  }
  return counts;
}

absl::StatusOr<CudaCopyPlan> PlanCopies(const Transfer& transfer, Verification verification,
                                        CopyAddresses* addresses, const CopyPlanOptions& options) {
  return CopyPlanner(transfer, verification, addresses, options).Plan();
}

absl::StatusOr<CudaCopyPlan> PlanReadback(const ReadbackJob& job, CopyAddresses* addresses,
                                          const CopyPlanOptions& options) {
  std::vector<int> homes;
  homes.reserve(job.pieces.size());
  int spare = CopyAddresses::kHostMemory;
  for (const ReadbackPiece& readback : job.pieces) {
    REFITD_RETURN_IF_ERROR(CheckRanks(readback.piece));
    REFITD_ASSIGN_OR_RETURN(const int home, addresses->DeviceOf(readback.piece));
    homes.push_back(home);
    if (home != CopyAddresses::kHostMemory && (spare < 0 || home < spare)) spare = home;
  }
  Devices devices;
  for (size_t i = 0; i < job.pieces.size(); ++i) {
    const BoundPiece& piece = job.pieces[i].piece;
    if (ElementCount(piece.box) <= 0) continue;
    const int device = homes[i] == CopyAddresses::kHostMemory ? std::max(spare, 0) : homes[i];
    REFITD_ASSIGN_OR_RETURN(const uint64_t address, addresses->On(device, piece));
    const Strip pass = SourcePass(piece, piece.box, address, i);
    REFITD_RETURN_IF_ERROR(CheckStrip(pass, piece, options));
    devices[device].Add(device, pass);
  }
  CudaCopyPlan plan;
  REFITD_ASSIGN_OR_RETURN(plan.devices, TakeAll(&devices, options));
  plan.source_sums = static_cast<uint32_t>(job.pieces.size());
  return plan;
}

}  // namespace refitd
