// Members by hand: generated stubs, Attach streams and the descriptor socket. Only what the caller
// says is filled in or checked. The client library is not used, so that a test determines exactly
// what goes over the wire, even what no client would send.
//
// Every wait ends at kDeadline; a call that reaches it returns nullopt, or DEADLINE_EXCEEDED with
// "the test's own deadline" in its message. Each stream has one reading thread; calls may come from
// any thread.
#ifndef REFITD_TESTS_E2E_RAW_CLIENT_H_
#define REFITD_TESTS_E2E_RAW_CLIENT_H_

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "proto/convert.h"
#include "refitd/v1/engine.grpc.pb.h"
#include "refitd/v1/operator.grpc.pb.h"
#include "refitd/v1/trainer.grpc.pb.h"
#include "tests/e2e/model.h"
#include "transport/base/unique_fd.h"
#include "transport/host/descriptor_format.h"
#include "transport/host/memory.h"

namespace refitd::e2e {

// This is far longer than any step takes; only a failing test reaches it.
inline constexpr std::chrono::seconds kDeadline{30};

template <typename Response>
struct Outcome {
  grpc::Status status;
  Response response;
  bool ok() const { return status.ok(); }
};

std::shared_ptr<grpc::Channel> ConnectTo(const std::string& socket);

// One Attach stream. `handler` gets each event on the reading thread, before the event is queued.
template <typename Message, typename Event>
class EventStream {
 public:
  using Call = grpc::ClientReaderWriter<Message, Event>;
  using Handler = std::function<void(const Event&)>;

  EventStream(const std::function<std::unique_ptr<Call>(grpc::ClientContext*)>& start,
              Handler handler)
      : call_(start(&context_)), handler_(std::move(handler)) {
    reader_ = std::thread([this] { Read(); });
  }
  ~EventStream() { Stop(); }
  // Ends the stream, and returns when the handler is called no more.
  void Stop() {
    context_.TryCancel();
    if (reader_.joinable()) reader_.join();
  }

  bool Write(const Message& message) {
    std::lock_guard lock(write_mutex_);
    return call_->Write(message);
  }
  void Cancel() { context_.TryCancel(); }
  bool ended() const {
    std::lock_guard lock(mutex_);
    return ended_;
  }

  // The next event of one of these kinds; earlier events of other kinds are dropped. nullopt: the
  // stream ended or the deadline passed first.
  std::optional<Event> WaitFor(typename Event::KindCase kind) { return WaitForAny({kind}); }
  std::optional<Event> WaitForAny(const std::vector<typename Event::KindCase>& kinds) {
    const auto deadline = std::chrono::steady_clock::now() + kDeadline;
    std::unique_lock lock(mutex_);
    for (;;) {
      while (!events_.empty()) {
        Event event = std::move(events_.front());
        events_.pop_front();
        if (std::find(kinds.begin(), kinds.end(), event.kind_case()) != kinds.end()) return event;
      }
      if (ended_ || cond_.wait_until(lock, deadline) == std::cv_status::timeout)
        return std::nullopt;
    }
  }
  // The status with which the stream ended.
  std::optional<grpc::Status> WaitEnd() {
    const auto deadline = std::chrono::steady_clock::now() + kDeadline;
    std::unique_lock lock(mutex_);
    while (!ended_) {
      if (cond_.wait_until(lock, deadline) == std::cv_status::timeout) return std::nullopt;
    }
    return end_;
  }

 private:
  void Read() {
    Event event;
    while (call_->Read(&event)) {
      if (handler_) handler_(event);
      std::lock_guard lock(mutex_);
      events_.push_back(std::move(event));
      cond_.notify_all();
    }
    const grpc::Status end = call_->Finish();
    std::lock_guard lock(mutex_);
    ended_ = true;
    end_ = end;
    cond_.notify_all();
  }

  grpc::ClientContext context_;
  const std::unique_ptr<Call> call_;
  const Handler handler_;
  std::mutex write_mutex_;
  mutable std::mutex mutex_;
  std::condition_variable cond_;
  std::deque<Event> events_;
  bool ended_ = false;
  grpc::Status end_;
  std::thread reader_;
};

// Memory of this process in a sealed memfd.
struct SharedMemory {
  UniqueFd fd;
  std::shared_ptr<HostRegion> mapping;
  uint64_t region_id = 0;  // valid once the memory is registered
  char* data() const { return mapping->data(); }
};
SharedMemory MakeMemory(int64_t bytes);

// One connection to the descriptor socket.
class Descriptors {
 public:
  Descriptors(const std::string& path, const std::string& token);
  // Sends `request` as it is, with these descriptors. nullopt: no reply, since the daemon closed
  // the connection.
  std::optional<DescriptorReply> Ask(const DescriptorRequest& request, const std::vector<int>& fds,
                                     UniqueFd* received = nullptr);
  std::optional<DescriptorReply> Send(const void* data, size_t bytes, const std::vector<int>& fds,
                                      UniqueFd* received);
  // A request of this kind with the token filled in.
  DescriptorRequest Request(DescriptorRequestKind kind) const;
  // Registers `memory`; the reply may be a refusal.
  std::optional<DescriptorReply> Register(int fd, int64_t bytes);

