// The data plane, where tags stand for bytes: the jobs that executors submit, and collectives.
#include <algorithm>
#include <cstring>

#include "tests/sim/world.h"
#include "transport/base/status.h"
#include "transport/host/host_transport.h"

namespace refitd::sim {
namespace {

using std::chrono::milliseconds;

// The destination of a pack that takes forwarded bytes. Destination 0 takes the sources' bytes.
constexpr uint32_t kForwarded = 1;

// The digest of a box of the piece. `whole`: the digest that it would have without damage.
uint64_t DigestOf(const BoundPiece& piece, const Box& box, bool whole) {
  const int64_t bytes = ElementBytes(piece.dtype);
  const char* data = piece.data + ByteDistance(box, piece.box, piece.strides, bytes);
  std::vector<Tag> tags;
  if (whole) {
    tags.resize(static_cast<size_t>(ElementCount(box)));
    std::memcpy(tags.data(), data, tags.size() * sizeof(Tag));
    for (Tag& tag : tags) tag &= ~kDamageBit;
    data = reinterpret_cast<const char*>(tags.data());
  }
  return DigestBox(data, piece.strides, box, piece.shape, static_cast<int>(bytes));
}

}  // namespace

// ---- slots ----

uint64_t World::UseSlot(Pool* pool, SlotGrant slot, const std::string& what) {
  const size_t index = slot.slot.value();
  if (index >= pool->uses.size()) {
    Violate("P5", fmt::format("{}: slot {} is not one of {}", what, slot.slot, pool->uses.size()));
    return 0;
  }
  for (const Pool::Use& use : pool->uses[index]) {
    if (use.grant == slot.grant) continue;
    Violate("P6", fmt::format("slot {}: {} under grant {} while {} under grant {}", slot.slot, what,
                              slot.grant, use.what, use.grant));
  }
  const uint64_t id = ++nonces_;
  pool->uses[index].push_back({id, slot.grant, what});
  return id;
}

void World::EndUse(Pool* pool, SlotIndex slot, uint64_t id) {
  if (slot.value() >= pool->uses.size()) return;
  std::erase_if(pool->uses[slot.value()], [id](const Pool::Use& u) { return u.id == id; });
}

std::shared_ptr<Pool> World::OwnPool(Machine* m, MemberId reader) {
  std::shared_ptr<Pool>& pool = m->own_pools[reader];
  if (pool == nullptr) {
    pool = std::make_shared<Pool>();
    for (const std::vector<Tag>& slot : m->pool->slots) pool->slots.emplace_back(slot.size());
  }
  return pool;
}

// ---- memory, as the executor finds it ----

class World::Memory : public MemoryResolver {
 public:
  Memory(World* world, int d, int g) : world_(*world), d_(d), g_(g) {}

  // The trainer of a StartTransfer, which packs into the slot that the wire reads.
  MemberId trainer;
  // Whether loader ranks have slots of their own. If not, they are given the slot of the wire.
  bool readers_have_slots = true;
  std::optional<SlotIndex> forwarded;  // the slot from which a pack forwards, for kEarlyForward

  absl::StatusOr<MemorySpan> Region(MemberId member, RegionId region) const override {
    return Side(member, region, /*back=*/false);
  }
  absl::StatusOr<MemorySpan> Destination(MemberId member, RegionId region) const override {
    return Side(member, region, /*back=*/true);
  }
  bool Flipped(MemberId member) const override {
    const auto found = world_.DaemonAt(d_).members.find(member);
    return world_.options_.bug != Bug::kKeptSide && found != world_.DaemonAt(d_).members.end() &&
           Exchanged(found->second);
  }
  absl::StatusOr<MemorySpan> Slot(SlotIndex slot) const override {
    Pool& pool = *world_.Find(d_, g_)->pool;
    const auto early = pool.before_round.find(slot.value());
    if (slot == forwarded && early != pool.before_round.end()) return SpanOf(&early->second);
    return SpanOf(&pool.slots.at(slot.value()));
  }
  absl::StatusOr<MemorySpan> SlotOf(MemberId member, SlotIndex slot) const override {
    if (member == trainer || !readers_have_slots) return Slot(slot);
    return SpanOf(&OwnPool(world_.Find(d_, g_), member)->slots.at(slot.value()));
  }

