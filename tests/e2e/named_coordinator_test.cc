// Groups whose coordinator is a name: real daemons, in a mount namespace with a hosts file of the
// test's own, are killed and drained while the name is pointed at another daemon. The client
// library's engines and trainers reattach.
//
// The engines check their own memory whenever they would report good weights: it must hold exactly
// the version that they report, byte for byte (P2).
#include <fmt/format.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "tests/e2e/client_members.h"

namespace refitd::e2e {
namespace {

constexpr char kName[] = "coordinator.refitd.test";

// A hosts file that processes see as /etc/hosts. No name server answers them, and gRPC's own
// resolver would wait for one.
class Hosts {
 public:
  Hosts() { std::ofstream(folder_ / "resolv.conf").flush(); }
  // The file keeps its inode, which is mounted.
  void Point(const std::string& address) const {
    std::ofstream(folder_ / "hosts") << "127.0.0.1 localhost\n" << address << " " << kName << "\n";
  }
  std::vector<std::string> launcher() const {
    const std::string script = fmt::format(
        "mount --bind '{0}/hosts' /etc/hosts && mount --bind '{0}/resolv.conf' /etc/resolv.conf && "
        "GRPC_DNS_RESOLVER=native exec \"$@\"",
        folder_.path());
    return {"/usr/bin/unshare", "--mount", "/bin/sh", "-c", script, "sh"};
  }
  // Why such processes can't be made here; empty: they can.
  std::string Missing() const {
    std::vector<std::string> argv = launcher();
    argv.push_back("/bin/true");
    Process process(argv);
    return process.WaitExit() == 0 ? "" : process.Errors() + " ";
  }

