#include "tests/sim/world.h"

#include <algorithm>
#include <cstdio>
#include <tuple>

#include "daemon/link/commands.h"
#include "daemon/link/limits.h"
#include "daemon/link/reports.h"
#include "tests/sim/describe.h"
#include "transport/base/status.h"

namespace refitd::sim {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int64_t kMaxEvents = 60'000;  // of one run; a few thousand are normal

bool Later(const auto& a, const auto& b) { return a.at != b.at ? a.at > b.at : a.order > b.order; }

}  // namespace

std::string_view FaultName(Fault fault) {
  constexpr std::array<std::string_view, static_cast<size_t>(Fault::kCount)> kNames = {
      "member killed",
      "member mute",
      "member frozen",
      "daemon killed",
      "daemon frozen",
      "partition",
      "link broken",
      "message lost",
      "message doubled",
      "message swapped",
      "transfer failed",
      "bytes damaged",
      "wire failed",
      "communicator failed",
      "operator abort",
      "trainer abort",
      "engine failed",
      "drain",
      "replace",
      "call gone",
      "replica differs",
      "overlap",
      "only engines killed",
      "wire one-sided",
      "daemon mute",
      "wrong payload",
      "wire nameless",
      "thief"};
  return kNames[static_cast<size_t>(fault)];
}

Result RunSeed(const Options& options) { return World(options).Run(); }

World::World(const Options& options) : options_(options), random_(options.seed) {}
World::~World() = default;

// ---- time ----

void World::In(Duration delay, Closure run) {
  queue_.push_back({now_ + delay, order_++, std::move(run)});
  std::push_heap(queue_.begin(), queue_.end(), Later<Item, Item>);
}

void World::InDaemon(int d, Duration delay, Closure run) {
  const uint64_t life = DaemonAt(d).life;
  In(delay, [this, d, life, run = std::move(run)] { OnDaemon(d, life, run); });
}

void World::OnDaemon(int d, uint64_t life, Closure run) {
  Daemon& daemon = DaemonAt(d);
  if (!daemon.up || daemon.life != life) return;
  if (daemon.frozen) {
    daemon.held.push_back(std::move(run));
  } else {
    run();
  }
}

void World::InProcess(int pid, Duration delay, Closure run) {
  In(delay, [this, pid, run = std::move(run)] { OnProcess(pid, run); });
}

void World::OnProcess(int pid, Closure run) {
  Process& p = ProcessOf(pid);
  if (!p.alive) return;
  if (p.frozen) {
    p.held.push_back(std::move(run));
  } else {
    run();
  }
}

void World::Violate(std::string promise, std::string what) {
  if (over_) return;
  over_ = true;
  Trace("BROKEN {}: {}", promise, what);
  result_.promise = std::move(promise);
  result_.what = std::move(what);
}

void World::Print(const std::string& line) const {
  const double at =
      std::chrono::duration<double>(now_.time_since_epoch() - std::chrono::hours(1)).count();
  std::fputs(fmt::format("{:11.6f} {}\n", at, line).c_str(), stdout);
}

template <typename T>
void World::Note(std::string_view what, int d, int g, const T& value) {
  uint64_t& hash = result_.trace_hash;
  hash = (hash ^ static_cast<uint64_t>(now_.time_since_epoch().count())) * 0x100000001b3;
  hash = (hash ^ static_cast<uint64_t>(d * 16 + g)) * 0x100000001b3;
  if (!options_.trace) {
    Describer(&hash, nullptr).Add(value);
    return;
  }
  std::string text;
  Describer(&hash, &text).Add(value);
  Print(fmt::format("d{} g{} {}{}", d, g, what, text));
}

Duration World::NetDelay() {
  if (random_.PerMille(chances_.slow_message)) return random_.Millis(5, 600);
  return random_.Micros(50, 2000);
}

// ---- daemons ----

void World::StartDaemon(int d) {
  Daemon& daemon = DaemonAt(d);
  if (daemon.up) return;
  daemon.up = true;
  daemon.frozen = false;
  daemon.drained = false;
  daemon.silent_death = false;
  daemon.mute = false;
  daemon.life = ++nonces_;
  daemon.next_member = daemon.next_call = daemon.next_update = 1;
  Trace("d{} starts", d);
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
    if (GroupOf(g).home == d) {
      InDaemon(d, random_.Millis(1, 50), [this, d, g] { CreateGroup(d, g); });
    }
  }
}

void World::CreateGroup(int d, int g) {
  Daemon& daemon = DaemonAt(d);
  GroupWorld& group = GroupOf(g);
  Machine& m = daemon.machines[g];
  m.nonce = m.coordinator_nonce = ++nonces_;
  m.pool = std::make_shared<Pool>();
  m.pool->slots.assign(
      static_cast<size_t>(group.spec.slots),
      std::vector<Tag>(static_cast<size_t>(group.spec.slot_bytes / kElementBytes)));
  m.pool->uses.resize(static_cast<size_t>(group.spec.slots));
  m.executor = std::make_unique<Executor>(&transport_);
  CoordinatorOptions options;
  options.name = group.name;
  options.daemon_id = daemon.id;
  options.incarnation = random_.Next();
  options.spec = group.spec;
  options.limits = group.limits;
  if (options_.bug == Bug::kPatientCleanUp || options_.bug == Bug::kSwallowedDeath)
    options.limits.cleanup_limit = std::chrono::hours(1);
  options.peer_limits = peer_limits_;
  options.next_update = [&daemon] { return UpdateId(daemon.next_update++); };
  options.next_member = [&daemon] { return MemberId(daemon.next_member++); };
  options.next_call = [&daemon] { return CallId(daemon.next_call++); };
  auto machine = std::make_unique<Coordinator>(std::move(options));
  m.coordinator = machine.get();
  m.machine = std::move(machine);
  m.linked = true;
  Trace("d{} g{} is created here, machine {}", d, g, m.nonce);
}

