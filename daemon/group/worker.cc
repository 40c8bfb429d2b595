#include "daemon/group/worker.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "transport/base/errors.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

absl::Status Differs(const TensorSpec& tensor, const std::string& who, DType dtype,
                     const Dims& shape) {
  return AboutTensor(
      Precondition("tensor '{}': the header has {}, but {} has {}", tensor.name,
                   ToString(tensor.dtype, tensor.shape), who, ToString(dtype, shape)),
      tensor.name);
}

// Root: not OK: how the header differs from the trainer's bucket, which is null if it is gone.
absl::Status AgreesWithBucket(const PeerHeader& command, const CheckedBucket* bucket) {
  const PartContent& content = *command.content;
  if (bucket == nullptr) return Precondition("the trainer's bucket is gone");
  if (command.bucket_ranges.size() != content.ranges.size()) {
    return Precondition("{} ranges of the bucket, but the header has {}",
                        command.bucket_ranges.size(), content.ranges.size());
  }
  for (size_t i = 0; i < content.ranges.size(); ++i) {
    const uint32_t b = command.bucket_ranges[i];
    const TensorRange& range = content.ranges[i];
    if (b >= bucket->ranges.size() || range.tensor >= content.bucket->tensors.size()) {
      return Precondition("range {} names what the bucket does not have", i);
    }
    const TensorSpec& tensor = content.tensor(i);
    const TensorSpec& pushed = bucket->tensors[b];
    if (tensor.name != pushed.name) {
      return AboutTensor(
          Precondition("tensor '{}': the bucket has '{}' there", tensor.name, pushed.name),
          tensor.name);
    }
    if (tensor.dtype != pushed.dtype || tensor.shape != pushed.shape) {
      return Differs(tensor, "the trainer's bucket", pushed.dtype, pushed.shape);
    }
    const TensorRange& whole = bucket->ranges[b];
    if (range.start < whole.start || range.count < 0 ||
        range.start - whole.start > whole.count - range.count) {
      return AboutTensor(
          Precondition("tensor '{}': elements [{}, {}) are not in the bucket's [{}, {})",
                       tensor.name, range.start, range.start + range.count, whole.start,
                       whole.start + whole.count),
          tensor.name);
    }
  }
  return absl::OkStatus();
}

// Reports to the coordinator what this daemon read of the header, and whether it agrees. Returns
// `agreed`, or that the digest differs.
absl::Status Acknowledge(const PeerHeader& command, const absl::Status& agreed,
                         const worker::Output& out) {
  PeerHeaderAck ack{command.update, command.part, HeaderDigest(command), Message(agreed)};
  ack.mismatch_tensor = FailureOf(agreed).tensor;
  const bool same = ack.digest == command.digest;
  out.reports->push_back(std::move(ack));
  return agreed.ok() && !same ? Precondition("the header's digest differs") : agreed;
}

}  // namespace

// ---- Update ----

bool worker::Update::running() const {
  return verifying || (job.has_value() && job->running()) ||
         std::any_of(parts.begin(), parts.end(), [](const auto& p) { return p.second.running(); });
}

bool worker::Update::on_wire() const {
  return (job.has_value() && job->on_wire()) ||
         std::any_of(parts.begin(), parts.end(), [](const auto& p) { return p.second.on_wire; });
}

absl::Status worker::Update::MayComeAgain(const PeerHeader& command) const {
  const auto before = ended.find(command.part);
  if (before == ended.end()) return Precondition("the part was not announced here before");
  if (HeaderDigest(before->second.header) != HeaderDigest(command)) {
    return Precondition("the part was announced with another header before");
  }
  // A root must hold the part, and another node must not.
  if (command.is_root == before->second.held) return absl::OkStatus();
  return command.is_root ? Precondition("the part is not packed here")
                         : Precondition("the part is stored here already");
}

