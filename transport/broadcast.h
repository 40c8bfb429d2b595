// Which way the bytes of a bucket should take to the devices that need them. Pure.
#ifndef REFITD_TRANSPORT_BROADCAST_H_
#define REFITD_TRANSPORT_BROADCAST_H_

#include <cstdint>
#include <map>
#include <string_view>

#include "transport/transport.h"

namespace refitd {

// "auto", "direct", "chain", "symmetric", "nccl".
std::string_view BroadcastMethodName(BroadcastMethod method);

// One bucket, or part of one.
struct BroadcastLoad {
  int64_t packed_bytes = 0;  // in a slot
  // What each device other than the source's takes if every destination is written directly: it
  // takes packed_bytes otherwise.
  std::map<int, int64_t> direct_bytes;
};

// kDirect, or the method through slots that is expected to be faster; of those that the transport
// has.
//
// Directly, the source's link carries what all devices take together; along a chain it carries the
// packed bytes once, and so does every other link, each device starting a chunk later than the one
// before. The costs of beginning are measured ones (docs/decisions.md). Planning is left out: it
// goes by tensors, and whichever way a bucket takes, it is cut into parts before, so that all but
// the first are planned while others move.
BroadcastMethod FastestBroadcast(const BroadcastLoad& load, const Transport& transport);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_BROADCAST_H_
