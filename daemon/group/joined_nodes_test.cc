#include "daemon/group/joined_nodes.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <variant>

namespace refitd::coordinator {
namespace {

constexpr Duration kSilence = std::chrono::seconds(8);
const NodeId kB(1);
const NodeId kC(2);

struct Nodes {
  Nodes() {
    nodes.Join({kB, "b", "host:1", kProtocol, "boot"}, now);
    nodes.Join({kC, "c", "host:2"}, now);
  }
  TimePoint now{std::chrono::seconds(1)};
  JoinedNodes nodes{"a", kSilence};
  NodeCommands commands;
};

TEST_CASE("a node is pinged four times before it counts as silent") {
  Nodes n;
  std::vector<NodeId> silent;
  while (silent.empty()) {
    n.now = *n.nodes.due();
    REQUIRE(n.nodes.Heard(kC, n.now));
    silent = n.nodes.Ping(n.now, &n.commands);
  }
  CHECK(silent == std::vector{kB});
  CHECK(n.now > TimePoint(std::chrono::seconds(9)));
  CHECK(std::count_if(n.commands.begin(), n.commands.end(),
                      [](const SendCommand& each) { return each.node == kB; }) == 4);
}

TEST_CASE("a node that left is heard no more, and failures still name it") {
  Nodes n;
  CHECK(n.nodes.Leave(kB));
  CHECK_FALSE(n.nodes.Heard(kB, n.now));
  CHECK(n.nodes.Name(kB) == "daemon 1");
  CHECK(n.nodes.Names(std::vector{kCoordinatorNode, kC}) == "daemon a, daemon c");
  CHECK(n.nodes.SuspectOf(kC).daemon == "c");
}

TEST_CASE("another process with the id of a linked daemon can't join") {
  const Nodes n;
  CHECK(n.nodes.CanJoin("g", "b", "boot", "host:9").ok());
  CHECK(n.nodes.CanJoin("g", "b", "other", "host:9").code() == absl::StatusCode::kAlreadyExists);
  CHECK(n.nodes.CanJoin("g", "a", "boot", "host:9").code() ==
        absl::StatusCode::kFailedPrecondition);
}

TEST_CASE("a node gets all of the book once, and then what changes") {
  Nodes n;
  ReadinessBook book;
  book.Set({"one", Standing::kClean, std::nullopt});
  const std::vector<PeerReadiness> news = {
      {.version = std::nullopt, .instances = Shared({{"two", Standing::kClean, std::nullopt}})}};
  const NodeCommands first = n.nodes.SendReadiness(news, book);
  REQUIRE(first.size() == 2);  // no news to nodes without the book
  CHECK(std::get<PeerReadiness>(first[0].command).instances->at(0).instance == "one");
  const NodeCommands second = n.nodes.SendReadiness(news, book);
  REQUIRE(second.size() == 2);
  CHECK(std::get<PeerReadiness>(second[1].command).instances->at(0).instance == "two");
}

TEST_CASE("a node gets the owner once") {
  Nodes n;
  CHECK(n.nodes.SendOwner("uid:1").size() == 2);
  CHECK(n.nodes.SendOwner("uid:1").empty());
}

}  // namespace
}  // namespace refitd::coordinator
