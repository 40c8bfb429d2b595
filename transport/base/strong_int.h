// Integers that can't be mixed up: `using SlotIndex = StrongInt<struct SlotIndexTag, uint32_t>`.
//
// Construction and `value()` are explicit; comparison, hashing (absl and std) and fmt work. There
// is no arithmetic but Next().
#ifndef REFITD_TRANSPORT_BASE_STRONG_INT_H_
#define REFITD_TRANSPORT_BASE_STRONG_INT_H_

#include <fmt/format.h>

#include <compare>
#include <cstdint>
#include <functional>
#include <utility>

namespace refitd {

template <typename Tag, typename T>
class StrongInt {
 public:
  using Value = T;
  constexpr StrongInt() = default;
  constexpr explicit StrongInt(T value) : value_(value) {}
  constexpr T value() const { return value_; }
  constexpr StrongInt Next() const { return StrongInt(value_ + 1); }
  constexpr auto operator<=>(const StrongInt&) const = default;
  template <typename H>
  friend H AbslHashValue(H h, const StrongInt& i) {
    return H::combine(std::move(h), i.value_);
  }

 private:
  T value_ = 0;
};

}  // namespace refitd

template <typename Tag, typename T>
struct std::hash<refitd::StrongInt<Tag, T>> {
  size_t operator()(const refitd::StrongInt<Tag, T>& i) const { return std::hash<T>()(i.value()); }
};

template <typename Tag, typename T>
struct fmt::formatter<refitd::StrongInt<Tag, T>> : fmt::formatter<T> {
  template <typename Context>
  auto format(const refitd::StrongInt<Tag, T>& i, Context& context) const {
    return fmt::formatter<T>::format(i.value(), context);
  }
};

#endif  // REFITD_TRANSPORT_BASE_STRONG_INT_H_
