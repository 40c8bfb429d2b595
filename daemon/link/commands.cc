#include "daemon/link/commands.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <type_traits>
#include <unordered_set>

#include "daemon/checks/bucket.h"
#include "daemon/link/member_actions.h"
#include "daemon/link/trainer_messages.h"
#include "daemon/link/values.h"
#include "proto/convert.h"
#include "transport/base/identity.h"
#include "transport/base/status.h"
#include "transport/plan/node_program.h"

namespace refitd {
namespace {

using peer::BucketOf;
using peer::CallOf;
using peer::CheckIncarnation;
using peer::CheckSize;
using peer::CheckSlot;
using peer::ContentVersionOf;
using peer::FailureOfMessage;
using peer::FlagsOf;
using peer::IndicesOf;
using peer::kEnvelopeBytes;
using peer::MemberOf;
using peer::MembersOf;
using peer::MillisOf;
using peer::MillisToProto;
using peer::OpaqueOf;
using peer::PartOf;
using peer::ReadStatus;
using peer::SetBucket;
using peer::SetIds;
using peer::SetSlot;
using peer::SetStatus;
using peer::SetStatusOf;
using peer::SlotOf;
using peer::TextOf;
using peer::TextToProto;
using peer::VerificationOf;
using peer::VersionOf;

constexpr int64_t kNoVersion = -1;  // in PeerReadiness.versions

// ---- commands: to the wire ----

void Put(const PeerWelcome& v, v1::PeerAnswer* message) {
  v1::PeerWelcome* out = message->mutable_welcome();
  out->set_member(v.member.value());
  if (v.group_version.has_value()) out->set_group_version(v.group_version->value());
  if (v.content.has_value()) out->set_content_version(v.content->value());
  out->set_trainer_ranks(v.trainer_ranks);
}

void Put(const RefuseMember& v, v1::PeerAnswer* message) {
  message->mutable_refuse()->set_member(v.member.value());
  SetStatus(v.status, message->mutable_refuse()->mutable_status());
}

void PutPayload(const EmptyReply&, v1::PeerReply*) {}

void PutPayload(const BeginReply& r, v1::PeerReply* message) { Fill(r, message->mutable_begun()); }
void PutPayload(const LeaseSlotReply& r, v1::PeerReply* message) {
  Fill(r, message->mutable_leased());
}
void PutPayload(const BucketReply& r, v1::PeerReply* message) { Fill(r, message->mutable_taken()); }
void PutPayload(const CommitReply& r, v1::PeerReply* message) { Fill(r, message->mutable_done()); }

void Put(const Reply& v, v1::PeerAnswer* message) {
  v1::PeerReply* out = message->mutable_reply();
  out->set_call(v.call.value());
  SetStatusOf(v.status, out);
  if (v.status.ok()) std::visit([&](const auto& payload) { PutPayload(payload, out); }, v.payload);
}

void Put(const PeerPrepare& v, v1::PeerAnswer* message) {
  v1::PeerPrepare* out = message->mutable_prepare();
  out->set_update(v.update.value());
  out->set_version(v.version.value());
  out->set_remaining_ms(MillisToProto(v.remaining));
  out->set_tensor_count(v.tensor_count);
  out->set_verification(ToProto(v.verification));
  SetIds(v.engines, out->mutable_engines());
  SetIds(v.destinations, out->mutable_destinations());
  out->mutable_layout_digests()->Add(v.layout_digests.begin(), v.layout_digests.end());
  out->set_trainer_ranks(v.trainer_ranks);
}

void Put(const PeerHeader& v, v1::PeerAnswer* message) {
  v1::PeerHeader* out = message->mutable_header();
  out->set_update(v.update.value());
  out->set_version(v.version.value());
  out->set_part(v.part.value());
  out->set_group_seq(v.group_seq);
  out->set_root(v.root.value());
  SetBucket(*v.content, v.slot, out);
  out->set_leased(v.leased);
  out->set_verification(ToProto(v.verification));
  out->set_digest(v.digest);
  out->set_is_root(v.is_root);
  out->set_wired(v.wired);
  out->set_fill_slot(v.fill_slot);
  out->set_communicator(v.communicator.value());
  out->set_wire_seq(v.wire_seq.value());
  out->mutable_ranks()->Add(v.ranks.begin(), v.ranks.end());
  out->set_bucket_call(v.bucket_call.value());
  out->set_trainer(v.trainer.value());
  out->mutable_bucket_ranges()->Add(v.bucket_ranges.begin(), v.bucket_ranges.end());
  out->mutable_skip()->Add(v.skip.begin(), v.skip.end());
  SetIds(v.readers, out->mutable_readers());
  if (v.broadcast != BroadcastMethod::kDirect) out->set_broadcast(ToProto(v.broadcast));
  out->set_again(v.again);
  out->set_digests(v.digests);
}

void Put(const PeerIssue& v, v1::PeerAnswer* message) {
  message->mutable_issue()->set_update(v.update.value());
  message->mutable_issue()->set_part(v.part.value());
}

void Put(const SendPart& v, v1::PeerAnswer* message) {
  v1::PeerPart* out = message->mutable_send_part();
  out->set_member(v.member.value());
  out->set_update(v.update.value());
  out->set_part(v.part.value());
}

void Put(const VerifyUpdate& v, v1::PeerAnswer* message) {
  message->mutable_verify()->set_update(v.update.value());
  message->mutable_verify()->mutable_skip()->Add(v.skip.begin(), v.skip.end());
}

void Put(const StartCompare& v, v1::PeerAnswer* message) {
  message->mutable_compare()->set_update(v.update.value());
  v1::PeerCompare* out = message->mutable_compare();
  out->set_first_hash(v.part.first);
  out->set_last_hash(v.part.last);
}

void Put(const StartRefit& v, v1::PeerAnswer* message) {
  v1::PeerRun* out = message->mutable_run();
  out->set_update(v.update.value());
  out->set_part(v.part.value());
  out->set_wired(v.wired);
  out->set_communicator(v.communicator.value());
  out->set_wire_seq(v.wire_seq.value());
  out->mutable_ranks()->Add(v.ranks.begin(), v.ranks.end());
  for (const SlotGrant& slot : v.slots) SetSlot(slot, out->add_slots());
  out->mutable_skip()->Add(v.skip.begin(), v.skip.end());
  out->set_attempt(v.attempt);
  if (v.resume.has_value()) out->set_resume(*v.resume);
}

void Put(const PeerAbandon& v, v1::PeerAnswer* message) { message->set_abandon(v.update.value()); }

void Put(const PeerUpdateEnded& v, v1::PeerAnswer* message) {
  v1::PeerUpdateEnded* out = message->mutable_update_ended();
  out->set_update(v.update.value());
  out->set_version(v.version.value());
  out->set_outcome(static_cast<v1::UpdateOutcome>(v.outcome));
  out->set_reason(TextToProto(v.reason));
  SetFailure(v.failure, out);
  out->set_catch_up(v.catch_up);
}

void Put(const OpenCommunicator& v, v1::PeerAnswer* message) {
  v1::PeerCommunicatorOpen* out = message->mutable_communicator_open();
  out->set_communicator(v.communicator.value());
  out->set_rank(v.rank);
  out->set_size(v.size);
}

void Put(const PeerCommunicatorConnect& v, v1::PeerAnswer* message) {
  v1::PeerCommunicatorConnect* out = message->mutable_communicator_connect();
  out->set_communicator(v.communicator.value());
  if (v.addresses != nullptr) {
    for (const std::string& address : *v.addresses) out->add_addresses(address);
  }
  out->set_timeout_ms(MillisToProto(v.timeout));
  if (v.coordinator_rank.has_value()) out->set_coordinator_rank(*v.coordinator_rank);
}

void Put(const CloseCommunicator& v, v1::PeerAnswer* message) {
  message->set_communicator_close(v.communicator.value());
}

void Put(const PeerWireLock& v, v1::PeerAnswer* message) {
  message->set_wire_lock(v.update.value());
}

void Put(const PeerWireUnlock& v, v1::PeerAnswer* message) {
  message->set_wire_unlock(v.update.value());
}

void Put(const PeerPing& v, v1::PeerAnswer* message) { message->set_ping(v.number); }

void Put(const PeerReadiness& v, v1::PeerAnswer* message) {
  v1::PeerReadiness* out = message->mutable_readiness();
  out->set_anew(v.anew);
  if (v.version.has_value()) out->set_version(v.version->value());
  if (v.instances == nullptr) return;
  for (const InstanceStanding& standing : *v.instances) {
    out->add_instances(standing.instance);
    out->add_standings(static_cast<v1::PeerStanding>(static_cast<int>(standing.standing) + 1));
    out->add_versions(standing.version.has_value() ? standing.version->value() : kNoVersion);
  }
}

void Put(const PeerIncarnation& v, v1::PeerAnswer* message) {
  message->set_new_incarnation(v.incarnation);
}

void Put(const PeerOwner& v, v1::PeerAnswer* message) {
  message->set_owner(TextToProto(v.owner, kMaxIdentityBytes));
}

// ---- commands: from the wire ----

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerWelcome& message, const PeerBounds&) {
  PeerWelcome out;
  REFITD_ASSIGN_OR_RETURN(out.member, MemberOf(message.member(), "welcome.member"));
  if (message.has_group_version()) {
    REFITD_ASSIGN_OR_RETURN(out.group_version,
                            VersionOf(message.group_version(), "welcome.group_version"));
  }
  REFITD_RETURN_IF_ERROR(
      InRange(message.trainer_ranks(), 1, kMaxTrainerRanks, "welcome.trainer_ranks"));
  out.trainer_ranks = message.trainer_ranks();
  REFITD_ASSIGN_OR_RETURN(out.content, ContentVersionOf(message, "welcome.content_version"));
  return out;
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerRefuse& message, const PeerBounds&) {
  RefuseMember out;
  REFITD_ASSIGN_OR_RETURN(out.member, MemberOf(message.member(), "refuse.member"));
  REFITD_RETURN_IF_ERROR(ReadStatus(message.status(), "refuse.status", &out.status));
  if (out.status.ok()) return Invalid("refuse.status.code is 0, which refuses nothing");
  return out;
}

absl::StatusOr<ReplyPayload> PayloadOf(const v1::BeginResponse& message) {
  BeginReply out;
  out.update = UpdateId(message.update_id());
  REFITD_ASSIGN_OR_RETURN(out.remaining,
                          MillisOf(message.remaining_ms(), "reply.begun.remaining_ms"));
  REFITD_RETURN_IF_ERROR(InRange(message.instances(), 0, kMaxEngineRanks, "reply.begun.instances"));
  out.instances = message.instances();
  REFITD_RETURN_IF_ERROR(
      InRange(message.leasable_slots(), 0, kMaxSlots, "reply.begun.leasable_slots"));
  out.leasable_slots = message.leasable_slots();
  return out;
}

absl::StatusOr<ReplyPayload> PayloadOf(const v1::LeaseSlotResponse& message,
                                       const PeerBounds& bounds) {
  LeaseSlotReply out;
  REFITD_RETURN_IF_ERROR(CheckSlot(message.slot(), bounds, "reply.leased.slot"));
  out.grant = {SlotIndex(message.slot()), GrantId(message.grant())};
  REFITD_ASSIGN_OR_RETURN(out.expires, MillisOf(message.expires_ms(), "reply.leased.expires_ms"));
  // The joined daemon's own slots have the spec's size, so the coordinator may not claim a larger
  // one.
  REFITD_RETURN_IF_ERROR(InRange(message.bytes(), 1, bounds.slot_bytes, "reply.leased.bytes"));
  out.slot_bytes = message.bytes();
  return out;
}

absl::StatusOr<ReplyPayload> PayloadOf(const v1::PushBucketResponse& message) {
  REFITD_RETURN_IF_ERROR(NotNegative(message.group_seq(), "reply.taken.group_seq"));
  REFITD_RETURN_IF_ERROR(InRange(message.bytes(), 0, kMaxBucketBytes, "reply.taken.bytes"));
  return BucketReply{message.group_seq(), message.bytes()};
}

// The limit for the number of totals in one answer, which has one total for each method. This
// version has fewer methods, and so will the next version.
constexpr int kMaxBroadcastTotals = 64;

absl::StatusOr<Duration> DurationOfSeconds(double seconds, const std::string& field) {
  constexpr double kMaxSeconds = std::chrono::duration<double>(kMaxPeerDuration).count();
  if (!(seconds >= 0 && seconds <= kMaxSeconds)) {
    return Invalid("{} is {}, outside of 0 to {}", field, seconds, kMaxSeconds);
  }
  return std::chrono::round<Duration>(std::chrono::duration<double>(seconds));
}

absl::StatusOr<InstanceOutcome> OutcomeOf(const v1::InstanceResult& result,
                                          const std::string& field) {
  InstanceOutcome out;
  REFITD_RETURN_IF_ERROR(CheckName(result.instance(), field + ".instance"));
  out.instance = result.instance();
  out.committed = result.committed();
  REFITD_ASSIGN_OR_RETURN(out.reason, TextOf(result.reason(), field + ".reason"));
  REFITD_ASSIGN_OR_RETURN(out.failure, FailureOfMessage(result, field));
  out.shadowed = result.shadowed();
  out.flipped_back = result.flipped_back();
  if (!result.has_pause_seconds()) return out;
  REFITD_ASSIGN_OR_RETURN(out.pause,
                          DurationOfSeconds(result.pause_seconds(), field + ".pause_seconds"));
  return out;
}

absl::StatusOr<ReplyPayload> PayloadOf(const v1::CommitResponse& message) {
  CommitReply out;
  REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(message.version(), "reply.done.version"));
  REFITD_RETURN_IF_ERROR(AtMost(message.instances_size(), kMaxEngineRanks, "reply.done.instances"));
  for (int i = 0; i < message.instances_size(); ++i) {
    REFITD_ASSIGN_OR_RETURN(
        InstanceOutcome outcome,
        OutcomeOf(message.instances(i), fmt::format("reply.done.instances[{}]", i)));
    out.instances.push_back(std::move(outcome));
  }
  REFITD_RETURN_IF_ERROR(NotNegative(message.bytes(), "reply.done.bytes"));
  out.bytes = message.bytes();
  REFITD_ASSIGN_OR_RETURN(out.elapsed, DurationOfSeconds(message.seconds(), "reply.done.seconds"));
  REFITD_RETURN_IF_ERROR(AtMost(message.pushed_size(), kMaxBroadcastTotals, "reply.done.pushed"));
  for (const v1::BroadcastTotals& totals : message.pushed()) {
    REFITD_RETURN_IF_ERROR(NotNegative(totals.bytes(), "reply.done.pushed.bytes"));
    REFITD_RETURN_IF_ERROR(NotNegative(totals.buckets(), "reply.done.pushed.buckets"));
    // A daemon of the next version may know more methods. That is no reason to refuse a commit.
    const absl::StatusOr<BroadcastMethod> method = BroadcastFromProto(totals.method());
    if (method.ok()) out.pushed.push_back({*method, totals.bytes(), totals.buckets()});
  }
  REFITD_RETURN_IF_ERROR(NotNegative(message.left_out_tensors(), "reply.done.left_out_tensors"));
  out.left_out.tensors = message.left_out_tensors();
  REFITD_RETURN_IF_ERROR(NotNegative(message.left_out_bytes(), "reply.done.left_out_bytes"));
  out.left_out.bytes = message.left_out_bytes();
  REFITD_RETURN_IF_ERROR(AtMost(message.left_out_size(), kMaxNamedLeftOut, "reply.done.left_out"));
  for (const std::string& name : message.left_out()) {
    REFITD_ASSIGN_OR_RETURN(std::string text, TextOf(name, "reply.done.left_out"));
    out.left_out.names.push_back(std::move(text));
  }
  REFITD_ASSIGN_OR_RETURN(out.content, ContentVersionOf(message, "reply.done.content_version"));
  return out;
}

