// One rank of a group, a trainer or an engine, in a process of its own: GPU memory (or shared host
// memory), a layout, and refitd's C++ client. It reads commands line by line from stdin and answers
// with JSON, one object a line, on stdout. tests/gpu/orchestrate.py drives it.
//
//   gpu_rank trainer|engine --socket PATH --group NAME [...]   (gpu_rank --help)
//   gpu_rank both --shift N --socket PATH [...]                a trainer and an engine in one block
//   gpu_rank selftest --device N --memory legacy|vmm|host      fills and checks without a daemon
//
// All roles but selftest first say {"event": "ready", ...}. Every command is answered by one
// object, whose "event" is the command's name, with "ok", or "error" in words:
//   fill V                     (trainer) writes the values of version V, and waits for them
//   push V [word...]           (trainer) Begin, every bucket, Commit. Words: off, transfer,
//                              readback; broadcast=METHOD; unpacked; stream (each bucket is filled
//                              right before its Push); overwrite (it is poisoned right after its
//                              answer); spin=MS (a kernel that keeps the stream busy runs before
//                              the fill); at=S (begins when the monotonic clock says S seconds:
//                              many ranks at once); slots (packed into leased slots, tensors cut
//                              where a slot is full: of these words only `at` goes with it)
//   refit V [word...]          (trainer) the same words, but unpacked and slots
//   abort V                    (trainer) Begin, one bucket, Abort
//   check V [keep]             (engine) counts wrong elements, and bytes written beside the pieces;
//                              then poisons all of the memory. keep: only counts wrong elements
//   rollback                   (trainer) the version before is served again
//   untouched                  (engine) counts bytes that are not poison
//   refuse                     (engine) answers Failed to the next Prepare
//   hold, release              (engine) keeps Ready back from the next Prepare on; sends it
//   poison, memory, quit
// `both` has push V [word...] and refit V [word...], with words of verification only. It poisons
// the block, fills the trainer's tensors, runs the update, and counts wrong elements of the
// "engine" and of the "trainer", and bytes "beside" the tensors that were written. An engine also
// reports the events that it gets: prepare, committed, aborted, lost, and with --reattach
// reattached, when it has registered with the next daemon. With --delivery staged it copies the
// parts into its memory itself; with --arena its memory has two sides.
//
// Memory starts out as poison. Ends with its stdin, or with its parent.
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <iostream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "tests/gpu/rank_layout.h"
#include "tests/gpu/share.h"
#include "tests/gpu/store.h"
#include "transport/host/memory.h"

namespace refitd::gpu {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

double Seconds(Clock::time_point since) {
  return std::chrono::duration<double>(Clock::now() - since).count();
}

constexpr std::array kMethods = {BroadcastMethod::kAuto, BroadcastMethod::kDirect,
                                 BroadcastMethod::kChain, BroadcastMethod::kSymmetric,
                                 BroadcastMethod::kNccl};

struct Options {
  std::string role;
  std::string socket;
  std::string group = "gpu";
  int device = 0;
  std::string memory = "legacy";
  uint64_t seed = 1;
  int trainers = 1;
  int instances = 1;
  std::string instance = "engine-0";
  std::string delivery = "in_place";
  int64_t duration_ms = 60'000;
  std::string broadcast = "auto";
  std::string coordinator;
  int64_t shift = 0;
  bool unrecognised = false;
  std::string arena;
  bool reattach = false;
  LayoutOptions layout;

  MemoryKind kind() const {
    return memory == "host"  ? MemoryKind::kHost
           : memory == "vmm" ? MemoryKind::kVmm
                             : MemoryKind::kLegacy;
  }
};

BroadcastMethod MethodOf(const std::string& name) {
  for (const BroadcastMethod method : kMethods) {
    if (name == BroadcastMethodName(method)) return method;
  }
  return BroadcastMethod::kAuto;
}

void Say(const json& line) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  std::cout << line.dump() << std::endl;
}

json Answer(const std::string& event, const absl::Status& status) {
  json line = {{"event", event}, {"ok", status.ok()}};
  if (!status.ok()) line["error"] = status.ToString();
  return line;
}

// The words behind a command.
struct Words {
  int64_t version = 0;
  std::set<std::string> flags;
  int64_t spin_ms = 0;
  std::optional<double> at;  // seconds of the monotonic clock
  std::string broadcast;     // empty: --broadcast

