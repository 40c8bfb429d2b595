#include "daemon/group/failed_wire.h"

#include <algorithm>

#include "transport/base/status.h"

namespace refitd::coordinator {

void FailedWire::Add(NodeId node, std::vector<NodeId> named, absl::Status status) {
  reports_.push_back({node, std::move(named), std::move(status)});
}

bool FailedWire::Reported(NodeId node) const {
  return std::any_of(reports_.begin(), reports_.end(),
                     [node](const Report& report) { return report.node == node; });
}

// Ranks that waited say more than ranks whose connection broke, since the end of one run breaks the
// connections of others. Of the nodes that are named, one that reported nothing itself is to blame
// first, and then the one that more of the others name.
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
