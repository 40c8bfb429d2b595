#include "daemon/node/data_plane.h"

#include <algorithm>
#include <utility>

#include "transport/base/errors.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

bool PassesSlot(const StartMoves& start) {
  return start.step == MoveStep::kPack || start.step == MoveStep::kUnpack;
}

}  // namespace

DataPlane::DataPlane(Options options, StateMutex* mutex, const State& state)
    : mutex_(*mutex),
      state_(state),
      no_device_wire_(std::move(options.no_device_wire)),
      max_rails_(options.max_rails),
      observer_(options.observer),
      compare_sides_(options.compare_sides),
      executor_(options.transport.get()),
      transport_(std::move(options.transport)),
      wire_(std::move(options.wire)),
      device_wire_(std::move(options.device_wire)) {}

void DataPlane::Report(const std::string& group, uint64_t id, MachineEvent event) {
  StateLock lock(&mutex_, StateLock::Order::kAhead);
  if (state_.groups->Find(group, id) != nullptr) lock.Handle(group, std::move(event));
}

void DataPlane::CountBytes(const std::string& group, MoveKind kind, int64_t bytes) const {
  if (observer_ != nullptr) observer_->BytesMoved(group, kind, bytes);
}

void DataPlane::StopThreads() {
  planner_.Stop();
  binder_.Stop();
  local_binder_.Stop();
  opener_.Stop();
}

// ---- members' memory ----

absl::StatusOr<MemorySpan> DataPlane::GroupMemory::Side(MemberId member, RegionId region,
                                                        bool back) const {
  const MemberRecord* const m = state_.members->Find(member);
  if (m == nullptr) return Error(absl::StatusCode::kInternal, "member {} is gone", member);
  const auto r = m->regions.find(m->Side(region, back));
  if (r != m->regions.end()) return r->second.memory;
  return Error(absl::StatusCode::kNotFound, "region {} of member {} is gone", region, member);
}

bool DataPlane::GroupMemory::Flipped(MemberId member) const {
  const MemberRecord* const m = state_.members->Find(member);
  return m != nullptr && m->flipped();
}

absl::StatusOr<MemorySpan> DataPlane::GroupMemory::Slot(SlotIndex slot) const {
  return state_.pools->WireSlot(group_, slot);
}

absl::StatusOr<MemorySpan> DataPlane::GroupMemory::SlotOf(MemberId member, SlotIndex slot) const {
  return state_.pools->Slot(group_, DeviceOf(member), slot);
}

std::string DataPlane::GroupMemory::LabelOf(MemberId member) const {
  const MemberRecord* const m = state_.members->Find(member);
  if (m == nullptr) return MemoryResolver::LabelOf(member);
  return m->engine ? fmt::format("engine {} rank {}", m->instance, m->rank)
                   : fmt::format("trainer rank {}", m->rank);
}

std::optional<int> DataPlane::GroupMemory::DeviceOf(MemberId member) const {
  const MemberRecord* const m = state_.members->Find(member);
  return m == nullptr ? std::nullopt : m->ordinal;
}

// ---- transfers ----

// Slots that another daemon's member packed or will read lie in host memory here.
bool DataPlane::UsesHostPool(const StartTransfer& start) const {
  const auto on_host = [this](MemberId id) {
    const MemberRecord* const member = state_.members->Find(id);
    return member == nullptr || !member->ordinal.has_value();
  };
  if (start.wired || (start.source_slot.has_value() && on_host(start.trainer))) return true;
  const bool broadcasts = start.broadcast != BroadcastMethod::kDirect;
  if (start.fill_slot.has_value() && start.readers.empty() && !broadcasts) return true;
  const bool slot = start.source_slot.has_value() || start.fill_slot.has_value();
  return slot && std::any_of(start.readers.begin(), start.readers.end(), on_host);
}

// A joined daemon erases members at once, so a transfer that was put off may still name an erased
// member.
StartTransfer DataPlane::WithoutErasedMembers(StartTransfer start) const {
  const auto erased = [this](MemberId id) { return !state_.members->Contains(id); };
  start.skip_destination.resize(start.destinations.size());
  for (size_t d = 0; d < start.destinations.size(); ++d) {
    if (erased(start.destinations[d])) start.skip_destination[d] = true;
  }
  std::erase_if(start.readers, erased);
  return start;
}

void DataPlane::Start(GroupRecord* group, StartTransfer start, StateLock& lock) {
  // The root packs as soon as it has a bucket, perhaps before a communicator was opened.
  if (UsesHostPool(start) && state_.pools->Lacks(*group)) {
    return state_.pools->Make(
        *group, [this, start = std::move(start)](GroupRecord* found, const absl::Status& made,
                                                 StateLock& then) {
          Start(found, WithoutErasedMembers(start), made, then);
        });
  }
  Start(group, start, absl::OkStatus(), lock);
}

