// One scrape of a daemon's metrics (daemon/metrics_server.h).
//
// Thread-safe. SIGPIPE must be blocked or ignored.
#ifndef REFITD_DAEMON_REFITCTL_SCRAPE_H_
#define REFITD_DAEMON_REFITCTL_SCRAPE_H_

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "transport/tls/certificates.h"

namespace refitd {

inline constexpr size_t kMaxScrapeBytes = 16 << 20;

// The answer to GET /metrics at "IP:PORT", with its head. `own`: certificates for TLS; null: plain
// HTTP. INVALID_ARGUMENT: the address. UNAVAILABLE: nobody answers in time (P4).
// RESOURCE_EXHAUSTED: the answer is larger than kMaxScrapeBytes.
absl::StatusOr<std::string> Scrape(const std::string& address,
                                   const std::shared_ptr<const Certificates>& own,
                                   std::chrono::milliseconds limit);

}  // namespace refitd

#endif  // REFITD_DAEMON_REFITCTL_SCRAPE_H_
