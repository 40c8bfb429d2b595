// How long one event holds a daemon's mutex in a group of a thousand daemons.
//
// Runs the real state machines of the coordinator and of one joined daemon, with the conversions
// that the node does under its mutex, but without sockets, members' memory or copies. The other
// joined daemons answer as a Worker would. Times are this thread's processor time, since the
// machine may be busy with other work: of Handle, of carrying out its commands and reports as far
// as that happens under the mutex, and of NextDeadline, which follows every event.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "daemon/group/bucket_draft_testing.h"
#include "daemon/group/coordinator.h"
#include "daemon/group/follower.h"
#include "daemon/link/commands.h"
#include "fmt/format.h"
#include "nlohmann/json.hpp"
#include "tests/bench/report.h"
#include "tests/workloads/sharding/megatron.h"
#include "tests/workloads/sharding/model.h"
#include "tests/workloads/sharding/vllm.h"
#include "transport/base/status.h"
#include "transport/plan/refit_plan.h"

namespace refitd::bench {
namespace {

using sharding::ModelConfig;

constexpr int64_t kMessageBytes = 8 << 20;  // a daemon's default
constexpr double kGoalMs = 20;
constexpr uint64_t kAnyDigest = 42;
constexpr int kRoundsOnWire = 4;
constexpr uint64_t kOwnLayouts = 16;  // one of so many members brings a layout of its own

double ThreadSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

template <typename T>
T Must(absl::StatusOr<T> value) {
  if (value.ok()) return *std::move(value);
  fmt::print(stderr, "scale_bench: {}\n", Message(value.status()));
  std::exit(1);
}

struct Size {
  int nodes = 1000;  // daemons, with the coordinator, which has no members
  int trainer_ranks = 64;
  int trainers_per_node = 8;
  int engine_ranks = 4096;
  int64_t layers = 61;
  int64_t experts = 256;
  int bucket_tensors = 1024;
  int loaded_buckets = 4;
};

Size QuickSize() {
  Size size;
  size.nodes = 12;
  size.trainer_ranks = 8;
  size.trainers_per_node = 4;
  size.engine_ranks = 64;
  size.layers = 30;  // more replicated tensors than are compared in every version
  size.experts = 16;
  size.bucket_tensors = 64;
  size.loaded_buckets = 2;
  return size;
}

enum class Data { kRefit, kPush, kLoader };

std::string_view Name(Data data) {
  return data == Data::kRefit ? "refit" : data == Data::kPush ? "push" : "push, loader";
}

// The layouts of all ranks; equal layouts share one object.
struct Model {
  std::vector<std::shared_ptr<const Layout>> trainers;  // the layout of each rank
  std::vector<std::shared_ptr<const Layout>> engines;   // the layout of each rank of an instance
  std::vector<TensorSpec> tensors;                      // all tensors of the model
};

// DeepSeek-V3's table of tensors with small shapes, since no memory is used.
Model MakeModel(const Size& size, int instances) {
  ModelConfig config = Must(sharding::FindModelConfig("deepseek-v3"));
  const int64_t ranks = size.engine_ranks / instances;
  // An instance with more ranks than experts has several copies of each shard.
  const int64_t tp = std::min(ranks, size.experts);
  config.heads = std::max<int64_t>(config.heads, tp);
  config = sharding::ScaledDown(
      config, {.layers = size.layers, .heads = config.heads, .experts = size.experts});
  config.vocabulary = 128 * tp;
  Model model;
  const int64_t stages = size.layers >= 61 ? 4 : 1;
  const int64_t ep = size.trainer_ranks / stages;
  std::set<std::string> known;
  for (int r = 0; r < size.trainer_ranks; ++r) {
    model.trainers.push_back(std::make_shared<Layout>(Must(sharding::MegatronLayout(
        config, {.world = size.trainer_ranks, .pp = stages, .ep = ep}, r))));
    for (const TensorSpec& tensor : model.trainers.back()->tensors) {
      if (known.insert(tensor.name).second) model.tensors.push_back(tensor);
    }
  }
  // In small instances all ranks share every expert; in large ones each rank has experts of its
  // own.
  const bool experts_apart = tp > 32;
  for (int64_t r = 0; r < ranks; ++r) {
    model.engines.push_back(r < tp ? std::make_shared<const Layout>(Must(sharding::VllmLayout(
                                         config, {.tp = tp, .ep = experts_apart}, r)))
                                   : model.engines[static_cast<size_t>(r - tp)]);
  }
  return model;
}

struct Row {
  int64_t events = 0;
  double longest = 0;  // seconds
  double total = 0;
};
using Rows = std::map<std::string, Row>;

// In the order in which they are printed.
constexpr const char* kRows[] = {
    "join of a daemon",
    "attach",
    "RegisterLayout",
    "Begin",
    "Begin, assembling the update",
    "Refit call",
    "plan hand-out",
    "node's program built",
    "communicator opened, connected",
    "Ready",
    "bucket",
    "part's header agreed to",
    "part's end",
    "Ack",
    "replicas compared",
    "refit's end on a node",
    "read-back's end on a node",
    "Commit",
    "Commit, decided",
    "other",
    "joined daemon: RegisterLayout",
    "joined daemon: Prepare",
    "joined daemon: part's header",
    "joined daemon: other",
};

// The hash of each replica that a rank of the node holds.
std::vector<uint64_t> SharesOn(const RefitPlan& plan, uint32_t node) {
  std::vector<uint64_t> hashes;
  for (const Replica& replica : plan.replicas.boxes) {
    for (const uint32_t source : plan.replicas.HoldersOf(replica)) {
      if (plan.routes.source_nodes[source] == node) hashes.push_back(replica.hash);
    }
  }
  return hashes;
}

class Bench {
 public:
  Bench(const Size& size, int instances, Data data, const Model& model,
        std::map<int, std::shared_ptr<const RefitPlan>>* plans)
      : size_(size),
        instances_(instances),
        data_(data),
        model_(model),
        plans_(plans),
        coordinator_(MakeOptions()) {}

