// Compares the copy kernel's code with the digest's definition, on tasks of one run and of runs at
// a regular distance, which have a loop of their own. copy_plan_test.cc tests other boxes,
// tests/gpu/copy_kernel_trial.cc all boxes on a GPU.
#include "transport/cuda/copy_code.h"

#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "transport/cuda/copy_interpreter_testing.h"
#include "transport/digest/digest_testing.h"

namespace refitd {
namespace {

constexpr uint64_t kSeed = 90210;
constexpr unsigned char kPoison = 0xcd;
constexpr size_t kBytes = 160 << 10;

using Rng = std::mt19937_64;

int64_t Pick(Rng* rng, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(*rng);
}

struct alignas(16) Memory {
  std::array<unsigned char, kBytes> bytes;
};

// Picks a place that is mostly aligned to vectors, else to elements, or to nothing.
size_t PickPlace(Rng* rng, int64_t element_bytes) {
  const int64_t kind = Pick(rng, 0, 4);
  const int64_t at = 16 * Pick(rng, 1, 8);
  if (kind < 3) return static_cast<size_t>(at);
  return static_cast<size_t>(at + Pick(rng, 0, 15) * (kind == 3 ? element_bytes : 1));
}

uint64_t PickIndex(Rng* rng) {
  switch (Pick(rng, 0, 3)) {
    case 0:
      return 0;
    case 1:  // 4-byte words of a tensor that no memory holds
      return (uint64_t{1} << 45) + static_cast<uint64_t>(64 * Pick(rng, 0, 1'000'000));
    case 2:
      return static_cast<uint64_t>(16 * Pick(rng, 0, 1'000'000));
    default:
      return static_cast<uint64_t>(Pick(rng, 0, 1'000'000));
  }
}

uint32_t PickRun(Rng* rng, int64_t element_bytes) {
  const int64_t most = (kBytes - 512) / element_bytes;
  const int64_t run = Pick(rng, 0, 1) == 0 ? Pick(rng, 1, most) : Pick(rng, 1, 700);
  return static_cast<uint32_t>(Pick(rng, 0, 2) == 0 ? run : (run + 15) / 16 * 16);
}

uint64_t Address(const Memory& memory, size_t at) {
  return reinterpret_cast<uint64_t>(memory.bytes.data() + at);
}

struct Trial {
  Memory source;
  Memory proof;
  Memory destination;
  size_t from = 0;
  size_t proof_at = 0;
  size_t to = 0;
  CopyTask task;

