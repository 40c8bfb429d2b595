// The copy kernels' machine code, made by nvcc when the project is built.
//
//   extern "C" __global__ void refitd_copy(refitd::CopyLaunch launch)
//
// and likewise for each name of kCopyKernelNames. A kernel takes the tasks that KernelOf
// (copy_task.h) gives it, and no others. Launch with its kCopyThreads threads per block, no dynamic
// shared memory, and any number of blocks: each block takes tasks until none are left.
#ifndef REFITD_TRANSPORT_CUDA_COPY_KERNEL_H_
#define REFITD_TRANSPORT_CUDA_COPY_KERNEL_H_

#include <array>
#include <string_view>

#include "transport/cuda/copy_task.h"

namespace refitd {

// By CopyKernel. A multiprocessor has registers for 512 threads. Two blocks of 256 are up to 17%
// faster where tasks differ or only read, since one works while the other begins or ends a task;
// one block of 512 is 5% faster where bytes are copied in order.
inline constexpr std::array<int, kCopyKernels> kCopyThreads = {512, 256, 512, 256, 256};
inline constexpr int kMostCopyThreads = 512;
inline constexpr std::array<const char*, kCopyKernels> kCopyKernelNames = {
    "refitd_copy", "refitd_copy_read", "refitd_copy_plain", "refitd_copy_apart", "refitd_derive"};

// Returns a fat binary for cuModuleLoadData. It is empty if the project was built without nvcc.
std::string_view CopyKernelImage();

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_COPY_KERNEL_H_
