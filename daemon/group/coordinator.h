// A group on the daemon where it was created: Group decides; this class carries its decisions to
// the daemons that joined and brings their answers back.
//
// Keeps P5 (no part is issued before every node agreed to its header), P7 (parts are issued in part
// order), P4 (a silent daemon is lost after PeerLimits::peer; a collective, connecting and the wire
// lock have PeerLimits::wire) and P1 (a part counts as written when every node has reported and
// what the nodes received has the digests of what the root read). When a daemon is lost, its
// members are lost. If it takes part in an update whose data phase has begun, the update goes on
// without it, over another communicator, if it can; else the update is given up, since the other
// daemons share a communicator with it.
//
// An update whose members are all on this daemon needs no other daemon: Group's actions are then
// this machine's actions.
#ifndef REFITD_DAEMON_GROUP_COORDINATOR_H_
#define REFITD_DAEMON_GROUP_COORDINATOR_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "daemon/group/machine.h"

namespace refitd {

struct CoordinatorOptions {
  std::string name;
  std::string daemon_id;  // this daemon's own id
  uint64_t incarnation = 0;
  GroupSpec spec;
  GroupLimits limits;
  PeerLimits peer_limits;
  // These functions give ids that are unique in the daemon.
  std::function<UpdateId()> next_update;
  std::function<MemberId()> next_member;  // for members of other daemons
  std::function<CallId()> next_call;      // for their calls
  // The coordinator calls this before a member of another daemon attaches: OK lets the member
  // attach, any other status refuses it. Null: every member may attach.
  std::function<absl::Status()> admit_remote{};
  // What this daemon's policy says of an identity as the group's owner. Null: nothing.
  Ownership::Rule owner_rule{};
};

class Coordinator : public GroupMachine {
 public:
  explicit Coordinator(CoordinatorOptions options);
  ~Coordinator() override;

  using GroupMachine::Handle;
  void Handle(MachineEvent& event, TimePoint now, MachineActions* actions) override;
  std::optional<TimePoint> NextDeadline() const override;
  const std::string& name() const override;
  uint64_t incarnation() const override;
  const GroupSpec& spec() const override;
  bool has_members() const override;   // of any daemon
  bool has_trainers() const override;  // of any daemon
  const std::string& owner() const override;
  bool update_running() const override;
  bool catch_up_running() const override;
  bool is_coordinator() const override { return true; }
  absl::Status CanRegisterLayout(MemberId member) const override;
  std::optional<Version> version() const override;
  std::optional<Version> content() const override;
  MachineView View(TimePoint now) const override;
  std::optional<UpdateView> ViewUpdate(TimePoint now) const override;
  std::optional<UpdateView> ViewLatest(TimePoint now) const override;
  std::optional<UpdateMark> MarkLatest() const override;
  UpdateStatistics Statistics() const override;
  PastUpdate Past(Version version) const override;
  const ReadinessBook* readiness() const override;
  void CheckInvariants() const override;

  // Whether the daemon with that id and process may join now. FAILED_PRECONDITION: the id is this
  // daemon's own. ALREADY_EXISTS: another process with that id has a live link; joining may succeed
  // later. RESOURCE_EXHAUSTED: kMaxGroupDaemons. An older link of the same process is replaced when
  // NodeJoined comes. `address`: where the daemon connects from, for messages.
  absl::Status CanJoin(const std::string& daemon_id, const std::string& boot_id,
                       const std::string& address) const;
  // The layout that this report of an engine rank may share: another engine's, with the same
  // digest. Null: there is none, or the member is no engine rank. If the two are equal, which takes
  // long to find out and so is done without the daemon's mutex, the caller reports the known
  // object.
  std::shared_ptr<const Layout> KnownLayout(NodeId node, const PeerLayout& report) const;
  // How many layouts the coordinator compared itself; tests check the cost by it.
  int64_t layouts_compared() const;
  // How many members are attached to daemons that joined.
  size_t remote_members() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_COORDINATOR_H_
