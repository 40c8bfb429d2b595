#include "client/engine.h"

#include <grpcpp/support/client_callback.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "client/arena_region.h"
#include "client/bucket.h"
#include "client/engine_state.h"
#include "client/events.h"
#include "client/member.h"
#include "proto/convert.h"
#include "proto/delivery.h"
#include "refitd/v1/engine.grpc.pb.h"
#include "transport/base/errors.h"
#include "transport/base/failure.h"
#include "transport/base/identity.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"

namespace refitd::client {
namespace {

constexpr size_t kMaxReasonBytes = 512;  // Failed.reason

// Update ids are unique in one daemon only, so this file adds the number of the lease to them: an
// answer then never goes to another daemon's update of the same number.
constexpr int kLeaseShift = 48;
constexpr uint64_t kUpdateMask = (uint64_t{1} << kLeaseShift) - 1;

// One lease. Immutable after Attach, except `flips`.
struct EngineLease : Lease<v1::Engine, v1::EngineMessage, v1::EngineEvent> {
  uint64_t number = 0;          // counts this engine's leases
  std::optional<Version> held;  // the version that the hello named
  uint64_t flips = 0;           // commits that exchanged the sides of arenas; under mutex_

  UpdateId Update(uint64_t update) const {
    return UpdateId((update & kUpdateMask) | number << kLeaseShift);
  }
  bool Has(UpdateId update) const { return update.value() >> kLeaseShift == number; }
  static uint64_t ToProto(UpdateId update) { return update.value() & kUpdateMask; }
};

// Whether a call's end leaves open what the daemon did.
bool IsUnclear(const absl::Status& end) {
  return absl::IsDeadlineExceeded(end) || absl::IsCancelled(end) || absl::IsUnavailable(end) ||
         absl::IsUnknown(end) || absl::IsInternal(end);
}

class EngineImpl final : public Member<Engine, EngineLease> {
 public:
  explicit EngineImpl(const EngineOptions& options)
      : Member(options.connect, /*engine=*/true, options.instance, options.rank),
        options_(options),
        state_(options.held_version, options.dirty),
        origin_(options.held_origin),
        owner_(options.held_owner),
        digest_(options.held_digest),
        content_(options.held_content) {}

  ~EngineImpl() override {
    StopReattaching();
    MutexLock lock(&mutex_);
    // Regions that are destroyed after this do not ask the daemon to forget them.
    if (lease_ != nullptr) lease_->connection->Detach();
  }

  absl::StatusOr<std::shared_ptr<Region>> AddArena(std::shared_ptr<Arena> arena) override;
  absl::StatusOr<std::shared_ptr<Arena>> TakeKept(int index) override;
  absl::Status Register(Layout layout) override;
  absl::StatusOr<Event> Next(std::chrono::milliseconds timeout) override;
  absl::Status Processed(UpdateId update) override;
  absl::Status Ready(Version version, std::optional<Duration> stopped) override;
  absl::Status Ack(const Part& part) override;
  absl::Status Fail(Version version, const std::string& reason) override;
  Weights weights() const override;
  std::optional<Version> version() const override;

