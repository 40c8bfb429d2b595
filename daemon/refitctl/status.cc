// The commands that ask the daemon once: status, groups, members, nodes, buckets.
#include <memory>
#include <nlohmann/json.hpp>

#include "daemon/refitctl/command.h"
#include "daemon/refitctl/render.h"

namespace refitd::refitctl {
namespace {

// The fields that `nodes` shows, by their proto names; `groups` shows the rest of a group.
std::string NodesJson(const v1::GetStatusResponse& status) {
  nlohmann::ordered_json out;
  out["daemon_id"] = status.daemon_id();
  out["groups"] = nlohmann::json::array();
  for (const v1::GroupStatus& group : status.groups()) {
    const auto whole =
        nlohmann::ordered_json::parse(ToJson(group, false), nullptr, /*allow_exceptions=*/false);
    nlohmann::ordered_json shown;
    for (const char* key : {"name", "coordinator", "nodes", "epoch", "epoch_state",
                            "wire_bytes_sent", "wire_bytes_received"}) {
      if (whole.contains(key)) shown[key] = whole.at(key);  // absent if no epoch is open
    }
    out["groups"].push_back(std::move(shown));
  }
  return out.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace

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

Command AddNodes(CLI::App* app, const GlobalOptions& global) {
  CLI::App* sub =
      app->add_subcommand("nodes", "The daemons of each group, and the links between them");
  return {sub, [&global] {
            const auto status = OperatorClient(global).GetStatus();
            if (!status.ok()) return Fail(status.status());
            Print(global.json ? NodesJson(*status) : RenderNodes(status->groups()));
            return static_cast<int>(kExitOk);
          }};
}

Command AddBuckets(CLI::App* app, const GlobalOptions& global) {
  CLI::App* sub = app->add_subcommand(
      "buckets", "How the buckets of a group's running update, or of its last one, went");
  auto group = std::make_shared<std::string>();
  sub->add_option("--group", *group, "The group")->required();
  return {sub, [&global, group] {
            const auto statistics = OperatorClient(global).GetUpdateStatistics(*group);
            if (!statistics.ok()) return Fail(statistics.status());
            Print(global.json ? ToJson(*statistics, true) : RenderBuckets(*statistics));
            return static_cast<int>(kExitOk);
          }};
}

}  // namespace refitd::refitctl
