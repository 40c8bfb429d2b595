#include "daemon/node/member_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "daemon/node/device_memory_test_util.h"
#include "daemon/node/parts_test_util.h"

namespace refitd {
namespace {

using Catch::Contains;

PeerCredentials Nobody() { return {}; }

// A daemon that serves GPUs, whose memory is FakeMemory.
struct Gpus {
  explicit Gpus(DaemonOptions options = {}) : parts("a", WithGpus(memory, std::move(options))) {}
  // A block of GPU-1 by a handle of these letters.
  static IpcBlock Block(char letter, int64_t bytes = 0) {
    return {std::string(kBlockHandleBytes, letter), "GPU-1", 0, bytes};
  }
  // The regions of an opened block, and what was open when the answer came.
  struct Opened {
    absl::StatusOr<MemberMemory::Registered> region = absl::UnknownError("not answered");
    int open_then = -1;
  };
  Opened Open(const Attached& member, bool engine, const IpcBlock& block) {
    const auto answer = std::make_shared<Kept<Opened>>();
    parts.memory().RegisterDevice(
        member.caller(), engine, block,
        [answer, memory = memory](const absl::StatusOr<MemberMemory::Registered>& region) {
          answer->Put({region, memory->open_blocks()});
        });
    return answer->Await();
  }
  // How many blocks were open when the release was answered.
  int Release(const Attached& member, bool engine, RegionId region) {
    const auto answer = std::make_shared<Kept<int>>();
    parts.memory().Release(member.caller(), engine, region,
                           [answer, memory = memory](const absl::Status& status) {
                             answer->Put(status.ok() ? memory->open_blocks() : -1);
                           });
    return answer->Await();
  }
  RegionRecord RecordOf(const Attached& member, RegionId region) {
    const StateLock lock(&parts.state().mutex);
    return parts.state().members.Find(member.id)->regions.at(region);
  }

  // An answer that another thread gives.
  template <typename Value>
  class Kept {
   public:
    void Put(Value value) {
      MutexLock lock(&mutex_);
      value_ = std::move(value);
    }
    Value Await() {
      REQUIRE(Eventually([this] {
        MutexLock lock(&mutex_);
        return value_.has_value();
      }));
      MutexLock lock(&mutex_);
      return *value_;
    }

   private:
    Mutex mutex_;
    std::optional<Value> value_ ABSL_GUARDED_BY(mutex_);
  };

