// NCCL's C interface, as far as it is used. Private to transport/cuda/; empty in builds without
// CUDA.
//
// No header of NCCL is needed to build: this file declares the interface of NCCL 2.28.9
// (abi_test.cc compares it with nccl.h if the toolkit has that). NCCL keeps its interface
// compatible: functions keep their names and arguments, values of enums stay, and ncclConfig_t
// grows only at its end; its first field tells the library its size.
#ifndef REFITD_TRANSPORT_CUDA_NCCL_ABI_H_
#define REFITD_TRANSPORT_CUDA_NCCL_ABI_H_

#if defined(REFITD_CUDA)
#include <array>
#include <climits>
#include <cstddef>

struct CUstream_st;  // CUstream and cudaStream_t point to it

namespace refitd {

// ---- its types ----

struct NcclCommStruct;
struct NcclWindowStruct;
using NcclComm = NcclCommStruct*;      // ncclComm_t
using NcclWindow = NcclWindowStruct*;  // ncclWindow_t

enum class NcclResult : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum class NcclDataType : int { kInt8 = 0 };

inline constexpr size_t kNcclUniqueIdBytes = 128;
struct NcclUniqueId {
  std::array<char, kNcclUniqueIdBytes> internal{};
};

inline constexpr int kNcclUndefined = INT_MIN;        // NCCL_CONFIG_UNDEF_INT
inline constexpr int kNcclWindowSymmetric = 1;        // NCCL_WIN_COLL_SYMMETRIC
inline constexpr size_t kNcclWindowAlignment = 4096;  // NCCL_WIN_REQUIRED_ALIGNMENT
inline constexpr int kNcclPolicyDefault = 0;          // NCCL_CTA_POLICY_DEFAULT
inline constexpr int kNcclPolicyZero = 2;             // NCCL_CTA_POLICY_ZERO
inline constexpr int kNcclRevokeDefault = 0;          // NCCL_REVOKE_DEFAULT

// NCCL's way to number versions: 10000 * major + 100 * minor + patch.
inline constexpr int kNcclDeclaredVersion = 22809;

// ncclConfig_t; older libraries read its start, as far as they know it.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = kNcclDeclaredVersion;
  int blocking = kNcclUndefined;
  int cga_cluster_size = kNcclUndefined;
  int min_ctas = kNcclUndefined;
  int max_ctas = kNcclUndefined;
  const char* net_name = nullptr;
  int split_share = kNcclUndefined;
  int traffic_class = kNcclUndefined;
  const char* comm_name = nullptr;
  int collnet_enable = kNcclUndefined;
  int cta_policy = kNcclUndefined;
  int shrink_share = kNcclUndefined;
  int nvls_ctas = kNcclUndefined;
  int channels_per_net_peer = kNcclUndefined;
  int nvlink_centric_sched = kNcclUndefined;
};

// ---- its functions ----

// Every call that returns an ncclResult_t and that each library from kNcclFloor on has.
#define REFITD_NCCL_CALLS(V)                                                                    \
  V(ncclGetVersion, (int* version))                                                             \
  V(ncclGetUniqueId, (NcclUniqueId * id))                                                       \
  V(ncclCommInitRankConfig,                                                                     \
    (NcclComm * made, int ranks, NcclUniqueId id, int rank, NcclConfig* config))                \
  V(ncclCommGetAsyncError, (NcclComm comm, NcclResult * result))                                \
  V(ncclCommDestroy, (NcclComm comm))                                                           \
  V(ncclCommAbort, (NcclComm comm))                                                             \
  V(ncclGroupStart, ())                                                                         \
  V(ncclGroupEnd, ())                                                                           \
  V(ncclBroadcast, (const void* send, void* receive, size_t count, NcclDataType type, int root, \
                    NcclComm comm, CUstream_st* stream))                                        \
  V(ncclAllGather, (const void* send, void* receive, size_t send_count, NcclDataType type,      \
                    NcclComm comm, CUstream_st* stream))                                        \
  V(ncclSend, (const void* data, size_t count, NcclDataType type, int peer, NcclComm comm,      \
               CUstream_st* stream))                                                            \
  V(ncclRecv,                                                                                   \
    (void* data, size_t count, NcclDataType type, int peer, NcclComm comm, CUstream_st* stream))

// The calls of symmetric memory, which libraries from kNcclSymmetricFloor on have; null in older
// libraries.
#define REFITD_NCCL_SYMMETRIC_CALLS(V)                                        \
  V(ncclCommWindowRegister,                                                   \
    (NcclComm comm, void* data, size_t bytes, NcclWindow* window, int flags)) \
  V(ncclCommWindowDeregister, (NcclComm comm, NcclWindow window))             \
  V(ncclCommRevoke, (NcclComm comm, int flags))

// The oldest version that is used. It has nonblocking groups of several communicators in one
// process, and a config whose size the library looks at.
inline constexpr int kNcclFloor = 21801;
// The oldest version whose symmetric memory is used. 2.27 introduced it, 2.28.7 mended it and added
// ncclCommRevoke, without which a window of a stuck communicator could not be freed.
inline constexpr int kNcclSymmetricFloor = 22807;

}  // namespace refitd

#endif  // REFITD_CUDA
#endif  // REFITD_TRANSPORT_CUDA_NCCL_ABI_H_
