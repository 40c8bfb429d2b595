// Compiled refits: trainers' shards and calls. The real planners compile programs; moves and
// exchanges work on tags.
#include <algorithm>

#include "tests/sim/world.h"
#include "transport/base/status.h"

namespace refitd::sim {
namespace {

using std::chrono::milliseconds;

constexpr int kMostRepeats = 400;  // of a call whose answer was cancelled

uint64_t Mix(Tag tag) {
  HashChain chain(0);
  chain.Add(tag);
  return chain.hash();
}

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
    shard->cells.emplace_back(static_cast<size_t>(range.count), kDamaged);
  }
  shard->layout = std::move(layout);
  p.shards.push_back(shard);
  return shard;
}

// The trainer uses its memory for something else.
void World::Clobber(Shard* shard) {
  if (shard == nullptr) return;
  for (auto& cells : shard->cells) std::fill(cells.begin(), cells.end(), kDamaged);
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
  for (size_t i = 0; i < layout.pieces.size(); ++i) {
    for (size_t e = 0; e < shard.cells[i].size(); ++e) {
      shard.cells[i][e] = MakeTag(round, layout.pieces[i].tensor,
                                  layout.pieces[i].box.offset[0] + static_cast<int64_t>(e));
    }
  }
  // A rank that differs from the others is found only by comparing replicas.
  const GroupWorld& group = GroupOf(r.g);
  if (group.limits.compare_every > 1 && shard.compared) return;
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
  for (size_t i = 0; i < layout.pieces.size(); ++i) {
    const Piece& piece = layout.pieces[i];
    const int64_t at = element - piece.box.offset[0];
    if (piece.tensor != t || at < 0 || at >= piece.box.extent[0]) continue;
    shard.cells[i][static_cast<size_t>(at)] |= kDamageBit;
  }
}

std::shared_ptr<Shard> World::ShardOf(int pid, const Layout* layout) const {
  for (const auto& shard : ProcessOf(pid).shards) {
    if (shard->layout.get() == layout) return shard;
  }
  return nullptr;
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
  const Duration took = random_.PerMille(chances_.slow_message) ? random_.Millis(20, 1500)
                                                                : random_.Micros(100, 9000);
  InDaemon(d, took, [this, d, g, nonce = Find(d, g)->nonce, a] {
    const Machine* m = Find(d, g);
    if (m == nullptr || m->nonce != nonce) return;
    auto plan = CompileRefit(a.sources, a.destinations, a.options);
    Feed(d, g, GroupEvent(RefitPlanned{a.program, plan.status(), plan.ok() ? *plan : nullptr}));
  });
}

void World::On(int d, int g, const BuildProgram& a) {
  const Duration took = random_.PerMille(chances_.slow_message) ? random_.Millis(20, 1500)
                                                                : random_.Micros(100, 9000);
  InDaemon(d, took, [this, d, g, nonce = Find(d, g)->nonce, a] {
    const Machine* m = Find(d, g);
    if (m == nullptr || m->nonce != nonce) return;
    ProgramBuilt built{a.program, a.build, absl::OkStatus(), nullptr};
    if (random_.PerMille(chances_.transfer_fails)) {
      Count(Fault::kTransferFailed);
      built.status = absl::InternalError("the build failed");
    } else {
      auto program = CompileNode(*a.plan, a.node, a.sources, a.destinations, a.options);
      built.status = program.status();
      if (program.ok())
        built.node_program = std::make_shared<const NodeProgram>(*std::move(program));
    }
    Feed(d, g, PeerEvent(std::move(built)));
  });
}

// ---- moves ----

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