void World::KillDaemon(int d, bool silent) {
  Daemon& daemon = DaemonAt(d);
  if (!daemon.up) return;
  Count(Fault::kDaemonKilled);
  Trace("d{} is killed{}", d, silent ? ", and nobody is told" : "");
  result_.trace_hash = (result_.trace_hash ^ 0xdead) * 0x100000001b3;
  daemon.up = false;
  daemon.died = now_;
  daemon.silent_death = silent || options_.bug == Bug::kSwallowedDeath;
  daemon.held.clear();
  daemon.inbox.clear();
  daemon.machines.clear();
  daemon.sources.clear();
  daemon.lock = WireLock();
  for (auto& [call, record] : daemon.calls) {
    if (record.pid == 0) continue;
    InProcess(record.pid, random_.Millis(1, 20), [reply = std::move(record.reply)] {
      reply(absl::UnavailableError("the daemon died"), EmptyReply{});
    });
  }
  daemon.calls.clear();
  daemon.wrong_answers.clear();
  for (const auto& [member, record] : daemon.members) {
    if (record.lost) continue;
    const int pid = record.pid;
    InProcess(pid, random_.Millis(1, 20), [this, pid, member = member, life = daemon.life] {
      if (ProcessOf(pid).member == member && ProcessOf(pid).daemon_life == life) {
        LoseLease(pid, "the daemon died", random_.Millis(50, 2000));
      }
    });
  }
  daemon.members.clear();
  daemon.thieves.clear();
  std::erase_if(works_, [d](const auto& work) { return work.second->d == d; });
  for (auto& [key, end] : ends_) {
    if (end.d != d) continue;
    const std::string comm = CommOf(end);
    for (auto& [seq, op] : comms_[comm]) op.running.erase(static_cast<uint32_t>(end.rank));
    if (std::exchange(end.closed, true)) continue;
    broken_comms_.insert(comm);
    if (!daemon.silent_death) BreakComm(comm, milliseconds(1), milliseconds(500));
  }
  std::erase_if(ends_, [d](const auto& e) { return e.second.d == d; });
  for (size_t i = 0; i < links_.size(); ++i) {
    Link& link = links_[i];
    if (link.c == d && link.c_life == daemon.life && link.c_open) {
      CloseSide(static_cast<int>(i), true, !daemon.silent_death);
    }
    if (link.f == d && link.f_life == daemon.life && link.f_open) {
      CloseSide(static_cast<int>(i), false, !daemon.silent_death);
    }
  }
}

void World::FreezeDaemon(int d, Duration how_long) {
  Daemon& daemon = DaemonAt(d);
  if (!daemon.up || daemon.frozen) return;
  Count(Fault::kDaemonFrozen);
  Trace("d{} is frozen for {} ms", d, ToMillis(how_long));
  daemon.frozen = true;
  thawed_ = std::max(thawed_, now_ + how_long);
  In(how_long, [this, d, life = daemon.life] { Thaw(d, life); });
}

void World::Thaw(int d, uint64_t life) {
  Daemon& daemon = DaemonAt(d);
  if (!daemon.up || daemon.life != life || !daemon.frozen) return;
  Trace("d{} goes on", d);
  daemon.frozen = false;
  while (!daemon.held.empty() && !over_) {
    const Closure run = std::move(daemon.held.front());
    daemon.held.pop_front();
    run();
  }
}

Machine* World::Find(int d, int g) {
  Daemon& daemon = DaemonAt(d);
  const auto it = daemon.machines.find(g);
  return it == daemon.machines.end() ? nullptr : &it->second;
}

Machine* World::Find(int d, int g, uint64_t nonce) {
  Machine* m = Find(d, g);
  return m != nullptr && m->nonce == nonce ? m : nullptr;
}

void World::EnsureFollower(int d, int g) {
  Daemon& daemon = DaemonAt(d);
  if (daemon.machines.contains(g) || GroupOf(g).home == d) return;
  Machine& m = daemon.machines[g];
  m.nonce = ++nonces_;
  m.pool = std::make_shared<Pool>();
  m.executor = std::make_unique<Executor>(&transport_);
  FollowerOptions options;
  options.name = GroupOf(g).name;
  options.coordinator_address = fmt::format("d{}", GroupOf(g).home);
  options.peer_limits = peer_limits_;
  options.next_update = [&daemon] { return UpdateId(daemon.next_update++); };
  auto machine = std::make_unique<Follower>(std::move(options));
  m.follower = machine.get();
  m.machine = std::move(machine);
  Trace("d{} g{} joins d{}, machine {}", d, g, GroupOf(g).home, m.nonce);
  InDaemon(d, NetDelay(), [this, d, g, nonce = m.nonce] { Join(d, g, nonce); });
}

void World::Join(int d, int g, uint64_t f_nonce) {
  const int c = GroupOf(g).home;
  const uint64_t f_life = DaemonAt(d).life;
  const auto fail = [this, d, g, f_nonce](std::string why) {
    InDaemon(d, random_.Millis(10, 300), [this, d, g, f_nonce, why = std::move(why)] {
      FeedTo(d, g, f_nonce, LinkLost{absl::UnavailableError(why)});
    });
  };
  // Joining has a deadline of its own.
  InDaemon(d, seconds(2), [this, d, g, f_nonce] {
    Machine* m = Find(d, g, f_nonce);
    if (m == nullptr || m->linked) return;
    if (m->link >= 0 && links_[static_cast<size_t>(m->link)].f_open)
      CloseSide(m->link, false, true);
    Feed(d, g, LinkLost{absl::DeadlineExceededError("the coordinator does not answer")});
  });
  if (!DaemonAt(c).up || DaemonAt(c).frozen || BlockedUntil(c, d) > now_) {
    return fail("the coordinator does not answer");
  }
  Machine* coordinator = Find(c, g);
  if (coordinator == nullptr) return fail("the coordinator does not know the group");
  const std::string boot_id = fmt::format("life {}", f_life);
  if (const absl::Status status =
          coordinator->coordinator->CanJoin(DaemonAt(d).id, boot_id, fmt::format("d{}", d));
      !status.ok()) {
    return fail(Message(status));
  }
  Link link;
  link.g = g;
  link.c = c;
  link.f = d;
  link.c_life = DaemonAt(c).life;
  link.f_life = f_life;
  link.c_nonce = coordinator->nonce;
  link.f_nonce = f_nonce;
  link.node = NodeId(++coordinator->next_node);
  links_.push_back(std::move(link));
  const int index = static_cast<int>(links_.size()) - 1;
  const NodeId node = links_.back().node;
  Machine* m = Find(d, g, f_nonce);
  if (m == nullptr) return;
  m->link = index;
  m->coordinator_nonce = coordinator->nonce;
  Letter letter;
  letter.up = LinkUp{coordinator->machine->incarnation(), GroupOf(g).spec,
                     coordinator->machine->version(), DaemonAt(c).id};
  Post(index, true, std::move(letter));
  Feed(c, g, NodeJoined{node, DaemonAt(d).id, fmt::format("d{}", d), kProtocol, boot_id});
}

