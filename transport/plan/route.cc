#include "transport/plan/route.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "transport/base/errors.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"
#include "transport/plan/boxes.h"
#include "transport/plan/by_tensor.h"
#include "transport/plan/derived_layouts.h"
#include "transport/plan/name_advice.h"
#include "transport/plan/name_patterns.h"

namespace refitd {
namespace {

constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

// Sums of bytes stay below this, so that none overflows (P10: a stride of 0 makes any box fit into
// any region). One box to all nodes adds 2^58 at most.
constexpr int64_t kMaxRouteBytes = int64_t{1} << 60;
static_assert(kMaxTensorBytes * kMaxRouteNodes <= kMaxRouteBytes);

// The most that one node of a valid plan sends or receives, sections aligned.
constexpr int64_t kMaxRelayBytes = kMaxRouteBytes + kMaxRoutes * kSectionAlignment;

// A box that is divided among holders is cut at multiples of split_bytes / kGrains.
constexpr int64_t kGrains = 4;

// An order of a chain carries at least one part in kLoadParts of what the busiest node sends.
constexpr int64_t kLoadParts = 256;

// An order of a chain carries at least this many bytes, unless the plan's bound can be kept only
// with more orders: each order adds a stream to every node, and so a message to every round.
// Several orders remain where there is much to send, since one connection may not fill a link.
constexpr int64_t kMinOrderBytes = int64_t{256} << 20;

using Ids = std::vector<uint32_t>;

// Gives equal lists of ids the same number.
class IdLists {
 public:
  uint32_t Number(const Ids& ids) {
    const auto [it, added] = numbers_.try_emplace(ids, static_cast<uint32_t>(lists_.size()));
    if (added) lists_.push_back(&it->first);
    return it->second;
  }
  const Ids& operator[](uint32_t number) const { return *lists_[number]; }

 private:
  struct Hash {
    size_t operator()(const Ids& ids) const {
      HashChain chain(ids.size());
      for (const uint32_t id : ids) chain.Add(id);
      return chain.hash();
    }
  };
  // The map's nodes never move, so pointers to its keys stay valid.
  std::unordered_map<Ids, uint32_t, Hash> numbers_;
  std::vector<const Ids*> lists_;
};

// A tensor's piece in one of a side's distinct layouts.
struct Entry {
  uint32_t layout = 0;
  uint32_t piece = 0;
};

// All sources, or all destinations.
struct Side {
  std::vector<const Layout*> layouts;       // distinct
  std::vector<Ids> members;                 // the members with each layout, ascending
  Ids layout_of;                            // of each member; kNone: none
  std::vector<Ids> tensor_of;               // per layout, per tensor of it
  std::vector<std::vector<bool>> declared;  // per layout, per tensor
  ByTensor<Entry> entries;                  // by layout, then piece

  absl::Span<const Entry> Of(uint32_t tensor) const { return entries.Of(tensor); }
  const Box& BoxOf(const Entry& entry) const {
    return layouts[entry.layout]->pieces[entry.piece].box;
  }
};

// The ranks that hold the same elements, grouped by node.
struct Holders {
  Ids ranks;  // by node, then rank
  Ids nodes;  // ascending
  Ids begin;  // where each node's ranks begin in `ranks`, and the end
};

// A box that some nodes want.
struct Wanted {
  Box box;
  uint32_t node_set = 0;
};

// A box that several ranks can supply.
struct Demand {
  uint32_t tensor = 0;
  uint32_t holders = 0;
  uint32_t node_set = 0;
  bool local = false;
  int64_t bytes = 0;  // of the box
  Box box;
};

struct Chosen {
  uint32_t tensor = 0;
  uint32_t source = 0;
  uint32_t node_set = 0;
  Box box;
};

// The possible suppliers of a set of nodes: all holders for nodes without a holder, a node's own
// holders for the others.
struct Choice {
  uint32_t remote = kNone;                           // set of nodes without a holder; kNone: empty
  std::vector<std::pair<uint32_t, uint32_t>> local;  // set of a single node, and the holders on it
};

// The bytes that each node sends and receives in a plan with chains, sections aligned.
class ChainLoads {
 public:
  explicit ChainLoads(uint32_t nodes)
      : out_(nodes), in_(nodes), streams_out_(nodes), streams_in_(nodes) {}

  // Adds `bytes` of a route from node `from` to the set with that number, whose nodes are `nodes`.
  // The list `nodes` must stay as it is.
  void Add(uint32_t from, uint32_t set, const Ids& nodes, int64_t bytes) {
    if (nodes.size() == 1 && nodes[0] == from) return;
    Chain& chain = chains_[{from, set}];
    const bool first = chain.nodes == nullptr;
    chain.nodes = &nodes;
    chain.bytes += bytes;
    for (const uint32_t to : nodes) {
      out_[from] += bytes;
      in_[to] += bytes;
      if (first) ++streams_out_[from];
      if (first) ++streams_in_[to];
      from = to;
    }
  }

  RelayShape Shape(uint32_t lag) const {
    RelayShape shape;
    std::vector<const Chain*> longest_first;
    for (const auto& [key, chain] : chains_) longest_first.push_back(&chain);
    std::sort(longest_first.begin(), longest_first.end(),
              [](const Chain* a, const Chain* b) { return a->nodes->size() > b->nodes->size(); });
    if (longest_first.empty() || longest_first[0]->nodes->size() < 2) return shape;
    shape.lag = lag;
    shape.longest = static_cast<uint32_t>(longest_first[0]->nodes->size());
    shape.node_streams = Most(streams_out_, streams_in_);
    shape.node_bytes = Most(out_, in_);
    // The bytes of the chains so far, by node. It does not matter in which order equally long
    // chains come.
    std::vector<int64_t> minor(out_.size());
    shape.usual = 1;
    for (const Chain* chain : longest_first) {
      int64_t most = 0;
      for (const uint32_t node : *chain->nodes) most = std::max(most, minor[node] += chain->bytes);
      if (most <= shape.node_bytes / kMinorParts) continue;
      shape.usual = static_cast<uint32_t>(chain->nodes->size());
      break;
    }
    return shape;
  }

 private:
  struct Chain {
    const Ids* nodes = nullptr;
    int64_t bytes = 0;
  };

  template <typename T>
  static T Most(const std::vector<T>& a, const std::vector<T>& b) {
    return std::max(*std::max_element(a.begin(), a.end()), *std::max_element(b.begin(), b.end()));
  }

  // The key is the source's node and the number of the set, which may be of a single node.
  std::map<std::pair<uint32_t, uint32_t>, Chain> chains_;
  std::vector<int64_t> out_;
  std::vector<int64_t> in_;
  std::vector<uint32_t> streams_out_;
  std::vector<uint32_t> streams_in_;
};

class Router {
 public:
  Router(const std::vector<RouteMember>& sources, const std::vector<RouteMember>& destinations,
         const RouteOptions& options)
      : source_members_(sources),
        destination_members_(destinations),
        options_(options),
        work_(options.cancelled) {}

  absl::StatusOr<RoutePlan> Run() {
    REFITD_RETURN_IF_ERROR(CollectMembers());
    NumberTensors();
    // Ranks' layouts that name few tensors each may name too many together.
    const auto tensors = static_cast<int64_t>(plan_.tensors.size());
    if (tensors > kMaxTensorsPerLayout) return TooManyTensors("all ranks' layouts", tensors);
    REFITD_RETURN_IF_ERROR(CheckDeclared());
    CollectEntries(&sources_);
    CollectEntries(&destinations_);
    CollectClasses();
    REFITD_RETURN_IF_ERROR(Supply());
    if (WantsChains()) REFITD_RETURN_IF_ERROR(SupplyByChains());
    Pack();
    Count();
    return std::move(plan_);
  }

 private:
  // Decides who supplies what to whom.
  absl::Status Supply() {
    for (uint32_t t = 0; t < plan_.tensors.size(); ++t) {
      if (left_out_[t]) continue;
      if (Exhausted()) return TooMuch(t);
      REFITD_RETURN_IF_ERROR(PlanTensor(t));
    }
    return AssignShared();
  }

  // ---- members ----

