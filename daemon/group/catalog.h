// What the instances of an update expect: the tensors they know, which must come, and where
// registered ranks want them.
//
// A view of the group's TensorTable, made at the cost of the ranks and kept across updates while
// they and their layouts and manifests stay the same (structure only, never data). What is added to
// the table later does not show in it. Not thread-safe; what `index()` gives is.
//
// An instance knows the tensors of its ranks' layouts and manifests together; one with a staged
// rank that declared no manifest is open: it takes any tensor. Engine-only tensors are left out. It
// wants those of which a rank stores an element, or that a manifest lists with elements. A tensor
// that it knows and does not want may come and need not: one without elements, or a name that
// layouts have without a piece because its memory is another tensor's (tied weights).
#ifndef REFITD_DAEMON_GROUP_CATALOG_H_
#define REFITD_DAEMON_GROUP_CATALOG_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/group/group.h"
#include "daemon/group/tensor_table.h"

namespace refitd::group {

class Catalog {
 public:
  struct Rank {
    MemberId member;
    std::string label;
    uint32_t instance = 0;
    DeliveryMode delivery = DeliveryMode::kRegistered;
    std::shared_ptr<const Layout> layout;      // registered delivery
    std::shared_ptr<const Manifest> manifest;  // staged delivery; null: none declared
    bool operator==(const Rank&) const = default;
  };

  // `ranks` come instance by instance. Layouts and manifests that `table` does not have are added
  // to it. FAILED_PRECONDITION: two ranks disagree about a tensor's dtype or shape (both are
  // named).
  static absl::StatusOr<std::shared_ptr<const Catalog>> Make(std::vector<Rank> ranks,
                                                             std::vector<std::string> instances,
                                                             std::shared_ptr<TensorTable> table);

  const std::vector<Rank>& ranks() const { return ranks_; }
  const std::vector<std::string>& instances() const { return instances_; }
  // At least as many as there are.
  size_t tensor_count() const { return table_->tensors().size(); }
  // An instance does.
  bool Wants(std::string_view tensor) const;
  // Known, and wanted by no instance; by name. Found when it is first asked for.
  const std::vector<std::string>& unwanted() const;

  // FAILED_PRECONDITION naming tensor and instance or rank: engine-only, unknown to an instance
  // that is not in `evicted`, dtype or shape disagree.
  absl::Status Check(const TensorSpec& tensor, const std::vector<bool>& evicted) const;
  // First tensor (by name) that an instance still in wants and `pushed` doesn't have, as a status
  // naming both.
  absl::Status CheckAllPushed(const std::function<bool(std::string_view)>& pushed,
                              const std::vector<bool>& evicted) const;
  // A staged rank without manifest, or null.
  const Rank* OpenRank(const std::vector<bool>& evicted) const;

  // Destinations: the registered ranks, in order.
  const std::vector<MemberId>& destinations() const { return destinations_; }
  uint32_t instance_of(uint32_t destination) const { return rank(destination).instance; }
  // Bytes that a complete update writes there.
  int64_t expected_bytes(uint32_t destination) const {
    return table_->bytes(list_of_rank_[rank_of_[destination]]);
  }
  const std::string& label(uint32_t destination) const { return rank(destination).label; }
  // The layouts of registered ranks, each object once.
  const std::vector<std::shared_ptr<const Layout>>& layouts() const { return layouts_; }
  // Destinations by tensor, for the executor: made when it is first asked for, at the cost of all
  // ranks' tensors. Asked for only where all of an update's ranks are on this daemon.
  const std::shared_ptr<const DestinationIndex>& index() const;

  // Destinations that get elements of the part, but for those in `skip_destination`; ascending.
  std::vector<uint32_t> Touched(const PartContent& content,
                                const std::vector<bool>& skip_destination) const;

 private:
  using ListId = TensorTable::ListId;
  static constexpr ListId kNoList = UINT32_MAX;

  Catalog() = default;
  const Rank& rank(uint32_t destination) const { return ranks_[rank_of_[destination]]; }
  void AddRank(uint32_t rank);
  void FindKinds();
  absl::Status CheckAgreement() const;
  // Of this catalog's ranks: who declares it first, and as what.
  const Rank* FirstRank(const TensorTable::Uses& uses, const TensorSpec** spec) const;
  bool Knows(uint32_t kind, const TensorTable::Uses& uses) const;
  // Whether a list of `lists` wants it.
  bool WantedBy(const std::vector<bool>& lists, const TensorTable::Uses& uses) const;

  std::shared_ptr<TensorTable> table_;
  std::vector<Rank> ranks_;
  std::vector<ListId> list_of_rank_;  // kNoList: declares nothing
  std::vector<std::string> instances_;
  std::vector<bool> open_;  // by instance
  std::vector<bool> used_;  // by list: a rank has it
  // Instances whose ranks have the same lists are of one kind.
  std::vector<uint32_t> kind_of_;         // by instance
  std::vector<std::vector<bool>> kinds_;  // the lists of each
  std::vector<MemberId> destinations_;
  std::vector<uint32_t> rank_of_;  // by destination
  std::vector<std::shared_ptr<const Layout>> layouts_;
  // Found when they are first asked for.
  mutable std::optional<std::vector<std::string>> unwanted_;
  mutable std::shared_ptr<const DestinationIndex> index_;
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_CATALOG_H_
