// The Attach stream of one member: the lease, its events in and its answers out.
//
// Invariants
//  - Events keep their order. At most kMaxQueuedEvents wait for PopFront: when the queue is full
//    the stream is not read, and flow control stops the daemon's writes.
//  - An event stays in the queue until PopFront: a thread that finds the stream exhausted knows
//    that every event was dealt with completely.
//  - At most kMaxQueuedMessages answers wait to be written; when that queue is full Send refuses.
//  - The stream owns itself until gRPC is done with it, so its holder may let go at any time.
//
// Thread-safe, but one thread at a time calls Front and PopFront. The handler runs on a gRPC
// thread, one event at a time.
#ifndef REFITD_CLIENT_ATTACH_STREAM_H_
#define REFITD_CLIENT_ATTACH_STREAM_H_

#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "client/call.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"

namespace refitd::client {

inline constexpr size_t kMaxQueuedEvents = 128;    // a group has at most 64 slots in flight
inline constexpr size_t kMaxQueuedMessages = 256;  // an answer for each event, and some more

template <typename Out, typename In>
class AttachStream final : public grpc::ClientBidiReactor<Out, In> {
 public:
  using Reactor = grpc::ClientBidiReactor<Out, In>;
  // Sees each event before it is queued. True: the handler has dealt with the event, which is then
  // not queued.
  using Handler = std::function<bool(const In&)>;
  struct Options {
    std::string daemon;  // the socket of the daemon that gave the lease, for messages
    Handler handler;     // may be null
    // Runs once, when the lease has ended, on a gRPC thread without any lock held. May be null.
    std::function<void()> ended;
  };

  // `start` calls the stub's async Attach with the given context and reactor.
  static std::shared_ptr<AttachStream> Start(
      const std::function<void(grpc::ClientContext*, Reactor*)>& start, Out hello,
      Options options) {
    std::shared_ptr<AttachStream> stream(new AttachStream(std::move(options)));
    stream->Begin(start, std::move(hello), stream);
    return stream;
  }

  // Queues a message. Errors: the lease's status if it has ended; RESOURCE_EXHAUSTED if
  // kMaxQueuedMessages wait already.
  absl::Status Send(Out message) {
    MutexLock lock(&mutex_);
    if (done_) return status_;
    if (reads_ended_ || detaching_) {
      return Error(absl::StatusCode::kUnavailable, "the lease is ending");
    }
    if (outgoing_.size() >= kMaxQueuedMessages) {
      return Error(absl::StatusCode::kResourceExhausted,
                   "{} messages to the daemon are unwritten already", outgoing_.size());
    }
    outgoing_.push_back(std::move(message));
    WriteNext();
    return absl::OkStatus();
  }

  // Returns the oldest event, which the stream owns until PopFront. Null: no event came before
  // `deadline`. An error says why the lease ended; then no event is left.
  absl::StatusOr<const In*> Front(TimePoint deadline) {
    MutexLock lock(&mutex_);
    while (incoming_.empty()) {
      if (done_) return status_;
      if (!cond_.WaitUntil(&mutex_, deadline) && incoming_.empty() && !done_) return nullptr;
    }
    return &incoming_.front();
  }

  // Says that the event which Front gave was dealt with.
  void PopFront() {
    MutexLock lock(&mutex_);
    incoming_.pop_front();
    if (read_paused_) ReadNext();
  }

  // Returns OK while the lease lives; else the reason of its end.
  absl::Status status() const {
    MutexLock lock(&mutex_);
    return done_ ? status_ : absl::OkStatus();
  }

  // Waits for the lease's end; false: it still lives at `deadline`.
  bool AwaitEnd(TimePoint deadline) {
    MutexLock lock(&mutex_);
    return WaitDone(deadline);
  }

  // Tells whether the call `what` got `answer` because the lease has ended. If so, returns the
  // lease's end, with `what` before it. OK: the lease lives, and the answer is the daemon's own.
  // The stream's end may arrive after the answer, so this waits for it, up to `limit`; longer if
  // the answer says that there is no such lease (UNAUTHENTICATED), because then the end is certain
  // to come.
  absl::Status LeaseEndBehind(std::string_view what, const absl::Status& answer, Duration limit) {
    if (!MayMeanLeaseEnded(answer)) return absl::OkStatus();
    const bool certain = absl::IsUnauthenticated(answer);
    if (!AwaitEnd(After(certain ? kCertainEndFactor * limit : limit))) {
      if (!certain) return absl::OkStatus();
      return SuspectDaemon(
          Error(absl::StatusCode::kUnavailable, "{}: the lease ended: daemon at {}: {}", what,
                options_.daemon, Message(answer)),
          options_.daemon);
    }
    const absl::Status end = status();
    return IsLeaseEnd(end) ? Prefixed(end, "{}", what) : Prefixed(end, "{}: the lease ended", what);
  }

  // True if the lease has ended and no event is left.
  bool exhausted() const {
    MutexLock lock(&mutex_);
    return done_ && incoming_.empty();
  }

  // Ends the lease at once; status() shows that soon.
  void Cancel() { context_.TryCancel(); }

  // Sends `detach`, by which the daemon ends the lease; cancels the stream if the lease has not
  // ended after `limit`. Returns when the lease has ended, at the latest after twice the limit.
  void Close(Out detach, Duration limit) {
    MutexLock lock(&mutex_);
    if (done_) return;
    if (!detaching_) {
      detaching_ = true;
      if (!reads_ended_) {
        outgoing_.push_back(std::move(detach));
        WriteNext();
        if (read_paused_) ReadNext();
      }
    }
    if (WaitDone(After(limit))) return;
    context_.TryCancel();
    WaitDone(After(limit));
  }

