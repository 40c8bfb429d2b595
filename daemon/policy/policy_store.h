// The policy of the moment. Calls take Current(); a policy that replaces it counts for the calls
// that come from then on, and leases that were given under the earlier policy go on.
#ifndef REFITD_DAEMON_POLICY_POLICY_STORE_H_
#define REFITD_DAEMON_POLICY_POLICY_STORE_H_

#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "daemon/policy/policy.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"

namespace refitd {

// Thread-safe.
class PolicyStore {
 public:
  explicit PolicyStore(std::shared_ptr<const Policy> first) : current_(std::move(first)) {
    REFITD_CHECK(current_ != nullptr);
  }
  // Never null.
  std::shared_ptr<const Policy> Current() const {
    MutexLock lock(&mutex_);
    return current_;
  }
  void Replace(std::shared_ptr<const Policy> next) {
    REFITD_CHECK(next != nullptr);
    MutexLock lock(&mutex_);
    current_ = std::move(next);
  }

 private:
  mutable Mutex mutex_;
  std::shared_ptr<const Policy> current_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace refitd

#endif  // REFITD_DAEMON_POLICY_POLICY_STORE_H_
