// Whoever reaches a listener costs the daemon little, before a call that a rule allows and after
// it: headers without an end, header strings that grow by a few bytes at a time, messages that are
// never finished, and streams that are reset at once. gRPC 1.51 itself takes all of them.
//
// The attackers write HTTP/2 by hand. Their user may use the daemon.
#include <fmt/format.h>
#include <sys/types.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <deque>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/e2e/harness.h"
#include "tests/e2e/http2_flood.h"
#include "tests/e2e/require.h"

namespace refitd::e2e {
namespace {

// A sanitizer keeps freed memory, and shadows all of it.
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define REFITD_SANITIZED 8
#endif
#endif
#if !defined(REFITD_SANITIZED)
#define REFITD_SANITIZED 1
#endif
// The most that an attack may cost the daemon.
constexpr int64_t kGrowth = REFITD_SANITIZED * (int64_t{64} << 20);
constexpr size_t kConnections = 64;  // at a time

// The most memory that the process has had, in bytes.
int64_t PeakMemory(pid_t pid) {
  std::ifstream status(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::stoll(line.substr(6)) * 1024;
  }
  return 0;
}

// A daemon with a group that is being refitted, over a unix socket and over TCP.
struct Victim {
  Victim() {
    REQUIRE(trainer.attached().ok());
    Install(1);  // what an update needs is there before memory is compared
    before = PeakMemory(daemon.pid());
  }
  void Install(int64_t version) {
    const auto bytes = BytesOf(model, version);
    REQUIRE_OK(trainer.Begin(version));
    REQUIRE_OK(trainer.Push(version, InlineBucket(model, bytes, 0, true)));
    REQUIRE_OK(trainer.Commit(version, 1));
  }
  uint16_t port() const {
    const std::string& address = daemon.address();
    return static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
  }
  // Runs the attack on many connections of each kind at a time, which must be ended.
  void Endure(const std::function<bool(Attacker*)>& is_ended, bool allowed) {
    for (const bool tcp : {false, true}) {
      std::deque<Attacker> attackers;
      for (size_t i = 0; i < kConnections; ++i) {
        Attacker& attacker =
            tcp ? attackers.emplace_back(port()) : attackers.emplace_back(daemon.socket());
        if (allowed) REQUIRE(attacker.BeAllowed());
      }
      for (Attacker& attacker : attackers) is_ended(&attacker);
      const auto ended = std::count_if(attackers.begin(), attackers.end(),
                                       [](const Attacker& each) { return each.Closed(); });
      // The last ones may stay that have less than an identity may have.
      CHECK(ended >= static_cast<int64_t>(allowed ? kConnections / 2 : kConnections));
      UNSCOPED_INFO("growth: " << (PeakMemory(daemon.pid()) - before) / 1024 << " KiB");
      CHECK(PeakMemory(daemon.pid()) - before < kGrowth);
    }
    Install(2);
    CHECK(daemon.Stop() == 0);
  }

  Daemon daemon{{"--listen-tcp=127.0.0.1:0"}};
  const Model model = MixedModel();
  RawTrainer trainer{daemon.Connect(), RawTrainer::Hello("g")};
  // Either member may come first and make the group.
  Holder engine{daemon.Connect(), RawEngine::Hello("g", "i"), HoldWhole(model)};
  int64_t before = 0;
};

TEST_CASE("headers without an end took gigabytes before any rule was asked") {
  Victim().Endure(EndlessHeaders, false);
}

TEST_CASE("a header string that grows by a few bytes a frame took time without an end") {
  Victim().Endure(GrowingHeader, false);
}

TEST_CASE("300 unfinished messages took gigabytes before any rule was asked") {
  Victim().Endure(UnfinishedMessages, false);
}

TEST_CASE("streams that are reset at once took the time of all others") {
  Victim().Endure(RapidResets, false);
}

TEST_CASE("streams that took 28 bytes and were reset at once took gigabytes before any rule") {
  Victim().Endure(IndexedResets, false);
}

TEST_CASE("headers without an end took gigabytes after one call that a rule allowed") {
  Victim().Endure(EndlessHeaders, true);
}

TEST_CASE("a header string that grows took time without an end after an allowed call") {
  Victim().Endure(GrowingHeader, true);
}

TEST_CASE("300 unfinished messages took gigabytes after one call that a rule allowed") {
  Victim().Endure(UnfinishedMessages, true);
}

TEST_CASE("streams that are reset at once took gigabytes after one call that a rule allowed") {
  Victim().Endure(RapidResets, true);
  Victim().Endure(IndexedResets, true);
}

TEST_CASE(
    "a call that a rule allows lifts the bound of its connection, over TCP as over the socket") {
  Daemon daemon({"--listen-tcp=127.0.0.1:0,[::1]:0"});
  std::vector<std::shared_ptr<grpc::Channel>> channels = {daemon.Connect()};
  const v1::GetStatusResponse status = daemon.Status();
  for (const std::string& listener : status.listeners()) {
    if (listener.rfind("tcp:", 0) != 0) continue;
    channels.push_back(grpc::CreateChannel(listener.substr(4), grpc::InsecureChannelCredentials()));
  }
  REQUIRE(channels.size() == 3);
  for (size_t i = 0; i < channels.size(); ++i) {
    RawTrainer trainer(channels[i], RawTrainer::Hello(fmt::format("g{}", i)));
    REQUIRE(trainer.attached().ok());
    // More than an unproven connection may bring.
    for (int call = 0; call < 600; ++call) {
      const auto refused = trainer.Abort(1, std::string(400, 'r'));
      REQUIRE(refused.status.error_code() != grpc::StatusCode::UNAVAILABLE);
    }
    CHECK_FALSE(trainer.events().ended());
  }
}

}  // namespace
}  // namespace refitd::e2e
