#include "transport/cuda/api.h"

#if defined(REFITD_CUDA)
#include <dlfcn.h>

#include "absl/strings/cord.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr char kLostPayload[] = "refitd/cuda-context-lost";

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

absl::StatusCode CodeOf(CUresult result) {
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      return absl::StatusCode::kResourceExhausted;
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_INVALID_HANDLE:
    case CUDA_ERROR_INVALID_DEVICE:
      return absl::StatusCode::kFailedPrecondition;
    default:
      return IsLostContext(result) ? absl::StatusCode::kInternal : absl::StatusCode::kUnavailable;
  }
}

}  // namespace

absl::StatusOr<CudaApi> CudaApi::Load(const std::string& library) {
  void* const loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (loaded == nullptr) return absl::NotFoundError(LastLoadError());
  CudaApi api;
#define REFITD_CUDA_FIND(call, symbol) REFITD_RETURN_IF_ERROR(Find(loaded, symbol, &api.call));
  REFITD_CUDA_CALLS(REFITD_CUDA_FIND)
#undef REFITD_CUDA_FIND
#if CUDA_VERSION >= 12080
  (void)Find(loaded, "cuMemcpyBatchAsync_v2", &api.copy_batch);
#endif
  return api;
}

absl::Status CudaApi::Check(std::string_view call, CUresult result) const {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char* text = nullptr;
  if (cuGetErrorString(result, &text) != CUDA_SUCCESS || text == nullptr) {
    text = "unknown to the driver";
  }
  absl::Status status =
      Error(CodeOf(result), "{}: {} (error {})", call, text, static_cast<int>(result));
  if (IsLostContext(result)) status.SetPayload(kLostPayload, absl::Cord());
  return status;
}

bool IsLostContext(CUresult result) {
  // Results are given as numbers, because headers of older toolkits lack some names.
  switch (static_cast<int>(result)) {
    case 4:    // the driver is shutting down
    case 46:   // device unavailable
    case 214:  // uncorrectable ECC error
    case 220:  // uncorrectable NVLink error
    case 226:  // contained memory error
    case 700:  // illegal address
    case 702:  // launch timeout
    case 709:  // context is destroyed
    case 710:  // device-side assert
    case 714:  // hardware stack error
    case 715:  // illegal instruction
    case 716:  // misaligned address
    case 717:  // invalid address space
    case 718:  // invalid program counter
    case 719:  // launch failed
    case 721:  // tensor memory leak
    case 810:  // the MPS server ended this client
    case 911:  // failure of an external device
    case 999:  // unknown
      return true;
    default:
      return false;
  }
}

bool IsLost(const absl::Status& status) { return status.GetPayload(kLostPayload).has_value(); }

absl::Status CudaApi::CopyMany(const CUdeviceptr* to, const CUdeviceptr* from, const size_t* bytes,
                               size_t count, CUstream stream) const {
  CopyAttributes attributes = {};
#if CUDA_VERSION >= 12080
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  attributes.flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
#endif
  size_t attributes_from = 0;
  // The driver's parameters are not const; it only reads them.
  return Check(
      "cuMemcpyBatchAsync",
      copy_batch(const_cast<CUdeviceptr*>(to), const_cast<CUdeviceptr*>(from),
                 const_cast<size_t*>(bytes), count, &attributes, &attributes_from, 1, stream));
}

absl::StatusOr<int64_t> CudaApi::Granularity(const CUmemAllocationProp& memory) const {
  size_t granularity = 0;
  REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(*this, cuMemGetAllocationGranularity, &granularity,
                                          &memory, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  if (granularity == 0) return absl::InternalError("the driver's granularity is 0");
  return static_cast<int64_t>(granularity);
}

CUmemAllocationProp PinnedMemoryOf(int device) {
  CUmemAllocationProp memory = {};
  memory.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  memory.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  memory.location.id = device;
  memory.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return memory;
}

absl::StatusOr<CUcontext> CudaContexts::Get(int device) {
  if (device < 0 || device >= devices()) {
    return Error(absl::StatusCode::kInvalidArgument, "no CUDA device {}: there are {}", device,
                 devices());
  }
  MutexLock lock(&mutex_);
  DeviceContext& of = contexts_[static_cast<size_t>(device)];
  if (of.context != nullptr) return of.context;
  CUdevice handle = 0;
  REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api_, cuDeviceGet, &handle, device));
  REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api_, cuDevicePrimaryCtxRetain, &of.context, handle));
  if (!own_) return of.context;
  const ScopedContext current(api_, of.context);
  // A stack that stays costs memory, and nothing else.
  if (current.status().ok() &&
      api_.cuCtxGetLimit(&of.default_stack, CU_LIMIT_STACK_SIZE) == CUDA_SUCCESS &&
      api_.cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 0) != CUDA_SUCCESS) {
    of.default_stack = 0;
  }
  return of.context;
}

absl::StatusOr<CUcontext> CudaContexts::GetWithStack(int device) {
  REFITD_ASSIGN_OR_RETURN(const CUcontext context, Get(device));
  size_t stack = 0;
  {
    MutexLock lock(&mutex_);
    stack = contexts_[static_cast<size_t>(device)].default_stack;
  }
  if (stack == 0) return context;
  const ScopedContext current(api_, context);
  REFITD_RETURN_IF_ERROR(current.status());
  REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api_, cuCtxSetLimit, CU_LIMIT_STACK_SIZE, stack));
  MutexLock lock(&mutex_);
  contexts_[static_cast<size_t>(device)].default_stack = 0;
  return context;
}

absl::StatusOr<bool> CudaContexts::CanReach(int device, int owner) const {
  if (device == owner) return true;
  CUdevice from = 0;
  CUdevice to = 0;
  REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api_, cuDeviceGet, &from, device));
  REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api_, cuDeviceGet, &to, owner));
  int can = 0;
  REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api_, cuDeviceCanAccessPeer, &can, from, to));
  return can != 0;
}

}  // namespace refitd

#endif  // REFITD_CUDA
