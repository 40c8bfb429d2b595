#include "daemon/node/members.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <memory>
#include <string>

#include "daemon/node/parts_test_util.h"
#include "daemon/test_util.h"

namespace refitd {
namespace {

using Catch::Contains;

TEST_CASE("a member that is let in is told its lease, the daemon's limits and the group's slots") {
  DaemonOptions options;
  options.descriptor_socket = "/run/s.fds";
  options.inline_bytes = 1000;
  options.message_bytes = 1 << 20;
  options.group.outstanding_buckets = 7;
  DaemonParts parts("a", options);
  const Attached trainer = parts.AttachTrainer("g", Spec(3));
  const WelcomeNews welcome = trainer.inbox->welcome();
  CHECK(welcome.member == trainer.id);
  CHECK(welcome.token.size() == sizeof(Token));
  CHECK(welcome.protocol == kProtocol);
  CHECK(welcome.descriptor_socket == "/run/s.fds");
  CHECK(welcome.inline_bytes == 1000);
  CHECK(welcome.message_bytes == 1 << 20);
  CHECK(welcome.outstanding_buckets == 7);
  CHECK(welcome.default_duration == options.group.default_duration);
  CHECK(welcome.max_duration == options.group.max_duration);
  CHECK(welcome.slot_bytes == kSlotBytes);
  CHECK(welcome.slots == 3);
  CHECK(welcome.version == std::nullopt);
  CHECK(welcome.incarnation == parts.operators().Group("g")->machine.group.incarnation);
}

TEST_CASE("a lease is refused for the other role, another incarnation, and an unknown protocol") {
  DaemonParts parts;
  const Attached trainer = parts.AttachTrainer("g");
  const Caller caller = trainer.caller();
  const Turn turn(parts.state().turns);
  const absl::StatusOr<MemberRecord*> found =
      parts.members().Authenticate(caller, /*engine=*/false);
  REQUIRE(found.ok());
  CHECK((*found)->id == trainer.id);

  const absl::Status role = parts.members().Authenticate(caller, /*engine=*/true).status();
  CHECK(role.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(Message(role), Contains("for an engine rank, the lease is of a trainer rank"));
  Caller other = caller;
  other.incarnation += 1;
  CHECK_THAT(Message(parts.members().Authenticate(other, false).status()),
             Contains("lease.incarnation"));
  other = caller;
  other.protocol = 99;
  CHECK_THAT(Message(parts.members().Authenticate(other, false).status()),
             Contains("lease.protocol: version 99"));
  other = caller;
  other.token.back() ^= 1;
  CHECK(parts.members().Authenticate(other, false).status().code() ==
        absl::StatusCode::kUnauthenticated);
}

TEST_CASE("a lost member's token dies at once, and its regions go with its record (P6, P8)") {
  DaemonParts parts;
  const Attached engine = parts.AttachEngine("g", "i", Spec());
  const SharedMemory memory(4096);
  REQUIRE(parts.Register(engine, memory).ok());
  CHECK(parts.operators().Describe().regions == 1);
  {
    Turn turn(parts.state().turns);
    MemberRecord* const member = parts.state().leases.Find(engine.id);
    REQUIRE(member != nullptr);
    parts.members().Lose(member, "its time was up", LeaseEnded("its time was up"), turn);
    CHECK(parts.members().Authenticate(engine.caller(), /*engine=*/true).status().code() ==
          absl::StatusCode::kUnauthenticated);
    CHECK_FALSE(parts.state().leases.Contains(engine.id));
  }
  CHECK(Message(engine.inbox->Ended()) == "the lease ended: its time was up");
  CHECK(parts.operators().Describe().regions == 0);
  CHECK(parts.operators().Describe().members == 0);
  // The engine's answers are ignored from now on.
  parts.members().Happened(engine.id, ReadyEvent{engine.id, UpdateId(1)});
}

TEST_CASE("a member whose process dies loses its lease, though its stream is open (P8)") {
  DaemonParts parts;
  ChildProcess child([] {});
  Arrival arrival = DaemonParts::Trainer();
  arrival.record.peer.credentials.emplace();
  arrival.record.peer.credentials->pid = child.pid();
  // Credentials without a pidfd would say that the process had ended before its connection was
  // accepted.
  const auto pidfd = static_cast<int>(syscall(SYS_pidfd_open, child.pid(), 0));
  REQUIRE(pidfd >= 0);
  arrival.record.peer.credentials->pidfd = std::make_shared<const UniqueFd>(pidfd);
  const Attached trainer = parts.Attach(std::move(arrival), "g", Spec(), nullptr, kPatience);
  REQUIRE(trainer.inbox->welcomed());
  CHECK_FALSE(trainer.inbox->end().has_value());
  child.Kill();
  CHECK(Message(trainer.inbox->Ended()) == "the lease ended: its process died");
}

TEST_CASE("a trainer of another identity than the group's first is refused (P9)") {
  DaemonParts parts;
  const auto attach = [&](const std::string& identity) {
    Arrival arrival = DaemonParts::Trainer();
    arrival.record.peer.identity = identity;
    return parts.Attach(std::move(arrival), "g", Spec(), nullptr, kPatience);
  };
  const Attached first = attach("dns:a");
  REQUIRE(first.inbox->welcomed());
  parts.arrivals().Detached(first.id);
  CHECK(attach("dns:b").inbox->Ended().code() == absl::StatusCode::kPermissionDenied);
  CHECK(attach("dns:a").inbox->welcomed());
}

}  // namespace
}  // namespace refitd