  absl::Status CollectMembers() {
    Collect(
        destination_members_,
        [this](uint32_t i) {
          const RouteMember& member = destination_members_[i];
          const bool skipped = member.instance < options_.skip_instance.size() &&
                               options_.skip_instance[member.instance];
          return skipped ? nullptr : member.layout.get();
        },
        &destinations_, &plan_.destination_nodes, &plan_.destination_labels,
        &plan_.destination_digests);
    REFITD_RETURN_IF_ERROR(AddDerived());
    Collect(
        source_members_, [this](uint32_t i) { return computing_[i].get(); }, &sources_,
        &plan_.source_nodes, &plan_.source_labels, &plan_.source_digests);
    for (const uint32_t layout : destinations_.layout_of) {
      plan_.destination_skipped.push_back(layout == kNone);
    }
    for (const Ids* nodes : {&plan_.source_nodes, &plan_.destination_nodes}) {
      for (const uint32_t node : *nodes) {
        if (node >= kMaxRouteNodes) {
          return Error(absl::StatusCode::kInvalidArgument, "node {} where {} are possible", node,
                       kMaxRouteNodes);
        }
        plan_.nodes = std::max(plan_.nodes, node + 1);
      }
    }
    ClearLoads();
    return absl::OkStatus();
  }

  // Fills computing_: each source's layout with what engines derive from the tensors.
  absl::Status AddDerived() {
    // Sources may hold derived tensors too. CompileNode, which knows the plan's tensors only, must
    // add the same.
    std::vector<const Layout*> all = destinations_.layouts;
    std::map<uint32_t, std::vector<uint32_t>> on_node;
    for (uint32_t i = 0; i < source_members_.size(); ++i) {
      all.push_back(source_members_[i].layout.get());
      if (all.back() != nullptr) on_node[source_members_[i].node].push_back(i);
    }
    DerivedLayouts derived(all);
    computing_.resize(source_members_.size());
    // Nodes whose ranks have the same layouts get the same extensions.
    std::map<std::vector<const Layout*>, std::vector<std::shared_ptr<const Layout>>> known;
    for (const auto& [node, members] : on_node) {
      std::vector<const Layout*> key;
      std::vector<std::shared_ptr<const Layout>> layouts;
      absl::flat_hash_map<const Layout*, size_t> place;
      for (const uint32_t i : members) {
        const std::shared_ptr<const Layout>& layout = source_members_[i].layout;
        if (!place.try_emplace(layout.get(), layouts.size()).second) continue;
        key.push_back(layout.get());
        layouts.push_back(layout);
      }
      const auto [extended, unseen] = known.try_emplace(std::move(key));
      if (unseen) {
        REFITD_ASSIGN_OR_RETURN(DerivedLayouts::Extended made, derived.Extend(layouts, &work_));
        extended->second = std::move(made.layouts);
      }
      for (const uint32_t i : members) {
        computing_[i] = extended->second[place.at(source_members_[i].layout.get())];
      }
    }
    return absl::OkStatus();
  }

  void ClearLoads() {
    for (auto* loads : {&rank_load_, &rank_alone_}) loads->assign(source_members_.size(), 0);
    for (auto* loads : {&node_load_, &node_alone_, &node_receives_, &node_holds_}) {
      loads->assign(plan_.nodes, 0);
    }
  }

  // `planned`: the layout with which a member takes part; null: it takes none.
  template <typename Planned>
  static void Collect(const std::vector<RouteMember>& members, const Planned& planned, Side* side,
                      Ids* nodes, std::vector<std::string>* labels,
                      std::vector<uint64_t>* digests) {
    absl::flat_hash_map<const Layout*, uint32_t> known;
    absl::flat_hash_map<const Layout*, uint64_t> digest_of;
    for (uint32_t i = 0; i < members.size(); ++i) {
      const Layout* layout = members[i].layout.get();
      nodes->push_back(members[i].node);
      labels->push_back(members[i].label);
      side->layout_of.push_back(kNone);
      digests->push_back(0);
      if (layout == nullptr) continue;
      const auto [digest, unseen] = digest_of.try_emplace(layout, 0);
      if (unseen) digest->second = layout->Digest();
      digests->back() = digest->second;
      const Layout* const taken = planned(i);
      if (taken == nullptr) continue;
      const auto [it, added] =
          known.try_emplace(taken, static_cast<uint32_t>(side->layouts.size()));
      if (added) {
        side->layouts.push_back(taken);
        side->members.emplace_back();
      }
      side->layout_of.back() = it->second;
      side->members[it->second].push_back(i);
    }
  }

  const std::string& LabelOf(const Side& side, uint32_t layout) const {
    const uint32_t member = side.members[layout].front();
    return &side == &sources_ ? plan_.source_labels[member] : plan_.destination_labels[member];
  }

  // ---- tensors ----

  // Numbers tensors by name, independent of the order of layouts and of tensors in them.
  void NumberTensors() {
    absl::flat_hash_map<std::string_view, uint32_t> by_name;
    std::vector<const TensorSpec*> specs;
    for (Side* side : {&sources_, &destinations_}) {
      for (const Layout* layout : side->layouts) {
        const Ids* before = side->tensor_of.empty() ? nullptr : &side->tensor_of.back();
        Ids ids;
        ids.reserve(layout->tensors.size());
        for (const TensorSpec& spec : layout->tensors) {
          // Layouts of one side often name the same tensors in the same order, so try the last
          // layout's tensor first.
          const size_t i = ids.size();
          if (before != nullptr && i < before->size() && specs[(*before)[i]]->name == spec.name) {
            ids.push_back((*before)[i]);
            continue;
          }
          const auto [it, added] =
              by_name.try_emplace(spec.name, static_cast<uint32_t>(specs.size()));
          if (added) specs.push_back(&spec);
          ids.push_back(it->second);
        }
        side->tensor_of.push_back(std::move(ids));
      }
    }
    Ids order(specs.size());
    std::iota(order.begin(), order.end(), 0U);
    std::sort(order.begin(), order.end(),
              [&](uint32_t a, uint32_t b) { return specs[a]->name < specs[b]->name; });
    Ids id_of(specs.size());
    for (uint32_t t = 0; t < order.size(); ++t) {
      id_of[order[t]] = t;
      plan_.tensors.push_back(*specs[order[t]]);
    }
    for (Side* side : {&sources_, &destinations_}) {
      for (uint32_t l = 0; l < side->tensor_of.size(); ++l) {
        std::vector<bool>& declared = side->declared.emplace_back(order.size(), false);
        for (size_t i = 0; i < side->tensor_of[l].size(); ++i) {
          uint32_t& id = side->tensor_of[l][i];
          id = id_of[id];
          declared[id] = true;
          // Who derives a tensor from another takes the other.
          const Derivation* derived = side->layouts[l]->tensors[i].derived.get();
          if (derived == nullptr) continue;
          const auto from = by_name.find(derived->from.name);
          if (from != by_name.end()) declared[id_of[from->second]] = true;
        }
      }
    }
  }

  // Finds the tensors that have no part in the plan, and the first by name that makes a plan
  // impossible.
  absl::Status CheckDeclared() {
    left_out_.assign(plan_.tensors.size(), false);
    std::vector<std::string> reasons(plan_.tensors.size());
    FindDisagreements(&reasons);
    const Instances instances = CollectInstances();
    const Names pushed = Set(options_.skip_tensors);
    const Names engine_only = Set(options_.engine_only);
    for (uint32_t t = 0; t < plan_.tensors.size(); ++t) {
      const std::string& name = plan_.tensors[t].name;
      if (pushed.contains(name) || engine_only.contains(name)) {
        left_out_[t] = true;
        continue;
      }
      if (!reasons[t].empty()) {
        return AboutTensor(Precondition("tensor {}: {}", name, reasons[t]), name);
      }
      if (MatchesAny(options_.unwanted_allowed, name)) continue;
      if (const std::string lacking = Lacking(t, instances); !lacking.empty()) {
        const auto known = [this](std::string_view other) {
          return Declares(destinations_, other);
        };
        return AboutTensor(Precondition("tensor {}: {}{}", name, lacking,
                                        NameAdvice(name, known, kAdviceUnwanted)),
                           name);
      }
    }
    return absl::OkStatus();
  }

  using Names = absl::flat_hash_set<std::string_view>;
  static Names Set(const std::vector<std::string>& names) { return {names.begin(), names.end()}; }

