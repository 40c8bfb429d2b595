// The copy kernel's machine code, made by nvcc when the project is built.
//
//   extern "C" __global__ void refitd_copy(refitd::CopyLaunch launch)
//   extern "C" __global__ void refitd_copy_apart(refitd::CopyLaunch launch)
//
// The first takes any task and is meant for tasks of runs; the second takes only tasks for which
// LiesApart (copy_task.h) is true. Launch with kCopyThreads threads per block, no dynamic shared
// memory, and any number of blocks: each block takes tasks until none are left.
#ifndef REFITD_TRANSPORT_CUDA_COPY_KERNEL_H_
#define REFITD_TRANSPORT_CUDA_COPY_KERNEL_H_

#include <string_view>

namespace refitd {

inline constexpr int kCopyThreads = 512;
inline constexpr char kCopyKernel[] = "refitd_copy";
inline constexpr char kCopyApartKernel[] = "refitd_copy_apart";

// Returns a fat binary for cuModuleLoadData. It is empty if the project was built without nvcc.
std::string_view CopyKernelImage();

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_COPY_KERNEL_H_
