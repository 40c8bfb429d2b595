#include "daemon/group/wire_locks.h"

#include <catch2/catch.hpp>
#include <variant>

namespace refitd::coordinator {
namespace {

constexpr Duration kLimit = std::chrono::seconds(30);
const UpdateId kUpdate(7);
const NodeId kA(1);
const NodeId kB(2);

template <typename Command>
std::vector<NodeId> Receivers(const NodeCommands& commands) {
  std::vector<NodeId> receivers;
  for (const SendCommand& each : commands) {
    if (std::holds_alternative<Command>(each.command)) receivers.push_back(each.node);
  }
  return receivers;
}

struct Locks {
  Locks() { Sent(locks.Ask({kB, kA}, now)); }
  void Grant(NodeId node) {
    Sent(locks.Granted(node, now));
    locks.CheckInvariants();
  }
  std::vector<NodeId> GivenBack(bool idle) {
    return Receivers<PeerWireUnlock>(locks.GiveBackIfWanted(idle));
  }
  void Sent(NodeCommands more) {
    for (SendCommand& each : more) commands.push_back(std::move(each));
  }
  TimePoint now{std::chrono::seconds(1)};
  NodeCommands commands;
  WireLocks locks{kUpdate, kLimit};
};

TEST_CASE("wire locks are asked for one after another, in the order given") {
  Locks l;
  CHECK(Receivers<PeerWireLock>(l.commands) == std::vector{kB});
  CHECK(l.locks.awaited() == kB);
  l.Grant(kA);  // nobody asked for it
  CHECK(l.locks.awaited() == kB);
  l.now += std::chrono::seconds(5);
  l.Grant(kB);
  CHECK(Receivers<PeerWireLock>(l.commands) == std::vector{kB, kA});
  CHECK(l.locks.due() == l.now + kLimit);  // each lock has the whole limit
  CHECK_FALSE(l.locks.may_issue());
  l.Grant(kA);
  CHECK(l.locks.may_issue());
  CHECK_FALSE(l.locks.due().has_value());
}

TEST_CASE("a group keeps its wire locks until it has issued a part") {
  Locks l;
  l.Grant(kB);
  l.locks.Wanted();
  CHECK(l.GivenBack(false).empty());  // it lacks a lock
  l.Grant(kA);
  CHECK(l.GivenBack(false).empty());
  l.locks.Issued();
  CHECK_FALSE(l.locks.may_issue());  // it is the other group's turn
  CHECK(l.GivenBack(false) == std::vector{kB, kA});
  CHECK_FALSE(l.locks.asked());
}

TEST_CASE("a group with nothing to issue gives its wire locks back when they are wanted") {
  Locks l;
  l.Grant(kB);
  l.Grant(kA);
  CHECK(l.GivenBack(true).empty());  // nobody wants them
  l.locks.Wanted();
  CHECK(l.GivenBack(true) == std::vector{kB, kA});
}

TEST_CASE("the lock that is waited for is given back with those that are held") {
  Locks l;
  CHECK(Receivers<PeerWireUnlock>(l.locks.GiveBack()) == std::vector{kB});
}

TEST_CASE("the lock of a node that is gone is not waited for") {
  Locks l;
  l.Sent(l.locks.Forget(kB, l.now));
  CHECK(l.locks.awaited() == kA);
  l.Grant(kA);
  l.Sent(l.locks.Forget(kA, l.now));
  l.locks.CheckInvariants();
  CHECK_FALSE(l.locks.asked());
}

TEST_CASE("a wire lock that comes too late names its node and the group that has it") {
  JoinedNodes nodes("a", std::chrono::seconds(10));
  nodes.Join({kB, "b", "host:1"}, TimePoint());
  Locks l;
  CHECK(l.locks.WhyLate(nodes) ==
        "the wire of daemon b was not free within 30 s: nobody answered who has it");
  l.locks.Waits("other");
  CHECK(l.locks.WhyLate(nodes) ==
        "the wire of daemon b was not free within 30 s: group other has it");
}

}  // namespace
}  // namespace refitd::coordinator
