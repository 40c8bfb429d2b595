#include "daemon/group/coverage.h"

#include <algorithm>

#include "transport/base/errors.h"

namespace refitd::group {

absl::Status UpdateCoverage::Check(const TensorSpec& tensor) const {
  REFITD_RETURN_IF_ERROR(participants_.catalog().Check(tensor, participants_.evicted()));
  return CheckNotMoved(tensor.name, tensor.name);
}

absl::Status UpdateCoverage::CheckNotMoved(std::string_view tensor, std::string_view pushed) const {
  if (!program_.Moves(tensor)) return absl::OkStatus();
  return AboutTensor(
      Precondition(
          "tensor '{}' comes with the registered layouts: list '{}' in pushed_tensors to push it",
          tensor, pushed),
      tensor);
}

// Two names of one memory are compared where both are pushed, or both refitted.
absl::Status UpdateCoverage::CheckTied(std::string_view tensor) const {
  if (!program_.exists()) return absl::OkStatus();
  const Catalog& catalog = participants_.catalog();
  for (const uint32_t t : catalog.TiesOf(tensor)) {
    const TiedNames& tie = catalog.ties()[t];
    const std::string& other = tie.tensor == tensor ? tie.same_as : tie.tensor;
    if (!program_.Contains(other)) continue;
    return Precondition(
        "tensor '{}' is one memory with tensor '{}' in {}, and is pushed, while the other comes "
        "with the registered layouts: the two can't be compared; leave one of them out, or push "
        "both",
        tensor, other, tie.rank);
  }
  return absl::OkStatus();
}

// Looks up each tensor once, since a big bucket's first byte waits for all look-ups.
absl::Status UpdateCoverage::Take(const CheckedBucket& bucket, int64_t most, Taken* taken) {
  pushed_.reserve(pushed_.size() + bucket.tensors.size());
  taken->added.reserve(bucket.tensors.size());
  for (size_t i = 0; i < bucket.tensors.size(); ++i) {
    const TensorSpec& tensor = bucket.tensors[i];
    const TensorRange& range = bucket.ranges[i];
    const auto [it, added] = pushed_.try_emplace(tensor.name);
    PushedTensor& known = it->second;
    if (added) {
      taken->added.push_back(&tensor.name);
      known.dtype = tensor.dtype;
      known.shape = tensor.shape;
      REFITD_ASSIGN_OR_RETURN(known.elements, ElementCount(tensor.shape));
      known.wanted = participants_.catalog().WantedOf(tensor.name);
      Count(known, 1);
      REFITD_RETURN_IF_ERROR(CheckOnce(tensor));
      REFITD_RETURN_IF_ERROR(CheckTied(tensor.name));
    } else {
      if (known.dtype != tensor.dtype || known.shape != tensor.shape) {
        return AboutTensor(
            Precondition("tensor '{}': the bucket has {}, but an earlier one had {}", tensor.name,
                         ToString(tensor.dtype, tensor.shape), ToString(known.dtype, known.shape)),
            tensor.name);
      }
      if (known.elements == 0) {
        return AboutTensor(
            Error(absl::StatusCode::kAlreadyExists, "tensor '{}' was pushed before", tensor.name),
            tensor.name);
      }
      taken->before.emplace_back(&tensor.name, known.covered);
    }
    REFITD_RETURN_IF_ERROR(participants_.catalog().CheckBlocks(tensor, range));
    // The counts depend on what is covered, so the tensor is taken out of them while that changes.
    Count(known, -1);
    const bool fresh = known.covered.Add(range.start, range.start + range.count);
    Count(known, 1);
    if (!fresh) {
      return AboutTensor(Error(absl::StatusCode::kAlreadyExists,
                               "tensor '{}': elements of [{}, {}) were pushed before", tensor.name,
                               range.start, range.start + range.count),
                         tensor.name);
    }
  }
  const auto tensors = static_cast<int64_t>(pushed_.size());
  if (tensors > kMaxTensorsPerLayout) {
    return TooManyTensors(fmt::format("buckets up to seq {}", bucket.seq), tensors);
  }
  if (most == 0 || tensors <= most) return absl::OkStatus();
  return Precondition("seq {} would make {} tensors pushed; Begin's tensor_count is {}", bucket.seq,
                      tensors, most);
}

// P1: what is derived from a pushed tensor is neither pushed nor brought by the program.
absl::Status UpdateCoverage::CheckOnce(const TensorSpec& tensor) const {
  const auto refuse = [&tensor](std::string_view derived, std::string_view source) {
    return AboutTensor(Precondition("tensor '{}' is derived from '{}', and both are pushed: leave "
                                    "out one of them",
                                    derived, source),
                       tensor.name);
  };
  const Catalog& catalog = participants_.catalog();
  const TensorSpec* const source = catalog.SourceOf(tensor.name);
  if (source != nullptr && Pushed(source->name)) return refuse(tensor.name, source->name);
  for (const std::string_view derived : catalog.DerivedFrom(tensor.name)) {
    if (Pushed(derived)) return refuse(derived, tensor.name);
    REFITD_RETURN_IF_ERROR(CheckNotMoved(derived, tensor.name));
  }
  return absl::OkStatus();
}

// Adds the tensor to the counts of what was pushed, or with `by` -1 takes it out of them.
void UpdateCoverage::Count(const PushedTensor& tensor, int by) {
  if (!tensor.complete()) incomplete_ += by;
  if (tensor.wanted == 0) unwanted_ += by;
  wanted_ += by * tensor.wanted;
}

// In reverse order, since a tensor may be in the bucket twice.
void UpdateCoverage::TakeBack(Taken* taken) {
  for (auto it = taken->before.rbegin(); it != taken->before.rend(); ++it) {
    PushedTensor& tensor = pushed_.at(*it->first);
    Count(tensor, -1);
    tensor.covered = std::move(it->second);
    Count(tensor, 1);
  }
  for (const std::string* name : taken->added) {
    const auto tensor = pushed_.find(*name);
    Count(tensor->second, -1);
    pushed_.erase(tensor);
  }
}

// Whether every element of every tensor that came, or that an instance still in the update knows,
// came once (P1).
absl::Status UpdateCoverage::CheckAll(int64_t tensor_count) const {
  if (incomplete_ > 0) {
    const std::string* partial = nullptr;
    for (const auto& [tensor_name, tensor] : pushed_) {
      if (tensor.complete()) continue;
      if (partial == nullptr || tensor_name < *partial) partial = &tensor_name;
    }
    REFITD_CHECK(partial != nullptr);
    const PushedTensor& tensor = pushed_.at(*partial);
    return AboutTensor(
        Precondition("tensor '{}': element {} of {} was never pushed", *partial,
                     tensor.covered.FirstGap(tensor.elements).value_or(0), tensor.elements),
        *partial);
  }
  REFITD_RETURN_IF_ERROR(CheckWanted());
  return CheckCount(tensor_count);
}

absl::Status UpdateCoverage::CheckWanted() const {
  // A program moves the same tensors in every update, so it is checked once for a catalog.
  if (program_.covers_catalog()) return absl::OkStatus();
  const UpdateParticipants& in = participants_;
  const bool nobody_evicted = in.left() == static_cast<int64_t>(in.evicted().size());
  // CheckBucket lets no tensor be both pushed and moved by the program, and the program fills only
  // tensors that an instance wants. So equal numbers mean that every wanted tensor came.
  const int64_t stored = program_.exists() ? program_.content().stored : 0;
  const bool all_came = nobody_evicted && wanted_ + stored == in.catalog().wanted_count();
  if (!all_came) {
    REFITD_RETURN_IF_ERROR(in.catalog().CheckAllCame(
        [this](std::string_view tensor, std::string_view source) {
          return Pushed(tensor) || Pushed(source) || program_.Moves(tensor);
        },
        in.evicted()));
  }
  if (pushed_.empty() && nobody_evicted) program_.NoteCovers();
  return absl::OkStatus();
}

absl::Status UpdateCoverage::CheckCount(int64_t tensor_count) const {
  const Catalog::Rank* const open = participants_.catalog().OpenRank(participants_.evicted());
  if (tensor_count == 0 && open != nullptr) {
    return Precondition(
        "tensor_count: 0, but {} takes {} delivery without a manifest: Begin or Commit has to tell "
        "how many tensors it must get",
        open->label, Name(open->delivery));
  }
  const int64_t moved = program_.tensors();
  const int64_t pushed = static_cast<int64_t>(pushed_.size()) + moved;
  // Trainers may count tensors that no instance wants, or leave them out of the count.
  if (tensor_count != 0 &&
      (pushed > tensor_count ||
       (pushed < tensor_count && pushed + UnwantedAndNotPushed() < tensor_count))) {
    return Precondition("{} tensors came, but tensor_count is {}", pushed, tensor_count);
  }
  return absl::OkStatus();
}

int64_t UpdateCoverage::UnwantedAndNotPushed() const {
  const std::vector<std::string>& unwanted = participants_.catalog().unwanted();
  return std::count_if(unwanted.begin(), unwanted.end(), [this](const std::string& tensor) {
    return !pushed_.contains(tensor) && !program_.Moves(tensor);
  });
}

bool UpdateCoverage::AnyTied(const PartContent& content) const {
  if (participants_.catalog().ties().empty()) return false;
  for (uint32_t i = 0; i < content.ranges.size(); ++i) {
    if (participants_.catalog().IsTied(content.tensor(i).name)) return true;
  }
  return false;
}

void UpdateCoverage::AddTiedDigests(const PartContent& content,
                                    const std::vector<uint64_t>& digests) {
  for (uint32_t i = 0; i < content.ranges.size(); ++i) {
    const std::string& tensor = content.tensor(i).name;
    if (!participants_.catalog().IsTied(tensor)) continue;
    PushedTensor& pushed = pushed_.at(tensor);
    if (i < digests.size()) {
      pushed.digest += digests[i];
    } else {
      pushed.digested = false;
    }
  }
}

// Two names of one memory must have come with the same values (P11).
absl::Status UpdateCoverage::CheckTies() const {
  for (const TiedNames& tie : participants_.catalog().ties()) {
    const auto tensor = pushed_.find(tie.tensor);
    const auto same_as = pushed_.find(tie.same_as);
    if (tensor == pushed_.end() || same_as == pushed_.end()) continue;
    if (!tensor->second.digested || !same_as->second.digested) {
      return Precondition(
          "tensor '{}' and tensor '{}' are one memory in {}, and the daemon of their trainer "
          "sent no digests to compare: push only '{}'",
          tie.tensor, tie.same_as, tie.rank, tie.same_as);
    }
    if (tensor->second.digest == same_as->second.digest) continue;
    return Precondition(
        "tensor '{}' and tensor '{}' are one memory in {}, and the pushed values of them differ: "
        "tie "
        "them in the trainer too, or serve a model that keeps them apart",
        tie.tensor, tie.same_as, tie.rank);
  }
  return absl::OkStatus();
}

// Whoever pushes says by that alone that the tensors are to be delivered, so that those which no
// instance stores are named. A rank without a manifest takes them all.
LeftOut UpdateCoverage::FindLeftOut() const {
  LeftOut left_out;
  if (participants_.shared_catalog() == nullptr) return left_out;
  std::vector<std::string> names;
  if (program_.exists()) {
    names = program_.content().unwanted;
    left_out.bytes = program_.content().unwanted_bytes;
  }
  if (unwanted_ > 0 && participants_.catalog().OpenRank(participants_.evicted()) == nullptr) {
    for (const auto& [tensor_name, tensor] : pushed_) {
      if (tensor.wanted > 0) continue;
      names.push_back(tensor_name);
      left_out.bytes += tensor.elements * ElementBytes(tensor.dtype);
    }
  }
  std::sort(names.begin(), names.end());
  left_out.tensors = static_cast<int64_t>(names.size());
  if (names.size() > kMaxNamedLeftOut) names.resize(kMaxNamedLeftOut);
  left_out.names = std::move(names);
  return left_out;
}

void UpdateCoverage::CheckInvariants() const {
  int64_t incomplete = 0;
  int64_t wanted = 0;
  int64_t unwanted = 0;
  for (const auto& [name, tensor] : pushed_) {
    REFITD_CHECK(tensor.covered.total() <= tensor.elements);
    if (!tensor.complete()) ++incomplete;
    wanted += tensor.wanted;
    if (tensor.wanted == 0) ++unwanted;
  }
  REFITD_CHECK(incomplete == incomplete_ && wanted == wanted_ && unwanted == unwanted_);
}

}  // namespace refitd::group
