// The readiness of a group's instances: whether requests may be sent to an instance.
//
// An instance is ready while it is clean, and at the group's version or at most
// GroupSpec::max_lag behind it. The coordinator decides what each instance stands at and tells the
// daemons that joined (PeerReadiness), so that every daemon of the group can answer for every
// instance. An instance without a version of the group's incarnation can't be compared with the
// group: it is ready only while the group has committed no version. Even then it is not ready if it
// holds no version at all while the group is known to have had one: another instance brought a
// version of an earlier incarnation, or the group was replaced. Of instances that bring versions of
// earlier incarnations one lineage is ready: the version that most of them hold, and what is at
// most max_lag behind it in the same incarnation. The others wait for the next version. An instance
// with a version that was rolled back is not ready, however little it is behind. An instance
// whose update has written nothing yet still holds its version and stays ready; from the first byte
// to the commit it is dirty (P2), hence not ready.
//
// Pure. ReadinessBook is not thread-safe.
#ifndef REFITD_DAEMON_GROUP_READINESS_H_
#define REFITD_DAEMON_GROUP_READINESS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "transport/base/ids.h"

namespace refitd {

// The largest number of instances in one PeerReadiness, so that the message fits into the smallest
// limit on messages that a daemon may have (kMinPeerMessageBytes).
inline constexpr size_t kMaxStandings = 256;

// The state of an instance, as far as readiness depends on it.
enum class Standing : uint8_t {
  kGone = 0,      // no rank is attached
  kForming = 1,   // ranks or layouts are missing
  kDirty = 2,     // its weights are dirty or unknown
  kClean = 3,     // complete, and not dirty
  kUpdating = 4,  // clean, and in an update that has not written to it yet
  kEmpty = 5,     // complete, but without a version in a group that has had one
  kStray = 6,     // clean, but its version is not of the lineage that the group's instances hold
  kUndone = 7,    // clean, but its version was rolled back
};
inline constexpr int kStandings = 8;
std::string_view Name(Standing standing);

struct InstanceStanding {
  std::string instance;
  Standing standing = Standing::kGone;
  // The version that all its ranks hold, if it was committed in the group's incarnation.
  std::optional<Version> version;
  bool operator==(const InstanceStanding&) const = default;
};

// Tells a joined daemon what has changed.
struct PeerReadiness {
  // True for the first message on a link: what was known before is void.
  bool anew = false;
  std::optional<Version> version;  // the group's
  // Those that changed; at most kMaxStandings. The messages to all daemons share them: a commit
  // changes all instances. Null: none.
  std::shared_ptr<const std::vector<InstanceStanding>> instances{};
};
inline std::shared_ptr<const std::vector<InstanceStanding>> Shared(
    std::vector<InstanceStanding> standings) {
  return std::make_shared<const std::vector<InstanceStanding>>(std::move(standings));
}

struct Readiness {
  bool ready = false;
  // By how much the instance's version is behind the group's; nullopt: the two can't be compared.
  std::optional<int64_t> lag;
  std::string reason;  // why the instance is not ready; empty: it is ready
};

// Keeps the standings and versions of the instances of one group.
class ReadinessBook {
 public:
  // Forgets everything.
  void Clear() { *this = ReadinessBook(); }
  // Returns whether something has changed.
  bool Set(const InstanceStanding& standing);
  bool SetVersion(std::optional<Version> version);
  void Take(const PeerReadiness& news);

  // The coordinator is lost: nobody knows how the running update ends, so that instances in it are
  // unknown, which counts as dirty (P2).
  void LoseCoordinator();
  // Prepare was sent to the instance's ranks.
  void MarkUnknown(const std::string& instance);

  // nullopt: the instance is not known.
  std::optional<Readiness> Of(const std::string& instance, int64_t max_lag) const;
  const std::map<std::string, InstanceStanding>& instances() const { return instances_; }
  std::optional<Version> version() const { return version_; }

  // Everything, in messages of at most kMaxStandings instances; at least one message.
  std::vector<PeerReadiness> All() const;
  // Tells of these, with the group's version.
  std::vector<PeerReadiness> NewsOf(std::vector<InstanceStanding> standings) const;

 private:
  std::optional<Version> version_;
  std::map<std::string, InstanceStanding> instances_;  // none is kGone
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_READINESS_H_