absl::StatusOr<ReplyPayload> PayloadOf(const v1::PeerReply& message, const PeerBounds& bounds) {
  switch (message.payload_case()) {
    case v1::PeerReply::kBegun:
      return PayloadOf(message.begun());
    case v1::PeerReply::kLeased:
      return PayloadOf(message.leased(), bounds);
    case v1::PeerReply::kTaken:
      return PayloadOf(message.taken());
    case v1::PeerReply::kDone:
      return PayloadOf(message.done());
    case v1::PeerReply::PAYLOAD_NOT_SET:
      break;
  }
  return EmptyReply{};
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerReply& message, const PeerBounds& bounds) {
  Reply out;
  REFITD_ASSIGN_OR_RETURN(out.call, CallOf(message.call(), "reply.call"));
  REFITD_RETURN_IF_ERROR(ReadStatus(message.status(), "reply.status", &out.status));
  if (!out.status.ok() && message.payload_case() != v1::PeerReply::PAYLOAD_NOT_SET) {
    return Invalid("reply.payload is there where reply.status.code is {}", message.status().code());
  }
  REFITD_ASSIGN_OR_RETURN(out.payload, PayloadOf(message, bounds));
  return out;
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerPrepare& message, const PeerBounds&) {
  PeerPrepare out;
  out.update = UpdateId(message.update());
  REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(message.version(), "prepare.version"));
  REFITD_ASSIGN_OR_RETURN(out.remaining, MillisOf(message.remaining_ms(), "prepare.remaining_ms"));
  REFITD_RETURN_IF_ERROR(NotNegative(message.tensor_count(), "prepare.tensor_count"));
  out.tensor_count = message.tensor_count();
  REFITD_ASSIGN_OR_RETURN(out.verification,
                          VerificationOf(message.verification(), "prepare.verification"));
  REFITD_ASSIGN_OR_RETURN(out.engines, MembersOf(message.engines(), "prepare.engines"));
  REFITD_ASSIGN_OR_RETURN(out.destinations,
                          MembersOf(message.destinations(), "prepare.destinations"));
  if (message.layout_digests_size() != message.destinations_size()) {
    return Invalid("prepare.layout_digests has {} entries where destinations has {}",
                   message.layout_digests_size(), message.destinations_size());
  }
  out.layout_digests.assign(message.layout_digests().begin(), message.layout_digests().end());
  REFITD_RETURN_IF_ERROR(
      InRange(message.trainer_ranks(), 1, kMaxTrainerRanks, "prepare.trainer_ranks"));
  out.trainer_ranks = message.trainer_ranks();
  return out;
}