 private:
  std::shared_ptr<EngineLease> NewLease() override;
  absl::Status AttachOver(EngineLease* lease, TimePoint deadline,
                          const std::stop_token& stop) override;
  bool IsLost() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    NoteEnd();
    return lost_ && ended_.ok();
  }
  void TakeOver(EngineLease* lease, uint64_t generation) override
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Tells whether an answer must be dropped. An answer goes to the lease from which its event came;
  // it is dropped if that lease is lost and the engine attaches, or has attached, again.
  absl::StatusOr<bool> Dropped() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns `sent`, the status of sending an answer, or OK if the daemon is gone and the engine
  // attaches again.
  absl::Status OrDropped(const absl::Status& sent) const {
    return reattaches() && DaemonGone(sent) ? absl::OkStatus() : sent;
  }
  // Sends an answer. If the update belongs to a lost lease, and so ended with that lease, sends
  // nothing and returns OK.
  absl::Status Send(UpdateId update, v1::EngineMessage message)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status SendAck(Version version, UpdateId update, PartSeq part)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status SendFailed(Version version, const std::string& reason)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  using Arenas = std::vector<std::shared_ptr<ArenaRegion>>;
  // The arenas that the layout's pieces lie in, which become its backs.
  Arenas ArenasOf(Layout* layout) ABSL_EXCLUSIVE_LOCKS_REQUIRED(register_mutex_);
  // Exchanges the sides of all registered arenas, or of none.
  absl::Status Flip() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Notes that a flip could not be undone.
  void LoseSides() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    state_.OnBroken();
    sides_unknown_ = true;
  }
  // Flip, for the running update. FAILED_PRECONDITION: the backs do not hold what it staged (P1),
  // or it is a rollback, which writes nothing, and they do not hold the version before, or nobody
  // knows (P2).
  absl::Status FlipForUpdate() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Notes that the layout was registered with that lease, over these arenas. `kept`: their memory
  // holds the version that the daemon kept for the lease.
  void TakeIn(const EngineLease& lease, Arenas arenas, bool kept)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Registers the layout with that lease. `withdraws`: an earlier layout may be in use, of this
  // lease or of one that has ended.
  absl::Status Register(EngineLease* lease, const Layout& layout, Arenas arenas, bool withdraws)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(register_mutex_);
  absl::Status AnswerReady(Version version, std::optional<TimePoint> stopped);
  // The outcome of an update for which the sides were exchanged.
  void Settle(EngineLease* lease, bool committed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Applies an event to the state. Returns Nothing if the event is not for the caller.
  Event Take(EngineLease* lease, const v1::EngineEvent& message);
  Event TakePart(const EngineLease& lease, const v1::BucketReady& bucket);
  // If the lease ended and all its events were taken, notes what follows for the weights and the
  // caller.
  void NoteEnd() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const EngineOptions options_;

  Mutex next_mutex_;  // one event is taken at a time; locked before mutex_

  // mutex_ is held while an answer is queued, so that answers leave in the order in which the state
  // allowed them.
  mutable EngineState state_ ABSL_GUARDED_BY(mutex_);
  uint64_t origin_ ABSL_GUARDED_BY(mutex_);    // incarnation of state_'s version; 0: not known
  std::string owner_ ABSL_GUARDED_BY(mutex_);  // of the last version; empty: not known
  uint64_t digest_ ABSL_GUARDED_BY(mutex_);    // of state_'s version; 0: not known
  // If state_'s version is a rollback: the version whose content it has.
  std::optional<Version> content_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<ArenaRegion>> arenas_ ABSL_GUARDED_BY(register_mutex_);
  Arenas registered_ ABSL_GUARDED_BY(mutex_);        // that the registered layout lies in
  TimePoint prepared_ ABSL_GUARDED_BY(mutex_);       // when the caller took the last Prepare
  bool must_flip_ ABSL_GUARDED_BY(mutex_) = false;   // before the next Ready
  bool rolls_back_ ABSL_GUARDED_BY(mutex_) = false;  // by that flip
  bool flipped_ ABSL_GUARDED_BY(mutex_) = false;     // for an update whose outcome did not come
  // The daemon may take other sides for the fronts than are mapped.
  bool sides_unknown_ ABSL_GUARDED_BY(mutex_) = false;
  // The call of a layout with arenas ended without the daemon's answer, and none was taken since.
  bool layout_unclear_ ABSL_GUARDED_BY(mutex_) = false;
  // True when lease_ is lost and all its events are taken.
  mutable bool lost_ ABSL_GUARDED_BY(mutex_) = false;
  // Lost and Reattached, which come before events.
  mutable std::deque<Event> notices_ ABSL_GUARDED_BY(mutex_);
  // Mappings of the slots of lost leases, kept until Ready because the caller may still hold views
  // on them.
  std::vector<std::shared_ptr<const SlotMemory>> old_pools_ ABSL_GUARDED_BY(mutex_);
};

v1::EngineMessage Hello(const EngineOptions& options, TimePoint deadline) {
  v1::EngineMessage message;
  v1::EngineHello* hello = message.mutable_hello();
  SayHello(options.connect, options.rank, options.world_size, deadline, hello);
  hello->set_instance(options.instance);
  hello->set_delivery(static_cast<v1::Delivery>(options.delivery));
  const auto manifest_tensors = options.manifest ? std::ssize(*options.manifest) : 0;
  if (manifest_tensors > kMaxTensorsPerLayout) {
    // The daemon refuses so many, and fails the calls that wait for this engine.
    hello->set_manifest_tensors(manifest_tensors);
  } else if (options.manifest) {
    v1::Manifest* manifest = hello->mutable_manifest();
    for (const TensorSpec& tensor : *options.manifest) {
      manifest->add_names(tensor.name);
      manifest->add_dtypes(refitd::ToProto(tensor.dtype));
      *manifest->add_shapes() = refitd::ToProto(tensor.shape);
    }
  }
  if (options.held_version) {
    hello->set_held_version(options.held_version->value());
    hello->set_held_origin(options.held_origin);
    hello->set_held_digest(options.held_digest);
    if (options.held_content) hello->set_held_content(options.held_content->value());
  }
  hello->set_held_owner(options.held_owner);
  hello->set_trainer_identity(options.trainer_identity);
  hello->set_dirty(options.dirty);
  hello->set_restore(options.restore);
  hello->set_wants_staged(options.wants_staged);
  hello->set_catch_up(options.catch_up && CatchesUp(options.delivery));
  return message;
}

absl::Status CheckOptions(const EngineOptions& options) {
  REFITD_RETURN_IF_ERROR(CheckConnectOptions(options.connect));
  REFITD_RETURN_IF_ERROR(CheckIdentifier(options.instance, "instance"));
  REFITD_RETURN_IF_ERROR(CheckRank(options.rank, options.world_size));
  if (options.held_version && options.held_version->value() < 0) {
    return InvalidField("held_version", "held_version is {}", *options.held_version);
  }
  if (options.held_version && options.dirty) {
    return InvalidField(
        "held_version",
        "held_version is {} and dirty is set: weights that hold a version are not dirty",
        *options.held_version);
  }
  if (options.restore && (options.held_version || options.dirty)) {
    return InvalidField("restore", "restore is set, and {} too: the daemon knows what is kept",
                        options.dirty ? "dirty" : "held_version");
  }
  if (!options.trainer_identity.empty()) {
    REFITD_RETURN_IF_ERROR(CheckOwnerPattern(options.trainer_identity, "trainer_identity"));
  }
  if (!options.manifest) return absl::OkStatus();
  if (!DeclaresManifest(options.delivery)) {
    return InvalidField("manifest", "a manifest is for {} delivery only",
                        DeliveriesWith(DeclaresManifest));
  }
  for (const TensorSpec& tensor : *options.manifest) {
    REFITD_RETURN_IF_ERROR(AboutField(ValidateTensor(tensor), "manifest"));
  }
  return absl::OkStatus();
}

// ---- attaching ----

std::shared_ptr<EngineLease> EngineImpl::NewLease() {
  auto lease = std::make_shared<EngineLease>();
  MutexLock lock(&mutex_);
  if (lease_ != nullptr) lease->number = lease_->number + 1;
  return lease;
}

absl::Status EngineImpl::AttachOver(EngineLease* lease, TimePoint deadline,
                                    const std::stop_token& stop) {
  EngineOptions options = options_;
  {
    // A lost lease brings no more events, so the state does not change after this.
    MutexLock lock(&mutex_);
    if (lease_ != nullptr) {
      options.held_version = state_.version();
      options.held_origin = origin_;
      options.held_owner = owner_;
      options.held_digest = digest_;
      options.held_content = content_;
      options.dirty = state_.weights() != Weights::kClean;
      options.restore = false;
    }
  }
  lease->held = options.held_version;
  return lease->Attach(connect_, Hello(options, deadline), /*handler=*/nullptr, wake_, deadline,
                       stop, [&]() -> absl::Status {
                         // Map the slots now, so that a driver that is missing or refuses is an
                         // error of Attach and not of the first update.
                         if (!ReadsSlots(options.delivery) || !OnDevice(connect_.device)) {
                           return absl::OkStatus();
                         }
                         return lease->connection->Pool(Access::kReadOnly).status();
                       });
}

void EngineImpl::TakeOver(EngineLease* lease, uint64_t /*generation*/) {
  if (state_.has_outstanding()) {
    if (auto pool = lease_->connection->MappedPool()) old_pools_.push_back(std::move(pool));
  }
  state_.OnReattached();
  // The sides stay: this daemon was given them as they are, and has staged nothing yet.
  must_flip_ = flipped_ = sides_unknown_ = layout_unclear_ = false;
  lost_ = false;
  notices_.push_back(Reattached{state_.weights(), lease->held});
}

void EngineImpl::NoteEnd() const {
  if (lost_ || !lease_->stream->exhausted()) return;
  lost_ = true;
  state_.OnLost();
  const absl::Status why = lease_->stream->status();
  if (!reattaches() || !DaemonGone(why)) {
    ended_ = why;
    return;
  }
  notices_.push_back(Lost{std::string(Message(why)), state_.weights()});
  wake_();
}

// ---- the conversation ----

absl::StatusOr<std::shared_ptr<Region>> EngineImpl::AddArena(std::shared_ptr<Arena> arena) {
  REFITD_ASSIGN_OR_RETURN(std::shared_ptr<ArenaRegion> made,
                          ArenaRegion::Make(std::move(arena), regions_, options_.restore));
  MutexLock lock(&register_mutex_);
  std::erase_if(arenas_, [](const auto& known) { return known.expired(); });
  arenas_.push_back(made);
  return std::shared_ptr<Region>(std::move(made));
}

absl::StatusOr<std::shared_ptr<Arena>> EngineImpl::TakeKept(int index) {
  std::shared_ptr<EngineLease> lease;
  {
    MutexLock lock(&mutex_);
    lease = lease_;
  }
  REFITD_ASSIGN_OR_RETURN(SharedSides sides, lease->connection->TakeKept(index));
  return Arena::Open(std::move(sides), connect_);
}

EngineImpl::Arenas EngineImpl::ArenasOf(Layout* layout) {
  Arenas found;
  for (const std::weak_ptr<ArenaRegion>& known : arenas_) {
    std::shared_ptr<ArenaRegion> arena = known.lock();
    if (arena == nullptr) continue;
    const auto& pieces = layout->pieces;
    if (std::none_of(pieces.begin(), pieces.end(),
                     [&](const Piece& piece) { return piece.region == arena->id(); })) {
      continue;
    }
    layout->backs.push_back(arena->pair());
    found.push_back(std::move(arena));
  }
  return found;
}

absl::Status EngineImpl::Register(Layout layout) {
  TieSharedTensors(&layout);
  std::shared_ptr<EngineLease> lease;
  absl::Status status;
  {
    MutexLock lock(&register_mutex_);
    Arenas arenas = ArenasOf(&layout);
    bool withdraws = false;
    for (const std::shared_ptr<ArenaRegion>& arena : arenas) {
      withdraws = !arena->TakeFresh() || withdraws;
    }
    {
      MutexLock state_lock(&mutex_);
      // P2: an abort goes back to the other sides. Ready waits for this call's end, so that none is
      // flipped from here on.
      if (flipped_ && !arenas.empty()) {
        return Error(absl::StatusCode::kFailedPrecondition,
                     "the outcome of an update that exchanged the sides of arenas is awaited");
      }
      lease = lease_;
      layout.flips = lease->flips;
    }
    status = lease->stream->status();
    if (status.ok()) status = Register(lease.get(), layout, std::move(arenas), withdraws);
  }
  if (status.ok()) return status;
  const absl::Status end = lease->stream->LeaseEndBehind("RegisterLayout", status, kCleanupLimit);
  if (end.ok()) return status;
  if (!reattaches() || !DaemonGone(end)) return end;
  return WithFailureOf(end, Error(absl::StatusCode::kUnavailable,
                                  "{}; register once more after Reattached", Message(end)));
}

// The daemon must not write to the backs from the copies on, until it has the layout: what an
// update wrote there and did not commit would stay where the layout names nothing. That is true of
// a lease that has ended too, whose copies may still run.
absl::Status EngineImpl::Register(EngineLease* lease, const Layout& layout, Arenas arenas,
                                  bool withdraws) {
  const auto upload = [&](const Layout& sent) ABSL_EXCLUSIVE_LOCKS_REQUIRED(register_mutex_) {
    return registration_.Register(lease->connection.get(), lease->Uploader(), sent);
  };
  if (withdraws) {
    Layout pending = layout;
    pending.backs_differ = true;
    REFITD_RETURN_IF_ERROR(upload(pending).status());
  }
  for (const std::shared_ptr<ArenaRegion>& arena : arenas) {
    REFITD_RETURN_IF_ERROR(arena->CopyToBack());
  }
  const absl::StatusOr<Registration::Registered> registered = upload(layout);
  if (registered.ok() || absl::IsDataLoss(registered.status())) {
    for (const std::shared_ptr<ArenaRegion>& arena : arenas) {
      REFITD_RETURN_IF_ERROR(arena->AllowWrites());
    }
  }
  MutexLock state_lock(&mutex_);
  if (!registered.ok()) {
    // P1: the daemon may have taken the layout all the same, and a flip of other arenas, or of
    // none, would then be taken for one of these.
    if (!arenas.empty() && IsUnclear(registered.status())) layout_unclear_ = true;
    return registered.status();
  }
  TakeIn(*lease, std::move(arenas), registered->kept);
  return absl::OkStatus();
}

void EngineImpl::TakeIn(const EngineLease& lease, Arenas arenas, bool kept) {
  registered_ = std::move(arenas);
  layout_unclear_ = false;
  const v1::Welcome& welcome = lease.connection->welcome();
  const v1::KeptArenas& held = welcome.kept();
  if (!kept || !state_.OnRestored(Version(held.version()))) return;
  origin_ = held.incarnation();
  owner_ = held.owner();
  digest_ = held.digest();
  if (welcome.has_content_version() && welcome.group_version() == held.version()) {
    content_ = Version(welcome.content_version());
  }
  notices_.push_back(Committed{Version(held.version()), origin_, owner_, digest_, content_});
}

absl::StatusOr<Event> EngineImpl::Next(std::chrono::milliseconds timeout) {
  const TimePoint deadline = After(timeout);
  MutexLock lock(&next_mutex_);
  while (true) {
    std::shared_ptr<EngineLease> lease;
    {
      MutexLock state_lock(&mutex_);
      NoteEnd();
      if (!notices_.empty()) {
        Event notice = std::move(notices_.front());
        notices_.pop_front();
        return notice;
      }
      REFITD_RETURN_IF_ERROR(ended_);
      if (lost_) {
        if (!changed_.WaitUntil(&mutex_, deadline) && lost_ && ended_.ok()) {
          return Event(Nothing{});
        }
        continue;
      }
      lease = lease_;
    }
    const auto event = lease->stream->Front(deadline);
    if (!event.ok()) continue;  // NoteEnd decides what follows from the error.
    if (*event == nullptr) return Event(Nothing{});
    Event taken = Take(lease.get(), **event);
    lease->stream->PopFront();  // after Take: NoteEnd must find the event's effect in the state
    if (wake_ && lease->stream->exhausted()) wake_();
    if (!std::holds_alternative<Nothing>(taken)) return taken;
  }
}

Event EngineImpl::Take(EngineLease* lease, const v1::EngineEvent& message) {
  if (message.has_bucket()) return TakePart(*lease, message.bucket());
  Event event = DecodeEvent(message);
  MutexLock lock(&mutex_);
  if (const auto* staged = std::get_if<Staged>(&event)) {
    state_.OnStaged(staged->version, lease->Update(message.staged().update_id()));
  } else if (const auto* prepare = std::get_if<Prepare>(&event)) {
    state_.OnPrepare(prepare->version, lease->Update(message.prepare().update_id()));
    prepared_ = std::chrono::steady_clock::now();
    must_flip_ = prepare->flip;
    rolls_back_ = prepare->content.has_value();
  } else if (auto* committed = std::get_if<Committed>(&event)) {
    Settle(lease, /*committed=*/true);
    if (!state_.OnCommitted(committed->version)) return Nothing{};
    origin_ = committed->incarnation;
    owner_ = committed->owner;
    digest_ = committed->digest;
    content_ = committed->content;
    if (state_.weights() == Weights::kClean) return event;
    Failure failure;
    failure.version = committed->version.value();
    failure.weights = Weights::kDirty;
    return Aborted{committed->version, "it was committed, but this rank had failed",
                   /*dirty=*/true, failure};
  } else if (auto* aborted = std::get_if<Aborted>(&event)) {
    Settle(lease, /*committed=*/false);
    if (!state_.OnAborted(aborted->version, aborted->dirty)) return Nothing{};
    // A restarted daemon does not know what the daemon before it left in this memory; this rank
    // does (P2).
    aborted->dirty = aborted->dirty || state_.weights() != Weights::kClean;
    if (aborted->dirty) aborted->failure.weights = Weights::kDirty;
  }
  return event;
}

Event EngineImpl::TakePart(const EngineLease& lease, const v1::BucketReady& bucket) {
  const Version version(bucket.version());
  const UpdateId update = lease.Update(bucket.update_id());
  const PartSeq seq(bucket.part());
  auto part = [&]() -> absl::StatusOr<Part> {
    REFITD_ASSIGN_OR_RETURN(auto pool, lease.connection->Pool(Access::kReadOnly));
    REFITD_ASSIGN_OR_RETURN(
        Part decoded,
        DecodePart(bucket, std::span<const char>(pool->data(), static_cast<size_t>(pool->bytes())),
                   lease.connection->welcome().slot_bytes()));
    decoded.slots = std::move(pool);
    return decoded;
  }();
  if (part.ok()) part->update = update;
  MutexLock lock(&mutex_);
  if (!part.ok() && state_.Fail(version).ok()) {
    (void)SendFailed(version, Message(part.status()));
  }
  // Parts may still arrive after a failure. Nobody needs them, but their slots must go back.
  if (state_.failed() || !state_.OnPart(update, seq)) {
    (void)SendAck(version, update, seq);
    return Nothing{};
  }
  return *std::move(part);
}

absl::Status EngineImpl::Send(UpdateId update, v1::EngineMessage message) {
  if (!lease_->Has(update)) return absl::OkStatus();
  return lease_->stream->Send(std::move(message));
}

absl::Status EngineImpl::SendAck(Version version, UpdateId update, PartSeq part) {
  v1::EngineMessage message;
  message.mutable_ack()->set_version(version.value());
  message.mutable_ack()->set_update_id(EngineLease::ToProto(update));
  message.mutable_ack()->set_part(part.value());
  return Send(update, std::move(message));
}

absl::Status EngineImpl::SendFailed(Version version, const std::string& reason) {
  v1::EngineMessage message;
  message.mutable_failed()->set_version(version.value());
  message.mutable_failed()->set_update_id(EngineLease::ToProto(state_.update()));
  message.mutable_failed()->set_reason(CleanText(Escaped(reason), kMaxReasonBytes));
  return Send(state_.update(), std::move(message));
}

absl::StatusOr<bool> EngineImpl::Dropped() {
  NoteEnd();
  const absl::Status status = lease_->stream->status();
  if (!reattaches()) {
    REFITD_RETURN_IF_ERROR(status);
    return false;
  }
  REFITD_RETURN_IF_ERROR(ended_);
  return !status.ok() || !notices_.empty();
}

absl::Status EngineImpl::Flip() {
  for (size_t i = 0; i < registered_.size(); ++i) {
    const absl::Status flipped = registered_[i]->Flip();
    if (flipped.ok()) continue;
    bool undone = !absl::IsDataLoss(flipped);
    while (i-- > 0) undone = registered_[i]->Flip().ok() && undone;
    if (!undone) LoseSides();
    return flipped;
  }
  return absl::OkStatus();
}

absl::Status EngineImpl::FlipForUpdate() {
  if (sides_unknown_) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "an earlier exchange of the arenas' sides failed: attach again");
  }
  if (layout_unclear_) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "whether the daemon took the last layout is unknown: register it again");
  }
  if (rolls_back_ && !state_.was_clean()) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "the weights are not clean: the arenas' other sides may hold anything");
  }
  return Flip();
}

