#include "daemon/node/members.h"

#include <sys/random.h>

#include <algorithm>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "daemon/sockets/descriptor_socket.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

// Random bytes from the kernel, so that a token can't be guessed (P9).
std::string RandomToken() {
  std::string token(sizeof(Token), '\0');
  REFITD_CHECK(getrandom(token.data(), token.size(), 0) == static_cast<ssize_t>(token.size()));
  return token;
}

}  // namespace

MemberRecord* Members::Add(MemberRecord record) {
  REFITD_CHECK(record.id != MemberId() && !record.lost && record.token.empty());
  record.token = RandomToken();
  const MemberId id = record.id;
  REFITD_CHECK(tokens_.emplace(record.token, id).second);
  const auto [it, added] = members_.emplace(id, std::move(record));
  REFITD_CHECK(added);
  return &it->second;
}

bool Members::Lose(MemberRecord* member) {
  if (member->lost) return false;
  member->lost = true;
  REFITD_CHECK(tokens_.erase(member->token) == 1);
  return true;
}

MemberRecord Members::Remove(MemberId member) {
  const auto it = members_.find(member);
  REFITD_CHECK(it != members_.end());
  MemberRecord record = std::move(it->second);
  members_.erase(it);
  regions_ -= static_cast<int64_t>(record.regions.size());
  if (!record.lost) REFITD_CHECK(tokens_.erase(record.token) == 1);
  return record;
}

MemberRecord* Members::Find(MemberId member) {
  const auto it = members_.find(member);
  return it == members_.end() ? nullptr : &it->second;
}

const MemberRecord* Members::Find(MemberId member) const {
  const auto it = members_.find(member);
  return it == members_.end() ? nullptr : &it->second;
}

absl::StatusOr<MemberRecord*> Members::OfToken(const std::string& token, const Peer& peer) {
  const auto it = tokens_.find(token);
  if (it == tokens_.end()) {
    return absl::UnauthenticatedError("lease.token: no such lease (never given, or it ended)");
  }
  MemberRecord& member = members_.at(it->second);
  if (member.peer.credentials.has_value() &&
      (!peer.credentials.has_value() || peer.credentials->uid != member.peer.credentials->uid)) {
    return absl::PermissionDeniedError("lease.token: the lease belongs to another user");
  }
  if (member.peer.identity != peer.identity) {
    return Error(absl::StatusCode::kPermissionDenied,
                 "lease.token: the lease belongs to {}, the caller is {}",
                 member.peer.identity.empty() ? "a member without a certificate"
                                              : "'" + member.peer.identity + "'",
                 peer.identity.empty() ? "without a certificate" : "'" + peer.identity + "'");
  }
  return &member;
}

void Members::ForgetHeld(const std::string& group) {
  for (auto& [id, member] : members_) {
    if (member.group == group) member.holds.reset();
  }
}

bool Members::HasDevices(const std::string& group) const {
  return std::any_of(members_.begin(), members_.end(), [&group](const auto& entry) {
    return entry.second.group == group && entry.second.ordinal.has_value();
  });
}

std::vector<int> Members::DevicesOf(const std::string& group) const {
  std::set<int> devices;
  for (const auto& [id, member] : members_) {
    if (member.group == group && member.ordinal.has_value()) devices.insert(*member.ordinal);
  }
  return {devices.begin(), devices.end()};
}

bool Members::OnDevice(const std::string& group, int ordinal) const {
  return std::any_of(members_.begin(), members_.end(), [&group, ordinal](const auto& entry) {
    return entry.second.group == group && entry.second.ordinal == ordinal;
  });
}

// ---- regions ----

absl::Status Members::AdmitRegion(const MemberRecord& member, const std::string& identity) const {
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

RegionId Members::AddRegion(MemberRecord* member, RegionRecord region) {
  const RegionId id(next_region_++);
  REFITD_CHECK(member->regions.emplace(id, std::move(region)).second);
  ++regions_;
  return id;
}

absl::StatusOr<RegionRecord> Members::TakeRegion(MemberRecord* member, RegionId region,
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
    for (const RegionBack& pair : layout->backs) {
      if (pair.back != region && pair.region != region) continue;
      return Error(absl::StatusCode::kFailedPrecondition,
                   "region_id: {} is in use: region {} is the back of region {}", region, pair.back,
                   pair.region);
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

absl::Status Members::BeginOpening() {
  if (opening_ >= Calls::kMaxOpening) {
    return Error(absl::StatusCode::kResourceExhausted, "{} regions are being opened already",
                 opening_);
  }
  ++opening_;
  return absl::OkStatus();
}

void Members::EndOpening() {
  REFITD_CHECK(opening_ > 0);
  --opening_;
}

void Members::CheckRegions() const {
  int64_t regions = 0;
  std::set<RegionId> ids;
  for (const auto& [id, member] : members_) {
    REFITD_CHECK(member.regions.size() <= static_cast<size_t>(limits_.of_member));
    regions += static_cast<int64_t>(member.regions.size());
    std::set<std::string> identities;
    for (const auto& [region, record] : member.regions) {
      REFITD_CHECK(region.value() < next_region_);
      REFITD_CHECK(ids.insert(region).second);
      if (member.engine && !record.identity.empty()) {
        REFITD_CHECK(identities.insert(record.identity).second);
      }
    }
  }
  REFITD_CHECK(regions == regions_);
  REFITD_CHECK(regions_ <= limits_.of_daemon);
}

void Members::CheckInvariants() const {
  CheckRegions();
  size_t live = 0;
  for (const auto& [id, member] : members_) {
    REFITD_CHECK(member.id == id);
    const auto token = tokens_.find(member.token);
    if (member.lost) {
      REFITD_CHECK(token == tokens_.end());
      continue;
    }
    REFITD_CHECK(token != tokens_.end() && token->second == id);
    ++live;
  }
  REFITD_CHECK(live == tokens_.size());
}

}  // namespace refitd
