// Writes checkpoint folders of the models in models.h: safetensors shards, index, config.json.
//
// Thread-safe where folders differ.
#ifndef REFITD_TESTS_WORKLOADS_CHECKPOINT_WRITER_H_
#define REFITD_TESTS_WORKLOADS_CHECKPOINT_WRITER_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "tests/workloads/models.h"

namespace refitd::workloads {

// Creates `folder` (its parent must exist) or rewrites what it wrote there before; `shards` files
// of about equal size, and one file without an index where that is 1. Every weight follows from
// `seed`.
absl::Status WriteModelCheckpoint(const Qwen3Model& model, uint64_t seed, const std::string& folder,
                                  int shards);

}  // namespace refitd::workloads

#endif  // REFITD_TESTS_WORKLOADS_CHECKPOINT_WRITER_H_
