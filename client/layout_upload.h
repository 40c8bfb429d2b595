// RegisterLayout of either role: a client stream of chunks, written one after the other, with a
// deadline (P4); and what a member registered, for all its leases.
#ifndef REFITD_CLIENT_LAYOUT_UPLOAD_H_
#define REFITD_CLIENT_LAYOUT_UPLOAD_H_

#include <grpcpp/support/client_callback.h>

#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <vector>

#include "absl/status/statusor.h"
#include "client/connection.h"
#include "refitd/v1/types.pb.h"
#include "transport/base/ids.h"
#include "transport/plan/layout.h"

namespace refitd::client {

// Starts RegisterLayout on a role's stub.
using StartUpload = std::function<void(grpc::ClientContext*, v1::LayoutRegistered*,
                                       grpc::ClientWriteReactor<v1::LayoutChunk>*)>;

// Sends `chunks` and waits for the daemon's verdict; CANCELLED soon after `stop` was requested.
// Thread-safe.
absl::Status UploadLayout(const StartUpload& start, std::vector<v1::LayoutChunk> chunks,
                          TimePoint deadline, const std::stop_token& stop = {});

// Registering is refused during an update, never delayed by one; checking millions of pieces takes
// a moment.
inline constexpr std::chrono::seconds kRegisterLimit{60};

// The member's registrations: every one has a greater binding generation than those before,
// whatever the lease. Not thread-safe.
class Registration {
 public:
  // `keep`: the layout, and the regions of its pieces, are kept for daemons to come.
  Registration(std::shared_ptr<Regions> regions, bool keep)
      : regions_(std::move(regions)), keep_(keep) {}

  // OK: the daemon of `connection` has it; the binding generation there.
  absl::StatusOr<uint64_t> Register(Connection* connection, const StartUpload& start,
                                    Layout layout);
  // The kept layout with another daemon; 0: there is none. CANCELLED soon after `stop` was
  // requested.
  absl::StatusOr<uint64_t> RegisterAgain(Connection* connection, const StartUpload& start,
                                         const std::stop_token& stop);

 private:
  absl::StatusOr<uint64_t> Upload(Connection* connection, const StartUpload& start, Layout layout,
                                  const std::stop_token& stop);

  const std::shared_ptr<Regions> regions_;
  const bool keep_;
  uint64_t binding_generation_ = 0;  // the last one used
  std::optional<Layout> layout_;
  std::vector<std::shared_ptr<Region>> layout_regions_;
};

}  // namespace refitd::client

#endif  // REFITD_CLIENT_LAYOUT_UPLOAD_H_
