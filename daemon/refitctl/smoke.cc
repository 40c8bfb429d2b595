// smoke: one update of 1 MiB through a group of its own, from a trainer here to an engine at each
// daemon, whose memory is compared byte by byte. The group is deleted afterwards, whatever
// happened.
#include <fmt/ranges.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <future>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <thread>

#include "client/engine.h"
#include "client/trainer.h"
#include "daemon/refitctl/command.h"
#include "daemon/refitctl/format.h"
#include "daemon/refitctl/placement.h"
#include "transport/base/status.h"

namespace refitd::refitctl {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kPoll{50};
// How long engines may wait for the outcome after the trainer has it, and how long the group may
// keep members after they have detached (P4).
constexpr milliseconds kEndLimit{5'000};
constexpr int64_t kSmokeSlotBytes = 64 << 10;  // a pool as small as it can be: nothing is staged
constexpr int kSmokeSlots = 2;
constexpr Version kSmokeVersion{1};

struct SmokeOptions {
  std::vector<std::string> daemons;  // sockets beside the program's own
  std::string coordinator;
  std::string group;  // empty: a name of its own
  int instances = 0;  // 0: the engines of this call
  bool join = false;
  milliseconds duration{30'000};
};

// The weights: 1 MiB whose bytes follow from the group's name, so that each process knows them.
class SmokeWeights {
 public:
  explicit SmokeWeights(const std::string& group)
      : tensors_{{"smoke.matrix", DType::kBFloat16, {512, 512}},
                 {"smoke.vector", DType::kFloat32, {128 << 10}}},
        placement_(PlaceWhole(tensors_, int64_t{1} << 30)),
        bytes_(static_cast<size_t>(placement_.region_bytes[0])) {
    std::seed_seq seed(group.begin(), group.end());
    std::mt19937 generator(seed);
    for (char& byte : bytes_) byte = static_cast<char>(generator());
  }
  int64_t region_bytes() const { return placement_.region_bytes[0]; }
  int64_t bytes() const {
    int64_t sum = 0;
    for (const Placement::Place& place : placement_.places) sum += place.bytes;
    return sum;
  }
  Layout LayoutIn(const client::Region& region) const {
    return LayoutOf(tensors_, placement_, {region.id()});
  }
  void WriteTo(char* memory) const { std::memcpy(memory, bytes_.data(), bytes_.size()); }
  // DATA_LOSS names the first tensor and byte that differ.
  absl::Status Compare(const char* memory) const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const Placement::Place& place = placement_.places[i];
      for (int64_t at = place.byte_offset; at < place.byte_offset + place.bytes; ++at) {
        if (memory[at] == bytes_[static_cast<size_t>(at)]) continue;
        return Error(absl::StatusCode::kDataLoss, "tensor '{}': byte {} of {} is wrong",
                     tensors_[i].name, at - place.byte_offset, place.bytes);
      }
    }
    return absl::OkStatus();
  }

 private:
  std::vector<TensorSpec> tensors_;
  Placement placement_;
  std::vector<char> bytes_;
};

client::ConnectOptions ConnectTo(const GlobalOptions& at, const std::string& group,
                                 const std::string& coordinator) {
  client::ConnectOptions connect = ConnectOf(at);
  connect.group = group;
  connect.client = "refitctl smoke";
  connect.coordinator = coordinator;
  return connect;
}

// An engine rank that takes one update and compares its memory. Used by one thread at a time.
class SmokeEngine {
 public:
  static absl::StatusOr<std::unique_ptr<SmokeEngine>> Attach(client::ConnectOptions connect,
                                                             const std::string& instance,
                                                             const SmokeWeights& weights) {
    client::EngineOptions options;
    options.connect = std::move(connect);
    options.instance = instance;
    std::unique_ptr<SmokeEngine> engine(new SmokeEngine(weights));
    REFITD_ASSIGN_OR_RETURN(engine->engine_, client::Engine::Attach(options));
    REFITD_ASSIGN_OR_RETURN(engine->region_, engine->engine_->NewRegion(weights.region_bytes()));
    REFITD_RETURN_IF_ERROR(engine->engine_->Register(weights.LayoutIn(*engine->region_)));
    return engine;
  }

