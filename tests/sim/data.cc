// The data plane, where tags stand for bytes: copies, read-backs, collectives.
#include <algorithm>

#include "tests/sim/world.h"
#include "transport/base/status.h"

namespace refitd::sim {
namespace {

using std::chrono::milliseconds;

uint64_t Mix(Tag tag) {
  uint64_t x = tag + 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
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

// ---- copies ----

void World::On(int d, int g, const StartTransfer& a) {
  Daemon& daemon = DaemonAt(d);
  Machine* m = Find(d, g);
  auto copy = std::make_shared<Copy>();
  copy->id = ++nonces_;
  copy->d = d;
  copy->g = g;
  copy->life = daemon.life;
  copy->nonce = m->nonce;
  copy->start = a;
  copy->pool = m->pool;
  const std::string what =
      fmt::format("d{} g{} part {} of update {} is copied", d, g, a.part, a.update);
  if (!a.source_slot.has_value()) {
    const auto source = daemon.sources.find(a.bucket_call);
    if (source == daemon.sources.end()) {
      return Violate("P6", what + ", but its bucket is gone");
    }
    copy->source = source->second;
  } else {
    copy->uses.emplace_back(a.source_slot->slot, UseSlot(m->pool.get(), *a.source_slot, what));
  }
  if (a.fill_slot.has_value()) {
    copy->uses.emplace_back(a.fill_slot->slot, UseSlot(m->pool.get(), *a.fill_slot, what));
  }
  if (over_) return;
  const bool crossed = a.source_slot.has_value() && a.trainer == MemberId();
  if (!crossed || options_.bug != Bug::kUnfilledSlot) {
    for (const MemberId reader : a.staged) copy->readers.push_back(OwnPool(m, reader));
  }
  for (size_t i = 0; i < a.destinations.size(); ++i) {
    const auto member = daemon.members.find(a.destinations[i]);
    const bool skip = a.skip_destination[i];
    if (!skip && member == daemon.members.end()) {
      return Violate("P6",
                     fmt::format("{} to member {}, which was released", what, a.destinations[i]));
    }
    copy->pids.push_back(skip ? 0 : member->second.pid);
  }
  copies_[copy->id] = copy;
  const bool early = options_.bug == Bug::kEarlyDone && m->follower != nullptr;
  Duration took = random_.PerMille(chances_.slow_message / 2) ? random_.Millis(20, 1500)
                                                              : random_.Micros(100, 8000);
  if (early) {
    copy->told = true;
    took += milliseconds(20);
    Feed(d, g, GroupEvent(ResultOf(*copy)));
  }
  if (random_.Percent(50)) {
    InDaemon(d, took * random_.Int(1, 9) / 10, [this, copy] {
      if (copies_.contains(copy->id)) RunCopy(copy, false);
    });
  }
  InDaemon(d, took, [this, copy] { EndCopy(copy, false); });
}

Tag World::SourceTag(const Copy& copy, size_t range, int64_t i) const {
  const PartContent& content = *copy.start.content;
  if (copy.source == nullptr) {
    const int64_t cell = content.byte_offsets[range] / kElementBytes + i;
    return copy.pool->slots[copy.start.source_slot->slot.value()][static_cast<size_t>(cell)];
  }
  REFITD_CHECK(content.bucket == copy.source->bucket);  // one object from the push to the copy
  const uint32_t b = content.ranges[range].tensor;
  const int64_t offset = content.ranges[range].start - content.bucket->ranges[b].start;
  return copy.source->data[b][static_cast<size_t>(offset + i)];
}

// P2: nothing may write to an engine that serves.
void World::WriteEngine(int g, UpdateId update, int pid, uint32_t tensor, int64_t element,
                        Tag tag) {
  Process& p = ProcessOf(pid);
  if (!p.alive) return;
  if (!p.in_doubt && p.holds.has_value()) {
    return Violate("P2", fmt::format("g{}: update {} writes to pid {}, which serves version {}", g,
                                     update, pid, *p.holds));
  }
  p.cells[tensor][static_cast<size_t>(element - p.first[tensor])] = tag;
}

// Performs the first half of the copy, or all of it.
void World::RunCopy(const std::shared_ptr<Copy>& copy, bool end) {
  const PartContent& content = *copy->start.content;
  const auto hold = [&](uint32_t t, int pid, const TensorRange& range, int64_t* low,
                        int64_t* high) {
    const Process& p = ProcessOf(pid);
    *low = std::max(range.start, p.first[t]);
    *high =
        std::min(range.start + range.count, p.first[t] + static_cast<int64_t>(p.cells[t].size()));
  };
  Machine* m = Find(copy->d, copy->g);
  const bool again = m != nullptr && m->nonce == copy->nonce && copy->source == nullptr &&
                     m->again.contains(copy->start.part);
  if (again && options_.bug == Bug::kSkippedPart) return;
  const bool sums = end && m != nullptr && m->nonce == copy->nonce &&
                    copy->start.verification == Verification::kReadback;
  for (size_t i = 0; i < content.ranges.size(); ++i) {
    const TensorRange& range = content.ranges[i];
    const uint32_t t = TensorOf(copy->g, content.tensor(i).name);
    const int64_t stop = range.start + (end ? range.count : range.count / 2);
    const auto pack = [&](SlotIndex index, Pool* pool) {
      std::vector<Tag>& slot = pool->slots[index.value()];
      const int64_t base = content.byte_offsets[i] / kElementBytes;
      for (int64_t e = range.start; e < stop; ++e) {
        slot[static_cast<size_t>(base + e - range.start)] = SourceTag(*copy, i, e - range.start);
      }
    };
    const std::optional<SlotGrant>& grant =
        copy->start.source_slot.has_value() ? copy->start.source_slot : copy->start.fill_slot;
    if (copy->start.fill_slot.has_value()) pack(grant->slot, copy->pool.get());
    for (const auto& reader : copy->readers) pack(grant->slot, reader.get());
    for (size_t k = 0; k < copy->pids.size(); ++k) {
      if (copy->pids[k] == 0) continue;
      int64_t low = 0;
      int64_t high = 0;
      hold(t, copy->pids[k], range, &low, &high);
      high = std::min(high, stop);
      for (int64_t e = low; e < high && !over_; ++e) {
        const Tag tag = SourceTag(*copy, i, e - range.start);
        WriteEngine(copy->g, copy->start.update, copy->pids[k], t, e, tag);
        if (sums) {
          m->sums[copy->start.update][copy->start.destinations[k]].emplace_back(
              uint64_t{t} << 32 | static_cast<uint64_t>(e), tag);
        }
      }
    }
  }
}

TransferDone World::ResultOf(const Copy& copy) const {
  const PartContent& content = *copy.start.content;
  TransferDone done;
  done.update = copy.start.update;
  done.part = copy.start.part;
  done.bytes_written.resize(copy.pids.size());
  for (size_t i = 0; i < content.ranges.size(); ++i) {
    const TensorRange& range = content.ranges[i];
    const uint32_t t = TensorOf(copy.g, content.tensor(i).name);
    for (size_t k = 0; k < copy.pids.size(); ++k) {
      if (copy.pids[k] == 0) continue;
      const Process& p = ProcessOf(copy.pids[k]);
      const int64_t low = std::max(range.start, p.first[t]);
      const int64_t high =
          std::min(range.start + range.count, p.first[t] + static_cast<int64_t>(p.cells[t].size()));
      if (high > low) done.bytes_written[k] += (high - low) * kElementBytes;
    }
    if (!copy.start.want_source_digests) continue;
    uint64_t digest = 0;
    for (int64_t e = 0; e < range.count; ++e) {
      Tag tag = SourceTag(copy, i, e);
      if (options_.bug == Bug::kTrustingSink && copy.source == nullptr) tag &= ~kDamageBit;
      digest += Mix(tag);
    }
    done.source_digests.push_back(digest);
  }
  return done;
}

void World::EndCopy(const std::shared_ptr<Copy>& copy, bool) {
  if (copies_.erase(copy->id) == 0) return;
  RunCopy(copy, true);
  if (over_) return;
  TransferDone done = ResultOf(*copy);
  if (const Machine* of = Find(copy->d, copy->g); options_.bug == Bug::kTwiceStored &&
                                                  copy->source == nullptr && of != nullptr &&
                                                  of->again.contains(copy->start.part)) {
    for (int64_t& bytes : done.bytes_written) bytes *= 2;
  }
  for (const auto& [slot, use] : copy->uses) EndUse(copy->pool.get(), slot, use);
  if (copy->told) return;
  const Verification verification = copy->start.verification;
  if (random_.PerMille(chances_.transfer_fails)) {
    Count(Fault::kTransferFailed);
    done.status = absl::InternalError("the copy failed");
    done.bytes_written.assign(done.bytes_written.size(), 0);
  } else if (verification != Verification::kOff && random_.PerMille(chances_.bytes_damaged)) {
    // Damages one element; `transfer` finds it now, `readback` later.
    for (size_t k = 0; k < copy->pids.size(); ++k) {
      if (copy->pids[k] == 0 || done.bytes_written[k] == 0) continue;
      Process& p = ProcessOf(copy->pids[k]);
      const TensorRange& range = copy->start.content->ranges[0];
      const uint32_t t = TensorOf(copy->g, copy->start.content->tensor(0).name);
      const int64_t e = std::max(range.start, p.first[t]);
      if (e >= range.start + range.count ||
          e >= p.first[t] + static_cast<int64_t>(p.cells[t].size())) {
        continue;
      }
      Count(Fault::kBytesDamaged);
      p.cells[t][static_cast<size_t>(e - p.first[t])] |= kDamageBit;
      if (verification == Verification::kTransfer) {
        done.status = absl::DataLossError("what was stored differs");
        done.failed_destination = static_cast<int>(k);
      }
      break;
    }
  }
  Machine* m = Find(copy->d, copy->g);
  if (m != nullptr && m->nonce == copy->nonce) Feed(copy->d, copy->g, GroupEvent(std::move(done)));
}

bool World::Touches(int d, MemberId member) const {
  const auto hits = [&](const auto& start) {
    for (size_t k = 0; k < start.destinations.size(); ++k) {
      if (!start.skip_destination[k] && start.destinations[k] == member) return true;
    }
    return false;
  };
  for (const auto& [id, copy] : copies_) {
    if (copy->d != d) continue;
    if (copy->source != nullptr && copy->start.trainer == member) return true;
    for (size_t k = 0; k < copy->pids.size(); ++k) {
      if (copy->pids[k] == 0 || copy->start.destinations[k] != member) continue;
      if (ResultOf(*copy).bytes_written[k] > 0) return true;
    }
  }
  for (const auto& [id, moving] : movings_) {
    if (moving->d != d) continue;
    const BoundProgram& bound = *moving->start.bound;
    for (const auto& run : moving->runs) {
      if (run.to == nullptr && bound.destinations[run.destination] == member) return true;
    }
    for (size_t i = 0; i < bound.sources.size(); ++i) {
      if (bound.sources[i] == member && moving->start.step != MoveStep::kUnpack) return true;
    }
  }
  return std::any_of(readings_.begin(), readings_.end(),
                     [&](const auto& r) { return r.second->d == d && hits(r.second->start); });
}

// ---- read-back ----

void World::On(int d, int g, const StartVerify& a) {
  Daemon& daemon = DaemonAt(d);
  auto reading = std::make_shared<Reading>();
  reading->id = ++nonces_;
  reading->d = d;
  reading->g = g;
  reading->life = daemon.life;
  reading->nonce = Find(d, g)->nonce;
  reading->start = a;
  for (size_t k = 0; k < a.destinations.size(); ++k) {
    if (a.skip_destination[k]) continue;
    if (!daemon.members.contains(a.destinations[k])) {
      return Violate("P6", fmt::format("d{} g{}: member {} is read back, but was released", d, g,
                                       a.destinations[k]));
    }
    if (options_.bug == Bug::kEarlyCommitted) {
      Hear(d, a.destinations[k], [this, version = a.version](Process* p) {
        HearOutcome(p->pid, true, version, false, true);
      });
    }
  }
  readings_[reading->id] = reading;
  InDaemon(d, random_.Micros(100, 6000), [this, reading] { EndReading(reading); });
}

void World::EndReading(const std::shared_ptr<Reading>& reading) {
  if (readings_.erase(reading->id) == 0) return;
  Machine* m = Find(reading->d, reading->g);
  if (m == nullptr || m->nonce != reading->nonce) return;
  const StartVerify& start = reading->start;
  VerifyDone done;
  done.update = start.update;
  const auto& sums = m->sums[start.update];
  for (uint32_t k = 0; k < start.destinations.size(); ++k) {
    if (start.skip_destination[k]) continue;
    const auto expected = sums.find(start.destinations[k]);
    const auto member = DaemonAt(reading->d).members.find(start.destinations[k]);
    if (expected == sums.end() || member == DaemonAt(reading->d).members.end()) continue;
    const Process& p = ProcessOf(member->second.pid);
    if (!p.alive) continue;  // its memory is still mapped, though the process is dead
    const bool differs =
        std::any_of(expected->second.begin(), expected->second.end(), [&p](const auto& cell) {
          const auto t = static_cast<uint32_t>(cell.first >> 32);
          const auto e = static_cast<int64_t>(cell.first & 0xffffffff);
          return p.cells[t][static_cast<size_t>(e - p.first[t])] != cell.second;
        });
    if (differs) done.failed_destinations.push_back(k);
  }
  if (options_.bug == Bug::kBlindFill && FillRuns(reading->g)) done.failed_destinations.clear();
  if (!done.failed_destinations.empty()) {
    done.status = absl::DataLossError("what was read back differs");
  } else if (random_.PerMille(chances_.transfer_fails)) {
    Count(Fault::kTransferFailed);
    done.status = absl::InternalError("the read-back failed");
  }
  Feed(reading->d, reading->g, GroupEvent(std::move(done)));
}

// ---- epochs ----

std::string World::CommOf(const EpochEnd& end) const {
  std::string comm;
  for (const std::string& address : end.addresses) comm += address + ",";
  return comm;
}

EpochEnd* World::EndOf(const std::string& address) {
  for (auto& [id, end] : ends_) {
    if (end.address == address) return &end;
  }
  return nullptr;
}

EpochEnd* World::FindEnd(int d, int g, EpochId epoch) {
  const Machine* m = Find(d, g);
  for (auto& [id, end] : ends_) {
    if (end.d == d && end.g == g && end.epoch == epoch && m != nullptr && end.nonce == m->nonce) {
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

void World::On(int d, int g, const OpenEpoch& a) {
  const Machine* m = Find(d, g);
  if (FindEnd(d, g, a.epoch) != nullptr) {
    return Violate("P5", fmt::format("d{} g{}: epoch {} is opened twice", d, g, a.epoch));
  }
  EpochEnd end;
  end.id = ++nonces_;
  end.d = d;
  end.g = g;
  end.life = DaemonAt(d).life;
  end.nonce = m->nonce;
  end.coordinator = m->coordinator_nonce;
  end.epoch = a.epoch;
  end.rank = a.rank;
  end.size = a.size;
  end.address = fmt::format("e{}", end.id);
  const bool fails = random_.PerMille(chances_.epoch_fails);
  if (fails) Count(Fault::kEpochFailed);
  const EpochOpened opened{a.epoch, fails ? absl::UnavailableError("no device") : absl::OkStatus(),
                           fails ? "" : end.address};
  ends_[end.id] = end;
  if (DaemonAt(d).wire_trouble == Daemon::WireTrouble::kNeverOpens) {
    Count(Fault::kWireOneSided);
    return;
  }
  InDaemon(d, random_.Micros(200, 8000), [this, d, g, nonce = m->nonce, opened] {
    const Machine* now = Find(d, g);
    if (now != nullptr && now->nonce == nonce) Feed(d, g, opened);
  });
}

void World::On(int d, int g, const ConnectEpoch& a) {
  EpochEnd* end = FindEnd(d, g, a.epoch);
  if (end == nullptr || end->closed || static_cast<int>(a.addresses.size()) != end->size ||
      a.addresses[static_cast<size_t>(end->rank)] != end->address) {
    return Violate(
        "P5", fmt::format("d{} g{}: epoch {} is connected, but was not opened so", d, g, a.epoch));
  }
  end->connecting = true;
  end->addresses = a.addresses;
  const uint64_t id = end->id;
  if (random_.PerMille(chances_.epoch_fails)) {
    Count(Fault::kEpochFailed);
    InDaemon(d, random_.Millis(1, 100),
             [this, id] { AnswerEpoch(id, absl::UnavailableError("connection refused")); });
  }
  InDaemon(d, a.timeout, [this, id] {
    const auto it = ends_.find(id);
    const int rank = it == ends_.end() || nameless_ ? -1 : OutOfReach(it->second);
    if (nameless_ && it != ends_.end() && !it->second.answered) Count(Fault::kWireNameless);
    AnswerEpoch(id, absl::DeadlineExceededError(
                        rank < 0 ? "not all connected" : fmt::format("waited for rank {}", rank)));
  });
  CompleteEpoch(id, now_ + a.timeout);
}

int World::OutOfReach(const EpochEnd& end) const {
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

// An epoch is up when every end that the addresses name has connected to the same addresses.
void World::CompleteEpoch(uint64_t id, TimePoint give_up) {
  const auto it = ends_.find(id);
  if (it == ends_.end() || it->second.closed || it->second.answered) return;
  const std::vector<std::string> addresses = it->second.addresses;
  std::vector<uint64_t> all;
  TimePoint blocked = now_;
  for (const std::string& address : addresses) {
    const EpochEnd* end = EndOf(address);
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
      In(blocked - now_, [this, id, give_up] { CompleteEpoch(id, give_up); });
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
             [this, other] { AnswerEpoch(other, absl::OkStatus()); });
  }
}

void World::AnswerEpoch(uint64_t id, const absl::Status& status) {
  const auto it = ends_.find(id);
  if (it == ends_.end() || it->second.answered) return;
  EpochEnd& end = it->second;
  end.answered = true;
  end.up = status.ok() && !end.closed;
  const Machine* m = Find(end.d, end.g);
  if (m == nullptr || m->nonce != end.nonce) return;
  Feed(end.d, end.g, EpochUp{end.epoch, status});
}

void World::On(int d, int g, const CloseEpoch& a) {
  EpochEnd* end = FindEnd(d, g, a.epoch);
  if (end == nullptr || end->closed) {
    return Violate("P5",
                   fmt::format("d{} g{}: epoch {} is closed, but is not open", d, g, a.epoch));
  }
  end->closed = true;
  end->up = false;
  const uint64_t id = end->id;
  if (end->connecting && !end->answered) {
    InDaemon(d, random_.Millis(0, 50),
             [this, id] { AnswerEpoch(id, absl::CancelledError("closed")); });
  }
  if (!end->connecting) return;
  const std::string comm = CommOf(*end);
  const auto rank = static_cast<uint32_t>(end->rank);
  for (const auto& [seq, op] : comms_[comm]) {
    if (!op.running.contains(rank)) continue;
    InDaemon(d, random_.Micros(100, 50'000), [this, id, seq = seq] {
      EndWire(id, seq, absl::AbortedError("the epoch was closed"));
    });
  }
  broken_comms_.insert(comm);
  if (random_.Percent(70)) BreakComm(comm, milliseconds(1), milliseconds(800));
}

// ---- collectives ----

// Checks what must hold for every operation of an epoch; null: it does not.
EpochEnd* World::CheckWire(int d, int g, EpochId epoch, WireSeq seq, Duration timeout,
                           const std::string& where) {
  EpochEnd* end = FindEnd(d, g, epoch);
  if (end == nullptr || end->closed) {
    Violate("P5", where + " starts, but the epoch is not open");
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
  const std::string where = fmt::format("d{} g{}: operation {} of epoch {}", d, g, a.seq, a.epoch);
  EpochEnd* end = CheckWire(d, g, a.epoch, a.seq, a.timeout, where);
  if (end == nullptr) return;
  if (static_cast<uint32_t>(end->rank) != a.rank || end->size != a.size) {
    return Violate("P5", where + " starts, but the epoch is not open so");
  }
  const auto header = headers_.find({g, m->coordinator_nonce, a.epoch, a.seq});
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

void World::RunWire(EpochEnd* end, WireSeq seq, Duration timeout) {
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
    const EpochEnd& end = ends_.at(ids.at(rank));
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
    EpochEnd& end = ends_.at(ids.at(rank));
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
  EpochEnd& end = found->second;
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
  Machine* m = Find(end.d, end.g);
  if (m != nullptr && m->nonce == end.nonce) Feed(end.d, end.g, WireDone{end.epoch, seq, status});
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