  Rows Run() {
    Join();
    AttachAll();
    RegisterAll();
    for (int version = 1; version <= 2; ++version) Update(version);
    return std::move(rows_);
  }

 private:
  // A joined daemon that answers as a Worker would.
  struct Stub {
    std::vector<MemberId> members;
    std::vector<MemberId> destinations;  // the members that the running update writes to
    bool written = false;
    std::map<PartSeq, PeerHeader> parts;  // the parts that have not ended
    uint32_t plan_node = 0;
    std::optional<StartRefit> run;
    std::vector<uint64_t> shares;  // the hash of each replica that a rank of the node holds
  };

  CoordinatorOptions MakeOptions() {
    CoordinatorOptions options;
    options.name = "g";
    options.daemon_id = "coordinator";
    options.incarnation = 7;
    options.spec.trainer_ranks = size_.trainer_ranks;
    options.spec.min_instances = instances_;
    options.spec.slot_bytes = int64_t{1} << 30;
    options.spec.slots = 4;
    options.next_update = [this] { return UpdateId(++ids_); };
    options.next_member = [this] { return MemberId(++ids_ + 1'000'000); };
    options.next_call = [this] { return CallId(++ids_ + 1'000'000); };
    return options;
  }

  int ranks_per_instance() const { return size_.engine_ranks / instances_; }
  int trainer_nodes() const { return size_.trainer_ranks / size_.trainers_per_node; }
  bool IsTrainer(MemberId m) const {
    return m.value() <= static_cast<uint64_t>(size_.trainer_ranks);
  }
  const std::shared_ptr<const Layout>& LayoutOf(MemberId m) const {
    const auto index = static_cast<size_t>(m.value() - 1);
    if (IsTrainer(m)) return model_.trainers[index];
    return model_.engines[(index - static_cast<size_t>(size_.trainer_ranks)) %
                          static_cast<size_t>(ranks_per_instance())];
  }
  uint64_t DigestOf(MemberId m) {
    const auto [it, added] = digests_.try_emplace(LayoutOf(m).get());
    if (added) it->second = LayoutOf(m)->Digest();
    return it->second;
  }
  // The joined daemon that is real; the data goes to it.
  NodeId followed() const { return NodeId(static_cast<uint64_t>(trainer_nodes()) + 1); }
  bool Followed(NodeId node) const { return data_ != Data::kRefit && node == followed(); }