 private:
  const TempFolder folder_;
};

#define HOSTS_OR_RETURN(hosts)                                 \
  const Hosts hosts;                                           \
  hosts.Point("127.0.0.1");                                    \
  if (const std::string why = hosts.Missing(); !why.empty()) { \
    WARN("SKIPPED: no mount namespace can be made: " << why);  \
    return;                                                    \
  }

std::string PortOf(const Daemon& daemon) {
  return daemon.address().substr(daemon.address().rfind(':') + 1);
}

// Daemons a and b answer to the name in turn, at one port; c never does. The trainer is at c,
// engines are at b and at c.
struct Fleet {
  explicit Fleet(const Hosts& name)
      : hosts(name),
        a(FlagsOf("a", 1, "0"), name.launcher()),
        b(FlagsOf("b", 2, PortOf(a)), name.launcher()),
        c(FlagsOf("c", 3, "0"), name.launcher()) {
    hosts.Point(OwnLoopback(1));
    pusher = std::make_unique<Pusher>(ConnectTo(c, true), model);
    Add(b, "at-b", client::Delivery::kInPlace);
    Add(c, "at-c", client::Delivery::kLoader);
  }
  static std::vector<std::string> FlagsOf(const std::string& id, int loopback,
                                          const std::string& port) {
    return {"--listen-tcp=" + OwnLoopback(loopback) + ":" + port, "--daemon-id=" + id};
  }
  std::string named() const { return std::string(kName) + ":" + PortOf(a); }
  client::ConnectOptions ConnectTo(const Daemon& daemon, bool spec = false) const {
    client::ConnectOptions connect;
    connect.socket = daemon.socket();
    connect.group = "g";
    connect.coordinator = named();
    connect.reattach = kDeadline;
    if (spec) {
      connect.spec = client::GroupSpec{
          .trainer_ranks = 1, .min_instances = 2, .slot_bytes = 65'536, .slots = 4};
    }
    return connect;
  }
  Rank* Add(const Daemon& daemon, const std::string& name, client::Delivery delivery) {
    ranks.push_back(std::make_unique<Rank>(ConnectTo(daemon), name, delivery, model));
    return ranks.back().get();
  }
  // The name that leads elsewhere, and where, as the daemon's status says it; empty: it does not.
  static std::vector<std::string> MovedAt(Daemon& daemon) {
    const v1::GetStatusResponse status = daemon.Status();
    if (status.groups_size() != 1 || !status.groups(0).has_coordinator_moved()) return {};
    const v1::CoordinatorMoved& moved = status.groups(0).coordinator_moved();
    std::vector<std::string> all = {moved.name()};
    all.insert(all.end(), moved.addresses().begin(), moved.addresses().end());
    return all;
  }
  // Installs the next version. Updates that the loss of a coordinator ends are begun again.
  void Install() {
    absl::Status last;
    const bool installed = Eventually([&] {
      last = pusher->Install(++version);
      return last.ok();
    });
    INFO("a's log:\n" << a.log() << "\nb's log:\n" << b.log() << "\nc's log:\n" << c.log());
    INFO(last);
    REQUIRE(installed);
    for (const auto& rank : ranks) {
      REQUIRE(rank->Await([&](const Rank::Seen& s) { return s.committed == Version(version); }));
    }
  }
  // Waits until all engines know that the coordinator is lost, and what that made of their weights.
  void Lost(Weights weights) {
    for (const auto& rank : ranks) {
      REQUIRE(rank->Await([](const Rank::Seen& s) { return s.losses == 1; }));
      CHECK(rank->seen().lost_weights == weights);
    }
  }
  void CameBackWith(Version held) {
    for (const auto& rank : ranks) {
      REQUIRE(rank->Await([](const Rank::Seen& s) { return s.reattached == 1; }));
      CHECK(rank->seen().held == held);
    }
  }

  const Hosts& hosts;
  const Model model = MixedModel();
  int64_t version = 0;
  Daemon a;
  Daemon b;
  Daemon c;
  std::unique_ptr<Pusher> pusher;
  std::vector<std::unique_ptr<Rank>> ranks;
};

TEST_CASE("where the coordinator's name is pointed elsewhere, engines come with their version") {
  HOSTS_OR_RETURN(hosts);
  Fleet f(hosts);
  f.Install();
  const uint64_t before = f.a.Group("g").incarnation();
  REQUIRE(before != 0);
  CHECK(f.b.Group("g").coordinator() == f.named());
  CHECK(f.c.Group("g").coordinator() == f.named());
  bool a_lives = false;

  SECTION("the old daemon died before") {
    f.a.Kill();
    f.Lost(Weights::kClean);
    hosts.Point(OwnLoopback(2));
  }
  SECTION("the old daemon drains after") {
    hosts.Point(OwnLoopback(2));
    CHECK(f.a.Stop() == 0);
    f.Lost(Weights::kClean);
  }
  SECTION("the old daemon goes on without the group") {
    a_lives = true;
    CHECK(f.MovedAt(f.a).empty());
    CHECK(f.MovedAt(f.c).empty());
    hosts.Point(OwnLoopback(2));
    // Members stay where they are linked, and both daemons say that the name leads elsewhere.
    const std::vector<std::string> to = {f.named(), OwnLoopback(2)};
    for (Daemon* daemon : {&f.a, &f.c}) {
      CHECK(Eventually([&] { return f.MovedAt(*daemon) == to; }));
    }
    CHECK(f.a.Group("g").incarnation() == before);
    const auto drained = f.a.Call(&v1::Operator::Stub::Drain, v1::DrainRequest());
    REQUIRE(drained.ok());
    REQUIRE(drained.response.drained_size() == 1);
    CHECK(drained.response.drained(0) == "g");
    f.Lost(Weights::kClean);
    CHECK(f.a.Group("g").name().empty());
  }
  f.CameBackWith(Version(1));
  // b answers to the name itself, so the group of its own members lives there as well.
  const v1::GroupStatus after = f.b.Group("g");
  CHECK(after.coordinator().empty());
  CHECK(after.incarnation() != before);
  CHECK_FALSE(after.has_version());
  CHECK(after.instances_size() == 2);
  CHECK(after.owner() == fmt::format("uid:{}", getuid()));
  f.Install();
  CHECK(f.b.Group("g").version() == f.version);
  CHECK(f.c.Group("g").coordinator() == f.named());

  // The old daemon's members find the group where the name points.
  if (!a_lives) f.a.Restart();
  f.Add(f.a, "at-a", client::Delivery::kInPlace);
  CHECK(f.a.Group("g").coordinator() == f.named());
  f.Install();
}

TEST_CASE("an update whose coordinator dies is lost, and the next one commits where the name is") {
  HOSTS_OR_RETURN(hosts);
  Fleet f(hosts);
  f.Install();
  Pusher::Step moment = Pusher::kBegun;
  SECTION("before any data") {}
  SECTION("after the first bucket") { moment = Pusher::kFirstBucket; }
  SECTION("after the last bucket") { moment = Pusher::kAllBuckets; }
  const absl::Status failed = f.pusher->Install(++f.version, [&](Pusher::Step step) {
    if (step == moment) f.a.Kill();
  });
  INFO(failed);
  CHECK((absl::IsUnavailable(failed) || absl::IsAborted(failed)));
  hosts.Point(OwnLoopback(2));
  f.Lost(Weights::kUnknown);
  f.Install();
  CHECK(f.b.Group("g").version() == f.version);
}

TEST_CASE("a coordinator that is started anew makes the group again") {
  HOSTS_OR_RETURN(hosts);
  Fleet f(hosts);
  f.Install();
  const uint64_t before = f.a.Group("g").incarnation();
  f.a.Kill();
  f.Lost(Weights::kClean);
  f.a.Restart();
  f.CameBackWith(Version(1));
  f.Install();
  CHECK(f.a.Group("g").incarnation() != before);
}

TEST_CASE("several coordinators are refused by name: there is no choice among candidates") {
  Daemon daemon({"--listen-tcp=" + OwnLoopback(1) + ":0"});
  client::ConnectOptions connect;
  connect.socket = daemon.socket();
  connect.group = "g";
  connect.coordinator = "a:7411,b:7411";
  connect.reattach = kDeadline;  // does not help
  const absl::Status refused =
      client::Engine::Attach({.connect = connect, .instance = "i"}).status();
  INFO(refused);
  CHECK(absl::IsInvalidArgument(refused));
  CHECK_THAT(Message(refused), Catch::Contains("'a:7411,b:7411' names several daemons"));
}

}  // namespace
}  // namespace refitd::e2e
