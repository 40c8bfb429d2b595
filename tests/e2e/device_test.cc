// Members on GPUs: attaching by UUID, device memory as regions and in buckets, pushes and compiled
// refits between GPUs, the end of a member. The daemon's parts run in this process over the fake
// driver; the real transport's tasks move the bytes.
#include <grpcpp/server_posix.h>
#include <sys/mman.h>
#include <unistd.h>

#include <catch2/catch.hpp>

#if defined(REFITD_CUDA)
#include <atomic>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <functional>
#include <future>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/engine.h"
#include "client/refit.h"
#include "client/refit_test_util.h"
#include "client/trainer.h"
#include "daemon/node/daemon.h"
#include "daemon/node/member_calls.h"
#include "daemon/node/member_memory.h"
#include "daemon/node/peer_server.h"
#include "daemon/services/member_requests.h"
#include "daemon/services/peer_service.h"
#include "daemon/services/services.h"
#include "daemon/services/status.h"
#include "daemon/sockets/accept_loop.h"
#include "daemon/sockets/descriptor_socket.h"
#include "daemon/sockets/process_watch.h"
#include "daemon/test_util.h"
#include "tests/e2e/derived_model.h"
#include "tests/e2e/harness.h"
#include "tests/e2e/raw_client.h"
#include "tests/e2e/require.h"
#include "transport/cuda/cuda_transport.h"
#include "transport/cuda/fakes/fake_cuda.h"
#include "transport/cuda/fakes/fake_nccl.h"
#include "transport/cuda/nccl/nccl.h"
#include "transport/cuda/nccl/wire.h"
#include "transport/host/host_transport.h"
#include "transport/host/memory.h"
#endif

namespace refitd::e2e {
namespace {

#if !defined(REFITD_CUDA)

TEST_CASE("where CUDA is not compiled in there is no GPU to attach on") { SUCCEED(); }

#else

using Catch::Matchers::Contains;
using grpc::StatusCode;

constexpr int64_t kMiB = int64_t{1} << 20;

// The parts of a machine that outlive a daemon.
struct Machine {
  const TempFolder folder;
  FakeCuda fake;
  std::unique_ptr<FakeNccl> nccl;
};

// The daemon's state, services and sockets, over two or more fake GPUs.
class LocalDaemon {
 public:
  // `limit`: how long device work may take. `id`: a daemon with an id has peers, over TCP and NCCL;
  // a daemon without has none.
  explicit LocalDaemon(bool gpus = true, Machine* machine = nullptr,
                       std::chrono::milliseconds limit = CudaTransportOptions().limit,
                       int devices = 2, const std::string& id = "")
      : own_(machine == nullptr ? std::make_unique<Machine>() : nullptr),
        machine_(machine == nullptr ? own_.get() : machine),
        id_(id) {
    processes_ = *ProcessWatch::Create();
    DaemonOptions options;
    if (!id.empty()) options.daemon_id = id;
    // Models here are small; the limits are lowered so that buckets are cut into parts.
    options.group.direct_part_bytes = 16 << 10;
    options.group.direct_part_tensors = 2;
    options.descriptor_socket = socket() + std::string(kDescriptorSocketSuffix);
    options.devices.detail = "the test has none";
    std::unique_ptr<Transport> transport = MakeHostTransport({.threads = 1});
    if (gpus) {
      fake().Devices(devices);
      const std::shared_ptr<CudaMemory> memory = *CudaMemory::Create(FakeCuda::Path());
      options.devices.memory = memory;
      options.devices.detail = "fakes";
      for (const CudaDevice& device : memory->devices()) uuids_.push_back(device.uuid);
      CudaTransportOptions cuda;
      cuda.limit = limit;
      if (!id.empty()) {
        if (machine_->nccl == nullptr) machine_->nccl = std::make_unique<FakeNccl>();
        cuda.nccl = FindNccl(FakeNccl::Path()).api;
        options.devices.wire = MakeNcclWire(cuda.nccl, memory, {}).value();
      }
      cuda.lost = [this](const absl::Status& why) {
        MutexLock lock(&mutex_);
        lost_ = why;
      };
      transport = *MakeCudaTransport(memory, std::move(transport), cuda, "an image");
    }
    const PeerDialer dialer = [](PeerDial dial, PeerLinkCallbacks callbacks) {
      dial.credentials = grpc::InsecureChannelCredentials();
      return PeerLink::Dial(std::move(dial), std::move(callbacks));
    };
    daemon_ =
        std::make_unique<refitd::Daemon>(std::move(options), std::move(transport), processes_.get(),
                                         nullptr, id.empty() ? nullptr : dialer);
    authorizer_ =
        std::make_unique<Authorizer>(AuthorizerOptions{.peers = &peers_, .policies = &policies_});
    trainers_ = MakeTrainerService(daemon_.get(), authorizer_.get());
    engines_ = MakeEngineService(daemon_.get(), authorizer_.get());
    operators_ = MakeOperatorService(daemon_.get(), authorizer_.get());
    accept_loop_ = *AcceptLoop::Create({socket(), 0600}, &peers_, [this](UniqueFd fd) {
      grpc::AddInsecureChannelFromFd(server_.get(), fd.Release());
    });
    descriptors_ = *DescriptorSocket::Create(
        {.path = socket() + std::string(kDescriptorSocketSuffix),
         .mode = 0600,
         .admit = [](const PeerCredentials&) { return absl::OkStatus(); }},
        &daemon_->memory());
    grpc::ServerBuilder builder;
    builder.RegisterService(trainers_.get());
    builder.RegisterService(engines_.get());
    builder.RegisterService(operators_.get());
    if (!id.empty()) {
      peer_links_ = std::make_unique<PeerService>(&daemon_->peer_server(), 64 * kMiB);
      builder.RegisterService(peer_links_.get());
      builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    }
    server_ = builder.BuildAndStart();
    accept_loop_->Start();
  }
  ~LocalDaemon() {
    daemon_->Drain();
    daemon_->Finish(std::chrono::steady_clock::now());
    accept_loop_->Stop();
    descriptors_->Stop();
    server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(2));
    server_.reset();
  }

  std::string socket() const { return machine_->folder / ("refitd" + id_ + ".sock"); }
  // The address for peers.
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  std::shared_ptr<grpc::Channel> Connect() const { return ConnectTo(socket()); }
  FakeCuda& fake() { return machine_->fake; }
  // A daemon without peers has no such object.
  FakeNccl& nccl() { return *machine_->nccl; }
  refitd::Daemon& daemon() { return *daemon_; }
  const std::string& uuid(size_t device) const { return uuids_[device]; }
  absl::Status lost() {
    MutexLock lock(&mutex_);
    return lost_;
  }

  v1::TrainerHello TrainerOn(size_t device) const {
    v1::TrainerHello hello = RawTrainer::Hello("g");
    hello.mutable_device()->set_name(uuid(device));
    return hello;
  }
  v1::EngineHello EngineOn(size_t device, v1::Delivery delivery = v1::DELIVERY_IN_PLACE,
                           const std::string& instance = "i") const {
    v1::EngineHello hello = RawEngine::Hello("g", instance, 0, 1, delivery);
    hello.mutable_device()->set_name(uuid(device));
    return hello;
  }