absl::StatusOr<PeerHeader> HeaderOf(const v1::PeerHeader& message, const PeerBounds& bounds) {
  PeerHeader out;
  out.update = UpdateId(message.update());
  REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(message.version(), "header.version"));
  REFITD_ASSIGN_OR_RETURN(out.part, PartOf(message.part(), "header.part"));
  REFITD_RETURN_IF_ERROR(NotNegative(message.group_seq(), "header.group_seq"));
  out.group_seq = message.group_seq();
  out.root = NodeId(message.root());
  REFITD_ASSIGN_OR_RETURN(CheckedBucket bucket, BucketOf(message, bounds, "header.slot"));
  out.slot = bucket.slot;
  PartContent content = WholeBucket(std::make_shared<const CheckedBucket>(std::move(bucket)));
  if (message.bytes() != content.bytes) {
    return Invalid("header.bytes is {} where the content has {}", message.bytes(), content.bytes);
  }
  out.content = std::make_shared<const PartContent>(std::move(content));
  out.leased = message.leased();
  REFITD_ASSIGN_OR_RETURN(out.verification,
                          VerificationOf(message.verification(), "header.verification"));
  return out;
}

// A header that uses a slot must name the slot.
absl::Status CheckSlotUse(const v1::PeerHeader& message) {
  const auto check = [&](bool used, std::string_view field) {
    if (!used || message.has_slot()) return absl::OkStatus();
    return Invalid("header.{} is true where there is no slot", field);
  };
  REFITD_RETURN_IF_ERROR(check(message.leased(), "leased"));
  REFITD_RETURN_IF_ERROR(check(message.fill_slot(), "fill_slot"));
  REFITD_RETURN_IF_ERROR(check(message.wired(), "wired"));
  if (message.readers_size() == 0 || message.has_slot()) return absl::OkStatus();
  return Invalid("header.readers has {} entries where there is no slot", message.readers_size());
}

