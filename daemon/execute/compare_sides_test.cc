#include "daemon/execute/compare_sides.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "transport/base/eventually_testing.h"
#include "transport/base/failure.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"
#include "transport/host/host_transport.h"
#include "transport/host/memory.h"
#include "transport/unprepared_transport_testing.h"

namespace refitd {
namespace {

using Catch::Contains;
using Ranges = std::vector<ByteRange>;

constexpr RegionId kFront{1};
constexpr RegionId kBack{2};

// A layout of one region of pieces, each of a tensor of its own.
Layout LayoutOf(const std::vector<std::pair<Piece, DType>>& pieces) {
  Layout layout;
  layout.backs = {{kFront, kBack}};
  for (const auto& [piece, dtype] : pieces) {
    Piece& added = layout.pieces.emplace_back(piece);
    added.tensor = static_cast<uint32_t>(layout.tensors.size());
    added.region = kFront;
    layout.tensors.push_back({"t" + std::to_string(added.tensor), dtype, piece.box.extent});
  }
  return layout;
}
std::pair<Piece, DType> At(int64_t byte_offset, Dims extent, Dims strides,
                           DType dtype = DType::kUint8) {
  Piece piece;
  piece.box = WholeBox(extent);
  piece.byte_offset = byte_offset;
  piece.strides = std::move(strides);
  return {piece, dtype};
}
Ranges UnnamedOf(const Layout& layout, int64_t bytes) {
  return BytesOutside(layout, [bytes](RegionId) { return bytes; })->at(0);
}

TEST_CASE("outside bytes lie before, between and behind pieces, and between their rows") {
  CHECK(UnnamedOf(LayoutOf({}), 100) == Ranges{{0, 100}});
  CHECK(UnnamedOf(LayoutOf({At(0, {100}, {1})}), 100).empty());
  CHECK(UnnamedOf(LayoutOf({At(8, {4}, {1}, DType::kFloat32), At(40, {4}, {1})}), 64) ==
        Ranges{{0, 8}, {24, 40}, {44, 64}});
  // Rows of 3 elements, 5 apart; a transposed dense matrix; one without elements.
  CHECK(UnnamedOf(LayoutOf({At(0, {2, 3}, {5, 1}, DType::kFloat16)}), 20) ==
        Ranges{{6, 10}, {16, 20}});
  CHECK(UnnamedOf(LayoutOf({At(4, {3, 4}, {1, 3})}), 16) == Ranges{{0, 4}});
  CHECK(UnnamedOf(LayoutOf({At(4, {0, 4}, {4, 1})}), 16) == Ranges{{0, 16}});
  CHECK(UnnamedOf(LayoutOf({At(4, {}, {}, DType::kFloat32)}), 16) == Ranges{{0, 4}, {8, 16}});
}

TEST_CASE("of pieces with too many rows what lies between them counts as named") {
  const int64_t rows = kMaxNamedRuns + 1;
  CHECK(UnnamedOf(LayoutOf({At(0, {rows}, {2}), At(2 * rows + 1, {4}, {1})}), 2 * rows + 9) ==
        Ranges{{2 * rows - 1, 2 * rows + 1}, {2 * rows + 5, 2 * rows + 9}});
}

TEST_CASE("random layouts name the bytes that their elements have, and no others") {
  std::mt19937 random(GENERATE(range(0U, 40U)));
  const auto in = [&random](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  std::vector<std::pair<Piece, DType>> pieces;
  std::string named(4096, '.');
  for (int64_t at = 0; at < 2048;) {
    const DType dtype = in(0, 1) == 0 ? DType::kUint8 : DType::kFloat32;
    const int64_t size = ElementBytes(dtype);
    at = (at + size - 1) / size * size;
    Dims extent = {in(1, 4), in(1, 4), in(1, 3)};
    // The dimensions in a random order of memory, each with a random gap.
    Dims strides(3);
    std::vector<size_t> order = {0, 1, 2};
    std::shuffle(order.begin(), order.end(), random);
    int64_t step = 1;
    for (const size_t d : order) {
      strides[d] = step + (in(0, 2) == 0 ? in(1, 3) : 0);
      step = strides[d] * extent[d];
    }
    for (int64_t i = 0; i < extent[0] * extent[1] * extent[2]; ++i) {
      const int64_t element = i / (extent[1] * extent[2]) * strides[0] +
                              i / extent[2] % extent[1] * strides[1] + i % extent[2] * strides[2];
      named.replace(static_cast<size_t>(at + element * size), static_cast<size_t>(size),
                    static_cast<size_t>(size), 'x');
    }
    pieces.push_back(At(at, extent, strides, dtype));
    at += step * size + in(0, 9);
  }
  std::string complement(named.size(), 'x');
  for (const ByteRange& range : UnnamedOf(LayoutOf(pieces), 4096)) {
    REQUIRE(range.begin < range.end);
    const auto bytes = static_cast<size_t>(range.end - range.begin);
    complement.replace(static_cast<size_t>(range.begin), bytes, bytes, '.');
  }
  CHECK(complement == named);
}

// Two sides of memory.
struct Memory {
  static constexpr int64_t kBytes = 200'000;
  std::vector<char> front = std::vector<char>(kBytes, 'a');
  std::vector<char> back = std::vector<char>(kBytes, 'a');

  absl::Status Compare(const Ranges& ranges) {
    Mutex mutex;
    std::optional<absl::Status> answer;
    const auto alive = std::make_shared<int>();
    CompareSides(transport.get(),
                 {{{kFront, kBack},
                   {front.data(), kBytes, alive, {}},
                   {back.data(), kBytes, alive, {}},
                   nullptr,
                   nullptr,
                   ranges}},
                 "instance i rank 0", [&](absl::Status status) {
                   MutexLock lock(&mutex);
                   answer = std::move(status);
                 });
    REQUIRE(Eventually([&] {
      MutexLock lock(&mutex);
      return answer.has_value();
    }));
    CHECK(alive.use_count() == 1);  // P8
    return *answer;
  }
  std::unique_ptr<Transport> transport = MakeHostTransport({.threads = 2});
};

TEST_CASE("bytes that differ where no tensor lies are found, and others are not looked at") {
  Memory memory;
  const Ranges ranges = {{3, 10}, {64, 150'000}, {199'992, 200'000}};
  CHECK(memory.Compare({}).ok());
  CHECK(memory.Compare(ranges).ok());
  for (const size_t at : {0, 2, 10, 63, 150'000, 199'991}) memory.back[at] = 'b';
  CHECK(memory.Compare(ranges).ok());
  const auto [at, where] =
      GENERATE(table<size_t, std::string>({{3, "bytes 3 to 10"},
                                           {9, "bytes 3 to 10"},
                                           {64, "bytes 64 to 65600"},
                                           {65'600, "bytes 65600 to 131136"},
                                           {149'999, "bytes 131136 to 150000"},
                                           {199'999, "bytes 199992 to 200000"}}));
  (GENERATE(false, true) ? memory.front : memory.back)[at] ^= 1;
  const absl::Status differ = memory.Compare(ranges);
  CHECK(absl::IsFailedPrecondition(differ));
  CHECK_THAT(Message(differ),
             Contains("region 1 and its back 2 of instance i rank 0 differ") && Contains(where));
  CHECK(FailureOf(differ).field == "layout.backs");
}

// Counts the pieces of the largest transfer.
class CountingTransport final : public UnpreparedTransport {
 public:
  using UnpreparedTransport::Submit;
  void Submit(Transfer transfer, std::function<void(TransferResult)> done) override {
    {
      MutexLock lock(&mutex_);
      most_ = std::max(most_, transfer.source.size());
    }
    host_->Submit(std::move(transfer), std::move(done));
  }
  void Submit(ReadbackJob job, std::function<void(ReadbackResult)> done) override {
    host_->Submit(std::move(job), std::move(done));
  }
  size_t most() {
    MutexLock lock(&mutex_);
    return most_;
  }

 private:
  const std::unique_ptr<Transport> host_ = MakeHostTransport({.threads = 2});
  Mutex mutex_;
  size_t most_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Two sides of memory in sealed memfds, which have no pages yet.
struct Files {
  struct Side {
    explicit Side(int64_t bytes)
        : fd(std::make_shared<const UniqueFd>(CreateSealedMemfd("side", bytes).value())),
          mapping(HostRegion::Map(*fd, bytes, Access::kReadWrite, /*populate=*/false).value()) {}
    MemorySpan span() const { return {mapping->data(), mapping->bytes(), mapping, {}}; }
    char& operator[](int64_t at) const { return mapping->data()[at]; }
    int64_t blocks() const {
      struct stat file {};
      REQUIRE(fstat(fd->get(), &file) == 0);
      return file.st_blocks;
    }
    // All bytes; makes no pages.
    std::string Read() const {
      std::string bytes(static_cast<size_t>(mapping->bytes()), '?');
      REQUIRE(pread(fd->get(), bytes.data(), bytes.size(), 0) == mapping->bytes());
      return bytes;
    }

    std::shared_ptr<const UniqueFd> fd;
    std::shared_ptr<const HostRegion> mapping;
  };
  explicit Files(int64_t bytes) : front(bytes), back(bytes) {}

  absl::Status Compare(const Ranges& ranges) {
    Mutex mutex;
    std::optional<absl::Status> answer;
    const int64_t pages = front.blocks() + back.blocks();
    CompareSides(&transport,
                 {{{kFront, kBack}, front.span(), back.span(), front.fd, back.fd, ranges}},
                 "instance i rank 0", [&](absl::Status status) {
                   MutexLock lock(&mutex);
                   answer = std::move(status);
                 });
    REQUIRE(Eventually([&] {
      MutexLock lock(&mutex);
      return answer.has_value();
    }));
    CHECK(front.blocks() + back.blocks() == pages);
    CHECK(transport.most() <= 2 * kComparedChunks);
    return *answer;
  }

  CountingTransport transport;
  Side front;
  Side back;
};

TEST_CASE("holes of sparse sides are zeros, and are not filled (P10)") {
  constexpr int64_t kSize = int64_t{1} << 30;
  Files files(kSize);
  const Ranges all = {{0, kSize}};
  CHECK(files.Compare(all).ok());
  files.front[5 * 4096 + 7] = files.back[5 * 4096 + 7] = 'x';
  files.front[kSize / 2] = 0;  // a page of zeros beside a hole
  files.back[kSize - 1] = 0;
  CHECK(files.Compare(all).ok());
  const bool in_back = GENERATE(false, true);
  (in_back ? files.back : files.front)[kSize / 2 + 4096 + 1] = 'x';
  const absl::Status differ = files.Compare(all);
  CHECK(absl::IsFailedPrecondition(differ));
  CHECK_THAT(Message(differ), Contains("to 536879104, where no box"));
  CHECK(files.Compare({{0, kSize / 2 + 4097}, {kSize / 2 + 4098, kSize}}).ok());
}

TEST_CASE("the chunks of a large arena were listed all at once (P10)") {
  constexpr auto kRanges = static_cast<int64_t>(2 * kComparedChunks + 10);
  Ranges ranges;
  for (int64_t i = 0; i < kRanges; ++i) ranges.push_back({8 * i, 8 * i + 4});
  Files files(8 * kRanges);
  std::memset(&files.front[0], 'a', 8 * kRanges);
  std::memset(&files.back[0], 'a', 8 * kRanges);
  CHECK(files.Compare(ranges).ok());
  const int64_t at = GENERATE(0, kRanges / 2, kRanges - 1);
  files.back[8 * at + 3] = 'b';
  CHECK_THAT(Message(files.Compare(ranges)),
             Contains(fmt::format("differ within bytes {} to {}", 8 * at, 8 * at + 4)));
}

TEST_CASE("of random pages and ranges, those that differ are found") {
  std::mt19937 random(GENERATE(range(0U, 40U)));
  const auto in = [&random](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  constexpr int64_t kSize = 64 * 4096;
  Files files(kSize);
  const int64_t density = in(1, 6);
  for (int64_t page = 0; page < 64; ++page) {
    for (const Files::Side* side : {&files.front, &files.back}) {
      if (in(0, density) == 0) (*side)[page * 4096 + in(0, 4095)] = 0;
    }
    if (in(0, density) > 0) continue;
    const int64_t at = page * 4096 + in(0, 4095);
    files.front[at] = files.back[at] = 'x';
  }
  if (in(0, 1) == 0) (in(0, 1) == 0 ? files.front : files.back)[in(0, kSize - 1)] ^= 3;
  Ranges ranges;
  for (int64_t at = in(0, 9000); at < kSize; at += in(1, 9000)) {
    const int64_t end = std::min(kSize, at + in(1, 40'000));
    ranges.push_back({at, end});
    at = end;
  }
  const std::string front = files.front.Read();
  const std::string back = files.back.Read();
  const bool equal = std::all_of(ranges.begin(), ranges.end(), [&](const ByteRange& range) {
    const auto begin = static_cast<size_t>(range.begin);
    const auto bytes = static_cast<size_t>(range.end - range.begin);
    return front.compare(begin, bytes, back, begin, bytes) == 0;
  });
  CHECK(files.Compare(ranges).ok() == equal);
}

}  // namespace
}  // namespace refitd
