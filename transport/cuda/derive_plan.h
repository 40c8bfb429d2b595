// Cuts boxes of derived tensors into tasks for the derive kernel (derive_task.h). Pure.
#ifndef REFITD_TRANSPORT_CUDA_DERIVE_PLAN_H_
#define REFITD_TRANSPORT_CUDA_DERIVE_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "transport/cuda/derive_task.h"
#include "transport/transport.h"

namespace refitd {

// A box of a source piece that is computed, and where it goes.
struct DeriveMove {
  const BoundPiece* source = nullptr;  // with `held`
  uint32_t piece = 0;                  // index of `source` in the transfer
  const Box* box = nullptr;
  std::vector<uint64_t> held_addresses = {};  // of held->shards, for the device that runs the tasks
  uint64_t destination = 0;  // of the box's first element, for that device; 0: nothing is stored
  Dims destination_strides = {};  // elements
  uint32_t sum = kNoSum;
  uint32_t proof_sum = kNoSum;
};

// Adds the tasks of the move. RESOURCE_EXHAUSTED: there would be more than `most` in all, or a
// block has more than kMaxDeriveParts.
absl::Status AddDeriveTasks(const DeriveMove& move, int64_t most, std::vector<DeriveTask>* tasks);

// The first element, in the trainers' tensor, of the block with that number (DeriveTask::place).
Dims ElementAt(const Derivation& derivation, uint32_t place);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_DERIVE_PLAN_H_
