// Members by the client library, for tests of whole systems: an engine that checks its own memory
// whenever it would report good weights (P2), and trainers that install versions of known bytes
// (tests/e2e/model.h) by pushing and by compiled refits.
//
// A Rank answers its events on a thread of its own; its methods may be called from any thread. A
// Pusher and Shards are used by one thread at a time. Waits end at kDeadline.
#ifndef REFITD_TESTS_E2E_CLIENT_MEMBERS_H_
#define REFITD_TESTS_E2E_CLIENT_MEMBERS_H_

#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/engine.h"
#include "client/trainer.h"
#include "tests/e2e/harness.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"

namespace refitd::e2e {

using client::Weights;

// How soon an engine's thread notices that it must end.
inline constexpr std::chrono::milliseconds kPoll{20};

// An engine rank with a thread that answers its events and checks its memory.
class Rank {
 public:
  Rank(client::ConnectOptions connect, const std::string& instance, client::Delivery delivery,
       const Model& model)
      : Rank({.connect = std::move(connect), .instance = instance, .delivery = delivery}, model,
             HoldWhole(model), /*arena=*/nullptr) {}
  // `arena`: not null: the rank's weights lie there, and are checked whenever the rank is idle too.
  // A rank that restores takes what is kept for it, or else makes an arena.
  Rank(client::EngineOptions options, const Model& model, Held held,
       const std::shared_ptr<client::Arena>& arena)
      : model_(model),
        delivery_(options.delivery),
        arena_(arena != nullptr || options.restore),
        held_(std::move(held)) {
    seen_.committed = options.held_version;
    const client::Delivery delivery = options.delivery;
    if (delivery == client::Delivery::kLoader) options.manifest = model;
    auto engine = client::Engine::Attach(options);
    INFO(engine.status());
    REQUIRE(engine.ok());
    engine_ = *std::move(engine);
    if (delivery == client::Delivery::kInPlace) {
      const auto kept = engine_->TakeKept(0);
      REQUIRE((kept.ok() || absl::IsNotFound(kept.status())));
      std::shared_ptr<client::Arena> memory = kept.ok() ? *kept : arena;
      if (memory == nullptr && options.restore)
        memory = *client::Arena::Make(held_.region_bytes, {});
      auto region = arena_ ? engine_->AddArena(memory) : engine_->NewRegion(held_.region_bytes);
      INFO(region.status());
      REQUIRE(region.ok());
      region_ = *std::move(region);
      if (!options.held_version.has_value() && !kept.ok()) {
        EmptyMemory();
      }
      for (Piece& piece : held_.layout.pieces) piece.region = region_->id();
      absl::Status registered = engine_->Register(held_.layout);
      if (kept.ok() && absl::IsDataLoss(registered)) {
        EmptyMemory();
        registered = engine_->Register(held_.layout);
      }
      INFO(registered);
      REQUIRE(registered.ok());
      if (options.restore) seen_.committed = engine_->version();
    }
    thread_ = std::thread([this] { Serve(); });
  }
  ~Rank() {
    Let();
    {
      MutexLock lock(&mutex_);
      stop_ = true;
    }
    thread_.join();
  }

  client::Engine& engine() { return *engine_; }
  // In-place delivery: the memory of its layout.
  const char* memory() const { return region_->data(); }
  // How the rank answers Prepare from now on: it flips, fails, or is silent; or its Ready must be
  // refused.
  enum class Flips : uint8_t { kWell, kFails, kNever, kRefused };
  void Flip(Flips how) {
    MutexLock lock(&mutex_);
    flips_ = how;
  }
  const Layout& layout() const { return held_.layout; }

  // Keeps back the answers to Staged and Prepare until Let.
  void Hold() {
    MutexLock lock(&mutex_);
    hold_ = true;
  }
  void Let() {
    MutexLock lock(&mutex_);
    hold_ = false;
    cond_.NotifyAll();
  }

