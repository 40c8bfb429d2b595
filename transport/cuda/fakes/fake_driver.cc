// A CUDA driver for tests: version 12.4, two devices unless a test sets another number, memory and
// streams as fake_cuda.h says. Without CUDA's headers it is empty. Thread-safe, except
// FakeCudaFail.
#if defined(REFITD_CUDA)
#include "transport/cuda/fakes/fake_driver.h"

#include <cuda.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "transport/cuda/copy_interpreter_testing.h"
#include "transport/cuda/copy_kernel.h"
#include "transport/cuda/copy_task.h"
#include "transport/cuda/derive_task.h"
#include "transport/cuda/fakes/fake_nccl_counts.h"
#include "transport/digest/digest_testing.h"

namespace {

using refitd::CopyLaunch;
using refitd::CopyTask;
using refitd::FakeCudaCounts;

constexpr int kDefaultDevices = 2;
constexpr int kMostDevices = 8;
constexpr size_t kGranularity = 2 << 20;

// ---- calls that fail ----

// The call that fails, or null; the caller's string must outlive its use. Calls about a device fail
// on device 1 only.
const char* failing_call = nullptr;
int failing_result = 0;

CUresult Answer(std::string_view call) {
  if (failing_call == nullptr || call != failing_call) return CUDA_SUCCESS;
  return static_cast<CUresult>(failing_result);
}

CUresult Answer(std::string_view call, int device) {
  return device == 1 ? Answer(call) : CUDA_SUCCESS;
}

// ---- state ----

// Memory of another process, or created here for others.
struct Block {
  int fd = -1;
  int device = 0;
  size_t bytes = 0;
  char* exporter = nullptr;  // its owner's address of it
  bool vmm = false;
  bool alive = true;
  ino_t inode = 0;
  int handles = 0;  // open handles of a created block, imports included; the last frees it
};

// A range of addresses that calls may use.
struct Range {
  size_t bytes = 0;
  int device = 0;      // whose memory it is
  unsigned reach = 0;  // bit mask: devices that may use it
  // Legacy handles: the context that opened the handle, and how often.
  CUcontext opener = nullptr;
  int refs = 0;
  const Block* block = nullptr;
  bool reserved = false;  // VMM: an address range
  bool mapped = false;
  bool pinned = false;
};

struct Event {
  uint64_t recorded = 0;  // records so far; `reached` counts those that were reached
  uint64_t reached = 0;
};

struct Op {
  std::function<bool()> ready;  // null: ready at once
  std::function<CUresult()> run;
};

struct Stream {
  int device = 0;
  std::deque<Op> queue;
};

// Objects that were made and not yet destroyed. The fake frees them at its end, as a real driver
// does: after the loss of a context, or of a device, no caller destroys them.
template <typename Thing>
using Owned = std::map<Thing*, std::shared_ptr<Thing>>;

// Settings from the environment, for the fake in a daemon's own process.
unsigned AtFirst(const char* variable, unsigned otherwise) {
  const char* const number = std::getenv(variable);
  return number == nullptr ? otherwise : static_cast<unsigned>(std::strtoul(number, nullptr, 0));
}
// Devices whose streams are stopped, as for FakeCudaHold.
unsigned HeldAtFirst() { return AtFirst("REFITD_FAKE_CUDA_HOLD", 0); }
// Whether kernels run no task, so that only the work of the host is left to measure.
bool IdleAtFirst() { return AtFirst("REFITD_FAKE_CUDA_IDLE", 0) != 0; }
// The call that does not return, as for FakeCudaBlock.
std::string BlockedAtFirst() {
  const char* const call = std::getenv("REFITD_FAKE_CUDA_BLOCK");
  return call == nullptr ? "" : call;
}
int DevicesAtFirst() {
  return static_cast<int>(AtFirst("REFITD_FAKE_CUDA_DEVICES", kDefaultDevices));
}

struct State {
  std::mutex mutex;
  std::condition_variable unblocked;
  std::string blocked = BlockedAtFirst();      // the call that does not return
  std::vector<std::unique_ptr<Block>> blocks;  // handles are indices of this list
  std::map<uintptr_t, Range> ranges;
  std::map<char*, std::unique_ptr<char[]>> memory;
  Owned<Stream> streams;
  std::vector<std::shared_ptr<Stream>> destroyed;  // destroyed streams that have work left
  Owned<Event> events;
  FakeCudaCounts counts;
  std::map<std::string, std::pair<int, int>, std::less<>> faults;  // calls left, result
  int corrupt_launch = 0;
  unsigned held = HeldAtFirst();
  int devices = DevicesAtFirst();
  std::array<bool, kMostDevices> small_stack{};
  bool idle = IdleAtFirst();
  bool backwards = false;  // the order of streams
  bool peers = true;
  CUresult lost = CUDA_SUCCESS;

