#include "client/connection.h"

#include <grpcpp/create_channel.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <type_traits>
#include <utility>

#include "client/call.h"
#include "client/target.h"
#include "proto/protocol.h"
#include "refitd/v1/engine.grpc.pb.h"
#include "refitd/v1/trainer.grpc.pb.h"
#include "transport/base/errors.h"
#include "transport/base/status.h"
#include "transport/base/unique_fd.h"

namespace refitd::client {

namespace {

constexpr size_t kMaxIdentifierBytes = 128;
constexpr size_t kTokenBytes = sizeof(DescriptorRequest::token);
// The daemon fills a region's pages when it maps the region. This rate is slow even for a busy
// virtual machine that gets its memory back from its host page by page (0.1 GB/s was seen).
constexpr int64_t kPopulateBytesPerSecond = int64_t{16} << 20;
// Opening device memory for the first time makes the daemon create its context on that GPU, and
// closing waits for what the driver does for others.
constexpr std::chrono::seconds kDeviceLimit{30};
constexpr size_t kMaxDeviceBytes = 64;
constexpr std::chrono::seconds kProbeLimit{2};
constexpr int kReconnectMs = 50;
constexpr int kMaxReconnectMs = 500;
constexpr int kTcpConnectMs = 10'000;  // with the TLS handshake, which daemons give as long

// A third of the limit for silence passes before a ping, two thirds until the ping counts as
// unanswered.
constexpr int kSilenceParts = 3;

absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const Target& target,
                                                           std::chrono::milliseconds silence) {
  REFITD_ASSIGN_OR_RETURN(const auto credentials, CredentialsOf(target));
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // Every member has a connection of its own, so that none waits behind the bytes of another.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // Keepalive is needed because the kernel tells when the peer of a unix socket is gone, but not
  // when it is stopped or stuck.
  const int third =
      static_cast<int>(std::min<int64_t>(silence.count() / kSilenceParts, INT_MAX / kSilenceParts));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, third > 0 ? third : INT_MAX);
  if (third > 0) arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, (kSilenceParts - 1) * third);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // no limit
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectMs);
  // gRPC takes the shortest pause between attempts as the limit of one attempt as well.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, target.tcp ? kTcpConnectMs : kReconnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kMaxReconnectMs);
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(-1);  // the daemon's limit decides
  return grpc::CreateCustomChannel(target.uri(), credentials, arguments);
}

// The errno that says why nobody answers at `path`; gRPC does not tell it.
int ProbeErrno(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return errno;
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    return 0;
  }
  return errno;
}

// Whether one side refuses the other's certificate, which happens only over TCP.
bool Refused(const absl::Status& status) { return absl::IsUnauthenticated(status); }

// Returns why no daemon answers at `target`. OK: a daemon takes connections there.
absl::Status Probe(const Target& target, TimePoint deadline) {
  if (target.tcp) return WhyNoAnswer(target, std::min(deadline, After(kProbeLimit)));
  const int error = ProbeErrno(target.name);
  if (error == 0) return absl::OkStatus();
  if (error == EACCES || error == EPERM) {
    return ErrnoError(error, fmt::format("connecting to the daemon at {}", target.name));
  }
  return absl::UnavailableError(std::strerror(error));
}

absl::Status NoDaemon(const Target& target, const absl::Status& why) {
  if (!why.ok() && !absl::IsUnavailable(why)) return why;
  return SuspectDaemon(
      Error(absl::StatusCode::kUnavailable, "no daemon answers at {}: {}", target.name,
            why.ok() ? "it takes connections and says nothing" : Message(why)),
      target.name);
}

absl::Status WaitConnected(grpc::Channel* channel, const Target& target, TimePoint deadline,
                           const std::stop_token& stop) {
  while (true) {
    if (stop.stop_requested()) return absl::CancelledError("detached");
    const grpc_connectivity_state state = channel->GetState(/*try_to_connect=*/true);
    if (state == GRPC_CHANNEL_READY) return absl::OkStatus();
    if (state == GRPC_CHANNEL_TRANSIENT_FAILURE) {
      // Waiting does not mend missing rights.
      const absl::Status why = Probe(target, deadline);
      if (absl::IsPermissionDenied(why) || Refused(why)) return why;
    }
    const auto limit =
        std::chrono::system_clock::now() +
        std::chrono::duration_cast<std::chrono::microseconds>(Until(PieceOf(deadline, stop)));
    if (channel->WaitForStateChange(state, limit) || Until(deadline) > Duration::zero()) continue;
    return NoDaemon(target, Probe(target, After(kCleanupLimit)));
  }
}

