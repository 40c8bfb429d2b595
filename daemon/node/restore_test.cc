// Engine ranks of a daemon whose leases end, and ranks that take their places.
#include "daemon/node/restore.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <csignal>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/node/parts_test_util.h"
#include "daemon/sockets/peer_credentials.h"
#include "transport/base/failure.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"
#include "transport/host/host_transport.h"
#include "transport/unprepared_transport_testing.h"

namespace refitd {
namespace {

using Catch::Contains;

constexpr int64_t kBytes = 4096;
constexpr int64_t kElements = 8;

// A process that the test kills.
class Child {
 public:
  Child() : pid_(fork()) {
    if (pid_ == 0) {
      pause();
      _exit(0);
    }
    process_.pid = pid_;
    process_.uid = getuid();
    process_.pidfd = std::make_shared<const UniqueFd>(OpenPidfd(pid_));
  }
  ~Child() { Kill(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  const PeerCredentials& process() const { return process_; }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(std::exchange(pid_, -1), nullptr, 0);
  }

 private:
  pid_t pid_;
  PeerCredentials process_;
};

// Runs transfers that move bytes only when it is told to.
class HeldTransport final : public UnpreparedTransport {
 public:
  using UnpreparedTransport::Submit;
  void Submit(Transfer transfer, std::function<void(TransferResult)> done) override {
    MutexLock lock(&mutex_);
    if (transfer.plan.moves.empty() || !holds_) {
      return host_->Submit(std::move(transfer), std::move(done));
    }
    held_.emplace_back(std::move(transfer), std::move(done));
  }
  void Submit(ReadbackJob job, std::function<void(ReadbackResult)> done) override {
    host_->Submit(std::move(job), std::move(done));
  }
  void Hold() {
    MutexLock lock(&mutex_);
    holds_ = true;
  }
  void Release() {
    MutexLock lock(&mutex_);
    holds_ = false;
    for (auto& [transfer, done] : held_) host_->Submit(std::move(transfer), std::move(done));
    held_.clear();
  }
  size_t held() {
    MutexLock lock(&mutex_);
    return held_.size();
  }

 private:
  const std::unique_ptr<Transport> host_ = MakeHostTransport({.threads = 1});
  Mutex mutex_;
  bool holds_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::pair<Transfer, std::function<void(TransferResult)>>> held_
      ABSL_GUARDED_BY(mutex_);
};

// A trainer and engines with arenas of one region, in which "w" lies.
struct World {
  explicit World(int keep_seconds = kDefaultKeepSeconds, DaemonOptions options = {},
                 DaemonInsides insides = {})
      : parts("a", std::move(options), std::move(insides)) {
    spec.keep_seconds = keep_seconds;
    trainer = parts.AttachTrainer("g", spec);
  }

