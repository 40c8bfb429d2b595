#include "daemon/sockets/descriptor_socket.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "daemon/process/log.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

// The ids of epoll events; connections have ids from kFirstConnection on.
constexpr uint64_t kListener = 0;
constexpr uint64_t kStop = 1;
constexpr uint64_t kTimer = 2;
constexpr uint64_t kFirstConnection = 3;

constexpr int kMaxAcceptsPerWakeup = 64;
// A request has at most one descriptor; room for more tells "several" from "cut off".
constexpr size_t kMaxDescriptorsTaken = 8;
constexpr std::chrono::milliseconds kMaxTick{1'000};

std::chrono::milliseconds TickOf(std::chrono::milliseconds idle_limit) {
  return std::clamp(idle_limit / 2, std::chrono::milliseconds(1), kMaxTick);
}

absl::Status SetInterest(int epoll, int operation, int fd, uint64_t id, uint32_t events) {
  epoll_event event{.events = events, .data = {.u64 = id}};
  if (epoll_ctl(epoll, operation, fd, &event) != 0) return ErrnoError(errno, "epoll_ctl");
  return absl::OkStatus();
}

DescriptorReply ReplyOf(const absl::Status& status) {
  DescriptorReply reply;
  reply.code = static_cast<uint32_t>(status.code());
  const std::string message = Message(status);
  const std::string_view kept = Shorten(message, sizeof(reply.message) - 1);
  std::memcpy(reply.message, kept.data(), kept.size());
  return reply;
}

// Never blocks: a client that leaves replies unread loses its connection.
bool Send(int socket, const DescriptorReply& reply, const UniqueFd& attach) {
  iovec data{.iov_base = const_cast<DescriptorReply*>(&reply), .iov_len = sizeof(reply)};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (attach.valid()) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    const int fd = attach.get();
    std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(sizeof(reply));
}

// Answers with the status; the caller then closes the connection. A request that has come already
// is dropped with its descriptors, since closing the socket with unread data would be a reset,
// which hides the reply.
void Refuse(const UniqueFd& socket, const absl::Status& status) {
  Send(socket.get(), ReplyOf(status), UniqueFd());
  char dropped;
  while (recv(socket.get(), &dropped, sizeof(dropped), MSG_DONTWAIT | MSG_TRUNC) > 0) {
  }
}

// Takes ownership of every descriptor in the message before anything else is looked at.
std::vector<UniqueFd> TakeDescriptors(msghdr* message) {
  std::vector<UniqueFd> taken;
  for (cmsghdr* header = CMSG_FIRSTHDR(message); header != nullptr;
       header = CMSG_NXTHDR(message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(fd));
      taken.emplace_back(fd);
    }
  }
  return taken;
}

}  // namespace

struct DescriptorSocket::Request {
  ssize_t bytes = 0;  // received; -1: errno in `error`
  int error = 0;
  bool truncated = false;        // longer than a request
  bool descriptors_cut = false;  // more came than are taken, or than may be open
  DescriptorRequest wire;
  std::vector<UniqueFd> descriptors;

