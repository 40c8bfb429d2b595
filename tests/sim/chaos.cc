// The scenario of a seed, its faults, and the quiet end: once every fault is gone, what runs must
// end, all members attach again, one more update commits everywhere, and nothing is left over.
#include <algorithm>

#include "tests/sim/world.h"
#include "transport/base/status.h"

namespace refitd::sim {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr Duration kFaultsLast = seconds(22);  // after that everything is healed
constexpr Duration kLongestFreeze = seconds(5);
constexpr Duration kLongestUpdate = seconds(6);  // Begin's duration
// An update or a call may still be open for this long after its deadline: clean-up, a lost daemon's
// limit, a slow copy, a collective and slow messages. A freeze adds to it.
constexpr Duration kEndSlack = seconds(1 + 2 + 2 + 2 + 2);

}  // namespace

Result World::Run() {
  MakeScenario();
  while (!over_ && !queue_.empty()) {
    std::pop_heap(queue_.begin(), queue_.end(), [](const Item& a, const Item& b) {
      return a.at != b.at ? a.at > b.at : a.order > b.order;
    });
    const Item item = std::move(queue_.back());
    queue_.pop_back();
    now_ = item.at;
    item.run();
  }
  if (!over_) Violate("P4", "nothing is left to happen, and the run is not over");
  result_.virtual_time = now_.time_since_epoch() - std::chrono::hours(1);
  return result_;
}

