#include "daemon/node/group_spec.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/checks/fields.h"
#include "transport/base/errors.h"
#include "transport/base/status.h"
#include "transport/plan/name_patterns.h"

namespace refitd {
namespace {

absl::Status CheckField(int64_t value, int64_t low, int64_t high, std::string_view field) {
  if (value >= low && value <= high) return absl::OkStatus();
  return InvalidField(fmt::format("spec.{}", field), "spec.{}: {} is not in {}..{}", field, value,
                      low, high);
}

void SortUnique(std::vector<std::string>* names) {
  std::sort(names->begin(), names->end());
  names->erase(std::unique(names->begin(), names->end()), names->end());
}

absl::Status CheckPatterns(const std::vector<std::string>& names, std::string_view field) {
  const auto patterns = std::count_if(names.begin(), names.end(), IsPattern);
  const auto count = static_cast<int64_t>(names.size());
  if (count > kMaxTensorsPerLayout || patterns > kMaxNamePatterns) {
    return InvalidField(field,
                        "{}: {} names and {} patterns with '*' or '?', at most {} and {} may be",
                        field, count - patterns, patterns, kMaxTensorsPerLayout, kMaxNamePatterns);
  }
  for (const std::string& name : names) {
    REFITD_RETURN_IF_ERROR(CheckLine(name, kMaxNameBytes, field));
    if (!name.empty()) continue;
    return InvalidField(field, "{}: a name is empty", field);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<GroupSpec> CheckSpec(GroupSpec wanted, const SpecLimits& limits) {
  REFITD_RETURN_IF_ERROR(CheckField(wanted.trainer_ranks, 1, kMaxTrainerRanks, "trainer_ranks"));
  REFITD_RETURN_IF_ERROR(CheckField(wanted.min_instances, 0, kMaxEngineRanks, "min_instances"));
  if (wanted.slots != 0) REFITD_RETURN_IF_ERROR(CheckField(wanted.slots, 2, kMaxSlots, "slots"));
  REFITD_RETURN_IF_ERROR(CheckField(wanted.slot_bytes, 0, limits.max_pool_bytes, "slot_bytes"));
  if (wanted.slot_bytes % 4096 != 0) {
    return InvalidField("spec.slot_bytes", "spec.slot_bytes: {} is not a multiple of 4096",
                        wanted.slot_bytes);
  }
  REFITD_RETURN_IF_ERROR(CheckPatterns(wanted.engine_only_tensors, "spec.engine_only_tensors"));
  REFITD_RETURN_IF_ERROR(CheckPatterns(wanted.unwanted_tensors, "spec.unwanted_tensors"));
  REFITD_RETURN_IF_ERROR(CheckField(wanted.max_lag, 0, kMaxLag, "max_lag"));
  REFITD_RETURN_IF_ERROR(CheckField(wanted.hold_previous_seconds, 0, kMaxHoldPreviousSeconds,
                                    "hold_previous_seconds"));
  REFITD_RETURN_IF_ERROR(CheckField(wanted.keep_seconds, 0, kMaxKeepSeconds, "keep_seconds"));
  wanted.min_instances = std::max(1, wanted.min_instances);
  if (wanted.slot_bytes == 0) wanted.slot_bytes = limits.default_slot_bytes;
  if (wanted.slots == 0) wanted.slots = limits.default_slots;
  SortUnique(&wanted.engine_only_tensors);
  SortUnique(&wanted.unwanted_tensors);
  return wanted;
}

absl::Status CheckSameSpec(const std::string& group, GroupSpec wanted, const GroupSpec& known,
                           const SpecLimits& limits) {
  if (wanted.slots == 0) wanted.slots = known.slots;
  if (wanted.slot_bytes == 0) wanted.slot_bytes = known.slot_bytes;
  REFITD_ASSIGN_OR_RETURN(const GroupSpec spec, CheckSpec(std::move(wanted), limits));
  if (EqualButTrainers(spec, known)) return absl::OkStatus();
  if (spec.encrypted_data != known.encrypted_data) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "spec.encrypted_data: group '{}' has {}, this one says {}", group,
                 known.encrypted_data, spec.encrypted_data);
  }
  return Error(absl::StatusCode::kFailedPrecondition, "spec: group '{}' has another", group);
}

absl::Status CheckEqualSpec(const std::string& group, const GroupSpec& has, const GroupSpec& spec) {
  if (EqualButTrainers(has, spec)) return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition,
               "spec: group '{}' has min_instances {}, slot_bytes {}, slots {}, {} engine-only "
               "and {} unwanted tensors, max_lag {}, encrypted_data {}, hold_previous_seconds {}, "
               "keep_seconds {}; this one says {}, {}, {}, {}, {}, {}, {}, {}, {}",
               group, has.min_instances, has.slot_bytes, has.slots, has.engine_only_tensors.size(),
               has.unwanted_tensors.size(), has.max_lag, has.encrypted_data,
               has.hold_previous_seconds, has.keep_seconds, spec.min_instances, spec.slot_bytes,
               spec.slots, spec.engine_only_tensors.size(), spec.unwanted_tensors.size(),
               spec.max_lag, spec.encrypted_data, spec.hold_previous_seconds, spec.keep_seconds);
}

absl::Status CheckEncryption(const std::string& group, const GroupSpec& spec,
                             const std::string& daemon, const std::string& clear) {
  if (!spec.encrypted_data || clear.empty()) return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition,
               "spec.encrypted_data: group '{}' demands it, and the data plane of daemon {} is in "
               "the clear: {}",
               group, daemon, clear);
}

absl::Status CheckGivenSpec(const GroupSpec& given, const SpecLimits& limits) {
  if (given.slots >= 1 && given.slots <= kMaxSlots && given.slot_bytes >= 1 &&
      given.slot_bytes <= limits.max_pool_bytes) {
    return absl::OkStatus();
  }
  return InvalidField("spec", "spec: {} slots of {} bytes, where max_pool_bytes is {}", given.slots,
                      given.slot_bytes, limits.max_pool_bytes);
}

}  // namespace refitd
