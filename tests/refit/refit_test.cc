// The life of a compiled refit on whole daemons: replay, memory that moved, other layouts, mixing
// with push, replicas that differ, damaged bytes.
#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <set>
#include <string>
#include <vector>

#include "tests/refit/cluster.h"

namespace refitd::refit {
namespace {

using Catch::Matchers::Contains;

constexpr int64_t kRows = 64;
constexpr int64_t kColumns = 48;

TensorSpec Matrix(const std::string& name) { return {name, DType::kUint8, {kRows, kColumns}}; }
TensorSpec Vector(const std::string& name) { return {name, DType::kUint8, {kColumns}}; }

// The byte of an element in a version.
char Value(const std::string& tensor, int64_t index, int64_t version) {
  HashChain chain(static_cast<uint64_t>(version));
  for (const char c : tensor) chain.Add(static_cast<uint64_t>(c));
  chain.Add(static_cast<uint64_t>(index));
  return static_cast<char>(chain.hash() >> 56);
}

// Places boxes one after the other, dense, from byte `gap` on.
class Builder {
 public:
  explicit Builder(int64_t gap = 0) : end_(gap) {}
  Builder& Add(const TensorSpec& tensor, Box box) {
    const auto index = static_cast<uint32_t>(layout_.tensors.size());
    layout_.tensors.push_back(tensor);
    const int64_t elements = ElementCount(box);
    Dims strides = RowMajorStrides(box.extent);
    layout_.pieces.push_back({index, std::move(box), RegionId(1), end_, std::move(strides)});
    end_ += elements + 3;
    return *this;
  }
  Builder& Rows(const std::string& name, int64_t begin, int64_t count) {
    return Add(Matrix(name), {{begin, 0}, {count, kColumns}});
  }
  Builder& Whole(const std::string& name) { return Add(Vector(name), {{0}, {kColumns}}); }
  Builder& Pushed() {
    layout_.pushed_tensors.push_back(static_cast<uint32_t>(layout_.tensors.size()) - 1);
    return *this;
  }
  Layout Done() { return layout_; }

