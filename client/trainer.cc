#include "client/trainer.h"

#include <grpcpp/alarm.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "client/bucket.h"
#include "client/member.h"
#include "proto/convert.h"
#include "proto/failure.h"
#include "refitd/v1/trainer.grpc.pb.h"
#include "transport/base/errors.h"
#include "transport/base/failure.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"

namespace refitd::client {
namespace {

using Stub = v1::Trainer::StubInterface::async_interface;

constexpr std::chrono::seconds kDefaultDuration{120};  // for daemons that do not tell their default
constexpr std::chrono::seconds kGetUpdateLimit{10};
constexpr size_t kMaxReasonBytes = 512;  // AbortRequest.reason
// Bounds PushBucket calls that carry their bytes; the window only counts calls. A daemon takes 32
// MiB of unfinished messages of all clients of an identity together.
constexpr int64_t kMaxInlineBytesInFlight = int64_t{4} << 20;
// Bounds the tensors of unanswered calls, where there are two. A daemon checks a bucket as it
// comes, so that buckets far ahead of the copies would only hold these up.
constexpr size_t kMaxTensorsInFlight = 2048;

// Runs `run` on a gRPC thread, as if a call had ended, so that a caller that holds a lock is not
// called back on its own thread.
void RunOnClientThread(std::function<void()> run) {
  auto holder = std::make_shared<std::unique_ptr<grpc::Alarm>>(std::make_unique<grpc::Alarm>());
  (*holder)->Set(std::chrono::system_clock::now(), [holder, run = std::move(run)](bool) {
    const std::unique_ptr<grpc::Alarm> alarm = std::move(*holder);  // it keeps this callback alive
    run();
  });
}

// The state of a trainer that outlives its leases.
struct TrainerState {
  Mutex mutex;
  std::optional<Version> group_version ABSL_GUARDED_BY(mutex);

  void Committed(Version version) {
    MutexLock lock(&mutex);
    if (!group_version || *group_version < version) group_version = version;
  }
};

// One lease, shared by all objects that came from it.
struct TrainerLease : Lease<v1::Trainer, v1::TrainerMessage, v1::TrainerEvent> {
  // Constant after Attach.
  Duration default_duration = kDefaultDuration;
  // The binding generation of the layout that the daemon has; 0: it has no layout.
  std::atomic<uint64_t> binding_generation{0};
  std::shared_ptr<TrainerState> known;

  Stub* async() { return stub->async(); }

  // If the lease ended before or during the call, the error is the lease's end, with `what` before
  // it. `untaken` (may be null) tells whether the daemon never took the call up, because the lease
  // was over by then.
  template <typename Request, typename Response>
  absl::StatusOr<Response> Call(UnaryMethod<Stub, Request, Response> method, Request request,
                                TimePoint deadline, std::string_view what,
                                bool* untaken = nullptr) {
    if (absl::Status end = stream->status(); !end.ok()) {
      if (untaken != nullptr) *untaken = true;
      return stream->LeaseEndBehind(what, absl::UnauthenticatedError(""), kCleanupLimit);
    }
    *request.mutable_lease() = connection->lease();
    auto response =
        CallAndWait<Stub, Request, Response>(async(), method, std::move(request), deadline, what);
    if (response.ok()) return response;
    if (untaken != nullptr) *untaken = absl::IsUnauthenticated(response.status());
    REFITD_RETURN_IF_ERROR(stream->LeaseEndBehind(what, response.status(), kCleanupLimit));
    return NameDaemon(what, connection->socket(), response.status());
  }

  // Whether the lease ended because the daemon went away.
  bool Lost() const { return DaemonGone(stream->status()); }

  // Claims the update for a new handle. False: the update has a handle already; a second handle
  // would abort the update under the first when it is destroyed.
  bool Claim(uint64_t update_id) {
    MutexLock lock(&claims_mutex);
    return claims.insert(update_id).second;
  }
  void Unclaim(uint64_t update_id) {
    MutexLock lock(&claims_mutex);
    claims.erase(update_id);
  }

  Mutex claims_mutex;
  std::set<uint64_t> claims ABSL_GUARDED_BY(claims_mutex);  // ids of updates that have a handle
};

// Makes a clean-up call for whose answer nobody waits; the call ends within kCleanupLimit.
template <typename Request, typename Response>
void CallAndForget(const std::shared_ptr<TrainerLease>& lease,
                   UnaryMethod<Stub, Request, Response> method, Request request) {
  if (!lease->stream->status().ok()) return;
  *request.mutable_lease() = lease->connection->lease();
  StartCall<Stub, Request, Response>(lease->async(), method, std::move(request),
                                     After(kCleanupLimit),
                                     [lease](const absl::Status&, const Response&) {});
}

class SlotImpl final : public LeasedSlot {
 public:
  SlotImpl(std::shared_ptr<TrainerLease> lease, std::shared_ptr<const SlotMemory> pool,
           const v1::LeaseSlotResponse& granted)
      : lease_(std::move(lease)), pool_(std::move(pool)), granted_(granted) {}
  ~SlotImpl() override {
    if (submitted_) return;
    v1::ReleaseSlotRequest request;
    request.set_slot(granted_.slot());
    request.set_grant(granted_.grant());
    CallAndForget<v1::ReleaseSlotRequest, v1::ReleaseSlotResponse>(lease_, &Stub::ReleaseSlot,
                                                                   std::move(request));
  }
  char* data() const override { return pool_->data() + granted_.byte_offset(); }
  int64_t bytes() const override { return granted_.bytes(); }

