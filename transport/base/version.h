// The version of this release. Constant, thread-safe.
#ifndef REFITD_TRANSPORT_BASE_VERSION_H_
#define REFITD_TRANSPORT_BASE_VERSION_H_

namespace refitd {

inline constexpr char kVersion[] = "0.2.0";

}  // namespace refitd

#endif  // REFITD_TRANSPORT_BASE_VERSION_H_
