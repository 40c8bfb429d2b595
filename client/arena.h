// An arena: memory of an engine rank with two sides, both known to the daemon as regions. The rank
// reads the one at a constant address, the daemon writes versions into the other.
#ifndef REFITD_CLIENT_ARENA_H_
#define REFITD_CLIENT_ARENA_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "client/connection.h"
#include "client/types.h"
#include "transport/plan/layout.h"
#include "transport/two_sided.h"

namespace refitd::client {

// Flip and CopyToBack are called by one thread at a time.
class Arena final : public Region {
 public:
  // Errors as of MakeTwoSided (slot_memory.h), and of a region.
  static absl::StatusOr<std::shared_ptr<Arena>> Make(int64_t bytes, const ConnectOptions& options,
                                                     const std::shared_ptr<Regions>& regions);

  char* data() const override { return memory_->data(); }
  int64_t bytes() const override { return memory_->bytes(); }
  RegionId id() const override { return front_->id(); }
  RegionBack pair() const { return {front_->id(), back_->id()}; }

  absl::Status CopyToBack() { return memory_->CopyToBack(); }
  // Exchanges the sides. A later daemon is given the side that is mapped as the front; the present
  // daemon exchanges the two itself at the commit (Connection::Exchange). Errors: TwoSided::Flip.
  absl::Status Flip();

 private:
  Arena(std::unique_ptr<TwoSided> memory, std::shared_ptr<Regions> regions,
        std::shared_ptr<Region> front, std::shared_ptr<Region> back)
      : memory_(std::move(memory)),
        regions_(std::move(regions)),
        front_(std::move(front)),
        back_(std::move(back)) {}

  const std::unique_ptr<TwoSided> memory_;
  const std::shared_ptr<Regions> regions_;
  const std::shared_ptr<Region> front_;
  const std::shared_ptr<Region> back_;
};

}  // namespace refitd::client

#endif  // REFITD_CLIENT_ARENA_H_
