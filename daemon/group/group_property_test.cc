// Random schedules: several trainer ranks, instances of both deliveries and of several ranks, any
// order of answers, with deaths, lateness, refused calls and time running on. TestGroup checks the
// promises at every action. This test checks that every schedule ends with nothing left over, and
// that without faults every update commits.
#include <algorithm>
#include <catch2/catch.hpp>
#include <random>

#include "daemon/group/group_test_util.h"

namespace refitd {
namespace {

using std::chrono::seconds;

class Schedule {
 public:
  Schedule(uint64_t seed, bool faults)
      : random_(seed), faults_(faults), g_(MakeSpec(), MakeLimits()) {
    MakeModel();
    const int instances = Pick(1, 4);
    const bool shadowed = faults && Chance(35);  // all: only then a rollback is possible
    for (int i = 0; i < instances; ++i) {
      const int delivery = Pick(0, 3);
      shapes_.push_back({"i" + std::to_string(i), Chance(60) ? 1 : 2, shadowed ? 3 : delivery});
    }
  }

  void Run() {
    const int steps = Pick(100, 250);
    for (int step = 0; step < steps; ++step) Step();
    if (!faults_) RunToCommit();
    End();
  }

  int64_t committed() const { return g_.group.View(g_.now).committed; }
  int rollbacks() const { return rollbacks_; }
  size_t staged() const { return g_.staged.size(); }

 private:
  struct Shape {
    std::string name;
    int world_size;
    // 0: in place, 1: loader with a manifest, 2: loader without, 3: shadowed
    int delivery;
  };
  struct Trainer {
    MemberId id;
    bool begun = false;
    std::optional<CallId> begin;
    std::vector<BucketDraft> plan;  // by seq
    std::vector<bool> pushed;
    std::optional<CallId> lease;
    std::optional<CallId> commit;
  };

  int Pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  bool Chance(int percent) { return Pick(1, 100) <= percent; }
  bool Fault(int per_mille) { return faults_ && Pick(1, 1000) <= per_mille; }

