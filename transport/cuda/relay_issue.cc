#include "transport/cuda/relay_issue.h"

#if defined(REFITD_CUDA)
#include <algorithm>

#include "transport/base/status.h"

namespace refitd {
namespace {

CUdeviceptr Address(const char* data) { return reinterpret_cast<CUdeviceptr>(data); }

}  // namespace

absl::StatusOr<RelayStream*> RelayStreams::Get(std::pair<int, bool> key) {
  RelayStream& stream = streams_[key];
  if (stream.event != nullptr) return &stream;
  REFITD_ASSIGN_OR_RETURN(stream.context, contexts_->Get(key.first));
  const ScopedContext current(api(), stream.context);
  REFITD_RETURN_IF_ERROR(current.status());
  if (stream.stream == nullptr) {
    REFITD_RETURN_IF_ERROR(
        REFITD_CUDA_CALL(api(), cuStreamCreate, &stream.stream, CU_STREAM_NON_BLOCKING));
  }
  REFITD_RETURN_IF_ERROR(
      REFITD_CUDA_CALL(api(), cuEventCreate, &stream.event, CU_EVENT_DISABLE_TIMING));
  return &stream;
}

void RelayStreams::Destroy() {
  for (auto& [key, stream] : streams_) {
    if (stream.context == nullptr) continue;
    const ScopedContext current(api(), stream.context);
    if (!current.status().ok()) continue;
    if (stream.event != nullptr) (void)api().cuEventDestroy(stream.event);
    if (stream.stream != nullptr) (void)api().cuStreamDestroy(stream.stream);
  }
  streams_.clear();
}

Arrivals::~Arrivals() {
  for (const auto& [device, filled] : filled_) {
    const ScopedContext current(api_, filled.context);
    if (current.status().ok()) (void)api_.cuEventDestroy(filled.event);
  }
}

absl::Status Arrivals::Record(int device, const RelayStream& by) {
  const ScopedContext current(api_, by.context);
  REFITD_RETURN_IF_ERROR(current.status());
  CUevent event = nullptr;
  REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api_, cuEventCreate, &event, CU_EVENT_DISABLE_TIMING));
  REFITD_CHECK(filled_.emplace(device, Filled{by.context, event}).second);
  return REFITD_CUDA_CALL(api_, cuEventRecord, event, by.stream);
}

absl::Status Arrivals::Wait(int device, CUstream on) const {
  const auto filled = filled_.find(device);
  if (filled == filled_.end()) return absl::OkStatus();
  return REFITD_CUDA_CALL(api_, cuStreamWaitEvent, on, filled->second.event, 0);
}

absl::StatusOr<RelayStream*> RelayIssue::Using(absl::StatusOr<RelayStream*> stream) {
  if (stream.ok() && std::find(used_.begin(), used_.end(), *stream) == used_.end()) {
    used_.push_back(*stream);
  }
  return stream;
}

absl::StatusOr<std::shared_ptr<const DeviceRegion>> RelayIssue::RegionOf(const char* data) const {
  auto region = memory_->Find(data, 1);
  if (region == nullptr) return absl::InternalError("a slot is no mapped device memory");
  return region;
}

absl::StatusOr<char*> RelayIssue::Reach(char* data, int device) const {
  REFITD_ASSIGN_OR_RETURN(const std::shared_ptr<const DeviceRegion> region, RegionOf(data));
  REFITD_ASSIGN_OR_RETURN(char* const reached, region->On(device));
  return reached + (data - region->data());
}

absl::Status RelayIssue::CopyRuns(const RelayStream& on, const std::vector<RelayRun>& runs,
                                  char* slot) const {
  if (runs.size() == 1 || !api().has_batches()) {
    for (const RelayRun& run : runs) {
      REFITD_RETURN_IF_ERROR(Copy(on, slot + run.offset, run.from, run.bytes));
    }
    return absl::OkStatus();
  }
  std::vector<CUdeviceptr> to;
  std::vector<CUdeviceptr> from;
  std::vector<size_t> bytes;
  for (const RelayRun& run : runs) {
    to.push_back(Address(slot + run.offset));
    from.push_back(Address(run.from));
    bytes.push_back(static_cast<size_t>(run.bytes));
  }
  if (runs.empty()) return absl::OkStatus();
  const ScopedContext current(api(), on.context);
  REFITD_RETURN_IF_ERROR(current.status());
  return api().CopyMany(to.data(), from.data(), bytes.data(), runs.size(), on.stream);
}

absl::Status RelayIssue::Copy(const RelayStream& on, char* to, const char* from,
                              int64_t bytes) const {
  const ScopedContext current(api(), on.context);
  REFITD_RETURN_IF_ERROR(current.status());
  return REFITD_CUDA_CALL(api(), cuMemcpyDtoDAsync, Address(to), Address(from),
                          static_cast<size_t>(bytes), on.stream);
}

absl::Status RelayIssue::Clear(const RelayStream& on, char* data, int64_t bytes) const {
  const ScopedContext current(api(), on.context);
  REFITD_RETURN_IF_ERROR(current.status());
  return REFITD_CUDA_CALL(api(), cuMemsetD8Async, Address(data), 0, static_cast<size_t>(bytes),
                          on.stream);
}

absl::Status RelayIssue::Record(const RelayStream& on) const {
  const ScopedContext current(api(), on.context);
  REFITD_RETURN_IF_ERROR(current.status());
  return REFITD_CUDA_CALL(api(), cuEventRecord, on.event, on.stream);
}

absl::Status RelayIssue::Wait(const RelayStream& on, const RelayStream& event) const {
  const ScopedContext current(api(), on.context);
  REFITD_RETURN_IF_ERROR(current.status());
  return REFITD_CUDA_CALL(api(), cuStreamWaitEvent, on.stream, event.event, 0);
}

absl::Status RelayIssue::Join(CUstream main) const {
  for (const RelayStream* used : used_) {
    absl::Status joined = Record(*used);
    if (joined.ok()) joined = REFITD_CUDA_CALL(api(), cuStreamWaitEvent, main, used->event, 0);
    if (joined.ok()) continue;
    return IsLost(joined) ? joined : api().Check("cuEventRecord", CUDA_ERROR_UNKNOWN);
  }
  return absl::OkStatus();
}

}  // namespace refitd

#endif  // REFITD_CUDA
