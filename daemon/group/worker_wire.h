// This daemon's end of a group's communicator, and the group's hold of the daemon's wire lock.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_WORKER_WIRE_H_
#define REFITD_DAEMON_GROUP_WORKER_WIRE_H_

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/group/machine.h"

namespace refitd::worker {

// The lists to which a call appends its actions and reports.
struct Output {
  MachineActions* actions = nullptr;
  std::vector<PeerReport>* reports = nullptr;

  template <typename Action>
  void Do(Action action) const {
    actions->push_back(PeerAction(std::move(action)));
  }
};

class WireEnd {
 public:
  explicit WireEnd(Duration limit) : limit_(limit) {}

  const std::optional<CommunicatorId>& communicator() const { return communicator_; }
  std::string_view state() const { return state_; }  // "": there is no communicator
  int rank() const { return rank_; }
  int size() const { return size_; }
  // How long a collective of an update with that deadline may take.
  Duration TimeoutFor(TimePoint deadline, TimePoint now) const {
    return std::clamp<Duration>(deadline - now, std::chrono::milliseconds(1), limit_);
  }

  void Handle(const OpenCommunicator& command, const Output& out);
  void Handle(const PeerCommunicatorConnect& command, const Output& out);
  void Handle(const CommunicatorOpened& event, const Output& out) const;
  void Handle(const CommunicatorUp& event, const Output& out);
  // False: it is another communicator, or was closed before.
  bool Close(CommunicatorId communicator, const Output& out);

  // The update for which the lock was asked, if any.
  const std::optional<UpdateId>& lock() const { return lock_; }
  void Handle(const PeerWireLock& command, const Output& out);
  // The lock is to be given back once nothing of the group is on the wire (GiveBackIfAsked).
  void Unlock(UpdateId update) { giving_back_ |= lock_ == update; }
  void GiveBackIfAsked(const Output& out);
  void Handle(const WireGranted& event, const Output& out);
  void Handle(const WireWaits& event, const Output& out) const;
  void Handle(const WireWanted& event, const Output& out) const;

  void CheckInvariants() const;

 private:
  const Duration limit_;
  std::optional<CommunicatorId> communicator_;
  std::string_view state_;
  int rank_ = 0;
  int size_ = 0;
  std::optional<UpdateId> lock_;
  bool held_ = false;
  bool giving_back_ = false;
};

}  // namespace refitd::worker

#endif  // REFITD_DAEMON_GROUP_WORKER_WIRE_H_
