#include "daemon/group/readiness.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
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
  if (news.instances == nullptr) return;
  for (const InstanceStanding& standing : *news.instances) Set(standing);
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
  std::vector<InstanceStanding> standings;
  standings.reserve(instances_.size());
  for (const auto& [name, standing] : instances_) standings.push_back(standing);
  std::vector<PeerReadiness> all = NewsOf(std::move(standings));
  if (all.empty()) all.push_back({.version = version_});
  all.front().anew = true;
  return all;
}

std::vector<PeerReadiness> ReadinessBook::NewsOf(std::vector<InstanceStanding> standings) const {
  std::vector<PeerReadiness> news;
  for (size_t begin = 0; begin < standings.size(); begin += kMaxStandings) {
    const size_t end = std::min(standings.size(), begin + kMaxStandings);
    const auto at = [&](size_t i) {
      return std::make_move_iterator(standings.begin() + static_cast<ptrdiff_t>(i));
    };
    news.push_back({.version = version_,
                    .instances = Shared(std::vector<InstanceStanding>(at(begin), at(end)))});
  }
  return news;
}

}  // namespace refitd
