// The part that an engine rank holds of each tensor, and how its memory maps to the global tensors.
//
// Slices follow torch.chunk: parts have ceil(n / ranks) elements, the last ones fewer or none.
// Pure; thread-safe.
#ifndef REFITD_DAEMON_REFITCTL_SLICING_H_
#define REFITD_DAEMON_REFITCTL_SLICING_H_

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "transport/plan/layout.h"

namespace refitd {

struct Chunk {
  int64_t offset = 0;
  int64_t extent = 0;
  bool operator==(const Chunk&) const = default;
};
// Part `index` of `n` elements that are cut into `parts` parts.
Chunk ChunkOf(int64_t n, int parts, int index);

// The rank's box of a tensor: its chunk of dimension `dim` if the tensor has at least two
// dimensions and `dim` is one of them, else the whole tensor.
Box SliceOf(const Dims& shape, std::optional<int> dim, int rank, int world_size);

// A box that is whole in every dimension but one, as `count` runs of `run` elements: `stride`
// elements apart in the global tensor, from element `first`, and back to back in the rank's memory.
struct Strips {
  int64_t first = 0;
  int64_t run = 0;
  int64_t stride = 0;
  int64_t count = 0;
  bool operator==(const Strips&) const = default;
};
Strips StripsOf(const Dims& shape, const Box& box);

// Calls fn(global, local, elements) for the part of each run that lies in the global range [start,
// start + count).
template <typename Fn>
void ForEachRun(const Strips& strips, int64_t start, int64_t count, Fn fn) {
  if (strips.run == 0 || strips.count == 0) return;
  const int64_t end = start + count;
  const int64_t below = start - strips.first - strips.run + 1;  // runs that end before `start`
  int64_t i = below <= 0 ? 0 : (below + strips.stride - 1) / strips.stride;
  for (; i < strips.count; ++i) {
    const int64_t run_start = strips.first + i * strips.stride;
    if (run_start >= end) return;
    const int64_t from = std::max(start, run_start);
    const int64_t to = std::min(end, run_start + strips.run);
    if (from < to) fn(from, i * strips.run + (from - run_start), to - from);
  }
}

// One tensor's part in the rank's memory.
struct HeldTensor {
  Box box;
  Strips strips;
  int64_t byte_offset = 0;  // from the memory's start, a multiple of kPackAlignment
  int64_t bytes = 0;
};

// All parts that a rank holds, in the order of the tensors that they were made from.
struct Holding {
  std::vector<HeldTensor> held;
  int64_t tensor_bytes = 0;  // sum of HeldTensor::bytes
  int64_t memory_bytes = 0;  // includes gaps for alignment
};
Holding PlanHolding(const std::vector<TensorSpec>& tensors, std::optional<int> dim, int rank,
                    int world_size);

// The holding as a layout for in-place delivery, all in one region.
Layout LayoutOf(const std::vector<TensorSpec>& tensors, const Holding& holding, RegionId region);

}  // namespace refitd

#endif  // REFITD_DAEMON_REFITCTL_SLICING_H_
