// The inside of Coordinator: Group decides, and this class carries events and actions between
// Group, this daemon's Worker, and the machines of the nodes. Only coordinator.cc and
// machine_invariants.cc include it.
//
// A machine returns what it wants done as Steps, which are carried out in order (Perform) when the
// machine has returned: so no machine is entered twice.
#ifndef REFITD_DAEMON_GROUP_COORDINATOR_IMPL_H_
#define REFITD_DAEMON_GROUP_COORDINATOR_IMPL_H_

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/group/communicator.h"
#include "daemon/group/coordinator.h"
#include "daemon/group/joined_nodes.h"
#include "daemon/group/left_out.h"
#include "daemon/group/on_nodes.h"
#include "daemon/group/remote_members.h"
#include "daemon/group/update_on_nodes.h"
#include "daemon/group/worker.h"

namespace refitd {

struct Coordinator::Impl {
  using Around = coordinator::Around;
  using NodeCommands = coordinator::NodeCommands;
  using RemoteMembers = coordinator::RemoteMembers;
  using Steps = coordinator::Steps;
  using UpdateOnNodes = coordinator::UpdateOnNodes;
  using WhyDown = coordinator::WhyDown;

  explicit Impl(CoordinatorOptions coordinator_options);

  // ---- events ----
  void Handle(MachineEvent& event);
  void On(GroupEvent& event);
  void On(const NodeJoined& e);
  void Tick();
  std::optional<TimePoint> NextDeadline() const;

  // ---- reports of a node (also of the coordinator's own worker) ----
  void Report(NodeId node, PeerReport& report);
  void On(NodeId node, const PeerAttach& r);
  void On(NodeId node, const MemberLost& r);
  void On(NodeId node, const PeerLayout& r);
  void On(NodeId node, PeerCall& r);
  void On(NodeId node, const CallGone& r);
  template <typename MemberEvent>
  void FeedOf(NodeId node, MemberEvent event);
  void Opened(NodeId node, const CommunicatorOpened& r);
  void CameUp(NodeId node, const CommunicatorUp& r);
  // Ends the node's link over a report that no correct daemon sends, and changes nothing else.
  void RefuseReport(NodeId node, const std::string& what);

  // ---- the group's actions ----
  void Feed(GroupEvent event);
  void Route(GroupAction action);
  bool RouteToNode(GroupAction* action);
  bool ReplyToNode(Reply* reply);
  bool RefuseOnNode(RefuseMember* refusal);
  void Announce();
  void End(const UpdateEnded& a);

  // ---- what machines ask for ----
  Around Surroundings(Steps* steps);
  // Calls `ask(surroundings)` and carries out the steps that it asks for.
  template <typename Ask>
  void Take(const Ask& ask) {
    Steps steps;
    ask(Surroundings(&steps));
    Perform(std::move(steps));
  }
  // Steps of an update that has ended meanwhile are left out.
  void Perform(Steps steps);
  void Do(SendCommand& step) { Send(step.node, std::move(step.command)); }
  void Do(GroupEvent& step);
  void Do(const LogLine& step) { Act(GroupAction(step)); }
  void Do(const coordinator::WireBroken&) { EndCommunicator(); }
  void Do(const coordinator::RanksChanged&) { EnsureCommunicator(); }
  void Do(const coordinator::DropSuspect& step);
  void Do(const coordinator::ProgramEnded& step);
  void Send(NodeId node, PeerCommand command);
  void Send(NodeCommands commands);
  void SendNews();

  // ---- the communicator ----
  // How long one attempt to bring it up may take.
  Duration AttemptLimit() const;
  void EnsureCommunicator();
  void EndCommunicator();
  void JudgeCommunicator();
  // Goes on without the suspects, or gives the update up.
  void CommunicatorFailed(const std::set<NodeId>& suspects, const WhyDown& why);
  void SearchOn(const std::set<NodeId>& candidates);
  void JudgeSearch();

  // ---- nodes that go ----
  void LoseNode(NodeId node, const std::string& reason);
  // Ends the nodes' links.
  template <typename Nodes>
  void Drop(const Nodes& gone, const absl::Status& why) {
    for (const NodeId node : gone) {
      Act(PeerAction(DropNode{node, why}));
      LoseNode(node, std::string(why.message()));
    }
  }
  void LeaveOut(NodeId node);
  // Called after the clean-up limit: nodes that have not ended their share of the update count as
  // lost.
  void DropOwing();

  bool update_runs() const { return update.has_value() && !update->record().abandoned; }
  Worker::Output Out() { return {actions, &own_reports}; }
  template <typename Action>
  void Act(Action action) {
    actions->push_back(std::move(action));
  }

  // ---- what must hold after every event (machine_invariants.cc) ----
  // The part of the invariants that costs nothing, checked after every event.
  void CheckState() const;
  void CheckInvariants() const;

  const CoordinatorOptions options;
  Group group;
  Worker worker;
  ReadinessBook book;  // of all instances, between events
  coordinator::JoinedNodes nodes;
  RemoteMembers remotes;
  coordinator::MemberLayouts layouts;  // of all members that registered one
  std::map<CallId, std::shared_ptr<const CheckedBucket>>
      buckets;                        // of this daemon's trainers, until their reply
  std::map<NodeId, ProgramId> plans;  // the program whose plan the node has
  std::optional<UpdateOnNodes> update;
  std::optional<coordinator::Communicator> communicator;
  uint64_t next_communicator = 1;
  coordinator::LeftOut left_out;
  coordinator::LastRun last_run;

  // These are set only during one Handle.
  TimePoint now;
  MachineActions* actions = nullptr;
  std::vector<PeerReport> own_reports;
  std::deque<GroupEvent> events;
  bool feeding = false;
  bool overdue = false;  // CleanUpOverdue came
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_COORDINATOR_IMPL_H_
