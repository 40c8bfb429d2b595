#include "transport/plan/plan.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "transport/base/errors.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"
#include "transport/plan/boxes.h"

namespace refitd {
namespace {

constexpr size_t kReservedMoves = 16'384;  // at most

absl::string_view Key(std::string_view name) { return {name.data(), name.size()}; }

// A piece of a source that holds part of the tensor.
struct SourcePiece {
  uint32_t source = 0;
  uint32_t piece = 0;
  const Box* box = nullptr;
};

// A piece of a destination that is not skipped.
struct Wanted {
  uint32_t destination = 0;
  uint32_t piece = 0;
  const Box* box = nullptr;
  int64_t covered = 0;  // elements that have a move
};

// One tensor that sources bring, with the pieces of all of them.
struct SourceTensor {
  const TensorSpec* spec = nullptr;
  uint32_t first_source = 0;
  const DestinationIndex::Tensor* target = nullptr;  // null: no destination wants it
  uint32_t held_begin = 0;                           // into the planner's held_
  uint32_t held_end = 0;
};

// A box, and all pieces with an equal box, at most one for each source.
struct Replicas {
  const Box* box = nullptr;
  absl::Span<const SourcePiece> holders;  // ascending sources
};

class Planner {
 public:
  Planner(absl::Span<const PlanSource> sources, const DestinationIndex& index,
          const PlanOptions& options)
      : sources_(sources), index_(index), options_(options), load_(sources.size(), 0) {
    if (!options.require_cover) return;
    uncovered_allowed_.insert(options.uncovered_allowed.begin(), options.uncovered_allowed.end());
  }

  absl::StatusOr<MovePlan> Run() {
    REFITD_RETURN_IF_ERROR(CollectSourceTensors());
    // Reserve enough for a bucket, because growing the vector would cost more than planning.
    plan_.moves.reserve(
        std::min<size_t>(held_.size() * index_.destinations().size(), kReservedMoves));
    for (const SourceTensor& tensor : tensors_) {
      if (tensor.target == nullptr) continue;
      REFITD_RETURN_IF_ERROR(PlanTensor(tensor));
    }
    if (options_.require_cover) REFITD_RETURN_IF_ERROR(CheckAllHeld());
    SortMoves();
    return std::move(plan_);
  }

 private:
  // ---- the sources' pieces, by tensor ----

  absl::Status CollectSourceTensors() {
    std::vector<std::vector<uint32_t>> number_of(sources_.size());
    absl::flat_hash_map<std::string_view, uint32_t> by_name;
    const bool one_source = sources_.size() == 1;  // its names are unique, so no table is needed
    for (uint32_t s = 0; s < sources_.size(); ++s) {
      number_of[s].reserve(sources_[s].tensors.size());
      for (const TensorSpec& spec : sources_[s].tensors) {
        auto number = static_cast<uint32_t>(tensors_.size());
        if (!one_source) number = by_name.try_emplace(spec.name, number).first->second;
        number_of[s].push_back(number);
        REFITD_RETURN_IF_ERROR(AddSourceTensor(spec, s, number));
      }
    }
    CollectHeld(number_of);
    return absl::OkStatus();
  }

  absl::Status AddSourceTensor(const TensorSpec& spec, uint32_t source, uint32_t index) {
    if (index < tensors_.size()) {
      const SourceTensor& tensor = tensors_[index];
      if (tensor.spec->dtype == spec.dtype && tensor.spec->shape == spec.shape) {
        return absl::OkStatus();
      }
      return AboutTensor(
          Precondition("tensor {}: {} in source {}, {} in source {}", spec.name,
                       ToString(tensor.spec->dtype, tensor.spec->shape), tensor.first_source,
                       ToString(spec.dtype, spec.shape), source),
          spec.name);
    }
    const DestinationIndex::Tensor* target = index_.Find(spec.name);
    if (target != nullptr && (target->dtype != spec.dtype || target->shape != spec.shape)) {
      return AboutTensor(Precondition("tensor {}: {} in source {}, {} in {}", spec.name,
                                      ToString(spec.dtype, spec.shape), source,
                                      ToString(target->dtype, target->shape),
                                      index_.labels()[target->first_destination]),
                         spec.name);
    }
    tensors_.push_back({&spec, source, target, 0, 0});
    return absl::OkStatus();
  }

