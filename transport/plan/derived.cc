#include "transport/plan/derived.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "transport/base/errors.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

// The longest row that has one scale (P10): a row is computed as a whole. Models' rows are shorter
// than a sixtieth of this.
constexpr int64_t kMaxRow = int64_t{1} << 22;

struct KindRow {
  DerivedKind kind;
  std::string_view name;
  int64_t rows = 1;     // of a block
  int64_t columns = 1;  // of a block; 0: as many as a row has
  bool padded = true;   // a dimension may end within a block
  std::optional<DType> scales;
};

constexpr KindRow kKinds[] = {
    {DerivedKind::kCast, "cast", 1, 1, true, std::nullopt},
    {DerivedKind::kFp8Block, "fp8_block", 128, 128, true, DType::kFloat32},
    {DerivedKind::kFp8BlockReciprocal, "fp8_block_reciprocal", 128, 128, false, DType::kFloat32},
    {DerivedKind::kFp8BlockPow2, "fp8_block_pow2", 128, 128, false, DType::kFloat32},
    {DerivedKind::kFp8Channel, "fp8_channel", 1, 0, true, DType::kFloat32},
    {DerivedKind::kFp8BlockCuda, "fp8_block_cuda", 128, 128, true, DType::kFloat32},
    {DerivedKind::kFp8BlockInductor, "fp8_block_inductor", 128, 128, true, DType::kFloat32},
    {DerivedKind::kMxFp8, "mxfp8", 1, 32, false, DType::kUint8},
};

bool Known(DerivedKind kind) {
  const auto number = static_cast<size_t>(kind);
  return number >= 1 && number <= std::size(kKinds);
}

const KindRow& RowOf(DerivedKind kind) {
  REFITD_CHECK(Known(kind));
  return kKinds[static_cast<size_t>(kind) - 1];
}

bool IsFloat(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16;
}

// What is wrong with a derived tensor; empty: nothing.
std::string Fault(const TensorSpec& tensor) {
  const Derivation& d = *tensor.derived;
  if (!Known(d.kind)) return fmt::format("kind {} is not known", static_cast<int>(d.kind));
  const KindRow& kind = RowOf(d.kind);
  const bool values = d.role == DerivedRole::kValues;
  if (!values && (d.role != DerivedRole::kScales || !kind.scales.has_value())) {
    return fmt::format("kind {} has no role {}", kind.name, static_cast<int>(d.role));
  }
  if (d.from.derived != nullptr) return "it is derived from a tensor that is derived";
  if (!IsFloat(d.from.dtype)) {
    return fmt::format("kind {} takes float32, bfloat16 or float16, not {}", kind.name,
                       DTypeName(d.from.dtype));
  }
  const Dims& shape = d.from.shape;
  if (kind.scales.has_value() && shape.size() < 2) {
    return fmt::format("kind {} takes two dimensions or more, not {}", kind.name,
                       ToString(d.from.dtype, shape));
  }
  if (kind.columns == 0 && shape.back() > kMaxRow) {
    return fmt::format("kind {} takes rows of at most {} elements, not {}", kind.name, kMaxRow,
                       ToString(d.from.dtype, shape));
  }
  const Dims block = BlockOf(d);
  for (size_t i = 0; i < shape.size(); ++i) {
    if (kind.padded || shape[i] % block[i] == 0) continue;
    return fmt::format("kind {} takes whole blocks of {}, not {}", kind.name,
                       fmt::join(block, " x "), ToString(d.from.dtype, shape));
  }
  const DType dtype = !values                   ? *kind.scales
                      : kind.scales.has_value() ? DType::kFloat8E4M3FN
                                                : tensor.dtype;
  Dims wanted = shape;
  if (!values) {
    for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = (wanted[i] + block[i] - 1) / block[i];
  }
  if (tensor.dtype != dtype || tensor.shape != wanted ||
      !(kind.scales.has_value() || IsFloat(dtype))) {
    return fmt::format(
        "it is {}, which the {} are not{}", ToString(tensor.dtype, tensor.shape), Describe(d),
        kind.scales.has_value() ? fmt::format(": they are {}", ToString(dtype, wanted)) : "");
  }
  return "";
}

}  // namespace

std::string_view NameOf(DerivedKind kind) { return RowOf(kind).name; }

std::string Describe(const Derivation& derivation) {
  return fmt::format("{} of {} of {} {}",
                     derivation.role == DerivedRole::kValues ? "values" : "scales",
                     NameOf(derivation.kind),
                     ToString(derivation.from.dtype, derivation.from.shape), derivation.from.name);
}

std::string Describe(const TensorSpec& tensor) {
  std::string type = ToString(tensor.dtype, tensor.shape);
  if (tensor.derived == nullptr) return type;
  return fmt::format("{} ({})", type, Describe(*tensor.derived));
}

