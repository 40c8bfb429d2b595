#include "daemon/link/probe.h"

#include <grpcpp/grpcpp.h>

#include <utility>

#include "daemon/link/channel.h"
#include "refitd/v1/peer.grpc.pb.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

struct Call {
  std::string address;
  grpc::ClientContext context;
  v1::PeerProbe request;
  v1::PeerProbed response;
  std::unique_ptr<v1::Peer::Stub> stub;
  ProbeAnswer answer;

  absl::StatusOr<uint64_t> Result(const grpc::Status& status) const {
    if (status.ok()) return response.incarnation();
    if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED) return 0;
    return Error(static_cast<absl::StatusCode>(status.error_code()), "daemon at {}: {}", address,
                 status.error_message());
  }
};

}  // namespace

std::function<void()> StartProbe(ProbeDial dial, ProbeAnswer answer) {
  KeepCallbackThreads();
  auto call = std::make_shared<Call>();
  call->address = dial.address;
  call->answer = std::move(answer);
  call->request.set_group(dial.group);
  call->request.set_incarnation(dial.incarnation);
  call->request.set_daemon_id(dial.daemon_id);
  call->request.set_boot_id(dial.boot_id);
  call->stub = v1::Peer::NewStub(MakePeerChannel(dial.address, dial.credentials));
  call->context.set_deadline(std::chrono::system_clock::now() + kProbeLimit);
  call->stub->async()->Probe(&call->context, &call->request, &call->response,
                             [call](const grpc::Status& status) noexcept {
                               ProbeAnswer told = std::exchange(call->answer, nullptr);
                               told(call->Result(status));
                             });
  return [call] { call->context.TryCancel(); };
}

}  // namespace refitd
