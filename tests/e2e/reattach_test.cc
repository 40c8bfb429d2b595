// Clients that survive the loss of their daemon: a real daemon is killed, stopped and restarted in
// every phase of an update, while the client library's engines and trainers reattach (`reattach`).
//
// The engines check their own memory whenever they would report good weights: it must hold exactly
// the version that they report, byte for byte (P2).
#include <dirent.h>
#include <signal.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <fstream>
#include <future>
#include <random>
#include <thread>

#include "tests/e2e/client_members.h"

namespace refitd::e2e {
namespace {

using std::chrono::milliseconds;

client::ConnectOptions ConnectTo(const Daemon& daemon, milliseconds reattach = kDeadline) {
  client::ConnectOptions connect;
  connect.socket = daemon.socket();
  connect.group = "g";
  connect.reattach = reattach;
  return connect;
}

// For tests of silence: on a busy machine a live daemon is silent for less than this.
constexpr milliseconds kSilence = 2 * client::kMinSilence;

std::optional<Version> VersionAt(Daemon* daemon, const std::string& instance) {
  const v1::GroupStatus group = daemon->Group("g");
  for (const v1::InstanceStatus& i : group.instances()) {
    if (i.name() == instance && i.has_version()) return Version(i.version());
  }
  return std::nullopt;
}

// A group of one trainer, a registered and a loader engine.
struct Fixture {
  explicit Fixture(milliseconds reattach = kDeadline, milliseconds silence = milliseconds(30'000))
      : pusher(WithSpec(WithSilence(reattach, silence)), model),
        registered(WithSilence(reattach, silence), "in_place", client::Delivery::kInPlace, model),
        loader(WithSilence(reattach, silence), "loader", client::Delivery::kLoader, model) {}

  client::ConnectOptions WithSilence(milliseconds reattach, milliseconds silence) const {
    client::ConnectOptions connect = ConnectTo(daemon, reattach);
    connect.silence = silence;
    return connect;
  }
  static client::ConnectOptions WithSpec(client::ConnectOptions connect) {
    connect.spec =
        client::GroupSpec{.trainer_ranks = 1, .min_instances = 2, .slot_bytes = 65'536, .slots = 4};
    return connect;
  }
  void Installed(int64_t version) {
    const absl::Status installed = pusher.Install(version);
    INFO(installed);
    REQUIRE(installed.ok());
    for (Rank* rank : ranks()) {
      REQUIRE(rank->Await([&](const Rank::Seen& s) { return s.committed == Version(version); }));
    }
  }
  void Back(int times) {
    for (Rank* rank : ranks()) {
      REQUIRE(rank->Await([&](const Rank::Seen& s) { return s.reattached == times; }));
    }
    REQUIRE(Eventually([&] { return pusher.trainer().reattachments() == times; }));
    CHECK(pusher.trainer().health().ok());
  }
  std::vector<Rank*> ranks() { return {&registered, &loader}; }

  const Model model = MixedModel();
  Daemon daemon;
  Pusher pusher;
  Rank registered;
  Rank loader;
};

TEST_CASE("members of a daemon that is killed and started again attach again and go on") {
  Fixture f;
  f.Installed(1);
  const uint64_t before = f.daemon.Group("g").incarnation();
  f.daemon.Kill();
  for (Rank* rank : f.ranks()) {
    REQUIRE(rank->Await([](const Rank::Seen& s) { return s.losses == 1; }));
    CHECK(rank->seen().lost_weights == Weights::kClean);
    CHECK_THAT(rank->seen().reason, Catch::Contains(f.daemon.socket()));
    CHECK(rank->engine().version() == Version(1));
  }
  SECTION("over the file that the killed one left") {}
  SECTION("where the path is missing for a while") {
    REQUIRE(unlink(f.daemon.socket().c_str()) == 0);
  }
  f.daemon.Restart();
  f.Back(1);
  for (const std::string instance : {"in_place", "loader"}) {
    CHECK(VersionAt(&f.daemon, instance) == Version(1));
  }
  // The engines hold a version of the previous incarnation; the group has committed none in its
  // own.
  const v1::GroupStatus group = f.daemon.Group("g");
  CHECK(group.incarnation() != before);
  CHECK_FALSE(group.has_version());
  for (const v1::InstanceStatus& instance : group.instances()) CHECK(instance.origin() == before);
  // The daemon knows nothing from before the restart, and invents nothing.
  const auto outcome = f.pusher.trainer().GetUpdate(Version(1));
  REQUIRE(outcome.ok());
  CHECK(outcome->kind == client::UpdateOutcome::kUnknown);
  CHECK(f.pusher.trainer().group_version() == Version(1));
  // So the next version may be any number.
  f.Installed(1);
  CHECK(f.daemon.Group("g").version() == 1);
  const absl::Status again = f.pusher.Install(1);
  INFO(again);
  CHECK(absl::IsFailedPrecondition(again));
  CHECK_THAT(Message(again), Catch::Contains("holds it") && Catch::Contains("replace"));
  f.Installed(2);
  CHECK(f.daemon.Status().resources().regions() == 2);
}

TEST_CASE("an orderly stop of the daemon is survived as well") {
  Fixture f;
  f.Installed(1);
  CHECK(f.daemon.Stop() == 0);
  f.daemon.Restart();
  f.Back(1);
  f.Installed(2);
}

TEST_CASE("Begin waits for the lease while the daemon is away") {
  Fixture f;
  f.Installed(1);
  f.daemon.Kill();
  REQUIRE(Eventually([&] { return !f.pusher.trainer().health().ok(); }));
  auto installed = std::async(std::launch::async, [&] { return f.pusher.Install(2); });
  f.daemon.Restart();
  const absl::Status status = installed.get();
  INFO(status);
  CHECK(status.ok());
}

TEST_CASE("a rank that has not answered Ready when the daemon dies keeps its version") {
  Fixture f;
  f.Installed(1);
  f.registered.Hold();
  auto installed = std::async(std::launch::async, [&] { return f.pusher.Install(2); });
  REQUIRE(f.registered.Await([](const Rank::Seen& s) { return s.prepares == 2; }));
  f.daemon.Kill();
  // The lease is lost, and its thread has not heard of that.
  REQUIRE(Eventually([&] { return f.registered.engine().weights() == Weights::kClean; }));
  f.registered.Let();
  REQUIRE(f.registered.Await([](const Rank::Seen& s) { return s.losses == 1; }));
  CHECK(f.registered.seen().lost_weights == Weights::kClean);
  f.daemon.Restart();
  f.Back(1);
  CHECK(f.registered.seen().held == Version(1));
  // Begin was repeated with the next lease.
  const absl::Status status = installed.get();
  INFO(status);
  CHECK(status.ok());
  f.Installed(3);
}

TEST_CASE(
    "ranks of an update whose daemon dies after Ready have unknown weights until the next commit") {
  Fixture f;
  f.Installed(1);
  Pusher::Step moment = Pusher::kBegun;
  SECTION("before any data") {}
  SECTION("after the first bucket") { moment = Pusher::kFirstBucket; }
  SECTION("after the last bucket") { moment = Pusher::kAllBuckets; }
  const absl::Status failed = f.pusher.Install(2, [&](Pusher::Step step) {
    if (step == moment) f.daemon.Kill();
  });
  INFO(failed);
  CHECK((absl::IsUnavailable(failed) || absl::IsAborted(failed)));
  CHECK_THAT(Message(failed), Catch::Contains(f.daemon.socket()));
  for (Rank* rank : f.ranks()) {
    REQUIRE(rank->Await([](const Rank::Seen& s) { return s.losses == 1; }));
    CHECK(rank->seen().lost_weights == Weights::kUnknown);
    CHECK_FALSE(rank->engine().version().has_value());
  }
  f.daemon.Restart();
  f.Back(1);
  for (Rank* rank : f.ranks()) {
    CHECK(rank->engine().weights() == Weights::kUnknown);
    CHECK_FALSE(rank->seen().held.has_value());
  }
  for (const std::string instance : {"in_place", "loader"}) {
    CHECK_FALSE(VersionAt(&f.daemon, instance).has_value());
  }
  f.Installed(2);
}

TEST_CASE(
    "after a commit the ranks that heard of it hold the version, others have unknown weights") {
  Fixture f;
  REQUIRE(f.pusher
              .Install(1,
                       [&](Pusher::Step step) {
                         if (step == Pusher::kCommitted) f.daemon.Kill();
                       })
              .ok());
  for (Rank* rank : f.ranks()) {
    REQUIRE(rank->Await([](const Rank::Seen& s) { return s.losses == 1; }));
    const bool heard = rank->seen().committed == Version(1);
    CHECK(rank->seen().lost_weights == (heard ? Weights::kClean : Weights::kUnknown));
    CHECK(rank->engine().version() == rank->seen().committed);
  }
  f.daemon.Restart();
  f.Back(1);
  CHECK(f.pusher.trainer().group_version() == Version(1));
  f.Installed(2);
}

TEST_CASE(
    "a daemon that is stopped counts as lost after the limit for silence, and is found again") {
  Fixture f(kDeadline, kSilence);
  f.Installed(1);
  const absl::Status failed = f.pusher.Install(2, [&](Pusher::Step step) {
    if (step == Pusher::kFirstBucket) f.daemon.Signal(SIGSTOP);
  });
  INFO(failed);
  CHECK(absl::IsUnavailable(failed));
  for (Rank* rank : f.ranks()) {
    REQUIRE(rank->Await([](const Rank::Seen& s) { return s.losses == 1; }));
    CHECK(rank->seen().lost_weights == Weights::kUnknown);
  }
  f.daemon.Signal(SIGCONT);
  f.Back(1);
  f.Installed(3);
  CHECK(f.daemon.Group("g").updates_aborted() == 1);
}

TEST_CASE("a lease that is idle for longer than the limit for silence lives") {
  Fixture f(kDeadline, kSilence);
  f.Installed(1);
  // The client pings more often than a server allows by default; only the end of a lease would show
  // that.
  const auto end = std::chrono::steady_clock::now() + 2 * kSilence;
  while (f.registered.seen().losses == 0 && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(kPoll);
  }
  for (Rank* rank : f.ranks()) CHECK(rank->seen().losses == 0);
  CHECK(f.pusher.trainer().health().ok());
}

TEST_CASE("when no daemon comes back within the limit, members end and say why") {
  Fixture f(milliseconds(300));
  f.Installed(1);
  f.daemon.Kill();
  for (Rank* rank : f.ranks()) {
    REQUIRE(rank->Await([](const Rank::Seen& s) { return !s.ended.ok(); }));
    CHECK(absl::IsUnavailable(rank->seen().ended));
    CHECK_THAT(Message(rank->seen().ended), Catch::Contains("reattach"));
    CHECK_THAT(Message(rank->seen().ended), Catch::Contains(f.daemon.socket()));
    CHECK(rank->engine().version() == Version(1));
  }
  CHECK(absl::IsUnavailable(f.pusher.Install(2)));
  CHECK_THAT(Message(f.pusher.trainer().health()), Catch::Contains("reattach"));
}

TEST_CASE("without reattach the lease's end is the end") {
  Fixture f(milliseconds(0));
  f.Installed(1);
  f.daemon.Kill();
  f.daemon.Restart();
  for (Rank* rank : f.ranks()) {
    REQUIRE(rank->Await([](const Rank::Seen& s) { return !s.ended.ok(); }));
    CHECK(rank->seen().losses == 0);
  }
  CHECK(absl::IsUnavailable(f.pusher.Install(2)));
  CHECK(f.daemon.Resources().members() == 0);
}

TEST_CASE("members can go while their daemon is away, or says nothing") {
  auto f = std::make_unique<Fixture>(std::chrono::hours(1));
  f->Installed(1);
  SECTION("away") {
    f->daemon.Kill();
    for (Rank* rank : f->ranks()) {
      REQUIRE(rank->Await([](const Rank::Seen& s) { return s.losses == 1; }));
    }
  }
  SECTION("silent, to a member that comes back") {
    f->daemon.Kill();
    f->daemon.Restart();
    f->daemon.Signal(SIGSTOP);
    for (Rank* rank : f->ranks()) {
      REQUIRE(rank->Await([](const Rank::Seen& s) { return s.losses == 1; }));
    }
  }
  auto gone = std::async(std::launch::async, [&] { f.reset(); });
  CHECK(gone.wait_for(kDeadline) == std::future_status::ready);
}

TEST_CASE("a daemon that serves one node alone refuses a coordinator") {
  Daemon daemon;
  client::ConnectOptions connect = ConnectTo(daemon);
  connect.spec = client::GroupSpec{};
  connect.coordinator = "127.0.0.1:1";
  const absl::Status refused = client::Trainer::Attach({.connect = connect}).status();
  INFO(refused);
  CHECK_FALSE(refused.ok());
}

// ---- over two daemons ----

std::vector<std::string> NodeFlags(const std::string& id) {
  return {"--listen-tcp=127.0.0.1:0", "--daemon-id=" + id, "--peers-silence-ms=1000"};
}

TEST_CASE("a call that its coordinator's silence ends is made again when it is there again") {
  const Model model = MixedModel();
  Daemon home(NodeFlags("home"));
  Daemon far(NodeFlags("far"));
  client::ConnectOptions connect = ConnectTo(far);
  connect.coordinator = home.address();
  client::TrainerOptions options{.connect = connect};
  options.connect.spec = client::GroupSpec{};
  Shards shards(options, model, HoldWhole(model));
  REQUIRE(shards.Register().ok());
  shards.Fill(1);
  Rank rank(connect, "i", client::Delivery::kInPlace, model);
  rank.Hold();
  std::unique_ptr<client::Update> update;
  std::future<absl::Status> call;
  bool registered_only = false;
  SECTION("Begin") {
    call = std::async(std::launch::async, [&] {
      auto begun = shards.trainer().Begin({.version = Version(1)});
      if (begun.ok()) update = *std::move(begun);
      return begun.status();
    });
    REQUIRE(rank.Await([](const Rank::Seen& s) { return s.prepares == 1; }));
    home.Signal(SIGSTOP);
  }
  SECTION("Refit") {
    call = std::async(std::launch::async,
                      [&] { return shards.trainer().Refit({.version = Version(1)}).status(); });
    REQUIRE(rank.Await([](const Rank::Seen& s) { return s.prepares == 1; }));
    home.Signal(SIGSTOP);
  }
  SECTION("Register") {
    home.Signal(SIGSTOP);
    call = std::async(std::launch::async, [&] { return shards.Register(); });
    registered_only = true;
  }
  REQUIRE(Eventually([&] { return !shards.trainer().health().ok(); }));
  home.Signal(SIGCONT);
  rank.Let();
  const absl::Status called = call.get();
  INFO(called);
  CHECK(called.ok());
  CHECK(shards.trainer().reattachments() == 1);
  absl::Status committed;
  if (update != nullptr) committed = update->Refit().status();
  if (registered_only) committed = shards.trainer().Refit({.version = Version(1)}).status();
  INFO(committed);
  CHECK(committed.ok());
  CHECK(rank.Await([](const Rank::Seen& s) { return s.committed == Version(1); }));
}

// ---- nothing is left behind in the client ----

struct Footprint {
  int descriptors = 0;
  int mappings = 0;  // mappings of memfds
  int threads = 0;
};

int EntriesOf(const char* folder) {
  DIR* dir = opendir(folder);
  REQUIRE(dir != nullptr);
  int count = 0;
  while (readdir(dir) != nullptr) ++count;
  closedir(dir);
  return count;
}

Footprint Own() {
  Footprint own{EntriesOf("/proc/self/fd"), 0, EntriesOf("/proc/self/task")};
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/memfd:") != std::string::npos) ++own.mappings;
  }
  return own;
}

TEST_CASE("20 daemons killed at seeded moments cost the client nothing and tear nothing") {
  constexpr int kRounds = 20;
  constexpr int kWarmRounds = 2;
  // gRPC's own descriptors and threads come and go with load; a leak of one for each round would be
  // 18.
  constexpr int kSpareThreads = 8;
  constexpr int kSpareDescriptors = 4;
  std::mt19937 random(20);
  Fixture f;
  f.Installed(1);
  int64_t version = 1;
  Footprint before;
  for (int round = 1; round <= kRounds; ++round) {
    // The daemon is killed while idle, right after a step, or beside the next step, after `yields`
    // yields.
    const int moment = static_cast<int>(random() % 9);
    const int yields = static_cast<int>(random() % 3'000);
    INFO("round " << round << ", moment " << moment << ", yields " << yields);
    ++version;
    std::future<void> killed;
    const auto kill_at = [&](int step) {
      if (moment == 2 * step) f.daemon.Kill();
      if (moment != 2 * step + 1) return;
      killed = std::async(std::launch::async, [&] {
        for (int i = 0; i < yields; ++i) std::this_thread::yield();
        f.daemon.Signal(SIGKILL);
      });
    };
    const absl::Status installed =
        f.pusher.Install(version, [&](Pusher::Step step) { kill_at(static_cast<int>(step)); });
    if (killed.valid()) killed.get();
    UNSCOPED_INFO(installed);
    f.daemon.Kill();  // does nothing if the daemon was killed before
    f.daemon.Restart();
    f.Back(round);
    f.Installed(++version);
    if (round == kWarmRounds) before = Own();
  }
  // Asynchronous closing needs a moment.
  const bool clean = Eventually([&] {
    const Footprint now = Own();
    return now.descriptors <= before.descriptors + kSpareDescriptors &&
           now.mappings <= before.mappings && now.threads <= before.threads + kSpareThreads;
  });
  const Footprint now = Own();
  INFO("descriptors " << before.descriptors << " -> " << now.descriptors << ", mappings "
                      << before.mappings << " -> " << now.mappings << ", threads " << before.threads
                      << " -> " << now.threads);
  CHECK(clean);
  CHECK(f.daemon.Resources().regions() == 2);
  CHECK(f.daemon.Resources().members() == 3);
}

}  // namespace
}  // namespace refitd::e2e
