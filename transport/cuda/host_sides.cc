#include "transport/cuda/host_sides.h"

#if defined(REFITD_CUDA)
#include <array>
#include <cerrno>

#include "transport/base/errors.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd {

absl::StatusOr<std::unique_ptr<const PinnedFile>> PinnedFile::Map(const WatchedDriver& driver,
                                                                  int device, const UniqueFd& fd,
                                                                  int64_t bytes) {
  // Pages are made here, and not by the driver, whose calls are watched.
  REFITD_ASSIGN_OR_RETURN(std::shared_ptr<const HostRegion> region,
                          HostRegion::Map(fd, bytes, Access::kReadWrite, /*populate=*/true));
  const CallWatch::Call call(driver.calls.get(), device, "pinning host memory", bytes);
  REFITD_ASSIGN_OR_RETURN(const CUcontext context, driver.contexts->Get(device));
  const ScopedContext current(driver.api(), context);
  REFITD_RETURN_IF_ERROR(current.status());
  REFITD_RETURN_IF_ERROR(
      REFITD_CUDA_CALL(driver.api(), cuMemHostRegister, region->data(), static_cast<size_t>(bytes),
                       CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP));
  return std::unique_ptr<const PinnedFile>(new PinnedFile(driver, device, std::move(region)));
}

PinnedFile::~PinnedFile() {
  const CallWatch::Call call(driver_.calls.get(), device_, "letting go of pinned host memory",
                             bytes());
  const absl::StatusOr<CUcontext> context = driver_.contexts->Get(device_);
  if (!context.ok()) return;
  const ScopedContext current(driver_.api(), *context);
  if (current.status().ok()) (void)driver_.api().cuMemHostUnregister(data());
}

absl::StatusOr<char*> PinnedFile::On(int on) const {
  const CallWatch::Call call(driver_.calls.get(), on, "looking up pinned host memory");
  REFITD_ASSIGN_OR_RETURN(const CUcontext context, driver_.contexts->Get(on));
  const ScopedContext current(driver_.api(), context);
  REFITD_RETURN_IF_ERROR(current.status());
  CUdeviceptr address = 0;
  REFITD_RETURN_IF_ERROR(
      REFITD_CUDA_CALL(driver_.api(), cuMemHostGetDevicePointer, &address, data(), 0));
  return reinterpret_cast<char*>(address);
}

namespace {

// The device's memory holds a copy of the front, which only this process uses. So an exchange needs
// one copy, and a side is always as its last writer left it: a process that dies in the middle of a
// flip leaves both.
class HostSides final : public TwoSided {
 public:
  using Files = std::array<std::unique_ptr<const PinnedFile>, 2>;

  static absl::StatusOr<std::unique_ptr<HostSides>> Of(const WatchedDriver& driver, int device,
                                                       std::array<UniqueFd, 2> sides,
                                                       int64_t bytes) {
    Files files;
    for (size_t side = 0; side < files.size(); ++side) {
      REFITD_ASSIGN_OR_RETURN(files[side], PinnedFile::Map(driver, device, sides[side], bytes));
    }
    const CallWatch::Call call(driver.calls.get(), device, "making memory of a device");
    REFITD_ASSIGN_OR_RETURN(const CUcontext context, driver.contexts->Get(device));
    const ScopedContext current(driver.api(), context);
    REFITD_RETURN_IF_ERROR(current.status());
    CUdeviceptr address = 0;
    REFITD_RETURN_IF_ERROR(
        REFITD_CUDA_CALL(driver.api(), cuMemAlloc, &address, static_cast<size_t>(bytes)));
    return std::unique_ptr<HostSides>(
        new HostSides(driver, device, context, std::move(sides), std::move(files), address, bytes));
  }

  ~HostSides() override {
    const CallWatch::Call call(driver_.calls.get(), device_, "freeing memory of a device");
    const ScopedContext current(driver_.api(), context_);
    if (current.status().ok()) (void)driver_.api().cuMemFree(address_);
  }

