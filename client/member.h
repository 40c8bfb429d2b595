// The parts that trainers and engines have in common: a lease, memory shared with the daemon, and
// attaching again after the daemon went away.
#ifndef REFITD_CLIENT_MEMBER_H_
#define REFITD_CLIENT_MEMBER_H_

#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "client/attach_stream.h"
#include "client/call.h"
#include "client/connection.h"
#include "client/layout_upload.h"
#include "client/reattach.h"
#include "proto/convert.h"
#include "proto/protocol.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"

namespace refitd::client {

// Fills in the fields that every member's hello has.
template <typename Hello>
void SayHello(const ConnectOptions& connect, int rank, int world_size, TimePoint deadline,
              Hello* hello) {
  hello->set_protocol(static_cast<v1::ProtocolVersion>(kProtocol));
  hello->set_group(connect.group);
  if (connect.spec) *hello->mutable_spec() = SpecToProto(*connect.spec);
  hello->set_coordinator(connect.coordinator);
  hello->set_rank(rank);
  hello->set_world_size(world_size);
  hello->set_wait_ms(
      std::chrono::duration_cast<std::chrono::milliseconds>(Until(deadline)).count());
  hello->set_client(CleanText(Escaped(connect.client), kMaxClientBytes));
  hello->set_pid(::getpid());
  hello->mutable_device()->set_name(connect.device);
}

// One lease and its connection.
template <typename Service, typename Out, typename In>
struct Lease {
  using Stream = AttachStream<Out, In>;

  std::shared_ptr<Connection> connection;
  std::unique_ptr<typename Service::Stub> stub;
  std::shared_ptr<Stream> stream;

  Lease() = default;
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() { Close(); }

  // Ends the lease at the daemon, whether Welcome came or not.
  void Close() {
    if (connection == nullptr) return;
    connection->Detach();
    if (stream == nullptr) return;
    Out message;
    message.mutable_detach();
    stream->Close(std::move(message), kCleanupLimit);
  }

  StartUpload Uploader() const {
    return [stub = stub->async()](auto* context, auto* response, auto* reactor) {
      stub->RegisterLayout(context, response, reactor);
    };
  }

  // Attaches over `connection`, and calls `welcomed` after the daemon's Welcome. Requesting `stop`
  // ends the lease until this returns.
  absl::Status Attach(const ConnectOptions& connect, Out hello, typename Stream::Handler handler,
                      std::function<void()> ended, TimePoint deadline, const std::stop_token& stop,
                      const std::function<absl::Status()>& welcomed) {
    stub = Service::NewStub(connection->channel());
    stream = Stream::Start(
        [&](grpc::ClientContext* context, typename Stream::Reactor* reactor) {
          stub->async()->Attach(context, reactor);
        },
        std::move(hello),
        {.daemon = connection->socket(), .handler = std::move(handler), .ended = std::move(ended)});
    const std::stop_callback cancel(stop, [this] { stream->Cancel(); });
    REFITD_ASSIGN_OR_RETURN(const In* const event, stream->Front(deadline + connect.call_margin));
    if (event == nullptr) {
      return Error(absl::StatusCode::kDeadlineExceeded,
                   "Attach: the daemon at {} did not answer in time", connection->socket());
    }
    if (!event->has_welcome()) {
      return Error(absl::StatusCode::kInternal, "Attach: the daemon's first event is no Welcome");
    }
    REFITD_RETURN_IF_ERROR(connection->Adopt(event->welcome()));
    stream->PopFront();
    return welcomed();
  }
};

// A member that attaches again after a loss, if its options say so. `Interface` is Trainer or
// Engine, `MemberLease` a Lease. The destructor of a derived class calls StopReattaching first.
template <typename Interface, typename MemberLease>
class Member : public Interface {
 public:
  absl::StatusOr<std::shared_ptr<Region>> NewRegion(int64_t bytes) final {
    return Share([&] { return regions_->New(bytes); });
  }
  absl::StatusOr<std::shared_ptr<Region>> AddMemfd(UniqueFd memfd, int64_t bytes) final {
    return Share([&] { return regions_->AddMemfd(std::move(memfd), bytes); });
  }
  int reattachments() const final {
    MutexLock lock(&mutex_);
    return reattachments_;
  }

  // Gets the first lease.
  absl::Status Start() {
    const TimePoint deadline = After(connect_.wait);
    if (!reattaches()) return AttachFirst(deadline);
    StartReattacher();
    return AttachUntil(deadline, seed_, [&] { return AttachFirst(deadline); });
  }

 protected:
  // `name` and `rank` tell the member from others of its group.
  Member(const ConnectOptions& connect, bool engine, std::string_view name, int rank)
      : connect_(connect),
        seed_(SeedOf(connect.group, name, rank)),
        regions_(std::make_shared<Regions>(reattaches(), RegionOwner{engine, connect.device})),
        registration_(regions_, reattaches()) {}

