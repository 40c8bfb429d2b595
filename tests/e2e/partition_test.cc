// The network between two daemons fails in each phase of an update. The test makes two network
// namespaces, joined by a veth pair, with addresses that exist nowhere else.
//
// Whatever fails, no engine takes a mixed or uncommitted version for good (Rank checks), calls end
// within the configured limits with a status that names who is missing, and after healing the next
// update commits. If the machine allows no namespaces, the tests say so and pass.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <future>
#include <map>
#include <random>
#include <thread>

#include "tests/e2e/client_members.h"
#include "tests/e2e/network.h"

namespace refitd::e2e {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// A live process on a busy machine is not silent for so long.
constexpr milliseconds kSilence{3'000};
constexpr milliseconds kWire{6'000};
// The time that calls get beyond the limits: a second for the layers above, and the rest for a busy
// machine. A daemon's default limits are longer than all of it.
constexpr milliseconds kSlack{1'000 + 19'000};
constexpr milliseconds kHealed{25'000};
constexpr char kCoordinator[] = "10.77.0.1:7411";
// Slow enough that a fault can hit a part on the wire; a part's 256 KiB take a second.
constexpr char kSlow[] = "tbf rate 2mbit burst 32kb latency 400ms";
constexpr int64_t kPartBytes = 256 << 10;

enum class Fault { kCut, kBlackHole, kDeafAlpha, kDeafBeta };
std::string Name(Fault fault) {
  switch (fault) {
    case Fault::kCut:
      return "the link is cut";
    case Fault::kBlackHole:
      return "nothing arrives";
    case Fault::kDeafAlpha:
      return "nothing arrives at the coordinator";
    case Fault::kDeafBeta:
      return "nothing arrives at the other daemon";
  }
  return "";
}

// alpha 10.77.0.1 -- veth -- 10.77.0.2 beta
class Network {
 public:
  // Empty: the network is ready. Else why this machine can have none.
  std::string Make() {
    if (!alpha.valid() || !beta.valid()) return "network namespaces can't be made here";
    for (const std::string& command :
         {std::string("ip link set lo up"), std::string("ip link add v0 type veth peer name v1"),
          "ip link set v1 netns " + beta.path(), std::string("ip addr add 10.77.0.1/24 dev v0"),
          std::string("ip link set v0 up")}) {
      if (std::string failed = alpha.Run(command); !failed.empty()) return failed;
    }
    for (const char* command : {"ip link set lo up", "ip link set v1 name v0",
                                "ip addr add 10.77.0.2/24 dev v0", "ip link set v0 up"}) {
      if (std::string failed = beta.Run(command); !failed.empty()) return failed;
    }
    return "";
  }

  void Break(Fault fault) const {
    if (fault == Fault::kCut) alpha.Must("ip link set v0 down");
    // Frames for an address that nothing has are dropped where they arrive.
    static constexpr char kNobody[] =
        "ip neigh replace {} lladdr 02:00:00:00:00:99 dev v0 nud permanent";
    if (fault == Fault::kBlackHole || fault == Fault::kDeafBeta) {
      alpha.Must(fmt::format(kNobody, "10.77.0.2"));
    }
    if (fault == Fault::kBlackHole || fault == Fault::kDeafAlpha) {
      beta.Must(fmt::format(kNobody, "10.77.0.1"));
    }
  }
  void Heal(Fault fault) const {
    if (fault == Fault::kCut) alpha.Must("ip link set v0 up");
    if (fault == Fault::kBlackHole || fault == Fault::kDeafBeta) {
      alpha.Must("ip neigh del 10.77.0.2 dev v0");
    }
    if (fault == Fault::kBlackHole || fault == Fault::kDeafAlpha) {
      beta.Must("ip neigh del 10.77.0.1 dev v0");
    }
  }
  // False: this kernel has no token bucket filter.
  bool Slow() const {
    for (const Namespace* side : {&alpha, &beta}) {
      const std::string failed = side->Run(fmt::format("tc qdisc replace dev v0 root {}", kSlow));
      if (failed.empty()) continue;
      WARN("SKIPPED in part: no slow link here: " << failed);
      Fast();
      return false;
    }
    return true;
  }
  void Fast() const {
    for (const Namespace* side : {&alpha, &beta}) side->Run("tc qdisc del dev v0 root");
  }

  Namespace alpha;
  Namespace beta;
};

std::vector<std::string> Flags(const std::string& id) {
  return {"--daemon-id=" + id, "--data-interface=v0",
          fmt::format("--peers-silence-ms={}", kSilence.count()),
          fmt::format("--peers-wire-ms={}", kWire.count())};
}
std::vector<std::string> CoordinatorFlags() {
  std::vector<std::string> flags = Flags("alpha");
  flags.insert(flags.end(), {fmt::format("--listen-tcp={}", kCoordinator)});
  return flags;
}

enum class Side { kAlpha, kBeta };

// Engines on both sides and a trainer on one of them; alpha coordinates.
struct Fixture {
  Fixture(const Network* network, Side trainer_side)
      : side(trainer_side),
        net(*network),
        alpha(CoordinatorFlags(), net.alpha.launcher()),
        beta(Flags("beta"), net.beta.launcher()),
        pusher(WithSpec(At(trainer_side)), model),
        near(At(Side::kAlpha), "near", client::Delivery::kInPlace, model),
        far(At(Side::kBeta), "far", client::Delivery::kInPlace, model),
        loader(At(Side::kBeta), "loader", client::Delivery::kLoader, model) {}

  client::ConnectOptions At(Side where) const {
    client::ConnectOptions connect;
    connect.socket = where == Side::kAlpha ? alpha.socket() : beta.socket();
    connect.group = "g";
    if (where == Side::kBeta) connect.coordinator = kCoordinator;
    connect.reattach = kDeadline;
    connect.wait = milliseconds(20'000);
    return connect;
  }
  static client::ConnectOptions WithSpec(client::ConnectOptions connect) {
    connect.spec = client::GroupSpec{
        .trainer_ranks = 1, .min_instances = 3, .slot_bytes = kPartBytes, .slots = 4};
    return connect;
  }
  std::vector<Rank*> ranks() { return {&near, &far, &loader}; }
  Daemon& root() { return side == Side::kAlpha ? alpha : beta; }

  // How often each rank at beta has lost its lease so far.
  std::map<Rank*, int> BetasLosses() {
    return {{&far, far.seen().losses}, {&loader, loader.seen().losses}};
  }
  // Waits until all know that the daemons are apart: if the network healed earlier, one of them
  // might find that out only in the next update.
  void AwaitBetasLoss(const std::map<Rank*, int>& losses) {
    for (const auto& [rank, before] : losses) {
      REQUIRE(rank->Await([&, b = before](const Rank::Seen& s) { return s.losses > b; }));
    }
    REQUIRE(Eventually([&] {
      const v1::GroupStatus group = alpha.Group("g");
      return group.instances_size() == 1 && group.update().outcome() != v1::UPDATE_OUTCOME_RUNNING;
    }));
  }

  void Installed(int64_t v) {
    const absl::Status installed = pusher.Install(v);
    INFO(installed << "\nalpha:\n" << alpha.log() << "\nbeta:\n" << beta.log());
    REQUIRE(installed.ok());
    for (Rank* rank : ranks()) {
      REQUIRE(rank->Await([&](const Rank::Seen& s) { return s.committed == Version(v); }));
    }
    good = v;
  }

  const Side side;
  const Network& net;
  const Model model = PlainModel(8, 512, 256);
  Daemon alpha;
  Daemon beta;
  Pusher pusher;
  Rank near;
  Rank far;
  Rank loader;
  int64_t good = 0;  // the last committed version
};

enum class Phase { kPrepare, kBetweenBuckets, kOnTheWire, kVerify };
std::string Name(Phase phase) {
  switch (phase) {
    case Phase::kPrepare:
      return "while an engine prepares";
    case Phase::kBetweenBuckets:
      return "between buckets";
    case Phase::kOnTheWire:
      return "while a part is on the wire";
    case Phase::kVerify:
      return "before Commit";
  }
  return "";
}

// Breaks the network in this phase of an update, checks all answers, and heals it; the next update
// commits.
void Round(Fixture* f, Phase phase, Fault fault) {
  INFO(Name(fault) << " " << Name(phase));
  const int64_t version = f->good + 1;
  const std::map<Rank*, int> losses = f->BetasLosses();
  std::atomic<Clock::time_point> broke{Clock::time_point()};
  const auto break_now = [&] {
    f->net.Break(fault);
    broke = Clock::now();
  };
  const auto since = [&] {
    return std::chrono::duration_cast<milliseconds>(Clock::now() - broke.load());
  };
  if (phase == Phase::kPrepare) f->far.Hold();
  if (phase == Phase::kOnTheWire && !f->net.Slow()) return;
  const int64_t sent = LinkBytesOf(f->root().pid()).sent;
  auto installing = std::async(std::launch::async, [&] {
    return f->pusher.Install(version, [&](Pusher::Step step) {
      if (step == Pusher::kFirstBucket && phase == Phase::kBetweenBuckets) break_now();
      if (step == Pusher::kAllBuckets && phase == Phase::kVerify) break_now();
    });
  });
  if (phase == Phase::kPrepare) {
    CHECK(Eventually([&] { return f->far.engine().weights() == Weights::kPaused; }));
    break_now();
  } else if (phase == Phase::kOnTheWire) {
    CHECK(Eventually(
        [&] { return LinkBytesOf(f->root().pid()).sent > sent + kPartBytes + kPartBytes / 2; }));
    break_now();
  }
  // If its lease ends in Begin, Begin waits for the next lease, so until the network is healed.
  const bool waits = phase == Phase::kPrepare && f->side == Side::kBeta;
  const absl::Status failed =
      waits ? absl::UnavailableError(std::string("it waits for ") + kCoordinator)
            : installing.get();
  const milliseconds took = since();
  INFO(failed << " after " << took.count() << " ms\nalpha:\n"
              << f->alpha.log() << "\nbeta:\n"
              << f->beta.log());
  CHECK(took < std::max(kSilence, kWire) + kSlack);
  // Beta's engines are evicted, and the other engines get the update, unless the trainer is at
  // beta.
  const bool goes_on = f->side == Side::kAlpha;
  CHECK(failed.ok() == goes_on);
  if (goes_on) {
    f->good = version;
    // The trainer may hear of the commit first.
    REQUIRE(f->near.Await([&](const Rank::Seen& s) { return s.committed == Version(version); }));
    CHECK(f->near.engine().version() == Version(version));
  } else {
    CHECK_THAT(Message(failed), Catch::Contains(f->side == Side::kAlpha ? "beta" : kCoordinator));
    CHECK(f->near.engine().version() != Version(version));
  }
  // Beta's engines hear within the same limit that the coordinator is gone. An engine that answered
  // Ready has unknown weights.
  if (phase == Phase::kPrepare) {
    // The lease is lost, and its thread has not heard of that.
    CHECK(Eventually([&] { return f->far.engine().weights() == Weights::kClean; }));
    f->far.Let();
  }
  f->AwaitBetasLoss(losses);
  for (Rank* rank : {&f->far, &f->loader}) {
    CHECK_THAT(rank->seen().reason, Catch::Contains(kCoordinator));
  }
  CHECK(since() < std::max(kSilence, kWire) + kSlack);
  if (phase == Phase::kPrepare) CHECK(f->far.seen().lost_weights == Weights::kClean);
  for (Rank* rank : {&f->far, &f->loader}) CHECK(rank->engine().version() != Version(version));
  CHECK(f->alpha.Group("g").version() == f->good);

  if (phase == Phase::kOnTheWire) f->net.Fast();
  f->net.Heal(fault);
  const auto healed = Clock::now();
  if (waits) {
    const absl::Status installed = installing.get();
    INFO(installed);
    REQUIRE(installed.ok());
  }
  f->Installed(version + 1);
  CHECK(Clock::now() - healed < kHealed);
  for (Rank* rank : f->ranks()) CHECK(rank->engine().version() == Version(version + 1));
}

// The daemons' resources before anything fails. A leak of one descriptor for each round is more
// than the spare ones.
struct Footprint {
  v1::ResourceStatus alpha;
  v1::ResourceStatus beta;
};
constexpr int64_t kSpareDescriptors = 5;

void NothingLeaked(Fixture* f, const Footprint& before) {
  Footprint now;
  const auto same = [](const v1::ResourceStatus& was, const v1::ResourceStatus& is) {
    return is.members() == was.members() && is.regions() == was.regions() &&
           is.region_bytes() == was.region_bytes() && is.pool_bytes() == was.pool_bytes() &&
           is.descriptors() <= was.descriptors() + kSpareDescriptors;
  };
  // Asynchronous closing needs a moment.
  const bool clean = Eventually([&] {
    now = {f->alpha.Resources(), f->beta.Resources()};
    return same(before.alpha, now.alpha) && same(before.beta, now.beta);
  });
  INFO("alpha: " << before.alpha.ShortDebugString() << " -> " << now.alpha.ShortDebugString());
  INFO("beta: " << before.beta.ShortDebugString() << " -> " << now.beta.ShortDebugString());
  CHECK(clean);
}

#define NETWORK_OR_RETURN(net)                            \
  Network net;                                            \
  if (const std::string why = net.Make(); !why.empty()) { \
    WARN("SKIPPED: " << why);                             \
    return;                                               \
  }

void AllPhases(Side side) {
  NETWORK_OR_RETURN(net);
  Fixture f(&net, side);
  f.Installed(1);
  const Footprint before{f.alpha.Resources(), f.beta.Resources()};
  Round(&f, Phase::kBetweenBuckets, Fault::kCut);
  Round(&f, Phase::kPrepare, Fault::kCut);
  Round(&f, Phase::kPrepare, Fault::kDeafAlpha);
  Round(&f, Phase::kBetweenBuckets, Fault::kBlackHole);
  Round(&f, Phase::kBetweenBuckets, Fault::kDeafBeta);
  Round(&f, Phase::kOnTheWire, Fault::kCut);
  Round(&f, Phase::kOnTheWire, Fault::kBlackHole);
  Round(&f, Phase::kVerify, Fault::kBlackHole);
  Round(&f, Phase::kVerify, Fault::kDeafAlpha);
  Round(&f, Phase::kVerify, Fault::kDeafBeta);
  NothingLeaked(&f, before);
}

TEST_CASE("the network fails in each phase of an update that the coordinator's trainer pushes") {
  AllPhases(Side::kAlpha);
}

TEST_CASE("the network fails in each phase of an update that another daemon's trainer pushes") {
  AllPhases(Side::kBeta);
}

TEST_CASE("a slow link only slows an update") {
  NETWORK_OR_RETURN(net);
  Fixture f(&net, Side::kAlpha);
  f.Installed(1);
  if (!net.Slow()) return;
  const auto begun = Clock::now();
  f.Installed(2);
  const auto took = Clock::now() - begun;
  // That is longer than the limits of silence and of one collective, which do not run while bytes
  // move.
  CHECK(took > std::max(kSilence, kWire));
  for (Rank* rank : f.ranks()) CHECK(rank->seen().losses == 0);
}

TEST_CASE("the network is cut at seeded moments: what was committed is held, nothing else") {
  NETWORK_OR_RETURN(net);
  Fixture f(&net, Side::kAlpha);
  f.Installed(1);
  std::mt19937 random(7);
  constexpr int kRounds = 6;
  int committed = 0;
  for (int round = 0; round < kRounds; ++round) {
    const std::chrono::microseconds moment(random() % 20'000);
    const Fault fault = static_cast<Fault>(random() % 4);
    INFO("round " << round << ", " << Name(fault) << " after " << moment.count() << " us");
    const int64_t version = f.good + 1;
    const std::map<Rank*, int> losses = f.BetasLosses();
    auto installing = std::async(std::launch::async, [&] { return f.pusher.Install(version); });
    // Thousands of yields would take minutes on a busy machine.
    std::this_thread::sleep_for(moment);
    net.Break(fault);
    const absl::Status installed = installing.get();
    if (installed.ok()) f.good = version;
    committed += installed.ok();
    f.AwaitBetasLoss(losses);
    for (Rank* rank : f.ranks()) {
      if (!installed.ok()) CHECK(rank->engine().version() != Version(version));
    }
    CHECK(f.alpha.Group("g").version() == f.good);
    net.Heal(fault);
    const auto healed = Clock::now();
    f.good = version;
    f.Installed(version + 1);
    CHECK(Clock::now() - healed < kHealed);
  }
  UNSCOPED_INFO(committed << " of " << kRounds << " committed");
}

}  // namespace
}  // namespace refitd::e2e
