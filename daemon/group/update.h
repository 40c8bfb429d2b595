// The records of a running update. The decisions about it are in begin.cc, data.cc, refit.cc and
// end.cc.
//
// Not thread-safe: an update lives inside its group. Records name members by id, since a member may
// be gone before the update ends.
#ifndef REFITD_DAEMON_GROUP_UPDATE_H_
#define REFITD_DAEMON_GROUP_UPDATE_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "daemon/group/ack_clock.h"
#include "daemon/group/catalog.h"
#include "daemon/group/group.h"
#include "daemon/group/requests.h"
#include "daemon/group/update_state.h"

namespace refitd::group {

// An accepted bucket. `request` is answered after the last read of its source (P6).
struct Bucket {
  std::shared_ptr<Request> request;
  MemberId trainer;
  std::shared_ptr<const CheckedBucket> content;
  int64_t group_seq = -1;  // set when its turn in the group's order comes
  int64_t parts_left = 0;
  int64_t parts = 0;
  TimePoint turn;  // when its turn came
  std::array<int64_t, kBroadcastMethods> bytes_by_method{};
};

// One part of a bucket, numbered in the order of the whole group. Kept until it is transferred and
// handed over.
struct Part {
  PartSeq seq;
  std::shared_ptr<Bucket> bucket;
  std::shared_ptr<const PartContent> content;
  std::optional<SlotGrant> slot;  // leased by the trainer, or granted to be caught up
  bool started = false;
  bool done = false;              // transferred
  std::vector<uint32_t> touched;  // destinations that the transfer writes
};

// A trainer rank that has begun.
struct TrainerProgress {
  MemberId member;
  std::vector<std::shared_ptr<Request>> begins;  // unanswered
  int64_t next_seq = 0;
  std::map<int64_t, std::shared_ptr<Bucket>> early;  // reorder window: the seqs after next_seq
  int pending_buckets = 0;                           // accepted and unanswered
  // Set if Commit came before all of the rank's buckets: the count of buckets at which it takes
  // effect.
  std::optional<int64_t> announced;
  int64_t tensor_count = 0;  // that its Commit told; 0: none
  bool committed = false;
  int64_t bucket_count = 0;
  std::vector<std::shared_ptr<Request>> commits;  // unanswered; those of Refit, too
  bool one_call = false;  // Refit began the update for this rank: no other call can end it
  // Begin said that the rank's shards have no part in the update.
  bool without_layout = false;
};

// An instance that was complete when the update was prepared.
struct Participant {
  std::string instance;
  std::vector<MemberId> members;  // by rank
  size_t unready = 0;             // ranks that have not answered Ready
  bool ready = false;             // all its ranks have answered Ready
  bool written = false;           // this update has written to the instance
  bool evicted = false;
  bool told = false;   // its ranks were sent Aborted
  std::string reason;  // of the eviction
  Failure failure;     // of the eviction
  int touching = 0;    // transfers and verifications that touch its memory
};

// A loader engine rank and its unacknowledged parts.
struct LoaderReader {
  uint32_t participant = 0;
  struct Outstanding {
    PartSeq part;
    TimePoint sent;
  };
  std::deque<Outstanding> outstanding;  // in order of sending
  TimePoint last_ack;
};

// The elements of one tensor that buckets have brought.
struct PushedTensor {
  DType dtype = DType::kUint8;
  Dims shape;
  int64_t elements = 0;
  bool wanted = false;  // by an instance of the update's catalog
  IntervalSet covered;
  // Of a tied tensor: the sum of the digests of its elements, so far as they were transferred.
  uint64_t digest = 0;
  bool digested = true;  // false: a daemon did not tell a digest
  bool complete() const { return covered.total() == elements; }
};

// Why an update is given up, and the status codes that this gives to the calls that wait:
// DEADLINE_EXCEEDED to a call whose own wait ran out, ABORTED to all others.
struct GiveUp {
  std::string reason;
  GiveUpClass kind = GiveUpClass::kOther;
  Failure failure{};
  absl::StatusCode begin_code = absl::StatusCode::kAborted;
  absl::StatusCode bucket_code = absl::StatusCode::kAborted;
  absl::StatusCode commit_code = absl::StatusCode::kAborted;
  absl::StatusCode lease_code = absl::StatusCode::kAborted;
};

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
  // Where the share of the replicas begins that the next version compares (NextFraction).
  uint64_t next_hash = 0;
};

