// Serves GET /metrics to Prometheus over HTTP/1.1, and to browsers, if there is a page, GET / and
// the stream of server-sent events GET /events: under mutual TLS (P9), or in the clear where the
// configuration says so.
//
// Invariants
//  1. One thread does all, and never blocks on a client.
//  2. At most kMaxMetricsClients connections are open. When all places are taken, the newest
//     connection takes the place of the oldest one that is not being answered; if all are being
//     answered, it is closed.
//  3. P4: a client has `timeout` from its connection to the end of its request, its handshake
//     included, and as long again to read the answer. Then its connection is closed. A reader of a
//     stream has as long for each message, and gets the next one only after it has taken the last:
//     a slow reader costs one message of memory, and misses those in between.
//  4. P10: only a request's first line is looked at. A request has no body and at most
//     kMaxMetricsRequestBytes. Each connection serves one request.
//  5. Under TLS, handshakes take the certificates of the moment, without resumption, and every
//     request is shown to `admit` before metrics are collected. A stream ends after
//     kMaxStreamTime, so that its reader shows its certificate again.
//  6. At most kMaxStreams streams are open, so that scrapes find a place.
#ifndef REFITD_DAEMON_METRICS_SERVER_H_
#define REFITD_DAEMON_METRICS_SERVER_H_

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/ids.h"
#include "transport/tls/certificates.h"

namespace refitd {

inline constexpr int kMaxMetricsClients = 32;
inline constexpr size_t kMaxMetricsRequestBytes = 8192;
inline constexpr std::chrono::seconds kMetricsTimeout{5};
inline constexpr int kMaxStreams = 8;
// The bytes of a stream that the kernel may hold for a reader.
inline constexpr int kStreamSocketBytes = 256 << 10;
inline constexpr std::chrono::minutes kMaxStreamTime{10};
// The time between two messages of a stream. It grows with the time that a message takes to make,
// so that streams take at most a tenth of one processor.
inline constexpr std::chrono::seconds kStreamInterval{1};

// A page and the stream behind it. Its functions run on the server's thread.
struct MetricsPage {
  std::string html;
  std::string headers;  // of the answer with `html`; each line has its end
  // The events since `*seen`, which it moves on; 0: since the first that is kept.
  std::function<std::string(uint64_t* seen)> changes;
  // The event that every message ends with.
  std::function<std::string()> status;
  Duration interval = kStreamInterval;
  Duration stream_time = kMaxStreamTime;
};

struct MetricsServerOptions {
  std::string address;  // "HOST:PORT", checked by LoadConfig; port 0 takes a free port
  // The body of an answer, in Prometheus' text format. Runs on the server's thread.
  std::function<std::string()> collect;
  // Gives the certificates of the moment. Null: no TLS.
  std::function<std::shared_ptr<const Certificates>()> certificates{};
  // Tells whether a client with a certificate of that identity may read the metrics. `identity` is
  // empty if the certificate gives none, or without TLS. The reason of a refusal is sent to the
  // client. Runs on the server's thread. Null: everybody may.
  std::function<absl::Status(const std::string& identity)> admit{};
  // Takes a line for the log, which anybody who reaches the port can cause. Null: no log.
  std::function<void(const std::string& line)> log{};
  std::optional<MetricsPage> page{};
  Duration timeout = kMetricsTimeout;
};

class MetricsServer {
 public:
  // All that the options' functions use must outlive the server. ALREADY_EXISTS: the port is in
  // use, or this machine lacks the address.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(MetricsServerOptions options);
  // Closes all connections and joins the thread.
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  // "HOST:PORT" with the port in use.
  const std::string& address() const { return address_; }

 private:
  class Loop;
  explicit MetricsServer(std::unique_ptr<Loop> loop);
  const std::unique_ptr<Loop> loop_;
  std::string address_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_METRICS_SERVER_H_
