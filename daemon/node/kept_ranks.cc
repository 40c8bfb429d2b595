#include "daemon/node/kept_ranks.h"

#include <algorithm>
#include <utility>

#include "transport/base/status.h"

namespace refitd {

std::vector<KeptRank> KeptRanks::Keep(KeptRank kept) {
  Key key{kept.group, kept.instance, kept.rank};
  std::vector<KeptRank> out;
  if (const auto before = ranks_.find(key); before != ranks_.end()) {
    out.push_back(std::move(before->second));
    ranks_.erase(before);
  } else if (ranks_.size() == kMaxRanks) {
    out.push_back(*TakeFirst([](const KeptRank& /*any*/) { return true; }));
  }
  ranks_.emplace(std::move(key), std::move(kept));
  return out;
}

absl::StatusOr<const KeptRank*> KeptRanks::Find(const MemberRecord& record) const {
  const auto it = ranks_.find({record.group, record.instance, record.rank});
  if (it == ranks_.end()) return nullptr;
  const KeptRank& kept = it->second;
  const auto& asks = record.peer.credentials;
  if (!asks.has_value() || asks->uid != kept.process.uid) {
    return Error(absl::StatusCode::kPermissionDenied,
                 "restore: the arenas of instance {} rank {} are kept for uid:{}, not for {}",
                 record.instance, record.rank, kept.process.uid, IdentityOf(record.peer));
  }
  // A process that has lost its lease may serve on, and must not be written under.
  if (asks->pid != kept.process.pid && !HasEnded(kept.process)) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "restore: pid {}, which had the arenas of instance {} rank {}, still runs",
                 kept.process.pid, record.instance, record.rank);
  }
  if (kept.world_size != record.world_size || kept.device != record.device) {
    return Error(
        absl::StatusCode::kFailedPrecondition,
        "restore: the arenas of instance {} rank {} have world size {} on {}, and the rank {} "
        "on {}",
        record.instance, record.rank, kept.world_size, kept.device, record.world_size,
        record.device);
  }
  return &kept;
}

std::vector<KeptRank> KeptRanks::TakeAll(const Wanted& wanted) {
  std::vector<KeptRank> out;
  for (auto it = ranks_.begin(); it != ranks_.end();) {
    if (!wanted(it->second)) {
      ++it;
      continue;
    }
    out.push_back(std::move(it->second));
    it = ranks_.erase(it);
  }
  return out;
}

std::optional<KeptRank> KeptRanks::TakeFirst(const Wanted& wanted) {
  auto first = ranks_.end();
  for (auto it = ranks_.begin(); it != ranks_.end(); ++it) {
    if (!wanted(it->second)) continue;
    if (first == ranks_.end() || it->second.until < first->second.until) first = it;
  }
  if (first == ranks_.end()) return std::nullopt;
  KeptRank taken = std::move(first->second);
  ranks_.erase(first);
  return taken;
}

std::optional<TimePoint> KeptRanks::NextEnd() const {
  std::optional<TimePoint> next;
  for (const auto& [key, kept] : ranks_) next = std::min(next.value_or(kept.until), kept.until);
  return next;
}

std::vector<const KeptRank*> KeptRanks::all() const {
  std::vector<const KeptRank*> all;
  for (const auto& [key, kept] : ranks_) all.push_back(&kept);
  return all;
}

void KeptRanks::CheckInvariants() const {
  REFITD_CHECK(ranks_.size() <= kMaxRanks);
  for (const auto& [key, kept] : ranks_) {
    REFITD_CHECK(key == Key(kept.group, kept.instance, kept.rank));
    REFITD_CHECK(kept.content.digest != 0 && !kept.arenas.empty());
    for (const KeptRank::Arena& arena : kept.arenas) {
      for (const RegionRecord* const side : {&arena.front, &arena.back}) {
        REFITD_CHECK(side->descriptor != nullptr && side->memory.bytes > 0);
      }
    }
  }
}

bool SameRank(const KeptRank& kept, const MemberRecord& record) {
  return kept.group == record.group && kept.instance == record.instance && kept.rank == record.rank;
}

std::optional<KeptRank> KeptOf(const MemberRecord& member, TimePoint until) {
  const auto& process = member.peer.credentials;
  if (!process.has_value() || process->pidfd == nullptr) return std::nullopt;
  if (!member.holds.has_value() || member.layout->backs.empty()) return std::nullopt;
  KeptRank kept{.group = member.group,
                .instance = member.instance,
                .rank = member.rank,
                .world_size = member.world_size,
                .device = member.device,
                .ordinal = member.ordinal,
                .process = *process,
                .layout_digest = member.layout_digest,
                .content = *member.holds,
                .arenas = {},
                .until = until};
  for (const RegionBack& pair : member.layout->backs) {
    const RegionRecord& front = member.regions.at(member.Side(pair.region, /*back=*/false));
    const RegionRecord& back = member.regions.at(member.Side(pair.region, /*back=*/true));
    if (!front.for_next_rank || !back.for_next_rank) return std::nullopt;
    kept.arenas.push_back({front, back});
  }
  return kept;
}

}  // namespace refitd
