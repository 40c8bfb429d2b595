// A daemon for the tests of its parts: every part is real, host memory is moved by the host
// transport, and other daemons link to it over loopback. Members attach by calls, not over gRPC.
//
// Not thread-safe, but for Inbox and Answer.
#ifndef REFITD_DAEMON_NODE_PARTS_TEST_UTIL_H_
#define REFITD_DAEMON_NODE_PARTS_TEST_UTIL_H_

#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "daemon/node/daemon.h"
#include "daemon/node/life.h"
#include "daemon/node/member_calls.h"
#include "daemon/node/member_memory.h"
#include "daemon/node/operators.h"
#include "daemon/node/peer_client.h"
#include "daemon/node/peer_server.h"
#include "daemon/sockets/process_watch.h"
#include "transport/base/eventually_testing.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"
#include "transport/host/memory.h"
#include "transport/transport.h"
#include "transport/wire.h"

namespace grpc {
class Server;
}  // namespace grpc

namespace refitd {

class PeerService;

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
  // The news of this kind, in order.
  template <typename News>
  std::vector<News> All() {
    MutexLock lock(&mutex_);
    std::vector<News> all;
    for (const MemberNews& news : news_) {
      if (const auto* found = std::get_if<News>(&news)) all.push_back(*found);
    }
    return all;
  }
  // The last news of this kind; nullopt: none came.
  template <typename News>
  std::optional<News> Last() {
    const std::vector<News> all = All<News>();
    return all.empty() ? std::nullopt : std::optional(all.back());
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

inline GroupSpec Spec(int slots = 2, int trainer_ranks = 1) {
  GroupSpec spec;
  spec.slot_bytes = kSlotBytes;
  spec.slots = slots;
  spec.trainer_ranks = trainer_ranks;
  return spec;
}

// A daemon that serves GPUs with this memory.
inline DaemonOptions WithGpus(std::shared_ptr<DeviceMemory> memory, DaemonOptions options = {}) {
  options.devices.memory = std::move(memory);
  return options;
}

struct Attached {
  MemberId id;
  std::shared_ptr<Inbox> inbox;
  Peer peer{};

  Caller caller() const {
    const WelcomeNews welcome = inbox->welcome();
    return {peer, welcome.token, welcome.incarnation, static_cast<int>(welcome.protocol)};
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
  explicit SharedMemory(int64_t size);
  char* data() const { return mapping->data(); }

  UniqueFd fd;
  int64_t bytes;
  std::shared_ptr<HostRegion> mapping;
};

// The objects that a test gives to its daemon, beside the options.
struct DaemonInsides {
  std::unique_ptr<Transport> transport{};  // null: that of host memory
  std::unique_ptr<Wire> wire{};            // null: none
};

class DaemonParts {
 public:
  explicit DaemonParts(const std::string& id = "a", DaemonOptions options = {},
                       DaemonInsides insides = {});
  ~DaemonParts();
  DaemonParts(const DaemonParts&) = delete;
  DaemonParts& operator=(const DaemonParts&) = delete;

  // ---- the parts ----
  Daemon& daemon() { return *daemon_; }
  DaemonState& state() { return daemon_->state_; }
  PeerClient& peer_client() { return daemon_->peer_client_; }
  PeerServer& peer_server() { return daemon_->peer_server(); }
  MemberMemory& memory() { return daemon_->memory(); }
  MemberCalls& calls() { return daemon_->calls(); }
  Operators& operators() { return daemon_->operators(); }
  const ProcessWatch& processes() const { return *processes_; }

  std::string address() const { return fmt::format("127.0.0.1:{}", port_); }
  int groups() { return static_cast<int>(operators().Groups().size()); }
  bool Has(const std::string& group) { return operators().Group(group).ok(); }
  int64_t pool_bytes() { return operators().Describe().pool_bytes; }
  DataPlane::Asked asked() {
    const StateLock lock(&state().mutex);
    return state().data_plane->asked();
  }

  // ---- members ----
  // `at`: the coordinator; null: this daemon.
  Attached AttachTrainer(const std::string& group, std::optional<GroupSpec> spec = Spec(),
                         const DaemonParts* at = nullptr, Duration wait = kPatience) {
    return Attach(Trainer(), group, std::move(spec), at, wait);
  }
  // Attaches an engine rank with loader delivery, by default alone in its instance.
  Attached AttachEngine(const std::string& group, const std::string& instance,
                        std::optional<GroupSpec> spec, const DaemonParts* at = nullptr,
                        Duration wait = kPatience, int rank = 0, int world_size = 1,
                        const std::vector<std::string>& manifest = {}) {
    return Attach(Engine(instance, DeliveryMode::kLoader, rank, world_size, manifest), group,
                  std::move(spec), at, wait);
  }
  // Attaches an engine rank whose pieces are written in place, alone in its instance.
  Attached AttachInPlace(const std::string& group, const std::string& instance = "i") {
    return Attach(Engine(instance, DeliveryMode::kInPlace), group, Spec(), nullptr, kPatience);
  }
  static Arrival Trainer(int rank = 0, int world_size = 1) {
    Arrival arrival;
    arrival.identity = TrainerIdentity{.rank = rank, .world_size = world_size};
    return arrival;
  }
  static Arrival Engine(const std::string& instance, DeliveryMode delivery, int rank = 0,
                        int world_size = 1, const std::vector<std::string>& manifest = {});
  Attached Attach(Arrival arrival, const std::string& group, std::optional<GroupSpec> spec = Spec(),
                  const DaemonParts* at = nullptr, Duration wait = kPatience,
                  std::shared_ptr<Inbox> inbox = std::make_shared<Inbox>());
  // Attaches a trainer rank whose memory is on that GPU (FakeMemory).
  Attached AttachTrainerOnGpu(const std::string& group, int ordinal, int rank = 0,
                              int world_size = 1) {
    return Attach(OnGpu(Trainer(rank, world_size), ordinal), group, Spec(2, world_size));
  }
  // The same arrival of a member whose memory is on that GPU (FakeMemory).
  static Arrival OnGpu(Arrival arrival, int ordinal);

  // ---- what members do ----
  absl::StatusOr<RegionId> Register(const Attached& member, const SharedMemory& shared);
  Answer Call(const Attached& trainer, absl::StatusOr<TrainerEvent> event);
  Answer Begin(const Attached& trainer, int64_t version, int64_t tensors = 1);
  // The engine rank answers the last Prepare.
  void Ready(const Attached& engine);

  // Keeps the thread for regions busy until the result is destroyed, so that calls wait that need
  // the thread.
  std::shared_ptr<void> HoldRegionsThread();
  // Waits until the thread for regions has done what it was given so far, and what that gave it.
  void AwaitRegionsThread();

 private:
  std::unique_ptr<ProcessWatch> processes_;
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<PeerService> links_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

// Makes a bucket of one whole tensor. The bytes must live as long as the bucket.
inline ReceivedBucket InlineBucket(const TensorSpec& tensor, std::string_view bytes) {
  ReceivedBucket received;
  received.bucket = std::make_shared<CheckedBucket>();
  received.bucket->tensors = {tensor};
  received.bucket->ranges = {{0, 0, *ElementCount(tensor.shape)}};
  received.bucket->bytes = received.bucket->BytesOf(received.bucket->ranges[0]);
  received.bucket->source = CheckedBucket::Source::kInline;
  received.source = std::vector<std::string_view>{bytes};
  return received;
}

// The tensor "w", one byte an element, that a layout has in one piece of its first region.
Layout LayoutOf(RegionId region, int64_t elements, uint64_t generation = 1);

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_PARTS_TEST_UTIL_H_