  void FindDisagreements(std::vector<std::string>* reasons) const {
    struct First {
      const TensorSpec* spec = nullptr;
      const std::string* label = nullptr;
      const Side* side = nullptr;
    };
    std::vector<First> firsts(plan_.tensors.size());
    for (const Side* side : {&sources_, &destinations_}) {
      for (uint32_t l = 0; l < side->layouts.size(); ++l) {
        for (size_t i = 0; i < side->layouts[l]->tensors.size(); ++i) {
          const TensorSpec& spec = side->layouts[l]->tensors[i];
          const uint32_t t = side->tensor_of[l][i];
          First& first = firsts[t];
          if (first.spec == nullptr) {
            first = {&spec, &LabelOf(*side, l), side};
          } else if (*first.spec != spec && (*reasons)[t].empty()) {
            (*reasons)[t] = fmt::format("{} in {}, {} in {}{}", Describe(*first.spec), *first.label,
                                        Describe(spec), LabelOf(*side, l),
                                        first.side == side ? "" : CastAdvice(*first.spec, spec));
          }
        }
      }
    }
  }

  // The distinct sets of layouts that form an instance, that of the first instance first.
  using Instances = std::vector<Ids>;

  Instances CollectInstances() const {
    std::vector<Ids> layouts_of;  // of each instance, by its first rank
    absl::flat_hash_map<uint32_t, size_t> position;
    for (uint32_t i = 0; i < destination_members_.size(); ++i) {
      if (destinations_.layout_of[i] == kNone) continue;
      const uint32_t instance = destination_members_[i].instance;
      const auto [it, added] = position.try_emplace(instance, layouts_of.size());
      if (added) layouts_of.emplace_back();
      layouts_of[it->second].push_back(destinations_.layout_of[i]);
    }
    Instances instances;
    IdLists known;
    for (Ids& layouts : layouts_of) {
      std::sort(layouts.begin(), layouts.end());
      layouts.erase(std::unique(layouts.begin(), layouts.end()), layouts.end());
      if (known.Number(layouts) == instances.size()) instances.push_back(layouts);
    }
    return instances;
  }

  // Whether a layout of the side declares a tensor of this name.
  bool Declares(const Side& side, std::string_view name) const {
    const auto tensor =
        std::lower_bound(plan_.tensors.begin(), plan_.tensors.end(), name,
                         [](const TensorSpec& t, std::string_view n) { return t.name < n; });
    if (tensor == plan_.tensors.end() || tensor->name != name) return false;
    const auto t = static_cast<size_t>(tensor - plan_.tensors.begin());
    return std::any_of(side.declared.begin(), side.declared.end(),
                       [t](const std::vector<bool>& declared) { return declared[t]; });
  }

  // Names an instance that lacks a trainers' tensor, as text; empty: there is none.
  std::string Lacking(uint32_t tensor, const Instances& instances) const {
    if (plan_.tensors[tensor].derived != nullptr) return {};  // each instance derives what it likes
    const auto holder =
        std::find_if(sources_.declared.begin(), sources_.declared.end(),
                     [tensor](const std::vector<bool>& declared) { return declared[tensor]; });
    if (holder == sources_.declared.end()) return {};
    for (const Ids& layouts : instances) {
      if (std::any_of(layouts.begin(), layouts.end(),
                      [&](uint32_t l) { return destinations_.declared[l][tensor]; })) {
        continue;
      }
      return fmt::format(
          "{} has it, but no rank of the instance of {} declares it: every instance must declare "
          "each tensor that trainers hold",
          LabelOf(sources_, static_cast<uint32_t>(holder - sources_.declared.begin())),
          LabelOf(destinations_, layouts.front()));
    }
    return {};
  }

  void CollectEntries(Side* side) const {
    const auto for_each = [&](const auto& visit) {
      for (uint32_t l = 0; l < side->layouts.size(); ++l) {
        const std::vector<Piece>& pieces = side->layouts[l]->pieces;
        for (uint32_t p = 0; p < pieces.size(); ++p) {
          if (!IsEmpty(pieces[p].box)) visit(side->tensor_of[l][pieces[p].tensor], Entry{l, p});
        }
      }
    };
    side->entries = ByTensor<Entry>(plan_.tensors.size(), for_each);
  }

  // Groups nodes that hold the same destination layouts into classes, since they want the same
  // elements.
  void CollectClasses() {
    std::vector<Ids> layouts_on(plan_.nodes);
    for (uint32_t i = 0; i < destination_members_.size(); ++i) {
      const uint32_t layout = destinations_.layout_of[i];
      if (layout != kNone) layouts_on[destination_members_[i].node].push_back(layout);
    }
    IdLists known;
    std::vector<Ids> nodes;
    for (uint32_t n = 0; n < plan_.nodes; ++n) {
      Ids& layouts = layouts_on[n];
      if (layouts.empty()) continue;
      std::sort(layouts.begin(), layouts.end());
      layouts.erase(std::unique(layouts.begin(), layouts.end()), layouts.end());
      const uint32_t c = known.Number(layouts);
      if (c == class_layouts_.size()) {
        class_layouts_.push_back(layouts);
        nodes.emplace_back();
      }
      nodes[c].push_back(n);
    }
    for (const Ids& of_class : nodes) class_nodes_.push_back(node_sets_.Number(of_class));
    stores_per_member_.resize(destinations_.layouts.size());
  }

  // ---- one tensor ----

  absl::Status PlanTensor(uint32_t t) {
    if (destinations_.Of(t).empty()) return absl::OkStatus();
    element_bytes_ = ElementBytes(plan_.tensors[t].dtype);
    REFITD_RETURN_IF_ERROR(CheckDisjoint(t));
    CollectWanted(t);
    CollectCells(t);
    CountStores(t);
    std::vector<const Box*> boxes;
    boxes.reserve(cells_.size());
    for (const OwnedBox& cell : cells_) boxes.push_back(&cell.box);
    const BoxIndex index(boxes);
    bool covered = true;
    Ids meeting;
    for (const Wanted& wanted : wanted_) {
      int64_t missing = ElementCount(wanted.box);
      meeting.clear();
      work_ += index.Query(wanted.box, [&](uint32_t c) { meeting.push_back(c); });
      for (const uint32_t c : meeting) {
        const std::optional<Box> common = Intersect(wanted.box, cells_[c].box);
        if (!common.has_value()) continue;
        missing -= ElementCount(*common);
        Place(t, *common, HoldersOf(cells_[c]), wanted.node_set);
        if (Exhausted()) return TooMuch(t);
      }
      covered = covered && missing == 0;
    }
    if (Exhausted()) return TooMuch(t);
    return covered ? absl::OkStatus() : NotCovered(t);
  }

  bool Exhausted() const {
    return work_.Over() || supplied_ > kMaxRouteBytes || stored_ > kMaxRouteBytes ||
           static_cast<int64_t>(chosen_.size()) > options_.max_routes ||
           static_cast<int64_t>(demands_.size()) > options_.max_routes;
  }

  absl::Status TooMuch(uint32_t tensor) const {
    if (work_.Cancelled()) return absl::CancelledError("the plan was cancelled");
    return AboutTensor(
        Error(absl::StatusCode::kResourceExhausted,
              "tensor {}: boxes so far need over {} routes, {} bytes or {} steps of planning: "
              "use fewer and more regular pieces",
              plan_.tensors[tensor].name, options_.max_routes, kMaxRouteBytes, kMaxPlanSteps),
        plan_.tensors[tensor].name);
  }

  // Checks that no rank gets an element twice.
  absl::Status CheckDisjoint(uint32_t t) {
    const auto entries = destinations_.Of(t);
    for (size_t begin = 0, end = 0; begin < entries.size(); begin = end) {
      while (end < entries.size() && entries[end].layout == entries[begin].layout) ++end;
      if (end - begin == 1) continue;
      std::vector<const Box*> boxes;
      for (size_t i = begin; i < end; ++i) boxes.push_back(&destinations_.BoxOf(entries[i]));
      const BoxIndex index(boxes);
      for (uint32_t i = 0; i < boxes.size(); ++i) {
        std::optional<Box> twice;
        work_ += index.Query(*boxes[i], [&](uint32_t other) {
          if (other < i && !twice.has_value() && Meet(*boxes[i], *boxes[other])) {
            twice = Intersect(*boxes[i], *boxes[other]);
          }
        });
        if (Exhausted()) return TooMuch(t);
        if (!twice.has_value()) continue;
        return AboutTensor(
            Precondition("tensor {}: {} has element [{}] twice", plan_.tensors[t].name,
                         LabelOf(destinations_, entries[begin].layout),
                         fmt::join(twice->offset, ", ")),
            plan_.tensors[t].name);
      }
    }
    return absl::OkStatus();
  }

