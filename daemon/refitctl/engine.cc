// engine: a reference engine rank. It holds its part of a checkpoint's tensors, takes every update,
// and compares its own memory with the checkpoint's files after each commit.
#include "client/engine.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <memory>
#include <nlohmann/json.hpp>

#include "daemon/refitctl/command.h"
#include "daemon/refitctl/format.h"
#include "daemon/refitctl/holder.h"
#include "daemon/refitctl/safetensors.h"
#include "proto/delivery.h"
#include "transport/base/status.h"
#include "transport/base/unique_fd.h"

namespace refitd::refitctl {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

constexpr std::chrono::milliseconds kSignalPoll{100};  // how soon SIGTERM is seen
constexpr char kVersionWord[] = "{version}";

volatile std::sig_atomic_t stop_requested = 0;
void RequestStop(int) { stop_requested = 1; }

struct EngineCommandOptions {
  std::string group;
  std::string checkpoint;  // may hold {version}
  // Folder of the checkpoint whose names and shapes the engine registers; empty: version 1 of
  // `checkpoint`.
  std::string table;
  std::string instance;
  int rank = 0;
  int world_size = 1;
  std::string delivery = std::string(kDeliveries.front().name);
  int slice = -1;  // -1: whole tensors
  bool verify = true;
  int64_t versions = 0;  // 0: until SIGTERM
  std::string status_file;
  int64_t stall_in = -1;  // the version at which the rank stalls; -1: never
  std::string coordinator;
  std::chrono::milliseconds reattach{0};  // 0: the engine ends with its lease
};

std::string FolderOf(const std::string& pattern, Version version) {
  const size_t at = pattern.find(kVersionWord);
  if (at == std::string::npos) return pattern;
  std::string folder = pattern;
  return folder.replace(at, sizeof(kVersionWord) - 1, fmt::format("{}", version));
}

// Events, one line each: JSON or words on stdout, and JSON appended to the status file.
class EventLog {
 public:
  static absl::StatusOr<EventLog> Open(const std::string& status_file, bool json_lines,
                                       std::string who) {
    EventLog log;
    log.json_lines_ = json_lines;
    log.who_ = std::move(who);
    if (status_file.empty()) return log;
    log.file_.Reset(::open(status_file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
    if (!log.file_.valid()) {
      return Error(absl::StatusCode::kFailedPrecondition, "{}",
                   Message(ErrnoError(errno, status_file)));
    }
    return log;
  }
  void Write(const std::string& event, json fields) {
    std::string words;
    for (const auto& [key, value] : fields.items()) {
      words +=
          fmt::format("  {}={}", key, value.is_string() ? value.get<std::string>() : value.dump());
    }
    fields["event"] = event;
    const std::string line = fields.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
    Print(json_lines_ ? line : fmt::format("{}: {}{}\n", who_, event, words));
    // One write for each line, so that readers never see half a line.
    if (file_.valid() && ::write(file_.get(), line.data(), line.size()) < 0) file_.Reset();
  }

 private:
  EventLog() = default;
  UniqueFd file_;
  bool json_lines_ = false;
  std::string who_;
};

// Private memory for delivery through slots, in place of an engine's own tensors.
class OwnMemory {
 public:
  static absl::StatusOr<std::unique_ptr<OwnMemory>> Make(int64_t bytes) {
    const auto size = static_cast<size_t>(std::max<int64_t>(bytes, 1));
    void* data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return ErrnoError(errno, fmt::format("{} bytes of memory", size));
    return std::unique_ptr<OwnMemory>(new OwnMemory(static_cast<char*>(data), size));
  }
  ~OwnMemory() { ::munmap(data_, size_); }
  OwnMemory(const OwnMemory&) = delete;
  OwnMemory& operator=(const OwnMemory&) = delete;
  char* data() const { return data_; }

 private:
  OwnMemory(char* data, size_t size) : data_(data), size_(size) {}
  char* const data_;
  const size_t size_;
};

// One attached rank and its answers to events. Used by one thread.
class ReferenceEngine {
 public:
  ReferenceEngine(const EngineCommandOptions& options, Holder holder, EventLog log)
      : options_(options), holder_(std::move(holder)), log_(std::move(log)) {}

  absl::Status Attach(const GlobalOptions& global) {
    client::EngineOptions attach;
    attach.connect = ConnectOf(global);
    attach.connect.group = options_.group;
    attach.connect.client = "refitctl engine";
    attach.connect.coordinator = options_.coordinator;
    attach.connect.reattach = options_.reattach;
    attach.instance = options_.instance;
    attach.rank = options_.rank;
    attach.world_size = options_.world_size;
    attach.delivery = DeliveryOf(options_.delivery).value();  // the flag's check has the same names
    if (DeclaresManifest(attach.delivery)) attach.manifest = holder_.tensors();
    REFITD_ASSIGN_OR_RETURN(engine_, client::Engine::Attach(attach));
    REFITD_RETURN_IF_ERROR(NeedsLayout(attach.delivery) ? RegisterMemory() : MakeOwnMemory());
    log_.Write("attached", {{"tensors", holder_.tensors().size()},
                            {"bytes", holder_.holding().tensor_bytes},
                            {"pid", ::getpid()}});
    return absl::OkStatus();
  }

  // Serves until SIGTERM, the last wanted version, or an error.
  absl::Status Serve() {
    while (stop_requested == 0 && (options_.versions == 0 || commits_ < options_.versions)) {
      auto event = engine_->Next(kSignalPoll);
      if (!event.ok()) {
        log_.Write("lost",
                   {{"reason", Message(event.status())}, {"weights", NameOf(engine_->weights())}});
        return event.status();
      }
      REFITD_RETURN_IF_ERROR(std::visit([this](const auto& e) { return Handle(e); }, *event));
    }
    log_.Write("stopped", {{"commits", commits_}});
    return absl::OkStatus();
  }

 private:
  absl::Status RegisterMemory() {
    REFITD_ASSIGN_OR_RETURN(
        region_, engine_->NewRegion(std::max(holder_.holding().memory_bytes, kPackAlignment)));
    holder_.SetMemory(region_->data());
    return engine_->Register(LayoutOf(holder_.tensors(), holder_.holding(), region_->id()));
  }
  absl::Status MakeOwnMemory() {
    REFITD_ASSIGN_OR_RETURN(own_, OwnMemory::Make(holder_.holding().memory_bytes));
    holder_.SetMemory(own_->data());
    return absl::OkStatus();
  }

  static std::string NameOf(client::Weights weights) {
    switch (weights) {
      case client::Weights::kClean:
        return "clean";
      case client::Weights::kPaused:
        return "paused";
      case client::Weights::kDirty:
        return "dirty";
      case client::Weights::kUnknown:
        return "unknown";
    }
    return "unknown";
  }

  // Does nothing: no event came, or the event asks nothing of a reference engine.
  template <typename Event>
  absl::Status Handle(const Event&) {
    return absl::OkStatus();
  }
  absl::Status Handle(const client::Draining&) {
    log_.Write("draining", json::object());
    return absl::OkStatus();
  }
  absl::Status Handle(const client::Lost& lost) {
    joiner_.Reset();
    log_.Write("lost",
               {{"reason", lost.reason}, {"weights", NameOf(lost.weights)}, {"reattaching", true}});
    return absl::OkStatus();
  }
  absl::Status Handle(const client::Reattached& again) {
    json fields = {{"weights", NameOf(again.weights)}};
    if (again.held_version) fields["held_version"] = again.held_version->value();
    log_.Write("reattached", std::move(fields));
    return absl::OkStatus();
  }
  absl::Status Handle(const client::Prepare& prepare) {
    log_.Write("prepare", {{"version", prepare.version.value()}});
    return engine_->Ready(prepare.version);
  }
  absl::Status Handle(const client::Part& part) {
    if (options_.stall_in == part.version.value()) {
      log_.Write("stalled", {{"version", part.version.value()}, {"part", part.part.value()}});
      std::raise(SIGSTOP);
    }
    const absl::Status stored = StorePart(part);
    if (!stored.ok()) {
      log_.Write("failed", {{"version", part.version.value()}, {"reason", Message(stored)}});
      REFITD_RETURN_IF_ERROR(engine_->Fail(part.version, Message(stored)));
    }
    return engine_->Ack(part);
  }
  absl::Status StorePart(const client::Part& part) {
    REFITD_ASSIGN_OR_RETURN(const auto whole, joiner_.Add(part));
    for (const client::TensorView& view : whole) {
      REFITD_RETURN_IF_ERROR(holder_.Store(view.tensor, view.start, view.count, view.data));
    }
    return absl::OkStatus();
  }
  absl::Status Handle(const client::Committed& committed) {
    ++commits_;
    joiner_.Reset();
    log_.Write("committed", {{"version", committed.version.value()}});
    if (!options_.verify) return absl::OkStatus();
    return Verify(committed.version);
  }
  absl::Status Handle(const client::Aborted& aborted) {
    joiner_.Reset();
    log_.Write("aborted", {{"version", aborted.version.value()},
                           {"dirty", aborted.dirty},
                           {"reason", aborted.reason}});
    return absl::OkStatus();
  }

  absl::Status Verify(Version version) {
    const auto start = Clock::now();
    REFITD_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                            Checkpoint::Open(FolderOf(options_.checkpoint, version)));
    const absl::Status verified = holder_.Verify(checkpoint);
    if (!verified.ok()) {
      log_.Write("mismatch", {{"version", version.value()}, {"reason", Message(verified)}});
      return verified;
    }
    log_.Write("verified",
               {{"version", version.value()},
                {"tensors", holder_.tensors().size()},
                {"bytes", holder_.holding().tensor_bytes},
                {"seconds", std::chrono::duration<double>(Clock::now() - start).count()}});
    return absl::OkStatus();
  }

  const EngineCommandOptions& options_;
  Holder holder_;
  EventLog log_;
  std::unique_ptr<OwnMemory> own_;
  std::unique_ptr<client::Engine> engine_;
  std::shared_ptr<client::Region> region_;
  client::PartJoiner joiner_;
  int64_t commits_ = 0;
};

absl::Status Serve(const GlobalOptions& global, const EngineCommandOptions& options) {
  REFITD_ASSIGN_OR_RETURN(
      const Checkpoint table,
      Checkpoint::Open(options.table.empty() ? FolderOf(options.checkpoint, Version(1))
                                             : options.table));
  REFITD_ASSIGN_OR_RETURN(
      EventLog log, EventLog::Open(options.status_file, global.json,
                                   fmt::format("{} rank {}", options.instance, options.rank)));
  Holder holder(table.tensors(),
                options.slice < 0 ? std::nullopt : std::optional<int>(options.slice), options.rank,
                options.world_size);
  ReferenceEngine engine(options, std::move(holder), std::move(log));
  REFITD_RETURN_IF_ERROR(engine.Attach(global));
  return engine.Serve();
}

int RunEngine(const GlobalOptions& global, const EngineCommandOptions& options) {
  if (!global.address.empty()) {
    return UsageError("engine shares memory with the daemon: it needs --socket, not --address");
  }
  if (options.rank >= options.world_size) {
    return UsageError(
        fmt::format("--rank {} is not below --world-size {}", options.rank, options.world_size));
  }
  struct sigaction action {};
  action.sa_handler = RequestStop;
  ::sigaction(SIGTERM, &action, nullptr);
  ::sigaction(SIGINT, &action, nullptr);
  const absl::Status status = Serve(global, options);
  return status.ok() ? static_cast<int>(kExitOk) : Fail(status);
}

}  // namespace

Command AddEngine(CommandApp app, const GlobalOptions& global) {
  CommandApp sub = app.AddCommand(
      "engine",
      "A reference engine rank: holds a checkpoint's tensors, takes updates, verifies them", kTry);
  auto options = std::make_shared<EngineCommandOptions>();
  sub.Add("--group", &options->group, "The group").Required();
  sub.Add("--checkpoint", &options->checkpoint,
          "Folder to compare with after a commit; {version} stands for its number")
      .Required();
  sub.Add("--table", &options->table,
          "Folder whose tensors are held (default: --checkpoint with version 1)");
  sub.Add("--instance", &options->instance, "Name of the instance").Required();
  sub.Add("--rank", &options->rank, "This rank of the instance (default 0)").InRange(0, 65'535);
  sub.Add("--world-size", &options->world_size, "Ranks of the instance").InRange(1, 65'536);
  std::string deliveries;
  std::vector<std::string> names;
  for (const DeliveryTraits& traits : kDeliveries) {
    const bool first = names.empty();
    deliveries += fmt::format("{}{} ({})", first ? "" : " or ", traits.name, traits.how);
    names.emplace_back(traits.name);
  }
  sub.Add("--delivery", &options->delivery, deliveries).OneOf(names);
  sub.Add("--slice", &options->slice,
          "Hold the rank's torch.chunk part of this dimension; 1-D tensors whole")
      .InRange(0, kMaxDims - 1);
  sub.AddFlag("--verify,!--no-verify", &options->verify,
              "Compare memory with the checkpoint after each commit (default)");
  sub.Add("--versions", &options->versions, "Exit after so many commits")
      .InRange(int64_t{1}, INT64_MAX);
  sub.Add("--stall-in", &options->stall_in,
          "Fault drill, loader delivery: stop (SIGSTOP) with a part of this version in hand, "
          "so that the process can be killed in mid-update or continued late")
      .InRange(int64_t{0}, INT64_MAX);
  sub.Add("--coordinator", &options->coordinator,
          "HOST:PORT of the daemon that holds the group (default: the one at --socket)");
  sub.Add("--reattach", &options->reattach,
          "When the daemon goes away, try for so long to attach again (default 0s: end)",
          {.lowest = std::chrono::milliseconds(0)});
  sub.Add("--status-file", &options->status_file, "Append each event as a line of JSON");
  return {sub, [&global, options] { return RunEngine(global, *options); }};
}

}  // namespace refitd::refitctl
