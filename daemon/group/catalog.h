// The tensors that the instances of an update expect: which tensors they know, which of them must
// come, and which in-place ranks store them.
//
// A catalog is a view of the group's TensorTable. Making it costs as much as there are ranks; it is
// kept across updates while the ranks, their layouts and manifests stay the same (structure only,
// never data). Lists that are added to the table later do not show in it. Not thread-safe, but
// `index()` returns an immutable object.
//
// An instance knows the tensors of its ranks' layouts and manifests together. An instance with a
// loader rank that declared no manifest is open: it takes any tensor. Engine-only tensors are left
// out. An instance wants the tensors of which a rank stores an element, and those that a manifest
// lists with elements. An update may leave out a tensor that an instance knows and does not want:
// it has no elements, or layouts name it without a piece because its memory is another tensor's
// (tied weights).
#ifndef REFITD_DAEMON_GROUP_CATALOG_H_
#define REFITD_DAEMON_GROUP_CATALOG_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "daemon/group/group.h"
#include "daemon/group/tensor_table.h"

namespace refitd::group {

// Two names of one memory of an engine rank (Tie).
struct TiedNames {
  std::string tensor;
  std::string same_as;
  std::string rank;  // the label of a rank that ties them
};

class Catalog {
 public:
  struct Rank {
    MemberId member;
    std::string label;
    uint32_t instance = 0;
    DeliveryMode delivery = DeliveryMode::kInPlace;
    std::shared_ptr<const Layout> layout;      // in-place delivery
    std::shared_ptr<const Manifest> manifest;  // loader delivery; null: none declared
    bool operator==(const Rank&) const = default;
  };

  // `ranks` are ordered by instance. Layouts and manifests that `table` does not have are added to
  // it. FAILED_PRECONDITION: two ranks disagree about a tensor's dtype or shape; the status names
  // both.
  static absl::StatusOr<std::shared_ptr<const Catalog>> Make(std::vector<Rank> ranks,
                                                             std::vector<std::string> instances,
                                                             std::shared_ptr<TensorTable> table);

  const std::vector<Rank>& ranks() const { return ranks_; }
  const std::vector<std::string>& instances() const { return instances_; }
  // An upper bound of the number of tensors.
  size_t tensor_count() const { return table_->tensors().size(); }
  // The number of tensors that a push of `tensor` brings and that instances want: itself, and those
  // that are derived from it.
  int64_t WantedOf(std::string_view tensor) const;
  // The names of tensors that are derived from `source`.
  std::set<std::string_view> DerivedFrom(std::string_view source) const;
  // Returns the tensor from which `tensor` is derived; null: it is not derived.
  const TensorSpec* SourceOf(std::string_view tensor) const;
  // The number of tensors that instances want. Computed at the first call, at the cost of the
  // table's tensors that not all of its lists want; only if the table has a list that no rank here
  // has, at the cost of all its tensors.
  int64_t wanted_count() const;
  // Adds the tensors that in-place ranks know and that `held` does not have.
  void AddLacking(const absl::flat_hash_set<std::string_view>& held,
                  std::set<std::string>* lacking) const;
  // Adds the tensors that in-place ranks derive from these.
  void AddDerived(std::set<std::string>* sources) const;
  // How many tensors of the table were looked at to count those that are wanted; tests check the
  // cost by it.
  int64_t looked_at() const { return looked_at_; }
  // Names of tensors that instances know and none wants; sorted. Computed at the first call.
  const std::vector<std::string>& unwanted() const;

  // FAILED_PRECONDITION, naming the tensor and the instance or rank: the tensor, or one that is
  // derived from it, is engine-only; it is unknown to an instance that is not evicted (and may not
  // be unwanted), or has another dtype or shape there.
  absl::Status Check(const TensorSpec& tensor, const std::vector<bool>& evicted) const;
  // Whether ranks have derived tensors.
  bool any_derived() const { return table_->any_derived(); }
  // FAILED_PRECONDITION, naming the tensor: these elements cut blocks of which derived tensors are
  // computed.
  absl::Status CheckBlocks(const TensorSpec& tensor, const TensorRange& range) const;
  // Whether the update brings a tensor, or the source that it is derived from; for a tensor that is
  // not derived, `source` is its own name.
  using Came = std::function<bool(std::string_view tensor, std::string_view source)>;
  // Not OK: names the first tensor (by name) that did not come, and an instance still in the update
  // that wants it.
  absl::Status CheckAllCame(const Came& came, const std::vector<bool>& evicted) const;
  // The ties of all in-place ranks, each pair of names once. Empty for most models.
  const std::vector<TiedNames>& ties() const { return ties_; }
  // Indices into ties() of those of which the tensor is one of the two.
  absl::Span<const uint32_t> TiesOf(std::string_view tensor) const;
  bool IsTied(std::string_view tensor) const { return !TiesOf(tensor).empty(); }
  // A loader rank without manifest; null: there is none.
  const Rank* OpenRank(const std::vector<bool>& evicted) const;