  static Request Receive(int socket) {
    Request request;
    iovec data{.iov_base = &request.wire, .iov_len = sizeof(request.wire)};
    alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptorsTaken * sizeof(int))];
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    request.bytes = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (request.bytes < 0) {
      request.error = errno;
      return request;
    }
    request.descriptors = TakeDescriptors(&message);
    request.truncated = (message.msg_flags & MSG_TRUNC) != 0;
    request.descriptors_cut = (message.msg_flags & MSG_CTRUNC) != 0;
    return request;
  }

  // Errors here mean that the peer speaks another protocol; they end the connection.
  absl::Status CheckFraming() const {
    constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
    if (truncated || bytes != static_cast<ssize_t>(sizeof(wire))) {
      return Error(kInvalid, "request of {} bytes{}, must be {}", bytes,
                   truncated ? " or more" : "", sizeof(wire));
    }
    if (wire.magic != kDescriptorMagic) {
      return Error(kInvalid, "magic {:#x}, must be {:#x}", wire.magic, kDescriptorMagic);
    }
    if (wire.version != kDescriptorWireVersion) {
      return Error(kInvalid, "version {}, this daemon speaks {}", wire.version,
                   kDescriptorWireVersion);
    }
    return absl::OkStatus();
  }

  absl::Status CheckDescriptors(size_t wanted) const {
    if (descriptors_cut && descriptors.size() < kMaxDescriptorsTaken) {
      return Error(absl::StatusCode::kResourceExhausted,
                   "descriptor lost: the daemon has too many open files");
    }
    if (descriptors.size() != wanted) {
      return Error(absl::StatusCode::kInvalidArgument,
                   "{}{} descriptors beside the request, must be {}",
                   descriptors_cut ? "more than " : "", descriptors.size(), wanted);
    }
    return absl::OkStatus();
  }

  absl::Status CheckFields() const {
    constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
    if (!std::all_of(std::begin(wire.reserved), std::end(wire.reserved),
                     [](uint8_t byte) { return byte == 0; })) {
      return Error(kInvalid, "reserved bytes are not zero");
    }
    const bool registers = wire.kind == DescriptorRequestKind::kRegisterRegion;
    if (wire.keep > (registers ? KeepDescriptor::kForNextRank : KeepDescriptor::kNo)) {
      return Error(kInvalid, "keep {}, must be 0, or up to 2 to register a region",
                   static_cast<uint32_t>(wire.keep));
    }
    switch (wire.kind) {
      case DescriptorRequestKind::kRegisterRegion:
        REFITD_RETURN_IF_ERROR(CheckDescriptors(1));
        if (wire.bytes <= 0) return Error(kInvalid, "bytes {}, must be positive", wire.bytes);
        if (wire.region_kind < RegionKind::kMemfd || wire.region_kind > RegionKind::kPinned) {
          return Error(kInvalid, "unknown region kind {}", static_cast<uint32_t>(wire.region_kind));
        }
        return absl::OkStatus();
      case DescriptorRequestKind::kReleaseRegion:
      case DescriptorRequestKind::kMapPool:
      case DescriptorRequestKind::kTakeKept:
        return CheckDescriptors(0);
    }
    return Error(kInvalid, "unknown request kind {}", static_cast<uint32_t>(wire.kind));
  }
};

