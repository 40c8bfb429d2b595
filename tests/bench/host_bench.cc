// tools/bench host: one daemon, host memory. Real processes: refitd, this one as the trainer,
// itself again as the engine.
//
//   host_bench --refitd PATH [--model qwen3-0.6b] [--rounds 15] [--json]
//   host_bench --role engine --socket PATH --group NAME --model NAME      (started by the former)
//
// Baselines are taken in the same run, round by round beside the measured case, on memory of the
// same kind (mapped, prefaulted memfds) with as many threads as the daemon copies with. Weights are
// fresh random bytes in every round and the destination is poisoned before each; every round's
// result is compared by a digest that the engine's process computes, outside the measured time.
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <thread>

#include "client/engine.h"
#include "client/trainer.h"
#include "refitd/v1/operator.grpc.pb.h"
#include "tests/bench/report.h"
#include "tests/workloads/models.h"
#include "transport/base/status.h"
#include "transport/digest.h"
#include "transport/host/memory.h"

namespace refitd::bench {
namespace {

using std::chrono::steady_clock;

constexpr int64_t kBucketBytes = int64_t{256} << 20;
constexpr std::chrono::seconds kWait{60};

template <typename T>
T Must(absl::StatusOr<T> value, const char* what) {
  if (value.ok()) return *std::move(value);
  fmt::print(stderr, "host_bench: {}: {}\n", what, value.status().ToString());
  std::exit(1);
}

void Must(const absl::Status& status, const char* what) {
  if (status.ok()) return;
  fmt::print(stderr, "host_bench: {}: {}\n", what, status.ToString());
  std::exit(1);
}

double SecondsSince(steady_clock::time_point start) {
  return std::chrono::duration<double>(steady_clock::now() - start).count();
}

// A model as one dense region: tensors back to back at kPackAlignment.
struct Model {
  std::vector<TensorSpec> tensors;
  std::vector<int64_t> offsets;
  int64_t bytes = 0;
};

Model MakeModel(const std::string& name) {
  Model model;
  if (name == "1mib") {
    for (int i = 0; i < 8; ++i)
      model.tensors.push_back({fmt::format("layer.{}", i), DType::kBFloat16, {256, 256}});
  } else if (name == "64kib-buckets") {
    for (int i = 0; i < 1024; ++i)
      model.tensors.push_back({fmt::format("layer.{}", i), DType::kBFloat16, {32, 1024}});
  } else {
    model.tensors = workloads::TensorsOf(Must(workloads::FindModel(name), "model"));
  }
  for (const TensorSpec& tensor : model.tensors) {
    model.offsets.push_back(model.bytes);
    const int64_t bytes = Must(ElementCount(tensor.shape), "shape") * ElementBytes(tensor.dtype);
    model.bytes += AlignUp(bytes);
  }
  return model;
}

void FillRandom(char* data, int64_t bytes, uint64_t seed, int threads) {
  std::vector<std::thread> workers;
  const int64_t share = (bytes / threads + 7) / 8 * 8;
  for (int t = 0; t < threads; ++t) {
    workers.emplace_back([=] {
      uint64_t x = seed * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(t) + 1;
      const int64_t end = std::min(bytes, (t + 1) * share);
      for (int64_t i = t * share; i + 8 <= end; i += 8) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        std::memcpy(data + i, &x, 8);
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
}

void ForkJoin(int threads, const std::function<void(int)>& work) {
  std::vector<std::thread> workers;
  workers.reserve(static_cast<size_t>(threads) - 1);
  for (int t = 1; t < threads; ++t) workers.emplace_back(work, t);
  work(0);
  for (std::thread& worker : workers) worker.join();
}

void ParallelMemcpy(char* to, const char* from, int64_t bytes, int threads) {
  const int64_t share = (bytes / threads + 63) / 64 * 64;
  ForkJoin(threads, [=](int t) {
    const int64_t begin = std::min(bytes, t * share);
    const int64_t end = std::min(bytes, begin + share);
    std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin));
  });
}

// Of the whole model, as whoever holds it sees it.
uint64_t DigestOf(const Model& model, const char* data) {
  uint64_t digest = 0;
  for (uint32_t i = 0; i < model.tensors.size(); ++i) {
    const TensorSpec& tensor = model.tensors[i];
    const int bytes = static_cast<int>(ElementBytes(tensor.dtype));
    digest += (i + 1) * BestDigestKernels().digest(data + model.offsets[i], bytes, 0,
                                                   *ElementCount(tensor.shape));
  }
  return digest;
}

// ---- the engine's process ----

// Registers the model in one region; after each commit it prints a digest of what it holds, and
// poisons it.
int RunEngine(const std::string& socket, const std::string& group, const std::string& model_name) {
  const Model model = MakeModel(model_name);
  client::EngineOptions options;
  options.connect.socket = socket;
  options.connect.group = group;
  options.connect.wait = kWait;
  options.instance = "bench";
  auto engine = Must(client::Engine::Attach(options), "engine attach");
  auto region = Must(engine->NewRegion(model.bytes), "engine region");
  Layout layout;
  layout.tensors = model.tensors;
  for (uint32_t i = 0; i < model.tensors.size(); ++i) {
    const Box box = WholeBox(model.tensors[i].shape);
    layout.pieces.push_back({i, box, region->id(), model.offsets[i], RowMajorStrides(box.extent)});
  }
  Must(engine->Register(std::move(layout)), "engine register");
  uint64_t commits = 0;
  while (true) {
    absl::StatusOr<client::Event> event = engine->Next(kWait);
    if (!event.ok()) return 0;  // the daemon is gone: the bench ended
    if (const auto* prepare = std::get_if<client::Prepare>(&*event)) {
      std::memset(region->data(), 0xA5, std::min<size_t>(64, static_cast<size_t>(region->bytes())));
      Must(engine->Ready(prepare->version), "engine ready");
    } else if (std::get_if<client::Committed>(&*event) != nullptr) {
      ++commits;
      const uint64_t digest = DigestOf(model, region->data());
      if (model.bytes > (4 << 20))
        std::memset(region->data(), 0x5A, static_cast<size_t>(region->bytes()));
      fmt::print("{} {}\n", commits, digest);
      std::fflush(stdout);
    }
  }
}

// ---- processes ----

struct Child {
  pid_t pid = -1;
  FILE* out = nullptr;

  Child(const std::vector<std::string>& argv, bool read_output) {
    int fds[2] = {-1, -1};
    if (read_output && pipe2(fds, O_CLOEXEC) != 0) std::exit(1);
    pid = fork();
    if (pid < 0) {
      fmt::print(stderr, "host_bench: fork: {}\n", std::strerror(errno));
      std::exit(1);
    }
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (read_output) {
        dup2(fds[1], 1);
        close(fds[0]);
        close(fds[1]);
      }
      std::vector<char*> args;
      for (const std::string& a : argv) args.push_back(const_cast<char*>(a.c_str()));
      args.push_back(nullptr);
      execv(args[0], args.data());
      _exit(127);
    }
    if (read_output) {
      close(fds[1]);
      out = fdopen(fds[0], "r");
    }
  }
  ~Child() {
    kill(pid, SIGTERM);
    int status = 0;
    for (int i = 0; i < 500 && waitpid(pid, &status, WNOHANG) == 0; ++i) usleep(10'000);
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    if (out != nullptr) fclose(out);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  uint64_t ReadDigest(uint64_t commit) {
    char line[128];
    while (fgets(line, sizeof(line), out) != nullptr) {
      unsigned long long n = 0;
      unsigned long long digest = 0;
      if (sscanf(line, "%llu %llu", &n, &digest) == 2 && n == commit) return digest;
    }
    fmt::print(stderr, "host_bench: the engine ended\n");
    std::exit(1);
  }
};

// ---- the trainer's side ----

class Bench {
 public:
  Bench(const std::string& self, const std::string& socket, const std::string& group,
        const std::string& model_name)
      : model_(MakeModel(model_name)),
        engine_(
            {self, "--role", "engine", "--socket", socket, "--group", group, "--model", model_name},
            true) {
    client::TrainerOptions options;
    options.connect.socket = socket;
    options.connect.group = group;
    options.connect.spec = client::GroupSpec{};
    options.connect.wait = kWait;
    trainer_ = Must(client::Trainer::Attach(options), "trainer attach");
    region_ = Must(trainer_->NewRegion(model_.bytes), "trainer region");
  }

  const Model& model() const { return model_; }
  char* data() const { return region_->data(); }

  // One version in buckets of at most `bucket_bytes`; seconds from Begin to committed.
  double Update(Verification verification, int64_t bucket_bytes) {
    std::vector<client::Bucket> buckets = Buckets(bucket_bytes);
    client::BeginOptions begin;
    begin.version = Version(++version_);
    begin.verification = verification;
    const auto start = steady_clock::now();
    auto update = Must(trainer_->Begin(begin), "begin");
    for (client::Bucket& bucket : buckets) {
      update->PushAsync(std::move(bucket), [](const absl::Status&) {});
    }
    Must(update->Commit(), "commit");
    const double seconds = SecondsSince(start);
    const uint64_t installed = engine_.ReadDigest(static_cast<uint64_t>(version_));
    if (installed != DigestOf(model_, region_->data())) {
      fmt::print(stderr, "host_bench: version {} differs in the engine\n", version_);
      std::exit(1);
    }
    return seconds;
  }

 private:
  std::vector<client::Bucket> Buckets(int64_t bucket_bytes) const {
    std::vector<client::Bucket> buckets;
    size_t i = 0;
    while (i < model_.tensors.size()) {
      const int64_t base = model_.offsets[i];
      std::vector<TensorSpec> tensors;
      std::vector<int64_t> offsets;
      while (i < model_.tensors.size()) {
        const int64_t end = i + 1 < model_.offsets.size() ? model_.offsets[i + 1] : model_.bytes;
        if (!tensors.empty() && end - base > bucket_bytes) break;
        tensors.push_back(model_.tensors[i]);
        offsets.push_back(model_.offsets[i] - base);
        ++i;
      }
      buckets.push_back(
          client::Bucket::Packed(std::move(tensors), region_, base, std::move(offsets)));
    }
    return buckets;
  }

  const Model model_;
  Child engine_;
  std::unique_ptr<client::Trainer> trainer_;
  std::shared_ptr<client::Region> region_;
  int64_t version_ = 0;
};

std::shared_ptr<HostRegion> MappedMemfd(int64_t bytes) {
  const UniqueFd fd = Must(CreateSealedMemfd("bench", bytes), "memfd");
  return Must(HostRegion::Map(fd, bytes, Access::kReadWrite, true), "map");
}

void BenchRegistered(Report* report, const std::string& self, const std::string& socket,
                     const std::string& model_name, int rounds, int threads) {
  Bench bench(self, socket, "registered", model_name);
  const int64_t bytes = bench.model().bytes;
  const std::shared_ptr<HostRegion> from = MappedMemfd(bytes);
  const std::shared_ptr<HostRegion> to = MappedMemfd(bytes);
  FillRandom(from->data(), bytes, 7, threads);

  const std::vector<std::pair<Verification, double>> cases = {
      {Verification::kOff, 0.9}, {Verification::kTransfer, 0.8}, {Verification::kReadback, 0.6}};
  std::vector<std::vector<double>> seconds(cases.size());
  std::vector<double> memcpy_seconds;
  FillRandom(bench.data(), bytes, 1, threads);
  bench.Update(Verification::kOff, kBucketBytes);  // page tables of all processes
  ParallelMemcpy(to->data(), from->data(), bytes, threads);
  for (int round = 0; round < rounds; ++round) {
    const auto start = steady_clock::now();
    ParallelMemcpy(to->data(), from->data(), bytes, threads);
    memcpy_seconds.push_back(SecondsSince(start));
    for (size_t c = 0; c < cases.size(); ++c) {
      FillRandom(bench.data(), bytes, static_cast<uint64_t>(round) * 10 + c + 100, threads);
      seconds[c].push_back(bench.Update(cases[c].first, kBucketBytes));
    }
  }
  const double baseline = static_cast<double>(bytes) / Median(memcpy_seconds) / 1e9;
  const char* names[] = {"off", "transfer", "readback"};
  for (size_t c = 0; c < cases.size(); ++c) {
    const double rate = static_cast<double>(bytes) / Median(seconds[c]) / 1e9;
    report->Add(
        {fmt::format("registered, {}, verification {}, against memcpy", model_name, names[c]), rate,
         "GB/s", baseline, rate / baseline, cases[c].second, true});
  }
}

void BenchDigest(Report* report, int rounds, int threads) {
  const int64_t bytes = int64_t{1} << 30;
  const std::shared_ptr<HostRegion> region = MappedMemfd(bytes);
  FillRandom(region->data(), bytes, 3, threads);
  std::vector<double> digest_seconds;
  std::vector<double> read_seconds;
  std::vector<uint64_t> sink(static_cast<size_t>(threads));
  const int64_t share = bytes / threads;
  for (int round = 0; round < rounds; ++round) {
    auto start = steady_clock::now();
    ForkJoin(threads, [&](int t) {
      const auto* words = reinterpret_cast<const uint64_t*>(region->data() + t * share);
      uint64_t sum = 0;
      for (int64_t i = 0; i < share / 8; ++i) sum += words[i];
      sink[static_cast<size_t>(t)] += sum;
    });
    read_seconds.push_back(SecondsSince(start));
    start = steady_clock::now();
    ForkJoin(threads, [&](int t) {
      sink[static_cast<size_t>(t)] +=
          BestDigestKernels().digest(region->data() + t * share, 2, t * share / 2, share / 2);
    });
    digest_seconds.push_back(SecondsSince(start));
  }
  volatile uint64_t keep = sink[0];
  (void)keep;
  const double baseline = static_cast<double>(bytes) / Median(read_seconds) / 1e9;
  const double rate = static_cast<double>(bytes) / Median(digest_seconds) / 1e9;
  report->Add({fmt::format("digest alone ({}), against reading", BestDigestKernels().name), rate,
               "GB/s", baseline, rate / baseline, 0.7, true});
}

void BenchSmallUpdate(Report* report, const std::string& self, const std::string& socket,
                      int rounds) {
  Bench bench(self, socket, "small", "1mib");
  std::vector<double> seconds;
  for (int i = 0; i < 20 + rounds * 30; ++i) {
    FillRandom(bench.data(), bench.model().bytes, static_cast<uint64_t>(i) + 1, 1);
    const double s = bench.Update(Verification::kReadback, kBucketBytes);
    if (i >= 20) seconds.push_back(s);
  }
  report->Add(
      {"1 MiB model, begin to committed, p50", Median(seconds) * 1e3, "ms", 0, 0, 2.0, false});
}

void BenchBucketCost(Report* report, const std::string& self, const std::string& socket,
                     int rounds) {
  Bench bench(self, socket, "buckets", "64kib-buckets");
  const auto count = static_cast<double>(bench.model().tensors.size());
  std::vector<double> one;
  std::vector<double> many;
  for (int i = 0; i < rounds + 2; ++i) {
    FillRandom(bench.data(), bench.model().bytes, static_cast<uint64_t>(i) + 1, 1);
    const double whole = bench.Update(Verification::kReadback, kBucketBytes);
    FillRandom(bench.data(), bench.model().bytes, static_cast<uint64_t>(i) + 100, 1);
    const double cut = bench.Update(Verification::kReadback, 64 << 10);
    if (i < 2) continue;
    one.push_back(whole);
    many.push_back(cut);
  }
  report->Add({fmt::format("cost added per 64 KiB bucket, {} pipelined", count),
               (Median(many) - Median(one)) / count * 1e6, "us", 0, 0, 200, false});
}

int64_t AnonymousBytes(const std::string& socket) {
  auto channel = grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials());
  auto stub = v1::Operator::NewStub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kWait);
  v1::GetStatusResponse response;
  if (!stub->GetStatus(&context, {}, &response).ok()) std::exit(1);
  return response.resources().anonymous_bytes();
}

void BenchMemory(Report* report, const std::string& self, const std::string& socket) {
  Bench bench(self, socket, "memory", "1mib");
  const auto updates = [&](int n) {
    for (int i = 0; i < n; ++i) {
      FillRandom(bench.data(), bench.model().bytes, static_cast<uint64_t>(i) + 1, 1);
      bench.Update(Verification::kReadback, 128 << 10);
    }
  };
  updates(100);
  const double before = static_cast<double>(AnonymousBytes(socket)) / (1 << 20);
  updates(1000);
  const double after = static_cast<double>(AnonymousBytes(socket)) / (1 << 20);
  report->Add({"daemon's anonymous memory after all of the above", before, "MiB", 0, 0, 64, false});
  report->Add({"the same, grown by 1,000 updates", after - before, "MiB", 0, 0, 1, false});
}

}  // namespace

int Main(int argc, char** argv) {
  CLI::App app("refitd's benchmark of one daemon on host memory");
  std::string role;
  std::string refitd;
  std::string socket;
  std::string group;
  std::string model = "qwen3-0.6b";
  int rounds = 15;
  bool json = false;
  app.add_option("--role", role);
  app.add_option("--refitd", refitd);
  app.add_option("--socket", socket);
  app.add_option("--group", group);
  app.add_option("--model", model, "qwen3-0.6b, qwen3-4b");
  app.add_option("--rounds", rounds, "measured rounds a case")->check(CLI::Range(1, 1000));
  app.add_flag("--json", json, "one object a line");
  CLI11_PARSE(app, argc, argv);
  if (role == "engine") return RunEngine(socket, group, model);

  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  std::string dir = (std::filesystem::temp_directory_path() / "refitd-bench-XXXXXX").string();
  if (mkdtemp(dir.data()) == nullptr) return 1;
  socket = dir + "/refitd.sock";
  const int threads = std::max(1u, std::min(16u, std::thread::hardware_concurrency()));
  bool reached = false;
  {
    Child daemon({refitd, "--listen-unix", socket, "--log-level", "warning"}, false);
    Report report("host", json);
    BenchDigest(&report, rounds, threads);
    BenchRegistered(&report, self, socket, model, rounds, threads);
    BenchSmallUpdate(&report, self, socket, rounds);
    BenchBucketCost(&report, self, socket, rounds);
    BenchMemory(&report, self, socket);
    reached = report.all_reached();
  }
  std::filesystem::remove_all(dir);
  return reached ? 0 : 1;
}

}  // namespace refitd::bench

int main(int argc, char** argv) { return refitd::bench::Main(argc, argv); }
