#include "client/engine.h"

#include <grpcpp/support/client_callback.h>
#include <unistd.h>

#include <utility>

#include "client/attach_stream.h"
#include "client/call.h"
#include "client/connection.h"
#include "client/engine_state.h"
#include "client/layout_upload.h"
#include "client/part.h"
#include "proto/convert.h"
#include "refitd/v1/engine.grpc.pb.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"

namespace refitd::client {
namespace {

using Stream = AttachStream<v1::EngineMessage, v1::EngineEvent>;

constexpr size_t kMaxReasonBytes = 512;         // Failed.reason
constexpr int64_t kLayoutChunkBytes = 1 << 20;  // well below any message limit
// Registering is refused during an update, never delayed by one; checking millions of pieces takes
// a moment.
constexpr std::chrono::seconds kRegisterLimit{60};

class EngineImpl final : public Engine {
 public:
  EngineImpl(std::shared_ptr<Connection> connection, std::optional<Version> held)
      : connection_(std::move(connection)),
        stub_(v1::Engine::NewStub(connection_->channel())),
        state_(held) {}

  ~EngineImpl() override {
    connection_->Detach();
    if (stream_ == nullptr) return;
    v1::EngineMessage message;
    message.mutable_detach();
    stream_->Close(std::move(message), kCleanupLimit);
  }

  absl::Status Start(const EngineOptions& options, TimePoint deadline);

  absl::StatusOr<std::shared_ptr<Region>> NewRegion(int64_t bytes) override {
    REFITD_RETURN_IF_ERROR(stream_->status());
    return connection_->NewRegion(bytes);
  }
  absl::Status Register(Layout layout) override;
  absl::StatusOr<Event> Next(std::chrono::milliseconds timeout) override;
  absl::Status Ready(Version version) override;
  absl::Status Ack(const Part& part) override;
  absl::Status Fail(Version version, const std::string& reason) override;
  Weights weights() const override;
  std::optional<Version> version() const override;

 private:
  absl::Status SendAck(Version version, UpdateId update, PartSeq part)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status SendFailed(Version version, const std::string& reason)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Nothing: the event is not for the caller.
  Event Take(const v1::EngineEvent& event);
  Event TakePart(const v1::BucketReady& bucket);
  void NoteEnd() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (stream_->exhausted()) state_.OnLost();
  }

  const std::shared_ptr<Connection> connection_;
  const std::unique_ptr<v1::Engine::Stub> stub_;
  std::shared_ptr<Stream> stream_;  // constant after Start

