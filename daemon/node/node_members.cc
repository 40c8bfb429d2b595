// Membership: hellos and leases, how both end, and members' layouts.
#include <algorithm>
#include <utility>

#include "daemon/checks/fields.h"
#include "daemon/node/node.h"
#include "daemon/process/log.h"
#include "daemon/process/version.h"
#include "proto/protocol.h"
#include "transport/plan/block_scales.h"

namespace refitd {
namespace {

constexpr size_t kMaxClientBytes = 128;
constexpr size_t kMaxDeviceBytes = 64;
constexpr size_t kMaxAddressBytes = 255;

// OK: the address is empty or "HOST:PORT".
absl::Status CheckCoordinator(std::string_view address) {
  if (address.empty()) return absl::OkStatus();
  REFITD_RETURN_IF_ERROR(CheckText(address, kMaxAddressBytes, "coordinator"));
  const size_t colon = address.rfind(':');
  const std::string_view port = colon == std::string_view::npos ? "" : address.substr(colon + 1);
  const bool digits = !port.empty() && port.size() <= 5 &&
                      port.find_first_not_of("0123456789") == std::string_view::npos;
  const bool plain = address.find_first_of("/, \t\n") == std::string_view::npos;
  if (colon != std::string_view::npos && colon > 0 && digits && plain) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, "coordinator: '{}' is not HOST:PORT", address);
}

template <typename Hello>
absl::Status CheckHello(const Hello& hello) {
  REFITD_RETURN_IF_ERROR(
      AgreeProtocol(hello.protocol(), hello.highest_protocol(), "protocol").status());
  REFITD_RETURN_IF_ERROR(CheckName(hello.group(), "group"));
  REFITD_RETURN_IF_ERROR(CheckText(hello.client(), kMaxClientBytes, "client"));
  REFITD_RETURN_IF_ERROR(CheckText(hello.device().name(), kMaxDeviceBytes, "device.name"));
  REFITD_RETURN_IF_ERROR(CheckCoordinator(hello.coordinator()));
  if (hello.world_size() < 1 || hello.world_size() > kMaxEngineRanks) {
    return Error(absl::StatusCode::kInvalidArgument, "world_size: {} is not in 1..{}",
                 hello.world_size(), kMaxEngineRanks);
  }
  if (hello.rank() < 0 || hello.rank() >= hello.world_size()) {
    return Error(absl::StatusCode::kInvalidArgument, "rank: {} is not in 0..{}", hello.rank(),
                 hello.world_size() - 1);
  }
  if (hello.pid() < 0) {
    return Error(absl::StatusCode::kInvalidArgument, "pid: {} is negative", hello.pid());
  }
  return CheckMillis(hello.wait_ms(), "wait_ms").status();
}

absl::StatusOr<TrainerIdentity> IdentityOf(const v1::TrainerHello& hello, const Peer& peer) {
  REFITD_RETURN_IF_ERROR(CheckHello(hello));
  return TrainerIdentity{hello.rank(), hello.world_size(),
                         peer.credentials ? peer.credentials->pid : hello.pid(), NodeId(), ""};
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
  identity.dirty = hello.dirty();
  if (hello.dirty() && hello.has_held_version()) {
    return absl::InvalidArgumentError("dirty: weights that hold a version are not dirty");
  }
  if (hello.has_held_version()) {
    if (hello.held_version() < 0) {
      return Error(absl::StatusCode::kInvalidArgument, "held_version: {} is negative",
                   hello.held_version());
    }
    identity.held_version = Version(hello.held_version());
  } else if (hello.held_origin() != 0) {
    return Error(absl::StatusCode::kInvalidArgument, "held_origin: {:x} without a held_version",
                 hello.held_origin());
  }
  identity.held_origin = hello.held_origin();
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

// The record of a member that has said hello, without its id and its GPU.
template <typename Hello>
MemberRecord CommonRecord(const Hello& hello, const Peer& peer) {
  MemberRecord record;
  record.group = hello.group();
  record.peer = peer;
  record.client = hello.client();
  record.protocol = AgreeProtocol(hello.protocol(), hello.highest_protocol(), "protocol")->protocol;
  record.device = hello.device().name().empty() ? "host" : hello.device().name();
  return record;
}

MemberRecord RecordOf(const v1::TrainerHello& hello, const Peer& peer,
                      std::shared_ptr<TrainerSink> sink) {
  MemberRecord record = CommonRecord(hello, peer);
  record.trainer_sink = std::move(sink);
  return record;
}

MemberRecord RecordOf(const v1::EngineHello& hello, const Peer& peer,
                      std::shared_ptr<EngineSink> sink) {
  MemberRecord record = CommonRecord(hello, peer);
  record.engine = true;
  record.engine_sink = std::move(sink);
  record.instance = hello.instance();
  record.staged = hello.delivery() == v1::DELIVERY_STAGED;
  return record;
}

GroupEvent AttachedEvent(MemberId member, TrainerIdentity identity) {
  return TrainerAttached{member, std::move(identity)};
}
GroupEvent AttachedEvent(MemberId member, EngineIdentity identity) {
  return EngineAttached{member, std::move(identity)};
}

}  // namespace

template <typename HelloMessage, typename Sink, typename Identity>
MemberId Node::Attach(const HelloMessage& hello, const Peer& peer, std::shared_ptr<Sink> sink,
                      absl::StatusOr<Identity> identity) {
  absl::StatusOr<std::optional<int>> ordinal = std::nullopt;
  if (identity.ok()) ordinal = DeviceOf(hello.device().name());
  if (ordinal.ok() && ordinal->has_value() && !peer.credentials.has_value()) {
    // P9: this daemon opens handles with its own rights, so it must know whose they are.
    ordinal = Error(absl::StatusCode::kPermissionDenied,
                    "device.name: '{}': members on a GPU attach over the unix socket",
                    hello.device().name());
  }
  const MemberId member(next_member_++);
  Turn turn(this, &mutex_);
  if (!identity.ok()) {
    sink->End(identity.status());
  } else if (!ordinal.ok()) {
    sink->End(ordinal.status());
  } else if (draining_) {
    sink->End(absl::UnavailableError("the daemon is draining"));
  } else if (absl::Status room = CheckMembers(); !room.ok()) {
    sink->End(std::move(room));
  } else {
    MemberRecord record = RecordOf(hello, peer, std::move(sink));
    record.id = member;
    record.ordinal = *ordinal;
    if constexpr (std::is_same_v<Sink, EngineSink>) identity->on_device = ordinal->has_value();
    Attach(hello, std::move(record), AttachedEvent(member, *std::move(identity)), turn);
  }
  return member;
}

template <typename HelloMessage>
void Node::Attach(const HelloMessage& hello, MemberRecord record, GroupEvent attached, Turn& turn) {
  std::optional<v1::GroupSpec> spec;
  if (hello.has_spec()) spec = hello.spec();
  const std::string coordinator = CoordinatorOf(hello.coordinator());
  bool created = false;
  const absl::StatusOr<GroupRecord*> found =
      GroupFor(hello, coordinator, record, spec, &created, turn);
  GroupRecord* const group = found.ok() ? *found : nullptr;
  if (!found.ok()) {
    record.End(found.status());
  } else if (group != nullptr && !group->join.joining) {
    Enter(std::move(record), group, std::move(attached), turn);
  } else if (group == nullptr && hello.wait_ms() == 0) {
    record.End(NoGroup(hello.group()));
  } else {
    const bool brings = group != nullptr && spec.has_value() && !group->join.dialled_spec;
    waiters_.Wait(Waiters::OfGroup{std::move(record), std::move(attached),
                                   Now() + Millis(hello.wait_ms()), hello.wait_ms() > 0,
                                   coordinator, std::move(spec)});
    // A spec that this member brings makes the group, for which others may wait at the coordinator.
    if (group != nullptr && !group->join.redial.has_value() &&
        (group->join.link == nullptr || brings)) {
      dialler_.Dial(group, waiters_, Now());
    }
    timer_.Wake();
  }
  if (created) AdmitWaiting(hello.group(), turn);
}

// The hello's group: found, made, or being joined. Null: it does not exist, and the hello does not
// make it.
template <typename HelloMessage>
absl::StatusOr<GroupRecord*> Node::GroupFor(const HelloMessage& hello,
                                            const std::string& coordinator,
                                            const MemberRecord& record,
                                            const std::optional<v1::GroupSpec>& spec, bool* created,
                                            Turn& turn) {
  if (!coordinator.empty()) {
    if (record.ordinal.has_value() && data_plane_.device_wire() == nullptr) {
      return Error(absl::StatusCode::kFailedPrecondition,
                   "device.name: '{}' with coordinator '{}': device memory moves within this "
                   "daemon only: {}",
                   record.device, hello.coordinator(), options_.cuda.no_wire);
    }
    return Follow(hello.group(), coordinator, spec, turn);
  }
  if (spec.has_value()) {
    std::optional<int> trainers;
    if (!record.engine) trainers = hello.world_size();
    return MakeGroup(hello.group(), *spec, trainers, created, turn);
  }
  GroupRecord* const group = groups_.Find(hello.group());
  if (group != nullptr && group->follower != nullptr) return Followed(*group);
  return group;
}

MemberId Node::AttachTrainer(const v1::TrainerHello& hello, const Peer& peer,
                             std::shared_ptr<TrainerSink> sink) {
  return Attach(hello, peer, std::move(sink), IdentityOf(hello, peer));
}

MemberId Node::AttachEngine(const v1::EngineHello& hello, const Peer& peer,
                            std::shared_ptr<EngineSink> sink) {
  return Attach(hello, peer, std::move(sink), IdentityOf(hello, peer));
}

void Node::AdmitWaiting(const std::string& group, Turn& turn) {
  for (Waiters::OfGroup& w : waiters_.TakeAll(group, "")) {
    Enter(std::move(w.record), groups_.Find(group), std::move(w.attached), turn);
  }
  AdmitWaitingPeers(group, turn);
}

void Node::Enter(MemberRecord record, GroupRecord* group, GroupEvent attached, Turn& turn) {
  REFITD_CHECK(group != nullptr && group->name() == record.group);
  if (absl::Status devices = device_slots_.CheckEntering(*group, record); !devices.ok()) {
    return record.End(std::move(devices));
  }
  if (record.staged && record.ordinal.has_value() && group->follower != nullptr) {
    // The coordinator tells how many slots and how large; the link may not be up yet.
    std::get<EngineAttached>(attached).awaits_slots = true;
    return Admit(std::move(record), std::move(attached), turn);
  }
  const bool wants_pool = record.staged || (record.engine && group->wants_pools());
  if (wants_pool && device_slots_.MissingOf(record).has_value()) {
    return AwaitPool(std::move(record), *group, std::move(attached));
  }
  Admit(std::move(record), std::move(attached), turn);
}

void Node::Admit(MemberRecord record, GroupEvent attached, Turn& turn) {
  const MemberId member = record.id;
  record.incarnation = groups_.Of(record)->machine->incarnation();
  MemberRecord& m = *leases_.Add(std::move(record));
  if (!m.peer.identity.empty()) {
    LogInfo("group {}: member {} attaches as {}", m.group, member.value(), m.peer.identity);
  }
  // P8: if a killed process has a forked child that keeps the socket, no end of stream comes.
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
  turn.Handle(m.group, std::move(attached));
}

void Node::MemberGone(MemberId member, const std::string& reason) {
  Gone(member, reason, Error(absl::StatusCode::kAborted, "the lease ended: {}", reason));
}

void Node::MemberDetached(MemberId member) { Gone(member, "it detached", absl::OkStatus()); }

void Node::Gone(MemberId member, const std::string& reason, const absl::Status& end) {
  Turn turn(this, &mutex_, &pushes_, Turn::Order::kAhead);
  if (std::optional<Waiters::OfGroup> waited = waiters_.TakeOfGroup(member)) {
    waited->record.End(end);
    StopJoiningIfUnwanted(waited->record.group, turn);
  }
  if (std::optional<Waiters::OfSlots> waited = waiters_.TakeOfSlots(member)) {
    EndWithoutPool(std::move(waited->record), end, turn);
  }
  if (MemberRecord* found = leases_.Find(member); found != nullptr) {
    Lose(found, reason, end, turn);
  }
}

void Node::Lose(MemberRecord* member, const std::string& reason, absl::Status end, Turn& turn) {
  if (!leases_.Lose(member)) return;
  member->End(std::move(end));
  if (member->watch != WatchHandle()) processes_->Cancel(member->watch);
  // The record may be erased while the event is handled.
  const std::string group = member->group;
  const MemberId id = member->id;
  turn.Handle(group, MemberLost{id, reason});
}

void Node::Erase(MemberId member, Turn& turn) {
  if (!leases_.Contains(member)) return;
  MemberRecord record = leases_.Remove(member);
  if (record.watch != WatchHandle()) processes_->Cancel(record.watch);
  data_plane_.Release(member);
  // Unmapping large regions takes long, so it is done after the mutex was released.
  auto regions = std::make_shared<std::map<RegionId, RegionRecord>>(memory_.TakeAll(&record));
  turn.Last([regions] { regions->clear(); });
  if (GroupRecord* group = groups_.Find(record.group);
      group != nullptr && record.ordinal.has_value()) {
    DropUnused(group, *record.ordinal, turn);
  }
}

absl::StatusOr<MemberRecord*> Node::Authenticate(const v1::Lease& lease, const Peer& peer,
                                                 bool engine) {
  REFITD_RETURN_IF_ERROR(ProtocolOf(lease.protocol(), "lease.protocol").status());
  REFITD_ASSIGN_OR_RETURN(MemberRecord * member, leases_.Authenticate(lease.token(), peer));
  if (member->engine != engine) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "lease: this call is for {}, the lease is of {}",
                 engine ? "an engine rank" : "a trainer rank",
                 member->engine ? "an engine rank" : "a trainer rank");
  }
  // An engine's memory does not belong to an incarnation: its lease outlives a replacement.
  const uint64_t incarnation =
      engine ? member->incarnation : groups_.Of(*member)->machine->incarnation();
  if (lease.incarnation() != incarnation) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "lease.incarnation: {:x} is not group '{}''s incarnation {:x}",
                 lease.incarnation(), member->group, incarnation);
  }
  return member;
}

