#include "tests/bench/session.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "client/engine.h"
#include "refitd/v1/operator.grpc.pb.h"
#include "tests/workloads/models.h"
#include "tests/workloads/sharding/model.h"
#include "transport/digest/digest.h"

namespace refitd::bench {

using std::chrono::steady_clock;

double SecondsSince(steady_clock::time_point start) {
  return std::chrono::duration<double>(steady_clock::now() - start).count();
}

int CopyThreads() {
  return static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 16u));
}

Model MakeModel(const std::string& name) {
  Model model;
  if (name == "256mib") {
    for (int i = 0; i < 32; ++i)
      model.tensors.push_back({fmt::format("layer.{}", i), DType::kBFloat16, {2048, 2048}});
  } else if (name == "1mib") {
    for (int i = 0; i < 8; ++i)
      model.tensors.push_back({fmt::format("layer.{}", i), DType::kBFloat16, {256, 256}});
  } else if (name == "64kib-buckets") {
    for (int i = 0; i < 1024; ++i)
      model.tensors.push_back({fmt::format("layer.{}", i), DType::kBFloat16, {32, 1024}});
  } else if (const size_t slash = name.find('/'); slash != std::string::npos) {
    const int64_t divisor = std::stoll(name.substr(slash + 1));
    const auto config = Must(sharding::FindModelConfig(name.substr(0, slash)), "model");
    model.tensors = sharding::HfTensors(config);
    for (TensorSpec& tensor : model.tensors) {
      for (int64_t& dim : tensor.shape) dim = std::max<int64_t>(1, dim / divisor);
    }
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

int RunEngine(const EngineArgs& args) {
  const Model model = MakeModel(args.model);
  client::EngineOptions options;
  options.connect.socket = args.place.socket;
  options.connect.coordinator = args.place.coordinator;
  options.connect.group = args.group;
  options.connect.wait = kWait;
  options.instance = args.instance;
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
    if (!event.ok()) return 0;  // the daemon is gone: the benchmark has ended
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

Child::Child(const std::vector<std::string>& argv, bool read_output, int inherit) {
  int fds[2] = {-1, -1};
  if (read_output && pipe2(fds, O_CLOEXEC) != 0) std::exit(1);
  pid_ = fork();
  if (pid_ < 0) {
    fmt::print(stderr, "bench: fork: {}\n", std::strerror(errno));
    std::exit(1);
  }
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (inherit >= 0) dup2(inherit, 0);
    if (read_output) dup2(fds[1], 1);
    std::vector<char*> args;
    for (const std::string& a : argv) args.push_back(const_cast<char*>(a.c_str()));
    args.push_back(nullptr);
    execv(args[0], args.data());
    _exit(127);
  }
  if (read_output) {
    close(fds[1]);
    out_ = fdopen(fds[0], "r");
  }
}

Child::~Child() {
  kill(pid_, SIGTERM);
  int status = 0;
  for (int i = 0; i < 500; ++i) {
    if (waitpid(pid_, &status, WNOHANG) != 0) {
      if (out_ != nullptr) fclose(out_);
      return;
    }
    usleep(10'000);
  }
  kill(pid_, SIGKILL);
  waitpid(pid_, &status, 0);
  if (out_ != nullptr) fclose(out_);
}

uint64_t Child::ReadDigest(uint64_t commit) {
  char line[128];
  while (fgets(line, sizeof(line), out_) != nullptr) {
    unsigned long long n = 0;
    unsigned long long digest = 0;
    if (sscanf(line, "%llu %llu", &n, &digest) == 2 && n == commit) return digest;
  }
  fmt::print(stderr, "bench: an engine ended\n");
  std::exit(1);
}

Session::Session(const std::string& self, const std::string& socket, const std::string& group,
                 const std::string& model_name, const std::vector<EnginePlace>& engines)
    : model_(MakeModel(model_name)) {
  for (size_t i = 0; i < engines.size(); ++i) {
    std::vector<std::string> argv = {self, "--role", "engine", "--socket", engines[i].socket};
    argv.insert(argv.end(), {"--group", group, "--model", model_name});
    argv.insert(argv.end(), {"--instance", fmt::format("engine-{}", i)});
    if (!engines[i].coordinator.empty()) {
      argv.insert(argv.end(), {"--coordinator", engines[i].coordinator});
    }
    engines_.push_back(std::make_unique<Child>(argv, true));
  }
  client::TrainerOptions options;
  options.connect.socket = socket;
  options.connect.group = group;
  client::GroupSpec spec;
  spec.min_instances = static_cast<int>(engines.size());
  options.connect.spec = spec;
  options.connect.wait = kWait;
  trainer_ = Must(client::Trainer::Attach(options), "trainer attach");
  region_ = Must(trainer_->NewRegion(model_.bytes), "trainer region");
}

double Session::Update(Verification verification, int64_t bucket_bytes) {
  std::vector<client::Bucket> buckets = Buckets(bucket_bytes);
  client::BeginOptions begin;
  begin.version = Version(++version_);
  begin.verification = verification;
  const auto start = steady_clock::now();
  auto update = Must(trainer_->Begin(begin), "begin");
  for (client::Bucket& bucket : buckets) {
    update->PushAsync(std::move(bucket), [](const absl::Status&) {});
  }
  const client::CommitResult result = Must(update->Commit(), "commit");
  const double seconds = SecondsSince(start);
  for (const client::InstanceOutcome& instance : result.instances) {
    if (instance.committed) continue;
    fmt::print(stderr, "bench: version {} is not in {}: {}\n", version_, instance.instance,
               instance.reason);
    std::exit(1);
  }
  const uint64_t digest = DigestOf(model_, region_->data());
  for (const auto& engine : engines_) {
    if (engine->ReadDigest(static_cast<uint64_t>(version_)) == digest) continue;
    fmt::print(stderr, "bench: version {} differs in an engine\n", version_);
    std::exit(1);
  }
  return seconds;
}

std::vector<client::Bucket> Session::Buckets(int64_t bucket_bytes) const {
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

std::shared_ptr<HostRegion> MappedMemfd(int64_t bytes) {
  const UniqueFd fd = Must(CreateSealedMemfd("bench", bytes), "memfd");
  return Must(HostRegion::Map(fd, bytes, Access::kReadWrite, true), "map");
}

v1::GetStatusResponse StatusOf(const std::string& socket) {
  auto channel = grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials());
  auto stub = v1::Operator::NewStub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kWait);
  context.set_wait_for_ready(true);
  v1::GetStatusResponse response;
  if (!stub->GetStatus(&context, {}, &response).ok()) {
    fmt::print(stderr, "bench: no daemon at {}\n", socket);
    std::exit(1);
  }
  return response;
}

}  // namespace refitd::bench
