// plan_models: shows what a compiled refit between a trainer and engines of a published model would
// move, and how long it would take. Needs no daemon.
//
//   plan_models explain|estimate --model NAME --trainer SIZES --engine SIZES [...]   (--help)
//
// Exit code 0: every tensor has a place. 1: some has none, and the first by name is named. 2: wrong
// options, said in one line.
#include <algorithm>
#include <charconv>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/refitctl/command_line.h"
#include "daemon/refitctl/format.h"
#include "tests/workloads/route_explanation.h"
#include "tests/workloads/sharding/megatron.h"
#include "tests/workloads/sharding/model.h"
#include "tests/workloads/sharding/vllm.h"
#include "transport/base/status.h"
#include "transport/plan/route.h"

namespace refitd::workloads {
namespace {

using refitctl::CommandApp;
using refitctl::CommandLine;

constexpr int kOk = 0;
constexpr int kFailed = 1;
constexpr int kUsage = 2;

struct PlanFlags {
  std::string model;
  std::string trainer;
  std::string engine;
  std::string link_rates;
  int64_t ranks_per_node = 8;
  bool colocated = false;
  bool fp8 = false;
  bool chains = true;
  std::vector<std::string> pushed;
  size_t rows = 32;
  std::string output = "table";
  bool json() const { return output == "json"; }
};

absl::Status Invalid(const std::string& message) { return absl::InvalidArgumentError(message); }

struct Key {
  std::string_view name;
  int64_t* value;
};

// Parses "pp=16,ep=16" into the variables that `keys` point at; each number must be at least 1.
absl::Status ParseSizes(std::string_view flag, std::string_view text, std::span<const Key> keys) {
  std::set<std::string_view> seen;
  while (!text.empty()) {
    const std::string_view item = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), item.size() + 1));
    const size_t equals = std::min(item.find('='), item.size());
    const std::string_view name = item.substr(0, equals);
    const auto key =
        std::find_if(keys.begin(), keys.end(), [name](const Key& k) { return k.name == name; });
    if (key == keys.end() || !seen.insert(name).second) {
      std::vector<std::string_view> names;
      for (const Key& k : keys) names.push_back(k.name);
      return Invalid(fmt::format("{} has '{}': it takes each of {} once, as name=number", flag,
                                 item, fmt::join(names, ", ")));
    }
    const std::string_view number = item.substr(std::min(equals + 1, item.size()));
    const auto [end, error] =
        std::from_chars(number.data(), number.data() + number.size(), *key->value);
    if (error != std::errc() || end != number.data() + number.size() || *key->value < 1) {
      return Invalid(fmt::format("{} has '{}': not a number from 1", flag, item));
    }
  }
  return absl::OkStatus();
}

// Parses "node-out=45G,local-copy=1.5T", in bytes a second.
absl::StatusOr<RouteRates> ParseRates(std::string_view text) {
  RouteRates rates;
  const std::pair<std::string_view, double*> keys[] = {{"rank-out", &rates.rank_out},
                                                       {"node-out", &rates.node_out},
                                                       {"node-in", &rates.node_in},
                                                       {"local-copy", &rates.local_copy}};
  while (!text.empty()) {
    const std::string_view item = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), item.size() + 1));
    const size_t equals = std::min(item.find('='), item.size());
    const std::string_view name = item.substr(0, equals);
    const std::string_view number = item.substr(std::min(equals + 1, item.size()));
    double value = 0;
    auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), value);
    constexpr std::string_view kUnits = "KMGT";
    if (error == std::errc() && end + 1 == number.data() + number.size()) {
      for (size_t u = kUnits.find(*end); u != std::string_view::npos; --u) {
        value *= 1000;
        end = number.data() + number.size();
        if (u == 0) break;
      }
    }
    bool known = false;
    for (const auto& [key, target] : keys) {
      if (key != name || *target != 0) continue;
      *target = value;
      known = true;
    }
    if (!known || error != std::errc() || end != number.data() + number.size() ||
        !(value > 0 && value < 1e18)) {
      return Invalid(fmt::format(
          "--link-rates has '{}': it takes each of rank-out, node-out, node-in, local-copy once, "
          "as name=bytes a second (K, M, G, T: powers of 1000)",
          item));
    }
  }
  return rates;
}

// Ranks are placed on the nodes in order: trainers, then engines; or both from node 0 on.
struct Ranks {
  std::vector<RouteMember> trainers;
  std::vector<RouteMember> engines;
};