  // Collects the boxes that each class of nodes wants, joined; equal boxes of several classes
  // become one entry.
  void CollectWanted(uint32_t t) {
    const auto entries = destinations_.Of(t);
    // The entries of one layout follow one another; note the index of the first.
    first_entry_.assign(destinations_.layouts.size(), kNone);
    for (uint32_t i = static_cast<uint32_t>(entries.size()); i-- > 0;) {
      first_entry_[entries[i].layout] = i;
    }
    wanted_.clear();
    std::vector<Box> boxes;
    for (uint32_t c = 0; c < class_layouts_.size() && !Exhausted(); ++c) {
      boxes.clear();
      for (const uint32_t layout : class_layouts_[c]) {
        for (size_t i = first_entry_[layout]; i < entries.size() && entries[i].layout == layout;
             ++i) {
          boxes.push_back(destinations_.BoxOf(entries[i]));
        }
      }
      if (boxes.empty()) continue;
      work_ += static_cast<int64_t>(boxes.size());
      boxes = MakeDisjoint(std::move(boxes), &work_);
      MergeAdjacent(&boxes);
      for (Box& box : boxes) wanted_.push_back({std::move(box), class_nodes_[c]});
    }
    if (chained_) {
      CutByClasses();
    } else {
      JoinEqualBoxes();
    }
  }

  // Cuts boxes so that all elements of a box are wanted by the same nodes. A source then sends each
  // element once.
  void CutByClasses() {
    if (wanted_.size() <= 1) return;
    std::vector<OwnedBox> boxes;
    for (Wanted& wanted : wanted_) boxes.push_back({std::move(wanted.box), {wanted.node_set}});
    CutByHolders(&boxes, &work_);
    if (work_.Over()) return;  // the result is wrong; the caller returns TooMuch
    std::sort(boxes.begin(), boxes.end(),
              [](const OwnedBox& a, const OwnedBox& b) { return BoxLess(a.box, b.box); });
    wanted_.clear();
    for (OwnedBox& box : boxes) {
      wanted_.push_back(
          {std::move(box.box), UnionOfSets({box.holders.begin(), box.holders.end()})});
    }
  }

  uint32_t UnionOfSets(const Ids& sets) {
    if (sets.size() == 1) return sets[0];
    const uint32_t number = unions_.Number(sets);
    if (number < union_of_.size()) return union_of_[number];
    Ids nodes;
    for (const uint32_t set : sets) {
      nodes.insert(nodes.end(), node_sets_[set].begin(), node_sets_[set].end());
    }
    std::sort(nodes.begin(), nodes.end());
    union_of_.push_back(node_sets_.Number(nodes));
    return union_of_.back();
  }

  // Makes one entry of entries with equal boxes, which all their nodes want. Boxes that overlap
  // without being equal stay as they are.
  void JoinEqualBoxes() {
    if (wanted_.size() <= 1) return;
    std::sort(wanted_.begin(), wanted_.end(),
              [](const Wanted& a, const Wanted& b) { return BoxLess(a.box, b.box); });
    size_t kept = 0;
    for (size_t begin = 0, end = 0; begin < wanted_.size(); begin = end) {
      while (end < wanted_.size() && wanted_[end].box == wanted_[begin].box) ++end;
      uint32_t node_set = wanted_[begin].node_set;
      if (end - begin > 1) {
        Ids nodes;
        for (size_t i = begin; i < end; ++i) {
          const Ids& more = node_sets_[wanted_[i].node_set];
          nodes.insert(nodes.end(), more.begin(), more.end());
        }
        std::sort(nodes.begin(), nodes.end());
        node_set = node_sets_.Number(nodes);
      }
      if (kept != begin) wanted_[kept] = std::move(wanted_[begin]);
      wanted_[kept++].node_set = node_set;
    }
    wanted_.resize(kept);
  }

  // Collects the sources' elements, grouped by their holders.
  void CollectCells(uint32_t t) {
    cells_.clear();
    for (const Entry& entry : sources_.Of(t)) {
      cells_.push_back({sources_.BoxOf(entry), {entry.layout}});
    }
    CutByHolders(&cells_, &work_);
    if (options_.relay_lag == 0) return;
    for (const OwnedBox& cell : cells_) {
      const int64_t bytes = ElementCount(cell.box) * element_bytes_;
      for (const uint32_t node : holders_[HoldersOf(cell)].nodes) node_holds_[node] += bytes;
    }
  }

  // Counts the bytes that engines get of this tensor.
  void CountStores(uint32_t t) {
    for (const Entry& entry : destinations_.Of(t)) {
      const Box& box = destinations_.BoxOf(entry);
      int64_t elements = 0;
      if (cells_.size() == 1 && refitd::Contains(cells_[0].box, box)) {
        elements = ElementCount(box);
      } else {
        for (const OwnedBox& cell : cells_) {
          if (const auto common = Intersect(cell.box, box)) elements += ElementCount(*common);
        }
        work_ += static_cast<int64_t>(cells_.size());
      }
      const int64_t bytes = elements * element_bytes_;
      stores_per_member_[entry.layout] += bytes;
      const auto members = static_cast<int64_t>(destinations_.members[entry.layout].size());
      // Each addition is capped at kMaxRouteBytes, and Exhausted() ends the plan beyond it, so that
      // the sum can't overflow.
      stored_ += std::min(bytes, kMaxRouteBytes / members) * members;
      if (Exhausted()) return;
    }
  }

  absl::Status NotCovered(uint32_t t) {
    const std::string& name = plan_.tensors[t].name;
    const std::string missing = FirstMissing(t);
    if (Exhausted()) return TooMuch(t);
    const auto known = [this](std::string_view other) { return Declares(sources_, other); };
    return AboutTensor(
        Precondition("tensor {}: {}{}", name, missing, NameAdvice(name, known, kAdviceEngineOnly)),
        name);
  }

  // Names the first missing element of the first destination that lacks one.
  std::string FirstMissing(uint32_t t) {
    const auto entries = destinations_.Of(t);
    uint32_t first_member = kNone;
    std::vector<Box> missing;
    for (const Entry& entry : entries) {
      const uint32_t member = destinations_.members[entry.layout].front();
      if (member > first_member) continue;
      std::vector<Box> parts = {destinations_.BoxOf(entry)};
      for (const OwnedBox& cell : cells_) {
        std::vector<Box> outside;
        for (const Box& part : parts) Subtract(part, cell.box, &outside);
        work_ += kCutSteps * static_cast<int64_t>(parts.size());
        parts = std::move(outside);
        if (Exhausted()) return "";
      }
      if (parts.empty()) continue;
      if (member < first_member) missing.clear();
      first_member = member;
      missing.insert(missing.end(), parts.begin(), parts.end());
    }
    REFITD_CHECK(!missing.empty());
    const Dims& first = std::min_element(missing.begin(), missing.end(), BoxLess)->offset;
    const std::string& label = plan_.destination_labels[first_member];
    const Derivation* const derived = plan_.tensors[t].derived.get();
    if (derived != nullptr && derived->kind != DerivedKind::kCast) {
      return fmt::format(
          "element [{}] of {} needs a whole block of [{}] elements of {}, which {} must hold",
          fmt::join(first, ", "), label, fmt::join(BlockOf(*derived), ", "), derived->from.name,
          MayBeCut(derived->kind) ? "the trainers of one node" : "one shard of a trainer");
    }
    return fmt::format("no source holds element [{}] that {} has", fmt::join(first, ", "), label);
  }

  // ---- who supplies ----

  uint32_t HoldersOf(const OwnedBox& cell) {
    const Ids layouts(cell.holders.begin(), cell.holders.end());
    const uint32_t number = holder_layouts_.Number(layouts);
    if (number < holders_of_layouts_.size()) return holders_of_layouts_[number];
    Ids ranks;
    for (const uint32_t layout : layouts) {
      const Ids& more = sources_.members[layout];
      ranks.insert(ranks.end(), more.begin(), more.end());
    }
    holders_of_layouts_.push_back(HoldersOf(std::move(ranks)));
    return holders_of_layouts_.back();
  }

