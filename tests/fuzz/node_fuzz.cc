// Any sequence of members' and operators' calls to a real daemon with the host transport. As far as
// callers can see, these must hold whatever they call:
//  P1 a rank that is told Committed had answered Prepare and acknowledged every part, like its
//     whole instance; its memory holds exactly the pushed bytes; every trainer rank had committed.
//  P2 a dirty instance has no version.
//  P3 versions grow within an incarnation.
//  P4, P8 in the end every call has been answered once, every stream ended once, and no member,
//     region or descriptor is left.
//  P10 nothing that a caller says crashes it.
// Time limits are never reached here, so that a run depends only on its input; the group's property
// test covers them.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "daemon/checks/bucket_test_util.h"
#include "daemon/link/hello.h"
#include "daemon/link/trainer_messages.h"
#include "daemon/node/daemon.h"
#include "daemon/node/life.h"
#include "daemon/node/member_calls.h"
#include "daemon/node/member_memory.h"
#include "daemon/node/operators.h"
#include "daemon/process/log.h"
#include "daemon/services/member_events.h"
#include "daemon/services/member_requests.h"
#include "daemon/services/status.h"
#include "daemon/sockets/process_watch.h"
#include "proto/convert.h"
#include "tests/fuzz/inputs.pb.h"
#include "tests/fuzz/proto_mutator.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"
#include "transport/host/host_transport.h"
#include "transport/host/memory.h"
#include "transport/transport.h"
#include "transport/unprepared_transport_testing.h"

namespace refitd {
namespace {

using Step = fuzz::NodeInput::Step;

constexpr int kMaxSteps = 64;
constexpr int64_t kMaxRegion = 16 << 10;          // bytes
constexpr int64_t kNever = 3600 * int64_t{1000};  // ms; longer than any run
const Duration kLongest = GroupLimits().max_duration;
constexpr uint32_t kOtherUser = 4242;

// Lets a run wait until nothing is being copied, so that it is the same each time.
class CountedTransport : public UnpreparedTransport {
 public:
  CountedTransport() : inner_(MakeHostTransport({.threads = 1})) {}
  void Submit(Transfer transfer, std::function<void(TransferResult)> done) override {
    Start();
    inner_->Submit(std::move(transfer), [this, done = std::move(done)](TransferResult result) {
      done(std::move(result));
      End();
    });
  }
  void Submit(ReadbackJob job, std::function<void(ReadbackResult)> done) override {
    Start();
    inner_->Submit(std::move(job), [this, done = std::move(done)](ReadbackResult result) {
      done(std::move(result));
      End();
    });
  }
  void WaitIdle() {
    MutexLock lock(&mutex_);
    while (running_ > 0) idle_.Wait(&mutex_);
  }

 private:
  void Start() {
    MutexLock lock(&mutex_);
    ++running_;
  }
  void End() {
    MutexLock lock(&mutex_);
    if (--running_ == 0) idle_.NotifyAll();
  }
  Mutex mutex_;
  CondVar idle_;
  int running_ ABSL_GUARDED_BY(mutex_) = 0;
  const std::unique_ptr<Transport> inner_;  // destroyed first, with its threads
};

template <typename Event>
class Inbox : public MemberSink {
 public:
  void Send(MemberNews news) override {
    MutexLock lock(&mutex_);
    REFITD_CHECK(!ended_);
    events_.push_back(MemberEventOf<Event>(news));
  }
  void End(absl::Status status) override {
    MutexLock lock(&mutex_);
    REFITD_CHECK(!ended_ && !status.ok());
    ended_ = true;
  }
  std::vector<Event> Take() {
    MutexLock lock(&mutex_);
    return std::exchange(events_, {});
  }
  bool ended() {
    MutexLock lock(&mutex_);
    return ended_;
  }

