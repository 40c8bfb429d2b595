// Engines that process a staged version while they serve: who gets the event, who is waited for,
// and what becomes of what was made.
#include "tests/sim/world.h"

namespace refitd::sim {
namespace {

using std::chrono::milliseconds;

}  // namespace

void World::On(int d, int, const SendStaged& a) {
  if (Touches(d, a.member)) {
    return Violate("P1", fmt::format("member {} is to process a version while its memory is "
                                     "written or read back",
                                     a.member));
  }
  Hear(d, a.member, [this, a](Process* p) { HearStaged(p->pid, a.version, a.update); });
}

void World::HearStaged(int pid, Version version, UpdateId update) {
  Process& p = ProcessOf(pid);
  if (!SeatOf(p).wants_staged) {
    return Violate("AHEAD", fmt::format("pid {} hears that version {} is staged, and has not asked",
                                        pid, version));
  }
  p.staged = update;
  if (options_.bug != Bug::kKeptProcessed) p.processed.reset();
  const uint64_t draw = Random(options_.seed + update.value() + static_cast<uint64_t>(pid)).Next();
  if (draw % 20 == 0) return;  // never answers
  const Duration wait = milliseconds(draw % 10 == 1 ? 600 : 1 + draw % 15);
  InProcess(pid, wait, [this, pid, lease = p.lease, update] {
    Process& q = ProcessOf(pid);
    if (q.lease != lease || q.staged != update || q.mute) return;
    if (!q.processed.has_value()) q.processed = q.back;
    q.answered = update;
    Say(pid, [this, pid, update](int d, MemberId member) {
      Feed(d, SeatOf(ProcessOf(pid)).g, GroupEvent(ProcessedEvent{member, update}));
    });
  });
}

// P11: what was made of a version gets into place with that version alone.
void World::CheckProcessed(const Process& p, Version version) {
  if (!p.processed.has_value() || *p.processed == p.cells) return;
  Violate("P11", fmt::format("pid {} puts into place what it made of another version than {}",
                             p.pid, version));
}

void World::NoteStaged(int d, int g, const SendStaged& a) {
  staged_until_[{Find(d, g)->nonce, a.update}] = now_ + a.remaining;
  if (options_.bug != Bug::kHastyPrepare) return;
  Feed(d, g, GroupEvent(ProcessedEvent{a.member, a.update}));
}

// The coordinator `d` asks a member of daemon `at` to flip.
void World::CheckWaited(int d, int g, int at, const SendFlip& a) {
  const auto until = staged_until_.find({Find(d, g)->nonce, a.update});
  const auto member = DaemonAt(at).members.find(a.member);
  if (until == staged_until_.end() || member == DaemonAt(at).members.end()) return;
  const Process& p = ProcessOf(member->second.pid);
  if (!SeatOf(p).wants_staged || p.answered == a.update || now_ >= until->second) return;
  if (p.member != a.member || !DaemonAt(at).up || p.daemon_life != DaemonAt(at).life) return;
  Violate("AHEAD", fmt::format("g{}: update {} asks engines to pause before pid {} has processed "
                               "its version",
                               g, a.update, p.pid));
}

}  // namespace refitd::sim
