// The invariants of a coordinator and of a daemon's share of the updates, after every event. For
// tests, simulation and fuzzing: the cost is that of all members, calls and parts.
#include <algorithm>

#include "daemon/group/coordinator_impl.h"

namespace refitd {
namespace {

template <typename Key, typename Value>
bool Within(const std::set<Key>& part, const std::map<Key, Value>& whole) {
  return std::all_of(part.begin(), part.end(),
                     [&whole](const Key& key) { return whole.contains(key); });
}

}  // namespace

// ---- Worker ----

void Worker::CheckInvariants() const {
  REFITD_CHECK(communicator_.has_value() == !communicator_state_.empty());
  REFITD_CHECK(!communicator_.has_value() ||
               (communicator_rank_ >= 0 && communicator_rank_ < communicator_size_));
  REFITD_CHECK(wire_update_.has_value() || (!wire_held_ && !giving_back_));
  REFITD_CHECK(index_layouts_.size() == index_digests_.size());
  std::set<UpdateId> locals;
  for (const auto& [id, update] : updates_) {
    REFITD_CHECK(update.id == id && locals.insert(update.local).second);
    REFITD_CHECK(update.index != nullptr);
    CheckParts(update);
    if (update.job.has_value()) CheckJob(*update.job);
    // P8: an update that is over stays only for what still runs.
    if (!update.ended) continue;
    const bool parts = std::any_of(update.parts.begin(), update.parts.end(),
                                   [](const auto& p) { return Running(p.second); });
    REFITD_CHECK(update.verifying || parts || (update.job.has_value() && Running(*update.job)));
  }
}

void Worker::CheckParts(const Update& update) {
  for (const auto& [seq, part] : update.parts) {
    REFITD_CHECK(part.header.header.part == seq);
    REFITD_CHECK(!part.header.wired || update.handouts.contains(seq));
    REFITD_CHECK(part.result.bytes_written.size() == update.destinations.size());
    // P5: nothing goes over the wire before it was issued, and the root sends what it has packed.
    if (part.on_wire) REFITD_CHECK(part.issued && part.header.wired);
    if (part.on_wire && part.header.is_root) REFITD_CHECK(part.transferred);
    REFITD_CHECK(!part.transferring || !part.on_wire);
  }
  for (const PartSeq seq : update.to_wire) {
    const auto part = update.parts.find(seq);
    REFITD_CHECK(part != update.parts.end() && part->second.issued && !part->second.on_wire);
  }
}

void Worker::CheckJob(const Job& job) {
  REFITD_CHECK(!job.done || !Running(job));
  for (const auto& [number, round] : job.rounds) {
    REFITD_CHECK(number >= job.first_round && job.run.has_value());
    if (round.on_wire) REFITD_CHECK(round.out && job.issued);  // P5
    REFITD_CHECK(!round.unpacking || (round.out && !round.on_wire));
    REFITD_CHECK(!round.packing || !round.packed);
  }
}

// ---- Coordinator ----

void Coordinator::Impl::CheckState() const {
  REFITD_CHECK(own_reports.empty() && events.empty() && !feeding && !overdue);
  REFITD_CHECK(!spread.has_value() || group.update_running());
}

void Coordinator::Impl::CheckInvariants() const {
  CheckState();
  group.CheckInvariants();
  worker.CheckInvariants();
  // The book was told of every change.
  ReadinessBook all;
  all.SetVersion(group.version());
  for (const InstanceStanding& standing : group.Standings()) all.Set(standing);
  REFITD_CHECK(book.instances() == all.instances() && book.version() == all.version());
  CheckNodes();
  if (communicator.has_value()) CheckCommunicator();
  if (!spread.has_value()) return;
  CheckSpread();
  if (spread->program.has_value()) CheckProgram();
}

void Coordinator::Impl::CheckNodes() const {
  REFITD_CHECK(nodes.size() < static_cast<size_t>(kMaxGroupDaemons));
  std::set<std::string> ids;
  for (const auto& [id, node] : nodes) {
    REFITD_CHECK(node.id == id && id != kCoordinatorNode);
    REFITD_CHECK(ids.insert(node.daemon_id).second);
    for (const auto& [theirs, ours] : node.members) {
      const auto remote = remotes.find(ours);
      REFITD_CHECK(remote != remotes.end());
      REFITD_CHECK(remote->second.node == id && remote->second.id == theirs);
    }
  }
  REFITD_CHECK(remote_calls.size() == calls_of.size());
  for (const auto& [ours, call] : remote_calls) {
    const auto of = calls_of.find({call.node, call.id});
    REFITD_CHECK(of != calls_of.end() && of->second == ours);
  }
  for (const auto& [member, known] : layouts) {
    REFITD_CHECK(known.layout != nullptr && group.Attached(member));
  }
  for (const auto& [node, program] : known_programs) {
    REFITD_CHECK(node == kCoordinatorNode || nodes.contains(node));
  }
}

void Coordinator::Impl::CheckCommunicator() const {
  REFITD_CHECK(communicator->ranks.size() >= 2 && communicator->id.value() < next_communicator);
  REFITD_CHECK(std::is_sorted(communicator->ranks.begin(), communicator->ranks.end()));
  for (const NodeId node : communicator->ranks) {
    REFITD_CHECK(node == kCoordinatorNode || nodes.contains(node));
  }
  for (const NodeId node : communicator->up) REFITD_CHECK(communicator->has(node));
  for (const auto& [node, address] : communicator->addresses) REFITD_CHECK(communicator->has(node));
  for (const auto& [node, failure] : communicator->failed) REFITD_CHECK(communicator->has(node));
  REFITD_CHECK(communicator->ready == (communicator->up.size() == communicator->ranks.size()));
  REFITD_CHECK(!communicator->connecting ||
               communicator->addresses.size() == communicator->ranks.size());
  REFITD_CHECK(!communicator->ready || communicator->connecting);
  REFITD_CHECK(communicator->verdict <= communicator->deadline);
}

void Coordinator::Impl::CheckSpread() const {
  const Spread& s = *spread;
  REFITD_CHECK(s.announced && s.prepares.empty());
  REFITD_CHECK(s.locks_held <= s.lock_order.size());
  for (const NodeId node : s.nodes) {
    REFITD_CHECK(node == kCoordinatorNode || nodes.contains(node));
    REFITD_CHECK(!s.left.contains(node));
  }
  for (const auto& [seq, part] : s.parts) {
    REFITD_CHECK(part.header.header.part == seq && part.header.header.update == s.update);
    REFITD_CHECK(!part.sinks.contains(part.root));
    // A part that is, or was, cut may have lost all its sinks.
    const bool may_lack_sinks = part.cut || s.abandoned;
    REFITD_CHECK(part.header.wired ? may_lack_sinks || !part.sinks.empty() : part.sinks.empty());
    REFITD_CHECK(!part.cut || (part.header.wired && !s.abandoned));
    REFITD_CHECK(
        std::includes(part.sinks.begin(), part.sinks.end(), part.lack.begin(), part.lack.end()));
    REFITD_CHECK(part.bytes_written.size() == s.node_of.size());
    // P4: a part that no node runs is answered at once, or waits to be sent again.
    REFITD_CHECK(!part.running.empty() || (part.cut && !part.lack.empty()));
    REFITD_CHECK(std::includes(part.running.begin(), part.running.end(),
                               part.unacknowledged.begin(), part.unacknowledged.end()));
    if (part.issued) REFITD_CHECK(part.unacknowledged.empty());  // P5
  }
  // P7: parts are issued in their order, those that were cut first.
  if (std::any_of(s.parts.begin(), s.parts.end(), [](const auto& p) { return p.second.cut; })) {
    REFITD_CHECK(s.to_issue.empty() && !s.data_plane_up);
  }
  REFITD_CHECK(std::is_sorted(s.to_issue.begin(), s.to_issue.end()));
  REFITD_CHECK(!s.abandoned || (s.to_issue.empty() && !s.wire_verdict.has_value()));
  if (s.wire_verdict.has_value()) REFITD_CHECK(!s.wire_verdict->words.empty());
}

void Coordinator::Impl::CheckProgram() const {
  const ProgramJob& job = *spread->program;
  REFITD_CHECK(Within(job.building, job.commands));
  REFITD_CHECK(Within(job.running, job.commands));
  REFITD_CHECK(std::includes(job.building.begin(), job.building.end(), job.under_way.begin(),
                             job.under_way.end()));
  for (const auto& [node, built] : job.built) REFITD_CHECK(job.commands.contains(node));
  // P5: nothing runs before the nodes agreed, and nothing is issued before it was sent. What a
  // given-up update asked for counts as sent, without any node that runs it.
  const bool settled = job.agreed || spread->abandoned;
  REFITD_CHECK(!job.agreed || job.building.empty());
  REFITD_CHECK(!job.compare_sent || settled);
  REFITD_CHECK(!job.sent || (settled && job.run.has_value()));
  REFITD_CHECK(job.running.empty() || (job.sent && job.agreed));
  REFITD_CHECK(!job.issued || (job.sent && job.agreed && job.wired));
}

void Coordinator::CheckInvariants() const { impl_->CheckInvariants(); }

}  // namespace refitd
