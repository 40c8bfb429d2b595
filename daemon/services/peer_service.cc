#include "daemon/services/peer_service.h"

#include <fmt/format.h>
#include <grpc/support/time.h>
#include <grpcpp/alarm.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "daemon/link/channel.h"
#include "daemon/link/commands.h"
#include "daemon/link/hello.h"
#include "daemon/link/limits.h"
#include "daemon/link/order.h"
#include "daemon/link/peer_backlog.h"
#include "daemon/link/peer_queue.h"
#include "daemon/link/reports.h"
#include "daemon/process/log.h"
#include "daemon/process/log_limit.h"
#include "proto/grpc_status.h"
#include "transport/base/errors.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"
#include "transport/sockets/address_security.h"

namespace refitd {
namespace {

using absl::StatusCode;

gpr_timespec After(Duration duration) {
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_time_from_nanos(duration.count(), GPR_TIMESPAN));
}

uint64_t NextSession() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1);
}

class LinkReactor;

// The daemon's handle of the link. Outlives the reactor.
class Session final : public PeerSession, public std::enable_shared_from_this<Session> {
 public:
  Session(LinkReactor* reactor, int64_t message_bytes)
      : id_(NextSession()), own_message_bytes_(message_bytes), reactor_(reactor) {}

  uint64_t id() const override { return id_; }

  void Accept(const LinkUp& up) override {
    v1::PeerAnswer answer = AcceptedToProto(up, own_message_bytes_);
    const size_t bytes = answer.ByteSizeLong();
    MutexLock lock(&mutex_);
    if (ended_ || order_.has_value()) return;
    order_.emplace(up.incarnation);
    bounds_ = BoundsOf(up.spec);
    backlog_.Open(up.incarnation);
    if (static_cast<int64_t>(bytes) > peer_message_bytes_) {
      return EndLocked(Error(StatusCode::kResourceExhausted,
                             "the group's spec makes a message of {} bytes, more than this "
                             "daemon's message_bytes of {}",
                             bytes, peer_message_bytes_));
    }
    queue_.Push(std::move(answer), bytes);
    Pump();
  }

  absl::Status Queue(PeerCommand command) override {
    std::optional<uint64_t> next_incarnation;
    if (const auto* next = std::get_if<PeerIncarnation>(&command)) {
      next_incarnation = next->incarnation;
    }
    if (backlog_.Add(std::move(command), next_incarnation)) return absl::OkStatus();
    return Error(StatusCode::kUnavailable, "the daemon's link is not up");
  }

  void Flush() override {
    if (!backlog_.StartEncoding()) return;
    int64_t message_bytes = 0;
    {
      MutexLock lock(&mutex_);
      message_bytes = peer_message_bytes_;
    }
    while (std::optional<Backlog::Entry> next = backlog_.Next()) {
      absl::StatusOr<std::vector<v1::PeerAnswer>> messages = ToProto(next->value, message_bytes);
      MutexLock lock(&mutex_);
      if (messages.ok()) {
        QueueMessages(*next, *std::move(messages));
      } else {
        backlog_.Drop();
        EndLocked(messages.status());
      }
    }
    MutexLock lock(&mutex_);
    Pump();  // the end may have waited for this thread
  }

  void End(absl::Status status) override {
    MutexLock lock(&mutex_);
    EndLocked(std::move(status));
  }

  // ---- for the reactor ----

  // Ends the call after kPeerHelloLimit unless the hello has come.
  void AwaitHello() {
    hello_alarm_.Set(After(kPeerHelloLimit), [weak = weak_from_this()](bool expired) noexcept {
      const std::shared_ptr<Session> session = weak.lock();
      if (!expired || session == nullptr) return;
      session->End(
          Error(StatusCode::kDeadlineExceeded, "no hello within {} ms", ToMillis(kPeerHelloLimit)));
    });
  }
  // The hello came. False: the link is being ended already.
  bool HelloCame(int64_t message_bytes) {
    hello_alarm_.Cancel();
    MutexLock lock(&mutex_);
    peer_message_bytes_ = message_bytes;
    return !ended_;
  }

  // Returns the bounds for numbers in the report. nullopt: the message must be dropped, because the
  // same message came before or the link is being ended.
  absl::StatusOr<std::optional<PeerBounds>> CheckOrder(const v1::PeerMessage& message) {
    MutexLock lock(&mutex_);
    if (ended_) return std::nullopt;
    if (!order_.has_value()) {
      return InvalidField("kind", "kind: a report came before accepted");
    }
    REFITD_ASSIGN_OR_RETURN(const bool counts,
                            order_->Check(message.sequence(), message.incarnation()));
    if (!counts) return std::nullopt;
    return bounds_;
  }

