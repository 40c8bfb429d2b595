#include "daemon/node.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "daemon/log.h"
#include "daemon/version.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr Duration kNoWakeLimit = std::chrono::hours(1);
constexpr size_t kMaxClientBytes = 128;
constexpr size_t kMaxDeviceBytes = 64;
constexpr size_t kMaxCalls = 65'536;  // unanswered, of all members

// From the kernel, so that a token can't be guessed (P9).
std::string RandomToken() {
  std::string token(sizeof(Token), '\0');
  REFITD_CHECK(getrandom(token.data(), token.size(), 0) == static_cast<ssize_t>(token.size()));
  return token;
}

Duration Millis(int64_t ms) { return std::chrono::milliseconds(ms); }
// A wait that came from outside: not negative, and short enough to add to a clock.
absl::StatusOr<Duration> CheckMillis(int64_t ms, std::string_view field) {
  constexpr int64_t kMaxMillis = 7 * 24 * 3600 * int64_t{1000};
  if (ms < 0 || ms > kMaxMillis) {
    return Error(absl::StatusCode::kInvalidArgument, "{}: {} is not in 0..{}", field, ms,
                 kMaxMillis);
  }
  return Millis(ms);
}

absl::Status CheckText(std::string_view text, size_t limit, std::string_view field) {
  if (text.size() <= limit) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, "{}: {} bytes are more than {}", field,
               text.size(), limit);
}

absl::Status CheckProtocol(v1::ProtocolVersion protocol) {
  if (protocol == v1::PROTOCOL_VERSION_1) return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition,
               "protocol: version {} is not served (this daemon serves {})",
               static_cast<int>(protocol), static_cast<int>(v1::PROTOCOL_VERSION_1));
}

template <typename Hello>
absl::Status CheckHello(const Hello& hello) {
  REFITD_RETURN_IF_ERROR(CheckProtocol(hello.protocol()));
  REFITD_RETURN_IF_ERROR(CheckName(hello.group(), "group"));
  REFITD_RETURN_IF_ERROR(CheckText(hello.client(), kMaxClientBytes, "client"));
  REFITD_RETURN_IF_ERROR(CheckText(hello.device().name(), kMaxDeviceBytes, "device.name"));
  if (!hello.coordinator().empty()) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "coordinator: '{}': this daemon serves its own groups only; leave the field empty",
                 hello.coordinator());
  }
  if (hello.device().name() != "" && hello.device().name() != "host") {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "device.name: '{}': this daemon has no transport for it", hello.device().name());
  }
  if (hello.world_size() < 1 || hello.world_size() > kMaxEngineRanks) {
    return Error(absl::StatusCode::kInvalidArgument, "world_size: {} is not in 1..{}",
                 hello.world_size(), kMaxEngineRanks);
  }
  if (hello.rank() < 0 || hello.rank() >= hello.world_size()) {
    return Error(absl::StatusCode::kInvalidArgument, "rank: {} is not in 0..{}", hello.rank(),
                 hello.world_size() - 1);
  }
  return CheckMillis(hello.wait_ms(), "wait_ms").status();
}

absl::StatusOr<TrainerIdentity> IdentityOf(const v1::TrainerHello& hello, const Peer& peer) {
  REFITD_RETURN_IF_ERROR(CheckHello(hello));
  return TrainerIdentity{hello.rank(), hello.world_size(),
                         peer.credentials ? peer.credentials->pid : hello.pid()};
}

absl::StatusOr<EngineIdentity> IdentityOf(const v1::EngineHello& hello, const Peer& peer) {
  REFITD_RETURN_IF_ERROR(CheckHello(hello));
  REFITD_RETURN_IF_ERROR(CheckName(hello.instance(), "instance"));
  EngineIdentity identity;
  identity.instance = hello.instance();
  identity.rank = hello.rank();
  identity.world_size = hello.world_size();
  identity.pid = peer.credentials ? peer.credentials->pid : hello.pid();
  switch (hello.delivery()) {
    case v1::DELIVERY_REGISTERED:
      identity.delivery = DeliveryMode::kRegistered;
      break;
    case v1::DELIVERY_STAGED:
      identity.delivery = DeliveryMode::kStaged;
      break;
    default:
      return Error(absl::StatusCode::kInvalidArgument,
                   "delivery: {} is neither registered (1) nor staged (2)",
                   static_cast<int>(hello.delivery()));
  }
  if (hello.has_held_version()) {
    if (hello.held_version() < 0) {
      return Error(absl::StatusCode::kInvalidArgument, "held_version: {} is negative",
                   hello.held_version());
    }
    identity.held_version = Version(hello.held_version());
  }
  if (hello.has_manifest()) {
    if (identity.delivery != DeliveryMode::kStaged) {
      return Error(absl::StatusCode::kInvalidArgument, "manifest: only staged delivery takes one");
    }
    REFITD_ASSIGN_OR_RETURN(
        identity.manifest,
        CheckManifest(hello.manifest().names(), hello.manifest().dtypes(),
                      hello.manifest().shapes(), "manifest", kMaxTensorsPerLayout));
  }
  return identity;
}

GroupEvent AttachedEvent(MemberId member, TrainerIdentity identity) {
  return TrainerAttached{member, std::move(identity)};
}
GroupEvent AttachedEvent(MemberId member, EngineIdentity identity) {
  return EngineAttached{member, std::move(identity)};
}

v1::EngineEvent PartEvent(const SendPart& part, int64_t slot_bytes) {
  v1::EngineEvent event;
  v1::BucketReady& bucket = *event.mutable_bucket();
  const PartContent& content = *part.content;
  bucket.set_version(part.version.value());
  bucket.set_update_id(part.update.value());
  bucket.set_part(part.part.value());
  bucket.set_slot(part.slot.slot.value());
  bucket.set_slot_byte_offset(int64_t{part.slot.slot.value()} * slot_bytes);
  bucket.set_bytes(content.bytes);
  for (size_t i = 0; i < content.ranges.size(); ++i) {
    const TensorSpec& tensor = content.tensors[content.ranges[i].tensor];
    bucket.add_names(tensor.name);
    bucket.add_dtypes(ToWire(tensor.dtype));
    *bucket.add_shapes() = ToWire(tensor.shape);
    bucket.add_starts(content.ranges[i].start);
    bucket.add_sizes(content.ranges[i].count);
    bucket.add_byte_offsets(content.byte_offsets[i]);
  }
  return event;
}

}  // namespace

