// The numbers that name the lives of groups.
//
// Thread-safe.
#ifndef REFITD_DAEMON_NODE_INCARNATION_H_
#define REFITD_DAEMON_NODE_INCARNATION_H_

#include <cstdint>

namespace refitd {

// A new incarnation: random, never 0.
uint64_t NewIncarnation();

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_INCARNATION_H_
