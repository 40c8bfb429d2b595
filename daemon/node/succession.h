// Groups that have several candidates for their coordinator: which candidate this daemon joins,
// when this daemon makes such a group, and which of two coordinators gives its group up.
//
//   members and daemons that wait for a group with candidates
//      |                          Tick: a search begins (coordinator_search.h) and probes the
//      |                          other candidates
//      v
//   searching --a candidate coordinates it, or comes first--> Joining::FollowCandidate
//      |                                                       (a failure leads back here)
//      +--this daemon comes first--> GroupLife::Make, all that wait are admitted
//                                       |
//   coordinating: the others are probed from time to time
//      +--one has a greater incarnation, or probes this daemon with one--> the group is given up:
//         its members' leases and its daemons' links end with UNAVAILABLE, and come back by a
//         search
//
// Invariants
//  1. A daemon has one record of a group, and so takes part in one incarnation of it: no engine is
//     in two.
//  2. A search is kept while members attach again and again (kLinger), so that its clock goes on.
//  3. Each probe that was begun reports once; AwaitProbes returns after the last report.
//
// Part of the daemon's state; used in a turn (turn.h), but for what probes call.
#ifndef REFITD_DAEMON_NODE_SUCCESSION_H_
#define REFITD_DAEMON_NODE_SUCCESSION_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/link/probe.h"
#include "daemon/node/coordinator_search.h"
#include "daemon/node/group_life.h"
#include "daemon/node/joiners.h"
#include "daemon/node/joining.h"
#include "daemon/node/members.h"
#include "daemon/node/state.h"
#include "daemon/node/turn.h"
#include "transport/base/mutex.h"

namespace refitd {

// Probes another daemon (StartProbe with the daemon's credentials).
using PeerProber = std::function<std::function<void()>(ProbeDial, ProbeAnswer)>;

class Succession {
 public:
  // `prober` null: this daemon joins no others, and nothing waits for a group with candidates.
  Succession(DaemonState* state, PeerProber prober, GroupLife* life, Members* members,
             Joining* joining, Joiners* joiners)
      : state_(*state),
        prober_(std::move(prober)),
        life_(*life),
        members_(*members),
        joining_(*joining),
        joiners_(*joiners) {}

  // The time of the next Tick; nullopt: there is nothing to do until something else happens.
  std::optional<TimePoint> NextDeadline(TimePoint now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  void Tick(TimePoint now, Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);

  // Ends all probes and waits until each has reported. `mutex` is the daemon's.
  void AwaitProbes(Mutex* mutex) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

 private:
  // Probes of the candidates of one group, by their places in the list.
  struct Probes {
    std::vector<std::string> addresses;
    std::optional<size_t> own;
    std::set<size_t> running;
    TimePoint next;
  };
  struct Search {
    uint64_t id = 0;
    std::string named;
    CoordinatorSearch logic;
    Probes probes;
    std::optional<GroupSpec> spec;  // that a member or a daemon brought
    std::string creator;            // the first member's identity; empty: only daemons wait
    uint64_t known = 0;             // the greatest incarnation that was told
    TimePoint wanted;               // when somebody last waited
    bool idle = false;              // nobody waits
  };
  struct Watch {
    uint64_t id = 0;
    uint64_t group = 0;  // number of the group's record
    Probes probes;
  };
  using Take = void (Succession::*)(const std::string& group, uint64_t id, size_t candidate,
                                    const absl::StatusOr<uint64_t>& answer, Turn& turn);

  // ---- searching ----
  bool AnyUnknown() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Begins and refreshes the searches that members and daemons wait for.
  void TakeWishes(TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  void TakeWish(const Waiters::OfGroup& member, TimePoint now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  void TakeWish(const Peers::Waiting& peer, TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Returns the group's search, which it begins if there is none. Null: the group is searched under
  // another list of candidates, or there are too many searches.
  Search* Find(const std::string& group, const std::string& named, Duration searched, TimePoint now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // False: the search has ended.
  bool Go(const std::string& group, Search* search, TimePoint now, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  bool Decide(const std::string& group, Search* search, TimePoint now, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  void Join(const std::string& group, Search* search, size_t candidate, TimePoint now, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  absl::Status Make(const std::string& group, const Search& search, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Lets in the members and daemons that waited for the group, which is here.
  void Admit(const std::string& group, const std::string& named, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  void RefuseAll(const std::string& group, const std::string& named, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  void TakeSearched(const std::string& group, uint64_t id, size_t candidate,
                    const absl::StatusOr<uint64_t>& answer, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);

  // ---- coordinating ----
  void WatchGroup(GroupRecord* group, TimePoint now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  void TakeWatched(const std::string& group, uint64_t id, size_t candidate,
                   const absl::StatusOr<uint64_t>& answer, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  void GiveUp(GroupRecord* group, uint64_t greater, Turn& turn)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);

  // ---- probes ----
  Probes ProbesOf(const std::string& named) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  // Begins a probe of each other candidate that none runs for.
  void Start(const std::string& group, uint64_t id, uint64_t incarnation, Take take, Probes* probes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kInTurn);
  void Answered(uint64_t probe, const std::string& group, uint64_t id, size_t candidate, Take take,
                const absl::StatusOr<uint64_t>& answer);

  DaemonState& state_;
  const PeerProber prober_;
  GroupLife& life_;
  Members& members_;
  Joining& joining_;
  Joiners& joiners_;

  std::map<std::string, Search> searches_ ABSL_GUARDED_BY(kInTurn);  // by group
  std::map<std::string, Watch> watches_ ABSL_GUARDED_BY(kInTurn);    // by group
  std::map<uint64_t, std::function<void()>> probes_
      ABSL_GUARDED_BY(kInTurn);  // the probes that run, with the functions that end them
  CondVar probes_cond_;
  uint64_t next_ ABSL_GUARDED_BY(kInTurn) = 1;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_SUCCESSION_H_
