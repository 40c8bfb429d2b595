// The copy kernel on the host: its code (copy_code.h), thread after thread. For tests: addresses in
// the tasks are the process's own.
#ifndef REFITD_TRANSPORT_CUDA_COPY_INTERPRETER_H_
#define REFITD_TRANSPORT_CUDA_COPY_INTERPRETER_H_

#include <cstdint>

#include "transport/cuda/copy_kernel.h"
#include "transport/cuda/copy_task.h"

namespace refitd {

// What a launch of refitd_copy does, in order, with so many threads a block. Sums are added
// atomically.
void RunTasks(const CopyLaunch& launch, uint32_t threads = kCopyThreads);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_COPY_INTERPRETER_H_