enum class RefitPhase : uint8_t { kNone, kComparing, kCompared, kRunning, kDone };

// The state of the read-back of all in-place ranks still in the update.
enum class Readback : uint8_t { kNone, kRunning, kDone };

// The part of an update that only a catch-up has: its sources are ranks of clean instances, and no
// trainer takes part.
struct CatchUp {
  std::vector<std::string> source_instances;  // instances; set when the catch-up is assembled
  std::vector<MemberId> sources;              // the source instances' ranks
  bool gave_way = false;                      // given up for a reason that is no failure of its own
};

struct Update {
  UpdateId id;
  Version version;
  TimePoint started;
  TimePoint data_began;  // when every rank had answered Ready
  TimePoint data_ended;  // when the last Commit came
  TimePoint deadline;
  int64_t tensor_count = 0;  // as Begin told it; 0: it did not
  int64_t total_bytes = 0;
  std::string note;
  UpdateState state = UpdateState::kOpening;
  Verification verification = Verification::kReadback;
  bool evict_late = false;
  bool through_slots = false;  // from Preparing on: buckets may be broadcast through slots
  // The method of the update's buckets; none: no rank that pushes has begun (Refit names none).
  std::optional<BroadcastMethod> broadcast;
  std::string lacks_slots;  // a rank without slots, or without gain from them; empty: none
  std::optional<CatchUp>
      catch_up;  // set: the update installs the group's version in late instances

  std::map<int, TrainerProgress> trainers;  // by rank
  TimePoint last_call;                      // last call of a trainer rank, or answer to one

  // Set from Preparing on.
  std::shared_ptr<const Catalog> catalog;
  std::vector<Participant> participants;  // indexed as Catalog's instances
  std::vector<bool> evicted;              // by participant
  std::vector<bool> skip_destination;     // by destination
  std::vector<NodeId> nodes;              // nodes with a rank in the update; ascending
  TimePoint ready_deadline;
  bool data_plane_up = true;                 // between the update's nodes
  std::map<MemberId, LoaderReader> readers;  // loader ranks still in the update
  AckClock acks;                             // when those readers are late
  std::map<MemberId, uint32_t> participant_of;

  absl::flat_hash_map<std::string, PushedTensor> pushed;
  // Counts of `pushed`, so that Commit needs no walk over it.
  int64_t pushed_incomplete = 0;  // elements are missing
  int64_t pushed_wanted = 0;
  int64_t buckets = 0;  // of buckets whose turn has come; the next group-wide seq
  int64_t accepted_bytes = 0;
  int64_t moved_bytes = 0;
  std::vector<int64_t> bytes_written;  // by destination

  std::deque<Part> parts;  // not yet handed over; parts[0] has seq first_part
  int64_t first_part = 0;
  int64_t next_start = 0;  // seq of the next part to start
  int64_t in_flight = 0;   // running transfers, the program's included
  // Set if trainer ranks have registered shards. The group may have a newer program meanwhile.
  std::shared_ptr<PlannedRefit> compiled;
  std::optional<ProgramUse> program;
  bool compared = false;  // the program's replicas were found equal
  RefitPhase refit = RefitPhase::kNone;
  Readback readback = Readback::kNone;
  std::vector<SlotGrant> program_slots;
  std::vector<uint32_t> program_destinations;
  std::vector<uint32_t> verified_destinations;
  std::vector<uint64_t> content;  // VerifyDone::content

  // Set in Draining.
  GiveUp give_up;
  TimePoint cleanup_deadline;
  bool cleanup_logged = false;
  std::vector<CallId> operator_calls;

  // How many tensors the update brings, as Begin told it or a Commit that was taken; 0: none did.
  int64_t TensorCount() const {
    int64_t told = tensor_count;
    for (const auto& [rank, progress] : trainers) told = std::max(told, progress.tensor_count);
    return told;
  }
  int64_t end_part() const { return first_part + static_cast<int64_t>(parts.size()); }
  Part& part(int64_t seq) { return parts[static_cast<size_t>(seq - first_part)]; }
  bool has_part(int64_t seq) const { return seq >= first_part && seq < end_part(); }
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_UPDATE_H_
