// Measures the time to plan the transfer of a model's tensors from 4 devices to engines on 4
// others. Prints milliseconds, the best of a few rounds.
//
//   copy_plan_benchmark [TENSORS] [GIB]

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "transport/cuda/copy_plan.h"

namespace refitd {
namespace {

constexpr int kSources = 4;
constexpr int kDestinations = 4;

// The addresses only tell the device: no memory lies there.
class NoMemory : public CopyAddresses {
 public:
  absl::StatusOr<int> DeviceOf(const BoundPiece& piece) override {
    return static_cast<int>(reinterpret_cast<uint64_t>(piece.data) >> 40);
  }
  absl::StatusOr<uint64_t> On(int /*device*/, const BoundPiece& piece) override {
    return reinterpret_cast<uint64_t>(piece.data);
  }
};

BoundPiece MakePiece(int64_t tensor, const Dims& shape, int device, int64_t offset) {
  const uint64_t address = (static_cast<uint64_t>(device) << 40) + static_cast<uint64_t>(offset);
  // NOLINTNEXTLINE(performance-no-int-to-ptr): nothing lies there, and nothing is copied
  auto* const data = reinterpret_cast<char*>(address);
  return {.dtype = DType::kBFloat16,
          .shape = shape,
          .box = WholeBox(shape),
          .strides = RowMajorStrides(shape),
          .data = data,
          .name = "model.layers.0.mlp.experts." + std::to_string(tensor)};
}

// Every destination takes every tensor whole.
Transfer MakeTransfer(int64_t tensors, int64_t bytes) {
  const Dims shape = {std::max<int64_t>(1, bytes / tensors / 4096), 2048};
  Transfer transfer;
  transfer.destinations.resize(kDestinations);
  for (int64_t t = 0; t < tensors; ++t) {
    const int64_t offset = 512 + t * shape[0] * 4096;
    transfer.source.push_back(MakePiece(t, shape, static_cast<int>(t % kSources), offset));
    for (uint32_t d = 0; d < kDestinations; ++d) {
      transfer.destinations[d].push_back(
          MakePiece(t, shape, kSources + static_cast<int>(d), offset));
      transfer.plan.moves.push_back({.source = 0,
                                     .source_piece = static_cast<uint32_t>(t),
                                     .destination = d,
                                     .destination_piece = static_cast<uint32_t>(t),
                                     .box = WholeBox(shape)});
    }
  }
  return transfer;
}

int Main(int argc, char** argv) {
  const int64_t tensors = argc > 1 ? std::atoll(argv[1]) : 18'867;
  const int64_t bytes = (argc > 2 ? std::atoll(argv[2]) : 57) << 30;
  const Transfer transfer = MakeTransfer(tensors, bytes);
  NoMemory addresses;
  double best = 1e9;
  size_t tasks = 0;
  for (int round = 0; round < 5; ++round) {
    const auto start = std::chrono::steady_clock::now();
    const auto plan = PlanCopies(transfer, Verification::kTransfer, &addresses);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    if (!plan.ok()) return 1;
    tasks = 0;
    for (const DeviceTasks& device : plan->devices) tasks += device.tasks.size();
    best = std::min(best, took.count());
  }
  std::printf("%zu moves, %zu tasks: %.1f ms\n", transfer.plan.moves.size(), tasks, best);
  return 0;
}

}  // namespace
}  // namespace refitd

int main(int argc, char** argv) { return refitd::Main(argc, argv); }
