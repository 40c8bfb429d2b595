// Makes the blocks of a rank of the GPU tests known to its daemon.
#ifndef REFITD_TESTS_GPU_SHARE_H_
#define REFITD_TESTS_GPU_SHARE_H_

#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/arena.h"
#include "client/engine.h"
#include "client/trainer.h"
#include "tests/gpu/rank_layout.h"
#include "tests/gpu/store.h"
#include "transport/base/status.h"
#include "transport/base/unique_fd.h"

namespace refitd::gpu {

inline void SetDevice(client::ConnectOptions* options, const std::string& device) {
  if (device != "host") options->device = device;
}

template <typename Member>
absl::StatusOr<std::shared_ptr<client::Region>> ShareBlock(Member* member, const Export& block) {
  if (block.memfd) return member->AddMemfd(UniqueFd(dup(block.descriptor)), block.bytes);
  if (block.ipc_handle.empty()) {
    return member->AddCudaRegion(UniqueFd(dup(block.descriptor)), block.bytes, block.address);
  }
  return member->AddCudaRegion(client::CudaIpcBlock{block.ipc_handle, block.bytes});
}

// Makes one region for each block. For host memory, refitd's client makes the blocks.
template <typename Member>
absl::StatusOr<std::vector<std::shared_ptr<client::Region>>> Share(
    Member* member, MemoryKind kind, const std::vector<int64_t>& block_bytes, Store* store) {
  std::vector<std::shared_ptr<client::Region>> regions;
  for (size_t b = 0; b < block_bytes.size(); ++b) {
    if (kind == MemoryKind::kHost) {
      REFITD_ASSIGN_OR_RETURN(regions.emplace_back(), member->NewRegion(block_bytes[b]));
      store->Adopt(regions.back()->data(), regions.back()->bytes());
      continue;
    }
    REFITD_ASSIGN_OR_RETURN(const Export exported, store->ExportBlock(b));
    REFITD_ASSIGN_OR_RETURN(regions.emplace_back(), ShareBlock(member, exported));
  }
  return regions;
}

// Makes one arena of an engine for each block.
inline absl::StatusOr<std::vector<std::shared_ptr<client::Region>>> ShareArenas(
    client::Engine* engine, const client::ConnectOptions& connect, SidesIn in,
    const std::vector<int64_t>& block_bytes, Store* store) {
  std::vector<std::shared_ptr<client::Region>> regions;
  for (const int64_t bytes : block_bytes) {
    REFITD_ASSIGN_OR_RETURN(auto arena, client::Arena::Make(bytes, connect, in));
    REFITD_ASSIGN_OR_RETURN(regions.emplace_back(), engine->AddArena(std::move(arena)));
    store->Adopt(regions.back()->data(), regions.back()->bytes());
  }
  return regions;
}

}  // namespace refitd::gpu

#endif  // REFITD_TESTS_GPU_SHARE_H_