void World::On(int d, int g, const StartMoves& a) {
  Daemon& daemon = DaemonAt(d);
  Machine* m = Find(d, g);
  auto moving = std::make_shared<Moving>();
  moving->id = ++nonces_;
  moving->d = d;
  moving->g = g;
  moving->nonce = m->nonce;
  moving->start = a;
  moving->pool = m->pool;
  const BoundProgram& bound = *a.bound;
  const std::string what = fmt::format("d{} g{}: step {} round {} of update {}", d, g,
                                       static_cast<int>(a.step), a.round, a.update);
  const auto fails = [this, d, g, nonce = m->nonce, a](std::string why) {
    InDaemon(d, random_.Micros(50, 500), [this, d, g, nonce, a, why = std::move(why)] {
      const Machine* now = Find(d, g);
      if (now == nullptr || now->nonce != nonce) return;
      MovesDone done;
      done.update = a.update;
      done.step = a.step;
      done.round = a.round;
      done.status = absl::InternalError(why);
      Feed(d, g, PeerEvent(std::move(done)));
    });
  };
  for (size_t i = 0; i < bound.sources.size(); ++i) {
    const auto member = daemon.members.find(bound.sources[i]);
    if (member == daemon.members.end()) return fails("a source is gone");
    const std::shared_ptr<const Layout>& layout = bound.source_layouts[i];
    Process& process = ProcessOf(member->second.pid);
    if (!SeatOf(process).trainer) {
      moving->cells.push_back(&process.cells);
      continue;
    }
    if (!member->second.lost && member->second.layout != layout) {
      return Violate("P1", fmt::format("{} is bound to an older registration of member {}", what,
                                       bound.sources[i]));
    }
    const int pid = member->second.pid;
    std::shared_ptr<Shard> shard = ShardOf(pid, layout.get());
    if (shard == nullptr) return Violate("P6", what + " reads what nobody registered");
    if (options_.bug == Bug::kOldBinding) {
      for (const auto& old : ProcessOf(pid).shards) {
        if (SameStructure(*old->layout, *layout)) {
          shard = old;
          break;
        }
      }
    }
    if (a.step == MoveStep::kCompare) shard->compared = true;
    moving->cells.push_back(&shard->cells);
  }
  const bool writes = a.step == MoveStep::kLocal || a.step == MoveStep::kUnpack;
  for (size_t i = 0; i < bound.destinations.size(); ++i) {
    const bool skip = !writes || (i < a.skip_destination.size() && a.skip_destination[i]);
    const auto member = daemon.members.find(bound.destinations[i]);
    if (!skip && member == daemon.members.end()) {
      return Violate("P6", fmt::format("{} writes to member {}, which was released", what,
                                       bound.destinations[i]));
    }
    moving->pids.push_back(skip ? 0 : member->second.pid);
  }
  PlanMoves(moving.get());
  if (a.step == MoveStep::kPack || a.step == MoveStep::kUnpack) {
    moving->use = UseProgramSlot(d, g, a.slot, what);
  }
  if (a.step == MoveStep::kPack && bound.program->lag > 0) {
    moving->use_of_received = UseProgramSlot(d, g, a.received, what + " forwards");
  }
  if (over_) return;
  m->first_runs.emplace(a.version, a.update);
  movings_[moving->id] = moving;
  Duration took = random_.PerMille(chances_.slow_message / 2) ? random_.Millis(20, 1500)
                                                              : random_.Micros(100, 8000);
  if (options_.bug == Bug::kEarlyDone && m->follower != nullptr) {
    moving->told = true;
    took += milliseconds(20);
    Feed(d, g, PeerEvent(ResultOf(*moving)));
  }
  if (random_.Percent(50)) {
    InDaemon(d, took * random_.Int(1, 9) / 10, [this, moving] {
      if (movings_.contains(moving->id)) RunMoves(*moving, false);
    });
  }
  InDaemon(d, took, [this, moving] { EndMoves(moving); });
}