void World::MakeScenario() {
  // Kinds of seeds: 0 has no faults; 1 faults of members; 2 of links; 3 of daemons; 4 of the data
  // plane; 5 of all; from 6 on one fault hits one daemon, and the others must go on.
  const auto kind = static_cast<int>(options_.seed % 11);
  no_faults_ = kind == 0;
  constexpr OneDaemon kOfKind[] = {OneDaemon::kOnlyEngines, OneDaemon::kOneSided, OneDaemon::kMute,
                                   OneDaemon::kWrongPayload, OneDaemon::kLost};
  if (kind >= 6) one_daemon_ = kOfKind[kind - 6];
  nameless_ = one_daemon_ == OneDaemon::kOneSided && options_.seed / 11 % 3 == 0;
  peer_limits_.peer = seconds(2);
  peer_limits_.wire = seconds(2);
  if (kind != 0 && kind < 6) chances_.slow_message = random_.Int(0, 60);
  if (kind == 1 || kind == 5) {
    chances_.late_member = 25;
    chances_.engine_fails = 15;
    chances_.trainer_abort = 8;
    chances_.call_gone = 15;
    chances_.new_binding = 60;
    chances_.chaos_members = 100;
  }
  if (kind == 2 || kind == 5) chances_.chaos_links = 100;
  if (kind == 3 || kind == 5) chances_.chaos_daemons = 60;
  if (kind == 4 || kind == 5) {
    chances_.transfer_fails = 12;
    chances_.bytes_damaged = 25;
    chances_.replica_differs = 60;
    chances_.wire_fails = 15;
    chances_.communicator_fails = 60;
  }
  if (kind == 3 || kind == 4 || kind == 5) chances_.chaos_operator = 25;

  const int daemons = random_.Percent(10)               ? 5
                      : one_daemon_ == OneDaemon::kLost ? random_.Int(3, 4)
                                                        : random_.Int(2, 4);
  daemons_ = std::vector<Daemon>(static_cast<size_t>(daemons));
  blocked_.assign(static_cast<size_t>(daemons),
                  std::vector<TimePoint>(static_cast<size_t>(daemons)));
  const int groups = random_.Percent(35) ? 2 : 1;
  groups_.resize(static_cast<size_t>(groups));
  rounds_.emplace_back();  // tag 0 belongs to no round
  for (int g = 0; g < groups; ++g) {
    GroupWorld& group = GroupOf(g);
    group.name = fmt::format("g{}", g);
    group.home = random_.Int(0, daemons - 1);
    group.spec.trainer_ranks = random_.Int(1, 3);
    group.spec.slot_bytes = 512 * random_.Int(1, 3);
    group.spec.slots = random_.Int(2, 5);
    group.limits.default_duration = seconds(5);
    group.limits.max_duration = kLongestUpdate;
    group.limits.ready_limit = seconds(2);
    group.limits.processing_limit = milliseconds(400);
    group.limits.ack_limit = seconds(2);
    group.limits.idle_limit = seconds(3);
    group.limits.grant_limit = seconds(2);
    group.limits.cleanup_limit = milliseconds(500);
    group.limits.outstanding_buckets = random_.Int(2, 6);
    group.limits.direct_part_bytes = 64 * random_.Int(1, 8);
    group.limits.direct_part_tensors = 1;
    group.limits.catch_ups = !random_.Percent(10);
    group.limits.catch_up_gather = random_.Millis(1, 60);
    group.limits.catch_up_wait = milliseconds(100);
    group.limits.catch_up_most_wait = seconds(1);
    group.verification = random_.Percent(50)   ? Verification::kReadback
                         : random_.Percent(70) ? Verification::kTransfer
                                               : Verification::kOff;
    const int tensors = random_.Int(1, 4);
    for (int t = 0; t < tensors; ++t) {
      group.model.push_back({fmt::format("t{}", t), DType::kInt64, {random_.Int(3, 90)}});
    }
    const int pushes = one_daemon_ == OneDaemon::kLost ? 40 : 50;
    group.way = random_.Percent(pushes)               ? GroupWorld::Way::kPush
                : tensors == 1 || random_.Percent(50) ? GroupWorld::Way::kRefit
                                                      : GroupWorld::Way::kMixed;
    const bool mixed = group.way == GroupWorld::Way::kMixed;
    group.pushed.assign(group.model.size(), group.way == GroupWorld::Way::kPush);
    for (int t = 0; mixed && t + 1 < tensors; ++t) {
      group.pushed[static_cast<size_t>(t)] = t == 0 || random_.Percent(40);
    }
    for (int rank = 0; rank < group.spec.trainer_ranks; ++rank) {
      group.registers.push_back(group.way != GroupWorld::Way::kPush &&
                                (!mixed || rank == 0 || random_.Percent(60)));
    }
    constexpr int kCompareEvery[] = {1, 1, 3, 100};
    group.limits.compare_every = kCompareEvery[random_.Index(4)];
    group.top = Version(random_.Int(1, 5));
    Round base;  // the bytes that engines load from a checkpoint
    base.g = g;
    base.version = group.top;
    base.outcome = Outcome::kCommitted;
    rounds_.push_back(std::move(base));
    // Where a daemon without trainers is to be lost, all trainers are on one daemon. That is not
    // always the coordinator's, so that joined daemons send parts again as well.
    const bool apart = group.way == GroupWorld::Way::kPush && random_.Percent(50);
    const int source = apart ? (group.home + 1) % daemons : group.home;
    for (int rank = 0; rank < group.spec.trainer_ranks; ++rank) {
      Seat seat;
      seat.g = g;
      seat.trainer = true;
      seat.d = one_daemon_ == OneDaemon::kLost ? source : random_.Int(0, daemons - 1);
      seat.rank = rank;
      seat.world_size = group.spec.trainer_ranks;
      seats_.push_back(seat);
    }
    const int instances = random_.Int(1, 3);
    for (int i = 0; i < instances; ++i) {
      Seat seat;
      seat.g = g;
      seat.instance = fmt::format("i{}", i);
      seat.world_size = random_.Percent(60) ? 1 : random_.Int(2, 3);
      // A program writes to registered memory only.
      const bool registered = group.way != GroupWorld::Way::kPush || random_.Percent(60);
      seat.delivery = registered ? DeliveryMode::kInPlace : DeliveryMode::kLoader;
      seat.manifest = seat.delivery == DeliveryMode::kLoader && random_.Percent(50);
      seat.catch_up = registered && random_.Percent(75);
      seat.shadowed = registered && (options_.seed / 2 + static_cast<uint64_t>(i)) % 5 < 2;
      seat.wants_staged = seat.shadowed && (options_.seed + static_cast<uint64_t>(i)) % 2 == 0;
      const int first = random_.Int(0, daemons - 1);
      for (int rank = 0; rank < seat.world_size; ++rank) {
        seat.rank = rank;
        seat.d = random_.Percent(60) ? first : random_.Int(0, daemons - 1);
        seats_.push_back(seat);
      }
      group.instances.push_back(seat.instance);
    }
    if (!no_faults_ && options_.seed / 5 % 6 == 1) group.spec.hold_previous_seconds = 1;
    // Without faults all instances must be there; with faults one is enough.
    group.spec.min_instances = no_faults_ ? instances : 1;
    group.job.left = random_.Int(2, 5);
  }
  for (int d = 0; d < daemons; ++d) {
    DaemonAt(d).index = d;
    // The order of ids differs from the order of daemons.
    DaemonAt(d).id = fmt::format("node-{}{}", random_.Int(0, 9), d);
    StartDaemon(d);
  }
  for (size_t seat = 0; seat < seats_.size(); ++seat) NewProcess(static_cast<int>(seat));
  if (kind == 1 || kind == 3 || kind == 5) In(milliseconds(50), [this] { SendThieves(); });
  for (int g = 0; g < groups; ++g) {
    In(random_.Millis(50, 1500), [this, g] { StartAttempt(g); });
  }
  if (!no_faults_) In(random_.Millis(50, 2000), [this] { Chaos(); });
  In(milliseconds(500), [this] { Sweep(); });
}

