#include "daemon/node/data_plane.h"

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "transport/base/eventually_testing.h"
#include "transport/host/host_transport.h"
#include "transport/plan/node_program.h"
#include "transport/plan/refit_plan.h"
#include "transport/sockets/frames.h"
#include "transport/unprepared_transport_testing.h"

namespace refitd {
namespace {

using Catch::Contains;
using std::chrono::seconds;

constexpr int64_t kSlotBytes = 4096;
constexpr CommunicatorId kCommunicator(1);

// A wire in name only: the test says how operations end.
class FakeWire : public Wire {
 public:
  absl::StatusOr<std::string> Open(CommunicatorId communicator, int /*rank*/,
                                   int /*size*/) override {
    if (!can_open.ok()) return can_open;
    opened.push_back(communicator);
    return address;
  }
  void Connect(CommunicatorId /*communicator*/, std::vector<std::string> addresses,
               Duration /*timeout*/, std::function<void(absl::Status)> done) override {
    connected = std::move(addresses);
    ends.push_back(std::move(done));
  }
  void Submit(WireBroadcast broadcast, std::function<void(absl::Status)> done) override {
    broadcasts.push_back(std::move(broadcast));
    ends.push_back(std::move(done));
  }
  void Submit(WireExchange exchange, std::function<void(absl::Status)> done) override {
    exchanges.push_back(std::move(exchange));
    ends.push_back(std::move(done));
  }
  void Close(CommunicatorId communicator) override { closed.push_back(communicator); }
  WireStats Stats() const override { return {7, 9}; }
  WireStats Stats(CommunicatorId /*communicator*/) const override { return {3, 4}; }

  absl::Status can_open;
  std::string address = "here";
  std::vector<CommunicatorId> opened;
  std::vector<CommunicatorId> closed;
  std::vector<std::string> connected;
  std::vector<WireBroadcast> broadcasts;
  std::vector<WireExchange> exchanges;
  std::vector<std::function<void(absl::Status)>> ends;
};

// A wire over devices in name only: the test says whether and when communicators open. Thread-safe.
class FakeDeviceWire : public DeviceWire {
 public:
  FakeDeviceWire() : DeviceWire("fake wire") {}
  ~FakeDeviceWire() override { CloseAll(); }

  absl::StatusOr<std::string> OpenOn(const std::vector<int>& devices, CommunicatorId communicator,
                                     int /*rank*/, int /*size*/) override {
    MutexLock lock(&mutex_);
    devices_.push_back(devices);
    while (held_) changed_.Wait(&mutex_);
    if (!can_open_.ok()) return can_open_;
    opened_.push_back(communicator);
    return "on a device";
  }
  void Close(CommunicatorId communicator) override {
    MutexLock lock(&mutex_);
    closed_.push_back(communicator);
  }
  std::vector<DeviceCommunicatorStatus> Describe() const override { return {}; }
  int64_t Abandoned() const override { return 0; }

  // While it holds, OpenOn does not return.
  void Hold(bool held) {
    MutexLock lock(&mutex_);
    held_ = held;
    changed_.NotifyAll();
  }
  void Refuse(absl::Status status) {
    MutexLock lock(&mutex_);
    can_open_ = std::move(status);
  }
  std::vector<std::vector<int>> devices() {
    MutexLock lock(&mutex_);
    return devices_;
  }
  std::vector<CommunicatorId> opened() {
    MutexLock lock(&mutex_);
    return opened_;
  }
  std::vector<CommunicatorId> closed() {
    MutexLock lock(&mutex_);
    return closed_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool held_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status can_open_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::vector<int>> devices_ ABSL_GUARDED_BY(mutex_);
  std::vector<CommunicatorId> opened_ ABSL_GUARDED_BY(mutex_);
  std::vector<CommunicatorId> closed_ ABSL_GUARDED_BY(mutex_);
};

class Moved : public DaemonObserver {
 public:
  void UpdateEnded(const UpdateReport& /*report*/) override {}
  void CatchUpEnded(const std::string&, CatchUpEnd, int64_t, Duration) override {}
  void InstanceReleased(const std::string&, const std::string&, Duration, FlipEnd) override {}
  void BytesMoved(const std::string& /*group*/, MoveKind kind, int64_t bytes) override {
    (kind == MoveKind::kCopy        ? copied
     : kind == MoveKind::kBroadcast ? broadcast
                                    : exchanged) += bytes;
  }
  void IntegrityFailure(const std::string& /*group*/) override {}
  void InstanceEvicted(const std::string& /*group*/, std::string_view /*reason*/) override {}
  void Restored(const std::string& /*group*/, bool /*unchanged*/) override {}
  void GroupGone(const std::string& /*group*/) override {}
  std::atomic<int64_t> copied{0};
  std::atomic<int64_t> broadcast{0};
  std::atomic<int64_t> exchanged{0};
};

// Copies like the host transport, but prepares no more transfers than the test has permitted.
class PermittedTransport : public UnpreparedTransport {
 public:
  void Submit(Transfer transfer, std::function<void(TransferResult)> done) override {
    host_->Submit(std::move(transfer), std::move(done));
  }
  void Submit(ReadbackJob job, std::function<void(ReadbackResult)> done) override {
    host_->Submit(std::move(job), std::move(done));
  }
  absl::StatusOr<std::shared_ptr<const PreparedTransfer>> Prepare(Transfer transfer) override {
    {
      MutexLock lock(&mutex_);
      while (permits_ == 0) changed_.Wait(&mutex_);
      --permits_;
    }
    return UnpreparedTransport::Prepare(std::move(transfer));
  }
  void Permit(int more) {
    MutexLock lock(&mutex_);
    permits_ += more;
    changed_.NotifyAll();
  }

