// A scripted daemon's end of the descriptor socket, for tests of clients that use the socket.
#ifndef REFITD_CLIENT_DESCRIPTOR_TEST_UTIL_H_
#define REFITD_CLIENT_DESCRIPTOR_TEST_UTIL_H_

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "transport/base/temp_folder_testing.h"
#include "transport/base/unique_fd.h"
#include "transport/host/descriptor_format.h"

namespace refitd::client {

// The other end of the socket, on a thread of its own: accepts connections one after the other and
// gives each to `serve` with its number.
class DescriptorPeer {
 public:
  explicit DescriptorPeer(std::function<void(int fd, int connection)> serve) {
    fd_.Reset(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path_.data(), path_.size());
    REQUIRE(::bind(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    REQUIRE(::listen(fd_.get(), 8) == 0);
    thread_ = std::thread([this, serve = std::move(serve)] {
      for (int connection = 0;; ++connection) {
        const UniqueFd accepted(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC));
        if (!accepted.valid()) return;
        serve(accepted.get(), connection);
      }
    });
  }
  ~DescriptorPeer() {
    ::shutdown(fd_.get(), SHUT_RDWR);
    thread_.join();
  }
  const std::string& path() const { return path_; }

 private:
  const TempFolder folder_;
  const std::string path_ = folder_ / "d";
  UniqueFd fd_;
  std::thread thread_;
};

// Reads a request; false at the end of the connection. `got_fd` tells whether a descriptor came
// along.
inline bool ReadRequest(int fd, DescriptorRequest* request, bool* got_fd) {
  iovec data{request, sizeof(*request)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  if (::recvmsg(fd, &message, MSG_CMSG_CLOEXEC) != sizeof(*request)) return false;
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  *got_fd = header != nullptr;
  if (header == nullptr) return true;
  int taken = -1;
  std::memcpy(&taken, CMSG_DATA(header), sizeof(taken));
  ::close(taken);
  return true;
}

inline void Reply(int fd, const DescriptorReply& reply) {
  (void)::send(fd, &reply, sizeof(reply), MSG_NOSIGNAL);
}

}  // namespace refitd::client

#endif  // REFITD_CLIENT_DESCRIPTOR_TEST_UTIL_H_
