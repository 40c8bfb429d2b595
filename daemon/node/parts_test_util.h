// A daemon for the tests of its parts: every part is real, host memory is moved by the host
// transport, and other daemons link to it over loopback. Members attach by calls, not over gRPC.
//
// Not thread-safe, but for Inbox and Answer.
#ifndef REFITD_DAEMON_NODE_PARTS_TEST_UTIL_H_
#define REFITD_DAEMON_NODE_PARTS_TEST_UTIL_H_

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "daemon/node/actions.h"
#include "daemon/node/arrivals.h"
#include "daemon/node/daemon.h"
#include "daemon/node/group_life.h"
#include "daemon/node/joiners.h"
#include "daemon/node/joining.h"
#include "daemon/node/layouts.h"
#include "daemon/node/members.h"
#include "daemon/node/operators.h"
#include "daemon/node/regions.h"
#include "daemon/node/trainer_calls.h"
#include "daemon/services/peer_service.h"
#include "transport/base/eventually.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"
#include "transport/host/host_transport.h"

namespace refitd {

inline constexpr int64_t kSlotBytes = 4096;
// How long members wait; far longer than any step takes.
inline constexpr Duration kPatience = std::chrono::minutes(1);

// The stream of a member: keeps what the member is told.
class Inbox : public MemberSink {
 public:
  void Send(MemberNews news) override {
    MutexLock lock(&mutex_);
    news_.push_back(std::move(news));
  }
  void End(absl::Status status) override {
    MutexLock lock(&mutex_);
    end_ = std::move(status);
  }
  bool welcomed() { return Last<WelcomeNews>().has_value(); }
  WelcomeNews welcome() { return *Last<WelcomeNews>(); }
  // The last news of this kind; nullopt: none came.
  template <typename News>
  std::optional<News> Last() {
    MutexLock lock(&mutex_);
    std::optional<News> last;
    for (const MemberNews& news : news_) {
      if (const auto* found = std::get_if<News>(&news)) last = *found;
    }
    return last;
  }
  std::optional<absl::Status> end() {
    MutexLock lock(&mutex_);
    return end_;
  }
  // Waits for the end of the stream and returns its status.
  absl::Status Ended() {
    REQUIRE(Eventually([this] { return end().has_value(); }));
    return *end();
  }

 private:
  Mutex mutex_;
  std::vector<MemberNews> news_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
};

// The answer to one call. Aborts the process at a second answer.
class Answer {
 public:
  ReplyFunction function() {
    return [kept = kept_](const absl::Status& status, const ReplyPayload& payload) {
      MutexLock lock(&kept->mutex);
      REFITD_CHECK(!kept->status.has_value());
      kept->status = status;
      kept->payload = payload;
    };
  }
  bool came() const {
    MutexLock lock(&kept_->mutex);
    return kept_->status.has_value();
  }
  // Waits for the answer.
  absl::Status status() const {
    REQUIRE(Eventually([this] { return came(); }));
    MutexLock lock(&kept_->mutex);
    return *kept_->status;
  }
  template <typename Payload>
  Payload As() const {
    REQUIRE(status().ok());
    MutexLock lock(&kept_->mutex);
    return std::get<Payload>(kept_->payload);
  }

 private:
  struct Kept {
    Mutex mutex;
    std::optional<absl::Status> status ABSL_GUARDED_BY(mutex);
    ReplyPayload payload ABSL_GUARDED_BY(mutex);
  };
  const std::shared_ptr<Kept> kept_ = std::make_shared<Kept>();
};

inline GroupSpec Spec(int slots = 2) {
  GroupSpec spec;
  spec.slot_bytes = kSlotBytes;
  spec.slots = slots;
  return spec;
}

struct Attached {
  MemberId id;
  std::shared_ptr<Inbox> inbox;

  Caller caller() const {
    const WelcomeNews welcome = inbox->welcome();
    return {{}, welcome.token, welcome.incarnation, static_cast<int>(welcome.protocol)};
  }
  Token token() const {
    Token token{};
    const std::string bytes = inbox->welcome().token;
    REFITD_CHECK(bytes.size() == token.size());
    std::copy(bytes.begin(), bytes.end(), token.begin());
    return token;
  }
};

// Memory that a member shares: a memfd that can't shrink, and its mapping.
struct SharedMemory {
  explicit SharedMemory(int64_t size)
      : fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING)), bytes(size) {
    REFITD_CHECK(ftruncate(fd.get(), bytes) == 0);
    REFITD_CHECK(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    mapping = *HostRegion::Map(fd, bytes, Access::kReadWrite, false);
  }
  char* data() const { return mapping->data(); }

  UniqueFd fd;
  int64_t bytes;
  std::shared_ptr<HostRegion> mapping;
};

class DaemonParts {
 public:
  explicit DaemonParts(const std::string& id = "a", DaemonOptions options = {}) {
    processes_ = *ProcessWatch::Create();
    options.daemon_id = id;
    const PeerDialer dialer = [](PeerDial dial, PeerLinkCallbacks callbacks) {
      dial.credentials = grpc::InsecureChannelCredentials();
      return PeerLink::Dial(std::move(dial), std::move(callbacks));
    };
    const int64_t message_bytes = options.message_bytes;
    daemon_ = std::make_unique<Daemon>(std::move(options), MakeHostTransport({.threads = 1}),
                                       processes_.get(), nullptr, dialer);
    links_ = std::make_unique<PeerService>(&daemon_->joiners(), message_bytes);
    grpc::ServerBuilder builder;
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(links_.get());
    server_ = builder.BuildAndStart();
    REFITD_CHECK(server_ != nullptr && port_ != 0);
  }
  ~DaemonParts() {
    daemon_->CheckInvariants();
    daemon_->Drain();
    daemon_->Finish(std::chrono::steady_clock::now());
    daemon_->CheckInvariants();
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
    daemon_.reset();
  }
  DaemonParts(const DaemonParts&) = delete;
  DaemonParts& operator=(const DaemonParts&) = delete;

