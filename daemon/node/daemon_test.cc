// Tests the daemon with real links between daemons of this process; members are sinks.
#include "daemon/node/daemon.h"

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/node/parts_test_util.h"

namespace refitd {
namespace {

using Catch::Contains;
using std::chrono::milliseconds;

class UpdateInbox : public UpdateSink {
 public:
  void Send(UpdateNews /*news*/) override { ++sent_; }
  void End(absl::Status /*status*/) override {}
  int sent() const { return sent_; }

 private:
  std::atomic<int> sent_{0};
};

// ---- joining ----

TEST_CASE("A member without a spec that waits at a joined daemon holds up none that brings one") {
  DaemonParts a("a");
  DaemonParts b("b");
  const auto engine = b.AttachEngine("g", "i", std::nullopt, &a);
  CHECK(b.Has("g"));
  CHECK_FALSE(a.Has("g"));
  const auto trainer = b.AttachTrainer("g", Spec(), &a);
  CHECK(Eventually([&] { return trainer.inbox->welcomed() && engine.inbox->welcomed(); }));
  CHECK(a.Has("g"));
}

TEST_CASE("Each member that waits at a joined daemon has its own deadline") {
  DaemonParts a("a");
  DaemonParts b("b");
  const auto patient = b.AttachEngine("g", "patient", std::nullopt, &a);
  const auto hasty = b.AttachEngine("g", "hasty", std::nullopt, &a, /*wait=*/milliseconds(20));
  CHECK(hasty.inbox->Ended().code() == absl::StatusCode::kNotFound);
  CHECK_FALSE(patient.inbox->end().has_value());
  // The reverse order: the member that came first has the shorter wait.
  const auto first = b.AttachEngine("h", "hasty", std::nullopt, &a, /*wait=*/milliseconds(20));
  const auto second = b.AttachEngine("h", "patient", std::nullopt, &a);
  CHECK(first.inbox->Ended().code() == absl::StatusCode::kNotFound);
  CHECK_FALSE(second.inbox->end().has_value());
  const auto g = a.AttachTrainer("g");
  const auto h = a.AttachTrainer("h");
  CHECK(Eventually([&] { return patient.inbox->welcomed() && second.inbox->welcomed(); }));
}

TEST_CASE("A member whose spec is not the group's is refused at a joined daemon, the others stay") {
  DaemonParts a("a");
  DaemonParts b("b");
  const auto engine = b.AttachEngine("g", "i", std::nullopt, &a);
  const auto trainer = b.AttachTrainer("g", Spec(), &a);
  const auto other = b.AttachEngine("g", "other", Spec(3), &a);
  const absl::Status refused = other.inbox->Ended();
  CHECK(refused.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(Message(refused), Contains("spec"));
  CHECK(Eventually([&] { return trainer.inbox->welcomed() && engine.inbox->welcomed(); }));
}

TEST_CASE("A daemon stops joining when the last member that waited for it goes") {
  DaemonParts a("a");
  DaemonParts b("b");
  const auto engine = b.AttachEngine("g", "i", std::nullopt, &a);
  b.daemon().calls().Gone(engine.id, "it left");
  CHECK(Eventually([&] { return b.groups() == 0; }));
}

// ---- who may join ----

TEST_CASE("A group that demands encryption takes daemons whose data plane encrypts, and no other") {
  DaemonOptions encrypting;
  encrypting.clear_wire = "";
  GroupSpec demanding = Spec();
  demanding.encrypted_data = true;
  DaemonParts a("a", encrypting);
  DaemonParts b("b", encrypting);
  const auto joined = b.AttachEngine("g", "i", demanding, &a);
  CHECK(Eventually([&] { return joined.inbox->welcomed(); }));

  DaemonParts clear("c");
  const auto refused = clear.AttachEngine("g", "j", demanding, &a);
  CHECK(refused.inbox->Ended().code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(Message(refused.inbox->Ended()),
             Contains("spec.encrypted_data: group 'g'") && Contains("daemon c is in the clear"));
  CHECK(Eventually([&] { return clear.groups() == 0; }));
  // A coordinator that does not encrypt takes no daemon in, and its own members stay.
  const auto own = clear.AttachTrainer("h", demanding);
  CHECK(Eventually([&] { return own.inbox->welcomed(); }));
  const auto other = b.AttachEngine("h", "i", demanding, &clear);
  CHECK(other.inbox->Ended().code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(Message(other.inbox->Ended()), Contains("daemon c is in the clear"));
  CHECK_FALSE(own.inbox->end().has_value());
  // Without the demand the same daemons join.
  const auto plain = clear.AttachEngine("plain", "i", Spec(), &a);
  CHECK(Eventually([&] { return plain.inbox->welcomed(); }));
}

TEST_CASE("A second daemon with a live one's id is refused, and taken in when that one has gone") {
  DaemonParts a("a");
  DaemonParts live("b");
  const auto engine = live.AttachEngine("g", "i", Spec(), &a);
  REQUIRE(Eventually([&] { return engine.inbox->welcomed(); }));

  DaemonParts same_id("b");
  const auto hasty = same_id.AttachEngine("g", "j", Spec(), &a, /*wait=*/milliseconds(50));
  const absl::Status refused = hasty.inbox->Ended();
  CHECK(refused.code() == absl::StatusCode::kAlreadyExists);
  CHECK_THAT(Message(refused), Contains("'b' is that of the daemon at 127.0.0.1:") &&
                                   Contains("the one at 127.0.0.1:") && Contains("try again"));
  CHECK_FALSE(engine.inbox->end().has_value());

  const auto patient = same_id.AttachEngine("g", "j", Spec(), &a);
  live.daemon().calls().Gone(engine.id,
                             "it left");  // the last member there, so its daemon leaves
  CHECK(Eventually([&] { return patient.inbox->welcomed(); }));
}

TEST_CASE("limits.max_members counts members of joined daemons, and refuses them by name") {
  DaemonOptions options;
  options.max_members = 2;
  DaemonParts a("a", options);
  DaemonParts b("b");
  const auto first = b.AttachEngine("g", "first", Spec(), &a);
  const auto second = b.AttachEngine("g", "second", Spec(), &a);
  REQUIRE(Eventually([&] { return first.inbox->welcomed() && second.inbox->welcomed(); }));
  const auto third = b.AttachEngine("g", "third", Spec(), &a);
  const auto here = a.AttachEngine("g", "here", Spec());
  for (const absl::Status& status : {third.inbox->Ended(), here.inbox->Ended()}) {
    CHECK(status.code() == absl::StatusCode::kResourceExhausted);
    CHECK_THAT(Message(status), Contains("limits.max_members") && Contains("takes 2"));
  }
  b.daemon().calls().Gone(first.id, "it left");
  CHECK(Eventually([&] {
    const auto again = a.AttachEngine("g", "again", Spec());
    return again.inbox->welcomed();
  }));
}

TEST_CASE("A member whose report does not fit on the link is refused with the limit, others stay") {
  DaemonOptions options;
  options.message_bytes = 1 << 20;
  DaemonParts a("a", options);
  DaemonParts b("b");
  const auto first = b.AttachEngine("g", "first", Spec(), &a);
  REQUIRE(Eventually([&] { return first.inbox->welcomed(); }));
  std::vector<std::string> manifest;
  for (int i = 0; i < 8000; ++i) manifest.push_back(fmt::format("{:0>200}", i));
  const auto large =
      b.AttachEngine("g", "large", Spec(), &a, kPatience, /*rank=*/0, /*world_size=*/1, manifest);
  const absl::Status refused = large.inbox->Ended();
  CHECK(refused.code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(Message(refused), Contains("message_bytes"));
  // The daemon has forgotten the refused member, and the link goes on.
  const auto second = b.AttachEngine("g", "second", Spec(), &a);
  CHECK(Eventually([&] { return second.inbox->welcomed(); }));
  CHECK_FALSE(first.inbox->end().has_value());
}

// ---- watching ----

TEST_CASE("A watcher makes no view of an update for each of 5,000 ranks that get ready") {
  constexpr int kRanks = 5000;
  DaemonOptions options;
  options.max_members = kRanks + 1;
  DaemonParts a("a", options);
  const auto trainer = a.AttachTrainer("g");
  REQUIRE(trainer.inbox->welcomed());
  std::vector<Attached> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.push_back(a.AttachEngine("g", "i", Spec(), nullptr, Duration(0), rank, kRanks));
  }
  const auto updates = std::make_shared<UpdateInbox>();
  REQUIRE(a.daemon().operators().Watch({"", std::chrono::hours(1), false}, updates).ok());

  const WelcomeNews lease = trainer.inbox->welcome();
  BeginEvent begin;
  begin.version = Version(1);
  begin.tensor_count = 1;
  begin.duration = std::chrono::hours(1);
  std::atomic<bool> begun{false};
  a.daemon().calls().Call(
      a.daemon().NewCall(),
      Caller{{}, lease.token, lease.incarnation, static_cast<int>(lease.protocol)}, begin,
      [&begun](const absl::Status& status, const ReplyPayload&) { begun = status.ok(); });
  const auto views = [&a] {
    const StateLock lock(&a.state().mutex);
    return a.state().watchers.views();
  };
  const int64_t before = views();
  const UpdateId update = ranks[0].inbox->Last<SendPrepare>()->update;
  for (const Attached& rank : ranks) {
    a.daemon().calls().HandleEngineEvent(rank.id, ReadyEvent{rank.id, update});
  }
  CHECK(begun);
  // At most one view was made, for the change that the last Ready made.
  CHECK(views() - before <= 1);
  CHECK(updates->sent() >= 2);  // told of that change and of the beginning
}

// ---- groups without members ----

TEST_CASE("A group is given up some time after its last member left, one with a member is not") {
  DaemonOptions options;
  options.group_idle = std::chrono::milliseconds(20);
  DaemonParts a("a", options);
  const auto stays = a.AttachTrainer("stays");
  const auto goes = a.AttachTrainer("goes");
  REQUIRE(goes.inbox->welcomed());
  CHECK(a.groups() == 2);
  a.daemon().calls().Detached(goes.id);
  CHECK(Eventually([&] { return !a.Has("goes"); }));
  CHECK(a.Has("stays"));
  a.daemon().calls().Detached(stays.id);
  CHECK(Eventually([&] { return a.groups() == 0; }));
}

TEST_CASE("A group that was created and never joined is given up as well") {
  DaemonOptions options;
  options.group_idle = std::chrono::milliseconds(20);
  DaemonParts a("a", options);
  REQUIRE(a.daemon().operators().CreateGroup("g", Spec(), false, "", "uid:1").ok());
  CHECK(Eventually([&] { return a.groups() == 0; }));
}

TEST_CASE("The run beyond max_groups takes the place of the group that was empty for the longest") {
  DaemonOptions options;
  options.max_groups = 2;
  DaemonParts a("a", options);
  const auto first = a.AttachTrainer("first");
  const auto second = a.AttachTrainer("second");
  const auto refused = a.AttachTrainer("third");
  CHECK(refused.inbox->Ended().code() == absl::StatusCode::kResourceExhausted);
  a.daemon().calls().Detached(second.id);
  a.daemon().calls().Detached(first.id);
  const auto third = a.AttachTrainer("third");
  CHECK(third.inbox->welcomed());
  CHECK(a.Has("first"));
  CHECK_FALSE(a.Has("second"));
}

TEST_CASE("A group without members takes no staging from a run that needs it") {
  DaemonOptions options;
  options.max_pool_bytes = 2 * kSlotBytes;
  DaemonParts a("a", options);
  const auto first = a.AttachTrainer("first");
  CHECK(a.AttachTrainer("second").inbox->Ended().code() == absl::StatusCode::kResourceExhausted);
  a.daemon().calls().Detached(first.id);
  CHECK(a.AttachTrainer("second").inbox->welcomed());
}

TEST_CASE("An empty group's staging pool is freed at once, and made again when it is needed") {
  DaemonParts a("a");
  const auto map = [&a](const Attached& engine) {
    Token token{};
    const std::string bytes = engine.inbox->welcome().token;
    REQUIRE(bytes.size() == token.size());
    std::copy(bytes.begin(), bytes.end(), token.begin());
    return a.daemon().memory().MapPool(token, {}).status();
  };
  for (int round = 0; round < 2; ++round) {
    const auto engine = a.AttachEngine("g", "i", Spec());
    REQUIRE(engine.inbox->welcomed());
    CHECK(map(engine).ok());
    CHECK(a.pool_bytes() == 2 * kSlotBytes);
    a.daemon().calls().Detached(engine.id);
    CHECK(a.pool_bytes() == 0);
    CHECK(a.Has("g"));
  }
}

}  // namespace
}  // namespace refitd
