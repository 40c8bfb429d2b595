// The wires' communicators, and the collectives on them.
#include <utility>

#include "daemon/node/data_plane.h"
#include "transport/base/status.h"
#include "transport/plan/layout.h"
#include "transport/sockets/address_security.h"

namespace refitd {

namespace {

// Whether the wire with this address at this daemon's end takes and makes connections under TLS
// only.
bool IsEncrypted(const std::string& address) {
  const absl::StatusOr<AddressSecurity> security = SecurityOfAddress(address);
  return security.ok() && security->encrypted;
}

}  // namespace

// ---- communicators ----

const DataPlane::Communicator* DataPlane::Find(const GroupRecord& group,
                                               CommunicatorId communicator) const {
  const auto of_group = communicators_.find(group.id);
  if (of_group == communicators_.end()) return nullptr;
  const auto it = of_group->second.find(communicator);
  return it == of_group->second.end() ? nullptr : &it->second;
}

DataPlane::Communicator* DataPlane::Find(uint64_t group_id, CommunicatorId communicator) {
  const auto of_group = communicators_.find(group_id);
  if (of_group == communicators_.end()) return nullptr;
  const auto it = of_group->second.find(communicator);
  return it == of_group->second.end() ? nullptr : &it->second;
}

void DataPlane::Erase(uint64_t group_id, CommunicatorId communicator) {
  const auto of_group = communicators_.find(group_id);
  if (of_group == communicators_.end()) return;
  of_group->second.erase(communicator);
  if (of_group->second.empty()) communicators_.erase(of_group);
}

Wire* DataPlane::WireOf(const Communicator& communicator) const {
  Wire* const wire = communicator.on_devices ? device_wire_.get() : wire_.get();
  REFITD_CHECK(wire != nullptr);
  return wire;
}

bool DataPlane::ReachesSlots(const Communicator& communicator, const GroupRecord& group) const {
  if (!communicator.on_devices) return !state_.pools->WireOf(group).has_value();
  return state_.pools->WireOf(group) == communicator.ordinal;
}

// A coordinator numbers communicators group by group. A wire has communicators of many groups, so
// its id must be the same on every daemon of the group and differ from all other groups' ids.
void DataPlane::Open(GroupRecord* group, const OpenCommunicator& a, StateLock& lock) {
  HashChain id(group->machine->incarnation());
  id.Add(a.communicator.value());
  const CommunicatorId local(id.hash());
  CommunicatorOpened opened;
  opened.communicator = a.communicator;
  const bool encrypted = group->machine->spec().encrypted_data;
  if (state_.members->HasDevices(group->name())) {
    if (encrypted) {
      opened.status = absl::FailedPreconditionError(
          "spec.encrypted_data: the group demands it, and NCCL does not encrypt");
      return lock.Post(group->name(), std::move(opened));
    }
    if (device_wire_ != nullptr) return OpenOnDevice(*group, a, local);
    opened.status = Error(absl::StatusCode::kUnavailable,
                          "this daemon has no data plane for GPU memory: {}", no_device_wire_);
  } else if (wire_ == nullptr) {
    opened.status = absl::UnavailableError("this daemon has no data plane");
  } else {
    absl::StatusOr<std::string> address = wire_->Open(local, a.rank, a.size);
    if (address.ok() && encrypted && !IsEncrypted(*address)) {
      wire_->Close(local);
      address = absl::FailedPreconditionError(
          "spec.encrypted_data: the group demands it, and this daemon's data plane is in the "
          "clear");
    }
    opened.status = address.status();
    if (address.ok()) {
      opened.address = *std::move(address);
      communicators_[group->id][a.communicator] = {local, false};
    }
  }
  lock.Post(group->name(), std::move(opened));
}

// NCCL calls take long, the first most of all, so none is made under the mutex.
void DataPlane::OpenOnDevice(const GroupRecord& group, const OpenCommunicator& a,
                             CommunicatorId local) {
  const std::string name = group.name();
  communicators_[group.id][a.communicator] = {local, true};
  if (const std::optional<int> wire = state_.pools->WireOf(group); wire.has_value()) {
    return OpenOnDevice(name, group.id, a, local, *wire);
  }
  state_.pools->Make(
      group, [this, name, a, local](GroupRecord* found, const absl::Status& made, StateLock& lock) {
        const std::optional<int> wire = state_.pools->WireOf(*found);
        REFITD_CHECK(!made.ok() || wire.has_value());
        if (made.ok()) return OpenOnDevice(name, found->id, a, local, *wire);
        Erase(found->id, a.communicator);
        lock.Post(name, CommunicatorOpened{a.communicator, made, ""});
      });
}

void DataPlane::OpenOnDevice(const std::string& name, uint64_t id, const OpenCommunicator& a,
                             CommunicatorId local, int ordinal) {
  if (Communicator* const communicator = Find(id, a.communicator); communicator != nullptr)
    communicator->ordinal = ordinal;
  // Each GPU of the group's members carries a share of the bytes.
  std::vector<int> devices = {ordinal};
  for (const int device : state_.members->DevicesOf(name)) {
    if (device != ordinal) devices.push_back(device);
  }
  if (devices.size() > max_rails_) devices.resize(max_rails_);
  opener_.Submit(id, [this, name, id, a, local, devices = std::move(devices)] {
    CommunicatorOpened opened;
    opened.communicator = a.communicator;
    absl::StatusOr<std::string> address = device_wire_->OpenOn(devices, local, a.rank, a.size);
    opened.status = address.status();
    if (address.ok()) opened.address = *std::move(address);
    {
      MutexLock lock(mutex_.raw());
      const bool wanted = Find(id, a.communicator) != nullptr;
      if (opened.status.ok() && !wanted) device_wire_->Close(local);
      if (!opened.status.ok() && wanted) Erase(id, a.communicator);
    }
    Report(name, id, std::move(opened));
  });
}

void DataPlane::Connect(const GroupRecord& group, ConnectCommunicator a, StateLock& lock) {
  const std::string name = group.name();
  const Communicator* const local = Find(group, a.communicator);
  if (local == nullptr) {
    lock.Post(name,
              CommunicatorUp{a.communicator, absl::NotFoundError("the communicator is not open")});
    return;
  }
  WireOf(*local)->Connect(
      local->id, std::move(a.addresses), a.timeout,
      [this, name, id = group.id, communicator = a.communicator](absl::Status status) {
        Report(name, id, CommunicatorUp{communicator, std::move(status)});
      });
}

void DataPlane::Close(const GroupRecord& group, const CloseCommunicator& a) {
  const Communicator* const local = Find(group, a.communicator);
  if (local == nullptr) return;
  WireOf(*local)->Close(local->id);
  Erase(group.id, a.communicator);
}

void DataPlane::CloseAll(uint64_t group_id) {
  const auto of_group = communicators_.find(group_id);
  if (of_group == communicators_.end()) return;
  for (const auto& [id, communicator] : of_group->second)
    WireOf(communicator)->Close(communicator.id);
  communicators_.erase(of_group);
}

// A joined daemon leaves with its last member, which ends its communicators. A coordinator stays,
// so it reports its end as lost, which closes the communicator everywhere; the next update that
// needs a communicator opens another, perhaps on another GPU. While an update runs, its nodes may
// be using the communicator.
void DataPlane::GiveUpCommunicators(const GroupRecord& group, StateLock& lock) {
  if (group.coordinator == nullptr || group.machine->update_running()) return;
  const auto of_group = communicators_.find(group.id);
  if (of_group == communicators_.end()) return;
  for (const auto& [id, communicator] : of_group->second) {
    // If a communicator's slots are still being made, its failure is reported when they are made.
    if (!communicator.on_devices || communicator.ordinal < 0 || ReachesSlots(communicator, group))
      continue;
    lock.Post(group.name(),
              CommunicatorUp{id, absl::CancelledError("its slots on a GPU are given back")});
  }
}

// ---- operations ----

absl::StatusOr<DataPlane::Communicator> DataPlane::ReadyCommunicator(GroupRecord* group,
                                                                     CommunicatorId communicator) {
  REFITD_RETURN_IF_ERROR(state_.pools->Ensure(*group));
  const Communicator* const local = Find(*group, communicator);
  if (local == nullptr) return absl::CancelledError("the communicator is closed");
  // Members left and others came, so slots lie elsewhere now, where only the next communicator
  // reaches them.
  if (!ReachesSlots(*local, *group))
    return absl::CancelledError("the communicator is of other memory");
  return *local;
}

std::function<void(absl::Status)> DataPlane::WireDoneOf(const GroupRecord& group,
                                                        CommunicatorId communicator, WireSeq seq,
                                                        MoveKind kind, int64_t bytes) {
  return [this, name = group.name(), id = group.id, communicator, seq, kind,
          bytes](absl::Status ended) {
    if (ended.ok() && bytes > 0) CountBytes(name, kind, bytes);
    Report(name, id, WireDone{communicator, seq, std::move(ended)});
  };
}

// Sends the root's slot to the other ranks: by a broadcast if all ranks of the communicator take
// part, else by an exchange.
void DataPlane::Start(GroupRecord* group, const StartWire& a, StateLock& lock) {
  absl::StatusOr<Communicator> local = ReadyCommunicator(group, a.communicator);
  const GroupSpec& spec = group->machine->spec();
  if (local.ok() && (int64_t{a.slot.slot.value()} >= spec.slots || a.bytes > spec.slot_bytes ||
                     a.bytes < 0 || a.ranks.empty())) {
    local = Error(absl::StatusCode::kInvalidArgument, "slot {}, {} bytes: not in the pool",
                  a.slot.slot, a.bytes);
  }
  if (!local.ok()) {
    lock.Post(group->name(), WireDone{a.communicator, a.seq, local.status()});
    return;
  }
  const absl::StatusOr<MemorySpan> slot = MemoryOf(*group).Slot(a.slot.slot);
  REFITD_CHECK(slot.ok());  // Ensure made it
  MemorySpan memory = *slot;
  memory.bytes = a.bytes;
  const bool root = a.ranks.front() == a.rank;
  const bool all = static_cast<int>(a.ranks.size()) == a.size;
  const MoveKind kind = all ? MoveKind::kBroadcast : MoveKind::kExchange;
  auto done = WireDoneOf(*group, a.communicator, a.seq, kind, root ? 0 : a.bytes);
  if (all) {
    WireBroadcast broadcast;
    broadcast.communicator = local->id;
    broadcast.seq = a.seq;
    broadcast.root = static_cast<int>(a.ranks.front());
    broadcast.memory = memory;
    broadcast.timeout = a.timeout;
    WireOf(*local)->Submit(std::move(broadcast), std::move(done));
    return;
  }
  WireExchange exchange;
  exchange.communicator = local->id;
  exchange.seq = a.seq;
  exchange.timeout = a.timeout;
  if (root) {
    for (size_t i = 1; i < a.ranks.size(); ++i) {
      exchange.sends.push_back({static_cast<int>(a.ranks[i]), memory});
    }
  } else {
    exchange.receives.push_back({static_cast<int>(a.ranks.front()), memory});
  }
  WireOf(*local)->Submit(std::move(exchange), std::move(done));
}

// The legs of a round, within the group's slots (P10). `received`: how many bytes come in.
absl::StatusOr<WireExchange> DataPlane::ExchangeOf(const GroupRecord& group, const StartExchange& a,
                                                   int64_t* received) const {
  const GroupSpec& spec = group.machine->spec();
  if (int64_t{a.out.value()} >= spec.slots || int64_t{a.in.value()} >= spec.slots ||
      a.out == a.in) {
    return Error(absl::StatusCode::kInvalidArgument, "slots {} and {}: not two of the pool", a.out,
                 a.in);
  }
  const GroupMemory slots = MemoryOf(group);
  const auto add = [&](uint32_t rank, SlotIndex slot, int64_t offset, int64_t bytes,
                       std::vector<WireExchange::Leg>* legs) -> absl::Status {
    if (bytes == 0) return absl::OkStatus();
    if (bytes < 0 || bytes > spec.slot_bytes || offset < 0 || offset > spec.slot_bytes - bytes ||
        rank >= static_cast<uint32_t>(kMaxWireRanks)) {
      return Error(absl::StatusCode::kInvalidArgument,
                   "rank {}: {} bytes at byte {} of slot {}: not in the pool", rank, bytes, offset,
                   slot);
    }
    const absl::StatusOr<MemorySpan> whole = slots.Slot(slot);
    REFITD_CHECK(whole.ok());  // Ensure made it
    MemorySpan memory = *whole;
    memory.data += offset;
    memory.bytes = bytes;
    legs->push_back({static_cast<int>(rank), std::move(memory)});
    return absl::OkStatus();
  };
  WireExchange exchange;
  for (const StartExchange::Leg& leg : a.legs) {
    REFITD_RETURN_IF_ERROR(add(leg.rank, a.out, leg.out_offset, leg.bytes_out, &exchange.sends));
    REFITD_RETURN_IF_ERROR(add(leg.rank, a.in, leg.in_offset, leg.bytes_in, &exchange.receives));
    *received += leg.bytes_in;
  }
  exchange.seq = a.seq;
  exchange.timeout = a.timeout;
  return exchange;
}

void DataPlane::Start(GroupRecord* group, const StartExchange& a, StateLock& lock) {
  const absl::StatusOr<Communicator> local = ReadyCommunicator(group, a.communicator);
  if (!local.ok()) {
    lock.Post(group->name(), WireDone{a.communicator, a.seq, local.status()});
    return;
  }
  int64_t received = 0;
  absl::StatusOr<WireExchange> exchange = ExchangeOf(*group, a, &received);
  if (!exchange.ok()) {
    lock.Post(group->name(), WireDone{a.communicator, a.seq, exchange.status()});
    return;
  }
  exchange->communicator = local->id;
  Wire* const wire = WireOf(*local);
  auto done = [this, name = group->name(), id = group->id, communicator = a.communicator,
               seq = a.seq, received, wire, used = local->id](absl::Status ended) {
    if (ended.ok() && received > 0) CountBytes(name, MoveKind::kExchange, received);
    // The wire lives until this call has returned.
    Report(name, id, WireDone{communicator, seq, std::move(ended), wire->Uses(used)});
  };
  wire->Submit(*std::move(exchange), std::move(done));
}

// ---- status and the end ----

std::optional<WireStats> DataPlane::StatsOf(const GroupRecord& group,
                                            CommunicatorId communicator) const {
  const Communicator* const local = Find(group, communicator);
  if (local == nullptr) return std::nullopt;
  return WireOf(*local)->Stats(local->id);
}

std::vector<DataPlane::DeviceCommunicator> DataPlane::DeviceCommunicators() const {
  std::vector<DeviceCommunicator> open;
  for (const auto& [name, group] : state_.groups->all()) {
    const auto of_group = communicators_.find(group->id);
    if (of_group == communicators_.end()) continue;
    for (const auto& [id, communicator] : of_group->second) {
      if (communicator.on_devices) open.push_back({name, id, communicator.id});
    }
  }
  return open;
}

WireStats DataPlane::TotalStats() const {
  WireStats total;
  for (const Wire* wire :
       {static_cast<const Wire*>(wire_.get()), static_cast<const Wire*>(device_wire_.get())}) {
    if (wire == nullptr) continue;
    const WireStats stats = wire->Stats();
    total.bytes_sent += stats.bytes_sent;
    total.bytes_received += stats.bytes_received;
  }
  return total;
}

void DataPlane::StopWires() {
  std::unique_ptr<Wire> wire;
  std::shared_ptr<DeviceWire> device_wire;
  MutexLock lock(mutex_.raw());
  communicators_.clear();
  wire = std::move(wire_);
  device_wire = std::move(device_wire_);
}

void DataPlane::CheckInvariants() const {
  std::map<uint64_t, const GroupRecord*> records;
  for (const auto& [name, group] : state_.groups->all()) records[group->id] = group.get();
  for (const auto& [id, of_group] : communicators_) {
    REFITD_CHECK(records.contains(id) && !of_group.empty());
    for (const auto& [communicator, local] : of_group) {
      REFITD_CHECK(WireOf(local) != nullptr);
      REFITD_CHECK(local.on_devices || local.ordinal < 0);
    }
  }
}

}  // namespace refitd
