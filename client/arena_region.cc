#include "client/arena_region.h"

#include "transport/base/errors.h"
#include "transport/base/status.h"

namespace refitd::client {

absl::StatusOr<std::shared_ptr<Region>> ArenaRegion::Share(bool back, bool for_next_rank) const {
  RegionSource source;
  source.bytes = bytes();
  source.keep = for_next_rank ? KeepDescriptor::kForNextRank : KeepDescriptor::kWithRegion;
  REFITD_ASSIGN_OR_RETURN(source.fd, arena_->memory_->Share(back));
  source.kind = arena_->kind_;
  return regions_->Add(std::move(source));
}

absl::StatusOr<std::shared_ptr<ArenaRegion>> ArenaRegion::Make(
    std::shared_ptr<Arena> arena, const std::shared_ptr<Regions>& regions, bool for_next_rank) {
  if (arena->taken_.exchange(true)) {
    return Precondition("the arena belongs to another engine: destroy that engine first");
  }
  const std::shared_ptr<ArenaRegion> made(new ArenaRegion(std::move(arena), regions));
  REFITD_ASSIGN_OR_RETURN(made->front_, made->Share(/*back=*/false, for_next_rank));
  REFITD_ASSIGN_OR_RETURN(made->back_, made->Share(/*back=*/true, for_next_rank));
  return made;
}

absl::Status ArenaRegion::Flip() {
  REFITD_RETURN_IF_ERROR(arena_->memory_->Flip());
  regions_->ExchangeSources(front_->id(), back_->id());
  return absl::OkStatus();
}

}  // namespace refitd::client