// gRPC joins its callback threads when the last channel that used them is destroyed, even on one of
// these threads: a callback that drops the last reference would then end the process. A channel
// that had a call and is never destroyed keeps the threads alive. This channel never connects.
void KeepCallbackThreads() {
  static const auto* const kept = [] {
    auto* stub = v1::Trainer::NewStub(grpc::CreateCustomChannel("", nullptr, {})).release();
    StartCall<v1::Trainer::StubInterface::async_interface, v1::GetUpdateRequest,
              v1::GetUpdateResponse>(
        stub->async(), &v1::Trainer::StubInterface::async_interface::GetUpdate, {},
        After(kCleanupLimit), [](const absl::Status&, const v1::GetUpdateResponse&) {});
    return stub;
  }();
  (void)kept;
}

// Calls `ask` with the stub of the service that the owner calls. The stub lives until `ask`
// returns.
template <typename Ask>
auto WithStub(const RegionOwner& owner, const std::shared_ptr<grpc::Channel>& channel,
              const Ask& ask) {
  if (owner.engine) {
    const std::unique_ptr<v1::Engine::StubInterface> stub = v1::Engine::NewStub(channel);
    return ask(stub->async());
  }
  const std::unique_ptr<v1::Trainer::StubInterface> stub = v1::Trainer::NewStub(channel);
  return ask(stub->async());
}

bool Printable(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= 0x20 && c < 0x7F; });
}

}  // namespace

absl::Status CheckIdentifier(std::string_view value, std::string_view field) {
  if (!value.empty() && value.size() <= kMaxIdentifierBytes && Printable(value)) {
    return absl::OkStatus();
  }
  return InvalidField(field, "{} must be 1 to {} printable characters, not {} bytes \"{}\"", field,
                      kMaxIdentifierBytes, value.size(), CleanText(value, kMaxIdentifierBytes));
}

absl::Status CheckRank(int rank, int world_size) {
  if (world_size >= 1 && rank >= 0 && rank < world_size) return absl::OkStatus();
  return InvalidField("rank", "rank {} of world_size {}", rank, world_size);
}

absl::Status CheckConnectOptions(const ConnectOptions& options) {
  REFITD_RETURN_IF_ERROR(TargetOf(options).status());
  REFITD_RETURN_IF_ERROR(CheckIdentifier(options.group, "group"));
  if (options.wait.count() < 0) {
    return InvalidField("wait", "wait of {} ms", options.wait.count());
  }
  if (options.call_margin.count() <= 0) {
    return InvalidField("call_margin", "call_margin of {} ms must be greater than 0",
                        options.call_margin.count());
  }
  // The daemon checks the rest of the address.
  if (options.coordinator.size() > kMaxCoordinatorBytes || !Printable(options.coordinator)) {
    return InvalidField("coordinator",
                        "coordinator must be at most {} printable characters, not {} bytes \"{}\"",
                        kMaxCoordinatorBytes, options.coordinator.size(),
                        CleanText(options.coordinator, kMaxCoordinatorBytes));
  }
  if (options.device.size() > kMaxDeviceBytes || !Printable(options.device)) {
    return InvalidField(
        "device", "device must be at most {} printable characters, not {} bytes \"{}\"",
        kMaxDeviceBytes, options.device.size(), CleanText(options.device, kMaxDeviceBytes));
  }
  if (options.reattach.count() < 0) {
    return InvalidField("reattach", "reattach of {} ms", options.reattach.count());
  }
  if (options.silence.count() != 0 && options.silence < kMinSilence) {
    return InvalidField("silence", "silence of {} ms: 0, or at least {}, which daemons allow",
                        options.silence.count(), kMinSilence.count());
  }
  if (!options.spec) return absl::OkStatus();
  const auto check = [](const std::vector<std::string>& names, std::string_view field) {
    for (const std::string& name : names) {
      if (CleanText(name, name.size()) == name) continue;
      return InvalidField(fmt::format("spec.{}", field), "spec.{}: \"{}\" is not UTF-8", field,
                          CleanText(name, name.size()));
    }
    return absl::OkStatus();
  };
  REFITD_RETURN_IF_ERROR(check(options.spec->engine_only_tensors, "engine_only_tensors"));
  return check(options.spec->unwanted_tensors, "unwanted_tensors");
}

