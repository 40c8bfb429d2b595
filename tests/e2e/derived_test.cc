// Derived tensors end to end: trainers hold bfloat16 and float32, engines serve quantised and cast
// weights, which refits and pushes compute on the way. Engines' memory is compared, byte for byte,
// with what the whole tensors give (transport/derive has the tests of that arithmetic).
#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <future>
#include <memory>
#include <optional>
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

v1::EngineHello InPlace(const std::string& instance, int rank = 0, int ranks = 1) {
  v1::EngineHello hello =
      RawEngine::Hello("g", instance, rank, ranks, v1::DELIVERY_IN_PLACE, std::nullopt);
  hello.set_wait_ms(30'000);
  return hello;
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
      v1::EngineHello hello = InPlace("i", rank, kRanks);
      hello.set_coordinator(coordinator(daemons[static_cast<size_t>(rank)]));
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
    v1::EngineHello hello = InPlace(daemon == &b ? "b" : "c");
    hello.set_coordinator(a.address());
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
TEST_CASE("what is derived from a tensor that is pushed has the pushed values") {
  Daemon daemon;
  const DerivedModel model;
  Shards trainer(ShardsOn(daemon), model.trained, HoldWhole(model.trained));
  trainer.layout().pushed_tensors = {0};
  REQUIRE(trainer.Register().ok());
  Holder engine(daemon.Connect(), InPlace("i"), HoldWhole(model.served));
  std::vector<std::string> weights = model.Trained(1);
  trainer.Fill(weights);
  weights[0] = model.Trained(2)[0];
  auto update = trainer.trainer().Begin({.version = Version(1)});
  INFO(update.status());
  REQUIRE(update.ok());
  (*update)->PushAsync(client::Bucket::Inline({model.trained[0]}, {weights[0]}), nullptr);
  const absl::Status status = (*update)->Refit().status();
  INFO(status);
  CHECK(status.ok());
  CHECK(engine.Difference(model.served, model.Served(weights)) == "");
}

// A trainer rank that pushes tensors of the model from one region.
struct Pushing {
  explicit Pushing(const Daemon& daemon, int64_t slot_bytes = kSlotBytes) {
    client::TrainerOptions options = ShardsOn(daemon);
    options.connect.spec->slot_bytes = slot_bytes;
    options.connect.spec->unwanted_tensors = {"odd"};
    auto attached = client::Trainer::Attach(options);
    INFO(attached.status());
    REQUIRE(attached.ok());
    trainer = *std::move(attached);
    region = *trainer->NewRegion(int64_t{1} << 20);
  }

  void Begin(int64_t version, Verification verification = Verification::kReadback) {
    auto begun = trainer->Begin({.version = Version(version), .verification = verification});
    INFO(begun.status());
    REQUIRE(begun.ok());
    update = *std::move(begun);
  }
  // Pushes the elements of `range`, or all of them.
  absl::Status Push(const TensorSpec& tensor, const std::string& bytes,
                    std::optional<TensorRange> range = std::nullopt) {
    bytes.copy(region->data(), bytes.size());
    client::Bucket bucket = client::Bucket::Unpacked({tensor}, region, {0});
    if (range.has_value()) bucket.ranges = {*range};
    return update->Push(std::move(bucket));
  }
  // Pushes rows of a matrix from a leased slot.
  absl::Status PushSlots(const TensorSpec& tensor, const std::string& bytes, int64_t rows) {
    const int64_t row = tensor.shape.size() < 2 ? tensor.shape[0] : tensor.shape[1];
    const int64_t elements = ElementCount(tensor.shape).value();
    const int64_t element_bytes = ElementBytes(tensor.dtype);
    for (int64_t start = 0; start < elements; start += rows * row) {
      const int64_t count = std::min(rows * row, elements - start);
      REFITD_ASSIGN_OR_RETURN(auto slot, update->LeaseSlot());
      bytes.copy(slot->data() + 512, static_cast<size_t>(count * element_bytes),
                 static_cast<size_t>(start * element_bytes));
      client::Bucket bucket = client::Bucket::InSlot({tensor}, std::move(slot), {512});
      bucket.ranges = {{0, start, count}};
      REFITD_RETURN_IF_ERROR(update->Push(std::move(bucket)));
    }
    return absl::OkStatus();
  }

  // Holds 128 rows of "w", and a bit more.
  static constexpr int64_t kSlotBytes = 102'400;
  std::unique_ptr<client::Trainer> trainer;
  std::shared_ptr<client::Region> region;
  std::unique_ptr<client::Update> update;
};

TEST_CASE("what engines derive is computed of tensors that are pushed, on each engine's node") {
  Daemon a({"--listen-tcp=127.0.0.1:0", "--daemon-id=a"});
  Daemon b({"--listen-tcp=127.0.0.1:0", "--daemon-id=b"});
  const bool two_nodes = GENERATE(false, true);
  const int dimension = GENERATE(0, 1);
  const int way = GENERATE(0, 1, 2);  // from a region, with the message, from slots
  const DerivedModel model;
  Pushing trainer(a);
  std::vector<std::unique_ptr<Holder>> engines;
  for (int rank = 0; rank < kRanks; ++rank) {
    const Daemon& daemon = two_nodes && rank == 1 ? b : a;
    v1::EngineHello hello = InPlace("i", rank, kRanks);
    if (&daemon == &b) hello.set_coordinator(a.address());
    engines.push_back(std::make_unique<Holder>(daemon.Connect(), hello,
                                               HoldSlice(model.served, dimension, rank, kRanks)));
  }
  int64_t version = 0;
  for (const Verification verification :
       {Verification::kReadback, Verification::kTransfer, Verification::kOff}) {
    const std::vector<std::string> weights = model.Trained(++version);
    trainer.Begin(version, verification);
    for (size_t t = 0; t < weights.size(); ++t) {
      const TensorSpec& tensor = model.trained[t];
      absl::Status pushed;
      if (way == 0) pushed = trainer.Push(tensor, weights[t]);
      if (way == 1) pushed = trainer.update->Push(client::Bucket::Inline({tensor}, {weights[t]}));
      if (way == 2) pushed = trainer.PushSlots(tensor, weights[t], 128);
      INFO(pushed);
      REQUIRE(pushed.ok());
    }
    const auto result = trainer.update->Commit();
    INFO(result.status());
    REQUIRE(result.ok());
    for (const auto& engine : engines) {
      CHECK(engine->Difference(model.served, model.Served(weights)) == "");
    }
  }
}

void CheckRefused(const absl::Status& status, const std::string& what) {
  INFO(status);
  CHECK(absl::IsFailedPrecondition(status));
  CHECK_THAT(std::string(status.message()), Contains(what));
}

TEST_CASE("pushes of what can't be derived from are refused by name, and nothing is written") {
  Daemon daemon;
  const DerivedModel model;
  Pushing trainer(daemon);
  Holder engine(daemon.Connect(), InPlace("i"), HoldWhole(model.served));
  const std::vector<std::string> weights = model.Trained(1);
  const TensorSpec& w = model.trained[0];
  trainer.Begin(1);
  SECTION("elements that cut a block") {
    const int64_t start = GENERATE(0, 128 * 384);
    const int64_t count = GENERATE(384, 127 * 384, 128 * 384 - 1, 129 * 384);
    CheckRefused(trainer.Push(w, weights[0], TensorRange{0, start, count}),
                 "'w.q' is computed of whole blocks of [128, 128]");
  }
  SECTION("another dtype") {
    TensorSpec other = w;
    other.dtype = DType::kFloat16;
    CheckRefused(
        trainer.Push(other, weights[0]),
        "tensor 'w': the bucket has float16 [512, 384], but 'w.q' is derived from bfloat16");
  }
  SECTION("an unaligned place") {
    CheckRefused(trainer.update->Push(
                     client::Bucket::Packed({{"odd", DType::kUint8, {1}}, w}, trainer.region, 0)),
                 "tensor 'w' lies unaligned in its bucket, and 'w.q' is computed of it");
  }
  trainer.update->Abort("it was refused").IgnoreError();
  CHECK(engine.DifferenceFromEmpty() == "");
}

TEST_CASE("slots between nodes that hold no whole block of what is derived are refused by name") {
  Daemon a({"--listen-tcp=127.0.0.1:0", "--daemon-id=a"});
  Daemon b({"--listen-tcp=127.0.0.1:0", "--daemon-id=b"});
  const DerivedModel model;
  Pushing trainer(a, 65'536);
  v1::EngineHello hello = InPlace("i");
  hello.set_coordinator(a.address());
  Holder engine(b.Connect(), hello, HoldWhole(model.served));
  trainer.Begin(1);
  const absl::Status status = trainer.Push(model.trained[0], model.Trained(1)[0]);
  INFO(status);
  CHECK(absl::IsFailedPrecondition(status));
  CHECK_THAT(std::string(status.message()),
             Contains("tensor 'w'") && Contains("push whole blocks"));
  trainer.update->Abort("it was refused").IgnoreError();
  CHECK(engine.DifferenceFromEmpty() == "");
}

TEST_CASE("a tensor comes by itself or is derived, not both, and not neither") {
  Daemon daemon;
  const DerivedModel model;
  Pushing trainer(daemon);
  Holder engine(daemon.Connect(), InPlace("i"), HoldWhole(model.served));
  const std::vector<std::string> weights = model.Trained(1);
  const std::vector<std::string> served = model.Served(weights);
  trainer.Begin(1);
  const std::string both = "tensor 'w.q' is derived from 'w', and both are pushed";
  if (GENERATE(true, false)) {
    REQUIRE(trainer.Push(model.trained[0], weights[0]).ok());
    CheckRefused(trainer.Push(model.served[0], served[0]), both);
  } else {
    REQUIRE(trainer.Push(model.served[0], served[0]).ok());
    CheckRefused(trainer.Push(model.trained[0], weights[0]), both);
    REQUIRE(trainer.Push(model.served[1], served[1]).ok());
  }
  REQUIRE(trainer.Push(model.trained[2], weights[2]).ok());
  REQUIRE(trainer.Push(model.trained[3], weights[3]).ok());
  CheckRefused(trainer.update->Commit().status(),
               "tensor 'rows.q' of instance i was never pushed, nor 'rows', of which it is made");
  REQUIRE(trainer.Push(model.trained[1], weights[1]).ok());
  const auto result = trainer.update->Commit();
  INFO(result.status());
  CHECK(result.ok());
  CHECK(engine.Difference(model.served, served) == "");
}

TEST_CASE("a trainer may hold a derived tensor computed") {
  Daemon daemon;
  const DerivedModel model;
  Shards trainer(ShardsOn(daemon), model.served, HoldWhole(model.served));
  REQUIRE(trainer.Register().ok());
  Holder engine(daemon.Connect(), InPlace("i"), HoldWhole(model.served));
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
  client::TrainerOptions options = ShardsOn(daemon);
  Shards trainer(options, model.trained, HoldWhole(model.trained));
  CHECK_THROWS_WITH(Holder(daemon.Connect(), InPlace("i"), HoldWhole(served)),
                    Contains("tensor w.q: the layout has the values of fp8_block") &&
                        Contains("but not the scales"));
}

}  // namespace
}  // namespace refitd::e2e
