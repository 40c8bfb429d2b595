// The counts of the fake driver (fake_driver.cc). Tests use them through fake_cuda.h.
#ifndef REFITD_TRANSPORT_CUDA_FAKES_FAKE_DRIVER_H_
#define REFITD_TRANSPORT_CUDA_FAKES_FAKE_DRIVER_H_

namespace refitd {

// Counts of what is open now, except *_calls, which count since FakeCudaReset.
struct FakeCudaCounts {
  int opened_handles = 0;  // opens of legacy IPC handles
  int open_calls = 0;
  int imported = 0;  // VMM allocations of others
  int created = 0;   // this process's own
  int reserved = 0;  // address ranges
  int mapped = 0;
  int allocations = 0;       // device memory
  int host_allocations = 0;  // pinned
  int host_registered = 0;   // memory of others, pinned
  int streams = 0;
  int events = 0;
  int modules = 0;
  int launch_calls = 0;
  int largest_grid = 0;
  int allocation_calls = 0;  // device and pinned
  int engine_copies = 0;     // of batches; since FakeCudaReset
  int blocked_calls = 0;     // calls that do not return now
  int small_stacks = 0;      // contexts whose stack is smaller than at first
  bool operator==(const FakeCudaCounts&) const = default;
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_FAKES_FAKE_DRIVER_H_
