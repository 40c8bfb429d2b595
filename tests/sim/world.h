// Whole groups over several daemons in one thread: real Coordinator, Follower and WireLock
// machines, planners and executors in a modelled world, with time and chance from one seed. The
// same seed gives the same run.
//
// The parts of the model, by file
//   world.cc    clock, daemons' life, feeding machines and carrying out their actions, links
//   data.cc     memory as tags, what executors' jobs do to it and when, collectives
//   refits.cc   compiled refits: shards, plans, exchanges, and the trainers' calls
//   members.cc  trainer and engine processes, and the job that tells trainers what to push
//   chaos.cc    scenario, faults, the quiet end, what must hold then
// Every element of every tensor carries a tag: the update that its bytes are of, its tensor and its
// index. So what a rank holds can be compared with what it was told at any moment.
//
// A broken promise stops the run, and Result names it: P1 to P8 and P10 of docs/architecture.md, or
//   LIVE  with all faults gone, an update did not commit
//   REG   an update left out an instance though every rank of it was told that it is registered and
//         none was lost
//   GIVE  a catch-up committed while a trainer's call that opens an update was waiting
//   AHEAD engines were asked to pause while others processed the version that is staged, or a rank
//         heard of it that did not ask
//   REST  only some engines died, or the data plane of one daemon did not come up, and the update
//         was given up for the other engines as well
#ifndef REFITD_TESTS_SIM_WORLD_H_
#define REFITD_TESTS_SIM_WORLD_H_

#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "daemon/execute/executor.h"
#include "daemon/group/bucket_draft_testing.h"
#include "daemon/group/coordinator.h"
#include "daemon/group/follower.h"
#include "daemon/group/wire_lock.h"
#include "tests/sim/random.h"
#include "transport/bound_moves.h"
#include "transport/unprepared_transport_testing.h"

