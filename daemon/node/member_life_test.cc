#include <sys/syscall.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>

#include "daemon/node/device_memory_test_util.h"
#include "daemon/node/life.h"
#include "daemon/node/parts_test_util.h"
#include "daemon/test_util.h"

namespace refitd {
namespace {

using Catch::Contains;

TEST_CASE("a member that attaches gets its lease, the daemon's limits and the group's slots") {
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
  const StateLock lock(&parts.state().mutex);
  const absl::StatusOr<MemberRecord*> found = Authenticate(parts.state(), caller, /*engine=*/false);
  REQUIRE(found.ok());
  CHECK((*found)->id == trainer.id);

  const absl::Status role = Authenticate(parts.state(), caller, /*engine=*/true).status();
  CHECK(role.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(Message(role), Contains("for an engine rank, the lease is of a trainer rank"));
  Caller other = caller;
  other.incarnation += 1;
  CHECK_THAT(Message(Authenticate(parts.state(), other, false).status()),
             Contains("lease.incarnation"));
  other = caller;
  other.protocol = 99;
  CHECK_THAT(Message(Authenticate(parts.state(), other, false).status()),
             Contains("lease.protocol: version 99"));
  other = caller;
  other.token.back() ^= 1;
  CHECK(Authenticate(parts.state(), other, false).status().code() ==
        absl::StatusCode::kUnauthenticated);
}

TEST_CASE("a lost member's token dies at once, and its regions go with its record (P6, P8)") {
  DaemonParts parts;
  const Attached engine = parts.AttachEngine("g", "i", Spec());
  const SharedMemory memory(4096);
  REQUIRE(parts.Register(engine, memory).ok());
  CHECK(parts.operators().Describe().regions == 1);
  {
    StateLock lock(&parts.state().mutex);
    MemberRecord* const member = parts.state().members.Find(engine.id);
    REQUIRE(member != nullptr);
    LoseMember(parts.state(), member, "its time was up", LeaseEnded("its time was up"), lock);
    CHECK(Authenticate(parts.state(), engine.caller(), /*engine=*/true).status().code() ==
          absl::StatusCode::kUnauthenticated);
    CHECK_FALSE(parts.state().members.Contains(engine.id));
  }
  CHECK(Message(engine.inbox->Ended()) == "the lease ended: its time was up");
  CHECK(parts.operators().Describe().regions == 0);
  CHECK(parts.operators().Describe().members == 0);
  // The engine's answers are ignored from now on.
  parts.calls().HandleEngineEvent(engine.id, ReadyEvent{engine.id, UpdateId(1)});
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

TEST_CASE("a process is watched as long as its member, and no longer") {
  DaemonParts parts;
  ChildProcess child([] {});
  Arrival arrival = DaemonParts::Trainer();
  arrival.record.peer.credentials.emplace().pid = child.pid();
  const auto pidfd = static_cast<int>(syscall(SYS_pidfd_open, child.pid(), 0));
  REQUIRE(pidfd >= 0);
  arrival.record.peer.credentials->pidfd = std::make_shared<const UniqueFd>(pidfd);
  const Attached trainer = parts.Attach(std::move(arrival), "g");
  CHECK(parts.processes().watched() == 1);
  parts.calls().Detached(trainer.id);
  CHECK(parts.processes().watched() == 0);
}

TEST_CASE("the audit log tells who attached, and to what") {
  const TempFolder folder;
  const std::string path = folder / "audit";
  const std::unique_ptr<AuditLog> audit = *AuditLog::Create({.file = path});
  DaemonOptions options;
  options.audit = audit.get();
  DaemonParts parts("a", options);
  Arrival arrival = DaemonParts::Engine("i", DeliveryMode::kLoader);
  arrival.record.peer.identity = "dns:a";
  REQUIRE(parts.Attach(std::move(arrival), "g").inbox->welcomed());
  REQUIRE(audit->Flush());
  std::ifstream file(path);
  const std::string lines{std::istreambuf_iterator<char>(file), {}};
  CHECK_THAT(lines, Contains("dns:a") && Contains("refitd.v1.Engine/Attach") &&
                        Contains("engine of instance i"));
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
  parts.calls().Detached(first.id);
  CHECK(attach("dns:b").inbox->Ended().code() == absl::StatusCode::kPermissionDenied);
  CHECK(attach("dns:a").inbox->welcomed());
}

TEST_CASE("an engine of a joined group calls with the incarnation that the coordinator sent") {
  DaemonParts a("a");
  DaemonParts b("b");
  const Attached engine = b.AttachEngine("g", "i", Spec(), &a);
  REQUIRE(Eventually([&engine] { return engine.inbox->welcomed(); }));
  CHECK(engine.inbox->welcome().incarnation == a.operators().Group("g")->machine.group.incarnation);
  const StateLock lock(&b.state().mutex);
  CHECK(Authenticate(b.state(), engine.caller(), /*engine=*/true).ok());
}

TEST_CASE("an engine's lease outlives a replacement of its group, a trainer's does not") {
  DaemonParts parts;
  const Attached trainer = parts.AttachTrainer("g");
  const Attached engine = parts.AttachEngine("g", "i", Spec());
  REQUIRE(parts.operators().CreateGroup("g", Spec(), /*replace=*/true, "", "uid:1").ok());
  CHECK(parts.operators().Group("g")->machine.group.incarnation !=
        engine.inbox->welcome().incarnation);
  CHECK_FALSE(trainer.inbox->Ended().ok());
  const StateLock lock(&parts.state().mutex);
  CHECK(Authenticate(parts.state(), engine.caller(), /*engine=*/true).ok());
}

// ---- on GPUs ----

Attached AttachOnGpu(DaemonParts* parts, const std::string& instance, DeliveryMode delivery,
                     int ordinal) {
  return parts->Attach(DaemonParts::OnGpu(DaemonParts::Engine(instance, delivery), ordinal), "g");
}

bool HasPool(DaemonParts* parts, int ordinal) {
  const StateLock lock(&parts->state().mutex);
  return parts->state().pools.Has(*parts->state().groups.Find("g"), ordinal);
}

TEST_CASE("a group's engines on a GPU take in none in host memory") {
  DaemonParts parts("a", WithGpus(std::make_shared<FakeMemory>()));
  REQUIRE(AttachOnGpu(&parts, "i", DeliveryMode::kInPlace, 1).inbox->welcomed());
  const absl::Status refused = parts.AttachInPlace("g", "j").inbox->Ended();
  CHECK(refused.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(Message(refused), Contains("engine ranks on 'GPU-1'"));
}

TEST_CASE("a rank that reads slots on its GPU is let in when they are made, or hears why not") {
  const auto memory = std::make_shared<FakeMemory>();
  DaemonParts parts("a", WithGpus(memory));
  std::shared_ptr<void> held = parts.HoldRegionsThread();
  const Attached engine = AttachOnGpu(&parts, "i", DeliveryMode::kLoader, 1);
  CHECK_FALSE(engine.inbox->welcomed());
  held.reset();
  REQUIRE(Eventually([&engine] { return engine.inbox->welcomed(); }));
  CHECK(HasPool(&parts, 1));
  parts.AwaitRegionsThread();
  memory->can_make = absl::ResourceExhaustedError("too little memory is free");
  const absl::Status refused = AttachOnGpu(&parts, "j", DeliveryMode::kLoader, 2).inbox->Ended();
  CHECK(refused.code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(Message(refused), Contains("too little memory is free"));
  // The slots go with the last rank on their GPU (P8).
  parts.calls().Detached(engine.id);
  CHECK_FALSE(HasPool(&parts, 1));
  parts.AwaitRegionsThread();
  CHECK(memory->open() == 0);
}

TEST_CASE("slots that were made for a rank which may not enter any more are given back (P8)") {
  const auto memory = std::make_shared<FakeMemory>();
  DaemonParts parts("a", WithGpus(memory));
  const Attached trainer = parts.AttachTrainer("g");
  std::shared_ptr<void> held = parts.HoldRegionsThread();
  const Attached engine = AttachOnGpu(&parts, "i", DeliveryMode::kLoader, 1);
  REQUIRE(parts.AttachInPlace("g", "j").inbox->welcomed());
  held.reset();
  CHECK_THAT(Message(engine.inbox->Ended()), Contains("engine ranks on 'host'"));
  parts.AwaitRegionsThread();
  CHECK(memory->asked() == 1);
  CHECK_FALSE(HasPool(&parts, 1));
  CHECK(memory->open() == 0);
}

TEST_CASE("a rank that goes while it waits for slots is answered, and leaves its group empty") {
  DaemonParts parts("a", WithGpus(std::make_shared<FakeMemory>()));
  const Attached trainer = parts.AttachTrainer("g");
  const std::shared_ptr<void> held = parts.HoldRegionsThread();
  const Attached engine = AttachOnGpu(&parts, "i", DeliveryMode::kLoader, 1);
  const auto empty = [&parts] {
    const StateLock lock(&parts.state().mutex);
    return parts.state().groups.Find("g")->empty_since.has_value();
  };
  parts.calls().Detached(trainer.id);
  CHECK_FALSE(empty());
  parts.calls().Gone(engine.id, "it left");
  CHECK(Message(engine.inbox->Ended()) == "the lease ended: it left");
  CHECK(empty());
}

TEST_CASE("a rank that comes while an update is opened gets slots, or goes without") {
  const auto memory = std::make_shared<FakeMemory>();
  DaemonParts parts("a", WithGpus(memory));
  const Attached trainer = parts.AttachTrainer("g");
  REQUIRE(AttachOnGpu(&parts, "i", DeliveryMode::kInPlace, 0).inbox->welcomed());
  CHECK_FALSE(HasPool(&parts, 0));
  const auto prepare = [&parts](int by) {
    const StateLock lock(&parts.state().mutex);
    parts.state().groups.Find("g")->preparing_begins += by;
  };
  prepare(1);
  const Attached with = AttachOnGpu(&parts, "j", DeliveryMode::kInPlace, 1);
  CHECK(Eventually([&with] { return with.inbox->welcomed(); }));
  CHECK(HasPool(&parts, 1));
  parts.AwaitRegionsThread();
  memory->can_make = absl::ResourceExhaustedError("too little memory is free");
  const Attached without = AttachOnGpu(&parts, "k", DeliveryMode::kInPlace, 2);
  CHECK(Eventually([&without] { return without.inbox->welcomed(); }));
  CHECK_FALSE(HasPool(&parts, 2));
  prepare(-1);
}

TEST_CASE("a trainer rank that comes while an update is opened is let in without slots") {
  DaemonParts parts("a", WithGpus(std::make_shared<FakeMemory>()));
  const Attached first = parts.AttachTrainerOnGpu("g", 0, 0, 2);
  {
    const StateLock lock(&parts.state().mutex);
    ++parts.state().groups.Find("g")->preparing_begins;
  }
  const Attached second = parts.AttachTrainerOnGpu("g", 1, 1, 2);
  CHECK(second.inbox->welcomed());
  CHECK_FALSE(HasPool(&parts, 1));
}

}  // namespace
}  // namespace refitd
