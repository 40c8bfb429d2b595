// Boxes as matrices: blocks of derived tensors lie in the last two dimensions. Pure.
#ifndef REFITD_TRANSPORT_DERIVE_MATRICES_H_
#define REFITD_TRANSPORT_DERIVE_MATRICES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "transport/plan/layout.h"

namespace refitd::derive {

// A range of indices of one dimension.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool empty() const { return end <= begin; }
};

inline Range Common(Range a, Range b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}
// The numbers of the blocks of `block` elements that a range meets.
inline Range BlocksOf(Range elements, int64_t block) {
  return {elements.begin / block, (elements.end + block - 1) / block};
}
// The elements of the block with that number, in a dimension of `end` elements.
inline Range ElementsOf(int64_t number, int64_t block, int64_t end) {
  return {number * block, std::min((number + 1) * block, end)};
}

// The last two dimensions of a box, as rows and columns; a dimension that is not there has one
// index.
struct Matrix {
  Range rows{0, 1};
  Range columns{0, 1};
  bool empty() const { return rows.empty() || columns.empty(); }
};

inline Matrix Common(const Matrix& a, const Matrix& b) {
  return {Common(a.rows, b.rows), Common(a.columns, b.columns)};
}

inline Matrix MatrixOf(const Box& box) {
  Matrix matrix;
  const size_t rank = box.offset.size();
  const auto range = [&box](size_t d) {
    return Range{box.offset[d], box.offset[d] + box.extent[d]};
  };
  if (rank >= 1) matrix.columns = range(rank - 1);
  if (rank >= 2) matrix.rows = range(rank - 2);
  return matrix;
}
inline Matrix MatrixOf(const Dims& extent) { return MatrixOf(WholeBox(extent)); }

// The number of dimensions before the last two.
inline size_t LeadingDims(const Box& box) {
  return box.offset.size() - std::min<size_t>(box.offset.size(), 2);
}

// Calls visit(at) for each matrix of a box that is not empty, in ascending order, until visit
// returns false. `at` has the indices of the dimensions before the last two.
template <typename Visit>
void ForEachMatrix(const Box& box, const Visit& visit) {
  const size_t leading = LeadingDims(box);
  Dims at(box.offset.begin(), box.offset.begin() + static_cast<int64_t>(leading));
  while (visit(at)) {
    size_t d = leading;
    while (d > 0 && at[d - 1] + 1 == box.offset[d - 1] + box.extent[d - 1]) {
      at[d - 1] = box.offset[d - 1];
      --d;
    }
    if (d == 0) return;
    ++at[d - 1];
  }
}

}  // namespace refitd::derive

#endif  // REFITD_TRANSPORT_DERIVE_MATRICES_H_
