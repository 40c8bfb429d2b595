// Accepts the control plane's connections and remembers the peers of those over a unix socket.
//
// gRPC can't tell a unix peer's credentials. So the daemon accepts connections itself, records the
// credentials that the kernel reports, and hands the descriptor to gRPC; a call's
// ServerContext::peer() is then "fd:N", which PeerTable turns back into credentials (P9). TCP has
// no credentials; there the daemon accepts itself because gRPC 1.51, once it was out of
// descriptors, never accepts again.
//
// Invariants: an entry is recorded before the descriptor is handed over. A descriptor number that
// was closed or reused never yields its old owner, since the socket's inode is compared. Entries of
// closed connections are dropped, and their pidfds with them (P8).
#ifndef REFITD_DAEMON_SOCKETS_ACCEPT_LOOP_H_
#define REFITD_DAEMON_SOCKETS_ACCEPT_LOOP_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "daemon/sockets/connection_guard.h"
#include "daemon/sockets/peer_credentials.h"
#include "daemon/sockets/spare_descriptor.h"
#include "daemon/sockets/tcp_listener.h"
#include "daemon/sockets/unix_listener.h"
#include "transport/base/mutex.h"
#include "transport/base/unique_fd.h"

namespace refitd {

// How long accepting pauses when the process or the host is out of descriptors and giving up the
// spare descriptor does not help.
inline constexpr std::chrono::milliseconds kAcceptBackoff{100};
// How often the table is searched for closed connections while it has entries. gRPC does not report
// that it closed one, and waiting for the peer's hang-up would race with gRPC.
inline constexpr std::chrono::milliseconds kPeerSweepInterval{500};

// Maps accepted descriptors to the credentials of their peers. Thread-safe.
class PeerTable {
 public:
  // `fd` is an open socket. Replaces an earlier entry of that number.
  void Record(int fd, PeerCredentials peer);

  // `peer` is ServerContext::peer(). nullopt: not "fd:N", never recorded, or closed since.
  std::optional<PeerCredentials> Lookup(std::string_view peer) const;

  // Drops entries whose descriptor was closed or names another socket now.
  void Sweep();
  size_t size() const;

 private:
  struct Entry {
    uint64_t inode = 0;  // of the socket
    PeerCredentials peer;
  };
  mutable Mutex mutex_;
  std::unordered_map<int, Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

struct AcceptLoopOptions {
  std::string path;
  mode_t mode = 0660;
};

// Thread-safe. One thread of its own from Start to Stop.
class AcceptLoop {
 public:
  // Takes an accepted connection, which is non-blocking, close-on-exec, and already in `peers`.
  // Runs on the loop's thread and must not block. main passes grpc::AddInsecureChannelFromFd (pass
  // fd.Release()).
  using Serve = std::function<void(UniqueFd)>;

  // Binds and listens; connections queue until Start. `peers` must outlive the loop. Errors: as of
  // UnixListener::Create; RESOURCE_EXHAUSTED: out of descriptors.
  // `guard`, which must outlive the loop, watches each connection from before `serve` on; null: no
  // connection is watched.
  static absl::StatusOr<std::unique_ptr<AcceptLoop>> Create(const AcceptLoopOptions& options,
                                                            PeerTable* peers, Serve serve,
                                                            ConnectionGuard* guard = nullptr);
  ~AcceptLoop();  // Stop()
  AcceptLoop(const AcceptLoop&) = delete;
  AcceptLoop& operator=(const AcceptLoop&) = delete;

  // The same over TCP, where peers have no credentials and none are recorded. RESOURCE_EXHAUSTED:
  // out of descriptors.
  static absl::StatusOr<std::unique_ptr<AcceptLoop>> CreateTcp(TcpListener listener, Serve serve,
                                                               ConnectionGuard* guard = nullptr);

  // Call once.
  void Start();
  // Stops accepting, joins the thread, and removes the socket's file if it is still this loop's.
  // Accepted connections live on. Idempotent; must not be called from within `serve`.
  void Stop();

  // The socket's path, or HOST:PORT.
  const std::string& path() const { return path_; }

 private:
  struct Listener {
    std::string path;
    int fd = -1;  // owned by one of the two below
    std::unique_ptr<UnixListener> unix_listener;
    UniqueFd tcp;
  };
  static absl::StatusOr<std::unique_ptr<AcceptLoop>> Make(Listener listener, PeerTable* peers,
                                                          Serve serve, ConnectionGuard* guard);
  AcceptLoop(Listener listener, UniqueFd epoll, UniqueFd stop, SpareDescriptor spare,
             PeerTable* peers, Serve serve, ConnectionGuard* guard);
  void Run();
  int TimeoutMs() const;
  void AcceptAll();
  // False: the guard keeps the connection out.
  bool Admit(UniqueFd connection);
  bool Hand(UniqueFd connection, const std::string& source);
  void Sweep();
  void PauseAccepting();
  void ResumeAccepting();

  const std::string path_;
  const int listen_fd_;  // of listener_
  const UniqueFd epoll_;
  const UniqueFd stop_;     // eventfd
  PeerTable* const peers_;  // null: TCP
  const Serve serve_;
  ConnectionGuard* const guard_;  // null: none

  // Used by the loop's thread only, once it runs.
  SpareDescriptor spare_;
  std::optional<std::chrono::steady_clock::time_point> paused_until_;

  Mutex mutex_;                                               // Start and Stop exclude each other
  std::optional<Listener> listener_ ABSL_GUARDED_BY(mutex_);  // nullopt after Stop
  std::thread thread_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace refitd

#endif  // REFITD_DAEMON_SOCKETS_ACCEPT_LOOP_H_
