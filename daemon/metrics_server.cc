#include "daemon/metrics_server.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <map>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "daemon/sockets/tcp_listener.h"
#include "transport/base/status.h"
#include "transport/base/unique_fd.h"
#include "transport/sockets/connection.h"
#include "transport/sockets/host_address.h"
#include "transport/sockets/tls_context.h"

namespace refitd {
namespace {

// How long the listeners rest when the process is out of descriptors.
constexpr Duration kRest = std::chrono::milliseconds(200);
// How many bytes behind the request are read at most before the connection is closed. Closing a
// socket with unread bytes could take the answer from the client.
constexpr int64_t kMaxUnreadBytes = 64 << 10;

TimePoint Now() { return std::chrono::steady_clock::now(); }

// Sent with every answer, so that browsers don't use it as a script, style sheet or image in
// another site's page.
constexpr std::string_view kEveryAnswer =
    "X-Content-Type-Options: nosniff\r\nCross-Origin-Resource-Policy: same-origin\r\n"
    "Connection: close\r\n";
constexpr std::string_view kText = "text/plain; version=0.0.4; charset=utf-8";

std::string Answer(std::string_view status, std::string_view more, const std::string& body,
                   std::string_view type = kText) {
  return fmt::format("HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\n{}{}\r\n{}", status,
                     type, body.size(), kEveryAnswer, more, body);
}

// Begins a stream. A browser that loses the stream asks again after the time of `retry`.
std::string StreamHead() {
  return fmt::format(
      "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\n{}\r\n"
      "retry: 2000\n\n",
      kEveryAnswer);
}

// The value of a request's header `Host` without its port.
std::string HostOf(std::string_view request) {
  constexpr std::string_view kName = "\r\nhost:";
  std::string lower(request);
  absl::AsciiStrToLower(&lower);
  const size_t at = lower.find(kName);
  if (at == std::string::npos) return "";
  std::string value = lower.substr(at + kName.size());
  value.resize(value.find("\r\n"));  // a request has an empty line at its end
  absl::StripAsciiWhitespace(&value);
  return value.substr(0, value.starts_with('[') ? value.find(']') + 1 : value.find(':'));
}

// Whether the request names this machine by an address or as localhost. A site whose name leads to
// this server's address could have a browser read the page for it, and is refused by its name.
bool NamesAddress(std::string_view request) {
  std::string host = HostOf(request);
  std::array<char, sizeof(in6_addr)> ip{};
  if (host == "localhost" || inet_pton(AF_INET, host.c_str(), ip.data()) == 1) return true;
  if (!host.starts_with('[') || !host.ends_with(']')) return false;
  host = host.substr(1, host.size() - 2);
  return inet_pton(AF_INET6, host.c_str(), ip.data()) == 1;
}

// The peer's address, for people.
std::string PeerOf(int fd) {
  sockaddr_storage name{};
  socklen_t length = sizeof(name);
  auto* const raw = reinterpret_cast<sockaddr*>(&name);
  if (getpeername(fd, raw, &length) != 0) return "an unknown address";
  const absl::StatusOr<HostAddress> host = FromSockaddr(raw);
  return host.ok() ? host->Text() : "an unknown address";
}

}  // namespace

class MetricsServer::Loop {
 public:
  Loop(MetricsServerOptions options, std::vector<TcpListener> listeners)
      : options_(std::move(options)), listeners_(std::move(listeners)) {
    if (options_.certificates != nullptr) tls_.emplace(options_.certificates);
  }
  ~Loop() {
    if (!thread_.joinable()) return;
    eventfd_write(stop_.get(), 1);
    thread_.join();
  }

  absl::Status Start() {
    epoll_.Reset(epoll_create1(EPOLL_CLOEXEC));
    stop_.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!epoll_.valid() || !stop_.valid()) {
      return absl::ResourceExhaustedError("out of descriptors for metrics");
    }
    bool watched = Watch(stop_.get(), EPOLLIN);
    for (const TcpListener& listener : listeners_) {
      watched = watched && Watch(listener.socket.get(), EPOLLIN);
    }
    if (!watched) return absl::ResourceExhaustedError("no memory to wait for metrics' clients");
    thread_ = std::thread([this] { Run(); });
    return absl::OkStatus();
  }