namespace refitd::sim {

// Planted bugs: the world's deliberate errors, at its boundary with the machines.
enum class Bug : uint8_t {
  kNone,
  kEarlyCommitted,    // engines hear Committed when verification starts
  kForgottenUnknown,  // an engine with unknown weights reports the version that it held before
  kEarlyIssue,        // Issue goes out with the header, before the acknowledgements
  // A daemon's death is not reported, its pings are answered, and clean-up has no limit.
  kSwallowedDeath,
  kEarlyDone,         // a copy is reported as ended while it runs
  kForgottenRequest,  // request ids are taken off repeated calls
  kTrustingSink,      // a receiver reports the digests sent, not those received
  kSharedWire,        // every group gets the wire lock at once
  kEarlyRegistered,   // a joined daemon answers RegisterLayout by itself
  kTrustedReplicas,   // replicas that differ are reported with equal digests
  kHalfStale,         // replicas that differ are found only on a registration's first version
  kUnseenOverlap,     // nobody says that a source's memory is a destination's
  kOldBinding,        // moves read the memory of an earlier registration
  kEarlyRounds,       // a program's Issue goes out with its Run, before the group has the wire
  kUnfilledSlot,      // what crossed stays in the slot in which it arrived
  kHastyLeave,        // a joined daemon's link ends with its last member
  kBlindWire,         // an end that could not connect says that it is up
  // An update that was given up has no time limit to end, at both ends of a link.
  kPatientCleanUp,
  kTrustedReply,  // an answer of another kind than its call reaches the caller
  // A daemon forwards nothing in the first round in which it has something to forward.
  kSkippedForward,
  kEarlyForward,  // a daemon forwards what its slot had before the round's bytes came
  kHalfRerun,     // a daemon that runs a program again writes nothing that it receives
  // The first thing that a daemon receives, and lacks, after a program went on is not written.
  kSkippedRound,
  kWrongResume,  // a joined daemon is told to go on one round after the one that is lacking
  kTornSource,   // an engine loses some of its weights when a catch-up begins, and goes on giving
  kStubbornCatchUp,   // calls that open an update are held up while a catch-up runs
  kBlindCatchUp,      // a catch-up's read-back finds nothing
  kSkippedPart,       // a joined daemon stores nothing of a part that is sent again
  kTwiceStored,       // a joined daemon stores a part that is sent again twice
  kTakeover,          // engines do not say whose version they hold: who comes first owns the group
  kOwnerElsewhere,    // the coordinator does not know who a trainer at another daemon is
  kEarlyFlip,         // a shadowed engine flips when the read-back of its backs begins
  kHalfFlip,          // a rank says that it has flipped, and has not
  kStaleSide,         // the daemon takes no note that sides have changed places
  kKeptSide,          // moves that were bound to one side are run for the other
  kNoWayBack,         // a rank that has flipped stays so when the update is given up
  kWrittenSide,       // a back that a rollback puts into place was written since
  kIgnoredHold,       // the next update is staged though the version before is held
  kWrongContent,      // ranks do not get the version whose content a rollback has
  kForgottenContent,  // ranks do not say of what content the rollback is that they hold
  kHastyPrepare,      // engines are asked to pause before others have processed the version
  kEveryoneStaged,    // ranks that did not ask are sent Staged
  kEarlyStaged,       // a rank is sent Staged when the read-back of its backs begins
  kKeptProcessed,     // a rank keeps what it made of a version that was given up
};

struct Options {
  uint64_t seed = 0;
  bool trace = false;  // to stdout
  Bug bug = Bug::kNone;
};

enum class Fault : uint8_t {
  kMemberKilled,
  kMemberMute,
  kMemberFrozen,
  kDaemonKilled,
  kDaemonFrozen,
  kPartition,
  kLinkBroken,
  kMessageLost,
  kMessageDuplicated,
  kMessageReordered,
  kTransferFailed,
  kBytesDamaged,
  kWireFailed,
  kCommunicatorFailed,
  kOperatorAbort,
  kTrainerAbort,
  kEngineFailed,
  kDrain,
  kReplace,
  kCallGone,
  kReplicaDiffers,
  kOverlap,            // a trainer's shard lies in an engine's memory
  kOnlyEnginesKilled,  // all engines of a joined daemon at once
  // A daemon's end of the data plane never opens, never connects, or connects one way only.
  kWireOneSided,
  kDaemonMute,  // it answers pings and sends no reports
  // An answer of another kind than its call, or a report about a communicator that the daemon is
  // not in.
  kWrongPayload,
  kWireNameless,  // the data plane fails and names nobody
  kThief,         // a trainer of another identity attaches
  kCount
};
std::string_view FaultName(Fault fault);

struct Result {
  std::string promise;  // empty: all promises were kept
  std::string what;
  uint64_t trace_hash = 0;
  int64_t committed = 0;
  int64_t aborted = 0;
  // Committed updates with a program: [tensors were pushed as well][bytes crossed the wire].
  int64_t refits[2][2] = {};
  int64_t exchanges = 0;
  int64_t forwards = 0;   // runs of bytes that a daemon sent on along a chain
  int64_t catch_ups = 0;  // committed
  int64_t gave_way = 0;   // catch-ups that were given up for no failure of their own
  int64_t catch_ups_failed = 0;
  int64_t reruns = 0;       // programs that a daemon was told to run again without a lost daemon
  int64_t resumes = 0;      // those of them that went on from a later round than the first
  int64_t parts_again = 0;  // headers of parts that were sent again to a daemon
  int64_t rollbacks = 0;    // committed
  int64_t rollbacks_refused = 0;
  int64_t held = 0;  // updates that waited while the version before was held
  int64_t events = 0;
  Duration virtual_time{};
  std::array<int64_t, static_cast<size_t>(Fault::kCount)> faults{};
  bool ok() const { return promise.empty(); }
};

Result RunSeed(const Options& options);

// ---- memory ----

// The origin of an element's bytes: round << 32
// tensor << 16
// element; 0: none.
using Tag = uint64_t;
constexpr Tag kDamageBit = Tag{1} << 63;
constexpr Tag kDamaged = ~Tag{0};
constexpr int64_t kElementBytes = 8;
constexpr Tag MakeTag(uint32_t round, uint32_t tensor, int64_t element) {
  return uint64_t{round} << 32 | uint64_t{tensor} << 16 | static_cast<uint64_t>(element);
}

// One attempt to install a version, as the world saw it. Tags name it by its index.
struct Round {
  int g = 0;
  uint64_t coordinator = 0;  // nonce of the machine
  UpdateId update;
  Version version;
  TimePoint assembled;
  TimePoint due;  // its deadline
  Outcome outcome = Outcome::kRunning;
  std::map<std::string, std::vector<int>> instances;  // pids, by instance
  std::set<std::string> committed_instances;
  std::shared_ptr<const RefitPlan> plan;  // null: no program
  bool differs = false;                   // a rank was made to differ from its replicas
  std::vector<int> sources;               // pids, by the plan's numbers
  bool catch_up = false;
  bool rollback = false;
  // The round whose bytes it installs: itself, or, for a catch-up or a rollback, an earlier one.
  uint32_t bytes_of = 0;
};

// A trainer's memory for one registration.
struct Shard {
  std::shared_ptr<const Layout> layout;  // region n is the process's shard n - 1
  std::vector<Tag> cells;                // the region
  uint32_t round = 0;                    // the round of its bytes; 0: none
  int compares = 0;                      // how often its replicas were compared
  // The engine, its region and the element there from which on this shard is the same memory; 0:
  // the shard has memory of its own. (What the trainer writes does not show in the engine.)
  int in_pid = 0;
  size_t in_region = 0;
  size_t in_element = 0;

  Tag& At(const Piece& piece, int64_t element) {
    return cells[static_cast<size_t>(piece.byte_offset / kElementBytes + element)];
  }
};

// A bucket that a trainer pushed, with its bytes, until the answer.
struct Source {
  std::shared_ptr<const CheckedBucket> bucket;
  std::vector<std::vector<Tag>> data;  // by range of the bucket

