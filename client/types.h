// Types that trainers and engines share in the C++ client. docs/protocol.md has the conversation
// behind it.
#ifndef REFITD_CLIENT_TYPES_H_
#define REFITD_CLIENT_TYPES_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/unique_fd.h"
#include "transport/plan/layout.h"

namespace refitd::client {

// Default of ConnectOptions::socket, unless the environment's REFITD_SOCKET says otherwise.
inline constexpr char kDefaultSocket[] = "/run/refitd/refitd.sock";

// gRPC's target for the unix socket at `path`. The target is a URI, so special characters of the
// path are escaped.
std::string UnixTarget(std::string_view path);

// The fields mean what those of refitd.v1.GroupSpec mean. The first member that brings a spec
// creates the group; later members must bring an equal spec, or none.
struct GroupSpec {
  int trainer_ranks = 1;
  int min_instances = 1;
  int64_t slot_bytes = 0;  // 0: the daemon's default
  int slots = 0;           // 0: the daemon's default
  // Patterns of tensors' names: '*' stands for any characters, '?' for one.
  std::vector<std::string> engine_only_tensors{};
  // Tensors that trainers may push or register though no engine wants them; patterns too.
  std::vector<std::string> unwanted_tensors{};
  // How far an instance's version may be behind the group's while the instance counts as ready.
  int64_t max_lag = 0;
  // Bytes cross between daemons encrypted or not at all; such a group has no GPUs over several
  // daemons. FAILED_PRECONDITION from attaching: a daemon of the group can't encrypt.
  bool encrypted_data = false;
  // How long after a commit instances with arenas keep the version before in their other side, for
  // Trainer::Rollback: the next update is not staged until then. 0 to 604,800.
  int64_t hold_previous_seconds = 0;
  // How many seconds a daemon keeps the arenas of an engine rank whose lease has ended, if it
  // attached with EngineOptions::restore: 0 to 86,400; 0: not at all.
  int keep_seconds = 600;
};

// Certificates for a daemon over TCP: paths of PEM files. They are read for each lease anew.
struct TlsOptions {
  std::string certificate{};  // this member's, and the rest of its chain
  std::string key{};          // without a password
  std::string roots{};        // those that sign daemons' certificates
  // The identity that the daemon must have, as a pattern: "spiffe://DOMAIN/PATH",
  // "spiffe://DOMAIN/PATH/*", "dns:NAME" or "dns:*.DOMAIN". Empty: its certificate must be for the
  // host of the address.
  std::string server{};
};

struct ConnectOptions {
  std::string socket{};  // path of the daemon's unix socket; empty: REFITD_SOCKET or kDefaultSocket
  std::string group{};
  std::optional<GroupSpec> spec{};  // absent: wait for the group
  // "host:port" of the daemon that holds the group, its coordinator; empty: the daemon at `socket`.
  // It is one name, which the daemon at `socket` resolves anew whenever it joins the group: whoever
  // answers to it then makes the group again from what members bring. A daemon that serves no other
  // node refuses any address (FAILED_PRECONDITION).
  std::string coordinator{};
  // How long attaching may wait: for the daemon's socket to answer and, without a spec, for the
  // group to be created. With `reattach`, attaching is also tried again for this long while the
  // daemon, or the way to the group, is not there yet or goes away; without `reattach` the first
  // such answer is an error.
  std::chrono::milliseconds wait{10'000};
  // Added to an update's remaining time as the deadline of its calls.
  std::chrono::milliseconds call_margin{5'000};
  std::string client{};  // free text for status pages
  // The device of this member's memory: a GPU by UUID ("GPU-01234567-89ab-...", as nvidia-smi -L
  // prints it); empty: host memory. A daemon that does not serve that GPU refuses the member
  // (FAILED_PRECONDITION).
  std::string device{};

  // The name of the CUDA driver library, for dlopen(). It is loaded when a loader engine on a GPU
  // attaches, or when a trainer on a GPU first leases a slot: both map the staging pool of their
  // GPU.
  std::string cuda_library{"libcuda.so.1"};

  // Not 0: when the lease is lost because the daemon went away (restarted, killed, silent), try for
  // this long to attach again to the same socket, with growing pauses, on a thread of this member's
  // own. Memory, regions and the registered layout stay and are made known to the new daemon. The
  // first lease is tried for in the same way, for as long as `wait`. 0: the member does not attach
  // again; to go on, make a new member. A new Engine must be told what its memory holds
  // (EngineOptions::held_version or dirty).
  std::chrono::milliseconds reattach{0};
  // A daemon that does not answer gRPC's keepalive pings for this long counts as lost (P4). 0:
  // never; else at least kMinSilence.
  std::chrono::milliseconds silence{30'000};

  // "HOST:PORT" of the daemon, in place of `socket`. Over TCP nothing shares memory: no regions and
  // no slots, so trainers push inline bytes.
  std::string address{};
  TlsOptions tls{};       // empty fields: REFITD_TLS_CERTIFICATE, _KEY, _ROOTS, _SERVER
  bool insecure = false;  // TCP without TLS is allowed
};

inline constexpr std::chrono::milliseconds kMinSilence{5'000};  // daemons accept one ping a second
inline constexpr size_t kMaxCoordinatorBytes = 262;             // a host name, a colon, a port

// A whole block that this process allocated with cudaMalloc on ConnectOptions::device, named by
// what cudaIpcGetMemHandle gives for any address in it. Offsets count from the block's base.
struct CudaIpcBlock {
  std::string handle{};  // the kCudaIpcHandleBytes of a cudaIpcMemHandle_t
  int64_t bytes = 0;     // at most the block's size
};
inline constexpr size_t kCudaIpcHandleBytes = 64;

// Memory of this process that the daemon has mapped: a sealed memfd, or a GPU's. Thread-safe. This
// process's mapping lives as long as the object; the daemon's mapping lives until the lease ended
// and no copy touches it. `id` names the region in this process, through all leases; the daemon has
// another id for it.
//
// The caller keeps owning device memory, and this library never touches it. It must stay allocated
// as long as the region exists; if a registered layout names the region, as long as the trainer or
// engine exists. The reason: CUDA does not define what happens if memory is freed before the daemon
// closed it. The destructor therefore waits until the daemon has closed the memory, for up to
// call_margin and 30 s, since the daemon's driver may be busy; for a region of host memory it waits
// up to 1 s, once the member's earlier requests on the descriptor socket are answered.
//
// The destructor waits only if the region is destroyed before its trainer or engine, and if no
// registered layout names the region. In all other cases, and after the lease ended, it returns at
// once, and the daemon closes the memory at some later time, which this library can't tell. To free
// device memory safely, register a layout without it, let go of its regions, free it, and destroy
// the trainer or engine last; otherwise keep the memory allocated to the end of this process.
//
// This library's calls are not ordered with CUDA's streams: synchronise the streams that wrote the
// weights before Push, Refit and Commit; an engine synchronises its device before Ready, and may
// start work again when it has Committed or Aborted.
class Region {
 public:
  virtual ~Region() = default;
  virtual char* data() const = 0;  // null: device memory that is no arena
  virtual int64_t bytes() const = 0;
  virtual RegionId id() const = 0;
};

// The part of Trainer and Engine by which memory becomes regions.
class SharesMemory {
 public:
  virtual ~SharesMemory() = default;

  // Makes a region of new shared host memory, which a trainer's buckets can name as their source,
  // and in which an engine's parameters can live.
  virtual absl::StatusOr<std::shared_ptr<Region>> NewRegion(int64_t bytes) = 0;
  // Makes a region of [0, bytes) of an existing memfd, which must be made with MFD_ALLOW_SEALING,
  // be sealed against shrinking (fcntl F_ADD_SEALS, F_SEAL_SHRINK) and be open for reading and
  // writing. The client maps it too. Errors: INVALID_ARGUMENT not a memfd, of huge pages, not
  // sealed, or smaller than `bytes`; PERMISSION_DENIED not open for reading and writing; those of
  // docs/descriptor_socket.md.
  virtual absl::StatusOr<std::shared_ptr<Region>> AddMemfd(UniqueFd memfd, int64_t bytes) = 0;

  // Makes a region of memory of ConnectOptions::device, which the caller keeps allocated (see
  // Region): a block of cudaMalloc, or `bytes` of cuMemCreate exported as a POSIX descriptor
  // (torch's expandable segments, ncclMemAlloc). Buckets and layouts name it as any other region;
  // the daemon writes an engine's. Errors: as refitd.v1.Trainer.RegisterRegion; those of
  // docs/descriptor_socket.md. `address`: of exported memory in this process, by which the daemon
  // recognises memory of which a trainer and an engine of this process have other parts; 0: not
  // told.
  absl::StatusOr<std::shared_ptr<Region>> AddCudaRegion(const CudaIpcBlock& block) {
    return AddDeviceBlock(block.handle, block.bytes);
  }
  absl::StatusOr<std::shared_ptr<Region>> AddCudaRegion(UniqueFd vmm, int64_t bytes,
                                                        uint64_t address = 0) {
    return AddDeviceMemory(std::move(vmm), bytes, address);
  }

 protected:
  // The same for memory of any device that the daemon serves: a block that its driver's handle
  // names, or memory that its driver exported as a descriptor.
  virtual absl::StatusOr<std::shared_ptr<Region>> AddDeviceBlock(const std::string& handle,
                                                                 int64_t bytes) = 0;
  virtual absl::StatusOr<std::shared_ptr<Region>> AddDeviceMemory(UniqueFd exported, int64_t bytes,
                                                                  uint64_t address) = 0;
};

// ---- what is pushed, and what loader engines get of it ----

// A staging slot to pack one bucket into. The slot is the daemon's again when the bucket was
// pushed, or when this object is destroyed without a push. It is memory of ConnectOptions::device:
// on a GPU `data` is an address for kernels and copies of this process on that GPU, and not for the
// host; the device work that packs must have ended before the slot is pushed or given back.
class LeasedSlot {
 public:
  virtual ~LeasedSlot() = default;
  virtual char* data() const = 0;
  virtual int64_t bytes() const = 0;
};

// A trainer pushes one bucket at a time: tensors, whole or the parts given by `ranges`, and the
// place of their bytes.
struct Bucket {
  std::vector<TensorSpec> tensors;
  std::vector<TensorRange> ranges;  // empty: every tensor whole; else one range for each tensor
  bool packed = false;
  // Packed: where each tensor begins, in bytes from the buffer's start, a multiple of its element
  // size; empty: the tensors lie back to back. A tensor may begin anywhere after the end of the
  // tensor before it, and the buffer may be longer than where the last tensor ends.
  std::vector<int64_t> byte_offsets;

  // Exactly one of the following sources. In a region a packed buffer begins at a multiple of the
  // element size of every tensor in it; if the tensors lie back to back, only of the first tensor's
  // (the others may then be unaligned). A slot's start and inline bytes are aligned for every
  // tensor; tensors that lie back to back in a slot must each fall on a multiple of their element
  // size. An unpacked tensor lies at a multiple of its own element size.
  // Packed: the buffer begins at region_offsets[0]; else tensor i begins at region_offsets[i].
  std::shared_ptr<Region> region;
  std::vector<int64_t> region_offsets;
  std::unique_ptr<LeasedSlot> slot;  // packed
  // Inline bytes, copied into the call: one span if packed, else one for each tensor, of exactly
  // its bytes.
  std::vector<std::span<const char>> bytes;

  static Bucket Packed(std::vector<TensorSpec> tensors, std::shared_ptr<Region> region,
                       int64_t offset, std::vector<int64_t> byte_offsets = {});
  static Bucket Unpacked(std::vector<TensorSpec> tensors, std::shared_ptr<Region> region,
                         std::vector<int64_t> offsets);
  static Bucket Inline(std::vector<TensorSpec> tensors, std::vector<std::span<const char>> bytes);
  static Bucket InSlot(std::vector<TensorSpec> tensors, std::unique_ptr<LeasedSlot> slot,
                       std::vector<int64_t> byte_offsets);
};

class SlotMemory;  // client/slot_memory.h

// A tensor, or a part of one, in a mapped slot: read-only, valid until Ack, Aborted, or Ready for a
// later update. It lies at a multiple of its element size; at a multiple of 512 bytes only where
// the daemon packed the slot, since in a slot that a trainer leased tensors lie where the trainer
// put them. `data` is memory of ConnectOptions::device: on a GPU it is an address for kernels and
// copies of this process on that GPU, and not for the host. The bytes are complete when Next gives
// the part: no stream has to wait for them. Do not write there: a GPU does not prevent a write,
// which would damage what other engines of the group on the same GPU load. If a rank is so late
// that it was evicted, the bytes may change while it reads them; its weights are then dirty
// whatever it loads.
struct TensorView {
  TensorSpec tensor;  // of the whole tensor
  int64_t start = 0;  // first element carried, row-major
  int64_t count = 0;  // elements carried
  const char* data = nullptr;
};

struct Part {
  Version version;
  UpdateId update;  // tells the parts of two updates to one version apart
  PartSeq part;
  std::vector<TensorView> tensors;
  std::shared_ptr<const SlotMemory> slots{};  // keeps the views' memory mapped
};

}  // namespace refitd::client

#endif  // REFITD_CLIENT_TYPES_H_
