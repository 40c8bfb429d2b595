#include "transport/host/host_transport.h"

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "transport/base/mutex.h"
#include "transport/digest/digest_testing.h"
#include "transport/host/box_copy.h"
#include "transport/transport_testing.h"

namespace refitd {
namespace {

constexpr uint64_t kSeed = 77;
constexpr auto kWait = std::chrono::seconds(30);
constexpr char kPoison = '\xcd';

// The memory of one member.
using Bytes = std::vector<char>;

Bytes RandomBytes(std::mt19937_64* random, size_t count) {
  Bytes bytes(count);
  for (char& byte : bytes) byte = static_cast<char>((*random)());
  return bytes;
}

// Strides of a padded array of `extent`, dimensions possibly stored in another order.
Dims RandomStrides(std::mt19937_64* random, const Dims& extent, bool transpose) {
  Dims strides(extent.size(), 0);
  std::vector<size_t> order(extent.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  if (transpose) std::shuffle(order.begin(), order.end(), *random);
  int64_t stride = Pick(random, 0, 3) == 0 ? Pick(random, 2, 3) : 1;  // elements may lie apart
  for (size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = stride;
    stride *= extent[order[i]] + (Pick(random, 0, 2) == 0 ? Pick(random, 1, 5) : 0);
  }
  return strides;
}

Box RandomBox(std::mt19937_64* random, const Dims& shape) {
  Box box = WholeBox(shape);
  for (size_t d = 0; d < shape.size(); ++d) {
    if (Pick(random, 0, 1) == 0) continue;
    box.offset[d] = Pick(random, 0, shape[d] - 1);
    box.extent[d] = Pick(random, 1, shape[d] - box.offset[d]);
  }
  return box;
}

Dims RandomShape(std::mt19937_64* random) {
  const int64_t rank = Pick(random, 0, 4);
  Dims shape;
  for (int64_t d = 0; d < rank; ++d) shape.push_back(Pick(random, 1, rank > 2 ? 12 : 200));
  return shape;
}

// Calls visit(global row-major index, element index by strides) for each element of a box.
template <typename Visit>
void ForEachElement(const Box& box, const Dims& shape, const Dims& strides, Visit visit) {
  const Dims global = RowMajorStrides(shape);
  const int64_t count = ElementCount(box);
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i;
    int64_t p = 0;
    int64_t at = 0;
    for (size_t d = shape.size(); d-- > 0;) {
      const int64_t index = rest % box.extent[d];
      rest /= box.extent[d];
      p += (box.offset[d] + index) * global[d];
      at += index * strides[d];
    }
    visit(p, at);
  }
}

uint64_t CopyBox(Bytes* to, const Dims& to_strides, const Bytes& from, const Dims& from_strides,
                 const Box& box, const Dims& shape, int element_bytes,
                 const BoxCopyOptions& options) {
  const uint64_t digest = CopyBoxUnfenced(to->data(), to_strides, from.data(), from_strides, box,
                                          shape, element_bytes, options);
  DigestStoreFence();
  return digest;
}

TEST_CASE("Boxes of any strides are copied and digested like element by element") {
  std::mt19937_64 random(kSeed);
  for (int round = 0; round < 600; ++round) {
    INFO("seed " << kSeed << ", round " << round);
    const int element_bytes = 1 << (round % 4);
    const Dims shape = RandomShape(&random);
    const Box box = RandomBox(&random, shape);
    const Dims from_strides = RandomStrides(&random, box.extent, round % 5 == 0);
    const Dims to_strides = RandomStrides(&random, box.extent, round % 7 == 0);
    const Bytes from = RandomBytes(
        &random, static_cast<size_t>(SpanElements(box.extent, from_strides) * element_bytes));
    Bytes want(static_cast<size_t>(SpanElements(box.extent, to_strides) * element_bytes), kPoison);
    Bytes plain = want;
    Bytes fused = want;
    uint64_t digest = 0;
    std::vector<int64_t> from_at;
    ForEachElement(box, shape, from_strides, [&](int64_t p, int64_t at) {
      digest += ReferenceDigest(from.data() + at * element_bytes, element_bytes, p, 1);
      from_at.push_back(at);
    });
    size_t i = 0;
    ForEachElement(box, shape, to_strides, [&](int64_t, int64_t at) {
      std::memcpy(want.data() + at * element_bytes, from.data() + from_at[i++] * element_bytes,
                  static_cast<size_t>(element_bytes));
    });
    REQUIRE(DigestBox(from.data(), from_strides, box, shape, element_bytes) == digest);
    const StoreMode mode = round % 3 == 0 ? StoreMode::kStreaming : StoreMode::kCached;
    REQUIRE(CopyBox(&plain, to_strides, from, from_strides, box, shape, element_bytes,
                    {.mode = mode}) == 0);
    REQUIRE(plain == want);
    REQUIRE(CopyBox(&fused, to_strides, from, from_strides, box, shape, element_bytes,
                    {.with_digest = true, .mode = mode}) == digest);
    REQUIRE(fused == want);
    REQUIRE(DigestBox(fused.data(), to_strides, box, shape, element_bytes) == digest);
  }
}

TEST_CASE("Empty boxes copy nothing and digest to zero") {
  const Dims shape = {4, 0};
  CHECK(DigestBox(nullptr, {0, 1}, WholeBox(shape), shape, 2) == 0);
  CHECK(CopyBoxUnfenced(nullptr, {0, 1}, nullptr, {0, 1}, WholeBox(shape), shape, 2,
                        {.with_digest = true}) == 0);
}

// ---- whole transfers ----

// A transfer with its memory, and what the destinations must hold after it.
struct Case {
  Transfer transfer;
  std::vector<std::unique_ptr<Bytes>> memory;
  std::vector<std::pair<Bytes*, Bytes>> want;

