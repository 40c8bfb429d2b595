// A packer copies tensors one after the other into a bucket's memory, a leased slot, and keeps the
// bucket's lists: what a binding of another language does for thousands of small tensors, of which
// most are the same in every update.
//
// Invariants
//   - A bucket lists a tensor at most once, and only after its bytes were copied: a caller who is
//     interrupted in between leaves a gap, never an entry without bytes.
//   - Entries lie within the bucket, at multiples of kAlignment, and do not overlap.
//
// Not thread-safe: packers that share known tensors are used by one thread at a time (Python's hold
// the interpreter lock).
#ifndef REFITD_CLIENT_PACKER_H_
#define REFITD_CLIENT_PACKER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "client/dlpack.h"
#include "transport/plan/layout.h"

namespace refitd::client {

// A tensor that a packer knows. It never changes, so pointers into it are valid as long as the
// object lives.
struct PackedTensor {
  TensorSpec spec;
  int64_t elements = 0;
  int64_t bytes = 0;
  DlpackType type;

  // Whether `shown` is this tensor, contiguous in memory that the CPU reads.
  bool Matches(const DlpackTensor& shown) const;
};

// Tensors by name and by number. A name keeps its number.
class TensorTable {
 public:
  // Makes a tensor known, in place of the one of the same name.
  absl::StatusOr<int64_t> Learn(TensorSpec spec);
  // The number of the tensor of this name; -1: none. Names in the order of numbers are found
  // fastest.
  int64_t Find(std::string_view name);
  bool Has(int64_t number) const { return number >= 0 && number < static_cast<int64_t>(count()); }
  size_t count() const { return tensors_.size(); }
  const PackedTensor& At(int64_t number) const { return *tensors_[number]; }
  // From Hold to Release, objects that At() gave stay, even if they are replaced.
  void Hold() { ++holders_; }
  void Release();

 private:
  std::vector<std::unique_ptr<const PackedTensor>> tensors_;
  absl::flat_hash_map<std::string, int64_t> numbers_;
  int64_t next_ = 0;  // the number after that of the last name found
  int holders_ = 0;
  std::vector<std::unique_ptr<const PackedTensor>> replaced_;  // while there are holders
};

class Packer {
 public:
  static constexpr int64_t kAlignment = 64;  // vector loads of a slot's readers want 16 or more

  explicit Packer(std::shared_ptr<TensorTable> known) : known_(std::move(known)) {}
  ~Packer();
  Packer(const Packer&) = delete;
  Packer& operator=(const Packer&) = delete;

  const std::shared_ptr<TensorTable>& known() const { return known_; }

  // Begins an empty bucket of `bytes` bytes at `data`; `data` is null where only the caller can
  // copy to the memory.
  void Begin(char* data, int64_t bytes);
  // The number of tensors, or parts of tensors, in the bucket.
  int64_t count() const { return static_cast<int64_t>(entries_.size()); }
  // The bytes that are left in the bucket; -1: there is no bucket.
  int64_t room() const;
  // The bytes that are left for a tensor; -1: the bucket has the tensor, or there is no bucket.
  int64_t RoomFor(int64_t number) const;
  // Takes `bytes` of the room and tells their offset.
  std::optional<int64_t> Reserve(int64_t number, int64_t bytes);
  // Lists elements [start, start + count) of a tensor, which were copied to `offset`.
  absl::Status Add(int64_t number, int64_t start, int64_t count, int64_t offset);
  // Copies a whole tensor and lists it. False: the tensor does not fit, or the bucket has it
  // already; then nothing has changed.
  bool Put(int64_t number, const void* source);
  // Ends the bucket. What it has stays until the next bucket begins.
  void End() { open_ = false; }
  // Elements [start, start + count) of a tensor, which are at `offset` of the bucket's memory.
  struct Entry {
    const PackedTensor* tensor = nullptr;
    int64_t start = 0;
    int64_t count = 0;
    int64_t offset = 0;
  };
  const std::vector<Entry>& entries() const { return entries_; }
  // The bucket's memory up to the end of its last tensor.
  std::span<const char> bytes() const { return {data_, static_cast<size_t>(used_)}; }

 private:
  const std::shared_ptr<TensorTable> known_;
  bool holds_ = false;  // whether this packer holds known_ (TensorTable::Hold)
  bool open_ = false;
  char* data_ = nullptr;
  int64_t bytes_ = 0;
  // The place for the next tensor: a multiple of kAlignment, which may lie beyond the bucket's end.
  int64_t end_ = 0;
  int64_t used_ = 0;  // the greatest end of an entry
  std::vector<Entry> entries_;
  // listed_[number] is the last bucket that listed the tensor of that number.
  std::vector<int64_t> listed_;
  int64_t bucket_ = 0;
};

}  // namespace refitd::client

#endif  // REFITD_CLIENT_PACKER_H_
