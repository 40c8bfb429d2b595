#include "client/arena.h"

#include "client/slot_memory.h"
#include "transport/base/status.h"

namespace refitd::client {

Arena::Arena(std::unique_ptr<TwoSided> memory, const ConnectOptions& options, SidesIn in,
             bool fresh)
    : memory_(std::move(memory)),
      kind_(!OnDevice(options.device) ? RegionKind::kMemfd
            : in == SidesIn::kHost    ? RegionKind::kPinned
                                      : RegionKind::kDevice),
      fresh_(fresh) {}

absl::StatusOr<std::shared_ptr<Arena>> Arena::Make(int64_t bytes, const ConnectOptions& options,
                                                   SidesIn in) {
  REFITD_ASSIGN_OR_RETURN(std::unique_ptr<TwoSided> memory, MakeTwoSided(bytes, options, in));
  return std::shared_ptr<Arena>(new Arena(std::move(memory), options, in, /*fresh=*/true));
}

absl::StatusOr<std::shared_ptr<Arena>> Arena::Open(SharedSides sides,
                                                   const ConnectOptions& options) {
  const SidesIn in = sides.in;
  REFITD_ASSIGN_OR_RETURN(std::unique_ptr<TwoSided> memory,
                          OpenTwoSided(std::move(sides), options));
  return std::shared_ptr<Arena>(new Arena(std::move(memory), options, in, /*fresh=*/false));
}

}  // namespace refitd::client