  uint32_t HoldersOf(Ids ranks) {
    std::sort(ranks.begin(), ranks.end(), [this](uint32_t a, uint32_t b) {
      return std::pair(plan_.source_nodes[a], a) < std::pair(plan_.source_nodes[b], b);
    });
    const uint32_t number = holder_ranks_.Number(ranks);
    if (number < holders_.size()) return number;
    Holders holders;
    for (uint32_t i = 0; i < ranks.size(); ++i) {
      const uint32_t node = plan_.source_nodes[ranks[i]];
      if (!holders.nodes.empty() && holders.nodes.back() == node) continue;
      holders.nodes.push_back(node);
      holders.begin.push_back(i);
    }
    holders.begin.push_back(static_cast<uint32_t>(ranks.size()));
    holders.ranks = std::move(ranks);
    holders_.push_back(std::move(holders));
    return number;
  }

  const Choice& ChoiceOf(uint32_t holders, uint32_t node_set) {
    const uint64_t key = uint64_t{holders} << 32U | node_set;
    const auto [it, added] = choices_.try_emplace(key);
    if (!added) return it->second;
    Choice choice;
    Ids remote;
    for (const uint32_t node : node_sets_[node_set]) {
      const Ids& nodes = holders_[holders].nodes;
      const auto at = std::lower_bound(nodes.begin(), nodes.end(), node) - nodes.begin();
      if (at == static_cast<int64_t>(nodes.size()) || nodes[at] != node) {
        remote.push_back(node);
        continue;
      }
      const Holders& all = holders_[holders];
      Ids own(all.ranks.begin() + all.begin[at], all.ranks.begin() + all.begin[at + 1]);
      choice.local.push_back({node_sets_.Number({node}), HoldersOf(std::move(own))});
    }
    if (!remote.empty()) choice.remote = node_sets_.Number(remote);
    return it->second = std::move(choice);
  }

  void Place(uint32_t t, const Box& box, uint32_t holders, uint32_t node_set) {
    const int64_t bytes = ElementCount(box) * element_bytes_;
    const Choice& choice = ChoiceOf(holders, node_set);
    const int64_t sent = choice.remote == kNone ? 0 : Copies(choice.remote);
    if (holders_[holders].ranks.size() == 1) {
      rank_alone_[holders_[holders].ranks[0]] +=
          bytes * (sent + static_cast<int64_t>(choice.local.size()));
    }
    if (choice.remote != kNone) {
      const Ids& remote = node_sets_[choice.remote];
      shared_ = shared_ || remote.size() > 1;
      if (holders_[holders].nodes.size() == 1) {
        node_alone_[holders_[holders].nodes[0]] += bytes * sent;
      }
      for (const uint32_t node : remote) node_receives_[node] += bytes;
      Demanded(t, box, bytes, holders, choice.remote, false);
    }
    for (const auto& [node, own] : choice.local) Demanded(t, box, bytes, own, node, true);
  }

  // Returns how often a source sends what the nodes of a set want.
  int64_t Copies(uint32_t node_set) const {
    return chained_ ? 1 : static_cast<int64_t>(node_sets_[node_set].size());
  }

  void Demanded(uint32_t t, const Box& box, int64_t bytes, uint32_t holders, uint32_t node_set,
                bool local) {
    supplied_ += bytes * static_cast<int64_t>(node_sets_[node_set].size());
    read_ += bytes * Copies(node_set);
    if (holders_[holders].ranks.size() == 1) {
      Emit(t, holders_[holders].ranks[0], node_set, box, local);
    } else {
      demands_.push_back({t, holders, node_set, local, bytes, box});
    }
  }

  void Emit(uint32_t t, uint32_t source, uint32_t node_set, Box box, bool local) {
    const int64_t bytes =
        ElementCount(box) * ElementBytes(plan_.tensors[t].dtype) * Copies(node_set);
    rank_load_[source] += bytes;
    if (!local) node_load_[plan_.source_nodes[source]] += bytes;
    chosen_.push_back({t, source, node_set, std::move(box)});
  }

  // Assigns demands with fewer possible suppliers first, then larger ones, so that the rest can
  // even loads out.
  absl::Status AssignShared() {
    const auto less = [this](const Demand& a, const Demand& b) {
      const auto key = [this](const Demand& d) {
        return std::tuple(holders_[d.holders].nodes.size(), holders_[d.holders].ranks.size(),
                          -d.bytes, d.tensor);
      };
      const auto key_a = key(a);
      const auto key_b = key(b);
      if (key_a != key_b) return key_a < key_b;
      return std::tie(a.box.offset, a.box.extent, node_sets_[a.node_set]) <
             std::tie(b.box.offset, b.box.extent, node_sets_[b.node_set]);
    };
    std::sort(demands_.begin(), demands_.end(), less);
    const int64_t whole = std::max(options_.split_bytes, FairShare());
    for (const Demand& demand : demands_) {
      const auto holders = static_cast<int64_t>(holders_[demand.holders].ranks.size());
      work_ += holders * static_cast<int64_t>(node_sets_[demand.node_set].size());
      if (demand.bytes < whole || demand.box.extent.empty()) {
        AssignWhole(demand);
      } else {
        AssignCut(demand);
      }
      if (Exhausted()) return TooMuch(demand.tensor);
    }
    return absl::OkStatus();
  }

  // One split_share'th of what a rank supplies on average.
  int64_t FairShare() const {
    if (options_.split_share <= 0) return 0;
    return read_ / std::max<int64_t>(static_cast<int64_t>(plan_.source_nodes.size()), 1) /
           options_.split_share;
  }

  // The sets of nodes that are each sent a box by a source of their own: single nodes, or with
  // chains all nodes together.
  Ids Receivers(uint32_t node_set) {
    if (chained_) return {node_set};
    const Ids nodes = node_sets_[node_set];
    if (nodes.size() == 1) return {node_set};
    Ids sets;
    for (const uint32_t node : nodes) sets.push_back(node_sets_.Number({node}));
    return sets;
  }

  uint32_t Together(const Ids& sets) {
    if (sets.size() == 1) return sets[0];
    Ids nodes;
    for (const uint32_t set : sets) nodes.push_back(node_sets_[set][0]);
    return node_sets_.Number(nodes);
  }

  // Gives each receiver the whole box, from the least loaded rank of the least loaded node.
  void AssignWhole(const Demand& demand) {
    const Holders& holders = holders_[demand.holders];
    std::vector<std::pair<uint32_t, uint32_t>> by_source;
    std::vector<int64_t> extra_rank(holders.ranks.size());
    std::vector<int64_t> extra_node(holders.nodes.size());
    const Ids receivers = Receivers(demand.node_set);
    for (uint32_t receiver = 0; receiver < receivers.size(); ++receiver) {
      size_t from = 0;
      const auto load_of = [&](size_t n) { return node_load_[holders.nodes[n]] + extra_node[n]; };
      for (size_t n = 1; n < holders.nodes.size(); ++n) {
        if (load_of(n) < load_of(from)) from = n;
      }
      size_t rank = holders.begin[from];
      const auto rank_load = [&](size_t r) { return rank_load_[holders.ranks[r]] + extra_rank[r]; };
      for (size_t r = rank + 1; r < holders.begin[from + 1]; ++r) {
        if (rank_load(r) < rank_load(rank)) rank = r;
      }
      extra_node[from] += demand.bytes;
      extra_rank[rank] += demand.bytes;
      by_source.push_back({holders.ranks[rank], receiver});
    }
    std::sort(by_source.begin(), by_source.end());
    for (size_t begin = 0, end = 0; begin < by_source.size(); begin = end) {
      Ids served;
      while (end < by_source.size() && by_source[end].first == by_source[begin].first) {
        served.push_back(receivers[by_source[end++].second]);
      }
      Emit(demand.tensor, by_source[begin].first, Together(served), demand.box, demand.local);
    }
  }

