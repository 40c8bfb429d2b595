#include "daemon/group/catalog.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include "transport/base/errors.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"
#include "transport/plan/derived.h"
#include "transport/plan/name_advice.h"

namespace refitd::group {
namespace {

bool SameElements(const TensorSpec& a, const TensorSpec& b) {
  return a.dtype == b.dtype && a.shape == b.shape;
}

absl::Status Disagree(const TensorSpec& tensor, std::string_view who, std::string_view verb,
                      const TensorSpec& known, std::string_view declared_by,
                      std::string_view advice) {
  return AboutTensor(
      Error(absl::StatusCode::kFailedPrecondition, "tensor '{}': {} {} {}, but {} declared {}{}",
            tensor.name, who, verb, Describe(tensor), declared_by, Describe(known), advice),
      tensor.name);
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Catalog>> Catalog::Make(std::vector<Rank> ranks,
                                                             std::vector<std::string> instances,
                                                             std::shared_ptr<TensorTable> table) {
  std::shared_ptr<Catalog> catalog(new Catalog());
  catalog->table_ = std::move(table);
  catalog->ranks_ = std::move(ranks);
  catalog->instances_ = std::move(instances);
  catalog->open_.resize(catalog->instances_.size());
  catalog->reads_slots_.resize(catalog->instances_.size());
  for (uint32_t r = 0; r < catalog->ranks_.size(); ++r) catalog->AddRank(r);
  catalog->FindKinds();
  REFITD_RETURN_IF_ERROR(catalog->CheckAgreement());
  return std::shared_ptr<const Catalog>(std::move(catalog));
}

void Catalog::AddRank(uint32_t index) {
  const Rank& rank = ranks_[index];
  ListId list = kNoList;
  if (NeedsLayout(rank.delivery)) {
    REFITD_CHECK(rank.layout != nullptr);
    list = table_->Add(rank.layout);
    destinations_.push_back(rank.member);
    rank_of_.push_back(index);
  } else if (rank.manifest != nullptr) {
    list = table_->Add(rank.manifest);
    reads_slots_[rank.instance] = true;
  } else {
    open_[rank.instance] = true;
  }
  list_of_rank_.push_back(list);
  if (list == kNoList) return;
  if (used_.size() <= list) used_.resize(list + 1);
  if (!used_[list] && rank.layout != nullptr) {
    layouts_.push_back(rank.layout);
    AddTies(rank);
  }
  used_[list] = true;
}

void Catalog::AddTies(const Rank& rank) {
  for (const Tie& tie : rank.layout->ties) {
    const std::string& tensor = rank.layout->tensors[tie.tensor].name;
    const std::string& same_as = rank.layout->tensors[tie.same_as].name;
    const absl::Span<const uint32_t> of_tensor = TiesOf(tensor);
    const bool known = std::any_of(of_tensor.begin(), of_tensor.end(), [&](uint32_t t) {
      return ties_[t].tensor == tensor && ties_[t].same_as == same_as;
    });
    if (known) continue;
    for (const std::string& name : {tensor, same_as}) {
      ties_of_[name].push_back(static_cast<uint32_t>(ties_.size()));
    }
    ties_.push_back({tensor, same_as, rank.label});
  }
}

absl::Span<const uint32_t> Catalog::TiesOf(std::string_view tensor) const {
  const auto it = ties_of_.find(absl::string_view(tensor.data(), tensor.size()));
  if (it == ties_of_.end()) return {};
  return it->second;
}

void Catalog::FindKinds() {
  std::vector<std::set<ListId>> lists(instances_.size());
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (list_of_rank_[r] != kNoList) lists[ranks_[r].instance].insert(list_of_rank_[r]);
  }
  std::map<std::set<ListId>, uint32_t> known;
  for (std::set<ListId>& of_instance : lists) {
    const auto [it, added] =
        known.try_emplace(std::move(of_instance), static_cast<uint32_t>(kinds_.size()));
    kind_of_.push_back(it->second);
    if (!added) continue;
    std::vector<bool>& kind = kinds_.emplace_back(used_.size());
    for (const ListId list : it->first) kind[list] = true;
  }
}

// Looks only at names about which the table has seen ranks disagree.
absl::Status Catalog::CheckAgreement() const {
  for (const std::string_view name : table_->mixed()) {
    const TensorTable::Uses* uses = table_->Find(name);
    const bool engine_only = table_->engine_only(name);
    std::map<ListId, const TensorSpec*> specs;
    for (const TensorTable::Use& use : *uses) specs[use.list] = &table_->spec(use);
    const Rank* first = nullptr;
    const TensorSpec* known = nullptr;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const auto spec = specs.find(list_of_rank_[r]);
      if (spec == specs.end()) continue;
      // Engine-only tensors are not delivered, so manifests need not agree about them; layouts
      // must.
      if (engine_only && ranks_[r].layout == nullptr) continue;
      if (first == nullptr) {
        first = &ranks_[r];
        known = spec->second;
      } else if (*spec->second != *known) {
        return Disagree(*spec->second, ranks_[r].label, "declares", *known, first->label, "");
      }
    }
  }
  return absl::OkStatus();
}

const Catalog::Rank* Catalog::FirstRank(const TensorTable::Uses& uses,
                                        const TensorSpec** spec) const {
  for (size_t r = 0; r < ranks_.size(); ++r) {
    for (const TensorTable::Use& use : uses) {
      if (use.list != list_of_rank_[r]) continue;
      *spec = &table_->spec(use);
      return &ranks_[r];
    }
  }
  return nullptr;
}

bool Catalog::Knows(uint32_t kind, const TensorTable::Uses& uses) const {
  const std::vector<bool>& lists = kinds_[kind];
  return std::any_of(uses.begin(), uses.end(), [&lists](const TensorTable::Use& use) {
    return use.list < lists.size() && lists[use.list];
  });
}

bool Catalog::Knows(uint32_t kind, std::string_view tensor) const {
  const TensorTable::Uses* const uses = table_->Find(tensor);
  return (uses != nullptr && Knows(kind, *uses)) || KnowsDerived(kind, tensor);
}

bool Catalog::KnowsDerived(uint32_t kind, std::string_view source) const {
  const TensorTable::Uses* const derived = table_->FindDerived(source);
  return derived != nullptr && Knows(kind, *derived);
}

bool Catalog::WantedBy(const std::vector<bool>& lists, const TensorTable::Uses& uses) const {
  return std::any_of(uses.begin(), uses.end(), [&](const TensorTable::Use& use) {
    return use.list < lists.size() && lists[use.list] && table_->wanted(use);
  });
}

bool Catalog::Wants(std::string_view tensor) const {
  const TensorTable::Uses* uses = table_->Find(tensor);
  return uses != nullptr && !table_->engine_only(tensor) && WantedBy(used_, *uses);
}

int64_t Catalog::WantedOf(std::string_view tensor) const {
  int64_t wanted = Wants(tensor) ? 1 : 0;
  for (const std::string_view derived : DerivedFrom(tensor)) wanted += Wants(derived) ? 1 : 0;
  return wanted;
}

std::set<std::string_view> Catalog::DerivedFrom(std::string_view source) const {
  std::set<std::string_view> names;
  for (const TensorSpec* const derived : DeclaredFrom(source)) names.insert(derived->name);
  return names;
}

std::vector<const TensorSpec*> Catalog::DeclaredFrom(std::string_view source) const {
  std::vector<const TensorSpec*> declared;
  const TensorTable::Uses* const uses = table_->FindDerived(source);
  if (uses == nullptr) return declared;
  absl::flat_hash_set<const Derivation*> seen;
  for (const TensorTable::Use& use : *uses) {
    if (!Used(use)) continue;
    const TensorSpec& tensor = table_->spec(use);
    if (seen.insert(tensor.derived.get()).second) declared.push_back(&tensor);
  }
  return declared;
}

const TensorSpec* Catalog::SourceOf(std::string_view tensor) const {
  if (!any_derived()) return nullptr;
  const TensorTable::Uses* const uses = table_->Find(tensor);
  const TensorSpec* const spec = uses == nullptr ? nullptr : InLayouts(*uses);
  return spec == nullptr || spec->derived == nullptr ? nullptr : &spec->derived->from;
}

bool Catalog::UsesAllLists() const {
  for (ListId list = 0; list < table_->lists(); ++list) {
    if (!table_->free(list) && (list >= used_.size() || !used_[list])) return false;
  }
  return true;
}

// Called if every list of the table is used. Counts all tensors of the table, but those that no
// list wants and those that no update writes. Only tensors that some list does not want, and
// engine-only ones, are looked at.
int64_t Catalog::CountWanted() const {
  auto count = static_cast<int64_t>(table_->tensors().size());
  for (const std::string_view name : table_->partly_unwanted()) {
    ++looked_at_;
    if (!WantedBy(used_, *table_->Find(name))) --count;
  }
  for (const std::string& name : table_->EngineOnlyNames()) {
    ++looked_at_;
    const TensorTable::Uses* uses = table_->Find(name);
    if (uses != nullptr && WantedBy(used_, *uses)) --count;
  }
  return count;
}

int64_t Catalog::wanted_count() const {
  if (wanted_count_.has_value()) return *wanted_count_;
  if (UsesAllLists()) {
    wanted_count_ = CountWanted();
    return *wanted_count_;
  }
  wanted_count_ = 0;
  for (const auto& [name, uses] : table_->tensors()) {
    ++looked_at_;
    if (!WantedBy(used_, uses)) continue;
    if (!table_->engine_only(std::string_view(name.data(), name.size()))) ++*wanted_count_;
  }
  return *wanted_count_;
}

void Catalog::AddLacking(const absl::flat_hash_set<std::string_view>& held,
                         std::set<std::string>* lacking) const {
  for (const auto& [key, uses] : table_->tensors()) {
    const std::string_view name(key.data(), key.size());
    if (held.contains(name)) continue;
    const TensorSpec* const spec = InLayouts(uses);
    if (spec != nullptr && !held.contains(NameAtSource(*spec))) lacking->emplace(name);
  }
}

const TensorSpec* Catalog::InLayouts(const TensorTable::Uses& uses) const {
  const auto use = std::find_if(uses.begin(), uses.end(), [this](const TensorTable::Use& u) {
    return Used(u) && table_->layout(u.list) != nullptr;
  });
  return use == uses.end() ? nullptr : &table_->spec(*use);
}

void Catalog::AddDerived(std::set<std::string>* sources) const {
  std::set<std::string> derived;
  for (const auto& [key, uses] : table_->tensors()) {
    const TensorSpec* const spec = InLayouts(uses);
    if (spec == nullptr || spec->derived == nullptr) continue;
    if (sources->contains(NameAtSource(*spec))) derived.insert(spec->name);
  }
  sources->merge(derived);
}

const std::vector<std::string>& Catalog::unwanted() const {
  if (unwanted_.has_value()) return *unwanted_;
  unwanted_.emplace();
  for (const std::string_view name : table_->partly_unwanted()) {
    const TensorTable::Uses& uses = *table_->Find(name);
    const bool known = std::any_of(uses.begin(), uses.end(),
                                   [this](const TensorTable::Use& use) { return Used(use); });
    if (known && !table_->engine_only(name) && !WantedBy(used_, uses))
      unwanted_->emplace_back(name);
  }
  return *unwanted_;
}

absl::Status Catalog::Check(const TensorSpec& tensor, const std::vector<bool>& evicted) const {
  if (table_->engine_only(tensor.name)) {
    return AboutTensor(
        Error(absl::StatusCode::kFailedPrecondition,
              "tensor '{}' is engine-only in the group's spec: trainers never push it",
              tensor.name),
        tensor.name);
  }
  static const TensorTable::Uses kNone;
  const TensorTable::Uses* found = table_->Find(tensor.name);
  const TensorTable::Uses& uses = found == nullptr ? kNone : *found;
  const auto declared = std::find_if(uses.begin(), uses.end(),
                                     [this](const TensorTable::Use& use) { return Used(use); });
  if (declared != uses.end() && !SameElements(table_->spec(*declared), tensor)) {
    const TensorSpec* known = nullptr;
    const Rank* rank = FirstRank(uses, &known);
    return Disagree(tensor, "the bucket", "has", *known, rank->label, CastAdvice(tensor, *known));
  }
  REFITD_RETURN_IF_ERROR(CheckSource(tensor));
  // Instances of one kind know the same tensors, so each kind is looked at once; instances are
  // looked at only to name the one that does not know the tensor.
  std::vector<bool> knows(kinds_.size());
  for (uint32_t kind = 0; kind < kinds_.size(); ++kind) {
    knows[kind] = Knows(kind, uses) || KnowsDerived(kind, tensor.name);
  }
  if (std::find(knows.begin(), knows.end(), false) == knows.end()) return absl::OkStatus();
  for (uint32_t i = 0; i < instances_.size(); ++i) {
    if (open_[i] || evicted[i] || knows[kind_of_[i]]) continue;
    // Nothing of it is written then. Ranks that read slots would be handed a tensor that their
    // manifest does not list.
    if (!reads_slots_[i] && table_->may_be_unwanted(tensor.name)) continue;
    const auto known = [this, i](std::string_view name) { return Knows(kind_of_[i], name); };
    return AboutTensor(Error(absl::StatusCode::kFailedPrecondition,
                             "tensor '{}' is unknown to instance {}{}", tensor.name, instances_[i],
                             NameAdvice(tensor.name, known,
                                        reads_slots_[i] ? "its manifest must list what is pushed"
                                                        : kAdviceUnwanted)),
                       tensor.name);
  }
  return absl::OkStatus();
}

// A tensor that engines derive from `tensor` must name its dtype and shape as those of its source.
absl::Status Catalog::CheckSource(const TensorSpec& tensor) const {
  for (const TensorSpec* const derived : DeclaredFrom(tensor.name)) {
    const TensorSpec& from = derived->derived->from;
    if (!SameElements(from, tensor)) {
      return AboutTensor(
          Precondition("tensor '{}': the bucket has {}, but '{}' is derived from {}{}", tensor.name,
                       Describe(tensor), derived->name, Describe(from), CastAdvice(tensor, from)),
          tensor.name);
    }
    if (!table_->engine_only(derived->name)) continue;
    return AboutTensor(Precondition("tensor '{}' is engine-only in the group's spec, and derived "
                                    "from '{}', which is pushed",
                                    derived->name, tensor.name),
                       derived->name);
  }
  return absl::OkStatus();
}

absl::Status Catalog::CheckBlocks(const TensorSpec& tensor, const TensorRange& range) const {
  const std::vector<const TensorSpec*> declared = DeclaredFrom(tensor.name);
  if (declared.empty() || range.count == 0) return absl::OkStatus();
  const std::vector<Box> boxes = BoxesOfRange(tensor.shape, range.start, range.count);
  for (const TensorSpec* const derived : declared) {
    const Derivation& derivation = *derived->derived;
    const bool whole = std::all_of(boxes.begin(), boxes.end(), [&derivation](const Box& box) {
      return BlocksAround(derivation, box) == box;
    });
    if (whole) continue;
    return AboutTensor(
        Precondition(
            "tensor '{}': elements [{}, {}) are pushed by themselves, and '{}' is "
            "computed of whole blocks of [{}] elements: push whole blocks, in slots that hold them",
            tensor.name, range.start, range.start + range.count, derived->name,
            fmt::join(BlockOf(derivation), ", ")),
        tensor.name);
  }
  return absl::OkStatus();
}

absl::Status Catalog::CheckAllCame(const Came& came, const std::vector<bool>& evicted) const {
  std::vector<bool> wanted(used_.size());
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (list_of_rank_[r] != kNoList && !evicted[ranks_[r].instance])
      wanted[list_of_rank_[r]] = true;
  }
  // The map's order is random. The smallest name is reported, so that equal events give equal
  // actions.
  std::string_view missing;
  const TensorTable::Uses* missing_uses = nullptr;
  for (const auto& [key, uses] : table_->tensors()) {
    const std::string_view name(key.data(), key.size());
    if (missing_uses != nullptr && name >= missing) continue;
    if (!WantedBy(wanted, uses) || table_->engine_only(name)) continue;
    const TensorSpec* const source = SourceOf(name);
    if (came(name, source == nullptr ? name : source->name)) continue;
    missing = name;
    missing_uses = &uses;
  }
  if (missing_uses == nullptr) return absl::OkStatus();
  uint32_t wanted_by = 0;
  while (evicted[wanted_by] || !WantedBy(kinds_[kind_of_[wanted_by]], *missing_uses)) ++wanted_by;
  const TensorSpec* const source = SourceOf(missing);
  const auto pushed = [&came](std::string_view name) { return came(name, name); };
  return AboutTensor(
      Error(absl::StatusCode::kFailedPrecondition,
            "tensor '{}' of instance {} was never pushed{}{}", missing, instances_[wanted_by],
            source == nullptr ? "" : fmt::format(", nor '{}', of which it is made", source->name),
            NameAdvice(source == nullptr ? missing : source->name, pushed, kAdviceEngineOnly)),
      missing);
}

