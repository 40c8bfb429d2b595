// Who takes part in a group: members with their leases, instances, nodes that are kept out, and
// who owns the group. Records of members and instances are changed only through this class, or by
// the steps of an update that their group takes.
//
// It keeps P6 (ReleaseMember comes only when no copy touches the member's memory), P8 (a lost
// member leaves nothing behind) and P9 (no trainer enters a group that another identity owns).
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_MEMBERSHIP_H_
#define REFITD_DAEMON_GROUP_MEMBERSHIP_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/group/group.h"
#include "daemon/group/instance_state.h"
#include "daemon/group/member_state.h"
#include "daemon/group/outbox.h"
#include "daemon/group/requests.h"
#include "daemon/group/tensor_table.h"

namespace refitd::group {

// Versions of different incarnations can't be compared, so a version is kept with its incarnation.
struct HeldVersion {
  Version version;
  uint64_t origin = 0;  // incarnation in which it was committed; 0: the rank did not say
  auto operator<=>(const HeldVersion&) const = default;
};

struct Member {
  MemberId id;
  MemberState state = MemberState::kAttached;
  bool engine = false;
  std::string instance;
  int rank = 0;
  int world_size = 0;
  int pid = 0;
  NodeId node;             // of the daemon that it is attached to
  std::string label;       // for messages
  std::string daemon;      // that daemon's id; empty: the coordinator's
  std::string identity;    // trainers
  bool any_owner = false;  // trainers: may enter groups of any owner
  // Trainers: another identity owns the group now. The rank's lease ends when no update runs.
  bool unwelcome = false;
  std::string takes_of;  // engines: the pattern of owners whose weights they take; empty: any
  DeliveryMode delivery = DeliveryMode::kInPlace;
  std::shared_ptr<const Manifest> manifest;
  std::shared_ptr<const void> manifest_counted;  // EngineIdentity::counted
  std::shared_ptr<const Layout> layout;
  uint64_t layout_digest = 0;
  uint64_t registrations = 0;       // layouts that the member has registered
  std::optional<HeldVersion> held;  // the version that its memory holds in full, if any
  uint64_t held_digest = 0;         // the ContentDigest that belongs to `held`; 0: not known
  // If the rank brought `held`, and that is a rollback: the version whose content it has.
  std::optional<Version> held_content;
  uint64_t back_digest = 0;   // the same of Instance::back
  bool shadowed = false;      // engines: its layout's regions have backs
  bool on_device = false;     // engines: memory is on a GPU
  bool catch_up = false;      // engines: may give, and be caught up
  bool wants_staged = false;  // engines: is sent SendStaged
  bool updated = false;       // engines: an update was committed to it in this lease
  bool verified = false;      // engines: the same, into the rank's present layout
  absl::Status refused;       // engines: not OK: a limit refused the rank's last layout
  int touching = 0;           // transfers and verifications that touch its memory (P6)
};

struct Instance {
  std::string name;
  int world_size = 0;
  InstanceState state = InstanceState::kForming;
  std::map<int, MemberId> ranks;      // attached
  std::string reason;                 // why it is dirty or was evicted
  std::optional<UpdateId> installed;  // the last update that committed with it
  // The version before the one that it serves, if the backs of all its ranks hold it in full: the
  // group committed it into the same layouts, and nothing was written to the backs since.
  std::optional<Version> back;
};

// Whether the state is in the lower row of instance_state.h: such an instance has no version (P2).
constexpr bool IsDirty(InstanceState state) {
  return state == InstanceState::kFormingDirty || state == InstanceState::kDirty ||
         state == InstanceState::kDirtyPreparing || state == InstanceState::kDirtyReady;
}
// Whether the state lies between Prepare and the outcome.
constexpr bool InUpdate(MemberState state) {
  return state == MemberState::kPreparing || state == MemberState::kReady;
}
constexpr bool InUpdate(InstanceState state) {
  return state == InstanceState::kCleanPreparing || state == InstanceState::kDirtyPreparing ||
         state == InstanceState::kCleanReady || state == InstanceState::kDirtyReady;
}
// The member as failures name it.
Suspect SuspectOf(const Member& member);
// The records of ranks that attach.
Member MemberOf(const TrainerAttached& e);
Member MemberOf(const EngineAttached& e);
// Formats a duration, as in "1.5 s".
std::string Seconds(Duration duration);
// Formats a list that may be long, as in "a, b, c and 4 more".
std::string Few(const std::vector<std::string>& names);

class Membership {
 public:
  Membership(std::string group, GroupSpec spec, Ownership::Rule owner_rule, Outbox* out,
             Requests* requests);

  const GroupSpec& spec() const { return spec_; }  // its trainer_ranks are those that attached
  const std::string& owner() const { return ownership_.owner(); }
  const std::map<MemberId, Member>& members() const { return members_; }
  const std::map<int, MemberId>& trainers() const { return trainers_; }
  const std::map<std::string, Instance>& instances() const { return instances_; }
  // The tensors that engine ranks declare. Each layout and manifest is entered when it comes, so
  // that Begin need not go through all of them.
  const std::shared_ptr<TensorTable>& declared() const { return declared_; }
  // Grows whenever other instances may be available, complete or registered than before.
  uint64_t changes() const { return changes_; }

