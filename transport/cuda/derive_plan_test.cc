#include "transport/cuda/derive_plan.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <list>
#include <random>

#include "transport/cuda/copy_interpreter_testing.h"
#include "transport/cuda/copy_plan.h"
#include "transport/derive/derive.h"
#include "transport/derive/held_testing.h"
#include "transport/digest/digest.h"

namespace refitd {
namespace {

using Rng = std::mt19937_64;

int64_t Between(Rng& rng, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(rng);
}

// All memory is that of device 0, at this process's addresses.
class OneDevice : public CopyAddresses {
 public:
  absl::StatusOr<int> DeviceOf(const BoundPiece& /*piece*/) override { return 0; }
  absl::StatusOr<uint64_t> On(int /*device*/, const BoundPiece& piece) override {
    return reinterpret_cast<uint64_t>(piece.data);
  }
};

struct Outcome {
  std::vector<unsigned long long> stored;
  std::vector<unsigned long long> source;
  unsigned long long fault = 0;
  size_t tasks = 0;
};

Outcome RunPlan(const Transfer& transfer, Verification verification) {
  OneDevice addresses;
  const auto plan = PlanCopies(transfer, verification, &addresses);
  INFO(plan.status());
  REQUIRE(plan.ok());
  Outcome outcome;
  outcome.stored.resize(plan->sums.size() + 1);
  outcome.source.resize(static_cast<size_t>(plan->task_sums()) + 1);
  for (const DeviceTasks& device : plan->devices) {
    uint32_t next = 0;
    CopyLaunch launch;
    launch.tasks = device.tasks.data();
    launch.task_count = static_cast<uint32_t>(device.tasks.size());
    launch.next_task = &next;
    launch.stored_sums = outcome.stored.data();
    launch.source_sums = outcome.source.data();
    launch.fault = &outcome.fault;
    outcome.tasks += device.tasks.size();
    RunTasks(launch, 256);
  }
  return outcome;
}

// A tensor that is held in part, and one box of what is derived from it, at a destination with
// gaps.
struct World {
  World(Rng& rng, DerivedKind kind, DType dtype, DerivedRole role) {
    const bool squares =
        kind == DerivedKind::kFp8BlockReciprocal || kind == DerivedKind::kFp8BlockPow2;
    Dims shape = {Between(rng, 1, 2), Between(rng, 1, 300), Between(rng, 1, 700)};
    if (squares) shape = {Between(rng, 1, 2), 128 * Between(rng, 1, 3), 128 * Between(rng, 1, 10)};
    if (kind == DerivedKind::kMxFp8) shape.back() = 32 * Between(rng, 1, 40);
    derivation = std::make_shared<Derivation>(Derivation{{"w", dtype, shape}, kind, role});
    to_dtype = kind == DerivedKind::kMxFp8 && role == DerivedRole::kScales ? DType::kUint8
               : role == DerivedRole::kScales                              ? DType::kFloat32
               : kind != DerivedKind::kCast                                ? DType::kFloat8E4M3FN
               : dtype == DType::kBFloat16                                 ? DType::kFloat32
               : Between(rng, 0, 1) == 0                                   ? DType::kBFloat16
                                                                           : DType::kFloat16;
    const Dims block = BlockOf(*derivation);
    Box part = WholeBox(shape);
    for (size_t d = 0; d < shape.size(); ++d) {
      const int64_t blocks = (shape[d] + block[d] - 1) / block[d];
      const int64_t first = Between(rng, 0, blocks - 1);
      part.offset[d] = first * block[d];
      part.extent[d] =
          std::min(Between(rng, 1, blocks - first) * block[d], shape[d] - part.offset[d]);
    }
    Dims strides = RowMajorStrides(part.extent);
    if (Between(rng, 0, 3) == 0) {  // columns beside one another
      strides = {part.extent[1] * part.extent[2], 1, part.extent[1]};
    } else if (Between(rng, 0, 1) == 0) {  // rows that are not aligned
      strides = {part.extent[1] * (part.extent[2] + 3), part.extent[2] + 3, 1};
    }
    const int64_t element = ElementBytes(dtype);
    memory.resize(static_cast<size_t>(
        (part.extent[0] * (part.extent[1] + 1) * (part.extent[2] + 3)) * element + 64));
    for (size_t i = 0; i < memory.size(); i += static_cast<size_t>(element)) {
      const auto number = std::ldexp(static_cast<float>(Between(rng, -1000, 1000)),
                                     static_cast<int>(Between(rng, -13, 1)));
      const uint32_t bits = dtype == DType::kFloat32    ? derive::BitsOf(number)
                            : dtype == DType::kBFloat16 ? derive::ToBFloat16(number)
                                                        : derive::ToFloat16(number);
      std::memcpy(&memory[i], &bits, static_cast<size_t>(element));
    }
    const int64_t shift = Between(rng, 0, 3) * element;
    held = std::make_shared<HeldPiece>(HoldOne(derivation, part, strides, memory.data() + shift));
    if (MayBeCut(kind) && Between(rng, 0, 1) == 1) {
      CutHeld(rng, static_cast<int>(Between(rng, 2, 12)), held.get(), &parts);
    }
    box = *ComputableBox(*derivation, part);
    whole = box;
    for (size_t d = 0; d < box.offset.size(); ++d) {
      const int64_t first = Between(rng, 0, box.extent[d] - 1);
      box.offset[d] += first;
      box.extent[d] = Between(rng, 1, box.extent[d] - first);
    }
    // At the destination, rows or columns beside one another, with gaps.
    to_strides = Between(rng, 0, 3) == 0
                     ? Dims{box.extent[1] * box.extent[2] + 5, 1, box.extent[1]}
                     : Dims{box.extent[1] * (box.extent[2] + 3), box.extent[2] + 3, 1};
    stored.assign(static_cast<size_t>(box.extent[0] * (box.extent[1] + 1) * (box.extent[2] + 4) *
                                          ElementBytes(to_dtype) +
                                      128),
                  'x');
    at = stored.data() + Between(rng, 0, 3) * ElementBytes(to_dtype);
  }

