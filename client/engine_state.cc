#include "client/engine_state.h"

#include "transport/base/status.h"

namespace refitd::client {

bool EngineState::Running(Version version) const {
  return phase_ != Phase::kIdle && phase_ != Phase::kLost && running_ == version;
}

void EngineState::OnStaged(Version version, UpdateId update) {
  staged_.emplace(version, update);
  processed_ = false;
}

void EngineState::OnPrepare(Version version, UpdateId update) {
  staged_.reset();
  // No outcome of the update before came, so its weights can't count as clean.
  if (phase_ == Phase::kReady || phase_ == Phase::kFailed) settled_ = Weights::kDirty;
  phase_ = Phase::kPrepared;
  running_ = version;
  update_ = update;
}

bool EngineState::OnPart(UpdateId update, PartSeq part) {
  if (!Running(running_) || update != update_) return false;
  return outstanding_.emplace(update, part).second;
}

bool EngineState::OnCommitted(Version version) {
  if (!Running(version) || (phase_ != Phase::kReady && phase_ != Phase::kFailed)) return false;
  settled_ = phase_ == Phase::kReady ? Weights::kClean : Weights::kDirty;
  version_ = version;
  phase_ = Phase::kIdle;
  return true;
}

bool EngineState::OnAborted(Version version, bool dirty) {
  const bool staged = staged_.has_value() && staged_->first == version;
  if (staged) staged_.reset();
  const bool running = Running(version);
  // This holds even if no update runs here: another incarnation of the group makes every instance
  // dirty.
  if (dirty) settled_ = Weights::kDirty;
  if (running) phase_ = Phase::kIdle;
  return running || staged || dirty;
}

void EngineState::OnLost() {
  if (phase_ == Phase::kReady || phase_ == Phase::kFailed) settled_ = Weights::kUnknown;
  phase_ = Phase::kLost;
  staged_.reset();
}

void EngineState::OnReattached() {
  if (phase_ == Phase::kLost) phase_ = Phase::kIdle;
}

absl::Status EngineState::CheckReady(Version version) const {
  if (Running(version) && phase_ == Phase::kPrepared) return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition,
               "Ready({}): no Prepare of this version is unanswered", version);
}

absl::Status EngineState::Ready(Version version) {
  REFITD_RETURN_IF_ERROR(CheckReady(version));
  phase_ = Phase::kReady;
  std::erase_if(outstanding_, [this](const auto& part) { return part.first != update_; });
  return absl::OkStatus();
}

absl::StatusOr<Version> EngineState::Processed(UpdateId update) {
  if (staged_.has_value() && staged_->second == update && !std::exchange(processed_, true)) {
    return staged_->first;
  }
  return absl::FailedPreconditionError("Processed: no Staged of this update is unanswered");
}

absl::Status EngineState::Ack(UpdateId update, PartSeq part) {
  if (outstanding_.erase({update, part}) == 1) return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition,
               "Ack of update {}, part {}: it is not outstanding", update, part);
}

absl::Status EngineState::Fail(Version version) {
  if (!Running(version) || failed()) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "Fail({}): no update of this version runs here, or it was given up already",
                 version);
  }
  phase_ = phase_ == Phase::kReady ? Phase::kFailed : Phase::kRefused;
  return absl::OkStatus();
}

Weights EngineState::weights() const {
  return phase_ == Phase::kIdle || phase_ == Phase::kLost ? settled_ : Weights::kPaused;
}

std::optional<Version> EngineState::version() const {
  return weights() == Weights::kClean ? version_ : std::nullopt;
}

}  // namespace refitd::client
