#include "daemon/group/follower.h"

#include <algorithm>
#include <deque>
#include <map>
#include <utility>

#include "daemon/group/worker.h"
#include "transport/base/status.h"

namespace refitd {
struct Follower::Impl {
  explicit Impl(FollowerOptions follower_options);

  enum class State { kJoining, kJoined, kLost };
  struct Member {
    bool engine = false;
    std::variant<TrainerIdentity, EngineIdentity> identity;
    std::shared_ptr<const Layout> layout;
    uint64_t layout_digest = 0;
    // Waits for the slots on its GPU; the member was not reported to the coordinator yet.
    bool awaits_slots = false;
    bool welcomed = false;
    std::optional<UpdateId> prepared;  // Prepare was sent, no outcome yet
  };
  // A call that the coordinator has not answered yet.
  struct SentCall {
    bool bucket = false;
    size_t answer = 0;  // index of ReplyPayload in an OK answer
  };
  // A layout that the coordinator has not answered yet. Until then the previous layout is in force.
  struct SentLayout {
    MemberId member;
    std::shared_ptr<const Layout> layout;
    uint64_t digest = 0;
  };

  // ---- the members' events ----
  void On(const TrainerAttached& e) { Attach(e.member, false, e.identity, false); }
  void On(const EngineAttached& e) { Attach(e.member, true, e.identity, e.awaits_slots); }
  void On(const MemberLost& e);
  void On(const LayoutRegistered& e);
  template <typename Call>
  requires kIsOneOf<Call, TrainerCall>
  void On(const Call& e);
  void On(const ReadyEvent& e) { Report(ReadyEvent{e.member, e.update, e.stopped}); }
  void On(const ProcessedEvent& e) { Report(ProcessedEvent{e.member, e.update}); }
  void On(const EngineFailed& e) { Report(e); }
  void On(const AckEvent& e) { Report(AckEvent{e.member, e.update, e.part}); }
  void On(const CallGone& e);
  void On(const OperatorAbort& e) { RefuseHere(e.call); }
  void On(const ReplaceGroup& e) { RefuseHere(e.call); }
  void On(const DrainEvent& e);
  void On(const refitd::Tick& e);

  // ---- the link ----
  void On(const LinkUp& e);
  void On(const LinkLost& e) { Lose(e.status); }
  void On(const CommandReceived& e);
  void On(const SlotsMade& e);
  template <typename Event>
  requires requires(Worker& w, const Event& e, TimePoint now, Worker::Output out) {
    w.Handle(e, now, out);
  }
  void On(const Event& e) { worker.Handle(e, now, Out()); }
  // Only coordinators get the events below.
  template <typename Event>
  requires kIsOneOf<
      Event, std::variant<RefitPlanned, CompareDone, RefitDone, FailUpdate, UpdateAnnounced,
                          DataPlaneState, KeepNodesOut, NodeJoined, NodeLost, ReportReceived>>
  void On(const Event& /*e*/) {}

  // ---- commands ----
  void Take(const PeerWelcome& c);
  void Take(const RefuseMember& c);
  void Take(const Reply& c);
  void Take(const PeerPrepare& c);
  void Take(const SendPart& c);
  void Take(const MemberAction& c);
  void Take(const PeerUpdateEnded& c);
  void Take(const PeerPing& c) { Report(PeerPong{c.number}); }
  void Take(const PeerIncarnation& c);
  void Take(const PeerReadiness& c);
  void Take(const PeerOwner& c) { owner = c.owner; }
  template <typename WorkerCommand>
  void Take(const WorkerCommand& c) {
    worker.Handle(c, now, Out());
  }

  template <typename Identity>
  void Attach(MemberId id, bool engine, const Identity& identity, bool awaits_slots);
  void Announce(MemberId id, const Member& member);
  absl::Status CanRegisterLayout(MemberId member) const;
  void Report(PeerReport report);
  void RefuseHere(CallId call);
  void AnswerLayout(CallId call, const absl::Status& status);
  void AnswerLayoutsOf(MemberId member, const absl::Status& status);
  void Lose(const absl::Status& status);
  void KeepReadiness();
  void AnswerLostCalls();
  void EndIfIdle();
  // The part of the invariants that costs nothing, checked after every event.
  void CheckState() const;
  void CheckInvariants() const;
  Worker::Output Out() { return {actions, &reports}; }
  template <typename Action>
  void Do(Action action) {
    actions->push_back(std::move(action));
  }

