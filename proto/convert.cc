#include "proto/convert.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "transport/base/errors.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"
#include "transport/plan/shared_tensors.h"

namespace refitd {
namespace {

using absl::StatusCode;

// Long or binary names must not flood a status message.
std::string Quoted(std::string_view name) {
  constexpr size_t kShown = 96;
  std::string out = "\"";
  for (const char c : Shorten(name, kShown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f || c == '"' || c == '\\') {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out + (name.size() > kShown ? fmt::format("\" ({} bytes)", name.size()) : "\"");
}

absl::Status Annotate(const absl::Status& status, std::string_view where) {
  return Prefixed(status, "{}", where);
}

// Returns a shape in which no product of dimensions can overflow, not even a product that leaves
// out a dimension of 0.
absl::StatusOr<Dims> DimsFromProto(const v1::Shape& shape) {
  if (shape.dims_size() > kMaxDims) {
    return Error(StatusCode::kInvalidArgument, "{} dims, more than {}", shape.dims_size(),
                 kMaxDims);
  }
  int64_t product = 1;
  for (int d = 0; d < shape.dims_size(); ++d) {
    const int64_t dim = shape.dims(d);
    if (dim < 0) {
      return Error(StatusCode::kInvalidArgument, "dims[{}] is {}, less than 0", d, dim);
    }
    if (dim > kMaxTensorBytes / product) {
      return Error(StatusCode::kInvalidArgument,
                   "dims [{}] make more elements than the limit of {} bytes a tensor",
                   fmt::join(shape.dims(), ", "), kMaxTensorBytes);
    }
    product *= std::max<int64_t>(dim, 1);
  }
  return Dims(shape.dims().begin(), shape.dims().end());
}

// `dims` is what DimsFromProto gave.
absl::StatusOr<TensorSpec> TensorFromProto(std::string name, int dtype,
                                           const absl::StatusOr<Dims>& dims, std::string_view field,
                                           int index) {
  const auto tensor = [&] { return fmt::format("tensor {}", Quoted(name)); };
  const auto type = DTypeFromProto(dtype);
  const auto about = [&](const absl::Status& status, std::string_view list) {
    return AboutTensor(AboutField(status, fmt::format("{}.{}", field, list)), name);
  };
  if (!type.ok()) {
    return about(Annotate(type.status(),
                          fmt::format("{}.dtypes[{}] = {} of {}", field, index, dtype, tensor())),
                 "dtypes");
  }
  if (!dims.ok()) {
    return about(
        Annotate(dims.status(), fmt::format("{}.shapes[{}] of {}", field, index, tensor())),
        "shapes");
  }
  REFITD_ASSIGN_OR_RETURN(const int64_t count, ElementCount(*dims));
  if (count > kMaxTensorBytes / ElementBytes(*type)) {
    return about(Invalid("{}.shapes[{}] of {}: {} is more than {} bytes", field, index, tensor(),
                         ToString(*type, *dims), kMaxTensorBytes),
                 "shapes");
  }
  TensorSpec spec{std::move(name), *type, *dims};
  if (absl::Status status = ValidateTensor(spec); !status.ok()) {
    return AboutField(Annotate(status, fmt::format("{}.names[{}]", field, index)),
                      fmt::format("{}.names", field));
  }
  return spec;
}

absl::Status CheckLength(std::string_view field, std::string_view list, int got,
                         std::string_view other, int want) {
  if (got == want) return absl::OkStatus();
  return InvalidField(fmt::format("{}.{}", field, list), "{}.{} has {} entries where {} has {}",
                      field, list, got, other, want);
}

int64_t VarintBytes(uint64_t value) {
  int64_t bytes = 1;
  for (; value >= 0x80; value >>= 7) ++bytes;
  return bytes;
}

int64_t VarintBytes(const Dims& dims) {
  int64_t bytes = 0;
  for (const int64_t dim : dims) bytes += VarintBytes(static_cast<uint64_t>(dim));
  return bytes;
}

// The most bytes that tag and length of a field take.
constexpr int64_t kFieldBytes = 4;

// Bytes on the wire of a tensor that shares `shared` bytes of its name with the tensor before, and
// maybe its shape with a near one.
int64_t WireBytes(const TensorSpec& tensor, size_t shared, bool shape_shared) {
  const int64_t shape = shape_shared ? 0 : VarintBytes(tensor.shape) + kFieldBytes;
  return static_cast<int64_t>(tensor.name.size() - shared) + shape + 3 * kFieldBytes;
}

int64_t WireBytes(const Piece& piece) {
  return VarintBytes(piece.tensor) + VarintBytes(piece.box.offset) + VarintBytes(piece.box.extent) +
         VarintBytes(piece.strides) + VarintBytes(piece.region.value()) +
         VarintBytes(static_cast<uint64_t>(piece.byte_offset));
}

// Appends chunks of about equal size.
class ChunkWriter {
 public:
  ChunkWriter(const v1::Lease& lease, uint64_t binding_generation, int64_t chunk_bytes)
      : chunk_bytes_(chunk_bytes) {
    chunks_.emplace_back();
    *chunks_.back().mutable_lease() = lease;
    chunks_.back().set_binding_generation(binding_generation);
  }

  // Returns the chunk to which the next `bytes` are to be added.
  v1::LayoutChunk& Room(int64_t bytes) {
    if (used_ > 0 && used_ + bytes > chunk_bytes_) {
      chunks_.emplace_back();
      used_ = 0;
    }
    used_ += bytes;
    return chunks_.back();
  }

  std::vector<v1::LayoutChunk> Take() && { return std::move(chunks_); }

 private:
  const int64_t chunk_bytes_;
  int64_t used_ = 0;
  std::vector<v1::LayoutChunk> chunks_;
};

bool IsDense(const Piece& piece) { return piece.strides == RowMajorStrides(piece.box.extent); }

// Checks that the lengths of a chunk's piece arrays agree with each other and with the ranks of the
// tensors named, so that the arrays can be read without a further check.
absl::Status CheckPieceArrays(const v1::LayoutChunk& chunk,
                              const std::vector<TensorSpec>& tensors) {
  const int pieces = chunk.piece_tensor_size();
  REFITD_RETURN_IF_ERROR(
      CheckLength("layout", "piece_region", chunk.piece_region_size(), "piece_tensor", pieces));
  REFITD_RETURN_IF_ERROR(CheckLength("layout", "piece_byte_offset", chunk.piece_byte_offset_size(),
                                     "piece_tensor", pieces));
  int64_t ranks = 0;  // at most kMaxDims for each of pieces, an int: no overflow
  for (int i = 0; i < pieces; ++i) {
    const uint32_t tensor = chunk.piece_tensor(i);
    if (tensor >= tensors.size()) {
      return InvalidField("layout.piece_tensor",
                          "layout.piece_tensor[{}] is {} where {} tensors were named", i, tensor,
                          tensors.size());
    }
    ranks += static_cast<int64_t>(tensors[tensor].shape.size());
  }
  if (chunk.piece_boxes_size() != 2 * ranks) {
    return InvalidField("layout.piece_boxes",
                        "layout.piece_boxes has {} entries where the pieces' tensors need {}",
                        chunk.piece_boxes_size(), 2 * ranks);
  }
  if (chunk.piece_strides_size() != 0 && chunk.piece_strides_size() != ranks) {
    return InvalidField(
        "layout.piece_strides",
        "layout.piece_strides has {} entries where the pieces' tensors need {} or none",
        chunk.piece_strides_size(), ranks);
  }
  return absl::OkStatus();
}

// Decodes name i of the chunk from the name before it.
absl::StatusOr<std::string> CodedName(const v1::LayoutChunk& chunk, int i,
                                      const std::vector<TensorSpec>& before) {
  const std::string_view last = before.empty() ? std::string_view() : before.back().name;
  const uint32_t prefix = chunk.name_prefix(i);
  const uint32_t suffix = chunk.name_suffix(i);
  for (const auto& [field, bytes] :
       {std::pair("name_prefix", prefix), std::pair("name_suffix", suffix)}) {
    if (bytes <= last.size()) continue;
    return InvalidField(fmt::format("layout.{}", field),
                        "layout.{}[{}] is {} where the name before has {} bytes", field, i, bytes,
                        last.size());
  }
  std::string name;
  name.reserve(prefix + chunk.name_middles(i).size() + suffix);
  name.append(last.substr(0, prefix));
  name.append(chunk.name_middles(i));
  name.append(last.substr(last.size() - suffix));
  return name;
}

// Beyond four dimensions, Dims allocates.
int64_t HeapOf(const Dims& dims) {
  return dims.size() <= 4 ? 0 : static_cast<int64_t>(dims.capacity() * sizeof(int64_t));
}

int64_t BytesOf(const TensorSpec& tensor) {
  return static_cast<int64_t>(sizeof(tensor) + tensor.name.capacity()) + HeapOf(tensor.shape);
}

int64_t BytesOf(const Piece& piece) {
  return static_cast<int64_t>(sizeof(piece)) + HeapOf(piece.box.offset) + HeapOf(piece.box.extent) +
         HeapOf(piece.strides);
}

// The numbers of bytes that two names share at their start, and at the end of the rest.
std::pair<size_t, size_t> Shared(std::string_view a, std::string_view b) {
  const size_t most = std::min(a.size(), b.size());
  size_t prefix = 0;
  while (prefix < most && a[prefix] == b[prefix]) ++prefix;
  size_t suffix = 0;
  while (suffix < most - prefix && a[a.size() - 1 - suffix] == b[b.size() - 1 - suffix]) ++suffix;
  return {prefix, suffix};
}

// How many places before tensor i the nearest tensor of the same shape is; 0 if none is near.
uint32_t ShapeBack(const std::vector<TensorSpec>& tensors, size_t i) {
  constexpr size_t kSearched = 64;
  for (size_t back = 1; back <= std::min(i, kSearched); ++back) {
    if (tensors[i - back].shape == tensors[i].shape) return static_cast<uint32_t>(back);
  }
  return 0;
}

}  // namespace

absl::Status LayoutDecoder::Add(const v1::LayoutChunk& chunk) {
  if (!any_) {
    layout_.binding_generation = chunk.binding_generation();
  } else if (chunk.binding_generation() != 0 &&
             chunk.binding_generation() != layout_.binding_generation) {
    return InvalidField("layout.binding_generation",
                        "layout.binding_generation is {} where the first chunk said {}",
                        chunk.binding_generation(), layout_.binding_generation);
  }
  if (last_) {
    return InvalidField("layout.last", "layout.last: a chunk came after the last one");
  }
  any_ = true;
  last_ = chunk.last();

  REFITD_RETURN_IF_ERROR(AddTensors(chunk));
  REFITD_RETURN_IF_ERROR(AddDerived(chunk));
  REFITD_RETURN_IF_ERROR(AddPieces(chunk));
  REFITD_RETURN_IF_ERROR(AddPushed(chunk));
  REFITD_RETURN_IF_ERROR(AddTies(chunk));
  return AddBacks(chunk);
}

absl::Status LayoutDecoder::AddTensors(const v1::LayoutChunk& chunk) {
  const bool coded = chunk.name_middles_size() > 0;
  const char* names_field = coded ? "name_middles" : "names";
  if (coded && chunk.names_size() > 0) {
    return InvalidField("layout.names",
                        "layout.names has {} entries in a chunk with {} name_middles",
                        chunk.names_size(), chunk.name_middles_size());
  }
  const int names = coded ? chunk.name_middles_size() : chunk.names_size();
  const auto check = [&](std::string_view list, int got, int want) {
    return CheckLength("layout", list, got, names_field, want);
  };
  REFITD_RETURN_IF_ERROR(check("dtypes", chunk.dtypes_size(), names));
  REFITD_RETURN_IF_ERROR(check("name_prefix", chunk.name_prefix_size(), coded ? names : 0));
  REFITD_RETURN_IF_ERROR(check("name_suffix", chunk.name_suffix_size(), coded ? names : 0));
  if (chunk.shape_back_size() == 0) {
    REFITD_RETURN_IF_ERROR(check("shapes", chunk.shapes_size(), names));
  } else {
    REFITD_RETURN_IF_ERROR(check("shape_back", chunk.shape_back_size(), names));
    const auto taken = std::count(chunk.shape_back().begin(), chunk.shape_back().end(), 0U);
    REFITD_RETURN_IF_ERROR(CheckLength("layout", "shapes", chunk.shapes_size(),
                                       "shape_back's zeros", static_cast<int>(taken)));
  }
  if (names > kMaxTensorsPerLayout - static_cast<int64_t>(tensors_.size())) {
    return TooManyTensors(fmt::format("layout.{}", names_field),
                          static_cast<int64_t>(tensors_.size()) + names);
  }
  int next_shape = 0;
  for (int i = 0; i < names; ++i) {
    std::string name;
    if (coded) {
      REFITD_ASSIGN_OR_RETURN(name, CodedName(chunk, i, tensors_));
    } else {
      name = chunk.names(i);
    }
    const uint32_t back = chunk.shape_back_size() == 0 ? 0 : chunk.shape_back(i);
    if (back > tensors_.size()) {
      return InvalidField("layout.shape_back",
                          "layout.shape_back[{}] is {} where {} tensors were named", i, back,
                          tensors_.size());
    }
    absl::StatusOr<Dims> dims = back == 0 ? DimsFromProto(chunk.shapes(next_shape))
                                          : tensors_[tensors_.size() - back].shape;
    REFITD_ASSIGN_OR_RETURN(TensorSpec tensor,
                            TensorFromProto(std::move(name), chunk.dtypes(i), dims, "layout", i));
    if (back == 0) ++next_shape;
    name_bytes_ += static_cast<int64_t>(tensor.name.size());
    if (name_bytes_ > kMaxLayoutNameBytes) {
      return Error(StatusCode::kResourceExhausted,
                   "layout.{}: the names of the first {} tensors have more than {} bytes",
                   names_field, tensors_.size() + 1, kMaxLayoutNameBytes);
    }
    bytes_ += BytesOf(tensor);
    tensors_.push_back(std::move(tensor));
  }
  return absl::OkStatus();
}

absl::Status LayoutDecoder::AddPieces(const v1::LayoutChunk& chunk) {
  if (chunk.piece_tensor_size() >
      kMaxPiecesPerLayout - static_cast<int64_t>(layout_.pieces.size())) {
    return Error(StatusCode::kResourceExhausted, "layout.piece_tensor: {} pieces, more than {}",
                 layout_.pieces.size() + chunk.piece_tensor_size(), kMaxPiecesPerLayout);
  }
  REFITD_RETURN_IF_ERROR(CheckPieceArrays(chunk, tensors_));
  auto box = chunk.piece_boxes().begin();
  auto stride = chunk.piece_strides().begin();
  for (int i = 0; i < chunk.piece_tensor_size(); ++i) {
    const TensorSpec& tensor = tensors_[chunk.piece_tensor(i)];
    const auto rank = static_cast<int>(tensor.shape.size());
    Piece piece;
    piece.tensor = chunk.piece_tensor(i);
    piece.box.offset.assign(box, box + rank);
    piece.box.extent.assign(box + rank, box + 2 * rank);
    box += 2 * rank;
    if (absl::Status status = ValidateBox(piece.box, tensor.shape); !status.ok()) {
      return AboutTensor(Annotate(status, fmt::format("layout.piece_boxes of piece {}, tensor {}",
                                                      i, Quoted(tensor.name))),
                         tensor.name);
    }
    piece.region = RegionId(chunk.piece_region(i));
    piece.byte_offset = chunk.piece_byte_offset(i);
    if (chunk.piece_strides_size() == 0) {
      piece.strides = RowMajorStrides(piece.box.extent);
    } else {
      piece.strides.assign(stride, stride + rank);
      stride += rank;
    }
    bytes_ += BytesOf(piece);
    layout_.pieces.push_back(std::move(piece));
  }
  return absl::OkStatus();
}

// Derived tensors must ascend, so there are at most as many as tensors.
absl::Status LayoutDecoder::AddDerived(const v1::LayoutChunk& chunk) {
  for (const v1::Derivation& derivation : chunk.derivations()) {
    name_bytes_ += static_cast<int64_t>(derivation.name().size());
    bytes_ += static_cast<int64_t>(sizeof(Derivation) + derivation.name().size());
  }
  if (name_bytes_ > kMaxLayoutNameBytes) {
    return Error(StatusCode::kResourceExhausted,
                 "layout.derivations: the names of tensors have more than {} bytes",
                 kMaxLayoutNameBytes);
  }
  return SetDerived(chunk.derived_tensors(), chunk.derivations(), "layout", &tensors_);
}

// Pushed tensors must ascend, so there are at most as many as tensors.
absl::Status LayoutDecoder::AddPushed(const v1::LayoutChunk& chunk) {
  std::vector<uint32_t>& pushed = layout_.pushed_tensors;
  for (int i = 0; i < chunk.pushed_tensors_size(); ++i) {
    const uint32_t tensor = chunk.pushed_tensors(i);
    if (tensor >= tensors_.size()) {
      return InvalidField("layout.pushed_tensors",
                          "layout.pushed_tensors[{}] is {} where {} tensors were named", i, tensor,
                          tensors_.size());
    }
    if (!pushed.empty() && tensor <= pushed.back()) {
      return InvalidField("layout.pushed_tensors",
                          "layout.pushed_tensors[{}] is {}, which comes after {}: they must ascend",
                          i, tensor, pushed.back());
    }
    pushed.push_back(tensor);
  }
  return absl::OkStatus();
}

// The tensors of ties must ascend, so there are at most as many as tensors.
absl::Status LayoutDecoder::AddTies(const v1::LayoutChunk& chunk) {
  REFITD_RETURN_IF_ERROR(CheckLength("layout", "tied_to", chunk.tied_to_size(), "tied_tensors",
                                     chunk.tied_tensors_size()));
  std::vector<Tie>& ties = layout_.ties;
  for (int i = 0; i < chunk.tied_tensors_size(); ++i) {
    const Tie tie{chunk.tied_tensors(i), chunk.tied_to(i)};
    if (tie.tensor >= tensors_.size() || tie.same_as >= tensors_.size()) {
      return InvalidField("layout.tied_tensors",
                          "layout.tied_tensors[{}] is {}, tied to {}, where {} tensors were named",
                          i, tie.tensor, tie.same_as, tensors_.size());
    }
    if (!ties.empty() && tie.tensor <= ties.back().tensor) {
      return InvalidField("layout.tied_tensors",
                          "layout.tied_tensors[{}] is {}, which comes after {}: they must ascend",
                          i, tie.tensor, ties.back().tensor);
    }
    ties.push_back(tie);
  }
  return absl::OkStatus();
}

absl::Status LayoutDecoder::AddBacks(const v1::LayoutChunk& chunk) {
  REFITD_RETURN_IF_ERROR(
      CheckLength("layout", "backs", chunk.backs_size(), "fronts", chunk.fronts_size()));
  const int64_t backs = std::ssize(layout_.backs) + chunk.backs_size();
  if (backs > kMaxBacksPerLayout) {
    return InvalidField("layout.backs", "layout.backs has {} entries, at most {} may be", backs,
                        kMaxBacksPerLayout);
  }
  layout_.flips = std::max(layout_.flips, chunk.flips());
  layout_.backs_differ = layout_.backs_differ || chunk.backs_differ();
  for (int i = 0; i < chunk.backs_size(); ++i) {
    layout_.backs.push_back({RegionId(chunk.fronts(i)), RegionId(chunk.backs(i))});
  }
  return absl::OkStatus();
}

absl::StatusOr<Layout> LayoutDecoder::Finish() && {
  if (!any_) {
    return InvalidField("layout", "layout: the stream ended without a chunk");
  }
  if (!last_) {
    return InvalidField("layout.last", "layout.last: the stream ended before a chunk that says so");
  }
  layout_.tensors = std::move(tensors_);
  ShareTensors(&layout_);
  return std::move(layout_);
}

std::vector<v1::LayoutChunk> EncodeLayout(const Layout& layout, const v1::Lease& lease,
                                          int64_t chunk_bytes) {
  ChunkWriter writer(lease, layout.binding_generation, chunk_bytes);
  std::string_view last;
  for (size_t i = 0; i < layout.tensors.size(); ++i) {
    const TensorSpec& tensor = layout.tensors[i];
    const auto [prefix, suffix] = Shared(last, tensor.name);
    const uint32_t back = ShapeBack(layout.tensors, i);
    v1::LayoutChunk& chunk = writer.Room(WireBytes(tensor, prefix + suffix, back > 0));
    chunk.add_name_prefix(static_cast<uint32_t>(prefix));
    chunk.add_name_middles(tensor.name.substr(prefix, tensor.name.size() - prefix - suffix));
    chunk.add_name_suffix(static_cast<uint32_t>(suffix));
    chunk.add_dtypes(ToProto(tensor.dtype));
    chunk.add_shape_back(back);
    if (back == 0) *chunk.add_shapes() = ToProto(tensor.shape);
    last = tensor.name;
  }
  const bool dense = std::all_of(layout.pieces.begin(), layout.pieces.end(), IsDense);
  for (const Piece& piece : layout.pieces) {
    v1::LayoutChunk& chunk = writer.Room(WireBytes(piece));
    chunk.add_piece_tensor(piece.tensor);
    chunk.mutable_piece_boxes()->Add(piece.box.offset.begin(), piece.box.offset.end());
    chunk.mutable_piece_boxes()->Add(piece.box.extent.begin(), piece.box.extent.end());
    chunk.add_piece_region(piece.region.value());
    chunk.add_piece_byte_offset(piece.byte_offset);
    if (!dense) chunk.mutable_piece_strides()->Add(piece.strides.begin(), piece.strides.end());
  }
  for (uint32_t i = 0; i < layout.tensors.size(); ++i) {
    const Derivation* derived = layout.tensors[i].derived.get();
    if (derived == nullptr) continue;
    v1::LayoutChunk& chunk =
        writer.Room(WireBytes(derived->from, 0, false) + VarintBytes(i) + 2 * kFieldBytes);
    chunk.add_derived_tensors(i);
    *chunk.add_derivations() = ToProto(*derived);
  }
  for (const uint32_t tensor : layout.pushed_tensors) {
    writer.Room(VarintBytes(tensor)).add_pushed_tensors(tensor);
  }
  for (const Tie& tie : layout.ties) {
    v1::LayoutChunk& chunk = writer.Room(VarintBytes(tie.tensor) + VarintBytes(tie.same_as));
    chunk.add_tied_tensors(tie.tensor);
    chunk.add_tied_to(tie.same_as);
  }
  for (const RegionBack& pair : layout.backs) {
    v1::LayoutChunk& chunk =
        writer.Room(VarintBytes(pair.region.value()) + VarintBytes(pair.back.value()));
    chunk.add_fronts(pair.region.value());
    chunk.add_backs(pair.back.value());
    chunk.set_flips(layout.flips);
    chunk.set_backs_differ(layout.backs_differ);
  }
  std::vector<v1::LayoutChunk> chunks = std::move(writer).Take();
  chunks.back().set_last(true);
  return chunks;
}

v1::Derivation ToProto(const Derivation& derivation) {
  v1::Derivation message;
  message.set_name(derivation.from.name);
  message.set_dtype(ToProto(derivation.from.dtype));
  *message.mutable_shape() = ToProto(derivation.from.shape);
  message.set_kind(static_cast<v1::DerivedKind>(derivation.kind));
  message.set_role(static_cast<v1::DerivedRole>(derivation.role));
  return message;
}

absl::Status SetDerived(const google::protobuf::RepeatedField<uint32_t>& indices,
                        const google::protobuf::RepeatedPtrField<v1::Derivation>& derivations,
                        std::string_view field, std::vector<TensorSpec>* tensors) {
  REFITD_RETURN_IF_ERROR(
      CheckLength(field, "derivations", derivations.size(), "derived_tensors", indices.size()));
  for (int i = 0; i < indices.size(); ++i) {
    // A tensor that is derived already came before.
    if (indices[i] >= tensors->size() || (i > 0 && indices[i] <= indices[i - 1]) ||
        (*tensors)[indices[i]].derived != nullptr) {
      return InvalidField(fmt::format("{}.derived_tensors", field),
                          "{}.derived_tensors[{}] is {}, of {} tensors: they must ascend", field, i,
                          indices[i], tensors->size());
    }
    const v1::Derivation& message = derivations[i];
    TensorSpec& tensor = (*tensors)[indices[i]];
    auto derivation = std::make_shared<Derivation>();
    absl::StatusOr<TensorSpec> from =
        TensorFromProto(message.name(), message.dtype(), DimsFromProto(message.shape()),
                        fmt::format("{}.derivations", field), i);
    if (!from.ok()) return AboutTensor(from.status(), tensor.name);
    derivation->from = *std::move(from);
    // ValidateDerived refuses numbers that are not known.
    derivation->kind = static_cast<DerivedKind>(std::min(message.kind() + 0U, 255U));
    derivation->role = static_cast<DerivedRole>(std::min(message.role() + 0U, 255U));
    tensor.derived = std::move(derivation);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<TensorSpec>> CheckManifest(
    const google::protobuf::RepeatedPtrField<std::string>& names,
    const google::protobuf::RepeatedField<int>& dtypes,
    const google::protobuf::RepeatedPtrField<v1::Shape>& shapes, std::string_view field,
    int64_t max_tensors) {
  REFITD_RETURN_IF_ERROR(CheckLength(field, "dtypes", dtypes.size(), "names", names.size()));
  REFITD_RETURN_IF_ERROR(CheckLength(field, "shapes", shapes.size(), "names", names.size()));
  if (names.size() > max_tensors) {
    return InvalidField(fmt::format("{}.names", field), "{}.names has {} entries, more than {}",
                        field, names.size(), max_tensors);
  }
  std::vector<TensorSpec> tensors;
  tensors.reserve(static_cast<size_t>(names.size()));
  absl::flat_hash_set<std::string_view> seen;
  seen.reserve(static_cast<size_t>(names.size()));
  for (int i = 0; i < names.size(); ++i) {
    REFITD_ASSIGN_OR_RETURN(TensorSpec tensor, TensorFromProto(names[i], dtypes[i],
                                                               DimsFromProto(shapes[i]), field, i));
    if (!seen.insert(names[i]).second) {
      return InvalidField(fmt::format("{}.names", field), "{}.names[{}] is {}, which came before",
                          field, i, Quoted(names[i]));
    }
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

v1::Shape ToProto(const Dims& shape) {
  v1::Shape out;
  out.mutable_dims()->Add(shape.begin(), shape.end());
  return out;
}

v1::DType ToProto(DType dtype) { return static_cast<v1::DType>(dtype); }

v1::Verification ToProto(Verification verification) {
  return static_cast<v1::Verification>(verification);
}

absl::StatusOr<std::optional<Verification>> VerificationFromProto(v1::Verification verification) {
  switch (verification) {
    case v1::VERIFICATION_UNSPECIFIED:
      return std::nullopt;
    case v1::VERIFICATION_OFF:
      return Verification::kOff;
    case v1::VERIFICATION_TRANSFER:
      return Verification::kTransfer;
    case v1::VERIFICATION_READBACK:
      return Verification::kReadback;
    default:
      return InvalidField("verification", "verification is {}, which is not known",
                          static_cast<int>(verification));
  }
}

v1::BroadcastMethod ToProto(BroadcastMethod method) {
  return static_cast<v1::BroadcastMethod>(method);
}

v1::BroadcastTotals BroadcastTotalsToProto(BroadcastMethod method, int64_t bytes, int64_t buckets) {
  v1::BroadcastTotals totals;
  totals.set_method(ToProto(method));
  totals.set_bytes(bytes);
  totals.set_buckets(buckets);
  return totals;
}

absl::StatusOr<BroadcastMethod> BroadcastFromProto(v1::BroadcastMethod method) {
  if (v1::BroadcastMethod_IsValid(method)) return static_cast<BroadcastMethod>(method);
  return InvalidField("broadcast", "broadcast is {}, which is not known", static_cast<int>(method));
}

static_assert(static_cast<int>(DType::kFloat64) == v1::DTYPE_FLOAT64);
static_assert(static_cast<int>(DType::kBFloat16) == v1::DTYPE_BFLOAT16);
static_assert(static_cast<int>(DType::kBool) == v1::DTYPE_BOOL);
static_assert(static_cast<int>(Verification::kOff) == v1::VERIFICATION_OFF);
static_assert(static_cast<int>(Verification::kTransfer) == v1::VERIFICATION_TRANSFER);
static_assert(static_cast<int>(Verification::kReadback) == v1::VERIFICATION_READBACK);
// convert_test compares the names.
static_assert(v1::BroadcastMethod_MAX == static_cast<int>(kBroadcastMethods) - 1);

}  // namespace refitd
