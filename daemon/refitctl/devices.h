// The texts of refitctl about the devices that a machine has and a daemon serves, and about the
// libraries that move their bytes. Only this file of refitctl tells kinds of devices apart.
//
// Thread-safe.
#ifndef REFITD_DAEMON_REFITCTL_DEVICES_H_
#define REFITD_DAEMON_REFITCTL_DEVICES_H_

#include <optional>
#include <string>

#include "refitd/v1/operator.pb.h"

namespace refitd::refitctl {

// Lines about the transport's communicators and epochs, each with its end of line; empty: none.
std::string RenderCollectives(const v1::TransportStatus& transport);

// The library that carries out collectives on the devices of a transport.
struct Collectives {
  std::string name;     // as a key of JSON
  std::string version;  // empty: there is none
  std::string text;     // for people
};
// nullopt: the transport is not available, or has no such library.
std::optional<Collectives> CollectivesOf(const v1::TransportStatus& transport);

// Whether this machine has a driver of devices.
struct DriverFinding {
  std::string what;  // the finding's name
  bool found = false;
  std::string text;
};
DriverFinding FindDriver();

}  // namespace refitd::refitctl

#endif  // REFITD_DAEMON_REFITCTL_DEVICES_H_