std::vector<int> World::DaemonsWithoutTrainers(bool joined_only) const {
  std::vector<int> found;
  for (int d = 0; d < static_cast<int>(daemons_.size()); ++d) {
    const bool trains = std::any_of(seats_.begin(), seats_.end(),
                                    [d](const Seat& seat) { return seat.trainer && seat.d == d; });
    const bool home = std::any_of(groups_.begin(), groups_.end(),
                                  [d](const GroupWorld& group) { return group.home == d; });
    if (!trains && !(home && joined_only)) found.push_back(d);
  }
  return found;
}

// ---- catch-ups ----

bool World::CatchUpRuns(int g) const {
  const auto& machines =
      daemons_[static_cast<size_t>(groups_[static_cast<size_t>(g)].home)].machines;
  const auto home = machines.find(g);
  return home != machines.end() && home->second.coordinator->catch_up_running();
}

void World::HitCatchUp(int g, const Round& round) {
  if (healed_ || chances_.chaos_members + chances_.chaos_daemons == 0 || !random_.Percent(40)) {
    return;
  }
  std::vector<int> pids = round.sources;
  for (const auto& [instance, members] : round.instances) {
    pids.insert(pids.end(), members.begin(), members.end());
  }
  const int pid = pids[random_.Index(pids.size())];
  const bool daemon = random_.PerMille(1000 * chances_.chaos_daemons /
                                       (chances_.chaos_members + chances_.chaos_daemons));
  const int d = random_.Percent(30) ? GroupOf(g).home : SeatOf(ProcessOf(pid)).d;
  In(random_.Micros(0, 60'000), [this, pid, daemon, d] {
    if (healed_) return;
    if (!daemon) {
      if (ProcessOf(pid).alive) Count(Fault::kMemberKilled);
      return KillProcess(pid);
    }
    if (!DaemonAt(d).up) return;
    KillDaemon(d, random_.Percent(20));
    In(random_.Millis(20, 2000), [this, d] { StartDaemon(d); });
  });
}

void World::TearSource(const Round& round) {
  Process& source_instance = ProcessOf(round.sources[0]);
  for (auto& cells : source_instance.cells) {
    if (cells.empty()) continue;
    cells[0] |= kDamageBit;
    source_instance.torn = true;
    return;
  }
}

// A call at the coordinator's own daemon reaches its group at once, so no call that opens an update
// is left unanswered by a catch-up that commits: the catch-up would have given way to it.
// Calls whose update waits for a hold are left to wait.
void World::CheckCaughtUp(int d, int g) {
  if (now_ < GroupOf(g).held_until && GroupOf(g).held_by == Find(d, g)->nonce) return;
  for (const auto& [id, call] : DaemonAt(d).calls) {
    if (call.g != g || !call.opens || call.since >= now_) continue;
    return Violate("GIVE", fmt::format("d{} g{}: a catch-up commits while call {} of pid {} waits",
                                       d, g, id, call.pid));
  }
}

void World::KillOnlyEngines() {
  if (healed_) return;
  const std::vector<int> candidates = DaemonsWithoutTrainers(true);
  if (candidates.empty()) return;
  const int d = candidates[random_.Index(candidates.size())];
  bool any = false;
  for (const Seat& seat : std::vector<Seat>(seats_)) {
    if (seat.d != d || !ProcessOf(seat.pid).alive) continue;
    any = true;
    KillProcess(seat.pid);
  }
  if (any) Count(Fault::kOnlyEnginesKilled);
}

