// A broadcast through slots as copies that are contiguous at both ends: what goes from the source
// into the first slot, cut into the chunks that are relayed from there on; and the transfer that is
// left when all slots are filled. Pure: no CUDA call.
//
//   source --runs--> slot of device A --chunks--> slot of device B --chunks--> ...
//                         |                            |
//                         +--> destinations on A       +--> destinations on B
//
// P1: the slots are proven by the second transfer. Under verification it wants digests of whole
// source pieces, once where they came from and once for each slot: two passes over memory, which
// CompareSlots compares; what is stored into destinations it compares with a slot's bytes as
// always.
#ifndef REFITD_TRANSPORT_CUDA_RELAY_PLAN_H_
#define REFITD_TRANSPORT_CUDA_RELAY_PLAN_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/transport.h"

namespace refitd {

// One copy from the source into a slot.
struct RelayRun {
  char* from = nullptr;  // on the source's device
  int64_t offset = 0;    // in the slot
  int64_t bytes = 0;
};

// What one device hands to the next at a time: bytes [begin, end) of the slot. Between runs there
// may be padding, which goes along.
struct RelayChunk {
  std::vector<RelayRun> runs;  // ascending, not empty; adjacent ones are joined
  int64_t begin = 0;
  int64_t end = 0;
};

// The source's pieces as copies, ascending, adjacent ones joined. INTERNAL: a piece that is not
// row-major, two that overlap in the slot, or one outside of [0, slot_bytes).
absl::StatusOr<std::vector<RelayRun>> RunsOf(const std::vector<BoundPiece>& source,
                                             const std::vector<int64_t>& byte_offsets,
                                             int64_t slot_bytes);

// Chunks of `chunk_bytes` of the slot, but for those at its end and where there is nothing, in
// order.
std::vector<RelayChunk> CutIntoChunks(const std::vector<RelayRun>& runs, int64_t chunk_bytes);

// What of them lies in [begin, end) of the slot.
std::vector<RelayRun> RunsWithin(const std::vector<RelayRun>& runs, int64_t begin, int64_t end);

// The second transfer: from the slots, which are filled, into the destinations. A move reads from
// the slot of its destination's device, and from the source itself where that device has none.
// `device_of` an address; any number that is the same for what lies on one device. Takes all of
// `transfer` but its broadcast.
Transfer FromSlots(Transfer transfer, const std::function<int(const char*)>& device_of);

// Takes the second transfer's result for the whole's: its digests, if the transfer was verified,
// prove the slots. `wanted`: digests of the source pieces were asked for.
void CompareSlots(const Transfer& from_slots, size_t slots, bool wanted, TransferResult* result);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_RELAY_PLAN_H_
