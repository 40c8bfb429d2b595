#include "client/connection.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "client/call.h"
#include "refitd/v1/trainer.grpc.pb.h"
#include "transport/base/status.h"
#include "transport/base/unique_fd.h"

namespace refitd::client {

// The target is a URI: whatever is not plain in a path is escaped.
std::string UnixTarget(std::string_view path) {
  std::string target = "unix:";
  for (const char c : path) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       std::string_view("/._-~").find(c) != std::string_view::npos;
    target += plain ? std::string(1, c) : fmt::format("%{:02X}", static_cast<unsigned char>(c));
  }
  return target;
}
namespace {

constexpr size_t kMaxIdentifierBytes = 128;
constexpr size_t kTokenBytes = sizeof(DescriptorRequest::token);
// A region's pages are filled when the daemon maps it; this much a second is slow even for a busy
// virtual machine that gets its memory back from its host page by page (0.1 GB/s was seen).
constexpr int64_t kPopulateBytesPerSecond = int64_t{16} << 20;
constexpr int kReconnectMs = 50;
constexpr int kMaxReconnectMs = 500;

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& path) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // A connection of its own for every member: none waits behind another one's bytes.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // The kernel tells when a unix peer is gone.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, INT_MAX);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectMs);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kReconnectMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kMaxReconnectMs);
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(-1);  // the daemon's limit decides
  return grpc::CreateCustomChannel(UnixTarget(path), grpc::InsecureChannelCredentials(), arguments);
}

absl::Status CheckSocketPath(const std::string& path) {
  constexpr size_t kLimit = sizeof(sockaddr_un::sun_path) - 1;
  if (!path.empty() && path.size() <= kLimit && path.find('\0') == std::string::npos) {
    return absl::OkStatus();
  }
  return Error(absl::StatusCode::kInvalidArgument,
               "socket: a path of {} bytes; a unix socket's has 1 to {}", path.size(), kLimit);
}

// Why nobody answers at `path`: gRPC does not say it in errno's words.
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

absl::Status NoDaemon(const std::string& path, int error) {
  if (error == EACCES || error == EPERM) {
    return ErrnoError(error, fmt::format("connecting to the daemon at {}", path));
  }
  return Error(absl::StatusCode::kUnavailable, "no daemon answers at {}{}", path,
               error == 0 ? "" : fmt::format(": {}", std::strerror(error)));
}

absl::Status WaitConnected(grpc::Channel* channel, const std::string& path, TimePoint deadline) {
  while (true) {
    const grpc_connectivity_state state = channel->GetState(/*try_to_connect=*/true);
    if (state == GRPC_CHANNEL_READY) return absl::OkStatus();
    if (state == GRPC_CHANNEL_TRANSIENT_FAILURE) {
      // Waiting does not mend missing rights.
      const int error = ProbeErrno(path);
      if (error == EACCES || error == EPERM) return NoDaemon(path, error);
    }
    const auto limit = std::chrono::system_clock::now() +
                       std::chrono::duration_cast<std::chrono::microseconds>(Until(deadline));
    if (!channel->WaitForStateChange(state, limit)) return NoDaemon(path, ProbeErrno(path));
  }
}

// gRPC joins its callback threads where the last channel that used them goes, even if it goes on
// one of them: whoever drops the last reference in a callback then brings the process down. A
// channel that never goes, and that had a call, keeps them. It is a lame one: it never connects.
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

bool Printable(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= 0x20 && c < 0x7F; });
}

}  // namespace

absl::Status CheckIdentifier(std::string_view value, std::string_view field) {
  if (!value.empty() && value.size() <= kMaxIdentifierBytes && Printable(value)) {
    return absl::OkStatus();
  }
  return Error(absl::StatusCode::kInvalidArgument,
               "{} must be 1 to {} printable characters, not {} bytes \"{}\"", field,
               kMaxIdentifierBytes, value.size(), CleanText(value, kMaxIdentifierBytes));
}

absl::Status CheckRank(int rank, int world_size) {
  if (world_size >= 1 && rank >= 0 && rank < world_size) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, "rank {} of world_size {}", rank, world_size);
}

absl::Status CheckConnectOptions(const ConnectOptions& options) {
  REFITD_RETURN_IF_ERROR(CheckSocketPath(SocketPath(options)));
  REFITD_RETURN_IF_ERROR(CheckIdentifier(options.group, "group"));
  if (options.wait.count() < 0) {
    return Error(absl::StatusCode::kInvalidArgument, "wait of {} ms", options.wait.count());
  }
  if (options.call_margin.count() <= 0) {
    return Error(absl::StatusCode::kInvalidArgument, "call_margin of {} ms must be greater than 0",
                 options.call_margin.count());
  }
  if (!options.spec) return absl::OkStatus();
  for (const std::string& name : options.spec->engine_only_tensors) {
    if (CleanText(name, name.size()) != name) {
      return Error(absl::StatusCode::kInvalidArgument,
                   "spec.engine_only_tensors: \"{}\" is not UTF-8", CleanText(name, name.size()));
    }
  }
  return absl::OkStatus();
}