  absl::StatusOr<UniqueFd> Share(bool back) const override {
    UniqueFd shared = Duplicate(sides_[back ? 1 - front_ : front_].get());
    if (!shared.valid()) return ErrnoError(errno, "sharing a side");
    return shared;
  }
  absl::Status AllowWrites() override { return absl::OkStatus(); }
  absl::Status CopyToBack() override {
    if (back_used_) return Precondition("the other side is mapped already");
    return OnStream("copying to sides", [this](CUstream stream) -> absl::Status {
      for (const std::unique_ptr<const PinnedFile>& file : files_) {
        REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(driver_.api(), cuMemcpyDtoHAsync, file->data(),
                                                address_, static_cast<size_t>(bytes()), stream));
      }
      return absl::OkStatus();
    });
  }
  absl::StatusOr<char*> MapBack() override {
    if (back_used_) return Precondition("the other side is mapped already");
    absl::StatusOr<char*> address = files_[1 - front_]->On(device_);
    back_used_ = address.ok();
    return address;
  }
  void UnmapBack() override { back_used_ = false; }
  absl::Status Flip() override {
    const absl::Status copied = Show(1 - front_);
    if (copied.ok()) {
      front_ = 1 - front_;
      return copied;
    }
    const absl::Status undone = Show(front_);
    if (undone.ok()) return copied;
    return Error(absl::StatusCode::kDataLoss, "{}; and the way back: {}", Message(copied),
                 Message(undone));
  }
  // Copies a side to the device.
  absl::Status Show(size_t side) const {
    return OnStream("flipping memory", [this, side](CUstream stream) {
      return REFITD_CUDA_CALL(driver_.api(), cuMemcpyHtoDAsync, address_, files_[side]->data(),
                              static_cast<size_t>(bytes()), stream);
    });
  }
  size_t front() const { return front_; }

 private:
  HostSides(const WatchedDriver& driver, int device, CUcontext context,
            std::array<UniqueFd, 2> sides, Files files, CUdeviceptr address, int64_t bytes)
      : TwoSided(reinterpret_cast<char*>(address), bytes),
        driver_(driver),
        device_(device),
        context_(context),
        address_(address),
        sides_(std::move(sides)),
        files_(std::move(files)) {}

  // Waits until the copies that `issue` puts into a stream have ended.
  template <typename Issue>
  absl::Status OnStream(const char* what, const Issue& issue) const {
    const CallWatch::Call call(driver_.calls.get(), device_, what);
    const CudaApi& api = driver_.api();
    const ScopedContext current(api, context_);
    REFITD_RETURN_IF_ERROR(current.status());
    CUstream stream = nullptr;
    REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api, cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING));
    absl::Status status = issue(stream);
    // P6: copies that were issued end before anything is freed, whatever came after them.
    const absl::Status ended = REFITD_CUDA_CALL(api, cuStreamSynchronize, stream);
    (void)api.cuStreamDestroy(stream);
    return status.ok() ? ended : status;
  }

  const WatchedDriver driver_;
  const int device_;
  const CUcontext context_;
  const CUdeviceptr address_;
  const std::array<UniqueFd, 2> sides_;
  const Files files_;
  size_t front_ = 0;
  bool back_used_ = false;  // from MapBack to UnmapBack
};

}  // namespace

absl::StatusOr<std::unique_ptr<TwoSided>> MakeHostSides(const WatchedDriver& driver, int device,
                                                        int64_t bytes) {
  REFITD_ASSIGN_OR_RETURN(const auto unit, driver.api().Granularity(PinnedMemoryOf(device)));
  bytes = (bytes + unit - 1) / unit * unit;
  std::array<UniqueFd, 2> sides;
  for (UniqueFd& side : sides) {
    REFITD_ASSIGN_OR_RETURN(side, CreateSealedMemfd("refit-arena", bytes));
  }
  return HostSides::Of(driver, device, std::move(sides), bytes);
}

absl::StatusOr<std::unique_ptr<TwoSided>> OpenHostSides(const WatchedDriver& driver, int device,
                                                        SharedSides sides) {
  REFITD_ASSIGN_OR_RETURN(
      std::unique_ptr<HostSides> opened,
      HostSides::Of(driver, device, {std::move(sides.front), std::move(sides.back)}, sides.bytes));
  REFITD_RETURN_IF_ERROR(opened->Show(opened->front()));
  return opened;
}

}  // namespace refitd

#endif  // REFITD_CUDA
