#include "daemon/page.h"

#include <fmt/format.h>
#include <google/protobuf/util/json_util.h>
#include <openssl/evp.h>
#include <openssl/sha.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <vector>

#include "daemon/node/operators.h"
#include "daemon/page_html.h"
#include "daemon/services/status.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

// The daemon sends each change of state at once; the interval is only that of progress, which the
// page takes from statuses.
constexpr Duration kProgressInterval = std::chrono::hours(1);

std::string Event(std::string_view name, int64_t id, const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string json;
  // Can't fail for messages without Any.
  REFITD_CHECK(google::protobuf::util::MessageToJsonString(message, &json, options).ok());
  if (json.size() > kMaxEventBytes) {
    return fmt::format("event: too_large\ndata: {} of {} bytes\n\n", name, json.size());
  }
  return fmt::format("id: {}\nevent: {}\ndata: {}\n\n", id, name, json);
}

// The text between the first `open` and the `close` that follows.
std::string_view Between(std::string_view text, std::string_view open, std::string_view close) {
  const size_t from = text.find(open);
  const size_t to = text.find(close, from);
  REFITD_CHECK(from != std::string_view::npos && to != std::string_view::npos);
  return text.substr(from + open.size(), to - from - open.size());
}

// Returns the text's digest as a Content-Security-Policy names it: 'sha256-...'.
std::string Digest(std::string_view text) {
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest{};
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
  std::array<unsigned char, 4 * (SHA256_DIGEST_LENGTH + 2) / 3 + 1> base64{};
  const int bytes = EVP_EncodeBlock(base64.data(), digest.data(), digest.size());
  return fmt::format("'sha256-{}'", std::string_view(reinterpret_cast<const char*>(base64.data()),
                                                     static_cast<size_t>(bytes)));
}

int64_t NowMs() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace

void UpdateHistory::Send(UpdateNews news) {
  std::vector<InstanceOutcome>& instances = news.update.instances;
  std::erase_if(instances, [](const InstanceOutcome& each) { return each.committed; });
  instances.resize(std::min(instances.size(), kMaxKeptInstances));
  std::vector<std::string>& sources = news.update.source_instances;
  sources.resize(std::min(sources.size(), kMaxKeptInstances));
  const MutexLock lock(&mutex_);
  changes_.push_back({now_ms_(), std::move(news)});
  ++sent_;
  if (changes_.size() > kMaxKeptChanges) changes_.pop_front();
}

std::string UpdateHistory::Since(uint64_t* seen) const {
  std::vector<Change> changes;
  {
    const MutexLock lock(&mutex_);
    const uint64_t missing = std::min<uint64_t>(sent_ - *seen, changes_.size());
    changes.assign(changes_.end() - static_cast<ptrdiff_t>(missing), changes_.end());
    *seen = sent_;
  }
  std::vector<std::string> events;
  size_t bytes = 0;
  for (auto change = changes.rbegin(); change != changes.rend(); ++change) {
    const auto& [ms, news] = *change;
    events.push_back(Event("update", ms, ToProto(news.group, news.update)));
    bytes += events.back().size();
    if (bytes > kMaxChangesBytes) break;
  }
  std::string text;
  for (auto event = events.rbegin(); event != events.rend(); ++event) text += *event;
  return text;
}

std::string StatusEvent(v1::GetStatusResponse status) {
  for (v1::GroupStatus& group : *status.mutable_groups()) group.clear_slots();
  return Event("status", NowMs(), status);
}

std::string PageHeaders(std::string_view html) {
  return fmt::format(
      "Content-Security-Policy: default-src 'none'; script-src {}; style-src {}; "
      "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
      "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'\r\n"
      "Cross-Origin-Opener-Policy: same-origin\r\nReferrer-Policy: no-referrer\r\n"
      "Cache-Control: no-store\r\n",
      Digest(Between(html, "<script>", "</script>")), Digest(Between(html, "<style>", "</style>")));
}

absl::StatusOr<MetricsPage> MakePage(Daemon* daemon) {
  auto history = std::make_shared<UpdateHistory>(NowMs);
  REFITD_RETURN_IF_ERROR(
      daemon->operators().Watch({.group = "", .interval = kProgressInterval}, history).status());
  MetricsPage page;
  page.html = std::string(kPageHtml);
  page.headers = PageHeaders(page.html);
  page.changes = [history](uint64_t* seen) { return history->Since(seen); };
  page.status = [daemon] { return StatusEvent(StatusOf(daemon)); };
  return page;
}

}  // namespace refitd
