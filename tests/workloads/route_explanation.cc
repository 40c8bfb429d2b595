#include "tests/workloads/route_explanation.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <string_view>
#include <utility>

namespace refitd {
namespace {

std::string InUnits(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < std::size(kUnits)) {
    bytes /= 1024;
    ++unit;
  }
  return fmt::format("{:.{}f} {}", bytes, unit == 0 ? 0 : 2, kUnits[unit]);
}

std::string InUnits(int64_t bytes) { return InUnits(static_cast<double>(bytes)); }

// The indices with bytes greater than 0, the greatest first.
std::vector<size_t> MostFirst(const std::vector<int64_t>& bytes) {
  std::vector<size_t> order;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] > 0) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return bytes[a] > bytes[b]; });
  return order;
}

template <typename Label>
void AddRows(std::string_view title, const std::vector<int64_t>& bytes, size_t rows,
             const Label& label, std::string* text) {
  const std::vector<size_t> order = MostFirst(bytes);
  if (order.empty()) return;
  auto out = std::back_inserter(*text);
  fmt::format_to(out, "{}:\n", title);
  for (size_t i = 0; i < std::min(rows, order.size()); ++i) {
    fmt::format_to(out, "  {:<40} {:>12}\n", label(order[i]), InUnits(bytes[order[i]]));
  }
  if (order.size() > rows) {
    fmt::format_to(out, "  and {} more, the least {}\n", order.size() - rows,
                   InUnits(bytes[order.back()]));
  }
}

// The nodes of a long chain are not all named.
std::string ChainText(const ChainUse& use) {
  constexpr size_t kNamed = 8;
  std::string text = fmt::format("{}", use.source_node);
  for (size_t i = 0; i < use.nodes.size(); ++i) {
    if (i == kNamed - 1 && use.nodes.size() > kNamed) {
      return fmt::format("{} > ... {} more ... > {}", text, use.nodes.size() - kNamed,
                         use.nodes.back());
    }
    fmt::format_to(std::back_inserter(text), " > {}", use.nodes[i]);
  }
  return text;
}

void AddChains(const RouteExplanation& e, size_t rows, std::string* text) {
  if (e.chains.empty()) return;
  auto out = std::back_inserter(*text);
  fmt::format_to(out,
                 "{} chains of at most {} nodes; with slots of {}: {} rounds, {} of them until the "
                 "usual chains of {} nodes are full:\n",
                 e.chains.size(), e.relay.longest, InUnits(kRelaySlotBytes), e.rounds.rounds,
                 e.rounds.filling, e.relay.usual);
  for (size_t i = 0; i < std::min(rows, e.chains.size()); ++i) {
    fmt::format_to(out, "  {:<40} {:>12}\n", ChainText(e.chains[i]), InUnits(e.chains[i].bytes));
  }
  if (e.chains.size() > rows) {
    fmt::format_to(out, "  and {} more, the least {}\n", e.chains.size() - rows,
                   InUnits(e.chains.back().bytes));
  }
}

}  // namespace

WorstLink WorstLinkOf(const RoutePlan& plan) {
  WorstLink worst;
  const auto see = [&worst](const std::vector<int64_t>& bytes, const auto& name) {
    for (size_t i = 0; i < bytes.size(); ++i) {
      if (bytes[i] > worst.bytes) worst = {bytes[i], name(i)};
    }
  };
  see(plan.links.node_sends, [](size_t n) { return fmt::format("node {} sends", n); });
  see(plan.links.node_receives, [](size_t n) { return fmt::format("node {} receives", n); });
  see(plan.links.rank_supplies,
      [&plan](size_t r) { return fmt::format("{} supplies", plan.source_labels[r]); });
  return worst;
}

RouteEstimate Estimate(const RoutePlan& plan, const RouteRates& rates) {
  RouteEstimate estimate;
  // While chains fill, the bytes of other rounds wait.
  double filling = 1;
  if (plan.relay.lag > 0) {
    const RelayRounds made = RoundsOf(
        plan.relay, std::max(kRelaySlotBytes, MinRelayRoundBytes(plan.relay.node_streams)));
    filling = static_cast<double>(made.rounds) / static_cast<double>(made.rounds - made.filling);
  }
  const auto see = [&](const std::vector<int64_t>& bytes, double rate, double times,
                       const auto& name) {
    if (rate <= 0) return;
    for (size_t i = 0; i < bytes.size(); ++i) {
      const double seconds = times * static_cast<double>(bytes[i]) / rate;
      if (seconds > estimate.seconds) estimate = {seconds, name(i)};
    }
  };
  see(plan.links.node_sends, rates.node_out, filling,
      [](size_t n) { return fmt::format("node {} sends", n); });
  see(plan.links.node_receives, rates.node_in, filling,
      [](size_t n) { return fmt::format("node {} receives", n); });
  see(plan.links.rank_supplies, rates.rank_out, filling,
      [&plan](size_t r) { return fmt::format("{} supplies", plan.source_labels[r]); });
  see(plan.links.node_stores, rates.local_copy, filling,
      [](size_t n) { return fmt::format("node {} stores", n); });
  return estimate;
}

