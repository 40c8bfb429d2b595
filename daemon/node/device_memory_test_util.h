// The memory of GPUs that tests don't have: memory of the host, which is named as GPU memory is.
//
// Thread-safe, but for what a test sets before it hands the object to a daemon.
#ifndef REFITD_DAEMON_NODE_DEVICE_MEMORY_TEST_UTIL_H_
#define REFITD_DAEMON_NODE_DEVICE_MEMORY_TEST_UTIL_H_

#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/base/mutex.h"
#include "transport/base/unique_fd.h"
#include "transport/device_memory.h"

namespace refitd {

// GPUs "GPU-0", "GPU-1" and so on. Every handle of the right size names a block, the same handle
// always the same block. Counts what was made, and what is open.
class FakeMemory : public DeviceMemory {
 public:
  static constexpr int kDevices = 8;
  static constexpr int64_t kBlockBytes = 4096;  // of every block

  absl::StatusOr<int> DeviceOf(std::string_view name) const override {
    for (int device = 0; device < kDevices; ++device) {
      if (name == NameOf(device)) return device;
    }
    return absl::FailedPreconditionError("there is no such GPU");
  }
  std::string NameOf(int device) const override { return "GPU-" + std::to_string(device); }
  absl::StatusOr<std::shared_ptr<const DeviceRegion>> OpenBlock(int device,
                                                                std::string_view handle) override {
    return Open(device, "handle " + std::string(handle), kBlockBytes);
  }
  // All descriptors name the same memory.
  absl::StatusOr<std::shared_ptr<const DeviceRegion>> ImportDescriptor(int device, UniqueFd /*fd*/,
                                                                       int64_t bytes) override {
    return Open(device, "descriptor", bytes);
  }
  absl::StatusOr<std::shared_ptr<const DeviceRegion>> PinHost(int device, const UniqueFd& fd,
                                                              int64_t bytes) override {
    struct stat file {};
    if (fstat(fd.get(), &file) != 0) return absl::InternalError("fstat");
    return Open(device, "memfd " + std::to_string(file.st_ino), bytes);
  }
  absl::StatusOr<DevicePool> MakePool(int device, int64_t bytes) override {
    if (on_make != nullptr) on_make();
    MutexLock lock(&mutex_);
    ++asked_;
    if (!can_make.ok()) return can_make;
    ++open_;
    return DevicePool{std::make_shared<Region>(device, Block(static_cast<size_t>(bytes)), nullptr),
                      UniqueFd(memfd_create("pool", MFD_CLOEXEC))};
  }
  void GiveBack(DevicePool /*pool*/) override {
    MutexLock lock(&mutex_);
    --open_;
  }

  // Pools that were asked for, and those that are not given back yet.
  int asked() {
    MutexLock lock(&mutex_);
    return asked_;
  }
  int open() {
    MutexLock lock(&mutex_);
    return open_;
  }
  // Blocks and imports that were opened, and those that are not closed yet.
  int opened() const { return opened_; }
  int open_blocks() const { return *open_blocks_; }
  // The memory of the block that the handle names.
  std::string BytesOf(std::string_view handle, size_t bytes) {
    MutexLock lock(&mutex_);
    return {blocks_.at("handle " + std::string(handle))->data(), bytes};
  }
  void Fill(std::string_view handle, std::string_view bytes, size_t offset = 0) {
    MutexLock lock(&mutex_);
    std::shared_ptr<Block>& block = blocks_["handle " + std::string(handle)];
    if (block == nullptr) block = std::make_shared<Block>(static_cast<size_t>(kBlockBytes));
    bytes.copy(block->data() + offset, bytes.size());
  }

  absl::Status can_make;
  std::function<void()> on_make;  // called while a pool is being made

 private:
  using Block = std::vector<char>;
  using Count = std::shared_ptr<std::atomic<int>>;

  class Region : public DeviceRegion {
   public:
    Region(int device, Block own, Count open)
        : Region(device, std::make_shared<Block>(std::move(own)), std::move(open)) {}
    Region(int device, const std::shared_ptr<Block>& block, Count open)
        : DeviceRegion(device, block->data(), static_cast<int64_t>(block->size())),
          block_(block),
          open_(std::move(open)) {
      if (open_ != nullptr) ++*open_;
    }
    ~Region() override {
      if (open_ != nullptr) --*open_;
    }
    absl::StatusOr<char*> On(int /*device*/) const override { return data(); }

   private:
    const std::shared_ptr<Block> block_;
    const Count open_;
  };

  std::shared_ptr<const DeviceRegion> Open(int device, const std::string& name, int64_t bytes) {
    MutexLock lock(&mutex_);
    std::shared_ptr<Block>& block = blocks_[name];
    if (block == nullptr) block = std::make_shared<Block>(static_cast<size_t>(bytes));
    ++opened_;
    return std::make_shared<Region>(device, block, open_blocks_);
  }

  Mutex mutex_;
  int asked_ ABSL_GUARDED_BY(mutex_) = 0;
  int open_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, std::shared_ptr<Block>> blocks_ ABSL_GUARDED_BY(mutex_);
  std::atomic<int> opened_{0};
  const Count open_blocks_ = std::make_shared<std::atomic<int>>(0);
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_DEVICE_MEMORY_TEST_UTIL_H_
