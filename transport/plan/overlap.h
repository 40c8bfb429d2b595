// Whether members' memory overlaps where the moves of a refit, or of a bucket, would spoil it
// (P11): a destination that shares bytes with a source, or with another destination, changes that
// when it is written. Only the very same elements at the very same places may share memory: writing
// them changes nothing.
//
// Members bring memory as regions, each of which this daemon maps for itself, so that origins, and
// not addresses, show whether two regions are one memory.
//
// Pure; values, thread-safe as such.
#ifndef REFITD_TRANSPORT_PLAN_OVERLAP_H_
#define REFITD_TRANSPORT_PLAN_OVERLAP_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "transport/base/ids.h"
#include "transport/plan/layout.h"

namespace refitd {

// Which memory a region is, whoever maps it and however often.
struct MemoryOrigin {
  enum class Kind : uint8_t {
    kPrivate,   // the daemon's own memory: slots, and bytes that came with requests
    kFile,      // a memfd, by device and inode
    kBlock,     // a block of device memory that a handle names, by its address in this process
    kExported,  // device memory that a process exported, by that process and its address there
    kUnknown,   // exported device memory that may be the memory of any other export
  };
  Kind kind = Kind::kPrivate;
  uint64_t space = 0;   // file: the device; exported or unknown: the number of the GPU
  uint64_t object = 0;  // file: the inode; block: the address; exported: the process
  int64_t begin = 0;    // of the region, in bytes from the object's start
};

enum class SameMemory : uint8_t { kNo, kYes, kUnknown };  // kYes: offsets decide
SameMemory Compare(const MemoryOrigin& a, const MemoryOrigin& b);

// The layout of a member of this daemon, and where its regions come from.
struct PlacedLayout {
  std::shared_ptr<const Layout> layout;
  std::map<RegionId, MemoryOrigin> origins;
  std::string label;  // for messages
  bool destination = false;
};

// FAILED_PRECONDITION, naming both tensors and members: a destination shares bytes with a source or
// another destination, other than the same elements at the same places; or this can't be excluded
// within a limit of steps, which layouts of real models don't come near. Regions without a known
// origin, and regions that `origins` lacks, count as sharing nothing. Costs a pass over the
// regions, and a sort of the pieces that lie in memory which several regions share.
absl::Status CheckOverlap(const std::vector<PlacedLayout>& members);

// By member: the regions of sources that may, or may not, be the memory of a destination
// (kUnknown).
std::vector<std::vector<RegionId>> UnknownSources(const std::vector<PlacedLayout>& members);

// The memory of an update's destinations, to look up sources that come without a layout (buckets).
// Immutable. It keeps the layouts alive.
class DestinationPlaces {
 public:
  explicit DestinationPlaces(std::vector<PlacedLayout> destinations);

  // Checks one contiguous run of bytes at `begin` of the origin's object, the first of which is the
  // first byte of `box` of the tensor, stored row-major as in the whole tensor. Errors as of
  // CheckOverlap; `label`: the source's.
  absl::Status Check(const TensorSpec& tensor, const Box& box, const MemoryOrigin& origin,
                     std::string_view label) const;
  // Whether a destination lies in the same object, so that Check could find anything. Fast.
  bool Shares(const MemoryOrigin& origin) const;
  // Whether a destination may, or may not, lie in the same object (kUnknown). Fast.
  bool IsUnknown(const MemoryOrigin& origin) const;

 private:
  std::vector<PlacedLayout> destinations_;
  // One origin for each object that was exported.
  std::vector<MemoryOrigin> exported_;
  // Destinations with a region in the object: (kind, space, object).
  std::map<std::tuple<MemoryOrigin::Kind, uint64_t, uint64_t>, std::vector<uint32_t>> in_object_;
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_OVERLAP_H_