// Drops a follower, after checking that nothing of it moves any more.
void World::DropFollower(int d, int g) {
  Daemon& daemon = DaemonAt(d);
  Machine* m = Find(d, g);
  for (const auto& [id, work] : works_) {
    if (work->d == d && work->nonce == m->nonce) {
      Violate("P6", fmt::format("d{} g{}: finished, but {} runs", d, g, work->what));
    }
  }
  for (const auto& [key, end] : ends_) {
    if (end.d == d && end.nonce == m->nonce && !end.closed) {
      Violate("P8", fmt::format("d{} g{}: finished, but communicator {} is open", d, g,
                                end.communicator));
    }
  }
  if (daemon.lock.holder() == GroupOf(g).name) {
    Violate("P7", fmt::format("d{} g{}: finished, but it holds the wire", d, g));
  }
  for (const auto& [call, record] : daemon.calls) {
    if (record.g == g && record.pid != 0) {
      Violate("P4", fmt::format("d{} g{}: finished, but call {} is not answered", d, g, call));
    }
  }
  for (const auto& [member, record] : daemon.members) {
    if (record.g == g) {
      Violate("P8", fmt::format("d{} g{}: finished, but member {} is not released", d, g, member));
    }
  }
  Trace("d{} g{} machine {} is dropped", d, g, m->nonce);
  daemon.machines.erase(g);
}

void World::Feed(int d, int g, MachineEvent event) {
  Daemon& daemon = DaemonAt(d);
  daemon.inbox.emplace_back(g, std::move(event));
  if (!daemon.busy) Drain(d);
}

void World::FeedTo(int d, int g, uint64_t nonce, MachineEvent event) {
  if (Find(d, g, nonce) != nullptr) Feed(d, g, std::move(event));
}

void World::FeedLock(int d, const WireLock::Events& events) {
  for (const auto& [name, event] : events) {
    for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
      if (GroupOf(g).name == name) {
        DaemonAt(d).inbox.emplace_back(
            g, std::visit([](auto e) { return MachineEvent(PeerEvent(e)); }, event));
      }
    }
  }
}

void World::Drain(int d) {
  Daemon& daemon = DaemonAt(d);
  daemon.busy = true;
  std::set<int> fed;
  while (!daemon.inbox.empty() && !over_) {
    auto [g, event] = std::move(daemon.inbox.front());
    daemon.inbox.pop_front();
    Machine* m = Find(d, g);
    if (m == nullptr) continue;
    fed.insert(g);
    if (++result_.events > kMaxEvents) return Violate("P4", "no end: too many events");
    Note("<-", d, g, event);
    MachineActions actions;
    m->machine->Handle(event, now_, &actions);
    m->machine->CheckInvariants();
    for (const MachineAction& action : actions) {
      if (over_) break;
      Perform(d, g, action);
    }
    if (!over_ && m->coordinator != nullptr) AfterCoordinator(d, g);
    if (!over_ && m->follower != nullptr && m->follower->finished()) DropFollower(d, g);
  }
  daemon.busy = false;
  for (const int g : fed) {
    if (!over_) ScheduleTick(d, g);
  }
}

void World::ScheduleTick(int d, int g) {
  Machine* m = Find(d, g);
  if (m == nullptr) return;
  const std::optional<TimePoint> due = m->machine->NextDeadline();
  if (!due.has_value() || (m->tick.has_value() && *m->tick <= *due && *m->tick > now_)) return;
  m->tick = std::max(*due, now_);
  InDaemon(d, *m->tick - now_ + random_.Micros(0, 300),
           [this, d, g, nonce = m->nonce] { Tick(d, g, nonce); });
}

void World::Tick(int d, int g, uint64_t nonce) {
  Machine* m = Find(d, g, nonce);
  if (m == nullptr) return;
  std::optional<TimePoint> due = m->machine->NextDeadline();
  m->tick.reset();
  if (!due.has_value() || *due > now_) return ScheduleTick(d, g);
  Feed(d, g, GroupEvent(refitd::Tick{}));
  m = Find(d, g);
  if (m == nullptr || over_) return;
  due = m->machine->NextDeadline();
  if (due.has_value() && *due <= now_) {
    Violate("P4", fmt::format("d{} g{}: what was due is not done by Tick", d, g));
  }
}

// P2: no instance is shown as good while it holds something else.
void World::AfterCoordinator(int d, int g) {
  Machine* m = Find(d, g);
  if (m == nullptr || !m->check_view) return;
  m->check_view = false;
  const MachineView view = m->machine->View(now_);
  for (const InstanceView& instance : view.group.instances) {
    if (!instance.version.has_value()) continue;
    for (const MemberView& member : view.group.members) {
      if (!member.engine || member.instance != instance.name) continue;
      const Process& p = ProcessOf(member.pid);
      // Nobody can tell the group of a source instance that hides what it lost.
      if (!p.alive || p.torn || Holds(p, *instance.version)) continue;
      Violate("P2", fmt::format("g{}: instance {} is shown at version {}, but rank {} (pid {}) "
                                "does not hold it",
                                g, instance.name, *instance.version, member.rank, member.pid));
    }
  }
  CheckUndone(g, view);
}

