#include "transport/cuda/relay_plan.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace refitd {
namespace {

using Catch::Matchers::Contains;
using Rng = std::mt19937_64;
constexpr uint64_t kSeed = 4711;
constexpr int64_t kAll = int64_t{1} << 40;

int64_t Pick(Rng* random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(*random);
}

// A whole tensor of bytes, or some of its rows.
BoundPiece Bytes(char* data, int64_t count) {
  return {.dtype = DType::kUint8,
          .shape = {count},
          .box = {{0}, {count}},
          .strides = {1},
          .data = data,
          .name = "weight"};
}

absl::StatusOr<std::vector<RelayChunk>> Cut(const std::vector<BoundPiece>& source,
                                            const std::vector<int64_t>& byte_offsets,
                                            int64_t slot_bytes, int64_t chunk_bytes) {
  const auto runs = RunsOf(source, byte_offsets, slot_bytes);
  if (!runs.ok()) return runs.status();
  return CutIntoChunks(*runs, chunk_bytes);
}

TEST_CASE("pieces that are adjacent at both ends are one copy, others are not") {
  std::vector<char> memory(100);
  char* const m = memory.data();
  // 0-9 and 10-29 follow one another on both sides, 40-49 only in the slot, 60-64 only in memory.
  const auto chunks = Cut({Bytes(m + 10, 20), Bytes(m, 10), Bytes(m + 40, 10), Bytes(m + 50, 5)},
                          {10, 0, 30, 64}, 100, kAll);
  REQUIRE(chunks.ok());
  REQUIRE(chunks->size() == 1);
  const RelayChunk& chunk = chunks->front();
  CHECK(chunk.begin == 0);
  CHECK(chunk.end == 69);
  REQUIRE(chunk.runs.size() == 3);
  CHECK(chunk.runs[0].from == m);
  CHECK(chunk.runs[0].bytes == 30);
  CHECK(chunk.runs[1].from == m + 40);
  CHECK(chunk.runs[1].offset == 30);
  CHECK(chunk.runs[2].offset == 64);
}

TEST_CASE("chunks end at multiples of their size, and there is none where there is nothing") {
  std::vector<char> memory(1000);
  char* const m = memory.data();
  const auto chunks =
      Cut({Bytes(m, 250), Bytes(m + 500, 10), Bytes(m, 0)}, {20, 512, 7}, 1000, 100);
  REQUIRE(chunks.ok());
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (const RelayChunk& chunk : *chunks) ranges.emplace_back(chunk.begin, chunk.end);
  CHECK(ranges ==
        std::vector<std::pair<int64_t, int64_t>>{{20, 100}, {100, 200}, {200, 270}, {512, 522}});
  CHECK(chunks->at(1).runs.front().from == m + 80);
}

TEST_CASE("whatever the pieces and the size of chunks, every byte goes once to its place") {
  Rng random(kSeed);
  for (int round = 0; round < 200; ++round) {
    INFO("seed " << kSeed << ", round " << round);
    std::vector<char> memory(4096);
    for (char& byte : memory) byte = static_cast<char>(random());
    std::vector<BoundPiece> source;
    std::vector<int64_t> offsets;
    std::vector<char> expected(8192, '\xcd');
    int64_t at = Pick(&random, 0, 20);
    for (int64_t i = Pick(&random, 0, 12); i > 0; --i) {
      const int64_t bytes = Pick(&random, 0, 300);
      char* const from = memory.data() + Pick(&random, 0, 4096 - bytes);
      source.push_back(Bytes(from, bytes));
      offsets.push_back(at);
      std::copy_n(from, bytes, expected.data() + at);
      at += bytes + Pick(&random, 0, 1) * Pick(&random, 0, 40);
    }
    std::vector<size_t> order(source.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), random);
    std::vector<BoundPiece> shuffled;
    std::vector<int64_t> shuffled_offsets;
    for (const size_t i : order) {
      shuffled.push_back(source[i]);
      shuffled_offsets.push_back(offsets[i]);
    }
    const auto chunks = Cut(shuffled, shuffled_offsets, 8192, Pick(&random, 1, 700));
    REQUIRE(chunks.ok());
    std::vector<char> slot(8192, '\xcd');
    std::vector<int> written(8192);
    int64_t last = 0;
    for (const RelayChunk& chunk : *chunks) {
      CHECK(chunk.begin >= last);
      last = chunk.end;
      for (const RelayRun& run : chunk.runs) {
        CHECK(run.offset >= chunk.begin);
        CHECK(run.offset + run.bytes <= chunk.end);
        std::copy_n(run.from, run.bytes, slot.data() + run.offset);
        for (int64_t b = 0; b < run.bytes; ++b) ++written[static_cast<size_t>(run.offset + b)];
      }
    }
    CHECK(slot == expected);
    // Any cut of the runs holds the same bytes.
    const auto runs = RunsOf(shuffled, shuffled_offsets, 8192);
    std::vector<char> again(8192, '\xcd');
    for (int64_t begin = 0; begin < 8192;) {
      const int64_t end = begin + Pick(&random, 1, 900);
      for (const RelayRun& run : RunsWithin(*runs, begin, end)) {
        REQUIRE(run.offset >= begin);
        REQUIRE(run.offset + run.bytes <= end);
        REQUIRE(run.bytes > 0);
        std::copy_n(run.from, run.bytes, again.data() + run.offset);
      }
      begin = end;
    }
    CHECK(again == expected);
    CHECK(*std::max_element(written.begin(), written.end()) <= 1);
  }
}

