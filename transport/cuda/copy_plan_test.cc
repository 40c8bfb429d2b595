#include "transport/cuda/copy_plan.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "transport/cuda/copy_interpreter_testing.h"
#include "transport/digest/digest.h"
#include "transport/host/host_transport.h"
#include "transport/transport_testing.h"

namespace refitd {
namespace {

constexpr uint64_t kSeed = 4711;
constexpr char kPoison = '\xcd';
constexpr int kDevices = 6;

// Memory that each device sees at an address of its own, as peers' mappings are; the last view is
// the owner's.
class Views {
 public:
  static constexpr size_t kBytes = size_t{8} << 20;

  Views() {
    const int fd = memfd_create("views", 0);
    REQUIRE(fd >= 0);
    REQUIRE(ftruncate(fd, kBytes) == 0);
    for (char*& view : views_) {
      void* const at = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      REQUIRE(at != MAP_FAILED);
      view = static_cast<char*>(at);
    }
    close(fd);
    std::memset(data(), kPoison, kBytes);
  }
  ~Views() {
    for (char* view : views_) munmap(view, kBytes);
  }
  Views(const Views&) = delete;
  Views& operator=(const Views&) = delete;

  char* data() const { return views_[kDevices]; }
  char* of(int device) const { return views_[static_cast<size_t>(device)]; }
  size_t used() const { return used_; }

  // Makes memory at an address of this alignment or a worse one, with guard bytes around it.
  char* Take(Rng* rng, int64_t bytes, int64_t alignment) {
    used_ = (used_ + 511) / 512 * 512;
    const size_t at = used_ + static_cast<size_t>(Pick(rng, 0, 32 / alignment) * alignment);
    used_ = at + static_cast<size_t>(bytes) + 64;
    REQUIRE(used_ <= kBytes);
    return data() + at;
  }

 private:
  std::array<char*, kDevices + 1> views_ = {};
  size_t used_ = 64;
};

// Tells the device of a piece by the piece's address.
class FakeAddresses : public CopyAddresses {
 public:
  explicit FakeAddresses(const Views& views) : views_(views) {}

  void Put(const char* data, int device) { devices_[data] = device; }
  void Hide(int from) { hidden_from_ = from; }

  absl::StatusOr<int> DeviceOf(const BoundPiece& piece) override {
    const auto found = devices_.find(piece.data);
    if (found == devices_.end()) return absl::InternalError("no region");
    return found->second;
  }
  absl::StatusOr<uint64_t> On(int device, const BoundPiece& piece) override {
    ++questions;
    if (device == hidden_from_) return absl::UnavailableError("no peer access");
    return reinterpret_cast<uint64_t>(views_.of(device) + (piece.data - views_.data()));
  }

  int questions = 0;