 private:
  Mutex mutex_;
  std::vector<Event> events_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

// Elements of one tensor, as a trainer pushed them.
struct Pushed {
  DType dtype = DType::kUint8;
  int64_t start = 0;  // element
  std::string bytes;
};
using Contents = std::multimap<std::string, Pushed>;  // by tensor

struct Region {
  RegionId id;
  std::shared_ptr<HostRegion> memory;
};

struct Member {
  MemberId id;
  bool engine = false;
  std::string group;
  std::string instance;
  DeliveryMode delivery = DeliveryMode::kInPlace;
  Peer peer;
  v1::Lease lease;  // no token: not welcomed
  int64_t slot_bytes = 0;
  std::shared_ptr<Inbox<v1::TrainerEvent>> trainer_inbox;
  std::shared_ptr<Inbox<v1::EngineEvent>> engine_inbox;
  std::vector<Region> regions;
  std::shared_ptr<HostRegion> pool;
  std::vector<SlotGrant> grants;                // leased and not pushed
  std::optional<Layout> layout;                 // the registered one
  v1::Prepare prepare;                          // the last one
  std::set<uint64_t> ready;                     // updates that it answered Ready
  std::set<std::pair<uint64_t, int64_t>> read;  // (update, part) to be acknowledged
  std::optional<int64_t> committed;             // the version, if told committed in this step
  std::set<int64_t> asked_to_commit;            // versions that a trainer rank committed
  std::set<std::string> requests;               // ids that were used
  bool ended() { return engine ? engine_inbox->ended() : trainer_inbox->ended(); }
};

struct Call {
  size_t member = 0;
  v1::PushBucketRequest push;  // must live until the reply
  Contents contents;           // of the bucket
  int64_t version = 0;
  // The request id was used before, so the answer may be that of the first call.
  bool repeated = false;
  // The reply writes these.
  Mutex mutex;
  int replies ABSL_GUARDED_BY(mutex) = 0;
  absl::Status status ABSL_GUARDED_BY(mutex);
  ReplyPayload payload ABSL_GUARDED_BY(mutex);
  // The checks of a step have counted the answer.
  bool seen = false;
};

class UpdateInbox : public UpdateSink {
 public:
  void Send(UpdateNews) override {}
  void End(absl::Status) override {
    const int ends = ++ends_;
    REFITD_CHECK(ends == 1);
  }

 private:
  std::atomic<int> ends_ = 0;
};

// A user whose process can't be seen (pid 0), so that no process is watched.
PeerCredentials User(uid_t uid) {
  PeerCredentials user;
  user.uid = uid;
  user.gid = uid;
  return user;
}

DaemonOptions Options() {
  DaemonOptions options;
  options.group.default_duration = std::chrono::hours(1);
  options.group.ready_limit = options.group.ack_limit = std::chrono::hours(1);
  options.group.idle_limit = options.group.grant_limit = std::chrono::hours(1);
  options.group.cleanup_limit = std::chrono::minutes(1);
  options.group.outstanding_buckets = 4;
  options.default_slot_bytes = 4096;
  options.default_slots = 3;
  options.max_pool_bytes = 256 << 10;
  options.max_region_bytes = kMaxRegion;
  options.inline_bytes = 4096;
  options.max_groups = 3;
  options.max_members = 10;
  options.max_regions_per_member = 3;
  return options;
}

int64_t Never(int64_t ms) { return ms > 0 && ms < kNever ? kNever : ms; }

class World {
 public:
  explicit World(ProcessWatch* watch) {
    auto transport = std::make_unique<CountedTransport>();
    transport_ = transport.get();
    daemon_ = std::make_unique<Daemon>(Options(), std::move(transport), watch);
  }

  void Take(const Step& step) {
    switch (step.call_case()) {
      case Step::kTrainer:
        AttachTrainer(step);
        break;
      case Step::kEngine:
        AttachEngine(step);
        break;
      case Step::kCreateGroup:
        CreateGroup(step.create_group());
        break;
      case Step::kDeleteGroup:
        (void)daemon_->operators().DeleteGroup(step.delete_group().group());
        break;
      case Step::kGetUpdate:
        (void)GetUpdate(daemon_.get(), step.get_update());
        break;
      case Step::kAbortUpdate:
        AbortUpdate(step);
        break;
      case Step::kRollGroupBack:
        RollGroupBack(step);
        break;
      case Step::kWatch:
        Watch(step);
        break;
      case Step::kDrain:
        daemon_->Drain();
        break;
      case Step::CALL_NOT_SET:
        return;
      default:
        if (members_.empty()) return;
        MemberStep(step, step.actor() % members_.size());
    }
    daemon_->CheckInvariants();
    Judge();
  }

  // Ends everything; nothing may be left.
  void End() {
    daemon_->Drain();
    Judge();
    daemon_->Finish(std::chrono::steady_clock::now());
    daemon_->CheckInvariants();
    Judge();
    for (const auto& call : calls_) {
      MutexLock lock(&call->mutex);
      REFITD_CHECK(call->replies == 1);
    }
    for (const auto& member : members_) REFITD_CHECK(member->ended());
    const DaemonDetails details = daemon_->operators().Describe();
    REFITD_CHECK(details.members == 0 && details.regions == 0);
    daemon_.reset();
  }