void Node::MemberEvent(MemberId member, const GroupEvent& event) {
  Turn turn(this, &mutex_, &pushes_, Turn::Order::kAhead);
  const MemberRecord* const found = leases_.Find(member);
  if (found != nullptr && !found->lost) turn.Handle(found->group, event);
}

void Node::Ready(MemberId member, const v1::Ready& ready) {
  MemberEvent(member, ReadyEvent{member, UpdateId(ready.update_id())});
}

void Node::Ack(MemberId member, const v1::Ack& ack) {
  if (ack.part() < 0) return;  // names no part; ignored like any part that was not handed out
  MemberEvent(member, AckEvent{member, UpdateId(ack.update_id()), PartSeq(ack.part())});
}

void Node::Failed(MemberId member, const v1::Failed& failed) {
  MemberEvent(member, EngineFailed{member, UpdateId(failed.update_id()),
                                   std::string(Shorten(failed.reason(), kMaxReasonBytes))});
}

absl::Status Node::CheckTrainerLease(const v1::Lease& lease, const Peer& peer) {
  MutexLock lock(&mutex_);
  return Authenticate(lease, peer, false).status();
}

absl::Status Node::CheckEngineLease(const v1::Lease& lease, const Peer& peer) {
  MutexLock lock(&mutex_);
  return Authenticate(lease, peer, true).status();
}

