// The one listening socket of a daemon's host wire. It takes connections, lets them prove that they
// are peers, and hands those that did to their communicator.
//
// A stranger costs a place among kMaxUnproved for at most kUnprovedLimit (P4, P10): when all
// places are taken, the oldest connection loses its own. A peer whose place was taken dials again.
// Events that anybody can cause are told to `log`, which must limit how much it writes.
//
// Threads: one of its own ("refitd-wire-io"). Thread-safe.
#ifndef REFITD_TRANSPORT_SOCKETS_LISTENER_H_
#define REFITD_TRANSPORT_SOCKETS_LISTENER_H_

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/ids.h"
#include "transport/base/mutex.h"
#include "transport/base/unique_fd.h"
#include "transport/sockets/connection.h"
#include "transport/sockets/frames.h"

namespace refitd {

inline constexpr size_t kMaxUnproved = 128;
inline constexpr Duration kUnprovedLimit = std::chrono::seconds(5);

// A connection that showed the communicator's token, and under TLS a certificate that a root
// signed.
struct GreetedConnection {
  Connection connection;
  int from = 0;
  int stream = 0;
  std::string identity;  // empty without TLS
};

class WireListener {
 public:
  struct Options {
    HostAddress host;
    uint16_t port = 0;       // 0: a free one
    std::string identities;  // a pattern that peers' identities must match; empty: any
    std::function<void(const std::string& line)> log;
  };
  // `tls`: null for connections in the clear; must outlive the listener. UNAVAILABLE,
  // ALREADY_EXISTS: the listener can't listen there.
  static absl::StatusOr<std::unique_ptr<WireListener>> Start(Options options, TlsContexts* tls);
  ~WireListener();
  WireListener(const WireListener&) = delete;
  WireListener& operator=(const WireListener&) = delete;

  uint16_t port() const { return port_; }
  const Options& options() const { return options_; }

  // A communicator that connections may come for. Connections are given to `arrived`, on the
  // listener's thread, until Remove has returned. `arrived` must not call the listener.
  struct Expected {
    CommunicatorId communicator;
    int rank = 0;
    WireToken token{};
    std::function<void(GreetedConnection)> arrived;
  };
  // Lets connections come for the communicator. Returns a number for Remove, never 0.
  uint64_t Add(Expected expected);
  void Remove(uint64_t expected);

 private:
  // A connection whose other end has proved nothing yet.
  struct Unproved {
    Connection connection;
    TimePoint until;
    bool encrypted = false;  // the TLS handshake is done, or there is none
    GreetingBytes hello{};
    size_t bytes = 0;  // of hello
  };
  using UnprovedList = std::list<Unproved>;

  WireListener(Options options, TlsContexts* tls, UniqueFd socket, UniqueFd epoll, UniqueFd wake,
               uint16_t port);
  void Run();
  void TakeConnections();
  bool TakeConnection();
  void Read(UnprovedList::iterator stranger);
  // Reads on from a stranger. True: more bytes must come. False: the stranger's hello is complete.
  // An error: the connection must be dropped.
  absl::StatusOr<bool> Advance(Unproved* stranger);
  absl::Status Admit(Unproved* stranger);
  void Drop(UnprovedList::iterator stranger, const std::string& why);
  int WaitMillis() const;
  std::string Who(const Unproved& stranger) const;

  const Options options_;
  TlsContexts* const tls_;
  const UniqueFd socket_;
  const UniqueFd epoll_;
  const UniqueFd wake_;  // written once, at the end
  const uint16_t port_;

  // Used by the listener's thread alone.
  UnprovedList unproved_;                        // the oldest first
  std::map<int, UnprovedList::iterator> by_fd_;  // all of unproved_
  bool paused_ = false;                          // the process has no descriptor left

  Mutex mutex_;
  uint64_t next_number_ ABSL_GUARDED_BY(mutex_) = 1;
  // By the number that Add returned, not by communicator id: a closed communicator and a new one
  // with the same id may both be in the map.
  std::map<uint64_t, Expected> expected_ ABSL_GUARDED_BY(mutex_);

  std::thread thread_;  // last: it uses the other members
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_SOCKETS_LISTENER_H_
