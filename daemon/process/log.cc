#include "daemon/process/log.h"

#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <atomic>
#include <memory>
#include <nlohmann/json.hpp>

#include "daemon/process/line_writer.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

// Timestamps are UTC. The message comes escaped; for JSON, with its quotes.
constexpr char kTextPattern[] = "%Y-%m-%dT%H:%M:%S.%eZ %l %v";
constexpr char kJsonPattern[] = R"({"ts":"%Y-%m-%dT%H:%M:%S.%eZ","level":"%l","msg":%v})";

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::err;
}

std::string EscapeText(std::string_view message) {
  std::string escaped;
  escaped.reserve(message.size());
  for (const char c : message) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != 0x7F) {
      escaped += c;
    } else if (c == '\n') {
      escaped += "\\n";
    } else {
      escaped += fmt::format("\\x{:02x}", byte);
    }
  }
  return escaped;
}

std::string EscapeJson(std::string_view message) {
  return nlohmann::json(message).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

struct Logger {
  std::shared_ptr<spdlog::logger> spdlog;
  LogFormat format = LogFormat::kText;
  std::unique_ptr<LineWriter> writer;  // null: whoever logs writes

  void Write(const LineWriter::Line& line) const {
    const std::string escaped =
        format == LogFormat::kJson ? EscapeJson(line.text) : EscapeText(line.text);
    spdlog->log(line.time, spdlog::source_loc{}, ToSpdlog(line.level), escaped);
  }
};

std::shared_ptr<Logger> MakeLogger(spdlog::sink_ptr sink, LogFormat format) {
  auto logger = std::make_shared<Logger>();
  logger->format = format;
  logger->spdlog = std::make_shared<spdlog::logger>("refitd", std::move(sink));
  logger->spdlog->set_formatter(std::make_unique<spdlog::pattern_formatter>(
      format == LogFormat::kJson ? kJsonPattern : kTextPattern, spdlog::pattern_time_type::utc));
  logger->spdlog->set_level(spdlog::level::trace);  // LogEnabled has decided already
  logger->spdlog->flush_on(spdlog::level::trace);
  return logger;
}

std::string DroppedText(int64_t dropped) {
  return fmt::format("{} lines were dropped: the log took no more", dropped);
}

// The same, whose lines a thread writes.
std::shared_ptr<Logger> MakeQueuedLogger(spdlog::sink_ptr sink, LogFormat format) {
  const std::shared_ptr<const Logger> direct = MakeLogger(std::move(sink), format);
  auto logger = std::make_shared<Logger>();
  logger->writer = std::make_unique<LineWriter>(
      [direct](const LineWriter::Line& line) { direct->Write(line); }, DroppedText);
  return logger;
}

// Refuses what can't be opened at once; the file is opened again by its sink.
absl::StatusOr<spdlog::sink_ptr> FileSink(const std::string& path) {
  constexpr mode_t kMode = 0666;  // the umask decides
  const absl::StatusOr<UniqueFd> file = OpenForLines(path, kMode);
  if (!file.ok()) {
    return Error(absl::StatusCode::kUnavailable, "log.file {}", Message(file.status()));
  }
  try {
    return std::make_shared<spdlog::sinks::basic_file_sink_mt>(path);
  } catch (const spdlog::spdlog_ex& error) {
    return Error(absl::StatusCode::kUnavailable, "log.file \"{}\": {}", path, error.what());
  }
}

std::atomic<LogLevel> threshold{LogLevel::kInfo};

// The current logger; never destroyed, so that threads may log while the process ends.
class Current {
 public:
  std::shared_ptr<Logger> Get() {
    MutexLock lock(&mutex_);
    return logger_;
  }
  void Set(std::shared_ptr<Logger> logger) {
    MutexLock lock(&mutex_);
    logger_.swap(logger);
  }

 private:
  Mutex mutex_;
  std::shared_ptr<Logger> logger_ ABSL_GUARDED_BY(mutex_) =
      MakeLogger(std::make_shared<spdlog::sinks::stderr_sink_mt>(), LogFormat::kText);
};

Current& TheLogger() {
  static auto* const current = new Current;
  return *current;
}

}  // namespace

absl::Status SetLogging(const LogConfig& config) {
  spdlog::sink_ptr sink;
  if (config.file.empty()) {
    sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  } else {
    REFITD_ASSIGN_OR_RETURN(sink, FileSink(config.file));
  }
  TheLogger().Set(MakeQueuedLogger(std::move(sink), config.format));
  threshold = config.level;
  return absl::OkStatus();
}

bool FlushLog(std::chrono::milliseconds limit) {
  const std::shared_ptr<Logger> logger = TheLogger().Get();
  return logger->writer == nullptr || logger->writer->Flush(limit);
}

bool LogEnabled(LogLevel level) { return level >= threshold.load(std::memory_order_relaxed); }

void LogMessage(LogLevel level, std::string_view message) {
  const std::shared_ptr<Logger> logger = TheLogger().Get();
  if (logger->writer != nullptr) return logger->writer->Add(level, std::string(message));
  logger->Write({level, std::chrono::system_clock::now(), std::string(message)});
}

}  // namespace refitd