absl::Status CheckRanks(const v1::PeerHeader& message) {
  const std::unordered_set<uint32_t> ranks(message.ranks().begin(), message.ranks().end());
  if (ranks.size() != static_cast<size_t>(message.ranks_size())) {
    return Invalid("header.ranks has {} entries, {} of them different", message.ranks_size(),
                   ranks.size());
  }
  return absl::OkStatus();
}

absl::Status CheckRoot(const v1::PeerHeader& message) {
  if (message.is_root()) {
    REFITD_RETURN_IF_ERROR(CallOf(message.bucket_call(), "header.bucket_call").status());
    REFITD_RETURN_IF_ERROR(MemberOf(message.trainer(), "header.trainer").status());
  }
  return SameLength(message.bucket_ranges_size(),
                    message.is_root() ? static_cast<size_t>(message.content().names_size()) : 0,
                    message.is_root() ? "header.bucket_ranges" : "header.bucket_ranges (not root)");
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerHeader& message, const PeerBounds& bounds) {
  REFITD_ASSIGN_OR_RETURN(PeerHeader out, HeaderOf(message, bounds));
  REFITD_RETURN_IF_ERROR(CheckSlotUse(message));
  out.digest = message.digest();
  out.is_root = message.is_root();
  out.wired = message.wired();
  out.fill_slot = message.fill_slot();
  out.communicator = CommunicatorId(message.communicator());
  out.wire_seq = WireSeq(message.wire_seq());
  REFITD_ASSIGN_OR_RETURN(out.ranks,
                          IndicesOf(message.ranks(), kMaxNodes, kMaxNodes, "header.ranks"));
  REFITD_RETURN_IF_ERROR(CheckRanks(message));
  REFITD_RETURN_IF_ERROR(CheckRoot(message));
  out.bucket_call = CallId(message.bucket_call());
  out.trainer = MemberId(message.trainer());
  REFITD_ASSIGN_OR_RETURN(out.bucket_ranges,
                          IndicesOf(message.bucket_ranges(), kMaxTensorsPerBucket,
                                    kMaxTensorsPerBucket, "header.bucket_ranges"));
  REFITD_ASSIGN_OR_RETURN(out.skip, FlagsOf(message.skip(), "header.skip"));
  REFITD_ASSIGN_OR_RETURN(out.readers, MembersOf(message.readers(), "header.readers"));
  if (message.has_broadcast()) {
    REFITD_ASSIGN_OR_RETURN(out.broadcast, BroadcastFromProto(message.broadcast()));
  }
  if (message.again() && !message.wired()) {
    return Invalid("header.again is true where the part is not sent over the data plane");
  }
  out.again = message.again();
  out.digests = message.digests();
  return out;
}

