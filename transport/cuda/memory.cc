#include "transport/cuda/memory.h"

#include "transport/base/failure.h"
#include "transport/base/status.h"

#if defined(REFITD_CUDA)
#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <thread>
#include <utility>
#include <vector>

#include "transport/base/errors.h"
#include "transport/base/mutex.h"
#include "transport/cuda/host_sides.h"
#include "transport/cuda/lost_context.h"
#include "transport/cuda/watched_driver.h"
#endif

namespace refitd {

#if defined(REFITD_CUDA)
namespace {

char* Pointer(CUdeviceptr address) { return reinterpret_cast<char*>(address); }

// Turns `status` into the refusal of a member's memory: FAILED_PRECONDITION, unless the device
// itself is the problem.
absl::Status Refused(const absl::Status& status, std::string_view what) {
  if (status.ok() || IsLost(status)) return status;
  const bool full = status.code() == absl::StatusCode::kResourceExhausted;
  return Error(full ? status.code() : absl::StatusCode::kFailedPrecondition, "{}: {}", what,
               Message(status));
}

// Open regions by address. Lives as long as there are regions, even after the Memory was destroyed.
//
// Entries keep no region alive: Find locks the weak pointer, which fails once the last shared_ptr
// was dropped, so that a region that is being closed is never given out. Several regions may have
// one address: a block may come with two handles, and the driver may reuse an address while the
// region that had it is being destroyed.
class RegionIndex {
 public:
  void Add(const std::shared_ptr<const DeviceRegion>& region) {
    const std::unique_lock lock(mutex_);
    by_address_[region->data()].push_back({region, region.get(), region->bytes()});
  }

  // Called while `region` is being destroyed.
  void Remove(const DeviceRegion* region) {
    const std::unique_lock lock(mutex_);
    const auto it = by_address_.find(region->data());
    if (it == by_address_.end()) return;
    std::erase_if(it->second, [region](const Entry& entry) { return entry.raw == region; });
    if (it->second.empty()) by_address_.erase(it);
  }

  std::shared_ptr<const DeviceRegion> Find(const char* data, int64_t bytes) const {
    const std::shared_lock lock(mutex_);
    auto it = by_address_.upper_bound(data);
    if (it == by_address_.begin()) return nullptr;
    --it;
    const int64_t offset = data - it->first;
    for (const Entry& entry : it->second) {
      if (bytes < 0 || offset > entry.bytes || bytes > entry.bytes - offset) continue;
      // If this is the last reference, the caller drops it, and not under mutex_.
      if (auto region = entry.region.lock(); region != nullptr) return region;
    }
    return nullptr;
  }

 private:
  struct Entry {
    std::weak_ptr<const DeviceRegion> region;
    const DeviceRegion* raw = nullptr;
    int64_t bytes = 0;
  };
  // Read for every piece, but written only once per registration, hence a shared mutex; Mutex
  // (base/mutex.h) has no shared mode.
  mutable std::shared_mutex mutex_;
  std::map<const char*, std::vector<Entry>> by_address_;  // guarded by mutex_
};

// ---- legacy IPC ----

// An IPC handle that was opened in one device's context, and its address there.
struct Opened {
  CUcontext context = nullptr;
  CUdeviceptr address = 0;
};

absl::StatusOr<Opened> OpenHandle(const WatchedDriver& driver, int device,
                                  const CUipcMemHandle& handle) {
  const CallWatch::Call call(driver.calls.get(), device, "opening a CUDA IPC handle");
  Opened opened;
  REFITD_ASSIGN_OR_RETURN(opened.context, driver.contexts->Get(device));
  const ScopedContext current(driver.api(), opened.context);
  REFITD_RETURN_IF_ERROR(current.status());
  REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(driver.api(), cuIpcOpenMemHandle, &opened.address, handle,
                                          CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  return opened;
}

// Ignores an error of closing: nobody waits for its status, and the context is lost then anyway.
void CloseHandle(const WatchedDriver& driver, int device, const Opened& opened) {
  const CallWatch::Call call(driver.calls.get(), device, "closing a CUDA IPC handle");
  const ScopedContext current(driver.api(), opened.context);
  if (current.status().ok()) (void)driver.api().cuIpcCloseMemHandle(opened.address);
}

// The size of an opened block, after checking that it lies on `device`.
absl::StatusOr<int64_t> BlockBytes(const WatchedDriver& driver, int device, const Opened& opened) {
  const CallWatch::Call call(driver.calls.get(), device, "asking for the size of a block");
  const CudaApi& api = driver.api();
  const ScopedContext current(api, opened.context);
  REFITD_RETURN_IF_ERROR(current.status());
  int owner = -1;
  REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api, cuPointerGetAttribute, &owner,
                                          CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, opened.address));
  if (owner != device) {
    return Error(absl::StatusCode::kFailedPrecondition, "it lies on device {}, not on device {}",
                 owner, device);
  }
  CUdeviceptr base = 0;
  size_t bytes = 0;
  REFITD_RETURN_IF_ERROR(
      REFITD_CUDA_CALL(api, cuMemGetAddressRange, &base, &bytes, opened.address));
  return static_cast<int64_t>(base + bytes - opened.address);
}

class LegacyRegion final : public DeviceRegion {
 public:
  LegacyRegion(WatchedDriver driver, std::shared_ptr<RegionIndex> index, int device,
               const CUipcMemHandle& handle, const Opened& opened, int64_t bytes)
      : DeviceRegion(device, Pointer(opened.address), bytes),
        driver_(std::move(driver)),
        index_(std::move(index)),
        handle_(handle),
        opened_(opened) {}

