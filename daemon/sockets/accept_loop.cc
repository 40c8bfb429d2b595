#include "daemon/sockets/accept_loop.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <utility>

#include "daemon/process/log.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr int kMaxAcceptsPerWakeup = 64;  // after these, other events have their turn
// After this many connections of kept-out sources the loop pauses: a client that reconnects without
// end would otherwise keep a processor busy.
constexpr int kKeptOutPerWakeup = 16;

// The inode of an open socket; 0: `fd` is no open socket.
uint64_t SocketInode(int fd) {
  struct stat found {};
  if (fstat(fd, &found) != 0 || !S_ISSOCK(found.st_mode)) return 0;
  return found.st_ino;
}

absl::Status AddToEpoll(int epoll, int fd) {
  epoll_event event{.events = EPOLLIN, .data = {.fd = fd}};
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0) return ErrnoError(errno, "epoll_ctl");
  return absl::OkStatus();
}

}  // namespace

void PeerTable::Record(int fd, PeerCredentials peer) {
  const uint64_t inode = SocketInode(fd);
  MutexLock lock(&mutex_);
  entries_[fd] = Entry{.inode = inode, .peer = std::move(peer)};
}

std::optional<PeerCredentials> PeerTable::Lookup(std::string_view peer) const {
  constexpr std::string_view kPrefix = "fd:";
  if (!peer.starts_with(kPrefix)) return std::nullopt;
  peer.remove_prefix(kPrefix.size());
  int fd = -1;
  const auto [end, error] = std::from_chars(peer.data(), peer.data() + peer.size(), fd);
  if (error != std::errc() || end != peer.data() + peer.size() || fd < 0) return std::nullopt;

  MutexLock lock(&mutex_);
  const auto found = entries_.find(fd);
  if (found == entries_.end()) return std::nullopt;
  const uint64_t inode = SocketInode(fd);
  if (inode == 0 || inode != found->second.inode) return std::nullopt;
  return found->second.peer;
}

void PeerTable::Sweep() {
  MutexLock lock(&mutex_);
  std::erase_if(entries_, [](const auto& item) {
    const uint64_t inode = SocketInode(item.first);
    return inode == 0 || inode != item.second.inode;
  });
}

size_t PeerTable::size() const {
  MutexLock lock(&mutex_);
  return entries_.size();
}

absl::StatusOr<std::unique_ptr<AcceptLoop>> AcceptLoop::Create(const AcceptLoopOptions& options,
                                                               PeerTable* peers, Serve serve,
                                                               ConnectionGuard* guard) {
  REFITD_ASSIGN_OR_RETURN(
      auto listener,
      UnixListener::Create(
          {.path = options.path, .type = SOCK_STREAM, .mode = options.mode, .lock = true}));
  Listener listens{listener->path(), listener->fd(), nullptr, UniqueFd()};
  listens.unix_listener = std::move(listener);
  return Make(std::move(listens), peers, std::move(serve), guard);
}

absl::StatusOr<std::unique_ptr<AcceptLoop>> AcceptLoop::CreateTcp(TcpListener listener, Serve serve,
                                                                  ConnectionGuard* guard) {
  Listener listens{std::move(listener.address), listener.socket.get(), nullptr, UniqueFd()};
  listens.tcp = std::move(listener.socket);
  return Make(std::move(listens), nullptr, std::move(serve), guard);
}

absl::StatusOr<std::unique_ptr<AcceptLoop>> AcceptLoop::Make(Listener listener, PeerTable* peers,
                                                             Serve serve, ConnectionGuard* guard) {
  UniqueFd epoll(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) return ErrnoError(errno, "epoll_create1");
  UniqueFd stop(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop.valid()) return ErrnoError(errno, "eventfd");
  SpareDescriptor spare(listener.path);
  if (!spare.valid()) return ErrnoError(errno, "/dev/null");
  REFITD_RETURN_IF_ERROR(AddToEpoll(epoll.get(), listener.fd));
  REFITD_RETURN_IF_ERROR(AddToEpoll(epoll.get(), stop.get()));
  return std::unique_ptr<AcceptLoop>(new AcceptLoop(std::move(listener), std::move(epoll),
                                                    std::move(stop), std::move(spare), peers,
                                                    std::move(serve), guard));
}