  Member* Find(MemberId id);
  const Member* Find(MemberId id) const;
  // Null: no rank of the instance is attached.
  Instance* FindInstance(const std::string& name);
  const Instance* FindInstance(const std::string& name) const;
  std::string Label(MemberId id) const;
  // A failure whose suspect is that member.
  Failure Suspecting(MemberId id) const;
  // Whether a trainer rank is attached to that node.
  bool TrainsOn(NodeId node) const;
  // The attached trainer rank of that id. Null: there is none, and the call was refused.
  Member* Trainer(MemberId id, CallId call);

  // ---- attaching ----
  absl::Status CheckTrainer(const TrainerIdentity& who) const;
  // `held`: whether the group accepts the version that the rank says it holds.
  absl::Status CheckEngine(const EngineIdentity& who, const absl::Status& held) const;
  // The rank is a member from now on. Returns whether another identity owns the group by that, so
  // that attached trainers have to leave. `draining`: the member is sent SendDraining at once.
  bool EnterTrainer(Member member, bool draining);
  bool EnterEngine(Member member, const EngineIdentity& who, bool draining);
  // INVALID_ARGUMENT: another rank of the instance has backs where this rank has none, or the
  // reverse. A rank without pieces, such as the driver of an inference server, fits both.
  absl::Status CheckShadowed(const Member& member, const LayoutRegistered& e) const;
  void Register(Member* member, const LayoutRegistered& e);
  // The rank has no layout any more. No update may use its memory.
  void Withdraw(Member* member);
  // A limit refuses what the rank declares: its layout, or a manifest, with which it was not taken
  // in.
  void RefuseDeclared(Member* member, const absl::Status& why);
  // The last such refusal; OK: none since an update was assembled.
  const absl::Status& last_refusal() const { return last_refusal_; }
  void ForgetRefusal() { last_refusal_ = absl::OkStatus(); }
  // Not OK: too few instances are left that were not refused, so that waiting for them does not
  // help (P4). `why` OK: for the reason of which an attached rank was refused, if one was.
  absl::Status TooFewLeft(absl::Status why) const;

  // ---- leaving ----
  // The member's lease has ended. The record stays while copies touch its memory.
  void Lose(Member* member);
  void ReleaseIfQuiet(MemberId id);
  // Counts the copies that read or write the memory of a member; `by` is 1 when a copy begins and
  // -1 when it has ended.
  void Touch(MemberId id, int by);
  bool any_unwelcome() const { return any_unwelcome_; }
  // The unwelcome trainers whose memory no copy touches any more.
  std::vector<MemberId> TakeUnwelcome();
  absl::Status WhyUnwelcome(const Member& member) const;
  void Expel(MemberId id);
  // The group belongs to `by` from now on, or to nobody; instances hold no version.
  void Replace(const std::string& by);
  void NoteCommit() { ownership_.Committed(); }

  // ---- instances ----
  // Whether all ranks of the instance are attached and have registered what they have to.
  bool Complete(const Instance& instance) const;
  // Whether an update that is assembled now takes the instance in.
  bool Available(const Instance& instance) const;
  int64_t AvailableInstances() const;
  // The version that all ranks of the instance hold, of the same incarnation.
  std::optional<HeldVersion> VersionOf(const Instance& instance) const;
  // The instance's state, ranks or version have changed.
  void NoteChanged(const std::string& instance) { changed_instances_.insert(instance); }
  void NoteAllChanged();
  void MarkDirty(Instance* instance, std::string reason);
  bool any_instance_changed() const { return !changed_instances_.empty(); }
  // The names of instances, also of those that are gone, whose standing may have changed.
  std::set<std::string> TakeChangedInstances() { return std::exchange(changed_instances_, {}); }
  // Keeps the instances of a node out of updates, while it has members.
  void KeepOut(NodeId node, const std::string& why);
  // Why a complete instance takes part in no update: the node of one of its ranks is kept out.
  // Null: it takes part.
  const std::string* WhyKeptOut(const Instance& instance) const;
  std::string WhyKeptOut(NodeId node) const;

  // ---- what an update that is being opened needs ----
  // The verification of an update whose first rank names none.
  Verification DefaultVerification(Verification configured) const;
  using HasBegun = std::function<bool(int)>;  // a trainer rank
  // Whom the update waits for; `begun` tells which trainer ranks have begun.
  std::vector<std::string> Missing(const HasBegun& begun) const;
  void SuspectMissing(const HasBegun& begun, Failure* failure) const;

  void CheckInvariants() const;

 private:
  friend struct refitd::GroupForTests;

  void Admit(Member member, bool draining);
  absl::Status CheckEnginesTake(const std::string& identity) const;
  bool FindUnwelcome();
  void CompleteIfAllHere(Instance* instance);
  const Member* RefusedRank(const Instance& instance) const;
  void LetInIfEmpty(NodeId node);
  void CheckMembers() const;
  void CheckInstances() const;

  Outbox& out_;
  Requests& requests_;
  const std::string group_;
  GroupSpec spec_;  // constant, except trainer_ranks
  Ownership ownership_;
  bool any_unwelcome_ = false;  // a trainer is attached that may not stay
  std::map<MemberId, Member> members_;
  std::map<int, MemberId> trainers_;           // by rank
  std::map<std::string, Instance> instances_;  // by name
  // Names of instances whose standing may have changed since it was asked for last.
  std::set<std::string> changed_instances_;
  // Nodes whose instances updates leave out, with the reason. An entry goes with the node's last
  // member.
  std::map<NodeId, std::string> kept_out_;
  const std::shared_ptr<TensorTable> declared_;
  absl::Status last_refusal_;
  uint64_t changes_ = 0;
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_MEMBERSHIP_H_
