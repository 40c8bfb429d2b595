// Turns the daemon's state into the messages that operators ask for.
//
// Thread-safe.
#ifndef REFITD_DAEMON_SERVICES_STATUS_H_
#define REFITD_DAEMON_SERVICES_STATUS_H_

#include <string>

#include "absl/status/statusor.h"
#include "daemon/node/daemon.h"
#include "daemon/node/operators.h"
#include "daemon/sockets/name_lookup.h"
#include "refitd/v1/operator.pb.h"
#include "refitd/v1/trainer.pb.h"

namespace refitd {

// Fills in GroupStatus.coordinator_moved. Waits for the resolver of names, at most kLookupLimit for
// each name.
void ShowMoved(Daemon* daemon, NameLookup* lookup,
               google::protobuf::RepeatedPtrField<v1::GroupStatus>* groups);

v1::GetStatusResponse StatusOf(Daemon* daemon);
v1::ListGroupsResponse ListGroups(Daemon* daemon);
// Only this call returns the long lists of a spec: a status of all groups must fit into a message.
absl::StatusOr<v1::GetGroupResponse> GetGroup(Daemon* daemon, const v1::GetGroupRequest& request);
absl::StatusOr<v1::ListMembersResponse> ListMembers(Daemon* daemon,
                                                    const v1::ListMembersRequest& request);
absl::StatusOr<v1::GetUpdateStatisticsResponse> GetUpdateStatistics(
    Daemon* daemon, const v1::GetUpdateStatisticsRequest& request);
absl::StatusOr<v1::GetUpdateResponse> GetUpdate(Daemon* daemon,
                                                const v1::GetUpdateRequest& request);

v1::UpdateStatus ToProto(const std::string& group, const UpdateView& update);

// The filter of a caller that watches updates. INVALID_ARGUMENT: interval_ms is out of its range.
absl::StatusOr<WatchFilter> FilterOf(const v1::WatchUpdatesRequest& request);

}  // namespace refitd

#endif  // REFITD_DAEMON_SERVICES_STATUS_H_
