// Tests the client's side of the conversation against a scripted peer, which does what a good
// daemon would never do on demand (refuse a bucket, leave a call open, end a lease at the worst
// moment).
#include <fcntl.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <functional>
#include <future>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/attach_stream.h"
#include "client/call.h"
#include "client/descriptor_test_util.h"
#include "client/engine.h"
#include "client/trainer.h"
#include "proto/grpc_status.h"
#include "refitd/v1/engine.grpc.pb.h"
#include "refitd/v1/trainer.grpc.pb.h"
#include "transport/base/failure.h"
#include "transport/base/mutex.h"
#include "transport/base/temp_folder_testing.h"

namespace refitd::client {
namespace {

constexpr std::chrono::seconds kPatience(30);  // only a failing test waits this long
constexpr int kWindow = 4;
constexpr uint64_t kRegion = 42;  // the daemons' id of a trainer's block

void FillWelcome(v1::Welcome* welcome) {
  welcome->mutable_lease()->set_token(std::string(16, 't'));
  welcome->mutable_lease()->set_incarnation(9);
  welcome->mutable_lease()->set_protocol(v1::PROTOCOL_VERSION_1);
  welcome->set_descriptor_socket("/nonexistent/descriptors.sock");
  welcome->mutable_limits()->set_outstanding_buckets(kWindow);
  welcome->mutable_limits()->set_inline_bytes(1'024);
  welcome->mutable_limits()->set_max_duration_ms(60'000);
  welcome->set_slot_bytes(4'096);
  welcome->set_slots(2);
}

class ScriptedTrainerService final : public v1::Trainer::Service {
 public:
  using PushHook = std::function<grpc::Status(const v1::Bucket&)>;

  void OnPush(PushHook hook) { push_hook_ = std::move(hook); }
  using BeginHook = std::function<grpc::Status(const v1::BeginRequest&, v1::BeginResponse*)>;
  void OnBegin(BeginHook hook) { begin_hook_ = std::move(hook); }
  // Answers the hello of lease `number`, from 1. A status that is not OK refuses it.
  using WelcomeHook = std::function<grpc::Status(int number, v1::Welcome*)>;
  void OnWelcome(WelcomeHook hook) { welcome_hook_ = std::move(hook); }
  using LayoutHook = std::function<grpc::Status()>;
  void OnLayout(LayoutHook hook) { layout_hook_ = std::move(hook); }
  using RefitHook = std::function<grpc::Status(const v1::RefitRequest&)>;
  void OnRefit(RefitHook hook) { refit_hook_ = std::move(hook); }
  std::vector<std::string> calls() {
    MutexLock lock(&mutex_);
    return calls_;
  }
  void EndLease() {
    MutexLock lock(&mutex_);
    end_lease_ = true;
    attach_context_->TryCancel();
  }

 private:
  void Note(std::string call) {
    MutexLock lock(&mutex_);
    calls_.push_back(std::move(call));
  }

  grpc::Status Attach(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<v1::TrainerEvent, v1::TrainerMessage>* stream) override {
    v1::TrainerMessage message;
    if (!stream->Read(&message)) return grpc::Status::OK;
    int number = 0;
    {
      MutexLock lock(&mutex_);
      attach_context_ = context;
      number = ++attaches_;
    }
    v1::TrainerEvent event;
    FillWelcome(event.mutable_welcome());
    if (welcome_hook_) {
      const grpc::Status welcomed = welcome_hook_(number, event.mutable_welcome());
      if (!welcomed.ok()) return welcomed;
    }
    stream->Write(event);
    while (stream->Read(&message)) Note(message.has_detach() ? "detach" : "message");
    return grpc::Status::OK;
  }
  grpc::Status RegisterRegion(grpc::ServerContext*, const v1::RegisterRegionRequest*,
                              v1::RegisterRegionResponse* response) override {
    response->set_region_id(kRegion);
    return grpc::Status::OK;
  }
  grpc::Status ReleaseRegion(grpc::ServerContext*, const v1::ReleaseRegionRequest* request,
                             v1::ReleaseRegionResponse*) override {
    Note("release " + std::to_string(request->region_id()));
    return grpc::Status::OK;
  }
  grpc::Status Begin(grpc::ServerContext*, const v1::BeginRequest* request,
                     v1::BeginResponse* response) override {
    const bool told = request->broadcast() != v1::BROADCAST_METHOD_UNSPECIFIED;
    Note("begin " + std::to_string(request->version()) +
         (told ? " by " + v1::BroadcastMethod_Name(request->broadcast()) : ""));
    response->set_remaining_ms(30'000);
    response->set_instances(1);
    return begin_hook_ ? begin_hook_(*request, response) : grpc::Status::OK;
  }
  grpc::Status PushBucket(grpc::ServerContext*, const v1::PushBucketRequest* request,
                          v1::PushBucketResponse*) override {
    Note("push " + std::to_string(request->bucket().seq()));
    return push_hook_ ? push_hook_(request->bucket()) : grpc::Status::OK;
  }
  grpc::Status Commit(grpc::ServerContext*, const v1::CommitRequest* request,
                      v1::CommitResponse* response) override {
    Note("commit " + std::to_string(request->bucket_count()));
    response->set_version(request->version());
    v1::BroadcastTotals* pushed = response->add_pushed();
    pushed->set_method(v1::BROADCAST_METHOD_CHAIN);
    pushed->set_bytes(700);
    pushed->set_buckets(7);
    // A newer daemon may report a method that this client does not know.
    response->add_pushed()->set_method(static_cast<v1::BroadcastMethod>(99));
    return grpc::Status::OK;
  }
  grpc::Status RegisterLayout(grpc::ServerContext*, grpc::ServerReader<v1::LayoutChunk>* reader,
                              v1::LayoutRegistered*) override {
    std::string call = "register";
    v1::LayoutChunk chunk;
    while (reader->Read(&chunk)) {
      if (chunk.has_lease()) call += " " + std::to_string(chunk.binding_generation());
      for (const std::string& name : chunk.name_middles()) call += " " + name;
      for (const uint32_t pushed : chunk.pushed_tensors()) {
        call += " pushed " + std::to_string(pushed);
      }
    }
    Note(call);
    return layout_hook_ ? layout_hook_() : grpc::Status::OK;
  }
  grpc::Status Refit(grpc::ServerContext*, const v1::RefitRequest* request,
                     v1::CommitResponse* response) override {
    Note("refit " + std::to_string(request->version()) + " of " +
         std::to_string(request->binding_generation()) + " after " +
         std::to_string(request->bucket_count()));
    response->set_version(request->version());
    response->set_bytes(77);
    return refit_hook_ ? refit_hook_(*request) : grpc::Status::OK;
  }
  grpc::Status Abort(grpc::ServerContext*, const v1::AbortRequest* request,
                     v1::AbortResponse*) override {
    Note("abort: " + request->reason());
    return grpc::Status::OK;
  }

  PushHook push_hook_;
  BeginHook begin_hook_;
  WelcomeHook welcome_hook_;
  LayoutHook layout_hook_;
  RefitHook refit_hook_;
  Mutex mutex_;
  std::vector<std::string> calls_ ABSL_GUARDED_BY(mutex_);
  grpc::ServerContext* attach_context_ ABSL_GUARDED_BY(mutex_) = nullptr;
  bool end_lease_ ABSL_GUARDED_BY(mutex_) = false;
  int attaches_ ABSL_GUARDED_BY(mutex_) = 0;
};

class ScriptedEngineService final : public v1::Engine::Service {
 public:
  using Stream = grpc::ServerReaderWriter<v1::EngineEvent, v1::EngineMessage>;
  explicit ScriptedEngineService(std::function<grpc::Status(Stream*)> script,
                                 std::string descriptors = "/nonexistent/descriptors.sock")
      : script_(std::move(script)), descriptors_(std::move(descriptors)) {}
  using ReleaseHook =
      std::function<grpc::Status(grpc::ServerContext*, const v1::ReleaseRegionRequest&)>;
  void OnRelease(ReleaseHook hook) { release_hook_ = std::move(hook); }

 private:
  grpc::Status Attach(grpc::ServerContext*, Stream* stream) override {
    v1::EngineMessage message;
    if (!stream->Read(&message)) return grpc::Status::OK;
    v1::EngineEvent event;
    FillWelcome(event.mutable_welcome());
    event.mutable_welcome()->set_descriptor_socket(descriptors_);
    stream->Write(event);
    return script_(stream);
  }
  grpc::Status ReleaseRegion(grpc::ServerContext* context, const v1::ReleaseRegionRequest* request,
                             v1::ReleaseRegionResponse*) override {
    return release_hook_ ? release_hook_(context, *request) : grpc::Status::OK;
  }
  const std::function<grpc::Status(Stream*)> script_;
  const std::string descriptors_;
  ReleaseHook release_hook_;
};

// A gRPC server on a unix socket in a folder of its own.
class Daemon {
 public:
  explicit Daemon(grpc::Service* service) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + socket_, grpc::InsecureServerCredentials());
    builder.RegisterService(service);
    server_ = builder.BuildAndStart();
    REQUIRE(server_ != nullptr);
  }
  ~Daemon() { server_->Shutdown(std::chrono::system_clock::now()); }
  ConnectOptions connect() const { return {.socket = socket_, .group = "g"}; }

 private:
  const TempFolder folder_;
  const std::string socket_ = folder_ / "s";
  std::unique_ptr<grpc::Server> server_;
};

std::unique_ptr<Trainer> AttachTrainer(const Daemon& daemon) {
  auto trainer = Trainer::Attach({.connect = daemon.connect()});
  INFO(trainer.status());
  REQUIRE(trainer.ok());
  return *std::move(trainer);
}

Bucket SmallBucket(std::string name) {
  static const std::string kBytes(4, 'x');
  return Bucket::Inline({{std::move(name), DType::kFloat32, {1}}}, {kBytes});
}

bool Contains(const std::vector<std::string>& calls, const std::string& begin) {
  return std::any_of(calls.begin(), calls.end(),
                     [&](const std::string& call) { return call.rfind(begin, 0) == 0; });
}

// Waits for a call that the client itself does not wait for.
bool EventuallyContains(ScriptedTrainerService* service, const std::string& begin) {
  const TimePoint deadline = std::chrono::steady_clock::now() + kPatience;
  while (!Contains(service->calls(), begin)) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

// The layout has no pieces, because the scripted peer has no descriptor socket for regions.
Layout TwoTensors() {
  Layout layout;
  layout.tensors = {{"a", DType::kFloat32, {1}}, {"b", DType::kInt8, {2}}};
  layout.pushed_tensors = {1};
  return layout;
}

TEST_CASE("at most the daemon's limit of pushes are unanswered at a time") {
  constexpr int kBuckets = 20;
  ScriptedTrainerService service;
  Mutex mutex;
  CondVar cond;
  int open = 0;
  int most = 0;
  std::set<int64_t> seqs;
  // Each call stays open until the window is full, or all calls have come.
  service.OnPush([&](const v1::Bucket& bucket) {
    const TimePoint deadline = std::chrono::steady_clock::now() + kPatience;
    MutexLock lock(&mutex);
    seqs.insert(bucket.seq());
    most = std::max(most, ++open);
    cond.NotifyAll();
    while (most < kWindow) {
      if (!cond.WaitUntil(&mutex, deadline)) break;
    }
    --open;
    return grpc::Status::OK;
  });
  const Daemon daemon(&service);
  const auto trainer = AttachTrainer(daemon);
  auto update = trainer->Begin({.version = Version(1)});
  REQUIRE(update.ok());
  int answered = 0;
  for (int i = 0; i < kBuckets; ++i) {
    (*update)->PushAsync(SmallBucket("t" + std::to_string(i)), [&](const absl::Status& status) {
      MutexLock lock(&mutex);
      answered += status.ok() ? 1 : 0;
    });
  }
  REQUIRE((*update)->Commit().ok());
  MutexLock lock(&mutex);
  CHECK(answered == kBuckets);
  CHECK(most == kWindow);
  CHECK(seqs.size() == kBuckets);
  CHECK(*seqs.rbegin() == kBuckets - 1);
}

TEST_CASE("buckets of many tensors wait until those before them are answered") {
  Mutex mutex;
  CondVar cond;
  int open = 0;
  int most = 0;
  ScriptedTrainerService service;
  // Each call stays open until there are two others, or for a moment.
  service.OnPush([&](const v1::Bucket&) {
    const TimePoint deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
    MutexLock lock(&mutex);
    most = std::max(most, ++open);
    cond.NotifyAll();
    while (most < 3 && cond.WaitUntil(&mutex, deadline)) {
    }
    --open;
    return grpc::Status::OK;
  });
  const Daemon daemon(&service);
  const auto trainer = AttachTrainer(daemon);
  auto update = trainer->Begin({.version = Version(1)});
  REQUIRE(update.ok());
  const int tensors = GENERATE(100, 1'500);
  for (int i = 0; i < 4; ++i) {
    std::vector<TensorSpec> empty;
    for (int t = 0; t < tensors; ++t) {
      empty.push_back({fmt::format("{}.{}", i, t), DType::kFloat32, {0}});
    }
    std::vector<std::span<const char>> bytes(empty.size());
    (*update)->PushAsync(Bucket::Inline(std::move(empty), std::move(bytes)), nullptr);
  }
  REQUIRE((*update)->Commit().ok());
  MutexLock lock(&mutex);
  CHECK(most == (tensors == 100 ? 3 : 2));
}

TEST_CASE("a refused push leaves the update open and gives its seq to the next bucket") {
  ScriptedTrainerService service;
  service.OnPush([](const v1::Bucket& bucket) {
    return bucket.names(0) == "bad" ? grpc::Status(grpc::StatusCode::FAILED_PRECONDITION, "bad")
                                    : grpc::Status::OK;
  });
  const Daemon daemon(&service);
  const auto trainer = AttachTrainer(daemon);
  auto update = trainer->Begin({.version = Version(1)});
  REQUIRE(update.ok());
  REQUIRE((*update)->Push(SmallBucket("a")).ok());
  CHECK((*update)->Push(SmallBucket("bad")) ==
        absl::Status(absl::StatusCode::kFailedPrecondition, "bad"));
  REQUIRE((*update)->Push(SmallBucket("b")).ok());
  REQUIRE((*update)->Commit().ok());
  CHECK(service.calls() ==
        std::vector<std::string>{"begin 1", "push 0", "push 1", "push 1", "commit 2"});
  CHECK(trainer->group_version() == Version(1));
}

TEST_CASE("a daemon that answers whom it waited for was named as the one that did not answer") {
  Failure waited;
  waited.Add({SuspectRole::kEngine, "", "", std::nullopt, 0});
  for (const bool answers : {true, false}) {
    ScriptedTrainerService service;
    service.OnBegin([&](const v1::BeginRequest&, v1::BeginResponse*) {
      const absl::Status late = absl::DeadlineExceededError("waited for 0 of 1 instances complete");
      return ToGrpc(answers ? WithFailure(late, waited) : late);
    });
    const Daemon daemon(&service);
    const auto trainer = AttachTrainer(daemon);
    const absl::Status begun = trainer->Begin({.version = Version(1)}).status();
    CHECK(begun.code() == absl::StatusCode::kDeadlineExceeded);
    REQUIRE(FailureOf(begun).suspects.size() == 1);
    CHECK(FailureOf(begun).suspects[0].role ==
          (answers ? SuspectRole::kEngine : SuspectRole::kDaemon));
    CHECK(Message(begun).starts_with("waited for") == answers);
  }
}

TEST_CASE("an answered deadline without a suspect makes no suspect of the daemon") {
  ScriptedTrainerService service;
  service.OnBegin([](const v1::BeginRequest&, v1::BeginResponse*) {
    Failure clean;
    clean.weights = Weights::kClean;
    return ToGrpc(WithFailure(absl::DeadlineExceededError("waited for the program"), clean));
  });
  const Daemon daemon(&service);
  const absl::Status begun = AttachTrainer(daemon)->Begin({.version = Version(1)}).status();
  CHECK(FailureOf(begun).suspects.empty());
  CHECK(FailureOf(begun).weights == Weights::kClean);
}

TEST_CASE("a refused asynchronous push ends the update and is what Commit returns") {
  ScriptedTrainerService service;
  service.OnPush([](const v1::Bucket& bucket) {
    return bucket.seq() == 1 ? grpc::Status(grpc::StatusCode::NOT_FOUND, "no region")
                             : grpc::Status::OK;
  });
  const Daemon daemon(&service);
  const auto trainer = AttachTrainer(daemon);
  auto update = trainer->Begin({.version = Version(1)});
  REQUIRE(update.ok());
  for (int i = 0; i < 3; ++i) (*update)->PushAsync(SmallBucket("t" + std::to_string(i)), nullptr);
  CHECK(absl::IsNotFound((*update)->Flush()));
  const auto committed = (*update)->Commit();
  CHECK(committed.status() == absl::Status(absl::StatusCode::kNotFound, "no region"));
  update->reset();
  CHECK(EventuallyContains(&service, "abort: bucket 1: no region"));
  CHECK_FALSE(Contains(service.calls(), "commit"));
}

TEST_CASE("a malformed bucket is answered through done, on another thread, and kept") {
  ScriptedTrainerService service;
  const Daemon daemon(&service);
  const auto trainer = AttachTrainer(daemon);
  auto update = trainer->Begin({.version = Version(1)});
  REQUIRE(update.ok());
  Mutex mutex;  // held over the call: done on this thread would deadlock
  absl::Status answer;
  {
    MutexLock lock(&mutex);
    (*update)->PushAsync(Bucket(), [&](const absl::Status& status) {
      MutexLock inner(&mutex);
      answer = status;
    });
  }
  CHECK(absl::IsInvalidArgument((*update)->Commit().status()));
  MutexLock lock(&mutex);
  CHECK(absl::IsInvalidArgument(answer));
}

TEST_CASE("an update that goes without Commit aborts, a committed one does not") {
  ScriptedTrainerService service;
  const Daemon daemon(&service);
  const auto trainer = AttachTrainer(daemon);
  bool commit = false;
  SECTION("forgotten") {}
  SECTION("committed") { commit = true; }
  {
    auto update = trainer->Begin({.version = Version(1)});
    REQUIRE(update.ok());
    if (commit) REQUIRE((*update)->Commit().ok());
  }
  if (commit) {
    CHECK_FALSE(Contains(service.calls(), "abort"));
  } else {
    CHECK(EventuallyContains(&service, "abort"));
  }
}

// A trainer with a block on a GPU, and an update to push it in.
struct BlockPusher {
  BlockPusher() {
    auto added = trainer->AddCudaRegion(CudaIpcBlock{std::string(kCudaIpcHandleBytes, 'h'), 4'096});
    INFO(added.status());
    REQUIRE(added.ok());
    region = *std::move(added);
    auto begun = trainer->Begin({.version = Version(1)});
    REQUIRE(begun.ok());
    update = *std::move(begun);
  }
  Bucket bucket() const { return Bucket::Packed({{"a", DType::kFloat32, {1}}}, region, 0); }

  ScriptedTrainerService service;
  const Daemon daemon{&service};
  const std::unique_ptr<Trainer> trainer = AttachTrainer(daemon);
  std::shared_ptr<Region> region;
  std::unique_ptr<Update> update;
};

TEST_CASE("a region on a GPU that was pushed is released by its owner, who may free it then") {
  BlockPusher p;
  SECTION("by Push") { REQUIRE(p.update->Push(p.bucket()).ok()); }
  SECTION("by PushAsync and Flush") {
    p.update->PushAsync(p.bucket(), nullptr);
    REQUIRE(p.update->Flush().ok());
  }
  CHECK_FALSE(Contains(p.service.calls(), "release"));
  p.region.reset();
  CHECK(p.service.calls().back() == "release 42");
}

TEST_CASE("a callback that does not return keeps no region beyond its update") {
  BlockPusher p;
  const auto called = std::make_shared<std::promise<void>>();
  std::promise<void> go_on;
  p.update->PushAsync(p.bucket(), [called, wait = go_on.get_future().share()](auto) {
    called->set_value();
    wait.wait_for(kPatience);
  });
  REQUIRE(called->get_future().wait_for(kPatience) == std::future_status::ready);
  p.update.reset();
  CHECK_FALSE(Contains(p.service.calls(), "release"));
  p.region.reset();
  CHECK(Contains(p.service.calls(), "release 42"));
  go_on.set_value();
}

TEST_CASE("after the lease ended calls say why, without asking the daemon") {
  ScriptedTrainerService service;
  const Daemon daemon(&service);
  const auto trainer = AttachTrainer(daemon);
  REQUIRE(trainer->health().ok());
  service.EndLease();
  const TimePoint deadline = std::chrono::steady_clock::now() + kPatience;
  while (trainer->health().ok() && std::chrono::steady_clock::now() < deadline) {
    (void)trainer->Begin({.version = Version(1)});  // a round trip, during which the end comes
  }
  CHECK(absl::IsCancelled(trainer->health()));
  // The lease is over, so the client does not send this call, the only call for version 2.
  CHECK_FALSE(trainer->Begin({.version = Version(2)}).ok());
  CHECK_FALSE(Contains(service.calls(), "begin 2"));
}

TEST_CASE("a version that is begun twice has one Update, which the second Begin leaves alone") {
  ScriptedTrainerService service;
  std::atomic<uint64_t> update_id = 7;
  service.OnBegin([&](const v1::BeginRequest&, v1::BeginResponse* response) {
    response->set_update_id(update_id);
    return grpc::Status::OK;
  });
  const Daemon daemon(&service);
  const auto trainer = AttachTrainer(daemon);
  auto first = trainer->Begin({.version = Version(1)});
  REQUIRE(first.ok());
  const auto second = trainer->Begin({.version = Version(1)});
  CHECK(absl::IsAlreadyExists(second.status()));
  CHECK_THAT(std::string(second.status().message()), Catch::Contains("version 1"));
  CHECK((*first)->Push(SmallBucket("a")).ok());
  SECTION("when the first goes the version may be begun again") {
    first->reset();
    CHECK(EventuallyContains(&service, "abort"));
    CHECK(trainer->Begin({.version = Version(1)}).ok());
  }
  SECTION("an update that others aborted does not stand in the way of the next") {
    update_id = 8;
    CHECK(trainer->Begin({.version = Version(1)}).ok());
  }
  SECTION("the first commits") {
    CHECK((*first)->Commit().ok());
    CHECK_FALSE(Contains(service.calls(), "abort"));
  }
}

// ---- a lease that ends in a call ----

// An error that the daemon gives to a call whose lease ends meanwhile, and what the error tells the
// caller.
struct EndOfLease {
  std::string told;
  grpc::Status status;
};
std::vector<EndOfLease> EndsOfLeases() {
  return {{"that there is no such lease",
           {grpc::StatusCode::UNAUTHENTICATED, "lease.token: no such lease"}},
          {"that the coordinator is lost",
           {grpc::StatusCode::UNAVAILABLE, "group g: the coordinator is lost"}}};
}

std::unique_ptr<Trainer> AttachAgainstLoss(const Daemon& daemon, int world_size = 1) {
  ConnectOptions connect = daemon.connect();
  connect.reattach = kPatience;
  auto trainer = Trainer::Attach({.connect = connect, .world_size = world_size});
  INFO(trainer.status());
  REQUIRE(trainer.ok());
  return *std::move(trainer);
}

int Count(const std::vector<std::string>& calls, const std::string& call) {
  return static_cast<int>(std::count(calls.begin(), calls.end(), call));
}

TEST_CASE("a call of the trainer that meets the end of its lease is made again with the next") {
  const std::vector<EndOfLease> ends = EndsOfLeases();
  const EndOfLease end = ends[GENERATE(0, 1)];
  INFO(end.told);
  ScriptedTrainerService service;
  std::atomic<int> tries = 0;
  const auto first_ends = [&] {
    if (++tries > 1) return grpc::Status(grpc::Status::OK);
    service.EndLease();
    return end.status;
  };
  SECTION("Begin") {
    service.OnBegin([&](const auto&, auto*) { return first_ends(); });
    const Daemon daemon(&service);
    const auto trainer = AttachAgainstLoss(daemon);
    const auto begun = trainer->Begin({.version = Version(1)});
    INFO(begun.status());
    REQUIRE(begun.ok());
    CHECK((*begun)->Commit().ok());
    CHECK(Count(service.calls(), "begin 1") == 2);
    CHECK(trainer->reattachments() == 1);
  }
  SECTION("Refit") {
    service.OnRefit([&](const auto&) { return first_ends(); });
    const Daemon daemon(&service);
    const auto trainer = AttachAgainstLoss(daemon);
    REQUIRE(trainer->Register(TwoTensors()).ok());
    const auto result = trainer->Refit({.version = Version(5)});
    INFO(result.status());
    REQUIRE(result.ok());
    CHECK(result->bytes == 77);
    // The layout was registered again, in the next generation.
    CHECK(service.calls().back() == "refit 5 of 2 after 0");
  }
  SECTION("Register") {
    service.OnLayout([&] { return first_ends(); });
    const Daemon daemon(&service);
    const auto trainer = AttachAgainstLoss(daemon);
    const absl::Status registered = trainer->Register(TwoTensors());
    INFO(registered);
    CHECK(registered.ok());
    CHECK(tries == 2);
  }
}

TEST_CASE("an update's calls that meet the end of its lease fail and say that it ended") {
  const std::vector<EndOfLease> ends = EndsOfLeases();
  const EndOfLease end = ends[GENERATE(0, 1)];
  const bool reattach = GENERATE(false, true);
  INFO(end.told << ", reattach " << reattach);
  ScriptedTrainerService service;
  service.OnPush([&](const v1::Bucket&) {
    service.EndLease();
    return end.status;
  });
  const Daemon daemon(&service);
  const auto trainer = reattach ? AttachAgainstLoss(daemon) : AttachTrainer(daemon);
  auto update = trainer->Begin({.version = Version(1)});
  REQUIRE(update.ok());
  const absl::Status pushed = (*update)->Push(SmallBucket("a"));
  CHECK(pushed.code() == absl::StatusCode::kCancelled);  // the code of the scripted end
  CHECK_THAT(std::string(pushed.message()), Catch::Contains("push: the lease ended"));
  const absl::Status committed = (*update)->Commit().status();
  CHECK_THAT(std::string(committed.message()), Catch::Contains("the lease ended"));
  CHECK_FALSE(absl::IsUnauthenticated(committed));
}

TEST_CASE("without reattach a call that meets the end of its lease says that it ended") {
  const std::vector<EndOfLease> ends = EndsOfLeases();
  const EndOfLease end = ends[GENERATE(0, 1)];
  INFO(end.told);
  ScriptedTrainerService service;
  const auto ends_lease = [&] {
    service.EndLease();
    return end.status;
  };
  service.OnBegin([&](const auto&, auto*) { return ends_lease(); });
  service.OnRefit([&](const auto&) { return ends_lease(); });
  service.OnLayout([&] { return ends_lease(); });
  const Daemon daemon(&service);
  const auto trainer = AttachTrainer(daemon);
  absl::Status status;
  std::string what;
  SECTION("Begin") {
    status = trainer->Begin({.version = Version(1)}).status();
    what = "Begin";
  }
  SECTION("Refit") {
    status = trainer->Refit({.version = Version(1)}).status();
    what = "Refit";
  }
  SECTION("Register") {
    status = trainer->Register(TwoTensors());
    what = "RegisterLayout";
  }
  CHECK(status.code() == absl::StatusCode::kCancelled);
  CHECK_THAT(std::string(status.message()), Catch::Contains(what + ": the lease ended"));
}

TEST_CASE("a Refit that had committed when its lease ended is OK, and is not made again") {
  ScriptedTrainerService service;
  service.OnWelcome([](int number, v1::Welcome* welcome) {
    welcome->set_group_version(number == 1 ? 4 : 5);
    return grpc::Status::OK;
  });
  service.OnRefit([&](const auto&) {
    service.EndLease();
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the coordinator is lost");
  });
  const Daemon daemon(&service);
  const auto trainer = AttachAgainstLoss(daemon);
  REQUIRE(trainer->Register(TwoTensors()).ok());
  const auto result = trainer->Refit({.version = Version(5)});
  INFO(result.status());
  REQUIRE(result.ok());
  CHECK(result->version == Version(5));
  CHECK(result->instances.empty());
  CHECK(trainer->group_version() == Version(5));
  CHECK(Count(service.calls(), "refit 5 of 1 after 0") == 1);
}

TEST_CASE("where a loss aborted the other ranks' update, a Begin is ABORTED and opens nothing") {
  ScriptedTrainerService service;
  uint64_t next_incarnation = 9;  // FillWelcome's
  grpc::Status told(grpc::StatusCode::UNAVAILABLE, "the coordinator is lost");
  bool again = true;
  SECTION("the group lives on") { again = false; }
  SECTION("the group is another: its other ranks lost their leases too") { next_incarnation = 10; }
  SECTION("the daemon had not taken the call up") {
    told = grpc::Status(grpc::StatusCode::UNAUTHENTICATED, "lease.token: no such lease");
  }
  service.OnWelcome([&](int number, v1::Welcome* welcome) {
    if (number > 1) welcome->mutable_lease()->set_incarnation(next_incarnation);
    return grpc::Status::OK;
  });
  std::atomic<int> tries = 0;
  service.OnBegin([&](const auto&, auto*) {
    if (++tries > 1) return grpc::Status(grpc::Status::OK);
    service.EndLease();
    return told;
  });
  const Daemon daemon(&service);
  const auto trainer = AttachAgainstLoss(daemon, /*world_size=*/2);
  const auto begun = trainer->Begin({.version = Version(1)});
  INFO(begun.status());
  CHECK(begun.ok() == again);
  CHECK(tries == (again ? 2 : 1));
  if (again) return;
  CHECK(absl::IsAborted(begun.status()));
  CHECK_THAT(std::string(begun.status().message()), Catch::Contains("the lease ended"));
  CHECK(trainer->Begin({.version = Version(1)}).ok());
}

TEST_CASE("a call made again waits for the group to clean up what it began before") {
  ScriptedTrainerService service;
  std::atomic<int> tries = 0;
  service.OnBegin([&](const auto&, auto*) {
    switch (++tries) {
      case 1:
        service.EndLease();
        return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the coordinator is lost");
      case 2:
        return grpc::Status(grpc::StatusCode::ABORTED, "the update to version 1 is lost");
      default:
        return grpc::Status(grpc::Status::OK);
    }
  });
  const Daemon daemon(&service);
  const auto trainer = AttachAgainstLoss(daemon);
  const auto begun = trainer->Begin({.version = Version(1)});
  INFO(begun.status());
  CHECK(begun.ok());
  CHECK(tries == 3);
}

TEST_CASE("the first lease is tried for again where reattach is on, and else not") {
  const bool reattach = GENERATE(false, true);
  ScriptedTrainerService service;
  service.OnWelcome([](int number, v1::Welcome*) {
    return number <= 2 ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "not there yet")
                       : grpc::Status(grpc::Status::OK);
  });
  const Daemon daemon(&service);
  ConnectOptions connect = daemon.connect();
  connect.wait = kPatience;
  if (reattach) connect.reattach = kPatience;
  const auto trainer = Trainer::Attach({.connect = connect});
  INFO(trainer.status());
  CHECK(trainer.ok() == reattach);
  if (reattach) {
    CHECK((*trainer)->reattachments() == 0);
  } else {
    CHECK(absl::IsUnavailable(trainer.status()));
    CHECK_THAT(std::string(trainer.status().message()), Catch::Contains("not there yet"));
  }
}

TEST_CASE("options that can't be meant are refused before anything is connected") {
  const auto code = [](const TrainerOptions& options) {
    const absl::Status status = Trainer::Attach(options).status();
    INFO(status);
    CHECK_FALSE(FailureOf(status).field.empty());
    return status.code();
  };
  const auto invalid = absl::StatusCode::kInvalidArgument;
  CHECK(code({.connect = {.group = ""}}) == invalid);
  CHECK(code({.connect = {.group = std::string(129, 'g')}}) == invalid);
  CHECK(code({.connect = {.group = "\xff"}}) == invalid);
  CHECK(code({.connect = {.socket = std::string(200, 's'), .group = "g"}}) == invalid);
  CHECK(code({.connect = {.group = "g", .address = "x"}}) == invalid);
  CHECK(code({.connect = {.group = "g", .address = "127.0.0.1:1"}}) == invalid);  // without TLS
  CHECK(code({.connect = {.group = "g", .address = "127.0.0.1:1", .tls = {.key = "k"}}}) ==
        invalid);
  CHECK(code({.connect = {.group = "g",
                          .address = "127.0.0.1:1",
                          .tls = {.server = "prod"},
                          .insecure = true}}) == invalid);
  CHECK(code({.connect = {.group = "g", .wait = std::chrono::milliseconds(-1)}}) == invalid);
  CHECK(code({.connect = {.group = "g", .call_margin = std::chrono::milliseconds(0)}}) == invalid);
  CHECK(code({.connect = {.group = "g"}, .rank = 1}) == invalid);
  CHECK(code({.connect = {.group = "g"}, .rank = -1}) == invalid);
  CHECK(Engine::Attach({.connect = {.group = "g"}}).status().code() == invalid);
  CHECK(Engine::Attach(
            {.connect = {.group = "g"}, .instance = "i", .manifest = std::vector<TensorSpec>{}})
            .status()
            .code() == invalid);
  CHECK(Engine::Attach(
            {.connect = {.group = "g"}, .instance = "i", .held_version = Version(3), .dirty = true})
            .status()
            .code() == invalid);
}

TEST_CASE("a Refit names the generation of the last registration, which grows") {
  ScriptedTrainerService service;
  const Daemon daemon(&service);
  const auto trainer = AttachTrainer(daemon);
  REQUIRE(trainer->Register(TwoTensors()).ok());
  REQUIRE(trainer->Register(TwoTensors()).ok());
  const auto result = trainer->Refit({.version = Version(5)});
  INFO(result.status());
  REQUIRE(result.ok());
  CHECK(result->version == Version(5));
  CHECK(result->bytes == 77);
  CHECK(trainer->group_version() == Version(5));
  CHECK(service.calls() == std::vector<std::string>{"register 1 a b pushed 1",
                                                    "register 2 a b pushed 1",
                                                    "refit 5 of 2 after 0"});
}

TEST_CASE("a Refit carries its options, and a negative one is refused before it is sent") {
  ScriptedTrainerService service;
  v1::RefitRequest seen;
  service.OnRefit([&seen](const v1::RefitRequest& request) {
    seen = request;
    return grpc::Status(grpc::StatusCode::FAILED_PRECONDITION, "no layout: RegisterLayout first");
  });
  const Daemon daemon(&service);
  const auto trainer = AttachTrainer(daemon);
  const auto refused = trainer->Refit({.version = Version(6),
                                       .duration = std::chrono::milliseconds(4'000),
                                       .verification = Verification::kTransfer,
                                       .evict_late = true});
  CHECK(refused.status() ==
        absl::Status(absl::StatusCode::kFailedPrecondition, "no layout: RegisterLayout first"));
  CHECK(seen.version() == 6);
  CHECK(seen.duration_ms() == 4'000);
  CHECK(seen.verification() == v1::VERIFICATION_TRANSFER);
  CHECK(seen.evict_late());
  CHECK(seen.binding_generation() == 0);
  CHECK_FALSE(trainer->group_version().has_value());
  CHECK(absl::IsInvalidArgument(trainer->Refit({.version = Version(-1)}).status()));
  CHECK(absl::IsInvalidArgument(
      trainer->Refit({.version = Version(7), .duration = std::chrono::milliseconds(-1)}).status()));
  CHECK(service.calls().size() == 1);
}

TEST_CASE("an update carries its broadcast method, and Commit tells what went by which") {
  ScriptedTrainerService service;
  const Daemon daemon(&service);
  const auto trainer = AttachTrainer(daemon);
  auto update = trainer->Begin({.version = Version(3), .broadcast = BroadcastMethod::kSymmetric});
  REQUIRE(update.ok());
  const auto result = (*update)->Commit();
  REQUIRE(result.ok());
  REQUIRE(result->pushed.size() == 1);
  CHECK(result->pushed[0].method == BroadcastMethod::kChain);
  CHECK(result->pushed[0].bytes == 700);
  CHECK(result->pushed[0].buckets == 7);
  CHECK(service.calls() ==
        std::vector<std::string>{"begin 3 by BROADCAST_METHOD_SYMMETRIC", "commit 0"});
}

TEST_CASE("an update's Refit takes Commit's place once its pushes were answered") {
  ScriptedTrainerService service;
  v1::RefitRequest seen;
  service.OnRefit([&seen](const v1::RefitRequest& request) {
    seen = request;
    return grpc::Status::OK;
  });
  const Daemon daemon(&service);
  const auto trainer = AttachTrainer(daemon);
  REQUIRE(trainer->Register(TwoTensors()).ok());
  {
    auto update = trainer->Begin({.version = Version(3),
                                  .duration = std::chrono::milliseconds(9'000),
                                  .evict_late = true,
                                  .tensor_count = 1});
    REQUIRE(update.ok());
    (*update)->PushAsync(SmallBucket("b"), nullptr);
    const auto result = (*update)->Refit();
    INFO(result.status());
    REQUIRE(result.ok());
    CHECK(absl::IsFailedPrecondition((*update)->Refit().status()));
    CHECK(absl::IsFailedPrecondition((*update)->Commit().status()));
  }
  // The duration is Begin's own, so that the ranks' parameters stay equal.
  CHECK(seen.duration_ms() == 9'000);
  CHECK(seen.evict_late());
  CHECK(service.calls() == std::vector<std::string>{"register 1 a b pushed 1", "begin 3", "push 0",
                                                    "refit 3 of 1 after 1"});
}

TEST_CASE("an update whose Refit was refused, or whose push was, is aborted when it goes") {
  ScriptedTrainerService service;
  bool pushed = false;
  SECTION("refit") {
    service.OnRefit([](const v1::RefitRequest&) {
      return grpc::Status(grpc::StatusCode::FAILED_PRECONDITION, "tensor a");
    });
  }
  SECTION("push") {
    pushed = true;
    service.OnPush([](const v1::Bucket&) {
      return grpc::Status(grpc::StatusCode::FAILED_PRECONDITION, "tensor a");
    });
  }
  const Daemon daemon(&service);
  const auto trainer = AttachTrainer(daemon);
  {
    auto update = trainer->Begin({.version = Version(3)});
    REQUIRE(update.ok());
    (*update)->PushAsync(SmallBucket("b"), nullptr);
    CHECK((*update)->Refit().status() ==
          absl::Status(absl::StatusCode::kFailedPrecondition, "tensor a"));
  }
  CHECK(EventuallyContains(&service, "abort: "));
  CHECK(Contains(service.calls(), "refit") == !pushed);
}

TEST_CASE(
    "a trainer that attached again has registered its layout there, in a greater generation") {
  ScriptedTrainerService service;
  const Daemon daemon(&service);
  ConnectOptions connect = daemon.connect();
  connect.reattach = kPatience;
  auto trainer = Trainer::Attach({.connect = connect});
  REQUIRE(trainer.ok());
  REQUIRE((*trainer)->Register(TwoTensors()).ok());
  service.EndLease();
  const TimePoint deadline = std::chrono::steady_clock::now() + kPatience;
  while ((*trainer)->reattachments() == 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  const auto result = (*trainer)->Refit({.version = Version(5)});
  INFO(result.status());
  REQUIRE(result.ok());
  const std::vector<std::string> calls = service.calls();
  CHECK(calls.front() == "register 1 a b pushed 1");
  CHECK(calls.back() == "refit 5 of 2 after 0");
  CHECK(Contains(calls, "register 2 a b pushed 1"));
  REQUIRE((*trainer)->Register(TwoTensors()).ok());
  CHECK(service.calls().back() == "register 3 a b pushed 1");
}

// ---- engine ----

v1::EngineEvent PrepareEvent(int64_t version) {
  v1::EngineEvent event;
  event.mutable_prepare()->set_version(version);
  event.mutable_prepare()->set_remaining_ms(1'000);
  return event;
}

constexpr uint64_t kIncarnation = 0xabcdef;  // of the versions that the scripts commit
constexpr uint64_t kOrigin = 0x123456;       // of the versions that engines bring with them

v1::EngineEvent CommittedEvent(int64_t version) {
  v1::EngineEvent event;
  event.mutable_committed()->set_version(version);
  event.mutable_committed()->set_incarnation(kIncarnation);
  return event;
}

std::unique_ptr<Engine> AttachEngine(const Daemon& daemon) {
  auto engine = Engine::Attach({.connect = daemon.connect(),
                                .instance = "i",
                                .delivery = Delivery::kLoader,
                                .held_version = Version(3)});
  INFO(engine.status());
  REQUIRE(engine.ok());
  return *std::move(engine);
}

template <typename T>
T Await(Engine* engine) {
  auto event = engine->Next(kPatience);
  INFO(event.status());
  REQUIRE(event.ok());
  REQUIRE(std::holds_alternative<T>(*event));
  return std::get<T>(*std::move(event));
}

TEST_CASE("an engine serves the version of the last Committed, and its next hello names it") {
  ScriptedEngineService service([](ScriptedEngineService::Stream* stream) {
    stream->Write(PrepareEvent(4));
    v1::EngineMessage message;
    stream->Read(&message);
    if (message.ready().version() != 4) return grpc::Status(grpc::StatusCode::INTERNAL, "no Ready");
    stream->Write(CommittedEvent(4));
    stream->Read(&message);
    return grpc::Status::OK;
  });
  const Daemon daemon(&service);
  const auto engine = AttachEngine(daemon);
  CHECK(engine->version() == Version(3));
  CHECK(absl::IsFailedPrecondition(engine->Ready(Version(4))));
  CHECK(Await<Prepare>(engine.get()).version == Version(4));
  CHECK(engine->weights() == Weights::kPaused);
  CHECK_FALSE(engine->version().has_value());
  REQUIRE(engine->Ready(Version(4)).ok());
  CHECK(absl::IsFailedPrecondition(engine->Ready(Version(4))));
  Await<Committed>(engine.get());
  CHECK(engine->weights() == Weights::kClean);
  CHECK(engine->version() == Version(4));
}

TEST_CASE("a lease lost after Ready leaves unknown weights, before Ready clean ones") {
  bool ready = false;
  SECTION("before") {}
  SECTION("after") { ready = true; }
  ScriptedEngineService service([&](ScriptedEngineService::Stream* stream) {
    stream->Write(PrepareEvent(4));
    v1::EngineMessage message;
    if (ready) stream->Read(&message);
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
  });
  const Daemon daemon(&service);
  const auto engine = AttachEngine(daemon);
  Await<Prepare>(engine.get());
  if (ready) REQUIRE(engine->Ready(Version(4)).ok());
  const absl::Status lost = engine->Next(kPatience).status();
  CHECK(absl::IsUnavailable(lost));
  CHECK_THAT(std::string(lost.message()), Catch::Contains("gone"));
  CHECK_THAT(std::string(lost.message()), Catch::Contains(daemon.connect().socket));
  CHECK(engine->weights() == (ready ? Weights::kUnknown : Weights::kClean));
  CHECK(engine->version() == (ready ? std::nullopt : std::optional(Version(3))));
}

TEST_CASE("an outcome that came before the lease was lost is handed out first") {
  ScriptedEngineService service([](ScriptedEngineService::Stream* stream) {
    stream->Write(PrepareEvent(4));
    v1::EngineMessage message;
    stream->Read(&message);
    stream->Write(CommittedEvent(4));
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
  });
  const Daemon daemon(&service);
  const auto engine = AttachEngine(daemon);
  Await<Prepare>(engine.get());
  REQUIRE(engine->Ready(Version(4)).ok());
  Await<Committed>(engine.get());
  CHECK(absl::IsUnavailable(engine->Next(kPatience).status()));
  CHECK(engine->version() == Version(4));
}

TEST_CASE("a part that can't be mapped fails the update and gives its slot back") {
  std::vector<std::string> answers;
  ScriptedEngineService service([&](ScriptedEngineService::Stream* stream) {
    stream->Write(PrepareEvent(4));
    v1::EngineMessage message;
    stream->Read(&message);
    v1::EngineEvent event;
    event.mutable_bucket()->set_version(4);
    stream->Write(event);
    for (int i = 0; i < 2 && stream->Read(&message); ++i) {
      answers.push_back(message.has_failed() ? "failed" : message.has_ack() ? "ack" : "other");
    }
    v1::EngineEvent aborted;
    aborted.mutable_aborted()->set_version(4);
    aborted.mutable_aborted()->set_dirty(true);
    stream->Write(aborted);
    stream->Read(&message);
    return grpc::Status::OK;
  });
  const Daemon daemon(&service);
  const auto engine = AttachEngine(daemon);
  Await<Prepare>(engine.get());
  REQUIRE(engine->Ready(Version(4)).ok());
  CHECK(Await<Aborted>(engine.get()).dirty);
  CHECK(engine->weights() == Weights::kDirty);
  CHECK(answers == std::vector<std::string>{"failed", "ack"});
}

TEST_CASE("a commit that crosses Fail is a dirty abort of this rank") {
  ScriptedEngineService service([](ScriptedEngineService::Stream* stream) {
    stream->Write(PrepareEvent(4));
    v1::EngineMessage message;
    stream->Read(&message);  // Ready
    stream->Read(&message);  // Failed, which the daemon hears too late
    stream->Write(CommittedEvent(4));
    stream->Read(&message);
    return grpc::Status::OK;
  });
  const Daemon daemon(&service);
  const auto engine = AttachEngine(daemon);
  Await<Prepare>(engine.get());
  REQUIRE(engine->Ready(Version(4)).ok());
  REQUIRE(engine->Fail(Version(4), "the loader failed").ok());
  const Aborted aborted = Await<Aborted>(engine.get());
  CHECK(aborted.version == Version(4));
  CHECK(aborted.dirty);
  CHECK(engine->weights() == Weights::kDirty);
  CHECK_FALSE(engine->version().has_value());
}

TEST_CASE("an event is left in the stream until it is dealt with, also when the lease has ended") {
  ScriptedEngineService service([](ScriptedEngineService::Stream* stream) {
    stream->Write(CommittedEvent(4));
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
  });
  const Daemon daemon(&service);
  using EngineStream = AttachStream<v1::EngineMessage, v1::EngineEvent>;
  const auto stub = v1::Engine::NewStub(
      grpc::CreateChannel(UnixTarget(daemon.connect().socket), grpc::InsecureChannelCredentials()));
  const auto stream = EngineStream::Start(
      [&](grpc::ClientContext* context, EngineStream::Reactor* reactor) {
        stub->async()->Attach(context, reactor);
      },
      v1::EngineMessage(),
      {.daemon = daemon.connect().socket, .handler = nullptr, .ended = nullptr});
  const TimePoint deadline = After(kPatience);
  const auto welcome = stream->Front(deadline);
  REQUIRE(welcome.ok());
  REQUIRE((*welcome)->has_welcome());
  stream->PopFront();
  const auto committed = stream->Front(deadline);
  REQUIRE(committed.ok());
  while (stream->status().ok() && Until(deadline) > Duration::zero()) std::this_thread::yield();
  REQUIRE(absl::IsUnavailable(stream->status()));
  CHECK_FALSE(stream->exhausted());
  CHECK((*committed)->committed().version() == 4);
  stream->PopFront();
  CHECK(stream->exhausted());
  CHECK(stream->Front(deadline).status() == stream->status());
}

TEST_CASE("a lease that ends while Next takes an event is lost when that is taken, not before") {
  Mutex mutex;
  CondVar cond;
  // The client has asked for the pool in which the part lies, so Next is taking the part.
  bool asked = false;
  // The peer may answer, which it does by closing the connection.
  bool answer = false;
  const DescriptorPeer peer([&](int, int) {
    const TimePoint deadline = After(kPatience);
    MutexLock lock(&mutex);
    asked = true;
    cond.NotifyAll();
    while (!answer) {
      if (!cond.WaitUntil(&mutex, deadline)) break;
    }
  });
  ScriptedEngineService service(
      [](ScriptedEngineService::Stream* stream) {
        stream->Write(PrepareEvent(4));
        v1::EngineMessage message;
        stream->Read(&message);
        v1::EngineEvent event;
        event.mutable_bucket()->set_version(4);
        stream->Write(event);
        return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
      },
      peer.path());
  const Daemon daemon(&service);
  ConnectOptions connect = daemon.connect();
  connect.call_margin = 2 * kPatience;
  const auto attached =
      Engine::Attach({.connect = connect, .instance = "i", .delivery = Delivery::kLoader});
  INFO(attached.status());
  REQUIRE(attached.ok());
  Engine* const engine = attached->get();
  Await<Prepare>(engine);
  REQUIRE(engine->Ready(Version(4)).ok());
  absl::Status end;
  std::thread next([&] { end = engine->Next(kPatience).status(); });
  const TimePoint deadline = After(kPatience);
  {
    MutexLock lock(&mutex);
    while (!asked) {
      if (!cond.WaitUntil(&mutex, deadline)) break;
    }
  }
  while (!absl::IsUnavailable(engine->Register({})) && Until(deadline) > Duration::zero()) {
    std::this_thread::yield();
  }
  const Weights taking = engine->weights();
  {
    MutexLock lock(&mutex);
    answer = true;
    cond.NotifyAll();
  }
  next.join();
  CHECK(asked);
  CHECK(taking == Weights::kPaused);
  CHECK(absl::IsUnavailable(end));
  CHECK(engine->weights() == Weights::kUnknown);
}

TEST_CASE("device memory that goes waits for the daemon for long, and holds nobody else up") {
  std::atomic<uint64_t> released_host = 0;
  const DescriptorPeer peer([&](int fd, int) {
    DescriptorRequest request;
    bool got_fd = false;
    DescriptorReply reply;
    for (reply.region_id = 42; ReadRequest(fd, &request, &got_fd); ++reply.region_id) {
      if (request.kind == DescriptorRequestKind::kReleaseRegion) released_host = request.region_id;
      Reply(fd, reply);
    }
  });
  ScriptedEngineService service(
      [](ScriptedEngineService::Stream* stream) {
        v1::EngineMessage message;
        stream->Read(&message);
        return grpc::Status::OK;
      },
      peer.path());
  std::atomic<uint64_t> asked = 0;
  std::atomic<bool> go_on = false;
  std::atomic<bool> answered = false;
  std::atomic<bool> waited = false;
  service.OnRelease([&](grpc::ServerContext* context, const v1::ReleaseRegionRequest& request) {
    asked = request.region_id();
    const auto now = [] { return std::chrono::steady_clock::now(); };
    const TimePoint late = now() + 2 * kCleanupLimit;
    const TimePoint deadline = now() + kPatience;
    while (now() < late || (!go_on && now() < deadline)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    waited = !context->IsCancelled();
    answered = true;
    return grpc::Status::OK;
  });
  const Daemon daemon(&service);
  const auto engine = AttachEngine(daemon);
  constexpr int64_t kBytes = 4'096;
  auto region = engine->AddCudaRegion(UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC)), kBytes);
  INFO(region.status());
  REQUIRE(region.ok());
  std::atomic<bool> gone_after_answer = false;
  std::thread going([&] {
    region->reset();
    gone_after_answer = answered.load();
  });
  const TimePoint deadline = std::chrono::steady_clock::now() + kPatience;
  while (asked == 0 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  CHECK(asked == 42);
  auto host = engine->NewRegion(kBytes);
  CHECK_FALSE(answered);
  go_on = true;
  going.join();
  CHECK(waited);
  CHECK(gone_after_answer);
  INFO(host.status());
  REQUIRE(host.ok());
  host->reset();
  CHECK(released_host == 43);
}

// ---- attaching again ----

// Plays one script after the other, one an Attach, and keeps the hellos.
class RepeatedEngineService final : public v1::Engine::Service {
 public:
  using Stream = ScriptedEngineService::Stream;
  using Script = std::function<grpc::Status(Stream*)>;
  explicit RepeatedEngineService(std::vector<Script> scripts) : scripts_(std::move(scripts)) {}
  std::vector<v1::EngineHello> hellos() {
    MutexLock lock(&mutex_);
    return hellos_;
  }

 private:
  grpc::Status Attach(grpc::ServerContext*, Stream* stream) override {
    v1::EngineMessage message;
    if (!stream->Read(&message)) return grpc::Status::OK;
    size_t attach = 0;
    {
      MutexLock lock(&mutex_);
      attach = hellos_.size();
      hellos_.push_back(message.hello());
    }
    if (attach >= scripts_.size()) {
      return grpc::Status(grpc::StatusCode::FAILED_PRECONDITION, "no script is left");
    }
    return scripts_[attach](stream);
  }
  const std::vector<Script> scripts_;
  Mutex mutex_;
  std::vector<v1::EngineHello> hellos_ ABSL_GUARDED_BY(mutex_);
};

void Greet(RepeatedEngineService::Stream* stream) {
  v1::EngineEvent event;
  FillWelcome(event.mutable_welcome());
  stream->Write(event);
}

std::unique_ptr<Engine> AttachAgainAndAgain(const Daemon& daemon) {
  EngineOptions options{.connect = daemon.connect(),
                        .instance = "i",
                        .delivery = Delivery::kLoader,
                        .held_version = Version(3),
                        .held_origin = kOrigin};
  options.connect.reattach = kPatience;
  options.connect.coordinator = "node-a:7001";
  auto engine = Engine::Attach(options);
  INFO(engine.status());
  REQUIRE(engine.ok());
  return *std::move(engine);
}

TEST_CASE(
    "a rank with unknown weights reports no version at its next lease, and no clean abort makes it "
    "good") {
  bool ready = false;
  SECTION("lost before Ready") {}
  SECTION("lost after Ready") { ready = true; }
  RepeatedEngineService service({
      [&](auto* stream) {
        Greet(stream);
        stream->Write(PrepareEvent(4));
        v1::EngineMessage message;
        if (ready) stream->Read(&message);
        return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
      },
      [](auto*) { return grpc::Status(grpc::StatusCode::UNAVAILABLE, "not yet"); },
      [](auto* stream) {
        Greet(stream);
        stream->Write(PrepareEvent(5));
        v1::EngineEvent aborted;
        aborted.mutable_aborted()->set_version(5);
        stream->Write(aborted);
        v1::EngineMessage message;
        stream->Read(&message);
        return grpc::Status::OK;
      },
  });
  const Daemon daemon(&service);
  const auto engine = AttachAgainAndAgain(daemon);
  Await<Prepare>(engine.get());
  if (ready) REQUIRE(engine->Ready(Version(4)).ok());
  const Lost lost = Await<Lost>(engine.get());
  CHECK(lost.weights == (ready ? Weights::kUnknown : Weights::kClean));
  CHECK_THAT(lost.reason, Catch::Contains("gone"));
  const Reattached again = Await<Reattached>(engine.get());
  CHECK(again.weights == lost.weights);
  CHECK(again.held_version == (ready ? std::nullopt : std::optional(Version(3))));
  CHECK(engine->reattachments() == 1);
  const auto hellos = service.hellos();
  REQUIRE(hellos.size() == 3);
  CHECK(hellos[0].held_version() == 3);
  CHECK(hellos[2].has_held_version() == !ready);
  CHECK(hellos[0].held_origin() == kOrigin);
  CHECK(hellos[2].held_origin() == (ready ? 0 : kOrigin));
  CHECK(hellos[0].coordinator() == "node-a:7001");
  CHECK(hellos[2].coordinator() == "node-a:7001");
  Await<Prepare>(engine.get());
  CHECK(Await<Aborted>(engine.get()).dirty == ready);
  CHECK(engine->weights() == lost.weights);
}

TEST_CASE("an engine that attached as dirty says so to every daemon, until a commit") {
  RepeatedEngineService service({
      [](auto*) { return grpc::Status(grpc::StatusCode::UNAVAILABLE, "not there yet"); },
      [](auto* stream) {
        Greet(stream);
        stream->Write(PrepareEvent(4));
        v1::EngineEvent aborted;
        // The restarted daemon calls the update clean, because it knows no better.
        aborted.mutable_aborted()->set_version(4);
        stream->Write(aborted);
        return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
      },
      [](auto* stream) {
        Greet(stream);
        stream->Write(PrepareEvent(5));
        v1::EngineMessage message;
        stream->Read(&message);
        stream->Write(CommittedEvent(5));
        return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
      },
      [](auto* stream) {
        Greet(stream);
        v1::EngineMessage message;
        stream->Read(&message);
        return grpc::Status::OK;
      },
  });
  const Daemon daemon(&service);
  EngineOptions options{
      .connect = daemon.connect(), .instance = "i", .delivery = Delivery::kLoader, .dirty = true};
  options.connect.reattach = kPatience;
  options.connect.wait = kPatience;
  auto attached = Engine::Attach(options);
  INFO(attached.status());
  REQUIRE(attached.ok());
  Engine* const engine = attached->get();
  CHECK(engine->weights() == Weights::kDirty);
  Await<Prepare>(engine);
  CHECK(Await<Aborted>(engine).dirty);
  CHECK(engine->weights() == Weights::kDirty);
  CHECK(Await<Lost>(engine).weights == Weights::kDirty);
  CHECK(Await<Reattached>(engine).weights == Weights::kDirty);
  Await<Prepare>(engine);
  REQUIRE(engine->Ready(Version(5)).ok());
  Await<Committed>(engine);
  CHECK(engine->weights() == Weights::kClean);
  Await<Lost>(engine);
  CHECK(Await<Reattached>(engine).held_version == Version(5));
  const auto hellos = service.hellos();
  REQUIRE(hellos.size() == 4);
  for (const size_t dirty : {0, 1, 2}) {
    CHECK(hellos[dirty].dirty());
    CHECK_FALSE(hellos[dirty].has_held_version());
  }
  CHECK_FALSE(hellos[3].dirty());
  CHECK(hellos[3].held_version() == 5);
}

TEST_CASE("answers to the events of a lost lease are dropped, and do not reach the next one") {
  Mutex mutex;
  std::vector<std::string> heard;
  RepeatedEngineService service({
      [&](auto* stream) {
        Greet(stream);
        stream->Write(PrepareEvent(4));
        return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
      },
      [&](auto* stream) {
        Greet(stream);
        v1::EngineMessage message;
        while (stream->Read(&message)) {
          MutexLock lock(&mutex);
          heard.push_back(message.has_ready()    ? "ready"
                          : message.has_detach() ? "detach"
                                                 : "other");
          if (message.has_detach()) break;
        }
        return grpc::Status::OK;
      },
  });
  {
    const Daemon daemon(&service);
    const auto engine = AttachAgainAndAgain(daemon);
    Await<Prepare>(engine.get());
    const TimePoint deadline = std::chrono::steady_clock::now() + kPatience;
    while (engine->reattachments() == 0 && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
    }
    CHECK(engine->Ready(Version(4)).ok());
    CHECK(engine->weights() == Weights::kClean);
    Await<Lost>(engine.get());
    Await<Reattached>(engine.get());
    CHECK(absl::IsFailedPrecondition(engine->Ready(Version(4))));
  }
  MutexLock lock(&mutex);
  CHECK(heard == std::vector<std::string>{"detach"});
}

TEST_CASE(
    "an outcome that is still queued when the lease is lost decides what is reported as held") {
  RepeatedEngineService service({
      [](auto* stream) {
        Greet(stream);
        stream->Write(PrepareEvent(4));
        v1::EngineMessage message;
        stream->Read(&message);
        stream->Write(CommittedEvent(4));
        return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
      },
      [](auto* stream) {
        Greet(stream);
        v1::EngineMessage message;
        stream->Read(&message);
        return grpc::Status::OK;
      },
  });
  const Daemon daemon(&service);
  const auto engine = AttachAgainAndAgain(daemon);
  Await<Prepare>(engine.get());
  REQUIRE(engine->Ready(Version(4)).ok());
  CHECK(Await<Committed>(engine.get()).incarnation == kIncarnation);
  CHECK(Await<Lost>(engine.get()).weights == Weights::kClean);
  CHECK(Await<Reattached>(engine.get()).held_version == Version(4));
  CHECK(service.hellos().at(1).held_version() == 4);
  CHECK(service.hellos().at(1).held_origin() == kIncarnation);
}

TEST_CASE("a lease that the daemon refuses for good ends the engine with that reason") {
  RepeatedEngineService service({[](auto* stream) {
    Greet(stream);
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
  }});
  const Daemon daemon(&service);
  const auto engine = AttachAgainAndAgain(daemon);
  Await<Lost>(engine.get());
  const absl::Status end = engine->Next(kPatience).status();
  CHECK(absl::IsFailedPrecondition(end));
  CHECK_THAT(std::string(end.message()), Catch::Contains("no script is left"));
  CHECK(engine->Ready(Version(4)) == end);
}

TEST_CASE("events beyond what is queued wait in the stream and keep their order") {
  constexpr int64_t kEvents = 5 * kMaxQueuedEvents;
  ScriptedEngineService service([](ScriptedEngineService::Stream* stream) {
    for (int64_t i = 1; i <= kEvents; ++i) stream->Write(PrepareEvent(i));
    return grpc::Status::OK;
  });
  const Daemon daemon(&service);
  const auto engine = AttachEngine(daemon);
  for (int64_t i = 1; i <= kEvents; ++i) {
    REQUIRE(Await<Prepare>(engine.get()).version == Version(i));
  }
  CHECK(absl::IsUnavailable(engine->Next(kPatience).status()));
}

TEST_CASE("Next gives Nothing when its timeout passed") {
  ScriptedEngineService service([](ScriptedEngineService::Stream* stream) {
    v1::EngineMessage message;
    stream->Read(&message);
    return grpc::Status::OK;
  });
  const Daemon daemon(&service);
  const auto engine = AttachEngine(daemon);
  auto event = engine->Next(std::chrono::milliseconds(0));
  REQUIRE(event.ok());
  CHECK(std::holds_alternative<Nothing>(*event));
}

}  // namespace
}  // namespace refitd::client