 private:
  Layout layout_;
  int64_t end_;
};

// Places columns of both matrices side by side in one buffer, then the vectors.
Layout EngineLayout(int rank, int of, const std::vector<std::string>& matrices,
                    const std::vector<std::string>& vectors) {
  Layout layout;
  const int64_t mine = kColumns / of;
  const auto row = static_cast<int64_t>(matrices.size()) * mine;
  for (size_t m = 0; m < matrices.size(); ++m) {
    const auto index = static_cast<uint32_t>(layout.tensors.size());
    layout.tensors.push_back(Matrix(matrices[m]));
    layout.pieces.push_back({index,
                             Box{{0, rank * mine}, {kRows, mine}},
                             RegionId(1),
                             static_cast<int64_t>(m) * mine,
                             {row, 1}});
  }
  int64_t end = row * kRows;
  for (const std::string& name : vectors) {
    const auto index = static_cast<uint32_t>(layout.tensors.size());
    layout.tensors.push_back(Vector(name));
    layout.pieces.push_back({index, Box{{0}, {kColumns}}, RegionId(1), end, {1}});
    end += kColumns;
  }
  return layout;
}

template <typename Visit>
void ForEachElement(const Layout& layout, const Visit& visit) {
  for (const Piece& piece : layout.pieces) {
    const TensorSpec& tensor = layout.tensors[piece.tensor];
    const bool matrix = tensor.shape.size() == 2;
    const int64_t columns = matrix ? piece.box.extent[1] : 1;
    for (int64_t i = 0; i < piece.box.extent[0]; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        const int64_t at =
            piece.byte_offset + i * piece.strides[0] + (matrix ? j * piece.strides[1] : 0);
        const int64_t index = matrix
                                  ? (piece.box.offset[0] + i) * kColumns + piece.box.offset[1] + j
                                  : piece.box.offset[0] + i;
        visit(tensor.name, index, at);
      }
    }
  }
}

void Fill(Rank* rank, int64_t version) {
  ForEachElement(*rank->layout, [&](const std::string& name, int64_t index, int64_t at) {
    rank->memory[static_cast<size_t>(at)] = Value(name, index, version);
  });
}

bool Holds(Cluster* cluster, int number, int64_t version) {
  bool right = cluster->Commits(number, Version(version));
  const Rank& rank = cluster->rank(number);
  ForEachElement(*rank.layout, [&](const std::string& name, int64_t index, int64_t at) {
    right &= rank.memory[static_cast<size_t>(at)] == Value(name, index, version);
  });
  return right;
}

GroupSpec SpecOf(int trainers) {
  GroupSpec spec;
  spec.trainer_ranks = trainers;
  spec.slot_bytes = 4096;
  spec.slots = 4;
  return spec;
}

// Two trainer ranks, each with half the rows of "a" and "b" and all of the vector "n"; two engine
// ranks, each with half the columns, fused. On two daemons each has one rank of either role.
struct World {
  explicit World(int daemons, GroupLimits limits = {}, TransferFaults* faults = nullptr)
      : cluster(daemons, SpecOf(2), limits, faults) {
    for (int r = 0; r < 2; ++r) {
      const int d = r % daemons;
      trainers.push_back(cluster.AddTrainer(d, r, 2, Half(r)));
      engines.push_back(cluster.AddEngine(d, "x", r, 2, EngineLayout(r, 2, {"a", "b"}, {"n"})));
    }
  }
  static Layout Half(int rank, int64_t gap = 0) {
    return Builder(gap)
        .Rows("a", rank * kRows / 2, kRows / 2)
        .Rows("b", rank * kRows / 2, kRows / 2)
        .Whole("n")
        .Done();
  }
  void FillAll(int64_t version) {
    for (const int t : trainers) Fill(&cluster.rank(t), version);
  }
  absl::Status FillAndRefit(int64_t version, Verification verification = Verification::kReadback) {
    FillAll(version);
    return cluster.RefitAll(trainers, Version(version), verification);
  }
  bool AllHold(int64_t version) {
    return Holds(&cluster, engines[0], version) && Holds(&cluster, engines[1], version);
  }