  // P6: nothing holds the region any more, so no copy uses it.
  ~LegacyRegion() override {
    index_->Remove(this);
    for (const auto& [on, opened] : others_) CloseHandle(driver_, on, opened);
    CloseHandle(driver_, device(), opened_);
  }

  absl::StatusOr<char*> On(int on) const override {
    if (on == device()) return data();
    MutexLock lock(&mutex_);
    const auto it = others_.find(on);
    if (it != others_.end()) return Pointer(it->second.address);
    absl::StatusOr<Opened> opened = OpenOn(on);
    if (!opened.ok()) {
      if (IsLost(opened.status())) return opened.status();
      return Error(absl::StatusCode::kUnavailable, "device {} can't reach memory of device {}: {}",
                   on, device(), Message(opened.status()));
    }
    others_[on] = *opened;
    return Pointer(opened->address);
  }

 private:
  absl::StatusOr<Opened> OpenOn(int on) const {
    REFITD_ASSIGN_OR_RETURN(const bool can, driver_.contexts->CanReach(on, device()));
    if (!can) return absl::UnavailableError("the driver sees no peer access between them");
    return OpenHandle(driver_, on, handle_);
  }

  const WatchedDriver driver_;
  const std::shared_ptr<RegionIndex> index_;
  const CUipcMemHandle handle_;
  const Opened opened_;  // opened with its own device current
  mutable Mutex mutex_;  // held while opening, so that each device opens the handle once
  mutable std::map<int, Opened> others_ ABSL_GUARDED_BY(mutex_);
};

// ---- VMM ----

// New memory of cuMemCreate that can be exported as a descriptor.
struct Allocation {
  CUmemGenericAllocationHandle handle = 0;
  int64_t bytes = 0;  // a multiple of `granularity`
  size_t granularity = 0;
};

// A context of the device must be current.
absl::StatusOr<Allocation> Allocate(const CudaApi& api, int device, int64_t bytes) {
  const CUmemAllocationProp wanted = PinnedMemoryOf(device);
  Allocation made;
  REFITD_ASSIGN_OR_RETURN(const int64_t unit, api.Granularity(wanted));
  made.granularity = static_cast<size_t>(unit);
  made.bytes = (bytes + unit - 1) / unit * unit;
  REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api, cuMemCreate, &made.handle,
                                          static_cast<size_t>(made.bytes), &wanted, 0));
  return made;
}

absl::StatusOr<UniqueFd> Export(const CudaApi& api, CUmemGenericAllocationHandle handle) {
  int exported = -1;
  REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api, cuMemExportToShareableHandle, &exported, handle,
                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  UniqueFd fd(exported);
  // Child processes must not inherit the descriptor.
  if (fcntl(fd.get(), F_SETFD, FD_CLOEXEC) != 0) return ErrnoError(errno, "FD_CLOEXEC");
  return fd;
}

absl::StatusOr<CUmemGenericAllocationHandle> ImportHandle(const CudaApi& api, const UniqueFd& fd) {
  CUmemGenericAllocationHandle handle = 0;
  const absl::Status imported =
      REFITD_CUDA_CALL(api, cuMemImportFromShareableHandle, &handle,
                       reinterpret_cast<void*>(static_cast<intptr_t>(fd.get())),
                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  REFITD_RETURN_IF_ERROR(Refused(imported, "the driver refuses the descriptor"));
  return handle;
}

// The granularity of imported memory. FAILED_PRECONDITION: it lies elsewhere than on the device;
// INVALID_ARGUMENT: it can't have that many bytes.
absl::StatusOr<size_t> CheckImported(const CudaApi& api, CUmemGenericAllocationHandle handle,
                                     int device, int64_t bytes) {
  CUmemAllocationProp have = {};
  REFITD_RETURN_IF_ERROR(
      REFITD_CUDA_CALL(api, cuMemGetAllocationPropertiesFromHandle, &have, handle));
  if (have.location.type != CU_MEM_LOCATION_TYPE_DEVICE || have.location.id != device) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "it lies at location {} of type {}, not on device {}", have.location.id,
                 static_cast<int>(have.location.type), device);
  }
  REFITD_ASSIGN_OR_RETURN(const int64_t granularity, api.Granularity(have));
  if (bytes % granularity != 0) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "{} bytes are not what it has: allocations are multiples of {}", bytes,
                 granularity);
  }
  return static_cast<size_t>(granularity);
}

CUmemAccessDesc AccessBy(int device, CUmemAccess_flags flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
  CUmemAccessDesc access = {};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = flags;
  return access;
}

// An allocation, imported or made here, and its mapping. The destructor undoes, in the right order,
// the steps that were done.
class VmmMapping {
 public:
  VmmMapping(WatchedDriver driver, int device) : driver_(std::move(driver)), device_(device) {}
  VmmMapping(const VmmMapping&) = delete;
  VmmMapping& operator=(const VmmMapping&) = delete;
  ~VmmMapping() {
    const CallWatch::Call call(driver_.calls.get(), device_, "unmapping memory of cuMemCreate");
    const CudaApi& api = driver_.api();
    if (mapped_) (void)api.cuMemUnmap(address_, bytes_);
    if (held_) (void)api.cuMemRelease(handle_);
    if (address_ != 0) (void)api.cuMemAddressFree(address_, bytes_);
  }

