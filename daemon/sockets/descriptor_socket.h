// The daemon's end of the descriptor socket: members hand in regions and get staging pools
// (transport/host/descriptor_format.h, docs/descriptor_socket.md).
//
// Keeps P4 (connections have an idle limit, replies never block), P8 (every descriptor that arrives
// is owned at once, and closed unless the handler takes it; a closed connection leaves nothing),
// P10 (sizes, magic, version, kinds and the number of descriptors are checked before anything else;
// connections and requests are bounded) and P9 (a peer that may not use the socket gets that
// answer and is disconnected before its message is read). The handler decides on the rest: token,
// credentials, the memfd's seals and size.
//
// Malformed framing (size, magic, version) is answered INVALID_ARGUMENT and ends the connection. A
// well-framed request that is refused is answered, and the connection goes on.
#ifndef REFITD_DAEMON_SOCKETS_DESCRIPTOR_SOCKET_H_
#define REFITD_DAEMON_SOCKETS_DESCRIPTOR_SOCKET_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/sockets/peer_credentials.h"
#include "daemon/sockets/spare_descriptor.h"
#include "daemon/sockets/unix_listener.h"
#include "transport/base/ids.h"
#include "transport/base/mutex.h"
#include "transport/base/unique_fd.h"
#include "transport/host/descriptor_format.h"

namespace refitd {

// The suffix that makes this socket's path from the control plane's.
inline constexpr std::string_view kDescriptorSocketSuffix = ".fds";

// Connections at a time: more than a node has ranks. Of these, one user has at most half, so that
// none keeps all others out. Further connections are answered RESOURCE_EXHAUSTED and closed.
inline constexpr int kMaxDescriptorConnections = 1024;
// Requests served at a time: mapping a large region takes long, and others should not wait for it.
inline constexpr int kDescriptorThreads = 4;
// A connection without a request for this long is closed; clients connect again.
inline constexpr std::chrono::milliseconds kDescriptorIdleLimit{60'000};

using Token = std::array<uint8_t, 16>;

struct PoolHandle {
  UniqueFd fd;  // a duplicate, which is closed after sending
  int64_t bytes = 0;
  int64_t slot_bytes = 0;
};

struct SideHandle {
  UniqueFd fd;  // as in PoolHandle
  int64_t bytes = 0;
  RegionKind kind = RegionKind::kMemfd;
};

// Implemented by the node. Called from kDescriptorThreads threads at once. May block on mapping
// memory, and on nothing else. A status becomes the reply's code and message.
class DescriptorHandler {
 public:
  virtual ~DescriptorHandler() = default;
  // `fd` is the caller's descriptor, unchecked; `bytes` is positive. `address`: of device memory in
  // the caller's process, as the caller says; 0: unknown.
  virtual absl::StatusOr<RegionId> RegisterRegion(const Token& token, const PeerCredentials& peer,
                                                  UniqueFd fd, RegionKind kind, int64_t bytes,
                                                  uint64_t address, KeepDescriptor keep) = 0;
  virtual absl::Status ReleaseRegion(const Token& token, const PeerCredentials& peer,
                                     RegionId region) = 0;
  virtual absl::StatusOr<PoolHandle> MapPool(const Token& token, const PeerCredentials& peer) = 0;
  // `side`: twice the arena's index, and 1 more for the back; unchecked.
  virtual absl::StatusOr<SideHandle> TakeKept(const Token& token, const PeerCredentials& peer,
                                              uint64_t side) = 0;
};

struct DescriptorSocketOptions {
  std::string path;
  mode_t mode = 0660;
  // OK: the peer may use the socket. Must not block. Null: nobody may.
  std::function<absl::Status(const PeerCredentials&)> admit{};
  int max_connections = kMaxDescriptorConnections;
  std::chrono::milliseconds idle_limit = kDescriptorIdleLimit;
};

// Thread-safe.
class DescriptorSocket {
 public:
  // Binds, listens and serves. `handler` must outlive the socket. Errors: as of
  // UnixListener::Create; RESOURCE_EXHAUSTED: out of descriptors.
  static absl::StatusOr<std::unique_ptr<DescriptorSocket>> Create(
      const DescriptorSocketOptions& options, DescriptorHandler* handler);
  ~DescriptorSocket();  // Stop()
  DescriptorSocket(const DescriptorSocket&) = delete;
  DescriptorSocket& operator=(const DescriptorSocket&) = delete;

  // Lets running requests end, closes every connection, removes the socket's file. Idempotent.
  void Stop();

  const std::string& path() const { return path_; }
  int connections() const;

 private:
  struct Connection {
    UniqueFd socket;
    PeerCredentials peer;
    std::chrono::steady_clock::time_point last_used;
    bool busy = false;  // a thread serves it; only that thread may close it
  };
  struct Request;

  DescriptorSocket(const DescriptorSocketOptions& options, std::unique_ptr<UnixListener> listener,
                   UniqueFd epoll, UniqueFd stop, UniqueFd timer, DescriptorHandler* handler);
  void Run();
  void AcceptAll();
  void Admit(UniqueFd socket);
  int ConnectionsOf(uid_t uid) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes the connection for this thread; null: it was closed meanwhile.
  std::shared_ptr<Connection> Claim(uint64_t id);
  // Serves the request that has come; false: the connection ends.
  bool Serve(const Connection& connection);
  void Release(uint64_t id, bool keep);
  void Tick();  // closes idle connections, listens again after a failed accept
  void ArmTimer();
  void ListenAgain();
  DescriptorReply Answer(const Connection& connection, Request request, UniqueFd* attach);

  const std::string path_;
  const std::function<absl::Status(const PeerCredentials&)> admit_;
  const int max_connections_;
  const std::chrono::milliseconds idle_limit_;
  const int listen_fd_;  // of listener_
  const UniqueFd epoll_;
  const UniqueFd stop_;   // eventfd, level-triggered: wakes every thread
  const UniqueFd timer_;  // timerfd: idle connections
  DescriptorHandler* const handler_;
  SpareDescriptor spare_;  // used by the thread that has the listener's event

  mutable Mutex mutex_;
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, std::shared_ptr<Connection>> connections_ ABSL_GUARDED_BY(mutex_);

  Mutex stop_mutex_;  // calls of Stop exclude each other; taken before mutex_
  std::unique_ptr<UnixListener> listener_ ABSL_GUARDED_BY(stop_mutex_);  // null after Stop
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(stop_mutex_);
};

}  // namespace refitd

#endif  // REFITD_DAEMON_SOCKETS_DESCRIPTOR_SOCKET_H_