  explicit Words(std::istringstream& in) {
    in >> version;
    for (std::string word; in >> word;) {
      if (word.starts_with("spin=")) {
        spin_ms = std::stoll(word.substr(5));
      } else if (word.starts_with("broadcast=")) {
        broadcast = word.substr(10);
      } else if (word.starts_with("at=")) {
        at = std::stod(word.substr(3));
      } else {
        flags.insert(word);
      }
    }
  }
  bool Has(const std::string& word) const { return flags.contains(word); }
  // Busy-waits at the end, so that all ranks begin within microseconds.
  void AwaitStart() const {
    if (!at.has_value()) return;
    constexpr auto kAwake = std::chrono::milliseconds(1);
    const Clock::time_point start(
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(*at)));
    std::this_thread::sleep_until(start - kAwake);
    while (Clock::now() < start) {
    }
  }
  std::optional<Verification> verification() const {
    if (Has("off")) return Verification::kOff;
    if (Has("transfer")) return Verification::kTransfer;
    if (Has("readback")) return Verification::kReadback;
    return std::nullopt;
  }
};

client::ConnectOptions Connect(const Options& options, const std::string& device) {
  client::ConnectOptions connect;
  connect.socket = options.socket;
  connect.group = options.group;
  connect.spec =
      client::GroupSpec{.trainer_ranks = options.trainers, .min_instances = options.instances};
  connect.client = "gpu_rank";
  connect.coordinator = options.coordinator;
  if (options.reattach) connect.reattach = std::chrono::minutes(1);
  SetDevice(&connect, device);
  return connect;
}

// Memory of the process itself, for runs without a daemon.
class HostBlocks {
 public:
  void Adopt(const RankLayout& held, Store* store) {
    for (const int64_t bytes : held.block_bytes) {
      blocks_.push_back(std::make_unique<char[]>(static_cast<size_t>(bytes)));
      store->Adopt(blocks_.back().get(), bytes);
    }
  }

 private:
  std::vector<std::unique_ptr<char[]>> blocks_;
};

// The memory and layout that both roles have.
class Holder {
 public:
  explicit Holder(const Options& options) : options_(options) {}

  absl::Status Allocate() {
    REFITD_ASSIGN_OR_RETURN(held_, MakeRankLayout(options_.layout));
    REFITD_ASSIGN_OR_RETURN(store_, Store::Create(options_.kind(), options_.device));
    if (options_.kind() == MemoryKind::kHost || !options_.arena.empty()) return absl::OkStatus();
    for (const int64_t bytes : held_.block_bytes) REFITD_RETURN_IF_ERROR(store_->AddBlock(bytes));
    return absl::OkStatus();
  }

  template <typename Member>
  absl::Status ShareWith(Member* member) {
    REFITD_ASSIGN_OR_RETURN(regions_,
                            Share(member, options_.kind(), held_.block_bytes, store_.get()));
    return Prepare();
  }

  absl::Status ShareArenasWith(client::Engine* engine) {
    const SidesIn in = options_.arena == "host" ? SidesIn::kHost : SidesIn::kDevice;
    REFITD_ASSIGN_OR_RETURN(regions_, ShareArenas(engine, Connect(options_, store_->device_name()),
                                                  in, held_.block_bytes, store_.get()));
    return Prepare();
  }

  absl::Status KeepToItself() {
    if (options_.kind() == MemoryKind::kHost) host_.Adopt(held_, store_.get());
    return Prepare();
  }

  absl::Status Prepare() {
    REFITD_RETURN_IF_ERROR(store_->SetLayout(held_.layout, held_.piece_names));
    return Poison();
  }

  absl::Status Poison() {
    REFITD_RETURN_IF_ERROR(store_->PoisonAll());
    return store_->Synchronise();
  }

  absl::Status Fill(int64_t version, int64_t spin_ms, int block = -1) {
    if (spin_ms > 0) REFITD_RETURN_IF_ERROR(store_->Spin(spin_ms));
    REFITD_RETURN_IF_ERROR(store_->Fill(version, options_.seed, block));
    return store_->Synchronise();
  }

  // The layout with the ids of the client's regions.
  Layout ForClient() const {
    Layout layout = held_.layout;
    for (Piece& piece : layout.pieces) {
      piece.region = regions_[static_cast<size_t>(piece.region.value()) - 1]->id();
    }
    return layout;
  }

  json Check(int64_t version, bool keep = false) {
    const auto start = Clock::now();
    const auto wrong = store_->Check(version, options_.seed);
    absl::Status status = wrong.status();
    int64_t beside = 0;
    if (status.ok() && !keep) status = store_->PoisonPieces(-1);
    if (status.ok() && !keep) {
      const auto counted = store_->CountUnpoisoned();
      status = counted.status();
      beside = counted.value_or(-1);
    }
    json line = Answer("check", status);
    line["version"] = version;
    line["wrong"] = wrong.ok() ? wrong->count : -1;
    if (wrong.ok() && wrong->count > 0) line["first"] = wrong->first;
    line["beside"] = beside;
    line["seconds"] = Seconds(start);
    return line;
  }

