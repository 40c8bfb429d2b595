// The reports of the node to its counters; metrics.h implements the interface.
//
// Thread contract: the node calls it from any thread, under its own mutex, so an implementation
// must be thread-safe, return at once and never call the node.
#ifndef REFITD_DAEMON_PROCESS_OBSERVER_H_
#define REFITD_DAEMON_PROCESS_OBSERVER_H_

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "transport/base/ids.h"

namespace refitd {

// Classes of reasons why an update failed. Metrics have one series for each class, so the set is
// fixed and small (P10). The update's own reason has the words for people.
inline constexpr std::string_view kReasonNone = "";                      // committed
inline constexpr std::string_view kReasonDeadline = "deadline";          // a wait ran out
inline constexpr std::string_view kReasonMemberLost = "member_lost";     // a rank was lost
inline constexpr std::string_view kReasonPeerLost = "peer_lost";         // a daemon was lost
inline constexpr std::string_view kReasonVerification = "verification";  // digests differ
inline constexpr std::string_view kReasonAborted = "aborted";            // a member said so
inline constexpr std::string_view kReasonOperator = "operator";          // AbortUpdate
inline constexpr std::string_view kReasonTransfer = "transfer";          // moving bytes failed
inline constexpr std::string_view kReasonSlow = "slow";                  // peers.relay_slow_ms
inline constexpr std::string_view kReasonDrain = "drain";                // the daemon ends
inline constexpr std::string_view kReasonOther = "other";                // none of these
inline constexpr std::array kUpdateReasons = {
    kReasonNone,         kReasonDeadline, kReasonMemberLost, kReasonPeerLost,
    kReasonVerification, kReasonAborted,  kReasonOperator,   kReasonTransfer,
    kReasonSlow,         kReasonDrain,    kReasonOther};

// The methods by which buckets moved (transport/transport.h); metrics have one series for each.
inline constexpr std::array<std::string_view, 4> kPushMethods = {"direct", "chain", "symmetric",
                                                                 "nccl"};

// An update that has ended. A phase that was not reached took no time.
struct UpdateReport {
  std::string group;
  bool committed = false;
  std::string_view reason;  // one of kUpdateReasons; others count as kReasonOther
  Duration prepare{};       // Begin to every rank ready
  Duration data{};          // from there to the last Commit
  Duration verify{};        // from there to every digest compared
  Duration process{};       // from there to the flips, with shadowed instances
  Duration flip{};          // from there to the outcome
  Duration total{};         // Begin to the outcome
  int64_t bytes = 0;        // tensor data handed over
  bool rollback = false;    // it was a rollback
  std::array<int64_t, kPushMethods.size()> pushed_bytes{};  // of `bytes`, by kPushMethods
};

// How a catch-up ended: its late instances have the version; it gave way to an update or a drain,
// or its source instances changed; it failed.
enum class CatchUpEnd { kCommitted, kGaveWay, kFailed };

// An instance's flip in an update, a rollback or a catch-up ended so.
enum class FlipEnd { kNone, kCommitted, kBack };

// The moves of a transport (docs/architecture.md).
enum class MoveKind { kCopy, kBroadcast, kExchange };

class DaemonObserver {
 public:
  virtual ~DaemonObserver() = default;
  virtual void UpdateEnded(const UpdateReport& report) = 0;
  // A catch-up of late instances ended. `bytes`: how many it wrote into them, if it was committed.
  // `took`: the time from its start to its outcome.
  virtual void CatchUpEnded(const std::string& group, CatchUpEnd end, int64_t bytes,
                            Duration took) = 0;
  // An instance that was asked to pause was sent the outcome. `pause`: InstanceOutcome::pause.
  virtual void InstanceReleased(const std::string& group, const std::string& instance,
                                Duration pause, FlipEnd flip) = 0;
  virtual void BytesMoved(const std::string& group, MoveKind kind, int64_t bytes) = 0;
  // The bytes that were written differ from the bytes that were sent.
  virtual void IntegrityFailure(const std::string& group) = 0;
  // An instance was evicted from an update that went on. `reason`: one of kUpdateReasons; others
  // count as kReasonOther.
  virtual void InstanceEvicted(const std::string& group, std::string_view reason) = 0;
  // A rank took up kept arenas and registered its layout. `unchanged`: it holds their version; else
  // it holds none.
  virtual void Restored(const std::string& group, bool unchanged) = 0;
  // The group was deleted: its counters are dropped.
  virtual void GroupGone(const std::string& group) = 0;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_PROCESS_OBSERVER_H_
