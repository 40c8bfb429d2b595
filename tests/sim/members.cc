// Trainer and engine processes, and the job that tells trainers which version to install next.
#include <algorithm>

#include "tests/sim/world.h"
#include "transport/base/status.h"

namespace refitd::sim {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// The payload that an OK answer to the call carries.
std::optional<size_t> AnswerTo(const GroupEvent& event) {
  const auto of = [](const ReplyPayload& payload) { return std::optional(payload.index()); };
  if (std::holds_alternative<BeginEvent>(event)) return of(BeginReply{});
  if (std::holds_alternative<LeaseSlotEvent>(event)) return of(LeaseSlotReply{});
  if (std::holds_alternative<BucketEvent>(event)) return of(BucketReply{});
  if (std::holds_alternative<CommitEvent>(event)) return of(CommitReply{});
  if (std::holds_alternative<RefitEvent>(event)) return of(CommitReply{});
  if (std::holds_alternative<RollbackEvent>(event)) return of(CommitReply{});
  return of(EmptyReply{});
}

}  // namespace

uint32_t World::TensorOf(int g, const std::string& name) const {
  const std::vector<TensorSpec>& model = groups_[static_cast<size_t>(g)].model;
  for (uint32_t t = 0; t < model.size(); ++t) {
    if (model[t].name == name) return t;
  }
  REFITD_CHECK(false);
  return 0;
}

bool World::Holds(const Process& p, Version version) const {
  if (HasContent(SeatOf(p).g, version, TrueVersion(p, nullptr))) return true;
  if (!p.flipped && !p.undecided) return false;
  Process back = p;
  Flip(&back);
  return HasContent(SeatOf(p).g, version, TrueVersion(back, nullptr));
}

bool World::HasContent(int g, Version version, std::optional<Version> content) const {
  if (content == version) return true;
  return std::any_of(rounds_.begin(), rounds_.end(), [&](const Round& round) {
    return round.g == g && round.rollback && round.version == version &&
           rounds_[round.bytes_of].version == content;
  });
}

std::optional<Version> World::TrueVersion(const Process& p, uint32_t* round) const {
  std::optional<Tag> first;
  for (uint32_t t = 0; t < p.cells.size(); ++t) {
    for (size_t i = 0; i < p.cells[t].size(); ++i) {
      const Tag tag = p.cells[t][i];
      if (tag == 0) return std::nullopt;
      if (!first.has_value()) first = tag >> 32;
      const auto element = p.first[t] + static_cast<int64_t>(i);
      if (tag != MakeTag(static_cast<uint32_t>(*first), t, element)) return std::nullopt;
    }
  }
  if (!first.has_value() || *first >= rounds_.size()) return std::nullopt;
  if (round != nullptr) *round = static_cast<uint32_t>(*first);
  return rounds_[*first].version;
}

std::string World::WhatItHolds(const Process& p) const {
  std::string text;
  for (uint32_t t = 0; t < p.cells.size(); ++t) {
    Tag last = 0;
    for (size_t i = 0; i < p.cells[t].size(); ++i) {
      const Tag tag = p.cells[t][i];
      const auto element = p.first[t] + static_cast<int64_t>(i);
      const bool own = (tag & 0xffffffff) == (MakeTag(0, t, element));
      const Tag kind = own ? tag >> 32 : kDamaged;
      if (i > 0 && kind == last) continue;
      last = kind;
      text += fmt::format(" t{}[{}]: {}", t, element,
                          own ? fmt::format("round {}", kind) : fmt::format("{:x}", tag));
    }
  }
  return text;
}

// ---- life ----

int World::NewProcess(int seat_index) {
  Seat& seat = seats_[static_cast<size_t>(seat_index)];
  const GroupWorld& group = GroupOf(seat.g);
  auto process = std::make_unique<Process>();
  Process& p = *process;
  p.pid = static_cast<int>(processes_.size()) + 1;
  p.seat = seat_index;
  processes_.push_back(std::move(process));
  seat.pid = p.pid;
  if (!seat.trainer) {
    auto layout = std::make_shared<Layout>();
    layout->tensors = group.model;
    const bool loaded = random_.Percent(now_ == TimePoint(std::chrono::hours(1)) ? 60 : 20);
    for (uint32_t t = 0; t < group.model.size(); ++t) {
      const int64_t elements = group.model[t].shape[0];
      const bool whole = seat.delivery == DeliveryMode::kLoader;
      const int64_t low = whole ? 0 : elements * seat.rank / seat.world_size;
      const int64_t high = whole ? elements : elements * (seat.rank + 1) / seat.world_size;
      Piece piece;
      piece.tensor = t;
      piece.box.offset = {low};
      piece.box.extent = {high - low};
      piece.region = RegionId(t + 1);
      piece.strides = RowMajorStrides(piece.box.extent);
      layout->pieces.push_back(std::move(piece));
      p.first.push_back(low);
      std::vector<Tag>& cells = p.cells.emplace_back();
      for (int64_t e = low; e < high; ++e) {
        // Bytes of a checkpoint carry the group's pseudo-round.
        cells.push_back(loaded ? MakeTag(static_cast<uint32_t>(seat.g) + 1, t, e) : 0);
      }
    }
    p.layout = std::move(layout);
    if (seat.shadowed) p.back = p.cells;
    if (loaded) p.holds = TrueVersion(p, nullptr);
  }
  Trace("pid {} is {} of g{} on d{}", p.pid,
        seat.trainer ? fmt::format("trainer rank {}", seat.rank)
                     : fmt::format("engine {} rank {}", seat.instance, seat.rank),
        seat.g, seat.d);
  InProcess(p.pid, random_.Millis(0, 30), [this, pid = p.pid] { TryAttach(pid); });
  return p.pid;
}