  // Fills nodes, and in them ranks, up to a level. The box, repeated for each receiver, forms a
  // line of steps along one dimension; each rank supplies a run of this line.
  void AssignCut(const Demand& demand) {
    const Holders& holders = holders_[demand.holders];
    const Ids receivers = Receivers(demand.node_set);
    const size_t dim = CutDimension(demand.box, holders.ranks.size());
    const int64_t steps = demand.box.extent[dim];
    const int64_t step_bytes = demand.bytes / steps;
    const int64_t line = steps * static_cast<int64_t>(receivers.size());
    const int64_t grain = std::max<int64_t>(options_.split_bytes / kGrains / step_bytes, 1);
    const std::vector<int64_t> quotas =
        Quotas(holders, demand.bytes * static_cast<int64_t>(receivers.size()));
    size_t last = quotas.size() - 1;
    while (last > 0 && quotas[last] == 0) --last;
    int64_t quota = 0;  // bytes of the holders so far
    int64_t done = 0;   // steps of the holders so far
    for (size_t h = 0; h <= last; ++h) {
      quota += quotas[h];
      int64_t until = h == last ? line : std::min((quota + step_bytes / 2) / step_bytes, line);
      const int64_t into = until % steps;  // within one repetition of the box
      const int64_t rounded = std::min((into + grain / 2) / grain * grain, steps);
      // Don't cut so near to the end that a sliver would remain.
      until += (steps - rounded < grain / 2 ? steps : rounded) - into;
      if (h == last || until > line) until = line;
      if (until <= done) continue;
      EmitRun(demand, holders.ranks[h], receivers, dim, done, until);
      done = until;
    }
  }

  static size_t CutDimension(const Box& box, size_t holders) {
    const auto wide = std::find_if(box.extent.begin(), box.extent.end(), [holders](int64_t n) {
      return n >= static_cast<int64_t>(holders);
    });
    const auto dim =
        wide != box.extent.end() ? wide : std::max_element(box.extent.begin(), box.extent.end());
    return static_cast<size_t>(dim - box.extent.begin());
  }

  // The bytes that each rank is to supply; together `bytes`, minus rounding.
  std::vector<int64_t> Quotas(const Holders& holders, int64_t bytes) const {
    std::vector<int64_t> of_nodes;
    for (const uint32_t node : holders.nodes) of_nodes.push_back(node_load_[node]);
    const int64_t level = WaterLevel(of_nodes, bytes);
    std::vector<int64_t> quotas;
    for (size_t n = 0; n < holders.nodes.size(); ++n) {
      const int64_t quota =
          holders.nodes.size() == 1 ? bytes : std::max<int64_t>(level - of_nodes[n], 0);
      std::vector<int64_t> of_ranks;
      for (size_t r = holders.begin[n]; r < holders.begin[n + 1]; ++r) {
        of_ranks.push_back(rank_load_[holders.ranks[r]]);
      }
      const int64_t rank_level = WaterLevel(of_ranks, quota);
      for (const int64_t load : of_ranks) {
        quotas.push_back(quota == 0 ? 0 : std::max<int64_t>(rank_level - load, 0));
      }
    }
    return quotas;
  }

  // Makes the routes of steps [begin, end) of the line: the end of one receiver's box, whole boxes,
  // the beginning of another's.
  void EmitRun(const Demand& demand, uint32_t source, const Ids& receivers, size_t dim,
               int64_t begin, int64_t end) {
    const int64_t steps = demand.box.extent[dim];
    Ids whole;
    while (begin < end) {
      const uint32_t receiver = receivers[static_cast<size_t>(begin / steps)];
      const int64_t from = begin % steps;
      const int64_t count = std::min(steps - from, end - begin);
      begin += count;
      if (count == steps) {
        whole.push_back(receiver);
        continue;
      }
      Box slice = demand.box;
      slice.offset[dim] += from;
      slice.extent[dim] = count;
      Emit(demand.tensor, source, receiver, std::move(slice), demand.local);
    }
    if (whole.empty()) return;
    Emit(demand.tensor, source, Together(whole), demand.box, demand.local);
  }

  // ---- chains ----

  // Whether chains gain anything: sources would send much of what they hold several times.
  bool WantsChains() const {
    if (options_.relay_lag == 0 || !shared_) return false;
    for (uint32_t n = 0; n < plan_.nodes; ++n) {
      const double most = options_.relay_excess * static_cast<double>(node_holds_[n]);
      if (static_cast<double>(node_load_[n]) > most) return true;
    }
    return false;
  }

  // Plans anew, with chains. If the cut boxes or streams become too many, the plan stays without
  // chains.
  absl::Status SupplyByChains() {
    for (const bool chained : {true, false}) {
      chained_ = chained;
      ClearLoads();
      chosen_.clear();
      demands_.clear();
      choices_.clear();
      supplied_ = read_ = stored_ = 0;
      stores_per_member_.assign(stores_per_member_.size(), 0);
      work_ = PlanWork(options_.cancelled);
      absl::Status status = Supply();
      if (status.ok() && chained) status = MakeChains();
      if (!chained || status.code() != absl::StatusCode::kResourceExhausted) return status;
    }
    return absl::OkStatus();
  }

  // The bytes that some nodes want of sources of other nodes.
  struct ChainSet {
    Ids chosen;  // indices into chosen_
    int64_t bytes = 0;
  };

  // Puts the nodes of every route to several nodes into the order of a chain.
  absl::Status MakeChains() {
    std::map<Ids, ChainSet> sets;  // by nodes
    // The bytes that each node sends if it forwards everything that it receives along a chain.
    std::vector<int64_t> sends = node_load_;
    for (uint32_t c = 0; c < chosen_.size(); ++c) {
      const Ids& nodes = node_sets_[chosen_[c].node_set];
      if (nodes.size() < 2) continue;
      ChainSet& set = sets[nodes];
      set.chosen.push_back(c);
      const int64_t bytes = BytesOf(chosen_[c]);
      set.bytes += bytes;
      for (const uint32_t node : nodes) sends[node] += bytes;
    }
    // A set with few bytes gets few orders, since each order adds a stream to every node.
    int64_t least = options_.split_bytes;
    for (const int64_t bytes : sends) least = std::max(least, bytes / kLoadParts);
    const auto most = [](const std::vector<int64_t>& loads) {
      return *std::max_element(loads.begin(), loads.end());
    };
    const int64_t bound = std::max(most(node_alone_), most(node_receives_));
    for (auto& [nodes, set] : sets) {
      std::vector<int64_t> of_nodes;
      for (const uint32_t node : nodes) of_nodes.push_back(sends[node]);
      // A node that would send more than the bound is to be last in some order.
      const int64_t share = most(of_nodes) > bound ? least : std::max(least, kMinOrderBytes);
      const std::vector<ChainShare> shares = DivideAmongOrders(set.bytes, share, &of_nodes);
      for (size_t i = 0; i < nodes.size(); ++i) sends[nodes[i]] = of_nodes[i];
      Share(nodes, shares, &set);
    }
    plan_.relay = ShapeOfChains();
    // A slot is divided among the other nodes, and each part is rounded down to whole sections.
    const int64_t round_bytes = options_.relay_slot_bytes - kSectionAlignment * plan_.nodes;
    if (plan_.relay.node_streams <= kMaxRelayStreams &&
        MinRelayRoundBytes(plan_.relay.node_streams) <= round_bytes) {
      return absl::OkStatus();
    }
    plan_.relay = {};
    return Error(absl::StatusCode::kResourceExhausted, "chains need {} streams of one node",
                 plan_.relay.node_streams);
  }

  int64_t BytesOf(const Chosen& c) const {
    return ElementCount(c.box) * ElementBytes(plan_.tensors[c.tensor].dtype);
  }

