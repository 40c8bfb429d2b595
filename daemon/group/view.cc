// The view of a group that status shows.
#include <algorithm>

#include "daemon/group/group_impl.h"

namespace refitd {

UpdateView group::ViewOf(const Update& u) {
  UpdateView view;
  view.id = u.id;
  view.version = u.version;
  view.state = Name(u.state);
  view.outcome = Outcome::kRunning;
  view.reason = u.end.why().reason;
  view.failure = u.end.why().failure;
  view.bytes = u.push.moved_bytes();
  view.total_bytes = u.total_bytes;
  view.tensors = u.coverage.tensors();
  if (u.program.done()) view.tensors += u.program.tensors();
  view.tensor_count = u.push.TensorCount();
  view.buckets = u.push.buckets();
  view.note = u.note;
  if (u.catch_up.has_value()) {
    view.catch_up = true;
    view.source_instances = u.catch_up->source_instances;
  }
  view.content = u.content;
  view.left_out = u.catch_up.has_value() ? LeftOut() : u.coverage.FindLeftOut();
  view.instances = u.participants.OutcomesSoFar();
  return view;
}

namespace {

// Estimates how many bytes of its content the program has moved so far.
int64_t MovedByRun(const group::Update& update, const RunProgress& run) {
  if (!update.program.running()) return 0;
  const int64_t to_write = update.participants.UnwrittenBytes();
  double share = run.rounds;
  if (to_write > 0) {
    share = std::max(share, static_cast<double>(run.bytes) / static_cast<double>(to_write));
  }
  return static_cast<int64_t>(std::clamp(share, 0.0, 1.0) *
                              static_cast<double>(update.program.content().bytes));
}

UpdateView ViewAt(const group::Update& update, TimePoint now, std::string waits_for,
                  const RunProgress& run) {
  UpdateView view = group::ViewOf(update);
  view.bytes += MovedByRun(update, run);
  view.elapsed = now - update.started;
  view.remaining = std::max(update.deadline - now, Duration(0));
  view.waits_for = std::move(waits_for);
  return view;
}

}  // namespace

UpdateStatistics Group::Statistics() const { return impl_->updates.buckets().Statistics(); }

GroupView Group::View(TimePoint now, const RunProgress& run) const {
  const Impl& g = *impl_;
  GroupView view;
  view.name = g.name;
  view.incarnation = g.versions.incarnation();
  view.owner = g.members.owner();
  view.state = Name(g.updates.state());
  view.spec = g.members.spec();
  view.version = g.versions.last();
  view.content = g.versions.content();
  const group::Update* const opened = g.updates.Opened();
  const bool begun = opened != nullptr && opened->state != UpdateState::kOpening;
  view.previous = g.rollback.View(now, begun);
  for (const auto& [id, m] : g.members.members()) {
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
  for (const auto& [name, instance] : g.members.instances()) {
    InstanceView& v = view.instances.emplace_back();
    v.name = name;
    v.state = Name(instance.state);
    v.preparing = g.update != nullptr && g.update->state == UpdateState::kPreparing &&
                  g.update->participants.HasInstance(name);
    if (const std::optional<group::HeldVersion> held = g.members.VersionOf(instance);
        held.has_value()) {
      v.version = held->version;
      v.origin = held->origin;
    }
    v.world_size = instance.world_size;
    v.attached = static_cast<int>(instance.ranks.size());
    const std::string* kept = g.members.WhyKeptOut(instance);
    v.reason = kept == nullptr ? instance.reason : *kept;
    const bool in = g.updates.CatchUpRuns() && g.update->participants.HasInstance(name);
    v.catch_up =
        g.catch_up.Describe(instance, g.updates.CatchUpRuns() ? &*g.update->catch_up : nullptr, in);
  }
  view.update = ViewUpdate(now, run);
  view.catch_up = g.updates.CatchUpRuns() ? ViewLatest(now, run) : g.updates.history().catch_up();
  view.slots = g.slots.View();
  view.committed = g.updates.history().committed();
  view.aborted = g.updates.history().aborted();
  view.chain_daemons = g.compiler.chain_daemons();
  return view;
}

std::vector<InstanceStanding> Group::TakeStandings() { return impl_->versions.TakeStandings(); }

std::vector<InstanceStanding> Group::Standings() const { return impl_->versions.Standings(); }

std::optional<UpdateView> Group::ViewUpdate(TimePoint now, const RunProgress& run) const {
  const Impl& g = *impl_;
  const group::Update* const opened = g.updates.Opened();
  if (opened == nullptr) return g.updates.history().update();
  // One that waits for a hold beside a catch-up.
  const bool waits = opened != g.update.get();
  return ViewAt(*opened, now, waits ? g.rollback.Describe(now) : g.updates.WaitedFor(now), run);
}

std::optional<UpdateView> Group::ViewLatest(TimePoint now, const RunProgress& run) const {
  const Impl& g = *impl_;
  if (g.update == nullptr) return g.updates.history().latest();
  return ViewAt(*g.update, now, g.updates.WaitedFor(now), run);
}

std::optional<UpdateMark> Group::MarkLatest() const {
  const Impl& g = *impl_;
  if (g.update != nullptr) return UpdateMark{g.update->id, Name(g.update->state)};
  const std::optional<UpdateView>& last = g.updates.history().latest();
  if (last.has_value()) return UpdateMark{last->id, last->state};
  return std::nullopt;
}

bool Group::Attached(MemberId member) const {
  const group::Member* m = impl_->members.Find(member);
  return m != nullptr && m->state != MemberState::kLeaving && m->state != MemberState::kGone;
}

bool Group::catch_up_running() const {
  return impl_->updates.CatchUpRuns() && impl_->updates.waiting() == nullptr;
}

}  // namespace refitd
