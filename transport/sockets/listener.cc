#include "transport/sockets/listener.h"

#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "transport/base/status.h"
#include "transport/wire_communicators.h"

namespace refitd {
namespace {

using absl::StatusCode;
using std::chrono::steady_clock;

constexpr int kBacklog = 512;
// When the process had no descriptor left for a connection, the listener takes none for this long.
constexpr Duration kPause = std::chrono::milliseconds(100);
// At most this many connections are taken before the strangers that are there already are heard
// again.
constexpr int kTakenAtOnce = 32;

absl::StatusOr<UniqueFd> Listen(const HostAddress& host, uint16_t port) {
  UniqueFd fd(socket(host.family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  socklen_t length = 0;
  const sockaddr_storage storage = host.Sockaddr(port, &length);
  if (fd.valid() && setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
      bind(fd.get(), reinterpret_cast<const sockaddr*>(&storage), length) == 0 &&
      listen(fd.get(), kBacklog) == 0) {
    return fd;
  }
  return ErrnoError(errno, fmt::format("listen on {} port {}", host.Text(), port));
}

uint16_t PortOf(int fd) {
  sockaddr_storage storage{};
  socklen_t length = sizeof(storage);
  REFITD_CHECK(getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &length) == 0);
  return ntohs(storage.ss_family == AF_INET
                   ? reinterpret_cast<const sockaddr_in&>(storage).sin_port
                   : reinterpret_cast<const sockaddr_in6&>(storage).sin6_port);
}

bool Watch(int epoll, int fd) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<WireListener>> WireListener::Start(Options options,
                                                                  TlsContexts* tls) {
  REFITD_ASSIGN_OR_RETURN(UniqueFd socket, Listen(options.host, options.port));
  UniqueFd epoll(epoll_create1(EPOLL_CLOEXEC));
  UniqueFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll.valid() || !wake.valid() || !Watch(epoll.get(), socket.get()) ||
      !Watch(epoll.get(), wake.get())) {
    return ErrnoError(errno, "the data plane's listener");
  }
  const uint16_t port = PortOf(socket.get());
  return std::unique_ptr<WireListener>(new WireListener(std::move(options), tls, std::move(socket),
                                                        std::move(epoll), std::move(wake), port));
}

WireListener::WireListener(Options options, TlsContexts* tls, UniqueFd socket, UniqueFd epoll,
                           UniqueFd wake, uint16_t port)
    : options_(std::move(options)),
      tls_(tls),
      socket_(std::move(socket)),
      epoll_(std::move(epoll)),
      wake_(std::move(wake)),
      port_(port),
      thread_([this] {
        EnterWireThread("refitd-wire-io");
        Run();
      }) {}

WireListener::~WireListener() {
  const uint64_t one = 1;
  REFITD_CHECK(write(wake_.get(), &one, sizeof(one)) == sizeof(one));
  thread_.join();
}

uint64_t WireListener::Add(Expected expected) {
  MutexLock lock(&mutex_);
  const uint64_t number = next_number_++;
  expected_.emplace(number, std::move(expected));
  return number;
}

void WireListener::Remove(uint64_t expected) {
  MutexLock lock(&mutex_);
  expected_.erase(expected);
}

// ---- the listener's thread ----

int WireListener::WaitMillis() const {
  if (paused_) return static_cast<int>(ToMillis(kPause));
  if (unproved_.empty()) return -1;
  const Duration left = unproved_.front().until - steady_clock::now();
  return static_cast<int>(std::max<int64_t>(0, ToMillis(left) + 1));
}

void WireListener::Run() {
  std::array<epoll_event, 32> events;
  for (;;) {
    const int count = epoll_wait(epoll_.get(), events.data(), events.size(), WaitMillis());
    if (paused_ && Watch(epoll_.get(), socket_.get())) paused_ = false;
    for (int i = 0; i < count; ++i) {
      const int fd = events[i].data.fd;
      if (fd == wake_.get()) return;
      if (fd == socket_.get()) continue;
      const auto it = by_fd_.find(fd);
      if (it != by_fd_.end()) Read(it->second);
    }
    const TimePoint now = steady_clock::now();
    while (!unproved_.empty() && unproved_.front().until <= now) {
      Drop(unproved_.begin(), "said too little in time");
    }
    // Connections are taken last, since taking one may make one of the events void.
    if (!paused_) TakeConnections();
  }
}

void WireListener::TakeConnections() {
  for (int i = 0; i < kTakenAtOnce && TakeConnection(); ++i) {
  }
}

// Takes one connection. False: there is none to take.
bool WireListener::TakeConnection() {
  UniqueFd fd(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd.valid()) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket_.get(), nullptr);
      paused_ = true;
    }
    return errno == ECONNABORTED || errno == EINTR;
  }
  if (unproved_.size() >= kMaxUnproved) {
    Drop(unproved_.begin(), "was the oldest of too many that had not proved who they are");
  }
  PrepareSocket(fd.get());
  SslPtr ssl;
  if (tls_ != nullptr) {
    absl::StatusOr<SslPtr> made = tls_->Accept(fd.get());
    if (!made.ok()) {
      options_.log(fmt::format("data plane: {}", Message(made.status())));
      return true;
    }
    ssl = *std::move(made);
  }
  const int number = fd.get();
  if (!Watch(epoll_.get(), number)) return true;
  Unproved stranger;
  stranger.connection = Connection(std::move(fd), std::move(ssl));
  stranger.until = steady_clock::now() + kUnprovedLimit;
  stranger.encrypted = tls_ == nullptr;
  unproved_.push_back(std::move(stranger));
  by_fd_[number] = std::prev(unproved_.end());
  return true;
}

