// Compiled refits through the client library and a real daemon, from trainers' shards to engines'
// fused parameters, compared byte for byte with everything around them.
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/e2e/client_members.h"
#include "tests/e2e/require.h"

namespace refitd::e2e {
namespace {

using Catch::Contains;

constexpr int kRanks = 2;

// Projections whose rows engines fuse, matrices that the two sides cut differently, and tensors
// that every rank holds.
Model AttentionModel() {
  return {{"q.weight", DType::kBFloat16, {16, 24}}, {"k.weight", DType::kBFloat16, {8, 24}},
          {"v.weight", DType::kBFloat16, {8, 24}},  {"o.weight", DType::kFloat32, {24, 16}},
          {"norm.weight", DType::kFloat32, {24}},   {"scale", DType::kFloat64, {}}};
}

// An engine rank of kRanks: its rows of q, k and v below one another in one matrix, its columns of
// o, and the other tensors whole.
Held Fused(const Model& model, int rank) {
  Held held;
  held.layout.tensors = model;
  int64_t end = 64;  // other bytes lie before and after the parameters
  for (uint32_t t = 0; t < model.size(); ++t) {
    const Dims& shape = model[t].shape;
    Box box = WholeBox(shape);
    if (t <= 3) {
      const size_t dim = t == 3 ? 1 : 0;
      box.extent[dim] = shape[dim] / kRanks;
      box.offset[dim] = box.extent[dim] * rank;
    }
    const int64_t bytes = TensorBytes({"", model[t].dtype, box.extent});
    held.layout.pieces.push_back({t, box, RegionId(), end, RowMajorStrides(box.extent)});
    end += bytes;
  }
  held.region_bytes = end + 64;
  return held;
}

using Ranks = std::vector<std::unique_ptr<Shards>>;

// The daemon of each rank; the first daemon has the group.
using Daemons = std::vector<const Daemon*>;
std::string CoordinatorOf(const Daemons& daemons, int rank) {
  return daemons[static_cast<size_t>(rank)] == daemons[0] ? "" : daemons[0]->address();
}

// Trainers cut along the last dimension, with padded rows; vectors and scalars are on every rank.
Ranks TensorParallel(const Daemons& daemons, const Model& model) {
  Ranks ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    client::TrainerOptions options = ShardsOn(*daemons[static_cast<size_t>(rank)], rank, kRanks);
    options.connect.coordinator = CoordinatorOf(daemons, rank);
    ranks.push_back(std::make_unique<Shards>(options, model, HoldSlice(model, 1, rank, kRanks)));
    REQUIRE(ranks.back()->Register().ok());
  }
  return ranks;
}

std::vector<absl::StatusOr<client::CommitResult>> RefitAll(const Ranks& ranks, int64_t version) {
  std::vector<std::future<absl::StatusOr<client::CommitResult>>> calls;
  for (const auto& rank : ranks) {
    calls.push_back(std::async(std::launch::async, [&rank, version] {
      return rank->trainer().Refit({.version = Version(version)});
    }));
  }
  std::vector<absl::StatusOr<client::CommitResult>> results;
  for (auto& call : calls) results.push_back(call.get());
  return results;
}

void RequireRefitted(const Ranks& ranks, int64_t version) {
  for (const auto& result : RefitAll(ranks, version)) {
    INFO(result.status());
    REQUIRE(result.ok());
    CHECK(result->version == Version(version));
    REQUIRE(result->instances.size() == 1);
    CHECK(result->instances[0].committed);
  }
}

struct Engines {
  Engines(const Daemons& daemons, const Model& model) {
    for (int rank = 0; rank < kRanks; ++rank) {
      v1::EngineHello hello =
          RawEngine::Hello("g", "i", rank, kRanks, v1::DELIVERY_IN_PLACE, std::nullopt);
      hello.set_coordinator(CoordinatorOf(daemons, rank));
      hello.set_wait_ms(30'000);
      ranks.push_back(std::make_unique<Holder>(daemons[static_cast<size_t>(rank)]->Connect(), hello,
                                               Fused(model, rank)));
    }
  }
  // Empty: the engines hold these tensors, and nothing else was written.
  std::string Difference(const Model& model, const std::vector<std::string>& bytes) {
    std::string all;
    for (const auto& rank : ranks) all += rank->Difference(model, bytes);
    return all;
  }
  std::vector<std::unique_ptr<Holder>> ranks;
};

TEST_CASE("layouts registered once, each version is one call of every rank") {
  const Model model = AttentionModel();
  Daemon daemon;
  const Ranks trainers = TensorParallel({&daemon, &daemon}, model);
  Engines engines({&daemon, &daemon}, model);
  for (const int64_t version : {1, 2, 5}) {
    for (const auto& rank : trainers) rank->Fill(version);
    RequireRefitted(trainers, version);
    CHECK(engines.Difference(model, BytesOf(model, version)) == "");
  }
}

// The engines stay attached, with their memory, while the trainers' world changes.
TEST_CASE("trainers that ended come back as another number of ranks, and engines stay") {
  const Model model = AttentionModel();
  Daemon daemon;
  std::optional<Engines> engines;
  int64_t version = 0;
  for (const int world_size : {2, 3, 1}) {
    Ranks trainers;
    for (int rank = 0; rank < world_size; ++rank) {
      trainers.push_back(std::make_unique<Shards>(ShardsOn(daemon, rank, world_size), model,
                                                  HoldSlice(model, 0, rank, world_size)));
      REQUIRE(trainers.back()->Register().ok());
    }
    if (!engines.has_value()) engines.emplace(Daemons{&daemon, &daemon}, model);
    for (int i = 0; i < 2; ++i) {
      ++version;
      for (const auto& rank : trainers) rank->Fill(version);
      RequireRefitted(trainers, version);
      CHECK(engines->Difference(model, BytesOf(model, version)) == "");
    }
  }
}

// The engine's "head" is the memory of its "embed"; the trainer also has an optimizer's tensors.
TEST_CASE("tied weights are written once, and tensors that no engine wants are left out") {
  const Model model = {{"embed", DType::kBFloat16, {16, 8}},
                       {"head", DType::kBFloat16, {16, 8}},
                       {"opt.m", DType::kFloat32, {16}},
                       {"opt.v", DType::kFloat32, {24}}};
  Daemon daemon;
  client::TrainerOptions options = ShardsOn(daemon);
  options.connect.spec->unwanted_tensors = {"opt.*"};
  Ranks trainers;
  trainers.push_back(std::make_unique<Shards>(options, model, HoldWhole(model)));
  REQUIRE(trainers[0]->Register().ok());
  Held held = HoldWhole(model);
  held.layout.tensors.Edit().resize(2);
  held.layout.pieces.resize(1);
  v1::EngineHello hello = RawEngine::Hello("g", "i", 0, 1, v1::DELIVERY_IN_PLACE, std::nullopt);
  hello.set_wait_ms(30'000);
  Holder engine(daemon.Connect(), hello, held);
  for (const int64_t version : {1, 2}) {
    trainers[0]->Fill(version);
    const auto result = RefitAll(trainers, version)[0];
    INFO(result.status());
    REQUIRE(result.ok());
    CHECK(result->left_out_tensors == 3);
    CHECK(result->left_out_bytes == 16 * 8 * 2 + 16 * 4 + 24 * 4);
    CHECK(result->bytes == 16 * 8 * 2);
    CHECK(engine.Difference(model, BytesOf(model, version)) == "");
  }
}

TEST_CASE("trainers and engines on two daemons are refitted as on one") {
  const Model model = AttentionModel();
  Daemon a({"--listen-tcp=127.0.0.1:0", "--daemon-id=a"});
  Daemon b({"--listen-tcp=127.0.0.1:0", "--daemon-id=b"});
  const Ranks trainers = TensorParallel({&a, &b}, model);
  Engines engines({&a, &b}, model);
  for (const int64_t version : {1, 2}) {
    for (const auto& rank : trainers) rank->Fill(version);
    RequireRefitted(trainers, version);
    CHECK(engines.Difference(model, BytesOf(model, version)) == "");
  }
}

TEST_CASE(
    "daemons whose engines want the same forward it, and the trainers' daemon sends it once") {
  Model model;
  for (int t = 0; t < 4; ++t) {
    model.push_back({fmt::format("w{}", t), DType::kBFloat16, {1024, 512}});
  }
  model.push_back({"norm", DType::kFloat32, {1024}});
  int64_t bytes = 0;
  for (const TensorSpec& tensor : model) bytes += TensorBytes(tensor);
  constexpr int kInstances = 3;
  std::vector<std::unique_ptr<Daemon>> daemons;
  for (int d = 0; d <= kInstances; ++d) {
    daemons.push_back(std::make_unique<Daemon>(
        std::vector<std::string>{"--listen-tcp=127.0.0.1:0", fmt::format("--daemon-id=d{}", d)}));
  }
  const Ranks trainers = TensorParallel({daemons[0].get(), daemons[0].get()}, model);
  std::vector<std::unique_ptr<Holder>> engines;
  for (int i = 0; i < kInstances; ++i) {
    const Daemon& daemon = *daemons[static_cast<size_t>(i + 1)];
    v1::EngineHello hello =
        RawEngine::Hello("g", fmt::format("i{}", i), 0, 1, v1::DELIVERY_IN_PLACE, std::nullopt);
    hello.set_coordinator(daemons[0]->address());
    hello.set_wait_ms(30'000);
    engines.push_back(std::make_unique<Holder>(daemon.Connect(), hello, HoldSlice(model, 0, 0, 1)));
  }
  for (const int64_t version : {1, 2, 3}) {
    for (const auto& rank : trainers) rank->Fill(version);
    for (const auto& result : RefitAll(trainers, version)) {
      INFO(result.status());
      REQUIRE(result.ok());
      CHECK(result->instances.size() == kInstances);
      for (const auto& instance : result->instances) CHECK(instance.committed);
    }
    for (const auto& engine : engines) {
      CHECK(engine->Difference(model, BytesOf(model, version)) == "");
    }
    int64_t sent = 0;
    for (int d = 0; d <= kInstances; ++d) {
      const int64_t own = daemons[static_cast<size_t>(d)]->Resources().wire_bytes_sent();
      CHECK(own <= version * bytes * 105 / 100);
      sent += own;
    }
    CHECK(sent >= kInstances * version * bytes);
  }
}

TEST_CASE("a trainer that registers elsewhere is read there from then on") {
  const Model model = AttentionModel();
  Daemon daemon;
  const Ranks trainers = TensorParallel({&daemon, &daemon}, model);
  Engines engines({&daemon, &daemon}, model);
  for (const auto& rank : trainers) rank->Fill(1);
  RequireRefitted(trainers, 1);
  SECTION("the same structure in other memory") {
    trainers[0]->Place();
    REQUIRE(trainers[0]->Register().ok());
  }
  SECTION("another structure: the tensors whole") {
    trainers[0]->Hold(HoldWhole(model));
    REQUIRE(trainers[0]->Register().ok());
  }
  for (const auto& rank : trainers) rank->Fill(2);
  RequireRefitted(trainers, 2);
  CHECK(engines.Difference(model, BytesOf(model, 2)) == "");
}

TEST_CASE("replicas that differ are named with tensor and ranks, and nothing is committed") {
  const Model model = AttentionModel();
  Daemon daemon;
  const Ranks trainers = TensorParallel({&daemon, &daemon}, model);
  Engines engines({&daemon, &daemon}, model);
  for (const auto& rank : trainers) rank->Fill(1);
  *trainers[1]->Tensor(4) ^= 1;
  for (const auto& result : RefitAll(trainers, 1)) {
    INFO(result.status());
    CHECK(absl::IsAborted(result.status()));
    const std::string message(result.status().message());
    CHECK_THAT(message, Contains("replicas differ"));
    CHECK_THAT(message, Contains("norm.weight"));
    CHECK_THAT(message, Contains("rank 0"));
    CHECK_THAT(message, Contains("rank 1"));
  }
  for (const auto& rank : trainers) rank->Fill(2);
  RequireRefitted(trainers, 2);
  CHECK(engines.Difference(model, BytesOf(model, 2)) == "");
}

TEST_CASE("a tensor that the trainers lack is named, and the next registration works") {
  const Model model = AttentionModel();
  Daemon daemon;
  const Ranks trainers = TensorParallel({&daemon, &daemon}, model);
  Engines engines({&daemon, &daemon}, model);
  for (const auto& rank : trainers) {
    Layout& layout = rank->layout();
    std::erase_if(layout.pieces, [](const Piece& piece) { return piece.tensor == 3; });
    REQUIRE(rank->Register().ok());
    rank->Fill(1);
  }
  bool named = false;
  for (const auto& result : RefitAll(trainers, 1)) {
    INFO(result.status());
    CHECK_FALSE(result.ok());
    named = named || Contains("o.weight").match(std::string(result.status().message()));
  }
  CHECK(named);
  for (int rank = 0; rank < kRanks; ++rank) {
    trainers[static_cast<size_t>(rank)]->Hold(HoldSlice(model, 1, rank, kRanks));
    REQUIRE(trainers[static_cast<size_t>(rank)]->Register().ok());
    trainers[static_cast<size_t>(rank)]->Fill(2);
  }
  RequireRefitted(trainers, 2);
  CHECK(engines.Difference(model, BytesOf(model, 2)) == "");
}

TEST_CASE("tensors that are pushed and tensors that are refitted make one version") {
  const Model model = AttentionModel();
  Daemon daemon;
  const Ranks trainers = TensorParallel({&daemon, &daemon}, model);
  Engines engines({&daemon, &daemon}, model);
  constexpr uint32_t kPushed = 4;
  for (const auto& rank : trainers) {
    Layout& layout = rank->layout();
    std::erase_if(layout.pieces, [](const Piece& piece) { return piece.tensor == kPushed; });
    layout.pushed_tensors = {kPushed};
    REQUIRE(rank->Register().ok());
  }
  for (const int64_t version : {1, 2}) {
    const std::vector<std::string> bytes = BytesOf(model, version);
    for (const auto& rank : trainers) rank->Fill(version);
    std::vector<std::future<absl::Status>> calls;
    for (size_t rank = 0; rank < trainers.size(); ++rank) {
      calls.push_back(std::async(std::launch::async, [&, rank]() -> absl::Status {
        auto update = trainers[rank]->trainer().Begin({.version = Version(version)});
        if (!update.ok()) return update.status();
        if (rank == 0) {
          (*update)->PushAsync(client::Bucket::Inline({model[kPushed]}, {bytes[kPushed]}), nullptr);
        }
        return (*update)->Refit().status();
      }));
    }
    for (auto& call : calls) {
      const absl::Status status = call.get();
      INFO(status);
      CHECK(status.ok());
    }
    CHECK(engines.Difference(model, bytes) == "");
  }
}

TEST_CASE("a rank with a layout ends no update by Commit; one that took it back does") {
  const Model model = AttentionModel();
  Daemon daemon;
  Shards trainer(ShardsOn(daemon), model, HoldWhole(model));
  REQUIRE(trainer.Register().ok());
  Engines engines({&daemon, &daemon}, model);
  trainer.Fill(1);
  const auto push = [&](int64_t version) -> absl::Status {
    auto update = trainer.trainer().Begin({.version = Version(version)});
    if (!update.ok()) return update.status();
    const std::vector<std::string> bytes = BytesOf(model, version);
    const absl::Status pushed =
        (*update)->Push(client::Bucket::Inline(model, {bytes.begin(), bytes.end()}));
    if (!pushed.ok()) return pushed;
    return (*update)->Commit().status();
  };
  CHECK(absl::IsFailedPrecondition(push(1)));
  REQUIRE(trainer.trainer().Register(Layout()).ok());
  const absl::Status pushed = push(2);
  INFO(pushed);
  REQUIRE(pushed.ok());
  CHECK(engines.Difference(model, BytesOf(model, 2)) == "");
  CHECK(absl::IsFailedPrecondition(trainer.trainer().Refit({.version = Version(3)}).status()));
}

}  // namespace
}  // namespace refitd::e2e
