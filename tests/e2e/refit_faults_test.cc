// Compiled refits whose members and daemons die in the middle, and trainers that move, cut their
// shards anew and come back between versions: real processes and daemons, every byte compared.
//
// The middle is found, not guessed: the test watches an engine's memory until a refit has begun to
// write there, then stops the daemon that writes. If all is written by then, the next version tries
// again.
#include <fmt/format.h>
#include <signal.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/e2e/client_members.h"
#include "tests/e2e/require.h"

namespace refitd::e2e {
namespace {

using Catch::Contains;
using Catch::StartsWith;

constexpr int kMatrices = 16;
constexpr int64_t kColumns = 1024;
// How many versions may complete before the daemon is stopped in the middle of a version.
constexpr int64_t kAttempts = 20;

// The slots of the group in the tests with two daemons are so small that a version takes hundreds
// of rounds between them.
constexpr int64_t kSlotBytes = 65'536;
constexpr int kSlots = 4;

// Tells whether memory has changed, by samples spread over all pieces.
class Samples {
 public:
  Samples(const char* memory, const Layout& layout) {
    constexpr int64_t kStepBytes = 32'768;
    for (const Piece& piece : layout.pieces) {
      const int64_t element = ElementBytes(layout.tensors[piece.tensor].dtype);
      const int64_t row_bytes = piece.strides[0] * element;
      for (int64_t row = 0; row < piece.box.extent[0]; row += kStepBytes / row_bytes + 1) {
        const char* at = memory + piece.byte_offset + row * row_bytes;
        samples_.emplace_back(at, Read(at));
      }
    }
  }
  size_t size() const { return samples_.size(); }
  size_t changed() const {
    size_t changed = 0;
    for (const auto& [at, before] : samples_) changed += Read(at) == before ? 0 : 1;
    return changed;
  }

