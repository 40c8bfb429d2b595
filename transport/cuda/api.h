// The CUDA driver as this folder calls it: the table of its functions, errors as statuses, and the
// contexts of its devices. Private to transport/cuda/; empty in builds without CUDA.
//
// Only here and in api.cc a CUresult becomes a status. Thread-safe, as the driver is.
#ifndef REFITD_TRANSPORT_CUDA_API_H_
#define REFITD_TRANSPORT_CUDA_API_H_

#if defined(REFITD_CUDA)
#include <cuda.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/mutex.h"

namespace refitd {

// Every driver call that is used, with the driver's name of the version that cuda.h declares (CUDA
// 11 and later).
#define REFITD_CUDA_CALLS(V)                                                          \
  V(cuGetErrorString, "cuGetErrorString")                                             \
  V(cuDriverGetVersion, "cuDriverGetVersion")                                         \
  V(cuInit, "cuInit")                                                                 \
  V(cuDeviceGetCount, "cuDeviceGetCount")                                             \
  V(cuDeviceGet, "cuDeviceGet")                                                       \
  V(cuDeviceGetUuid, "cuDeviceGetUuid_v2")                                            \
  V(cuDeviceGetName, "cuDeviceGetName")                                               \
  V(cuDeviceTotalMem, "cuDeviceTotalMem_v2")                                          \
  V(cuDeviceCanAccessPeer, "cuDeviceCanAccessPeer")                                   \
  V(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain")                             \
  V(cuCtxGetLimit, "cuCtxGetLimit")                                                   \
  V(cuCtxSetLimit, "cuCtxSetLimit")                                                   \
  V(cuCtxPushCurrent, "cuCtxPushCurrent_v2")                                          \
  V(cuCtxPopCurrent, "cuCtxPopCurrent_v2")                                            \
  V(cuPointerGetAttribute, "cuPointerGetAttribute")                                   \
  V(cuIpcOpenMemHandle, "cuIpcOpenMemHandle_v2")                                      \
  V(cuIpcCloseMemHandle, "cuIpcCloseMemHandle")                                       \
  V(cuMemGetAddressRange, "cuMemGetAddressRange_v2")                                  \
  V(cuMemCreate, "cuMemCreate")                                                       \
  V(cuMemExportToShareableHandle, "cuMemExportToShareableHandle")                     \
  V(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle")                 \
  V(cuMemGetAllocationPropertiesFromHandle, "cuMemGetAllocationPropertiesFromHandle") \
  V(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity")                   \
  V(cuMemAddressReserve, "cuMemAddressReserve")                                       \
  V(cuMemAddressFree, "cuMemAddressFree")                                             \
  V(cuMemMap, "cuMemMap")                                                             \
  V(cuMemUnmap, "cuMemUnmap")                                                         \
  V(cuMemSetAccess, "cuMemSetAccess")                                                 \
  V(cuMemRelease, "cuMemRelease")                                                     \
  V(cuMemAlloc, "cuMemAlloc_v2")                                                      \
  V(cuMemFree, "cuMemFree_v2")                                                        \
  V(cuMemHostAlloc, "cuMemHostAlloc")                                                 \
  V(cuMemFreeHost, "cuMemFreeHost")                                                   \
  V(cuMemHostRegister, "cuMemHostRegister_v2")                                        \
  V(cuMemHostUnregister, "cuMemHostUnregister")                                       \
  V(cuMemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2")                        \
  V(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2")                                        \
  V(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2")                                        \
  V(cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2")                                        \
  V(cuMemsetD8Async, "cuMemsetD8Async")                                               \
  V(cuStreamCreate, "cuStreamCreate")                                                 \
  V(cuStreamDestroy, "cuStreamDestroy_v2")                                            \
  V(cuStreamQuery, "cuStreamQuery")                                                   \
  V(cuStreamWaitEvent, "cuStreamWaitEvent")                                           \
  V(cuStreamSynchronize, "cuStreamSynchronize")                                       \
  V(cuEventCreate, "cuEventCreate")                                                   \
  V(cuEventDestroy, "cuEventDestroy_v2")                                              \
  V(cuEventRecord, "cuEventRecord")                                                   \
  V(cuEventQuery, "cuEventQuery")                                                     \
  V(cuModuleLoadData, "cuModuleLoadData")                                             \
  V(cuModuleUnload, "cuModuleUnload")                                                 \
  V(cuModuleGetFunction, "cuModuleGetFunction")                                       \
  V(cuLaunchKernel, "cuLaunchKernel")

struct CudaApi {
  // NOT_FOUND in the loader's words: no such library, or it lacks a call. A library once loaded
  // stays loaded: the driver starts threads of its own and can't be unloaded safely.
  static absl::StatusOr<CudaApi> Load(const std::string& library);

  // Makes the status of a call, such as "cuMemAlloc: out of memory (error 2)". Its code is INTERNAL
  // (and IsLost is true) if the context is lost for ever, RESOURCE_EXHAUSTED if memory is short,
  // FAILED_PRECONDITION if the driver refuses an argument, else UNAVAILABLE.
  absl::Status Check(std::string_view call, CUresult result) const;

  // Memory of cuMemCreate comes in multiples of this.
  absl::StatusOr<int64_t> Granularity(const CUmemAllocationProp& memory) const;

  // Whether the driver can issue many copies in one call. It needs a driver of CUDA 13 or later,
  // and at build time a toolkit of 12.8 or later.
  bool has_batches() const { return copy_batch != nullptr; }
#if CUDA_VERSION >= 12080
  using CopyAttributes = CUmemcpyAttributes;
#else
  struct CopyAttributes {};
#endif
  using CopyBatch = CUresult (*)(CUdeviceptr* to, CUdeviceptr* from, size_t* bytes, size_t count,
                                 CopyAttributes* attributes, size_t* attribute_first,
                                 size_t attribute_count, CUstream stream);
  CopyBatch copy_batch = nullptr;
  // Issues `count` copies between device memory. Copy engines run them in any order, beside
  // kernels. Only with has_batches().
  absl::Status CopyMany(const CUdeviceptr* to, const CUdeviceptr* from, const size_t* bytes,
                        size_t count, CUstream stream) const;

#define REFITD_CUDA_MEMBER(call, symbol) decltype(&::call) call = nullptr;
  REFITD_CUDA_CALLS(REFITD_CUDA_MEMBER)
#undef REFITD_CUDA_MEMBER
};

// A device's memory that can be exported as a descriptor.
CUmemAllocationProp PinnedMemoryOf(int device);

// REFITD_CUDA_CALL(api, cuMemFree, address) makes the call and returns its status.
#define REFITD_CUDA_CALL(api, call, ...) (api).Check(#call, (api).call(__VA_ARGS__))

// Whether this error means that a context, and with it this process's use of GPUs, is lost: illegal
// addresses, failed launches, uncorrectable memory errors. Every later call fails too.
bool IsLostContext(CUresult result);
// Whether Check made this status from such an error.
bool IsLost(const absl::Status& status);

// The primary contexts of all devices. Each is retained at the first request and never released.
class CudaContexts {
 public:
  // The driver must be initialised; ordinals are 0 to devices - 1. `own`: no other code of this
  // process uses the contexts, so that they need no stack.
  CudaContexts(const CudaApi& api, int devices, bool own)
      : api_(api), devices_(devices), own_(own), contexts_(static_cast<size_t>(devices)) {}
  CudaContexts(const CudaContexts&) = delete;
  CudaContexts& operator=(const CudaContexts&) = delete;

  const CudaApi& api() const { return api_; }
  int devices() const { return devices_; }
  // A context of `own` has no stack for kernels: the driver takes what each of this project's
  // kernels needs when it is launched. The default stack, 1 KiB a thread, is 264 MiB on an H200.
  // INVALID_ARGUMENT: no such ordinal.
  absl::StatusOr<CUcontext> Get(int device);
  // Restores the default stack, for kernels that call functions by address (NCCL's), whose needs
  // the driver may not know. Call it before such kernels are loaded; it waits for the device's
  // work.
  absl::StatusOr<CUcontext> GetWithStack(int device);
  // Whether kernels and copies of `device` can reach memory of `owner`.
  absl::StatusOr<bool> CanReach(int device, int owner) const;

 private:
  const CudaApi api_;
  const int devices_;
  const bool own_;
  struct DeviceContext {
    CUcontext context = nullptr;
    size_t default_stack = 0;  // bytes a thread; 0: there is nothing to restore
  };
  Mutex mutex_;
  std::vector<DeviceContext> contexts_ ABSL_GUARDED_BY(mutex_);
};

// Makes a context the thread's current context while this object lives. Callers must check
// `status`.
class ScopedContext {
 public:
  ScopedContext(const CudaApi& api, CUcontext context)
      : api_(api), status_(REFITD_CUDA_CALL(api, cuCtxPushCurrent, context)) {}
  ~ScopedContext() {
    CUcontext old = nullptr;
    if (status_.ok()) (void)api_.cuCtxPopCurrent(&old);
  }
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;
  const absl::Status& status() const { return status_; }

 private:
  const CudaApi& api_;
  const absl::Status status_;
};

// Objects made by CudaMemory::Create implement this too; the transport gets the driver from them.
class CudaContextsOwner {
 public:
  virtual ~CudaContextsOwner() = default;
  virtual const std::shared_ptr<CudaContexts>& contexts() const = 0;
};

}  // namespace refitd

#endif  // REFITD_CUDA
#endif  // REFITD_TRANSPORT_CUDA_API_H_
