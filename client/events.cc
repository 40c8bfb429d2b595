#include "client/events.h"

#include <utility>
#include <variant>

#include "proto/convert.h"
#include "proto/failure.h"
#include "transport/base/status.h"

namespace refitd::client {
namespace {

bool Inside(int64_t offset, int64_t size, int64_t limit) {
  return offset >= 0 && size >= 0 && offset <= limit && size <= limit - offset;
}

absl::StatusOr<TensorView> DecodeView(const v1::BucketReady& bucket, int index,
                                      std::span<const char> slot) {
  TensorView view;
  view.tensor.name = bucket.names(index);
  REFITD_ASSIGN_OR_RETURN(view.tensor.dtype, DTypeFromProto(bucket.dtypes(index)));
  const auto& dims = bucket.shapes(index).dims();
  view.tensor.shape.assign(dims.begin(), dims.end());
  REFITD_RETURN_IF_ERROR(ValidateTensor(view.tensor));
  REFITD_ASSIGN_OR_RETURN(const int64_t elements, ElementCount(view.tensor.shape));
  view.start = bucket.starts(index);
  view.count = bucket.sizes(index);
  if (!Inside(view.start, view.count, elements)) {
    return Error(absl::StatusCode::kInternal, "\"{}\" of {} elements: start {}, size {}",
                 view.tensor.name, elements, view.start, view.count);
  }
  const int64_t offset = bucket.byte_offsets(index);
  const int64_t bytes = view.count * ElementBytes(view.tensor.dtype);
  if (!Inside(offset, bytes, static_cast<int64_t>(slot.size()))) {
    return Error(absl::StatusCode::kInternal, "\"{}\": {} bytes at {} are outside of a slot of {}",
                 view.tensor.name, bytes, offset, slot.size());
  }
  view.data = slot.data() + offset;
  return view;
}

// ---- each event as a structure of the C interface ----

void ShowOne(const Nothing&, std::vector<refit_view>*, refit_event*) {}

void ShowOne(const Prepare& prepare, std::vector<refit_view>*, refit_event* shown) {
  shown->kind = REFIT_EVENT_PREPARE;
  shown->version = prepare.version.value();
  shown->remaining_ms = prepare.remaining.count();
  shown->tensor_count = prepare.tensor_count;
}

void ShowOne(const Part& part, std::vector<refit_view>* views, refit_event* shown) {
  shown->kind = REFIT_EVENT_PART;
  shown->version = part.version.value();
  shown->update_id = part.update.value();
  shown->part = part.part.value();
  Show(part.tensors, views);
  shown->views = views->data();
  shown->view_count = static_cast<int64_t>(views->size());
}

void ShowOne(const Committed& committed, std::vector<refit_view>*, refit_event* shown) {
  shown->kind = REFIT_EVENT_COMMITTED;
  shown->version = committed.version.value();
  shown->incarnation = committed.incarnation;
  shown->owner = committed.owner.c_str();
  shown->digest = committed.digest;
}

void ShowOne(const Aborted& aborted, std::vector<refit_view>*, refit_event* shown) {
  shown->kind = REFIT_EVENT_ABORTED;
  shown->version = aborted.version.value();
  shown->dirty = aborted.dirty ? 1 : 0;
  shown->reason = aborted.reason.c_str();
}

void ShowOne(const Draining&, std::vector<refit_view>*, refit_event* shown) {
  shown->kind = REFIT_EVENT_DRAINING;
}

void ShowOne(const Lost& lost, std::vector<refit_view>*, refit_event* shown) {
  shown->kind = REFIT_EVENT_LOST;
  shown->reason = lost.reason.c_str();
  shown->weights = static_cast<int32_t>(lost.weights);
}

void ShowOne(const Reattached& again, std::vector<refit_view>*, refit_event* shown) {
  shown->kind = REFIT_EVENT_REATTACHED;
  shown->version = again.held_version.value_or(Version(-1)).value();
  shown->weights = static_cast<int32_t>(again.weights);
}

}  // namespace

Event DecodeEvent(const v1::EngineEvent& event) {
  if (event.has_prepare()) {
    const v1::Prepare& prepare = event.prepare();
    return Prepare{Version(prepare.version()), std::chrono::milliseconds(prepare.remaining_ms()),
                   prepare.tensor_count()};
  }
  if (event.has_committed()) {
    return Committed{Version(event.committed().version()), event.committed().incarnation(),
                     event.committed().owner(), event.committed().digest()};
  }
  if (event.has_aborted()) {
    const v1::Aborted& aborted = event.aborted();
    return Aborted{Version(aborted.version()), aborted.reason(), aborted.dirty(),
                   FailureFromProto(aborted.failure()).value_or(Failure())};
  }
  if (event.has_draining()) return Draining{};
  return Nothing{};
}

absl::StatusOr<Part> DecodePart(const v1::BucketReady& bucket, std::span<const char> pool,
                                int64_t slot_bytes) {
  const int count = bucket.names_size();
  if (bucket.dtypes_size() != count || bucket.shapes_size() != count ||
      bucket.starts_size() != count || bucket.sizes_size() != count ||
      bucket.byte_offsets_size() != count) {
    return Error(absl::StatusCode::kInternal, "part {}: lists of unequal length", bucket.part());
  }
  if (!Inside(bucket.slot_byte_offset(), slot_bytes, static_cast<int64_t>(pool.size()))) {
    return Error(absl::StatusCode::kInternal,
                 "part {}: slot at {} of {} bytes is outside of the pool of {}", bucket.part(),
                 bucket.slot_byte_offset(), slot_bytes, pool.size());
  }
  const auto slot = pool.subspan(bucket.slot_byte_offset(), slot_bytes);
  Part part;
  part.version = Version(bucket.version());
  part.update = UpdateId(bucket.update_id());
  part.part = PartSeq(bucket.part());
  part.tensors.reserve(count);
  for (int i = 0; i < count; ++i) {
    REFITD_ASSIGN_OR_RETURN(TensorView view, DecodeView(bucket, i, slot));
    part.tensors.push_back(std::move(view));
  }
  return part;
}

void Show(const std::vector<TensorView>& tensors, std::vector<refit_view>* views) {
  views->clear();
  for (const TensorView& view : tensors) {
    refit_view shown{};
    shown.tensor.name = view.tensor.name.c_str();
    shown.tensor.dtype = static_cast<int32_t>(view.tensor.dtype);
    shown.tensor.dim_count = static_cast<int32_t>(view.tensor.shape.size());
    shown.tensor.dims = view.tensor.shape.data();
    shown.tensor.start = view.start;
    shown.tensor.count = view.count;
    shown.data = view.data;
    views->push_back(shown);
  }
}

refit_event Show(const Event& event, std::vector<refit_view>* views) {
  refit_event shown{};
  shown.reason = "";
  shown.owner = "";
  std::visit([&](const auto& kind) { ShowOne(kind, views, &shown); }, event);
  return shown;
}

}  // namespace refitd::client
