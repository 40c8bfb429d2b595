#include "transport/plan/refit_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "transport/base/errors.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"
#include "transport/plan/block_scales.h"
#include "transport/plan/boxes.h"
#include "transport/plan/by_tensor.h"
#include "transport/plan/derived.h"

namespace refitd {
namespace {

constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

// The most ranks named in an error.
constexpr size_t kMaxRanksNamed = 8;

using Ids = std::vector<uint32_t>;

// Finds the boxes that several source ranks hold. Ranks that share a layout object are one holder
// here; Add turns holders into ranks.
class ReplicaFinder {
 public:
  ReplicaFinder(const std::vector<RouteMember>& sources, const RouteOptions& options,
                const std::vector<TensorSpec>& tensors)
      : options_(options), tensors_(tensors), work_(options.cancelled) {
    absl::flat_hash_map<const Layout*, size_t> known;
    for (uint32_t s = 0; s < sources.size(); ++s) {
      const Layout* layout = sources[s].layout.get();
      if (layout == nullptr) continue;
      const auto [it, added] = known.try_emplace(layout, layouts_.size());
      if (added) {
        layouts_.push_back(layout);
        members_.emplace_back();
      }
      members_[it->second].push_back(s);
    }
  }

  absl::StatusOr<Replicas> Run(const std::vector<RouteMember>& destinations) {
    NumberTensors();
    CollectEntries();
    REFITD_RETURN_IF_ERROR(FindReplicas());
    replicas_.replicated = static_cast<uint32_t>(replicas_.boxes.size());
    REFITD_RETURN_IF_ERROR(AddTies(destinations));
    SortByHash();
    return std::move(replicas_);
  }

 private:
  struct Entry {
    uint32_t layout = 0;
    uint32_t piece = 0;
  };

  absl::Status FindReplicas() {
    std::vector<OwnedBox> held;
    for (uint32_t t = 0; t < tensors_.size(); ++t) {
      if (left_out_[t] || !SeveralHave(t)) continue;
      CutHeld(t, &held);
      for (OwnedBox& box : held) Add(t, std::move(box));
      if (work_.Cancelled()) return absl::CancelledError("the plan was cancelled");
      if (work_.Over() || static_cast<int64_t>(replicas_.boxes.size()) > options_.max_routes) {
        return AboutTensor(
            Error(absl::StatusCode::kResourceExhausted,
                  "tensor {}: finding replicas so far needs over {} boxes or {} steps: use "
                  "fewer and more regular pieces",
                  tensors_[t].name, options_.max_routes, kMaxPlanSteps),
            tensors_[t].name);
      }
    }
    return absl::OkStatus();
  }

  // The boxes of the tensor that sources hold, disjoint, each with the layouts that hold it.
  void CutHeld(uint32_t t, std::vector<OwnedBox>* held) {
    held->clear();
    for (const auto& [layout, piece] : entries_.Of(t)) {
      held->push_back({layouts_[layout]->pieces[piece].box, {layout}});
    }
    CutByHolders(held, &work_);
    std::sort(held->begin(), held->end(),
              [](const OwnedBox& a, const OwnedBox& b) { return BoxLess(a.box, b.box); });
  }

  void SortByHash() {
    uint32_t last = kNone;
    for (const Replica& box : replicas_.boxes) {
      replicas_.tensors += box.tensor == last ? 0 : 1;
      last = box.tensor;
      const int64_t bytes = ElementCount(box.box) * ElementBytes(tensors_[box.tensor].dtype);
      replicas_.by_hash.emplace_back(box.hash, bytes);
    }
    std::sort(replicas_.by_hash.begin(), replicas_.by_hash.end());
    int64_t bytes = 0;
    for (auto& [hash, sum] : replicas_.by_hash) sum = bytes += sum;
  }

  // ---- ties ----

  std::optional<uint32_t> NumberOf(std::string_view name) const {
    const auto at =
        std::lower_bound(tensors_.begin(), tensors_.end(), name,
                         [](const TensorSpec& t, std::string_view n) { return t.name < n; });
    if (at == tensors_.end() || at->name != name) return std::nullopt;
    return static_cast<uint32_t>(at - tensors_.begin());
  }

