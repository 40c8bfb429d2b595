#include "daemon/node/regions.h"

#include <sys/mman.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstring>
#include <string>

#include "daemon/node/parts_test_util.h"

namespace refitd {
namespace {

using Catch::Contains;

PeerCredentials Nobody() { return {}; }

TEST_CASE("a memfd becomes a region of its member: a trainer's is read, an engine's is written") {
  DaemonParts parts;
  const Attached trainer = parts.AttachTrainer("g");
  const Attached engine = parts.AttachRegistered("g");
  const SharedMemory from(4096);
  const SharedMemory to(8192);
  std::memcpy(from.data(), "weights", 8);
  const absl::StatusOr<RegionId> read = parts.Register(trainer, from);
  const absl::StatusOr<RegionId> written = parts.Register(engine, to);
  REQUIRE((read.ok() && written.ok()));
  const Turn turn(parts.state().turns);
  const RegionRecord& of_trainer = parts.state().leases.Find(trainer.id)->regions.at(*read);
  CHECK(of_trainer.access == Access::kReadOnly);
  CHECK(of_trainer.memory.bytes == 4096);
  CHECK(std::string(of_trainer.memory.data) == "weights");
  const RegionRecord& of_engine = parts.state().leases.Find(engine.id)->regions.at(*written);
  CHECK(of_engine.access == Access::kReadWrite);
  CHECK(of_engine.memory.bytes == 8192);
}

TEST_CASE("memory that can't be mapped safely is refused by name (P6, P10)") {
  DaemonOptions options;
  options.max_region_bytes = 8192;
  DaemonParts parts("a", options);
  const Attached trainer = parts.AttachTrainer("g");
  const auto refusal = [&](UniqueFd fd, RegionKind kind, int64_t bytes) {
    return parts.regions()
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

TEST_CASE("the descriptor socket serves lease tokens that live (P9)") {
  DaemonParts parts;
  const Attached trainer = parts.AttachTrainer("g");
  const Token live = trainer.token();
  Token other = live;
  other[0] ^= 1;
  CHECK(parts.regions().MapPool(live, Nobody()).ok());
  CHECK(parts.regions().MapPool(other, Nobody()).status().code() ==
        absl::StatusCode::kUnauthenticated);
  CHECK(parts.regions().ReleaseRegion(other, Nobody(), RegionId(1)).code() ==
        absl::StatusCode::kUnauthenticated);
  const SharedMemory memory(4096);
  CHECK(
      parts.regions()
          .RegisterRegion(other, Nobody(), UniqueFd(dup(memory.fd.get())), RegionKind::kMemfd, 4096)
          .status()
          .code() == absl::StatusCode::kUnauthenticated);
  parts.arrivals().Detached(trainer.id);
  CHECK(parts.regions().MapPool(live, Nobody()).status().code() ==
        absl::StatusCode::kUnauthenticated);
}

TEST_CASE("a region that a layout uses stays; any other is released once") {
  DaemonParts parts;
  const Attached engine = parts.AttachRegistered("g");
  const SharedMemory memory(4096);
  const RegionId region = *parts.Register(engine, memory);
  std::optional<absl::Status> released;
  const auto release = [&](RegionId id) {
    released.reset();
    parts.regions().Release(engine.caller(), /*engine=*/true, id,
                            [&released](const absl::Status& status) { released = status; });
    REQUIRE(released.has_value());  // host memory waits for no driver
    return *released;
  };
  CHECK(release(RegionId(region.value() + 1)).code() == absl::StatusCode::kNotFound);
  parts.layouts().Register(parts.daemon().NewCall(), engine.caller(), /*engine=*/true,
                           LayoutOf(region, 64), [](const auto& reply) { CHECK(reply.ok()); });
  CHECK(release(region).code() == absl::StatusCode::kFailedPrecondition);
  CHECK(parts.operators().Describe().regions == 1);

  const Attached trainer = parts.AttachTrainer("g");
  const RegionId unused = *parts.Register(trainer, memory);
  CHECK(parts.regions().ReleaseRegion(trainer.token(), Nobody(), unused).ok());
  CHECK(parts.regions().ReleaseRegion(trainer.token(), Nobody(), unused).code() ==
        absl::StatusCode::kNotFound);
  CHECK(parts.operators().Describe().regions == 1);
}

TEST_CASE("members of a group map the same slots, of which an engine only reads") {
  DaemonParts parts;
  const Attached trainer = parts.AttachTrainer("g", Spec(3));
  const Attached engine = parts.AttachEngine("g", "i", Spec(3));
  absl::StatusOr<PoolHandle> writes = parts.regions().MapPool(trainer.token(), Nobody());
  absl::StatusOr<PoolHandle> reads = parts.regions().MapPool(engine.token(), Nobody());
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

TEST_CASE("a daemon without a cuda transport opens no handles") {
  DaemonParts parts;
  const Attached trainer = parts.AttachTrainer("g");
  absl::Status status;
  parts.regions().RegisterDevice(trainer.caller(), /*engine=*/false, IpcBlock{},
                                 [&status](const auto& reply) { status = reply.status(); });
  CHECK(status.code() == absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace refitd
