#include "transport/plan/plan.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "transport/base/errors.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"
#include "transport/plan/boxes.h"
#include "transport/plan/by_tensor.h"
#include "transport/plan/derived.h"

namespace refitd {
namespace {

constexpr size_t kReservedMoves = 16'384;  // at most

absl::string_view Key(std::string_view name) { return {name.data(), name.size()}; }

// A piece of a destination that is not skipped.
struct Wanted {
  uint32_t destination = 0;
  uint32_t piece = 0;
  const Box* box = nullptr;
};

class Planner {
 public:
  Planner(const PlanSource& source, const DestinationIndex& index, const PlanOptions& options)
      : source_(source), index_(index), options_(options) {}

  absl::StatusOr<MovePlan> Run() {
    // Reserve enough for a bucket, because growing the vector would cost more than planning.
    plan_.moves.reserve(
        std::min<size_t>(source_.pieces.size() * index_.destinations().size(), kReservedMoves));
    const ByTensor<uint32_t> pieces(source_.tensors.size(), [&](const auto& visit) {
      for (uint32_t p = 0; p < source_.pieces.size(); ++p) visit(source_.pieces[p].tensor, p);
    });
    for (uint32_t t = 0; t < source_.tensors.size(); ++t) {
      REFITD_RETURN_IF_ERROR(PlanTensor(source_.tensors[t], pieces.Of(t)));
    }
    SortMoves();
    return std::move(plan_);
  }

 private:
  absl::Status PlanTensor(const TensorSpec& spec, absl::Span<const uint32_t> pieces) {
    const DestinationIndex::Tensor* const target = index_.Find(spec.name);
    if (target == nullptr) return absl::OkStatus();
    if (target->spec->dtype != spec.dtype || target->spec->shape != spec.shape) {
      return AboutTensor(
          Precondition("tensor {}: {} in the source, {} in {}", spec.name, Describe(spec),
                       Describe(*target->spec), index_.labels()[target->first_destination]),
          spec.name);
    }
    CollectWanted(*target);
    const BoxIndex wanted(wanted_boxes_);
    for (const uint32_t piece : pieces) {
      EmitMoves(piece, ElementBytes(spec.dtype), wanted);
      if (!Exhausted()) continue;
      return AboutTensor(
          Error(absl::StatusCode::kResourceExhausted,
                "tensor {}: boxes so far need over {} moves or {} steps of planning: use fewer and "
                "more regular pieces",
                spec.name, options_.max_moves, kMaxPlanSteps),
          spec.name);
    }
    return absl::OkStatus();
  }

  void CollectWanted(const DestinationIndex::Tensor& target) {
    wanted_.clear();
    wanted_boxes_.clear();
    for (const DestinationIndex::Entry& entry : target.entries) {
      if (Skipped(entry.destination)) continue;
      const Box* box = &DestinationPiece(entry.destination, entry.piece).box;
      if (IsEmpty(*box)) continue;
      wanted_.push_back({entry.destination, entry.piece, box});
      wanted_boxes_.push_back(box);
    }
  }

  bool Exhausted() const {
    return work_.Over() || static_cast<int64_t>(plan_.moves.size()) > options_.max_moves;
  }

  // Makes the moves from that piece of the source to all destinations that want some of it.
  void EmitMoves(uint32_t source_piece, int64_t element_bytes, const BoxIndex& wanted) {
    const Piece& source = source_.pieces[source_piece];
    if (IsEmpty(source.box)) return;
    work_ += wanted.Query(source.box, [&](uint32_t w) {
      const Wanted& to = wanted_[w];
      std::optional<Box> common = Intersect(source.box, *to.box);
      if (!common.has_value()) return;
      plan_.bytes += ElementCount(*common) * element_bytes;
      CopyMove& move = plan_.moves.emplace_back();
      move.source_piece = source_piece;
      move.destination = to.destination;
      move.destination_piece = to.piece;
      move.source_byte_offset = ByteOffset(source, *common, element_bytes);
      move.destination_byte_offset =
          ByteOffset(DestinationPiece(to.destination, to.piece), *common, element_bytes);
      move.box = *std::move(common);
    });
  }