  json Untouched() {
    const auto count = store_->CountUnpoisoned();
    json line = Answer("untouched", count.status());
    line["bytes"] = count.value_or(-1);
    return line;
  }

  json Memory() {
    const auto memory = store_->Memory();
    json line = Answer("memory", memory.status());
    if (memory.ok()) line["free"] = memory->free_bytes;
    if (memory.ok()) line["total"] = memory->total_bytes;
    return line;
  }

  json Ready(double seconds) const {
    return {{"event", "ready"},
            {"ok", true},
            {"device", store_->device_name()},
            {"bytes", held_.layout.Bytes()},
            {"tensors", held_.layout.tensors.size()},
            {"pieces", held_.layout.pieces.size()},
            {"blocks", held_.block_bytes.size()},
            {"seconds", seconds}};
  }

  const Options& options() const { return options_; }
  Store& store() { return *store_; }
  const RankLayout& held() const { return held_; }
  const std::vector<std::shared_ptr<client::Region>>& regions() const { return regions_; }

 private:
  const Options& options_;
  RankLayout held_;
  HostBlocks host_;
  std::unique_ptr<Store> store_;
  std::vector<std::shared_ptr<client::Region>> regions_;
};

// ---- trainer ----

// Cuts tensors to fill leased slots, one bucket a slot. Pieces are whole tensors, row-major.
class SlotPacker {
 public:
  SlotPacker(client::Update* update, Store* store) : update_(update), store_(store) {}

  absl::Status Add(const TensorSpec& tensor, const Piece& piece) {
    const int64_t element = ElementBytes(tensor.dtype);
    const int64_t elements = ElementCount(piece.box);
    int64_t start = 0;
    do {
      if (slot_ == nullptr) {
        REFITD_ASSIGN_OR_RETURN(slot_, update_->LeaseSlot());
      }
      const int64_t count = std::min(elements - start, (slot_->bytes() - end_) / element);
      if (count > 0 || elements == 0) {
        REFITD_RETURN_IF_ERROR(store_->CopyOut(static_cast<size_t>(piece.region.value()) - 1,
                                               piece.byte_offset + start * element, count * element,
                                               slot_->data() + end_));
        tensors_.push_back(tensor);
        ranges_.push_back({static_cast<uint32_t>(ranges_.size()), start, count});
        offsets_.push_back(end_);
        end_ = (end_ + count * element + kAlignment - 1) / kAlignment * kAlignment;
        start += count;
      }
      if (start < elements || end_ >= slot_->bytes()) REFITD_RETURN_IF_ERROR(Flush());
    } while (start < elements);
    return absl::OkStatus();
  }

  absl::Status Flush() {
    if (slot_ == nullptr) return absl::OkStatus();
    REFITD_RETURN_IF_ERROR(store_->Synchronise());
    client::Bucket bucket =
        client::Bucket::InSlot(std::move(tensors_), std::move(slot_), std::move(offsets_));
    bucket.ranges = std::move(ranges_);
    tensors_.clear();
    ranges_.clear();
    offsets_.clear();
    end_ = 0;
    return update_->Push(std::move(bucket));
  }

 private:
  static constexpr int64_t kAlignment = 512;

  client::Update* const update_;
  Store* const store_;
  std::unique_ptr<client::LeasedSlot> slot_;
  std::vector<TensorSpec> tensors_;
  std::vector<TensorRange> ranges_;
  std::vector<int64_t> offsets_;
  int64_t end_ = 0;
};

class TrainerRank {
 public:
  explicit TrainerRank(const Options& options) : holder_(options) {}

  absl::Status Start() {
    const auto start = Clock::now();
    const Options& options = holder_.options();
    REFITD_RETURN_IF_ERROR(holder_.Allocate());
    client::TrainerOptions attach;
    attach.connect = Connect(options, holder_.store().device_name());
    attach.rank = options.layout.rank;
    attach.world_size = options.trainers;
    REFITD_ASSIGN_OR_RETURN(trainer_, client::Trainer::Attach(attach));
    REFITD_RETURN_IF_ERROR(holder_.ShareWith(trainer_.get()));
    if (options.layout.kind != "push") {
      REFITD_RETURN_IF_ERROR(trainer_->Register(holder_.ForClient()));
    }
    Say(holder_.Ready(Seconds(start)));
    return absl::OkStatus();
  }

  json Run(const std::string& command, std::istringstream& in) {
    const Words words(in);
    if (command == "fill") return Filled(words);
    if (command == "push") return Push(words);
    if (command == "refit") return Refit(words);
    if (command == "abort") return Abort(words);
    if (command == "rollback") {
      return Committed(command, words.version, Clock::now(), trainer_->Rollback());
    }
    if (command == "poison") return Answer(command, holder_.Poison());
    if (command == "memory") return holder_.Memory();
    return Answer(command, absl::InvalidArgumentError("no such command"));
  }

