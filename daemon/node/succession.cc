#include "daemon/node/succession.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "daemon/checks/candidates.h"
#include "daemon/node/incarnation.h"
#include "daemon/process/log.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

// The pauses between the probes of a search: at first, and once the search has gone on for long,
// because nobody has brought a spec yet.
constexpr Duration kProbePause = std::chrono::milliseconds(250);
constexpr Duration kLongProbePause = std::chrono::seconds(1);
// How long a search is kept that nobody waits for: members come back after pauses of up to a
// second.
constexpr Duration kLinger = std::chrono::seconds(10);
// Searches of more groups begin when others have ended.
constexpr size_t kMaxSearches = 1024;

// The incarnation that the member claims to hold a version of.
uint64_t ClaimOf(const Waiters::OfGroup& member) {
  const auto* const engine = std::get_if<EngineAttached>(&member.attached);
  return engine == nullptr ? 0 : CountedClaim(engine->identity.held_origin);
}

}  // namespace

// ---- time ----

std::optional<TimePoint> Succession::NextDeadline(TimePoint now) const {
  if (prober_ == nullptr || state_.draining || state_.stopping) return std::nullopt;
  std::optional<TimePoint> next;
  const auto consider = [&next](TimePoint due) { next = std::min(next.value_or(due), due); };
  if (searches_.size() < kMaxSearches && AnyUnknown()) consider(now);
  for (const auto& [name, search] : searches_) {
    if (search.idle) {
      const bool wanted =
          state_.waiters.Any(name, search.named) || state_.peers.AnyWaiting(name, search.named);
      consider(wanted ? now : search.wanted + kLinger);
      continue;
    }
    const GroupRecord* const group = state_.groups.Find(name);
    // A group that is being joined, or that is going, needs no time here: an event ends that state.
    if (group != nullptr && (group->join.joining || group->going())) continue;
    consider(search.probes.next);
    if (const auto gone = search.logic.NextGone(now); gone.has_value()) consider(*gone);
  }
  for (const auto& [name, group] : state_.groups.all()) {
    if (group->candidates.empty() || group->given_up) continue;
    const auto watch = watches_.find(name);
    const bool watched = watch != watches_.end() && watch->second.group == group->id;
    consider(watched && group->outbid == 0 ? watch->second.probes.next : now);
  }
  return next;
}

// Whether somebody waits for a group with candidates that is not searched yet.
bool Succession::AnyUnknown() const {
  const auto& members = state_.waiters.of_group();
  const auto& peers = state_.peers.waiting();
  return std::any_of(members.begin(), members.end(),
                     [this](const Waiters::OfGroup& w) {
                       kInTurn.AssertHeld();
                       return HasSeveral(w.coordinator) && !searches_.contains(w.record.group);
                     }) ||
         std::any_of(peers.begin(), peers.end(), [this](const Peers::Waiting& peer) {
           kInTurn.AssertHeld();
           return HasSeveral(peer.hello.candidates) && !searches_.contains(peer.hello.group);
         });
}

void Succession::Tick(TimePoint now, Turn& turn) {
  if (prober_ == nullptr) return;
  if (state_.draining || state_.stopping) {
    searches_.clear();
    watches_.clear();
    return;
  }
  TakeWishes(now);
  for (auto it = searches_.begin(); it != searches_.end();) {
    it = Go(it->first, &it->second, now, turn) ? std::next(it) : searches_.erase(it);
  }
  for (const std::string& name : state_.groups.names()) {
    GroupRecord* const group = state_.groups.Find(name);
    if (group != nullptr && !group->candidates.empty() && !group->given_up) {
      if (group->outbid != 0) {
        GiveUp(group, group->outbid, turn);
      } else {
        WatchGroup(group, now);
      }
    }
  }
  std::erase_if(watches_, [this](const auto& watch) {
    kInTurn.AssertHeld();
    return state_.groups.Find(watch.first, watch.second.group) == nullptr;
  });
}

