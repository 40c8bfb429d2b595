// Shared parts of the thin gRPC handlers: statuses, peers, reactors for unary calls and event
// streams.
//
// Threads: code here runs on gRPC's callback threads and on the threads of callers that reply.
// Handlers never block, and none of them knows a group's logic.
//
// Functions that gRPC calls are noexcept: gRPC would swallow an exception of a callback, and a
// state machine left in the middle of an event would serve nobody. So the process ends, and its
// members attach to its successor (P4).
#ifndef REFITD_DAEMON_SERVICES_COMMON_H_
#define REFITD_DAEMON_SERVICES_COMMON_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "daemon/node/daemon.h"
#include "daemon/node/member.h"
#include "daemon/node/member_calls.h"
#include "daemon/node/sinks.h"
#include "daemon/services/authorizer.h"
#include "daemon/services/member_events.h"
#include "daemon/services/member_requests.h"
#include "proto/grpc_status.h"
#include "transport/base/errors.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"

namespace refitd {

// Compiles only if the handlers are noexcept.
template <typename Service, typename Result, typename... Arguments>
constexpr bool IsNoexcept(Result (Service::* /*method*/)(Arguments...) noexcept) {
  return true;
}
template <typename... Methods>
constexpr bool AreNoexcept(Methods... methods) {
  return (IsNoexcept(methods) && ...);
}

// The payload of an OK reply. The group's machine (Follower) has compared other daemons' answers
// with their calls, so a payload of another kind is a bug of this daemon.
template <typename Payload>
const Payload& PayloadAs(const ReplyPayload& payload) {
  const auto* found = std::get_if<Payload>(&payload);
  REFITD_CHECK(found != nullptr);
  return *found;
}

// A unary call that is answered later, by the code that has the reply. Deletes itself.
class PendingCall : public grpc::ServerUnaryReactor {
 public:
  PendingCall(Daemon* daemon, const Authorizer* authorizer, RequestContext request_context,
              Peer peer)
      : daemon_(daemon),
        authorizer_(authorizer),
        request_context_(std::move(request_context)),
        peer_(std::move(peer)),
        id_(daemon->NewCall()) {}
  CallId id() const { return id_; }
  const Peer& peer() const { return peer_; }
  void Answer(const absl::Status& status) {
    authorizer_->AuditAnswer(request_context_, peer_, status);
    Finish(ToGrpc(status));
  }
  void OnDone() noexcept override { delete this; }
  void OnCancel() noexcept override { daemon_->calls().CallGone(id_); }

 private:
  Daemon* const daemon_;
  const Authorizer* const authorizer_;
  const RequestContext request_context_;
  const Peer peer_;
  const CallId id_;
};

// Answers at once with the status.
inline grpc::ServerUnaryReactor* Finish(grpc::CallbackServerContext* context,
                                        const absl::Status& status) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  reactor->Finish(ToGrpc(status));
  return reactor;
}

// Answers later with the daemon's reply: `start(call, peer, reply)` begins the call,
// `fill(payload)` fills the response if the reply is OK.
template <typename Start, typename Fill>
grpc::ServerUnaryReactor* AnswerLater(Daemon* daemon, const Authorizer& authorizer,
                                      grpc::CallbackServerContext* context,
                                      RequestContext request_context, Start start, Fill fill) {
  absl::StatusOr<Peer> peer = authorizer.Admit(*context, request_context);
  if (!peer.ok()) return Finish(context, peer.status());
  auto* call = new PendingCall(daemon, &authorizer, std::move(request_context), *std::move(peer));
  start(call->id(), call->peer(),
        [call, fill](const absl::Status& status, const ReplyPayload& payload) {
          if (status.ok()) fill(payload);
          call->Answer(status);
        });
  return call;
}

// Answers later with the whole response: `start(peer, reply)` begins the call.
template <typename Response, typename Start>
grpc::ServerUnaryReactor* AnswerOnce(Daemon* daemon, const Authorizer& authorizer,
                                     grpc::CallbackServerContext* context,
                                     RequestContext request_context, Response* response,
                                     Start start) {
  absl::StatusOr<Peer> peer = authorizer.Admit(*context, request_context);
  if (!peer.ok()) return Finish(context, peer.status());
  auto* call = new PendingCall(daemon, &authorizer, std::move(request_context), *std::move(peer));
  start(call->peer(), [call, response](const absl::StatusOr<Response>& answer) {
    if (answer.ok()) *response = *answer;
    call->Answer(answer.status());
  });
  return call;
}

