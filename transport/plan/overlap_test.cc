// Members' memory that overlaps is refused, and only that.
#include "transport/plan/overlap.h"

#include <catch2/catch.hpp>

namespace refitd {
namespace {

using Catch::Matchers::Contains;
using Kind = MemoryOrigin::Kind;

const RegionId kRegion(1);

Piece PieceAt(Box box, int64_t byte_offset, Dims strides) {
  Piece piece;
  piece.box = std::move(box);
  piece.region = kRegion;
  piece.byte_offset = byte_offset;
  piece.strides = std::move(strides);
  return piece;
}

// A member with one float32 tensor of 8 rows and 4 columns.
PlacedLayout Member(std::string label, bool destination, Piece piece,
                    MemoryOrigin origin = {Kind::kFile, 1, 7, 0}, std::string tensor = "w") {
  Layout layout;
  layout.tensors = {{std::move(tensor), DType::kFloat32, {8, 4}}};
  layout.pieces = {std::move(piece)};
  return {std::make_shared<const Layout>(std::move(layout)),
          {{kRegion, origin}},
          std::move(label),
          destination};
}

const Box kAll{{0, 0}, {8, 4}};

TEST_CASE("a source and a destination in one memory, shifted by 64 bytes, are refused by name") {
  const absl::Status status =
      CheckOverlap({Member("trainer rank 0", false, PieceAt(kAll, 0, {4, 1})),
                    Member("engine a rank 0", true, PieceAt(kAll, 64, {4, 1}))});
  CHECK(status.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(std::string(status.message()), Contains("tensor w of trainer rank 0") &&
                                                Contains("tensor w of engine a rank 0") &&
                                                Contains("bytes 0 to 128, and 64 to 192"));
}

TEST_CASE("the same elements at the same places may share memory, also as a part") {
  const PlacedLayout engine = Member("engine", true, PieceAt(kAll, 64, {4, 1}));
  CHECK(CheckOverlap({Member("trainer", false, PieceAt(kAll, 64, {4, 1})), engine}).ok());
  // Rows 2 and 3, where the engine has them, and one row beside.
  const Box rows{{2, 0}, {2, 4}};
  CHECK(CheckOverlap({Member("trainer", false, PieceAt(rows, 64 + 32, {4, 1})), engine}).ok());
  CHECK(!CheckOverlap({Member("trainer", false, PieceAt(rows, 64 + 48, {4, 1})), engine}).ok());
  // Other strides, another tensor, another dtype's bytes.
  const PlacedLayout transposed = Member("trainer", false, PieceAt(kAll, 64, {1, 8}));
  CHECK(!CheckOverlap({transposed, engine}).ok());
  const PlacedLayout other =
      Member("trainer", false, PieceAt(kAll, 64, {4, 1}), {Kind::kFile, 1, 7, 0}, "v");
  CHECK(!CheckOverlap({other, engine}).ok());
}

TEST_CASE("two columns of one matrix interleave and share nothing") {
  const Box left{{0, 0}, {8, 2}};
  const Box right{{0, 2}, {8, 2}};
  CHECK(CheckOverlap({Member("trainer", false, PieceAt(left, 0, {4, 1})),
                      Member("engine", true, PieceAt(right, 8, {4, 1}))})
            .ok());
  CHECK(!CheckOverlap({Member("trainer", false, PieceAt(left, 0, {4, 1})),
                       Member("engine", true, PieceAt(right, 4, {4, 1}))})
             .ok());
}

TEST_CASE("memory is one by device and inode, by block, or by process and address") {
  const auto refused = [](MemoryOrigin source, MemoryOrigin destination) {
    const absl::Status status =
        CheckOverlap({Member("trainer", false, PieceAt(kAll, 0, {4, 1}), source),
                      Member("engine", true, PieceAt(kAll, 0, {4, 1}), destination)});
    CHECK((status.ok() || status.code() == absl::StatusCode::kFailedPrecondition));
    return !status.ok();
  };
  CHECK(refused({Kind::kFile, 1, 7, 0}, {Kind::kFile, 1, 7, 64}));
  CHECK(!refused({Kind::kFile, 1, 7, 0}, {Kind::kFile, 1, 8, 64}));
  CHECK(!refused({Kind::kFile, 1, 7, 0}, {Kind::kFile, 2, 7, 64}));
  CHECK(!refused({Kind::kFile, 1, 7, 0}, {Kind::kFile, 1, 7, 128}));
  CHECK(refused({Kind::kBlock, 0, 4096, 0}, {Kind::kBlock, 0, 4096, 4}));
  CHECK(!refused({Kind::kBlock, 0, 4096, 0}, {Kind::kBlock, 0, 8192, 4}));
  CHECK(refused({Kind::kExported, 0, 55, 4096}, {Kind::kExported, 0, 55, 4160}));
  CHECK(!refused({Kind::kExported, 0, 55, 4096}, {Kind::kExported, 0, 56, 4160}));
  CHECK(!refused({}, {}));
}

TEST_CASE("two destinations that share other bytes are refused as well") {
  const PlacedLayout a = Member("engine a", true, PieceAt(kAll, 0, {4, 1}));
  CHECK(CheckOverlap({a, Member("engine b", true, PieceAt(kAll, 0, {4, 1}))}).ok());
  CHECK(!CheckOverlap({a, Member("engine b", true, PieceAt(kAll, 4, {4, 1}))}).ok());
  // Sources may share what they like.
  CHECK(CheckOverlap({Member("trainer 0", false, PieceAt(kAll, 0, {4, 1})),
                      Member("trainer 1", false, PieceAt(kAll, 4, {4, 1}))})
            .ok());
}

TEST_CASE("exported memory of other processes on the same GPU can't be told apart") {
  const MemoryOrigin unknown{Kind::kUnknown, 0, 0, 0};
  const auto sources = [](MemoryOrigin source, MemoryOrigin destination) {
    return UnknownSources({Member("trainer", false, PieceAt(kAll, 0, {4, 1}), source),
                           Member("engine", true, PieceAt(kAll, 0, {4, 1}), destination)})[0]
        .size();
  };
  CHECK(sources(unknown, unknown) == 1);
  CHECK(sources({Kind::kExported, 0, 55, 0}, {Kind::kExported, 0, 56, 0}) == 1);
  CHECK(sources({Kind::kExported, 0, 55, 0}, {Kind::kExported, 0, 55, 0}) == 0);
  CHECK(sources({Kind::kUnknown, 1, 0, 0}, unknown) == 0);  // another GPU
  CHECK(sources({Kind::kBlock, 0, 4096, 0}, unknown) == 0);
  CHECK(sources({Kind::kFile, 1, 7, 0}, {Kind::kFile, 1, 7, 0}) == 0);
}

TEST_CASE("a pushed range in exported memory of another process can't be looked up") {
  const DestinationPlaces places(
      {Member("engine", true, PieceAt(kAll, 0, {4, 1}), {Kind::kExported, 0, 55, 0}),
       Member("engine on the host", true, PieceAt(kAll, 0, {4, 1}))});
  CHECK(places.IsUnknown({Kind::kUnknown, 0, 0, 0}));
  CHECK(places.IsUnknown({Kind::kExported, 0, 56, 0}));
  CHECK(!places.IsUnknown({Kind::kExported, 0, 55, 0}));
  CHECK(!places.IsUnknown({Kind::kUnknown, 1, 0, 0}));  // another GPU
  CHECK(!places.IsUnknown({Kind::kBlock, 0, 4096, 0}));
  CHECK(!places.IsUnknown({Kind::kFile, 1, 7, 0}));
}

TEST_CASE("a pushed range is looked up among the destinations") {
  const DestinationPlaces places({Member("engine", true, PieceAt(kAll, 64, {4, 1}))});
  const TensorSpec w{"w", DType::kFloat32, {8, 4}};
  const MemoryOrigin file{Kind::kFile, 1, 7, 0};
  CHECK(places.Shares(file));
  CHECK(!places.Shares({Kind::kFile, 1, 8, 0}));
  CHECK(!places.Check(w, kAll, file, "trainer rank 0").ok());
  CHECK(places.Check(w, kAll, {Kind::kFile, 1, 7, 64}, "trainer rank 0").ok());
  CHECK(places.Check(w, kAll, {Kind::kFile, 1, 7, 192}, "trainer rank 0").ok());
  const Box rows{{4, 0}, {4, 4}};
  CHECK(places.Check(w, rows, {Kind::kFile, 1, 7, 128}, "trainer rank 0").ok());
  CHECK(!places.Check({"v", DType::kFloat32, {8, 4}}, rows, {Kind::kFile, 1, 7, 128}, "t").ok());
}

}  // namespace
}  // namespace refitd