void World::BreakWireOfOne() {
  const auto broken = [](const Daemon& daemon) {
    return daemon.wire_trouble != Daemon::WireTrouble::kNone;
  };
  if (std::any_of(daemons_.begin(), daemons_.end(), broken)) return;
  const std::vector<int> candidates = DaemonsWithoutTrainers(false);
  if (candidates.empty()) return;
  const int d = candidates[random_.Index(candidates.size())];
  constexpr Daemon::WireTrouble kTroubles[] = {Daemon::WireTrouble::kNeverOpens,
                                               Daemon::WireTrouble::kNeverConnects,
                                               Daemon::WireTrouble::kNotForItself};
  DaemonAt(d).wire_trouble = kTroubles[random_.Index(3)];
  Trace("the data plane of d{} is broken ({})", d, static_cast<int>(DaemonAt(d).wire_trouble));
}

// Kills a daemon that has no trainers, and starts it anew later.
void World::LoseDaemon() {
  if (healed_) return;
  const std::vector<int> candidates = DaemonsWithoutTrainers(true);
  if (candidates.empty()) return;
  const int d = candidates[random_.Index(candidates.size())];
  if (!DaemonAt(d).up) return;
  KillDaemon(d, false);
  In(random_.Millis(100, 3000), [this, d] { StartDaemon(d); });
}

// Makes a daemon mute until its operator starts it anew.
void World::Mute() {
  if (healed_) return;
  const int d = random_.Int(0, static_cast<int>(daemons_.size()) - 1);
  Daemon& daemon = DaemonAt(d);
  const bool home = std::any_of(groups_.begin(), groups_.end(),
                                [d](const GroupWorld& group) { return group.home == d; });
  if (!daemon.up || daemon.mute || home) return;
  Count(Fault::kDaemonMute);
  Trace("d{} goes mute", d);
  daemon.mute = true;
  In(random_.Millis(4000, 20'000), [this, d, life = daemon.life] {
    if (DaemonAt(d).life != life || !DaemonAt(d).up) return;
    KillDaemon(d, false);
    In(milliseconds(100), [this, d] { StartDaemon(d); });
  });
}

void World::SendWrongPayload() {
  std::vector<int> open;
  for (size_t i = 0; i < links_.size(); ++i) {
    if (links_[i].c_open && links_[i].f_open) open.push_back(static_cast<int>(i));
  }
  if (open.empty()) return;
  const int index = open[random_.Index(open.size())];
  Link& link = links_[static_cast<size_t>(index)];
  const GroupWorld& group = GroupOf(link.g);
  const Machine* m = Find(link.f, link.g);
  if (random_.Percent(60) || group.last_communicator == CommunicatorId() ||
      group.communicator_nodes.contains(link.node) || m == nullptr || !m->linked) {
    link.down.wrong = true;
    return;
  }
  Count(Fault::kWrongPayload);
  Letter letter;
  if (random_.Percent(50)) {
    letter.report = CommunicatorUp{group.last_communicator, absl::OkStatus()};
  } else {
    letter.report = CommunicatorOpened{group.last_communicator, absl::OkStatus(), "nowhere"};
  }
  Post(index, false, std::move(letter));
}

// Whether each instance with a rank on the daemon has a rank on a broken daemon, too. Then no
// communicator without the broken daemon needs this daemon, and no search can tell the two apart.
bool World::OnlyBesideBroken(int g, int d) const {
  const auto of_group = [g](const Seat& seat) { return seat.g == g && !seat.trainer; };
  return std::all_of(seats_.begin(), seats_.end(), [&](const Seat& here) {
    if (!of_group(here) || here.d != d) return true;
    return std::any_of(seats_.begin(), seats_.end(), [&](const Seat& seat) {
      return of_group(seat) && seat.instance == here.instance &&
             daemons_[static_cast<size_t>(seat.d)].wire_trouble != Daemon::WireTrouble::kNone;
    });
  });
}

// If no failure names a node, the broken daemon alone may lose its place, and daemons that can't be
// told from it.
void World::CheckKeptOut(int g) {
  if (!nameless_ || healed_) return;
  const Machine* m = Find(GroupOf(g).home, g);
  if (m == nullptr) return;
  for (const NodeView& node : m->machine->View(now_).nodes) {
    if (node.kept_out.empty()) continue;
    for (size_t d = 0; d < daemons_.size(); ++d) {
      if (daemons_[d].id != node.daemon_id) continue;
      if (daemons_[d].wire_trouble != Daemon::WireTrouble::kNone) continue;
      if (OnlyBesideBroken(g, static_cast<int>(d))) continue;
      return Violate("REST", fmt::format("g{}: {} is kept out, whose data plane works: {}", g,
                                         node.daemon_id, node.kept_out));
    }
  }
}