absl::StatusOr<PeerCommand> IssueOf(const v1::PeerPart& message) {
  REFITD_ASSIGN_OR_RETURN(const PartSeq part, PartOf(message.part(), "issue.part"));
  return PeerIssue{UpdateId(message.update()), part};
}

absl::StatusOr<PeerCommand> SendPartOf(const v1::PeerPart& message) {
  SendPart out;
  REFITD_ASSIGN_OR_RETURN(out.member, MemberOf(message.member(), "send_part.member"));
  out.update = UpdateId(message.update());
  REFITD_ASSIGN_OR_RETURN(out.part, PartOf(message.part(), "send_part.part"));
  return out;
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerCompare& message, const PeerBounds&) {
  StartCompare v;
  v.update = UpdateId(message.update());
  v.part = {message.first_hash(), message.last_hash()};
  if (v.part.first > v.part.last) {
    return Invalid("compare.first_hash {} is above last_hash {}", v.part.first, v.part.last);
  }
  return v;
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerVerify& message, const PeerBounds&) {
  VerifyUpdate out;
  out.update = UpdateId(message.update());
  REFITD_ASSIGN_OR_RETURN(out.skip, FlagsOf(message.skip(), "verify.skip"));
  return out;
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerRun& message, const PeerBounds& bounds) {
  constexpr int kMaxProgramSlots = 4;
  StartRefit out;
  out.update = UpdateId(message.update());
  REFITD_ASSIGN_OR_RETURN(out.part, PartOf(message.part(), "run.part"));
  out.wired = message.wired();
  out.communicator = CommunicatorId(message.communicator());
  out.wire_seq = WireSeq(message.wire_seq());
  REFITD_RETURN_IF_ERROR(AtMost(message.ranks_size(), kMaxNodes, "run.ranks"));
  for (int i = 0; i < message.ranks_size(); ++i) {
    if (message.ranks(i) != kNoRank && message.ranks(i) >= kMaxNodes) {
      return Invalid("run.ranks[{}] is {}, more than {}", i, message.ranks(i), kMaxNodes - 1);
    }
    out.ranks.push_back(message.ranks(i));
  }
  REFITD_RETURN_IF_ERROR(AtMost(message.slots_size(), kMaxProgramSlots, "run.slots"));
  if (message.slots_size() % 2 != 0 || (out.wired && message.slots_size() == 0)) {
    return Invalid("run.slots has {} entries: to send from and to receive into come in pairs",
                   message.slots_size());
  }
  for (int i = 0; i < message.slots_size(); ++i) {
    REFITD_ASSIGN_OR_RETURN(const SlotGrant slot,
                            SlotOf(message.slots(i), bounds, fmt::format("run.slots[{}]", i)));
    for (const SlotGrant& other : out.slots) {
      if (other.slot == slot.slot) return Invalid("run.slots[{}] is {} again", i, slot.slot);
    }
    out.slots.push_back(slot);
  }
  REFITD_ASSIGN_OR_RETURN(out.skip, FlagsOf(message.skip(), "run.skip"));
  out.attempt = message.attempt();
  if (message.has_resume()) {
    REFITD_RETURN_IF_ERROR(InRange(message.resume(), 0, kMaxRounds, "run.resume"));
    out.resume = message.resume();
  }
  return out;
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerUpdateEnded& message, const PeerBounds&) {
  PeerUpdateEnded out;
  out.update = UpdateId(message.update());
  REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(message.version(), "update_ended.version"));
  REFITD_RETURN_IF_ERROR(InRange(message.outcome(), v1::UPDATE_OUTCOME_UNKNOWN,
                                 v1::UPDATE_OUTCOME_ABORTED, "update_ended.outcome"));
  out.outcome = static_cast<Outcome>(message.outcome());
  REFITD_ASSIGN_OR_RETURN(out.reason, TextOf(message.reason(), "update_ended.reason"));
  REFITD_ASSIGN_OR_RETURN(out.failure, FailureOfMessage(message, "update_ended"));
  out.catch_up = message.catch_up();
  return out;
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerCommunicatorOpen& message, const PeerBounds&) {
  REFITD_RETURN_IF_ERROR(InRange(message.size(), 1, kMaxNodes, "communicator_open.size"));
  REFITD_RETURN_IF_ERROR(InRange(message.rank(), 0, message.size() - 1, "communicator_open.rank"));
  return OpenCommunicator{CommunicatorId(message.communicator()), message.rank(), message.size()};
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerCommunicatorConnect& message,
                                      const PeerBounds&) {
  PeerCommunicatorConnect out;
  out.communicator = CommunicatorId(message.communicator());
  REFITD_RETURN_IF_ERROR(
      AtMost(message.addresses_size(), kMaxNodes, "communicator_connect.addresses"));
  auto addresses = std::make_shared<std::vector<std::string>>();
  for (int i = 0; i < message.addresses_size(); ++i) {
    REFITD_ASSIGN_OR_RETURN(
        std::string address,
        OpaqueOf(message.addresses(i), fmt::format("communicator_connect.addresses[{}]", i)));
    addresses->push_back(std::move(address));
  }
  out.addresses = std::move(addresses);
  REFITD_ASSIGN_OR_RETURN(out.timeout,
                          MillisOf(message.timeout_ms(), "communicator_connect.timeout_ms"));
  if (message.has_coordinator_rank()) {
    REFITD_RETURN_IF_ERROR(InRange(message.coordinator_rank(), 0, message.addresses_size() - 1,
                                   "communicator_connect.coordinator_rank"));
    out.coordinator_rank = message.coordinator_rank();
  }
  return out;
}