// Answers a call at once: `answer(peer)` returns a StatusOr of the response.
template <typename Response, typename Respond>
grpc::ServerUnaryReactor* AnswerNow(const Authorizer& authorizer,
                                    grpc::CallbackServerContext* context,
                                    const RequestContext& request_context, Response* response,
                                    Respond answer) {
  const absl::StatusOr<Peer> peer = authorizer.Admit(*context, request_context);
  absl::Status status = peer.status();
  if (status.ok()) {
    absl::StatusOr<Response> answered = answer(*peer);
    status = answered.status();
    if (status.ok()) *response = *std::move(answered);
    authorizer.AuditAnswer(request_context, *peer, status);
  }
  return Finish(context, status);
}

// The writing half of an event stream. It outlives the stream, since the daemon may send at any
// time. At most kMaxQueued events and kMaxQueuedBytes wait; a peer that reads too slowly loses its
// stream. Thread-safe. gRPC's operations begin without the stream's mutex, so that a caller that
// queues an event never waits for another caller's write.
//
// `Reactor` has StartWrite(const Event*), Finish(grpc::Status) and GiveUp(), which cancels the
// call. It must live until Finish, which is called when no write is under way.
template <typename Event, typename Reactor>
class EventStream {
 public:
  // An engine has at most as many unacknowledged parts as there are slots, which are fewer.
  static constexpr size_t kMaxQueued = 4096;
  static constexpr size_t kMaxQueuedBytes = size_t{64} << 20;

  explicit EventStream(Reactor* reactor) : reactor_(reactor) {}

  void Send(Event event) {
    Queue(std::move(event));
    Flush();
  }

  void Queue(Event event) {
    MutexLock lock(&mutex_);
    if (reactor_ == nullptr || ended_) return;
    const size_t bytes = event.ByteSizeLong();
    if (queue_.size() >= kMaxQueued || bytes > kMaxQueuedBytes - queued_bytes_) {
      queue_.resize(writing_ ? 1 : 0);
      ended_ = true;
      end_ =
          grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "the peer does not read its events");
      // The write under way may never end; then only cancelling ends the call.
      if (writing_) reactor_->GiveUp();
      return;
    }
    queued_bytes_ += bytes;
    queue_.push_back(std::move(event));
  }

  void Flush() { Pump(); }

  void End(absl::Status status) {
    {
      MutexLock lock(&mutex_);
      if (ended_) return;
      ended_ = true;
      end_ = ToGrpc(status);
    }
    Pump();
  }

  // Called by the reactor's OnWriteDone.
  void Written(bool ok) {
    {
      MutexLock lock(&mutex_);
      writing_ = false;
      if (!queue_.empty()) {
        queued_bytes_ -= queue_.front().GetCachedSize();
        queue_.pop_front();
      }
      if (!ok) {
        queue_.clear();
        queued_bytes_ = 0;
      }
    }
    Pump();
  }

  // The reactor is about to be destroyed.
  void Detach() {
    MutexLock lock(&mutex_);
    reactor_ = nullptr;
  }

 private:
  // Begins the next operation, if none is under way. The front of the queue stays in place until it
  // was written.
  void Pump() {
    Reactor* reactor = nullptr;
    const Event* event = nullptr;
    grpc::Status end;
    {
      MutexLock lock(&mutex_);
      if (reactor_ == nullptr || writing_ || finished_) return;
      if (!queue_.empty()) {
        writing_ = true;
        event = &queue_.front();
      } else if (ended_) {
        finished_ = true;
        end = end_;
      } else {
        return;
      }
      reactor = reactor_;
    }
    if (event != nullptr) {
      reactor->StartWrite(event);
    } else {
      reactor->Finish(end);
    }
  }

  Mutex mutex_;
  Reactor* reactor_ ABSL_GUARDED_BY(mutex_);
  std::deque<Event> queue_ ABSL_GUARDED_BY(mutex_);  // while writing_, the front is being written
  size_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status end_ ABSL_GUARDED_BY(mutex_);
};

// The daemon's end of an event stream: `Translate(value)` makes the message of a value.
template <typename Value, auto Translate, typename Stream>
class StreamSink : public EventSink<Value> {
 public:
  explicit StreamSink(std::shared_ptr<Stream> stream) : stream_(std::move(stream)) {}
  void Send(Value value) override { stream_->Send(Translate(value)); }
  void Queue(Value value) override { stream_->Queue(Translate(value)); }
  void Flush() override { stream_->Flush(); }
  void End(absl::Status status) override { stream_->End(std::move(status)); }

