// The program of a compiled refit: compiled before engines are prepared, kept while the layouts
// stay the same, and run once in each update, after the replicas that it reads were compared.
//
// RefitCompiler keeps the group's programs, UpdateProgram is an update's use of one. They keep P4
// (an update that is over stops the planning that it asked for), P6 (sources and destinations are
// touched while copies run) and P11 (what two ranks hold of one tensor is compared before it is
// moved). Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_REFIT_PROGRAM_H_
#define REFITD_DAEMON_GROUP_REFIT_PROGRAM_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/group/catalog.h"
#include "daemon/group/group.h"
#include "daemon/group/membership.h"
#include "daemon/group/outbox.h"
#include "daemon/group/participants.h"
#include "daemon/group/slots.h"

namespace refitd::group {

// The inputs of a program: the layouts of the update's sources and destinations, by rank, with the
// number that the plan gives to each rank's daemon.
struct ProgramKey {
  struct Rank {
    uint32_t node = 0;
    uint32_t instance = 0;
    uint64_t layout_digest = 0;
    std::vector<Tie> ties = {};  // which the digest leaves out
    bool operator==(const Rank&) const = default;
  };
  std::vector<Rank> sources;
  std::vector<Rank> destinations;
  std::vector<std::string> pushed;  // sorted
  uint32_t nodes = 0;               // of the update; rounds depend on their number
  uint32_t relay_lag = 0;           // of chains; 0: none are allowed
  bool operator==(const ProgramKey&) const = default;
};

// The group's program. It holds structure only; each update binds it to the places where the bytes
// are.
struct PlannedRefit {
  ProgramId id;
  ProgramKey key;
  bool catch_up = false;  // the program's sources are engine ranks
  // Set when the update that asked for the program ends before the program is there, so that
  // planning stops (P4).
  std::shared_ptr<std::atomic<bool>> cancelled = std::make_shared<std::atomic<bool>>(false);
  absl::Status status;  // why there is no plan, if there is none
  std::shared_ptr<const RefitPlan> plan;
  // The catalog for which the program was found to bring every tensor.
  std::weak_ptr<const Catalog> covers;
  // By source: the layouts whose replicas were all compared and found equal.
  std::vector<std::shared_ptr<const Layout>> compared_layouts;
  // The in-place ranks, each with the number of its layout, for which the program ran last.
  std::vector<std::pair<MemberId, uint64_t>> destination_bindings;
  // The cursor of NextFraction for the next version: the replicas that it compares begin with this
  // hash.
  uint64_t next_hash = 0;
};

// The use of a program by one update. An update without shards has none.
class UpdateProgram {
 public:
  UpdateProgram(UpdateRecord* update, const GroupLimits& limits, Membership* members, Slots* slots,
                UpdateParticipants* participants, Outbox* out)
      : update_(*update),
        limits_(limits),
        members_(*members),
        slots_(*slots),
        participants_(*participants),
        out_(*out) {}

  void Use(const std::shared_ptr<PlannedRefit>& compiled, std::vector<MemberId> sources);
  void Clear();
  bool exists() const { return update_.use.has_value(); }
  const RefitContent& content() const { return update_.use->plan->content; }
  // Whether the layouts bring all tensors, so that nothing is pushed.
  bool brings_all() const { return compiled_->key.pushed.empty(); }
  // How many tensors the program moves.
  int64_t tensors() const { return exists() ? content().tensors : 0; }
  // Whether the program brings the tensor.
  bool Moves(std::string_view tensor) const;
  // Whether the sources hold the tensor, even if it is moved nowhere.
  bool Contains(std::string_view tensor) const;
  // Whether the program was found to bring every tensor of the update's catalog.
  bool covers_catalog() const {
    return exists() && compiled_->covers.lock() == participants_.shared_catalog();
  }
  void NoteCovers() {
    if (exists()) compiled_->covers = participants_.shared_catalog();
  }