  // Makes the same bucket over this data (over its slot, if it has one), and keeps it as `bucket`.
  std::shared_ptr<const CheckedBucket> BucketOver(const CheckedBucket& of) {
    auto made = std::make_shared<CheckedBucket>(of);
    if (!made->slot.has_value()) {
      made->source = CheckedBucket::Source::kInline;
      made->places.clear();
      for (const std::vector<Tag>& range : data) {
        made->places.push_back({.inline_data = reinterpret_cast<const char*>(range.data())});
      }
    }
    return bucket = std::move(made);
  }
};

// A daemon's staging pool for one group.
struct Pool {
  std::vector<std::vector<Tag>> slots;
  // A use of a slot: who reads or writes it now, and under which grant (P6).
  struct Use {
    uint64_t id = 0;
    GrantId grant;
    std::string what;
  };
  std::vector<std::vector<Use>> uses;  // by slot
  // For kEarlyForward: the bytes that a slot had before a round was received into it, by slot.
  std::map<uint32_t, std::vector<Tag>> before_round;
};

// ---- processes ----

// The identity of all trainers but thieves.
inline constexpr char kOwner[] = "owner";

struct Seat {  // a place for a process: which member should be attached where
  int g = 0;
  bool trainer = false;
  int d = 0;
  std::string instance;
  int rank = 0;
  int world_size = 1;
  DeliveryMode delivery = DeliveryMode::kInPlace;
  bool manifest = false;
  bool catch_up = false;  // takes part in catch-ups
  bool shadowed = false;  // its layout has backs
  bool wants_staged = false;
  int pid = 0;
};

struct Process {
  int pid = 0;
  int seat = 0;
  bool alive = true;
  bool frozen = false;
  bool mute = false;  // never sends anything again
  std::deque<std::function<void()>> held;

  // The lease.
  MemberId member;     // 0: none
  uint64_t lease = 0;  // number of the lease: what belongs to an earlier one is void
  std::shared_ptr<Pool> pool;
  uint64_t daemon_life = 0;
  bool welcomed = false;
  bool registered = false;  // RegisterLayout was answered OK
  bool attaching = false;
  TimePoint heard_until;  // streams keep order
  TimePoint said_until;

  // ---- engine ----
  std::shared_ptr<const Layout> layout;
  // By tensor, of the part that it holds. Region n of its layout is tensor n - 1.
  std::vector<std::vector<Tag>> cells;
  // The backs of a shadowed engine's regions. A flip exchanges the two.
  std::vector<std::vector<Tag>> back;
  bool second_side = false;        // `cells` are what was the back when the process began
  bool flipped = false;            // for an update whose outcome it has not heard
  bool undecided = false;          // it lost its lease so
  uint64_t flips = 0;              // that were committed, in this lease
  std::vector<int64_t> first;      // by tensor: first element held
  std::optional<Version> holds;    // the version that it believes to serve
  uint64_t origin = 0;             // incarnation in which `holds` was committed; 0: from a file
  std::string owner;               // of the group when it committed the last version here
  std::optional<Version> content;  // of `holds`, if that is a rollback
  bool torn = false;               // it lost a part of `holds` and hides that; for kTornSource
  bool weights_unknown = false;    // answered Ready, heard no outcome
  std::optional<UpdateId> prepared;
  Version prepared_version;
  std::optional<UpdateId> staged;    // whose Prepare or outcome it has not heard
  std::optional<UpdateId> answered;  // the last Staged that it answered
  std::optional<std::vector<std::vector<Tag>>> processed;  // `back`, when it answered
  int64_t next_part = 0;