 private:
  json Filled(const Words& words) {
    const auto start = Clock::now();
    json line = Answer("fill", holder_.Fill(words.version, words.spin_ms));
    line["version"] = words.version;
    line["seconds"] = Seconds(start);
    return line;
  }

  static json Committed(const std::string& event, int64_t version, Clock::time_point start,
                        const absl::StatusOr<client::CommitResult>& result) {
    json line = Answer(event, result.status());
    line["version"] = version;
    line["seconds"] = Seconds(start);
    if (!result.ok()) return line;
    line["daemon_seconds"] = result->seconds;
    line["bytes"] = result->bytes;
    for (const client::BroadcastTotals& totals : result->pushed) {
      line["pushed"][std::string(BroadcastMethodName(totals.method))] = totals.bytes;
    }
    for (const client::InstanceOutcome& instance : result->instances) {
      line["instances"][instance.instance] =
          instance.committed ? std::string("committed") : instance.reason;
    }
    return line;
  }

  client::BeginOptions Begin(const Words& words) const {
    client::BeginOptions begin;
    begin.version = Version(words.version);
    begin.duration = std::chrono::milliseconds(holder_.options().duration_ms);
    begin.verification = words.verification();
    begin.broadcast =
        MethodOf(words.broadcast.empty() ? holder_.options().broadcast : words.broadcast);
    return begin;
  }

  client::Bucket BucketOf(size_t block, bool packed) const {
    std::vector<TensorSpec> tensors;
    std::vector<int64_t> offsets;
    for (const Piece& piece : holder_.held().layout.pieces) {
      if (piece.region.value() != block + 1) continue;
      tensors.push_back(holder_.held().layout.tensors[piece.tensor]);
      offsets.push_back(piece.byte_offset);
    }
    const std::shared_ptr<client::Region>& region = holder_.regions()[block];
    return packed ? client::Bucket::Packed(std::move(tensors), region, 0, std::move(offsets))
                  : client::Bucket::Unpacked(std::move(tensors), region, std::move(offsets));
  }

  json Push(const Words& words) {
    words.AwaitStart();
    const auto start = Clock::now();
    auto update = trainer_->Begin(Begin(words));
    if (!update.ok()) return Committed("push", words.version, start, update.status());
    if (words.Has("slots")) {
      const absl::Status status = PushSlots(update->get());
      if (!status.ok()) return Committed("push", words.version, start, status);
      return Committed("push", words.version, start, (*update)->Commit());
    }
    const bool one_by_one = words.Has("stream") || words.Has("overwrite") || words.spin_ms > 0;
    for (size_t b = 0; b < holder_.regions().size(); ++b) {
      client::Bucket bucket = BucketOf(b, !words.Has("unpacked"));
      if (!one_by_one) {
        (*update)->PushAsync(std::move(bucket), [](absl::Status) {});
        continue;
      }
      const absl::Status status = PushOne(update->get(), std::move(bucket), b, words);
      if (!status.ok()) return Committed("push", words.version, start, status);
    }
    return Committed("push", words.version, start, (*update)->Commit());
  }

  absl::Status PushSlots(client::Update* update) {
    SlotPacker packer(update, &holder_.store());
    for (const Piece& piece : holder_.held().layout.pieces) {
      REFITD_RETURN_IF_ERROR(packer.Add(holder_.held().layout.tensors[piece.tensor], piece));
    }
    return packer.Flush();
  }

  // Writes the values right before the push, behind a busy stream if asked for, and poisons them
  // right after, as a caller that reuses its buffers may do.
  absl::Status PushOne(client::Update* update, client::Bucket bucket, size_t block,
                       const Words& words) {
    if (words.Has("stream") || words.spin_ms > 0) {
      REFITD_RETURN_IF_ERROR(holder_.Fill(words.version, words.spin_ms, static_cast<int>(block)));
    }
    REFITD_RETURN_IF_ERROR(update->Push(std::move(bucket)));
    if (!words.Has("overwrite")) return absl::OkStatus();
    return holder_.store().PoisonPieces(static_cast<int>(block));
  }

  json Refit(const Words& words) {
    if (words.spin_ms > 0) {
      const absl::Status status = holder_.Fill(words.version, words.spin_ms);
      if (!status.ok()) return Answer("refit", status);
    }
    words.AwaitStart();
    const auto start = Clock::now();
    client::RefitOptions refit;
    refit.version = Version(words.version);
    refit.duration = std::chrono::milliseconds(holder_.options().duration_ms);
    refit.verification = words.verification();
    const auto result = trainer_->Refit(refit);
    if (words.Has("overwrite")) (void)holder_.store().PoisonPieces(-1);
    return Committed("refit", words.version, start, result);
  }

