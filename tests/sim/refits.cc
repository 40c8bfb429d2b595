// Compiled refits: trainers' shards and calls, plans, and the rounds on the wire.
#include <algorithm>

#include "tests/sim/world.h"
#include "transport/base/status.h"

namespace refitd::sim {
namespace {

constexpr int kMostRepeats = 400;  // of a call whose answer was cancelled

size_t Cells(int64_t bytes) { return static_cast<size_t>(bytes / kElementBytes); }

}  // namespace

// ---- shards ----

bool World::Registers(int pid) const {
  const Seat& seat = SeatOf(ProcessOf(pid));
  return seat.trainer &&
         groups_[static_cast<size_t>(seat.g)].registers[static_cast<size_t>(seat.rank)];
}

// Places every element that is not pushed on one rank or several; every rank gets something.
void World::MakeSplit(int g) {
  GroupWorld& group = GroupOf(g);
  Job& job = group.job;
  const auto ranks = static_cast<size_t>(group.spec.trainer_ranks);
  job.split.assign(ranks, {});
  job.binding.resize(ranks);
  for (int& binding : job.binding) ++binding;
  std::vector<size_t> holders;
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (group.registers[rank]) holders.push_back(rank);
  }
  std::vector<uint32_t> moved;
  for (uint32_t t = 0; t < group.model.size(); ++t) {
    if (group.pushed[t]) continue;
    moved.push_back(t);
    const int64_t elements = group.model[t].shape[0];
    if (random_.Percent(35)) {
      for (const size_t rank : holders) job.split[rank].push_back({t, 0, elements});
      continue;
    }
    const size_t first = random_.Index(holders.size());
    int64_t start = 0;
    for (size_t i = 0; i < holders.size() && start < elements; ++i) {
      const bool last = i + 1 == holders.size();
      const int64_t count = last ? elements - start : random_.Between(1, elements - start);
      // The rank also gets some elements of the previous holder.
      const int64_t more = random_.Percent(30) ? random_.Between(0, start) : 0;
      job.split[holders[(first + i) % holders.size()]].push_back({t, start - more, count + more});
      start += count;
    }
  }
  for (const size_t rank : holders) {
    if (!job.split[rank].empty()) continue;
    const uint32_t t = moved[random_.Index(moved.size())];
    job.split[rank].push_back({t, 0, random_.Between(1, group.model[t].shape[0])});
  }
}

std::shared_ptr<Shard> World::MakeShard(int pid) {
  Process& p = ProcessOf(pid);
  const GroupWorld& group = GroupOf(SeatOf(p).g);
  auto layout = std::make_shared<Layout>();
  auto shard = std::make_shared<Shard>();
  layout->tensors = group.model;
  for (uint32_t t = 0; t < group.model.size(); ++t) {
    if (group.pushed[t]) layout->pushed_tensors.push_back(t);
  }
  layout->binding_generation = p.shards.size() + 1;
  std::vector<TensorRange> ranges = group.job.split[static_cast<size_t>(SeatOf(p).rank)];
  // The same elements in another order have another structure.
  if (random_.Percent(30)) std::reverse(ranges.begin(), ranges.end());
  int64_t offset = 0;
  for (const TensorRange& range : ranges) {
    Piece piece;
    piece.tensor = range.tensor;
    piece.box.offset = {range.start};
    piece.box.extent = {range.count};
    piece.strides = RowMajorStrides(piece.box.extent);
    piece.region = RegionId(layout->binding_generation);
    piece.byte_offset = offset;
    offset += range.count * kElementBytes;
    layout->pieces.push_back(std::move(piece));
  }
  shard->cells.assign(static_cast<size_t>(offset / kElementBytes), kDamaged);
  shard->layout = std::move(layout);
  p.shards.push_back(shard);
  PlaceInEngine(pid, shard.get());
  return shard;
}