// ---- searching ----

void Succession::TakeWishes(TimePoint now) {
  for (const Waiters::OfGroup& member : state_.waiters.of_group()) {
    if (HasSeveral(member.coordinator)) TakeWish(member, now);
  }
  for (const Peers::Waiting& peer : state_.peers.waiting()) {
    if (HasSeveral(peer.hello.candidates)) TakeWish(peer, now);
  }
}

Succession::Search* Succession::Find(const std::string& group, const std::string& named,
                                     Duration searched, TimePoint now) {
  const auto found = searches_.find(group);
  if (found != searches_.end()) {
    Search* const search = &found->second;
    if (search->named != named) return nullptr;
    search->wanted = now;
    if (std::exchange(search->idle, false)) {
      search->logic.Forget();
      search->probes.next = now;
    }
    return search;
  }
  if (searches_.size() >= kMaxSearches) return nullptr;
  Probes probes = ProbesOf(named);
  probes.next = now;
  const CoordinatorSearch::Options options{probes.addresses.size(), probes.own,
                                           state_.options.failover};
  LogInfo("group {}: searching its coordinator among {}", group, named);
  Search search{.id = next_++,
                .named = named,
                .logic = CoordinatorSearch(options, now, searched),
                .probes = std::move(probes),
                .spec = {},
                .creator = {},
                .wanted = now};
  return &searches_.emplace(group, std::move(search)).first->second;
}

void Succession::TakeWish(const Waiters::OfGroup& member, TimePoint now) {
  Search* const search = Find(member.record.group, member.coordinator, Duration(0), now);
  if (search == nullptr) return;
  search->known = std::max(search->known, ClaimOf(member));
  if (search->creator.empty()) search->creator = IdentityOf(member.record.peer);
  if (search->spec.has_value() || !member.spec.has_value()) return;
  search->spec = member.spec;
}

void Succession::TakeWish(const Peers::Waiting& peer, TimePoint now) {
  // The joining daemon's own search counts as well, but for no longer than it takes until a
  // candidate counts as gone (P10).
  const Duration searched = std::min(peer.hello.searched, state_.options.failover);
  Search* const search = Find(peer.hello.group, peer.hello.candidates, searched, now);
  if (search == nullptr) return;
  search->known = std::max(search->known, peer.hello.known_incarnation);
  if (!search->spec.has_value()) search->spec = peer.hello.spec;
}

bool Succession::Go(const std::string& group, Search* search, TimePoint now, Turn& turn) {
  const auto other = [&](const std::string& named) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "coordinator: '{}', but other members of group '{}' name '{}'", named, group,
                 search->named);
  };
  state_.waiters.RefuseOthers(group, search->named, other);
  state_.peers.RefuseOthers(group, search->named, other);
  const GroupRecord* const found = state_.groups.Find(group);
  if (found != nullptr) {
    if (found->join.joining || found->going()) return true;
    Admit(group, search->named, turn);
    return false;
  }
  if (!state_.waiters.Any(group, search->named) && !state_.peers.AnyWaiting(group, search->named)) {
    search->idle = true;
    return now < search->wanted + kLinger;
  }
  if (now >= search->probes.next) {
    const bool lasts = search->logic.searched(now) > 2 * state_.options.failover;
    search->probes.next = now + (lasts ? kLongProbePause : kProbePause);
    Start(group, search->id, /*incarnation=*/0, &Succession::TakeSearched, &search->probes);
  }
  return Decide(group, search, now, turn);
}

bool Succession::Decide(const std::string& group, Search* search, TimePoint now, Turn& turn) {
  const CoordinatorSearch::Decision decision = search->logic.Decide(now);
  switch (decision.step) {
    case CoordinatorSearch::Step::kWait:
      return true;
    case CoordinatorSearch::Step::kJoin:
    case CoordinatorSearch::Step::kAsk:
      Join(group, search, decision.candidate, now, turn);
      return true;
    case CoordinatorSearch::Step::kMake:
      break;
  }
  if (!search->spec.has_value()) return true;
  if (absl::Status made = Make(group, *search, turn); !made.ok()) {
    RefuseAll(group, search->named, made);
    return false;
  }
  Admit(group, search->named, turn);
  return false;
}