  // ---- trainer ----
  enum class Phase : uint8_t { kIdle, kBeginning, kPushing, kCommitting } phase = Phase::kIdle;
  int attempt = -1;  // of the job
  uint32_t round = 0;
  size_t next_bucket = 0;
  int outstanding = 0;
  int tries = 0;
  int window = 1;
  uint64_t token = 0;  // number of the attempt: answers to an earlier one are void
  struct Pack {
    SlotGrant grant;
    uint64_t use = 0;
  };
  std::vector<Pack> packs;                     // leased slots that it may write into
  std::vector<std::shared_ptr<Shard>> shards;  // all that it ever tried to register
  std::shared_ptr<Shard> shard;                // in force; null: not known
  int binding = -1;                            // of the job's bindings, that of `shard`
  bool own_memory = false;                     // no shard lies in an engine's memory any more
  std::optional<Version> refit_version;  // of its Refit call; until the answer the shard stays
  int refits_out = 0;                    // calls that are unanswered or to be repeated
};

struct BucketPlan {
  std::vector<TensorRange> ranges;  // tensor: of the model
};

// The next task of a group's trainer ranks.
struct Job {
  int attempt = 0;
  int left = 0;  // attempts that are left
  bool active = false;
  bool final = false;
  Version version;
  // Whether trainers tell the number of tensors with Begin; else those that push tell it with
  // Commit.
  bool TellsCountAtBegin() const { return version.value() % 2 == 0; }
  Verification verification = Verification::kReadback;
  bool evict_late = false;
  bool slots_on_devices = false;
  std::vector<std::vector<BucketPlan>> plan;    // by rank
  std::vector<std::vector<TensorRange>> split;  // by rank: what it registers
  std::vector<int> binding;                     // by rank: number of its registrations
  std::map<int, bool> concluded;                // by rank: whether it committed
  TimePoint started;
};

struct GroupWorld {
  std::string name;
  int home = 0;  // the daemon that creates it
  GroupSpec spec;
  GroupLimits limits;
  std::vector<TensorSpec> model;
  std::vector<std::string> instances;
  Verification verification = Verification::kReadback;
  // How versions are installed: by pushing, by a compiled refit, or some tensors by each.
  enum class Way : uint8_t { kPush, kRefit, kMixed } way = Way::kPush;
  std::vector<bool> registers;  // by trainer rank: whether it has shards
  std::vector<bool> pushed;     // by tensor
  Job job;
  int more_updates = 4;  // that may follow the last one while it leaves an instance out
  Version top;           // highest that was ever tried
  std::map<uint64_t, Version> last_committed;  // by incarnation (P3)
  // The version before is held: until when, and by which machine.
  TimePoint held_until;
  uint64_t held_by = 0;
  CommunicatorId last_communicator;  // the last that its coordinator opened, and its nodes
  std::set<NodeId> communicator_nodes;
};

// ---- daemons ----

struct Machine {
  uint64_t nonce = 0;
  std::unique_ptr<GroupMachine> machine;
  Coordinator* coordinator = nullptr;
  Follower* follower = nullptr;
  uint64_t coordinator_nonce = 0;
  int link = -1;
  bool linked = false;
  uint32_t next_node = 0;
  bool check_view = false;
  std::optional<TimePoint> tick;
  std::shared_ptr<Pool> pool;
  // The slots that a loader rank on a GPU of its own is handed.
  std::map<MemberId, std::shared_ptr<Pool>> own_pools;
  std::unique_ptr<Executor> executor;
  // The worker's id of the first run of each version's program.
  std::map<Version, UpdateId> first_runs;
  // The parts of the running update that were sent again to this daemon, a joined one.
  std::set<PartSeq> again;
};

struct Call {
  int pid = 0;  // 0: an operator
  int g = 0;
  TimePoint since;
  std::function<void(const absl::Status&, const ReplyPayload&)> reply;
  MemberId member{};
  std::shared_ptr<const Layout> layout{};  // the layout that it registers
  bool refit = false;
  bool opens = false;              // Begin or Refit
  std::optional<size_t> answer{};  // the payload that an OK answer must have: index of ReplyPayload
  bool second_side = false;        // DaemonMember::second_side of `layout`
};

struct DaemonMember {
  int pid = 0;
  int g = 0;
  bool lost = false;
  std::shared_ptr<const Layout> layout{};  // a trainer's, in force
  // A shadowed engine's: commits so far; those that the layout in force knew, and the side that it
  // read then.
  uint64_t flips = 0;
  uint64_t flips_of_layout = 0;
  bool second_side = false;
  uint64_t newest = 0;  // the highest binding generation that it tried
};

struct Daemon {
  int index = 0;
  std::string id;
  bool up = false;
  uint64_t life = 0;
  bool frozen = false;
  bool drained = false;
  bool silent_death = false;
  bool mute = false;  // sends no reports but pongs
  TimePoint died;     // when it was killed last
  // A fault of the daemon's end of the data plane.
  enum class WireTrouble : uint8_t { kNone, kNeverOpens, kNeverConnects, kNotForItself };
  WireTrouble wire_trouble = WireTrouble::kNone;
  std::deque<std::function<void()>> held;
  WireLock lock;
  std::map<int, Machine> machines;  // by group
  std::map<MemberId, DaemonMember> members;
  std::map<MemberId, int> thieves;  // their groups; not among `members`
  std::map<CallId, Call> calls;
  std::map<CallId, ReplyPayload> wrong_answers;  // planted
  std::map<CallId, std::shared_ptr<Source>> sources;
  uint64_t next_member = 1;
  uint64_t next_call = 1;
  uint64_t next_update = 1;
  std::deque<std::pair<int, MachineEvent>> inbox;
  bool busy = false;
};

struct Letter {
  uint64_t number = 0;
  TimePoint due;
  bool end = false;
  std::optional<LinkUp> up;
  std::optional<PeerCommand> command;
  std::optional<PeerReport> report;
};
struct Lane {
  uint64_t sent = 0;
  uint64_t expected = 0;
  std::deque<Letter> letters;
  TimePoint last;
  bool lose = false;
  bool duplicate = false;
  bool reorder = false;
  bool wrong = false;  // the next OK answer is of another kind
};
struct Link {
  int g = 0;
  int c = 0;
  int f = 0;
  uint64_t c_life = 0;
  uint64_t f_life = 0;
  uint64_t c_nonce = 0;
  uint64_t f_nonce = 0;
  NodeId node;
  bool c_open = true;
  bool f_open = true;
  Lane down;  // commands
  Lane up;    // reports
};

// ---- the data plane ----

// A job that an executor has submitted. The world runs it in its own time.
struct Work {
  using Start = std::variant<StartTransfer, StartMoves, StartVerify>;
  uint64_t id = 0;
  int d = 0;
  int g = 0;
  uint64_t nonce = 0;  // of the machine
  Start start;
  std::string what;  // for messages
  std::shared_ptr<Pool> pool;
  std::shared_ptr<Source> source;      // of a bucket that this daemon's trainer pushed
  std::vector<MemberId> sources;       // members whose memory is read
  std::vector<MemberId> destinations;  // in-place ranks, as the executor numbers them
  std::vector<int> pids;               // by destination; 0: skipped
  std::vector<std::pair<SlotIndex, uint64_t>> uses;
  // For a copy. `done` is null once the end is reported.
  Transfer transfer;
  BoundMoves moves;
  std::function<void(TransferResult)> done;
  // For a read-back.
  ReadbackJob readback;
  std::function<void(ReadbackResult)> read;