void World::CheckRest(int g, const Round& round, const UpdateEnded& a) {
  // A daemon that is lost costs others an update whose program runs after buckets were pushed.
  const bool mixed = GroupOf(g).way == GroupWorld::Way::kMixed;
  const bool own_cost = one_daemon_ == OneDaemon::kOnlyEngines ||
                        one_daemon_ == OneDaemon::kOneSided ||
                        (one_daemon_ == OneDaemon::kLost && !mixed);
  if (!own_cost || healed_ || a.outcome == Outcome::kCommitted) return;
  if (round.due - round.assembled < seconds(2)) return;  // the update had too little time
  for (const auto& [instance, pids] : round.instances) {
    const bool whole = std::all_of(pids.begin(), pids.end(), [this, &round](int pid) {
      const Process& p = ProcessOf(pid);
      const Daemon& daemon = DaemonAt(SeatOf(p).d);
      return p.alive && daemon.wire_trouble == Daemon::WireTrouble::kNone && daemon.up &&
             daemon.died + seconds(3) < round.assembled;  // its loss was noticed
    });
    if (!whole) continue;
    if (nameless_ && ++lost_to_search_[g] <= daemons_.size()) return;
    return Violate("REST",
                   fmt::format("g{}: the update to version {} is given up, though instance {} "
                               "could have got it: {}",
                               g, a.version, instance, a.reason));
  }
}

void World::Chaos() {
  if (healed_) return;
  In(random_.Millis(40, 900), [this] { Chaos(); });
  switch (one_daemon_) {
    case OneDaemon::kNone:
      break;
    case OneDaemon::kOnlyEngines:
      if (random_.Percent(30)) KillOnlyEngines();
      return;
    case OneDaemon::kOneSided:
      if (random_.Percent(50)) BreakWireOfOne();
      return;
    case OneDaemon::kMute:
      if (random_.Percent(15)) Mute();
      return;
    case OneDaemon::kWrongPayload:
      if (random_.Percent(30)) SendWrongPayload();
      return;
    case OneDaemon::kLost:
      if (random_.Percent(20)) LoseDaemon();
      return;
  }
  const int daemons = static_cast<int>(daemons_.size());
  if (random_.PerMille(chances_.chaos_members * 4)) {
    const Seat& seat = seats_[random_.Index(seats_.size())];
    Process& p = ProcessOf(seat.pid);
    if (!p.alive) return;
    switch (random_.Int(0, 5)) {
      case 0:
      case 1:
      case 2:
        Count(Fault::kMemberKilled);
        KillProcess(p.pid);
        break;
      case 3:
        Count(Fault::kMemberMute);
        Trace("pid {} goes mute", p.pid);
        p.mute = true;
        In(random_.Millis(1000, 9000), [this, pid = p.pid] { KillProcess(pid); });
        break;
      default:
        FreezeProcess(p.pid, random_.Millis(50, 4000));
    }
  }
  if (random_.PerMille(chances_.chaos_links * 5)) {
    if (random_.Percent(25) && daemons > 1) {
      const int a = random_.Int(0, daemons - 1);
      const int b = (a + random_.Int(1, daemons - 1)) % daemons;
      const TimePoint until = now_ + random_.Millis(50, 5000);
      Count(Fault::kPartition);
      Trace("d{} and d{} are parted for {} ms", a, b, ToMillis(until - now_));
      blocked_[static_cast<size_t>(a)][static_cast<size_t>(b)] = until;
      blocked_[static_cast<size_t>(b)][static_cast<size_t>(a)] = until;
    } else {
      std::vector<int> open;
      for (size_t i = 0; i < links_.size(); ++i) {
        if (links_[i].c_open && links_[i].f_open) open.push_back(static_cast<int>(i));
      }
      if (!open.empty()) {
        const int index = open[random_.Index(open.size())];
        Lane& lane = random_.Percent(50) ? links_[static_cast<size_t>(index)].down
                                         : links_[static_cast<size_t>(index)].up;
        switch (random_.Int(0, 5)) {
          case 0:
            Count(Fault::kMessageLost);
            lane.lose = true;
            break;
          case 1:
          case 2:
            Count(Fault::kMessageDuplicated);
            lane.duplicate = true;
            break;
          case 3:
            Count(Fault::kMessageReordered);
            lane.reorder = true;
            break;
          default:
            BreakLink(index);
        }
      }
    }
  }
  if (random_.PerMille(chances_.chaos_daemons * 4)) {
    const int d = random_.Int(0, daemons - 1);
    if (random_.Percent(40)) {
      FreezeDaemon(d, random_.Millis(50, ToMillis(kLongestFreeze)));
    } else if (DaemonAt(d).up) {
      KillDaemon(d, random_.Percent(30));
      if (options_.bug != Bug::kSwallowedDeath) {
        In(random_.Millis(20, 6000), [this, d] { StartDaemon(d); });
      }
    }
  }
  if (random_.PerMille(chances_.chaos_operator * 5)) {
    const int g = random_.Int(0, static_cast<int>(groups_.size()) - 1);
    const int d = GroupOf(g).home;
    Daemon& daemon = DaemonAt(d);
    if (!daemon.up || daemon.frozen || Find(d, g) == nullptr) return;
    const int what = random_.Int(0, 9);
    if (what == 0) {
      Count(Fault::kDrain);
      daemon.drained = true;
      for (const auto& [other, machine] : std::map<int, int>{{g, 0}})
        Feed(d, other, GroupEvent(DrainEvent{}));
      In(random_.Millis(100, 4000), [this, d, life = daemon.life] {
        if (DaemonAt(d).life != life) return;
        KillDaemon(d, false);
        In(milliseconds(100), [this, d] { StartDaemon(d); });
      });
      return;
    }
    const CallId call(daemon.next_call++);
    if (what <= 5) {
      daemon.calls[call] = {0, g, now_, [](const absl::Status&, const ReplyPayload&) {}};
      Count(Fault::kOperatorAbort);
      Feed(d, g, GroupEvent(OperatorAbort{call, "planted"}));
      return;
    }
    // Trainers' leases name the old incarnation, so they end, as in the real daemon.
    const uint64_t incarnation = random_.Next();
    const auto nonce = Find(d, g)->nonce;
    daemon.calls[call] = {
        0, g, now_, [this, d, g, nonce](const absl::Status& status, const ReplyPayload&) {
          if (!status.ok() || Find(d, g, nonce) == nullptr) return;
          Count(Fault::kReplace);
          std::vector<MemberId> trainers;
          for (const auto& [member, record] : DaemonAt(d).members) {
            if (record.g == g && !record.lost && SeatOf(ProcessOf(record.pid)).trainer) {
              trainers.push_back(member);
            }
          }
          for (const MemberId member : trainers) {
            Hear(d, member, [this](Process* p) {
              LoseLease(p->pid, "the group was replaced", random_.Millis(1, 100));
            });
            DaemonAt(d).members.at(member).lost = true;
            Feed(d, g, GroupEvent(MemberLost{member, "the group was replaced"}));
          }
        }};
    Feed(d, g, GroupEvent(ReplaceGroup{call, incarnation, kOwner}));
  }
}

