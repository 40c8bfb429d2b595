#include "daemon/node/memory.h"

#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "transport/base/status.h"

namespace refitd {

absl::Status Memory::Admit(const MemberRecord& member, const std::string& identity) const {
  if (member.regions.size() >= static_cast<size_t>(limits_.of_member)) {
    return Error(absl::StatusCode::kResourceExhausted, "the member has {} regions already",
                 member.regions.size());
  }
  if (regions_ >= limits_.of_daemon) {
    return Error(absl::StatusCode::kResourceExhausted, "the daemon has {} regions already",
                 regions_);
  }
  if (!member.engine || identity.empty()) return absl::OkStatus();
  for (const auto& [id, region] : member.regions) {
    if (region.identity == identity) {
      return Error(absl::StatusCode::kAlreadyExists, "the memory is region {} already", id);
    }
  }
  return absl::OkStatus();
}

RegionId Memory::Add(MemberRecord* member, RegionRecord region) {
  const RegionId id(next_++);
  REFITD_CHECK(member->regions.emplace(id, std::move(region)).second);
  ++regions_;
  return id;
}

absl::StatusOr<RegionRecord> Memory::Take(MemberRecord* member, RegionId region,
                                          const Calls& calls) {
  const auto it = member->regions.find(region);
  if (it == member->regions.end()) {
    return Error(absl::StatusCode::kNotFound, "region_id: {} is no region of this member", region);
  }
  std::vector<std::shared_ptr<const Layout>> layouts = calls.LayoutsOf(member->id);
  if (member->layout != nullptr) layouts.insert(layouts.begin(), member->layout);
  for (const std::shared_ptr<const Layout>& layout : layouts) {
    for (const Piece& piece : layout->pieces) {
      if (piece.region == region) {
        return Error(absl::StatusCode::kFailedPrecondition,
                     "region_id: {} is in use by tensor '{}'", region,
                     layout->tensors[piece.tensor].name);
      }
    }
  }
  if (calls.IsSource(region)) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "region_id: {} is the source of an unanswered bucket", region);
  }
  RegionRecord taken = std::move(it->second);
  member->regions.erase(it);
  --regions_;
  return taken;
}

std::map<RegionId, RegionRecord> Memory::TakeAll(MemberRecord* member) {
  regions_ -= static_cast<int64_t>(member->regions.size());
  return std::exchange(member->regions, {});
}

absl::Status Memory::BeginOpening() {
  if (opening_ >= Calls::kMaxOpening) {
    return Error(absl::StatusCode::kResourceExhausted, "{} regions are being opened already",
                 opening_);
  }
  ++opening_;
  return absl::OkStatus();
}

void Memory::EndOpening() {
  REFITD_CHECK(opening_ > 0);
  --opening_;
}

void Memory::CheckInvariants(const Leases& leases) const {
  int64_t regions = 0;
  std::set<RegionId> ids;
  for (const auto& [id, member] : leases.all()) {
    REFITD_CHECK(member.regions.size() <= static_cast<size_t>(limits_.of_member));
    regions += static_cast<int64_t>(member.regions.size());
    std::set<std::string> identities;
    for (const auto& [region, record] : member.regions) {
      REFITD_CHECK(region.value() < next_);
      REFITD_CHECK(ids.insert(region).second);
      if (member.engine && !record.identity.empty()) {
        REFITD_CHECK(identities.insert(record.identity).second);
      }
    }
  }
  REFITD_CHECK(regions == regions_);
  REFITD_CHECK(regions_ <= limits_.of_daemon);
}

}  // namespace refitd