 private:
  const std::unique_ptr<Transport> host_ = MakeHostTransport({.threads = 1});
  Mutex mutex_;
  CondVar changed_;
  int permits_ ABSL_GUARDED_BY(mutex_) = 0;
};

// A group "g" of this daemon with four slots in host memory, and the events that its machine would
// get.
class World : public StagingPools {
 public:
  explicit World(bool with_wire = true,
                 std::unique_ptr<Transport> transport = MakeHostTransport({.threads = 1}),
                 std::shared_ptr<DeviceWire> device_wire = nullptr, size_t max_rails = kMaxRails)
      : StagingPools({}, &mutex_, {&groups, &members, &pending, &sessions}) {
    auto wire = with_wire ? std::make_unique<FakeWire>() : nullptr;
    wire_ = wire.get();
    plane_.emplace(DataPlane::Options{.transport = std::move(transport),
                                      .wire = std::move(wire),
                                      .device_wire = std::move(device_wire),
                                      .no_device_wire = "none was asked for",
                                      .max_rails = max_rails,
                                      .observer = &moved},
                   &mutex_, DataPlane::State{&groups, &members, &calls, this});
    group = AddGroup("g");
  }
  ~World() override {
    plane_->StopThreads();
    plane_->StopWires();
  }

  bool Lacks(const GroupRecord& /*group*/) const override { return lacks; }
  void Make(const GroupRecord& /*group*/, Then then) override { made.push_back(std::move(then)); }
  absl::Status Ensure(const GroupRecord& of) override {
    if (lacks) return absl::UnavailableError("the slots are not made");
    return EnsureHost(of);
  }

  GroupRecord* AddGroup(const std::string& name, bool encrypted_data = false,
                        uint64_t incarnation = 7) {
    CoordinatorOptions options;
    options.name = name;
    options.incarnation = incarnation;
    options.spec.slots = 4;
    options.spec.slot_bytes = kSlotBytes;
    options.spec.encrypted_data = encrypted_data;
    options.next_update = [] { return UpdateId(1); };
    return groups.Coordinate(std::move(options), TimePoint());
  }
  // How many events that group's machine has got.
  size_t EventsOf(const std::string& name) {
    MutexLock lock(mutex_.raw());
    return static_cast<size_t>(std::count(names_.begin(), names_.end(), name));
  }

  // Runs the call under the state lock; the events that it posts are handled when the lock ends.
  void InTurn(const std::function<void(DataPlane&, StateLock&)>& call) {
    StateLock lock(&mutex_);
    call(*plane_, lock);
    plane_->CheckInvariants();
  }
  // The last event of that kind, which is taken; nullopt: there is none.
  template <typename Event>
  std::optional<Event> Take() {
    MutexLock lock(mutex_.raw());
    for (auto it = events_.rbegin(); it != events_.rend(); ++it) {
      const Event* found = nullptr;
      const auto look = [&found](const auto& e) {
        if constexpr (std::is_same_v<std::decay_t<decltype(e)>, Event>) found = &e;
      };
      std::visit([&look](const auto& kind) { std::visit(look, kind); }, *it);
      if (found == nullptr) continue;
      Event event = *found;
      events_.erase(std::next(it).base());
      return event;
    }
    return std::nullopt;
  }
  template <typename Event>
  Event Await() {
    std::optional<Event> event;
    REQUIRE(Eventually([&] {
      event = Take<Event>();
      return event.has_value();
    }));
    return *std::move(event);
  }
  // Call it under the state lock.
  size_t EventsInTurn() const { return events_.size(); }
  size_t events() {
    MutexLock lock(mutex_.raw());
    return events_.size();
  }
  void OpenCommunicator() {
    InTurn([this](DataPlane& plane, StateLock& lock) {
      plane.Open(group, {kCommunicator, 0, 2}, lock);
    });
    REQUIRE(Take<CommunicatorOpened>()->status.ok());
  }
  FakeWire& wire() { return *wire_; }
  DataPlane& plane() { return *plane_; }
  using StagingPools::ClearWire;
  using StagingPools::Put;
  using StagingPools::SetWire;

  Moved moved;
  PeerSessions sessions;
  PendingAttaches pending;
  Groups groups{{}, &sessions, &pending};
  Members members;
  Calls calls;
  GroupRecord* group = nullptr;
  bool lacks = false;
  std::vector<Then> made;  // what waits for slots

