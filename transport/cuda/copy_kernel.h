// The copy kernel's machine code, made by nvcc when the project is built.
//
//   extern "C" __global__ void refitd_copy(refitd::CopyLaunch launch)
//   extern "C" __global__ void refitd_copy_apart(refitd::CopyLaunch launch)
//
// The first takes tasks of runs, or any, the second those that LiesApart (copy_task.h) only.
// kCopyThreads threads a block, no dynamic shared memory, any number of blocks: each takes tasks
// until there are none left.
#ifndef REFITD_TRANSPORT_CUDA_COPY_KERNEL_H_
#define REFITD_TRANSPORT_CUDA_COPY_KERNEL_H_

#include <string_view>

namespace refitd {

inline constexpr int kCopyThreads = 512;
inline constexpr char kCopyKernel[] = "refitd_copy";
inline constexpr char kCopyApartKernel[] = "refitd_copy_apart";

// A fat binary for cuModuleLoadData; empty: built without nvcc.
std::string_view CopyKernelImage();

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_COPY_KERNEL_H_
