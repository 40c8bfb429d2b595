#include "transport/plan/derived.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

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

absl::Status CheckScalesOfDerived(const std::vector<TensorSpec>& tensors) {
  using Quantised = std::pair<std::string_view, DerivedKind>;
  absl::flat_hash_set<Quantised> has[2];
  for (const TensorSpec& tensor : tensors) {
    if (tensor.derived == nullptr || !RowOf(tensor.derived->kind).scales.has_value()) continue;
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

DerivedLayouts::DerivedLayouts(absl::Span<const Layout* const> layouts) {
  absl::flat_hash_set<const TensorSpec*> seen;  // layouts share lists
  for (const Layout* layout : layouts) {
    if (layout == nullptr || !seen.insert(layout->tensors.data()).second) continue;
    for (const TensorSpec& tensor : layout->tensors) Add(tensor);
  }
}

DerivedLayouts::DerivedLayouts(const std::vector<TensorSpec>& tensors) {
  for (const TensorSpec& tensor : tensors) Add(tensor);
}

void DerivedLayouts::Add(const TensorSpec& tensor) {
  if (tensor.derived == nullptr || !names_.insert(tensor.name).second) return;
  by_source_[tensor.derived->from.name].push_back(&tensor);
}

absl::StatusOr<DerivedLayouts::Extended> DerivedLayouts::ExtendedOf(
    const TensorList::List& tensors) const {
  absl::flat_hash_set<std::string_view> own;
  for (const TensorSpec& tensor : tensors) {
    if (names_.contains(tensor.name)) own.insert(tensor.name);
  }
  Extended extended;
  TensorList::List added;
  for (uint32_t t = 0; t < tensors.size(); ++t) {
    const TensorSpec& from = tensors[t];
    const auto wanted = by_source_.find(from.name);
    if (wanted == by_source_.end()) continue;
    for (const TensorSpec* tensor : wanted->second) {
      if (own.contains(tensor->name)) continue;
      if (from != tensor->derived->from) {
        return AboutTensor(
            Error(absl::StatusCode::kFailedPrecondition,
                  "tensor {}: engines derive it from {} as {}, and trainers have {}", tensor->name,
                  from.name, ToString(tensor->derived->from.dtype, tensor->derived->from.shape),
                  ToString(from.dtype, from.shape)),
            tensor->name);
      }
      extended.computed[t].push_back(static_cast<uint32_t>(tensors.size() + added.size()));
      added.push_back(*tensor);
    }
  }
  if (added.empty()) return extended;
  TensorList::List all;
  all.reserve(tensors.size() + added.size());
  all.insert(all.end(), tensors.begin(), tensors.end());
  all.insert(all.end(), added.begin(), added.end());
  extended.tensors = std::make_shared<const TensorList::List>(std::move(all));
  return extended;
}

absl::StatusOr<std::shared_ptr<const Layout>> DerivedLayouts::Extend(
    std::shared_ptr<const Layout> layout) {
  if (names_.empty()) return layout;
  const auto known = layouts_.find(layout.get());
  if (known != layouts_.end()) return known->second;
  const auto [list, unseen] = lists_.try_emplace(layout->tensors.data());
  if (unseen) {
    REFITD_ASSIGN_OR_RETURN(list->second, ExtendedOf(layout->tensors));
  }
  const Extended& extended = list->second;
  if (extended.tensors == nullptr) return layouts_[layout.get()] = layout;
  auto more = std::make_shared<Layout>(*layout);
  more->tensors = TensorList(extended.tensors);
  int64_t looked_at = std::ssize(layout->pieces);
  for (uint32_t p = 0; p < layout->pieces.size(); ++p) {
    const Piece& held = layout->pieces[p];
    const auto found = extended.computed.find(held.tensor);
    if (found == extended.computed.end()) continue;
    looked_at += std::ssize(found->second);
    if (looked_at > kMaxPiecesPerLayout) {
      const std::string& name = more->tensors[found->second.front()].name;
      return AboutTensor(Error(absl::StatusCode::kResourceExhausted,
                               "tensor {}: what engines derive of a rank's tensors has more than "
                               "{} pieces",
                               name, kMaxPiecesPerLayout),
                         name);
    }
    for (const uint32_t tensor : found->second) {
      std::optional<Box> box = ComputableBox(*more->tensors[tensor].derived, held.box);
      if (!box.has_value()) continue;
      Dims strides = RowMajorStrides(box->extent);
      more->pieces.push_back({tensor, *std::move(box), held.region, 0, std::move(strides), p});
    }
  }
  return layouts_[layout.get()] = std::move(more);
}

}  // namespace refitd
