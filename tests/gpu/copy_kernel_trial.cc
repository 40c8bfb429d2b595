// The copy kernel on a GPU: random tasks against the interpreter, bit for bit, then its rate
// against the driver's own copies in the same run. With two GPUs, between them too.
//
//   copy_kernel_trial            # all parts
//   copy_kernel_trial random     # random tasks, derive tasks too: small, for compute-sanitizer
//   copy_kernel_trial rates [GIB]
//   copy_kernel_trial derived [GIB]  # rates of the derive kernel, of whose bits derived_bench.py
//   tells
//
// Prints SKIPPED and exits with 0 if there is no GPU; exits with 1 at the first byte or digest that
// is wrong.
#include <cstdio>

#if !defined(REFITD_CUDA)

int main() {
  std::puts("SKIPPED: built without CUDA");
  return 0;
}

#else

#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "transport/cuda/copy_interpreter_testing.h"
#include "transport/cuda/copy_kernel.h"
#include "transport/cuda/copy_plan.h"
#include "transport/cuda/copy_task.h"
#include "transport/cuda/derive_plan.h"
#include "transport/plan/derived.h"

namespace refitd {
namespace {

constexpr uint64_t kSeed = 20261122;
constexpr int kRounds = 5;

#define TRIAL_QUOTE(function) #function
#define TRIAL_NAME(function) TRIAL_QUOTE(function)
#define TRIAL_SYMBOL(function) \
  reinterpret_cast<decltype(&function)>(dlsym(Library(), TRIAL_NAME(function)))

void* Library() {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  return library;
}

[[noreturn]] void Die(const char* what, int64_t code) {
  std::printf("FAILED: %s (%lld)\n", what, static_cast<long long>(code));
  std::exit(1);
}

#define TRIAL_CALL(function, ...)                                  \
  do {                                                             \
    static const auto call = TRIAL_SYMBOL(function);               \
    if (call == nullptr) Die("no " TRIAL_NAME(function), 0);       \
    const CUresult result = call(__VA_ARGS__);                     \
    if (result != CUDA_SUCCESS) Die(TRIAL_NAME(function), result); \
  } while (false)

int Devices() {
  if (Library() == nullptr) return 0;
  const auto init = TRIAL_SYMBOL(cuInit);
  const auto count = TRIAL_SYMBOL(cuDeviceGetCount);
  int devices = 0;
  if (init == nullptr || init(0) != CUDA_SUCCESS || count(&devices) != CUDA_SUCCESS) return 0;
  return devices;
}

// Allocates device memory that stays until the end of the process.
CUdeviceptr Allocate(size_t bytes) {
  CUdeviceptr address = 0;
  TRIAL_CALL(cuMemAlloc, &address, bytes);
  return address;
}

using Counts = std::array<size_t, kCopyKernels>;  // of tasks, by kernel

class Gpu {
 public:
  explicit Gpu(int ordinal) {
    CUdevice device = 0;
    TRIAL_CALL(cuDeviceGet, &device, ordinal);
    TRIAL_CALL(cuDevicePrimaryCtxRetain, &context_, device);
    Use();
    TRIAL_CALL(cuDeviceGetAttribute, &processors_, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
               device);
    TRIAL_CALL(cuStreamCreate, &stream_, CU_STREAM_NON_BLOCKING);
    TRIAL_CALL(cuEventCreate, &begin_, CU_EVENT_DEFAULT);
    TRIAL_CALL(cuEventCreate, &end_, CU_EVENT_DEFAULT);
    CUmodule module = nullptr;
    TRIAL_CALL(cuModuleLoadData, &module, CopyKernelImage().data());
    for (size_t k = 0; k < kernels_.size(); ++k) {
      TRIAL_CALL(cuModuleGetFunction, &kernels_[k], module, kCopyKernelNames[k]);
    }
    next_ = Allocate(kCopyKernels * sizeof(uint32_t));
    fault_ = Allocate(sizeof(uint64_t));
    TRIAL_CALL(cuMemsetD8, fault_, 0, sizeof(uint64_t));
  }

  void Use() const { TRIAL_CALL(cuCtxSetCurrent, context_); }
  int processors() const { return processors_; }
  CUcontext context() const { return context_; }
  int Attribute(CUfunction_attribute attribute) const {
    int value = 0;
    TRIAL_CALL(cuFuncGetAttribute, &value, attribute, kernels_[0]);
    return value;
  }

  // Milliseconds of the device's own clock.
  float Time(const std::function<void(CUstream)>& work) {
    Use();
    TRIAL_CALL(cuEventRecord, begin_, stream_);
    work(stream_);
    TRIAL_CALL(cuEventRecord, end_, stream_);
    TRIAL_CALL(cuStreamSynchronize, stream_);
    float milliseconds = 0;
    TRIAL_CALL(cuEventElapsedTime, &milliseconds, begin_, end_);
    return milliseconds;
  }

