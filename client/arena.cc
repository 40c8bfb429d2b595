#include "client/arena.h"

#include "client/slot_memory.h"
#include "transport/base/status.h"

namespace refitd::client {
namespace {

absl::StatusOr<std::shared_ptr<Region>> ShareSide(const TwoSided& memory, bool back, bool on_device,
                                                  Regions* regions) {
  RegionSource source;
  source.bytes = memory.bytes();
  REFITD_ASSIGN_OR_RETURN(source.fd, memory.Share(back));
  if (on_device) source.kind = RegionKind::kDevice;
  return regions->Add(std::move(source));
}

}  // namespace

absl::StatusOr<std::shared_ptr<Arena>> Arena::Make(int64_t bytes, const ConnectOptions& options,
                                                   const std::shared_ptr<Regions>& regions) {
  REFITD_ASSIGN_OR_RETURN(std::unique_ptr<TwoSided> memory, MakeTwoSided(bytes, options));
  const bool on_device = OnDevice(options.device);
  REFITD_ASSIGN_OR_RETURN(std::shared_ptr<Region> front,
                          ShareSide(*memory, /*back=*/false, on_device, regions.get()));
  REFITD_ASSIGN_OR_RETURN(std::shared_ptr<Region> back,
                          ShareSide(*memory, /*back=*/true, on_device, regions.get()));
  return std::shared_ptr<Arena>(
      new Arena(std::move(memory), regions, std::move(front), std::move(back)));
}

absl::Status Arena::Flip() {
  REFITD_RETURN_IF_ERROR(memory_->Flip());
  regions_->ExchangeSources(front_->id(), back_->id());
  return absl::OkStatus();
}

}  // namespace refitd::client
