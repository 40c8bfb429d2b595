#include "daemon/group/communicator.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "transport/base/status.h"

namespace refitd::coordinator {

Communicator::Communicator(CommunicatorId id, std::vector<NodeId> ranks, Duration limit,
                           TimePoint now)
    : id_(id),
      ranks_(std::move(ranks)),
      limit_(limit),
      deadline_(now + limit),
      judge_at_(deadline_) {}

std::optional<uint32_t> Communicator::RankOf(NodeId node) const {
  const auto at = std::lower_bound(ranks_.begin(), ranks_.end(), node);
  if (at == ranks_.end() || *at != node) return std::nullopt;
  return static_cast<uint32_t>(at - ranks_.begin());
}

WireSeq Communicator::Take(uint64_t count) {
  const WireSeq first(next_seq_);
  next_seq_ += count;
  return first;
}

NodeCommands Communicator::Open() const {
  NodeCommands commands;
  const auto size = static_cast<int>(ranks_.size());
  for (int rank = 0; rank < size; ++rank) {
    commands.push_back({ranks_[static_cast<size_t>(rank)], OpenCommunicator{id_, rank, size}});
  }
  return commands;
}

NodeCommands Communicator::Close() const {
  NodeCommands commands;
  for (const NodeId node : ranks_) commands.push_back({node, CloseCommunicator{id_}});
  return commands;
}

bool Communicator::Opened(NodeId node, const std::string& address) {
  addresses_[node] = address;
  return addresses_.size() == ranks_.size();
}

NodeCommands Communicator::Connect(Duration limit, TimePoint now) {
  connecting_ = true;
  limit_ = limit;
  // Ranks report whom they waited for a little after their own time has passed.
  judge_at_ = deadline_ = now + limit_ + std::min<Duration>(limit_ / 4, kWaitForReports);
  PeerCommunicatorConnect connect;
  connect.communicator = id_;
  connect.timeout = limit_;
  connect.coordinator_rank = RankOf(kCoordinatorNode);
  // Every node gets all addresses, so the list is shared.
  auto addresses = std::make_shared<std::vector<std::string>>();
  for (const NodeId rank : ranks_) addresses->push_back(addresses_.at(rank));
  connect.addresses = std::move(addresses);
  NodeCommands commands;
  for (const NodeId rank : ranks_) commands.push_back({rank, connect});
  return commands;
}

bool Communicator::Answered(NodeId node, const absl::Status& status, TimePoint now) {
  if (status.ok()) {
    up_.insert(node);
  } else {
    std::vector<NodeId> named = NodesNamed(status);
    std::erase(named, node);
    if (failed_.empty()) first_failed_ = node;
    failed_.insert_or_assign(node, Failed{std::move(named), status});
    // The other ranks time out at about the same moment; together they say more.
    judge_at_ = std::min(judge_at_, now + std::min<Duration>(limit_ / 4, kWaitForReports));
  }
  return up_.size() + failed_.size() >= ranks_.size();
}

std::vector<NodeId> Communicator::NodesNamed(const absl::Status& status) const {
  std::set<NodeId> named;  // a daemon may name a rank twice
  for (const int rank : FailureOf(status).ranks) {
    if (static_cast<size_t>(rank) < ranks_.size()) named.insert(ranks_[static_cast<size_t>(rank)]);
  }
  return {named.begin(), named.end()};
}

std::string Communicator::NamesOfRanks(const absl::Status& status, const JoinedNodes& nodes) const {
  constexpr size_t kShown = 16;
  std::string names;
  const std::vector<int> ranks = FailureOf(status).ranks;
  for (size_t i = 0; i < std::min(ranks.size(), kShown); ++i) {
    const auto rank = static_cast<size_t>(ranks[i]);
    if (rank >= ranks_.size()) continue;
    names +=
        fmt::format("{}rank {} is {}", names.empty() ? "" : ", ", rank, nodes.Name(ranks_[rank]));
  }
  return names.empty() ? "" : fmt::format(" ({})", names);
}

std::vector<NodeId> Communicator::Awaited() const {
  std::vector<NodeId> awaited;
  for (const NodeId node : ranks_) {
    const bool came =
        connecting_ ? up_.contains(node) || failed_.contains(node) : addresses_.contains(node);
    if (!came) awaited.push_back(node);
  }
  return awaited;
}

// A rank that names nobody is to blame if others came up while it timed out, or if it was the first
// to fail for another reason. A rank that is up has reached every other, so a rank that could not
// reach it is to blame.
bool Communicator::LooksGuilty(NodeId node, const Failed& failed) const {
  if (failed.named.empty()) {
    const bool waited = failed.status.code() == absl::StatusCode::kDeadlineExceeded;
    return waited ? !up_.empty() : node == first_failed_;
  }
  return std::any_of(failed.named.begin(), failed.named.end(),
                     [this](NodeId named) { return up_.contains(named); });
}

// If two ranks could not reach each other, one of them must go: the rank that more of the others
// could not reach. Ranks with trainers stay, since no update can do without them.
std::optional<std::set<NodeId>> Communicator::Suspects(const OfNode& needed, TimePoint now) const {
  std::set<NodeId> suspects;
  if (now >= deadline_) {
    for (const NodeId node : Awaited()) suspects.insert(node);
  }
  std::vector<std::pair<NodeId, NodeId>> parted;  // ranks that could not reach each other
  for (const auto& [node, failed] : failed_) {
    if (LooksGuilty(node, failed)) suspects.insert(node);
    for (const NodeId named : failed.named) parted.emplace_back(node, named);
  }
  while (true) {
    std::erase_if(parted, [&suspects](const auto& pair) {
      return suspects.contains(pair.first) || suspects.contains(pair.second);
    });
    if (parted.empty()) break;
    std::map<NodeId, int> times;
    for (const auto& [a, b] : parted) {
      ++times[a];
      ++times[b];
    }
    // `worst` failed more often than any other, or as often as a rank that has to stay.
    NodeId worst = times.begin()->first;
    for (const auto& [node, count] : times) {
      const int most = times.at(worst);
      if (count > most || (count == most && !needed(node))) worst = node;
    }
    if (needed(worst)) return std::set<NodeId>();
    suspects.insert(worst);
  }
  if (suspects.empty()) return std::nullopt;
  return suspects;
}

WhyDown Communicator::Why(const std::set<NodeId>& suspects, const JoinedNodes& nodes) const {
  if (failed_.empty()) {
    const std::vector<NodeId> awaited = Awaited();
    return {fmt::format("the data plane did not come up within {} (peers.wire_ms, or half of the "
                        "update's remaining time): waited for {}",
                        InSeconds(limit_), nodes.Names(awaited)),
            GiveUpClass::kDeadline, nodes.Suspecting(awaited)};
  }
  // A rank that waited for a suspect says more than the suspect itself.
  auto report = std::find_if(failed_.begin(), failed_.end(), [&suspects](const auto& f) {
    return std::any_of(f.second.named.begin(), f.second.named.end(),
                       [&suspects](NodeId named) { return suspects.contains(named); });
  });
  if (report == failed_.end()) report = failed_.begin();
  const absl::Status& status = report->second.status;
  return {fmt::format("the data plane did not come up on {}: {}{}", nodes.Name(report->first),
                      Message(status), NamesOfRanks(status, nodes)),
          GiveUpClass::kTransfer,
          suspects.empty() ? FailureOfNode(report->first, status, nodes, this)
                           : nodes.Suspecting(suspects)};
}

void Communicator::CheckInvariants() const {
  REFITD_CHECK(ranks_.size() >= 2 && std::is_sorted(ranks_.begin(), ranks_.end()));
  for (const NodeId node : up_) REFITD_CHECK(has(node));
  for (const auto& [node, address] : addresses_) REFITD_CHECK(has(node));
  for (const auto& [node, failed] : failed_) REFITD_CHECK(has(node) && !failed.status.ok());
  REFITD_CHECK(!connecting_ || addresses_.size() == ranks_.size());
  REFITD_CHECK(connecting_ || (up_.empty() && failed_.empty()));
  REFITD_CHECK(judge_at_ <= deadline_);
}

Failure FailureOfNode(NodeId node, const absl::Status& status, const JoinedNodes& nodes,
                      const Communicator* communicator) {
  Failure failure = FailureOf(status);
  if (communicator != nullptr) {
    for (const NodeId named : communicator->NodesNamed(status)) failure.Add(nodes.SuspectOf(named));
  }
  failure.ranks.clear();
  if (failure.suspects.empty() && failure.tensor.empty()) failure.Add(nodes.SuspectOf(node));
  return failure;
}

absl::Status StatusOfNode(NodeId node, const absl::Status& status, bool of_wire,
                          const JoinedNodes& nodes, const Communicator* communicator) {
  const bool ranks = of_wire && communicator != nullptr;
  return WithFailure(Error(status.code(), "{}: {}{}", nodes.Name(node), Message(status),
                           ranks ? communicator->NamesOfRanks(status, nodes) : ""),
                     FailureOfNode(node, status, nodes, communicator));
}

// ---- FailedWire ----

void FailedWire::Add(NodeId node, std::vector<NodeId> named, absl::Status status) {
  reports_.push_back({node, std::move(named), std::move(status)});
}

bool FailedWire::Reported(NodeId node) const {
  return std::any_of(reports_.begin(), reports_.end(),
                     [node](const Report& report) { return report.node == node; });
}

// Reports of a deadline count before those of a broken connection: a rank that gives a collective
// up closes its connections, which its peers then report. Of the nodes named, one that reported
// nothing is blamed first, then the one that most others name.
std::optional<NodeId> FailedWire::Suspect(const OfNode& needed) const {
  const auto waited = [](const Report& report) {
    return report.status.code() == absl::StatusCode::kDeadlineExceeded;
  };
  const bool any_waited = std::any_of(reports_.begin(), reports_.end(), waited);
  std::map<NodeId, std::set<NodeId>> complaints;  // the nodes that name a node, by that node
  for (const Report& report : reports_) {
    if (any_waited && !waited(report)) continue;
    for (const NodeId named : report.named) {
      if (named != report.node) complaints[named].insert(report.node);
    }
  }
  const auto blame_of = [&](NodeId node) {
    return std::pair(!Reported(node), complaints.at(node).size());
  };
  std::optional<NodeId> worst;
  for (const auto& [node, by] : complaints) {
    const bool tie = worst.has_value() && blame_of(node) == blame_of(*worst);
    if (!worst.has_value() || blame_of(node) > blame_of(*worst) || (tie && !needed(node))) {
      worst = node;
    }
  }
  return worst;
}

absl::Status FailedWire::ReportOf(NodeId node) const {
  const auto report = std::find_if(reports_.begin(), reports_.end(), [node](const Report& r) {
    return r.node != node && std::find(r.named.begin(), r.named.end(), node) != r.named.end();
  });
  return report == reports_.end() ? absl::OkStatus() : report->status;
}

// The node to blame is named by others and has reported nothing itself. A report that names only
// such nodes says more than a report that also names a node which waited itself.
const FailedWire::Report& FailedWire::MostTelling() const {
  const auto silent = [this](NodeId node) { return !Reported(node); };
  auto report = std::find_if(reports_.begin(), reports_.end(), [&silent](const Report& r) {
    return !r.named.empty() && std::all_of(r.named.begin(), r.named.end(), silent);
  });
  if (report != reports_.end()) return *report;
  report = std::find_if(reports_.begin(), reports_.end(), [&silent](const Report& r) {
    return std::any_of(r.named.begin(), r.named.end(), silent);
  });
  return report == reports_.end() ? reports_.front() : *report;
}

absl::Status FailedWire::Cause(const JoinedNodes& nodes) const {
  const Report& report = MostTelling();
  std::set<std::string> likely;  // daemons, by id
  for (const NodeId node : report.named) {
    if (!Reported(node)) likely.insert(nodes.DaemonId(node));
  }
  Failure failure = FailureOf(report.status);
  std::stable_partition(failure.suspects.begin(), failure.suspects.end(),
                        [&likely](const refitd::Suspect& s) { return likely.contains(s.daemon); });
  return WithFailure(report.status, failure);
}

void FailedWire::CheckInvariants() const {
  REFITD_CHECK(!reports_.empty());
  for (const Report& report : reports_) REFITD_CHECK(!report.status.ok());
}

}  // namespace refitd::coordinator
