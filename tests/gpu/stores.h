// The two stores: private to store.cc.
#ifndef REFITD_TESTS_GPU_STORES_H_
#define REFITD_TESTS_GPU_STORES_H_

#include <memory>

#include "tests/gpu/store.h"

namespace refitd::gpu {

std::unique_ptr<Store> NewHostStore();
absl::StatusOr<std::unique_ptr<Store>> NewCudaStore(MemoryKind kind, int device);
// "tensor NAME, element 5 of piece 3", of Wrong::first.
std::string PlaceInWords(const std::vector<std::string>& names, const Wrong& wrong);

}  // namespace refitd::gpu

#endif  // REFITD_TESTS_GPU_STORES_H_