// The reads and writes of a step, from the node program: pieces by number, memory by the layouts in
// force.
void World::PlanMoves(Moving* moving) {
  const StartMoves& a = moving->start;
  const BoundProgram& bound = *a.bound;
  const NodeProgram& program = *bound.program;
  const auto from_shard = [&](Moving::Run* run, uint32_t source, uint32_t piece, const Box& box) {
    const Layout& layout = *bound.source_layouts[source];
    run->from = &(*moving->cells[source])[piece];
    run->from_at = static_cast<size_t>(box.offset[0] - layout.pieces[piece].box.offset[0]);
    run->count = box.extent[0];
  };
  const auto to_engine = [&](Moving::Run* run, uint32_t destination, uint32_t piece,
                             const Box& box) {
    const Layout& layout = *bound.destination_layouts[destination];
    run->destination = destination;
    run->tensor = TensorOf(moving->g, layout.tensors[layout.pieces[piece].tensor].name);
    run->first = box.offset[0];
    run->count = box.extent[0];
  };
  if (a.step == MoveStep::kLocal) {
    for (const CopyMove& move : program.local.moves) {
      if (moving->pids[move.destination] == 0) continue;
      Moving::Run& run = moving->runs.emplace_back();
      from_shard(&run, move.source, move.source_piece, move.box);
      to_engine(&run, move.destination, move.destination_piece, move.box);
    }
    return;
  }
  if (a.step == MoveStep::kCompare) {
    for (const ReplicaShare& share : *bound.replicas) {
      const auto source = static_cast<size_t>(
          std::find_if(program.sources.begin(), program.sources.end(),
                       [&](const LocalMember& m) { return m.rank == share.source; }) -
          program.sources.begin());
      if (source == program.sources.size()) {
        return Violate("P1", fmt::format("d{} g{}: source {} is compared, but is not here",
                                         moving->d, moving->g, share.source));
      }
      std::vector<std::vector<Tag>>& cells = *moving->cells[source];
      const Layout& layout = *bound.source_layouts[source];
      const std::string& name = bound.plan->tensors[share.tensor].name;
      for (size_t i = 0; i < cells.size(); ++i) {
        const Piece& piece = layout.pieces[i];
        const int64_t at = share.box.offset[0] - piece.box.offset[0];
        if (layout.tensors[piece.tensor].name != name || at < 0 ||
            at + share.box.extent[0] > piece.box.extent[0]) {
          continue;
        }
        moving->sums.push_back({&cells[i], static_cast<size_t>(at), share.box.extent[0], {}});
        break;
      }
    }
    return;
  }
  const bool pack = a.step == MoveStep::kPack;
  std::vector<Tag>* slot = &moving->pool->slots[a.slot.value()];
  const std::vector<RoundLeg> round = program.Round(a.round, a.course);
  const std::vector<ExchangeLeg> legs = program.Legs(a.round, a.course);
  for (size_t i = 0; i < round.size(); ++i) {
    const RoundLeg& leg = round[i];
    if (leg.peer < a.course.gone.size() && a.course.gone[leg.peer]) continue;
    if (pack) {
      const size_t chunk = Cells(legs[i].out_offset);
      for (const ChunkMove& move : leg.pack) {
        Moving::Run& run = moving->runs.emplace_back();
        from_shard(&run, move.member, move.piece, move.box);
        run.to = slot;
        run.to_at = chunk + Cells(move.chunk_byte_offset);
        const ChunkBox& sent = leg.sent[move.chunk_box];
        moving->sums.push_back({run.from, run.from_at, run.count, {sent.stream, sent.section, 0}});
      }
      PlanForwards(moving, leg, slot, chunk);
      continue;
    }
    const size_t chunk = Cells(legs[i].in_offset);
    for (const ChunkBox& box : leg.received) {
      moving->sums.push_back({slot,
                              chunk + Cells(box.chunk_byte_offset),
                              box.box.extent[0],
                              {box.stream, box.section, 0}});
    }
    for (const ChunkMove& move : leg.unpack) {
      if (moving->pids[move.member] == 0) continue;
      Moving::Run& run = moving->runs.emplace_back();
      to_engine(&run, move.member, move.piece, move.box);
      run.from = slot;
      run.from_at = chunk + Cells(move.chunk_byte_offset);
    }
  }
  for (const Moving::Run& run : moving->runs) {
    if (run.to == nullptr || run.to_at + static_cast<size_t>(run.count) <= run.to->size()) continue;
    return Violate("P5", fmt::format("d{} g{}: round {} is packed beyond its slot", moving->d,
                                     moving->g, a.round));
  }
}