  const FollowerOptions options;
  State state = State::kJoining;
  absl::Status lost;
  uint64_t incarnation = 0;
  GroupSpec spec;
  std::optional<Version> version;
  std::optional<Version> content;  // if `version` is a rollback
  std::string coordinator_id;
  std::string owner;              // of the group
  Protocol protocol = kProtocol;  // agreed with the coordinator, once joined
  bool entered = false;           // a member has attached
  std::map<MemberId, Member> members;
  std::map<CallId, SentCall> calls;                                // unanswered
  std::map<CallId, std::shared_ptr<const CheckedBucket>> buckets;  // until their reply
  std::map<CallId, SentLayout> layouts;  // unanswered; of attached members
  std::deque<std::pair<Version, PastUpdate>> past;
  std::optional<ReadinessBook> book;  // set once the coordinator has sent it
  std::optional<LastReadiness> last_readiness;
  Worker worker;
  std::optional<TimePoint> heard;
  // The time by which the coordinator must have sent the outcome of the update.
  std::map<UpdateId, TimePoint> outcome_due;

  // Valid during one Handle.
  TimePoint now;
  MachineActions* actions = nullptr;
  std::vector<PeerReport> reports;
};

Follower::Impl::Impl(FollowerOptions follower_options)
    : options(std::move(follower_options)),
      worker({.next_update = options.next_update,
              .layout = [this](MemberId member) -> std::shared_ptr<const Layout> {
                const auto it = members.find(member);
                return it == members.end() ? nullptr : it->second.layout;
              },
              .layout_digest =
                  [this](MemberId member) {
                    const auto it = members.find(member);
                    return it == members.end() ? 0 : it->second.layout_digest;
                  },
              .bucket =
                  [this](CallId call) {
                    const auto it = buckets.find(call);
                    return it == buckets.end() ? nullptr : it->second;
                  },
              .attached = [this](MemberId member) { return members.contains(member); }},
             options.peer_limits.wire) {}

void Follower::Impl::Report(PeerReport report) {
  if (state == State::kJoined) reports.push_back(std::move(report));
}

// ---- members ----

template <typename Identity>
void Follower::Impl::Attach(MemberId id, bool engine, const Identity& identity, bool awaits_slots) {
  if (state == State::kLost) {
    Do(GroupAction(RefuseMember{id, lost}));
    return;
  }
  Member member;
  member.engine = engine;
  member.identity = identity;
  member.awaits_slots = awaits_slots;
  entered = true;
  Announce(id, members.emplace(id, std::move(member)).first->second);
}

// Announces a member once the link is up. From then on the coordinator may hand the member parts,
// so its slots must be made first.
void Follower::Impl::Announce(MemberId id, const Member& member) {
  if (state != State::kJoined) return;
  if (member.awaits_slots) {
    Do(PeerAction(MakeSlots{id}));
  } else {
    Report(PeerAttach{id, member.identity});
  }
}

void Follower::Impl::On(const SlotsMade& e) {
  const auto it = members.find(e.member);
  if (it == members.end() || !it->second.awaits_slots) return;
  if (!e.status.ok()) {
    members.erase(it);
    Do(GroupAction(RefuseMember{e.member, e.status}));
    return;
  }
  it->second.awaits_slots = false;
  Announce(e.member, it->second);
}

void Follower::Impl::On(const MemberLost& e) {
  const auto it = members.find(e.member);
  if (it == members.end()) return;
  worker.MemberLost(e.member, std::move(it->second.layout));
  members.erase(it);
  Report(MemberLost{e.member, e.reason});
  AnswerLayoutsOf(e.member,
                  Error(absl::StatusCode::kUnauthenticated, "the lease ended: {}", e.reason));
  // Copies that run hold their mappings; new copies skip the member (P6).
  Do(GroupAction(ReleaseMember{e.member}));
  Do(GroupAction(StateChanged{}));
}

void Follower::Impl::On(const LayoutRegistered& e) {
  absl::Status status = state == State::kLost ? lost : CanRegisterLayout(e.member);
  if (status.ok() && state == State::kJoining) {
    status = absl::UnavailableError("the coordinator has not answered yet");
  }
  if (!status.ok()) {
    Do(GroupAction(Reply{e.call, std::move(status), EmptyReply{}}));
    return;
  }
  const uint64_t digest = e.digest.has_value() ? *e.digest : e.layout->Digest();
  layouts[e.call] = {e.member, e.layout, digest};
  Report(PeerLayout{e.member, e.layout, e.call, absl::OkStatus(), digest, e.content,
                    absl::OkStatus(), e.shadowed, e.backs_differ});
}

// Commands come in order: an update that counts on the layout is prepared after this answer.
void Follower::Impl::AnswerLayout(CallId call, const absl::Status& status) {
  const auto it = layouts.find(call);
  const SentLayout sent = std::move(it->second);
  layouts.erase(it);
  if (const auto member = members.find(sent.member);
      member != members.end() && status.ok() && !sent.layout->backs_differ) {
    member->second.layout = sent.layout;
    member->second.layout_digest = sent.digest;
  }
  Do(GroupAction(Reply{call, status, EmptyReply{}}));
  Do(GroupAction(StateChanged{}));
}

void Follower::Impl::AnswerLayoutsOf(MemberId member, const absl::Status& status) {
  for (auto it = layouts.begin(); it != layouts.end();) {
    const CallId call = it->first;
    const bool its = it++->second.member == member;
    if (its) AnswerLayout(call, status);
  }
}

// ---- calls ----

// Forwards a trainer's call to the coordinator.
template <typename Call>
requires kIsOneOf<Call, TrainerCall>
void Follower::Impl::On(const Call& e) {
  if (e.member == MemberId()) return RefuseHere(e.call);  // an operator's
  if (state != State::kJoined) {
    Do(GroupAction(Reply{e.call,
                         state == State::kLost
                             ? lost
                             : absl::UnavailableError("the coordinator has not answered yet"),
                         EmptyReply{}}));
    return;
  }
  constexpr bool kBucket = std::is_same_v<Call, BucketEvent>;
  if constexpr (kBucket) buckets.emplace(e.call, e.bucket);
  calls[e.call] = {kBucket, ReplyPayload(typename Call::Answer{}).index()};
  Report(PeerCall{e});
}

void Follower::Impl::On(const CallGone& e) {
  if (calls.contains(e.call)) Report(CallGone{e.call});
}

void Follower::Impl::RefuseHere(CallId call) {
  Do(GroupAction(
      Reply{call,
            Error(absl::StatusCode::kFailedPrecondition, "group {} is coordinated by {}: ask there",
                  options.name, options.coordinator_address),
            EmptyReply{}}));
}

void Follower::Impl::On(const DrainEvent&) {
  for (const auto& [id, member] : members) {
    if (member.welcomed) Do(GroupAction(SendDraining{id}));
  }
}

void Follower::Impl::On(const refitd::Tick&) {
  if (state != State::kJoined) return;
  const double limit = std::chrono::duration<double>(options.peer_limits.peer).count();
  if (now - *heard > options.peer_limits.peer) {
    return Lose(Error(absl::StatusCode::kUnavailable, "it was silent for {:g} s (peers.silence_ms)",
                      limit));
  }
  const bool overdue = std::any_of(outcome_due.begin(), outcome_due.end(),
                                   [this](const auto& due) { return due.second <= now; });
  if (!overdue) return;
  Lose(Error(absl::StatusCode::kUnavailable,
             "it told no outcome of an update within {:g} s of its deadline", limit));
}

// ---- the link ----

void Follower::Impl::On(const LinkUp& e) {
  if (state != State::kJoining) return;
  state = State::kJoined;
  heard = now;
  incarnation = e.incarnation;
  spec = e.spec;
  version = e.version;
  content.reset();
  coordinator_id = e.coordinator_id;
  owner.clear();
  protocol = e.protocol;
  Do(GroupAction(LogLine{LogLine::kInfo, fmt::format("joined daemon {} at {}", coordinator_id,
                                                     options.coordinator_address)}));
  for (const auto& [id, member] : members) Announce(id, member);
  Do(GroupAction(StateChanged{}));
}

void Follower::Impl::Lose(const absl::Status& status) {
  if (state == State::kLost) return;
  const bool joined = state == State::kJoined;
  state = State::kLost;
  Failure failure = FailureOf(status);
  failure.Add({SuspectRole::kDaemon, options.coordinator_address, "", std::nullopt, 0});
  failure.may_be_retried = failure.may_be_retried || joined;
  const std::string loss = fmt::format("the coordinator at {} {}: {}", options.coordinator_address,
                                       joined ? "is lost" : "could not be joined", Message(status));
  const std::string what = fmt::format("group {}: {}", options.name, loss);
  // A refusal keeps its code. A broken link is UNAVAILABLE, whatever broke it.
  lost = absl::Status(joined ? absl::StatusCode::kUnavailable : status.code(), what);
  if (lost.ok()) lost = absl::UnavailableError(what);
  lost = WithFailure(lost, failure);
  Do(GroupAction(LogLine{LogLine::kWarning, loss}));  // the log names the group
  worker.AbandonAll(now, Out());
  reports.clear();
  KeepReadiness();
  for (const auto& [id, member] : std::exchange(members, {})) {
    AnswerLayoutsOf(id, lost);
    Do(GroupAction(RefuseMember{id, lost}));
  }
  AnswerLostCalls();
  Do(PeerAction(CloseLink{Message(status)}));
  Do(GroupAction(StateChanged{}));
}

// Instances with ranks that were sent Prepare have unknown weights, even if the coordinator had no
// time to say that the instances take part in an update (P2).
void Follower::Impl::KeepReadiness() {
  if (!book.has_value()) return;
  last_readiness = LastReadiness{*std::exchange(book, std::nullopt), {}};
  last_readiness->book.LoseCoordinator();
  for (const auto& [id, member] : members) {
    if (!member.engine) continue;
    const std::string& instance = std::get<EngineIdentity>(member.identity).instance;
    last_readiness->here.insert(instance);
    if (member.prepared.has_value()) last_readiness->book.MarkUnknown(instance);
  }
}

// Answers all calls when the link is lost. A bucket's answer waits for the last read of its source
// (P6).
void Follower::Impl::AnswerLostCalls() {
  if (state != State::kLost) return;
  for (auto it = calls.begin(); it != calls.end();) {
    if (it->second.bucket && worker.Reads(it->first)) {
      ++it;
      continue;
    }
    Do(GroupAction(Reply{it->first, lost, EmptyReply{}}));
    buckets.erase(it->first);
    it = calls.erase(it);
  }
}

// Ends the link when no member is left, but not while this daemon takes part in an update: other
// nodes wait for its end of the communicator even after its last member has left.
void Follower::Impl::EndIfIdle() {
  if (state == State::kLost || !members.empty() || !calls.empty()) return;
  if (worker.Participates()) return;
  lost = absl::UnavailableError("no member of this daemon is left");
  state = State::kLost;
  worker.AbandonAll(now, Out());
  Do(PeerAction(CloseLink{"no member is left"}));
}

void Follower::Impl::On(const CommandReceived& e) {
  if (state != State::kJoined) return;
  heard = now;
  std::visit([this](const auto& c) { Take(c); }, e.command);
}

// ---- commands ----

void Follower::Impl::Take(const PeerWelcome& c) {
  const auto it = members.find(c.member);
  if (it == members.end()) return;
  it->second.welcomed = true;
  version = c.group_version;
  content = c.content;
  spec.trainer_ranks = c.trainer_ranks;
  Do(GroupAction(WelcomeMember{c.member}));
  Do(GroupAction(StateChanged{}));
}

void Follower::Impl::Take(const RefuseMember& c) {
  if (members.erase(c.member) == 0) return;
  AnswerLayoutsOf(c.member, c.status);
  Do(GroupAction(RefuseMember{c.member, c.status}));
}

// An answer of another kind than its call would reach the caller as something else. No correct
// coordinator sends such an answer.
void Follower::Impl::Take(const Reply& c) {
  const auto call = calls.find(c.call);
  const bool layout = layouts.contains(c.call);
  if (call == calls.end() && !layout) return;
  const size_t expected = layout ? ReplyPayload(EmptyReply{}).index() : call->second.answer;
  if (c.status.ok() && c.payload.index() != expected) {
    return Lose(Error(absl::StatusCode::kInvalidArgument,
                      "its answer to call {} is not of the kind of the call", c.call));
  }
  if (layout) return AnswerLayout(c.call, c.status);
  calls.erase(call);
  buckets.erase(c.call);
  Do(GroupAction(Reply{c.call, c.status, c.payload}));
}

void Follower::Impl::Take(const PeerPrepare& c) {
  spec.trainer_ranks = c.trainer_ranks;
  worker.Handle(c, now, Out());
  // The ranks are paused until they get the update's outcome, so a coordinator that goes on to
  // ping and never tells the end counts as lost (P4).
  outcome_due[c.update] = now + c.remaining + options.peer_limits.peer;
  for (const MemberId id : c.engines) {
    const auto it = members.find(id);
    if (it == members.end()) continue;
    it->second.prepared = c.update;
    Do(GroupAction(SendPrepare{id, c.version, c.update, c.remaining, c.tensor_count}));
  }
  Do(GroupAction(StateChanged{}));
}

void Follower::Impl::Take(const SendPart& c) {
  const auto it = members.find(c.member);
  if (it == members.end()) return;
  absl::StatusOr<SendPart> part = worker.PartFor(c.member, c.update, c.part);
  if (part.ok()) {
    Do(GroupAction(*std::move(part)));
  } else {
    Report(EngineFailed{c.member, c.update, Message(part.status())});
  }
}

void Follower::Impl::Take(const MemberAction& c) {
  std::visit(
      [this](const auto& action) {
        const auto it = members.find(action.member);
        if constexpr (std::is_same_v<std::decay_t<decltype(action)>, SendStaged>) {
          if (it == members.end()) return;  // the rank serves on
        } else if constexpr (requires { action.update; }) {
          if (it == members.end()) return;
          it->second.prepared = action.update;
        } else if constexpr (requires { action.version; }) {
          // The update is over for the member.
          if (it != members.end()) it->second.prepared.reset();
        }
        Do(GroupAction(action));
      },
      c);
  if (const auto* committed = std::get_if<SendCommitted>(&c)) {
    version = committed->version;
    content = committed->content;
  }
}

void Follower::Impl::Take(const PeerUpdateEnded& c) {
  worker.Handle(c, now, Out());
  outcome_due.erase(c.update);
  // Catch-ups and rollbacks are no updates of the trainers, so they are not remembered.
  if (!c.catch_up) past.emplace_back(c.version, PastUpdate{c.outcome, c.reason, c.failure});
  if (past.size() > kRememberedUpdates) past.pop_front();
  Do(GroupAction(StateChanged{}));
}

void Follower::Impl::Take(const PeerIncarnation& c) {
  incarnation = c.incarnation;
  version.reset();
  content.reset();
  past.clear();
  // Trainers' leases name the old incarnation, so they end.
  std::vector<MemberId> trainers;
  for (const auto& [id, member] : members) {
    if (!member.engine) trainers.push_back(id);
  }
  for (const MemberId id : trainers) {
    members.erase(id);
    Report(MemberLost{id, "the group was replaced"});
    const absl::Status why =
        absl::AbortedError("the group was replaced by a new incarnation: attach again");
    AnswerLayoutsOf(id, why);
    Do(GroupAction(RefuseMember{id, why}));
  }
  Do(GroupAction(StateChanged{}));
}

void Follower::Impl::Take(const PeerReadiness& c) {
  if (!book.has_value()) book.emplace();
  book->Take(c);
  Do(GroupAction(StateChanged{}));
}

// ---- Follower ----

const ReadinessBook* Follower::readiness() const {
  return impl_->book.has_value() ? &*impl_->book : nullptr;
}

const std::optional<Follower::LastReadiness>& Follower::last_readiness() const {
  return impl_->last_readiness;
}

Follower::Follower(FollowerOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}

Follower::~Follower() = default;

void Follower::Handle(MachineEvent& event, TimePoint now, MachineActions* actions) {
  Impl& f = *impl_;
  f.now = now;
  f.actions = actions;
  std::visit([&f](auto& outer) { std::visit([&f](auto& e) { f.On(e); }, outer); }, event);
  f.AnswerLostCalls();
  if (f.state == Impl::State::kJoined) {
    for (PeerReport& report : f.reports) {
      actions->push_back(PeerAction(SendReport{std::move(report)}));
    }
  }
  f.reports.clear();
  // P8: the link must end also if calls or copies outlived the last member.
  if (f.entered) f.EndIfIdle();
  f.reports.clear();
  f.actions = nullptr;
  f.CheckState();
}

void Follower::Impl::CheckState() const {
  REFITD_CHECK(reports.empty());
  REFITD_CHECK(state != State::kJoined || heard.has_value());
  REFITD_CHECK(past.size() <= kRememberedUpdates);
  // P2, P4: a follower that lost the coordinator has ended its members' streams and given the
  // answers that can be given.
  REFITD_CHECK(state != State::kLost || (members.empty() && layouts.empty() && !lost.ok()));
}

void Follower::Impl::CheckInvariants() const {
  CheckState();
  worker.CheckInvariants();
  for (const auto& [id, member] : members) {
    REFITD_CHECK(id != MemberId());
    REFITD_CHECK(member.engine == std::holds_alternative<EngineIdentity>(member.identity));
    // A rank that waits for its slots was not reported to the coordinator, so it has sent nothing
    // to that rank.
    REFITD_CHECK(!member.awaits_slots || !member.welcomed);
    REFITD_CHECK(!member.prepared.has_value() || member.engine);
  }
  for (const auto& [call, sent] : layouts) {
    REFITD_CHECK(members.contains(sent.member) && sent.layout != nullptr && !calls.contains(call));
  }
  // P6: a bucket is known until its call is answered, and no longer.
  for (const auto& [call, bucket] : buckets) {
    const auto sent = calls.find(call);
    REFITD_CHECK(sent != calls.end() && sent->second.bucket);
  }
  for (const auto& [call, sent] : calls) {
    REFITD_CHECK(!sent.bucket || buckets.contains(call));
    REFITD_CHECK(state != State::kLost || (sent.bucket && worker.Reads(call)));
  }
}

void Follower::CheckInvariants() const { impl_->CheckInvariants(); }

std::optional<TimePoint> Follower::NextDeadline() const {
  if (impl_->state != Impl::State::kJoined) return std::nullopt;
  TimePoint next = *impl_->heard + impl_->options.peer_limits.peer + std::chrono::nanoseconds(1);
  for (const auto& [update, due] : impl_->outcome_due) next = std::min(next, due);
  return next;
}

const std::string& Follower::name() const { return impl_->options.name; }
uint64_t Follower::incarnation() const { return impl_->incarnation; }
const GroupSpec& Follower::spec() const { return impl_->spec; }
bool Follower::has_members() const { return !impl_->members.empty(); }
const std::string& Follower::owner() const { return impl_->owner; }
bool Follower::has_trainers() const {
  return std::any_of(impl_->members.begin(), impl_->members.end(),
                     [](const auto& member) { return !member.second.engine; });
}
bool Follower::update_running() const { return impl_->worker.Participates(); }
std::optional<Version> Follower::version() const { return impl_->version; }
std::optional<Version> Follower::content() const { return impl_->content; }

absl::Status Follower::CanRegisterLayout(MemberId member) const {
  return impl_->CanRegisterLayout(member);
}

absl::Status Follower::Impl::CanRegisterLayout(MemberId member) const {
  const auto it = members.find(member);
  if (it == members.end()) {
    return Error(absl::StatusCode::kFailedPrecondition, "member {} is not attached", member);
  }
  if (!it->second.engine) return absl::OkStatus();
  const auto& identity = std::get<EngineIdentity>(it->second.identity);
  if (!NeedsLayout(identity.delivery)) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "engine {} rank {} takes {} delivery: it registers no layout", identity.instance,
                 identity.rank, Name(identity.delivery));
  }
  if (it->second.prepared.has_value()) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "engine {} rank {} takes part in the running update", identity.instance,
                 identity.rank);
  }
  return absl::OkStatus();
}