// Checking a big layout takes long, so it is done outside the mutex, against a copy of the regions.
absl::StatusOr<std::shared_ptr<const Layout>> Node::CheckLayout(const v1::Lease& lease,
                                                                const Peer& peer, bool engine,
                                                                Layout layout) {
  // P8: the copy has no mappings, since a region that is released meanwhile must lose its mapping
  // at once.
  struct Region {
    int64_t bytes = 0;
    Access access = Access::kReadOnly;
  };
  std::map<RegionId, Region> regions;
  {
    MutexLock lock(&mutex_);
    REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, Authenticate(lease, peer, engine));
    for (const auto& [id, region] : member->regions) {
      regions.emplace_hint(regions.end(), id, Region{region.memory.bytes, region.access});
    }
  }
  const auto region_bytes = [&regions](RegionId id) -> std::optional<int64_t> {
    const auto it = regions.find(id);
    return it == regions.end() ? std::nullopt : std::optional<int64_t>(it->second.bytes);
  };
  REFITD_RETURN_IF_ERROR(ValidateLayout(layout, region_bytes, /*destination=*/engine));
  if (!engine) return std::make_shared<const Layout>(std::move(layout));
  if (!layout.pushed_tensors.empty()) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "layout.pushed_tensors has {} entries: an engine rank pushes none",
                 layout.pushed_tensors.size());
  }
  // A layout that a refit would refuse must not be filled by pushes either.
  REFITD_RETURN_IF_ERROR(CheckFloat8Scales(layout));
  for (const Piece& piece : layout.pieces) {
    if (regions.at(piece.region).access != Access::kReadWrite) {
      return Error(absl::StatusCode::kInvalidArgument, "region {} of tensor '{}' is not writable",
                   piece.region, layout.tensors[piece.tensor].name);
    }
  }
  return std::make_shared<const Layout>(std::move(layout));
}