void World::PlanForwards(Moving* moving, const RoundLeg& leg, std::vector<Tag>* slot,
                         size_t chunk) {
  const StartMoves& a = moving->start;
  std::vector<Tag>* from = &moving->pool->slots[a.received.value()];
  if (options_.bug == Bug::kEarlyForward) {
    const auto early = moving->pool->before_round.find(a.received.value());
    if (early != moving->pool->before_round.end()) from = &early->second;
  }
  for (const Forward& forward : leg.forwards) {
    ++result_.forwards;
    if (options_.bug == Bug::kSkippedForward && a.round == a.bound->program->lag) continue;
    Moving::Run& run = moving->runs.emplace_back();
    run.from = from;
    run.from_at = Cells(forward.slot_byte_offset);
    run.to = slot;
    run.to_at = chunk + Cells(forward.chunk_byte_offset);
    run.count = forward.bytes / kElementBytes;
  }
}

bool World::WritesNothing(Machine& m, const StartMoves& a) const {
  if (a.step != MoveStep::kUnpack) return false;
  const bool went_on = !a.course.held.empty();
  if (options_.bug == Bug::kHalfRerun) return went_on || m.first_runs[a.version] != a.update;
  if (options_.bug != Bug::kSkippedRound || !went_on) return false;
  int64_t first = a.course.first;
  while (first < a.round && !a.bound->program->Unpacks(first, a.course)) ++first;
  return first == a.round;
}

// Performs the first half of the moves, or all.
void World::RunMoves(const Moving& moving, bool end) {
  Machine* m = Find(moving.d, moving.g);
  const bool sums = end && m != nullptr && m->nonce == moving.nonce &&
                    moving.start.verification == Verification::kReadback;
  const bool writes_nothing = m != nullptr && WritesNothing(*m, moving.start);
  for (const Moving::Run& run : moving.runs) {
    if (writes_nothing && run.to == nullptr) continue;
    const int64_t stop = end ? run.count : run.count / 2;
    for (int64_t i = 0; i < stop && !over_; ++i) {
      const Tag tag = (*run.from)[run.from_at + static_cast<size_t>(i)];
      if (run.to != nullptr) {
        (*run.to)[run.to_at + static_cast<size_t>(i)] = tag;
        continue;
      }
      WriteEngine(moving.g, moving.start.update, moving.pids[run.destination], run.tensor,
                  run.first + i, tag);
      if (!sums) continue;
      m->sums[moving.start.update][moving.start.bound->destinations[run.destination]].emplace_back(
          uint64_t{run.tensor} << 32 | static_cast<uint64_t>(run.first + i), tag);
    }
  }
}

MovesDone World::ResultOf(const Moving& moving) const {
  const StartMoves& a = moving.start;
  MovesDone done;
  done.update = a.update;
  done.step = a.step;
  done.round = a.round;
  if (a.step == MoveStep::kLocal || a.step == MoveStep::kUnpack) {
    done.bytes_written.resize(moving.pids.size());
    for (const Moving::Run& run : moving.runs) {
      done.bytes_written[run.destination] += run.count * kElementBytes;
    }
  }
  const bool compare = a.step == MoveStep::kCompare;
  const bool trusts = (compare && options_.bug == Bug::kTrustedReplicas) ||
                      (a.step == MoveStep::kUnpack && options_.bug == Bug::kTrustingSink);
  for (const Moving::Sum& sum : moving.sums) {
    SectionDigest section = sum.section;
    for (int64_t i = 0; i < sum.count; ++i) {
      const Tag tag = (*sum.of)[sum.at + static_cast<size_t>(i)];
      section.digest += Mix(trusts ? tag & ~kDamageBit : tag);
    }
    if (compare) {
      done.digests.push_back(section.digest);
    } else if (a.verification != Verification::kOff) {
      done.sections.push_back(section);
    }
  }
  return done;
}

