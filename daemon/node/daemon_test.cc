// Tests the daemon with real links between daemons of this process; members are sinks.
#include "daemon/node/daemon.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/node/arrivals.h"
#include "daemon/node/joiners.h"
#include "daemon/node/members.h"
#include "daemon/node/operators.h"
#include "daemon/node/regions.h"
#include "daemon/node/trainer_calls.h"
#include "daemon/services/hello.h"
#include "daemon/services/peer_service.h"
#include "daemon/services/trainer_events.h"
#include "daemon/test_util.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"
#include "transport/host/host_transport.h"

namespace refitd {
namespace {

using Catch::Contains;

constexpr int64_t kPatienceMs = 60'000;  // how long members wait; far longer than any step takes
constexpr int64_t kSlotBytes = 4096;

// A member's stream, as the test sees it.
template <typename Event>
class Inbox : public EventSink<Event> {
 public:
  void Send(Event event) override {
    MutexLock lock(&mutex_);
    if (event.has_welcome()) welcome_ = event.welcome();
    events_.push_back(std::move(event));
  }
  void End(absl::Status status) override {
    MutexLock lock(&mutex_);
    end_ = std::move(status);
  }
  bool welcomed() {
    MutexLock lock(&mutex_);
    return welcome_.has_value();
  }
  v1::Welcome welcome() {
    MutexLock lock(&mutex_);
    return *welcome_;
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
  std::vector<Event> events() {
    MutexLock lock(&mutex_);
    return events_;
  }

 private:
  Mutex mutex_;
  std::vector<Event> events_ ABSL_GUARDED_BY(mutex_);
  std::optional<v1::Welcome> welcome_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
};
using TrainerInbox = Inbox<v1::TrainerEvent>;
using EngineInbox = Inbox<v1::EngineEvent>;

class UpdateInbox : public UpdateSink {
 public:
  void Send(UpdateNews /*news*/) override { ++sent_; }
  void End(absl::Status /*status*/) override {}
  int sent() const { return sent_; }