  const TrainerLease* lease() const { return lease_.get(); }
  void Describe(v1::SlotRef* ref) const {
    ref->set_slot(granted_.slot());
    ref->set_grant(granted_.grant());
  }
  // The daemon took the slot with its bucket.
  void Submitted() { submitted_ = true; }

 private:
  const std::shared_ptr<TrainerLease> lease_;
  const std::shared_ptr<const SlotMemory> pool_;
  const v1::LeaseSlotResponse granted_;
  bool submitted_ = false;  // set by the thread that ends the bucket's call
};

// The pushes of one update: which are unanswered, and what the first error was. Shared by the
// Update and its calls, so that either may end first.
class Pushes : public std::enable_shared_from_this<Pushes> {
 public:
  using Done = std::function<void(absl::Status)>;

  Pushes(std::shared_ptr<TrainerLease> lease, Version version, uint64_t update_id,
         TimePoint deadline)
      : lease_(std::move(lease)),
        version_(version),
        update_id_(update_id),
        deadline_(deadline),
        window_(std::max(1, lease_->connection->welcome().limits().outstanding_buckets())) {}

  // Sends the bucket as soon as the window has room. On an error `done` was not moved from.
  // `keep_error`: nobody waits for this push's own error, so an error is kept as first_error, and
  // the update is given up.
  absl::Status Start(Bucket bucket, bool keep_error, Done* done);
  // For an asynchronous push that was not started: keeps the error, calls `done`.
  void Refuse(const absl::Status& status, Done done);

  absl::Status first_error() const {
    MutexLock lock(&mutex_);
    return first_error_;
  }
  // The state of the pushes at one moment.
  struct Progress {
    absl::Status first_error;
    bool under_way = false;
    int64_t bucket_count = 0;
  };
  Progress progress() const {
    MutexLock lock(&mutex_);
    return {first_error_, !calls_.empty(), next_seq_ - static_cast<int64_t>(holes_.size())};
  }
  // Waits until no push is unanswered; false: `deadline` passed before.
  bool WaitAnswered(TimePoint deadline) {
    {
      MutexLock lock(&mutex_);
      while (!calls_.empty()) {
        if (!cond_.WaitUntil(&mutex_, deadline) && !calls_.empty()) return false;
      }
    }
    DropRetired();
    return true;
  }
  // Lets go of the sources of answered pushes. Waits if it holds the last reference of a source
  // (Region).
  void DropRetired() {
    std::vector<std::shared_ptr<Region>> retired;  // destroyed after unlocking
    MutexLock lock(&mutex_);
    retired.swap(retired_);
  }
  void Cancel() {
    std::vector<std::shared_ptr<grpc::ClientContext>> contexts;
    {
      MutexLock lock(&mutex_);
      for (const auto& [number, call] : calls_) contexts.push_back(call.context);
    }
    for (const auto& context : contexts) {
      if (context != nullptr) context->TryCancel();
    }
  }

 private:
  struct Call {
    std::shared_ptr<grpc::ClientContext> context;  // null until the call was started
    int64_t inline_bytes = 0;
    size_t tensors = 0;
  };
  absl::Status Encode(const Bucket& bucket, v1::PushBucketRequest* request) const;
  // A call's place in the window, and the seq of its bucket.
  struct Ticket {
    int64_t call = 0;
    int64_t seq = 0;
  };
  absl::StatusOr<Ticket> EnterWindow(const Bucket& bucket);
  void Answered(Ticket ticket, Bucket* bucket, bool keep_error, const Done& done,
                const absl::Status& status);
  void LeaveWindow(int64_t call);
  void KeepError(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (first_error_.ok()) first_error_ = status;
  }
  void GiveUp(int64_t seq, const absl::Status& status);

  const std::shared_ptr<TrainerLease> lease_;
  const Version version_;
  const uint64_t update_id_;
  const TimePoint deadline_;  // for every call of the update
  const size_t window_;

