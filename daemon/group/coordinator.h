// The daemon on which a group was created: Group decides, this class carries its decisions to the
// daemons that joined and brings their answers back.
//
// Keeps P5 (no part is issued before every node agreed to its header), P7 (parts are issued in part
// order), P4 (a silent daemon is lost after PeerLimits::peer; a collective, connecting and the wire
// lock have PeerLimits::wire), P1 (a part counts as written when every node reported, and what the
// nodes received has the digests of what the root read). Loss of a daemon is the loss of its
// members; in the data phase, where it shares the communicator, the update is given up.
//
// An update whose members are all on this daemon takes the short way: Group's actions are this
// machine's actions.
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
  std::string daemon_id;  // its own
  uint64_t incarnation = 0;
  GroupSpec spec;
  GroupLimits limits;
  PeerLimits peer_limits;
  // Ids that are unique in the daemon.
  std::function<UpdateId()> next_update;
  std::function<MemberId()> next_member;  // for members of other daemons
  std::function<CallId()> next_call;      // for their calls
  // Whether one more member of another daemon may attach; else it is refused with this status.
  // Null: any may.
  std::function<absl::Status()> admit_remote{};
};

class Coordinator : public GroupMachine {
 public:
  explicit Coordinator(CoordinatorOptions options);
  ~Coordinator() override;

  void Handle(const MachineEvent& event, TimePoint now, MachineActions* actions) override;
  std::optional<TimePoint> NextDeadline() const override;
  const std::string& name() const override;
  uint64_t incarnation() const override;
  const GroupSpec& spec() const override;
  bool has_members() const override;   // of any daemon
  bool has_trainers() const override;  // of any daemon
  bool update_running() const override;
  bool is_coordinator() const override { return true; }
  absl::Status CanRegisterLayout(MemberId member) const override;
  std::optional<Version> version() const override;
  MachineView View(TimePoint now) const override;
  std::optional<UpdateView> ViewUpdate(TimePoint now) const override;
  std::optional<UpdateMark> MarkUpdate() const override;
  UpdateStatistics Statistics() const override;
  PastUpdate Past(Version version) const override;

  // Whether the daemon of that id and process may join now. FAILED_PRECONDITION: the id is this
  // daemon's own; ALREADY_EXISTS: it is that of another process whose link lives, which may try
  // again; RESOURCE_EXHAUSTED: kMaxGroupDaemons. An older link of the same process is replaced when
  // NodeJoined comes. `address`: where the daemon connects from, for the message.
  absl::Status CanJoin(const std::string& daemon_id, const std::string& boot_id,
                       const std::string& address) const;
  // Members of the daemons that joined.
  size_t remote_members() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_COORDINATOR_H_
