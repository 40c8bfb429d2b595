#include <map>
#include <memory>
#include <utility>

#include "client/engine.h"
#include "client/slot_memory.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd::client {
namespace {

struct Joined {
  TensorSpec tensor;
  int64_t elements = 0;
  std::unique_ptr<JoinBuffer> buffer;
  IntervalSet covered;
};

}  // namespace

struct PartJoiner::Impl {
  std::map<std::string, Joined> open;
  std::vector<Joined> finished;  // hold the memory of the views of the last Add

  absl::StatusOr<Joined*> Open(const TensorView& view, int64_t elements, const SlotMemory* slots);
  absl::Status Store(const TensorView& view, Joined* joined) const;
};

absl::StatusOr<Joined*> PartJoiner::Impl::Open(const TensorView& view, int64_t elements,
                                               const SlotMemory* slots) {
  const auto known = open.find(view.tensor.name);
  if (known != open.end()) {
    if (known->second.tensor == view.tensor) return &known->second;
    return AboutTensor(
        Error(absl::StatusCode::kInvalidArgument, "\"{}\" is {} in this part, was {} before",
              view.tensor.name, ToString(view.tensor.dtype, view.tensor.shape),
              ToString(known->second.tensor.dtype, known->second.tensor.shape)),
        view.tensor.name);
  }
  const int64_t bytes = elements * ElementBytes(view.tensor.dtype);
  Joined joined;
  joined.tensor = view.tensor;
  joined.elements = elements;
  auto buffer = slots == nullptr ? NewHostBuffer(bytes) : slots->NewBuffer(bytes);
  if (!buffer.ok()) {
    return Prefixed(buffer.status(), "no memory to join \"{}\" of {} bytes", view.tensor.name,
                    bytes);
  }
  joined.buffer = *std::move(buffer);
  return &open.emplace(view.tensor.name, std::move(joined)).first->second;
}

absl::Status PartJoiner::Impl::Store(const TensorView& view, Joined* joined) const {
  if (!joined->covered.Add(view.start, view.start + view.count)) {
    return AboutTensor(Error(absl::StatusCode::kInvalidArgument,
                             "\"{}\": elements [{}, {}) overlap what came before", view.tensor.name,
                             view.start, view.start + view.count),
                       view.tensor.name);
  }
  const int64_t element = ElementBytes(view.tensor.dtype);
  return joined->buffer->Store(view.start * element, view.data, view.count * element);
}

PartJoiner::PartJoiner() : impl_(std::make_unique<Impl>()) {}
PartJoiner::~PartJoiner() = default;

absl::StatusOr<std::vector<TensorView>> PartJoiner::Add(const Part& part) {
  impl_->finished.clear();
  std::vector<TensorView> whole;
  for (const TensorView& view : part.tensors) {
    REFITD_ASSIGN_OR_RETURN(const int64_t elements, ElementCount(view.tensor.shape));
    if (view.start < 0 || view.count < 0 || view.start > elements ||
        view.count > elements - view.start) {
      return AboutTensor(Error(absl::StatusCode::kInvalidArgument,
                               "\"{}\" of {} elements: start {}, count {} is outside",
                               view.tensor.name, elements, view.start, view.count),
                         view.tensor.name);
    }
    if (view.count == elements && !impl_->open.contains(view.tensor.name)) {
      whole.push_back(view);
      continue;
    }
    REFITD_ASSIGN_OR_RETURN(Joined * joined, impl_->Open(view, elements, part.slots.get()));
    REFITD_RETURN_IF_ERROR(impl_->Store(view, joined));
    if (joined->covered.total() < elements) continue;
    whole.push_back({joined->tensor, 0, elements, joined->buffer->data()});
    impl_->finished.push_back(std::move(*joined));
    impl_->open.erase(view.tensor.name);
  }
  return whole;
}

void PartJoiner::Reset() {
  impl_->open.clear();
  impl_->finished.clear();
}

std::vector<std::string> PartJoiner::Unfinished() const {
  std::vector<std::string> names;
  for (const auto& [name, joined] : impl_->open) names.push_back(name);
  return names;
}

}  // namespace refitd::client
