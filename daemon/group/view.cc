// The view of a group that status shows.
#include <algorithm>
#include <utility>

#include "daemon/group/group_impl.h"

namespace refitd {

UpdateView Group::Impl::ViewOf(const Update& u) const {
  UpdateView view;
  view.id = u.id;
  view.version = u.version;
  view.state = Name(u.state);
  view.outcome = Outcome::kRunning;
  view.reason = u.give_up.reason;
  view.failure = u.give_up.failure;
  view.bytes = u.moved_bytes;
  view.total_bytes = u.total_bytes;
  view.tensors = static_cast<int64_t>(u.pushed.size());
  if (u.refit == group::RefitPhase::kDone) view.tensors += u.program->plan->content.tensors;
  view.tensor_count = u.TensorCount();
  view.buckets = u.buckets;
  view.note = u.note;
  if (u.catch_up.has_value()) {
    view.catch_up = true;
    view.source_instances = u.catch_up->source_instances;
  }
  view.left_out = LeftOutOf(u);
  for (const Participant& p : u.participants) {
    view.instances.push_back({p.instance, false, p.reason});
  }
  return view;
}

void group::BucketLog::AddBytes(BroadcastMethod method, int64_t bytes) {
  totals_[static_cast<size_t>(method)].bytes += bytes;
}

void group::BucketLog::Add(const BucketRecord& record) {
  ++totals_[static_cast<size_t>(record.broadcast)].buckets;
  records_.push_back(record);
  if (records_.size() <= kRememberedBuckets) return;
  records_.pop_front();
  ++left_out_;
}

std::vector<BroadcastTotals> group::BucketLog::Totals() const {
  std::vector<BroadcastTotals> used;
  for (size_t m = 0; m < totals_.size(); ++m) {
    if (totals_[m].bytes == 0 && totals_[m].buckets == 0) continue;
    used.push_back({static_cast<BroadcastMethod>(m), totals_[m].bytes, totals_[m].buckets});
  }
  return used;
}

UpdateStatistics group::BucketLog::Statistics() const {
  return {Totals(), {records_.begin(), records_.end()}, left_out_};
}

UpdateStatistics Group::Statistics() const { return impl_->bucket_log.Statistics(); }

GroupView Group::View(TimePoint now) const {
  const Impl& g = *impl_;
  GroupView view;
  view.name = g.name;
  view.incarnation = g.incarnation;
  view.owner = g.ownership.owner();
  view.state = Name(g.state);
  view.spec = g.spec;
  view.version = g.version;
  for (const auto& [id, m] : g.members) {
    MemberView& v = view.members.emplace_back();
    v.id = id;
    v.engine = m.engine;
    v.instance = m.instance;
    v.rank = m.rank;
    v.world_size = m.world_size;
    v.delivery = m.delivery;
    v.state = Name(m.state);
    v.pid = m.pid;
    v.layout_digest = m.layout_digest;
    if (m.layout != nullptr) v.pieces = static_cast<int64_t>(m.layout->pieces.size());
  }
  for (const auto& [name, instance] : g.instances) {
    InstanceView& v = view.instances.emplace_back();
    v.name = name;
    v.state = Name(instance.state);
    v.preparing = instance.state == InstanceState::kCleanPreparing ||
                  instance.state == InstanceState::kDirtyPreparing;
    if (const std::optional<group::HeldVersion> held = g.VersionOf(instance); held.has_value()) {
      v.version = held->version;
      v.origin = held->origin;
    }
    v.world_size = instance.world_size;
    v.attached = static_cast<int>(instance.ranks.size());
    const std::string* kept = g.WhyKeptOut(instance);
    v.reason = kept == nullptr ? instance.reason : *kept;
    v.catch_up = g.CatchUpState(instance);
  }
  view.update = ViewUpdate(now);
  view.catch_up = g.CatchUpRuns() ? ViewLatest(now) : g.last_catch_up;
  for (int i = 0; i < g.ledger.slots(); ++i) {
    const SlotIndex index(static_cast<uint32_t>(i));
    view.slots.push_back({index, g.ledger.slot(index).state, g.HolderOf(index)});
  }
  view.committed = g.committed_updates;
  view.aborted = g.aborted_updates;
  if (g.program != nullptr && g.program->plan != nullptr) {
    const RelayShape& relay = g.program->plan->routes.relay;
    view.chain_daemons = relay.lag == 0 ? 0 : relay.longest;
  }
  return view;
}

std::vector<InstanceStanding> Group::TakeStandings() {
  if (!impl_->restood.empty()) impl_->FindLineage();
  std::vector<InstanceStanding> standings;
  for (const std::string& name : std::exchange(impl_->restood, {})) {
    standings.push_back(impl_->StandingOf(name));
  }
  return standings;
}

std::vector<InstanceStanding> Group::Standings() const {
  std::vector<InstanceStanding> standings;
  for (const auto& [name, instance] : impl_->instances) {
    standings.push_back(impl_->StandingOf(name));
  }
  return standings;
}

std::optional<UpdateView> Group::ViewUpdate(TimePoint now) const {
  const Impl& g = *impl_;
  if (g.update == nullptr || g.CatchUpRuns()) return g.last_update;
  return ViewLatest(now);
}

std::optional<UpdateView> Group::ViewLatest(TimePoint now) const {
  const Impl& g = *impl_;
  if (g.update == nullptr) return g.last_was_catch_up ? g.last_catch_up : g.last_update;
  UpdateView view = g.ViewOf(*g.update);
  view.elapsed = now - g.update->started;
  view.remaining = std::max(g.update->deadline - now, Duration(0));
  return view;
}

std::optional<UpdateMark> Group::MarkLatest() const {
  const Impl& g = *impl_;
  if (g.update != nullptr) return UpdateMark{g.update->id, Name(g.update->state)};
  const std::optional<UpdateView>& last = g.last_was_catch_up ? g.last_catch_up : g.last_update;
  if (last.has_value()) return UpdateMark{last->id, last->state};
  return std::nullopt;
}

bool Group::Attached(MemberId member) const {
  const group::Member* m = std::as_const(*impl_).Find(member);
  return m != nullptr && m->state != MemberState::kLeaving && m->state != MemberState::kGone;
}

std::string Group::Impl::HolderOf(SlotIndex index) const {
  const SlotLedger::Slot& slot = ledger.slot(index);
  switch (slot.state) {
    case SlotState::kFree:
      return "";
    case SlotState::kLeased:
      return Label(slot.holder);
    case SlotState::kFilling:
      return "the update";
    case SlotState::kReading:
      break;
  }
  std::vector<std::string> readers;
  for (const MemberId reader : slot.readers) readers.push_back(Label(reader));
  return group::Few(readers);
}

std::string Group::Impl::HoldersOfSlots() const {
  std::vector<std::string> holders;
  for (int i = 0; i < ledger.slots(); ++i) {
    const SlotIndex index(static_cast<uint32_t>(i));
    const SlotState slot_state = ledger.slot(index).state;
    holders.push_back(fmt::format("slot {} {}{}", index, SlotStateName(slot_state),
                                  slot_state == SlotState::kFree ? "" : " by " + HolderOf(index)));
  }
  return group::Few(holders);
}

}  // namespace refitd