  char* Allocate(size_t bytes) {
    auto made = std::make_unique<char[]>(bytes);
    char* const data = made.get();
    memory[data] = std::move(made);
    return data;
  }
  template <typename Thing>
  static Thing* Keep(Owned<Thing>* owned, Thing thing) {
    auto made = std::make_shared<Thing>(std::move(thing));
    Thing* const at = made.get();
    (*owned)[at] = std::move(made);
    return at;
  }
};

State& Fake() {
  static State* const state = new State;
  return *state;
}

char contexts[kMostDevices];  // their addresses are the contexts
thread_local std::vector<CUcontext> current;

CUcontext ContextOf(int device) { return reinterpret_cast<CUcontext>(&contexts[device]); }
int DeviceOf(CUcontext context) {
  return static_cast<int>(reinterpret_cast<char*>(context) - contexts);
}

CUresult Fault(State* fake, std::string_view call) {
  if (fake->lost != CUDA_SUCCESS) return fake->lost;
  const auto it = fake->faults.find(call);
  if (it == fake->faults.end() || --it->second.first > 0) return CUDA_SUCCESS;
  const auto result = static_cast<CUresult>(it->second.second);
  fake->faults.erase(it);
  if (result >= CUDA_ERROR_ILLEGAL_ADDRESS && result < CUDA_ERROR_NOT_PERMITTED) {
    fake->lost = result;
  }
  return result;
}

// Locks the fake for a call; `result` is not CUDA_SUCCESS where it fails.
struct Call {
  explicit Call(const char* name, bool needs_context = true)
      : lock(Fake().mutex), fake(&Fake()), result((WaitWhileBlocked(name), Fault(fake, name))) {
    if (result == CUDA_SUCCESS && needs_context && current.empty()) {
      result = CUDA_ERROR_INVALID_CONTEXT;
    }
  }
  bool failed() const { return result != CUDA_SUCCESS; }
  int device() const { return DeviceOf(current.back()); }
  void WaitWhileBlocked(const char* name) {
    if (fake->blocked != name) return;
    ++fake->counts.blocked_calls;
    fake->unblocked.wait(lock, [this, name] { return fake->blocked != name; });
    --fake->counts.blocked_calls;
  }
  std::unique_lock<std::mutex> lock;
  State* fake;
  CUresult result;
};

const Range* Holding(const State& fake, uint64_t address, size_t bytes) {
  auto it = fake.ranges.upper_bound(address);
  if (it == fake.ranges.begin()) return nullptr;
  --it;
  if (address + bytes > it->first + it->second.bytes) return nullptr;
  return &it->second;
}

bool Reaches(const State& fake, int device, uint64_t address, size_t bytes) {
  const Range* const range = Holding(fake, address, bytes);
  return range != nullptr && (range->reach >> device & 1) != 0;
}

// ---- streams ----

// Runs the work of a stream that can run now; true: some work ran.
bool RunStream(State* fake, Stream* stream) {
  bool any = false;
  while (!stream->queue.empty() && (fake->held >> stream->device & 1) == 0) {
    Op& next = stream->queue.front();
    if (next.ready != nullptr && !next.ready() && fake->lost == CUDA_SUCCESS) break;
    const Op op = std::move(next);
    stream->queue.pop_front();
    any = true;
    if (fake->lost != CUDA_SUCCESS) continue;
    const CUresult result = op.run();
    if (result != CUDA_SUCCESS) fake->lost = result;
  }
  return any;
}

// Runs all streams as far as they can. Only events order them, so each time they run in the
// opposite order.
void RunQueue(State* fake) {
  std::vector<std::shared_ptr<Stream>> streams = fake->destroyed;
  for (const auto& [at, stream] : fake->streams) streams.push_back(stream);
  if (fake->backwards) std::reverse(streams.begin(), streams.end());
  fake->backwards = !fake->backwards;
  bool any = true;
  while (any) {
    any = false;
    for (const std::shared_ptr<Stream>& stream : streams) any |= RunStream(fake, stream.get());
  }
  std::erase_if(fake->destroyed, [](const auto& stream) { return stream->queue.empty(); });
}

CUresult Enqueue(Call* call, CUstream handle, std::function<CUresult()> run) {
  auto* const stream = reinterpret_cast<Stream*>(handle);
  if (call->device() != stream->device) return CUDA_ERROR_INVALID_HANDLE;
  stream->queue.push_back({nullptr, std::move(run)});
  return CUDA_SUCCESS;
}

char* At(uint64_t address) { return reinterpret_cast<char*>(address); }

// Runs a task element by element, as copy_task.h defines it. False: it leaves memory that the
// device may use.
bool RunTask(const State& fake, int device, const CopyTask& task, const CopyLaunch& launch) {
  const size_t size = task.element_bytes;
  for (uint32_t i = 0; i < task.count[0]; ++i) {
    for (uint32_t j = 0; j < task.count[1]; ++j) {
      for (uint32_t k = 0; k < task.count[2]; ++k) {
        const auto at = [&](const int64_t* step) {
          return static_cast<uint64_t>(i * step[0] + j * step[1] + k * step[2]);
        };
        const auto index = static_cast<int64_t>(task.index + at(task.index_step));
        const size_t bytes = task.run * size;
        if (task.proof != 0 && task.proof_sum != refitd::kNoSum) {
          const uint64_t proof = task.proof + at(task.source_step);
          if (!Reaches(fake, device, proof, bytes)) return false;
          launch.source_sums[task.proof_sum] +=
              refitd::ReferenceDigest(At(proof), task.element_bytes, index, task.run);
        }
        if (task.source == 0) continue;
        const uint64_t source = task.source + at(task.source_step);
        if (!Reaches(fake, device, source, bytes)) return false;
        if (task.destination != 0) {
          const uint64_t destination = task.destination + at(task.destination_step);
          if (!Reaches(fake, device, destination, bytes)) return false;
          std::memcpy(At(destination), At(source), bytes);
        }
        if (task.sum == refitd::kNoSum) continue;
        launch.stored_sums[task.sum] +=
            refitd::ReferenceDigest(At(source), task.element_bytes, index, task.run);
      }
    }
  }
  return true;
}

// Whether the device may use the memory of a task of the derive kernel.
bool ReachesAll(const State& fake, int device, const refitd::DeriveTask& task) {
  const uint64_t held_bytes = task.dtype == 2 ? 4 : 2;
  for (uint32_t block = 0; block < task.blocks; ++block) {
    for (const uint32_t row : {0U, task.rows - 1U}) {
      for (const uint32_t column : {0U, task.columns - 1U}) {
        const auto from =
            task.source + static_cast<uint64_t>(block * task.source_block + row * task.source_row +
                                                column * task.source_column);
        if (!Reaches(fake, device, from, held_bytes)) return false;
      }
    }
    if (task.destination == 0) continue;
    const auto to =
        task.destination +
        static_cast<uint64_t>(block * task.destination_block +
                              (task.window_rows - 1) * task.destination_row +
                              (int64_t{task.window_columns} - 1) * task.destination_column);
    if (!Reaches(fake, device, task.destination, 1) ||
        !Reaches(fake, device, to, task.element_bytes)) {
      return false;
    }
  }
  return true;
}

CUresult RunKernel(State* fake, int device, const CopyLaunch& launch, unsigned blocks) {
  const CUresult fault = Fault(fake, "kernel");
  if (fault != CUDA_SUCCESS) return fault;
  if (fake->idle) return CUDA_SUCCESS;
  const bool corrupt = fake->corrupt_launch > 0 && --fake->corrupt_launch == 0;
  if (!Reaches(*fake, device, reinterpret_cast<uint64_t>(launch.tasks),
               launch.task_count * sizeof(CopyTask)) ||
      !Reaches(*fake, device, reinterpret_cast<uint64_t>(launch.next_task), sizeof(uint32_t)) ||
      *launch.next_task != 0) {
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  }
  for (uint32_t i = 0; i < launch.task_count; ++i) {
    const CopyTask& task = launch.tasks[i];
    const bool reached = task.derived != 0
                             ? ReachesAll(*fake, device, std::bit_cast<refitd::DeriveTask>(task))
                             : RunTask(*fake, device, task, launch);
    if (!reached) return CUDA_ERROR_ILLEGAL_ADDRESS;
  }
  // A task of the derive kernel may do the work of those behind it, by the kernel's own code.
  for (uint32_t i = 0; i < launch.task_count; ++i) {
    if (launch.tasks[i].derived != 0) refitd::RunDerive(launch, i);
  }
  // Like the kernel, this leaves the counter beyond the last task: the next launch must reset it.
  *launch.next_task = launch.task_count + blocks;
  if (corrupt) {
    const CopyTask& task = launch.tasks[launch.task_count / 2];
    if (task.destination != 0) *At(task.destination) ^= 4;
    if (task.sum != refitd::kNoSum) launch.stored_sums[task.sum] += 4;
  }
  return CUDA_SUCCESS;
}

// ---- memory ----

char* MapBlock(const Block& block, void* fixed = nullptr) {
  void* const at = mmap(fixed, block.bytes, PROT_READ | PROT_WRITE,
                        MAP_SHARED | (fixed != nullptr ? MAP_FIXED : 0), block.fd, 0);
  return at == MAP_FAILED ? nullptr : static_cast<char*>(at);
}

// Makes a block of `bytes` over the memory of `fd`, and takes ownership of `fd`.
Block* AddBlock(State* fake, int device, int fd, size_t bytes, bool vmm) {
  auto block = std::make_unique<Block>();
  block->fd = fd;
  struct stat about = {};
  if (fd < 0 || fstat(fd, &about) != 0) return nullptr;
  block->device = device;
  block->bytes = bytes;
  block->vmm = vmm;
  block->inode = about.st_ino;
  block->exporter = MapBlock(*block);
  fake->blocks.push_back(std::move(block));
  return fake->blocks.back().get();
}

constexpr char kBlockName[] = "fake_cuda.";  // the device follows

Block* MakeBlock(State* fake, int device, size_t bytes, bool vmm) {
  const int fd = memfd_create((kBlockName + std::to_string(device)).c_str(), MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return nullptr;
  return AddBlock(fake, device, fd, bytes, vmm);
}

// The block that the fake of another process made with FakeCudaExportVmm; null: the descriptor is
// not such a block.
Block* AdoptBlock(State* fake, int fd, const struct stat& about) {
  char name[64] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  if (readlink(link.c_str(), name, sizeof(name) - 1) < 0) return nullptr;
  const std::string wanted = std::string("/memfd:") + kBlockName;
  if (std::string_view(name).substr(0, wanted.size()) != wanted) return nullptr;
  return AddBlock(fake, std::atoi(name + wanted.size()), dup(fd),
                  static_cast<size_t>(about.st_size), true);
}

// VMM handles are a block's number from 1, with this bit if the block was created here.
constexpr CUmemGenericAllocationHandle kCreated = 1ULL << 40;

Block& BlockOf(const State& fake, CUmemGenericAllocationHandle handle) {
  return *fake.blocks[(handle & ~kCreated) - 1];
}

// Lets go of the block's own mapping and descriptor. Other mappings keep the memory alive by
// themselves.
void Close(Block* block) {
  if (block->fd < 0) return;
  munmap(block->exporter, block->bytes);
  close(block->fd);
  block->fd = -1;
}

unsigned AllDevices(const State& fake) { return (1U << fake.devices) - 1; }
unsigned Reach(const State& fake, int owner) { return fake.peers ? AllDevices(fake) : 1U << owner; }

}  // namespace

extern "C" {

// ---- for tests ----

void FakeCudaFail(const char* call, int result) {
  failing_call = call;
  failing_result = result;
}

void FakeCudaFailAt(const char* call, int nth, int result) {
  const std::lock_guard lock(Fake().mutex);
  Fake().faults[call] = {nth, result};
}

void FakeCudaReset() {
  State& fake = Fake();
  const std::lock_guard lock(fake.mutex);
  for (const auto& block : fake.blocks) Close(block.get());
  failing_call = nullptr;
  fake.blocks.clear();
  fake.ranges.clear();
  for (const auto& [at, stream] : fake.streams) stream->queue.clear();
  fake.destroyed.clear();
  fake.blocked.clear();
  fake.unblocked.notify_all();
  const int blocked_calls = fake.counts.blocked_calls;  // blocked calls subtract themselves
  fake.counts = {};
  fake.small_stack = {};
  fake.counts.blocked_calls = blocked_calls;
  fake.faults.clear();
  fake.corrupt_launch = 0;
  fake.held = 0;
  fake.devices = DevicesAtFirst();
  fake.peers = true;
  fake.lost = CUDA_SUCCESS;
}

void FakeCudaHold(unsigned devices) {
  const std::lock_guard lock(Fake().mutex);
  Fake().held = devices;
}

void FakeCudaBlock(const char* call) {
  const std::lock_guard lock(Fake().mutex);
  Fake().blocked = call;
  Fake().unblocked.notify_all();
}

void FakeCudaDevices(int devices) {
  const std::lock_guard lock(Fake().mutex);
  Fake().devices = devices;
}

void FakeCudaPeers(bool reach) {
  const std::lock_guard lock(Fake().mutex);
  Fake().peers = reach;
}

void FakeCudaCorrupt(int nth) {
  const std::lock_guard lock(Fake().mutex);
  Fake().corrupt_launch = nth;
}

void FakeCudaCount(FakeCudaCounts* counts) {
  const std::lock_guard lock(Fake().mutex);
  *counts = Fake().counts;
}

int FakeCudaRun() {
  State& fake = Fake();
  const std::lock_guard lock(fake.mutex);
  RunQueue(&fake);
  int left = 0;
  for (const auto& [at, stream] : fake.streams) left += static_cast<int>(stream->queue.size());
  return left;
}

char* FakeCudaExport(int device, int64_t bytes, char* handle) {
  State& fake = Fake();
  const std::lock_guard lock(fake.mutex);
  const size_t number = fake.blocks.size();
  std::memcpy(handle, &number, sizeof(number));
  return MakeBlock(&fake, device, static_cast<size_t>(bytes), false)->exporter;
}

char* FakeCudaExportVmm(int device, int64_t bytes, int* fd) {
  State& fake = Fake();
  const std::lock_guard lock(fake.mutex);
  Block* const block = MakeBlock(&fake, device, static_cast<size_t>(bytes), true);
  *fd = dup(block->fd);
  return block->exporter;
}

void FakeCudaForget(char* exported) {
  const std::lock_guard lock(Fake().mutex);
  for (const auto& block : Fake().blocks) {
    if (block->exporter == exported) block->alive = false;
  }
}

// ---- for the fake NCCL ----

// Returns the ordinal of the current context's device; -1: no context is current.
int FakeCudaCurrentDevice() { return current.empty() ? -1 : DeviceOf(current.back()); }

int FakeCudaStreamDevice(CUstream stream) { return reinterpret_cast<Stream*>(stream)->device; }

// Whether memory of cuMemCreate is mapped at that address.
bool FakeCudaIsVmm(uint64_t address, size_t bytes) {
  const std::lock_guard lock(Fake().mutex);
  const Range* const range = Holding(Fake(), address, bytes);
  return range != nullptr && range->reserved && range->mapped;
}

// Makes a collective over a number of streams. `*put` puts its work onto one of the streams. When
// every stream has come to the collective, all copies run at once, reading the bytes from before.
// Until then streams wait, or, if `stopped` is set, go on without the copies.
void FakeCudaCollective(const refitd::FakeCudaCopy* copies, size_t count, size_t streams,
                        const std::atomic<bool>* stopped,
                        std::function<void(CUstream, bool)>* put) {
  State* const fake = &Fake();
  struct Meeting {
    std::vector<refitd::FakeCudaCopy> copies;
    size_t missing = 0;
  };
  auto meeting = std::make_shared<Meeting>();
  meeting->copies.assign(copies, copies + count);
  meeting->missing = streams;
  const auto come = [fake, meeting, stopped] {
    if (--meeting->missing > 0 || *stopped) return CUDA_SUCCESS;
    std::vector<std::string> read;
    for (const auto& copy : meeting->copies) {
      if (!Reaches(*fake, copy.from_device, copy.from, copy.bytes) ||
          !Reaches(*fake, copy.to_device, copy.to, copy.bytes)) {
        return CUDA_ERROR_ILLEGAL_ADDRESS;
      }
      read.emplace_back(At(copy.from), copy.bytes);
    }
    for (size_t i = 0; i < read.size(); ++i) {
      std::memcpy(At(meeting->copies[i].to), read[i].data(), read[i].size());
    }
    return CUDA_SUCCESS;
  };
  *put = [fake, meeting, come, stopped](CUstream on, bool waits) {
    const std::lock_guard lock(fake->mutex);
    auto& queue = reinterpret_cast<Stream*>(on)->queue;
    if (!waits) return queue.push_back({nullptr, come});
    queue.push_back({[meeting, stopped] { return meeting->missing == 0 || *stopped; },
                     [] { return CUDA_SUCCESS; }});
  };
}

// ---- the driver: devices and contexts ----

CUresult cuGetErrorString(CUresult error, const char** text) {
  switch (static_cast<int>(error)) {
    case CUDA_ERROR_NO_DEVICE:
      *text = "no CUDA-capable device is detected";
      return CUDA_SUCCESS;
    case CUDA_ERROR_OUT_OF_MEMORY:
      *text = "out of memory";
      return CUDA_SUCCESS;
    case CUDA_ERROR_INVALID_VALUE:
      *text = "invalid argument";
      return CUDA_SUCCESS;
    case CUDA_ERROR_ILLEGAL_ADDRESS:
      *text = "an illegal memory access was encountered";
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuDriverGetVersion(int* version) {
  *version = 12040;
  return Answer("cuDriverGetVersion");
}

CUresult cuInit(unsigned int /*flags*/) { return Answer("cuInit"); }

// If told to fail with 0, it succeeds, with no device.
CUresult cuDeviceGetCount(int* count) {
  const bool named =
      failing_call != nullptr && std::string_view(failing_call) == "cuDeviceGetCount";
  const std::lock_guard lock(Fake().mutex);
  *count = named ? 0 : Fake().devices;
  return Answer("cuDeviceGetCount");
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (ordinal < 0 || ordinal >= kMostDevices) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return Answer("cuDeviceGet", ordinal);
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  for (int i = 0; i < 16; ++i) uuid->bytes[i] = static_cast<char>(i * 17 + device);
  return Answer("cuDeviceGetUuid_v2", device);
}

// Fills all of `name` on device 1, without the zero at the end.
CUresult cuDeviceGetName(char* name, int bytes, CUdevice device) {
  if (device == 1) {
    std::memset(name, 'x', static_cast<size_t>(bytes));
  } else {
    std::strncpy(name, "Fake GPU", static_cast<size_t>(bytes));
  }
  return Answer("cuDeviceGetName", device);
}

CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  *bytes = size_t{80 + static_cast<size_t>(device)} << 30;
  return Answer("cuDeviceTotalMem_v2", device);
}

CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  const Call call("cuDeviceCanAccessPeer", false);
  *can = device != peer && call.fake->peers ? 1 : 0;
  return call.result;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  const Call call("cuDevicePrimaryCtxRetain", false);
  *context = ContextOf(device);
  return call.result;
}

constexpr size_t kFirstStack = 1024;  // bytes a thread

CUresult cuCtxGetLimit(size_t* value, CUlimit limit) {
  const Call call("cuCtxGetLimit");
  if (call.failed()) return call.result;
  if (limit != CU_LIMIT_STACK_SIZE) return CUDA_ERROR_UNSUPPORTED_LIMIT;
  *value = call.fake->small_stack[static_cast<size_t>(call.device())] ? 0 : kFirstStack;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
  const Call call("cuCtxSetLimit");
  if (call.failed()) return call.result;
  if (limit != CU_LIMIT_STACK_SIZE) return CUDA_ERROR_UNSUPPORTED_LIMIT;
  bool& small = call.fake->small_stack[static_cast<size_t>(call.device())];
  call.fake->counts.small_stacks += static_cast<int>(value < kFirstStack) - static_cast<int>(small);
  small = value < kFirstStack;
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
  const Call call("cuCtxPushCurrent", false);
  if (!call.failed()) current.push_back(context);
  return call.result;
}

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  if (current.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = current.back();
  current.pop_back();
  return CUDA_SUCCESS;
}

// ---- memory of others ----

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* address, CUipcMemHandle handle, unsigned flags) {
  const Call call("cuIpcOpenMemHandle");
  if (call.failed()) return call.result;
  State& fake = *call.fake;
  size_t number = 0;
  std::memcpy(&number, &handle, sizeof(number));
  if (number >= fake.blocks.size() || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const Block& block = *fake.blocks[number];
  if (block.vmm || !block.alive) return CUDA_ERROR_INVALID_VALUE;
  if (block.device != call.device() && !fake.peers) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  ++fake.counts.open_calls;
  // A context maps a block only once, and counts further opens.
  for (auto& [at, range] : fake.ranges) {
    if (range.block != &block || range.opener != current.back()) continue;
    ++range.refs;
    ++fake.counts.opened_handles;
    *address = at;
    return CUDA_SUCCESS;
  }
  char* const mapped = MapBlock(block);
  if (mapped == nullptr) return CUDA_ERROR_MAP_FAILED;
  ++fake.counts.opened_handles;
  *address = reinterpret_cast<CUdeviceptr>(mapped);
  fake.ranges[*address] = {.bytes = block.bytes,
                           .device = block.device,
                           .reach = 1U << call.device(),
                           .opener = current.back(),
                           .refs = 1,
                           .block = &block};
  return CUDA_SUCCESS;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
  const Call call("cuIpcCloseMemHandle");
  if (call.failed()) return call.result;
  const auto it = call.fake->ranges.find(address);
  if (it == call.fake->ranges.end() || it->second.opener != current.back()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  --call.fake->counts.opened_handles;
  if (--it->second.refs > 0) return CUDA_SUCCESS;
  munmap(At(address), it->second.bytes);
  call.fake->ranges.erase(it);
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
  const Call call("cuPointerGetAttribute");
  if (call.failed()) return call.result;
  const Range* const range = Holding(*call.fake, address, 1);
  if (range == nullptr || attribute != CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::memcpy(data, &range->device, sizeof(int));
  return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
  const Call call("cuMemGetAddressRange");
  if (call.failed()) return call.result;
  const auto it = call.fake->ranges.find(address);
  if (it == call.fake->ranges.end()) return CUDA_ERROR_NOT_FOUND;
  *base = it->first;
  *bytes = it->second.bytes;
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes,
                     const CUmemAllocationProp* wanted, unsigned long long /*flags*/) {
  const Call call("cuMemCreate", false);
  if (call.failed()) return call.result;
  if (bytes == 0 || bytes % kGranularity != 0 || wanted->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
      wanted->location.id >= call.fake->devices ||
      wanted->requestedHandleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Block* const block = MakeBlock(call.fake, wanted->location.id, bytes, true);
  block->handles = 1;
  // Fill new memory as if an earlier owner had left its bytes there.
  std::memset(block->exporter, 0xab, kGranularity);
  *handle = call.fake->blocks.size() | kCreated;
  ++call.fake->counts.created;
  ++call.fake->counts.allocation_calls;
  return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void* descriptor, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type,
                                      unsigned long long /*flags*/) {
  const Call call("cuMemExportToShareableHandle", false);
  if (call.failed()) return call.result;
  // The driver exports no imported memory.
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || (handle & kCreated) == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int fd = dup(BlockOf(*call.fake, handle).fd);
  std::memcpy(descriptor, &fd, sizeof(fd));
  return fd < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* descriptor,
                                        CUmemAllocationHandleType type) {
  const Call call("cuMemImportFromShareableHandle", false);
  if (call.failed()) return call.result;
  struct stat about = {};
  const auto fd = static_cast<int>(reinterpret_cast<intptr_t>(descriptor));
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || fstat(fd, &about) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (size_t i = 0; i < call.fake->blocks.size(); ++i) {
    Block& block = *call.fake->blocks[i];
    if (!block.vmm || block.fd < 0 || block.inode != about.st_ino) continue;
    *handle = i + 1;
    if (block.handles > 0) ++block.handles;
    ++call.fake->counts.imported;
    return CUDA_SUCCESS;
  }
  if (AdoptBlock(call.fake, fd, about) == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *handle = call.fake->blocks.size();
  ++call.fake->counts.imported;
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* have,
                                                CUmemGenericAllocationHandle handle) {
  const Call call("cuMemGetAllocationPropertiesFromHandle", false);
  *have = {};
  have->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  have->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  have->location.id = BlockOf(*call.fake, handle).device;
  return call.result;
}

CUresult cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* /*have*/,
                                       CUmemAllocationGranularity_flags /*option*/) {
  const Call call("cuMemGetAllocationGranularity", false);
  *granularity = kGranularity;
  return call.result;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t /*alignment*/,
                             CUdeviceptr /*wish*/, unsigned long long /*flags*/) {
  const Call call("cuMemAddressReserve", false);
  if (call.failed()) return call.result;
  void* const at =
      mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = reinterpret_cast<CUdeviceptr>(at);
  call.fake->ranges[*address] = {.bytes = bytes, .reserved = true};
  ++call.fake->counts.reserved;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  const Call call("cuMemAddressFree", false);
  if (call.failed()) return call.result;
  const auto it = call.fake->ranges.find(address);
  if (it == call.fake->ranges.end() || it->second.mapped || it->second.bytes != bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  munmap(At(address), bytes);
  call.fake->ranges.erase(it);
  --call.fake->counts.reserved;
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long /*flags*/) {
  const Call call("cuMemMap", false);
  if (call.failed()) return call.result;
  const Block& block = BlockOf(*call.fake, handle);
  const auto it = call.fake->ranges.find(address);
  if (offset != 0 || bytes != block.bytes || it == call.fake->ranges.end() ||
      it->second.bytes != bytes || MapBlock(block, At(address)) == nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  it->second.mapped = true;
  it->second.device = block.device;
  ++call.fake->counts.mapped;
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
  const Call call("cuMemUnmap", false);
  if (call.failed()) return call.result;
  const auto it = call.fake->ranges.find(address);
  if (it == call.fake->ranges.end() || !it->second.mapped || it->second.bytes != bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  it->second.mapped = false;
  it->second.reach = 0;
  --call.fake->counts.mapped;
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access,
                        size_t count) {
  const Call call("cuMemSetAccess", false);
  if (call.failed()) return call.result;
  const auto it = call.fake->ranges.find(address);
  if (it == call.fake->ranges.end() || !it->second.mapped || it->second.bytes != bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (size_t i = 0; i < count; ++i) {
    const int device = access[i].location.id;
    if ((Reach(*call.fake, it->second.device) >> device & 1) == 0) return CUDA_ERROR_INVALID_DEVICE;
    it->second.reach |= 1U << device;
    const bool writable = access[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (mprotect(At(address), bytes, PROT_READ | (writable ? PROT_WRITE : 0)) != 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  const Call call("cuMemRelease", false);
  if (call.failed()) return call.result;
  FakeCudaCounts& counts = call.fake->counts;
  --((handle & kCreated) != 0 ? counts.created : counts.imported);
  Block& block = BlockOf(*call.fake, handle);
  if (block.handles > 0 && --block.handles == 0) Close(&block);
  return CUDA_SUCCESS;
}

// ---- own memory ----

CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  const Call call("cuMemAlloc");
  if (call.failed()) return call.result;
  char* const data = call.fake->Allocate(bytes);
  std::memset(data, 0xab, bytes);
  *address = reinterpret_cast<CUdeviceptr>(data);
  call.fake->ranges[*address] = {
      .bytes = bytes, .device = call.device(), .reach = 1U << call.device()};
  ++call.fake->counts.allocations;
  ++call.fake->counts.allocation_calls;
  return CUDA_SUCCESS;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
  const Call call("cuMemFree");
  if (call.failed()) return call.result;
  if (call.fake->ranges.erase(address) == 0) return CUDA_ERROR_INVALID_VALUE;
  call.fake->memory.erase(At(address));
  --call.fake->counts.allocations;
  return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void** data, size_t bytes, unsigned /*flags*/) {
  const Call call("cuMemHostAlloc");
  if (call.failed()) return call.result;
  *data = call.fake->Allocate(bytes);
  call.fake->ranges[reinterpret_cast<uintptr_t>(*data)] = {
      .bytes = bytes, .reach = AllDevices(*call.fake), .pinned = true};
  ++call.fake->counts.host_allocations;
  ++call.fake->counts.allocation_calls;
  return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void* data) {
  const Call call("cuMemFreeHost");
  if (call.failed()) return call.result;
  if (call.fake->ranges.erase(reinterpret_cast<uintptr_t>(data)) == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  call.fake->memory.erase(static_cast<char*>(data));
  --call.fake->counts.host_allocations;
  return CUDA_SUCCESS;
}

CUresult cuMemHostRegister_v2(void* data, size_t bytes, unsigned flags) {
  const Call call("cuMemHostRegister");
  if (call.failed()) return call.result;
  // Without both flags other contexts and kernels can't use the memory.
  if (flags != (CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto [it, is_new] = call.fake->ranges.try_emplace(reinterpret_cast<uintptr_t>(data));
  if (!is_new) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  it->second = {.bytes = bytes, .reach = AllDevices(*call.fake), .pinned = true};
  ++call.fake->counts.host_registered;
  return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void* data) {
  const Call call("cuMemHostUnregister");
  if (call.failed()) return call.result;
  if (call.fake->ranges.erase(reinterpret_cast<uintptr_t>(data)) == 0) {
    return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  }
  --call.fake->counts.host_registered;
  return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* address, void* data, unsigned /*flags*/) {
  const Call call("cuMemHostGetDevicePointer");
  if (call.failed()) return call.result;
  *address = reinterpret_cast<CUdeviceptr>(data);
  return Holding(*call.fake, *address, 1) != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// ---- streams ----

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  Call call("cuMemcpyHtoDAsync");
  if (call.failed()) return call.result;
  State* const fake = call.fake;
  const int device = call.device();
  // Pageable memory is staged before the call returns.
  auto staged = std::make_shared<std::string>();
  const Range* const range = Holding(*fake, reinterpret_cast<uintptr_t>(from), bytes);
  const bool pinned = range != nullptr && range->pinned;
  if (!pinned) staged->assign(static_cast<const char*>(from), bytes);
  return Enqueue(&call, stream, [fake, device, to, from, bytes, pinned, staged] {
    const void* const source = pinned ? from : staged->data();
    if (!Reaches(*fake, device, to, bytes)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    std::memcpy(At(to), source, bytes);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  Call call("cuMemcpyDtoHAsync");
  if (call.failed()) return call.result;
  State* const fake = call.fake;
  const int device = call.device();
  return Enqueue(&call, stream, [fake, device, to, from, bytes] {
    if (!Reaches(*fake, device, from, bytes) ||
        Holding(*fake, reinterpret_cast<uintptr_t>(to), bytes) == nullptr) {
      return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    std::memcpy(to, At(from), bytes);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  Call call("cuMemcpyDtoDAsync");
  if (call.failed()) return call.result;
  State* const fake = call.fake;
  const int device = call.device();
  return Enqueue(&call, stream, [fake, device, to, from, bytes] {
    if (!Reaches(*fake, device, from, bytes) || !Reaches(*fake, device, to, bytes)) {
      return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    std::memcpy(At(to), At(from), bytes);
    return CUDA_SUCCESS;
  });
}

// The copies of a batch have no order; the fake runs them from the last to the first.
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* to, CUdeviceptr* from, size_t* bytes, size_t count,
                               CUmemcpyAttributes* attributes, size_t* attributes_from,
                               size_t attribute_count, CUstream stream) {
  Call call("cuMemcpyBatchAsync");
  if (call.failed()) return call.result;
  if (count == 0 || stream == nullptr || attribute_count != 1 || attributes_from[0] != 0 ||
      attributes[0].srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  State* const fake = call.fake;
  const int device = call.device();
  for (size_t i = count; i-- > 0;) {
    const CUresult queued =
        Enqueue(&call, stream, [fake, device, to = to[i], from = from[i], bytes = bytes[i]] {
          if (!Reaches(*fake, device, from, bytes) || !Reaches(*fake, device, to, bytes)) {
            return CUDA_ERROR_ILLEGAL_ADDRESS;
          }
          std::memcpy(At(to), At(from), bytes);
          ++fake->counts.engine_copies;
          return CUDA_SUCCESS;
        });
    if (queued != CUDA_SUCCESS) return queued;
  }
  return CUDA_SUCCESS;
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
  Call call("cuMemsetD8Async");
  if (call.failed()) return call.result;
  State* const fake = call.fake;
  const int device = call.device();
  return Enqueue(&call, stream, [fake, device, to, value, bytes] {
    if (!Reaches(*fake, device, to, bytes)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    std::memset(At(to), value, bytes);
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  const Call call("cuStreamCreate");
  if (call.failed()) return call.result;
  if (flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  *stream = reinterpret_cast<CUstream>(State::Keep(&call.fake->streams, {call.device(), {}}));
  ++call.fake->counts.streams;
  return CUDA_SUCCESS;
}

CUresult cuStreamDestroy_v2(CUstream stream) {
  const Call call("cuStreamDestroy");
  if (call.failed()) return call.result;
  const auto it = call.fake->streams.find(reinterpret_cast<Stream*>(stream));
  if (it == call.fake->streams.end()) return CUDA_ERROR_INVALID_HANDLE;
  if (!it->second->queue.empty()) call.fake->destroyed.push_back(it->second);
  call.fake->streams.erase(it);
  --call.fake->counts.streams;
  return CUDA_SUCCESS;
}

// Waits for the last record before this call, as the driver does; without a record it does not
// wait.
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned /*flags*/) {
  const Call call("cuStreamWaitEvent");
  if (call.failed()) return call.result;
  const auto it = call.fake->events.find(reinterpret_cast<Event*>(event));
  if (it == call.fake->events.end()) return CUDA_ERROR_INVALID_HANDLE;
  reinterpret_cast<Stream*>(stream)->queue.push_back(
      {[waited = it->second, record = it->second->recorded] { return waited->reached >= record; },
       [] { return CUDA_SUCCESS; }});
  return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream stream) {
  const Call call("cuStreamQuery");
  if (call.failed()) return call.result;
  const auto it = call.fake->streams.find(reinterpret_cast<Stream*>(stream));
  if (it == call.fake->streams.end()) return CUDA_ERROR_INVALID_HANDLE;
  RunQueue(call.fake);
  if (call.fake->lost != CUDA_SUCCESS) return call.fake->lost;
  return it->second->queue.empty() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

// Does not wait for stopped devices.
CUresult cuStreamSynchronize(CUstream /*stream*/) {
  const Call call("cuStreamSynchronize");
  if (call.failed()) return call.result;
  RunQueue(call.fake);
  return call.fake->lost;
}

CUresult cuEventCreate(CUevent* event, unsigned /*flags*/) {
  const Call call("cuEventCreate");
  if (call.failed()) return call.result;
  *event = reinterpret_cast<CUevent>(State::Keep(&call.fake->events, {}));
  ++call.fake->counts.events;
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event) {
  const Call call("cuEventDestroy");
  if (call.failed()) return call.result;
  call.fake->events.erase(reinterpret_cast<Event*>(event));
  --call.fake->counts.events;
  return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  Call call("cuEventRecord");
  if (call.failed()) return call.result;
  const auto it = call.fake->events.find(reinterpret_cast<Event*>(event));
  if (it == call.fake->events.end()) return CUDA_ERROR_INVALID_HANDLE;
  const std::shared_ptr<Event> recorded = it->second;
  const uint64_t record = recorded->recorded + 1;
  const CUresult queued = Enqueue(&call, stream, [recorded, record] {
    recorded->reached = record;
    return CUDA_SUCCESS;
  });
  if (queued == CUDA_SUCCESS) recorded->recorded = record;
  return queued;
}

CUresult cuEventQuery(CUevent event) {
  const Call call("cuEventQuery");
  if (call.failed()) return call.result;
  RunQueue(call.fake);
  if (call.fake->lost != CUDA_SUCCESS) return call.fake->lost;
  const auto* const queried = reinterpret_cast<Event*>(event);
  return queried->reached == queried->recorded ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

// ---- the kernel ----

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  const Call call("cuModuleLoadData");
  if (call.failed()) return call.result;
  if (image == nullptr) return CUDA_ERROR_INVALID_IMAGE;
  *module = reinterpret_cast<CUmodule>(&contexts[call.device()]);
  ++call.fake->counts.modules;
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule /*module*/) {
  const Call call("cuModuleUnload");
  if (!call.failed()) --call.fake->counts.modules;
  return call.result;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  const Call call("cuModuleGetFunction");
  if (call.failed()) return call.result;
  const auto& names = refitd::kCopyKernelNames;
  if (std::find(names.begin(), names.end(), std::string_view(name)) == names.end()) {
    return CUDA_ERROR_NOT_FOUND;
  }
  *function = reinterpret_cast<CUfunction>(module);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction /*function*/, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                        CUstream stream, void** parameters, void** extra) {
  Call call("cuLaunchKernel");
  if (call.failed()) return call.result;
  if (grid_x == 0 || grid_y != 1 || grid_z != 1 || (block_x != 256 && block_x != 512) ||
      block_y != 1 || block_z != 1 || shared != 0 || extra != nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  FakeCudaCounts& counts = call.fake->counts;
  ++counts.launch_calls;
  if (counts.largest_grid < static_cast<int>(grid_x))
    counts.largest_grid = static_cast<int>(grid_x);
  CopyLaunch launch;
  std::memcpy(&launch, parameters[0], sizeof(launch));
  State* const fake = call.fake;
  const int device = call.device();
  return Enqueue(&call, stream, [fake, device, launch, grid_x] {
    return RunKernel(fake, device, launch, grid_x);
  });
}

}  // extern "C"
#endif