  mutable Mutex mutex_;
  CondVar cond_;
  std::map<int64_t, Call> calls_ ABSL_GUARDED_BY(mutex_);  // unanswered
  int64_t next_call_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t inline_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // of all calls_
  size_t tensors_ ABSL_GUARDED_BY(mutex_) = 0;        // of all calls_
  int64_t next_seq_ ABSL_GUARDED_BY(mutex_) = 0;
  // Seqs of refused buckets; the next buckets take these first.
  std::set<int64_t> holes_ ABSL_GUARDED_BY(mutex_);
  absl::Status first_error_ ABSL_GUARDED_BY(mutex_);  // the first of an asynchronous push
  // Sources of answered pushes, at most window_ of them, until DropRetired. They are kept because
  // the destructor of a region waits until the daemon has released it, which must not happen on
  // gRPC's threads.
  std::vector<std::shared_ptr<Region>> retired_ ABSL_GUARDED_BY(mutex_);
};

absl::Status Pushes::Encode(const Bucket& bucket, v1::PushBucketRequest* request) const {
  const int64_t inline_limit = lease_->connection->welcome().limits().inline_bytes();
  REFITD_RETURN_IF_ERROR(EncodeBucket(bucket, inline_limit, request->mutable_bucket()));
  REFITD_RETURN_IF_ERROR(lease_->connection->ToProto(request->mutable_bucket()));
  *request->mutable_lease() = lease_->connection->lease();
  request->set_version(version_.value());
  request->set_update_id(update_id_);
  if (bucket.slot == nullptr) return absl::OkStatus();
  const auto* slot = dynamic_cast<const SlotImpl*>(bucket.slot.get());
  if (slot == nullptr || slot->lease() != lease_.get()) {
    return InvalidField("bucket.slot", "bucket.slot was not leased by this trainer");
  }
  slot->Describe(request->mutable_bucket()->mutable_slot());
  return absl::OkStatus();
}

absl::StatusOr<Pushes::Ticket> Pushes::EnterWindow(const Bucket& bucket) {
  DropRetired();
  const int64_t inline_bytes = InlineBytes(bucket);
  const size_t tensors = bucket.tensors.size();
  MutexLock lock(&mutex_);
  const auto full = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return calls_.size() >= window_ ||
           (!calls_.empty() && inline_bytes_ + inline_bytes > kMaxInlineBytesInFlight) ||
           (calls_.size() > 1 && tensors_ + tensors > kMaxTensorsInFlight);
  };
  while (first_error_.ok() && full()) {
    if (cond_.WaitUntil(&mutex_, deadline_)) continue;
    return Error(absl::StatusCode::kDeadlineExceeded,
                 "push for version {}: the daemon answered none of {} outstanding buckets in time",
                 version_, calls_.size());
  }
  if (!first_error_.ok()) return first_error_;
  Ticket ticket{next_call_++, next_seq_};
  if (holes_.empty()) {
    ++next_seq_;
  } else {
    ticket.seq = *holes_.begin();
    holes_.erase(holes_.begin());
  }
  Call& call = calls_[ticket.call];
  call.inline_bytes = inline_bytes;
  call.tensors = tensors;
  inline_bytes_ += inline_bytes;
  tensors_ += tensors;
  return ticket;
}

absl::Status Pushes::Start(Bucket bucket, bool keep_error, Done* done) {
  REFITD_RETURN_IF_ERROR(lease_->stream->status());
  v1::PushBucketRequest request;
  REFITD_RETURN_IF_ERROR(Encode(bucket, &request));
  REFITD_ASSIGN_OR_RETURN(const Ticket ticket, EnterWindow(bucket));
  request.mutable_bucket()->set_seq(ticket.seq);
  // The source lives as long as the call, because the daemon reads region and slot until it
  // answers.
  auto source = std::make_shared<Bucket>(std::move(bucket));
  auto context = StartCall<Stub, v1::PushBucketRequest, v1::PushBucketResponse>(
      lease_->async(), &Stub::PushBucket, std::move(request), deadline_,
      [self = shared_from_this(), ticket, source, keep_error, done = std::move(*done)](
          const absl::Status& status, const v1::PushBucketResponse&) {
        // This is gRPC's thread, which also brings the lease's end, so it must not wait for that
        // end.
        const absl::Status end =
            self->lease_->stream->LeaseEndBehind("push", status, Duration::zero());
        self->Answered(
            ticket, source.get(), keep_error, done,
            end.ok() ? NameDaemon("push", self->lease_->connection->socket(), status) : end);
      });
  MutexLock lock(&mutex_);
  // The call may have been answered already; then it is no longer in the list.
  if (auto call = calls_.find(ticket.call); call != calls_.end()) call->second.context = context;
  return absl::OkStatus();
}

void Pushes::Answered(Ticket ticket, Bucket* bucket, bool keep_error, const Done& done,
                      const absl::Status& status) {
  if (bucket->slot != nullptr) {
    if (status.ok()) static_cast<SlotImpl*>(bucket->slot.get())->Submitted();
    bucket->slot.reset();
  }
  {
    // This comes before `done`, because a thread that waits for `done` may push the next bucket at
    // once.
    MutexLock lock(&mutex_);
    retired_.push_back(std::move(bucket->region));
    if (!status.ok()) holes_.insert(ticket.seq);
    if (!status.ok() && keep_error) KeepError(status);
  }
  if (!status.ok() && keep_error) GiveUp(ticket.seq, status);
  done(status);
  LeaveWindow(ticket.call);
}

// Called after `done`, because a thread that waits until all pushes are answered may then destroy
// what `done` uses.
void Pushes::LeaveWindow(int64_t call) {
  MutexLock lock(&mutex_);
  const auto left = calls_.find(call);
  inline_bytes_ -= left->second.inline_bytes;
  tensors_ -= left->second.tensors;
  calls_.erase(left);
  cond_.NotifyAll();
}

void Pushes::Refuse(const absl::Status& status, Done done) {
  int64_t call = 0;
  {
    MutexLock lock(&mutex_);
    KeepError(status);
    call = next_call_++;
    calls_[call];
  }
  RunOnClientThread([self = shared_from_this(), call, status, done = std::move(done)] {
    done(status);
    self->LeaveWindow(call);
  });
}

// Aborts the update after an asynchronous push failed. The caller can't push the bucket again, and
// the buckets after it wait for its seq; without this the update would end only at its deadline.
void Pushes::GiveUp(int64_t seq, const absl::Status& status) {
  if (absl::IsAborted(status) || absl::IsUnavailable(status) || absl::IsCancelled(status)) return;
  v1::AbortRequest request;
  request.set_version(version_.value());
  request.set_update_id(update_id_);
  request.set_reason(
      CleanText(Escaped(fmt::format("bucket {}: {}", seq, Message(status))), kMaxReasonBytes));
  CallAndForget<v1::AbortRequest, v1::AbortResponse>(lease_, &Stub::Abort, std::move(request));
}

class UpdateImpl final : public Update {
 public:
  UpdateImpl(std::shared_ptr<TrainerLease> lease, const RefitOptions& options,
             const v1::BeginResponse& begun)
      : lease_(std::move(lease)),
        options_(options),
        version_(options.version),
        begun_(begun),
        deadline_(After(std::chrono::milliseconds(begun.remaining_ms()))),
        call_deadline_(deadline_ + lease_->connection->call_margin()),
        pushes_(std::make_shared<Pushes>(lease_, version_, begun_.update_id(), call_deadline_)) {}