  // ---- the coordinator's node ----

  void Event(const std::string& name, MachineEvent event) {
    MachineActions actions;
    std::vector<std::pair<NodeId, PeerCommand>> sent;
    ShareLayout(&event);
    const double start = ThreadSeconds();
    coordinator_.Handle(event, now_, &actions);
    for (MachineAction& outer : actions) {
      auto* peer = std::get_if<PeerAction>(&outer);
      auto* send = peer == nullptr ? nullptr : std::get_if<SendCommand>(peer);
      if (send == nullptr) continue;
      // PeerSession::Queue does the same: commands are encoded and written later, without the
      // mutex.
      sent.emplace_back(send->node, std::move(send->command));
    }
    (void)coordinator_.NextDeadline();
    const double took = ThreadSeconds() - start;
    std::string row = name;
    for (MachineAction& outer : actions) {
      if (auto* action = std::get_if<GroupAction>(&outer)) Perform(action, &row);
    }
    Count(row, took);
    for (auto& [node, command] : sent) ToNode(node, std::move(command));
  }

  // Does what PeerServer::ShareLayout does, which holds no mutex while it compares.
  void ShareLayout(MachineEvent* event) const {
    auto* peer = std::get_if<PeerEvent>(event);
    auto* received = peer == nullptr ? nullptr : std::get_if<ReportReceived>(peer);
    auto* report = received == nullptr ? nullptr : std::get_if<PeerLayout>(&received->report);
    if (report == nullptr) return;
    const auto known = coordinator_.KnownLayout(received->node, *report);
    if (known != nullptr && SameStructure(*known, *report->layout)) report->layout = known;
  }

  void Count(const std::string& name, double took) {
    Row& row = rows_[name];
    ++row.events;
    row.longest = std::max(row.longest, took);
    row.total += took;
  }

  void Perform(GroupAction* action, std::string* row) {
    if (auto* compile = std::get_if<PlanRefit>(action)) {
      std::shared_ptr<const RefitPlan>& plan = (*plans_)[instances_];
      if (plan == nullptr) {
        plan = Must(CompileRefit(compile->sources, compile->destinations, compile->options));
      }
      plan_ = plan;
      Later("plan hand-out", RefitPlanned{compile->program, absl::OkStatus(), plan});
    } else if (std::holds_alternative<UpdateAssembled>(*action)) {
      if (*row == "Begin") *row = "Begin, assembling the update";
      for (auto& [node, stub] : stubs_) {
        stub.written = false;
        stub.run.reset();
      }
    } else if (auto* ended = std::get_if<UpdateEnded>(action)) {
      if (*row != "Commit") *row = "Commit, decided";
      if (ended->outcome != Outcome::kCommitted) {
        fmt::print(stderr, "scale_bench: {}\n", ended->reason);
        std::exit(1);
      }
      committed_ = true;
    }
  }

  template <typename Inner>
  void Later(const char* row, Inner event) {
    inbox_.emplace_back(row, MachineEvent(GroupEvent(std::move(event))));
  }
  template <typename R>
  void Report(NodeId node, const char* row, R report) {
    inbox_.emplace_back(
        row, MachineEvent(PeerEvent(ReportReceived{node, PeerReport(std::move(report))})));
  }

  void Drain() {
    while (!inbox_.empty()) {
      auto [row, event] = std::move(inbox_.front());
      inbox_.pop_front();
      now_ += std::chrono::microseconds(1);
      Event(row, std::move(event));
    }
  }

  // ---- joined daemons ----

