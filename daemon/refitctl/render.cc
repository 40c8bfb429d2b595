#include "daemon/refitctl/render.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "daemon/refitctl/devices.h"
#include "transport/broadcast_method.h"

namespace refitd::refitctl {
namespace {

std::string MethodWord(v1::BroadcastMethod method) {
  const auto number = static_cast<size_t>(method);
  if (number < kBroadcastMethods) return std::string(kBroadcastMethodNames[number]);
  return fmt::format("method {}", static_cast<int>(method));  // from a newer daemon
}

// Why the instance is dirty, and what becomes of the version that it lacks.
std::string ReasonWord(const v1::InstanceStatus& instance) {
  const bool both = !instance.reason().empty() && !instance.catch_up().empty();
  return instance.reason() + (both ? "; " : "") + instance.catch_up();
}

// "7", or "7 (of 1a2b)" if another incarnation than the group's committed it.
std::string HeldWord(const v1::GroupStatus& group, const v1::InstanceStatus& instance) {
  std::string word = VersionWord(instance);
  if (instance.origin() == 0 || instance.origin() == group.incarnation()) return word;
  return fmt::format("{} (of {:x})", word, instance.origin());
}

std::string RenderInstances(const v1::GroupStatus& group) {
  Table table({"  INSTANCE", "STATE", "VERSION", "RANKS", "REASON"}, {false, false, true, true});
  for (const auto& instance : group.instances()) {
    // A joined daemon does not know how many ranks other daemons' instances have.
    const std::string ranks = instance.world_size() == 0 ? "-"
                                                         : fmt::format("{}/{}", instance.attached(),
                                                                       instance.world_size());
    table.Add({"  " + instance.name(), instance.state(), HeldWord(group, instance), ranks,
               OrDash(ReasonWord(instance))});
  }
  return table.ToString();
}

std::string RenderSlots(const v1::GroupStatus& group) {
  Table table({"  SLOT", "STATE", "WAITS FOR"}, {true});
  for (const auto& slot : group.slots()) {
    table.Add({fmt::format("{}", slot.slot()), slot.state(), OrDash(slot.holder())});
  }
  return table.ToString();
}

bool OnSeveralDaemons(const v1::GroupStatus& group) {
  return !group.coordinator().empty() || group.nodes_size() > 1;
}

// Describes this daemon's end of the group's communicator.
std::string RenderCommunicator(const v1::GroupStatus& group) {
  if (!group.has_communicator()) return "none";
  return fmt::format("{} {}, {} sent, {} received", group.communicator(),
                     OrDash(group.communicator_state()), HumanBytes(group.wire_bytes_sent()),
                     HumanBytes(group.wire_bytes_received()));
}

std::vector<std::string> NodeCells(const v1::NodeStatus& node) {
  // A daemon is never silent to itself.
  const std::string silent = node.state() == "self" ? "-" : HumanSeconds(node.silent_seconds());
  return {OrDash(node.daemon_id()), OrDash(node.address()), node.state(),
          fmt::format("{}", node.members()), silent};
}

// The node's share of the last refit over several nodes.
std::vector<std::string> RunCells(const v1::NodeStatus& node) {
  std::vector<std::string> to;
  for (const auto& send : node.sends()) {
    to.push_back(fmt::format("{} ({})", send.daemon_id(), HumanBytes(send.bytes())));
  }
  const auto rate = [&node](int64_t bytes) {
    return HumanBytes(static_cast<int64_t>(static_cast<double>(bytes) / node.data_seconds()));
  };
  return {OrDash(node.daemon_id()),          OrDash(fmt::format("{}", fmt::join(to, ", "))),
          HumanBytes(node.bytes_sent()),     HumanBytes(node.bytes_forwarded()),
          HumanBytes(node.bytes_received()), HumanSeconds(node.data_seconds()),
          rate(node.bytes_sent()),           rate(node.bytes_received())};
}

std::string RenderGroupNodes(const v1::GroupStatus& group) {
  Table table({"  NODE", "ADDRESS", "STATE", "MEMBERS", "SILENT"},
              {false, false, false, true, true});
  for (const auto& node : group.nodes()) {
    std::vector<std::string> cells = NodeCells(node);
    cells.front().insert(0, "  ");
    table.Add(std::move(cells));
  }
  return table.ToString();
}

std::string RenderPrevious(const v1::PreviousStatus& previous) {
  std::string text = fmt::format(
      "  version before: {}, {}", previous.version(),
      previous.refused().empty() ? "`refitctl rollback` serves it again" : previous.refused());
  if (!previous.held()) return text + "\n";
  const double seconds = static_cast<double>(previous.held_ms()) / 1000;
  return text + (previous.has_held_ms() ? fmt::format("; held for {}\n", HumanSeconds(seconds))
                                        : "; held until it is released\n");
}

std::string RenderGroupDetail(const v1::GroupStatus& group) {
  std::string text = fmt::format("\ngroup {}\n", group.name());
  if (group.spec().encrypted_data()) {
    text += "  between daemons: encrypted or not at all (encrypted_data)\n";
  }
  if (OnSeveralDaemons(group)) {
    text += fmt::format("  coordinator: {}\n  communicator: {}\n",
                        group.coordinator().empty() ? "this daemon" : group.coordinator(),
                        RenderCommunicator(group));
    text += RenderGroupNodes(group);
  }
  if (group.has_coordinator_moved()) {
    text += fmt::format(
        "  {} leads to {} now: `refitctl drain` lets this daemon's members come there\n",
        group.coordinator_moved().name(), fmt::join(group.coordinator_moved().addresses(), ", "));
  }
  if (group.has_content_version()) {
    text += fmt::format("  version {} has the content of version {}\n", group.version(),
                        group.content_version());
  }
  if (group.has_previous()) text += RenderPrevious(group.previous());
  if (group.instances_size() > 0) text += RenderInstances(group);
  if (group.slots_size() > 0) text += RenderSlots(group);
  if (group.has_update() && group.update().update_id() != 0) {
    text += fmt::format("  {}: {}\n", HasEnded(group.update()) ? "last update" : "update",
                        RenderUpdate(group.update(), ProgressMeter()));
  }
  if (group.has_catch_up()) {
    text += fmt::format("  {}: {}\n", HasEnded(group.catch_up()) ? "last catch-up" : "catch-up",
                        RenderUpdate(group.catch_up(), ProgressMeter()));
  }
  return text;
}

std::string RenderResources(const v1::ResourceStatus& resources) {
  return fmt::format(
      "{} members, {} regions of {}, staging pools {}, {} anonymous, {} threads, {} descriptors",
      resources.members(), resources.regions(), HumanBytes(resources.region_bytes()),
      HumanBytes(resources.pool_bytes()), HumanBytes(resources.anonymous_bytes()),
      resources.threads(), resources.descriptors());
}

// The arenas of each rank on a line of their own, and those that are kept of ranks that are gone.
std::string RenderArenas(const v1::GetStatusResponse& status) {
  std::string text;
  for (const v1::ArenaStatus& arena : status.arenas()) {
    if (!arena.kept()) {
      text += fmt::format("arenas     of group {} instance {} rank {}: {} a side on {}, flip: {}\n",
                          arena.group(), arena.instance(), arena.rank(),
                          HumanBytes(arena.front_bytes()), arena.device(),
                          arena.flip() == "host" ? "host (a copy from host memory)" : arena.flip());
      continue;
    }
    text += fmt::format(
        "kept       arenas of group {} instance {} rank {}, version {}: {} on {}, "
        "for {} more\n",
        arena.group(), arena.instance(), arena.rank(), arena.version(),
        HumanBytes(arena.front_bytes() + arena.back_bytes()), arena.device(),
        HumanSeconds(arena.seconds_left()));
  }
  return text;
}

std::string RenderWire(const v1::ResourceStatus& resources) {
  return fmt::format("{} sent, {} received between daemons",
                     HumanBytes(resources.wire_bytes_sent()),
                     HumanBytes(resources.wire_bytes_received()));
}

std::string Outcomes(const v1::UpdateStatus& update) {
  int committed = 0;
  std::string lost;
  for (const auto& instance : update.instances()) {
    if (instance.committed()) {
      ++committed;
      continue;
    }
    lost += fmt::format("; {}: {}", instance.instance(), OrDash(instance.reason()));
  }
  return fmt::format("{} of {} instances{}", committed, update.instances_size(), lost);
}

// The names of the update's instances that `wanted` selects: "a, b", "a, b, c, d and 4 others".
template <typename Wanted>
std::string Named(const v1::UpdateStatus& update, Wanted wanted) {
  constexpr size_t kMaxNamed = 4;
  std::vector<std::string> names;
  for (const auto& instance : update.instances()) {
    if (wanted(instance)) names.push_back(instance.instance());
  }
  const size_t others = names.size() - std::min(names.size(), kMaxNamed);
  names.resize(names.size() - others);
  const std::string text = fmt::format("{}", fmt::join(names, ", "));
  return others == 0 ? text : fmt::format("{} and {} others", text, others);
}

// "; paused 2.80 ms", or "; paused 2.80 ms (a) to 85 ms (b)"; and who flipped back.
std::string Pauses(const v1::UpdateStatus& update) {
  std::vector<std::pair<double, std::string>> pauses;
  for (const auto& instance : update.instances()) {
    if (!instance.has_pause_seconds()) continue;
    pauses.emplace_back(instance.pause_seconds(), instance.instance());
  }
  std::string text;
  if (!pauses.empty()) {
    const auto [least, most] = std::minmax_element(pauses.begin(), pauses.end());
    text = "; paused " + HumanSeconds(least->first);
    if (pauses.size() > 1) {
      text +=
          fmt::format(" ({}) to {} ({})", least->second, HumanSeconds(most->first), most->second);
    }
  }
  const std::string back = Named(update, [](const auto& i) { return i.flipped_back(); });
  return back.empty() ? text : fmt::format("{}; flipped back: {}", text, back);
}

// Whether the instance is in the running update still.
bool TakesPart(const v1::InstanceResult& instance) { return instance.reason().empty(); }

// Whether versions are written to arenas, beside the version that is served.
bool Stages(const v1::UpdateStatus& update) {
  const auto& state = update.state();
  if (state != "data" && state != "settling" && state != "verifying" && state != "staged") {
    return false;
  }
  return std::any_of(update.instances().begin(), update.instances().end(),
                     [](const auto& i) { return i.shadowed() && TakesPart(i); });
}

// Returns the update's state, or "staging" while it writes only to arenas and to instances that are
// paused anyway.
std::string StateWord(const v1::UpdateStatus& update) {
  const bool written = update.state() == "verifying" || update.state() == "staged";
  return Stages(update) && !written ? "staging" : update.state();
}

// Who serves while the update runs, and who is paused.
std::string ServingWord(const v1::UpdateStatus& update) {
  if (!Stages(update)) return "";
  const std::string serve =
      Named(update, [](const auto& i) { return i.shadowed() && TakesPart(i); });
  const std::string paused =
      Named(update, [](const auto& i) { return !i.shadowed() && TakesPart(i); });
  return fmt::format("; serving: {}{}{}", serve, paused.empty() ? "" : "; paused: ", paused);
}

// "policy v8": the group and the version; of a catch-up "policy v8 catch-up from a, b".
std::string LabelOf(const v1::UpdateStatus& update) {
  std::string label = fmt::format("{} v{}", update.group(), update.version());
  if (update.has_content_version()) {
    label += fmt::format(" rollback to v{}", update.content_version());
  }
  if (!update.catch_up()) return label;
  return fmt::format("{} catch-up from {}", label,
                     update.source_instances().empty()
                         ? "-"
                         : fmt::format("{}", fmt::join(update.source_instances(), ", ")));
}

// `line` and the note that a trainer gave: "policy v8 (step 1200)".
std::string WithNote(std::string_view line, std::string_view separator,
                     const v1::UpdateStatus& update) {
  if (update.note().empty()) return std::string(line);
  return fmt::format("{}{}({})", line, separator, update.note());
}

std::string RenderEnded(const v1::UpdateStatus& update) {
  const std::string label = WithNote(LabelOf(update), " ", update);
  if (update.outcome() != v1::UPDATE_OUTCOME_COMMITTED) {
    return fmt::format("{} {} after {}: {}{}", label, OrDash(update.state()),
                       HumanSeconds(update.elapsed_seconds()), OrDash(update.reason()),
                       Pauses(update));
  }
  if (update.has_content_version()) {
    return fmt::format("{} committed in {}, {}{}", label, HumanSeconds(update.elapsed_seconds()),
                       Outcomes(update), Pauses(update));
  }
  const double rate = update.elapsed_seconds() > 0
                          ? static_cast<double>(update.bytes()) / update.elapsed_seconds()
                          : 0;
  return fmt::format("{} committed: {} tensors, {} in {} ({}), {}{}", label, update.tensors(),
                     HumanBytes(update.bytes()), HumanSeconds(update.elapsed_seconds()),
                     HumanRate(rate), Outcomes(update), Pauses(update));
}

}  // namespace

bool IsComplete(const v1::InstanceStatus& instance) {
  // In these states an instance lacks ranks; docs/protocol.md lists all states.
  return instance.state() != "forming" && instance.state() != "forming_dirty" &&
         instance.state() != "gone";
}

int CompleteInstances(const v1::GroupStatus& group) {
  return static_cast<int>(
      std::count_if(group.instances().begin(), group.instances().end(), IsComplete));
}

std::string RenderUpdate(const v1::UpdateStatus& update, const ProgressMeter& meter) {
  if (HasEnded(update)) return RenderEnded(update);
  // The note comes last: a terminal that is too narrow cuts the note, not the progress.
  const std::string label = fmt::format("{} {:<10}", LabelOf(update), StateWord(update));
  const std::string line =
      ProgressLine(label, update.bytes(), update.total_bytes(), meter) + ServingWord(update);
  const std::string waits = update.waits_for().empty() ? "" : "; waits for " + update.waits_for();
  return WithNote(line + waits, "  ", update);
}

std::string RenderGroups(const google::protobuf::RepeatedPtrField<v1::GroupStatus>& groups) {
  Table table({"GROUP", "STATE", "VERSION", "TRAINERS", "INSTANCES", "COMMITTED", "ABORTED"},
              {false, false, true, true, true, true, true});
  for (const auto& group : groups) {
    table.Add({group.name(), group.state(), VersionWord(group),
               fmt::format("{}/{}", group.trainers(), group.spec().trainer_ranks()),
               fmt::format("{}", CompleteInstances(group)),
               fmt::format("{}", group.updates_committed()),
               fmt::format("{}", group.updates_aborted())});
  }
  return table.ToString();
}

std::string RenderMembers(const google::protobuf::RepeatedPtrField<v1::MemberStatus>& members) {
  Table table({"ID", "GROUP", "ROLE", "INSTANCE", "RANK", "DELIVERY", "DEVICE", "STATE", "PID",
               "MEMORY", "PIECES", "CLIENT"},
              {true, false, false, false, true, false, false, false, true, true, true});
  for (const auto& member : members) {
    table.Add({fmt::format("{}", member.id()), member.group(), member.role(),
               OrDash(member.instance()), fmt::format("{}/{}", member.rank(), member.world_size()),
               OrDash(member.delivery()), OrDash(member.device()), member.state(),
               member.pid() == 0 ? "-" : fmt::format("{}", member.pid()),
               HumanBytes(member.region_bytes()), fmt::format("{}", member.pieces()),
               OrDash(member.client())});
  }
  return table.ToString();
}

std::string RenderBuckets(const v1::GetUpdateStatisticsResponse& statistics) {
  if (!statistics.has_update()) return "no update yet\n";
  std::string text = RenderUpdate(statistics.update(), ProgressMeter()) + "\n";
  for (const auto& totals : statistics.pushed()) {
    text += fmt::format("{}: {} in {} buckets\n", MethodWord(totals.method()),
                        HumanBytes(totals.bytes()), totals.buckets());
  }
  Table table(
      {"BUCKET", "TRAINER", "SEQ", "TENSORS", "BYTES", "PARTS", "BROADCAST", "TIME", "RATE"},
      {true, true, true, true, true, true, false, true, true});
  for (const auto& bucket : statistics.buckets()) {
    const std::string rate = bucket.seconds() > 0
                                 ? HumanRate(static_cast<double>(bucket.bytes()) / bucket.seconds())
                                 : "-";
    table.Add({fmt::format("{}", bucket.group_seq()), fmt::format("{}", bucket.trainer_rank()),
               fmt::format("{}", bucket.seq()), fmt::format("{}", bucket.tensors()),
               HumanBytes(bucket.bytes()), fmt::format("{}", bucket.parts()),
               MethodWord(bucket.broadcast()), HumanSeconds(bucket.seconds()), rate});
  }
  text += table.ToString();
  if (statistics.buckets_left_out() > 0) {
    text += fmt::format("{} earlier buckets are not kept\n", statistics.buckets_left_out());
  }
  return text;
}

std::string RenderNodes(const google::protobuf::RepeatedPtrField<v1::GroupStatus>& groups) {
  Table nodes({"GROUP", "NODE", "ADDRESS", "STATE", "MEMBERS", "SILENT"},
              {false, false, false, false, true, true});
  Table runs({"GROUP", "NODE", "SENDS TO", "SENT", "FORWARDED", "RECEIVED", "TIME", "SENT/s",
              "RECEIVED/s"},
             {false, false, false, true, true, true, true, true, true});
  bool ran = false;
  std::string slow;
  Table links({"GROUP", "COORDINATOR", "COMMUNICATOR", "STATE", "SENT", "RECEIVED"},
              {false, false, true, false, true, true});
  for (const auto& group : groups) {
    for (const auto& node : group.nodes()) {
      std::vector<std::string> cells = NodeCells(node);
      cells.insert(cells.begin(), group.name());
      nodes.Add(std::move(cells));
      if (!node.slow().empty()) {
        slow +=
            fmt::format("\ngroup {}: {} is slow, so updates leave its instances to catch-ups: {}\n",
                        group.name(), node.daemon_id(), node.slow());
      }
      if (node.data_seconds() <= 0) continue;
      ran = true;
      cells = RunCells(node);
      cells.insert(cells.begin(), group.name());
      runs.Add(std::move(cells));
    }
    links.Add({group.name(), group.coordinator().empty() ? "this daemon" : group.coordinator(),
               group.has_communicator() ? fmt::format("{}", group.communicator()) : "-",
               OrDash(group.communicator_state()), HumanBytes(group.wire_bytes_sent()),
               HumanBytes(group.wire_bytes_received())});
  }
  return nodes.ToString() + "\n" + links.ToString() + (ran ? "\n" + runs.ToString() : "") + slow;
}

std::string RenderStatus(const v1::GetStatusResponse& status) {
  std::string text =
      fmt::format("refitd {} {}, up {}\n", status.daemon_version(),
                  status.serving() ? "serving" : "draining", HumanSeconds(status.uptime_seconds()));
  text += fmt::format("daemon     {}\n", OrDash(status.daemon_id()));
  text += fmt::format("build      {}\n", status.build());
  text += fmt::format("listens    {}\n", fmt::join(status.listeners(), ", "));
  for (const auto& transport : status.transports()) {
    text += fmt::format("transport  {}: {}{}\n", transport.name(),
                        transport.available() ? "" : "not available: ", transport.detail());
    text += RenderCollectives(transport);
  }
  text += fmt::format("holds      {}\n", RenderResources(status.resources()));
  text += fmt::format("wire       {}\n", RenderWire(status.resources()));
  text += RenderArenas(status);
  if (status.groups_size() == 0) return text + "no groups\n";
  text += "\n" + RenderGroups(status.groups());
  for (const auto& group : status.groups()) text += RenderGroupDetail(group);
  return text;
}

UpdateBoard::Change UpdateBoard::Apply(const v1::UpdateStatus& update) {
  const uint64_t id = update.update_id();
  if (HasEnded(update)) {
    running_.erase(id);
    if (id <= newest_ended_) return {};
    newest_ended_ = id;
    if (update.outcome() != v1::UPDATE_OUTCOME_COMMITTED) ++aborted_;
    return {{RenderUpdate(update, ProgressMeter())}, true};
  }
  if (id <= newest_ended_ && running_.count(id) == 0) return {};
  Running& running = running_[id];
  running.meter.Add(update.elapsed_seconds(), update.bytes());
  std::string line = RenderUpdate(update, running.meter);
  const bool changed = line != running.line;
  running.line = std::move(line);
  return {{}, changed};
}

std::vector<std::string> UpdateBoard::Lines() const {
  std::vector<std::string> lines;
  for (const auto& [id, running] : running_) lines.push_back(running.line);
  return lines;
}

}  // namespace refitd::refitctl
