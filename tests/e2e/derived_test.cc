// Derived tensors end to end: trainers hold bfloat16 and float32, engines serve quantised and cast
// weights, which refits compute on the way. Engines' memory is compared, byte for byte, with what
// the whole tensors give (transport/derive has the tests of that arithmetic).
#include <catch2/catch.hpp>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/e2e/client_members.h"
#include "tests/e2e/derived_model.h"
#include "tests/e2e/require.h"

namespace refitd::e2e {
namespace {

using Catch::Contains;

constexpr int kRanks = 2;

// Each value names the slices that trainers hold.
enum class Cut {
  kRows,     // halves, of whole blocks
  kColumns,  // halves, which cut blocks
  kBoth,     // a rank has half of the rows of half of the columns
  kTwice,    // four ranks: two have the left half of all columns, two the right half
};

// Removes all columns but half of them from what is held.
Held HalveColumns(Held held, int half) {
  for (Piece& piece : held.layout.pieces) {
    if (piece.box.extent.size() < 2) continue;
    const int64_t columns = piece.box.extent[1] / 2;
    piece.box.offset[1] += half * columns;
    piece.box.extent[1] = columns;
    piece.byte_offset +=
        half * columns * piece.strides[1] * ElementBytes(held.layout.tensors[piece.tensor].dtype);
  }
  return held;
}

Held HoldCut(const Model& model, Cut cut, int rank) {
  switch (cut) {
    case Cut::kRows:
      return HoldSlice(model, 0, rank, 2);
    case Cut::kColumns:
      return HoldSlice(model, 1, rank, 2);
    case Cut::kBoth:
      return HalveColumns(HoldSlice(model, 0, rank / 2, 2), rank % 2);
    default:
      return HoldSlice(model, 1, rank % 2, 2);
  }
}

struct World {
  // Trainers are shared out evenly over the daemons of the engines, which hold slices along
  // `dimension`.
  World(const std::vector<const Daemon*>& daemons, int dimension, Cut cut = Cut::kRows) {
    const auto coordinator = [&daemons](const Daemon* daemon) {
      return daemon == daemons[0] ? "" : daemons[0]->address();
    };
    const int ranks = cut == Cut::kBoth || cut == Cut::kTwice ? 4 : 2;
    for (int rank = 0; rank < ranks; ++rank) {
      const Daemon* const daemon = daemons[static_cast<size_t>(rank * kRanks / ranks)];
      client::TrainerOptions options = ShardsOn(*daemon, rank, ranks);
      options.connect.coordinator = coordinator(daemon);
      trainers.push_back(
          std::make_unique<Shards>(options, model.trained, HoldCut(model.trained, cut, rank)));
      REQUIRE(trainers.back()->Register().ok());
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      v1::EngineHello hello =
          RawEngine::Hello("g", "i", rank, kRanks, v1::DELIVERY_IN_PLACE, std::nullopt);
      hello.set_coordinator(coordinator(daemons[static_cast<size_t>(rank)]));
      hello.set_wait_ms(30'000);
      engines.push_back(std::make_unique<Holder>(daemons[static_cast<size_t>(rank)]->Connect(),
                                                 hello,
                                                 HoldSlice(model.served, dimension, rank, kRanks)));
    }
  }

  std::vector<absl::Status> Refit(int64_t version, const std::vector<std::string>& weights,
                                  Verification verification = Verification::kReadback) {
    std::vector<std::future<absl::Status>> calls;
    for (const auto& rank : trainers) {
      rank->Fill(weights);
      calls.push_back(std::async(std::launch::async, [&rank, version, verification] {
        return rank->trainer()
            .Refit({.version = Version(version), .verification = verification})
            .status();
      }));
    }
    std::vector<absl::Status> results;
    for (auto& call : calls) results.push_back(call.get());
    return results;
  }

  // Empty: every engine holds these weights, and nothing else was written.
  std::string Difference(const std::vector<std::string>& weights) const {
    std::string all;
    for (const auto& engine : engines) {
      all += engine->Difference(model.served, model.Served(weights));
    }
    return all;
  }

  const DerivedModel model;
  std::vector<std::unique_ptr<Shards>> trainers;
  std::vector<std::unique_ptr<Holder>> engines;
};

void CheckVersions(World* world) {
  int64_t version = 0;
  for (const Verification verification : {Verification::kReadback, Verification::kTransfer,
                                          Verification::kOff, Verification::kReadback}) {
    const std::vector<std::string> weights = world->model.Trained(++version);
    for (const absl::Status& status : world->Refit(version, weights, verification)) {
      INFO(status);
      REQUIRE(status.ok());
    }
    CHECK(world->Difference(weights) == "");
  }
}

TEST_CASE("engines' quantised weights are computed on the way, also where shards cut blocks") {
  Daemon daemon;
  const int dimension = GENERATE(0, 1);
  const Cut cut = GENERATE(Cut::kRows, Cut::kColumns, Cut::kBoth, Cut::kTwice);
  World world({&daemon, &daemon}, dimension, cut);
  CheckVersions(&world);
}

TEST_CASE("what crosses to another daemon is computed before it crosses") {
  Daemon a({"--listen-tcp=127.0.0.1:0", "--daemon-id=a"});
  Daemon b({"--listen-tcp=127.0.0.1:0", "--daemon-id=b"});
  // The ranks of a daemon hold whole blocks together.
  World world({&a, &b}, /*dimension=*/1, GENERATE(Cut::kRows, Cut::kBoth));
  CheckVersions(&world);
  // Each daemon sends half of what the other's engine holds, in the engines' dtypes.
  int64_t bytes = 0;
  for (const TensorSpec& tensor : world.model.served) bytes += TensorBytes(tensor);
  CHECK(a.Resources().wire_bytes_sent() < 4 * bytes / 3);
}

TEST_CASE("a chain hands on what was computed of blocks that shards cut") {
  Daemon a({"--listen-tcp=127.0.0.1:0", "--daemon-id=a"});
  Daemon b({"--listen-tcp=127.0.0.1:0", "--daemon-id=b"});
  Daemon c({"--listen-tcp=127.0.0.1:0", "--daemon-id=c"});
  World world({&a, &a}, /*dimension=*/0, Cut::kColumns);
  for (Daemon* const daemon : {&b, &c}) {
    v1::EngineHello hello =
        RawEngine::Hello("g", daemon == &b ? "b" : "c", 0, 1, v1::DELIVERY_IN_PLACE, std::nullopt);
    hello.set_coordinator(a.address());
    hello.set_wait_ms(30'000);
    world.engines.push_back(
        std::make_unique<Holder>(daemon->Connect(), hello, HoldWhole(world.model.served)));
  }
  CheckVersions(&world);
  // It sends each byte once.
  int64_t bytes = 0;
  for (const TensorSpec& tensor : world.model.served) bytes += TensorBytes(tensor);
  CHECK(a.Resources().wire_bytes_sent() < 4 * bytes * 4 / 3);
}

TEST_CASE("a number that can't be quantised fails the update and is named") {
  Daemon daemon;
  World world({&daemon, &daemon}, 0, GENERATE(Cut::kRows, Cut::kColumns, Cut::kBoth));
  std::vector<std::string> weights = world.model.Trained(1);
  const uint16_t infinity = 0x7f80;
  std::memcpy(&weights[0][2 * (300 * 384 + 129)], &infinity, sizeof(infinity));
  for (const absl::Status& status : world.Refit(1, weights)) {
    INFO(status);
    CHECK(absl::IsAborted(status));
    CHECK_THAT(std::string(status.message()), Contains("tensor w, element [300, 129]: NaN"));
  }
  const std::vector<std::string> good = world.model.Trained(2);
  for (const absl::Status& status : world.Refit(2, good)) {
    INFO(status);
    CHECK(status.ok());
  }
  CHECK(world.Difference(good) == "");
}

TEST_CASE("blocks that no daemon's trainers hold are refused by name, and nothing is written") {
  Daemon a({"--listen-tcp=127.0.0.1:0", "--daemon-id=a"});
  Daemon b({"--listen-tcp=127.0.0.1:0", "--daemon-id=b"});
  World world({&a, &b}, 0, Cut::kColumns);
  const std::vector<std::string> weights = world.model.Trained(1);
  for (const absl::Status& status : world.Refit(1, weights)) {
    INFO(status);
    CHECK_FALSE(status.ok());
    CHECK_THAT(std::string(status.message()),
               Contains("needs a whole block of [1, 40] elements of rows, which the trainers of "
                        "one node must hold"));
  }
  for (const auto& engine : world.engines) CHECK(engine->DifferenceFromEmpty() == "");
}

// P11: the pushed bytes are not those that the registered memory has.
TEST_CASE("nothing is derived from the registered memory of a tensor that is pushed") {
  Daemon daemon;
  const DerivedModel model;
  Shards trainer(ShardsOn(daemon), model.trained, HoldWhole(model.trained));
  trainer.layout().pushed_tensors = {0};
  REQUIRE(trainer.Register().ok());
  v1::EngineHello hello = RawEngine::Hello("g", "i", 0, 1, v1::DELIVERY_IN_PLACE, std::nullopt);
  hello.set_wait_ms(30'000);
  // The engine takes "w" as well, so that it can be pushed.
  Model served = model.served;
  served.push_back(model.trained[0]);
  Holder engine(daemon.Connect(), hello, HoldWhole(served));
  const std::vector<std::string> weights = model.Trained(1);
  trainer.Fill(weights);
  auto update = trainer.trainer().Begin({.version = Version(1)});
  INFO(update.status());
  REQUIRE(update.ok());
  (*update)->PushAsync(client::Bucket::Inline({model.trained[0]}, {model.Trained(2)[0]}), nullptr);
  const absl::Status status = (*update)->Refit().status();
  INFO(status);
  CHECK(absl::IsFailedPrecondition(status));
  CHECK_THAT(std::string(status.message()), Contains("tensor 'w.") && Contains("never pushed"));
}

TEST_CASE("a trainer may hold a derived tensor computed") {
  Daemon daemon;
  const DerivedModel model;
  Shards trainer(ShardsOn(daemon), model.served, HoldWhole(model.served));
  REQUIRE(trainer.Register().ok());
  v1::EngineHello hello = RawEngine::Hello("g", "i", 0, 1, v1::DELIVERY_IN_PLACE, std::nullopt);
  hello.set_wait_ms(30'000);
  Holder engine(daemon.Connect(), hello, HoldWhole(model.served));
  const std::vector<std::string> bytes = model.Served(model.Trained(1));
  trainer.Fill(bytes);
  const auto result = trainer.trainer().Refit({.version = Version(1)});
  INFO(result.status());
  REQUIRE(result.ok());
  CHECK(engine.Difference(model.served, bytes) == "");
}

TEST_CASE("a layout without scales is refused by name") {
  Daemon daemon;
  const DerivedModel model;
  Model served = model.served;
  served.erase(served.begin() + 1);
  v1::EngineHello hello = RawEngine::Hello("g", "i", 0, 1, v1::DELIVERY_IN_PLACE, std::nullopt);
  client::TrainerOptions options = ShardsOn(daemon);
  Shards trainer(options, model.trained, HoldWhole(model.trained));
  CHECK_THROWS_WITH(Holder(daemon.Connect(), hello, HoldWhole(served)),
                    Contains("tensor w.q: the layout has the values of fp8_block") &&
                        Contains("but not the scales"));
}

}  // namespace
}  // namespace refitd::e2e