std::optional<Version> World::Serves(const MachineView& view, const std::string& instance) const {
  for (const MemberView& member : view.group.members) {
    if (!member.engine || member.instance != instance) continue;
    const Process& p = ProcessOf(member.pid);
    if (!p.alive || p.torn || p.flipped || p.undecided || p.weights_unknown) return std::nullopt;
    return TrueVersion(p, nullptr);
  }
  return std::nullopt;
}

// P11: no instance is ready with what was rolled back, where another one is known to serve the
// rollback.
void World::CheckUndone(int g, const MachineView& view) {
  for (const InstanceView& rollback : view.group.instances) {
    const std::optional<Version> content = Serves(view, rollback.name);
    if (!content.has_value() || !rollback.version.has_value() || rollback.origin == 0 ||
        *content >= *rollback.version) {
      continue;
    }
    for (const InstanceView& other : view.group.instances) {
      if (!other.readiness.ready || !other.version.has_value()) continue;
      if (other.origin != rollback.origin || *other.version <= *content) continue;
      const std::optional<Version> serves = Serves(view, other.name);
      if (*other.version >= *rollback.version || !serves.has_value() || *serves <= *content) {
        continue;
      }
      Violate("P11", fmt::format("g{}: instance {} is ready with version {}, which was rolled back "
                                 "to the content of version {}, as version {}",
                                 g, other.name, *other.version, *content, *rollback.version));
    }
  }
}

// ---- actions ----

void World::Perform(int d, int g, const MachineAction& action) {
  Note("->", d, g, action);
  if (const auto* of_group = std::get_if<GroupAction>(&action); of_group != nullptr) {
    if (Find(d, g)->coordinator != nullptr) {
      if (const auto* flip = std::get_if<SendFlip>(of_group)) CheckWaited(d, g, d, *flip);
      if (const auto* staged = std::get_if<SendStaged>(of_group)) NoteStaged(d, g, *staged);
    }
  }
  std::visit(
      [this, d, g](const auto& outer) {
        std::visit([this, d, g](const auto& a) { this->On(d, g, a); }, outer);
      },
      action);
}

void World::On(int d, int g, const Reply& answer) {
  Daemon& daemon = DaemonAt(d);
  Reply a = answer;
  if (const auto wrong = daemon.wrong_answers.find(a.call); wrong != daemon.wrong_answers.end()) {
    a.payload = wrong->second;
  }
  const auto it = daemon.calls.find(a.call);
  if (it == daemon.calls.end()) {
    return Violate("P4", fmt::format("d{} g{}: call {} is answered, but nobody waits for it: "
                                     "answered before, or never asked",
                                     d, g, a.call));
  }
  for (const auto& [id, work] : works_) {
    if (work->d == d && work->source != nullptr && work->call() == a.call) {
      return Violate("P6", fmt::format("d{} g{}: bucket call {} is answered while {} reads it", d,
                                       g, a.call, work->what));
    }
  }
  if (const auto source = daemon.sources.find(a.call); source != daemon.sources.end()) {
    // The trainer overwrites the memory, as it may now.
    for (auto& range : source->second->data) std::fill(range.begin(), range.end(), kDamaged);
    daemon.sources.erase(source);
  }
  const Call call = std::move(it->second);
  daemon.calls.erase(it);
  if (a.status.ok() && call.answer.has_value() && a.payload.index() != *call.answer) {
    return Violate("P10", fmt::format("d{} g{}: call {} is answered with another kind ({}, not {})",
                                      d, g, a.call, a.payload.index(), *call.answer));
  }
  if (const auto member = daemon.members.find(call.member);
      call.layout != nullptr && a.status.ok() && member != daemon.members.end()) {
    member->second.layout = call.layout;
    member->second.flips_of_layout = member->second.flips;
    member->second.second_side = call.second_side;
  }
  // The trainer overwrites its shards, as it may now.
  const bool over = a.status.ok() || a.status.code() == absl::StatusCode::kAborted;
  if (call.refit && over && Touches(d, call.member)) {
    return Violate("P6", fmt::format("d{} g{}: refit call {} is answered while its shards are read",
                                     d, g, a.call));
  }
  const auto reply = [reply = call.reply, status = a.status, payload = a.payload] {
    reply(status, payload);
  };
  if (call.pid == 0) {
    In(NetDelay(), reply);
  } else {
    InProcess(call.pid, NetDelay(), reply);
  }
}

void World::On(int d, int, const SendPrepare& a) {
  Hear(d, a.member, [this, a](Process* p) { HearPrepare(p->pid, a.version, a.update); });
}

void World::On(int d, int g, const SendFlip& a) {
  if (Touches(d, a.member)) {
    return Violate("P1", fmt::format("d{} g{}: member {} is to flip while its memory is written or "
                                     "read back",
                                     d, g, a.member));
  }
  Hear(d, a.member, [this, a](Process* p) {
    if (options_.bug == Bug::kWrittenSide && a.content.has_value()) {
      for (auto& cells : p->back) {
        if (!cells.empty()) cells[0] |= kDamageBit;
      }
    }
    HearPrepare(p->pid, a.version, a.update);
  });
}

void World::On(int d, int g, const SendPart& a) {
  const std::shared_ptr<Pool> pool = OwnPool(Find(d, g), a.member);
  Hear(d, a.member, [this, a, pool](Process* p) { HearPart(p->pid, a, pool); });
}

void World::On(int d, int g, const SendCommitted& a) {
  if (Touches(d, a.member)) {
    return Violate("P1", fmt::format("d{} g{}: member {} gets Committed while its memory is "
                                     "written or read back",
                                     d, g, a.member));
  }
  if (const auto it = DaemonAt(d).members.find(a.member); it != DaemonAt(d).members.end()) {
    if (SeatOf(ProcessOf(it->second.pid)).shadowed) ++it->second.flips;
  }
  const uint64_t origin = Find(d, g)->machine->incarnation();
  const std::string owner = Find(d, g)->machine->owner();
  Hear(d, a.member, [this, a, origin, owner](Process* p) {
    const bool known = options_.bug != Bug::kWrongContent;
    HearOutcome(p->pid, true, a.version, false, known ? a.content.value_or(a.version) : a.version);
    p->origin = origin;
    p->owner = owner;
  });
}

