// Plans a broadcast through slots: the contiguous copies from the source into the first slot, cut
// into the chunks that are relayed from slot to slot; and the second transfer, from the filled
// slots into the destinations. Pure: no CUDA call.
//
//   source --runs--> slot of device A --chunks--> slot of device B --chunks--> ...
//                         |                            |
//                         +--> destinations on A       +--> destinations on B
//
// P1: the second transfer verifies the slots. Under verification it computes digests of whole
// source pieces, once at the source and once in each slot, and CompareSlots compares them. Bytes
// stored into destinations are compared with a slot's bytes as in any transfer.
#ifndef REFITD_TRANSPORT_CUDA_RELAY_PLAN_H_
#define REFITD_TRANSPORT_CUDA_RELAY_PLAN_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/transport.h"

namespace refitd {

// One copy from the source into a slot.
struct RelayRun {
  char* from = nullptr;  // on the source's device
  int64_t offset = 0;    // in the slot
  int64_t bytes = 0;
};

// The bytes [begin, end) of the slot that one device hands to the next at a time. Padding between
// runs is copied too.
struct RelayChunk {
  std::vector<RelayRun> runs;  // ascending, not empty; adjacent runs are joined
  int64_t begin = 0;
  int64_t end = 0;
};

// Returns the source's pieces as copies in ascending order, with adjacent runs joined. INTERNAL: a
// piece is not row-major, overlaps another in the slot, or lies outside of [0, slot_bytes).
absl::StatusOr<std::vector<RelayRun>> RunsOf(const std::vector<BoundPiece>& source,
                                             const std::vector<int64_t>& byte_offsets,
                                             int64_t slot_bytes);

// Cuts the slot into chunks of `chunk_bytes`, in order; chunks at the end, and beside empty ranges,
// are shorter.
std::vector<RelayChunk> CutIntoChunks(const std::vector<RelayRun>& runs, int64_t chunk_bytes);

// The parts of `runs` that lie in [begin, end) of the slot.
std::vector<RelayRun> RunsWithin(const std::vector<RelayRun>& runs, int64_t begin, int64_t end);

// The second transfer: from the filled slots into the destinations. A move reads from the slot of
// its destination's device, or from the source itself if that device has no slot. `device_of` maps
// an address to a number that is equal for addresses on one device. The result is `transfer`
// without its broadcast.
Transfer FromSlots(Transfer transfer, const std::function<int(const char*)>& device_of);

// Turns the second transfer's result into the result of the whole transfer: if the transfer was
// verified, compares the digests of the slots. `wanted`: the caller asked for digests of the source
// pieces.
void CompareSlots(const Transfer& from_slots, size_t slots, bool wanted, TransferResult* result);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_RELAY_PLAN_H_