absl::StatusOr<const MemberRecord*> Node::AdmitLayout(const v1::Lease& lease, const Peer& peer,
                                                      bool engine, const Layout& layout) {
  REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, Authenticate(lease, peer, engine));
  REFITD_RETURN_IF_ERROR(calls_.Admit());
  for (const Piece& piece : layout.pieces) {
    if (!member->regions.contains(piece.region)) {
      return Error(absl::StatusCode::kNotFound, "region {} was released meanwhile", piece.region);
    }
  }
  // The greatest generation of the registered layout and of those still under way.
  std::optional<uint64_t> greatest;
  if (member->layout != nullptr) greatest = member->layout->binding_generation;
  for (const std::shared_ptr<const Layout>& pending : calls_.LayoutsOf(member->id)) {
    greatest = std::max(greatest.value_or(0), pending->binding_generation);
  }
  if (greatest.has_value() && layout.binding_generation <= *greatest) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "binding_generation: {} is not greater than the registered {}",
                 layout.binding_generation, *greatest);
  }
  REFITD_RETURN_IF_ERROR(groups_.Of(*member)->machine->CanRegisterLayout(member->id));
  return member;
}

void Node::RegisterTrainerLayout(CallId call, const v1::Lease& lease, const Peer& peer,
                                 Layout layout, LayoutReply reply) {
  RegisterLayout(call, lease, peer, false, std::move(layout), std::move(reply));
}