// Memory of one group's members, for the executor.
class Node::Memory : public MemoryResolver {
 public:
  Memory(const std::map<MemberId, MemberRecord>& members, const GroupRecord& group)
      : members_(members), group_(group) {}

  absl::StatusOr<MemorySpan> Region(MemberId member, RegionId region) const override {
    const auto m = members_.find(member);
    if (m == members_.end()) return Error(absl::StatusCode::kInternal, "member {} is gone", member);
    const auto r = m->second.regions.find(region);
    if (r == m->second.regions.end()) {
      return Error(absl::StatusCode::kNotFound, "region {} of member {} is gone", region, member);
    }
    const std::shared_ptr<HostRegion>& mapping = r->second.mapping;
    return MemorySpan{mapping->data(), mapping->bytes(), mapping};
  }

  absl::StatusOr<MemorySpan> Slot(SlotIndex slot) const override {
    if (group_.pool == nullptr) return absl::InternalError("the staging pool is not mapped");
    const int64_t bytes = group_.group->spec().slot_bytes;
    return MemorySpan{group_.pool->data() + int64_t{slot.value()} * bytes, bytes, group_.pool};
  }

 private:
  const std::map<MemberId, MemberRecord>& members_;
  const GroupRecord& group_;
};

void Node::MemberRecord::End(absl::Status status) {
  if (trainer_sink != nullptr) std::exchange(trainer_sink, nullptr)->End(std::move(status));
  if (engine_sink != nullptr) std::exchange(engine_sink, nullptr)->End(std::move(status));
}

Node::Node(NodeOptions options, std::unique_ptr<Transport> transport, ProcessWatch* processes)
    : options_(std::move(options)),
      processes_(processes),
      executor_(transport.get()),
      transport_(std::move(transport)) {
  timer_ = std::thread([this] { TimerLoop(); });
}

Node::~Node() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    timer_cond_.NotifyAll();
  }
  timer_.join();
}

// ---- groups ----

absl::Status Node::NoGroup(const std::string& name) {
  return Error(absl::StatusCode::kNotFound, "group '{}' does not exist", name);
}

uint64_t Node::NewIncarnation() {
  uint64_t bits = 0;
  REFITD_CHECK(getrandom(&bits, sizeof(bits), 0) == sizeof(bits));
  return bits | 1;  // 0 means "the current one" on the wire
}

Node::GroupRecord* Node::FindGroup(const std::string& name) {
  const auto it = groups_.find(name);
  return it == groups_.end() ? nullptr : it->second.get();
}

absl::StatusOr<GroupSpec> Node::CheckSpec(const v1::GroupSpec& wire) const {
  GroupSpec spec;
  const auto check = [](int64_t value, int64_t low, int64_t high, std::string_view field) {
    if (value >= low && value <= high) return absl::OkStatus();
    return Error(absl::StatusCode::kInvalidArgument, "spec.{}: {} is not in {}..{}", field, value,
                 low, high);
  };
  REFITD_RETURN_IF_ERROR(check(wire.trainer_ranks(), 1, kMaxTrainerRanks, "trainer_ranks"));
  REFITD_RETURN_IF_ERROR(check(wire.min_instances(), 0, kMaxEngineRanks, "min_instances"));
  if (wire.slots() != 0) REFITD_RETURN_IF_ERROR(check(wire.slots(), 2, kMaxSlots, "slots"));
  REFITD_RETURN_IF_ERROR(check(wire.slot_bytes(), 0, options_.max_pool_bytes, "slot_bytes"));
  if (wire.slot_bytes() % 4096 != 0) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "spec.slot_bytes: {} is not a multiple of 4096", wire.slot_bytes());
  }
  spec.trainer_ranks = wire.trainer_ranks();
  spec.min_instances = std::max(1, wire.min_instances());
  spec.slot_bytes = wire.slot_bytes() == 0 ? options_.default_slot_bytes : wire.slot_bytes();
  spec.slots = wire.slots() == 0 ? options_.default_slots : wire.slots();
  REFITD_RETURN_IF_ERROR(
      check(wire.engine_only_tensors_size(), 0, kMaxTensorsPerLayout, "engine_only_tensors"));
  for (const std::string& name : wire.engine_only_tensors()) {
    REFITD_RETURN_IF_ERROR(CheckText(name, kMaxNameBytes, "spec.engine_only_tensors"));
  }
  spec.engine_only_tensors.assign(wire.engine_only_tensors().begin(),
                                  wire.engine_only_tensors().end());
  std::sort(spec.engine_only_tensors.begin(), spec.engine_only_tensors.end());
  spec.engine_only_tensors.erase(
      std::unique(spec.engine_only_tensors.begin(), spec.engine_only_tensors.end()),
      spec.engine_only_tensors.end());
  return spec;
}

absl::StatusOr<Node::GroupRecord*> Node::MakeGroup(const std::string& name,
                                                   const v1::GroupSpec& wire,
                                                   std::optional<int> trainers, bool* created) {
  *created = false;
  REFITD_ASSIGN_OR_RETURN(GroupSpec spec, CheckSpec(wire));
  if (GroupRecord* found = FindGroup(name); found != nullptr) {
    if (found->group->spec() == spec) return found;
    const GroupSpec& has = found->group->spec();
    return Error(absl::StatusCode::kFailedPrecondition,
                 "spec: group '{}' has trainer_ranks {}, min_instances {}, slot_bytes {}, slots "
                 "{}, {} engine-only "
                 "tensors; this one says {}, {}, {}, {}, {}",
                 name, has.trainer_ranks, has.min_instances, has.slot_bytes, has.slots,
                 has.engine_only_tensors.size(), spec.trainer_ranks, spec.min_instances,
                 spec.slot_bytes, spec.slots, spec.engine_only_tensors.size());
  }
  if (trainers.value_or(spec.trainer_ranks) != spec.trainer_ranks) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "world_size: {} is not the spec's trainer_ranks {}", *trainers,
                 spec.trainer_ranks);
  }
  if (draining_) return absl::UnavailableError("the daemon is draining");
  if (groups_.size() >= static_cast<size_t>(options_.max_groups)) {
    return Error(absl::StatusCode::kResourceExhausted,
                 "group '{}': the daemon has max_groups ({}) groups", name, options_.max_groups);
  }
  int64_t pools = 0;
  for (const auto& [other, record] : groups_) pools += record->pool_bytes();
  const int64_t needed = spec.slots * spec.slot_bytes;
  if (needed > options_.max_pool_bytes - pools) {
    return Error(absl::StatusCode::kResourceExhausted,
                 "group '{}': {} slots of {} bytes do not fit: {} of max_pool_bytes {} are taken "
                 "by other groups",
                 name, spec.slots, spec.slot_bytes, pools, options_.max_pool_bytes);
  }
  auto record = std::make_unique<GroupRecord>(options_.observer);
  // Called from within Handle, hence under the mutex.
  const auto next_update = [this]()
                               ABSL_NO_THREAD_SAFETY_ANALYSIS { return UpdateId(next_update_++); };
  record->group =
      std::make_unique<Group>(name, NewIncarnation(), std::move(spec), options_.group, next_update);
  LogInfo("group {}: created", name);
  GroupRecord* result = record.get();
  groups_[name] = std::move(record);
  *created = true;
  return result;
}

