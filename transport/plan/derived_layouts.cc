#include "transport/plan/derived_layouts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"
#include "transport/plan/name_advice.h"

namespace refitd {
namespace {

absl::Status TooManyPieces(const std::string& tensor) {
  return AboutTensor(Error(absl::StatusCode::kResourceExhausted,
                           "tensor {}: what engines derive of a rank's tensors has more than {} "
                           "pieces",
                           tensor, kMaxPiecesPerLayout),
                     tensor);
}

// The part of `boxes` outside of `hole`.
std::vector<Box> Outside(const std::vector<Box>& boxes, const Box& hole, PlanWork* work) {
  std::vector<Box> rest;
  for (const Box& box : boxes) Subtract(box, hole, &rest);
  *work += kCutSteps * static_cast<int64_t>(boxes.size());
  return rest;
}

// A piece of one of the node's layouts.
struct Holder {
  uint32_t layout = 0;
  uint32_t piece = 0;
  bool operator==(const Holder&) const = default;
};

// The boxes of one tensor that a node's ranks hold, in order, and who holds each.
class HeldBoxes {
 public:
  HeldBoxes(std::vector<Holder> holders, absl::Span<const std::shared_ptr<const Layout>> node) {
    const auto box_of = [node](const Holder& holder) -> const Box& {
      return node[holder.layout]->pieces[holder.piece].box;
    };
    std::stable_sort(holders.begin(), holders.end(), [&](const Holder& a, const Holder& b) {
      return BoxLess(box_of(a), box_of(b));
    });
    for (const Holder& holder : holders) {
      if (boxes_.empty() || *boxes_.back() != box_of(holder)) {
        boxes_.push_back(&box_of(holder));
        holders_.emplace_back();
      }
      holders_.back().push_back(holder);
    }
    index_.emplace(boxes_);
  }
  HeldBoxes(const HeldBoxes&) = delete;
  HeldBoxes& operator=(const HeldBoxes&) = delete;

  // Calls visit(i) for each box that meets `box`, in an order that depends on the boxes alone.
  template <typename Visit>
  void Query(const Box& box, PlanWork* work, const Visit& visit) const {
    *work += index_->Query(box, [&](uint32_t i) {
      if (Meet(*boxes_[i], box)) visit(i);
    });
  }
  const Box& box(uint32_t i) const { return *boxes_[i]; }
  // The holder of the box whose layout has the number nearest to `layout`, so that several layouts
  // that read the box share its replicas out among themselves.
  const Holder& Nearest(uint32_t i, uint32_t layout) const {
    const auto distance = [layout](const Holder& holder) {
      return std::abs(int64_t{holder.layout} - int64_t{layout});
    };
    return *std::min_element(
        holders_[i].begin(), holders_[i].end(),
        [&](const Holder& a, const Holder& b) { return distance(a) < distance(b); });
  }

 private:
  std::vector<const Box*> boxes_;
  std::vector<absl::InlinedVector<Holder, 1>> holders_;  // of each box, ascending
  std::optional<BoxIndex> index_;
};

}  // namespace

// What the ranks of a node hold of the tensors from which others are derived.
class DerivedLayouts::Node {
 public:
  Node(const DerivedLayouts& derived, absl::Span<const std::shared_ptr<const Layout>> layouts,
       ShardBoxes* other_shards, PlanWork* work)
      : layouts_(layouts), other_shards_(*other_shards), work_(*work) {
    for (uint32_t l = 0; l < layouts.size(); ++l) {
      const TensorList::List& tensors = layouts[l]->tensors;
      std::vector<std::vector<Holder>*> of_tensor(tensors.size());
      for (size_t t = 0; t < tensors.size(); ++t) {
        if (tensors[t].derived == nullptr && derived.by_source_.contains(tensors[t].name)) {
          of_tensor[t] = &holders_[KeyOf(tensors[t])];
        }
      }
      const std::vector<Piece>& pieces = layouts[l]->pieces;
      for (uint32_t p = 0; p < pieces.size(); ++p) {
        std::vector<Holder>* const holders = of_tensor[pieces[p].tensor];
        if (holders != nullptr && !IsEmpty(pieces[p].box)) holders->push_back({l, p});
      }
    }
  }

