// A group on a daemon that joined it: forwards what its members say to the coordinator, passes
// commands on to them, and moves its share of the bytes.
//
// Keeps P2 and P4 when the coordinator is lost, is silent (PeerLimits::peer), or tells no outcome
// of an update for that long after its deadline. Then every member's stream ends with UNAVAILABLE,
// so that ranks that answered Ready count as unknown; calls are answered, a bucket's after the
// last read of its source (P6); and no new transfer writes to members' memory.
#ifndef REFITD_DAEMON_GROUP_FOLLOWER_H_
#define REFITD_DAEMON_GROUP_FOLLOWER_H_

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "daemon/group/machine.h"

namespace refitd {

struct FollowerOptions {
  std::string name;
  std::string coordinator_address;
  PeerLimits peer_limits;
  std::function<UpdateId()> next_update;  // update ids for the executor, unique in the daemon
};

class Follower : public GroupMachine {
 public:
  // The caller has begun to join; LinkUp or LinkLost follows.
  explicit Follower(FollowerOptions options);
  ~Follower() override;

  using GroupMachine::Handle;
  void Handle(MachineEvent& event, TimePoint now, MachineActions* actions) override;
  std::optional<TimePoint> NextDeadline() const override;
  const std::string& name() const override;
  uint64_t incarnation() const override;
  const GroupSpec& spec() const override;
  bool has_members() const override;   // of this daemon
  bool has_trainers() const override;  // of this daemon
  const std::string& owner() const override;
  bool update_running() const override;  // this daemon takes part in an update
  bool is_coordinator() const override { return false; }
  absl::Status CanRegisterLayout(MemberId member) const override;
  std::optional<Version> version() const override;
  std::optional<Version> content() const override;
  MachineView View(TimePoint now) const override;
  UpdateStatistics Statistics() const override { return {}; }
  PastUpdate Past(Version version) const override;  // of updates that this daemon took part in
  const ReadinessBook* readiness() const override;
  // The readiness that was known when the coordinator was lost after this daemon had joined.
  // `here`: the instances that had ranks on this daemon. nullopt: the coordinator is not lost, or
  // had told nothing.
  struct LastReadiness {
    ReadinessBook book;
    std::set<std::string> here;
  };
  const std::optional<LastReadiness>& last_readiness() const;
  void CheckInvariants() const override;

  // See Worker. The caller makes the index without its mutex and hands it in with the command.
  std::vector<std::shared_ptr<const Layout>> LayoutsToIndex(const PeerPrepare& command) const;
  static absl::StatusOr<std::shared_ptr<const DestinationIndex>> MakeIndex(
      const std::vector<MemberId>& destinations,
      std::vector<std::shared_ptr<const Layout>> layouts);
  int64_t indices_made() const;

  // Whether the link is lost and no bytes of this group move any more. The caller may then destroy
  // the follower.
  bool finished() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_FOLLOWER_H_