void DataPlane::Start(GroupRecord* group, const StartTransfer& start, absl::Status status,
                      StateLock& lock) {
  const std::string name = group->name();
  if (status.ok() && UsesHostPool(start)) status = state_.pools->Ensure(*group);
  if (status.ok()) {
    const auto done = [this, name](const Executor::Done& d) { EndTransfer(name, d); };
    const GroupMemory memory = MemoryOf(*group);
    // P6: after the answer to its call, the bucket's source may be gone.
    if (start.bucket_call == CallId() || state_.calls->HasBucket(start.bucket_call)) {
      status = executor_.Start(start, memory, done);
    } else {
      status = absl::InternalError("the bucket is gone");
    }
  }
  if (!status.ok()) {
    lock.Post(name, PeerEvent(TransferDone{start.update, start.part, status, {}, -1, {}}));
  }
}

void DataPlane::EndTransfer(const std::string& group, const Executor::Done& done) {
  StateLock lock(&mutex_, StateLock::Order::kAhead);
  executor_.Finished(done);
  if (done.status.ok()) {
    int64_t bytes = done.slot_bytes;
    for (const int64_t written : done.bytes_written) bytes += written;
    CountBytes(group, MoveKind::kCopy, bytes);
  }
  lock.Handle(group, PeerEvent(static_cast<const TransferDone&>(done)));
}

void DataPlane::Start(GroupRecord* group, const StartVerify& verify, StateLock& lock) {
  const std::string name = group->name();
  if (!executor_.AnyWritten(verify.update)) {
    // A refit had nothing to move, so no thread is woken.
    lock.Post(name, PeerEvent(VerifyDone{verify.update, absl::OkStatus(), {}}));
    return;
  }
  const auto arenas =
      std::make_shared<const std::vector<OfDestination>>(SidesToCompare(*group, verify));
  const auto done = [this, name, arenas](const VerifyDone& d) {
    CompareThenReport(name, d, arenas, 0);
  };
  const absl::Status status = executor_.Start(verify, MemoryOf(*group), done);
  if (!status.ok()) lock.Post(name, PeerEvent(VerifyDone{verify.update, status, {}}));
}

std::vector<DataPlane::OfDestination> DataPlane::SidesToCompare(const GroupRecord& group,
                                                                const StartVerify& verify) const {
  std::vector<OfDestination> found;
  if (!compare_sides_) return found;
  for (uint32_t d = 0; d < verify.destinations.size(); ++d) {
    const MemberRecord* const member = state_.members->Find(verify.destinations[d]);
    const bool skipped = d < verify.skip_destination.size() && verify.skip_destination[d];
    if (skipped || member == nullptr || member->layout == nullptr) continue;
    std::vector<ComparedSides> sides = member->SidesOf(*member->layout, member->outside_bytes);
    if (sides.empty()) continue;
    found.push_back({d, MemoryOf(group).LabelOf(member->id), std::move(sides)});
  }
  return found;
}

void DataPlane::CompareThenReport(const std::string& group, VerifyDone verified,
                                  std::shared_ptr<const std::vector<OfDestination>> all,
                                  size_t next) {
  if (!verified.status.ok() || next == all->size()) {
    StateLock lock(&mutex_, StateLock::Order::kAhead);
    lock.Handle(group, PeerEvent(std::move(verified)));
    return;
  }
  const OfDestination& of = (*all)[next];
  refitd::CompareSides(
      transport_.get(), of.sides, of.label,
      [this, group, verified = std::move(verified), all, next](const absl::Status& equal) mutable {
        if (!equal.ok()) {
          verified.status =
              WithFailureOf(equal, Error(absl::StatusCode::kDataLoss, "{}", Message(equal)));
          verified.failed_destinations = {(*all)[next].index};
        }
        CompareThenReport(group, std::move(verified), all, next + 1);
      });
}

void DataPlane::CompareSides(std::vector<ComparedSides> sides, const std::string& label,
                             std::function<void(const absl::Status&)> done) {
  refitd::CompareSides(transport_.get(), std::move(sides), label, std::move(done));
}

absl::Status DataPlane::Digest(const GroupRecord& group, MemberId member,
                               const std::shared_ptr<const Layout>& layout,
                               std::function<void(absl::StatusOr<uint64_t>)> done) {
  return executor_.Digest(member, layout, MemoryOf(group), std::move(done));
}

// ---- compiled refits ----