  // Attaches a rank of that process, which restores or not.
  Attached Attach(const PeerCredentials& process, bool restores = false, int world_size = 1,
                  const std::string& instance = "i") {
    Arrival arrival = DaemonParts::Engine(instance, DeliveryMode::kInPlace, 0, world_size);
    arrival.record.peer.credentials = process;
    arrival.record.restores = restores;
    return parts.Attach(std::move(arrival), "g", std::nullopt);
  }
  RegionId Share(const Attached& engine, const UniqueFd& fd,
                 KeepDescriptor keep = KeepDescriptor::kForNextRank) {
    const auto region = parts.memory().RegisterRegion(engine.token(), *engine.peer.credentials,
                                                      UniqueFd(dup(fd.get())), RegionKind::kMemfd,
                                                      kBytes, /*address=*/0, keep);
    INFO(region.status());
    REQUIRE(region.ok());
    return *region;
  }
  absl::StatusOr<MemberCalls::RegisteredLayout> Register(
      const Attached& engine, RegionId front, RegionId back, const std::string& tensor = "w",
      uint64_t generation = 1, uint64_t flips = 0, bool backs_differ = false) {
    Layout layout = LayoutOf(front, kElements, generation);
    layout.flips = flips;
    layout.backs_differ = backs_differ;
    layout.tensors = {{tensor, DType::kUint8, {kElements}}};
    layout.backs = {{front, back}};
    return Register(engine, std::move(layout));
  }
  absl::StatusOr<MemberCalls::RegisteredLayout> Register(const Attached& engine, Layout layout) {
    Answer answer;
    auto kept = std::make_shared<absl::StatusOr<MemberCalls::RegisteredLayout>>();
    parts.calls().RegisterLayout(parts.daemon().NewCall(), engine.caller(), /*as_engine=*/true,
                                 std::move(layout),
                                 [kept, reply = answer.function()](const auto& registered) {
                                   *kept = registered;
                                   reply(registered.status(), EmptyReply{});
                                 });
    (void)answer.status();
    return *kept;
  }
  Attached Serve(const PeerCredentials& process) {
    Attached engine = Attach(process);
    const auto registered = Register(engine, Share(engine, front.fd), Share(engine, back.fd));
    INFO(registered.status());
    REQUIRE(registered.ok());
    CHECK_FALSE(registered->kept);
    return engine;
  }
  // Installs the bytes, all of whose elements are `value`, in the engine.
  void Install(int64_t version, char value, const Attached& engine) {
    const auto flip = [&] {
      const auto last = engine.inbox->Last<SendFlip>();
      return last.has_value() ? last->update : UpdateId();
    };
    const UpdateId before = flip();
    Stage(version, value);
    REQUIRE(Eventually([&] { return flip() != before; }));
    const UpdateId update = flip();
    parts.calls().HandleEngineEvent(engine.id, ReadyEvent{engine.id, update});
    REQUIRE(committed->status().ok());
    CHECK(engine.inbox->Last<SendCommitted>()->version == Version(version));
  }
  // Begins the version, and pushes its bytes.
  Answer Push(int64_t version, char value) {
    REQUIRE(parts.Begin(trainer, version).status().ok());
    bytes = std::string(kElements, value);
    ReceivedPush push;
    push.event.version = Version(version);
    push.received = InlineBucket({"w", DType::kUint8, {kElements}}, bytes);
    Answer pushed;
    parts.calls().PushBucket(parts.daemon().NewCall(), trainer.caller(), std::move(push),
                             pushed.function());
    return pushed;
  }
  // Brings all of the version; the engine has to flip then.
  void Stage(int64_t version, char value) {
    REQUIRE(Push(version, value).status().ok());
    CommitEvent commit;
    commit.version = Version(version);
    commit.bucket_count = 1;
    committed.emplace(parts.Call(trainer, commit));
  }
  absl::StatusOr<SideHandle> Side(const Attached& engine, uint64_t side) {
    return parts.memory().TakeKept(engine.token(), *engine.peer.credentials, side);
  }
  // The region that the engine reads, or that is written next.
  RegionId SideOf(const Attached& engine, bool back) {
    const StateLock lock(&parts.state().mutex);
    const MemberRecord& record = *parts.state().members.Find(engine.id);
    return record.Side(record.layout->backs[0].region, back);
  }
  // Registers the sides that are kept for the engine.
  absl::StatusOr<MemberCalls::RegisteredLayout> TakeUp(const Attached& engine,
                                                       const std::string& tensor = "w") {
    const SideHandle read = *Side(engine, 0);
    const SideHandle written = *Side(engine, 1);
    return Register(engine, Share(engine, read.fd), Share(engine, written.fd), tensor);
  }
  size_t kept() {
    const StateLock lock(&parts.state().mutex);
    parts.state().CheckInvariants();
    return parts.state().kept.size();
  }
  // Kills the process, whose arenas are then kept.
  void Lose(Child* process) {
    process->Kill();
    REQUIRE(Eventually([this] { return kept() == 1; }));
    parts.state().processes.AwaitCallback();  // which lets go of the rank's own record last
  }
  std::optional<Version> VersionOf(const std::string& instance = "i") {
    const GroupDetails group = *parts.operators().Group("g");
    for (const InstanceView& each : group.machine.group.instances) {
      if (each.name == instance) return each.version;
    }
    return std::nullopt;
  }

