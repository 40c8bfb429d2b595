#include "daemon/trace/otlp.h"

#include <fmt/format.h>
#include <openssl/sha.h>

#include <array>
#include <cmath>
#include <map>
#include <string_view>
#include <utility>
#include <variant>

#include "transport/base/version.h"

namespace refitd {
namespace {

using Kind = UpdateSpan::Kind;
using Attributes = google::protobuf::RepeatedPtrField<otlp::common::v1::KeyValue>;
using otlp::trace::v1::Span;

constexpr size_t kTraceIdBytes = 16;
constexpr size_t kSpanIdBytes = 8;

std::string Digest(const std::string& text, size_t bytes) {
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest{};
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
  return {reinterpret_cast<const char*>(digest.data()), bytes};
}

void Set(otlp::common::v1::AnyValue* out, const std::string& value) {
  out->set_string_value(value);
}
void Set(otlp::common::v1::AnyValue* out, int64_t value) { out->set_int_value(value); }
void Set(otlp::common::v1::AnyValue* out, double value) { out->set_double_value(value); }

template <typename Value>
void Add(std::string_view key, const Value& value, Attributes* attributes) {
  otlp::common::v1::KeyValue* const added = attributes->Add();
  added->set_key(std::string(key));
  Set(added->mutable_value(), value);
}

std::string RootName(const v1::UpdateStatus& update) {
  if (update.catch_up()) return "catch-up";
  return update.has_content_version() ? "rollback" : "update";
}

// The span's name, of few kinds, and the attribute that tells whose it is.
std::pair<std::string, std::string_view> NamesOf(const UpdateSpan& span,
                                                 const v1::UpdateStatus& update) {
  switch (span.kind) {
    case Kind::kUpdate:
      break;
    case Kind::kPhase:
      return {span.name, ""};
    case Kind::kBucket:
      return {"bucket", "refitd.trainer_rank"};
    case Kind::kDaemon:
      return {"daemon", "refitd.daemon"};
    case Kind::kLink:
      return {"link", "refitd.link"};
    case Kind::kPause:
      return {"pause", "refitd.instance"};
  }
  return {RootName(update), ""};
}

void FillRoot(const v1::UpdateStatus& update, uint64_t incarnation, Span* span) {
  Attributes* const attributes = span->mutable_attributes();
  Add("refitd.version", update.version(), attributes);
  Add("refitd.outcome", update.state(), attributes);
  Add("refitd.update_id", fmt::format("{:x}", update.update_id()), attributes);
  Add("refitd.incarnation", fmt::format("{:x}", incarnation), attributes);
  if (update.outcome() != v1::UPDATE_OUTCOME_ABORTED) return;
  span->mutable_status()->set_code(otlp::trace::v1::Status::STATUS_CODE_ERROR);
  span->mutable_status()->set_message(update.reason());
}

// Makes the messages of the spans of one update.
class Spans {
 public:
  Spans(const v1::UpdateStatus& update, uint64_t incarnation, int64_t epoch_ns)
      : update_(update),
        incarnation_(incarnation),
        epoch_ns_(epoch_ns),
        trace_id_(Digest(fmt::format("{}\n{:x}\n{}\n{:x}", update.group(), incarnation,
                                     update.version(), update.update_id()),
                         kTraceIdBytes)),
        root_id_(Digest(trace_id_, kSpanIdBytes)) {}

  Span Make(const UpdateSpan& span) {
    Span out;
    const bool root = span.kind == Kind::kUpdate;
    out.set_trace_id(trace_id_);
    out.set_span_id(root ? root_id_ : IdOf(span));
    if (!root) out.set_parent_span_id(root_id_);
    const auto [name, whose] = NamesOf(span, update_);
    out.set_name(name);
    out.set_kind(Span::SPAN_KIND_INTERNAL);
    out.set_start_time_unix_nano(At(span.begin));
    out.set_end_time_unix_nano(At(span.begin + span.seconds));
    Attributes* const attributes = out.mutable_attributes();
    if (!whose.empty()) Add(whose, span.of, attributes);
    if (span.kind == Kind::kBucket) Add("refitd.seq", span.name, attributes);
    for (const auto& [key, value] : span.attributes) {
      std::visit([&, &key = key](const auto& v) { Add("refitd." + key, v, attributes); }, value);
    }
    if (root) FillRoot(update_, incarnation_, &out);
    return out;
  }

 private:
  // A state may come twice.
  std::string IdOf(const UpdateSpan& span) {
    const std::string what =
        fmt::format("{}\n{}\n{}", static_cast<int>(span.kind), span.of, span.name);
    return Digest(fmt::format("{}\n{}\n{}", trace_id_, what, seen_[what]++), kSpanIdBytes);
  }
  uint64_t At(double seconds) const {
    return static_cast<uint64_t>(epoch_ns_ + std::llround(seconds * 1e9));
  }

  const v1::UpdateStatus& update_;
  const uint64_t incarnation_;
  const int64_t epoch_ns_;
  const std::string trace_id_;
  const std::string root_id_;
  std::map<std::string, int> seen_;
};

void FillResource(const std::string& daemon_id, otlp::trace::v1::ResourceSpans* out) {
  Attributes* const attributes = out->mutable_resource()->mutable_attributes();
  Add("service.name", std::string("refitd"), attributes);
  Add("service.version", std::string(kVersion), attributes);
  Add("service.instance.id", daemon_id, attributes);
}

}  // namespace

std::vector<ExportRequest> ExportRequests(const TracedUpdate& traced, uint64_t incarnation,
                                          const std::string& daemon_id, int64_t epoch_ns) {
  Spans spans(traced.update, incarnation, epoch_ns);
  std::vector<ExportRequest> requests;
  otlp::trace::v1::ScopeSpans* scope = nullptr;
  for (size_t i = 0; i < traced.spans.size(); ++i) {
    if (i % kMaxSpansPerRequest == 0) {
      otlp::trace::v1::ResourceSpans* const of = requests.emplace_back().add_resource_spans();
      FillResource(daemon_id, of);
      scope = of->add_scope_spans();
      scope->mutable_scope()->set_name("refitd");
      scope->mutable_scope()->set_version(std::string(kVersion));
    }
    *scope->add_spans() = spans.Make(traced.spans[i]);
  }
  return requests;
}

}  // namespace refitd