  void Written(bool ok) {
    MutexLock lock(&mutex_);
    queue_.Written();
    if (!ok) DropAll();
    Pump();
  }

  // Why the link ended, for Gone.
  std::string Reason() {
    MutexLock lock(&mutex_);
    return ended_ && !end_.ok() ? Message(end_) : "its link ended";
  }

  void Detach() {
    MutexLock lock(&mutex_);
    reactor_ = nullptr;
  }

 private:
  using Backlog = PeerBacklog<PeerCommand>;

  // `messages`: those of the one command in `entry`.
  void QueueMessages(const Backlog::Entry& entry, std::vector<v1::PeerAnswer> messages)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    size_t bytes = 0;
    for (const v1::PeerAnswer& message : messages) {
      bytes += message.ByteSizeLong() + kPeerNumberingBytes;
    }
    if (!queue_.HasRoom(bytes)) {
      DropAll();
      EndLocked(Error(StatusCode::kResourceExhausted,
                      "the daemon does not read: more than {} bytes wait for it",
                      kMaxPeerQueuedBytes));
      GiveUp();  // the write under way may never end
      return;
    }
    for (v1::PeerAnswer& message : messages) {
      const size_t size = message.ByteSizeLong() + kPeerNumberingBytes;
      queue_.PushNumbered(std::move(message), size, entry.incarnation);
    }
    if (const auto* next = std::get_if<PeerIncarnation>(&entry.value)) {
      if (absl::Status status = order_->Announce(next->incarnation); !status.ok()) {
        EndLocked(std::move(status));
      }
    }
    Pump();
  }

  // Drops all that waits to be written.
  void DropAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    queue_.Drop();
    backlog_.Drop();
  }

  void EndLocked(absl::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (ended_) return;
    ended_ = true;
    backlog_.Close();
    end_ = std::move(status);
    if (reactor_ == nullptr) return;
    end_alarm_.Set(After(kPeerEndLimit), [weak = weak_from_this()](bool expired) noexcept {
      const std::shared_ptr<Session> session = weak.lock();
      if (!expired || session == nullptr) return;
      MutexLock lock(&session->mutex_);
      session->DropAll();
      session->GiveUp();
      session->Pump();
    });
    Pump();
  }

  // Use the reactor, which is defined below.
  void GiveUp() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const uint64_t id_;
  const int64_t own_message_bytes_;
  grpc::Alarm hello_alarm_;
  Backlog backlog_;

  Mutex mutex_;
  LinkReactor* reactor_ ABSL_GUARDED_BY(mutex_);
  grpc::Alarm end_alarm_ ABSL_GUARDED_BY(mutex_);
  PeerQueue<v1::PeerAnswer> queue_ ABSL_GUARDED_BY(mutex_);
  std::optional<PeerOrder> order_ ABSL_GUARDED_BY(mutex_);  // set once accepted
  PeerBounds bounds_ ABSL_GUARDED_BY(mutex_);
  int64_t peer_message_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status end_ ABSL_GUARDED_BY(mutex_);
};

// The reactor of one link. Deletes itself.
class LinkReactor final : public grpc::ServerBidiReactor<v1::PeerMessage, v1::PeerAnswer> {
 public:
  LinkReactor(PeerAcceptor* acceptor, int64_t message_bytes, const LinkAuthorizer& authorizer,
              grpc::CallbackServerContext* context)
      : acceptor_(acceptor),
        context_(context),
        address_(TcpAddress(context->peer())),
        session_(std::make_shared<Session>(this, message_bytes)) {
    if (absl::Status status = Admit(authorizer); !status.ok()) {
      if (!address_.empty()) LogRefused(status);
      session_->End(std::move(status));
      return;
    }
    session_->AwaitHello();
    StartRead(&message_);
  }

  void OnReadDone(bool ok) noexcept override {
    if (!ok) return Leave();
    if (const absl::Status status = Take(); !status.ok()) {
      session_->End(status);
      return Leave();
    }
    StartRead(&message_);
  }
  void OnWriteDone(bool ok) noexcept override { session_->Written(ok); }
  void OnDone() noexcept override {
    session_->Detach();
    Leave();
    delete this;
  }

  void GiveUp() { context_->TryCancel(); }

