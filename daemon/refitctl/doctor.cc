// doctor: what this machine and the daemon can do, in words with advice, and a refit of 1 MiB
// through the daemon.
//
// The words "ok", "note" and "broken", the findings' names, and the JSON are those of `python -m
// refitd.doctor`, which also knows of Python's packages.
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/un.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <thread>

#include "client/engine.h"
#include "client/trainer.h"
#include "daemon/process/version.h"
#include "daemon/refitctl/command.h"
#include "daemon/refitctl/devices.h"
#include "transport/base/status.h"

namespace refitd::refitctl {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int64_t kMib = 1 << 20;
constexpr int64_t kRefitBytes = kMib;
constexpr int64_t kLeastShmBytes = 1024 * kMib;  // what NCCL and data loaders want of /dev/shm
constexpr rlim_t kLeastOpenFiles = 4096;         // a region takes a descriptor
constexpr int kRefits = 2;                       // the first compiles, the second replays

// kOk: as it should be. kNote: refitd works, but not everything does. kBroken: refitd does not.
enum class State { kOk, kNote, kBroken };

struct Finding {
  std::string what;
  State state = State::kOk;
  std::string text;
  std::string advice;  // what to do about it; empty: nothing
  nlohmann::ordered_json figures = nlohmann::ordered_json::object();
};

const char* Word(State state) {
  switch (state) {
    case State::kOk:
      return "ok";
    case State::kNote:
      return "note";
    case State::kBroken:
      return "broken";
  }
  return "";
}

// ---- the machine ----

Finding LookAtMachine() {
  utsname name{};
  ::uname(&name);
  const std::string text = fmt::format("{} {} {}, {} processors", name.sysname, name.release,
                                       name.machine, std::thread::hardware_concurrency());
  return {"machine", State::kOk, text, "", {{"kernel", name.release}}};
}

Finding LookAtProgram() {
  return {"refitctl", State::kOk, std::string(kVersion), "", {{"version", kVersion}}};
}

Finding LookAtDriver() {
  const DriverFinding driver = FindDriver();
  return {driver.what, driver.found ? State::kOk : State::kNote, driver.text, "", {}};
}

Finding LookAtLimits() {
  rlimit locked{}, files{};
  ::getrlimit(RLIMIT_MEMLOCK, &locked);
  ::getrlimit(RLIMIT_NOFILE, &files);
  const bool unlimited = locked.rlim_cur == RLIM_INFINITY;
  Finding found{"limits", State::kOk, "", "", {{"open_files", files.rlim_cur}}};
  found.figures["memlock_bytes"] =
      unlimited ? nlohmann::ordered_json() : nlohmann::ordered_json(locked.rlim_cur);
  found.text = fmt::format("locked memory {}, {} open files",
                           unlimited ? "unlimited" : fmt::format("{} MiB", locked.rlim_cur / kMib),
                           files.rlim_cur);
  if (!unlimited && ::access("/dev/nvidiactl", F_OK) == 0) {
    found.advice = "ulimit -l unlimited (LimitMEMLOCK=infinity) for the daemon, which pins memory";
  } else if (files.rlim_cur < kLeastOpenFiles) {
    found.advice = "ulimit -n 65536: each region takes a descriptor";
  }
  if (!found.advice.empty()) found.state = State::kNote;
  return found;
}

Finding LookAtSharedMemory() {
  struct statvfs there {};
  if (::statvfs("/dev/shm", &there) != 0) {
    return {"shared memory", State::kOk, "there is no /dev/shm", "", {}};
  }
  const int64_t bytes = static_cast<int64_t>(there.f_blocks) * static_cast<int64_t>(there.f_frsize);
  Finding found{"shared memory",
                State::kOk,
                fmt::format("/dev/shm has {} MiB", bytes / kMib),
                "",
                {{"shm_bytes", bytes}}};
  if (bytes < kLeastShmBytes) {
    found.state = State::kNote;
    found.advice =
        "refitd does not use /dev/shm, but NCCL and data loaders do: --shm-size=8g or an emptyDir "
        "of medium Memory";
  }
  return found;
}

// ---- the daemon ----

Finding LookAtSocket(const std::string& path) {
  const std::string start = "start one: refitd --listen-unix PATH, and set REFITD_SOCKET=PATH";
  Finding found{"socket", State::kBroken, "", start, {{"path", path}}};
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    found.text = fmt::format("{} is longer than the path of a socket may be", path);
    return found;
  }
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    found.text = fmt::format("{}: {}", path, std::strerror(errno));
    return found;
  }
  if (!S_ISSOCK(status.st_mode)) {
    found.text = path + ": no socket";
    return found;
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const UniqueFd probe(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 &&
      errno != EAGAIN) {
    const bool forbidden = errno == EACCES || errno == EPERM;
    found.text =
        fmt::format("{} with mode {:o}: {}", path, status.st_mode & 0777U, std::strerror(errno));
    if (forbidden) {
      found.advice = fmt::format(
          "uid {} may not open it: --listen-unix-mode, and the groups of this user", ::getuid());
    }
    return found;
  }
  return {"socket", State::kOk, path + " takes connections", "", {{"path", path}}};
}

