// The counts of the fake NCCL (fake_nccl.cc), and its requests to the fake driver. Tests use them
// through fake_nccl.h.
#ifndef REFITD_TRANSPORT_CUDA_FAKES_FAKE_NCCL_COUNTS_H_
#define REFITD_TRANSPORT_CUDA_FAKES_FAKE_NCCL_COUNTS_H_

#include <cstddef>
#include <cstdint>

namespace refitd {

// Counts of what is open now, and below of what happened since FakeNcclReset.
struct FakeNcclCounts {
  int comms = 0;      // of ranks
  int windows = 0;    // of ranks
  int groups = 0;     // groups in progress
  int listeners = 0;  // for ranks of a unique id
  // Since FakeNcclReset:
  int broadcasts = 0;             // issued, each counted once
  int all_gathers = 0;            // issued, each counted once
  int symmetric_all_gathers = 0;  // of these by a kernel over windows
  int engine_all_gathers = 0;     // of these by copy engines over windows
  int aborts = 0;                 // of ranks
  int revokes = 0;
  int unsafe_revokes = 0;  // revokes of ranks whose last group had not ended well
  int lost_windows = 0;    // windows that were open when their communicator was destroyed
  int threads = 0;         // threads from which calls came
  int blocked_calls = 0;   // calls that do not return now
  bool operator==(const FakeNcclCounts&) const = default;
};

// One of the copies that make up a collective (FakeCudaCollective).
struct FakeCudaCopy {
  int from_device = 0;
  uint64_t from = 0;
  int to_device = 0;
  uint64_t to = 0;
  size_t bytes = 0;
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_FAKES_FAKE_NCCL_COUNTS_H_