  absl::StatusOr<std::shared_ptr<Region>> AddDeviceBlock(const std::string& handle,
                                                         int64_t bytes) final {
    return Share([&] { return regions_->AddBlock(handle, bytes); });
  }
  absl::StatusOr<std::shared_ptr<Region>> AddDeviceMemory(UniqueFd exported, int64_t bytes,
                                                          uint64_t address) final {
    return Share([&] { return regions_->AddExported(std::move(exported), bytes, address); });
  }

  bool reattaches() const { return connect_.reattach.count() > 0; }
  // Ends the thread that attaches again; after this no other thread changes lease_.
  void StopReattaching() { reattacher_.reset(); }

  virtual std::shared_ptr<MemberLease> NewLease() = 0;
  // Attaches over the lease's connection.
  virtual absl::Status AttachOver(MemberLease* lease, TimePoint deadline,
                                  const std::stop_token& stop) = 0;
  // Whether lease_ is lost and all its events were dealt with.
  virtual bool IsLost() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) = 0;
  // Called when the member has attached again. `lease` takes the place of lease_ next; `generation`
  // is the binding generation of the layout that was registered again, 0: none.
  virtual void TakeOver(MemberLease* lease, uint64_t generation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) = 0;

  const ConnectOptions connect_;
  const uint64_t seed_;
  const std::shared_ptr<Regions> regions_;
  std::function<void()> wake_;  // constant after Start; null: the member does not attach again

  Mutex register_mutex_;  // locked before mutex_
  Registration registration_ ABSL_GUARDED_BY(register_mutex_);

  mutable Mutex mutex_;
  mutable CondVar changed_;
  // The newest lease, also after it is lost. Null: the member has never been attached.
  std::shared_ptr<MemberLease> lease_ ABSL_GUARDED_BY(mutex_);
  mutable absl::Status ended_ ABSL_GUARDED_BY(mutex_);  // why the member does not attach again

 private:
  // Makes a region known to the daemon. If the daemon is gone and the member attaches again, makes
  // the region known to the next daemon.
  template <typename MakeRegion>
  absl::StatusOr<std::shared_ptr<Region>> Share(MakeRegion make) {
    std::shared_ptr<MemberLease> lease;
    {
      MutexLock lock(&mutex_);
      REFITD_RETURN_IF_ERROR(reattaches() ? ended_ : lease_->stream->status());
      lease = lease_;
    }
    absl::StatusOr<std::shared_ptr<Region>> region = make();
    if (region.ok()) return region;
    REFITD_RETURN_IF_ERROR(
        lease->stream->LeaseEndBehind("registering a region", region.status(), kCleanupLimit));
    return region;
  }

  absl::Status AttachFirst(TimePoint deadline) {
    std::shared_ptr<MemberLease> lease = NewLease();
    REFITD_ASSIGN_OR_RETURN(lease->connection, Connection::Open(connect_, deadline));
    REFITD_RETURN_IF_ERROR(AttachOver(lease.get(), deadline, {}));
    REFITD_RETURN_IF_ERROR(regions_->MoveTo(lease->connection, {}));
    {
      MutexLock lock(&mutex_);
      lease_ = std::move(lease);
    }
    if (wake_) wake_();  // the lease may have ended meanwhile
    return absl::OkStatus();
  }

  void StartReattacher() {
    Reattacher::Hooks hooks;
    hooks.lost = [this]() -> std::optional<absl::Status> {
      MutexLock lock(&mutex_);
      if (lease_ == nullptr || !IsLost()) return std::nullopt;
      return lease_->stream->status();
    };
    hooks.attach = [this](TimePoint deadline, const std::stop_token& stop) {
      return Reattach(deadline, stop);
    };
    hooks.give_up = [this](absl::Status why) {
      MutexLock lock(&mutex_);
      ended_ = std::move(why);
      changed_.NotifyAll();
    };
    reattacher_ = std::make_unique<Reattacher>(DaemonName(connect_), connect_.reattach,
                                               std::max<Duration>(connect_.wait, kAttemptLimit),
                                               seed_, std::move(hooks));
    wake_ = reattacher_->Waker();
  }

  absl::Status Reattach(TimePoint deadline, const std::stop_token& stop) {
    std::shared_ptr<MemberLease> lease = NewLease();
    REFITD_ASSIGN_OR_RETURN(lease->connection, Connection::OpenNow(connect_, deadline, stop));
    REFITD_RETURN_IF_ERROR(AttachOver(lease.get(), deadline, stop));
    REFITD_RETURN_IF_ERROR(regions_->MoveTo(lease->connection, stop));
    MutexLock register_lock(&register_mutex_);
    REFITD_ASSIGN_OR_RETURN(
        const uint64_t generation,
        registration_.RegisterAgain(lease->connection.get(), lease->Uploader(), stop));
    MutexLock lock(&mutex_);
    TakeOver(lease.get(), generation);
    // The lost lease is destroyed after unlocking, or with the last object that came from it.
    lease_.swap(lease);
    ++reattachments_;
    changed_.NotifyAll();
    return absl::OkStatus();
  }

  int reattachments_ ABSL_GUARDED_BY(mutex_) = 0;
  std::unique_ptr<Reattacher> reattacher_;
};

}  // namespace refitd::client

#endif  // REFITD_CLIENT_MEMBER_H_