Finding LookAtDaemon(const GlobalOptions& global) {
  const auto status = OperatorClient(global).GetStatus();
  if (!status.ok()) {
    return {"daemon",
            State::kNote,
            "does not tell its status: " + Message(status.status()),
            "an access rule may forbid it: docs/security.md",
            {}};
  }
  Finding found{"daemon", State::kOk, "", "", {{"version", status->daemon_version()}}};
  found.text = fmt::format("refitd {}, {} groups", status->daemon_version(), status->groups_size());
  for (const v1::TransportStatus& transport : status->transports()) {
    found.text += fmt::format("; {} {} ({})", transport.name(),
                              transport.available() ? "served" : "not served", transport.detail());
    found.figures["transports"][transport.name()] = transport.available();
    const std::optional<Collectives> collectives = CollectivesOf(transport);
    if (!collectives.has_value()) continue;
    found.figures[collectives->name] = collectives->version;
    found.text += "; " + collectives->text;
  }
  if (!status->serving()) {
    found.state = State::kBroken;
    found.advice = "it drains: wait for its successor";
  } else if (status->daemon_version() != kVersion) {
    found.state = State::kNote;
    found.advice = fmt::format("refitctl is {}: give both the same version", kVersion);
  }
  return found;
}

// ---- a refit ----

Layout LayoutIn(const client::Region& region) {
  Layout layout;
  layout.tensors = {{"doctor", DType::kUint8, {kRefitBytes}}};
  Piece piece;
  piece.box = {{0}, {kRefitBytes}};
  piece.region = region.id();
  piece.strides = {1};
  layout.pieces = {std::move(piece)};
  return layout;
}

// Answers Prepare until `refits` versions were committed to the engine, or a wait fails.
absl::Status Serve(client::Engine& engine, milliseconds timeout, int refits) {
  for (int committed = 0; committed < refits;) {
    REFITD_ASSIGN_OR_RETURN(const client::Event event, engine.Next(timeout));
    if (const auto* prepare = std::get_if<client::Prepare>(&event)) {
      REFITD_RETURN_IF_ERROR(engine.Ready(prepare->version));
    } else if (std::holds_alternative<client::Committed>(event)) {
      ++committed;
    } else {
      return Error(absl::StatusCode::kAborted, "the engine was told of no commit");
    }
  }
  return absl::OkStatus();
}

// Moves 1 MiB from a trainer to an engine, both of this process, and compares; returns the seconds
// of each refit. Every wait has `timeout` (P4).
absl::StatusOr<std::vector<double>> RefitTwice(const GlobalOptions& global) {
  std::random_device random;
  client::TrainerOptions trainer_options;
  client::ConnectOptions& connect = trainer_options.connect;
  connect = ConnectOf(global);
  connect.group = fmt::format("refitd-doctor-{}-{:08x}", ::getpid(), random());
  connect.client = "refitctl doctor";
  client::EngineOptions engine_options;
  engine_options.connect = connect;
  engine_options.instance = "doctor";
  connect.spec.emplace().min_instances = 1;
  REFITD_ASSIGN_OR_RETURN(const auto trainer, client::Trainer::Attach(trainer_options));
  REFITD_ASSIGN_OR_RETURN(const auto engine, client::Engine::Attach(engine_options));
  REFITD_ASSIGN_OR_RETURN(const auto source, trainer->NewRegion(kRefitBytes));
  REFITD_ASSIGN_OR_RETURN(const auto target, engine->NewRegion(kRefitBytes));
  REFITD_RETURN_IF_ERROR(trainer->Register(LayoutIn(*source)));
  REFITD_RETURN_IF_ERROR(engine->Register(LayoutIn(*target)));
  std::vector<double> seconds;
  for (int i = 1; i <= kRefits; ++i) {
    for (int64_t at = 0; at < kRefitBytes; at += sizeof(uint32_t)) {
      const uint32_t word = static_cast<uint32_t>(at) * 2654435761U + static_cast<uint32_t>(i);
      std::memcpy(source->data() + at, &word, sizeof(word));
    }
    absl::Status served;
    std::thread serving([&] { served = Serve(*engine, global.timeout(), 1); });
    const auto begun = Clock::now();
    const auto result = trainer->Refit({.version = Version(i), .duration = global.timeout()});
    seconds.push_back(std::chrono::duration<double>(Clock::now() - begun).count());
    serving.join();
    REFITD_RETURN_IF_ERROR(result.status());
    REFITD_RETURN_IF_ERROR(served);
    if (std::memcmp(source->data(), target->data(), kRefitBytes) != 0) {
      return Error(absl::StatusCode::kDataLoss,
                   "the engine's memory holds other bytes than the trainer's");
    }
  }
  return seconds;
}