  // Answers events until the update ended, `deadline` passed, or the trainer gave up.
  absl::Status Serve(Clock::time_point deadline, const std::atomic<bool>& given_up) {
    while (Clock::now() < deadline && !given_up) {
      REFITD_ASSIGN_OR_RETURN(const client::Event event, engine_->Next(kPoll));
      if (const auto* prepare = std::get_if<client::Prepare>(&event)) {
        REFITD_RETURN_IF_ERROR(engine_->Ready(prepare->version));
      } else if (const auto* aborted = std::get_if<client::Aborted>(&event)) {
        return absl::AbortedError(aborted->reason);
      } else if (std::holds_alternative<client::Committed>(event)) {
        return weights_.Compare(region_->data());
      }
    }
    return absl::DeadlineExceededError("no outcome came");
  }

 private:
  explicit SmokeEngine(const SmokeWeights& weights) : weights_(weights) {}

  const SmokeWeights& weights_;
  std::unique_ptr<client::Engine> engine_;
  std::shared_ptr<client::Region> region_;
};

// An engine of this call, at one daemon.
struct Site {
  GlobalOptions at;
  std::string daemon_id;
  bool own = false;  // the daemon that makes the group
  std::unique_ptr<SmokeEngine> engine;
  absl::Status outcome;
};

struct SmokeResult {
  std::vector<Site> sites;
  client::CommitResult commit;
  std::vector<std::string> not_tried;  // daemons that groups of these daemons have
};

// Deletes the group, and waits while the daemons still notice that its members have gone.
absl::Status DeleteSoon(const OperatorClient& client, const std::string& group) {
  const auto deadline = Clock::now() + kEndLimit;
  while (true) {
    const absl::Status deleted = client.Call(&Rpcs::DeleteGroup, group).status();
    if (deleted.ok() || absl::IsNotFound(deleted)) return absl::OkStatus();
    if (!absl::IsFailedPrecondition(deleted) || Clock::now() > deadline) return deleted;
    std::this_thread::sleep_for(kPoll);
  }
}

class Smoke {
 public:
  Smoke(const GlobalOptions& global, const SmokeOptions& options)
      : options_(options), group_(options.group), client_(global), weights_(options.group) {
    AddSite(global).own = true;
    for (const std::string& socket : options.daemons) AddSite(global).at.socket = socket;
  }

  absl::StatusOr<SmokeResult> Run() {
    REFITD_RETURN_IF_ERROR(Look());
    absl::Status status = Update();
    for (Site& site : result_.sites) site.engine.reset();
    const absl::Status deleted = DeleteSoon(client_, group_);
    if (status.ok() && !deleted.ok()) {
      status = Prefixed(deleted, "the update went well, but group {} is left", group_);
    }
    if (!status.ok()) return status;
    return std::move(result_);
  }

  // The part of one engine alone, for a group that another call makes.
  absl::StatusOr<SmokeResult> Join() {
    REFITD_RETURN_IF_ERROR(Look());
    Site& site = result_.sites.front();
    site.at.timeout = options_.duration;  // the group may not be there yet
    const auto deadline = Clock::now() + options_.duration;
    REFITD_RETURN_IF_ERROR(AttachEngine(site, options_.coordinator));
    const std::atomic<bool> never{false};
    REFITD_RETURN_IF_ERROR(site.engine->Serve(deadline, never));
    result_.commit.version = kSmokeVersion;
    return std::move(result_);
  }

 private:
  Site& AddSite(const GlobalOptions& global) {
    Site& site = result_.sites.emplace_back();
    site.at = global;
    return site;
  }

