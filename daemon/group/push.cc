#include "daemon/group/push.h"

#include <algorithm>
#include <set>

#include "absl/types/span.h"
#include "transport/base/errors.h"
#include "transport/base/failure.h"
#include "transport/broadcast_method.h"

namespace refitd::group {
namespace {

// The content of a part that goes directly, without a slot.
PartContent WithoutSlot(PartContent content) {
  content.byte_offsets.clear();
  content.bytes = content.CarriedBytes();
  return content;
}

}  // namespace

void BucketLog::AddBytes(BroadcastMethod method, int64_t bytes) {
  totals_[static_cast<size_t>(method)].bytes += bytes;
}

void BucketLog::Add(const BucketRecord& record) {
  ++totals_[static_cast<size_t>(record.broadcast)].buckets;
  records_.push_back(record);
  if (records_.size() <= kRememberedBuckets) return;
  records_.pop_front();
  ++left_out_;
}

std::vector<BroadcastTotals> BucketLog::Totals() const {
  std::vector<BroadcastTotals> used;
  for (size_t m = 0; m < totals_.size(); ++m) {
    if (totals_[m].bytes == 0 && totals_[m].buckets == 0) continue;
    used.push_back({static_cast<BroadcastMethod>(m), totals_[m].bytes, totals_[m].buckets});
  }
  return used;
}

UpdateStatistics BucketLog::Statistics() const {
  return {Totals(), {records_.begin(), records_.end()}, left_out_};
}

absl::Status CheckCount(std::string_view field, int64_t count, int64_t before) {
  if (count < 0) {
    return InvalidField(field, "{}: {} is negative", field, count);
  }
  if (count != 0 && before != 0 && count != before) {
    return Precondition("{}: {} differs from the {} of the ranks before", field, count, before);
  }
  return absl::OkStatus();
}

absl::Status CheckTensors(int64_t count, int64_t before) {
  if (count > kMaxTensorsPerLayout) return TooManyTensors("tensor_count", count);
  return CheckCount("tensor_count", count, before);
}

// ---- trainer ranks ----

TrainerProgress& UpdatePush::Join(Member* member) {
  TrainerProgress& progress = trainers_[member->rank];
  progress.member = member->id;
  if (member->state == MemberState::kAttached) Step(&member->state, MemberTrigger::kPrepare);
  return progress;
}

bool UpdatePush::all_committed() const {
  return std::all_of(trainers_.begin(), trainers_.end(),
                     [](const auto& t) { return t.second.committed; });
}

bool UpdatePush::all_in_one_call() const {
  return !trainers_.empty() && std::all_of(trainers_.begin(), trainers_.end(),
                                           [](const auto& t) { return t.second.one_call; });
}

bool UpdatePush::AreOn(NodeId node) const {
  return std::any_of(trainers_.begin(), trainers_.end(), [this, node](const auto& t) {
    const Member* member = members_.Find(t.second.member);
    return member != nullptr && member->node == node;
  });
}

int64_t UpdatePush::TensorCount() const {
  int64_t count = update_.tensor_count;
  for (const auto& [rank, progress] : trainers_) count = std::max(count, progress.tensor_count);
  return count;
}

// ---- broadcasting through slots on GPUs ----

absl::Status UpdatePush::CheckBroadcast(BroadcastMethod method) const {
  if (!broadcast_.has_value() || *broadcast_ == method) return absl::OkStatus();
  return Precondition("broadcast: {} differs from the first rank's {}", BroadcastMethodName(method),
                      BroadcastMethodName(*broadcast_));
}

void UpdatePush::TakeBroadcast(BroadcastMethod method, bool slots, const std::string& label) {
  broadcast_ = method;
  if (!slots) NoteLacksSlots(label);
}

void UpdatePush::NoteLacksSlots(const std::string& label) {
  if (lacks_slots_.empty()) lacks_slots_ = label;
}

// Buckets are broadcast through slots only within one daemon; the wire brings their bytes to other
// daemons. If the update is of several daemons, or a rank lacks slots, kAuto does without them, and
// a method that needs slots is refused.
absl::Status UpdatePush::DecideBroadcast() {
  through_slots_ = false;
  const BroadcastMethod method = broadcast_.value_or(BroadcastMethod::kDirect);
  if (method == BroadcastMethod::kDirect) return absl::OkStatus();
  const bool asked = NeedsSlots(method);
  if (!participants_.on_one_node()) {
    if (!asked) return absl::OkStatus();
    return Precondition("broadcast: {} moves bytes within one daemon, and the update is of {}",
                        BroadcastMethodName(method), participants_.nodes().size());
  }
  through_slots_ = lacks_slots_.empty();
  if (!asked || through_slots_) return absl::OkStatus();
  return Error(absl::StatusCode::kResourceExhausted,
               "broadcast: {} needs staging slots, and the GPU of {} has none",
               BroadcastMethodName(method), lacks_slots_);
}

// ---- buckets ----

void UpdatePush::Assemble() {
  const Catalog& catalog = participants_.catalog();
  // Space is reserved before any bucket comes: growing the map later would hold up other calls of
  // the group.
  if (broadcast_.has_value()) coverage_.Reserve(catalog.tensor_count());
  readers_.clear();
  for (const Catalog::Rank& rank : catalog.ranks()) {
    if (ReadsSlots(rank.delivery)) readers_[rank.member].participant = rank.instance;
  }
}

std::optional<MemberId> UpdatePush::AnyReader() const {
  if (readers_.empty()) return std::nullopt;
  return readers_.begin()->first;
}

absl::Status UpdatePush::CheckBucket(const TrainerProgress& progress, const BucketEvent& e) const {
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
  if (progress.awaited_buckets.has_value() && bucket.seq >= *progress.awaited_buckets) {
    return Precondition("seq: {}, but the rank commits with {} buckets", bucket.seq,
                        *progress.awaited_buckets);
  }
  if (bucket.seq - progress.next_seq >= limits_.outstanding_buckets) {
    return Error(absl::StatusCode::kResourceExhausted,
                 "seq: {} is too far ahead: {} comes next, and at most {} may be outstanding",
                 bucket.seq, progress.next_seq, limits_.outstanding_buckets);
  }
  if (progress.pending_buckets >= limits_.outstanding_buckets) {
    return Error(absl::StatusCode::kResourceExhausted,
                 "seq: {}: {} buckets are outstanding already", bucket.seq,
                 progress.pending_buckets);
  }
  for (const TensorSpec& tensor : bucket.tensors) {
    REFITD_RETURN_IF_ERROR(coverage_.Check(tensor));
  }
  for (const uint32_t i : bucket.unaligned) {
    const std::string& name = bucket.tensors[i].name;
    const std::set<std::string_view> derived = participants_.catalog().DerivedFrom(name);
    if (derived.empty()) continue;
    return AboutTensor(
        Precondition("tensor '{}' lies unaligned in its bucket, and '{}' is computed "
                     "of it: give byte_offsets, at multiples of {} bytes",
                     name, *derived.begin(), ElementBytes(bucket.tensors[i].dtype)),
        name);
  }
  return CheckParts(bucket);
}

// Many ranges may name the same source bytes, so a small message could ask for any number of parts;
// this limits them (P10). Parts must hold whole blocks of what is derived from them (P1).
absl::Status UpdatePush::CheckParts(const CheckedBucket& bucket) const {
  if (bucket.slot.has_value()) return absl::OkStatus();
  if (readers_.empty() && participants_.on_one_node() && !through_slots_) {
    return absl::OkStatus();
  }
  const int64_t most = kMaxPartsPerBucket * members_.spec().slot_bytes;
  int64_t bytes = 0;
  for (const TensorRange& range : bucket.ranges) {
    const int64_t needed = bucket.BytesOf(range) + kPackAlignment;
    if (needed > most - bytes) {
      return Error(
          absl::StatusCode::kResourceExhausted,
          "seq {}: the bucket's tensors need more than {} slots of {} bytes; '{}' is one too many",
          bucket.seq, kMaxPartsPerBucket, members_.spec().slot_bytes,
          bucket.tensors[range.tensor].name);
    }
    bytes += needed;
  }
  const Catalog& catalog = participants_.catalog();
  // A part may leave half of its slot empty.
  if (bytes <= most / 2 && !catalog.any_derived()) return absl::OkStatus();
  const std::vector<PackedBucket> parts =
      FormBuckets(bucket.tensors, bucket.ranges, members_.spec().slot_bytes);
  if (static_cast<int64_t>(parts.size()) > kMaxPartsPerBucket) {
    return Error(absl::StatusCode::kResourceExhausted,
                 "seq {}: the bucket's tensors need {} slots of {} bytes; the most are {}",
                 bucket.seq, parts.size(), members_.spec().slot_bytes, kMaxPartsPerBucket);
  }
  if (!catalog.any_derived()) return absl::OkStatus();
  for (const PackedBucket& part : parts) {
    for (const TensorRange& range : part.ranges) {
      REFITD_RETURN_IF_ERROR(catalog.CheckBlocks(bucket.tensors[range.tensor], range));
    }
  }
  return absl::OkStatus();
}

absl::Status UpdatePush::Reserve(const BucketEvent& e) {
  UpdateCoverage::Taken taken;
  absl::Status status = coverage_.Take(*e.bucket, update_.tensor_count, &taken);
  const std::optional<SlotGrant>& slot = e.bucket->slot;
  if (status.ok() && slot.has_value()) status = slots_.Submit(e.member, *slot);
  if (!status.ok()) coverage_.TakeBack(&taken);
  return status;
}

void UpdatePush::Take(const BucketEvent& e, std::shared_ptr<Request> request,
                      TrainerProgress* progress) {
  auto bucket = std::make_shared<Bucket>();
  bucket->request = std::move(request);
  bucket->trainer = e.member;
  bucket->content = e.bucket;
  ++progress->pending_buckets;
  progress->early[e.bucket->seq] = std::move(bucket);
  TakeInOrder(progress);
}

void UpdatePush::TakeInOrder(TrainerProgress* progress) {
  for (auto it = progress->early.find(progress->next_seq); it != progress->early.end();
       it = progress->early.find(progress->next_seq)) {
    const std::shared_ptr<Bucket> bucket = std::move(it->second);
    progress->early.erase(it);
    ++progress->next_seq;
    bucket->group_seq = buckets_++;
    bucket->turn = out_.now();
    accepted_bytes_ += bucket->content->bytes;
    CutIntoParts(bucket);
  }
}

bool UpdatePush::NeedsSlot(const Bucket& bucket) const {
  if (!readers_.empty() || through_slots_) return true;
  if (participants_.on_one_node()) return false;
  const NodeId root = members_.Find(bucket.trainer)->node;
  const std::vector<MemberId>& destinations = participants_.catalog().destinations();
  for (size_t d = 0; d < destinations.size(); ++d) {
    const bool skipped = participants_.skip_destination()[d];
    if (!skipped && members_.Find(destinations[d])->node != root) return true;
  }
  return false;
}

void UpdatePush::CutIntoParts(const std::shared_ptr<Bucket>& bucket) {
  const CheckedBucket& all = *bucket->content;
  // So the bucket has a part, whose end answers the call.
  REFITD_CHECK(!all.ranges.empty());
  if (all.slot.has_value()) {
    AddPart(bucket, WholeBucket(bucket->content));
    return;
  }
  if (!NeedsSlot(*bucket)) {
    CutBetweenTensors(bucket);
    return;
  }
  for (PackedBucket& packed : FormBuckets(all.tensors, all.ranges, members_.spec().slot_bytes)) {
    AddPart(bucket, {bucket->content, std::move(packed.ranges), std::move(packed.byte_offsets),
                     packed.bytes});
  }
}

// Cuts a bucket that needs no slot. The parts are for planning alone: one part moves while the next
// is planned. Planning works tensor by tensor, so cuts are between tensors. However small the
// tensors are, the bucket makes no more parts than any other (P10).
void UpdatePush::CutBetweenTensors(const std::shared_ptr<Bucket>& bucket) {
  const CheckedBucket& all = *bucket->content;
  const auto tensors = static_cast<int64_t>(all.ranges.size());
  const int64_t most =
      std::min({all.bytes / limits_.direct_part_bytes, tensors / limits_.direct_part_tensors,
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

void UpdatePush::AddPart(const std::shared_ptr<Bucket>& bucket, PartContent content) {
  Part part;
  part.seq = PartSeq(end_part());
  part.bucket = bucket;
  part.content = std::make_shared<const PartContent>(std::move(content));
  part.slot = bucket->content->slot;
  parts_.push_back(std::move(part));
  ++bucket->parts_left;
  ++bucket->parts;
}

void UpdatePush::FinishBucket(const Bucket& bucket) {
  const Member& trainer = *members_.Find(bucket.trainer);
  --trainers_.at(trainer.rank).pending_buckets;
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
  record.took = out_.now() - bucket.turn;
  log_.Add(record);
  requests_.Finish(bucket.request, absl::OkStatus(),
                   BucketReply{bucket.group_seq, bucket.content->bytes});
}

// ---- parts ----

// Parts start in order, so that the part that is delivered next never waits for a slot that a later
// part has.
void UpdatePush::StartParts() {
  for (; next_start_ < end_part(); ++next_start_) {
    Part& part = PartAt(next_start_);
    if (!part.slot.has_value() && !part.content->byte_offsets.empty()) {
      if (NeedsSlot(*part.bucket)) {
        part.slot = slots_.Grant();
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

void UpdatePush::StartPart(Part* part) {
  const Catalog& known = participants_.catalog();
  part->touched = known.Touched(*part->content, participants_.skip_destination());
  for (const uint32_t d : part->touched) participants_.WriteFirst(known.instance_of(d));
  participants_.Touch(part->touched, 1);
  members_.Touch(part->bucket->trainer, 1);
  part->started = true;
  ++in_flight_;
  MovePart start;
  start.update = update_.id;
  start.version = update_.version;
  start.part = part->seq;
  start.group_seq = part->bucket->group_seq;
  start.root = members_.Find(part->bucket->trainer)->node;
  start.bucket_call = part->bucket->request->first_call;
  start.trainer = part->bucket->trainer;
  start.content = part->content;
  start.slot = part->slot;
  start.leased = part->bucket->content->slot.has_value();
  start.skip = participants_.skip_destination();
  start.verification = update_.verification;
  start.touched = part->touched;
  start.digests = coverage_.AnyTied(*part->content);
  if (part->slot.has_value()) {
    for (const auto& [id, reader] : readers_) start.readers.push_back(id);
    if (through_slots_) start.broadcast = *broadcast_;
  }
  out_.Do(std::move(start));
}

Part* UpdatePush::EndTransfer(PartSeq seq) {
  if (seq.value() < first_part_ || seq.value() >= end_part()) return nullptr;
  Part& ended = PartAt(seq.value());
  if (!ended.started || ended.done) return nullptr;
  ended.done = true;
  --in_flight_;
  participants_.Touch(ended.touched, -1);
  members_.Touch(ended.bucket->trainer, -1);
  return &ended;
}

void UpdatePush::TakeResult(const TransferDone& e, Part* part) {
  participants_.AddWritten(e.bytes_written);
  if (coverage_.AnyTied(*part->content)) coverage_.AddTiedDigests(*part->content, e.digests);
  const int64_t bytes = part->content->CarriedBytes();
  moved_bytes_ += bytes;
  part->bucket->bytes_by_method[static_cast<size_t>(e.broadcast)] += bytes;
  log_.AddBytes(e.broadcast, bytes);
  // The slot is free at once if no loader rank reads it, although earlier parts may still run.
  if (part->slot.has_value() && readers_.empty()) {
    slots_.Publish(*part->slot, update_.id, part->seq, {});
    part->slot.reset();
  }
  if (--part->bucket->parts_left == 0) FinishBucket(*part->bucket);
}

void UpdatePush::SendParts() {
  while (!parts_.empty() && parts_.front().done) {
    SendPartToReaders(&parts_.front());
    parts_.pop_front();
    ++first_part_;
  }
}

void UpdatePush::SendPartToReaders(Part* part) {
  if (!part->slot.has_value()) return;
  std::set<MemberId> reading;
  for (auto& [id, reader] : readers_) {
    reading.insert(id);
    reader.outstanding.push_back({part->seq, out_.now()});
    if (reader.outstanding.size() == 1) SetAckDue(id, reader);
    participants_.WriteFirst(reader.participant);
    out_.Do(SendPart{id, update_.id, update_.version, part->seq, *part->slot, part->content});
  }
  slots_.Publish(*part->slot, update_.id, part->seq, reading);
  if (reading.empty()) return;
  out_.Changed();
}

void UpdatePush::SetAckDue(MemberId id, const LoaderReader& reader) {
  std::optional<TimePoint> due;
  if (!reader.outstanding.empty()) {
    due = std::max(reader.last_ack, reader.outstanding.front().sent) + limits_.ack_limit;
  }
  acks_.Set(id, due);
}

void UpdatePush::Acknowledge(const AckEvent& e) {
  const auto reader = readers_.find(e.member);
  if (reader == readers_.end()) return;
  const auto erased =
      std::erase_if(reader->second.outstanding,
                    [&e](const LoaderReader::Outstanding& o) { return o.part == e.part; });
  if (erased == 0) return;
  reader->second.last_ack = out_.now();
  SetAckDue(e.member, reader->second);
}

void UpdatePush::ForgetReader(MemberId id) {
  readers_.erase(id);
  acks_.Set(id, std::nullopt);
}

// Slots of parts that are in flight are given back when those parts end.
void UpdatePush::DropUnstarted() {
  for (const Part& part : parts_) {
    if (part.started && !part.done) continue;
    if (part.slot.has_value()) slots_.Release(*part.slot);
  }
  parts_.resize(static_cast<size_t>(next_start_ - first_part_));
  for (auto& [rank, progress] : trainers_) {
    for (const auto& [seq, bucket] : progress.early) {
      if (bucket->content->slot.has_value()) slots_.Release(*bucket->content->slot);
    }
    progress.early.clear();
  }
}

// ---- commit ----

absl::Status UpdatePush::CheckCommit(const TrainerProgress& progress, const CommitEvent& e) const {
  const int64_t before = TensorCount();
  REFITD_RETURN_IF_ERROR(CheckTensors(e.tensor_count, before));
  if (progress.committed) {
    if (e.bucket_count == progress.bucket_count) return absl::OkStatus();
    return Precondition("bucket_count: {}, but the rank has committed with {} already",
                        e.bucket_count, progress.bucket_count);
  }
  if (progress.awaited_buckets.has_value() && *progress.awaited_buckets != e.bucket_count) {
    return Precondition("bucket_count: {}, but the rank commits with {} already", e.bucket_count,
                        *progress.awaited_buckets);
  }
  const int64_t pushed = progress.next_seq + static_cast<int64_t>(progress.early.size());
  if (pushed > e.bucket_count) {
    return Precondition("bucket_count: {}, but {} buckets were pushed", e.bucket_count, pushed);
  }
  if (progress.next_seq == e.bucket_count) {
    return CheckIfLast(progress, std::max(before, e.tensor_count));
  }
  if (!e.pushes_under_way) {
    return Precondition("bucket_count: {}, but seq {} was never pushed", e.bucket_count,
                        progress.next_seq);
  }
  if (!progress.early.empty() && progress.early.rbegin()->first >= e.bucket_count) {
    return Precondition("bucket_count: {}, but seq {} was pushed", e.bucket_count,
                        progress.early.rbegin()->first);
  }
  if (e.bucket_count - progress.next_seq > limits_.outstanding_buckets) {
    return Error(absl::StatusCode::kResourceExhausted,
                 "bucket_count: {}, but {} comes next, and at most {} may be outstanding",
                 e.bucket_count, progress.next_seq, limits_.outstanding_buckets);
  }
  return absl::OkStatus();
}

absl::Status UpdatePush::CheckIfLast(const TrainerProgress& progress, int64_t tensor_count) const {
  const bool last = std::all_of(trainers_.begin(), trainers_.end(), [&progress](const auto& t) {
    return t.second.committed || &t.second == &progress;
  });
  return last ? coverage_.CheckAll(tensor_count) : absl::OkStatus();
}

void UpdatePush::WithdrawCommit(TrainerProgress* progress, const absl::Status& why) {
  progress->awaited_buckets.reset();
  progress->tensor_count = 0;
  for (const auto& request : std::exchange(progress->commits, {})) {
    requests_.Finish(request, why, EmptyReply{});
  }
}

void UpdatePush::WithdrawIfNobodyWaits(const Request& commit, const absl::Status& why) {
  const Member* member = members_.Find(commit.member);
  if (member == nullptr) return;
  const auto it = trainers_.find(member->rank);
  if (it == trainers_.end() || it->second.member != commit.member) return;
  TrainerProgress& progress = it->second;
  if (!progress.awaited_buckets.has_value() || progress.committed) return;
  if (std::any_of(progress.commits.begin(), progress.commits.end(),
                  [](const auto& request) { return !request->calls.empty(); })) {
    return;
  }
  WithdrawCommit(&progress, why);
}

// ---- for people ----

void UpdatePush::SendOutcome(bool committed, const std::string& reason, const Failure& failure) {
  for (const auto& [rank, progress] : trainers_) {
    Member* member = members_.Find(progress.member);
    if (member == nullptr || member->state == MemberState::kLeaving) continue;
    Step(&member->state, MemberTrigger::kOutcome);
    if (committed) {
      out_.Do(SendCommitted{member->id, update_.version});
    } else {
      out_.Do(SendAborted{member->id, update_.version, reason, false, failure});
    }
  }
}

void UpdatePush::AppendUnacknowledged(std::vector<std::string>* waits) const {
  for (const auto& [id, reader] : readers_) {
    if (reader.outstanding.empty()) continue;
    waits->push_back(fmt::format("{} to acknowledge part {}", members_.Label(id),
                                 reader.outstanding.front().part));
  }
}

void UpdatePush::AppendUnstarted(std::vector<std::string>* waits) const {
  if (all_started()) return;
  waits->push_back(fmt::format("a slot for part {} ({})", next_start_, slots_.Holders()));
}

void UpdatePush::AppendUncommitted(std::vector<std::string>* waits) const {
  for (const auto& [rank, progress] : trainers_) {
    if (progress.committed) continue;
    const std::string label = members_.Label(progress.member);
    waits->push_back(progress.early.empty() && !progress.awaited_buckets.has_value()
                         ? fmt::format("{} to commit", label)
                         : fmt::format("{} to push seq {}", label, progress.next_seq));
  }
}

void UpdatePush::SuspectAwaited(Failure* failure) const {
  for (const auto& [id, reader] : readers_) {
    const Member* member = members_.Find(id);
    if (!reader.outstanding.empty() && member != nullptr) failure->Add(SuspectOf(*member));
  }
  for (const auto& [rank, progress] : trainers_) {
    const Member* member = progress.committed ? nullptr : members_.Find(progress.member);
    if (member != nullptr) failure->Add(SuspectOf(*member));
  }
}

void UpdatePush::CheckInvariants(bool decided) const {
  REFITD_CHECK(first_part_ >= 0 && first_part_ <= next_start_ && next_start_ <= end_part());
  int64_t running = 0;
  for (size_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    REFITD_CHECK(part.seq.value() == first_part_ + static_cast<int64_t>(i));
    REFITD_CHECK(part.bucket != nullptr && part.content != nullptr);
    // P7: parts are started in their order.
    if (part.started) REFITD_CHECK(part.seq.value() < next_start_);
    REFITD_CHECK(part.started || !part.done);
    if (part.started && !part.done) ++running;
  }
  REFITD_CHECK(running == in_flight_);
  coverage_.CheckInvariants();
  for (const auto& [id, reader] : readers_) {
    REFITD_CHECK(participants_.Of(id) == reader.participant);
    REFITD_CHECK(std::is_sorted(reader.outstanding.begin(), reader.outstanding.end(),
                                [](const auto& a, const auto& b) { return a.part < b.part; }));
  }
  for (const auto& [rank, progress] : trainers_) {
    REFITD_CHECK(rank >= 0 && progress.pending_buckets >= 0);
    REFITD_CHECK(progress.early.empty() || progress.early.begin()->first > progress.next_seq);
    REFITD_CHECK(progress.committed || !decided);  // P1
  }
}

}  // namespace refitd::group
