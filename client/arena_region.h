// An arena as an engine's region: both its sides are regions that the daemon knows.
#ifndef REFITD_CLIENT_ARENA_REGION_H_
#define REFITD_CLIENT_ARENA_REGION_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "client/arena.h"
#include "client/connection.h"
#include "client/types.h"
#include "transport/plan/layout.h"

namespace refitd::client {

// Flip and CopyToBack are called by one thread at a time.
class ArenaRegion final : public Region {
 public:
  // `for_next_rank`: the daemon keeps the memory for the rank after this one. FAILED_PRECONDITION:
  // another engine has the arena. Also errors of a region.
  static absl::StatusOr<std::shared_ptr<ArenaRegion>> Make(std::shared_ptr<Arena> arena,
                                                           const std::shared_ptr<Regions>& regions,
                                                           bool for_next_rank);
  ~ArenaRegion() override { arena_->taken_ = false; }

  char* data() const override { return arena_->data(); }
  int64_t bytes() const override { return arena_->bytes(); }
  RegionId id() const override { return front_->id(); }
  RegionBack pair() const { return {front_->id(), back_->id()}; }

  // Whether no daemon was given a layout over it before. Later calls return false.
  bool TakeFresh() { return std::exchange(arena_->fresh_, false); }
  absl::Status CopyToBack() { return arena_->memory_->CopyToBack(); }
  absl::Status AllowWrites() { return arena_->memory_->AllowWrites(); }
  // Exchanges the sides. A later daemon is given the side that is mapped as the front; the present
  // daemon exchanges the two itself at the commit (Connection::Exchange). Errors: TwoSided::Flip.
  absl::Status Flip();

 private:
  ArenaRegion(std::shared_ptr<Arena> arena, std::shared_ptr<Regions> regions)
      : arena_(std::move(arena)), regions_(std::move(regions)) {}
  absl::StatusOr<std::shared_ptr<Region>> Share(bool back, bool for_next_rank) const;

  const std::shared_ptr<Arena> arena_;
  const std::shared_ptr<Regions> regions_;
  // Set by Make, constant afterwards.
  std::shared_ptr<Region> front_;
  std::shared_ptr<Region> back_;
};

}  // namespace refitd::client

#endif  // REFITD_CLIENT_ARENA_REGION_H_