 private:
  const std::shared_ptr<Stream> stream_;
};

// A stream on which a caller watches something. At its end it calls Stop and deletes itself.
template <typename Event>
class WatchReactorBase : public grpc::ServerWriteReactor<Event> {
 public:
  using Stream = EventStream<Event, WatchReactorBase>;

  explicit WatchReactorBase(grpc::CallbackServerContext* context)
      : context_(context), stream_(std::make_shared<Stream>(this)) {}

  void OnWriteDone(bool ok) noexcept override {
    stream_->Written(ok);
    if (!ok) stream_->End(absl::OkStatus());
  }
  void GiveUp() { context_->TryCancel(); }
  void OnCancel() noexcept override { stream_->End(absl::CancelledError("the caller went away")); }
  void OnDone() noexcept override {
    stream_->Detach();
    Stop();
    delete this;
  }

 protected:
  // Ends the watching; called once, when the stream has ended.
  virtual void Stop() = 0;
  const std::shared_ptr<Stream>& stream() const { return stream_; }

 private:
  grpc::CallbackServerContext* const context_;
  const std::shared_ptr<Stream> stream_;
};

// Attach of either role: the first message is the hello, and the stream is the lease. Deletes
// itself.
//
// `Role` supplies kRpc, Message, Event and `bool Answer(Daemon*, MemberId, const Message&)`, which
// returns false for an orderly detach.
template <typename Role>
class AttachReactor : public grpc::ServerBidiReactor<typename Role::Message, typename Role::Event> {
 public:
  using Stream = EventStream<typename Role::Event, AttachReactor>;
  using Sink = StreamSink<MemberNews, MemberEventOf<typename Role::Event>, Stream>;

  AttachReactor(Daemon* daemon, const Authorizer* authorizer, grpc::CallbackServerContext* context)
      : daemon_(daemon),
        authorizer_(authorizer),
        context_(context),
        stream_(std::make_shared<Stream>(this)),
        peer_(authorizer->Admit(*context, {Role::kRpc})) {
    if (!peer_.ok()) {
      stream_->End(peer_.status());
      return;
    }
    this->StartRead(&message_);
  }

  void OnReadDone(bool ok) noexcept override {
    if (!ok) return Leave("its stream ended");
    if (member_ == 0) {
      if (!message_.has_hello()) {
        return stream_->End(
            InvalidField("kind", "kind: the first message of Attach must be hello"));
      }
      const RequestContext request_context{.rpc = Role::kRpc, .group = message_.hello().group()};
      if (absl::Status status = authorizer_->Enter(&*peer_, request_context); !status.ok()) {
        return stream_->End(std::move(status));
      }
      member_ = daemon_->calls()
                    .Attach(ArrivalOf(message_.hello(), *peer_), std::make_shared<Sink>(stream_))
                    .value();
    } else if (message_.has_hello()) {
      stream_->End(InvalidField("kind", "kind: hello was said already"));
      return Leave("it said hello twice");
    } else if (!Role::Answer(daemon_, MemberId(member_), message_)) {
      return daemon_->calls().Detached(MemberId(member_));  // ends the stream
    }
    this->StartRead(&message_);
  }
  void OnWriteDone(bool ok) noexcept override { stream_->Written(ok); }
  void GiveUp() { context_->TryCancel(); }
  void OnCancel() noexcept override { Leave("its stream was cancelled"); }
  void OnDone() noexcept override {
    stream_->Detach();
    Leave("its stream ended");
    delete this;
  }

 private:
  // Losing a member twice is harmless. A read never races with itself, but a cancellation may come
  // at the same time.
  void Leave(const std::string& reason) {
    if (const uint64_t member = member_; member != 0)
      daemon_->calls().Gone(MemberId(member), reason);
    stream_->End(absl::OkStatus());
  }

  Daemon* const daemon_;
  const Authorizer* const authorizer_;
  grpc::CallbackServerContext* const context_;
  const std::shared_ptr<Stream> stream_;
  absl::StatusOr<Peer> peer_;
  typename Role::Message message_;
  std::atomic<uint64_t> member_{0};  // 0: no hello yet
};

}  // namespace refitd

#endif  // REFITD_DAEMON_SERVICES_COMMON_H_
