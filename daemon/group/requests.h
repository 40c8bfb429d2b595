// A member's calls by request id: a repeated call has no second effect and gets the first answer
// (P3).
//
// A call that was refused changed nothing and is forgotten, so that its id may be used again. The
// last kRememberedRequests finished requests of a member are kept; pending requests are kept until
// they end. Not thread-safe: a log lives inside its group.
#ifndef REFITD_DAEMON_GROUP_REQUESTS_H_
#define REFITD_DAEMON_GROUP_REQUESTS_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/group/group.h"

namespace refitd::group {

enum class CallKind : uint8_t { kBegin, kBucket, kCommit, kRefit, kAbort };

// One request and the calls that wait for its answer: the first call and its repeats.
struct Request {
  CallKind kind = CallKind::kBegin;
  MemberId member;
  std::string id;    // empty: the call can't be repeated
  std::string what;  // "begin of version 3": a repeat must say the same
  CallId first_call;
  std::vector<CallId> calls;
  bool finished = false;
  absl::Status status;
  ReplyPayload payload;
};

// Whether a call that ended with this status had no effect.
bool IsRefusal(const absl::Status& status);

class RequestLog {
 public:
  // The request of that id. Null: the id is empty, was never seen, or was forgotten.
  std::shared_ptr<Request> Find(const std::string& id) const;
  void Add(const std::shared_ptr<Request>& request);
  // The request, which was added before, has ended: it is remembered or, after a refusal,
  // forgotten.
  void Finished(const Request& request);
  size_t size() const { return requests_.size(); }

 private:
  std::map<std::string, std::shared_ptr<Request>> requests_;
  std::deque<std::string> finished_;  // oldest first
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_REQUESTS_H_
