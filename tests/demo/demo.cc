// The main job, with real processes: two daemons as two nodes on this host, a trainer that pushes
// checkpoints on one of them, three instances of a model: one on each node and one with a rank on
// either. Version 1 is installed, every weight is rewritten and version 2 is installed, and during
// version 3 one instance is killed. Each engine compares its memory with the checkpoint by itself.
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <array>
#include <csignal>
#include <filesystem>
#include <fstream>

#include "daemon/refitctl/format.h"
#include "daemon/refitctl/operator_client.h"
#include "daemon/refitctl/render.h"
#include "tests/demo/child.h"
#include "tests/demo/console.h"
#include "tests/demo/update_watcher.h"
#include "tests/workloads/checkpoint_writer.h"
#include "transport/base/status.h"

namespace refitd::demo {
namespace {

namespace fs = std::filesystem;
using refitctl::GlobalOptions;
using refitctl::OperatorClient;
using std::chrono::steady_clock;

constexpr char kGroup[] = "policy";
constexpr char kVictim[] = "loader";
constexpr std::string_view kTcp = "tcp:";  // how a listener's name begins, before HOST:PORT
constexpr int kInstances = 3;
constexpr int64_t kVersions = 3;
constexpr int64_t kKillVersion = 3;
constexpr int kShards = 2;
constexpr size_t kMaxSocketPath = 100;  // sun_path has 108
constexpr int kStepsTold = 5;           // progress lines of an update, without a terminal

struct Options {
  std::string model = "qwen3-0.6b";
  std::string refitd;
  std::string refitctl;
  bool json = false;
  double wait_seconds = 120;  // the time of each single wait
  int64_t slot_bytes = 0;     // 0: the daemon's default
  std::string bucket_bytes = "64MiB";
};

// A new folder in the system's temporary one; gone with the object.
class WorkFolder {
 public:
  static absl::StatusOr<std::unique_ptr<WorkFolder>> Make() {
    std::error_code ignored;
    std::string pattern = (fs::temp_directory_path(ignored) / "refitd-demo-XXXXXX").string();
    if (ignored || pattern.size() + sizeof("/node-a.sock.data") > kMaxSocketPath) {
      pattern = "/tmp/refitd-demo-XXXXXX";
    }
    if (::mkdtemp(pattern.data()) == nullptr) return ErrnoError(errno, pattern);
    return std::unique_ptr<WorkFolder>(new WorkFolder(pattern));
  }
  ~WorkFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  std::string File(std::string_view name) const { return fmt::format("{}/{}", path_, name); }
  std::string Checkpoint(int64_t version) const {
    return File(fmt::format("checkpoint-{}", version));
  }

 private:
  explicit WorkFolder(std::string path) : path_(std::move(path)) {}
  const std::string path_;
};

// A daemon that stands for a node of its own: it shares nothing with the other but the network.
struct NodeDaemon {
  std::string id;
  std::string role;
  std::vector<std::string> flags;
  GlobalOptions global;
  std::unique_ptr<Child> process;
  std::unique_ptr<OperatorClient> client;
  v1::GetStatusResponse last;  // the daemon's own status at the end
};

// One engine process.
struct Rank {
  size_t node = 0;
  std::string instance;
  int rank = 0;
  int world_size = 1;
  std::string delivery;
  std::string holds;
  std::unique_ptr<Child> child;
  int64_t bytes = 0;     // the bytes that the rank holds
  int64_t verified = 0;  // the newest version that the rank verified in its own memory
  bool killed = false;

  std::string name() const { return fmt::format("{}.{}", instance, rank); }
};

struct VersionResult {
  int64_t version = 0;
  double seconds = 0;
  std::string committed;  // the instances that committed
  std::string lost;       // the instances that did not, and why
  int ranks_verified = 0;
};

class Demo {
 public:
  explicit Demo(Options options) : options_(std::move(options)) {}

