// The tensors that the layouts and manifests of a group's engine ranks declare, by name.
//
// The table grows and shrinks by one layout or manifest at a time, at the cost of that list's
// tensors: a membership change costs what changed, and not all ranks times all tensors. Ranks that
// share an object count once. A list that only the table still refers to is removed when another is
// added.
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
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "transport/base/status.h"
#include "transport/plan/layout.h"
#include "transport/plan/name_patterns.h"

namespace refitd::group {

using Manifest = std::vector<TensorSpec>;

// About how much memory the manifest takes.
int64_t MemoryOf(const Manifest& manifest);

class TensorTable {
 public:
  // `engine_only`: patterns of tensors whose bytes no update writes. `unwanted`: patterns of
  // tensors that trainers may bring though no engine wants them; sorted.
  explicit TensorTable(const std::vector<std::string>& engine_only,
                       std::vector<std::string> unwanted = {});

  // The number of a layout or manifest. The number of a removed list is given again.
  using ListId = uint32_t;
  // A tensor of a layout or manifest.
  struct Use {
    ListId list = 0;
    uint32_t tensor = 0;  // index into the list's tensors
  };
  // Tensor-parallel ranks of one instance each declare every tensor: eight lists are kept without
  // an allocation.
  using Uses = absl::InlinedVector<Use, 8>;

  // Adding the same object again returns the same number.
  ListId Add(const std::shared_ptr<const Layout>& layout);
  ListId Add(const std::shared_ptr<const Manifest>& manifest);

  // The table's manifest that equals `manifest`, else a new object.
  std::shared_ptr<const Manifest> Shared(Manifest manifest) const;

  // All declarations of the tensor; null: there is none.
  const Uses* Find(std::string_view name) const;
  // All declarations of tensors that are derived from `source`; null: there is none.
  const Uses* FindDerived(std::string_view source) const;
  bool any_derived() const { return !derived_.empty(); }
  // A name is valid until a list that declares the tensor is removed.
  const absl::flat_hash_map<absl::string_view, Uses>& tensors() const { return tensors_; }
  const TensorSpec& spec(const Use& use) const;
  // Indices of the tensor's pieces; empty for a manifest.
  absl::Span<const uint32_t> PiecesOf(const Use& use) const;
  // Whether an update must bring the tensor: a rank stores an element of it, or the manifest lists
  // it with elements.
  bool wanted(const Use& use) const { return lists_[use.list].wanted[use.tensor]; }
  // Names that some layout or manifest declares, or declared, and does not want.
  const std::set<std::string_view>& partly_unwanted() const { return partly_unwanted_; }
  // Null: the list is a manifest.
  const Layout* layout(ListId list) const { return lists_[list].layout.get(); }
  // How many bytes an update writes to a rank with that list.
  int64_t bytes(ListId list) const { return lists_[list].bytes; }
  bool engine_only(std::string_view name) const;
  // The engine-only tensors that are named exactly, declared or not, and those declared that match
  // a pattern; sorted.
  std::vector<std::string> EngineOnlyNames() const;
  bool may_be_unwanted(std::string_view name) const { return MatchesAny(unwanted_, name); }
  // Whether the number names no list at the moment.
  bool free(ListId list) const { return lists_[list].free(); }
  // All list numbers are below this number.
  size_t lists() const { return lists_.size(); }
  // Names that are, or were, declared with different dtypes, shapes or derivations.
  const std::set<std::string_view>& mixed() const { return mixed_; }

  // How many tensors were looked up to be added or removed; tests check the cost by it.
  int64_t looked_up() const { return looked_up_; }

 private:
  struct List {
    std::shared_ptr<const Layout> layout;
    std::shared_ptr<const Manifest> manifest;  // one of the two is set; neither: the number is free
    std::vector<uint32_t> first_piece;         // by tensor, with an end: index into `pieces`
    std::vector<uint32_t> pieces;              // sorted by tensor
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

  using UsesByName = absl::flat_hash_map<absl::string_view, Uses>;
  using NameOf = const std::string& (*)(const TensorSpec&);

  ListId AddList(const void* key, List list);
  // Takes list `id`, which has `name`, out of the name's entry.
  void RemoveUses(UsesByName* names, const std::string& name, NameOf name_of, ListId id);
  void SortPieces(List* list) const;
  void RemoveUnused();
  void Remove(ListId id);

  // Constant after construction.
  absl::flat_hash_set<std::string> engine_only_;   // exact names
  std::vector<std::string> engine_only_patterns_;  // all others
  std::vector<std::string> unwanted_;

  std::set<std::string> matched_;  // declared tensors that match a pattern
  std::vector<List> lists_;
  absl::flat_hash_map<const void*, ListId> ids_;
  // A key is the name in a list that declares the tensor, so that entering it copies nothing.
  UsesByName tensors_;
  UsesByName derived_;  // by the name of the tensor that they are derived from; keys as above
  // Keys of tensors_: no name is kept twice, since a layout may have 262,144 of them (P10).
  std::set<std::string_view> mixed_;
  std::set<std::string_view> partly_unwanted_;
  int64_t looked_up_ = 0;
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_TENSOR_TABLE_H_
