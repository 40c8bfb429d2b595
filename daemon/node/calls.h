// Every unanswered call of members, of operators and of this daemon itself. A bucket or layout that
// came with a call is kept with it until the answer.
//
// Invariants
//  1. A call is answered once: Take removes it, and a second Take finds nothing.
//  2. At most kMaxCalls calls wait for a machine's answer, and at most kMaxOpening calls for
//     memory.
//  3. A bucket's regions stay while its call is unanswered: IsSource says which are in use (P6).
//
// The class is part of the daemon's state and is used under the state lock (state_lock.h).
#ifndef REFITD_DAEMON_NODE_CALLS_H_
#define REFITD_DAEMON_NODE_CALLS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/execute/compare_sides.h"
#include "daemon/group/bucket.h"
#include "daemon/group/group.h"
#include "transport/base/ids.h"
#include "transport/plan/layout.h"

namespace refitd {

// Runs once, on any thread, never under the daemon's mutex.
using ReplyFunction = std::function<void(absl::Status, const ReplyPayload&)>;

class Calls {
 public:
  static constexpr size_t kMaxCalls = 65'536;  // of all members
  // The most calls of all members that wait for memory: RegisterRegion, PushBucket with handles,
  // Begin and LeaseSlot on a GPU, and RegisterLayout of what must be read before.
  static constexpr size_t kMaxOpening = 4096;

  // A layout that its group's coordinator has not answered yet.
  struct PendingLayout {
    MemberId member;
    std::shared_ptr<const Layout> layout;
    uint64_t digest = 0;                // of its structure
    std::optional<uint64_t> content{};  // LayoutRegistered::content; nullopt: not read
    OutsideBytes outside{};             // MemberRecord::outside_bytes
  };
  struct Call {
    std::string group;
    ReplyFunction reply;
    std::shared_ptr<const CheckedBucket> bucket{};
    std::optional<PendingLayout> layout{};
  };

  // RESOURCE_EXHAUSTED: kMaxCalls calls are unanswered.
  absl::Status Admit() const;
  void Add(CallId id, Call call);
  // Removes the call and returns it without its bucket, for the caller to answer; nullopt: it was
  // answered before.
  std::optional<Call> Take(CallId id);
  size_t size() const { return calls_.size(); }

  // The call's group. Null: the call is answered.
  const std::string* GroupOf(CallId id) const;
  // Whether the call came with a bucket and is not answered yet.
  bool HasBucket(CallId id) const { return buckets_.contains(id); }
  // Layouts of the member that are not answered yet.
  std::vector<std::shared_ptr<const Layout>> LayoutsOf(MemberId member) const;
  // Whether the region is the source of an unanswered bucket.
  bool IsSource(RegionId region) const;

  // ---- calls that wait for memory, before their event enters the group ----
  // RESOURCE_EXHAUSTED: `max_of_member` calls of the member wait already, or kMaxOpening of all.
  absl::Status BeginOpening(CallId id, MemberId member, int64_t max_of_member);
  // The member whose call waits. CANCELLED: the caller has left.
  absl::StatusOr<MemberId> OpeningOf(CallId id) const;
  // Ends the call's wait. CANCELLED: the caller left meanwhile.
  absl::Status EndOpening(CallId id);
  // Notes that the caller has left, if the call waits for memory.
  void NoteCallerLeft(CallId id);

  // Aborts the process if an invariant does not hold.
  void CheckInvariants() const;

 private:
  struct Opening {
    MemberId member;
    bool caller_left = false;
  };

  struct Waiting {
    std::string group;
    ReplyFunction reply;
  };

  std::map<CallId, Waiting> calls_;
  // The buckets and layouts that came with some of calls_.
  std::map<CallId, std::shared_ptr<const CheckedBucket>> buckets_;
  std::map<CallId, PendingLayout> layouts_;
  std::map<CallId, Opening> opening_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_CALLS_H_
