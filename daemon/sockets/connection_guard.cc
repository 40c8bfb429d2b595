#include "daemon/sockets/connection_guard.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <utility>

#include "transport/base/status.h"

// The sanitizers' own, which take the place of the C library's too; null without them.
extern "C" ssize_t __interceptor_recvmsg(int, msghdr*, int)  // NOLINT(bugprone-reserved-identifier)
    __attribute__((weak));
extern "C" int __interceptor_close(int)  // NOLINT(bugprone-reserved-identifier)
    __attribute__((weak));

namespace refitd {
namespace {

// The watched connection of each descriptor; 0: none. Pages of zeros that nobody writes take no
// memory.
std::array<std::atomic<ConnectionLedger::Id>, kMaxGuardedFds> id_of_fd;
std::atomic<ConnectionGuard*> the_guard{nullptr};

// The descriptor's entry of id_of_fd; null: it is outside of the table.
std::atomic<ConnectionLedger::Id>* IdAt(int fd) {
  return fd >= 0 && fd < kMaxGuardedFds ? &id_of_fd[static_cast<size_t>(fd)] : nullptr;
}

ssize_t Receive(int fd, msghdr* message, int flags) {
  if (__interceptor_recvmsg != nullptr) return __interceptor_recvmsg(fd, message, flags);
  return syscall(SYS_recvmsg, fd, message, flags);
}

int CloseDescriptor(int fd) {
  if (__interceptor_close != nullptr) return __interceptor_close(fd);
  return static_cast<int>(syscall(SYS_close, fd));
}

ssize_t Reset() {
  errno = ECONNRESET;
  return -1;
}

ssize_t ReceiveWatched(int fd, msghdr* message, int flags, ConnectionLedger::Id id,
                       ConnectionGuard* guard) {
  const ssize_t read = Receive(fd, message, flags);
  // What is looked at, or queued as an error, is no byte of the stream.
  if (read <= 0 || (flags & (MSG_PEEK | MSG_ERRQUEUE)) != 0) return read;
  return guard->Take(id, {message->msg_iov, message->msg_iovlen}, read) ? read : Reset();
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

}  // namespace

ConnectionGuard::ConnectionGuard(GuardOptions options)
    : options_(std::move(options)), ledger_(options_.message_bytes) {
  REFITD_CHECK(the_guard.exchange(this) == nullptr);
}

ConnectionGuard::~ConnectionGuard() {
  MutexLock lock(&mutex_);
  the_guard = nullptr;
  for (const auto& [id, watched] : watched_) *IdAt(watched.fd) = 0;
}

bool ConnectionGuard::Watch(int fd, const std::string& source) {
  std::atomic<ConnectionLedger::Id>* const id_at = IdAt(fd);
  if (id_at == nullptr) return false;
  const std::string peer = PeerOfSocket(fd);
  const bool tls = options_.tls && !peer.starts_with("fd:");
  std::vector<ConnectionLedger::Ended> ended;
  {
    MutexLock lock(&mutex_);
    const ConnectionLedger::Id id = ledger_.Open(source, std::chrono::steady_clock::now());
    if (id == 0) return false;
    watched_.emplace(id, Watched{fd, peer, !tls});
    peers_[peer] = id;
    *id_at = id;       // from now on what gRPC reads of it is counted
    ended = EndAll();  // those that the ledger ended to make room for this connection
  }
  Tell(ended);
  return true;
}

ConnectionLedger::Id ConnectionGuard::Find(std::string_view peer) const {
  const auto found = peers_.find(NormalPeer(peer));
  return found == peers_.end() ? 0 : found->second;
}

void ConnectionGuard::Allowed(std::string_view peer, const std::string& identity) {
  std::vector<ConnectionLedger::Ended> ended;
  {
    MutexLock lock(&mutex_);
    ledger_.Allowed(Find(peer), identity);
    ended = EndAll();
  }
  Tell(ended);
}

void ConnectionGuard::Refused(std::string_view peer, bool known) {
  MutexLock lock(&mutex_);
  ledger_.Refused(Find(peer), known);
}

void ConnectionGuard::Sweep(TimePoint now) {
  std::vector<ConnectionLedger::Ended> ended;
  {
    MutexLock lock(&mutex_);
    ledger_.Sweep(now);
    ended = EndAll();
  }
  Tell(ended);
}

std::vector<ConnectionLedger::Ended> ConnectionGuard::EndAll() {
  std::vector<ConnectionLedger::Ended> ended = ledger_.TakeEnded();
  // A descriptor is not closed before Close has the mutex.
  for (const ConnectionLedger::Ended& each : ended) {
    shutdown(watched_.at(each.id).fd, SHUT_RDWR);
  }
  return ended;
}

void ConnectionGuard::Tell(const std::vector<ConnectionLedger::Ended>& ended) const {
  if (options_.ended == nullptr) return;
  for (const ConnectionLedger::Ended& each : ended) options_.ended(each.source, each.why);
}

size_t ConnectionGuard::open() const {
  MutexLock lock(&mutex_);
  return ledger_.open();
}

size_t ConnectionGuard::unproven() const {
  MutexLock lock(&mutex_);
  return ledger_.unproven();
}

ConnectionLedger::Id ConnectionGuard::IdOf(int fd) {
  const std::atomic<ConnectionLedger::Id>* const id_at = IdAt(fd);
  return id_at == nullptr ? 0 : id_at->load();
}

bool ConnectionGuard::Take(ConnectionLedger::Id id, std::span<const iovec> parts, int64_t bytes) {
  std::vector<ConnectionLedger::Ended> ended;
  bool taken = false;
  {
    MutexLock lock(&mutex_);
    const auto watched = watched_.find(id);
    if (watched == watched_.end()) return true;
    taken = ledger_.Take(id, bytes);
    auto left = static_cast<size_t>(bytes);
    for (const iovec& part : parts) {
      if (!taken || left == 0 || !watched->second.clear) break;
      const size_t used = std::min(left, part.iov_len);
      taken = ledger_.TakeClear(id, {static_cast<const char*>(part.iov_base), used});
      left -= used;
    }
    ended = EndAll();
  }
  Tell(ended);
  return taken;
}

bool ConnectionGuard::TakeDecrypted(ConnectionLedger::Id id, std::string_view bytes) {
  ConnectionGuard* const guard = the_guard.load();
  return guard == nullptr || guard->TakeClear(id, bytes);
}

bool ConnectionGuard::TakeClear(ConnectionLedger::Id id, std::string_view bytes) {
  std::vector<ConnectionLedger::Ended> ended;
  bool taken = false;
  {
    MutexLock lock(&mutex_);
    taken = ledger_.TakeClear(id, bytes);
    ended = EndAll();
  }
  Tell(ended);
  return taken;
}

void ConnectionGuard::Close(ConnectionLedger::Id id) {
  MutexLock lock(&mutex_);
  const auto watched = watched_.find(id);
  if (watched == watched_.end()) return;
  ledger_.Close(id);
  const auto peer = peers_.find(watched->second.peer);
  if (peer != peers_.end() && peer->second == id) peers_.erase(peer);
  watched_.erase(watched);
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

// These take the place of the C library's for all code of the process but the C library's own. The
// C library's are cancellation points; no thread of this project is ever cancelled.
extern "C" __attribute__((visibility("default"))) ssize_t recvmsg(int fd, msghdr* message,
                                                                  int flags) {
  const refitd::ConnectionLedger::Id id = refitd::ConnectionGuard::IdOf(fd);
  refitd::ConnectionGuard* const guard = id == 0 ? nullptr : refitd::the_guard.load();
  if (guard == nullptr) return refitd::Receive(fd, message, flags);
  return refitd::ReceiveWatched(fd, message, flags, id, guard);
}

extern "C" __attribute__((visibility("default"))) int close(int fd) {
  std::atomic<refitd::ConnectionLedger::Id>* const id_at = refitd::IdAt(fd);
  if (id_at != nullptr && id_at->load() != 0) {
    const refitd::ConnectionLedger::Id id = id_at->exchange(0);
    if (refitd::ConnectionGuard* const guard = refitd::the_guard.load()) guard->Close(id);
  }
  return refitd::CloseDescriptor(fd);
}
