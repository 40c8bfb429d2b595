#include "daemon/refitctl/top_screen.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <vector>

#include "daemon/refitctl/render.h"

namespace refitd::refitctl {
namespace {

constexpr size_t kMaxNamed = 4;  // of those that are waited for

bool Runs(const v1::UpdateStatus& update) { return update.update_id() != 0 && !HasEnded(update); }

std::string RateWord(const ProgressMeter& meter) {
  return meter.bytes_per_second() > 0 ? HumanRate(meter.bytes_per_second()) : "-";
}

// Ranks that have not answered, by the states of docs/protocol.md.
void AddRanks(const v1::GroupStatus& group, const v1::ListMembersResponse& members,
              std::vector<std::string>* waited) {
  for (const v1::MemberStatus& member : members.members()) {
    if (member.group() != group.name()) continue;
    if (member.role() == "engine" && member.state() == "preparing") {
      waited->push_back(fmt::format("{} rank {} (Ready)", member.instance(), member.rank()));
    }
    if (member.role() == "trainer" && member.state() == "attached") {
      waited->push_back(fmt::format("trainer rank {} (Begin)", member.rank()));
    }
  }
}

void AddMissing(const v1::GroupStatus& group, std::vector<std::string>* waited) {
  const int trainers = group.spec().trainer_ranks() - group.trainers();
  if (trainers > 0) waited->push_back(fmt::format("{} trainer ranks to attach", trainers));
  const int instances = group.spec().min_instances() - CompleteInstances(group);
  if (instances > 0) waited->push_back(fmt::format("{} instances to attach", instances));
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

std::string WaitedFor(const v1::GroupStatus& group, const v1::ListMembersResponse& members) {
  if (!Runs(group.update())) return "";
  std::vector<std::string> waited;
  if (group.update().state() == "opening") AddMissing(group, &waited);
  AddRanks(group, members, &waited);
  for (const auto& slot : group.slots()) {
    if (!slot.holder().empty()) {
      waited.push_back(fmt::format("slot {}: {}", slot.slot(), slot.holder()));
    }
  }
  if (waited.size() <= kMaxNamed) return fmt::format("{}", fmt::join(waited, ", "));
  const size_t others = waited.size() - kMaxNamed;
  waited.resize(kMaxNamed);
  return fmt::format("{} and {} others", fmt::join(waited, ", "), others);
}

void TopScreen::Count(const v1::GroupStatus& group, double seconds) {
  Wire& wire = wires_[group.name()];
  if (wire.communicator != group.communicator()) wire = {group.communicator(), {}, {}};
  wire.sent.Add(seconds, group.wire_bytes_sent());
  wire.received.Add(seconds, group.wire_bytes_received());
  if (!Runs(group.update())) return;
  updates_[{group.name(), group.update().update_id()}].Add(group.update().elapsed_seconds(),
                                                           group.update().bytes());
}

std::string TopScreen::Groups(const v1::GetStatusResponse& status,
                              const v1::ListMembersResponse& members) {
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
    const std::string waited = WaitedFor(group, members);
    if (!waited.empty()) updates += fmt::format("  waits for {}\n", waited);
  }
  return table.ToString() + "\n" + updates;
}

std::string TopScreen::Render(const v1::GetStatusResponse& status,
                              const v1::ListMembersResponse& members, double seconds) {
  for (const auto& group : status.groups()) Count(group, seconds);
  std::string text =
      fmt::format("{} refitd {} {}, up {}; {} members, {} anonymous\n\n",
                  OrDash(status.daemon_id()), status.daemon_version(),
                  status.serving() ? "serving" : "draining", HumanSeconds(status.uptime_seconds()),
                  status.resources().members(), HumanBytes(status.resources().anonymous_bytes()));
  if (status.groups_size() == 0) return text + "no groups\n";
  return text + Groups(status, members) + "\n" + Instances(status) + Links(status);
}

}  // namespace refitd::refitctl
