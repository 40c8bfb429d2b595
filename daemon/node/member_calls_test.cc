#include "daemon/node/member_calls.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/node/device_memory_test_util.h"
#include "daemon/node/parts_test_util.h"
#include "transport/base/temp_folder_testing.h"
#include "transport/host/host_transport.h"

namespace refitd {
namespace {

using Catch::Contains;

constexpr int64_t kElements = 8;  // of the tensor "w", a byte each

// A trainer, and an engine rank whose tensor "w" lies in its region.
struct World {
  explicit World(DaemonOptions options = {}) : parts("a", std::move(options)) {
    parts.calls().RegisterLayout(parts.daemon().NewCall(), engine.caller(), /*engine=*/true,
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
  Attached engine = parts.AttachInPlace("g");
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
  // A member that comes later is told the version.
  CHECK(world.parts.AttachEngine("g", "late", Spec()).inbox->welcome().version == Version(2));
}

TEST_CASE("a call without a lease fails for that, whatever else is wrong with it (P9)") {
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

TEST_CASE("inline bytes beyond the daemon's limit are refused (P10)") {
  DaemonOptions options;
  options.inline_bytes = kElements - 1;
  World world(options);
  world.Open(1);
  CHECK_THAT(Message(world.Send(World::PushInline(1, "12345678")).status()), Contains("inline"));
}

TEST_CASE("calls beyond those that may wait are refused, and change nothing (P10)") {
  World world;
  std::vector<CallId> waiting;
  {
    const StateLock lock(&world.parts.state().mutex);
    while (world.parts.state().calls.Admit().ok()) {
      waiting.push_back(world.parts.daemon().NewCall());
      world.parts.state().calls.Add(waiting.back(), {"g", [](const auto&, const auto&) {}});
    }
  }
  CHECK(waiting.size() == Calls::kMaxCalls);
  CHECK(world.parts.Begin(world.trainer, 1).status().code() ==
        absl::StatusCode::kResourceExhausted);
  {
    const StateLock lock(&world.parts.state().mutex);
    for (const CallId call : waiting) world.parts.state().calls.Take(call);
  }
  world.Open(1);
}

TEST_CASE("a region stays while a bucket in it is not answered (P6)") {
  DaemonParts parts;
  const Attached trainer = parts.AttachTrainer("g");
  const Attached engine = parts.AttachEngine("g", "i", Spec());
  const SharedMemory memory(4096);
  const RegionId region = *parts.Register(trainer, memory);
  BeginEvent begin;
  begin.version = Version(1);
  begin.tensor_count = 3;
  begin.duration = kPatience;
  const Answer begun = parts.Call(trainer, begin);
  parts.Ready(engine);
  const UpdateId update = begun.As<BeginReply>().update;
  // The engine acknowledges nothing at first, so that the third bucket waits for one of two slots.
  std::vector<Answer> pushed(3);
  for (size_t i = 0; i < pushed.size(); ++i) {
    ReceivedPush push = World::PushFrom(1, region);
    push.received.bucket->tensors[0].name = fmt::format("w{}", i);
    push.received.bucket->seq = static_cast<int64_t>(i);
    parts.calls().PushBucket(parts.daemon().NewCall(), trainer.caller(), std::move(push),
                             pushed[i].function());
  }
  CHECK(pushed[0].status().ok());
  CHECK(pushed[1].status().ok());
  CHECK_FALSE(pushed[2].came());
  const auto release = [&] { return parts.memory().ReleaseRegion(trainer.token(), {}, region); };
  CHECK_THAT(Message(release()), Contains("is the source of an unanswered bucket"));
  parts.calls().HandleEngineEvent(
      engine.id, AckEvent{engine.id, update, engine.inbox->Last<PartNews>()->part.part});
  CHECK(pushed[2].status().ok());
  CHECK(release().ok());
}

TEST_CASE("an identity opens no more updates than it may") {
  DaemonOptions options;
  options.per_identity.updates = 1;
  World world(options);
  const Attached other = world.parts.AttachTrainer("h");
  const Answer begun = world.parts.Begin(world.trainer, 1);
  CHECK_FALSE(begun.came());  // the update runs, and its engine is not ready
  const auto refusal = [](const Answer& answer) {
    return answer.status().code() == absl::StatusCode::kResourceExhausted &&
           Message(answer.status()).find("limits.per_identity.updates") != std::string::npos;
  };
  CHECK(refusal(world.parts.Begin(other, 1)));
  const SharedMemory memory(4096);
  world.parts.calls().RegisterLayout(world.parts.daemon().NewCall(), other.caller(),
                                     /*engine=*/false,
                                     LayoutOf(*world.parts.Register(other, memory), kElements, 1),
                                     [](const auto& reply) { REQUIRE(reply.ok()); });
  RefitEvent refit;
  refit.version = Version(1);
  refit.duration = kPatience;
  Answer answer;
  world.parts.calls().Refit(world.parts.daemon().NewCall(), other.caller(), refit, 1,
                            answer.function());
  CHECK(refusal(answer));
}

TEST_CASE("the audit log has a line for each call that begins an update or ends it") {
  const TempFolder folder;
  const std::string path = folder / "audit";
  const std::unique_ptr<AuditLog> audit = *AuditLog::Create({.file = path});
  DaemonOptions options;
  options.audit = audit.get();
  World world(options);
  world.Open(1);
  AbortEvent abort;
  abort.version = Version(1);
  CHECK(world.parts.Call(world.trainer, abort).status().ok());
  REQUIRE(audit->Flush());
  std::ifstream file(path);
  const std::string lines{std::istreambuf_iterator<char>(file), {}};
  CHECK_THAT(lines, Contains("refitd.v1.Trainer/Begin") && Contains("refitd.v1.Trainer/Abort"));
}

TEST_CASE("inline bytes ahead of their lock had no limit but each rank's number of buckets (P10)") {
  DaemonOptions options;
  options.max_held_bytes = kElements;
  World world(options);
  world.Open(1);
  const auto push = [&world](int64_t seq) {
    ReceivedPush ahead = World::PushInline(1, "12345678");
    ahead.received.bucket->seq = seq;
    return world.Send(std::move(ahead));
  };
  const Answer first = push(1);  // waits for bucket 0
  CHECK(world.parts.state().held.held() == kElements);
  CHECK_THAT(Message(push(2).status()), Contains("limits.held_bytes: all identities have 8"));
  Caller nobody = world.trainer.caller();
  nobody.token = "none";
  CHECK(world.Send(World::PushInline(1, "12345678"), nobody).status().code() ==
        absl::StatusCode::kUnauthenticated);
  AbortEvent abort;
  abort.version = Version(1);
  CHECK(world.parts.Call(world.trainer, abort).status().ok());
  CHECK_FALSE(first.status().ok());
  CHECK(world.parts.state().held.held() == 0);
}

TEST_CASE("a bucket whose header does not fit on the link to a joined daemon is refused (P10)") {
  DaemonOptions options;
  options.message_bytes = 1 << 20;
  DaemonParts a("a", options);
  DaemonParts b("b");
  const Attached trainer = a.AttachTrainer("g");
  const Attached engine = b.AttachEngine("g", "i", Spec(), &a);
  REQUIRE(Eventually([&engine] { return engine.inbox->welcomed(); }));
  ReceivedPush push = World::PushInline(1, "12345678");
  CheckedBucket& bucket = *push.received.bucket;
  bucket.tensors.clear();
  bucket.ranges.clear();
  for (uint32_t i = 0; i < 8000; ++i) {
    bucket.tensors.push_back({fmt::format("{:0>200}", i), DType::kUint8, {0}});
    bucket.ranges.push_back({i, 0, 0});
  }
  bucket.bytes = 0;
  bucket.source = CheckedBucket::Source::kInline;
  push.received.source = std::vector<std::string_view>(8000);
  Answer answer;
  a.calls().PushBucket(a.daemon().NewCall(), trainer.caller(), std::move(push), answer.function());
  CHECK_THAT(Message(answer.status()), Contains("message_bytes"));
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
  world.parts.calls().RegisterLayout(
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

TEST_CASE("memory that a refit used is let go with its region, and with its member (P6, P8)") {
  World world;
  const auto register_layout = [&world](RegionId region, uint64_t generation) {
    world.parts.calls().RegisterLayout(world.parts.daemon().NewCall(), world.trainer.caller(),
                                       /*engine=*/false, LayoutOf(region, kElements, generation),
                                       [](const auto& reply) { REQUIRE(reply.ok()); });
  };
  const auto refit = [&world](int64_t version, uint64_t generation) {
    Answer done;
    RefitEvent event;
    event.version = Version(version);
    event.duration = kPatience;
    world.parts.calls().Refit(world.parts.daemon().NewCall(), world.trainer.caller(), event,
                              generation, done.function());
    REQUIRE(Eventually([&] {
      const auto prepare = world.engine.inbox->Last<SendPrepare>();
      return prepare.has_value() && prepare->version == Version(version);
    }));
    world.parts.Ready(world.engine);
    REQUIRE(done.status().ok());
  };
  const auto mapping = [&world](RegionId region) -> std::weak_ptr<const void> {
    const StateLock lock(&world.parts.state().mutex);
    return world.parts.state().members.Find(world.trainer.id)->regions.at(region).memory.keep_alive;
  };
  const SharedMemory memory(4096);
  const RegionId first = *world.parts.Register(world.trainer, memory);
  const std::weak_ptr<const void> of_first = mapping(first);
  register_layout(first, 1);
  refit(1, 1);
  const SharedMemory other(4096);  // regions of one memfd share its mapping
  const RegionId second = *world.parts.Register(world.trainer, other);
  const std::weak_ptr<const void> of_second = mapping(second);
  register_layout(second, 2);
  CHECK(world.parts.memory().ReleaseRegion(world.trainer.token(), {}, first).ok());
  CHECK(Eventually([&of_first] { return of_first.expired(); }));
  refit(2, 2);
  CHECK_FALSE(of_second.expired());
  world.parts.calls().Detached(world.trainer.id);
  CHECK(Eventually([&of_second] { return of_second.expired(); }));
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

TEST_CASE("a slot is leased, packed and pushed to a loader engine, which acknowledges") {
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
  parts.calls().HandleEngineEvent(engine.id, AckEvent{engine.id, update, part.part.part});
  CHECK(committed.As<CommitReply>().version == Version(1));
}

// ---- on GPUs ----

// The host's transport, which says that it broadcasts through slots.
class Broadcasting : public Transport {
 public:
  absl::Status CanBroadcast(BroadcastMethod method) const override {
    if (method != BroadcastMethod::kNccl) return absl::OkStatus();
    return absl::UnimplementedError("no NCCL");
  }
  void Submit(Transfer transfer, std::function<void(TransferResult)> done) override {
    transfer.broadcast.reset();
    host_->Submit(std::move(transfer), std::move(done));
  }
  absl::StatusOr<std::shared_ptr<const PreparedTransfer>> Prepare(Transfer transfer) override {
    return host_->Prepare(std::move(transfer));
  }
  void Replay(const std::shared_ptr<const PreparedTransfer>& prepared, Verification verification,
              std::string label, std::function<void(TransferResult)> done) override {
    host_->Replay(prepared, verification, std::move(label), std::move(done));
  }
  void Submit(ReadbackJob job, std::function<void(ReadbackResult)> done) override {
    host_->Submit(std::move(job), std::move(done));
  }
  std::shared_ptr<const PreparedReadback> Prepare(ReadbackJob job) override {
    return host_->Prepare(std::move(job));
  }
  void Replay(const std::shared_ptr<const PreparedReadback>& prepared,
              std::vector<uint64_t> expected, std::function<void(ReadbackResult)> done) override {
    host_->Replay(prepared, std::move(expected), std::move(done));
  }

 private:
  const std::unique_ptr<Transport> host_ = MakeHostTransport({.threads = 1});
};

// A trainer on GPU-0, and engine ranks on other GPUs, whose tensor "w" lies in a block.
struct Gpus {
  // `trainers`: how many trainer ranks the group has, of which this is the first.
  explicit Gpus(int trainers = 1)
      : parts("a", WithGpus(memory), DaemonInsides{.transport = std::make_unique<Broadcasting>()}),
        trainer(parts.AttachTrainerOnGpu("g", 0, 0, trainers)) {}
  Attached AttachEngine(const std::string& instance, int ordinal) {
    const Attached engine = parts.Attach(
        DaemonParts::OnGpu(DaemonParts::Engine(instance, DeliveryMode::kInPlace), ordinal), "g");
    REQUIRE(engine.inbox->welcomed());
    const auto region = std::make_shared<std::atomic<uint64_t>>(0);
    parts.memory().RegisterDevice(
        engine.caller(), /*engine=*/true, {HandleOf(ordinal), memory->NameOf(ordinal), 0, 0},
        [region](const auto& opened) { *region = opened.ok() ? opened->id.value() : 0; });
    REQUIRE(Eventually([&region] { return *region != 0; }));
    parts.calls().RegisterLayout(parts.daemon().NewCall(), engine.caller(), /*engine=*/true,
                                 LayoutOf(RegionId(*region), kElements),
                                 [](const auto& reply) { REQUIRE(reply.ok()); });
    return engine;
  }
  static std::string HandleOf(int ordinal) {
    return std::string(kBlockHandleBytes, static_cast<char>('a' + ordinal));
  }
  Answer Begin(BroadcastMethod broadcast = BroadcastMethod::kAuto, int64_t version = 1) {
    return Begin(trainer, broadcast, version);
  }
  Answer Begin(const Attached& by, BroadcastMethod broadcast, int64_t version = 1) {
    BeginEvent begin;
    begin.version = Version(version);
    begin.tensor_count = 1;
    begin.duration = kPatience;
    begin.broadcast = broadcast;
    return parts.Call(by, begin);
  }
  // Attaches an engine rank on GPU-1, and opens an update that moves bytes without a broadcast.
  void OpenDirect() {
    const Attached engine = AttachEngine("i", 1);
    const Answer begun = Begin(BroadcastMethod::kDirect);
    parts.Ready(engine);
    REQUIRE(begun.status().ok());
  }
  Answer Lease(CallId call) {
    LeaseSlotEvent lease;
    lease.version = Version(1);
    Answer answer;
    parts.calls().Call(call, trainer.caller(), lease, answer.function());
    return answer;
  }
  Answer Lease() { return Lease(parts.daemon().NewCall()); }
  ReceivedPush Push(int ordinal = 0) const {
    ReceivedPush push = World::PushInline(1, "12345678");
    push.received.bucket->source = CheckedBucket::Source::kDevice;
    DeviceRef ref;
    ref.handle = source;
    ref.device = names[static_cast<size_t>(ordinal)];
    push.received.source = std::vector<DeviceRef>{ref};
    return push;
  }
  Answer Send(ReceivedPush push, CallId call) {
    Answer answer;
    parts.calls().PushBucket(call, trainer.caller(), std::move(push), answer.function());
    return answer;
  }
  bool HasPool(int ordinal) {
    const StateLock lock(&parts.state().mutex);
    return parts.state().pools.Has(*parts.state().groups.Find("g"), ordinal);
  }
  bool WantsPools() {
    const StateLock lock(&parts.state().mutex);
    return parts.state().groups.Find("g")->wants_pools();
  }
  int PreparingBegins() {
    const StateLock lock(&parts.state().mutex);
    return parts.state().groups.Find("g")->preparing_begins;
  }

  // Pushes point to the trainer's block, by its handle, and to GPUs, by their names.
  const std::string source = HandleOf(7);
  const std::vector<std::string> names = {"GPU-0", "GPU-1", "GPU-2", "GPU-3"};
  std::shared_ptr<FakeMemory> memory = std::make_shared<FakeMemory>();
  DaemonParts parts;
  Attached trainer;
};

TEST_CASE("a push by handles writes into the engine's GPU, and is closed when it is answered") {
  Gpus gpus;
  gpus.OpenDirect();
  gpus.memory->Fill(gpus.source, "ondevice");
  REQUIRE(gpus.memory->open_blocks() == 1);  // the engine's
  CHECK_THAT(Message(gpus.Send(gpus.Push(3), gpus.parts.daemon().NewCall()).status()),
             Contains("GPU-3"));
  const Answer pushed = gpus.Send(gpus.Push(), gpus.parts.daemon().NewCall());
  REQUIRE(pushed.As<BucketReply>().bytes == kElements);
  CHECK(gpus.memory->BytesOf(Gpus::HandleOf(1), kElements) == "ondevice");
  CHECK(gpus.memory->open_blocks() == 1);
}

TEST_CASE("a call whose caller went away while it waited opens nothing, and makes no slots") {
  Gpus gpus;
  std::shared_ptr<void> held = gpus.parts.HoldRegionsThread();
  const CallId lease = gpus.parts.daemon().NewCall();
  const CallId push = gpus.parts.daemon().NewCall();
  const Answer leased = gpus.Lease(lease);
  const Answer pushed = gpus.Send(gpus.Push(), push);
  gpus.parts.calls().CallGone(lease);
  gpus.parts.calls().CallGone(push);
  CHECK_FALSE(leased.came());
  held.reset();
  CHECK(leased.status().code() == absl::StatusCode::kCancelled);
  CHECK(pushed.status().code() == absl::StatusCode::kCancelled);
  CHECK(gpus.memory->asked() == 0);
  CHECK(gpus.memory->opened() == 0);
}

TEST_CASE("a call of a member that is lost while it waits opens nothing") {
  Gpus gpus;
  std::shared_ptr<void> held = gpus.parts.HoldRegionsThread();
  const Answer pushed = gpus.Send(gpus.Push(), gpus.parts.daemon().NewCall());
  gpus.parts.calls().Gone(gpus.trainer.id, "it left");
  held.reset();
  CHECK_FALSE(pushed.status().ok());
  CHECK(gpus.memory->opened() == 0);
}

TEST_CASE("calls of a member that wait for device memory are limited, and count no more after") {
  Gpus gpus;
  const int64_t limit = GroupLimits().outstanding_buckets;
  for (int round = 0; round < 2; ++round) {
    std::shared_ptr<void> held = gpus.parts.HoldRegionsThread();
    std::vector<Answer> waiting;
    for (int64_t i = 0; i < limit; ++i) {
      waiting.push_back(gpus.Send(gpus.Push(), gpus.parts.daemon().NewCall()));
      CHECK_FALSE(waiting.back().came());
    }
    CHECK(gpus.Send(gpus.Push(), gpus.parts.daemon().NewCall()).status().code() ==
          absl::StatusCode::kResourceExhausted);
    CHECK(gpus.Lease().status().code() == absl::StatusCode::kResourceExhausted);
    held.reset();
    // No update runs, so all are refused in the end.
    for (const Answer& answer : waiting) CHECK_FALSE(answer.status().ok());
  }
}

TEST_CASE("a slot on a GPU is leased after the slots there are made") {
  Gpus gpus;
  gpus.OpenDirect();
  gpus.parts.AwaitRegionsThread();
  gpus.memory->can_make = absl::ResourceExhaustedError("too little memory is free");
  CHECK_THAT(Message(gpus.Lease().status()), Contains("too little memory is free"));
  gpus.memory->can_make = absl::OkStatus();
  CHECK(gpus.Lease().status().ok());
  CHECK(gpus.HasPool(0));
}

TEST_CASE("a method that broadcasts is refused where it can't serve, before any slot is made") {
  Gpus gpus;
  CHECK_THAT(Message(gpus.Begin(BroadcastMethod::kNccl).status()), Contains("no NCCL"));
  const Attached host = gpus.parts.AttachTrainer("h");
  BeginEvent begin;
  begin.version = Version(1);
  begin.tensor_count = 1;
  begin.duration = kPatience;
  begin.broadcast = BroadcastMethod::kChain;
  CHECK_THAT(Message(gpus.parts.Call(host, begin).status()),
             Contains("this trainer rank's memory is the host's"));
  DaemonParts other("b");
  const Attached far = other.AttachEngine("h", "i", Spec(), &gpus.parts);
  REQUIRE(Eventually([&far] { return far.inbox->welcomed(); }));
  CHECK_THAT(Message(gpus.parts.Call(host, begin).status()), Contains("group 'h' spans daemons"));
  CHECK(gpus.memory->asked() == 0);
}

TEST_CASE("slots are made for an update that could gain from broadcasts, and for no other") {
  Gpus gpus;
  std::vector<Attached> engines = {gpus.AttachEngine("i", 1)};
  const auto opens_with = [&gpus, &engines](int64_t version, BroadcastMethod method) {
    const int before = gpus.memory->asked();
    const Answer begun = gpus.Begin(method, version);
    gpus.parts.AwaitRegionsThread();
    for (const Attached& engine : engines) gpus.parts.Ready(engine);
    REQUIRE(begun.status().ok());
    CHECK(gpus.PreparingBegins() == 0);
    CHECK(gpus.WantsPools() == (gpus.memory->asked() > before));
    AbortEvent abort;
    abort.version = Version(version);
    REQUIRE(gpus.parts.Call(gpus.trainer, abort).status().ok());
    CHECK_FALSE(gpus.WantsPools());
    return gpus.memory->asked() - before;
  };
  CHECK(opens_with(1, BroadcastMethod::kAuto) == 0);  // one instance
  engines.push_back(gpus.AttachEngine("j", 1));
  CHECK(opens_with(2, BroadcastMethod::kAuto) == 0);  // one GPU
  gpus.parts.calls().Detached(engines.back().id);
  engines.pop_back();
  engines.push_back(gpus.AttachEngine("k", 0));
  CHECK(opens_with(3, BroadcastMethod::kAuto) == 0);  // one GPU that is not the trainer's
}

TEST_CASE("while slots are being made, ranks that come need slots; then the update has them") {
  Gpus gpus;
  const std::vector<Attached> engines = {gpus.AttachEngine("i", 1), gpus.AttachEngine("j", 2)};
  CHECK_FALSE(gpus.WantsPools());
  std::shared_ptr<void> held = gpus.parts.HoldRegionsThread();
  const Answer begun = gpus.Begin();
  CHECK(gpus.WantsPools());
  CHECK(gpus.PreparingBegins() == 1);
  held.reset();
  REQUIRE(Eventually([&gpus] { return gpus.PreparingBegins() == 0; }));
  for (const Attached& engine : engines) gpus.parts.Ready(engine);
  REQUIRE(begun.status().ok());
  CHECK(gpus.memory->asked() == 2);
  CHECK(gpus.WantsPools());
}

TEST_CASE(
    "an update is opened without broadcasts where slots can't be made, unless they were asked "
    "for") {
  Gpus gpus;
  const std::vector<Attached> engines = {gpus.AttachEngine("i", 1), gpus.AttachEngine("j", 2)};
  gpus.parts.AwaitRegionsThread();
  gpus.memory->can_make = absl::ResourceExhaustedError("too little memory is free");
  const Answer refused = gpus.Begin(BroadcastMethod::kChain);
  CHECK(refused.status().code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(Message(refused.status()), Contains("too little memory is free"));
  const Answer begun = gpus.Begin();
  REQUIRE(Eventually([&gpus] { return gpus.memory->asked() == 2; }));
  gpus.parts.AwaitRegionsThread();
  for (const Attached& engine : engines) gpus.parts.Ready(engine);
  CHECK(begun.status().ok());
  CHECK_FALSE(gpus.WantsPools());
}

TEST_CASE("a broadcast is refused where a rank without slots came while the update was opened") {
  Gpus gpus(2);
  const Attached second = gpus.parts.AttachTrainerOnGpu("g", 0, 1, 2);
  const std::vector<Attached> engines = {gpus.AttachEngine("i", 1), gpus.AttachEngine("j", 2)};
  const Answer first = gpus.Begin(BroadcastMethod::kChain);
  REQUIRE(Eventually([&gpus] { return gpus.PreparingBegins() == 0; }));
  gpus.parts.AwaitRegionsThread();
  gpus.memory->can_make = absl::ResourceExhaustedError("too little memory is free");
  const Attached late = gpus.parts.Attach(
      DaemonParts::OnGpu(DaemonParts::Engine("k", DeliveryMode::kInPlace), 3), "g");
  REQUIRE(Eventually([&late] { return late.inbox->welcomed(); }));
  CHECK_FALSE(gpus.HasPool(3));
  gpus.memory->can_make = absl::OkStatus();
  const Answer refused = gpus.Begin(second, BroadcastMethod::kChain);
  for (const Answer& answer : {first, refused}) {
    CHECK(answer.status().code() == absl::StatusCode::kResourceExhausted);
    CHECK_THAT(Message(answer.status()), Contains("the GPU of engine k rank 0 has none"));
  }
}

}  // namespace
}  // namespace refitd
