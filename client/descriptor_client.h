// The client's end of the descriptor socket: regions go out, the staging pool comes in.
//
// One request at a time over one connection, made at the first request and again after a failure.
// Every wait has a deadline (P4); a connection whose reply did not come is never used again, so
// that a late reply can't be taken for the reply to another request. Thread-safe.
#ifndef REFITD_CLIENT_DESCRIPTOR_CLIENT_H_
#define REFITD_CLIENT_DESCRIPTOR_CLIENT_H_

#include <stop_token>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "transport/base/ids.h"
#include "transport/base/mutex.h"
#include "transport/base/unique_fd.h"
#include "transport/host/descriptor_format.h"

namespace refitd::client {

struct DescriptorAnswer {
  DescriptorReply reply;
  UniqueFd fd;  // invalid if the reply carries no descriptor
};

class DescriptorClient {
 public:
  // `token` is the lease's, of sizeof(DescriptorRequest::token) bytes.
  DescriptorClient(std::string path, std::string_view token);

  // Sends `request` (the token is filled in) with `fd` if it is valid, and waits for the reply.
  // Errors: the daemon's own; DEADLINE_EXCEEDED; UNAVAILABLE; errors of connect(); CANCELLED once
  // `stop` is requested.
  absl::StatusOr<DescriptorAnswer> Ask(DescriptorRequest request, int fd, TimePoint deadline,
                                       const std::stop_token& stop = {});

 private:
  absl::Status Connect(TimePoint deadline, const std::stop_token& stop)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Send(const DescriptorRequest& request, int fd, TimePoint deadline,
                    const std::stop_token& stop) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<DescriptorAnswer> Receive(TimePoint deadline, const std::stop_token& stop)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Wait(short events, TimePoint deadline, const std::stop_token& stop)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string path_;
  const std::string token_;
  Mutex mutex_;
  UniqueFd socket_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace refitd::client

#endif  // REFITD_CLIENT_DESCRIPTOR_CLIENT_H_
