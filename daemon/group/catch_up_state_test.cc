#include <catch2/catch.hpp>

#include "daemon/group/catch_up.h"

namespace refitd::group {
namespace {

// Instances of one rank each, in a group that has committed version 4.
struct Late {
  Late() {
    out.Open(now, &actions);
    versions.Commit(Version(4));
  }
  void Attach(const std::string& instance, uint64_t id, bool current) {
    EngineAttached e{MemberId(id), {}};
    e.identity.instance = instance;
    e.identity.catch_up = true;
    members.EnterEngine(MemberOf(e), e.identity, false);
    members.Register(members.Find(MemberId(id)), {MemberId(id), std::make_shared<Layout>()});
    if (current) versions.Install(members.Find(MemberId(id)), 0);
  }
  void At(Duration later) { out.Open(now + later, &actions); }
  // Whether one begins at that time.
  bool Due(Duration later) {
    At(later);
    catch_up.FindDue(true);
    catch_up.CheckInvariants();
    return catch_up.TakeDue();
  }
  std::vector<std::string> Sources() {
    UpdateCatchUp part;
    catch_up.Assemble(&part);
    return part.source_instances;
  }
  std::string Describe(const std::string& instance) {
    return catch_up.Describe(*members.FindInstance(instance), nullptr, false);
  }

  const TimePoint now{std::chrono::seconds(100)};
  GroupActions actions;
  Outbox out;
  Requests requests{&out};
  Membership members{"g", GroupSpec(), nullptr, &out, &requests};
  Versions versions{"g", 11, &members, &out};
  GroupLimits limits;
  CatchUp catch_up{limits, &members, &versions, &out};
};

TEST_CASE("a late instance catches up from an instance that this group verified (P1)") {
  Late l;
  l.Attach("late", 1, false);
  CHECK_FALSE(l.Due(Duration(0)));
  CHECK(l.Describe("late").find("no clean instance") != std::string::npos);
  l.Attach("source", 2, true);
  CHECK(l.catch_up.Gives("source"));
  CHECK_FALSE(l.catch_up.Gives("late"));
  CHECK_FALSE(l.Due(Duration(0)));  // others that attach at about the same time are waited for
  CHECK(l.Due(l.limits.catch_up_gather));
  CHECK(l.Sources() == std::vector<std::string>{"source"});
}

TEST_CASE("an instance for which it failed is left alone, for longer at each failure") {
  Late l;
  l.Attach("late", 1, false);
  l.Attach("source", 2, true);
  CHECK_FALSE(l.Due(Duration(0)));
  l.catch_up.NoteFailure("late", "it was slow");
  CHECK(l.Describe("late").find("it was slow") != std::string::npos);
  l.catch_up.Look();
  CHECK_FALSE(l.Due(l.limits.catch_up_wait / 2));
  CHECK(l.Due(l.limits.catch_up_wait));
  l.catch_up.NoteFailure("late", "it was slow");
  l.catch_up.Look();
  CHECK_FALSE(l.Due(2 * l.limits.catch_up_wait));
  CHECK(l.Due(3 * l.limits.catch_up_wait));
  l.catch_up.NoteCommit(/*catch_up=*/false, {});
  CHECK(l.catch_up.CatchesUp(*l.members.FindInstance("late")));
}

TEST_CASE("after a failure of the sources another instance is the only source") {
  Late l;
  l.Attach("a", 1, true);
  l.Attach("b", 2, true);
  l.Attach("late", 3, false);
  CHECK(l.Sources().size() == 2);
  UpdateCatchUp part;
  l.catch_up.NoteGivenUp(false, {"late"}, /*verification=*/false, "a is slow", &part);
  l.At(std::chrono::minutes(5));
  CHECK(l.Sources() == std::vector<std::string>{"a"});
  l.catch_up.NoteGivenUp(false, {"late"}, /*verification=*/true, "digests differ", &part);
  l.At(std::chrono::minutes(10));
  CHECK(l.Sources() == std::vector<std::string>{"a"});
  l.catch_up.NoteGivenUp(false, {"late"}, /*verification=*/false, "a is slow", &part);
  l.At(std::chrono::minutes(15));
  CHECK(l.Sources() == std::vector<std::string>{"b"});
}

TEST_CASE("a trainer's call waits with what remains of its duration, and not longer (P4)") {
  Late l;
  BeginEvent begin;
  begin.call = CallId(1);
  begin.member = MemberId(9);
  begin.version = Version(5);
  l.catch_up.Defer(begin, std::chrono::seconds(10));
  CHECK(l.catch_up.DeferredOf(MemberId(9)) == std::set<Version>{Version(5)});
  CHECK(l.catch_up.NextDeadline() == l.now + std::chrono::seconds(10));
  l.At(std::chrono::seconds(4));
  CHECK_FALSE(l.catch_up.any_overdue());
  const auto taken = l.catch_up.TakeDeferred();
  CHECK(std::get<BeginEvent>(taken).duration == std::chrono::seconds(6));
  l.catch_up.Defer(begin, std::chrono::seconds(10));
  l.At(std::chrono::seconds(14));
  REQUIRE(l.catch_up.any_overdue());
  l.catch_up.RefuseOverdue(absl::DeadlineExceededError("late"));
  CHECK_FALSE(l.catch_up.anyone_waits());
  CHECK(std::get<Reply>(l.actions.back()).call == CallId(1));
}

}  // namespace
}  // namespace refitd::group
