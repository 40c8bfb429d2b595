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
#include "transport/base/unique_fd.h"
#include "transport/plan/layout.h"

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
  // Tensors of trainers' layouts that no engine need want: names, or prefixes that end with '*'.
  std::vector<std::string> unwanted_tensors{};
};

struct ConnectOptions {
  std::string socket{};  // path of the daemon's unix socket; empty: REFITD_SOCKET or kDefaultSocket
  std::string group{};
  std::optional<GroupSpec> spec{};  // absent: wait for the group
  // "host:port" of the daemon that holds the group; empty: the one at `socket`. At most
  // kMaxCoordinatorBytes; a daemon that serves no other node refuses any (FAILED_PRECONDITION).
  std::string coordinator{};
  // What attaching may take: for the daemon's socket to answer and, without a spec, for the group.
  // With `reattach` also for a daemon, or the way to the group, that goes away or is not there yet
  // while attaching: it is tried again until then. Without it the first such answer is the end.
  std::chrono::milliseconds wait{10'000};
  std::chrono::milliseconds call_margin{
      5'000};            // added to an update's remaining time as the deadline of its calls
  std::string client{};  // free text for status pages
  // Where this member's memory is: a GPU by UUID ("GPU-01234567-89ab-...", as nvidia-smi -L prints
  // it); empty: host memory. A daemon that serves no such GPU refuses it (FAILED_PRECONDITION).
  std::string device{};

  // The CUDA driver, loaded when a staged engine on a GPU attaches, or a trainer on one first
  // leases a slot: both map the staging pool of their GPU. As for dlopen.
  std::string cuda_library{"libcuda.so.1"};

  // Not 0: when the lease is lost because the daemon went away (restarted, killed, silent), attach
  // again to the same socket for so long, with growing pauses, on a thread of this member's own.
  // Memory, regions and the registered layout stay and are made known to the new daemon. The first
  // lease is tried for likewise, but for `wait`. 0: the lease's end is the end; whoever wants to go
  // on attaches anew, an engine with what it knows of its weights (EngineOptions::dirty).
  std::chrono::milliseconds reattach{0};
  // A daemon that is not even heard to be alive for so long counts as lost (P4): gRPC's keepalive.
  // 0: never; else at least kMinSilence.
  std::chrono::milliseconds silence{30'000};
};

inline constexpr std::chrono::milliseconds kMinSilence{5'000};  // daemons take a ping a second
inline constexpr size_t kMaxCoordinatorBytes = 262;             // a host name, a colon, a port

// A whole block of cudaMalloc of this process, on ConnectOptions::device: what cudaIpcGetMemHandle
// gives for any address in it. Offsets count from the block's base.
struct CudaIpcBlock {
  std::string handle{};  // the kCudaIpcHandleBytes of a cudaIpcMemHandle_t
  int64_t bytes = 0;     // at most what the block has
};
inline constexpr size_t kCudaIpcHandleBytes = 64;

// Memory of this process that the daemon has mapped: a sealed memfd, or a GPU's. Thread-safe. The
// mapping here lives as long as the object; the daemon's lives until the lease ends and no copy
// touches it. `id` names the region in this process, for all its leases: what the daemon calls it
// differs.
//
// Device memory stays its owner's, and this library touches it in no way. It must stay allocated as
// long as the region, and while a registered layout names it as long as the trainer or engine: CUDA
// does not define what a free before the daemon closed it does. The destructor therefore waits for
// that, behind whatever the daemon's driver is at, for up to call_margin and 30 s; of host memory
// for up to 1 s, once the member's requests before it on the descriptor socket are answered.
//
// Only a region that goes before its trainer or engine, and that no registered layout names, waits
// so. After them, or after the lease ended, the destructor returns at once, and the daemon closes
// the memory when it comes to it, which nothing here tells. Who frees device memory therefore
// registers a layout without it, lets go of its regions, frees it, and destroys the trainer or
// engine last; else the memory stays allocated to the end of this process.
//
// Nothing orders CUDA's streams and this library's calls: synchronise the streams that wrote the
// weights before Push, Refit and Commit; an engine synchronises its device before Ready, and may
// start work again when it has Committed or Aborted.
class Region {
 public:
  virtual ~Region() = default;
  virtual char* data() const = 0;  // null: device memory
  virtual int64_t bytes() const = 0;
  virtual RegionId id() const = 0;
};

}  // namespace refitd::client

#endif  // REFITD_CLIENT_TYPES_H_
