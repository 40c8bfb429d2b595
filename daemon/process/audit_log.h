// The audit log: one line of JSON for each act that somebody may have to answer for, in a file of
// its own or in the journal.
//
// Lines are made under the caller's mutex, if there is one, and written by Write, after the mutex
// was released (LogQueue): nothing blocks under a mutex. Lines keep the order of Add. Refusals,
// which strangers can cause at will, are limited (LogLimit), and the next refusal in the log tells
// how many were left out. Strings are escaped, so that no peer can forge a line. Thread-safe.
#ifndef REFITD_DAEMON_PROCESS_AUDIT_LOG_H_
#define REFITD_DAEMON_PROCESS_AUDIT_LOG_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/process/audit_event.h"
#include "daemon/process/log_limit.h"
#include "daemon/process/log_queue.h"

namespace refitd {

struct AuditConfig {
  std::string file;      // appended to, and opened again by Reopen; empty: none
  bool journal = false;  // lines go to journald, as SYSLOG_IDENTIFIER=refitd-audit
  bool empty() const { return file.empty() && !journal; }
  bool operator==(const AuditConfig&) const = default;
};

class AuditLog {
 public:
  // `config` is not empty. Errors: those of opening the file, which they name.
  static absl::StatusOr<std::unique_ptr<AuditLog>> Create(const AuditConfig& config);

  // A caller that adds an event must call Write once it holds no mutex.
  void Add(const AuditEvent& event);
  void Write() { queue_.Write(); }
  // Add and Write.
  void Record(const AuditEvent& event);

  // Opens the file again by its name, for tools that rotate it by renaming. If that fails, the
  // open file stays in use.
  absl::Status Reopen();

 private:
  struct Sink;
  explicit AuditLog(std::shared_ptr<Sink> sink);

  const std::shared_ptr<Sink> sink_;
  LogLimit refusals_;
  LogQueue queue_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_PROCESS_AUDIT_LOG_H_
