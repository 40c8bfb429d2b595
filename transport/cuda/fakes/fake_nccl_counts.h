// What the fake NCCL (fake_nccl.cc) counts, and what it asks the fake driver to do. Tests use it
// through fake_nccl.h.
#ifndef REFITD_TRANSPORT_CUDA_FAKES_FAKE_NCCL_COUNTS_H_
#define REFITD_TRANSPORT_CUDA_FAKES_FAKE_NCCL_COUNTS_H_

#include <cstddef>
#include <cstdint>

namespace refitd {

// What is open now, but for what is said to be since FakeNcclReset.
struct FakeNcclCounts {
  int comms = 0;      // of ranks
  int windows = 0;    // of ranks
  int groups = 0;     // that are in progress
  int listeners = 0;  // for ranks of a unique id
  // Since FakeNcclReset:
  int broadcasts = 0;             // issued, each counted once
  int all_gathers = 0;            // likewise
  int symmetric_all_gathers = 0;  // of these by a kernel over windows
  int engine_all_gathers = 0;     // of these by copy engines over windows
  int aborts = 0;                 // of ranks
  int revokes = 0;
  int unsafe_revokes = 0;  // of ranks whose last group had not ended well
  int lost_windows = 0;    // that were open when their communicator went
  int threads = 0;         // from which calls came
  int blocked_calls = 0;   // that do not return now
  bool operator==(const FakeNcclCounts&) const = default;
};

// One of the copies that a collective comes to (FakeCudaCollective).
struct FakeCudaCopy {
  int from_device = 0;
  uint64_t from = 0;
  int to_device = 0;
  uint64_t to = 0;
  size_t bytes = 0;
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_FAKES_FAKE_NCCL_COUNTS_H_