  Bytes* Own(Bytes bytes) {
    memory.push_back(std::make_unique<Bytes>(std::move(bytes)));
    return memory.back().get();
  }
};

BoundPiece Bind(int tensor, int element_bytes, const Dims& shape, const Box& box,
                const Dims& strides, Bytes* memory) {
  return {.dtype = TypeOf(element_bytes),
          .shape = shape,
          .box = box,
          .strides = strides,
          .data = memory->data(),
          .name = "tensor." + std::to_string(tensor)};
}

// Adds a piece of `destination` that takes its elements from the source piece `source`.
void AddDestination(Case* c, uint32_t source, uint32_t destination, const Box& box,
                    const Dims& strides) {
  const BoundPiece& from = c->transfer.source[source];
  const auto element_bytes = static_cast<size_t>(ElementBytes(from.dtype));
  Bytes* const memory = c->Own(
      Bytes(static_cast<size_t>(SpanElements(box.extent, strides)) * element_bytes, kPoison));
  auto& pieces = c->transfer.destinations[destination];
  BoundPiece piece = Bind(0, static_cast<int>(element_bytes), from.shape, box, strides, memory);
  piece.name = from.name;
  c->transfer.plan.moves.push_back({.source = 0,
                                    .source_piece = source,
                                    .destination = destination,
                                    .destination_piece = static_cast<uint32_t>(pieces.size()),
                                    .box = box,
                                    .source_byte_offset = Offset(from, box),
                                    .destination_byte_offset = 0});
  Bytes want = *memory;
  std::vector<int64_t> from_at;
  const int64_t start = Offset(from, box);
  ForEachElement(box, from.shape, from.strides,
                 [&](int64_t, int64_t at) { from_at.push_back(at); });
  size_t i = 0;
  ForEachElement(box, from.shape, strides, [&](int64_t, int64_t at) {
    std::memcpy(want.data() + static_cast<size_t>(at) * element_bytes,
                from.data + start + from_at[i++] * static_cast<int64_t>(element_bytes),
                element_bytes);
  });
  c->want.emplace_back(memory, std::move(want));
  pieces.push_back(std::move(piece));
}

// One dense tensor of 2-byte elements that one destination takes whole.
Case SimpleCase(const Dims& shape, std::mt19937_64* random, uint32_t destinations = 1) {
  Case c;
  const Box whole = WholeBox(shape);
  Bytes* const memory = c.Own(RandomBytes(random, static_cast<size_t>(ElementCount(whole)) * 2));
  c.transfer.source.push_back(Bind(0, 2, shape, whole, RowMajorStrides(shape), memory));
  c.transfer.destinations.resize(destinations);
  for (uint32_t d = 0; d < destinations; ++d) {
    AddDestination(&c, 0, d, whole, RowMajorStrides(shape));
  }
  c.transfer.label = "version 3, part 7";
  return c;
}

Case RandomCase(std::mt19937_64* random) {
  Case c;
  const auto destinations = static_cast<size_t>(Pick(random, 1, 4));
  c.transfer.destinations.resize(destinations);
  c.transfer.label = "random";
  const int64_t tensors = Pick(random, 0, 6);
  for (int64_t t = 0; t < tensors; ++t) {
    const int element_bytes = 1 << Pick(random, 0, 3);
    Dims shape = RandomShape(random);
    // Now and then the shape is larger than a chunk.
    if (Pick(random, 0, 4) == 0) shape = {Pick(random, 300, 600), Pick(random, 1, 3), 257};
    const Box box = RandomBox(random, shape);
    const Dims strides = RandomStrides(random, box.extent, Pick(random, 0, 4) == 0);
    Bytes* const memory =
        c.Own(RandomBytes(random, static_cast<size_t>(SpanElements(box.extent, strides)) *
                                      static_cast<size_t>(element_bytes)));
    c.transfer.source.push_back(
        Bind(static_cast<int>(t), element_bytes, shape, box, strides, memory));
    for (uint32_t d = 0; d < destinations; ++d) {
      Box part = RandomBox(random, box.extent);
      for (size_t i = 0; i < part.offset.size(); ++i) part.offset[i] += box.offset[i];
      if (Pick(random, 0, 1) == 0) part = box;
      AddDestination(&c, static_cast<uint32_t>(t), d, part,
                     RandomStrides(random, part.extent, Pick(random, 0, 5) == 0));
    }
  }
  return c;
}

void CheckBytes(const Case& c) {
  for (const auto& [memory, want] : c.want) REQUIRE(*memory == want);
}

TEST_CASE("Random programs write every byte they should and no other, whatever the verification") {
  std::mt19937_64 random(kSeed + 1);
  for (const int threads : {1, 3}) {
    const auto transport = MakeHostTransport({.threads = threads});
    for (int round = 0; round < 60; ++round) {
      INFO("seed " << kSeed + 1 << ", threads " << threads << ", round " << round);
      Case c = RandomCase(&random);
      const auto verification = static_cast<Verification>(round % 3 + 1);
      c.transfer.verification = verification;
      if (round % 2 == 0) c.transfer.readback_now = {true};
      const TransferResult result = Run(transport.get(), c.transfer);
      INFO(result.status.ToString());
      REQUIRE(result.status.ok());
      REQUIRE(result.failed_destination == -1);
      CheckBytes(c);
      std::vector<int64_t> bytes(c.transfer.destinations.size());
      for (const CopyMove& move : c.transfer.plan.moves) {
        bytes[move.destination] +=
            ElementCount(move.box) * ElementBytes(c.transfer.source[move.source_piece].dtype);
      }
      REQUIRE(result.bytes_written == bytes);
      if (verification != Verification::kReadback) {
        REQUIRE(result.expected.empty());
        continue;
      }
      size_t pieces = 0;
      for (size_t d = 0; d < c.transfer.destinations.size(); ++d) {
        if (d < c.transfer.readback_now.size() && c.transfer.readback_now[d]) continue;
        pieces += c.transfer.destinations[d].size();
      }
      REQUIRE(result.expected.size() == pieces);
      REQUIRE(Run(transport.get(), JobOf(c.transfer, result)).status.ok());
    }
  }
}

TEST_CASE("Sums of several transfers into one piece add up to the digest of the whole piece") {
  std::mt19937_64 random(kSeed + 2);
  const auto transport = MakeHostTransport({.threads = 2});
  const Dims shape = {700, 300};
  Case c = SimpleCase(shape, &random);
  c.transfer.verification = Verification::kReadback;
  uint64_t sum = 0;
  for (const Box& part : {Box{{0, 0}, {333, 300}}, Box{{333, 0}, {1, 300}}, Box{{334, 0}, {366, 7}},
                          Box{{334, 7}, {366, 293}}}) {
    Transfer transfer = c.transfer;
    CopyMove& move = transfer.plan.moves[0];
    move.box = part;
    move.source_byte_offset = Offset(transfer.source[0], part);
    move.destination_byte_offset = Offset(transfer.destinations[0][0], part);
    const TransferResult result = Run(transport.get(), transfer);
    REQUIRE(result.status.ok());
    REQUIRE(result.expected.size() == 1);
    sum += result.expected[0].digest;
  }
  CheckBytes(c);
  CHECK(sum == ReferenceDigest(c.transfer.source[0].data, 2, 0, 700 * 300));
}

// ---- planted faults (P1) ----

class FlipOneByte : public TransferFaults {
 public:
  explicit FlipOneByte(int at_call) : at_call_(at_call) {}
  void AfterStore(char* data, int64_t bytes) override {
    if (calls_++ == at_call_) data[bytes / 2] = static_cast<char>(data[bytes / 2] ^ 4);
  }

