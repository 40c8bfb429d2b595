#include "daemon/node/group_spec.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/checks/bucket.h"
#include "daemon/checks/fields.h"
#include "refitd/v1/types.pb.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

absl::Status CheckField(int64_t value, int64_t low, int64_t high, std::string_view field) {
  if (value >= low && value <= high) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, "spec.{}: {} is not in {}..{}", field, value,
               low, high);
}

void SortUnique(std::vector<std::string>* names) {
  std::sort(names->begin(), names->end());
  names->erase(std::unique(names->begin(), names->end()), names->end());
}

// The spec's unwanted tensors, sorted and without repeats.
absl::StatusOr<std::vector<std::string>> CheckUnwanted(const v1::GroupSpec& message) {
  const auto& given = message.unwanted_tensors();
  const auto prefixes = std::count_if(given.begin(), given.end(),
                                      [](const std::string& name) { return name.ends_with('*'); });
  if (given.size() > kMaxTensorsPerLayout || prefixes > kMaxUnwantedPrefixes) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "spec.unwanted_tensors: {} names and {} prefixes, at most {} and {} may be",
                 given.size() - prefixes, prefixes, kMaxTensorsPerLayout, kMaxUnwantedPrefixes);
  }
  std::vector<std::string> names(given.begin(), given.end());
  for (const std::string& name : names) {
    REFITD_RETURN_IF_ERROR(CheckText(name, kMaxNameBytes, "spec.unwanted_tensors"));
    if (name.empty() || name.find('*') < name.size() - 1) {
      return Error(absl::StatusCode::kInvalidArgument,
                   "spec.unwanted_tensors: '{}' is neither a name nor a prefix with '*' at its end",
                   name);
    }
  }
  SortUnique(&names);
  return names;
}

}  // namespace

absl::StatusOr<GroupSpec> CheckSpec(const v1::GroupSpec& message, const SpecLimits& limits) {
  REFITD_RETURN_IF_ERROR(CheckField(message.trainer_ranks(), 1, kMaxTrainerRanks, "trainer_ranks"));
  REFITD_RETURN_IF_ERROR(CheckField(message.min_instances(), 0, kMaxEngineRanks, "min_instances"));
  if (message.slots() != 0) {
    REFITD_RETURN_IF_ERROR(CheckField(message.slots(), 2, kMaxSlots, "slots"));
  }
  REFITD_RETURN_IF_ERROR(CheckField(message.slot_bytes(), 0, limits.max_pool_bytes, "slot_bytes"));
  if (message.slot_bytes() % 4096 != 0) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "spec.slot_bytes: {} is not a multiple of 4096", message.slot_bytes());
  }
  GroupSpec spec;
  spec.trainer_ranks = message.trainer_ranks();
  spec.min_instances = std::max(1, message.min_instances());
  spec.slot_bytes = message.slot_bytes() == 0 ? limits.default_slot_bytes : message.slot_bytes();
  spec.slots = message.slots() == 0 ? limits.default_slots : message.slots();
  REFITD_RETURN_IF_ERROR(CheckField(message.engine_only_tensors_size(), 0, kMaxTensorsPerLayout,
                                    "engine_only_tensors"));
  for (const std::string& name : message.engine_only_tensors()) {
    REFITD_RETURN_IF_ERROR(CheckText(name, kMaxNameBytes, "spec.engine_only_tensors"));
  }
  spec.engine_only_tensors.assign(message.engine_only_tensors().begin(),
                                  message.engine_only_tensors().end());
  SortUnique(&spec.engine_only_tensors);
  REFITD_ASSIGN_OR_RETURN(spec.unwanted_tensors, CheckUnwanted(message));
  return spec;
}

absl::Status CheckSameSpec(const std::string& group, const v1::GroupSpec& message,
                           const GroupSpec& known, const SpecLimits& limits) {
  v1::GroupSpec filled = message;
  if (filled.slots() == 0) filled.set_slots(known.slots);
  if (filled.slot_bytes() == 0) filled.set_slot_bytes(known.slot_bytes);
  REFITD_ASSIGN_OR_RETURN(const GroupSpec spec, CheckSpec(filled, limits));
  if (EqualButTrainers(spec, known)) return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition, "spec: group '{}' has another", group);
}

absl::Status CheckEqualSpec(const std::string& group, const GroupSpec& has, const GroupSpec& spec) {
  if (EqualButTrainers(has, spec)) return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition,
               "spec: group '{}' has min_instances {}, slot_bytes {}, slots {}, {} engine-only "
               "and {} unwanted tensors; this one says {}, {}, {}, {}, {}",
               group, has.min_instances, has.slot_bytes, has.slots, has.engine_only_tensors.size(),
               has.unwanted_tensors.size(), spec.min_instances, spec.slot_bytes, spec.slots,
               spec.engine_only_tensors.size(), spec.unwanted_tensors.size());
}

absl::Status CheckToldSpec(const GroupSpec& told, const SpecLimits& limits) {
  if (told.slots >= 1 && told.slots <= kMaxSlots && told.slot_bytes >= 1 &&
      told.slot_bytes <= limits.max_pool_bytes) {
    return absl::OkStatus();
  }
  return Error(absl::StatusCode::kInvalidArgument,
               "spec: {} slots of {} bytes, where max_pool_bytes is {}", told.slots,
               told.slot_bytes, limits.max_pool_bytes);
}

}  // namespace refitd