  absl::Status MapImported(const UniqueFd& fd, int64_t bytes) {
    const CallWatch::Call call(driver_.calls.get(), device_,
                               "mapping imported memory of cuMemCreate");
    REFITD_ASSIGN_OR_RETURN(const CUcontext context, driver_.contexts->Get(device_));
    const ScopedContext current(driver_.api(), context);
    REFITD_RETURN_IF_ERROR(current.status());
    REFITD_ASSIGN_OR_RETURN(handle_, ImportHandle(driver_.api(), fd));
    held_ = true;
    REFITD_ASSIGN_OR_RETURN(granularity_, CheckImported(driver_.api(), handle_, device_, bytes));
    return Map(bytes);
  }

  // Makes an allocation and maps it; `fd` becomes its descriptor. DEADLINE_EXCEEDED: the device
  // hangs, and may still write to the memory.
  absl::Status MapNew(int64_t bytes, std::chrono::milliseconds limit, UniqueFd* fd) {
    std::optional<CallWatch::Call> call(std::in_place, driver_.calls.get(), device_,
                                        "making a pool");
    const CudaApi& api = driver_.api();
    REFITD_ASSIGN_OR_RETURN(const CUcontext context, driver_.contexts->Get(device_));
    const ScopedContext current(api, context);
    REFITD_RETURN_IF_ERROR(current.status());
    REFITD_RETURN_IF_ERROR(Make(bytes));
    CUstream stream = nullptr;
    REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api, cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING));
    // The driver does not promise that new memory is zero: it may hold another group's weights
    // (P9).
    absl::Status zeroed = REFITD_CUDA_CALL(api, cuMemsetD8Async, address_, 0, bytes_, stream);
    call.reset();
    if (zeroed.ok()) zeroed = Await(stream, limit);
    // If the device hangs, nothing is freed, because the driver may wait for the device.
    if (absl::IsDeadlineExceeded(zeroed)) return zeroed;
    call.emplace(driver_.calls.get(), device_, "making a pool");
    (void)api.cuStreamDestroy(stream);
    REFITD_RETURN_IF_ERROR(zeroed);
    REFITD_ASSIGN_OR_RETURN(*fd, Export(api, handle_));
    return absl::OkStatus();
  }

  CUdeviceptr address() const { return address_; }
  int64_t bytes() const { return static_cast<int64_t>(bytes_); }
  bool Reaches(int device) const {
    return std::find(reaching_.begin(), reaching_.end(), device) != reaching_.end();
  }

 private:
  absl::Status Make(int64_t bytes) {
    REFITD_ASSIGN_OR_RETURN(const Allocation made, Allocate(driver_.api(), device_, bytes));
    handle_ = made.handle;
    granularity_ = made.granularity;
    held_ = true;
    return Map(made.bytes);
  }

  // P4: this ends within `limit`, whatever the device does.
  absl::Status Await(CUstream stream, std::chrono::milliseconds limit) const {
    constexpr auto kPause = std::chrono::microseconds(50);
    const auto since = LateClock::Clock::now();
    LateClock late_clock(limit);
    while (true) {
      const CUresult result = driver_.api().cuStreamQuery(stream);
      if (result != CUDA_ERROR_NOT_READY) return driver_.api().Check("cuStreamQuery", result);
      late_clock.Look();
      if (late_clock.Late(since)) {
        return Error(absl::StatusCode::kDeadlineExceeded,
                     "device {} did not end its work within {} ms", device_, limit.count());
      }
      std::this_thread::sleep_for(kPause);
    }
  }

  absl::Status Map(int64_t bytes) {
    const CudaApi& api = driver_.api();
    REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api, cuMemAddressReserve, &address_,
                                            static_cast<size_t>(bytes), granularity_, 0, 0));
    bytes_ = static_cast<size_t>(bytes);
    const CUresult mapped = api.cuMemMap(address_, bytes_, 0, handle_, 0);
    if (mapped == CUDA_ERROR_INVALID_VALUE) {
      return Error(absl::StatusCode::kInvalidArgument, "{} bytes are not what it has: {}", bytes,
                   Message(api.Check("cuMemMap", mapped)));
    }
    REFITD_RETURN_IF_ERROR(Refused(api.Check("cuMemMap", mapped), "mapping it"));
    mapped_ = true;
    return Allow();
  }

  // Lets every device that can reach the memory read and write it.
  absl::Status Allow() {
    std::vector<CUmemAccessDesc> access;
    for (int device = 0; device < driver_.contexts->devices(); ++device) {
      const absl::StatusOr<bool> can = driver_.contexts->CanReach(device, device_);
      if (!can.ok() || !*can) continue;
      access.push_back(AccessBy(device));
      reaching_.push_back(device);
    }
    return REFITD_CUDA_CALL(driver_.api(), cuMemSetAccess, address_, bytes_, access.data(),
                            access.size());
  }

  const WatchedDriver driver_;
  const int device_;
  CUmemGenericAllocationHandle handle_ = 0;
  CUdeviceptr address_ = 0;  // 0: none reserved
  size_t bytes_ = 0;
  size_t granularity_ = 0;
  bool held_ = false;  // whether handle_ is held
  bool mapped_ = false;
  std::vector<int> reaching_;
};

