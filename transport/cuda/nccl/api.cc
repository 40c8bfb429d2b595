#include "transport/cuda/nccl/api.h"

#if defined(REFITD_CUDA)
#include <dlfcn.h>

#include "transport/base/status.h"
#include "transport/cuda/nccl/nccl.h"

namespace refitd {
namespace {

std::string LastLoadError() {
  const char* error = dlerror();
  return error != nullptr ? error : "the loader gives no reason";
}

template <typename Function>
absl::Status Find(void* library, const char* symbol, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, symbol));
  if (*function != nullptr) return absl::OkStatus();
  return absl::NotFoundError(LastLoadError());
}

// The file that the loader found for a name.
std::string FileOf(const void* function, const std::string& asked) {
  Dl_info info = {};
  if (dladdr(function, &info) == 0 || info.dli_fname == nullptr) return asked;
  return info.dli_fname;
}

absl::StatusCode CodeOf(NcclResult result) {
  switch (result) {
    case NcclResult::kInvalidArgument:
    case NcclResult::kInvalidUsage:
      return absl::StatusCode::kFailedPrecondition;
    case NcclResult::kUnhandledCudaError:
    case NcclResult::kSystemError:
    case NcclResult::kRemoteError:
      return absl::StatusCode::kUnavailable;
    default:
      return absl::StatusCode::kInternal;
  }
}

}  // namespace

absl::StatusOr<NcclApi> NcclApi::Load(const std::string& library) {
  void* const loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (loaded == nullptr) return absl::NotFoundError(LastLoadError());
  NcclApi api;
  REFITD_RETURN_IF_ERROR(Find(loaded, "ncclGetErrorString", &api.ncclGetErrorString));
  REFITD_RETURN_IF_ERROR(Find(loaded, "ncclGetVersion", &api.ncclGetVersion));
  api.path = FileOf(reinterpret_cast<const void*>(api.ncclGetVersion), library);
  REFITD_RETURN_IF_ERROR(REFITD_NCCL_CALL(api, ncclGetVersion, &api.version));
  if (api.version < kNcclFloor) {
    return Error(absl::StatusCode::kFailedPrecondition, "{} is NCCL {}, older than {}", api.path,
                 NcclVersionText(api.version), NcclVersionText(kNcclFloor));
  }
  REFITD_RETURN_IF_ERROR(Find(loaded, "ncclGetLastError", &api.ncclGetLastError));
#define REFITD_NCCL_FIND(call, arguments) REFITD_RETURN_IF_ERROR(Find(loaded, #call, &api.call));
  REFITD_NCCL_CALLS(REFITD_NCCL_FIND)
  if (api.version >= kNcclSymmetricFloor) {
    REFITD_NCCL_SYMMETRIC_CALLS(REFITD_NCCL_FIND)
  }
#undef REFITD_NCCL_FIND
  return api;
}

absl::Status NcclApi::Check(std::string_view call, NcclResult result) const {
  if (result == NcclResult::kSuccess || result == NcclResult::kInProgress) {
    return absl::OkStatus();
  }
  constexpr size_t kMaxMessageBytes = 500;  // NCCL's log has the whole message
  const char* text = ncclGetErrorString(result);
  const char* message = ncclGetLastError != nullptr ? ncclGetLastError(nullptr) : nullptr;
  std::string last = message != nullptr ? std::string(Shorten(message, kMaxMessageBytes)) : "";
  while (!last.empty() && last.back() == '\n') last.pop_back();
  return Error(CodeOf(result), "{}: {} (result {}){}{}", call, text != nullptr ? text : "unknown",
               static_cast<int>(result), last.empty() ? "" : ": ", last);
}

}  // namespace refitd

#endif  // REFITD_CUDA