  void ToNode(NodeId node, PeerCommand command) {
    if (Followed(node)) {
      // The command passes through the link's messages.
      CommandDecoder decoder({});
      for (const v1::PeerAnswer& answer : Must(ToProto(command, kMessageBytes))) {
        auto decoded = Must(decoder.Decode(answer));
        if (decoded.has_value()) {
          ToFollower("joined daemon: other", CommandReceived{*std::move(decoded)});
        }
      }
      return;
    }
    Stub& stub = stubs_.at(node);
    std::visit([&](auto& c) { Take(node, &stub, c); }, command);
  }

  template <typename C>
  void Take(NodeId, Stub*, const C&) {}
  void Take(NodeId node, Stub* stub, const PeerPrepare& c) {
    update_ = c.update;
    stub->destinations = c.destinations;
    stub->parts.clear();
    for (const MemberId m : c.engines) Report(node, "Ready", ReadyEvent{m, c.update});
  }
  void Take(NodeId node, Stub*, const OpenCommunicator& c) {
    Report(
        node, "communicator opened, connected",
        CommunicatorOpened{c.communicator, absl::OkStatus(), fmt::format("10.0.{}.1:40000", node)});
  }
  void Take(NodeId node, Stub*, const PeerCommunicatorConnect& c) {
    Report(node, "communicator opened, connected",
           CommunicatorUp{c.communicator, absl::OkStatus()});
  }
  void Take(NodeId node, Stub*, const PeerWireLock& c) {
    Report(node, "other", PeerWireGranted{c.update});
  }
  void Take(NodeId node, Stub* stub, const PeerHeader& c) {
    stub->parts[c.part] = c;
    Report(node, "part's header agreed to", PeerHeaderAck{c.update, c.part, c.digest, ""});
  }
  void Take(NodeId node, Stub* stub, const PeerIssue& c) {
    if (stub->run.has_value() && stub->run->part == c.part) return EndRun(node, stub);
    const PeerHeader header = stub->parts.at(c.part);
    stub->parts.erase(c.part);
    TransferDone done;
    done.update = c.update;
    done.part = c.part;
    done.bytes_written = Written(stub);
    done.digests.assign(header.content->ranges.size(), kAnyDigest);
    Report(node, "part's end", std::move(done));
  }
  void Take(NodeId node, Stub*, const SendPart& c) {
    Report(node, "Ack", AckEvent{c.member, c.update, c.part});
  }
  void Take(NodeId node, Stub*, const VerifyUpdate& c) {
    Report(node, "read-back's end on a node", VerifyDone{c.update, absl::OkStatus(), {}});
  }
  void Take(NodeId node, Stub* stub, const PeerProgram& c) {
    stub->plan_node = c.node;
    if (c.whole != nullptr) stub->shares = SharesOn(*c.whole, c.node);
    Report(node, "node's program built",
           PeerProgramBuilt{c.update, absl::OkStatus(), kRoundsOnWire, Streams(c.node)});
  }
  void Take(NodeId node, Stub* stub, const StartCompare& c) {
    const auto digests = std::count_if(stub->shares.begin(), stub->shares.end(),
                                       [&](uint64_t hash) { return c.part.Has(hash); });
    Report(node, "replicas compared",
           CompareDone{c.update, absl::OkStatus(),
                       std::vector<uint64_t>(static_cast<size_t>(digests), kAnyDigest)});
  }
  void Take(NodeId node, Stub* stub, const StartRefit& c) {
    stub->run = c;
    if (!c.wired) EndRun(node, stub);
  }