absl::Status NoResult(const Derivation& derivation, std::string_view where) {
  return AboutTensor(Precondition("tensor {}, {}: NaN, an infinity, or numbers too small for a "
                                  "scale, so that the {} can't be computed",
                                  derivation.from.name, where, Describe(derivation)),
                     derivation.from.name);
}

Dims BlockOf(const Derivation& derivation) {
  const KindRow& kind = RowOf(derivation.kind);
  Dims block(derivation.from.shape.size(), 1);
  if (block.empty() || !kind.scales.has_value()) return block;
  block.back() =
      kind.columns == 0 ? std::max<int64_t>(derivation.from.shape.back(), 1) : kind.columns;
  block[block.size() - 2] = kind.rows;
  return block;
}

absl::Status ValidateDerived(const TensorSpec& tensor) {
  REFITD_RETURN_IF_ERROR(ValidateTensor(tensor.derived->from));
  const std::string fault = Fault(tensor);
  if (fault.empty()) return absl::OkStatus();
  return AboutTensor(Error(absl::StatusCode::kInvalidArgument, "tensor {}: {}", tensor.name, fault),
                     tensor.name);
}

absl::Status CheckDerivedTogether(const std::vector<TensorSpec>& tensors) {
  using Quantised = std::pair<std::string_view, DerivedKind>;
  absl::flat_hash_set<Quantised> has[2];
  absl::flat_hash_map<std::string_view, int64_t> count;  // of tensors, by source
  for (const TensorSpec& tensor : tensors) {
    if (tensor.derived == nullptr) continue;
    if (++count[tensor.derived->from.name] > kMaxDerivedFrom) {
      return AboutTensor(Error(absl::StatusCode::kResourceExhausted,
                               "tensor {}: over {} tensors of the layout are derived from {}",
                               tensor.name, kMaxDerivedFrom, tensor.derived->from.name),
                         tensor.name);
    }
    if (!RowOf(tensor.derived->kind).scales.has_value()) continue;
    has[tensor.derived->role == DerivedRole::kScales].emplace(tensor.derived->from.name,
                                                              tensor.derived->kind);
  }
  for (const TensorSpec& tensor : tensors) {
    if (tensor.derived == nullptr || !RowOf(tensor.derived->kind).scales.has_value()) continue;
    const bool values = tensor.derived->role == DerivedRole::kValues;
    if (has[values].contains(Quantised(tensor.derived->from.name, tensor.derived->kind))) continue;
    return AboutTensor(Error(absl::StatusCode::kInvalidArgument,
                             "tensor {}: the layout has the {}, but not the {}", tensor.name,
                             Describe(*tensor.derived), values ? "scales" : "values"),
                       tensor.name);
  }
  return absl::OkStatus();
}

bool MayBeCut(DerivedKind kind) {
  return kind != DerivedKind::kCast && kind != DerivedKind::kMxFp8;
}

std::optional<Box> ComputableBox(const Derivation& derivation, const Box& held) {
  const Dims block = BlockOf(derivation);
  const Dims& shape = derivation.from.shape;
  Box box = held;
  for (size_t d = 0; d < shape.size(); ++d) {
    const int64_t end = held.offset[d] + held.extent[d];
    const int64_t first = (held.offset[d] + block[d] - 1) / block[d];
    const int64_t last = end == shape[d] ? (end + block[d] - 1) / block[d] : end / block[d];
    if (first >= last) return std::nullopt;
    const bool values = derivation.role == DerivedRole::kValues;
    box.offset[d] = values ? first * block[d] : first;
    box.extent[d] = (values ? std::min(last * block[d], shape[d]) : last) - box.offset[d];
  }
  return box;
}

Box BlocksAround(const Derivation& derivation, const Box& box) {
  const Dims block = BlockOf(derivation);
  Box around = box;
  for (size_t d = 0; d < block.size(); ++d) {
    const int64_t end = (box.offset[d] + box.extent[d] + block[d] - 1) / block[d] * block[d];
    around.offset[d] = box.offset[d] / block[d] * block[d];
    around.extent[d] = std::min(end, derivation.from.shape[d]) - around.offset[d];
  }
  return around;
}

Box ComputedFrom(const Derivation& derivation, const Box& box) {
  if (derivation.role == DerivedRole::kValues) return BlocksAround(derivation, box);
  const Dims block = BlockOf(derivation);
  Box elements = box;
  for (size_t d = 0; d < block.size(); ++d) {
    elements.offset[d] *= block[d];
    elements.extent[d] = (box.extent[d] - 1) * block[d] + 1;
  }
  return BlocksAround(derivation, elements);
}

}  // namespace refitd