  std::shared_ptr<FakeMemory> memory = std::make_shared<FakeMemory>();
  DaemonParts parts;
  Attached trainer = parts.Attach(DaemonParts::OnGpu(DaemonParts::Trainer(), 1), "g");
  Attached engine =
      parts.Attach(DaemonParts::OnGpu(DaemonParts::Engine("i", DeliveryMode::kInPlace), 1), "g");
};

TEST_CASE("a memfd becomes a region of its member: a trainer's is read, an engine's is written") {
  DaemonParts parts;
  const Attached trainer = parts.AttachTrainer("g");
  const Attached engine = parts.AttachInPlace("g");
  const SharedMemory from(4096);
  const SharedMemory to(8192);
  std::memcpy(from.data(), "weights", 8);
  const absl::StatusOr<RegionId> read = parts.Register(trainer, from);
  const absl::StatusOr<RegionId> written = parts.Register(engine, to);
  REQUIRE((read.ok() && written.ok()));
  const StateLock lock(&parts.state().mutex);
  const RegionRecord& of_trainer = parts.state().members.Find(trainer.id)->regions.at(*read);
  CHECK(of_trainer.access == Access::kReadOnly);
  CHECK(of_trainer.memory.bytes == 4096);
  CHECK(std::string(of_trainer.memory.data) == "weights");
  CHECK(of_trainer.memory.origin.kind == MemoryOrigin::Kind::kFile);
  const RegionRecord& of_engine = parts.state().members.Find(engine.id)->regions.at(*written);
  CHECK(of_engine.access == Access::kReadWrite);
  CHECK(of_engine.memory.bytes == 8192);
}

TEST_CASE("memory that can't be mapped safely is refused by name (P6, P10)") {
  DaemonOptions options;
  options.max_region_bytes = 8192;
  DaemonParts parts("a", options);
  const Attached trainer = parts.AttachTrainer("g");
  const auto refusal = [&](UniqueFd fd, RegionKind kind, int64_t bytes) {
    return parts.memory()
        .RegisterRegion(trainer.token(), Nobody(), std::move(fd), kind, bytes)
        .status();
  };
  const SharedMemory memory(8192);
  const auto copy = [&memory] { return UniqueFd(dup(memory.fd.get())); };
  CHECK_THAT(Message(refusal(copy(), RegionKind::kMemfd, 8193)),
             Contains("bytes: 8193 is more than max_region_bytes 8192"));
  CHECK(refusal(copy(), static_cast<RegionKind>(9), 4096).code() ==
        absl::StatusCode::kUnimplemented);
  CHECK_FALSE(refusal(copy(), RegionKind::kDevice, 4096).ok());
  UniqueFd shrinks(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(ftruncate(shrinks.get(), 4096) == 0);
  CHECK(refusal(std::move(shrinks), RegionKind::kMemfd, 4096).code() ==
        absl::StatusCode::kInvalidArgument);
  CHECK(parts.operators().Describe().regions == 0);
}

TEST_CASE(
    "an engine's memory is one region, a trainer's may be several, all within the limits (P10)") {
  DaemonOptions options;
  options.max_regions_per_member = 2;
  options.per_identity.regions = 3;
  DaemonParts parts("a", options);
  const SharedMemory memory(4096);
  const SharedMemory other(4096);
  const Attached engine = parts.AttachInPlace("g");
  REQUIRE(parts.Register(engine, memory).ok());
  CHECK(parts.Register(engine, memory).status().code() == absl::StatusCode::kAlreadyExists);
  const Attached trainer = parts.AttachTrainer("g");
  REQUIRE(parts.Register(trainer, memory).ok());
  REQUIRE(parts.Register(trainer, memory).ok());
  CHECK_THAT(Message(parts.Register(trainer, memory).status()),
             Contains("the member has 2 regions already"));
  CHECK_THAT(Message(parts.Register(engine, other).status()), Contains("per_identity.regions"));
  CHECK(parts.operators().Describe().regions == 3);
}

TEST_CASE("the descriptor socket serves lease tokens that live (P9)") {
  DaemonParts parts;
  const Attached trainer = parts.AttachTrainer("g");
  const Token live = trainer.token();
  Token other = live;
  other[0] ^= 1;
  CHECK(parts.memory().MapPool(live, Nobody()).ok());
  CHECK(parts.memory().MapPool(other, Nobody()).status().code() ==
        absl::StatusCode::kUnauthenticated);
  CHECK(parts.memory().ReleaseRegion(other, Nobody(), RegionId(1)).code() ==
        absl::StatusCode::kUnauthenticated);
  const SharedMemory memory(4096);
  CHECK(
      parts.memory()
          .RegisterRegion(other, Nobody(), UniqueFd(dup(memory.fd.get())), RegionKind::kMemfd, 4096)
          .status()
          .code() == absl::StatusCode::kUnauthenticated);
  parts.calls().Detached(trainer.id);
  CHECK(parts.memory().MapPool(live, Nobody()).status().code() ==
        absl::StatusCode::kUnauthenticated);
}

TEST_CASE("a region that a layout uses stays; any other is released once") {
  DaemonParts parts;
  const Attached engine = parts.AttachInPlace("g");
  const SharedMemory memory(4096);
  const RegionId region = *parts.Register(engine, memory);
  std::optional<absl::Status> released;
  const auto release = [&](RegionId id) {
    released.reset();
    parts.memory().Release(engine.caller(), /*engine=*/true, id,
                           [&released](const absl::Status& status) { released = status; });
    REQUIRE(released.has_value());  // host memory waits for no driver
    return *released;
  };
  CHECK(release(RegionId(region.value() + 1)).code() == absl::StatusCode::kNotFound);
  parts.calls().RegisterLayout(parts.daemon().NewCall(), engine.caller(), /*engine=*/true,
                               LayoutOf(region, 64), [](const auto& reply) { CHECK(reply.ok()); });
  CHECK(release(region).code() == absl::StatusCode::kFailedPrecondition);
  CHECK(parts.operators().Describe().regions == 1);

  const Attached trainer = parts.AttachTrainer("g");
  const RegionId unused = *parts.Register(trainer, memory);
  CHECK(parts.memory().ReleaseRegion(trainer.token(), Nobody(), unused).ok());
  CHECK(parts.memory().ReleaseRegion(trainer.token(), Nobody(), unused).code() ==
        absl::StatusCode::kNotFound);
  CHECK(parts.operators().Describe().regions == 1);
}

TEST_CASE("members of a group map the same slots, of which an engine only reads") {
  DaemonParts parts;
  const Attached trainer = parts.AttachTrainer("g", Spec(3));
  const Attached engine = parts.AttachEngine("g", "i", Spec(3));
  absl::StatusOr<PoolHandle> writes = parts.memory().MapPool(trainer.token(), Nobody());
  absl::StatusOr<PoolHandle> reads = parts.memory().MapPool(engine.token(), Nobody());
  REQUIRE((writes.ok() && reads.ok()));
  CHECK(writes->bytes == 3 * kSlotBytes);
  CHECK(writes->slot_bytes == kSlotBytes);
  const auto pool = HostRegion::Map(writes->fd, writes->bytes, Access::kReadWrite, false);
  const auto seen = HostRegion::Map(reads->fd, reads->bytes, Access::kReadOnly, false);
  REQUIRE((pool.ok() && seen.ok()));
  (*pool)->data()[kSlotBytes] = 'x';
  CHECK((*seen)->data()[kSlotBytes] == 'x');
  CHECK(HostRegion::Map(reads->fd, reads->bytes, Access::kReadWrite, false).status().code() ==
        absl::StatusCode::kPermissionDenied);
}

TEST_CASE("a block on a GPU becomes a region, and is closed before its release is answered (P8)") {
  Gpus gpus;
  const Gpus::Opened read = gpus.Open(gpus.trainer, /*engine=*/false, Gpus::Block('t'));
  const Gpus::Opened written = gpus.Open(gpus.engine, /*engine=*/true, Gpus::Block('e', 100));
  REQUIRE((read.region.ok() && written.region.ok()));
  CHECK(read.region->bytes == FakeMemory::kBlockBytes);
  CHECK(written.region->bytes == 100);
  CHECK(gpus.RecordOf(gpus.trainer, read.region->id).access == Access::kReadOnly);
  CHECK(gpus.RecordOf(gpus.engine, written.region->id).access == Access::kReadWrite);
  CHECK(gpus.RecordOf(gpus.engine, written.region->id).memory.bytes == 100);
  gpus.parts.AwaitRegionsThread();
  CHECK(gpus.memory->open_blocks() == 2);
  CHECK(gpus.Release(gpus.trainer, /*engine=*/false, read.region->id) == 1);
  CHECK(gpus.Release(gpus.engine, /*engine=*/true, written.region->id) == 0);
}

TEST_CASE("a handle is refused by its field, and what it had opened is closed first (P8, P10)") {
  DaemonOptions options;
  options.max_region_bytes = FakeMemory::kBlockBytes - 1;
  Gpus gpus(options);
  const auto refused = [&gpus](const Attached& member, const IpcBlock& block) {
    const Gpus::Opened opened = gpus.Open(member, /*engine=*/false, block);
    REQUIRE_FALSE(opened.region.ok());
    CHECK(opened.open_then == 0);
    return Message(opened.region.status());
  };
  IpcBlock block = Gpus::Block('a');
  block.handle.pop_back();
  CHECK_THAT(refused(gpus.trainer, block), Contains("cuda_ipc.handle has 63 bytes"));
  block = Gpus::Block('a');
  block.byte_offset = 8;
  CHECK_THAT(refused(gpus.trainer, block), Contains("cuda_ipc.byte_offset is 8"));
  CHECK_THAT(refused(gpus.trainer, Gpus::Block('a', -1)), Contains("cuda_ipc.bytes is -1"));
  block = Gpus::Block('a');
  block.device = "GPU-0";
  CHECK_THAT(refused(gpus.trainer, block), Contains("'GPU-0', the lease's device is 'GPU-1'"));
  CHECK(gpus.memory->opened() == 0);
  CHECK_THAT(refused(gpus.trainer, Gpus::Block('a', FakeMemory::kBlockBytes + 1)),
             Contains("cuda_ipc.bytes is 4097: the block has 4096"));
  CHECK_THAT(refused(gpus.trainer, Gpus::Block('a')), Contains("more than max_region_bytes 4095"));
  CHECK(gpus.memory->opened() == 2);
  CHECK(gpus.parts.operators().Describe().regions == 0);
}

TEST_CASE("a member that may have no more regions opens no block") {
  DaemonOptions options;
  options.max_regions_per_member = 1;
  Gpus gpus(options);
  REQUIRE(gpus.Open(gpus.trainer, /*engine=*/false, Gpus::Block('a')).region.ok());
  CHECK(gpus.Open(gpus.trainer, /*engine=*/false, Gpus::Block('b')).region.status().code() ==
        absl::StatusCode::kResourceExhausted);
  CHECK(gpus.memory->opened() == 1);
}

TEST_CASE("an engine registers a block, or memory by descriptor, once") {
  Gpus gpus;
  REQUIRE(gpus.Open(gpus.engine, /*engine=*/true, Gpus::Block('a')).region.ok());
  CHECK(gpus.Open(gpus.engine, /*engine=*/true, Gpus::Block('a')).region.status().code() ==
        absl::StatusCode::kAlreadyExists);
  const auto import = [&gpus](const Attached& member) {
    return gpus.parts.memory().RegisterRegion(
        member.token(), member.peer.credentials.value_or(PeerCredentials()),
        UniqueFd(memfd_create("test", MFD_CLOEXEC)), RegionKind::kDevice, 512);
  };
  const absl::StatusOr<RegionId> imported = import(gpus.engine);
  REQUIRE(imported.ok());
  CHECK(gpus.RecordOf(gpus.engine, *imported).access == Access::kReadWrite);
  CHECK(gpus.RecordOf(gpus.engine, *imported).memory.bytes == 512);
  CHECK(import(gpus.engine).status().code() == absl::StatusCode::kAlreadyExists);
  const absl::StatusOr<RegionId> read = import(gpus.trainer);
  REQUIRE(read.ok());
  CHECK(gpus.RecordOf(gpus.trainer, *read).access == Access::kReadOnly);
  CHECK_THAT(Message(import(gpus.parts.AttachTrainer("h")).status()),
             Contains("the lease's device is 'host'"));
}

TEST_CASE(
    "pinned memory must have seals and pages, and counts as mapped until it is closed (P10)") {
  constexpr int64_t kBytes = 4096;
  DaemonOptions options;
  options.max_mapped_bytes = 2 * kBytes;
  Gpus gpus(options);
  const auto pin = [&gpus](const Attached& member, const UniqueFd& fd) {
    return gpus.parts.memory().RegisterRegion(member.token(),
                                              member.peer.credentials.value_or(PeerCredentials()),
                                              UniqueFd(dup(fd.get())), RegionKind::kPinned, kBytes);
  };
  const auto counts = [&gpus](int64_t bytes) {
    return Eventually([&] { return gpus.parts.state().mapped.held() == bytes; });
  };
  const SharedMemory memory(kBytes);
  const absl::Status empty = pin(gpus.engine, memory.fd).status();
  CHECK(absl::IsFailedPrecondition(empty));
  CHECK_THAT(Message(empty), Contains("not all of the 4096 bytes have pages"));
  const UniqueFd unsealed(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(ftruncate(unsealed.get(), kBytes) == 0);
  CHECK(absl::IsInvalidArgument(pin(gpus.engine, unsealed).status()));
  CHECK(counts(0));
  memory.data()[0] = 'x';
  const absl::StatusOr<RegionId> pinned = pin(gpus.engine, memory.fd);
  INFO(pinned.status());
  REQUIRE(pinned.ok());
  const RegionRecord record = gpus.RecordOf(gpus.engine, *pinned);
  CHECK((record.on_device && record.pinned && record.access == Access::kReadWrite));
  CHECK(record.memory.origin.kind == MemoryOrigin::Kind::kFile);
  CHECK(absl::IsAlreadyExists(pin(gpus.engine, memory.fd).status()));
  CHECK(counts(kBytes));
  const SharedMemory more(kBytes);
  const SharedMemory most(kBytes);
  more.data()[0] = most.data()[0] = 'x';
  REQUIRE(pin(gpus.engine, more.fd).ok());
  CHECK(absl::IsResourceExhausted(pin(gpus.engine, most.fd).status()));
  CHECK_THAT(Message(pin(gpus.parts.AttachTrainer("h"), most.fd).status()),
             Contains("the lease's device is 'host'"));
  CHECK(gpus.Release(gpus.engine, /*engine=*/true, *pinned) == 2);
  CHECK(counts(2 * kBytes));  // `record` still has it
}

TEST_CASE("pages beyond a region were taken for its own when it was to be pinned (P10)") {
  constexpr int64_t kBytes = 4096;
  Gpus gpus;
  const SharedMemory memory(2 * kBytes);
  memory.data()[kBytes] = 'x';
  const auto pin = [&] {
    return gpus.parts.memory().RegisterRegion(gpus.engine.token(), *gpus.engine.peer.credentials,
                                              UniqueFd(dup(memory.fd.get())), RegionKind::kPinned,
                                              kBytes);
  };
  CHECK_THAT(Message(pin().status()), Contains("not all of the 4096 bytes have pages"));
  memory.data()[0] = 'x';
  const absl::StatusOr<RegionId> pinned = pin();
  REQUIRE(pinned.ok());
  CHECK(gpus.RecordOf(gpus.engine, *pinned).memory.bytes == kBytes);
}

TEST_CASE("kept sides in pinned memory count once when they are taken up, and give way") {
  constexpr int64_t kBytes = 4096;
  DaemonOptions options;
  options.max_mapped_bytes = 2 * kBytes;
  Gpus gpus(options);
  std::vector<std::unique_ptr<SharedMemory>> sides;
  for (int i = 0; i < 3; ++i) {
    sides.push_back(std::make_unique<SharedMemory>(kBytes));
    sides.back()->data()[0] = 'x';
  }
  const auto pin = [&gpus](const Attached& member, const SharedMemory& side) {
    return gpus.parts.memory().RegisterRegion(member.token(), *member.peer.credentials,
                                              UniqueFd(dup(side.fd.get())), RegionKind::kPinned,
                                              kBytes, /*address=*/0, KeepDescriptor::kForNextRank);
  };
  const auto keep = [&] {
    KeptRank kept;
    kept.group = "g";
    kept.instance = "i";
    kept.device = "GPU-1";
    kept.ordinal = 1;
    kept.content = {Version(3), 11, "", 13};
    const RegionId front = *pin(gpus.engine, *sides[0]);
    const RegionId back = *pin(gpus.engine, *sides[1]);
    kept.arenas = {{gpus.RecordOf(gpus.engine, front), gpus.RecordOf(gpus.engine, back)}};
    for (const RegionId side : {front, back}) {
      REQUIRE(gpus.Release(gpus.engine, /*engine=*/true, side) == 2);
    }
    StateLock lock(&gpus.parts.state().mutex);
    REQUIRE(gpus.parts.state().kept.Keep(std::move(kept)).empty());
  };
  keep();
  const auto held = [&gpus] { return gpus.parts.state().mapped.held(); };
  CHECK(held() == 2 * kBytes);
  // The next rank, of another process, registers what it was given.
  const Attached next = gpus.parts.Attach(
      DaemonParts::OnGpu(DaemonParts::Engine("j", DeliveryMode::kInPlace), 2), "g");
  const Attached same = gpus.parts.Attach(
      DaemonParts::OnGpu(DaemonParts::Engine("k", DeliveryMode::kInPlace), 1), "g");
  keep();  // the rank that attached on that GPU made what was kept give way
  const absl::StatusOr<RegionId> taken_up = pin(same, *sides[0]);
  INFO(taken_up.status());
  REQUIRE(taken_up.ok());
  CHECK(held() == 2 * kBytes);
  CHECK(gpus.memory->open_blocks() == 2);
  REQUIRE(gpus.Release(same, /*engine=*/true, *taken_up) == 2);

  CHECK(pin(next, *sides[2]).ok());
  CHECK(held() == kBytes);
  const StateLock lock(&gpus.parts.state().mutex);
  CHECK(gpus.parts.state().kept.size() == 0);
}

TEST_CASE("blocks that were opened, or refused, count no more as being opened") {
  Gpus gpus;
  for (size_t i = 0; i <= Calls::kMaxOpening; ++i) {
    const Gpus::Opened opened =
        gpus.Open(gpus.trainer, /*engine=*/false, Gpus::Block('a', FakeMemory::kBlockBytes + 1));
    REQUIRE(opened.region.status().code() == absl::StatusCode::kInvalidArgument);
  }
}

TEST_CASE("a member on a GPU maps slots that are made there, or hears why they are not") {
  Gpus gpus;
  const auto map = [&gpus] {
    return gpus.parts.memory().MapPool(gpus.trainer.token(), *gpus.trainer.peer.credentials);
  };
  gpus.memory->can_make = absl::ResourceExhaustedError("too little memory is free");
  CHECK_THAT(Message(map().status()), Contains("too little memory is free"));
  gpus.memory->can_make = absl::OkStatus();
  const absl::StatusOr<PoolHandle> pool = map();
  REQUIRE(pool.ok());
  CHECK(pool->bytes == 2 * kSlotBytes);
  CHECK(pool->slot_bytes == kSlotBytes);
  CHECK(gpus.memory->open() == 1);
}

TEST_CASE("a daemon without a cuda transport opens no handles") {
  DaemonParts parts;
  const Attached trainer = parts.AttachTrainer("g");
  absl::Status status;
  parts.memory().RegisterDevice(trainer.caller(), /*engine=*/false, IpcBlock{},
                                [&status](const auto& reply) { status = reply.status(); });
  CHECK(status.code() == absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace refitd