absl::StatusOr<Ranks> MakeRanks(const PlanFlags& flags) {
  sharding::TrainerParallel trainer;
  int64_t fsdp = 0;
  const Key trainer_keys[] = {
      {"world", &trainer.world}, {"pp", &trainer.pp}, {"tp", &trainer.tp}, {"ep", &trainer.ep},
      {"etp", &trainer.etp},     {"cp", &trainer.cp}, {"fsdp", &fsdp}};
  REFITD_RETURN_IF_ERROR(ParseSizes("--trainer", flags.trainer, trainer_keys));
  sharding::EngineParallel engine;
  int64_t engine_ep = 0;
  const Key engine_keys[] = {
      {"tp", &engine.tp}, {"instances", &engine.instances}, {"ep", &engine_ep}};
  REFITD_RETURN_IF_ERROR(ParseSizes("--engine", flags.engine, engine_keys));
  if (engine_ep > 0 && engine_ep != engine.tp) {
    return Invalid(fmt::format("--engine has ep={}: experts are over the tp={} ranks or not",
                               engine_ep, engine.tp));
  }
  engine.ep = engine_ep > 0;
  constexpr int64_t kMaxRanks = 65'536;  // of trainers or of engines
  const int64_t world = fsdp > 0 ? fsdp : trainer.world;
  if (world > kMaxRanks || engine.tp > kMaxRanks || engine.instances > kMaxRanks / engine.tp) {
    return Invalid(fmt::format("more than {} ranks a side", kMaxRanks));
  }
  REFITD_ASSIGN_OR_RETURN(sharding::ModelConfig model, sharding::FindModelConfig(flags.model));
  model.fp8 = flags.fp8;
  Ranks ranks;
  for (int64_t r = 0; r < world; ++r) {
    REFITD_ASSIGN_OR_RETURN(Layout layout, fsdp > 0 ? sharding::FsdpLayout(model, fsdp, r)
                                                    : sharding::MegatronLayout(model, trainer, r));
    ranks.trainers.push_back({std::make_shared<Layout>(std::move(layout)),
                              static_cast<uint32_t>(r / flags.ranks_per_node), 0,
                              fmt::format("trainer {}", r)});
  }
  const int64_t before = flags.colocated ? 0 : world;
  for (int64_t r = 0; r < engine.world(); ++r) {
    std::shared_ptr<const Layout> layout;
    if (r >= engine.tp) {
      layout = ranks.engines[static_cast<size_t>(r - engine.tp)].layout;
    } else {
      REFITD_ASSIGN_OR_RETURN(Layout own, sharding::VllmLayout(model, engine, r));
      layout = std::make_shared<Layout>(std::move(own));
    }
    ranks.engines.push_back({std::move(layout),
                             static_cast<uint32_t>((before + r) / flags.ranks_per_node),
                             static_cast<uint32_t>(r / engine.tp), fmt::format("engine {}", r)});
  }
  return ranks;
}

// The lag, in rounds, of chains in a group of the default number of slots.
constexpr uint32_t kRelayLag = 2;

absl::StatusOr<RoutePlan> MakePlan(const PlanFlags& flags) {
  REFITD_ASSIGN_OR_RETURN(const Ranks ranks, MakeRanks(flags));
  RouteOptions options;
  options.skip_tensors = flags.pushed;
  if (flags.chains) options.relay_lag = kRelayLag;
  return CompileRoutes(ranks.trainers, ranks.engines, options);
}

using Json = nlohmann::ordered_json;

// Numbers of 64 bits are strings, as in protobuf's JSON.
std::string Number(int64_t value) { return std::to_string(value); }

Json BoundJson(const RouteBound& bound) {
  return {{"bytes", Number(bound.bytes())},
          {"rankAlone", Number(bound.rank_alone)},
          {"nodeAlone", Number(bound.node_alone)},
          {"nodeReceives", Number(bound.node_receives)}};
}

std::string ToJson(const RouteExplanation& e) {
  Json out = {
      {"tensors", Number(e.tensors)},
      {"routes", Number(e.routes)},
      {"bytes", Number(e.bytes)},
      {"wireBytes", Number(e.wire_bytes)},
      {"lowerBound", BoundJson(e.bound)},
      {"worst", {{"link", e.worst.link}, {"bytes", Number(e.worst.bytes)}, {"ratio", e.ratio}}}};
  out["nodes"] = Json::array();
  const size_t nodes = e.links.node_sends.size();
  for (size_t n = 0; n < nodes; ++n) {
    out["nodes"].push_back({{"node", n},
                            {"sends", Number(e.links.node_sends[n])},
                            {"forwards", Number(e.links.node_forwards[n])},
                            {"receives", Number(e.links.node_receives[n])},
                            {"stores", Number(e.links.node_stores[n])}});
  }
  out["ranks"] = Json::array();
  for (size_t r = 0; r < e.source_labels.size(); ++r) {
    out["ranks"].push_back({{"rank", e.source_labels[r]},
                            {"node", e.source_nodes[r]},
                            {"supplies", Number(e.links.rank_supplies[r])}});
  }
  out["links"] = Json::array();
  for (size_t from = 0; from < nodes; ++from) {
    for (size_t to = 0; to < nodes; ++to) {
      const int64_t bytes = e.links.matrix[from * nodes + to];
      if (bytes > 0) out["links"].push_back({{"from", from}, {"to", to}, {"bytes", Number(bytes)}});
    }
  }
  out["chains"] = Json::array();
  for (const ChainUse& use : e.chains) {
    out["chains"].push_back({{"from", use.source_node},
                             {"nodes", use.nodes},
                             {"routes", Number(use.routes)},
                             {"bytes", Number(use.bytes)}});
  }
  return out.dump(1) + "\n";
}

