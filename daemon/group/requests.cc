#include "daemon/group/requests.h"

namespace refitd::group {

bool IsRefusal(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kUnavailable:
      return true;
    default:
      return false;
  }
}

std::shared_ptr<Request> RequestLog::Find(const std::string& id) const {
  const auto it = requests_.find(id);
  return it == requests_.end() ? nullptr : it->second;
}

void RequestLog::Add(const std::shared_ptr<Request>& request) {
  if (!request->id.empty()) requests_[request->id] = request;
}

void RequestLog::Finished(const Request& request) {
  if (request.id.empty()) return;
  if (IsRefusal(request.status)) {
    requests_.erase(request.id);
    return;
  }
  finished_.push_back(request.id);
  if (finished_.size() <= kRememberedRequests) return;
  requests_.erase(finished_.front());
  finished_.pop_front();
}

}  // namespace refitd::group