 private:
  // ---- steps ----

  Peer PeerOfMember(const Step& step, const Member& member) const {
    Peer peer = member.peer;
    if (step.other_user()) {
      peer.credentials = User(kOtherUser);
    }
    return peer;
  }

  static Peer NewPeer(const Step& step) {
    if (step.other_user()) return Peer{};  // a peer over TCP
    return Peer{User(geteuid())};
  }

  void AttachTrainer(const Step& step) {
    v1::TrainerHello hello = step.trainer();
    hello.set_wait_ms(Never(hello.wait_ms()));
    auto member = std::make_unique<Member>();
    member->group = hello.group();
    member->peer = NewPeer(step);
    member->trainer_inbox = std::make_shared<Inbox<v1::TrainerEvent>>();
    member->id = daemon_->calls().Attach(ArrivalOf(hello, member->peer), member->trainer_inbox);
    members_.push_back(std::move(member));
  }

  void AttachEngine(const Step& step) {
    v1::EngineHello hello = step.engine();
    hello.set_wait_ms(Never(hello.wait_ms()));
    auto member = std::make_unique<Member>();
    member->engine = true;
    member->group = hello.group();
    member->instance = hello.instance();
    if (hello.delivery() == v1::DELIVERY_LOADER) member->delivery = DeliveryMode::kLoader;
    member->peer = NewPeer(step);
    member->engine_inbox = std::make_shared<Inbox<v1::EngineEvent>>();
    member->id = daemon_->calls().Attach(ArrivalOf(hello, member->peer), member->engine_inbox);
    members_.push_back(std::move(member));
  }

  void CreateGroup(const v1::CreateGroupRequest& request) {
    if (!CheckName(request.group(), "group").ok()) return;  // as the service does
    (void)daemon_->operators().CreateGroup(request.group(), SpecOf(request.spec()),
                                           request.replace(), request.request_id(), "uid:1000");
  }

  void AbortUpdate(const Step& step) {
    if (members_.empty()) return;
    const CallId call = daemon_->NewCall();
    daemon_->operators().Ask(call, step.abort_update().group(),
                             OperatorAbort{call, step.abort_update().reason()},
                             ReplyTo(NewCall(0, 0, "")));
  }

  void RollGroupBack(const Step& step) {
    if (members_.empty()) return;
    RollbackEvent event{.call = daemon_->NewCall(), .member = {}, .request_id = ""};
    if (step.roll_group_back().has_version()) {
      event.version = Version(step.roll_group_back().version());
    }
    daemon_->operators().Ask(event.call, step.roll_group_back().group(), event,
                             ReplyTo(NewCall(0, 0, "")));
  }

  void Watch(const Step& step) {
    auto inbox = std::make_shared<UpdateInbox>();
    absl::StatusOr<WatchFilter> filter = FilterOf(step.watch());
    if (!filter.ok()) return;
    const auto watch = daemon_->operators().Watch(*std::move(filter), inbox);
    if (watch.ok() && step.cancel()) daemon_->operators().StopWatching(*watch);
  }

  static Token TokenOf(const Member& member) {
    Token token{};
    if (member.lease.token().size() == token.size()) {
      std::copy(member.lease.token().begin(), member.lease.token().end(), token.begin());
    }
    return token;
  }

  void AddRegion(const Step& step, Member* member) {
    const fuzz::NodeInput::Region& in = step.region();
    const int64_t bytes = std::clamp<int64_t>(in.bytes(), 1, kMaxRegion);
    auto fd = CreateSealedMemfd("fuzz", bytes);
    REFITD_CHECK(fd.ok());
    auto memory = HostRegion::Map(*fd, bytes, Access::kReadWrite, false);
    REFITD_CHECK(memory.ok());
    Fill(*memory, in.fill());
    const auto id = daemon_->memory().RegisterRegion(
        TokenOf(*member), PeerOfMember(step, *member).credentials.value_or(PeerCredentials{}),
        *std::move(fd), static_cast<RegionKind>(in.kind()), bytes, /*address=*/0,
        KeepDescriptor::kWithRegion);
    if (id.ok()) member->regions.push_back({*id, *std::move(memory)});
  }

