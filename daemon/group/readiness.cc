#include "daemon/group/readiness.h"

#include <array>
#include <utility>

#include "transport/base/status.h"

namespace refitd {

std::string_view Name(Standing standing) {
  constexpr std::array<std::string_view, kStandings> kNames = {
      "gone", "forming", "dirty", "clean", "updating", "empty", "stray", "undone"};
  return kNames[static_cast<size_t>(standing)];
}

bool ReadinessBook::Set(const InstanceStanding& standing) {
  if (standing.standing == Standing::kGone) return instances_.erase(standing.instance) > 0;
  const auto [it, added] = instances_.try_emplace(standing.instance, standing);
  if (added) return true;
  if (it->second == standing) return false;
  it->second = standing;
  return true;
}

bool ReadinessBook::SetVersion(std::optional<Version> version) {
  return std::exchange(version_, version) != version;
}

void ReadinessBook::Take(const PeerReadiness& news) {
  if (news.anew) instances_.clear();
  version_ = news.version;
  for (const InstanceStanding& standing : news.instances) Set(standing);
}

void ReadinessBook::LoseCoordinator() {
  for (auto& [name, standing] : instances_) {
    if (standing.standing == Standing::kUpdating) MarkUnknown(name);
  }
}

void ReadinessBook::MarkUnknown(const std::string& instance) {
  const auto it = instances_.find(instance);
  if (it == instances_.end()) return;
  it->second.standing = Standing::kDirty;
  it->second.version.reset();
}

std::optional<Readiness> ReadinessBook::Of(const std::string& instance, int64_t max_lag) const {
  const auto it = instances_.find(instance);
  if (it == instances_.end()) return std::nullopt;
  const InstanceStanding& known = it->second;
  Readiness readiness;
  if (version_.has_value() && known.version.has_value()) {
    readiness.lag = version_->value() - known.version->value();
  }
  if (known.standing == Standing::kEmpty) {
    readiness.lag.reset();
    readiness.reason = "it holds no version, and the group had one before";
  } else if (known.standing == Standing::kStray) {
    readiness.lag.reset();
    readiness.reason = "it holds another version than the group's other instances brought";
  } else if (known.standing == Standing::kUndone) {
    readiness.reason = "its version was rolled back";
  } else if (known.standing != Standing::kClean && known.standing != Standing::kUpdating) {
    readiness.lag.reset();
    readiness.reason = fmt::format("it is {}", Name(known.standing));
  } else if (version_.has_value() && !readiness.lag.has_value()) {
    readiness.reason =
        fmt::format("it has no version to compare with the group's version {}", *version_);
  } else if (readiness.lag.has_value() && *readiness.lag > max_lag) {
    readiness.reason =
        fmt::format("its version {} is {} behind the group's version {}, where max_lag is {}",
                    *known.version, *readiness.lag, *version_, max_lag);
  }
  readiness.ready = readiness.reason.empty();
  return readiness;
}

std::vector<PeerReadiness> ReadinessBook::All() const {
  std::vector<PeerReadiness> all;
  all.push_back({.anew = true, .version = version_, .instances = {}});
  for (const auto& [name, standing] : instances_) {
    if (all.back().instances.size() >= kMaxStandings) {
      all.push_back({.anew = false, .version = version_, .instances = {}});
    }
    all.back().instances.push_back(standing);
  }
  return all;
}

}  // namespace refitd