std::vector<ChainUse> ChainsOf(const RoutePlan& plan) {
  std::map<std::pair<uint32_t, std::vector<uint32_t>>, ChainUse> uses;
  for (const Route& route : plan.routes) {
    std::vector<uint32_t> remote = plan.RemoteNodesOf(route);
    if (!plan.IsChain(remote)) continue;
    const uint32_t from = plan.source_nodes[route.source];
    ChainUse& use = uses[{from, std::move(remote)}];
    ++use.routes;
    use.bytes += ElementCount(plan.BoxOf(route)) * ElementBytes(plan.tensors[route.tensor].dtype);
  }
  std::vector<ChainUse> list;
  for (auto& [key, use] : uses) {
    use.source_node = key.first;
    use.nodes = key.second;
    list.push_back(std::move(use));
  }
  std::stable_sort(list.begin(), list.end(),
                   [](const ChainUse& a, const ChainUse& b) { return a.bytes > b.bytes; });
  return list;
}

RouteExplanation Explain(const RoutePlan& plan) {
  RouteExplanation e;
  e.tensors = static_cast<int64_t>(plan.tensors.size());
  e.routes = static_cast<int64_t>(plan.routes.size());
  e.bytes = plan.bytes;
  e.wire_bytes = plan.wire_bytes;
  e.bound = plan.bound;
  e.worst = WorstLinkOf(plan);
  if (e.worst.bytes == 0) e.ratio = 1;
  if (e.bound.bytes() > 0) {
    e.ratio = static_cast<double>(e.worst.bytes) / static_cast<double>(e.bound.bytes());
  }
  e.links = plan.links;
  e.relay = plan.relay;
  if (plan.relay.lag > 0) e.rounds = RoundsOf(plan.relay, kRelaySlotBytes);
  e.chains = ChainsOf(plan);
  e.source_labels = plan.source_labels;
  e.source_nodes = plan.source_nodes;
  return e;
}

std::string ToText(const RouteExplanation& e, size_t rows) {
  std::string text;
  auto out = std::back_inserter(text);
  fmt::format_to(out, "{} tensors, {} routes, {} supplied, {} of them over the wire\n", e.tensors,
                 e.routes, InUnits(e.bytes), InUnits(e.wire_bytes));
  fmt::format_to(out,
                 "lower bound {}: a rank alone supplies {}, a node alone sends {}, a node "
                 "receives {}\n",
                 InUnits(e.bound.bytes()), InUnits(e.bound.rank_alone), InUnits(e.bound.node_alone),
                 InUnits(e.bound.node_receives));
  if (e.worst.bytes > 0) {
    fmt::format_to(out, "worst link: {} {}", e.worst.link, InUnits(e.worst.bytes));
    if (e.bound.bytes() > 0) fmt::format_to(out, ", {:.3f} of the lower bound", e.ratio);
    fmt::format_to(out, "\n");
  }
  AddChains(e, rows, &text);
  const auto node = [](size_t n) { return fmt::format("node {}", n); };
  AddRows("sends", e.links.node_sends, rows, node, &text);
  AddRows("of that forwards", e.links.node_forwards, rows, node, &text);
  AddRows("receives", e.links.node_receives, rows, node, &text);
  AddRows("stores into engines", e.links.node_stores, rows, node, &text);
  AddRows(
      "supplies", e.links.rank_supplies, rows,
      [&](size_t r) { return fmt::format("{} (node {})", e.source_labels[r], e.source_nodes[r]); },
      &text);
  const size_t nodes = e.links.node_sends.size();
  std::vector<int64_t> between = e.links.matrix;
  for (size_t n = 0; n < nodes; ++n) between[n * nodes + n] = 0;
  AddRows(
      "from node to node", between, rows,
      [nodes](size_t i) { return fmt::format("{} to {}", i / nodes, i % nodes); }, &text);
  return text;
}

}  // namespace refitd
