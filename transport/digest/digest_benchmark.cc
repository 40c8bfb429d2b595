// Compares digest kernels with baselines that they can't beat: reading the same bytes, and memcpy.
// Prints one line for each kernel and measure, with the ratio to the baseline (1: as fast as the
// baseline). Baseline and measure alternate; the best of several rounds counts.
//
//   digest_benchmark [MIB] [THREADS] [ROUNDS]

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "transport/digest/digest.h"

namespace refitd {
namespace {

volatile uint64_t g_sink;

// Adds up 64-bit words in several accumulators, which is as fast as memory allows.
uint64_t ReadBytes(const char* data, int64_t bytes) {
  using Words = uint64_t __attribute__((vector_size(64), aligned(8), may_alias));
  Words sums[2] = {};
  for (int64_t at = 0; at + 128 <= bytes; at += 128) {
    __builtin_prefetch(data + at + 4096);
    __builtin_prefetch(data + at + 4160);
    sums[0] += *reinterpret_cast<const Words*>(data + at);
    sums[1] += *reinterpret_cast<const Words*>(data + at + 64);
  }
  uint64_t sum = 0;
  for (int i = 0; i < 8; ++i) sum += sums[0][i] + sums[1][i];
  return sum;
}

using Work = std::function<void(int64_t begin, int64_t bytes)>;

double Seconds(int threads, int64_t bytes, const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> workers;
  workers.reserve(static_cast<size_t>(threads));
  const int64_t share = bytes / threads / 4096 * 4096;
  for (int i = 0; i < threads; ++i) {
    workers.emplace_back([&, i] { work(i * share, share); });
  }
  for (std::thread& worker : workers) worker.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void Report(const char* kernel, const char* measure, const char* baseline_name, int threads,
            int rounds, int64_t bytes, const Work& work, const Work& baseline) {
  double best = 1e9;
  double best_baseline = 1e9;
  for (int round = 0; round < rounds; ++round) {
    best_baseline = std::min(best_baseline, Seconds(threads, bytes, baseline));
    best = std::min(best, Seconds(threads, bytes, work));
  }
  const double gigabytes = static_cast<double>(bytes) / 1e9;
  std::printf("%-8s %-18s %6.1f GB/s   %-6s %6.1f GB/s   ratio %.2f\n", kernel, measure,
              gigabytes / best, baseline_name, gigabytes / best_baseline, best_baseline / best);
}

char* Allocate(int64_t bytes) {
  void* const memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    std::exit(1);
  }
  std::memset(memory, 0x5a, static_cast<size_t>(bytes));
  return static_cast<char*>(memory);
}

int Main(int argc, char** argv) {
  const int64_t bytes = (argc > 1 ? std::atoll(argv[1]) : 1024) << 20;
  const int threads = argc > 2 ? std::atoi(argv[2]) : 2;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 5;
  char* const from = Allocate(bytes);
  char* const to = Allocate(bytes);
  const Work read = [&](int64_t begin, int64_t n) { g_sink = ReadBytes(from + begin, n); };
  const Work copy = [&](int64_t begin, int64_t n) {
    std::memcpy(to + begin, from + begin, static_cast<size_t>(n));
  };
  for (const DigestKernels* kernel : AllDigestKernels()) {
    const char* const name = kernel->name.data();
    for (const int size : {1, 2, 4}) {
      char label[32];
      std::snprintf(label, sizeof(label), "digest, %d byte", size);
      const Work digest = [&](int64_t begin, int64_t n) {
        g_sink = kernel->digest(from + begin, size, begin / size, n / size);
      };
      Report(name, label, "read", threads, rounds, bytes, digest, read);
    }
    const Work fused = [&](int64_t begin, int64_t n) {
      g_sink = kernel->copy_and_digest(to + begin, from + begin, 2, begin / 2, n / 2);
    };
    Report(name, "copy_and_digest", "memcpy", threads, rounds, bytes, fused, copy);
    const Work plain = [&](int64_t begin, int64_t n) {
      kernel->copy(to + begin, from + begin, static_cast<size_t>(n));
    };
    Report(name, "copy", "memcpy", threads, rounds, bytes, plain, copy);
  }
  return 0;
}

}  // namespace
}  // namespace refitd

int main(int argc, char** argv) { return refitd::Main(argc, argv); }