bool worker::Update::Touches(const PartContent& content, const std::vector<bool>& skip) const {
  if (std::find(skip.begin(), skip.end(), false) == skip.end()) return false;
  const auto stored = [&skip](const DestinationIndex::Tensor& tensor) {
    return std::any_of(tensor.entries.begin(), tensor.entries.end(),
                       [&skip](const auto& entry) { return !skip[entry.destination]; });
  };
  for (size_t i = 0; i < content.ranges.size(); ++i) {
    const std::string& name = content.tensor(i).name;
    const DestinationIndex::Tensor* const known = index->Find(name);
    if (known != nullptr && stored(*known)) return true;
    for (const uint32_t derived : index->DerivedFrom(name)) {
      if (stored(index->tensors()[derived])) return true;
    }
  }
  return false;
}

// ---- Worker ----

Worker::Worker(Callbacks callbacks, Duration wire_limit)
    : callbacks_(std::move(callbacks)),
      index_(callbacks_.layout, callbacks_.layout_digest),
      wire_(wire_limit) {}

Worker::Update* Worker::Find(UpdateId id) {
  const auto it = updates_.find(id);
  return it == updates_.end() ? nullptr : &it->second;
}

Worker::Update* Worker::FindLocal(UpdateId local) {
  for (auto& [id, update] : updates_) {
    if (update.local == local) return &update;
  }
  return nullptr;
}

// ---- an update ----

void Worker::Handle(const PeerPrepare& command, TimePoint now, const Output& out) {
  if (updates_.contains(command.update)) return;
  Update update;
  static_cast<PeerPrepare&>(update) = command;
  update.local = callbacks_.next_update();
  update.deadline = now + command.remaining;
  update.index = index_.Prepare(command, out);
  updates_.emplace(command.update, std::move(update));
}

void Worker::Handle(const PeerUpdateEnded& command, TimePoint, const Output& out) {
  Update* update = Find(command.update);
  if (update == nullptr) return;
  update->over = true;
  DropIfOver(command.update, out);
}

void Worker::DropIfOver(UpdateId id, const Output& out) {
  Update* update = Find(id);
  if (update == nullptr || !update->over || update->running()) return;
  update->earlier_locals.push_back(update->local);
  for (const UpdateId local : update->earlier_locals) {
    UpdateEnded ended;
    ended.update = local;
    ended.version = update->version;
    out.actions->push_back(GroupAction(std::move(ended)));
  }
  updates_.erase(id);
  CancelBuildIfUnwanted();
  GiveWireBackIfQuiet(out);
}

// ---- agreement ----

// Not OK: the first tensor of the header that differs from what this daemon knows by itself (P5).
absl::Status Worker::Agrees(const Update& update, const PeerHeader& command) const {
  // There is nothing to compare if the coordinator cut the part from this daemon's own bucket, and
  // the part crosses no wire.
  const bool own = command.content->bucket == callbacks_.bucket(command.bucket_call);
  if (own && !command.wired) return absl::OkStatus();
  if (command.is_root) {
    const auto bucket = callbacks_.bucket(command.bucket_call);
    REFITD_RETURN_IF_ERROR(AgreesWithBucket(command, bucket.get()));
  }
  const PartContent& content = *command.content;
  for (size_t i = 0; i < content.ranges.size(); ++i) {
    const TensorSpec& tensor = content.tensor(i);
    const auto check = [&tensor](const TensorSpec& known) {
      if (known.dtype == tensor.dtype && known.shape == tensor.shape) return absl::OkStatus();
      return Differs(tensor, "an engine's layout", known.dtype, known.shape);
    };
    const DestinationIndex::Tensor* known = update.index->Find(tensor.name);
    if (known != nullptr) REFITD_RETURN_IF_ERROR(check(*known->spec));
    for (const uint32_t derived : update.index->DerivedFrom(tensor.name)) {
      REFITD_RETURN_IF_ERROR(check(update.index->tensors()[derived].spec->derived->from));
    }
  }
  return absl::OkStatus();
}

