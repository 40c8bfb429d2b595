// An engine rank: attach, register parameters (or take loader delivery), then answer events.
//
//   EngineOptions options{.connect = {.group = "policy"}, .instance = "vllm-0"};
//   REFITD_ASSIGN_OR_RETURN(auto engine, Engine::Attach(options));
//   REFITD_ASSIGN_OR_RETURN(auto region, engine->NewRegion(bytes));
//   REFITD_RETURN_IF_ERROR(engine->Register(layout));
//   while (serving) {
//     REFITD_ASSIGN_OR_RETURN(Event event, engine->Next(std::chrono::seconds(1)));
//     if (auto* prepare = std::get_if<Prepare>(&event)) {
//       pause();
//       REFITD_RETURN_IF_ERROR(engine->Ready(prepare->version));
//     } else if (auto* part = std::get_if<Part>(&event)) {
//       load(part->tensors);
//       REFITD_RETURN_IF_ERROR(engine->Ack(*part));
//     } else if (std::get_if<Committed>(&event)) {
//       resume();
//     } else if (auto* aborted = std::get_if<Aborted>(&event)) {
//       if (!aborted->dirty) resume();
//     } else if (auto* lost = std::get_if<Lost>(&event)) {  // with ConnectOptions::reattach
//       if (lost->weights == Weights::kClean) resume();
//     }
//   }
//
// The rank resumes on Committed or a clean Aborted only. If the lease is lost between Ready and the
// outcome, `weights()` then says kUnknown, which counts as dirty. The client
// never guesses the outcome (P2).
//
// Only this object remembers that the rank's weights are unknown: the daemon forgets a rank with
// its lease. A process that attaches anew over memory that an earlier Engine served (or that
// another process left) must therefore say what the memory holds: `held_version` if weights() of
// the earlier Engine was kClean and version() was set, else `dirty`. If you don't know
// whether the weights are whole, say `dirty`.
//
// With ConnectOptions::reattach a lease that is lost with its daemon is no error: Next() gives
// Lost, then Reattached once a daemon at the socket has taken the rank back, with the same regions
// and the layout that was registered last. The daemon is told a held version only if the weights
// are kClean; a rank whose weights are unknown keeps that, through every later lease, until an
// update commits. Between the two events the rank serves its weights, if they are good. Attaching
// again begins when all events of the lost lease were taken, so keep calling Next(). After Lost,
// the views of parts of the lost lease must no longer be used; answers to events of the lost lease
// are dropped and return OK.
#ifndef REFITD_CLIENT_ENGINE_H_
#define REFITD_CLIENT_ENGINE_H_

#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "client/arena.h"
#include "client/types.h"
#include "proto/delivery.h"
#include "transport/base/failure.h"

