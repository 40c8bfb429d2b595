#include "daemon/group/worker_wire.h"

#include <string>

#include "transport/base/status.h"

namespace refitd::worker {

void WireEnd::Handle(const OpenCommunicator& command, const Output& out) {
  if (communicator_.has_value()) out.Do(CloseCommunicator{*communicator_});
  communicator_ = command.communicator;
  rank_ = command.rank;
  size_ = command.size;
  state_ = "opening";
  out.Do(command);
}

void WireEnd::Handle(const CommunicatorOpened& event, const Output& out) const {
  if (communicator_ == event.communicator) out.reports->push_back(event);
}

void WireEnd::Handle(const PeerCommunicatorConnect& command, const Output& out) {
  if (communicator_ != command.communicator) return;
  state_ = "connecting";
  out.Do(ConnectCommunicator{
      command.communicator,
      command.addresses == nullptr ? std::vector<std::string>() : *command.addresses,
      command.timeout});
}

void WireEnd::Handle(const CommunicatorUp& event, const Output& out) {
  if (communicator_ != event.communicator) return;
  if (event.status.ok()) state_ = "up";
  out.reports->push_back(event);
}

bool WireEnd::Close(CommunicatorId communicator, const Output& out) {
  if (communicator_ != communicator) return false;
  out.Do(CloseCommunicator{communicator});
  communicator_.reset();
  state_ = "";
  return true;
}

// ---- the wire lock ----

void WireEnd::Handle(const PeerWireLock& command, const Output& out) {
  lock_ = command.update;
  giving_back_ = false;
  if (held_) {
    out.reports->push_back(PeerWireGranted{command.update});
    return;
  }
  out.Do(AcquireWire{});
}

void WireEnd::GiveBackIfAsked(const Output& out) {
  if (!giving_back_) return;
  giving_back_ = held_ = false;
  lock_.reset();
  out.Do(ReleaseWire{});
}

void WireEnd::Handle(const WireGranted& /*event*/, const Output& out) {
  // If the update that asked for the lock is over, nobody needs it.
  if (!lock_.has_value()) return out.Do(ReleaseWire{});
  held_ = true;
  out.reports->push_back(PeerWireGranted{*lock_});
}

void WireEnd::Handle(const WireWaits& event, const Output& out) const {
  if (lock_.has_value()) out.reports->push_back(PeerWireWaits{*lock_, event.holder});
}

void WireEnd::Handle(const WireWanted& /*event*/, const Output& out) const {
  if (lock_.has_value()) out.reports->push_back(PeerWireWanted{*lock_});
}

void WireEnd::CheckInvariants() const {
  REFITD_CHECK(communicator_.has_value() == !state_.empty());
  REFITD_CHECK(!communicator_.has_value() || (rank_ >= 0 && rank_ < size_));
  REFITD_CHECK(lock_.has_value() || (!held_ && !giving_back_));
}

}  // namespace refitd::worker
