// One unary call over gRPC's callback API, with a deadline (P4) and an absl::Status.
//
// A call owns its context, request and response until its callback ran, so the object that started
// it may be destroyed earlier. Thread contract: `done` runs once, on a gRPC thread, without any
// lock of this library held.
#ifndef REFITD_CLIENT_CALL_H_
#define REFITD_CLIENT_CALL_H_

#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "client/watch.h"
#include "proto/grpc_status.h"
#include "transport/base/ids.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"
#include "transport/base/utf8.h"

namespace refitd::client {

// The time limit of clean-up calls (Abort, ReleaseSlot, detach).
inline constexpr std::chrono::milliseconds kCleanupLimit{1'000};
// No wait is longer than this, whatever a caller asks for, so that time arithmetic can't overflow.
inline constexpr std::chrono::hours kLongestWait{24 * 365};

// Waits that a stop request must end are cut into pieces of this length.
inline constexpr std::chrono::milliseconds kStopPoll{50};

// The moment `wait` from now; `wait` is clamped to [0, kLongestWait].
inline TimePoint After(Duration wait) {
  return std::chrono::steady_clock::now() +
         std::clamp<Duration>(wait, Duration::zero(), kLongestWait);
}

// The end of the next piece of a wait until `deadline`, if `stop` must be noticed meanwhile.
inline TimePoint PieceOf(TimePoint deadline, const std::stop_token& stop) {
  return stop.stop_possible() ? std::min(deadline, After(kStopPoll)) : deadline;
}

inline Duration Until(TimePoint deadline) {
  return std::max<Duration>(deadline - std::chrono::steady_clock::now(), Duration::zero());
}

template <typename Stub, typename Request, typename Response>
using UnaryMethod = void (Stub::*)(grpc::ClientContext*, const Request*, Response*,
                                   std::function<void(grpc::Status)>);

// Starts a call; the returned context can cancel it.
template <typename Stub, typename Request, typename Response>
std::shared_ptr<grpc::ClientContext> StartCall(
    Stub* stub, UnaryMethod<Stub, Request, Response> method, Request request, TimePoint deadline,
    std::function<void(const absl::Status&, const Response&)> done) {
  struct Call {
    grpc::ClientContext context;
    Request request;
    Response response;
  };
  auto call = std::make_shared<Call>();
  call->request = std::move(request);
  call->context.set_deadline(
      std::chrono::system_clock::now() +
      std::chrono::duration_cast<std::chrono::microseconds>(Until(deadline)));
  (stub->*method)(&call->context, &call->request, &call->response,
                  [call, done = std::move(done)](const grpc::Status& status) noexcept {
                    done(FromGrpc(status), call->response);
                  });
  return {call, &call->context};
}

// Starts a call and waits for the answer on this thread. `what` names the call in the error if no
// answer comes.
template <typename Stub, typename Request, typename Response>
absl::StatusOr<Response> CallAndWait(Stub* stub, UnaryMethod<Stub, Request, Response> method,
                                     Request request, TimePoint deadline, std::string_view what) {
  struct Answer {
    Mutex mutex;
    CondVar cond;
    bool done ABSL_GUARDED_BY(mutex) = false;
    absl::Status status ABSL_GUARDED_BY(mutex);
    Response response ABSL_GUARDED_BY(mutex);
  };
  auto answer = std::make_shared<Answer>();
  auto context = StartCall<Stub, Request, Response>(
      stub, method, std::move(request), deadline,
      [answer](const absl::Status& status, const Response& response) {
        {
          MutexLock lock(&answer->mutex);
          answer->status = status;
          answer->response = response;
          answer->done = true;
        }
        // After unlocking, so that the waiting thread finds the mutex free.
        answer->cond.NotifyAll();
      });
  // gRPC itself keeps the deadline; the limit on top is for a gRPC that does not.
  const TimePoint limit = deadline + kCleanupLimit;
  MutexLock lock(&answer->mutex);
  while (!answer->done) {
    if (WaitWatched(&answer->cond, &answer->mutex, limit) || answer->done) continue;
    context->TryCancel();
    return Error(absl::StatusCode::kDeadlineExceeded, "{}: no answer from the daemon", what);
  }
  if (!answer->status.ok()) return answer->status;
  return std::move(answer->response);
}

// Puts `what` and the daemon's socket before the message of UNAVAILABLE and DEADLINE_EXCEEDED,
// because gRPC's own words for a daemon that is gone or silent name nobody, and makes the daemon a
// suspect if the status has none. Other statuses stay as they are, and so does a DEADLINE_EXCEEDED
// that carries a failure: the daemon answered, and waited for others.
absl::Status NameDaemon(std::string_view what, std::string_view socket, const absl::Status& status);

// The status with the daemon at that socket or address as its suspect, if it has none.
absl::Status SuspectDaemon(absl::Status status, std::string_view socket);

}  // namespace refitd::client

#endif  // REFITD_CLIENT_CALL_H_