// Keeps memory that a hanging device may still write (P6).
void KeepForever(std::unique_ptr<VmmMapping> mapping) {
  static Mutex* const mutex = new Mutex;
  static auto* const kept = new std::vector<std::unique_ptr<VmmMapping>>;
  MutexLock lock(mutex);
  kept->push_back(std::move(mapping));
}

class VmmRegion final : public DeviceRegion {
 public:
  VmmRegion(std::shared_ptr<RegionIndex> index, int device, std::unique_ptr<VmmMapping> mapping)
      : DeviceRegion(device, Pointer(mapping->address()), mapping->bytes()),
        index_(std::move(index)),
        mapping_(std::move(mapping)) {}
  // The destructor of mapping_, which comes after this, undoes the mapping.
  ~VmmRegion() override { index_->Remove(this); }

  absl::StatusOr<char*> On(int on) const override {
    if (mapping_->Reaches(on)) return data();
    return Error(absl::StatusCode::kUnavailable,
                 "device {} can't reach memory of device {}: the driver sees no peer access "
                 "between them",
                 on, device());
  }

 private:
  const std::shared_ptr<RegionIndex> index_;
  const std::unique_ptr<const VmmMapping> mapping_;
};

// ---- pinned host memory ----

class PinnedRegion final : public DeviceRegion {
 public:
  PinnedRegion(std::shared_ptr<RegionIndex> index, int device, char* address,
               std::unique_ptr<const PinnedFile> file)
      : DeviceRegion(device, address, file->bytes()),
        index_(std::move(index)),
        file_(std::move(file)) {}
  // The destructor of file_, which comes after this, unpins and unmaps it.
  ~PinnedRegion() override { index_->Remove(this); }

  absl::StatusOr<char*> On(int on) const override {
    if (on == device()) return data();
    MutexLock lock(&mutex_);
    const auto it = others_.find(on);
    if (it != others_.end()) return it->second;
    REFITD_ASSIGN_OR_RETURN(char* const address, file_->On(on));
    others_[on] = address;
    return address;
  }

 private:
  const std::shared_ptr<RegionIndex> index_;
  const std::unique_ptr<const PinnedFile> file_;
  mutable Mutex mutex_;
  mutable std::map<int, char*> others_
      ABSL_GUARDED_BY(mutex_);  // asked for once: On is called often
};

// ---- buffers ----

class Buffer final : public CudaBuffer {
 public:
  static absl::StatusOr<std::unique_ptr<CudaBuffer>> Make(WatchedDriver driver, int device,
                                                          int64_t bytes) {
    const CallWatch::Call call(driver.calls.get(), device, "making a buffer");
    REFITD_ASSIGN_OR_RETURN(const CUcontext context, driver.contexts->Get(device));
    const CudaApi& api = driver.api();
    const ScopedContext current(api, context);
    REFITD_RETURN_IF_ERROR(current.status());
    CUdeviceptr address = 0;
    REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api, cuMemAlloc, &address, static_cast<size_t>(bytes)));
    CUstream stream = nullptr;
    const absl::Status made =
        REFITD_CUDA_CALL(api, cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    if (!made.ok()) {
      (void)api.cuMemFree(address);
      return made;
    }
    return std::unique_ptr<CudaBuffer>(
        new Buffer(std::move(driver), device, context, stream, address, bytes));
  }

  ~Buffer() override {
    const CallWatch::Call call(driver_.calls.get(), device_, "freeing a buffer");
    const CudaApi& api = driver_.api();
    const ScopedContext current(api, context_);
    if (!current.status().ok()) return;
    (void)api.cuStreamDestroy(stream_);
    (void)api.cuMemFree(address_);
  }

  absl::Status Store(int64_t offset, const char* from, int64_t count) override {
    if (offset < 0 || count < 0 || offset > bytes() || count > bytes() - offset) {
      return Error(absl::StatusCode::kInvalidArgument, "{} bytes at {} of a buffer of {}", count,
                   offset, bytes());
    }
    if (count == 0) return absl::OkStatus();
    const CallWatch::Call call(driver_.calls.get(), device_, "writing to a buffer");
    const CudaApi& api = driver_.api();
    const ScopedContext current(api, context_);
    REFITD_RETURN_IF_ERROR(current.status());
    REFITD_RETURN_IF_ERROR(
        REFITD_CUDA_CALL(api, cuMemcpyDtoDAsync, address_ + static_cast<CUdeviceptr>(offset),
                         reinterpret_cast<CUdeviceptr>(from), static_cast<size_t>(count), stream_));
    return REFITD_CUDA_CALL(api, cuStreamSynchronize, stream_);
  }

 private:
  Buffer(WatchedDriver driver, int device, CUcontext context, CUstream stream, CUdeviceptr address,
         int64_t bytes)
      : CudaBuffer(Pointer(address), bytes),
        driver_(std::move(driver)),
        device_(device),
        context_(context),
        stream_(stream),
        address_(address) {}

  const WatchedDriver driver_;
  const int device_;
  const CUcontext context_;
  const CUstream stream_;
  const CUdeviceptr address_;
};

// ---- two-sided memory ----

