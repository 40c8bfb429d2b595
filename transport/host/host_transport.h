// The host transport: threaded copies between mapped host memory, with digests computed in the
// copy.
//
// A transfer is cut into chunks of source pieces, which the workers divide among themselves. A
// worker goes through a chunk in blocks that fit into the core's caches. For each block it first
// makes the source pass (a digest by the source's own metadata, if verification asks for it), then
// every move that reads the block. So a source is read from memory once, whatever the number of
// destinations.
//
// Verification (P1): kTransfer compares the source pass with the digest of what the copy stored,
// per block and destination; kReadback returns the source pass's sums, which Submit(ReadbackJob)
// compares with the destination's bytes read again. (Under kReadback the first copy of a block is
// its source pass, if the program reads at just the address that the source's metadata gives.)
//
// A program that is malformed or leaves its pieces' memory is refused with INTERNAL, and nothing is
// written. `done` is released right after it returned.
#ifndef REFITD_TRANSPORT_HOST_HOST_TRANSPORT_H_
#define REFITD_TRANSPORT_HOST_HOST_TRANSPORT_H_

#include <memory>

#include "transport/transport.h"

namespace refitd {

// Test seam: lets a test damage memory between the passes. Null in production.
class TransferFaults {
 public:
  virtual ~TransferFaults() = default;
  // Called after the chunk's bytes were stored at `data`.
  virtual void AfterStore(char* /*data*/, int64_t /*bytes*/) {}
};

struct HostTransportOptions {
  int threads = 0;                   // copy workers; 0: one per core, at most 16
  TransferFaults* faults = nullptr;  // must outlive the transport
};

// Makes a host transport, which is thread-safe. Its destructor waits for submitted work to end
// (copies are finite) and calls every `done`.
std::unique_ptr<Transport> MakeHostTransport(const HostTransportOptions& options);

// Returns the digest of `box` (global coordinates) of a piece; `data` is the address of the box's
// first element. Exposed for tests and benchmarks.
uint64_t DigestBox(const char* data, const Dims& strides, const Box& box, const Dims& shape,
                   int element_bytes);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_HOST_HOST_TRANSPORT_H_