  void EndRun(NodeId node, Stub* stub) {
    RefitDone done;
    done.update = stub->run->update;
    done.bytes_written = Written(stub);
    done.streams = Streams(stub->plan_node);
    Report(node, "refit's end on a node", std::move(done));
  }
  // Reports everything as written with the first part.
  std::vector<int64_t> Written(Stub* stub) const {
    std::vector<int64_t> bytes(stub->destinations.size());
    if (!std::exchange(stub->written, true)) {
      for (size_t d = 0; d < bytes.size(); ++d) bytes[d] = LayoutOf(stub->destinations[d])->Bytes();
    }
    return bytes;
  }
  std::vector<PeerStream> Streams(uint32_t node) const {
    const RoutePlan& plan = plan_->routes;
    std::vector<PeerStream> streams;
    for (uint32_t peer = 0; peer < plan.nodes; ++peer) {
      const auto digest = [&](uint32_t from, uint32_t to) -> uint64_t {
        const size_t at = size_t{from} * plan.nodes + to;
        return from == to || plan.links.stream[at] == 0 ? 0 : at + 1;
      };
      const PeerStream stream{peer, digest(node, peer), digest(peer, node)};
      if (stream.out != 0 || stream.in != 0) streams.push_back(stream);
    }
    return streams;
  }

  // ---- the real joined daemon ----

  void ToFollower(const char* row, MachineEvent event) {
    MachineActions actions;
    std::vector<PeerReport> reports;
    if (auto* peer = std::get_if<PeerEvent>(&event)) {
      if (auto* received = std::get_if<CommandReceived>(peer)) {
        if (auto* prepare = std::get_if<PeerPrepare>(&received->command)) {
          row = "joined daemon: Prepare";
          // Does what Joining::IndexDestinations does, which holds no mutex while it makes the
          // index.
          auto layouts = follower_->LayoutsToIndex(*prepare);
          if (!layouts.empty()) {
            prepare->index = Must(Follower::MakeIndex(prepare->destinations, std::move(layouts)));
          }
        }
        if (std::holds_alternative<PeerHeader>(received->command)) {
          row = "joined daemon: part's header";
        }
      }
    }
    const double start = ThreadSeconds();
    follower_->Handle(event, now_, &actions);
    for (MachineAction& outer : actions) {
      auto* peer = std::get_if<PeerAction>(&outer);
      auto* send = peer == nullptr ? nullptr : std::get_if<SendReport>(peer);
      if (send == nullptr) continue;
      // Only queues the report here, as PeerLink::Queue does: a daemon encodes and writes reports
      // later, without holding its mutex.
      reports.push_back(std::move(send->report));
    }
    (void)follower_->NextDeadline();
    Count(row, ThreadSeconds() - start);
    for (PeerReport& report : reports) {
      const char* kind = std::holds_alternative<PeerAttach>(report)      ? "attach"
                         : std::holds_alternative<PeerLayout>(report)    ? "RegisterLayout"
                         : std::holds_alternative<PeerHeaderAck>(report) ? "part's header agreed to"
                         : std::holds_alternative<TransferDone>(report)  ? "part's end"
                         : std::holds_alternative<AckEvent>(report)      ? "Ack"
                         : std::holds_alternative<ReadyEvent>(report)    ? "Ready"
                         : std::holds_alternative<VerifyDone>(report) ? "read-back's end on a node"
                                                                      : "other";
      inbox_.emplace_back(kind,
                          MachineEvent(PeerEvent(ReportReceived{followed(), std::move(report)})));
    }
    for (MachineAction& outer : actions) {
      std::visit([this](auto& kind) { std::visit([this](auto& a) { FollowerDoes(a); }, kind); },
                 outer);
    }
  }