class VmmTwoSided final : public TwoSided {
 public:
  static absl::StatusOr<std::unique_ptr<TwoSided>> Make(WatchedDriver driver, int device,
                                                        int64_t bytes) {
    const CallWatch::Call call(driver.calls.get(), device, "making two-sided memory");
    const CudaApi& api = driver.api();  // lives as long as the contexts, which `parts` holds
    REFITD_ASSIGN_OR_RETURN(const CUcontext context, driver.contexts->Get(device));
    const ScopedContext current(api, context);
    REFITD_RETURN_IF_ERROR(current.status());
    Parts parts(std::move(driver), device, context);
    for (size_t side = 0; side < parts.sides.size(); ++side) {
      REFITD_ASSIGN_OR_RETURN(parts.sides[side], Allocate(api, device, bytes));
    }
    return Map(std::move(parts), CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  }

  static absl::StatusOr<std::unique_ptr<TwoSided>> Open(WatchedDriver driver, int device,
                                                        SharedSides shared) {
    const CallWatch::Call call(driver.calls.get(), device, "opening two-sided memory");
    const CudaApi& api = driver.api();
    REFITD_ASSIGN_OR_RETURN(const CUcontext context, driver.contexts->Get(device));
    const ScopedContext current(api, context);
    REFITD_RETURN_IF_ERROR(current.status());
    Parts parts(std::move(driver), device, context);
    parts.descriptors = {std::move(shared.front), std::move(shared.back)};
    for (size_t side = 0; side < parts.sides.size(); ++side) {
      Allocation& opened = parts.sides[side];
      REFITD_ASSIGN_OR_RETURN(opened.handle, ImportHandle(api, parts.descriptors[side]));
      opened.bytes = shared.bytes;
      REFITD_ASSIGN_OR_RETURN(opened.granularity,
                              CheckImported(api, opened.handle, device, shared.bytes));
    }
    return Map(std::move(parts), CU_MEM_ACCESS_FLAGS_PROT_READ);
  }

  ~VmmTwoSided() override {
    if (mapped_) (void)parts_.driver.api().cuMemUnmap(parts_.address, size());
    if (spare_mapped_) (void)parts_.driver.api().cuMemUnmap(parts_.spare, size());
  }

  absl::StatusOr<UniqueFd> Share(bool back) const override {
    const size_t side = back ? 1 - front_ : front_;
    const UniqueFd& imported = parts_.descriptors[side];
    if (!imported.valid()) return Export(parts_.driver.api(), parts_.sides[side].handle);
    UniqueFd copy = Duplicate(imported.get());
    if (!copy.valid()) return ErrnoError(errno, "sharing a side");
    return copy;
  }

  absl::Status AllowWrites() override {
    if (writable_) return absl::OkStatus();
    const CallWatch::Call call(parts_.driver.calls.get(), parts_.device,
                               "making two-sided memory writable");
    const CudaApi& api = parts_.driver.api();
    const ScopedContext current(api, parts_.context);
    REFITD_RETURN_IF_ERROR(current.status());
    const CUmemAccessDesc access = AccessBy(parts_.device);
    REFITD_RETURN_IF_ERROR(
        REFITD_CUDA_CALL(api, cuMemSetAccess, parts_.address, size(), &access, 1));
    writable_ = true;
    return absl::OkStatus();
  }

  absl::Status CopyToBack() override {
    const CallWatch::Call call(parts_.driver.calls.get(), parts_.device, "copying to a back");
    const CudaApi& api = parts_.driver.api();
    const ScopedContext current(api, parts_.context);
    REFITD_RETURN_IF_ERROR(current.status());
    REFITD_RETURN_IF_ERROR(MapSpare());
    CUstream stream = nullptr;
    absl::Status copied = REFITD_CUDA_CALL(api, cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    if (copied.ok()) {
      copied =
          REFITD_CUDA_CALL(api, cuMemcpyDtoDAsync, parts_.spare, parts_.address, size(), stream);
      if (copied.ok()) copied = REFITD_CUDA_CALL(api, cuStreamSynchronize, stream);
      (void)api.cuStreamDestroy(stream);
    }
    const absl::Status unmapped = UnmapSpare();
    return copied.ok() ? unmapped : copied;
  }

  absl::StatusOr<char*> MapBack() override {
    const CallWatch::Call call(parts_.driver.calls.get(), parts_.device, "mapping a back");
    const ScopedContext current(parts_.driver.api(), parts_.context);
    REFITD_RETURN_IF_ERROR(current.status());
    REFITD_RETURN_IF_ERROR(MapSpare());
    return Pointer(parts_.spare);
  }

  void UnmapBack() override {
    if (!spare_mapped_) return;
    const CallWatch::Call call(parts_.driver.calls.get(), parts_.device, "unmapping a back");
    const ScopedContext current(parts_.driver.api(), parts_.context);
    if (current.status().ok()) (void)UnmapSpare();
  }

  absl::Status Flip() override {
    const CallWatch::Call call(parts_.driver.calls.get(), parts_.device, "flipping memory");
    const CudaApi& api = parts_.driver.api();
    const ScopedContext current(api, parts_.context);
    REFITD_RETURN_IF_ERROR(current.status());
    REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api, cuMemUnmap, parts_.address, size()));
    const absl::Status mapped = Map(parts_.address, 1 - front_);
    if (mapped.ok()) {
      front_ = 1 - front_;
      return mapped;
    }
    const absl::Status undone = Map(parts_.address, front_);
    if (undone.ok()) return mapped;
    mapped_ = false;
    return Error(absl::StatusCode::kDataLoss, "{}; and the way back: {}", Message(mapped),
                 Message(undone));
  }

