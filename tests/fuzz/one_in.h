// A choice that an input itself makes, so that the same input is always treated alike.
#ifndef REFITD_TESTS_FUZZ_ONE_IN_H_
#define REFITD_TESTS_FUZZ_ONE_IN_H_

#include <cstddef>
#include <functional>
#include <string_view>

namespace refitd {

// True for about one of `n` inputs. Fuzz targets make their slowest checks of these alone.
inline bool OneIn(size_t n, std::string_view input) {
  return std::hash<std::string_view>{}(input) % n == 0;
}

}  // namespace refitd

#endif  // REFITD_TESTS_FUZZ_ONE_IN_H_
