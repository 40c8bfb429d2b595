// Thieves: trainers of another identity than the groups' own, which attach at any daemon at any
// moment, above all to a group that was just made again, and begin an update as soon as they are
// let in. None may open an update with engines that hold a version of the group's owner (P9). They
// come once the group has committed a version, since a new name belongs to whoever comes first.
#include <algorithm>

#include "tests/sim/world.h"

namespace refitd::sim {
namespace {

using std::chrono::milliseconds;

constexpr char kThief[] = "thief";
constexpr Duration kPatience = std::chrono::seconds(3);

}  // namespace

void World::SendThieves() {
  if (healed_) return;
  In(random_.Millis(100, 1500), [this] { SendThieves(); });
  const int g = random_.Int(0, static_cast<int>(groups_.size()) - 1);
  const int d = random_.Int(0, static_cast<int>(daemons_.size()) - 1);
  if (DaemonAt(d).up) InDaemon(d, NetDelay(), [this, d, g] { SendThief(d, g); });
}

void World::SendThief(int d, int g) {
  EnsureFollower(d, g);
  const Machine* const m = Find(d, g);
  if (m == nullptr || healed_ || GroupOf(g).last_committed.empty()) return;
  Daemon& daemon = DaemonAt(d);
  const MemberId member(daemon.next_member++);
  daemon.thieves[member] = g;
  Count(Fault::kThief);
  TrainerIdentity who;
  who.world_size = GroupOf(g).spec.trainer_ranks;
  who.rank = random_.Int(0, who.world_size - 1);
  // Planted: the coordinator believes that another daemon's trainer is the owner.
  const bool unknown = options_.bug == Bug::kOwnerElsewhere && m->follower != nullptr;
  who.identity = unknown ? kOwner : kThief;
  Trace("d{} g{}: a thief attaches as member {}", d, g, member);
  Feed(d, g, GroupEvent(TrainerAttached{member, std::move(who)}));
  InDaemon(d, kPatience, [this, d, member] { ThiefLeaves(d, member); });
}

void World::ThiefBegins(int d, MemberId member) {
  Daemon& daemon = DaemonAt(d);
  const int g = daemon.thieves.at(member);
  BeginEvent begin;
  begin.member = member;
  begin.call = CallId(daemon.next_call++);
  const Job& job = GroupOf(g).job;
  begin.version = job.active ? job.version : Version(GroupOf(g).top.value() + 1);
  begin.duration = kPatience;
  daemon.calls[begin.call] = {
      0, g, now_, [this, d, g, member](const absl::Status& status, const ReplyPayload& payload) {
        if (status.ok()) CheckStolen(g, std::get<BeginReply>(payload));
        if (!over_) ThiefLeaves(d, member);
      }};
  Feed(d, g, GroupEvent(std::move(begin)));
}

void World::CheckStolen(int g, const BeginReply& begun) {
  const Machine* const m = Find(GroupOf(g).home, g);
  if (m == nullptr) return;
  // Another machine of the group, before a restart, may have had an update of the same number.
  const auto round = std::find_if(rounds_.begin(), rounds_.end(), [&](const Round& r) {
    return r.g == g && r.coordinator == m->nonce && r.update == begun.update &&
           r.outcome == Outcome::kRunning;
  });
  if (round == rounds_.end()) return;
  for (const auto& [instance, pids] : round->instances) {
    for (const int pid : pids) {
      if (ProcessOf(pid).owner != kOwner) continue;
      return Violate("P9", fmt::format("g{}: a thief begins version {}, and instance {} holds one "
                                       "of the group's owner",
                                       g, round->version, instance));
    }
  }
}

void World::ThiefLeaves(int d, MemberId member) {
  Daemon& daemon = DaemonAt(d);
  const auto it = daemon.thieves.find(member);
  if (it == daemon.thieves.end()) return;
  const int g = it->second;
  if (Find(d, g) != nullptr) Feed(d, g, GroupEvent(MemberLost{member, "the thief left"}));
}

// A group whose first trainer was a thief, while no engine held anything, is replaced by an
// operator.
void World::ReplaceStolen(int g) {
  const int d = GroupOf(g).home;
  const Machine* const m = Find(d, g);
  if (m == nullptr || m->machine->owner() != kThief) return;
  Daemon& daemon = DaemonAt(d);
  const CallId call(daemon.next_call++);
  daemon.calls[call] = {0, g, now_, [](const absl::Status&, const ReplyPayload&) {}};
  Feed(d, g, GroupEvent(ReplaceGroup{call, random_.Next(), "operator"}));
}

}  // namespace refitd::sim