 private:
  // What is held, and given back when destroyed.
  struct Parts {
    WatchedDriver driver;
    int device = 0;
    CUcontext context = nullptr;
    std::array<Allocation, 2> sides{};
    // Descriptors of imported sides. Share duplicates them, because the driver exports no imported
    // memory.
    std::array<UniqueFd, 2> descriptors{};
    CUdeviceptr address = 0;  // where a side is mapped
    CUdeviceptr spare = 0;    // where the back is mapped while this process uses it

    Parts(WatchedDriver of, int on, CUcontext with)
        : driver(std::move(of)), device(on), context(with) {}
    Parts(Parts&& other) noexcept
        : driver(other.driver),
          device(other.device),
          context(other.context),
          sides(std::exchange(other.sides, {})),
          descriptors(std::move(other.descriptors)),
          address(std::exchange(other.address, 0)),
          spare(std::exchange(other.spare, 0)) {}
    Parts(const Parts&) = delete;
    Parts& operator=(const Parts&) = delete;
    ~Parts() {
      const CudaApi& api = driver.api();
      for (const CUdeviceptr reserved : {address, spare}) {
        if (reserved != 0)
          (void)api.cuMemAddressFree(reserved, static_cast<size_t>(sides[0].bytes));
      }
      for (const Allocation& side : sides) {
        if (side.handle != 0) (void)api.cuMemRelease(side.handle);
      }
    }
  };

  // Maps the first side. A context of the device must be current.
  static absl::StatusOr<std::unique_ptr<TwoSided>> Map(Parts parts, CUmemAccess_flags access) {
    const CudaApi& api = parts.driver.api();  // lives as long as the contexts, which `parts` holds
    const auto size = static_cast<size_t>(parts.sides[0].bytes);
    for (CUdeviceptr* const address : {&parts.address, &parts.spare}) {
      REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api, cuMemAddressReserve, address, size,
                                              parts.sides[0].granularity, 0, 0));
    }
    std::unique_ptr<VmmTwoSided> made(new VmmTwoSided(std::move(parts)));
    REFITD_RETURN_IF_ERROR(made->Map(made->parts_.address, 0, access));
    made->mapped_ = true;
    made->writable_ = access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return made;
  }

  explicit VmmTwoSided(Parts parts)
      : TwoSided(Pointer(parts.address), parts.sides[0].bytes), parts_(std::move(parts)) {}

  size_t size() const { return static_cast<size_t>(bytes()); }
  // The back at parts_.spare. A context of the device must be current.
  absl::Status MapSpare() {
    if (spare_mapped_) return Precondition("the other side is mapped already");
    REFITD_RETURN_IF_ERROR(Map(parts_.spare, 1 - front_));
    spare_mapped_ = true;
    return absl::OkStatus();
  }
  absl::Status UnmapSpare() {
    REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(parts_.driver.api(), cuMemUnmap, parts_.spare, size()));
    spare_mapped_ = false;
    return absl::OkStatus();
  }
  // Maps a side; where that fails, nothing is mapped at the address.
  absl::Status Map(CUdeviceptr at, size_t side,
                   CUmemAccess_flags flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE) const {
    const CudaApi& api = parts_.driver.api();
    REFITD_RETURN_IF_ERROR(
        REFITD_CUDA_CALL(api, cuMemMap, at, size(), 0, parts_.sides[side].handle, 0));
    const CUmemAccessDesc access = AccessBy(parts_.device, flags);
    const absl::Status allowed = REFITD_CUDA_CALL(api, cuMemSetAccess, at, size(), &access, 1);
    if (!allowed.ok()) (void)api.cuMemUnmap(at, size());
    return allowed;
  }

  const Parts parts_;
  size_t front_ = 0;
  bool mapped_ = false;
  bool spare_mapped_ = false;
  bool writable_ = false;
};

// ---- the memory ----

class Memory final : public CudaMemory, public CudaContextsOwner {
 public:
  Memory(std::vector<CudaDevice> devices, std::shared_ptr<CudaContexts> contexts,
         const CudaMemoryOptions& options)
      : devices_(std::move(devices)),
        limit_(options.limit),
        lost_(std::make_shared<LostContext>(options.lost)),
        driver_{std::move(contexts), WatchFor(options)} {}

  const std::vector<CudaDevice>& devices() const override { return devices_; }
  const std::shared_ptr<CudaContexts>& contexts() const override { return driver_.contexts; }

  absl::StatusOr<int> DeviceOf(std::string_view uuid) const override {
    std::string have;
    for (const CudaDevice& device : devices_) {
      if (device.uuid == uuid) return device.ordinal;
      have += (have.empty() ? "" : ", ") + device.uuid;
    }
    return Error(absl::StatusCode::kFailedPrecondition, "no device \"{}\" here; there are {}",
                 Shorten(uuid, kMaxUuidInMessage), have);
  }

