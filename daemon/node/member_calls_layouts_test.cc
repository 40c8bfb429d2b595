#include <catch2/catch.hpp>
#include <string>
#include <utility>

#include "daemon/node/member_calls.h"
#include "daemon/node/parts_test_util.h"

namespace refitd {
namespace {

using Catch::Contains;

constexpr int64_t kBytes = 4096;

struct World {
  World() { region = *parts.Register(engine, memory); }
  absl::StatusOr<MemberCalls::RegisteredLayout> Register(Layout layout, bool as_engine = true) {
    std::optional<absl::StatusOr<MemberCalls::RegisteredLayout>> answer;
    parts.calls().RegisterLayout(
        parts.daemon().NewCall(), engine.caller(), as_engine, std::move(layout),
        [&answer](const absl::StatusOr<MemberCalls::RegisteredLayout>& reply) { answer = reply; });
    REQUIRE(answer.has_value());  // the group is this daemon's, which answers at once
    return *answer;
  }
  std::string Refusal(Layout layout) { return Message(Register(std::move(layout)).status()); }

  DaemonParts parts;
  SharedMemory memory{kBytes};
  Attached engine = parts.AttachInPlace("g");
  RegionId region;
};

TEST_CASE("a layout is registered with its digest and its size") {
  World world;
  const Layout layout = LayoutOf(world.region, 100);
  const absl::StatusOr<MemberCalls::RegisteredLayout> registered = world.Register(layout);
  INFO(registered.status());
  REQUIRE(registered.ok());
  CHECK(registered->digest == layout.Digest());
  CHECK(registered->pieces == 1);
  CHECK(registered->bytes == 100);
  const StateLock lock(&world.parts.state().mutex);
  const MemberRecord* const member = world.parts.state().members.Find(world.engine.id);
  REQUIRE(member->layout != nullptr);
  CHECK(member->layout->tensors == layout.tensors);
}

TEST_CASE("a layout is replaced by one of a greater generation only") {
  World world;
  REQUIRE(world.Register(LayoutOf(world.region, 100, 5)).ok());
  CHECK_THAT(world.Refusal(LayoutOf(world.region, 100, 5)),
             Contains("binding_generation: 5 is not greater than the registered 5"));
  CHECK(world.Register(LayoutOf(world.region, 200, 6)).ok());
}

TEST_CASE("a layout must lie in the member's own regions (P10)") {
  World world;
  CHECK_THAT(world.Refusal(LayoutOf(RegionId(999), 100)), Contains("999"));
  CHECK_FALSE(world.Register(LayoutOf(world.region, kBytes + 1)).ok());
  CHECK(world.Register(LayoutOf(world.region, kBytes)).ok());
}

TEST_CASE("a layout is counted as long as somebody refers to it") {
  World world;
  const ByteLedger& held = world.parts.state().held;
  const auto reply = [](const auto& registered) { REQUIRE(registered.ok()); };
  for (const uint64_t generation : {1, 2}) {
    ByteLedger::Hold hold = world.parts.calls().HoldFor(world.engine.caller());
    REQUIRE(hold.GrowTo(static_cast<int64_t>(1000 * generation)).ok());
    world.parts.calls().RegisterLayout(world.parts.daemon().NewCall(), world.engine.caller(),
                                       /*engine=*/true, LayoutOf(world.region, 100, generation),
                                       reply, std::move(hold));
    CHECK(held.held() >= static_cast<int64_t>(1000 * generation));
  }
  {
    ByteLedger::Hold hold = world.parts.calls().HoldFor(world.engine.caller());
    REQUIRE(hold.GrowTo(5000).ok());
    Layout outside = LayoutOf(world.region, kBytes + 1, 3);
    world.parts.calls().RegisterLayout(
        world.parts.daemon().NewCall(), world.engine.caller(), /*engine=*/true, std::move(outside),
        [](const auto& refused) { CHECK_FALSE(refused.ok()); }, std::move(hold));
  }
  CHECK(held.held() < 5000);
}

TEST_CASE("an engine rank pushes no tensors, and a trainer's lease registers no engine's layout") {
  World world;
  Layout pushes = LayoutOf(world.region, 100);
  pushes.pushed_tensors = {0};
  CHECK_THAT(world.Refusal(pushes), Contains("an engine rank pushes none"));
  CHECK(world.Register(LayoutOf(world.region, 100), /*as_engine=*/false).status().code() ==
        absl::StatusCode::kFailedPrecondition);
  CHECK(world.parts.calls().CheckLease(world.engine.caller(), /*engine=*/true).ok());
  CHECK_FALSE(world.parts.calls().CheckLease(world.engine.caller(), /*engine=*/false).ok());
}

}  // namespace
}  // namespace refitd
