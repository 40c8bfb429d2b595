#include <catch2/catch.hpp>

#include "daemon/node/parts_test_util.h"

namespace refitd {
namespace {

TEST_CASE("an event for a group that is gone does nothing") {
  DaemonParts parts;
  StateLock lock(&parts.state().mutex);
  lock.Handle("gone", Tick{});
  CHECK(parts.state().groups.all().empty());
}

TEST_CASE("all ranks get an event for each step of an update, of the type for their role") {
  DaemonParts parts;
  const Attached trainer = parts.AttachTrainer("g");
  const Attached engine = parts.AttachEngine("g", "i", Spec());
  const Answer begun = parts.Begin(trainer, 3);
  const std::optional<SendPrepare> prepare = engine.inbox->Last<SendPrepare>();
  REQUIRE(prepare.has_value());
  CHECK(prepare->version == Version(3));
  CHECK(prepare->tensor_count == 1);
  CHECK_FALSE(trainer.inbox->Last<SendPrepare>().has_value());
  parts.Ready(engine);
  CHECK(begun.As<BeginReply>().update == prepare->update);

  AbortEvent abort;
  abort.version = Version(3);
  abort.reason = "the loss is not a number";
  CHECK(parts.Call(trainer, abort).status().ok());
  CHECK_THAT(engine.inbox->Last<SendAborted>()->reason,
             Catch::Contains("the loss is not a number"));
  CHECK(engine.inbox->Last<SendAborted>()->version == Version(3));
  CHECK_FALSE(engine.inbox->Last<SendAborted>()->dirty);  // nothing was written (P2)
}

TEST_CASE("a draining daemon tells both roles, and a reply ends the record of its call") {
  DaemonParts parts;
  const Attached trainer = parts.AttachTrainer("g");
  const Attached engine = parts.AttachEngine("g", "i", Spec());
  const Answer begun = parts.Begin(trainer, 1);
  parts.Ready(engine);
  CHECK(begun.status().ok());
  {
    const StateLock lock(&parts.state().mutex);
    CHECK(parts.state().calls.size() == 0);
  }
  parts.daemon().Drain();
  CHECK(trainer.inbox->Last<SendDraining>().has_value());
  CHECK(engine.inbox->Last<SendDraining>().has_value());
}

}  // namespace
}  // namespace refitd
