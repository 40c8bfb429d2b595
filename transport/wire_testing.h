// Helpers of tests of wires over host memory, and what their common cases (wire_cases_testing.cc)
// ask of a wire. Each wire's test defines Tested().
#ifndef REFITD_TRANSPORT_WIRE_TESTING_H_
#define REFITD_TRANSPORT_WIRE_TESTING_H_

#include <dirent.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/base/status.h"
#include "transport/base/unique_fd.h"
#include "transport/wire.h"

namespace refitd {

inline constexpr uint64_t kSeed = 20;
inline constexpr auto kWait = std::chrono::seconds(60);      // for events that should come soon
inline constexpr Duration kLong = std::chrono::minutes(30);  // a timeout that no test should reach
inline constexpr Duration kShort = std::chrono::milliseconds(300);
// A timeout that a test reaches, but only after the other ranks have done their part.
inline constexpr Duration kMedium = std::chrono::milliseconds(3'000);

using Result = std::future<absl::Status>;

inline std::function<void(absl::Status)> Into(Result* result) {
  auto promise = std::make_shared<std::promise<absl::Status>>();
  *result = promise->get_future();
  return [promise](absl::Status status) { promise->set_value(std::move(status)); };
}

inline absl::Status Get(Result& result) {
  if (result.wait_for(kWait) != std::future_status::ready) {
    return absl::InternalError("test: no answer in time");
  }
  return result.get();
}

// Polls, because there is no notification to wait for.
inline bool Until(const std::function<bool()>& condition) {
  for (const auto end = std::chrono::steady_clock::now() + kWait;
       std::chrono::steady_clock::now() < end;) {
    if (condition()) return true;
    poll(nullptr, 0, 1);
  }
  return false;
}

inline int CountEntries(const char* path) {
  DIR* dir = opendir(path);
  if (dir == nullptr) return -1;
  int count = 0;
  while (readdir(dir) != nullptr) ++count;
  closedir(dir);
  return count;
}

// How the common cases (wire_cases_testing.cc) make the wire under test. The test of each wire
// defines Tested().
struct TestedWire {
  std::function<absl::StatusOr<std::unique_ptr<Wire>>()> make;
};
const TestedWire& Tested();

inline std::unique_ptr<Wire> MakeWire() {
  auto wire = Tested().make();
  REQUIRE(wire.status() == absl::OkStatus());
  return std::move(wire).value();
}

inline std::vector<char> RandomBytes(size_t bytes, uint64_t seed) {
  std::vector<char> out(bytes);
  std::mt19937_64 random(seed);
  for (size_t i = 0; i < bytes; i += 8) {
    const uint64_t word = random();
    std::memcpy(&out[i], &word, std::min<size_t>(8, bytes - i));
  }
  return out;
}

inline MemorySpan Span(std::vector<char>& bytes) {
  return {bytes.data(), static_cast<int64_t>(bytes.size()), nullptr};
}

// Memory of many addresses and few bytes: one small file is mapped again and again.
class RepeatedMemory {
 public:
  RepeatedMemory(size_t unit, size_t times) : bytes_(unit * times) {
    const UniqueFd fd(memfd_create("wire-test", MFD_CLOEXEC));
    REQUIRE(ftruncate(fd.get(), static_cast<off_t>(unit)) == 0);
    data_ = static_cast<char*>(
        mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    REQUIRE(data_ != MAP_FAILED);
    for (size_t i = 0; i < times; ++i) {
      REQUIRE(mmap(data_ + i * unit, unit, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd.get(),
                   0) != MAP_FAILED);
    }
  }
  ~RepeatedMemory() { munmap(data_, bytes_); }
  RepeatedMemory(const RepeatedMemory&) = delete;
  RepeatedMemory& operator=(const RepeatedMemory&) = delete;
  char* data() { return data_; }
  MemorySpan span() { return {data_, static_cast<int64_t>(bytes_), nullptr}; }

 private:
  char* data_ = nullptr;
  size_t bytes_;
};

// Several ranks in one process, each with a wire of its own.
struct Mesh {
  explicit Mesh(int size) {
    for (int i = 0; i < size; ++i) wires.push_back(MakeWire());
  }
  int size() const { return static_cast<int>(wires.size()); }
  std::vector<std::string> Open(CommunicatorId communicator) {
    std::vector<std::string> addresses;
    for (int rank = 0; rank < size(); ++rank) {
      auto address = wires[rank]->Open(communicator, rank, size());
      REQUIRE(address.status() == absl::OkStatus());
      CHECK(address->size() <= kMaxWireAddressBytes);
      addresses.push_back(*std::move(address));
    }
    return addresses;
  }
  void Connect(CommunicatorId communicator) {
    const std::vector<std::string> addresses = Open(communicator);
    std::vector<Result> results(size());
    for (int rank = 0; rank < size(); ++rank) {
      wires[rank]->Connect(communicator, addresses, kLong, Into(&results[rank]));
    }
    for (Result& result : results) REQUIRE(Get(result) == absl::OkStatus());
  }

  std::vector<std::unique_ptr<Wire>> wires;
};

inline WireBroadcast Broadcast(CommunicatorId communicator, uint64_t seq, int root,
                               MemorySpan memory, Duration timeout = kLong) {
  return {communicator, WireSeq(seq), root, std::move(memory), timeout};
}

inline constexpr CommunicatorId kCommunicator{7};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_WIRE_TESTING_H_