void World::On(int d, int g, const SendAborted& a) {
  if (Touches(d, a.member)) {
    return Violate("P2", fmt::format("d{} g{}: member {} is told aborted while its memory is "
                                     "written",
                                     d, g, a.member));
  }
  Hear(d, a.member,
       [this, a](Process* p) { HearOutcome(p->pid, false, a.version, a.dirty, std::nullopt); });
}

void World::On(int, int, const SendDraining&) {}

void World::On(int d, int g, const ReleaseMember& a) {
  Daemon& daemon = DaemonAt(d);
  if (daemon.thieves.erase(a.member) > 0) return;
  const auto it = daemon.members.find(a.member);
  if (it == daemon.members.end()) {
    return Violate("P8",
                   fmt::format("d{} g{}: member {} is released, but is not here", d, g, a.member));
  }
  // A follower releases a member at once, since its running copies hold the mappings themselves.
  if (Find(d, g)->coordinator != nullptr && Touches(d, a.member)) {
    return Violate("P6", fmt::format("d{} g{}: member {} is released while a copy touches its "
                                     "memory",
                                     d, g, a.member));
  }
  if (!it->second.lost) {
    return Violate("P8",
                   fmt::format("d{} g{}: member {} is released, but is attached", d, g, a.member));
  }
  Find(d, g)->executor->Release(a.member);
  daemon.members.erase(it);
}

void World::On(int d, int g, const UpdateAssembled& a) {
  const UpdateRecord& update = *a.update;
  Machine* m = Find(d, g);
  for (const Round& other : rounds_) {
    if (other.g != g || other.coordinator != m->nonce) continue;
    if (other.outcome == Outcome::kRunning) {
      return Violate(
          "P3", fmt::format("g{}: update {} starts while {} runs", g, update.id, other.update));
    }
  }
  Round round;
  round.g = g;
  round.coordinator = m->nonce;
  round.update = update.id;
  round.version = update.version;
  round.assembled = now_;
  round.due = update.deadline;
  const MachineView view = m->machine->View(now_);
  // An instance that is left out already has a reason.
  const std::optional<UpdateView> running = m->machine->ViewLatest(now_);
  REFITD_CHECK(running.has_value());
  for (const InstanceOutcome& in : running->instances) {
    for (const MemberView& member : view.group.members) {
      if (!member.engine || member.instance != in.instance || !in.reason.empty()) continue;
      round.instances[member.instance].push_back(member.pid);
    }
  }
  if (update.use.has_value()) {
    round.plan = update.use->plan;
    for (const MemberId source : update.use->sources) {
      const auto at = std::find_if(view.group.members.begin(), view.group.members.end(),
                                   [source](const MemberView& v) { return v.id == source; });
      REFITD_CHECK(at != view.group.members.end());
      round.sources.push_back(at->pid);
    }
  }
  round.bytes_of = static_cast<uint32_t>(rounds_.size());
  round.rollback = update.content.has_value();
  CheckHold(g, update, view);
  if (over_) return;
  if (!update.from_trainers()) {
    const Version bytes = update.content.value_or(update.version);
    for (uint32_t i = 0; i < rounds_.size(); ++i) {
      const Round& other = rounds_[i];
      if (other.g != g || other.coordinator != m->nonce || other.version != bytes) continue;
      if (!other.catch_up && other.outcome == Outcome::kCommitted) round.bytes_of = other.bytes_of;
    }
  }
  if (update.from_engines()) {
    round.catch_up = true;
    if (options_.bug == Bug::kTornSource) TearSource(round);
    HitCatchUp(g, round);
  } else if (!round.rollback) {
    CheckRegistered(g, round);
  }
  rounds_.push_back(std::move(round));
  FillShards(static_cast<uint32_t>(rounds_.size() - 1));
  // The fault comes in the middle of the update.
  if (one_daemon_ == OneDaemon::kOnlyEngines && random_.Percent(40)) {
    In(random_.Millis(0, 60), [this] { KillOnlyEngines(); });
  } else if (one_daemon_ == OneDaemon::kMute && random_.Percent(40)) {
    In(random_.Millis(0, 60), [this] { Mute(); });
  } else if (one_daemon_ == OneDaemon::kLost && random_.Percent(60)) {
    In(random_.Millis(0, 300), [this] { LoseDaemon(); });
  }
}

void World::On(int, int, const UpdateAbandoned&) {}

void World::On(int d, int g, const UpdateEnded& a) {
  Machine* m = Find(d, g);
  m->executor->Forget(a.update);
  if (m->coordinator == nullptr || a.outcome == Outcome::kUnknown) return;
  if (a.catch_up) {
    ++(a.outcome == Outcome::kCommitted ? result_.catch_ups
       : a.gave_way                     ? result_.gave_way
                                        : result_.catch_ups_failed);
    if (a.outcome == Outcome::kCommitted) CheckCaughtUp(d, g);
    if (over_) return;
  } else if (a.outcome == Outcome::kCommitted) {
    ++(a.rollback ? result_.rollbacks : result_.committed);
    const uint64_t incarnation = m->machine->incarnation();
    auto& last = GroupOf(g).last_committed;
    const auto before = last.find(incarnation);
    if (before != last.end() && a.version <= before->second) {
      return Violate(
          "P3", fmt::format("g{}: version {} is committed after {}", g, a.version, before->second));
    }
    last[incarnation] = a.version;
  } else {
    ++result_.aborted;
  }
  const auto round = std::find_if(rounds_.begin(), rounds_.end(), [&](const Round& r) {
    return r.g == g && r.coordinator == m->nonce && r.update == a.update;
  });
  if (round == rounds_.end()) return;  // given up before it was assembled
  round->outcome = a.outcome;
  if (!a.catch_up && !a.rollback) CheckRest(g, *round, a);
  if (!over_) CheckKeptOut(g);
  if (over_) return;
  for (const auto& [id, work] : works_) {
    if (work->g != g || work->d != d || work->update() != a.update) continue;
    return Violate("P6",
                   fmt::format("g{}: update {} ended while {} runs", g, a.update, work->what));
  }
  if (a.outcome != Outcome::kCommitted) return;
  if (round->plan != nullptr && !a.catch_up) {
    const bool mixed = GroupOf(g).way == GroupWorld::Way::kMixed;
    ++result_.refits[mixed ? 1 : 0][round->plan->routes.wire_bytes > 0 ? 1 : 0];
  }
  const uint32_t index = round->bytes_of;
  const MachineView view = m->machine->View(now_);
  const std::optional<UpdateView>& shown = a.catch_up ? view.group.catch_up : view.group.update;
  REFITD_CHECK(shown.has_value() && shown->id == a.update);
  for (const InstanceOutcome& outcome : shown->instances) {
    if (!outcome.committed) continue;
    round->committed_instances.insert(outcome.instance);
    for (const int pid : round->instances[outcome.instance]) {
      const Process& p = ProcessOf(pid);
      uint32_t holds = 0;
      if (!p.alive) continue;
      if (TrueVersion(p, &holds).has_value() && holds == index) continue;
      return Violate("P1", fmt::format("g{}: version {} (round {}) is committed, but instance {} "
                                       "rank {} (pid {}) holds{}",
                                       g, a.version, index, outcome.instance, SeatOf(p).rank, pid,
                                       WhatItHolds(p)));
    }
  }
  FollowCommit(d, g, Round(*round));
}

