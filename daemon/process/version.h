// The version of this build and how it was built. Constant, thread-safe.
#ifndef REFITD_DAEMON_PROCESS_VERSION_H_
#define REFITD_DAEMON_PROCESS_VERSION_H_

#include <string>
#include <utility>
#include <vector>

#include "transport/base/version.h"

namespace refitd {

// Tells for each kind of device whether it is compiled in, by the name of its transport: "CUDA
// 13.0", "CUDA not compiled in".
std::vector<std::pair<std::string, std::string>> DeviceBuilds();

// One line: compiler, language, libraries, and DeviceBuilds.
std::string BuildInfo();

}  // namespace refitd

#endif  // REFITD_DAEMON_PROCESS_VERSION_H_