  absl::StatusOr<std::shared_ptr<const DeviceRegion>> OpenBlock(int device,
                                                                std::string_view bytes) override {
    REFITD_RETURN_IF_ERROR(CheckDevice(device));
    if (bytes.size() != kCudaIpcHandleBytes) {
      return Error(absl::StatusCode::kInvalidArgument, "a CUDA IPC handle has {} bytes, this {}",
                   kCudaIpcHandleBytes, bytes.size());
    }
    const std::pair<int, std::string> key(device, bytes);
    // Held while opening, so that two callers with one handle open it only once.
    MutexLock lock(&mutex_);
    const auto open = open_.find(key);
    if (open != open_.end()) {
      std::shared_ptr<const DeviceRegion> region = open->second.lock();
      if (region != nullptr) return region;
    }
    CUipcMemHandle handle = {};
    static_assert(sizeof(handle) == kCudaIpcHandleBytes);
    std::memcpy(&handle, bytes.data(), bytes.size());
    REFITD_ASSIGN_OR_RETURN(std::shared_ptr<const DeviceRegion> region, Open(device, handle));
    DropClosed();
    open_[key] = region;
    return region;
  }

  absl::StatusOr<std::shared_ptr<const DeviceRegion>> ImportDescriptor(int device, UniqueFd fd,
                                                                       int64_t bytes) override {
    REFITD_RETURN_IF_ERROR(CheckDevice(device));
    // P10: check before any address space is reserved.
    if (bytes <= 0 || bytes > DeviceBytes(device)) {
      return Error(absl::StatusCode::kInvalidArgument,
                   "device memory of {} bytes: must be 1 to the device's {}", bytes,
                   DeviceBytes(device));
    }
    auto mapping = std::make_unique<VmmMapping>(driver_, device);
    const absl::Status mapped = mapping->MapImported(fd, bytes);
    if (!mapped.ok()) {
      if (IsLost(mapped)) return mapped;
      return Prefixed(mapped, "VMM memory of device {}", device);
    }
    return Adopt(device, std::move(mapping));
  }

  absl::StatusOr<std::shared_ptr<const DeviceRegion>> PinHost(int device, const UniqueFd& fd,
                                                              int64_t bytes) override {
    REFITD_RETURN_IF_ERROR(CheckDevice(device));
    REFITD_ASSIGN_OR_RETURN(std::unique_ptr<const PinnedFile> file,
                            PinnedFile::Map(driver_, device, fd, bytes));
    REFITD_ASSIGN_OR_RETURN(char* const address, file->On(device));
    std::shared_ptr<const DeviceRegion> region =
        std::make_shared<PinnedRegion>(index_, device, address, std::move(file));
    index_->Add(region);
    return region;
  }

  absl::StatusOr<DevicePool> MakePool(int device, int64_t bytes) override {
    REFITD_RETURN_IF_ERROR(CheckNew(device, bytes));
    REFITD_RETURN_IF_ERROR(lost_->status());
    auto mapping = std::make_unique<VmmMapping>(driver_, device);
    DevicePool pool;
    const absl::Status made = mapping->MapNew(bytes, limit_, &pool.descriptor);
    if (absl::IsDeadlineExceeded(made)) {
      KeepForever(std::move(mapping));
      lost_->Lose(made);
      return OfNew(device, bytes, made);
    }
    REFITD_RETURN_IF_ERROR(OfNew(device, bytes, made));
    pool.region = Adopt(device, std::move(mapping));
    return pool;
  }

  void GiveBack(DevicePool pool) override {
    {
      MutexLock lock(&watchers_mutex_);
      for (const auto& [watcher, let_go] : watchers_) let_go(*pool.region);
    }
    pool.region.reset();
  }
  void WatchPools(const void* watcher, std::function<void(const DeviceRegion&)> let_go) override {
    MutexLock lock(&watchers_mutex_);
    watchers_[watcher] = std::move(let_go);
  }
  void UnwatchPools(const void* watcher) override {
    MutexLock lock(&watchers_mutex_);
    watchers_.erase(watcher);
  }

  absl::StatusOr<std::unique_ptr<CudaBuffer>> MakeBuffer(int device, int64_t bytes) override {
    REFITD_RETURN_IF_ERROR(CheckNew(device, bytes));
    absl::StatusOr<std::unique_ptr<CudaBuffer>> made = Buffer::Make(driver_, device, bytes);
    REFITD_RETURN_IF_ERROR(OfNew(device, bytes, made.status()));
    return made;
  }

  absl::StatusOr<std::unique_ptr<TwoSided>> MakeTwoSided(int device, int64_t bytes,
                                                         SidesIn in) override {
    REFITD_RETURN_IF_ERROR(CheckNew(device, bytes));
    absl::StatusOr<std::unique_ptr<TwoSided>> made =
        in == SidesIn::kHost ? MakeHostSides(driver_, device, bytes)
                             : VmmTwoSided::Make(driver_, device, bytes);
    REFITD_RETURN_IF_ERROR(OfNew(device, bytes, made.status()));
    return made;
  }

  absl::StatusOr<std::unique_ptr<TwoSided>> OpenTwoSided(int device, SharedSides sides) override {
    REFITD_RETURN_IF_ERROR(CheckNew(device, sides.bytes));
    absl::StatusOr<std::unique_ptr<TwoSided>> opened =
        sides.in == SidesIn::kHost ? OpenHostSides(driver_, device, std::move(sides))
                                   : VmmTwoSided::Open(driver_, device, std::move(sides));
    if (opened.ok() || IsLost(opened.status())) return opened;
    return Prefixed(opened.status(), "two-sided memory of device {}", device);
  }

