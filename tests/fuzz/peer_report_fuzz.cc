// Any bytes as what a joined daemon sends: what is accepted goes out again and arrives the same
// (P10).
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "daemon/peer_convert.h"
#include "refitd/v1/peer.pb.h"
#include "tests/fuzz/proto_mutator.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr PeerBounds kBounds{.slots = 4, .slot_bytes = 1 << 20};
constexpr int64_t kMessageBytes = 8 << 20;

void FuzzOne(const v1::PeerMessage& message) {
  (void)CheckPeerHello(message);
  ReportDecoder decoder(kBounds);
  const auto first = decoder.Decode(message);
  if (!first.ok()) {
    REFITD_CHECK(!first.status().message().empty());
    return;
  }
  (void)decoder.Decode(message);  // also behind itself
  if (!first->has_value()) return;
  const auto sent = ToWire(**first, kBounds, kMessageBytes);
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
  const auto again = ToWire(*second, kBounds, kMessageBytes);
  REFITD_CHECK(again.ok() && again->size() == sent->size());
  for (size_t i = 0; i < sent->size(); ++i) {
    REFITD_CHECK((*again)[i].SerializeAsString() == (*sent)[i].SerializeAsString());
  }
}

}  // namespace
}  // namespace refitd

REFITD_PROTO_FUZZ_TARGET(refitd::v1::PeerMessage)