absl::Status Node::EnsurePool(GroupRecord* group) {
  if (group->pool != nullptr) return absl::OkStatus();
  REFITD_ASSIGN_OR_RETURN(
      UniqueFd fd, CreateSealedMemfd("refitd-pool-" + group->group->name(), group->pool_bytes()));
  REFITD_ASSIGN_OR_RETURN(group->pool,
                          HostRegion::Map(fd, group->pool_bytes(), Access::kReadWrite, false));
  group->pool_fd = std::move(fd);
  return absl::OkStatus();
}

// ---- membership ----

template <typename Hello, typename Sink, typename Identity>
MemberId Node::Attach(const Hello& hello, const Peer& peer, std::shared_ptr<Sink> sink,
                      absl::StatusOr<Identity> identity) {
  Deferred deferred;
  MemberId member;
  {
    MutexLock lock(&mutex_);
    member = MemberId(next_member_++);
    if (!identity.ok()) {
      sink->End(identity.status());
    } else if (draining_) {
      sink->End(absl::UnavailableError("the daemon is draining"));
    } else if (members_.size() + waiting_.size() >= static_cast<size_t>(options_.max_members)) {
      sink->End(Error(absl::StatusCode::kResourceExhausted,
                      "the daemon has max_members ({}) members", options_.max_members));
    } else {
      MemberRecord record;
      record.id = member;
      record.group = hello.group();
      record.engine = std::is_same_v<Sink, EngineSink>;
      record.peer = peer;
      record.client = hello.client();
      record.device = hello.device().name().empty() ? "host" : hello.device().name();
      if constexpr (std::is_same_v<Sink, EngineSink>) {
        record.engine_sink = sink;
      } else {
        record.trainer_sink = sink;
      }
      GroupEvent attached = AttachedEvent(member, *std::move(identity));
      bool created = false;
      absl::StatusOr<GroupRecord*> group = nullptr;
      if (hello.has_spec()) {
        std::optional<int> trainers;
        if (!record.engine) trainers = hello.world_size();
        group = MakeGroup(hello.group(), hello.spec(), trainers, &created);
      } else {
        group = FindGroup(hello.group());
      }
      if (!group.ok()) {
        sink->End(group.status());
      } else if (*group != nullptr) {
        Enter(std::move(record), *group, std::move(attached), &deferred);
      } else if (hello.wait_ms() == 0) {
        sink->End(NoGroup(hello.group()));
      } else {
        waiting_.push_back(
            {std::move(record), std::move(attached), Now() + Millis(hello.wait_ms())});
        WakeTimer();
      }
      if (created) AdmitWaiting(hello.group(), &deferred);
    }
  }
  RunAll(std::move(deferred));
  return member;
}

MemberId Node::AttachTrainer(const v1::TrainerHello& hello, const Peer& peer,
                             std::shared_ptr<TrainerSink> sink) {
  return Attach(hello, peer, std::move(sink), IdentityOf(hello, peer));
}

MemberId Node::AttachEngine(const v1::EngineHello& hello, const Peer& peer,
                            std::shared_ptr<EngineSink> sink) {
  return Attach(hello, peer, std::move(sink), IdentityOf(hello, peer));
}

void Node::AdmitWaiting(const std::string& group, Deferred* deferred) {
  std::vector<Waiting> admitted;
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    if (it->record.group == group) {
      admitted.push_back(std::move(*it));
      it = waiting_.erase(it);
    } else {
      ++it;
    }
  }
  for (Waiting& w : admitted)
    Enter(std::move(w.record), FindGroup(group), std::move(w.attached), deferred);
}

void Node::Enter(MemberRecord record, GroupRecord* group, GroupEvent attached, Deferred* deferred) {
  const MemberId member = record.id;
  record.token = RandomToken();
  record.incarnation = group->group->incarnation();
  tokens_[record.token] = member;
  const auto it = members_.emplace(member, std::move(record)).first;
  MemberRecord& m = it->second;
  // P8: a killed process whose forked child keeps the socket sends no end of stream.
  if (m.peer.credentials.has_value() && m.peer.credentials->pid != 0) {
    absl::StatusOr<WatchHandle> watch = processes_->Watch(
        *m.peer.credentials, [this, member] { MemberGone(member, "its process died"); });
    if (watch.ok()) {
      m.watch = *watch;
    } else {
      LogWarning("member {}: process can't be watched: {}", member.value(),
                 Message(watch.status()));
    }
  }
  Handle(m.group, std::move(attached), deferred);
}

void Node::MemberGone(MemberId member, const std::string& reason) {
  Deferred deferred;
  {
    MutexLock lock(&mutex_);
    const auto waits = std::find_if(waiting_.begin(), waiting_.end(),
                                    [member](const Waiting& w) { return w.record.id == member; });
    if (waits != waiting_.end()) {
      waits->record.End(absl::CancelledError(reason));
      waiting_.erase(waits);
    }
    const auto it = members_.find(member);
    if (it != members_.end()) {
      Lose(&it->second, reason, Error(absl::StatusCode::kAborted, "the lease ended: {}", reason),
           &deferred);
    }
  }
  RunAll(std::move(deferred));
}

