#include "daemon/metrics_server.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <fstream>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "daemon/test_util.h"
#include "daemon/tls_scrape_testing.h"
#include "transport/base/mutex.h"
#include "transport/base/unique_fd.h"
#include "transport/tls/openssl_ptr.h"
#include "transport/tls/test_certificates.h"

namespace refitd {
namespace {

using Catch::Contains;
using Catch::StartsWith;
using std::chrono::milliseconds;
using std::chrono::seconds;

// For tests that wait for the limit to pass. A correct client needs less time even on a busy
// machine.
constexpr milliseconds kShortLimit(1'000);

MetricsServerOptions Plain(Duration timeout = seconds(20)) {
  MetricsServerOptions options;
  options.address = "127.0.0.1:0";
  options.collect = [] { return std::string("refitd_up 1\n"); };
  options.timeout = timeout;
  return options;
}

std::unique_ptr<MetricsServer> StartServer(MetricsServerOptions options) {
  auto server = MetricsServer::Start(std::move(options));
  INFO(server.status().ToString());
  REQUIRE(server.ok());
  return *std::move(server);
}

// Connects to the address. Not valid: nothing listens there.
UniqueFd Connect(const std::string& address, int receive_bytes = 0) {
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  REQUIRE(fd.valid());
  if (receive_bytes > 0) {
    REQUIRE(setsockopt(fd.get(), SOL_SOCKET, SO_RCVBUF, &receive_bytes, sizeof(receive_bytes)) ==
            0);
  }
  sockaddr_in to{};
  to.sin_family = AF_INET;
  const size_t colon = address.rfind(':');
  to.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(colon + 1))));
  REQUIRE(inet_pton(AF_INET, address.substr(0, colon).c_str(), &to.sin_addr) == 1);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)) != 0) fd.Reset();
  return fd;
}

void Send(const UniqueFd& fd, const std::string& text) {
  REQUIRE(send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL) ==
          static_cast<ssize_t>(text.size()));
}

void AwaitReadable(int fd) {
  pollfd entry{fd, POLLIN, 0};
  REQUIRE(poll(&entry, 1, static_cast<int>(ToMillis(kTestDeadline))) == 1);
}

// Reads all bytes until the end of the connection. A connection that was reset has ended as well.
std::string ReadAll(const UniqueFd& fd) {
  std::string all;
  std::vector<char> buffer(1 << 16);
  for (;;) {
    AwaitReadable(fd.get());
    const ssize_t n = recv(fd.get(), buffer.data(), buffer.size(), 0);
    if (n <= 0) return all;
    all.append(buffer.data(), static_cast<size_t>(n));
  }
}

// Whether the server has closed its side of the connection although the client reads nothing: the
// kernel's table then shows that side as established no more. A line of the table has the local and
// the remote address in hexadecimal, and then the state (01: established).
bool LetGo(const UniqueFd& client) {
  sockaddr_in name{};
  socklen_t length = sizeof(name);
  REQUIRE(getsockname(client.get(), reinterpret_cast<sockaddr*>(&name), &length) == 0);
  const std::string remote = fmt::format(":{:04X} ", ntohs(name.sin_port));
  std::ifstream table("/proc/self/net/tcp");
  for (std::string line; std::getline(table, line);) {
    const size_t second = line.find(':', line.find(':', line.find(':') + 1) + 1);
    if (second != std::string::npos && line.compare(second, 9, remote + "01 ") == 0) return false;
  }
  return true;
}

std::string Request(const std::string& method, const std::string& path) {
  return method + " " + path + " HTTP/1.1\r\nHost: localhost\r\n\r\n";
}

// The answer to these bytes, sent in the clear.
std::string Say(const std::string& address, const std::string& text) {
  const UniqueFd fd = Connect(address);
  REQUIRE(fd.valid());
  Send(fd, text);
  return ReadAll(fd);
}

std::string Ask(const std::string& address, const std::string& method, const std::string& path) {
  return Say(address, Request(method, path));
}

// ---- in the clear ----

