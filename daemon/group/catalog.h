// What the instances of an update expect: the tensors they know, which must come, and where
// registered ranks want them.
//
// Immutable after Make, so thread-safe; made once for a set of layouts and manifests and kept
// across updates while those stay the same (structure only, never data).
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

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/group/group.h"

namespace refitd::group {

using Manifest = std::vector<TensorSpec>;

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
  struct Tensor {
    DType dtype = DType::kUint8;
    Dims shape;
    std::string declared_by;          // label of the first rank that did
    std::vector<uint32_t> instances;  // that know it; ascending
    std::vector<uint32_t> wanting;    // of those: it must come; ascending
  };

  // FAILED_PRECONDITION: two ranks disagree about a tensor's dtype or shape (both are named).
  static absl::StatusOr<std::shared_ptr<const Catalog>> Make(
      std::vector<Rank> ranks, std::vector<std::string> instances,
      const std::vector<std::string>& engine_only);

  const std::vector<Rank>& ranks() const { return ranks_; }
  const std::vector<std::string>& instances() const { return instances_; }
  size_t tensor_count() const { return tensors_.size(); }
  // An instance does.
  bool Wants(std::string_view tensor) const {
    const auto it = tensors_.find(absl::string_view(tensor.data(), tensor.size()));
    return it != tensors_.end() && !it->second.wanting.empty();
  }
  // Known, and wanted by no instance; in no order.
  const std::vector<std::string>& unwanted() const { return unwanted_; }

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
  const std::shared_ptr<const DestinationIndex>& index() const { return index_; }
  const std::vector<MemberId>& destinations() const { return destinations_; }
  uint32_t instance_of(uint32_t destination) const { return instance_of_[destination]; }
  // Bytes that a complete update writes there.
  int64_t expected_bytes(uint32_t destination) const { return expected_bytes_[destination]; }
  const std::string& label(uint32_t destination) const { return index_->labels()[destination]; }

  // Marks destinations with elements of `range` of `tensor`, unless skipped; how many were not
  // marked before.
  int AddTouched(const TensorSpec& tensor, const TensorRange& range,
                 const std::vector<bool>& skip_destination, std::vector<bool>* touched) const;

 private:
  Catalog() = default;
  absl::Status Declare(const Rank& rank, const TensorSpec& tensor, bool wanted);
  absl::Status DeclareLayout(const Rank& rank);

  std::vector<Rank> ranks_;
  std::vector<std::string> instances_;
  std::vector<bool> open_;  // by instance
  absl::flat_hash_set<std::string> engine_only_;
  absl::flat_hash_map<std::string, Tensor> tensors_;
  std::vector<std::string> unwanted_;
  std::shared_ptr<const DestinationIndex> index_;
  std::vector<MemberId> destinations_;
  std::vector<uint32_t> instance_of_;
  std::vector<int64_t> expected_bytes_;
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_CATALOG_H_
