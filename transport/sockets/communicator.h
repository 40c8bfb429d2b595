// One end of one communicator of the wire over sockets.
//
// Under TLS each stream has a lane (transport/sockets/lane.h) with a thread of its own, because one
// thread encrypts fewer bytes than a network carries: lane 0 is driven by the communicator's
// thread, each other lane by a thread that Connect starts. In the clear one lane has all streams.
// An operation ends when all lanes have stopped (P6); a lane that fails halts the others.
#ifndef REFITD_TRANSPORT_SOCKETS_COMMUNICATOR_H_
#define REFITD_TRANSPORT_SOCKETS_COMMUNICATOR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/mutex.h"
#include "transport/sockets/lane.h"
#include "transport/sockets/listener.h"
#include "transport/wire_communicators.h"

namespace refitd {

class SocketCommunicator final : public WireCommunicator {
 public:
  // `tls`, null in the clear, must outlive the communicator. `streams`: connections that this end
  // wants between two ranks; the smallest number of all ends counts.
  SocketCommunicator(CommunicatorId id, int rank, int size, int streams,
                     std::shared_ptr<WireListener> listener, TlsContexts* tls,
                     WireCounters* totals);
  ~SocketCommunicator() override;

  absl::StatusOr<std::string> Open() override;

 private:
  using Cause = SocketLane::Cause;

  absl::Status Connect(const WireWork& work, bool* began) override;
  absl::Status Move(const WireWork& work, bool* began) override;
  void Lose() override { CloseLanes(); }
  void End() override { CloseLanes(); }
  void Interrupt() override;

  absl::Status TakeAddresses(const std::vector<std::string>& encoded);
  void StartThreads();
  void RunThread(size_t lane);
  // Lets every lane do its part of the work, and returns when all have stopped.
  absl::Status RunLanes(const WireWork& work);
  void RunLane(size_t lane, const WireWork& work);
  absl::Status Failure(const WireWork& work, Cause cause, const SocketLane& lane) const;
  absl::Status Broken(const SocketLane& lane, const SocketLane::Awaited& awaited) const;
  void CountUses();
  void Halt();
  void CloseLanes();

  // Constant after Open.
  const int streams_;
  const std::shared_ptr<WireListener> listener_;
  std::string encoded_;
  LaneShared shared_;
  std::vector<std::unique_ptr<SocketLane>> lanes_;

  // Used by the communicator's thread alone, since its start.
  uint64_t door_ = 0;  // of the listener; 0: none
  std::vector<std::thread> threads_;

  Mutex mutex_;
  CondVar changed_;
  const WireWork* work_ ABSL_GUARDED_BY(mutex_) = nullptr;  // null: between operations
  uint64_t round_ ABSL_GUARDED_BY(mutex_) = 0;              // counts operations
  size_t running_ ABSL_GUARDED_BY(mutex_) = 0;              // threads that have not stopped
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  Cause cause_ ABSL_GUARDED_BY(mutex_) = Cause::kNone;  // the gravest of all lanes
  size_t failed_ ABSL_GUARDED_BY(mutex_) = 0;           // the lane of that cause
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_SOCKETS_COMMUNICATOR_H_