  ~UpdateImpl() override {
    GoOut();
    lease_->Unclaim(begun_.update_id());
  }

  Version version() const override { return version_; }
  int instances() const override { return begun_.instances(); }
  int leasable_slots() const override { return begun_.leasable_slots(); }

  absl::Status Push(Bucket bucket) override;
  void PushAsync(Bucket bucket, std::function<void(absl::Status)> done) override;
  absl::Status Flush() override;
  absl::StatusOr<std::unique_ptr<LeasedSlot>> LeaseSlot(std::chrono::milliseconds wait) override;
  absl::StatusOr<CommitResult> Commit(int64_t tensor_count) override;
  absl::StatusOr<CommitResult> Refit() override;
  absl::Status Abort(const std::string& reason) override {
    REFITD_RETURN_IF_ERROR(CheckOpen());
    return EndByAbort(reason);
  }
  absl::Status Lost() override;

 private:
  void GoOut() {
    if (!ended_ && !over_) (void)EndByAbort("the trainer gave the update up without Commit");
    // The daemon answers a push when it no longer reads its source; after all answers no callback
    // is left to run.
    if (pushes_->WaitAnswered(After(kCleanupLimit))) return;
    pushes_->Cancel();
    if (pushes_->WaitAnswered(After(kCleanupLimit))) return;
    // Some callback does not return. Drop the answered sources now, and not later on the callback's
    // thread.
    pushes_->DropRetired();
  }
  absl::Status CheckOpen() const {
    if (!ended_) return absl::OkStatus();
    return Error(absl::StatusCode::kFailedPrecondition, "the update to version {} has ended",
                 version_);
  }
  absl::Status EndByAbort(const std::string& reason);