namespace refitd::client {

using Delivery = refitd::DeliveryMode;
using Weights = refitd::Weights;

struct EngineOptions {
  ConnectOptions connect{};
  std::string instance{};
  int rank = 0;
  int world_size = 1;
  Delivery delivery = Delivery::kInPlace;
  // Loader delivery: the tensors that must arrive in every update.
  std::optional<std::vector<TensorSpec>> manifest{};
  // In-place delivery: the rank takes part in catch-ups. If its instance lacks the group's version,
  // it gets that version from clean instances, by Prepare and its outcome as in any update; so keep
  // calling Next(). If its instance holds the version, its registered memory is read at any time
  // and given to others: from Committed to the next Ready, the end of the lease or the next
  // Register, that memory must be the rank's weights, unchanged. Set false if it is not, as for
  // memory that is overwritten or released between updates. Has no effect with loader delivery.
  bool catch_up = true;
  // The version that the memory holds, complete and verified, from an earlier lease. Absent: refitd
  // installed no version there.
  std::optional<Version> held_version{};
  // With held_version: the Committed::incarnation that came with that version. 0: not known.
  uint64_t held_origin = 0;
  // With held_version: the Committed::digest that came with that version. 0: not known. With
  // `catch_up` the daemon compares the registered memory with it; a difference means that no
  // version is held.
  uint64_t held_digest = 0;
  // With held_version: the Committed::content that came with that version.
  std::optional<Version> held_content{};
  // The Committed::owner that came with the last version that was committed into this memory, also
  // if it is dirty since. Empty: not known. A group that is made again belongs to that owner; a
  // group that another identity owns refuses the rank (PERMISSION_DENIED).
  std::string held_owner{};
  // Whose weights the rank takes: "uid:N", "spiffe://DOMAIN/PATH", "spiffe://DOMAIN/PATH/*",
  // "dns:NAME" or "dns:*.DOMAIN". A group that another identity owns refuses the rank
  // (PERMISSION_DENIED). Empty: any owner's.
  std::string trainer_identity{};
  // The memory may hold no whole version, because an update of an earlier lease failed or its
  // outcome never came. If you don't know whether the weights are whole, say dirty: the only
  // cost is that the rank does not count as good before the next commit. Not with held_version
  // (INVALID_ARGUMENT).
  bool dirty = false;
  // In-place delivery: the daemon keeps this rank's arenas for a while when the rank dies or
  // detaches (GroupSpec::keep_seconds), and the rank takes up those that it keeps of this rank's
  // last lease (Engine::TakeKept), which are given up when the rank attaches without this.
  // PERMISSION_DENIED: they are kept for another user. Not with held_version or dirty
  // (INVALID_ARGUMENT).
  bool restore = false;
  // In-place delivery over arenas: a Staged event comes when a version is staged, before Prepare.
  bool wants_staged = false;
};

// The version lies in the backs of the rank's arenas, complete and verified, and stays there until
// the outcome: the rank prepares what it can while it serves, and then calls Engine::Processed.
// Prepare follows, also if that was not called in time; or Aborted, after which nothing that was
// made of the version may be used.
struct Staged {
  Version version;
  UpdateId update;  // tells two updates to one version apart; the same for all of the group's ranks
  std::chrono::milliseconds remaining{0};  // until Processed is due
  std::optional<Version> content{};        // as Prepare::content
};

struct Prepare {
  Version version;
  UpdateId update;                         // as Staged::update
  std::chrono::milliseconds remaining{0};  // of the update; with `flip` until Ready is due
  int64_t tensor_count = 0;                // 0: unknown
  // The version lies in the backs of the rank's arenas already: Ready puts it into place, and all
  // that the rank has to wait for is its own device's work.
  bool flip = false;
  // With `flip`, of a rollback: the version whose content lies in the backs.
  std::optional<Version> content{};
};

struct Committed {
  Version version;
  // The incarnation of the group in which the version was committed; versions of two incarnations
  // can't be compared. An engine that comes back in another process tells both (EngineOptions).
  uint64_t incarnation = 0;
  // The identity that owns the group. The engine brings it back with the version, as it does the
  // digest.
  std::string owner{};
  // The digest of this rank's registered memory; 0: the update did not read that memory back.
  uint64_t digest = 0;
  // If the version is a rollback: the version whose content it has.
  std::optional<Version> content{};
};

struct Aborted {
  Version version;
  std::string reason;
  bool dirty = false;  // this rank's instance has no version until the next commit
  Failure failure{};
};

struct Draining {};
struct Nothing {};  // the timeout passed

// The daemon went away, and with it the update that ran, if any; the client is trying to attach
// again.
struct Lost {
  std::string reason;
  Weights weights = Weights::kClean;  // kClean: serving may go on
};
// The client has attached again.
struct Reattached {
  Weights weights = Weights::kClean;
  std::optional<Version> held_version;  // the version that this rank holds, as its hello named it
};

using Event =
    std::variant<Nothing, Staged, Prepare, Part, Committed, Aborted, Draining, Lost, Reattached>;

// Thread-safe, but events should be answered by one thread. Destroying it detaches.
class Engine : public SharesMemory {
 public:
  static absl::StatusOr<std::unique_ptr<Engine>> Attach(const EngineOptions& options);
  // Makes a region of an arena of ConnectOptions::device, which this engine has until the region
  // and, once a layout names it, the engine are destroyed. A layout whose pieces lie in arenas
  // alone is staged: versions are written to the other sides while the rank serves, and Prepare
  // comes with `flip` when a version is complete and verified. Ready then exchanges the sides, and
  // an Aborted exchanges them back. What no piece names is the same on both sides: Register copies
  // it, and the rank must not write there afterwards. FAILED_PRECONDITION: another engine has the
  // arena. Also errors of NewRegion.
  virtual absl::StatusOr<std::shared_ptr<Region>> AddArena(std::shared_ptr<Arena> arena) = 0;
  // With EngineOptions::restore: the arena of that number, from 0, of those that the daemon keeps
  // of this rank's last lease, in the order in which they were added to that engine. It is
  // read-only until the first Register, for which the daemon compares layout and memory with what
  // was committed. OK: version() has a value, and the next event is Committed of that version.
  // DATA_LOSS: they differ; the memory may be written now, what it holds has no meaning, and the
  // rank is to register once it has loaded its weights. All pieces must lie in these arenas, at the
  // places of before; bytes that no piece names are not compared. NOT_FOUND: the daemon keeps
  // fewer. FAILED_PRECONDITION: a layout is registered already.
  virtual absl::StatusOr<std::shared_ptr<Arena>> TakeKept(int index) = 0;
  // Registers the pieces that this rank holds; their regions come from this engine. If two tensors
  // share their memory (tied weights), one has pieces and the other is named in `tensors` without
  // any piece: trainers may push or refit the other, and nothing is written for it. Register
  // catch-ups in binding_generation. A layout that is refused changes nothing. Where the rank has a
  // layout and the new one lies in arenas, the rank has none, and no update takes its instance in,
  // from the daemon's first consent until the call ends well. UNAVAILABLE while the lease is lost:
  // call Register once more after Reattached.
  virtual absl::Status Register(Layout layout) = 0;