 private:
  const std::string token_;
  std::mutex mutex_;  // one request at a time
  UniqueFd socket_;
};

// The part that trainers and engines have in common.
template <typename Stub, typename Message, typename Event>
class RawMember {
 public:
  using Stream = EventStream<Message, Event>;

  Stream& events() { return *stream_; }
  const v1::Welcome& welcome() const { return welcome_; }
  // OK once the member is welcomed; else the status with which the stream ended.
  grpc::Status attached() {
    if (welcomed_) return grpc::Status::OK;
    welcomed_ = stream_->WaitFor(Event::kWelcome).has_value();
    if (welcomed_) return grpc::Status::OK;
    auto end = stream_->WaitEnd();
    return end.value_or(
        grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED, "no Welcome by the test's own deadline"));
  }
  Descriptors& descriptors() {
    std::lock_guard lock(descriptors_mutex_);
    if (descriptors_ == nullptr) {
      descriptors_ =
          std::make_unique<Descriptors>(welcome_.descriptor_socket(), welcome_.lease().token());
    }
    return *descriptors_;
  }
  // New memory, registered with the daemon; region_id 0: registering was refused.
  SharedMemory NewMemory(int64_t bytes) {
    SharedMemory memory = MakeMemory(bytes);
    const auto reply = descriptors().Register(memory.fd.get(), bytes);
    if (reply.has_value() && reply->code == 0) memory.region_id = reply->region_id;
    return memory;
  }
  // The group's staging pool, mapped with `access`; null: refused.
  std::shared_ptr<HostRegion> MapPool(Access access) {
    UniqueFd fd;
    const auto reply =
        descriptors().Ask(descriptors().Request(DescriptorRequestKind::kMapPool), {}, &fd);
    if (!reply.has_value() || reply->code != 0 || !fd.valid()) return nullptr;
    auto mapped = HostRegion::Map(fd, reply->bytes, access, false);
    return mapped.ok() ? *mapped : nullptr;
  }

  // Makes any unary call; fills in the lease if the request has none.
  template <typename Request, typename Response>
  Outcome<Response> Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                      Response*),
                         Request request) {
    if (!request.has_lease()) *request.mutable_lease() = welcome_.lease();
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kDeadline);
    Outcome<Response> outcome;
    outcome.status = (stub_.get()->*method)(&context, request, &outcome.response);
    return outcome;
  }

  Outcome<v1::LayoutRegistered> Register(const Layout& layout) {
    return RegisterChunks(EncodeLayout(layout, welcome_.lease(), 1 << 20));
  }
  Outcome<v1::LayoutRegistered> RegisterChunks(const std::vector<v1::LayoutChunk>& chunks) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kDeadline);
    Outcome<v1::LayoutRegistered> outcome;
    const auto writer = stub_->RegisterLayout(&context, &outcome.response);
    for (const v1::LayoutChunk& chunk : chunks) {
      if (!writer->Write(chunk)) break;
    }
    writer->WritesDone();
    outcome.status = writer->Finish();
    return outcome;
  }

 protected:
  explicit RawMember(std::unique_ptr<Stub> stub) : stub_(std::move(stub)) {}

  // Runs on the reading thread, before the event can be waited for.
  void SeeWelcome(const Event& event) {
    if (event.has_welcome()) welcome_ = event.welcome();
  }

  const std::unique_ptr<Stub> stub_;
  v1::Welcome welcome_;  // constant once the member is welcomed
  bool welcomed_ = false;
  std::mutex descriptors_mutex_;
  std::unique_ptr<Descriptors> descriptors_;
  std::unique_ptr<Stream> stream_;
};

v1::GroupSpec Spec(int trainer_ranks = 1, int min_instances = 1, int64_t slot_bytes = 65'536,
                   int slots = 4);

// A trainer rank; says hello when constructed.
class RawTrainer : public RawMember<v1::Trainer::Stub, v1::TrainerMessage, v1::TrainerEvent> {
 public:
  RawTrainer(const std::shared_ptr<grpc::Channel>& channel, const v1::TrainerHello& hello);
  static v1::TrainerHello Hello(const std::string& group,
                                std::optional<v1::GroupSpec> spec = Spec(), int rank = 0,
                                int world_size = 1);

  Outcome<v1::BeginResponse> Begin(const v1::BeginRequest& request) {
    return Call(&v1::Trainer::Stub::Begin, request);
  }
  Outcome<v1::BeginResponse> Begin(int64_t version,
                                   v1::Verification verification = v1::VERIFICATION_UNSPECIFIED);
  Outcome<v1::PushBucketResponse> Push(int64_t version, v1::Bucket bucket,
                                       const std::string& request_id = "");
  Outcome<v1::CommitResponse> Commit(const v1::CommitRequest& request) {
    return Call(&v1::Trainer::Stub::Commit, request);
  }
  Outcome<v1::CommitResponse> Commit(int64_t version, int64_t buckets,
                                     const std::string& request_id = "");
  Outcome<v1::CommitResponse> Refit(const v1::RefitRequest& request) {
    return Call(&v1::Trainer::Stub::Refit, request);
  }
  Outcome<v1::CommitResponse> Refit(int64_t version, uint64_t binding_generation,
                                    int64_t buckets = 0);
  Outcome<v1::AbortResponse> Abort(int64_t version, const std::string& reason);
  Outcome<v1::LeaseSlotResponse> LeaseSlot(int64_t version, int64_t wait_ms = 0);
  Outcome<v1::ReleaseSlotResponse> ReleaseSlot(uint32_t slot, uint64_t grant);
  Outcome<v1::GetUpdateResponse> GetUpdate(const std::string& group, int64_t version);
};