  // Fills held_, sorted by tensor, then by source and piece.
  void CollectHeld(const std::vector<std::vector<uint32_t>>& number_of) {
    const auto for_each = [&](const auto& visit) {
      for (uint32_t s = 0; s < sources_.size(); ++s) {
        const absl::Span<const Piece> pieces = sources_[s].pieces;
        for (uint32_t p = 0; p < pieces.size(); ++p) {
          SourceTensor& tensor = tensors_[number_of[s][pieces[p].tensor]];
          if (tensor.target != nullptr && !IsEmpty(pieces[p].box)) visit(tensor, s, p);
        }
      }
    };
    // held_end first counts a tensor's pieces, then is the end of the pieces that were filled in.
    for_each([](SourceTensor& tensor, uint32_t, uint32_t) { ++tensor.held_end; });
    uint32_t total = 0;
    for (SourceTensor& tensor : tensors_) {
      tensor.held_begin = total;
      total += std::exchange(tensor.held_end, total);
    }
    held_.resize(total);
    for_each([this](SourceTensor& tensor, uint32_t s, uint32_t p) {
      held_[tensor.held_end++] = {s, p, &sources_[s].pieces[p].box};
    });
  }

  // ---- one tensor ----

  absl::Status PlanTensor(const SourceTensor& tensor) {
    element_bytes_ = ElementBytes(tensor.spec->dtype);
    CollectWanted(*tensor.target);
    const BoxIndex wanted(wanted_boxes_);
    const auto first_move = plan_.moves.size();
    auto held =
        absl::MakeSpan(held_).subspan(tensor.held_begin, tensor.held_end - tensor.held_begin);
    if (AllDisjoint(held)) {
      for (const SourcePiece& piece : held) EmitSole(piece, *piece.box, wanted);
    } else {
      ChooseSources(held, wanted);
    }
    if (options_.require_cover && !Exhausted()) {
      REFITD_RETURN_IF_ERROR(CheckCovered(tensor, first_move));
    }
    if (!Exhausted()) return absl::OkStatus();
    return AboutTensor(
        Error(absl::StatusCode::kResourceExhausted,
              "tensor {}: boxes so far need over {} moves or {} steps of planning: use fewer and "
              "more regular pieces",
              tensor.spec->name, options_.max_moves, kMaxPlanSteps),
        tensor.spec->name);
  }

  void CollectWanted(const DestinationIndex::Tensor& target) {
    wanted_.clear();
    wanted_boxes_.clear();
    for (const DestinationIndex::Entry& entry : target.entries) {
      if (Skipped(entry.destination)) continue;
      const Box* box = &DestinationPiece(entry.destination, entry.piece).box;
      if (IsEmpty(*box)) continue;
      wanted_.push_back({entry.destination, entry.piece, box, 0});
      wanted_boxes_.push_back(box);
    }
  }

  // Recognises the common cases (one holder, one range in a few boxes) cheaply. Returns false also
  // if the answer would take long.
  static bool AllDisjoint(absl::Span<const SourcePiece> held) {
    if (held.size() > BoxIndex::kLinearBoxes) return false;
    for (size_t i = 0; i < held.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        if (Intersect(*held[i].box, *held[j].box).has_value()) return false;
      }
    }
    return true;
  }

  bool Exhausted() const {
    return work_.Over() || static_cast<int64_t>(plan_.moves.size()) > options_.max_moves;
  }

  // Decides, for every element that several sources hold, which of these sources is read.
  void ChooseSources(absl::Span<SourcePiece> held, const BoxIndex& wanted) {
    const std::vector<Replicas> classes = Classes(held);
    std::vector<const Box*> boxes;
    boxes.reserve(classes.size());
    for (const Replicas& replicas : classes) boxes.push_back(replicas.box);
    const BoxIndex index(boxes);
    std::vector<uint32_t> meeting;
    for (uint32_t c = 0; c < classes.size() && !Exhausted(); ++c) {
      meeting.clear();
      work_ += index.Query(*boxes[c], [&](uint32_t other) {
        if (other != c && Meet(*boxes[c], *boxes[other])) meeting.push_back(other);
      });
      std::sort(meeting.begin(), meeting.end());
      std::vector<Box> parts = {*boxes[c]};
      for (const uint32_t other : meeting) {
        if (other < c) parts = Outside(parts, *boxes[other]);
      }
      for (const Box& part : parts) {
        ShareOutPart(part, Holders(part, classes, c, meeting), wanted);
        if (Exhausted()) return;
      }
    }
  }