 private:
  const std::unique_ptr<Machine> own_;
  Machine* const machine_;
  const std::string id_;
  int port_ = 0;
  Mutex mutex_;
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> uuids_;
  std::unique_ptr<ProcessWatch> processes_;
  std::unique_ptr<refitd::Daemon> daemon_;
  PeerTable peers_;
  const PolicyStore policies_{
      *Policy::Make({.rules = {}, .uids = {geteuid()}, .gids = {}, .peers = ""})};
  std::unique_ptr<Authorizer> authorizer_;
  std::unique_ptr<grpc::Service> trainers_;
  std::unique_ptr<grpc::Service> engines_;
  std::unique_ptr<grpc::Service> operators_;
  std::unique_ptr<PeerService> peer_links_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<AcceptLoop> accept_loop_;
  std::unique_ptr<DescriptorSocket> descriptors_;
};

// A block of another process's cudaMalloc.
struct Block {
  Block(LocalDaemon* daemon, size_t device, int64_t size)
      : bytes(size), data(daemon->fake().Export(static_cast<int>(device), size, &handle)) {
    request.mutable_cuda_ipc()->set_gpu_uuid(daemon->uuid(device));
    request.mutable_cuda_ipc()->set_handle(handle);
  }
  v1::CudaIpcHandle At(int64_t byte_offset, int64_t count = 0) const {
    v1::CudaIpcHandle place = request.cuda_ipc();
    place.set_byte_offset(byte_offset);
    place.set_bytes(count);
    return place;
  }
  std::string handle;
  int64_t bytes;
  char* data;
  v1::RegisterRegionRequest request;  // asks for the whole block
};

template <typename Member>
auto Register(Member* member, const v1::RegisterRegionRequest& request) {
  if constexpr (std::is_same_v<Member, RawEngine>) {
    return member->Call(&v1::Engine::Stub::RegisterRegion, request);
  } else {
    return member->Call(&v1::Trainer::Stub::RegisterRegion, request);
  }
}
template <typename Member>
auto Release(Member* member, uint64_t region) {
  v1::ReleaseRegionRequest request;
  request.set_region_id(region);
  if constexpr (std::is_same_v<Member, RawEngine>) {
    return member->Call(&v1::Engine::Stub::ReleaseRegion, request);
  } else {
    return member->Call(&v1::Trainer::Stub::ReleaseRegion, request);
  }
}

// An in-place engine rank whose parameters are on a GPU.
struct DeviceEngine {
  // `coordinator`: the daemon that has the group; null: the daemon that the engine attaches to.
  DeviceEngine(LocalDaemon* daemon, size_t device, const Model& of,
               const std::string& instance = "i", const LocalDaemon* coordinator = nullptr)
      : model(of),
        held(HoldWhole(of)),
        block(daemon, device, held.region_bytes),
        engine(daemon->Connect(), [&] {
          v1::EngineHello hello = daemon->EngineOn(device, v1::DELIVERY_IN_PLACE, instance);
          if (coordinator == nullptr) return hello;
          hello.set_coordinator(coordinator->address());
          hello.clear_spec();  // the group exists
          return hello;
        }()) {
    INFO(engine.attached().error_message());
    REQUIRE(engine.attached().ok());
    const auto region = Register(&engine, block.request);
    REQUIRE_OK(region);
    REQUIRE(region.response.bytes() >= held.region_bytes);
    const std::string empty = EmptyImage(held.region_bytes);
    std::memcpy(block.data, empty.data(), empty.size());
    for (Piece& piece : held.layout.pieces) piece.region = RegionId(region.response.region_id());
    held.layout.binding_generation = 1;
    REQUIRE_OK(engine.Register(held.layout));
  }
  // Empty: it holds the version, and nothing else was written.
  std::string Difference(int64_t version) const {
    return e2e::Difference(
        ExpectedImage(EmptyImage(held.region_bytes), held.layout, model, BytesOf(model, version)),
        block.data, held.layout);
  }
  const Model model;
  Held held;
  const Block block;
  RawEngine engine;
};

// Writes the version's tensors one after the other, each at a multiple of 64 bytes; returns their
// offsets.
std::vector<int64_t> Pack(const Model& model, int64_t version, char* to) {
  std::vector<int64_t> offsets;
  int64_t end = 0;
  for (const std::string& bytes : BytesOf(model, version)) {
    offsets.push_back(end);
    std::memcpy(to + end, bytes.data(), bytes.size());
    end += (static_cast<int64_t>(bytes.size()) + 63) / 64 * 64;
  }
  return offsets;
}

v1::BeginRequest BeginBy(int64_t version, v1::BroadcastMethod method) {
  v1::BeginRequest request;
  request.set_version(version);
  request.set_broadcast(method);
  return request;
}

TEST_CASE(
    "a member attaches on a GPU by its UUID; for an unknown UUID the error lists those there are") {
  LocalDaemon daemon;
  RawTrainer trainer(daemon.Connect(), daemon.TrainerOn(1));
  REQUIRE(trainer.attached().ok());
  RawEngine engine(daemon.Connect(), daemon.EngineOn(0));
  REQUIRE(engine.attached().ok());

  v1::EngineHello hello = daemon.EngineOn(0);
  hello.mutable_device()->set_name("GPU-none");
  hello.set_instance("other");
  CheckRefused(RawEngine(daemon.Connect(), hello).attached(), StatusCode::FAILED_PRECONDITION,
               {"device.name", "GPU-none", daemon.uuid(0), daemon.uuid(1)});
  hello = daemon.EngineOn(1, v1::DELIVERY_LOADER);
  hello.set_instance("loader");
  CHECK(RawEngine(daemon.Connect(), hello).attached().ok());
  hello = daemon.EngineOn(0);
  hello.set_group("far");
  hello.set_coordinator("10.0.0.1:7");
  CheckRefused(RawEngine(daemon.Connect(), hello).attached(), StatusCode::FAILED_PRECONDITION,
               {"device.name", "10.0.0.1:7"});
  CheckRefused(RawEngine(daemon.Connect(), RawEngine::Hello("g", "host")).attached(),
               StatusCode::FAILED_PRECONDITION, {"device.name", "host memory", daemon.uuid(1)});
}

// The status with which a stream ended.
struct EndedSink : MemberSink {
  void Send(MemberNews) override {}
  void End(absl::Status status) override { end = std::move(status); }
  absl::Status end;
};

TEST_CASE("a member whose credentials nobody knows gets no GPU") {
  LocalDaemon daemon;
  const auto sink = std::make_shared<EndedSink>();
  daemon.daemon().calls().Attach(ArrivalOf(daemon.TrainerOn(0), Peer{}), sink);
  CHECK(absl::IsPermissionDenied(sink->end));
  CHECK_THAT(Message(sink->end), Contains("device.name") && Contains(daemon.uuid(0)));
}

TEST_CASE("a daemon without GPUs says so to whoever has one") {
  LocalDaemon daemon(/*gpus=*/false);
  v1::TrainerHello hello = RawTrainer::Hello("g");
  hello.mutable_device()->set_name("GPU-1");
  CheckRefused(RawTrainer(daemon.Connect(), hello).attached(), StatusCode::FAILED_PRECONDITION,
               {"device.name", "GPU-1", "the test has none"});
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g"));
  REQUIRE(trainer.attached().ok());
  CheckRefused(Register(&trainer, {}).status, StatusCode::UNIMPLEMENTED, {"the test has none"});
  const v1::GetStatusResponse status = StatusOf(&daemon.daemon());
  REQUIRE(status.transports(1).name() == "cuda");
  CHECK(!status.transports(1).available());
  CHECK(status.transports(1).detail() == "the test has none");
}

TEST_CASE("regions of device memory: fields are checked, and released ones are closed") {
  LocalDaemon daemon;
  RawTrainer trainer(daemon.Connect(), daemon.TrainerOn(0));
  REQUIRE(trainer.attached().ok());
  const Block block(&daemon, 0, 3 * kMiB);
  const auto refused = [&](StatusCode code, const std::vector<std::string>& words,
                           const std::function<void(v1::CudaIpcHandle*)>& damage) {
    v1::RegisterRegionRequest request = block.request;
    damage(request.mutable_cuda_ipc());
    CheckRefused(Register(&trainer, request).status, code, words);
  };
  refused(StatusCode::INVALID_ARGUMENT, {"cuda_ipc.handle", "63"},
          [](auto* h) { h->mutable_handle()->pop_back(); });
  refused(StatusCode::INVALID_ARGUMENT, {"cuda_ipc.byte_offset", "256"},
          [](auto* h) { h->set_byte_offset(256); });
  refused(StatusCode::INVALID_ARGUMENT, {"cuda_ipc.bytes", "-1"},
          [](auto* h) { h->set_bytes(-1); });
  refused(StatusCode::INVALID_ARGUMENT, {"cuda_ipc.bytes", std::to_string(4 * kMiB)},
          [](auto* h) { h->set_bytes(4 * kMiB); });
  refused(StatusCode::FAILED_PRECONDITION, {"cuda_ipc.gpu_uuid", daemon.uuid(1), daemon.uuid(0)},
          [&](auto* h) { h->set_gpu_uuid(daemon.uuid(1)); });
  refused(StatusCode::FAILED_PRECONDITION, {"cuda_ipc.handle"},
          [](auto* h) { h->set_handle(std::string(64, 'x')); });
  CHECK(Eventually([&] { return daemon.fake().Count().opened_handles == 0; }));

  v1::RegisterRegionRequest part = block.request;
  part.mutable_cuda_ipc()->set_bytes(2 * kMiB);
  const auto region = Register(&trainer, part);
  REQUIRE_OK(region);
  CHECK(region.response.bytes() == 2 * kMiB);
  // A trainer may register a block twice, and the daemon opens the block once.
  const auto again = Register(&trainer, block.request);
  REQUIRE_OK(again);
  CHECK(again.response.bytes() == 3 * kMiB);
  CHECK(daemon.fake().Count().opened_handles == 1);
  CheckRefused(Release(&trainer, 4711).status, StatusCode::NOT_FOUND, {"region_id", "4711"});
  REQUIRE_OK(Release(&trainer, region.response.region_id()));
  CHECK(daemon.fake().Count().opened_handles == 1);
  REQUIRE_OK(Release(&trainer, again.response.region_id()));
  // The answer comes when the block is closed.
  CHECK(daemon.fake().Count().opened_handles == 0);
}

TEST_CASE("an engine's block is one region, stays while a layout names it, and ends with it") {
  LocalDaemon daemon;
  const Model model = PlainModel(2, 8, 8);
  {
    DeviceEngine engine(&daemon, 0, model);
    CheckRefused(Register(&engine.engine, engine.block.request).status, StatusCode::ALREADY_EXISTS,
                 {"region"});
    CheckRefused(Release(&engine.engine, engine.held.layout.pieces[0].region.value()).status,
                 StatusCode::FAILED_PRECONDITION, {"in use by tensor"});
    CHECK(daemon.fake().Count().opened_handles == 1);
  }
  CHECK(Eventually([&] { return daemon.fake().Count().opened_handles == 0; }));
}

TEST_CASE("VMM memory comes over the descriptor socket") {
  LocalDaemon daemon;
  RawTrainer trainer(daemon.Connect(), daemon.TrainerOn(1));
  REQUIRE(trainer.attached().ok());
  int raw = -1;
  daemon.fake().ExportVmm(1, 4 * kMiB, &raw);
  const UniqueFd fd(raw);
  DescriptorRequest request = trainer.descriptors().Request(DescriptorRequestKind::kRegisterRegion);
  request.region_kind = RegionKind::kDevice;
  request.bytes = 4 * kMiB;
  const auto registered = trainer.descriptors().Ask(request, {fd.get()});
  REQUIRE(registered.has_value());
  INFO(registered->message);
  REQUIRE(registered->code == 0);
  CHECK(daemon.fake().Count().mapped == 1);
  request = trainer.descriptors().Request(DescriptorRequestKind::kReleaseRegion);
  request.region_id = registered->region_id;
  const auto released = trainer.descriptors().Ask(request, {});
  REQUIRE(released.has_value());
  CHECK(released->code == 0);
  CHECK(daemon.fake().Count().mapped == 0);

  RawTrainer host(daemon.Connect(), RawTrainer::Hello("other"));
  REQUIRE(host.attached().ok());
  request = host.descriptors().Request(DescriptorRequestKind::kRegisterRegion);
  request.region_kind = RegionKind::kDevice;
  request.bytes = 4 * kMiB;
  const auto refused = host.descriptors().Ask(request, {fd.get()});
  REQUIRE(refused.has_value());
  CHECK(refused->code == static_cast<uint32_t>(absl::StatusCode::kFailedPrecondition));
  CHECK_THAT(std::string(refused->message), Contains("host"));
}

TEST_CASE("buckets from another GPU: by region, by a handle for all, by a handle a tensor") {
  LocalDaemon daemon;
  const Model model = MixedModel();
  DeviceEngine engine(&daemon, 0, model);
  RawTrainer trainer(daemon.Connect(), daemon.TrainerOn(1));
  REQUIRE(trainer.attached().ok());
  const Block source(&daemon, 1, ModelBytes(model) + 64 * 64);
  const v1::Verification verification =
      GENERATE(v1::VERIFICATION_UNSPECIFIED, v1::VERIFICATION_OFF, v1::VERIFICATION_TRANSFER,
               v1::VERIFICATION_READBACK);
  int64_t version = 0;
  const auto install =
      [&](const std::function<void(v1::Bucket*, const std::vector<int64_t>&)>& from,
          int64_t shift) {
        const std::vector<int64_t> offsets = Pack(model, ++version, source.data + shift);
        REQUIRE_OK(trainer.Begin(version, verification));
        v1::Bucket bucket = Describe(model, 0);
        from(&bucket, offsets);
        REQUIRE_OK(trainer.Push(version, bucket));
        REQUIRE_OK(trainer.Commit(version, 1));
        CHECK(engine.Difference(version) == "");
      };
  install(
      [&](v1::Bucket* bucket, const std::vector<int64_t>& offsets) {
        const auto region = Register(&trainer, source.request);
        REQUIRE_OK(region);
        for (const int64_t offset : offsets) {
          v1::RegionRef* ref = bucket->mutable_regions()->add_refs();
          ref->set_region_id(region.response.region_id());
          ref->set_byte_offset(offset);
        }
      },
      0);
  REQUIRE(daemon.fake().Count().opened_handles > 0);
  install(
      [&](v1::Bucket* bucket, const std::vector<int64_t>& offsets) {
        bucket->set_packed(true);
        for (const int64_t offset : offsets) bucket->add_byte_offsets(offset);
        v1::CudaIpcHandle* other = bucket->mutable_cuda_ipc()->add_handles();
        other->set_gpu_uuid(daemon.uuid(0));  // the UUID of another rank's GPU
        *bucket->mutable_cuda_ipc()->add_handles() = source.At(64);
      },
      64);
  install(
      [&](v1::Bucket* bucket, const std::vector<int64_t>& offsets) {
        for (size_t i = 0; i < model.size(); ++i) {
          *bucket->mutable_cuda_ipc()->add_handles() = source.At(offsets[i], TensorBytes(model[i]));
        }
      },
      0);
}

TEST_CASE("handles of a bucket are open until its answer, and bad ones change nothing") {
  LocalDaemon daemon;
  const Model model = PlainModel(2, 8, 8);
  DeviceEngine engine(&daemon, 0, model);
  RawTrainer trainer(daemon.Connect(), daemon.TrainerOn(1));
  REQUIRE(trainer.attached().ok());
  const Block source(&daemon, 1, kMiB);
  const std::vector<int64_t> offsets = Pack(model, 1, source.data);
  REQUIRE_OK(trainer.Begin(1));
  v1::Bucket good = Describe(model, 0);
  for (const int64_t offset : offsets) {
    *good.mutable_cuda_ipc()->add_handles() = source.At(offset);
  }
  const auto refused = [&](StatusCode code, const std::vector<std::string>& words,
                           const std::function<void(v1::Bucket*)>& damage) {
    v1::Bucket bucket = good;
    damage(&bucket);
    CheckRefused(trainer.Push(1, bucket).status, code, words);
  };
  const auto handle = [](v1::Bucket* bucket, int i) {
    return bucket->mutable_cuda_ipc()->mutable_handles(i);
  };
  refused(StatusCode::INVALID_ARGUMENT, {"cuda_ipc.handles", "1 entries"},
          [](auto* b) { b->mutable_cuda_ipc()->mutable_handles()->RemoveLast(); });
  refused(StatusCode::INVALID_ARGUMENT, {"cuda_ipc.handles[1].handle", "5"},
          [&](auto* b) { handle(b, 1)->set_handle("short"); });
  refused(StatusCode::FAILED_PRECONDITION, {"cuda_ipc.handles[1]"},
          [&](auto* b) { handle(b, 1)->set_handle(std::string(64, 'x')); });
  refused(StatusCode::FAILED_PRECONDITION, {"cuda_ipc.handles[0].gpu_uuid", daemon.uuid(0)},
          [&](auto* b) { handle(b, 0)->set_gpu_uuid(daemon.uuid(0)); });
  refused(StatusCode::INVALID_ARGUMENT, {"cuda_ipc.handles[0].byte_offset", "-2"},
          [&](auto* b) { handle(b, 0)->set_byte_offset(-2); });
  refused(StatusCode::INVALID_ARGUMENT, {"cuda_ipc.handles[0].byte_offset", "unaligned"},
          [&](auto* b) { handle(b, 0)->set_byte_offset(1); });
  refused(StatusCode::INVALID_ARGUMENT, {"cuda_ipc.handles[0].byte_offset", "outside"},
          [&](auto* b) { handle(b, 0)->set_byte_offset(int64_t{1} << 62); });
  refused(StatusCode::INVALID_ARGUMENT, {"cuda_ipc.handles[0]", "too few"},
          [&](auto* b) { handle(b, 0)->set_byte_offset(kMiB - 2); });
  refused(StatusCode::INVALID_ARGUMENT, {"cuda_ipc.handles[0]", "too few"},
          [&](auto* b) { handle(b, 0)->set_bytes(2); });
  refused(StatusCode::INVALID_ARGUMENT, {"cuda_ipc.handles[0].bytes"},
          [&](auto* b) { handle(b, 0)->set_bytes(int64_t{1} << 62); });
  refused(StatusCode::INVALID_ARGUMENT, {"cuda_ipc.handles", "2 of device"},
          [&](auto* b) { b->set_packed(true); });
  REQUIRE_OK(trainer.Push(1, good));
  // Two handles are open: the engine's, and the transport's of the same block for the source's GPU.
  // So the caller may free the memory that it pushed.
  CHECK(daemon.fake().Count().opened_handles <= 2);
  REQUIRE_OK(trainer.Commit(1, 1));
  CHECK(engine.Difference(1) == "");
}

// The answer to a call that closes memory on a GPU; checks that it does not come before the memory
// is closed.
template <typename Call>
auto AnswerAfterClosing(LocalDaemon* daemon, Call call) {
  daemon->fake().Block("cuIpcCloseMemHandle");
  auto answer = std::async(std::launch::async, std::move(call));
  CHECK(Eventually([daemon] { return daemon->fake().Count().blocked_calls == 1; }));
  // An answer that did not wait would come soon.
  constexpr std::chrono::milliseconds kSoon{200};
  CHECK(answer.wait_for(kSoon) != std::future_status::ready);
  daemon->fake().Block("");
  return answer.get();
}

TEST_CASE("a push is answered when its handles are closed, whatever the answer") {
  LocalDaemon daemon(true, nullptr, CudaTransportOptions().limit, 3);
  const Model model = PlainModel(2, 8, 8);
  DeviceEngine engine(&daemon, 0, model);
  RawTrainer trainer(daemon.Connect(), daemon.TrainerOn(1));
  REQUIRE(trainer.attached().ok());
  const Block source(&daemon, 1, kMiB);
  v1::Bucket good = Describe(model, 0);
  for (const int64_t offset : Pack(model, 1, source.data)) {
    *good.mutable_cuda_ipc()->add_handles() = source.At(offset);
  }
  constexpr int kInvalidValue = 1;  // an error of CUDA
  const auto push = [&](const v1::Bucket& bucket) {
    return AnswerAfterClosing(&daemon, [&] { return trainer.Push(1, bucket).status; });
  };
  SECTION("no update is open") {
    CHECK(push(good).error_code() == StatusCode::FAILED_PRECONDITION);
  }
  SECTION("a field is wrong") {
    good.mutable_cuda_ipc()->mutable_handles(0)->set_byte_offset(1);
    CheckRefused(push(good), StatusCode::INVALID_ARGUMENT, {"handles[0].byte_offset"});
  }
  SECTION("another of its handles is refused") {
    good.mutable_cuda_ipc()->mutable_handles(1)->set_handle(std::string(64, 'x'));
    CheckRefused(push(good), StatusCode::FAILED_PRECONDITION, {"handles[1]"});
  }
  SECTION("it is stored, and comes again") {
    REQUIRE_OK(trainer.Begin(1));
    CHECK(push(good).ok());
    CHECK(push(good).error_code() == StatusCode::ALREADY_EXISTS);
  }
  SECTION("what was stored is wrong") {
    REQUIRE_OK(trainer.Begin(1, v1::VERIFICATION_TRANSFER));
    daemon.fake().Corrupt(1);
    CheckRefused(push(good), StatusCode::ABORTED, {"verification"});
  }
  SECTION("the other GPU does not reach it") {
    REQUIRE_OK(trainer.Begin(1));
    daemon.fake().FailAt("cuIpcOpenMemHandle", 2, kInvalidValue);
    CheckRefused(push(good), StatusCode::ABORTED, {"can't reach"});
  }
  SECTION("its broadcast fails") {
    DeviceEngine other(&daemon, 2, model, "other");
    REQUIRE_OK(trainer.Begin(BeginBy(1, v1::BROADCAST_METHOD_CHAIN)));
    daemon.fake().FailAt("cuMemcpyDtoDAsync", 1, kInvalidValue);
    CheckRefused(push(good), StatusCode::ABORTED, {"cuMemcpyDtoDAsync"});
  }
}

TEST_CASE("a block that is no region after all is closed before that is said") {
  LocalDaemon daemon;
  RawTrainer trainer(daemon.Connect(), daemon.TrainerOn(1));
  REQUIRE(trainer.attached().ok());
  Block block(&daemon, 1, kMiB);
  block.request.mutable_cuda_ipc()->set_bytes(2 * kMiB);
  const grpc::Status refused =
      AnswerAfterClosing(&daemon, [&] { return Register(&trainer, block.request).status; });
  CheckRefused(refused, StatusCode::INVALID_ARGUMENT, {"cuda_ipc.bytes"});
}

// Releases over the descriptor socket: the reply's code, or -1 without a reply.
template <typename Member>
int ReleaseBySocket(Member* member, uint64_t region) {
  DescriptorRequest request = member->descriptors().Request(DescriptorRequestKind::kReleaseRegion);
  request.region_id = region;
  const auto reply = member->descriptors().Ask(request, {});
  return reply.has_value() ? static_cast<int>(reply->code) : -1;
}

TEST_CASE("a region is released behind what is being bound of an update that has ended") {
  LocalDaemon daemon;
  const Model model = PlainModel(2, 8, 8);
  const Held held = HoldWhole(model);
  v1::EngineHello engine_hello = daemon.EngineOn(0);
  *engine_hello.mutable_spec() = Spec(2);
  RawEngine engine(daemon.Connect(), engine_hello);
  REQUIRE(engine.attached().ok());
  const Block block(&daemon, 0, held.region_bytes);
  const Block next(&daemon, 0, held.region_bytes);
  const auto region = Register(&engine, block.request);
  const auto other = Register(&engine, next.request);
  REQUIRE_OK(region);
  REQUIRE_OK(other);
  const auto layout_in = [&held](const v1::RegisterRegionResponse& in, uint64_t generation) {
    Layout layout = held.layout;
    layout.binding_generation = generation;
    for (Piece& piece : layout.pieces) piece.region = RegionId(in.region_id());
    return layout;
  };
  REQUIRE_OK(engine.Register(layout_in(region.response, 1)));
  std::vector<std::unique_ptr<RawTrainer>> trainers;
  std::vector<std::unique_ptr<Block>> blocks;
  for (int rank = 0; rank < 2; ++rank) {
    v1::TrainerHello hello = daemon.TrainerOn(1);
    *hello.mutable_spec() = Spec(2);
    hello.set_rank(rank);
    hello.set_world_size(2);
    trainers.push_back(std::make_unique<RawTrainer>(daemon.Connect(), hello));
    INFO(trainers.back()->attached().error_message());
    REQUIRE(trainers.back()->attached().ok());
    blocks.push_back(std::make_unique<Block>(&daemon, 1, held.region_bytes));
    // The replicas differ.
    std::memset(blocks.back()->data, rank + 1, static_cast<size_t>(held.region_bytes));
    const auto own = Register(trainers.back().get(), blocks.back()->request);
    REQUIRE_OK(own);
    REQUIRE_OK(trainers.back()->Register(layout_in(own.response, 1)));
  }
  // The driver now blocks when it opens a block for another GPU: the engine's for the trainers'
  // GPU, or a trainer's for the engine's GPU.
  daemon.fake().Block("cuIpcOpenMemHandle");
  std::vector<std::future<grpc::Status>> refits;
  for (const auto& trainer : trainers) {
    refits.push_back(
        std::async(std::launch::async, [&trainer] { return trainer->Refit(1, 1).status; }));
  }
  for (auto& refit : refits) CHECK(refit.get().error_code() == StatusCode::ABORTED);
  CHECK(Eventually([&] { return daemon.fake().Count().blocked_calls == 1; }));
  REQUIRE_OK(engine.Register(layout_in(other.response, 2)));
  const bool by_socket = GENERATE(false, true);
  std::future<bool> released = std::async(std::launch::async, [&] {
    if (by_socket) return ReleaseBySocket(&engine, region.response.region_id()) == 0;
    return Release(&engine, region.response.region_id()).ok();
  });
  constexpr std::chrono::milliseconds kSoon{200};
  CHECK(released.wait_for(kSoon) != std::future_status::ready);
  daemon.fake().Block("");
  CHECK(released.get());
}

TEST_CASE("a GPU that hangs as a region is opened holds up nobody in host memory") {
  LocalDaemon daemon;
  RawTrainer on_device(daemon.Connect(), daemon.TrainerOn(1));
  REQUIRE(on_device.attached().ok());
  RawTrainer on_host(daemon.Connect(), RawTrainer::Hello("host"));
  REQUIRE(on_host.attached().ok());
  const uint64_t first = on_host.NewMemory(4096).region_id;
  const uint64_t second = on_host.NewMemory(4096).region_id;
  const Block block(&daemon, 1, kMiB);
  daemon.fake().Block("cuIpcOpenMemHandle");
  auto registered =
      std::async(std::launch::async, [&] { return Register(&on_device, block.request).ok(); });
  CHECK(Eventually([&] { return daemon.fake().Count().blocked_calls == 1; }));
  CHECK(ReleaseBySocket(&on_host, first) == 0);
  CHECK(Release(&on_host, second).ok());
  CHECK(on_host.NewMemory(4096).region_id != 0);
  CHECK(daemon.fake().Count().blocked_calls == 1);
  daemon.fake().Block("");
  CHECK(registered.get());
}

TEST_CASE("a region is closed when its release is answered, also beside the check of a layout") {
  LocalDaemon daemon;
  RawTrainer trainer(daemon.Connect(), daemon.TrainerOn(1));
  REQUIRE(trainer.attached().ok());
  Held held = HoldWhole(PlainModel(100'000, 2, 2));
  const Block block(&daemon, 1, held.region_bytes);
  const Block other(&daemon, 1, kMiB);
  const auto region = Register(&trainer, block.request);
  REQUIRE_OK(region);
  for (Piece& piece : held.layout.pieces) piece.region = RegionId(region.response.region_id());
  held.layout.binding_generation = 1;
  auto layout = std::async(std::launch::async, [&] { return trainer.Register(held.layout).ok(); });
  do {
    const auto brief = Register(&trainer, other.request);
    REQUIRE_OK(brief);
    REQUIRE(daemon.fake().Count().opened_handles == 2);
    REQUIRE_OK(Release(&trainer, brief.response.region_id()));
    REQUIRE(daemon.fake().Count().opened_handles == 1);
  } while (layout.wait_for(std::chrono::seconds(0)) != std::future_status::ready);
  CHECK(layout.get());
}

TEST_CASE("engines of one group are all on GPUs, or all in host memory") {
  LocalDaemon daemon;
  const v1::Delivery delivery = GENERATE(v1::DELIVERY_IN_PLACE, v1::DELIVERY_LOADER);
  RawEngine gpu(daemon.Connect(), daemon.EngineOn(0));
  REQUIRE(gpu.attached().ok());
  CheckRefused(
      RawEngine(daemon.Connect(), RawEngine::Hello("g", "host", 0, 1, delivery)).attached(),
      StatusCode::FAILED_PRECONDITION, {"device.name", "'host'", daemon.uuid(0), "host memory"});
  RawEngine host(daemon.Connect(), RawEngine::Hello("h", "host", 0, 1, delivery));
  REQUIRE(host.attached().ok());
  v1::EngineHello hello = daemon.EngineOn(1, delivery);
  hello.set_group("h");
  CheckRefused(RawEngine(daemon.Connect(), hello).attached(), StatusCode::FAILED_PRECONDITION,
               {"device.name", daemon.uuid(1), "'host'"});
}

TEST_CASE("a trainer in host memory feeds an engine on a GPU") {
  LocalDaemon daemon;
  const Model model = PlainModel(2, 8, 8);
  DeviceEngine engine(&daemon, 0, model);
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g"));
  REQUIRE(trainer.attached().ok());
  REQUIRE_OK(trainer.Begin(1));
  REQUIRE_OK(trainer.Push(1, InlineBucket(model, BytesOf(model, 1), 0, false)));
  REQUIRE_OK(trainer.Commit(1, 1));
  CHECK(engine.Difference(1) == "");
}

TEST_CASE("without a word on verification the first update is read back, later ones compared") {
  LocalDaemon daemon;
  const Model model = PlainModel(2, 8, 8);
  DeviceEngine engine(&daemon, 0, model);
  RawTrainer trainer(daemon.Connect(), daemon.TrainerOn(1));
  REQUIRE(trainer.attached().ok());
  const Block source(&daemon, 1, kMiB);
  // Runs an update and returns the commit's answer; `damage`: one bit of a stored byte is flipped.
  const auto commit = [&](int64_t version, bool damage) {
    const std::vector<int64_t> offsets = Pack(model, version, source.data);
    REQUIRE_OK(trainer.Begin(version));
    v1::Bucket bucket = Describe(model, 0);
    for (const int64_t offset : offsets) {
      *bucket.mutable_cuda_ipc()->add_handles() = source.At(offset);
    }
    if (damage) daemon.fake().Corrupt(1);
    (void)trainer.Push(version, bucket);
    return trainer.Commit(version, 1).status.error_message();
  };
  CHECK_THAT(commit(1, true), Contains("verification") && Contains("read back"));
  CHECK(commit(2, false) == "");
  CHECK(engine.Difference(2) == "");
  CHECK_THAT(commit(3, true), Contains("verification") && Contains("what was stored"));
}

// An engine of the client library that answers by itself.
class ClientEngine {
 public:
  // kFirst: its arenas are kept; kSecond: it takes up those of the engine before, which must hold a
  // version, and its own are kept too.
  enum class Life : uint8_t { kFirst, kSecond, kOnly };
  // `arena`: its memory has two sides, which lie there.
  ClientEngine(LocalDaemon* daemon, const Model& model, std::optional<SidesIn> arena,
               Life life = Life::kOnly)
      : held_(HoldWhole(model)) {
    const bool restore = life == Life::kSecond;
    client::EngineOptions options;
    options.restore = life != Life::kOnly;
    options.connect.socket = daemon->socket();
    options.connect.group = "g";
    options.connect.spec = client::GroupSpec{};
    options.connect.device = daemon->uuid(0);
    options.connect.cuda_library = FakeCuda::Path();
    options.instance = "i";
    auto engine = client::Engine::Attach(options);
    INFO(engine.status());
    REQUIRE(engine.ok());
    engine_ = *std::move(engine);
    const int64_t bytes = (held_.region_bytes + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB);
    if (arena.has_value()) {
      auto made = restore ? engine_->TakeKept(0)
                          : client::Arena::Make(held_.region_bytes, options.connect, *arena);
      INFO(made.status());
      REQUIRE(made.ok());
      CHECK((*made)->sides_in() == *arena);
      auto region = engine_->AddArena(*std::move(made));
      INFO(region.status());
      REQUIRE(region.ok());
      region_ = *std::move(region);
      memory_ = region_->data();
    } else {
      int fd = -1;
      memory_ = daemon->fake().ExportVmm(0, bytes, &fd);
      auto region = engine_->AddCudaRegion(UniqueFd(fd), bytes);
      INFO(region.status());
      REQUIRE(region.ok());
      region_ = *std::move(region);
      CHECK(region_->data() == nullptr);
    }
    CHECK(region_->bytes() == bytes);
    const std::string empty = EmptyImage(held_.region_bytes);
    if (!restore) std::memcpy(memory_, empty.data(), empty.size());
    for (Piece& piece : held_.layout.pieces) piece.region = region_->id();
    const absl::Status registered = engine_->Register(held_.layout);
    INFO(registered);
    REQUIRE(registered.ok());
    CHECK(engine_->version().has_value() == restore);
    thread_ = std::thread([this] { Serve(); });
  }
  ~ClientEngine() {
    stop_ = true;
    thread_.join();
  }
  std::string Difference(const Model& model, int64_t version) const {
    return Difference(model, BytesOf(model, version));
  }
  std::string Difference(const Model& model, const std::vector<std::string>& bytes) const {
    return e2e::Difference(
        ExpectedImage(EmptyImage(held_.region_bytes), held_.layout, model, bytes), memory_,
        held_.layout);
  }
  const char* memory() const { return memory_; }

 private:
  void Serve() {
    while (!stop_) {
      auto event = engine_->Next(std::chrono::milliseconds(20));
      if (!event.ok()) return;
      if (const auto* prepare = std::get_if<client::Prepare>(&*event)) {
        (void)engine_->Ready(prepare->version);
      }
    }
  }
  Held held_;
  char* memory_ = nullptr;
  std::unique_ptr<client::Engine> engine_;
  std::shared_ptr<client::Region> region_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

// A trainer of the client library whose shards are one block of GPU 1.
class ClientTrainer {
 public:
  ClientTrainer(LocalDaemon* daemon, const Model& model)
      : ClientTrainer(daemon, model, HoldWhole(model, 0), 0, 1) {}
  // Every second rank is on the engines' GPU.
  ClientTrainer(LocalDaemon* daemon, const Model& model, Held shards, int rank, int world_size)
      : model_(model),
        shards_(std::move(shards)),
        source_(daemon, 1 - rank % 2, shards_.region_bytes) {
    client::TrainerOptions options;
    options.connect.socket = daemon->socket();
    options.connect.group = "g";
    options.connect.spec = client::GroupSpec{};
    options.connect.spec->trainer_ranks = world_size;
    options.connect.device = daemon->uuid(1 - rank % 2);
    options.rank = rank;
    options.world_size = world_size;
    auto trainer = client::Trainer::Attach(options);
    INFO(trainer.status());
    REQUIRE(trainer.ok());
    trainer_ = *std::move(trainer);
    CHECK(absl::IsInvalidArgument(
        trainer_->AddCudaRegion(client::CudaIpcBlock{"short", 5}).status()));
    auto region =
        trainer_->AddCudaRegion(client::CudaIpcBlock{source_.handle, shards_.region_bytes});
    INFO(region.status());
    REQUIRE(region.ok());
    region_ = *std::move(region);
    CHECK(region_->data() == nullptr);
    for (Piece& piece : shards_.layout.pieces) piece.region = region_->id();
    REQUIRE(trainer_->Register(shards_.layout).ok());
  }
  void Refit(int64_t version) {
    const absl::Status status = Refit(version, BytesOf(model_, version));
    INFO(status);
    REQUIRE(status.ok());
  }
  absl::Status Refit(int64_t version, const std::vector<std::string>& bytes,
                     std::optional<Verification> verification = std::nullopt) {
    const std::string image =
        ExpectedImage(EmptyImage(shards_.region_bytes), shards_.layout, model_, bytes);
    std::memcpy(source_.data, image.data(), image.size());
    return trainer_->Refit({.version = Version(version), .verification = verification}).status();
  }
  client::Trainer& trainer() { return *trainer_; }

 private:
  const Model model_;
  Held shards_;
  const Block source_;
  std::unique_ptr<client::Trainer> trainer_;
  std::shared_ptr<client::Region> region_;
};

TEST_CASE("compiled refits between GPUs through the client library, version after version") {
  LocalDaemon daemon;
  const Model model = MixedModel();
  const auto nothing_open = [&] {
    const FakeCudaCounts counts = daemon.fake().Count();
    return counts.opened_handles == 0 && counts.mapped == 0 && counts.imported == 0 &&
           counts.host_registered == 0;
  };
  SECTION("in place") {
    {
      ClientEngine engine(&daemon, model, /*arena=*/std::nullopt);
      ClientTrainer trainer(&daemon, model);
      for (int64_t version = 1; version <= 5; ++version) {
        trainer.Refit(version);
        CHECK(engine.Difference(model, version) == "");
      }
    }
    CHECK(Eventually(nothing_open));
  }
  SECTION("in arenas, which each engine takes up from the one before it") {
    const SidesIn in = GENERATE(SidesIn::kDevice, SidesIn::kHost);
    {
      using Life = ClientEngine::Life;
      auto engine = std::make_unique<ClientEngine>(&daemon, model, in, Life::kFirst);
      ClientTrainer trainer(&daemon, model);
      for (int64_t version = 1; version <= 5; ++version) {
        trainer.Refit(version);
        CHECK(engine->Difference(model, version) == "");
        engine.reset();
        engine = std::make_unique<ClientEngine>(&daemon, model, in, Life::kSecond);
        CHECK(engine->Difference(model, version) == "");
      }
    }
    CHECK_FALSE(nothing_open());
    { const ClientEngine last(&daemon, model, in); }  // what was kept is given up
    CHECK(Eventually(nothing_open));
  }
}

TEST_CASE("quantised weights are computed on the trainer's GPU, in place and into arenas") {
  LocalDaemon daemon;
  const DerivedModel model;
  const auto arena = GENERATE(std::optional<SidesIn>(), std::optional(SidesIn::kDevice));
  const ClientEngine engine(&daemon, model.served, arena);
  ClientTrainer trainer(&daemon, model.trained);
  int64_t version = 0;
  for (const Verification verification :
       {Verification::kReadback, Verification::kTransfer, Verification::kOff}) {
    const std::vector<std::string> weights = model.Trained(++version);
    const absl::Status status = trainer.Refit(version, weights, verification);
    INFO(status);
    REQUIRE(status.ok());
    CHECK(engine.Difference(model.served, model.Served(weights)) == "");
  }
  std::vector<std::string> wrong = model.Trained(++version);
  const uint16_t nan = 0x7fc0;
  std::memcpy(&wrong[0][2 * (300 * 384 + 129)], &nan, sizeof(nan));
  CHECK_THAT(std::string(trainer.Refit(version, wrong, Verification::kOff).message()),
             Contains("tensor w, block from element [256, 128] on: NaN"));
  // An engine with an arena has not seen it.
  if (arena.has_value()) {
    CHECK(engine.Difference(model.served, model.Served(model.Trained(version - 1))) == "");
  }
  const std::vector<std::string> good = model.Trained(++version);
  CHECK(trainer.Refit(version, good).ok());
  CHECK(engine.Difference(model.served, model.Served(good)) == "");
}

TEST_CASE("a block that lies on two GPUs is computed on one of them, which reads the other") {
  LocalDaemon daemon;
  const DerivedModel model;
  const ClientEngine engine(&daemon, model.served, std::nullopt);
  std::vector<std::unique_ptr<ClientTrainer>> trainers;
  const int dimension = GENERATE(0, 1);
  constexpr int kRanks = 3;  // 171 of 512 rows, 128 of 384 columns
  for (int rank = 0; rank < kRanks; ++rank) {
    trainers.push_back(std::make_unique<ClientTrainer>(
        &daemon, model.trained, HoldSlice(model.trained, dimension, rank, kRanks), rank, kRanks));
  }
  const auto refit = [&](int64_t version, const std::vector<std::string>& weights,
                         Verification verification) {
    std::vector<std::future<absl::Status>> calls;
    for (const auto& trainer : trainers) {
      calls.push_back(std::async(std::launch::async, [&, trainer = trainer.get()] {
        return trainer->Refit(version, weights, verification);
      }));
    }
    absl::Status status;
    for (auto& call : calls) status.Update(call.get());
    return status;
  };
  int64_t version = 0;
  for (const Verification verification :
       {Verification::kReadback, Verification::kTransfer, Verification::kOff}) {
    const std::vector<std::string> weights = model.Trained(++version);
    const absl::Status status = refit(version, weights, verification);
    INFO(status);
    REQUIRE(status.ok());
    CHECK(engine.Difference(model.served, model.Served(weights)) == "");
  }
  // Rows 128 to 256 are on two GPUs, or columns 128 to 256 on one.
  std::vector<std::string> wrong = model.Trained(++version);
  const uint16_t nan = 0x7fc0;
  std::memcpy(&wrong[0][2 * (180 * 384 + 129)], &nan, sizeof(nan));
  CHECK_THAT(std::string(refit(version, wrong, Verification::kOff).message()),
             Contains("tensor w, block from element [128, 128] on: NaN"));
}

TEST_CASE("a version staged in host memory is copied to the GPU, and the one before comes back") {
  LocalDaemon daemon;
  const Model model = MixedModel();
  const ClientEngine engine(&daemon, model, SidesIn::kHost);
  ClientTrainer trainer(&daemon, model);
  const char* const address = engine.memory();
  trainer.Refit(1);
  trainer.Refit(2);
  CHECK(engine.Difference(model, 2) == "");
  const auto back = trainer.trainer().Rollback(Version(2));
  INFO(back.status());
  REQUIRE(back.ok());
  CHECK(engine.Difference(model, 1) == "");
  trainer.Refit(4);
  CHECK(engine.Difference(model, 4) == "");
  CHECK(engine.memory() == address);  // graphs keep it
  const v1::GetStatusResponse status = StatusOf(&daemon.daemon());
  REQUIRE(status.arenas_size() == 1);
  CHECK(status.arenas(0).flip() == "host");
  CHECK(status.arenas(0).back_bytes() == status.arenas(0).front_bytes());
}

// Compiled refits through the C interface, with an engine in VMM memory and a trainer in a block.
TEST_CASE("compiled refits between GPUs through the C interface") {
  LocalDaemon daemon;
  const Model model = MixedModel();
  std::vector<refit_tensor> tensors;
  std::vector<refit_piece> pieces;
  const auto list = [&](const Held& held, const refit_region* region) {
    tensors.clear();
    pieces.clear();
    for (const TensorSpec& tensor : held.layout.tensors) {
      tensors.push_back({.name = tensor.name.c_str(),
                         .dtype = static_cast<int32_t>(tensor.dtype),
                         .dim_count = static_cast<int32_t>(tensor.shape.size()),
                         .dims = tensor.shape.data(),
                         .start = 0,
                         .count = REFIT_WHOLE});
    }
    for (const Piece& piece : held.layout.pieces) {
      pieces.push_back({.tensor = piece.tensor,
                        .offset = piece.box.offset.data(),
                        .extent = piece.box.extent.data(),
                        .strides = piece.strides.data(),
                        .region = region,
                        .byte_offset = piece.byte_offset});
    }
  };
  const auto count = [](const auto& all) { return static_cast<int64_t>(all.size()); };
  const auto ok = [](refit_status status) {
    INFO(refit_last_error());
    REQUIRE(status == REFIT_OK);
  };
  const std::string socket = daemon.socket();
  auto spec = Initialised<refit_group_spec>();
  auto connect = Initialised<refit_connect_options>();
  connect.socket = socket.c_str();
  connect.group = "g";
  connect.spec = &spec;

  connect.device = "GPU-none";
  auto engine_options = Initialised<refit_engine_options>();
  engine_options.connect = &connect;
  engine_options.instance = "i";
  refit_engine* engine = nullptr;
  CHECK(refit_engine_attach(&engine_options, &engine) == REFIT_FAILED_PRECONDITION);
  connect.device = daemon.uuid(0).c_str();
  ok(refit_engine_attach(&engine_options, &engine));

  const Held held = HoldWhole(model);
  const int64_t engine_bytes = (held.region_bytes + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB);
  int fd = -1;
  char* const memory = daemon.fake().ExportVmm(0, engine_bytes, &fd);
  refit_region* parameters = nullptr;
  CHECK(refit_engine_add_cuda_vmm(engine, -1, engine_bytes, &parameters) == REFIT_INVALID_ARGUMENT);
  CHECK(refit_engine_add_cuda_block(engine, nullptr, engine_bytes, &parameters) ==
        REFIT_INVALID_ARGUMENT);
  ok(refit_engine_add_cuda_vmm(engine, fd, engine_bytes, &parameters));
  close(fd);  // the caller still owns the descriptor
  CHECK(refit_region_data(parameters) == nullptr);
  CHECK(refit_region_bytes(parameters) == engine_bytes);
  std::memcpy(memory, EmptyImage(held.region_bytes).data(), static_cast<size_t>(held.region_bytes));
  list(held, parameters);
  ok(refit_engine_register(engine, tensors.data(), count(tensors), pieces.data(), count(pieces),
                           nullptr, 0));

  connect.device = daemon.uuid(1).c_str();
  auto trainer_options = Initialised<refit_trainer_options>();
  trainer_options.connect = &connect;
  refit_trainer* trainer = nullptr;
  ok(refit_trainer_attach(&trainer_options, &trainer));
  const Held shards = HoldWhole(model, 0);
  const Block source(&daemon, 1, shards.region_bytes);
  refit_region* region = nullptr;
  ok(refit_trainer_add_cuda_block(trainer, source.handle.data(), shards.region_bytes, &region));
  list(shards, region);
  ok(refit_trainer_register(trainer, tensors.data(), count(tensors), pieces.data(), count(pieces),
                            nullptr, 0));

  std::atomic<bool> stop = false;
  std::thread serve([&] {
    auto event = Initialised<refit_event>();
    while (!stop && refit_engine_next(engine, 20, &event) == REFIT_OK) {
      if (event.kind == REFIT_EVENT_PREPARE) (void)refit_engine_ready(engine, event.version, -1);
    }
  });
  std::vector<std::string> differences;
  for (int64_t version = 1; version <= 2; ++version) {
    const std::string image = ExpectedImage(EmptyImage(shards.region_bytes), shards.layout, model,
                                            BytesOf(model, version));
    std::memcpy(source.data, image.data(), image.size());
    auto refit = Initialised<refit_refit_options>();
    refit.version = version;
    CHECK(refit_trainer_refit(trainer, &refit, nullptr) == REFIT_OK);
    differences.push_back(Difference(
        ExpectedImage(EmptyImage(held.region_bytes), held.layout, model, BytesOf(model, version)),
        memory, held.layout));
  }
  auto begin = Initialised<refit_begin_options>();
  begin.version = 3;
  begin.broadcast = 5;
  refit_update* update = nullptr;
  CHECK(refit_trainer_begin(trainer, &begin, &update) == REFIT_INVALID_ARGUMENT);
  begin.broadcast = REFIT_BROADCAST_NCCL;
  CHECK(refit_trainer_begin(trainer, &begin, &update) == REFIT_UNIMPLEMENTED);
  begin.broadcast = REFIT_BROADCAST_CHAIN;
  begin.struct_size = offsetof(refit_begin_options, broadcast);  // an older caller: auto
  CHECK(refit_trainer_begin(trainer, &begin, &update) == REFIT_OK);
  refit_update_free(update);
  CHECK(daemon.fake().Count().created == 0);
  stop = true;
  serve.join();
  CHECK(differences == std::vector<std::string>(2));
  refit_region_free(region);
  refit_trainer_free(trainer);
  refit_region_free(parameters);
  refit_engine_free(engine);
}

// ---- trainer and engine in one memory ----

enum class MemoryBy : uint8_t { kBlock, kVmm, kVmmUnknown, kMemfd };

// A trainer and an engine of this process, whose tensors lie in one memory: the engine's at its
// beginning, the trainer's `shift` bytes behind it.
class OneMemory {
 public:
  OneMemory(LocalDaemon* daemon, MemoryBy by, int64_t shift, bool refits)
      : by_(by), held_(HoldWhole(model_)), sent_(held_) {
    for (Piece& piece : sent_.layout.pieces) piece.byte_offset += shift;
    MakeMemory(daemon);
    client::ConnectOptions connect;
    connect.socket = daemon->socket();
    static int groups = 0;
    connect.group = fmt::format("shared-{}", ++groups);
    connect.spec = client::GroupSpec{};
    if (by != MemoryBy::kMemfd) connect.device = daemon->uuid(0);
    client::EngineOptions options;
    options.connect = connect;
    options.instance = "i";
    engine_ = client::Engine::Attach(options).value();
    trainer_ = client::Trainer::Attach({.connect = connect}).value();
    of_engine_ = Share(engine_.get());
    of_trainer_ = Share(trainer_.get());
    for (Piece& piece : held_.layout.pieces) piece.region = of_engine_->id();
    for (Piece& piece : sent_.layout.pieces) piece.region = of_trainer_->id();
    REQUIRE(engine_->Register(held_.layout).ok());
    if (refits) REQUIRE(trainer_->Register(sent_.layout).ok());
    refits_ = refits;
    thread_ = std::thread([this] { Serve(); });
  }
  ~OneMemory() {
    stop_ = true;
    thread_.join();
    if (by_ == MemoryBy::kMemfd) munmap(memory_, kBytes);
  }

  // Writes the version at the trainer's places and installs it.
  absl::Status Install(int64_t version, Verification verification) {
    const std::string image =
        ExpectedImage(std::string(memory_, kBytes), sent_.layout, model_, BytesOf(model_, version));
    std::memcpy(memory_, image.data(), image.size());
    before_ = image;
    const Version number(version);
    if (refits_) return trainer_->Refit({.version = number, .verification = verification}).status();
    REFITD_ASSIGN_OR_RETURN(const auto update,
                            trainer_->Begin({.version = number, .verification = verification}));
    std::vector<int64_t> offsets;
    for (const Piece& piece : sent_.layout.pieces) offsets.push_back(piece.byte_offset);
    REFITD_RETURN_IF_ERROR(update->Push(client::Bucket::Unpacked(model_, of_trainer_, offsets)));
    return update->Commit().status();
  }
  // Whether no byte of the memory changed since Install wrote the trainer's.
  bool IsUntouched() const { return std::memcmp(memory_, before_.data(), kBytes) == 0; }
  // Whether nothing but the engine's tensors changed, and they are of the version.
  std::string Difference(int64_t version) const {
    return e2e::Difference(ExpectedImage(before_, held_.layout, model_, BytesOf(model_, version)),
                           memory_, held_.layout);
  }
  // What the next abort said about the engine's weights.
  std::optional<bool> AbortedDirty() {
    std::optional<bool> dirty;
    (void)Eventually([&] {
      MutexLock lock(&mutex_);
      dirty = std::exchange(dirty_, std::nullopt);
      return dirty.has_value();
    });
    return dirty;
  }

 private:
  static constexpr int64_t kBytes = 2 * kMiB;

  void MakeMemory(LocalDaemon* daemon) {
    int fd = -1;
    switch (by_) {
      case MemoryBy::kBlock:
        memory_ = daemon->fake().Export(0, kBytes, &handle_);
        break;
      case MemoryBy::kVmm:
      case MemoryBy::kVmmUnknown:
        memory_ = daemon->fake().ExportVmm(0, kBytes, &fd);
        fd_ = UniqueFd(fd);
        break;
      case MemoryBy::kMemfd:
        fd_ = CreateSealedMemfd("arena", kBytes).value();
        memory_ = static_cast<char*>(
            mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0));
        REQUIRE(memory_ != MAP_FAILED);
        break;
    }
    const std::string empty = EmptyImage(kBytes);
    std::memcpy(memory_, empty.data(), empty.size());
  }
  template <typename Member>
  std::shared_ptr<client::Region> Share(Member* member) const {
    const auto shared = [&] {
      if (by_ == MemoryBy::kBlock) {
        return member->AddCudaRegion(client::CudaIpcBlock{handle_, kBytes});
      }
      UniqueFd fd(dup(fd_.get()));
      if (by_ == MemoryBy::kMemfd) return member->AddMemfd(std::move(fd), kBytes);
      const auto address = reinterpret_cast<uintptr_t>(memory_);
      return member->AddCudaRegion(std::move(fd), kBytes, by_ == MemoryBy::kVmm ? address : 0);
    }();
    INFO(shared.status());
    REQUIRE(shared.ok());
    return *shared;
  }
  void Serve() {
    while (!stop_) {
      const auto event = engine_->Next(std::chrono::milliseconds(20));
      if (!event.ok()) return;
      if (const auto* prepare = std::get_if<client::Prepare>(&*event)) {
        (void)engine_->Ready(prepare->version);
      } else if (const auto* aborted = std::get_if<client::Aborted>(&*event)) {
        MutexLock lock(&mutex_);
        dirty_ = aborted->dirty;
      }
    }
  }

  const MemoryBy by_;
  const Model model_ = PlainModel(2, 40, 40);
  Held held_;
  Held sent_;
  bool refits_ = false;
  std::string handle_;
  UniqueFd fd_;
  char* memory_ = nullptr;
  std::string before_;
  std::unique_ptr<client::Engine> engine_;
  std::unique_ptr<client::Trainer> trainer_;
  std::shared_ptr<client::Region> of_engine_;
  std::shared_ptr<client::Region> of_trainer_;
  Mutex mutex_;
  std::optional<bool> dirty_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

TEST_CASE(
    "trainer and engine in one memory, shifted by 64 bytes, are refused before anything is "
    "written") {
  LocalDaemon daemon;
  const MemoryBy by = GENERATE(MemoryBy::kBlock, MemoryBy::kVmm, MemoryBy::kMemfd);
  const bool refits = GENERATE(false, true);
  const auto verification = GENERATE(Verification::kOff, Verification::kReadback);
  {
    OneMemory shifted(&daemon, by, 64, refits);
    const absl::Status refused = shifted.Install(1, verification);
    CHECK_THAT(Message(refused), Contains("of trainer rank 0") && Contains("of engine") &&
                                     Contains("overlap in memory") && !Contains("dirty"));
    CHECK(shifted.AbortedDirty() == false);
    CHECK(shifted.IsUntouched());
  }
  for (const int64_t shift : {int64_t{0}, kMiB}) {  // the same place; apart
    OneMemory other(&daemon, by, shift, refits);
    const absl::Status installed = other.Install(1, verification);
    INFO(installed);
    CHECK(installed.ok());
    CHECK(other.Difference(1) == "");
  }
}

TEST_CASE("where memory can't be recognised, a shift shows in the source at the first version") {
  LocalDaemon daemon;
  const bool refits = GENERATE(false, true);
  {
    OneMemory shifted(&daemon, MemoryBy::kVmmUnknown, 64, refits);
    CHECK_THAT(Message(shifted.Install(1, Verification::kOff)),
               Contains("its bytes changed while they were being moved") && Contains("dirty"));
    CHECK(shifted.AbortedDirty() == true);
  }
  for (const int64_t shift : {int64_t{0}, kMiB}) {
    OneMemory other(&daemon, MemoryBy::kVmmUnknown, shift, refits);
    for (int64_t version = 1; version <= 2; ++version) {
      const absl::Status installed = other.Install(version, Verification::kReadback);
      INFO(installed);
      CHECK(installed.ok());
      CHECK(other.Difference(version) == "");
    }
  }
}

TEST_CASE("device memory is known again to the daemon that follows") {
  Machine machine;
  auto daemon = std::make_unique<LocalDaemon>(true, &machine);
  const Model model = PlainModel(2, 8, 8);
  client::TrainerOptions options;
  options.connect.socket = daemon->socket();
  options.connect.group = "g";
  options.connect.spec = client::GroupSpec{.slot_bytes = 65'536, .slots = 4};
  options.connect.device = daemon->uuid(1);
  options.connect.reattach = kTestDeadline;
  auto trainer = client::Trainer::Attach(options);
  INFO(trainer.status());
  REQUIRE(trainer.ok());
  const Block source(daemon.get(), 1, kMiB);
  auto block = (*trainer)->AddCudaRegion(client::CudaIpcBlock{source.handle, kMiB});
  int fd = -1;
  char* const vmm_data = machine.fake.ExportVmm(1, 2 * kMiB, &fd);
  auto vmm = (*trainer)->AddCudaRegion(UniqueFd(fd), 2 * kMiB);
  REQUIRE(block.ok());
  REQUIRE(vmm.ok());

  daemon.reset();
  CHECK(machine.fake.Count().opened_handles == 0);
  CHECK(machine.fake.Count().mapped == 0);
  daemon = std::make_unique<LocalDaemon>(true, &machine);
  REQUIRE(Eventually([&] { return (*trainer)->reattachments() == 1; }));
  DeviceEngine engine(daemon.get(), 0, model);
  int64_t version = 0;
  for (const auto& [region, data] : {std::pair(*block, source.data), std::pair(*vmm, vmm_data)}) {
    const std::vector<int64_t> offsets = Pack(model, ++version, data);
    auto update = (*trainer)->Begin({.version = Version(version)});
    INFO(update.status());
    REQUIRE(update.ok());
    REQUIRE((*update)->Push(client::Bucket::Unpacked(model, region, offsets)).ok());
    REQUIRE((*update)->Commit().ok());
    CHECK(engine.Difference(version) == "");
  }
}

TEST_CASE("the daemon's own process serves the GPUs of the driver that its configuration names") {
  Daemon daemon({"--cuda-library=" + FakeCuda::Path()});
  const auto status = daemon.Status();
  REQUIRE(status.transports(1).name() == "cuda");
  INFO(status.transports(1).detail());
  if (CopyKernelImage().empty()) {
    CHECK(!status.transports(1).available());
    CHECK_THAT(status.transports(1).detail(), Contains("nvcc"));
    return;
  }
  CHECK(status.transports(1).available());
  v1::TrainerHello hello = RawTrainer::Hello("g");
  hello.mutable_device()->set_name((*CudaMemory::Create(FakeCuda::Path()))->devices()[1].uuid);
  CHECK(RawTrainer(daemon.Connect(), hello).attached().ok());

  Daemon without({"--cuda-library=" + FakeCuda::Path(), "--cuda-enabled=false"});
  CHECK(!without.Status().transports(1).available());
  CHECK_THAT(without.Status().transports(1).detail(), Contains("cuda.enabled"));
}

// ---- staging slots on GPUs ----

client::ConnectOptions ConnectOn(const LocalDaemon& daemon, const std::string& device,
                                 int64_t slot_bytes) {
  client::ConnectOptions connect;
  connect.socket = daemon.socket();
  connect.group = "g";
  connect.spec = client::GroupSpec{.slot_bytes = slot_bytes, .slots = 4};
  connect.device = device;
  connect.cuda_library = FakeCuda::Path();
  return connect;
}

// A loader engine on a GPU that loads by itself: it joins whole tensors out of device memory.
class LoaderEngine {
 public:
  // `coordinator`: the daemon that has the group, whose spec the engine waits for; null: the daemon
  // that the engine attaches to.
  LoaderEngine(LocalDaemon* daemon, size_t device, const std::string& instance,
               int64_t slot_bytes = 4096, std::chrono::milliseconds reattach = {},
               const LocalDaemon* coordinator = nullptr) {
    client::EngineOptions options;
    options.connect = ConnectOn(*daemon, daemon->uuid(device), slot_bytes);
    options.connect.reattach = reattach;
    if (coordinator != nullptr) {
      options.connect.coordinator = coordinator->address();
      options.connect.spec.reset();
    }
    options.instance = instance;
    options.delivery = client::Delivery::kLoader;
    auto engine = client::Engine::Attach(options);
    INFO(engine.status());
    REQUIRE(engine.ok());
    engine_ = *std::move(engine);
    thread_ = std::thread([this] { Serve(); });
  }
  ~LoaderEngine() {
    stop_ = true;
    thread_.join();
  }

  client::Engine& engine() { return *engine_; }
  // While held, parts are neither loaded nor acknowledged.
  void Hold(bool hold) { hold_ = hold; }
  int held() {
    MutexLock lock(&mutex_);
    return held_;
  }
  int aborts() {
    MutexLock lock(&mutex_);
    return aborts_;
  }
  // Empty: it was told that it holds the version, and it does hold it.
  std::string Difference(const Model& model, int64_t version) {
    Eventually([&] {
      MutexLock lock(&mutex_);
      return committed_ >= version;
    });
    MutexLock lock(&mutex_);
    if (!wrong_.empty()) return wrong_;
    if (committed_ != version) return fmt::format("it heard of version {}", committed_);
    const std::vector<std::string> bytes = BytesOf(model, version);
    for (size_t i = 0; i < model.size(); ++i) {
      if (loaded_[model[i].name] != bytes[i]) return "wrong bytes in " + model[i].name;
    }
    return "";
  }

 private:
  void Serve() {
    while (!stop_) {
      auto event = engine_->Next(std::chrono::milliseconds(20));
      if (!event.ok()) return;
      const absl::Status answered = On(*event);
      MutexLock lock(&mutex_);
      if (!answered.ok() && wrong_.empty()) wrong_ = answered.ToString();
    }
  }
  absl::Status On(const client::Event& event) {
    if (const auto* prepare = std::get_if<client::Prepare>(&event)) {
      return engine_->Ready(prepare->version);
    }
    if (const auto* part = std::get_if<client::Part>(&event)) return Load(*part);
    if (const auto* committed = std::get_if<client::Committed>(&event)) {
      MutexLock lock(&mutex_);
      committed_ = committed->version.value();
    } else if (std::get_if<client::Aborted>(&event) != nullptr) {
      joiner_.Reset();
      MutexLock lock(&mutex_);
      ++aborts_;
    }
    return absl::OkStatus();
  }
  absl::Status Load(const client::Part& part) {
    if (hold_) {
      MutexLock lock(&mutex_);
      ++held_;
      return absl::OkStatus();
    }
    REFITD_ASSIGN_OR_RETURN(const std::vector<client::TensorView> whole, joiner_.Add(part));
    for (const client::TensorView& view : whole) {
      MutexLock lock(&mutex_);
      loaded_[view.tensor.name].assign(view.data, static_cast<size_t>(TensorBytes(view.tensor)));
    }
    return engine_->Ack(part);
  }

  std::unique_ptr<client::Engine> engine_;
  client::PartJoiner joiner_;  // the rank's thread uses this
  std::atomic<bool> stop_ = false;
  std::atomic<bool> hold_ = false;
  Mutex mutex_;
  int64_t committed_ ABSL_GUARDED_BY(mutex_) = 0;
  int held_ ABSL_GUARDED_BY(mutex_) = 0;
  int aborts_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string wrong_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::string> loaded_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

std::unique_ptr<client::Trainer> AttachTrainer(const client::ConnectOptions& connect) {
  auto trainer = client::Trainer::Attach({.connect = connect});
  INFO(trainer.status());
  REQUIRE(trainer.ok());
  return *std::move(trainer);
}

// An engine rank without a stream: when one of its calls returns, the daemon has handled the event.
class DirectEngine {
 public:
  ~DirectEngine() { Leave(); }

  void Attach(LocalDaemon* daemon, const v1::EngineHello& hello) {
    daemon_ = daemon;
    PeerCredentials self;
    self.uid = geteuid();
    member_ = daemon->daemon().calls().Attach(ArrivalOf(hello, Peer{self}), sink_);
  }
  void Leave() {
    if (daemon_ != nullptr)
      std::exchange(daemon_, nullptr)->daemon().calls().Gone(member_, "it left");
  }
  void Detach() { std::exchange(daemon_, nullptr)->daemon().calls().Detached(member_); }
  bool welcomed() const { return sink_->welcomed; }
  // The status with which its stream ended; nullopt: it has not ended.
  std::optional<absl::Status> end() const {
    MutexLock lock(&sink_->mutex);
    return sink_->end;
  }

 private:
  struct Sink : MemberSink {
    void Send(MemberNews news) override {
      if (std::holds_alternative<WelcomeNews>(news)) welcomed = true;
    }
    void End(absl::Status status) override {
      MutexLock lock(&mutex);
      end = std::move(status);
    }
    std::atomic<bool> welcomed = false;
    Mutex mutex;
    std::optional<absl::Status> end ABSL_GUARDED_BY(mutex);
  };
  const std::shared_ptr<Sink> sink_ = std::make_shared<Sink>();
  LocalDaemon* daemon_ = nullptr;
  MemberId member_;
};

// Whether there is no pool, neither the daemon's nor a member's mapping of one.
bool NoPools(const FakeCuda& fake) {
  const FakeCudaCounts counts = fake.Count();
  return counts.created == 0 && counts.imported == 0 && counts.mapped == 0 && counts.reserved == 0;
}

// How many descriptors this process has open.
int Descriptors() {
  return static_cast<int>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                                        std::filesystem::directory_iterator()));
}

// Pushes one bucket for each tensor, packed into a leased slot after some other bytes, then
// commits.
absl::Status PushBySlots(client::Trainer* trainer, const Model& model, int64_t version,
                         std::optional<Verification> verification = std::nullopt) {
  constexpr int64_t kOffset = 512;
  REFITD_ASSIGN_OR_RETURN(const auto update,
                          trainer->Begin({.version = Version(version),
                                          .verification = verification,
                                          .tensor_count = static_cast<int64_t>(model.size())}));
  const std::vector<std::string> bytes = BytesOf(model, version);
  for (size_t t = 0; t < model.size(); ++t) {
    REFITD_ASSIGN_OR_RETURN(auto slot, update->LeaseSlot());
    bytes[t].copy(slot->data() + kOffset, bytes[t].size());
    REFITD_RETURN_IF_ERROR(
        update->Push(client::Bucket::InSlot({model[t]}, std::move(slot), {kOffset})));
  }
  return update->Commit().status();
}

TEST_CASE("loader engines on both GPUs load what regions, handles and a call's bytes bring") {
  LocalDaemon daemon;
  const Model model = MixedModel();
  {
    LoaderEngine here(&daemon, 1, "here");
    LoaderEngine there(&daemon, 0, "there");
    CHECK(daemon.fake().Count().created == 2);
    CHECK(daemon.fake().Count().imported == 2);
    v1::TrainerHello hello = daemon.TrainerOn(1);
    *hello.mutable_spec() = Spec(1, 1, 4096);
    RawTrainer trainer(daemon.Connect(), hello);
    REQUIRE(trainer.attached().ok());
    const Block source(&daemon, 1, ModelBytes(model) + 64 * 64);
    const auto region = Register(&trainer, source.request);
    REQUIRE_OK(region);
    const v1::Verification verification =
        GENERATE(v1::VERIFICATION_UNSPECIFIED, v1::VERIFICATION_OFF, v1::VERIFICATION_TRANSFER,
                 v1::VERIFICATION_READBACK);
    int64_t version = 0;
    const auto install =
        [&](const std::function<v1::Bucket(const std::vector<int64_t>&)>& bucket_at) {
          const std::vector<int64_t> offsets = Pack(model, ++version, source.data);
          v1::BeginRequest begin;
          begin.set_version(version);
          begin.set_verification(verification);
          begin.set_tensor_count(static_cast<int64_t>(model.size()));
          REQUIRE_OK(trainer.Begin(begin));
          REQUIRE_OK(trainer.Push(version, bucket_at(offsets)));
          REQUIRE_OK(trainer.Commit(version, 1));
          CHECK(here.Difference(model, version) == "");
          CHECK(there.Difference(model, version) == "");
        };
    install([&](const std::vector<int64_t>& offsets) {
      v1::Bucket bucket = Describe(model, 0);
      for (const int64_t offset : offsets) {
        v1::RegionRef* ref = bucket.mutable_regions()->add_refs();
        ref->set_region_id(region.response.region_id());
        ref->set_byte_offset(offset);
      }
      return bucket;
    });
    install([&](const std::vector<int64_t>& offsets) {
      v1::Bucket bucket = Describe(model, 0);
      for (const int64_t offset : offsets) {
        *bucket.mutable_cuda_ipc()->add_handles() = source.At(offset);
      }
      return bucket;
    });
    install([&](const std::vector<int64_t>&) {
      return InlineBucket(model, BytesOf(model, version), 0, false);
    });
  }
  CHECK(Eventually([&] { return NoPools(daemon.fake()); }));
}

TEST_CASE("a bucket packed in a leased slot reaches engines of every kind and GPU") {
  LocalDaemon daemon;
  const Model model = PlainModel(6, 20, 30);
  // The trainer's place: the first GPU, the second, or host memory.
  const int place = GENERATE(0, 1, -1);
  const std::string device = place < 0 ? "" : daemon.uuid(static_cast<size_t>(place));
  const auto verification =
      GENERATE(Verification::kOff, Verification::kTransfer, Verification::kReadback);
  {
    LoaderEngine zero(&daemon, 0, "zero", 65'536);
    LoaderEngine one(&daemon, 1, "one", 65'536);
    DeviceEngine registered(&daemon, 0, model);
    const auto trainer = AttachTrainer(ConnectOn(daemon, device, 65'536));
    for (int64_t version = 1; version <= 3; ++version) {
      const absl::Status pushed = PushBySlots(trainer.get(), model, version, verification);
      INFO(pushed);
      REQUIRE(pushed.ok());
      CHECK(zero.Difference(model, version) == "");
      CHECK(one.Difference(model, version) == "");
      CHECK(registered.Difference(version) == "");
    }
  }
  CHECK(Eventually([&] { return NoPools(daemon.fake()); }));
}

TEST_CASE("a loader rank that goes while its GPU's slots are made gets no place, nor the slots") {
  LocalDaemon daemon;
  const bool detaches = GENERATE(false, true);
  const bool alone = GENERATE(false, true);
  DirectEngine goes;
  DirectEngine stays;
  daemon.fake().Block("cuMemCreate");
  goes.Attach(&daemon, daemon.EngineOn(1, v1::DELIVERY_LOADER, "goes"));
  CHECK(Eventually([&] { return daemon.fake().Count().blocked_calls == 1; }));
  if (!alone) stays.Attach(&daemon, daemon.EngineOn(1, v1::DELIVERY_LOADER, "stays"));
  if (detaches) {
    goes.Detach();
  } else {
    goes.Leave();
  }
  const std::optional<absl::Status> end = goes.end();
  daemon.fake().Block("");
  // The end comes at once, whatever the driver is doing.
  REQUIRE(end.has_value());
  CHECK(end->code() == (detaches ? absl::StatusCode::kOk : absl::StatusCode::kAborted));
  if (!detaches) CHECK_THAT(Message(*end), Contains("it left"));
  if (!alone) {
    CHECK(Eventually([&] { return stays.welcomed(); }));
    CHECK(daemon.fake().Count().created == 1);
    stays.Leave();
  }
  CHECK(Eventually([&] { return daemon.fake().Count().allocation_calls == 1; }));
  CHECK(Eventually([&] { return NoPools(daemon.fake()); }));
  CHECK(!goes.welcomed());
  CHECK(StatusOf(&daemon.daemon()).resources().members() == 0);
  // Another rank can take the place of the rank that left.
  CHECK(
      RawEngine(daemon.Connect(), daemon.EngineOn(1, v1::DELIVERY_LOADER, "goes")).attached().ok());
}

TEST_CASE(
    "a leased slot of a GPU has memory before the trainer maps it, and serves without staging") {
  LocalDaemon daemon;
  const Model model = PlainModel(1, 20, 30);
  {
    DeviceEngine engine(&daemon, 0, model);
    RawTrainer trainer(daemon.Connect(), daemon.TrainerOn(1));
    REQUIRE(trainer.attached().ok());
    REQUIRE_OK(trainer.Begin(1));
    CHECK(daemon.fake().Count().created == 0);
    constexpr int kOutOfMemory = 2;
    daemon.fake().FailAt("cuMemCreate", 1, kOutOfMemory);
    CheckRefused(trainer.LeaseSlot(1).status, StatusCode::RESOURCE_EXHAUSTED,
                 {"group 'g'", "staging slots", "out of memory"});
    const auto slot = trainer.LeaseSlot(1);
    REQUIRE_OK(slot);
    CHECK(daemon.fake().Count().created == 1);

    UniqueFd fd;
    const auto reply = trainer.descriptors().Ask(
        trainer.descriptors().Request(DescriptorRequestKind::kMapPool), {}, &fd);
    REQUIRE(reply.has_value());
    REQUIRE(reply->code == 0);
    CHECK(daemon.fake().Count().created == 1);
    CHECK(reply->slot_bytes == 65'536);
    auto pool =
        (*CudaMemory::Create(FakeCuda::Path()))->ImportDescriptor(1, std::move(fd), reply->bytes);
    INFO(pool.status());
    REQUIRE(pool.ok());
    const std::string bytes = BytesOf(model, 1)[0];
    bytes.copy((*pool)->data() + slot.response.byte_offset(), bytes.size());
    v1::Bucket bucket = Describe(model, 0);
    bucket.set_packed(true);
    bucket.add_byte_offsets(0);
    bucket.mutable_slot()->set_slot(slot.response.slot());
    bucket.mutable_slot()->set_grant(slot.response.grant());
    REQUIRE_OK(trainer.Push(1, bucket));
    REQUIRE_OK(trainer.Commit(1, 1));
    CHECK(engine.Difference(1) == "");
  }
  CHECK(Eventually([&] { return NoPools(daemon.fake()); }));
}

// ---- broadcasts through slots ----

// Pushes the model as one bucket of the block's handles and commits the update, which was begun
// before.
v1::CommitResponse PushByHandles(RawTrainer* trainer, const Block& source, const Model& model,
                                 int64_t version) {
  v1::Bucket bucket = Describe(model, 0);
  for (const int64_t offset : Pack(model, version, source.data)) {
    *bucket.mutable_cuda_ipc()->add_handles() = source.At(offset);
  }
  REQUIRE_OK(trainer->Push(version, bucket));
  const auto committed = trainer->Commit(version, 1);
  REQUIRE_OK(committed);
  return committed.response;
}

v1::GetUpdateStatisticsResponse StatisticsOf(LocalDaemon* daemon) {
  v1::GetUpdateStatisticsRequest request;
  request.set_group("g");
  auto statistics = GetUpdateStatistics(&daemon->daemon(), request);
  INFO(statistics.status());
  REQUIRE(statistics.ok());
  return *std::move(statistics);
}

TEST_CASE("a chain takes a bucket through slots of each GPU, whose pools Begin made, and counts") {
  LocalDaemon daemon(true, nullptr, CudaTransportOptions().limit, 3);
  const Model model = PlainModel(5, 100, 100);  // several slots
  {
    DeviceEngine one(&daemon, 1, model, "one");
    DeviceEngine two(&daemon, 2, model, "two");
    RawTrainer trainer(daemon.Connect(), daemon.TrainerOn(0));
    REQUIRE(trainer.attached().ok());
    const Block source(&daemon, 0, ModelBytes(model) + 64 * 64);
    CHECK(daemon.fake().Count().created == 0);
    const v1::Verification verification =
        GENERATE(v1::VERIFICATION_UNSPECIFIED, v1::VERIFICATION_OFF, v1::VERIFICATION_TRANSFER,
                 v1::VERIFICATION_READBACK);
    for (int64_t version = 1; version <= 2; ++version) {
      v1::BeginRequest begin = BeginBy(version, v1::BROADCAST_METHOD_CHAIN);
      begin.set_verification(verification);
      REQUIRE_OK(trainer.Begin(begin));
      CHECK(daemon.fake().Count().created == 2);
      const v1::CommitResponse committed = PushByHandles(&trainer, source, model, version);
      CHECK(one.Difference(version) == "");
      CHECK(two.Difference(version) == "");
      REQUIRE(committed.pushed_size() == 1);
      CHECK(committed.pushed(0).method() == v1::BROADCAST_METHOD_CHAIN);
      CHECK(committed.pushed(0).bytes() == ModelBytes(model));
      CHECK(committed.pushed(0).buckets() == 1);
      const v1::GetUpdateStatisticsResponse statistics = StatisticsOf(&daemon);
      CHECK(statistics.update().version() == version);
      REQUIRE(statistics.buckets_size() == 1);
      CHECK(statistics.buckets(0).broadcast() == v1::BROADCAST_METHOD_CHAIN);
      CHECK(statistics.buckets(0).tensors() == static_cast<int64_t>(model.size()));
      CHECK(statistics.buckets(0).bytes() == ModelBytes(model));
      CHECK(statistics.buckets(0).parts() > 1);
      CHECK(statistics.buckets(0).seconds() > 0);
    }
  }
  CHECK(Eventually([&] { return NoPools(daemon.fake()); }));
}

TEST_CASE("four replicas on four GPUs get a bucket by whatever method, and the shards beside it") {
  LocalDaemon daemon(true, nullptr, CudaTransportOptions().limit, 5, "a");
  const Model model = PlainModel(6, 100, 100);  // several slots
  const auto method = GENERATE(v1::BROADCAST_METHOD_CHAIN, v1::BROADCAST_METHOD_SYMMETRIC,
                               v1::BROADCAST_METHOD_NCCL, v1::BROADCAST_METHOD_DIRECT);
  {
    std::vector<std::unique_ptr<DeviceEngine>> engines;
    for (size_t device = 1; device <= 4; ++device) {
      engines.push_back(std::make_unique<DeviceEngine>(&daemon, device, model,
                                                       "engine-" + std::to_string(device)));
    }
    RawTrainer trainer(daemon.Connect(), daemon.TrainerOn(0));
    REQUIRE(trainer.attached().ok());
    Held shards = HoldWhole(model);
    const Block source(&daemon, 0, shards.region_bytes);
    const auto region = Register(&trainer, source.request);
    REQUIRE_OK(region);
    for (Piece& piece : shards.layout.pieces) piece.region = RegionId(region.response.region_id());
    shards.layout.binding_generation = 1;
    shards.layout.pushed_tensors = {0, 1, 2};
    REQUIRE_OK(trainer.Register(shards.layout));
    int64_t version = 0;
    for (const auto verification :
         {v1::VERIFICATION_OFF, v1::VERIFICATION_TRANSFER, v1::VERIFICATION_READBACK}) {
      const std::string image = ExpectedImage(EmptyImage(shards.region_bytes), shards.layout, model,
                                              BytesOf(model, ++version));
      std::memcpy(source.data, image.data(), image.size());
      v1::BeginRequest begin = BeginBy(version, method);
      begin.set_verification(verification);
      REQUIRE_OK(trainer.Begin(begin));
      v1::Bucket bucket = Describe({model[0], model[1], model[2]}, 0);
      int64_t pushed_bytes = 0;
      for (const uint32_t pushed : shards.layout.pushed_tensors) {
        v1::RegionRef* ref = bucket.mutable_regions()->add_refs();
        ref->set_region_id(region.response.region_id());
        ref->set_byte_offset(shards.layout.pieces[pushed].byte_offset);
        pushed_bytes += TensorBytes(model[pushed]);
      }
      REQUIRE_OK(trainer.Push(version, bucket));
      v1::RefitRequest refit;
      refit.set_version(version);
      refit.set_binding_generation(1);
      refit.set_bucket_count(1);
      refit.set_verification(verification);
      const auto committed = trainer.Refit(refit);
      REQUIRE_OK(committed);
      CHECK(committed.response.instances_size() == 4);
      for (const auto& engine : engines) CHECK(engine->Difference(version) == "");
      REQUIRE(committed.response.pushed_size() == 1);
      CHECK(committed.response.pushed(0).method() == method);
      CHECK(committed.response.pushed(0).bytes() == pushed_bytes);
    }
    if (method == v1::BROADCAST_METHOD_NCCL) CHECK(daemon.nccl().Count().broadcasts > 0);
    if (method == v1::BROADCAST_METHOD_SYMMETRIC) {
      const FakeNcclCounts counts = daemon.nccl().Count();
      CHECK(counts.symmetric_all_gathers + counts.engine_all_gathers > 0);
    }
  }
  CHECK(Eventually([&] { return NoPools(daemon.fake()); }));
}

TEST_CASE("buckets beside a compiled refit go by the chain, the rest by the program") {
  LocalDaemon daemon(true, nullptr, CudaTransportOptions().limit, 3);
  const Model model = PlainModel(5, 100, 100);
  DeviceEngine one(&daemon, 1, model, "one");
  DeviceEngine two(&daemon, 2, model, "two");
  RawTrainer trainer(daemon.Connect(), daemon.TrainerOn(0));
  REQUIRE(trainer.attached().ok());
  Held shards = HoldWhole(model);
  const Block source(&daemon, 0, shards.region_bytes);
  const auto region = Register(&trainer, source.request);
  REQUIRE_OK(region);
  for (Piece& piece : shards.layout.pieces) piece.region = RegionId(region.response.region_id());
  shards.layout.binding_generation = 1;
  shards.layout.pushed_tensors = {0, 1};
  REQUIRE_OK(trainer.Register(shards.layout));
  for (int64_t version = 1; version <= 2; ++version) {
    const std::string image = ExpectedImage(EmptyImage(shards.region_bytes), shards.layout, model,
                                            BytesOf(model, version));
    std::memcpy(source.data, image.data(), image.size());
    REQUIRE_OK(trainer.Begin(BeginBy(version, v1::BROADCAST_METHOD_CHAIN)));
    v1::Bucket bucket = Describe({model[0], model[1]}, 0);
    for (const uint32_t pushed : shards.layout.pushed_tensors) {
      v1::RegionRef* ref = bucket.mutable_regions()->add_refs();
      ref->set_region_id(region.response.region_id());
      ref->set_byte_offset(shards.layout.pieces[pushed].byte_offset);
    }
    REQUIRE_OK(trainer.Push(version, bucket));
    v1::RefitRequest refit;
    refit.set_version(version);
    refit.set_binding_generation(1);
    refit.set_bucket_count(1);
    const auto committed = trainer.Refit(refit);
    REQUIRE_OK(committed);
    CHECK(one.Difference(version) == "");
    CHECK(two.Difference(version) == "");
    REQUIRE(committed.response.pushed_size() == 1);
    CHECK(committed.response.pushed(0).method() == v1::BROADCAST_METHOD_CHAIN);
    CHECK(committed.response.pushed(0).bytes() == TensorBytes(model[0]) + TensorBytes(model[1]));
  }
}

// ---- parts of buckets that go directly ----

// An update of eight tensors in one bucket, cut into four parts of two, from a trainer on GPU 0 to
// instances "one" and "two" on GPUs 1 and 2.
struct DeviceParts {
  DeviceParts() {
    INFO(trainer.attached().error_message());
    REQUIRE(trainer.attached().ok());
  }
  static constexpr int kParts = 4;
  LocalDaemon daemon{true, nullptr, CudaTransportOptions().limit, 3};
  const Model model = PlainModel(8, 64, 64);
  std::optional<DeviceEngine> one{std::in_place, &daemon, 1, model, "one"};
  DeviceEngine two{&daemon, 2, model, "two"};
  RawTrainer trainer{daemon.Connect(), daemon.TrainerOn(0)};
  Block source{&daemon, 0, ModelBytes(model) + 64 * 64};

  void Begin(int64_t version, v1::Verification verification) {
    v1::BeginRequest begin = BeginBy(version, v1::BROADCAST_METHOD_DIRECT);
    begin.set_verification(verification);
    REQUIRE_OK(trainer.Begin(begin));
  }
  auto Push(int64_t version) {
    v1::Bucket bucket = Describe(model, 0);
    for (const int64_t offset : Pack(model, version, source.data)) {
      *bucket.mutable_cuda_ipc()->add_handles() = source.At(offset);
    }
    return trainer.Push(version, bucket);
  }
};

TEST_CASE("a big bucket that goes directly is installed in parts, and counts as one") {
  DeviceParts g;
  const auto verification =
      GENERATE(v1::VERIFICATION_OFF, v1::VERIFICATION_TRANSFER, v1::VERIFICATION_READBACK);
  for (int64_t version = 1; version <= 2; ++version) {
    const int launched = g.daemon.fake().Count().launch_calls;
    g.Begin(version, verification);
    REQUIRE_OK(g.Push(version));
    CHECK(g.daemon.fake().Count().launch_calls == launched + DeviceParts::kParts);
    const auto committed = g.trainer.Commit(version, 1);
    REQUIRE_OK(committed);
    CHECK(g.one->Difference(version) == "");
    CHECK(g.two.Difference(version) == "");
    REQUIRE(committed.response.pushed_size() == 1);
    CHECK(committed.response.pushed(0).method() == v1::BROADCAST_METHOD_DIRECT);
    CHECK(committed.response.pushed(0).bytes() == ModelBytes(g.model));
    CHECK(committed.response.pushed(0).buckets() == 1);
    const v1::GetUpdateStatisticsResponse statistics = StatisticsOf(&g.daemon);
    REQUIRE(statistics.buckets_size() == 1);
    CHECK(statistics.buckets(0).parts() == DeviceParts::kParts);
    CHECK(statistics.buckets(0).bytes() == ModelBytes(g.model));
  }
}

TEST_CASE("a wrong bit in any part of a bucket is found, and the next version is whole") {
  DeviceParts g;
  const int part = GENERATE(0, 1, 3);
  const bool transfer = GENERATE(true, false);
  g.Begin(1, transfer ? v1::VERIFICATION_TRANSFER : v1::VERIFICATION_READBACK);
  g.daemon.fake().Corrupt(part + 1);
  CHECK(g.Push(1).ok() != transfer);
  const auto committed = g.trainer.Commit(1, 1);
  CHECK(!committed.ok());
  CHECK_THAT(committed.status.error_message(), Contains("verification"));
  if (transfer) {
    CHECK_THAT(committed.status.error_message(), Contains("part " + std::to_string(part)));
  }
  for (DeviceEngine* engine : {&*g.one, &g.two}) {
    const auto aborted = engine->engine.events().WaitFor(v1::EngineEvent::kAborted);
    REQUIRE(aborted.has_value());
    CHECK(aborted->aborted().dirty());
  }
  g.Begin(2, v1::VERIFICATION_READBACK);
  REQUIRE_OK(g.Push(2));
  REQUIRE_OK(g.trainer.Commit(2, 1));
  CHECK(g.one->Difference(2) == "");
  CHECK(g.two.Difference(2) == "");
}

TEST_CASE("an engine that dies with parts on their way stays mapped until the last, alone in it") {
  DeviceParts g;
  g.Begin(1, v1::VERIFICATION_READBACK);
  g.daemon.fake().Hold(1);  // the source's GPU, which runs all parts
  auto pushed = std::async(std::launch::async, [&] { return g.Push(1); });
  REQUIRE(Eventually([&] { return g.daemon.fake().Count().launch_calls == DeviceParts::kParts; }));
  const int opened = g.daemon.fake().Count().opened_handles;
  g.one.reset();
  const auto instances = [&] {
    const auto status = StatusOf(&g.daemon.daemon());
    return status.groups(0).instances_size();
  };
  REQUIRE(Eventually([&] { return instances() == 1; }));
  CHECK(g.daemon.fake().Count().opened_handles == opened);
  CHECK(pushed.wait_for(std::chrono::seconds(0)) != std::future_status::ready);
  g.daemon.fake().Hold(0);
  REQUIRE_OK(pushed.get());
  CHECK(Eventually([&] { return g.daemon.fake().Count().opened_handles < opened; }));
  const auto committed = g.trainer.Commit(1, 1);
  REQUIRE_OK(committed);
  for (const v1::InstanceResult& instance : committed.response.instances()) {
    CHECK(instance.committed() == (instance.instance() == "two"));
  }
  CHECK(g.two.Difference(1) == "");
}

TEST_CASE("an abort with parts on their way is sent when the last part has ended") {
  DeviceParts g;
  g.Begin(1, v1::VERIFICATION_OFF);
  g.daemon.fake().Hold(1);
  auto pushed = std::async(std::launch::async, [&] { return g.Push(1); });
  REQUIRE(Eventually([&] { return g.daemon.fake().Count().launch_calls == DeviceParts::kParts; }));
  v1::AbortRequest abort;
  abort.set_version(1);
  abort.set_reason("changed its mind");
  auto aborted = std::async(std::launch::async,
                            [&] { return g.trainer.Call(&v1::Trainer::Stub::Abort, abort); });
  REQUIRE(Eventually([&] {
    const auto status = StatusOf(&g.daemon.daemon());
    return status.groups(0).update().state() == "draining";
  }));
  CHECK(pushed.wait_for(std::chrono::seconds(0)) != std::future_status::ready);
  CHECK(aborted.wait_for(std::chrono::seconds(0)) != std::future_status::ready);
  g.daemon.fake().Hold(0);
  CHECK(!pushed.get().ok());
  CHECK(aborted.get().ok());
  const auto told = g.two.engine.events().WaitFor(v1::EngineEvent::kAborted);
  REQUIRE(told.has_value());
  CHECK(told->aborted().dirty());
}

TEST_CASE("auto makes slots where several instances are on other GPUs than the trainer's") {
  LocalDaemon daemon(true, nullptr, CudaTransportOptions().limit, 3);
  const Model model = PlainModel(5, 20, 30);
  DeviceEngine one(&daemon, 1, model, "one");
  RawTrainer trainer(daemon.Connect(), daemon.TrainerOn(0));
  REQUIRE(trainer.attached().ok());
  const Block source(&daemon, 0, ModelBytes(model) + 64 * 64);
  REQUIRE_OK(trainer.Begin(1));
  PushByHandles(&trainer, source, model, 1);
  CHECK(daemon.fake().Count().created == 0);  // there is one instance only
  const bool same = GENERATE(false, true);
  DeviceEngine two(&daemon, same ? 1 : 2, model, "two");
  const bool room = GENERATE(true, false);
  constexpr int kOutOfMemory = 2;
  if (!room) daemon.fake().FailAt("cuMemCreate", 2, kOutOfMemory);
  REQUIRE_OK(trainer.Begin(2));
  if (room) CHECK(daemon.fake().Count().created == (same ? 0 : 2));
  PushByHandles(&trainer, source, model, 2);
  CHECK(one.Difference(2) == "");
  CHECK(two.Difference(2) == "");
}

TEST_CASE("auto broadcasts to loader engines on several GPUs too") {
  constexpr int64_t kSlot = int64_t{16} << 20;  // enough for a chain to be the fastest
  LocalDaemon daemon(true, nullptr, CudaTransportOptions().limit, 3);
  const Model model = PlainModel(1, 2048, 4096);
  LoaderEngine one(&daemon, 0, "one", kSlot);
  v1::TrainerHello hello = daemon.TrainerOn(2);
  *hello.mutable_spec() = Spec(1, 1, kSlot);
  RawTrainer trainer(daemon.Connect(), hello);
  REQUIRE(trainer.attached().ok());
  const Block source(&daemon, 2, ModelBytes(model) + 64);
  const auto method = [&](int64_t version) {
    v1::BeginRequest begin;
    begin.set_version(version);
    begin.set_tensor_count(1);
    REQUIRE_OK(trainer.Begin(begin));
    const v1::CommitResponse committed = PushByHandles(&trainer, source, model, version);
    CHECK(one.Difference(model, version) == "");
    return committed.pushed(0).method();
  };
  CHECK(method(1) == v1::BROADCAST_METHOD_DIRECT);
  LoaderEngine two(&daemon, 1, "two", kSlot);
  CHECK(method(2) == v1::BROADCAST_METHOD_CHAIN);
  CHECK(two.Difference(model, 2) == "");
}

TEST_CASE("direct makes no slots, and a method without room for its slots is refused") {
  LocalDaemon daemon(true, nullptr, CudaTransportOptions().limit, 3);
  const Model model = PlainModel(5, 20, 30);
  DeviceEngine one(&daemon, 1, model, "one");
  DeviceEngine two(&daemon, 2, model, "two");
  RawTrainer trainer(daemon.Connect(), daemon.TrainerOn(0));
  REQUIRE(trainer.attached().ok());
  const Block source(&daemon, 0, ModelBytes(model) + 64 * 64);
  REQUIRE_OK(trainer.Begin(BeginBy(1, v1::BROADCAST_METHOD_DIRECT)));
  const v1::CommitResponse committed = PushByHandles(&trainer, source, model, 1);
  REQUIRE(committed.pushed_size() == 1);
  CHECK(committed.pushed(0).method() == v1::BROADCAST_METHOD_DIRECT);
  CHECK(daemon.fake().Count().created == 0);
  constexpr int kOutOfMemory = 2;
  daemon.fake().FailAt("cuMemCreate", 2, kOutOfMemory);
  CheckRefused(trainer.Begin(BeginBy(2, v1::BROADCAST_METHOD_CHAIN)).status,
               StatusCode::RESOURCE_EXHAUSTED, {"broadcast", "chain", "staging slots"});
  REQUIRE_OK(trainer.Begin(BeginBy(2, v1::BROADCAST_METHOD_CHAIN)));
  PushByHandles(&trainer, source, model, 2);
  CHECK(one.Difference(2) == "");
  CHECK(two.Difference(2) == "");
}

TEST_CASE("an engine that comes while a broadcast is opened gets slots on its GPU first") {
  LocalDaemon daemon(true, nullptr, CudaTransportOptions().limit, 3);
  const Model model = PlainModel(5, 20, 30);
  RawTrainer trainer(daemon.Connect(), daemon.TrainerOn(0));
  REQUIRE(trainer.attached().ok());
  const Block source(&daemon, 0, ModelBytes(model) + 64 * 64);
  auto begun = std::async(std::launch::async, [&] {
    return trainer.Begin(BeginBy(1, v1::BROADCAST_METHOD_CHAIN)).status;
  });
  REQUIRE(Eventually([&] { return StatisticsOf(&daemon).has_update(); }));
  CHECK(daemon.fake().Count().created == 0);
  const bool room = GENERATE(true, false);
  constexpr int kOutOfMemory = 2;
  if (!room) daemon.fake().FailAt("cuMemCreate", 1, kOutOfMemory);
  DeviceEngine engine(&daemon, 2, model, "late");
  CHECK(daemon.fake().Count().created == (room ? 1 : 0));
  const grpc::Status status = begun.get();
  if (!room) {
    CheckRefused(status, StatusCode::RESOURCE_EXHAUSTED, {"chain", "engine late rank 0"});
    REQUIRE_OK(trainer.Begin(BeginBy(1, v1::BROADCAST_METHOD_CHAIN)));
    CHECK(daemon.fake().Count().created == 1);
    PushByHandles(&trainer, source, model, 1);
    CHECK(engine.Difference(1) == "");
    return;
  }
  INFO(status.error_message());
  REQUIRE(status.ok());
  const v1::CommitResponse committed = PushByHandles(&trainer, source, model, 1);
  CHECK(engine.Difference(1) == "");
  REQUIRE(committed.pushed_size() == 1);
  CHECK(committed.pushed(0).method() == v1::BROADCAST_METHOD_CHAIN);
}

TEST_CASE("broadcasts that can't be are refused at Begin, with the reason") {
  const Model model = PlainModel(1, 20, 30);
  const bool on_gpu = GENERATE(false, true);
  LocalDaemon daemon;
  DeviceEngine engine(&daemon, 0, model);
  RawTrainer trainer(daemon.Connect(), on_gpu ? daemon.TrainerOn(1) : RawTrainer::Hello("g"));
  REQUIRE(trainer.attached().ok());
  CheckRefused(trainer.Begin(BeginBy(1, static_cast<v1::BroadcastMethod>(9))).status,
               StatusCode::INVALID_ARGUMENT, {"broadcast", "9"});
  if (on_gpu) {
    CheckRefused(trainer.Begin(BeginBy(1, v1::BROADCAST_METHOD_NCCL)).status,
                 StatusCode::UNIMPLEMENTED, {"broadcast", "nccl"});
  } else {
    CheckRefused(trainer.Begin(BeginBy(1, v1::BROADCAST_METHOD_CHAIN)).status,
                 StatusCode::FAILED_PRECONDITION, {"broadcast", "chain", "host"});
  }
  CHECK(daemon.fake().Count().created == 0);
  REQUIRE_OK(trainer.Begin(BeginBy(1, v1::BROADCAST_METHOD_UNSPECIFIED)));
}

TEST_CASE("a GPU without room for the slots refuses the loader engine, and serves the next") {
  LocalDaemon daemon;
  v1::EngineHello hello = daemon.EngineOn(0, v1::DELIVERY_LOADER);
  constexpr int kOutOfMemory = 2;
  daemon.fake().FailAt("cuMemCreate", 1, kOutOfMemory);
  CheckRefused(RawEngine(daemon.Connect(), hello).attached(), StatusCode::RESOURCE_EXHAUSTED,
               {"group 'g'", "staging slots", "device 0", "out of memory"});
  CHECK(NoPools(daemon.fake()));
  CHECK(RawEngine(daemon.Connect(), hello).attached().ok());
  CHECK(Eventually([&] { return NoPools(daemon.fake()); }));
}

TEST_CASE("slots of a rank that was refused when they had come are given back") {
  LocalDaemon daemon;
  daemon.fake().Block("cuMemCreate");
  auto loader = std::async(std::launch::async, [&] {
    RawEngine engine(daemon.Connect(), daemon.EngineOn(0, v1::DELIVERY_LOADER));
    return engine.attached();
  });
  CHECK(Eventually([&] { return daemon.fake().Count().blocked_calls == 1; }));
  RawEngine host(daemon.Connect(), RawEngine::Hello("g", "host"));
  CHECK(host.attached().ok());
  daemon.fake().Block("");
  CheckRefused(loader.get(), StatusCode::FAILED_PRECONDITION, {"device.name", daemon.uuid(0)});
  CHECK(Eventually([&] { return NoPools(daemon.fake()); }));
}

TEST_CASE("a process that has no driver gets no slots on a GPU, and Attach says so") {
  LocalDaemon daemon;
  client::EngineOptions options;
  options.connect = ConnectOn(daemon, daemon.uuid(0), 4096);
  options.connect.cuda_library = "libcuda_missing.so.1";
  options.instance = "i";
  options.delivery = client::Delivery::kLoader;
  const absl::Status refused = client::Engine::Attach(options).status();
  CHECK(absl::IsUnavailable(refused));
  CHECK_THAT(Message(refused), Contains("libcuda_missing") && Contains(daemon.uuid(0)));
  CHECK(Eventually([&] { return NoPools(daemon.fake()); }));
}

TEST_CASE("a wrong bit in a slot of a GPU is found before anybody loads it") {
  LocalDaemon daemon;
  const Model model = PlainModel(1, 20, 30);
  const auto verification = GENERATE(Verification::kTransfer, Verification::kReadback);
  LoaderEngine engine(&daemon, 0, "i", 65'536);
  const auto trainer = AttachTrainer(ConnectOn(daemon, daemon.uuid(1), 65'536));
  daemon.fake().Corrupt(1);
  const absl::Status failed = PushBySlots(trainer.get(), model, 1, verification);
  CHECK_THAT(Message(failed), Contains("verification"));
  const absl::Status pushed = PushBySlots(trainer.get(), model, 2, verification);
  INFO(pushed);
  CHECK(pushed.ok());
  CHECK(engine.Difference(model, 2) == "");
}

TEST_CASE("an abort with parts unread: the slots come back, and the next update uses them") {
  LocalDaemon daemon;
  const Model model = PlainModel(6, 20, 30);
  LoaderEngine zero(&daemon, 0, "zero", 65'536);
  LoaderEngine one(&daemon, 1, "one", 65'536);
  const auto trainer = AttachTrainer(ConnectOn(daemon, daemon.uuid(1), 65'536));
  for (int64_t version = 1; version <= 5; version += 2) {
    one.Hold(true);
    const int held = one.held();
    {
      auto update = trainer->Begin(
          {.version = Version(version), .tensor_count = static_cast<int64_t>(model.size())});
      INFO(update.status());
      REQUIRE(update.ok());
      auto slot = (*update)->LeaseSlot();
      REQUIRE(slot.ok());
      REQUIRE((*update)->Push(client::Bucket::InSlot({model[0]}, *std::move(slot), {0})).ok());
      REQUIRE(Eventually([&] { return one.held() > held; }));
      REQUIRE((*update)->Abort("as the test wants").ok());
    }
    REQUIRE(Eventually([&] { return one.aborts() == (version + 1) / 2; }));
    one.Hold(false);
    const absl::Status pushed = PushBySlots(trainer.get(), model, version + 1);
    INFO(pushed);
    REQUIRE(pushed.ok());
    CHECK(zero.Difference(model, version + 1) == "");
    CHECK(one.Difference(model, version + 1) == "");
  }
}

TEST_CASE(
    "a loader engine dies with a slot unread: the other commits, its GPU has its memory back") {
  LocalDaemon daemon;
  const Model model = PlainModel(8, 20, 30);
  {
    LoaderEngine stays(&daemon, 0, "stays", 65'536);
    v1::EngineHello hello = daemon.EngineOn(1, v1::DELIVERY_LOADER);
    hello.set_instance("dies");
    hello.mutable_device()->set_name(daemon.uuid(1));
    auto dies = std::make_unique<RawEngine>(daemon.Connect(), hello,
                                            EngineOptions{.auto_ready = true, .auto_ack = false});
    REQUIRE(dies->attached().ok());
    const auto trainer = AttachTrainer(ConnectOn(daemon, daemon.uuid(0), 65'536));
    CHECK(daemon.fake().Count().created == 2);
    std::thread death([&] {
      CHECK(dies->events().WaitFor(v1::EngineEvent::kBucket).has_value());
      dies.reset();
    });
    const absl::Status pushed = PushBySlots(trainer.get(), model, 1);
    death.join();
    INFO(pushed);
    REQUIRE(pushed.ok());
    CHECK(stays.Difference(model, 1) == "");
    CHECK(Eventually([&] { return daemon.fake().Count().created == 1; }));
    // New members get slots again, and leave nothing.
    int open = 0;
    for (int round = 0; round < 20; ++round) {
      LoaderEngine passes(&daemon, 1, "passes", 65'536);
      if (round == 2) open = Descriptors();
    }
    constexpr int kSpare = 8;  // connections that come and go
    CHECK(Eventually([&] { return Descriptors() <= open + kSpare; }));
    CHECK(Eventually([&] { return daemon.fake().Count().created == 1; }));
    LoaderEngine follows(&daemon, 1, "follows", 65'536);
    CHECK(PushBySlots(trainer.get(), model, 2).ok());
    CHECK(follows.Difference(model, 2) == "");
    CHECK(stays.Difference(model, 2) == "");
  }
  CHECK(Eventually([&] { return NoPools(daemon.fake()); }));
}

TEST_CASE("whoever has detached may attach again at once") {
  LocalDaemon daemon;
  constexpr int kMembers = 8;
  constexpr int kRounds = 100;
  std::vector<std::future<absl::Status>> members;
  for (int i = 0; i < kMembers; ++i) {
    members.push_back(std::async(std::launch::async, [&daemon, i] {
      client::EngineOptions options;
      options.connect = ConnectOn(daemon, daemon.uuid(i % 2), 4096);
      options.instance = "i" + std::to_string(i);
      options.delivery = client::Delivery::kLoader;
      for (int round = 0; round < kRounds; ++round) {
        const absl::Status attached = client::Engine::Attach(options).status();
        if (!attached.ok()) return attached;
      }
      return absl::OkStatus();
    }));
  }
  for (auto& member : members) {
    const absl::Status ended = member.get();
    INFO(ended);
    CHECK(ended.ok());
  }
}

TEST_CASE("slots on a GPU are mapped again from the daemon that follows") {
  Machine machine;
  auto daemon = std::make_unique<LocalDaemon>(true, &machine);
  const Model model = MixedModel();
  LoaderEngine engine(daemon.get(), 0, "i", 4096, kTestDeadline);
  client::ConnectOptions connect = ConnectOn(*daemon, daemon->uuid(1), 4096);
  connect.reattach = kTestDeadline;
  const auto trainer = AttachTrainer(connect);
  const Block source(daemon.get(), 1, kMiB);
  auto region = trainer->AddCudaRegion(client::CudaIpcBlock{source.handle, kMiB});
  REQUIRE(region.ok());
  for (int64_t version = 1; version <= 2; ++version) {
    const std::vector<int64_t> offsets = Pack(model, version, source.data);
    auto update = trainer->Begin(
        {.version = Version(version), .tensor_count = static_cast<int64_t>(model.size())});
    INFO(update.status());
    REQUIRE(update.ok());
    REQUIRE((*update)->Push(client::Bucket::Unpacked(model, *region, offsets)).ok());
    REQUIRE((*update)->Commit().ok());
    CHECK(engine.Difference(model, version) == "");
    if (version == 2) break;
    daemon.reset();
    CHECK(machine.fake.Count().created == 0);
    daemon = std::make_unique<LocalDaemon>(true, &machine);
    REQUIRE(Eventually(
        [&] { return trainer->reattachments() == 1 && engine.engine().reattachments() == 1; }));
    // The old mapping ended with its lease.
    CHECK(Eventually([&] { return machine.fake.Count().imported == 1; }));
  }
}

TEST_CASE("a lost context fails the running update, and the loss is reported") {
  LocalDaemon daemon;
  const Model model = PlainModel(2, 8, 8);
  DeviceEngine engine(&daemon, 0, model);
  RawTrainer trainer(daemon.Connect(), daemon.TrainerOn(1));
  REQUIRE(trainer.attached().ok());
  const Block source(&daemon, 1, kMiB);
  const std::vector<int64_t> offsets = Pack(model, 1, source.data);
  REQUIRE_OK(trainer.Begin(1));
  v1::Bucket bucket = Describe(model, 0);
  for (const int64_t offset : offsets)
    *bucket.mutable_cuda_ipc()->add_handles() = source.At(offset);
  constexpr int kIllegalAddress = 700;
  daemon.fake().FailAt("kernel", 1, kIllegalAddress);
  CHECK(!trainer.Push(1, bucket).ok());
  REQUIRE(Eventually([&] { return !daemon.lost().ok(); }));
  daemon.daemon().DevicesLost(daemon.lost());
  CHECK(!trainer.Commit(1, 1).ok());
  const auto aborted = engine.engine.events().WaitFor(v1::EngineEvent::kAborted);
  REQUIRE(aborted.has_value());
  CHECK(aborted->aborted().dirty());
}

TEST_CASE("a GPU that hangs is reported; its calls are answered when its work has ended") {
  LocalDaemon daemon(true, nullptr, std::chrono::milliseconds(100));
  const Model model = PlainModel(2, 8, 8);
  DeviceEngine engine(&daemon, 0, model);
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g"));
  REQUIRE(trainer.attached().ok());
  REQUIRE_OK(trainer.Begin(1));
  daemon.fake().Hold(1);
  auto pushed = std::async(std::launch::async, [&] {
    return trainer.Push(1, InlineBucket(model, BytesOf(model, 1), 0, false));
  });
  REQUIRE(Eventually([&] { return !daemon.lost().ok(); }));
  CHECK_THAT(Message(daemon.lost()), Contains("did not end its work within 100 ms"));
  daemon.daemon().DevicesLost(daemon.lost());
  // The copy may still read the call's bytes and write the engine's memory.
  CHECK(!trainer.Begin(2).ok());
  CHECK(pushed.wait_for(std::chrono::seconds(0)) != std::future_status::ready);
  daemon.fake().Hold(0);
  CHECK(!pushed.get().ok());
  const auto aborted = engine.engine.events().WaitFor(v1::EngineEvent::kAborted);
  REQUIRE(aborted.has_value());
  CHECK(aborted->aborted().dirty());
}

TEST_CASE("a daemon whose GPU hangs ends, and with it what the GPU would still write") {
  if (CopyKernelImage().empty()) return;
  FakeCuda fake;
  Daemon daemon({"--cuda-library=" + FakeCuda::Path(), "--cuda-device-ms=200"},
                {"/usr/bin/env", "REFITD_FAKE_CUDA_HOLD=1"});
  const Model model = PlainModel(2, 8, 8);
  v1::EngineHello hello = RawEngine::Hello("g", "i");
  hello.mutable_device()->set_name((*CudaMemory::Create(FakeCuda::Path()))->devices()[0].uuid);
  RawEngine engine(daemon.Connect(), hello);
  REQUIRE(engine.attached().ok());
  Held held = HoldWhole(model);
  int raw = -1;
  const int64_t bytes = (held.region_bytes + 2 * kMiB - 1) / (2 * kMiB) * (2 * kMiB);
  char* const memory = fake.ExportVmm(0, bytes, &raw);
  const UniqueFd fd(raw);
  const std::string before = EmptyImage(held.region_bytes);
  std::memcpy(memory, before.data(), before.size());
  DescriptorRequest request = engine.descriptors().Request(DescriptorRequestKind::kRegisterRegion);
  request.region_kind = RegionKind::kDevice;
  request.bytes = bytes;
  const auto registered = engine.descriptors().Ask(request, {fd.get()});
  REQUIRE(registered.has_value());
  INFO(registered->message);
  REQUIRE(registered->code == 0);
  for (Piece& piece : held.layout.pieces) piece.region = RegionId(registered->region_id);
  held.layout.binding_generation = 1;
  REQUIRE_OK(engine.Register(held.layout));
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g"));
  REQUIRE(trainer.attached().ok());
  REQUIRE_OK(trainer.Begin(1));

  const auto pushed = trainer.Push(1, InlineBucket(model, BytesOf(model, 1), 0, false));
  CHECK(!pushed.ok());
  CHECK(daemon.WaitExit() == 1);
  CHECK_THAT(daemon.log(), Contains("the GPUs are lost to this process") &&
                               Contains("did not end its work within 200 ms"));
  CHECK(std::memcmp(memory, before.data(), before.size()) == 0);
}

TEST_CASE("a daemon whose GPU hangs as slots are made there ends, and says so to who needs them") {
  if (CopyKernelImage().empty()) return;
  const FakeCuda fake;
  Daemon daemon({"--cuda-library=" + FakeCuda::Path(), "--cuda-device-ms=200"},
                {"/usr/bin/env", "REFITD_FAKE_CUDA_HOLD=1"});
  v1::EngineHello hello = RawEngine::Hello("g", "i", 0, 1, v1::DELIVERY_LOADER);
  hello.mutable_device()->set_name((*CudaMemory::Create(FakeCuda::Path()))->devices()[0].uuid);
  CHECK(!RawEngine(daemon.Connect(), hello).attached().ok());
  CHECK(daemon.WaitExit() == 1);
  CHECK_THAT(daemon.log(), Contains("the GPUs are lost to this process") &&
                               Contains("did not end its work within 200 ms"));
}

TEST_CASE("a daemon whose driver never opens a region ends, and says what it waited for") {
  if (CopyKernelImage().empty()) return;
  FakeCuda fake;
  Daemon daemon({"--cuda-library=" + FakeCuda::Path(), "--cuda-device-ms=200"},
                {"/usr/bin/env", "REFITD_FAKE_CUDA_BLOCK=cuMemImportFromShareableHandle"});
  v1::EngineHello hello = RawEngine::Hello("g", "i");
  hello.mutable_device()->set_name((*CudaMemory::Create(FakeCuda::Path()))->devices()[0].uuid);
  RawEngine engine(daemon.Connect(), hello);
  REQUIRE(engine.attached().ok());
  int raw = -1;
  fake.ExportVmm(0, 2 * kMiB, &raw);
  const UniqueFd fd(raw);
  DescriptorRequest request = engine.descriptors().Request(DescriptorRequestKind::kRegisterRegion);
  request.region_kind = RegionKind::kDevice;
  request.bytes = 2 * kMiB;
  const auto registered = engine.descriptors().Ask(request, {fd.get()});
  CHECK((!registered.has_value() || registered->code != 0));
  CHECK(daemon.WaitExit() == 1);
  CHECK_THAT(
      daemon.log(),
      Contains("the GPUs are lost to this process") &&
          Contains(
              "mapping imported memory of cuMemCreate: the driver did not return within 200 ms"));
}

// ---- several daemons ----

// A trainer's GPU at one daemon, and engines' GPUs at the other: two there, each with the whole
// model.
struct TwoDaemons {
  Machine machine;
  LocalDaemon near{true, &machine, CudaTransportOptions().limit, 3, "a"};
  LocalDaemon far{true, &machine, CudaTransportOptions().limit, 3, "b"};
  // A loader engine at the far daemon, on one of the two GPUs that this process's clients know.
  std::unique_ptr<LoaderEngine> LoaderRank(size_t device, int64_t slot_bytes) {
    return std::make_unique<LoaderEngine>(&far, device, "loader-" + std::to_string(device),
                                          slot_bytes, std::chrono::milliseconds(0), &near);
  }
};

std::vector<v1::WireCommunicatorStatus> Communicators(LocalDaemon& daemon) {
  const v1::GetStatusResponse status = StatusOf(&daemon.daemon());
  REQUIRE(status.transports(1).name() == "cuda");
  const auto& communicators = status.transports(1).nccl().wire_communicators();
  return {communicators.begin(), communicators.end()};
}

TEST_CASE("buckets cross daemons from GPU to GPU, by NCCL, once a node") {
  TwoDaemons daemons;
  const Model model = MixedModel();
  v1::TrainerHello hello = daemons.near.TrainerOn(0);
  RawTrainer trainer(daemons.near.Connect(), hello);
  REQUIRE(trainer.attached().ok());
  std::vector<std::unique_ptr<DeviceEngine>> engines;
  for (const size_t device : {1, 2}) {
    engines.push_back(std::make_unique<DeviceEngine>(&daemons.far, device, model,
                                                     std::to_string(device), &daemons.near));
  }
  const Block source(&daemons.near, 0, ModelBytes(model) + 64 * 64);
  const auto region = Register(&trainer, source.request);
  REQUIRE_OK(region);
  int64_t version = 0;
  for (const v1::Verification verification :
       {v1::VERIFICATION_UNSPECIFIED, v1::VERIFICATION_OFF, v1::VERIFICATION_TRANSFER,
        v1::VERIFICATION_READBACK}) {
    const std::vector<int64_t> offsets = Pack(model, ++version, source.data);
    REQUIRE_OK(trainer.Begin(version, verification));
    v1::Bucket bucket = Describe(model, 0);
    for (const int64_t offset : offsets) {
      v1::RegionRef* ref = bucket.mutable_regions()->add_refs();
      ref->set_region_id(region.response.region_id());
      ref->set_byte_offset(offset);
    }
    REQUIRE_OK(trainer.Push(version, bucket));
    REQUIRE_OK(trainer.Commit(version, 1));
    for (const auto& engine : engines) CHECK(engine->Difference(version) == "");
  }
  const v1::GetStatusResponse status = StatusOf(&daemons.far.daemon());
  CHECK(status.resources().wire_bytes_received() >= 4 * ModelBytes(model));
  CHECK(status.resources().wire_bytes_received() < 5 * ModelBytes(model));
  // Both daemons have the same communicator, and each shows its own end.
  for (LocalDaemon* daemon : {&daemons.near, &daemons.far}) {
    const auto communicators = Communicators(*daemon);
    REQUIRE(communicators.size() == 1);
    const bool far = daemon == &daemons.far;
    CHECK(communicators[0].group() == "g");
    CHECK(communicators[0].number() == status.groups(0).communicator());
    CHECK(communicators[0].rails(0).gpu_uuid() == daemon->uuid(far ? 1 : 0));
    CHECK(communicators[0].rank() == (far ? 1 : 0));
    CHECK(communicators[0].ranks() == 2);
    CHECK(communicators[0].state() == "connected");
    CHECK(communicators[0].error().empty());
    CHECK((far ? communicators[0].rails(0).bytes_received()
               : communicators[0].rails(0).bytes_sent()) ==
          status.resources().wire_bytes_received());
  }
  CHECK(daemons.machine.nccl->Count().broadcasts >= 4);
  CHECK(daemons.near.lost().ok());
  CHECK(daemons.far.lost().ok());
}

TEST_CASE("bytes cross to another daemon by every GPU that the group's members are on") {
  TwoDaemons daemons;
  constexpr int64_t kSlot = 4 * kMiB;
  const Model model = PlainModel(2, 1024, 1024);  // 4 MiB
  std::vector<std::unique_ptr<RawTrainer>> trainers;
  for (const int rank : {0, 1}) {
    v1::TrainerHello hello = RawTrainer::Hello("g", Spec(2, 2, kSlot, 4), rank, 2);
    hello.mutable_device()->set_name(daemons.near.uuid(static_cast<size_t>(rank)));
    trainers.push_back(std::make_unique<RawTrainer>(daemons.near.Connect(), hello));
    REQUIRE(trainers.back()->attached().ok());
  }
  DeviceEngine one(&daemons.far, 1, model, "one", &daemons.near);
  DeviceEngine two(&daemons.far, 2, model, "two", &daemons.near);
  const Block source(&daemons.near, 0, ModelBytes(model) + 64 * 64);
  const auto region = Register(trainers[0].get(), source.request);
  REQUIRE_OK(region);
  const std::vector<int64_t> offsets = Pack(model, 1, source.data);
  auto other = std::async(std::launch::async, [&] {
    const bool begun = trainers[1]->Begin(1).status.ok();
    return begun && trainers[1]->Commit(1, 0).status.ok();
  });
  REQUIRE_OK(trainers[0]->Begin(1));
  v1::Bucket bucket = Describe(model, 0);
  for (const int64_t offset : offsets) {
    v1::RegionRef* ref = bucket.mutable_regions()->add_refs();
    ref->set_region_id(region.response.region_id());
    ref->set_byte_offset(offset);
  }
  REQUIRE_OK(trainers[0]->Push(1, bucket));
  REQUIRE_OK(trainers[0]->Commit(1, 1));
  CHECK(other.get());
  CHECK(one.Difference(1) == "");
  CHECK(two.Difference(1) == "");
  for (LocalDaemon* daemon : {&daemons.near, &daemons.far}) {
    const auto communicators = Communicators(*daemon);
    REQUIRE(communicators.size() == 1);
    REQUIRE(communicators[0].rails_size() == 2);
    const size_t first = daemon == &daemons.far ? 1 : 0;
    int64_t carried = 0;
    for (const int rail : {0, 1}) {
      const v1::WireRail& each = communicators[0].rails(rail);
      CHECK(each.gpu_uuid() == daemon->uuid(first + static_cast<size_t>(rail)));
      CHECK(each.bytes_sent() + each.bytes_received() >= ModelBytes(model) / 2 - kMiB);
      carried += each.bytes_sent() + each.bytes_received();
    }
    CHECK(carried >= ModelBytes(model));
  }
}

TEST_CASE("shards cross daemons from GPU to GPU: compiled refits, by NCCL's sends and receives") {
  TwoDaemons daemons;
  const Model model = MixedModel();
  v1::TrainerHello hello = daemons.near.TrainerOn(0);
  RawTrainer trainer(daemons.near.Connect(), hello);
  REQUIRE(trainer.attached().ok());
  std::vector<std::unique_ptr<DeviceEngine>> engines;
  engines.push_back(std::make_unique<DeviceEngine>(&daemons.far, 2, model, "far", &daemons.near));
  engines.push_back(std::make_unique<DeviceEngine>(&daemons.near, 1, model, "near"));
  Held shards = HoldWhole(model);
  const Block source(&daemons.near, 0, shards.region_bytes);
  const auto region = Register(&trainer, source.request);
  REQUIRE_OK(region);
  for (Piece& piece : shards.layout.pieces) piece.region = RegionId(region.response.region_id());
  shards.layout.binding_generation = 1;
  REQUIRE_OK(trainer.Register(shards.layout));
  for (int64_t version = 1; version <= 3; ++version) {
    const std::string image = ExpectedImage(EmptyImage(shards.region_bytes), shards.layout, model,
                                            BytesOf(model, version));
    std::memcpy(source.data, image.data(), image.size());
    REQUIRE_OK(trainer.Refit(version, 1));
    for (const auto& engine : engines) CHECK(engine->Difference(version) == "");
  }
  CHECK(StatusOf(&daemons.far.daemon()).resources().wire_bytes_received() >= 3 * ModelBytes(model));
}

TEST_CASE(
    "an engine that dies while the update waits for slots is evicted, and no update aborted") {
  TwoDaemons daemons;
  const Model model = PlainModel(2, 8, 8);
  DeviceEngine near(&daemons.near, 0, model, "near");
  // Slots are made on the lowest GPU that a member is on; the member that leaves may be the only
  // one on that GPU.
  const size_t gpu = GENERATE(size_t{0}, size_t{1});
  auto far = std::make_unique<DeviceEngine>(&daemons.far, gpu, model, "far", &daemons.near);
  v1::TrainerHello hello = daemons.far.TrainerOn(1);
  hello.set_coordinator(daemons.near.address());
  hello.clear_spec();
  RawTrainer trainer(daemons.far.Connect(), hello);
  INFO(trainer.attached().error_message());
  REQUIRE(trainer.attached().ok());
  const Block source(&daemons.far, 1, ModelBytes(model) + 64 * 64);
  const auto region = Register(&trainer, source.request);
  REQUIRE_OK(region);
  v1::Bucket bucket = Describe(model, 0);
  for (const int64_t offset : Pack(model, 1, source.data)) {
    v1::RegionRef* ref = bucket.mutable_regions()->add_refs();
    ref->set_region_id(region.response.region_id());
    ref->set_byte_offset(offset);
  }
  daemons.machine.fake.Block("cuMemCreate");
  // Begin is answered when the data plane is up, which waits for slots that are being made.
  auto begun = std::async(std::launch::async, [&] { return trainer.Begin(1).status; });
  REQUIRE(Eventually([&] { return daemons.machine.fake.Count().blocked_calls > 0; }));
  v1::ListMembersRequest members;
  members.set_group("g");
  REQUIRE(Eventually([&] {
    const auto listed = ListMembers(&daemons.near.daemon(), members);
    return listed.ok() && std::count_if(listed->members().begin(), listed->members().end(),
                                        [](const auto& m) { return m.state() == "ready"; }) == 2;
  }));
  far.reset();
  REQUIRE(Eventually([&] { return StatusOf(&daemons.far.daemon()).resources().members() == 1; }));
  daemons.machine.fake.Block("");
  REQUIRE(begun.get().ok());
  REQUIRE_OK(trainer.Push(1, bucket));
  const auto committed = trainer.Commit(1, 1);
  REQUIRE_OK(committed);
  CHECK(near.Difference(1) == "");
  REQUIRE(committed.response.instances_size() == 2);
  for (const v1::InstanceResult& instance : committed.response.instances()) {
    CHECK(instance.committed() == (instance.instance() == "near"));
  }
}

TEST_CASE("Begin waits until NCCL is up, and nothing is packed for a wire that may never come") {
  TwoDaemons daemons;
  const Model model = PlainModel(2, 8, 8);
  RawTrainer trainer(daemons.near.Connect(), daemons.near.TrainerOn(0));
  REQUIRE(trainer.attached().ok());
  DeviceEngine engine(&daemons.far, 1, model, "far", &daemons.near);
  const Block source(&daemons.near, 0, ModelBytes(model) + 64 * 64);
  daemons.machine.nccl->Block("ncclGetUniqueId");
  auto pushed = std::async(std::launch::async, [&] {
    REQUIRE_OK(trainer.Begin(1, v1::VERIFICATION_OFF));
    PushByHandles(&trainer, source, model, 1);
  });
  REQUIRE(Eventually([&] { return daemons.machine.nccl->Count().blocked_calls == 1; }));
  CHECK(daemons.machine.fake.Count().launch_calls == 0);
  daemons.machine.nccl->Block("");
  pushed.get();
  CHECK(engine.Difference(1) == "");
}

TEST_CASE(
    "loader engines of another daemon load what crossed, on each GPU, beside a registered one") {
  TwoDaemons daemons;
  const Model model = MixedModel();
  {
    // The member comes before the group, whose spec says what slots it needs.
    auto first = std::async(std::launch::async, [&] { return daemons.LoaderRank(0, 4096); });
    REQUIRE(Eventually([&] {
      const v1::GetStatusResponse status = StatusOf(&daemons.far.daemon());
      return status.groups_size() == 1 && status.groups(0).state() == "joining";
    }));
    CHECK(NoPools(daemons.machine.fake));
    v1::TrainerHello hello = daemons.near.TrainerOn(0);
    *hello.mutable_spec() = Spec(1, 1, 4096);
    RawTrainer trainer(daemons.near.Connect(), hello);
    REQUIRE(trainer.attached().ok());
    const std::unique_ptr<LoaderEngine> far_zero = first.get();
    const std::unique_ptr<LoaderEngine> far_one = daemons.LoaderRank(1, 4096);
    DeviceEngine registered(&daemons.far, 2, model, "in_place", &daemons.near);
    LoaderEngine near_zero(&daemons.near, 0, "near-0");
    LoaderEngine near_one(&daemons.near, 1, "near-1");
    CHECK(daemons.machine.fake.Count().created == 4);
    const Block source(&daemons.near, 0, ModelBytes(model) + 64 * 64);
    const auto region = Register(&trainer, source.request);
    REQUIRE_OK(region);
    int64_t version = 0;
    for (const v1::Verification verification :
         {v1::VERIFICATION_UNSPECIFIED, v1::VERIFICATION_OFF, v1::VERIFICATION_TRANSFER,
          v1::VERIFICATION_READBACK}) {
      const std::vector<int64_t> offsets = Pack(model, ++version, source.data);
      v1::BeginRequest begin;
      begin.set_version(version);
      begin.set_verification(verification);
      begin.set_tensor_count(static_cast<int64_t>(model.size()));
      REQUIRE_OK(trainer.Begin(begin));
      v1::Bucket bucket = Describe(model, 0);
      for (const int64_t offset : offsets) {
        v1::RegionRef* ref = bucket.mutable_regions()->add_refs();
        ref->set_region_id(region.response.region_id());
        ref->set_byte_offset(offset);
      }
      REQUIRE_OK(trainer.Push(version, bucket));
      REQUIRE_OK(trainer.Commit(version, 1));
      for (LoaderEngine* engine : {far_zero.get(), far_one.get(), &near_zero, &near_one}) {
        CHECK(engine->Difference(model, version) == "");
      }
      CHECK(registered.Difference(version) == "");
    }
    // Bytes cross once, whatever the number of readers.
    const int64_t crossed = StatusOf(&daemons.far.daemon()).resources().wire_bytes_received();
    CHECK(crossed >= version * ModelBytes(model));
    CHECK(crossed < 2 * version * ModelBytes(model));
    // Slots that crossed are those of the lowest GPU: there are only the four pools.
    CHECK(daemons.machine.fake.Count().created == 4);
  }
  CHECK(Eventually([&] { return NoPools(daemons.machine.fake); }));
}

TEST_CASE(
    "a leased slot reaches loader engines of another daemon, and a wrong bit there is found") {
  TwoDaemons daemons;
  const Model model = PlainModel(6, 20, 30);
  const bool from_far = GENERATE(false, true);
  LocalDaemon& at = from_far ? daemons.far : daemons.near;
  client::ConnectOptions connect = ConnectOn(at, at.uuid(GENERATE(0U, 1U)), 65'536);
  if (from_far) connect.coordinator = daemons.near.address();
  const auto trainer = AttachTrainer(connect);
  const auto verification =
      GENERATE(Verification::kOff, Verification::kTransfer, Verification::kReadback);
  // The slots that cross are on the lowest GPU that a daemon has a member on.
  const std::unique_ptr<LoaderEngine> zero = daemons.LoaderRank(0, 65'536);
  const std::unique_ptr<LoaderEngine> one = daemons.LoaderRank(1, 65'536);
  LoaderEngine near(&daemons.near, 1, "near", 65'536);
  DeviceEngine registered(&daemons.near, 0, model, "in_place");
  const auto check = [&](int64_t version) {
    CHECK(zero->Difference(model, version) == "");
    CHECK(one->Difference(model, version) == "");
    CHECK(near.Difference(model, version) == "");
    CHECK(registered.Difference(version) == "");
  };
  for (int64_t version = 1; version <= 2; ++version) {
    const absl::Status pushed = PushBySlots(trainer.get(), model, version, verification);
    INFO(pushed);
    REQUIRE(pushed.ok());
    check(version);
  }
  if (verification == Verification::kOff) return;
  const int64_t launches = daemons.machine.fake.Count().launch_calls;
  REQUIRE(PushBySlots(trainer.get(), model, 3, verification).ok());
  const int64_t an_update = daemons.machine.fake.Count().launch_calls - launches;
  // Whichever launch is damaged, the bytes that it stores are not handed out unnoticed.
  int64_t version = 3;
  int failed = 0;
  for (int nth = 1; nth <= an_update; ++nth) {
    daemons.machine.fake.Corrupt(nth);
    const absl::Status pushed = PushBySlots(trainer.get(), model, ++version, verification);
    daemons.machine.fake.Corrupt(0);
    if (!pushed.ok()) {
      CHECK_THAT(Message(pushed), Contains("verification"));
      ++failed;
      continue;
    }
    check(version);
  }
  CHECK(failed > 0);
}

TEST_CASE(
    "a loader engine of another daemon dies with a slot unread: the rest commits, its GPU has its "
    "memory back") {
  TwoDaemons daemons;
  const Model model = PlainModel(8, 20, 30);
  {
    const auto trainer = AttachTrainer(ConnectOn(daemons.near, daemons.near.uuid(0), 65'536));
    const std::unique_ptr<LoaderEngine> stays = daemons.LoaderRank(0, 65'536);
    v1::EngineHello hello = daemons.far.EngineOn(1, v1::DELIVERY_LOADER, "dies");
    hello.set_coordinator(daemons.near.address());
    auto dies = std::make_unique<RawEngine>(daemons.far.Connect(), hello,
                                            EngineOptions{.auto_ready = true, .auto_ack = false});
    INFO(dies->attached().error_message());
    REQUIRE(dies->attached().ok());
    CHECK(daemons.machine.fake.Count().created == 2);
    // There are more parts than slots, and no slot is granted again before its reader has let go.
    auto pushed =
        std::async(std::launch::async, [&] { return PushBySlots(trainer.get(), model, 1); });
    CHECK(dies->events().WaitFor(v1::EngineEvent::kBucket).has_value());
    CHECK(pushed.wait_for(std::chrono::milliseconds(100)) == std::future_status::timeout);
    dies.reset();
    const absl::Status status = pushed.get();
    INFO(status);
    REQUIRE(status.ok());
    CHECK(stays->Difference(model, 1) == "");
    // There is one pool on the trainer's GPU and one on that of the remaining engine.
    CHECK(Eventually([&] { return daemons.machine.fake.Count().created == 2; }));
    const std::unique_ptr<LoaderEngine> follows = daemons.LoaderRank(1, 65'536);
    CHECK(PushBySlots(trainer.get(), model, 2).ok());
    CHECK(follows->Difference(model, 2) == "");
    CHECK(stays->Difference(model, 2) == "");
  }
  CHECK(Eventually([&] { return NoPools(daemons.machine.fake); }));
}

TEST_CASE("a GPU of another daemon without room for the slots refuses the loader engine") {
  TwoDaemons daemons;
  RawTrainer trainer(daemons.near.Connect(), daemons.near.TrainerOn(0));
  REQUIRE(trainer.attached().ok());
  v1::EngineHello hello = daemons.far.EngineOn(1, v1::DELIVERY_LOADER);
  hello.set_coordinator(daemons.near.address());
  constexpr int kOutOfMemory = 2;
  daemons.machine.fake.FailAt("cuMemCreate", 1, kOutOfMemory);
  CheckRefused(RawEngine(daemons.far.Connect(), hello).attached(), StatusCode::RESOURCE_EXHAUSTED,
               {"group 'g'", "staging slots", "device 1", "out of memory"});
  CHECK(NoPools(daemons.machine.fake));
  // The daemon has no member left: it leaves the group, and joins again for the next member.
  CHECK(Eventually([&] { return ListGroups(&daemons.far.daemon()).groups_size() == 0; }));
  CHECK(RawEngine(daemons.far.Connect(), hello).attached().ok());
  CHECK(Eventually([&] { return NoPools(daemons.machine.fake); }));
}

TEST_CASE("over several daemons members of both kinds at one are refused, whoever comes last") {
  TwoDaemons daemons;
  RawTrainer trainer(daemons.near.Connect(), daemons.near.TrainerOn(0));
  REQUIRE(trainer.attached().ok());
  const Model model = PlainModel(2, 8, 8);
  DeviceEngine engine(&daemons.far, 1, model, "far", &daemons.near);
  v1::EngineHello hello = RawEngine::Hello("g", "host");
  hello.set_coordinator(daemons.near.address());
  CheckRefused(RawEngine(daemons.far.Connect(), hello).attached(), StatusCode::FAILED_PRECONDITION,
               {"device.name", "spans daemons", "daemon b", daemons.far.uuid(1)});
  // A daemon can't join a group if bytes of its members could not cross.
  RawTrainer host(daemons.near.Connect(), RawTrainer::Hello("s"));
  REQUIRE(host.attached().ok());
  v1::EngineHello loader = daemons.near.EngineOn(1, v1::DELIVERY_LOADER);
  loader.set_group("s");
  RawEngine near(daemons.near.Connect(), loader);
  REQUIRE(near.attached().ok());
  hello = daemons.far.EngineOn(2, v1::DELIVERY_IN_PLACE, "late");
  hello.set_group("s");
  hello.set_coordinator(daemons.near.address());
  CheckRefused(RawEngine(daemons.far.Connect(), hello).attached(), StatusCode::FAILED_PRECONDITION,
               {"would span daemons", "daemon a", daemons.near.uuid(1)});
}

TEST_CASE("device memory that crossed daemons is given back with the communicator") {
  Machine machine;
  LocalDaemon near(true, &machine, CudaTransportOptions().limit, 3, "a");
  const Model model = PlainModel(2, 8, 8);
  {
    LocalDaemon far(true, &machine, CudaTransportOptions().limit, 3, "b");
    v1::TrainerHello hello = near.TrainerOn(0);
    RawTrainer trainer(near.Connect(), hello);
    REQUIRE(trainer.attached().ok());
    DeviceEngine engine(&far, 1, model, "far", &near);
    const Block source(&near, 0, ModelBytes(model) + 64 * 64);
    REQUIRE_OK(trainer.Begin(1));
    PushByHandles(&trainer, source, model, 1);
    CHECK(engine.Difference(1) == "");
    CHECK(machine.fake.Count().created == 2);
  }
  CHECK(Eventually([&] { return NoPools(machine.fake); }));
  CHECK(Eventually([&] { return machine.nccl->Count().comms == 0; }));
}

TEST_CASE("a coordinator whose last member on a GPU left gives its wire back, and opens another") {
  TwoDaemons daemons;
  const Model model = PlainModel(2, 8, 8);
  std::optional<DeviceEngine> engine;
  // The trainer is on another GPU each time.
  for (int64_t version = 1; version <= 3; ++version) {
    const auto gpu = static_cast<size_t>(version % 3);
    {
      RawTrainer trainer(daemons.near.Connect(), daemons.near.TrainerOn(gpu));
      REQUIRE(trainer.attached().ok());
      if (!engine.has_value()) engine.emplace(&daemons.far, 1, model, "far", &daemons.near);
      const Block source(&daemons.near, gpu, ModelBytes(model) + 64 * 64);
      REQUIRE_OK(trainer.Begin(version));
      PushByHandles(&trainer, source, model, version);
      CHECK(engine->Difference(version) == "");
      const auto communicators = Communicators(daemons.near);
      REQUIRE(communicators.size() == 1);
      CHECK(communicators[0].rails(0).gpu_uuid() == daemons.near.uuid(gpu));
      CHECK(daemons.machine.nccl->Count().comms == 2);
      CHECK(daemons.machine.fake.Count().created == 2);
    }
    CHECK(Eventually(
        [&] { return Communicators(daemons.near).empty() && Communicators(daemons.far).empty(); }));
    CHECK(daemons.machine.nccl->Count().comms == 0);
    // Only the engine's slots are left.
    CHECK(Eventually([&] { return daemons.machine.fake.Count().created == 1; }));
  }
}

TEST_CASE("a wire that an update needs outlives the coordinator's last member on a GPU") {
  TwoDaemons daemons;
  const Model model = PlainModel(2, 8, 8);
  v1::TrainerHello hello = daemons.far.TrainerOn(0);
  hello.set_coordinator(daemons.near.address());
  RawTrainer trainer(daemons.far.Connect(), hello);
  REQUIRE(trainer.attached().ok());
  DeviceEngine stays(&daemons.far, 1, model, "far", &daemons.near);
  auto leaves = std::make_unique<DeviceEngine>(&daemons.near, 2, model, "near");
  const Block source(&daemons.far, 0, ModelBytes(model) + 64 * 64);
  REQUIRE_OK(trainer.Begin(1));
  v1::Bucket bucket = Describe(model, 0);
  for (const int64_t offset : Pack(model, 1, source.data)) {
    *bucket.mutable_cuda_ipc()->add_handles() = source.At(offset);
  }
  REQUIRE_OK(trainer.Push(1, bucket));
  leaves.reset();
  REQUIRE(Eventually([&] { return StatusOf(&daemons.near.daemon()).resources().members() == 0; }));
  for (LocalDaemon* daemon : {&daemons.near, &daemons.far}) {
    REQUIRE(Communicators(*daemon).size() == 1);
    CHECK(Communicators(*daemon)[0].state() == "connected");
  }
  // Each end of the wire has its slots.
  CHECK(daemons.machine.fake.Count().created == 2);
  REQUIRE_OK(trainer.Commit(1, 1));
  CHECK(stays.Difference(1) == "");
  CHECK(Eventually(
      [&] { return Communicators(daemons.near).empty() && Communicators(daemons.far).empty(); }));
  CHECK(daemons.machine.nccl->Count().comms == 0);
  CHECK(Eventually([&] { return daemons.machine.fake.Count().created == 1; }));
  // All members that are left are on one daemon.
  REQUIRE_OK(trainer.Begin(2));
  PushByHandles(&trainer, source, model, 2);
  CHECK(stays.Difference(2) == "");
  CHECK(Communicators(daemons.far).empty());
}

TEST_CASE("what crossed was looked for in host memory when the last reader there had died") {
  TwoDaemons daemons;
  const Model model = PlainModel(2, 8, 8);
  v1::TrainerHello hello = daemons.far.TrainerOn(0);
  hello.set_coordinator(daemons.near.address());
  RawTrainer trainer(daemons.far.Connect(), hello);
  REQUIRE(trainer.attached().ok());
  DeviceEngine stays(&daemons.far, 1, model, "far", &daemons.near);
  auto dies = std::make_unique<RawEngine>(daemons.near.Connect(),
                                          daemons.near.EngineOn(2, v1::DELIVERY_LOADER, "near"),
                                          EngineOptions{.auto_ready = true, .auto_ack = false});
  REQUIRE(dies->attached().ok());
  const Block source(&daemons.far, 0, ModelBytes(model) + 64 * 64);
  v1::BeginRequest begin;
  begin.set_version(1);
  begin.set_verification(v1::VERIFICATION_TRANSFER);
  begin.set_tensor_count(static_cast<int64_t>(model.size()));
  REQUIRE_OK(trainer.Begin(begin));
  daemons.machine.nccl->Block("ncclBroadcast");
  auto pushed = std::async(std::launch::async, [&] { PushByHandles(&trainer, source, model, 1); });
  CHECK(Eventually([&] { return daemons.machine.nccl->Count().blocked_calls == 2; }));
  dies.reset();
  CHECK(Eventually([&] { return StatusOf(&daemons.near.daemon()).resources().members() == 0; }));
  daemons.machine.nccl->Block("");
  pushed.get();
  CHECK(stays.Difference(1) == "");
}

TEST_CASE("a rank that came back to the GPU of the wire's slots got others there") {
  TwoDaemons daemons;
  const Model model = PlainModel(6, 20, 30);
  {
    const auto trainer = AttachTrainer(ConnectOn(daemons.near, daemons.near.uuid(1), 65'536));
    const std::unique_ptr<LoaderEngine> far = daemons.LoaderRank(1, 65'536);
    auto comes_and_goes = [&] {
      return std::make_unique<LoaderEngine>(&daemons.near, 0, "near", 65'536);
    };
    auto near = comes_and_goes();
    const auto push = [&](int64_t version) {
      const absl::Status pushed = PushBySlots(trainer.get(), model, version);
      INFO(pushed);
      REQUIRE(pushed.ok());
      CHECK(near->Difference(model, version) == "");
      CHECK(far->Difference(model, version) == "");
      // There are the trainer's slots, and the wire's slots at each end.
      CHECK(daemons.machine.fake.Count().created == 3);
      REQUIRE(Communicators(daemons.near).size() == 1);
      CHECK(Communicators(daemons.near)[0].rails(0).gpu_uuid() == daemons.near.uuid(0));
    };
    push(1);
    const auto goes = [&] {
      near.reset();
      REQUIRE(
          Eventually([&] { return StatusOf(&daemons.near.daemon()).resources().members() == 1; }));
    };
    goes();
    near = comes_and_goes();
    push(2);
    // The last member on any GPU is on another GPU.
    goes();
  }
  CHECK(Eventually([&] { return NoPools(daemons.machine.fake); }));
}

TEST_CASE("a communicator and a loader rank that need slots on one GPU at once get the same") {
  TwoDaemons daemons;
  const Model model = PlainModel(2, 8, 8);
  {
    RawTrainer trainer(daemons.near.Connect(), daemons.near.TrainerOn(0));
    REQUIRE(trainer.attached().ok());
    DeviceEngine registered(&daemons.far, 1, model, "in_place", &daemons.near);
    const Block source(&daemons.near, 0, ModelBytes(model) + 64 * 64);
    std::future<void> pushed;
    DirectEngine loader;
    const auto blocked = [&](int calls) {
      return Eventually([&] { return daemons.machine.fake.Count().blocked_calls == calls; });
    };
    // There is room for one pool at each daemon only.
    constexpr int kOutOfMemory = 2;
    daemons.machine.fake.FailAt("cuMemCreate", 3, kOutOfMemory);
    daemons.machine.fake.Block("cuMemCreate");
    const bool rank_first = GENERATE(true, false);
    if (rank_first) {
      loader.Attach(&daemons.near, daemons.near.EngineOn(0, v1::DELIVERY_LOADER, "loader"));
      CHECK(blocked(1));
    }
    pushed = std::async(std::launch::async, [&] {
      REQUIRE_OK(trainer.Begin(1, v1::VERIFICATION_TRANSFER));
      PushByHandles(&trainer, source, model, 1);
    });
    CHECK(blocked(2));  // one at each daemon
    if (!rank_first) {
      loader.Attach(&daemons.near, daemons.near.EngineOn(0, v1::DELIVERY_LOADER, "loader"));
    }
    CHECK(!loader.welcomed());
    daemons.machine.fake.Block("");
    pushed.get();
    CHECK(registered.Difference(1) == "");
    CHECK(Eventually([&] { return loader.welcomed(); }));
    CHECK(daemons.machine.fake.Count().created == 2);
    loader.Leave();
  }
  CHECK(Eventually([&] { return NoPools(daemons.machine.fake); }));
}

#endif

}  // namespace
}  // namespace refitd::e2e
