#include "daemon/node/leases.h"

#include <sys/random.h>

#include <algorithm>
#include <utility>

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

MemberRecord* Leases::Add(MemberRecord record) {
  REFITD_CHECK(record.id != MemberId() && !record.lost && record.token.empty());
  record.token = RandomToken();
  const MemberId id = record.id;
  REFITD_CHECK(tokens_.emplace(record.token, id).second);
  const auto [it, added] = members_.emplace(id, std::move(record));
  REFITD_CHECK(added);
  return &it->second;
}

bool Leases::Lose(MemberRecord* member) {
  if (member->lost) return false;
  member->lost = true;
  REFITD_CHECK(tokens_.erase(member->token) == 1);
  return true;
}

MemberRecord Leases::Remove(MemberId member) {
  const auto it = members_.find(member);
  REFITD_CHECK(it != members_.end());
  MemberRecord record = std::move(it->second);
  members_.erase(it);
  if (!record.lost) REFITD_CHECK(tokens_.erase(record.token) == 1);
  return record;
}

MemberRecord* Leases::Find(MemberId member) {
  const auto it = members_.find(member);
  return it == members_.end() ? nullptr : &it->second;
}

const MemberRecord* Leases::Find(MemberId member) const {
  const auto it = members_.find(member);
  return it == members_.end() ? nullptr : &it->second;
}

absl::StatusOr<MemberRecord*> Leases::Authenticate(const std::string& token, const Peer& peer) {
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

bool Leases::HasDevices(const std::string& group) const {
  return std::any_of(members_.begin(), members_.end(), [&group](const auto& entry) {
    return entry.second.group == group && entry.second.ordinal.has_value();
  });
}

bool Leases::OnDevice(const std::string& group, int ordinal) const {
  return std::any_of(members_.begin(), members_.end(), [&group, ordinal](const auto& entry) {
    return entry.second.group == group && entry.second.ordinal == ordinal;
  });
}

void Leases::CheckInvariants() const {
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
