#include "daemon/node/trainer_calls.h"

#include <catch2/catch.hpp>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/node/parts_test_util.h"

namespace refitd {
namespace {

using Catch::Contains;

constexpr int64_t kElements = 8;  // of the tensor "w", a byte each

// A trainer, and an engine rank whose tensor "w" lies in its region.
struct World {
  World() {
    parts.layouts().Register(parts.daemon().NewCall(), engine.caller(), /*engine=*/true,
                             LayoutOf(*parts.Register(engine, weights), kElements),
                             [](const auto& reply) { REQUIRE(reply.ok()); });
  }
  // Opens an update of one tensor, for which the engine gets ready.
  void Open(int64_t version) {
    const Answer begun = parts.Begin(trainer, version);
    parts.Ready(engine);
    REQUIRE(begun.status().ok());
  }
  // A push of "w".
  static ReceivedPush PushInline(int64_t version, std::string_view bytes = "") {
    ReceivedPush push;
    push.event.version = Version(version);
    push.received = InlineBucket({"w", DType::kUint8, {kElements}}, bytes);
    return push;
  }
  static ReceivedPush PushFrom(int64_t version, RegionId region, int64_t byte_offset = 0) {
    ReceivedPush push = PushInline(version);
    push.received.bucket->source = CheckedBucket::Source::kRegions;
    push.received.source = std::vector<RegionRef>{{region, byte_offset}};
    return push;
  }
  Answer Send(absl::StatusOr<ReceivedPush> push, const Caller& caller) {
    Answer answer;
    parts.calls().PushBucket(parts.daemon().NewCall(), caller, std::move(push), answer.function());
    return answer;
  }
  Answer Send(absl::StatusOr<ReceivedPush> push) { return Send(std::move(push), trainer.caller()); }
  Answer Commit(int64_t version, int64_t buckets) {
    CommitEvent commit;
    commit.version = Version(version);
    commit.bucket_count = buckets;
    return parts.Call(trainer, commit);
  }

