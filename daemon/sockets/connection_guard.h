// Bounds what a connection may bring before the policy has let a call of it in.
//
// gRPC 1.51 takes headers without an end, unfinished messages and streams that are reset at once
// before any handler runs, and no setting of it bounds their memory or time. So what gRPC reads is
// counted where gRPC reads it: this library defines recvmsg(), which libgrpc then calls in place of
// the C library's (as programs replace malloc), and which ends a connection that is over its
// budget. The count costs an atomic load where a connection is not watched.
//
// Invariants (P9, P10)
//  1. A connection that is not proven reads at most kUnprovenBytes, and one of an identity that no
//     rule names at most kUnknownBytes more once that is found out. It then reads ECONNRESET.
//  2. Only a call that a rule allowed proves a connection: a refused call lifts nothing.
//  3. At most kMaxUnproven connections are unproven at a time: the oldest one of the source (user
//  or
//     address) that has most of them ends first. None is for longer than kUnprovenLimit.
//  4. A descriptor's number may be used again at any time: a number is only taken for a connection
//     while it is the same socket, by its cookie.
//
// Thread-safe. A process has one guard at a time.
#ifndef REFITD_DAEMON_SOCKETS_CONNECTION_GUARD_H_
#define REFITD_DAEMON_SOCKETS_CONNECTION_GUARD_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "transport/base/ids.h"
#include "transport/base/mutex.h"
#include "transport/base/unique_fd.h"

namespace refitd {

// The first flow-control window of a call, which the server's settings give to clients. A member's
// first message may fill it before the daemon has seen the call's headers.
inline constexpr int kFirstWindowBytes = 16 << 10;
// That window, the headers of calls, and a TLS handshake with long chains. gRPC makes of each byte
// up to six hundred, where it is the header of a stream that is reset at once.
inline constexpr int64_t kUnprovenBytes = 48 << 10;
// Enough for some calls that are refused with a reason.
inline constexpr int64_t kUnknownBytes = 16 << 10;
// More than the ranks of a node, which may come all at once.
inline constexpr size_t kMaxUnproven = 256;
inline constexpr Duration kUnprovenLimit = std::chrono::seconds(30);
// Descriptors from this number on are not served: LimitNOFILE of the unit.
inline constexpr int kMaxGuardedFds = 65'536;

class ConnectionGuard {
 public:
  // `ended` is told why a connection of a source was ended, on any thread, without a mutex; null:
  // nobody is.
  explicit ConnectionGuard(
      std::function<void(const std::string& source, const std::string& why)> ended = nullptr);
  ~ConnectionGuard();
  ConnectionGuard(const ConnectionGuard&) = delete;
  ConnectionGuard& operator=(const ConnectionGuard&) = delete;

  // Watches an accepted connection, before gRPC gets it. `source`: "uid:N" or an address. False:
  // the caller must close it, since descriptors have run out.
  bool Watch(int fd, const std::string& source);

  // `peer` is ServerContext::peer(). A rule allowed a call of that connection.
  void Prove(std::string_view peer);
  // No rule names whoever is at the other end.
  void Unknown(std::string_view peer);

  // Ends connections that were unproven for too long, and forgets closed ones. To be called about
  // twice a second while there are any.
  void Sweep(TimePoint now);
  size_t unproven() const;

  // The name by which gRPC knows the other end of a connected TCP socket: "ipv4:A:PORT",
  // "ipv6:[A]:PORT". "fd:N" if it is no TCP socket.
  static std::string PeerOfSocket(int fd);
  // A peer as gRPC writes it, in the form of PeerOfSocket.
  static std::string NormalPeer(std::string_view peer);

 private:
  struct Watched {
    UniqueFd duplicate;  // shut down to end the connection, whatever became of gRPC's number
    std::string source;
    std::string peer;
    TimePoint since;
  };

  void End(int fd, const std::string& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(std::map<int, Watched>::iterator watched) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MakeRoom() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Tell();

  const std::function<void(const std::string& source, const std::string& why)> ended_;
  mutable Mutex mutex_;
  std::map<int, Watched> watched_ ABSL_GUARDED_BY(mutex_);  // by gRPC's number
  std::map<std::string, int> fds_ ABSL_GUARDED_BY(mutex_);  // by peer
  std::vector<std::pair<std::string, std::string>> to_tell_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace refitd

#endif  // REFITD_DAEMON_SOCKETS_CONNECTION_GUARD_H_
