// Turns the daemon's answers into tables for people.
//
// Pure; thread-safe, except UpdateBoard, which belongs to one thread.
#ifndef REFITD_DAEMON_REFITCTL_RENDER_H_
#define REFITD_DAEMON_REFITCTL_RENDER_H_

#include <fmt/format.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "daemon/refitctl/format.h"
#include "daemon/trace/update_trace.h"
#include "refitd/v1/operator.pb.h"

namespace refitd::refitctl {

// A cell of a table for a text that may be empty, and for the version of a message that may have
// none.
inline std::string OrDash(const std::string& text) { return text.empty() ? "-" : text; }
template <typename Message>
std::string VersionWord(const Message& message) {
  return message.has_version() ? fmt::format("{}", message.version()) : "-";
}

std::string RenderStatus(const v1::GetStatusResponse& status);
std::string RenderGroups(const google::protobuf::RepeatedPtrField<v1::GroupStatus>& groups);
// The daemons of each group, then this daemon's end of each group's communicator.
std::string RenderNodes(const google::protobuf::RepeatedPtrField<v1::GroupStatus>& groups);
std::string RenderMembers(const google::protobuf::RepeatedPtrField<v1::MemberStatus>& members);
// The update, the bytes moved by each method, then the update's buckets.
std::string RenderBuckets(const v1::GetUpdateStatisticsResponse& statistics);

// One line about an update: running (with progress) or ended (with its outcome).
std::string RenderUpdate(const v1::UpdateStatus& update, const ProgressMeter& meter);

// Whether every rank is attached and, for in-place delivery, has a layout: the instance takes
// part in updates.
bool IsComplete(const v1::InstanceStatus& instance);
int CompleteInstances(const v1::GroupStatus& group);

// The updates that a watcher sees, one line each. An ended update is reported once.
class UpdateBoard {
 public:
  struct Change {
    std::vector<std::string> finished;  // lines of updates that ended with this message
    bool changed = false;               // there is something to show
  };
  Change Apply(const v1::UpdateStatus& update);
  // Lines of the running updates, oldest first.
  std::vector<std::string> Lines() const;
  // How many updates were seen to end otherwise than committed.
  int aborted() const { return aborted_; }

 private:
  struct Running {
    ProgressMeter meter;
    std::string line;
  };
  std::map<uint64_t, Running> running_;  // by update id: ascending means oldest first
  uint64_t newest_ended_ = 0;            // ids grow: older ones were reported before
  int aborted_ = 0;
};

}  // namespace refitd::refitctl

#endif  // REFITD_DAEMON_REFITCTL_RENDER_H_