TEST_CASE("port 0 picks a port, which serves the metrics and nothing else") {
  const auto server = StartServer(Plain());
  CHECK_THAT(server->address(), Catch::Matches("127\\.0\\.0\\.1:[1-9][0-9]*"));
  for (const char* path : {"/metrics", "/metrics?name[]=refitd_up"}) {
    const std::string answer = Ask(server->address(), "GET", path);
    CHECK_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n") &&
                           Contains("\r\nContent-Type: text/plain; version=0.0.4") &&
                           Contains("\r\nContent-Length: 12\r\n") &&
                           Catch::EndsWith("\r\n\r\nrefitd_up 1\n"));
  }
  for (const char* path : {"/", "/etc/passwd", "/metrics/../../etc/passwd", "/metric", "*"}) {
    INFO(path);
    CHECK_THAT(Ask(server->address(), "GET", path), StartsWith("HTTP/1.1 404"));
  }
  for (const char* method : {"PUT", "DELETE", "POST", "HEAD", "get"}) {
    INFO(method);
    CHECK_THAT(Ask(server->address(), method, "/metrics"),
               StartsWith("HTTP/1.1 405") && Contains("\r\nAllow: GET\r\n"));
  }
}

TEST_CASE("requests that are none are refused (P10)") {
  const auto server = StartServer(Plain());
  for (const std::string line : {"", "GET", "GET /metrics", "GET /metrics FTP/1.1", " / HTTP/2"}) {
    INFO(line);
    CHECK_THAT(Say(server->address(), line + "\r\n\r\n"), StartsWith("HTTP/1.1 400"));
  }
  CHECK_THAT(Say(server->address(), "GET /" + std::string(kMaxMetricsRequestBytes, 'a')),
             StartsWith("HTTP/1.1 431"));
  // A body is not read, and does not cost the client its answer.
  CHECK_THAT(Say(server->address(), Request("POST", "/metrics") + std::string(10'000, 'b')),
             StartsWith("HTTP/1.1 405"));
}

TEST_CASE("a port in use is refused by address") {
  const auto first = StartServer(Plain());
  MetricsServerOptions again = Plain();
  again.address = first->address();
  const auto second = MetricsServer::Start(std::move(again));
  CHECK(absl::IsAlreadyExists(second.status()));
  CHECK_THAT(Message(second.status()), Contains(first->address()) && Contains("in use"));
  CHECK_THAT(Ask(first->address(), "GET", "/metrics"), Contains(" 200 OK"));
}

TEST_CASE("an address of no interface is refused by name") {
  MetricsServerOptions options = Plain();
  options.address = "192.0.2.1:0";
  const auto server = MetricsServer::Start(std::move(options));
  CHECK(absl::IsAlreadyExists(server.status()));
  CHECK_THAT(Message(server.status()), Contains("192.0.2.1:0") && Contains("no such address"));
}

TEST_CASE("clients that say nothing are cut off and others are served (P4)") {
  const auto server = StartServer(Plain(kShortLimit));
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 4; ++i) silent.push_back(Connect(server->address()));
  Send(silent.back(), "GET /metr");
  // On a busy machine a correct client may be cut off as well: it asks again, as Prometheus does.
  CHECK(Eventually([&] {
    return Ask(server->address(), "GET", "/metrics").find(" 200 OK") != std::string::npos;
  }));
  for (const UniqueFd& fd : silent) CHECK(ReadAll(fd).empty());
}

TEST_CASE("clients that don't read are cut off and others are served (P4)") {
  MetricsServerOptions options = Plain(kShortLimit);
  // More than the sockets' buffers hold.
  options.collect = [] { return std::string(16 << 20, 'm'); };
  const auto server = StartServer(std::move(options));
  std::vector<UniqueFd> stuck;
  for (int i = 0; i < 4; ++i) {
    stuck.push_back(Connect(server->address(), 4096));
    Send(stuck.back(), Request("GET", "/metrics"));
  }
  REQUIRE(Eventually(
      [&] { return Ask(server->address(), "GET", "/metrics").size() > (size_t{16} << 20); }));
  for (const UniqueFd& fd : stuck) {
    REQUIRE(Eventually([&] { return LetGo(fd); }));
    CHECK(ReadAll(fd).size() < (size_t{8} << 20));
  }
}

TEST_CASE("a flood of silent clients takes nobody's place for long") {
  const auto server = StartServer(Plain());  // the limit does not pass in this test
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 4 * kMaxMetricsClients; ++i) silent.push_back(Connect(server->address()));
  CHECK_THAT(Ask(server->address(), "GET", "/metrics"), Contains(" 200 OK"));
  CHECK(ReadAll(silent.front()).empty());  // the oldest has lost its place
}