void EngineImpl::Settle(EngineLease* lease, bool committed) {
  if (!std::exchange(flipped_, false)) return;
  if (!committed) {
    if (!Flip().ok()) LoseSides();
    return;
  }
  ++lease->flips;
  for (const std::shared_ptr<ArenaRegion>& arena : registered_) {
    lease->connection->Exchange(arena->pair());
  }
}

absl::Status EngineImpl::Processed(UpdateId update) {
  MutexLock lock(&mutex_);
  REFITD_ASSIGN_OR_RETURN(const bool dropped, Dropped());
  if (dropped) return absl::OkStatus();
  const UpdateId answered = lease_->Update(update.value());
  REFITD_ASSIGN_OR_RETURN(const Version version, state_.Processed(answered));
  v1::EngineMessage message;
  message.mutable_processed()->set_version(version.value());
  message.mutable_processed()->set_update_id(update.value());
  return OrDropped(Send(answered, std::move(message)));
}

absl::Status EngineImpl::Ready(Version version, std::optional<Duration> stopped) {
  std::optional<TimePoint> since;
  if (stopped.has_value()) since = std::chrono::steady_clock::now() - *stopped;
  const bool flips = [this] {
    MutexLock lock(&mutex_);
    return must_flip_;
  }();
  if (!flips) return AnswerReady(version, since);
  // If a layout's answer is on its way, the arenas to flip are those of that layout (P1).
  MutexLock lock(&register_mutex_);
  return AnswerReady(version, since);
}

