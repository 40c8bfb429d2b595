// Runs the copy kernel's code (copy_code.h) on the host, one thread after the other. For tests;
// addresses in the tasks are addresses of this process.
#ifndef REFITD_TRANSPORT_CUDA_COPY_INTERPRETER_H_
#define REFITD_TRANSPORT_CUDA_COPY_INTERPRETER_H_

#include <cstdint>

#include "transport/cuda/copy_kernel.h"
#include "transport/cuda/copy_task.h"

namespace refitd {

// Does what a launch of refitd_copy with `threads` threads per block does, in order. Sums are added
// atomically.
void RunTasks(const CopyLaunch& launch, uint32_t threads = kCopyThreads);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_COPY_INTERPRETER_H_