  static void Fill(const std::shared_ptr<HostRegion>& memory, uint64_t seed) {
    for (int64_t i = 0; i < memory->bytes(); ++i) {
      seed = seed * 6364136223846793005u + 1442695040888963407u;
      memory->data()[i] = static_cast<char>(seed >> 56);
    }
  }

  void ReleaseRegion(const Step& step, Member* member) {
    RegionId id(step.release_region());
    if (!step.raw() && !member->regions.empty()) {
      id = member->regions[step.release_region() % member->regions.size()].id;
    }
    const Peer peer = PeerOfMember(step, *member);
    if (!peer.credentials.has_value()) return;  // no descriptor socket over TCP
    if (daemon_->memory().ReleaseRegion(TokenOf(*member), *peer.credentials, id).ok()) {
      std::erase_if(member->regions, [id](const Region& region) { return region.id == id; });
    }
  }

  void MapPool(const Step& step, Member* member) {
    const Peer peer = PeerOfMember(step, *member);
    auto pool =
        daemon_->memory().MapPool(TokenOf(*member), peer.credentials.value_or(PeerCredentials{}));
    if (!pool.ok()) return;
    auto memory = HostRegion::Map(pool->fd, pool->bytes,
                                  member->engine ? Access::kReadOnly : Access::kReadWrite, false);
    REFITD_CHECK(memory.ok());
    member->pool = *std::move(memory);
  }

  void RegisterLayout(const Step& step, Member* member) {
    LayoutDecoder decoder;
    for (v1::LayoutChunk chunk : step.layout().chunks()) {
      if (!step.raw() && !member->regions.empty()) {
        for (uint64_t& region : *chunk.mutable_piece_region()) {
          region = member->regions[region % member->regions.size()].id.value();
        }
      }
      if (!decoder.Add(chunk).ok()) return;
    }
    auto layout = std::move(decoder).Finish();
    if (!layout.ok()) return;
    // The groups are this daemon's own, so the call is answered before it returns.
    int replies = 0;
    daemon_->calls().RegisterLayout(
        daemon_->NewCall(), CallerOf(member->lease, PeerOfMember(step, *member)), /*engine=*/true,
        *layout, [&](const absl::StatusOr<MemberCalls::RegisteredLayout>& registered) {
          ++replies;
          if (!registered.ok()) return;
          REFITD_CHECK(registered->digest == layout->Digest());
          REFITD_CHECK(member->engine);
          member->layout = *layout;
        });
    REFITD_CHECK(replies == 1);
  }

  // Fills in the member's own lease, unless the step has another.
  template <typename Request>
  static Request WithLease(const Step& step, const Member& member, Request request) {
    if (!step.raw()) {
      *request.mutable_lease() = member.lease;
    } else if (request.lease().token().empty()) {
      request.mutable_lease()->set_token(member.lease.token());
    }
    return request;
  }

  Call* NewCall(size_t member, int64_t version, const std::string& request_id) {
    calls_.push_back(std::make_unique<Call>());
    Call* call = calls_.back().get();
    call->member = member;
    call->version = version;
    call->repeated = !request_id.empty() && !members_[member]->requests.insert(request_id).second;
    return call;
  }

  static ReplyFunction ReplyTo(Call* call) {
    return [call](absl::Status status, const ReplyPayload& payload) {
      MutexLock lock(&call->mutex);
      ++call->replies;
      call->status = std::move(status);
      call->payload = payload;
    };
  }

