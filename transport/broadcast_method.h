// The ways in which the bytes of a pushed bucket reach several devices of one node, and their
// names. The table here is the only list of them in C++.
#ifndef REFITD_TRANSPORT_BROADCAST_METHOD_H_
#define REFITD_TRANSPORT_BROADCAST_METHOD_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace refitd {

//   kAuto       whichever is expected to be the fastest for the bytes and the devices
//   kDirect     the source's device stores into every destination; no staging
//   kChain      copy engines relay chunks from device to device, slot to slot
//   kSymmetric  each receiver gets its share, then all-gather over symmetric windows (NCCL)
//   kNccl       one NCCL broadcast, slot to slot
enum class BroadcastMethod : uint8_t {
  kAuto = 0,
  kDirect = 1,
  kChain = 2,
  kSymmetric = 3,
  kNccl = 4
};

// The names of the methods. The index is the method's number, which refitd.v1.BroadcastMethod and
// the C interface use too.
inline constexpr std::array<std::string_view, 5> kBroadcastMethodNames = {"auto", "direct", "chain",
                                                                          "symmetric", "nccl"};
inline constexpr size_t kBroadcastMethods = kBroadcastMethodNames.size();

constexpr std::string_view BroadcastMethodName(BroadcastMethod method) {
  const auto number = static_cast<size_t>(method);
  return number < kBroadcastMethods ? kBroadcastMethodNames[number] : "unknown";
}

// Whether the method moves bytes through staging slots whenever it is used.
constexpr bool NeedsSlots(BroadcastMethod method) {
  return method != BroadcastMethod::kAuto && method != BroadcastMethod::kDirect;
}

}  // namespace refitd

#endif  // REFITD_TRANSPORT_BROADCAST_METHOD_H_