void Node::Lose(MemberRecord* member, const std::string& reason, absl::Status end,
                Deferred* deferred) {
  if (member->lost) return;
  member->lost = true;
  tokens_.erase(member->token);
  member->End(std::move(end));
  if (member->watch != WatchHandle()) processes_->Cancel(member->watch);
  // The record may go while the event is handled.
  const std::string group = member->group;
  const MemberId id = member->id;
  Handle(group, MemberLost{id, reason}, deferred);
}

void Node::Erase(MemberId member, Deferred* deferred) {
  const auto it = members_.find(member);
  if (it == members_.end()) return;
  tokens_.erase(it->second.token);
  if (it->second.watch != WatchHandle()) processes_->Cancel(it->second.watch);
  // Unmapping large regions takes long: after the mutex.
  regions_ -= static_cast<int64_t>(it->second.regions.size());
  auto regions = std::make_shared<std::map<RegionId, RegionRecord>>(std::move(it->second.regions));
  deferred->push_back([regions] { regions->clear(); });
  members_.erase(it);
}

absl::StatusOr<Node::MemberRecord*> Node::AuthenticateToken(const std::string& token,
                                                            const Peer& peer) {
  const auto it = tokens_.find(token);
  if (it == tokens_.end()) {
    return absl::UnauthenticatedError("lease.token: no such lease (never given, or it ended)");
  }
  MemberRecord& member = members_.at(it->second);
  // P9: a lease taken over a unix socket works for the same user only.
  if (member.peer.credentials.has_value() &&
      (!peer.credentials.has_value() || peer.credentials->uid != member.peer.credentials->uid)) {
    return absl::PermissionDeniedError("lease.token: the lease belongs to another user");
  }
  return &member;
}

absl::StatusOr<Node::MemberRecord*> Node::Authenticate(const v1::Lease& lease, const Peer& peer,
                                                       bool engine) {
  REFITD_RETURN_IF_ERROR(CheckProtocol(lease.protocol()));
  REFITD_ASSIGN_OR_RETURN(MemberRecord * member, AuthenticateToken(lease.token(), peer));
  if (member->engine != engine) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "lease: this call is for {}, the lease is of {}",
                 engine ? "an engine rank" : "a trainer rank",
                 member->engine ? "an engine rank" : "a trainer rank");
  }
  // An engine's memory does not belong to an incarnation: its lease outlives a replacement.
  const uint64_t incarnation =
      engine ? member->incarnation : FindGroup(member->group)->group->incarnation();
  if (lease.incarnation() != incarnation) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "lease.incarnation: {:x} is not group '{}''s incarnation {:x}",
                 lease.incarnation(), member->group, incarnation);
  }
  return member;
}

void Node::MemberEvent(MemberId member, const GroupEvent& event) {
  Deferred deferred;
  {
    MutexLock lock(&mutex_);
    const auto it = members_.find(member);
    if (it != members_.end() && !it->second.lost) Handle(it->second.group, event, &deferred);
  }
  RunAll(std::move(deferred));
}

void Node::Ready(MemberId member, const v1::Ready& ready) {
  MemberEvent(member, ReadyEvent{member, UpdateId(ready.update_id())});
}

void Node::Ack(MemberId member, const v1::Ack& ack) {
  MemberEvent(member, AckEvent{member, UpdateId(ack.update_id()), PartSeq(ack.part())});
}

void Node::Failed(MemberId member, const v1::Failed& failed) {
  MemberEvent(member, EngineFailed{member, UpdateId(failed.update_id()),
                                   std::string(Shorten(failed.reason(), kMaxReasonBytes))});
}

absl::Status Node::CheckEngineLease(const v1::Lease& lease, const Peer& peer) {
  MutexLock lock(&mutex_);
  return Authenticate(lease, peer, true).status();
}

absl::StatusOr<v1::LayoutRegistered> Node::RegisterEngineLayout(const v1::Lease& lease,
                                                                const Peer& peer, Layout layout) {
  // Checking a big layout takes long: outside the mutex, against the regions of now.
  std::map<RegionId, RegionRecord> regions;
  {
    MutexLock lock(&mutex_);
    REFITD_ASSIGN_OR_RETURN(MemberRecord * member, Authenticate(lease, peer, true));
    regions = member->regions;
  }
  const auto region_bytes = [&regions](RegionId id) -> std::optional<int64_t> {
    const auto it = regions.find(id);
    return it == regions.end() ? std::nullopt : std::optional<int64_t>(it->second.mapping->bytes());
  };
  REFITD_RETURN_IF_ERROR(ValidateLayout(layout, region_bytes, /*destination=*/true));
  for (const Piece& piece : layout.pieces) {
    if (regions.at(piece.region).mapping->access() != Access::kReadWrite) {
      return Error(absl::StatusCode::kInvalidArgument, "region {} of tensor '{}' is not writable",
                   piece.region, layout.tensors[piece.tensor].name);
    }
  }
  v1::LayoutRegistered reply;
  reply.set_digest(layout.Digest());
  reply.set_pieces(static_cast<int64_t>(layout.pieces.size()));
  reply.set_bytes(layout.Bytes());
  const auto shared = std::make_shared<const Layout>(std::move(layout));
  Deferred deferred;
  {
    MutexLock lock(&mutex_);
    REFITD_ASSIGN_OR_RETURN(MemberRecord * member, Authenticate(lease, peer, true));
    for (const Piece& piece : shared->pieces) {
      if (!member->regions.contains(piece.region)) {
        return Error(absl::StatusCode::kNotFound, "region {} was released meanwhile", piece.region);
      }
    }
    if (member->layout != nullptr &&
        shared->binding_generation <= member->layout->binding_generation) {
      return Error(absl::StatusCode::kFailedPrecondition,
                   "binding_generation: {} is not greater than the registered {}",
                   shared->binding_generation, member->layout->binding_generation);
    }
    GroupRecord* group = FindGroup(member->group);
    REFITD_RETURN_IF_ERROR(group->group->CanRegisterLayout(member->id));
    member->layout = shared;
    Handle(member->group, LayoutRegistered{member->id, shared}, &deferred);
  }
  RunAll(std::move(deferred));
  return reply;
}

