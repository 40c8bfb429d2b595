#include "daemon/refitctl/placement.h"

#include <algorithm>

namespace refitd {

Placement PlaceWhole(const std::vector<TensorSpec>& tensors, int64_t region_bytes) {
  Placement placement;
  for (const TensorSpec& tensor : tensors) {
    int64_t bytes = ElementBytes(tensor.dtype);
    for (const int64_t dim : tensor.shape) bytes *= dim;
    const int64_t room = std::max(AlignUp(bytes), kPackAlignment);
    if (placement.region_bytes.empty() || room > region_bytes - placement.region_bytes.back()) {
      placement.region_bytes.push_back(0);
    }
    int64_t& end = placement.region_bytes.back();
    placement.places.push_back({placement.region_bytes.size() - 1, end, bytes});
    end += room;
  }
  return placement;
}

Layout LayoutOf(const std::vector<TensorSpec>& tensors, const Placement& placement,
                const std::vector<RegionId>& regions) {
  Layout layout;
  layout.tensors = tensors;
  for (uint32_t t = 0; t < tensors.size(); ++t) {
    const Placement::Place& place = placement.places[t];
    layout.pieces.push_back({t, WholeBox(tensors[t].shape), regions[place.region],
                             place.byte_offset, RowMajorStrides(tensors[t].shape)});
  }
  return layout;
}

}  // namespace refitd
