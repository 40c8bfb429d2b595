#include "daemon/node/peers.h"

#include <catch2/catch.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/node/session_test_util.h"

namespace refitd {
namespace {

using std::chrono::milliseconds;

Peers::Waiting Waits(std::shared_ptr<KeptSession> session, const std::string& group,
                     const std::string& boot_id, TimePoint deadline = TimePoint::max()) {
  Peers::Waiting peer;
  peer.hello = HelloTo(group, boot_id);
  peer.session = std::move(session);
  peer.deadline = deadline;
  return peer;
}

TEST_CASE("daemons that wait are taken in the order in which they came, each group's alone") {
  Peers peers;
  const auto first = std::make_shared<KeptSession>(1);
  const auto second = std::make_shared<KeptSession>(2);
  peers.Wait(Waits(first, "a", "x"));
  peers.Wait(Waits(std::make_shared<KeptSession>(3), "b", "y"));
  peers.Wait(Waits(second, "a", "z"));
  peers.CheckInvariants();
  const std::vector<Peers::Waiting> taken = peers.TakeWaiting("a");
  REQUIRE(taken.size() == 2);
  CHECK(taken[0].session == first);
  CHECK(taken[1].session == second);
  CHECK(peers.TakeWaiting("a").empty());
  CHECK(peers.TakeWaiting("b").size() == 1);
}

TEST_CASE("the nodes of a group are those that have joined it") {
  Peers peers;
  CHECK(peers.NodesOf("a").empty());
  const NodeId node = peers.Join(HelloTo("a"), std::make_shared<KeptSession>(1));
  peers.Join(HelloTo("b"), std::make_shared<KeptSession>(2));
  CHECK(peers.NodesOf("a") == std::vector<NodeId>{node});
}

TEST_CASE("a hello that comes after that of a later link of its process is refused") {
  Peers peers;
  Peers::Waiting waits = Waits(std::make_shared<KeptSession>(1), "a", "x");
  waits.hello.dial = 5;
  peers.Wait(std::move(waits));
  peers.Join(HelloTo("b", "x", 6), std::make_shared<KeptSession>(2));
  for (const std::string group : {"a", "b"}) {
    INFO(group);
    CHECK(peers.CheckLatest(HelloTo(group, "x", 4)).code() == absl::StatusCode::kAborted);
    CHECK(peers.CheckLatest(HelloTo(group, "x", 7)).ok());
    CHECK(peers.CheckLatest(HelloTo(group, "y", 4)).ok());  // another process counts anew
  }
  CHECK(peers.CheckLatest(HelloTo("a", "x", 5)).ok());
  CHECK(peers.CheckLatest(HelloTo("c", "x", 1)).ok());
  REQUIRE(peers.Remove(2).has_value());
  CHECK(peers.CheckLatest(HelloTo("b", "x", 4)).ok());
}

TEST_CASE("a daemon that dials anew waits once, and its earlier link is ended") {
  Peers peers;
  const auto earlier = std::make_shared<KeptSession>(1);
  const auto other = std::make_shared<KeptSession>(2);
  const auto other_process = std::make_shared<KeptSession>(4);
  peers.Wait(Waits(earlier, "a", "x"));
  peers.Wait(Waits(other, "b", "x"));
  peers.Wait(Waits(other_process, "a", "y"));
  peers.ForgetEarlier(Waits(std::make_shared<KeptSession>(3), "a", "x"));
  REQUIRE(earlier->ends.size() == 1);
  CHECK(earlier->ends[0].code() == absl::StatusCode::kAborted);
  CHECK(other->ends.empty());
  CHECK(other_process->ends.empty());
  CHECK(peers.waiting().size() == 2);
}

TEST_CASE("a session that ends while it waits is forgotten, and belongs to no group") {
  Peers peers;
  const auto gone = std::make_shared<KeptSession>(1);
  peers.Wait(Waits(gone, "a", "x"));
  peers.Wait(Waits(std::make_shared<KeptSession>(2), "a", "y"));
  CHECK_FALSE(peers.Remove(1).has_value());
  CHECK(gone->ends.empty());  // the link has ended by itself
  const std::vector<Peers::Waiting> taken = peers.TakeWaiting("a");
  REQUIRE(taken.size() == 1);
  CHECK(taken[0].hello.boot_id == "y");
}

TEST_CASE("a daemon waits until its deadline, and is then told that the group was not created") {
  Peers peers;
  const TimePoint now{};
  const auto late = std::make_shared<KeptSession>(1);
  const auto patient = std::make_shared<KeptSession>(2);
  CHECK_FALSE(peers.NextDeadline().has_value());
  peers.Wait(Waits(patient, "a", "x", now + milliseconds(20)));
  peers.Wait(Waits(late, "a", "y", now + milliseconds(10)));
  REQUIRE(peers.NextDeadline().has_value());
  CHECK(*peers.NextDeadline() == now + milliseconds(10));
  peers.RefuseLate(now + milliseconds(10));
  REQUIRE(late->ends.size() == 1);
  CHECK(late->ends[0].message() == "group 'a' was not created in time");
  CHECK(patient->ends.empty());
  CHECK(*peers.NextDeadline() == now + milliseconds(20));
}

TEST_CASE("daemons that wait are limited") {
  Peers peers;
  for (uint64_t id = 1; id <= Peers::kMaxWaiting; ++id) {
    REQUIRE(peers.AdmitWaiting().ok());
    peers.Wait(Waits(std::make_shared<KeptSession>(id), "a", std::to_string(id)));
  }
  CHECK(peers.AdmitWaiting().message() == "1024 daemons wait for groups already");
}

TEST_CASE("a session is one node's until it ends, by either side") {
  Peers peers;
  const auto a = std::make_shared<KeptSession>(1);
  const auto b = std::make_shared<KeptSession>(2);
  const NodeId node_a = peers.Join(HelloTo("g"), a);
  const NodeId node_b = peers.Join(HelloTo("g"), b);
  peers.CheckInvariants();
  CHECK(node_a != node_b);
  CHECK(peers.Any("g"));
  CHECK(peers.SessionOf("g", node_a) == a);
  CHECK(peers.SessionOf("h", node_a) == nullptr);
  REQUIRE(peers.Find(1).has_value());
  CHECK(peers.Find(1)->node == node_a);

  peers.End("g", node_a, absl::AbortedError("no more"));
  REQUIRE(a->ends.size() == 1);
  CHECK_FALSE(peers.Find(1).has_value());
  CHECK_FALSE(peers.Remove(1).has_value());
  peers.End("g", node_a, absl::AbortedError("no more"));
  CHECK(a->ends.size() == 1);
  peers.CheckInvariants();

  const std::optional<Peers::Joined> gone = peers.Remove(2);
  REQUIRE(gone.has_value());
  CHECK(gone->group == "g");
  CHECK(gone->node == node_b);
  CHECK(b->ends.empty());
  CHECK_FALSE(peers.Any("g"));
  peers.CheckInvariants();
}

TEST_CASE("a group that is deleted ends its sessions, and no other group's") {
  Peers peers;
  const auto deleted = std::make_shared<KeptSession>(1);
  const auto deleted_too = std::make_shared<KeptSession>(3);
  const auto kept = std::make_shared<KeptSession>(2);
  peers.Join(HelloTo("g"), deleted);
  peers.Join(HelloTo("g"), deleted_too);
  peers.Join(HelloTo("h"), kept);
  peers.EndGroup("g", absl::AbortedError("the group was deleted"));
  peers.CheckInvariants();
  CHECK(deleted->ends.size() == 1);
  CHECK(deleted_too->ends.size() == 1);
  CHECK(kept->ends.empty());
  CHECK_FALSE(peers.Any("g"));
  CHECK(peers.Any("h"));
}

TEST_CASE("all sessions end with the daemon, those that wait too") {
  Peers peers;
  const auto joined = std::make_shared<KeptSession>(1);
  const auto waiting = std::make_shared<KeptSession>(2);
  peers.Join(HelloTo("g"), joined);
  peers.Wait(Waits(waiting, "h", "x"));
  peers.EndAll(absl::UnavailableError("the daemon stops"));
  CHECK(joined->ends.size() == 1);
  CHECK(waiting->ends.size() == 1);
  CHECK_FALSE(peers.Any("g"));
  CHECK(peers.waiting().empty());
  CHECK_FALSE(peers.NextDeadline().has_value());
  peers.CheckInvariants();
}

}  // namespace
}  // namespace refitd