 private:
  const int at_call_;
  std::atomic<int> calls_{0};
};

TEST_CASE("A byte flipped in a destination after the copy is caught by readback") {
  std::mt19937_64 random(kSeed + 3);
  for (int at_call = 0; at_call < 4; ++at_call) {
    FlipOneByte faults(at_call);
    const auto transport = MakeHostTransport({.threads = 2, .faults = &faults});
    Case c = SimpleCase({1000, 512}, &random, 2);  // 1 MB: at least two chunks, two destinations
    c.transfer.verification = Verification::kReadback;
    const TransferResult result = Run(transport.get(), c.transfer);
    REQUIRE(result.status.ok());
    const ReadbackResult readback = Run(transport.get(), JobOf(c.transfer, result));
    INFO("call " << at_call);
    const bool flipped =
        *c.want[0].first != c.want[0].second || *c.want[1].first != c.want[1].second;
    REQUIRE(flipped);
    REQUIRE(readback.status.code() == absl::StatusCode::kDataLoss);
    REQUIRE(std::string(readback.status.message()).find("tensor.0") != std::string::npos);
    REQUIRE(readback.failed_destinations.size() == 1);
    const uint32_t bad = *c.want[0].first != c.want[0].second ? 0 : 1;
    REQUIRE(readback.failed_destinations[0] == bad);
  }
}

TEST_CASE("A byte flipped in a staging slot is caught inside the transfer") {
  std::mt19937_64 random(kSeed + 4);
  FlipOneByte faults(1);
  const auto transport = MakeHostTransport({.threads = 1, .faults = &faults});
  Case c = SimpleCase({64, 64}, &random, 2);
  c.transfer.verification = Verification::kReadback;
  c.transfer.readback_now = {false, true};
  const TransferResult result = Run(transport.get(), c.transfer);
  REQUIRE(result.status.code() == absl::StatusCode::kDataLoss);
  CHECK(result.failed_destination == 1);
  const std::string message(result.status.message());
  CHECK(message.find("tensor.0") != std::string::npos);
  CHECK(message.find("destination 1") != std::string::npos);
  CHECK(message.find("version 3, part 7") != std::string::npos);
  REQUIRE(result.expected.size() == 1);
  CHECK(result.expected[0].destination == 0);
}

// A case whose program reads one element too far.
Case WrongSourceOffset(std::mt19937_64* random) {
  Case c = SimpleCase({600, 512}, random, 2);
  CopyMove& move = c.transfer.plan.moves[1];
  move.box = {{0, 0}, {500, 512}};
  move.source_byte_offset += 2;
  return c;
}

TEST_CASE("A wrong source offset in a program is caught by transfer verification") {
  std::mt19937_64 random(kSeed + 5);
  const auto transport = MakeHostTransport({.threads = 2});
  Case c = WrongSourceOffset(&random);
  c.transfer.verification = Verification::kTransfer;
  const TransferResult result = Run(transport.get(), c.transfer);
  REQUIRE(result.status.code() == absl::StatusCode::kDataLoss);
  CHECK(result.failed_destination == 1);
}

TEST_CASE("A wrong source offset in a program is caught by readback") {
  std::mt19937_64 random(kSeed + 6);
  const auto transport = MakeHostTransport({.threads = 2});
  for (const bool now : {false, true}) {
    Case c = WrongSourceOffset(&random);
    c.transfer.verification = Verification::kReadback;
    c.transfer.readback_now = {now, now};
    const TransferResult result = Run(transport.get(), c.transfer);
    if (now) {
      CHECK(result.status.code() == absl::StatusCode::kDataLoss);
      CHECK(result.failed_destination == 1);
      continue;
    }
    REQUIRE(result.status.ok());
    ReadbackJob job = JobOf(c.transfer, result);
    // Only the moved box is compared, because the rest of the piece was not written.
    job.pieces[1].piece.box = c.transfer.plan.moves[1].box;
    CHECK(Run(transport.get(), job).failed_destinations == std::vector<uint32_t>{1});
  }
}

TEST_CASE("A wrong destination offset in a program is caught by readback") {
  std::mt19937_64 random(kSeed + 7);
  const auto transport = MakeHostTransport({.threads = 2});
  Case c = SimpleCase({600, 512}, &random);
  CopyMove& move = c.transfer.plan.moves[0];
  move.box = {{0, 0}, {500, 512}};
  move.destination_byte_offset += 1024;
  c.transfer.verification = Verification::kReadback;
  const TransferResult result = Run(transport.get(), c.transfer);
  REQUIRE(result.status.ok());
  ReadbackJob job = JobOf(c.transfer, result);
  job.pieces[0].piece.box = move.box;
  CHECK(Run(transport.get(), job).status.code() == absl::StatusCode::kDataLoss);
}

TEST_CASE("Programs that leave their pieces are refused and nothing is written") {
  std::mt19937_64 random(kSeed + 8);
  const auto transport = MakeHostTransport({.threads = 1});
  const Case good = SimpleCase({20, 30}, &random);
  for (const auto& [what, transfer] : Spoilt(good.transfer)) {
    INFO(what);
    const TransferResult result = Run(transport.get(), transfer);
    CHECK(result.status.code() == absl::StatusCode::kInternal);
    CHECK(result.bytes_written == std::vector<int64_t>{0});
    const Bytes& memory = *good.want[0].first;
    CHECK(std::all_of(memory.begin(), memory.end(), [](char c) { return c == kPoison; }));
  }
}

// ---- order, ends, lifetimes ----

TEST_CASE("Transfers that overlap each end exactly once and leave the right bytes") {
  std::mt19937_64 random(kSeed + 9);
  Mutex mutex;
  std::vector<int> done(40, 0);
  std::vector<Case> cases;
  for (size_t i = 0; i < done.size(); ++i) {
    cases.push_back(i % 4 == 0 ? SimpleCase({900, 512}, &random) : RandomCase(&random));
    cases.back().transfer.verification = static_cast<Verification>(i % 3 + 1);
  }
  {
    const auto transport = MakeHostTransport({.threads = 4});
    for (size_t i = 0; i < cases.size(); ++i) {
      transport->Submit(cases[i].transfer, [&, i](TransferResult result) {
        MutexLock lock(&mutex);
        if (result.status.ok()) ++done[i];
      });
    }
    // The destructor waits for all of them.
  }
  MutexLock lock(&mutex);
  CHECK(done == std::vector<int>(cases.size(), 1));
  for (const Case& c : cases) CheckBytes(c);
}

TEST_CASE("With one worker, transfers and readbacks end in the order of submission") {
  std::mt19937_64 random(kSeed + 10);
  std::vector<int> order;
  {
    const auto transport = MakeHostTransport({.threads = 1});
    for (int i = 0; i < 20; ++i) {
      if (i % 3 == 0) {
        transport->Submit(ReadbackJob(), [&, i](const ReadbackResult&) { order.push_back(i); });
      } else {
        Case c = SimpleCase({i % 2 == 0 ? 400 : 2, 512}, &random);
        auto memory = std::make_shared<Case>(std::move(c));
        Transfer transfer = memory->transfer;
        transfer.keep_alive = {memory};
        transport->Submit(std::move(transfer),
                          [&, i](const TransferResult&) { order.push_back(i); });
      }
    }
  }
  CHECK(order.size() == 20);
  CHECK(std::is_sorted(order.begin(), order.end()));
}

TEST_CASE("A transfer without moves still ends, on a thread of the transport") {
  const auto transport = MakeHostTransport({.threads = 1});
  Transfer transfer;
  transfer.destinations.resize(3);
  transfer.verification = Verification::kReadback;
  const TransferResult result = Run(transport.get(), transfer);
  CHECK(result.status.ok());
  CHECK(result.bytes_written == std::vector<int64_t>(3, 0));
  CHECK(Run(transport.get(), ReadbackJob()).status.ok());

  std::promise<bool> same;
  auto future = same.get_future();
  const auto caller = std::this_thread::get_id();
  transport->Submit(transfer, [&](const TransferResult&) {
    same.set_value(std::this_thread::get_id() == caller);
  });
  REQUIRE(future.wait_for(kWait) == std::future_status::ready);
  CHECK_FALSE(future.get());
}

// Notes whether the memory lived at each store.
struct WatchedStores : TransferFaults {
  void AfterStore(char* /*data*/, int64_t /*bytes*/) override {
    if (memory.expired()) kept = false;
  }
  std::weak_ptr<Case> memory;
  std::atomic<bool> kept{true};
};

TEST_CASE("Memory is kept until the last byte was written, and let go before `done` (P6, P8)") {
  std::mt19937_64 random(kSeed + 11);
  WatchedStores watch;
  const auto transport = MakeHostTransport({.threads = 2, .faults = &watch});
  auto memory = std::make_shared<Case>(SimpleCase({1500, 512}, &random));
  watch.memory = memory;
  Transfer transfer = memory->transfer;
  transfer.keep_alive = {std::move(memory)};
  std::promise<bool> released;
  auto future = released.get_future();
  transport->Submit(std::move(transfer), [&](const TransferResult& result) {
    released.set_value(result.status.ok() && watch.memory.expired());
  });
  REQUIRE(future.wait_for(kWait) == std::future_status::ready);
  CHECK(future.get());
  CHECK(watch.kept);
}

TEST_CASE("A done callback may submit more work") {
  std::mt19937_64 random(kSeed + 12);
  Case c = SimpleCase({1000, 512}, &random);
  c.transfer.verification = Verification::kReadback;
  ReadbackResult readback;
  readback.status = absl::UnknownError("never called");
  {
    const auto owner = MakeHostTransport({.threads = 2});
    Transport* const transport = owner.get();
    transport->Submit(c.transfer, [&, transport](const TransferResult& result) {
      transport->Submit(JobOf(c.transfer, result),
                        [&](ReadbackResult r) { readback = std::move(r); });
    });
  }
  CHECK(readback.status.ok());
}

}  // namespace
}  // namespace refitd