  template <typename A>
  void FollowerDoes(const A&) {}
  void FollowerDoes(const SendPrepare& a) {
    ToFollower("joined daemon: other", GroupEvent(ReadyEvent{a.member, a.update}));
  }
  void FollowerDoes(const SendPart& a) {
    ToFollower("joined daemon: other", GroupEvent(AckEvent{a.member, a.update, a.part}));
  }
  void FollowerDoes(const OpenCommunicator& a) {
    ToFollower("joined daemon: other",
               CommunicatorOpened{a.communicator, absl::OkStatus(), "10.1.1.1:40000"});
  }
  void FollowerDoes(const ConnectCommunicator& a) {
    ToFollower("joined daemon: other", CommunicatorUp{a.communicator, absl::OkStatus()});
  }
  void FollowerDoes(const AcquireWire&) { ToFollower("joined daemon: other", WireGranted{}); }
  void FollowerDoes(const StartWire& a) {
    ToFollower("joined daemon: other", WireDone{a.communicator, a.seq, absl::OkStatus()});
  }
  void FollowerDoes(const StartTransfer& a) {
    std::vector<int64_t> bytes(a.destinations.size());
    if (a.update != follower_written_) {
      for (size_t d = 0; d < bytes.size(); ++d) bytes[d] = LayoutOf(a.destinations[d])->Bytes();
    }
    follower_written_ = a.update;
    ToFollower(
        "joined daemon: other",
        GroupEvent(TransferDone{a.update, a.part, absl::OkStatus(), std::move(bytes), -1,
                                std::vector<uint64_t>(a.content->ranges.size(), kAnyDigest)}));
  }
  void FollowerDoes(const StartVerify& a) {
    ToFollower("joined daemon: other", GroupEvent(VerifyDone{a.update, absl::OkStatus(), {}}));
  }

  // ---- the steps of the benchmark ----

  void Join() {
    // The daemon that is followed has its acceptance before the commands that joining brings.
    if (data_ != Data::kRefit) MakeFollower();
    for (int n = 1; n < size_.nodes; ++n) {
      const NodeId node(static_cast<uint64_t>(n));
      stubs_[node];
      Event("join of a daemon",
            NodeJoined{node, fmt::format("node-{:04}", n), fmt::format("10.0.0.{}:1", n)});
    }
  }

  void MakeFollower() {
    FollowerOptions options;
    options.name = "g";
    options.coordinator_address = "coordinator:1";
    options.next_update = [this] { return UpdateId(++ids_); };
    follower_ = std::make_unique<Follower>(std::move(options));
    LinkUp up;
    up.incarnation = 7;
    up.spec = coordinator_.spec();
    up.coordinator_id = "coordinator";
    follower_->Handle(up, now_, &ignored_);
  }

  void AttachAll() {
    const int engine_nodes = size_.nodes - 1 - trainer_nodes();
    for (int r = 0; r < size_.trainer_ranks; ++r) {
      const MemberId member(static_cast<uint64_t>(r) + 1);
      const NodeId node(static_cast<uint64_t>(r / size_.trainers_per_node) + 1);
      node_of_[member] = node;
      TrainerIdentity who;
      who.rank = r;
      who.world_size = size_.trainer_ranks;
      who.pid = 1000 + r;
      Report(node, "attach", PeerAttach{member, who});
    }
    for (int r = 0; r < size_.engine_ranks; ++r) {
      const MemberId member(static_cast<uint64_t>(size_.trainer_ranks + r) + 1);
      const NodeId node(
          static_cast<uint64_t>(trainer_nodes() + int64_t{r} * engine_nodes / size_.engine_ranks) +
          1);
      node_of_[member] = node;
      EngineIdentity who;
      who.instance = fmt::format("engine-{:03}", r / ranks_per_instance());
      who.rank = r % ranks_per_instance();
      who.world_size = ranks_per_instance();
      who.pid = 1000 + r;
      who.delivery = data_ == Data::kLoader ? DeliveryMode::kLoader : DeliveryMode::kInPlace;
      if (Followed(node)) {
        ToFollower("joined daemon: other", GroupEvent(EngineAttached{member, who}));
      } else {
        Report(node, "attach", PeerAttach{member, who});
      }
    }
    Drain();
  }

  void RegisterAll() {
    if (data_ == Data::kLoader) return;
    for (const auto& [member, node] : node_of_) {
      if (IsTrainer(member) && data_ == Data::kPush) continue;
      const CallId call(++ids_);
      if (Followed(node)) {
        ToFollower("joined daemon: RegisterLayout",
                   GroupEvent(LayoutRegistered{member, LayoutOf(member), call, DigestOf(member)}));
      } else {
        PeerLayout layout;
        layout.member = member;
        // A layout that comes over a link is an object of its own and brings its digest. Here only
        // one member in kOwnLayouts brings such an object, so that the benchmark ends in time.
        const bool own = member.value() % kOwnLayouts == 0;
        layout.layout = own ? std::make_shared<const Layout>(*LayoutOf(member)) : LayoutOf(member);
        layout.digest = DigestOf(member);
        layout.call = call;
        Report(node, "RegisterLayout", std::move(layout));
      }
      Drain();
    }
  }

