#include "daemon/node/watchers.h"

#include <catch2/catch.hpp>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace refitd {
namespace {

using std::chrono::milliseconds;

// A group whose update the test sets.
class Machine : public GroupMachine {
 public:
  explicit Machine(std::string name) : name_(std::move(name)) {}
  void Handle(MachineEvent& /*event*/, TimePoint /*now*/, MachineActions* /*actions*/) override {}
  std::optional<TimePoint> NextDeadline() const override { return std::nullopt; }
  const std::string& name() const override { return name_; }
  uint64_t incarnation() const override { return 1; }
  const GroupSpec& spec() const override { return spec_; }
  bool has_members() const override { return true; }
  bool has_trainers() const override { return true; }
  const std::string& owner() const override { return owner_; }
  bool update_running() const override { return running; }
  bool is_coordinator() const override { return true; }
  absl::Status CanRegisterLayout(MemberId /*member*/) const override { return absl::OkStatus(); }
  std::optional<Version> version() const override { return std::nullopt; }
  MachineView View(TimePoint /*now*/) const override { return {}; }
  std::optional<UpdateView> ViewLatest(TimePoint /*now*/) const override {
    UpdateView view;
    view.id = mark->id;
    view.state = mark->state;
    return view;
  }
  std::optional<UpdateMark> MarkLatest() const override { return mark; }
  UpdateStatistics Statistics() const override { return {}; }
  PastUpdate Past(Version /*version*/) const override { return {}; }
  const ReadinessBook* readiness() const override { return nullptr; }
  void CheckInvariants() const override {}

  bool running = false;
  std::optional<UpdateMark> mark;

 private:
  const std::string name_;
  const std::string owner_;
  const GroupSpec spec_;
};

class Sink : public UpdateSink {
 public:
  void Send(UpdateNews news) override {
    told.push_back(news.group + " " + std::string(news.update.state));
  }
  void End(absl::Status status) override { end = std::move(status); }

  std::vector<std::string> told;
  std::optional<absl::Status> end;
};

struct World {
  Machine a{"a"};
  Machine b{"b"};
  PeerSessions sessions;
  PendingAttaches pending;
  Groups groups{{}, &sessions, &pending};
  Watchers watchers{Duration(0), &groups, &pending};
  TimePoint now{};
  std::shared_ptr<Sink> sink = std::make_shared<Sink>();

  Watchers::Machines all() const { return {&a, &b}; }
  uint64_t Watch(const std::string& group, bool until_idle = false) {
    const absl::StatusOr<uint64_t> id =
        watchers.Add({group, milliseconds(100), until_idle}, sink, all(), now);
    REQUIRE(id.ok());
    watchers.CheckInvariants();
    return *id;
  }
  void Set(Machine* machine, uint64_t update, std::string_view state, bool running) {
    machine->mark = UpdateMark{UpdateId(update), state};
    machine->running = running;
    watchers.Changed(*machine, all(), now);
    watchers.CheckInvariants();
  }
};

TEST_CASE("each change is sent once, to those who watch that group") {
  World world;
  world.Watch("a");
  CHECK(world.sink->told.empty());
  world.Set(&world.a, 1, "preparing", true);
  world.Set(&world.a, 1, "preparing", true);
  world.Set(&world.b, 2, "preparing", true);
  world.Set(&world.a, 1, "transferring", true);
  CHECK(world.sink->told == std::vector<std::string>{"a preparing", "a transferring"});
  CHECK(world.watchers.views() == 2);
}

TEST_CASE("a new watcher gets a running update at once, and no update that has ended") {
  World world;
  world.Set(&world.a, 1, "committed", false);
  world.Set(&world.b, 2, "preparing", true);
  world.Watch("");
  CHECK(world.sink->told == std::vector<std::string>{"b preparing"});
}

TEST_CASE("progress of a running update is sent when the interval has passed, and not before") {
  World world;
  world.Set(&world.a, 1, "preparing", true);
  world.Watch("a");
  REQUIRE(world.sink->told.size() == 1);
  REQUIRE(world.watchers.NextProgress().has_value());
  CHECK(*world.watchers.NextProgress() == world.now + milliseconds(100));
  world.now += milliseconds(99);
  world.watchers.Progress(world.all(), world.now);
  CHECK(world.sink->told.size() == 1);
  world.now += milliseconds(1);
  world.watchers.Progress(world.all(), world.now);
  CHECK(world.sink->told.size() == 2);
  CHECK(*world.watchers.NextProgress() == world.now + milliseconds(100));

  world.Set(&world.a, 1, "committed", false);
  CHECK(world.sink->told.size() == 3);
  world.now += milliseconds(100);
  world.watchers.Progress(world.all(), world.now);
  CHECK(world.sink->told.size() == 3);
}

TEST_CASE("one view serves all watchers, and none is made for nobody") {
  World world;
  world.Set(&world.a, 1, "preparing", true);
  CHECK(world.watchers.views() == 0);
  for (int i = 0; i < 5; ++i) world.Watch("a");
  const int64_t before = world.watchers.views();
  world.Set(&world.a, 1, "transferring", true);
  CHECK(world.watchers.views() == before + 1);
  CHECK(world.sink->told.size() == 10);
}

TEST_CASE("a watcher that watches until nothing runs ends with OK, and is forgotten") {
  World world;
  world.Set(&world.a, 1, "preparing", true);
  world.Set(&world.b, 2, "preparing", true);  // a group that nobody watches keeps nobody waiting
  world.Watch("a", /*until_idle=*/true);
  CHECK_FALSE(world.sink->end.has_value());
  world.Set(&world.a, 1, "committed", false);
  CHECK(world.sink->told.back() == "a committed");
  REQUIRE(world.sink->end.has_value());
  CHECK(world.sink->end->ok());
  CHECK(world.watchers.empty());
}

TEST_CASE("a group that is made again under its name is watched from its start") {
  World world;
  world.Watch("a");
  world.Set(&world.a, 1, "committed", false);
  REQUIRE(world.sink->told.size() == 1);
  world.watchers.Forget("a");
  world.Set(&world.a, 1, "committed", false);
  CHECK(world.sink->told.size() == 2);
}

TEST_CASE("watchers beyond the limit are refused, and all end with the daemon") {
  World world;
  const auto watch = [&world](const std::string& identity) {
    return world.watchers
        .Add({"", milliseconds(100), false, identity}, world.sink, world.all(), world.now)
        .status();
  };
  for (size_t i = 0; i < Watchers::kMaxWatchers / 2; ++i) REQUIRE(watch("uid:1").ok());
  // One identity leaves places for others.
  CHECK(watch("uid:1").message() ==
        "32 callers watch already, of which uid:1 has 32, the most that one identity may have");
  for (size_t i = 0; i < Watchers::kMaxWatchers / 2; ++i) REQUIRE(watch("uid:2").ok());
  const absl::Status refused = watch("uid:3");
  CHECK(refused.code() == absl::StatusCode::kResourceExhausted);
  CHECK(refused.message() == "64 callers watch already");
  world.watchers.EndAll(absl::UnavailableError("the daemon stops"));
  CHECK(world.watchers.empty());
  REQUIRE(world.sink->end.has_value());
  CHECK(world.sink->end->code() == absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace refitd
