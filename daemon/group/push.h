// What trainer ranks push in an update: their buckets in order, the parts that these are cut into,
// and which parts loader ranks still have to acknowledge.
//
// It keeps P1 (nothing settles before every rank has committed), P4 (a late acknowledgement is
// found), P7 (parts start in their order) and P10 (a limit on what a rank has outstanding). Pure;
// not thread-safe: an update owns it.
#ifndef REFITD_DAEMON_GROUP_PUSH_H_
#define REFITD_DAEMON_GROUP_PUSH_H_

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/group/coverage.h"
#include "daemon/group/group.h"
#include "daemon/group/membership.h"
#include "daemon/group/outbox.h"
#include "daemon/group/participants.h"
#include "daemon/group/requests.h"
#include "daemon/group/slots.h"

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
  std::optional<SlotGrant> slot;  // leased by the trainer, or granted for staging
  bool started = false;
  bool done = false;              // transferred
  std::vector<uint32_t> touched;  // destinations that the transfer writes
};

// A trainer rank that has begun.
struct TrainerProgress {
  MemberId member;
  std::vector<std::shared_ptr<Request>> begins;  // unanswered calls
  int64_t next_seq = 0;
  std::map<int64_t, std::shared_ptr<Bucket>> early;  // by seq: those that came before their turn
  int pending_buckets = 0;                           // accepted and unanswered
  // Set while a Commit waits for buckets of the rank: the count of taken buckets at which the
  // Commit takes effect.
  std::optional<int64_t> awaited_buckets;
  int64_t tensor_count = 0;  // of its Commit; 0: none
  bool committed = false;
  int64_t bucket_count = 0;
  std::vector<std::shared_ptr<Request>> commits;  // unanswered; those of Refit, too
  bool one_call = false;  // Refit began the update for this rank: no other call can end it
  // Begin said that the rank's shards have no part in the update.
  bool without_layout = false;
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

// The times at which the loader readers of an update are late with their next acknowledgements, in
// order. An acknowledgement moves only the reader that sent it.
class AckClock {
 public:
  // The reader owes its next acknowledgement at `due`; nullopt: it owes none.
  void Set(MemberId reader, std::optional<TimePoint> due) {
    ++looked_at_;
    const auto known = due_.find(reader);
    if (known != due_.end()) {
      order_.erase({known->second, reader});
      due_.erase(known);
    }
    if (!due.has_value()) return;
    due_.emplace(reader, *due);
    order_.insert({*due, reader});
  }
  // The earliest time and its reader (of several, the lowest id); nullopt: no reader owes an
  // acknowledgement.
  std::optional<std::pair<TimePoint, MemberId>> First() const {
    ++looked_at_;
    if (order_.empty()) return std::nullopt;
    return *order_.begin();
  }
  bool nobody_owes() const { return order_.empty(); }

  // How many entries were looked at so far, which tests use to check the cost.
  int64_t looked_at() const { return looked_at_; }

 private:
  std::map<MemberId, TimePoint> due_;
  std::set<std::pair<TimePoint, MemberId>> order_;  // the entries of `due_`
  mutable int64_t looked_at_ = 0;
};

// How the buckets of the running update, or else of the last update, went.
class BucketLog {
 public:
  void Clear() { *this = BucketLog(); }
  void AddBytes(BroadcastMethod method, int64_t bytes);
  void Add(const BucketRecord& record);
  std::vector<BroadcastTotals> Totals() const;
  UpdateStatistics Statistics() const;

 private:
  std::array<BroadcastTotals, kBroadcastMethods> totals_{};
  std::deque<BucketRecord> records_;  // at most kRememberedBuckets (P10)
  int64_t left_out_ = 0;
};

// Checks a number that a rank names of the update: it must not be negative, and not differ from
// that of the ranks before. 0: not named.
absl::Status CheckCount(std::string_view field, int64_t count, int64_t before);
// The same for tensor_count, which also has a limit (RESOURCE_EXHAUSTED).
absl::Status CheckTensors(int64_t count, int64_t before);

class UpdatePush {
 public:
  UpdatePush(UpdateRecord* update, const GroupLimits& limits, Membership* members, Slots* slots,
             Requests* requests, UpdateParticipants* participants, UpdateCoverage* coverage,
             BucketLog* log, Outbox* out)
      : update_(*update),
        limits_(limits),
        members_(*members),
        slots_(*slots),
        requests_(*requests),
        participants_(*participants),
        coverage_(*coverage),
        log_(*log),
        out_(*out) {}

  // ---- trainer ranks ----

  std::map<int, TrainerProgress>& trainers() { return trainers_; }  // by rank
  const std::map<int, TrainerProgress>& trainers() const { return trainers_; }
  // Whether this member has begun. A staged update goes on without trainers that were lost, whose
  // successors of the same rank take no part in it.
  bool HasBegun(const Member& member) const {
    const auto it = trainers_.find(member.rank);
    return it != trainers_.end() && it->second.member == member.id;
  }
  // The rank has begun.
  TrainerProgress& Join(Member* member);
  bool all_committed() const;
  // Whether there are ranks and each began the update by Refit alone: none writes its shards again.
  bool all_in_one_call() const;
  Membership::HasBegun BegunRanks() const {
    return [this](int rank) { return trainers_.contains(rank); };
  }
  // Whether a trainer rank of the update is attached to that node.
  bool AreOn(NodeId node) const;
  // How many tensors the update brings, as Begin named it or a Commit that was taken; 0: none did.
  int64_t TensorCount() const;

  // ---- broadcasting through slots on GPUs ----