  // Returns the blocks in `around` of which the node's ranks hold every element, as boxes.
  std::vector<Box> Whole(const Derivation& derivation, const Box& around) {
    const HeldBoxes& held = HeldOf(derivation.from);
    std::vector<Box> missing = {around};
    held.Query(around, &work_, [&](uint32_t i) {
      if (!missing.empty() && !work_.Over()) missing = Outside(missing, held.box(i), &work_);
    });
    std::vector<Box> whole = {around};
    for (const Box& box : missing) {
      if (work_.Over()) break;  // the caller returns Check
      whole = Outside(whole, BlocksAround(derivation, box), &work_);
    }
    MergeAdjacent(&whole);
    return whole;
  }

  // Notes the boxes of the blocks `whole` that the piece `computed` of the extended layout needs
  // beyond `own`, from which it is computed.
  void AddShards(Holder own, uint32_t computed, const Derivation& derivation, const Box& whole) {
    // The values and the scales of one piece come one after the other.
    if (own != own_) lists_.clear();
    own_ = own;
    const auto [it, added] = lists_.try_emplace({whole.offset, whole.extent});
    if (added) it->second = ListOf(own, derivation, whole);
    if (it->second != nullptr) other_shards_.emplace(std::pair(own.layout, computed), it->second);
  }

  absl::Status Check(const TensorSpec& tensor) const {
    if (work_.Cancelled()) return absl::CancelledError("the plan was cancelled");
    if (!too_many_ && !work_.Over()) return absl::OkStatus();
    return AboutTensor(
        Error(absl::StatusCode::kResourceExhausted,
              "tensor {}: blocks of {} that shards cut need over {} boxes, {} for one box, or {} "
              "steps of planning: use fewer and more regular pieces",
              tensor.name, tensor.derived->from.name, kMaxPiecesPerLayout, kMaxShardBoxes,
              kMaxPlanSteps),
        tensor.name);
  }

 private:
  bool Exhausted(const std::vector<ShardBox>& list) const {
    return work_.Over() || listed_ > kMaxPiecesPerLayout || std::ssize(list) > kMaxShardBoxes;
  }

  // Null: `own` has the blocks.
  std::shared_ptr<const std::vector<ShardBox>> ListOf(Holder own, const Derivation& derivation,
                                                      const Box& whole) {
    std::vector<Box> rest = Outside({whole}, layouts_[own.layout]->pieces[own.piece].box, &work_);
    if (rest.empty()) return nullptr;
    const HeldBoxes& held = HeldOf(derivation.from);
    auto list = std::make_shared<std::vector<ShardBox>>();
    held.Query(whole, &work_, [&](uint32_t i) {
      if (rest.empty() || Exhausted(*list)) return;
      const Holder& holder = held.Nearest(i, own.layout);
      for (const Box& box : rest) {
        std::optional<Box> common = Intersect(box, held.box(i));
        if (!common.has_value()) continue;
        list->push_back({holder.layout, holder.piece, *std::move(common)});
        ++listed_;
      }
      rest = Outside(rest, held.box(i), &work_);
    });
    too_many_ = too_many_ || Exhausted(*list);
    return list;
  }

  // Layouts that disagree about a tensor are refused elsewhere.
  using Key = std::tuple<std::string_view, DType, Dims>;
  static Key KeyOf(const TensorSpec& tensor) { return {tensor.name, tensor.dtype, tensor.shape}; }

  const HeldBoxes& HeldOf(const TensorSpec& from) {
    const auto [it, added] = boxes_.try_emplace(KeyOf(from), nullptr);
    if (added) it->second = std::make_unique<HeldBoxes>(std::move(holders_[it->first]), layouts_);
    return *it->second;
  }