PastUpdate Follower::Past(Version version) const {
  for (auto it = impl_->past.rbegin(); it != impl_->past.rend(); ++it) {
    if (it->first == version) return it->second;
  }
  return {};
}

bool Follower::finished() const {
  return impl_->state == Impl::State::kLost && impl_->worker.quiet() && impl_->calls.empty();
}

std::vector<std::shared_ptr<const Layout>> Follower::LayoutsToIndex(
    const PeerPrepare& command) const {
  return impl_->worker.LayoutsToIndex(command);
}

absl::StatusOr<std::shared_ptr<const DestinationIndex>> Follower::MakeIndex(
    const std::vector<MemberId>& destinations, std::vector<std::shared_ptr<const Layout>> layouts) {
  return Worker::MakeIndex(destinations, std::move(layouts));
}

int64_t Follower::indices_made() const { return impl_->worker.indices_made(); }

MachineView Follower::View(TimePoint now) const {
  const Impl& f = *impl_;
  MachineView view;
  view.coordinator_address = f.options.coordinator_address;
  view.group.name = f.options.name;
  view.group.incarnation = f.incarnation;
  view.group.owner = f.owner;
  view.group.spec = f.spec;
  view.group.version = f.version;
  view.group.content = f.content;
  switch (f.state) {
    case Impl::State::kJoining:
      view.group.state = "joining";
      break;
    case Impl::State::kJoined:
      view.group.state = "joined";
      break;
    case Impl::State::kLost:
      view.group.state = "lost";
      break;
  }
  for (const auto& [id, m] : f.members) {
    MemberView& v = view.group.members.emplace_back();
    v.id = id;
    v.engine = m.engine;
    v.state = !m.welcomed ? "joining" : (m.prepared.has_value() ? "preparing" : "attached");
    v.layout_digest = m.layout_digest;
    if (m.layout != nullptr) v.pieces = static_cast<int64_t>(m.layout->pieces.size());
    if (m.engine) {
      const auto& who = std::get<EngineIdentity>(m.identity);
      v.instance = who.instance;
      v.rank = who.rank;
      v.world_size = who.world_size;
      v.delivery = who.delivery;
      v.pid = who.pid;
    } else {
      const auto& who = std::get<TrainerIdentity>(m.identity);
      v.rank = who.rank;
      v.world_size = who.world_size;
      v.pid = who.pid;
    }
  }
  if (f.book.has_value()) {
    for (const auto& [name, known] : f.book->instances()) {
      InstanceView& v = view.group.instances.emplace_back();
      v.name = name;
      v.state = Name(known.standing);
      v.version = known.version;
      if (known.version.has_value()) v.origin = f.incarnation;
      v.readiness = f.book->Of(name, f.spec.max_lag).value_or(Readiness());
    }
  }
  NodeView coordinator;
  coordinator.daemon_id = f.coordinator_id;
  coordinator.address = f.options.coordinator_address;
  coordinator.state = view.group.state;
  coordinator.protocol = f.protocol;
  if (f.heard.has_value()) coordinator.silent = now - *f.heard;
  view.nodes.push_back(std::move(coordinator));
  view.communicator = f.worker.communicator();
  view.communicator_state = f.worker.communicator_state();
  return view;
}

}  // namespace refitd