  // `sums` is device memory for the stored sums and then as many source sums; it is zeroed here.
  // `slices`: of a plain task.
  float Launch(CUdeviceptr tasks, const Counts& counts, uint32_t slices, int blocks,
               CUdeviceptr sums, size_t sum_count) {
    Use();
    TRIAL_CALL(cuMemsetD8, next_, 0, kCopyKernels * sizeof(uint32_t));
    TRIAL_CALL(cuMemsetD8, sums, 0, 2 * sum_count * 8);
    std::array<CopyLaunch, kCopyKernels> launches;
    const auto* first = reinterpret_cast<const CopyTask*>(tasks);
    for (size_t k = 0; k < launches.size(); ++k) {
      launches[k] = {.tasks = first,
                     .task_count = static_cast<uint32_t>(counts[k]),
                     .slices = static_cast<CopyKernel>(k) == CopyKernel::kPlain ? slices : 1,
                     .next_task = reinterpret_cast<uint32_t*>(next_) + k,
                     .stored_sums = reinterpret_cast<unsigned long long*>(sums),
                     .source_sums = reinterpret_cast<unsigned long long*>(sums + sum_count * 8),
                     .fault = reinterpret_cast<unsigned long long*>(fault_)};
      first += counts[k];
    }
    // The legacy stream sets memory, and this stream does not wait for it.
    TRIAL_CALL(cuCtxSynchronize, );
    return Time([&](CUstream stream) {
      for (size_t k = 0; k < launches.size(); ++k) {
        if (counts[k] == 0) continue;
        void* arguments[] = {&launches[k]};
        TRIAL_CALL(cuLaunchKernel, kernels_[k], static_cast<unsigned>(blocks), 1, 1,
                   static_cast<unsigned>(kCopyThreads[k]), 1, 1, 0, stream, arguments, nullptr);
      }
    });
  }