  std::shared_ptr<const DeviceRegion> Find(const char* data, int64_t bytes) const override {
    return index_->Find(data, bytes);
  }

 private:
  static constexpr size_t kMaxUuidInMessage = 64;

  // Null: nobody wants to know of a loss.
  std::shared_ptr<CallWatch> WatchFor(const CudaMemoryOptions& options) const {
    if (options.lost == nullptr) return nullptr;
    return std::make_shared<CallWatch>(
        options.limit, lost_, [known = devices_](int device) { return NameOf(known, device); });
  }
  // Returns a name such as "0 (GPU-...)".
  static std::string NameOf(const std::vector<CudaDevice>& devices, int ordinal) {
    for (const CudaDevice& device : devices) {
      if (device.ordinal == ordinal) return fmt::format("{} ({})", ordinal, device.uuid);
    }
    return std::to_string(ordinal);
  }

  std::shared_ptr<const DeviceRegion> Adopt(int device, std::unique_ptr<VmmMapping> mapping) {
    std::shared_ptr<const DeviceRegion> region =
        std::make_shared<VmmRegion>(index_, device, std::move(mapping));
    index_->Add(region);
    return region;
  }

  absl::Status CheckDevice(int device) const {
    if (DeviceBytes(device) > 0) return absl::OkStatus();
    return Error(absl::StatusCode::kInvalidArgument, "no CUDA device {}", device);
  }
  // Makes `status` an error about new memory.
  static absl::Status OfNew(int device, int64_t bytes, const absl::Status& status) {
    if (status.ok() || IsLost(status)) return status;
    return Prefixed(status, "{} bytes of device {}", bytes, device);
  }
  absl::Status CheckNew(int device, int64_t bytes) const {
    REFITD_RETURN_IF_ERROR(CheckDevice(device));
    if (bytes > 0 && bytes <= DeviceBytes(device)) return absl::OkStatus();
    return OfNew(device, bytes,
                 Error(absl::StatusCode::kInvalidArgument, "must be 1 to the device's {}",
                       DeviceBytes(device)));
  }
  // Returns the size of the device's memory; 0: there is no such device.
  int64_t DeviceBytes(int ordinal) const {
    for (const CudaDevice& device : devices_) {
      if (device.ordinal == ordinal) return device.memory_bytes;
    }
    return 0;
  }

  absl::StatusOr<std::shared_ptr<const DeviceRegion>> Open(int device,
                                                           const CUipcMemHandle& handle) {
    const absl::StatusOr<Opened> opened = OpenHandle(driver_, device, handle);
    if (!opened.ok()) {
      return Refused(opened.status(),
                     fmt::format("the driver refuses the CUDA IPC handle on device {}", device));
    }
    const absl::StatusOr<int64_t> bytes = BlockBytes(driver_, device, *opened);
    if (!bytes.ok()) {
      CloseHandle(driver_, device, *opened);
      return Refused(bytes.status(), "the memory of a CUDA IPC handle");
    }
    std::shared_ptr<const DeviceRegion> region =
        std::make_shared<LegacyRegion>(driver_, index_, device, handle, *opened, *bytes);
    index_->Add(region);
    return region;
  }

  // Drops the entries of closed regions. Looks at every entry, since entries are few: as many as
  // registered blocks.
  void DropClosed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (auto it = open_.begin(); it != open_.end();) {
      it = it->second.expired() ? open_.erase(it) : std::next(it);
    }
  }

  const std::vector<CudaDevice> devices_;
  const std::chrono::milliseconds limit_;
  const std::shared_ptr<LostContext> lost_;  // takes reports of devices that hang
  const WatchedDriver driver_;
  const std::shared_ptr<RegionIndex> index_ = std::make_shared<RegionIndex>();
  Mutex mutex_;
  std::map<std::pair<int, std::string>, std::weak_ptr<const DeviceRegion>> open_
      ABSL_GUARDED_BY(mutex_);
  Mutex watchers_mutex_;
  std::map<const void*, std::function<void(const DeviceRegion&)>> watchers_
      ABSL_GUARDED_BY(watchers_mutex_);
};

constexpr char kSystemDriver[] = "libcuda.so.1";

}  // namespace

absl::StatusOr<std::shared_ptr<CudaMemory>> CudaMemory::Create(const std::string& library,
                                                               const CudaMemoryOptions& options) {
  CudaReport report = library == kSystemDriver ? ProbeCuda() : ProbeCudaLibrary(library);
  if (report.devices.empty()) return absl::UnavailableError(report.problem);
  REFITD_ASSIGN_OR_RETURN(const CudaApi api, CudaApi::Load(library));
  int ordinals = 0;  // one more than the highest ordinal; devices that did not answer leave gaps
  for (const CudaDevice& device : report.devices) ordinals = std::max(ordinals, device.ordinal + 1);
  auto contexts = std::make_shared<CudaContexts>(api, ordinals, options.own_contexts);
  return std::make_shared<Memory>(std::move(report.devices), std::move(contexts), options);
}

#else

absl::StatusOr<std::shared_ptr<CudaMemory>> CudaMemory::Create(
    const std::string& /*library*/, const CudaMemoryOptions& /*options*/) {
  return absl::UnavailableError(CudaBuild());
}

#endif

}  // namespace refitd
