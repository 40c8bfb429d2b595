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
    for (const char* key : {"name", "coordinator", "nodes", "communicator", "communicator_state",
                            "wire_bytes_sent", "wire_bytes_received"}) {
      if (whole.contains(key))
        shown[key] = whole.at(key);  // only "communicator" may be absent: no communicator is open
    }
    out["groups"].push_back(std::move(shown));
  }
  return out.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace

Command AddStatus(CommandApp app, const GlobalOptions& global) {
  CommandApp sub =
      app.AddCommand("status", "The daemon: groups, instances, slots, resources", kLook);
  return {sub, [&global] {
            return Show(global, OperatorClient(global).Call(&Rpcs::GetStatus), RenderStatus);
          }};
}

Command AddGroups(CommandApp app, const GlobalOptions& global) {
  CommandApp sub = app.AddCommand("groups", "The groups and their versions", kLook);
  return {sub, [&global] {
            return Show(global, OperatorClient(global).Call(&Rpcs::ListGroups),
                        [](const auto& groups) { return RenderGroups(groups.groups()); });
          }};
}

Command AddMembers(CommandApp app, const GlobalOptions& global) {
  CommandApp sub = app.AddCommand("members", "The attached trainer and engine ranks", kLook);
  auto group = std::make_shared<std::string>();
  sub.Add("--group", group.get(), "Only this group's");
  return {sub, [&global, group] {
            return Show(global, OperatorClient(global).Call(&Rpcs::ListMembers, *group),
                        [](const auto& members) { return RenderMembers(members.members()); });
          }};
}

Command AddNodes(CommandApp app, const GlobalOptions& global) {
  CommandApp sub =
      app.AddCommand("nodes", "The daemons of each group, and the links between them", kLook);
  return {sub, [&global] {
            const auto status = OperatorClient(global).Call(&Rpcs::GetStatus);
            if (!status.ok()) return Fail(status.status());
            Print(global.json ? NodesJson(*status) : RenderNodes(status->groups()));
            return static_cast<int>(kExitOk);
          }};
}

Command AddBuckets(CommandApp app, const GlobalOptions& global) {
  CommandApp sub = app.AddCommand(
      "buckets", "How the buckets of a group's running update, or of its last one, went", kLook);
  auto group = std::make_shared<std::string>();
  sub.Add("--group", group.get(), "The group").Required();
  return {sub, [&global, group] {
            return Show(global, OperatorClient(global).Call(&Rpcs::GetUpdateStatistics, *group),
                        RenderBuckets);
          }};
}

}  // namespace refitd::refitctl
