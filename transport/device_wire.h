// The wire over the memory of devices, and the communicators of a transport that has such memory:
// how the daemon opens communicators there, and what it tells people of them.
// `transport/cuda/nccl/` implements it.
#ifndef REFITD_TRANSPORT_DEVICE_WIRE_H_
#define REFITD_TRANSPORT_DEVICE_WIRE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/wire_communicators.h"

namespace refitd {

// The most rails of a communicator.
inline constexpr size_t kMaxRails = 8;

// The library that carries out collectives on devices, for people and status calls.
struct CollectivesReport {
  std::string library;  // the file that was loaded; empty: none
  std::string version;  // empty: none
  std::string problem;  // why there is none; empty if there is one
  // Why the library has no symmetric memory; empty if it has, or if there is no library.
  std::string no_symmetric;
};

// A communicator over devices of this process, for people and status calls.
struct CommunicatorStatus {
  uint64_t number = 0;
  std::vector<int> devices;   // ordinals, by rank
  bool copy_engines = false;  // copy engines do its all-gathers
  int windows = 0;            // open
  int64_t window_bytes = 0;   // of each rank, all windows
  absl::Status status;        // why it is no longer usable
};

// Implemented by transports that have communicators.
class CommunicatorsOwner {
 public:
  virtual ~CommunicatorsOwner() = default;
  // Oldest first. Waits for nothing.
  virtual std::vector<CommunicatorStatus> Communicators() const = 0;
};

// This daemon's end of a communicator, for people and status calls.
struct DeviceCommunicatorStatus {
  // A device of this daemon that carries a share of each operation's bytes.
  struct Rail {
    int device = 0;  // ordinal
    WireStats moved;
  };
  CommunicatorId communicator;
  std::vector<Rail> rails;  // the first has the memory
  int rank = 0;
  int size = 0;
  // "open", "connecting", "connected" and "lost" mean what transport/wire.h says; a "closing"
  // communicator is closed, but not freed yet.
  std::string_view state;
  absl::Status status;  // why it was lost; OK if it was not lost
};

// A wire over the memory of devices. Thread-safe.
class DeviceWire : public CommunicatorWire {
 public:
  // Does what Wire::Open does, for a communicator over the devices with these ordinals. The memory
  // of its operations is the first's, or what the first reaches. Of the others those that reach the
  // first are *rails*: each carries a share of the bytes. A communicator has as many rails as the
  // rank with the fewest, and at most kMaxRails. It also returns INVALID_ARGUMENT if there is no
  // such device. The first call takes some 100 ms.
  virtual absl::StatusOr<std::string> OpenOn(const std::vector<int>& devices,
                                             CommunicatorId communicator, int rank, int size) = 0;
  // Does what OpenOn does, on device 0.
  absl::StatusOr<std::string> Open(CommunicatorId communicator, int rank, int size) override {
    return OpenOn({0}, communicator, rank, size);
  }
  // Describes the communicators that are open or not yet freed. Waits for nothing.
  virtual std::vector<DeviceCommunicatorStatus> Describe() const = 0;
  // The number of communicators since the start in which this daemon was rank 0 and that never
  // connected.
  virtual int64_t Abandoned() const = 0;

 protected:
  using CommunicatorWire::CommunicatorWire;
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_DEVICE_WIRE_H_
