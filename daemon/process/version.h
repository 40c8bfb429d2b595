// What this build is. Constant, thread-safe.
#ifndef REFITD_DAEMON_PROCESS_VERSION_H_
#define REFITD_DAEMON_PROCESS_VERSION_H_

#include <string>

#include "transport/base/version.h"

namespace refitd {

// Compiler, language, libraries, CUDA compiled in or not: one line.
std::string BuildInfo();

}  // namespace refitd

#endif  // REFITD_DAEMON_PROCESS_VERSION_H_
