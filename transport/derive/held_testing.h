// The tests of derived tensors share this: it makes what trainers hold of a tensor, as one piece or
// cut into parts as shards cut it.
#ifndef REFITD_TRANSPORT_DERIVE_HELD_TESTING_H_
#define REFITD_TRANSPORT_DERIVE_HELD_TESTING_H_

#include <cstdint>
#include <cstring>
#include <list>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace refitd {

// `data`: of the box's first element; it is only read.
inline HeldPiece HoldOne(std::shared_ptr<const Derivation> derivation, const Box& box,
                         const Dims& strides, const char* data) {
  const TensorSpec& from = derivation->from;
  BoundPiece part{from.dtype,
                  from.shape,
                  box,
                  strides,
                  const_cast<char*>(data),  // NOLINT(cppcoreguidelines-pro-type-const-cast)
                  from.name};
  return {std::move(derivation), {std::move(part)}};
}

// Calls visit(index) for each place of the box, row-major.
template <typename Visit>
void ForEachPlace(const Box& box, const Visit& visit) {
  Dims at = box.offset;
  for (int64_t left = ElementCount(box); left > 0; --left) {
    visit(at);
    for (size_t d = at.size(); d-- > 0;) {
      if (++at[d] < box.offset[d] + box.extent[d]) break;
      at[d] = box.offset[d];
    }
  }
}

inline char* AddressIn(const BoundPiece& piece, const Dims& at) {
  int64_t elements = 0;
  for (size_t d = 0; d < at.size(); ++d) {
    elements += (at[d] - piece.box.offset[d]) * piece.strides[d];
  }
  return piece.data + elements * ElementBytes(piece.dtype);
}

// Replaces a piece that is held as one by `parts` parts, each in memory of its own, rows or columns
// beside one another. The memory is added to `memory`.
inline void CutHeld(std::mt19937_64& rng, int parts, HeldPiece* held,
                    std::list<std::vector<char>>* memory) {
  const auto pick = [&rng](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(rng);
  };
  const BoundPiece whole = held->parts.front();
  const auto element = static_cast<size_t>(ElementBytes(whole.dtype));
  std::vector<Box> boxes = {whole.box};
  for (int i = 1; i < parts; ++i) {
    Box& box = boxes[static_cast<size_t>(pick(0, static_cast<int64_t>(boxes.size()) - 1))];
    const auto d = static_cast<size_t>(pick(0, static_cast<int64_t>(box.extent.size()) - 1));
    if (box.extent[d] < 2) continue;
    const int64_t first = pick(1, box.extent[d] - 1);
    Box rest = box;
    rest.offset[d] += first;
    rest.extent[d] -= first;
    box.extent[d] = first;
    boxes.push_back(std::move(rest));
  }
  held->parts.clear();
  for (const Box& box : boxes) {
    BoundPiece part = whole;
    part.box = box;
    part.strides = RowMajorStrides(box.extent);
    const size_t rank = box.extent.size();
    if (rank >= 2 && pick(0, 3) == 0) {
      part.strides[rank - 2] = 1;
      part.strides[rank - 1] = box.extent[rank - 2];
    }
    const auto shift = static_cast<size_t>(pick(0, 3)) * element;
    memory->emplace_back(static_cast<size_t>(ElementCount(box)) * element + shift);
    part.data = memory->back().data() + shift;
    ForEachPlace(box, [&](const Dims& at) {
      std::memcpy(AddressIn(part, at), AddressIn(whole, at), element);
    });
    held->parts.push_back(std::move(part));
  }
}

}  // namespace refitd

#endif  // REFITD_TRANSPORT_DERIVE_HELD_TESTING_H_