  Transfer MakeTransfer() {
    const Dims shape = ComputableBox(*derivation, WholeBox(derivation->from.shape))->extent;
    Transfer transfer;
    transfer.source.push_back(
        {to_dtype, shape, whole, RowMajorStrides(whole.extent), held->shards[0].data, "w.q", held});
    transfer.destinations.push_back({{to_dtype, shape, box, to_strides, at, "w.q"}});
    CopyMove move;
    move.box = box;
    move.source_byte_offset = 0;
    const Dims strides = RowMajorStrides(whole.extent);
    for (size_t d = 0; d < strides.size(); ++d) {
      move.source_byte_offset +=
          (box.offset[d] - whole.offset[d]) * strides[d] * ElementBytes(to_dtype);
    }
    transfer.plan.moves.push_back(move);
    transfer.verification = Verification::kTransfer;
    return transfer;
  }

  // What the destination must hold, and its digest.
  std::vector<char> Expected(uint64_t* digest) const {
    const int64_t element = ElementBytes(to_dtype);
    std::vector<char> dense(static_cast<size_t>(ElementCount(box) * element));
    REQUIRE_FALSE(Derive(*held, to_dtype, box, dense.data()).has_value());
    std::vector<char> all(stored.size(), 'x');
    const Dims strides =
        RowMajorStrides(ComputableBox(*derivation, WholeBox(derivation->from.shape))->extent);
    *digest = 0;
    const char* from = dense.data();
    for (int64_t i = 0; i < box.extent[0]; ++i) {
      for (int64_t j = 0; j < box.extent[1]; ++j) {
        const int64_t first =
            (box.offset[0] + i) * strides[0] + (box.offset[1] + j) * strides[1] + box.offset[2];
        *digest +=
            BestDigestKernels().digest(from, static_cast<int>(element), first, box.extent[2]);
        for (int64_t k = 0; k < box.extent[2]; ++k, from += element) {
          const int64_t to = (at - stored.data()) +
                             (i * to_strides[0] + j * to_strides[1] + k * to_strides[2]) * element;
          std::memcpy(&all[static_cast<size_t>(to)], from, static_cast<size_t>(element));
        }
      }
    }
    return all;
  }

