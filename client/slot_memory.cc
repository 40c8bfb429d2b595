#include "client/slot_memory.h"

#include <cstring>
#include <map>
#include <new>
#include <utility>

#include "transport/base/failure.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"
#include "transport/cuda/memory.h"
#include "transport/host/two_sided.h"

namespace refitd::client {
namespace {

class HostBuffer final : public JoinBuffer {
 public:
  explicit HostBuffer(std::unique_ptr<char[]> bytes) : bytes_(std::move(bytes)) {}
  char* data() const override { return bytes_.get(); }
  absl::Status Store(int64_t offset, const char* from, int64_t bytes) override {
    if (bytes > 0) std::memcpy(bytes_.get() + offset, from, static_cast<size_t>(bytes));
    return absl::OkStatus();
  }

 private:
  const std::unique_ptr<char[]> bytes_;
};

class HostSlots final : public SlotMemory {
 public:
  explicit HostSlots(std::shared_ptr<HostRegion> region)
      : SlotMemory(region->data(), region->bytes()), region_(std::move(region)) {}
  absl::StatusOr<std::unique_ptr<JoinBuffer>> NewBuffer(int64_t bytes) const override {
    return NewHostBuffer(bytes);
  }

 private:
  const std::shared_ptr<HostRegion> region_;
};

class DeviceBuffer final : public JoinBuffer {
 public:
  explicit DeviceBuffer(std::unique_ptr<CudaBuffer> buffer) : buffer_(std::move(buffer)) {}
  char* data() const override { return buffer_->data(); }
  absl::Status Store(int64_t offset, const char* from, int64_t bytes) override {
    return buffer_->Store(offset, from, bytes);
  }

 private:
  const std::unique_ptr<CudaBuffer> buffer_;
};

class DeviceSlots final : public SlotMemory {
 public:
  DeviceSlots(std::shared_ptr<CudaMemory> cuda, std::shared_ptr<const DeviceRegion> region)
      : SlotMemory(region->data(), region->bytes()),
        cuda_(std::move(cuda)),
        region_(std::move(region)) {}
  absl::StatusOr<std::unique_ptr<JoinBuffer>> NewBuffer(int64_t bytes) const override {
    REFITD_ASSIGN_OR_RETURN(std::unique_ptr<CudaBuffer> buffer,
                            cuda_->MakeBuffer(region_->device(), bytes));
    return std::make_unique<DeviceBuffer>(std::move(buffer));
  }

 private:
  const std::shared_ptr<CudaMemory> cuda_;
  const std::shared_ptr<const DeviceRegion> region_;
};

// Loads each driver once and keeps it for the life of the process, as its contexts are kept.
absl::StatusOr<std::shared_ptr<CudaMemory>> LoadCuda(const std::string& library) {
  static Mutex mutex;
  static auto* const loaded = new std::map<std::string, std::shared_ptr<CudaMemory>>;
  MutexLock lock(&mutex);
  std::shared_ptr<CudaMemory>& memory = (*loaded)[library];
  if (memory == nullptr) {
    REFITD_ASSIGN_OR_RETURN(memory, CudaMemory::Create(library));
  }
  return memory;
}

}  // namespace

absl::StatusOr<std::unique_ptr<JoinBuffer>> NewHostBuffer(int64_t bytes) {
  std::unique_ptr<char[]> made(new (std::nothrow) char[static_cast<size_t>(bytes)]);
  if (made == nullptr) {
    return Error(absl::StatusCode::kResourceExhausted, "no host memory of {} bytes", bytes);
  }
  return std::make_unique<HostBuffer>(std::move(made));
}

bool OnDevice(const std::string& device) { return !device.empty() && device != "host"; }

absl::StatusOr<std::shared_ptr<const SlotMemory>> MapHostSlots(const UniqueFd& fd, int64_t bytes,
                                                               Access access) {
  REFITD_ASSIGN_OR_RETURN(std::shared_ptr<HostRegion> region,
                          HostRegion::Map(fd, bytes, access, /*populate=*/false));
  return std::make_shared<const HostSlots>(std::move(region));
}

absl::StatusOr<std::shared_ptr<const SlotMemory>> MapDeviceSlots(UniqueFd fd, int64_t bytes,
                                                                 const std::string& device,
                                                                 const std::string& library) {
  const auto map = [&]() -> absl::StatusOr<std::shared_ptr<const SlotMemory>> {
    REFITD_ASSIGN_OR_RETURN(std::shared_ptr<CudaMemory> cuda, LoadCuda(library));
    REFITD_ASSIGN_OR_RETURN(const int ordinal, cuda->DeviceOf(device));
    REFITD_ASSIGN_OR_RETURN(std::shared_ptr<const DeviceRegion> region,
                            cuda->ImportDescriptor(ordinal, std::move(fd), bytes));
    return std::make_shared<const DeviceSlots>(std::move(cuda), std::move(region));
  };
  auto mapped = map();
  if (mapped.ok()) return mapped;
  return Prefixed(mapped.status(), "mapping the staging slots of GPU {}", device);
}

absl::StatusOr<std::unique_ptr<TwoSided>> MakeTwoSided(int64_t bytes, const ConnectOptions& options,
                                                       SidesIn in) {
  if (!OnDevice(options.device)) return MakeHostTwoSided(bytes);
  REFITD_ASSIGN_OR_RETURN(const std::shared_ptr<CudaMemory> cuda, LoadCuda(options.cuda_library));
  REFITD_ASSIGN_OR_RETURN(const int ordinal, cuda->DeviceOf(options.device));
  return cuda->MakeTwoSided(ordinal, bytes, in);
}

absl::StatusOr<std::unique_ptr<TwoSided>> OpenTwoSided(SharedSides sides,
                                                       const ConnectOptions& options) {
  if (!OnDevice(options.device)) return OpenHostTwoSided(std::move(sides));
  REFITD_ASSIGN_OR_RETURN(const std::shared_ptr<CudaMemory> cuda, LoadCuda(options.cuda_library));
  REFITD_ASSIGN_OR_RETURN(const int ordinal, cuda->DeviceOf(options.device));
  return cuda->OpenTwoSided(ordinal, std::move(sides));
}

}  // namespace refitd::client
