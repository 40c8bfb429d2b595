// A bare Gloo broadcast to compare with in benchmarks: the library's own gloo::broadcast between
// processes, without our headers, agreement, queues and deadlines. No product code uses it.
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

// One rank's end. Not thread-safe. Gloo writes to sockets without MSG_NOSIGNAL, so the caller must
// ignore SIGPIPE if a peer may end early.
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

// An ExchangeAddresses for ranks 0 and 1, which send each other their addresses over a stream
// socket or pipe pair.
GlooBaseline::ExchangeAddresses ExchangeOverSocket(int fd, int rank);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_HOST_GLOO_BASELINE_H_
