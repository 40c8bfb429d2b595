// Members' host memory, mapped. Address space is finite, and memfds may be sparse: without a limit,
// regions of terabytes that cost their owner nothing leave the daemon no address for anything else.
//
// Invariants
//  1. The bytes that are mapped at a time, of all members and of one identity, stay within their
//     limits (ByteLedger), and one region within the machine's memory (P10).
//  2. A memfd is mapped once for reading and once for writing, however many regions it is: a
//  mapping
//     that covers a region is shared, and counted once, for whoever brought it first.
//
// Thread-safe; called without the daemon's mutex. Mappings may outlive the object.
#ifndef REFITD_DAEMON_NODE_HOST_MAPPINGS_H_
#define REFITD_DAEMON_NODE_HOST_MAPPINGS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "daemon/policy/byte_ledger.h"
#include "transport/base/mutex.h"
#include "transport/base/unique_fd.h"
#include "transport/host/memory.h"
#include "transport/transport.h"

namespace refitd {

class HostMappings {
 public:
  // `region_bytes`: the limit of one region. `mapped`: what is mapped, counted.
  HostMappings(int64_t region_bytes, ByteLedger* mapped)
      : region_bytes_(region_bytes), mapped_(*mapped) {}

  // Which memfd it is: two descriptors of one memfd give the same.
  static absl::StatusOr<MemoryOrigin> OriginOf(const UniqueFd& fd);

  // Maps the first `bytes` of the memfd, or shares a mapping of it. `origin`: OriginOf(fd). Errors:
  // as of HostRegion::Map; RESOURCE_EXHAUSTED: a limit.
  absl::StatusOr<MemorySpan> Map(const UniqueFd& fd, const MemoryOrigin& origin, int64_t bytes,
                                 Access access, const std::string& identity);

 private:
  // A mapping, counted while it lives.
  struct Mapping {
    ByteLedger::Hold hold;
    std::shared_ptr<const HostRegion> region;
  };
  using Key = std::tuple<uint64_t, uint64_t, Access>;  // device, inode

  std::shared_ptr<const Mapping> Find(const Key& key, int64_t bytes);
  void Keep(const Key& key, const std::shared_ptr<const Mapping>& mapping);

  const int64_t region_bytes_;
  ByteLedger& mapped_;

  Mutex mutex_;
  // The largest mapping of each memfd; some have ended.
  std::map<Key, std::weak_ptr<const Mapping>> mappings_ ABSL_GUARDED_BY(mutex_);
  size_t sweep_at_ ABSL_GUARDED_BY(mutex_) = 64;  // the size from which ended ones are dropped
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_HOST_MAPPINGS_H_
