// What refitctl shows of the daemon's answers: tables for people.
//
// Pure; thread-safe, except UpdateBoard, which belongs to one thread.
#ifndef REFITD_DAEMON_REFITCTL_RENDER_H_
#define REFITD_DAEMON_REFITCTL_RENDER_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "daemon/refitctl/format.h"
#include "refitd/v1/operator.pb.h"

namespace refitd::refitctl {

std::string RenderStatus(const v1::GetStatusResponse& status);
std::string RenderGroups(const google::protobuf::RepeatedPtrField<v1::GroupStatus>& groups);
// The daemons of each group, then this daemon's end of each group's communicator.
std::string RenderNodes(const google::protobuf::RepeatedPtrField<v1::GroupStatus>& groups);
std::string RenderMembers(const google::protobuf::RepeatedPtrField<v1::MemberStatus>& members);
// The update, what went by each method, then its buckets.
std::string RenderBuckets(const v1::GetUpdateStatisticsResponse& statistics);

// One line about an update: running (with progress) or ended (with its outcome).
std::string RenderUpdate(const v1::UpdateStatus& update, const ProgressMeter& meter);

bool HasEnded(const v1::UpdateStatus& update);

// Every rank is attached and, where it has to, has registered: the instance takes part in updates.
bool IsComplete(const v1::InstanceStatus& instance);
int CompleteInstances(const v1::GroupStatus& group);

// The updates that a watcher sees: one line each, the ended ones told once.
class UpdateBoard {
 public:
  struct Change {
    std::vector<std::string> finished;  // lines of updates that ended with this message
    bool changed = false;               // anything to show
  };
  Change Apply(const v1::UpdateStatus& update);
  // Of the running updates, oldest first.
  std::vector<std::string> Lines() const;
  // Updates seen to end in something else than committed.
  int aborted() const { return aborted_; }

 private:
  struct Running {
    ProgressMeter meter;
    std::string line;
  };
  std::map<uint64_t, Running> running_;  // by update id: ascending means oldest first
  uint64_t newest_ended_ = 0;            // ids grow: an older one was told before
  int aborted_ = 0;
};

}  // namespace refitd::refitctl

#endif  // REFITD_DAEMON_REFITCTL_RENDER_H_
