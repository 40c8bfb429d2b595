// `group replace`, `group delete` and `abort`: what an operator changes in a group.
#include <memory>
#include <string>

#include "daemon/refitctl/command.h"
#include "transport/base/status.h"

namespace refitd::refitctl {
namespace {

struct GroupOptions {
  std::string group;
  std::string reason = "refitctl abort";
};

int Replace(const GlobalOptions& global, const std::string& name) {
  const OperatorClient client(global);
  const auto known = client.GetGroup(name);
  if (!known.ok()) return Fail(known.status());
  v1::CreateGroupRequest request;
  request.set_group(name);
  *request.mutable_spec() = known->group().spec();
  request.set_replace(true);
  const auto made = client.CreateGroup(request);
  if (!made.ok()) return Fail(made.status());
  Print(global.json
            ? ToJson(*made, /*pretty=*/true)
            : fmt::format("group {}: begins anew as incarnation {:016x}, and its next version may "
                          "be any; {} instances are dirty until the next commit\n",
                          name, made->incarnation(), known->group().instances_size()));
  return kExitOk;
}

int Delete(const GlobalOptions& global, const std::string& name) {
  const auto deleted = OperatorClient(global).DeleteGroup(name);
  if (!deleted.ok()) return Fail(deleted.status());
  Print(global.json ? ToJson(*deleted, /*pretty=*/true) : fmt::format("group {}: deleted\n", name));
  return kExitOk;
}

int Abort(const GlobalOptions& global, const GroupOptions& options) {
  const auto aborted = OperatorClient(global).AbortUpdate(options.group, options.reason);
  if (!aborted.ok()) return Fail(aborted.status());
  Print(global.json ? ToJson(*aborted, /*pretty=*/true)
                    : fmt::format("group {}: the update was aborted\n", options.group));
  return kExitOk;
}

}  // namespace

Command AddGroup(CommandApp app, const GlobalOptions& global) {
  CommandApp sub = app.AddCommand("group", "Replace or delete a group");
  auto options = std::make_shared<GroupOptions>();
  CommandApp replace = sub.AddCommand(
      "replace",
      "Begin the group anew, so that its next version may be any number, also a smaller one; marks "
      "every instance dirty, ends the trainers' leases");
  replace.Add("GROUP", &options->group, "The group").Required();
  CommandApp remove = sub.AddCommand("delete", "Delete a group without members");
  remove.Add("GROUP", &options->group, "The group").Required();
  sub.RequireCommand();
  return {sub, [&global, options, replace] {
            return replace.parsed() ? Replace(global, options->group)
                                    : Delete(global, options->group);
          }};
}

Command AddAbort(CommandApp app, const GlobalOptions& global) {
  CommandApp sub = app.AddCommand("abort", "Abort the update of a group that runs");
  auto options = std::make_shared<GroupOptions>();
  sub.Add("GROUP", &options->group, "The group").Required();
  sub.Add("--reason", &options->reason, "What members and the log are told");
  return {sub, [&global, options] { return Abort(global, *options); }};
}

}  // namespace refitd::refitctl
