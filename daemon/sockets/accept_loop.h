// Accepts the control plane's connections and remembers who made those over a unix socket.
//
// gRPC can't tell a unix peer's credentials. So the daemon accepts by itself, records what the
// kernel says, and hands the descriptor to gRPC; a call's ServerContext::peer() is then "fd:N",
// which PeerTable turns back into credentials (P9). Over TCP there are none; there the daemon
// accepts by itself because gRPC 1.51 never does so again once it was out of descriptors.
//
// Invariants: an entry is recorded before the descriptor is handed over; a descriptor number that
// was closed or taken again never answers with its old owner (the socket's inode is compared);
// entries of closed connections are dropped, and their pidfds with them (P8).
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
#include "daemon/sockets/peer_credentials.h"
#include "daemon/sockets/tcp_listener.h"
#include "daemon/sockets/unix_listener.h"
#include "transport/base/mutex.h"
#include "transport/base/unique_fd.h"

namespace refitd {

// How long accepting pauses when the process or the host is out of descriptors and not even the
// spare one helps.
inline constexpr std::chrono::milliseconds kAcceptBackoff{100};
// How often the table is looked through for closed connections while it has any. gRPC tells nobody
// when it closes one, and to be woken for the peer's hang-up would race with that.
inline constexpr std::chrono::milliseconds kPeerSweepInterval{500};

// Who is behind each accepted descriptor. Thread-safe.
class PeerTable {
 public:
  // `fd` is an open socket. Replaces what the number meant before.
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
  // Takes connections: non-blocking, close-on-exec, already in `peers`. Runs on the loop's thread;
  // must not block. main gives it grpc::AddInsecureChannelFromFd (pass fd.Release()).
  using Serve = std::function<void(UniqueFd)>;

  // Binds and listens: connections queue until Start. `peers` must outlive the loop. Errors: as
  // UnixListener::Create; RESOURCE_EXHAUSTED descriptors.
  static absl::StatusOr<std::unique_ptr<AcceptLoop>> Create(const AcceptLoopOptions& options,
                                                            PeerTable* peers, Serve serve);
  ~AcceptLoop();  // Stop()
  AcceptLoop(const AcceptLoop&) = delete;
  AcceptLoop& operator=(const AcceptLoop&) = delete;

  // The same over TCP, where nobody's credentials are known: none are recorded. Errors:
  // RESOURCE_EXHAUSTED descriptors.
  static absl::StatusOr<std::unique_ptr<AcceptLoop>> CreateTcp(TcpListener listener, Serve serve);

  // Once.
  void Start();
  // Ends accepting, joins the thread, removes the socket's file if it is still this loop's.
  // Accepted connections live on. Idempotent; not from within `serve`.
  void Stop();

  // The socket's path, or HOST:PORT.
  const std::string& path() const { return path_; }

 private:
  struct Listener {
    std::string path;
    int fd = -1;  // of one of these
    std::unique_ptr<UnixListener> unix_listener;
    UniqueFd tcp;
  };
  static absl::StatusOr<std::unique_ptr<AcceptLoop>> Make(Listener listener, PeerTable* peers,
                                                          Serve serve);
  AcceptLoop(Listener listener, UniqueFd epoll, UniqueFd stop, UniqueFd spare, PeerTable* peers,
             Serve serve);
  void Run();
  int TimeoutMs() const;
  void AcceptAll();
  void Admit(UniqueFd connection);
  bool ShedOne();
  void PauseAccepting();
  void ResumeAccepting();

  const std::string path_;
  const int listen_fd_;  // of listener_
  const UniqueFd epoll_;
  const UniqueFd stop_;     // eventfd
  PeerTable* const peers_;  // null: TCP
  const Serve serve_;

  // The loop's thread only, once it runs.
  UniqueFd spare_;  // given up to shed connections when descriptors run out
  std::optional<std::chrono::steady_clock::time_point> paused_until_;
  int64_t shed_since_logged_ = 0;
  std::optional<std::chrono::steady_clock::time_point> shed_logged_;

  Mutex mutex_;                                               // Start against Stop
  std::optional<Listener> listener_ ABSL_GUARDED_BY(mutex_);  // nullopt after Stop
  std::thread thread_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace refitd

#endif  // REFITD_DAEMON_SOCKETS_ACCEPT_LOOP_H_