void World::KillProcess(int pid) {
  Process& p = ProcessOf(pid);
  if (!p.alive) return;
  Trace("pid {} is killed", pid);
  p.alive = false;
  p.held.clear();
  while (!p.packs.empty()) EndPack(pid, p.packs.back().grant);
  const int d = SeatOf(p).d;
  if (p.member != MemberId() && DaemonAt(d).up && DaemonAt(d).life == p.daemon_life) {
    InDaemon(d, random_.Micros(100, 20'000), [this, d, member = p.member] {
      const auto it = DaemonAt(d).members.find(member);
      if (it == DaemonAt(d).members.end() || it->second.lost) return;
      it->second.lost = true;
      Feed(d, it->second.g, GroupEvent(MemberLost{member, "its process died"}));
    });
  }
  if (SeatOf(p).trainer) Conclude(pid, false);
  const int seat = p.seat;
  In(random_.Millis(100, healed_ ? 500 : 4000), [this, seat] { NewProcess(seat); });
}

void World::FreezeProcess(int pid, Duration how_long) {
  Process& p = ProcessOf(pid);
  if (!p.alive || p.frozen) return;
  Count(Fault::kMemberFrozen);
  Trace("pid {} is frozen for {} ms", pid, ToMillis(how_long));
  p.frozen = true;
  In(how_long, [this, pid] { ThawProcess(pid); });
}

void World::ThawProcess(int pid) {
  Process& p = ProcessOf(pid);
  p.frozen = false;
  while (p.alive && !p.frozen && !p.held.empty() && !over_) {
    const Closure run = std::move(p.held.front());
    p.held.pop_front();
    run();
  }
}

// ---- the lease ----

void World::TryAttach(int pid) {
  Process& p = ProcessOf(pid);
  if (p.member != MemberId() || p.attaching || p.mute) return;
  p.attaching = true;
  const Seat& seat = SeatOf(p);
  const int d = seat.d;
  const uint64_t lease = p.lease;
  const auto retry = [this, pid, lease] {
    InProcess(pid, random_.Millis(50, 800), [this, pid, lease] {
      if (ProcessOf(pid).lease != lease || ProcessOf(pid).member != MemberId()) return;
      ProcessOf(pid).attaching = false;
      TryAttach(pid);
    });
  };
  if (!DaemonAt(d).up) return retry();
  const std::optional<Version> holds = p.holds;
  const uint64_t origin = p.origin;
  const std::string owner = p.owner;
  std::optional<Version> content = p.content;
  if (options_.bug == Bug::kForgottenContent) content.reset();
  InProcess(pid, seconds(3), [this, pid, lease, retry] {
    if (ProcessOf(pid).lease == lease && ProcessOf(pid).attaching) retry();
  });
  InDaemon(d, NetDelay(), [this, pid, d, g = seat.g, lease, holds, origin, owner, content, retry] {
    Process& q = ProcessOf(pid);
    if (!q.alive || q.lease != lease || q.member != MemberId()) return;
    EnsureFollower(d, g);
    Machine* m = Find(d, g);
    if (m == nullptr) return retry();
    Daemon& daemon = DaemonAt(d);
    const Seat& s = SeatOf(q);
    const MemberId member(daemon.next_member++);
    daemon.members[member] = {pid, g, false};
    q.member = member;
    q.daemon_life = daemon.life;
    q.attaching = false;
    q.pool = m->pool;
    q.heard_until = q.said_until = now_;
    if (s.trainer) {
      TrainerIdentity who;
      who.rank = s.rank;
      who.world_size = s.world_size;
      who.pid = pid;
      who.identity = kOwner;
      Feed(d, g, GroupEvent(TrainerAttached{member, std::move(who)}));
      return;
    }
    EngineIdentity who;
    who.instance = s.instance;
    who.rank = s.rank;
    who.world_size = s.world_size;
    who.delivery = s.delivery;
    who.pid = pid;
    who.held_version = holds;
    if (who.held_version.has_value()) {
      who.held_origin = origin;
      who.held_content = content;
    }
    if (options_.bug != Bug::kTakeover) who.held_owner = owner;
    who.catch_up = s.catch_up;
    who.wants_staged = s.wants_staged || (options_.bug == Bug::kEveryoneStaged && s.shadowed);
    if (s.manifest) who.manifest = GroupOf(g).model;
    EngineAttached attached{member, std::move(who)};
    attached.awaits_slots = m->follower != nullptr && s.delivery == DeliveryMode::kLoader;
    Feed(d, g, GroupEvent(std::move(attached)));
  });
}

void World::LoseLease(int pid, const std::string& why, Duration retry) {
  Process& p = ProcessOf(pid);
  Trace("pid {} lost its lease: {}", pid, why);
  p.member = MemberId();
  p.welcomed = false;
  p.registered = false;
  p.attaching = false;
  p.prepared.reset();
  ++p.lease;
  // Weights that are unknown count as dirty.
  if (p.weights_unknown && options_.bug != Bug::kForgottenUnknown) p.holds.reset();
  p.weights_unknown = false;
  p.undecided = p.undecided || p.flipped;
  p.flipped = false;
  p.flips = 0;
  p.staged.reset();
  if (options_.bug != Bug::kKeptProcessed) p.processed.reset();
  while (!p.packs.empty()) EndPack(pid, p.packs.back().grant);
  for (const auto& shard : p.shards) Clobber(shard.get());
  p.shard.reset();
  p.refit_version.reset();
  p.refits_out = 0;
  if (SeatOf(p).trainer) Conclude(pid, false);
  InProcess(pid, retry, [this, pid] { TryAttach(pid); });
}

void World::EndPack(int pid, SlotGrant grant) {
  Process& p = ProcessOf(pid);
  const auto it = std::find_if(p.packs.begin(), p.packs.end(),
                               [&](const Process::Pack& pack) { return pack.grant == grant; });
  if (it == p.packs.end()) return;
  EndUse(p.pool.get(), grant.slot, it->use);
  p.packs.erase(it);
}

