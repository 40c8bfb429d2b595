// What a bare Gloo broadcast costs: the library's own gloo::broadcast between processes, with no
// header, agreement, queue or deadline of ours. A yardstick for benchmarks; no product code uses
// it.
#ifndef REFITD_TRANSPORT_HOST_GLOO_BASELINE_H_
#define REFITD_TRANSPORT_HOST_GLOO_BASELINE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/ids.h"

namespace refitd {

// One rank's end. Not thread-safe: one thread. Gloo writes to sockets without MSG_NOSIGNAL: the
// caller ignores SIGPIPE if a peer may go early.
class GlooBaseline {
 public:
  // Gives this rank's address (bytes) to all and returns everyone's, by rank.
  using ExchangeAddresses =
      std::function<absl::StatusOr<std::vector<std::string>>(const std::string& mine)>;

  // Binds `address` (numeric, "127.0.0.1" for loopback). Blocks until all ranks are connected.
  static absl::StatusOr<std::unique_ptr<GlooBaseline>> Connect(const std::string& address, int rank,
                                                               int size,
                                                               const ExchangeAddresses& exchange,
                                                               Duration timeout);
  virtual ~GlooBaseline() = default;

  // Blocks until this rank's part is done: on the root, until the bytes were handed to the kernel.
  virtual absl::Status Broadcast(void* data, int64_t bytes, int root, Duration timeout) = 0;
};

// For two ranks that share a stream socket or pipe pair: `rank` 0 and 1 send each other what they
// have.
GlooBaseline::ExchangeAddresses ExchangeOverSocket(int fd, int rank);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_HOST_GLOO_BASELINE_H_
