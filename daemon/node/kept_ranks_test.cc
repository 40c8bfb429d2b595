#include "daemon/node/kept_ranks.h"

#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <csignal>
#include <memory>
#include <string>
#include <utility>

#include "tests/aborts.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

using Catch::Contains;
using std::chrono::seconds;

const TimePoint kStart{};

PeerCredentials Self() {
  PeerCredentials self;
  self.pid = getpid();
  self.uid = 7;
  self.pidfd = std::make_shared<const UniqueFd>(OpenPidfd(self.pid));
  return self;
}

// A process that has ended; its number stays taken until the end of the test.
struct Dead {
  Dead() : pid(fork()) {
    if (pid == 0) _exit(0);
    process.pid = pid;
    process.uid = 7;
    process.pidfd = std::make_shared<const UniqueFd>(OpenPidfd(pid));
    siginfo_t ended{};
    REQUIRE(waitid(P_PID, static_cast<id_t>(pid), &ended, WEXITED | WNOWAIT) == 0);
  }
  ~Dead() { waitpid(pid, nullptr, 0); }
  Dead(const Dead&) = delete;
  Dead& operator=(const Dead&) = delete;

  const pid_t pid;
  PeerCredentials process;
};

RegionRecord Side(int64_t bytes, bool keep = true) {
  RegionRecord region;
  region.memory.bytes = bytes;
  region.descriptor = std::make_shared<const UniqueFd>();
  region.for_next_rank = keep;
  return region;
}

// A clean rank, alone in its instance, with one arena.
MemberRecord Rank(const std::string& instance, PeerCredentials process = Self()) {
  MemberRecord record;
  record.group = "g";
  record.engine = true;
  record.instance = instance;
  record.device = "host";
  record.peer.credentials = std::move(process);
  record.regions = {{RegionId(1), Side(100)}, {RegionId(2), Side(100)}};
  auto layout = std::make_shared<Layout>();
  layout->backs = {{RegionId(1), RegionId(2)}};
  record.layout = layout;
  record.layout_digest = 5;
  record.holds = HeldContent{Version(3), 11, "uid:7", 13};
  return record;
}

KeptRank Kept(const std::string& instance, int ends_in = 60) {
  return *KeptOf(Rank(instance), kStart + seconds(ends_in));
}

bool Any(const KeptRank& /*kept*/) { return true; }

TEST_CASE("what is kept of a rank is what its layout named, the front as flips have left it") {
  MemberRecord rank = Rank("a");
  rank.regions.at(RegionId(1)).memory.bytes = 1;
  rank.regions.at(RegionId(2)).memory.bytes = 2;
  for (const uint64_t flips : {0, 1, 2}) {
    rank.flips = flips;
    const auto kept = KeptOf(rank, kStart);
    REQUIRE(kept.has_value());
    REQUIRE(kept->arenas.size() == 1);
    CHECK(kept->arenas[0].front.memory.bytes == (flips == 1 ? 2 : 1));
    CHECK(kept->arenas[0].back.memory.bytes == (flips == 1 ? 1 : 2));
    CHECK(kept->bytes() == 3);
    CHECK(kept->layout_digest == 5);
    CHECK(kept->content == *rank.holds);
  }
}

TEST_CASE(
    "nothing is kept of a rank that is not known to be clean, or whose memory can't be given") {
  const auto keeps = [](const auto& change) {
    MemberRecord rank = Rank("a");
    change(&rank);
    return KeptOf(rank, kStart).has_value();
  };
  CHECK(keeps([](MemberRecord* /*rank*/) {}));
  CHECK_FALSE(keeps([](MemberRecord* r) { r->holds.reset(); }));
  CHECK_FALSE(keeps([](MemberRecord* r) { r->layout = std::make_shared<const Layout>(); }));
  CHECK_FALSE(keeps([](MemberRecord* r) { r->regions.at(RegionId(2)) = Side(100, false); }));
  CHECK_FALSE(keeps([](MemberRecord* r) { r->peer.credentials.reset(); }));
  CHECK_FALSE(keeps([](MemberRecord* r) { r->peer.credentials->pidfd.reset(); }));
}

