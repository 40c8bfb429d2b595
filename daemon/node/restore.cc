#include "daemon/node/restore.h"

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "daemon/process/log.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

// "instance a rank 0, version 7, 4096 bytes"
std::string Show(const KeptRank& kept) {
  return fmt::format("instance {} rank {}, version {}, {} bytes", kept.instance, kept.rank,
                     kept.content.version, kept.bytes());
}

// Unmaps them after the mutex was released.
void Drop(std::vector<KeptRank> ranks, StateLock& lock) {
  if (ranks.empty()) return;
  lock.Last(
      [dropped = std::make_shared<std::vector<KeptRank>>(std::move(ranks))] { dropped->clear(); });
}

void GiveUp(std::vector<KeptRank> ranks, std::string_view why, StateLock& lock) {
  for (const KeptRank& kept : ranks) {
    LogInfo("group {}: kept arenas are given up, {} ({})", kept.group, why, Show(kept));
  }
  Drop(std::move(ranks), lock);
}

}  // namespace

void KeepArenas(DaemonState& state, MemberRecord* member, StateLock& lock) {
  if (state.aborts) return;  // the daemon ends
  std::optional<KeptRank> kept = std::exchange(member->kept, std::nullopt);
  const int seconds = state.groups.Of(*member)->machine->spec().keep_seconds;
  if (!kept.has_value() && seconds > 0) {
    kept = KeptOf(*member, DaemonState::Now() + std::chrono::seconds(seconds));
  }
  if (!kept.has_value()) return;
  LogInfo("group {}: arenas are kept for {} s ({})", kept->group,
          std::chrono::ceil<std::chrono::seconds>(kept->until - DaemonState::Now()).count(),
          Show(*kept));
  GiveUp(state.kept.Keep(*std::move(kept)), "others were kept later", lock);
  lock.DeadlineMoved();
}

absl::Status ClaimKept(const DaemonState& state, Arrival* arrival) {
  MemberRecord& record = arrival->record;
  if (!record.restores) return absl::OkStatus();
  const absl::StatusOr<const KeptRank*> kept = state.kept.Find(record);
  if (absl::IsPermissionDenied(kept.status())) return kept.status();
  if (!kept.ok() || *kept == nullptr) {
    record.restores = false;
    LogInfo("group {}: nothing to restore: {}", record.group,
            kept.ok() ? fmt::format("no arenas are kept here of instance {} rank {}: they were "
                                    "given up, or lost with an earlier daemon",
                                    record.instance, record.rank)
                      : Message(kept.status()));
    return absl::OkStatus();
  }
  const HeldContent& content = (*kept)->content;
  record.claims = content;
  auto& identity = std::get<EngineIdentity>(arrival->identity);
  identity.held_version = content.version;
  identity.held_origin = content.origin;
  identity.held_owner = content.owner;
  identity.held_digest = content.digest;
  return absl::OkStatus();
}

void HandOverKept(DaemonState& state, MemberRecord* member, StateLock& lock) {
  if (!member->engine) return;
  const absl::StatusOr<const KeptRank*> found = state.kept.Find(*member);
  // P3: a version of an incarnation that was replaced is none.
  const bool claimed = member->restores && found.ok() && *found != nullptr &&
                       member->claims == std::optional((*found)->content) &&
                       (*found)->content.origin == state.groups.Of(*member)->machine->incarnation();
  std::vector<KeptRank> needless;
  for (KeptRank& kept : state.kept.TakeAll([member](const KeptRank& each) {
         return SameRank(each, *member) ||
                (member->ordinal.has_value() && each.ordinal == member->ordinal);
       })) {
    if (claimed && SameRank(kept, *member)) {
      member->kept = std::move(kept);
    } else {
      needless.push_back(std::move(kept));
    }
  }
  GiveUp(std::move(needless), "a rank attached that needs their place", lock);
}

void EndRestore(DaemonState& state, MemberRecord* member, std::string_view differs,
                StateLock& lock) {
  if (!member->kept.has_value()) return;
  KeptRank kept = *std::exchange(member->kept, std::nullopt);
  const bool holds = differs.empty();
  if (state.options.observer != nullptr) state.options.observer->Restored(kept.group, holds);
  if (holds) {
    LogInfo("group {}: arenas are taken up, unchanged ({})", kept.group, Show(kept));
  } else {
    LogWarning("group {}: what is registered is not what was kept, {}: it holds no version ({})",
               kept.group, differs, Show(kept));
  }
  std::vector<KeptRank> over;
  over.push_back(std::move(kept));
  Drop(std::move(over), lock);
}

void GiveUpKept(DaemonState& state, const KeptRanks::Wanted& wanted, std::string_view why,
                StateLock& lock) {
  GiveUp(state.kept.TakeAll(wanted), why, lock);
}

}  // namespace refitd
