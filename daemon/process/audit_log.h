// The audit log: one line of JSON for each act that somebody may have to answer for, in a file of
// its own or in the journal.
//
// A thread of its own writes the lines, in the order of Record (LineWriter): nobody waits for the
// file or the journal, and lines that can't be written are dropped and counted. Refusals, which
// strangers can cause at will, are limited for each identity (LogLimits), and the next refusal of
// that identity in the log tells how many were left out. Strings are escaped, so that no peer can
// forge a line. Thread-safe.
#ifndef REFITD_DAEMON_PROCESS_AUDIT_LOG_H_
#define REFITD_DAEMON_PROCESS_AUDIT_LOG_H_

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/process/audit_event.h"
#include "daemon/process/line_writer.h"
#include "daemon/process/log_limit.h"

namespace refitd {

struct AuditConfig {
  std::string file;      // appended to, and opened again by Reopen; empty: none
  bool journal = false;  // lines go to journald, as SYSLOG_IDENTIFIER=refitd-audit
  bool empty() const { return file.empty() && !journal; }
  bool operator==(const AuditConfig&) const = default;
};

class AuditLog {
 public:
  // `config` is not empty. Errors: those of opening the file, which they name (OpenForLines).
  static absl::StatusOr<std::unique_ptr<AuditLog>> Create(const AuditConfig& config);

  // Never blocks, so it may be called under a mutex.
  void Record(const AuditEvent& event);
  // True: all lines that were recorded before are written. False: they were not within `limit`.
  bool Flush(std::chrono::milliseconds limit = LineWriter::kEndLimit) {
    return writer_.Flush(limit);
  }

  // Opens the file again by its name, for tools that rotate it by renaming. If that fails, the
  // open file stays in use.
  absl::Status Reopen();

 private:
  struct Sink;
  explicit AuditLog(std::shared_ptr<Sink> sink);

  const std::shared_ptr<Sink> sink_;
  LogLimits refusals_;
  LineWriter writer_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_PROCESS_AUDIT_LOG_H_
