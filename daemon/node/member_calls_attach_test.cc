// The Attach streams of members, as MemberCalls takes them.
#include <catch2/catch.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "daemon/node/device_memory_test_util.h"
#include "daemon/node/parts_test_util.h"

namespace refitd {
namespace {

using Catch::Contains;
using std::chrono::milliseconds;

TEST_CASE("a member with a spec makes its group, and lets in those that waited for it") {
  DaemonParts parts;
  const Attached waits = parts.AttachEngine("g", "i", std::nullopt);
  CHECK_FALSE(waits.inbox->welcomed());
  CHECK_FALSE(parts.Has("g"));
  const Attached trainer = parts.AttachTrainer("g");
  CHECK(trainer.inbox->welcomed());
  CHECK(waits.inbox->welcomed());
}

TEST_CASE("a member waits for its group until its deadline, or not at all (P4)") {
  DaemonParts parts;
  const Attached at_once =
      parts.AttachEngine("g", "i", std::nullopt, nullptr, /*wait=*/Duration(0));
  REQUIRE(at_once.inbox->end().has_value());
  CHECK(at_once.inbox->end()->code() == absl::StatusCode::kNotFound);
  const Attached hasty =
      parts.AttachEngine("g", "i", std::nullopt, nullptr, /*wait=*/milliseconds(20));
  CHECK(Message(hasty.inbox->Ended()) ==
        "group 'g' was not created in time (the wait of attaching; refitctl: --timeout)");
}

TEST_CASE("a member whose spec is not the group's is refused and changes nothing") {
  DaemonParts parts;
  const Attached trainer = parts.AttachTrainer("g", Spec(2));
  const Attached other = parts.AttachEngine("g", "i", Spec(3));
  CHECK(other.inbox->Ended().code() == absl::StatusCode::kFailedPrecondition);
  CHECK(parts.operators().Group("g")->machine.group.spec == Spec(2));
  CHECK_FALSE(trainer.inbox->end().has_value());
}

TEST_CASE("a hello that was malformed ends its stream with its own status") {
  DaemonParts parts;
  const auto inbox = std::make_shared<Inbox>();
  const MemberId member = parts.calls().Attach(absl::InvalidArgumentError("rank: -1"), inbox);
  CHECK(member != MemberId());
  CHECK(inbox->Ended() == absl::InvalidArgumentError("rank: -1"));
  parts.calls().Gone(member, "its stream ended");
}

TEST_CASE("limits.max_members counts members that wait, too") {
  DaemonOptions options;
  options.max_members = 1;
  DaemonParts parts("a", options);
  const Attached waits = parts.AttachEngine("g", "i", std::nullopt);
  const Attached second = parts.AttachTrainer("g");
  const absl::Status refused = second.inbox->Ended();
  CHECK(refused.code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(Message(refused), Contains("limits.max_members"));
  parts.calls().Gone(waits.id, "it left");
  CHECK(Message(waits.inbox->Ended()) == "the lease ended: it left");
  CHECK(parts.AttachTrainer("g").inbox->welcomed());
}

TEST_CASE("a device that the daemon does not serve is refused by its name") {
  DaemonParts parts;
  Arrival arrival = DaemonParts::Trainer();
  arrival.record.device = "GPU-7";
  const absl::Status refused =
      parts.Attach(std::move(arrival), "g", Spec(), nullptr, kPatience).inbox->Ended();
  CHECK(refused.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(Message(refused), Contains("device.name: 'GPU-7'"));
  CHECK_FALSE(parts.Has("g"));
}

TEST_CASE("a member that detaches ends with OK, and another may come in its place") {
  DaemonParts parts;
  const Attached trainer = parts.AttachTrainer("g");
  CHECK(parts.AttachTrainer("g").inbox->Ended().code() == absl::StatusCode::kAlreadyExists);
  parts.calls().Detached(trainer.id);
  CHECK(trainer.inbox->Ended().ok());
  parts.calls().Detached(trainer.id);  // once more does nothing
  CHECK(parts.AttachTrainer("g").inbox->welcomed());
}

TEST_CASE("a daemon that drains takes nobody, and ends those that wait") {
  DaemonParts parts;
  const Attached waits = parts.AttachEngine("g", "i", std::nullopt);
  parts.daemon().Drain();
  CHECK(waits.inbox->Ended().code() == absl::StatusCode::kUnavailable);
  CHECK(parts.AttachTrainer("g").inbox->Ended().code() == absl::StatusCode::kUnavailable);
}

TEST_CASE("a daemon that drains takes nobody into a group that it still has") {
  DaemonParts parts;
  const Attached trainer = parts.AttachTrainer("g");
  parts.daemon().Drain();
  REQUIRE(parts.Has("g"));
  CHECK(parts.AttachEngine("g", "i", std::nullopt).inbox->Ended().code() ==
        absl::StatusCode::kUnavailable);
}

TEST_CASE("a trainer whose spec has another number of trainer ranks makes no group") {
  DaemonParts parts;
  Arrival arrival = DaemonParts::Trainer();
  std::get<TrainerIdentity>(arrival.identity).world_size = 3;
  CHECK_THAT(Message(parts.Attach(std::move(arrival), "g").inbox->Ended()),
             Contains("world_size: 3 is not the spec's trainer_ranks 1"));
  CHECK_FALSE(parts.Has("g"));
}

TEST_CASE("a member counts against the limits of its identity, which also made the group") {
  DaemonOptions options;
  options.per_identity.members = 1;
  options.per_identity.groups = 1;
  DaemonParts parts("a", options);
  const auto attach = [&parts](const std::string& identity, const std::string& group) {
    Arrival arrival = DaemonParts::Engine("i", DeliveryMode::kLoader);
    arrival.record.peer.identity = identity;
    return parts.Attach(std::move(arrival), group);
  };
  const Attached first = attach("dns:a", "g");
  REQUIRE(first.inbox->welcomed());
  CHECK_THAT(Message(attach("dns:a", "g").inbox->Ended()),
             Contains("limits.per_identity.members: dns:a has 1"));
  parts.calls().Detached(first.id);
  CHECK_THAT(Message(attach("dns:a", "h").inbox->Ended()),
             Contains("limits.per_identity.groups: dns:a has 1"));
  CHECK(attach("dns:b", "h").inbox->welcomed());
}

TEST_CASE("a group that this daemon joined takes no member that names no coordinator") {
  DaemonParts a("a");
  DaemonParts b("b");
  REQUIRE(a.AttachTrainer("g").inbox->welcomed());
  const Attached engine = b.AttachEngine("g", "i", std::nullopt, &a);
  REQUIRE(Eventually([&engine] { return engine.inbox->welcomed(); }));
  CHECK_THAT(Message(b.AttachEngine("g", "j", std::nullopt).inbox->Ended()),
             Contains("is coordinated by " + a.address() + ": name it as coordinator"));
}

TEST_CASE("a member on a GPU attaches over the unix socket, and its record says on which (P9)") {
  DaemonParts parts("a", WithGpus(std::make_shared<FakeMemory>()));
  Arrival remote = DaemonParts::OnGpu(DaemonParts::Trainer(), 3);
  remote.record.peer.credentials.reset();
  CHECK(parts.Attach(std::move(remote), "g").inbox->Ended().code() ==
        absl::StatusCode::kPermissionDenied);
  const Attached local = parts.Attach(DaemonParts::OnGpu(DaemonParts::Trainer(), 3), "g");
  REQUIRE(local.inbox->welcomed());
  const StateLock lock(&parts.state().mutex);
  CHECK(parts.state().members.Find(local.id)->ordinal == 3);
}

TEST_CASE("device memory takes no part in a group of another daemon without a wire for it") {
  DaemonOptions options = WithGpus(std::make_shared<FakeMemory>());
  options.devices.no_wire = "no NCCL was found";
  DaemonParts a("a");
  DaemonParts b("b", options);
  Arrival arrival = DaemonParts::OnGpu(DaemonParts::Engine("i", DeliveryMode::kInPlace), 1);
  const absl::Status refused = b.Attach(std::move(arrival), "g", Spec(), &a).inbox->Ended();
  CHECK(refused.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(Message(refused), Contains("no NCCL was found"));
}

TEST_CASE(
    "a rank that comes dirty after the coordinator was lost ends its instance's readiness (P2)") {
  auto a = std::make_unique<DaemonParts>("a");
  DaemonParts b("b");
  const std::string address = a->address();
  const Attached engine = b.AttachEngine("g", "i", Spec(), a.get());
  const auto ready = [&b] {
    const absl::StatusOr<Readiness> is = b.operators().ReadinessOf("g", "i");
    return is.ok() && is->ready;
  };
  REQUIRE(Eventually(ready));
  a.reset();
  CHECK_FALSE(engine.inbox->Ended().ok());
  REQUIRE(Eventually([&b] { return b.groups() == 0; }));
  CHECK(ready());
  Arrival again = DaemonParts::Engine("i", DeliveryMode::kLoader);
  std::get<EngineIdentity>(again.identity).dirty = true;
  again.coordinator = address;
  b.Attach(std::move(again), "g", std::nullopt);
  CHECK_FALSE(ready());
}

}  // namespace
}  // namespace refitd
