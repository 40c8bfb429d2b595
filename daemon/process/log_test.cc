#include "daemon/process/log.h"

#include <stdlib.h>

#include <catch2/catch.hpp>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "daemon/process/log_queue.h"
#include "daemon/test_util.h"

namespace refitd {
namespace {

std::vector<std::string> Lines(const std::string& path) {
  std::vector<std::string> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

// Restores the default logging.
struct Fixture {
  ~Fixture() { REFITD_CHECK(SetLogging({}).ok()); }
  TempFolder folder;
  std::string path = folder / "log";
};

constexpr char kHostile[] = "a\"b\\c\nd\x01\te\xff \xc3\xa9";

TEST_CASE_METHOD(Fixture, "JSON lines parse whatever the message holds") {
  REQUIRE(SetLogging({.format = LogFormat::kJson, .level = LogLevel::kInfo, .file = path}).ok());
  LogWarning("{}", kHostile);
  LogError("second {}", 2);
  const auto lines = Lines(path);
  REQUIRE(lines.size() == 2);
  const auto first = nlohmann::json::parse(lines[0]);
  CHECK(first["level"] == "warning");
  CHECK(first["msg"] == "a\"b\\c\nd\x01\te\xef\xbf\xbd \xc3\xa9");
  CHECK(first["ts"].get<std::string>().size() == std::string("2024-01-01T00:00:00.000Z").size());
  const auto second = nlohmann::json::parse(lines[1]);
  CHECK(second["level"] == "error");
  CHECK(second["msg"] == "second 2");
}

TEST_CASE_METHOD(Fixture, "Queued lines are written by Write, each once, in the order of Add") {
  REQUIRE(SetLogging({.format = LogFormat::kJson, .level = LogLevel::kInfo, .file = path}).ok());
  {
    LogQueue queue;
    queue.Add(LogLevel::kInfo, "one");
    queue.Add(LogLevel::kWarning, "two");
    CHECK(Lines(path).empty());
    queue.Write();
    queue.Write();
    CHECK(Lines(path).size() == 2);
    queue.Add(LogLevel::kInfo, "three");
  }
  std::vector<std::string> messages;
  for (const std::string& line : Lines(path)) {
    messages.push_back(nlohmann::json::parse(line)["msg"].get<std::string>());
  }
  CHECK(messages == std::vector<std::string>{"one", "two", "three"});
}

TEST_CASE_METHOD(Fixture, "Lines that nobody writes are dropped from a limit on, and counted") {
  REQUIRE(SetLogging({.format = LogFormat::kJson, .level = LogLevel::kInfo, .file = path}).ok());
  LogQueue queue;
  for (size_t i = 0; i < LogQueue::kMaxLines + 7; ++i) queue.Add(LogLevel::kInfo, "line");
  queue.Write();
  queue.Add(LogLevel::kInfo, "after");
  queue.Write();
  const auto lines = Lines(path);
  REQUIRE(lines.size() == LogQueue::kMaxLines + 2);
  CHECK_THAT(lines[LogQueue::kMaxLines], Catch::Contains("7 lines were dropped"));
  CHECK_THAT(lines.back(), Catch::Contains("after"));
}

TEST_CASE_METHOD(Fixture, "Lines keep the order of Add where several threads write them") {
  REQUIRE(SetLogging({.format = LogFormat::kJson, .level = LogLevel::kInfo, .file = path}).ok());
  constexpr int kLines = 400;
  LogQueue queue;
  Mutex mutex;
  int next = 0;
  const auto work = [&] {
    while (true) {
      {
        MutexLock lock(&mutex);
        if (next == kLines) return;
        queue.Add(LogLevel::kInfo, std::to_string(next++));
      }
      queue.Write();
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  const auto lines = Lines(path);
  REQUIRE(lines.size() == kLines);
  for (int i = 0; i < kLines; ++i) {
    REQUIRE(nlohmann::json::parse(lines[static_cast<size_t>(i)])["msg"] == std::to_string(i));
  }
}

TEST_CASE_METHOD(Fixture, "A text line stays one line whatever the message holds") {
  REQUIRE(SetLogging({.format = LogFormat::kText, .level = LogLevel::kInfo, .file = path}).ok());
  LogInfo("{}", kHostile);
  const auto lines = Lines(path);
  REQUIRE(lines.size() == 1);
  CHECK_THAT(lines[0], Catch::Contains(" info a\"b\\c\\nd\\x01\\x09e"));
}

TEST_CASE_METHOD(Fixture, "Messages below the level are neither written nor formatted") {
  REQUIRE(SetLogging({.format = LogFormat::kText, .level = LogLevel::kWarning, .file = path}).ok());
  LogDebug("no");
  LogInfo("no");
  LogWarning("yes");
  CHECK(Lines(path).size() == 1);
  CHECK_FALSE(LogEnabled(LogLevel::kInfo));
  CHECK(LogEnabled(LogLevel::kError));
}

TEST_CASE_METHOD(Fixture, "A log file is appended to") {
  const LogConfig config{.format = LogFormat::kText, .level = LogLevel::kInfo, .file = path};
  REQUIRE(SetLogging(config).ok());
  LogInfo("one");
  REQUIRE(SetLogging(config).ok());
  LogInfo("two");
  CHECK(Lines(path).size() == 2);
}

TEST_CASE_METHOD(Fixture, "A log file that can't be opened is named") {
  const absl::Status status = SetLogging(
      {.format = LogFormat::kText, .level = LogLevel::kInfo, .file = "/proc/refitd/none.log"});
  CHECK_FALSE(status.ok());
  CHECK_THAT(Message(status), Catch::Contains("/proc/refitd/none.log"));
}

}  // namespace
}  // namespace refitd