  template <typename E>
  void Call(const char* row, int rank, E event) {
    event.member = MemberId(static_cast<uint64_t>(rank) + 1);
    event.call = CallId(++ids_);
    event.version = Version(version_);
    Report(node_of_.at(event.member), row, PeerCall{std::move(event)});
  }

  void Update(int version) {
    version_ = version;
    committed_ = false;
    if (data_ == Data::kRefit) {
      for (int r = 0; r < size_.trainer_ranks; ++r) Call("Refit call", r, RefitEvent{});
      Drain();
    } else {
      PushAll();
    }
    if (committed_) return;
    fmt::print(stderr, "scale_bench: version {} was not committed\n", version);
    std::exit(1);
  }

  void PushAll() {
    const size_t all = model_.tensors.size();
    const size_t each = static_cast<size_t>(size_.bucket_tensors);
    const size_t tensors = data_ == Data::kLoader
                               ? std::min(all, each * static_cast<size_t>(size_.loaded_buckets))
                               : all;
    for (int r = 0; r < size_.trainer_ranks; ++r) {
      BeginEvent begin;
      begin.tensor_count = static_cast<int64_t>(tensors);
      Call("Begin", r, std::move(begin));
    }
    Drain();
    int64_t buckets = 0;
    for (size_t first = 0; first < tensors; first += each, ++buckets) {
      BucketDraft bucket;
      bucket.seq = buckets;
      for (size_t t = first; t < std::min(first + each, tensors); ++t) {
        const TensorSpec& tensor = model_.tensors[t];
        bucket.Add(tensor, 0, Must(ElementCount(tensor.shape)));
      }
      Call("bucket", 0, BucketEvent(bucket));
      Drain();
    }
    for (int r = 0; r < size_.trainer_ranks; ++r) {
      CommitEvent commit;
      commit.bucket_count = r == 0 ? buckets : 0;
      Call("Commit", r, std::move(commit));
    }
    Drain();
  }

