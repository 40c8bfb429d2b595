#include "daemon/refitctl/top_screen.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "daemon/refitctl/render.h"

namespace refitd::refitctl {
namespace {

bool Runs(const v1::UpdateStatus& update) { return update.update_id() != 0 && !HasEnded(update); }

std::string RateWord(const ProgressMeter& meter) {
  return meter.bytes_per_second() > 0 ? HumanRate(meter.bytes_per_second()) : "-";
}

std::string Instances(const v1::GetStatusResponse& status) {
  Table table({"GROUP", "INSTANCE", "STATE", "VERSION", "LAG", "READY", "RANKS", "REASON"},
              {false, false, false, true, true, false, true});
  for (const auto& group : status.groups()) {
    for (const auto& instance : group.instances()) {
      const std::string& why =
          instance.reason().empty() ? instance.unready_reason() : instance.reason();
      // A joined daemon does not know how many ranks other daemons' instances have.
      table.Add({group.name(), instance.name(), instance.state(), VersionWord(instance),
                 instance.has_lag() ? fmt::format("{}", instance.lag()) : "-",
                 instance.ready() ? "yes" : "no",
                 instance.world_size() == 0
                     ? "-"
                     : fmt::format("{}/{}", instance.attached(), instance.world_size()),
                 OrDash(why)});
    }
  }
  return table.ToString();
}

// The table has what each daemon sent to each other one in the last compiled refit, and how fast;
// empty: no refit has run over several daemons.
std::string Links(const v1::GetStatusResponse& status) {
  Table table({"GROUP", "FROM", "TO", "LAST REFIT", "TIME", "RATE"},
              {false, false, false, true, true, true});
  bool any = false;
  for (const auto& group : status.groups()) {
    for (const auto& node : group.nodes()) {
      for (const auto& send : node.sends()) {
        const double rate =
            node.data_seconds() > 0 ? static_cast<double>(send.bytes()) / node.data_seconds() : 0;
        table.Add({group.name(), OrDash(node.daemon_id()), send.daemon_id(),
                   HumanBytes(send.bytes()), HumanSeconds(node.data_seconds()), HumanRate(rate)});
        any = true;
      }
    }
  }
  return any ? "\n" + table.ToString() : "";
}

}  // namespace

void TopScreen::Count(const v1::GroupStatus& group, double seconds) {
  Wire& wire = wires_[group.name()];
  if (wire.communicator != group.communicator()) wire = {group.communicator(), {}, {}};
  wire.sent.Add(seconds, group.wire_bytes_sent());
  wire.received.Add(seconds, group.wire_bytes_received());
  if (!Runs(group.update())) return;
  updates_[{group.name(), group.update().update_id()}].Add(group.update().elapsed_seconds(),
                                                           group.update().bytes());
}

std::string TopScreen::Groups(const v1::GetStatusResponse& status) {
  Table table({"GROUP", "STATE", "VERSION", "TRAINERS", "READY", "COMMITTED", "ABORTED", "SENT/s",
               "RECEIVED/s"},
              {false, false, true, true, true, true, true, true, true});
  std::string updates;
  for (const auto& group : status.groups()) {
    int ready = 0;
    for (const auto& instance : group.instances()) ready += instance.ready() ? 1 : 0;
    const Wire& wire = wires_[group.name()];
    table.Add({group.name(), group.state(), VersionWord(group),
               fmt::format("{}/{}", group.trainers(), group.spec().trainer_ranks()),
               fmt::format("{}/{}", ready, group.instances_size()),
               fmt::format("{}", group.updates_committed()),
               fmt::format("{}", group.updates_aborted()), RateWord(wire.sent),
               RateWord(wire.received)});
    for (const v1::UpdateStatus* update : {&group.update(), &group.catch_up()}) {
      if (update->update_id() == 0) continue;
      updates += RenderUpdate(*update, updates_[{group.name(), update->update_id()}]) + "\n";
    }
  }
  return table.ToString() + "\n" + updates;
}

std::string TopScreen::Render(const v1::GetStatusResponse& status, double seconds) {
  for (const auto& group : status.groups()) Count(group, seconds);
  std::string text =
      fmt::format("{} refitd {} {}, up {}; {} members, {} anonymous\n\n",
                  OrDash(status.daemon_id()), status.daemon_version(),
                  status.serving() ? "serving" : "draining", HumanSeconds(status.uptime_seconds()),
                  status.resources().members(), HumanBytes(status.resources().anonymous_bytes()));
  if (status.groups_size() == 0) return text + "no groups\n";
  return text + Groups(status) + "\n" + Instances(status) + Links(status);
}

}  // namespace refitd::refitctl
