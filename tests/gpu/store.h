// Memory of one rank of the GPU tests: blocks on a GPU (or shared host memory, to try the tests
// themselves without a GPU), and kernels that fill, check and poison the pieces of a layout in it.
//
// Blocks are made by cuMemAlloc, for legacy CUDA IPC, or by cuMemCreate, exported as descriptors.
// The driver is loaded at run time; no CUDA type appears here. All work runs in order on one stream
// of the rank's own. Not thread-safe. Errors: UNAVAILABLE no driver or device, else INTERNAL with
// the driver's words.
#ifndef REFITD_TESTS_GPU_STORE_H_
#define REFITD_TESTS_GPU_STORE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/gpu/values.h"
#include "transport/plan/layout.h"

namespace refitd::gpu {

enum class MemoryKind : uint8_t { kLegacy, kVmm, kHost };

// The handle or descriptor by which a block is made known to a daemon.
struct Export {
  std::string ipc_handle;  // kLegacy: 64 bytes
  int descriptor = -1;     // kVmm: owned by the store; memfd: by whoever made it
  int64_t bytes = 0;
  uint64_t address = 0;  // kVmm: in this process
  bool memfd = false;    // a sealed memfd, which no store exports
};

struct DeviceMemory {
  int64_t free_bytes = 0;
  int64_t total_bytes = 0;
};

struct WrongElements {
  int64_t count = 0;
  std::string first;  // "tensor NAME, element 5 of piece 3"; empty: none
};

inline constexpr uint8_t kPoison = 0xa5;

class Store {
 public:
  // `device` is the driver's ordinal; kHost ignores it.
  static absl::StatusOr<std::unique_ptr<Store>> Create(MemoryKind kind, int device);
  virtual ~Store() = default;

  // "GPU-..."; "host".
  virtual const std::string& device_name() const = 0;
  // Adds a block of at least `bytes`; Export has its true size. Blocks of kHost are not made here:
  // see Adopt.
  virtual absl::Status AddBlock(int64_t bytes) = 0;
  virtual absl::StatusOr<Export> ExportBlock(size_t block) = 0;
  // Takes existing memory of the device, or of the host, as the next block.
  virtual void Adopt(char* data, int64_t bytes) = 0;

  // The pieces lie in blocks by index: RegionId(b + 1) is block b. Later calls work on these.
  virtual absl::Status SetLayout(const Layout& layout, const std::vector<std::string>& names) = 0;

  // These queue work; Synchronise waits for it, without a deadline, since orchestrate.py has one.
  virtual absl::Status Spin(int64_t milliseconds) = 0;
  // Pieces of one block, or of all (-1).
  virtual absl::Status Fill(int64_t version, uint64_t seed, int block) = 0;
  virtual absl::Status PoisonPieces(int block) = 0;
  // Copies elements [start, start + count), row-major, of the tensor with this TensorHash into the
  // pieces that have any of them. The elements lie one after the other at `from`, on this device.
  virtual absl::Status Load(uint64_t tensor_hash, int64_t start, int64_t count,
                            const char* from) = 0;
  // Copies bytes of a block to `to`, on this device.
  virtual absl::Status CopyOut(size_t block, int64_t byte_offset, int64_t bytes, char* to) = 0;
  // Poisons every byte of every block, also beside the pieces.
  virtual absl::Status PoisonAll() = 0;
  virtual absl::Status Synchronise() = 0;

  virtual absl::StatusOr<WrongElements> Check(int64_t version, uint64_t seed) = 0;
  // Counts the bytes of all blocks that are not poison. After PoisonPieces these are the bytes
  // beside the pieces that were wrongly written.
  virtual absl::StatusOr<int64_t> CountUnpoisoned() = 0;

  virtual absl::StatusOr<DeviceMemory> Memory() = 0;
};

// Tasks of a layout's pieces, in order, and their chunks; `addresses` are those of the blocks.
struct Tasks {
  std::vector<Task> tasks;
  std::vector<Chunk> chunks;
  // The index of the first chunk of each block's pieces, and the number of all chunks. Pieces come
  // in the order of blocks.
  std::vector<size_t> first_chunk;
  std::vector<size_t> chunk_of_task;  // each task's first chunk, and the end
};
absl::StatusOr<Tasks> MakeTasks(const Layout& layout, const std::vector<uint64_t>& addresses);

}  // namespace refitd::gpu

#endif  // REFITD_TESTS_GPU_STORE_H_