void World::On(int d, int g, const RefuseMember& a) {
  Daemon& daemon = DaemonAt(d);
  daemon.thieves.erase(a.member);
  const auto it = daemon.members.find(a.member);
  if (it == daemon.members.end()) return;
  if (Find(d, g)->coordinator != nullptr && Touches(d, a.member)) {
    return Violate("P6", fmt::format("d{} g{}: member {} is refused while a copy touches its "
                                     "memory",
                                     d, g, a.member));
  }
  const std::string why = a.status.ToString();
  Hear(d, a.member, [this, why](Process* p) { LoseLease(p->pid, why, random_.Millis(100, 2000)); });
  Find(d, g)->executor->Release(a.member);
  daemon.members.erase(it);
}

void World::On(int d, int, const WelcomeMember& a) {
  if (DaemonAt(d).thieves.contains(a.member)) {
    return InDaemon(d, NetDelay(), [this, d, member = a.member] {
      if (DaemonAt(d).thieves.contains(member)) ThiefBegins(d, member);
    });
  }
  Hear(d, a.member, [this](Process* p) { HearWelcome(p->pid); });
}

void World::On(int d, int g, const StateChanged&) { Find(d, g)->check_view = true; }
void World::On(int, int, const LogLine&) {}

// ---- links ----

namespace {

constexpr int64_t kMessageBytes = 8 << 20;

// Whether the other daemon would read the message. A message that it refuses ends the link, and
// with it the leases of all members.
absl::Status Read(const PeerCommand& command, const PeerBounds& bounds) {
  REFITD_ASSIGN_OR_RETURN(const auto answers, ToProto(command, kMessageBytes));
  CommandDecoder decoder(bounds);
  for (const auto& answer : answers) REFITD_RETURN_IF_ERROR(decoder.Decode(answer).status());
  return absl::OkStatus();
}

absl::Status Read(const PeerReport& report, const PeerBounds& bounds) {
  REFITD_ASSIGN_OR_RETURN(const auto messages, ToProto(report, bounds, kMessageBytes));
  ReportDecoder decoder(bounds);
  for (const auto& message : messages) REFITD_RETURN_IF_ERROR(decoder.Decode(message).status());
  return absl::OkStatus();
}

}  // namespace

TimePoint World::BlockedUntil(int a, int b) const {
  return blocked_[static_cast<size_t>(a)][static_cast<size_t>(b)];
}

Link* World::FindLink(int c, int g, NodeId node) {
  const Machine* m = Find(c, g);
  for (auto it = links_.rbegin(); it != links_.rend(); ++it) {
    if (it->c == c && it->g == g && it->c_nonce == m->nonce && it->node == node) return &*it;
  }
  return nullptr;
}

void World::On(int d, int g, const SendCommand& a) {
  Link* link = FindLink(d, g, a.node);
  if (link == nullptr) {
    return Violate("P8",
                   fmt::format("d{} g{}: a command for node {}, which is unknown", d, g, a.node));
  }
  const Machine* m = Find(d, g);
  const int index = static_cast<int>(link - links_.data());
  if (options_.bug == Bug::kSwallowedDeath && !DaemonAt(link->f).up) {
    if (const auto* ping = std::get_if<PeerPing>(&a.command)) {
      Feed(d, g, ReportReceived{a.node, PeerPong{ping->number}});
    }
    return;
  }
  if (const auto* news = std::get_if<MemberAction>(&a.command)) {
    if (const auto* flip = std::get_if<SendFlip>(news)) CheckWaited(d, g, link->f, *flip);
    if (const auto* staged = std::get_if<SendStaged>(news)) NoteStaged(d, g, *staged);
  }
  if (!link->c_open) return;
  if (const absl::Status read = Read(a.command, BoundsOf(GroupOf(g).spec)); !read.ok()) {
    return Violate("P8",
                   fmt::format("d{} g{}: a command would end the link: {}", d, g, Message(read)));
  }
  if (const auto* open = std::get_if<OpenCommunicator>(&a.command)) {
    GroupWorld& group = GroupOf(g);
    if (group.last_communicator != open->communicator) group.communicator_nodes.clear();
    group.last_communicator = open->communicator;
    group.communicator_nodes.insert(a.node);
  }
  if (const auto* header = std::get_if<PeerHeader>(&a.command);
      header != nullptr && header->wired) {
    const auto key = std::make_tuple(g, m->nonce, header->communicator, header->wire_seq);
    HeaderRecord& record = headers_[key];
    record.digest = header->digest;
    record.ranks = header->ranks.size();
    record.sent.insert(a.node);
    wired_parts_[{g, m->nonce, header->update, header->part}] = key;
    result_.parts_again += header->again ? 1 : 0;
    if (one_daemon_ == OneDaemon::kLost && random_.Percent(25)) {
      In(random_.Millis(0, 12), [this] { LoseDaemon(); });
    }
    if (options_.bug == Bug::kEarlyIssue) {
      Letter first;
      first.command = a.command;
      Post(index, true, std::move(first));
      Letter letter;
      letter.command = PeerIssue{header->update, header->part};
      Post(index, true, std::move(letter));
      return;
    }
  }
  ProgramRecord* record = nullptr;
  const auto known = [&](UpdateId update) { return &programs_[{g, m->nonce, update}]; };
  if (const auto* program = std::get_if<PeerProgram>(&a.command)) {
    known(program->update)->sent.insert(a.node);
  } else if (const auto* abandon = std::get_if<PeerAbandon>(&a.command)) {
    known(abandon->update)->sent.erase(a.node);  // it has no part in the program any more
  } else if (const auto* run = std::get_if<StartRefit>(&a.command)) {
    record = known(run->update);
    record->run = *run;
    record->first_seqs[run->communicator] = run->wire_seq;
    result_.reruns += run->attempt > 0 ? 1 : 0;
    result_.resumes += run->resume.value_or(0) > 0 ? 1 : 0;
    if (one_daemon_ == OneDaemon::kLost && random_.Percent(30)) {
      In(random_.Millis(0, 25), [this] { LoseDaemon(); });
    }
  } else if (const auto* issue = std::get_if<PeerIssue>(&a.command)) {
    ProgramRecord* issued = known(issue->update);
    if (issued->run.has_value() && issued->run->part == issue->part) issued->issued.insert(a.node);
  }
  Letter letter;
  letter.command = a.command;
  if (auto* run = std::get_if<StartRefit>(&*letter.command);
      options_.bug == Bug::kWrongResume && run != nullptr && run->resume.has_value()) {
    ++*run->resume;
  }
  Post(index, true, std::move(letter));
  if (record != nullptr && options_.bug == Bug::kEarlyRounds) {
    Letter early;
    early.command = PeerIssue{record->run->update, record->run->part};
    Post(index, true, std::move(early));
  }
}