// Reports states that must not last.
void World::Sweep() {
  In(milliseconds(500), [this] { Sweep(); });
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) JobSweep(g);
  for (const Round& round : rounds_) {
    if (round.outcome != Outcome::kRunning) continue;
    if (Find(GroupOf(round.g).home, round.g, round.coordinator) == nullptr) continue;
    if (now_ < std::max(round.due, thawed_) + kEndSlack) continue;
    return Violate("P4", fmt::format("g{}: update {} does not end", round.g, round.update));
  }
  for (const Daemon& daemon : daemons_) {
    if (!daemon.up) continue;
    for (const auto& [call, record] : daemon.calls) {
      if (daemon.mute) break;  // a mute daemon forwards no call
      if (now_ < std::max(record.since + kLongestUpdate, thawed_) + kEndSlack) continue;
      return Violate("P4",
                     fmt::format("d{} g{}: call {} is not answered", daemon.index, record.g, call));
    }
  }
  if (healed_) return;
  bool done = now_.time_since_epoch() - std::chrono::hours(1) >= kFaultsLast;
  if (!done) {
    done = std::all_of(groups_.begin(), groups_.end(), [](const GroupWorld& group) {
      return group.job.left <= 0 && !group.job.active;
    });
  }
  if (done) Heal();
}