TEST_CASE("ending the server ends its port and its clients' connections") {
  auto server = StartServer(Plain());
  const std::string address = server->address();
  const UniqueFd silent = Connect(address);
  REQUIRE(silent.valid());
  CHECK_THAT(Ask(address, "GET", "/metrics"), Contains(" 200 OK"));
  server.reset();
  CHECK_FALSE(Connect(address).valid());
  CHECK(ReadAll(silent).empty());
}

// ---- the page and its stream ----

std::string MarkOf(uint64_t change) { return fmt::format("event: update\ndata: {}\n\n", change); }

// A page whose stream brings the changes 1 and 2 and then, in each message, one more.
struct Paged {
  explicit Paged(size_t status_bytes = 8, Duration timeout = seconds(20),
                 Duration stream_time = kMaxStreamTime) {
    MetricsServerOptions options = Plain(timeout);
    options.page.emplace();
    options.page->html = "<p>page</p>";
    options.page->headers = "X-Policy: strict\r\n";
    options.page->changes = [](uint64_t* seen) {
      if (*seen > 0) return MarkOf(++*seen);
      *seen = 2;
      return MarkOf(1) + MarkOf(2);
    };
    options.page->status = [this, status_bytes] {
      ++statuses;
      return "data: " + std::string(status_bytes, 's') + "\n\n";
    };
    options.page->interval = milliseconds(10);
    options.page->stream_time = stream_time;
    server = StartServer(std::move(options));
  }
  const std::string& address() const { return server->address(); }
  UniqueFd Open(int receive_bytes = 0) const {
    UniqueFd fd = Connect(address(), receive_bytes);
    REQUIRE(fd.valid());
    Send(fd, Request("GET", "/events"));
    return fd;
  }

  std::atomic<int> statuses = 0;
  std::unique_ptr<MetricsServer> server;  // destroyed first
};

// Reads until `text` has come, and returns all that came.
std::string ReadUntil(const UniqueFd& fd, const std::string& text) {
  std::string all;
  std::vector<char> buffer(1 << 16);
  while (all.find(text) == std::string::npos) {
    AwaitReadable(fd.get());
    const ssize_t n = recv(fd.get(), buffer.data(), buffer.size(), 0);
    REQUIRE(n > 0);
    all.append(buffer.data(), static_cast<size_t>(n));
  }
  return all;
}

TEST_CASE("the page comes with its headers, the metrics as before, and nothing else") {
  const Paged paged;
  CHECK_THAT(Ask(paged.address(), "GET", "/"),
             StartsWith("HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n") &&
                 Contains("\r\nX-Policy: strict\r\n") &&
                 Contains("\r\nX-Content-Type-Options: nosniff\r\n") &&
                 Contains("\r\nCross-Origin-Resource-Policy: same-origin\r\n") &&
                 Catch::EndsWith("\r\n\r\n<p>page</p>"));
  CHECK_THAT(Ask(paged.address(), "GET", "/metrics"), Contains("refitd_up 1"));
  for (const char* path : {"/index.html", "/events/", "//", "/etc/passwd"}) {
    CHECK_THAT(Ask(paged.address(), "GET", path), StartsWith("HTTP/1.1 404"));
  }
  CHECK_THAT(Ask(paged.address(), "POST", "/events"), StartsWith("HTTP/1.1 405"));
}

TEST_CASE("without a page there is no page and no stream") {
  const auto server = StartServer(Plain());
  for (const char* path : {"/", "/events"}) {
    CHECK_THAT(Ask(server->address(), "GET", path), StartsWith("HTTP/1.1 404"));
  }
}