  // Gives each order its share of a set's routes. Routes of one node follow one another, so that
  // each source's node takes few orders.
  void Share(const Ids& nodes, const std::vector<ChainShare>& shares, ChainSet* set) {
    std::sort(set->chosen.begin(), set->chosen.end(), [this](uint32_t a, uint32_t b) {
      const auto key = [this](const Chosen& c) {
        return std::tie(plan_.source_nodes[c.source], c.tensor, c.box.offset, c.box.extent,
                        c.source);
      };
      return key(chosen_[a]) < key(chosen_[b]);
    });
    Ids numbers;
    for (const ChainShare& share : shares) {
      numbers.push_back(node_sets_.Number(ChainOrder(nodes, share.order)));
    }
    size_t s = 0;
    int64_t done = 0;  // bytes of the routes before
    int64_t end = shares[0].bytes;
    const auto next = [&] { end += shares[++s].bytes; };
    for (const uint32_t c : set->chosen) {
      // `rest` is the part of the route that has no order yet.
      Chosen rest = chosen_[c];
      bool first = true;
      const auto take = [&](Chosen part) {
        part.node_set = numbers[s];
        done += BytesOf(part);
        if (first) {
          chosen_[c] = std::move(part);
        } else {
          chosen_.push_back(std::move(part));
        }
        first = false;
      };
      while (s + 1 < shares.size() && done + BytesOf(rest) > end) {
        std::optional<Chosen> head = CutOff(&rest, end - done);
        if (head.has_value()) take(*std::move(head));
        // A route that can't be cut goes to the order in whose share its middle lies.
        if (done + BytesOf(rest) / 2 < end) break;
        next();
      }
      take(std::move(rest));
      while (s + 1 < shares.size() && done >= end) next();
    }
  }

  // Cuts about `bytes` off a route and returns them as a route. Nullopt: the route is too small for
  // that, or the cut would be at one of its ends.
  std::optional<Chosen> CutOff(Chosen* route, int64_t bytes) const {
    if (BytesOf(*route) < options_.split_bytes || route->box.extent.empty()) return std::nullopt;
    const size_t dim = CutDimension(route->box, 2);
    const int64_t steps = route->box.extent[dim];
    const int64_t step_bytes = BytesOf(*route) / steps;
    const int64_t grain = std::max<int64_t>(options_.split_bytes / kGrains / step_bytes, 1);
    const int64_t cut = (bytes / step_bytes + grain / 2) / grain * grain;
    if (cut <= 0 || cut >= steps) return std::nullopt;
    Chosen head = *route;
    head.box.extent[dim] = cut;
    route->box.offset[dim] += cut;
    route->box.extent[dim] -= cut;
    return head;
  }

  RelayShape ShapeOfChains() const {
    ChainLoads loads(plan_.nodes);
    for (const Chosen& c : chosen_) {
      loads.Add(plan_.source_nodes[c.source], c.node_set, node_sets_[c.node_set],
                AlignSection(BytesOf(c)));
    }
    return loads.Shape(options_.relay_lag);
  }

  // ---- the plan ----

  // Sorts routes, joins routes that differ only in their nodes, and packs boxes.
  void Pack() {
    Ids order(chosen_.size());
    std::iota(order.begin(), order.end(), 0U);
    const auto key = [this](uint32_t i) {
      const Chosen& c = chosen_[i];
      return std::tie(c.tensor, c.box.offset, c.box.extent, c.source);
    };
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
      if (chosen_[a].tensor != chosen_[b].tensor) return chosen_[a].tensor < chosen_[b].tensor;
      return std::tuple_cat(key(a), std::tie(node_sets_[chosen_[a].node_set])) <
             std::tuple_cat(key(b), std::tie(node_sets_[chosen_[b].node_set]));
    });
    Ids renumbered;
    for (size_t begin = 0, end = 0; begin < order.size(); begin = end) {
      while (end < order.size() && key(order[end]) == key(order[begin])) ++end;
      const Chosen& first = chosen_[order[begin]];
      uint32_t node_set = first.node_set;
      if (end - begin > 1)
        node_set = UnionOf(absl::MakeConstSpan(order).subspan(begin, end - begin));
      if (node_set >= renumbered.size()) renumbered.resize(node_set + 1, kNone);
      if (renumbered[node_set] == kNone) {
        renumbered[node_set] = static_cast<uint32_t>(plan_.node_sets.size());
        plan_.node_sets.push_back(node_sets_[node_set]);
      }
      plan_.routes.push_back({first.tensor, first.source, renumbered[node_set],
                              static_cast<uint32_t>(plan_.box_numbers.size())});
      for (const Dims* dims : {&first.box.offset, &first.box.extent}) {
        plan_.box_numbers.insert(plan_.box_numbers.end(), dims->begin(), dims->end());
      }
    }
  }

  uint32_t UnionOf(absl::Span<const uint32_t> chosen) {
    Ids nodes;
    for (const uint32_t c : chosen) {
      const Ids& more = node_sets_[chosen_[c].node_set];
      nodes.insert(nodes.end(), more.begin(), more.end());
    }
    // With chains, a union only adds the source's own node to one set of other nodes, which keeps
    // its order.
    if (!chained_) std::sort(nodes.begin(), nodes.end());
    return node_sets_.Number(nodes);
  }

  // Fills in the plan's statistics: bytes by rank, node and link, and the lower bound.
  void Count() {
    RouteBytes& links = plan_.links;
    const size_t nodes = plan_.nodes;
    links.rank_supplies.resize(source_members_.size());
    for (auto* per_node :
         {&links.node_sends, &links.node_forwards, &links.node_receives, &links.node_stores}) {
      per_node->resize(nodes);
    }
    links.matrix.resize(nodes * nodes);
    links.stream.resize(nodes * nodes);
    for (const Route& route : plan_.routes) {
      const int64_t bytes =
          ElementCount(plan_.BoxOf(route)) * ElementBytes(plan_.tensors[route.tensor].dtype);
      const uint32_t source_node = plan_.source_nodes[route.source];
      const bool chain = plan_.IsChain(plan_.RemoteNodesOf(route));
      uint32_t from = source_node;
      for (const uint32_t to : plan_.NodesOf(route)) {
        plan_.bytes += bytes;
        if (to == source_node) {
          links.rank_supplies[route.source] += bytes;
          links.matrix[to * nodes + to] += bytes;
          continue;
        }
        if (from == source_node) links.rank_supplies[route.source] += bytes;
        if (from != source_node) links.node_forwards[from] += bytes;
        links.matrix[from * nodes + to] += bytes;
        plan_.wire_bytes += bytes;
        links.node_sends[from] += bytes;
        links.node_receives[to] += bytes;
        links.stream[from * nodes + to] += AlignSection(bytes);
        if (chain) from = to;
      }
    }
    for (uint32_t i = 0; i < destination_members_.size(); ++i) {
      const uint32_t layout = destinations_.layout_of[i];
      if (layout == kNone) continue;
      links.node_stores[plan_.destination_nodes[i]] += stores_per_member_[layout];
    }
    const auto most = [](const std::vector<int64_t>& loads) {
      return loads.empty() ? 0 : *std::max_element(loads.begin(), loads.end());
    };
    plan_.longest_stream = most(links.stream);
    plan_.bound = {most(rank_alone_), most(node_alone_), most(node_receives_)};
  }

  const std::vector<RouteMember>& source_members_;
  const std::vector<RouteMember>& destination_members_;
  const RouteOptions& options_;
  RoutePlan plan_;
  Side sources_;
  Side destinations_;
  std::vector<std::shared_ptr<const Layout>> computing_;  // by source; null: it has no layout
  std::vector<bool> left_out_;                            // per tensor
  bool shared_ = false;  // several nodes want something that other nodes hold
  bool chained_ = false;
  std::vector<Ids> class_layouts_;          // per class of nodes: destination layouts, ascending
  Ids class_nodes_;                         // per class: node set
  std::vector<int64_t> stores_per_member_;  // per destination layout

  IdLists node_sets_;
  IdLists unions_;  // each: several node sets, by their numbers in node_sets_
  Ids union_of_;    // by number of unions_: the node set of all their nodes
  IdLists holder_layouts_;
  Ids holders_of_layouts_;  // by number of holder_layouts_
  IdLists holder_ranks_;
  std::vector<Holders> holders_;  // by holder_ranks_' number
  absl::flat_hash_map<uint64_t, Choice> choices_;

  std::vector<int64_t> rank_load_;
  std::vector<int64_t> node_load_;
  std::vector<int64_t> node_holds_;  // elements that engines want, whether sent or not
  std::vector<int64_t> rank_alone_;
  std::vector<int64_t> node_alone_;
  std::vector<int64_t> node_receives_;
  std::vector<Chosen> chosen_;
  std::vector<Demand> demands_;
  int64_t supplied_ = 0;  // counted once for each destination node
  int64_t read_ = 0;      // counted as often as sources send it
  int64_t stored_ = 0;
  PlanWork work_;