v1::GroupSpec SpecToProto(const GroupSpec& spec) {
  v1::GroupSpec message;
  message.set_trainer_ranks(spec.trainer_ranks);
  message.set_min_instances(spec.min_instances);
  message.set_slot_bytes(spec.slot_bytes);
  message.set_slots(spec.slots);
  for (const std::string& name : spec.engine_only_tensors) message.add_engine_only_tensors(name);
  for (const std::string& name : spec.unwanted_tensors) message.add_unwanted_tensors(name);
  message.set_max_lag(spec.max_lag);
  message.set_encrypted_data(spec.encrypted_data);
  message.set_hold_previous_seconds(spec.hold_previous_seconds);
  message.set_keep_seconds(spec.keep_seconds);
  return message;
}

Connection::Connection(const ConnectOptions& options, const Target& target,
                       std::shared_ptr<grpc::Channel> channel)
    : socket_(target.name),
      tcp_(target.tcp),
      channel_(std::move(channel)),
      call_margin_(options.call_margin),
      device_(options.device),
      device_library_(options.cuda_library) {}

absl::StatusOr<std::shared_ptr<Connection>> Connection::Open(const ConnectOptions& options,
                                                             TimePoint deadline) {
  KeepCallbackThreads();
  REFITD_ASSIGN_OR_RETURN(const Target target, TargetOf(options));
  REFITD_ASSIGN_OR_RETURN(auto channel, MakeChannel(target, options.silence));
  std::shared_ptr<Connection> connection(new Connection(options, target, std::move(channel)));
  REFITD_RETURN_IF_ERROR(WaitConnected(connection->channel_.get(), target, deadline, {}));
  return connection;
}

absl::StatusOr<std::shared_ptr<Connection>> Connection::OpenNow(const ConnectOptions& options,
                                                                TimePoint deadline,
                                                                const std::stop_token& stop) {
  REFITD_ASSIGN_OR_RETURN(const Target target, TargetOf(options));
  if (absl::Status why = Probe(target, deadline); !why.ok()) {
    if (Refused(why)) return why;
    return SuspectDaemon(Error(absl::StatusCode::kUnavailable, "no daemon answers at {}: {}",
                               target.name, Message(why)),
                         target.name);
  }
  auto channel = MakeChannel(target, options.silence);
  // This is UNAVAILABLE, so that the caller tries again: certificates that are being replaced will
  // fit together again.
  if (!channel.ok()) return absl::UnavailableError(channel.status().message());
  std::shared_ptr<Connection> connection(new Connection(options, target, *std::move(channel)));
  REFITD_RETURN_IF_ERROR(WaitConnected(connection->channel_.get(), target, deadline, stop));
  return connection;
}

absl::Status Connection::Adopt(const v1::Welcome& welcome) {
  REFITD_RETURN_IF_ERROR(AgreedProtocol(welcome.lease().protocol(), "lease.protocol").status());
  if (welcome.lease().token().size() != kTokenBytes) {
    return Error(absl::StatusCode::kInternal, "the daemon's lease token has {} bytes, not {}",
                 welcome.lease().token().size(), kTokenBytes);
  }
  welcome_ = welcome;
  descriptors_ =
      std::make_unique<DescriptorClient>(welcome.descriptor_socket(), welcome.lease().token());
  return absl::OkStatus();
}

absl::Status Connection::CheckShares() {
  if (tcp_) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "the daemon at {} is reached over TCP, where no memory is shared: attach by its "
                 "unix socket, or push inline bytes",
                 socket_);
  }
  return CheckAttached();
}

absl::Status Connection::CheckAttached() {
  MutexLock lock(&mutex_);
  if (!detached_) return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition, "detached from the daemon");
}

void Connection::Detach() {
  MutexLock lock(&mutex_);
  detached_ = true;
}

absl::StatusOr<RegionId> Connection::RegisterBlock(const RegionSource& source,
                                                   const RegionOwner& owner) {
  v1::RegisterRegionRequest request;
  *request.mutable_lease() = lease();
  request.mutable_cuda_ipc()->set_gpu_uuid(owner.device);
  request.mutable_cuda_ipc()->set_handle(source.handle);
  request.mutable_cuda_ipc()->set_bytes(source.bytes);
  const auto answer = WithStub(owner, channel_, [&](auto* stub) {
    using Stub = std::remove_pointer_t<decltype(stub)>;
    return CallAndWait<Stub, v1::RegisterRegionRequest, v1::RegisterRegionResponse>(
        stub, &Stub::RegisterRegion, request, After(call_margin_ + kDeviceLimit), "RegisterRegion");
  });
  if (!answer.ok()) return NameDaemon("RegisterRegion", socket_, answer.status());
  return RegionId(answer->region_id());
}