  // Asks each daemon for its name, and for the daemons that it knows.
  absl::Status Look() {
    std::set<std::string> known;
    for (Site& site : result_.sites) {
      REFITD_ASSIGN_OR_RETURN(const auto status, OperatorClient(site.at).Call(&Rpcs::GetStatus));
      site.daemon_id = status.daemon_id();
      for (const auto& group : status.groups()) {
        if (site.own && !options_.join && group.name() == group_) {
          return Error(absl::StatusCode::kAlreadyExists,
                       "group {} is there already: smoke makes and deletes a group of its own "
                       "(--group)",
                       group_);
        }
        for (const auto& node : group.nodes()) known.insert(node.daemon_id());
      }
    }
    for (const Site& site : result_.sites) known.erase(site.daemon_id);
    known.erase("");
    result_.not_tried.assign(known.begin(), known.end());
    return absl::OkStatus();
  }

  absl::Status AttachEngine(Site& site, const std::string& coordinator) {
    REFITD_ASSIGN_OR_RETURN(
        site.engine,
        SmokeEngine::Attach(ConnectTo(site.at, group_, coordinator), site.daemon_id, weights_));
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<client::Trainer>> AttachTrainer() {
    client::TrainerOptions options;
    options.connect = ConnectTo(result_.sites.front().at, group_, "");
    client::GroupSpec& spec = options.connect.spec.emplace();
    const int own = static_cast<int>(result_.sites.size());
    spec.min_instances = std::max(options_.instances, own);
    spec.slot_bytes = kSmokeSlotBytes;
    spec.slots = kSmokeSlots;
    return client::Trainer::Attach(options);
  }

  absl::Status Update() {
    REFITD_ASSIGN_OR_RETURN(const auto trainer, AttachTrainer());
    REFITD_ASSIGN_OR_RETURN(const auto region, trainer->NewRegion(weights_.region_bytes()));
    weights_.WriteTo(region->data());
    REFITD_RETURN_IF_ERROR(trainer->Register(weights_.LayoutIn(*region)));
    for (Site& site : result_.sites) {
      const absl::Status attached = AttachEngine(site, site.own ? "" : options_.coordinator);
      if (!attached.ok()) return Prefixed(attached, "daemon {}", site.daemon_id);
    }
    const auto deadline = Clock::now() + options_.duration + kEndLimit;
    std::atomic<bool> given_up{false};
    std::vector<std::future<absl::Status>> outcomes;
    for (Site& site : result_.sites) {
      outcomes.push_back(std::async(std::launch::async, [&site, &given_up, deadline] {
        return site.engine->Serve(deadline, given_up);
      }));
    }
    absl::StatusOr<client::CommitResult> commit =
        trainer->Refit({kSmokeVersion, options_.duration, std::nullopt, /*evict_late=*/false});
    given_up = !commit.ok();
    for (size_t i = 0; i < outcomes.size(); ++i) result_.sites[i].outcome = outcomes[i].get();
    REFITD_RETURN_IF_ERROR(commit.status());
    result_.commit = *std::move(commit);
    // An instance of a smoke, also of one with --join, has the name of its daemon.
    for (const client::InstanceOutcome& instance : result_.commit.instances)
      std::erase(result_.not_tried, instance.instance);
    return Judge();
  }

  absl::Status Judge() const {
    for (const Site& site : result_.sites) {
      if (!site.outcome.ok()) return Prefixed(site.outcome, "daemon {}", site.daemon_id);
    }
    for (const client::InstanceOutcome& instance : result_.commit.instances) {
      if (instance.committed) continue;
      return Error(absl::StatusCode::kAborted, "daemon {} was left out: {}", instance.instance,
                   instance.reason);
    }
    return absl::OkStatus();
  }

  const SmokeOptions& options_;
  const std::string group_;
  const OperatorClient client_;
  const SmokeWeights weights_;
  SmokeResult result_;
};

std::string AsJson(const SmokeResult& result, const SmokeOptions& options, int64_t bytes) {
  nlohmann::json daemons = nlohmann::json::array();
  for (const Site& site : result.sites) daemons.push_back(site.daemon_id);
  nlohmann::json instances = nlohmann::json::array();
  for (const auto& instance : result.commit.instances) instances.push_back(instance.instance);
  const nlohmann::json json = {{"group", options.group},
                               {"bytes", bytes},
                               {"seconds", result.commit.seconds},
                               {"compared", std::move(daemons)},
                               {"committed", std::move(instances)},
                               {"not_tried", result.not_tried}};
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

std::string AsText(const SmokeResult& result, const SmokeOptions& options, int64_t bytes) {
  std::vector<std::string> compared;
  for (const Site& site : result.sites) compared.push_back(site.daemon_id);
  std::string text =
      fmt::format("{} reached {}, byte for byte", HumanBytes(bytes), fmt::join(compared, ", "));
  if (options.join) return text + "\n";
  text += fmt::format("; {} of {} instances committed in {}\n", result.commit.instances.size(),
                      result.commit.instances.size(), HumanSeconds(result.commit.seconds));
  if (!result.not_tried.empty()) {
    text += fmt::format(
        "not tried: {}. On each, run: refitctl smoke --join --group NAME --coordinator HOST:PORT; "
        "and here: refitctl smoke --group NAME --instances N\n",
        fmt::join(result.not_tried, ", "));
  }
  return text;
}

std::string OwnGroup() {
  return fmt::format("refitctl-smoke-{}-{:08x}", getpid(), std::random_device()());
}

int RunSmoke(const GlobalOptions& global, SmokeOptions options) {
  if (!global.address.empty()) {
    return UsageError("smoke shares memory with the daemons: it needs --socket, not --address");
  }
  if (!options.daemons.empty() && options.coordinator.empty()) {
    return UsageError(
        "--daemon needs --coordinator: the HOST:PORT by which other daemons reach the one at "
        "--socket");
  }
  if (options.join && (options.group.empty() || options.coordinator.empty())) {
    return UsageError("--join needs --group and --coordinator, as the call that it joins has them");
  }
  if (options.join && !options.daemons.empty()) return UsageError("--join takes no --daemon");
  if (options.group.empty()) options.group = OwnGroup();
  Smoke smoke(global, options);
  const auto result = options.join ? smoke.Join() : smoke.Run();
  if (!result.ok()) return Fail(result.status());
  const int64_t bytes = SmokeWeights(options.group).bytes();
  Print(global.json ? AsJson(*result, options, bytes) : AsText(*result, options, bytes));
  return kExitOk;
}

}  // namespace

Command AddSmoke(CommandApp app, const GlobalOptions& global) {
  CommandApp sub = app.AddCommand(
      "smoke",
      "Send 1 MiB through a group of its own to an engine at each daemon, compare the bytes, and "
      "delete the group",
      kTry);
  auto options = std::make_shared<SmokeOptions>();
  sub.Add("--daemon", &options->daemons, "The unix socket of a further daemon on this host");
  sub.Add("--coordinator", &options->coordinator,
          "HOST:PORT by which other daemons reach the one at --socket; with --join: the one that "
          "makes the group");
  sub.Add("--group", &options->group, "The group to make (default: a name of its own)");
  sub.Add("--instances", &options->instances,
          "Engines that the update waits for, with those of --join (default: those of this call)")
      .InRange(1, 65'536);
  sub.AddFlag("--join", &options->join,
              "Bring one engine, at --socket, to the group of a smoke on another node");
  sub.Add("--duration", &options->duration,
          "How long the update may take; with --join, also how long to wait for the group");
  return {sub, [&global, options] { return RunSmoke(global, *options); }};
}

}  // namespace refitd::refitctl
