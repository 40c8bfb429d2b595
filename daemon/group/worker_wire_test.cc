#include "daemon/group/worker_wire.h"

#include <catch2/catch.hpp>
#include <variant>

namespace refitd::worker {
namespace {

struct End {
  // Whether the last call asked for such an action.
  template <typename Action>
  bool Did() {
    const MachineActions now = std::exchange(actions, {});
    wire.CheckInvariants();
    return !now.empty() && std::holds_alternative<Action>(std::get<PeerAction>(now.back()));
  }
  MachineActions actions;
  std::vector<PeerReport> reports;
  Output out{&actions, &reports};
  WireEnd wire{std::chrono::seconds(30)};
};

TEST_CASE("a new communicator closes the one before, and late events of that change nothing") {
  End e;
  e.wire.Handle(OpenCommunicator{CommunicatorId(1), 0, 2}, e.out);
  e.wire.Handle(OpenCommunicator{CommunicatorId(2), 1, 2}, e.out);
  REQUIRE(e.actions.size() == 3);
  e.wire.Handle(CommunicatorUp{CommunicatorId(1), absl::OkStatus()}, e.out);
  CHECK(e.wire.state() == "opening");
  CHECK(e.reports.empty());
  e.wire.Handle(CommunicatorUp{CommunicatorId(2), absl::OkStatus()}, e.out);
  CHECK(e.wire.state() == "up");
  CHECK_FALSE(e.wire.Close(CommunicatorId(1), e.out));
  CHECK(e.wire.Close(CommunicatorId(2), e.out));
  CHECK(e.Did<CloseCommunicator>());
}

TEST_CASE("a wire lock that an update asked for and no longer needs is given back when it comes") {
  End e;
  e.wire.Handle(PeerWireLock{UpdateId(1)}, e.out);
  CHECK(e.Did<AcquireWire>());
  e.wire.Unlock(UpdateId(1));
  e.wire.GiveBackIfAsked(e.out);
  CHECK(e.Did<ReleaseWire>());
  e.wire.Handle(WireGranted{}, e.out);
  CHECK(e.Did<ReleaseWire>());
  CHECK(e.reports.empty());
}

TEST_CASE("an update whose predecessor has not given the wire lock back has it at once") {
  End e;
  e.wire.Handle(PeerWireLock{UpdateId(1)}, e.out);
  e.wire.Handle(WireGranted{}, e.out);
  e.wire.Unlock(UpdateId(1));
  e.wire.Handle(PeerWireLock{UpdateId(2)}, e.out);
  REQUIRE(e.reports.size() == 2);
  CHECK(std::get<PeerWireGranted>(e.reports[1]).update == UpdateId(2));
  CHECK(e.actions.size() == 1);
  e.wire.Unlock(UpdateId(1));  // a late command of the update before
  e.wire.GiveBackIfAsked(e.out);
  CHECK(e.actions.size() == 1);
}

}  // namespace
}  // namespace refitd::worker