 private:
  //   kHandshake --> kRequest --> kAnswer --> kEnding --> closed
  //                          \--> kStream --> closed
  // An error, or a deadline that passes, closes a connection in any state.
  enum class State { kHandshake, kRequest, kAnswer, kEnding, kStream };
  struct Client {
    Connection connection;
    State state = State::kHandshake;
    TimePoint since;
    TimePoint deadline;
    std::string in;   // the part of the request that has come
    std::string out;  // the answer, or the message of a stream; empty: a stream waits for one
    size_t sent = 0;  // of `out`
    int64_t unread = 0;
    uint64_t seen = 0;  // a stream's mark among the changes
    TimePoint until{};  // when the stream ends
  };

  // Waits for the events from now on. False: the kernel has no memory for that.
  bool Watch(int fd, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.fd = fd;
    return epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
  }
  void SetListening(bool listening) {
    for (const TcpListener& listener : listeners_) {
      epoll_event event{};
      event.events = listening ? uint32_t{EPOLLIN} : 0;
      event.data.fd = listener.socket.get();
      REFITD_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener.socket.get(), &event) == 0);
    }
  }

  void Run() {
    pthread_setname_np(pthread_self(), "refitd-metrics");
    sigset_t sigpipe;  // OpenSSL writes without MSG_NOSIGNAL, so the thread blocks SIGPIPE
    sigemptyset(&sigpipe);
    sigaddset(&sigpipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &sigpipe, nullptr);
    std::array<epoll_event, 64> events{};
    for (;;) {
      const int count = epoll_wait(epoll_.get(), events.data(), events.size(), TimeoutMs());
      for (int i = 0; i < count; ++i) {
        const int fd = events[static_cast<size_t>(i)].data.fd;
        if (fd == stop_.get()) return;
        if (const auto client = clients_.find(fd); client != clients_.end()) {
          Advance(client);
        } else {
          Accept(fd);
        }
      }
      CloseLate();
      if (options_.page.has_value() && next_message_ <= Now()) SendMessages();
    }
  }

  // The milliseconds until the next deadline; -1: there is none.
  int TimeoutMs() const {
    std::optional<TimePoint> next = rests_until_;
    for (const auto& [fd, client] : clients_) {
      next = std::min(next.value_or(client.deadline), client.deadline);
      if (Waits(client)) next = std::min(*next, next_message_);
    }
    if (!next.has_value()) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(*next - Now());
    return static_cast<int>(std::clamp<int64_t>(left.count(), 0, INT_MAX));
  }

  void CloseLate() {
    const TimePoint now = Now();
    std::erase_if(clients_, [now](const auto& entry) { return entry.second.deadline <= now; });
    if (rests_until_.has_value() && *rests_until_ <= now) {
      rests_until_.reset();
      SetListening(true);
    }
  }

  // An event may be stale: an earlier event of the same round may have closed its descriptor, whose
  // number may be in use again. So a listener may have no connection, and a client nothing to read;
  // neither is an error.
  void Accept(int listener) {
    if (std::none_of(listeners_.begin(), listeners_.end(), [listener](const TcpListener& each) {
          return each.socket.get() == listener;
        })) {
      return;
    }
    UniqueFd fd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd.valid()) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        SetListening(false);
        rests_until_ = Now() + kRest;
      }
      return;
    }
    if (clients_.size() >= kMaxMetricsClients && !MakePlace()) return;
    SslPtr ssl;
    if (tls_.has_value()) {
      absl::StatusOr<SslPtr> made = tls_->Accept(fd.get());
      if (!made.ok()) return Log("metrics: " + Message(made.status()));
      ssl = *std::move(made);
    }
    const int number = fd.get();
    if (!Watch(number, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET)) return;
    Client client;
    client.connection = Connection(std::move(fd), std::move(ssl));
    client.since = Now();
    client.deadline = client.since + options_.timeout;
    Advance(clients_.insert_or_assign(number, std::move(client)).first);
  }

  // Closes the oldest connection that has no answer yet. False: there is none.
  bool MakePlace() {
    auto oldest = clients_.end();
    for (auto at = clients_.begin(); at != clients_.end(); ++at) {
      if (at->second.state >= State::kAnswer) continue;
      if (oldest == clients_.end() || at->second.since < oldest->second.since) oldest = at;
    }
    if (oldest == clients_.end()) return false;
    clients_.erase(oldest);
    return true;
  }

  using Place = std::map<int, Client>::iterator;

  // Takes step after step until the connection would block; closes the connection at its end.
  void Advance(Place at) {
    for (;;) {
      const absl::StatusOr<bool> went = Step(&at->second);
      if (went.ok() && *went) continue;
      if (!went.ok()) clients_.erase(at);
      return;
    }
  }

  // False: the client must do something first. Not OK: the connection is to be closed.
  absl::StatusOr<bool> Step(Client* client) {
    switch (client->state) {
      case State::kHandshake:
        return Handshake(client);
      case State::kRequest:
        return Receive(client);
      case State::kAnswer:
        return Send(client);
      case State::kEnding:
        return Drain(client);
      case State::kStream:
        return client->out.empty() ? Drain(client) : SendMessage(client);
    }
    REFITD_CHECK(false);
    return false;
  }

  absl::StatusOr<bool> Handshake(Client* client) {
    absl::StatusOr<bool> done = client->connection.Handshake();
    if (done.ok() && *done) client->state = State::kRequest;
    if (absl::IsUnauthenticated(done.status())) {
      Log(fmt::format("metrics: {} is refused: {}", PeerOf(client->connection.fd()),
                      Message(done.status())));
    }
    return done;
  }

  absl::StatusOr<bool> Receive(Client* client) {
    std::array<char, 4096> buffer{};
    REFITD_ASSIGN_OR_RETURN(
        const int64_t bytes,
        client->connection.Read(buffer.data(), static_cast<int64_t>(buffer.size())));
    if (bytes == 0) return false;
    client->in.append(buffer.data(), static_cast<size_t>(bytes));
    if (client->in.find("\r\n\r\n") != std::string::npos) {
      client->state = State::kAnswer;
      client->out = AnswerTo(client);
    } else if (client->in.size() > kMaxMetricsRequestBytes) {
      client->state = State::kAnswer;
      client->out = Answer("431 Request Header Fields Too Large", "", "the request is too long\n");
    } else {
      return true;
    }
    client->deadline = Now() + options_.timeout;
    return true;
  }

  std::string AnswerTo(Client* client) {
    if (options_.admit != nullptr) {
      const absl::Status admitted = options_.admit(client->connection.PeerIdentity());
      if (!admitted.ok()) return Answer("403 Forbidden", "", Message(admitted) + "\n");
    }
    const std::string_view line = std::string_view(client->in).substr(0, client->in.find("\r\n"));
    const size_t method = line.find(' ');
    const size_t target = line.rfind(' ');
    if (method == std::string_view::npos || target <= method ||
        !line.substr(target + 1).starts_with("HTTP/1.")) {
      return Answer("400 Bad Request", "", "no request of HTTP/1\n");
    }
    if (line.substr(0, method) != "GET") {
      return Answer("405 Method Not Allowed", "Allow: GET\r\n", "only GET is served\n");
    }
    std::string_view path = line.substr(method + 1, target - method - 1);
    path = path.substr(0, path.find('?'));
    if (path == "/metrics") return Answer("200 OK", "", options_.collect());
    if (!options_.page.has_value()) return Answer("404 Not Found", "", "only /metrics is served\n");
    if (path != "/" && path != "/events") return Answer("404 Not Found", "", "no such page\n");
    if (!tls_.has_value() && !NamesAddress(client->in)) {
      return Answer("421 Misdirected Request", "",
                    "without TLS the page is served by address or as localhost, under no name\n");
    }
    if (path == "/events") return BeginStream(client);
    return Answer("200 OK", options_.page->headers, options_.page->html,
                  "text/html; charset=utf-8");
  }

  // ---- streams ----

  static bool Waits(const Client& client) {
    return client.state == State::kStream && client.out.empty();
  }

  std::string BeginStream(Client* client) {
    const auto open = std::count_if(clients_.begin(), clients_.end(), [](const auto& entry) {
      return entry.second.state == State::kStream;
    });
    if (open >= kMaxStreams) {
      return Answer("503 Service Unavailable", "",
                    fmt::format("{} pages are open already\n", kMaxStreams));
    }
    setsockopt(client->connection.fd(), SOL_SOCKET, SO_SNDBUF, &kStreamSocketBytes,
               sizeof(kStreamSocketBytes));
    client->state = State::kStream;
    client->until = Now() + options_.page->stream_time;
    if (next_message_ <= Now()) next_message_ = Now() + options_.page->interval;
    return StreamHead() + options_.page->changes(&client->seen) + options_.page->status();
  }

  // Gives every stream whose reader has taken the last message the next one.
  void SendMessages() {
    const TimePoint began = Now();
    std::optional<std::string> status;
    for (auto at = clients_.begin(); at != clients_.end();) {
      const auto each = at++;  // Advance may erase it
      if (!Waits(each->second)) continue;
      if (!status.has_value()) status = options_.page->status();
      each->second.out = options_.page->changes(&each->second.seen) + *status;
      each->second.deadline = Now() + options_.timeout;
      Advance(each);
    }
    next_message_ = Now() + std::max(options_.page->interval, 9 * (Now() - began));
  }

  // False: the connection takes nothing now.
  static absl::StatusOr<bool> Write(Client* client) {
    const std::span<const char> rest = std::span<const char>(client->out).subspan(client->sent);
    REFITD_ASSIGN_OR_RETURN(const int64_t bytes, client->connection.Write({}, rest));
    client->sent += static_cast<size_t>(bytes);
    return bytes > 0;
  }

  static absl::StatusOr<bool> SendMessage(Client* client) {
    REFITD_ASSIGN_OR_RETURN(const bool wrote, Write(client));
    if (client->sent < client->out.size()) return wrote;
    client->out = std::string();
    client->sent = 0;
    client->deadline = client->until;
    return true;
  }

  static absl::StatusOr<bool> Send(Client* client) {
    REFITD_ASSIGN_OR_RETURN(const bool wrote, Write(client));
    if (client->sent < client->out.size()) return wrote;
    shutdown(client->connection.fd(), SHUT_WR);
    client->state = State::kEnding;
    return true;
  }

  static absl::StatusOr<bool> Drain(Client* client) {
    std::array<char, 4096> buffer{};
    REFITD_ASSIGN_OR_RETURN(
        const int64_t bytes,
        client->connection.Read(buffer.data(), static_cast<int64_t>(buffer.size())));
    client->unread += bytes;
    if (client->unread > kMaxUnreadBytes) return absl::UnavailableError("it sends on");
    return bytes > 0;
  }

  void Log(const std::string& line) const {
    if (options_.log != nullptr) options_.log(line);
  }

  const MetricsServerOptions options_;
  const std::vector<TcpListener> listeners_;
  std::optional<TlsContexts> tls_;
  UniqueFd epoll_;
  UniqueFd stop_;  // an event counter

  // Used by the thread alone.
  std::map<int, Client> clients_;  // by descriptor
  std::optional<TimePoint> rests_until_;
  TimePoint next_message_{};  // of the streams

  std::thread thread_;
};

MetricsServer::MetricsServer(std::unique_ptr<Loop> loop) : loop_(std::move(loop)) {}
MetricsServer::~MetricsServer() = default;

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(MetricsServerOptions options) {
  absl::StatusOr<std::vector<TcpListener>> listeners = ListenTcp(options.address);
  if (!listeners.ok()) {
    return Error(absl::StatusCode::kAlreadyExists, "can't listen for metrics on {}",
                 Message(listeners.status()));
  }
  const std::string address = listeners->front().address;
  auto loop = std::make_unique<Loop>(std::move(options), *std::move(listeners));
  REFITD_RETURN_IF_ERROR(loop->Start());
  auto server = std::unique_ptr<MetricsServer>(new MetricsServer(std::move(loop)));
  server->address_ = address;
  return server;
}

}  // namespace refitd