 private:
  static constexpr int kCertainEndFactor = 5;
  static constexpr std::string_view kLeaseEnded = "the lease ended";

  // Whether the message of this end says by itself that the lease ended. Finish puts kLeaseEnded
  // before UNAVAILABLE and DEADLINE_EXCEEDED; with ABORTED a daemon ends a lease and says so.
  static bool IsLeaseEnd(const absl::Status& end) {
    return absl::IsUnavailable(end) || absl::IsDeadlineExceeded(end) || absl::IsAborted(end);
  }

  explicit AttachStream(Options options) : options_(std::move(options)) {
    static_assert(noexcept(this->OnWriteDone(true))&& noexcept(this->OnReadDone(true))&& noexcept(
        this->OnDone(std::declval<const grpc::Status&>())));
  }

  // Whether the end of the lease may be the reason of this answer, which is the daemon's or gRPC's.
  static bool MayMeanLeaseEnded(const absl::Status& answer) {
    switch (answer.code()) {
      case absl::StatusCode::kUnauthenticated:
      case absl::StatusCode::kUnavailable:
      case absl::StatusCode::kCancelled:
      case absl::StatusCode::kInternal:
      case absl::StatusCode::kUnknown:
        return true;
      default:
        return false;
    }
  }

  void Begin(const std::function<void(grpc::ClientContext*, Reactor*)>& start, Out hello,
             std::shared_ptr<AttachStream> self) {
    MutexLock lock(&mutex_);
    self_ = std::move(self);
    start(&context_, this);
    // Writes start outside of gRPC's own callbacks, so a hold keeps gRPC from calling OnDone before
    // the reads ended.
    this->AddHold();
    outgoing_.push_back(std::move(hello));
    WriteNext();
    ReadNext();
    this->StartCall();
  }

  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || reads_ended_ || write_failed_ || outgoing_.empty()) return;
    writing_ = true;
    current_out_ = std::move(outgoing_.front());
    outgoing_.pop_front();
    this->StartWrite(&current_out_);
  }

  void ReadNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    read_paused_ = false;
    this->StartRead(&current_in_);
  }

  bool WaitDone(TimePoint deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    while (!done_) {
      if (!cond_.WaitUntil(&mutex_, deadline)) break;
    }
    return done_;
  }

  // Functions that gRPC calls are noexcept, as in the daemon: gRPC swallows exceptions, and calls
  // that wait for the rest of such a callback would wait until their deadlines.
  void OnWriteDone(bool ok) noexcept override {
    MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok) write_failed_ = true;  // the end of the reads tells why
    if (reads_ended_ || write_failed_) return outgoing_.clear();
    if (!outgoing_.empty()) return WriteNext();
    if (detaching_ && !writes_closed_) {
      writes_closed_ = true;
      this->StartWritesDone();
    }
  }

  void OnReadDone(bool ok) noexcept override {
    if (!ok) return EndReads();
    In event = std::move(current_in_);
    current_in_ = In();
    const bool handled = options_.handler && options_.handler(event);
    bool more = false;
    {
      MutexLock lock(&mutex_);
      if (!handled && !detaching_) incoming_.push_back(std::move(event));
      more = incoming_.size() < kMaxQueuedEvents || detaching_;
      read_paused_ = !more;
    }
    // No mutex is held here, so that the waiting threads go on at once. They are notified before
    // the next read begins.
    if (!handled) cond_.NotifyAll();
    if (more) this->StartRead(&current_in_);
  }

  void EndReads() {
    {
      MutexLock lock(&mutex_);
      reads_ended_ = true;
    }
    this->RemoveHold();
  }

  void OnDone(const grpc::Status& status) noexcept override {
    std::shared_ptr<AttachStream> self;  // destroyed last: this may be the last reference
    Handler handler;
    std::function<void()> ended;
    Finish(status, &self, &handler, &ended);
    if (ended) ended();
  }

  void Finish(const grpc::Status& status, std::shared_ptr<AttachStream>* self, Handler* handler,
              std::function<void()>* ended) {
    MutexLock lock(&mutex_);
    status_ = FromGrpc(status);
    if (status_.ok()) {
      status_ = detaching_ ? Error(absl::StatusCode::kCancelled, "detached")
                           : Error(absl::StatusCode::kUnavailable, "the daemon ended the lease");
    }
    status_ = NameDaemon(kLeaseEnded, options_.daemon, status_);
    done_ = true;
    handler->swap(options_.handler);
    ended->swap(options_.ended);
    self->swap(self_);
    cond_.NotifyAll();
  }

  grpc::ClientContext context_;
  Options options_;  // set before the call starts; its functions are cleared in OnDone
  In current_in_;    // gRPC's while a read is outstanding
  Out current_out_;  // gRPC's while a write is outstanding

  mutable Mutex mutex_;
  CondVar cond_;
  std::deque<Out> outgoing_ ABSL_GUARDED_BY(mutex_);
  std::deque<In> incoming_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool write_failed_ ABSL_GUARDED_BY(mutex_) = false;
  bool writes_closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool read_paused_ ABSL_GUARDED_BY(mutex_) = false;
  // True: the hold is given up, and no operation may start.
  bool reads_ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool detaching_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);  // once done_
  std::shared_ptr<AttachStream> self_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace refitd::client

#endif  // REFITD_CLIENT_ATTACH_STREAM_H_