void World::Heal() {
  Trace("everything is healed");
  healed_ = true;
  chances_ = {};
  for (auto& row : blocked_) std::fill(row.begin(), row.end(), TimePoint());
  for (size_t i = 0; i < links_.size(); ++i) {
    for (const bool down : {true, false}) {
      Lane& lane = down ? links_[i].down : links_[i].up;
      lane.lose = lane.duplicate = lane.reorder = lane.wrong = false;
      In(Duration(0), [this, i, down] { Pump(static_cast<int>(i), down); });
    }
  }
  for (GroupWorld& group : groups_) group.job.left = 0;
  for (const std::unique_ptr<Process>& p : processes_) {
    for (const std::shared_ptr<Shard>& shard : p->shards) shard->in_pid = 0;
  }
  for (size_t d = 0; d < daemons_.size(); ++d) {
    const auto thieves = daemons_[d].thieves;
    for (const auto& [member, g] : thieves) {
      InDaemon(static_cast<int>(d), Duration(0),
               [this, d, member = member] { ThiefLeaves(static_cast<int>(d), member); });
    }
  }
  for (size_t d = 0; d < daemons_.size(); ++d) {
    Daemon& daemon = daemons_[d];
    if (daemon.frozen) Thaw(static_cast<int>(d), daemon.life);
    if (daemon.drained || daemon.mute) KillDaemon(static_cast<int>(d), false);
    daemon.wire_trouble = Daemon::WireTrouble::kNone;
    StartDaemon(static_cast<int>(d));
  }
  for (const Seat& seat : std::vector<Seat>(seats_)) {
    Process& p = ProcessOf(seat.pid);
    if (p.alive && p.frozen) ThawProcess(seat.pid);
    if (p.alive && p.mute) KillProcess(seat.pid);
  }
  // A daemon that has not heard of a broken link will notice the silence.
  In(peer_limits_.peer + seconds(1),
     [this, give_up = now_ + kLongestUpdate + kEndSlack] { AwaitQuiet(give_up); });
}

bool World::AnyUpdateRuns() {
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
    for (size_t d = 0; d < daemons_.size(); ++d) {
      Machine* m = Find(static_cast<int>(d), g);
      if (m != nullptr && m->machine->update_running()) return true;
    }
  }
  return false;
}

void World::AwaitQuiet(TimePoint give_up) {
  bool quiet = !AnyUpdateRuns();
  for (const GroupWorld& group : groups_) quiet &= !group.job.active;
  if (!quiet) {
    if (now_ > give_up) return Violate("P4", "an update does not end, though nothing fails");
    In(milliseconds(100), [this, give_up] { AwaitQuiet(give_up); });
    return;
  }
  RestartKeptOut();
  In(milliseconds(100), [this, until = now_ + seconds(20)] { AwaitAttached(until); });
}

// An operator does this when a data plane is mended: members that are kept out attach anew.
void World::RestartKeptOut() {
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
    const Machine* m = Find(GroupOf(g).home, g);
    if (m == nullptr) continue;
    for (const NodeView& node : m->machine->View(now_).nodes) {
      if (node.kept_out.empty()) continue;
      for (const Seat& seat : std::vector<Seat>(seats_)) {
        if (seat.g == g && DaemonAt(seat.d).id == node.daemon_id) KillProcess(seat.pid);
      }
    }
  }
}

std::string World::WhoIsMissing(int g) {
  Machine* m = Find(GroupOf(g).home, g);
  if (m == nullptr) return "the coordinator";
  const MachineView view = m->machine->View(now_);
  for (const Seat& seat : seats_) {
    if (seat.g != g) continue;
    const bool there =
        std::any_of(view.group.members.begin(), view.group.members.end(),
                    [&](const MemberView& member) { return member.pid == seat.pid; });
    if (!there || !ProcessOf(seat.pid).welcomed) {
      return seat.trainer ? fmt::format("trainer rank {}", seat.rank)
                          : fmt::format("engine {} rank {}", seat.instance, seat.rank);
    }
  }
  for (const InstanceView& instance : view.group.instances) {
    if (instance.state != "clean" && instance.state != "dirty") {
      return fmt::format("instance {}, which is {}", instance.name, instance.state);
    }
  }
  return "";
}

void World::AwaitAttached(TimePoint give_up) {
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) ReplaceStolen(g);
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
    const std::string missing = WhoIsMissing(g);
    if (missing.empty()) continue;
    if (now_ > give_up) {
      return Violate("LIVE", fmt::format("g{}: nothing fails, but {} is not there", g, missing));
    }
    In(milliseconds(100), [this, give_up] { AwaitAttached(give_up); });
    return;
  }
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
    GroupOf(g).job.final = true;
    GroupOf(g).job.left = 1;
    StartAttempt(g);
  }
  In(milliseconds(10), [this, until = now_ + seconds(20)] { AwaitFinal(until); });
}

