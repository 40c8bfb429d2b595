// Rollbacks and holds: after some commits somebody rolls back, and what is held is not written.
#include <algorithm>

#include "tests/sim/world.h"
#include "transport/base/status.h"

namespace refitd::sim {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

}  // namespace

// What follows depends on the seed and the commits so far, so that seeds whose groups have no backs
// run as they would without rollbacks.
void World::FollowCommit(int d, int g, const Round& round) {
  GroupWorld& group = GroupOf(g);
  if (round.catch_up) return;
  group.held_until = TimePoint();
  const bool shadowed = std::any_of(seats_.begin(), seats_.end(),
                                    [g](const Seat& seat) { return seat.g == g && seat.shadowed; });
  if (!shadowed || no_faults_ || healed_) return;
  const uint64_t draw = options_.seed / 3 + static_cast<uint64_t>(result_.committed);
  if (round.rollback) {
    if (draw % 2 != 0 || one_daemon_ != OneDaemon::kNone) return;
    return In(milliseconds(1 + draw % 90), [this, d] {
      // The group is made again before the others have caught up.
      if (healed_ || !DaemonAt(d).up) return;
      KillDaemon(d, false);
      In(milliseconds(200), [this, d] { StartDaemon(d); });
    });
  }
  if (group.spec.hold_previous_seconds > 0) {
    group.held_until = now_ + seconds(group.spec.hold_previous_seconds);
    group.held_by = round.coordinator;
    const auto release = [this, d, g, nonce = round.coordinator](bool known) {
      Machine* const m = Find(d, g);
      if (m == nullptr || m->nonce != nonce || DaemonAt(d).frozen) return;
      if (known) GroupOf(g).held_until = TimePoint();
      const CallId call(DaemonAt(d).next_call++);
      DaemonAt(d).calls[call] = {0, g, now_, [](const absl::Status&, const ReplyPayload&) {}};
      Feed(d, g, GroupEvent(ReleasePreviousEvent{call, {}}));
    };
    if (options_.bug == Bug::kIgnoredHold) {
      InDaemon(d, Duration(0), [release] { release(false); });
    } else if (draw % 4 == 3) {
      InDaemon(d, milliseconds(300), [release] { release(true); });
    }
  }
  if (draw % 3 != 0) return;
  In(milliseconds(1 + draw % 90), [this, g, draw] { RollBack(g, draw % 2 == 0); });
}

void World::RollBack(int g, bool by_trainer) {
  if (healed_) return;
  const auto answered = [this](const absl::Status& status, const ReplyPayload&) {
    if (status.code() == absl::StatusCode::kFailedPrecondition) ++result_.rollbacks_refused;
  };
  RollbackEvent e{.call = {}, .member = {}, .request_id = ""};
  if (by_trainer) {
    const auto seat = std::find_if(seats_.begin(), seats_.end(),
                                   [g](const Seat& each) { return each.g == g && each.trainer; });
    e.request_id = fmt::format("rollback {}", result_.committed);
    return CallTwice(seat->pid, e, nullptr, answered);
  }
  const int d = GroupOf(g).home;
  Daemon& daemon = DaemonAt(d);
  if (!daemon.up || daemon.frozen || Find(d, g) == nullptr) return;
  e.call = CallId(daemon.next_call++);
  daemon.calls[e.call] = {0, g, now_, answered};
  daemon.calls[e.call].answer = ReplyPayload(CommitReply{}).index();
  Feed(d, g, GroupEvent(e));
}

// While the version before is held, and an instance holds it, no update of the trainers is
// assembled.
void World::CheckHold(int g, const UpdateRecord& update, const MachineView& view) {
  GroupWorld& group = GroupOf(g);
  const Machine* m = Find(group.home, g);
  if (!update.from_trainers() || m == nullptr || group.held_by != m->nonce) return;
  if (group.held_until != TimePoint() && group.held_until <= now_) ++result_.held;
  if (now_ >= group.held_until || !view.group.previous.has_value()) return;
  Violate("HOLD", fmt::format("g{}: the update to version {} is assembled while version {} is held",
                              g, update.version, view.group.previous->version));
}

}  // namespace refitd::sim