// Now and then a trainer is given memory that is an engine's, at another place.
void World::PlaceInEngine(int pid, Shard* shard) {
  const Process& p = ProcessOf(pid);
  const Seat& seat = SeatOf(p);
  HashChain chance(options_.seed);
  chance.Add(static_cast<uint64_t>(pid));
  chance.Add(p.shards.size());
  if (healed_ || no_faults_ || one_daemon_ != OneDaemon::kNone) return;
  if (p.own_memory || chance.hash() % 16 != 0) return;
  // What is pushed is written before unrecognised memory is looked at.
  if (GroupOf(seat.g).way == GroupWorld::Way::kMixed) return;
  for (const std::unique_ptr<Process>& engine : processes_) {
    const Seat& other = SeatOf(*engine);
    if (other.trainer || other.g != seat.g || other.d != seat.d || !engine->alive) continue;
    if (engine->cells.empty() || engine->cells[0].size() < 2 || SeatOf(*engine).shadowed) continue;
    const size_t at = chance.hash() / 16 % (engine->cells[0].size() - 1) + 1;
    // The same elements at the same places may share memory.
    const auto same_place = [&](const Piece& piece) {
      const int64_t element = engine->first[0] + static_cast<int64_t>(at);
      return piece.tensor == 0 &&
             element + piece.byte_offset / kElementBytes == piece.box.offset[0];
    };
    const std::vector<Piece>& pieces = shard->layout->pieces;
    if (std::any_of(pieces.begin(), pieces.end(), same_place)) return;
    shard->in_pid = engine->pid;
    shard->in_region = 0;
    shard->in_element = at;
    Count(Fault::kOverlap);
    return Trace("pid {}: its shards lie in the memory of pid {}", pid, engine->pid);
  }
}

// The trainer uses its memory for something else.
void World::Clobber(Shard* shard) {
  if (shard == nullptr) return;
  std::fill(shard->cells.begin(), shard->cells.end(), kDamaged);
  shard->round = 0;
}

// A rank's shard holds a version's bytes from its call on. The round of those bytes is known only
// later, so tags are written then; nothing reads them before.
void World::FillShards(uint32_t round) {
  for (const int pid : rounds_[round].sources) {
    const Process& p = ProcessOf(pid);
    if (p.refits_out > 0 && p.refit_version == rounds_[round].version) FillShard(pid, round);
  }
}

void World::FillShard(int pid, uint32_t round) {
  const Process& p = ProcessOf(pid);
  const Round& r = rounds_[round];
  const auto source = std::find(r.sources.begin(), r.sources.end(), pid);
  if (p.shard == nullptr || p.shard->round == round || source == r.sources.end()) return;
  Shard& shard = *p.shard;
  shard.round = round;
  const Layout& layout = *shard.layout;
  for (const Piece& piece : layout.pieces) {
    for (int64_t e = 0; e < piece.box.extent[0]; ++e) {
      shard.At(piece, e) = MakeTag(round, piece.tensor, piece.box.offset[0] + e);
    }
  }
  // A rank that differs from the others is found only by comparing replicas.
  const auto me = static_cast<uint32_t>(source - r.sources.begin());
  std::vector<const Replica*> mine;
  for (const Replica& replica : r.plan->replicas.boxes) {
    const auto holders = r.plan->replicas.HoldersOf(replica);
    if (std::find(holders.begin(), holders.end(), me) != holders.end()) mine.push_back(&replica);
  }
  // Two ranks that differ in the same way would agree.
  if (mine.empty() || r.differs || !random_.PerMille(chances_.replica_differs)) return;
  rounds_[round].differs = true;
  Count(Fault::kReplicaDiffers);
  const Replica& replica = *mine[random_.Index(mine.size())];
  const uint32_t t = TensorOf(r.g, r.plan->routes.tensors[replica.tensor].name);
  const int64_t element = replica.box.offset[0] + random_.Between(0, replica.box.extent[0] - 1);
  Trace("pid {} has another t{}[{}] than its replicas", pid, t, element);
  for (const Piece& piece : layout.pieces) {
    const int64_t at = element - piece.box.offset[0];
    if (piece.tensor != t || at < 0 || at >= piece.box.extent[0]) continue;
    shard.At(piece, at) |= kDamageBit;
  }
}

