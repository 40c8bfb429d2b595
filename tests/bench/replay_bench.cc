// tools/bench replay: how long a daemon computes for a version of a compiled refit that it has run
// before. The daemon is a process of its own over a fake driver whose kernels run no task, so that
// no GPU is needed, and no byte of the weights exists: what is counted is the processor time of the
// daemon's threads. Trainers and engines, colocated in pairs of full replicas, are in this process.
//
// "fixed" is the same with a model of one tensor: calls, events and threads. What a model's moves
// cost is the difference.
#include <dlfcn.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "client/engine.h"
#include "client/trainer.h"
#include "tests/bench/report.h"
#include "tests/bench/session.h"
#include "tests/e2e/harness.h"
#include "tests/workloads/sharding/arena.h"
#include "tests/workloads/sharding/megatron.h"
#include "tests/workloads/sharding/model.h"
#include "tests/workloads/sharding/vllm.h"
#include "transport/base/unique_fd.h"
#include "transport/cuda/fakes/fake_cuda.h"
#include "transport/cuda/memory.h"
#include "transport/plan/layout.h"

namespace refitd::bench {
namespace {

constexpr int kMostPairs = 4;
constexpr int64_t kGranularity = int64_t{2} << 20;  // of device memory that is exported

// Memory of cuMemCreate on a device of the fake driver. None of it is touched, so none is there.
UniqueFd Export(int device, int64_t bytes) {
  static void* const library = dlopen(FakeCuda::Path().c_str(), RTLD_NOW | RTLD_LOCAL);
  static auto* const make =
      reinterpret_cast<char* (*)(int, int64_t, int*)>(dlsym(library, "FakeCudaExportVmm"));
  int fd = -1;
  make(device, bytes, &fd);
  return UniqueFd(fd);
}

// The milliseconds for which the threads of a process have run.
double ProcessorMilliseconds(pid_t pid) {
  double nanoseconds = 0;
  for (const auto& task : std::filesystem::directory_iterator(fmt::format("/proc/{}/task", pid))) {
    double ran = 0;
    std::ifstream(task.path() / "schedstat") >> ran;
    nanoseconds += ran;
  }
  return nanoseconds / 1e6;
}

Layout OneTensor() {
  Layout layout;
  layout.tensors.push_back({"w", DType::kBFloat16, {1024}});
  layout.pieces.push_back({0, Box{{0}, {1024}}, RegionId(1), 0, {1}});
  return layout;
}

class Pairs {
 public:
  // `model`: of tests/workloads/sharding; empty: one tensor.
  Pairs(const e2e::Daemon& daemon, const std::string& model, int pairs) : daemon_(daemon) {
    Layout whole = OneTensor();
    Layout fused = whole;
    if (!model.empty()) {
      const sharding::ModelConfig config = Must(sharding::FindModelConfig(model), "model");
      whole = Must(sharding::MegatronLayout(config, {.world = pairs}, 0), "trainer layout");
      fused = Must(sharding::VllmLayout(config, {}, 0), "engine layout");
    }
    const auto memory = Must(CudaMemory::Create(FakeCuda::Path()), "devices");
    for (int i = 0; i < pairs; ++i) {
      client::ConnectOptions connect;
      connect.socket = daemon.socket();
      connect.group = model.empty() ? "fixed" : "model";
      connect.spec.emplace().trainer_ranks = pairs;
      connect.device = memory->devices()[static_cast<size_t>(i)].uuid;
      connect.cuda_library = FakeCuda::Path();
      connect.wait = kWait;
      trainers_.push_back(
          Must(client::Trainer::Attach({.connect = connect, .rank = i, .world_size = pairs}),
               "trainer"));
      client::EngineOptions options;
      options.connect = connect;
      options.instance = fmt::format("engine-{}", i);
      engines_.push_back(Must(client::Engine::Attach(options), "engine"));
      Register(i, whole, trainers_.back().get());
      Register(i, fused, engines_.back().get());
    }
    for (const auto& engine : engines_) threads_.emplace_back([this, &engine] { Serve(&*engine); });
  }
  ~Pairs() {
    over_ = true;
    for (std::thread& thread : threads_) thread.join();
  }
  Pairs(const Pairs&) = delete;
  Pairs& operator=(const Pairs&) = delete;