  GroupSpec spec = Spec();
  DaemonParts parts;
  SharedMemory front{kBytes};
  SharedMemory back{kBytes};
  Attached trainer;
  std::string bytes;
  std::optional<Answer> committed;
};

TEST_CASE("a rank that takes the place of a dead one is clean at its version, without an update") {
  World world;
  Child first;
  const Attached engine = world.Serve(first.process());
  const int flips = GENERATE(1, 2);
  for (int version = 1; version <= flips; ++version) {
    world.Install(version, static_cast<char>('a' + version), engine);
  }
  world.Lose(&first);

  const Child second;
  const Attached again = world.Attach(second.process(), /*restores=*/true);
  const auto& kept = again.inbox->welcome().kept;
  REQUIRE(kept.has_value());
  CHECK(kept->content.version == Version(flips));
  CHECK(kept->region_bytes == std::vector<int64_t>{kBytes});
  const auto side = world.Side(again, 0);
  REQUIRE(side.ok());
  CHECK(side->bytes == kBytes);
  const auto read = HostRegion::Map(side->fd, kBytes, Access::kReadOnly, false);
  CHECK(std::string((*read)->data(), kElements) ==
        std::string(kElements, static_cast<char>('a' + flips)));
  const auto registered = world.TakeUp(again);
  INFO(registered.status());
  REQUIRE(registered.ok());
  CHECK(registered->kept);
  CHECK(world.VersionOf() == Version(flips));
  CHECK(again.inbox->All<SendFlip>().empty());
  // What was kept is the rank's own now.
  CHECK(world.kept() == 0);
  CHECK(absl::IsFailedPrecondition(world.Side(again, 0).status()));
  world.Install(flips + 1, 'z', again);
}

TEST_CASE("a rank that registers the same layout anew is kept, one that registers another is not") {
  World world;
  Child first;
  const Attached engine = world.Serve(first.process());
  world.Install(1, 'a', engine);
  const bool other = GENERATE(false, true);
  const RegionId read = world.SideOf(engine, /*back=*/false);
  const RegionId written = world.SideOf(engine, /*back=*/true);
  REQUIRE(world.Register(engine, read, written, other ? "v" : "w", 2, 1).ok());
  first.Kill();
  REQUIRE(Eventually(
      [&] { return world.parts.operators().Group("g")->machine.group.instances.empty(); }));
  CHECK(world.kept() == (other ? 0 : 1));
  if (other) return;
  const Child second;
  const auto registered = world.TakeUp(world.Attach(second.process(), /*restores=*/true));
  REQUIRE(registered.ok());
  CHECK(registered->kept);
}

TEST_CASE(
    "a rank that takes up arenas and dies before it has registered leaves them as they were") {
  World world;
  Child first;
  world.Install(1, 'a', world.Serve(first.process()));
  world.Lose(&first);
  Child second;
  const Attached engine = world.Attach(second.process(), /*restores=*/true);
  CHECK(world.kept() == 0);
  CHECK(world.Side(engine, 1).ok());
  world.Lose(&second);
  const Child third;
  const auto registered = world.TakeUp(world.Attach(third.process(), /*restores=*/true));
  REQUIRE(registered.ok());
  CHECK(registered->kept);
}

TEST_CASE("killed while a version is staged, or in its flip, a rank leaves the version before") {
  World world;
  Child first;
  const Attached engine = world.Serve(first.process());
  world.Install(1, 'a', engine);
  const bool flipping = GENERATE(false, true);
  if (flipping) {
    world.Stage(2, 'b');
    REQUIRE(Eventually([&] { return engine.inbox->All<SendFlip>().size() == 2; }));
  } else {
    REQUIRE(world.parts.Begin(world.trainer, 2).status().ok());
  }
  world.Lose(&first);
  REQUIRE(Eventually(
      [&] { return world.parts.operators().Group("g")->machine.group.instances.empty(); }));
  const Child second;
  const Attached again = world.Attach(second.process(), /*restores=*/true);
  REQUIRE(again.inbox->welcome().kept.has_value());
  CHECK(again.inbox->welcome().kept->content.version == Version(1));
  CHECK(world.TakeUp(again)->kept);
}

TEST_CASE("memory that a dead rank has changed, or that gets other names, holds no version (P11)") {
  World world;
  Child first;
  world.Install(1, 'a', world.Serve(first.process()));
  const bool renamed = GENERATE(false, true);
  if (!renamed) world.back.data()[3] = 'x';  // the front, after one flip
  world.Lose(&first);
  const Child second;
  const Attached again = world.Attach(second.process(), /*restores=*/true);
  const std::string tensor = renamed ? "v" : "w";
  const SideHandle read = *world.Side(again, 0);
  const SideHandle written = *world.Side(again, 1);
  const RegionId front = world.Share(again, read.fd);
  const RegionId back = world.Share(again, written.fd);
  const auto refused = world.Register(again, front, back, tensor);
  CHECK(absl::IsDataLoss(refused.status()));
  CHECK_THAT(Message(refused.status()),
             Contains(renamed ? "its layout differs" : "its content differs"));
  CHECK_FALSE(world.VersionOf().has_value());
  CHECK(world.kept() == 0);
  CHECK(absl::IsFailedPrecondition(world.Side(again, 0).status()));
  // No update takes the rank in before it has loaded its weights and registered.
  const Answer begin = world.parts.Begin(world.trainer, 2);
  CHECK_FALSE(begin.came());
  std::memset(world.back.data(), 'l', kElements);
  const auto registered = world.Register(again, front, back, tensor, 2);
  INFO(registered.status());
  REQUIRE(registered.ok());
  CHECK_FALSE(registered->kept);
  CHECK_FALSE(world.VersionOf().has_value());
  CHECK(begin.status().ok());
}

TEST_CASE("what was kept holds its version no more once another layout was registered over it") {
  World world;
  Child first;
  world.Install(1, 'a', world.Serve(first.process()));
  world.Lose(&first);
  const Child second;
  const Attached again = world.Attach(second.process(), /*restores=*/true);
  const RegionId front = world.Share(again, world.Side(again, 0)->fd);
  const RegionId back = world.Share(again, world.Side(again, 1)->fd);
  CHECK(absl::IsDataLoss(world.Register(again, front, back, "v").status()));
  // The right layout comes too late: the rank may have written there since.
  const auto registered = world.Register(again, front, back, "w", 2);
  REQUIRE(registered.ok());
  CHECK_FALSE(registered->kept);
  CHECK_FALSE(world.VersionOf().has_value());
}

TEST_CASE("a rank that has to copy its regions to the backs has no layout meanwhile") {
  World world;
  Child first;
  const Attached engine = world.Serve(first.process());
  world.Install(1, 'a', engine);
  const RegionId read = world.SideOf(engine, /*back=*/false);
  const RegionId written = world.SideOf(engine, /*back=*/true);
  REQUIRE(world.parts.Begin(world.trainer, 2).status().ok());
  const auto busy = world.Register(engine, read, written, "w", 2, 1, /*backs_differ=*/true);
  CHECK(absl::IsFailedPrecondition(busy.status()));
  AbortEvent abort;
  abort.version = Version(2);
  REQUIRE(world.parts.Call(world.trainer, abort).status().ok());
  REQUIRE(world.Register(engine, read, written, "w", 3, 1, /*backs_differ=*/true).ok());
  CHECK_FALSE(world.VersionOf().has_value());
  const Answer begin = world.parts.Begin(world.trainer, 3);
  CHECK_FALSE(begin.came());
  const bool dies = GENERATE(false, true);
  if (!dies) {
    REQUIRE(world.Register(engine, read, written, "w", 4, 1).ok());
    CHECK(begin.status().ok());
    return;
  }
  // The rank's front still holds the version.
  world.Lose(&first);
  const Child second;
  const auto registered = world.TakeUp(world.Attach(second.process(), /*restores=*/true));
  REQUIRE(registered.ok());
  CHECK(registered->kept);
}

TEST_CASE("sides that differ where no box lies are refused, and nothing changes (P11)") {
  World world;
  const Child child;
  const Attached engine = world.Attach(child.process());
  const RegionId front = world.Share(engine, world.front.fd);
  const RegionId back = world.Share(engine, world.back.fd);
  world.back.data()[kElements - 1] = 'x';  // what a version writes may differ
  const bool in_back = GENERATE(false, true);
  const int64_t at = GENERATE(as<int64_t>(), 8, 2048, 4095);
  INFO("byte " << at << (in_back ? " of the back" : " of the front"));
  char* const planted = (in_back ? world.back : world.front).data() + at;
  *planted = 'x';
  const absl::Status refused = world.Register(engine, front, back).status();
  CHECK(absl::IsFailedPrecondition(refused));
  CHECK_THAT(Message(refused), Contains("differ within bytes 8 to 4096"));
  CHECK(FailureOf(refused).field == "layout.backs");
  const Answer begin = world.parts.Begin(world.trainer, 1);
  CHECK_FALSE(begin.came());  // the rank has no layout
  *planted = 0;
  CHECK(world.Register(engine, front, back).ok());
  CHECK(begin.status().ok());
}

TEST_CASE(
    "what an engine wrote outside of its boxes fails the next update, where that is compared") {
  DaemonOptions options;
  options.compare_sides = GENERATE(false, true);
  World world(kDefaultKeepSeconds, options);
  const Child child;
  const Attached engine = world.Serve(child.process());
  world.Install(1, 'a', engine);
  world.back.data()[kBytes - 1] = 'x';  // the front, after one flip
  world.Stage(2, 'b');
  if (!options.compare_sides) {
    REQUIRE(Eventually([&] { return engine.inbox->All<SendFlip>().size() == 2; }));
    return;
  }
  CHECK(absl::IsAborted(world.committed->status()));
  CHECK_THAT(Message(world.committed->status()),
             Contains("differ within bytes 8 to 4096, where no box of a tensor lies"));
  CHECK(engine.inbox->All<SendFlip>().size() == 1);  // it was asked nothing
  CHECK(engine.inbox->All<SendAborted>().empty());
  CHECK(world.VersionOf() == Version(1));
  world.back.data()[kBytes - 1] = 0;
  world.Install(3, 'c', engine);
}

TEST_CASE("sparse sides were filled with pages of the daemon, where no box lies (P10)") {
  World world;
  const Child child;
  const Attached engine = world.Attach(child.process());
  const RegionId front = world.Share(engine, world.front.fd);
  const RegionId back = world.Share(engine, world.back.fd);
  const auto blocks = [&world] {
    struct stat file {};
    int64_t all = 0;
    for (const UniqueFd* side : {&world.front.fd, &world.back.fd}) {
      REQUIRE(fstat(side->get(), &file) == 0);
      all += file.st_blocks;
    }
    return all;
  };
  REQUIRE(blocks() == 0);
  CHECK(world.Register(engine, front, back).ok());
  CHECK(blocks() == 0);
}

TEST_CASE("sides whose descriptors the daemon has not kept are refused (P10)") {
  World world;
  const Child child;
  const Attached engine = world.Attach(child.process());
  const RegionId front = world.Share(engine, world.front.fd, KeepDescriptor::kWithRegion);
  const RegionId back = world.Share(engine, world.back.fd, KeepDescriptor::kNo);
  const absl::Status refused = world.Register(engine, front, back).status();
  CHECK(absl::IsInvalidArgument(refused));
  CHECK_THAT(Message(refused),
             Contains(fmt::format("region {} was registered without keep", back)));
}

// A rank whose lease has ended and that has attached again, while a held copy of the lease has yet
// to write to its back.
struct AttachedAgain {
  AttachedAgain() {
    const Attached engine = world.Serve(child.process());
    held.Hold();
    world.Push(1, 'a');
    REQUIRE(Eventually([&] { return held.held() == 1; }));
    world.parts.calls().Gone(engine.id, "its stream broke");
    again = world.Attach(child.process());
    front = world.Share(again, world.front.fd);
    back = world.Share(again, world.back.fd);
  }
  Layout LayoutOfTensor(const std::string& tensor) const {
    Layout layout = LayoutOf(front, kElements);
    layout.tensors = {{tensor, DType::kUint8, {kElements}}};
    layout.backs = {{front, back}};
    return layout;
  }
  // Does not await the answer.
  void Register(const Layout& layout, Answer& answer) {
    world.parts.calls().RegisterLayout(world.parts.daemon().NewCall(), again.caller(),
                                       /*as_engine=*/true, layout,
                                       [reply = answer.function()](const auto& registered) {
                                         reply(registered.status(), EmptyReply{});
                                       });
  }

