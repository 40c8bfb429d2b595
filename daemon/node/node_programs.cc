// Compiled refits: the planner's threads make plans and node programs, the binder's threads bind
// the steps of an update. Results are fed back as events, unless the group is gone.
#include <algorithm>
#include <optional>
#include <utility>

#include "daemon/node/group_memory.h"
#include "daemon/node/node.h"
#include "transport/base/status.h"
#include "transport/plan/node_program.h"
#include "transport/plan/refit_plan.h"

namespace refitd {
namespace {

MovesDone Refused(const StartMoves& start, absl::Status why) {
  MovesDone refused;
  refused.update = start.update;
  refused.step = start.step;
  refused.round = start.round;
  refused.status = std::move(why);
  return refused;
}

}  // namespace

void Node::PerformCompile(const GroupRecord& group, CompileProgram a) {
  planner_.Submit(group.id, [this, name = group.name(), id = group.id, a = std::move(a)] {
    ProgramCompiled compiled;
    compiled.program = a.program;
    absl::StatusOr<std::shared_ptr<const RefitPlan>> plan =
        CompileRefit(a.sources, a.destinations, a.options);
    compiled.status = plan.status();
    if (plan.ok()) compiled.plan = *std::move(plan);
    GroupEventOf(name, id, std::move(compiled));
  });
}

void Node::PerformBuild(const GroupRecord& group, BuildProgram a) {
  const auto place = [this](const std::vector<MemberId>& ids, std::vector<LocalMember>* members) {
    mutex_.AssertHeld();
    for (size_t i = 0; i < ids.size(); ++i) {
      const MemberRecord* const member = leases_.Find(ids[i]);
      if (member == nullptr) continue;
      (*members)[i].device = member->ordinal.value_or(LocalMember::kNoDevice);
    }
  };
  place(a.source_members, &a.sources);
  place(a.destination_members, &a.destinations);
  planner_.Submit(group.id, [this, name = group.name(), id = group.id, a = std::move(a)]() mutable {
    ProgramBuilt built;
    built.program = a.program;
    built.build = a.build;
    absl::StatusOr<NodeProgram> program =
        CompileNode(*a.plan, a.node, std::move(a.sources), std::move(a.destinations), a.options);
    built.status = program.status();
    if (program.ok()) {
      built.node_program = std::make_shared<const NodeProgram>(*std::move(program));
    }
    GroupEventOf(name, id, std::move(built));
  });
}

void Node::PerformMoves(GroupRecord* group, const StartMoves& start, Turn& turn) {
  const bool in_slot = start.step == MoveStep::kPack || start.step == MoveStep::kUnpack;
  if (in_slot && LacksWirePool(*group)) {
    return MakeWirePool(*group,
                        [this, start](GroupRecord* found, const absl::Status& made, Turn& turn) {
                          mutex_.AssertHeld();
                          PerformMoves(found, start, made, turn);
                        });
  }
  PerformMoves(group, start, absl::OkStatus(), turn);
}

void Node::PerformMoves(GroupRecord* group, const StartMoves& start, absl::Status status,
                        Turn& turn) {
  const std::string name = group->name();
  if (start.step == MoveStep::kPack || start.step == MoveStep::kUnpack) {
    if (status.ok()) status = EnsureWirePool(group);
    if (status.ok() && int64_t{start.slot.value()} >= group->machine->spec().slots) {
      status = Error(absl::StatusCode::kInvalidArgument, "slot {}: not in the pool", start.slot);
    }
  }
  std::shared_ptr<Executor::Moves> moves;
  if (status.ok()) {
    absl::StatusOr<std::shared_ptr<Executor::Moves>> resolved =
        executor_.Resolve(start, GroupMemory(leases_, *group));
    status = resolved.status();
    if (resolved.ok()) moves = *std::move(resolved);
  }
  if (!status.ok()) {
    turn.Post(name, Refused(start, std::move(status)));
    return;
  }
  if (Executor::IsBound(*moves)) return SubmitMoves(name, group->id, moves);
  if (start.step == MoveStep::kCompare) BindAhead(*group, start);
  JobThreads& binder = start.step == MoveStep::kLocal ? local_binder_ : binder_;
  binder.Submit(
      [this, name, id = group->id, moves = std::move(moves)] { BindMoves(name, id, moves); });
}

void Node::BindAhead(const GroupRecord& group, const StartMoves& compare) {
  StartMoves start = compare;
  start.step = MoveStep::kLocal;
  const auto resolved = executor_.Resolve(start, GroupMemory(leases_, group));
  // A failure is reported when the moves are asked for.
  if (!resolved.ok() || Executor::IsBound(**resolved)) return;
  local_binder_.Submit([this, moves = *resolved] {
    const absl::Status bound = Executor::Bind(transport_.get(), moves.get());
    MutexLock lock(&mutex_);
    if (bound.ok()) executor_.Keep(*moves);
  });
}

void Node::BindMoves(const std::string& name, uint64_t id,
                     const std::shared_ptr<Executor::Moves>& moves) {
  {
    MutexLock lock(&mutex_);
    executor_.TakeKept(moves.get());
  }
  if (!Executor::IsBound(*moves)) {
    absl::Status bound = Executor::Bind(transport_.get(), moves.get());
    if (!bound.ok()) {
      return GroupEventOf(name, id, Refused(Executor::StartOf(*moves), std::move(bound)));
    }
  }
  MutexLock lock(&mutex_);
  const GroupRecord* found = groups_.Find(name);
  if (found != nullptr && found->id == id) SubmitMoves(name, id, moves);
}

void Node::SubmitMoves(const std::string& name, uint64_t id,
                       const std::shared_ptr<Executor::Moves>& moves) {
  const auto done = [this, name, id](Executor::Moved moved) {
    Turn turn(this, &mutex_, &pushes_, Turn::Order::kAhead);
    executor_.Finished(&moved);
    if (options_.observer != nullptr && moved.done.status.ok() && moved.bytes > 0) {
      options_.observer->BytesMoved(name, MoveKind::kCopy, moved.bytes);
    }
    const GroupRecord* group = groups_.Find(name);
    if (group != nullptr && group->id == id) turn.Handle(name, std::move(moved.done));
  };
  executor_.Submit(moves, done);
}

void Node::PerformExchange(GroupRecord* group, const StartExchange& a, Turn& turn) {
  const std::string name = group->name();
  const std::optional<EpochRecord> local = WireEpoch(*group, a.epoch);
  const int64_t slots = group->machine->spec().slots;
  const int64_t slot_bytes = group->machine->spec().slot_bytes;
  absl::Status status = EnsureWirePool(group);
  if (status.ok() && !local.has_value()) status = absl::CancelledError("the epoch is closed");
  if (status.ok() && !ReachesSlots(*local, *group)) {
    status = absl::CancelledError("the epoch is of other memory");
  }
  if (status.ok() &&
      (int64_t{a.out.value()} >= slots || int64_t{a.in.value()} >= slots || a.out == a.in)) {
    status = Error(absl::StatusCode::kInvalidArgument, "slots {} and {}: not two of the pool",
                   a.out, a.in);
  }
  WireExchange exchange;
  int64_t received = 0;
  const auto add = [&](uint32_t rank, SlotIndex slot, int64_t offset, int64_t bytes,
                       std::vector<WireExchange::Leg>* legs) {
    if (!status.ok() || bytes == 0) return;
    if (bytes < 0 || bytes > slot_bytes || offset < 0 || offset > slot_bytes - bytes ||
        rank >= static_cast<uint32_t>(kMaxWireRanks)) {
      status = Error(absl::StatusCode::kInvalidArgument,
                     "rank {}: {} bytes at byte {} of slot {}: not in the pool", rank, bytes,
                     offset, slot);
      return;
    }
    mutex_.AssertHeld();
    MemorySpan memory = *GroupMemory(leases_, *group).Slot(slot);
    memory.data += offset;
    memory.bytes = bytes;
    legs->push_back({static_cast<int>(rank), std::move(memory)});
  };
  for (const StartExchange::Leg& leg : a.legs) {
    add(leg.rank, a.out, leg.out_offset, leg.bytes_out, &exchange.sends);
    add(leg.rank, a.in, leg.in_offset, leg.bytes_in, &exchange.receives);
    if (status.ok()) received += leg.bytes_in;
  }
  if (!status.ok()) {
    turn.Post(name, WireDone{a.epoch, a.seq, std::move(status)});
    return;
  }
  exchange.epoch = local->id;
  exchange.seq = a.seq;
  exchange.timeout = a.timeout;
  WireOf(*local)->Submit(std::move(exchange), [this, name, id = group->id, epoch = a.epoch,
                                               seq = a.seq, received](absl::Status ended) {
    if (options_.observer != nullptr && ended.ok() && received > 0) {
      options_.observer->BytesMoved(name, MoveKind::kExchange, received);
    }
    GroupEventOf(name, id, WireDone{epoch, seq, std::move(ended)});
  });
}

}  // namespace refitd
