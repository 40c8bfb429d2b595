#include "daemon/process/audit_log.h"

#include <fmt/chrono.h>
#include <sys/uio.h>
#include <unistd.h>

#define SD_JOURNAL_SUPPRESS_LOCATION
#include <systemd/sd-journal.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "daemon/process/log.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"
#include "transport/base/unique_fd.h"

namespace refitd {
namespace {

// Other users of the machine need not know who was refused.
constexpr mode_t kFileMode = 0640;

absl::StatusOr<UniqueFd> OpenFile(const std::string& path) {
  absl::StatusOr<UniqueFd> file = OpenForLines(path, kFileMode);
  if (file.ok()) return file;
  return Error(file.status().code(), "audit.file {}", Message(file.status()));
}

std::string TimeText() {
  const auto now = std::chrono::floor<std::chrono::milliseconds>(std::chrono::system_clock::now());
  const auto seconds = std::chrono::floor<std::chrono::seconds>(now);
  return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z",
                     fmt::gmtime(std::chrono::system_clock::to_time_t(seconds)),
                     (now - seconds).count());
}

std::string ToLine(const nlohmann::ordered_json& fields) {
  return fields.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string ToLine(const AuditEvent& event, int64_t left_out) {
  nlohmann::ordered_json fields;
  fields["time"] = TimeText();
  fields["what"] = AuditName(event.what);
  const auto add = [&fields](const char* name, const std::string& value) {
    if (!value.empty()) fields[name] = value;
  };
  add("identity", event.identity);
  if (event.pid != 0) fields["pid"] = event.pid;
  add("rpc", event.rpc);
  add("group", event.group);
  add("subject", event.subject);
  if (event.version.has_value()) fields["version"] = *event.version;
  add("outcome", event.outcome);
  add("reason", event.reason);
  add("request_id", event.request_id);
  if (left_out > 0) fields["refusals_left_out"] = left_out;
  return ToLine(fields);
}

std::string DroppedLine(int64_t dropped) {
  nlohmann::ordered_json fields;
  fields["time"] = TimeText();
  fields["what"] = "dropped";
  fields["lines"] = dropped;
  return ToLine(fields);
}

}  // namespace

struct AuditLog::Sink {
  AuditConfig config;
  bool failing = false;  // used by the thread that writes
  Mutex mutex;
  // Writing happens without the mutex, so that Reopen does not wait for it.
  std::shared_ptr<const UniqueFd> file ABSL_GUARDED_BY(mutex);

  void Use(UniqueFd opened) {
    auto next = std::make_shared<const UniqueFd>(std::move(opened));
    MutexLock lock(&mutex);
    file.swap(next);
  }
  std::shared_ptr<const UniqueFd> File() {
    MutexLock lock(&mutex);
    return file;
  }

  void Put(std::string line) {
    if (config.journal) PutJournal(line);
    if (config.file.empty()) return;
    line += '\n';
    // One write for a line: with O_APPEND it stays in one piece.
    const ssize_t n = write(File()->get(), line.data(), line.size());
    const bool written = n == static_cast<ssize_t>(line.size());
    if (!written && !std::exchange(failing, true)) {
      LogError("audit: a line is lost: {}",
               Message(ErrnoError(n < 0 ? errno : ENOSPC, config.file)));
    }
    if (written) failing = false;
  }

  static void PutJournal(const std::string& line) {
    const std::string message = "MESSAGE=" + line;
    const std::string_view identifier = "SYSLOG_IDENTIFIER=refitd-audit";
    const std::string_view priority = "PRIORITY=5";
    const auto part = [](std::string_view text) {
      return iovec{const_cast<char*>(text.data()), text.size()};
    };
    const std::array<iovec, 3> fields = {part(message), part(identifier), part(priority)};
    if (const int error = sd_journal_sendv(fields.data(), fields.size()); error < 0) {
      LogError("audit: the journal does not take a line: {}",
               Message(ErrnoError(-error, "sd_journal_sendv")));
    }
  }
};

AuditLog::AuditLog(std::shared_ptr<Sink> sink)
    : sink_(std::move(sink)),
      writer_([sink = sink_](const LineWriter::Line& line) { sink->Put(line.text); }, DroppedLine) {
}

absl::StatusOr<std::unique_ptr<AuditLog>> AuditLog::Create(const AuditConfig& config) {
  REFITD_CHECK(!config.empty());
  auto sink = std::make_shared<Sink>();
  sink->config = config;
  if (!config.file.empty()) {
    REFITD_ASSIGN_OR_RETURN(UniqueFd file, OpenFile(config.file));
    sink->Use(std::move(file));
  }
  return std::unique_ptr<AuditLog>(new AuditLog(std::move(sink)));
}

void AuditLog::Record(const AuditEvent& event) {
  std::optional<int64_t> left_out = 0;
  if (event.what == AuditWhat::kRefusal) {
    left_out = refusals_.Admit(event.identity, std::chrono::steady_clock::now());
    if (!left_out.has_value()) return;
  }
  writer_.Add(LogLevel::kInfo, ToLine(event, *left_out));
}

absl::Status AuditLog::Reopen() {
  if (sink_->config.file.empty()) return absl::OkStatus();
  REFITD_ASSIGN_OR_RETURN(UniqueFd file, OpenFile(sink_->config.file));
  sink_->Use(std::move(file));
  return absl::OkStatus();
}

}  // namespace refitd
