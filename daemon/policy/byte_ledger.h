// Counts the bytes that identities hold at this daemon, of one kind: mapped memory, say. What would
// go beyond the limit of all, or of one identity, is refused before it is allocated (P10).
//
// Thread-safe. Holds may outlive the ledger.
#ifndef REFITD_DAEMON_POLICY_BYTE_LEDGER_H_
#define REFITD_DAEMON_POLICY_BYTE_LEDGER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/policy/quota.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"

namespace refitd {

class ByteLedger {
  struct State;

 public:
  // `setting`: the limits' name, as in limits.NAME and limits.per_identity.NAME. `all`: the limit
  // of all identities together. `of_identity`: of each; 0: there is none.
  ByteLedger(std::string setting, int64_t all, int64_t of_identity)
      : state_(std::make_shared<State>(std::move(setting), all, of_identity)) {}

  // Bytes that are counted until it is destroyed.
  class Hold {
   public:
    Hold() = default;
    Hold(Hold&& other) noexcept
        : state_(std::move(other.state_)),
          identity_(std::move(other.identity_)),
          bytes_(std::exchange(other.bytes_, 0)) {}
    Hold& operator=(Hold&& other) noexcept {
      std::swap(state_, other.state_);
      std::swap(identity_, other.identity_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Hold() {
      if (bytes_ > 0) state_->GiveBack(identity_, bytes_);
    }
    // Makes it hold at least `bytes`. RESOURCE_EXHAUSTED: it holds what it held before.
    absl::Status GrowTo(int64_t bytes) {
      if (bytes <= bytes_ || state_ == nullptr) return absl::OkStatus();
      REFITD_RETURN_IF_ERROR(state_->Take(identity_, bytes - bytes_));
      bytes_ = bytes;
      return absl::OkStatus();
    }
    absl::Status GrowBy(int64_t bytes) { return GrowTo(bytes_ + bytes); }

   private:
    friend class ByteLedger;
    std::shared_ptr<ByteLedger::State> state_;
    std::string identity_;
    int64_t bytes_ = 0;
  };

  // Holds nothing yet.
  Hold Empty(const std::string& identity) const {
    Hold hold;
    hold.state_ = state_;
    hold.identity_ = identity;
    return hold;
  }
  // RESOURCE_EXHAUSTED names the setting, the identity and the values.
  absl::StatusOr<Hold> Take(const std::string& identity, int64_t bytes) const {
    Hold hold = Empty(identity);
    REFITD_RETURN_IF_ERROR(hold.GrowTo(bytes));
    return hold;
  }
  // Of all identities.
  int64_t held() const {
    MutexLock lock(&state_->mutex);
    return state_->held;
  }

 private:
  struct State {
    State(std::string name, int64_t most, int64_t share)
        : setting(std::move(name)), all(most), of_identity(share) {}

    absl::Status Take(const std::string& identity, int64_t bytes) {
      MutexLock lock(&mutex);
      const auto it = by_identity.find(identity);
      const int64_t has = it == by_identity.end() ? 0 : it->second;
      REFITD_RETURN_IF_ERROR(CheckQuota(setting, of_identity, has, bytes, identity));
      if (bytes > all - held) {
        return Error(absl::StatusCode::kResourceExhausted,
                     "limits.{}: all identities have {} at this daemon, {} asks for {} more, and "
                     "all may have {}",
                     setting, held, identity, bytes, all);
      }
      held += bytes;
      by_identity[identity] += bytes;
      return absl::OkStatus();
    }
    void GiveBack(const std::string& identity, int64_t bytes) {
      MutexLock lock(&mutex);
      held -= bytes;
      const auto it = by_identity.find(identity);
      it->second -= bytes;
      if (it->second == 0) by_identity.erase(it);
    }

    const std::string setting;
    const int64_t all;
    const int64_t of_identity;
    mutable Mutex mutex;
    int64_t held ABSL_GUARDED_BY(mutex) = 0;
    std::map<std::string, int64_t> by_identity ABSL_GUARDED_BY(mutex);
  };

  const std::shared_ptr<State> state_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_POLICY_BYTE_LEDGER_H_