std::vector<bool> Worker::Skip(const Update& update, const std::vector<bool>& skip) const {
  std::vector<bool> all(update.destinations.size());
  for (size_t d = 0; d < all.size(); ++d) {
    all[d] = (d < skip.size() && skip[d]) || !callbacks_.attached(update.destinations[d]) ||
             d >= update.index->destinations().size() || update.index->destinations()[d] == nullptr;
  }
  return all;
}

void Worker::Handle(const PeerHeader& command, TimePoint, const Output& out) {
  Update* update = Find(command.update);
  if (update == nullptr) {
    const absl::Status unknown = Precondition("this daemon has no such update");
    if (command.wired) Acknowledge(command, unknown, out).IgnoreError();
    out.reports->push_back(TransferDone{command.update, command.part, unknown, {}});
    return;
  }
  if (update->parts.contains(command.part)) {
    Acknowledge(command, Precondition("this daemon's share of the part has not ended"), out)
        .IgnoreError();
    return;
  }
  absl::Status agreed = Agrees(*update, command);
  if (agreed.ok() && command.again) agreed = update->MayComeAgain(command);
  if (command.wired) agreed = Acknowledge(command, agreed, out);
  Announce(update, command, agreed, out);
}

void Worker::Announce(Update* update, const PeerHeader& command, const absl::Status& agreed,
                      const Output& out) {
  const PartSeq seq = command.part;
  update->cut.erase(seq);
  Part& part = update->parts[seq];
  part.header = command;
  part.result.update = command.update;
  part.result.part = seq;
  part.result.bytes_written.resize(update->destinations.size());
  if (!agreed.ok()) {
    ReportPart(update, seq, agreed, out);
  } else if (update->abandoned) {
    ReportPart(update, seq, absl::CancelledError("the update was given up"), out);
  } else if (command.is_root && command.again) {
    part.transferred = true;
    part.result.digests = update->ended.at(seq).result.digests;
  } else if (command.is_root) {
    Transfer(update, &part, out);
  }
}

// Root: the header's content as a part of the trainer's bucket, which has the bytes.
std::shared_ptr<const PartContent> Worker::OfOwnBucket(const PeerHeader& command) const {
  const std::shared_ptr<const PartContent>& content = command.content;
  std::shared_ptr<const CheckedBucket> bucket = callbacks_.bucket(command.bucket_call);
  REFITD_CHECK(bucket != nullptr);  // Disagreement
  if (content->bucket == bucket) return content;
  PartContent own{std::move(bucket), content->ranges, content->byte_offsets, content->bytes};
  for (size_t i = 0; i < own.ranges.size(); ++i) own.ranges[i].tensor = command.bucket_ranges[i];
  return std::make_shared<const PartContent>(std::move(own));
}

// Root: moves the bucket to slots and engines. Other nodes: moves the received slot to engines, and
// to the slots of loader ranks on other devices.
void Worker::Transfer(Update* update, Part* part, const Output& out) {
  const PeerHeader& header = part->header;
  StartTransfer start;
  start.skip_destination = Skip(*update, header.skip);
  start.verification = header.verification;
  start.want_source_digests =
      header.digests || (header.wired && header.verification != Verification::kOff);
  std::copy_if(header.readers.begin(), header.readers.end(), std::back_inserter(start.readers),
               callbacks_.attached);
  const bool fills = header.is_root && header.fill_slot && !header.leased;
  const bool touches = update->Touches(*header.content, start.skip_destination);
  // A leased slot may lie on another device than the slot that the wire sends.
  const bool moves =
      fills || !start.readers.empty() || (header.is_root && header.wired && header.leased);
  if (!moves && !touches && !start.want_source_digests) {
    part->transferred = part->held = true;
    if (!header.is_root || !header.wired) ReportPart(update, header.part, absl::OkStatus(), out);
    return;
  }
  start.update = update->local;
  start.version = header.version;
  start.part = header.part;
  start.group_seq = header.group_seq;
  start.index = update->index;
  start.destinations = update->destinations;
  if (header.is_root) {
    start.wired = header.wired;
    start.bucket_call = header.bucket_call;
    start.trainer = header.trainer;
    start.content = OfOwnBucket(header);
    if (header.leased) start.source_slot = header.slot;
    if (fills) start.fill_slot = header.slot;
    if (!header.wired) start.broadcast = header.broadcast;
  } else {
    start.content = header.content;
    start.source_slot = header.slot;
  }
  part->transferring = true;
  out.actions->push_back(PeerAction(std::move(start)));
}