void Node::RegisterEngineLayout(CallId call, const v1::Lease& lease, const Peer& peer,
                                Layout layout, LayoutReply reply) {
  RegisterLayout(call, lease, peer, true, std::move(layout), std::move(reply));
}

void Node::RegisterLayout(CallId call, const v1::Lease& lease, const Peer& peer, bool engine,
                          Layout layout, LayoutReply reply) {
  absl::StatusOr<std::shared_ptr<const Layout>> checked =
      CheckLayout(lease, peer, engine, std::move(layout));
  if (!checked.ok()) return reply(checked.status());
  v1::LayoutRegistered registered;
  registered.set_digest((*checked)->Digest());
  registered.set_pieces(static_cast<int64_t>((*checked)->pieces.size()));
  registered.set_bytes((*checked)->Bytes());
  Turn turn(this, &mutex_);
  const absl::StatusOr<const MemberRecord*> member = AdmitLayout(lease, peer, engine, **checked);
  if (member.ok()) {
    const std::string group = (*member)->group;
    const MemberId id = (*member)->id;
    calls_.Add(call, {group,
                      [reply, registered](const absl::Status& status, const ReplyPayload&) {
                        if (status.ok()) return reply(registered);
                        reply(status);
                      },
                      std::nullopt, Calls::PendingLayout{id, *checked}});
    turn.Handle(group, LayoutRegistered{id, *checked, call, registered.digest()});
  } else {
    turn.Answer([reply, status = member.status()] { reply(status); });
  }
}

void Node::SendWelcome(GroupRecord* group, MemberRecord* member) {
  // A follower knows the incarnation once it has joined.
  member->incarnation = group->machine->incarnation();
  v1::Welcome welcome;
  welcome.mutable_lease()->set_token(member->token);
  welcome.mutable_lease()->set_incarnation(member->incarnation);
  welcome.mutable_lease()->set_protocol(static_cast<v1::ProtocolVersion>(member->protocol));
  welcome.set_member_id(member->id.value());
  welcome.set_descriptor_socket(options_.descriptor_socket);
  welcome.mutable_limits()->set_inline_bytes(options_.inline_bytes);
  welcome.mutable_limits()->set_outstanding_buckets(options_.group.outstanding_buckets);
  welcome.mutable_limits()->set_default_duration_ms(ToMillis(options_.group.default_duration));
  welcome.mutable_limits()->set_max_duration_ms(ToMillis(options_.group.max_duration));
  welcome.mutable_limits()->set_message_bytes(options_.message_bytes);
  welcome.set_slot_bytes(group->machine->spec().slot_bytes);
  welcome.set_slots(group->machine->spec().slots);
  if (group->machine->version().has_value())
    welcome.set_group_version(group->machine->version()->value());
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

}  // namespace refitd