// ---- a trainer's calls ----

void Node::TrainerCall(
    CallId call, const v1::Lease& lease, const Peer& peer, const std::string& request_id,
    ReplyFunction reply,
    const std::function<absl::StatusOr<GroupEvent>(const MemberRecord&)>& event) {
  Deferred deferred;
  absl::Status refused;
  {
    MutexLock lock(&mutex_);
    const auto make = [&]() -> absl::StatusOr<std::pair<std::string, GroupEvent>> {
      mutex_.AssertHeld();
      REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, Authenticate(lease, peer, false));
      REFITD_RETURN_IF_ERROR(CheckText(request_id, kMaxRequestIdBytes, "request_id"));
      if (calls_.size() >= kMaxCalls) {
        return Error(absl::StatusCode::kResourceExhausted, "{} calls are unanswered already",
                     calls_.size());
      }
      REFITD_ASSIGN_OR_RETURN(GroupEvent made, event(*member));
      return std::pair(member->group, std::move(made));
    };
    absl::StatusOr<std::pair<std::string, GroupEvent>> made = make();
    refused = made.status();
    if (made.ok()) {
      calls_[call] = {made->first, std::move(reply)};
      Handle(made->first, std::move(made->second), &deferred);
    }
  }
  if (!refused.ok()) reply(refused, EmptyReply{});
  RunAll(std::move(deferred));
}

void Node::Begin(CallId call, const v1::BeginRequest& request, const Peer& peer,
                 ReplyFunction reply) {
  TrainerCall(
      call, request.lease(), peer, request.request_id(), std::move(reply),
      [&](const MemberRecord& member) -> absl::StatusOr<GroupEvent> {
        BeginEvent event;
        event.call = call;
        event.member = member.id;
        event.request_id = request.request_id();
        event.version = Version(request.version());
        REFITD_ASSIGN_OR_RETURN(event.duration, CheckMillis(request.duration_ms(), "duration_ms"));
        if (event.duration > options_.group.max_duration) {
          return Error(absl::StatusCode::kInvalidArgument,
                       "duration_ms: {} is more than the maximum {}", request.duration_ms(),
                       ToMillis(options_.group.max_duration));
        }
        REFITD_ASSIGN_OR_RETURN(event.verification, VerificationFromWire(request.verification()));
        event.evict_late = request.evict_late();
        if (request.version() < 0) {
          return Error(absl::StatusCode::kInvalidArgument, "version: {} is negative",
                       request.version());
        }
        if (request.tensor_count() < 0 || request.tensor_count() > kMaxTensorsPerLayout) {
          return Error(absl::StatusCode::kInvalidArgument, "tensor_count: {} is not in 0..{}",
                       request.tensor_count(), kMaxTensorsPerLayout);
        }
        if (request.total_bytes() < 0) {
          return Error(absl::StatusCode::kInvalidArgument, "total_bytes: {} is negative",
                       request.total_bytes());
        }
        event.tensor_count = request.tensor_count();
        event.total_bytes = request.total_bytes();
        return event;
      });
}

void Node::LeaseSlot(CallId call, const v1::LeaseSlotRequest& request, const Peer& peer,
                     ReplyFunction reply) {
  TrainerCall(call, request.lease(), peer, "", std::move(reply),
              [&](const MemberRecord& member) -> absl::StatusOr<GroupEvent> {
                mutex_.AssertHeld();
                REFITD_RETURN_IF_ERROR(EnsurePool(FindGroup(member.group)));
                REFITD_ASSIGN_OR_RETURN(Duration wait, CheckMillis(request.wait_ms(), "wait_ms"));
                return LeaseSlotEvent{call, member.id, Version(request.version()), wait};
              });
}

void Node::ReleaseSlot(CallId call, const v1::ReleaseSlotRequest& request, const Peer& peer,
                       ReplyFunction reply) {
  TrainerCall(call, request.lease(), peer, "", std::move(reply),
              [&](const MemberRecord& member) -> absl::StatusOr<GroupEvent> {
                return ReleaseSlotEvent{
                    call, member.id, {SlotIndex(request.slot()), GrantId(request.grant())}};
              });
}

void Node::PushBucket(CallId call, const v1::PushBucketRequest& request, const Peer& peer,
                      ReplyFunction reply) {
  TrainerCall(call, request.lease(), peer, request.request_id(), std::move(reply),
              [&](const MemberRecord& member) -> absl::StatusOr<GroupEvent> {
                mutex_.AssertHeld();
                const auto region_bytes = [&member](RegionId id) -> std::optional<int64_t> {
                  const auto it = member.regions.find(id);
                  return it == member.regions.end()
                             ? std::nullopt
                             : std::optional<int64_t>(it->second.mapping->bytes());
                };
                const BucketLimits limits{options_.inline_bytes,
                                          FindGroup(member.group)->group->spec().slot_bytes};
                REFITD_ASSIGN_OR_RETURN(CheckedBucket bucket,
                                        CheckBucket(request.bucket(), limits, region_bytes));
                BucketEvent event;
                event.call = call;
                event.member = member.id;
                event.request_id = request.request_id();
                event.version = Version(request.version());
                event.seq = bucket.seq;
                event.tensors = bucket.tensors;
                event.ranges = bucket.ranges;
                event.slot = bucket.slot;
                if (bucket.slot.has_value()) {
                  for (const CheckedBucket::Place& place : bucket.places) {
                    event.slot_byte_offsets.push_back(place.byte_offset);
                  }
                }
                buckets_[call] = std::move(bucket);
                return event;
              });
}

void Node::Commit(CallId call, const v1::CommitRequest& request, const Peer& peer,
                  ReplyFunction reply) {
  TrainerCall(call, request.lease(), peer, request.request_id(), std::move(reply),
              [&](const MemberRecord& member) -> absl::StatusOr<GroupEvent> {
                if (request.bucket_count() < 0) {
                  return Error(absl::StatusCode::kInvalidArgument, "bucket_count: {} is negative",
                               request.bucket_count());
                }
                return CommitEvent{call, member.id, request.request_id(),
                                   Version(request.version()), request.bucket_count()};
              });
}