  void MemberStep(const Step& step, size_t actor) {
    Member& member = *members_[actor];
    const Peer peer = PeerOfMember(step, member);
    const CallId id = daemon_->NewCall();
    switch (step.call_case()) {
      case Step::kRegion:
        return AddRegion(step, &member);
      case Step::kReleaseRegion:
        return ReleaseRegion(step, &member);
      case Step::kMapPool:
        return MapPool(step, &member);
      case Step::kLayout:
        return RegisterLayout(step, &member);
      case Step::kBegin: {
        auto request = WithLease(step, member, step.begin());
        request.set_duration_ms(Never(request.duration_ms()));
        Call* call = NewCall(actor, request.version(), request.request_id());
        daemon_->calls().Call(id, CallerOf(request.lease(), peer), EventOf(request, kLongest),
                              ReplyTo(call));
        break;
      }
      case Step::kLeaseSlot: {
        auto request = WithLease(step, member, step.lease_slot());
        request.set_wait_ms(Never(request.wait_ms()));
        Call* call = NewCall(actor, request.version(), "");
        daemon_->calls().Call(id, CallerOf(request.lease(), peer), EventOf(request), ReplyTo(call));
        break;
      }
      case Step::kReleaseSlot: {
        auto request = WithLease(step, member, step.release_slot());
        if (!step.raw() && !member.grants.empty()) {
          const SlotGrant grant = TakeGrant(&member, request.slot());
          request.set_slot(grant.slot.value());
          request.set_grant(grant.grant.value());
        }
        ReleaseSlotEvent event;
        event.grant = {SlotIndex(request.slot()), GrantId(request.grant())};
        daemon_->calls().Call(id, CallerOf(request.lease(), peer), event,
                              ReplyTo(NewCall(actor, 0, "")));
        break;
      }
      case Step::kPush:
        Push(step, actor, id);
        break;
      case Step::kCommit: {
        const auto request = WithLease(step, member, step.commit());
        member.asked_to_commit.insert(request.version());
        Call* call = NewCall(actor, request.version(), request.request_id());
        daemon_->calls().Call(id, CallerOf(request.lease(), peer), EventOf(request), ReplyTo(call));
        break;
      }
      case Step::kAbort: {
        const auto request = WithLease(step, member, step.abort());
        Call* call = NewCall(actor, request.version(), request.request_id());
        daemon_->calls().Call(id, CallerOf(request.lease(), peer), EventOf(request), ReplyTo(call));
        break;
      }
      case Step::kRollback: {
        const auto request = WithLease(step, member, step.rollback());
        Call* call = NewCall(actor, 0, request.request_id());
        daemon_->calls().Call(id, CallerOf(request.lease(), peer), EventOf(request), ReplyTo(call));
        break;
      }
      case Step::kReleasePrevious: {
        const auto request = WithLease(step, member, v1::TrainerReleasePreviousRequest());
        daemon_->calls().Call(id, CallerOf(request.lease(), peer), EventOf(request),
                              ReplyTo(NewCall(actor, 0, "")));
        break;
      }
      case Step::kReady: {
        v1::Ready ready = step.ready();
        if (!step.raw()) ready.set_update_id(member.prepare.update_id());
        member.ready.insert(ready.update_id());
        daemon_->calls().HandleEngineEvent(member.id,
                                           ReadyEvent{member.id, UpdateId(ready.update_id())});
        return;
      }
      case Step::kAck: {
        v1::Ack ack = step.ack();
        if (!step.raw()) {
          ack.set_update_id(member.prepare.update_id());
          if (!member.read.empty()) {
            const auto skip = static_cast<uint64_t>(ack.part()) % member.read.size();
            ack.set_part(std::next(member.read.begin(), static_cast<int64_t>(skip))->second);
          }
        }
        member.read.erase({ack.update_id(), ack.part()});
        if (ack.part() < 0) return;  // as the service does
        daemon_->calls().HandleEngineEvent(
            member.id, AckEvent{member.id, UpdateId(ack.update_id()), PartSeq(ack.part())});
        return;
      }
      case Step::kFailed: {
        v1::Failed failed = step.failed();
        if (!step.raw()) failed.set_update_id(member.prepare.update_id());
        daemon_->calls().HandleEngineEvent(
            member.id, EngineFailed{member.id, UpdateId(failed.update_id()), failed.reason()});
        return;
      }
      case Step::kGone:
        daemon_->calls().Gone(member.id, "the fuzzer ended it");
        return;
      default:
        return;
    }
    if (step.cancel()) daemon_->calls().CallGone(id);
  }

  static SlotGrant TakeGrant(Member* member, uint32_t which) {
    const auto at = member->grants.begin() + which % member->grants.size();
    const SlotGrant grant = *at;
    member->grants.erase(at);
    return grant;
  }

