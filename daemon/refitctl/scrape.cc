#include "daemon/refitctl/scrape.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <utility>

#include "daemon/sockets/name_lookup.h"
#include "transport/base/status.h"
#include "transport/base/unique_fd.h"
#include "transport/sockets/connection.h"
#include "transport/sockets/tls_context.h"

namespace refitd {
namespace {

using std::chrono::milliseconds;

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

// Nothing is looked up, so that nothing waits.
absl::StatusOr<Addresses> AddressesOf(const std::string& address) {
  const size_t colon = address.rfind(':');
  const std::string host = HostOfAddress(address);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  if (colon == std::string::npos ||
      getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &list) != 0) {
    return Error(absl::StatusCode::kInvalidArgument, "\"{}\" is not IP:PORT", address);
  }
  return Addresses(list);
}

// A socket on which each call ends within `limit`.
absl::StatusOr<UniqueFd> Dial(const std::string& address, milliseconds limit) {
  REFITD_ASSIGN_OR_RETURN(const Addresses to, AddressesOf(address));
  UniqueFd fd(socket(to->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return ErrnoError(errno, "socket");
  const timeval time{.tv_sec = limit.count() / 1000, .tv_usec = limit.count() % 1000 * 1000};
  setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time));
  setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &time, sizeof(time));
  if (connect(fd.get(), to->ai_addr, to->ai_addrlen) == 0) return fd;
  return Error(absl::StatusCode::kUnavailable, "{}: {}", address,
               Message(ErrnoError(errno, "connect")));
}

// Whether bytes come, or the end, before the deadline.
bool Await(int fd, std::chrono::steady_clock::time_point deadline) {
  const auto left =
      std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now()).count();
  pollfd wait{.fd = fd, .events = POLLIN, .revents = 0};
  return left > 0 && poll(&wait, 1, static_cast<int>(left)) > 0;
}

absl::Status NoAnswer(const std::string& address, milliseconds limit) {
  return Error(absl::StatusCode::kUnavailable, "{} does not answer within {} ms", address,
               limit.count());
}

}  // namespace

absl::StatusOr<std::string> Scrape(const std::string& address,
                                   const std::shared_ptr<const Certificates>& own,
                                   milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  REFITD_ASSIGN_OR_RETURN(UniqueFd fd, Dial(address, limit));
  TlsContexts contexts([own] { return own; });
  SslPtr ssl;
  if (own != nullptr) {
    REFITD_ASSIGN_OR_RETURN(ssl, contexts.Dial(fd.get()));
  }
  Connection connection(std::move(fd), std::move(ssl));
  REFITD_ASSIGN_OR_RETURN(const bool shaken, connection.Handshake());
  if (!shaken) return NoAnswer(address, limit);
  const std::string request = "GET /metrics HTTP/1.1\r\nHost: refitd\r\n\r\n";
  REFITD_ASSIGN_OR_RETURN(const int64_t sent, connection.Write({}, request));
  if (sent != static_cast<int64_t>(request.size())) return NoAnswer(address, limit);
  std::string answer;
  while (answer.size() <= kMaxScrapeBytes) {
    std::array<char, 1 << 16> buffer;
    const auto bytes = connection.Read(buffer.data(), static_cast<int64_t>(buffer.size()));
    if (!bytes.ok() && !answer.empty()) return answer;  // the server closes after its answer
    REFITD_RETURN_IF_ERROR(bytes.status());
    const bool late = std::chrono::steady_clock::now() > deadline;
    if (late || (*bytes == 0 && !Await(connection.fd(), deadline))) return NoAnswer(address, limit);
    answer.append(buffer.data(), static_cast<size_t>(*bytes));
  }
  return Error(absl::StatusCode::kResourceExhausted, "{}: more than {} bytes", address,
               kMaxScrapeBytes);
}

}  // namespace refitd