  struct Seen {
    int staged = 0;
    int prepares = 0;
    int flips = 0;   // prepares with `flip`
    int checks = 0;  // of an arena, while the rank was idle
    int losses = 0;
    Weights lost_weights = Weights::kClean;  // its weights at the last loss
    int reattached = 0;
    std::optional<Version> held;  // the version that it reported to the last daemon
    std::optional<Version> committed;
    std::optional<Version> content;  // of the last commit, if it was a rollback
    std::string reason;              // the reason of the last loss
    int aborts = 0;
    client::Aborted aborted;  // the last abort
    absl::Status ended;
    std::string wrong;  // the first thing that was wrong
  };
  Seen seen() {
    MutexLock lock(&mutex_);
    return seen_;
  }
  bool Await(const std::function<bool(const Seen&)>& condition) {
    const bool happened = Eventually([&] { return condition(seen()) || !seen().wrong.empty(); });
    UNSCOPED_INFO(Show());
    return happened && seen().wrong.empty();
  }
  std::string Show() {
    const Seen s = seen();
    return fmt::format("prepares {}, losses {} ({}), reattached {}, ended {}, wrong: {}",
                       s.prepares, s.losses, s.reason, s.reattached, s.ended.ToString(), s.wrong);
  }

 private:
  void EmptyMemory() {
    const std::string empty = EmptyImage(held_.region_bytes);
    empty.copy(region_->data(), empty.size());
  }
  void Serve() {
    while (true) {
      {
        MutexLock lock(&mutex_);
        if (stop_) return;
      }
      auto event = engine_->Next(kPoll);
      if (!event.ok()) {
        MutexLock lock(&mutex_);
        seen_.ended = event.status();
        return;
      }
      const absl::Status answered = std::visit([this](const auto& e) { return On(e); }, *event);
      if (!answered.ok()) Wrong("an answer: " + answered.ToString());
    }
  }

  absl::Status On(const client::Nothing&) {
    if (!arena_ || engine_->weights() != Weights::kClean) return absl::OkStatus();
    CheckClean();
    MutexLock lock(&mutex_);
    ++seen_.checks;
    return absl::OkStatus();
  }
  absl::Status On(const client::Draining&) { return absl::OkStatus(); }
  absl::Status On(const client::Staged& staged) {
    CheckClean();  // it serves what it served before
    {
      MutexLock lock(&mutex_);
      ++seen_.staged;
      while (hold_) cond_.Wait(&mutex_);
    }
    const absl::Status answered = engine_->Processed(staged.update);
    // Prepare, or the outcome, came first.
    return absl::IsFailedPrecondition(answered) ? absl::OkStatus() : answered;
  }
  absl::Status On(const client::Prepare& prepare) {
    Flips how = Flips::kWell;
    {
      MutexLock lock(&mutex_);
      ++seen_.prepares;
      seen_.flips += prepare.flip ? 1 : 0;
      while (hold_) cond_.Wait(&mutex_);
      how = flips_;
    }
    if (arena_) CheckClean();  // nothing was written to what it reads
    if (how == Flips::kNever) return absl::OkStatus();
    if (how == Flips::kFails) return engine_->Fail(prepare.version, "planted");
    if (how == Flips::kRefused) {
      if (engine_->Ready(prepare.version).ok()) Wrong("it has flipped");
      return absl::OkStatus();
    }
    return engine_->Ready(prepare.version);
  }
  absl::Status On(const client::Part& part) {
    auto whole = joiner_.Add(part);
    if (!whole.ok()) return whole.status();
    for (const client::TensorView& view : *whole) {
      loaded_[view.tensor.name].assign(view.data, TensorBytes(view.tensor));
    }
    return engine_->Ack(part);
  }
  absl::Status On(const client::Committed& committed) {
    joiner_.Reset();
    {
      MutexLock lock(&mutex_);
      contents_[committed.version] = committed.content.value_or(committed.version);
      seen_.content = committed.content;
    }
    CheckClean();
    MutexLock lock(&mutex_);
    seen_.committed = committed.version;
    return absl::OkStatus();
  }
  absl::Status On(const client::Aborted& aborted) {
    joiner_.Reset();
    if (!aborted.dirty) CheckClean();
    MutexLock lock(&mutex_);
    ++seen_.aborts;
    seen_.aborted = aborted;
    return absl::OkStatus();
  }
  absl::Status On(const client::Lost& lost) {
    joiner_.Reset();
    if (lost.weights == Weights::kClean) CheckClean();
    MutexLock lock(&mutex_);
    ++seen_.losses;
    seen_.lost_weights = lost.weights;
    seen_.reason = lost.reason;
    return absl::OkStatus();
  }
  absl::Status On(const client::Reattached& again) {
    if (again.weights == Weights::kClean) CheckClean();
    if (again.weights != Weights::kClean && again.held_version) Wrong("what is not good was held");
    MutexLock lock(&mutex_);
    ++seen_.reattached;
    seen_.held = again.held_version;
    return absl::OkStatus();
  }