struct EngineOptions {
  bool auto_ready = true;  // answers Prepare at once
  bool auto_ack = true;    // acknowledges parts after copying them
};

// An engine rank's knowledge of its own weights, from the daemon's messages alone.
struct Belief {
  bool good = true;      // the rank holds `version` in full; else it is dirty or unknown
  int64_t version = 0;   // 0: the weights from before the first update
  bool unknown = false;  // the rank answered Ready, and its stream ended before the outcome
  bool attached = true;
};

// An engine rank; says hello when constructed. The reading thread copies loader parts into
// `loaded_tensors` and checks what every engine may rely on.
class RawEngine : public RawMember<v1::Engine::Stub, v1::EngineMessage, v1::EngineEvent> {
 public:
  RawEngine(const std::shared_ptr<grpc::Channel>& channel, const v1::EngineHello& hello,
            EngineOptions options = {});
  // The stream's thread uses the members of this class, and stream_ itself: unique_ptr::reset would
  // clear that pointer before the thread has ended.
  ~RawEngine() { stream_->Stop(); }
  static v1::EngineHello Hello(const std::string& group, const std::string& instance, int rank = 0,
                               int world_size = 1, v1::Delivery delivery = v1::DELIVERY_IN_PLACE,
                               std::optional<v1::GroupSpec> spec = Spec());

  bool Ready(int64_t version);
  bool Ack(int64_t version, int64_t part);
  bool Fail(int64_t version, const std::string& reason);

  // From the next event on the engine answers by itself, or keeps back Ready or acknowledgements.
  // Release() sends the answers that were kept back.
  void Hold(bool ready, bool ack);
  void Release();
  // False: kDeadline passed first, or the stream ended.
  bool AwaitPrepare(int64_t version);
  bool AwaitPart(int64_t version);
  // Waits for the outcome of the update that the engine is prepared for, and for an outcome of
  // `version` or later; ends early at kDeadline or when the stream ends.
  Belief AwaitBelief(int64_t version);

  // Loader delivery: empty if exactly these tensors were delivered since the last Prepare, each
  // byte once; else what is wrong.
  std::string LoadedDifference(const Model& model, const std::vector<std::string>& bytes);
  int64_t parts_seen();

 private:
  void On(const v1::EngineEvent& event);
  void Take(const v1::BucketReady& part);

  // False: the stream ended or kDeadline passed first.
  bool Await(const std::function<bool()>& condition);

  std::atomic<uint64_t> update_id_{0};  // the id of the last Prepare, which answers carry
  std::mutex told_mutex_;
  std::condition_variable told_cond_;
  EngineOptions options_;
  int64_t prepared_ = 0;  // the version of the last Prepare; 0: none, or its outcome came
  bool answered_ = false;
  int64_t part_of_ = 0;                                 // the version of the last part
  int64_t outcome_of_ = 0;                              // the highest version with an outcome
  std::vector<std::pair<int64_t, int64_t>> kept_acks_;  // the version and part of each
  Belief belief_;
  std::mutex loaded_mutex_;
  struct LoadedTensor {
    std::string bytes;
    std::string times;  // for each byte: how often it was delivered
  };
  std::map<std::string, LoadedTensor> loaded_tensors_;
  // The bytes that the previous update delivered; an abort may leave them valid.
  std::map<std::string, LoadedTensor> before_;
  std::string loaded_error_;
  int64_t next_part_ = 0;
  std::shared_ptr<HostRegion> pool_;
};

// An in-place engine rank with its memory, checked byte by byte.
class Holder {
 public:
  // Attaches and registers; throws std::runtime_error naming what was refused.
  Holder(const std::shared_ptr<grpc::Channel>& channel, const v1::EngineHello& hello,
         const Held& held, EngineOptions options = {});

  RawEngine& engine() { return engine_; }
  const Layout& layout() const { return layout_; }
  SharedMemory& memory() { return memory_; }
  // Empty: memory is as before the first update, with these tensors written into the boxes (without
  // tensors: no box was written).
  std::string Difference(const Model& model, const std::vector<std::string>& bytes) const;
  std::string DifferenceFromEmpty() const;
  // Address of the first element of the tensor's first piece.
  char* Tensor(const std::string& name) const;

 private:
  RawEngine engine_;
  Layout layout_;
  SharedMemory memory_;
  int64_t bytes_ = 0;
};

}  // namespace refitd::e2e

#endif  // REFITD_TESTS_E2E_RAW_CLIENT_H_