  absl::Status Run() {
    REFITD_ASSIGN_OR_RETURN(model_, workloads::FindModel(options_.model));
    tensors_ = workloads::TensorsOf(model_);
    bytes_ = workloads::BytesOf(tensors_);
    REFITD_ASSIGN_OR_RETURN(work_, WorkFolder::Make());
    nodes_[kNodeA].id = "node-a";
    nodes_[kNodeA].role = "coordinator, trainer";
    nodes_[kNodeA].flags = {"--listen-tcp", "127.0.0.1:0", "--insecure"};
    nodes_[kNodeB].flags = {"--insecure"};
    nodes_[kNodeB].id = "node-b";
    nodes_[kNodeB].role = "joined";
    for (NodeDaemon& node : nodes_) {
      node.global.socket = work_->File(node.id + ".sock");
      node.global.timeout =
          std::chrono::milliseconds(static_cast<int64_t>(options_.wait_seconds * 1000));
    }
    const absl::Status status = RunAll();
    if (!status.ok()) ShowLogs();
    watcher_.reset();
    return status;
  }

  // The result as the last line of --json says it.
  std::string Json(bool verified) const {
    nlohmann::ordered_json json;
    json["versions"] = nlohmann::json::array();
    for (const VersionResult& result : results_) json["versions"].push_back(result.version);
    json["engines"] = kInstances;
    json["tensors"] = tensors_.size();
    json["bytes"] = bytes_;
    json["verified"] = verified;
    json["update_seconds"] = nlohmann::json::array();
    for (const VersionResult& result : results_) json["update_seconds"].push_back(result.seconds);
    return json.dump();
  }

 private:
  TimePoint Deadline() const {
    return steady_clock::now() +
           std::chrono::milliseconds(static_cast<int64_t>(options_.wait_seconds * 1000));
  }

  absl::Status RunAll() {
    REFITD_RETURN_IF_ERROR(WriteCheckpoint(1));
    REFITD_RETURN_IF_ERROR(StartDaemons());
    REFITD_RETURN_IF_ERROR(StartEngines());
    for (int64_t version = 1; version <= kVersions; ++version) {
      if (version > 1) REFITD_RETURN_IF_ERROR(WriteCheckpoint(version));
      REFITD_RETURN_IF_ERROR(Install(version));
    }
    REFITD_RETURN_IF_ERROR(CheckStatus());
    REFITD_RETURN_IF_ERROR(StopAll());
    ShowTable();
    return absl::OkStatus();
  }

  // ---- setting up ----