  // Groups equal boxes, bigger boxes first. Reorders `held`.
  static std::vector<Replicas> Classes(absl::Span<SourcePiece> held) {
    std::sort(held.begin(), held.end(), [](const SourcePiece& a, const SourcePiece& b) {
      const auto key = [](const SourcePiece& h) {
        return std::tie(h.box->offset, h.box->extent, h.source, h.piece);
      };
      return key(a) < key(b);
    });
    std::vector<Replicas> classes;
    for (size_t begin = 0, end = 0; begin < held.size(); begin = end) {
      while (end < held.size() && *held[end].box == *held[begin].box) ++end;
      classes.push_back({held[begin].box, held.subspan(begin, end - begin)});
    }
    std::stable_sort(classes.begin(), classes.end(), [](const Replicas& a, const Replicas& b) {
      return ElementCount(*a.box) > ElementCount(*b.box);
    });
    return classes;
  }

  std::vector<Box> Outside(const std::vector<Box>& boxes, const Box& hole) {
    if (Exhausted()) return {};
    std::vector<Box> parts;
    for (const Box& box : boxes) Subtract(box, hole, &parts);
    work_ += kCutSteps * static_cast<int64_t>(boxes.size());
    return parts;
  }

  // Returns one piece of every source that holds all of `part`, which is a part of class `c`.
  // Sources are ascending.
  std::vector<SourcePiece> Holders(const Box& part, const std::vector<Replicas>& classes,
                                   uint32_t c, const std::vector<uint32_t>& meeting) {
    std::vector<SourcePiece> holders(classes[c].holders.begin(), classes[c].holders.end());
    for (const uint32_t other : meeting) {
      // The part has no elements of an earlier class.
      if (other < c || !Contains(*classes[other].box, part)) continue;
      holders.insert(holders.end(), classes[other].holders.begin(), classes[other].holders.end());
    }
    work_ += static_cast<int64_t>(holders.size() + meeting.size());
    std::stable_sort(
        holders.begin(), holders.end(),
        [](const SourcePiece& a, const SourcePiece& b) { return a.source < b.source; });
    const auto same = [](const SourcePiece& a, const SourcePiece& b) {
      return a.source == b.source;
    };
    holders.erase(std::unique(holders.begin(), holders.end(), same), holders.end());
    return holders;
  }

  void ShareOutPart(const Box& part, const std::vector<SourcePiece>& holders,
                    const BoxIndex& wanted) {
    if (holders.size() == 1) {
      EmitSole(holders.front(), part, wanted);
      return;
    }
    // Only elements that some destination wants are read, so only these are balanced.
    for (const Box& box : WantedOf(part, wanted)) {
      if (ElementCount(box) * element_bytes_ < kSplitBytes) {
        Emit(LeastLoaded(holders), box, wanted);
      } else {
        Split(box, holders, wanted);
      }
    }
  }

  // The union of what destinations want of `part`, as disjoint boxes.
  std::vector<Box> WantedOf(const Box& part, const BoxIndex& wanted) {
    std::vector<Box> boxes;
    work_ += wanted.Query(part, [&](uint32_t w) {
      if (auto box = Intersect(part, *wanted_[w].box)) boxes.push_back(*std::move(box));
    });
    return MakeDisjoint(std::move(boxes), &work_);
  }

  const SourcePiece& LeastLoaded(const std::vector<SourcePiece>& holders) const {
    return *std::min_element(holders.begin(), holders.end(),
                             [this](const SourcePiece& a, const SourcePiece& b) {
                               return load_[a.source] < load_[b.source];
                             });
  }

