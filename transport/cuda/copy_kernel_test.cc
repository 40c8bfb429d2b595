#include "transport/cuda/copy_kernel.h"

#include <catch2/catch.hpp>
#include <cstdint>
#include <cstring>

namespace refitd {
namespace {

// The magic number that the driver's loader looks for first in a fat binary.
constexpr uint32_t kFatBinary = 0xba55ed50;

#if defined(REFITD_NVCC)

TEST_CASE("With nvcc, the copy kernel's image is a fat binary that the driver can load") {
  const std::string_view image = CopyKernelImage();
  REQUIRE(image.size() > 1024);
  CHECK(image.size() < 1 << 20);
  CHECK(reinterpret_cast<uintptr_t>(image.data()) % 16 == 0);
  uint32_t magic = 0;
  std::memcpy(&magic, image.data(), sizeof(magic));
  CHECK(magic == kFatBinary);
}

#else

TEST_CASE("Without nvcc, the copy kernel's image is empty") { CHECK(CopyKernelImage().empty()); }

#endif

}  // namespace
}  // namespace refitd