  // Checks that the weights are good, since the rank may report them as good.
  void CheckClean() {
    const Weights weights = engine_->weights();
    if (weights != Weights::kClean && !(arena_ && weights == Weights::kPaused)) {
      return Wrong("the weights are not good");
    }
    const std::optional<Version> version =
        weights == Weights::kPaused ? seen().committed : engine_->version();
    std::vector<std::string> bytes;
    if (version) bytes = BytesOf(model_, ContentOf(*version).value());
    if (delivery_ == client::Delivery::kLoader) {
      for (size_t i = 0; i < bytes.size(); ++i) {
        if (loaded_[model_[i].name] != bytes[i]) Wrong("loader " + model_[i].name);
      }
      return;
    }
    std::string image = EmptyImage(held_.region_bytes);
    if (version) image = ExpectedImage(std::move(image), held_.layout, model_, bytes);
    const std::string difference = Difference(image, region_->data(), held_.layout);
    if (!difference.empty()) Wrong(fmt::format("good, but torn: {}", difference));
  }
  // The version whose bytes are those of `version`.
  Version ContentOf(Version version) {
    MutexLock lock(&mutex_);
    const auto known = contents_.find(version);
    return known == contents_.end() ? version : known->second;
  }
  void Wrong(const std::string& what) {
    MutexLock lock(&mutex_);
    if (seen_.wrong.empty()) seen_.wrong = what;
  }

  const Model model_;
  const client::Delivery delivery_;
  const bool arena_;
  Held held_;
  std::unique_ptr<client::Engine> engine_;
  std::shared_ptr<client::Region> region_;
  // The rank's thread alone uses these.
  client::PartJoiner joiner_;
  std::map<std::string, std::string> loaded_;

  Mutex mutex_;
  CondVar cond_;
  bool hold_ ABSL_GUARDED_BY(mutex_) = false;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  Flips flips_ ABSL_GUARDED_BY(mutex_) = Flips::kWell;
  Seen seen_ ABSL_GUARDED_BY(mutex_);
  std::map<Version, Version> contents_ ABSL_GUARDED_BY(mutex_);  // by version committed
  std::thread thread_;
};

// A trainer rank that pushes every tensor from one region, in two buckets. `connect` carries the
// spec.
class Pusher {
 public:
  Pusher(client::ConnectOptions connect, const Model& model) : model_(model) {
    auto trainer = client::Trainer::Attach({.connect = std::move(connect)});
    INFO(trainer.status());
    REQUIRE(trainer.ok());
    trainer_ = *std::move(trainer);
    constexpr int64_t kAlignment = 64;
    int64_t bytes = 0;
    for (const TensorSpec& tensor : model) {
      offsets_.push_back(bytes);
      bytes += (TensorBytes(tensor) + kAlignment - 1) / kAlignment * kAlignment;
    }
    auto region = trainer_->NewRegion(bytes);
    REQUIRE(region.ok());
    region_ = *std::move(region);
  }
  client::Trainer& trainer() { return *trainer_; }