  // The daemon's milliseconds for a version; the median of `rounds`.
  double Measure(Verification verification, int rounds) {
    std::vector<double> taken;
    for (int i = 0; i < kWarmUp + rounds; ++i) {
      const double before = ProcessorMilliseconds(daemon_.pid());
      Refit(verification);
      if (i >= kWarmUp) taken.push_back(ProcessorMilliseconds(daemon_.pid()) - before);
    }
    return Median(std::move(taken));
  }

 private:
  static constexpr int kWarmUp = 33;

  template <typename Member>
  void Register(int device, Layout layout, Member* member) {
    const int64_t bytes =
        (sharding::ArenaBytes(layout) + kGranularity - 1) / kGranularity * kGranularity;
    regions_.push_back(Must(member->AddCudaRegion(Export(device, bytes), bytes), "region"));
    for (Piece& piece : layout.pieces) piece.region = regions_.back()->id();
    Must(member->Register(layout), "register");
  }

  void Serve(client::Engine* engine) const {
    while (!over_) {
      const absl::StatusOr<client::Event> event = engine->Next(std::chrono::milliseconds(200));
      if (!event.ok()) continue;  // none came
      if (const auto* prepare = std::get_if<client::Prepare>(&*event)) {
        Must(engine->Ready(prepare->version), "ready");
      }
    }
  }

  void Refit(Verification verification) {
    client::RefitOptions options;
    options.version = Version(++version_);
    options.verification = verification;
    std::vector<std::thread> threads;
    for (const auto& trainer : trainers_) {
      threads.emplace_back([&trainer, &options] {
        for (const auto& instance : Must(trainer->Refit(options), "refit").instances) {
          if (instance.committed) continue;
          Must(absl::AbortedError(instance.reason), "refit");
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  const e2e::Daemon& daemon_;
  std::vector<std::unique_ptr<client::Trainer>> trainers_;
  std::vector<std::unique_ptr<client::Engine>> engines_;
  std::vector<std::shared_ptr<client::Region>> regions_;
  std::vector<std::thread> threads_;
  std::atomic<bool> over_ = false;
  int64_t version_ = 0;
};

int Main(int argc, char** argv) {
  CLI::App app("The processor time of a version that a daemon replays");
  bool json = false;
  int rounds = 50;
  std::string model = "qwen3-30b-a3b";
  app.add_flag("--json", json, "one JSON object a line");
  app.add_option("--rounds", rounds, "medians of so many")->check(CLI::PositiveNumber);
  app.add_option("--model", model, "of tests/workloads/sharding");
  CLI11_PARSE(app, argc, argv);
  Report report("replay", json);
  constexpr double kGoal = 2;  // ms beyond the fixed part
  // For the fake in this process and in the daemon.
  setenv("REFITD_FAKE_CUDA_IDLE", "1", 1);
  setenv("REFITD_FAKE_CUDA_DEVICES", std::to_string(kMostPairs).c_str(), 1);
  for (int pairs = 1; pairs <= kMostPairs; pairs *= 2) {
    const e2e::Daemon daemon({"--cuda-library=" + FakeCuda::Path()});
    const double fixed = Pairs(daemon, "", pairs).Measure(Verification::kOff, rounds);
    Pairs ranks(daemon, model, pairs);
    for (const auto& [verification, name] : {std::pair(Verification::kOff, "off"),
                                             {Verification::kTransfer, "transfer"},
                                             {Verification::kReadback, "readback"}}) {
      const double took = ranks.Measure(verification, rounds);
      report.Add({fmt::format("{}, {} colocated pairs, {}, beyond fixed {:.2f}", model, pairs, name,
                              fixed),
                  took - fixed, "ms", fixed, (took - fixed) / fixed, kGoal, false});
    }
  }
  return report.all_reached() ? 0 : 1;
}

}  // namespace
}  // namespace refitd::bench

int main(int argc, char** argv) { return refitd::bench::Main(argc, argv); }