  bool Skipped(const RouteMember& destination) const {
    return destination.instance < options_.skip_instance.size() &&
           options_.skip_instance[destination.instance];
  }

  absl::Status AddTies(const std::vector<RouteMember>& destinations) {
    std::set<std::pair<uint32_t, uint32_t>> known;
    absl::flat_hash_set<const Layout*> seen;
    for (const RouteMember& member : destinations) {
      const Layout* const layout = member.layout.get();
      if (layout == nullptr || Skipped(member) || !seen.insert(layout).second) continue;
      for (const Tie& tie : layout->ties) {
        REFITD_RETURN_IF_ERROR(AddTie(layout->tensors[tie.tensor].name,
                                      layout->tensors[tie.same_as].name, member.label, &known));
      }
    }
    return absl::OkStatus();
  }

  // Sources need not have the tied name; if they do, its values are compared.
  absl::Status AddTie(const std::string& name, const std::string& same_as,
                      const std::string& destination,
                      std::set<std::pair<uint32_t, uint32_t>>* known) {
    const std::optional<uint32_t> tensor = NumberOf(name);
    const std::optional<uint32_t> kept = NumberOf(same_as);
    if (!tensor.has_value() || !kept.has_value() || entries_.Of(*tensor).empty() ||
        entries_.Of(*kept).empty() || left_out_[*tensor] || left_out_[*kept] ||
        !known->emplace(*tensor, *kept).second) {
      return absl::OkStatus();
    }
    TiedTensors tie{*tensor, *kept, destination, 0, 0, 0};
    tie.begin = static_cast<uint32_t>(replicas_.boxes.size());
    REFITD_RETURN_IF_ERROR(Cover(*tensor, same_as, destination));
    tie.middle = static_cast<uint32_t>(replicas_.boxes.size());
    REFITD_RETURN_IF_ERROR(Cover(*kept, name, destination));
    tie.end = static_cast<uint32_t>(replicas_.boxes.size());
    replicas_.ties.push_back(std::move(tie));
    return absl::OkStatus();
  }

  // Adds boxes that cover the tensor once, each with the first rank that holds it.
  absl::Status Cover(uint32_t t, const std::string& tied_to, const std::string& destination) {
    std::vector<OwnedBox> held;
    CutHeld(t, &held);
    int64_t missing = ElementCount(WholeBox(tensors_[t].shape));
    for (OwnedBox& box : held) {
      missing -= ElementCount(box.box);
      const uint32_t rank = members_[*box.holders.begin()].front();
      AddBox(t, SetOf({rank}), std::move(box.box));
    }
    if (missing == 0) return absl::OkStatus();
    return Precondition(
        "tensor {}: it is one memory with tensor {} in {}, and the trainers' ranks lack {} "
        "elements "
        "of it, so that the two can't be compared",
        tensors_[t].name, tied_to, destination, missing);
  }

  // The holder set of these ranks.
  uint32_t SetOf(Ids ranks) {
    const auto [it, added] =
        set_of_ranks_.try_emplace(ranks, static_cast<uint32_t>(replicas_.holder_sets.size()));
    if (added) replicas_.holder_sets.push_back(std::move(ranks));
    return it->second;
  }

  void AddBox(uint32_t t, uint32_t holder_set, Box box) {
    if (t != hashed_tensor_) {
      hashed_tensor_ = t;
      tensor_hash_ = TensorHash(tensors_[t]);
    }
    const uint64_t hash = ReplicaHash(tensor_hash_, box);
    replicas_.boxes.push_back({t, holder_set, std::move(box), hash});
  }

  // ---- tensors ----