void Node::Abort(CallId call, const v1::AbortRequest& request, const Peer& peer,
                 ReplyFunction reply) {
  TrainerCall(call, request.lease(), peer, request.request_id(), std::move(reply),
              [&](const MemberRecord& member) -> absl::StatusOr<GroupEvent> {
                REFITD_RETURN_IF_ERROR(CheckText(request.reason(), kMaxReasonBytes, "reason"));
                return AbortEvent{call, member.id, request.request_id(), Version(request.version()),
                                  request.reason()};
              });
}

void Node::CallGone(CallId call) {
  Deferred deferred;
  {
    MutexLock lock(&mutex_);
    const auto it = calls_.find(call);
    if (it != calls_.end())
      Handle(std::string(it->second.group), refitd::CallGone{call}, &deferred);
  }
  RunAll(std::move(deferred));
}

absl::StatusOr<v1::GetUpdateResponse> Node::GetUpdate(const v1::GetUpdateRequest& request) {
  MutexLock lock(&mutex_);
  const GroupRecord* group = FindGroup(request.group());
  if (group == nullptr) return NoGroup(request.group());
  v1::GetUpdateResponse response;
  response.set_incarnation(group->group->incarnation());
  if (request.incarnation() != 0 && request.incarnation() != group->group->incarnation()) {
    response.set_reason("that incarnation of the group is gone");
    return response;
  }
  const PastUpdate past = group->group->Past(Version(request.version()));
  response.set_outcome(static_cast<v1::UpdateOutcome>(past.outcome));
  response.set_reason(past.reason);
  return response;
}

// ---- events and actions ----

void Node::Handle(const std::string& name, GroupEvent event, Deferred* deferred) {
  GroupRecord* group = FindGroup(name);
  REFITD_CHECK(group != nullptr);
  std::deque<GroupEvent> events;
  events.push_back(std::move(event));
  while (!events.empty()) {
    GroupActions actions;
    group->group->Handle(events.front(), Now(), &actions);
    group->meter.Handled(events.front(), actions, *group->group, Now());
    events.pop_front();
    for (GroupAction& action : actions) Perform(group, std::move(action), deferred, &events);
  }
  WakeTimer();
  if (!AnyUpdateRuns()) idle_cond_.NotifyAll();
}

// Performs actions; runs under node->mutex_, as Perform does.
struct Node::Performer {
  Node* node;
  GroupRecord* group;
  Deferred* deferred;
  std::deque<GroupEvent>* more;

  MemberRecord* Find(MemberId id) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    const auto it = node->members_.find(id);
    return it == node->members_.end() ? nullptr : &it->second;
  }
  void SendEngine(MemberId id, v1::EngineEvent event) {
    MemberRecord* member = Find(id);
    if (member != nullptr && member->engine_sink != nullptr)
      member->engine_sink->Send(std::move(event));
  }
  void SendTrainer(MemberId id, v1::TrainerEvent event) {
    MemberRecord* member = Find(id);
    if (member != nullptr && member->trainer_sink != nullptr)
      member->trainer_sink->Send(std::move(event));
  }
  // Committed, Aborted and Draining mean the same to both roles.
  template <typename Fill>
  void SendEither(MemberId id, Fill fill) {
    MemberRecord* member = Find(id);
    if (member == nullptr) return;
    if (member->engine) {
      v1::EngineEvent event;
      fill(&event);
      SendEngine(id, std::move(event));
    } else {
      v1::TrainerEvent event;
      fill(&event);
      SendTrainer(id, std::move(event));
    }
  }

  void operator()(Reply& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    const auto it = node->calls_.find(a.call);
    if (it == node->calls_.end()) return;
    node->buckets_.erase(a.call);
    deferred->push_back([reply = std::move(it->second.reply), status = std::move(a.status),
                         payload = std::move(a.payload)] { reply(status, payload); });
    node->calls_.erase(it);
  }
  void operator()(SendPrepare& a) {
    v1::EngineEvent event;
    event.mutable_prepare()->set_version(a.version.value());
    event.mutable_prepare()->set_update_id(a.update.value());
    event.mutable_prepare()->set_remaining_ms(ToMillis(a.remaining));
    event.mutable_prepare()->set_tensor_count(a.tensor_count);
    SendEngine(a.member, std::move(event));
  }
  void operator()(SendPart& a) {
    SendEngine(a.member, PartEvent(a, group->group->spec().slot_bytes));
  }
  void operator()(SendCommitted& a) {
    SendEither(a.member,
               [&](auto* event) { event->mutable_committed()->set_version(a.version.value()); });
  }
  void operator()(SendAborted& a) {
    SendEither(a.member, [&](auto* event) {
      event->mutable_aborted()->set_version(a.version.value());
      event->mutable_aborted()->set_reason(a.reason);
      event->mutable_aborted()->set_dirty(a.dirty);
    });
  }
  void operator()(SendDraining& a) {
    SendEither(a.member, [](auto* event) { event->mutable_draining(); });
  }
  void operator()(StartTransfer& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    node->PerformTransfer(group, std::move(a), more);
  }
  void operator()(StartVerify& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    node->PerformVerify(group, a, more);
  }
  void operator()(ReleaseMember& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    node->Erase(a.member, deferred);
  }
  void operator()(UpdateEnded& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    node->executor_.Forget(a.update);
  }
  void operator()(RefuseMember& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    MemberRecord* member = Find(a.member);
    if (member == nullptr) return;
    member->End(a.status);
    node->Erase(a.member, deferred);
  }
  void operator()(WelcomeMember& a) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    MemberRecord* member = Find(a.member);
    if (member != nullptr) node->SendWelcome(group, member);
  }
  void operator()(StateChanged&) ABSL_NO_THREAD_SAFETY_ANALYSIS { node->NotifyWatchers(false); }
  void operator()(LogLine& a) {
    const LogLevel level = a.level == LogLine::kInfo      ? LogLevel::kInfo
                           : a.level == LogLine::kWarning ? LogLevel::kWarning
                                                          : LogLevel::kError;
    Log(level, "group {}: {}", group->group->name(), a.text);
  }
};

void Node::Perform(GroupRecord* group, GroupAction action, Deferred* deferred,
                   std::deque<GroupEvent>* more) {
  std::visit(Performer{this, group, deferred, more}, action);
}

