#include "client/descriptor_client.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "client/call.h"
#include "transport/base/errors.h"
#include "transport/base/status.h"

namespace refitd::client {
namespace {

constexpr int kBacklogRetryMs = 10;  // a full backlog of a unix socket can't be polled for

// poll() takes whole milliseconds: round up, so that a wait is never cut short to a busy loop.
int PollTimeout(TimePoint deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(Until(deadline)).count();
  return static_cast<int>(std::min<int64_t>(left, 1'000'000'000));
}

// Takes the descriptor that came with `message`, if any. If there are several, all are closed and
// the message is refused.
absl::StatusOr<UniqueFd> TakeDescriptor(msghdr* message) {
  UniqueFd fd;
  bool extra = false;
  for (cmsghdr* c = CMSG_FIRSTHDR(message); c != nullptr; c = CMSG_NXTHDR(message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int value = -1;
      std::memcpy(&value, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
      extra = extra || fd.valid();
      fd.Reset(value);
    }
  }
  if (extra) return Error(absl::StatusCode::kInternal, "a reply carries more than one descriptor");
  return fd;
}

absl::Status CheckReply(const DescriptorReply& reply) {
  if (reply.magic != kDescriptorMagic || reply.version != kDescriptorWireVersion) {
    return Error(absl::StatusCode::kInternal,
                 "the descriptor socket answers with magic {:#x}, version {}", reply.magic,
                 reply.version);
  }
  if (reply.code == 0) return absl::OkStatus();
  const size_t length = strnlen(reply.message, sizeof(reply.message));
  return absl::Status(static_cast<absl::StatusCode>(reply.code),
                      std::string(reply.message, length));
}

}  // namespace

DescriptorClient::DescriptorClient(std::string path, std::string_view token)
    : path_(std::move(path)), token_(token) {}

absl::StatusOr<DescriptorAnswer> DescriptorClient::Ask(DescriptorRequest request, int fd,
                                                       TimePoint deadline,
                                                       const std::stop_token& stop) {
  std::memcpy(request.token, token_.data(), std::min(token_.size(), sizeof(request.token)));
  MutexLock lock(&mutex_);
  const bool reused = socket_.valid();
  if (!reused) REFITD_RETURN_IF_ERROR(Connect(deadline, stop));
  absl::Status sent = Send(request, fd, deadline, stop);
  // The daemon may have closed an idle connection. A request that was not sent had no effect, so
  // send it again.
  if (absl::IsUnavailable(sent) && reused) {
    REFITD_RETURN_IF_ERROR(Connect(deadline, stop));
    sent = Send(request, fd, deadline, stop);
  }
  auto answer = sent.ok() ? Receive(deadline, stop) : absl::StatusOr<DescriptorAnswer>(sent);
  if (!answer.ok()) {
    socket_.Reset();
    return answer.status();
  }
  REFITD_RETURN_IF_ERROR(CheckReply(answer->reply));
  return answer;
}

absl::Status DescriptorClient::Connect(TimePoint deadline, const std::stop_token& stop) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path_.empty() || path_.size() >= sizeof(address.sun_path)) {
    return InvalidField("descriptor_socket", "descriptor socket path of {} bytes: 1 to {} fit",
                        path_.size(), sizeof(address.sun_path) - 1);
  }
  std::memcpy(address.sun_path, path_.data(), path_.size());
  socket_.Reset(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_.valid()) return ErrnoError(errno, "descriptor socket");
  while (::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) !=
         0) {
    const int error = errno;
    const bool again = error == EAGAIN || error == EINTR;
    if (again && Until(deadline) > Duration::zero() && !stop.stop_requested()) {
      ::poll(nullptr, 0, kBacklogRetryMs);
      continue;
    }
    socket_.Reset();
    return ErrnoError(error, fmt::format("connecting to descriptor socket {}", path_));
  }
  return absl::OkStatus();
}

absl::Status DescriptorClient::Wait(short events, TimePoint deadline, const std::stop_token& stop) {
  while (true) {
    pollfd entry{socket_.get(), events, 0};
    const int ready = ::poll(&entry, 1, PollTimeout(PieceOf(deadline, stop)));
    if (ready > 0) return absl::OkStatus();
    if (stop.stop_requested()) return absl::CancelledError("detached");
    if (ready == 0 && Until(deadline) == Duration::zero()) {
      return Error(absl::StatusCode::kDeadlineExceeded,
                   "the daemon did not answer on descriptor socket {} in time", path_);
    }
    if (ready < 0 && errno != EINTR) return ErrnoError(errno, "poll of the descriptor socket");
  }
}

absl::Status DescriptorClient::Send(const DescriptorRequest& request, int fd, TimePoint deadline,
                                    const std::stop_token& stop) {
  iovec data{const_cast<DescriptorRequest*>(&request), sizeof(request)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  }
  while (::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return ErrnoError(errno, "sending to the descriptor socket");
    REFITD_RETURN_IF_ERROR(Wait(POLLOUT, deadline, stop));
  }
  return absl::OkStatus();
}

absl::StatusOr<DescriptorAnswer> DescriptorClient::Receive(TimePoint deadline,
                                                           const std::stop_token& stop) {
  DescriptorAnswer answer;
  iovec data{&answer.reply, sizeof(answer.reply)};
  // Room for two descriptors, so that a second one is seen, closed and refused instead of silently
  // cut off.
  alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))] = {};
  while (true) {
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t got = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) {
      REFITD_RETURN_IF_ERROR(Wait(POLLIN, deadline, stop));
      continue;
    }
    if (got < 0) return ErrnoError(errno, "receiving from the descriptor socket");
    REFITD_ASSIGN_OR_RETURN(answer.fd, TakeDescriptor(&message));
    if (got == 0) {
      return Error(absl::StatusCode::kUnavailable, "the daemon closed descriptor socket {}", path_);
    }
    if (got != sizeof(answer.reply) || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
      return Error(absl::StatusCode::kInternal,
                   "a reply of {} bytes on the descriptor socket, not {}", got,
                   sizeof(answer.reply));
    }
    return answer;
  }
}

}  // namespace refitd::client
