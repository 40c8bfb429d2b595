// validate: checks a configuration file of refitd without starting it.
#include <memory>
#include <string>

#include "daemon/config.h"
#include "daemon/policy/policy.h"
#include "daemon/refitctl/command.h"

namespace refitd::refitctl {

Command AddValidate(CommandApp app, const GlobalOptions&) {
  CommandApp sub = app.AddCommand("validate", "Check a configuration file of refitd", kConfigure);
  auto path = std::make_shared<std::string>();
  sub.Add("CONFIG", path.get(), "The file (textproto)").Required();
  return {sub, [path] {
            const auto loaded = LoadConfig({"--config", *path}, {});
            if (!loaded.ok()) {
              Fail(loaded.status());
              return static_cast<int>(kExitFailed);  // whatever its code: no daemon was asked
            }
            const auto policy = Policy::Make(PolicySettingsOf(loaded->config));
            if (!policy.ok()) return Fail(policy.status());
            std::string text = *path + ": valid. Nobody may do anything but:\n";
            for (const PolicyRule& rule : (*policy)->rules()) text += "  " + Explain(rule) + "\n";
            text +=
                "  the owner of a group, its first trainer's identity, may also be its engine and "
                "operator\n";
            for (const std::string& warning : loaded->warnings)
              text += "Warning: " + warning + "\n";
            Print(text);
            return static_cast<int>(kExitOk);
          }};
}

}  // namespace refitd::refitctl
