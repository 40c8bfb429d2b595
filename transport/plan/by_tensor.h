// Items grouped by tensor, in one array: planners look at pieces by tensor, but layouts list them
// in any order. Header only.
#ifndef REFITD_TRANSPORT_PLAN_BY_TENSOR_H_
#define REFITD_TRANSPORT_PLAN_BY_TENSOR_H_

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "absl/types/span.h"

namespace refitd {

template <typename Item>
class ByTensor {
 public:
  ByTensor() = default;
  // `for_each(visit)` must call visit(tensor, item) for all items. It is called twice, and must
  // visit the same items in the same order.
  template <typename ForEach>
  ByTensor(size_t tensors, const ForEach& for_each) : first_(tensors + 1, 0) {
    for_each([this](uint32_t tensor, const Item&) { ++first_[tensor + 1]; });
    std::partial_sum(first_.begin(), first_.end(), first_.begin());
    items_.resize(first_.back());
    std::vector<uint32_t> next = first_;
    for_each([&](uint32_t tensor, const Item& item) { items_[next[tensor]++] = item; });
  }

  // The items of a tensor, in the order in which they were visited.
  absl::Span<const Item> Of(uint32_t tensor) const {
    return absl::MakeConstSpan(items_).subspan(first_[tensor], first_[tensor + 1] - first_[tensor]);
  }

 private:
  std::vector<uint32_t> first_;  // per tensor, index into items_; one more at the end
  std::vector<Item> items_;
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_BY_TENSOR_H_
