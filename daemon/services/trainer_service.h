// refitd.v1.Trainer over the daemon: checks the authorizer and translates.
#ifndef REFITD_DAEMON_SERVICES_TRAINER_SERVICE_H_
#define REFITD_DAEMON_SERVICES_TRAINER_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include <memory>

#include "daemon/node/daemon.h"
#include "daemon/services/authorizer.h"

namespace refitd {

// `daemon` and `authorizer` must outlive the server.
std::unique_ptr<grpc::Service> MakeTrainerService(Daemon* daemon, const Authorizer* authorizer);

}  // namespace refitd

#endif  // REFITD_DAEMON_SERVICES_TRAINER_SERVICE_H_
