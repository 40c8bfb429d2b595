#include <vector>

#include "daemon/process/version.h"
#include "daemon/refitctl/command.h"
#include "transport/tls/grpc_credentials.h"

namespace refitd::refitctl {
namespace {

int Run(int argc, char** argv) {
  CLI::App app("Looks after refitd: status, progress, pushing checkpoints, reference engines.");
  app.footer(kExitCodeHelp);
  app.set_version_flag("--version", "refitctl " + std::string(kVersion));
  app.require_subcommand(1);
  app.fallthrough();  // the options below may also follow the command

  GlobalOptions global;
  std::string output = "table";
  app.add_option("--socket", global.socket,
                 "The daemon's unix socket (default /run/refitd/refitd.sock)")
      ->envname("REFITD_SOCKET");
  app.add_option("--address", global.address, "The daemon's HOST:PORT; goes before the socket")
      ->envname("REFITD_ADDRESS");
  app.add_option("--tls-certificate", global.tls.certificate,
                 "With --address: PEM file of your certificate and its chain")
      ->envname("REFITD_TLS_CERTIFICATE");
  app.add_option("--tls-key", global.tls.key, "PEM file of its private key")
      ->envname("REFITD_TLS_KEY");
  app.add_option("--tls-roots", global.tls.roots, "PEM file of the roots that sign daemons")
      ->envname("REFITD_TLS_ROOTS");
  app.add_option("--tls-server", global.tls.server,
                 "Who the daemon must be, such as spiffe://DOMAIN/refitd/* (default: its "
                 "certificate is for the host)")
      ->envname("REFITD_TLS_SERVER");
  app.add_flag("--insecure", global.insecure, "With --address: TCP without TLS")
      ->envname("REFITD_INSECURE");
  app.add_option("--timeout", global.timeout_seconds,
                 "Seconds to wait for the daemon and each of its answers (default 10)")
      ->check(CLI::Range(0.001, 86'400.0));
  app.add_option("-o,--output", output, "table or json (numbers of 64 bits as strings)")
      ->check(CLI::IsMember({"table", "json"}));

  const std::vector<Command> commands = {
      AddStatus(&app, global),   AddGroups(&app, global),  AddMembers(&app, global),
      AddNodes(&app, global),    AddBuckets(&app, global), AddWatch(&app, global),
      AddPush(&app, global),     AddEngine(&app, global),  AddPlan(&app, global),
      AddValidate(&app, global), AddDoctor(&app, global),  AddCan(&app, global),
      AddReady(&app, global)};
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // CLI11 treats help and version as errors of code 0.
    return app.exit(error) == 0 ? kExitOk : kExitUsage;
  }
  global.json = output == "json";
  for (const Command& command : commands) {
    if (command.app->parsed()) return command.run();
  }
  return kExitUsage;
}

}  // namespace
}  // namespace refitd::refitctl

int main(int argc, char** argv) {
  refitd::RequireTls13();
  return refitd::refitctl::Run(argc, argv);
}
