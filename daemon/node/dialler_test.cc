#include "daemon/node/dialler.h"

#include <catch2/catch.hpp>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace refitd {
namespace {

using Catch::Contains;
using std::chrono::milliseconds;
using std::chrono::seconds;

const TimePoint kNow{std::chrono::hours(1)};

class Sink : public MemberSink {
 public:
  void Send(MemberNews /*news*/) override {}
  void End(absl::Status status) override { end = std::move(status); }
  std::optional<absl::Status> end;
};

// A group "g" that is being joined at "b:1". No link is really made: the test itself reports what
// links would report.
struct World : DialHost {
  World()
      : dialler(
            {.daemon_id = "a", .boot_id = "life", .message_bytes = 1 << 20},
            [this](PeerDial dial, PeerLinkCallbacks callbacks) {
              dials.push_back({std::move(dial), std::move(callbacks)});
              return nullptr;
            },
            this, &mutex) {
    FollowerOptions options;
    options.name = "g";
    options.coordinator_address = "b:1";
    options.next_update = [] { return UpdateId(1); };
    group = groups.Follow(std::move(options));
  }
  void LinkIsUp(const DialTry& of, const LinkUp& /*up*/) override { heard.push_back(of); }
  void LinkSays(const DialTry& of, PeerCommand /*command*/) override { heard.push_back(of); }
  void LinkIsLost(const DialTry& of, absl::Status /*status*/) override { heard.push_back(of); }

  std::shared_ptr<Sink> Wait(int wait_s, std::optional<GroupSpec> spec = {}) {
    auto sink = std::make_shared<Sink>();
    MemberRecord record;
    record.id = MemberId(++members);
    record.group = "g";
    record.engine = true;
    record.sink = sink;
    waiters.Wait(Waiters::OfGroup{std::move(record), EngineAttached{}, kNow + seconds(wait_s),
                                  wait_s > 0, "b:1", std::move(spec)});
    return sink;
  }
  bool Fail(const absl::Status& status, bool goes_on = true, TimePoint now = kNow) {
    const bool waited = dialler.TakeFailure(group, status, goes_on, now, &waiters);
    groups.CheckInvariants();
    waiters.CheckInvariants();
    return waited;
  }