absl::Status Connection::RegisterRegion(RegionId id, const RegionSource& source,
                                        const RegionOwner& owner, const std::stop_token& stop) {
  REFITD_RETURN_IF_ERROR(CheckShares());
  if (DaemonRegion(id).ok()) return absl::OkStatus();
  RegionId daemon_id;
  if (!source.handle.empty()) {
    REFITD_ASSIGN_OR_RETURN(daemon_id, RegisterBlock(source, owner));
  } else {
    DescriptorRequest request;
    request.kind = DescriptorRequestKind::kRegisterRegion;
    request.region_kind = source.kind;
    request.bytes = source.bytes;
    request.region_id = source.address;
    request.keep = source.keep;
    Duration extra{};
    if (source.on_device()) extra += kDeviceLimit;
    if (source.kind != RegionKind::kDevice) {
      extra += std::chrono::seconds(source.bytes / kPopulateBytesPerSecond);
    }
    REFITD_ASSIGN_OR_RETURN(
        const DescriptorAnswer answer,
        descriptors_->Ask(request, source.fd.get(), After(call_margin_ + extra), stop));
    daemon_id = RegionId(answer.reply.region_id);
  }
  MutexLock lock(&mutex_);
  regions_[id.value()] = daemon_id;
  return absl::OkStatus();
}

// Device regions are not released over the descriptor socket, because it takes one request at a
// time, and the daemon may take long to close the memory.
void Connection::ReleaseDeviceRegion(RegionId daemon_id, const RegionOwner& owner) {
  v1::ReleaseRegionRequest request;
  *request.mutable_lease() = lease();
  request.set_region_id(daemon_id.value());
  (void)WithStub(owner, channel_, [&](auto* stub) {
    using Stub = std::remove_pointer_t<decltype(stub)>;
    return CallAndWait<Stub, v1::ReleaseRegionRequest, v1::ReleaseRegionResponse>(
        stub, &Stub::ReleaseRegion, request, After(call_margin_ + kDeviceLimit), "ReleaseRegion");
  });
}

void Connection::ReleaseRegion(RegionId id, const RegionSource& source, const RegionOwner& owner) {
  if (!CheckAttached().ok()) return;
  const auto daemon_id = DaemonRegion(id);
  if (!daemon_id.ok()) return;
  {
    MutexLock lock(&mutex_);
    regions_.erase(id.value());
  }
  // The daemon refuses while a layout names the region, and then keeps the region until the lease
  // ends, which is right. The owner may free device memory after this call, because the daemon
  // closes that memory before it answers.
  if (source.on_device()) return ReleaseDeviceRegion(*daemon_id, owner);
  DescriptorRequest request;
  request.kind = DescriptorRequestKind::kReleaseRegion;
  request.region_id = daemon_id->value();
  (void)descriptors_->Ask(request, -1, After(kCleanupLimit));
}

absl::StatusOr<RegionId> Connection::DaemonRegion(RegionId id) {
  MutexLock lock(&mutex_);
  const auto known = regions_.find(id.value());
  if (known != regions_.end()) return known->second;
  return Error(absl::StatusCode::kNotFound, "region {} is none of this member's", id);
}

void Connection::Exchange(const RegionBack& pair) {
  MutexLock lock(&mutex_);
  const auto front = regions_.find(pair.region.value());
  const auto back = regions_.find(pair.back.value());
  if (front != regions_.end() && back != regions_.end()) std::swap(front->second, back->second);
}

absl::Status Connection::ToProto(v1::Bucket* bucket) {
  if (!bucket->has_regions()) return absl::OkStatus();
  for (v1::RegionRef& ref : *bucket->mutable_regions()->mutable_refs()) {
    REFITD_ASSIGN_OR_RETURN(const RegionId daemon_id, DaemonRegion(RegionId(ref.region_id())));
    ref.set_region_id(daemon_id.value());
  }
  return absl::OkStatus();
}

