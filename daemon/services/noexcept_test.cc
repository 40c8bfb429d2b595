// Functions that gRPC calls must not throw: gRPC swallows exceptions, and the work of the callback
// would never be finished (common.h). Compiling is the test.
#include <catch2/catch.hpp>
#include <utility>

#include "daemon/services/common.h"
#include "daemon/services/engine_service.h"
#include "daemon/services/health_service.h"
#include "daemon/services/operator_service.h"
#include "daemon/services/peer_service.h"
#include "daemon/services/reflection_service.h"
#include "daemon/services/register_layout.h"

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

static_assert(noexcept(std::declval<Attach&>().OnReadDone(true)));
static_assert(noexcept(std::declval<Attach&>().OnWriteDone(true)));
static_assert(noexcept(std::declval<Attach&>().OnCancel()));
static_assert(noexcept(std::declval<Attach&>().OnDone()));
static_assert(noexcept(std::declval<Registering&>().OnReadDone(true)));
static_assert(noexcept(std::declval<Registering&>().OnDone()));
static_assert(noexcept(std::declval<PendingCall&>().OnCancel()));
static_assert(noexcept(std::declval<PendingCall&>().OnDone()));

// trainer_service.cc asserts this of its own handlers, which no other file sees.
REFITD_METHOD_IS_NOEXCEPT(EngineService, Attach, nullptr);
REFITD_METHOD_IS_NOEXCEPT(EngineService, RegisterLayout, nullptr, nullptr);
REFITD_METHOD_IS_NOEXCEPT(EngineService, RegisterRegion, nullptr, nullptr, nullptr);
REFITD_METHOD_IS_NOEXCEPT(EngineService, ReleaseRegion, nullptr, nullptr, nullptr);
REFITD_METHOD_IS_NOEXCEPT(OperatorService, AbortUpdate, nullptr, nullptr, nullptr);
REFITD_METHOD_IS_NOEXCEPT(OperatorService, Drain, nullptr, nullptr, nullptr);
REFITD_METHOD_IS_NOEXCEPT(OperatorService, GetStatus, nullptr, nullptr, nullptr);
REFITD_METHOD_IS_NOEXCEPT(OperatorService, WatchUpdates, nullptr, nullptr);
REFITD_METHOD_IS_NOEXCEPT(OperatorService, CheckAccess, nullptr, nullptr, nullptr);
REFITD_METHOD_IS_NOEXCEPT(PeerService, Link, nullptr);
REFITD_METHOD_IS_NOEXCEPT(HealthService, Check, nullptr, nullptr, nullptr);
REFITD_METHOD_IS_NOEXCEPT(HealthService, Watch, nullptr, nullptr);
REFITD_METHOD_IS_NOEXCEPT(ReflectionService, ServerReflectionInfo, nullptr);

TEST_CASE("an exception in a callback of gRPC was swallowed, and its work was left half done") {
  SUCCEED("the assertions above");
}

}  // namespace
}  // namespace refitd