  const std::shared_ptr<TrainerLease> lease_;
  const RefitOptions options_;  // Begin's
  const Version version_;
  const v1::BeginResponse begun_;
  const TimePoint deadline_;       // end of the update, by this process's clock
  const TimePoint call_deadline_;  // later, so that the daemon's own answer comes before it
  const std::shared_ptr<Pushes> pushes_;
  bool ended_ = false;  // committed, or aborted by this trainer
  bool over_ = false;   // an answer to Abort has said that the update has ended at the daemon
};

absl::Status UpdateImpl::Push(Bucket bucket) {
  REFITD_RETURN_IF_ERROR(CheckOpen());
  struct Answer {
    Mutex mutex;
    CondVar cond;
    std::optional<absl::Status> status ABSL_GUARDED_BY(mutex);
  };
  auto answer = std::make_shared<Answer>();
  Pushes::Done done = [answer](const absl::Status& status) {
    MutexLock lock(&answer->mutex);
    answer->status = status;
    answer->cond.NotifyAll();
  };
  REFITD_RETURN_IF_ERROR(pushes_->Start(std::move(bucket), /*keep_error=*/false, &done));
  absl::Status status;
  {
    MutexLock lock(&answer->mutex);
    while (!answer->status) {
      if (answer->cond.WaitUntil(&answer->mutex, call_deadline_ + kCleanupLimit)) continue;
      if (answer->status) break;
      return Error(absl::StatusCode::kDeadlineExceeded,
                   "push for version {}: no answer from the daemon", version_);
    }
    status = *answer->status;
  }
  // From now on only the caller holds the source, and may free it after destroying its Region (P8).
  pushes_->DropRetired();
  if (status.ok()) return status;
  REFITD_RETURN_IF_ERROR(lease_->stream->LeaseEndBehind("push", status, kCleanupLimit));
  return status;
}

void UpdateImpl::PushAsync(Bucket bucket, std::function<void(absl::Status)> done) {
  if (!done) done = [](const absl::Status&) {};
  absl::Status status = CheckOpen();
  if (status.ok()) status = pushes_->Start(std::move(bucket), /*keep_error=*/true, &done);
  if (!status.ok()) pushes_->Refuse(status, std::move(done));
}

absl::Status UpdateImpl::Flush() {
  if (!pushes_->WaitAnswered(call_deadline_ + kCleanupLimit)) {
    return Error(absl::StatusCode::kDeadlineExceeded,
                 "version {}: the daemon left pushes unanswered", version_);
  }
  return pushes_->first_error();
}

absl::StatusOr<std::unique_ptr<LeasedSlot>> UpdateImpl::LeaseSlot(std::chrono::milliseconds wait) {
  REFITD_RETURN_IF_ERROR(CheckOpen());
  if (wait.count() < 0) {
    return InvalidField("wait", "wait of {} ms", wait.count());
  }
  const auto mapped = lease_->connection->Pool(Access::kReadWrite);
  if (!mapped.ok()) {
    REFITD_RETURN_IF_ERROR(
        lease_->stream->LeaseEndBehind("mapping the slots", mapped.status(), kCleanupLimit));
    return mapped.status();
  }
  const std::shared_ptr<const SlotMemory>& pool = *mapped;
  v1::LeaseSlotRequest request;
  request.set_version(version_.value());
  request.set_update_id(begun_.update_id());
  request.set_wait_ms(wait.count());
  const TimePoint limit = wait.count() == 0 ? deadline_ : std::min(deadline_, After(wait));
  REFITD_ASSIGN_OR_RETURN(const v1::LeaseSlotResponse granted,
                          (lease_->Call<v1::LeaseSlotRequest, v1::LeaseSlotResponse>(
                              &Stub::LeaseSlot, std::move(request),
                              limit + lease_->connection->call_margin(), "LeaseSlot")));
  auto slot = std::make_unique<SlotImpl>(lease_, pool, granted);
  if (granted.byte_offset() < 0 || granted.bytes() < 0 || granted.byte_offset() > pool->bytes() ||
      granted.bytes() > pool->bytes() - granted.byte_offset()) {
    return Error(absl::StatusCode::kInternal,
                 "slot {} at {} + {} is outside of the pool of {} bytes", granted.slot(),
                 granted.byte_offset(), granted.bytes(), pool->bytes());
  }
  return std::unique_ptr<LeasedSlot>(std::move(slot));
}

CommitResult ResultOf(const v1::CommitResponse& response) {
  CommitResult result;
  result.version = Version(response.version());
  result.content = response.has_content_version() ? Version(response.content_version())
                                                  : Version(response.version());
  result.bytes = response.bytes();
  result.seconds = response.seconds();
  result.left_out_tensors = response.left_out_tensors();
  result.left_out_bytes = response.left_out_bytes();
  result.left_out.assign(response.left_out().begin(), response.left_out().end());
  for (const v1::InstanceResult& instance : response.instances()) {
    result.instances.push_back({instance.instance(), instance.committed(), instance.reason(),
                                FailureFromProto(instance.failure()).value_or(Failure())});
  }
  for (const v1::BroadcastTotals& totals : response.pushed()) {
    // A daemon of the next version may know more methods.
    const auto method = refitd::BroadcastFromProto(totals.method());
    if (!method.ok()) continue;
    result.pushed.push_back({*method, totals.bytes(), totals.buckets()});
  }
  return result;
}

absl::StatusOr<CommitResult> UpdateImpl::Commit(int64_t tensor_count) {
  REFITD_RETURN_IF_ERROR(CheckOpen());
  // Commit need not wait for the answers of pushes: a refused push ends the update, and with it
  // this call.
  const Pushes::Progress progress = pushes_->progress();
  if (!progress.first_error.ok() || !progress.under_way) REFITD_RETURN_IF_ERROR(Flush());
  v1::CommitRequest request;
  request.set_version(version_.value());
  request.set_bucket_count(progress.bucket_count);
  request.set_pushes_under_way(progress.under_way);
  request.set_update_id(begun_.update_id());
  request.set_tensor_count(tensor_count);
  auto response = lease_->Call<v1::CommitRequest, v1::CommitResponse>(
      &Stub::Commit, std::move(request), call_deadline_, "Commit");
  if (!response.ok()) {
    if (absl::IsAborted(response.status())) ended_ = over_ = true;
    // The error of the push that ended the update says more than the error of this call.
    const absl::Status pushed = Flush();
    return pushed.ok() || absl::IsAborted(pushed) ? response.status() : pushed;
  }
  ended_ = true;
  // The answers of pushes came before; when this returns, their callbacks have run too.
  (void)Flush();
  lease_->known->Committed(version_);
  return ResultOf(*response);
}

v1::RefitRequest RefitRequestOf(const RefitOptions& options, const TrainerLease& lease) {
  v1::RefitRequest request;
  request.set_version(options.version.value());
  // The duration is the caller's, even if waiting for a lease took some of it, because the
  // parameters of all ranks must be equal.
  request.set_duration_ms(options.duration.count());
  if (options.verification) request.set_verification(refitd::ToProto(*options.verification));
  request.set_evict_late(options.evict_late);
  request.set_binding_generation(lease.binding_generation);
  request.set_hold(options.hold);
  return request;
}

absl::StatusOr<CommitResult> UpdateImpl::Refit() {
  REFITD_RETURN_IF_ERROR(CheckOpen());
  REFITD_RETURN_IF_ERROR(Flush());
  v1::RefitRequest request = RefitRequestOf(options_, *lease_);
  request.set_bucket_count(pushes_->progress().bucket_count);
  // This call ends the update that was begun; without the id it would open another if that update
  // is lost.
  request.set_update_id(begun_.update_id());
  const auto response = lease_->Call<v1::RefitRequest, v1::CommitResponse>(
      &Stub::Refit, std::move(request), call_deadline_, "Refit");
  if (!response.ok()) {
    if (absl::IsAborted(response.status())) ended_ = over_ = true;
    return response.status();
  }
  ended_ = true;
  lease_->known->Committed(version_);
  return ResultOf(*response);
}

absl::Status UpdateImpl::EndByAbort(const std::string& reason) {
  v1::AbortRequest request;
  request.set_version(version_.value());
  request.set_update_id(begun_.update_id());
  request.set_reason(CleanText(Escaped(reason), kMaxReasonBytes));
  const auto response = lease_->Call<v1::AbortRequest, v1::AbortResponse>(
      &Stub::Abort, std::move(request), After(kCleanupLimit), "Abort");
  if (response.ok()) ended_ = true;
  // FAILED_PRECONDITION: the update was over before.
  over_ = over_ || response.ok() || absl::IsFailedPrecondition(response.status());
  return response.status();
}

absl::Status UpdateImpl::Lost() {
  if (!over_) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "the update to version {} may not be over: Abort did not say so", version_);
  }
  // A Commit that names an update that is over is answered with how it ended.
  v1::CommitRequest request;
  request.set_version(version_.value());
  request.set_update_id(begun_.update_id());
  return lease_
      ->Call<v1::CommitRequest, v1::CommitResponse>(&Stub::Commit, std::move(request),
                                                    After(kCleanupLimit), "Commit")
      .status();
}