std::string SocketPath(const ConnectOptions& options) {
  if (!options.socket.empty()) return options.socket;
  const char* from_environment = std::getenv("REFITD_SOCKET");
  if (from_environment != nullptr && *from_environment != '\0') return from_environment;
  return kDefaultSocket;
}

v1::GroupSpec SpecToWire(const GroupSpec& spec) {
  v1::GroupSpec wire;
  wire.set_trainer_ranks(spec.trainer_ranks);
  wire.set_min_instances(spec.min_instances);
  wire.set_slot_bytes(spec.slot_bytes);
  wire.set_slots(spec.slots);
  for (const std::string& name : spec.engine_only_tensors) wire.add_engine_only_tensors(name);
  return wire;
}

class Connection::MappedRegion final : public Region {
 public:
  MappedRegion(std::shared_ptr<Connection> connection, std::shared_ptr<HostRegion> memory,
               RegionId id)
      : connection_(std::move(connection)), memory_(std::move(memory)), id_(id) {}
  ~MappedRegion() override { connection_->ReleaseRegion(id_); }
  char* data() const override { return memory_->data(); }
  int64_t bytes() const override { return memory_->bytes(); }
  RegionId id() const override { return id_; }

 private:
  const std::shared_ptr<Connection> connection_;
  const std::shared_ptr<HostRegion> memory_;
  const RegionId id_;
};

absl::StatusOr<std::shared_ptr<Connection>> Connection::Open(const ConnectOptions& options,
                                                             TimePoint deadline) {
  KeepCallbackThreads();
  const std::string path = SocketPath(options);
  std::shared_ptr<Connection> connection(new Connection(MakeChannel(path), options.call_margin));
  REFITD_RETURN_IF_ERROR(WaitConnected(connection->channel_.get(), path, deadline));
  return connection;
}

absl::Status Connection::Adopt(const v1::Welcome& welcome) {
  if (welcome.lease().protocol() != v1::PROTOCOL_VERSION_1) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "the daemon speaks protocol version {}, this client {}",
                 static_cast<int>(welcome.lease().protocol()),
                 static_cast<int>(v1::PROTOCOL_VERSION_1));
  }
  if (welcome.lease().token().size() != kTokenBytes) {
    return Error(absl::StatusCode::kInternal, "the daemon's lease token has {} bytes, not {}",
                 welcome.lease().token().size(), kTokenBytes);
  }
  welcome_ = welcome;
  descriptors_ =
      std::make_unique<DescriptorClient>(welcome.descriptor_socket(), welcome.lease().token());
  return absl::OkStatus();
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

absl::StatusOr<std::shared_ptr<Region>> Connection::NewRegion(int64_t bytes) {
  REFITD_RETURN_IF_ERROR(CheckAttached());
  REFITD_ASSIGN_OR_RETURN(UniqueFd fd, CreateSealedMemfd("refit-region", bytes));
  REFITD_ASSIGN_OR_RETURN(std::shared_ptr<HostRegion> memory,
                          HostRegion::Map(fd, bytes, Access::kReadWrite, /*populate=*/false));
  DescriptorRequest request;
  request.kind = DescriptorRequestKind::kRegisterRegion;
  request.bytes = bytes;
  const std::chrono::seconds populate(bytes / kPopulateBytesPerSecond);
  REFITD_ASSIGN_OR_RETURN(
      DescriptorAnswer answer,
      descriptors_->Ask(request, fd.get(), After(call_margin_ + Duration(populate))));
  return std::make_shared<MappedRegion>(shared_from_this(), std::move(memory),
                                        RegionId(answer.reply.region_id));
}

void Connection::ReleaseRegion(RegionId id) {
  if (!CheckAttached().ok()) return;
  DescriptorRequest request;
  request.kind = DescriptorRequestKind::kReleaseRegion;
  request.region_id = id.value();
  // Refused while a layout names it: then the daemon keeps it until the lease ends, which is right.
  (void)descriptors_->Ask(request, -1, After(kCleanupLimit));
}

absl::StatusOr<std::shared_ptr<HostRegion>> Connection::Pool(Access access) {
  REFITD_RETURN_IF_ERROR(CheckAttached());
  MutexLock lock(&pool_mutex_);
  if (pool_ != nullptr) return pool_;
  DescriptorRequest request;
  request.kind = DescriptorRequestKind::kMapPool;
  REFITD_ASSIGN_OR_RETURN(DescriptorAnswer answer,
                          descriptors_->Ask(request, -1, After(call_margin_)));
  if (!answer.fd.valid()) {
    return Error(absl::StatusCode::kInternal, "the daemon's pool came without a descriptor");
  }
  REFITD_ASSIGN_OR_RETURN(
      pool_, HostRegion::Map(answer.fd, answer.reply.bytes, access, /*populate=*/false));
  return pool_;
}

}  // namespace refitd::client
