// The planner of a compiled refit at the size of big models, from layouts as they come over the
// wire to one node's program. One thread, no daemon.
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "daemon/execute/program_executor.h"
#include "proto/convert.h"
#include "tests/bench/report.h"
#include "tests/workloads/route_explanation.h"
#include "tests/workloads/sharding/arena.h"
#include "tests/workloads/sharding/megatron.h"
#include "tests/workloads/sharding/model.h"
#include "tests/workloads/sharding/vllm.h"
#include "transport/base/status.h"
#include "transport/cuda/copy_plan.h"
#include "transport/plan/node_program.h"
#include "transport/plan/refit_plan.h"
#include "transport/plan/route.h"

namespace refitd::bench {
namespace {

using sharding::EngineParallel;
using sharding::ModelConfig;
using sharding::TrainerParallel;

constexpr int64_t kChunkBytes = 1 << 20;  // the size in which clients send layouts
constexpr double kMiB = 1 << 20;
constexpr double kGiB = 1 << 30;

double Now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// Processor seconds of this process so far.
double Cpu() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Peak memory of this process so far.
double PeakGiB() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024 / kGiB;
}

template <typename T>
T Must(absl::StatusOr<T> value) {
  if (value.ok()) return *std::move(value);
  fmt::print(stderr, "plan_bench: {}\n", Message(value.status()));
  std::exit(1);
}

// A layout as messages on the wire.
struct Encoded {
  std::vector<std::string> chunks;
  size_t bytes = 0;
};

Encoded Encode(const Layout& layout) {
  Encoded encoded;
  for (const v1::LayoutChunk& chunk : EncodeLayout(layout, v1::Lease(), kChunkBytes)) {
    encoded.chunks.push_back(chunk.SerializeAsString());
    encoded.bytes += encoded.chunks.back().size();
  }
  return encoded;
}

std::shared_ptr<const Layout> Decode(const Encoded& encoded) {
  LayoutDecoder decoder;
  for (const std::string& bytes : encoded.chunks) {
    v1::LayoutChunk chunk;
    REFITD_CHECK(chunk.ParseFromString(bytes));
    REFITD_CHECK(decoder.Add(chunk).ok());
  }
  return std::make_shared<Layout>(Must(std::move(decoder).Finish()));
}

struct Case {
  std::string model;
  TrainerParallel trainer;
  EngineParallel engine;
  uint32_t ranks_per_node = 8;
  bool one_node = false;
};

// The layouts that come over the wire, each distinct layout once; engine ranks of different
// instances have equal layouts.
struct Inputs {
  std::vector<Encoded> trainers;
  std::vector<Encoded> engines;
};

Inputs MakeInputs(const Case& c) {
  const ModelConfig config = Must(sharding::FindModelConfig(c.model));
  Inputs inputs;
  for (int64_t r = 0; r < c.trainer.world; ++r) {
    inputs.trainers.push_back(Encode(Must(sharding::MegatronLayout(config, c.trainer, r))));
  }
  for (int64_t r = 0; r < c.engine.tp; ++r) {
    inputs.engines.push_back(Encode(Must(sharding::VllmLayout(config, c.engine, r))));
  }
  return inputs;
}

struct Times {
  double decode = 0;
  double routes = 0;
  double node = 0;  // the time of the slower of two nodes, one of each side
  double cpu = 0;   // the processor time of all steps, with the programs of both nodes
  double total() const { return decode + routes + node; }
};

struct Result {
  Times times;
  std::shared_ptr<const RefitPlan> refit;
  const RoutePlan& plan() const { return refit->routes; }
};

Result Run(const Case& c, const Inputs& inputs) {
  Result result;
  const double cpu = Cpu();
  double start = Now();
  std::vector<RouteMember> trainers;
  for (uint32_t r = 0; r < inputs.trainers.size(); ++r) {
    trainers.push_back({Decode(inputs.trainers[r]), c.one_node ? 0 : r / c.ranks_per_node, 0, {}});
  }
  const auto trainer_nodes = static_cast<uint32_t>(trainers.size() / c.ranks_per_node);
  std::vector<RouteMember> engines;
  for (uint32_t r = 0; r < static_cast<uint32_t>(c.engine.world()); ++r) {
    const auto tp = static_cast<uint32_t>(c.engine.tp);
    engines.push_back({r < tp ? Decode(inputs.engines[r]) : engines[r - tp].layout,
                       c.one_node ? 0 : trainer_nodes + r / c.ranks_per_node,
                       r / tp,
                       {}});
  }
  result.times.decode = Now() - start;
  start = Now();
  RouteOptions options;
  options.relay_lag = kMaxRelayLag;
  result.refit = Must(CompileRefit(trainers, engines, options));
  result.times.routes = Now() - start;
  for (const uint32_t node : {uint32_t{0}, c.one_node ? 0 : trainer_nodes}) {
    start = Now();
    std::vector<LocalMember> sources;
    std::vector<LocalMember> destinations;
    for (uint32_t r = 0; r < trainers.size(); ++r) {
      if (trainers[r].node == node) sources.push_back({r, trainers[r].layout});
    }
    for (uint32_t r = 0; r < engines.size(); ++r) {
      if (engines[r].node == node) destinations.push_back({r, engines[r].layout});
    }
    std::vector<std::shared_ptr<const Layout>> local;
    for (const auto* side : {&sources, &destinations}) {
      for (const LocalMember& member : *side) local.push_back(member.layout);
    }
    const RoutePlan part = ShareOfNode(result.plan(), node, local);
    Must(CompileNode(part, node, std::move(sources), std::move(destinations), {}));
    result.times.node = std::max(result.times.node, Now() - start);
  }
  result.times.cpu = Cpu() - cpu;
  return result;
}

struct Options {
  bool json = false;
  int rounds = 3;
  std::string only;  // "cluster" or "first-call"; empty: both
};

// Median times of several rounds, and the plan of the last.
Result Median(const Case& c, const Inputs& inputs, const Options& options) {
  std::vector<double> decode;
  std::vector<double> routes;
  std::vector<double> node;
  std::vector<double> cpu;
  Result result;
  for (int i = 0; i < options.rounds; ++i) {
    result = Result();
    result = Run(c, inputs);
    decode.push_back(result.times.decode);
    routes.push_back(result.times.routes);
    node.push_back(result.times.node);
    cpu.push_back(result.times.cpu);
  }
  result.times = {bench::Median(decode), bench::Median(routes), bench::Median(node),
                  bench::Median(cpu)};
  return result;
}

void Ceiling(Report* report, const std::string& name, double value, const std::string& unit,
             double goal) {
  report->Add({name, value, unit, 0, 0, goal, false});
}

// Adds the worst link's bytes against the lower bound.
void AddRatio(Report* report, const std::string& name, const RoutePlan& plan, double goal = 1.05) {
  const RouteExplanation explanation = Explain(plan);
  report->Add({name + ": worst link", static_cast<double>(explanation.worst.bytes) / kGiB, "GiB",
               static_cast<double>(explanation.bound.bytes()) / kGiB, explanation.ratio, goal,
               false, true});
}

void PrintParts(const Result& result) {
  fmt::print(stderr,
             "  decoding {:.2f} s, routes {:.2f} s, one node's program {:.2f} s (processor, both "
             "nodes' programs: {:.2f} s); {} routes\n",
             result.times.decode, result.times.routes, result.times.node, result.times.cpu,
             result.plan().routes.size());
}

// The most that a trainers' node sends, divided by what its ranks hold.
double SentOfHeld(const Case& c, const Inputs& inputs, const RoutePlan& plan) {
  std::vector<int64_t> held(plan.nodes);
  for (uint32_t r = 0; r < inputs.trainers.size(); ++r) {
    held[r / c.ranks_per_node] += Decode(inputs.trainers[r])->Bytes();
  }
  double most = 0;
  for (uint32_t n = 0; n < plan.nodes; ++n) {
    if (held[n] == 0) continue;
    most = std::max(most,
                    static_cast<double>(plan.links.node_sends[n]) / static_cast<double>(held[n]));
  }
  return most;
}

// The plan that daemons make, with chains.
void DeepSeek(const Options& options, Report* report) {
  Case c{"deepseek-v3", {.world = 256, .pp = 16, .ep = 16}, {.tp = 32, .instances = 8}};
  const Inputs inputs = MakeInputs(c);
  size_t most = 0;
  for (const Encoded& encoded : inputs.engines) most = std::max(most, encoded.bytes);
  Ceiling(report, "DeepSeek-V3 PP16xEP16->TP32xDP8: layout", static_cast<double>(most) / kMiB,
          "MiB", 1.5);
  constexpr RouteRates kRates = {.node_out = 45e9, .node_in = 45e9};
  double of_eight = 0;
  for (const int64_t instances : {8, 64, 128}) {
    c.engine.instances = instances;
    const Result result = Median(c, inputs, options);
    const std::string name = fmt::format("DeepSeek-V3 PP16xEP16->TP32xDP{}", instances);
    Ceiling(report, name + ": plan", result.times.total(), "s", 5);
    Ceiling(report, name + ": peak memory", PeakGiB(), "GiB", 2);
    AddRatio(report, name, result.plan(), 1.10);
    Ceiling(report, name + ": a trainers' node sends, of what it holds",
            SentOfHeld(c, inputs, result.plan()), "x", 1.05);
    const double seconds = Estimate(result.plan(), kRates).seconds;
    if (instances == 8) of_eight = seconds;
    report->Add({name + ": estimate, 45 GB/s a node", seconds, "s", of_eight, seconds / of_eight,
                 1.15, false, true});
    PrintParts(result);
  }
}

void Qwen(const Options& options, Report* report) {
  Case c{"qwen3-30b-a3b", {.world = 4, .tp = 4, .ep = 4}, {.tp = 4}};
  c.one_node = true;
  const Inputs inputs = MakeInputs(c);
  const Result result = Median(c, inputs, options);
  const std::string name = "Qwen3-30B-A3B TP4+EP4->TP4, one node";
  Ceiling(report, name + ": plan", result.times.routes + result.times.node, "s", 0.3);
  AddRatio(report, name, result.plan());
  PrintParts(result);
}

// ---- the first refit within a node of GPUs ----

// The members' addresses: 256 GiB for each, never touched.
constexpr uint64_t kMemberBytes = uint64_t{256} << 30;

char* MemoryOf(uint32_t member) {
  return reinterpret_cast<char*>((uint64_t{member} + 1) * kMemberBytes);
}

class DeviceAddresses final : public CopyAddresses {
 public:
  explicit DeviceAddresses(std::vector<int> devices) : devices_(std::move(devices)) {}
  absl::StatusOr<int> DeviceOf(const BoundPiece& piece) override {
    return devices_[reinterpret_cast<uint64_t>(piece.data) / kMemberBytes - 1];
  }
  absl::StatusOr<uint64_t> On(int /*device*/, const BoundPiece& piece) override {
    return reinterpret_cast<uint64_t>(piece.data);
  }

