#include "daemon/process/log.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "daemon/process/line_writer.h"
#include "daemon/test_util.h"
#include "transport/base/mutex.h"
#include "transport/base/unique_fd.h"

namespace refitd {
namespace {

std::vector<std::string> Lines(const std::string& path) {
  REQUIRE(FlushLog());
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

TEST_CASE_METHOD(Fixture,
                 "Lines are written in the order of the calls, whichever threads make them") {
  REQUIRE(SetLogging({.format = LogFormat::kJson, .level = LogLevel::kInfo, .file = path}).ok());
  constexpr int kLines = 400;
  Mutex mutex;
  int next = 0;
  const auto work = [&] {
    while (true) {
      MutexLock lock(&mutex);
      if (next == kLines) return;
      LogInfo("{}", next++);
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

// A FIFO whose reader reads nothing until it is told to.
struct FullPipe {
  explicit FullPipe(const std::string& path) {
    REFITD_CHECK(mkfifo(path.c_str(), 0600) == 0);
    reader = UniqueFd(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
    REFITD_CHECK(fcntl(reader.get(), F_SETPIPE_SZ, 4096) > 0);
  }
  // What has come since the last call.
  std::string Read() {
    std::string text(1 << 20, 0);
    const ssize_t n = read(reader.get(), text.data(), text.size());
    text.resize(n > 0 ? static_cast<size_t>(n) : 0);
    return text;
  }
  UniqueFd reader;
};

TEST_CASE_METHOD(Fixture, "A log that takes no lines stopped whoever logged") {
  FullPipe pipe(path);
  REQUIRE(SetLogging({.format = LogFormat::kText, .level = LogLevel::kInfo, .file = path}).ok());
  const size_t lines = 2 * LineWriter::kMaxLines;
  for (size_t i = 0; i < lines; ++i) LogInfo("line {}", i);
  CHECK_FALSE(FlushLog(std::chrono::milliseconds(1)));
  LogInfo("more");  // still nobody waits
  std::string text;
  CHECK(Eventually([&] {
    text += pipe.Read();
    return text.find("lines were dropped: the log took no more") != std::string::npos;
  }));
  CHECK(text.find("line 0\n") != std::string::npos);
  CHECK(Eventually([&] {
    pipe.Read();
    return FlushLog(std::chrono::milliseconds(0));
  }));
}

TEST_CASE_METHOD(Fixture, "A log.file that is a FIFO blocked the start") {
  REQUIRE(mkfifo(path.c_str(), 0600) == 0);
  const absl::Status status = SetLogging({.file = path});
  CHECK(status.code() == absl::StatusCode::kUnavailable);
  CHECK_THAT(Message(status), Catch::Contains(path));
}

TEST_CASE("Lines that wait have a limit in bytes, and the end waits for no sink for ever") {
  Mutex mutex;
  mutex.Lock();  // the sink hangs until the test ends
  std::vector<std::string> taken;
  {
    const auto state = std::make_shared<std::vector<std::string>>();
    LineWriter writer(
        [&mutex, state](const LineWriter::Line& line) {
          MutexLock lock(&mutex);
          state->push_back(line.text);
        },
        [](int64_t dropped) { return std::to_string(dropped); });
    writer.Add(LogLevel::kInfo, std::string(LineWriter::kMaxBytes + 1, 'x'));
    for (int i = 0; i < 4; ++i)
      writer.Add(LogLevel::kInfo, std::string(LineWriter::kMaxBytes / 2, 'x'));
    CHECK_FALSE(writer.Flush(std::chrono::milliseconds(1)));
    mutex.Unlock();
    REQUIRE(writer.Flush(kTestDeadline));
    taken = *state;
  }
  // The first is longer than all that may wait. The thread may have taken one of the others before
  // the rest came.
  REQUIRE(taken.size() >= 3);
  CHECK(taken.front().size() <= 1);
  CHECK(taken.size() <= 6);
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
  Log(LogLevel::kDebug, "no");
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
