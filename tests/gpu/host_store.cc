#include <chrono>
#include <cstring>

#include "tests/gpu/stores.h"
#include "transport/base/status.h"

namespace refitd::gpu {
namespace {

class HostStore final : public Store {
 public:
  const std::string& device_name() const override { return name_; }
  absl::Status AddBlock(int64_t) override {
    return absl::UnimplementedError("blocks of host memory are adopted");
  }
  absl::StatusOr<Export> ExportBlock(size_t) override {
    return absl::UnimplementedError("host memory is not exported here");
  }
  void Adopt(char* data, int64_t bytes) override {
    addresses_.push_back(reinterpret_cast<uint64_t>(data));
    bytes_.push_back(bytes);
  }

  absl::Status SetLayout(const Layout& layout, const std::vector<std::string>& names) override {
    REFITD_ASSIGN_OR_RETURN(tasks_, MakeTasks(layout, addresses_));
    names_ = names;
    return absl::OkStatus();
  }

  absl::Status Spin(int64_t milliseconds) override {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
    while (std::chrono::steady_clock::now() < end) {
    }
    return absl::OkStatus();
  }

  absl::Status Fill(int64_t version, uint64_t seed, int block) override {
    const uint64_t salt = Salt(static_cast<uint64_t>(version), seed);
    ForEach(block, [&](const Task& task, uint64_t, int64_t element) {
      const Place at = Locate(task, element);
      StoreElement(task, at.storage, Value(task.tensor_hash, salt, at.index, task.element_bytes));
    });
    return absl::OkStatus();
  }

  absl::Status Load(uint64_t tensor_hash, int64_t start, int64_t count, const char* from) override {
    for (const Task& task : tasks_.tasks) {
      if (task.tensor_hash != tensor_hash) continue;
      for (int64_t element = 0; element < task.elements; ++element) {
        LoadFrom(task, Locate(task, element), reinterpret_cast<uint64_t>(from), start, count);
      }
    }
    return absl::OkStatus();
  }

  absl::Status CopyOut(size_t block, int64_t byte_offset, int64_t bytes, char* to) override {
    std::memcpy(to, reinterpret_cast<const char*>(addresses_[block]) + byte_offset,
                static_cast<size_t>(bytes));
    return absl::OkStatus();
  }

  absl::Status PoisonPieces(int block) override {
    ForEach(block, [](const Task& task, uint64_t, int64_t element) {
      StoreElement(task, Locate(task, element).storage, uint64_t{kPoison} * 0x0101010101010101);
    });
    return absl::OkStatus();
  }

  absl::Status PoisonAll() override {
    for (size_t b = 0; b < addresses_.size(); ++b) {
      std::memset(reinterpret_cast<void*>(addresses_[b]), kPoison, static_cast<size_t>(bytes_[b]));
    }
    return absl::OkStatus();
  }

  absl::Status Synchronise() override { return absl::OkStatus(); }

  absl::StatusOr<WrongElements> Check(int64_t version, uint64_t seed) override {
    const uint64_t salt = Salt(static_cast<uint64_t>(version), seed);
    Wrong wrong;
    ForEach(-1, [&](const Task& task, uint64_t index, int64_t element) {
      const Place at = Locate(task, element);
      if (LoadElement(task, at.storage) ==
          Value(task.tensor_hash, salt, at.index, task.element_bytes)) {
        return;
      }
      ++wrong.count;
      wrong.first =
          std::min<unsigned long long>(wrong.first, index << 40 | static_cast<uint64_t>(element));
    });
    return WrongElements{static_cast<int64_t>(wrong.count), PlaceInWords(names_, wrong)};
  }

  absl::StatusOr<int64_t> CountUnpoisoned() override {
    int64_t count = 0;
    for (size_t b = 0; b < addresses_.size(); ++b) {
      const auto* data = reinterpret_cast<const uint8_t*>(addresses_[b]);
      for (int64_t i = 0; i < bytes_[b]; ++i) count += data[i] != kPoison ? 1 : 0;
    }
    return count;
  }

  absl::StatusOr<DeviceMemory> Memory() override { return DeviceMemory{}; }

 private:
  template <typename Visit>
  void ForEach(int block, const Visit& visit) {
    const size_t begin = block < 0 ? 0 : tasks_.first_chunk[static_cast<size_t>(block)];
    const size_t end =
        block < 0 ? tasks_.chunks.size() : tasks_.first_chunk[static_cast<size_t>(block) + 1];
    for (size_t c = begin; c < end; ++c) {
      const Chunk& chunk = tasks_.chunks[c];
      for (int64_t i = 0; i < chunk.count; ++i) {
        visit(tasks_.tasks[chunk.task], chunk.task, chunk.first + i);
      }
    }
  }

  const std::string name_ = "host";
  std::vector<uint64_t> addresses_;
  std::vector<int64_t> bytes_;
  std::vector<std::string> names_;
  Tasks tasks_;
};

}  // namespace

std::unique_ptr<Store> NewHostStore() { return std::make_unique<HostStore>(); }

}  // namespace refitd::gpu
