// The instances that take part in an update: which ranks they have, where their bytes go, who is
// ready, who was evicted, and which outcome each of their ranks gets.
//
// It keeps P1 (an instance that was not written in full is not committed), P2 (an instance is dirty
// from its first byte to the commit, and its ranks are sent that) and P6 (a rank is sent that it
// may go on only when no copy touches its instance's memory). Pure; not thread-safe: lives inside
// its update.
#ifndef REFITD_DAEMON_GROUP_PARTICIPANTS_H_
#define REFITD_DAEMON_GROUP_PARTICIPANTS_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "daemon/group/catalog.h"
#include "daemon/group/group.h"
#include "daemon/group/membership.h"
#include "daemon/group/outbox.h"
#include "daemon/group/update_state.h"
#include "daemon/group/versions.h"

namespace refitd::group {

// An instance that was complete when the update was prepared.
struct Participant {
  std::string instance;
  std::vector<MemberId> members;  // by rank
  size_t unready = 0;             // ranks that have not answered Ready
  bool ready = false;             // all its ranks have answered Ready
  bool shadowed = false;          // the update writes to its backs, while it serves
  bool prepared = false;          // its ranks were sent Prepare
  bool written = false;           // the update has written to what the instance serves
  bool evicted = false;
  bool informed = false;               // its ranks were sent Aborted
  bool flipped_back = false;           // ranks that were to flip were sent Aborted
  std::set<MemberId> processing{};     // ranks that were sent Staged, and are waited for
  bool told_staged = false;            // some of its ranks were sent Staged
  TimePoint asked;                     // when its ranks were sent Prepare
  std::optional<TimePoint> stopped{};  // when the first of its ranks stopped
  std::optional<Duration> pause{};     // from there until they were sent the outcome
  std::string reason;                  // of the eviction
  Failure failure;                     // of the eviction
  int touching = 0;                    // transfers and verifications that touch its memory
};

class UpdateParticipants {
 public:
  using TakesIn = std::function<bool(const Instance&)>;

  UpdateParticipants(const UpdateRecord& update, Membership* members, Outbox* out)
      : update_(update), members_(*members), out_(*out) {}

  // ---- assembling ----

  // Makes a participant of every instance that `takes_in` accepts. `others`: members of the update
  // that belong to no participant. `kept`: the catalog of an earlier update, which is replaced if
  // it does not fit.
  absl::Status Assemble(const TakesIn& takes_in, const std::vector<MemberId>& others,
                        std::shared_ptr<const Catalog>* kept);
  // Forgets all instances: the update waits for more, and is assembled anew.
  void Clear();
  // Sends Prepare to every rank, except those of shadowed instances.
  void Prepare();
  // Shadowed instances may be written: every node was sent the update, and their ranks are not
  // asked.
  void MarkStageable();
  // The rank has answered Ready. `stopped`: as ReadyEvent. `preparing`: the update waits for that.
  void MarkReady(Member* member, std::optional<Duration> stopped, bool preparing);
  bool all_ready() const;

  // ---- flipping ----

  // Whether shadowed instances are in the update, which have to flip.
  bool HasToFlip() const;
  // Sends SendStaged to every rank that asked for it, and returns whether one is waited for. Sends
  // nothing where an instance is paused: it must not wait longer.
  bool TellStaged();
  // The rank has answered SendStaged.
  void MarkProcessed(MemberId member);
  bool AnyProcessing() const;
  // Sends SendFlip to every rank of the shadowed instances, which are not ready until they have
  // flipped. No rank is waited for any more that processes the version.
  void Flip();
  // The participant's first rank that has not answered Ready; nullopt: all ranks have.
  std::optional<MemberId> FirstUnready(uint32_t index) const;
  // The ranks that owe an answer to SendStaged, Prepare or SendFlip.
  std::vector<std::string> Unready() const;
  void SuspectUnready(uint32_t index, Failure* failure) const;

  // ---- who takes part ----