  void Push(const Step& step, size_t actor, CallId id) {
    Member& member = *members_[actor];
    Call* call = NewCall(actor, step.push().version(), step.push().request_id());
    call->push = WithLease(step, member, step.push());
    v1::Bucket& bucket = *call->push.mutable_bucket();
    if (!step.raw()) {
      if (bucket.has_regions() && !member.regions.empty()) {
        for (v1::RegionRef& ref : *bucket.mutable_regions()->mutable_refs()) {
          ref.set_region_id(member.regions[ref.region_id() % member.regions.size()].id.value());
        }
      }
      if (bucket.has_slot() && !member.grants.empty()) {
        const SlotGrant grant = TakeGrant(&member, bucket.slot().slot());
        bucket.mutable_slot()->set_slot(grant.slot.value());
        bucket.mutable_slot()->set_grant(grant.grant.value());
      }
    }
    call->contents = ContentsOf(member, bucket);
    daemon_->calls().PushBucket(id, CallerOf(call->push.lease(), PeerOfMember(step, member)),
                                PushOf(call->push), ReplyTo(call));
  }

  // The pushed elements, if the bucket's memory is visible to this process.
  static Contents ContentsOf(const Member& member, const v1::Bucket& bucket) {
    const auto find = [&member](RegionId id) {
      return std::find_if(member.regions.begin(), member.regions.end(),
                          [id](const Region& region) { return region.id == id; });
    };
    const DaemonOptions options = Options();
    const auto checked = CheckBucket(
        bucket, {.inline_bytes = options.inline_bytes, .slot_bytes = member.slot_bytes},
        [&](RegionId id) -> std::optional<int64_t> {
          const auto at = find(id);
          return at == member.regions.end() ? std::nullopt : std::optional(at->memory->bytes());
        });
    Contents contents;
    if (!checked.ok()) return contents;
    for (size_t i = 0; i < checked->tensors.size(); ++i) {
      const TensorSpec& tensor = checked->tensors[i];
      const TensorRange& range = checked->ranges[i];
      const CheckedBucket::Place& place = checked->places[i];
      const auto bytes = static_cast<size_t>(range.count * ElementBytes(tensor.dtype));
      const char* data = place.inline_data;
      if (checked->source == CheckedBucket::Source::kRegions) {
        data = find(place.region)->memory->data() + place.byte_offset;
      } else if (checked->source == CheckedBucket::Source::kSlot) {
        const int64_t at = checked->slot->slot.value() * member.slot_bytes;
        if (member.pool == nullptr || at + member.slot_bytes > member.pool->bytes()) return {};
        data = member.pool->data() + at + place.byte_offset;
      }
      contents.emplace(tensor.name, Pushed{tensor.dtype, range.start, std::string(data, bytes)});
    }
    return contents;
  }

  // ---- checking the results ----

  void Judge() {
    transport_->WaitIdle();
    JudgeReplies();
    for (const auto& member : members_) {
      member->committed.reset();
      if (member->engine) {
        JudgeEngine(member.get());
      } else {
        JudgeTrainer(member.get());
      }
    }
    JudgeInstances();
    JudgeGroups();
  }

  void JudgeReplies() {
    for (const auto& call : calls_) {
      MutexLock lock(&call->mutex);
      REFITD_CHECK(call->replies <= 1);
      if (call->replies == 0 || call->seen) continue;
      call->seen = true;
      if (!call->status.ok()) {
        REFITD_CHECK(!call->status.message().empty());
        continue;
      }
      if (call->repeated) continue;
      Member& member = *members_[call->member];
      if (const auto* begun = std::get_if<BeginReply>(&call->payload)) {
        uint64_t& update = update_of_[{member.group, call->version}];
        update = std::max(update, begun->update.value());
      } else if (const auto* lease = std::get_if<LeaseSlotReply>(&call->payload)) {
        member.grants.push_back(lease->grant);
        REFITD_CHECK(lease->slot_bytes == member.slot_bytes);
        if (member.pool != nullptr) {
          char* data = member.pool->data() + lease->grant.slot.value() * member.slot_bytes;
          for (int64_t i = 0; i < member.slot_bytes; ++i) {
            data[i] = static_cast<char>(lease->grant.grant.value() * 37 + i);
          }
        }
      } else if (std::get_if<BucketReply>(&call->payload) != nullptr) {
        pushed_[update_of_[{member.group, call->version}]].merge(call->contents);
      } else if (const auto* commit = std::get_if<CommitReply>(&call->payload)) {
        REFITD_CHECK(commit->version.value() == call->version);
        for (const auto& other : members_) {  // P1
          if (other->engine || other->group != member.group || other->ended()) continue;
          if (other->lease.token().empty()) continue;  // it was refused
          REFITD_CHECK(other->asked_to_commit.contains(call->version));
        }
      }
    }
  }