void Node::PerformTransfer(GroupRecord* group, StartTransfer start, std::deque<GroupEvent>* more) {
  absl::Status status = absl::OkStatus();
  if (start.fill_slot.has_value() || start.source_slot.has_value()) status = EnsurePool(group);
  if (status.ok()) {
    const auto done = [this, name = group->group->name()](const Executor::Done& d) {
      Deferred deferred;
      {
        MutexLock lock(&mutex_);
        executor_.Finished(d);
        Handle(name,
               TransferDone{d.update, d.part, d.status, d.bytes_written, d.failed_destination},
               &deferred);
      }
      RunAll(std::move(deferred));
    };
    status = executor_.Start(start, buckets_.at(start.bucket_call), Memory(members_, *group), done);
  }
  if (!status.ok()) more->push_back(TransferDone{start.update, start.part, status, {}, -1});
}

void Node::PerformVerify(GroupRecord* group, const StartVerify& verify,
                         std::deque<GroupEvent>* more) {
  const auto done = [this, name = group->group->name()](const VerifyDone& d) {
    Deferred deferred;
    {
      MutexLock lock(&mutex_);
      Handle(name, d, &deferred);
    }
    RunAll(std::move(deferred));
  };
  const absl::Status status = executor_.Start(verify, Memory(members_, *group), done);
  if (!status.ok()) more->push_back(VerifyDone{verify.update, status, {}});
}

void Node::SendWelcome(GroupRecord* group, MemberRecord* member) {
  v1::Welcome welcome;
  welcome.mutable_lease()->set_token(member->token);
  welcome.mutable_lease()->set_incarnation(member->incarnation);
  welcome.mutable_lease()->set_protocol(v1::PROTOCOL_VERSION_1);
  welcome.set_member_id(member->id.value());
  welcome.set_descriptor_socket(options_.descriptor_socket);
  welcome.mutable_limits()->set_inline_bytes(options_.inline_bytes);
  welcome.mutable_limits()->set_outstanding_buckets(options_.group.outstanding_buckets);
  welcome.mutable_limits()->set_default_duration_ms(ToMillis(options_.group.default_duration));
  welcome.mutable_limits()->set_max_duration_ms(ToMillis(options_.group.max_duration));
  welcome.mutable_limits()->set_message_bytes(options_.message_bytes);
  welcome.set_slot_bytes(group->group->spec().slot_bytes);
  welcome.set_slots(group->group->spec().slots);
  if (group->group->version().has_value())
    welcome.set_group_version(group->group->version()->value());
  welcome.set_daemon_version(std::string(kVersion));
  if (member->engine) {
    v1::EngineEvent event;
    *event.mutable_welcome() = std::move(welcome);
    member->engine_sink->Send(std::move(event));
  } else {
    v1::TrainerEvent event;
    *event.mutable_welcome() = std::move(welcome);
    member->trainer_sink->Send(std::move(event));
  }
}

// ---- the descriptor socket ----

absl::StatusOr<RegionId> Node::RegisterRegion(const Token& token, const PeerCredentials& peer,
                                              UniqueFd fd, RegionKind kind, int64_t bytes) {
  if (kind != RegionKind::kMemfd) {
    return Error(absl::StatusCode::kUnimplemented,
                 "region_kind: {}: this daemon maps sealed memfds only",
                 static_cast<uint32_t>(kind));
  }
  if (bytes > options_.max_region_bytes) {
    return Error(absl::StatusCode::kResourceExhausted, "bytes: {} is more than max_region_bytes {}",
                 bytes, options_.max_region_bytes);
  }
  struct stat file {};
  if (fstat(fd.get(), &file) != 0) return ErrnoError(errno, "looking at the descriptor");
  const std::pair<uint64_t, uint64_t> identity(file.st_dev, file.st_ino);
  const std::string key(token.begin(), token.end());
  const auto admit = [&]() -> absl::StatusOr<MemberRecord*> {
    mutex_.AssertHeld();
    REFITD_ASSIGN_OR_RETURN(MemberRecord * member, AuthenticateToken(key, Peer{peer}));
    if (member->regions.size() >= static_cast<size_t>(options_.max_regions_per_member)) {
      return Error(absl::StatusCode::kResourceExhausted, "the member has {} regions already",
                   member->regions.size());
    }
    if (regions_ >= options_.max_regions) {
      return Error(absl::StatusCode::kResourceExhausted, "the daemon has {} regions already",
                   regions_);
    }
    if (!member->engine) return member;
    // Two regions over one memfd could hold two tensors in the same bytes, unseen by
    // ValidateLayout.
    for (const auto& [id, region] : member->regions) {
      if (region.file == identity) {
        return Error(absl::StatusCode::kAlreadyExists, "the descriptor is region {} already", id);
      }
    }
    return member;
  };
  Access access = Access::kReadOnly;
  {
    MutexLock lock(&mutex_);
    REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, admit());
    if (member->engine) access = Access::kReadWrite;  // trainers' memory is only read
  }
  // Mapping and filling page tables takes long: outside the mutex. Memory that its owner never
  // touched is not filled here: it would be charged to the daemon.
  constexpr int64_t kStatBlockBytes = 512;
  const bool allocated = file.st_blocks * kStatBlockBytes >= bytes;
  REFITD_ASSIGN_OR_RETURN(std::shared_ptr<HostRegion> mapping,
                          HostRegion::Map(fd, bytes, access, allocated));
  MutexLock lock(&mutex_);
  REFITD_ASSIGN_OR_RETURN(MemberRecord * member, admit());
  const RegionId id(next_region_++);
  member->regions[id] = {std::move(mapping), identity};
  ++regions_;
  return id;
}

