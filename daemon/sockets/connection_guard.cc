#include "daemon/sockets/connection_guard.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <utility>

#include "transport/base/status.h"

// The sanitizers' own, which take the place of the C library's too; null without them.
extern "C" ssize_t __interceptor_recvmsg(int, msghdr*, int)  // NOLINT(bugprone-reserved-identifier)
    __attribute__((weak));

namespace refitd {
namespace {

// What a descriptor may still read: 0: it is not watched; kSpent: nothing.
constexpr int64_t kSpent = -1;
struct Budget {
  std::atomic<int64_t> left;
  std::atomic<uint64_t> cookie;  // of the socket
};
// Zeros that nobody touches take no memory.
std::array<Budget, kMaxGuardedFds> budgets;
std::atomic<bool> guarded{false};

// A number that no other socket of this machine ever has; 0: `fd` is no socket.
uint64_t CookieOf(int fd) {
  uint64_t cookie = 0;
  socklen_t size = sizeof(cookie);
  if (getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &size) != 0) return 0;
  return cookie;
}

Budget* BudgetOf(int fd) {
  return fd >= 0 && fd < kMaxGuardedFds ? &budgets[static_cast<size_t>(fd)] : nullptr;
}

// Sets the budget to at most `left`, unless it is spent or was lifted.
void Lower(Budget* budget, int64_t left) {
  int64_t now = budget->left.load();
  while (now > left && !budget->left.compare_exchange_weak(now, left)) {
  }
}

// Takes what was read off the budget. False: it is spent, and what was read is for nobody.
bool Spend(Budget* budget, ssize_t read) {
  int64_t left = budget->left.load();
  int64_t rest = 0;
  do {
    if (left == 0) return true;  // lifted meanwhile
    if (left == kSpent) return false;
    rest = left > read ? left - read : kSpent;
  } while (!budget->left.compare_exchange_weak(left, rest));
  return rest != kSpent;
}

// Whether the descriptor is a connection that may read no more.
bool Exhausted(int fd, Budget* budget) {
  if (budget->left.load() != kSpent) return false;
  if (CookieOf(fd) == budget->cookie.load()) return true;
  budget->left = 0;  // the connection is closed, and its number is another socket's
  return false;
}

ssize_t Receive(int fd, msghdr* message, int flags) {
  if (__interceptor_recvmsg != nullptr) return __interceptor_recvmsg(fd, message, flags);
  return syscall(SYS_recvmsg, fd, message, flags);
}

ssize_t Reset() {
  errno = ECONNRESET;
  return -1;
}

ssize_t ReceiveWatched(int fd, msghdr* message, int flags, Budget* budget) {
  if (Exhausted(fd, budget)) return Reset();
  const ssize_t read = Receive(fd, message, flags);
  if (read <= 0 || CookieOf(fd) != budget->cookie.load()) return read;
  return Spend(budget, read) ? read : Reset();
}

std::string AddressText(int family, const void* address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  return inet_ntop(family, address, text.data(), text.size()) == nullptr ? "" : text.data();
}

std::string PeerText(const sockaddr_storage& address, int fd) {
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    return fmt::format("ipv4:{}:{}", AddressText(AF_INET, &v4.sin_addr), ntohs(v4.sin_port));
  }
  if (address.ss_family != AF_INET6) return fmt::format("fd:{}", fd);
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
  if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) {
    return fmt::format("ipv4:{}:{}", AddressText(AF_INET, &v6.sin6_addr.s6_addr[12]),
                       ntohs(v6.sin6_port));
  }
  return fmt::format("ipv6:[{}]:{}", AddressText(AF_INET6, &v6.sin6_addr), ntohs(v6.sin6_port));
}

bool Closed(int fd) {
  pollfd look{.fd = fd, .events = 0, .revents = 0};
  return poll(&look, 1, 0) == 1 && (look.revents & (POLLHUP | POLLERR | POLLNVAL)) != 0;
}

}  // namespace

ConnectionGuard::ConnectionGuard(
    std::function<void(const std::string& source, const std::string& why)> ended)
    : ended_(std::move(ended)) {
  REFITD_CHECK(!guarded.exchange(true));
}

ConnectionGuard::~ConnectionGuard() {
  MutexLock lock(&mutex_);
  while (!watched_.empty()) Forget(watched_.begin());
  guarded = false;
}

bool ConnectionGuard::Watch(int fd, const std::string& source) {
  Budget* const budget = BudgetOf(fd);
  if (budget == nullptr) return false;
  Watched watched;
  watched.duplicate = UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!watched.duplicate.valid()) return false;
  watched.source = source;
  watched.peer = PeerOfSocket(fd);
  watched.since = std::chrono::steady_clock::now();
  {
    MutexLock lock(&mutex_);
    // The number's last connection is closed, or it would not be free.
    if (const auto last = watched_.find(fd); last != watched_.end()) Forget(last);
    MakeRoom();
    fds_[watched.peer] = fd;
    watched_.emplace(fd, std::move(watched));
    budget->left = 0;
    budget->cookie = CookieOf(fd);
    budget->left = kUnprovenBytes;
  }
  Tell();
  return true;
}

