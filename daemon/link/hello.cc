#include "daemon/link/hello.h"

#include <fmt/format.h>

#include <optional>
#include <string>

#include "daemon/checks/bucket.h"
#include "daemon/checks/fields.h"
#include "daemon/link/values.h"
#include "transport/base/identity.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

using peer::CheckIncarnation;
using peer::kMaxSerialisedBytes;
using peer::MillisOf;
using peer::TextOf;
using peer::VersionOf;

// OK: these are names, in order.
absl::Status CheckOrder(const google::protobuf::RepeatedPtrField<std::string>& names,
                        std::string_view what) {
  REFITD_RETURN_IF_ERROR(AtMost(names.size(), kMaxTensorsPerLayout, what));
  for (int i = 0; i < names.size(); ++i) {
    const std::string field = fmt::format("{}[{}]", what, i);
    REFITD_RETURN_IF_ERROR(TextOf(names[i], field, kMaxNameBytes).status());
    if (i > 0 && names[i] <= names[i - 1]) return Invalid("{} is not in order", field);
  }
  return absl::OkStatus();
}

// Checks and converts the spec that a coordinator has accepted (P10).
absl::StatusOr<GroupSpec> AcceptedSpec(const v1::GroupSpec& message) {
  REFITD_RETURN_IF_ERROR(
      InRange(message.trainer_ranks(), 1, kMaxTrainerRanks, "accepted.spec.trainer_ranks"));
  REFITD_RETURN_IF_ERROR(
      InRange(message.min_instances(), 1, kMaxEngineRanks, "accepted.spec.min_instances"));
  REFITD_RETURN_IF_ERROR(
      InRange(message.slot_bytes(), 1, kMaxTensorBytes, "accepted.spec.slot_bytes"));
  REFITD_RETURN_IF_ERROR(InRange(message.slots(), 1, kMaxSlots, "accepted.spec.slots"));
  REFITD_RETURN_IF_ERROR(
      CheckOrder(message.engine_only_tensors(), "accepted.spec.engine_only_tensors"));
  REFITD_RETURN_IF_ERROR(CheckOrder(message.unwanted_tensors(), "accepted.spec.unwanted_tensors"));
  REFITD_RETURN_IF_ERROR(InRange(message.max_lag(), 0, kMaxLag, "accepted.spec.max_lag"));
  REFITD_RETURN_IF_ERROR(InRange(message.hold_previous_seconds(), 0, kMaxHoldPreviousSeconds,
                                 "accepted.spec.hold_previous_seconds"));
  REFITD_RETURN_IF_ERROR(
      InRange(message.keep_seconds(), 0, kMaxKeepSeconds, "accepted.spec.keep_seconds"));
  return SpecOf(message);
}

absl::Status CheckMessageBytes(int64_t bytes, std::string_view field) {
  return InRange(bytes, kMinPeerMessageBytes, kMaxSerialisedBytes, field);
}

}  // namespace

GroupSpec SpecOf(const v1::GroupSpec& message) {
  GroupSpec spec;
  spec.trainer_ranks = message.trainer_ranks();
  spec.min_instances = message.min_instances();
  spec.slot_bytes = message.slot_bytes();
  spec.slots = message.slots();
  spec.engine_only_tensors.assign(message.engine_only_tensors().begin(),
                                  message.engine_only_tensors().end());
  spec.unwanted_tensors.assign(message.unwanted_tensors().begin(),
                               message.unwanted_tensors().end());
  spec.max_lag = message.max_lag();
  spec.encrypted_data = message.encrypted_data();
  spec.hold_previous_seconds = message.hold_previous_seconds();
  if (message.has_keep_seconds()) spec.keep_seconds = message.keep_seconds();
  return spec;
}

v1::GroupSpec SpecToProto(const GroupSpec& spec, bool lists) {
  v1::GroupSpec message;
  message.set_trainer_ranks(spec.trainer_ranks);
  message.set_min_instances(spec.min_instances);
  message.set_slot_bytes(spec.slot_bytes);
  message.set_slots(spec.slots);
  message.set_max_lag(spec.max_lag);
  message.set_encrypted_data(spec.encrypted_data);
  message.set_hold_previous_seconds(spec.hold_previous_seconds);
  message.set_keep_seconds(spec.keep_seconds);
  if (!lists) return message;
  for (const std::string& name : spec.engine_only_tensors) message.add_engine_only_tensors(name);
  for (const std::string& name : spec.unwanted_tensors) message.add_unwanted_tensors(name);
  return message;
}

