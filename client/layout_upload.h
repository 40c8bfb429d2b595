// The RegisterLayout call of trainers and engines: a client stream of chunks, written one after the
// other, with a deadline (P4). Also the memory of what a member registered, for all its leases.
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

// Sends `chunks` and waits for the daemon's answer; CANCELLED soon after `stop` was requested.
// Thread-safe.
absl::StatusOr<v1::LayoutRegistered> UploadLayout(const StartUpload& start,
                                                  std::vector<v1::LayoutChunk> chunks,
                                                  TimePoint deadline,
                                                  const std::stop_token& stop = {});

// The limit of a registration. An update makes the daemon refuse a registration, never delay it;
// the time is for checking millions of pieces.
inline constexpr std::chrono::seconds kRegisterLimit{60};

// The member's registrations. Each has a greater binding generation than those before it, also of
// earlier leases. Not thread-safe.
class Registration {
 public:
  // `keep`: keep the layout and the regions of its pieces, to register them with a later daemon.
  Registration(std::shared_ptr<Regions> regions, bool keep)
      : regions_(std::move(regions)), keep_(keep) {}

  struct Registered {
    uint64_t binding_generation = 0;
    bool kept = false;  // LayoutRegistered.kept
  };
  // Registers `layout` with the daemon of `connection`.
  absl::StatusOr<Registered> Register(Connection* connection, const StartUpload& start,
                                      Layout layout);
  // Registers the kept layout with another daemon; returns the binding generation there, or 0 if no
  // layout is kept. CANCELLED soon after `stop` was requested.
  absl::StatusOr<uint64_t> RegisterAgain(Connection* connection, const StartUpload& start,
                                         const std::stop_token& stop);

 private:
  absl::StatusOr<Registered> Upload(Connection* connection, const StartUpload& start, Layout layout,
                                    const std::stop_token& stop);

  const std::shared_ptr<Regions> regions_;
  const bool keep_;
  uint64_t binding_generation_ = 0;  // the last one used
  std::optional<Layout> layout_;
  std::vector<std::shared_ptr<Region>> layout_regions_;
};

}  // namespace refitd::client

#endif  // REFITD_CLIENT_LAYOUT_UPLOAD_H_