void World::RegisterShard(int pid) {
  Process& p = ProcessOf(pid);
  const std::shared_ptr<Shard> shard = MakeShard(pid);
  const int binding = GroupOf(SeatOf(p).g).job.binding[static_cast<size_t>(SeatOf(p).rank)];
  LayoutRegistered e;
  e.layout = shard->layout;
  CallDaemon(
      pid, Duration(0), e, nullptr,
      [this, pid, shard, binding, token = p.token](const absl::Status& status,
                                                   const ReplyPayload&) {
        Process& q = ProcessOf(pid);
        const bool late = q.shard != nullptr &&
                          q.shard->layout->binding_generation > shard->layout->binding_generation;
        if (late) {
          // A newer layout is in force already.
        } else if (status.ok()) {
          Clobber(q.shard.get());
          q.shard = shard;
          q.binding = binding;
        } else if (status.code() != absl::StatusCode::kFailedPrecondition) {
          q.shard.reset();
        }
        if (q.token != token) return;
        InProcess(pid, status.ok() ? Duration(0) : random_.Millis(30, 300), [this, pid, token] {
          if (ProcessOf(pid).token == token) BeginAttempt(pid);
        });
      });
}

// ---- the call ----

void World::CallRefit(int pid) {
  Process& p = ProcessOf(pid);
  const int g = SeatOf(p).g;
  const GroupWorld& group = GroupOf(g);
  const Job& job = group.job;
  p.phase = Process::Phase::kCommitting;
  p.refit_version = job.version;
  RefitEvent e;
  e.version = job.version;
  e.update = BegunBy(p);
  e.duration = SomeDuration();
  e.verification = group.verification;
  e.evict_late = job.evict_late;
  e.bucket_count = static_cast<int64_t>(job.plan[static_cast<size_t>(SeatOf(p).rank)].size());
  e.request_id = fmt::format("r{}.{}", p.attempt, p.token);
  // The rank may be in an update already, because it has begun that update or gave up an earlier
  // call.
  size_t since = rounds_.size();
  for (size_t i = groups_.size() + 1; i < rounds_.size(); ++i) {
    const Round& round = rounds_[i];
    if (round.g != g || round.version != job.version) continue;
    if (i == p.round || round.outcome == Outcome::kRunning) {
      since = std::min(since, i);
      FillShard(pid, static_cast<uint32_t>(i));
    }
  }
  const uint64_t token = p.token;
  CallTwice(pid, e, nullptr,
            [this, pid, e, token, since](const absl::Status& status, const ReplyPayload&) {
              RefitAnswered(pid, e, token, since, 0, status);
            });
  if (p.token == token && random_.PerMille(chances_.trainer_abort)) {
    Count(Fault::kTrainerAbort);
    InProcess(pid, random_.Millis(0, 40), [this, pid, token] {
      if (ProcessOf(pid).token == token) Conclude(pid, false);
    });
  }
}

void World::RefitAnswered(int pid, const RefitEvent& e, uint64_t token, size_t since, int repeats,
                          const absl::Status& status) {
  Process& p = ProcessOf(pid);
  const int g = SeatOf(p).g;
  if (status.code() == absl::StatusCode::kCancelled && repeats < kMostRepeats) {
    // Only an answer says that the rank's shard is no longer read.
    ++p.refits_out;
    InProcess(pid, random_.Millis(1, 30), [this, pid, e, token, since, repeats, lease = p.lease] {
      if (ProcessOf(pid).lease != lease) return;
      --ProcessOf(pid).refits_out;
      CallDaemon(
          pid, Duration(0), e, nullptr,
          [this, pid, e, token, since, repeats](const absl::Status& again, const ReplyPayload&) {
            RefitAnswered(pid, e, token, since, repeats + 1, again);
          });
    });
    return;
  }
  const auto from = rounds_.begin() + static_cast<int64_t>(std::min(since, rounds_.size()));
  const bool installed = std::any_of(from, rounds_.end(), [&](const Round& r) {
    return r.g == g && r.version == e.version && r.outcome == Outcome::kCommitted &&
           (e.update == UpdateId() || r.update == e.update);
  });
  if (status.ok() && !installed) {
    return Violate("P1", fmt::format("pid {}: Refit is answered OK, but version {} was not "
                                     "committed",
                                     pid, e.version));
  }
  if (p.token != token) return;
  if (!status.ok()) Trace("pid {}: refit: {}", pid, status.ToString());
  // It registers memory of its own before it tries again.
  if (!status.ok() && p.shard != nullptr && p.shard->in_pid != 0) {
    p.own_memory = true;
    p.binding = -1;
  }
  const bool begun = p.round != 0;
  if (!begun && status.code() == absl::StatusCode::kFailedPrecondition && ++p.tries < 6) {
    p.phase = Process::Phase::kBeginning;
    InProcess(pid, random_.Millis(50, 600), [this, pid, token] {
      if (ProcessOf(pid).token == token) BeginAttempt(pid);
    });
    return;
  }
  Conclude(pid, status.ok());
}

