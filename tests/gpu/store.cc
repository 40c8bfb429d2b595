#include "tests/gpu/store.h"

#include <fmt/format.h>

#include "tests/gpu/stores.h"

namespace refitd::gpu {

std::string PlaceInWords(const std::vector<std::string>& names, const Wrong& wrong) {
  if (wrong.count == 0) return "";
  const size_t piece = static_cast<size_t>(wrong.first >> 40);
  return fmt::format("tensor {}, element {} of piece {}", piece < names.size() ? names[piece] : "?",
                     wrong.first & ((1ULL << 40) - 1), piece);
}

absl::StatusOr<std::unique_ptr<Store>> Store::Create(MemoryKind kind, int device) {
  if (kind == MemoryKind::kHost) return NewHostStore();
  return NewCudaStore(kind, device);
}

}  // namespace refitd::gpu
