#include "daemon/group/follower.h"

#include <catch2/catch.hpp>
#include <utility>
#include <vector>

#include "daemon/group/group_test_util.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

using Catch::Contains;

constexpr MemberId kEngine{7};
constexpr CallId kCall{3};

// A daemon that joined, with one registered engine rank; what it did since it was made.
class Fixture {
 public:
  Fixture() : follower_(MakeOptions()) {
    EngineIdentity engine;
    engine.instance = "i";
    Do(GroupEvent(EngineAttached{kEngine, engine}));
    Do(LinkUp{7, TestGroup::DefaultSpec(), std::nullopt, "a"});
    Do(CommandReceived{PeerWelcome{kEngine, std::nullopt}});
  }

  void Do(MachineEvent event) { follower_.Handle(event, now_, &actions_); }
  void Command(PeerCommand command) { Do(CommandReceived{std::move(command)}); }
  void Register(CallId call, const std::string& tensor = "t") {
    Do(GroupEvent(LayoutRegistered{kEngine, LayoutOf({Bytes(tensor, 100)}), call}));
  }

  template <typename Report>
  std::vector<Report> Sent() const {
    std::vector<Report> found;
    for (const SendReport& send : Peers<SendReport>()) {
      if (const auto* r = std::get_if<Report>(&send.report)) found.push_back(*r);
    }
    return found;
  }
  std::vector<Reply> Replies() const {
    std::vector<Reply> found;
    for (const MachineAction& action : actions_) {
      const auto* own = std::get_if<GroupAction>(&action);
      const auto* reply = own == nullptr ? nullptr : std::get_if<Reply>(own);
      if (reply != nullptr) found.push_back(*reply);
    }
    return found;
  }
  // Of the layout that is in force; 0: none.
  uint64_t Digest() const {
    const std::vector<MemberView> members = follower_.View(now_).group.members;
    return members.empty() ? 0 : members[0].layout_digest;
  }
  const Follower& follower() const { return follower_; }

 private:
  FollowerOptions MakeOptions() {
    FollowerOptions options;
    options.name = "g";
    options.coordinator_address = "elsewhere";
    options.next_update = [this] { return UpdateId(++updates_); };
    return options;
  }
  template <typename Action>
  std::vector<Action> Peers() const {
    std::vector<Action> found;
    for (const MachineAction& action : actions_) {
      const auto* peer = std::get_if<PeerAction>(&action);
      const auto* a = peer == nullptr ? nullptr : std::get_if<Action>(peer);
      if (a != nullptr) found.push_back(*a);
    }
    return found;
  }

  uint64_t updates_ = 0;
  TimePoint now_{std::chrono::hours(1)};
  Follower follower_;
  MachineActions actions_;
};

TEST_CASE("RegisterLayout was answered before the coordinator had the layout") {
  Fixture f;
  f.Register(kCall);
  REQUIRE(f.Sent<PeerLayout>().size() == 1);
  CHECK(f.Sent<PeerLayout>()[0].call == kCall);
  CHECK(f.Replies().empty());
  CHECK(f.Digest() == 0);
  f.Command(PeerReply{kCall, absl::OkStatus(), EmptyReply{}});
  REQUIRE(f.Replies().size() == 1);
  CHECK(f.Replies()[0].call == kCall);
  CHECK(f.Replies()[0].status.ok());
  CHECK(f.Digest() == LayoutOf({Bytes("t", 100)})->Digest());
}

TEST_CASE("a layout that the coordinator refuses leaves the one before in force") {
  Fixture f;
  f.Register(kCall);
  f.Command(PeerReply{kCall, absl::OkStatus(), EmptyReply{}});
  f.Register(CallId(4), "u");
  f.Command(PeerReply{CallId(4), absl::FailedPreconditionError("an update runs"), EmptyReply{}});
  REQUIRE(f.Replies().size() == 2);
  CHECK(f.Replies()[1].status == absl::FailedPreconditionError("an update runs"));
  CHECK(f.Digest() == LayoutOf({Bytes("t", 100)})->Digest());
}

TEST_CASE("a layout that is on its way is answered when the coordinator or the member is lost") {
  Fixture f;
  f.Register(kCall);
  absl::StatusCode code{};
  SECTION("the coordinator") {
    f.Do(LinkLost{absl::UnavailableError("gone")});
    code = absl::StatusCode::kUnavailable;
  }
  SECTION("the member") {
    f.Do(GroupEvent(MemberLost{kEngine, "its process died"}));
    code = absl::StatusCode::kUnauthenticated;
  }
  SECTION("its attachment is refused") {
    f.Command(PeerRefuse{kEngine, absl::AbortedError("attach again")});
    code = absl::StatusCode::kAborted;
  }
  REQUIRE(f.Replies().size() == 1);
  CHECK(f.Replies()[0].call == kCall);
  CHECK(f.Replies()[0].status.code() == code);
  // What comes late is nobody's.
  f.Command(PeerReply{kCall, absl::OkStatus(), EmptyReply{}});
  CHECK(f.Replies().size() == 1);
  CHECK(f.follower().finished());
}

TEST_CASE("a trainer's layout that is on its way was forgotten when the group was replaced") {
  Fixture f;
  constexpr MemberId kTrainer{8};
  f.Do(GroupEvent(TrainerAttached{kTrainer, TrainerIdentity{}}));
  f.Command(PeerWelcome{kTrainer, std::nullopt});
  f.Do(GroupEvent(LayoutRegistered{kTrainer, LayoutOf({Bytes("t", 100)}), kCall}));
  REQUIRE(f.Sent<PeerLayout>().size() == 1);
  f.Command(PeerIncarnation{9});
  REQUIRE(f.Replies().size() == 1);
  CHECK(f.Replies()[0].call == kCall);
  CHECK(f.Replies()[0].status.code() == absl::StatusCode::kAborted);
}

TEST_CASE("a rank that takes part in an update registers nothing") {
  Fixture f;
  PeerPrepare prepare;
  prepare.update = UpdateId(1);
  prepare.version = Version(1);
  prepare.engines = {kEngine};
  f.Command(prepare);
  f.Register(kCall);
  CHECK(f.Sent<PeerLayout>().empty());
  REQUIRE(f.Replies().size() == 1);
  CHECK_THAT(Message(f.Replies()[0].status), Contains("takes part in the running update"));
}

}  // namespace
}  // namespace refitd
