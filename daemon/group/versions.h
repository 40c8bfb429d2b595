// What a group's instances hold: the incarnation, the version that was committed last, and whether
// what ranks say they hold is believed.
//
// It keeps P3 (versions grow within an incarnation) and its share of P2 and P11 (what memory was
// found to hold outweighs what its rank says). Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_VERSIONS_H_
#define REFITD_DAEMON_GROUP_VERSIONS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/group/group.h"
#include "daemon/group/membership.h"
#include "daemon/group/outbox.h"

namespace refitd::group {

class Versions {
 public:
  Versions(std::string group, uint64_t incarnation, Membership* members, Outbox* out)
      : group_(std::move(group)), out_(*out), members_(*members), incarnation_(incarnation) {}

  uint64_t incarnation() const { return incarnation_; }
  const std::optional<Version>& last() const { return last_; }
  // If the last version is a rollback: the version whose content it has.
  const std::optional<Version>& content() const { return content_; }
  // The version that was committed before the last one; nullopt: none, or the last is a rollback.
  const std::optional<Version>& previous() const { return previous_; }
  // The version that the last one has rolled back; nullopt: the last is no rollback.
  const std::optional<Version>& rolled_back() const { return rolled_back_; }
  // The version whose content a rollback would bring back; there must be a previous version.
  Version previous_content() const { return previous_content_.value_or(*previous_); }
  // OK: the version is greater than all that were committed (P3).
  absl::Status CheckGreater(Version wanted) const;
  // Whether all ranks of the instance hold the group's version, of which there must be one.
  bool IsCurrent(const Instance& instance) const {
    return members_.VersionOf(instance) == HeldVersion{*last_, incarnation_};
  }

  // A rank that attaches says what it holds: whether that is possible, and what is believed of it.
  absl::Status CheckHeld(const EngineIdentity& who) const;
  void Bring(const EngineIdentity& who, Member* member);
  // The rank's daemon has read the memory that the rank registers, and found `content`; 0: it has
  // not read it.
  void CheckContent(Member* member, uint64_t content);
  // The version of this incarnation that the group itself committed to all ranks of the instance,
  // into their present layouts; nullopt: none.
  std::optional<Version> VerifiedOf(const Instance& instance) const;
  // The version is committed, and to that rank, whose memory was read back as `digest`; 0: not all
  // of it was read.
  void Commit(Version version);
  void Install(Member* member, uint64_t digest);
  // The version is committed: the content of the previous version is served again, and the last
  // version by no instance any more.
  void RollBack(Version version);
  // Starts another incarnation: no instance holds a version.
  void Replace(uint64_t incarnation);

  std::vector<InstanceStanding> TakeStandings();
  std::vector<InstanceStanding> Standings() const;
  void CheckInvariants() const;

 private:
  friend struct refitd::GroupForTests;

  struct Claim {
    HeldVersion held;
    uint64_t layouts = 0;  // a digest of the ranks' layouts
    uint64_t content = 0;  // a digest of the digests that the ranks brought
  };
  using Contents = std::map<std::pair<HeldVersion, uint64_t>, uint64_t>;

  bool Believed(const EngineIdentity& who) const;
  std::optional<Version> BroughtContent(const Instance& instance) const;
  std::optional<Claim> ClaimOf(const Instance& instance) const;
  Contents FindContents() const;
  void FindLineage();
  bool OfLineage(const Instance& instance, const HeldVersion& held) const;
  InstanceStanding StandingOf(const std::string& instance_name) const;

  const std::string group_;
  Outbox& out_;
  Membership& members_;
  uint64_t incarnation_;
  std::optional<Version> last_;  // committed in this incarnation
  std::optional<Version> content_;
  std::optional<Version> rolled_back_;
  std::optional<Version> previous_;
  std::optional<Version> previous_content_;  // if the previous version was a rollback
  // The versions that were rolled back last, of this incarnation: an instance that holds one of
  // them is not ready, however near the group's version it is. At most kRememberedUpdates.
  std::set<Version> undone_;
  // Whether a version was committed in an earlier incarnation: a rank brought it, or the group was
  // replaced.
  bool had_version_ = false;
  // Of the versions of earlier incarnations that clean instances brought, the one that most of them
  // hold, or the rollback that has undone it; nullopt: there is none, or the group has committed a
  // version itself.
  std::optional<HeldVersion> lineage_;
  // Those of them that are rollbacks, with the versions whose content they have.
  std::map<HeldVersion, Version> rollbacks_;
  // The content that most of the same instances brought, by version and by the digest of an
  // instance's layouts.
  Contents contents_;
  // The last version of this incarnation that was committed to each rank, with the digest of what
  // was read back, also of instances that are gone, by instance and rank: what a rank that comes
  // back says is compared with it. At most kMaxEngineRanks.
  std::map<std::pair<std::string, int>, std::pair<Version, uint64_t>> committed_to_;
  // Incarnations of this group before it was replaced: what they committed is not to be served.
  std::set<uint64_t> replaced_;  // at most kRememberedIncarnations
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_VERSIONS_H_
