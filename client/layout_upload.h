// RegisterLayout: a client stream of chunks, written one after the other, with a deadline (P4).
#ifndef REFITD_CLIENT_LAYOUT_UPLOAD_H_
#define REFITD_CLIENT_LAYOUT_UPLOAD_H_

#include <stop_token>
#include <vector>

#include "absl/status/status.h"
#include "refitd/v1/engine.grpc.pb.h"
#include "transport/base/ids.h"

namespace refitd::client {

// Sends `chunks` and waits for the daemon's verdict; CANCELLED soon after `stop` was requested.
// Thread-safe.
absl::Status UploadLayout(v1::Engine::StubInterface::async_interface* stub,
                          std::vector<v1::LayoutChunk> chunks, TimePoint deadline,
                          const std::stop_token& stop = {});

}  // namespace refitd::client

#endif  // REFITD_CLIENT_LAYOUT_UPLOAD_H_
