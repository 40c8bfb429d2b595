// Turns a group's StartTransfer and StartVerify into jobs of a transport: plans the moves, finds
// the memory, keeps the digests that a read-back compares with.
//
// Keeps P6: every job holds the mappings it touches. P1: the expected digests come from passes over
// the sources, by piece. Not thread-safe: belongs to the node's mutex. Jobs' `done` run on the
// transport's threads.
#ifndef REFITD_DAEMON_EXECUTOR_H_
#define REFITD_DAEMON_EXECUTOR_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/group/group.h"
#include "daemon/wire.h"
#include "transport/transport.h"

namespace refitd {

// Memory by name, from whoever owns the mappings. An error is our own bug or a member that
// vanished: the transfer fails.
class MemoryResolver {
 public:
  virtual ~MemoryResolver() = default;
  virtual absl::StatusOr<MemorySpan> Region(MemberId member, RegionId region) const = 0;
  virtual absl::StatusOr<MemorySpan> Slot(SlotIndex slot) const = 0;
};

class Executor {
 public:
  // `transport` must outlive the executor.
  explicit Executor(Transport* transport) : transport_(transport) {}

  // What came of one transfer. Give it to Finished() under the node's mutex, then to the group as
  // TransferDone.
  struct Done {
    UpdateId update;
    PartSeq part;
    absl::Status status;
    std::vector<int64_t> bytes_written;
    int failed_destination = -1;
    std::vector<uint64_t> source_digests;  // by range of the content, if they were wanted
    // For Finished(): digests by (destination, piece of its layout).
    struct Sum {
      uint32_t destination;
      uint32_t piece;
      uint64_t digest;
    };
    std::vector<Sum> sums;
  };

  // `bucket` is what start.bucket_call brought, or SlotBucket(start). Not OK: no job was started,
  // and `done` is not called.
  absl::Status Start(const StartTransfer& start, const CheckedBucket& bucket,
                     const MemoryResolver& memory, std::function<void(Done)> done);
  // The bucket of a part that another daemon sent: its bytes lie in start.source_slot as its
  // content says.
  static CheckedBucket SlotBucket(const StartTransfer& start);
  // Adds the transfer's digests to its update's.
  void Finished(const Done& done);

  // Reads again what the update wrote. Not OK: no job was started, and `done` is not called.
  absl::Status Start(const StartVerify& verify, const MemoryResolver& memory,
                     std::function<void(VerifyDone)> done);

  // The update ended: its digests are dropped.
  void Forget(UpdateId update) { sums_.erase(update); }

 private:
  // sums[destination][piece]: absent until the piece was written; a destination's vector is empty
  // until any was.
  using UpdateSums = std::vector<std::vector<std::optional<uint64_t>>>;

  Transport* const transport_;
  std::map<UpdateId, UpdateSums> sums_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_EXECUTOR_H_