  json Abort(const Words& words) {
    auto update = trainer_->Begin(Begin(words));
    if (!update.ok()) return Answer("abort", update.status());
    if (holder_.options().layout.kind == "push") {
      const absl::Status status = (*update)->Push(BucketOf(0, true));
      if (!status.ok()) return Answer("abort", status);
    }
    return Answer("abort", (*update)->Abort("as asked"));
  }

  Holder holder_;
  std::unique_ptr<client::Trainer> trainer_;
};

// ---- engine ----

class EngineRank {
 public:
  explicit EngineRank(const Options& options) : holder_(options) {}
  ~EngineRank() {
    stop_ = true;
    if (events_.joinable()) events_.join();
  }
  EngineRank(const EngineRank&) = delete;
  EngineRank& operator=(const EngineRank&) = delete;

  absl::Status Start() {
    const auto start = Clock::now();
    const Options& options = holder_.options();
    REFITD_RETURN_IF_ERROR(holder_.Allocate());
    client::EngineOptions attach;
    attach.connect = Connect(options, holder_.store().device_name());
    attach.instance = options.instance;
    attach.rank = options.layout.rank;
    attach.world_size = options.layout.world;
    const bool staged = options.delivery == "loader";
    if (staged) {
      attach.delivery = client::Delivery::kLoader;
      attach.manifest = holder_.held().layout.tensors;
    }
    REFITD_ASSIGN_OR_RETURN(engine_, client::Engine::Attach(attach));
    if (staged) {
      REFITD_RETURN_IF_ERROR(holder_.KeepToItself());
    } else {
      REFITD_RETURN_IF_ERROR(options.arena.empty() ? holder_.ShareWith(engine_.get())
                                                   : holder_.ShareArenasWith(engine_.get()));
      REFITD_RETURN_IF_ERROR(engine_->Register(holder_.ForClient()));
    }
    events_ = std::thread([this] { Listen(); });
    Say(holder_.Ready(Seconds(start)));
    return absl::OkStatus();
  }

  json Run(const std::string& command, std::istringstream& in) {
    const Words words(in);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (command == "check") return holder_.Check(words.version, words.Has("keep"));
    if (command == "untouched") return holder_.Untouched();
    if (command == "poison") return Answer(command, holder_.Poison());
    if (command == "memory") return holder_.Memory();
    if (command == "refuse") {
      refuses_ = true;
      return Answer(command, absl::OkStatus());
    }
    if (command == "hold") return Hold(true);
    if (command == "release") return Hold(false);
    return Answer(command, absl::InvalidArgumentError("no such command"));
  }

 private:
  json Hold(bool hold) {
    hold_ = hold;
    absl::Status status;
    if (!hold && kept_.has_value()) status = engine_->Ready(*kept_);
    if (!hold) kept_.reset();
    return Answer(hold ? "hold" : "release", status);
  }

  void Listen() {
    while (!stop_) {
      const auto event = engine_->Next(std::chrono::milliseconds(100));
      if (!event.ok()) {
        json line = Answer("lost", event.status());
        line["weights"] = static_cast<int>(engine_->weights());
        Say(line);
        return;
      }
      if (const auto* prepare = std::get_if<client::Prepare>(&*event)) {
        OnPrepare(*prepare);
      } else if (const auto* part = std::get_if<client::Part>(&*event)) {
        OnPart(*part);
      } else if (const auto* committed = std::get_if<client::Committed>(&*event)) {
        Say({{"event", "committed"}, {"version", committed->version.value()}});
      } else if (const auto* aborted = std::get_if<client::Aborted>(&*event)) {
        Say({{"event", "aborted"},
             {"version", aborted->version.value()},
             {"reason", aborted->reason},
             {"dirty", aborted->dirty}});
      } else if (const auto* again = std::get_if<client::Reattached>(&*event)) {
        OnReattached(*again);
      }
    }
  }

  // Events of the next daemon come after this, since the layout is registered first.
  void OnReattached(const client::Reattached& again) {
    const std::lock_guard<std::mutex> lock(mutex_);
    json line = Answer("reattached", engine_->Register(holder_.ForClient()));
    line["weights"] = static_cast<int>(again.weights);
    line["version"] = again.held_version.value_or(Version()).value();
    Say(line);
  }