Finding LookAtRefit(const GlobalOptions& global) {
  const auto seconds = RefitTwice(global);
  if (!seconds.ok()) {
    const bool forbidden = seconds.status().code() == absl::StatusCode::kPermissionDenied ||
                           seconds.status().code() == absl::StatusCode::kUnauthenticated;
    return {"refit",
            State::kBroken,
            Message(seconds.status()),
            forbidden ? "the daemon's access rules refuse this user: docs/security.md"
                      : "send this report and the daemon's log",
            {}};
  }
  return {"refit",
          State::kOk,
          fmt::format("1 MiB arrived, verified, in {:.1f} ms; the second time in {:.1f} ms",
                      seconds->front() * 1e3, seconds->back() * 1e3),
          "",
          {{"bytes", kRefitBytes},
           {"first_seconds", seconds->front()},
           {"second_seconds", seconds->back()}}};
}

// ---- the report ----

std::vector<Finding> Examine(const GlobalOptions& global) {
  std::vector<Finding> findings = {LookAtMachine(), LookAtProgram(), LookAtDriver(), LookAtLimits(),
                                   LookAtSharedMemory()};
  if (!global.address.empty()) {
    // Memory is shared through the unix socket alone, so there is no refit over TCP to try.
    findings.push_back(LookAtDaemon(global));
    return findings;
  }
  findings.push_back(
      LookAtSocket(global.socket.empty() ? std::string(client::kDefaultSocket) : global.socket));
  if (findings.back().state != State::kOk) return findings;
  findings.push_back(LookAtDaemon(global));
  findings.push_back(LookAtRefit(global));
  return findings;
}

ExitCode ExitCodeOf(const std::vector<Finding>& findings) {
  for (const Finding& finding : findings) {
    if (finding.state != State::kBroken) continue;
    return finding.what == "socket" ? kExitUnreachable : kExitFailed;
  }
  return kExitOk;
}

std::string AsJson(const std::vector<Finding>& findings, bool ok) {
  nlohmann::ordered_json out{{"ok", ok}, {"findings", nlohmann::json::array()}};
  for (const Finding& f : findings) {
    out["findings"].push_back({{"what", f.what},
                               {"state", Word(f.state)},
                               {"text", f.text},
                               {"advice", f.advice},
                               {"figures", f.figures}});
  }
  return out.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

std::string AsText(const std::vector<Finding>& findings) {
  std::string out;
  for (const Finding& f : findings) {
    out += fmt::format("{:7}{:15}{}\n", Word(f.state), f.what, f.text);
    if (!f.advice.empty()) out += fmt::format("{:22}-> {}\n", "", f.advice);
  }
  return out;
}

}  // namespace

Command AddDoctor(CommandApp app, const GlobalOptions& global) {
  CommandApp sub = app.AddCommand(
      "doctor", "What this machine and the daemon can do, and a refit of 1 MiB through it");
  auto json = std::make_shared<bool>(false);
  sub.AddFlag("--json", json.get(), "Print JSON, as --output json does");
  return {sub, [&global, json] {
            const std::vector<Finding> findings = Examine(global);
            const ExitCode code = ExitCodeOf(findings);
            Print(*json || global.json ? AsJson(findings, code == kExitOk) : AsText(findings));
            return static_cast<int>(code);
          }};
}

}  // namespace refitd::refitctl