void Succession::Join(const std::string& group, Search* search, size_t candidate, TimePoint now,
                      Turn& turn) {
  const std::string& address = search->probes.addresses.at(candidate);
  for (Peers::Waiting& peer : state_.peers.TakeWaiting(group)) {
    peer.session->End(Error(absl::StatusCode::kUnavailable,
                            "group '{}': this daemon does not coordinate it, and finds the "
                            "candidate {}",
                            group, address));
  }
  const Duration searched = search->logic.searched(now);
  search->logic.Forget();
  search->probes.next = now + kLongProbePause;  // in case joining fails
  if (!state_.waiters.Any(group, search->named)) return;
  const absl::Status joins = joining_.FollowCandidate(
      group, {address, search->named, searched, search->known}, search->creator, turn);
  if (!joins.ok()) RefuseAll(group, search->named, joins);
}

absl::Status Succession::Make(const std::string& group, const Search& search, Turn& turn) {
  bool created = false;
  REFITD_ASSIGN_OR_RETURN(const GroupRecord* const made,
                          life_.Make(group, *search.spec, std::nullopt, search.creator, &created,
                                     turn, {search.named, search.known}));
  LogInfo("group {}: this daemon coordinates it, as incarnation {:x} (candidates {})", group,
          made->machine->incarnation(), search.named);
  return absl::OkStatus();
}

void Succession::Admit(const std::string& group, const std::string& named, Turn& turn) {
  for (Waiters::OfGroup& w : state_.waiters.TakeAll(group, named)) {
    GroupRecord* const found = state_.groups.Find(group);
    absl::Status status = found == nullptr || found->going() || found->join.joining
                              ? absl::UnavailableError("the coordinator is lost: attach again")
                              : joining_.CheckCandidates(found, named, w.spec);
    if (status.ok()) {
      members_.Enter(std::move(w.record), found, std::move(w.attached), turn);
    } else {
      w.record.End(std::move(status));
    }
  }
  const GroupRecord* const found = state_.groups.Find(group);
  if (found != nullptr && found->coordinator != nullptr) joiners_.AdmitWaiting(group, turn);
}

void Succession::RefuseAll(const std::string& group, const std::string& named,
                           const absl::Status& status) {
  state_.waiters.Refuse(
      group, named, [](const Waiters::OfGroup& /*member*/) { return false; }, status);
  for (Peers::Waiting& peer : state_.peers.TakeWaiting(group)) peer.session->End(status);
}

void Succession::TakeSearched(const std::string& group, uint64_t id, size_t candidate,
                              const absl::StatusOr<uint64_t>& answer, Turn& turn) {
  const auto found = searches_.find(group);
  if (found == searches_.end() || found->second.id != id) return;
  Search* const search = &found->second;
  search->probes.running.erase(candidate);
  const TimePoint now = DaemonState::Now();
  if (search->idle) return;
  const bool unreachable = absl::IsUnavailable(answer.status()) ||
                           absl::IsDeadlineExceeded(answer.status()) ||
                           absl::IsCancelled(answer.status());
  if (answer.ok()) {
    search->known = std::max(search->known, *answer);
    search->logic.Answered(candidate, *answer, now);
  } else if (unreachable) {
    search->logic.Failed(candidate);
  } else {
    // A candidate that refuses the probe lives. Joining it tells why.
    search->logic.Answered(candidate, 0, now);
  }
  if (!Go(group, search, now, turn)) searches_.erase(group);
}

// ---- coordinating ----

