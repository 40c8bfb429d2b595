// What trainers and engines share in the C++ client. docs/protocol.md has the conversation behind
// it.
#ifndef REFITD_CLIENT_TYPES_H_
#define REFITD_CLIENT_TYPES_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/layout.h"

namespace refitd::client {

// Default of ConnectOptions::socket, unless the environment's REFITD_SOCKET says otherwise.
inline constexpr char kDefaultSocket[] = "/run/refitd/refitd.sock";

// gRPC's target for the unix socket at `path`: a URI, so whatever is not plain in a path is
// escaped.
std::string UnixTarget(std::string_view path);

// As refitd.v1.GroupSpec: the first member that brings it creates the group, later ones must bring
// an equal one, or none.
struct GroupSpec {
  int trainer_ranks = 1;
  int min_instances = 1;
  int64_t slot_bytes = 0;  // 0: the daemon's default
  int slots = 0;           // 0: the daemon's default
  std::vector<std::string> engine_only_tensors{};
};

struct ConnectOptions {
  std::string socket{};  // path of the daemon's unix socket; empty: REFITD_SOCKET or kDefaultSocket
  std::string group{};
  std::optional<GroupSpec> spec{};  // absent: wait for the group
  std::chrono::milliseconds wait{
      10'000};  // for the daemon's socket to answer and, without a spec, for the group
  std::chrono::milliseconds call_margin{
      5'000};            // added to an update's remaining time as the deadline of its calls
  std::string client{};  // free text for status pages
};

// Memory of this process that the daemon has mapped: a sealed memfd. Thread-safe. The mapping here
// lives as long as the object; the daemon's lives until the lease ends and no copy touches it.
class Region {
 public:
  virtual ~Region() = default;
  virtual char* data() const = 0;
  virtual int64_t bytes() const = 0;
  virtual RegionId id() const = 0;
};

}  // namespace refitd::client

#endif  // REFITD_CLIENT_TYPES_H_