  // At most two checkpoints are on the disk at a time.
  absl::Status WriteCheckpoint(int64_t version) {
    std::error_code ignored;
    fs::remove_all(work_->Checkpoint(version - 2), ignored);
    const auto start = steady_clock::now();
    REFITD_RETURN_IF_ERROR(workloads::WriteModelCheckpoint(model_, static_cast<uint64_t>(version),
                                                           work_->Checkpoint(version), kShards));
    console_.Say(fmt::format(
        "{}: {} tensors, {} of new weights written in {}",
        version == 1 ? "checkpoint" : fmt::format("checkpoint {}", version), tensors_.size(),
        HumanBytes(bytes_),
        HumanSeconds(std::chrono::duration<double>(steady_clock::now() - start).count())));
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<Child>> Start(const std::string& name,
                                               const std::vector<std::string>& argv) {
    started_.push_back(name);
    return Child::Start(name, argv, LogOf(name), &events_);
  }
  std::string LogOf(const std::string& name) const { return work_->File(name + ".log"); }

  absl::Status StartDaemons() {
    for (NodeDaemon& node : nodes_) {
      std::vector<std::string> argv = {options_.refitd, "--listen-unix", node.global.socket,
                                       "--daemon-id", node.id};
      argv.insert(argv.end(), node.flags.begin(), node.flags.end());
      REFITD_ASSIGN_OR_RETURN(node.process, Start(node.id, argv));
      node.client = std::make_unique<OperatorClient>(node.global);
    }
    for (NodeDaemon& node : nodes_) {
      REFITD_ASSIGN_OR_RETURN(const auto status, node.client->Call(&refitctl::Rpcs::GetStatus, {},
                                                                   /*wait_for_ready=*/true));
      for (const std::string& listener : status.listeners()) {
        if (listener.starts_with(kTcp)) coordinator_ = listener.substr(kTcp.size());
      }
      console_.Say(fmt::format("{}: refitd {} serves (pid {}), {}", node.id,
                               status.daemon_version(), node.process->pid(),
                               fmt::join(status.listeners(), ", ")));
    }
    if (coordinator_.empty()) {
      return Error(absl::StatusCode::kAborted, "{} has no TCP listener", nodes_[kNodeA].id);
    }
    client_ = nodes_[kNodeA].client.get();
    v1::CreateGroupRequest request;
    request.set_group(kGroup);
    request.mutable_spec()->set_trainer_ranks(1);
    request.mutable_spec()->set_min_instances(1);
    request.mutable_spec()->set_slot_bytes(options_.slot_bytes);
    REFITD_RETURN_IF_ERROR(client_->Call(&refitctl::Rpcs::CreateGroup, request).status());
    watcher_ = std::make_unique<UpdateWatcher>(
        *client_, kGroup, [this](const v1::UpdateStatus& update) { OnUpdate(update); });
    return absl::OkStatus();
  }

  absl::Status StartEngines() {
    const std::string all = "every tensor";
    ranks_.push_back({kNodeA, "in_place", 0, 1, "in_place", all, nullptr});
    ranks_.push_back({kNodeB, kVictim, 0, 1, "loader", all, nullptr});
    for (int rank = 0; rank < 2; ++rank) {
      ranks_.push_back({rank == 0 ? kNodeA : kNodeB, "sharded", rank, 2, "in_place",
                        fmt::format("half {} of each matrix", rank), nullptr});
    }
    for (Rank& rank : ranks_) {
      std::vector<std::string> argv = {options_.refitctl,
                                       "engine",
                                       "--socket",
                                       nodes_[rank.node].global.socket,
                                       "-o",
                                       "json",
                                       "--group",
                                       kGroup,
                                       "--instance",
                                       rank.instance,
                                       "--rank",
                                       fmt::format("{}", rank.rank),
                                       "--world-size",
                                       fmt::format("{}", rank.world_size),
                                       "--delivery",
                                       rank.delivery,
                                       "--checkpoint",
                                       work_->File("checkpoint-{version}")};
      if (rank.node != kNodeA) argv.insert(argv.end(), {"--coordinator", coordinator_});
      if (rank.instance == kVictim) {
        argv.insert(argv.end(), {"--stall-in", fmt::format("{}", kKillVersion)});
      }
      if (rank.world_size > 1) argv.insert(argv.end(), {"--slice", "0"});
      REFITD_ASSIGN_OR_RETURN(rank.child, Start(rank.name(), argv));
    }
    for (Rank& rank : ranks_) {
      REFITD_ASSIGN_OR_RETURN(const auto event,
                              events_.Await(rank.name(), "attached", 0, Deadline()));
      rank.bytes = event.value("bytes", int64_t{0});
      console_.Say(fmt::format("{}: engine {} rank {}/{}: {}, holds {} ({}; pid {})",
                               nodes_[rank.node].id, rank.instance, rank.rank, rank.world_size,
                               rank.delivery, rank.holds, HumanBytes(rank.bytes),
                               rank.child->pid()));
    }
    return absl::OkStatus();
  }

  Rank& VictimRank() {
    for (Rank& rank : ranks_) {
      if (rank.instance == kVictim) return rank;
    }
    REFITD_CHECK(false);
    return ranks_.front();
  }

  // ---- one version ----

  // On the watcher's thread: draws progress.
  void OnUpdate(const v1::UpdateStatus& update) {
    if (HasEnded(update)) return;
    if (update.update_id() != metered_update_) {
      metered_update_ = update.update_id();
      meter_ = ProgressMeter();
    }
    meter_.Add(update.elapsed_seconds(), update.bytes());
    const double fraction = Fraction(update.bytes(), update.total_bytes()).value_or(0);
    console_.Progress("  " + refitctl::RenderUpdate(update, meter_),
                      static_cast<int>(fraction * kStepsTold));
  }

  // Kills the victim while it stalls with a part of the update in hand, so that the kill comes in
  // mid-update whatever the machine's speed.
  absl::Status KillVictim() {
    Rank& victim = VictimRank();
    REFITD_RETURN_IF_ERROR(
        events_.Await(victim.name(), "stalled", kKillVersion, Deadline()).status());
    REFITD_ASSIGN_OR_RETURN(const v1::GetGroupResponse before,
                            client_->Call(&refitctl::Rpcs::GetGroup, kGroup));
    victim.child->Signal(SIGKILL);
    const v1::UpdateStatus& update = before.group().update();
    console_.Say(fmt::format("  killed instance {} (pid {}) with {} of {} handed over", kVictim,
                             victim.child->pid(), HumanBytes(update.bytes()),
                             HumanBytes(update.total_bytes())));
    REFITD_ASSIGN_OR_RETURN(const int code, victim.child->Wait(Deadline()));
    if (code != 128 + SIGKILL) {
      return Error(absl::StatusCode::kAborted, "{} ended with {}", kVictim, code);
    }
    victim.killed = true;
    return absl::OkStatus();
  }

  absl::Status Install(int64_t version) {
    console_.Say(fmt::format("version {}: refitctl push on {}", version, nodes_[kNodeA].id));
    const std::string name = fmt::format("push-{}", version);
    REFITD_ASSIGN_OR_RETURN(
        const auto push,
        Start(name, {options_.refitctl, "push", "--socket", nodes_[kNodeA].global.socket, "-o",
                     "json", "--timeout", fmt::format("{}", options_.wait_seconds), "--group",
                     kGroup, "--version", fmt::format("{}", version), "--wait-instances",
                     fmt::format("{}", kInstances), "--bucket-bytes", options_.bucket_bytes,
                     work_->Checkpoint(version)}));
    if (version == kKillVersion) REFITD_RETURN_IF_ERROR(KillVictim());
    REFITD_ASSIGN_OR_RETURN(const int code, push->Wait(Deadline()));
    console_.EndProgress();
    if (code != 0) {
      return Error(absl::StatusCode::kAborted, "push of version {} exited with {}", version, code);
    }
    REFITD_RETURN_IF_ERROR(TakeResult(version, events_.Last(name)));
    return AwaitVerified(version);
  }

  // Checks that every instance committed except the killed one.
  absl::Status TakeResult(int64_t version, const nlohmann::json& summary) {
    VersionResult result;
    result.version = version;
    result.seconds = summary.value("seconds", 0.0);
    int committed = 0;
    for (const auto& instance : summary.value("instances", nlohmann::json::array())) {
      const std::string name = instance.value("instance", "");
      const bool ok = instance.value("committed", false);
      const bool expected = version != kKillVersion || name != kVictim;
      if (ok != expected) {
        return Error(absl::StatusCode::kAborted, "version {}: instance {} {}: {}", version, name,
                     ok ? "committed though it was killed" : "was evicted",
                     instance.value("reason", ""));
      }
      committed += ok ? 1 : 0;
      std::string& list = ok ? result.committed : result.lost;
      if (!list.empty()) list += ", ";
      list += ok ? name : fmt::format("{}: {}", name, instance.value("reason", ""));
    }
    const int expected = version == kKillVersion ? kInstances - 1 : kInstances;
    if (committed != expected) {
      return Error(absl::StatusCode::kAborted, "version {}: {} of {} instances committed", version,
                   committed, expected);
    }
    console_.Say(fmt::format("  committed in {} ({}): {}{}", HumanSeconds(result.seconds),
                             HumanRate(static_cast<double>(bytes_) / result.seconds),
                             result.committed,
                             result.lost.empty() ? "" : "; evicted " + result.lost));
    results_.push_back(std::move(result));
    return absl::OkStatus();
  }

  absl::Status AwaitVerified(int64_t version) {
    for (Rank& rank : ranks_) {
      if (rank.killed) continue;
      REFITD_ASSIGN_OR_RETURN(const auto event,
                              events_.Await(rank.name(), "verified", version, Deadline()));
      if (event.value("bytes", int64_t{0}) != rank.bytes) {
        return Error(absl::StatusCode::kAborted, "{} verified {} bytes of {}", rank.name(),
                     event.value("bytes", int64_t{0}), rank.bytes);
      }
      rank.verified = version;
      ++results_.back().ranks_verified;
      console_.Say(fmt::format("  {}: {} rank {} compared its {} with the checkpoint: equal",
                               nodes_[rank.node].id, rank.instance, rank.rank,
                               HumanBytes(rank.bytes)));
    }
    return absl::OkStatus();
  }

  // ---- the end ----

  // Compares the daemon's own status of the instances.
  absl::Status CheckStatus() {
    REFITD_ASSIGN_OR_RETURN(const auto group, client_->Call(&refitctl::Rpcs::GetGroup, kGroup));
    if (group.group().version() != kVersions) {
      return Error(absl::StatusCode::kAborted, "the group is at version {}",
                   group.group().version());
    }
    for (const auto& instance : group.group().instances()) {
      const bool serves = refitctl::IsComplete(instance) && instance.version() == kVersions;
      if (serves == (instance.name() != kVictim)) continue;
      return Error(absl::StatusCode::kAborted, "instance {} is {} at version {}", instance.name(),
                   instance.state(), instance.version());
    }
    return CheckNodes();
  }

  // Checks that each daemon knows the other, and that bytes crossed between them.
  absl::Status CheckNodes() {
    for (NodeDaemon& node : nodes_) {
      REFITD_ASSIGN_OR_RETURN(node.last, node.client->Call(&refitctl::Rpcs::GetStatus));
    }
    const auto& groups = nodes_[kNodeA].last.groups();
    int joined = 0;
    for (const v1::NodeStatus& node :
         groups.empty() ? v1::GroupStatus().nodes() : groups[0].nodes()) {
      joined += node.daemon_id() == nodes_[kNodeB].id && node.state() == "joined" ? 1 : 0;
    }
    if (joined != 1) {
      return Error(absl::StatusCode::kAborted, "{} is not joined to {}", nodes_[kNodeB].id,
                   nodes_[kNodeA].id);
    }
    const int64_t sent = nodes_[kNodeA].last.resources().wire_bytes_sent();
    const int64_t received = nodes_[kNodeB].last.resources().wire_bytes_received();
    // Until the loader instance was killed, each version crossed whole and once: the other rank of
    // its node takes its half from the same bytes.
    const int64_t least = (kKillVersion - 1) * bytes_;
    if (sent != received || sent < least) {
      return Error(absl::StatusCode::kAborted,
                   "{} sent {} bytes and {} received {}; {} were due at least", nodes_[kNodeA].id,
                   sent, nodes_[kNodeB].id, received, least);
    }
    return absl::OkStatus();
  }

  absl::Status StopAll() {
    watcher_.reset();
    for (Rank& rank : ranks_) {
      if (rank.killed) continue;
      rank.child->Signal(SIGTERM);
      REFITD_RETURN_IF_ERROR(ExpectExit(*rank.child));
    }
    for (size_t i = nodes_.size(); i-- > 0;) {  // the coordinator last
      nodes_[i].process->Signal(SIGTERM);
      REFITD_RETURN_IF_ERROR(ExpectExit(*nodes_[i].process));
    }
    return absl::OkStatus();
  }

  absl::Status ExpectExit(Child& child) {
    REFITD_ASSIGN_OR_RETURN(const int code, child.Wait(Deadline()));
    if (code == 0) return absl::OkStatus();
    return Error(absl::StatusCode::kAborted, "{} exited with {} after SIGTERM", child.name(), code);
  }

  void ShowTable() {
    Table versions({"VERSION", "TENSORS", "BYTES", "UPDATE", "RATE", "RANKS VERIFIED",
                    "INSTALLED IN", "EVICTED"},
                   {true, true, true, true, true, true});
    for (const VersionResult& result : results_) {
      versions.Add({fmt::format("{}", result.version), fmt::format("{}", tensors_.size()),
                    HumanBytes(bytes_), HumanSeconds(result.seconds),
                    HumanRate(static_cast<double>(bytes_) / result.seconds),
                    fmt::format("{} of {}", result.ranks_verified, ranks_.size()), result.committed,
                    result.lost.empty() ? "-" : result.lost});
    }
    Table engines({"INSTANCE", "RANK", "NODE", "DELIVERY", "HOLDS", "BYTES", "VERIFIED", "END"},
                  {false, true, false, false, false, true, true});
    for (const Rank& rank : ranks_) {
      engines.Add({rank.instance, fmt::format("{}/{}", rank.rank, rank.world_size),
                   nodes_[rank.node].id, rank.delivery, rank.holds, HumanBytes(rank.bytes),
                   fmt::format("v{}", rank.verified),
                   rank.killed ? fmt::format("killed in v{}", kKillVersion) : "in service"});
    }
    Table nodes({"NODE", "ROLE", "MEMBERS", "WIRE SENT", "WIRE RECEIVED", "ANONYMOUS MEMORY"},
                {false, false, true, true, true, true});
    for (const NodeDaemon& node : nodes_) {
      const v1::ResourceStatus& r = node.last.resources();
      nodes.Add({node.id, node.role, fmt::format("{}", r.members()),
                 HumanBytes(r.wire_bytes_sent()), HumanBytes(r.wire_bytes_received()),
                 HumanBytes(r.anonymous_bytes())});
    }
    console_.Say("");
    console_.Say(versions.ToString());
    console_.Say(nodes.ToString());
    console_.Say(engines.ToString() +
                 "every surviving rank's memory equals the checkpoint of every version");
  }

  // The last lines of each process's stderr.
  void ShowLogs() {
    constexpr size_t kLines = 15;
    console_.EndProgress();
    for (const std::string& name : started_) {
      std::ifstream file(LogOf(name));
      std::vector<std::string> lines;
      for (std::string line; std::getline(file, line);) lines.push_back(line);
      if (lines.empty()) continue;
      console_.Say(fmt::format("--- {}", name));
      for (size_t i = lines.size() > kLines ? lines.size() - kLines : 0; i < lines.size(); ++i) {
        console_.Say(lines[i]);
      }
    }
  }

  static constexpr size_t kNodeA = 0;  // holds the group, and the trainer attaches here
  static constexpr size_t kNodeB = 1;

  const Options options_;
  workloads::Qwen3Model model_;
  std::vector<TensorSpec> tensors_;
  int64_t bytes_ = 0;
  Console console_;
  EventLog events_;
  std::vector<std::string> started_;  // the processes that were started, to show their logs

  // The watcher's thread uses these alone.
  ProgressMeter meter_;
  uint64_t metered_update_ = 0;
  // The watcher's thread and the demo share these.

  // These members are destroyed from the last to the first: the watcher, the engines, the daemons,
  // then their files.
  std::unique_ptr<WorkFolder> work_;
  std::array<NodeDaemon, 2> nodes_;
  std::string coordinator_;           // HOST:PORT of the first node's listener
  OperatorClient* client_ = nullptr;  // the first node's Operator service
  std::vector<Rank> ranks_;
  std::vector<VersionResult> results_;
  std::unique_ptr<UpdateWatcher> watcher_;
};

// The path of a file that the build puts beside this binary.
std::string Beside(const std::string& path) {
  std::error_code ignored;
  return (fs::read_symlink("/proc/self/exe", ignored).parent_path() / path).lexically_normal();
}

int Main(int argc, char** argv) {
  Options options;
  options.refitd = Beside("../../daemon/refitd");
  options.refitctl = Beside("../../daemon/refitctl/refitctl");
  CLI::App app(
      "Installs three versions of a checkpoint in three instances over two daemons, kills one "
      "instance in the middle of the third, and verifies every survivor's memory.");
  app.add_option("--model", options.model, "qwen3-0.6b (default), qwen3-4b or tiny");
  app.add_flag("--json", options.json, "The last line is one JSON object");
  app.add_option("--wait", options.wait_seconds, "Seconds that any single wait may last")
      ->check(CLI::Range(1.0, 3600.0));
  app.add_option("--slot-bytes", options.slot_bytes, "Of the group's staging slots");
  app.add_option("--bucket-bytes", options.bucket_bytes, "Of the trainer's buckets, like 64MiB");
  app.add_option("--refitd", options.refitd, "Path of the daemon");
  app.add_option("--refitctl", options.refitctl, "Path of refitctl");
  CLI11_PARSE(app, argc, argv);
  CatchInterrupts();
  const bool json = options.json;
  Demo demo(std::move(options));
  const absl::Status status = demo.Run();
  if (!status.ok()) fmt::print(stderr, "demo: {}\n", Message(status));
  if (json) fmt::print("{}\n", demo.Json(status.ok()));
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace refitd::demo

int main(int argc, char** argv) { return refitd::demo::Main(argc, argv); }