  // Cuts `box` into a slice for each holder, so that their loads are as equal as whole steps along
  // one dimension allow.
  void Split(const Box& box, const std::vector<SourcePiece>& holders, const BoxIndex& wanted) {
    const auto count = static_cast<int64_t>(holders.size());
    size_t dim = 0;
    while (dim < box.extent.size() && box.extent[dim] < count) ++dim;
    if (dim == box.extent.size()) {
      dim = static_cast<size_t>(std::max_element(box.extent.begin(), box.extent.end()) -
                                box.extent.begin());
    }
    const int64_t bytes = ElementCount(box) * element_bytes_;
    const int64_t step_bytes = bytes / box.extent[dim];
    const int64_t level = Level(load_, holders, bytes);
    int64_t quota = 0;  // sum of the quotas of all holders so far
    int64_t done = 0;   // steps
    for (size_t h = 0; h < holders.size(); ++h) {
      quota += std::max<int64_t>(level - load_[holders[h].source], 0);
      const bool last = h + 1 == holders.size();
      const int64_t until =
          last ? box.extent[dim] : std::min((quota + step_bytes / 2) / step_bytes, box.extent[dim]);
      if (until == done) continue;
      Box slice = box;
      slice.offset[dim] += done;
      slice.extent[dim] = until - done;
      Emit(holders[h], slice, wanted);
      done = until;
    }
  }

  static int64_t Level(const std::vector<int64_t>& load, const std::vector<SourcePiece>& holders,
                       int64_t bytes) {
    std::vector<int64_t> loads;
    loads.reserve(holders.size());
    for (const SourcePiece& holder : holders) loads.push_back(load[holder.source]);
    return WaterLevel(std::move(loads), bytes);
  }

  // ---- moves ----

  // Emit for a box of which destinations may want only parts.
  void EmitSole(const SourcePiece& from, const Box& box, const BoxIndex& wanted) {
    if (sources_.size() > 1) {
      for (const Box& part : WantedOf(box, wanted)) {
        load_[from.source] += ElementCount(part) * element_bytes_;
      }
    }
    EmitMoves(from, box, wanted);
  }

  // Makes the moves of `box` from that piece to all destinations that want some of it. Each element
  // of `box` must be wanted by some destination.
  void Emit(const SourcePiece& from, const Box& box, const BoxIndex& wanted) {
    load_[from.source] += ElementCount(box) * element_bytes_;
    EmitMoves(from, box, wanted);
  }

  void EmitMoves(const SourcePiece& from, const Box& box, const BoxIndex& wanted) {
    if (Exhausted()) return;
    const Piece& source = sources_[from.source].pieces[from.piece];
    work_ += wanted.Query(box, [&](uint32_t w) {
      Wanted& to = wanted_[w];
      std::optional<Box> common = Intersect(box, *to.box);
      if (!common.has_value()) return;
      const int64_t elements = ElementCount(*common);
      to.covered += elements;
      plan_.bytes += elements * element_bytes_;
      CopyMove& move = plan_.moves.emplace_back();
      move.source = from.source;
      move.source_piece = from.piece;
      move.destination = to.destination;
      move.destination_piece = to.piece;
      move.source_byte_offset = ByteOffset(source, *common, element_bytes_);
      move.destination_byte_offset =
          ByteOffset(DestinationPiece(to.destination, to.piece), *common, element_bytes_);
      move.box = *std::move(common);
    });
  }

  void SortMoves() {
    const std::vector<CopyMove>& moves = plan_.moves;
    const auto less = [](const CopyMove& a, const CopyMove& b) {
      const auto key = [](const CopyMove& m) {
        return std::tie(m.source, m.source_piece, m.box.offset, m.destination, m.destination_piece);
      };
      return key(a) < key(b);
    };
    if (std::is_sorted(moves.begin(), moves.end(), less)) return;
    std::vector<uint32_t> order(moves.size());
    std::iota(order.begin(), order.end(), 0U);
    std::sort(order.begin(), order.end(),
              [&](uint32_t a, uint32_t b) { return less(moves[a], moves[b]); });
    std::vector<CopyMove> sorted;
    sorted.reserve(moves.size());
    for (const uint32_t i : order) sorted.push_back(std::move(plan_.moves[i]));
    plan_.moves = std::move(sorted);
  }

  // ---- cover ----

  bool Allowed(const std::string& name) const { return uncovered_allowed_.contains(name); }