  GroupSpec MakeSpec() {
    GroupSpec spec;
    spec.trainer_ranks = trainer_ranks_ = Pick(1, 3);
    spec.min_instances = 1;
    spec.slot_bytes = 4096;
    spec.slots = Pick(2, 6);
    if (faults_ && Chance(30)) spec.hold_previous_seconds = Pick(1, 10);
    return spec;
  }
  GroupLimits MakeLimits() {
    GroupLimits limits;
    limits.outstanding_buckets = Pick(1, 6);
    limits.direct_part_bytes = Pick(1, 5000);
    limits.direct_part_tensors = Pick(1, 3);
    return limits;
  }
  void MakeModel() {
    const int tensors = Pick(1, 6);
    for (int i = 0; i < tensors; ++i) {
      const std::string name = "t" + std::to_string(i);
      switch (Pick(0, 3)) {
        case 0:
          model_.push_back({name, DType::kBFloat16, {Pick(0, 20), Pick(1, 200)}});
          break;
        case 1:
          model_.push_back({name, DType::kFloat32, {}});
          break;
        default:
          model_.push_back(Bytes(name, Pick(0, 12'000)));
      }
    }
  }

  // ---- members ----

  void AttachSomething() {
    for (int rank = 0; rank < trainer_ranks_; ++rank) {
      if (trainers_.contains(rank)) continue;
      trainers_[rank].id = g_.AttachTrainer(rank, trainer_ranks_);
      return;
    }
    for (const Shape& shape : shapes_) {
      for (int rank = 0; rank < shape.world_size; ++rank) {
        const auto key = std::make_pair(shape.name, rank);
        if (ranks_.contains(key)) continue;
        ranks_[key] =
            shape.delivery == 0   ? g_.InPlaceRank(shape.name, model_, rank, shape.world_size)
            : shape.delivery == 3 ? ShadowedRank(shape, rank)
            : shape.delivery == 1 ? g_.LoaderRank(shape.name, model_, rank, shape.world_size)
                                  : g_.LoaderRank(shape.name, std::nullopt, rank, shape.world_size);
        return;
      }
    }
  }
  MemberId ShadowedRank(const Shape& shape, int rank) {
    EngineIdentity who{shape.name, rank, shape.world_size, DeliveryMode::kInPlace, 2000 + rank,
                       {},         {}};
    who.wants_staged = Chance(30);
    return g_.ShadowedRank(std::move(who), LayoutOf(model_, rank, shape.world_size));
  }
  void KillSomething() {
    if (Chance(70) && !ranks_.empty()) {
      auto it = ranks_.begin();
      std::advance(it, Pick(0, static_cast<int>(ranks_.size()) - 1));
      g_.Lose(it->second);
      mute_.erase(it->second);
      ranks_.erase(it);
    } else if (!trainers_.empty()) {
      auto it = trainers_.begin();
      std::advance(it, Pick(0, static_cast<int>(trainers_.size()) - 1));
      const MemberId id = it->second.id;
      trainers_.erase(it);
      g_.Lose(id);
    }
  }

  // ---- trainers ----

  void NewRound() {
    const int64_t group_version = g_.group.version().value_or(Version(0)).value();
    version_ = group_version + Pick(1, 3);
    verification_ = static_cast<Verification>(Pick(1, 3));
    evict_late_ = Chance(50);
    broadcast_ = static_cast<BroadcastMethod>(Pick(0, 4));
    for (auto& [rank, t] : trainers_) {
      const MemberId id = t.id;
      t = {};
      t.id = id;
    }
    MakePlan();
  }
  // Cuts every tensor into ranges and shares these out over ranks and buckets.
  void MakePlan() {
    plan_.assign(static_cast<size_t>(trainer_ranks_), {});
    for (const TensorSpec& tensor : model_) {
      const int64_t elements = *ElementCount(tensor.shape);
      int64_t start = 0;
      do {
        int64_t count = elements - start;
        if (count > 1 && Chance(40)) count = Pick(1, static_cast<int>(count));
        auto& buckets = plan_[static_cast<size_t>(Pick(0, trainer_ranks_ - 1))];
        const bool fresh =
            buckets.empty() || Chance(60) || buckets.back().tensors.back().name == tensor.name;
        if (fresh) buckets.emplace_back();
        buckets.back().Add(tensor, start, count);
        start += count;
      } while (start < elements);
    }
  }
  void StepTrainer(int rank, Trainer* t) {
    if (!t->begun) {
      if (t->begin.has_value()) {
        if (const Reply* reply = g_.Answer(*t->begin); reply != nullptr) {
          t->begun = reply->status.ok();
          t->begin.reset();
        }
        return;
      }
      BeginEvent e;
      e.member = t->id;
      e.version = Version(version_);
      e.verification = verification_;
      e.evict_late = evict_late_;
      e.tensor_count = static_cast<int64_t>(model_.size());
      e.broadcast = broadcast_;
      e.slots_on_devices = broadcast_ > BroadcastMethod::kDirect || Chance(80);
      if (Fault(10)) e.broadcast = BroadcastMethod::kNccl;
      if (Fault(20)) e.version = Version(0);
      e.hold = faults_ && Chance(20);
      if (Chance(30)) e.request_id = "begin" + std::to_string(version_);
      t->plan = plan_[static_cast<size_t>(rank)];
      t->pushed.assign(t->plan.size(), false);
      t->begin = g_.Begin(e);
      return;
    }
    if (t->commit.has_value()) {
      if (const Reply* reply = g_.Answer(*t->commit); reply != nullptr && Chance(50)) {
        t->commit.reset();  // refused: try again
      }
      return;
    }
    if (t->lease.has_value()) return StepLease(t);
    if (std::find(t->pushed.begin(), t->pushed.end(), false) == t->pushed.end() || Fault(10)) {
      t->commit = g_.Commit(t->id, version_, static_cast<int64_t>(t->plan.size()));
    } else if (Chance(30)) {
      t->lease = g_.Lease(t->id, version_, Chance(30) ? Duration(seconds(1)) : Duration(0));
    } else {
      PushOne(t, std::nullopt);
    }
  }
  void StepLease(Trainer* t) {
    const Reply* reply = g_.Answer(*t->lease);
    if (reply == nullptr) return;
    t->lease.reset();
    if (!reply->status.ok()) return;
    const SlotGrant grant = std::get<LeaseSlotReply>(reply->payload).grant;
    if (Fault(50)) return;  // forgotten: the lease expires
    if (!PushOne(t, grant)) g_.Release(t->id, grant);
  }
  // Pushes the next bucket, or a later one.
  bool PushOne(Trainer* t, std::optional<SlotGrant> slot) {
    std::vector<size_t> left;
    for (size_t i = 0; i < t->pushed.size(); ++i) {
      if (!t->pushed[i]) left.push_back(i);
    }
    if (left.empty()) return false;
    const size_t seq =
        left[Chance(70) ? 0 : static_cast<size_t>(Pick(0, static_cast<int>(left.size()) - 1))];
    BucketDraft e = t->plan[seq];
    e.member = t->id;
    e.version = Version(version_);
    e.seq = static_cast<int64_t>(seq);
    if (Fault(20)) e.seq = Pick(0, 9);
    if (Fault(10)) e.version = Version(version_ + 1);
    if (Fault(10)) e.tensors[0].name = "unknown";
    if (slot.has_value()) {
      int64_t end = 0;
      std::vector<int64_t> offsets;
      for (size_t i = 0; i < e.tensors.size(); ++i) {
        offsets.push_back(end);
        end += e.ranges[i].count * ElementBytes(e.tensors[i].dtype);
        end = (end + 7) / 8 * 8;
      }
      if (end > g_.group.spec().slot_bytes) return false;
      e.LieIn(*slot, offsets);
    }
    const CallId call = g_.Push(e);
    const Reply* reply = g_.Answer(call);
    const bool taken = reply == nullptr || reply->status.ok();
    if (taken && e.seq == static_cast<int64_t>(seq)) t->pushed[seq] = true;
    return taken || !slot.has_value();
  }

  // ---- one step ----

  void Step() {
    if (Chance(10) || (!faults_ && Chance(30))) AttachSomething();
    if (Fault(8)) KillSomething();
    if (Fault(4)) Pass();
    if (Fault(5)) Interfere();
    if (Fault(20)) g_.Rollback(Chance(50) ? SomeTrainer() : MemberId());
    if (Fault(20)) g_.ReleasePrevious(Chance(50) ? SomeTrainer() : MemberId());
    Progress();
  }
  MemberId SomeTrainer() const {
    return trainers_.empty() ? MemberId() : trainers_.begin()->second.id;
  }
  void Progress() {
    switch (Pick(0, 4)) {
      case 0:
        AnswerStaged();
        AnswerPrepare();
        break;
      case 1:
        if (!g_.running.empty()) {
          const size_t i = PickIndex(g_.running.size());
          if (Fault(15)) {
            g_.Finish(i, absl::DataLossError("planted"), Pick(-1, 2));
          } else {
            g_.Finish(i);
          }
        } else if (g_.verifying.has_value()) {
          if (Fault(50)) {
            g_.FinishVerify(absl::DataLossError("planted"), {0});
          } else {
            g_.FinishVerify();
          }
        }
        break;
      case 2:
        AnswerPart();
        break;
      default:
        if (!g_.group.update_running() && NoneWaits()) NewRound();
        if (trainers_.empty()) return;
        auto it = trainers_.begin();
        std::advance(it, Pick(0, static_cast<int>(trainers_.size()) - 1));
        StepTrainer(it->first, &it->second);
    }
  }
  bool NoneWaits() {
    for (const auto& [rank, t] : trainers_) {
      if (t.begin.has_value() && g_.Answer(*t.begin) == nullptr) return false;
    }
    return true;
  }
  size_t PickIndex(size_t size) { return static_cast<size_t>(Pick(0, static_cast<int>(size) - 1)); }
  void AnswerPrepare() {
    std::erase_if(g_.prepared, [this](const auto& p) { return g_.lost.contains(p.first); });
    if (g_.prepared.empty()) return;
    const size_t i = PickIndex(g_.prepared.size());
    const auto [member, update] = g_.prepared[i];
    if (Fault(20)) mute_.insert(member);
    if (mute_.contains(member)) return;
    g_.prepared.erase(g_.prepared.begin() + static_cast<int64_t>(i));
    if (Fault(20)) {
      g_.Do(EngineFailed{member, update, "planted"});
    } else {
      g_.AnswerReady(member, update);
    }
  }
  void AnswerStaged() {
    std::erase_if(g_.processing, [this](MemberId id) { return g_.lost.contains(id); });
    if (g_.processing.empty()) return;
    const MemberId member = g_.processing[PickIndex(g_.processing.size())];
    if (Fault(50)) mute_.insert(member);
    if (mute_.contains(member)) return;
    if (Fault(20)) {
      g_.Do(EngineFailed{member, g_.assembled->id, "planted"});
    } else {
      g_.Processed(member);
    }
  }
  void AnswerPart() {
    if (g_.handed.empty()) return;
    const size_t i = PickIndex(g_.handed.size());
    if (Fault(10)) mute_.insert(g_.handed[i].member);
    if (mute_.contains(g_.handed[i].member)) return;
    g_.AckOne(i);
  }
  void Pass() {
    if (Chance(70) && g_.group.NextDeadline().has_value()) {
      g_.Expire();
    } else {
      g_.Advance(seconds(Pick(0, 20)));
    }
  }
  void Interfere() {
    switch (Pick(0, 3)) {
      case 0:
        g_.Do(OperatorAbort{g_.NewCall(), "planted"});
        break;
      case 1:
        if (!trainers_.empty()) g_.Abort(trainers_.begin()->second.id, version_);
        break;
      case 2:
        for (const CallId call : g_.asked) {
          if (g_.Answer(call) != nullptr) continue;
          g_.Do(CallGone{call});
          break;
        }
        break;
      default:
        if (!ranks_.empty()) {
          g_.Do(AckEvent{ranks_.begin()->second, UpdateId(1), PartSeq(1000)});
        }
    }
  }

  // Without faults every update commits: no order of pushers and readers blocks the slots.
  void RunToCommit() {
    for (size_t i = 0; i < shapes_.size() * 2 + 4; ++i) AttachSomething();
    const int64_t before = committed();
    for (int step = 0; step < 20'000 && committed() == before; ++step) {
      Progress();
    }
    INFO("state " << g_.group.View(g_.now).update->state);
    CHECK(committed() > before);
  }

  // Ranks that were packing when an update was given up give their slots back later.
  void GiveLeasesBack() {
    std::vector<SlotGrant> grants;
    for (const auto& [call, reply] : g_.replies) {
      if (const auto* lease = std::get_if<LeaseSlotReply>(&reply.payload))
        grants.push_back(lease->grant);
    }
    for (const SlotGrant& grant : grants) {
      for (const auto& [rank, trainer] : trainers_) g_.Release(trainer.id, grant);
    }
  }

  void End() {
    for (int i = 0; i < 1000; ++i) {
      while (!g_.running.empty()) g_.Finish(PickIndex(g_.running.size()));
      if (g_.verifying.has_value()) g_.FinishVerify();
      if (!g_.group.NextDeadline().has_value()) break;
      g_.Expire();
    }
    CHECK_FALSE(g_.group.update_running());
    CHECK(g_.group.NextDeadline() == std::nullopt);
    for (const CallId call : g_.asked) {
      CAPTURE(call.value());
      CHECK(g_.Answer(call) != nullptr);
    }
    while (!g_.handed.empty()) g_.AckOne(0);
    GiveLeasesBack();
    CHECK(g_.FreeSlots() == g_.group.spec().slots);
    CHECK(g_.ended.size() == static_cast<size_t>(committed() + g_.group.View(g_.now).aborted));
    for (const CallId call : g_.asked) {
      const auto* done = std::get_if<CommitReply>(&g_.Answer(call)->payload);
      if (done != nullptr && done->content.has_value()) ++rollbacks_;
    }
    CHECK(g_.released == g_.lost);
    for (const MemberView& member : g_.group.View(g_.now).members) {
      CHECK(member.state == "attached");
    }
    for (const auto& [key, id] : ranks_) g_.Lose(id);
    for (const auto& [rank, t] : trainers_) g_.Lose(t.id);
    CHECK_FALSE(g_.group.has_members());
    CHECK(g_.group.View(g_.now).instances.empty());
  }

  std::mt19937_64 random_;
  const bool faults_;
  int trainer_ranks_ = 1;
  std::vector<TensorSpec> model_;
  std::vector<Shape> shapes_;
  TestGroup g_;
  std::map<int, Trainer> trainers_;
  std::map<std::pair<std::string, int>, MemberId> ranks_;
  std::set<MemberId> mute_;  // never answer again
  std::vector<std::vector<BucketDraft>> plan_;
  int64_t version_ = 1;
  Verification verification_ = Verification::kReadback;
  bool evict_late_ = false;
  BroadcastMethod broadcast_ = BroadcastMethod::kAuto;
  int rollbacks_ = 0;
};

TEST_CASE("random schedules without faults commit every update") {
  int64_t committed = 0;
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    INFO("seed " << seed);
    Schedule schedule(seed, false);
    schedule.Run();
    committed += schedule.committed();
  }
  CHECK(committed > 2000);
}

TEST_CASE("random schedules with deaths, lateness and bad calls keep every promise and end") {
  int64_t committed = 0;
  int rollbacks = 0;
  size_t staged = 0;
  for (uint64_t seed = 0; seed < 8000; ++seed) {
    INFO("seed " << seed);
    Schedule schedule(seed, true);
    schedule.Run();
    committed += schedule.committed();
    rollbacks += schedule.rollbacks();
    staged += schedule.staged();
  }
  CHECK(rollbacks > 100);
  CHECK(staged > 100);
  CHECK(committed > 4000);  // fewer would mean that the schedules test little
}

}  // namespace
}  // namespace refitd