absl::Status EngineImpl::AnswerReady(Version version, std::optional<TimePoint> stopped) {
  std::vector<std::shared_ptr<const SlotMemory>> over;  // unmapped after the lock
  MutexLock lock(&mutex_);
  REFITD_ASSIGN_OR_RETURN(const bool dropped, Dropped());
  if (dropped) return absl::OkStatus();
  REFITD_RETURN_IF_ERROR(state_.CheckReady(version));
  if (std::exchange(must_flip_, false)) {
    if (absl::Status flipped = FlipForUpdate(); !flipped.ok()) {
      if (state_.Fail(version).ok()) (void)SendFailed(version, Message(flipped));
      return flipped;
    }
    flipped_ = true;
  }
  REFITD_RETURN_IF_ERROR(state_.Ready(version));
  over.swap(old_pools_);
  v1::EngineMessage message;
  message.mutable_ready()->set_version(version.value());
  message.mutable_ready()->set_update_id(EngineLease::ToProto(state_.update()));
  const Duration paused = std::chrono::steady_clock::now() - stopped.value_or(prepared_);
  message.mutable_ready()->set_stopped_us(
      std::chrono::duration_cast<std::chrono::microseconds>(paused).count());
  return OrDropped(Send(state_.update(), std::move(message)));
}