absl::StatusOr<PeerCommand> IncarnationOf(uint64_t incarnation) {
  REFITD_RETURN_IF_ERROR(CheckIncarnation(incarnation, "new_incarnation"));
  return PeerIncarnation{incarnation};
}

absl::StatusOr<PeerCommand> CommandOf(const v1::PeerReadiness& message, const PeerBounds&) {
  PeerReadiness out;
  out.anew = message.anew();
  if (message.has_version()) {
    REFITD_ASSIGN_OR_RETURN(out.version, VersionOf(message.version(), "readiness.version"));
  }
  const auto count = static_cast<size_t>(message.instances_size());
  REFITD_RETURN_IF_ERROR(
      AtMost(message.instances_size(), static_cast<int64_t>(kMaxStandings), "readiness.instances"));
  REFITD_RETURN_IF_ERROR(SameLength(message.standings_size(), count, "readiness.standings"));
  REFITD_RETURN_IF_ERROR(SameLength(message.versions_size(), count, "readiness.versions"));
  std::vector<InstanceStanding> instances;
  for (int i = 0; i < message.instances_size(); ++i) {
    InstanceStanding standing{.instance = message.instances(i), .version = std::nullopt};
    REFITD_RETURN_IF_ERROR(CheckName(standing.instance, fmt::format("readiness.instances[{}]", i)));
    REFITD_RETURN_IF_ERROR(
        InRange(message.standings(i), 1, kStandings, fmt::format("readiness.standings[{}]", i)));
    standing.standing = static_cast<Standing>(message.standings(i) - 1);
    if (message.versions(i) != kNoVersion) {
      REFITD_ASSIGN_OR_RETURN(
          standing.version,
          VersionOf(message.versions(i), fmt::format("readiness.versions[{}]", i)));
    }
    instances.push_back(std::move(standing));
  }
  out.instances = Shared(std::move(instances));
  return out;
}

