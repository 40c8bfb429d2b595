#include <vector>

#include "daemon/process/version.h"
#include "daemon/refitctl/command.h"
#include "transport/tls/grpc_credentials.h"

namespace refitd::refitctl {
namespace {

int Run(int argc, char** argv) {
  CommandLine line("Looks after refitd. Durations are written as 500ms, 30s, 2m, 1h.",
                   kExitCodeHelp, "refitctl " + std::string(kVersion));
  CommandApp app = line.app();
  GlobalOptions global;
  std::string output = "table";
  app.Add("-o,--output", &output, "table or json (numbers of 64 bits as strings)")
      .OneOf({"table", "json"});
  app.Add("--timeout", &global.timeout, "How long to wait for the daemon and each of its answers");
  app.BeginGroup("Connection");
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

  const std::vector<Command> commands = {
      AddStatus(app, global),   AddGroups(app, global),  AddMembers(app, global),
      AddNodes(app, global),    AddBuckets(app, global), AddWatch(app, global),
      AddTop(app, global),      AddTrace(app, global),   AddSupportBundle(app, global),
      AddReady(app, global),    AddGroup(app, global),   AddAbort(app, global),
      AddRollback(app, global), AddRelease(app, global), AddDrain(app, global),
      AddSmoke(app, global),    AddPush(app, global),    AddEngine(app, global),
      AddValidate(app, global), AddCan(app, global),     AddCompletion(app, line)};
  std::string wrong;
  switch (line.Parse(argc, argv, &wrong)) {
    case CommandLine::Outcome::kHelped:
      return kExitOk;
    case CommandLine::Outcome::kWrong:
      return UsageError(wrong);
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