  // Answers Prepare. Once this has the lock, the rank's work that reads or writes the weights has
  // ended.
  void OnPrepare(const client::Prepare& prepare) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(refuses_, false)) {
      (void)engine_->Fail(prepare.version, "as asked");
    } else if (hold_) {
      kept_ = prepare.version;
    } else if (const absl::Status status = engine_->Ready(prepare.version); !status.ok()) {
      Say(Answer("not ready", status));
    }
    Say({{"event", "prepare"}, {"version", prepare.version.value()}});
  }

  absl::Status Load(const client::Part& part) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const client::TensorView& view : part.tensors) {
      REFITD_RETURN_IF_ERROR(
          holder_.store().Load(TensorHash(view.tensor), view.start, view.count, view.data));
    }
    return holder_.store().Synchronise();
  }

  // Loads the part, and acknowledges it when the device has read the slot.
  void OnPart(const client::Part& part) {
    const absl::Status loaded = Load(part);
    if (!loaded.ok()) (void)engine_->Fail(part.version, std::string(loaded.message()));
    const absl::Status answered = engine_->Ack(part);
    if (!loaded.ok() || !answered.ok()) Say(Answer("not loaded", loaded.ok() ? answered : loaded));
  }

  Holder holder_;
  std::unique_ptr<client::Engine> engine_;
  std::thread events_;
  std::atomic<bool> stop_ = false;
  std::mutex mutex_;
  bool hold_ = false;
  bool refuses_ = false;
  std::optional<Version> kept_;
};

// ---- both roles in one memory ----

// A trainer and an engine of this process, whose tensors lie in one block: the engine's at its
// beginning, the trainer's --shift bytes behind it.
class BothRanks {
 public:
  explicit BothRanks(const Options& options) : options_(options) {}
  ~BothRanks() {
    stop_ = true;
    if (events_.joinable()) events_.join();
  }
  BothRanks(const BothRanks&) = delete;
  BothRanks& operator=(const BothRanks&) = delete;

  absl::Status Start() {
    REFITD_ASSIGN_OR_RETURN(held_, MakeRankLayout(options_.layout));
    sent_ = held_.layout;
    for (Piece& piece : sent_.pieces) piece.byte_offset += options_.shift;
    REFITD_ASSIGN_OR_RETURN(store_, Store::Create(options_.kind(), options_.device));
    REFITD_RETURN_IF_ERROR(MakeBlock(held_.block_bytes[0] + options_.shift));
    const client::ConnectOptions connect = Connect(options_, store_->device_name());
    client::EngineOptions attach;
    attach.connect = connect;
    attach.instance = options_.instance;
    REFITD_ASSIGN_OR_RETURN(engine_, client::Engine::Attach(attach));
    REFITD_ASSIGN_OR_RETURN(trainer_, client::Trainer::Attach({.connect = connect}));
    REFITD_ASSIGN_OR_RETURN(of_engine_, ShareBlock(engine_.get(), block_));
    REFITD_ASSIGN_OR_RETURN(of_trainer_, ShareBlock(trainer_.get(), block_));
    REFITD_RETURN_IF_ERROR(engine_->Register(In(held_.layout, *of_engine_)));
    events_ = std::thread([this] { Listen(); });
    Say({{"event", "ready"}, {"ok", true}, {"device", store_->device_name()}});
    return absl::OkStatus();
  }

  json Run(const std::string& command, std::istringstream& in) {
    const Words words(in);
    if (command == "push" || command == "refit") return Install(command, words);
    return Answer(command, absl::InvalidArgumentError("no such command"));
  }

 private:
  static Layout In(Layout layout, const client::Region& region) {
    for (Piece& piece : layout.pieces) piece.region = region.id();
    return layout;
  }