  Cluster cluster;
  std::vector<int> trainers;
  std::vector<int> engines;
};

TEST_CASE("a program is compiled once and replayed, and runs on memory that moved") {
  const int daemons = GENERATE(1, 2);
  CAPTURE(daemons);
  World world(daemons);
  for (int64_t version = 1; version <= 3; ++version) {
    const absl::Status status = world.FillAndRefit(version);
    INFO(status.ToString());
    REQUIRE(status.ok());
    REQUIRE(world.AllHold(version));
  }
  REQUIRE(world.cluster.asked().plans == 1);
  REQUIRE(world.cluster.asked().programs == daemons);
  // The weights were offloaded and loaded elsewhere: other memory and offsets, the same structure.
  REQUIRE(world.cluster.Register(world.trainers[0], World::Half(0, 1000)).ok());
  REQUIRE(world.cluster.Register(world.engines[1], EngineLayout(1, 2, {"a", "b"}, {"n"})).ok());
  REQUIRE(world.FillAndRefit(4).ok());
  CHECK(world.AllHold(4));
  CHECK(world.cluster.asked().plans == 1);
  CHECK(world.cluster.asked().programs == daemons);
  // The same pieces in another order: planned once more for this node.
  Layout turned = World::Half(1);
  std::swap(turned.pieces[0], turned.pieces[2]);
  REQUIRE(world.cluster.Register(world.trainers[1], turned).ok());
  REQUIRE(world.FillAndRefit(5).ok());
  CHECK(world.AllHold(5));
  CHECK(world.cluster.asked().plans == 1);
  CHECK(world.cluster.asked().programs == daemons + 1);
}

// `a` and `b` alternate element by element in the rows [begin, begin + count).
Layout TakingTurns(int64_t begin, int64_t count, Box columns) {
  Layout layout;
  const int64_t mine = columns.extent[1];
  for (const std::string name : {"a", "b"}) {
    const auto index = static_cast<uint32_t>(layout.tensors.size());
    layout.tensors.push_back(Matrix(name));
    layout.pieces.push_back(
        {index, Box{{begin, columns.offset[1]}, {count, mine}}, RegionId(1), index, {2 * mine, 2}});
  }
  return layout;
}

TEST_CASE("tensors whose elements take turns in memory are refitted from and into it") {
  const int daemons = GENERATE(1, 2);
  const bool engines_take_turns = GENERATE(true, false);
  const auto verification =
      GENERATE(Verification::kOff, Verification::kTransfer, Verification::kReadback);
  CAPTURE(daemons, engines_take_turns);
  Cluster cluster(daemons, SpecOf(2));
  std::vector<int> trainers;
  std::vector<int> engines;
  for (int r = 0; r < 2; ++r) {
    const int64_t begin = r * kRows / 2;
    const Box columns = {{0, r * kColumns / 2}, {kRows, kColumns / 2}};
    Layout rows = engines_take_turns
                      ? Builder().Rows("a", begin, kRows / 2).Rows("b", begin, kRows / 2).Done()
                      : TakingTurns(begin, kRows / 2, {{0, 0}, {kRows, kColumns}});
    trainers.push_back(cluster.AddTrainer(r % daemons, r, 2, std::move(rows)));
    engines.push_back(cluster.AddEngine(
        (r + 1) % daemons, "x", r, 2,
        engines_take_turns ? TakingTurns(0, kRows, columns) : EngineLayout(r, 2, {"a", "b"}, {})));
  }
  for (int64_t version = 1; version <= 2; ++version) {
    for (const int t : trainers) Fill(&cluster.rank(t), version);
    const absl::Status status = cluster.RefitAll(trainers, Version(version), verification);
    INFO(status.ToString());
    REQUIRE(status.ok());
    for (const int e : engines) CHECK(Holds(&cluster, e, version));
  }
}

TEST_CASE("another split of the trainers is another program") {
  const int daemons = GENERATE(1, 2);
  CAPTURE(daemons);
  World world(daemons);
  REQUIRE(world.FillAndRefit(1).ok());
  // From halves of every matrix to whole matrices, as in a pipeline split.
  REQUIRE(world.cluster.Register(world.trainers[0], Builder().Rows("a", 0, kRows).Whole("n").Done())
              .ok());
  REQUIRE(world.cluster.Register(world.trainers[1], Builder().Rows("b", 0, kRows).Done()).ok());
  REQUIRE(world.FillAndRefit(2).ok());
  CHECK(world.AllHold(2));
  CHECK(world.cluster.asked().plans == 2);
  // The error names the missing tensor, and the engines stay as they are.
  REQUIRE(world.cluster.Register(world.trainers[1], Builder().Rows("b", 0, kRows - 1).Done()).ok());
  const absl::Status status = world.FillAndRefit(3);
  CHECK(status.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(std::string(status.message()), Contains("tensor b"));
  CHECK(world.cluster.rank(world.engines[0]).aborted() == 0);
  CHECK(world.AllHold(2));
}

TEST_CASE("refit and push in one version") {
  const int daemons = GENERATE(1, 2);
  CAPTURE(daemons);
  Cluster cluster(daemons, SpecOf(2));
  const int first = cluster.AddTrainer(
      0, 0, 2, Builder().Rows("a", 0, kRows).Rows("b", 0, kRows).Whole("p").Pushed().Done());
  const int second = cluster.AddTrainer(daemons - 1, 1, 2, Layout());  // pushes only
  std::vector<int> engines;
  for (int r = 0; r < 2; ++r) {
    engines.push_back(
        cluster.AddEngine(r % daemons, "x", r, 2, EngineLayout(r, 2, {"a", "b"}, {"p", "q"})));
  }
  const auto bytes_of = [](const std::string& name, int64_t version) {
    std::string bytes;
    for (int64_t i = 0; i < kColumns; ++i) bytes.push_back(Value(name, i, version));
    return bytes;
  };
  for (int64_t version = 1; version <= 2; ++version) {
    Fill(&cluster.rank(first), version);
    const Answer begun = cluster.Begin(first, Version(version), Verification::kReadback);
    const Answer also = cluster.Begin(second, Version(version), Verification::kReadback);
    INFO(begun.status().ToString() << also.status().ToString());
    REQUIRE((begun.status().ok() && also.status().ok()));
    const std::string of_p = bytes_of("p", version);
    const std::string of_q = bytes_of("q", version);
    const Answer p = cluster.Push(first, Version(version), 0, Vector("p"), of_p);
    const Answer q = cluster.Push(second, Version(version), 0, Vector("q"), of_q);
    INFO(p.status().ToString() << q.status().ToString());
    REQUIRE((p.status().ok() && q.status().ok()));
    const Answer refit = cluster.Refit(first, Version(version), Verification::kReadback, 1);
    const Answer commit = cluster.Commit(second, Version(version), 1);
    INFO(refit.status().ToString() << commit.status().ToString());
    REQUIRE((refit.status().ok() && commit.status().ok()));
    for (const int e : engines) CHECK(Holds(&cluster, e, version));
  }
}

TEST_CASE("replicas that differ are named within so many versions, and nothing is written") {
  const int daemons = GENERATE(1, 2);
  CAPTURE(daemons);
  GroupLimits limits;
  limits.compare_every = 2;
  World world(daemons, limits);
  REQUIRE(world.FillAndRefit(1).ok());
  CHECK(world.cluster.asked().comparisons == daemons);
  // Damages one element of rank 1's copy of the vector.
  const auto damage = [&] {
    Rank& r = world.cluster.rank(world.trainers[1]);
    r.memory[static_cast<size_t>(r.layout->pieces[2].byte_offset + 5)] ^= 1;
  };
  int64_t version = 2;
  absl::Status status;
  for (; status.ok() && version <= 3; ++version) {
    world.FillAll(version);
    damage();
    status = world.cluster.RefitAll(world.trainers, Version(version));
    // A version that compares another share of the replicas does not notice the damage.
    if (!status.ok()) break;
  }
  CHECK(status.code() == absl::StatusCode::kAborted);
  CHECK_THAT(std::string(status.message()),
             Contains("tensor n") && Contains("trainer rank 1") && Contains("trainer rank 0"));
  const Rank& engine = world.cluster.rank(world.engines[0]);
  REQUIRE(Eventually([&] { return engine.aborted() > 0; }));
  CHECK_FALSE(engine.dirty());
  CHECK(engine.committed() == Version(version - 1));
  CHECK(world.FillAndRefit(version + 1).ok());
  CHECK(world.AllHold(version + 1));
}

TEST_CASE("a rank that differs everywhere after the first version is found on the next one") {
  const int daemons = GENERATE(1, 2);
  CAPTURE(daemons);
  constexpr int kTensors = 40;
  GroupLimits limits;
  limits.compare_every = 8;
  Cluster cluster(daemons, SpecOf(2), limits);
  std::vector<std::string> names;
  Builder trainer;
  for (int i = 0; i < kTensors; ++i) names.push_back(fmt::format("norm{}", i));
  for (const std::string& name : names) trainer.Whole(name);
  std::vector<int> trainers;
  for (int r = 0; r < 2; ++r) {
    trainers.push_back(cluster.AddTrainer(r % daemons, r, 2, trainer.Done()));
  }
  const int engine = cluster.AddEngine(0, "x", 0, 1, EngineLayout(0, 1, {}, names));
  const auto refit = [&](int64_t version, int64_t other) {
    Fill(&cluster.rank(trainers[0]), version);
    Fill(&cluster.rank(trainers[1]), other);
    return cluster.RefitAll(trainers, Version(version));
  };
  for (int64_t version = 1; version <= 4; ++version) REQUIRE(refit(version, version).ok());
  const absl::Status status = refit(5, 1);
  CHECK(status.code() == absl::StatusCode::kAborted);
  CHECK_THAT(std::string(status.message()), Contains("replicas differ"));
  REQUIRE(Eventually([&] { return cluster.rank(engine).aborted() > 0; }));
  CHECK(cluster.rank(engine).committed() == Version(4));
  CHECK_FALSE(cluster.rank(engine).dirty());
}

// Damages the n-th store from now on.
class OneFault : public TransferFaults {
 public:
  void Arm(int stores) { left_ = stores; }
  bool fired() const { return left_ == 0; }
  void AfterStore(char* data, int64_t) override {
    // Daemons' threads store at the same time, and one of them takes the last count.
    int left = left_.load();
    while (left > 0 && !left_.compare_exchange_weak(left, left - 1)) {
    }
    if (left == 1) *data ^= 0x10;
  }

 private:
  std::atomic<int> left_{-1};
};

// (Verification `transfer` compares what a copy read and stored, not what memory holds afterwards.)
TEST_CASE(
    "a byte damaged after any copy is read back, and the instance is dirty until the next "
    "version") {
  const int daemons = GENERATE(1, 2);
  const Verification verification = Verification::kReadback;
  CAPTURE(daemons);
  OneFault fault;
  World world(daemons, {}, &fault);
  REQUIRE(world.FillAndRefit(1, verification).ok());
  int fired = 0;
  int64_t version = 2;
  for (int store = 1; store < 200; ++store) {
    fault.Arm(store);
    const absl::Status status = world.FillAndRefit(version, verification);
    if (!fault.fired()) {
      CHECK(status.ok());
      break;
    }
    ++fired;
    CAPTURE(store, status.ToString());
    REQUIRE(status.code() == absl::StatusCode::kAborted);
    CHECK_THAT(std::string(status.message()), Contains("verification"));
    const Rank& engine = world.cluster.rank(world.engines[0]);
    REQUIRE(Eventually([&] { return engine.aborted() == static_cast<size_t>(fired); }));
    CHECK(engine.dirty());
    ++version;
    fault.Arm(-1);
    REQUIRE(world.FillAndRefit(version, verification).ok());
    CHECK(world.AllHold(version));
    ++version;
  }
  CHECK(fired >= 4);
}

TEST_CASE("an engine's instance that leaves makes room for another program") {
  World world(2);
  const int other = world.cluster.AddEngine(1, "y", 0, 1, EngineLayout(0, 1, {"a", "b"}, {"n"}));
  REQUIRE(world.FillAndRefit(1).ok());
  CHECK(Holds(&world.cluster, other, 1));
  world.cluster.Lose(other);
  REQUIRE(world.FillAndRefit(2).ok());
  CHECK(world.AllHold(2));
  CHECK(world.cluster.asked().plans == 2);
}

// Two trainer ranks on daemon 0, each with half the rows, and on each other daemon an instance that
// wants everything: these daemons form a chain.
struct Fleet {
  explicit Fleet(int instances, int64_t slots = 4, TransferFaults* faults = nullptr)
      : cluster(instances + 1, SpecWith(slots), {}, faults) {
    for (int r = 0; r < 2; ++r) trainers.push_back(cluster.AddTrainer(0, r, 2, World::Half(r)));
    for (int i = 0; i < instances; ++i) {
      engines.push_back(cluster.AddEngine(i + 1, fmt::format("i{}", i), 0, 1,
                                          EngineLayout(0, 1, {"a", "b"}, {"n"})));
    }
  }
  static GroupSpec SpecWith(int64_t slots) {
    GroupSpec spec = SpecOf(2);
    spec.slots = slots;
    return spec;
  }
  absl::Status FillAndRefit(int64_t version, Verification verification = Verification::kReadback) {
    for (const int t : trainers) Fill(&cluster.rank(t), version);
    return cluster.RefitAll(trainers, Version(version), verification);
  }
  // Whether all instances but those at these places hold the version.
  bool AllHold(int64_t version, const std::set<int>& but = {}) {
    for (int i = 0; i < static_cast<int>(engines.size()); ++i) {
      if (!but.contains(i) && !Holds(&cluster, engines[static_cast<size_t>(i)], version)) {
        return false;
      }
    }
    return true;
  }

  static constexpr int64_t kModelBytes = 2 * kRows * kColumns + kColumns;
  Cluster cluster;
  std::vector<int> trainers;
  std::vector<int> engines;
};

TEST_CASE("daemons that want the same forward it, and the trainers' daemon sends it once") {
  const int instances = GENERATE(2, 3, 6);
  const int64_t slots = GENERATE(2, 4);
  const auto verification =
      GENERATE(Verification::kOff, Verification::kTransfer, Verification::kReadback);
  CAPTURE(instances, slots);
  Fleet fleet(instances, slots);
  for (int64_t version = 1; version <= 3; ++version) {
    const absl::Status status = fleet.FillAndRefit(version, verification);
    INFO(status.ToString());
    REQUIRE(status.ok());
    REQUIRE(fleet.AllHold(version));
    // Sections are aligned, so that a little more crosses.
    CHECK(fleet.cluster.sent_bytes(0) >= version * Fleet::kModelBytes);
    CHECK(fleet.cluster.sent_bytes(0) <= version * (Fleet::kModelBytes + 512));
    for (int d = 1; d <= instances; ++d) {
      CHECK(fleet.cluster.sent_bytes(d) <= version * (Fleet::kModelBytes + 512));
    }
  }
  CHECK(fleet.cluster.exchanged_bytes() >= 3 * instances * Fleet::kModelBytes);
  CHECK(fleet.cluster.asked().plans == 1);
  CHECK(fleet.cluster.asked().programs == instances + 1);
}

TEST_CASE("a chain is closed over a daemon whose engine left before the data phase") {
  const int leaver = GENERATE(0, 1, 2, 3);
  CAPTURE(leaver);
  Fleet fleet(4);
  REQUIRE(fleet.FillAndRefit(1).ok());
  for (const int t : fleet.trainers) Fill(&fleet.cluster.rank(t), 2);
  std::vector<Answer> begun;
  for (const int t : fleet.trainers) {
    begun.push_back(fleet.cluster.Begin(t, Version(2), Verification::kReadback));
  }
  for (const Answer& answer : begun) REQUIRE(answer.status().ok());
  const int64_t before = fleet.cluster.sent_bytes(0);
  fleet.cluster.Lose(fleet.engines[static_cast<size_t>(leaver)]);
  const absl::Status status = fleet.cluster.RefitAll(fleet.trainers, Version(2));
  INFO(status.ToString());
  CHECK(status.ok());
  CHECK(fleet.AllHold(2, {leaver}));
  CHECK(fleet.cluster.asked().plans == 1);
  CHECK(fleet.cluster.sent_bytes(0) <= before + Fleet::kModelBytes + 512);
  CHECK(fleet.cluster.sent_bytes(leaver + 1) <= Fleet::kModelBytes + 512);
}

TEST_CASE("a byte damaged after any copy of a chain is found, at whatever daemon") {
  const int64_t slots = GENERATE(2, 4);
  OneFault fault;
  Fleet fleet(3, slots, &fault);
  REQUIRE(fleet.FillAndRefit(1).ok());
  int fired = 0;
  std::set<std::string> found;
  int64_t version = 2;
  for (int store = 1; store < 400; ++store) {
    fault.Arm(store);
    const absl::Status status = fleet.FillAndRefit(version, Verification::kReadback);
    if (!fault.fired()) {
      CHECK(status.ok());
      break;
    }
    ++fired;
    CAPTURE(store, status.ToString());
    // Bytes between sections mean nothing.
    if (status.ok()) CHECK(fleet.AllHold(version));
    if (!status.ok()) found.insert(std::string(status.message()));
    ++version;
    fault.Arm(-1);
    REQUIRE(fleet.FillAndRefit(version).ok());
    REQUIRE(fleet.AllHold(version));
    ++version;
  }
  CHECK(fired > 20);
  // A daemon that forwards wrong bytes is found where they arrive.
  const bool end_to_end = std::any_of(found.begin(), found.end(), [](const std::string& message) {
    return message.find("is not what") != std::string::npos;
  });
  CHECK(end_to_end);
}

}  // namespace
}  // namespace refitd::refit
