// A helper for tests of the C interface.
#ifndef REFITD_CLIENT_REFIT_TEST_UTIL_H_
#define REFITD_CLIENT_REFIT_TEST_UTIL_H_

namespace refitd {

// A structure of zeros that has its size: what the REFIT_..._INIT macros, which are C, make.
template <typename T>
T Initialised() {
  T value{};
  value.struct_size = sizeof(T);
  return value;
}

}  // namespace refitd

#endif  // REFITD_CLIENT_REFIT_TEST_UTIL_H_
