#include "transport/digest/digest.h"

#include <catch2/catch.hpp>
#include <cstring>
#include <random>
#include <vector>

#include "transport/digest/digest_testing.h"

namespace refitd {
namespace {

constexpr uint64_t kSeed = 20261121;

std::vector<char> RandomBytes(std::mt19937_64* random, size_t bytes) {
  std::vector<char> data(bytes);
  for (char& byte : data) byte = static_cast<char>((*random)());
  return data;
}

int64_t Pick(std::mt19937_64* random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(*random);
}

// Picks a number of elements: mostly a small one, sometimes one that is large enough for streaming
// stores, and often one near a multiple of a block.
int64_t PickCount(std::mt19937_64* random) {
  switch (Pick(random, 0, 3)) {
    case 0:
      return Pick(random, 0, 130);
    case 1:
      return 64 * Pick(random, 0, 20) + Pick(random, 0, 2);
    case 2:
      return Pick(random, 0, 3000);
    default:
      return Pick(random, 60'000, 80'000);
  }
}

int64_t PickFirst(std::mt19937_64* random) {
  return Pick(random, 0, 1) == 0 ? 64 * Pick(random, 0, int64_t{1} << 40)
                                 : Pick(random, 0, int64_t{1} << 46);
}

TEST_CASE("Digest constants are odd and fixed") {
  for (const uint32_t t : kDigestT) CHECK(t % 2 == 1);
  for (uint64_t block : {0ULL, 1ULL, 12345ULL, ~0ULL}) CHECK(DigestBlockFactor(block) % 2 == 1);
  // Literal values: the CUDA implementation must agree with these.
  CHECK(DigestBlockFactor(0) == 0xe220a8397b1dcdaf);
  CHECK(kDigestT[0] == 0xe4d97177);
  CHECK(kDigestT[63] == 0x54fca8ef);
  const uint16_t data[] = {1, 2, 0xffff};
  CHECK(ReferenceDigest(data, 2, 62, 3) == 0xdf1673e663c762ed);
}

TEST_CASE("Every kernel computes the digest of its definition") {
  std::mt19937_64 random(kSeed);
  for (const DigestKernels* kernel : AllDigestKernels()) {
    for (int round = 0; round < 400; ++round) {
      const int element_bytes = 1 << (round % 4);
      const int64_t count = PickCount(&random);
      const int64_t first = PickFirst(&random);
      const size_t misaligned = static_cast<size_t>(Pick(&random, 0, 67));
      INFO("seed " << kSeed << ", kernel " << kernel->name << ", element bytes " << element_bytes
                   << ", first " << first << ", count " << count << ", offset " << misaligned);
      const size_t bytes = static_cast<size_t>(count * element_bytes);
      // The vector is exactly as long as the run, so that AddressSanitizer reports a read past the
      // run.
      const std::vector<char> data = RandomBytes(&random, misaligned + bytes);
      const char* const from = data.data() + misaligned;
      const uint64_t expected = ReferenceDigest(from, element_bytes, first, count);
      REQUIRE(kernel->digest(from, element_bytes, first, count) == expected);

      const size_t to_misaligned = round % 2 == 0 ? 0 : static_cast<size_t>(Pick(&random, 0, 67));
      std::vector<char> to(64 + to_misaligned + bytes + 64, '\xcd');
      char* const at = to.data() + 64 + to_misaligned;
      REQUIRE(kernel->copy_and_digest(at, from, element_bytes, first, count) == expected);
      REQUIRE(std::memcmp(at, from, bytes) == 0);
      std::memset(at, 0x11, bytes);
      kernel->copy(at, from, bytes);
      REQUIRE(std::memcmp(at, from, bytes) == 0);
      for (const char* outside = to.data(); outside < at; ++outside) REQUIRE(*outside == '\xcd');
      for (size_t i = 0; i < 64; ++i) REQUIRE(at[bytes + i] == '\xcd');
    }
  }
}

TEST_CASE("Every kernel treats rows like one run after the other") {
  std::mt19937_64 random(kSeed + 1);
  for (const DigestKernels* kernel : AllDigestKernels()) {
    for (int round = 0; round < 200; ++round) {
      const int element_bytes = 1 << (round % 4);
      DigestRows rows;
      rows.rows = Pick(&random, 0, 9);
      rows.count = Pick(&random, 0, 400);
      rows.first = PickFirst(&random) / 4;
      rows.first_stride = rows.count + Pick(&random, 0, 300);
      rows.from_stride = (rows.count + Pick(&random, 0, 70)) * element_bytes;
      rows.to_stride = (rows.count + Pick(&random, 0, 70)) * element_bytes;
      INFO("seed " << kSeed + 1 << ", kernel " << kernel->name << ", round " << round);
      const std::vector<char> data =
          RandomBytes(&random, static_cast<size_t>(rows.rows * rows.from_stride));
      uint64_t expected = 0;
      for (int64_t row = 0; row < rows.rows; ++row) {
        expected += ReferenceDigest(data.data() + row * rows.from_stride, element_bytes,
                                    rows.first + row * rows.first_stride, rows.count);
      }
      REQUIRE(kernel->digest_rows(data.data(), element_bytes, rows) == expected);

      for (const StoreMode mode : {StoreMode::kCached, StoreMode::kStreaming}) {
        std::vector<char> want(static_cast<size_t>(rows.rows * rows.to_stride), '\xcd');
        std::vector<char> fused = want;
        std::vector<char> plain = want;
        for (int64_t row = 0; row < rows.rows; ++row) {
          std::memcpy(want.data() + row * rows.to_stride, data.data() + row * rows.from_stride,
                      static_cast<size_t>(rows.count * element_bytes));
        }
        REQUIRE(kernel->copy_and_digest_rows(fused.data(), data.data(), element_bytes, rows,
                                             mode) == expected);
        kernel->copy_rows(plain.data(), data.data(), element_bytes, rows, mode);
        DigestStoreFence();
        REQUIRE(fused == want);
        REQUIRE(plain == want);
      }
    }
  }
}

TEST_CASE("Digests add up over any disjoint cover, in any order") {
  std::mt19937_64 random(kSeed + 2);
  const DigestKernels& kernel = BestDigestKernels();
  for (int round = 0; round < 100; ++round) {
    const int element_bytes = 1 << (round % 4);
    const int64_t count = Pick(&random, 1, 5000);
    const int64_t first = PickFirst(&random) / 4;
    INFO("seed " << kSeed + 2 << ", round " << round);
    const std::vector<char> data = RandomBytes(&random, static_cast<size_t>(count * element_bytes));
    uint64_t sum = 0;
    for (int64_t done = 0; done < count;) {
      const int64_t part = Pick(&random, 1, count - done);
      sum += kernel.digest(data.data() + done * element_bytes, element_bytes, first + done, part);
      done += part;
    }
    REQUIRE(sum == ReferenceDigest(data.data(), element_bytes, first, count));
  }
}

TEST_CASE("A single flipped bit changes the digest, whichever it is") {
  std::mt19937_64 random(kSeed + 3);
  for (const DigestKernels* kernel : AllDigestKernels()) {
    for (const int element_bytes : {1, 2, 4, 8}) {
      const int64_t count = 150;
      std::vector<char> data = RandomBytes(&random, static_cast<size_t>(count * element_bytes));
      const uint64_t before = kernel->digest(data.data(), element_bytes, 31, count);
      for (size_t bit = 0; bit < data.size() * 8; ++bit) {
        INFO(kernel->name << ", element bytes " << element_bytes << ", bit " << bit);
        data[bit / 8] = static_cast<char>(data[bit / 8] ^ (1 << bit % 8));
        REQUIRE(kernel->digest(data.data(), element_bytes, 31, count) != before);
        data[bit / 8] = static_cast<char>(data[bit / 8] ^ (1 << bit % 8));
      }
    }
  }
}

TEST_CASE("Missing zeros, swapped and shifted elements change the digest") {
  const DigestKernels& kernel = BestDigestKernels();
  const std::vector<char> zeros(4096, 0);
  CHECK(kernel.digest(zeros.data(), 2, 0, 2048) != kernel.digest(zeros.data(), 2, 0, 2047));
  CHECK(kernel.digest(zeros.data(), 2, 0, 64) != kernel.digest(zeros.data(), 2, 64, 64));
  const uint16_t ab[] = {1, 2};
  const uint16_t ba[] = {2, 1};
  CHECK(kernel.digest(ab, 2, 0, 2) != kernel.digest(ba, 2, 0, 2));
}

TEST_CASE("The best kernel is one that this processor can run") {
  CHECK(AllDigestKernels().front()->name == "scalar");
  CHECK(AllDigestKernels().back() == &BestDigestKernels());
}

}  // namespace
}  // namespace refitd
