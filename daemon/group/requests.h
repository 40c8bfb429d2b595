// The calls of trainer ranks, and of operators that wait for an update's end, by request id: a
// repeated call has no second effect and gets the first answer (P3).
//
// A call that was refused changed nothing and is forgotten, so that its id may be used again. The
// last kRememberedRequests finished requests of a member are kept; unfinished requests are kept
// until they end. Not thread-safe.
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
#include "daemon/group/outbox.h"

namespace refitd::group {

enum class CallKind : uint8_t { kBegin, kBucket, kCommit, kRefit, kAbort, kRollback };

// What a request asks for. A repeat must ask for the same.
struct Asked {
  CallKind kind = CallKind::kBegin;
  Version version{};
  int64_t buckets = 0;  // kBucket: its seq; kCommit, kRefit: how many came before
  bool operator==(const Asked&) const = default;
};

// One request and the calls that wait for its answer: the first call and its repeats.
struct Request : Asked {
  MemberId member;
  std::string id;  // empty: the call can't be repeated
  CallId first_call;
  std::vector<CallId> calls;
  bool finished = false;
  absl::Status status;
  ReplyPayload payload;
};

class Requests {
 public:
  using ByCall = std::map<CallId, std::shared_ptr<Request>>;

  explicit Requests(Outbox* out) : out_(*out) {}

  // Whether the call repeats a request. If so, the call was answered, or waits with the first call.
  bool Repeated(MemberId member, const Asked& what, const std::string& id, CallId call);
  std::shared_ptr<Request> Track(MemberId member, const Asked& what, const std::string& id,
                                 CallId call);
  // Answers all calls of the request.
  void Finish(const std::shared_ptr<Request>& request, absl::Status status, ReplyPayload payload);
  // The caller went away: the call is answered with `why`, and its request, which goes on, is
  // returned. Null: a bucket's answer waits for the last read of its source all the same (P6).
  std::shared_ptr<const Request> Leave(CallId call, absl::Status why);
  // The member's record is gone.
  void Forget(MemberId member) { logs_.erase(member); }
  // A trainer rank has called, or was answered.
  void NoteCall() { last_call_ = out_.now(); }

  TimePoint last_call() const { return last_call_; }
  const ByCall& waiting() const { return waiting_; }        // unanswered calls
  const ByCall& unfinished() const { return unfinished_; }  // requests, by their first call
  void CheckInvariants() const;

 private:
  friend struct refitd::GroupForTests;

  // The requests of one member that have an id.
  struct Log {
    std::map<std::string, std::shared_ptr<Request>> requests;
    std::deque<std::string> finished;  // oldest first
  };
  void Remember(const Request& request);

  Outbox& out_;
  std::map<MemberId, Log> logs_;
  ByCall waiting_;
  ByCall unfinished_;
  TimePoint last_call_;
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_REQUESTS_H_