 private:
  const std::vector<int> devices_;  // the device of each member
};

struct LocalCase {
  std::string name;
  std::vector<std::shared_ptr<const Layout>> trainers;
  std::vector<std::shared_ptr<const Layout>> engines;
  int ranks_per_instance = 1;
  bool colocated = false;
};

// The seconds of a daemon's work before the first byte of a refit moves, apart from mapping memory.
struct FirstCall {
  double routes = 0;
  double program = 0;
  double compare = 0;  // binding and tasks of the comparison of replicas
  double local = 0;    // binding and tasks of the local moves
  size_t moves = 0;
  // The last two steps run at the same time, each on a thread of its own.
  double total() const { return routes + program + std::max(compare, local); }
};

// The seconds of a step: its binding and its tasks.
double Step(MoveStep step, const std::shared_ptr<const BoundProgram>& bound,
            const ProgramMemory& memory, DeviceAddresses* addresses) {
  const double start = Now();
  StartMoves moves;
  moves.step = step;
  moves.bound = bound;
  std::vector<HeldReplica> replicas;
  if (step == MoveStep::kCompare) replicas = Must(FindReplicas(*bound));
  const BoundStep made = Must(BindStep(moves, memory, &replicas));
  Must(
      PlanCopies(made.transfer, Verification::kOff, addresses, {.engine_bytes = int64_t{2} << 20}));
  return Now() - start;
}

FirstCall RunFirstCall(const LocalCase& c) {
  FirstCall result;
  std::vector<RouteMember> trainers;
  std::vector<RouteMember> engines;
  std::vector<LocalMember> sources;
  std::vector<LocalMember> destinations;
  std::vector<int> devices;
  ProgramMemory memory;
  const auto bind = [&](const std::shared_ptr<const Layout>& layout) {
    MemorySpan span{MemoryOf(static_cast<uint32_t>(devices.size() - 1)),
                    sharding::ArenaBytes(*layout), nullptr};
    return std::map<RegionId, MemorySpan>{{layout->pieces[0].region, std::move(span)}};
  };
  for (uint32_t r = 0; r < c.trainers.size(); ++r) {
    trainers.push_back({c.trainers[r], 0, 0, {}});
    devices.push_back(static_cast<int>(r));
    sources.push_back({r, c.trainers[r], devices.back()});
    memory.sources.push_back(bind(c.trainers[r]));
  }
  for (uint32_t r = 0; r < c.engines.size(); ++r) {
    engines.push_back({c.engines[r], 0, r / static_cast<uint32_t>(c.ranks_per_instance), {}});
    devices.push_back(static_cast<int>(r + (c.colocated ? 0 : c.trainers.size())));
    destinations.push_back({r, c.engines[r], devices.back()});
    memory.destinations.push_back(bind(c.engines[r]));
  }
  double start = Now();
  const std::shared_ptr<const RefitPlan> plan = Must(CompileRefit(trainers, engines, {}));
  result.routes = Now() - start;
  start = Now();
  auto program = std::make_shared<const NodeProgram>(
      Must(CompileNode(plan->routes, 0, sources, destinations, {})));
  result.program = Now() - start;
  auto bound = std::make_shared<BoundProgram>();
  bound->program = program;
  bound->replicas = std::make_shared<const std::vector<ReplicaShare>>(
      SharesOf(plan->replicas, std::vector<bool>(c.trainers.size(), true)));
  bound->plan = {plan, &plan->routes};
  bound->source_layouts = c.trainers;
  bound->destination_layouts = c.engines;
  DeviceAddresses addresses(devices);
  result.compare = Step(MoveStep::kCompare, bound, memory, &addresses);
  result.local = Step(MoveStep::kLocal, bound, memory, &addresses);
  result.moves = program->local.moves.size();
  return result;
}

std::vector<LocalCase> LocalCases() {
  const ModelConfig config = Must(sharding::FindModelConfig("qwen3-30b-a3b"));
  constexpr int kRanks = 4;
  const auto add = [&](const auto& make) {
    std::vector<std::shared_ptr<const Layout>> layouts;
    for (int r = 0; r < kRanks; ++r) layouts.push_back(std::make_shared<Layout>(Must(make(r))));
    return layouts;
  };
  const auto megatron = [&](const TrainerParallel& parallel) {
    return add([&](int r) { return sharding::MegatronLayout(config, parallel, r); });
  };
  const auto replicas = megatron({.world = kRanks});
  const auto tensors = megatron({.world = kRanks, .tp = kRanks, .ep = kRanks});
  const auto fsdp = add([&](int r) { return sharding::FsdpLayout(config, kRanks, r); });
  const auto whole = add([&](int) { return sharding::VllmLayout(config, {}, 0); });
  const auto shards = add([&](int r) { return sharding::VllmLayout(config, {.tp = kRanks}, r); });
  return {{"full replicas", replicas, whole, 1, false},
          {"TP4+EP4->TP4", tensors, shards, kRanks, false},
          {"FSDP4->TP4", fsdp, shards, kRanks, false},
          {"colocated, 4 pairs", replicas, whole, 1, true}};
}

void FirstCalls(const Options& options, Report* report) {
  for (const LocalCase& c : LocalCases()) {
    std::vector<FirstCall> calls;
    for (int i = 0; i < options.rounds; ++i) calls.push_back(RunFirstCall(c));
    std::sort(calls.begin(), calls.end(),
              [](const FirstCall& a, const FirstCall& b) { return a.total() < b.total(); });
    const FirstCall& median = calls[calls.size() / 2];
    Ceiling(report, "Qwen3-30B-A3B, one node of GPUs, " + c.name + ": until the first byte moves",
            median.total(), "s", 0.5);
    fmt::print(stderr,
               "  routes {:.3f} s, program {:.3f} s, comparing replicas {:.3f} s, moves {:.3f} s "
               "({} of them)\n",
               median.routes, median.program, median.compare, median.local, median.moves);
  }
}

// Measures how soon the planner refuses a trainer's layout of 50,000 boxes that overlap one
// another, which is legal and too much work, and how soon the planner stops when the update of such
// a layout is over.
void Overlaps(Report* report) {
  constexpr int kBoxes = 50'000;
  auto layout = std::make_shared<Layout>();
  layout->tensors = {{"w", DType::kUint8, {4096, 4096}}};
  uint64_t state = 1;
  const auto pick = [&state](int64_t most) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    return static_cast<int64_t>((state >> 33) % static_cast<uint64_t>(most + 1));
  };
  for (int i = 0; i < kBoxes; ++i) {
    const Box box{{pick(3000), pick(3000)}, {1 + pick(1000), 1 + pick(1000)}};
    layout->pieces.push_back({0, box, RegionId(1), 0, RowMajorStrides(box.extent)});
  }
  auto whole = std::make_shared<Layout>();
  whole->tensors = layout->tensors;
  const Box all = WholeBox(whole->tensors[0].shape);
  whole->pieces.push_back({0, all, RegionId(1), 0, RowMajorStrides(all.extent)});
  const auto compile = [&layout, &whole](std::shared_ptr<const std::atomic<bool>> cancelled) {
    RouteOptions options;
    options.cancelled = std::move(cancelled);
    return CompileRoutes({{layout, 0, 0, "trainer"}}, {{whole, 0, 0, "engine"}}, options)
        .status()
        .code();
  };
  double start = Now();
  const bool refused = compile(nullptr) == absl::StatusCode::kResourceExhausted;
  Ceiling(report, "50,000 overlapping boxes: until they are refused", Now() - start, "s", 10);
  const auto cancelled = std::make_shared<std::atomic<bool>>(false);
  auto planning = std::async(std::launch::async, compile, cancelled);
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  start = Now();
  cancelled->store(true);
  const bool ended = planning.get() == absl::StatusCode::kCancelled;
  Ceiling(report, "50,000 overlapping boxes: until a cancelled plan ends", Now() - start, "s", 0.1);
  if (refused && ended) return;
  fmt::print(stderr, "plan_bench: the overlapping boxes were not refused, or not cancelled\n");
  std::exit(1);
}

int Main(int argc, char** argv) {
  CLI::App app("The planner at the size of big models");
  Options options;
  app.add_flag("--json", options.json, "one JSON object a line");
  app.add_option("--rounds", options.rounds, "medians of so many")->check(CLI::PositiveNumber);
  app.add_option("--case", options.only, "one of them alone")
      ->check(CLI::IsMember({"cluster", "first-call", "overlap"}));
  CLI11_PARSE(app, argc, argv);
  Report report("plan", options.json);
  const auto runs = [&options](std::string_view name) {
    return options.only.empty() || options.only == name;
  };
  if (runs("cluster")) {
    DeepSeek(options, &report);
    Qwen(options, &report);
  }
  if (runs("first-call")) FirstCalls(options, &report);
  if (runs("overlap")) Overlaps(&report);
  return report.all_reached() ? 0 : 1;
}

}  // namespace
}  // namespace refitd::bench

int main(int argc, char** argv) { return refitd::bench::Main(argc, argv); }