// ---- programs ----

void World::On(int d, int g, const PlanRefit& a) {
  InDaemon(d, PlanningTime(), [this, d, g, nonce = Find(d, g)->nonce, a] {
    FeedTo(d, g, nonce, GroupEvent(CompilePlan(a)));
  });
}

void World::On(int d, int g, const BuildProgram& a) {
  InDaemon(d, PlanningTime(), [this, d, g, nonce = Find(d, g)->nonce, a] {
    if (Find(d, g, nonce) == nullptr) return;
    ProgramBuilt built;
    if (random_.PerMille(chances_.transfer_fails)) {
      Count(Fault::kTransferFailed);
      built = {a.program, a.build, absl::InternalError("the build failed"), nullptr};
    } else {
      built = CompilePart(a);
    }
    Feed(d, g, PeerEvent(std::move(built)));
  });
}

Duration World::PlanningTime() {
  return random_.PerMille(chances_.slow_message) ? random_.Millis(20, 1500)
                                                 : random_.Micros(100, 9000);
}

// ---- rounds ----

// Checks that the slot has no other use at the time, and that the group has not given it back.
uint64_t World::UseProgramSlot(int d, int g, SlotIndex slot, const std::string& what) {
  Machine* m = Find(d, g);
  const bool linked =
      m->coordinator != nullptr || (m->link >= 0 && links_[static_cast<size_t>(m->link)].c_open &&
                                    links_[static_cast<size_t>(m->link)].f_open);
  Machine* home = Find(GroupOf(g).home, g);
  if (linked && home != nullptr && home->nonce == m->coordinator_nonce) {
    const MachineView view = home->machine->View(now_);
    for (const SlotView& known : view.group.slots) {
      if (known.slot != slot || known.state != SlotState::kFree) continue;
      Violate("P6", fmt::format("{} on slot {}, which is free", what, slot));
    }
  }
  return UseSlot(m->pool.get(), SlotGrant{slot, GrantId((uint64_t{1} << 62) + ++nonces_)}, what);
}

void World::On(int d, int g, const StartExchange& a) {
  Machine* m = Find(d, g);
  const std::string where =
      fmt::format("d{} g{}: round {} of communicator {}", d, g, a.seq, a.communicator);
  const ProgramRecord* record = nullptr;
  WireSeq first;
  for (const auto& [key, known] : programs_) {
    if (std::get<0>(key) != g || std::get<1>(key) != m->coordinator_nonce) continue;
    const auto over = known.first_seqs.find(a.communicator);
    if (over == known.first_seqs.end() || over->second > a.seq) continue;
    if (record != nullptr && over->second < first) continue;
    record = &known;
    first = over->second;
  }
  if (record == nullptr) return Violate("P5", where + " starts, but belongs to no program");
  for (const NodeId node : record->sent) {
    // A node that was lost meanwhile is skipped.
    const bool there = std::any_of(links_.begin(), links_.end(), [&](const Link& link) {
      return link.g == g && link.c_nonce == m->coordinator_nonce && link.node == node &&
             link.c_open;
    });
    if (there && !record->built.contains(node)) {
      return Violate("P5", fmt::format("{} starts before node {} built its part", where, node));
    }
  }
  if (m->follower != nullptr &&
      !record->issued.contains(links_[static_cast<size_t>(m->link)].node)) {
    return Violate("P5", where + " starts before it was issued");
  }
  CommunicatorEnd* end = CheckWire(d, g, a.communicator, a.seq, a.timeout, where);
  if (end == nullptr) return;
  WireOp& op = comms_[CommOf(*end)][a.seq];
  const auto rank = static_cast<uint32_t>(end->rank);
  if ((!op.started.empty() && op.shares.empty()) || op.started.contains(rank)) {
    return Violate("P5", where + " is another operation elsewhere");
  }
  for (const StartExchange::Leg& leg : a.legs) {
    const auto cells = m->pool->slots[a.out.value()].size();
    if (Cells(leg.out_offset + leg.bytes_out) > cells ||
        Cells(leg.in_offset + leg.bytes_in) > cells || leg.rank == rank) {
      return Violate("P5", where + " leaves its slots");
    }
    const auto other = op.shares.find(leg.rank);
    if (other == op.shares.end()) continue;
    const auto& legs = other->second.start.legs;
    const auto back =
        std::find_if(legs.begin(), legs.end(), [rank](const auto& l) { return l.rank == rank; });
    if (back == legs.end() || back->bytes_in != leg.bytes_out || back->bytes_out != leg.bytes_in) {
      return Violate("P5", fmt::format("{} has other bytes than rank {} expects", where, leg.rank));
    }
  }
  const uint64_t out = UseProgramSlot(d, g, a.out, where + " sends");
  const uint64_t in = UseProgramSlot(d, g, a.in, where + " receives");
  if (over_) return;
  if (options_.bug == Bug::kEarlyForward) {
    m->pool->before_round[a.in.value()] = m->pool->slots[a.in.value()];
  }
  ++result_.exchanges;
  op.started.insert(rank);
  op.shares[rank].start = a;
  op.running[rank] = {{a.out, out}, {a.in, in}};
  op.pools[rank] = m->pool;
  RunWire(end, a.seq, a.timeout);
}

