// The descriptor socket: how regions and staging pools change hands. Fixed-size messages over a
// SOCK_SEQPACKET unix socket whose path Welcome.descriptor_socket gives; a descriptor travels
// beside them (SCM_RIGHTS). One request, one reply, then the next request; the client may close at
// any time. See docs/descriptor_socket.md.
//
// Little endian; both ends are on one host. The daemon trusts no request (P10): the token tells
// which member asks, the kernel's peer credentials must be those of the process that attached, and
// sizes are checked against the descriptor.
#ifndef REFITD_TRANSPORT_HOST_DESCRIPTOR_FORMAT_H_
#define REFITD_TRANSPORT_HOST_DESCRIPTOR_FORMAT_H_

#include <cstdint>
#include <type_traits>

namespace refitd {

inline constexpr uint32_t kDescriptorMagic = 0x44465252;  // "RRFD"
inline constexpr uint32_t kDescriptorWireVersion = 1;

enum class DescriptorRequestKind : uint32_t {
  kRegisterRegion =
      1,  // with exactly one descriptor: a memfd sealed against shrinking; `bytes` of it are mapped
  kReleaseRegion = 2,  // `region_id`; refused while a layout names it
  kMapPool = 3,  // the reply carries the group's pool: writable for trainers, read-only for engines
  // The reply carries a side of an arena that was kept for this rank (Welcome.kept): `region_id` is
  // twice the arena's index, and 1 more for the back.
  kTakeKept = 4,
};

// kPinned: a memfd as of kMemfd, for the GPU that the lease names to read and write.
enum class RegionKind : uint32_t { kMemfd = 1, kDevice = 2, kPinned = 3 };

// What the daemon does with the descriptor of a region that it has mapped: it closes it; keeps it
// with the region, as it must for an arena's sides; or also gives it to the rank that takes this
// one's place (kTakeKept).
enum class KeepDescriptor : uint32_t { kNo = 0, kWithRegion = 1, kForNextRank = 2 };

struct DescriptorRequest {
  uint32_t magic = kDescriptorMagic;
  uint32_t version = kDescriptorWireVersion;
  DescriptorRequestKind kind{};
  RegionKind region_kind = RegionKind::kMemfd;
  uint8_t token[16] = {};
  int64_t bytes = 0;
  // kReleaseRegion: the region. kRegisterRegion of kDevice: the memory's address in the process
  // that registers it, so that the daemon recognises memory that comes twice; 0: unknown.
  uint64_t region_id = 0;
  KeepDescriptor keep = KeepDescriptor::kNo;  // kRegisterRegion; else kNo
  uint8_t reserved[12] = {};                  // zero
};
static_assert(sizeof(DescriptorRequest) == 64 && std::is_trivially_copyable_v<DescriptorRequest>);

struct DescriptorReply {
  uint32_t magic = kDescriptorMagic;
  uint32_t version = kDescriptorWireVersion;
  uint32_t code = 0;         // a gRPC status code
  RegionKind region_kind{};  // kTakeKept: with which the client registers the side; else 0
  uint64_t region_id = 0;
  int64_t bytes = 0;       // of the pool, or the side
  int64_t slot_bytes = 0;  // of the pool
  char message[216] = {};  // UTF-8, zero-terminated; empty when code is 0
};
static_assert(sizeof(DescriptorReply) == 256 && std::is_trivially_copyable_v<DescriptorReply>);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_HOST_DESCRIPTOR_FORMAT_H_
