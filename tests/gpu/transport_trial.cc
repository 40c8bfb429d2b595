// The cuda transport on a real GPU: memory of another process, random transfers against the host
// transport bit for bit under each verification, and the time of small and large transfers. Prints
// SKIPPED if there is no GPU. Run by hand, or by `bazel run //tests/gpu:transport_trial`.
#define CATCH_CONFIG_RUNNER
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/base/status.h"
#include "transport/cuda/api.h"
#include "transport/cuda/cuda_transport.h"
#include "transport/cuda/random_transfer_testing.h"
#include "transport/host/host_transport.h"
#include "transport/transport_testing.h"

#if defined(REFITD_CUDA)
namespace refitd {
namespace {

constexpr auto kWait = std::chrono::seconds(60);
constexpr int64_t kSharedBytes = kBlockBytes;
constexpr char kLibrary[] = "libcuda.so.1";

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "exporter: %s\n", what.c_str());
  _exit(1);
}

// A command to the process that owns the memory.
struct Command {
  enum class Kind : int { kAllocate, kRead } kind = Kind::kAllocate;
  int device = 0;
  uint64_t block = 0;
  uint64_t bytes = 0;
  bool fill = false;  // the block's bytes come from the shared memory
};

// Runs the child, which allocates with cuMemAlloc, as cudaMalloc does, until its parent ends.
[[noreturn]] void Serve(int fd, char* shared) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const auto api = CudaApi::Load(kLibrary);
  if (!api.ok()) _exit(0);  // the parent says why
  void* const library = dlopen(kLibrary, RTLD_NOW);
  const auto get_handle =
      reinterpret_cast<decltype(&cuIpcGetMemHandle)>(dlsym(library, "cuIpcGetMemHandle"));
  const auto synchronize =
      reinterpret_cast<decltype(&cuCtxSynchronize)>(dlsym(library, "cuCtxSynchronize"));
  const auto check = [&](const char* call, CUresult result) {
    if (result != CUDA_SUCCESS) Die(Message(api->Check(call, result)));
  };
  check("cuInit", api->cuInit(0));
  CudaContexts contexts(*api, 64, /*own=*/true);
  std::vector<std::pair<int, CUdeviceptr>> blocks;
  Command command;
  while (read(fd, &command, sizeof(command)) == sizeof(command)) {
    const int device =
        command.kind == Command::Kind::kRead ? blocks[command.block].first : command.device;
    const auto context = contexts.Get(device);
    if (!context.ok()) Die(Message(context.status()));
    const ScopedContext current(*api, *context);
    CUipcMemHandle handle = {};
    if (command.kind == Command::Kind::kAllocate) {
      CUdeviceptr address = 0;
      check("cuMemAlloc", api->cuMemAlloc(&address, command.bytes));
      if (command.fill) {
        check("copy", api->cuMemcpyHtoDAsync(address, shared, command.bytes, nullptr));
      } else {
        check("set", api->cuMemsetD8Async(address, 0x5a, command.bytes, nullptr));
      }
      check("cuIpcGetMemHandle", get_handle(&handle, address));
      blocks.emplace_back(device, address);
    } else {
      check("copy",
            api->cuMemcpyDtoHAsync(shared, blocks[command.block].second, command.bytes, nullptr));
    }
    check("cuCtxSynchronize", synchronize());
    if (write(fd, &handle, sizeof(handle)) != sizeof(handle)) Die("write");
  }
  _exit(0);
}