  absl::Status CheckBroadcast(BroadcastMethod method) const;
  // `slots`: the rank has slots, and gains from them.
  void TakeBroadcast(BroadcastMethod method, bool slots, const std::string& label);
  void NoteLacksSlots(const std::string& label);
  // Decides whether the update's pushes go through staging slots on the GPUs. Called when the
  // participants are known.
  absl::Status DecideBroadcast();

  // ---- buckets ----

  // The participants are known; Clear: nobody takes part yet.
  void Assemble();
  void Clear() { readers_.clear(); }
  // A rank that reads slots; nullopt: there is none.
  std::optional<MemberId> AnyReader() const;
  absl::Status CheckBucket(const TrainerProgress& progress, const BucketEvent& e) const;
  // Takes the bucket's elements and its slot, or changes nothing.
  absl::Status Reserve(const BucketEvent& e);
  void Take(const BucketEvent& e, std::shared_ptr<Request> request, TrainerProgress* progress);
  void StartParts();
  bool all_started() const { return next_start_ == end_part(); }
  PartSeq next_part() const { return PartSeq(end_part()); }
  int64_t in_flight() const { return in_flight_; }  // running transfers
  // The transfer has ended; null: none of that part runs.
  Part* EndTransfer(PartSeq seq);
  void TakeResult(const TransferDone& e, Part* part);
  // Parts go to loader ranks in order, each once its transfer has ended and was verified.
  void SendParts();
  void Acknowledge(const AckEvent& e);
  void ForgetReader(MemberId id);
  // All parts were transferred, handed over and acknowledged.
  bool settled() const { return parts_.empty() && in_flight_ == 0 && acks_.nobody_owes(); }
  // The earliest moment at which an unacknowledged part is late, and the member that owes it.
  std::optional<std::pair<TimePoint, MemberId>> FirstLate() const { return acks_.First(); }
  const LoaderReader& reader(MemberId id) const { return readers_.at(id); }
  // The update is given up: parts that did not start never will.
  void DropUnstarted();

  // ---- commit ----

  absl::Status CheckCommit(const TrainerProgress& progress, const CommitEvent& e) const;
  // Not OK: the rank's Commit would be the last, and not all has come.
  absl::Status CheckIfLast(const TrainerProgress& progress, int64_t tensor_count) const;
  // Refuses the waiting Commit. The update stays open, as after any refused Commit.
  void WithdrawCommit(TrainerProgress* progress, const absl::Status& why);
  // A Commit that waits for buckets is withdrawn once no caller waits for its answer: otherwise the
  // last bucket would commit an update whose caller has given up.
  void WithdrawIfNobodyWaits(const Request& commit, const absl::Status& why);

  // ---- for people, and the end ----

  // Sends the outcome to every trainer rank of the update. `reason` and `failure`: why it was given
  // up.
  void SendOutcome(bool committed, const std::string& reason, const Failure& failure);
  // Append what the update waits for.
  void AppendUnacknowledged(std::vector<std::string>* waits) const;
  void AppendUnstarted(std::vector<std::string>* waits) const;
  void AppendUncommitted(std::vector<std::string>* waits) const;
  void SuspectAwaited(Failure* failure) const;
  void AddAccepted(int64_t bytes) { accepted_bytes_ += bytes; }
  void AddMoved(int64_t bytes) { moved_bytes_ += bytes; }
  int64_t accepted_bytes() const { return accepted_bytes_; }
  int64_t moved_bytes() const { return moved_bytes_; }
  int64_t buckets() const { return buckets_; }

  // `decided`: every trainer rank has committed.
  void CheckInvariants(bool decided) const;

 private:
  friend struct refitd::GroupForTests;

  absl::Status CheckParts(const CheckedBucket& bucket) const;
  void TakeInOrder(TrainerProgress* progress);
  // Whether the bucket's bytes pass through a slot: for loader ranks, to another daemon, or by a
  // broadcast.
  bool NeedsSlot(const Bucket& bucket) const;
  void CutIntoParts(const std::shared_ptr<Bucket>& bucket);
  void CutBetweenTensors(const std::shared_ptr<Bucket>& bucket);
  void AddPart(const std::shared_ptr<Bucket>& bucket, PartContent content);
  void FinishBucket(const Bucket& bucket);
  void StartPart(Part* part);
  void SendPartToReaders(Part* part);
  // The parts that the reader has to acknowledge have changed.
  void SetAckDue(MemberId id, const LoaderReader& reader);
  int64_t end_part() const { return first_part_ + static_cast<int64_t>(parts_.size()); }
  Part& PartAt(int64_t seq) { return parts_[static_cast<size_t>(seq - first_part_)]; }

  UpdateRecord& update_;
  const GroupLimits& limits_;
  Membership& members_;
  Slots& slots_;
  Requests& requests_;
  UpdateParticipants& participants_;
  UpdateCoverage& coverage_;
  BucketLog& log_;
  Outbox& out_;

  std::map<int, TrainerProgress> trainers_;
  // The method of the update's buckets; none: no rank that pushes has begun (Refit names none).
  std::optional<BroadcastMethod> broadcast_;
  std::string lacks_slots_;     // a rank without slots, or without gain from them; empty: none
  bool through_slots_ = false;  // from Preparing on: buckets may be broadcast through slots

  int64_t buckets_ = 0;  // of buckets whose turn has come; the next group-wide seq
  int64_t accepted_bytes_ = 0;
  int64_t moved_bytes_ = 0;

  std::deque<Part> parts_;  // not yet handed over; parts_[0] has seq first_part_
  int64_t first_part_ = 0;
  int64_t next_start_ = 0;  // seq of the next part to start
  int64_t in_flight_ = 0;
  std::map<MemberId, LoaderReader> readers_;  // loader ranks still in the update
  AckClock acks_;                             // when those readers are late
};

}  // namespace refitd::group

#endif  // REFITD_DAEMON_GROUP_PUSH_H_