TEST_CASE("pieces that overlap in a slot, leave it or have gaps are refused by name") {
  std::vector<char> memory(1000);
  char* const m = memory.data();
  const auto refused = [](const absl::StatusOr<std::vector<RelayChunk>>& chunks,
                          const std::string& why) {
    REQUIRE(chunks.status().code() == absl::StatusCode::kInternal);
    CHECK_THAT(std::string(chunks.status().message()), Contains(why));
  };
  refused(Cut({Bytes(m, 10), Bytes(m + 20, 10)}, {0, 9}, 100, 50), "overlap at byte 9");
  refused(Cut({Bytes(m, 10)}, {91}, 100, 50), "\"weight\": 10 bytes at 91");
  refused(Cut({Bytes(m, 10)}, {-1}, 100, 50), "10 bytes at -1");
  BoundPiece gaps = Bytes(m, 10);
  gaps.strides = {2};
  refused(Cut({gaps}, {0}, 100, 50), "\"weight\" is not row-major");
}

TEST_CASE("a box of whole rows is dense, a box of columns is not") {
  std::vector<char> memory(1000);
  BoundPiece piece{.dtype = DType::kUint8,
                   .shape = {10, 8},
                   .box = {{2, 0}, {3, 8}},
                   .strides = {8, 1},
                   .data = memory.data(),
                   .name = "weight"};
  CHECK(Cut({piece}, {0}, 100, 50).ok());
  piece.box = {{2, 3}, {1, 5}};  // within one row
  CHECK(Cut({piece}, {0}, 100, 50).ok());
  piece.box = {{2, 3}, {2, 5}};
  CHECK_FALSE(Cut({piece}, {0}, 100, 50).ok());
}

// One tensor of 8 bytes on "device" 0, for destinations on 0, 1 and 2, with slots on 1 and 2.
struct Example {
  char memory[3][64] = {};
  Transfer transfer;
  Example() {
    transfer.source.push_back(Bytes(memory[0], 8));
    transfer.destinations.resize(3);
    for (uint32_t d = 0; d < 3; ++d) {
      transfer.destinations[d].push_back(Bytes(memory[d] + 32, 8));
      transfer.plan.moves.push_back({0, 0, d, 0, {{0}, {8}}, 0, 0});
    }
    transfer.broadcast = Broadcast{.method = BroadcastMethod::kChain,
                                   .slots = {{memory[1], 16, nullptr}, {memory[2], 16, nullptr}},
                                   .byte_offsets = {4}};
    transfer.label = "version 3, part 7";
  }
  int DeviceOf(const char* data) const {
    return static_cast<int>((data - memory[0]) / static_cast<int64_t>(sizeof(memory[0])));
  }
  Transfer SecondOf() const {
    return FromSlots(transfer, [this](const char* data) { return DeviceOf(data); });
  }
};

TEST_CASE("what follows reads each destination's bytes from the slot of its device") {
  const Example example;
  const Transfer second = example.SecondOf();
  CHECK_FALSE(second.broadcast.has_value());
  REQUIRE(second.source.size() == 3);
  CHECK(second.source[1].data == example.memory[1] + 4);
  CHECK(second.source[2].data == example.memory[2] + 4);
  REQUIRE(second.plan.moves.size() == 3);
  for (const CopyMove& move : second.plan.moves) CHECK(move.source_piece == move.destination);
}

TEST_CASE("verification asks for digests of the source and of every slot, and compares them") {
  Example example;
  CHECK_FALSE(example.SecondOf().want_source_digests);
  example.transfer.verification = Verification::kTransfer;
  const Transfer second = example.SecondOf();
  CHECK(second.want_source_digests);
  const auto compare = [&](std::vector<uint64_t> digests, bool wanted) {
    TransferResult result;
    result.source_digests = std::move(digests);
    CompareSlots(second, 2, wanted, &result);
    return result;
  };
  CHECK(compare({5, 5, 5}, false).status.ok());
  CHECK(compare({5, 5, 5}, false).source_digests.empty());
  CHECK(compare({5, 5, 5}, true).source_digests == std::vector<uint64_t>{5});
  const TransferResult wrong = compare({5, 5, 6}, true);
  CHECK(wrong.status.code() == absl::StatusCode::kDataLoss);
  CHECK_THAT(std::string(wrong.status.message()),
             Contains("version 3, part 7: verification of \"weight\" in slot 1 of the broadcast"));
}

}  // namespace
}  // namespace refitd
