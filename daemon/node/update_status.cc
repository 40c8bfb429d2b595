#include "daemon/node/update_status.h"

#include <chrono>

#include "transport/base/ids.h"

namespace refitd {
namespace {

void Fill(const InstanceOutcome& outcome, v1::InstanceResult* result) {
  result->set_instance(outcome.instance);
  result->set_committed(outcome.committed);
  result->set_reason(outcome.reason);
}

}  // namespace

v1::UpdateStatus StatusOf(const std::string& group, const UpdateView& update) {
  v1::UpdateStatus status;
  status.set_group(group);
  status.set_version(update.version.value());
  status.set_update_id(update.id.value());
  status.set_state(std::string(update.state));
  status.set_outcome(static_cast<v1::UpdateOutcome>(update.outcome));
  status.set_reason(update.reason);
  status.set_bytes(update.bytes);
  status.set_total_bytes(update.total_bytes);
  status.set_tensors(update.tensors);
  status.set_tensor_count(update.tensor_count);
  status.set_buckets(update.buckets);
  status.set_note(update.note);
  status.set_elapsed_seconds(std::chrono::duration<double>(update.elapsed).count());
  status.set_remaining_ms(ToMillis(update.remaining));
  for (const InstanceOutcome& outcome : update.instances) Fill(outcome, status.add_instances());
  return status;
}

}  // namespace refitd