absl::Status Connection::ToProto(Layout* layout) {
  for (Piece& piece : layout->pieces) {
    REFITD_ASSIGN_OR_RETURN(piece.region, DaemonRegion(piece.region));
  }
  for (RegionBack& pair : layout->backs) {
    REFITD_ASSIGN_OR_RETURN(pair.region, DaemonRegion(pair.region));
    REFITD_ASSIGN_OR_RETURN(pair.back, DaemonRegion(pair.back));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const SlotMemory>> Connection::Pool(Access access) {
  REFITD_RETURN_IF_ERROR(CheckShares());
  MutexLock lock(&pool_mutex_);
  if (pool_ != nullptr) return pool_;
  const bool on_device = OnDevice(device_);
  DescriptorRequest request;
  request.kind = DescriptorRequestKind::kMapPool;
  const Duration limit = on_device ? call_margin_ + kDeviceLimit : call_margin_;
  REFITD_ASSIGN_OR_RETURN(DescriptorAnswer answer, descriptors_->Ask(request, -1, After(limit)));
  if (!answer.fd.valid()) {
    return Error(absl::StatusCode::kInternal, "the daemon's pool came without a descriptor");
  }
  if (on_device) {
    REFITD_ASSIGN_OR_RETURN(
        pool_, MapDeviceSlots(std::move(answer.fd), answer.reply.bytes, device_, device_library_));
  } else {
    REFITD_ASSIGN_OR_RETURN(pool_, MapHostSlots(answer.fd, answer.reply.bytes, access));
  }
  return pool_;
}

absl::StatusOr<SharedSides> Connection::TakeKept(int index) {
  REFITD_RETURN_IF_ERROR(CheckShares());
  const int kept = welcome_.kept().region_bytes_size();
  if (index < 0 || index >= kept) {
    return Error(absl::StatusCode::kNotFound, "arena {}: the daemon keeps {} for this rank", index,
                 kept);
  }
  SharedSides sides;
  for (const bool back : {false, true}) {
    DescriptorRequest request;
    request.kind = DescriptorRequestKind::kTakeKept;
    request.region_id = 2 * static_cast<uint64_t>(index) + (back ? 1 : 0);
    REFITD_ASSIGN_OR_RETURN(DescriptorAnswer answer,
                            descriptors_->Ask(request, -1, After(call_margin_)));
    if (!answer.fd.valid()) {
      return Error(absl::StatusCode::kInternal, "arena {} came without a descriptor", index);
    }
    (back ? sides.back : sides.front) = std::move(answer.fd);
    sides.bytes = answer.reply.bytes;
    sides.in = answer.reply.region_kind == RegionKind::kPinned ? SidesIn::kHost : SidesIn::kDevice;
  }
  return sides;
}

std::shared_ptr<const SlotMemory> Connection::MappedPool() {
  MutexLock lock(&pool_mutex_);
  return pool_;
}

// ---- regions ----

class Regions::Mapped final : public Region {
 public:
  Mapped(std::shared_ptr<Regions> regions, std::shared_ptr<HostRegion> memory, RegionSource source,
         RegionId id)
      : regions_(std::move(regions)),
        memory_(std::move(memory)),
        source_(std::move(source)),
        id_(id) {}
  ~Mapped() override { regions_->Gone(id_, source_); }
  char* data() const override { return memory_ == nullptr ? nullptr : memory_->data(); }
  int64_t bytes() const override { return source_.bytes; }
  RegionId id() const override { return id_; }
  const RegionSource& source() const { return source_; }
  // Must be called before another thread can have the region.
  void CloseFd() { source_.fd.Reset(); }
  // Neither region may be on its way to a daemon.
  void Exchange(Mapped* other) { std::swap(source_, other->source_); }

 private:
  const std::shared_ptr<Regions> regions_;
  const std::shared_ptr<HostRegion> memory_;  // null: device memory
  RegionSource source_;  // has its descriptor only if regions are kept for later daemons
  const RegionId id_;
};

absl::StatusOr<std::shared_ptr<Region>> Regions::New(int64_t bytes) {
  REFITD_ASSIGN_OR_RETURN(UniqueFd memfd, CreateSealedMemfd("refit-region", bytes));
  return AddMemfd(std::move(memfd), bytes);
}

absl::StatusOr<std::shared_ptr<Region>> Regions::AddMemfd(UniqueFd memfd, int64_t bytes) {
  if (!memfd.valid()) {
    return InvalidField("memfd", "the memfd's descriptor is {}", memfd.get());
  }
  RegionSource source;
  source.bytes = bytes;
  source.fd = std::move(memfd);
  REFITD_ASSIGN_OR_RETURN(
      std::shared_ptr<HostRegion> memory,
      HostRegion::Map(source.fd, bytes, Access::kReadWrite, /*populate=*/false));
  return Share(std::move(source), std::move(memory));
}

absl::StatusOr<std::shared_ptr<Region>> Regions::AddBlock(const std::string& handle,
                                                          int64_t bytes) {
  if (handle.size() != kCudaIpcHandleBytes || bytes <= 0) {
    return InvalidField("handle",
                        "a block of {} bytes with a handle of {}: they must be positive, and {}",
                        bytes, handle.size(), kCudaIpcHandleBytes);
  }
  RegionSource source;
  source.handle = handle;
  source.bytes = bytes;
  return Share(std::move(source), nullptr);
}

absl::StatusOr<std::shared_ptr<Region>> Regions::AddExported(UniqueFd exported, int64_t bytes,
                                                             uint64_t address) {
  if (!exported.valid() || bytes <= 0) {
    return InvalidField("descriptor", "device memory of {} bytes with descriptor {}", bytes,
                        exported.get());
  }
  RegionSource source;
  source.kind = RegionKind::kDevice;
  source.fd = std::move(exported);
  source.bytes = bytes;
  source.address = address;
  return Share(std::move(source), nullptr);
}

absl::StatusOr<std::shared_ptr<Region>> Regions::Share(RegionSource source,
                                                       std::shared_ptr<HostRegion> memory) {
  // Counts for all members, so that no two regions have the same id.
  static std::atomic<uint64_t> next_id{1};
  const RegionId id(next_id.fetch_add(1));
  auto region =
      std::make_shared<Mapped>(shared_from_this(), std::move(memory), std::move(source), id);
  std::shared_ptr<Connection> connection;
  {
    // The region is noted here first, so that a move to another daemon meanwhile takes it along.
    MutexLock lock(&mutex_);
    if (keep_) regions_[id.value()] = region;
    connection = current_;
  }
  const absl::Status status = connection->RegisterRegion(id, region->source(), owner_, {});
  if (!keep_) region->CloseFd();
  const bool gone = absl::IsUnavailable(status) || absl::IsUnauthenticated(status) ||
                    absl::IsNotFound(status);  // the daemon's socket or its lease is gone
  if (!status.ok() && !(keep_ && gone)) return status;
  return std::shared_ptr<Region>(std::move(region));
}

void Regions::ExchangeSources(RegionId a, RegionId b) {
  std::shared_ptr<Mapped> first;  // destroyed after unlocking
  std::shared_ptr<Mapped> second;
  MutexLock lock(&mutex_);
  if (!keep_) return;
  first = regions_.at(a.value()).lock();
  second = regions_.at(b.value()).lock();
  if (first != nullptr && second != nullptr) first->Exchange(second.get());
}

absl::Status Regions::MoveTo(std::shared_ptr<Connection> connection, const std::stop_token& stop) {
  while (true) {
    // May hold the last reference of a region, so it is destroyed after unlocking.
    std::vector<std::shared_ptr<Mapped>> all;
    std::vector<Mapped*> unknown;
    {
      MutexLock lock(&mutex_);
      for (const auto& [id, region] : regions_) {
        all.push_back(region.lock());
        if (all.back() == nullptr || connection->DaemonRegion(RegionId(id)).ok()) continue;
        unknown.push_back(all.back().get());
      }
      if (unknown.empty()) {
        current_ = std::move(connection);
        return absl::OkStatus();
      }
    }
    for (const Mapped* region : unknown) {
      REFITD_RETURN_IF_ERROR(
          connection->RegisterRegion(region->id(), region->source(), owner_, stop));
    }
  }
}

std::vector<std::shared_ptr<Region>> Regions::Of(const Layout& layout) {
  std::map<uint64_t, std::shared_ptr<Region>> found;
  MutexLock lock(&mutex_);
  const auto find = [&](RegionId id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    auto& region = found[id.value()];
    const auto known = regions_.find(id.value());
    if (region == nullptr && known != regions_.end()) region = known->second.lock();
  };
  for (const Piece& piece : layout.pieces) find(piece.region);
  for (const RegionBack& pair : layout.backs) find(pair.back);
  std::vector<std::shared_ptr<Region>> regions;
  regions.reserve(found.size());
  for (auto& [id, region] : found) regions.push_back(std::move(region));
  return regions;
}

void Regions::Gone(RegionId id, const RegionSource& source) {
  std::shared_ptr<Connection> connection;
  {
    MutexLock lock(&mutex_);
    regions_.erase(id.value());
    connection = current_;
  }
  if (connection != nullptr) connection->ReleaseRegion(id, source, owner_);
}

}  // namespace refitd::client
