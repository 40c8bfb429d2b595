#include "tests/gpu/stores.h"
#include "transport/base/status.h"

#if defined(REFITD_CUDA)
#include <cuda.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <map>

#include "tests/gpu/fill.h"
#include "transport/base/unique_fd.h"

namespace refitd::gpu {
namespace {

// The driver calls of a client of refitd. The daemon's table (transport/cuda/api.h) lacks some of
// them, since a client makes memory and exports it.
#define REFITD_GPU_CALLS(V)                                         \
  V(cuGetErrorString, "cuGetErrorString")                           \
  V(cuInit, "cuInit")                                               \
  V(cuDeviceGet, "cuDeviceGet")                                     \
  V(cuDeviceGetUuid, "cuDeviceGetUuid_v2")                          \
  V(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain")           \
  V(cuCtxSetCurrent, "cuCtxSetCurrent")                             \
  V(cuMemAlloc, "cuMemAlloc_v2")                                    \
  V(cuMemFree, "cuMemFree_v2")                                      \
  V(cuMemGetInfo, "cuMemGetInfo_v2")                                \
  V(cuIpcGetMemHandle, "cuIpcGetMemHandle")                         \
  V(cuMemCreate, "cuMemCreate")                                     \
  V(cuMemRelease, "cuMemRelease")                                   \
  V(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity") \
  V(cuMemAddressReserve, "cuMemAddressReserve")                     \
  V(cuMemAddressFree, "cuMemAddressFree")                           \
  V(cuMemMap, "cuMemMap")                                           \
  V(cuMemUnmap, "cuMemUnmap")                                       \
  V(cuMemSetAccess, "cuMemSetAccess")                               \
  V(cuMemExportToShareableHandle, "cuMemExportToShareableHandle")   \
  V(cuMemcpyHtoD, "cuMemcpyHtoD_v2")                                \
  V(cuMemcpyDtoH, "cuMemcpyDtoH_v2")                                \
  V(cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2")                      \
  V(cuMemsetD8Async, "cuMemsetD8Async")                             \
  V(cuStreamCreate, "cuStreamCreate")                               \
  V(cuStreamSynchronize, "cuStreamSynchronize")                     \
  V(cuModuleLoadData, "cuModuleLoadData")                           \
  V(cuModuleGetFunction, "cuModuleGetFunction")                     \
  V(cuLaunchKernel, "cuLaunchKernel")

struct Driver {
#define REFITD_GPU_MEMBER(call, symbol) decltype(&::call) call = nullptr;
  REFITD_GPU_CALLS(REFITD_GPU_MEMBER)
#undef REFITD_GPU_MEMBER

  absl::Status Check(std::string_view call, CUresult result) const {
    if (result == CUDA_SUCCESS) return absl::OkStatus();
    const char* text = nullptr;
    (void)cuGetErrorString(result, &text);
    return Error(absl::StatusCode::kInternal, "{}: {} (error {})", call,
                 text == nullptr ? "unknown" : text, static_cast<int>(result));
  }
};

absl::StatusOr<Driver> LoadDriver() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == nullptr) return absl::UnavailableError(dlerror());
  Driver driver;
#define REFITD_GPU_FIND(call, symbol)                                            \
  driver.call = reinterpret_cast<decltype(driver.call)>(dlsym(library, symbol)); \
  if (driver.call == nullptr) return absl::UnavailableError("the driver lacks " symbol);
  REFITD_GPU_CALLS(REFITD_GPU_FIND)
#undef REFITD_GPU_FIND
  return driver;
}

#define REFITD_GPU(call, ...) \
  REFITD_RETURN_IF_ERROR(driver_.Check(#call, driver_.call(__VA_ARGS__)))

std::string UuidText(const CUuuid& uuid) {
  std::string text = "GPU";
  for (size_t i = 0; i < sizeof uuid.bytes; ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += fmt::format("{:02x}", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return text;
}

constexpr int64_t kGranularity = int64_t{2} << 20;
constexpr unsigned kBlocks = 2048;
constexpr unsigned kThreads = 256;

struct Block {
  CUdeviceptr address = 0;
  int64_t bytes = 0;
  CUmemGenericAllocationHandle handle = 0;
  UniqueFd descriptor;
};

class CudaStore final : public Store {
 public:
  CudaStore(MemoryKind kind, int device) : kind_(kind), device_(device) {}

  absl::Status Init() {
    REFITD_ASSIGN_OR_RETURN(driver_, LoadDriver());
    if (const CUresult result = driver_.cuInit(0); result != CUDA_SUCCESS) {
      return absl::UnavailableError(driver_.Check("cuInit", result).message());
    }
    CUdevice device = 0;
    REFITD_GPU(cuDeviceGet, &device, device_);
    CUuuid uuid{};
    REFITD_GPU(cuDeviceGetUuid, &uuid, device);
    name_ = UuidText(uuid);
    REFITD_GPU(cuDevicePrimaryCtxRetain, &context_, device);
    REFITD_GPU(cuCtxSetCurrent, context_);
    REFITD_GPU(cuStreamCreate, &stream_, CU_STREAM_NON_BLOCKING);
    REFITD_RETURN_IF_ERROR(LoadKernels());
    REFITD_GPU(cuMemAlloc, &wrong_, sizeof(Wrong));
    return absl::OkStatus();
  }

  // Frees nothing: device memory is freed at the process's end.
  ~CudaStore() override = default;

  const std::string& device_name() const override { return name_; }

  absl::Status AddBlock(int64_t bytes) override {
    REFITD_RETURN_IF_ERROR(Current());
    Block block;
    block.bytes = (bytes + kGranularity - 1) / kGranularity * kGranularity;
    if (kind_ == MemoryKind::kLegacy) {
      REFITD_GPU(cuMemAlloc, &block.address, static_cast<size_t>(block.bytes));
    } else {
      REFITD_RETURN_IF_ERROR(MapNew(&block));
    }
    blocks_.push_back(std::move(block));
    return absl::OkStatus();
  }

  absl::StatusOr<Export> ExportBlock(size_t index) override {
    REFITD_RETURN_IF_ERROR(Current());
    const Block& block = blocks_[index];
    Export exported;
    exported.bytes = block.bytes;
    if (kind_ == MemoryKind::kLegacy) {
      CUipcMemHandle handle{};
      REFITD_GPU(cuIpcGetMemHandle, &handle, block.address);
      exported.ipc_handle.assign(handle.reserved, sizeof handle.reserved);
    } else {
      exported.descriptor = block.descriptor.get();
      exported.address = block.address;
    }
    return exported;
  }

  void Adopt(char* data, int64_t bytes) override {
    Block block;
    block.address = reinterpret_cast<CUdeviceptr>(data);
    block.bytes = bytes;
    blocks_.push_back(std::move(block));
  }

  absl::Status SetLayout(const Layout& layout, const std::vector<std::string>& names) override {
    REFITD_RETURN_IF_ERROR(Current());
    std::vector<uint64_t> addresses;
    for (const Block& block : blocks_) addresses.push_back(block.address);
    REFITD_ASSIGN_OR_RETURN(tasks_, MakeTasks(layout, addresses));
    names_ = names;
    by_tensor_.clear();
    for (size_t t = 0; t < tasks_.tasks.size(); ++t) {
      by_tensor_.emplace(tasks_.tasks[t].tensor_hash, t);
    }
    REFITD_RETURN_IF_ERROR(Upload(tasks_.tasks, &task_table_));
    return Upload(tasks_.chunks, &chunk_table_);
  }

  absl::Status Spin(int64_t milliseconds) override {
    REFITD_RETURN_IF_ERROR(Current());
    uint64_t nanoseconds = static_cast<uint64_t>(milliseconds) * 1'000'000;
    void* arguments[] = {&nanoseconds};
    REFITD_GPU(cuLaunchKernel, spin_, 1, 1, 1, 1, 1, 1, 0, stream_, arguments, nullptr);
    return absl::OkStatus();
  }

  absl::Status Fill(int64_t version, uint64_t seed, int block) override {
    return Launch(fill_, block, Salt(static_cast<uint64_t>(version), seed), nullptr);
  }

  absl::Status Load(uint64_t tensor_hash, int64_t start, int64_t count, const char* from) override {
    REFITD_RETURN_IF_ERROR(Current());
    const auto [first, end] = by_tensor_.equal_range(tensor_hash);
    for (auto task = first; task != end; ++task) {
      const size_t chunk = tasks_.chunk_of_task[task->second];
      uint64_t chunks = tasks_.chunk_of_task[task->second + 1] - chunk;
      if (chunks == 0) continue;
      const Task& piece = tasks_.tasks[task->second];
      if (IsOneRun(piece)) {
        REFITD_RETURN_IF_ERROR(LoadRun(piece, start, count, from));
        continue;
      }
      CUdeviceptr table = chunk_table_ + chunk * sizeof(Chunk);
      auto source = reinterpret_cast<uint64_t>(from);
      void* arguments[] = {&task_table_, &table, &chunks, &source, &start, &count};
      REFITD_GPU(cuLaunchKernel, load_, GridOf(chunks), 1, 1, kThreads, 1, 1, 0, stream_, arguments,
                 nullptr);
    }
    return absl::OkStatus();
  }

  absl::Status CopyOut(size_t block, int64_t byte_offset, int64_t bytes, char* to) override {
    REFITD_RETURN_IF_ERROR(Current());
    REFITD_GPU(cuMemcpyDtoDAsync, reinterpret_cast<CUdeviceptr>(to),
               blocks_[block].address + static_cast<CUdeviceptr>(byte_offset),
               static_cast<size_t>(bytes), stream_);
    return absl::OkStatus();
  }

  absl::Status PoisonPieces(int block) override {
    return Launch(poison_, block, uint64_t{kPoison}, nullptr);
  }

  absl::Status PoisonAll() override {
    REFITD_RETURN_IF_ERROR(Current());
    for (const Block& block : blocks_) {
      REFITD_GPU(cuMemsetD8Async, block.address, kPoison, static_cast<size_t>(block.bytes),
                 stream_);
    }
    return absl::OkStatus();
  }

  absl::Status Synchronise() override {
    REFITD_RETURN_IF_ERROR(Current());
    REFITD_GPU(cuStreamSynchronize, stream_);
    return absl::OkStatus();
  }

  absl::StatusOr<WrongElements> Check(int64_t version, uint64_t seed) override {
    REFITD_RETURN_IF_ERROR(ResetWrong());
    REFITD_RETURN_IF_ERROR(Launch(check_, -1, Salt(static_cast<uint64_t>(version), seed), &wrong_));
    REFITD_ASSIGN_OR_RETURN(const Wrong wrong, TakeWrong());
    return WrongElements{static_cast<int64_t>(wrong.count), PlaceInWords(names_, wrong)};
  }

  absl::StatusOr<int64_t> CountUnpoisoned() override {
    REFITD_RETURN_IF_ERROR(ResetWrong());
    for (const Block& block : blocks_) {
      uint64_t address = block.address;
      uint64_t bytes = static_cast<uint64_t>(block.bytes);
      uint64_t byte = kPoison;
      void* arguments[] = {&address, &bytes, &byte, &wrong_};
      REFITD_GPU(cuLaunchKernel, count_other_, kBlocks, 1, 1, kThreads, 1, 1, 0, stream_, arguments,
                 nullptr);
    }
    REFITD_ASSIGN_OR_RETURN(const Wrong wrong, TakeWrong());
    return static_cast<int64_t>(wrong.count);
  }

  absl::StatusOr<DeviceMemory> Memory() override {
    REFITD_RETURN_IF_ERROR(Current());
    size_t free = 0;
    size_t total = 0;
    REFITD_GPU(cuMemGetInfo, &free, &total);
    return DeviceMemory{static_cast<int64_t>(free), static_cast<int64_t>(total)};
  }

 private:
  // Makes the context current, since calls come from any thread of the rank.
  absl::Status Current() {
    REFITD_GPU(cuCtxSetCurrent, context_);
    return absl::OkStatus();
  }

  // Whether the elements follow one another in the tensor and in memory. Most pieces do, and an
  // engine's own loader would also copy them as one run.
  static bool IsOneRun(const Task& piece) {
    return piece.dims == 0 ||
           (piece.dims == 1 && piece.stride[0] == 1 && piece.global_stride[0] == 1);
  }

  absl::Status LoadRun(const Task& piece, int64_t start, int64_t count, const char* from) {
    const int64_t first = std::max(start, piece.first_index);
    const int64_t end = std::min(start + count, piece.first_index + piece.elements);
    if (first >= end) return absl::OkStatus();
    const auto bytes_of = [&](int64_t elements) {
      return static_cast<uint64_t>(elements * piece.element_bytes);
    };
    REFITD_GPU(cuMemcpyDtoDAsync, piece.address + bytes_of(first - piece.first_index),
               reinterpret_cast<CUdeviceptr>(from) + bytes_of(first - start), bytes_of(end - first),
               stream_);
    return absl::OkStatus();
  }

  absl::Status LoadKernels() {
    const std::string_view image = FillImage();
    if (image.empty()) return absl::UnavailableError("built without nvcc: no kernels");
    CUmodule module = nullptr;
    REFITD_GPU(cuModuleLoadData, &module, image.data());
    REFITD_GPU(cuModuleGetFunction, &fill_, module, "Fill");
    REFITD_GPU(cuModuleGetFunction, &load_, module, "Load");
    REFITD_GPU(cuModuleGetFunction, &poison_, module, "Poison");
    REFITD_GPU(cuModuleGetFunction, &check_, module, "Check");
    REFITD_GPU(cuModuleGetFunction, &count_other_, module, "CountOther");
    REFITD_GPU(cuModuleGetFunction, &spin_, module, "Spin");
    return absl::OkStatus();
  }

  absl::Status MapNew(Block* block) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device_;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    const size_t bytes = static_cast<size_t>(block->bytes);
    REFITD_GPU(cuMemCreate, &block->handle, bytes, &properties, 0);
    REFITD_GPU(cuMemAddressReserve, &block->address, bytes, 0, 0, 0);
    REFITD_GPU(cuMemMap, block->address, bytes, 0, block->handle, 0);
    CUmemAccessDesc access{};
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    REFITD_GPU(cuMemSetAccess, block->address, bytes, &access, 1);
    int descriptor = -1;
    REFITD_GPU(cuMemExportToShareableHandle, &descriptor, block->handle,
               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    block->descriptor = UniqueFd(descriptor);
    return absl::OkStatus();
  }

  template <typename T>
  absl::Status Upload(const std::vector<T>& values, CUdeviceptr* table) {
    if (*table != 0) REFITD_GPU(cuMemFree, *table);
    *table = 0;
    if (values.empty()) return absl::OkStatus();
    REFITD_GPU(cuMemAlloc, table, values.size() * sizeof(T));
    REFITD_GPU(cuMemcpyHtoD, *table, values.data(), values.size() * sizeof(T));
    return absl::OkStatus();
  }

  static unsigned GridOf(uint64_t chunks) {
    return static_cast<unsigned>(std::min<uint64_t>(chunks, kBlocks));
  }

  // A kernel over the chunks of a block or of all; `extra` is its last argument if not null.
  absl::Status Launch(CUfunction kernel, int block, uint64_t value, CUdeviceptr* extra) {
    REFITD_RETURN_IF_ERROR(Current());
    const size_t begin = block < 0 ? 0 : tasks_.first_chunk[static_cast<size_t>(block)];
    const size_t end =
        block < 0 ? tasks_.chunks.size() : tasks_.first_chunk[static_cast<size_t>(block) + 1];
    uint64_t count = end - begin;
    if (count == 0) return absl::OkStatus();
    CUdeviceptr chunks = chunk_table_ + begin * sizeof(Chunk);
    void* arguments[] = {&task_table_, &chunks, &count, &value, extra};
    REFITD_GPU(cuLaunchKernel, kernel, GridOf(count), 1, 1, kThreads, 1, 1, 0, stream_, arguments,
               nullptr);
    return absl::OkStatus();
  }

  absl::Status ResetWrong() {
    REFITD_RETURN_IF_ERROR(Synchronise());
    const Wrong none;
    REFITD_GPU(cuMemcpyHtoD, wrong_, &none, sizeof none);
    return absl::OkStatus();
  }

  absl::StatusOr<Wrong> TakeWrong() {
    REFITD_RETURN_IF_ERROR(Synchronise());
    Wrong wrong;
    REFITD_GPU(cuMemcpyDtoH, &wrong, wrong_, sizeof wrong);
    return wrong;
  }

  const MemoryKind kind_;
  const int device_;
  Driver driver_;
  std::string name_;
  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
  CUfunction fill_ = nullptr;
  CUfunction load_ = nullptr;
  CUfunction poison_ = nullptr;
  CUfunction check_ = nullptr;
  CUfunction count_other_ = nullptr;
  CUfunction spin_ = nullptr;
  std::vector<Block> blocks_;
  std::vector<std::string> names_;
  Tasks tasks_;
  std::multimap<uint64_t, size_t> by_tensor_;  // TensorHash: tasks
  CUdeviceptr task_table_ = 0;
  CUdeviceptr chunk_table_ = 0;
  CUdeviceptr wrong_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Store>> NewCudaStore(MemoryKind kind, int device) {
  auto store = std::make_unique<CudaStore>(kind, device);
  REFITD_RETURN_IF_ERROR(store->Init());
  return store;
}

}  // namespace refitd::gpu

#else

namespace refitd::gpu {

absl::StatusOr<std::unique_ptr<Store>> NewCudaStore(MemoryKind, int) {
  return absl::UnavailableError("built without CUDA");
}

}  // namespace refitd::gpu

#endif  // REFITD_CUDA
