// Converts the view of an update into the message that operators get.
#ifndef REFITD_DAEMON_NODE_UPDATE_STATUS_H_
#define REFITD_DAEMON_NODE_UPDATE_STATUS_H_

#include <string>

#include "daemon/group/group.h"
#include "refitd/v1/operator.pb.h"

namespace refitd {

v1::UpdateStatus StatusOf(const std::string& group, const UpdateView& update);

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_UPDATE_STATUS_H_
