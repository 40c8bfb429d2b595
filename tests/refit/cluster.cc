#include "tests/refit/cluster.h"

#include <algorithm>
#include <utility>

#include "tests/workloads/sharding/arena.h"
#include "transport/base/status.h"
#include "transport/sockets/socket_wire.h"

namespace refitd::refit {
namespace {

constexpr char kGroup[] = "g";

// The stream of an engine rank that is ready whenever it is asked.
class ReadyInbox : public Inbox {
 public:
  explicit ReadyInbox(MemberCalls* calls) : calls_(*calls) {}

  void Flush() override {
    const std::optional<SendPrepare> asked = Last<SendPrepare>();
    if (!asked.has_value()) return;
    {
      MutexLock lock(&mutex_);
      if (std::exchange(answered_, asked->update) == asked->update) return;
    }
    calls_.HandleEngineEvent(asked->member, ReadyEvent{asked->member, asked->update});
  }

 private:
  MemberCalls& calls_;
  Mutex mutex_;
  UpdateId answered_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

Cluster::Cluster(int daemons, GroupSpec spec, const GroupLimits& limits, TransferFaults* faults)
    : spec_(std::move(spec)) {
  for (int d = 0; d < daemons; ++d) {
    DaemonOptions options;
    options.group = limits;
    DaemonInsides insides;
    insides.transport = MakeHostTransport({.threads = 2, .faults = faults});
    insides.wire = *MakeSocketWire({});
    daemons_.push_back(
        std::make_unique<DaemonParts>(std::to_string(d), std::move(options), std::move(insides)));
  }
}

// ---- members ----

int Cluster::Add(int daemon, Arrival arrival, std::string label, Layout layout) {
  DaemonParts& parts = *daemons_[static_cast<size_t>(daemon)];
  const bool engine = arrival.record.engine;
  Attached attached = parts.Attach(
      std::move(arrival), kGroup, spec_, daemon == 0 ? nullptr : daemons_[0].get(), kPatience,
      engine ? std::make_shared<ReadyInbox>(&parts.calls()) : std::make_shared<Inbox>());
  REQUIRE(Eventually([&] { return attached.inbox->welcomed(); }));
  ranks_.push_back({daemon, engine, std::move(label), std::move(attached), nullptr, nullptr, {}});
  const int number = static_cast<int>(ranks_.size()) - 1;
  REQUIRE(Register(number, std::move(layout)).ok());
  return number;
}

int Cluster::AddTrainer(int daemon, int rank, int world, Layout layout) {
  return Add(daemon, DaemonParts::Trainer(rank, world), fmt::format("trainer {}", rank),
             std::move(layout));
}

int Cluster::AddEngine(int daemon, const std::string& instance, int rank, int world,
                       Layout layout) {
  return Add(daemon, DaemonParts::Engine(instance, DeliveryMode::kInPlace, rank, world),
             fmt::format("engine {} {}", instance, rank), std::move(layout));
}

absl::Status Cluster::Register(int number, Layout layout) {
  Rank& r = rank(number);
  const uint64_t generation = r.layout == nullptr ? 1 : r.layout->binding_generation + 1;
  if (layout.pieces.empty()) return absl::OkStatus();
  r.shared = std::make_unique<SharedMemory>(sharding::ArenaBytes(layout));
  r.memory = {r.shared->data(), static_cast<size_t>(r.shared->bytes)};
  std::fill(r.memory.begin(), r.memory.end(), kPoison);
  DaemonParts& parts = DaemonOf(r);
  REFITD_ASSIGN_OR_RETURN(const RegionId region, parts.Register(r.attached, *r.shared));
  for (Piece& piece : layout.pieces) piece.region = region;
  layout.binding_generation = generation;
  r.layout = std::make_shared<const Layout>(layout);
  Answer answer;
  parts.calls().RegisterLayout(
      parts.daemon().NewCall(), r.attached.caller(), r.engine, std::move(layout),
      [reply = answer.function()](const absl::StatusOr<MemberCalls::RegisteredLayout>& registered) {
        reply(registered.status(), EmptyReply{});
      });
  return answer.status();
}

bool Cluster::Commits(int number, Version version) {
  return Eventually([&] { return rank(number).committed() == version; });
}

void Cluster::Lose(int number) {
  const Rank& r = rank(number);
  DaemonOf(r).calls().Gone(r.attached.id, "killed");
  REQUIRE(Eventually([&] {
    const auto members = daemons_[0]->operators().Group(kGroup)->machine.group.members;
    return std::none_of(members.begin(), members.end(), [&r](const MemberView& member) {
      return fmt::format("engine {} {}", member.instance, member.rank) == r.label &&
             member.state != "lost";
    });
  }));
}

// ---- calls ----

Answer Cluster::Refit(int trainer, Version version, Verification verification,
                      int64_t bucket_count) {
  const Rank& r = rank(trainer);
  RefitEvent e;
  e.version = version;
  e.verification = verification;
  e.bucket_count = bucket_count;
  Answer answer;
  DaemonOf(r).calls().Refit(DaemonOf(r).daemon().NewCall(), r.attached.caller(), std::move(e),
                            r.layout->binding_generation, answer.function());
  return answer;
}

absl::Status Cluster::RefitAll(const std::vector<int>& trainers, Version version,
                               Verification verification) {
  std::vector<Answer> answers;
  for (const int t : trainers) answers.push_back(Refit(t, version, verification));
  absl::Status status;
  for (const Answer& answer : answers) status.Update(answer.status());
  for (const auto& daemon : daemons_) daemon->daemon().CheckInvariants();
  return status;
}

Answer Cluster::Begin(int trainer, Version version, Verification verification) {
  BeginEvent e;
  e.version = version;
  e.verification = verification;
  return DaemonOf(rank(trainer)).Call(rank(trainer).attached, std::move(e));
}

Answer Cluster::Push(int trainer, Version version, int64_t seq, const TensorSpec& tensor,
                     std::string_view bytes) {
  ReceivedPush push;
  push.event.version = version;
  push.received = InlineBucket(tensor, bytes);
  push.received.bucket->seq = seq;
  Answer answer;
  const Rank& r = rank(trainer);
  DaemonOf(r).calls().PushBucket(DaemonOf(r).daemon().NewCall(), r.attached.caller(),
                                 std::move(push), answer.function());
  return answer;
}

Answer Cluster::Commit(int trainer, Version version, int64_t bucket_count) {
  CommitEvent e;
  e.version = version;
  e.bucket_count = bucket_count;
  return DaemonOf(rank(trainer)).Call(rank(trainer).attached, std::move(e));
}

// ---- counts ----

DataPlane::Asked Cluster::asked() {
  DataPlane::Asked sum;
  for (const auto& daemon : daemons_) {
    const DataPlane::Asked of = daemon->asked();
    sum.plans += of.plans;
    sum.programs += of.programs;
    sum.comparisons += of.comparisons;
  }
  return sum;
}

int64_t Cluster::sent_bytes(int daemon) {
  return daemons_[static_cast<size_t>(daemon)]->operators().Describe().moved.bytes_sent;
}

int64_t Cluster::exchanged_bytes() {
  int64_t bytes = 0;
  for (size_t d = 0; d < daemons_.size(); ++d) bytes += sent_bytes(static_cast<int>(d));
  return bytes;
}

}  // namespace refitd::refit