  // Compares a share of the replicas, or finds that nothing has to be compared, while engines get
  // ready. The sources hold the version already and keep it. A comparison of all would take long,
  // and an update that is given up waits for its end (P6).
  void CompareEarly();
  // Once every trainer rank has committed and every part has started: compares, and then runs the
  // program, after the part `last` in the order of collectives.
  void RunIfDue(PartSeq last, bool data_plane_up);
  bool comparing() const { return phase_ == Phase::kComparing; }
  bool running() const { return phase_ == Phase::kRunning; }
  bool started() const { return phase_ == Phase::kRunning || done(); }
  bool done() const { return phase_ == Phase::kDone; }
  bool in_use() const { return comparing() || running(); }
  // The number of slots that the program waits for; 0: it does not wait.
  int64_t waits_for_slots() const;
  // EndCompare ends the comparison, EndRun the run. False: none was under way.
  bool EndCompare();
  void NoteEqual() { compared_ = true; }
  bool EndRun();
  // Notes which layouts the program was compared and bound for, and what to compare next. Called
  // when the version was committed, since a version that was given up may come again with other
  // bytes.
  void NoteInstalled();

  void CheckInvariants() const;

 private:
  friend struct refitd::GroupForTests;

  enum class Phase : uint8_t { kNone, kComparing, kCompared, kRunning, kDone };

  bool LeavesOut(std::string_view tensor) const;
  void Compare(const std::optional<ReplicaFraction>& part);
  void TouchSources(int by);
  std::vector<std::shared_ptr<const Layout>> SourceLayouts() const;
  std::vector<std::pair<MemberId, uint64_t>> DestinationBindings() const;
  std::optional<ReplicaFraction> PartToCompare() const;
  bool TakeSlots();

  UpdateRecord& update_;
  const GroupLimits& limits_;
  Membership& members_;
  Slots& slots_;
  UpdateParticipants& participants_;
  Outbox& out_;
  // The group may have a newer program meanwhile.
  std::shared_ptr<PlannedRefit> compiled_;
  Phase phase_ = Phase::kNone;
  bool compared_ = false;  // the replicas were found equal
  std::vector<SlotGrant> taken_;
  std::vector<uint32_t> destinations_;
};

class RefitCompiler {
 public:
  RefitCompiler(const Membership* members, const Slots* slots, Outbox* out)
      : members_(*members), slots_(*slots), out_(*out) {}
  RefitCompiler(const RefitCompiler&) = delete;
  RefitCompiler& operator=(const RefitCompiler&) = delete;
  ~RefitCompiler() { Cancel(); }

  // An update's sources. `catch_up`: they are engine ranks. `some_push`: there are trainer ranks
  // without shards, which bring the tensors that no layout has.
  struct Sources {
    std::vector<MemberId> members;
    bool catch_up = false;
    bool some_push = false;
  };
  // True: `program` has the group's program from these sources to the participants. False: it is
  // being compiled. Not OK: there can be none.
  absl::StatusOr<bool> Find(const Sources& sources, const UpdateParticipants& participants,
                            UpdateProgram* program);
  void Take(const RefitPlanned& e);
  bool busy() const { return compiling_ != nullptr; }
  // No update waits for the program that is being compiled.
  void Cancel() {
    if (compiling_ != nullptr) compiling_->cancelled->store(true);
  }
  // The daemons in the longest chain of the trainers' newest program; 0: no chain.
  uint32_t chain_daemons() const;

  void CheckInvariants() const;

 private:
  friend struct refitd::GroupForTests;

  ProgramKey KeyOf(const Sources& sources, const UpdateParticipants& participants) const;
  void AddLacking(const Sources& sources, const Catalog& catalog,
                  std::set<std::string>* pushed) const;
  void Compile(ProgramKey key, const Sources& sources, const Catalog& catalog);
  uint32_t RelayLag() const;

  const Membership& members_;
  const Slots& slots_;
  Outbox& out_;
  std::shared_ptr<PlannedRefit> trainers_;   // the newest of an update of the trainers
  std::shared_ptr<PlannedRefit> catch_up_;   // the newest of a catch-up
  std::shared_ptr<PlannedRefit> compiling_;  // null: none
  uint64_t next_program_ = 0;
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_REFIT_PROGRAM_H_