void Succession::WatchGroup(GroupRecord* group, TimePoint now) {
  Watch* const watch = &watches_[group->name()];
  if (watch->group != group->id) {
    *watch = Watch{next_++, group->id, ProbesOf(group->candidates)};
  } else if (now < watch->probes.next) {
    return;
  }
  watch->probes.next = now + state_.options.failover;
  Start(group->name(), watch->id, group->machine->incarnation(), &Succession::TakeWatched,
        &watch->probes);
}

void Succession::TakeWatched(const std::string& group, uint64_t id, size_t candidate,
                             const absl::StatusOr<uint64_t>& answer, Turn& turn) {
  const auto found = watches_.find(group);
  if (found == watches_.end() || found->second.id != id) return;
  found->second.probes.running.erase(candidate);
  GroupRecord* const record = state_.groups.Find(group, found->second.group);
  if (record == nullptr || record->given_up || !answer.ok()) return;
  if (GivesWay(record->machine->incarnation(), *answer)) GiveUp(record, *answer, turn);
}

void Succession::GiveUp(GroupRecord* group, uint64_t greater, Turn& turn) {
  REFITD_CHECK(group->coordinator != nullptr && !group->given_up);
  const std::string name = group->name();
  const std::string why = fmt::format(
      "another candidate coordinates group '{}' as incarnation {:x}, which is greater than {:x}: "
      "attach again",
      name, greater, group->machine->incarnation());
  LogWarning("group {}: given up: {}", name, why);
  group->given_up = true;
  state_.groups.Remember(*group, greater, DaemonState::Now());
  std::vector<MemberId> members;
  for (const auto& [id, member] : state_.leases.all()) {
    if (member.group == name) members.push_back(id);
  }
  for (const MemberId id : members) {
    MemberRecord* const member = state_.leases.Find(id);
    if (member != nullptr) members_.Lose(member, why, absl::UnavailableError(why), turn);
  }
  for (const NodeId node : state_.peers.NodesOf(name)) {
    state_.peers.End(name, node, absl::UnavailableError(why));
    turn.Handle(name, NodeLost{node, why});
  }
  GroupRecord* const left = state_.groups.Find(name);
  if (left != nullptr) life_.NoteEmpty(left, turn);
  state_.timer.Wake();
}

// ---- probes ----

Succession::Probes Succession::ProbesOf(const std::string& named) const {
  Probes probes{.addresses = SplitCandidates(named), .own = {}, .running = {}, .next = {}};
  probes.own = joining_.OwnPlace(probes.addresses);
  return probes;
}

void Succession::Start(const std::string& group, uint64_t id, uint64_t incarnation, Take take,
                       Probes* probes) {
  for (size_t i = 0; i < probes->addresses.size(); ++i) {
    if (i == probes->own || !probes->running.insert(i).second) continue;
    ProbeDial dial{.address = probes->addresses[i],
                   .group = group,
                   .incarnation = incarnation,
                   .daemon_id = state_.options.daemon_id,
                   .boot_id = state_.boot_id,
                   .credentials = nullptr};
    const uint64_t probe = next_++;
    probes_[probe] = prober_(
        std::move(dial), [this, probe, group, id, i, take](const absl::StatusOr<uint64_t>& answer) {
          Answered(probe, group, id, i, take, answer);
        });
  }
}

void Succession::Answered(uint64_t probe, const std::string& group, uint64_t id, size_t candidate,
                          Take take, const absl::StatusOr<uint64_t>& answer) {
  {
    Turn turn(state_.turns);
    if (!state_.draining && !state_.stopping) (this->*take)(group, id, candidate, answer, turn);
    state_.timer.Wake();
  }
  MutexLock lock(&state_.mutex);
  kInTurn.AssertHeld();
  probes_.erase(probe);
  probes_cond_.NotifyAll();
}

void Succession::AwaitProbes(Mutex* mutex) {
  kInTurn.AssertHeld();
  for (const auto& [probe, end] : probes_) end();
  while (!probes_.empty()) probes_cond_.Wait(mutex);
}

}  // namespace refitd