absl::Status EngineImpl::Ack(const Part& part) {
  MutexLock lock(&mutex_);
  REFITD_ASSIGN_OR_RETURN(const bool dropped, Dropped());
  if (dropped) return absl::OkStatus();
  REFITD_RETURN_IF_ERROR(state_.Ack(part.update, part.part));
  return OrDropped(SendAck(part.version, part.update, part.part));
}

absl::Status EngineImpl::Fail(Version version, const std::string& reason) {
  MutexLock lock(&mutex_);
  REFITD_ASSIGN_OR_RETURN(const bool dropped, Dropped());
  if (dropped) return absl::OkStatus();
  REFITD_RETURN_IF_ERROR(state_.Fail(version));
  return OrDropped(SendFailed(version, reason));
}

Weights EngineImpl::weights() const {
  MutexLock lock(&mutex_);
  NoteEnd();
  return state_.weights();
}

std::optional<Version> EngineImpl::version() const {
  MutexLock lock(&mutex_);
  NoteEnd();
  return state_.version();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Attach(const EngineOptions& options) {
  REFITD_RETURN_IF_ERROR(CheckOptions(options));
  auto engine = std::make_unique<EngineImpl>(options);
  REFITD_RETURN_IF_ERROR(engine->Start());
  return std::unique_ptr<Engine>(std::move(engine));
}

}  // namespace refitd::client
