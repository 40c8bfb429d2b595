// Which tensors the layouts and manifests of a group's engine ranks declare, by name.
//
// Grows and shrinks by one layout or manifest at a time, at the cost of the tensors of that one: a
// membership change costs what changed, and not all ranks times all tensors. Ranks that share an
// object count once. What nobody else refers to any more is removed when others come.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_TENSOR_TABLE_H_
#define REFITD_DAEMON_GROUP_TENSOR_TABLE_H_

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "transport/base/status.h"
#include "transport/plan/layout.h"

namespace refitd::group {

using Manifest = std::vector<TensorSpec>;

class TensorTable {
 public:
  // `engine_only`: tensors whose bytes no update writes.
  explicit TensorTable(const std::vector<std::string>& engine_only)
      : engine_only_(engine_only.begin(), engine_only.end()) {}

  // Numbers of layouts and manifests; one that was removed is given again.
  using ListId = uint32_t;
  // A tensor of a layout or manifest.
  struct Use {
    ListId list = 0;
    uint32_t tensor = 0;  // index into its tensors
  };
  using Uses = absl::InlinedVector<Use, 1>;

  // The same number for the same object.
  ListId Add(const std::shared_ptr<const Layout>& layout);
  ListId Add(const std::shared_ptr<const Manifest>& manifest);

  // The equal manifest that the table has, else a new object.
  std::shared_ptr<const Manifest> Shared(Manifest manifest) const;

  // Null: nobody declares it.
  const Uses* Find(std::string_view name) const;
  const absl::flat_hash_map<std::string, Uses>& tensors() const { return tensors_; }
  const TensorSpec& spec(const Use& use) const;
  // Indices of that tensor's pieces; none of a manifest.
  absl::Span<const uint32_t> PiecesOf(const Use& use) const;
  // An update must bring it: a rank stores an element of it, or a manifest lists it with elements.
  bool wanted(const Use& use) const { return lists_[use.list].wanted[use.tensor]; }
  // Names that a layout or manifest has, or had, and does not want.
  const std::set<std::string>& partly_unwanted() const { return partly_unwanted_; }
  // Null: the list is a manifest.
  const Layout* layout(ListId list) const { return lists_[list].layout.get(); }
  // That an update writes to a rank of the layout.
  int64_t bytes(ListId list) const { return lists_[list].bytes; }
  bool engine_only(std::string_view name) const;
  // Numbers are below this.
  size_t lists() const { return lists_.size(); }
  // Names that are, or were, declared with different dtypes or shapes.
  const std::set<std::string>& mixed() const { return mixed_; }

  // How many tensors were looked up to be added or removed so far.
  int64_t looked_up() const { return looked_up_; }

 private:
  struct List {
    std::shared_ptr<const Layout> layout;
    std::shared_ptr<const Manifest> manifest;  // one of the two; neither: the number is free
    std::vector<uint32_t> first_piece;         // by tensor, and the end: index into `pieces`
    std::vector<uint32_t> pieces;              // by tensor
    std::vector<bool> wanted;                  // by tensor
    int64_t bytes = 0;
    const std::vector<TensorSpec>& tensors() const {
      if (layout != nullptr) return layout->tensors;
      const Manifest* const declared = manifest.get();
      REFITD_CHECK(declared != nullptr);
      return *declared;
    }
    bool free() const { return layout == nullptr && manifest == nullptr; }
    bool unused() const {
      return !free() && (layout != nullptr ? layout.use_count() : manifest.use_count()) == 1;
    }
  };

  ListId AddList(const void* key, List list);
  void SortPieces(List* list) const;
  void RemoveUnused();
  void Remove(ListId id);

  const absl::flat_hash_set<std::string> engine_only_;
  std::vector<List> lists_;
  absl::flat_hash_map<const void*, ListId> ids_;
  absl::flat_hash_map<std::string, Uses> tensors_;
  std::set<std::string> mixed_;
  std::set<std::string> partly_unwanted_;
  int64_t looked_up_ = 0;
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_TENSOR_TABLE_H_
