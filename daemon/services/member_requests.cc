#include "daemon/services/member_requests.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "daemon/checks/bucket.h"
#include "daemon/checks/bucket_message.h"
#include "daemon/checks/fields.h"
#include "daemon/link/hello.h"
#include "daemon/link/trainer_messages.h"
#include "proto/convert.h"
#include "proto/delivery.h"
#include "proto/protocol.h"
#include "transport/base/errors.h"
#include "transport/base/identity.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr size_t kMaxClientBytes = 128;
constexpr size_t kMaxDeviceBytes = 64;

template <typename Hello>
absl::Status CheckHello(const Hello& hello) {
  REFITD_RETURN_IF_ERROR(AgreeProtocol(hello.protocol(), "protocol").status());
  REFITD_RETURN_IF_ERROR(CheckName(hello.group(), "group"));
  REFITD_RETURN_IF_ERROR(CheckLine(hello.client(), kMaxClientBytes, "client"));
  REFITD_RETURN_IF_ERROR(CheckLine(hello.device().name(), kMaxDeviceBytes, "device.name"));
  REFITD_RETURN_IF_ERROR(CheckCoordinator(hello.coordinator(), "coordinator"));
  if (hello.world_size() < 1 || hello.world_size() > kMaxEngineRanks) {
    return InvalidField("world_size", "world_size: {} is not in 1..{}", hello.world_size(),
                        kMaxEngineRanks);
  }
  if (hello.rank() < 0 || hello.rank() >= hello.world_size()) {
    return InvalidField("rank", "rank: {} is not in 0..{}", hello.rank(), hello.world_size() - 1);
  }
  if (hello.pid() < 0) {
    return InvalidField("pid", "pid: {} is negative", hello.pid());
  }
  return CheckMillis(hello.wait_ms(), "wait_ms").status();
}

absl::StatusOr<TrainerIdentity> IdentityOf(const v1::TrainerHello& hello, const Peer& peer) {
  REFITD_RETURN_IF_ERROR(CheckHello(hello));
  return TrainerIdentity{hello.rank(), hello.world_size(),
                         peer.credentials ? peer.credentials->pid : hello.pid(), NodeId(), ""};
}

absl::Status NoDelivery(v1::Delivery given) {
  std::string known;
  for (const DeliveryTraits& traits : kDeliveries) {
    known += fmt::format("{}{} ({})", known.empty() ? "" : " nor ", traits.name,
                         static_cast<int>(traits.mode));
  }
  return InvalidField("delivery", "delivery: {} is neither {}", static_cast<int>(given), known);
}

absl::Status CheckHeldContent(const v1::EngineHello& hello) {
  if (!hello.has_held_content()) return absl::OkStatus();
  if (hello.held_content() >= 0 && hello.held_content() < hello.held_version()) {
    return absl::OkStatus();
  }
  return InvalidField("held_content", "held_content: {} is not in 0..{}, below held_version",
                      hello.held_content(), hello.held_version() - 1);
}