class TrainerImpl final : public Member<Trainer, TrainerLease> {
 public:
  explicit TrainerImpl(const TrainerOptions& options)
      : Member(options.connect, /*engine=*/false, "trainer", options.rank), options_(options) {}
  ~TrainerImpl() override {
    StopReattaching();
    const std::shared_ptr<TrainerLease> lease = LastLease();
    if (lease != nullptr) lease->Close();  // objects that came from it may outlive the lease
  }

  absl::StatusOr<std::unique_ptr<Update>> Begin(const BeginOptions& options) override;
  absl::Status Register(Layout layout) override;
  absl::StatusOr<CommitResult> Refit(const RefitOptions& options) override;
  absl::Status Abort(Version version, const std::string& reason) override;
  absl::StatusOr<CommitResult> Rollback(std::optional<Version> version) override;
  absl::Status ReleasePrevious() override;
  absl::StatusOr<UpdateOutcome> GetUpdate(Version version) override;
  std::optional<Version> group_version() const override {
    MutexLock lock(&known_->mutex);
    return known_->group_version;
  }
  absl::Status health() const override {
    MutexLock lock(&mutex_);
    return ended_.ok() ? lease_->stream->status() : ended_;
  }

 private:
  std::shared_ptr<TrainerLease> NewLease() override {
    auto lease = std::make_shared<TrainerLease>();
    lease->known = known_;
    return lease;
  }
  absl::Status AttachOver(TrainerLease* lease, TimePoint deadline,
                          const std::stop_token& stop) override;
  bool IsLost() override ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !lease_->stream->status().ok();
  }
  void TakeOver(TrainerLease* lease, uint64_t generation) override
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    lease->binding_generation = generation;
  }
  std::shared_ptr<TrainerLease> LastLease() const {
    MutexLock lock(&mutex_);
    return lease_;
  }
  // Waits until the trainer is attached, and returns the lease.
  absl::StatusOr<std::shared_ptr<TrainerLease>> Attached(TimePoint deadline);
  // The same for an update to `version`, which GetUpdate may be asked for.
  absl::StatusOr<std::shared_ptr<TrainerLease>> AttachedFor(Version version, TimePoint deadline);

  // A call that begins an update to `version`. If the lease ends during the call and the trainer
  // attaches again, the call is made again. There is one exception: the daemon had taken the call
  // up (`make` did not set `*untaken`), and the group has the same incarnation. Then `ended`, if
  // set, is asked for the result first. If there is none, a trainer of several ranks gets ABORTED,
  // because the other ranks' update was aborted and they begin anew.
  template <typename Answer>
  struct BeginningCall {
    Version version;
    Duration duration;
    std::function<absl::StatusOr<Answer>(TrainerLease* lease, bool* untaken)> make;
    std::function<std::optional<Answer>(const TrainerLease& now)> ended;
  };
  // Makes the call; returns the answer, and the lease by which it came.
  template <typename Answer>
  absl::StatusOr<std::pair<Answer, std::shared_ptr<TrainerLease>>> Beginning(
      const BeginningCall<Answer>& call);
  absl::Status RegisterNow(const Layout& layout, std::shared_ptr<TrainerLease>* lease);

  const TrainerOptions options_;
  const std::shared_ptr<TrainerState> known_ = std::make_shared<TrainerState>();
  struct Begun {
    Version version;
    uint64_t incarnation = 0;
  };
  std::optional<Begun> begun_ ABSL_GUARDED_BY(mutex_);  // the last one
};

absl::Status CheckBeginOptions(const BeginOptions& options) {
  const auto negative = [](std::string_view field, int64_t value) {
    return InvalidField(field, "{} is {}: it must not be negative", field, value);
  };
  if (options.version.value() < 0) return negative("version", options.version.value());
  if (options.duration.count() < 0) return negative("duration", options.duration.count());
  if (options.tensor_count < 0) return negative("tensor_count", options.tensor_count);
  if (options.total_bytes < 0) return negative("total_bytes", options.total_bytes);
  // Protocol Buffers can't carry text that is not UTF-8; the daemon checks the rest.
  if (const std::string clean = CleanText(options.note, options.note.size());
      clean != options.note) {
    return InvalidField("note", "note: \"{}\" is not UTF-8", clean);
  }
  return absl::OkStatus();
}

// The deadline of a call that lasts until the update has begun, or until its end.
TimePoint CallDeadline(const TrainerLease& lease, Duration duration) {
  const bool given = duration != Duration::zero();
  return After(given ? duration : lease.default_duration) + lease.connection->call_margin();
}

absl::StatusOr<std::unique_ptr<Update>> TrainerImpl::Begin(const BeginOptions& options) {
  REFITD_RETURN_IF_ERROR(CheckBeginOptions(options));
  v1::BeginRequest request;
  request.set_version(options.version.value());
  // The duration is the caller's, even if waiting for a lease took some of it, because the
  // parameters of all ranks must be equal.
  request.set_duration_ms(options.duration.count());
  if (options.verification) request.set_verification(refitd::ToProto(*options.verification));
  request.set_evict_late(options.evict_late);
  request.set_tensor_count(options.tensor_count);
  request.set_total_bytes(options.total_bytes);
  request.set_broadcast(refitd::ToProto(options.broadcast));
  request.set_without_layout(options.without_layout);
  request.set_note(options.note);
  request.set_hold(options.hold);
  BeginningCall<v1::BeginResponse> call{options.version, options.duration, nullptr, nullptr};
  call.make = [&](TrainerLease* lease, bool* untaken) {
    return lease->Call<v1::BeginRequest, v1::BeginResponse>(
        &Stub::Begin, request, CallDeadline(*lease, options.duration), "Begin", untaken);
  };
  REFITD_ASSIGN_OR_RETURN(auto begun, Beginning(call));
  const auto& [answer, lease] = begun;
  if (answer.update_id() != 0 && !lease->Claim(answer.update_id())) {
    return Error(absl::StatusCode::kAlreadyExists,
                 "Begin: this rank has begun version {} already, and the Update of that lives: go "
                 "on with it, or destroy it first, which aborts the update",
                 options.version);
  }
  const RefitOptions same{options.version, options.duration, options.verification,
                          options.evict_late, options.hold};
  return std::unique_ptr<Update>(std::make_unique<UpdateImpl>(lease, same, answer));
}