TEST_CASE("a stream brings all changes that are kept, then each once, in order") {
  const Paged paged;
  const std::string all = ReadUntil(paged.Open(), MarkOf(4));
  CHECK_THAT(all, StartsWith("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n") &&
                      Contains("\r\nCache-Control: no-store\r\n"));
  size_t from = 0;
  for (const uint64_t change : {1, 2, 3, 4}) {
    const size_t at = all.find(MarkOf(change), from);
    REQUIRE(at != std::string::npos);
    CHECK(all.find(MarkOf(change), at + 1) == std::string::npos);
    from = at;
  }
}

TEST_CASE("a slow reader is cut off, and the other pages go on (P4)") {
  // The sockets hold less than one message, which a reader on a busy machine takes within the
  // limit.
  const Paged paged(size_t{2} << 20, kShortLimit);
  const UniqueFd slow = paged.Open(4096);
  UniqueFd quick = paged.Open();
  std::vector<char> buffer(1 << 20);
  while (!LetGo(slow)) {
    AwaitReadable(quick.get());
    if (recv(quick.get(), buffer.data(), buffer.size(), 0) <= 0) quick = paged.Open();
  }
  // The slow reader was sent a part of the first message and no more.
  const std::string got = ReadAll(slow);
  CHECK(got.size() < (size_t{2} << 20));
  CHECK_THAT(got, !Contains(MarkOf(3)));
  CHECK_THAT(ReadUntil(paged.Open(), MarkOf(3)), Contains(MarkOf(2)));
}

TEST_CASE("streams have so many places, which come free, and take no scrape's place") {
  const Paged paged;
  std::vector<UniqueFd> streams;
  for (int i = 0; i < kMaxStreams; ++i) {
    streams.push_back(paged.Open());
    ReadUntil(streams.back(), MarkOf(2));
  }
  CHECK_THAT(Ask(paged.address(), "GET", "/events"), StartsWith("HTTP/1.1 503"));
  CHECK_THAT(Ask(paged.address(), "GET", "/metrics"), Contains(" 200 OK"));
  CHECK_THAT(Ask(paged.address(), "GET", "/"), Contains(" 200 OK"));
  streams.pop_back();
  CHECK(Eventually([&] {
    const UniqueFd again = paged.Open();
    AwaitReadable(again.get());
    std::array<char, 12> head{};
    return recv(again.get(), head.data(), head.size(), MSG_WAITALL) == 12 &&
           std::string_view(head.data(), 12) == "HTTP/1.1 200";
  }));
}

TEST_CASE("a stream ends after its time, so that its reader is asked who it is again") {
  const Paged paged(8, seconds(20), milliseconds(100));
  CHECK_THAT(ReadAll(paged.Open()), Contains(MarkOf(2)));
}

TEST_CASE("in the clear the page is served under no name, so that no other site reads it (P9)") {
  const Paged paged;
  const auto ask = [&](const std::string& path, const std::string& host) {
    return Say(paged.address(), "GET " + path + " HTTP/1.1\r\naccept: */*\r\n" + host + "\r\n\r\n");
  };
  for (const char* host : {"Host: evil.example", "Host: evil.example:9464", "Host: localhost.evil",
                           "Host: 127.0.0.1.evil", "Host:", "Host: [::1", "X-Host: localhost"}) {
    INFO(host);
    CHECK_THAT(ask("/", host), StartsWith("HTTP/1.1 421"));
    CHECK_THAT(ask("/events", host), StartsWith("HTTP/1.1 421"));
    CHECK_THAT(ask("/metrics", host), StartsWith("HTTP/1.1 200"));
  }
  for (const char* host : {"Host: localhost", "host:127.0.0.1:9464", "HOST: [::1]:9464"}) {
    INFO(host);
    CHECK_THAT(ask("/", host), StartsWith("HTTP/1.1 200"));
  }
}

// ---- under TLS ----

constexpr char kScraper[] = "spiffe://prod/prometheus";

