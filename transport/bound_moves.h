// Checks a transfer's program and binds it to memory, for all transports. Pure.
//
// A wrong program would be our own bug, but even that must not write outside the pieces: each bound
// move stays inside both of its pieces whatever the program says. (Verification finds wrong offsets
// inside the pieces, P1.)
#ifndef REFITD_TRANSPORT_BOUND_MOVES_H_
#define REFITD_TRANSPORT_BOUND_MOVES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/plan/layout.h"
#include "transport/transport.h"

namespace refitd {

// Distance in bytes from the first element of a piece's box to that of `box` inside it.
int64_t ByteDistance(const Box& box, const Box& from, const Dims& strides, int64_t element_bytes);

// Bytes from the first to the end of the last element of a box that is not empty.
int64_t ByteSpan(const Dims& extent, const Dims& strides, int64_t element_bytes);

// INTERNAL unless shape, box and strides have the same rank, which is at most kMaxDims.
absl::Status CheckRanks(const BoundPiece& piece);

// One move, bound to memory. Its pointers point into the transfer.
struct BoundMove {
  const BoundPiece* source = nullptr;
  const BoundPiece* destination = nullptr;
  const Box* box = nullptr;
  // The place of the box's first element according to the program, in bytes from the `data` of each
  // piece.
  int64_t from = 0;
  int64_t to = 0;
  uint32_t destination_index = 0;
  uint32_t destination_piece = 0;
  size_t sum = 0;  // index into BoundMoves::sums

  const char* from_address() const { return source->data + from; }
  char* to_address() const { return destination->data + to; }
};

struct BoundMoves {
  std::vector<BoundMove> moves;   // ordered by source piece
  std::vector<PieceDigest> sums;  // destination pieces that are written; digests not filled in
  std::vector<int64_t> bytes;     // per destination
};

// Whether the transfer's source_digests have that of a source piece; else it is 0.
inline bool WantsDigest(const Transfer& transfer, const BoundPiece& source) {
  return transfer.want_source_digests && (source.held == nullptr || source.held->digested);
}

// Binds the transfer's program. The result must not outlive the transfer. INTERNAL: the program
// names a piece that does not exist, or leaves its pieces; shards of a computed piece meet or do
// not hold its blocks. RESOURCE_EXHAUSTED: finding that out takes too long.
absl::StatusOr<BoundMoves> BindMoves(const Transfer& transfer);

// P1: compares the digests of a job's pieces, which were read again, with the sums of the passes
// over the sources.
ReadbackResult CompareReadback(const ReadbackJob& job, const std::vector<uint64_t>& expected,
                               const std::vector<uint64_t>& found);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_BOUND_MOVES_H_
