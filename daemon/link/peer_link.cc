#include "daemon/link/peer_link.h"

#include <grpc/support/time.h>
#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>

#include <utility>
#include <vector>

#include "daemon/link/channel.h"
#include "daemon/link/commands.h"
#include "daemon/link/hello.h"
#include "daemon/link/limits.h"
#include "daemon/link/order.h"
#include "daemon/link/peer_backlog.h"
#include "daemon/link/peer_queue.h"
#include "daemon/link/reports.h"
#include "proto/grpc_status.h"
#include "proto/protocol.h"
#include "refitd/v1/peer.grpc.pb.h"
#include "transport/base/failure.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"
#include "transport/sockets/address_security.h"
#include "transport/tls/grpc_credentials.h"

namespace refitd {
namespace {

using absl::StatusCode;

gpr_timespec After(Duration duration) {
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_time_from_nanos(duration.count(), GPR_TIMESPAN));
}

}  // namespace

// Keeps itself alive until on_lost has returned.
class PeerLink::Call final : public grpc::ClientBidiReactor<v1::PeerMessage, v1::PeerAnswer>,
                             public std::enable_shared_from_this<PeerLink::Call> {
 public:
  Call(PeerDial dial, PeerLinkCallbacks callbacks)
      : dial_(std::move(dial)), callbacks_(std::move(callbacks)) {}

  void Start() {
    v1::PeerMessage message;
    v1::PeerHello* hello = message.mutable_hello();
    hello->set_protocol(static_cast<v1::ProtocolVersion>(kProtocol));
    hello->set_group(dial_.group);
    if (dial_.spec.has_value()) *hello->mutable_spec() = SpecToProto(*dial_.spec);
    hello->set_wait_ms(ToMillis(dial_.wait));
    hello->set_daemon_id(dial_.daemon_id);
    hello->set_boot_id(dial_.boot_id);
    hello->set_message_bytes(dial_.limits.message_bytes);
    hello->set_dial(dial_.number);
    hello->set_coordinator(dial_.address);
    hello->set_identity(dial_.identity);
    hello->set_trainer(dial_.trainer);

    MutexLock lock(&mutex_);
    self_ = shared_from_this();
    stub_ = v1::Peer::NewStub(
        MakePeerChannel(dial_.address, dial_.credentials, dial_.limits.message_bytes));
    stub_->async()->Link(&context_, this);
    AddHold();  // Writes start outside of gRPC's callbacks. The hold goes when `ended_` is set.
    StartRead(&answer_);
    const size_t bytes = message.ByteSizeLong();
    queue_.Push(std::move(message), bytes);
    Pump();
    join_alarm_.Set(After(dial_.wait + dial_.limits.join),
                    [weak = weak_from_this()](bool expired) noexcept {
                      const std::shared_ptr<Call> call = weak.lock();
                      if (expired && call != nullptr) call->JoinExpired();
                    });
    StartCall();
  }

  absl::Status Queue(PeerReport report) {
    if (backlog_.Add(std::move(report))) return absl::OkStatus();
    return Error(StatusCode::kUnavailable, "the link to coordinator {} is not up", dial_.address);
  }

  std::vector<Refused> Flush() {
    std::vector<Refused> refused;
    if (!backlog_.StartEncoding()) return refused;
    PeerBounds bounds;
    int64_t message_bytes = 0;
    {
      MutexLock lock(&mutex_);
      bounds = bounds_;
      message_bytes = message_bytes_;
    }
    while (std::optional<Backlog::Entry> next = backlog_.Next()) {
      absl::StatusOr<Encoded> encoded = Encode(next->value, bounds, message_bytes);
      MutexLock lock(&mutex_);
      if (ended_) continue;
      if (encoded.ok()) {
        Push(next->incarnation, *std::move(encoded));
      } else {
        refused.push_back({std::move(next->value), encoded.status()});
      }
    }
    MutexLock lock(&mutex_);
    Pump();  // Close may have waited for this thread
    return refused;
  }

  void Close() {
    MutexLock lock(&mutex_);
    if (ended_ || closing_) return;
    closing_ = true;
    backlog_.Close();
    reason_ = Error(StatusCode::kCancelled, "the link to coordinator {} was closed", dial_.address);
    if (!up_) return EndLocked(*reason_);
    end_alarm_.Set(After(kPeerEndLimit), [weak = weak_from_this()](bool expired) noexcept {
      const std::shared_ptr<Call> call = weak.lock();
      if (!expired || call == nullptr) return;
      MutexLock lock(&call->mutex_);
      call->EndLocked(absl::CancelledError());
    });
    Pump();
  }

  void OnReadDone(bool ok) noexcept override {
    if (!ok) {
      // The stream has ended: OnDone follows with the reason.
      MutexLock lock(&mutex_);
      StopWritingLocked();
      return;
    }
    if (const absl::Status status = Take(); !status.ok()) {
      MutexLock lock(&mutex_);
      EndLocked(Prefixed(status, "coordinator {}", dial_.address));
      return;
    }
    StartRead(&answer_);
  }

  void OnWriteDone(bool /*ok*/) noexcept override {
    MutexLock lock(&mutex_);
    queue_.Written();
    if (ended_) queue_.Drop();
    Pump();
  }

  void OnDone(const grpc::Status& status) noexcept override {
    absl::Status reason;
    {
      MutexLock lock(&mutex_);
      REFITD_CHECK(ended_);  // else the hold would prevent OnDone
      reason = reason_.value_or(Lost(status));
    }
    callbacks_.on_lost(reason);
    callbacks_ = {};
    std::shared_ptr<Call> self;  // destroyed last
    MutexLock lock(&mutex_);
    self.swap(self_);
    // `lock` is destroyed before `self`.
  }

  std::string address() {
    MutexLock lock(&mutex_);
    return address_;
  }

 private:
  using Backlog = PeerBacklog<PeerReport>;

  struct Encoded {
    std::vector<v1::PeerMessage> messages;
    std::vector<size_t> sizes;  // of each message
    size_t bytes = 0;           // of all messages
  };

  static absl::StatusOr<Encoded> Encode(const PeerReport& report, const PeerBounds& bounds,
                                        int64_t message_bytes) {
    Encoded encoded;
    REFITD_ASSIGN_OR_RETURN(encoded.messages, ToProto(report, bounds, message_bytes));
    for (const v1::PeerMessage& message : encoded.messages) {
      encoded.sizes.push_back(message.ByteSizeLong() + kPeerNumberingBytes);
      encoded.bytes += encoded.sizes.back();
    }
    if (encoded.bytes > kMaxPeerQueuedBytes) {
      return Error(StatusCode::kResourceExhausted,
                   "a report of {} bytes for another daemon, more than {}", encoded.bytes,
                   kMaxPeerQueuedBytes);
    }
    return encoded;
  }

  // Ends the link if there is no room.
  void Push(uint64_t incarnation, Encoded encoded) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!queue_.HasRoom(encoded.bytes)) {
      return EndLocked(Error(StatusCode::kResourceExhausted,
                             "coordinator {} does not read: more than {} bytes wait for it",
                             dial_.address, kMaxPeerQueuedBytes));
    }
    for (size_t i = 0; i < encoded.messages.size(); ++i) {
      queue_.PushNumbered(std::move(encoded.messages[i]), encoded.sizes[i], incarnation);
    }
    Pump();
  }

  void JoinExpired() {
    MutexLock lock(&mutex_);
    if (up_) return;
    EndLocked(Error(StatusCode::kDeadlineExceeded,
                    "coordinator {} did not take this daemon into group {} within {} ms",
                    dial_.address, dial_.group, ToMillis(dial_.wait + dial_.limits.join)));
  }

  // Takes the message that was read; runs on the link's reading thread.
  absl::Status Take() {
    if (!order_.has_value()) {
      REFITD_ASSIGN_OR_RETURN(const PeerAcceptance accepted, AcceptedFromProto(answer_));
      const LinkUp& up = accepted.up;
      order_.emplace(up.incarnation);
      const PeerBounds bounds = BoundsOf(up.spec);
      decoder_.emplace(bounds);
      {
        MutexLock lock(&mutex_);
        if (ended_ || closing_) return absl::OkStatus();
        up_ = true;
        address_ = TcpAddress(context_.peer());
        message_bytes_ = accepted.message_bytes;
        bounds_ = bounds;
        backlog_.Open(up.incarnation);
      }
      join_alarm_.Cancel();
      callbacks_.on_up(up);
      return absl::OkStatus();
    }
    REFITD_ASSIGN_OR_RETURN(const bool counts,
                            order_->Check(answer_.sequence(), answer_.incarnation()));
    if (!counts) return absl::OkStatus();
    REFITD_ASSIGN_OR_RETURN(std::optional<PeerCommand> command, decoder_->Decode(answer_));
    if (!command.has_value()) return absl::OkStatus();
    REFITD_RETURN_IF_ERROR(CheckAddress(*command));
    {
      MutexLock lock(&mutex_);
      if (ended_ || closing_) return absl::OkStatus();
      if (const auto* next = std::get_if<PeerIncarnation>(&*command)) {
        REFITD_RETURN_IF_ERROR(order_->Announce(next->incarnation));
        backlog_.Replace(next->incarnation);
      }
    }
    callbacks_.on_command(*std::move(command));
    return absl::OkStatus();
  }

  // P9: on the wire this daemon admits whoever has the identity that an address names. Of the
  // addresses that a coordinator sends, its link can vouch only for the coordinator's own.
  absl::Status CheckAddress(const PeerCommand& command) const {
    const auto* const connect = std::get_if<PeerCommunicatorConnect>(&command);
    if (connect == nullptr || !connect->coordinator_rank.has_value()) return absl::OkStatus();
    return CheckAddressOwner(connect->addresses->at(*connect->coordinator_rank),
                             ServerIdentity(context_));
  }

  // Drops what waits to be written, and the hold, so that gRPC can call OnDone.
  void StopWritingLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (ended_) return;
    ended_ = true;
    backlog_.Drop();
    queue_.Drop();
    RemoveHold();
  }

  // Ends the call. OnDone comes soon, whatever the network does.
  void EndLocked(absl::Status reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!reason_.has_value()) reason_ = std::move(reason);
    context_.TryCancel();
    StopWritingLocked();
  }

  void Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (const v1::PeerMessage* next = queue_.StartNext(); next != nullptr) {
      StartWrite(next);
    } else if (closing_ && !ended_ && !writes_done_ && queue_.idle() && backlog_.idle()) {
      writes_done_ = true;
      StartWritesDone();
    }
  }

  absl::Status Lost(const grpc::Status& status) const {
    if (status.ok()) {
      return Error(StatusCode::kUnavailable, "coordinator {} ended the link", dial_.address);
    }
    return Prefixed(FromGrpc(status), "coordinator {}", dial_.address);
  }

  // Constant after construction, except callbacks_, which are dropped with the link.
  const PeerDial dial_;
  PeerLinkCallbacks callbacks_;

  // Used by the reading thread only.
  v1::PeerAnswer answer_;
  std::optional<PeerOrder> order_;  // once accepted
  std::optional<CommandDecoder> decoder_;

  grpc::ClientContext context_;
  std::unique_ptr<v1::Peer::Stub> stub_;
  grpc::Alarm join_alarm_;

  Backlog backlog_;

  Mutex mutex_;
  grpc::Alarm end_alarm_ ABSL_GUARDED_BY(mutex_);
  PeerQueue<v1::PeerMessage> queue_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> reason_ ABSL_GUARDED_BY(mutex_);  // why this side ended the link
  // The largest message that the coordinator takes.
  int64_t message_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  PeerBounds bounds_ ABSL_GUARDED_BY(mutex_);  // of the group
  bool up_ ABSL_GUARDED_BY(mutex_) = false;
  std::string address_ ABSL_GUARDED_BY(mutex_);  // once up
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool writes_done_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<Call> self_ ABSL_GUARDED_BY(mutex_);
};

PeerLink::PeerLink(std::shared_ptr<Call> call) : call_(std::move(call)) {}

PeerLink::~PeerLink() { Close(); }

std::unique_ptr<PeerLink> PeerLink::Dial(PeerDial dial, PeerLinkCallbacks callbacks) {
  KeepCallbackThreads();
  auto call = std::make_shared<Call>(std::move(dial), std::move(callbacks));
  call->Start();
  return std::unique_ptr<PeerLink>(new PeerLink(std::move(call)));
}

absl::Status PeerLink::Queue(PeerReport report) { return call_->Queue(std::move(report)); }

std::vector<PeerLink::Refused> PeerLink::Flush() { return call_->Flush(); }

std::string PeerLink::address() const { return call_->address(); }

void PeerLink::Close() { call_->Close(); }

}  // namespace refitd