absl::StatusOr<PeerCommand> OwnerOf(const std::string& owner) {
  PeerOwner out;
  REFITD_ASSIGN_OR_RETURN(out.owner, TextOf(owner, "owner", kMaxIdentityBytes));
  return out;
}

}  // namespace

absl::StatusOr<std::vector<v1::PeerAnswer>> ToProto(const PeerCommand& command,
                                                    int64_t message_bytes) {
  std::vector<v1::PeerAnswer> answers;
  if (const auto* program = std::get_if<PeerProgram>(&command)) {
    answers =
        ProgramToProto(WithItsPart(*program), std::min(kPeerLayoutChunkBytes, message_bytes / 2));
  } else {
    answers.resize(1);
    std::visit(
        [&](const auto& value) {
          using Value = std::decay_t<decltype(value)>;
          if constexpr (!std::is_same_v<Value, PeerProgram>) Put(value, &answers[0]);
        },
        command);
  }
  for (const v1::PeerAnswer& answer : answers) {
    REFITD_RETURN_IF_ERROR(CheckSize(static_cast<int64_t>(answer.ByteSizeLong()) + kEnvelopeBytes,
                                     message_bytes, "a command"));
  }
  return answers;
}

absl::StatusOr<std::optional<PeerCommand>> CommandDecoder::Decode(const v1::PeerAnswer& answer) {
  if (answer.has_program()) return programs_.Add(answer.program());
  if (!programs_.idle())
    return Invalid("kind: another command where the program's next chunk is to come");
  return FromProto(answer, bounds_);
}