void DataPlane::Compile(const GroupRecord& group, PlanRefit a) {
  ++asked_.plans;
  planner_.Submit(group.id, [this, name = group.name(), id = group.id, a = std::move(a)] {
    Report(name, id, CompilePlan(a));
  });
}

void DataPlane::Build(const GroupRecord& group, BuildProgram a) {
  const auto place = [this](const std::vector<MemberId>& ids, std::vector<LocalMember>* members) {
    for (size_t i = 0; i < ids.size(); ++i) {
      const MemberRecord* const member = state_.members->Find(ids[i]);
      if (member == nullptr) continue;
      (*members)[i].device = member->ordinal.value_or(LocalMember::kNoDevice);
    }
  };
  ++asked_.programs;
  place(a.source_members, &a.sources);
  place(a.destination_members, &a.destinations);
  planner_.Submit(group.id, [this, name = group.name(), id = group.id, a = std::move(a)]() mutable {
    Report(name, id, CompilePart(std::move(a)));
  });
}

void DataPlane::Start(GroupRecord* group, const StartMoves& start, StateLock& lock) {
  if (PassesSlot(start) && state_.pools->Lacks(*group)) {
    return state_.pools->Make(
        *group, [this, start](GroupRecord* found, const absl::Status& made, StateLock& then) {
          Start(found, start, made, then);
        });
  }
  Start(group, start, absl::OkStatus(), lock);
}

void DataPlane::Start(GroupRecord* group, const StartMoves& start, absl::Status status,
                      StateLock& lock) {
  const std::string name = group->name();
  asked_.comparisons += start.step == MoveStep::kCompare ? 1 : 0;
  if (PassesSlot(start)) {
    if (status.ok()) status = state_.pools->Ensure(*group);
    for (const SlotIndex slot : {start.slot, start.received}) {
      if (!status.ok() || int64_t{slot.value()} < group->machine->spec().slots) continue;
      status = Error(absl::StatusCode::kInvalidArgument, "slot {}: not in the pool", slot);
    }
  }
  std::shared_ptr<Executor::Moves> moves;
  if (status.ok()) {
    absl::StatusOr<std::shared_ptr<Executor::Moves>> resolved =
        executor_.Resolve(start, MemoryOf(*group));
    status = resolved.status();
    if (resolved.ok()) moves = *std::move(resolved);
  }
  if (!status.ok()) {
    lock.Post(name, Refused(start, std::move(status)));
    return;
  }
  if (start.step == MoveStep::kCompare) BindAhead(*group, start);
  if (Executor::IsBound(*moves)) return SubmitMoves(name, group->id, moves);
  JobThreads& binder = start.step == MoveStep::kLocal ? local_binder_ : binder_;
  binder.Submit(group->id, [this, name, id = group->id, moves = std::move(moves)] {
    BindMoves(name, id, moves);
  });
}

void DataPlane::BindAhead(const GroupRecord& group, const StartMoves& compare) {
  StartMoves start = compare;
  start.step = MoveStep::kLocal;
  const auto resolved = executor_.Resolve(start, MemoryOf(group));
  // A failure is reported when the moves are asked for.
  if (!resolved.ok() || Executor::IsBound(**resolved)) return;
  local_binder_.Submit(group.id, [this, moves = *resolved] {
    const absl::Status bound = Executor::Bind(transport_.get(), moves.get());
    MutexLock lock(mutex_.raw());
    if (bound.ok()) executor_.Keep(*moves);
  });
}

void DataPlane::BindMoves(const std::string& name, uint64_t id,
                          const std::shared_ptr<Executor::Moves>& moves) {
  {
    MutexLock lock(mutex_.raw());
    executor_.TakeKept(moves.get());
  }
  if (!Executor::IsBound(*moves)) {
    absl::Status bound = Executor::Bind(transport_.get(), moves.get());
    if (!bound.ok()) return Report(name, id, Refused(Executor::StartOf(*moves), std::move(bound)));
  }
  MutexLock lock(mutex_.raw());
  if (state_.groups->Find(name, id) != nullptr) SubmitMoves(name, id, moves);
}

void DataPlane::SubmitMoves(const std::string& name, uint64_t id,
                            const std::shared_ptr<Executor::Moves>& moves) {
  const auto done = [this, name, id](Executor::Moved moved) {
    StateLock lock(&mutex_, StateLock::Order::kAhead);
    executor_.Finished(&moved);
    if (moved.done.status.ok() && moved.bytes > 0) {
      CountBytes(name, MoveKind::kCopy, moved.bytes);
    }
    if (state_.groups->Find(name, id) != nullptr) lock.Handle(name, std::move(moved.done));
  };
  executor_.Submit(moves, done);
}

}  // namespace refitd
