#include "daemon/node/operators.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <memory>
#include <string>

#include "daemon/node/parts_test_util.h"

namespace refitd {
namespace {

using Catch::Contains;

class UpdateInbox : public UpdateSink {
 public:
  void Send(UpdateNews news) override {
    CHECK(news.group == "g");
    ++sent;
  }
  void End(absl::Status /*status*/) override {}
  std::atomic<int> sent{0};
};

TEST_CASE("a group is created once; another spec means another group of that name") {
  DaemonParts parts;
  const auto create = [&](const GroupSpec& spec) {
    return parts.operators().CreateGroup("g", spec, /*replace=*/false, "", "uid:1");
  };
  const absl::StatusOr<Operators::Created> made = create(Spec());
  REQUIRE(made.ok());
  CHECK(made->created);
  const absl::StatusOr<Operators::Created> again = create(Spec());
  REQUIRE(again.ok());
  CHECK_FALSE(again->created);
  CHECK(again->incarnation == made->incarnation);
  CHECK(create(Spec(5)).status().code() == absl::StatusCode::kAlreadyExists);
}

TEST_CASE("a group that operators create lets in the members that waited for it") {
  DaemonParts parts;
  const Attached waits = parts.AttachEngine("g", "i", std::nullopt);
  REQUIRE(parts.operators().CreateGroup("g", Spec(), false, "", "uid:1").ok());
  CHECK(waits.inbox->welcomed());
}

TEST_CASE("a group is replaced once for a request id, and its trainers attach again (P3)") {
  DaemonParts parts;
  const Attached trainer = parts.AttachTrainer("g");
  const Attached engine = parts.AttachEngine("g", "i", Spec());
  const uint64_t before = trainer.inbox->welcome().incarnation;
  const auto replace = [&](const std::string& request) {
    return parts.operators().CreateGroup("g", Spec(), /*replace=*/true, request, "uid:1");
  };
  const absl::StatusOr<Operators::Created> replaced = replace("r1");
  REQUIRE(replaced.ok());
  CHECK(replaced->incarnation != before);
  CHECK_THAT(Message(trainer.inbox->Ended()), Contains("replaced: attach again"));
  CHECK_FALSE(engine.inbox->end().has_value());
  CHECK(replace("r1")->incarnation == replaced->incarnation);
  CHECK(replace("r2")->incarnation != replaced->incarnation);
}

TEST_CASE("a group with members is not deleted, an empty one is") {
  DaemonParts parts;
  CHECK(parts.operators().DeleteGroup("g").code() == absl::StatusCode::kNotFound);
  const Attached trainer = parts.AttachTrainer("g");
  CHECK_THAT(Message(parts.operators().DeleteGroup("g")), Contains("group 'g' has 1 members"));
  parts.calls().Detached(trainer.id);
  CHECK(parts.operators().DeleteGroup("g").ok());
  CHECK_FALSE(parts.Has("g"));
}

TEST_CASE("a running update is aborted with the operator's reason (P2)") {
  DaemonParts parts;
  const Attached trainer = parts.AttachTrainer("g");
  const Attached engine = parts.AttachEngine("g", "i", Spec());
  const auto abort = [&](const std::string& group) {
    Answer answer;
    const CallId call = parts.daemon().NewCall();
    parts.operators().Ask(call, group, OperatorAbort{call, "it takes too long"}, answer.function());
    return answer.status();
  };
  CHECK(abort("h").code() == absl::StatusCode::kNotFound);
  CHECK_FALSE(abort("g").ok());  // no update runs
  const Answer begun = parts.Begin(trainer, 1);
  REQUIRE(engine.inbox->Last<SendPrepare>().has_value());
  CHECK(abort("g").ok());
  CHECK(begun.status().code() == absl::StatusCode::kAborted);
  CHECK_THAT(Message(begun.status()), Contains("it takes too long"));
  CHECK_THAT(engine.inbox->Last<SendAborted>()->reason, Contains("it takes too long"));
  CHECK(parts.operators().PastOf("g", 0, Version(1))->update.outcome == Outcome::kAborted);
}

TEST_CASE("members are shown with what this daemon knows of them") {
  DaemonParts parts;
  Arrival arrival = DaemonParts::Trainer();
  arrival.record.client = "a trainer";
  arrival.record.peer.identity = "dns:a";
  const Attached trainer = parts.Attach(std::move(arrival), "g", Spec(), nullptr, kPatience);
  const Attached other = parts.AttachTrainer("h");
  CHECK(parts.operators().MembersOf("").value().size() == 2);
  CHECK(parts.operators().MembersOf("none").status().code() == absl::StatusCode::kNotFound);
  const auto members = parts.operators().MembersOf("g");
  REQUIRE((members.ok() && members->size() == 1));
  const MemberDetails& shown = members->front();
  CHECK(shown.group == "g");
  CHECK(shown.client == "a trainer");
  CHECK(shown.identity == "dns:a");
  CHECK(shown.device == "host");
  CHECK(parts.operators().Describe().members == 2);
  CHECK(parts.operators().Describe().groups.size() == 2);
  CHECK(parts.operators().Describe().serving);
}

TEST_CASE("a watcher hears of an update until it stops watching") {
  DaemonParts parts;
  const Attached trainer = parts.AttachTrainer("g");
  const Attached engine = parts.AttachEngine("g", "i", Spec());
  const auto inbox = std::make_shared<UpdateInbox>();
  const absl::StatusOr<uint64_t> watch =
      parts.operators().Watch({"g", std::chrono::hours(1), false}, inbox);
  REQUIRE(watch.ok());
  const Answer begun = parts.Begin(trainer, 1);
  CHECK(inbox->sent > 0);
  parts.operators().StopWatching(*watch);
  const int before = inbox->sent;
  parts.Ready(engine);
  CHECK(begun.status().ok());
  CHECK(inbox->sent == before);
}

TEST_CASE("An identity has a lease as long as one of its members is not lost") {
  DaemonParts parts;
  Arrival arrival = DaemonParts::Trainer();
  arrival.record.peer.credentials.emplace().uid = 1;
  const Attached trainer = parts.Attach(std::move(arrival), "g");
  REQUIRE(trainer.inbox->welcomed());
  CHECK(parts.operators().HasLease("uid:1"));
  CHECK_FALSE(parts.operators().HasLease("uid:2"));
  {
    const StateLock lock(&parts.state().mutex);
    CHECK(parts.state().members.Lose(parts.state().members.Find(trainer.id)));
  }
  CHECK_FALSE(parts.operators().HasLease("uid:1"));
}

}  // namespace
}  // namespace refitd
