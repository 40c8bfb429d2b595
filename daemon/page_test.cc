#include "daemon/page.h"

#include <google/protobuf/util/json_util.h>

#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "daemon/page_html.h"
#include "daemon/services/status.h"

namespace refitd {
namespace {

using Catch::Contains;
using Catch::StartsWith;

UpdateNews NewsOf(const std::string& group, uint64_t id, std::string_view state) {
  UpdateNews news;
  news.group = group;
  news.update.id = UpdateId(id);
  news.update.version = Version(static_cast<int64_t>(id));
  news.update.state = state;
  return news;
}

// The data of the events of that name.
template <typename Message>
std::vector<Message> Read(const std::string& events, const std::string& name) {
  const std::string before = "event: " + name + "\ndata: ";
  std::vector<Message> all;
  for (size_t at = events.find(before); at != std::string::npos; at = events.find(before, at + 1)) {
    const size_t from = at + before.size();
    const size_t end = events.find('\n', from);
    CHECK(events.compare(end, 2, "\n\n") == 0);
    Message message;
    const std::string json = events.substr(from, end - from);
    INFO(json);
    CHECK(google::protobuf::util::JsonStringToMessage(json, &message).ok());
    all.push_back(std::move(message));
  }
  return all;
}

TEST_CASE("an event's data is the operator API's message, and says when") {
  UpdateHistory history([] { return 1'234; });
  UpdateNews news = NewsOf("policy", 7, "aborted");
  news.update.reason = "two\nlines, \"quoted\"";
  const v1::UpdateStatus expected = ToProto(news.group, news.update);
  history.Send(std::move(news));
  uint64_t seen = 0;
  const std::string events = history.Since(&seen);
  CHECK_THAT(events, StartsWith("id: 1234\nevent: update\ndata: {"));
  const auto updates = Read<v1::UpdateStatus>(events, "update");
  REQUIRE(updates.size() == 1);
  CHECK(updates[0].SerializeAsString() == expected.SerializeAsString());
}

TEST_CASE("each reader gets each change once, and a late one all that are kept") {
  UpdateHistory history([] { return 0; });
  uint64_t early = 0;
  CHECK(history.Since(&early).empty());
  for (uint64_t id = 1; id <= kMaxKeptChanges + 5; ++id) history.Send(NewsOf("g", id, "data"));
  uint64_t late = 0;
  for (uint64_t* const reader : {&early, &late}) {
    const auto updates = Read<v1::UpdateStatus>(history.Since(reader), "update");
    REQUIRE(updates.size() == kMaxKeptChanges);
    CHECK(updates.front().update_id() == 6);
    CHECK(updates.back().update_id() == kMaxKeptChanges + 5);
    CHECK(history.Since(reader).empty());
  }
  history.Send(NewsOf("g", 9'999, "data"));
  CHECK(Read<v1::UpdateStatus>(history.Since(&late), "update").size() == 1);
}

TEST_CASE("what is kept of an update has limits (P10)") {
  UpdateHistory history([] { return 0; });
  UpdateNews news = NewsOf("g", 1, "committed");
  for (size_t i = 0; i < 1'000; ++i) {
    news.update.instances.push_back({.instance = "in", .committed = true, .reason = ""});
    news.update.instances.push_back({.instance = "out", .committed = false, .reason = "slow"});
    news.update.source_instances.emplace_back("source");
  }
  history.Send(std::move(news));
  for (uint64_t id = 2; id <= kMaxKeptChanges; ++id) {
    UpdateNews large = NewsOf("g", id, "aborted");
    for (size_t i = 0; i < kMaxKeptInstances; ++i) {
      large.update.instances.push_back(
          {.instance = "out", .committed = false, .reason = std::string(1'000, 'r')});
    }
    history.Send(std::move(large));
    if (id > 2) continue;
    uint64_t seen = 0;
    const auto first = Read<v1::UpdateStatus>(history.Since(&seen), "update").front();
    CHECK(first.instances_size() == kMaxKeptInstances);
    CHECK(first.instances(0).instance() == "out");
    CHECK(first.source_instances_size() == kMaxKeptInstances);
  }
  uint64_t seen = 0;
  const std::string events = history.Since(&seen);
  CHECK(events.size() < kMaxChangesBytes + (64 << 10));
  CHECK(Read<v1::UpdateStatus>(events, "update").back().update_id() == kMaxKeptChanges);
}

TEST_CASE("a status is the message without staging slots, and one that is too large is named") {
  v1::GetStatusResponse status;
  status.set_daemon_id("node-a");
  v1::GroupStatus* const group = status.add_groups();
  group->set_name("policy");
  group->set_version(3);
  group->add_slots()->set_holder("somebody");
  const auto read = Read<v1::GetStatusResponse>(StatusEvent(status), "status");
  REQUIRE(read.size() == 1);
  CHECK(read[0].groups(0).slots_size() == 0);
  group->clear_slots();
  CHECK(read[0].SerializeAsString() == status.SerializeAsString());
  group->set_name(std::string(kMaxEventBytes, 'g'));
  const std::string large = StatusEvent(status);
  CHECK(large.size() < 100);
  CHECK_THAT(large, StartsWith("event: too_large\ndata: status of "));
}

TEST_CASE("a text of somebody else ends no event, no string and no script") {
  v1::GetStatusResponse status;
  const std::string hostile = "</script><script>alert(1)</script>\r\n\n\nevent: status\ndata: {}";
  status.add_groups()->set_name(hostile);
  const std::string event = StatusEvent(status);
  CHECK_THAT(event, !Contains("<") && !Contains("\r"));
  const auto read = Read<v1::GetStatusResponse>(event, "status");
  REQUIRE(read.size() == 1);
  CHECK(read[0].groups(0).name() == hostile);
}

TEST_CASE("the page's policy allows its own script and style by digest, and its stream") {
  // The digest of "a" is known.
  const std::string headers = PageHeaders("<style>a</style><p></p><script>a</script>");
  const std::string of_a = "'sha256-ypeBEsobvcr6wjGzmiPcTaeG7/gUfE5yuYB3ha/uSLs='";
  CHECK_THAT(headers, StartsWith("Content-Security-Policy: default-src 'none'; script-src " + of_a +
                                 "; style-src " + of_a + "; connect-src 'self'; ") &&
                          Contains("frame-ancestors 'none'") &&
                          Contains("require-trusted-types-for 'script'") && !Contains("unsafe"));
}

TEST_CASE("the page is one file that names nothing outside and makes no HTML of text") {
  const std::string page(kPageHtml);
  CHECK_THAT(page, StartsWith("<!doctype html>") && Catch::EndsWith("</html>\n"));
  for (const char* never : {"http:", "https:", "src=", "@import", "url(", "innerHTML", "outerHTML",
                            "insertAdjacent", "document.write", "eval(", "style=\"", "onclick"}) {
    CHECK_THAT(page, !Contains(never));
  }
}

}  // namespace
}  // namespace refitd
