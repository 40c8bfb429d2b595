// The services of members and operators, refitd.v1.Trainer, Engine and Operator, over the daemon:
// they ask the authorizer, and translate.
#ifndef REFITD_DAEMON_SERVICES_SERVICES_H_
#define REFITD_DAEMON_SERVICES_SERVICES_H_

#include <grpcpp/grpcpp.h>

#include <memory>

#include "daemon/node/daemon.h"
#include "daemon/services/authorizer.h"

namespace refitd {

// `daemon` and `authorizer` must outlive the server. Thread-safe.
std::unique_ptr<grpc::Service> MakeTrainerService(Daemon* daemon, const Authorizer* authorizer);
std::unique_ptr<grpc::Service> MakeEngineService(Daemon* daemon, const Authorizer* authorizer);
std::unique_ptr<grpc::Service> MakeOperatorService(Daemon* daemon, const Authorizer* authorizer);

}  // namespace refitd

#endif  // REFITD_DAEMON_SERVICES_SERVICES_H_