  const Size size_;
  const int instances_;
  const Data data_;
  const Model& model_;
  // The plan for each number of instances.
  std::map<int, std::shared_ptr<const RefitPlan>>* const plans_;
  uint64_t ids_ = 10'000;
  Coordinator coordinator_;
  std::unique_ptr<Follower> follower_;
  MachineActions ignored_;
  TimePoint now_{std::chrono::hours(1)};
  std::map<NodeId, Stub> stubs_;
  std::map<MemberId, NodeId> node_of_;
  std::deque<std::pair<std::string, MachineEvent>> inbox_;
  std::shared_ptr<const RefitPlan> plan_;
  std::map<const Layout*, uint64_t> digests_;
  UpdateId update_;
  UpdateId follower_written_;
  int64_t version_ = 0;
  bool committed_ = false;
  Rows rows_;
};

// Each row has the medians over the rounds of the longest event and of all events, and the number
// of events.
using Column = std::map<std::string, Row>;

Column Medians(const std::vector<Rows>& rounds) {
  std::map<std::string, std::vector<double>> longest;
  std::map<std::string, std::vector<double>> total;
  Column column;
  for (const Rows& rows : rounds) {
    for (const auto& [name, row] : rows) {
      longest[name].push_back(row.longest);
      total[name].push_back(row.total);
      column[name].events = row.events;
    }
  }
  for (auto& [name, row] : column) {
    row.longest = Median(longest[name]);
    row.total = Median(total[name]);
  }
  return column;
}

// The columns, each with its name.
using Columns = std::vector<std::pair<std::string, Column>>;

bool Reached(const Columns& columns) {
  for (const auto& [name, column] : columns) {
    for (const auto& [row, figure] : column) {
      if (figure.longest * 1e3 > kGoalMs) return false;
    }
  }
  return true;
}

void PrintTable(const Columns& columns) {
  fmt::print("| longest event under the mutex, ms (all of them, s) |");
  for (const auto& [name, column] : columns) fmt::print(" {} |", name);
  fmt::print("\n|---|");
  for (size_t i = 0; i < columns.size(); ++i) fmt::print("---|");
  fmt::print("\n");
  for (const char* row : kRows) {
    fmt::print("| {} |", row);
    for (const auto& [name, column] : columns) {
      const auto at = column.find(row);
      if (at == column.end()) {
        fmt::print(" |");
        continue;
      }
      const double ms = at->second.longest * 1e3;
      fmt::print(" {:.{}f} ({:.2f}) |", ms, ms < 10 ? 2 : 0, at->second.total);
    }
    fmt::print("\n");
  }
}

// One object a line, with the fields of report.h; `events` and `all_seconds` are of all events of
// the row.
void PrintJson(const Columns& columns) {
  for (const auto& [name, column] : columns) {
    for (const auto& [row, figure] : column) {
      const double ms = figure.longest * 1e3;
      const nlohmann::json line = {{"bench", "scale"},
                                   {"case", fmt::format("{}: {}", name, row)},
                                   {"value", ms},
                                   {"unit", "ms"},
                                   {"goal", kGoalMs},
                                   {"reached", ms <= kGoalMs},
                                   {"events", figure.events},
                                   {"all_seconds", figure.total}};
      fmt::print("{}\n", line.dump());
    }
  }
}

int Main(int argc, char** argv) {
  CLI::App app("The longest time under the mutex, by kind of event, in a large group");
  bool quick = false;
  bool json = false;
  int rounds = 3;
  std::string only;
  std::vector<int> instances;
  app.add_flag("--quick", quick, "a small group: shows that it runs, no figures to compare");
  app.add_flag("--json", json, "one object a line");
  app.add_option("--rounds", rounds, "medians of so many")->check(CLI::PositiveNumber);
  app.add_option("--instances", instances, "default: 8 and 512");
  app.add_option("--data", only, "one of them alone")
      ->check(CLI::IsMember({"refit", "push", "loader"}));
  CLI11_PARSE(app, argc, argv);
  const Size size = quick ? QuickSize() : Size();
  if (quick) rounds = 1;
  if (instances.empty()) instances = quick ? std::vector<int>{2, 8} : std::vector<int>{8, 512};
  Columns columns;
  size_t tensors = 0;
  for (const int count : instances) {
    const Model model = MakeModel(size, count);
    tensors = model.tensors.size();
    std::map<int, std::shared_ptr<const RefitPlan>> plans;
    for (const Data data : {Data::kRefit, Data::kPush, Data::kLoader}) {
      const std::string name = data == Data::kLoader ? "loader" : std::string(Name(data));
      if (!only.empty() && only != name) continue;
      std::vector<Rows> runs;
      for (int i = 0; i < rounds; ++i) {
        fmt::print(stderr, "{} instances, {}, round {}\n", count, name, i + 1);
        runs.push_back(Bench(size, count, data, model, &plans).Run());
      }
      columns.emplace_back(fmt::format("{}, {} instances", Name(data), count), Medians(runs));
    }
  }
  const bool reached = Reached(columns);
  if (json) {
    PrintJson(columns);
  } else {
    fmt::print("{} daemons, {} trainer ranks, {} engine ranks, {} tensors\n\n", size.nodes,
               size.trainer_ranks, size.engine_ranks, tensors);
    PrintTable(columns);
    fmt::print("\nGoal: no event over {:g} ms: {}\n", kGoalMs, reached ? "reached" : "missed");
  }
  return reached || quick ? 0 : 1;
}

}  // namespace
}  // namespace refitd::bench

int main(int argc, char** argv) { return refitd::bench::Main(argc, argv); }