  template <typename Event>
  static void NoteWelcome(const Event& event, Member* member) {
    member->lease = event.welcome().lease();
    member->slot_bytes = event.welcome().slot_bytes();
    REFITD_CHECK(member->lease.token().size() == sizeof(Token));
  }

  void JudgeTrainer(Member* member) {
    for (const v1::TrainerEvent& event : member->trainer_inbox->Take()) {
      if (event.has_welcome()) NoteWelcome(event, member);
    }
  }

  void JudgeEngine(Member* member) {
    const std::vector<v1::EngineEvent> events = member->engine_inbox->Take();
    const bool aborted = std::any_of(events.begin(), events.end(),
                                     [](const auto& event) { return event.has_aborted(); });
    for (const v1::EngineEvent& event : events) {
      if (event.has_welcome()) {
        NoteWelcome(event, member);
      } else if (event.has_prepare()) {
        REFITD_CHECK(event.prepare().update_id() > member->prepare.update_id());
        member->prepare = event.prepare();
        member->read.clear();
        member->ready.erase(event.prepare().update_id());  // said before it was asked
      } else if (event.has_bucket()) {
        REFITD_CHECK(member->delivery == DeliveryMode::kLoader);
        REFITD_CHECK(member->ready.contains(event.bucket().update_id()));
        member->read.emplace(event.bucket().update_id(), event.bucket().part());
        if (!aborted) JudgePart(*member, event.bucket());
      } else if (event.has_committed()) {
        JudgeCommitted(member, event.committed().version());
      } else if (event.has_aborted()) {
        member->read.clear();
      }
    }
  }

  // P1, as far as it concerns the rank alone.
  void JudgeCommitted(Member* member, int64_t version) {
    REFITD_CHECK(member->prepare.version() == version);
    REFITD_CHECK(member->ready.contains(member->prepare.update_id()));
    REFITD_CHECK(member->read.empty());
    member->committed = version;
    if (!member->layout.has_value()) return;
    const Contents& contents = pushed_[member->prepare.update_id()];
    for (const Piece& piece : member->layout->pieces) JudgePiece(*member, piece, contents);
  }

  static const Pushed* Find(const Contents& contents, const std::string& name, int64_t index) {
    const auto [first, last] = contents.equal_range(name);
    for (auto at = first; at != last; ++at) {
      const Pushed& pushed = at->second;
      const auto count = static_cast<int64_t>(pushed.bytes.size()) / ElementBytes(pushed.dtype);
      if (index >= pushed.start && index < pushed.start + count) return &pushed;
    }
    return nullptr;
  }

  void JudgePiece(const Member& member, const Piece& piece, const Contents& contents) {
    constexpr int64_t kMaxJudged = 4096;  // elements
    const TensorSpec& tensor = member.layout->tensors[piece.tensor];
    // engine-only, or in memory that this process does not see
    if (!contents.contains(tensor.name)) return;
    const int64_t element = ElementBytes(tensor.dtype);
    const auto region = std::find_if(member.regions.begin(), member.regions.end(),
                                     [&](const Region& r) { return r.id == piece.region; });
    REFITD_CHECK(region != member.regions.end());
    const int64_t count = std::min(ElementCount(piece.box), kMaxJudged);
    Dims at(tensor.shape.size(), 0);
    for (int64_t i = 0; i < count; ++i) {
      int64_t index = 0;
      int64_t offset = 0;
      for (size_t d = 0; d < at.size(); ++d) {
        index = index * tensor.shape[d] + piece.box.offset[d] + at[d];
        offset += at[d] * piece.strides[d];
      }
      const Pushed* pushed = Find(contents, tensor.name, index);
      if (pushed != nullptr) {
        REFITD_CHECK(pushed->dtype == tensor.dtype);
        const char* from = pushed->bytes.data() + (index - pushed->start) * element;
        const char* to = region->memory->data() + piece.byte_offset + offset * element;
        REFITD_CHECK(std::equal(from, from + element, to));
      }
      for (size_t d = at.size(); d > 0 && ++at[d - 1] == piece.box.extent[d - 1]; --d)
        at[d - 1] = 0;
    }
  }