// A rank's share completes when the ranks that it exchanges with have started theirs.
void World::TryExchange(const std::string& comm, WireSeq seq) {
  WireOp& op = comms_[comm].at(seq);
  std::map<uint32_t, uint64_t> ids;
  for (const uint64_t id : EndsOf(comm)) ids[static_cast<uint32_t>(ends_.at(id).rank)] = id;
  TimePoint blocked = now_;
  for (auto& [rank, share] : op.shares) {
    if (share.completing || !op.running.contains(rank) || !ids.contains(rank)) continue;
    TimePoint start = now_;
    TimePoint parted = now_;
    bool all = true;
    for (const StartExchange::Leg& leg : share.start.legs) {
      all &= op.shares.contains(leg.rank) && ids.contains(leg.rank);
      if (!all) break;
      const CommunicatorEnd& there = ends_.at(ids.at(leg.rank));
      start = std::max(start, there.free_at);
      parted = std::max(parted, BlockedUntil(ends_.at(ids.at(rank)).d, there.d));
    }
    if (!all) continue;
    if (parted > now_) {
      blocked = std::max(blocked, parted);
      continue;
    }
    share.completing = true;
    CommunicatorEnd& end = ends_.at(ids.at(rank));
    end.free_at = std::max(start, end.free_at) + random_.Micros(100, 4000);
    InDaemon(end.d, end.free_at - now_,
             [this, id = end.id, seq] { EndWire(id, seq, absl::OkStatus()); });
  }
  if (blocked > now_) In(blocked - now_, [this, comm, seq] { TryWire(comm, seq); });
}

// The bytes of its peers have arrived; the rank's own slot may be used again afterwards.
void World::ReceiveShare(const CommunicatorEnd& end, WireOp* op) {
  const auto rank = static_cast<uint32_t>(end.rank);
  WireOp::Share& share = op->shares.at(rank);
  Pool& pool = *op->pools.at(rank);
  std::vector<Tag>& in = pool.slots[share.start.in.value()];
  const StartExchange::Leg* received = nullptr;
  for (const StartExchange::Leg& leg : share.start.legs) {
    const WireOp::Share& other = op->shares.at(leg.rank);
    const auto back = std::find_if(other.start.legs.begin(), other.start.legs.end(),
                                   [rank](const auto& l) { return l.rank == rank; });
    if (back == other.start.legs.end()) {
      return Violate("P5", fmt::format("g{}: rank {} of communicator {} does not know of rank {}",
                                       end.g, leg.rank, end.communicator, rank));
    }
    const std::vector<Tag>& from = other.sent.has_value()
                                       ? *other.sent
                                       : op->pools.at(leg.rank)->slots[other.start.out.value()];
    std::copy_n(from.begin() + static_cast<int64_t>(Cells(back->out_offset)), Cells(leg.bytes_in),
                in.begin() + static_cast<int64_t>(Cells(leg.in_offset)));
    if (leg.bytes_in > 0) received = &leg;
  }
  share.sent = pool.slots[share.start.out.value()];
  if (received != nullptr && GroupOf(end.g).verification != Verification::kOff &&
      random_.PerMille(chances_.bytes_damaged)) {
    Count(Fault::kBytesDamaged);
    in[Cells(received->in_offset)] |= kDamageBit;
  }
}

}  // namespace refitd::sim