  const StartMoves* step() const { return std::get_if<StartMoves>(&start); }
  UpdateId update() const {
    return std::visit([](const auto& of) { return of.update; }, start);
  }
  PartSeq part() const { return std::get<StartTransfer>(start).part; }
  CallId call() const {
    const auto* transfer_of = std::get_if<StartTransfer>(&start);
    return transfer_of == nullptr ? CallId() : transfer_of->bucket_call;
  }
  // Whether the job stores a part that another daemon sent.
  bool Crossed() const {
    return std::holds_alternative<StartTransfer>(start) && call() == CallId();
  }
  // The process that the move writes to. 0: the move writes to a slot.
  int WrittenBy(const BoundMove& move) const {
    return move.destination_index < pids.size() ? pids[move.destination_index] : 0;
  }
};

// The transport of all executors. Puts the job that it is given into `next`.
class WorkTransport : public UnpreparedTransport {
 public:
  void Submit(Transfer transfer, std::function<void(TransferResult)> done) override {
    next->transfer = std::move(transfer);
    next->done = std::move(done);
  }
  void Submit(ReadbackJob job, std::function<void(ReadbackResult)> done) override {
    next->readback = std::move(job);
    next->read = std::move(done);
  }
  Work* next = nullptr;
};

struct CommunicatorEnd {
  uint64_t id = 0;
  int d = 0;
  int g = 0;
  uint64_t life = 0;
  uint64_t nonce = 0;  // of its machine
  uint64_t coordinator = 0;
  CommunicatorId communicator;
  int rank = 0;
  int size = 0;
  std::string address;
  std::vector<std::string> addresses;
  bool connecting = false;
  bool answered = false;  // CommunicatorUp was sent
  bool up = false;
  bool closed = false;
  std::optional<WireSeq> last;
  TimePoint free_at;
};
struct WireOp {
  int64_t bytes = 0;
  SlotGrant slot;
  std::vector<uint32_t> ranks;
  // The uses of each rank's slots, by rank.
  std::map<uint32_t, std::vector<std::pair<SlotIndex, uint64_t>>> running;
  std::map<uint32_t, std::shared_ptr<Pool>> pools;
  std::set<uint32_t> started;
  bool completing = false;
  uint32_t root = 0;
  std::shared_ptr<Pool> source;
  std::optional<std::vector<Tag>> sent;  // the root's bytes when its share ended
  // The share of one rank in a round of a program.
  struct Share {
    StartExchange start;
    bool completing = false;
    std::optional<std::vector<Tag>> sent;  // its bytes when it ended
  };
  std::map<uint32_t, Share> shares;
};

struct HeaderRecord {
  uint64_t digest = 0;
  size_t ranks = 0;
  std::set<NodeId> sent;
  std::set<NodeId> acknowledged;
};

struct ProgramRecord {
  std::set<NodeId> sent;
  std::set<NodeId> built;
  std::set<NodeId> issued;
  std::optional<StartRefit> run;
  // The first wire seq by communicator: a daemon that slept may go on over one that was given up.
  std::map<CommunicatorId, WireSeq> first_seqs;
};

class World {
 public:
  explicit World(const Options& options);
  ~World();
  Result Run();

 private:
  using Closure = std::function<void()>;

  // ---- world.cc: time ----
  struct Item {
    TimePoint at;
    uint64_t order = 0;
    Closure run;
  };
  void In(Duration delay, Closure run);
  void InDaemon(int d, Duration delay, Closure run);  // dropped if that daemon has ended meanwhile
  void OnDaemon(int d, uint64_t life, Closure run);
  void InProcess(int pid, Duration delay, Closure run);
  void OnProcess(int pid, Closure run);
  void Violate(std::string promise, std::string what);
  template <typename... Args>
  void Trace(fmt::format_string<Args...> format, Args&&... args) {
    if (options_.trace) Print(fmt::format(format, std::forward<Args>(args)...));
  }
  void Print(const std::string& line) const;
  template <typename T>
  void Note(std::string_view what, int d, int g, const T& value);
  void Count(Fault fault) { ++result_.faults[static_cast<size_t>(fault)]; }
  Duration NetDelay();