 private:
  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
  CUevent begin_ = nullptr;
  CUevent end_ = nullptr;
  std::array<CUfunction, kCopyKernels> kernels_{};
  CUdeviceptr next_ = 0;
  CUdeviceptr fault_ = 0;
  int processors_ = 0;
};

template <typename T>
CUdeviceptr Upload(const std::vector<T>& values) {
  const CUdeviceptr at = Allocate(values.size() * sizeof(T));
  TRIAL_CALL(cuMemcpyHtoD, at, values.data(), values.size() * sizeof(T));
  return at;
}

template <typename T>
std::vector<T> Download(CUdeviceptr at, size_t count) {
  std::vector<T> values(count);
  TRIAL_CALL(cuMemcpyDtoH, values.data(), at, count * sizeof(T));
  return values;
}

// ---- random tasks ----

using Rng = std::mt19937_64;

int64_t Pick(Rng* rng, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(*rng);
}

constexpr int64_t kSlot = 96 << 10;  // bytes of one task at the source, and at the destination
constexpr size_t kSums = 16;

int64_t PickStep(Rng* rng, int64_t span) {
  int64_t step = span + (Pick(rng, 0, 1) == 0 ? Pick(rng, 0, 40) : 0);
  if (Pick(rng, 0, 1) == 0) step = (step + 15) / 16 * 16;
  return step;
}

// Picks steps of nested dimensions; returns the bytes that they span.
int64_t PickSteps(Rng* rng, const CopyTask& task, int64_t run_bytes, int64_t* steps) {
  int64_t span = run_bytes;
  for (int d = kTaskDims; d-- > 0;) {
    steps[d] = PickStep(rng, span);
    span = steps[d] * (task.count[d] - 1) + span;
  }
  return span;
}

// Picks single elements at distances of a few times their size, as in pieces that alternate.
void PickElements(Rng* rng, uint64_t slot, CopyTask* task) {
  const int64_t element_bytes = task->element_bytes;
  const int64_t columns = Pick(rng, 0, 1) == 0 ? Pick(rng, 1, 700) : 16 * Pick(rng, 1, 40);
  task->run = 1;
  task->count[0] = static_cast<uint16_t>(Pick(rng, 1, 2));
  task->count[1] = static_cast<uint16_t>(Pick(rng, 1, 3));
  task->count[2] = static_cast<uint16_t>(columns);
  for (int64_t* steps : {task->source_step, task->destination_step}) {
    steps[2] = Pick(rng, 1, 4) * element_bytes;
    steps[1] = (steps[2] * columns + 15) / 16 * 16;
    steps[0] = steps[1] * task->count[1];
  }
  task->index_step[2] = Pick(rng, 0, 3) == 0 ? 3 : 1;
  task->index_step[1] = 16 * Pick(rng, 40, 50);
  task->index_step[0] = 3 * task->index_step[1];
  const auto place = [&] {
    const int64_t kind = Pick(rng, 0, 3);
    const int64_t off = kind < 2    ? 0
                        : kind == 2 ? Pick(rng, 0, 7) * element_bytes
                                    : Pick(rng, 0, 31);
    return slot * kSlot + static_cast<uint64_t>(off);
  };
  task->source = place();
  task->destination = place();
  task->proof = Pick(rng, 0, 1) == 0 ? task->source : place();
  task->index = 16 * static_cast<uint64_t>(Pick(rng, 0, 1'000'000));
  const int64_t kind = Pick(rng, 0, 4);
  if (kind > 0) task->proof_sum = static_cast<uint32_t>(slot % kSums);
  if (kind > 1) task->sum = task->proof_sum;
}

bool PickTask(Rng* rng, uint64_t slot, CopyTask* task) {
  *task = {};
  task->element_bytes = static_cast<uint8_t>(1 << Pick(rng, 0, 2));
  if (Pick(rng, 0, 2) == 0) {
    PickElements(rng, slot, task);
    return true;
  }
  const int dims = static_cast<int>(Pick(rng, 0, kTaskDims));
  for (int d = kTaskDims - dims; d < kTaskDims; ++d) {
    task->count[d] = static_cast<uint16_t>(Pick(rng, 1, 20));
  }
  task->run = static_cast<uint32_t>(dims == 0 ? Pick(rng, 1, 30'000) : Pick(rng, 1, 300));
  if (Pick(rng, 0, 2) == 0) task->run = (task->run + 191) / 192 * 192;
  const int64_t run_bytes = int64_t{task->run} * task->element_bytes;
  if (PickSteps(rng, *task, run_bytes, task->source_step) + 64 > kSlot ||
      PickSteps(rng, *task, run_bytes, task->destination_step) + 64 > kSlot) {
    return false;
  }
  for (int d = 0; d < kTaskDims; ++d) {
    task->index_step[d] = task->source_step[d] / task->element_bytes;
  }
  const auto misaligned = [rng, task] {
    const int64_t kind = Pick(rng, 0, 3);
    if (kind < 2) return int64_t{0};
    return kind == 2 ? Pick(rng, 0, 7) * task->element_bytes : Pick(rng, 0, 31);
  };
  task->index = static_cast<uint64_t>(Pick(rng, 0, 1) == 0 ? 64 * Pick(rng, 0, 1'000'000)
                                                           : Pick(rng, 0, 1'000'000));
  task->source = slot * kSlot + static_cast<uint64_t>(misaligned());
  task->destination = slot * kSlot + static_cast<uint64_t>(misaligned());
  const int64_t kind = Pick(rng, 0, 4);
  const auto sum = static_cast<uint32_t>(Pick(rng, 0, kSums - 1));
  if (kind > 0) task->proof_sum = sum;
  if (kind > 1) task->sum = sum;
  task->proof = Pick(rng, 0, 1) == 0 ? task->source : slot * kSlot + misaligned();
  return true;
}

// Turns the offsets in tasks into addresses, on a device or here. Some tasks only read.
std::vector<CopyTask> At(std::vector<CopyTask> tasks, uint64_t source, uint64_t destination) {
  for (size_t i = 0; i < tasks.size(); ++i) {
    CopyTask& task = tasks[i];
    task.source += source;
    task.proof += source;
    task.destination += destination;
    if (i % 11 != 0) continue;
    task.source = task.destination = 0;
    task.sum = kNoSum;
    task.proof_sum = 0;
  }
  return tasks;
}

void RandomPart(Gpu* gpu) {
  Rng rng(kSeed);
  gpu->Use();
  for (int round = 0; round < 4; ++round) {
    std::vector<CopyTask> tasks(400);
    for (size_t i = 0; i < tasks.size(); ++i) {
      while (!PickTask(&rng, i, &tasks[i])) continue;
    }
    const size_t bytes = tasks.size() * kSlot;
    std::vector<uint64_t> source(bytes / 8);
    for (uint64_t& word : source) word = rng();
    std::vector<uint64_t> want(bytes / 8, 0xcdcdcdcdcdcdcdcd);
    const CUdeviceptr from = Upload(source);
    const CUdeviceptr to = Upload(want);
    const CUdeviceptr sums = Allocate(2 * kSums * 8);
    std::vector<CopyTask> there = At(tasks, from, to);
    const Counts counts = SortByKernel(&there);
    const CUdeviceptr on_gpu = Upload(there);
    gpu->Launch(on_gpu, counts, 1 + 5 * static_cast<uint32_t>(round), 1 + 7 * round, sums, kSums);

    std::vector<unsigned long long> want_sums(2 * kSums);
    const auto here = At(tasks, reinterpret_cast<uint64_t>(source.data()),
                         reinterpret_cast<uint64_t>(want.data()));
    uint32_t next = 0;
    RunTasks({.tasks = here.data(),
              .task_count = static_cast<uint32_t>(here.size()),
              .next_task = &next,
              .stored_sums = want_sums.data(),
              .source_sums = want_sums.data() + kSums},
             128);
    const auto got = Download<uint64_t>(to, bytes / 8);
    for (size_t i = 0; i < got.size(); ++i) {
      if (got[i] != want[i])
        Die("random tasks: wrong byte in slot", static_cast<int64_t>(i * 8 / kSlot));
    }
    if (Download<unsigned long long>(sums, 2 * kSums) != want_sums) {
      Die("random tasks: wrong digest, round", round);
    }
    for (const CUdeviceptr at : {from, to, sums, on_gpu}) TRIAL_CALL(cuMemFree, at);
  }
  std::printf("random tasks: 4 x 400 as the interpreter runs them\n");
}

// ---- rates ----

float Median(std::vector<float> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

enum class Digest { kNone, kReadback, kTransfer, kOnly };

const char* Name(Digest digest) {
  switch (digest) {
    case Digest::kNone:
      return "copy";
    case Digest::kReadback:
      return "copy+digest";
    case Digest::kTransfer:
      return "copy+2 digests";
    default:
      return "digest";
  }
}

struct Shape {
  const char* name;
  uint32_t run;        // bytes; 0: the whole piece is one run
  int64_t source_row;  // bytes from run to run
  int64_t off;         // the source begins so many bytes off
  uint8_t element_bytes;
  // Elements that lie apart: every source_every-th place of a row belongs to the piece. 0: runs.
  int64_t source_every = 0;
  int64_t destination_every = 0;
};

struct Rates {
  Gpu* gpu;
  CUdeviceptr from;
  CUdeviceptr to;
  CUdeviceptr sums;
  int64_t bytes;
};

std::vector<CopyTask> MakeTasks(const Rates& rates, const Shape& shape, Digest digest,
                                int64_t task_bytes) {
  std::vector<CopyTask> tasks;
  const int64_t run = shape.run == 0 ? task_bytes : shape.run;
  const int64_t rows = shape.run == 0 ? 1 : task_bytes / shape.run;
  const int64_t row = shape.run == 0 ? run : shape.source_row;
  const int64_t end = rates.bytes - (shape.off == 0 ? 0 : 4096);
  CopyTask task;
  task.run = static_cast<uint32_t>(run / shape.element_bytes);
  task.element_bytes = shape.element_bytes;
  task.count[2] = static_cast<uint16_t>(rows);
  task.source_step[2] = row;
  task.destination_step[2] = run;
  task.index_step[2] = row / shape.element_bytes;
  if (digest != Digest::kNone) task.proof_sum = 0;
  if (digest == Digest::kTransfer) task.sum = 0;
  int64_t to = 0;
  for (int64_t at = 0; at + rows * row <= end; at += rows * row, to += rows * run) {
    task.index = static_cast<uint64_t>(at / shape.element_bytes);
    task.proof = rates.from + static_cast<uint64_t>(at + shape.off);
    task.source = digest == Digest::kOnly ? 0 : task.proof;
    task.destination = digest == Digest::kOnly ? 0 : rates.to + static_cast<uint64_t>(to);
    tasks.push_back(task);
  }
  return tasks;
}

// Rows of kColumns elements that lie apart at the source, at the destination or at both.
std::vector<CopyTask> MakeElementTasks(const Rates& rates, const Shape& shape, Digest digest,
                                       int64_t task_bytes) {
  constexpr int64_t kColumns = 2880;
  const int64_t row = kColumns * shape.element_bytes;
  CopyTask task;
  task.run = 1;
  task.element_bytes = shape.element_bytes;
  task.count[2] = static_cast<uint16_t>(kColumns);
  task.count[1] = static_cast<uint16_t>(task_bytes / row);
  task.source_step[2] = shape.source_every * shape.element_bytes;
  task.source_step[1] = shape.source_every * row;
  task.destination_step[2] = shape.destination_every * shape.element_bytes;
  task.destination_step[1] = shape.destination_every * row;
  task.index_step[2] = 1;
  task.index_step[1] = kColumns;
  if (digest != Digest::kNone) task.proof_sum = 0;
  if (digest == Digest::kTransfer) task.sum = 0;
  std::vector<CopyTask> tasks;
  const int64_t bytes = task.count[1] * row;
  const int64_t end = rates.bytes / std::max(shape.source_every, shape.destination_every);
  for (int64_t at = 0; at + bytes <= end; at += bytes) {
    task.index = static_cast<uint64_t>(at / shape.element_bytes);
    task.proof = rates.from + static_cast<uint64_t>(at * shape.source_every);
    task.source = digest == Digest::kOnly ? 0 : task.proof;
    task.destination = digest == Digest::kOnly
                           ? 0
                           : rates.to + static_cast<uint64_t>(at * shape.destination_every);
    tasks.push_back(task);
  }
  return tasks;
}

// Compares the digest of what was stored with that of the source.
void CheckDigests(const Rates& rates, std::vector<CopyTask> tasks) {
  unsigned long long of_source = 0;
  for (int pass = 0; pass < 2; ++pass) {
    for (CopyTask& task : tasks) {
      if (pass == 0) {
        task.proof = task.source;
      } else {
        task.proof = task.destination;
        std::copy(task.destination_step, task.destination_step + kTaskDims, task.source_step);
      }
      task.proof_sum = static_cast<uint32_t>(pass);
      task.sum = kNoSum;
    }
    std::vector<CopyTask> reads = tasks;
    for (CopyTask& task : reads) task.source = task.destination = 0;
    const Counts counts = SortByKernel(&reads);
    const CUdeviceptr at = Upload(reads);
    // A launch zeroes all sums, so the sum of the first pass is read before the second launch.
    rates.gpu->Launch(at, counts, 1, 264, rates.sums, 2);
    const auto got = Download<unsigned long long>(rates.sums, 4);
    if (pass == 0) of_source = got[2];
    if (pass == 1 && got[3] != of_source) Die("rates: wrong bytes", 0);
    TRIAL_CALL(cuMemFree, at);
  }
}

double Measure(const Rates& rates, const Shape& shape, Digest digest, int64_t task_bytes,
               int blocks) {
  rates.gpu->Use();
  std::vector<CopyTask> tasks = shape.source_every > 0
                                    ? MakeElementTasks(rates, shape, digest, task_bytes)
                                    : MakeTasks(rates, shape, digest, task_bytes);
  const Counts counts = SortByKernel(&tasks);
  const CUdeviceptr on_gpu = Upload(tasks);
  const auto slices =
      static_cast<uint32_t>(std::max<int64_t>(task_bytes / int64_t{kSliceBytes}, 1));
  TRIAL_CALL(cuMemsetD8, rates.to, 0xcd, static_cast<size_t>(rates.bytes));
  std::vector<float> times;
  for (int round = 0; round <= kRounds; ++round) {
    const float time = rates.gpu->Launch(on_gpu, counts, slices, blocks, rates.sums, 1);
    if (round > 0) times.push_back(time);
  }
  const auto sums = Download<unsigned long long>(rates.sums, 2);
  if (digest == Digest::kTransfer && sums[0] != sums[1]) Die("rates: digests differ", 0);
  if (digest != Digest::kOnly) CheckDigests(rates, tasks);
  TRIAL_CALL(cuMemFree, on_gpu);
  int64_t bytes = 0;
  for (const CopyTask& task : tasks) {
    bytes += int64_t{task.run} * task.element_bytes * task.count[1] * task.count[2];
  }
  return static_cast<double>(bytes) / Median(times) / 1e6;
}

double Baseline(const Rates& rates) {
  std::vector<float> times;
  for (int round = 0; round <= kRounds; ++round) {
    const float time = rates.gpu->Time([&](CUstream stream) {
      TRIAL_CALL(cuMemcpyDtoDAsync, rates.to, rates.from, static_cast<size_t>(rates.bytes), stream);
    });
    if (round > 0) times.push_back(time);
  }
  return static_cast<double>(rates.bytes) / Median(times) / 1e6;
}

constexpr Shape kShapes[] = {
    {"contiguous, 2-byte elements", 0, 0, 0, 2},
    {"runs of 384 bytes", 384, 1536, 0, 2},
    {"source off by 2 bytes", 0, 0, 2, 2},
    {"contiguous, 1-byte elements", 0, 0, 0, 1},
    {"contiguous, 4-byte elements", 0, 0, 0, 4},
    {"source off by 1, 1-byte elements", 0, 0, 1, 1},
    {"2-byte elements to every 2nd", 0, 0, 0, 2, 1, 2},
    {"2-byte elements from every 2nd", 0, 0, 0, 2, 2, 1},
    {"2-byte elements, every 2nd to 2nd", 0, 0, 0, 2, 2, 2},
    {"1-byte elements to every 2nd", 0, 0, 0, 1, 1, 2},
    {"4-byte elements from every 2nd", 0, 0, 0, 4, 2, 1},
};

void Table(const char* where, const Rates& rates) {
  const double baseline = Baseline(rates);
  std::printf("\n%s, %.1f GiB; driver's copy %.1f GB/s\n", where,
              static_cast<double>(rates.bytes) / (1 << 30), baseline);
  std::printf("%-34s %-15s %6s %7s | GB/s (of the driver's copy)\n", "", "", "task", "");
  const std::vector<int> blocks = {32, 64, 132, 264};
  for (const Shape& shape : kShapes) {
    for (const Digest digest :
         {Digest::kNone, Digest::kReadback, Digest::kTransfer, Digest::kOnly}) {
      std::vector<int64_t> sizes = {shape.source_every > 0 ? 64 : 256};
      if (&shape == kShapes && digest != Digest::kOnly) sizes = {64, 256, 512, 960};
      for (const int64_t size : sizes) {
        std::printf("%-34s %-15s %3d KiB", shape.name, Name(digest), static_cast<int>(size));
        for (const int n : blocks) {
          const double rate = Measure(rates, shape, digest, size << 10, n);
          std::printf(" | %3d: %6.0f (%.2f)", n, rate, rate / baseline);
        }
        std::puts("");
      }
    }
  }
}

// Fills `bytes` of a device's memory with random bits, of which those of `mask` stay.
CUdeviceptr RandomMemory(int64_t bytes, uint64_t mask = ~uint64_t{0}) {
  Rng rng(std::random_device{}());
  constexpr int64_t kBlock = int64_t{64} << 20;
  std::vector<uint64_t> block(kBlock / 8);
  for (uint64_t& word : block) word = rng() & mask;
  const CUdeviceptr at = Allocate(static_cast<size_t>(bytes));
  for (int64_t done = 0; done < bytes; done += kBlock) {
    block[0] = rng() & mask;
    TRIAL_CALL(cuMemcpyHtoD, at + static_cast<uint64_t>(done), block.data(),
               static_cast<size_t>(std::min(kBlock, bytes - done)));
  }
  return at;
}

void RatesPart(std::vector<Gpu>* gpus, int64_t bytes) {
  Gpu& gpu = (*gpus)[0];
  gpu.Use();
  Rates rates = {.gpu = &gpu,
                 .from = RandomMemory(bytes),
                 .to = Allocate(static_cast<size_t>(bytes)),
                 .sums = Allocate(64),
                 .bytes = bytes};
  std::printf("%d multiprocessors; kernel: %d registers, %d bytes of local memory\n",
              gpu.processors(), gpu.Attribute(CU_FUNC_ATTRIBUTE_NUM_REGS),
              gpu.Attribute(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES));
  Table("on one GPU", rates);
  if (gpus->size() < 2) return;
  TRIAL_CALL(cuCtxEnablePeerAccess, (*gpus)[1].context(), 0);
  (*gpus)[1].Use();
  rates.to = Allocate(static_cast<size_t>(bytes));
  TRIAL_CALL(cuCtxEnablePeerAccess, gpu.context(), 0);
  gpu.Use();
  Table("to a peer", rates);
}

// ---- derived tensors ----

// Neither as float32 nor as a half do bits of this mask make an infinity or NaN.
constexpr uint64_t kFinite = 0xbbffbbffbbffbbff;

// A derived tensor and the memory of one move of it: rows [0, cut) of the source lie at offset
// `first`, the others at `second`, the box goes to `to`, each in a buffer of its own.
struct RandomMove {
  std::shared_ptr<Derivation> derivation = std::make_shared<Derivation>();
  BoundPiece piece;
  Box box;
  Dims strides;  // at the destination
  uint64_t first = 0;
  uint64_t second = 0;
  uint64_t to = 0;
  int64_t source_bytes = 0;
  int64_t stored_bytes = 0;
};

RandomMove PickMove(Rng* rng) {
  constexpr DerivedKind kKinds[] = {DerivedKind::kCast,         DerivedKind::kFp8Block,
                                    DerivedKind::kFp8BlockCuda, DerivedKind::kFp8BlockReciprocal,
                                    DerivedKind::kFp8BlockPow2, DerivedKind::kFp8Channel,
                                    DerivedKind::kMxFp8};
  constexpr DType kFloats[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  RandomMove move;
  Derivation& derivation = *move.derivation;
  derivation.kind = kKinds[Pick(rng, 0, std::size(kKinds) - 1)];
  derivation.role = derivation.kind != DerivedKind::kCast && Pick(rng, 0, 2) == 0
                        ? DerivedRole::kScales
                        : DerivedRole::kValues;
  const bool small = derivation.kind == DerivedKind::kMxFp8;
  const bool squares = derivation.kind == DerivedKind::kFp8BlockReciprocal ||
                       derivation.kind == DerivedKind::kFp8BlockPow2;
  Dims shape = {Pick(rng, 1, 400), Pick(rng, 1, 900)};
  if (squares) shape = {128 * Pick(rng, 1, 4), 128 * Pick(rng, 1, 7)};
  if (small || Pick(rng, 0, 1) == 0) shape[1] = (shape[1] + 31) / 32 * 32;
  derivation.from = {.name = "w", .dtype = kFloats[Pick(rng, 0, 2)], .shape = shape};
  const DType dtype = small && derivation.role == DerivedRole::kScales ? DType::kUint8
                      : derivation.role == DerivedRole::kScales        ? DType::kFloat32
                      : derivation.kind != DerivedKind::kCast          ? DType::kFloat8E4M3FN
                      : derivation.from.dtype == DType::kBFloat16      ? DType::kFloat16
                                                                       : DType::kBFloat16;
  move.box = *ComputableBox(derivation, WholeBox(shape));
  move.piece.name = derivation.from.name;
  move.piece.dtype = dtype;
  move.piece.shape = move.box.extent;
  for (size_t d = 0; d < 2; ++d) {
    if (Pick(rng, 0, 2) == 0) continue;
    move.box.offset[d] = Pick(rng, 0, move.box.extent[d] - 1);
    move.box.extent[d] = Pick(rng, 1, move.box.extent[d] - move.box.offset[d]);
  }
  const int64_t element = ElementBytes(derivation.from.dtype);
  const auto shift = [&](int64_t bytes) {
    return static_cast<uint64_t>(bytes * (Pick(rng, 0, 1) * Pick(rng, 0, 9)));
  };
  const int64_t row = shape[1] + Pick(rng, 0, 1) * Pick(rng, 0, 9);
  // Blocks whose parts are rows of two ranks. Small blocks and casts have one part.
  const bool cut =
      !small && derivation.kind != DerivedKind::kCast && shape[0] > 1 && Pick(rng, 0, 1) == 1;
  const int64_t rows = cut ? Pick(rng, 1, shape[0] - 1) : shape[0];
  move.first = shift(element);
  move.second =
      (move.first + static_cast<uint64_t>(rows * row * element) + 15) / 16 * 16 + shift(element);
  move.source_bytes =
      static_cast<int64_t>(move.second) + (shape[0] - rows) * (row + 16) * element + 256;
  const auto part = [&](int64_t begin, int64_t end, int64_t stride) {
    BoundPiece held;
    held.dtype = derivation.from.dtype;
    held.shape = shape;
    held.box = {.offset = {begin, 0}, .extent = {end - begin, shape[1]}};
    held.strides = {stride, 1};
    return held;
  };
  std::vector<BoundPiece> parts = {part(0, rows, row)};
  if (cut) parts.push_back(part(rows, shape[0], row + 16));
  move.piece.held = std::make_shared<HeldPiece>(HeldPiece{move.derivation, std::move(parts)});
  const int64_t stored = ElementBytes(dtype);
  move.strides = {move.box.extent[1] + Pick(rng, 0, 1) * Pick(rng, 0, 9), 1};
  move.to = shift(stored);
  move.stored_bytes =
      static_cast<int64_t>(move.to) + move.box.extent[0] * move.strides[0] * stored + 256;
  return move;
}

// The tasks of the move where source and destination begin at these addresses.
std::vector<CopyTask> TasksOf(const RandomMove& move, uint64_t source, uint64_t destination) {
  DeriveMove of = {.source = &move.piece,
                   .box = &move.box,
                   .held_addresses = {source + move.first, source + move.second},
                   .destination = destination + move.to,
                   .destination_strides = move.strides,
                   .sum = 0,
                   .proof_sum = 0};
  of.held_addresses.resize(move.piece.held->shards.size());
  std::vector<DeriveTask> tasks;
  if (!AddDeriveTasks(of, 1 << 20, &tasks).ok()) Die("random derive tasks", 0);
  std::vector<CopyTask> made;
  for (const DeriveTask& task : tasks) made.push_back(std::bit_cast<CopyTask>(task));
  return made;
}

void RandomDerivedPart(Gpu* gpu) {
  constexpr int kMoves = 300;
  Rng rng(kSeed);
  gpu->Use();
  const CUdeviceptr sums = Allocate(2 * 8);
  for (int round = 0; round < kMoves; ++round) {
    const RandomMove move = PickMove(&rng);
    std::vector<uint64_t> source(static_cast<size_t>(move.source_bytes / 8 + 1));
    for (uint64_t& word : source) word = rng() & kFinite;
    std::vector<uint64_t> want(static_cast<size_t>(move.stored_bytes / 8 + 1), 0xcdcdcdcdcdcdcdcd);
    const CUdeviceptr from = Upload(source);
    const CUdeviceptr to = Upload(want);
    const std::vector<CopyTask> there = TasksOf(move, from, to);
    Counts counts = {};
    counts[static_cast<size_t>(CopyKernel::kDerive)] = there.size();
    const CUdeviceptr on_gpu = Upload(there);
    gpu->Launch(on_gpu, counts, 1, 1 + round % 40, sums, 1);
    const std::vector<CopyTask> here = TasksOf(move, reinterpret_cast<uint64_t>(source.data()),
                                               reinterpret_cast<uint64_t>(want.data()));
    uint32_t next = 0;
    unsigned long long fault = 0;
    std::vector<unsigned long long> want_sums(2);
    RunTasks({.tasks = here.data(),
              .task_count = static_cast<uint32_t>(here.size()),
              .next_task = &next,
              .stored_sums = want_sums.data(),
              .source_sums = want_sums.data() + 1,
              .fault = &fault},
             256);
    if (fault != 0) Die("random derive tasks: a fault, round", round);
    if (Download<uint64_t>(to, want.size()) != want) {
      std::printf("%s\n", Describe(*move.derivation).c_str());
      Die("random derive tasks: wrong bytes, round", round);
    }
    if (Download<unsigned long long>(sums, 2) != want_sums)
      Die("random derive tasks: wrong digest, round", round);
    for (const CUdeviceptr at : {from, to, on_gpu}) TRIAL_CALL(cuMemFree, at);
  }
  std::printf("random derive tasks: %d moves as the interpreter runs them\n", kMoves);
}

constexpr int64_t kColumns = 2560;  // of a matrix
constexpr int64_t kRows = 4096;

// The tasks of matrices. `with_scales`: of the values and the scales; else of the values.
std::vector<CopyTask> MakeDeriveTasks(const Rates& rates, DerivedKind kind, DType dtype,
                                      Digest digest, bool with_scales) {
  const TensorSpec from = {.name = "w", .dtype = dtype, .shape = {kRows, kColumns}};
  const int64_t bytes = kRows * kColumns * ElementBytes(dtype);
  std::vector<DeriveTask> tasks;
  int64_t to = 0;
  for (int64_t at = 0; at + bytes <= rates.bytes; at += bytes) {
    for (const DerivedRole role : {DerivedRole::kValues, DerivedRole::kScales}) {
      if (role == DerivedRole::kScales && (!with_scales || kind == DerivedKind::kCast)) continue;
      const auto derivation = std::make_shared<Derivation>(Derivation{from, kind, role});
      TensorSpec spec = {.name = "d", .dtype = DType::kFloat8E4M3FN, .shape = from.shape};
      if (kind == DerivedKind::kCast) spec.dtype = DType::kBFloat16;
      if (role == DerivedRole::kScales) {
        spec.dtype = DType::kFloat32;
        const Dims block = BlockOf(*derivation);
        for (size_t d = 0; d < block.size(); ++d)
          spec.shape[d] = (spec.shape[d] + block[d] - 1) / block[d];
      }
      BoundPiece piece;
      piece.name = spec.name;
      piece.dtype = spec.dtype;
      piece.shape = spec.shape;
      BoundPiece held;
      held.dtype = from.dtype;
      held.shape = from.shape;
      held.box = WholeBox(from.shape);
      held.strides = RowMajorStrides(from.shape);
      piece.held = std::make_shared<HeldPiece>(HeldPiece{derivation, {held}});
      const Box box = WholeBox(spec.shape);
      DeriveMove move = {
          .source = &piece,
          .box = &box,
          .held_addresses = {rates.from + static_cast<uint64_t>(at)},
          .destination = digest == Digest::kOnly ? 0 : rates.to + static_cast<uint64_t>(to),
          .destination_strides = RowMajorStrides(spec.shape)};
      if (digest != Digest::kNone) move.proof_sum = 0;
      if (digest == Digest::kTransfer) move.sum = 0;
      to += ElementCount(box) * ElementBytes(spec.dtype);
      if (!AddDeriveTasks(move, int64_t{1} << 24, &tasks).ok()) Die("derive tasks", at);
    }
  }
  std::vector<CopyTask> made;
  for (const DeriveTask& task : tasks) made.push_back(std::bit_cast<CopyTask>(task));
  return made;
}

void DerivedTable(const char* where, const Rates& rates) {
  const double baseline = Baseline(rates);
  std::printf("\n%s; driver's copy %.1f GB/s; GB/s of the source's bytes | of what is stored\n",
              where, baseline);
  const std::vector<int> blocks = {64, 132, 264, 396, 528, 660};
  const struct {
    const char* name;
    DerivedKind kind;
    DType dtype;
  } kinds[] = {{"fp8_block of bfloat16", DerivedKind::kFp8Block, DType::kBFloat16},
               {"fp8_block of float16", DerivedKind::kFp8Block, DType::kFloat16},
               {"fp8_block of float32", DerivedKind::kFp8Block, DType::kFloat32},
               {"fp8_block_pow2 of bfloat16", DerivedKind::kFp8BlockPow2, DType::kBFloat16},
               {"fp8_channel of bfloat16", DerivedKind::kFp8Channel, DType::kBFloat16},
               {"cast of float32", DerivedKind::kCast, DType::kFloat32}};
  for (const auto& kind : kinds) {
    for (const Digest digest : {Digest::kNone, Digest::kTransfer, Digest::kOnly}) {
      for (const bool with_scales : {false, true}) {
        if (with_scales && kind.kind == DerivedKind::kCast) continue;
        std::vector<CopyTask> tasks =
            MakeDeriveTasks(rates, kind.kind, kind.dtype, digest, with_scales);
        const Counts counts = SortByKernel(&tasks);
        const CUdeviceptr on_gpu = Upload(tasks);
        std::printf("%-27s %-14s %-6s", kind.name, Name(digest), with_scales ? "scales" : "");
        for (const int n : blocks) {
          std::vector<float> times;
          for (int round = 0; round < 4; ++round) {
            times.push_back(rates.gpu->Launch(on_gpu, counts, 1, n, rates.sums, 1));
          }
          const double rate = static_cast<double>(rates.bytes) / Median(times) / 1e6;
          const double stored = rate * (kind.kind == DerivedKind::kCast ? 2 : 1) /
                                static_cast<double>(ElementBytes(kind.dtype));
          std::printf(" | %3d: %4.0f %4.0f", n, rate, stored);
        }
        std::puts("");
        TRIAL_CALL(cuMemFree, on_gpu);
      }
    }
  }
}

void DerivedPart(std::vector<Gpu>* gpus, int64_t bytes) {
  Gpu& gpu = (*gpus)[0];
  gpu.Use();
  Rates rates = {.gpu = &gpu,
                 .from = RandomMemory(bytes, kFinite),
                 .to = Allocate(static_cast<size_t>(bytes)),
                 .sums = Allocate(64),
                 .bytes = bytes};
  DerivedTable("on one GPU", rates);
  if (gpus->size() < 2) return;
  (*gpus)[1].Use();
  rates.to = Allocate(static_cast<size_t>(bytes));
  gpu.Use();
  // An error says that the part before did this.
  static const auto enable = TRIAL_SYMBOL(cuCtxEnablePeerAccess);
  (void)enable((*gpus)[1].context(), 0);
  DerivedTable("to a peer", rates);
}

int Main(int argc, char** argv) {
  const int devices = Devices();
  if (devices == 0) {
    std::puts("SKIPPED: no GPU");
    return 0;
  }
  if (CopyKernelImage().empty()) Die("built without nvcc", 0);
  const std::string part = argc > 1 ? argv[1] : "";
  std::vector<Gpu> gpus;
  for (int i = 0; i < std::min(devices, 2); ++i) gpus.emplace_back(i);
  const int64_t bytes = (argc > 2 ? std::atoll(argv[2]) : 4) << 30;
  const auto runs = [&part](const char* name) { return part.empty() || part == name; };
  if (runs("random")) RandomPart(&gpus[0]);
  if (runs("random")) RandomDerivedPart(&gpus[0]);
  if (runs("rates")) RatesPart(&gpus, bytes);
  if (runs("derived")) DerivedPart(&gpus, bytes);
  std::puts("OK");
  return 0;
}

}  // namespace
}  // namespace refitd

int main(int argc, char** argv) { return refitd::Main(argc, argv); }

#endif  // REFITD_CUDA