  Mutex next_mutex_;  // one event is taken at a time; before mutex_
  Mutex register_mutex_;
  uint64_t binding_generation_ ABSL_GUARDED_BY(register_mutex_) = 0;
  // Held while an answer is queued: answers leave in the order in which the state allowed them.
  mutable Mutex mutex_;
  mutable EngineState state_ ABSL_GUARDED_BY(mutex_);
};

v1::EngineMessage Hello(const EngineOptions& options, TimePoint deadline) {
  v1::EngineMessage message;
  v1::EngineHello* hello = message.mutable_hello();
  hello->set_protocol(v1::PROTOCOL_VERSION_1);
  hello->set_group(options.connect.group);
  if (options.connect.spec) *hello->mutable_spec() = SpecToWire(*options.connect.spec);
  hello->set_instance(options.instance);
  hello->set_rank(options.rank);
  hello->set_world_size(options.world_size);
  hello->set_delivery(options.delivery == Delivery::kStaged ? v1::DELIVERY_STAGED
                                                            : v1::DELIVERY_REGISTERED);
  if (options.manifest) {
    v1::Manifest* manifest = hello->mutable_manifest();
    for (const TensorSpec& tensor : *options.manifest) {
      manifest->add_names(tensor.name);
      manifest->add_dtypes(refitd::ToWire(tensor.dtype));
      *manifest->add_shapes() = refitd::ToWire(tensor.shape);
    }
  }
  hello->set_wait_ms(
      std::chrono::duration_cast<std::chrono::milliseconds>(Until(deadline)).count());
  hello->set_client(CleanText(options.connect.client, kMaxClientBytes));
  hello->set_pid(::getpid());
  if (options.held_version) hello->set_held_version(options.held_version->value());
  return message;
}

absl::Status CheckOptions(const EngineOptions& options) {
  REFITD_RETURN_IF_ERROR(CheckConnectOptions(options.connect));
  REFITD_RETURN_IF_ERROR(CheckIdentifier(options.instance, "instance"));
  REFITD_RETURN_IF_ERROR(CheckRank(options.rank, options.world_size));
  if (options.held_version && options.held_version->value() < 0) {
    return Error(absl::StatusCode::kInvalidArgument, "held_version is {}", *options.held_version);
  }
  if (!options.manifest) return absl::OkStatus();
  if (options.delivery != Delivery::kStaged) {
    return Error(absl::StatusCode::kInvalidArgument, "a manifest is for staged delivery only");
  }
  for (const TensorSpec& tensor : *options.manifest) REFITD_RETURN_IF_ERROR(ValidateTensor(tensor));
  return absl::OkStatus();
}

absl::Status EngineImpl::Start(const EngineOptions& options, TimePoint deadline) {
  stream_ =
      Stream::Start([&](grpc::ClientContext* context,
                        Stream::Reactor* reactor) { stub_->async()->Attach(context, reactor); },
                    Hello(options, deadline), nullptr);
  REFITD_ASSIGN_OR_RETURN(const std::optional<v1::EngineEvent> event,
                          stream_->Pop(deadline + options.connect.call_margin));
  if (!event) {
    return Error(absl::StatusCode::kDeadlineExceeded, "Attach: the daemon did not answer in time");
  }
  if (!event->has_welcome()) {
    return Error(absl::StatusCode::kInternal, "Attach: the daemon's first event is no Welcome");
  }
  return connection_->Adopt(event->welcome());
}

absl::Status EngineImpl::Register(Layout layout) {
  REFITD_RETURN_IF_ERROR(stream_->status());
  for (const TensorSpec& tensor : layout.tensors) REFITD_RETURN_IF_ERROR(ValidateTensor(tensor));
  MutexLock lock(&register_mutex_);
  layout.binding_generation = ++binding_generation_;
  return UploadLayout(stub_->async(), EncodeLayout(layout, connection_->lease(), kLayoutChunkBytes),
                      After(kRegisterLimit + connection_->call_margin()));
}

absl::StatusOr<Event> EngineImpl::Next(std::chrono::milliseconds timeout) {
  const TimePoint deadline = After(timeout);
  MutexLock lock(&next_mutex_);
  while (true) {
    auto event = stream_->Pop(deadline);
    if (!event.ok()) {
      MutexLock state_lock(&mutex_);
      NoteEnd();
      return event.status();
    }
    if (!event->has_value()) return Event(Nothing{});
    Event taken = Take(**event);
    if (!std::holds_alternative<Nothing>(taken)) return taken;
  }
}

Event EngineImpl::Take(const v1::EngineEvent& event) {
  if (event.has_bucket()) return TakePart(event.bucket());
  MutexLock lock(&mutex_);
  if (event.has_prepare()) {
    const v1::Prepare& prepare = event.prepare();
    state_.OnPrepare(Version(prepare.version()), UpdateId(prepare.update_id()));
    return Prepare{Version(prepare.version()), std::chrono::milliseconds(prepare.remaining_ms()),
                   prepare.tensor_count()};
  }
  if (event.has_committed() && state_.OnCommitted(Version(event.committed().version()))) {
    return Committed{Version(event.committed().version())};
  }
  if (event.has_aborted()) {
    const v1::Aborted& aborted = event.aborted();
    if (state_.OnAborted(Version(aborted.version()), aborted.dirty())) {
      return Aborted{Version(aborted.version()), aborted.reason(), aborted.dirty()};
    }
  }
  if (event.has_draining()) return Draining{};
  return Nothing{};
}

Event EngineImpl::TakePart(const v1::BucketReady& bucket) {
  const Version version(bucket.version());
  const UpdateId update(bucket.update_id());
  const PartSeq seq(bucket.part());
  auto part = [&]() -> absl::StatusOr<Part> {
    REFITD_ASSIGN_OR_RETURN(const auto pool, connection_->Pool(Access::kReadOnly));
    return DecodePart(bucket, std::span<const char>(pool->data(), pool->bytes()),
                      connection_->welcome().slot_bytes());
  }();
  MutexLock lock(&mutex_);
  if (!part.ok() && state_.Fail(version).ok()) {
    (void)SendFailed(version, Message(part.status()));
  }
  // After a failure parts are on their way still; nobody needs them, but their slots go back.
  if (state_.failed() || !state_.OnPart(update, seq)) {
    (void)SendAck(version, update, seq);
    return Nothing{};
  }
  return *std::move(part);
}

absl::Status EngineImpl::SendAck(Version version, UpdateId update, PartSeq part) {
  v1::EngineMessage message;
  message.mutable_ack()->set_version(version.value());
  message.mutable_ack()->set_update_id(update.value());
  message.mutable_ack()->set_part(part.value());
  return stream_->Send(std::move(message));
}

absl::Status EngineImpl::SendFailed(Version version, const std::string& reason) {
  v1::EngineMessage message;
  message.mutable_failed()->set_version(version.value());
  message.mutable_failed()->set_update_id(state_.update().value());
  message.mutable_failed()->set_reason(CleanText(reason, kMaxReasonBytes));
  return stream_->Send(std::move(message));
}

absl::Status EngineImpl::Ready(Version version) {
  MutexLock lock(&mutex_);
  NoteEnd();
  REFITD_RETURN_IF_ERROR(stream_->status());
  REFITD_RETURN_IF_ERROR(state_.Ready(version));
  v1::EngineMessage message;
  message.mutable_ready()->set_version(version.value());
  message.mutable_ready()->set_update_id(state_.update().value());
  return stream_->Send(std::move(message));
}

absl::Status EngineImpl::Ack(const Part& part) {
  MutexLock lock(&mutex_);
  REFITD_RETURN_IF_ERROR(stream_->status());
  REFITD_RETURN_IF_ERROR(state_.Ack(part.update, part.part));
  return SendAck(part.version, part.update, part.part);
}

absl::Status EngineImpl::Fail(Version version, const std::string& reason) {
  MutexLock lock(&mutex_);
  NoteEnd();
  REFITD_RETURN_IF_ERROR(stream_->status());
  REFITD_RETURN_IF_ERROR(state_.Fail(version));
  return SendFailed(version, reason);
}

Weights EngineImpl::weights() const {
  MutexLock lock(&mutex_);
  NoteEnd();
  return state_.weights();
}

std::optional<Version> EngineImpl::version() const {
  MutexLock lock(&mutex_);
  NoteEnd();
  return state_.version();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Attach(const EngineOptions& options) {
  REFITD_RETURN_IF_ERROR(CheckOptions(options));
  const TimePoint deadline = After(options.connect.wait);
  REFITD_ASSIGN_OR_RETURN(auto connection, Connection::Open(options.connect, deadline));
  auto engine = std::make_unique<EngineImpl>(std::move(connection), options.held_version);
  REFITD_RETURN_IF_ERROR(engine->Start(options, deadline));
  return std::unique_ptr<Engine>(std::move(engine));
}

}  // namespace refitd::client