  // Numbers tensors by name. Tensors that are pushed, or about which ranks disagree, are not in the
  // plan and have no replicas.
  void NumberTensors() {
    absl::flat_hash_map<std::string_view, uint32_t> by_name;
    by_name.reserve(tensors_.size());
    for (uint32_t t = 0; t < tensors_.size(); ++t) by_name.emplace(tensors_[t].name, t);
    absl::flat_hash_set<std::string_view> skipped(options_.skip_tensors.begin(),
                                                  options_.skip_tensors.end());
    skipped.insert(options_.engine_only.begin(), options_.engine_only.end());
    for (const TensorSpec& tensor : tensors_) left_out_.push_back(skipped.contains(tensor.name));
    for (const Layout* layout : layouts_) {
      const Ids* before = tensor_of_.empty() ? nullptr : &tensor_of_.back();
      Ids ids;
      ids.reserve(layout->tensors.size());
      for (const TensorSpec& spec : layout->tensors) {
        // Layouts often name the same tensors in the same order, so try the last layout's tensor
        // first.
        const size_t i = ids.size();
        const bool same =
            before != nullptr && i < before->size() && tensors_[(*before)[i]].name == spec.name;
        const uint32_t id = same ? (*before)[i] : by_name.at(spec.name);
        if (tensors_[id] != spec) left_out_[id] = true;
        ids.push_back(id);
      }
      tensor_of_.push_back(std::move(ids));
    }
  }

  void CollectEntries() {
    const auto for_each = [&](const auto& visit) {
      for (uint32_t l = 0; l < layouts_.size(); ++l) {
        const std::vector<Piece>& pieces = layouts_[l]->pieces;
        for (uint32_t p = 0; p < pieces.size(); ++p) {
          if (!IsEmpty(pieces[p].box)) visit(tensor_of_[l][pieces[p].tensor], Entry{l, p});
        }
      }
    };
    entries_ = ByTensor<Entry>(tensors_.size(), for_each);
  }

  bool SeveralHave(uint32_t t) const {
    const auto entries = entries_.Of(t);
    if (entries.empty()) return false;
    const uint32_t layout = entries.front().layout;
    return members_[layout].size() > 1 || entries.back().layout != layout;
  }

  void Add(uint32_t t, OwnedBox held) {
    const auto [it, added] =
        set_of_.try_emplace(Ids(held.holders.begin(), held.holders.end()), kNone);
    if (added) {
      Ids ranks;
      for (const uint32_t layout : it->first) {
        ranks.insert(ranks.end(), members_[layout].begin(), members_[layout].end());
      }
      if (ranks.size() > 1) {
        std::sort(ranks.begin(), ranks.end());
        it->second = SetOf(std::move(ranks));
      }
    }
    if (it->second != kNone) AddBox(t, it->second, std::move(held.box));
  }

