// What the planners (plan.cc, route.cc, node_program.cc) share: sets of boxes of one tensor.
//
// Pure and private to transport/. All boxes of a call have the same rank. Functions are thread-safe
// because they share nothing.
#ifndef REFITD_TRANSPORT_BOXES_H_
#define REFITD_TRANSPORT_BOXES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "transport/layout.h"

namespace refitd {

// Box comparisons that one plan spends at most (P10: layouts are not trusted): some seconds. The
// biggest models over a thousand ranks on each side take a third of it.
inline constexpr int64_t kMaxPlanSteps = int64_t{1} << 30;

// By offset, then extent.
bool BoxLess(const Box& a, const Box& b);
bool IsEmpty(const Box& box);
bool Contains(const Box& outer, const Box& inner);
// What of `box` is outside `hole`, as disjoint boxes, to `parts`.
void Subtract(const Box& box, const Box& hole, std::vector<Box>* parts);
// The union of `boxes` as disjoint ones. Adds the comparisons made to `steps` and ends early, with
// an incomplete result, where they come to more than kMaxPlanSteps.
std::vector<Box> MakeDisjoint(std::vector<Box> boxes, int64_t* steps);
// Joins disjoint boxes that form one box together, along one dimension after the other, as long as
// there are any. Leaves them in order of BoxLess.
void MergeAdjacent(std::vector<Box>* boxes);
// Elements that the same ones hold.
struct HeldBox {
  Box box;
  absl::InlinedVector<uint32_t, 4> holders;  // ascending
};
// Boxes with their holders, one or more each, to disjoint ones of the same elements. Equal boxes
// cost no more than sorting. Adds the comparisons made to `steps` and ends early, with a wrong
// result, where they come to more than kMaxPlanSteps.
void CutByHolders(std::vector<HeldBox>* boxes, int64_t* steps);
// Where the first element of `box`, a part of the piece's box, lies: bytes from the start of the
// piece's region.
int64_t ByteOffset(const Piece& piece, const Box& box, int64_t element_bytes);
// The load up to which `amount` more fills the least loaded of `loads`, rounded down. At least one
// load.
int64_t WaterLevel(std::vector<int64_t> loads, int64_t amount);

// Finds which of some boxes may meet another: all that meet it along one dimension. Keeps the
// pointers.
class BoxIndex {
 public:
  // Up to this many boxes are searched one by one.
  static constexpr size_t kLinearBoxes = 16;

  explicit BoxIndex(absl::Span<const Box* const> boxes);

  // Calls `visit(i)` for each; returns the number of calls.
  template <typename Visit>
  int64_t Query(const Box& box, const Visit& visit) const {
    if (order_.empty()) {
      for (uint32_t i = 0; i < boxes_.size(); ++i) visit(i);
      return static_cast<int64_t>(boxes_.size());
    }
    const int64_t begin = box.offset[dim_];
    const int64_t end = begin + box.extent[dim_];
    const auto first = std::upper_bound(reach_.begin(), reach_.end(), begin) - reach_.begin();
    auto i = static_cast<size_t>(first);
    for (; i < order_.size() && boxes_[order_[i]]->offset[dim_] < end; ++i) visit(order_[i]);
    return static_cast<int64_t>(i) - first;
  }

 private:
  void ChooseDimension();

  absl::Span<const Box* const> boxes_;
  size_t dim_ = 0;
  std::vector<uint32_t> order_;  // by offset; empty: search one by one
  std::vector<int64_t> reach_;   // furthest end of order_[0..i]
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_BOXES_H_
