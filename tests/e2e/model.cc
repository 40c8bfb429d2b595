#include "tests/e2e/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "proto/convert.h"
#include "transport/base/status.h"

namespace refitd::e2e {
namespace {

uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

std::vector<int> AllIf(std::vector<int> indices, const Model& model) {
  if (!indices.empty()) return indices;
  indices.resize(model.size());
  std::iota(indices.begin(), indices.end(), 0);
  return indices;
}

// Calls `visit(row-major index in the global shape, element offset in the piece)` for every
// element.
template <typename Visit>
void ForEachElement(const Piece& piece, const Dims& shape, const Visit& visit) {
  const size_t rank = shape.size();
  for (const int64_t extent : piece.box.extent) {
    if (extent == 0) return;
  }
  Dims at(rank, 0);
  for (;;) {
    int64_t global = 0;
    int64_t local = 0;
    for (size_t d = 0; d < rank; ++d) {
      global = global * shape[d] + piece.box.offset[d] + at[d];
      local += at[d] * piece.strides[d];
    }
    visit(global, local);
    size_t d = rank;
    while (d > 0 && ++at[d - 1] == piece.box.extent[d - 1]) at[--d] = 0;
    if (d == 0) return;
  }
}

void Place(Held* held, uint32_t tensor, const TensorSpec& spec, Box box, const Dims& padded,
           int64_t gap_bytes) {
  const int64_t element = ElementBytes(spec.dtype);
  Piece piece;
  piece.tensor = tensor;
  piece.box = std::move(box);
  piece.strides = RowMajorStrides(padded);
  piece.byte_offset = (held->region_bytes + gap_bytes + element - 1) / element * element;
  int64_t span = element;
  for (const int64_t extent : padded) span *= extent;
  held->region_bytes = piece.byte_offset + span + gap_bytes;
  held->layout.pieces.push_back(std::move(piece));
}

}  // namespace

Model MixedModel() {
  return {
      {"embed.weight", DType::kBFloat16, {257, 24}},
      {"layers.0.qkv.weight", DType::kFloat16, {48, 40}},
      {"layers.0.o.weight", DType::kFloat32, {40, 48}},
      {"layers.0.norm.weight", DType::kFloat32, {40}},
      {"layers.0.router.bias", DType::kFloat64, {9}},
      {"layers.0.experts.w13", DType::kFloat8E4M3FN, {4, 33, 7}},
      {"layers.0.experts.w2", DType::kFloat8E5M2, {4, 7, 31}},
      {"layers.0.experts.map", DType::kInt64, {11, 3}},
      {"layers.0.experts.order", DType::kInt32, {5, 4, 3, 2}},
      {"layers.0.shift", DType::kInt16, {2, 101}},
      {"layers.0.quant", DType::kInt8, {127}},
      {"layers.0.scales", DType::kUint8, {5, 5, 5}},
      {"layers.0.mask", DType::kBool, {13, 2}},
      {"scale", DType::kFloat32, {}},
      {"reserved", DType::kBFloat16, {0, 16}},
  };
}

Model PlainModel(int tensors, int64_t rows, int64_t columns) {
  Model model;
  for (int i = 0; i < tensors; ++i) {
    model.push_back({fmt::format("layers.{}.weight", i), DType::kBFloat16, {rows, columns}});
  }
  return model;
}

int64_t TensorBytes(const TensorSpec& tensor) {
  int64_t bytes = ElementBytes(tensor.dtype);
  for (const int64_t dim : tensor.shape) bytes *= dim;
  return bytes;
}

int64_t ModelBytes(const Model& model) {
  return std::accumulate(model.begin(), model.end(), int64_t{0},
                         [](int64_t sum, const TensorSpec& t) { return sum + TensorBytes(t); });
}

std::vector<std::string> BytesOf(const Model& model, int64_t version) {
  std::vector<std::string> all;
  for (size_t t = 0; t < model.size(); ++t) {
    std::string bytes(static_cast<size_t>(TensorBytes(model[t])), '\0');
    const uint64_t seed = Mix(static_cast<uint64_t>(version) * 1'000'003 + t);
    for (size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<char>(Mix(seed + i / 8) >> (8 * (i % 8)));
    }
    all.push_back(std::move(bytes));
  }
  return all;
}

Held HoldWhole(const Model& model, int64_t gap_bytes) {
  Held held;
  held.layout.tensors = model;
  for (uint32_t t = 0; t < model.size(); ++t) {
    Place(&held, t, model[t], WholeBox(model[t].shape), model[t].shape, gap_bytes);
  }
  return held;
}

Held HoldSlice(const Model& model, int dimension, int rank, int world_size) {
  Held held;
  held.layout.tensors = model;
  for (uint32_t t = 0; t < model.size(); ++t) {
    const Dims& shape = model[t].shape;
    Box box = WholeBox(shape);
    if (shape.size() >= 2) {
      const size_t d = static_cast<size_t>(dimension) % shape.size();
      const int64_t chunk = (shape[d] + world_size - 1) / world_size;
      box.offset[d] = std::min(shape[d], chunk * rank);
      box.extent[d] = std::min(shape[d], chunk * (rank + 1)) - box.offset[d];
    }
    Dims padded = box.extent;
    if (!padded.empty()) padded.back() += 3;
    Place(&held, t, model[t], std::move(box), padded, 16);
  }
  return held;
}

std::string EmptyImage(int64_t bytes) {
  std::string image(static_cast<size_t>(bytes), '\0');
  for (size_t i = 0; i < image.size(); ++i) image[i] = static_cast<char>(0xA5 ^ (i * 31));
  return image;
}

std::string ExpectedImage(std::string image, const Layout& layout, const Model& model,
                          const std::vector<std::string>& tensors) {
  for (const Piece& piece : layout.pieces) {
    const TensorSpec& tensor = layout.tensors[piece.tensor];
    const auto in_model = std::find(model.begin(), model.end(), tensor);
    if (in_model == model.end()) continue;
    const std::string& bytes = tensors[static_cast<size_t>(in_model - model.begin())];
    const int64_t element = ElementBytes(tensor.dtype);
    ForEachElement(piece, tensor.shape, [&](int64_t global, int64_t local) {
      std::memcpy(&image[static_cast<size_t>(piece.byte_offset + local * element)],
                  &bytes[static_cast<size_t>(global * element)], static_cast<size_t>(element));
    });
  }
  return image;
}

std::string Difference(const std::string& expected, const char* memory, const Layout& layout) {
  const auto [want, got] = std::mismatch(expected.begin(), expected.end(), memory);
  if (want == expected.end()) return "";
  const int64_t at = want - expected.begin();
  std::string near = "before all tensors";
  for (const Piece& piece : layout.pieces) {
    if (piece.byte_offset > at) continue;
    near = fmt::format("in or after {}, which begins at {}", layout.tensors[piece.tensor].name,
                       piece.byte_offset);
  }
  return fmt::format("byte {} of {} is {:#04x} instead of {:#04x}, {}", at, expected.size(),
                     static_cast<unsigned char>(*got), static_cast<unsigned char>(*want), near);
}

v1::Bucket Describe(const Model& model, int64_t seq, std::vector<int> indices) {
  v1::Bucket bucket;
  bucket.set_seq(seq);
  for (const int i : AllIf(std::move(indices), model)) {
    const TensorSpec& tensor = model[static_cast<size_t>(i)];
    bucket.add_names(tensor.name);
    bucket.add_dtypes(ToProto(tensor.dtype));
    *bucket.add_shapes() = ToProto(tensor.shape);
  }
  return bucket;
}

v1::Manifest ManifestOf(const Model& model) {
  v1::Bucket all = Describe(model, 0);
  v1::Manifest manifest;
  manifest.mutable_names()->Swap(all.mutable_names());
  manifest.mutable_dtypes()->Swap(all.mutable_dtypes());
  manifest.mutable_shapes()->Swap(all.mutable_shapes());
  return manifest;
}

v1::Bucket InlineBucket(const Model& model, const std::vector<std::string>& bytes, int64_t seq,
                        bool packed, std::vector<int> indices) {
  indices = AllIf(std::move(indices), model);
  v1::Bucket bucket = Describe(model, seq, indices);
  if (packed) bucket.set_packed(true);
  v1::InlineBytes* chunks = bucket.mutable_inline_bytes();
  if (packed) chunks->add_chunks();
  for (const int i : indices) {
    const std::string& tensor = bytes[static_cast<size_t>(i)];
    if (packed) {
      chunks->mutable_chunks(0)->append(tensor);
    } else {
      chunks->add_chunks(tensor);
    }
  }
  return bucket;
}

}  // namespace refitd::e2e
