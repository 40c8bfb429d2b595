#include "daemon/node/peer_client.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <optional>
#include <string>

#include "daemon/node/parts_test_util.h"
#include "transport/base/unique_fd.h"

namespace refitd {
namespace {

using Catch::Contains;

// A coordinator that takes connections and never says a word.
class Silent {
 public:
  Silent() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    REFITD_CHECK(bind(fd_.get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
    REFITD_CHECK(listen(fd_.get(), 8) == 0);
    REFITD_CHECK(getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0);
    address_ = fmt::format("127.0.0.1:{}", ntohs(address.sin_port));
  }
  const std::string& address() const { return address_; }

 private:
  UniqueFd fd_;
  std::string address_;
};

Attached AttachAt(DaemonParts* parts, const std::string& address, Duration wait,
                  std::optional<GroupSpec> spec = {}) {
  Arrival arrival = DaemonParts::Engine("i", DeliveryMode::kLoader);
  arrival.coordinator = address;
  return parts->Attach(std::move(arrival), "g", std::move(spec), nullptr, wait);
}

TEST_CASE("the addresses of this daemon name this daemon, any other names a coordinator") {
  DaemonOptions options;
  options.advertise = "host-a:7000";
  DaemonParts parts("a", options);
  parts.daemon().SetListeners({"unix:/run/s", "tcp:10.0.0.1:7000", "peers:10.0.0.1:7001"});
  const StateLock lock(&parts.state().mutex);
  for (const char* own : {"", "host-a:7000", "10.0.0.1:7000", "10.0.0.1:7001"}) {
    CHECK(parts.peer_client().CoordinatorOf(own).empty());
  }
  CHECK(parts.peer_client().CoordinatorOf("10.0.0.2:7000") == "10.0.0.2:7000");
}

TEST_CASE("a group is joined for its members, and left with the last") {
  DaemonParts a("a");
  DaemonParts b("b");
  const Attached engine = b.AttachEngine("g", "i", Spec(), &a);
  REQUIRE(Eventually([&] { return engine.inbox->welcomed(); }));
  CHECK(a.operators().Group("g")->machine.nodes.size() == 2);
  CHECK_FALSE(b.operators().Group("g")->machine.coordinator_address.empty());
  b.calls().Detached(engine.id);
  CHECK(Eventually([&] { return b.groups() == 0; }));
  CHECK(Eventually([&] { return a.operators().Group("g")->machine.nodes.size() == 1; }));
}

TEST_CASE("a member must name the coordinator that the group has here") {
  DaemonParts a("a");
  DaemonParts b("b");
  const Attached engine = b.AttachEngine("g", "i", Spec(), &a);
  REQUIRE(Eventually([&] { return engine.inbox->welcomed(); }));
  CHECK_THAT(Message(AttachAt(&b, "10.0.0.9:1", kPatience, Spec()).inbox->Ended()),
             Contains("group 'g' is coordinated by " + a.address()));
  const Attached trainer = b.AttachTrainer("own");
  Arrival arrival = DaemonParts::Engine("i", DeliveryMode::kLoader);
  arrival.coordinator = a.address();
  CHECK_THAT(
      Message(b.Attach(std::move(arrival), "own", Spec(), nullptr, kPatience).inbox->Ended()),
      Contains("group 'own' is coordinated by this daemon"));
}

TEST_CASE("a malformed spec is refused before any daemon is dialled (P10)") {
  DaemonParts b("b");
  GroupSpec spec = Spec();
  spec.slot_bytes = 1;
  CHECK_THAT(Message(AttachAt(&b, "127.0.0.1:1", kPatience, spec).inbox->Ended()),
             Contains("spec.slot_bytes: 1"));
  CHECK(b.groups() == 0);
}

// Regression: only the end of the running try to join ended the wait, however long the try took.
TEST_CASE("a wait ends by its deadline and a grace, though the first try to join still runs (P4)") {
  const Silent coordinator;
  DaemonParts b("b");
  constexpr Duration kWait = std::chrono::hours(1);
  const TimePoint before = DaemonState::Now();
  const Attached engine = AttachAt(&b, coordinator.address(), kWait);
  const auto refuse_at = [&b](TimePoint now) {
    StateLock lock(&b.state().mutex);
    b.peer_client().RefuseLateMembers(now, lock);
  };
  refuse_at(before + kWait);
  CHECK_FALSE(engine.inbox->end().has_value());  // the try may still say why
  refuse_at(before + kWait + std::chrono::minutes(1));
  REQUIRE(engine.inbox->end().has_value());
  CHECK_THAT(Message(*engine.inbox->end()), Contains("group 'g' was not created in time"));
  CHECK(b.groups() == 0);  // nobody waits: the daemon joins no more
}

TEST_CASE(
    "a member that joins while a longer wait is dialled is refused by its own deadline (P4)") {
  const Silent coordinator;
  DaemonParts b("b");
  const TimePoint before = DaemonState::Now();
  const Attached patient = AttachAt(&b, coordinator.address(), std::chrono::hours(2));
  const Attached hasty = AttachAt(&b, coordinator.address(), std::chrono::hours(1));
  {
    StateLock lock(&b.state().mutex);
    b.peer_client().RefuseLateMembers(before + std::chrono::minutes(61), lock);
  }
  CHECK(hasty.inbox->end().has_value());
  CHECK_FALSE(patient.inbox->end().has_value());
  CHECK(b.groups() == 1);
}

TEST_CASE("a member that does not wait gets the time that joining takes, whoever else waits (P4)") {
  const Silent coordinator;
  DaemonParts b("b");
  const Attached patient = AttachAt(&b, coordinator.address(), std::chrono::hours(2));
  const TimePoint before = DaemonState::Now();
  const Attached hasty = AttachAt(&b, coordinator.address(), Duration(0));
  const auto refuse_at = [&b](TimePoint now) {
    StateLock lock(&b.state().mutex);
    b.peer_client().RefuseLateMembers(now, lock);
  };
  refuse_at(DaemonState::Now());
  CHECK_FALSE(hasty.inbox->end().has_value());
  refuse_at(before + std::chrono::minutes(2));
  CHECK(hasty.inbox->end().has_value());
  CHECK_FALSE(patient.inbox->end().has_value());
}

TEST_CASE("a daemon that joins takes no slots that are larger than its own limit (P10)") {
  DaemonParts a("a");
  DaemonOptions options;
  options.max_pool_bytes = kSlotBytes;
  DaemonParts b("b", options);
  const Attached trainer = a.AttachTrainer("g");
  const Attached engine = b.AttachEngine("g", "i", std::nullopt, &a);
  CHECK_FALSE(engine.inbox->Ended().ok());
  CHECK(Eventually([&] { return b.groups() == 0; }));
}

}  // namespace
}  // namespace refitd