 private:
  const Views& views_;
  std::map<const char*, int> devices_;
  int hidden_from_ = kHostMemory - 1;
};

// Strides of a padded array of `extent`, dimensions possibly stored in another order.
Dims RandomStrides(Rng* rng, const Dims& extent) {
  Dims strides(extent.size(), 0);
  std::vector<size_t> order(extent.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (Pick(rng, 0, 5) == 0) std::shuffle(order.begin(), order.end(), *rng);
  int64_t stride = Pick(rng, 0, 4) == 0 ? Pick(rng, 2, 4) : 1;  // elements may lie apart
  for (size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = stride;
    stride *= extent[order[i]];
    if (Pick(rng, 0, 3) == 0) stride += Pick(rng, 1, 5);
  }
  return strides;
}

Dims RandomShape(Rng* rng) {
  switch (Pick(rng, 0, 4)) {
    case 0:
      return {Pick(rng, 1, 70'000)};
    case 1:
      return {Pick(rng, 1, 90), 64 * Pick(rng, 1, 12)};
    case 2:
      return {Pick(rng, 30, 60), Pick(rng, 1, 3), 257};
    default: {
      Dims shape;
      const int64_t rank = Pick(rng, 0, kMaxDims);
      for (int64_t d = 0; d < rank; ++d) shape.push_back(Pick(rng, 1, rank > 4 ? 3 : 12));
      return shape;
    }
  }
}

// A partition of `shape` into a few boxes.
std::vector<Box> Partition(Rng* rng, const Dims& shape) {
  std::vector<Box> boxes = {WholeBox(shape)};
  for (int cuts = static_cast<int>(Pick(rng, 0, 3)); cuts > 0 && !shape.empty(); --cuts) {
    Box& box = boxes[static_cast<size_t>(Pick(rng, 0, static_cast<int64_t>(boxes.size()) - 1))];
    const auto d = static_cast<size_t>(Pick(rng, 0, static_cast<int64_t>(shape.size()) - 1));
    if (box.extent[d] < 2) continue;
    int64_t cut = Pick(rng, 1, box.extent[d] - 1);
    if (cut >= 64) cut = cut / 64 * 64;
    Box rest = box;
    rest.offset[d] += cut;
    rest.extent[d] -= cut;
    box.extent[d] = cut;
    boxes.push_back(std::move(rest));
  }
  return boxes;
}

// A random transfer, its memory, and the devices that own the memory.
struct Case {
  Views views;
  FakeAddresses addresses{views};
  Transfer transfer;
  std::vector<std::pair<char*, size_t>> sources;  // memory that is not poisoned

  BoundPiece AddPiece(Rng* rng, int64_t tensor, DType dtype, const Dims& shape, const Box& box,
                      int device) {
    const int64_t element_bytes = ElementBytes(dtype);
    Dims strides = RandomStrides(rng, box.extent);
    // Memory is mostly aligned to elements, and sometimes not even to elements.
    const int64_t alignment =
        std::array<int64_t, 5>{1, element_bytes, 16, 16, 32}[static_cast<size_t>(Pick(rng, 0, 4))];
    char* const data =
        views.Take(rng, SpanElements(box.extent, strides) * element_bytes, alignment);
    addresses.Put(data, device);
    return {.dtype = dtype,
            .shape = shape,
            .box = box,
            .strides = std::move(strides),
            .data = data,
            .name = "tensor." + std::to_string(tensor)};
  }
};

void AddMoves(Transfer* transfer, size_t first_source, uint32_t destination, uint32_t piece) {
  const BoundPiece& to = transfer->destinations[destination][piece];
  for (size_t s = first_source; s < transfer->source.size(); ++s) {
    const BoundPiece& from = transfer->source[s];
    const std::optional<Box> box = Intersect(from.box, to.box);
    if (!box.has_value()) continue;
    transfer->plan.moves.push_back({.source = 0,
                                    .source_piece = static_cast<uint32_t>(s),
                                    .destination = destination,
                                    .destination_piece = piece,
                                    .box = *box,
                                    .source_byte_offset = Offset(from, *box),
                                    .destination_byte_offset = Offset(to, *box)});
  }
}

void AddTensor(Case* c, Rng* rng, int64_t tensor, const Dims& shape, DType dtype,
               bool host_sources) {
  Transfer& transfer = c->transfer;
  const size_t first_source = transfer.source.size();
  for (const Box& box : Partition(rng, shape)) {
    const int device =
        host_sources ? CopyAddresses::kHostMemory : static_cast<int>(Pick(rng, 0, kDevices - 1));
    transfer.source.push_back(c->AddPiece(rng, tensor, dtype, shape, box, device));
    const BoundPiece& piece = transfer.source.back();
    const auto bytes =
        static_cast<size_t>(SpanElements(box.extent, piece.strides) * ElementBytes(dtype));
    for (size_t i = 0; i < bytes; ++i) piece.data[i] = static_cast<char>((*rng)());
  }
  for (uint32_t d = 0; d < transfer.destinations.size(); ++d) {
    for (const Box& box : Partition(rng, shape)) {
      if (Pick(rng, 0, 5) == 0) continue;
      const int device = static_cast<int>(Pick(rng, 0, kDevices - 1));
      auto& pieces = transfer.destinations[d];
      pieces.push_back(c->AddPiece(rng, tensor, dtype, shape, box, device));
      AddMoves(&transfer, first_source, d, static_cast<uint32_t>(pieces.size() - 1));
    }
  }
}

std::unique_ptr<Case> RandomCase(Rng* rng) {
  auto c = std::make_unique<Case>();
  c->transfer.label = "random";
  c->transfer.destinations.resize(static_cast<size_t>(Pick(rng, 1, 3)));
  const int64_t tensors = Pick(rng, 0, 4);
  for (int64_t t = 0; t < tensors; ++t) {
    AddTensor(c.get(), rng, t, RandomShape(rng), TypeOf(int64_t{1} << Pick(rng, 0, 3)),
              Pick(rng, 0, 5) == 0);
  }
  std::shuffle(c->transfer.plan.moves.begin(), c->transfer.plan.moves.end(), *rng);
  return c;
}

std::vector<char> Snapshot(const Case& c) {
  return {c.views.data(), c.views.data() + c.views.used()};
}
void Restore(Case* c, const std::vector<char>& bytes) {
  std::memcpy(c->views.data(), bytes.data(), bytes.size());
}

TransferResult RunOnHost(const Transfer& transfer) {
  const auto transport = MakeHostTransport({.threads = 1});
  return Run(transport.get(), transfer);
}

struct Sums {
  std::vector<unsigned long long> stored;
  std::vector<unsigned long long> source;
};

void RunAll(const std::vector<DeviceTasks>& devices, uint32_t threads,
            std::vector<unsigned long long>* stored, std::vector<unsigned long long>* source) {
  for (const DeviceTasks& device : devices) {
    const CopyTask* first = device.tasks.data();
    for (int k = 0; k < kCopyKernels; ++k) {
      const auto kernel = static_cast<CopyKernel>(k);
      const size_t count = device.counts[static_cast<size_t>(k)];
      REQUIRE(std::all_of(first, first + count,
                          [kernel](const CopyTask& task) { return KernelOf(task) == kernel; }));
      uint32_t next = 0;
      RunTasks({.tasks = first,
                .task_count = static_cast<uint32_t>(count),
                .slices = kernel == CopyKernel::kPlain ? device.slices : 1,
                .next_task = &next,
                .stored_sums = stored->data(),
                .source_sums = source->data()},
               threads);
      first += count;
    }
    REQUIRE(first == device.tasks.data() + device.tasks.size());
    for (const EngineCopies& copies : device.lanes) {
      for (size_t i = 0; i < copies.bytes.size(); ++i) {
        std::memcpy(reinterpret_cast<void*>(copies.destinations[i]),
                    reinterpret_cast<const void*>(copies.sources[i]), copies.bytes[i]);
      }
    }
  }
}

Sums Run(const CudaCopyPlan& plan, uint32_t threads) {
  Sums sums;
  sums.stored.resize(static_cast<size_t>(plan.task_sums()) + 1);
  sums.source.resize(static_cast<size_t>(plan.task_sums()) + 1);
  RunAll(plan.devices, threads, &sums.stored, &sums.source);
  RunAll(plan.readback, threads, &sums.stored, &sums.stored);
  return sums;
}

// Small tasks, so that small transfers are cut too.
CopyPlanOptions SmallTasks(Rng* rng) {
  CopyPlanOptions options;
  options.most_task_bytes = int64_t{1} << Pick(rng, 8, 17);
  options.least_task_bytes = std::min<int64_t>(options.most_task_bytes, 1024);
  options.tasks_wanted = Pick(rng, 1, 50);
  if (Pick(rng, 0, 1) == 0) options.engine_bytes = 4096;
  return options;
}

bool ReadbackNow(const Transfer& transfer, uint32_t destination) {
  return destination < transfer.readback_now.size() && transfer.readback_now[destination];
}

void CheckSums(const Transfer& transfer, Verification verification, const CudaCopyPlan& plan,
               const Sums& sums, const std::vector<PieceDigest>& want) {
  REQUIRE(plan.sums.size() == want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    REQUIRE(plan.sums[i].destination == want[i].destination);
    REQUIRE(plan.sums[i].piece == want[i].piece);
    if (verification == Verification::kOff) continue;
    REQUIRE(sums.source[i] == want[i].digest);
    const bool compared =
        verification == Verification::kTransfer || ReadbackNow(transfer, want[i].destination);
    REQUIRE(sums.stored[i] == (compared ? want[i].digest : 0));
  }
}

TEST_CASE("Tasks leave the bytes and the digests that the host transport leaves") {
  Rng rng(kSeed);
  for (int round = 0; round < 150; ++round) {
    INFO("seed " << kSeed << ", round " << round);
    const auto c = RandomCase(&rng);
    c->transfer.want_source_digests = Pick(&rng, 0, 1) == 0;
    const std::vector<char> before = Snapshot(*c);
    c->transfer.verification = Verification::kReadback;
    const TransferResult want = RunOnHost(c->transfer);
    REQUIRE(want.status.ok());
    const std::vector<char> after = Snapshot(*c);
    c->transfer.readback_now = {true, false};

    for (const Verification verification :
         {Verification::kOff, Verification::kTransfer, Verification::kReadback}) {
      Restore(c.get(), before);
      const auto plan = PlanCopies(c->transfer, verification, &c->addresses, SmallTasks(&rng));
      INFO(plan.status().ToString());
      REQUIRE(plan.ok());
      REQUIRE(plan->bytes == want.bytes_written);
      const std::array<uint32_t, 4> threads = {1, 32, 96, 512};
      const Sums sums = Run(*plan, threads[static_cast<size_t>(round) % threads.size()]);
      REQUIRE(Snapshot(*c) == after);
      CheckSums(c->transfer, verification, *plan, sums, want.expected);
      for (size_t i = 0; i < want.source_digests.size(); ++i) {
        REQUIRE(sums.source[plan->sums.size() + i] == want.source_digests[i]);
      }
    }
  }
}

TEST_CASE("Readback tasks digest pieces where they lie") {
  Rng rng(kSeed + 1);
  for (int round = 0; round < 60; ++round) {
    INFO("seed " << kSeed + 1 << ", round " << round);
    const auto c = RandomCase(&rng);
    ReadbackJob job;
    for (const BoundPiece& piece : c->transfer.source) job.pieces.push_back({.piece = piece});
    const auto plan = PlanReadback(job, &c->addresses, SmallTasks(&rng));
    REQUIRE(plan.ok());
    REQUIRE(plan->task_sums() == static_cast<int64_t>(job.pieces.size()));
    const Sums sums = Run(*plan, 64);
    for (size_t i = 0; i < job.pieces.size(); ++i) {
      const BoundPiece& piece = job.pieces[i].piece;
      REQUIRE(sums.source[i] == DigestBox(piece.data, piece.strides, piece.box, piece.shape,
                                          static_cast<int>(ElementBytes(piece.dtype))));
    }
  }
}

// ---- one tensor, dense everywhere ----

// A tensor [rows, columns] of 2-byte elements on device 0, which destination d takes as a whole on
// device devices[d].
std::unique_ptr<Case> DenseCase(Rng* rng, const Dims& shape, const std::vector<int>& devices) {
  auto c = std::make_unique<Case>();
  const Box whole = WholeBox(shape);
  const auto add = [&](int device) {
    char* const data = c->views.Take(rng, ElementCount(whole) * 2, 32);
    c->addresses.Put(data, device);
    return BoundPiece{.dtype = DType::kBFloat16,
                      .shape = shape,
                      .box = whole,
                      .strides = RowMajorStrides(shape),
                      .data = data,
                      .name = "tensor.0"};
  };
  c->transfer.source.push_back(add(0));
  char* const from = c->transfer.source[0].data;
  for (int64_t i = 0; i < 2 * ElementCount(whole); ++i) from[i] = static_cast<char>((*rng)());
  for (const int device : devices) {
    c->transfer.destinations.push_back({add(device)});
    AddMoves(&c->transfer, 0, static_cast<uint32_t>(c->transfer.destinations.size() - 1), 0);
  }
  return c;
}

TEST_CASE("A wrong offset in a program shows as sums that differ") {
  Rng rng(kSeed + 2);
  for (const bool at_source : {true, false}) {
    for (const int64_t off : {1, 2, 16, 1024}) {
      INFO("off by " << off << (at_source ? " at the source" : " at the destination"));
      const auto c = DenseCase(&rng, {600, 512}, {1, 2});
      CopyMove& move = c->transfer.plan.moves[1];
      move.box = {{0, 0}, {500, 512}};
      (at_source ? move.source_byte_offset : move.destination_byte_offset) += off;
      c->transfer.readback_now = {true, true};
      const auto transfer = PlanCopies(c->transfer, Verification::kTransfer, &c->addresses);
      REQUIRE(transfer.ok());
      Sums sums = Run(*transfer, 512);
      CHECK(sums.stored[0] == sums.source[0]);
      // A digest gives each stored byte the index that the metadata says, whatever address it was
      // written to. So bytes that went to a wrong address show in a readback only.
      CHECK((sums.stored[1] != sums.source[1]) == at_source);
      const auto readback = PlanCopies(c->transfer, Verification::kReadback, &c->addresses);
      REQUIRE(readback.ok());
      sums = Run(*readback, 512);
      CHECK(sums.stored[0] == sums.source[0]);
      CHECK(sums.stored[1] != sums.source[1]);
    }
  }
}

TEST_CASE("Malformed programs are refused as the host transport refuses them") {
  Rng rng(kSeed + 3);
  const auto c = DenseCase(&rng, {20, 30}, {1});
  c->transfer.label = "bad";
  const std::vector<char> before = Snapshot(*c);
  for (const auto& [what, transfer] : Spoilt(c->transfer)) {
    INFO(what);
    const auto plan = PlanCopies(transfer, Verification::kTransfer, &c->addresses);
    const TransferResult host = RunOnHost(transfer);
    CHECK(plan.status().code() == absl::StatusCode::kInternal);
    CHECK(host.status.code() == absl::StatusCode::kInternal);
    CHECK("bad: " + std::string(plan.status().message()) == std::string(host.status.message()));
  }
  CHECK(Snapshot(*c) == before);
}

TEST_CASE("Unknown, unreachable and host destinations are errors that say so") {
  Rng rng(kSeed + 4);
  const auto plan = [](Case* c) {
    return PlanCopies(c->transfer, Verification::kOff, &c->addresses).status().code();
  };
  auto c = DenseCase(&rng, {20, 30}, {1});
  c->addresses.Hide(0);
  CHECK(plan(c.get()) == absl::StatusCode::kUnavailable);
  c = DenseCase(&rng, {20, 30}, {CopyAddresses::kHostMemory});
  CHECK(plan(c.get()) == absl::StatusCode::kUnimplemented);
  c = DenseCase(&rng, {20, 30}, {1});
  c->transfer.destinations[0][0].data += 1;
  CHECK(plan(c.get()) == absl::StatusCode::kInternal);
}

// ---- what tasks look like ----

std::vector<CopyTask> OnlyDevice(const CudaCopyPlan& plan) {
  REQUIRE(plan.devices.size() == 1);
  return plan.devices[0].tasks;
}

int64_t BytesOf(const CopyTask& task) {
  return int64_t{task.run} * task.element_bytes * task.count[0] * task.count[1] * task.count[2];
}

TEST_CASE("Tasks are balanced, and no more than their bytes need") {
  Rng rng(kSeed + 5);
  const auto c = DenseCase(&rng, {1000, 999}, {1});
  const int64_t bytes = 2 * 1000 * 999;
  const auto plan = PlanCopies(c->transfer, Verification::kTransfer, &c->addresses,
                               {.most_task_bytes = 65536, .tasks_wanted = 1});
  REQUIRE(plan.ok());
  const std::vector<CopyTask> tasks = OnlyDevice(*plan);
  CHECK(static_cast<int64_t>(tasks.size()) == (bytes + 65535) / 65536);
  int64_t sum = 0;
  for (const CopyTask& task : tasks) {
    sum += BytesOf(task);
    CHECK(BytesOf(task) <= 65536);
    CHECK((task.source - tasks[0].source) % 512 == 0);
  }
  CHECK(sum == bytes);
  CHECK(BytesOf(tasks.front()) - BytesOf(tasks.back()) <= 512 * static_cast<int64_t>(tasks.size()));
}

TEST_CASE("Rows of a slice become one task, and rows that touch one run") {
  Rng rng(kSeed + 6);
  const auto c = DenseCase(&rng, {64, 1024}, {1});
  CopyMove& move = c->transfer.plan.moves[0];
  move.box = {{0, 192}, {64, 192}};
  move.source_byte_offset = move.destination_byte_offset = 384;
  auto tasks = OnlyDevice(*PlanCopies(c->transfer, Verification::kTransfer, &c->addresses));
  REQUIRE(tasks.size() == 1);
  CHECK(tasks[0].run == 192);
  CHECK(tasks[0].count[2] == 64);
  CHECK(tasks[0].source_step[2] == 2048);
  CHECK(tasks[0].index_step[2] == 1024);
  CHECK(tasks[0].index == 192);

  // Columns [192, 384) dense at both ends: rows touch in memory, but not in the index.
  for (BoundPiece* piece : {&c->transfer.source[0], &c->transfer.destinations[0][0]}) {
    piece->box = move.box;
    piece->strides = {192, 1};
  }
  move.source_byte_offset = move.destination_byte_offset = 0;
  tasks = OnlyDevice(*PlanCopies(c->transfer, Verification::kTransfer, &c->addresses));
  REQUIRE(tasks.size() == 1);
  CHECK(tasks[0].run == 192);
  tasks = OnlyDevice(*PlanCopies(c->transfer, Verification::kOff, &c->addresses));
  REQUIRE(tasks.size() == 1);
  CHECK(tasks[0].run == 192 * 64);
}

TEST_CASE("A device that keeps nearly all bytes to itself is bound by its memory") {
  Rng rng(kSeed + 8);
  const auto local = [&rng](const std::vector<int>& targets) {
    const auto c = DenseCase(&rng, {64, 1024}, targets);
    const auto plan = PlanCopies(c->transfer, Verification::kOff, &c->addresses);
    REQUIRE(plan.ok());
    REQUIRE(plan->devices.size() == 1);
    return plan->devices[0].local;
  };
  const int own = 0;
  CHECK(local({own}));
  CHECK_FALSE(local({own + 1}));
  std::vector<int> targets(15, own);
  targets.push_back(own + 1);
  CHECK(local(targets));
  targets.push_back(own + 1);
  CHECK_FALSE(local(targets));
}

TEST_CASE("Long runs within a device become few tasks if nothing is digested") {
  Rng rng(kSeed + 10);
  const auto c = DenseCase(&rng, {3, 1 << 19}, {0});
  const auto tasks = [&c](Verification verification) {
    return OnlyDevice(*PlanCopies(c->transfer, verification, &c->addresses)).size();
  };
  CHECK(tasks(Verification::kOff) == 4);        // in slices
  CHECK(tasks(Verification::kTransfer) == 96);  // of 32 KiB, a block each
}

TEST_CASE("Destinations take turns, chunk by chunk, each source starting with another") {
  Rng rng(kSeed + 7);
  const auto c = DenseCase(&rng, {256, 1024}, {0, 1, 2, 3});
  const CopyPlanOptions options = {.most_task_bytes = 16384, .least_task_bytes = 16384};
  for (const int source : {0, 2}) {
    c->addresses.Put(c->transfer.source[0].data, source);
    const auto plan = PlanCopies(c->transfer, Verification::kOff, &c->addresses, options);
    REQUIRE(plan.ok());
    CHECK(plan->devices[0].device == source);
    CHECK_FALSE(plan->devices[0].local);
    const std::vector<CopyTask> tasks = OnlyDevice(*plan);
    REQUIRE(tasks.size() == 4 * 32);
    const char* const view = c->views.of(source);
    for (size_t i = 0; i < tasks.size(); ++i) {
      const size_t target = (i + static_cast<size_t>(source)) % 4;
      const BoundPiece& piece = c->transfer.destinations[target][0];
      const auto at = reinterpret_cast<uint64_t>(view + (piece.data - c->views.data()));
      CHECK(tasks[i].destination >= at);
      CHECK(tasks[i].destination < at + 2 * 256 * 1024);
      CHECK(tasks[i].source == tasks[i / 4 * 4].source);
    }
  }
}

TEST_CASE("Host sources run on their destination's device, each address asked for once") {
  Rng rng(kSeed + 8);
  const auto c = DenseCase(&rng, {64, 64}, {1, 3});
  c->addresses.Put(c->transfer.source[0].data, CopyAddresses::kHostMemory);
  const auto plan = PlanCopies(c->transfer, Verification::kTransfer, &c->addresses);
  REQUIRE(plan.ok());
  REQUIRE(plan->devices.size() == 2);
  CHECK(plan->devices[0].device == 1);
  CHECK(plan->devices[1].device == 3);
  CHECK(c->addresses.questions == 4);
}

TEST_CASE("Long runs go to other devices by copy engines where the kernel need not digest them") {
  Rng rng(kSeed + 9);
  // Device 0 is the source's own. Of the five other devices two must share a lane.
  const auto c = DenseCase(&rng, {64, 64}, {0, 1, 2, 3, 4, 5});
  const auto address = [&c](size_t d) {
    return *c->addresses.On(0, c->transfer.destinations[d][0]);
  };
  const CopyPlanOptions options = {.engine_bytes = 8192};
  const auto off = PlanCopies(c->transfer, Verification::kOff, &c->addresses, options);
  REQUIRE(off.ok());
  REQUIRE(off->devices.size() == 1);
  for (const CopyTask& task : off->devices[0].tasks) {
    CHECK(task.destination >= address(0));
    CHECK(task.destination < address(0) + 8192);
  }
  REQUIRE(off->devices[0].lanes.size() == kEngineLanes);
  std::vector<uint64_t> found;
  for (const EngineCopies& copies : off->devices[0].lanes) {
    CHECK(copies.bytes == std::vector<size_t>(copies.bytes.size(), 8192));
    CHECK(copies.bytes.size() <= 2);
    REQUIRE(copies.sources.size() == copies.bytes.size());
    REQUIRE(copies.destinations.size() == copies.bytes.size());
    found.insert(found.end(), copies.destinations.begin(), copies.destinations.end());
  }
  std::vector<uint64_t> want;
  for (size_t d = 1; d < c->transfer.destinations.size(); ++d) {
    want.push_back(address(d));
  }
  std::sort(found.begin(), found.end());
  std::sort(want.begin(), want.end());
  CHECK(found == want);

  const auto digested = PlanCopies(c->transfer, Verification::kTransfer, &c->addresses, options);
  REQUIRE(digested.ok());
  CHECK(digested->devices[0].lanes.empty());

  // The kernel digests the source beside the engines' copies.
  const auto readback = PlanCopies(c->transfer, Verification::kReadback, &c->addresses, options);
  REQUIRE(readback.ok());
  CHECK(readback->devices[0].lanes.size() == kEngineLanes);
  for (const CopyTask& task : readback->devices[0].tasks) CHECK(task.proof_sum != kNoSum);

  const auto longer = PlanCopies(c->transfer, Verification::kOff, &c->addresses,
                                 CopyPlanOptions{.engine_bytes = 8193});
  REQUIRE(longer.ok());
  CHECK(longer->devices[0].lanes.empty());
}

TEST_CASE("Sources begin their copies by engines with different receivers") {
  Rng rng(kSeed + 11);
  // Devices 0 and 2 copy to two other devices each. Device 1, which comes between them, has work
  // for the kernel only.
  const auto c = DenseCase(&rng, {64, 64}, {4, 5});
  const auto add = [&](int device) {
    BoundPiece piece = c->transfer.source[0];
    piece.data = c->views.Take(&rng, ElementCount(piece.box) * 2, 32);
    piece.name = "tensor.1";
    c->addresses.Put(piece.data, device);
    return piece;
  };
  c->transfer.source.push_back(add(2));
  for (uint32_t d = 0; d < 2; ++d) {
    c->transfer.destinations[d].push_back(add(static_cast<int>(d) + 4));
    c->transfer.plan.moves.push_back({.source = 0,
                                      .source_piece = 1,
                                      .destination = d,
                                      .destination_piece = 1,
                                      .box = c->transfer.source[1].box});
  }
  BoundPiece small = add(1);
  small.box.extent[0] = 1;
  BoundPiece to = add(4);
  to.box = small.box;
  c->transfer.source.push_back(small);
  c->transfer.destinations[0].push_back(to);
  c->transfer.plan.moves.push_back(
      {.source = 0, .source_piece = 2, .destination = 0, .destination_piece = 2, .box = small.box});
  const auto plan = PlanCopies(c->transfer, Verification::kOff, &c->addresses,
                               CopyPlanOptions{.engine_bytes = 8192});
  INFO(plan.status().ToString());
  REQUIRE(plan.ok());
  REQUIRE(plan->devices.size() == 3);
  CHECK(plan->devices[1].lanes.empty());
  for (size_t source = 0; source < 2; ++source) {
    const DeviceTasks& device = plan->devices[2 * source];
    REQUIRE(device.lanes.size() == 2);
    for (size_t lane = 0; lane < 2; ++lane) {
      const BoundPiece& to = c->transfer.destinations[(source + lane) % 2][source];
      CHECK(device.lanes[lane].destinations ==
            std::vector<unsigned long long>{*c->addresses.On(device.device, to)});
    }
  }
}

TEST_CASE("What lies together but is no range of the tensor is moved by copy engines as well") {
  Rng rng(kSeed + 10);
  // Two halves of the columns, each stored densely on both sides.
  const auto c = DenseCase(&rng, {64, 64}, {1});
  const Box half = {.offset = {0, 32}, .extent = {64, 32}};
  for (BoundPiece* piece : {&c->transfer.source[0], &c->transfer.destinations[0][0]}) {
    piece->box = half;
    piece->strides = {32, 1};
  }
  c->transfer.plan.moves.clear();
  AddMoves(&c->transfer, 0, 0, 0);
  const CopyPlanOptions options = {.engine_bytes = 4096};
  for (const Verification verification : {Verification::kOff, Verification::kReadback}) {
    const auto plan = PlanCopies(c->transfer, verification, &c->addresses, options);
    INFO(plan.status().ToString());
    REQUIRE(plan.ok());
    REQUIRE(plan->devices.size() == 1);
    REQUIRE(plan->devices[0].lanes.size() == 1);
    CHECK(plan->devices[0].lanes[0].bytes == std::vector<size_t>{4096});
    CHECK(plan->devices[0].tasks.empty() == (verification == Verification::kOff));
  }
}

TEST_CASE("A transfer without moves has no tasks") {
  const Views views;
  FakeAddresses addresses(views);
  Transfer transfer;
  transfer.destinations.resize(3);
  const auto plan = PlanCopies(transfer, Verification::kReadback, &addresses);
  REQUIRE(plan.ok());
  CHECK(plan->devices.empty());
  CHECK(plan->task_sums() == 0);
  CHECK(plan->bytes == std::vector<int64_t>(3, 0));
  CHECK(PlanReadback({}, &addresses)->devices.empty());
}

// ---- limits (P10) ----

// A whole tensor of bytes, its dimensions stored in the opposite order: no two elements that follow
// each other lie together.
BoundPiece Reversed(const Dims& shape, char* data) {
  Dims strides(shape.size(), 1);
  for (size_t d = 1; d < shape.size(); ++d) strides[d] = strides[d - 1] * shape[d - 1];
  return {.dtype = DType::kUint8,
          .shape = shape,
          .box = WholeBox(shape),
          .strides = strides,
          .data = data,
          .name = "reversed"};
}

TEST_CASE("pieces that would become more tasks than a device may have are refused by name") {
  const Views views;  // only addresses count: no byte is touched
  FakeAddresses addresses(views);
  char* const to = views.data() + 4096;
  addresses.Put(views.data(), 0);
  addresses.Put(to, 1);
  const Dims shape = {int64_t{1} << 29, 2, 2, 2};
  Transfer transfer;
  transfer.source.push_back(Reversed(shape, views.data()));
  transfer.destinations.push_back({transfer.source[0]});
  transfer.destinations[0][0].data = to;
  transfer.destinations[0][0].strides = RowMajorStrides(shape);
  transfer.plan.moves.push_back({.source = 0, .box = WholeBox(shape)});
  const auto refused = PlanCopies(transfer, Verification::kTransfer, &addresses);
  REQUIRE(refused.status().code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(std::string(refused.status().message()),
             Catch::Matchers::Contains("\"reversed\"") &&
                 Catch::Matchers::Contains(std::to_string(kMaxDeviceTasks)));

  ReadbackJob job;
  job.pieces.push_back({.piece = Reversed(shape, views.data())});
  CHECK(PlanReadback(job, &addresses).status().code() == absl::StatusCode::kResourceExhausted);
}

TEST_CASE("many pieces, each within the limit, are refused when a device would have too many") {
  const Views views;
  FakeAddresses addresses(views);
  addresses.Put(views.data(), 0);
  const Dims shape = {int64_t{1} << 17, 2, 2, 2, 2};
  ReadbackJob job;
  job.pieces.push_back({.piece = Reversed(shape, views.data())});
  const auto one = PlanReadback(job, &addresses);
  REQUIRE(one.ok());
  const auto each = static_cast<int64_t>(one->devices[0].tasks.size());
  REQUIRE(each >= int64_t{1} << 17);
  job.pieces.resize(static_cast<size_t>(kMaxDeviceTasks / each + 1), job.pieces[0]);
  const auto all = PlanReadback(job, &addresses);
  REQUIRE(all.status().code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(std::string(all.status().message()),
             Catch::Matchers::Contains("device 0") &&
                 Catch::Matchers::Contains(std::to_string(kMaxDeviceTasks)));
}

}  // namespace
}  // namespace refitd