void World::AwaitFinal(TimePoint give_up) {
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
    const Job& job = GroupOf(g).job;
    if (!job.active) {
      for (const auto& [rank, committed] : job.concluded) {
        if (committed) continue;
        return Violate("LIVE", fmt::format("g{}: nothing fails, but trainer rank {} could not "
                                           "install version {}",
                                           g, rank, job.version));
      }
      continue;
    }
    if (now_ > give_up) {
      return Violate("LIVE", fmt::format("g{}: nothing fails, but version {} is not installed", g,
                                         job.version));
    }
    In(milliseconds(20), [this, give_up] { AwaitFinal(give_up); });
    return;
  }
  // A search for the daemon that keeps a communicator from connecting may have left an instance out
  // of the last update. It ends within a few updates, and then the instance gets the next version.
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
    GroupWorld& group = GroupOf(g);
    if (!LeavesOneOut(g) || group.more_updates == 0) continue;
    --group.more_updates;
    // What failed before the faults ended may have ended the search at a daemon that works by now.
    const std::vector<NodeView> nodes = Find(group.home, g)->machine->View(now_).nodes;
    if (std::any_of(nodes.begin(), nodes.end(),
                    [](const NodeView& node) { return !node.kept_out.empty(); })) {
      RestartKeptOut();
      In(milliseconds(100), [this, until = now_ + seconds(20)] { AwaitAttached(until); });
      return;
    }
    group.job.left = 1;
    StartAttempt(g);
    In(milliseconds(10), [this, until = now_ + seconds(20)] { AwaitFinal(until); });
    return;
  }
  // Lets acknowledgements, closing and pings settle.
  In(seconds(1), [this] { CheckQuiet(); });
}

bool World::LeavesOneOut(int g) {
  const Machine* m = Find(GroupOf(g).home, g);
  if (m == nullptr) return false;
  const std::vector<InstanceView> instances = m->machine->View(now_).group.instances;
  return std::any_of(instances.begin(), instances.end(), [&](const InstanceView& instance) {
    return instance.state == "clean" && instance.version != GroupOf(g).job.version;
  });
}

void World::CheckQuiet() {
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
    const GroupWorld& group = GroupOf(g);
    Machine* m = Find(group.home, g);
    const MachineView view = m->machine->View(now_);
    for (const SlotView& slot : view.group.slots) {
      if (slot.state == SlotState::kFree) continue;
      return Violate(
          "P8", fmt::format("g{}: at the end slot {} is held by {}", g, slot.slot, slot.holder));
    }
    for (const MemberView& member : view.group.members) {
      if (member.state == "attached") continue;
      return Violate("P8",
                     fmt::format("g{}: at the end pid {} is {}", g, member.pid, member.state));
    }
    for (const InstanceView& instance : view.group.instances) {
      if (instance.state == "clean" && instance.version == group.job.version) continue;
      return Violate("LIVE", fmt::format("g{}: at the end instance {} is {}", g, instance.name,
                                         instance.state));
    }
    for (const Seat& seat : seats_) {
      if (seat.g != g || seat.trainer) continue;
      if (TrueVersion(ProcessOf(seat.pid), nullptr) == group.job.version) continue;
      return Violate("P1", fmt::format("g{}: at the end pid {} does not hold version {}", g,
                                       seat.pid, group.job.version));
    }
  }
  if (AnyUpdateRuns()) return Violate("P4", "at the end an update runs");
  for (const Daemon& daemon : daemons_) {
    if (!daemon.lock.holder().empty() || daemon.lock.waiting() > 0) {
      return Violate("P7", fmt::format("d{}: at the end {} holds the wire", daemon.index,
                                       daemon.lock.holder()));
    }
    if (!daemon.calls.empty()) {
      return Violate("P4", fmt::format("d{}: at the end call {} is not answered", daemon.index,
                                       daemon.calls.begin()->first));
    }
    for (const auto& [member, record] : daemon.members) {
      if (!record.lost) continue;
      return Violate("P8", fmt::format("d{}: at the end member {} is lost, but not released",
                                       daemon.index, member));
    }
  }
  if (!works_.empty()) return Violate("P6", "at the end a copy runs");
  for (const auto& [comm, ops] : comms_) {
    for (const auto& [seq, op] : ops) {
      if (!op.running.empty()) {
        return Violate("P4", fmt::format("at the end operation {} of {} runs", seq, comm));
      }
    }
  }
  Trace("all is well");
  over_ = true;
}

}  // namespace refitd::sim
