// `group replace`, `group delete`, `abort`, `rollback`, `release` and `drain`: what an operator
// changes in a group.
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "daemon/process/flag_text.h"
#include "daemon/refitctl/command.h"
#include "transport/base/status.h"

namespace refitd::refitctl {
namespace {

constexpr std::chrono::milliseconds kDrainInterval{50};  // while an update runs

struct GroupOptions {
  std::string group;
  std::string reason = "refitctl abort";
};

int Replace(const GlobalOptions& global, const std::string& name) {
  const OperatorClient client(global);
  const auto known = client.Call(&Rpcs::GetGroup, name);
  if (!known.ok()) return Fail(known.status());
  v1::CreateGroupRequest request;
  request.set_group(name);
  *request.mutable_spec() = known->group().spec();
  request.set_replace(true);
  return Show(
      global, client.Call(&Rpcs::CreateGroup, request), [&](const v1::CreateGroupResponse& made) {
        return fmt::format(
            "group {}: begins anew as incarnation {:016x}, and its next version may be any; {} "
            "instances are dirty until the next commit\n",
            name, made.incarnation(), known->group().instances_size());
      });
}

int Delete(const GlobalOptions& global, const std::string& name) {
  return Show(global, OperatorClient(global).Call(&Rpcs::DeleteGroup, name),
              [&](const auto&) { return fmt::format("group {}: deleted\n", name); });
}

int Abort(const GlobalOptions& global, const GroupOptions& options) {
  v1::AbortUpdateRequest request;
  request.set_group(options.group);
  request.set_reason(options.reason);
  return Show(global, OperatorClient(global).Call(&Rpcs::AbortUpdate, request), [&](const auto&) {
    return fmt::format("group {}: the update was aborted\n", options.group);
  });
}

struct RollbackOptions {
  std::string group;
  int64_t version = -1;  // -1: whichever the group has
};

int Rollback(const GlobalOptions& global, const RollbackOptions& options) {
  v1::RollbackRequest request;
  request.set_group(options.group);
  if (options.version != -1) request.set_version(options.version);
  const auto render = [&](const v1::RollbackResponse& done) {
    std::string text = fmt::format("group {}: version {} has the content of version {}\n",
                                   options.group, done.version(), done.content_version());
    for (const v1::InstanceResult& instance : done.instances()) {
      if (instance.committed()) continue;
      text += fmt::format("  {}: {}\n", instance.instance(), instance.reason());
    }
    return text;
  };
  return Show(global, OperatorClient(global).Call(&Rpcs::Rollback, request), render);
}

int Release(const GlobalOptions& global, const std::string& name) {
  return Show(global, OperatorClient(global).Call(&Rpcs::ReleasePrevious, name), [&](const auto&) {
    return fmt::format("group {}: the next update may be staged\n", name);
  });
}

struct DrainOptions {
  std::string group;
  std::chrono::milliseconds wait{60'000};
};

// Asks again for the groups in which an update runs. One that is gone by then has been drained.
int Drain(const GlobalOptions& global, const DrainOptions& options) {
  const OperatorClient client(global);
  const auto deadline = std::chrono::steady_clock::now() + options.wait;
  auto drained = client.Call(&Rpcs::Drain, options.group);
  if (!drained.ok()) return Fail(drained.status());
  v1::DrainResponse all = *drained;
  while (all.running_size() > 0) {
    const std::string name = all.running(0);
    if (std::chrono::steady_clock::now() + kDrainInterval > deadline) {
      return Fail(Error(absl::StatusCode::kDeadlineExceeded,
                        "an update of group {} still runs after {} (--wait); no other one begins: "
                        "drain it again, or `refitctl abort` ends the update",
                        name, FormatDuration(options.wait)));
    }
    std::this_thread::sleep_for(kDrainInterval);
    drained = client.Call(&Rpcs::Drain, name);
    if (!drained.ok() && !absl::IsNotFound(drained.status())) return Fail(drained.status());
    if (drained.ok() && drained->running_size() > 0) continue;
    all.add_drained(name);
    all.mutable_running()->DeleteSubrange(0, 1);
  }
  if (global.json) {
    Print(ToJson(all, /*pretty=*/true));
    return kExitOk;
  }
  if (all.drained_size() == 0) {
    Print("nothing drained: no group here has a host name as coordinator\n");
  }
  for (const std::string& name : all.drained()) {
    Print(
        fmt::format("group {}: drained; its members come to where their coordinator's name "
                    "leads\n",
                    name));
  }
  return kExitOk;
}

}  // namespace

Command AddDrain(CommandApp app, const GlobalOptions& global) {
  CommandApp sub = app.AddCommand(
      "drain",
      "End this daemon's part in groups whose coordinator is a name, after the update that runs: "
      "their members come to the daemon that the name now resolves to",
      kChange);
  auto options = std::make_shared<DrainOptions>();
  sub.Add("--group", &options->group, "Only this group");
  sub.Add("--wait", &options->wait, "How long a running update may take to end");
  return {sub, [&global, options] { return Drain(global, *options); }};
}

Command AddGroup(CommandApp app, const GlobalOptions& global) {
  CommandApp sub = app.AddCommand("group", "Replace or delete a group", kChange);
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
  CommandApp sub = app.AddCommand("abort", "Abort the update of a group that runs", kChange);
  auto options = std::make_shared<GroupOptions>();
  sub.Add("GROUP", &options->group, "The group").Required();
  sub.Add("--reason", &options->reason, "The reason that members and the log get");
  return {sub, [&global, options] { return Abort(global, *options); }};
}

Command AddRollback(CommandApp app, const GlobalOptions& global) {
  CommandApp sub = app.AddCommand(
      "rollback", "Serve the version before again, in engines that still hold it", kChange);
  auto options = std::make_shared<RollbackOptions>();
  sub.Add("GROUP", &options->group, "The group").Required();
  sub.Add("--version", &options->version,
          "The version that is rolled back; refused if the group has another");
  return {sub, [&global, options] { return Rollback(global, *options); }};
}

Command AddRelease(CommandApp app, const GlobalOptions& global) {
  CommandApp sub = app.AddCommand(
      "release", "Let the next update be staged, though the version before is held", kChange);
  auto options = std::make_shared<GroupOptions>();
  sub.Add("GROUP", &options->group, "The group").Required();
  return {sub, [&global, options] { return Release(global, options->group); }};
}

}  // namespace refitd::refitctl
