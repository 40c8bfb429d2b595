#include <vector>

#include "daemon/process/version.h"
#include "daemon/refitctl/command.h"
#include "transport/tls/grpc_credentials.h"

namespace refitd::refitctl {
namespace {

int Run(int argc, char** argv) {
  CommandLine line("Looks after refitd: status, progress, pushing checkpoints, reference engines.",
                   kExitCodeHelp, "refitctl " + std::string(kVersion));
  CommandApp app = line.app();
  GlobalOptions global;
  std::string output = "table";
  app.Add("--socket", &global.socket, "The daemon's unix socket (default /run/refitd/refitd.sock)")
      .FromEnvironment("REFITD_SOCKET");
  app.Add("--address", &global.address, "The daemon's HOST:PORT; goes before the socket")
      .FromEnvironment("REFITD_ADDRESS");
  app.Add("--tls-certificate", &global.tls.certificate,
          "With --address: PEM file of your certificate and its chain")
      .FromEnvironment("REFITD_TLS_CERTIFICATE");
  app.Add("--tls-key", &global.tls.key, "PEM file of its private key")
      .FromEnvironment("REFITD_TLS_KEY");
  app.Add("--tls-roots", &global.tls.roots, "PEM file of the roots that sign daemons")
      .FromEnvironment("REFITD_TLS_ROOTS");
  app.Add("--tls-server", &global.tls.server,
          "Who the daemon must be, such as spiffe://DOMAIN/refitd/* (default: its "
          "certificate is for the host)")
      .FromEnvironment("REFITD_TLS_SERVER");
  app.AddFlag("--insecure", &global.insecure, "With --address: TCP without TLS")
      .FromEnvironment("REFITD_INSECURE");
  app.Add("--timeout", &global.timeout_seconds,
          "Seconds to wait for the daemon and each of its answers (default 10)")
      .InRange(0.001, 86'400.0);
  app.Add("-o,--output", &output, "table or json (numbers of 64 bits as strings)")
      .OneOf({"table", "json"});

  const std::vector<Command> commands = {
      AddStatus(app, global), AddGroups(app, global),  AddMembers(app, global),
      AddGroup(app, global),  AddAbort(app, global),   AddDrain(app, global),
      AddNodes(app, global),  AddBuckets(app, global), AddWatch(app, global),
      AddPush(app, global),   AddEngine(app, global),  AddValidate(app, global),
      AddCan(app, global),    AddReady(app, global)};
  switch (line.Parse(argc, argv)) {
    case CommandLine::Outcome::kHelped:
      return kExitOk;
    case CommandLine::Outcome::kWrong:
      return kExitUsage;
    case CommandLine::Outcome::kParsed:
      break;
  }
  global.json = output == "json";
  for (const Command& command : commands) {
    if (command.app.parsed()) return command.run();
  }
  return kExitUsage;
}

}  // namespace
}  // namespace refitd::refitctl

int main(int argc, char** argv) {
  refitd::RequireTls13();
  return refitd::refitctl::Run(argc, argv);
}
