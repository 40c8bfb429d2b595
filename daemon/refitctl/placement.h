// Places whole tensors in as few regions of memory as a limit on a region's size allows; the result
// is the layout of a rank that holds them all.
//
// Pure; thread-safe.
#ifndef REFITD_DAEMON_REFITCTL_PLACEMENT_H_
#define REFITD_DAEMON_REFITCTL_PLACEMENT_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "transport/plan/layout.h"

namespace refitd {

struct Placement {
  struct Place {
    size_t region = 0;
    int64_t byte_offset = 0;  // a multiple of kPackAlignment
    int64_t bytes = 0;
  };
  std::vector<int64_t> region_bytes;  // each at least kPackAlignment
  std::vector<Place> places;          // one for each tensor, in order
};

// Regions have at most `region_bytes`, except for a single tensor that is larger.
Placement PlaceWhole(const std::vector<TensorSpec>& tensors, int64_t region_bytes);

// `regions[i]` is the id of the placement's region i.
Layout LayoutOf(const std::vector<TensorSpec>& tensors, const Placement& placement,
                const std::vector<RegionId>& regions);

}  // namespace refitd

#endif  // REFITD_DAEMON_REFITCTL_PLACEMENT_H_
