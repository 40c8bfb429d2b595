#include "daemon/group/catalog.h"

#include <algorithm>

#include "transport/base/status.h"

namespace refitd::group {
namespace {

absl::Status Disagree(const TensorSpec& tensor, std::string_view who, const Catalog::Tensor& known,
                      std::string_view verb) {
  return Error(absl::StatusCode::kFailedPrecondition, "tensor '{}': {} {} {}, but {} declared {}",
               tensor.name, who, verb, ToString(tensor.dtype, tensor.shape), known.declared_by,
               ToString(known.dtype, known.shape));
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Catalog>> Catalog::Make(
    std::vector<Rank> ranks, std::vector<std::string> instances,
    const std::vector<std::string>& engine_only) {
  std::shared_ptr<Catalog> catalog(new Catalog());
  catalog->ranks_ = std::move(ranks);
  catalog->instances_ = std::move(instances);
  catalog->open_.resize(catalog->instances_.size());
  catalog->engine_only_.insert(engine_only.begin(), engine_only.end());
  std::vector<std::shared_ptr<const Layout>> layouts;
  std::vector<std::string> labels;
  for (const Rank& rank : catalog->ranks_) {
    if (rank.delivery == DeliveryMode::kStaged) {
      if (rank.manifest == nullptr) {
        catalog->open_[rank.instance] = true;
        continue;
      }
      for (const TensorSpec& tensor : *rank.manifest) {
        const Dims& shape = tensor.shape;
        const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
        REFITD_RETURN_IF_ERROR(catalog->Declare(rank, tensor, !empty));
      }
      continue;
    }
    REFITD_CHECK(rank.layout != nullptr);
    REFITD_RETURN_IF_ERROR(catalog->DeclareLayout(rank));
    int64_t expected = 0;
    for (const Piece& piece : rank.layout->pieces) {
      const TensorSpec& tensor = rank.layout->tensors[piece.tensor];
      if (catalog->engine_only_.contains(tensor.name)) continue;
      expected += ElementCount(piece.box) * ElementBytes(tensor.dtype);
    }
    layouts.push_back(rank.layout);
    labels.push_back(rank.label);
    catalog->destinations_.push_back(rank.member);
    catalog->instance_of_.push_back(rank.instance);
    catalog->expected_bytes_.push_back(expected);
  }
  REFITD_ASSIGN_OR_RETURN(catalog->index_,
                          DestinationIndex::Make(std::move(layouts), std::move(labels)));
  for (const auto& [name, tensor] : catalog->tensors_) {
    if (tensor.wanting.empty()) catalog->unwanted_.push_back(name);
  }
  return std::shared_ptr<const Catalog>(std::move(catalog));
}

absl::Status Catalog::DeclareLayout(const Rank& rank) {
  const Layout& layout = *rank.layout;
  std::vector<bool> stored(layout.tensors.size());
  for (const Piece& piece : layout.pieces) {
    if (ElementCount(piece.box) > 0) stored[piece.tensor] = true;
  }
  for (size_t t = 0; t < layout.tensors.size(); ++t) {
    REFITD_RETURN_IF_ERROR(Declare(rank, layout.tensors[t], stored[t]));
  }
  return absl::OkStatus();
}

absl::Status Catalog::Declare(const Rank& rank, const TensorSpec& tensor, bool wanted) {
  if (engine_only_.contains(tensor.name)) return absl::OkStatus();
  const auto [it, added] = tensors_.try_emplace(tensor.name);
  Tensor& known = it->second;
  if (added) {
    known.dtype = tensor.dtype;
    known.shape = tensor.shape;
    known.declared_by = rank.label;
  } else if (known.dtype != tensor.dtype || known.shape != tensor.shape) {
    return Disagree(tensor, rank.label, known, "declares");
  }
  // Ranks come instance by instance.
  if (wanted && (known.wanting.empty() || known.wanting.back() != rank.instance)) {
    known.wanting.push_back(rank.instance);
  }
  if (known.instances.empty() || known.instances.back() != rank.instance) {
    known.instances.push_back(rank.instance);
  }
  return absl::OkStatus();
}

absl::Status Catalog::Check(const TensorSpec& tensor, const std::vector<bool>& evicted) const {
  if (!engine_only_.empty() && engine_only_.contains(tensor.name)) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "tensor '{}' is engine-only in the group's spec: trainers never push it",
                 tensor.name);
  }
  const auto it = tensors_.find(tensor.name);
  if (it != tensors_.end() &&
      (it->second.dtype != tensor.dtype || it->second.shape != tensor.shape)) {
    return Disagree(tensor, "the bucket", it->second, "has");
  }
  const std::vector<uint32_t> none;
  const std::vector<uint32_t>& knowing = it == tensors_.end() ? none : it->second.instances;
  if (knowing.size() == instances_.size()) return absl::OkStatus();
  for (uint32_t i = 0; i < instances_.size(); ++i) {
    if (open_[i] || evicted[i]) continue;
    if (std::binary_search(knowing.begin(), knowing.end(), i)) continue;
    return Error(absl::StatusCode::kFailedPrecondition, "tensor '{}' is unknown to instance {}",
                 tensor.name, instances_[i]);
  }
  return absl::OkStatus();
}

absl::Status Catalog::CheckAllPushed(const std::function<bool(std::string_view)>& pushed,
                                     const std::vector<bool>& evicted) const {
  // The map's order is random: the smallest name, so that equal events give equal actions.
  const std::string* missing = nullptr;
  uint32_t wanted_by = 0;
  for (const auto& [name, tensor] : tensors_) {
    if (missing != nullptr && name >= *missing) continue;
    const auto wants = std::find_if(tensor.wanting.begin(), tensor.wanting.end(),
                                    [&evicted](uint32_t i) { return !evicted[i]; });
    if (wants == tensor.wanting.end() || pushed(name)) continue;
    missing = &name;
    wanted_by = *wants;
  }
  if (missing == nullptr) return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition, "tensor '{}' of instance {} was never pushed",
               *missing, instances_[wanted_by]);
}

const Catalog::Rank* Catalog::OpenRank(const std::vector<bool>& evicted) const {
  for (const Rank& rank : ranks_) {
    if (evicted[rank.instance]) continue;
    if (rank.delivery == DeliveryMode::kStaged && rank.manifest == nullptr) return &rank;
  }
  return nullptr;
}

int Catalog::AddTouched(const TensorSpec& tensor, const TensorRange& range,
                        const std::vector<bool>& skip_destination,
                        std::vector<bool>* touched) const {
  if (range.count == 0) return 0;
  const DestinationIndex::Tensor* known = index_->Find(tensor.name);
  if (known == nullptr) return 0;
  int marked = 0;
  std::vector<Box> boxes;
  for (const DestinationIndex::Entry& entry : known->entries) {
    const uint32_t d = entry.destination;
    if (skip_destination[d] || (*touched)[d]) continue;
    if (boxes.empty()) boxes = BoxesOfRange(tensor.shape, range.start, range.count);
    const Box& box = index_->destinations()[d]->pieces[entry.piece].box;
    (*touched)[d] = std::any_of(boxes.begin(), boxes.end(),
                                [&box](const Box& b) { return Intersect(b, box).has_value(); });
    if ((*touched)[d]) ++marked;
  }
  return marked;
}

}  // namespace refitd::group