  const std::vector<Participant>& all() const { return all_; }
  // By participant. Participants are numbered as the catalog's instances.
  const std::vector<bool>& evicted() const { return evicted_; }
  int64_t left() const { return std::count(evicted_.begin(), evicted_.end(), false); }
  // Null: the update was never assembled.
  const std::shared_ptr<const Catalog>& shared_catalog() const { return catalog_; }
  const Catalog& catalog() const { return *catalog_; }
  // By destination; true: evicted.
  const std::vector<bool>& skip_destination() const { return skip_destination_; }
  // The destinations that are not skipped.
  std::vector<uint32_t> Destinations() const;
  // Nodes with a rank in the update; ascending.
  const std::vector<NodeId>& nodes() const { return nodes_; }
  bool on_one_node() const { return nodes_.size() == 1; }
  // Otherwise each daemon has an index of its own ranks.
  bool on_this_daemon() const { return on_one_node() && nodes_[0] == NodeId(); }
  // nullopt: the member is of no instance that is still in the update.
  std::optional<uint32_t> Of(MemberId member) const;
  bool Has(MemberId member) const { return participant_of_.contains(member); }
  // Whether copies of the update may touch the member's memory.
  bool Uses(MemberId member) const;
  bool HasInstance(const std::string& instance) const;
  // The instances still in the update.
  std::vector<std::string> Remaining() const;
  // The nodes of an evicted participant on which no instance of the update is left; none where the
  // update is on one node.
  std::set<NodeId> NodesLeftBy(uint32_t index) const;
  // Whether a rank of an instance still in the update is attached to that node.
  bool AreOn(NodeId node) const;

  // ---- writing ----

  // Counts the copies that read or write the memory of the destinations' members; `by` is 1 when a
  // copy begins and -1 when it has ended.
  void Touch(const std::vector<uint32_t>& destinations, int by);
  // The first byte is about to be written: from here on a failure leaves the instance dirty (P2).
  void WriteFirst(uint32_t index);
  void AddWritten(const std::vector<int64_t>& bytes);  // by destination
  // DATA_LOSS: an in-place rank still in the update was not written in full.
  absl::Status WrittenInFull() const;
  int64_t WrittenBytes() const;
  int64_t UnwrittenBytes() const;  // of the instances still in the update

  // ---- the end ----

  void Evict(uint32_t index, const std::string& reason, const Failure& failure);
  // Ranks of evicted instances resume on Aborted.
  void AbortEvictedIfQuiet();
  // The update is given up for that reason: sends Aborted to ranks that were not sent it. `quiet`:
  // only to those whose memory no copy touches.
  void Abort(bool quiet, const std::string& reason, const Failure& failure);
  // The instances hold the version. `read_back`: the digests of what was read back, by destination;
  // 0, or none: not all of a rank was read. Fronts and backs of those that flipped have changed
  // places, so that their backs now hold what they served.
  void Commit(const std::vector<uint64_t>& read_back, Versions* versions);
  // `reason` and `failure`: why the update was given up.
  std::vector<InstanceOutcome> Outcomes(bool committed, const std::string& reason,
                                        const Failure& failure) const;
  // Describes each instance while the update runs.
  std::vector<InstanceOutcome> OutcomesSoFar() const;
  void AddDirty(Failure* failure) const;

  void CheckInvariants(UpdateState state) const;

 private:
  friend struct refitd::GroupForTests;

  void BeginPrepare(Participant* participant);
  TimePoint PauseBegan(const Participant& participant) const {
    return participant.stopped.value_or(participant.asked);
  }
  void CommitRanks(Participant* participant, const std::map<MemberId, uint64_t>& digests,
                   Versions* versions);
  void SendAborted(Participant* participant, const std::string& reason, const Failure& failure);

  const UpdateRecord& update_;
  Membership& members_;
  Outbox& out_;
  std::shared_ptr<const Catalog> catalog_;
  std::vector<Participant> all_;
  std::map<MemberId, uint32_t> participant_of_;
  std::vector<bool> evicted_;
  std::vector<bool> skip_destination_;
  std::vector<NodeId> nodes_;
  std::vector<int64_t> bytes_written_;  // by destination
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_PARTICIPANTS_H_