// A server's and clients' certificates, signed by one root unless a test says otherwise.
class Certified {
 public:
  std::shared_ptr<const Certificates> IssueFor(const CertificateRequest& request) {
    return Issue(request, authority_, authority_);
  }
  std::shared_ptr<const Certificates> Issue(const std::string& identity) {
    return IssueFor({.uris = {identity}});
  }
  // Issues certificates of a root that the server does not trust.
  std::shared_ptr<const Certificates> IssueElsewhere(const std::string& identity) {
    return Issue({.uris = {identity}}, stranger_, authority_);
  }

 private:
  // LoadCertificates would refuse those that have expired.
  static std::shared_ptr<const Certificates> Issue(const CertificateRequest& request,
                                                   const TestAuthority& signer,
                                                   const TestAuthority& trusted) {
    const IssuedCertificate issued = signer.Issue(request);
    auto made = std::make_shared<Certificates>();
    made->certificate = issued.certificate;
    made->key = issued.key;
    made->roots = trusted.root();
    made->root_count = 1;
    made->identity = IdentityOfPem(issued.certificate);
    return made;
  }

  const TestAuthority authority_{"root"};
  const TestAuthority stranger_{"another root"};
};

// A server over TLS that lets kScraper in.
struct SecureServer {
  explicit SecureServer(std::shared_ptr<const Certificates> own, Duration timeout = seconds(20))
      : certificates(std::move(own)) {
    MetricsServerOptions options = Plain(timeout);
    options.certificates = [this] {
      MutexLock lock(&mutex);
      return certificates;
    };
    options.admit = [this](const std::string& identity) {
      MutexLock lock(&mutex);
      asked.push_back(identity);
      return identity == kScraper ? absl::OkStatus()
                                  : absl::PermissionDeniedError("'" + identity + "' may not");
    };
    options.collect = [this] {
      ++collected;
      return std::string("refitd_up 1\n");
    };
    options.page.emplace();
    options.page->html = "page";
    options.page->changes = [](uint64_t*) { return "changes"; };
    options.page->status = [this] {
      ++collected;
      return "status";
    };
    options.page->stream_time = milliseconds(100);
    options.log = [this](const std::string& line) {
      MutexLock lock(&mutex);
      log += line + "\n";
    };
    server = StartServer(std::move(options));
  }
  bool LogHas(const std::string& text) {
    return Eventually([&] {
      MutexLock lock(&mutex);
      return log.find(text) != std::string::npos;
    });
  }
  const std::string& address() const { return server->address(); }

  Mutex mutex;
  std::shared_ptr<const Certificates> certificates ABSL_GUARDED_BY(mutex);
  std::vector<std::string> asked ABSL_GUARDED_BY(mutex);
  std::string log ABSL_GUARDED_BY(mutex);
  std::atomic<int> collected = 0;
  std::unique_ptr<MetricsServer> server;  // destroyed first
};

TEST_CASE("a scraper with the right certificate gets the metrics, another identity a reason (P9)") {
  Certified certified;
  SecureServer server(certified.Issue("spiffe://prod/refitd/a"));
  std::string presented;
  CHECK_THAT(ScrapeOverTls(server.address(), certified.Issue(kScraper), &presented),
             StartsWith("HTTP/1.1 200 OK\r\n") && Contains("refitd_up 1"));
  CHECK(presented == "spiffe://prod/refitd/a");
  CHECK_THAT(ScrapeOverTls(server.address(), certified.Issue("spiffe://prod/trainer/t")),
             StartsWith("HTTP/1.1 403") && Contains("'spiffe://prod/trainer/t' may not"));
  CHECK_THAT(ScrapeOverTls(server.address(), certified.IssueFor({})), StartsWith("HTTP/1.1 403"));
  CHECK(server.collected == 1);
}

