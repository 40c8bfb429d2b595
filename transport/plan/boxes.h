// Sets of boxes of one tensor, which all planners use (plan.cc, route.cc, node_program.cc).
//
// Pure and private to transport/. All boxes of a call have the same rank. Functions are thread-safe
// because they share nothing.
#ifndef REFITD_TRANSPORT_PLAN_BOXES_H_
#define REFITD_TRANSPORT_PLAN_BOXES_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "transport/plan/layout.h"

namespace refitd {

// The most box comparisons that one plan may spend, since layouts are not trusted (P10). They take
// some seconds. The biggest models over a thousand ranks on each side need a third of this number.
inline constexpr int64_t kMaxPlanSteps = int64_t{1} << 30;
// Cutting one box counts as this number of comparisons, because it takes that much longer: it
// copies boxes.
inline constexpr int64_t kCutSteps = 16;

// Counts the work of a planner, which ends when the work is over the limit or was cancelled. Loops
// over boxes from callers ask Over() regularly, so that a cancelled plan ends soon.
class PlanWork {
 public:
  // `cancelled`: a caller that no longer wants the plan sets it; null: the plan can't be cancelled.
  explicit PlanWork(std::shared_ptr<const std::atomic<bool>> cancelled = nullptr)
      : cancelled_(std::move(cancelled)) {}
  PlanWork& operator+=(int64_t steps) {
    steps_ += steps;
    return *this;
  }
  int64_t steps() const { return steps_; }
  bool Cancelled() const {
    return cancelled_ != nullptr && cancelled_->load(std::memory_order_relaxed);
  }
  bool Over() const { return steps_ > kMaxPlanSteps || Cancelled(); }

 private:
  int64_t steps_ = 0;
  std::shared_ptr<const std::atomic<bool>> cancelled_;
};

// Orders boxes by offset, then extent.
bool BoxLess(const Box& a, const Box& b);
bool IsEmpty(const Box& box);
// Whether two boxes share an element. This is Intersect(a, b).has_value() without making the box.
inline bool Meet(const Box& a, const Box& b) {
  for (size_t d = 0; d < a.offset.size(); ++d) {
    if (a.offset[d] >= b.offset[d] + b.extent[d] || b.offset[d] >= a.offset[d] + a.extent[d]) {
      return false;
    }
  }
  return !IsEmpty(a) && !IsEmpty(b);
}
// Appends the part of `box` outside `hole` to `parts`, as disjoint boxes.
void Subtract(const Box& box, const Box& hole, std::vector<Box>* parts);
// The union of `boxes` as disjoint boxes. Counts its steps in `work`, and ends early, with an
// incomplete result, if work->Over().
std::vector<Box> MakeDisjoint(std::vector<Box> boxes, PlanWork* work);
// Joins disjoint boxes that together form one box, along one dimension after the other, until no
// two can be joined. Leaves the boxes in the order of BoxLess.
void MergeAdjacent(std::vector<Box>* boxes);
// A box all of whose elements have the same holders.
struct OwnedBox {
  Box box;
  absl::InlinedVector<uint32_t, 4> holders;  // ascending
};
// Replaces boxes, each with one or more holders, by disjoint boxes of the same elements with all
// their holders. Equal boxes cost no more than sorting. Counts its steps in `work`, and ends early,
// with a wrong result, if work->Over().
void CutByHolders(std::vector<OwnedBox>* boxes, PlanWork* work);
// The offset of the first element of `box`, a part of the piece's box, in bytes from the start of
// the piece's region.
int64_t ByteOffset(const Piece& piece, const Box& box, int64_t element_bytes);
// The level to which `amount` fills up the smallest of `loads`, as water fills vessels, rounded
// down. There must be at least one load.
int64_t WaterLevel(std::vector<int64_t> loads, int64_t amount);

// Finds the boxes that may meet a given box: those that meet it along one dimension, by which the
// boxes are sorted. Keeps pointers to the boxes.
class BoxIndex {
 public:
  // An index of at most this number of boxes searches them one by one.
  static constexpr size_t kLinearBoxes = 16;

  explicit BoxIndex(absl::Span<const Box* const> boxes);

  // Calls `visit(i)` for each box i that may meet `box`; returns the number of calls.
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

#endif  // REFITD_TRANSPORT_PLAN_BOXES_H_