  absl::Status MakeBlock(int64_t bytes) {
    if (options_.kind() != MemoryKind::kHost) {
      REFITD_RETURN_IF_ERROR(store_->AddBlock(bytes));
      REFITD_ASSIGN_OR_RETURN(block_, store_->ExportBlock(0));
      if (options_.unrecognised) block_.address = 0;
      return absl::OkStatus();
    }
    REFITD_ASSIGN_OR_RETURN(memfd_, CreateSealedMemfd("gpu_rank", bytes));
    void* const data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED,
                            memfd_.get(), 0);
    if (data == MAP_FAILED) return absl::ErrnoToStatus(errno, "mmap");
    store_->Adopt(static_cast<char*>(data), bytes);
    block_ = {.ipc_handle = "", .descriptor = memfd_.get(), .bytes = bytes, .memfd = true};
    return absl::OkStatus();
  }

  // Installs the version, which the trainer's tensors get first, and says what became of the block:
  // "engine": how many elements of the engine's tensors are not the version's; "trainer": likewise;
  // "beside": bytes that changed beside the tensors of whoever is as the version says.
  json Install(const std::string& command, const Words& words) {
    const int64_t version = words.version;
    absl::Status status = Fill(version);
    if (status.ok()) status = command == "push" ? Push(words) : Refit(words);
    json line = Answer(command, status);
    line["version"] = version;
    const absl::Status looked = Look(version, status.ok(), &line);
    if (!looked.ok()) return Answer(command, looked);
    return line;
  }

  absl::Status Fill(int64_t version) {
    REFITD_RETURN_IF_ERROR(store_->SetLayout(sent_, held_.piece_names));
    REFITD_RETURN_IF_ERROR(store_->PoisonAll());
    REFITD_RETURN_IF_ERROR(store_->Fill(version, options_.seed, -1));
    return store_->Synchronise();
  }

  absl::Status Push(const Words& words) {
    client::BeginOptions begin;
    begin.version = Version(words.version);
    begin.verification = words.verification();
    REFITD_ASSIGN_OR_RETURN(const auto update, trainer_->Begin(begin));
    std::vector<int64_t> offsets;
    for (const Piece& piece : sent_.pieces) offsets.push_back(piece.byte_offset);
    REFITD_RETURN_IF_ERROR(
        update->Push(client::Bucket::Unpacked(sent_.tensors, of_trainer_, std::move(offsets))));
    return update->Commit().status();
  }

  absl::Status Refit(const Words& words) {
    REFITD_RETURN_IF_ERROR(trainer_->Register(In(sent_, *of_trainer_)));
    client::RefitOptions refit;
    refit.version = Version(words.version);
    refit.verification = words.verification();
    return trainer_->Refit(refit).status();
  }

  absl::Status Look(int64_t version, bool installed, json* line) {
    const auto wrong = [&](const Layout& layout) -> absl::StatusOr<int64_t> {
      REFITD_RETURN_IF_ERROR(store_->SetLayout(layout, held_.piece_names));
      REFITD_ASSIGN_OR_RETURN(const WrongElements found, store_->Check(version, options_.seed));
      return found.count;
    };
    REFITD_ASSIGN_OR_RETURN((*line)["engine"], wrong(held_.layout));
    REFITD_ASSIGN_OR_RETURN((*line)["trainer"], wrong(sent_));
    REFITD_RETURN_IF_ERROR(store_->PoisonPieces(-1));
    if (installed) {
      REFITD_RETURN_IF_ERROR(store_->SetLayout(held_.layout, held_.piece_names));
      REFITD_RETURN_IF_ERROR(store_->PoisonPieces(-1));
    }
    REFITD_ASSIGN_OR_RETURN((*line)["beside"], store_->CountUnpoisoned());
    return absl::OkStatus();
  }

  void Listen() {
    while (!stop_) {
      const auto event = engine_->Next(std::chrono::milliseconds(100));
      if (!event.ok()) return Say(Answer("lost", event.status()));
      if (const auto* prepare = std::get_if<client::Prepare>(&*event)) {
        (void)engine_->Ready(prepare->version);
      } else if (const auto* aborted = std::get_if<client::Aborted>(&*event)) {
        Say({{"event", "aborted"},
             {"version", aborted->version.value()},
             {"dirty", aborted->dirty}});
      }
    }
  }

  const Options& options_;
  RankLayout held_;
  Layout sent_;
  std::unique_ptr<Store> store_;
  UniqueFd memfd_;
  Export block_;
  std::unique_ptr<client::Engine> engine_;
  std::unique_ptr<client::Trainer> trainer_;
  std::shared_ptr<client::Region> of_engine_;
  std::shared_ptr<client::Region> of_trainer_;
  std::thread events_;
  std::atomic<bool> stop_ = false;
};

template <typename Rank>
int Serve(const Options& options) {
  Rank rank(options);
  if (const absl::Status status = rank.Start(); !status.ok()) {
    Say(Answer("ready", status));
    return 1;
  }
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream in(line);
    std::string command;
    in >> command;
    if (command == "quit") break;
    Say(rank.Run(command, in));
  }
  return 0;
}

// ---- without a daemon ----

