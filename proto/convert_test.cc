#include "proto/convert.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cctype>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "transport/base/status.h"

namespace refitd {
namespace {

using absl::StatusCode;
using Catch::Matchers::Contains;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

Layout SomeLayout(int tensors) {
  Layout layout;
  layout.binding_generation = 3;
  int64_t offset = 0;
  for (int i = 0; i < tensors; ++i) {
    layout.tensors.push_back({"layer." + std::to_string(i), DType::kBFloat16, {4, 6}});
    Piece piece;
    piece.tensor = static_cast<uint32_t>(i);
    piece.box = Box{{0, 3}, {4, 3}};
    piece.region = RegionId(1u + static_cast<uint64_t>(i) % 2);
    piece.byte_offset = offset;
    piece.strides = RowMajorStrides(piece.box.extent);
    layout.pieces.push_back(piece);
    offset += 4096;
  }
  return layout;
}

absl::StatusOr<Layout> Decode(const std::vector<v1::LayoutChunk>& chunks) {
  LayoutDecoder decoder;
  for (const v1::LayoutChunk& chunk : chunks) REFITD_RETURN_IF_ERROR(decoder.Add(chunk));
  return std::move(decoder).Finish();
}

// Decodes the chunks, the last of which it marks as the last, as a sender does.
absl::StatusOr<Layout> DecodeWhole(std::vector<v1::LayoutChunk> chunks) {
  chunks.back().set_last(true);
  return Decode(chunks);
}

void CheckSame(const Layout& a, const Layout& b) {
  CHECK(a.tensors == b.tensors);
  CHECK(a.pieces == b.pieces);
  CHECK(a.binding_generation == b.binding_generation);
  CHECK(a.pushed_tensors == b.pushed_tensors);
  CHECK(a.ties == b.ties);
}

// One tensor "w" of float32 [4, 6], and one piece that is the whole tensor.
v1::LayoutChunk OneChunk() {
  v1::LayoutChunk chunk;
  chunk.set_binding_generation(1);
  chunk.add_names("w");
  chunk.add_dtypes(v1::DTYPE_FLOAT32);
  chunk.add_shapes()->add_dims(4);
  chunk.mutable_shapes(0)->add_dims(6);
  chunk.add_piece_tensor(0);
  for (const int64_t n : {0, 0, 4, 6}) chunk.add_piece_boxes(n);
  chunk.add_piece_region(1);
  chunk.add_piece_byte_offset(0);
  return chunk;
}

TEST_CASE("A layout survives the wire whatever the size of its chunks") {
  const Layout layout = SomeLayout(50);
  v1::Lease lease;
  lease.set_token("0123456789abcdef");
  for (const int64_t chunk_bytes : {int64_t{1}, int64_t{100}, int64_t{1000}, int64_t{1} << 20}) {
    const auto chunks = EncodeLayout(layout, lease, chunk_bytes);
    INFO("chunks of " << chunk_bytes << " bytes: " << chunks.size());
    CHECK(chunks.front().lease().token() == lease.token());
    CHECK(chunks.front().piece_strides_size() == 0);
    const auto decoded = Decode(chunks);
    REQUIRE(decoded.ok());
    CheckSame(*decoded, layout);
  }
}

TEST_CASE("Chunks stay below the size asked for, but for the lease and one entry") {
  const auto chunks = EncodeLayout(SomeLayout(1000), v1::Lease(), 2000);
  CHECK(chunks.size() > 10);
  for (const v1::LayoutChunk& chunk : chunks) CHECK(chunk.ByteSizeLong() < 2100);
}

TEST_CASE("Strides travel where any piece is not dense") {
  Layout layout = SomeLayout(3);
  layout.pieces[1].strides = {64, 1};
  const auto decoded = Decode(EncodeLayout(layout, v1::Lease(), 60));
  REQUIRE(decoded.ok());
  CheckSame(*decoded, layout);
}

TEST_CASE("Ties travel, whatever the size of the chunks") {
  Layout layout = SomeLayout(300);
  for (uint32_t i = 1; i < 300; i += 3) layout.ties.push_back({i, i - 1});
  for (const int64_t chunk_bytes : {1, 100, 1 << 20}) {
    const auto decoded = Decode(EncodeLayout(layout, v1::Lease(), chunk_bytes));
    INFO(decoded.status());
    REQUIRE(decoded.ok());
    CheckSame(*decoded, layout);
  }
}

// Half of the tensors are derived.
Layout DerivedLayout() {
  Layout layout = SomeLayout(20);
  for (size_t i = 0; i < layout.tensors.size(); i += 2) {
    const TensorSpec from = {"trainer." + std::to_string(i), DType::kFloat32, {4, 6}};
    layout.tensors.Edit()[i].derived =
        std::make_shared<Derivation>(Derivation{from, DerivedKind::kCast, DerivedRole::kValues});
  }
  return layout;
}

TEST_CASE("Derivations travel, whatever the size of the chunks") {
  const Layout layout = DerivedLayout();
  for (const int64_t chunk_bytes : {int64_t{1}, int64_t{100}, int64_t{1} << 20}) {
    const auto decoded = Decode(EncodeLayout(layout, v1::Lease(), chunk_bytes));
    INFO(decoded.status());
    REQUIRE(decoded.ok());
    CheckSame(*decoded, layout);
    CHECK(decoded->Digest() == layout.Digest());
  }
}

TEST_CASE("Malformed derivations are refused with field and value") {
  const auto error = [](const auto& change) {
    v1::LayoutChunk chunk = OneChunk();
    chunk.add_derived_tensors(0);
    v1::Derivation* const derivation = chunk.add_derivations();
    derivation->set_name("v");
    derivation->set_dtype(v1::DTYPE_FLOAT32);
    derivation->mutable_shape()->add_dims(4);
    derivation->set_kind(v1::DERIVED_KIND_CAST);
    derivation->set_role(v1::DERIVED_ROLE_VALUES);
    change(&chunk);
    const auto decoded = DecodeWhole({chunk});
    return decoded.ok() ? std::string() : std::string(decoded.status().message());
  };
  CHECK(error([](v1::LayoutChunk*) {}) == "");
  CHECK_THAT(error([](v1::LayoutChunk* chunk) { chunk->add_derived_tensors(0); }),
             Contains("layout.derivations has 1 entries where derived_tensors has 2"));
  CHECK_THAT(error([](v1::LayoutChunk* chunk) { chunk->set_derived_tensors(0, 1); }),
             Contains("layout.derived_tensors[0] is 1, of 1 tensors"));
  CHECK_THAT(error([](v1::LayoutChunk* chunk) {
               chunk->add_derived_tensors(0);
               *chunk->add_derivations() = chunk->derivations(0);
             }),
             Contains("layout.derived_tensors[1] is 0, of 1 tensors: they must ascend"));
  CHECK_THAT(error([](v1::LayoutChunk* chunk) {
               chunk->mutable_derivations(0)->set_dtype(v1::DType(99));
             }),
             Contains("layout.derivations.dtypes[0] = 99"));
  CHECK_THAT(error([](v1::LayoutChunk* chunk) {
               chunk->mutable_derivations(0)->mutable_shape()->add_dims(-1);
             }),
             Contains("-1"));
  CHECK_THAT(error([](v1::LayoutChunk* chunk) { chunk->mutable_derivations(0)->set_name(""); }),
             Contains("tensor name is empty"));
  // Numbers that are not known stay so, for ValidateLayout to refuse.
  v1::LayoutChunk chunk = OneChunk();
  chunk.add_derived_tensors(0);
  chunk.add_derivations()->set_name("v");
  chunk.mutable_derivations(0)->set_dtype(v1::DTYPE_FLOAT32);
  for (const int kind : {-1, 0, 6, 261}) {
    chunk.mutable_derivations(0)->set_kind(static_cast<v1::DerivedKind>(kind));
    const auto decoded = DecodeWhole({chunk});
    REQUIRE(decoded.ok());
    CHECK_FALSE(ValidateDerived(decoded->tensors[0]).ok());
  }
}

TEST_CASE("Tensors that are pushed travel, whatever the size of the chunks") {
  Layout layout = SomeLayout(300);
  for (uint32_t i = 0; i < 300; i += 3) layout.pushed_tensors.push_back(i);
  for (const int64_t chunk_bytes : {1, 100, 1 << 20}) {
    const auto decoded = Decode(EncodeLayout(layout, v1::Lease(), chunk_bytes));
    INFO(decoded.status());
    REQUIRE(decoded.ok());
    CheckSame(*decoded, layout);
    CHECK(decoded->Digest() == SomeLayout(300).Digest());
  }
}

TEST_CASE("Scalars and a layout without pieces survive the wire") {
  Layout layout;
  layout.tensors.push_back({"scale", DType::kFloat32, {}});
  Piece piece;
  piece.region = RegionId(1);
  layout.pieces.push_back(piece);
  auto decoded = Decode(EncodeLayout(layout, v1::Lease(), 1 << 20));
  REQUIRE(decoded.ok());
  CheckSame(*decoded, layout);

  decoded = Decode(EncodeLayout(Layout(), v1::Lease(), 1 << 20));
  REQUIRE(decoded.ok());
  CHECK(decoded->tensors.empty());
}

TEST_CASE("A layout stream without a chunk is refused") {
  CHECK(Decode({}).status().code() == StatusCode::kInvalidArgument);
}

TEST_CASE("A layout stream that was cut short, or goes on after its last chunk, is refused") {
  const auto chunks = EncodeLayout(SomeLayout(5), v1::Lease(), 100);
  REQUIRE(chunks.size() > 1);
  CHECK(Decode(chunks).ok());
  const absl::Status cut = Decode({chunks.begin(), chunks.end() - 1}).status();
  CHECK(cut.code() == StatusCode::kInvalidArgument);
  CHECK_THAT(Message(cut), Contains("layout.last"));
  std::vector<v1::LayoutChunk> more = chunks;
  more.emplace_back();
  const absl::Status after = DecodeWhole(more).status();
  CHECK(after.code() == StatusCode::kInvalidArgument);
  CHECK_THAT(Message(after), Contains("after the last"));
}

// Tensors "w.0.a" and "w.1.a" of float32 [4, 6], the second coded by the first.
v1::LayoutChunk CodedChunk() {
  v1::LayoutChunk chunk;
  chunk.set_binding_generation(1);
  for (const uint32_t shared : {0U, 2U}) {
    chunk.add_name_prefix(shared);
    chunk.add_name_middles(shared == 0 ? "w.0.a" : "1");
    chunk.add_name_suffix(shared);
    chunk.add_dtypes(v1::DTYPE_FLOAT32);
    chunk.add_shape_back(shared == 0 ? 0 : 1);
  }
  chunk.add_shapes()->add_dims(4);
  chunk.mutable_shapes(0)->add_dims(6);
  return chunk;
}

TEST_CASE("Coded names and shapes are those of the tensors before with a part replaced") {
  v1::LayoutChunk second;
  second.add_name_prefix(5);
  second.add_name_middles("b");
  second.add_name_suffix(0);
  second.add_dtypes(v1::DTYPE_INT8);
  second.add_shape_back(2);
  const auto layout = DecodeWhole({CodedChunk(), second});
  INFO(layout.status());
  REQUIRE(layout.ok());
  const std::vector<TensorSpec> expected = {{"w.0.a", DType::kFloat32, {4, 6}},
                                            {"w.1.a", DType::kFloat32, {4, 6}},
                                            {"w.1.ab", DType::kInt8, {4, 6}}};
  CHECK(layout->tensors == expected);
}

TEST_CASE("Names of any kind survive the coding") {
  Layout layout;
  // Some names share only a part of a UTF-8 character, or are a part of their neighbour.
  for (const char* name : {"aaaa", "aa", "aaaaaa", "a", "x\u00e9y", "x\u00e8y", "x\u00e8", "\u00e8",
                           "layer.10.w", "layer.11.w", "layer.1.w"}) {
    layout.tensors.push_back({name, DType::kInt8, {1}});
  }
  layout.tensors.push_back({std::string(512, 'n'), DType::kInt8, {2}});
  layout.tensors.push_back({std::string(511, 'n'), DType::kInt8, {1}});
  for (const int64_t chunk_bytes : {1, 40, 1 << 20}) {
    std::vector<v1::LayoutChunk> received;
    for (const v1::LayoutChunk& chunk : EncodeLayout(layout, v1::Lease(), chunk_bytes)) {
      REQUIRE(received.emplace_back().ParseFromString(chunk.SerializeAsString()));
    }
    const auto decoded = Decode(received);
    INFO(decoded.status());
    REQUIRE(decoded.ok());
    CheckSame(*decoded, layout);
  }
}

TEST_CASE("Malformed coding is refused with field and value") {
  struct Case {
    std::string field;
    std::string value;
    void (*damage)(v1::LayoutChunk&);
  };
  const std::vector<Case> cases = {
      {"name_prefix[0]", "1", [](auto& c) { c.set_name_prefix(0, 1); }},
      {"name_prefix[1]", "6", [](auto& c) { c.set_name_prefix(1, 6); }},
      {"name_suffix[1]", "4294967295", [](auto& c) { c.set_name_suffix(1, 0xffffffff); }},
      {"name_prefix", "3", [](auto& c) { c.add_name_prefix(0); }},
      {"name_suffix", "0", [](auto& c) { c.clear_name_suffix(); }},
      {"names", "1", [](auto& c) { c.add_names("w"); }},
      {"names[1]", "UTF-8", [](auto& c) { c.set_name_middles(1, "\xff"); }},
      {"names[0]", "empty", [](auto& c) { c.set_name_middles(0, ""); }},
      {"shape_back[1]", "2", [](auto& c) { c.set_shape_back(1, 2); }},
      {"shapes has 1", "zeros has 2", [](auto& c) { c.set_shape_back(1, 0); }},
      {"dtypes", "3", [](auto& c) { c.add_dtypes(v1::DTYPE_INT8); }},
  };
  REQUIRE(DecodeWhole({CodedChunk()}).ok());
  for (const Case& c : cases) {
    v1::LayoutChunk chunk = CodedChunk();
    c.damage(chunk);
    const absl::Status status = DecodeWhole({chunk}).status();
    INFO(c.field << " " << c.value << ": " << status.ToString());
    CHECK(status.code() == StatusCode::kInvalidArgument);
    CHECK_THAT(Message(status), Contains(c.field));
    CHECK_THAT(Message(status), Contains(c.value));
  }
}

TEST_CASE("Malformed layout chunks are refused with field and value") {
  struct Case {
    std::string field;
    std::string value;
    void (*damage)(v1::LayoutChunk&);
  };
  const std::vector<Case> cases = {
      {"dtypes", "2", [](auto& c) { c.add_dtypes(v1::DTYPE_INT8); }},
      {"shapes", "0", [](auto& c) { c.clear_shapes(); }},
      {"dtypes[0]", "40", [](auto& c) { c.set_dtypes(0, static_cast<v1::DType>(40)); }},
      {"shapes[0]", "-4", [](auto& c) { c.mutable_shapes(0)->set_dims(0, -4); }},
      {"shapes[0]", "9223372036854775807", [](auto& c) { c.mutable_shapes(0)->set_dims(1, kMax); }},
      {"names[0]", "tensor", [](auto& c) { c.set_names(0, ""); }},
      {"piece_tensor[0]", "7", [](auto& c) { c.set_piece_tensor(0, 7); }},
      {"piece_region", "2", [](auto& c) { c.add_piece_region(1); }},
      {"piece_byte_offset", "0", [](auto& c) { c.clear_piece_byte_offset(); }},
      {"piece_boxes", "5", [](auto& c) { c.add_piece_boxes(1); }},
      {"piece_boxes", "0", [](auto& c) { c.clear_piece_boxes(); }},
      {"piece_strides", "1", [](auto& c) { c.add_piece_strides(1); }},
      {"piece_boxes", "7", [](auto& c) { c.set_piece_boxes(3, 7); }},
      {"piece_boxes", "-1", [](auto& c) { c.set_piece_boxes(0, -1); }},
      {"piece_boxes", "9223372036854775807", [](auto& c) { c.set_piece_boxes(2, kMax); }},
      {"pushed_tensors[0]", "1 tensors", [](auto& c) { c.add_pushed_tensors(1); }},
      {"pushed_tensors[0]", "4294967295", [](auto& c) { c.add_pushed_tensors(0xffffffff); }},
      {"pushed_tensors[1]", "0",
       [](auto& c) {
         c.add_pushed_tensors(0);
         c.add_pushed_tensors(0);
       }},
      {"tied_to", "0", [](auto& c) { c.add_tied_tensors(0); }},
      {"tied_tensors[0]", "1 tensors",
       [](auto& c) {
         c.add_tied_tensors(0);
         c.add_tied_to(1);
       }},
      {"tied_tensors[1]", "0",
       [](auto& c) {
         for (int i = 0; i < 2; ++i) {
           c.add_tied_tensors(0);
           c.add_tied_to(0);
         }
       }},
      {"names", "1", [](auto& c) { c.add_name_middles("w"); }},
      {"name_prefix", "1", [](auto& c) { c.add_name_prefix(1); }},
      {"name_suffix", "1", [](auto& c) { c.add_name_suffix(1); }},
      {"shape_back", "2",
       [](auto& c) {
         c.add_shape_back(0);
         c.add_shape_back(0);
       }},
      {"shapes has 1", "zeros has 0", [](auto& c) { c.add_shape_back(1); }},
      {"shape_back[0]", "3",
       [](auto& c) {
         c.clear_shapes();
         c.add_shape_back(3);
       }},
  };
  REQUIRE(DecodeWhole({OneChunk()}).ok());
  for (const Case& c : cases) {
    v1::LayoutChunk chunk = OneChunk();
    c.damage(chunk);
    const absl::Status status = DecodeWhole({chunk}).status();
    INFO(c.field << " " << c.value << ": " << status.ToString());
    CHECK(status.code() == StatusCode::kInvalidArgument);
    CHECK_THAT(Message(status), Contains(c.field));
    CHECK_THAT(Message(status), Contains(c.value));
  }
}

TEST_CASE("A later chunk can't change the binding generation") {
  v1::LayoutChunk second;
  second.set_binding_generation(2);
  const absl::Status status = DecodeWhole({OneChunk(), second}).status();
  CHECK(status.code() == StatusCode::kInvalidArgument);
  CHECK_THAT(Message(status), Contains("binding_generation is 2"));
}

TEST_CASE("A later chunk's pieces may name an earlier chunk's tensors") {
  v1::LayoutChunk second;
  second.add_piece_tensor(0);
  for (const int64_t n : {0, 0, 1, 1}) second.add_piece_boxes(n);
  second.add_piece_region(1);
  second.add_piece_byte_offset(96);
  const auto decoded = DecodeWhole({OneChunk(), second});
  REQUIRE(decoded.ok());
  CHECK(decoded->pieces.size() == 2);
}

TEST_CASE("More tensors than the limit are refused across chunks") {
  v1::LayoutChunk chunk;
  for (int i = 0; i < 65'536; ++i) {
    chunk.add_names("t");
    chunk.add_dtypes(v1::DTYPE_INT8);
    chunk.add_shapes();
  }
  LayoutDecoder decoder;
  for (int i = 0; i < 4; ++i) REQUIRE(decoder.Add(chunk).ok());
  const absl::Status status = decoder.Add(chunk);
  CHECK(status.code() == StatusCode::kResourceExhausted);
  CHECK_THAT(Message(status), Contains("262144"));
}

TEST_CASE("A few megabytes of coded names became a hundred times as much") {
  LayoutDecoder decoder;
  v1::LayoutChunk chunk;
  absl::Status status;
  int64_t wire = 0;
  for (int i = 0; status.ok(); ++i) {
    chunk.Clear();
    for (int n = 0; n < 1024; ++n) {
      const bool first = i == 0 && n == 0;
      chunk.add_name_prefix(first ? 0 : 500);
      chunk.add_name_middles(first ? std::string(512, 'n') : std::string(12, 'm'));
      chunk.add_name_suffix(0);
      chunk.add_dtypes(v1::DTYPE_INT8);
      chunk.add_shapes();
    }
    wire += static_cast<int64_t>(chunk.ByteSizeLong());
    status = decoder.Add(chunk);
    CHECK(decoder.bytes() >= std::min((i + 1) * int64_t{1024 * 512}, kMaxLayoutNameBytes));
  }
  CHECK(status.code() == StatusCode::kResourceExhausted);
  CHECK_THAT(Message(status), Contains("layout.name_middles") && Contains("33554432"));
  CHECK(wire < kMaxLayoutNameBytes / 10);
}

TEST_CASE("A manifest's errors name the field given") {
  v1::Bucket lists;
  lists.add_names("a");
  lists.add_dtypes(v1::DTYPE_BOOL);
  lists.add_shapes();
  const auto ok = CheckManifest(lists.names(), lists.dtypes(), lists.shapes(), "manifest", 1);
  REQUIRE(ok.ok());
  CHECK(*ok == std::vector<TensorSpec>{{"a", DType::kBool, {}}});

  lists.add_names("a");
  lists.add_dtypes(v1::DTYPE_BOOL);
  lists.add_shapes();
  const auto over = CheckManifest(lists.names(), lists.dtypes(), lists.shapes(), "manifest", 1);
  CHECK_THAT(Message(over.status()), Contains("manifest.names has 2 entries, more than 1"));
  const auto twice = CheckManifest(lists.names(), lists.dtypes(), lists.shapes(), "manifest", 9);
  CHECK_THAT(Message(twice.status()), Contains("manifest.names[1] is \"a\""));
}

TEST_CASE("Every dtype and verification has the same number on the wire") {
  for (int number = 1; number <= 12; ++number) {
    const auto dtype = DTypeFromProto(number);
    REQUIRE(dtype.ok());
    CHECK(ToProto(*dtype) == number);
  }
  for (const Verification v :
       {Verification::kOff, Verification::kTransfer, Verification::kReadback}) {
    CHECK(VerificationFromProto(ToProto(v)).value() == v);
  }
  CHECK(VerificationFromProto(v1::VERIFICATION_UNSPECIFIED).value() == std::nullopt);
  const auto unknown = VerificationFromProto(static_cast<v1::Verification>(9));
  CHECK(unknown.status().code() == StatusCode::kInvalidArgument);
  CHECK_THAT(Message(unknown.status()), Contains("9"));
}

TEST_CASE("Every broadcast method has the same number on the wire, and auto is unspecified") {
  for (size_t number = 0; number < kBroadcastMethods; ++number) {
    const auto method = static_cast<BroadcastMethod>(number);
    CHECK(BroadcastFromProto(ToProto(method)).value() == method);
    std::string name = "BROADCAST_METHOD_" + std::string(kBroadcastMethodNames[number]);
    for (char& c : name) c = static_cast<char>(std::toupper(c));
    if (method == BroadcastMethod::kAuto) name = "BROADCAST_METHOD_UNSPECIFIED";
    CHECK(v1::BroadcastMethod_Name(ToProto(method)) == name);
  }
  CHECK(ToProto(BroadcastMethod::kAuto) == v1::BROADCAST_METHOD_UNSPECIFIED);
  for (const int number : {-1, 5}) {
    const auto unknown = BroadcastFromProto(static_cast<v1::BroadcastMethod>(number));
    CHECK(unknown.status().code() == StatusCode::kInvalidArgument);
    CHECK_THAT(Message(unknown.status()), Contains(std::to_string(number)));
  }
}

}  // namespace
}  // namespace refitd
