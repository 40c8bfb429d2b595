#include "transport/cuda/lost_context.h"

#include "transport/base/failure.h"

#if defined(REFITD_CUDA)
#include "transport/base/status.h"
#include "transport/cuda/api.h"

namespace refitd {

absl::Status LostContext::Note(const absl::Status& status) {
  if (!IsLost(status)) return status;
  Lose(Error(absl::StatusCode::kInternal, "{}", Message(status)));
  return this->status();
}

void LostContext::Lose(const absl::Status& why) {
  {
    MutexLock lock(&mutex_);
    if (!status_.ok()) return;
    status_ = Prefixed(why, "this process lost the use of its GPUs");
  }
  if (report_) report_(status());
}

absl::Status LostContext::status() const {
  MutexLock lock(&mutex_);
  return status_;
}

}  // namespace refitd

#endif  // REFITD_CUDA
