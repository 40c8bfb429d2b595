// Compares the two sides of arenas where no piece of a layout lies. Versions do not write there, so
// what differs there would change with each flip, unseen by verification (P11).
//
// Pure but for the transport, which reads the memory; functions are thread-safe.
#ifndef REFITD_DAEMON_EXECUTE_COMPARE_SIDES_H_
#define REFITD_DAEMON_EXECUTE_COMPARE_SIDES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "transport/base/unique_fd.h"
#include "transport/plan/layout.h"
#include "transport/transport.h"

namespace refitd {

struct ByteRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool operator==(const ByteRange&) const = default;
};

// The most runs of bytes that a layout's pieces are divided into. Of pieces beyond, what lies
// between their rows counts as named.
inline constexpr int64_t kMaxNamedRuns = 1 << 20;

// By entry of Layout::backs: the bytes of the region that no piece names, ascending, as few ranges
// as there can be. Null: none.
using OutsideBytes = std::shared_ptr<const std::vector<std::vector<ByteRange>>>;
// The layout must be valid; `region_bytes` gives the size of its regions.
OutsideBytes BytesOutside(const Layout& layout,
                          const std::function<std::optional<int64_t>(RegionId)>& region_bytes);

// The memory that they take.
int64_t BytesOf(const OutsideBytes& outside);

// Both sides of an arena, of equal size, and what is to be compared.
struct ComparedSides {
  RegionBack pair;
  MemorySpan front;
  MemorySpan back;
  // The sides' memfds, whose holes are zeros; null: the memory has no holes.
  std::shared_ptr<const UniqueFd> front_file;
  std::shared_ptr<const UniqueFd> back_file;
  std::vector<ByteRange> ranges;
};

inline constexpr size_t kComparedChunks = 4096;  // that are read at a time

// Reads both sides, kComparedChunks chunks at a time, and calls `done` once, on a thread of the
// transport, or on this one if there is nothing to read. FAILED_PRECONDITION names the first bytes
// that differ, within 64 KiB, and `label`, whose memory it is. P6: the job holds the memory. P10:
// holes of memfds are not read, since the pages that this makes would be charged to the daemon.
void CompareSides(Transport* transport, std::vector<ComparedSides> sides, const std::string& label,
                  std::function<void(absl::Status)> done);

}  // namespace refitd

#endif  // REFITD_DAEMON_EXECUTE_COMPARE_SIDES_H_