  void SortMoves() {
    const auto less = [](const CopyMove& a, const CopyMove& b) {
      const auto key = [](const CopyMove& m) {
        return std::tie(m.source_piece, m.box.offset, m.destination, m.destination_piece);
      };
      return key(a) < key(b);
    };
    if (std::is_sorted(plan_.moves.begin(), plan_.moves.end(), less)) return;
    std::sort(plan_.moves.begin(), plan_.moves.end(), less);
  }

  bool Skipped(uint32_t destination) const {
    return destination < options_.skip_destination.size() && options_.skip_destination[destination];
  }

  const Piece& DestinationPiece(uint32_t destination, uint32_t piece) const {
    return index_.destinations()[destination]->pieces[piece];
  }

  const PlanSource& source_;
  const DestinationIndex& index_;
  const PlanOptions& options_;
  MovePlan plan_;
  PlanWork work_;

  // These fields are about the tensor that is being planned.
  std::vector<Wanted> wanted_;
  std::vector<const Box*> wanted_boxes_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<const DestinationIndex>> DestinationIndex::Make(
    std::vector<std::shared_ptr<const Layout>> destinations, std::vector<std::string> labels) {
  REFITD_CHECK(destinations.size() == labels.size());
  auto index = std::make_shared<DestinationIndex>();
  size_t most = 0;
  for (const std::shared_ptr<const Layout>& layout : destinations) {
    if (layout != nullptr) most = std::max(most, layout->tensors.size());
  }
  index->tensors_.reserve(most);
  index->places_.reserve(most);
  // The places in the index of the previous layout's tensors. Ranks of an instance mostly list the
  // same tensors in the same order, and comparing two names costs less than looking a name up.
  const Layout* before = nullptr;
  std::vector<uint32_t> places_before;
  std::vector<uint32_t> places;
  for (uint32_t i = 0; i < destinations.size(); ++i) {
    if (destinations[i] == nullptr) continue;
    const Layout& layout = *destinations[i];
    places.clear();
    places.reserve(layout.tensors.size());
    for (size_t t = 0; t < layout.tensors.size(); ++t) {
      const TensorSpec& spec = layout.tensors[t];
      if (before != nullptr && t < before->tensors.size() && before->tensors[t].name == spec.name) {
        places.push_back(places_before[t]);
      } else {
        const auto next = static_cast<uint32_t>(index->tensors_.size());
        const auto [it, added] = index->places_.try_emplace(Key(spec.name), next);
        if (added) {
          Tensor& tensor = index->tensors_.emplace_back();
          tensor.spec = &spec;
          tensor.first_destination = i;
          if (spec.derived != nullptr) index->derived_[Key(NameAtSource(spec))].push_back(next);
        }
        places.push_back(it->second);
      }
      const Tensor& tensor = index->tensors_[places.back()];
      if (tensor.spec != &spec && *tensor.spec != spec) {
        return AboutTensor(
            Precondition("tensor {}: {} in {}, {} in {}", spec.name, Describe(*tensor.spec),
                         labels[tensor.first_destination], Describe(spec), labels[i]),
            spec.name);
      }
    }
    for (uint32_t p = 0; p < layout.pieces.size(); ++p) {
      index->tensors_[places[layout.pieces[p].tensor]].entries.push_back({i, p});
    }
    before = &layout;
    std::swap(places, places_before);
  }
  index->destinations_ = std::move(destinations);
  index->labels_ = std::move(labels);
  return std::shared_ptr<const DestinationIndex>(std::move(index));
}

const DestinationIndex::Tensor* DestinationIndex::Find(std::string_view name) const {
  const auto it = places_.find(Key(name));
  return it == places_.end() ? nullptr : &tensors_[it->second];
}

absl::Span<const uint32_t> DestinationIndex::DerivedFrom(std::string_view source) const {
  const auto it = derived_.find(Key(source));
  if (it == derived_.end()) return {};
  return it->second;
}

absl::StatusOr<MovePlan> Compile(const PlanSource& source, const DestinationIndex& destinations,
                                 const PlanOptions& options) {
  return Planner(source, destinations, options).Run();
}

}  // namespace refitd
