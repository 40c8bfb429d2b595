// The spans of an update as OpenTelemetry's messages: a trace for each update.
//
//   update | catch-up | rollback     the root; an error where the update was aborted
//     data, verifying, ...           a phase, by its state
//     bucket                         of a trainer rank
//     daemon, link                   what moved in a compiled refit
//     pause                          of an engine's instance
//
// Invariant: the ids are digests of what names the span (group, incarnation, version, update id;
// then kind, whose, name), so that an update that is exported twice makes no second trace.
//
// Pure; thread-safe.
#ifndef REFITD_DAEMON_TRACE_OTLP_H_
#define REFITD_DAEMON_TRACE_OTLP_H_

#include <cstdint>
#include <string>
#include <vector>

#include "daemon/trace/update_trace.h"
#include "opentelemetry/proto/collector/trace/v1/trace_service.pb.h"

namespace refitd {

namespace otlp = opentelemetry::proto;
using ExportRequest = otlp::collector::trace::v1::ExportTraceServiceRequest;

// Spans of one message, which collectors take up to 4 MiB of by default: a span has some 400 bytes.
inline constexpr size_t kMaxSpansPerRequest = 1024;

// `incarnation`: of the group. `epoch_ns`: the begin of UpdateTrace's clock, since 1970.
std::vector<ExportRequest> ExportRequests(const TracedUpdate& traced, uint64_t incarnation,
                                          const std::string& daemon_id, int64_t epoch_ns);

}  // namespace refitd

#endif  // REFITD_DAEMON_TRACE_OTLP_H_
