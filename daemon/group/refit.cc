// Compiled refit: the trainers' registered layouts, the program, and the one call of a version.
//
// A rank with a registered layout ends an update with Refit, which names the layout's binding
// generation, instead of Commit. The program is compiled before engines are prepared, is kept while
// the layouts stay the same, and runs when every trainer rank has committed.

#include "daemon/group/group_impl.h"

namespace refitd {
namespace {

BeginEvent BeginOf(const RefitEvent& e) {
  BeginEvent begin;
  begin.version = e.version;
  begin.duration = e.duration;
  begin.verification = e.verification;
  begin.evict_late = e.evict_late;
  begin.hold = e.hold;
  return begin;
}

// An empty layout withdraws the layout before it. Its rank may still end an update with Refit,
// which then moves nothing of that rank.
bool HasShards(const group::Member& member) {
  return !member.engine && member.layout != nullptr && !member.layout->pieces.empty();
}

}  // namespace

bool group::HasShardsIn(const Member& member, const TrainerProgress& progress) {
  return HasShards(member) && !progress.without_layout;
}

// ---- the call ----

void Group::Impl::On(const RefitEvent& e) {
  Member* member = members.Trainer(e.member, e.call);
  if (member == nullptr) return;
  const group::Asked what{CallKind::kRefit, e.version, e.bucket_count};
  if (requests.Repeated(e.member, what, e.request_id, e.call)) return;
  using Begun = std::map<int, TrainerProgress>::iterator;
  Update* opened = updates.Opened();
  const Begun begun = opened == nullptr ? Begun() : opened->push.trainers().find(member->rank);
  // A call that names the update that it ends never opens an update.
  const bool joined =
      e.update != UpdateId() ||
      (opened != nullptr && opened->version == e.version &&
       begun != opened->push.trainers().end() && member->state == MemberState::kReady);
  absl::Status status = CheckRefit(*member, e, joined);
  if (!status.ok()) {
    out.Refuse(e.call, std::move(status));
    return;
  }
  if (joined) {
    TrainerProgress& progress = begun->second;
    progress.commits.push_back(requests.Track(e.member, what, e.request_id, e.call));
    if (!progress.committed) TakeCommit(member, &progress, e.bucket_count);
    return;
  }
  if (opened == nullptr) {
    if (updates.CatchUpRuns()) return Defer(e, fmt::format("the update to version {}", e.version));
    updates.Open(BeginOf(e));
    opened = update.get();
  }
  opened->hold = opened->hold || e.hold;
  TrainerProgress& progress = opened->push.Join(member);
  progress.one_call = progress.begins.empty();
  progress.awaited_buckets = 0;  // the commit takes effect when the engines are ready
  progress.commits.push_back(requests.Track(e.member, what, e.request_id, e.call));
  out.Changed();
}

absl::Status Group::Impl::CheckRefit(const Member& member, const RefitEvent& e, bool joined) {
  if (updates.IsAnother(e.update)) return updates.history().Refuse(e.update, e.version);
  if (member.layout == nullptr) {
    return Precondition("{} has no layout: register it first", member.label);
  }
  if (joined) {
    const absl::StatusOr<TrainerProgress*> found = updates.Find(member, e.version, e.update);
    if (!found.ok()) return found.status();
    if ((*found)->without_layout) {
      return Precondition("{} has begun version {} without its layout: it ends it with Commit",
                          member.label, e.version);
    }
    CommitEvent commit;
    commit.version = e.version;
    commit.bucket_count = e.bucket_count;
    return update->push.CheckCommit(**found, commit);
  }
  if (e.bucket_count != 0) {
    return Precondition("bucket_count: {}, but {} has not begun version {}", e.bucket_count,
                        member.label, e.version);
  }
  return CheckBegin(member, BeginOf(e));
}

// ---- the program ----

absl::StatusOr<bool> group::FindProgram(const Membership& members, RefitCompiler* compiler,
                                        Update* update) {
  update->program.Clear();
  if (update->content.has_value()) return true;
  RefitCompiler::Sources sources;
  for (const auto& [rank, progress] : update->push.trainers()) {
    const Member& member = *members.Find(progress.member);
    if (HasShardsIn(member, progress)) sources.members.push_back(member.id);
  }
  sources.some_push = sources.members.size() < update->push.trainers().size();
  sources.catch_up = update->catch_up.has_value();
  if (update->catch_up.has_value()) sources.members = update->catch_up->sources;
  if (sources.members.empty()) {
    if (update->push.all_in_one_call()) {
      return Precondition("no trainer rank has a piece in its layout: nothing can be refitted");
    }
    return true;
  }
  if (const std::optional<MemberId> first = update->push.AnyReader(); first.has_value()) {
    // The loader rank would get Committed without the tensors that the program moves (P1).
    const Member& reader = *members.Find(*first);
    return Precondition("{} takes {} delivery: it gets what is pushed, not what layouts bring",
                        reader.label, Name(reader.delivery));
  }
  return compiler->Find(sources, update->participants, &update->program);
}

void Group::Impl::On(const RefitPlanned& e) { compiler.Take(e); }

// ---- running it ----

void Group::Impl::On(const CompareDone& e) {
  if (update == nullptr || update->id != e.update || !update->program.EndCompare()) return;
  if (update->state == UpdateState::kEnding) return;
  if (e.status.ok()) return update->program.NoteEqual();
  GiveUp why{Message(e.status), GiveUpClass::kTransfer, FailureOf(e.status)};
  if (e.status.code() == absl::StatusCode::kDataLoss) why.kind = GiveUpClass::kVerification;
  // Another attempt would find the same fault in the tensors.
  if (absl::IsFailedPrecondition(e.status)) why.begin_code = why.commit_code = e.status.code();
  updates.Abandon(std::move(why));
}

void Group::Impl::On(const RefitDone& e) {
  if (update == nullptr || update->id != e.update || !update->program.EndRun()) return;
  if (update->state == UpdateState::kEnding) return;
  if (!e.status.ok()) {
    return updates.Abandon(group::FailedMove(update->participants, members, "the refit", e.status,
                                             e.failed_destination));
  }
  update->participants.AddWritten(e.bytes_written);
  update->push.AddMoved(update->program.content().bytes);
  out.Changed();
}

}  // namespace refitd