  // The sources' shares are disjoint, so it is enough to count elements.
  absl::Status CheckCovered(const SourceTensor& tensor, size_t first_move) {
    for (const Wanted& wanted : wanted_) {
      if (wanted.covered == ElementCount(*wanted.box) || Allowed(tensor.spec->name)) continue;
      std::vector<Box> missing = {*wanted.box};
      for (size_t m = first_move; m < plan_.moves.size(); ++m) {
        const CopyMove& move = plan_.moves[m];
        if (move.destination != wanted.destination) continue;
        if (move.destination_piece != wanted.piece) continue;
        missing = Outside(missing, move.box);
      }
      if (Exhausted()) return absl::OkStatus();  // the caller reports the limit
      return NotCovered(tensor.spec->name, wanted.destination,
                        *std::min_element(missing.begin(), missing.end(), BoxLess));
    }
    return absl::OkStatus();
  }

  // Checks for tensors that no source has at all.
  absl::Status CheckAllHeld() const {
    absl::flat_hash_set<const DestinationIndex::Tensor*> known;
    for (const SourceTensor& tensor : tensors_) known.insert(tensor.target);
    for (uint32_t i = 0; i < index_.destinations().size(); ++i) {
      const Layout* layout = index_.destinations()[i].get();
      if (layout == nullptr || Skipped(i)) continue;
      for (const Piece& piece : layout->pieces) {
        const std::string& name = layout->tensors[piece.tensor].name;
        if (IsEmpty(piece.box) || known.contains(index_.Find(name)) || Allowed(name)) continue;
        return NotCovered(name, i, piece.box);
      }
    }
    return absl::OkStatus();
  }

  absl::Status NotCovered(const std::string& name, uint32_t destination, const Box& first) const {
    return AboutTensor(Precondition("tensor {}: no source holds element [{}] that {} has", name,
                                    fmt::join(first.offset, ", "), index_.labels()[destination]),
                       name);
  }

  bool Skipped(uint32_t destination) const {
    return destination < options_.skip_destination.size() && options_.skip_destination[destination];
  }

  const Piece& DestinationPiece(uint32_t destination, uint32_t piece) const {
    return index_.destinations()[destination]->pieces[piece];
  }

  const absl::Span<const PlanSource> sources_;
  const DestinationIndex& index_;
  const PlanOptions& options_;
  std::vector<SourceTensor> tensors_;
  std::vector<SourcePiece> held_;
  std::vector<int64_t> load_;  // bytes read from each source
  MovePlan plan_;
  absl::flat_hash_set<std::string_view> uncovered_allowed_;
  PlanWork work_;

  // These fields are about the tensor that is being planned.
  std::vector<Wanted> wanted_;
  std::vector<const Box*> wanted_boxes_;
  int64_t element_bytes_ = 0;
};

}  // namespace

uint64_t MovePlan::Digest() const {
  HashChain chain(0);
  chain.Add(moves.size());
  for (const CopyMove& move : moves) {
    chain.Add(move.source);
    chain.Add(move.source_piece);
    chain.Add(move.destination);
    chain.Add(move.destination_piece);
    chain.Add(move.box.offset.size());
    chain.Add(move.box.offset);
    chain.Add(move.box.extent);
    chain.Add(static_cast<uint64_t>(move.source_byte_offset));
    chain.Add(static_cast<uint64_t>(move.destination_byte_offset));
  }
  return chain.hash();
}

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
          tensor.dtype = spec.dtype;
          tensor.shape = spec.shape;
          tensor.first_destination = i;
        }
        places.push_back(it->second);
      }
      const Tensor& tensor = index->tensors_[places.back()];
      if (tensor.dtype != spec.dtype || tensor.shape != spec.shape) {
        return AboutTensor(
            Precondition("tensor {}: {} in {}, {} in {}", spec.name,
                         ToString(tensor.dtype, tensor.shape), labels[tensor.first_destination],
                         ToString(spec.dtype, spec.shape), labels[i]),
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

absl::StatusOr<MovePlan> Compile(absl::Span<const PlanSource> sources,
                                 const DestinationIndex& destinations, const PlanOptions& options) {
  return Planner(sources, destinations, options).Run();
}

absl::StatusOr<MovePlan> Compile(const std::vector<std::shared_ptr<const Layout>>& sources,
                                 const DestinationIndex& destinations, const PlanOptions& options) {
  std::vector<PlanSource> views(sources.size());
  for (size_t s = 0; s < sources.size(); ++s) {
    if (sources[s] != nullptr) views[s] = {sources[s]->tensors, sources[s]->pieces};
  }
  return Compile(views, destinations, options);
}

}  // namespace refitd