  enum Step { kBegun, kFirstBucket, kAllBuckets, kCommitted };
  // Installs `version` and calls `at` after each step. Returns the first error.
  absl::Status Install(
      int64_t version, const std::function<void(Step)>& at = [](Step) {}) {
    const std::vector<std::string> bytes = BytesOf(model_, version);
    for (size_t i = 0; i < bytes.size(); ++i) {
      bytes[i].copy(region_->data() + offsets_[i], bytes[i].size());
    }
    REFITD_ASSIGN_OR_RETURN(const auto update, trainer_->Begin({.version = Version(version)}));
    at(kBegun);
    const size_t half = model_.size() / 2;
    REFITD_RETURN_IF_ERROR(update->Push(Part(0, half)));
    at(kFirstBucket);
    REFITD_RETURN_IF_ERROR(update->Push(Part(half, model_.size())));
    at(kAllBuckets);
    REFITD_RETURN_IF_ERROR(update->Commit().status());
    at(kCommitted);
    return absl::OkStatus();
  }

 private:
  client::Bucket Part(size_t first, size_t end) const {
    return client::Bucket::Unpacked({model_.begin() + first, model_.begin() + end}, region_,
                                    {offsets_.begin() + first, offsets_.begin() + end});
  }
  const Model model_;
  std::unique_ptr<client::Trainer> trainer_;
  std::shared_ptr<client::Region> region_;
  std::vector<int64_t> offsets_;
};

// Options of a rank with shards; the first rank that attaches makes the group.
inline client::TrainerOptions ShardsOn(const Daemon& daemon, int rank = 0, int world_size = 1) {
  client::TrainerOptions options;
  options.connect.socket = daemon.socket();
  options.connect.group = "g";
  options.connect.spec.emplace().trainer_ranks = world_size;
  options.rank = rank;
  options.world_size = world_size;
  return options;
}

// A trainer rank whose shards lie in one region.
class Shards {
 public:
  Shards(const client::TrainerOptions& options, const Model& model, Held held)
      : model_(model), held_(std::move(held)) {
    auto trainer = client::Trainer::Attach(options);
    INFO(trainer.status());
    REQUIRE(trainer.ok());
    trainer_ = *std::move(trainer);
    Place();
  }

  client::Trainer& trainer() { return *trainer_; }
  Layout& layout() { return held_.layout; }
  void Hold(Held held) {
    held_ = std::move(held);
    Place();
  }

  // Makes new memory for the shards; the registered memory stays as it is.
  void Place() {
    auto region = trainer_->NewRegion(held_.region_bytes);
    INFO(region.status());
    REQUIRE(region.ok());
    region_ = *std::move(region);
    regions_.push_back(region_);
    for (Piece& piece : held_.layout.pieces) piece.region = region_->id();
  }
  // Gives back all memory except that of the shards.
  void DropOld() { regions_ = {region_}; }
  // Gives back all memory; call Place before anything else.
  void DropAll() {
    regions_.clear();
    region_.reset();
  }
  absl::Status Register() { return trainer_->Register(held_.layout); }
  void Fill(int64_t version) { Fill(BytesOf(model_, version)); }
  // `tensors`: whole tensors' bytes, in the model's order.
  void Fill(const std::vector<std::string>& tensors) {
    const std::string image =
        ExpectedImage(EmptyImage(held_.region_bytes), held_.layout, model_, tensors);
    image.copy(region_->data(), image.size());
  }
  char* Tensor(uint32_t tensor) {
    for (const Piece& piece : held_.layout.pieces) {
      if (piece.tensor == tensor) return region_->data() + piece.byte_offset;
    }
    return nullptr;
  }

 private:
  const Model model_;
  Held held_;
  std::unique_ptr<client::Trainer> trainer_;
  std::vector<std::shared_ptr<client::Region>> regions_;
  std::shared_ptr<client::Region> region_;  // the memory that the shards lie in
};

}  // namespace refitd::e2e

#endif  // REFITD_TESTS_E2E_CLIENT_MEMBERS_H_
