// The version of this build and how it was built. Constant, thread-safe.
#ifndef REFITD_DAEMON_PROCESS_VERSION_H_
#define REFITD_DAEMON_PROCESS_VERSION_H_

#include <string>

#include "transport/base/version.h"

namespace refitd {

// One line: compiler, language, libraries, and whether CUDA is compiled in.
std::string BuildInfo();

}  // namespace refitd

#endif  // REFITD_DAEMON_PROCESS_VERSION_H_
