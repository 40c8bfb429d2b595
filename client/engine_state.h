// The state of an engine rank's weights, and the answers that the rank may give in it: pure.
//
//   phase      event or answer        next phase     weights afterwards
//   Idle       Staged(v)              Idle           unchanged; Processed is due until Prepare,
//                                                    Aborted or the lease's end
//   Idle       Prepare(v)             Prepared       kPaused
//   Prepared   Ready(v)               Ready          kPaused
//   Prepared   Fail(v)                Refused        kPaused
//   Ready      Part(v, p)             Ready          kPaused; p is outstanding
//   Ready      Fail(v)                Failed         kPaused
//   Ready      Committed(v)           Idle           kClean, version v
//   Failed     Committed(v)           Idle           kDirty: Fail(v) came too late to stop the
//                                                    commit, and this rank does not have v
//   any but Idle  Aborted(v, dirty)   Idle           kDirty if dirty, else as before Prepare; so in
//                                                    Idle after Staged(v)
//   Prepared, Refused  lease lost     Lost           as before Prepare: nothing is written before
//                                                    Ready
//   Ready, Failed      lease lost     Lost           kUnknown until a commit (P2: the outcome is
//                                                    never guessed)
//   Idle               lease lost     Lost           unchanged
//   Lost               attached again Idle           unchanged: the daemon is told a held version
//                                                    only if the weights are kClean, else dirty
// A rank starts in Idle: kClean, or kDirty if it attached as dirty, which only a commit ends.
// Outstanding parts outlive the update: the daemon gets their slots back only when they are
// acknowledged.
//
// Not thread-safe.
#ifndef REFITD_CLIENT_ENGINE_STATE_H_
#define REFITD_CLIENT_ENGINE_STATE_H_

#include <optional>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/engine.h"

namespace refitd::client {

class EngineState {
 public:
  // The state of a rank that attached with these values: `held` is the version that its memory
  // holds; `dirty` says that the memory holds no whole version, or that nobody knows (then there is
  // no `held`).
  explicit EngineState(std::optional<Version> held, bool dirty = false)
      : settled_(dirty ? Weights::kDirty : Weights::kClean), version_(held) {}

  // Events. False: the event does not belong to the running update, and changed nothing.
  void OnStaged(Version version, UpdateId update);
  void OnPrepare(Version version, UpdateId update);
  bool OnPart(UpdateId update, PartSeq part);
  bool OnCommitted(Version version);  // weights() tells whether this rank has it
  bool OnAborted(Version version, bool dirty);
  // The memory holds no whole version, whatever the daemon says: until a commit.
  void OnBroken() { settled_ = Weights::kDirty; }
  // The daemon found this version in the memory. False, and nothing changes: the weights are not
  // clean, or have a version.
  bool OnRestored(Version version) {
    if (settled_ != Weights::kClean || version_.has_value()) return false;
    version_ = version;
    return true;
  }
  void OnLost();
  void OnReattached();

  // Answers. FAILED_PRECONDITION if the answer is not due; nothing is changed then.
  absl::StatusOr<Version> Processed(UpdateId update);  // returns the version that it answers
  absl::Status Ready(Version version);
  absl::Status CheckReady(Version version) const;  // whether Ready would be accepted
  // Ready ends the parts of earlier updates: they are no longer outstanding.
  absl::Status Ack(UpdateId update, PartSeq part);
  absl::Status Fail(Version version);

  // True if this rank gave the running update up; its parts are then of no use.
  bool failed() const { return phase_ == Phase::kRefused || phase_ == Phase::kFailed; }
  // The update id of the last Prepare.
  UpdateId update() const { return update_; }
  bool has_outstanding() const { return !outstanding_.empty(); }
  // Whether the memory held a whole version before the running update.
  bool was_clean() const { return settled_ == Weights::kClean; }
  Weights weights() const;
  std::optional<Version> version() const;

 private:
  enum class Phase : uint8_t { kIdle, kPrepared, kRefused, kReady, kFailed, kLost };
  bool Running(Version version) const;

  Phase phase_ = Phase::kIdle;
  Version running_;  // has no meaning in kIdle and kLost
  UpdateId update_;
  std::optional<std::pair<Version, UpdateId>> staged_;  // whose outcome or Prepare has not come
  bool processed_ = false;                              // `staged_` was answered
  Weights settled_;                 // the weights outside of an update: kClean, kDirty, kUnknown
  std::optional<Version> version_;  // of the weights, if they are kClean
  std::set<std::pair<UpdateId, PartSeq>> outstanding_;
};

}  // namespace refitd::client

#endif  // REFITD_CLIENT_ENGINE_STATE_H_
