#include "daemon/node/identities.h"

#include <catch2/catch.hpp>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>

#include "transport/base/temp_folder_testing.h"

namespace refitd {
namespace {

constexpr int64_t kPool = 4 * 4096;  // bytes of one group's pool

Peer User(uid_t uid) {
  PeerCredentials credentials;
  credentials.uid = uid;
  return {.credentials = credentials};
}

// The state alone: no machine handles an event here.
struct World {
  explicit World(const IdentityLimits& limits, AuditLog* audit = nullptr)
      : state(OptionsOf(limits, audit), {}, processes.get(), {[](auto&, auto&, auto&) {}, [] {}}) {}

  static DaemonOptions OptionsOf(const IdentityLimits& limits, AuditLog* audit) {
    DaemonOptions options;
    options.per_identity = limits;
    options.audit = audit;
    return options;
  }
  GroupRecord* MakeGroup(const std::string& name, const std::string& creator)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kStateLocked) {
    CoordinatorOptions options;
    options.name = name;
    options.incarnation = 1;
    options.spec.slots = 4;
    options.spec.slot_bytes = 4096;
    options.next_update = [this] { return state.NewUpdate(); };
    options.next_member = [this] { return state.NewMember(); };
    options.next_call = [this] { return state.NewCall(); };
    GroupRecord* const group = state.groups.Coordinate(std::move(options), DaemonState::Now());
    group->creator = creator;
    return group;
  }
  MemberRecord Trainer(const Peer& peer) {
    MemberRecord record;
    record.id = state.NewMember();
    record.group = "g";
    record.peer = peer;
    return record;
  }

  const std::unique_ptr<ProcessWatch> processes = *ProcessWatch::Create();
  DaemonState state;
};

// ---- limits ----

TEST_CASE("An identity's groups and their pools are limited, and those of others do not count") {
  World world({.groups = 2, .pool_bytes = 2 * kPool});
  const StateLock lock(&world.state.mutex);
  world.MakeGroup("a", "uid:1");
  world.MakeGroup("b", "uid:2");
  CHECK(AdmitGroup(world.state, "uid:1", kPool).ok());
  const absl::Status pool = AdmitGroup(world.state, "uid:1", kPool + 1);
  CHECK(pool.code() == absl::StatusCode::kResourceExhausted);
  CHECK(std::string(pool.message()).find("pool_bytes: uid:1") != std::string::npos);
  const GroupRecord* const joined = world.MakeGroup("c", "uid:1");
  const absl::Status groups = AdmitGroup(world.state, "uid:1", 0);
  CHECK(std::string(groups.message()).find("groups: uid:1") != std::string::npos);
  CHECK(AdmitGroup(world.state, "", 100 * kPool).ok());
  // A group that this daemon joins counts with the pool that its coordinator tells.
  GroupSpec told;
  told.slots = 4;
  told.slot_bytes = 4096;
  CHECK(AdmitGroup(world.state, "uid:1", told.slots * told.slot_bytes, joined).ok());
  told.slots = 5;
  CHECK_FALSE(AdmitGroup(world.state, "uid:1", told.slots * told.slot_bytes, joined).ok());
}

TEST_CASE("Members that wait count as members of their identity, and lost ones do not") {
  World world({.members = 2});
  const StateLock lock(&world.state.mutex);
  world.MakeGroup("g", "uid:1");
  MemberRecord* const first = world.state.members.Add(world.Trainer(User(1)));
  MemberRecord waits = world.Trainer(User(1));
  waits.group = "later";
  world.state.pending.Wait(PendingAttaches::OfGroup{std::move(waits), TrainerAttached{},
                                                    DaemonState::Now(), true, "", std::nullopt});
  CHECK(AdmitMember(world.state, User(1)).code() == absl::StatusCode::kResourceExhausted);
  CHECK(AdmitMember(world.state, User(2)).ok());
  CHECK(world.state.members.Lose(first));
  CHECK(AdmitMember(world.state, User(1)).ok());
}

TEST_CASE("Regions of all members of an identity are counted together") {
  World world({.regions = 2});
  const StateLock lock(&world.state.mutex);
  world.MakeGroup("g", "uid:1");
  MemberRecord* const first = world.state.members.Add(world.Trainer(User(1)));
  MemberRecord* const second = world.state.members.Add(world.Trainer(User(1)));
  const MemberRecord* const other = world.state.members.Add(world.Trainer(User(2)));
  first->regions[RegionId(1)] = {};
  CHECK(AdmitRegionOf(world.state, *second).ok());
  second->regions[RegionId(2)] = {};
  CHECK(AdmitRegionOf(world.state, *first).code() == absl::StatusCode::kResourceExhausted);
  CHECK(AdmitRegionOf(world.state, *other).ok());
  first->regions.clear();
  second->regions.clear();
}

// ---- the audit log ----

TEST_CASE("The audit log tells who began an update, and how the call was answered") {
  TempFolder folder;
  const std::string path = folder / "audit";
  const std::unique_ptr<AuditLog> log = std::move(AuditLog::Create({.file = path})).value();
  World world({}, log.get());
  const auto written = [&path, &log] {
    REQUIRE(log->Flush());
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  bool answered = false;
  BeginEvent begin;
  begin.version = Version(7);
  begin.request_id = "r-1";
  const ReplyFunction reply = Audited(
      world.state, "g", begin, User(1),
      [&answered](const absl::Status& status, const ReplyPayload&) { answered = !status.ok(); });
  CHECK(written().empty());
  reply(absl::AbortedError("an engine failed"), EmptyReply{});
  CHECK(answered);
  for (const char* part : {"uid:1", "r-1", "ABORTED", "an engine failed", "Trainer/Begin"}) {
    CHECK(written().find(part) != std::string::npos);
  }
  {
    const StateLock lock(&world.state.mutex);
    GroupRecord* const group = world.MakeGroup("g", "uid:1");
    const MemberRecord* const trainer = world.state.members.Add(world.Trainer(User(1)));
    CHECK(AdmitUpdate(world.state, *trainer, "r-2").ok());
    UpdateEnded ended;
    ended.version = Version(7);
    ended.outcome = Outcome::kCommitted;
    AuditUpdate(world.state, *group, ended);
  }
  CHECK(written().find("committed") != std::string::npos);
  CHECK(written().find("r-2") != std::string::npos);
}

}  // namespace
}  // namespace refitd
