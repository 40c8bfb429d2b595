// Any bytes as a message of a joined daemon: an accepted report is unchanged by encoding and
// decoding (P10); a report about a communicator in which its daemon is no rank changes nothing but
// its link.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "daemon/group/coordinator.h"
#include "daemon/link/commands.h"
#include "daemon/link/hello.h"
#include "daemon/link/limits.h"
#include "daemon/link/reports.h"
#include "refitd/v1/peer.pb.h"
#include "tests/fuzz/proto_mutator.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr PeerBounds kBounds{.slots = 4, .slot_bytes = 1 << 20};
constexpr int64_t kMessageBytes = 8 << 20;

// A coordinator that is opening a communicator gets the report from a daemon that is no rank of it.
// If the report is about that communicator, the daemon's link ends and the communicator stays as it
// is.
void CheckCommunicatorReport(PeerReport report) {
  uint64_t ids = 0;
  CoordinatorOptions options;
  options.name = "g";
  options.daemon_id = "a";
  options.spec.slots = kBounds.slots;
  options.spec.slot_bytes = kBounds.slot_bytes;
  options.next_update = [&ids] { return UpdateId(++ids); };
  options.next_member = [&ids] { return MemberId(1000 + ++ids); };
  options.next_call = [&ids] { return CallId(1000 + ++ids); };
  Coordinator coordinator(std::move(options));
  const TimePoint now{std::chrono::hours(1)};
  MachineActions actions;
  const auto feed = [&](MachineEvent event) {
    coordinator.Handle(event, now, &actions);
    coordinator.CheckInvariants();
  };
  feed(NodeJoined{NodeId(1), "b", "b"});
  feed(NodeJoined{NodeId(2), "stranger", "c"});
  feed(GroupEvent(TrainerAttached{MemberId(1), {}}));
  EngineIdentity engine;
  engine.instance = "i";
  engine.delivery = DeliveryMode::kLoader;
  feed(ReportReceived{NodeId(1), PeerAttach{MemberId(1), engine}});
  BeginEvent begin;
  begin.call = CallId(1);
  begin.member = MemberId(1);
  begin.version = Version(1);
  begin.tensor_count = 1;
  feed(GroupEvent(begin));
  const std::string before(coordinator.View(now).communicator_state);
  REFITD_CHECK(before == "opening");
  if (auto* opened = std::get_if<CommunicatorOpened>(&report))
    opened->communicator = CommunicatorId(1);
  if (auto* up = std::get_if<CommunicatorUp>(&report)) up->communicator = CommunicatorId(1);
  actions.clear();
  feed(ReportReceived{NodeId(2), report});
  const auto dropped =
      std::count_if(actions.begin(), actions.end(), [](const MachineAction& action) {
        const auto* peer = std::get_if<PeerAction>(&action);
        return peer != nullptr && std::holds_alternative<DropNode>(*peer);
      });
  REFITD_CHECK(dropped == 1);
  REFITD_CHECK(coordinator.View(now).communicator_state == before);
}

void FuzzOne(const v1::PeerMessage& message) {
  (void)GreetingOf(message);
  ReportDecoder decoder(kBounds);
  const auto first = decoder.Decode(message);
  if (!first.ok()) {
    REFITD_CHECK(!first.status().message().empty());
    return;
  }
  (void)decoder.Decode(message);  // also as a second message
  if (!first->has_value()) return;
  const bool of_communicator = std::holds_alternative<CommunicatorOpened>(**first) ||
                               std::holds_alternative<CommunicatorUp>(**first);
  if (of_communicator) CheckCommunicatorReport(**first);
  const auto sent = ToProto(**first, kBounds, kMessageBytes);
  if (!sent.ok()) {
    REFITD_CHECK(sent.status().code() == absl::StatusCode::kResourceExhausted);
    return;
  }
  ReportDecoder other(kBounds);
  std::optional<PeerReport> second;
  for (const v1::PeerMessage& part : *sent) {
    auto decoded = other.Decode(part);
    REFITD_CHECK(decoded.ok() && !second.has_value());
    second = *std::move(decoded);
  }
  REFITD_CHECK(second.has_value());
  const auto again = ToProto(*second, kBounds, kMessageBytes);
  REFITD_CHECK(again.ok() && again->size() == sent->size());
  for (size_t i = 0; i < sent->size(); ++i) {
    REFITD_CHECK((*again)[i].SerializeAsString() == (*sent)[i].SerializeAsString());
  }
}

}  // namespace
}  // namespace refitd

REFITD_PROTO_FUZZ_TARGET(refitd::v1::PeerMessage)