absl::Status Node::ReleaseRegion(const Token& token, const PeerCredentials& peer, RegionId region) {
  std::shared_ptr<HostRegion>
      released;  // unmapped after the mutex, and after the copies that hold it
  MutexLock lock(&mutex_);
  REFITD_ASSIGN_OR_RETURN(MemberRecord * member,
                          AuthenticateToken(std::string(token.begin(), token.end()), Peer{peer}));
  const auto it = member->regions.find(region);
  if (it == member->regions.end()) {
    return Error(absl::StatusCode::kNotFound, "region_id: {} is no region of this member", region);
  }
  if (member->layout != nullptr) {
    for (const Piece& piece : member->layout->pieces) {
      if (piece.region == region) {
        return Error(absl::StatusCode::kFailedPrecondition,
                     "region_id: {} is in use by tensor '{}'", region,
                     member->layout->tensors[piece.tensor].name);
      }
    }
  }
  for (const auto& [call, bucket] : buckets_) {
    if (bucket.source != CheckedBucket::Source::kRegions) continue;
    for (const CheckedBucket::Place& place : bucket.places) {
      if (place.region == region) {
        return Error(absl::StatusCode::kFailedPrecondition,
                     "region_id: {} is the source of an unanswered bucket", region);
      }
    }
  }
  released = std::move(it->second.mapping);
  member->regions.erase(it);
  --regions_;
  return absl::OkStatus();
}

absl::StatusOr<PoolHandle> Node::MapPool(const Token& token, const PeerCredentials& peer) {
  MutexLock lock(&mutex_);
  REFITD_ASSIGN_OR_RETURN(MemberRecord * member,
                          AuthenticateToken(std::string(token.begin(), token.end()), Peer{peer}));
  GroupRecord* group = FindGroup(member->group);
  REFITD_RETURN_IF_ERROR(EnsurePool(group));
  PoolHandle handle;
  handle.bytes = group->pool_bytes();
  handle.slot_bytes = group->group->spec().slot_bytes;
  if (member->engine) {
    // An engine only reads slots; a bug there must not damage what its neighbours load.
    REFITD_ASSIGN_OR_RETURN(handle.fd, ReadOnlyDuplicate(group->pool_fd));
    return handle;
  }
  handle.fd = UniqueFd(fcntl(group->pool_fd.get(), F_DUPFD_CLOEXEC, 0));
  if (!handle.fd.valid()) return ErrnoError(errno, "duplicating the pool's descriptor");
  return handle;
}

// ---- time and life ----

void Node::RunAll(Deferred deferred) {
  for (const std::function<void()>& f : deferred) f();
}

TimePoint Node::NextWake() const {
  TimePoint wake = Now() + kNoWakeLimit;
  for (const auto& [name, group] : groups_) {
    if (const auto deadline = group->group->NextDeadline(); deadline.has_value())
      wake = std::min(wake, *deadline);
  }
  for (const Waiting& w : waiting_) wake = std::min(wake, w.deadline);
  if (AnyUpdateRuns()) {
    for (const auto& [id, watcher] : watchers_) wake = std::min(wake, watcher.due);
  }
  return wake;
}

void Node::WakeTimer() {
  if (NextWake() < timer_wakes_) timer_cond_.NotifyAll();
}

void Node::TimerLoop() {
  pthread_setname_np(pthread_self(), "refitd-timer");
  while (true) {
    Deferred deferred;
    {
      MutexLock lock(&mutex_);
      timer_wakes_ = NextWake();
      while (!stopping_ && Now() < timer_wakes_) {
        timer_cond_.WaitUntil(&mutex_, timer_wakes_);
        timer_wakes_ = NextWake();
      }
      if (stopping_) return;
      const TimePoint now = Now();
      std::vector<std::string> due;
      for (const auto& [name, group] : groups_) {
        const auto deadline = group->group->NextDeadline();
        if (deadline.has_value() && *deadline <= now) due.push_back(name);
      }
      for (const std::string& name : due) Handle(name, Tick{}, &deferred);
      for (auto it = waiting_.begin(); it != waiting_.end();) {
        if (it->deadline > now) {
          ++it;
          continue;
        }
        it->record.End(Error(absl::StatusCode::kNotFound, "group '{}' was not created in time",
                             it->record.group));
        it = waiting_.erase(it);
      }
      NotifyWatchers(true);
    }
    RunAll(std::move(deferred));
  }
}

bool Node::AnyUpdateRuns() const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [](const auto& entry) { return entry.second->group->update_running(); });
}

void Node::Drain() {
  Deferred deferred;
  {
    MutexLock lock(&mutex_);
    if (draining_) return;
    draining_ = true;
    for (Waiting& w : waiting_) w.record.End(absl::UnavailableError("the daemon is draining"));
    waiting_.clear();
    std::vector<std::string> names;
    for (const auto& [name, group] : groups_) names.push_back(name);
    for (const std::string& name : names) Handle(name, DrainEvent{}, &deferred);
  }
  RunAll(std::move(deferred));
}

void Node::Finish(TimePoint deadline) {
  Deferred deferred;
  {
    MutexLock lock(&mutex_);
    while (AnyUpdateRuns() && !hurrying_ && Now() < deadline)
      idle_cond_.WaitUntil(&mutex_, deadline);
    std::vector<std::string> running;
    for (const auto& [name, group] : groups_) {
      group->meter.DaemonStops();
      if (group->group->update_running()) running.push_back(name);
    }
    for (const std::string& name : running) {
      Handle(name, OperatorAbort{NewCall(), "the daemon stops"}, &deferred);
    }
  }
  RunAll(std::move(deferred));
  deferred.clear();
  {
    MutexLock lock(&mutex_);
    // Copies are finite; their end is what clean-up waits for (P6).
    const TimePoint cleanup = Now() + options_.group.cleanup_limit;
    while (AnyUpdateRuns() && Now() < cleanup) idle_cond_.WaitUntil(&mutex_, cleanup);
    std::vector<MemberId> all;
    for (const auto& [id, member] : members_) all.push_back(id);
    for (const MemberId id : all) {
      const auto it = members_.find(id);
      if (it == members_.end()) continue;
      Lose(&it->second, "the daemon stops", absl::UnavailableError("the daemon stops"), &deferred);
    }
    for (auto& [id, watcher] : watchers_)
      watcher.sink->End(absl::UnavailableError("the daemon stops"));
    watchers_.clear();
  }
  RunAll(std::move(deferred));
}

void Node::Hurry() {
  MutexLock lock(&mutex_);
  hurrying_ = true;
  idle_cond_.NotifyAll();
}

void Node::SetListeners(std::vector<std::string> listeners) {
  MutexLock lock(&mutex_);
  listeners_ = std::move(listeners);
}

bool Node::Alive() {
  MutexLock lock(&mutex_);
  return !stopping_;
}

}  // namespace refitd