void World::EndMoves(const std::shared_ptr<Moving>& moving) {
  if (movings_.erase(moving->id) == 0) return;
  RunMoves(*moving, true);
  if (over_) return;
  const StartMoves& a = moving->start;
  MovesDone done = ResultOf(*moving);
  if (moving->use.has_value()) EndUse(moving->pool.get(), a.slot, *moving->use);
  if (moving->use_of_received.has_value()) {
    EndUse(moving->pool.get(), a.received, *moving->use_of_received);
  }
  if (moving->told) return;
  if (random_.PerMille(chances_.transfer_fails)) {
    Count(Fault::kTransferFailed);
    done.status = absl::InternalError("the moves failed");
    done.bytes_written.assign(done.bytes_written.size(), 0);
  } else if (a.verification != Verification::kOff && !moving->runs.empty() &&
             random_.PerMille(options_.bug == Bug::kBlindFill && FillRuns(moving->g)
                                  ? 500
                                  : chances_.bytes_damaged)) {
    // Damages one element; `transfer` finds it now, `readback` later, and in a slot the receiver
    // does.
    const Moving::Run& run = moving->runs[random_.Index(moving->runs.size())];
    Count(Fault::kBytesDamaged);
    if (run.to != nullptr) {
      (*run.to)[run.to_at] |= kDamageBit;
    } else {
      Process& p = ProcessOf(moving->pids[run.destination]);
      p.cells[run.tensor][static_cast<size_t>(run.first - p.first[run.tensor])] |= kDamageBit;
      if (a.verification == Verification::kTransfer) {
        done.status = absl::DataLossError("what was stored differs");
        done.failed_destination = static_cast<int>(run.destination);
      }
    }
  }
  const Machine* m = Find(moving->d, moving->g);
  if (m != nullptr && m->nonce == moving->nonce) {
    Feed(moving->d, moving->g, PeerEvent(std::move(done)));
  }
}

// ---- rounds on the wire ----

void World::On(int d, int g, const StartExchange& a) {
  Machine* m = Find(d, g);
  const std::string where = fmt::format("d{} g{}: round {} of epoch {}", d, g, a.seq, a.epoch);
  const ProgramRecord* record = nullptr;
  for (const auto& [key, known] : programs_) {
    if (std::get<0>(key) != g || std::get<1>(key) != m->coordinator_nonce) continue;
    if (!known.run.has_value() || known.run->epoch != a.epoch || known.run->wire_seq > a.seq) {
      continue;
    }
    if (record == nullptr || record->run->wire_seq < known.run->wire_seq) record = &known;
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
  EpochEnd* end = CheckWire(d, g, a.epoch, a.seq, a.timeout, where);
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
      const EpochEnd& there = ends_.at(ids.at(leg.rank));
      start = std::max(start, there.free_at);
      parted = std::max(parted, BlockedUntil(ends_.at(ids.at(rank)).d, there.d));
    }
    if (!all) continue;
    if (parted > now_) {
      blocked = std::max(blocked, parted);
      continue;
    }
    share.completing = true;
    EpochEnd& end = ends_.at(ids.at(rank));
    end.free_at = std::max(start, end.free_at) + random_.Micros(100, 4000);
    InDaemon(end.d, end.free_at - now_,
             [this, id = end.id, seq] { EndWire(id, seq, absl::OkStatus()); });
  }
  if (blocked > now_) In(blocked - now_, [this, comm, seq] { TryWire(comm, seq); });
}

// The bytes of its peers have arrived; the rank's own slot may be used again afterwards.
void World::ReceiveShare(const EpochEnd& end, WireOp* op) {
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
      return Violate("P5", fmt::format("g{}: rank {} of epoch {} does not know of rank {}", end.g,
                                       leg.rank, end.epoch, rank));
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