  DaemonParts parts;
  SharedMemory weights{4096};
  Attached trainer = parts.AttachTrainer("g");
  Attached engine = parts.AttachRegistered("g");
};

TEST_CASE("inline bytes and a region's bytes are pushed into the engine's memory, and committed") {
  World world;
  SharedMemory memory(4096);
  std::memcpy(memory.data() + 16, "regional", kElements);
  const RegionId region = *world.parts.Register(world.trainer, memory);
  const std::string bytes = "inlined!";
  for (const bool inline_bytes : {true, false}) {
    const int64_t version = inline_bytes ? 1 : 2;
    world.Open(version);
    const Answer pushed = world.Send(inline_bytes ? World::PushInline(version, bytes)
                                                  : World::PushFrom(version, region, 16));
    CHECK(pushed.As<BucketReply>().bytes == kElements);
    CHECK(world.Commit(version, 1).As<CommitReply>().version == Version(version));
    CHECK(std::string(world.weights.data(), kElements) == (inline_bytes ? bytes : "regional"));
    CHECK(world.engine.inbox->Last<SendCommitted>()->version == Version(version));
  }
}

TEST_CASE("a caller without a lease is told that, whatever else is wrong with the call (P9)") {
  World world;
  Caller nobody = world.trainer.caller();
  nobody.token = "none";
  const absl::Status malformed = absl::InvalidArgumentError("bucket.source is missing");
  CHECK(world.Send(malformed, nobody).status().code() == absl::StatusCode::kUnauthenticated);
  CHECK(world.Send(malformed).status() == malformed);
  Answer answer;
  world.parts.calls().Call(world.parts.daemon().NewCall(), nobody, malformed, answer.function());
  CHECK(answer.status().code() == absl::StatusCode::kUnauthenticated);
  CHECK(world.parts.Call(world.trainer, malformed).status() == malformed);
  CHECK(world.Send(World::PushInline(1, "12345678"), world.engine.caller()).status().code() ==
        absl::StatusCode::kFailedPrecondition);
}

TEST_CASE("a push is refused by what the daemon knows of the member, and changes nothing (P10)") {
  World world;
  SharedMemory memory(4096);
  const RegionId region = *world.parts.Register(world.trainer, memory);
  world.Open(1);
  CHECK_THAT(Message(world.Send(World::PushFrom(1, RegionId(999))).status()),
             Contains("refs[0].region_id is 999"));
  CHECK_THAT(Message(world.Send(World::PushFrom(1, region, 4089)).status()), Contains("too small"));
  // The engine's region is not the trainer's.
  const RegionId other = *world.parts.Register(world.parts.AttachEngine("g", "j", Spec()), memory);
  CHECK(world.Send(World::PushFrom(1, other)).status().code() == absl::StatusCode::kNotFound);
  CHECK(world.Send(World::PushInline(1, "7 bytes")).status().code() ==
        absl::StatusCode::kInvalidArgument);
  CHECK(world.Send(World::PushFrom(1, region)).As<BucketReply>().bytes == kElements);
}

TEST_CASE("a push by handles is refused where no GPU is served") {
  World world;
  ReceivedPush push = World::PushInline(1);
  push.received.bucket->source = CheckedBucket::Source::kDevice;
  push.received.source = std::vector<DeviceRef>(1);
  CHECK(world.Send(std::move(push)).status().code() == absl::StatusCode::kUnimplemented);
}

TEST_CASE("a refit needs the layout that is registered now") {
  World world;
  const auto refit = [&world](uint64_t generation) {
    Answer answer;
    RefitEvent event;
    event.version = Version(1);
    event.duration = kPatience;
    world.parts.calls().Refit(world.parts.daemon().NewCall(), world.trainer.caller(), event,
                              generation, answer.function());
    return answer;
  };
  CHECK_THAT(Message(refit(1).status()), Contains("this rank has no layout"));
  SharedMemory memory(4096);
  std::memcpy(memory.data(), "compiled", kElements);
  world.parts.layouts().Register(
      world.parts.daemon().NewCall(), world.trainer.caller(), /*engine=*/false,
      LayoutOf(*world.parts.Register(world.trainer, memory), kElements, 7),
      [](const auto& reply) { REQUIRE(reply.ok()); });
  CHECK_THAT(Message(refit(6).status()), Contains("6 is not the registered 7"));
  const Answer done = refit(7);
  REQUIRE(Eventually([&world] { return world.engine.inbox->Last<SendPrepare>().has_value(); }));
  world.parts.Ready(world.engine);
  CHECK(done.As<CommitReply>().version == Version(1));
  CHECK(std::string(world.weights.data(), kElements) == "compiled");
}

TEST_CASE("a call whose caller went away is answered, and no call twice") {
  World world;
  BeginEvent begin;
  begin.version = Version(1);
  begin.tensor_count = 1;
  begin.duration = kPatience;
  Answer answer;
  const CallId call = world.parts.daemon().NewCall();
  world.parts.calls().Call(call, world.trainer.caller(), begin, answer.function());
  CHECK_FALSE(answer.came());  // the engine is not ready
  world.parts.calls().CallGone(call);
  CHECK(answer.status().code() == absl::StatusCode::kCancelled);
  world.parts.calls().CallGone(call);
}

TEST_CASE("a slot is leased, packed and pushed to a staged engine, which acknowledges") {
  DaemonParts parts;
  const Attached trainer = parts.AttachTrainer("g", Spec(3));
  const Attached engine = parts.AttachEngine("g", "i", Spec(3));
  const Answer begun = parts.Begin(trainer, 1);
  parts.Ready(engine);
  const UpdateId update = begun.As<BeginReply>().update;
  LeaseSlotEvent lease;
  lease.version = Version(1);
  const auto leased = parts.Call(trainer, lease).As<LeaseSlotReply>();

  ReceivedPush push = World::PushInline(1);
  push.received.bucket->source = CheckedBucket::Source::kSlot;
  push.received.bucket->slot = leased.grant;
  push.received.source = leased.grant;
  push.received.packing.emplace(Packing{{0}, kElements, true});
  Answer pushed;
  parts.calls().PushBucket(parts.daemon().NewCall(), trainer.caller(), std::move(push),
                           pushed.function());
  REQUIRE(Eventually([&engine] { return engine.inbox->Last<PartNews>().has_value(); }));
  const PartNews part = *engine.inbox->Last<PartNews>();
  CHECK(part.slot_bytes == kSlotBytes);
  CHECK(part.part.slot == leased.grant);
  CHECK(part.part.content->tensor(0).name == "w");
  CHECK(pushed.As<BucketReply>().bytes == kElements);

  CommitEvent commit;
  commit.version = Version(1);
  commit.bucket_count = 1;
  const Answer committed = parts.Call(trainer, commit);
  CHECK_FALSE(committed.came());  // the engine rank may still read the slot
  parts.members().Happened(engine.id, AckEvent{engine.id, update, part.part.part});
  CHECK(committed.As<CommitReply>().version == Version(1));
}

}  // namespace
}  // namespace refitd