 private:
  static uint64_t Read(const char* at) {
    uint64_t value = 0;
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  std::vector<std::pair<const char*, uint64_t>> samples_;
};

// Stops the daemon while it writes to that memory. False: all was written already.
bool StopMidway(Daemon* daemon, const Samples& samples) {
  const auto deadline = std::chrono::steady_clock::now() + kDeadline;
  while (samples.changed() == 0) {
    REQUIRE(std::chrono::steady_clock::now() < deadline);
    std::this_thread::yield();
  }
  daemon->Signal(SIGSTOP);
  return samples.changed() < samples.size();
}

// A trainer process that has attached and registered its columns.
std::unique_ptr<MemberProcess> TrainerProcess(const Daemon& daemon, int rank, int ranks,
                                              int64_t rows, int instances = 1) {
  const std::vector<std::string> settings = {
      fmt::format("rank={}", rank),           fmt::format("trainers={}", ranks),
      fmt::format("instances={}", instances), fmt::format("matrices={}", kMatrices),
      fmt::format("rows={}", rows),           fmt::format("columns={}", kColumns)};
  auto trainer = std::make_unique<MemberProcess>(daemon, "trainer", settings);
  REQUIRE_ANSWER(*trainer, "attach", "ok");
  REQUIRE_ANSWER(*trainer, "register", "ok");
  return trainer;
}

v1::EngineHello EngineIn(const std::string& instance, const std::string& coordinator = "") {
  v1::EngineHello hello =
      RawEngine::Hello("g", instance, 0, 1, v1::DELIVERY_IN_PLACE, std::nullopt);
  hello.set_coordinator(coordinator);
  hello.set_wait_ms(30'000);
  return hello;
}

void CheckAborted(RawEngine* engine, bool dirty, const std::vector<std::string>& words) {
  const auto event = engine->events().WaitFor(v1::EngineEvent::kAborted);
  if (!event.has_value() && engine->events().ended()) {
    FAIL("the stream ended: " << engine->events().WaitEnd()->error_message());
  }
  REQUIRE(event.has_value());
  CHECK(event->aborted().dirty() == dirty);
  for (const std::string& word : words) CHECK_THAT(event->aborted().reason(), Contains(word));
}

std::string NameOf(const MemberProcess& member, const std::string& name) {
  return fmt::format("{} (pid {})", name, member.pid());
}

// ---- members ----

TEST_CASE("a trainer killed before the engines are ready aborts the refit, and all stay clean") {
  const Model model = PlainModel(kMatrices, 64, kColumns);
  Daemon daemon;
  const auto stays = TrainerProcess(daemon, 0, 2, 64);
  auto dies = TrainerProcess(daemon, 1, 2, 64);
  Holder engine(daemon.Connect(), EngineIn("i"), HoldWhole(model), {.auto_ready = false});
  stays->Send("refit 1");
  dies->Send("refit 1");
  REQUIRE(engine.engine().events().WaitFor(v1::EngineEvent::kPrepare).has_value());
  const std::string culprit = NameOf(*dies, "trainer rank 1");
  dies->Kill();
  CHECK_THAT(stays->Answer(), StartsWith("error 10 ") && Contains(culprit));
  CheckAborted(&engine.engine(), false, {culprit});
  CHECK(engine.DifferenceFromEmpty() == "");
  CHECK(daemon.InstanceState("g", "i") == "clean");

  dies = TrainerProcess(daemon, 1, 2, 64);
  stays->Send("refit 2");
  dies->Send("refit 2");
  REQUIRE(engine.engine().events().WaitFor(v1::EngineEvent::kPrepare).has_value());
  REQUIRE(engine.engine().Ready(2));
  for (MemberProcess* trainer : {stays.get(), dies.get()}) {
    CHECK_THAT(trainer->Answer(), StartsWith("ok i=committed"));
  }
  CHECK(engine.Difference(model, BytesOf(model, 2)) == "");
}

TEST_CASE("a trainer killed while its shards are copied aborts the refit by name, dirty") {
  constexpr int64_t kRows = 2048;
  const Model model = PlainModel(kMatrices, kRows, kColumns);
  Daemon daemon;
  auto dies = TrainerProcess(daemon, 0, 1, kRows);
  Holder engine(daemon.Connect(), EngineIn("i"), HoldWhole(model));
  bool aborted = false;
  int64_t version = 0;
  while (!aborted) {
    REQUIRE(++version <= kAttempts);
    const Samples samples(engine.memory().data(), engine.layout());
    dies->Send(fmt::format("refit {}", version));
    const bool midway = StopMidway(&daemon, samples);
    const std::string culprit = NameOf(*dies, "trainer rank 0");
    dies->Kill();
    daemon.Signal(SIGCONT);
    const auto event = engine.engine().events().WaitForAny(
        {v1::EngineEvent::kAborted, v1::EngineEvent::kCommitted});
    REQUIRE(event.has_value());
    aborted = event->has_aborted();
    if (aborted) {
      // By then all bytes may be written, and the daemon may hear of the death before that.
      CHECK(event->aborted().dirty());
      CHECK_THAT(event->aborted().reason(), Contains(culprit));
      CHECK(daemon.InstanceState("g", "i") == "dirty");
      if (!midway) aborted = false;
    } else {
      CHECK(engine.Difference(model, BytesOf(model, version)) == "");
    }
    REQUIRE(Eventually([&] { return daemon.Group("g").trainers() == 0; }));
    dies = TrainerProcess(daemon, 0, 1, kRows);
  }
  ++version;
  REQUIRE_ANSWER(*dies, fmt::format("refit {}", version), "ok i=committed");
  CHECK(engine.Difference(model, BytesOf(model, version)) == "");
  CHECK(daemon.InstanceState("g", "i") == "clean");
}

// Two daemons, with the group on `a`. Bytes must cross the wire, so a refit stays in its middle
// while `b` is stopped.
struct TwoDaemons {
  static constexpr int64_t kRows = 512;
  static std::vector<std::string> Flags(const std::string& id, int loopback) {
    return {"--listen-tcp=" + OwnLoopback(loopback) + ":0", "--daemon-id=" + id};
  }
  const Model model = PlainModel(kMatrices, kRows, kColumns);
  Daemon a{Flags("a", 0)};
  Daemon b{Flags("b", 1)};
};

TEST_CASE("a trainer killed in the middle of a refit over two daemons: all others hear its name") {
  TwoDaemons f;
  const auto stays = TrainerProcess(f.a, 0, 2, f.kRows, 2);
  auto dies = TrainerProcess(f.a, 1, 2, f.kRows, 2);
  Holder near(f.a.Connect(), EngineIn("near"), HoldWhole(f.model));
  Holder far(f.b.Connect(), EngineIn("far", f.a.address()), HoldWhole(f.model));
  int64_t version = 0;
  for (bool midway = false; !midway;) {
    REQUIRE(++version <= kAttempts);
    const Samples samples(far.memory().data(), far.layout());
    stays->Send(fmt::format("refit {}", version));
    dies->Send(fmt::format("refit {}", version));
    midway = StopMidway(&f.b, samples);
    if (midway) break;
    f.b.Signal(SIGCONT);
    REQUIRE_THAT(stays->Answer(), StartsWith("ok"));
    REQUIRE_THAT(dies->Answer(), StartsWith("ok"));
  }
  const std::string culprit = NameOf(*dies, "trainer rank 1");
  dies->Kill();
  REQUIRE(Eventually([&] { return f.a.Group("g").update().state() == "draining"; }));
  f.b.Signal(SIGCONT);
  CHECK_THAT(stays->Answer(), StartsWith("error 10 ") && Contains(culprit));
  CheckAborted(&near.engine(), true, {culprit});
  CheckAborted(&far.engine(), true, {culprit});
  for (const std::string instance : {"near", "far"}) {
    CHECK(f.a.InstanceState("g", instance) == "dirty");
  }

  dies = TrainerProcess(f.a, 1, 2, f.kRows, 2);
  ++version;
  stays->Send(fmt::format("refit {}", version));
  dies->Send(fmt::format("refit {}", version));
  for (MemberProcess* trainer : {stays.get(), dies.get()}) {
    CHECK_THAT(trainer->Answer(),
               StartsWith("ok") && Contains("near=committed") && Contains("far=committed"));
  }
  const std::vector<std::string> bytes = BytesOf(f.model, version);
  CHECK(near.Difference(f.model, bytes) == "");
  CHECK(far.Difference(f.model, bytes) == "");
  for (const std::string instance : {"near", "far"}) {
    CHECK(f.a.InstanceState("g", instance) == "clean");
  }
}

TEST_CASE("an engine killed in the middle of a refit costs its instance, and the rest commits") {
  TwoDaemons f;
  const auto trainer = TrainerProcess(f.a, 0, 1, f.kRows, 3);
  MemberProcess dies(
      f.a, "engine",
      {"instance=dies", "auto=1", "instances=3", fmt::format("matrices={}", kMatrices),
       fmt::format("rows={}", f.kRows), fmt::format("columns={}", kColumns)});
  REQUIRE_ANSWER(dies, "attach", "ok");
  Holder near(f.a.Connect(), EngineIn("near"), HoldWhole(f.model));
  Holder far(f.b.Connect(), EngineIn("far", f.a.address()), HoldWhole(f.model));
  int64_t version = 0;
  for (bool midway = false; !midway;) {
    REQUIRE(++version <= kAttempts);
    const Samples samples(far.memory().data(), far.layout());
    trainer->Send(fmt::format("refit {}", version));
    midway = StopMidway(&f.b, samples);
    if (midway) break;
    f.b.Signal(SIGCONT);
    REQUIRE_THAT(trainer->Answer(), StartsWith("ok"));
  }
  const std::string culprit = NameOf(dies, "engine dies rank 0");
  dies.Kill();
  REQUIRE(Eventually([&] { return f.a.InstanceState("g", "dies").empty(); }));
  f.b.Signal(SIGCONT);
  CHECK_THAT(trainer->Answer(), StartsWith("ok") && Contains("near=committed") &&
                                    Contains("far=committed") && Contains("dies=" + culprit));
  const std::vector<std::string> bytes = BytesOf(f.model, version);
  CHECK(near.Difference(f.model, bytes) == "");
  CHECK(far.Difference(f.model, bytes) == "");
}

// ---- daemons ----

TEST_CASE(
    "an engines' daemon killed in the middle of a refit costs its instance, and the rest commits") {
  TwoDaemons f;
  Daemon c{TwoDaemons::Flags("c", 2)};
  const auto trainer = TrainerProcess(f.a, 0, 1, f.kRows, 3);
  Holder near(f.a.Connect(), EngineIn("near"), HoldWhole(f.model));
  Holder third(c.Connect(), EngineIn("third", f.a.address()), HoldWhole(f.model));
  Holder dies(f.b.Connect(), EngineIn("dies", f.a.address()), HoldWhole(f.model));
  int64_t version = 0;
  for (bool midway = false; !midway;) {
    REQUIRE(++version <= kAttempts);
    const Samples samples(dies.memory().data(), dies.layout());
    trainer->Send(fmt::format("refit {}", version));
    midway = StopMidway(&f.b, samples);
    if (midway) break;
    f.b.Signal(SIGCONT);
    REQUIRE_THAT(trainer->Answer(), StartsWith("ok"));
  }
  f.b.Kill();
  const std::string answer = trainer->Answer();
  CHECK_THAT(answer, StartsWith("ok") && Contains("near=committed") &&
                         Contains("third=committed") && Contains("dies=") && Contains("daemon b"));
  const std::vector<std::string> bytes = BytesOf(f.model, version);
  CHECK(near.Difference(f.model, bytes) == "");
  CHECK(third.Difference(f.model, bytes) == "");
  for (const std::string instance : {"near", "third"}) {
    CHECK(f.a.InstanceState("g", instance) == "clean");
  }
}

TEST_CASE("a joined daemon killed in the middle of a refit is named, and its members come back") {
  TwoDaemons f;
  const auto connect = [&](const Daemon& daemon) {
    client::ConnectOptions connect;
    connect.socket = daemon.socket();
    connect.group = "g";
    connect.reattach = kDeadline;
    connect.wait = kDeadline;
    connect.spec = client::GroupSpec{
        .trainer_ranks = 2, .min_instances = 2, .slot_bytes = kSlotBytes, .slots = kSlots};
    if (&daemon == &f.b) connect.coordinator = f.a.address();
    return connect;
  };
  std::vector<std::unique_ptr<Shards>> trainers;
  for (const int rank : {0, 1}) {
    client::TrainerOptions options{
        .connect = connect(rank == 0 ? f.a : f.b), .rank = rank, .world_size = 2};
    trainers.push_back(std::make_unique<Shards>(options, f.model, HoldSlice(f.model, 1, rank, 2)));
    REQUIRE(trainers.back()->Register().ok());
  }
  Rank near(connect(f.a), "near", client::Delivery::kInPlace, f.model);
  Rank far(connect(f.b), "far", client::Delivery::kInPlace, f.model);
  const auto refit = [&](int64_t version) {
    std::vector<std::future<absl::Status>> calls;
    for (const auto& trainer : trainers) {
      trainer->Fill(version);
      calls.push_back(std::async(std::launch::async, [&trainer, version] {
        return trainer->trainer().Refit({.version = Version(version)}).status();
      }));
    }
    return calls;
  };
  const auto committed = [](int64_t version) {
    return [version](const Rank::Seen& s) { return s.committed == Version(version); };
  };
  int64_t version = 0;
  std::vector<std::future<absl::Status>> calls;
  for (bool midway = false; !midway;) {
    REQUIRE(++version <= kAttempts);
    const Samples samples(far.memory(), far.layout());
    calls = refit(version);
    midway = StopMidway(&f.b, samples);
    if (midway) break;
    f.b.Signal(SIGCONT);
    for (auto& call : calls) REQUIRE(call.get().ok());
    REQUIRE(near.Await(committed(version)));
    REQUIRE(far.Await(committed(version)));
  }
  f.b.Kill();
  const absl::Status at_coordinator = calls[0].get();
  INFO(at_coordinator);
  CHECK(absl::IsAborted(at_coordinator));
  CHECK_THAT(Message(at_coordinator), Contains("daemon b"));
  REQUIRE(near.Await([](const Rank::Seen& s) { return s.aborts == 1; }));
  CHECK(near.seen().aborted.dirty);
  CHECK_THAT(near.seen().aborted.reason, Contains("daemon b"));
  CHECK(near.engine().weights() == Weights::kDirty);
  CHECK(f.a.InstanceState("g", "near") == "dirty");
  REQUIRE(far.Await([](const Rank::Seen& s) { return s.losses == 1; }));
  CHECK(far.seen().lost_weights == Weights::kUnknown);

  f.b.Restart();
  REQUIRE(far.Await([](const Rank::Seen& s) { return s.reattached == 1; }));
  // The killed daemon's rank waited for its next lease. Its call opens no update, since the other
  // rank, which was told of the abort, would not be in it.
  const absl::Status at_killed = calls[1].get();
  INFO(at_killed);
  CHECK(absl::IsAborted(at_killed));
  CHECK_THAT(Message(at_killed), Contains(f.b.socket()));
  for (auto& call : refit(++version)) {
    const absl::Status status = call.get();
    INFO(status);
    REQUIRE(status.ok());
  }
  // Each engine compares its memory with the version.
  REQUIRE(near.Await(committed(version)));
  REQUIRE(far.Await(committed(version)));
  for (const std::string instance : {"near", "far"}) {
    CHECK(f.a.InstanceState("g", instance) == "clean");
  }
}

// ---- trainers that move ----

void RequireRefitted(const std::vector<std::unique_ptr<Shards>>& trainers, int64_t version) {
  std::vector<std::future<absl::Status>> calls;
  for (const auto& trainer : trainers) {
    trainer->Fill(version);
    calls.push_back(std::async(std::launch::async, [&trainer, version] {
      return trainer->trainer().Refit({.version = Version(version)}).status();
    }));
  }
  for (auto& call : calls) {
    const absl::Status status = call.get();
    INFO(status);
    REQUIRE(status.ok());
  }
}

TEST_CASE("a trainer that gives its memory back between versions is read where it comes back") {
  const Model model = MixedModel();
  Daemon daemon;
  std::vector<std::unique_ptr<Shards>> trainers;
  trainers.push_back(std::make_unique<Shards>(ShardsOn(daemon), model, HoldWhole(model)));
  Shards& trainer = *trainers[0];
  REQUIRE(trainer.Register().ok());
  Holder engine(daemon.Connect(), EngineIn("i"), HoldWhole(model));
  RequireRefitted(trainers, 1);
  CHECK(daemon.Resources().regions() == 2);
  SECTION("the registration is taken back first") {
    REQUIRE(trainer.trainer().Register(Layout()).ok());
    trainer.DropAll();
    REQUIRE(Eventually([&] { return daemon.Resources().regions() == 1; }));
    CHECK(daemon.MemfdMappings() == 1);
    CHECK(absl::IsFailedPrecondition(trainer.trainer().Refit({.version = Version(2)}).status()));
    trainer.Place();
  }
  SECTION("the new one takes its place") { trainer.Place(); }
  REQUIRE(trainer.Register().ok());
  trainer.DropOld();
  REQUIRE(Eventually([&] { return daemon.Resources().regions() == 2; }));
  CHECK(daemon.MemfdMappings() == 2);
  for (const int64_t version : {2, 3}) {
    RequireRefitted(trainers, version);
    CHECK(engine.Difference(model, BytesOf(model, version)) == "");
  }
}

// The tensors [first, end) of the model, whole.
Held HoldLayers(const Model& model, size_t first, size_t end) {
  const auto at = [&](size_t i) { return model.begin() + static_cast<ptrdiff_t>(i); };
  return HoldWhole(Model(at(first), at(end)));
}

TEST_CASE("trainers that split the layers anew refit from where the layers are now") {
  const Model model = PlainModel(4, 24, 40);
  Daemon daemon;
  std::vector<std::unique_ptr<Shards>> trainers;
  for (const int rank : {0, 1}) {
    const size_t first = rank == 0 ? 0 : 2;
    trainers.push_back(std::make_unique<Shards>(ShardsOn(daemon, rank, 2), model,
                                                HoldLayers(model, first, first + 2)));
    REQUIRE(trainers.back()->Register().ok());
  }
  Holder engine(daemon.Connect(), EngineIn("i"), HoldWhole(model));
  RequireRefitted(trainers, 1);
  CHECK(engine.Difference(model, BytesOf(model, 1)) == "");

  trainers[0]->Hold(HoldLayers(model, 0, 3));
  REQUIRE(trainers[0]->Register().ok());
  SECTION("both at once") {
    trainers[1]->Hold(HoldLayers(model, 3, 4));
    REQUIRE(trainers[1]->Register().ok());
    RequireRefitted(trainers, 2);
  }
  SECTION("with a version between, where both hold a layer") {
    RequireRefitted(trainers, 2);
    CHECK(engine.Difference(model, BytesOf(model, 2)) == "");
    trainers[1]->Hold(HoldLayers(model, 3, 4));
    REQUIRE(trainers[1]->Register().ok());
    RequireRefitted(trainers, 3);
  }
  for (const auto& trainer : trainers) trainer->DropOld();
  RequireRefitted(trainers, 4);
  CHECK(engine.Difference(model, BytesOf(model, 4)) == "");
}

TEST_CASE("a refit that names a registration of before is refused with both numbers") {
  const Model model = PlainModel(2, 8, 8);
  Daemon daemon;
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g"));
  REQUIRE(trainer.attached().ok());
  Held held = HoldWhole(model);
  SharedMemory memory = trainer.NewMemory(held.region_bytes);
  for (Piece& piece : held.layout.pieces) piece.region = RegionId(memory.region_id);
  for (const uint64_t generation : {5, 7}) {
    held.layout.binding_generation = generation;
    REQUIRE_OK(trainer.Register(held.layout));
  }
  held.layout.binding_generation = 6;
  CHECK_FALSE(trainer.Register(held.layout).ok());
  Holder engine(daemon.Connect(), EngineIn("i"), HoldWhole(model));
  const std::string image =
      ExpectedImage(EmptyImage(held.region_bytes), held.layout, model, BytesOf(model, 1));
  image.copy(memory.data(), image.size());
  for (const uint64_t old : {5, 6}) {
    CheckRefused(trainer.Refit(1, old).status, grpc::StatusCode::FAILED_PRECONDITION,
                 {"binding_generation", std::to_string(old), "7"});
  }
  CHECK(engine.DifferenceFromEmpty() == "");
  REQUIRE_OK(trainer.Refit(1, 7));
  CHECK(engine.Difference(model, BytesOf(model, 1)) == "");
}

TEST_CASE("50 refits with a registration before each leave nothing behind") {
  // gRPC's own threads come and go with load; a leak of one for each version would be 50.
  constexpr int64_t kSpareThreads = 8;
  constexpr int64_t kSpareDescriptors = 4;
  constexpr int64_t kWarm = 6;
  const Model model = MixedModel();
  Daemon daemon;
  std::vector<std::unique_ptr<Shards>> trainers;
  for (const int rank : {0, 1}) {
    trainers.push_back(
        std::make_unique<Shards>(ShardsOn(daemon, rank, 2), model, HoldSlice(model, 1, rank, 2)));
  }
  Holder engine(daemon.Connect(), EngineIn("i"), HoldWhole(model));
  int64_t version = 0;
  const auto refit_until = [&](int64_t last) {
    while (version < last) {
      ++version;
      // The memory is another each time; every third time the cut is another too, and so the
      // program.
      for (const int rank : {0, 1}) {
        Shards& trainer = *trainers[static_cast<size_t>(rank)];
        trainer.Hold(HoldSlice(model, version % 3 == 0 ? 0 : 1, rank, 2));
        REQUIRE(trainer.Register().ok());
        trainer.DropOld();
      }
      RequireRefitted(trainers, version);
    }
    CHECK(engine.Difference(model, BytesOf(model, version)) == "");
    REQUIRE(Eventually([&] { return daemon.Resources().regions() == 3; }));
    return daemon.Resources();
  };
  const v1::ResourceStatus before = refit_until(kWarm);
  CHECK(daemon.MemfdMappings() == 3);
  refit_until(kWarm + 50);
  const bool settled = Eventually([&] {
    const v1::ResourceStatus now = daemon.Resources();
    return now.descriptors() <= before.descriptors() + kSpareDescriptors &&
           now.threads() <= before.threads() + kSpareThreads && daemon.MemfdMappings() == 3;
  });
  const v1::ResourceStatus now = daemon.Resources();
  INFO("descriptors " << before.descriptors() << " -> " << now.descriptors() << ", threads "
                      << before.threads() << " -> " << now.threads() << ", region bytes "
                      << before.region_bytes() << " -> " << now.region_bytes() << ", mappings "
                      << daemon.MemfdMappings());
  CHECK(settled);
  CHECK(now.members() == 3);
  CHECK(daemon.Group("g").updates_committed() == kWarm + 50);
}

}  // namespace
}  // namespace refitd::e2e