  const absl::Span<const std::shared_ptr<const Layout>> layouts_;
  ShardBoxes& other_shards_;
  PlanWork& work_;
  std::map<Key, std::vector<Holder>> holders_;  // of tensors that are not in boxes_
  std::map<Key, std::unique_ptr<HeldBoxes>> boxes_;
  Holder own_;
  // Of own_, by the offset and extent of the blocks.
  std::map<std::pair<Dims, Dims>, std::shared_ptr<const std::vector<ShardBox>>> lists_;
  int64_t listed_ = 0;  // boxes
  bool too_many_ = false;
};

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

absl::StatusOr<DerivedLayouts::List> DerivedLayouts::ListOf(const TensorList::List& tensors) const {
  absl::flat_hash_set<std::string_view> own;
  for (const TensorSpec& tensor : tensors) {
    if (names_.contains(tensor.name)) own.insert(tensor.name);
  }
  List list;
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
                  "tensor {}: engines derive it from {} as {}, and trainers have {}{}",
                  tensor->name, from.name,
                  ToString(tensor->derived->from.dtype, tensor->derived->from.shape),
                  ToString(from.dtype, from.shape), CastAdvice(from, tensor->derived->from)),
            tensor->name);
      }
      list.computed[t].push_back(static_cast<uint32_t>(tensors.size() + added.size()));
      added.push_back(*tensor);
    }
  }
  if (added.empty()) return list;
  TensorList::List all;
  all.reserve(tensors.size() + added.size());
  all.insert(all.end(), tensors.begin(), tensors.end());
  all.insert(all.end(), added.begin(), added.end());
  list.tensors = std::make_shared<const TensorList::List>(std::move(all));
  return list;
}

absl::StatusOr<std::shared_ptr<const Layout>> DerivedLayouts::ExtendOne(
    const std::shared_ptr<const Layout>& layout, Node* node, uint32_t number) {
  const auto [known, unseen] = lists_.try_emplace(layout->tensors.data());
  if (unseen) {
    REFITD_ASSIGN_OR_RETURN(known->second, ListOf(layout->tensors));
  }
  const List& list = known->second;
  if (list.tensors == nullptr) return layout;
  auto more = std::make_shared<Layout>(*layout);
  more->tensors = TensorList(list.tensors);
  int64_t looked_at = std::ssize(layout->pieces);
  absl::flat_hash_map<uint32_t, Box> last;  // by tensor: pieces of one rank may share blocks
  for (uint32_t p = 0; p < layout->pieces.size(); ++p) {
    const Piece& held = layout->pieces[p];
    const auto found = list.computed.find(held.tensor);
    if (found == list.computed.end() || IsEmpty(held.box)) continue;
    for (const uint32_t t : found->second) {
      const TensorSpec& tensor = list.tensors->at(t);
      const Derivation& derivation = *tensor.derived;
      const Box around = BlocksAround(derivation, held.box);
      if (const auto it = last.find(t); it != last.end() && it->second == around) continue;
      std::vector<Box> boxes;  // whole blocks
      if (around == held.box) {
        boxes = {around};
      } else if (MayBeCut(derivation.kind)) {
        if (node == nullptr) return nullptr;
        boxes = node->Whole(derivation, around);
      } else if (const auto box = ComputableBox(derivation, held.box); box.has_value()) {
        boxes = {ComputedFrom(derivation, *box)};
      }
      looked_at += std::max<int64_t>(1, std::ssize(boxes));
      if (looked_at > kMaxPiecesPerLayout) return TooManyPieces(tensor.name);
      for (Box& whole : boxes) {
        Box box = *ComputableBox(derivation, whole);
        Dims strides = RowMajorStrides(box.extent);
        const auto piece = static_cast<uint32_t>(more->pieces.size());
        more->pieces.push_back({t, std::move(box), held.region, 0, std::move(strides), p});
        if (node != nullptr) node->AddShards({number, p}, piece, derivation, whole);
        last[t] = std::move(whole);
      }
      if (node != nullptr) REFITD_RETURN_IF_ERROR(node->Check(tensor));
    }
  }
  return more;
}

absl::StatusOr<DerivedLayouts::Extended> DerivedLayouts::Extend(
    absl::Span<const std::shared_ptr<const Layout>> node, PlanWork* work) {
  Extended extended;
  extended.layouts.assign(node.begin(), node.end());
  if (names_.empty()) return extended;
  std::vector<uint32_t> cut;
  for (uint32_t l = 0; l < node.size(); ++l) {
    const auto [known, unseen] = alone_.try_emplace(node[l].get());
    if (unseen) {
      REFITD_ASSIGN_OR_RETURN(known->second, ExtendOne(node[l], nullptr, l));
    }
    extended.layouts[l] = known->second;
    if (known->second == nullptr) cut.push_back(l);
  }
  if (cut.empty()) return extended;
  Node held(*this, node, &extended.other_shards, work);
  for (const uint32_t l : cut) {
    REFITD_ASSIGN_OR_RETURN(extended.layouts[l], ExtendOne(node[l], &held, l));
  }
  return extended;
}

}  // namespace refitd