  // The in-place ranks, in order: index in this list = destination.
  const std::vector<MemberId>& destinations() const { return destinations_; }
  uint32_t instance_of(uint32_t destination) const { return rank(destination).instance; }
  // How many bytes a complete update writes to the destination.
  int64_t expected_bytes(uint32_t destination) const {
    return table_->bytes(list_of_rank_[rank_of_[destination]]);
  }
  const std::string& label(uint32_t destination) const { return rank(destination).label; }
  // The layouts of in-place ranks; each object is listed once.
  const std::vector<std::shared_ptr<const Layout>>& layouts() const { return layouts_; }
  // Destinations by tensor, for the executor. Made at the first call, at the cost of all ranks'
  // tensors; called only if all of an update's ranks are on this daemon.
  const std::shared_ptr<const DestinationIndex>& index() const;

  // Destinations that the part has elements for, except those that `skip_destination` marks;
  // ascending.
  std::vector<uint32_t> Touched(const PartContent& content,
                                const std::vector<bool>& skip_destination) const;

 private:
  using ListId = TensorTable::ListId;
  static constexpr ListId kNoList = UINT32_MAX;

  Catalog() = default;
  const Rank& rank(uint32_t destination) const { return ranks_[rank_of_[destination]]; }
  void AddRank(uint32_t rank);
  void AddTies(const Rank& rank);
  // Tensors that are derived from `source`; equal ones may be listed several times.
  std::vector<const TensorSpec*> DeclaredFrom(std::string_view source) const;
  absl::Status CheckSource(const TensorSpec& tensor) const;
  void FindKinds();
  absl::Status CheckAgreement() const;
  // The first of this catalog's ranks that declares the tensor, and its declaration.
  const Rank* FirstRank(const TensorTable::Uses& uses, const TensorSpec** spec) const;
  bool Knows(uint32_t kind, const TensorTable::Uses& uses) const;
  bool Knows(uint32_t kind, std::string_view tensor) const;
  bool KnowsDerived(uint32_t kind, std::string_view source) const;
  // The declaration of the first in-place rank here that declares the tensor; null: none does.
  const TensorSpec* InLayouts(const TensorTable::Uses& uses) const;
  bool Used(const TensorTable::Use& use) const {
    return use.list < used_.size() && used_[use.list];
  }
  bool Wants(std::string_view tensor) const;
  bool UsesAllLists() const;
  int64_t CountWanted() const;
  // Whether a list that `lists` marks wants the tensor.
  bool WantedBy(const std::vector<bool>& lists, const TensorTable::Uses& uses) const;

  std::shared_ptr<TensorTable> table_;
  std::vector<Rank> ranks_;
  std::vector<ListId> list_of_rank_;  // kNoList: declares nothing
  std::vector<std::string> instances_;
  std::vector<bool> open_;         // by instance
  std::vector<bool> reads_slots_;  // by instance: it has a rank with a manifest
  std::vector<bool> used_;         // by list; true: a rank has it
  // Instances whose ranks have the same lists are of one kind.
  std::vector<uint32_t> kind_of_;         // by instance
  std::vector<std::vector<bool>> kinds_;  // the lists of each kind
  std::vector<MemberId> destinations_;
  std::vector<uint32_t> rank_of_;  // by destination
  std::vector<std::shared_ptr<const Layout>> layouts_;
  std::vector<TiedNames> ties_;
  absl::flat_hash_map<std::string, std::vector<uint32_t>> ties_of_;
  // Computed when they are first asked for.
  mutable std::optional<int64_t> wanted_count_;
  mutable int64_t looked_at_ = 0;
  mutable std::optional<std::vector<std::string>> unwanted_;
  mutable std::shared_ptr<const DestinationIndex> index_;
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_CATALOG_H_
