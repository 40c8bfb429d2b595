#include "daemon/node/parts_test_util.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <future>

#include "daemon/services/peer_service.h"
#include "transport/base/status.h"
#include "transport/host/host_transport.h"

namespace refitd {

SharedMemory::SharedMemory(int64_t size)
    : fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING)), bytes(size) {
  REFITD_CHECK(ftruncate(fd.get(), bytes) == 0);
  REFITD_CHECK(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  mapping = *HostRegion::Map(fd, bytes, Access::kReadWrite, false);
}

DaemonParts::DaemonParts(const std::string& id, DaemonOptions options, DaemonInsides insides) {
  processes_ = *ProcessWatch::Create();
  options.daemon_id = id;
  // A live daemon is silent for longer than the default on a busy machine under a sanitizer.
  options.peers.peer = kPatience;
  const PeerDialer dialer = [](PeerDial dial, PeerLinkCallbacks callbacks) {
    dial.credentials = grpc::InsecureChannelCredentials();
    return PeerLink::Dial(std::move(dial), std::move(callbacks));
  };
  const int64_t message_bytes = options.message_bytes;
  if (insides.transport == nullptr) insides.transport = MakeHostTransport({.threads = 1});
  daemon_ = std::make_unique<Daemon>(std::move(options), std::move(insides.transport),
                                     processes_.get(), std::move(insides.wire), dialer);
  links_ = std::make_unique<PeerService>(&daemon_->peer_server(), message_bytes);
  grpc::ServerBuilder builder;
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
  builder.RegisterService(links_.get());
  server_ = builder.BuildAndStart();
  REFITD_CHECK(server_ != nullptr && port_ != 0);
}

DaemonParts::~DaemonParts() {
  daemon_->CheckInvariants();
  daemon_->Drain();
  daemon_->Finish(std::chrono::steady_clock::now());
  daemon_->CheckInvariants();
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
  daemon_.reset();
}

Arrival DaemonParts::Engine(const std::string& instance, DeliveryMode delivery, int rank,
                            int world_size, const std::vector<std::string>& manifest) {
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
  arrival.record.rank = rank;
  arrival.record.world_size = world_size;
  arrival.record.reads_slots = ReadsSlots(delivery);
  arrival.identity = std::move(engine);
  return arrival;
}

Attached DaemonParts::Attach(Arrival arrival, const std::string& group,
                             std::optional<GroupSpec> spec, const DaemonParts* at, Duration wait,
                             std::shared_ptr<Inbox> inbox) {
  arrival.record.group = group;
  if (arrival.record.device.empty()) arrival.record.device = "host";
  arrival.spec = std::move(spec);
  if (at != nullptr) arrival.coordinator = at->address();
  arrival.wait = wait;
  Peer peer = arrival.record.peer;
  return {calls().Attach(std::move(arrival), inbox), inbox, std::move(peer)};
}

Arrival DaemonParts::OnGpu(Arrival arrival, int ordinal) {
  arrival.record.device = fmt::format("GPU-{}", ordinal);
  // Members on GPUs attach over the unix socket, which tells who they are.
  arrival.record.peer.credentials.emplace().uid = 1000;
  return arrival;
}

absl::StatusOr<RegionId> DaemonParts::Register(const Attached& member, const SharedMemory& shared) {
  return memory().RegisterRegion(member.token(),
                                 member.peer.credentials.value_or(PeerCredentials()),
                                 UniqueFd(dup(shared.fd.get())), RegionKind::kMemfd, shared.bytes);
}

Answer DaemonParts::Call(const Attached& trainer, absl::StatusOr<TrainerEvent> event) {
  Answer answer;
  calls().Call(daemon_->NewCall(), trainer.caller(), std::move(event), answer.function());
  return answer;
}

Answer DaemonParts::Begin(const Attached& trainer, int64_t version, int64_t tensors) {
  BeginEvent begin;
  begin.version = Version(version);
  begin.tensor_count = tensors;
  begin.duration = kPatience;
  return Call(trainer, begin);
}

void DaemonParts::Ready(const Attached& engine) {
  const UpdateId update = engine.inbox->Last<SendPrepare>()->update;
  calls().HandleEngineEvent(engine.id, ReadyEvent{engine.id, update});
}

std::shared_ptr<void> DaemonParts::HoldRegionsThread() {
  auto held = std::make_shared<std::promise<void>>();
  state().regions_thread->Submit([over = held->get_future().share()] { over.wait(); });
  return {nullptr, [held](void*) { held->set_value(); }};
}

void DaemonParts::AwaitRegionsThread() {
  const auto done = std::make_shared<std::atomic<bool>>(false);
  const std::shared_ptr<JobThreads> thread = state().regions_thread;
  thread->Submit([thread, done] { thread->Submit([done] { *done = true; }); });
  REQUIRE(Eventually([&done] { return done->load(); }));
}

Layout LayoutOf(RegionId region, int64_t elements, uint64_t generation) {
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