void World::On(int d, int g, const SendReport& a) {
  const Machine* m = Find(d, g);
  if (m->link < 0) {
    return Violate("P8", fmt::format("d{} g{}: a report without a link", d, g));
  }
  if (!links_[static_cast<size_t>(m->link)].f_open) return;
  if (DaemonAt(d).mute && !std::holds_alternative<PeerPong>(a.report)) return;
  Letter letter;
  letter.report = a.report;
  if (auto* layout = std::get_if<PeerLayout>(&*letter.report)) {
    // Only the layout's structure is sent.
    auto structure = std::make_shared<Layout>(*layout->layout);
    structure->binding_generation = 0;
    for (Piece& piece : structure->pieces) {
      piece.region = RegionId();
      piece.byte_offset = 0;
    }
    layout->layout = std::move(structure);
  }
  if (const absl::Status read = Read(*letter.report, BoundsOf(GroupOf(g).spec)); !read.ok()) {
    return Violate("P8",
                   fmt::format("d{} g{}: a report would end the link: {}", d, g, Message(read)));
  }
  Post(m->link, false, std::move(letter));
  if (options_.bug == Bug::kHastyLeave && std::holds_alternative<MemberLost>(a.report) &&
      !m->machine->has_members()) {
    CloseSide(m->link, false, true);
    Feed(d, g, LinkLost{absl::UnavailableError("no member is left")});
  }
}

void World::On(int d, int g, const DropNode& a) {
  Link* link = FindLink(d, g, a.node);
  if (link == nullptr || !link->c_open) return;
  CloseSide(static_cast<int>(link - links_.data()), true, true);
  if (random_.Percent(50)) Feed(d, g, NodeLost{a.node, "it was dropped"});
}

void World::On(int d, int g, const CloseLink&) {
  const Machine* m = Find(d, g);
  if (m->link >= 0 && links_[static_cast<size_t>(m->link)].f_open) CloseSide(m->link, false, true);
}

void World::On(int d, int g, const MakeSlots& a) {
  const Machine* m = Find(d, g);
  if (m->pool->slots.empty()) {
    return Violate("P8", fmt::format("d{} g{}: slots of no size", d, g));
  }
  InDaemon(d, milliseconds(1), [this, d, g, nonce = m->nonce, a] {
    FeedTo(d, g, nonce, SlotsMade{a.member, absl::OkStatus()});
  });
}

void World::Post(int index, bool down, Letter letter) {
  Link& link = links_[static_cast<size_t>(index)];
  Lane& lane = down ? link.down : link.up;
  letter.number = lane.sent++;
  const bool faulty = !letter.up.has_value() && !letter.end;
  if (faulty && std::exchange(lane.lose, false)) return;
  if (auto* reply = letter.command.has_value() ? std::get_if<Reply>(&*letter.command) : nullptr;
      lane.wrong && reply != nullptr && reply->status.ok()) {
    lane.wrong = false;
    Count(Fault::kWrongPayload);
    Trace("the answer to call {} is of another kind", reply->call);
    const size_t is = reply->payload.index();
    const ReplyPayload kinds[] = {EmptyReply{}, BeginReply{}, BucketReply{}, CommitReply{}};
    ReplyPayload wrong = kinds[random_.Index(4)];
    if (wrong.index() == is) wrong = kinds[is == 0 ? 1 : 0];
    if (options_.bug == Bug::kTrustedReply) {
      DaemonAt(link.f).wrong_answers[reply->call] = std::move(wrong);
    } else {
      reply->payload = std::move(wrong);
    }
  }
  Duration delay = NetDelay();
  // A layout is by far the longest message.
  const bool layout =
      letter.report.has_value() && std::holds_alternative<PeerLayout>(*letter.report);
  if (layout) delay += random_.Millis(0, 100);
  lane.last = letter.due = std::max(lane.last, now_ + delay);
  const Duration wait = letter.due - now_;
  if (faulty && std::exchange(lane.duplicate, false)) lane.letters.push_back(letter);
  lane.letters.push_back(std::move(letter));
  const size_t size = lane.letters.size();
  if (faulty && lane.reorder && size >= 2 && !lane.letters[size - 2].up.has_value()) {
    lane.reorder = false;
    std::swap(lane.letters[size - 1], lane.letters[size - 2]);
    std::swap(lane.letters[size - 1].due, lane.letters[size - 2].due);
  }
  In(wait, [this, index, down] { Pump(index, down); });
}