 private:
  std::atomic<int> sent_{0};
};

v1::GroupSpec Spec(int slots = 2) {
  v1::GroupSpec spec;
  spec.set_trainer_ranks(1);
  spec.set_min_instances(1);
  spec.set_slot_bytes(kSlotBytes);
  spec.set_slots(slots);
  return spec;
}

// A daemon without sockets for members.
class TestDaemon {
 public:
  explicit TestDaemon(const std::string& id, DaemonOptions options = {}) {
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
  ~TestDaemon() {
    daemon_->CheckInvariants();
    daemon_->Drain();
    daemon_->Finish(std::chrono::steady_clock::now());
    daemon_->CheckInvariants();
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
    daemon_.reset();
  }

  struct Trainer {
    MemberId id;
    std::shared_ptr<TrainerInbox> inbox;
  };
  struct Engine {
    MemberId id;
    std::shared_ptr<EngineInbox> inbox;
  };
  // `at`: the coordinator; null: this daemon.
  Trainer AttachTrainer(const std::string& group, std::optional<v1::GroupSpec> spec = Spec(),
                        const TestDaemon* at = nullptr) {
    v1::TrainerHello hello;
    hello.set_world_size(1);
    Fill(group, std::move(spec), at, kPatienceMs, &hello);
    auto inbox = std::make_shared<TrainerInbox>();
    return {daemon_->arrivals().Attach(ArrivalOf(hello, {}), inbox), inbox};
  }
  // Attaches an engine rank with staged delivery, by default alone in its instance.
  Engine AttachEngine(const std::string& group, const std::string& instance,
                      std::optional<v1::GroupSpec> spec, const TestDaemon* at = nullptr,
                      int64_t wait_ms = kPatienceMs, int rank = 0, int world_size = 1,
                      const std::vector<std::string>& manifest = {}) {
    v1::EngineHello hello;
    for (const std::string& tensor : manifest) {
      hello.mutable_manifest()->add_names(tensor);
      hello.mutable_manifest()->add_dtypes(v1::DTYPE_FLOAT32);
      hello.mutable_manifest()->add_shapes()->add_dims(1);
    }
    hello.set_instance(instance);
    hello.set_rank(rank);
    hello.set_world_size(world_size);
    hello.set_delivery(v1::DELIVERY_STAGED);
    Fill(group, std::move(spec), at, wait_ms, &hello);
    auto inbox = std::make_shared<EngineInbox>();
    return {daemon_->arrivals().Attach(ArrivalOf(hello, {}), inbox), inbox};
  }
  int groups() { return static_cast<int>(daemon_->operators().Groups().size()); }
  bool Has(const std::string& group) { return daemon_->operators().Group(group).ok(); }
  int64_t pool_bytes() { return daemon_->operators().Describe().pool_bytes; }
  std::string address() const { return fmt::format("127.0.0.1:{}", port_); }
  Daemon& daemon() { return *daemon_; }

 private:
  template <typename Hello>
  static void Fill(const std::string& group, std::optional<v1::GroupSpec> spec,
                   const TestDaemon* at, int64_t wait_ms, Hello* hello) {
    SayProtocol(hello);
    hello->set_group(group);
    if (spec.has_value()) *hello->mutable_spec() = *std::move(spec);
    if (at != nullptr) hello->set_coordinator(at->address());
    hello->set_wait_ms(wait_ms);
  }

  std::unique_ptr<ProcessWatch> processes_;
  std::unique_ptr<Daemon> daemon_;
  std::unique_ptr<PeerService> links_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

// ---- joining ----

TEST_CASE("A member without a spec that waits at a joined daemon holds up none that brings one") {
  TestDaemon a("a");
  TestDaemon b("b");
  const auto engine = b.AttachEngine("g", "i", std::nullopt, &a);
  CHECK(b.Has("g"));
  CHECK_FALSE(a.Has("g"));
  const auto trainer = b.AttachTrainer("g", Spec(), &a);
  CHECK(Eventually([&] { return trainer.inbox->welcomed() && engine.inbox->welcomed(); }));
  CHECK(a.Has("g"));
}

TEST_CASE("Each member that waits at a joined daemon has its own deadline") {
  TestDaemon a("a");
  TestDaemon b("b");
  const auto patient = b.AttachEngine("g", "patient", std::nullopt, &a);
  const auto hasty = b.AttachEngine("g", "hasty", std::nullopt, &a, /*wait_ms=*/20);
  CHECK(hasty.inbox->Ended().code() == absl::StatusCode::kNotFound);
  CHECK_FALSE(patient.inbox->end().has_value());
  // The reverse order: the member that came first has the shorter wait.
  const auto first = b.AttachEngine("h", "hasty", std::nullopt, &a, /*wait_ms=*/20);
  const auto second = b.AttachEngine("h", "patient", std::nullopt, &a);
  CHECK(first.inbox->Ended().code() == absl::StatusCode::kNotFound);
  CHECK_FALSE(second.inbox->end().has_value());
  const auto g = a.AttachTrainer("g");
  const auto h = a.AttachTrainer("h");
  CHECK(Eventually([&] { return patient.inbox->welcomed() && second.inbox->welcomed(); }));
}

TEST_CASE("A member whose spec is not the group's is refused at a joined daemon, the others stay") {
  TestDaemon a("a");
  TestDaemon b("b");
  const auto engine = b.AttachEngine("g", "i", std::nullopt, &a);
  const auto trainer = b.AttachTrainer("g", Spec(), &a);
  const auto other = b.AttachEngine("g", "other", Spec(3), &a);
  const absl::Status refused = other.inbox->Ended();
  CHECK(refused.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(Message(refused), Contains("spec"));
  CHECK(Eventually([&] { return trainer.inbox->welcomed() && engine.inbox->welcomed(); }));
}

TEST_CASE("A daemon stops joining when the last member that waited for it goes") {
  TestDaemon a("a");
  TestDaemon b("b");
  const auto engine = b.AttachEngine("g", "i", std::nullopt, &a);
  b.daemon().arrivals().Gone(engine.id, "it left");
  CHECK(Eventually([&] { return b.groups() == 0; }));
}

// ---- who may join ----

TEST_CASE("A group that demands encryption takes daemons whose data plane encrypts, and no other") {
  DaemonOptions encrypting;
  encrypting.clear_wire = "";
  v1::GroupSpec demanding = Spec();
  demanding.set_encrypted_data(true);
  TestDaemon a("a", encrypting);
  TestDaemon b("b", encrypting);
  const auto joined = b.AttachEngine("g", "i", demanding, &a);
  CHECK(Eventually([&] { return joined.inbox->welcomed(); }));

  TestDaemon clear("c");
  const auto refused = clear.AttachEngine("g", "j", demanding, &a);
  CHECK(refused.inbox->Ended().code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(Message(refused.inbox->Ended()),
             Contains("spec.encrypted_data: group 'g'") && Contains("daemon c is in the clear"));
  CHECK(Eventually([&] { return clear.groups() == 0; }));
  // A coordinator in the clear takes nobody in, and its own members stay.
  const auto own = clear.AttachTrainer("h", demanding);
  CHECK(Eventually([&] { return own.inbox->welcomed(); }));
  const auto other = b.AttachEngine("h", "i", demanding, &clear);
  CHECK(other.inbox->Ended().code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(Message(other.inbox->Ended()), Contains("daemon c is in the clear"));
  CHECK_FALSE(own.inbox->end().has_value());
  // Without the demand the same daemons join.
  const auto plain = clear.AttachEngine("plain", "i", Spec(), &a);
  CHECK(Eventually([&] { return plain.inbox->welcomed(); }));
}

TEST_CASE("A second daemon with a live one's id is refused, and taken in when that one has gone") {
  TestDaemon a("a");
  TestDaemon live("b");
  const auto engine = live.AttachEngine("g", "i", Spec(), &a);
  REQUIRE(Eventually([&] { return engine.inbox->welcomed(); }));

  TestDaemon same_id("b");
  const auto hasty = same_id.AttachEngine("g", "j", Spec(), &a, /*wait_ms=*/50);
  const absl::Status refused = hasty.inbox->Ended();
  CHECK(refused.code() == absl::StatusCode::kAlreadyExists);
  CHECK_THAT(Message(refused), Contains("'b' is that of the daemon at 127.0.0.1:") &&
                                   Contains("the one at 127.0.0.1:") && Contains("try again"));
  CHECK_FALSE(engine.inbox->end().has_value());

  const auto patient = same_id.AttachEngine("g", "j", Spec(), &a);
  live.daemon().arrivals().Gone(engine.id,
                                "it left");  // the last member there, so its daemon leaves
  CHECK(Eventually([&] { return patient.inbox->welcomed(); }));
}

TEST_CASE("limits.max_members counts members of joined daemons, and refuses them by name") {
  DaemonOptions options;
  options.max_members = 2;
  TestDaemon a("a", options);
  TestDaemon b("b");
  const auto first = b.AttachEngine("g", "first", Spec(), &a);
  const auto second = b.AttachEngine("g", "second", Spec(), &a);
  REQUIRE(Eventually([&] { return first.inbox->welcomed() && second.inbox->welcomed(); }));
  const auto third = b.AttachEngine("g", "third", Spec(), &a);
  const auto here = a.AttachEngine("g", "here", Spec());
  for (const absl::Status& status : {third.inbox->Ended(), here.inbox->Ended()}) {
    CHECK(status.code() == absl::StatusCode::kResourceExhausted);
    CHECK_THAT(Message(status), Contains("limits.max_members") && Contains("takes 2"));
  }
  b.daemon().arrivals().Gone(first.id, "it left");
  CHECK(Eventually([&] {
    const auto again = a.AttachEngine("g", "again", Spec());
    return again.inbox->welcomed();
  }));
}

TEST_CASE("A member whose report does not fit on the link is refused with the limit, others stay") {
  DaemonOptions options;
  options.message_bytes = 1 << 20;
  TestDaemon a("a", options);
  TestDaemon b("b");
  const auto first = b.AttachEngine("g", "first", Spec(), &a);
  REQUIRE(Eventually([&] { return first.inbox->welcomed(); }));
  std::vector<std::string> manifest;
  for (int i = 0; i < 8000; ++i) manifest.push_back(fmt::format("{:0>200}", i));
  const auto large =
      b.AttachEngine("g", "large", Spec(), &a, kPatienceMs, /*rank=*/0, /*world_size=*/1, manifest);
  const absl::Status refused = large.inbox->Ended();
  CHECK(refused.code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(Message(refused), Contains("message_bytes"));
  // The daemon knows it no more, and the link goes on.
  const auto second = b.AttachEngine("g", "second", Spec(), &a);
  CHECK(Eventually([&] { return second.inbox->welcomed(); }));
  CHECK_FALSE(first.inbox->end().has_value());
}

// ---- watching ----

TEST_CASE("A watcher makes no view of an update for each of 5,000 ranks that get ready") {
  constexpr int kRanks = 5000;
  DaemonOptions options;
  options.max_members = kRanks + 1;
  TestDaemon a("a", options);
  const auto trainer = a.AttachTrainer("g");
  REQUIRE(trainer.inbox->welcomed());
  std::vector<TestDaemon::Engine> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.push_back(a.AttachEngine("g", "i", Spec(), nullptr, 0, rank, kRanks));
  }
  const auto updates = std::make_shared<UpdateInbox>();
  REQUIRE(a.daemon().operators().Watch({"", std::chrono::hours(1), false}, updates).ok());

  v1::BeginRequest begin;
  *begin.mutable_lease() = trainer.inbox->welcome().lease();
  begin.set_version(1);
  begin.set_tensor_count(1);
  std::atomic<bool> begun{false};
  a.daemon().trainer_calls().Call(
      a.daemon().NewCall(), CallerOf(begin.lease(), {}), EventOf(begin, std::chrono::hours(1)),
      [&begun](const absl::Status& status, const ReplyPayload&) { begun = status.ok(); });
  const int64_t before = a.daemon().watched_views();
  const UpdateId update(ranks[0].inbox->events().back().prepare().update_id());
  for (const TestDaemon::Engine& rank : ranks) {
    a.daemon().members().Happened(rank.id, ReadyEvent{rank.id, update});
  }
  CHECK(begun);
  // One view, for the change that the last Ready made.
  CHECK(a.daemon().watched_views() - before <= 1);
  CHECK(updates->sent() >= 2);  // told of that change and of the beginning
}

// ---- groups without members ----

TEST_CASE("A group is given up some time after its last member left, one with a member is not") {
  DaemonOptions options;
  options.group_idle = std::chrono::milliseconds(20);
  TestDaemon a("a", options);
  const auto stays = a.AttachTrainer("stays");
  const auto goes = a.AttachTrainer("goes");
  REQUIRE(goes.inbox->welcomed());
  CHECK(a.groups() == 2);
  a.daemon().arrivals().Detached(goes.id);
  CHECK(Eventually([&] { return !a.Has("goes"); }));
  CHECK(a.Has("stays"));
  a.daemon().arrivals().Detached(stays.id);
  CHECK(Eventually([&] { return a.groups() == 0; }));
}

TEST_CASE("A group that was created and never joined is given up as well") {
  DaemonOptions options;
  options.group_idle = std::chrono::milliseconds(20);
  TestDaemon a("a", options);
  REQUIRE(a.daemon().operators().CreateGroup("g", SpecOf(Spec()), false, "", "uid:1").ok());
  CHECK(Eventually([&] { return a.groups() == 0; }));
}

TEST_CASE("The run beyond max_groups takes the place of the group that was empty for the longest") {
  DaemonOptions options;
  options.max_groups = 2;
  TestDaemon a("a", options);
  const auto first = a.AttachTrainer("first");
  const auto second = a.AttachTrainer("second");
  const auto refused = a.AttachTrainer("third");
  CHECK(refused.inbox->Ended().code() == absl::StatusCode::kResourceExhausted);
  a.daemon().arrivals().Detached(second.id);
  a.daemon().arrivals().Detached(first.id);
  const auto third = a.AttachTrainer("third");
  CHECK(third.inbox->welcomed());
  CHECK(a.Has("first"));
  CHECK_FALSE(a.Has("second"));
}

TEST_CASE("A group without members takes no staging from a run that needs it") {
  DaemonOptions options;
  options.max_pool_bytes = 2 * kSlotBytes;
  TestDaemon a("a", options);
  const auto first = a.AttachTrainer("first");
  CHECK(a.AttachTrainer("second").inbox->Ended().code() == absl::StatusCode::kResourceExhausted);
  a.daemon().arrivals().Detached(first.id);
  CHECK(a.AttachTrainer("second").inbox->welcomed());
}

TEST_CASE("An empty group's staging pool is freed at once, and made again when it is needed") {
  TestDaemon a("a");
  const auto map = [&a](const TestDaemon::Engine& engine) {
    Token token{};
    const std::string bytes = engine.inbox->welcome().lease().token();
    REQUIRE(bytes.size() == token.size());
    std::copy(bytes.begin(), bytes.end(), token.begin());
    return a.daemon().regions().MapPool(token, {}).status();
  };
  for (int round = 0; round < 2; ++round) {
    const auto engine = a.AttachEngine("g", "i", Spec());
    REQUIRE(engine.inbox->welcomed());
    CHECK(map(engine).ok());
    CHECK(a.pool_bytes() == 2 * kSlotBytes);
    a.daemon().arrivals().Detached(engine.id);
    CHECK(a.pool_bytes() == 0);
    CHECK(a.Has("g"));
  }
}

}  // namespace
}  // namespace refitd
