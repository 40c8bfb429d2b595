#include "daemon/node/peer_sessions.h"

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

PeerSessions::Waiting Waits(std::shared_ptr<KeptSession> session, const std::string& group,
                            const std::string& boot_id, TimePoint deadline = TimePoint::max()) {
  PeerSessions::Waiting peer;
  peer.hello = HelloTo(group, boot_id);
  peer.session = std::move(session);
  peer.deadline = deadline;
  return peer;
}

TEST_CASE("daemons that wait are taken in the order in which they came, each group's alone") {
  PeerSessions sessions;
  const auto first = std::make_shared<KeptSession>(1);
  const auto second = std::make_shared<KeptSession>(2);
  sessions.Wait(Waits(first, "a", "x"));
  sessions.Wait(Waits(std::make_shared<KeptSession>(3), "b", "y"));
  sessions.Wait(Waits(second, "a", "z"));
  sessions.CheckInvariants();
  const std::vector<PeerSessions::Waiting> taken = sessions.TakeWaiting("a");
  REQUIRE(taken.size() == 2);
  CHECK(taken[0].session == first);
  CHECK(taken[1].session == second);
  CHECK(sessions.TakeWaiting("a").empty());
  CHECK(sessions.TakeWaiting("b").size() == 1);
}

TEST_CASE("the nodes of a group are those that have joined it") {
  PeerSessions sessions;
  CHECK_FALSE(sessions.Any("a"));
  const NodeId node = sessions.Join(HelloTo("a"), std::make_shared<KeptSession>(1));
  sessions.Join(HelloTo("b"), std::make_shared<KeptSession>(2));
  CHECK(sessions.Any("a"));
  CHECK(sessions.SessionOf("a", node) != nullptr);
  CHECK(sessions.SessionOf("b", node) == nullptr);
}

TEST_CASE("a hello that comes after that of a later link of its process is refused") {
  PeerSessions sessions;
  PeerSessions::Waiting waits = Waits(std::make_shared<KeptSession>(1), "a", "x");
  waits.hello.dial = 5;
  sessions.Wait(std::move(waits));
  sessions.Join(HelloTo("b", "x", 6), std::make_shared<KeptSession>(2));
  for (const std::string group : {"a", "b"}) {
    INFO(group);
    CHECK(sessions.CheckLatest(HelloTo(group, "x", 4)).code() == absl::StatusCode::kAborted);
    CHECK(sessions.CheckLatest(HelloTo(group, "x", 7)).ok());
    CHECK(sessions.CheckLatest(HelloTo(group, "y", 4)).ok());  // another process counts anew
  }
  CHECK(sessions.CheckLatest(HelloTo("a", "x", 5)).ok());
  CHECK(sessions.CheckLatest(HelloTo("c", "x", 1)).ok());
  REQUIRE(sessions.Remove(2).has_value());
  CHECK(sessions.CheckLatest(HelloTo("b", "x", 4)).ok());
}

TEST_CASE("a daemon that dials anew waits once, and its earlier link is ended") {
  PeerSessions sessions;
  const auto earlier = std::make_shared<KeptSession>(1);
  const auto other = std::make_shared<KeptSession>(2);
  const auto other_process = std::make_shared<KeptSession>(4);
  sessions.Wait(Waits(earlier, "a", "x"));
  sessions.Wait(Waits(other, "b", "x"));
  sessions.Wait(Waits(other_process, "a", "y"));
  sessions.ForgetEarlier(Waits(std::make_shared<KeptSession>(3), "a", "x"));
  REQUIRE(earlier->ends.size() == 1);
  CHECK(earlier->ends[0].code() == absl::StatusCode::kAborted);
  CHECK(other->ends.empty());
  CHECK(other_process->ends.empty());
  CHECK(sessions.waiting().size() == 2);
}

TEST_CASE("a session that ends while it waits is forgotten, and belongs to no group") {
  PeerSessions sessions;
  const auto gone = std::make_shared<KeptSession>(1);
  sessions.Wait(Waits(gone, "a", "x"));
  sessions.Wait(Waits(std::make_shared<KeptSession>(2), "a", "y"));
  CHECK_FALSE(sessions.Remove(1).has_value());
  CHECK(gone->ends.empty());  // the link has ended by itself
  const std::vector<PeerSessions::Waiting> taken = sessions.TakeWaiting("a");
  REQUIRE(taken.size() == 1);
  CHECK(taken[0].hello.boot_id == "y");
}

