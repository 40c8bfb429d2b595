#include "daemon/group/requests.h"

#include <array>
#include <string_view>
#include <utility>

#include "transport/base/errors.h"

namespace refitd::group {
namespace {

// Whether a call that ended with this status had no effect.
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

std::string Describe(const Asked& what) {
  constexpr std::array<std::string_view, 6> kTexts = {"begin of version {0}",
                                                      "bucket {1} of version {0}",
                                                      "commit of {1} buckets of version {0}",
                                                      "refit to version {0} after {1} buckets",
                                                      "abort of version {0}",
                                                      "rollback of version {0}"};  // by CallKind
  return fmt::format(fmt::runtime(kTexts.at(static_cast<size_t>(what.kind))), what.version,
                     what.buckets);
}

}  // namespace

bool Requests::Repeated(MemberId member, const Asked& what, const std::string& id, CallId call) {
  const auto log = logs_.find(member);
  if (log == logs_.end()) return false;
  const auto found = log->second.requests.find(id);
  if (found == log->second.requests.end()) return false;
  const std::shared_ptr<Request>& first = found->second;
  if (static_cast<const Asked&>(*first) != what) {
    out_.Refuse(call,
                InvalidField("request_id", "request_id '{}' was used for {} before, now for {}", id,
                             Describe(*first), Describe(what)));
  } else if (first->finished) {
    out_.Do(Reply{call, first->status, first->payload});
  } else {
    first->calls.push_back(call);
    waiting_[call] = first;
  }
  return true;
}

std::shared_ptr<Request> Requests::Track(MemberId member, const Asked& what, const std::string& id,
                                         CallId call) {
  auto request = std::make_shared<Request>();
  static_cast<Asked&>(*request) = what;
  request->member = member;
  request->id = id;
  request->first_call = call;
  request->calls.push_back(call);
  if (!id.empty()) logs_[member].requests[id] = request;
  waiting_[call] = request;
  unfinished_[call] = request;
  return request;
}

void Requests::Finish(const std::shared_ptr<Request>& request, absl::Status status,
                      ReplyPayload payload) {
  REFITD_CHECK(!request->finished);
  request->finished = true;
  unfinished_.erase(request->first_call);
  request->status = std::move(status);
  request->payload = std::move(payload);
  for (const CallId call : request->calls) {
    waiting_.erase(call);
    out_.Do(Reply{call, request->status, request->payload});
  }
  request->calls.clear();
  Remember(*request);
  NoteCall();
}

void Requests::Remember(const Request& request) {
  const auto log = logs_.find(request.member);
  if (request.id.empty() || log == logs_.end()) return;
  if (IsRefusal(request.status)) {
    log->second.requests.erase(request.id);
    return;
  }
  std::deque<std::string>& finished = log->second.finished;
  finished.push_back(request.id);
  if (finished.size() <= kRememberedRequests) return;
  log->second.requests.erase(finished.front());
  finished.pop_front();
}

std::shared_ptr<const Request> Requests::Leave(CallId call, absl::Status why) {
  const auto waits = waiting_.find(call);
  if (waits->second->kind == CallKind::kBucket) return nullptr;
  std::shared_ptr<Request> request = std::move(waits->second);
  waiting_.erase(waits);
  std::erase(request->calls, call);
  out_.Refuse(call, std::move(why));
  NoteCall();
  return request;
}

// P3, P4: every call waits with one unanswered request, and no log has more than its limit.
void Requests::CheckInvariants() const {
  size_t calls = 0;
  for (const auto& [first, request] : unfinished_) {
    REFITD_CHECK(request->first_call == first && !request->finished);
    for (const CallId call : request->calls) {
      const auto waits = waiting_.find(call);
      REFITD_CHECK(waits != waiting_.end() && waits->second == request);
    }
    calls += request->calls.size();
  }
  REFITD_CHECK(calls == waiting_.size());
  for (const auto& [member, log] : logs_) {
    REFITD_CHECK(log.finished.size() <= kRememberedRequests);
    for (const std::string& id : log.finished) REFITD_CHECK(log.requests.contains(id));
  }
}

}  // namespace refitd::group
