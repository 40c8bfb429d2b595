// Helpers of the planners' tests: random boxes, and sides (of sources or destinations) whose pieces
// hold real bytes.
#ifndef REFITD_TRANSPORT_PLAN_PLAN_TESTING_H_
#define REFITD_TRANSPORT_PLAN_PLAN_TESTING_H_

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "transport/plan/layout.h"

namespace refitd {

using Rng = std::mt19937_64;

inline int64_t Below(Rng* rng, int64_t n) { return static_cast<int64_t>((*rng)() % n); }

using LayoutPtr = std::shared_ptr<const Layout>;

inline Piece Dense(uint32_t tensor, Box box, int64_t byte_offset = 0) {
  Dims strides = RowMajorStrides(box.extent);
  return {tensor, std::move(box), RegionId(1), byte_offset, std::move(strides)};
}

inline LayoutPtr Make(std::vector<TensorSpec> tensors, std::vector<Piece> pieces) {
  auto layout = std::make_shared<Layout>();
  layout->tensors = std::move(tensors);
  layout->pieces = std::move(pieces);
  return layout;
}

// Visits the multi-indices of a box in row-major order.
template <typename Visit>
void ForEach(const Box& box, const Visit& visit) {
  Dims at = box.offset;
  if (ElementCount(box) == 0) return;
  while (true) {
    visit(at);
    size_t d = at.size();
    while (d > 0 && ++at[d - 1] == box.offset[d - 1] + box.extent[d - 1]) {
      at[d - 1] = box.offset[d - 1];
      --d;
    }
    if (d == 0) return;
  }
}

// Cuts a box of two elements or more in dimension d, at a random place; returns the second part.
inline Box CutOff(Box* box, size_t d, Rng* rng) {
  const int64_t first = 1 + Below(rng, box->extent[d] - 1);
  Box rest = *box;
  rest.offset[d] += first;
  rest.extent[d] -= first;
  box->extent[d] = first;
  return rest;
}

// Cuts a box up to `cuts` times, each time one of the boxes so far, anywhere in any dimension.
inline std::vector<Box> CutAnywhere(Box whole, int64_t cuts, Rng* rng) {
  std::vector<Box> boxes = {std::move(whole)};
  for (; cuts > 0; --cuts) {
    Box& box = boxes[static_cast<size_t>(Below(rng, std::ssize(boxes)))];
    const auto d = static_cast<size_t>(Below(rng, std::ssize(box.extent)));
    if (box.extent[d] < 2) continue;
    Box rest = CutOff(&box, d, rng);  // before the list grows
    boxes.push_back(std::move(rest));
  }
  return boxes;
}

inline int64_t GlobalIndex(const Dims& at, const Dims& shape) {
  return FirstIndex({at, Dims(at.size(), 1)}, shape);
}

inline int64_t Address(const Piece& piece, const Dims& at, int64_t element_bytes) {
  return piece.byte_offset + ElementDistance(at, piece.box.offset, piece.strides) * element_bytes;
}

// A layout under construction whose region holds real bytes.
struct Side {
  Layout layout;
  std::string memory;
};

// The bytes of element `index` of tensor `tensor`.
inline std::string Bits(uint32_t tensor, int64_t index, int64_t element_bytes) {
  HashChain chain(tensor);
  chain.Add(static_cast<uint64_t>(index));
  const uint64_t hash = chain.hash();
  std::string bytes(static_cast<size_t>(element_bytes), '\0');
  std::memcpy(bytes.data(), &hash, bytes.size());
  return bytes;
}

// Adds a piece for a box, with storage that is dense, padded, or has permuted dimensions; grows the
// side's memory.
inline void AddPiece(Rng* rng, Side* side, uint32_t tensor, const Box& box) {
  Piece piece{tensor, box, RegionId(1), 0, {}};
  const int64_t element_bytes = ElementBytes(side->layout.tensors[tensor].dtype);
  const size_t rank = box.extent.size();
  std::vector<size_t> order(rank);
  std::iota(order.begin(), order.end(), 0U);
  if (Below(rng, 3) == 0) std::shuffle(order.begin(), order.end(), *rng);
  piece.strides.resize(rank);
  int64_t stride = Below(rng, 4) == 0 ? 2 : 1;
  for (size_t i = rank; i-- > 0;) {
    piece.strides[order[i]] = stride;
    stride *= std::max<int64_t>(box.extent[order[i]], 1);
    if (Below(rng, 4) == 0) stride += Below(rng, 3);
  }
  piece.byte_offset = (static_cast<int64_t>(side->memory.size()) + element_bytes - 1) /
                      element_bytes * element_bytes;
  piece.byte_offset += Below(rng, 2) * element_bytes;
  const auto span = SpanBytes(piece, side->layout.tensors[tensor].dtype);
  REQUIRE(span.ok());
  side->memory.resize(static_cast<size_t>(piece.byte_offset + *span), '\x55');
  side->layout.pieces.push_back(std::move(piece));
}

// A random partition of the shape into boxes, by random cuts.
inline std::vector<Box> Partition(Rng* rng, const Dims& shape) {
  std::vector<Box> open = {WholeBox(shape)};
  std::vector<Box> done;
  while (!open.empty()) {
    Box box = open.back();
    open.pop_back();
    const auto d = shape.empty() ? 0 : static_cast<size_t>(Below(rng, shape.size()));
    if (shape.empty() || box.extent[d] < 2 || Below(rng, 2) == 0 || done.size() > 6) {
      done.push_back(std::move(box));
      continue;
    }
    Box rest = CutOff(&box, d, rng);
    open.push_back(std::move(box));
    open.push_back(std::move(rest));
  }
  return done;
}

inline Box RandomBox(Rng* rng, const Dims& shape) {
  Box box = WholeBox(shape);
  for (size_t d = 0; d < shape.size(); ++d) {
    box.offset[d] = Below(rng, shape[d] + 1);
    box.extent[d] = Below(rng, shape[d] - box.offset[d] + 1);
  }
  return box;
}

// Writes into every element of the side's pieces its own bytes (Bits).
inline void Fill(Side* side) {
  for (const Piece& piece : side->layout.pieces) {
    const TensorSpec& spec = side->layout.tensors[piece.tensor];
    const int64_t bytes = ElementBytes(spec.dtype);
    ForEach(piece.box, [&](const Dims& at) {
      const std::string bits = Bits(piece.tensor, GlobalIndex(at, spec.shape), bytes);
      std::memcpy(side->memory.data() + Address(piece, at, bytes), bits.data(), bits.size());
    });
  }
}

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_PLAN_TESTING_H_
