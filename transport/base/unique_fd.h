// Ownership of a file descriptor.
#ifndef REFITD_TRANSPORT_BASE_UNIQUE_FD_H_
#define REFITD_TRANSPORT_BASE_UNIQUE_FD_H_

#include <fcntl.h>
#include <unistd.h>

#include <utility>

namespace refitd {

// Owns a descriptor and closes it when destroyed; -1 means none. Not thread-safe, like an int.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) Reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~UniqueFd() { Reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  [[nodiscard]] int Release() { return std::exchange(fd_, -1); }
  void Reset(int fd = -1) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

// Another descriptor of the same file, which child processes do not inherit. Not valid: there is
// none, and errno says why.
inline UniqueFd Duplicate(int fd) { return UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

}  // namespace refitd

#endif  // REFITD_TRANSPORT_BASE_UNIQUE_FD_H_