TEST_CASE("who may scrape may look at the page, and nobody else (P9)") {
  Certified certified;
  SecureServer server(certified.Issue("spiffe://prod/refitd/a"));
  const auto own = certified.Issue(kScraper);
  CHECK_THAT(ScrapeOverTls(server.address(), own, nullptr, "/"), Catch::EndsWith("\r\n\r\npage"));
  CHECK_THAT(ScrapeOverTls(server.address(), own, nullptr, "/events"), Contains("changesstatus"));
  const int before = server.collected;
  for (const auto& other : {certified.Issue("spiffe://prod/trainer/t"), certified.IssueFor({})}) {
    for (const char* path : {"/", "/events"}) {
      const std::string answer = ScrapeOverTls(server.address(), other, nullptr, path);
      CHECK_THAT(answer, StartsWith("HTTP/1.1 403") && !Contains("page") && !Contains("status"));
    }
  }
  CHECK(server.collected == before);
}

TEST_CASE("a scraper with a bad certificate gets nothing, and the log says why (P9)") {
  Certified certified;
  SecureServer server(certified.Issue("spiffe://prod/refitd/a"));
  SECTION("another root") {
    CHECK_THAT(ScrapeOverTls(server.address(), certified.IssueElsewhere(kScraper)),
               StartsWith("TLS: "));
  }
  SECTION("expired") {
    CHECK_THAT(ScrapeOverTls(server.address(), certified.IssueFor({.uris = {kScraper},
                                                                   .from_seconds = -7200,
                                                                   .until_seconds = -3600})),
               StartsWith("TLS: "));
  }
  CHECK(server.LogHas("metrics: 127.0.0.1 is refused: TLS: "));
  CHECK(server.collected == 0);
}

TEST_CASE("in the clear, without a certificate, or by an older TLS nobody is served (P9)") {
  Certified certified;
  SecureServer server(certified.Issue("spiffe://prod/refitd/a"));
  CHECK_THAT(Ask(server.address(), "GET", "/metrics"), !Contains("HTTP/1.1"));
  const auto version = GENERATE(TLS1_2_VERSION, TLS1_3_VERSION);
  INFO(version);
  const ContextPtr context(SSL_CTX_new(TLS_client_method()));
  SSL_CTX_set_max_proto_version(context.get(), version);
  const SslPtr ssl(SSL_new(context.get()));
  const UniqueFd fd = Connect(server.address());
  REQUIRE(SSL_set_fd(ssl.get(), fd.get()) == 1);
  const std::string request = Request("GET", "/metrics");
  char byte = 0;
  const bool served = SSL_connect(ssl.get()) == 1 &&
                      SSL_write(ssl.get(), request.data(), static_cast<int>(request.size())) > 0 &&
                      SSL_read(ssl.get(), &byte, 1) > 0;
  CHECK_FALSE(served);
  CHECK(server.collected == 0);
}

TEST_CASE("half a handshake, and a flood of them, cost their own connections alone (P4)") {
  Certified certified;
  SecureServer server(certified.Issue("spiffe://prod/refitd/a"), kShortLimit);
  std::vector<UniqueFd> half;
  for (int i = 0; i < 2 * kMaxMetricsClients; ++i) {
    half.push_back(Connect(server.address()));
    Send(half.back(), std::string("\x16\x03\x01\x02\x00\x01", 6));  // the start of a ClientHello
  }
  const auto scraper = certified.Issue(kScraper);
  CHECK(Eventually([&] {
    return ScrapeOverTls(server.address(), scraper).find(" 200 OK") != std::string::npos;
  }));
  for (const UniqueFd& fd : half) CHECK_THAT(ReadAll(fd), !Contains("HTTP"));
}

TEST_CASE("renewed certificates count from the next handshake on") {
  Certified certified;
  SecureServer server(certified.Issue("spiffe://prod/refitd/a"));
  const auto scraper = certified.Issue(kScraper);
  std::string presented;
  for (const char* identity : {"spiffe://prod/refitd/renewed", "spiffe://prod/refitd/again"}) {
    auto next = certified.Issue(identity);
    {
      MutexLock lock(&server.mutex);
      server.certificates = std::move(next);
    }
    CHECK_THAT(ScrapeOverTls(server.address(), scraper, &presented), Contains(" 200 OK"));
    CHECK(presented == identity);
  }
}

}  // namespace
}  // namespace refitd
