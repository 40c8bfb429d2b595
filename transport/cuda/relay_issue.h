// A broadcast through slots, and what it issues to the devices that take part: streams, copies, and
// the events between them. Private to transport/cuda/.
//
// Everything here belongs to one issuing thread (P7).
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
  int64_t chunk_bytes = 0;  // of a chain with more than one link
  struct Slot {
    int device = 0;
    char* data = nullptr;  // as that device addresses it
  };
  std::vector<Slot> slots;  // each on another device; in the order of the chain
  std::vector<std::shared_ptr<const void>> keep_alive;  // P6
};

// A stream, with an event that is recorded again and again: a wait is for the last record before
// it, and one thread issues both.
struct RelayStream {
  CUcontext context = nullptr;
  CUstream stream = nullptr;
  CUevent event = nullptr;
};

// Every device has one stream for what it hands on, shared by all broadcasts, so that the next one
// follows at once; and one for what it copies within itself: into its own slot, or packed for NCCL.
// Made when first needed.
class RelayStreams {
 public:
  explicit RelayStreams(std::shared_ptr<CudaContexts> contexts) : contexts_(std::move(contexts)) {}
  RelayStreams(const RelayStreams&) = delete;
  RelayStreams& operator=(const RelayStreams&) = delete;

  const CudaApi& api() const { return contexts_->api(); }
  absl::StatusOr<RelayStream*> Onward(int device) { return Get({device, false}); }
  absl::StatusOr<RelayStream*> Own(int device) { return Get({device, true}); }
  // Nothing runs on them, and nobody issues any more.
  void Destroy();

 private:
  absl::StatusOr<RelayStream*> Get(std::pair<int, bool> key);

  const std::shared_ptr<CudaContexts> contexts_;
  std::map<std::pair<int, bool>, RelayStream> streams_;
};

// One broadcast's work. Whatever comes of issuing it, Join follows.
class RelayIssue {
 public:
  RelayIssue(RelayStreams* streams, const CudaMemory* memory)
      : streams_(streams), memory_(memory) {}

  const CudaApi& api() const { return streams_->api(); }
  // Those that the broadcast uses.
  absl::StatusOr<RelayStream*> Onward(int device) { return Using(streams_->Onward(device)); }
  absl::StatusOr<RelayStream*> Own(int device) { return Using(streams_->Own(device)); }

  // The region that holds it, and where `device` reaches it. UNAVAILABLE: it can't.
  absl::StatusOr<std::shared_ptr<const CudaRegion>> RegionOf(const char* data) const;
  absl::StatusOr<char*> Reach(char* data, int device) const;

  // Into a slot as the stream's device reaches it.
  absl::Status CopyRuns(const RelayStream& on, const std::vector<RelayRun>& runs, char* slot) const;
  absl::Status Copy(const RelayStream& on, char* to, const char* from, int64_t bytes) const;
  absl::Status Clear(const RelayStream& on, char* data, int64_t bytes) const;
  absl::Status Record(const RelayStream& on) const;
  // For the last record of `event`'s stream.
  absl::Status Wait(const RelayStream& on, const RelayStream& event) const;

  // `main` waits for all that was issued. Where that can't be, nothing tells any more when the
  // devices are done: a lost context (api.h).
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
