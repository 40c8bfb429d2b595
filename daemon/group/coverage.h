// UpdateCoverage knows which elements of which tensors came with the buckets of an update.
//
// It keeps P1 (every element of every tensor comes once, and no wanted tensor is left out) and P11
// (two names of one memory came with the same values). Pure; not thread-safe: lives inside its
// update.
#ifndef REFITD_DAEMON_GROUP_COVERAGE_H_
#define REFITD_DAEMON_GROUP_COVERAGE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "daemon/group/group.h"
#include "daemon/group/participants.h"
#include "daemon/group/refit_program.h"

namespace refitd::group {

// The elements of one tensor that buckets have brought.
struct PushedTensor {
  DType dtype = DType::kUint8;
  Dims shape;
  int64_t elements = 0;
  int64_t wanted = 0;  // Catalog::WantedOf
  IntervalSet covered;
  // A tied tensor has here the sum of the digests of its elements that were transferred so far.
  uint64_t digest = 0;
  bool digested = true;  // false: a daemon sent no digest
  bool complete() const { return covered.total() == elements; }
};

class UpdateCoverage {
 public:
  UpdateCoverage(const UpdateParticipants* participants, UpdateProgram* program)
      : participants_(*participants), program_(*program) {}

  void Reserve(size_t tensors) { pushed_.reserve(tensors); }
  // Not OK: the tensor may not be pushed.
  absl::Status Check(const TensorSpec& tensor) const;
  // Taken records what a bucket adds, so that it can be taken back: tensors that no bucket brought
  // before, and for the other tensors the elements that were covered before.
  struct Taken {
    std::vector<const std::string*> added;
    std::vector<std::pair<const std::string*, IntervalSet>> before;
  };
  // Takes the bucket's elements. Not OK: some came before, or other elements of their tensor came
  // in another form; the caller takes `taken` back. `most`: the number of tensors that the update
  // brings; 0: not known.
  absl::Status Take(const CheckedBucket& bucket, int64_t most, Taken* taken);
  void TakeBack(Taken* taken);

  // OK: every tensor that an instance still in the update wants was pushed or is moved by the
  // program, and every element of each pushed tensor came exactly once. `tensor_count`: how many
  // tensors all trainer ranks bring together; 0: no rank named it.
  absl::Status CheckAll(int64_t tensor_count) const;
  // Whether a part has elements of a tensor that is one memory with another.
  bool AnyTied(const PartContent& content) const;
  // `digests`: of the ranges of the part, which was transferred.
  void AddTiedDigests(const PartContent& content, const std::vector<uint64_t>& digests);
  absl::Status CheckTies() const;
  LeftOut FindLeftOut() const;

  int64_t tensors() const { return static_cast<int64_t>(pushed_.size()); }
  // Records that the update needs no more.
  std::shared_ptr<const void> TakeRemains() {
    return std::make_shared<decltype(pushed_)>(std::move(pushed_));
  }
  void CheckInvariants() const;

 private:
  friend struct refitd::GroupForTests;

  absl::Status CheckTied(std::string_view tensor) const;
  // Not OK: the program moves `tensor`, which a push of `pushed` would bring.
  absl::Status CheckNotMoved(std::string_view tensor, std::string_view pushed) const;
  absl::Status CheckOnce(const TensorSpec& tensor) const;
  void Count(const PushedTensor& tensor, int by);
  bool Pushed(std::string_view tensor) const {
    return pushed_.contains(absl::string_view(tensor.data(), tensor.size()));
  }
  absl::Status CheckWanted() const;
  absl::Status CheckCount(int64_t tensor_count) const;
  int64_t UnwantedAndNotPushed() const;

  const UpdateParticipants& participants_;
  UpdateProgram& program_;
  absl::flat_hash_map<std::string, PushedTensor> pushed_;
  // Counts of `pushed_`, so that Commit needs no walk over it.
  int64_t incomplete_ = 0;  // elements are missing
  int64_t wanted_ = 0;      // tensors that instances want
  int64_t unwanted_ = 0;    // entries that bring no such tensor
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_COVERAGE_H_
