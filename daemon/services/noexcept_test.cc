// Functions that gRPC calls must not throw: gRPC swallows exceptions, and the work of the callback
// would never be finished (common.h). Compiling is the test.
#include <catch2/catch.hpp>

#include "daemon/services/common.h"
#include "daemon/services/health_service.h"
#include "daemon/services/member_service.h"
#include "daemon/services/peer_service.h"
#include "daemon/services/reflection_service.h"

namespace refitd {
namespace {

struct Role {
  [[maybe_unused]] static constexpr Rpc kRpc = Rpc::kEngineAttach;
  using Message = v1::EngineMessage;
  using Event = v1::EngineEvent;
  static MemberId Hello(Daemon*, const Message&, const Peer&, std::shared_ptr<MemberSink>) {
    return MemberId();
  }
  static bool Answer(Daemon*, MemberId, const Message&) { return true; }
};
using Attach = AttachReactor<Role>;
using Registering = RegisterLayoutReactor;

static_assert(AreNoexcept(&Attach::OnReadDone, &Attach::OnWriteDone, &Attach::OnCancel,
                          &Attach::OnDone, &Registering::OnReadDone, &Registering::OnDone,
                          &PendingCall::OnCancel, &PendingCall::OnDone));
// The services of members and operators assert this of their own handlers, which no other file
// sees.
static_assert(AreNoexcept(&PeerService::Link, &HealthService::Check, &HealthService::Watch,
                          &ReflectionService::ServerReflectionInfo));

TEST_CASE("an exception in a callback of gRPC was swallowed, and its work was left half done") {
  SUCCEED("the assertions above");
}

}  // namespace
}  // namespace refitd