  std::shared_ptr<Derivation> derivation;
  std::shared_ptr<HeldPiece> held;
  DType to_dtype = DType::kFloat32;
  std::vector<char> memory;
  std::list<std::vector<char>> parts;
  Box box;    // what is moved
  Box whole;  // what can be
  Dims to_strides;
  std::vector<char> stored;
  char* at = nullptr;
};

constexpr DerivedKind kKinds[] = {
    DerivedKind::kCast,         DerivedKind::kFp8Block,   DerivedKind::kFp8BlockReciprocal,
    DerivedKind::kFp8BlockPow2, DerivedKind::kFp8Channel, DerivedKind::kFp8BlockCuda,
    DerivedKind::kMxFp8};
constexpr DType kFloats[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

TEST_CASE("the kernel's code derives and digests what the host does") {
  Rng rng(1);
  for (int round = 0; round < 400; ++round) {
    const DerivedKind kind = kKinds[Between(rng, 0, std::size(kKinds) - 1)];
    const auto role = kind != DerivedKind::kCast && Between(rng, 0, 2) == 0 ? DerivedRole::kScales
                                                                            : DerivedRole::kValues;
    World world(rng, kind, kFloats[Between(rng, 0, 2)], role);
    INFO("round " << round << ": " << Describe(*world.derivation));
    uint64_t digest = 0;
    const std::vector<char> expected = world.Expected(&digest);
    world.held->digested = Between(rng, 0, 3) > 0;
    Transfer transfer = world.MakeTransfer();
    transfer.want_source_digests = Between(rng, 0, 1) == 1;
    const Outcome outcome = RunPlan(transfer, Verification::kTransfer);
    CHECK(outcome.fault == 0);
    REQUIRE(world.stored == expected);
    REQUIRE(outcome.stored[0] == digest);
    REQUIRE(outcome.source[0] == digest);
    if (!transfer.want_source_digests) continue;
    if (!world.held->digested) REQUIRE(outcome.source[1] == 0);
    if (world.held->digested && world.box == world.whole) REQUIRE(outcome.source[1] == digest);
  }
}

TEST_CASE("a program that reads a computed piece elsewhere is refused (P1)") {
  Rng rng(4);
  World world(rng, DerivedKind::kFp8Block, DType::kBFloat16, DerivedRole::kValues);
  world.box.extent = {1, 1, 1};
  Transfer transfer = world.MakeTransfer();
  REQUIRE(ElementCount(world.whole) > 1);
  int64_t& offset = transfer.plan.moves[0].source_byte_offset;
  offset += offset == 0 ? 1 : -1;
  OneDevice addresses;
  CHECK(PlanCopies(transfer, Verification::kTransfer, &addresses).status().code() ==
        absl::StatusCode::kInternal);
}

TEST_CASE("blocks beside one another share a task") {
  Rng rng(2);
  const Dims shape = {1024, 4096};
  const auto derivation = std::make_shared<Derivation>(
      Derivation{{"w", DType::kBFloat16, shape}, DerivedKind::kFp8Block, DerivedRole::kValues});
  const HeldPiece held = HoldOne(derivation, WholeBox(shape), RowMajorStrides(shape), nullptr);
  const BoundPiece source{DType::kFloat8E4M3FN,
                          shape,
                          WholeBox(shape),
                          RowMajorStrides(shape),
                          nullptr,
                          "w",
                          std::make_shared<HeldPiece>(held)};
  const Box all = WholeBox(shape);
  std::vector<DeriveTask> tasks;
  const DeriveMove move{.source = &source,
                        .piece = 0,
                        .box = &all,
                        .held_addresses = {1 << 20},
                        .destination = 1 << 30,
                        .destination_strides = RowMajorStrides(shape)};
  CHECK(AddDeriveTasks(move, 1000, &tasks).ok());
  CHECK(tasks.size() == 8 * 2);  // of 16 blocks, 256 Ki elements
  CHECK(tasks[1].source == tasks[0].source + 2048 * 2);
  CHECK(tasks[1].place == 16);
  CHECK(AddDeriveTasks(move, 20, &tasks).code() == absl::StatusCode::kResourceExhausted);
  CHECK(ElementAt(*derivation, tasks[3].place) == Dims{128, 2048});
}

TEST_CASE("blocks that shards cut alike share tasks, one for each part") {
  const Dims shape = {256, 1024};
  const auto derivation = std::make_shared<Derivation>(
      Derivation{{"w", DType::kBFloat16, shape}, DerivedKind::kFp8Block, DerivedRole::kValues});
  HeldPiece held{derivation, {}};
  const auto hold = [&](const Box& box) {
    held.shards.push_back(
        {DType::kBFloat16, shape, box, RowMajorStrides(box.extent), nullptr, "w"});
  };
  hold({{0, 0}, {200, 1024}});
  hold({{200, 0}, {56, 1024}});
  const auto tasks_of = [&](const HeldPiece& of, std::vector<DeriveTask>* tasks) {
    const BoundPiece source{DType::kFloat8E4M3FN,           shape,   WholeBox(shape),
                            RowMajorStrides(shape),         nullptr, "w.q",
                            std::make_shared<HeldPiece>(of)};
    const Box all = WholeBox(shape);
    DeriveMove move{.source = &source,
                    .piece = 0,
                    .box = &all,
                    .destination = 1 << 30,
                    .destination_strides = RowMajorStrides(shape)};
    for (size_t i = 0; i < of.shards.size(); ++i) move.held_addresses.push_back((i + 1) << 20);
    return AddDeriveTasks(move, 1000, tasks);
  };
  std::vector<DeriveTask> tasks;
  REQUIRE(tasks_of(held, &tasks).ok());
  REQUIRE(tasks.size() == 3);  // eight blocks in one part, eight in two
  CHECK(tasks[0].parts == 1);
  CHECK(tasks[0].blocks == 8);
  CHECK(tasks[1].parts == 2);
  CHECK(tasks[1].blocks == 8);
  CHECK(tasks[1].rows == 72);
  CHECK(tasks[1].source == (1 << 20) + 128 * 1024 * 2);
  CHECK(tasks[2].parts == 0);
  CHECK(tasks[2].blocks == 8);
  CHECK(tasks[2].rows == 56);
  CHECK(tasks[2].source == 2 << 20);
  CHECK(tasks[2].destination == (1 << 30) + 200 * 1024);

  held.shards.pop_back();
  for (int64_t row = 200; row < 256; ++row) {
    for (int64_t column = 0; column < 1024; column += 16) hold({{row, column}, {1, 16}});
  }
  const absl::Status status = tasks_of(held, &tasks);
  CHECK(status.code() == absl::StatusCode::kResourceExhausted);
  CHECK(status.message() == "\"w.q\": a block of w lies in more than 255 pieces");
}

TEST_CASE("parts that begin at multiples of a vector give what one part gives") {
  Rng rng(5);
  const Dims shape = {300, 512};
  const DType dtype = GENERATE(from_range(std::begin(kFloats), std::end(kFloats)));
  const auto kind = GENERATE(DerivedKind::kFp8Block, DerivedKind::kFp8Channel);
  const auto role = GENERATE(DerivedRole::kValues, DerivedRole::kScales);
  // Each part has memory of its own, with rows at a distance of its own.
  const bool apart = GENERATE(false, true);
  const auto derivation = std::make_shared<Derivation>(Derivation{{"w", dtype, shape}, kind, role});
  const int64_t element = ElementBytes(dtype);
  std::vector<char> memory(static_cast<size_t>(300 * 512 * element));
  for (size_t i = 0; i < memory.size(); i += static_cast<size_t>(element)) {
    const auto number = static_cast<float>(Between(rng, -1000, 1000));
    const uint32_t bits = dtype == DType::kFloat32    ? derive::BitsOf(number)
                          : dtype == DType::kBFloat16 ? derive::ToBFloat16(number)
                                                      : derive::ToFloat16(number);
    std::memcpy(&memory[i], &bits, static_cast<size_t>(element));
  }
  const HeldPiece whole =
      HoldOne(derivation, WholeBox(shape), RowMajorStrides(shape), memory.data());
  HeldPiece cut{derivation, {}};
  std::list<std::vector<char>> own;
  for (const Box& box :
       {Box{{0, 0}, {64, 512}}, Box{{64, 0}, {136, 128}}, Box{{64, 128}, {136, 128}},
        Box{{64, 256}, {136, 256}}, Box{{200, 0}, {100, 512}}}) {
    BoundPiece part = whole.shards[0];
    part.box = box;
    part.data += (box.offset[0] * 512 + box.offset[1]) * element;
    if (apart) {
      const int64_t row = box.extent[1] + 16 * std::ssize(own);
      std::vector<char>& rows =
          own.emplace_back(static_cast<size_t>(box.extent[0] * row * element));
      for (int64_t i = 0; i < box.extent[0]; ++i) {
        std::memcpy(&rows[static_cast<size_t>(i * row * element)], part.data + i * 512 * element,
                    static_cast<size_t>(box.extent[1] * element));
      }
      part.data = rows.data();
      part.strides = {row, 1};
    }
    cut.shards.push_back(part);
  }
  const Box all = *ComputableBox(*derivation, WholeBox(shape));
  const DType to = role == DerivedRole::kValues ? DType::kFloat8E4M3FN : DType::kFloat32;
  const auto derived = [&](const HeldPiece& held, Outcome* outcome) {
    std::vector<char> stored(static_cast<size_t>(ElementCount(all) * ElementBytes(to)));
    BoundPiece piece{to, all.extent, all, RowMajorStrides(all.extent), memory.data(), "w.q"};
    Transfer transfer;
    transfer.destinations = {{piece}};
    transfer.destinations[0][0].data = stored.data();
    piece.held = std::make_shared<HeldPiece>(held);
    transfer.source = {piece};
    transfer.plan.moves.push_back({.box = all});
    *outcome = RunPlan(transfer, Verification::kTransfer);
    return stored;
  };
  Outcome of_whole;
  Outcome of_cut;
  CHECK(derived(cut, &of_cut) == derived(whole, &of_whole));
  CHECK(of_cut.stored == of_whole.stored);
  CHECK(of_cut.source == of_whole.source);
  CHECK(of_cut.fault == 0);
  CHECK(of_cut.tasks > of_whole.tasks);
}

TEST_CASE("rows that have a scale each share a task") {
  const Dims shape = {1000, 2048};
  const auto derivation = std::make_shared<Derivation>(
      Derivation{{"w", DType::kBFloat16, shape}, DerivedKind::kFp8Channel, DerivedRole::kScales});
  const Box all = WholeBox({1000, 1});
  const BoundPiece source{DType::kFloat32,
                          {1000, 1},
                          all,
                          {1, 1},
                          nullptr,
                          "w",
                          std::make_shared<HeldPiece>(HoldOne(derivation, WholeBox(shape),
                                                              RowMajorStrides(shape), nullptr))};
  std::vector<DeriveTask> tasks;
  CHECK(AddDeriveTasks({.source = &source,
                        .box = &all,
                        .held_addresses = {0},
                        .destination = 1 << 30,
                        .destination_strides = {1, 1}},
                       1000, &tasks)
            .ok());
  REQUIRE(tasks.size() == 8);  // of 128 rows, 256 Ki elements; the last has 104
  CHECK(tasks.back().blocks == 104);
  CHECK(tasks.back().source == 896 * 2048 * 2);
  CHECK(tasks.back().destination == (1 << 30) + 896 * 4);
  CHECK(ElementAt(*derivation, tasks.back().place) == Dims{896, 0});
}

TEST_CASE("a small block without a result is named") {
  const Dims shape = {6, 96};
  const auto derivation = std::make_shared<Derivation>(
      Derivation{{"w", DType::kFloat32, shape}, DerivedKind::kMxFp8, DerivedRole::kValues});
  std::vector<float> numbers(6 * 96, 1.5F);
  numbers[4 * 96 + 40] = std::numeric_limits<float>::infinity();
  std::vector<char> stored(6 * 96);
  auto* const data = reinterpret_cast<char*>(numbers.data());
  Transfer transfer;
  transfer.source.push_back({DType::kFloat8E4M3FN, shape, WholeBox(shape), RowMajorStrides(shape),
                             data, "w.q",
                             std::make_shared<HeldPiece>(HoldOne(derivation, WholeBox(shape),
                                                                 RowMajorStrides(shape), data))});
  transfer.destinations.push_back({{DType::kFloat8E4M3FN, shape, WholeBox(shape),
                                    RowMajorStrides(shape), stored.data(), "w.q"}});
  transfer.plan.moves.push_back({.box = WholeBox(shape)});
  const Outcome outcome = RunPlan(transfer, Verification::kOff);
  REQUIRE(outcome.fault >> 32 == 1);
  CHECK(ElementAt(*derivation, static_cast<uint32_t>(outcome.fault)) == Dims{4, 32});
}

TEST_CASE("a block without a result is named, and nothing of it is stored") {
  Rng rng(3);
  const Dims shape = {256, 384};
  const auto derivation = std::make_shared<Derivation>(
      Derivation{{"w", DType::kFloat32, shape}, DerivedKind::kFp8Block, DerivedRole::kValues});
  std::vector<float> numbers(256 * 384, 1.5F);
  numbers[200 * 384 + 300] =
      GENERATE(std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity());
  std::vector<char> stored(256 * 384, 'x');
  auto* const data = reinterpret_cast<char*>(numbers.data());
  const auto held = std::make_shared<HeldPiece>(
      HoldOne(derivation, WholeBox(shape), RowMajorStrides(shape), data));
  Transfer transfer;
  transfer.source.push_back(
      {DType::kFloat8E4M3FN, shape, WholeBox(shape), RowMajorStrides(shape), data, "w.q", held});
  transfer.destinations.push_back({{DType::kFloat8E4M3FN, shape, WholeBox(shape),
                                    RowMajorStrides(shape), stored.data(), "w.q"}});
  transfer.plan.moves.push_back({.box = WholeBox(shape)});
  const Outcome outcome = RunPlan(transfer, Verification::kOff);
  REQUIRE(outcome.fault >> 32 == 1);
  CHECK(ElementAt(*derivation, static_cast<uint32_t>(outcome.fault)) == Dims{128, 256});
  CHECK(stored[200 * 384 + 300] == 'x');
  CHECK(stored[200 * 384 + 255] == 0x7e);
}

}  // namespace
}  // namespace refitd
