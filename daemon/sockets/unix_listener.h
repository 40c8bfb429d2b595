// A listening unix socket with a path in the file system.
//
// Exactly one daemon owns a path: a live daemon is never replaced, a stale file always is. The path
// appears only once it can be connected to. The file is removed at the end only if it is still the
// one that this listener made. Not thread-safe; moved only through its unique_ptr.
#ifndef REFITD_DAEMON_SOCKETS_UNIX_LISTENER_H_
#define REFITD_DAEMON_SOCKETS_UNIX_LISTENER_H_

#include <sys/stat.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "transport/base/unique_fd.h"

namespace refitd {

struct UnixListenerOptions {
  std::string path;
  int type = 0;     // SOCK_STREAM or SOCK_SEQPACKET
  mode_t mode = 0;  // of the socket's file
  // Hold PATH.lock too, so that of two daemons that start at once only one wins.
  bool lock = true;
};

class UnixListener {
 public:
  // Binds and listens; non-blocking, close-on-exec. INVALID_ARGUMENT: the path is empty, relative,
  // or too long for an address. ALREADY_EXISTS: a live process serves it (the status names its
  // pid), or the path is no socket. NOT_FOUND or PERMISSION_DENIED: the path's folder can't be
  // used.
  static absl::StatusOr<std::unique_ptr<UnixListener>> Create(const UnixListenerOptions& options);

  // Closes the socket, and removes socket and lock file if they are still this listener's.
  ~UnixListener();
  UnixListener(const UnixListener&) = delete;
  UnixListener& operator=(const UnixListener&) = delete;

  int fd() const { return socket_.get(); }
  const std::string& path() const { return path_; }

 private:
  UnixListener(std::string path, UniqueFd socket, UniqueFd lock, struct stat made)
      : path_(std::move(path)), socket_(std::move(socket)), lock_(std::move(lock)), made_(made) {}

  const std::string path_;
  UniqueFd socket_;
  UniqueFd lock_;
  struct stat made_;  // of the socket's file
};

}  // namespace refitd

#endif  // REFITD_DAEMON_SOCKETS_UNIX_LISTENER_H_
