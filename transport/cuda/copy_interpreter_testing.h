// Runs the copy kernels' code (copy_code.h, derive_code.h) on the host, one thread after the other.
// For tests; addresses in the tasks are addresses of this process.
#ifndef REFITD_TRANSPORT_CUDA_COPY_INTERPRETER_TESTING_H_
#define REFITD_TRANSPORT_CUDA_COPY_INTERPRETER_TESTING_H_

#include <cstdint>

#include "transport/cuda/copy_task.h"
#include "transport/cuda/derive_task.h"

namespace refitd {

// Does what launches of the kernels with `threads` threads per block do, in order; the tasks may be
// for any kernel (for one kernel if they are cut into slices). Sums are added atomically.
void RunTasks(const CopyLaunch& launch, uint32_t threads = 512);
// Does what the derive kernel does for the task `number` of the launch, a DeriveTask.
void RunDerive(const CopyLaunch& launch, uint32_t number, uint32_t threads = 256);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_COPY_INTERPRETER_TESTING_H_
