// The texts of refitctl about the libraries that move the bytes of devices. Only this file of
// refitctl tells kinds of devices apart.
//
// Thread-safe.
#ifndef REFITD_DAEMON_REFITCTL_DEVICES_H_
#define REFITD_DAEMON_REFITCTL_DEVICES_H_

#include <string>

#include "refitd/v1/operator.pb.h"

namespace refitd::refitctl {

// Lines about the transport's communicators, each with its end of line; empty: none.
std::string RenderCollectives(const v1::TransportStatus& transport);

}  // namespace refitd::refitctl

#endif  // REFITD_DAEMON_REFITCTL_DEVICES_H_