absl::StatusOr<CommitResult> TrainerImpl::Refit(const RefitOptions& options) {
  REFITD_RETURN_IF_ERROR(
      CheckBeginOptions({.version = options.version, .duration = options.duration}));
  BeginningCall<v1::CommitResponse> call{options.version, options.duration, nullptr, nullptr};
  const std::optional<Version> before = group_version();
  call.make = [&](TrainerLease* lease, bool* untaken) {
    return lease->Call<v1::RefitRequest, v1::CommitResponse>(
        &Stub::Refit, RefitRequestOf(options, *lease), CallDeadline(*lease, options.duration),
        "Refit", untaken);
  };
  // No version but a rollback is installed without this rank. So if the group has this version now,
  // the call had committed.
  call.ended = [&](const TrainerLease& now) -> std::optional<v1::CommitResponse> {
    const v1::Welcome& welcome = now.connection->welcome();
    const bool had_it = before && *before >= options.version;
    if (had_it || !welcome.has_group_version() || welcome.has_content_version() ||
        Version(welcome.group_version()) != options.version) {
      return std::nullopt;
    }
    v1::CommitResponse response;
    response.set_version(options.version.value());
    return response;
  };
  REFITD_ASSIGN_OR_RETURN(const auto committed, Beginning(call));
  known_->Committed(options.version);
  return ResultOf(committed.first);
}

template <typename Answer>
absl::StatusOr<std::pair<Answer, std::shared_ptr<TrainerLease>>> TrainerImpl::Beginning(
    const BeginningCall<Answer>& call) {
  const bool given = call.duration != Duration::zero();
  const TimePoint deadline = After(given ? call.duration : kDefaultDuration);
  Backoff backoff(seed_);
  std::shared_ptr<TrainerLease> lost;  // the lease that ended during the call
  absl::Status why;                    // why it ended
  bool taken_up = false;               // whether the daemon took the call up with that lease
  // The latest time at which the daemon has cleaned up after that call.
  std::optional<TimePoint> cleaned_up;
  while (true) {
    REFITD_ASSIGN_OR_RETURN(std::shared_ptr<TrainerLease> lease,
                            AttachedFor(call.version, deadline));
    const bool same_incarnation = lost != nullptr && lease->connection->lease().incarnation() ==
                                                         lost->connection->lease().incarnation();
    if (taken_up && same_incarnation && lease != lost) {
      if (call.ended) {
        std::optional<Answer> ended = call.ended(*lease);
        if (ended.has_value()) return std::pair(*std::move(ended), std::move(lease));
      }
      // The group lives on, and the other ranks' update was aborted by this rank's loss, so they
      // begin anew. If this call were made again, it would open an update without them.
      if (options_.world_size > 1) {
        return WithFailureOf(
            why, Error(absl::StatusCode::kAborted, "the update to version {} is lost: {}",
                       call.version, Message(why)));
      }
    }
    bool untaken = false;
    absl::StatusOr<Answer> answer = call.make(lease.get(), &untaken);
    if (answer.ok()) return std::pair(*std::move(answer), std::move(lease));
    if (!reattaches()) return answer.status();
    const bool in_time = Until(deadline) > Duration::zero();
    if (lease->Lost() && DaemonGone(answer.status()) && in_time) {
      lost = std::move(lease);
      why = answer.status();
      taken_up = !untaken;
      cleaned_up.reset();
      continue;
    }
    // The group may still be cleaning up the update that the call began with the lost lease.
    if (!absl::IsAborted(answer.status()) || !taken_up || !same_incarnation) {
      return answer.status();
    }
    if (!cleaned_up) cleaned_up = After(2 * kCleanupLimit);
    const Duration pause = backoff.Next();
    if (After(pause) >= std::min(*cleaned_up, deadline)) return answer.status();
    std::this_thread::sleep_for(pause);
  }
}

absl::Status TrainerImpl::Register(Layout layout) {
  const TimePoint deadline = After(kRegisterLimit);
  while (true) {
    // Wait before locking, because attaching again takes the same lock.
    REFITD_RETURN_IF_ERROR(Attached(deadline).status());
    std::shared_ptr<TrainerLease> lease;
    const absl::Status status = RegisterNow(layout, &lease);
    if (status.ok()) return status;
    const absl::Status end = lease->stream->LeaseEndBehind("RegisterLayout", status, kCleanupLimit);
    if (end.ok()) return status;
    // It does not matter whether the daemon had taken the layout, because the daemon dropped the
    // layout with the lease.
    if (!reattaches() || !lease->Lost() || Until(deadline) == Duration::zero()) return end;
  }
}

absl::Status TrainerImpl::RegisterNow(const Layout& layout, std::shared_ptr<TrainerLease>* lease) {
  MutexLock lock(&register_mutex_);
  *lease = LastLease();
  REFITD_RETURN_IF_ERROR((*lease)->stream->status());
  REFITD_ASSIGN_OR_RETURN(
      const Registration::Registered registered,
      registration_.Register((*lease)->connection.get(), (*lease)->Uploader(), layout));
  (*lease)->binding_generation = registered.binding_generation;
  return absl::OkStatus();
}