 private:
  static MemorySpan SpanOf(std::vector<Tag>* cells, const MemoryOrigin& origin = {}) {
    return {reinterpret_cast<char*>(cells->data()),
            static_cast<int64_t>(cells->size()) * kElementBytes, nullptr, origin};
  }
  static bool Exchanged(const DaemonMember& member) {
    return (member.flips - member.flips_of_layout) % 2 == 1;
  }
  // What the daemon takes for the region, or for its back.
  absl::StatusOr<MemorySpan> Side(MemberId member, RegionId region, bool back) const {
    const auto found = world_.DaemonAt(d_).members.find(member);
    if (found == world_.DaemonAt(d_).members.end()) {
      return Error(absl::StatusCode::kNotFound, "member {} is gone", member);
    }
    Process& p = world_.ProcessOf(found->second.pid);
    const size_t index = region.value() - 1;
    if (!world_.SeatOf(p).trainer) {
      if (!world_.SeatOf(p).shadowed) {
        return SpanOf(&p.cells.at(index), world_.OriginOf(p.pid, index, 0));
      }
      const bool exchanged = world_.options_.bug != Bug::kStaleSide && Exchanged(found->second);
      const bool second = found->second.second_side ^ exchanged ^ back;
      std::vector<Tag>& cells = second == p.second_side ? p.cells.at(index) : p.back.at(index);
      return SpanOf(&cells, world_.OriginOf(p.pid, index + (second ? 1000 : 0), 0));
    }
    std::shared_ptr<Shard> shard = p.shards.at(index);
    if (world_.options_.bug == Bug::kOldBinding) {
      shard = *std::find_if(p.shards.begin(), p.shards.end(), [&](const auto& old) {
        return SameStructure(*old->layout, *shard->layout);
      });
    }
    if (shard->in_pid == 0) return SpanOf(&shard->cells, world_.OriginOf(p.pid, index, 0));
    return SpanOf(&shard->cells,
                  world_.OriginOf(shard->in_pid, shard->in_region, shard->in_element));
  }
  World& world_;
  const int d_;
  const int g_;
};

// Half of the worlds have memory that the daemon recognises, the others memory that it does not.
MemoryOrigin World::OriginOf(int pid, size_t region, size_t element) const {
  if (options_.bug == Bug::kUnseenOverlap) return {};
  if (options_.seed % 2 == 0) return {MemoryOrigin::Kind::kUnknown, 0, 0, 0};
  return {MemoryOrigin::Kind::kFile, static_cast<uint64_t>(pid), region,
          static_cast<int64_t>(element) * kElementBytes};
}

// What is written to an engine's memory shows in the shards that lie in it.
void World::ShowInShards(int pid) {
  const Process& engine = ProcessOf(pid);
  for (const std::unique_ptr<Process>& p : processes_) {
    Shard* const shard = p->shard.get();
    if (shard == nullptr || shard->in_pid != pid || !engine.alive) continue;
    const std::vector<Tag>& cells = engine.cells[shard->in_region];
    for (size_t i = 0; i < shard->cells.size() && shard->in_element + i < cells.size(); ++i) {
      shard->cells[i] = cells[shard->in_element + i];
    }
  }
}

bool World::ComparedBefore(const Work& work) const {
  const Daemon& daemon = daemons_[static_cast<size_t>(work.d)];
  return std::all_of(work.sources.begin(), work.sources.end(), [&](MemberId member) {
    const auto found = daemon.members.find(member);
    if (found == daemon.members.end()) return true;
    const Process& p = *processes_[static_cast<size_t>(found->second.pid) - 1];
    return p.shard == nullptr || p.shard->compares > 1;
  });
}

bool World::ReadsOverlap(const Work& work) {
  return std::any_of(work.sources.begin(), work.sources.end(), [&](MemberId member) {
    const auto found = DaemonAt(work.d).members.find(member);
    if (found == DaemonAt(work.d).members.end()) return false;
    const Process& p = ProcessOf(found->second.pid);
    return std::any_of(p.shards.begin(), p.shards.end(),
                       [](const auto& shard) { return shard->in_pid != 0; });
  });
}

// ---- jobs of the executors ----

std::shared_ptr<Work> World::NewWork(int d, int g, Work::Start start, std::string what) {
  auto work = std::make_shared<Work>();
  work->id = ++nonces_;
  work->d = d;
  work->g = g;
  work->nonce = Find(d, g)->nonce;
  work->start = std::move(start);
  work->what = fmt::format("d{} g{}: {}", d, g, what);
  work->pool = Find(d, g)->pool;
  transport_.next = work.get();
  return work;
}

bool World::FindDestinations(Work* work, const std::vector<MemberId>& members,
                             const std::vector<bool>& skip) {
  const Daemon& daemon = DaemonAt(work->d);
  for (size_t i = 0; i < members.size(); ++i) {
    const bool skipped = i < skip.size() && skip[i];
    const auto member = daemon.members.find(members[i]);
    if (!skipped && member == daemon.members.end()) {
      Violate("P6",
              fmt::format("{} touches member {}, which was released", work->what, members[i]));
      return false;
    }
    work->destinations.push_back(members[i]);
    work->pids.push_back(skipped ? 0 : member->second.pid);
  }
  return true;
}

void World::On(int d, int g, const StartTransfer& a) {
  const auto work =
      NewWork(d, g, a, fmt::format("the copy of part {} of update {}", a.part, a.update));
  Memory memory(this, d, g);
  memory.trainer = a.trainer;
  if (!a.source_slot.has_value()) {
    const auto source = DaemonAt(d).sources.find(a.bucket_call);
    if (source == DaemonAt(d).sources.end()) {
      return Violate("P6", work->what + " starts, but its bucket is gone");
    }
    work->source = source->second;
    work->sources.push_back(a.trainer);
  }
  for (const std::optional<SlotGrant>& grant : {a.source_slot, a.fill_slot}) {
    if (!grant.has_value()) continue;
    work->uses.emplace_back(grant->slot, UseSlot(work->pool.get(), *grant, work->what));
  }
  if (over_ || !FindDestinations(work.get(), a.destinations, a.skip_destination)) return;
  memory.readers_have_slots = !work->Crossed() || options_.bug != Bug::kUnfilledSlot;
  const auto done = [this, d, g, nonce = work->nonce](const Executor::Done& ended) {
    const Machine* m = Find(d, g, nonce);
    if (m == nullptr) return;
    m->executor->Finished(ended);
    Feed(d, g, PeerEvent(static_cast<const TransferDone&>(ended)));
  };
  BeginWork(work, Find(d, g)->executor->Start(a, memory, done));
}

void World::On(int d, int g, const StartMoves& a) {
  Machine* m = Find(d, g);
  const BoundProgram& bound = *a.bound;
  const auto work = NewWork(
      d, g, a,
      fmt::format("step {} round {} of update {}", static_cast<int>(a.step), a.round, a.update));
  for (size_t i = 0; i < bound.sources.size() && a.step != MoveStep::kUnpack; ++i) {
    const auto member = DaemonAt(d).members.find(bound.sources[i]);
    if (member == DaemonAt(d).members.end()) break;  // the executor says so
    work->sources.push_back(bound.sources[i]);
    const Layout* const layout = bound.source_layouts[i].get();
    if (!SeatOf(ProcessOf(member->second.pid)).trainer) continue;
    if (!member->second.lost && member->second.layout.get() != layout) {
      return Violate("P1", fmt::format("{} is bound to an older registration of member {}",
                                       work->what, bound.sources[i]));
    }
    if (a.step != MoveStep::kCompare) continue;
    for (const auto& shard : ProcessOf(member->second.pid).shards) {
      shard->compares += shard->layout.get() == layout ? 1 : 0;
    }
  }
  const bool writes = a.step == MoveStep::kLocal || a.step == MoveStep::kUnpack;
  if (writes && !FindDestinations(work.get(), bound.destinations, a.skip_destination)) return;
  Memory memory(this, d, g);
  if (a.step == MoveStep::kPack || a.step == MoveStep::kUnpack) {
    work->uses.emplace_back(a.slot, UseProgramSlot(d, g, a.slot, work->what));
  }
  if (a.step == MoveStep::kPack && bound.program->lag > 0) {
    work->uses.emplace_back(a.received, UseProgramSlot(d, g, a.received, work->what + " forwards"));
    memory.forwarded = a.received;
  }
  if (over_) return;
  const auto done = [this, d, g, nonce = m->nonce](Executor::Moved moved) {
    const Machine* now = Find(d, g, nonce);
    if (now == nullptr) return;
    now->executor->Finished(&moved);
    Feed(d, g, PeerEvent(std::move(moved.done)));
  };
  const absl::Status status = m->executor->Start(a, memory, done);
  m->first_runs.emplace(a.version, a.update);
  const bool overlaps =
      status.code() == absl::StatusCode::kFailedPrecondition && ReadsOverlap(*work);
  if (status.code() != absl::StatusCode::kNotFound && !overlaps) return BeginWork(work, status);
  // A member is gone, since a follower releases members at once; or its memory is refused.
  for (const auto& [slot, use] : work->uses) EndUse(work->pool.get(), slot, use);
  InDaemon(d, random_.Micros(50, 500), [this, work, status] {
    FeedTo(work->d, work->g, work->nonce, PeerEvent(Refused(*work->step(), status)));
  });
}

void World::On(int d, int g, const StartVerify& a) {
  const auto work = NewWork(d, g, a, fmt::format("the read-back of update {}", a.update));
  if (!FindDestinations(work.get(), a.destinations, a.skip_destination)) return;
  for (size_t k = 0; k < a.destinations.size(); ++k) {
    if (work->pids[k] == 0) continue;
    if (Process& p = ProcessOf(work->pids[k]);
        options_.bug == Bug::kEarlyFlip && SeatOf(p).shadowed) {
      Flip(&p);
    }
    if (options_.bug != Bug::kEarlyCommitted) continue;
    Hear(d, a.destinations[k], [this, version = a.version](Process* p) {
      HearOutcome(p->pid, true, version, false, version);
    });
  }
  const auto done = [this, d, g, nonce = work->nonce](VerifyDone ended) {
    FeedTo(d, g, nonce, PeerEvent(std::move(ended)));
  };
  BeginWork(work, Find(d, g)->executor->Start(a, Memory(this, d, g), done));
  for (size_t k = 0; options_.bug == Bug::kEarlyStaged && k < work->pids.size(); ++k) {
    if (work->pids[k] == 0 || !SeatOf(ProcessOf(work->pids[k])).wants_staged) continue;
    On(d, g, SendStaged{a.destinations[k], a.version, a.update});
  }
}

// Lets the job run that the executor has submitted.
void World::BeginWork(const std::shared_ptr<Work>& work, const absl::Status& submitted) {
  if (!submitted.ok()) return Violate("P5", work->what + " fails: " + Message(submitted));
  works_[work->id] = work;
  const int d = work->d;
  if (std::holds_alternative<StartVerify>(work->start)) {
    InDaemon(d, random_.Micros(100, 6000), [this, work] { EndReading(*work); });
    return;
  }
  work->moves = *BindMoves(work->transfer);
  if (const auto* step = work->step(); step != nullptr && step->step == MoveStep::kPack) {
    for (const BoundMove& move : work->moves.moves) {
      result_.forwards += move.destination_index == kForwarded ? 1 : 0;
    }
  }
  Duration took = random_.PerMille(chances_.slow_message / 2) ? random_.Millis(20, 1500)
                                                              : random_.Micros(100, 8000);
  if (options_.bug == Bug::kEarlyDone && Find(d, work->g)->follower != nullptr) {
    took += milliseconds(20);
    std::exchange(work->done, nullptr)(ResultOf(*work));
  }
  if (random_.Percent(50)) {
    InDaemon(d, took * random_.Int(1, 9) / 10, [this, work] {
      if (works_.contains(work->id)) RunWork(*work, false);
    });
  }
  InDaemon(d, took, [this, work] { EndWork(*work); });
}

// Whether a planted bug keeps the move from being made.
bool World::Skips(const Work& work, const BoundMove& move) {
  Machine* const m = Find(work.d, work.g, work.nonce);
  if (m == nullptr) return false;
  if (options_.bug == Bug::kSkippedPart) return work.Crossed() && m->again.contains(work.part());
  const StartMoves* const a = work.step();
  if (a == nullptr) return false;
  if (options_.bug == Bug::kSkippedForward) {
    return a->step == MoveStep::kPack && move.destination_index == kForwarded &&
           a->round == a->bound->program->lag;
  }
  if (a->step != MoveStep::kUnpack) return false;
  const bool went_on = !a->course.held.empty();
  if (options_.bug == Bug::kHalfRerun) return went_on || m->first_runs[a->version] != a->update;
  if (options_.bug != Bug::kSkippedRound || !went_on) return false;
  int64_t first = a->course.first;
  while (first < a->round && !a->bound->program->Unpacks(first, a->course)) ++first;
  return first == a->round;
}

// Whether the engine reads its weights there, so that it is not a back.
bool World::Reads(const Process& p, const char* address) {
  return std::any_of(p.cells.begin(), p.cells.end(), [address](const std::vector<Tag>& cells) {
    const auto* const begin = reinterpret_cast<const char*>(cells.data());
    return address >= begin && address < begin + cells.size() * sizeof(Tag);
  });
}

// Makes the first half of every move, or all of it.
void World::RunWork(const Work& work, bool end) {
  for (const BoundMove& move : work.moves.moves) {
    if (Skips(work, move)) continue;
    int64_t elements = ElementCount(*move.box) * ElementBytes(move.source->dtype) / kElementBytes;
    if (!end) elements /= 2;
    const Process* const p = work.WrittenBy(move) == 0 ? nullptr : &ProcessOf(work.WrittenBy(move));
    // P2: nothing may write to what an engine serves.
    if (elements > 0 && p != nullptr && p->alive && !p->weights_unknown && p->holds.has_value() &&
        Reads(*p, move.to_address())) {
      return Violate("P2", fmt::format("{} writes to pid {}, which serves version {}", work.what,
                                       p->pid, *p->holds));
    }
    std::memcpy(move.to_address(), move.from_address(),
                static_cast<size_t>(elements * kElementBytes));
    if (p != nullptr) ShowInShards(p->pid);
  }
}

TransferResult World::ResultOf(const Work& work) const {
  const StartMoves* const a = work.step();
  TransferResult result;
  result.bytes_written = work.moves.bytes;
  if (work.transfer.verification == Verification::kReadback) result.expected = work.moves.sums;
  for (const BoundMove& move : work.moves.moves) {
    if (result.expected.empty()) break;
    result.expected[move.sum].digest += DigestOf(*move.source, *move.box, false);
  }
  std::erase_if(result.expected, [&](const PieceDigest& sum) {
    return work.transfer.readback_now[sum.destination];
  });
  const bool trusts =
      (options_.bug == Bug::kHalfStale && a != nullptr && a->step == MoveStep::kCompare &&
       ComparedBefore(work)) ||
      (options_.bug == Bug::kTrustedReplicas && a != nullptr && a->step == MoveStep::kCompare) ||
      (options_.bug == Bug::kTrustingSink &&
       (work.Crossed() || (a != nullptr && a->step == MoveStep::kUnpack)));
  for (const BoundPiece& piece : work.transfer.source) {
    if (!work.transfer.want_source_digests) break;
    result.source_digests.push_back(DigestOf(piece, piece.box, trusts));
  }
  return result;
}

void World::EndWork(const Work& work) {
  if (works_.erase(work.id) == 0) return;
  RunWork(work, true);
  if (over_) return;
  TransferResult result = ResultOf(work);
  const Machine* const m = Find(work.d, work.g, work.nonce);
  if (options_.bug == Bug::kTwiceStored && work.Crossed() && m != nullptr &&
      m->again.contains(work.part())) {
    for (int64_t& bytes : result.bytes_written) bytes *= 2;
  }
  for (const auto& [slot, use] : work.uses) EndUse(work.pool.get(), slot, use);
  if (work.done == nullptr) return;
  if (random_.PerMille(chances_.transfer_fails)) {
    Count(Fault::kTransferFailed);
    result.status = absl::InternalError("the copy failed");
    result.bytes_written.assign(result.bytes_written.size(), 0);
  } else if (work.transfer.verification != Verification::kOff) {
    Damage(work, &result);
  }
  work.done(std::move(result));
}

// Damages one element that was copied. `transfer` finds that now and `readback` later; in the slot
// of a program, the receiver finds it.
void World::Damage(const Work& work, TransferResult* result) {
  std::vector<const BoundMove*> candidates;
  for (const BoundMove& move : work.moves.moves) {
    if (work.WrittenBy(move) != 0 || work.step() != nullptr) candidates.push_back(&move);
  }
  // A pushed part takes its chance also where it writes to no engine.
  if (candidates.empty() && work.step() != nullptr) return;
  const bool blind = options_.bug == Bug::kBlindCatchUp && CatchUpRuns(work.g);
  if (!random_.PerMille(blind ? 500 : chances_.bytes_damaged) || candidates.empty()) return;
  const BoundMove& move = *candidates[random_.Index(candidates.size())];
  Count(Fault::kBytesDamaged);
  Tag tag;
  std::memcpy(&tag, move.to_address(), sizeof(tag));
  tag |= kDamageBit;
  std::memcpy(move.to_address(), &tag, sizeof(tag));
  if (work.transfer.verification == Verification::kTransfer && work.WrittenBy(move) != 0) {
    result->status = absl::DataLossError("what was stored differs");
    result->failed_destination = static_cast<int>(move.destination_index);
  }
}

void World::EndReading(const Work& work) {
  if (works_.erase(work.id) == 0 || Find(work.d, work.g, work.nonce) == nullptr) return;
  ReadbackResult result;
  for (const ReadbackPiece& read : work.readback.pieces) {
    if (DigestOf(read.piece, read.piece.box, false) == read.expected) continue;
    if (options_.bug == Bug::kBlindCatchUp && CatchUpRuns(work.g)) continue;
    result.status = absl::DataLossError("what was read back differs");
    std::vector<uint32_t>& failed = result.failed_destinations;
    if (failed.empty() || failed.back() != read.destination) failed.push_back(read.destination);
  }
  if (result.status.ok() && random_.PerMille(chances_.transfer_fails)) {
    Count(Fault::kTransferFailed);
    result.status = absl::InternalError("the read-back failed");
  }
  work.read(std::move(result));
}

bool World::Touches(int d, MemberId member) const {
  return std::any_of(works_.begin(), works_.end(), [&](const auto& item) {
    const Work& work = *item.second;
    if (work.d != d) return false;
    const auto& sources = work.sources;
    if (std::find(sources.begin(), sources.end(), member) != sources.end()) return true;
    for (size_t k = 0; k < work.destinations.size(); ++k) {
      const bool reads = std::holds_alternative<StartVerify>(work.start);
      if (work.pids[k] != 0 && work.destinations[k] == member &&
          (reads || work.moves.bytes[k] > 0)) {
        return true;
      }
    }
    return false;
  });
}

// ---- communicators ----

std::string World::CommOf(const CommunicatorEnd& end) const {
  std::string comm;
  for (const std::string& address : end.addresses) comm += address + ",";
  return comm;
}

CommunicatorEnd* World::EndOf(const std::string& address) {
  for (auto& [id, end] : ends_) {
    if (end.address == address) return &end;
  }
  return nullptr;
}

CommunicatorEnd* World::FindEnd(int d, int g, CommunicatorId communicator) {
  const Machine* m = Find(d, g);
  for (auto& [id, end] : ends_) {
    if (end.d == d && end.g == g && end.communicator == communicator && m != nullptr &&
        end.nonce == m->nonce) {
      return &end;
    }
  }
  return nullptr;
}

std::vector<uint64_t> World::EndsOf(const std::string& comm) const {
  std::vector<uint64_t> found;
  for (const auto& [id, end] : ends_) {
    if (!end.addresses.empty() && CommOf(end) == comm) found.push_back(id);
  }
  return found;
}

void World::On(int d, int g, const OpenCommunicator& a) {
  const Machine* m = Find(d, g);
  if (FindEnd(d, g, a.communicator) != nullptr) {
    return Violate("P5",
                   fmt::format("d{} g{}: communicator {} is opened twice", d, g, a.communicator));
  }
  CommunicatorEnd end;
  end.id = ++nonces_;
  end.d = d;
  end.g = g;
  end.life = DaemonAt(d).life;
  end.nonce = m->nonce;
  end.coordinator = m->coordinator_nonce;
  end.communicator = a.communicator;
  end.rank = a.rank;
  end.size = a.size;
  end.address = fmt::format("e{}", end.id);
  const bool fails = random_.PerMille(chances_.communicator_fails);
  if (fails) Count(Fault::kCommunicatorFailed);
  const CommunicatorOpened opened{a.communicator,
                                  fails ? absl::UnavailableError("no device") : absl::OkStatus(),
                                  fails ? "" : end.address};
  ends_[end.id] = end;
  if (DaemonAt(d).wire_trouble == Daemon::WireTrouble::kNeverOpens) {
    Count(Fault::kWireOneSided);
    return;
  }
  InDaemon(d, random_.Micros(200, 8000),
           [this, d, g, nonce = m->nonce, opened] { FeedTo(d, g, nonce, opened); });
}

void World::On(int d, int g, const ConnectCommunicator& a) {
  CommunicatorEnd* end = FindEnd(d, g, a.communicator);
  if (end == nullptr || end->closed || static_cast<int>(a.addresses.size()) != end->size ||
      a.addresses[static_cast<size_t>(end->rank)] != end->address) {
    return Violate("P5", fmt::format("d{} g{}: communicator {} is connected, but was not opened so",
                                     d, g, a.communicator));
  }
  end->connecting = true;
  end->addresses = a.addresses;
  const uint64_t id = end->id;
  if (random_.PerMille(chances_.communicator_fails)) {
    Count(Fault::kCommunicatorFailed);
    InDaemon(d, random_.Millis(1, 100),
             [this, id] { AnswerCommunicator(id, absl::UnavailableError("connection refused")); });
  }
  InDaemon(d, a.timeout, [this, id] {
    const auto it = ends_.find(id);
    const int rank = it == ends_.end() || nameless_ ? -1 : OutOfReach(it->second);
    if (nameless_ && it != ends_.end() && !it->second.answered) Count(Fault::kWireNameless);
    absl::Status late = absl::DeadlineExceededError("not all connected");
    if (rank >= 0) late = AboutRanks(std::move(late), {rank});
    AnswerCommunicator(id, std::move(late));
  });
  CompleteCommunicator(id, now_ + a.timeout);
}

int World::OutOfReach(const CommunicatorEnd& end) const {
  const auto trouble = [this](int d) {
    return daemons_[static_cast<size_t>(d)].wire_trouble == Daemon::WireTrouble::kNeverConnects;
  };
  for (int rank = 0; rank < end.size; ++rank) {
    if (rank == end.rank) continue;
    if (trouble(end.d)) return rank;
    for (const auto& [id, other] : ends_) {
      if (other.address == end.addresses[static_cast<size_t>(rank)] && trouble(other.d))
        return rank;
    }
  }
  return -1;
}

// A communicator is up when every end that the addresses name has connected to the same addresses.
void World::CompleteCommunicator(uint64_t id, TimePoint give_up) {
  const auto it = ends_.find(id);
  if (it == ends_.end() || it->second.closed || it->second.answered) return;
  const std::vector<std::string> addresses = it->second.addresses;
  std::vector<uint64_t> all;
  TimePoint blocked = now_;
  for (const std::string& address : addresses) {
    const CommunicatorEnd* end = EndOf(address);
    if (end == nullptr || end->closed || !end->connecting || end->addresses != addresses) return;
    if (DaemonAt(end->d).wire_trouble == Daemon::WireTrouble::kNeverConnects) {
      Count(Fault::kWireOneSided);
      if (options_.bug != Bug::kBlindWire) return;
      broken_comms_.insert(CommOf(it->second));
    }
    all.push_back(end->id);
    blocked = std::max(blocked, BlockedUntil(it->second.d, end->d));
  }
  if (blocked > now_) {
    if (blocked < give_up) {
      In(blocked - now_, [this, id, give_up] { CompleteCommunicator(id, give_up); });
    }
    return;
  }
  for (const uint64_t other : all) {
    const int d = ends_.at(other).d;
    if (DaemonAt(d).wire_trouble == Daemon::WireTrouble::kNotForItself) {
      Count(Fault::kWireOneSided);  // it does not hear the others, and they hear it
      continue;
    }
    InDaemon(d, random_.Micros(200, 10'000),
             [this, other] { AnswerCommunicator(other, absl::OkStatus()); });
  }
}

void World::AnswerCommunicator(uint64_t id, const absl::Status& status) {
  const auto it = ends_.find(id);
  if (it == ends_.end() || it->second.answered) return;
  CommunicatorEnd& end = it->second;
  end.answered = true;
  end.up = status.ok() && !end.closed;
  FeedTo(end.d, end.g, end.nonce, CommunicatorUp{end.communicator, status});
}

void World::On(int d, int g, const CloseCommunicator& a) {
  CommunicatorEnd* end = FindEnd(d, g, a.communicator);
  if (end == nullptr || end->closed) {
    return Violate("P5", fmt::format("d{} g{}: communicator {} is closed, but is not open", d, g,
                                     a.communicator));
  }
  end->closed = true;
  end->up = false;
  const uint64_t id = end->id;
  if (end->connecting && !end->answered) {
    InDaemon(d, random_.Millis(0, 50),
             [this, id] { AnswerCommunicator(id, absl::CancelledError("closed")); });
  }
  if (!end->connecting) return;
  const std::string comm = CommOf(*end);
  const auto rank = static_cast<uint32_t>(end->rank);
  for (const auto& [seq, op] : comms_[comm]) {
    if (!op.running.contains(rank)) continue;
    InDaemon(d, random_.Micros(100, 50'000), [this, id, seq = seq] {
      EndWire(id, seq, absl::AbortedError("the communicator was closed"));
    });
  }
  broken_comms_.insert(comm);
  if (random_.Percent(70)) BreakComm(comm, milliseconds(1), milliseconds(800));
}

// ---- collectives ----

// Checks what must hold for every operation of a communicator; null: it does not.
CommunicatorEnd* World::CheckWire(int d, int g, CommunicatorId communicator, WireSeq seq,
                                  Duration timeout, const std::string& where) {
  CommunicatorEnd* end = FindEnd(d, g, communicator);
  if (end == nullptr || end->closed) {
    Violate("P5", where + " starts, but the communicator is not open");
    return nullptr;
  }
  if (timeout <= Duration(0)) Violate("P4", where + " has no time limit");
  if (end->last.has_value() && seq <= *end->last) {
    Violate("P7", fmt::format("{} starts after operation {}", where, *end->last));
  }
  end->last = seq;
  for (const auto& [id, other] : ends_) {
    if (other.d != d || other.g == g) continue;
    for (const auto& [running, op] : comms_[CommOf(other)]) {
      if (op.running.contains(static_cast<uint32_t>(other.rank))) {
        Violate("P7",
                fmt::format("{} starts while operation {} of g{} runs", where, running, other.g));
      }
    }
  }
  if (options_.bug != Bug::kSharedWire && DaemonAt(d).lock.holder() != GroupOf(g).name) {
    Violate("P7", where + " starts without the wire");
  }
  return over_ ? nullptr : end;
}

void World::On(int d, int g, const StartWire& a) {
  Machine* m = Find(d, g);
  const std::string where =
      fmt::format("d{} g{}: operation {} of communicator {}", d, g, a.seq, a.communicator);
  CommunicatorEnd* end = CheckWire(d, g, a.communicator, a.seq, a.timeout, where);
  if (end == nullptr) return;
  if (static_cast<uint32_t>(end->rank) != a.rank || end->size != a.size) {
    return Violate("P5", where + " starts, but the communicator is not open so");
  }
  const auto header = headers_.find({g, m->coordinator_nonce, a.communicator, a.seq});
  if (header == headers_.end()) return Violate("P5", where + " starts, but has no header");
  const HeaderRecord& record = header->second;
  for (const NodeId node : record.sent) {
    if (!record.acknowledged.contains(node)) {
      return Violate("P5",
                     fmt::format("{} starts before node {} acknowledged its header", where, node));
    }
  }
  if (record.sent.size() + 1 < record.ranks) {
    return Violate("P5", where + " starts before all nodes got its header");
  }
  const std::string comm = CommOf(*end);
  WireOp& op = comms_[comm][a.seq];
  if (op.started.empty()) {
    op.bytes = a.bytes;
    op.slot = a.slot;
    op.ranks = a.ranks;
    op.root = a.ranks.empty() ? 0 : a.ranks[0];
  } else if (!op.shares.empty() || op.bytes != a.bytes || op.slot != a.slot ||
             op.ranks != a.ranks) {
    return Violate("P5", where + " differs from what another node started");
  }
  if (std::find(a.ranks.begin(), a.ranks.end(), a.rank) == a.ranks.end()) {
    return Violate("P5", where + " is not this node's");
  }
  const uint64_t use = UseSlot(m->pool.get(), a.slot, where + " runs");
  if (over_) return;
  op.started.insert(a.rank);
  op.running[a.rank] = {{a.slot.slot, use}};
  op.pools[a.rank] = m->pool;
  if (a.rank == op.root) op.source = m->pool;
  RunWire(end, a.seq, a.timeout);
}

void World::RunWire(CommunicatorEnd* end, WireSeq seq, Duration timeout) {
  const uint64_t id = end->id;
  const int d = end->d;
  const std::string comm = CommOf(*end);
  InDaemon(d, timeout, [this, id, seq] {
    EndWire(id, seq, absl::DeadlineExceededError("the collective took too long"));
  });
  if (broken_comms_.contains(comm) || random_.PerMille(chances_.wire_fails)) {
    if (!broken_comms_.contains(comm)) Count(Fault::kWireFailed);
    InDaemon(d, random_.Millis(1, 300),
             [this, id, seq] { EndWire(id, seq, absl::UnavailableError("reset by peer")); });
    return;
  }
  TryWire(comm, seq);
}

// Completes the operation if all its ranks have started it; a rank completes it after the rank's
// earlier operations.
void World::TryWire(const std::string& comm, WireSeq seq) {
  const auto found = comms_[comm].find(seq);
  if (found == comms_[comm].end() || broken_comms_.contains(comm)) return;
  WireOp& op = found->second;
  if (!op.shares.empty()) return TryExchange(comm, seq);
  if (op.completing || op.started.size() != op.ranks.size()) return;
  std::map<uint32_t, uint64_t> ids;
  for (const uint64_t id : EndsOf(comm)) ids[static_cast<uint32_t>(ends_.at(id).rank)] = id;
  TimePoint blocked = now_;
  TimePoint start = now_;
  for (const uint32_t rank : op.ranks) {
    if (!op.running.contains(rank) || !ids.contains(rank)) return;
    const CommunicatorEnd& end = ends_.at(ids.at(rank));
    start = std::max(start, end.free_at);
    blocked = std::max(blocked, BlockedUntil(end.d, ends_.at(ids.at(op.root)).d));
  }
  if (blocked > now_) {
    In(blocked - now_, [this, comm, seq] { TryWire(comm, seq); });
    return;
  }
  op.completing = true;
  const TimePoint done = start + random_.Micros(100, 5000);
  for (const uint32_t rank : op.ranks) {
    CommunicatorEnd& end = ends_.at(ids.at(rank));
    end.free_at = done + random_.Micros(0, 1500);
    const uint64_t id = end.id;
    if (rank != op.root && random_.Percent(50)) {
      // Some of the bytes arrive before the rest.
      InDaemon(end.d, (done - now_) / 2, [this, comm, seq, rank] {
        const auto it = comms_[comm].find(seq);
        if (it == comms_[comm].end() || !it->second.running.contains(rank)) return;
        const size_t slot = it->second.slot.slot.value();
        const auto& from = it->second.source->slots[slot];
        auto& to = it->second.pools.at(rank)->slots[slot];
        std::copy_n(from.begin(), it->second.bytes / kElementBytes / 2, to.begin());
      });
    }
    InDaemon(end.d, end.free_at - now_, [this, id, seq] { EndWire(id, seq, absl::OkStatus()); });
  }
}

void World::EndWire(uint64_t id, WireSeq seq, const absl::Status& status) {
  const auto found = ends_.find(id);
  if (found == ends_.end()) return;
  CommunicatorEnd& end = found->second;
  const std::string comm = CommOf(end);
  const auto it = comms_[comm].find(seq);
  const auto rank = static_cast<uint32_t>(end.rank);
  if (it == comms_[comm].end() || !it->second.running.contains(rank)) return;
  WireOp& op = it->second;
  const size_t slot = op.slot.slot.value();
  const auto cells = static_cast<size_t>(op.bytes / kElementBytes);
  const std::shared_ptr<Pool> pool = op.pools.at(rank);
  if (!op.shares.empty()) {
    if (status.ok()) ReceiveShare(end, &op);
  } else if (status.ok() && rank == op.root) {
    op.sent.emplace(pool->slots[slot].begin(),
                    pool->slots[slot].begin() + static_cast<int64_t>(cells));
  } else if (status.ok()) {
    const std::vector<Tag>& from = op.sent.has_value() ? *op.sent : op.source->slots[slot];
    std::copy_n(from.begin(), cells, pool->slots[slot].begin());
    if (GroupOf(end.g).verification != Verification::kOff && cells > 0 &&
        random_.PerMille(chances_.bytes_damaged)) {
      Count(Fault::kBytesDamaged);
      pool->slots[slot][0] |= kDamageBit;
    }
  }
  for (const auto& [used, use] : op.running.at(rank)) EndUse(pool.get(), used, use);
  op.running.erase(rank);
  if (op.shares.empty() && op.running.empty() && op.started.size() == op.ranks.size())
    comms_[comm].erase(it);
  if (!status.ok()) {
    broken_comms_.insert(comm);
    if (random_.Percent(70)) BreakComm(comm, milliseconds(1), milliseconds(800));
  }
  FeedTo(end.d, end.g, end.nonce, WireDone{end.communicator, seq, status});
}

// Breaks a communicator: ranks that wait in it hear of that at `latest`.
void World::BreakComm(const std::string& comm, Duration soonest, Duration latest) {
  broken_comms_.insert(comm);
  for (const uint64_t id : EndsOf(comm)) {
    for (const auto& [seq, op] : comms_[comm]) {
      if (!op.running.contains(static_cast<uint32_t>(ends_.at(id).rank))) continue;
      InDaemon(
          ends_.at(id).d, random_.Millis(ToMillis(soonest), ToMillis(latest)),
          [this, id, seq = seq] { EndWire(id, seq, absl::UnavailableError("reset by peer")); });
    }
  }
}

}  // namespace refitd::sim
