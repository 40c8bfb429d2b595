#include "daemon/group/slow_nodes.h"

#include <algorithm>
#include <chrono>

#include "transport/base/status.h"

namespace refitd {
namespace {

// A node with at most this part of the usual rate may be slow. Links of one network differ by less,
// and a node that is left out costs a catch-up.
constexpr double kSlowPart = 0.5;
// A run in which a link carried less says nothing of the link's rate: latency counts for more.
constexpr int64_t kLeastBytes = int64_t{1} << 20;

double Seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

bool Tells(const SlowNodes::Use& use) { return use.bytes >= kLeastBytes && use.busy > Duration(0); }

// The links into one node, taken together.
struct Received {
  double rate = 0;     // of the fastest link
  Duration longest{};  // of all links
};

std::map<NodeId, Received> ReceivedBy(const std::vector<SlowNodes::Use>& uses) {
  std::map<NodeId, Received> all;
  for (const SlowNodes::Use& use : uses) {
    if (!Tells(use)) continue;
    Received& node = all[use.to];
    node.rate = std::max(node.rate, static_cast<double>(use.bytes) / Seconds(use.busy));
    node.longest = std::max(node.longest, use.busy);
  }
  return all;
}

// The median rate of all receivers but `node`, the lower one of two; 0: there are none.
double UsualRate(const std::map<NodeId, Received>& all, NodeId node) {
  std::vector<double> rates;
  for (const auto& [other, received] : all) {
    if (other != node) rates.push_back(received.rate);
  }
  if (rates.empty()) return 0;
  const auto middle = rates.begin() + static_cast<ptrdiff_t>((rates.size() - 1) / 2);
  std::nth_element(rates.begin(), middle, rates.end());
  return *middle;
}

// A node into which every link is slow.
struct Suspect {
  NodeId node;
  double usual = 0;          // rate of the others
  std::set<NodeId> senders;  // of the slow links into this node
  size_t slow_links = 0;     // slow links into this node, and from it to other suspects
};

// The suspects, those with most slow links first.
std::vector<Suspect> Suspects(const std::vector<SlowNodes::Use>& uses,
                              const std::map<NodeId, Received>& all) {
  std::map<NodeId, Suspect> suspects;
  for (const auto& [node, received] : all) {
    const double usual = UsualRate(all, node);
    if (received.rate <= kSlowPart * usual) suspects[node] = {node, usual, {}, 0};
  }
  for (const SlowNodes::Use& use : uses) {
    const auto to = suspects.find(use.to);
    if (to == suspects.end() || !Tells(use)) continue;
    to->second.senders.insert(use.from);
    ++to->second.slow_links;
    const auto from = suspects.find(use.from);
    if (from != suspects.end()) ++from->second.slow_links;
  }
  std::vector<Suspect> sorted;
  sorted.reserve(suspects.size());
  for (auto& [node, suspect] : suspects) sorted.push_back(std::move(suspect));
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const Suspect& a, const Suspect& b) { return a.slow_links > b.slow_links; });
  return sorted;
}

}  // namespace

std::set<NodeId> SlowNodes::Judge(const std::vector<Use>& uses,
                                  const std::set<NodeId>& candidates) {
  std::set<NodeId> found;
  if (limit_ == Duration(0)) return found;
  const std::map<NodeId, Received> all = ReceivedBy(uses);
  std::set<NodeId> blamed;
  for (const Suspect& suspect : Suspects(uses, all)) {
    // If only blamed nodes sent to this node, it shares their slow links, and may have a fast link
    // itself.
    if (std::ranges::includes(blamed, suspect.senders)) continue;
    blamed.insert(suspect.node);
    if (!candidates.contains(suspect.node) || slow_.contains(suspect.node)) continue;
    const Received& received = all.at(suspect.node);
    const double held = Seconds(received.longest) * (1 - received.rate / suspect.usual);
    if (held <= Seconds(limit_)) continue;
    slow_[suspect.node] = {
        std::chrono::duration_cast<Duration>(std::chrono::duration<double>(held)), received.rate,
        suspect.usual};
    found.insert(suspect.node);
  }
  return found;
}

std::set<NodeId> SlowNodes::Review(const std::vector<Use>& uses) {
  std::set<NodeId> usual;
  if (slow_.empty()) return usual;
  for (const auto& [node, received] : ReceivedBy(uses)) {
    const auto known = slow_.find(node);
    if (known == slow_.end() || received.rate <= kSlowPart * known->second.usual_rate) continue;
    slow_.erase(known);
    usual.insert(node);
  }
  return usual;
}

std::string SlowNodes::Describe(const Slow& slow) {
  return fmt::format("it received {:.1f} MB/s, the others {:.1f} MB/s", slow.rate / 1e6,
                     slow.usual_rate / 1e6);
}

}  // namespace refitd