// Checks an engine's hello field by field. A manifest with too many tensors is refused later, by
// the group (EngineIdentity::refused).
absl::StatusOr<EngineIdentity> IdentityOf(const v1::EngineHello& hello, const Peer& peer) {
  REFITD_RETURN_IF_ERROR(CheckHello(hello));
  REFITD_RETURN_IF_ERROR(CheckName(hello.instance(), "instance"));
  EngineIdentity identity;
  identity.instance = hello.instance();
  identity.rank = hello.rank();
  identity.world_size = hello.world_size();
  identity.pid = peer.credentials ? peer.credentials->pid : hello.pid();
  const std::optional<DeliveryMode> delivery = DeliveryOf(hello.delivery());
  if (!delivery.has_value()) return NoDelivery(hello.delivery());
  identity.delivery = *delivery;
  identity.dirty = hello.dirty();
  if (hello.dirty() && hello.has_held_version()) {
    return InvalidField("dirty", "dirty: weights that hold a version are not dirty");
  }
  if (hello.has_held_version()) {
    if (hello.held_version() < 0) {
      return InvalidField("held_version", "held_version: {} is negative", hello.held_version());
    }
    identity.held_version = Version(hello.held_version());
    REFITD_RETURN_IF_ERROR(CheckHeldContent(hello));
    if (hello.has_held_content()) identity.held_content = Version(hello.held_content());
  } else if (hello.has_held_content()) {
    return InvalidField("held_content", "held_content: {} without a held_version",
                        hello.held_content());
  } else if (hello.held_origin() != 0) {
    return InvalidField("held_origin", "held_origin: {:x} without a held_version",
                        hello.held_origin());
  }
  if (hello.restore() && (hello.dirty() || hello.has_held_version())) {
    return InvalidField("restore",
                        "restore: the daemon knows what the kept memory holds: neither dirty nor "
                        "held_version may be set");
  }
  if (hello.restore() && !NeedsLayout(identity.delivery)) {
    return InvalidField("restore", "restore: only {} delivery has arenas",
                        DeliveriesWith(NeedsLayout));
  }
  identity.held_origin = hello.held_origin();
  identity.held_digest = hello.held_digest();
  if (!hello.trainer_identity().empty()) {
    REFITD_RETURN_IF_ERROR(CheckOwnerPattern(hello.trainer_identity(), "trainer_identity"));
  }
  identity.trainer_identity = hello.trainer_identity();
  REFITD_RETURN_IF_ERROR(CheckLine(hello.held_owner(), kMaxIdentityBytes, "held_owner"));
  identity.held_owner = hello.held_owner();
  identity.catch_up = hello.catch_up();
  if (hello.catch_up() && !CatchesUp(identity.delivery)) {
    return InvalidField("catch_up", "catch_up: only {} delivery takes part in catch-ups",
                        DeliveriesWith(CatchesUp));
  }
  identity.wants_staged = hello.wants_staged();
  if (hello.wants_staged() && !NeedsLayout(identity.delivery)) {
    return InvalidField("wants_staged", "wants_staged: only {} delivery is staged",
                        DeliveriesWith(NeedsLayout));
  }
  const int64_t manifest_tensors =
      std::max<int64_t>(hello.manifest_tensors(), hello.manifest().names_size());
  const bool too_many = manifest_tensors > kMaxTensorsPerLayout;
  if ((hello.has_manifest() || too_many) && !DeclaresManifest(identity.delivery)) {
    return InvalidField("manifest", "manifest: only {} delivery takes one",
                        DeliveriesWith(DeclaresManifest));
  }
  if (too_many) {
    identity.refused = TooManyTensors("manifest", manifest_tensors);
    return identity;
  }
  if (hello.has_manifest()) {
    REFITD_ASSIGN_OR_RETURN(
        identity.manifest,
        CheckManifest(hello.manifest().names(), hello.manifest().dtypes(),
                      hello.manifest().shapes(), "manifest", kMaxTensorsPerLayout));
  }
  return identity;
}

// Reads the fields that hellos of both roles have. The hello is checked.
template <typename Hello>
Arrival CommonArrival(const Hello& hello, const Peer& peer) {
  Arrival arrival;
  MemberRecord& record = arrival.record;
  record.group = hello.group();
  record.peer = peer;
  record.client = hello.client();
  record.protocol = *AgreeProtocol(hello.protocol(), "protocol");
  record.device = hello.device().name().empty() ? "host" : hello.device().name();
  if (hello.has_spec()) arrival.spec = SpecOf(hello.spec());
  arrival.coordinator = hello.coordinator();
  arrival.wait = Millis(hello.wait_ms());
  return arrival;
}

}  // namespace

absl::StatusOr<Arrival> ArrivalOf(const v1::TrainerHello& hello, const Peer& peer) {
  REFITD_ASSIGN_OR_RETURN(TrainerIdentity identity, IdentityOf(hello, peer));
  Arrival arrival = CommonArrival(hello, peer);
  arrival.record.rank = identity.rank;
  arrival.identity = std::move(identity);
  return arrival;
}

absl::StatusOr<Arrival> ArrivalOf(const v1::EngineHello& hello, const Peer& peer) {
  REFITD_ASSIGN_OR_RETURN(EngineIdentity identity, IdentityOf(hello, peer));
  Arrival arrival = CommonArrival(hello, peer);
  arrival.record.engine = true;
  arrival.record.instance = identity.instance;
  arrival.record.rank = identity.rank;
  arrival.record.world_size = identity.world_size;
  arrival.record.reads_slots = ReadsSlots(identity.delivery);
  arrival.record.restores = hello.restore();
  if (identity.held_version.has_value() && identity.held_digest != 0 && identity.catch_up &&
      NeedsLayout(identity.delivery)) {
    arrival.record.claims = {*identity.held_version, identity.held_origin, identity.held_owner,
                             identity.held_digest};
  }
  arrival.identity = std::move(identity);
  return arrival;
}

Caller CallerOf(const v1::Lease& lease, const Peer& peer) {
  return {peer, lease.token(), lease.incarnation(), lease.protocol()};
}

absl::StatusOr<ReceivedPush> PushOf(const v1::PushBucketRequest& request) {
  REFITD_RETURN_IF_ERROR(CheckRequestId(request.request_id()));
  ReceivedPush push;
  push.event.request_id = request.request_id();
  push.event.version = Version(request.version());
  push.event.update = UpdateId(request.update_id());
  REFITD_ASSIGN_OR_RETURN(push.received, ReadBucket(request.bucket()));
  return push;
}

}  // namespace refitd