  struct Dialled {
    PeerDial dial;
    PeerLinkCallbacks callbacks;
  };
  std::vector<Dialled> dials;
  std::vector<DialTry> heard;
  Mutex mutex;
  uint64_t members = 0;
  Peers peers;
  Waiters waiters;
  Groups groups{{}, &peers, &waiters};
  Dialler dialler;
  GroupRecord* group = nullptr;
};

TEST_CASE("a try names this daemon, and carries what its waiting members wish") {
  World world;
  GroupSpec spec;
  spec.trainer_ranks = 2;
  world.Wait(7, spec);
  world.dialler.Dial(world.group, world.waiters, kNow);
  REQUIRE(world.dials.size() == 1);
  const PeerDial& dial = world.dials[0].dial;
  CHECK(dial.address == "b:1");
  CHECK(dial.group == "g");
  CHECK(dial.daemon_id == "a");
  CHECK(dial.boot_id == "life");
  CHECK(dial.limits.message_bytes == 1 << 20);
  CHECK(dial.wait == seconds(7));
  REQUIRE(dial.spec.has_value());
  CHECK(dial.spec->trainer_ranks == 2);
  CHECK(world.group->join.dialled_spec);
}

TEST_CASE("what an earlier try of the group says is told apart") {
  World world;
  world.Wait(7);
  world.dialler.Dial(world.group, world.waiters, kNow);
  world.dialler.Dial(world.group, world.waiters, kNow);
  world.dials[0].callbacks.on_command(PeerPing{1});
  world.dials[1].callbacks.on_command(PeerPing{1});
  REQUIRE(world.heard.size() == 2);
  CHECK(Dialler::Current(world.heard[0], &world.groups) == nullptr);
  CHECK(Dialler::Current(world.heard[1], &world.groups) == world.group);
  const std::unique_ptr<GroupRecord> gone = world.groups.Remove("g");
  CHECK(Dialler::Current(world.heard[1], &world.groups) == nullptr);
}

TEST_CASE("a group that does not exist yet is tried again for those who wait (P4)") {
  World world;
  const auto at_once = world.Wait(0);
  const auto patient = world.Wait(5);
  world.dialler.Dial(world.group, world.waiters, kNow);
  CHECK(world.Fail(absl::NotFoundError("no such group")));
  CHECK(world.dials.size() == 2);
  REQUIRE(at_once->end.has_value());
  CHECK(at_once->end->code() == absl::StatusCode::kNotFound);
  CHECK_THAT(std::string(at_once->end->message()),
             Contains("group g: the coordinator at b:1 could not be joined: no such group"));
  CHECK_FALSE(patient->end.has_value());
  CHECK_FALSE(world.Fail(absl::NotFoundError("no such group"), true, kNow + seconds(5)));
  CHECK(patient->end.has_value());
  CHECK(world.dials.size() == 2);
}

TEST_CASE("a refused spec ends the members that brought one, and the others try without") {
  World world;
  const auto brings = world.Wait(5, GroupSpec());
  const auto without = world.Wait(5);
  world.dialler.Dial(world.group, world.waiters, kNow);
  CHECK(world.Fail(absl::FailedPreconditionError("another spec")));
  CHECK(brings->end.has_value());
  CHECK_FALSE(without->end.has_value());
  REQUIRE(world.dials.size() == 2);
  CHECK_FALSE(world.dials[1].dial.spec.has_value());
  CHECK(world.dials[1].dial.number > world.dials[0].dial.number);
}

TEST_CASE("a daemon whose id is still linked pauses before the next try, and says why it waits") {
  World world;
  const auto patient = world.Wait(5);
  world.dialler.Dial(world.group, world.waiters, kNow);
  CHECK(world.Fail(absl::AlreadyExistsError("an older link")));
  CHECK(world.dials.size() == 1);
  REQUIRE(world.group->join.redial.has_value());
  const TimePoint redial = *world.group->join.redial;
  CHECK(world.groups.NextDeadline() == redial);
  world.dialler.RedialIfDue(world.groups, world.waiters, redial - milliseconds(1));
  CHECK(world.dials.size() == 1);
  world.dialler.RedialIfDue(world.groups, world.waiters, redial);
  CHECK(world.dials.size() == 2);
  CHECK_FALSE(world.group->join.redial.has_value());
  CHECK(Dialler::LateStatus(world.waiters.of_group()[0], world.groups).code() ==
        absl::StatusCode::kAlreadyExists);
}

TEST_CASE("a daemon that ends lets nobody wait on") {
  World world;
  const auto patient = world.Wait(5);
  world.dialler.Dial(world.group, world.waiters, kNow);
  CHECK_FALSE(world.Fail(absl::NotFoundError("no such group"), /*goes_on=*/false));
  CHECK(patient->end.has_value());
}

TEST_CASE("while a try waits for the group itself, its members are not late before it (P4)") {
  World world;
  world.Wait(5);
  world.Wait(0);
  const Waiters::Expiry expiry = Dialler::ExpiryOf(world.groups);
  world.dialler.Dial(world.group, world.waiters, kNow);
  // The try ends with the patient member's wait, and its end refuses that member, unless it comes
  // too late.
  const Duration grace = PeerLinkLimits().join + kPeerEndLimit;
  CHECK(expiry(world.waiters.of_group()[0]) == kNow + seconds(5) + grace);
  // The other member gets the time that joining takes.
  CHECK(expiry(world.waiters.of_group()[1]) == kNow + grace);
  CHECK(world.Fail(absl::AlreadyExistsError("an older link")));
  CHECK(expiry(world.waiters.of_group()[0]) == kNow + seconds(5));
  CHECK(Dialler::LateStatus(Waiters::OfGroup{}, world.groups).code() ==
        absl::StatusCode::kNotFound);
}

TEST_CASE("the last link's report ends the wait for links") {
  World world;
  world.Wait(5);
  world.dialler.Dial(world.group, world.waiters, kNow);
  world.dials[0].callbacks.on_lost(absl::UnavailableError("gone"));
  MutexLock lock(&world.mutex);
  world.dialler.AwaitLinks(&world.mutex);
  CHECK(world.heard.size() == 1);
}

}  // namespace
}  // namespace refitd