  // ---- world.cc: daemons and machines ----
  void StartDaemon(int d);  // does nothing if it runs
  void KillDaemon(int d, bool silent);
  void FreezeDaemon(int d, Duration how_long);
  void Thaw(int d, uint64_t life);
  void CreateGroup(int d, int g);
  Machine* Find(int d, int g);
  Machine* Find(int d, int g, uint64_t nonce);  // null: that machine is gone
  void EnsureFollower(int d, int g);
  void Join(int d, int g, uint64_t f_nonce);
  void DropFollower(int d, int g);
  void Feed(int d, int g, MachineEvent event);
  // Does nothing if that machine is gone.
  void FeedTo(int d, int g, uint64_t nonce, MachineEvent event);
  void FeedLock(int d, const WireLock::Events& events);
  void Drain(int d);
  void ScheduleTick(int d, int g);
  void Tick(int d, int g, uint64_t nonce);
  void AfterCoordinator(int d, int g);
  // The version whose bytes an instance of the group serves, if nothing is being put into place.
  std::optional<Version> Serves(const MachineView& view, const std::string& instance) const;
  void CheckUndone(int g, const MachineView& view);

  void Perform(int d, int g, const MachineAction& action);
  void On(int d, int g, const Reply& a);
  void On(int d, int g, const SendPrepare& a);
  void On(int d, int g, const SendStaged& a);
  void On(int d, int g, const SendFlip& a);
  void On(int d, int g, const SendPart& a);
  void On(int d, int g, const SendCommitted& a);
  void On(int d, int g, const SendAborted& a);
  void On(int d, int g, const SendDraining& a);
  void On(int d, int g, const StartTransfer& a);
  void On(int d, int g, const StartVerify& a);
  void On(int d, int g, const ReleaseMember& a);
  void On(int d, int g, const UpdateAssembled& a);
  void On(int, int, const NodeOutOfUpdate&) {}  // the coordinator handles it
  void On(int d, int g, const UpdateAbandoned& a);
  void On(int, int, const CleanUpOverdue&) {}  // the coordinator handles it
  void On(int d, int g, const UpdateEnded& a);
  void On(int d, int g, const RefuseMember& a);
  void On(int d, int g, const WelcomeMember& a);
  void On(int d, int g, const StateChanged& a);
  void On(int d, int g, const LogLine& a);
  void On(int d, int g, const SendCommand& a);
  void On(int d, int g, const DropNode& a);
  void On(int d, int g, const SendReport& a);
  void On(int d, int g, const CloseLink& a);
  void On(int d, int g, const MakeSlots& a);
  void On(int d, int g, const OpenCommunicator& a);
  void On(int d, int g, const ConnectCommunicator& a);
  void On(int d, int g, const CloseCommunicator& a);
  void On(int d, int g, const StartWire& a);
  void On(int d, int g, const PlanRefit& a);
  void On(int, int, const MovePart&) {}  // the coordinator handles it, and the next three
  void On(int, int, const VerifyUpdate&) {}
  void On(int, int, const StartCompare&) {}
  void On(int, int, const StartRefit&) {}
  void On(int d, int g, const BuildProgram& a);
  void On(int d, int g, const StartMoves& a);
  void On(int d, int g, const StartExchange& a);
  void On(int d, int g, const AcquireWire& a);
  void On(int d, int g, const ReleaseWire& a);

  // ---- world.cc: links ----
  Link* FindLink(int c, int g, NodeId node);
  void Post(int link, bool down, Letter letter);
  void Pump(int link, bool down);
  void Receive(int link, bool down, const Letter& letter);
  void CloseSide(int link, bool coordinator, bool tell);
  void BreakLink(int link);
  TimePoint BlockedUntil(int a, int b) const;

  // ---- data.cc ----
  class Memory;
  std::shared_ptr<Work> NewWork(int d, int g, Work::Start start, std::string what);
  // False: a member was released (P6).
  bool FindDestinations(Work* work, const std::vector<MemberId>& members,
                        const std::vector<bool>& skip);
  void BeginWork(const std::shared_ptr<Work>& work, const absl::Status& submitted);
  MemoryOrigin OriginOf(int pid, size_t region, size_t element) const;
  void ShowInShards(int pid);
  bool ComparedBefore(const Work& work) const;
  bool ReadsOverlap(const Work& work);
  bool Skips(const Work& work, const BoundMove& move);
  static bool Reads(const Process& p, const char* address);
  void RunWork(const Work& work, bool end);
  TransferResult ResultOf(const Work& work) const;
  void EndWork(const Work& work);
  void Damage(const Work& work, TransferResult* result);
  void EndReading(const Work& work);
  static std::shared_ptr<Pool> OwnPool(Machine* m, MemberId reader);
  uint64_t UseSlot(Pool* pool, SlotGrant slot, const std::string& what);
  void EndUse(Pool* pool, SlotIndex slot, uint64_t id);
  bool Touches(int d, MemberId member) const;
  void CompleteCommunicator(uint64_t id, TimePoint give_up);
  void AnswerCommunicator(uint64_t id, const absl::Status& status);
  // A rank, other than its own, that the end can't reach; -1: none.
  int OutOfReach(const CommunicatorEnd& end) const;
  std::string CommOf(const CommunicatorEnd& end) const;
  void TryWire(const std::string& comm, WireSeq seq);
  void EndWire(uint64_t id, WireSeq seq, const absl::Status& status);
  CommunicatorEnd* CheckWire(int d, int g, CommunicatorId communicator, WireSeq seq,
                             Duration timeout, const std::string& where);
  // Runs one operation, which completes, fails, or is cut off.
  void RunWire(CommunicatorEnd* end, WireSeq seq, Duration timeout);
  void BreakComm(const std::string& comm, Duration soonest, Duration latest);
  CommunicatorEnd* EndOf(const std::string& address);
  CommunicatorEnd* FindEnd(int d, int g, CommunicatorId communicator);
  std::vector<uint64_t> EndsOf(const std::string& comm) const;