// Checks that a fill passes the check, and that another version, a poisoned piece and a byte beside
// the pieces are noticed.
absl::Status SelfTest(Holder* holder, json* line) {
  HostBlocks blocks;
  REFITD_RETURN_IF_ERROR(holder->Allocate());
  if (holder->options().kind() == MemoryKind::kHost) blocks.Adopt(holder->held(), &holder->store());
  REFITD_RETURN_IF_ERROR(holder->Prepare());
  (*line)["clean"] = holder->Untouched()["bytes"];
  const auto start = Clock::now();
  REFITD_RETURN_IF_ERROR(holder->Fill(3, 0));
  const double fill = Seconds(start);
  const int64_t elements = holder->held().layout.Bytes();
  REFITD_ASSIGN_OR_RETURN(const WrongElements other,
                          holder->store().Check(4, holder->options().seed));
  REFITD_RETURN_IF_ERROR(holder->store().PoisonPieces(0));
  REFITD_ASSIGN_OR_RETURN(const WrongElements poisoned,
                          holder->store().Check(3, holder->options().seed));
  REFITD_RETURN_IF_ERROR(holder->Fill(3, 0));
  const json check = holder->Check(3);
  (*line)["bytes"] = elements;
  (*line)["fill_seconds"] = fill;
  (*line)["check_seconds"] = check["seconds"];
  (*line)["wrong"] = check["wrong"];
  (*line)["beside"] = check["beside"];
  (*line)["wrong_of_other_version"] = other.count;
  (*line)["wrong_where_poisoned"] = poisoned.count;
  const bool good = check["wrong"] == 0 && check["beside"] == 0 && (*line)["clean"] == 0 &&
                    other.count > 0 && poisoned.count > 0;
  return good ? absl::OkStatus() : absl::DataLossError("the store does not see what it must");
}

int RunSelfTest(const Options& options) {
  Holder holder(options);
  json line;
  const absl::Status status = SelfTest(&holder, &line);
  line.update(Answer("selftest", status));
  Say(line);
  return status.ok() ? 0 : 1;
}

void AddLayoutOptions(CLI::App* app, LayoutOptions* layout) {
  app->add_option("--layout", layout->kind, "megatron, fsdp, push (trainers); vllm; random");
  app->add_option("--model", layout->model, "a known model, or tensors:N:BYTES");
  app->add_option("--layers", layout->layers, "only so many of the model's");
  app->add_option("--experts", layout->experts, "only so many of the model's");
  app->add_flag("--tiny", layout->tiny, "the model's structure in small numbers");
  app->add_option("--rank", layout->rank);
  app->add_option("--world", layout->world, "ranks of this side (engines: of the instance)");
  app->add_option("--tp", layout->tp);
  app->add_option("--pp", layout->pp);
  app->add_option("--ep", layout->ep);
  app->add_option("--etp", layout->etp);
  app->add_option("--random-seed", layout->random_seed, "of random layouts and odd places");
  app->add_option("--block-bytes", layout->block_bytes, "of an allocation; push: of a bucket");
  app->add_flag("--odd", layout->odd, "pieces at odd offsets, with gaps");
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("A rank of refitd's GPU tests: reads commands, prints JSON lines.");
  app.add_option("role", options.role, "trainer, engine, both or selftest")->required();
  app.add_option("--socket", options.socket, "of the daemon");
  app.add_option("--group", options.group);
  app.add_option("--device", options.device, "ordinal of the GPU");
  app.add_option("--memory", options.memory, "legacy (cuMemAlloc), vmm (cuMemCreate) or host")
      ->check(CLI::IsMember({"legacy", "vmm", "host"}));
  app.add_option("--seed", options.seed, "of the values");
  app.add_option("--trainers", options.trainers, "trainer ranks of the group");
  app.add_option("--instances", options.instances, "that an update waits for");
  app.add_option("--instance", options.instance);
  app.add_option("--delivery", options.delivery, "of an engine: registered or staged")
      ->check(CLI::IsMember({"in_place", "loader"}));
  app.add_option("--coordinator", options.coordinator,
                 "HOST:PORT of the daemon with the group; none: the one on the socket");
  app.add_option("--broadcast", options.broadcast,
                 "of what a trainer pushes: auto, direct, chain, symmetric or nccl")
      ->check(CLI::IsMember({"auto", "direct", "chain", "symmetric", "nccl"}));
  app.add_option("--shift", options.shift,
                 "of both: bytes from the engine's tensors to the trainer's");
  app.add_flag("--unrecognised", options.unrecognised,
               "of both, of vmm: the daemon is not given the memory's address");
  app.add_option("--arena", options.arena,
                 "of an engine: its memory has two sides, which lie in the device's memory, or in "
                 "host memory")
      ->check(CLI::IsMember({"", "device", "host"}));
  app.add_flag("--reattach", options.reattach, "when the daemon goes away");
  app.add_option("--duration-ms", options.duration_ms, "of an update");
  AddLayoutOptions(&app, &options.layout);
  CLI11_PARSE(app, argc, argv);
  options.layout.trainer = options.role == "trainer";

  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (options.role == "trainer") return Serve<TrainerRank>(options);
  if (options.role == "engine") return Serve<EngineRank>(options);
  if (options.role == "both") return Serve<BothRanks>(options);
  if (options.role == "selftest") return RunSelfTest(options);
  std::cerr << "gpu_rank: role " << options.role << " is none of trainer, engine, both, selftest\n";
  return 2;
}

}  // namespace
}  // namespace refitd::gpu

int main(int argc, char** argv) { return refitd::gpu::Main(argc, argv); }