  uint64_t Digest(const Memory& memory, size_t at) const {
    uint64_t digest = 0;
    for (int64_t run = 0; run < task.count[2]; ++run) {
      digest +=
          ReferenceDigest(memory.bytes.data() + at + run * task.source_step[2], task.element_bytes,
                          static_cast<int64_t>(task.index) + run * task.index_step[2], task.run);
    }
    return digest;
  }
};

// Steps are mostly chosen so that all runs have the same alignment.
void PickRuns(Rng* rng, CopyTask* task) {
  const int64_t element_bytes = task->element_bytes;
  const int64_t unit = Pick(rng, 0, 3) == 0 ? 1 : 64;  // elements
  task->run = static_cast<uint32_t>(Pick(rng, 1, 400 / unit + 1) * unit);
  const auto step = [&] { return (task->run + unit * Pick(rng, 0, 3)) * element_bytes; };
  task->source_step[2] = step();
  task->destination_step[2] = step();
  task->index_step[2] = step() / element_bytes + (Pick(rng, 0, 3) == 0 ? 16 : 0);
  const int64_t widest = std::max(task->source_step[2], task->destination_step[2]);
  const auto most = std::min<int64_t>((kBytes - 512) / widest, 300);
  task->count[2] = static_cast<uint16_t>(Pick(rng, 1, most));
}

// Picks runs of single elements. Most of them lie as gate and up do if they alternate at one end
// and not at the other.
void PickElements(Rng* rng, CopyTask* task) {
  const int64_t element_bytes = task->element_bytes;
  task->run = 1;
  const auto step = [&] { return Pick(rng, 1, 3) * element_bytes; };
  task->source_step[2] = step();
  task->destination_step[2] = step();
  task->index_step[2] = Pick(rng, 0, 3) == 0 ? Pick(rng, 2, 70) : 1;
  const auto most = (kBytes - 512) / (3 * element_bytes);
  const int64_t count = Pick(rng, 1, Pick(rng, 0, 1) == 0 ? most : 400);
  task->count[2] = static_cast<uint16_t>(
      Pick(rng, 0, 1) == 0 ? count : std::min<int64_t>(most, (count + 15) / 16 * 16));
}

void PickTrial(Rng* rng, Trial* trial) {
  for (Memory* memory : {&trial->source, &trial->proof}) {
    for (size_t at = 0; at < kBytes; at += sizeof(uint64_t)) {
      const uint64_t word = (*rng)();
      std::memcpy(memory->bytes.data() + at, &word, sizeof(word));
    }
  }
  trial->destination.bytes.fill(kPoison);
  CopyTask& task = trial->task;
  task = {};
  const int64_t element_bytes = int64_t{1} << Pick(rng, 0, 2);
  task.element_bytes = static_cast<uint8_t>(element_bytes);
  switch (Pick(rng, 0, 2)) {
    case 0:
      task.run = PickRun(rng, element_bytes);
      break;
    case 1:
      PickRuns(rng, &task);
      break;
    default:
      PickElements(rng, &task);
  }
  task.index = PickIndex(rng);
  trial->from = PickPlace(rng, element_bytes);
  trial->proof_at = PickPlace(rng, element_bytes);
  trial->to = PickPlace(rng, element_bytes);
  task.source = Address(trial->source, trial->from);
  task.destination = Address(trial->destination, trial->to);
}

// The digest of what is stored differs from that of the source pass: they read different memory.
void CheckBoth(Trial* trial, uint32_t threads) {
  trial->task.proof = Address(trial->proof, trial->proof_at);
  trial->task.sum = 0;
  trial->task.proof_sum = 1;
  unsigned long long stored = 0;
  std::array<unsigned long long, 2> source = {};
  uint32_t next = 0;
  RunTasks({.tasks = &trial->task,
            .task_count = 1,
            .next_task = &next,
            .stored_sums = &stored,
            .source_sums = source.data()},
           threads);
  CHECK(stored == trial->Digest(trial->source, trial->from));
  CHECK(source[0] == 0);
  CHECK(source[1] == trial->Digest(trial->proof, trial->proof_at));
}

void CheckRead(Trial* trial, uint32_t threads) {
  trial->task.proof = Address(trial->proof, trial->proof_at);
  trial->task.source = trial->task.destination = 0;
  trial->task.proof_sum = 0;
  unsigned long long sum = 0;
  uint32_t next = 0;
  RunTasks({.tasks = &trial->task,
            .task_count = 1,
            .next_task = &next,
            .stored_sums = nullptr,
            .source_sums = &sum},
           threads);
  CHECK(sum == trial->Digest(trial->proof, trial->proof_at));
}

void CheckCopy(Trial* trial, uint32_t threads, uint32_t slices) {
  uint32_t next = 0;
  if (KernelOf(trial->task) != CopyKernel::kPlain) slices = 1;
  RunTasks({.tasks = &trial->task, .task_count = 1, .slices = slices, .next_task = &next}, threads);
  CHECK(next == slices + 1);
}

void CheckStored(const Trial& trial) {
  std::vector<unsigned char> want(kBytes, kPoison);
  const CopyTask& task = trial.task;
  for (int64_t run = 0; run < task.count[2]; ++run) {
    std::memcpy(want.data() + trial.to + run * task.destination_step[2],
                trial.source.bytes.data() + trial.from + run * task.source_step[2],
                size_t{task.run} * task.element_bytes);
  }
  CHECK(std::memcmp(want.data(), trial.destination.bytes.data(), kBytes) == 0);
}

TEST_CASE("A task of runs stores its bytes and digests as defined, however it lies") {
  Rng rng(kSeed);
  const auto trial = std::make_unique<Trial>();
  constexpr std::array<uint32_t, 4> kThreads = {1, 32, 96, 512};
  for (int round = 0; round < 1200; ++round) {
    INFO("round " << round);
    PickTrial(&rng, trial.get());
    const uint32_t threads = kThreads[static_cast<size_t>(round) % kThreads.size()];
    switch (Pick(&rng, 0, 3)) {
      case 0:
        CheckRead(trial.get(), threads);
        break;
      case 1:
        CheckCopy(trial.get(), threads, static_cast<uint32_t>(Pick(&rng, 1, 8)));
        CheckStored(*trial);
        break;
      default:
        CheckBoth(trial.get(), threads);
        CheckStored(*trial);
    }
  }
}

// The runs of a task: where each begins at the source and at the destination, and its length.
std::vector<std::array<uint64_t, 3>> RunsOf(const CopyTask& task) {
  std::vector<std::array<uint64_t, 3>> runs;
  if (task.destination == 0) return runs;
  const auto at = [](uint64_t base, const int64_t* step, int64_t i, int64_t j, int64_t k) {
    return base + static_cast<uint64_t>(i * step[0] + j * step[1] + k * step[2]);
  };
  for (int64_t i = 0; i < task.count[0]; ++i) {
    for (int64_t j = 0; j < task.count[1]; ++j) {
      for (int64_t k = 0; k < task.count[2]; ++k) {
        runs.push_back({at(task.source, task.source_step, i, j, k),
                        at(task.destination, task.destination_step, i, j, k), task.run});
      }
    }
  }
  return runs;
}

TEST_CASE("The slices of a task are together the task, and none is small but the last") {
  Rng rng(kSeed + 1);
  for (int round = 0; round < 500; ++round) {
    INFO("round " << round);
    CopyTask task;
    task.element_bytes = static_cast<uint8_t>(1 << Pick(&rng, 0, 2));
    task.source = 1 << 20;
    task.destination = 2 << 20;
    const bool one_run = Pick(&rng, 0, 1) == 0;
    task.run = static_cast<uint32_t>(one_run ? Pick(&rng, 1, 300'000) : Pick(&rng, 2, 900));
    for (int d = 0; d < kTaskDims && !one_run; ++d) {
      task.count[d] = static_cast<uint16_t>(Pick(&rng, 1, d == kTaskDims - 1 ? 200 : 6));
      task.source_step[d] = Pick(&rng, -1000, 100'000);
      task.destination_step[d] = Pick(&rng, 1, 100'000);
    }
    const auto slices = static_cast<uint32_t>(Pick(&rng, 1, 16));
    std::vector<std::array<uint64_t, 3>> runs;
    uint64_t bytes = 0;
    uint32_t filled = 0;
    for (uint32_t slice = 0; slice < slices; ++slice) {
      CopyTask part = task;
      copy_code::CutSlice(&part, slice, slices);
      const auto of_slice = RunsOf(part);
      if (of_slice.empty()) continue;
      // All slices before were filled.
      CHECK(filled++ == slice);
      if (slice > 0) CHECK(bytes >= uint64_t{slice} * kSliceBytes);
      for (const auto& run : of_slice) {
        bytes += run[2] * task.element_bytes;
        // Parts of one run follow one another.
        if (one_run && !runs.empty()) {
          CHECK(run[0] == runs[0][0] + runs[0][2] * task.element_bytes);
          CHECK(run[1] == runs[0][1] + runs[0][2] * task.element_bytes);
          runs[0][2] += run[2];
        } else {
          runs.push_back(run);
        }
      }
    }
    CHECK(runs == RunsOf(task));
  }
}

TEST_CASE("The table's second half holds the bytes of the constants, four by four") {
  for (uint32_t i = 0; i < copy_code::kDigestBlock; ++i) {
    CHECK(copy_code::TableWord(i) == kDigestT[i]);
    uint32_t constant = 0;
    for (uint32_t byte = 0; byte < 4; ++byte) {
      const uint32_t word = copy_code::TableWord(copy_code::kDigestBlock + i / 4 * 4 + byte);
      constant |= (word >> (8 * (i % 4)) & 0xff) << (8 * byte);
    }
    CHECK(constant == kDigestT[i]);
  }
}

}  // namespace
}  // namespace refitd