// The other process. It is forked, so it must be made before this process uses CUDA.
class Child : public Exporter {
 public:
  Child() {
    int ends[2];
    shared_ = static_cast<char*>(
        mmap(nullptr, kSharedBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    if (shared_ == MAP_FAILED || socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) Die("setup");
    pid_ = fork();
    if (pid_ == 0) {
      close(ends[0]);
      Serve(ends[1], shared_);
    }
    close(ends[1]);
    fd_ = ends[0];
  }
  ~Child() override {
    close(fd_);
    waitpid(pid_, nullptr, 0);
  }

  std::string Export(int device, const std::vector<char>& bytes) override {
    std::memcpy(shared_, bytes.data(), bytes.size());
    return Ask({.device = device, .bytes = bytes.size(), .fill = true});
  }
  std::vector<char> Read(size_t block, size_t bytes) override {
    (void)Ask({.kind = Command::Kind::kRead, .block = first_ + block, .bytes = bytes});
    return {shared_, shared_ + bytes};
  }
  std::string Allocate(int device, int64_t bytes) {
    return Ask({.device = device, .bytes = static_cast<uint64_t>(bytes)});
  }
  // The blocks of a world are counted from here on.
  void StartWorld() { first_ = blocks_; }

 private:
  std::string Ask(const Command& command) {
    if (command.kind == Command::Kind::kAllocate) ++blocks_;
    std::string handle(kCudaIpcHandleBytes, '\0');
    REQUIRE(write(fd_, &command, sizeof(command)) == sizeof(command));
    REQUIRE(read(fd_, handle.data(), handle.size()) == static_cast<ssize_t>(handle.size()));
    return handle;
  }

  pid_t pid_ = -1;
  int fd_ = -1;
  char* shared_ = nullptr;
  uint64_t blocks_ = 0;
  uint64_t first_ = 0;
};

Child* child = nullptr;  // the Child that main made
std::shared_ptr<CudaMemory> memory;

std::unique_ptr<Transport> MakeTransport(const CudaTransportOptions& options = {}) {
  auto made = MakeCudaTransport(memory, MakeHostTransport({.threads = 1}), options);
  INFO(made.status().ToString());
  REQUIRE(made.ok());
  return *std::move(made);
}

TEST_CASE("random transfers leave the host transport's bytes and digests") {
  constexpr uint64_t kSeed = 99;
  Rng random(kSeed);
  const auto transport = MakeTransport();
  const auto engines = MakeTransport({.engine_bytes = 256, .lost = {}});
  const auto host = MakeHostTransport({.threads = 2});
  const int devices = std::min<int>(2, static_cast<int>(memory->devices().size()));
  if (devices < 2) std::printf("SKIPPED: copy engines, which need two GPUs\n");
  for (int round = 0; round < 60; ++round) {
    INFO("seed " << kSeed << ", round " << round);
    child->StartWorld();
    World world(child, memory.get(), &random);
    FillRandomly(&world, &random, round % 3 == 0, devices);
    world.model.verification = static_cast<Verification>(round / 2 % 3 + 1);
    const Transfer transfer = world.OnDevices();
    const TransferResult result = Run((round % 2 == 0 ? transport : engines).get(), transfer);
    const TransferResult want = Run(host.get(), world.model);
    INFO(result.status.ToString());
    REQUIRE(result.status.ok());
    REQUIRE(result.source_digests == want.source_digests);
    REQUIRE(result.bytes_written == want.bytes_written);
    REQUIRE(result.expected.size() == want.expected.size());
    for (size_t i = 0; i < want.expected.size(); ++i) {
      REQUIRE(result.expected[i].digest == want.expected[i].digest);
    }
    world.CheckBytes();
    const ReadbackResult readback = Run(transport.get(), JobOf(transfer, result));
    INFO(readback.status.ToString());
    REQUIRE(readback.status.ok());
  }
}

TEST_CASE("random broadcasts leave the host transport's bytes and digests") {
  constexpr uint64_t kSeed = 100;
  Rng random(kSeed);
  const int devices = static_cast<int>(memory->devices().size());
  const auto host = MakeHostTransport({.threads = 2});
  for (int round = 0; round < 40; ++round) {
    INFO("seed " << kSeed << ", round " << round);
    const auto transport =
        MakeTransport({.relay_chunk_bytes = round % 2 == 0 ? 1000 : 1 << 20, .lost = {}});
    child->StartWorld();
    World world(child, memory.get(), &random);
    FillForBroadcast(&world, &random, static_cast<int>(Pick(&random, 0, devices - 1)), devices);
    world.model.want_source_digests = true;
    world.model.verification = static_cast<Verification>(round / 2 % 3 + 1);
    std::vector<int> slots_on;
    for (int device = 0; device < devices; ++device) {
      if (Pick(&random, 0, 3) > 0) slots_on.push_back(device);
    }
    BroadcastPools pools;
    const Transfer transfer =
        Broadcasting(&world, memory.get(), &random, slots_on, BroadcastMethod::kChain, &pools);
    const TransferResult result = Run(transport.get(), transfer);
    const TransferResult want = Run(host.get(), world.model);
    INFO(result.status.ToString());
    REQUIRE(result.status.ok());
    REQUIRE(result.source_digests == want.source_digests);
    REQUIRE(result.bytes_written == want.bytes_written);
    world.CheckBytes();
    REQUIRE(Run(transport.get(), JobOf(transfer, result)).status.ok());
  }
}

// bf16 matrices of `each` bytes between two blocks of the child; in the source there are gaps
// between them.
Transfer Matrices(int64_t bytes, int64_t each, int from, int to) {
  constexpr int64_t kGap = 256;
  const int64_t count = bytes / each;
  const Dims shape = {each / 4096, 2048};
  Transfer transfer;
  const auto region_on = [&](int device) {
    const int64_t room = bytes + count * kGap;
    const auto region = memory->OpenBlock(device, child->Allocate(device, room));
    INFO(region.status().ToString());
    REQUIRE(region.ok());
    transfer.keep_alive.push_back(*region);
    return (*region)->data();
  };
  char* const source = region_on(from);
  char* const destination = region_on(to);
  transfer.destinations.emplace_back();
  for (int64_t i = 0; i < count; ++i) {
    BoundPiece piece{.dtype = DType::kBFloat16,
                     .shape = shape,
                     .box = WholeBox(shape),
                     .strides = RowMajorStrides(shape),
                     .data = source + i * (each + (count > 1 ? kGap : 0)),
                     .name = "matrix"};
    transfer.source.push_back(piece);
    piece.data = destination + i * each;
    transfer.destinations[0].push_back(std::move(piece));
    const auto index = static_cast<uint32_t>(i);
    transfer.plan.moves.push_back(
        {.source_piece = index, .destination_piece = index, .box = WholeBox(shape)});
  }
  return transfer;
}

Transfer Matrix(int64_t bytes, int from, int to) { return Matrices(bytes, bytes, from, to); }

// Milliseconds, from submission to the call of `done`: median of several.
double Milliseconds(Transport* transport, const Transfer& transfer, bool replay, int rounds) {
  std::shared_ptr<const PreparedTransfer> prepared;
  if (replay) prepared = transport->Prepare(transfer).value();
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) {
    const auto start = std::chrono::steady_clock::now();
    Outcome<TransferResult> outcome;
    if (replay) {
      transport->Replay(prepared, transfer.verification, "replay", outcome.done());
    } else {
      transport->Submit(transfer, outcome.done());
    }
    const TransferResult result = outcome.Wait();
    INFO(result.status.ToString());
    REQUIRE(result.status.ok());
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    times.push_back(took.count());
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

TEST_CASE("what transfers take") {
  const int last = static_cast<int>(memory->devices().size()) - 1;
  const char* const names[] = {"", "off", "transfer", "readback"};
  for (const int blocks : {32, 64, 132}) {
    const auto transport = MakeTransport({.blocks = blocks, .local_blocks = blocks, .lost = {}});
    for (const int64_t bytes : {int64_t{1} << 20, int64_t{4} << 30}) {
      for (const int to : {0, last}) {
        Transfer transfer = Matrix(bytes, 0, to);
        for (const auto verification :
             {Verification::kOff, Verification::kTransfer, Verification::kReadback}) {
          transfer.verification = verification;
          const int rounds = bytes > (1 << 20) ? 5 : 200;
          const double submitted = Milliseconds(transport.get(), transfer, false, rounds);
          const double replayed = Milliseconds(transport.get(), transfer, true, rounds);
          std::printf(
              "%3d blocks, %5lld MiB, device 0 to %d, %-8s: %.3f ms submitted, %.3f ms "
              "replayed, %.0f GB/s\n",
              blocks, static_cast<long long>(bytes >> 20), to,
              names[static_cast<int>(verification)], submitted, replayed,
              static_cast<double>(bytes) / replayed / 1e6);
          std::fflush(stdout);
        }
        const ReadbackJob job = JobOf(transfer, Run(transport.get(), transfer));
        const auto start = std::chrono::steady_clock::now();
        REQUIRE(Run(transport.get(), job).status.ok());
        const std::chrono::duration<double, std::milli> took =
            std::chrono::steady_clock::now() - start;
        std::printf("%3d blocks, %5lld MiB, read back on device %d: %.3f ms\n", blocks,
                    static_cast<long long>(bytes >> 20), to, took.count());
        if (last == 0) break;
      }
    }
  }
}

// The sizes of a broadcast's parts.
struct Parts {
  int64_t slot_bytes = 0;
  int slots = 3;
  int64_t tensor_bytes = 0;
  Verification verification = Verification::kOff;
};

// The receivers' devices: at most four, the last ones.
std::vector<int> Receivers() {
  const int devices = static_cast<int>(memory->devices().size());
  std::vector<int> receivers;
  for (int device = std::max(devices - 4, 1); device < devices; ++device) {
    receivers.push_back(device);
  }
  return receivers;
}

// A part from device 0 through one slot of each pool into each receiver's memory.
Transfer PartThrough(const Parts& parts, const std::vector<int>& receivers,
                     const std::vector<DevicePool>& pools, int slot) {
  Transfer transfer = Matrices(parts.slot_bytes, parts.tensor_bytes, 0, receivers[0]);
  Broadcast broadcast{.method = BroadcastMethod::kChain, .slots = {}, .byte_offsets = {}};
  for (size_t i = 0; i < transfer.source.size(); ++i) {
    broadcast.byte_offsets.push_back(static_cast<int64_t>(i) * parts.tensor_bytes);
  }
  for (size_t r = 0; r < receivers.size(); ++r) {
    broadcast.slots.push_back(
        {pools[r].region->data() + slot * parts.slot_bytes, parts.slot_bytes, pools[r].region});
    if (r == 0) continue;
    const Transfer other = Matrices(parts.slot_bytes, parts.tensor_bytes, 0, receivers[r]);
    transfer.destinations.push_back(other.destinations[0]);
    transfer.keep_alive.insert(transfer.keep_alive.end(), other.keep_alive.begin(),
                               other.keep_alive.end());
    for (CopyMove move : other.plan.moves) {
      move.destination = static_cast<uint32_t>(r);
      transfer.plan.moves.push_back(std::move(move));
    }
  }
  std::stable_sort(
      transfer.plan.moves.begin(), transfer.plan.moves.end(),
      [](const CopyMove& a, const CopyMove& b) { return a.source_piece < b.source_piece; });
  transfer.broadcast = std::move(broadcast);
  transfer.verification = parts.verification;
  return transfer;
}

// Broadcasts `count` parts one after another, as a group does; returns GB/s into each receiver.
double BroadcastRate(Transport* transport, const Parts& of, int count) {
  const int slots = of.slots;
  const std::vector<int> receivers = Receivers();
  std::vector<DevicePool> pools;
  for (const int device : receivers) {
    auto pool = memory->MakePool(device, of.slot_bytes * slots);
    REQUIRE(pool.ok());
    pools.push_back(*std::move(pool));
  }
  std::vector<Transfer> transfers;
  for (int s = 0; s < slots; ++s) transfers.push_back(PartThrough(of, receivers, pools, s));
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> busy(static_cast<size_t>(slots));
  absl::Status failed;
  std::chrono::steady_clock::time_point start;
  for (int part = 0; part < count + slots; ++part) {
    const auto slot = static_cast<size_t>(part % slots);
    std::unique_lock lock(mutex);
    REQUIRE(changed.wait_for(lock, kWait, [&] { return !busy[slot]; }));
    if (part == slots) start = std::chrono::steady_clock::now();  // the first ones warm up
    busy[slot] = true;
    lock.unlock();
    transport->Submit(transfers[slot], [&, slot](const TransferResult& result) {
      const std::lock_guard guard(mutex);
      if (failed.ok()) failed = result.status;
      busy[slot] = false;
      changed.notify_all();
    });
  }
  std::unique_lock lock(mutex);
  REQUIRE(changed.wait_for(lock, kWait, [&] {
    return std::none_of(busy.begin(), busy.end(), [](bool b) { return b; });
  }));
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  INFO(failed.ToString());
  REQUIRE(failed.ok());
  return static_cast<double>(count * of.slot_bytes) / took.count() / 1e9;
}

TEST_CASE("what broadcasts take") {
  const int devices = static_cast<int>(memory->devices().size());
  if (devices < 2) {
    std::printf("SKIPPED: broadcasts, which need two GPUs\n");
    return;
  }
  const char* const names[] = {"", "off", "transfer", "readback"};
  const auto peer = MakeTransport();
  const double best =
      4.294967296e3 / Milliseconds(peer.get(), Matrix(int64_t{4} << 30, 0, devices - 1), true, 5);
  std::printf("one to one, 4 GiB by copy engines: %.0f GB/s\n", best);
  // With one receiver a part is one chunk, whatever the size of chunks.
  std::vector<int64_t> chunks = {64};
  if (Receivers().size() > 1) chunks = {4, 16, 64};
  for (const int64_t chunk : chunks) {
    const auto transport = MakeTransport({.relay_chunk_bytes = chunk << 20, .lost = {}});
    for (const int64_t tensor : {192, 16, 6, 1}) {
      for (const auto verification : {Verification::kOff, Verification::kTransfer}) {
        const double rate = BroadcastRate(
            transport.get(),
            {.slot_bytes = 192 << 20, .tensor_bytes = tensor << 20, .verification = verification},
            64);
        std::printf(
            "chain to %zu devices, slots of 192 MiB, tensors of %lld MiB, chunks of %lld MiB at "
            "most, "
            "%-8s: %.0f GB/s into each (%.2f)\n",
            Receivers().size(), static_cast<long long>(tensor), static_cast<long long>(chunk),
            names[static_cast<int>(verification)], rate, rate / best);
        std::fflush(stdout);
      }
    }
  }
}

}  // namespace

int Main(int argc, char** argv) {
  Child exporter;
  child = &exporter;
  auto made = CudaMemory::Create();
  if (!made.ok()) {
    std::printf("SKIPPED: %s\n", std::string(made.status().message()).c_str());
    return 0;
  }
  if (CopyKernelImage().empty()) {
    std::printf("SKIPPED: built without nvcc\n");
    return 0;
  }
  memory = *std::move(made);
  const int failed = Catch::Session().run(argc, argv);
  memory = nullptr;
  return failed;
}

}  // namespace refitd

int main(int argc, char** argv) { return refitd::Main(argc, argv); }

#else

int main() {
  std::printf("SKIPPED: CUDA not compiled in\n");
  return 0;
}

#endif
