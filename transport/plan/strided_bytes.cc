#include "transport/plan/strided_bytes.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace refitd {
namespace {

// Divide and round down, or up, also where `a` is negative; `b` must be positive.
int64_t FloorDivide(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }
int64_t CeilDivide(int64_t a, int64_t b) { return a / b + (a % b > 0 ? 1 : 0); }

// Decides whether a sum of x_i * stride_i, each x_i from 0 to count_i - 1, lies in a range. Tries
// one axis after the other, the largest stride first. Few x need be tried, because the remaining
// axes reach only up to a known sum, and only multiples of the greatest common divisor of their
// strides.
class SumInRange {
 public:
  SumInRange(absl::InlinedVector<Axis, 8> axes, int64_t most_steps, int64_t* steps)
      : axes_(std::move(axes)), most_steps_(most_steps), steps_(*steps) {
    std::sort(axes_.begin(), axes_.end(),
              [](const Axis& a, const Axis& b) { return a.stride > b.stride; });
    // Joins axes with equal strides into one axis: together they reach every multiple up to the sum
    // of their ends.
    size_t kept = 0;
    for (size_t i = 1; i < axes_.size(); ++i) {
      if (axes_[i].stride == axes_[kept].stride) {
        axes_[kept].count += axes_[i].count - 1;
      } else {
        axes_[++kept] = axes_[i];
      }
    }
    if (!axes_.empty()) axes_.resize(kept + 1);
    reach_.assign(axes_.size() + 1, 0);
    divisor_.assign(axes_.size() + 1, 0);
    for (size_t i = axes_.size(); i-- > 0;) {
      reach_[i] = reach_[i + 1] + axes_[i].stride * (axes_[i].count - 1);
      divisor_[i] = std::gcd(axes_[i].stride, divisor_[i + 1]);
    }
  }

  // Returns whether some sum lies in [low, high]; nullopt if that takes too many steps.
  std::optional<bool> Run(int64_t low, int64_t high) {
    const bool found = Find(0, low, high);
    if (steps_ > most_steps_) return std::nullopt;
    return found;
  }

 private:
  bool Find(size_t axis, int64_t low, int64_t high) {
    ++steps_;
    if (steps_ > most_steps_ || high < 0 || low > reach_[axis]) return false;
    if (low <= 0 || high >= reach_[axis]) return true;  // all x are 0, or all are at their ends
    const int64_t divisor = divisor_[axis];
    if (CeilDivide(low, divisor) > high / divisor) return false;
    const Axis& next = axes_[axis];
    // On the last axis, the check above found a multiple of the stride in the range, which is in
    // reach.
    if (axis + 1 == axes_.size()) return true;
    const int64_t first = std::max<int64_t>(0, CeilDivide(low - reach_[axis + 1], next.stride));
    const int64_t last = std::min(next.count - 1, FloorDivide(high, next.stride));
    for (int64_t x = first; x <= last; ++x) {
      if (Find(axis + 1, low - x * next.stride, high - x * next.stride)) return true;
      if (steps_ > most_steps_) return false;
    }
    return false;
  }

  absl::InlinedVector<Axis, 8> axes_;        // by descending strides, all different
  absl::InlinedVector<int64_t, 9> reach_;    // the largest sum of the axes from here on
  absl::InlinedVector<int64_t, 9> divisor_;  // the greatest common divisor of their strides
  const int64_t most_steps_;
  int64_t& steps_;
};

bool Decidable(const StridedBytes& a) { return a.end - a.begin <= kMaxStridedSpan; }

}  // namespace

// A run of `a` at a.begin + x and a run of `b` at b.begin + y share a byte if
//   -a.run < (a.begin + x) - (b.begin + y) < b.run.
// Let y' = reach - y be the distance from b's run to b's last run. It is a sum of multiples of
// strides, as x is. So the condition says that a sum x + y' lies in a range around reach - (a.begin
// - b.begin).
StridedBytes MakeStridedBytes(int64_t begin, int64_t span_bytes, int64_t element_bytes,
                              absl::Span<const int64_t> extent, absl::Span<const int64_t> strides) {
  StridedBytes bytes;
  bytes.begin = begin;
  bytes.end = begin + span_bytes;
  bytes.run = element_bytes;
  for (size_t d = 0; d < strides.size(); ++d) {
    if (extent[d] != 1) bytes.outer.push_back({strides[d] * element_bytes, extent[d]});
  }
  std::sort(bytes.outer.begin(), bytes.outer.end(), [](const Axis& a, const Axis& b) {
    return std::pair(a.stride, a.count) > std::pair(b.stride, b.count);
  });
  while (!bytes.outer.empty() && bytes.outer.back().stride == bytes.run) {
    bytes.run *= bytes.outer.back().count;
    bytes.outer.pop_back();
  }
  return bytes;
}

std::optional<bool> ShareBytes(const StridedBytes& a, const StridedBytes& b, int64_t most_steps,
                               int64_t* steps) {
  if (a.end <= b.begin || b.end <= a.begin) return false;
  if (!Decidable(a) || !Decidable(b)) return std::nullopt;
  absl::InlinedVector<Axis, 8> axes(a.outer.begin(), a.outer.end());
  axes.insert(axes.end(), b.outer.begin(), b.outer.end());
  axes.erase(
      std::remove_if(axes.begin(), axes.end(), [](const Axis& axis) { return axis.stride == 0; }),
      axes.end());
  const int64_t reach = b.end - b.run - b.begin;
  const int64_t middle = reach - (a.begin - b.begin);
  return SumInRange(std::move(axes), most_steps, steps).Run(middle - a.run + 1, middle + b.run - 1);
}

// Two different runs of the same storage meet where a sum of d_i * stride_i, each d_i from
// -(count_i - 1) to count_i - 1 and not all 0, is less than a run away from 0. Since d and -d give
// the same distance, only those d are looked at whose first d_i other than 0 is positive.
std::optional<bool> RepeatsBytes(const StridedBytes& a, int64_t most_steps, int64_t* steps) {
  if (!a.outer.empty() && a.outer.back().stride < a.run) return true;
  if (!Decidable(a)) return std::nullopt;
  for (size_t first = 0; first < a.outer.size(); ++first) {
    const Axis& axis = a.outer[first];
    // d of the first axis is 1 + x; those of the later ones are x - (count - 1).
    absl::InlinedVector<Axis, 8> axes;
    int64_t least = axis.stride;
    if (axis.count > 2) axes.push_back({axis.stride, axis.count - 1});
    for (size_t i = first + 1; i < a.outer.size(); ++i) {
      const Axis& later = a.outer[i];
      axes.push_back({later.stride, 2 * later.count - 1});
      least -= later.stride * (later.count - 1);
    }
    const std::optional<bool> meets =
        SumInRange(std::move(axes), most_steps, steps).Run(1 - a.run - least, a.run - 1 - least);
    if (!meets.has_value() || *meets) return meets;
  }
  return false;
}

}  // namespace refitd