void World::Hear(int d, MemberId member, std::function<void(Process*)> what) {
  const auto it = DaemonAt(d).members.find(member);
  if (it == DaemonAt(d).members.end() || it->second.lost) return;
  Process& p = ProcessOf(it->second.pid);
  p.heard_until = std::max(p.heard_until, now_ + NetDelay());
  const uint64_t life = DaemonAt(d).life;
  InProcess(p.pid, p.heard_until - now_, [this, pid = p.pid, member, life, what = std::move(what)] {
    Process& q = ProcessOf(pid);
    if (q.member == member && q.daemon_life == life) what(&q);
  });
}

void World::Say(int pid, std::function<void(int d, MemberId member)> what) {
  Process& p = ProcessOf(pid);
  if (p.mute || p.member == MemberId()) return;
  p.said_until = std::max(p.said_until, now_ + NetDelay());
  const int d = SeatOf(p).d;
  if (!DaemonAt(d).up || DaemonAt(d).life != p.daemon_life) return;
  InDaemon(d, p.said_until - now_, [this, d, member = p.member, what = std::move(what)] {
    const auto it = DaemonAt(d).members.find(member);
    if (it != DaemonAt(d).members.end() && !it->second.lost) what(d, member);
  });
}

void World::HearWelcome(int pid) {
  Process& p = ProcessOf(pid);
  p.welcomed = true;
  const Seat& seat = SeatOf(p);
  if (seat.trainer) {
    InProcess(pid, random_.Millis(0, 20), [this, pid] { BeginAttempt(pid); });
  } else if (seat.delivery == DeliveryMode::kInPlace) {
    RegisterLayout(pid);
  }
}

void World::RegisterLayout(int pid) {
  LayoutRegistered e;
  e.layout = ProcessOf(pid).layout;
  e.shadowed = SeatOf(ProcessOf(pid)).shadowed;
  // As in a real daemon, each registration is a layout of its own, whose regions may have changed
  // places.
  if (e.shadowed) e.layout = std::make_shared<const Layout>(*e.layout);
  const MemberId member = ProcessOf(pid).member;
  CallDaemon(pid, Duration(0), e, nullptr,
             [this, pid, member](const absl::Status& status, const ReplyPayload&) {
               if (status.ok()) {
                 ProcessOf(pid).registered = true;
                 return;
               }
               InProcess(pid, random_.Millis(50, 300), [this, pid, member] {
                 if (ProcessOf(pid).member == member) RegisterLayout(pid);
               });
             });
}

bool World::IsMember(int g, int pid) const {
  const Process& p = ProcessOf(pid);
  const Seat& seat = seats_[static_cast<size_t>(p.seat)];
  const Daemon& daemon = daemons_[static_cast<size_t>(seat.d)];
  if (!p.alive || p.member == MemberId() || !daemon.up || daemon.life != p.daemon_life) {
    return false;
  }
  const auto member = daemon.members.find(p.member);
  const auto m = daemon.machines.find(g);
  if (member == daemon.members.end() || member->second.lost || m == daemon.machines.end()) {
    return false;
  }
  if (m->second.coordinator != nullptr) return true;
  if (m->second.link < 0) return false;
  const Link& link = links_[static_cast<size_t>(m->second.link)];
  return link.c_open && link.f_open;
}

void World::CheckRegistered(int g, const Round& round) {
  for (const std::string& instance : GroupOf(g).instances) {
    bool all = true;
    for (const Seat& seat : seats_) {
      if (seat.g != g || seat.trainer || seat.instance != instance) continue;
      const Process& p = ProcessOf(seat.pid);
      all &= seat.delivery == DeliveryMode::kInPlace ? p.registered : p.welcomed;
      all &= IsMember(g, seat.pid);
    }
    const Machine* m = Find(GroupOf(g).home, g);
    for (const InstanceView& view : m->machine->View(now_).group.instances) {
      if (view.name != instance) continue;
      all &= view.reason.find("is kept out") == std::string::npos;
      all &= view.reason.find("is left out of this update to find") == std::string::npos;
    }
    if (!all || round.instances.contains(instance)) continue;
    Violate("REG", fmt::format("g{}: update {} begins without instance {}, whose every rank is "
                               "in_place",
                               g, round.update, instance));
  }
}

// ---- engines ----

void World::Flip(Process* p) {
  p->cells.swap(p->back);
  p->second_side = !p->second_side;
  p->flipped = !p->flipped;
}

