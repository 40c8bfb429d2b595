// validate: checks a configuration file of refitd without starting it.
#include <memory>

#include "daemon/config.h"
#include "daemon/refitctl/command.h"

namespace refitd::refitctl {

Command AddValidate(CLI::App* app, const GlobalOptions&) {
  CLI::App* sub = app->add_subcommand("validate", "Check a configuration file of refitd");
  auto path = std::make_shared<std::string>();
  sub->add_option("CONFIG", *path, "The file (textproto)")->required();
  return {sub, [path] {
            const auto loaded = LoadConfig({"--config", *path}, {});
            if (!loaded.ok()) return Fail(loaded.status());
            Print(*path + ": valid\n");
            return static_cast<int>(kExitOk);
          }};
}

}  // namespace refitd::refitctl