  // Checks that the slot holds bytes that a trainer pushed.
  void JudgePart(const Member& member, const v1::BucketReady& part) {
    REFITD_CHECK(part.slot_byte_offset() == int64_t{part.slot()} * member.slot_bytes);
    REFITD_CHECK(part.bytes() >= 0 && part.bytes() <= member.slot_bytes);
    const int tensors = part.names_size();
    REFITD_CHECK(part.dtypes_size() == tensors && part.shapes_size() == tensors);
    REFITD_CHECK(part.starts_size() == tensors && part.sizes_size() == tensors);
    REFITD_CHECK(part.byte_offsets_size() == tensors);
    for (int i = 0; i < tensors; ++i) {
      const int64_t element = ElementBytes(static_cast<DType>(part.dtypes(i)));
      const int64_t end = part.byte_offsets(i) + part.sizes(i) * element;
      REFITD_CHECK(part.byte_offsets(i) >= 0 && part.byte_offsets(i) % element == 0);
      REFITD_CHECK(part.sizes(i) >= 0 && end <= part.bytes());
      if (member.pool == nullptr || part.sizes(i) == 0) continue;
      const std::string_view there(
          member.pool->data() + part.slot_byte_offset() + part.byte_offsets(i),
          static_cast<size_t>(part.sizes(i) * element));
      REFITD_CHECK(IsPushed(member, part, i, there));
    }
  }

  // Considers answered and unanswered pushes: a bucket in a leased slot is answered when its
  // readers are done.
  bool IsPushed(const Member& member, const v1::BucketReady& part, int i, std::string_view bytes) {
    const int64_t element = ElementBytes(static_cast<DType>(part.dtypes(i)));
    bool known = false;
    const auto matches = [&](const Contents& contents) {
      const Pushed* pushed = Find(contents, part.names(i), part.starts(i));
      if (pushed == nullptr) return false;
      known = true;
      const size_t at = static_cast<size_t>((part.starts(i) - pushed->start) * element);
      return at + bytes.size() <= pushed->bytes.size() &&
             std::equal(bytes.begin(), bytes.end(), pushed->bytes.begin() + at);
    };
    if (matches(pushed_[part.update_id()])) return true;
    for (const auto& call : calls_) {
      MutexLock lock(&call->mutex);
      if (call->replies == 0 && call->version == part.version() &&
          members_[call->member]->group == member.group && matches(call->contents)) {
        return true;
      }
    }
    return !known;  // from memory that this process did not map
  }

  // P1: an instance commits as a whole.
  void JudgeInstances() {
    for (const auto& member : members_) {
      if (!member->committed.has_value()) continue;
      for (const auto& other : members_) {
        if (!other->engine || other->ended() || other->lease.token().empty()) continue;
        if (other->group != member->group || other->instance != member->instance) continue;
        REFITD_CHECK(other->committed == member->committed);
      }
    }
  }

  void JudgeGroups() {
    const v1::ListGroupsResponse groups = ListGroups(daemon_.get());
    for (const v1::GroupStatus& group : groups.groups()) {
      auto& last = versions_[{group.name(), group.incarnation()}];
      if (last.has_value()) REFITD_CHECK(group.has_version() && group.version() >= *last);  // P3
      if (group.has_version()) last = group.version();
      for (const v1::InstanceStatus& instance : group.instances()) {
        const bool dirty = instance.state().find("dirty") != std::string::npos;
        REFITD_CHECK(!dirty || !instance.has_version());  // P2
      }
    }
  }

  std::unique_ptr<Daemon> daemon_;
  CountedTransport* transport_ = nullptr;  // owned by the daemon
  std::vector<std::unique_ptr<Member>> members_;
  std::vector<std::unique_ptr<Call>> calls_;
  std::map<uint64_t, Contents> pushed_;  // by update
  // the last update by group and version
  std::map<std::pair<std::string, int64_t>, uint64_t> update_of_;
  std::map<std::pair<std::string, uint64_t>, std::optional<int64_t>> versions_;
};

int OpenDescriptors() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

void FuzzOne(const fuzz::NodeInput& input) {
  static const bool quiet = SetLogging({.file = "/dev/null"}).ok();
  REFITD_CHECK(quiet);
  static const auto watch = *ProcessWatch::Create();
  const int before = OpenDescriptors();
  {
    World world(watch.get());
    for (int i = 0; i < std::min(input.steps_size(), kMaxSteps); ++i) world.Take(input.steps(i));
    world.End();
  }
  REFITD_CHECK(OpenDescriptors() == before);
}

}  // namespace
}  // namespace refitd

REFITD_PROTO_FUZZ_TARGET(refitd::fuzz::NodeInput)