AcceptLoop::AcceptLoop(Listener listener, UniqueFd epoll, UniqueFd stop, SpareDescriptor spare,
                       PeerTable* peers, Serve serve, ConnectionGuard* guard)
    : path_(listener.path),
      listen_fd_(listener.fd),
      epoll_(std::move(epoll)),
      stop_(std::move(stop)),
      peers_(peers),
      serve_(std::move(serve)),
      guard_(guard),
      spare_(std::move(spare)),
      listener_(std::move(listener)) {}

AcceptLoop::~AcceptLoop() { Stop(); }

void AcceptLoop::Start() {
  MutexLock lock(&mutex_);
  REFITD_CHECK(listener_.has_value() && !thread_.joinable());
  thread_ = std::thread([this] { Run(); });
}

void AcceptLoop::Stop() {
  MutexLock lock(&mutex_);
  if (thread_.joinable()) {
    eventfd_write(stop_.get(), 1);
    thread_.join();
  }
  listener_.reset();
}

void AcceptLoop::Run() {
  std::array<epoll_event, 2> events;
  auto next_sweep = std::chrono::steady_clock::now() + kPeerSweepInterval;
  for (;;) {
    const int n = epoll_wait(epoll_.get(), events.data(), events.size(), TimeoutMs());
    for (int i = 0; i < n; ++i) {
      if (events[i].data.fd == stop_.get()) return;
      AcceptAll();
    }
    const auto now = std::chrono::steady_clock::now();
    if (paused_until_ && now >= *paused_until_) ResumeAccepting();
    if (now >= next_sweep) {
      Sweep();
      next_sweep = now + kPeerSweepInterval;
    }
  }
}

int AcceptLoop::TimeoutMs() const {
  if (paused_until_) return static_cast<int>(kAcceptBackoff.count());
  const bool sweeps =
      (peers_ != nullptr && peers_->size() > 0) || (guard_ != nullptr && guard_->open() > 0);
  return sweeps ? static_cast<int>(kPeerSweepInterval.count()) : -1;
}

void AcceptLoop::AcceptAll() {
  int kept_out = 0;
  for (int i = 0; i < kMaxAcceptsPerWakeup; ++i) {
    if (kept_out >= kKeptOutPerWakeup) return PauseAccepting();
    UniqueFd connection(accept4(listen_fd_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (connection.valid()) {
      if (!Admit(std::move(connection))) ++kept_out;
      continue;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno == EAGAIN) return;
    if (errno == EMFILE || errno == ENFILE) {
      // A client sees that its connection is closed, and the loop is not woken for it again.
      const SpareDescriptor::Outcome shed = spare_.Shed(listen_fd_, [](const UniqueFd&) {});
      if (shed == SpareDescriptor::Outcome::kRefused) continue;
      if (shed == SpareDescriptor::Outcome::kNoneWaits) return;
    }
    PauseAccepting();
    return;
  }
}

bool AcceptLoop::Admit(UniqueFd connection) {
  if (peers_ == nullptr) {
    const std::string peer = ConnectionGuard::PeerOfSocket(connection.get());
    return Hand(std::move(connection), peer.substr(0, peer.rfind(':')));
  }
  auto peer = PeerOf(connection.get(), /*with_pidfd=*/true);
  if (!peer.ok()) {
    LogWarning("connection on {} refused: {}", path_, Message(peer.status()));
    return true;
  }
  const std::string source = fmt::format("uid:{}", peer->uid);
  peers_->Record(connection.get(), std::move(peer).value());
  return Hand(std::move(connection), source);
}

bool AcceptLoop::Hand(UniqueFd connection, const std::string& source) {
  if (guard_ != nullptr && !guard_->Watch(connection.get(), source)) return false;
  serve_(std::move(connection));
  return true;
}

void AcceptLoop::Sweep() {
  if (peers_ != nullptr) peers_->Sweep();
  if (guard_ != nullptr) guard_->Sweep(std::chrono::steady_clock::now());
}

void AcceptLoop::PauseAccepting() {
  epoll_event event{.events = 0, .data = {.fd = listen_fd_}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listen_fd_, &event);
  paused_until_ = std::chrono::steady_clock::now() + kAcceptBackoff;
}

void AcceptLoop::ResumeAccepting() {
  spare_.Restore();
  epoll_event event{.events = EPOLLIN, .data = {.fd = listen_fd_}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listen_fd_, &event);
  paused_until_.reset();
}

}  // namespace refitd
