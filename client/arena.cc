#include "client/arena.h"

#include "client/slot_memory.h"
#include "transport/base/status.h"

namespace refitd::client {

absl::StatusOr<std::shared_ptr<Arena>> Arena::Make(int64_t bytes, const ConnectOptions& options) {
  REFITD_ASSIGN_OR_RETURN(std::unique_ptr<TwoSided> memory, MakeTwoSided(bytes, options));
  return std::shared_ptr<Arena>(new Arena(std::move(memory), OnDevice(options.device)));
}

absl::StatusOr<std::shared_ptr<Arena>> Arena::Open(SharedSides sides,
                                                   const ConnectOptions& options) {
  REFITD_ASSIGN_OR_RETURN(std::unique_ptr<TwoSided> memory,
                          OpenTwoSided(std::move(sides), options));
  return std::shared_ptr<Arena>(new Arena(std::move(memory), OnDevice(options.device)));
}

}  // namespace refitd::client
