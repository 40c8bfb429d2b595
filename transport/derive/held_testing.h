// The tests of derived tensors share this: it makes what trainers hold of a tensor, as one piece or
// cut into shards.
#ifndef REFITD_TRANSPORT_DERIVE_HELD_TESTING_H_
#define REFITD_TRANSPORT_DERIVE_HELD_TESTING_H_

#include <cstdint>
#include <cstring>
#include <list>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "transport/plan/plan_testing.h"
#include "transport/transport.h"

namespace refitd {

// `data`: of the box's first element; it is only read.
inline HeldPiece HoldOne(std::shared_ptr<const Derivation> derivation, const Box& box,
                         const Dims& strides, const char* data) {
  const TensorSpec& from = derivation->from;
  BoundPiece shard{from.dtype,
                   from.shape,
                   box,
                   strides,
                   const_cast<char*>(data),  // NOLINT(cppcoreguidelines-pro-type-const-cast)
                   from.name};
  return {std::move(derivation), {std::move(shard)}};
}

inline char* AddressIn(const BoundPiece& piece, const Dims& at) {
  return piece.data +
         ElementDistance(at, piece.box.offset, piece.strides) * ElementBytes(piece.dtype);
}

// Replaces a piece that is held as one by `shards` shards, each in memory of its own, rows or
// columns beside one another. The memory is added to `memory`.
inline void CutHeld(std::mt19937_64& rng, int shards, HeldPiece* held,
                    std::list<std::vector<char>>* memory) {
  const auto pick = [&rng](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(rng);
  };
  const BoundPiece whole = held->shards.front();
  const auto element = static_cast<size_t>(ElementBytes(whole.dtype));
  const std::vector<Box> boxes = CutAnywhere(whole.box, shards - 1, &rng);
  held->shards.clear();
  for (const Box& box : boxes) {
    BoundPiece shard = whole;
    shard.box = box;
    shard.strides = RowMajorStrides(box.extent);
    const size_t rank = box.extent.size();
    if (rank >= 2 && pick(0, 3) == 0) {
      shard.strides[rank - 2] = 1;
      shard.strides[rank - 1] = box.extent[rank - 2];
    }
    const auto shift = static_cast<size_t>(pick(0, 3)) * element;
    memory->emplace_back(static_cast<size_t>(ElementCount(box)) * element + shift);
    shard.data = memory->back().data() + shift;
    ForEach(box, [&](const Dims& at) {
      std::memcpy(AddressIn(shard, at), AddressIn(whole, at), element);
    });
    held->shards.push_back(std::move(shard));
  }
}

}  // namespace refitd

#endif  // REFITD_TRANSPORT_DERIVE_HELD_TESTING_H_