absl::StatusOr<PeerCommand> FromProto(const v1::PeerAnswer& answer, const PeerBounds& bounds) {
  switch (answer.kind_case()) {
    case v1::PeerAnswer::kAccepted:
      return Invalid("kind: accepted was said already");
    case v1::PeerAnswer::kWelcome:
      return CommandOf(answer.welcome(), bounds);
    case v1::PeerAnswer::kRefuse:
      return CommandOf(answer.refuse(), bounds);
    case v1::PeerAnswer::kReply:
      return CommandOf(answer.reply(), bounds);
    case v1::PeerAnswer::kPrepare:
      return CommandOf(answer.prepare(), bounds);
    case v1::PeerAnswer::kHeader:
      return CommandOf(answer.header(), bounds);
    case v1::PeerAnswer::kIssue:
      return IssueOf(answer.issue());
    case v1::PeerAnswer::kSendPart:
      return SendPartOf(answer.send_part());
    case v1::PeerAnswer::kVerify:
      return CommandOf(answer.verify(), bounds);
    case v1::PeerAnswer::kProgram:
      return Invalid("kind: a program comes in chunks");
    case v1::PeerAnswer::kCompare:
      return CommandOf(answer.compare(), bounds);
    case v1::PeerAnswer::kRun:
      return CommandOf(answer.run(), bounds);
    case v1::PeerAnswer::kAbandon:
      return PeerAbandon{UpdateId(answer.abandon())};
    case v1::PeerAnswer::kUpdateEnded:
      return CommandOf(answer.update_ended(), bounds);
    case v1::PeerAnswer::kCommunicatorOpen:
      return CommandOf(answer.communicator_open(), bounds);
    case v1::PeerAnswer::kCommunicatorConnect:
      return CommandOf(answer.communicator_connect(), bounds);
    case v1::PeerAnswer::kCommunicatorClose:
      return CloseCommunicator{CommunicatorId(answer.communicator_close())};
    case v1::PeerAnswer::kWireLock:
      return PeerWireLock{UpdateId(answer.wire_lock())};
    case v1::PeerAnswer::kWireUnlock:
      return PeerWireUnlock{UpdateId(answer.wire_unlock())};
    case v1::PeerAnswer::kPing:
      return PeerPing{answer.ping()};
    case v1::PeerAnswer::kNewIncarnation:
      return IncarnationOf(answer.new_incarnation());
    case v1::PeerAnswer::kReadiness:
      return CommandOf(answer.readiness(), bounds);
    case v1::PeerAnswer::kOwner:
      return OwnerOf(answer.owner());
    case v1::PeerAnswer::kMemberEvent:
      return MemberActionOf(answer.member_event());
    case v1::PeerAnswer::KIND_NOT_SET:
      break;
  }
  return Invalid("kind is missing, or not known");
}

}  // namespace refitd