std::string WireListener::Who(const Unproved& stranger) const {
  sockaddr_storage storage{};
  socklen_t length = sizeof(storage);
  if (getpeername(stranger.connection.fd(), reinterpret_cast<sockaddr*>(&storage), &length) != 0) {
    return "somebody who has gone";
  }
  const auto host = FromSockaddr(reinterpret_cast<const sockaddr*>(&storage));
  return host.ok() ? host->Text() : "somebody";
}

void WireListener::Drop(UnprovedList::iterator stranger, const std::string& why) {
  options_.log(fmt::format("data plane: the connection of {} is dropped: {}", Who(*stranger), why));
  by_fd_.erase(stranger->connection.fd());
  unproved_.erase(stranger);
}

void WireListener::Read(UnprovedList::iterator stranger) {
  const absl::StatusOr<bool> more = Advance(&*stranger);
  if (!more.ok()) return Drop(stranger, Message(more.status()));
  if (*more) return;
  const int fd = stranger->connection.fd();
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  by_fd_.erase(fd);
  const absl::Status admitted = Admit(&*stranger);
  if (!admitted.ok()) {
    options_.log(fmt::format("data plane: the connection of {} is dropped: {}", Who(*stranger),
                             Message(admitted)));
  }
  unproved_.erase(stranger);
}

absl::StatusOr<bool> WireListener::Advance(Unproved* stranger) {
  if (!stranger->encrypted) {
    REFITD_ASSIGN_OR_RETURN(stranger->encrypted, stranger->connection.Handshake());
    if (!stranger->encrypted) return true;
  }
  while (stranger->bytes < kGreetingBytes) {
    REFITD_ASSIGN_OR_RETURN(
        const int64_t n,
        stranger->connection.Read(stranger->hello.data() + stranger->bytes,
                                  static_cast<int64_t>(kGreetingBytes - stranger->bytes)));
    if (n == 0) return true;
    stranger->bytes += static_cast<size_t>(n);
  }
  return false;
}

absl::Status WireListener::Admit(Unproved* stranger) {
  const std::optional<Greeting> hello = DecodeGreeting(stranger->hello);
  if (!hello.has_value() || hello->kind != GreetingKind::kHello) {
    return Error(StatusCode::kUnauthenticated, "it speaks another protocol");
  }
  std::string identity = stranger->connection.PeerIdentity();
  if (!options_.identities.empty() && !MatchesIdentity(options_.identities, identity)) {
    return Error(StatusCode::kUnauthenticated, "it is \"{}\", which does not match \"{}\"",
                 identity, options_.identities);
  }
  MutexLock lock(&mutex_);
  // The lower rank dials, so a hello from a higher rank finds no expected.
  const auto expected =
      std::find_if(expected_.begin(), expected_.end(), [&hello](const auto& entry) {
        return entry.second.communicator.value() == hello->communicator &&
               hello->to == static_cast<uint32_t>(entry.second.rank) && hello->from < hello->to &&
               SameToken(entry.second.token, hello->token);
      });
  // A communicator that is not open and a wrong token get one answer, which tells a stranger
  // nothing.
  if (expected == expected_.end()) {
    Greeting unknown = *hello;
    unknown.kind = GreetingKind::kUnknown;
    unknown.token = {};
    const GreetingBytes bytes = EncodeGreeting(unknown);
    // The answer fits into the buffer of a new connection; a peer that does not get the answer asks
    // again.
    (void)stranger->connection.Write(bytes, {});
    return Error(StatusCode::kUnauthenticated,
                 "it names no communicator that is open, or a wrong token");
  }
  GreetedConnection arrival;
  arrival.connection = std::move(stranger->connection);
  arrival.from = static_cast<int>(hello->from);
  arrival.stream = static_cast<int>(hello->stream);
  arrival.identity = std::move(identity);
  expected->second.arrived(std::move(arrival));
  return absl::OkStatus();
}

}  // namespace refitd
