// Any bytes as what a coordinator sends: what is accepted goes out again and arrives the same, and
// a header lies inside its slot (P10).
#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>

#include "daemon/peer_convert.h"
#include "refitd/v1/peer.pb.h"
#include "tests/fuzz/proto_mutator.h"
#include "transport/base/status.h"
#include "transport/layout.h"

namespace refitd {
namespace {

constexpr PeerBounds kBounds{.slots = 4, .slot_bytes = 1 << 20};
constexpr int64_t kMessageBytes = 8 << 20;

void CheckHeader(const PeerHeader& header) {
  const PartContent& content = *header.header.content;
  REFITD_CHECK(!content.tensors.empty() && content.ranges.size() == content.tensors.size());
  REFITD_CHECK(!header.wired || header.header.slot.has_value());
  if (!header.header.slot.has_value()) {
    REFITD_CHECK(content.byte_offsets.empty());
    return;
  }
  REFITD_CHECK(header.header.slot->slot.value() < static_cast<uint32_t>(kBounds.slots));
  REFITD_CHECK(content.bytes <= kBounds.slot_bytes);
  for (size_t i = 0; i < content.tensors.size(); ++i) {
    const int64_t bytes = content.ranges[i].count * ElementBytes(content.tensors[i].dtype);
    REFITD_CHECK(content.byte_offsets[i] >= 0 && bytes >= 0);
    REFITD_CHECK(content.byte_offsets[i] <= content.bytes - bytes);
  }
}

void FuzzOne(const v1::PeerAnswer& answer) {
  (void)AcceptedFromWire(answer);
  const auto first = CommandDecoder(kBounds).Decode(answer);
  if (!first.ok()) {
    REFITD_CHECK(!first.status().message().empty());
    return;
  }
  if (!first->has_value()) return;  // more chunks would have to come
  if (const auto* header = std::get_if<PeerHeader>(&**first)) CheckHeader(*header);
  const auto sent = ToWire(**first, kMessageBytes);
  if (!sent.ok()) {
    REFITD_CHECK(sent.status().code() == absl::StatusCode::kResourceExhausted);
    return;
  }
  CommandDecoder decoder(kBounds);
  std::optional<PeerCommand> second;
  for (const v1::PeerAnswer& message : *sent) {
    REFITD_CHECK(!second.has_value());
    const auto decoded = decoder.Decode(message);
    REFITD_CHECK(decoded.ok());
    second = *decoded;
  }
  REFITD_CHECK(second.has_value());
  const auto again = ToWire(*second, kMessageBytes);
  REFITD_CHECK(again.ok() && again->size() == sent->size());
  for (size_t i = 0; i < sent->size(); ++i) {
    REFITD_CHECK((*again)[i].SerializeAsString() == (*sent)[i].SerializeAsString());
  }
}

}  // namespace
}  // namespace refitd

REFITD_PROTO_FUZZ_TARGET(refitd::v1::PeerAnswer)