absl::StatusOr<std::unique_ptr<DescriptorSocket>> DescriptorSocket::Create(
    const DescriptorSocketOptions& options, DescriptorHandler* handler) {
  // The control plane's lock guards this path too.
  REFITD_ASSIGN_OR_RETURN(
      auto listener,
      UnixListener::Create(
          {.path = options.path, .type = SOCK_SEQPACKET, .mode = options.mode, .lock = false}));
  UniqueFd epoll(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) return ErrnoError(errno, "epoll_create1");
  UniqueFd stop(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop.valid()) return ErrnoError(errno, "eventfd");
  UniqueFd timer(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  if (!timer.valid()) return ErrnoError(errno, "timerfd_create");

  constexpr uint32_t kOnce = EPOLLIN | EPOLLONESHOT;
  const int set = epoll.get();
  REFITD_RETURN_IF_ERROR(SetInterest(set, EPOLL_CTL_ADD, stop.get(), kStop, EPOLLIN));
  REFITD_RETURN_IF_ERROR(SetInterest(set, EPOLL_CTL_ADD, timer.get(), kTimer, kOnce));
  REFITD_RETURN_IF_ERROR(SetInterest(set, EPOLL_CTL_ADD, listener->fd(), kListener, kOnce));
  return std::unique_ptr<DescriptorSocket>(new DescriptorSocket(
      options, std::move(listener), std::move(epoll), std::move(stop), std::move(timer), handler));
}

DescriptorSocket::DescriptorSocket(const DescriptorSocketOptions& options,
                                   std::unique_ptr<UnixListener> listener, UniqueFd epoll,
                                   UniqueFd stop, UniqueFd timer, DescriptorHandler* handler)
    : path_(options.path),
      admit_(options.admit),
      max_connections_(options.max_connections),
      idle_limit_(options.idle_limit),
      listen_fd_(listener->fd()),
      epoll_(std::move(epoll)),
      stop_(std::move(stop)),
      timer_(std::move(timer)),
      handler_(handler),
      spare_(options.path),
      next_id_(kFirstConnection),
      listener_(std::move(listener)) {
  for (int i = 0; i < kDescriptorThreads; ++i) threads_.emplace_back([this] { Run(); });
}

DescriptorSocket::~DescriptorSocket() { Stop(); }

void DescriptorSocket::Stop() {
  MutexLock stopping(&stop_mutex_);
  eventfd_write(stop_.get(), 1);
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  listener_.reset();
  MutexLock lock(&mutex_);
  connections_.clear();
}

int DescriptorSocket::connections() const {
  MutexLock lock(&mutex_);
  return static_cast<int>(connections_.size());
}

// Handles one event at a time. All events but stop_'s are one-shot, so no two threads have the same
// one.
void DescriptorSocket::Run() {
  for (;;) {
    epoll_event event{};
    if (epoll_wait(epoll_.get(), &event, 1, -1) != 1) continue;
    switch (const uint64_t id = event.data.u64; id) {
      case kStop:
        return;
      case kTimer:
        Tick();
        break;
      case kListener:
        AcceptAll();
        break;
      default:
        if (const auto connection = Claim(id); connection != nullptr) {
          Release(id, Serve(*connection));
        }
    }
  }
}

void DescriptorSocket::AcceptAll() {
  spare_.Restore();
  for (int i = 0; i < kMaxAcceptsPerWakeup; ++i) {
    UniqueFd socket(accept4(listen_fd_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket.valid()) {
      Admit(std::move(socket));
      continue;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno == EAGAIN) break;
    if (errno == EMFILE || errno == ENFILE) {
      const SpareDescriptor::Outcome shed = spare_.Shed(listen_fd_, [](const UniqueFd& waiting) {
        Refuse(waiting, absl::ResourceExhaustedError("the daemon is out of file descriptors"));
      });
      if (shed == SpareDescriptor::Outcome::kRefused) continue;
      if (shed == SpareDescriptor::Outcome::kNoneWaits) break;
    }
    // Memory or even the spare descriptor has run out: the next tick listens again, so that this
    // thread does not spin.
    LogWarning("accepting on {}: {}", path_, Message(ErrnoError(errno, "accept")));
    ArmTimer();
    return;
  }
  ListenAgain();
}

void DescriptorSocket::Admit(UniqueFd socket) {
  auto peer = PeerOf(socket.get(), /*with_pidfd=*/false);
  if (!peer.ok()) return;
  const absl::Status allowed =
      admit_ == nullptr ? absl::PermissionDeniedError("nobody may use this socket") : admit_(*peer);
  if (!allowed.ok()) return Refuse(socket, allowed);
  auto connection = std::make_shared<Connection>();
  connection->peer = std::move(peer).value();
  connection->last_used = std::chrono::steady_clock::now();

  MutexLock lock(&mutex_);
  if (static_cast<int>(connections_.size()) >= max_connections_) {
    return Refuse(socket, Error(absl::StatusCode::kResourceExhausted,
                                "{} connections to {} are open, which is the limit",
                                max_connections_, path_));
  }
  if (const int held = ConnectionsOf(connection->peer.uid); held >= max_connections_ / 2) {
    return Refuse(socket, Error(absl::StatusCode::kResourceExhausted,
                                "user {} has {} connections to {}, the most that one may have",
                                connection->peer.uid, held, path_));
  }
  const uint64_t id = next_id_++;
  const int fd = socket.get();
  connection->socket = std::move(socket);
  const absl::Status watched =
      SetInterest(epoll_.get(), EPOLL_CTL_ADD, fd, id, EPOLLIN | EPOLLRDHUP | EPOLLONESHOT);
  if (!watched.ok()) {
    LogWarning("connection to {} refused: {}", path_, Message(watched));
    return;
  }
  if (connections_.empty()) ArmTimer();
  connections_.emplace(id, std::move(connection));
}

int DescriptorSocket::ConnectionsOf(uid_t uid) const {
  return static_cast<int>(
      std::count_if(connections_.begin(), connections_.end(),
                    [uid](const auto& entry) { return entry.second->peer.uid == uid; }));
}

std::shared_ptr<DescriptorSocket::Connection> DescriptorSocket::Claim(uint64_t id) {
  MutexLock lock(&mutex_);
  const auto found = connections_.find(id);
  if (found == connections_.end()) return nullptr;
  found->second->busy = true;
  return found->second;
}

void DescriptorSocket::Release(uint64_t id, bool keep) {
  MutexLock lock(&mutex_);
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  Connection& connection = *found->second;
  connection.busy = false;
  connection.last_used = std::chrono::steady_clock::now();
  if (keep && SetInterest(epoll_.get(), EPOLL_CTL_MOD, connection.socket.get(), id,
                          EPOLLIN | EPOLLRDHUP | EPOLLONESHOT)
                  .ok()) {
    return;
  }
  connections_.erase(found);
}

bool DescriptorSocket::Serve(const Connection& connection) {
  const int socket = connection.socket.get();
  Request request = Request::Receive(socket);
  if (request.bytes < 0) return request.error == EAGAIN || request.error == EINTR;
  if (request.bytes == 0) return false;  // the end, or an empty message, which no client sends
  if (const absl::Status framing = request.CheckFraming(); !framing.ok()) {
    Send(socket, ReplyOf(framing), UniqueFd());
    return false;
  }
  UniqueFd attach;
  const DescriptorReply reply = Answer(connection, std::move(request), &attach);
  return Send(socket, reply, attach);
}

DescriptorReply DescriptorSocket::Answer(const Connection& connection, Request request,
                                         UniqueFd* attach) {
  if (const absl::Status fields = request.CheckFields(); !fields.ok()) return ReplyOf(fields);
  const DescriptorRequest& wire = request.wire;
  Token token;
  std::copy(std::begin(wire.token), std::end(wire.token), token.begin());
  DescriptorReply reply;
  switch (wire.kind) {
    case DescriptorRequestKind::kRegisterRegion: {
      const auto region =
          handler_->RegisterRegion(token, connection.peer, std::move(request.descriptors[0]),
                                   wire.region_kind, wire.bytes, wire.region_id, wire.keep);
      if (!region.ok()) return ReplyOf(region.status());
      reply.region_id = region->value();
      break;
    }
    case DescriptorRequestKind::kReleaseRegion:
      return ReplyOf(handler_->ReleaseRegion(token, connection.peer, RegionId(wire.region_id)));
    case DescriptorRequestKind::kMapPool: {
      auto pool = handler_->MapPool(token, connection.peer);
      if (!pool.ok()) return ReplyOf(pool.status());
      reply.bytes = pool->bytes;
      reply.slot_bytes = pool->slot_bytes;
      *attach = std::move(pool->fd);
      break;
    }
    case DescriptorRequestKind::kTakeKept: {
      auto side = handler_->TakeKept(token, connection.peer, wire.region_id);
      if (!side.ok()) return ReplyOf(side.status());
      reply.region_kind = side->kind;
      reply.bytes = side->bytes;
      *attach = std::move(side->fd);
      break;
    }
  }
  return reply;
}

void DescriptorSocket::Tick() {
  uint64_t ignored;
  [[maybe_unused]] const ssize_t n = read(timer_.get(), &ignored, sizeof(ignored));
  const auto now = std::chrono::steady_clock::now();
  {
    MutexLock lock(&mutex_);
    std::erase_if(connections_, [&](const auto& item) {
      return !item.second->busy && now - item.second->last_used >= idle_limit_;
    });
    if (!connections_.empty()) ArmTimer();
  }
  const absl::Status again =
      SetInterest(epoll_.get(), EPOLL_CTL_MOD, timer_.get(), kTimer, EPOLLIN | EPOLLONESHOT);
  if (!again.ok()) LogError("{}: {}", path_, Message(again));
  ListenAgain();
}

void DescriptorSocket::ArmTimer() {
  const auto tick = std::chrono::nanoseconds(TickOf(idle_limit_)).count();
  itimerspec spec{};
  spec.it_value.tv_sec = tick / 1'000'000'000;
  spec.it_value.tv_nsec = tick % 1'000'000'000;
  timerfd_settime(timer_.get(), 0, &spec, nullptr);
}

void DescriptorSocket::ListenAgain() {
  const absl::Status again =
      SetInterest(epoll_.get(), EPOLL_CTL_MOD, listen_fd_, kListener, EPOLLIN | EPOLLONESHOT);
  if (!again.ok()) LogError("{}: {}", path_, Message(again));
}

}  // namespace refitd
