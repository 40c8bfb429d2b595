// The invariants of a coordinator and of a daemon's share of the updates, after every event. For
// tests, simulation and fuzzing: the cost is that of all members, calls and parts.

#include "daemon/group/coordinator_impl.h"

namespace refitd {
// ---- Worker ----

void Worker::CheckInvariants() const {
  wire_.CheckInvariants();
  index_.CheckInvariants();
  std::set<UpdateId> locals;
  for (const auto& [id, update] : updates_) {
    REFITD_CHECK(update.id() == id && locals.insert(update.local).second);
    REFITD_CHECK(update.index != nullptr);
    update.CheckInvariants();
    // P8: an update that is over stays only for what still runs.
    REFITD_CHECK(!update.over || update.running());
  }
}

void worker::Update::CheckInvariants() const {
  for (const auto& [seq, part] : parts) {
    REFITD_CHECK(part.header.part == seq);
    REFITD_CHECK(part.result.bytes_written.size() == destinations.size());
    // P5: nothing goes over the wire before it was issued, and the root sends what it has packed.
    if (part.on_wire) REFITD_CHECK(part.issued && part.header.wired);
    if (part.on_wire && part.header.is_root) REFITD_CHECK(part.transferred);
    REFITD_CHECK(!part.transferring || !part.on_wire);
  }
  for (const auto& [seq, part] : ended) {
    REFITD_CHECK(part.header.part == seq && part.kept() && !part.header.again && !part.running());
  }
  for (const PartSeq seq : to_wire) {
    const auto part = parts.find(seq);
    REFITD_CHECK(part != parts.end() && part->second.issued && !part->second.on_wire);
  }
  if (job.has_value()) job->CheckInvariants();
}

void worker::Job::CheckInvariants() const {
  REFITD_CHECK(!done || !running());
  for (const auto& [number, round] : rounds) {
    REFITD_CHECK(number >= first_round && run.has_value());
    if (round.on_wire) REFITD_CHECK(round.out && issued);  // P5
    REFITD_CHECK(!round.unpacking || (round.out && !round.on_wire));
    REFITD_CHECK(!round.packing || !round.packed);
  }
}

// ---- Coordinator ----

void Coordinator::Impl::CheckState() const {
  REFITD_CHECK(own_reports.empty() && events.empty() && !feeding && !overdue);
  REFITD_CHECK(!update.has_value() || group.update_running());
}

void Coordinator::Impl::CheckInvariants() const {
  CheckState();
  group.CheckInvariants();
  worker.CheckInvariants();
  // The book has every change.
  ReadinessBook all;
  all.SetVersion(group.version());
  for (const InstanceStanding& standing : group.Standings()) all.Set(standing);
  REFITD_CHECK(book.instances() == all.instances() && book.version() == all.version());
  nodes.CheckInvariants();
  remotes.CheckInvariants(nodes);
  layouts.CheckInvariants([this](MemberId member) { return group.Attached(member); });
  for (const auto& [node, program] : plans) REFITD_CHECK(nodes.exists(node));
  if (communicator.has_value()) {
    communicator->CheckInvariants();
    REFITD_CHECK(communicator->id().value() < next_communicator);
    for (const NodeId node : communicator->ranks()) REFITD_CHECK(nodes.exists(node));
  }
  if (update.has_value()) update->CheckInvariants(nodes);
}

void Coordinator::CheckInvariants() const { impl_->CheckInvariants(); }

}  // namespace refitd