void World::Pump(int index, bool down) {
  while (true) {
    Link& link = links_[static_cast<size_t>(index)];
    Lane& lane = down ? link.down : link.up;
    if (lane.letters.empty() || lane.letters.front().due > now_) return;
    if (const TimePoint until = BlockedUntil(link.c, link.f); until > now_) {
      In(until - now_, [this, index, down] { Pump(index, down); });
      return;
    }
    auto letter = std::make_shared<Letter>(std::move(lane.letters.front()));
    lane.letters.pop_front();
    const int d = down ? link.f : link.c;
    const uint64_t life = down ? link.f_life : link.c_life;
    OnDaemon(d, life, [this, index, down, letter] { Receive(index, down, *letter); });
    if (over_) return;
  }
}

void World::Receive(int index, bool down, const Letter& letter) {
  Link& link = links_[static_cast<size_t>(index)];
  Lane& lane = down ? link.down : link.up;
  bool& open = down ? link.f_open : link.c_open;
  if (!open) return;
  const int d = down ? link.f : link.c;
  Machine* m = Find(d, link.g, down ? link.f_nonce : link.c_nonce);
  if (m == nullptr) return;
  const bool gap = !letter.end && letter.number > lane.expected;
  if (!letter.end && !gap && letter.number < lane.expected) return;  // a duplicate
  if (letter.end || gap) {
    CloseSide(index, !down, !letter.end);
    const std::string why = gap ? "a message is missing" : "the connection broke";
    const int g = link.g;
    const NodeId node = link.node;
    if (down) {
      Feed(d, g, LinkLost{absl::UnavailableError(why)});
    } else {
      Feed(d, g, NodeLost{node, why});
    }
    return;
  }
  ++lane.expected;
  if (letter.up.has_value()) {
    m->linked = true;
    m->pool->slots.assign(
        static_cast<size_t>(letter.up->spec.slots),
        std::vector<Tag>(static_cast<size_t>(letter.up->spec.slot_bytes / kElementBytes)));
    m->pool->uses.resize(m->pool->slots.size());
    Feed(d, link.g, *letter.up);
  } else if (down) {
    PeerCommand command = *letter.command;
    if (auto* prepare = std::get_if<PeerPrepare>(&command);
        prepare != nullptr && options_.bug == Bug::kPatientCleanUp) {
      prepare->remaining = std::chrono::hours(1);
    }
    if (std::holds_alternative<PeerPrepare>(command)) m->again.clear();
    if (const auto* header = std::get_if<PeerHeader>(&command);
        header != nullptr && header->again) {
      m->again.insert(header->part);
    }
    Feed(d, link.g, CommandReceived{std::move(command)});
  } else {
    if (const auto* ack = std::get_if<PeerHeaderAck>(&*letter.report)) {
      const auto part = wired_parts_.find({link.g, link.c_nonce, ack->update, ack->part});
      if (part != wired_parts_.end()) {
        HeaderRecord& record = headers_.at(part->second);
        if (ack->mismatch.empty() && ack->digest == record.digest) {
          record.acknowledged.insert(link.node);
        }
      }
    }
    if (const auto* built = std::get_if<PeerProgramBuilt>(&*letter.report);
        built != nullptr && built->status.ok()) {
      programs_[{link.g, link.c_nonce, built->update}].built.insert(link.node);
    }
    Feed(d, link.g, ReportReceived{link.node, *letter.report});
  }
}

// Closes one end of a link. The other end is told last of all, or never.
void World::CloseSide(int index, bool coordinator, bool tell) {
  Link& link = links_[static_cast<size_t>(index)];
  (coordinator ? link.c_open : link.f_open) = false;
  Lane& lane = coordinator ? link.down : link.up;
  if (!(coordinator ? link.f_open : link.c_open)) return;
  if (random_.Percent(50)) lane.letters.clear();
  if (!tell) return;
  Letter letter;
  letter.end = true;
  Post(index, !coordinator ? false : true, std::move(letter));
}

// Breaks a link: both ends are told, at different times; or one is told and the other must notice.
void World::BreakLink(int index) {
  Link& link = links_[static_cast<size_t>(index)];
  if (!link.c_open || !link.f_open) return;
  Count(Fault::kLinkBroken);
  const int who = random_.Int(0, 3);
  for (const bool down : {true, false}) {
    if (who == (down ? 2 : 3)) continue;
    Lane& lane = down ? link.down : link.up;
    lane.letters.clear();
    const int d = down ? link.f : link.c;
    const uint64_t life = down ? link.f_life : link.c_life;
    In(random_.Millis(0, 500), [this, index, down, d, life] {
      OnDaemon(d, life, [this, index, down] {
        Letter letter;
        letter.end = true;
        Receive(index, down, letter);
      });
    });
  }
  Trace("link {} of d{} and d{} breaks", index, link.c, link.f);
}

// ---- the wire lock ----

void World::On(int d, int g, const AcquireWire&) {
  WireLock::Events events;
  if (options_.bug == Bug::kSharedWire) {
    events.emplace_back(GroupOf(g).name, WireGranted{});
  } else {
    DaemonAt(d).lock.Acquire(GroupOf(g).name, &events);
  }
  FeedLock(d, events);
}

void World::On(int d, int g, const ReleaseWire&) {
  for (const auto& [key, end] : ends_) {
    if (end.d != d || end.g != g) continue;
    for (const auto& [seq, op] : comms_[CommOf(end)]) {
      if (op.running.contains(end.rank)) {
        return Violate("P7",
                       fmt::format("d{} g{}: the wire is given back while op {} of communicator {} "
                                   "runs",
                                   d, g, seq, end.communicator));
      }
    }
  }
  WireLock::Events events;
  DaemonAt(d).lock.Release(GroupOf(g).name, &events);
  FeedLock(d, events);
}

}  // namespace refitd::sim