void World::HearPrepare(int pid, Version version, UpdateId update) {
  Process& p = ProcessOf(pid);
  if (p.weights_unknown) {
    return Violate("P3", fmt::format("pid {} hears Prepare of update {} before the outcome of the "
                                     "one before",
                                     pid, update));
  }
  p.prepared = update;
  p.staged.reset();
  p.prepared_version = version;
  p.next_part = 0;
  Duration wait = random_.Micros(100, 15'000);
  if (random_.PerMille(chances_.late_member)) {
    if (random_.Percent(50)) return;
    wait = random_.Millis(500, 5000);
  }
  const bool fails = random_.PerMille(chances_.engine_fails);
  if (fails) Count(Fault::kEngineFailed);
  InProcess(pid, wait, [this, pid, lease = p.lease, update, fails] {
    Process& q = ProcessOf(pid);
    if (q.lease != lease || q.prepared != update) return;
    if (fails) {
      Say(pid, [this, pid, update](int d, MemberId member) {
        Feed(d, SeatOf(ProcessOf(pid)).g, GroupEvent(EngineFailed{member, update, "planted"}));
      });
      return;
    }
    if (q.mute) return;
    q.weights_unknown = true;
    if (SeatOf(q).shadowed && !(options_.bug == Bug::kHalfFlip && SeatOf(q).rank == 0)) Flip(&q);
    Say(pid, [this, pid, update](int d, MemberId member) {
      Feed(d, SeatOf(ProcessOf(pid)).g, GroupEvent(ReadyEvent{member, update}));
    });
  });
}

void World::HearPart(int pid, const SendPart& a, const std::shared_ptr<Pool>& pool) {
  Process& p = ProcessOf(pid);
  if (p.prepared != a.update || !p.weights_unknown) {
    return Violate("P2", fmt::format("pid {} gets part {} of update {}, for which it is not ready",
                                     pid, a.part, a.update));
  }
  if (a.part.value() != p.next_part) {
    return Violate(
        "P7", fmt::format("pid {} gets part {} where {} comes next", pid, a.part, p.next_part));
  }
  ++p.next_part;
  Duration wait = random_.Micros(100, 6000);
  if (random_.PerMille(chances_.late_member)) {
    if (random_.Percent(40)) return;
    wait = random_.Millis(300, 4000);
  }
  InProcess(pid, wait, [this, pid, lease = p.lease, a, pool] {
    Process& q = ProcessOf(pid);
    if (q.lease != lease || q.prepared != a.update) return;
    const int g = SeatOf(q).g;
    const PartContent& content = *a.content;
    for (size_t i = 0; i < content.ranges.size(); ++i) {
      const TensorRange& range = content.ranges[i];
      const uint32_t t = TensorOf(g, content.tensor(i).name);
      const int64_t base = content.byte_offsets[i] / kElementBytes;
      for (int64_t e = 0; e < range.count; ++e) {
        q.cells[t][static_cast<size_t>(range.start + e)] =
            pool->slots[a.slot.slot.value()][static_cast<size_t>(base + e)];
      }
    }
    Say(pid, [this, g, a](int d, MemberId member) {
      Feed(d, g, GroupEvent(AckEvent{member, a.update, a.part}));
    });
  });
}

void World::HearOutcome(int pid, bool committed, Version version, bool dirty,
                        std::optional<Version> content) {
  Process& p = ProcessOf(pid);
  const Seat& seat = SeatOf(p);
  uint32_t index = static_cast<uint32_t>(rounds_.size());
  for (uint32_t i = static_cast<uint32_t>(rounds_.size()); i-- > groups_.size() + 1;) {
    const Round& round = rounds_[i];
    if (round.g != seat.g || round.version != version) continue;
    if (!seat.trainer) {
      const auto it = round.instances.find(seat.instance);
      if (it == round.instances.end() ||
          std::find(it->second.begin(), it->second.end(), pid) == it->second.end()) {
        continue;
      }
    }
    index = i;
    if (!committed || round.outcome == Outcome::kCommitted) break;
  }
  if (p.flipped && !committed && options_.bug != Bug::kNoWayBack) Flip(&p);
  if (p.flipped && committed) ++p.flips;
  p.undecided = false;
  p.flipped = false;
  Trace("pid {} hears {} {}{}", pid, committed ? "committed" : "aborted", version,
        dirty ? ", dirty" : "");
  if (committed) {
    if (index == rounds_.size() || rounds_[index].outcome != Outcome::kCommitted) {
      return Violate(
          "P1", fmt::format("pid {} got Committed for {}, which was not decided", pid, version));
    }
    if (seat.trainer) return;
    uint32_t holds = 0;
    if (!rounds_[index].committed_instances.contains(seat.instance) ||
        !TrueVersion(p, &holds).has_value() || holds != rounds_[index].bytes_of) {
      return Violate(
          "P1", fmt::format("pid {} got Committed for {}, but does not hold it", pid, version));
    }
    if (content != rounds_[rounds_[index].bytes_of].version) {
      return Violate("P11", fmt::format("pid {} got Committed for {} with the content of {}, and "
                                        "it has that of {}",
                                        pid, version, content.value_or(Version(-1)),
                                        rounds_[rounds_[index].bytes_of].version));
    }
    CheckProcessed(p, version);
    p.processed.reset();
    p.holds = version;
    p.content = content == version ? std::nullopt : content;
    p.torn = false;
  } else {
    if (seat.trainer) {
      if (p.phase != Process::Phase::kIdle && GroupOf(seat.g).job.version == version &&
          p.attempt == GroupOf(seat.g).job.attempt && p.phase != Process::Phase::kBeginning) {
        Conclude(pid, false);
      }
      return;
    }
    if (dirty) {
      p.holds.reset();
    } else if (p.holds.has_value() && !HasContent(seat.g, *p.holds, TrueVersion(p, nullptr))) {
      return Violate("P2", fmt::format("pid {} is told that it is untouched, but does not hold "
                                       "version {} any more",
                                       pid, *p.holds));
    }
  }
  p.weights_unknown = false;
  p.prepared.reset();
  p.staged.reset();
  if (options_.bug != Bug::kKeptProcessed) p.processed.reset();
  // After a new registration the memory is not known to hold a version until the next update.
  if (seat.delivery == DeliveryMode::kInPlace && random_.PerMille(chances_.new_binding)) {
    RegisterLayout(pid);
  }
}

// ---- calls ----

void World::CallDaemon(int pid, Duration delay, GroupEvent event, std::shared_ptr<Source> source,
                       std::function<void(const absl::Status&, const ReplyPayload&)> reply) {
  Process& p = ProcessOf(pid);
  if (p.mute || p.member == MemberId()) return;
  const int d = SeatOf(p).d;
  const int g = SeatOf(p).g;
  const bool refit = std::holds_alternative<RefitEvent>(event);
  const uint64_t flips = p.flips;
  const bool second_side = p.second_side;
  const std::shared_ptr<const Layout> believed =
      refit && p.shard != nullptr ? p.shard->layout : nullptr;
  // Answers to an earlier lease are dropped.
  auto heard = [this, pid, refit, lease = p.lease, reply = std::move(reply)](
                   const absl::Status& status, const ReplyPayload& payload) {
    Process& q = ProcessOf(pid);
    if (q.lease != lease || q.mute) return;
    // The call was cancelled: what it began goes on, and the shard is read until an answer comes.
    const bool open = status.code() == absl::StatusCode::kCancelled;
    if (refit && --q.refits_out == 0 && !open) {
      q.refit_version.reset();
      Clobber(q.shard.get());
    }
    reply(status, payload);
  };
  if (!DaemonAt(d).up || DaemonAt(d).life != p.daemon_life) return;
  if (refit) ++p.refits_out;
  InDaemon(
      d, delay + NetDelay(),
      [this, pid, d, g, refit, believed, flips, second_side, member = p.member,
       event = std::move(event), source = std::move(source), heard = std::move(heard)]() mutable {
        Daemon& daemon = DaemonAt(d);
        const auto it = daemon.members.find(member);
        if (it == daemon.members.end() || it->second.lost || Find(d, g) == nullptr) {
          InProcess(pid, NetDelay(),
                    [heard] { heard(absl::UnauthenticatedError("no such lease"), EmptyReply{}); });
          return;
        }
        const CallId call(daemon.next_call++);
        std::visit(
            [&](auto& e) {
              if constexpr (requires { e.call; }) e.call = call;
              if constexpr (requires { e.member; }) e.member = member;
            },
            event);
        const bool opens =
            std::holds_alternative<BeginEvent>(event) || std::holds_alternative<RefitEvent>(event);
        daemon.calls[call] = {pid, g, now_, heard, member, nullptr, refit, opens, AnswerTo(event)};
        if (refit && it->second.layout != believed) {
          return On(d, g,
                    Reply{call, absl::FailedPreconditionError("another binding"), EmptyReply{}});
        }
        if (const auto* layout = std::get_if<LayoutRegistered>(&event)) {
          const uint64_t generation = layout->layout->binding_generation;
          if (generation > 0 && generation <= it->second.newest) {
            return On(d, g,
                      Reply{call, absl::FailedPreconditionError("an older binding"), EmptyReply{}});
          }
          if (layout->shadowed && flips != it->second.flips) {
            return On(d, g,
                      Reply{call, absl::FailedPreconditionError("a flip before"), EmptyReply{}});
          }
          it->second.newest = generation;
          daemon.calls[call].layout = layout->layout;
          daemon.calls[call].second_side = second_side;
        }
        // A registration that the daemon itself can refuse makes no event, as in the real daemon.
        if (std::holds_alternative<LayoutRegistered>(event)) {
          absl::Status status = Find(d, g)->machine->CanRegisterLayout(member);
          if (!status.ok()) return On(d, g, Reply{call, std::move(status), EmptyReply{}});
          if (options_.bug == Bug::kEarlyRegistered) heard(absl::OkStatus(), EmptyReply{});
        }
        if (source != nullptr) daemon.sources[call] = source;
        if (random_.PerMille(chances_.call_gone)) {
          Count(Fault::kCallGone);
          InDaemon(d, random_.Millis(0, 400), [this, d, g, call] {
            if (DaemonAt(d).calls.contains(call)) Feed(d, g, GroupEvent(CallGone{call}));
          });
        }
        if (opens && options_.bug == Bug::kStubbornCatchUp) {
          return FeedWithoutCatchUp(d, g, std::move(event));
        }
        Feed(d, g, std::move(event));
      });
}

void World::FeedWithoutCatchUp(int d, int g, GroupEvent event) {
  if (!CatchUpRuns(g)) return Feed(d, g, std::move(event));
  InDaemon(d, milliseconds(2), [this, d, g, event = std::move(event)] {
    if (Find(d, g) != nullptr) FeedWithoutCatchUp(d, g, event);
  });
}

void World::CallTwice(int pid, GroupEvent event, std::shared_ptr<Source> source,
                      std::function<void(const absl::Status&, const ReplyPayload&)> reply) {
  if (!random_.Percent(12)) {
    CallDaemon(pid, Duration(0), std::move(event), std::move(source), std::move(reply));
    return;
  }
  GroupEvent again = event;
  const bool forget = options_.bug == Bug::kForgottenRequest;
  std::visit(
      [&](auto& e) {
        if constexpr (requires { e.request_id; }) {
          if (forget) e.request_id.clear();
        }
      },
      again);
  // The second call's memory has equal bytes but is another object: only the first call's is read.
  std::shared_ptr<Source> copy;
  if (source != nullptr) {
    copy = std::make_shared<Source>(*source);
    std::get<BucketEvent>(again).bucket = copy->BucketOver(*source->bucket);
  }
  using Answers = std::vector<std::pair<absl::Status, ReplyPayload>>;
  const auto answers = std::make_shared<Answers>();
  const auto compare = [this, pid, answers](const absl::Status& status,
                                            const ReplyPayload& payload) {
    answers->emplace_back(status, payload);
    if (answers->size() < 2) return;
    const auto& [first, first_payload] = answers->front();
    if (status.ok() != first.ok()) {
      const absl::Status& bad = status.ok() ? first : status;
      if (bad.code() == absl::StatusCode::kAlreadyExists) {
        Violate("P3",
                fmt::format("pid {}: a repeated call has another effect: {}", pid, bad.ToString()));
      }
      return;
    }
    const auto* a = std::get_if<BucketReply>(&first_payload);
    const auto* b = std::get_if<BucketReply>(&payload);
    if (status.ok() && a != nullptr && b != nullptr && a->group_seq != b->group_seq) {
      Violate("P3", fmt::format("pid {}: a repeated bucket is taken twice, as {} and {}", pid,
                                a->group_seq, b->group_seq));
    }
  };
  CallDaemon(
      pid, Duration(0), std::move(event), std::move(source),
      [compare, reply = std::move(reply)](const absl::Status& status, const ReplyPayload& payload) {
        compare(status, payload);
        reply(status, payload);
      });
  CallDaemon(pid, random_.Micros(0, 20'000), std::move(again), std::move(copy), compare);
}

// ---- the job ----

void World::MakePlan(int g) {
  GroupWorld& group = GroupOf(g);
  Job& job = group.job;
  job.plan.assign(static_cast<size_t>(group.spec.trainer_ranks), {});
  for (uint32_t t = 0; t < group.model.size(); ++t) {
    if (!group.pushed[t]) continue;
    const int64_t elements = group.model[t].shape[0];
    for (int64_t start = 0; start < elements;) {
      int64_t count = elements - start;
      if (count > 1 && random_.Percent(30)) count = random_.Between(1, count);
      auto& buckets = job.plan[random_.Index(job.plan.size())];
      const bool fresh =
          buckets.empty() || random_.Percent(60) || buckets.back().ranges.back().tensor == t;
      if (fresh) buckets.emplace_back();
      buckets.back().ranges.push_back({t, start, count});
      start += count;
    }
  }
}

void World::StartAttempt(int g) {
  GroupWorld& group = GroupOf(g);
  Job& job = group.job;
  // An attempt that was due when the faults ended is dropped.
  if (job.left <= 0 || (job.final && job.active)) return;
  --job.left;
  ++job.attempt;
  job.active = true;
  job.started = now_;
  job.concluded.clear();
  const Machine* m = Find(group.home, g);
  const std::optional<Version> committed = m == nullptr ? std::nullopt : m->machine->version();
  if (committed.has_value()) {
    group.top = std::max(group.top, *committed);
  } else if (!job.final && random_.Percent(30)) {
    // An incarnation may begin with any version, whatever engines bring from another.
    group.top = Version(random_.Between(0, 3));
  }
  // A version that was lost may be tried again.
  const bool again = !job.final && !no_faults_ && random_.Percent(25) && job.version > Version(0);
  job.version = again ? job.version : Version(group.top.value() + random_.Between(1, 2));
  group.top = std::max(group.top, job.version);
  job.evict_late = random_.Percent(40);
  job.slots_on_devices = (options_.seed + static_cast<uint64_t>(job.attempt)) % 2 == 0;
  MakePlan(g);
  if (group.way != GroupWorld::Way::kPush) {
    if (job.split.empty() || random_.Percent(25)) MakeSplit(g);
    for (int& binding : job.binding) binding += random_.Percent(15);
  }
  Trace("g{} attempt {}: version {}", g, job.attempt, job.version);
  for (const Seat& seat : seats_) {
    if (seat.g != g || !seat.trainer) continue;
    InProcess(seat.pid, random_.Millis(0, 30), [this, pid = seat.pid] { BeginAttempt(pid); });
  }
}

void World::BeginAttempt(int pid) {
  Process& p = ProcessOf(pid);
  GroupWorld& group = GroupOf(SeatOf(p).g);
  Job& job = group.job;
  const int rank = SeatOf(p).rank;
  if (!job.active || job.concluded.contains(rank) || !p.welcomed || p.mute) return;
  if (p.attempt == job.attempt && p.phase != Process::Phase::kBeginning) return;
  if (p.refits_out > 0) {
    // The rank's shards may still be read.
    InProcess(pid, random_.Millis(20, 100), [this, pid, lease = p.lease] {
      if (ProcessOf(pid).lease == lease) BeginAttempt(pid);
    });
    return;
  }
  if (p.attempt != job.attempt) {
    p.attempt = job.attempt;
    p.tries = 0;
    p.window = random_.Int(1, 4);
  }
  p.phase = Process::Phase::kBeginning;
  p.next_bucket = 0;
  p.outstanding = 0;
  p.round = 0;
  ++p.token;
  if (!Registers(pid)) return BeginCall(pid);
  const int binding = job.binding[static_cast<size_t>(rank)];
  if (p.shard == nullptr || p.binding != binding) return RegisterShard(pid);
  const bool pushes = !job.plan[static_cast<size_t>(rank)].empty();
  if (pushes || (group.way == GroupWorld::Way::kMixed && random_.Percent(50))) {
    BeginCall(pid);
  } else {
    CallRefit(pid);
  }
}

// The duration that a Begin asks for; 0 is the group's default. Without faults the update must
// commit, and the attaching of members alone may take two seconds.
Duration World::SomeDuration() {
  if (random_.Percent(30)) return Duration(0);
  const Duration duration = seconds(random_.Between(2, 6));
  return no_faults_ ? std::max<Duration>(duration, seconds(3)) : duration;
}

void World::BeginCall(int pid) {
  Process& p = ProcessOf(pid);
  const GroupWorld& group = GroupOf(SeatOf(p).g);
  const Job& job = group.job;
  const uint64_t token = p.token;
  BeginEvent e;
  e.version = job.version;
  e.duration = SomeDuration();
  e.verification = group.verification;
  e.evict_late = job.evict_late;
  if (Registers(pid) || job.TellsCountAtBegin()) {
    e.tensor_count = static_cast<int64_t>(group.model.size());
  }
  // Claims that the members' memory is on GPUs with slots: broadcasts then go through slots if one
  // daemon has all members.
  e.slots_on_devices = job.slots_on_devices;
  e.request_id = fmt::format("b{}.{}", job.attempt, p.tries);
  const int g = SeatOf(p).g;
  CallTwice(pid, e, nullptr,
            [this, pid, token, g, version = job.version](const absl::Status& status,
                                                         const ReplyPayload& payload) {
              Process& q = ProcessOf(pid);
              if (q.token != token) return;
              if (!status.ok()) {
                if (status.code() == absl::StatusCode::kFailedPrecondition && ++q.tries < 6) {
                  InProcess(pid, random_.Millis(50, 600), [this, pid, token] {
                    if (ProcessOf(pid).token == token) BeginAttempt(pid);
                  });
                  return;
                }
                Trace("pid {}: begin: {}", pid, status.ToString());
                Conclude(pid, false);
                return;
              }
              const auto& begun = std::get<BeginReply>(payload);
              q.round = 0;
              for (uint32_t i = static_cast<uint32_t>(rounds_.size()); i-- > 1;) {
                const Round& round = rounds_[i];
                if (round.g == g && round.update == begun.update && round.version == version) {
                  q.round = i;
                  break;
                }
              }
              if (q.round == 0) {
                return Violate(
                    "P3", fmt::format("pid {}: Begin is answered with update {}, which was never "
                                      "assembled",
                                      pid, begun.update));
              }
              q.phase = Process::Phase::kPushing;
              PushMore(pid);
            });
}

void World::PushMore(int pid) {
  Process& p = ProcessOf(pid);
  const GroupWorld& group = GroupOf(SeatOf(p).g);
  const auto& plan = group.job.plan[static_cast<size_t>(SeatOf(p).rank)];
  if (p.phase != Process::Phase::kPushing) return;
  if (random_.PerMille(chances_.trainer_abort)) {
    Count(Fault::kTrainerAbort);
    Conclude(pid, false);
    return;
  }
  while (p.outstanding < p.window && p.next_bucket < plan.size()) {
    const size_t bucket = p.next_bucket++;
    ++p.outstanding;
    if (group.spec.slots >= 2 && random_.Percent(20)) {
      PushLeased(pid, bucket);
    } else {
      PushOne(pid, bucket, std::nullopt, 0);
    }
  }
  if (p.outstanding == 0) {
    CommitAttempt(pid, false);
  } else if (p.next_bucket == plan.size() && !Registers(pid) && random_.Percent(20)) {
    CommitAttempt(pid, true);
  }
}

BucketDraft World::MakeBucket(int pid, size_t bucket) const {
  const Process& p = ProcessOf(pid);
  const GroupWorld& group = groups_[static_cast<size_t>(SeatOf(p).g)];
  BucketDraft e;
  e.version = group.job.version;
  e.update = BegunBy(p);
  e.seq = static_cast<int64_t>(bucket);
  for (const TensorRange& range :
       group.job.plan[static_cast<size_t>(SeatOf(p).rank)][bucket].ranges) {
    e.Add(group.model[range.tensor], range.start, range.count);
  }
  return e;
}

void World::PushOne(int pid, size_t bucket, std::optional<SlotGrant> slot, int tries) {
  Process& p = ProcessOf(pid);
  BucketDraft e = MakeBucket(pid, bucket);
  e.request_id = fmt::format("p{}.{}.{}.{}", p.attempt, p.token, bucket, tries);
  auto source = std::make_shared<Source>();
  int64_t offset = 0;
  std::vector<int64_t> offsets;
  for (size_t i = 0; i < e.ranges.size(); ++i) {
    const uint32_t t = TensorOf(SeatOf(p).g, e.tensors[i].name);
    std::vector<Tag>& data = source->data.emplace_back();
    for (int64_t k = 0; k < e.ranges[i].count; ++k) {
      data.push_back(MakeTag(p.round, t, e.ranges[i].start + k));
    }
    offsets.push_back(offset);
    offset += e.ranges[i].count * kElementBytes;
  }
  if (slot.has_value()) {
    EndPack(pid, *slot);
    e.LieIn(*slot, offsets);
  }
  BucketEvent event = e;
  event.bucket = source->BucketOver(*event.bucket);
  CallTwice(pid, event, source,
            [this, pid, bucket, slot, tries, token = p.token](const absl::Status& status,
                                                              const ReplyPayload&) {
              if (!status.ok() && slot.has_value()) GiveSlotBack(pid, *slot);
              if (ProcessOf(pid).token == token) PushDone(pid, bucket, slot, tries, status);
            });
}

void World::PushDone(int pid, size_t bucket, std::optional<SlotGrant>, int tries,
                     const absl::Status& status) {
  Process& p = ProcessOf(pid);
  // After a refusal, the second of two equal calls may have been accepted.
  const bool taken = tries > 0 && status.code() == absl::StatusCode::kAlreadyExists;
  if (status.ok() || taken) {
    --p.outstanding;
    PushMore(pid);
    return;
  }
  if (status.code() == absl::StatusCode::kResourceExhausted && tries < 30) {
    InProcess(pid, random_.Millis(20, 150), [this, pid, bucket, tries, token = p.token] {
      if (ProcessOf(pid).token == token) PushOne(pid, bucket, std::nullopt, tries + 1);
    });
    return;
  }
  Trace("pid {}: bucket {}: {}", pid, bucket, status.ToString());
  Conclude(pid, false);
}

void World::GiveSlotBack(int pid, SlotGrant grant) {
  EndPack(pid, grant);
  ReleaseSlotEvent e;
  e.grant = grant;
  CallDaemon(pid, Duration(0), e, nullptr, [](const absl::Status&, const ReplyPayload&) {});
}

void World::PushLeased(int pid, size_t bucket) {
  Process& p = ProcessOf(pid);
  const BucketDraft plan = MakeBucket(pid, bucket);
  int64_t bytes = 0;
  for (const TensorRange& range : plan.ranges) bytes += range.count * kElementBytes;
  if (bytes > GroupOf(SeatOf(p).g).spec.slot_bytes) return PushOne(pid, bucket, std::nullopt, 0);
  LeaseSlotEvent e;
  e.version = plan.version;
  e.update = plan.update;
  e.wait = random_.Percent(50) ? Duration(0) : Duration(milliseconds(200));
  const uint64_t token = p.token;
  CallDaemon(
      pid, Duration(0), e, nullptr,
      [this, pid, bucket, plan, token](const absl::Status& status, const ReplyPayload& payload) {
        Process& q = ProcessOf(pid);
        if (!status.ok()) {
          if (q.token == token) PushOne(pid, bucket, std::nullopt, 0);
          return;
        }
        const SlotGrant grant = std::get<LeaseSlotReply>(payload).grant;
        if (q.token != token) return GiveSlotBack(pid, grant);
        const uint64_t use = UseSlot(q.pool.get(), grant, fmt::format("pid {} packs", pid));
        q.packs.push_back({grant, use});
        Duration wait = random_.Micros(50, 4000);
        if (random_.PerMille(chances_.late_member)) wait = random_.Millis(500, 4000);
        InProcess(pid, wait, [this, pid, bucket, plan, token, grant, lease = q.lease] {
          Process& r = ProcessOf(pid);
          if (r.lease != lease) return;
          size_t cell = 0;
          for (size_t i = 0; i < plan.ranges.size(); ++i) {
            const uint32_t t = TensorOf(SeatOf(r).g, plan.tensors[i].name);
            for (int64_t k = 0; k < plan.ranges[i].count; ++k) {
              r.pool->slots[grant.slot.value()][cell++] =
                  MakeTag(r.round, t, plan.ranges[i].start + k);
            }
          }
          if (r.token != token) return GiveSlotBack(pid, grant);
          PushOne(pid, bucket, grant, 0);
        });
      });
}

UpdateId World::BegunBy(const Process& p) const {
  const bool names = (options_.seed + static_cast<uint64_t>(p.pid)) % 5 != 0;
  return names && p.round != 0 ? rounds_[p.round].update : UpdateId();
}

// Ends the attempt with Commit or Refit. `ahead`: some buckets are still under way.
void World::CommitAttempt(int pid, bool ahead) {
  if (Registers(pid)) return CallRefit(pid);
  Process& p = ProcessOf(pid);
  const Job& job = GroupOf(SeatOf(p).g).job;
  p.phase = Process::Phase::kCommitting;
  CommitEvent e;
  e.version = job.version;
  e.update = BegunBy(p);
  e.bucket_count = static_cast<int64_t>(job.plan[static_cast<size_t>(SeatOf(p).rank)].size());
  e.request_id = fmt::format("c{}.{}{}", p.attempt, p.token, ahead ? ".ahead" : "");
  e.pushes_under_way = ahead;
  if (!job.TellsCountAtBegin())
    e.tensor_count = static_cast<int64_t>(GroupOf(SeatOf(p).g).model.size());
  const bool named = e.update != UpdateId();
  const auto answered = [this, pid, ahead, named, token = p.token, round = p.round](
                            const absl::Status& status, const ReplyPayload&) {
    // A call of a lost attempt that names no update may arrive in the next attempt at the same
    // version.
    const auto end = named ? rounds_.begin() + round + 1 : rounds_.end();
    const bool installed = std::any_of(rounds_.begin() + round, end, [&](const Round& r) {
      return r.g == rounds_[round].g && r.version == rounds_[round].version &&
             r.outcome == Outcome::kCommitted;
    });
    if (status.ok() && !installed) {
      return Violate("P1", fmt::format("pid {}: Commit is answered OK, but update {} was "
                                       "not committed",
                                       pid, rounds_[round].update));
    }
    if (ProcessOf(pid).token != token) return;
    if (!status.ok()) Trace("pid {}: commit: {}", pid, status.ToString());
    // A bucket was refused and is tried again, or too many are under way.
    if (ahead && (status.code() == absl::StatusCode::kFailedPrecondition ||
                  status.code() == absl::StatusCode::kResourceExhausted)) {
      ProcessOf(pid).phase = Process::Phase::kPushing;
      return PushMore(pid);
    }
    Conclude(pid, status.ok());
  };
  // Two equal commits may be ahead: one may be refused for a bucket that the other then waits for.
  if (ahead) {
    CallDaemon(pid, Duration(0), e, nullptr, answered);
  } else {
    CallTwice(pid, e, nullptr, answered);
  }
}

void World::Conclude(int pid, bool committed) {
  Process& p = ProcessOf(pid);
  if (p.phase == Process::Phase::kIdle) return;
  const int g = SeatOf(p).g;
  Job& job = GroupOf(g).job;
  p.phase = Process::Phase::kIdle;
  ++p.token;
  if (p.attempt != job.attempt || !job.active) return;
  if (!committed && no_faults_) {
    return Violate("LIVE", fmt::format("g{}: pid {} could not install version {}, and nothing "
                                       "failed",
                                       g, pid, job.version));
  }
  if (!committed && p.alive && p.welcomed && random_.Percent(60)) {
    AbortEvent e;
    e.version = job.version;
    e.update = BegunBy(p);
    e.reason = "planted";
    CallDaemon(pid, Duration(0), e, nullptr, [](const absl::Status&, const ReplyPayload&) {});
  }
  job.concluded[SeatOf(p).rank] = committed;
  if (static_cast<int>(job.concluded.size()) < GroupOf(g).spec.trainer_ranks) return;
  job.active = false;
  if (!job.final) In(random_.Millis(5, 400), [this, g] { StartAttempt(g); });
}

// Ends attempts whose ranks died or stopped, since those do not conclude.
void World::JobSweep(int g) {
  Job& job = GroupOf(g).job;
  if (!job.active || job.final || now_ - job.started < seconds(14)) return;
  for (const Seat& seat : seats_) {
    if (seat.g == g && seat.trainer) Conclude(seat.pid, false);
  }
  if (!job.active) return;
  job.active = false;
  In(random_.Millis(5, 400), [this, g] { StartAttempt(g); });
}

}  // namespace refitd::sim