const Catalog::Rank* Catalog::OpenRank(const std::vector<bool>& evicted) const {
  for (const Rank& rank : ranks_) {
    if (evicted[rank.instance]) continue;
    if (!NeedsLayout(rank.delivery) && rank.manifest == nullptr) return &rank;
  }
  return nullptr;
}

const std::shared_ptr<const DestinationIndex>& Catalog::index() const {
  if (index_ != nullptr) return index_;
  std::vector<std::shared_ptr<const Layout>> layouts;
  std::vector<std::string> labels;
  for (const uint32_t r : rank_of_) {
    layouts.push_back(ranks_[r].layout);
    labels.push_back(ranks_[r].label);
  }
  auto index = DestinationIndex::Make(std::move(layouts), std::move(labels));
  REFITD_CHECK(index.ok());  // CheckAgreement
  index_ = *std::move(index);
  return index_;
}

std::vector<uint32_t> Catalog::Touched(const PartContent& content,
                                       const std::vector<bool>& skip_destination) const {
  // Both are by list. `open`: a destination has the list, and no element was found for it yet.
  std::vector<bool> open(used_.size());
  std::vector<bool> found(used_.size());
  for (uint32_t d = 0; d < destinations_.size(); ++d) {
    if (!skip_destination[d]) open[list_of_rank_[rank_of_[d]]] = true;
  }
  auto left = std::count(open.begin(), open.end(), true);
  std::vector<Box> boxes;
  const auto meets = [&](const TensorTable::Use& use) {
    const Layout& layout = *table_->layout(use.list);
    const Derivation* const derived = layout.tensors[use.tensor].derived.get();
    const absl::Span<const uint32_t> of_tensor = table_->PiecesOf(use);
    return std::any_of(boxes.begin(), boxes.end(), [&](const Box& box) {
      const std::optional<Box> brought = derived != nullptr ? ComputableBox(*derived, box) : box;
      return brought.has_value() &&
             std::any_of(of_tensor.begin(), of_tensor.end(), [&](uint32_t p) {
               return Intersect(*brought, layout.pieces[p].box).has_value();
             });
    });
  };
  for (const TensorRange& range : content.ranges) {
    if (left == 0) break;
    if (range.count == 0) continue;
    const TensorSpec& tensor = content.bucket->tensors[range.tensor];
    boxes.clear();
    for (const TensorTable::Uses* uses :
         {table_->Find(tensor.name), table_->FindDerived(tensor.name)}) {
      if (uses == nullptr) continue;
      for (const TensorTable::Use& use : *uses) {
        if (use.list >= open.size() || !open[use.list]) continue;
        if (boxes.empty()) boxes = BoxesOfRange(tensor.shape, range.start, range.count);
        found[use.list] = meets(use);
        if (!found[use.list]) continue;
        open[use.list] = false;
        --left;
      }
    }
  }
  std::vector<uint32_t> touched;
  for (uint32_t d = 0; d < destinations_.size(); ++d) {
    if (!skip_destination[d] && found[list_of_rank_[rank_of_[d]]]) touched.push_back(d);
  }
  return touched;
}

}  // namespace refitd::group