TEST_CASE("the rank that had arenas, or that comes when their process has ended, finds them") {
  KeptRanks kept;
  CHECK(*kept.Find(Rank("a")) == nullptr);
  const Dead dead;
  CHECK(kept.Keep(Kept("a")).empty());
  CHECK(kept.Keep(*KeptOf(Rank("b", dead.process), kStart)).empty());
  kept.CheckInvariants();
  REQUIRE(kept.Find(Rank("a")).ok());
  CHECK((*kept.Find(Rank("a")))->content.version == Version(3));
  CHECK((*kept.Find(Rank("b")))->instance == "b");
  CHECK(*kept.Find(Rank("c")) == nullptr);
}

TEST_CASE("arenas of another user, process, world or device are refused by name") {
  KeptRanks kept;
  CHECK(kept.Keep(Kept("a")).empty());
  const auto refusal = [&](const auto& change) {
    MemberRecord rank = Rank("a");
    change(&rank);
    return kept.Find(rank).status();
  };
  const absl::Status user = refusal([](MemberRecord* r) { r->peer.credentials->uid = 8; });
  CHECK(absl::IsPermissionDenied(user));
  CHECK_THAT(Message(user), Contains("instance a rank 0 are kept for uid:7, not for uid:8"));
  CHECK(absl::IsPermissionDenied(refusal([](MemberRecord* r) { r->peer = {}; })));
  const absl::Status runs = refusal([](MemberRecord* r) { r->peer.credentials->pid = 1; });
  CHECK(absl::IsFailedPrecondition(runs));
  CHECK_THAT(Message(runs), Contains("still runs"));
  const absl::Status world = refusal([](MemberRecord* r) { r->world_size = 2; });
  CHECK(absl::IsFailedPrecondition(world));
  CHECK_THAT(Message(world), Contains("have world size 1 on host, and the rank 2 on host"));
  CHECK(absl::IsFailedPrecondition(refusal([](MemberRecord* r) { r->device = "GPU-1"; })));
  CHECK(kept.size() == 1);  // nothing has changed
}

TEST_CASE("what is kept ends in the order of time, and a later lease's takes the place") {
  KeptRanks kept;
  CHECK(kept.Keep(Kept("late", 9)).empty());
  CHECK(kept.Keep(Kept("early", 5)).empty());
  CHECK(kept.NextEnd() == kStart + seconds(5));
  const auto replaced = kept.Keep(Kept("early", 20));
  REQUIRE(replaced.size() == 1);
  CHECK(replaced[0].until == kStart + seconds(5));
  CHECK(kept.NextEnd() == kStart + seconds(9));
  CHECK(kept.TakeFirst(Any)->instance == "late");
  CHECK_FALSE(kept.TakeFirst([](const KeptRank& k) { return k.instance == "late"; }).has_value());
  CHECK(kept.TakeAll(Any).size() == 1);
  CHECK_FALSE(kept.NextEnd().has_value());
  CHECK(kept.TakeAll(Any).empty());
}

TEST_CASE("no more than kMaxRanks are kept: the one that would end first gives way (P10)") {
  KeptRanks kept;
  for (size_t i = 0; i < KeptRanks::kMaxRanks; ++i) {
    CHECK(kept.Keep(Kept(std::to_string(i), static_cast<int>(1000 + i))).empty());
  }
  const auto out = kept.Keep(Kept("more", 1));
  REQUIRE(out.size() == 1);
  CHECK(out[0].instance == "0");
  CHECK(kept.size() == KeptRanks::kMaxRanks);
  kept.CheckInvariants();
}

TEST_CASE("CheckInvariants finds arenas that can't be given, and content that can't be compared") {
  for (const bool digest : {false, true}) {
    KeptRanks kept;
    KeptRank wrong = Kept("a");
    if (digest) {
      wrong.content.digest = 0;
    } else {
      wrong.arenas[0].back.descriptor.reset();
    }
    CHECK(kept.Keep(std::move(wrong)).empty());
    CHECK(Aborts([&] { kept.CheckInvariants(); }));
  }
}

}  // namespace
}  // namespace refitd