  // ---- refits.cc ----
  void MakeSplit(int g);
  bool Registers(int pid) const;
  void PlaceInEngine(int pid, Shard* shard);
  // The update that a process's calls name: the one that it began. 0: it has begun none, or is a
  // client that names none.
  UpdateId BegunBy(const Process& p) const;
  std::shared_ptr<Shard> MakeShard(int pid);
  void Clobber(Shard* shard);
  void FillShard(int pid, uint32_t round);
  void FillShards(uint32_t round);
  void RegisterShard(int pid);
  void CallRefit(int pid);
  void RefitAnswered(int pid, const RefitEvent& e, uint64_t token, size_t since, int repeats,
                     const absl::Status& status);
  Duration PlanningTime();
  uint64_t UseProgramSlot(int d, int g, SlotIndex slot, const std::string& what);
  void TryExchange(const std::string& comm, WireSeq seq);
  void ReceiveShare(const CommunicatorEnd& end, WireOp* op);

  // ---- members.cc ----
  int NewProcess(int seat);
  void KillProcess(int pid);
  void FreezeProcess(int pid, Duration how_long);
  void ThawProcess(int pid);
  void TryAttach(int pid);
  // ---- thieves.cc ----
  void SendThieves();
  void SendThief(int d, int g);
  void ThiefBegins(int d, MemberId member);
  void CheckStolen(int g, const BeginReply& begun);
  void ThiefLeaves(int d, MemberId member);
  void ReplaceStolen(int g);
  void LoseLease(int pid, const std::string& why, Duration retry);
  void EndPack(int pid, SlotGrant grant);
  void Hear(int d, MemberId member, std::function<void(Process*)> what);
  void Say(int pid, std::function<void(int d, MemberId member)> what);
  void CallDaemon(int pid, Duration delay, GroupEvent event, std::shared_ptr<Source> source,
                  std::function<void(const absl::Status&, const ReplyPayload&)> reply);
  // Does what CallDaemon does, and sometimes calls twice with one request id and compares the
  // answers (P3).
  void CallTwice(int pid, GroupEvent event, std::shared_ptr<Source> source,
                 std::function<void(const absl::Status&, const ReplyPayload&)> reply);
  void HearWelcome(int pid);
  void HearPrepare(int pid, Version version, UpdateId update);
  static void Flip(Process* p);
  // ---- staged.cc ----
  void HearStaged(int pid, Version version, UpdateId update);
  void CheckProcessed(const Process& p, Version version);
  void NoteStaged(int d, int g, const SendStaged& a);
  void CheckWaited(int d, int g, int at, const SendFlip& a);
  void HearPart(int pid, const SendPart& a, const std::shared_ptr<Pool>& pool);
  // `content`: of a commit: the version whose content it is.
  void HearOutcome(int pid, bool committed, Version version, bool dirty,
                   std::optional<Version> content);
  void RegisterLayout(int pid);
  // Whether the process is a member as far as its coordinator can know.
  bool IsMember(int g, int pid) const;
  void CheckRegistered(int g, const Round& round);
  uint32_t TensorOf(int g, const std::string& name) const;
  // The version whose bytes the process holds in all elements; `round`, if not null, gets the round
  // that installed them. nullopt: the bytes are not of one round.
  std::string WhatItHolds(const Process& p) const;
  std::optional<Version> TrueVersion(const Process& p, uint32_t* round) const;
  // Whether the process has the version: on either side, if it has flipped and waits for the
  // outcome.
  bool Holds(const Process& p, Version version) const;
  // Whether the group's version has that content: its own, or of a rollback that of another.
  bool HasContent(int g, Version version, std::optional<Version> content) const;

  // ---- rollbacks ----
  // A version was committed: somebody may roll it back, or release what is held.
  void FollowCommit(int d, int g, const Round& round);
  void RollBack(int g, bool by_trainer);
  void CheckHold(int g, const UpdateRecord& update, const MachineView& view);

  void StartAttempt(int g);
  void MakePlan(int g);
  void BeginAttempt(int pid);
  Duration SomeDuration();
  void BeginCall(int pid);
  void PushMore(int pid);
  void PushOne(int pid, size_t bucket, std::optional<SlotGrant> slot, int tries);
  void PushLeased(int pid, size_t bucket);
  void GiveSlotBack(int pid, SlotGrant grant);
  BucketDraft MakeBucket(int pid, size_t bucket) const;
  void PushDone(int pid, size_t bucket, std::optional<SlotGrant> slot, int tries,
                const absl::Status& status);
  void CommitAttempt(int pid, bool ahead);
  void Conclude(int pid, bool committed);
  void JobSweep(int g);

