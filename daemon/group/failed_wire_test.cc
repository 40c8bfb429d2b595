#include "daemon/group/failed_wire.h"

#include <catch2/catch.hpp>

namespace refitd::coordinator {
namespace {

const NodeId kA(1);
const NodeId kB(2);
const NodeId kC(3);
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