  const RouteOptions& options_;
  const std::vector<TensorSpec>& tensors_;
  std::vector<const Layout*> layouts_;  // distinct
  std::vector<Ids> members_;            // of each layout, ascending
  std::vector<Ids> tensor_of_;          // per layout, per tensor of it
  std::vector<bool> left_out_;          // per tensor
  ByTensor<Entry> entries_;             // by layout, then piece
  std::map<Ids, uint32_t> set_of_;      // by layouts; kNone: one rank
  std::map<Ids, uint32_t> set_of_ranks_;
  Replicas replicas_;
  uint32_t hashed_tensor_ = kNone;  // the tensor of tensor_hash_
  uint64_t tensor_hash_ = 0;
  PlanWork work_;
};

std::string LabelOf(const RoutePlan& plan, uint32_t source) {
  if (source < plan.source_labels.size()) return plan.source_labels[source];
  return fmt::format("source {}", source);
}

// The error for a box whose holders differ. It names the ranks whose digest differs from the most
// common digest (of equally common ones, the first).
absl::Status Differ(const RefitPlan& plan, const Replica& replica,
                    const std::vector<uint64_t>& digests) {
  const auto holders = plan.replicas.HoldersOf(replica);
  uint64_t common = digests[0];
  const auto times = [&](uint64_t digest) {
    return std::count(digests.begin(), digests.end(), digest);
  };
  for (const uint64_t digest : digests) {
    if (times(digest) > times(common)) common = digest;
  }
  std::vector<std::string> odd;
  std::string with;
  size_t others = 0;
  for (size_t i = 0; i < holders.size(); ++i) {
    if (digests[i] == common) {
      if (with.empty()) with = LabelOf(plan.routes, holders[i]);
    } else if (odd.size() < kMaxRanksNamed) {
      odd.push_back(
          fmt::format("{} has digest {:016x}", LabelOf(plan.routes, holders[i]), digests[i]));
    } else {
      ++others;
    }
  }
  return AboutTensor(
      Error(absl::StatusCode::kDataLoss,
            "tensor {}: replicas differ in the box at [{}] of extent [{}]: {}{}, {} of {} ranks "
            "({} and others) have {:016x}. Likely the step's gather of parameters has not ended on "
            "every rank (Megatron's overlap_param_gather: call start_param_sync before the refit), "
            "or ranks have made different steps",
            plan.routes.tensors[replica.tensor].name, fmt::join(replica.box.offset, ", "),
            fmt::join(replica.box.extent, ", "), fmt::join(odd, ", "),
            others == 0 ? "" : fmt::format(" and {} others differ, too", others), times(common),
            holders.size(), with, common),
      plan.routes.tensors[replica.tensor].name);
}

// The error for tied tensors whose values differ.
absl::Status Untied(const RefitPlan& plan, const TiedTensors& tie) {
  return Precondition(
      "tensor {} and tensor {} are one memory in {}, and the trainers' values of them differ: tie "
      "them in the trainer too, or serve a model that keeps them apart",
      plan.routes.tensors[tie.tensor].name, plan.routes.tensors[tie.same_as].name, tie.destination);
}

// Checks the scales of each distinct layout of the destinations that take part.
absl::Status CheckScales(const std::vector<RouteMember>& destinations,
                         const RouteOptions& options) {
  absl::flat_hash_set<const Layout*> seen;
  for (const RouteMember& member : destinations) {
    const Layout* layout = member.layout.get();
    const bool skipped =
        member.instance < options.skip_instance.size() && options.skip_instance[member.instance];
    if (layout == nullptr || skipped || !seen.insert(layout).second) continue;
    const absl::Status status = CheckFloat8Scales(*layout);
    if (!status.ok()) return Prefixed(status, "{}", member.label);
  }
  return absl::OkStatus();
}

// `digests`: of the boxes of ties, in their order; none if this version compares only a part.
absl::Status CompareTies(const RefitPlan& plan, const std::vector<uint64_t>& digests) {
  const size_t boxes = plan.replicas.boxes.size() - plan.replicas.replicated;
  if (digests.size() != boxes) return absl::OkStatus();
  const auto sum = [&](uint32_t begin, uint32_t end) {
    uint64_t total = 0;
    for (uint32_t box = begin; box < end; ++box) total += digests[box - plan.replicas.replicated];
    return total;
  };
  for (const TiedTensors& tie : plan.replicas.ties) {
    if (sum(tie.begin, tie.middle) != sum(tie.middle, tie.end)) return Untied(plan, tie);
  }
  return absl::OkStatus();
}

}  // namespace

RefitContent ContentOf(const std::vector<RouteMember>& sources,
                       const std::vector<RouteMember>& destinations, const RouteOptions& options) {
  struct Tensor {
    const TensorSpec* spec = nullptr;
    bool wanted = false;
  };
  std::vector<Tensor> tensors;
  absl::flat_hash_map<std::string_view, size_t> places;
  absl::flat_hash_set<const Layout*> seen;
  for (const RouteMember& source : sources) {
    if (source.layout == nullptr || !seen.insert(source.layout.get()).second) continue;
    for (const TensorSpec& tensor : source.layout->tensors) {
      if (places.try_emplace(tensor.name, tensors.size()).second) {
        tensors.push_back({&tensor, false});
      }
    }
  }
  const absl::flat_hash_set<std::string_view> pushed(options.skip_tensors.begin(),
                                                     options.skip_tensors.end());
  const absl::flat_hash_set<std::string_view> engine_only(options.engine_only.begin(),
                                                          options.engine_only.end());
  RefitContent content;
  absl::flat_hash_set<std::string_view> counted;
  seen.clear();
  for (const RouteMember& member : destinations) {
    const Layout* layout = member.layout.get();
    if (layout == nullptr || !seen.insert(layout).second) continue;
    std::vector<bool> stored(layout->tensors.size());
    for (const Piece& piece : layout->pieces)
      stored[piece.tensor] = stored[piece.tensor] || !IsEmpty(piece.box);
    for (size_t t = 0; t < stored.size(); ++t) {
      if (!stored[t]) continue;
      const TensorSpec& tensor = layout->tensors[t];
      bool held = false;
      for (const std::string_view name :
           {std::string_view(tensor.name), std::string_view(NameAtSource(tensor))}) {
        const auto place = places.find(name);
        if (place == places.end()) continue;
        tensors[place->second].wanted = held = true;
      }
      if (!held || pushed.contains(tensor.name) || engine_only.contains(tensor.name) ||
          !counted.insert(tensor.name).second) {
        continue;
      }
      ++content.stored;
    }
  }
  for (const auto& [spec, wanted] : tensors) {
    if (pushed.contains(spec->name)) continue;
    const int64_t bytes = ElementCount(WholeBox(spec->shape)) * ElementBytes(spec->dtype);
    if (wanted && !engine_only.contains(spec->name)) {
      ++content.tensors;
      content.bytes += bytes;
    } else {
      content.unwanted.push_back(spec->name);
      content.unwanted_bytes += bytes;
    }
  }
  std::sort(content.unwanted.begin(), content.unwanted.end());
  return content;
}

absl::StatusOr<std::shared_ptr<const RefitPlan>> CompileRefit(
    const std::vector<RouteMember>& sources, const std::vector<RouteMember>& destinations,
    const RouteOptions& options) {
  auto plan = std::make_shared<RefitPlan>();
  REFITD_ASSIGN_OR_RETURN(plan->routes, CompileRoutes(sources, destinations, options));
  REFITD_RETURN_IF_ERROR(CheckScales(destinations, options));
  REFITD_ASSIGN_OR_RETURN(plan->replicas,
                          ReplicaFinder(sources, options, plan->routes.tensors).Run(destinations));
  plan->content = ContentOf(sources, destinations, options);
  std::vector<int64_t> shares(plan->routes.nodes);
  for (const Replica& replica : plan->replicas.boxes) {
    for (const uint32_t source : plan->replicas.HoldersOf(replica)) {
      const uint32_t node = plan->routes.source_nodes[source];
      if (++shares[node] <= kMaxNodeShares) continue;
      return AboutTensor(
          Error(absl::StatusCode::kResourceExhausted,
                "tensor {}: the ranks on node {} hold more than {} boxes that others hold too",
                plan->routes.tensors[replica.tensor].name, node, kMaxNodeShares),
          plan->routes.tensors[replica.tensor].name);
    }
  }
  return plan;
}

RoutePlan ShareOfNode(const RoutePlan& plan, uint32_t node,
                      absl::Span<const std::shared_ptr<const Layout>> local) {
  RoutePlan part;
  part.source_nodes = plan.source_nodes;
  part.destination_nodes = plan.destination_nodes;
  part.destination_skipped = plan.destination_skipped;
  part.source_digests = plan.source_digests;
  part.destination_digests = plan.destination_digests;
  part.nodes = plan.nodes;
  part.longest_stream = plan.longest_stream;
  part.relay = plan.relay;

  std::vector<bool> in_set;  // per node set
  for (const std::vector<uint32_t>& nodes : plan.node_sets) {
    in_set.push_back(std::find(nodes.begin(), nodes.end(), node) != nodes.end());
  }
  const auto concerns = [&](const Route& route) {
    return plan.source_nodes[route.source] == node || in_set[route.node_set];
  };
  absl::flat_hash_set<std::string_view> named;
  absl::flat_hash_set<const Layout*> seen;
  for (const std::shared_ptr<const Layout>& layout : local) {
    if (layout == nullptr || !seen.insert(layout.get()).second) continue;
    for (const TensorSpec& tensor : layout->tensors) named.insert(tensor.name);
  }
  std::vector<bool> wanted;
  for (const TensorSpec& tensor : plan.tensors) wanted.push_back(named.contains(tensor.name));
  for (const Route& route : plan.routes) {
    if (concerns(route)) wanted[route.tensor] = true;
  }
  Ids tensor_number(plan.tensors.size(), kNone);
  for (uint32_t t = 0; t < plan.tensors.size(); ++t) {
    if (!wanted[t]) continue;
    tensor_number[t] = static_cast<uint32_t>(part.tensors.size());
    part.tensors.push_back(plan.tensors[t]);
  }
  Ids set_number(plan.node_sets.size(), kNone);
  for (const Route& route : plan.routes) {
    if (!concerns(route)) continue;
    uint32_t& set = set_number[route.node_set];
    if (set == kNone) {
      set = static_cast<uint32_t>(part.node_sets.size());
      part.node_sets.push_back(plan.node_sets[route.node_set]);
    }
    part.routes.push_back({tensor_number[route.tensor], route.source, set,
                           static_cast<uint32_t>(part.box_numbers.size())});
    const auto numbers = plan.box_numbers.begin() + route.box;
    part.box_numbers.insert(
        part.box_numbers.end(), numbers,
        numbers + 2 * static_cast<int64_t>(plan.tensors[route.tensor].shape.size()));
  }
  return part;
}

std::vector<ReplicaShare> SharesOf(const Replicas& replicas, const std::vector<bool>& on_node) {
  std::vector<ReplicaShare> shares;
  for (const Replica& replica : replicas.boxes) {
    for (const uint32_t source : replicas.HoldersOf(replica)) {
      if (source < on_node.size() && on_node[source]) {
        shares.push_back({source, replica.tensor, replica.box});
      }
    }
  }
  return shares;
}

uint64_t ReplicaHash(uint64_t tensor_hash, const Box& box) {
  HashChain chain(tensor_hash);
  chain.Add(box.offset);
  chain.Add(box.extent);
  return chain.hash();
}

absl::Status CompareReplicas(const RefitPlan& plan,
                             const std::vector<std::vector<uint64_t>>& digests,
                             ReplicaFraction part) {
  const std::vector<uint32_t>& node_of = plan.routes.source_nodes;
  const size_t nodes = std::max<size_t>(plan.routes.nodes, digests.size());
  std::vector<size_t> in_part(nodes);
  for (const Replica& replica : plan.replicas.boxes) {
    if (!part.Has(replica.hash)) continue;
    for (const uint32_t source : plan.replicas.HoldersOf(replica)) ++in_part[node_of[source]];
  }
  for (size_t n = 0; n < nodes; ++n) {
    const size_t has = n < digests.size() ? digests[n].size() : 0;
    if (has != in_part[n]) {
      return Error(absl::StatusCode::kInternal, "node {} gave {} digests of {} replicas", n, has,
                   in_part[n]);
    }
  }
  std::vector<size_t> next(nodes);
  std::vector<uint64_t> of_box;
  std::vector<uint64_t> of_ties;  // by box, after those that are replicated
  for (const Replica& replica : plan.replicas.boxes) {
    if (!part.Has(replica.hash)) continue;
    of_box.clear();
    for (const uint32_t source : plan.replicas.HoldersOf(replica)) {
      const uint32_t node = node_of[source];
      of_box.push_back(digests[node][next[node]++]);
    }
    if (std::adjacent_find(of_box.begin(), of_box.end(), std::not_equal_to<>()) != of_box.end()) {
      return Differ(plan, replica, of_box);
    }
    const auto box = static_cast<size_t>(&replica - plan.replicas.boxes.data());
    if (box >= plan.replicas.replicated) of_ties.push_back(of_box.front());
  }
  return CompareTies(plan, of_ties);
}

ReplicaFraction NextFraction(const Replicas& replicas, uint64_t cursor, int64_t every) {
  if (replicas.tensors <= kTensorsComparedAlways || !replicas.ties.empty()) return {};
  const auto& boxes = replicas.by_hash;
  const int64_t share = (boxes.back().second + every - 1) / every;
  const auto begin = std::lower_bound(boxes.begin(), boxes.end(), std::pair(cursor, int64_t{0}));
  const int64_t before = begin == boxes.begin() ? 0 : std::prev(begin)->second;
  const auto end = std::find_if(begin, boxes.end(),
                                [&](const auto& box) { return box.second - before >= share; });
  ReplicaFraction part;
  part.first = cursor;
  // Boxes of one hash are not parted.
  if (end != boxes.end() && end->first != boxes.back().first) part.last = end->first;
  return part;
}

}  // namespace refitd
