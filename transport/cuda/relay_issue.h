// A broadcast through slots, and the streams, copies and events by which it is issued to its
// devices. Private to transport/cuda/.
//
// Everything here is used by one issuing thread only (P7).
#ifndef REFITD_TRANSPORT_CUDA_RELAY_ISSUE_H_
#define REFITD_TRANSPORT_CUDA_RELAY_ISSUE_H_

#if defined(REFITD_CUDA)
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/cuda/api.h"
#include "transport/cuda/memory.h"
#include "transport/cuda/relay_plan.h"
#include "transport/transport.h"

namespace refitd {

// A broadcast through slots.
struct Relay {
  BroadcastMethod method = BroadcastMethod::kChain;
  int source = 0;              // device; all runs' bytes are on it
  std::vector<RelayRun> runs;  // not empty
  int64_t slot_bytes = 0;
  int64_t chunk_bytes = 0;  // of a chunk, at most
  struct Slot {
    int device = 0;
    char* data = nullptr;  // the slot's address for that device
  };
  std::vector<Slot> slots;  // each on a different device; in the order of the chain
  std::vector<std::shared_ptr<const void>> keep_alive;  // P6
};

// A stream, with an event that is recorded again and again. A wait is for the last record before
// the wait, which is well-defined because one thread issues both.
struct RelayStream {
  CUcontext context = nullptr;
  CUstream stream = nullptr;
  CUevent event = nullptr;
};

// The streams of all devices, made when first needed. Each device has one stream for the chunks
// that it hands on, shared by all broadcasts so that the next broadcast follows at once, and one
// for copies within the device: into its own slot, or packed for NCCL.
class RelayStreams {
 public:
  explicit RelayStreams(std::shared_ptr<CudaContexts> contexts) : contexts_(std::move(contexts)) {}
  RelayStreams(const RelayStreams&) = delete;
  RelayStreams& operator=(const RelayStreams&) = delete;

  const CudaApi& api() const { return contexts_->api(); }
  absl::StatusOr<RelayStream*> Onward(int device) { return Get({device, false}); }
  absl::StatusOr<RelayStream*> Own(int device) { return Get({device, true}); }
  // Destroys the streams. Call it when nothing runs on them and nothing is issued any more.
  void Destroy();

 private:
  absl::StatusOr<RelayStream*> Get(std::pair<int, bool> key);

  const std::shared_ptr<CudaContexts> contexts_;
  std::map<std::pair<int, bool>, RelayStream> streams_;
};

// The moments at which the slots of a broadcast are filled, for work on other streams. The issuing
// thread records them; afterwards any thread may wait.
class Arrivals {
 public:
  explicit Arrivals(const CudaApi& api) : api_(api) {}
  ~Arrivals();
  Arrivals(const Arrivals&) = delete;
  Arrivals& operator=(const Arrivals&) = delete;

  // The device's slot is filled by what was issued to `by`.
  absl::Status Record(int device, const RelayStream& by);
  // Makes stream `on` of the device wait until its slot is filled; no slot: does nothing.
  absl::Status Wait(int device, CUstream on) const;

 private:
  const CudaApi& api_;
  struct Filled {
    CUcontext context = nullptr;  // of the device that fills the slot
    CUevent event = nullptr;
  };
  std::map<int, Filled> filled_;  // by device
};

// The work of one broadcast. Join must follow even if issuing fails.
class RelayIssue {
 public:
  RelayIssue(RelayStreams* streams, const CudaMemory* memory)
      : streams_(streams), memory_(memory) {}

  const CudaApi& api() const { return streams_->api(); }
  // The streams that the broadcast uses.
  absl::StatusOr<RelayStream*> Onward(int device) { return Using(streams_->Onward(device)); }
  absl::StatusOr<RelayStream*> Own(int device) { return Using(streams_->Own(device)); }

  // The region that holds `data`; and the address at which `device` reaches `data`. UNAVAILABLE:
  // the device can't reach it.
  absl::StatusOr<std::shared_ptr<const DeviceRegion>> RegionOf(const char* data) const;
  absl::StatusOr<char*> Reach(char* data, int device) const;

  // Copies runs into a slot; `slot` is the slot's address for the stream's device.
  absl::Status CopyRuns(const RelayStream& on, const std::vector<RelayRun>& runs, char* slot) const;
  absl::Status Copy(const RelayStream& on, char* to, const char* from, int64_t bytes) const;
  absl::Status Clear(const RelayStream& on, char* data, int64_t bytes) const;
  absl::Status Record(const RelayStream& on) const;
  // Makes stream `on` wait for the last record of the event of stream `event`.
  absl::Status Wait(const RelayStream& on, const RelayStream& event) const;

  // Makes `main` wait for all work that was issued. If that fails, nobody learns when the devices
  // are done, which counts as a lost context (api.h).
  absl::Status Join(CUstream main) const;

 private:
  absl::StatusOr<RelayStream*> Using(absl::StatusOr<RelayStream*> stream);

  RelayStreams* const streams_;
  const CudaMemory* const memory_;
  std::vector<const RelayStream*> used_;
};

}  // namespace refitd

#endif  // REFITD_CUDA
#endif  // REFITD_TRANSPORT_CUDA_RELAY_ISSUE_H_