  // The next event, or Nothing after `timeout`. An error (UNAVAILABLE, ABORTED, ...) says why the
  // lease ended, and that the client does not try (any more) to attach again; weights() then tells
  // whether the weights are whole.
  virtual absl::StatusOr<Event> Next(std::chrono::milliseconds timeout) = 0;
  // Says that this rank has done what it can with a staged version while it serves.
  // FAILED_PRECONDITION: no Staged of this update is unanswered, since Prepare has come, say.
  virtual absl::Status Processed(UpdateId update) = 0;
  // Says that this rank no longer reads its weights, and for how long it has not: by that the
  // daemon counts pauses. nullopt: since Next() returned Prepare. FAILED_PRECONDITION: no Prepare
  // of this version is unanswered.
  virtual absl::Status Ready(Version version, std::optional<Duration> stopped) = 0;
  absl::Status Ready(Version version) { return Ready(version, std::nullopt); }
  // Says that the part's views are no longer used: on a GPU, all device work that reads them has
  // ended (a stream was synchronised, an event was waited for). Parts handed out before Fail or
  // Aborted must be acknowledged too: their slots are in use until then, or until Ready for a later
  // update, which releases them all. (Parts that come after Fail are not handed out.)
  virtual absl::Status Ack(const Part& part) = 0;
  // Says that this rank can't go on with the update (its loader failed). Aborted follows. If the
  // update was committed before the failure reached the daemon, that Aborted is dirty and comes to
  // this rank alone.
  virtual absl::Status Fail(Version version, const std::string& reason) = 0;

  virtual Weights weights() const = 0;
  // The version installed and committed here; nullopt: none, or weights() is not kClean.
  virtual std::optional<Version> version() const = 0;
  // How often this engine attached again after it lost its lease.
  virtual int reattachments() const = 0;
};

// Joins the parts of tensors larger than a slot, in memory of the device that the parts are on.
// Feed it every Part; it hands out whole tensors once they are complete. Tensors that arrive whole
// are passed on without a copy; bytes that are copied have been read from the part when Add
// returns. Not thread-safe.
class PartJoiner {
 public:
  PartJoiner();
  ~PartJoiner();
  PartJoiner(const PartJoiner&) = delete;
  PartJoiner& operator=(const PartJoiner&) = delete;
  // Returns the whole tensors that this part completes. Views are valid until the part is
  // acknowledged; views of joined tensors until the next Add or Reset. INVALID_ARGUMENT: a part
  // that overlaps or disagrees with what came before; RESOURCE_EXHAUSTED: no memory to join in, on
  // this device.
  absl::StatusOr<std::vector<TensorView>> Add(const Part& part);
  // Forgets unfinished tensors (on Committed and Aborted).
  void Reset();
  // Names of tensors begun and not finished.
  std::vector<std::string> Unfinished() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace refitd::client

#endif  // REFITD_CLIENT_ENGINE_H_