 private:
  absl::Status Admit(const LinkAuthorizer& authorizer) {
    if (address_.empty()) {
      return Error(StatusCode::kPermissionDenied,
                   "daemons link over TCP, not over a socket for clients");
    }
    if (authorizer == nullptr) return absl::OkStatus();
    REFITD_ASSIGN_OR_RETURN(caller_, authorizer(*context_));
    return absl::OkStatus();
  }

  // Anybody who reaches the port can cause this line, so it is limited.
  void LogRefused(const absl::Status& status) const {
    static auto* const limit = new LogLimit;
    const std::optional<int64_t> left_out = limit->Admit(std::chrono::steady_clock::now());
    if (!left_out.has_value()) return;
    if (*left_out > 0) LogWarning("{} lines about refused links were left out", *left_out);
    LogWarning("link from {} refused: {}", address_, Message(status));
  }

  absl::Status Take() {
    if (!greeted_) {
      REFITD_ASSIGN_OR_RETURN(PeerGreeting hello, GreetingOf(message_));
      if (caller_.enter != nullptr) {
        absl::Status status = caller_.enter(hello.group);
        if (!status.ok()) LogRefused(status);
        REFITD_RETURN_IF_ERROR(status);
      }
      if (!session_->HelloCame(hello.message_bytes)) return absl::OkStatus();
      greeted_ = true;
      group_ = hello.group;
      name_ = fmt::format("group {}: daemon {} at {}", group_, hello.daemon_id, address_);
      identity_ = caller_.identity.empty() ? "daemon " + hello.daemon_id : caller_.identity;
      if (!caller_.identity.empty()) LogInfo("{} is {}", name_, caller_.identity);
      acceptor_->Hello(std::move(hello), address_, session_);
      return absl::OkStatus();
    }
    REFITD_ASSIGN_OR_RETURN(const std::optional<PeerBounds> bounds, session_->CheckOrder(message_));
    if (!bounds.has_value()) return absl::OkStatus();
    if (!decoder_.has_value()) {
      decoder_.emplace(*bounds, [this] { return acceptor_->RoomFor(identity_); });
    }
    REFITD_ASSIGN_OR_RETURN(std::optional<PeerReport> report, decoder_->Decode(message_));
    if (!report.has_value()) return absl::OkStatus();
    REFITD_RETURN_IF_ERROR(CheckAddress(*report));
    acceptor_->Report(session_->id(), *std::move(report));
    return absl::OkStatus();
  }

  // P9: the other daemons of a communicator admit whoever has the identity that an address names.
  // So a daemon must not give an address that names another daemon's identity.
  absl::Status CheckAddress(const PeerReport& report) const {
    const auto* const opened = std::get_if<CommunicatorOpened>(&report);
    if (opened == nullptr) return absl::OkStatus();
    absl::Status status = CheckAddressOwner(opened->address, caller_.identity);
    if (status.ok()) return status;
    LogRefused(status);
    if (caller_.refused != nullptr) caller_.refused(group_, status);
    return status;
  }

  // Called after the last report: reads follow one another, and OnDone comes after all of them.
  void Leave() {
    if (left_) return;
    left_ = true;
    if (greeted_) acceptor_->Gone(session_->id(), session_->Reason());
    session_->End(absl::OkStatus());
  }

  PeerAcceptor* const acceptor_;
  grpc::CallbackServerContext* const context_;
  const std::string address_;
  LinkCaller caller_;
  const std::shared_ptr<Session> session_;
  v1::PeerMessage message_;
  std::optional<ReportDecoder> decoder_;
  std::string group_;
  std::string identity_;  // whose bytes are counted: of the certificate, or else the daemon's id
  std::string name_;      // group, daemon and address, for the log
  bool greeted_ = false;
  bool left_ = false;
};

void Session::GiveUp() {
  if (reactor_ != nullptr) reactor_->GiveUp();
}

void Session::Pump() {
  if (reactor_ == nullptr) return;
  if (const v1::PeerAnswer* next = queue_.StartNext(); next != nullptr) {
    reactor_->StartWrite(next);
  } else if (ended_ && !finished_ && queue_.idle() && backlog_.idle()) {
    finished_ = true;
    reactor_->Finish(ToGrpc(end_));
  }
}

}  // namespace

grpc::ServerBidiReactor<v1::PeerMessage, v1::PeerAnswer>* PeerService::Link(
    grpc::CallbackServerContext* context) noexcept {
  return new LinkReactor(acceptor_, message_bytes_, authorizer_, context);
}

}  // namespace refitd