  // ---- the parts ----
  Daemon& daemon() { return *daemon_; }
  DaemonState& state() { return daemon_->state_; }
  GroupLife& life() { return *daemon_->life_; }
  Members& members() { return daemon_->members(); }
  Joining& joining() { return *daemon_->joining_; }
  Joiners& joiners() { return daemon_->joiners(); }
  Arrivals& arrivals() { return daemon_->arrivals(); }
  Regions& regions() { return daemon_->regions(); }
  Layouts& layouts() { return daemon_->layouts(); }
  TrainerCalls& calls() { return daemon_->trainer_calls(); }
  Operators& operators() { return daemon_->operators(); }

  std::string address() const { return fmt::format("127.0.0.1:{}", port_); }
  int groups() { return static_cast<int>(operators().Groups().size()); }
  bool Has(const std::string& group) { return operators().Group(group).ok(); }
  int64_t pool_bytes() { return operators().Describe().pool_bytes; }

  // ---- members ----
  // `at`: the coordinator; null: this daemon.
  Attached AttachTrainer(const std::string& group, std::optional<GroupSpec> spec = Spec(),
                         const DaemonParts* at = nullptr, Duration wait = kPatience) {
    return Attach(Trainer(), group, std::move(spec), at, wait);
  }
  // Attaches an engine rank with staged delivery, by default alone in its instance.
  Attached AttachEngine(const std::string& group, const std::string& instance,
                        std::optional<GroupSpec> spec, const DaemonParts* at = nullptr,
                        Duration wait = kPatience, int rank = 0, int world_size = 1,
                        const std::vector<std::string>& manifest = {}) {
    return Attach(Engine(instance, DeliveryMode::kStaged, rank, world_size, manifest), group,
                  std::move(spec), at, wait);
  }
  // Attaches an engine rank whose pieces are written in place, alone in its instance.
  Attached AttachRegistered(const std::string& group, const std::string& instance = "i") {
    return Attach(Engine(instance, DeliveryMode::kRegistered), group, Spec(), nullptr, kPatience);
  }
  static Arrival Trainer() {
    Arrival arrival;
    arrival.identity = TrainerIdentity();
    return arrival;
  }
  static Arrival Engine(const std::string& instance, DeliveryMode delivery, int rank = 0,
                        int world_size = 1, const std::vector<std::string>& manifest = {}) {
    EngineIdentity engine;
    engine.instance = instance;
    engine.rank = rank;
    engine.world_size = world_size;
    engine.delivery = delivery;
    if (!manifest.empty()) engine.manifest.emplace();
    for (const std::string& tensor : manifest) {
      engine.manifest->push_back({tensor, DType::kFloat32, {1}});
    }
    Arrival arrival;
    arrival.record.engine = true;
    arrival.record.instance = instance;
    arrival.record.reads_slots = ReadsSlots(delivery);
    arrival.identity = std::move(engine);
    return arrival;
  }
  Attached Attach(Arrival arrival, const std::string& group, std::optional<GroupSpec> spec,
                  const DaemonParts* at, Duration wait) {
    arrival.record.group = group;
    if (arrival.record.device.empty()) arrival.record.device = "host";
    arrival.spec = std::move(spec);
    if (at != nullptr) arrival.coordinator = at->address();
    arrival.wait = wait;
    auto inbox = std::make_shared<Inbox>();
    return {arrivals().Attach(std::move(arrival), inbox), inbox};
  }

  // ---- what members do ----
  absl::StatusOr<RegionId> Register(const Attached& member, const SharedMemory& memory) {
    return regions().RegisterRegion(member.token(), {}, UniqueFd(dup(memory.fd.get())),
                                    RegionKind::kMemfd, memory.bytes);
  }
  Answer Call(const Attached& trainer, absl::StatusOr<TrainerEvent> event) {
    Answer answer;
    calls().Call(daemon_->NewCall(), trainer.caller(), std::move(event), answer.function());
    return answer;
  }
  Answer Begin(const Attached& trainer, int64_t version, int64_t tensors = 1) {
    BeginEvent begin;
    begin.version = Version(version);
    begin.tensor_count = tensors;
    begin.duration = kPatience;
    return Call(trainer, begin);
  }
  // The engine rank answers the last Prepare.
  void Ready(const Attached& engine) {
    const UpdateId update = engine.inbox->Last<SendPrepare>()->update;
    members().Happened(engine.id, ReadyEvent{engine.id, update});
  }

 private:
  std::unique_ptr<ProcessWatch> processes_;
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<PeerService> links_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

// The tensor "w", one byte an element, that a layout has in one piece of its first region.
inline Layout LayoutOf(RegionId region, int64_t elements, uint64_t generation = 1) {
  Layout layout;
  layout.tensors = {{"w", DType::kUint8, {elements}}};
  Piece piece;
  piece.box = {{0}, {elements}};
  piece.region = region;
  piece.strides = {1};
  layout.pieces = {piece};
  layout.binding_generation = generation;
  return layout;
}

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_PARTS_TEST_UTIL_H_