 private:
  StateMutex mutex_{{[this](StateLock&, const std::string& name, MachineEvent& event) {
                       events_.push_back(event);
                       names_.push_back(name);
                     },
                     [] {}}};
  std::vector<MachineEvent> events_;  // guarded by mutex_
  std::vector<std::string> names_;    // guarded by mutex_: the groups of all events so far
  FakeWire* wire_ = nullptr;
  std::optional<DataPlane> plane_;  // destroyed first
};

StartWire WireOp(int64_t bytes, uint32_t rank = 1, std::vector<uint32_t> ranks = {0, 1}) {
  StartWire start;
  start.communicator = kCommunicator;
  start.seq = WireSeq(5);
  start.slot.slot = SlotIndex(2);
  start.bytes = bytes;
  start.ranks = std::move(ranks);
  start.rank = rank;
  start.size = 2;
  start.timeout = seconds(3);
  return start;
}

// ---- communicators ----

TEST_CASE("a communicator is opened, connected and closed on the wire, and known in between (P8)") {
  World world;
  world.InTurn([&](DataPlane& plane, StateLock& lock) {
    plane.Open(world.group, {kCommunicator, 0, 2}, lock);
  });
  const std::optional<CommunicatorOpened> opened = world.Take<CommunicatorOpened>();
  REQUIRE(opened.has_value());
  CHECK(opened->communicator == kCommunicator);
  CHECK(opened->address == "here");
  REQUIRE(world.wire().opened.size() == 1);
  const CommunicatorId local = world.wire().opened[0];
  CHECK(local != kCommunicator);
  REQUIRE(world.plane().StatsOf(*world.group, kCommunicator).has_value());
  CHECK(world.plane().StatsOf(*world.group, kCommunicator)->bytes_sent == 3);
  CHECK(world.plane().TotalStats().bytes_received == 9);

  world.InTurn([&](DataPlane& plane, StateLock& lock) {
    plane.Connect(*world.group, {kCommunicator, {"here", "there"}, seconds(1)}, lock);
  });
  CHECK(world.wire().connected == std::vector<std::string>{"here", "there"});
  world.wire().ends.at(0)(absl::OkStatus());
  CHECK(world.Take<CommunicatorUp>()->status.ok());

  world.InTurn([&](DataPlane& plane, StateLock&) { plane.Close(*world.group, {kCommunicator}); });
  CHECK(world.wire().closed == std::vector<CommunicatorId>{local});
  CHECK_FALSE(world.plane().StatsOf(*world.group, kCommunicator).has_value());
  world.InTurn([&](DataPlane& plane, StateLock&) { plane.Close(*world.group, {kCommunicator}); });
  CHECK(world.wire().closed.size() == 1);
}

TEST_CASE("a communicator that can't be opened is answered and not kept") {
  World world;
  world.wire().can_open = absl::ResourceExhaustedError("too many communicators");
  world.InTurn([&](DataPlane& plane, StateLock& lock) {
    plane.Open(world.group, {kCommunicator, 0, 2}, lock);
  });
  CHECK(world.Take<CommunicatorOpened>()->status.code() == absl::StatusCode::kResourceExhausted);
  CHECK_FALSE(world.plane().StatsOf(*world.group, kCommunicator).has_value());
  world.InTurn([&](DataPlane& plane, StateLock& lock) {
    plane.Connect(*world.group, {kCommunicator, {}, seconds(1)}, lock);
  });
  CHECK(world.Take<CommunicatorUp>()->status.code() == absl::StatusCode::kNotFound);
}

TEST_CASE(
    "communicators of two groups, or of two incarnations, are different communicators of the "
    "wire") {
  World world;
  GroupRecord* const other = world.AddGroup("h", /*encrypted_data=*/false, /*incarnation=*/8);
  world.InTurn([&](DataPlane& plane, StateLock& lock) {
    plane.Open(world.group, {kCommunicator, 0, 2}, lock);
    plane.Open(world.group, {CommunicatorId(2), 0, 2}, lock);
    plane.Open(other, {kCommunicator, 0, 2}, lock);
  });
  REQUIRE(world.wire().opened.size() == 3);
  CHECK(world.wire().opened[0] != world.wire().opened[1]);
  CHECK(world.wire().opened[0] != world.wire().opened[2]);
}

TEST_CASE("a group that demands encryption opens no communicator that is in the clear") {
  World world;
  GroupRecord* const group = world.AddGroup("demanding", /*encrypted_data=*/true);
  const auto open = [&] {
    world.InTurn([&](DataPlane& plane, StateLock& lock) {
      plane.Open(group, {kCommunicator, 0, 2}, lock);
    });
    return *world.Take<CommunicatorOpened>();
  };
  const CommunicatorOpened clear = open();
  CHECK(clear.status.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(std::string(clear.status.message()), Contains("data plane is in the clear"));
  CHECK(clear.address.empty());
  CHECK(world.wire().closed == world.wire().opened);
  CHECK_FALSE(world.plane().StatsOf(*group, kCommunicator).has_value());

  SocketAddress address;
  address.host.family = AF_INET;
  address.host.ip = {10, 0, 0, 1};
  address.port = 1;
  address.tls = true;
  address.identity = "spiffe://prod/refitd/a";
  world.wire().address = EncodeSocketAddress(address);
  CHECK(open().status.ok());

  MemberRecord member;
  member.id = MemberId(1);
  member.group = "demanding";
  member.ordinal = 0;
  world.members.Add(std::move(member));
  const CommunicatorOpened devices = open();
  CHECK(devices.status.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(std::string(devices.status.message()), Contains("NCCL does not encrypt"));
}

TEST_CASE("a daemon without a wire says so") {
  World world(/*with_wire=*/false);
  world.InTurn([&](DataPlane& plane, StateLock& lock) {
    plane.Open(world.group, {kCommunicator, 0, 2}, lock);
  });
  CHECK(world.Take<CommunicatorOpened>()->status.message() == "this daemon has no data plane");

  MemberRecord member;
  member.id = MemberId(1);
  member.group = "g";
  member.ordinal = 0;
  world.members.Add(std::move(member));
  world.InTurn([&](DataPlane& plane, StateLock& lock) {
    plane.Open(world.group, {kCommunicator, 0, 2}, lock);
  });
  CHECK(world.Take<CommunicatorOpened>()->status.message() ==
        "this daemon has no data plane for GPU memory: none was asked for");
}

TEST_CASE(
    "a group that goes takes its communicators along, and hears nothing of them any more (P8)") {
  World world;
  world.OpenCommunicator();
  world.InTurn([&](DataPlane& plane, StateLock& lock) {
    plane.Connect(*world.group, {kCommunicator, {}, seconds(1)}, lock);
  });
  const uint64_t id = world.group->id;
  const std::unique_ptr<GroupRecord> gone = world.groups.Remove("g");
  world.InTurn([&](DataPlane& plane, StateLock&) { plane.CloseAll(id); });
  CHECK(world.wire().closed == world.wire().opened);
  world.wire().ends.at(0)(absl::CancelledError("closed"));
  CHECK(world.events() == 0);
}

// ---- communicators on devices ----

// A group whose one member is on GPU 2, and whose slots are not made yet.
struct DeviceWorld {
  explicit DeviceWorld(size_t max_rails = kMaxRails)
      : world{/*with_wire=*/true, MakeHostTransport({.threads = 1}), wire, max_rails} {
    Add(1, "g", 2);
  }
  void Add(uint64_t id, const std::string& group, int ordinal) {
    MemberRecord member;
    member.id = MemberId(id);
    member.group = group;
    member.ordinal = ordinal;
    world.members.Add(std::move(member));
  }
  void Open() {
    world.InTurn([&](DataPlane& plane, StateLock& lock) {
      plane.Open(world.group, {kCommunicator, 0, 2}, lock);
    });
  }
  // The slots that Open asked for are made, or can't be made.
  void MakeSlots(const absl::Status& made = absl::OkStatus()) {
    REQUIRE(world.made.size() == 1);
    if (made.ok()) {
      world.Put(*world.group, 2, {{slots.data(), static_cast<int64_t>(slots.size()), nullptr}});
      world.SetWire(*world.group, 2);
    }
    world.InTurn([&](DataPlane&, StateLock& lock) { world.made[0](world.group, made, lock); });
    world.made.clear();
  }
  bool Knows() { return world.plane().StatsOf(*world.group, kCommunicator).has_value(); }
  void GiveUp() {
    world.InTurn(
        [&](DataPlane& plane, StateLock& lock) { plane.GiveUpCommunicators(*world.group, lock); });
  }

  std::vector<char> slots = std::vector<char>(4 * kSlotBytes);
  const std::shared_ptr<FakeDeviceWire> wire = std::make_shared<FakeDeviceWire>();
  World world;
};

TEST_CASE(
    "a communicator of a group on GPUs is opened on the GPU of the slots, when they are made") {
  DeviceWorld d;
  d.Open();
  CHECK(d.Knows());
  CHECK(d.wire->devices().empty());
  d.MakeSlots();
  const auto opened = d.world.Await<CommunicatorOpened>();
  CHECK(opened.status.ok());
  CHECK(opened.address == "on a device");
  CHECK(d.wire->devices() == std::vector<std::vector<int>>{{2}});
  CHECK(d.wire->closed().empty());
  CHECK(d.world.wire().opened.empty());
}

TEST_CASE("each GPU of the group's members is a rail, up to the limit, and no other GPU") {
  const size_t max = GENERATE(kMaxRails, size_t{3}, size_t{1});
  DeviceWorld d(max);
  d.Add(2, "g", 5);
  d.Add(3, "g", 0);
  d.Add(4, "g", 5);
  d.Add(5, "other", 7);
  d.Open();
  d.MakeSlots();
  CHECK(d.world.Await<CommunicatorOpened>().status.ok());
  std::vector<int> rails = {2, 0, 5};
  rails.resize(std::min(max, rails.size()));
  CHECK(d.wire->devices() == std::vector<std::vector<int>>{rails});
}

TEST_CASE(
    "a communicator whose slots, or whose communicator, can't be made is answered and not kept") {
  DeviceWorld d;
  d.Open();
  d.MakeSlots(absl::ResourceExhaustedError("no memory"));
  CHECK(d.world.Take<CommunicatorOpened>()->status.message() == "no memory");
  CHECK_FALSE(d.Knows());

  d.Open();
  d.wire->Refuse(absl::UnavailableError("no NCCL"));
  d.MakeSlots();
  CHECK(d.world.Await<CommunicatorOpened>().status.message() == "no NCCL");
  CHECK_FALSE(d.Knows());
}

TEST_CASE("a communicator that is closed while it is being opened is closed when it is open (P8)") {
  DeviceWorld d;
  d.wire->Hold(true);
  d.Open();
  d.MakeSlots();
  REQUIRE(Eventually([&] { return d.wire->devices().size() == 1; }));
  d.world.InTurn(
      [&](DataPlane& plane, StateLock&) { plane.Close(*d.world.group, {kCommunicator}); });
  CHECK(d.wire->closed().size() == 1);
  d.wire->Hold(false);
  CHECK(d.world.Await<CommunicatorOpened>().status.ok());
  REQUIRE(d.wire->opened().size() == 1);
  CHECK(d.wire->closed() == std::vector<CommunicatorId>(2, d.wire->opened()[0]));
}

TEST_CASE("a coordinator gives up communicators whose slots went, but not while an update runs") {
  DeviceWorld d;
  d.Open();
  d.GiveUp();  // the slots are still being made
  CHECK_FALSE(d.world.Take<CommunicatorUp>().has_value());
  d.MakeSlots();
  CHECK(d.world.Await<CommunicatorOpened>().status.ok());
  d.GiveUp();
  CHECK_FALSE(d.world.Take<CommunicatorUp>().has_value());

  d.world.ClearWire(*d.world.group);
  d.world.InTurn(
      [&](DataPlane& plane, StateLock& lock) { plane.Start(d.world.group, WireOp(1), lock); });
  CHECK(d.world.Take<WireDone>()->status.message() == "the communicator is of other memory");

  MachineActions ignored;
  MachineEvent attached = TrainerAttached{MemberId(1), {}};
  d.world.group->machine->Handle(attached, TimePoint(), &ignored);
  BeginEvent begin;
  begin.call = CallId(1000);
  begin.member = MemberId(1);
  begin.version = Version(1);
  begin.duration = seconds(5);
  begin.tensor_count = 1;
  MachineEvent begun = begin;
  d.world.group->machine->Handle(begun, TimePoint(), &ignored);
  REQUIRE(d.world.group->machine->update_running());
  d.GiveUp();
  CHECK_FALSE(d.world.Take<CommunicatorUp>().has_value());
  MachineEvent lost = MemberLost{MemberId(1), "killed"};
  d.world.group->machine->Handle(lost, TimePoint(), &ignored);
  REQUIRE_FALSE(d.world.group->machine->update_running());
  d.GiveUp();
  const std::optional<CommunicatorUp> given_up = d.world.Take<CommunicatorUp>();
  REQUIRE(given_up.has_value());
  CHECK(given_up->communicator == kCommunicator);
  CHECK(given_up->status.code() == absl::StatusCode::kCancelled);
}

// ---- collectives ----

TEST_CASE("a broadcast moves its slot, and WireDone counts the bytes that came in") {
  World world;
  world.OpenCommunicator();
  world.InTurn(
      [&](DataPlane& plane, StateLock& lock) { plane.Start(world.group, WireOp(100), lock); });
  REQUIRE(world.wire().broadcasts.size() == 1);
  const WireBroadcast& sent = world.wire().broadcasts[0];
  CHECK(sent.communicator == world.wire().opened[0]);
  CHECK(sent.seq == WireSeq(5));
  CHECK(sent.root == 0);
  CHECK(sent.memory.bytes == 100);
  CHECK(sent.memory.data == world.WireSlot(*world.group, SlotIndex(2))->data);
  CHECK(world.events() == 0);
  world.wire().ends.at(0)(absl::OkStatus());
  const std::optional<WireDone> done = world.Take<WireDone>();
  REQUIRE(done.has_value());
  CHECK(done->communicator == kCommunicator);
  CHECK(done->seq == WireSeq(5));
  CHECK(world.moved.broadcast == 100);
  // The root receives nothing.
  world.InTurn([&](DataPlane& plane, StateLock& lock) {
    plane.Start(world.group, WireOp(100, /*rank=*/0), lock);
  });
  world.wire().ends.at(1)(absl::OkStatus());
  CHECK(world.moved.broadcast == 100);
  CHECK(world.moved.exchanged == 0);
}

TEST_CASE("to some ranks only, the root sends to each and the others receive") {
  World world;
  world.OpenCommunicator();
  world.InTurn([&](DataPlane& plane, StateLock& lock) {
    StartWire start = WireOp(64, 0, {0, 2});
    start.size = 3;
    plane.Start(world.group, start, lock);
    start.rank = 2;
    plane.Start(world.group, start, lock);
  });
  REQUIRE(world.wire().exchanges.size() == 2);
  REQUIRE(world.wire().exchanges[0].sends.size() == 1);
  CHECK(world.wire().exchanges[0].sends[0].peer == 2);
  CHECK(world.wire().exchanges[0].receives.empty());
  REQUIRE(world.wire().exchanges[1].receives.size() == 1);
  CHECK(world.wire().exchanges[1].receives[0].peer == 0);
  CHECK(world.wire().exchanges[1].timeout == seconds(3));
}

TEST_CASE(
    "a collective outside of the pool, or without its communicator, is answered at once (P10)") {
  World world;
  const auto refused = [&](const StartWire& start) {
    world.InTurn([&](DataPlane& plane, StateLock& lock) { plane.Start(world.group, start, lock); });
    const std::optional<WireDone> done = world.Take<WireDone>();
    REQUIRE(done.has_value());
    return done->status;
  };
  CHECK(refused(WireOp(1)).message() == "the communicator is closed");
  world.OpenCommunicator();
  CHECK(refused(WireOp(kSlotBytes + 1)).code() == absl::StatusCode::kInvalidArgument);
  CHECK(refused(WireOp(-1)).code() == absl::StatusCode::kInvalidArgument);
  StartWire beyond = WireOp(1);
  beyond.slot.slot = SlotIndex(4);
  CHECK_THAT(std::string(refused(beyond).message()), Contains("slot 4, 1 bytes: not in the pool"));
  world.lacks = true;
  CHECK(refused(WireOp(1)).message() == "the slots are not made");
  CHECK(world.wire().broadcasts.empty());
}

TEST_CASE("a round is exchanged from one slot into another, within both (P10)") {
  World world;
  world.OpenCommunicator();
  StartExchange round;
  round.communicator = kCommunicator;
  round.seq = WireSeq(6);
  round.timeout = seconds(2);
  round.out = SlotIndex(0);
  round.in = SlotIndex(1);
  round.legs.push_back({.rank = 1, .bytes_out = 10, .out_offset = 64, .bytes_in = 20});
  round.legs.push_back({.rank = 2, .bytes_in = 30, .in_offset = kSlotBytes - 30});
  const auto run = [&] {
    world.InTurn([&](DataPlane& plane, StateLock& lock) { plane.Start(world.group, round, lock); });
  };
  run();
  REQUIRE(world.wire().exchanges.size() == 1);
  const WireExchange& exchange = world.wire().exchanges[0];
  REQUIRE(exchange.sends.size() == 1);
  REQUIRE(exchange.receives.size() == 2);
  const char* const out = world.WireSlot(*world.group, SlotIndex(0))->data;
  CHECK(exchange.sends[0].memory.data == out + 64);
  CHECK(exchange.receives[1].memory.bytes == 30);
  CHECK(exchange.timeout == seconds(2));
  world.wire().ends.at(0)(absl::OkStatus());
  CHECK(world.Take<WireDone>()->status.ok());
  CHECK(world.moved.exchanged == 50);

  round.legs[1].in_offset += 1;
  run();
  CHECK_THAT(std::string(world.Take<WireDone>()->status.message()),
             Contains("rank 2: 30 bytes at byte 4067 of slot 1: not in the pool"));
  round.legs[1].in_offset -= 1;
  round.legs[1].rank = kMaxWireRanks;
  run();
  CHECK_THAT(std::string(world.Take<WireDone>()->status.message()),
             Contains("rank 256: 30 bytes at byte 4066 of slot 1: not in the pool"));
  round.in = round.out;
  run();
  CHECK_THAT(std::string(world.Take<WireDone>()->status.message()),
             Contains("slots 0 and 0: not two of the pool"));
  CHECK(world.wire().exchanges.size() == 1);
}

// ---- transfers ----

// A part of 16 bytes that another daemon sent into slot 1, for an engine with a region of its own.
struct Part {
  explicit Part(World* world) {
    auto layout = std::make_shared<Layout>();
    layout->tensors = {{"w", DType::kUint8, {16}}};
    Piece piece;
    piece.box = WholeBox({16});
    piece.strides = RowMajorStrides(piece.box.extent);
    piece.region = RegionId(1);
    layout->pieces.push_back(piece);
    MemberRecord member;
    member.id = MemberId(1);
    member.group = "g";
    member.engine = true;
    member.layout = layout;
    RegionRecord region;
    region.memory = {memory->data(), 16, memory};
    region.access = Access::kReadWrite;
    member.regions[RegionId(1)] = std::move(region);
    world->members.Add(std::move(member));

    auto bucket = std::make_shared<CheckedBucket>();
    bucket->tensors = layout->tensors;
    bucket->ranges = {{0, 0, 16}};
    start.update = UpdateId(1);
    start.version = Version(1);
    start.content =
        std::make_shared<const PartContent>(PartContent{bucket, bucket->ranges, {0}, 16});
    start.source_slot = SlotGrant{SlotIndex(1), GrantId(1)};
    start.index = *DestinationIndex::Make({layout}, {"engine"});
    start.destinations = {MemberId(1)};
    start.skip_destination = {false};
    start.verification = Verification::kReadback;
  }
  std::shared_ptr<std::string> memory = std::make_shared<std::string>(16, '-');
  StartTransfer start;
};

TEST_CASE("a part is copied from its slot into the engine's memory and read back (P1)") {
  World world;
  Part part(&world);
  REQUIRE(world.EnsureHost(*world.group).ok());
  std::memcpy(world.WireSlot(*world.group, SlotIndex(1))->data, "sixteen bytes ok", 16);
  world.InTurn(
      [&](DataPlane& plane, StateLock& lock) { plane.Start(world.group, part.start, lock); });
  const TransferDone done = world.Await<TransferDone>();
  CHECK(done.status.ok());
  CHECK(done.bytes_written == std::vector<int64_t>{16});
  CHECK(*part.memory == "sixteen bytes ok");
  CHECK(world.moved.copied == 16);

  StartVerify verify;
  verify.update = UpdateId(1);
  verify.version = Version(1);
  verify.index = part.start.index;
  verify.destinations = part.start.destinations;
  verify.skip_destination = {false};
  const auto read_back = [&] {
    world.InTurn(
        [&](DataPlane& plane, StateLock& lock) { plane.Start(world.group, verify, lock); });
    return world.Await<VerifyDone>();
  };
  CHECK(read_back().status.ok());
  (*part.memory)[3] = 'X';
  const VerifyDone damaged = read_back();
  CHECK(damaged.status.code() == absl::StatusCode::kDataLoss);
  CHECK(damaged.failed_destinations == std::vector<uint32_t>{0});
  // The digests go with the update.
  world.InTurn([&](DataPlane& plane, StateLock&) { plane.Forget(UpdateId(1)); });
  CHECK(read_back().status.ok());
}

TEST_CASE("bytes that are packed into a slot count as copied too") {
  World world;
  Part part(&world);
  const std::string bytes(16, 'x');
  auto bucket = std::make_shared<CheckedBucket>(*part.start.content->bucket);
  bucket->source = CheckedBucket::Source::kInline;
  bucket->places = {{.inline_data = bytes.data()}};
  part.start.content =
      std::make_shared<const PartContent>(PartContent{bucket, bucket->ranges, {0}, 16});
  world.calls.Add(CallId(9), {"g", [](const absl::Status&, const ReplyPayload&) {}, bucket});
  part.start.bucket_call = CallId(9);
  part.start.source_slot.reset();
  part.start.fill_slot = SlotGrant{SlotIndex(2), GrantId(1)};
  world.InTurn(
      [&](DataPlane& plane, StateLock& lock) { plane.Start(world.group, part.start, lock); });
  CHECK(world.Await<TransferDone>().status.ok());
  CHECK(*part.memory == bytes);
  CHECK(world.moved.copied == 32);
}

TEST_CASE("a transfer whose bucket is gone is answered") {
  World world;
  Part part(&world);
  part.start.bucket_call = CallId(9);
  world.InTurn(
      [&](DataPlane& plane, StateLock& lock) { plane.Start(world.group, part.start, lock); });
  const std::optional<TransferDone> done = world.Take<TransferDone>();
  REQUIRE(done.has_value());
  CHECK(done->status.message() == "the bucket is gone");
}

TEST_CASE("a transfer waits for its slots, and leaves out members that went meanwhile (P6)") {
  World world;
  Part part(&world);
  world.lacks = true;
  world.InTurn(
      [&](DataPlane& plane, StateLock& lock) { plane.Start(world.group, part.start, lock); });
  CHECK(world.events() == 0);
  REQUIRE(world.made.size() == 1);
  world.members.Remove(MemberId(1));
  world.lacks = false;
  world.InTurn(
      [&](DataPlane&, StateLock& lock) { world.made[0](world.group, absl::OkStatus(), lock); });
  const TransferDone done = world.Await<TransferDone>();
  CHECK(done.status.ok());
  CHECK(*part.memory == std::string(16, '-'));

  world.lacks = true;
  world.InTurn(
      [&](DataPlane& plane, StateLock& lock) { plane.Start(world.group, part.start, lock); });
  REQUIRE(world.made.size() == 2);
  world.InTurn([&](DataPlane&, StateLock& lock) {
    world.made[1](world.group, absl::ResourceExhaustedError("no memory"), lock);
  });
  CHECK(world.Take<TransferDone>()->status.message() == "no memory");
}

// ---- compiled refits ----

// Local moves of a program that has none, and that is bound for the first time.
StartMoves UnboundMoves() {
  auto bound = std::make_shared<BoundProgram>();
  bound->program = std::make_shared<const NodeProgram>();
  bound->replicas = std::make_shared<const std::vector<ReplicaShare>>();
  bound->plan = std::make_shared<const RoutePlan>();
  StartMoves start;
  start.update = UpdateId(1);
  start.version = Version(1);
  start.step = MoveStep::kLocal;
  start.bound = std::move(bound);
  return start;
}

TEST_CASE("an update that wrote nothing is verified in the same lock") {
  World world;
  world.InTurn([&](DataPlane& plane, StateLock& lock) {
    StartVerify verify;
    verify.update = UpdateId(3);
    plane.Start(world.group, verify, lock);
    lock.Drain();
    CHECK(world.EventsInTurn() == 1);
  });
  const std::optional<VerifyDone> done = world.Take<VerifyDone>();
  REQUIRE(done.has_value());
  CHECK(done->update == UpdateId(3));
  CHECK(done->status.ok());
}

TEST_CASE("a program is compiled, and built with the devices on which this daemon's members are") {
  World world;
  const Part part(&world);  // member 1, an engine rank in host memory
  MemberRecord trainer;
  trainer.id = MemberId(2);
  trainer.group = "g";
  trainer.ordinal = 5;
  const std::shared_ptr<const Layout> layout = world.members.Find(MemberId(1))->layout;
  trainer.layout = layout;
  world.members.Add(std::move(trainer));

  PlanRefit compile;
  compile.program = ProgramId(4);
  compile.sources = {{layout, 0, 0, "trainer"}};
  compile.destinations = {{layout, 0, 0, "engine"}};
  world.InTurn([&](DataPlane& plane, StateLock&) { plane.Compile(*world.group, compile); });
  const auto compiled = world.Await<RefitPlanned>();
  REQUIRE(compiled.status.ok());
  CHECK(compiled.program == ProgramId(4));

  BuildProgram build;
  build.program = ProgramId(4);
  build.build = 6;
  build.plan = std::shared_ptr<const RoutePlan>(compiled.plan, &compiled.plan->routes);
  build.sources = {{0, layout}};
  build.destinations = {{0, layout}};
  build.source_members = {MemberId(2)};
  build.destination_members = {MemberId(1)};
  world.InTurn([&](DataPlane& plane, StateLock&) { plane.Build(*world.group, build); });
  const auto built = world.Await<ProgramBuilt>();
  REQUIRE(built.status.ok());
  CHECK(built.build == 6);
  REQUIRE(built.node_program->sources.size() == 1);
  CHECK(built.node_program->sources[0].device == 5);
  REQUIRE(built.node_program->destinations.size() == 1);
  CHECK(built.node_program->destinations[0].device == LocalMember::kNoDevice);
}

TEST_CASE("moves through a slot outside of the pool are answered at once (P10)") {
  World world;
  StartMoves start;
  start.update = UpdateId(1);
  start.step = MoveStep::kPack;
  start.round = 3;
  const auto refused = [&] {
    world.InTurn([&](DataPlane& plane, StateLock& lock) { plane.Start(world.group, start, lock); });
    const std::optional<MovesDone> done = world.Take<MovesDone>();
    REQUIRE(done.has_value());
    CHECK(done->round == 3);
    return done->status;
  };
  start.slot = SlotIndex(4);
  CHECK(refused().message() == "slot 4: not in the pool");
  start.slot = SlotIndex(0);
  start.received = SlotIndex(5);
  CHECK(refused().message() == "slot 5: not in the pool");
  world.lacks = true;
  start.step = MoveStep::kUnpack;
  world.InTurn([&](DataPlane& plane, StateLock& lock) { plane.Start(world.group, start, lock); });
  REQUIRE(world.made.size() == 1);
  world.InTurn([&](DataPlane&, StateLock& lock) {
    world.made[0](world.group, absl::CancelledError("the member went away"), lock);
  });
  CHECK(world.Take<MovesDone>()->status.message() == "the member went away");
}

TEST_CASE("bindings of groups take fair turns, and a job behind all of them waits for all") {
  auto transport = std::make_unique<PermittedTransport>();
  PermittedTransport* const permitted = transport.get();
  World world(/*with_wire=*/true, std::move(transport));
  GroupRecord* const other = world.AddGroup("h");
  world.InTurn([&](DataPlane& plane, StateLock& lock) {
    for (int i = 0; i < 5; ++i) plane.Start(world.group, UnboundMoves(), lock);
    plane.Start(other, UnboundMoves(), lock);
  });
  std::atomic<bool> ran = false;
  world.plane().AfterBinding([&ran] { ran = true; });

  // A binding of "g" may be under way. "h" waits for that one alone.
  permitted->Permit(2);
  CHECK(Eventually([&] { return world.EventsOf("h") == 1; }));
  CHECK(world.EventsOf("g") <= 1);
  CHECK_FALSE(ran);
  permitted->Permit(4);
  CHECK(Eventually([&] { return ran.load(); }));
  CHECK(Eventually([&] { return world.EventsOf("g") == 5; }));
}

}  // namespace
}  // namespace refitd
