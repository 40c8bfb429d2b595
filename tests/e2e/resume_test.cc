// A compiled refit loses an engines' daemon while its bytes cross slow links: the daemon is killed,
// stopped or cut off. The update commits for the other instances and goes on from the first round
// that one of them lacks, so that the trainers' node does not send its bytes again. If the machine
// allows no network namespaces, the test says so and passes.
#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "tests/e2e/client_members.h"
#include "tests/e2e/network.h"

namespace refitd::e2e {
namespace {

using std::chrono::milliseconds;

constexpr int kEngines = 3;
constexpr size_t kVictim = 2;  // node 0 is the trainers', and node i has instance i
constexpr int kMegabits = 4;   // the rate of each link, at which the model takes four seconds
constexpr int64_t kSlotBytes = 64 << 10;
constexpr milliseconds kSilence{5'000};
constexpr milliseconds kUpdate{60'000};
// The daemon is lost when the trainers' node has sent this part of the model. Of the whole model it
// sends at most kMostSent: what is under way at the loss may cross again, and headers count.
constexpr double kLostAt = 0.4;
constexpr double kMostSent = 1.3;

enum class Loss { kKilled, kStopped, kCut };
std::string Name(Loss loss) {
  return loss == Loss::kKilled ? "killed" : loss == Loss::kStopped ? "stopped" : "cut off";
}

std::string NameOf(size_t node) { return fmt::format("n{}", node); }

struct Fleet {
  explicit Fleet(const Star* star) : net(*star) {
    for (size_t node = 0; node <= kEngines; ++node) {
      const std::vector<std::string> flags = {
          "--daemon-id=" + NameOf(node), "--data-interface=v0",
          fmt::format("--listen-tcp={}:7411", Star::AddressOf(node)),
          fmt::format("--peers-silence-ms={}", kSilence.count())};
      daemons.push_back(std::make_unique<Daemon>(flags, net[node].launcher()));
    }
    client::TrainerOptions options = ShardsOn(*daemons[0]);
    options.connect.spec->min_instances = kEngines;
    options.connect.spec->slot_bytes = kSlotBytes;
    options.connect.spec->slots = 4;
    trainer = std::make_unique<Shards>(options, model, HoldWhole(model));
    REQUIRE(trainer->Register().ok());
    for (size_t node = 1; node <= kEngines; ++node) {
      client::ConnectOptions connect;
      connect.socket = daemons[node]->socket();
      connect.group = "g";
      connect.coordinator = daemons[0]->address();
      connect.reattach = connect.wait = kDeadline;
      ranks.push_back(
          std::make_unique<Rank>(connect, NameOf(node), client::Delivery::kInPlace, model));
    }
  }

  std::future<absl::StatusOr<client::CommitResult>> Start() {
    trainer->Fill(++version);
    return std::async(std::launch::async, [this] {
      return trainer->trainer().Refit({.version = Version(version), .duration = kUpdate});
    });
  }
  // Refits until every instance has committed the same version. A rank checks its bytes then.
  void InstallEverywhere() {
    std::string last;
    const bool everywhere = Eventually([&] {
      const auto result = Start().get();
      last = result.status().ToString();
      if (!result.ok()) return false;
      const auto& all = result->instances;
      return all.size() == kEngines &&
             std::all_of(all.begin(), all.end(), [](const auto& i) { return i.committed; });
    });
    INFO(last << "\n" << daemons[0]->log());
    REQUIRE(everywhere);
    for (const auto& rank : ranks) {
      REQUIRE(rank->Await([&](const Rank::Seen& s) { return s.committed == Version(version); }));
    }
  }
  Rank& rank(size_t node) { return *ranks[node - 1]; }

  const Star& net;
  const Model model = PlainModel(4, 1024, 256);
  int64_t version = 0;
  std::vector<std::unique_ptr<Daemon>> daemons;
  std::unique_ptr<Shards> trainer;
  std::vector<std::unique_ptr<Rank>> ranks;
};

// The round from which the update went on; -1: the log does not say that it went on.
int64_t RoundOfResumption(const std::string& log, int64_t version) {
  const std::string words = fmt::format("the update to version {} goes on from round ", version);
  const size_t at = log.find(words);
  return at == std::string::npos ? -1 : std::stoll(log.substr(at + words.size()));
}

TEST_CASE("an engines' daemon lost while a refit's bytes cross costs its own instance only") {
  const Star net(kEngines + 1);
  if (const std::string why = net.Make(); !why.empty()) {
    WARN("SKIPPED: " << why);
    return;
  }
  Fleet f(&net);
  f.InstallEverywhere();
  const auto bytes = static_cast<double>(ModelBytes(f.model));
  Daemon& home = *f.daemons[0];
  Daemon& victim = *f.daemons[kVictim];
  for (const Loss loss : {Loss::kKilled, Loss::kStopped, Loss::kCut}) {
    INFO("the daemon is " << Name(loss));
    if (const std::string why = net.Slow(kMegabits); !why.empty()) {
      WARN("SKIPPED: no slow links here: " << why);
      return;
    }
    const auto sent = [&, before = LinkBytesOf(home.pid()).sent] {
      return static_cast<double>(LinkBytesOf(home.pid()).sent - before) / bytes;
    };
    auto refit = f.Start();
    REQUIRE(Eventually([&] { return sent() >= kLostAt; }));
    if (loss == Loss::kKilled) victim.Kill();
    if (loss == Loss::kStopped) victim.Signal(SIGSTOP);
    if (loss == Loss::kCut) net.Cut(kVictim);
    const double sent_before = sent();
    const auto result = refit.get();
    const double sent_in_all = sent();
    net.Fast();
    INFO(result.status() << "\nsent " << sent_before << " of the model before the loss, "
                         << sent_in_all << " in all\n"
                         << home.log());
    REQUIRE(result.ok());
    CHECK(sent_before < 0.9);  // bytes were moving
    for (const client::InstanceOutcome& instance : result->instances) {
      INFO(instance.instance << ": " << instance.reason);
      CHECK(instance.committed == (instance.instance != NameOf(kVictim)));
      if (instance.committed) continue;
      CHECK_THAT(instance.reason, Catch::Contains("daemon " + NameOf(kVictim)));
    }
    CHECK(RoundOfResumption(home.log(), f.version) >= 1);
    CHECK(sent_in_all < kMostSent);
    for (const size_t node : {size_t{1}, size_t{3}}) {
      REQUIRE(f.rank(node).Await(
          [&](const Rank::Seen& s) { return s.committed == Version(f.version); }));
    }
    CHECK(f.rank(kVictim).seen().committed != Version(f.version));

    if (loss == Loss::kKilled) victim.Restart();
    if (loss == Loss::kStopped) victim.Signal(SIGCONT);
    if (loss == Loss::kCut) net.Join(kVictim);
    f.InstallEverywhere();
  }
}

}  // namespace
}  // namespace refitd::e2e
