#include "transport/broadcast.h"

#include <algorithm>

namespace refitd {
namespace {

// The fixed costs of a chain: the time until it begins, and the time that each further hop takes to
// begin. Each is given as the bytes that a link carries in that time.
constexpr int64_t kChainBegins = int64_t{8} << 20;
constexpr int64_t kHopBegins = int64_t{6} << 20;

int64_t DirectCost(const BroadcastLoad& load) {
  int64_t cost = 0;
  for (const auto& [device, bytes] : load.direct_bytes) cost += bytes;
  return cost;
}

int64_t ChainCost(const BroadcastLoad& load) {
  const auto hops = static_cast<int64_t>(load.direct_bytes.size());
  return load.packed_bytes + kChainBegins +
         std::max<int64_t>(hops - 1, 0) * std::min(kHopBegins, load.packed_bytes);
}

}  // namespace

bool BroadcastsThroughSlots(const Transport& transport) {
  for (size_t number = 0; number < kBroadcastMethods; ++number) {
    const auto method = static_cast<BroadcastMethod>(number);
    if (NeedsSlots(method) && transport.CanBroadcast(method).ok()) return true;
  }
  return false;
}

BroadcastMethod FastestBroadcast(const BroadcastLoad& load, const Transport& transport) {
  if (load.direct_bytes.empty() || !transport.CanBroadcast(BroadcastMethod::kChain).ok()) {
    return BroadcastMethod::kDirect;
  }
  return ChainCost(load) < DirectCost(load) ? BroadcastMethod::kChain : BroadcastMethod::kDirect;
}

}  // namespace refitd
