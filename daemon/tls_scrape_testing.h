// A scrape of metrics, or another request, over TLS, for tests.
#ifndef REFITD_DAEMON_TLS_SCRAPE_TESTING_H_
#define REFITD_DAEMON_TLS_SCRAPE_TESTING_H_

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <memory>
#include <string>
#include <utility>

#include "transport/base/status.h"
#include "transport/base/unique_fd.h"
#include "transport/sockets/connection.h"
#include "transport/sockets/tls_context.h"

namespace refitd {

// Sends GET `path` with these certificates to the server at "IP:PORT" and returns the answer, or a
// text that begins with "TLS: " if no answer came. `presented`, if not null, gets the identity in
// the server's certificate.
inline std::string ScrapeOverTls(const std::string& address,
                                 const std::shared_ptr<const Certificates>& own,
                                 std::string* presented = nullptr,
                                 const std::string& path = "/metrics") {
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  REFITD_CHECK(fd.valid());
  const size_t colon = address.rfind(':');
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(colon + 1))));
  REFITD_CHECK(inet_pton(AF_INET, address.substr(0, colon).c_str(), &to.sin_addr) == 1);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)) != 0) {
    return "TLS: nobody listens";
  }
  // A server that hangs fails the test. Apart from that the socket blocks, so that each call below
  // is done, or has failed, when it returns.
  const timeval limit{.tv_sec = 30, .tv_usec = 0};
  setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  TlsContexts contexts([own] { return own; });
  absl::StatusOr<SslPtr> ssl = contexts.Dial(fd.get());
  REFITD_CHECK(ssl.ok());
  Connection connection(std::move(fd), *std::move(ssl));
  const absl::StatusOr<bool> shaken = connection.Handshake();
  if (!shaken.ok()) return "TLS: " + Message(shaken.status());
  if (!*shaken) return "TLS: the handshake does not end";
  if (presented != nullptr) *presented = connection.PeerIdentity();
  const std::string request = "GET " + path + " HTTP/1.1\r\nHost: localhost\r\n\r\n";
  const absl::StatusOr<int64_t> sent = connection.Write({}, request);
  if (!sent.ok()) return "TLS: " + Message(sent.status());
  std::string all;
  for (;;) {
    std::array<char, 4096> buffer{};
    const absl::StatusOr<int64_t> bytes =
        connection.Read(buffer.data(), static_cast<int64_t>(buffer.size()));
    if (!bytes.ok()) return all.empty() ? "TLS: " + Message(bytes.status()) : all;
    if (*bytes == 0) return "TLS: the answer does not end";
    all.append(buffer.data(), static_cast<size_t>(*bytes));
  }
}

}  // namespace refitd

#endif  // REFITD_DAEMON_TLS_SCRAPE_TESTING_H_