absl::Status TrainerImpl::Abort(Version version, const std::string& reason) {
  v1::AbortRequest request;
  request.set_version(version.value());
  request.set_reason(CleanText(Escaped(reason), kMaxReasonBytes));
  return LastLease()
      ->Call<v1::AbortRequest, v1::AbortResponse>(&Stub::Abort, std::move(request),
                                                  After(kCleanupLimit), "Abort")
      .status();
}

absl::StatusOr<CommitResult> TrainerImpl::Rollback(std::optional<Version> version) {
  v1::TrainerRollbackRequest request;
  if (version.has_value()) request.set_version(version->value());
  const std::shared_ptr<TrainerLease> lease = LastLease();
  REFITD_ASSIGN_OR_RETURN(const v1::CommitResponse response,
                          (lease->Call<v1::TrainerRollbackRequest, v1::CommitResponse>(
                              &Stub::Rollback, std::move(request),
                              CallDeadline(*lease, Duration::zero()), "Rollback")));
  known_->Committed(Version(response.version()));
  return ResultOf(response);
}

absl::Status TrainerImpl::ReleasePrevious() {
  return LastLease()
      ->Call<v1::TrainerReleasePreviousRequest, v1::TrainerReleasePreviousResponse>(
          &Stub::ReleasePrevious, {}, After(kCleanupLimit), "ReleasePrevious")
      .status();
}

absl::StatusOr<UpdateOutcome> TrainerImpl::GetUpdate(Version version) {
  v1::GetUpdateRequest request;
  std::shared_ptr<TrainerLease> lease;
  {
    MutexLock lock(&mutex_);
    lease = lease_;
    const bool last = begun_ && begun_->version == version;
    request.set_incarnation(last ? begun_->incarnation : lease->connection->lease().incarnation());
  }
  request.set_group(options_.connect.group);
  request.set_version(version.value());
  const auto response = CallAndWait<Stub, v1::GetUpdateRequest, v1::GetUpdateResponse>(
      lease->async(), &Stub::GetUpdate, std::move(request), After(kGetUpdateLimit), "GetUpdate");
  if (!response.ok()) {
    return NameDaemon("GetUpdate", lease->connection->socket(), response.status());
  }
  UpdateOutcome outcome{UpdateOutcome::kUnknown, response->reason(),
                        FailureFromProto(response->failure()).value_or(Failure())};
  if (response->outcome() == v1::UPDATE_OUTCOME_RUNNING) outcome.kind = UpdateOutcome::kRunning;
  if (response->outcome() == v1::UPDATE_OUTCOME_COMMITTED) outcome.kind = UpdateOutcome::kCommitted;
  if (response->outcome() == v1::UPDATE_OUTCOME_ABORTED) outcome.kind = UpdateOutcome::kAborted;
  return outcome;
}

v1::TrainerMessage Hello(const TrainerOptions& options, TimePoint deadline) {
  v1::TrainerMessage message;
  SayHello(options.connect, options.rank, options.world_size, deadline, message.mutable_hello());
  return message;
}

// Trainers act on their calls' answers; of the events only the group's version is kept.
TrainerLease::Stream::Handler TrainerEvents(std::shared_ptr<TrainerState> known) {
  return [known = std::move(known)](const v1::TrainerEvent& event) {
    if (event.has_welcome()) return false;
    if (event.has_committed()) known->Committed(Version(event.committed().version()));
    return true;
  };
}

absl::Status TrainerImpl::AttachOver(TrainerLease* lease, TimePoint deadline,
                                     const std::stop_token& stop) {
  return lease->Attach(connect_, Hello(options_, deadline), TrainerEvents(known_), wake_, deadline,
                       stop, [&] {
                         const v1::Welcome& welcome = lease->connection->welcome();
                         const int64_t told_ms = welcome.limits().default_duration_ms();
                         if (told_ms > 0)
                           lease->default_duration = std::chrono::milliseconds(told_ms);
                         if (welcome.has_group_version()) {
                           known_->Committed(Version(welcome.group_version()));
                         }
                         return absl::OkStatus();
                       });
}

absl::StatusOr<std::shared_ptr<TrainerLease>> TrainerImpl::AttachedFor(Version version,
                                                                       TimePoint deadline) {
  REFITD_ASSIGN_OR_RETURN(std::shared_ptr<TrainerLease> lease, Attached(deadline));
  MutexLock lock(&mutex_);
  begun_ = {version, lease->connection->lease().incarnation()};
  return lease;
}

absl::StatusOr<std::shared_ptr<TrainerLease>> TrainerImpl::Attached(TimePoint deadline) {
  MutexLock lock(&mutex_);
  while (true) {
    REFITD_RETURN_IF_ERROR(ended_);
    const absl::Status status = lease_->stream->status();
    if (status.ok()) return lease_;
    if (!reattaches()) return status;
    if (WaitWatched(&changed_, &mutex_, deadline)) continue;
    return WithFailureOf(status, Error(absl::StatusCode::kUnavailable,
                                       "not attached again in time; {}", Message(status)));
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Attach(const TrainerOptions& options) {
  REFITD_RETURN_IF_ERROR(CheckConnectOptions(options.connect));
  REFITD_RETURN_IF_ERROR(CheckRank(options.rank, options.world_size));
  auto trainer = std::make_unique<TrainerImpl>(options);
  REFITD_RETURN_IF_ERROR(trainer->Start());
  return std::unique_ptr<Trainer>(std::move(trainer));
}

}  // namespace refitd::client