absl::StatusOr<PeerGreeting> GreetingOf(const v1::PeerMessage& message) {
  if (!message.has_hello()) return Invalid("kind: the first message of Link must be hello");
  const v1::PeerHello& hello = message.hello();
  REFITD_ASSIGN_OR_RETURN(const Protocol protocol,
                          AgreeProtocol(hello.protocol(), "hello.protocol"));
  if (message.sequence() != 0 || message.incarnation() != 0) {
    return Invalid("sequence is {}, incarnation {}: those of a hello are 0", message.sequence(),
                   message.incarnation());
  }
  REFITD_RETURN_IF_ERROR(CheckName(hello.group(), "hello.group"));
  REFITD_ASSIGN_OR_RETURN(const Duration wait, MillisOf(hello.wait_ms(), "hello.wait_ms"));
  static_assert(kMaxDaemonIdBytes == kMaxGroupNameBytes);
  REFITD_RETURN_IF_ERROR(CheckName(hello.daemon_id(), "hello.daemon_id"));
  if (hello.boot_id().size() != kBootIdBytes) {
    return Invalid("hello.boot_id has {} bytes, not {}", hello.boot_id().size(), kBootIdBytes);
  }
  REFITD_RETURN_IF_ERROR(CheckMessageBytes(hello.message_bytes(), "hello.message_bytes"));
  REFITD_RETURN_IF_ERROR(CheckCoordinator(hello.coordinator(), "hello.coordinator"));
  REFITD_ASSIGN_OR_RETURN(std::string identity,
                          TextOf(hello.identity(), "hello.identity", kMaxIdentityBytes));
  return PeerGreeting{.group = hello.group(),
                      .spec = hello.has_spec() ? std::optional(SpecOf(hello.spec())) : std::nullopt,
                      .wait = wait,
                      .daemon_id = hello.daemon_id(),
                      .boot_id = hello.boot_id(),
                      .protocol = protocol,
                      .message_bytes = hello.message_bytes(),
                      .dial = hello.dial(),
                      .coordinator = hello.coordinator(),
                      .identity = std::move(identity),
                      .trainer = hello.trainer()};
}

v1::PeerAnswer AcceptedToProto(const LinkUp& up, int64_t message_bytes) {
  v1::PeerAnswer answer;
  answer.set_incarnation(up.incarnation);
  v1::PeerAccepted* out = answer.mutable_accepted();
  out->set_incarnation(up.incarnation);
  *out->mutable_spec() = SpecToProto(up.spec);
  if (up.version.has_value()) out->set_group_version(up.version->value());
  out->set_coordinator_id(up.coordinator_id);
  out->set_message_bytes(message_bytes);
  out->set_protocol(static_cast<v1::ProtocolVersion>(up.protocol));
  return answer;
}

absl::StatusOr<PeerAcceptance> AcceptedFromProto(const v1::PeerAnswer& answer) {
  if (!answer.has_accepted()) return Invalid("kind: the first answer of Link must be accepted");
  const v1::PeerAccepted& accepted = answer.accepted();
  PeerAcceptance acceptance;
  LinkUp& up = acceptance.up;
  REFITD_RETURN_IF_ERROR(CheckIncarnation(accepted.incarnation(), "accepted.incarnation"));
  if (answer.sequence() != 0 || answer.incarnation() != accepted.incarnation()) {
    return Invalid(
        "accepted: sequence is {}, incarnation {:#x} where accepted.incarnation is {:#x}",
        answer.sequence(), answer.incarnation(), accepted.incarnation());
  }
  up.incarnation = accepted.incarnation();
  REFITD_ASSIGN_OR_RETURN(up.spec, AcceptedSpec(accepted.spec()));
  if (accepted.has_group_version()) {
    REFITD_ASSIGN_OR_RETURN(up.version,
                            VersionOf(accepted.group_version(), "accepted.group_version"));
  }
  REFITD_RETURN_IF_ERROR(CheckName(accepted.coordinator_id(), "accepted.coordinator_id"));
  up.coordinator_id = accepted.coordinator_id();
  REFITD_RETURN_IF_ERROR(CheckMessageBytes(accepted.message_bytes(), "accepted.message_bytes"));
  acceptance.message_bytes = accepted.message_bytes();
  REFITD_ASSIGN_OR_RETURN(up.protocol, AgreedProtocol(accepted.protocol(), "accepted.protocol"));
  return acceptance;
}

}  // namespace refitd