void Worker::Handle(const TransferDone& done, TimePoint now, const Output& out) {
  Update* update = FindLocal(done.update);
  if (update == nullptr) return;
  const auto it = update->parts.find(done.part);
  if (it == update->parts.end() || !it->second.transferring) return;
  Part& part = it->second;
  part.transferring = false;
  part.transferred = true;
  part.held = done.status.ok();
  part.result = done;
  part.result.update = update->id();
  part.result.bytes_written.resize(update->destinations.size());
  const bool to_send = done.status.ok() && part.header.is_root && part.header.wired;
  const UpdateId id = update->id();
  if (!to_send) {
    ReportPart(update, done.part, done.status, out);
  } else if (update->abandoned) {
    ReportPart(update, done.part, absl::CancelledError("the update was given up"), out);
  } else if (wire_.communicator() != part.header.communicator) {
    CutPart(update, done.part, out);
  }
  PumpWire(update, now, out);
  DropIfOver(id, out);
}

void Worker::ReportPart(Update* update, PartSeq seq, const absl::Status& status,
                        const Output& out) {
  const auto it = update->parts.find(seq);
  Part part = std::move(it->second);
  update->parts.erase(it);
  part.result.status = status;
  if (part.result.wire_failed && !part.header.is_root) update->cut.insert(seq);
  out.reports->push_back(part.result);
  // A part that came again has its record here already, which notes that the part is stored now.
  if (part.header.again) {
    if (part.held) update->ended.at(seq).held = true;
  } else if (part.kept()) {
    update->ended.insert_or_assign(seq, std::move(part));
  }
  std::erase(update->to_wire, seq);
  VerifyIfWritten(update, out);
}

// ---- the wire ----

void Worker::Handle(const PeerIssue& command, TimePoint now, const Output& out) {
  Update* update = Find(command.update);
  if (update == nullptr) return;
  if (update->job.has_value() && update->job->run.has_value() &&
      update->job->run->part == command.part) {
    // The program comes after every part, so it holds up no collective.
    update->job->issued = true;
    AdvanceRun(update, now, out);
    return;
  }
  const auto it = update->parts.find(command.part);
  if (it == update->parts.end() || it->second.issued || !it->second.header.wired) return;
  it->second.issued = true;
  update->to_wire.push_back(command.part);
  PumpWire(update, now, out);
}

// Collectives start in the order of Issue: a part that is not packed yet holds up the parts after
// it (P7).
void Worker::PumpWire(Update* update, TimePoint now, const Output& out) {
  while (!update->to_wire.empty()) {
    const PartSeq seq = update->to_wire.front();
    Part& part = update->parts.at(seq);
    if (part.header.is_root && !part.transferred) return;
    update->to_wire.pop_front();
    if (wire_.communicator() != part.header.communicator) {
      CutPart(update, seq, out);
      continue;
    }
    StartWire start;
    start.communicator = part.header.communicator;
    start.seq = part.header.wire_seq;
    start.slot = *part.header.slot;
    start.bytes = part.header.content->bytes;
    start.ranks = part.header.ranks;
    start.rank = static_cast<uint32_t>(wire_.rank());
    start.size = wire_.size();
    start.timeout = wire_.TimeoutFor(update->deadline, now);
    part.on_wire = true;
    out.actions->push_back(PeerAction(std::move(start)));
  }
  if (update->job.has_value()) AdvanceRun(update, now, out);
}

