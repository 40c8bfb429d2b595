#include "daemon/node/pending_attaches.h"

#include <algorithm>
#include <set>
#include <utility>

#include "transport/base/status.h"

namespace refitd {
namespace {

// Takes the elements for which `wanted` holds, in their order.
template <typename Wanted>
std::vector<PendingAttaches::OfGroup> TakeIf(std::vector<PendingAttaches::OfGroup>* members,
                                             Wanted wanted) {
  std::vector<PendingAttaches::OfGroup> taken;
  for (auto it = members->begin(); it != members->end();) {
    if (wanted(*it)) {
      taken.push_back(std::move(*it));
      it = members->erase(it);
    } else {
      ++it;
    }
  }
  return taken;
}

}  // namespace

std::optional<PendingAttaches::OfGroup> PendingAttaches::TakeOfGroup(MemberId member) {
  const auto it = std::find_if(of_group_.begin(), of_group_.end(),
                               [member](const OfGroup& w) { return w.record.id == member; });
  if (it == of_group_.end()) return std::nullopt;
  OfGroup taken = std::move(*it);
  of_group_.erase(it);
  return taken;
}

std::vector<PendingAttaches::OfGroup> PendingAttaches::TakeAll(const std::string& group,
                                                               const std::string& coordinator) {
  return TakeIf(&of_group_, [&](const OfGroup& w) { return Awaits(w, group, coordinator); });
}

bool PendingAttaches::Any(const std::string& group, const std::string& coordinator) const {
  return std::any_of(of_group_.begin(), of_group_.end(),
                     [&](const OfGroup& w) { return Awaits(w, group, coordinator); });
}

PendingAttaches::Request PendingAttaches::RequestOf(const std::string& group,
                                                    const std::string& coordinator,
                                                    TimePoint now) const {
  Request request;
  for (const OfGroup& w : of_group_) {
    if (!Awaits(w, group, coordinator)) continue;
    if (w.spec.has_value() &&
        (!request.spec.has_value() || (!w.record.engine && !request.trainer))) {
      request.spec = w.spec;
      request.identity = IdentityOf(w.record.peer);
      request.trainer = !w.record.engine;
    }
    if (w.waits) request.wait = std::max(request.wait, w.deadline - now);
  }
  return request;
}

bool PendingAttaches::Refuse(const std::string& group, const std::string& coordinator,
                             const std::function<bool(const OfGroup&)>& stays,
                             const absl::Status& refusal) {
  std::vector<OfGroup> refused = TakeIf(
      &of_group_, [&](const OfGroup& w) { return Awaits(w, group, coordinator) && !stays(w); });
  for (OfGroup& w : refused) w.record.End(refusal);
  return Any(group, coordinator);
}

std::optional<TimePoint> PendingAttaches::NextExpiry(const Expiry& expiry) const {
  std::optional<TimePoint> next;
  for (const OfGroup& w : of_group_) {
    const TimePoint due = expiry(w);
    next = std::min(next.value_or(due), due);
  }
  return next;
}

std::vector<PendingAttaches::OfGroup> PendingAttaches::TakeLate(TimePoint now,
                                                                const Expiry& expiry) {
  return TakeIf(&of_group_, [&](const OfGroup& w) { return expiry(w) <= now; });
}

void PendingAttaches::Wait(OfSlots member) {
  const MemberId id = member.record.id;
  REFITD_CHECK(member.record.ordinal.has_value());
  REFITD_CHECK(of_slots_.emplace(id, std::move(member)).second);
}

std::optional<PendingAttaches::OfSlots> PendingAttaches::TakeOfSlots(MemberId member) {
  const auto it = of_slots_.find(member);
  if (it == of_slots_.end()) return std::nullopt;
  OfSlots taken = std::move(it->second);
  of_slots_.erase(it);
  return taken;
}

bool PendingAttaches::AnyOfSlots(const std::string& group) const {
  return std::any_of(of_slots_.begin(), of_slots_.end(),
                     [&group](const auto& entry) { return entry.second.record.group == group; });
}

bool PendingAttaches::AnyOfSlots(const std::string& group, int ordinal) const {
  return std::any_of(of_slots_.begin(), of_slots_.end(), [&](const auto& entry) {
    return entry.second.record.group == group && entry.second.record.ordinal == ordinal;
  });
}

void PendingAttaches::RefuseAll(const absl::Status& status) {
  for (OfGroup& w : of_group_) w.record.End(status);
  of_group_.clear();
  for (auto& [id, w] : of_slots_) w.record.End(status);
  of_slots_.clear();
}

void PendingAttaches::CheckInvariants() const {
  std::set<MemberId> ids;
  const auto check = [&ids](const MemberRecord& record) {
    REFITD_CHECK(record.id != MemberId() && ids.insert(record.id).second);
    REFITD_CHECK(record.token.empty() && !record.lost && record.regions.empty());
    REFITD_CHECK(record.sink != nullptr);
  };
  for (const OfGroup& w : of_group_) check(w.record);
  for (const auto& [id, w] : of_slots_) {
    check(w.record);
    REFITD_CHECK(w.record.id == id && w.record.engine && w.record.ordinal.has_value());
  }
}

}  // namespace refitd
