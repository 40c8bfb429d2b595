#include "daemon/group/communicator.h"

#include <catch2/catch.hpp>
#include <variant>

#include "transport/base/status.h"

namespace refitd::coordinator {
namespace {

constexpr Duration kLimit = std::chrono::seconds(8);
const NodeId kSelf = kCoordinatorNode;
const NodeId kB(1);
const NodeId kC(2);

struct Plane {
  Plane() {
    nodes.Join({kB, "b", "host:1"}, now);
    nodes.Join({kC, "c", "host:2"}, now);
  }
  void Connect() {
    for (const NodeId node : communicator.ranks()) communicator.Opened(node, "at");
    communicator.Connect(kLimit, now);
  }
  bool Fails(NodeId node, absl::StatusCode code, std::vector<int> ranks) {
    const absl::Status status = AboutRanks(absl::Status(code, "no way"), std::move(ranks));
    const bool all = communicator.Answered(node, status, now);
    communicator.CheckInvariants();
    return all;
  }
  std::optional<std::set<NodeId>> Suspects() const {
    return communicator.Suspects([](NodeId node) { return node == kSelf; }, now);
  }
  TimePoint now{std::chrono::seconds(1)};
  JoinedNodes nodes{"a", std::chrono::seconds(10)};
  Communicator communicator{CommunicatorId(3), {kSelf, kB, kC}, kLimit, now};
};

TEST_CASE("a communicator connects when all ends are open, and is up when all ranks are") {
  Plane p;
  const NodeCommands open = p.communicator.Open();
  REQUIRE(open.size() == 3);
  CHECK(std::get<OpenCommunicator>(open[2].command).rank == 2);
  CHECK_FALSE(p.communicator.Opened(kSelf, "x"));
  CHECK_FALSE(p.communicator.Opened(kC, "z"));
  CHECK(p.communicator.Opened(kB, "y"));
  CHECK(p.communicator.state() == "opening");
  const NodeCommands commands = p.communicator.Connect(kLimit, p.now);
  CHECK(p.communicator.state() == "connecting");
  const auto& connect = std::get<PeerCommunicatorConnect>(commands.at(1).command);
  CHECK(*connect.addresses == std::vector<std::string>{"x", "y", "z"});  // by rank
  CHECK(connect.coordinator_rank == 0u);
  for (const NodeId node : {kC, kSelf, kB}) {
    CHECK(p.communicator.Answered(node, absl::OkStatus(), p.now) == (node == kB));
    p.communicator.CheckInvariants();
  }
  CHECK(p.communicator.up());
}

TEST_CASE("a communicator's collectives have distinct sequence numbers") {
  Plane p;
  CHECK(p.communicator.Take(3) == WireSeq(0));
  CHECK(p.communicator.Take(1) == WireSeq(3));
}

TEST_CASE("a rank that never opened its end is to blame at the deadline") {
  Plane p;
  p.communicator.Opened(kSelf, "x");
  p.communicator.Opened(kB, "y");
  CHECK_FALSE(p.Suspects().has_value());
  p.now += kLimit;
  CHECK(p.Suspects() == std::set{kC});
  const WhyDown why = p.communicator.Why({kC}, p.nodes);
  CHECK(why.reason ==
        "the data plane did not come up within 8 s (peers.wire_ms, or half of the update's "
        "remaining time): waited for daemon c");
  CHECK(why.kind == GiveUpClass::kDeadline);
}

TEST_CASE("a failure is judged soon after the first report, and early reports are not the last") {
  Plane p;
  p.Connect();
  const TimePoint before = p.communicator.due();
  CHECK_FALSE(p.Fails(kB, absl::StatusCode::kUnavailable, {2}));
  CHECK(p.communicator.due() == p.now + kWaitForReports);
  CHECK(p.communicator.due() < before);
}

TEST_CASE("of two ranks that could not reach each other, the one that an update needs stays") {
  Plane p;
  p.Connect();
  p.Fails(kB, absl::StatusCode::kDeadlineExceeded, {0});
  CHECK(p.Suspects() == std::set{kB});
}

TEST_CASE("the rank that more of the others could not reach is to blame") {
  Plane p;
  p.Connect();
  p.Fails(kSelf, absl::StatusCode::kDeadlineExceeded, {2});
  p.Fails(kB, absl::StatusCode::kDeadlineExceeded, {2});
  CHECK(p.Suspects() == std::set{kC});
  CHECK(p.communicator.Why({kC}, p.nodes).reason ==
        "the data plane did not come up on daemon a: no way (rank 2 is daemon c)");
}

TEST_CASE("a rank that could not reach one that is up is to blame itself") {
  Plane p;
  p.Connect();
  p.communicator.Answered(kC, absl::OkStatus(), p.now);
  p.Fails(kB, absl::StatusCode::kUnavailable, {2});
  CHECK(p.Suspects() == std::set{kB});
}

TEST_CASE("no node is left out for a failure between ranks that all have to stay") {
  Plane p;
  p.Connect();
  p.Fails(kSelf, absl::StatusCode::kDeadlineExceeded, {1});
  CHECK(p.communicator.Suspects([](NodeId node) { return node != kC; }, p.now)->empty());
}

// ---- a collective that fails ----

const NodeId kA(3);
const OfNode kNone = [](NodeId) { return false; };

absl::Status Late(const std::string& text) { return absl::DeadlineExceededError(text); }

TEST_CASE("a node that others name and that reported nothing is suspected first") {
  FailedWire failed("part 1", TimePoint());
  failed.Add(kA, {kB}, Late("waited for b"));
  failed.Add(kB, {kC}, Late("waited for c"));
  CHECK(failed.Suspect(kNone) == kC);
  CHECK(failed.ReportOf(kC) == Late("waited for c"));
  JoinedNodes nodes("self", std::chrono::seconds(1));
  CHECK(failed.Cause(nodes) == Late("waited for c"));
  failed.CheckInvariants();
}

TEST_CASE("ranks that waited say more than ranks whose connection broke") {
  FailedWire failed("part 1", TimePoint());
  failed.Add(kA, {kB}, absl::UnavailableError("b closed"));
  CHECK(failed.Suspect(kNone) == kB);
  failed.Add(kB, {kC}, Late("waited for c"));
  CHECK(failed.Suspect(kNone) == kC);
}

TEST_CASE("of nodes that look alike, one that the update does not need is suspected") {
  FailedWire failed("part 1", TimePoint());
  failed.Add(kA, {kB}, Late("waited for b"));
  failed.Add(kB, {kA}, Late("waited for a"));
  CHECK(failed.Suspect([](NodeId node) { return node == kA; }) == kB);
  CHECK(failed.Suspect([](NodeId node) { return node == kB; }) == kA);
}

TEST_CASE("a failure of the wire that names nobody has no suspect and the first report's status") {
  FailedWire failed("part 1", TimePoint());
  failed.Add(kA, {}, Late("first"));
  failed.Add(kB, {}, Late("second"));
  CHECK_FALSE(failed.Suspect(kNone).has_value());
  CHECK(failed.Cause(JoinedNodes("self", std::chrono::seconds(1))) == Late("first"));
}

}  // namespace
}  // namespace refitd::coordinator
