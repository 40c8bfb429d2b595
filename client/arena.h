// An arena: memory with two sides for the weights of an engine rank. The rank reads the one at a
// constant address, the daemon writes versions into the other.
#ifndef REFITD_CLIENT_ARENA_H_
#define REFITD_CLIENT_ARENA_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "client/types.h"
#include "transport/host/descriptor_format.h"
#include "transport/two_sided.h"

namespace refitd::client {

// At most one engine has it at a time (Engine::AddArena). The next one finds the weights in the
// side that is mapped. Thread-safe.
class Arena {
 public:
  // Makes an arena on `options.device`, whose driver is `options.cuda_library`; no daemon is asked.
  // Takes twice the bytes there, on a GPU rounded up to its granularity. With sides in host memory
  // it takes the bytes once on the GPU and twice in host memory, and a flip copies them.
  // INVALID_ARGUMENT, RESOURCE_EXHAUSTED: `bytes`; UNAVAILABLE: no driver, no GPU, or built without
  // CUDA; FAILED_PRECONDITION: the GPU is not among those that this process sees.
  static absl::StatusOr<std::shared_ptr<Arena>> Make(int64_t bytes, const ConnectOptions& options,
                                                     SidesIn in = SidesIn::kDevice);

  // Opens an arena that another process made. It must not be written until a layout over it is
  // registered (Engine::TakeKept); with sides in its memory it is read-only until then. Errors as
  // of Make; INVALID_ARGUMENT: `sides` are other memory.
  static absl::StatusOr<std::shared_ptr<Arena>> Open(SharedSides sides,
                                                     const ConnectOptions& options);

  // The rank reads its weights here: on a GPU it is an address for kernels and copies of this
  // process there.
  char* data() const { return memory_->data(); }
  int64_t bytes() const { return memory_->bytes(); }
  // Tells where the sides of a GPU's arena lie.
  SidesIn sides_in() const {
    return kind_ == RegionKind::kPinned ? SidesIn::kHost : SidesIn::kDevice;
  }

  // The other side at another address, until UnmapBack: between PREPARE with `flip` and Ready it
  // holds the version that was staged, to be read by the thread that calls Ready. An update that
  // ends meanwhile leaves what it holds unknown. On a GPU an address as of data(), whose work must
  // have ended before UnmapBack. FAILED_PRECONDITION: it is mapped already.
  absl::StatusOr<char*> MapBack() { return memory_->MapBack(); }
  void UnmapBack() { memory_->UnmapBack(); }

 private:
  friend class ArenaRegion;
  // `fresh`: no engine has had it.
  Arena(std::unique_ptr<TwoSided> memory, const ConnectOptions& options, SidesIn in, bool fresh);

  const std::unique_ptr<TwoSided> memory_;
  const RegionKind kind_;            // of its sides
  std::atomic<bool> taken_ = false;  // by an ArenaRegion, which alone may use the others then
  // Whether no daemon has been given a layout over it, whose copies may still run.
  bool fresh_;
};

}  // namespace refitd::client

#endif  // REFITD_CLIENT_ARENA_H_
