// The data phase: leased slots, buckets in order, their parts, acknowledgements.
#include <algorithm>

#include "daemon/group/group_impl.h"
#include "transport/base/errors.h"
#include "transport/base/failure.h"

namespace refitd {
namespace {

// The answer to a rank that takes an ended update for open.
absl::Status StatusOf(const group::EndedUpdate& ended) {
  if (ended.what.outcome == Outcome::kCommitted) {
    return Precondition("version {} is committed already", ended.version);
  }
  return WithFailure(Error(absl::StatusCode::kAborted, "the update to version {} is lost: {}",
                           ended.version, ended.what.reason),
                     ended.what.failure);
}

// The content of a part that goes directly, without a slot.
PartContent WithoutSlot(PartContent content) {
  content.byte_offsets.clear();
  content.bytes = content.CarriedBytes();
  return content;
}

}  // namespace

absl::Status Group::Impl::NotOpen(Version wanted) const {
  for (auto it = past.rbegin(); it != past.rend(); ++it) {
    if (it->version == wanted) return StatusOf(*it);
  }
  if (update != nullptr && !CatchUpRuns()) {
    return Precondition("version: {}, but the update that runs is to version {}", wanted,
                        update->version);
  }
  return Precondition("no update to version {} is open: begin it first", wanted);
}

// The rank began an update that is over. Its call means that update only, never the update that
// runs now, even if both install the same version.
absl::Status Group::Impl::Gone(UpdateId wanted, Version wanted_version) const {
  for (const group::EndedUpdate& ended : past) {
    if (ended.update == wanted) return StatusOf(ended);
  }
  return Error(absl::StatusCode::kAborted,
               "the update to version {} is over (update {}): what became of it is not remembered",
               wanted_version, wanted);
}

absl::StatusOr<group::TrainerProgress*> Group::Impl::OpenFor(const Member& member, Version wanted,
                                                             UpdateId wanted_update) {
  if (IsAnother(wanted_update)) return Gone(wanted_update, wanted);
  if (update == nullptr || CatchUpRuns() || update->version != wanted) return NotOpen(wanted);
  if (update->state == UpdateState::kEnding) {
    Failure failure = update->give_up.failure;
    failure.version = wanted.value();
    return WithFailure(Error(absl::StatusCode::kAborted, "the update to version {} is lost: {}",
                             wanted, update->give_up.reason),
                       failure);
  }
  const auto it = update->trainers.find(member.rank);
  if (member.state != MemberState::kReady || it == update->trainers.end()) {
    return Precondition("the Begin of version {} by {} was not answered yet", wanted, member.label);
  }
  return &it->second;
}

// ---- slots ----

int Group::Impl::LeasesOf(MemberId member) const {
  int leases = 0;
  for (int i = 0; i < ledger.slots(); ++i) {
    const SlotLedger::Slot& slot = ledger.slot(SlotIndex(static_cast<uint32_t>(i)));
    if (slot.state == SlotState::kLeased && slot.holder == member) ++leases;
  }
  return leases;
}

void Group::Impl::On(const LeaseSlotEvent& e) {
  Member* member = Trainer(e.member, e.call);
  if (member == nullptr) return;
  if (e.wait < Duration(0)) {
    Refuse(e.call, InvalidField("wait", "wait: {} is negative", group::Seconds(e.wait)));
    return;
  }
  const absl::StatusOr<TrainerProgress*> progress = OpenFor(*member, e.version, e.update);
  if (!progress.ok()) {
    Refuse(e.call, progress.status());
    return;
  }
  if ((*progress)->committed) {
    Refuse(e.call, Precondition("{} has committed version {} already", member->label, e.version));
    return;
  }
  const int limit = ledger.LeasableBy(spec.trainer_ranks);
  const int held = LeasesOf(e.member);
  const auto waiting = std::count_if(slot_waiters.begin(), slot_waiters.end(),
                                     [&e](const SlotWaiter& w) { return w.member == e.member; });
  // Early buckets hold slots while they wait for an earlier bucket of the same rank. They count
  // here, since the rank would otherwise wait for slots that it holds itself.
  const auto early =
      std::count_if((*progress)->early.begin(), (*progress)->early.end(),
                    [](const auto& bucket) { return bucket.second->content->slot.has_value(); });
  if (held + waiting + early >= limit) {
    Refuse(e.call,
           Error(absl::StatusCode::kResourceExhausted,
                 "{} holds {} leased slots, waits for {}, and has {} in buckets that wait for its "
                 "seq {}; each of {} trainer ranks may hold {} of the group's {} slots",
                 member->label, held, waiting, early, (*progress)->next_seq, spec.trainer_ranks,
                 limit, ledger.slots()));
    return;
  }
  const TimePoint deadline =
      e.wait == Duration(0) ? update->deadline : std::min(now + e.wait, update->deadline);
  slot_waiters.push_back({e.call, e.member, deadline});
}

bool Group::Impl::TryGrant(const SlotWaiter& waiter) {
  const TimePoint expires = std::min(now + limits.grant_limit, update->deadline);
  const absl::StatusOr<SlotGrant> grant =
      ledger.Lease(waiter.member, ledger.LeasableBy(spec.trainer_ranks), expires);
  if (!grant.ok() && grant.status().code() == absl::StatusCode::kUnavailable) return false;
  update->last_call = now;
  if (!grant.ok()) {
    Refuse(waiter.call, grant.status());
    return true;
  }
  Do(Reply{waiter.call, absl::OkStatus(), LeaseSlotReply{*grant, expires - now, spec.slot_bytes}});
  Changed();
  return true;
}

// Leases are served after the parts that wait for a slot, since those parts are delivered first.
void Group::Impl::ServeLeases() {
  if (update == nullptr || update->state != UpdateState::kData) return;
  for (auto it = slot_waiters.begin(); it != slot_waiters.end();) {
    it = TryGrant(*it) ? slot_waiters.erase(it) : it + 1;
  }
}

void Group::Impl::On(const ReleaseSlotEvent& e) {
  Member* member = Trainer(e.member, e.call);
  if (member == nullptr) return;
  Do(Reply{e.call, ledger.ReleaseLease(e.member, e.grant), EmptyReply{}});
  Changed();
}

// ---- buckets ----

absl::Status Group::Impl::CheckBucket(const TrainerProgress& progress, const BucketEvent& e) const {
  const CheckedBucket& bucket = *e.bucket;
  if (bucket.seq < 0) {
    return InvalidField("seq", "seq: {} is negative", bucket.seq);
  }
  if (bucket.seq < progress.next_seq || progress.early.contains(bucket.seq)) {
    return Error(absl::StatusCode::kAlreadyExists, "seq: {} was pushed before", bucket.seq);
  }
  if (progress.committed) {
    return Precondition("seq: {}: the rank has committed version {} already", bucket.seq,
                        e.version);
  }
  if (progress.announced.has_value() && bucket.seq >= *progress.announced) {
    return Precondition("seq: {}, but the rank commits with {} buckets", bucket.seq,
                        *progress.announced);
  }
  if (bucket.seq - progress.next_seq >= limits.outstanding_buckets) {
    return Error(absl::StatusCode::kResourceExhausted,
                 "seq: {} is too far ahead: {} comes next, and at most {} may be outstanding",
                 bucket.seq, progress.next_seq, limits.outstanding_buckets);
  }
  if (progress.pending_buckets >= limits.outstanding_buckets) {
    return Error(absl::StatusCode::kResourceExhausted,
                 "seq: {}: {} buckets are outstanding already", bucket.seq,
                 progress.pending_buckets);
  }
  for (const TensorSpec& tensor : bucket.tensors) {
    REFITD_RETURN_IF_ERROR(update->catalog->Check(tensor, update->evicted));
    if (Moves(tensor.name)) {
      return AboutTensor(
          Precondition(
              "tensor '{}' comes with the registered layouts: list it in pushed_tensors to push it",
              tensor.name),
          tensor.name);
    }
    REFITD_RETURN_IF_ERROR(CheckTiedBucket(tensor.name));
  }
  return CheckParts(bucket);
}

// Two names of one memory are compared where both are pushed, or both refitted.
absl::Status Group::Impl::CheckTiedBucket(std::string_view tensor) const {
  if (!update->catalog->IsTied(tensor) || !update->program.has_value()) return absl::OkStatus();
  for (const group::TiedNames& tie : update->catalog->ties()) {
    if (tie.tensor != tensor && tie.same_as != tensor) continue;
    const std::string& other = tie.tensor == tensor ? tie.same_as : tie.tensor;
    if (!InProgram(other)) continue;
    return Precondition(
        "tensor '{}' is one memory with tensor '{}' in {}, and is pushed, while the other comes "
        "with the registered layouts: the two can't be compared; leave one of them out, or push "
        "both",
        tensor, other, tie.rank);
  }
  return absl::OkStatus();
}

// Many ranges may name the same source bytes, so a small message could ask for any number of parts;
// this limits them (P10).
absl::Status Group::Impl::CheckParts(const CheckedBucket& bucket) const {
  if (bucket.slot.has_value()) return absl::OkStatus();
  if (update->readers.empty() && update->nodes.size() == 1 && !update->through_slots) {
    return absl::OkStatus();
  }
  const int64_t most = kMaxPartsPerBucket * spec.slot_bytes;
  int64_t bytes = 0;
  for (const TensorRange& range : bucket.ranges) {
    const int64_t needed = bucket.BytesOf(range) + kPackAlignment;
    if (needed > most - bytes) {
      return Error(
          absl::StatusCode::kResourceExhausted,
          "seq {}: the bucket's tensors need more than {} slots of {} bytes; '{}' is one too many",
          bucket.seq, kMaxPartsPerBucket, spec.slot_bytes, bucket.tensors[range.tensor].name);
    }
    bytes += needed;
  }
  return absl::OkStatus();
}

// Takes the bucket's elements and its slot, or changes nothing.
absl::Status Group::Impl::Reserve(const BucketEvent& e) {
  Taken taken;
  absl::Status status = TakeElements(*e.bucket, &taken);
  const std::optional<SlotGrant>& slot = e.bucket->slot;
  if (status.ok() && slot.has_value()) status = ledger.Submit(e.member, *slot);
  if (status.ok()) return status;
  // In reverse order, since a tensor may be in the bucket twice.
  for (auto it = taken.before.rbegin(); it != taken.before.rend(); ++it) {
    group::PushedTensor& tensor = update->pushed.at(*it->first);
    CountPushed(tensor, -1);
    tensor.covered = std::move(it->second);
    CountPushed(tensor, 1);
  }
  for (const std::string* name : taken.added) {
    const auto tensor = update->pushed.find(*name);
    CountPushed(tensor->second, -1);
    update->pushed.erase(tensor);
  }
  return status;
}

// Adds the tensor to the counts of what was pushed, or with `by` -1 takes it out of them.
void Group::Impl::CountPushed(const group::PushedTensor& tensor, int by) {
  if (!tensor.complete()) update->pushed_incomplete += by;
  if (tensor.wanted) update->pushed_wanted += by;
}

// Looks up each tensor once, since a big bucket's first byte waits for all look-ups.
absl::Status Group::Impl::TakeElements(const CheckedBucket& bucket, Taken* taken) {
  update->pushed.reserve(update->pushed.size() + bucket.tensors.size());
  taken->added.reserve(bucket.tensors.size());
  for (size_t i = 0; i < bucket.tensors.size(); ++i) {
    const TensorSpec& tensor = bucket.tensors[i];
    const TensorRange& range = bucket.ranges[i];
    const auto [it, added] = update->pushed.try_emplace(tensor.name);
    group::PushedTensor& known = it->second;
    if (added) {
      taken->added.push_back(&tensor.name);
      known.dtype = tensor.dtype;
      known.shape = tensor.shape;
      REFITD_ASSIGN_OR_RETURN(known.elements, ElementCount(tensor.shape));
      known.wanted = update->catalog->Wants(tensor.name);
      CountPushed(known, 1);
    } else {
      if (known.dtype != tensor.dtype || known.shape != tensor.shape) {
        return AboutTensor(
            Precondition("tensor '{}': the bucket has {}, but an earlier one had {}", tensor.name,
                         ToString(tensor.dtype, tensor.shape), ToString(known.dtype, known.shape)),
            tensor.name);
      }
      if (known.elements == 0) {
        return AboutTensor(
            Error(absl::StatusCode::kAlreadyExists, "tensor '{}' was pushed before", tensor.name),
            tensor.name);
      }
      taken->before.emplace_back(&tensor.name, known.covered);
    }
    // The counts depend on what is covered, so the tensor is taken out of them while that changes.
    CountPushed(known, -1);
    const bool fresh = known.covered.Add(range.start, range.start + range.count);
    CountPushed(known, 1);
    if (!fresh) {
      return AboutTensor(Error(absl::StatusCode::kAlreadyExists,
                               "tensor '{}': elements of [{}, {}) were pushed before", tensor.name,
                               range.start, range.start + range.count),
                         tensor.name);
    }
  }
  const auto tensors = static_cast<int64_t>(update->pushed.size());
  if (tensors > kMaxTensorsPerLayout) {
    return TooManyTensors(fmt::format("buckets up to seq {}", bucket.seq), tensors);
  }
  if (update->tensor_count == 0 || tensors <= update->tensor_count) return absl::OkStatus();
  return Precondition("seq {} would make {} tensors pushed; Begin's tensor_count is {}", bucket.seq,
                      tensors, update->tensor_count);
}

void Group::Impl::On(const BucketEvent& e) {
  REFITD_CHECK(e.bucket != nullptr);
  const int64_t seq = e.bucket->seq;
  Member* member = Trainer(e.member, e.call);
  if (member == nullptr) return;
  const std::string what = fmt::format("bucket {} of version {}", seq, e.version);
  if (Repeated(member, CallKind::kBucket, e.request_id, what, e.call)) return;
  const absl::StatusOr<TrainerProgress*> progress = OpenFor(*member, e.version, e.update);
  absl::Status status = progress.status();
  if (status.ok()) status = CheckBucket(**progress, e);
  if (status.ok()) status = Reserve(e);
  if (!status.ok()) {
    // The rank's Commit would wait forever for the refused bucket, so it is refused as well.
    if (progress.ok() && seq >= (*progress)->next_seq && seq < (*progress)->announced.value_or(0) &&
        !(*progress)->early.contains(seq)) {
      WithdrawAnnounced(*progress, WithFailureOf(status, Precondition("seq {} was refused: {}", seq,
                                                                      Message(status))));
    }
    Refuse(e.call, std::move(status));
    return;
  }
  auto bucket = std::make_shared<Bucket>();
  bucket->request = Track(member, CallKind::kBucket, e.request_id, what, e.call);
  bucket->trainer = e.member;
  bucket->content = e.bucket;
  ++(*progress)->pending_buckets;
  (*progress)->early[seq] = std::move(bucket);
  TakeInOrder(*progress);
  TakeAnnounced(member, *progress);
}

void Group::Impl::TakeInOrder(TrainerProgress* progress) {
  for (auto it = progress->early.find(progress->next_seq); it != progress->early.end();
       it = progress->early.find(progress->next_seq)) {
    const std::shared_ptr<Bucket> bucket = std::move(it->second);
    progress->early.erase(it);
    ++progress->next_seq;
    bucket->group_seq = update->buckets++;
    bucket->turn = now;
    update->accepted_bytes += bucket->content->bytes;
    CutIntoParts(bucket);
  }
}

bool Group::Impl::NeedsSlot(const Bucket& bucket) const {
  if (!update->readers.empty() || update->through_slots) return true;
  if (update->nodes.size() == 1) return false;
  const NodeId root = Find(bucket.trainer)->node;
  const Catalog& known = *update->catalog;
  for (uint32_t d = 0; d < known.destinations().size(); ++d) {
    if (!update->skip_destination[d] && Find(known.destinations()[d])->node != root) return true;
  }
  return false;
}

void Group::Impl::CutIntoParts(const std::shared_ptr<Bucket>& bucket) {
  const CheckedBucket& all = *bucket->content;
  if (all.slot.has_value()) {
    AddPart(bucket, WholeBucket(bucket->content));
    return;
  }
  if (!NeedsSlot(*bucket)) {
    CutBetweenTensors(bucket);
    return;
  }
  for (PackedBucket& packed : FormBuckets(all.tensors, all.ranges, spec.slot_bytes)) {
    AddPart(bucket, {bucket->content, std::move(packed.ranges), std::move(packed.byte_offsets),
                     packed.bytes});
  }
  if (bucket->parts_left == 0) FinishBucket(*bucket);
}

// Cuts a bucket that needs no slot. The parts are for planning alone: one part moves while the next
// is planned. Planning works tensor by tensor, so cuts are between tensors. However small the
// tensors are, the bucket makes no more parts than any other (P10).
void Group::Impl::CutBetweenTensors(const std::shared_ptr<Bucket>& bucket) {
  const CheckedBucket& all = *bucket->content;
  const auto tensors = static_cast<int64_t>(all.ranges.size());
  const int64_t most =
      std::min({all.bytes / limits.direct_part_bytes, tensors / limits.direct_part_tensors,
                int64_t{kMaxPartsPerBucket}});
  const int64_t parts = std::max<int64_t>(most, 1);
  const int64_t each = (all.bytes + parts - 1) / parts;
  absl::Span<const TensorRange> rest = all.ranges;
  int64_t rest_bytes = all.bytes;
  const auto add = [&](absl::Span<const TensorRange> ranges, int64_t bytes) {
    AddPart(bucket, {bucket->content, {ranges.begin(), ranges.end()}, {}, bytes});
  };
  int64_t bytes = 0;
  for (size_t end = 0; end < rest.size();) {
    bytes += all.BytesOf(rest[end++]);
    // The bytes after the last full part belong to the part that is added after the loop.
    if (bytes < each || bytes == rest_bytes) continue;
    add(rest.first(end), bytes);
    rest.remove_prefix(end);
    rest_bytes -= bytes;
    bytes = end = 0;
  }
  add(rest, rest_bytes);
}

void Group::Impl::AddPart(const std::shared_ptr<Bucket>& bucket, PartContent content) {
  Part part;
  part.seq = PartSeq(update->end_part());
  part.bucket = bucket;
  part.content = std::make_shared<const PartContent>(std::move(content));
  part.slot = bucket->content->slot;
  update->parts.push_back(std::move(part));
  ++bucket->parts_left;
  ++bucket->parts;
}

void Group::Impl::FinishBucket(const Bucket& bucket) {
  const Member& trainer = *Find(bucket.trainer);
  --update->trainers.at(trainer.rank).pending_buckets;
  // A bucket without bytes counts as kDirect.
  const auto& by_method = bucket.bytes_by_method;
  const auto most = std::max_element(by_method.begin(), by_method.end());
  BucketRecord record;
  record.group_seq = bucket.group_seq;
  record.trainer_rank = trainer.rank;
  record.seq = bucket.content->seq;
  record.tensors = static_cast<int64_t>(bucket.content->tensors.size());
  record.bytes = bucket.content->bytes;
  record.parts = bucket.parts;
  if (*most > 0) record.broadcast = static_cast<BroadcastMethod>(most - by_method.begin());
  record.took = now - bucket.turn;
  bucket_log.Add(record);
  Finish(bucket.request, absl::OkStatus(), BucketReply{bucket.group_seq, bucket.content->bytes});
}

// ---- parts ----

// Parts start in order, so that the part that is delivered next never waits for a slot that a later
// part has.
void Group::Impl::StartParts() {
  if (update->state != UpdateState::kData && update->state != UpdateState::kSettling) return;
  if (!update->data_plane_up) return;
  for (; update->next_start < update->end_part(); ++update->next_start) {
    Part& part = update->part(update->next_start);
    if (!part.slot.has_value() && !part.content->byte_offsets.empty()) {
      if (NeedsSlot(*part.bucket)) {
        part.slot = ledger.Grant();
        if (!part.slot.has_value()) return;
      } else {
        // The ranks that needed the slot were evicted since the bucket was cut, so the part goes
        // directly.
        part.content = std::make_shared<const PartContent>(WithoutSlot(*part.content));
      }
    }
    StartPart(&part);
  }
}

void Group::Impl::StartPart(Part* part) {
  const Catalog& known = *update->catalog;
  part->touched = known.Touched(*part->content, update->skip_destination);
  for (const uint32_t d : part->touched) WriteFirst(known.instance_of(d));
  TouchDestinations(part->touched, 1);
  Touch(part->bucket->trainer, 1);
  part->started = true;
  ++update->in_flight;
  MovePart start;
  start.update = update->id;
  start.version = update->version;
  start.part = part->seq;
  start.group_seq = part->bucket->group_seq;
  start.bucket_call = part->bucket->request->first_call;
  start.trainer = part->bucket->trainer;
  start.content = part->content;
  start.slot = part->slot;
  start.leased = part->bucket->content->slot.has_value();
  start.skip_destination = update->skip_destination;
  start.verification = update->verification;
  start.touched = part->touched;
  start.want_source_digests = AnyTied(*part->content);
  if (part->slot.has_value()) {
    for (const auto& [id, reader] : update->readers) start.readers.push_back(id);
    if (update->through_slots) start.broadcast = *update->broadcast;
  }
  Do(std::move(start));
}

bool Group::Impl::AnyTied(const PartContent& content) const {
  if (update->catalog->ties().empty()) return false;
  for (uint32_t i = 0; i < content.ranges.size(); ++i) {
    if (update->catalog->IsTied(content.tensor(i).name)) return true;
  }
  return false;
}

void Group::Impl::AddTiedDigests(const PartContent& content, const std::vector<uint64_t>& digests) {
  for (uint32_t i = 0; i < content.ranges.size(); ++i) {
    const std::string& tensor = content.tensor(i).name;
    if (!update->catalog->IsTied(tensor)) continue;
    group::PushedTensor& pushed = update->pushed.at(tensor);
    if (i < digests.size()) {
      pushed.digest += digests[i];
    } else {
      pushed.digested = false;
    }
  }
}

// Two names of one memory must have come with the same values (P11).
absl::Status Group::Impl::CheckTies() const {
  for (const group::TiedNames& tie : update->catalog->ties()) {
    const auto tensor = update->pushed.find(tie.tensor);
    const auto same_as = update->pushed.find(tie.same_as);
    if (tensor == update->pushed.end() || same_as == update->pushed.end()) continue;
    if (!tensor->second.digested || !same_as->second.digested) {
      return Precondition(
          "tensor '{}' and tensor '{}' are one memory in {}, and the daemon of their trainer "
          "sent no digests to compare: push only '{}'",
          tie.tensor, tie.same_as, tie.rank, tie.same_as);
    }
    if (tensor->second.digest == same_as->second.digest) continue;
    return Precondition(
        "tensor '{}' and tensor '{}' are one memory in {}, and the pushed values of them differ: "
        "tie "
        "them in the trainer too, or serve a model that keeps them apart",
        tie.tensor, tie.same_as, tie.rank);
  }
  return absl::OkStatus();
}

// The first byte is about to be written: from here on a failure leaves the instance dirty (P2).
void Group::Impl::WriteFirst(uint32_t index) {
  Participant& participant = update->participants[index];
  if (participant.written) return;
  participant.written = true;
  Instance& instance = instances.at(participant.instance);
  Step(&instance.state, InstanceTrigger::kFirstWrite);
  NoteStanding(participant.instance);
  instance.reason = fmt::format("version {} is being written", update->version);
  for (const MemberId id : participant.members) Find(id)->held.reset();
  Changed();
}

void Group::Impl::On(const TransferDone& e) {
  if (update == nullptr || update->id != e.update || !update->has_part(e.part.value())) return;
  Part& part = update->part(e.part.value());
  if (!part.started || part.done) return;
  part.done = true;
  --update->in_flight;
  TouchDestinations(part.touched, -1);
  Touch(part.bucket->trainer, -1);
  if (update->state == UpdateState::kEnding) {
    if (part.slot.has_value()) (void)ledger.Release(*part.slot);
    return;
  }
  if (!e.status.ok()) {
    return Abandon(FailedMove(fmt::format("part {}", e.part), e.status, e.failed_destination));
  }
  const size_t destinations = std::min(e.bytes_written.size(), update->bytes_written.size());
  for (size_t d = 0; d < destinations; ++d) update->bytes_written[d] += e.bytes_written[d];
  if (AnyTied(*part.content)) AddTiedDigests(*part.content, e.source_digests);
  const int64_t bytes = part.content->CarriedBytes();
  update->moved_bytes += bytes;
  part.bucket->bytes_by_method[static_cast<size_t>(e.broadcast)] += bytes;
  bucket_log.AddBytes(e.broadcast, bytes);
  GiveBackIfUnread(&part);
  if (--part.bucket->parts_left == 0) FinishBucket(*part.bucket);
}

// Gives the slot back at once if no loader rank reads it, although earlier parts may still run.
void Group::Impl::GiveBackIfUnread(Part* part) {
  if (!part->slot.has_value() || !update->readers.empty()) return;
  ledger.Publish(*part->slot, {});
  part->slot.reset();
}

// Parts go to loader ranks in order, each once its slot is filled and verified.
void Group::Impl::SendParts() {
  if (update->state != UpdateState::kData && update->state != UpdateState::kSettling) return;
  while (!update->parts.empty() && update->parts.front().done) {
    SendPartToReaders(&update->parts.front());
    update->parts.pop_front();
    ++update->first_part;
  }
}

void Group::Impl::SendPartToReaders(Part* part) {
  if (!part->slot.has_value()) return;
  std::set<MemberId> reading;
  for (auto& [id, reader] : update->readers) {
    reading.insert(id);
    reader.outstanding.push_back({part->seq, now});
    if (reader.outstanding.size() == 1) SetAckDue(id, reader);
    Find(id)->reads[{update->id, part->seq}] = *part->slot;
    WriteFirst(reader.participant);
    Do(SendPart{id, update->id, update->version, part->seq, *part->slot, part->content});
  }
  ledger.Publish(*part->slot, reading);
  if (reading.empty()) return;
  Changed();
}

void Group::Impl::On(const AckEvent& e) {
  Member* member = Find(e.member);
  if (member == nullptr) return;
  const auto read = member->reads.find({e.update, e.part});
  if (read == member->reads.end()) return;
  ledger.ReaderDone(read->second, e.member);
  member->reads.erase(read);
  if (update == nullptr || update->id != e.update) return;
  const auto reader = update->readers.find(e.member);
  if (reader == update->readers.end()) return;
  const auto erased =
      std::erase_if(reader->second.outstanding,
                    [&e](const group::LoaderReader::Outstanding& o) { return o.part == e.part; });
  if (erased == 0) return;
  reader->second.last_ack = now;
  SetAckDue(e.member, reader->second);
}

void Group::Impl::EndReads(Member* member) {
  for (const auto& [part, slot] : member->reads) ledger.ReaderDone(slot, member->id);
  member->reads.clear();
}

}  // namespace refitd