void Worker::CutPart(Update* update, PartSeq part, const Output& out) {
  update->parts.at(part).result.wire_failed = true;
  ReportPart(update, part, absl::CancelledError("the data plane of the update was closed"), out);
}

// Ends the parts that wait for a collective of the closed communicator. A root's part that is still
// being packed ends when it is packed, and a part that is on the wire ends with its WireDone.
void Worker::CutParts(Update* update, CommunicatorId closed, const Output& out) {
  std::vector<PartSeq> waiting;
  for (const auto& [seq, part] : update->parts) {
    if (!part.header.wired || part.header.communicator != closed || part.running()) continue;
    // A root has packed the part and waits to send it; another node waits to receive it.
    if (part.transferred == part.header.is_root) waiting.push_back(seq);
  }
  for (const PartSeq seq : waiting) CutPart(update, seq, out);
}

void Worker::Handle(const WireDone& done, TimePoint now, const Output& out) {
  if (FinishRound(done, now, out)) return;
  for (auto& [id, update] : updates_) {
    const auto it = std::find_if(update.parts.begin(), update.parts.end(), [&done](const auto& p) {
      return p.second.on_wire && p.second.header.communicator == done.communicator &&
             p.second.header.wire_seq == done.seq;
    });
    if (it == update.parts.end()) continue;
    const PartSeq seq = it->first;
    const UpdateId update_id = id;
    Part& part = it->second;
    part.on_wire = false;
    part.result.wire_failed = !done.status.ok();
    if (!done.status.ok() || part.header.is_root) {
      ReportPart(&update, seq, done.status, out);
    } else if (update.abandoned) {
      ReportPart(&update, seq, absl::CancelledError("the update was given up"), out);
    } else {
      Transfer(&update, &part, out);
    }
    GiveWireBackIfQuiet(out);
    DropIfOver(update_id, out);
    return;
  }
}

void Worker::Handle(const CloseCommunicator& command, TimePoint, const Output& out) {
  if (!wire_.Close(command.communicator, out)) return;
  // A run that has nothing on the wire yet would wait for good (P4).
  for (auto& [id, update] : updates_) {
    CutParts(&update, command.communicator, out);
    if (!update.job.has_value() || !update.job->run.has_value()) continue;
    Job& job = *update.job;
    if (job.done || !job.run->wired || job.run->communicator != command.communicator) continue;
    job.result.wire_failed = true;
    job.Stop(absl::CancelledError("the data plane of the update was closed"));
    EndRunIfQuiet(&update, out);
  }
}

void Worker::Handle(const PeerWireUnlock& command, TimePoint, const Output& out) {
  wire_.Unlock(command.update);
  GiveWireBackIfQuiet(out);
}

void Worker::GiveWireBackIfQuiet(const Output& out) {
  const bool on_wire = std::any_of(updates_.begin(), updates_.end(),
                                   [](const auto& u) { return u.second.on_wire(); });
  if (!on_wire) wire_.GiveBackIfAsked(out);
}

// ---- verification ----

void Worker::Handle(const VerifyUpdate& command, TimePoint, const Output& out) {
  Update* update = Find(command.update);
  if (update == nullptr) {
    VerifyDone verified;
    verified.update = command.update;
    verified.status = absl::FailedPreconditionError("this daemon has no such update");
    out.reports->push_back(std::move(verified));
    return;
  }
  update->to_verify = command;
  VerifyIfWritten(update, out);
}

