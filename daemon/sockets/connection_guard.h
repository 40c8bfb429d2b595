// Ends connections that bring more than a ConnectionLedger allows, whatever gRPC would take.
//
// What gRPC reads is counted where gRPC reads it: this library defines recvmsg(), which libgrpc
// then calls in place of the C library's (as programs replace malloc), and close(), so that a
// number that is used again is never taken for the connection that had it before. A connection that
// has ended reads ECONNRESET. Under TLS, recvmsg() sees records; what is in them is counted where
// gRPC's OpenSSL decrypts it (tls_guard.h).
//
// Invariants: those of the ledger (P9, P10).
//
// Thread-safe. A process has one guard at a time.
#ifndef REFITD_DAEMON_SOCKETS_CONNECTION_GUARD_H_
#define REFITD_DAEMON_SOCKETS_CONNECTION_GUARD_H_

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "daemon/sockets/connection_ledger.h"
#include "transport/base/ids.h"
#include "transport/base/mutex.h"

namespace refitd {

// Descriptors from this number on are not served: LimitNOFILE of the unit.
inline constexpr int kMaxGuardedFds = 65'536;

struct GuardOptions {
  bool tls = false;                 // TCP is served with TLS
  int64_t message_bytes = 8 << 20;  // of the longest message that gRPC takes
  // The guard calls this where it ends a connection of a source, with the reason, on any thread and
  // without a mutex; null: it calls nobody.
  std::function<void(const std::string& source, const std::string& why)> ended{};
};

class ConnectionGuard {
 public:
  explicit ConnectionGuard(GuardOptions options);
  ~ConnectionGuard();
  ConnectionGuard(const ConnectionGuard&) = delete;
  ConnectionGuard& operator=(const ConnectionGuard&) = delete;

  // Counts from now on what gRPC reads of an accepted connection, which gRPC must not have yet.
  // `source`: "uid:N" or an address. False: `fd` is kMaxGuardedFds or more, or the source is kept
  // out; the caller must close it.
  bool Watch(int fd, const std::string& source);

  // Notes that a rule allowed a call of that connection, by this identity. `peer`:
  // ServerContext::peer().
  void Allowed(std::string_view peer, const std::string& identity);
  // Notes that no rule allowed a call. `known`: some rule names whoever is at the other end.
  void Refused(std::string_view peer, bool known);

  // Ends connections whose time is over. To be called about twice a second while there are any.
  void Sweep(TimePoint now);
  size_t open() const;
  size_t unproven() const;

  // The name by which gRPC knows the other end of a connected TCP socket: "ipv4:A:PORT",
  // "ipv6:[A]:PORT". "fd:N" if it is no TCP socket.
  static std::string PeerOfSocket(int fd);
  // A peer as gRPC writes it, in the form of PeerOfSocket.
  static std::string NormalPeer(std::string_view peer);

  // For the code that reads. A connection's number in the ledger; 0: it is not watched.
  static ConnectionLedger::Id IdOf(int fd);
  // Counts the first `bytes` of `parts`, which were read from the socket. False: the connection is
  // being ended, and the bytes must be dropped.
  bool Take(ConnectionLedger::Id id, std::span<const iovec> parts, int64_t bytes);
  // Does so for bytes that were decrypted, as a connection under TLS has them. True if the process
  // has no guard.
  static bool TakeDecrypted(ConnectionLedger::Id id, std::string_view bytes);
  void Close(ConnectionLedger::Id id);

 private:
  struct Watched {
    int fd;
    std::string peer;
    bool clear;  // recvmsg sees what the client sent
  };

  // Shuts down what has ended. Tell must follow, without the mutex.
  std::vector<ConnectionLedger::Ended> EndAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Tell(const std::vector<ConnectionLedger::Ended>& ended) const;
  bool TakeClear(ConnectionLedger::Id id, std::string_view bytes);
  ConnectionLedger::Id Find(std::string_view peer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const GuardOptions options_;
  mutable Mutex mutex_;
  ConnectionLedger ledger_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<ConnectionLedger::Id, Watched> watched_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<std::string, ConnectionLedger::Id> peers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace refitd

#endif  // REFITD_DAEMON_SOCKETS_CONNECTION_GUARD_H_