  // These fields are about the tensor that is being planned.
  int64_t element_bytes_ = 0;
  Ids first_entry_;  // per destination layout
  std::vector<Wanted> wanted_;
  std::vector<OwnedBox> cells_;
};

// Checks a plan that came from another process.
class PlanChecker {
 public:
  explicit PlanChecker(const RoutePlan& plan) : plan_(plan) {}

  absl::Status Run() const {
    if (plan_.nodes > kMaxRouteNodes) {
      return Invalid("nodes: {} where {} are possible", plan_.nodes, kMaxRouteNodes);
    }
    REFITD_RETURN_IF_ERROR(CheckMembers());
    REFITD_RETURN_IF_ERROR(CheckTensors());
    REFITD_RETURN_IF_ERROR(CheckNodeSets());
    REFITD_RETURN_IF_ERROR(CheckRoutes());
    REFITD_RETURN_IF_ERROR(CheckRelay());
    if (plan_.longest_stream < 0 || plan_.longest_stream > kMaxRelayBytes) {
      return Invalid("longest_stream: {} is not in 0..{}", plan_.longest_stream, kMaxRelayBytes);
    }
    return absl::OkStatus();
  }

 private:
  static absl::Status CheckLength(std::string_view field, size_t length, size_t wanted) {
    if (length == wanted) return absl::OkStatus();
    return Invalid("{}: {} of them for {} ranks", field, length, wanted);
  }

  absl::Status CheckMembers() const {
    const size_t sources = plan_.source_nodes.size();
    const size_t destinations = plan_.destination_nodes.size();
    REFITD_RETURN_IF_ERROR(CheckLength("source_digests", plan_.source_digests.size(), sources));
    REFITD_RETURN_IF_ERROR(
        CheckLength("destination_digests", plan_.destination_digests.size(), destinations));
    REFITD_RETURN_IF_ERROR(
        CheckLength("destination_skipped", plan_.destination_skipped.size(), destinations));
    if (!plan_.source_labels.empty()) {
      REFITD_RETURN_IF_ERROR(CheckLength("source_labels", plan_.source_labels.size(), sources));
    }
    if (!plan_.destination_labels.empty()) {
      REFITD_RETURN_IF_ERROR(
          CheckLength("destination_labels", plan_.destination_labels.size(), destinations));
    }
    REFITD_RETURN_IF_ERROR(CheckNodes("source_nodes", plan_.source_nodes));
    return CheckNodes("destination_nodes", plan_.destination_nodes);
  }

  absl::Status CheckNodes(std::string_view field, const Ids& nodes) const {
    for (size_t i = 0; i < nodes.size(); ++i) {
      if (nodes[i] >= plan_.nodes) {
        return Invalid("{}[{}]: node {} of {}", field, i, nodes[i], plan_.nodes);
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckTensors() const {
    for (size_t t = 0; t < plan_.tensors.size(); ++t) {
      REFITD_RETURN_IF_ERROR(ValidateTensor(plan_.tensors[t]));
      if (t > 0 && plan_.tensors[t - 1].name >= plan_.tensors[t].name) {
        return Invalid("tensors[{}]: {} is not after {}", t, plan_.tensors[t].name,
                       plan_.tensors[t - 1].name);
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckNodeSets() const {
    for (size_t i = 0; i < plan_.node_sets.size(); ++i) {
      if (plan_.node_sets[i].empty()) return Invalid("node_sets[{}]: is empty", i);
      Ids nodes = plan_.node_sets[i];
      if (plan_.relay.lag > 0) std::sort(nodes.begin(), nodes.end());
      for (size_t n = 1; n < nodes.size(); ++n) {
        if (nodes[n - 1] >= nodes[n]) {
          return Invalid("node_sets[{}]: {} is not after {}", i, nodes[n], nodes[n - 1]);
        }
      }
      if (nodes.back() >= plan_.nodes) {
        return Invalid("node_sets[{}]: node {} of {}", i, nodes.back(), plan_.nodes);
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckRelay() const {
    const RelayShape& relay = plan_.relay;
    if (relay.lag > kMaxRelayLag)
      return Invalid("relay.lag: {} is over {}", relay.lag, kMaxRelayLag);
    if (relay.longest > plan_.nodes || relay.usual > relay.longest) {
      return Invalid("relay: chains of {}, usually {}, of {} nodes", relay.longest, relay.usual,
                     plan_.nodes);
    }
    if (relay.node_streams > kMaxRelayStreams) {
      return Invalid("relay.node_streams: {} is over {}", relay.node_streams, kMaxRelayStreams);
    }
    if (relay.node_bytes < 0 || relay.node_bytes > kMaxRelayBytes) {
      return Invalid("relay.node_bytes: {} is not in 0..{}", relay.node_bytes, kMaxRelayBytes);
    }
    return absl::OkStatus();
  }

  // Checks the numbers in every route, and that tensors ascend (P10).
  absl::Status CheckRoutes() const {
    if (plan_.routes.size() > static_cast<size_t>(kMaxRoutes)) {
      return Error(absl::StatusCode::kResourceExhausted, "routes: {} where {} are possible",
                   plan_.routes.size(), kMaxRoutes);
    }
    int64_t bytes = 0;
    for (size_t i = 0; i < plan_.routes.size(); ++i) {
      const Route& route = plan_.routes[i];
      if (route.tensor >= plan_.tensors.size()) {
        return Invalid("routes[{}]: tensor {} of {}", i, route.tensor, plan_.tensors.size());
      }
      const TensorSpec& tensor = plan_.tensors[route.tensor];
      if (i > 0 && plan_.routes[i - 1].tensor > route.tensor) {
        return Invalid("routes[{}]: tensor {} comes after a later one", i, tensor.name);
      }
      if (route.source >= plan_.source_nodes.size()) {
        return Invalid("routes[{}] of tensor {}: source {} of {}", i, tensor.name, route.source,
                       plan_.source_nodes.size());
      }
      if (route.node_set >= plan_.node_sets.size()) {
        return Invalid("routes[{}] of tensor {}: node_set {} of {}", i, tensor.name, route.node_set,
                       plan_.node_sets.size());
      }
      const size_t numbers = 2 * tensor.shape.size();
      if (route.box > plan_.box_numbers.size() || plan_.box_numbers.size() - route.box < numbers) {
        return Invalid("routes[{}] of tensor {}: box at {} of {} numbers", i, tensor.name,
                       route.box, plan_.box_numbers.size());
      }
      const Box box = plan_.BoxOf(route);
      if (absl::Status status = ValidateBox(box, tensor.shape); !status.ok()) {
        return Invalid("routes[{}] of tensor {}: {}", i, tensor.name, Message(status));
      }
      if (IsEmpty(box)) return Invalid("routes[{}] of tensor {}: box is empty", i, tensor.name);
      bytes += ElementCount(box) * ElementBytes(tensor.dtype) *
               static_cast<int64_t>(plan_.NodesOf(route).size());
      if (bytes > kMaxRouteBytes) {
        return Error(absl::StatusCode::kResourceExhausted,
                     "routes[{}] of tensor {}: routes so far supply over {} bytes", i, tensor.name,
                     kMaxRouteBytes);
      }
    }
    return absl::OkStatus();
  }

  const RoutePlan& plan_;
};

}  // namespace

int64_t RouteBound::bytes() const { return std::max({rank_alone, node_alone, node_receives}); }

Box RoutePlan::BoxOf(const Route& route) const {
  const size_t rank = tensors[route.tensor].shape.size();
  const int64_t* numbers = box_numbers.data() + route.box;
  return {Dims(numbers, numbers + rank), Dims(numbers + rank, numbers + 2 * rank)};
}

std::vector<uint32_t> RoutePlan::RemoteNodesOf(const Route& route) const {
  std::vector<uint32_t> remote;
  for (const uint32_t node : NodesOf(route)) {
    if (node != source_nodes[route.source]) remote.push_back(node);
  }
  return remote;
}

absl::Status ValidatePlan(const RoutePlan& plan) { return PlanChecker(plan).Run(); }

absl::StatusOr<RoutePlan> CompileRoutes(const std::vector<RouteMember>& sources,
                                        const std::vector<RouteMember>& destinations,
                                        const RouteOptions& options) {
  return Router(sources, destinations, options).Run();
}

}  // namespace refitd