void Worker::VerifyIfWritten(Update* update, const Output& out) {
  if (!update->to_verify.has_value() || !update->parts.empty()) return;
  if (!update->cut.empty() && !update->abandoned) return;
  if (update->job.has_value() && update->job->run.has_value() && !update->job->done) return;
  const VerifyUpdate command = *std::exchange(update->to_verify, std::nullopt);
  VerifyDone verified;
  verified.update = command.update;
  // After a run that was cut, more must be stored before the destinations count as whole.
  const bool cut = update->job.has_value() && update->job->result.wire_failed;
  if (update->abandoned || cut) {
    verified.status = absl::CancelledError(cut ? "the data plane failed before all was stored"
                                               : "the update was given up");
    out.reports->push_back(std::move(verified));
    return;
  }
  StartVerify start;
  start.update = update->local;
  start.version = update->version;
  start.index = update->index;
  start.destinations = update->destinations;
  start.skip_destination = Skip(*update, command.skip);
  if (std::find(start.skip_destination.begin(), start.skip_destination.end(), false) ==
      start.skip_destination.end()) {
    out.reports->push_back(std::move(verified));
    return;
  }
  update->verifying = true;
  out.actions->push_back(PeerAction(std::move(start)));
}

void Worker::Handle(const VerifyDone& done, TimePoint, const Output& out) {
  Update* update = FindLocal(done.update);
  if (update == nullptr) return;
  update->verifying = false;
  out.reports->push_back(
      VerifyDone{update->id(), done.status, done.failed_destinations, done.content});
  DropIfOver(update->id(), out);
}

// ---- giving up ----

void Worker::Handle(const PeerAbandon& command, TimePoint, const Output& out) {
  Update* update = Find(command.update);
  if (update == nullptr || update->abandoned) return;
  update->abandoned = true;
  std::vector<PartSeq> idle;
  for (const auto& [seq, part] : update->parts) {
    if (!part.running()) idle.push_back(seq);
  }
  for (const PartSeq seq : idle) {
    ReportPart(update, seq, absl::CancelledError("the update was given up"), out);
  }
  VerifyIfWritten(update, out);
  if (update->job.has_value() && update->job->run.has_value()) {
    update->job->Stop(absl::CancelledError("the update was given up"));
    EndRunIfQuiet(update, out);
  }
  DropIfOver(command.update, out);
}

void Worker::AbandonAll(TimePoint now, const Output& out) {
  std::vector<UpdateId> ids;
  for (const auto& [id, update] : updates_) ids.push_back(id);
  for (const UpdateId id : ids) Handle(PeerAbandon{id}, now, out);
  if (const auto open = wire_.communicator()) Handle(CloseCommunicator{*open}, now, out);
  if (const auto lock = wire_.lock()) Handle(PeerWireUnlock{*lock}, now, out);
  for (const UpdateId id : ids) {
    PeerUpdateEnded ended;
    ended.update = id;
    Handle(ended, now, out);
  }
}

// ---- questions of the machine ----

absl::StatusOr<SendPart> Worker::PartFor(MemberId member, UpdateId update, PartSeq part) const {
  const auto it = updates_.find(update);
  if (it == updates_.end()) {
    return absl::FailedPreconditionError("this daemon has no such update");
  }
  const auto known = it->second.ended.find(part);
  if (known == it->second.ended.end() || !known->second.header.slot.has_value()) {
    return Error(absl::StatusCode::kFailedPrecondition, "part {}: no slot of it is known here",
                 part);
  }
  const PeerHeader& header = known->second.header;
  if (std::find(header.readers.begin(), header.readers.end(), member) == header.readers.end()) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "part {}: its header did not say that the rank is handed it", part);
  }
  return SendPart{member, update, header.version, part, *header.slot, header.content};
}

bool Worker::quiet() const {
  return std::none_of(updates_.begin(), updates_.end(),
                      [](const auto& u) { return u.second.running(); });
}

bool Worker::Reads(CallId bucket_call) const {
  for (const auto& [id, update] : updates_) {
    for (const auto& [seq, part] : update.parts) {
      if (part.transferring && part.header.is_root && part.header.bucket_call == bucket_call) {
        return true;
      }
    }
  }
  return false;
}

// ---- what must hold after every event ----

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

}  // namespace refitd
