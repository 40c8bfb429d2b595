// Chooses the method by which the bytes of a bucket reach the devices that need them. Pure.
#ifndef REFITD_TRANSPORT_BROADCAST_H_
#define REFITD_TRANSPORT_BROADCAST_H_

#include <cstdint>
#include <map>

#include "transport/transport.h"

namespace refitd {

// Whether the transport can move a bucket through slots, by any method.
bool BroadcastsThroughSlots(const Transport& transport);

// The bytes of one bucket, or of a part of one.
struct BroadcastLoad {
  int64_t packed_bytes = 0;  // the bytes that the load fills in a slot
  // The bytes that each device other than the source's receives if every destination is written
  // directly; through slots each receives packed_bytes.
  std::map<int, int64_t> direct_bytes;
};

// Returns kDirect or a method through slots, whichever is expected to be faster. The result is a
// method that the transport has.
//
// With kDirect the source's link carries the bytes of all devices together. With a chain every
// link, also the source's, carries the packed bytes once, and each device starts a chunk later than
// the device before it. The fixed costs of each method are measured (docs/decisions.md). The time
// for planning is not counted: a bucket is cut into parts whatever the method, and all parts but
// the first are planned while others move.
BroadcastMethod FastestBroadcast(const BroadcastLoad& load, const Transport& transport);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_BROADCAST_H_