TEST_CASE("a daemon that waits for a group fails at its deadline: the group was not created") {
  PeerSessions sessions;
  const TimePoint now{};
  const auto late = std::make_shared<KeptSession>(1);
  const auto patient = std::make_shared<KeptSession>(2);
  CHECK_FALSE(sessions.NextDeadline().has_value());
  sessions.Wait(Waits(patient, "a", "x", now + milliseconds(20)));
  sessions.Wait(Waits(late, "a", "y", now + milliseconds(10)));
  REQUIRE(sessions.NextDeadline().has_value());
  CHECK(*sessions.NextDeadline() == now + milliseconds(10));
  sessions.RefuseLate(now + milliseconds(10));
  REQUIRE(late->ends.size() == 1);
  CHECK(late->ends[0].message() == "group 'a' was not created in time");
  CHECK(patient->ends.empty());
  CHECK(*sessions.NextDeadline() == now + milliseconds(20));
}

TEST_CASE("daemons that wait are limited") {
  PeerSessions sessions;
  for (uint64_t id = 1; id <= PeerSessions::kMaxWaiting; ++id) {
    REQUIRE(sessions.AdmitWaiting().ok());
    sessions.Wait(Waits(std::make_shared<KeptSession>(id), "a", std::to_string(id)));
  }
  CHECK(sessions.AdmitWaiting().message() == "1024 daemons wait for groups already");
}

TEST_CASE("a session is one node's until it ends, by either side") {
  PeerSessions sessions;
  const auto a = std::make_shared<KeptSession>(1);
  const auto b = std::make_shared<KeptSession>(2);
  const NodeId node_a = sessions.Join(HelloTo("g"), a);
  const NodeId node_b = sessions.Join(HelloTo("g"), b);
  sessions.CheckInvariants();
  CHECK(node_a != node_b);
  CHECK(sessions.Any("g"));
  CHECK(sessions.SessionOf("g", node_a) == a);
  CHECK(sessions.SessionOf("h", node_a) == nullptr);
  REQUIRE(sessions.Find(1).has_value());
  CHECK(sessions.Find(1)->node == node_a);

  sessions.End("g", node_a, absl::AbortedError("no more"));
  REQUIRE(a->ends.size() == 1);
  CHECK_FALSE(sessions.Find(1).has_value());
  CHECK_FALSE(sessions.Remove(1).has_value());
  sessions.End("g", node_a, absl::AbortedError("no more"));
  CHECK(a->ends.size() == 1);
  sessions.CheckInvariants();

  const std::optional<PeerSessions::Joined> gone = sessions.Remove(2);
  REQUIRE(gone.has_value());
  CHECK(gone->group == "g");
  CHECK(gone->node == node_b);
  CHECK(b->ends.empty());
  CHECK_FALSE(sessions.Any("g"));
  sessions.CheckInvariants();
}

TEST_CASE("a group that is deleted ends its sessions, and no other group's") {
  PeerSessions sessions;
  const auto deleted = std::make_shared<KeptSession>(1);
  const auto deleted_too = std::make_shared<KeptSession>(3);
  const auto kept = std::make_shared<KeptSession>(2);
  sessions.Join(HelloTo("g"), deleted);
  sessions.Join(HelloTo("g"), deleted_too);
  sessions.Join(HelloTo("h"), kept);
  sessions.EndGroup("g", absl::AbortedError("the group was deleted"));
  sessions.CheckInvariants();
  CHECK(deleted->ends.size() == 1);
  CHECK(deleted_too->ends.size() == 1);
  CHECK(kept->ends.empty());
  CHECK_FALSE(sessions.Any("g"));
  CHECK(sessions.Any("h"));
}

TEST_CASE("all sessions end with the daemon, those that wait too") {
  PeerSessions sessions;
  const auto joined = std::make_shared<KeptSession>(1);
  const auto waiting = std::make_shared<KeptSession>(2);
  sessions.Join(HelloTo("g"), joined);
  sessions.Wait(Waits(waiting, "h", "x"));
  sessions.EndAll(absl::UnavailableError("the daemon stops"));
  CHECK(joined->ends.size() == 1);
  CHECK(waiting->ends.size() == 1);
  CHECK_FALSE(sessions.Any("g"));
  CHECK(sessions.waiting().empty());
  CHECK_FALSE(sessions.NextDeadline().has_value());
  sessions.CheckInvariants();
}

}  // namespace
}  // namespace refitd
