// The common cases with several connections between two ranks.
#include "transport/sockets/socket_wire.h"
#include "transport/wire_testing.h"

namespace refitd {

const TestedWire& Tested() {
  static const TestedWire sockets{[] { return MakeSocketWire({.streams = 3}); }};
  return sockets;
}

}  // namespace refitd