void ConnectionGuard::Prove(std::string_view peer) {
  MutexLock lock(&mutex_);
  if (fds_.empty()) return;
  const auto found = fds_.find(NormalPeer(peer));
  if (found != fds_.end()) Forget(watched_.find(found->second));
}

void ConnectionGuard::Unknown(std::string_view peer) {
  MutexLock lock(&mutex_);
  const auto found = fds_.find(NormalPeer(peer));
  if (found != fds_.end()) Lower(BudgetOf(found->second), kUnknownBytes);
}

// Lifts the budget, unless the number is another connection's by now.
void ConnectionGuard::Forget(std::map<int, Watched>::iterator watched) {
  Budget* const budget = BudgetOf(watched->first);
  if (CookieOf(watched->second.duplicate.get()) == budget->cookie.load()) {
    int64_t left = budget->left.load();
    while (left != kSpent && !budget->left.compare_exchange_weak(left, 0)) {
    }
  }
  const auto fd = fds_.find(watched->second.peer);
  if (fd != fds_.end() && fd->second == watched->first) fds_.erase(fd);
  watched_.erase(watched);
}

void ConnectionGuard::End(int fd, const std::string& why) {
  const auto watched = watched_.find(fd);
  BudgetOf(fd)->left = kSpent;
  shutdown(watched->second.duplicate.get(), SHUT_RDWR);
  to_tell_.emplace_back(watched->second.source, why);
  Forget(watched);
}

void ConnectionGuard::MakeRoom() {
  if (watched_.size() < kMaxUnproven) return;
  std::map<std::string, size_t> counts;
  for (const auto& [fd, watched] : watched_) ++counts[watched.source];
  const auto most =
      std::max_element(counts.begin(), counts.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  auto oldest = watched_.end();
  for (auto it = watched_.begin(); it != watched_.end(); ++it) {
    if (it->second.source != most->first) continue;
    if (oldest == watched_.end() || it->second.since < oldest->second.since) oldest = it;
  }
  End(oldest->first, fmt::format("{} connections have made no call that a rule allows, of which {} "
                                 "are of this source",
                                 watched_.size(), most->second));
}

void ConnectionGuard::Sweep(TimePoint now) {
  {
    MutexLock lock(&mutex_);
    std::vector<int> late;
    std::vector<int> closed;
    for (const auto& [fd, watched] : watched_) {
      if (Closed(watched.duplicate.get())) {
        closed.push_back(fd);
      } else if (BudgetOf(fd)->left.load() == kSpent || now - watched.since >= kUnprovenLimit) {
        late.push_back(fd);
      }
    }
    for (const int fd : closed) Forget(watched_.find(fd));
    for (const int fd : late) {
      const bool spent = BudgetOf(fd)->left.load() == kSpent;
      End(fd, spent ? "it brought more than may come before a call that a rule allows"
                    : "it made no call that a rule allows for too long");
    }
  }
  Tell();
}

void ConnectionGuard::Tell() {
  std::vector<std::pair<std::string, std::string>> news;
  {
    MutexLock lock(&mutex_);
    news.swap(to_tell_);
  }
  if (ended_ == nullptr) return;
  for (const auto& [source, why] : news) ended_(source, why);
}

size_t ConnectionGuard::unproven() const {
  MutexLock lock(&mutex_);
  return watched_.size();
}

std::string ConnectionGuard::PeerOfSocket(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) address.ss_family = 0;
  return PeerText(address, fd);
}

// gRPC writes an address as a URI: brackets are "%5B" and "%5D", and a zone follows the address as
// "%25ZONE".
std::string ConnectionGuard::NormalPeer(std::string_view peer) {
  constexpr std::string_view kV6 = "ipv6:";
  const size_t colon = peer.rfind(':');
  if (!peer.starts_with(kV6) || colon < kV6.size() || colon == std::string_view::npos) {
    return std::string(peer);
  }
  std::string_view host = peer.substr(kV6.size(), colon - kV6.size());
  for (const std::string_view open : {"%5B", "%5b", "["}) {
    if (host.starts_with(open)) host.remove_prefix(open.size());
  }
  host = host.substr(0, host.find_first_of("%]"));
  return fmt::format("ipv6:[{}]{}", host, peer.substr(colon));
}

}  // namespace refitd

// Takes the place of the C library's for all code of the process but the C library's own. The
// C library's is a cancellation point; no thread of this project is ever cancelled.
extern "C" __attribute__((visibility("default"))) ssize_t recvmsg(int fd, msghdr* message,
                                                                  int flags) {
  refitd::Budget* const budget = refitd::BudgetOf(fd);
  if (budget == nullptr || budget->left.load(std::memory_order_relaxed) == 0) {
    return refitd::Receive(fd, message, flags);
  }
  return refitd::ReceiveWatched(fd, message, flags, budget);
}
