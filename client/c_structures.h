// Reads and writes the structures of the C interface, for the files that implement refit.h.
#ifndef REFITD_CLIENT_C_STRUCTURES_H_
#define REFITD_CLIENT_C_STRUCTURES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/arena.h"
#include "client/refit.h"
#include "client/trainer.h"
#include "client/types.h"
#include "transport/base/errors.h"
#include "transport/base/status.h"
#include "transport/plan/layout.h"

// A region's handle is one of its several owners.
struct refit_region {
  std::shared_ptr<refitd::client::Region> region;
};

struct refit_arena {
  std::shared_ptr<refitd::client::Arena> arena;
};

struct refit_slot {
  std::unique_ptr<refitd::client::LeasedSlot> slot;  // null once pushed
};

namespace refitd::client {

absl::Status Null(const char* what);

// Reads a caller's structure that begins with struct_size into this library's version of it;
// missing fields are 0.
template <typename T>
absl::StatusOr<T> Read(const T* given, const char* what) {
  if (given == nullptr) return Null(what);
  const size_t size = given->struct_size;
  if (size < sizeof(given->struct_size)) {
    return InvalidField(what, "{}.struct_size is {}: initialise it with the REFIT_..._INIT macro",
                        what, size);
  }
  const char* bytes = reinterpret_cast<const char*>(given);
  if (size > sizeof(T) &&
      std::any_of(bytes + sizeof(T), bytes + size, [](char c) { return c != 0; })) {
    return InvalidField(
        what, "{}.struct_size is {}: it asks for what this library ({} bytes) does not know", what,
        size, sizeof(T));
  }
  T known{};
  std::memcpy(&known, given, std::min(size, sizeof(T)));
  return known;
}

// Writes as much of `value` as the caller's structure holds, and leaves the caller's struct_size.
template <typename T>
absl::Status Write(T value, T* taken, const char* what) {
  const size_t size = taken->struct_size;
  if (size < sizeof(taken->struct_size)) {
    return InvalidField(what, "{}.struct_size is {}: initialise it with the REFIT_..._INIT macro",
                        what, size);
  }
  value.struct_size = size;
  std::memcpy(taken, &value, std::min(size, sizeof(T)));
  return absl::OkStatus();
}

// Checks that `count` is not negative, and that `list` is not null if there are entries.
absl::Status CheckList(const void* list, int64_t count, const char* what);

Dims DimsOf(const int64_t* dims, int32_t count);

absl::StatusOr<TensorSpec> SpecOf(const refit_tensor& tensor);
absl::StatusOr<std::vector<TensorSpec>> SpecsOf(const refit_tensor* tensors, int64_t count);

}  // namespace refitd::client

#endif  // REFITD_CLIENT_C_STRUCTURES_H_