  std::unique_ptr<HeldTransport> transport = std::make_unique<HeldTransport>();
  HeldTransport& held = *transport;
  World world{kDefaultKeepSeconds, {}, {.transport = std::move(transport)}};
  const Child child;
  Attached again;
  RegionId front;
  RegionId back;
};

// The rank's process lives on, and registers at once a layout in which no tensor lies where the
// copy of its last lease still writes.
TEST_CASE("copies of a lease that has ended wrote to a back after its rank had registered again") {
  AttachedAgain rank;
  Layout layout = rank.LayoutOfTensor("v");
  layout.pieces[0].byte_offset = kBytes / 2;
  const bool withdraws = GENERATE(false, true);
  layout.backs_differ = withdraws;
  Answer answer;
  rank.Register(layout, answer);
  CHECK_FALSE(answer.came());
  rank.held.Release();
  const absl::Status status = answer.status();
  CHECK(std::string(rank.world.back.data(), kElements) == rank.world.bytes);
  if (!withdraws) {
    CHECK(absl::IsFailedPrecondition(status));
    CHECK_THAT(Message(status), Contains("differ within bytes 0 to 2048"));
    return;
  }
  REQUIRE(status.ok());
  std::memcpy(rank.world.back.data(), rank.world.front.data(), kBytes);
  layout.backs_differ = false;
  layout.binding_generation = 2;
  CHECK(rank.world.Register(rank.again, layout).ok());
}

TEST_CASE("layouts that waited beyond the limit of calls were watched no longer (P4)") {
  AttachedAgain rank;
  std::vector<Answer> answers(Calls::kMaxOpening + 1);
  for (Answer& answer : answers) rank.Register(rank.LayoutOfTensor("w"), answer);
  REQUIRE(answers.back().came());
  CHECK(absl::IsResourceExhausted(answers.back().status()));
  answers.pop_back();
  for (const Answer& answer : answers) CHECK_FALSE(answer.came());
  rank.held.Release();
  int registered = 0;
  for (const Answer& answer : answers) registered += answer.status().ok() ? 1 : 0;
  CHECK(registered == 1);
}

TEST_CASE("the arenas of a rank were lost with its daemon's link to the coordinator") {
  DaemonParts a("a");
  DaemonParts b("b");
  const Attached trainer = a.AttachTrainer("g");
  Child first;
  Arrival arrival = DaemonParts::Engine("i", DeliveryMode::kInPlace);
  arrival.record.peer.credentials = first.process();
  const Attached engine = b.Attach(std::move(arrival), "g", std::nullopt, &a);
  REQUIRE(Eventually([&] { return engine.inbox->welcomed(); }));
  const SharedMemory front(kBytes);
  const SharedMemory back(kBytes);
  const auto share = [&](const SharedMemory& side) {
    return *b.memory().RegisterRegion(engine.token(), first.process(), UniqueFd(dup(side.fd.get())),
                                      RegionKind::kMemfd, kBytes, /*address=*/0,
                                      KeepDescriptor::kForNextRank);
  };
  const RegionId read = share(front);
  Layout layout = LayoutOf(read, kElements);
  layout.backs = {{read, share(back)}};
  Answer registered;
  b.calls().RegisterLayout(b.daemon().NewCall(), engine.caller(), /*as_engine=*/true, layout,
                           [reply = registered.function()](const auto& answer) {
                             reply(answer.status(), EmptyReply{});
                           });
  REQUIRE(registered.status().ok());
  {
    StateLock lock(&b.state().mutex);
    // The rank holds this after a commit that was read back.
    b.state().members.Find(engine.id)->holds = {Version(1), 7, "", 42};
    lock.Handle("g", LinkLost{absl::UnavailableError("cut")});
  }
  CHECK(absl::IsUnavailable(engine.inbox->Ended()));
  const StateLock lock(&b.state().mutex);
  b.state().CheckInvariants();
  REQUIRE(b.state().kept.size() == 1);
  CHECK(b.state().kept.all()[0]->content.version == Version(1));
}

TEST_CASE("a rank of another user is refused by name, and nothing changes") {
  World world;
  Child first;
  world.Install(1, 'a', world.Serve(first.process()));
  world.Lose(&first);
  const Child second;
  PeerCredentials stranger = second.process();
  stranger.uid = first.process().uid + 1;
  const Attached refused = world.Attach(stranger, /*restores=*/true);
  CHECK(absl::IsPermissionDenied(refused.inbox->Ended()));
  CHECK(world.kept() == 1);
  const Attached again = world.Attach(second.process(), /*restores=*/true);
  CHECK(absl::IsNotFound(world.Side(again, 2).status()));
  CHECK_THAT(Message(world.Side(again, 2).status()), Contains("1 arenas are kept"));
  CHECK(world.TakeUp(again)->kept);
}

TEST_CASE("a process that runs still keeps its arenas, and one of another world gets none") {
  World world;
  Child first;
  const Attached engine = world.Serve(first.process());
  world.Install(1, 'a', engine);
  const Child second;
  SECTION("runs still") {
    world.parts.calls().Gone(engine.id, "its stream broke");
    CHECK(world.kept() == 1);
    CHECK_FALSE(world.Attach(second.process(), true).inbox->welcome().kept.has_value());
  }
  SECTION("the same process") {
    world.parts.calls().Detached(engine.id);
    CHECK(world.Attach(first.process(), true).inbox->welcome().kept.has_value());
  }
  SECTION("another world") {
    world.Lose(&first);
    CHECK_FALSE(world.Attach(second.process(), true, 2).inbox->welcome().kept.has_value());
  }
  CHECK(world.kept() == 0);  // the place is taken
}

TEST_CASE("arenas are given up when a rank does not ask, their group ends, or their time is over") {
  World world(/*keep_seconds=*/GENERATE(1, 600));
  Child first;
  const Attached engine = world.Serve(first.process());
  world.Install(1, 'a', engine);
  first.Kill();
  const int64_t mapped = world.parts.state().mapped.held();
  CHECK(mapped == 2 * kBytes);
  if (world.spec.keep_seconds == 1) {
    // The timer ends it.
  } else {
    REQUIRE(Eventually([&] { return world.kept() == 1; }));
    const std::string how = GENERATE("attach", "replace", "delete");
    if (how == "attach") {
      const Child second;
      CHECK_FALSE(world.Attach(second.process()).inbox->welcome().kept.has_value());
    } else if (how == "replace") {
      REQUIRE(world.parts.operators().CreateGroup("g", world.spec, true, "", "uid:0").ok());
    } else {
      world.parts.calls().Detached(world.trainer.id);
      REQUIRE(Eventually([&] { return world.parts.operators().DeleteGroup("g").ok(); }));
    }
  }
  CHECK(Eventually([&] { return world.kept() == 0; }));
  CHECK(Eventually([&] { return world.parts.state().mapped.held() == 0; }));
}

TEST_CASE("a group with keep_seconds 0 keeps nothing") {
  World world(/*keep_seconds=*/0);
  Child first;
  world.Install(1, 'a', world.Serve(first.process()));
  first.Kill();
  REQUIRE(Eventually([&] { return world.parts.state().mapped.held() == 0; }));
  CHECK(world.kept() == 0);
}

TEST_CASE("kept arenas give way to memory that a member shares") {
  DaemonOptions options;
  options.max_mapped_bytes = 3 * kBytes;
  World world(kDefaultKeepSeconds, options);
  Child first;
  world.Install(1, 'a', world.Serve(first.process()));
  world.Lose(&first);
  const Child second;
  const Attached other = world.Attach(second.process(), false, 1, "other");
  CHECK(world.kept() == 1);
  const SharedMemory one(kBytes);
  world.Share(other, one.fd);
  CHECK(world.kept() == 1);  // there was room
  const SharedMemory more(kBytes);
  world.Share(other, more.fd);
  CHECK(world.kept() == 0);
  const Attached late = world.Attach(second.process(), /*restores=*/true);
  CHECK_FALSE(late.inbox->welcome().kept.has_value());
}

}  // namespace
}  // namespace refitd
