// Compares abi.h with the toolkit's nccl.h at compile time, if the toolkit has one of the version
// that abi.h declares or a newer one.
#include "transport/cuda/nccl/abi.h"

#include <catch2/catch.hpp>

#if defined(REFITD_NCCL_HEADER)
#include <nccl.h>

#include <tuple>
#include <type_traits>
#endif

namespace refitd {
namespace {

#if defined(REFITD_CUDA) && defined(REFITD_NCCL_HEADER) && NCCL_VERSION_CODE >= 22809

// The way in which a type is passed. All pointers count as one type, enums as their integers, and
// structures as equal if they have one size.
template <size_t kBytes>
struct Structure;
template <typename T>
struct Passed {
  using Type = std::conditional_t<std::is_class_v<T>, Structure<sizeof(T)>*, T>;
};
template <typename T>
struct Passed<T*> {
  using Type = void*;
};
template <typename T>
requires std::is_enum_v<T>
struct Passed<T> {
  using Type = std::make_signed_t<std::underlying_type_t<T>>;
};
template <typename T>
struct Signature;
template <typename Result, typename... Arguments>
struct Signature<Result (*)(Arguments...)> {
  using Type = std::tuple<typename Passed<Result>::Type, typename Passed<Arguments>::Type...>;
};
template <typename Ours, typename Theirs>
constexpr bool kAlike =
    std::is_same_v<typename Signature<Ours>::Type, typename Signature<Theirs>::Type>;

#define REFITD_ALIKE(call, arguments) \
  static_assert(kAlike<NcclResult(*) arguments, decltype(&::call)>, #call);
REFITD_NCCL_CALLS(REFITD_ALIKE)
REFITD_NCCL_SYMMETRIC_CALLS(REFITD_ALIKE)
#undef REFITD_ALIKE
static_assert(kAlike<const char* (*)(NcclResult), decltype(&::ncclGetErrorString)>);
static_assert(kAlike<const char* (*)(NcclComm), decltype(&::ncclGetLastError)>);

static_assert(static_cast<int>(NcclResult::kSuccess) == ncclSuccess);
static_assert(static_cast<int>(NcclResult::kUnhandledCudaError) == ncclUnhandledCudaError);
static_assert(static_cast<int>(NcclResult::kSystemError) == ncclSystemError);
static_assert(static_cast<int>(NcclResult::kInternalError) == ncclInternalError);
static_assert(static_cast<int>(NcclResult::kInvalidArgument) == ncclInvalidArgument);
static_assert(static_cast<int>(NcclResult::kInvalidUsage) == ncclInvalidUsage);
static_assert(static_cast<int>(NcclResult::kRemoteError) == ncclRemoteError);
static_assert(static_cast<int>(NcclResult::kInProgress) == ncclInProgress);
static_assert(static_cast<int>(NcclDataType::kInt8) == ncclInt8);

static_assert(sizeof(NcclUniqueId) == sizeof(ncclUniqueId));
static_assert(alignof(NcclUniqueId) == alignof(ncclUniqueId));
static_assert(kNcclUndefined == NCCL_CONFIG_UNDEF_INT);
static_assert(kNcclWindowSymmetric == NCCL_WIN_COLL_SYMMETRIC);
static_assert(kNcclWindowAlignment == NCCL_WIN_REQUIRED_ALIGNMENT);
static_assert(kNcclPolicyDefault == NCCL_CTA_POLICY_DEFAULT);
static_assert(kNcclPolicyZero == NCCL_CTA_POLICY_ZERO);
static_assert(kNcclRevokeDefault == NCCL_REVOKE_DEFAULT);
static_assert(NCCL_VERSION(2, 28, 9) == kNcclDeclaredVersion);

// In a newer version the structure may have grown.
static_assert(sizeof(NcclConfig) == sizeof(ncclConfig_t) || NCCL_VERSION_CODE > 22899);
#define REFITD_AT(ours, theirs) \
  static_assert(offsetof(NcclConfig, ours) == offsetof(ncclConfig_t, theirs), #theirs)
REFITD_AT(size, size);
REFITD_AT(magic, magic);
REFITD_AT(version, version);
REFITD_AT(blocking, blocking);
REFITD_AT(cga_cluster_size, cgaClusterSize);
REFITD_AT(min_ctas, minCTAs);
REFITD_AT(max_ctas, maxCTAs);
REFITD_AT(net_name, netName);
REFITD_AT(split_share, splitShare);
REFITD_AT(traffic_class, trafficClass);
REFITD_AT(comm_name, commName);
REFITD_AT(collnet_enable, collnetEnable);
REFITD_AT(cta_policy, CTAPolicy);
REFITD_AT(shrink_share, shrinkShare);
REFITD_AT(nvls_ctas, nvlsCTAs);
REFITD_AT(channels_per_net_peer, nChannelsPerNetPeer);
REFITD_AT(nvlink_centric_sched, nvlinkCentricSched);
#undef REFITD_AT

TEST_CASE("an unset config is what nccl.h initialises one to") {
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  const NcclConfig ours;
  CHECK(ours.magic == theirs.magic);
  CHECK(ours.blocking == theirs.blocking);
  CHECK(ours.cga_cluster_size == theirs.cgaClusterSize);
  CHECK(ours.min_ctas == theirs.minCTAs);
  CHECK(ours.max_ctas == theirs.maxCTAs);
  CHECK(ours.net_name == theirs.netName);
  CHECK(ours.split_share == theirs.splitShare);
  CHECK(ours.traffic_class == theirs.trafficClass);
  CHECK(ours.comm_name == theirs.commName);
  CHECK(ours.collnet_enable == theirs.collnetEnable);
  CHECK(ours.cta_policy == theirs.CTAPolicy);
  CHECK(ours.shrink_share == theirs.shrinkShare);
  CHECK(ours.nvls_ctas == theirs.nvlsCTAs);
  CHECK(ours.channels_per_net_peer == theirs.nChannelsPerNetPeer);
  CHECK(ours.nvlink_centric_sched == theirs.nvlinkCentricSched);
}

#else

TEST_CASE("there is no nccl.h to compare with") { SUCCEED(); }

#endif

}  // namespace
}  // namespace refitd
