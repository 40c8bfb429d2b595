// The commands that read once: status, groups, members.
#include <memory>

#include "daemon/refitctl/command.h"
#include "daemon/refitctl/render.h"

namespace refitd::refitctl {

Command AddStatus(CLI::App* app, const GlobalOptions& global) {
  CLI::App* sub = app->add_subcommand("status", "The daemon: groups, instances, slots, resources");
  return {sub, [&global] {
            const auto status = OperatorClient(global).GetStatus();
            if (!status.ok()) return Fail(status.status());
            Print(global.json ? ToJson(*status, true) : RenderStatus(*status));
            return static_cast<int>(kExitOk);
          }};
}

Command AddGroups(CLI::App* app, const GlobalOptions& global) {
  CLI::App* sub = app->add_subcommand("groups", "The groups and their versions");
  return {sub, [&global] {
            const auto groups = OperatorClient(global).ListGroups();
            if (!groups.ok()) return Fail(groups.status());
            Print(global.json ? ToJson(*groups, true) : RenderGroups(groups->groups()));
            return static_cast<int>(kExitOk);
          }};
}

Command AddMembers(CLI::App* app, const GlobalOptions& global) {
  CLI::App* sub = app->add_subcommand("members", "The attached trainer and engine ranks");
  auto group = std::make_shared<std::string>();
  sub->add_option("--group", *group, "Only this group's");
  return {sub, [&global, group] {
            const auto members = OperatorClient(global).ListMembers(*group);
            if (!members.ok()) return Fail(members.status());
            Print(global.json ? ToJson(*members, true) : RenderMembers(members->members()));
            return static_cast<int>(kExitOk);
          }};
}

}  // namespace refitd::refitctl
