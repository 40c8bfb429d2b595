#include "tests/refit/cluster.h"

#include <algorithm>
#include <cstring>

#include "daemon/group/bucket_draft.h"
#include "daemon/link/commands.h"
#include "daemon/link/limits.h"
#include "daemon/link/reports.h"
#include "transport/base/status.h"
#include "transport/plan/refit_plan.h"
#include "transport/sharding/arena.h"

namespace refitd::refit {
namespace {

constexpr int64_t kMessageBytes = 8 << 20;
constexpr RegionId kRegion{1};

}  // namespace

struct Cluster::Daemon : public MemoryResolver {
  int index = 0;
  NodeId node;
  Cluster* cluster = nullptr;
  std::unique_ptr<GroupMachine> machine;
  std::unique_ptr<Executor> executor;
  std::unique_ptr<ReportDecoder> reports;    // of this joined daemon, at the coordinator
  std::unique_ptr<CommandDecoder> commands;  // at this joined daemon
  std::vector<char> pool;
  std::map<MemberId, Rank*> members;
  std::map<CallId, std::shared_ptr<Answer>> calls;
  std::map<CallId, std::vector<char>> pushed;  // the bytes of buckets, until the answer
  uint64_t next_member = 1;
  uint32_t epoch_rank = 0;

  absl::StatusOr<MemorySpan> Region(MemberId member, RegionId region) const override {
    const auto it = members.find(member);
    if (it == members.end() || region != kRegion) return absl::NotFoundError("no such region");
    return MemorySpan{it->second->memory.data(), static_cast<int64_t>(it->second->memory.size()),
                      nullptr};
  }
  absl::StatusOr<MemorySpan> Slot(SlotIndex slot) const override {
    const int64_t bytes = cluster->spec_.slot_bytes;
    return MemorySpan{const_cast<char*>(pool.data()) + int64_t{slot.value()} * bytes, bytes,
                      nullptr};
  }
};

Cluster::Cluster(int daemons, GroupSpec spec, GroupLimits limits, TransferFaults* faults,
                 const std::vector<Protocol>& protocols)
    : spec_(std::move(spec)), sent_bytes_(static_cast<size_t>(daemons)) {
  HostTransportOptions host;
  host.threads = 2;
  host.faults = faults;
  transport_ = MakeHostTransport(host);
  for (int d = 0; d < daemons; ++d) {
    auto& daemon = daemons_.emplace_back(std::make_unique<Daemon>());
    daemon->index = d;
    daemon->node = NodeId(static_cast<uint32_t>(d));
    daemon->cluster = this;
    daemon->executor = std::make_unique<Executor>(transport_.get());
    daemon->pool.assign(static_cast<size_t>(spec_.slot_bytes * spec_.slots), kPoison);
    if (d == 0) {
      CoordinatorOptions options;
      options.name = "g";
      options.daemon_id = "daemon-0";
      options.incarnation = 7;
      options.spec = spec_;
      options.limits = limits;
      options.next_update = [this] { return UpdateId(++updates_); };
      options.next_member = [this] { return NextMember(0); };
      options.next_call = [this] { return CallId(++calls_); };
      daemon->machine = std::make_unique<Coordinator>(std::move(options));
      continue;
    }
    FollowerOptions options;
    options.name = "g";
    options.coordinator_address = "daemon-0";
    options.next_update = [this] { return UpdateId(++updates_); };
    daemon->machine = std::make_unique<Follower>(std::move(options));
    const PeerBounds bounds = BoundsOf(spec_);
    daemon->reports = std::make_unique<ReportDecoder>(bounds);
    daemon->commands = std::make_unique<CommandDecoder>(bounds);
    const auto joined = static_cast<size_t>(d - 1);
    Feed(0, NodeJoined{daemon->node, fmt::format("daemon-{}", d), "here",
                       joined < protocols.size() ? protocols[joined] : kProtocol});
    Feed(d, LinkUp{7, spec_, std::nullopt, "daemon-0"});
  }
}

Cluster::~Cluster() { transport_.reset(); }

MachineView Cluster::View() const { return daemons_[0]->machine->View(now_); }

// ---- members ----

MemberId Cluster::NextMember(int daemon) {
  return MemberId(daemons_[static_cast<size_t>(daemon)]->next_member++);
}

int Cluster::Add(int daemon, bool engine, Layout layout, std::string label,
                 const GroupEvent& attached, MemberId member) {
  auto& rank = ranks_.emplace_back(std::make_unique<Rank>());
  rank->daemon = daemon;
  rank->engine = engine;
  rank->member = member;
  rank->label = std::move(label);
  daemons_[static_cast<size_t>(daemon)]->members[member] = rank.get();
  Feed(daemon, attached);
  const int number = static_cast<int>(ranks_.size()) - 1;
  REFITD_CHECK(Register(number, std::move(layout)).ok());
  return number;
}

int Cluster::AddTrainer(int daemon, int rank, int world, Layout layout) {
  const MemberId member = NextMember(daemon);
  TrainerIdentity who;
  who.rank = rank;
  who.world_size = world;
  return Add(daemon, false, std::move(layout), fmt::format("trainer {}", rank),
             TrainerAttached{member, who}, member);
}

int Cluster::AddEngine(int daemon, const std::string& instance, int rank, int world,
                       Layout layout) {
  const MemberId member = NextMember(daemon);
  EngineIdentity who;
  who.instance = instance;
  who.rank = rank;
  who.world_size = world;
  return Add(daemon, true, std::move(layout), fmt::format("engine {} {}", instance, rank),
             EngineAttached{member, who}, member);
}

absl::Status Cluster::Register(int number, Layout layout) {
  Rank& r = rank(number);
  r.memory.assign(static_cast<size_t>(sharding::ArenaBytes(layout)), kPoison);
  layout.binding_generation = r.layout == nullptr ? 1 : r.layout->binding_generation + 1;
  for (Piece& piece : layout.pieces) piece.region = kRegion;
  r.layout = std::make_shared<const Layout>(std::move(layout));
  Daemon& daemon = *daemons_[static_cast<size_t>(r.daemon)];
  const CallId call(++calls_);
  auto answer = std::make_shared<Answer>();
  daemon.calls[call] = answer;
  Feed(r.daemon, GroupEvent(LayoutRegistered{r.member, r.layout, call}));
  if (!Run() || !answer->came) return absl::DeadlineExceededError("no answer");
  return answer->status;
}

void Cluster::Lose(int number) {
  const Rank& r = rank(number);
  Feed(r.daemon, GroupEvent(MemberLost{r.member, "killed"}));
}

Rank* Cluster::RankOf(int daemon, MemberId member) {
  const auto& members = daemons_[static_cast<size_t>(daemon)]->members;
  const auto it = members.find(member);
  return it == members.end() ? nullptr : it->second;
}

// ---- calls ----

std::shared_ptr<Answer> Cluster::Call(int trainer, GroupEvent event) {
  const Rank& r = rank(trainer);
  auto answer = std::make_shared<Answer>();
  const CallId call(++calls_);
  daemons_[static_cast<size_t>(r.daemon)]->calls[call] = answer;
  std::visit(
      [&](auto& e) {
        if constexpr (requires { e.call; }) e.call = call;
        if constexpr (requires { e.member; }) e.member = r.member;
      },
      event);
  if (std::holds_alternative<BucketEvent>(event)) {
    auto stored = daemons_[static_cast<size_t>(r.daemon)]->pushed.extract(CallId(0));
    stored.key() = call;
    daemons_[static_cast<size_t>(r.daemon)]->pushed.insert(std::move(stored));
  }
  Feed(r.daemon, std::move(event));
  return answer;
}

std::shared_ptr<Answer> Cluster::Refit(int trainer, Version version, Verification verification,
                                       int64_t bucket_count) {
  RefitEvent e;
  e.version = version;
  e.verification = verification;
  e.bucket_count = bucket_count;
  return Call(trainer, e);
}

std::shared_ptr<Answer> Cluster::Begin(int trainer, Version version, Verification verification) {
  BeginEvent e;
  e.version = version;
  e.verification = verification;
  return Call(trainer, e);
}

std::shared_ptr<Answer> Cluster::Push(int trainer, Version version, int64_t seq,
                                      const TensorSpec& tensor, std::vector<char> bytes) {
  Daemon& daemon = *daemons_[static_cast<size_t>(rank(trainer).daemon)];
  BucketDraft e;
  e.source = CheckedBucket::Source::kInline;
  e.places.push_back({.inline_data = bytes.data()});
  e.version = version;
  e.seq = seq;
  e.Add(tensor, 0, *ElementCount(tensor.shape));
  daemon.pushed[CallId(0)] = std::move(bytes);  // Call sets the bucket's number
  return Call(trainer, BucketEvent(e));
}

std::shared_ptr<Answer> Cluster::Commit(int trainer, Version version, int64_t bucket_count) {
  CommitEvent e;
  e.version = version;
  e.bucket_count = bucket_count;
  return Call(trainer, e);
}

// ---- the loop ----

void Cluster::Post(std::function<void()> task) {
  MutexLock lock(&mutex_);
  tasks_.push_back(std::move(task));
  posted_.NotifyAll();
}

bool Cluster::Run() {
  const TimePoint deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (true) {
    std::function<void()> task;
    {
      MutexLock lock(&mutex_);
      while (tasks_.empty() && jobs_ > 0) {
        if (std::chrono::steady_clock::now() >= deadline) return false;
        posted_.WaitUntil(&mutex_, deadline);
      }
      if (tasks_.empty()) return true;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

void Cluster::Feed(int daemon, MachineEvent event) {
  Post([this, daemon, event = std::move(event)]() mutable {
    MachineActions actions;
    daemons_[static_cast<size_t>(daemon)]->machine->Handle(event, now_, &actions);
    daemons_[static_cast<size_t>(daemon)]->machine->CheckInvariants();
    for (const MachineAction& action : actions) Perform(daemon, action);
  });
}

void Cluster::Perform(int daemon, const MachineAction& action) {
  std::visit(
      [this, daemon](const auto& outer) {
        std::visit([this, daemon](const auto& a) { this->On(daemon, a); }, outer);
      },
      action);
}

// ---- members' actions ----

void Cluster::On(int daemon, const Reply& a) {
  Daemon& d = *daemons_[static_cast<size_t>(daemon)];
  d.pushed.erase(a.call);
  const auto it = d.calls.find(a.call);
  if (it == d.calls.end()) return;
  *it->second = {true, a.status, a.payload};
  d.calls.erase(it);
}

void Cluster::On(int daemon, const SendPrepare& a) {
  Feed(daemon, GroupEvent(ReadyEvent{a.member, a.update}));
}

void Cluster::On(int daemon, const SendCommitted& a) {
  if (Rank* r = RankOf(daemon, a.member)) r->committed = a.version;
}

void Cluster::On(int daemon, const SendAborted& a) {
  if (Rank* r = RankOf(daemon, a.member)) {
    ++r->aborted;
    r->dirty = a.dirty;
  }
}

void Cluster::On(int daemon, const ReleaseMember& a) {
  Daemon& d = *daemons_[static_cast<size_t>(daemon)];
  d.executor->Release(a.member);
  d.members.erase(a.member);
}

void Cluster::On(int daemon, const UpdateEnded& a) {
  daemons_[static_cast<size_t>(daemon)]->executor->Forget(a.update);
}

// ---- bytes ----

void Cluster::On(int daemon, const StartTransfer& a) {
  Daemon& d = *daemons_[static_cast<size_t>(daemon)];
  const auto done = [this, daemon](const Executor::Done& result) {
    Post([this, daemon, result] {
      --jobs_;
      daemons_[static_cast<size_t>(daemon)]->executor->Finished(result);
      Feed(daemon,
           GroupEvent(TransferDone{result.update, result.part, result.status, result.bytes_written,
                                   result.failed_destination, result.source_digests}));
    });
  };
  ++jobs_;
  const absl::Status status = d.executor->Start(a, d, done);
  if (status.ok()) return;
  --jobs_;
  Feed(daemon, GroupEvent(TransferDone{a.update, a.part, status, {}, -1, {}}));
}

void Cluster::On(int daemon, const StartVerify& a) {
  Daemon& d = *daemons_[static_cast<size_t>(daemon)];
  ++jobs_;
  const absl::Status status = d.executor->Start(a, d, [this, daemon](const VerifyDone& done) {
    Post([this, daemon, done] {
      --jobs_;
      Feed(daemon, GroupEvent(done));
    });
  });
  if (status.ok()) return;
  --jobs_;
  Feed(daemon, GroupEvent(VerifyDone{a.update, status, {}}));
}

void Cluster::On(int daemon, const StartMoves& a) {
  Daemon& d = *daemons_[static_cast<size_t>(daemon)];
  compared_ += a.step == MoveStep::kCompare;
  ++jobs_;
  const absl::Status status = d.executor->Start(a, d, [this, daemon](Executor::Moved moved) {
    Post([this, daemon, moved = std::move(moved)]() mutable {
      --jobs_;
      daemons_[static_cast<size_t>(daemon)]->executor->Finished(&moved);
      Feed(daemon, moved.done);
    });
  });
  if (status.ok()) return;
  --jobs_;
  MovesDone done;
  done.update = a.update;
  done.step = a.step;
  done.round = a.round;
  done.status = status;
  Feed(daemon, done);
}

void Cluster::On(int daemon, const PlanRefit& a) {
  ++compiled_;
  auto plan = CompileRefit(a.sources, a.destinations, a.options);
  Feed(daemon, GroupEvent(RefitPlanned{a.program, plan.status(), plan.ok() ? *plan : nullptr}));
}

void Cluster::On(int daemon, const BuildProgram& a) {
  ++built_;
  ProgramBuilt built{a.program, a.build, absl::OkStatus(), nullptr};
  auto program = CompileNode(*a.plan, a.node, a.sources, a.destinations, a.options);
  built.status = program.status();
  if (program.ok()) {
    built.node_program = std::make_shared<const NodeProgram>(*std::move(program));
  }
  Feed(daemon, built);
}

// ---- links: commands and reports pass through real messages ----

void Cluster::On(int, const SendCommand& a) {
  const auto to = static_cast<int>(a.node.value());
  auto answers = ToProto(a.command, kMessageBytes);
  REFITD_CHECK(answers.ok());
  for (const v1::PeerAnswer& answer : *answers) {
    auto command = daemons_[static_cast<size_t>(to)]->commands->Decode(answer);
    REFITD_CHECK(command.ok());
    if (command->has_value()) Feed(to, CommandReceived{**std::move(command)});
  }
}

void Cluster::On(int daemon, const SendReport& a) {
  Daemon& d = *daemons_[static_cast<size_t>(daemon)];
  auto messages = ToProto(a.report, BoundsOf(spec_), kMessageBytes);
  REFITD_CHECK(messages.ok());
  for (const v1::PeerMessage& message : *messages) {
    auto report = d.reports->Decode(message);
    REFITD_CHECK(report.ok());
    if (report->has_value()) Feed(0, ReportReceived{d.node, **std::move(report)});
  }
}

// ---- the wire ----

void Cluster::On(int daemon, const OpenEpoch& a) {
  daemons_[static_cast<size_t>(daemon)]->epoch_rank = static_cast<uint32_t>(a.rank);
  epoch_daemons_[static_cast<uint32_t>(a.rank)] = daemon;
  Feed(daemon, EpochOpened{a.epoch, absl::OkStatus(), "here"});
}

void Cluster::On(int daemon, const ConnectEpoch& a) {
  Feed(daemon, EpochUp{a.epoch, absl::OkStatus()});
}

// Operations that this end waits in fail; the other ends fail when they are closed.
void Cluster::On(int daemon, const CloseEpoch& a) {
  const uint32_t rank = daemons_[static_cast<size_t>(daemon)]->epoch_rank;
  const auto end = [&](auto* operations) {
    for (auto it = operations->begin(); it != operations->end();) {
      if (it->second.posted.erase(rank) > 0) {
        Feed(daemon, WireDone{a.epoch, WireSeq(it->first), absl::CancelledError("closed")});
      }
      it = it->second.posted.empty() ? operations->erase(it) : std::next(it);
    }
  };
  end(&exchanges_);
  end(&broadcasts_);
}

void Cluster::On(int daemon, const AcquireWire&) { Feed(daemon, WireGranted{}); }

void Cluster::On(int daemon, const StartWire& a) {
  Broadcast& op = broadcasts_[a.seq.value()];
  op.posted.emplace(a.rank, a);
  if (op.posted.size() < a.ranks.size()) return;
  const auto slot = [&](uint32_t rank) {
    Daemon& d = *daemons_[static_cast<size_t>(epoch_daemons_.at(rank))];
    return d.Slot(op.posted.at(rank).slot.slot)->data;
  };
  for (const uint32_t rank : a.ranks) {
    if (rank != a.ranks[0]) std::memcpy(slot(rank), slot(a.ranks[0]), static_cast<size_t>(a.bytes));
  }
  for (const uint32_t rank : a.ranks) {
    Feed(epoch_daemons_.at(rank), WireDone{a.epoch, a.seq, absl::OkStatus()});
  }
  broadcasts_.erase(a.seq.value());
  (void)daemon;
}

// Completes when all ranks that the legs name have posted; both ends must agree on the bytes.
void Cluster::On(int daemon, const StartExchange& a) {
  Exchange& op = exchanges_[a.seq.value()];
  op.posted.emplace(daemons_[static_cast<size_t>(daemon)]->epoch_rank, a);
  for (const auto& [rank, start] : op.posted) {
    for (const StartExchange::Leg& leg : start.legs) {
      if (!op.posted.contains(leg.rank)) return;
    }
  }
  absl::Status status;
  for (const auto& [from, start] : op.posted) {
    for (const StartExchange::Leg& leg : start.legs) {
      const StartExchange& there = op.posted.at(leg.rank);
      const auto back = std::find_if(there.legs.begin(), there.legs.end(),
                                     [r = from](const auto& l) { return l.rank == r; });
      if (back == there.legs.end() || back->bytes_in != leg.bytes_out) {
        status = absl::FailedPreconditionError("the two ends differ");
        continue;
      }
      const Daemon& here = *daemons_[static_cast<size_t>(epoch_daemons_.at(from))];
      const Daemon& other = *daemons_[static_cast<size_t>(epoch_daemons_.at(leg.rank))];
      std::memcpy(other.Slot(there.in)->data + back->in_offset,
                  here.Slot(start.out)->data + leg.out_offset, static_cast<size_t>(leg.bytes_out));
      exchanged_bytes_ += leg.bytes_out;
      sent_bytes_[static_cast<size_t>(epoch_daemons_.at(from))] += leg.bytes_out;
    }
  }
  const Exchange done = std::move(op);
  exchanges_.erase(a.seq.value());
  for (const auto& [rank, start] : done.posted) {
    Feed(epoch_daemons_.at(rank), WireDone{start.epoch, start.seq, status});
  }
}

}  // namespace refitd::refit
