// Adds derived tensors (derived.h) to trainers' layouts: the boxes that each rank can compute.
//
// A rank computes whole blocks. Of a block that shards cut, it reads what it lacks from the memory
// of other ranks of its node. So each rank that holds elements of a block can compute it, if its
// node holds all of it; blocks that no node holds as a whole are not computed.
//
// Invariant: the boxes depend on nothing but the boxes that the node's ranks hold, so that every
// process finds the same ones, whatever the order of ranks.
//
// Pure. Not thread-safe.
#ifndef REFITD_TRANSPORT_PLAN_DERIVED_LAYOUTS_H_
#define REFITD_TRANSPORT_PLAN_DERIVED_LAYOUTS_H_

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "transport/plan/boxes.h"
#include "transport/plan/derived.h"
#include "transport/plan/layout.h"

namespace refitd {

// The most boxes of other shards from which one box is computed (P10): transports look through all
// of them for each block. Where each rank holds one row, a block of 128 rows has 127.
inline constexpr int64_t kMaxShardBoxes = 4096;

// A box of a shard, which is a piece of one of a node's layouts.
struct ShardBox {
  uint32_t layout = 0;  // index into the node's list
  uint32_t piece = 0;
  Box box;
};

// The key is the index of a layout in the node's list, and of a computed piece in its extended
// layout. Pieces that are computed from the same boxes have one list.
using ShardBoxes = absl::flat_hash_map<std::pair<uint32_t, uint32_t>,
                                       std::shared_ptr<const std::vector<ShardBox>>>;

class DerivedLayouts {
 public:
  // Takes the derived tensors of these layouts, or of this list. Null layouts are passed over. What
  // is given must outlive this object.
  explicit DerivedLayouts(absl::Span<const Layout* const> layouts);
  explicit DerivedLayouts(const std::vector<TensorSpec>& tensors);

  struct Extended {
    // Each layout with the derived tensors appended, and with computed pieces
    // (Piece::computed_from), or the layout itself if there is nothing to add, which is so of
    // layouts that have the derived tensors themselves. Layouts with one list of tensors have one
    // list afterwards.
    std::vector<std::shared_ptr<const Layout>> layouts;
    // What computed pieces need beyond the piece that they are computed from: disjoint boxes.
    ShardBoxes other_shards;
  };

  // Extends the layouts of a node's ranks, which may be one object several times. A layout that
  // cuts no block gets one extension, whatever the node. FAILED_PRECONDITION, naming the tensor:
  // what it is derived from has another dtype or shape in a layout. RESOURCE_EXHAUSTED: more than
  // kMaxPiecesPerLayout pieces would have to be looked at or boxes be listed, more than
  // kMaxShardBoxes of a box, or *work is over; CANCELLED if it was cancelled.
  absl::StatusOr<Extended> Extend(absl::Span<const std::shared_ptr<const Layout>> node,
                                  PlanWork* work);

 private:
  class Node;
  // A list of tensors with those that are derived from them.
  struct List {
    std::shared_ptr<const TensorList::List> tensors;  // null: nothing is derived from the list
    absl::flat_hash_map<uint32_t, std::vector<uint32_t>>
        computed;  // by tensor: those derived of it
  };
  void Add(const TensorSpec& tensor);
  absl::StatusOr<List> ListOf(const TensorList::List& tensors) const;
  // `node`: what the layout's ranks can read; the layout is number `number` of it. Null: the layout
  // by itself; the result is then null if its shards cut blocks.
  absl::StatusOr<std::shared_ptr<const Layout>> ExtendOne(
      const std::shared_ptr<const Layout>& layout, Node* node, uint32_t number);

  absl::flat_hash_set<std::string_view> names_;
  absl::flat_hash_map<std::string_view, std::vector<const TensorSpec*>> by_source_;
  absl::flat_hash_map<const TensorSpec*, List> lists_;  // by a list's first tensor
  absl::flat_hash_map<const Layout*, std::shared_ptr<const Layout>> alone_;  // by themselves
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_DERIVED_LAYOUTS_H_
