#include "transport/sockets/socket_wire.h"

#include "transport/wire_testing.h"

namespace refitd {

const TestedWire& Tested() {
  static const TestedWire sockets{[] { return MakeSocketWire({}); }, false};
  return sockets;
}

}  // namespace refitd