int Fail(const absl::Status& status) {
  fmt::print(stderr, "plan_models: {}\n", Message(status));
  return absl::IsFailedPrecondition(status) ? kFailed : kUsage;
}

int RunExplain(const PlanFlags& flags) {
  const auto plan = MakePlan(flags);
  if (!plan.ok()) return Fail(plan.status());
  const RouteExplanation explanation = Explain(*plan);
  fmt::print("{}", flags.json() ? ToJson(explanation) : ToText(explanation, flags.rows));
  return kOk;
}

int RunEstimate(const PlanFlags& flags) {
  const auto rates = ParseRates(flags.link_rates);
  if (!rates.ok()) return Fail(rates.status());
  const auto plan = MakePlan(flags);
  if (!plan.ok()) return Fail(plan.status());
  const RouteEstimate estimate = Estimate(*plan, *rates);
  if (flags.json()) {
    const Json out = {{"seconds", estimate.seconds},
                      {"limit", estimate.limit},
                      {"bytes", Number(plan->bytes)},
                      {"wireBytes", Number(plan->wire_bytes)}};
    fmt::print("{}\n", out.dump(1));
  } else {
    fmt::print("{}, limited by: {}\n{} supplied, {} of them over the wire\n",
               HumanSeconds(estimate.seconds), estimate.limit, HumanBytes(plan->bytes),
               HumanBytes(plan->wire_bytes));
  }
  return kOk;
}

void AddFlags(CommandApp app, PlanFlags* flags) {
  std::string names;
  for (const sharding::ModelConfig& model : sharding::KnownModels()) {
    names += (names.empty() ? "" : ", ") + model.name;
  }
  app.Add("--model", &flags->model, names).Required();
  app.Add("--trainer", &flags->trainer,
          "world=N with pp, tp, ep, etp, cp (Megatron), or fsdp=N: pp=16,ep=16,world=256")
      .Required();
  app.Add("--engine", &flags->engine, "tp=N, instances=N, ep=N (tp again): tp=32,instances=8")
      .Required();
  app.Add("--ranks-per-node", &flags->ranks_per_node,
          "Trainers fill the nodes in order, then engines (default 8)")
      .InRange(1, 65'536);
  app.AddFlag("--colocated", &flags->colocated, "Engines start at the first node, too");
  app.AddFlag("--chains,!--no-chains", &flags->chains,
              "Nodes that want the same forward it to each other (default: where it matters)");
  app.AddFlag("--fp8", &flags->fp8, "Weights as FP8 with scales of 128x128 blocks");
  app.Add("--pushed", &flags->pushed, "A tensor that is pushed; may be given several times");
  app.Add("-o,--output", &flags->output, "table or json (numbers of 64 bits as strings)")
      .OneOf({"table", "json"});
}

int Run(int argc, char** argv) {
  CommandLine line("What a compiled refit of a published model would move; needs no daemon.", "",
                   "");
  CommandApp app = line.app();
  app.RequireCommand();
  PlanFlags flags;
  CommandApp explain =
      app.AddCommand("explain", "Bytes on each link, the lower bound, the worst link");
  AddFlags(explain, &flags);
  explain.Add("--rows", &flags.rows, "Of each kind of link, at most (default 32)");
  CommandApp estimate = app.AddCommand("estimate", "Seconds at given rates of the links");
  AddFlags(estimate, &flags);
  estimate
      .Add("--link-rates", &flags.link_rates,
           "rank-out, node-out, node-in, local-copy in bytes a second: "
           "rank-out=360G,node-out=45G,node-in=45G,local-copy=1.5T")
      .Required();
  std::string wrong;
  switch (line.Parse(argc, argv, &wrong)) {
    case CommandLine::Outcome::kHelped:
      return kOk;
    case CommandLine::Outcome::kWrong:
      fmt::print(stderr, "{}\n", wrong);
      return kUsage;
    case CommandLine::Outcome::kParsed:
      break;
  }
  return explain.parsed() ? RunExplain(flags) : RunEstimate(flags);
}

}  // namespace
}  // namespace refitd::workloads

int main(int argc, char** argv) { return refitd::workloads::Run(argc, argv); }
