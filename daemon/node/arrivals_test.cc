#include "daemon/node/arrivals.h"

#include <catch2/catch.hpp>
#include <chrono>
#include <optional>
#include <string>

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
  CHECK(Message(hasty.inbox->Ended()) == "group 'g' was not created in time");
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
  const MemberId member = parts.arrivals().Attach(absl::InvalidArgumentError("rank: -1"), inbox);
  CHECK(member != MemberId());
  CHECK(inbox->Ended() == absl::InvalidArgumentError("rank: -1"));
  parts.arrivals().Gone(member, "its stream ended");
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
  parts.arrivals().Gone(waits.id, "it left");
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
  parts.arrivals().Detached(trainer.id);
  CHECK(trainer.inbox->Ended().ok());
  parts.arrivals().Detached(trainer.id);  // once more does nothing
  CHECK(parts.AttachTrainer("g").inbox->welcomed());
}

TEST_CASE("a daemon that drains takes nobody, and ends those that wait") {
  DaemonParts parts;
  const Attached waits = parts.AttachEngine("g", "i", std::nullopt);
  parts.daemon().Drain();
  CHECK(waits.inbox->Ended().code() == absl::StatusCode::kUnavailable);
  CHECK(parts.AttachTrainer("g").inbox->Ended().code() == absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace refitd