  // ---- chaos.cc ----
  void MakeScenario();
  void Chaos();
  void KillOnlyEngines();
  void BreakWireOfOne();
  void LoseDaemon();
  void Mute();
  void SendWrongPayload();
  // Checks that faults of these kinds cost only the members that they hit.
  // Kills a source instance, a late instance or a daemon of a catch-up that has just been
  // assembled, some time later.
  void HitCatchUp(int g, const Round& round);
  // For kTornSource: damages an element of a rank that gives, which no machine hears of.
  void TearSource(const Round& round);
  bool CatchUpRuns(int g) const;
  // Feeds the event once no catch-up runs; for kStubbornCatchUp.
  void FeedWithoutCatchUp(int d, int g, GroupEvent event);
  void CheckCaughtUp(int d, int g);
  void CheckRest(int g, const Round& round, const UpdateEnded& a);
  bool OnlyBesideBroken(int g, int d) const;
  void CheckKeptOut(int g);
  // Daemons without a trainer of any group and without a group of their own.
  std::vector<int> DaemonsWithoutTrainers(bool joined_only) const;
  void RestartKeptOut();
  void Sweep();
  void Heal();
  void AwaitQuiet(TimePoint give_up);
  void AwaitAttached(TimePoint give_up);
  void AwaitFinal(TimePoint give_up);
  // Whether the last update left out an instance that is clean.
  bool LeavesOneOut(int g);
  void CheckQuiet();
  bool AnyUpdateRuns();
  std::string WhoIsMissing(int g);

  GroupWorld& GroupOf(int g) { return groups_[static_cast<size_t>(g)]; }
  Daemon& DaemonAt(int d) { return daemons_[static_cast<size_t>(d)]; }
  Process& ProcessOf(int pid) { return *processes_[static_cast<size_t>(pid - 1)]; }
  const Process& ProcessOf(int pid) const { return *processes_[static_cast<size_t>(pid - 1)]; }
  Seat& SeatOf(const Process& p) { return seats_[static_cast<size_t>(p.seat)]; }
  const Seat& SeatOf(const Process& p) const { return seats_[static_cast<size_t>(p.seat)]; }

  const Options options_;
  Random random_;
  // By the coordinator's nonce and update: until when answers to Staged are waited for.
  std::map<std::pair<uint64_t, UpdateId>, TimePoint> staged_until_;
  Result result_;
  TimePoint now_{std::chrono::hours(1)};
  std::vector<Item> queue_;  // a heap
  uint64_t order_ = 0;
  uint64_t nonces_ = 0;
  bool over_ = false;

  PeerLimits peer_limits_;
  // Chances, per thousand operations; 0 once everything is healed.
  struct Chances {
    int slow_message = 0;
    int transfer_fails = 0;
    int bytes_damaged = 0;
    int replica_differs = 0;
    int wire_fails = 0;
    int communicator_fails = 0;
    int late_member = 0;
    int engine_fails = 0;
    int trainer_abort = 0;
    int call_gone = 0;
    int new_binding = 0;
    int chaos_members = 0;
    int chaos_links = 0;
    int chaos_daemons = 0;
    int chaos_operator = 0;
  } chances_;
  bool healed_ = false;
  bool no_faults_ = false;
  // The fault that hits one daemon alone, which must cost the others nothing.
  enum class OneDaemon : uint8_t { kNone, kOnlyEngines, kOneSided, kMute, kWrongPayload, kLost };
  OneDaemon one_daemon_ = OneDaemon::kNone;
  // A data plane that does not come up names nobody, as NCCL's. Finding the broken daemon may then
  // cost a group a few updates.
  bool nameless_ = false;
  std::map<int, size_t> lost_to_search_;  // by group
  TimePoint thawed_;                      // when the last freeze of a daemon ends

  WorkTransport transport_;
  std::vector<Daemon> daemons_;
  std::vector<GroupWorld> groups_;
  std::vector<Seat> seats_;
  std::vector<std::unique_ptr<Process>> processes_;
  std::vector<Link> links_;
  std::vector<Round> rounds_;
  // The times until which messages between two daemons are held up.
  std::vector<std::vector<TimePoint>> blocked_;
  std::map<uint64_t, std::shared_ptr<Work>> works_;
  std::map<uint64_t, CommunicatorEnd> ends_;
  std::map<std::string, std::map<WireSeq, WireOp>> comms_;
  std::set<std::string> broken_comms_;
  // The headers by group, coordinator, communicator and wire seq (P5).
  std::map<std::tuple<int, uint64_t, CommunicatorId, WireSeq>, HeaderRecord> headers_;
  std::map<std::tuple<int, uint64_t, UpdateId>, ProgramRecord> programs_;  // by group, coordinator
  std::map<std::tuple<int, uint64_t, UpdateId, PartSeq>,
           std::tuple<int, uint64_t, CommunicatorId, WireSeq>>
      wired_parts_;
};

}  // namespace refitd::sim

#endif  // REFITD_TESTS_SIM_WORLD_H_
