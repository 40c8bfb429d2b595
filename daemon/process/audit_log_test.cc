#include "daemon/process/audit_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "daemon/test_util.h"
#include "transport/base/status.h"
#include "transport/base/unique_fd.h"

namespace refitd {
namespace {

std::vector<nlohmann::json> Lines(const std::string& path) {
  std::vector<nlohmann::json> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

struct Fixture {
  TempFolder folder;
  std::string path = folder / "audit";
  std::unique_ptr<AuditLog> log = std::move(AuditLog::Create({.file = path})).value();

  // The lines of the log's file, after all that was recorded was written.
  std::vector<nlohmann::json> Written() {
    REQUIRE(log->Flush());
    return Lines(path);
  }
};

TEST_CASE_METHOD(Fixture, "An event is one line of JSON, without the fields that it lacks") {
  log->Record({.what = AuditWhat::kCommit,
               .identity = "spiffe://prod/trainer/t",
               .pid = 7,
               .group = "g",
               .version = 812,
               .outcome = "OK",
               .request_id = "r-1"});
  log->Record({.what = AuditWhat::kPolicy, .outcome = "OK"});
  const auto lines = Written();
  REQUIRE(lines.size() == 2);
  CHECK(lines[0]["what"] == "commit");
  CHECK(lines[0]["identity"] == "spiffe://prod/trainer/t");
  CHECK(lines[0]["pid"] == 7);
  CHECK(lines[0]["version"] == 812);
  CHECK(lines[0]["request_id"] == "r-1");
  CHECK(lines[0]["time"].get<std::string>().size() ==
        std::string("2024-01-01T00:00:00.000Z").size());
  CHECK(lines[1].size() == 3);
}

TEST_CASE_METHOD(Fixture, "No text of a peer forges a line") {
  log->Record(
      {.what = AuditWhat::kBegin, .group = "a\"\n{\"what\":\"commit\"}\n\xff", .outcome = "OK"});
  const auto lines = Written();
  REQUIRE(lines.size() == 1);
  CHECK(lines[0]["what"] == "begin");
}

TEST_CASE_METHOD(Fixture, "Events are written in the order of Record") {
  for (int i = 0; i < 100; ++i) {
    log->Record({.what = AuditWhat::kBegin, .outcome = std::to_string(i)});
  }
  const auto lines = Written();
  REQUIRE(lines.size() == 100);
  for (size_t i = 0; i < lines.size(); ++i) CHECK(lines[i]["outcome"] == std::to_string(i));
}

TEST_CASE_METHOD(Fixture, "An audit.file that is a FIFO blocked the start") {
  const std::string fifo = folder / "fifo";
  REQUIRE(mkfifo(fifo.c_str(), 0600) == 0);
  const absl::Status unread = AuditLog::Create({.file = fifo}).status();
  CHECK(unread.code() == absl::StatusCode::kUnavailable);
  CHECK_THAT(Message(unread), Catch::Contains(fifo) && Catch::Contains("FIFO that nobody reads"));
  const UniqueFd reader(open(fifo.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  log = std::move(AuditLog::Create({.file = fifo})).value();
  log->Record({.what = AuditWhat::kCommit});
  REQUIRE(log->Flush());
  char byte = 0;
  CHECK(read(reader.get(), &byte, 1) == 1);
}

TEST_CASE_METHOD(Fixture, "A file that was renamed is left by Reopen") {
  log->Record({.what = AuditWhat::kBegin, .outcome = "1"});
  std::filesystem::rename(path, path + ".1");
  log->Record({.what = AuditWhat::kBegin, .outcome = "2"});
  REQUIRE(log->Flush());
  CHECK(Lines(path + ".1").size() == 2);
  REQUIRE(log->Reopen().ok());
  log->Record({.what = AuditWhat::kBegin, .outcome = "3"});
  CHECK(Written().size() == 1);
  CHECK(Lines(path + ".1").size() == 2);
}

TEST_CASE_METHOD(Fixture, "Refusals are limited, other events are not") {
  for (int i = 0; i < LogLimit::kLines + 5; ++i) log->Record({.what = AuditWhat::kRefusal});
  CHECK(Written().size() == LogLimit::kLines);
  for (int i = 0; i < LogLimit::kLines + 5; ++i) log->Record({.what = AuditWhat::kCommit});
  CHECK(Written().size() == 2 * LogLimit::kLines + 5);
}

TEST_CASE_METHOD(Fixture, "A file that can't be opened is named, and the open one stays in use") {
  const auto none = AuditLog::Create({.file = "/proc/refitd/none"});
  CHECK_THAT(Message(none.status()), Catch::Contains("audit.file \"/proc/refitd/none\""));
  const std::string gone = folder / "gone";
  std::filesystem::create_directory(gone);
  auto other = std::move(AuditLog::Create({.file = gone + "/audit"})).value();
  std::filesystem::rename(gone, folder / "moved");
  CHECK_FALSE(other->Reopen().ok());
  other->Record({.what = AuditWhat::kCommit});
  REQUIRE(other->Flush());
  CHECK(Lines(folder / "moved/audit").size() == 1);
}

}  // namespace
}  // namespace refitd
