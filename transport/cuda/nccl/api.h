// NCCL as this folder calls it: the table of its functions (abi.h), errors as statuses.
// Private to transport/cuda/; empty in builds without CUDA.
//
// Only here and in api.cc an ncclResult_t becomes a status. The table is immutable once loaded.
// NCCL's functions are thread-safe for different communicators only; a group (ncclGroupStart to
// ncclGroupEnd) belongs to its thread.
#ifndef REFITD_TRANSPORT_CUDA_NCCL_API_H_
#define REFITD_TRANSPORT_CUDA_NCCL_API_H_

#if defined(REFITD_CUDA)
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/cuda/nccl/abi.h"

namespace refitd {

struct NcclApi {
  // NOT_FOUND in the loader's words: no such library, or it lacks a call that its version has.
  // FAILED_PRECONDITION: older than kNcclFloor. A library once loaded stays loaded. This does not
  // clean the environment, which NCCL reads at its first communicator (nccl.h cleans it).
  static absl::StatusOr<NcclApi> Load(const std::string& library);

  // Makes the status of a call, such as "ncclGroupEnd: unhandled cuda error (result 1)".
  // kInProgress is no error. FAILED_PRECONDITION: NCCL refuses an argument; UNAVAILABLE: the
  // system, a device or a peer failed; INTERNAL: NCCL's own error. If NCCL has a last message for
  // this thread, it is appended.
  absl::Status Check(std::string_view call, NcclResult result) const;

  int version = 0;   // 22809
  std::string path;  // of the file that was loaded

#define REFITD_NCCL_MEMBER(call, arguments) NcclResult(*call) arguments = nullptr;
  REFITD_NCCL_CALLS(REFITD_NCCL_MEMBER)
  REFITD_NCCL_SYMMETRIC_CALLS(REFITD_NCCL_MEMBER)
#undef REFITD_NCCL_MEMBER
  const char* (*ncclGetErrorString)(NcclResult result) = nullptr;
  const char* (*ncclGetLastError)(NcclComm comm) = nullptr;
};

// REFITD_NCCL_CALL(api, ncclGroupEnd) makes the call and returns its status.
#define REFITD_NCCL_CALL(api, call, ...) (api).Check(#call, (api).call(__VA_ARGS__))

}  // namespace refitd

#endif  // REFITD_CUDA
#endif  // REFITD_TRANSPORT_CUDA_NCCL_API_H_
