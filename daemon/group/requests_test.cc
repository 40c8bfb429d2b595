#include "daemon/group/requests.h"

#include <catch2/catch.hpp>

namespace refitd::group {
namespace {

struct Calls {
  Calls() { out.Open(TimePoint(std::chrono::seconds(1)), &actions); }

  // The code that the call was answered with; nullopt: it waits.
  std::optional<absl::StatusCode> Answer(uint64_t call) const {
    std::optional<absl::StatusCode> code;
    for (const GroupAction& action : actions) {
      const Reply& reply = std::get<Reply>(action);
      if (reply.call == CallId(call)) code = reply.status.code();
    }
    return code;
  }
  bool Repeats(const std::string& id, uint64_t call, Version version = Version(1)) {
    return requests.Repeated(member, {CallKind::kCommit, version}, id, CallId(call));
  }
  std::shared_ptr<Request> Track(const std::string& id, uint64_t call,
                                 CallKind kind = CallKind::kCommit) {
    return requests.Track(member, {kind, Version(1)}, id, CallId(call));
  }

  const MemberId member{7};
  GroupActions actions;
  Outbox out;
  Requests requests{&out};
};

TEST_CASE("a repeated call waits with the first call and gets its answer (P3)") {
  Calls c;
  CHECK_FALSE(c.Repeats("a", 1));
  const auto request = c.Track("a", 1);
  CHECK(c.Repeats("a", 2));
  CHECK(c.requests.waiting().size() == 2);
  c.requests.CheckInvariants();
  c.requests.Finish(request, absl::AbortedError("lost"), EmptyReply{});
  CHECK(c.Answer(1) == absl::StatusCode::kAborted);
  CHECK(c.Answer(2) == absl::StatusCode::kAborted);
  CHECK(c.requests.unfinished().empty());
  CHECK(c.Repeats("a", 3));
  CHECK(c.Answer(3) == absl::StatusCode::kAborted);
  c.requests.CheckInvariants();
}

TEST_CASE("an id that stands for another request is refused, and a refused id may be used again") {
  Calls c;
  const auto request = c.Track("a", 1);
  CHECK(c.Repeats("a", 2, Version(2)));
  CHECK(c.Answer(2) == absl::StatusCode::kInvalidArgument);
  CHECK_FALSE(c.Answer(1).has_value());
  c.requests.Finish(request, absl::FailedPreconditionError("no"), EmptyReply{});
  CHECK_FALSE(c.Repeats("a", 3));
}

TEST_CASE("only the newest finished requests of a member are remembered (P10)") {
  Calls c;
  for (uint64_t i = 0; i <= kRememberedRequests; ++i) {
    c.requests.Finish(c.Track("r" + std::to_string(i), i + 1), absl::OkStatus(), EmptyReply{});
  }
  c.requests.CheckInvariants();
  CHECK_FALSE(c.Repeats("r0", 1000));
  CHECK(c.Repeats("r1", 1001));
  c.requests.Forget(c.member);
  CHECK_FALSE(c.Repeats("r1", 1002));
}

TEST_CASE("a caller that went away is answered, except that a bucket keeps its call (P6)") {
  Calls c;
  c.Track("a", 1);
  const auto left = c.requests.Leave(CallId(1), absl::CancelledError("gone"));
  REQUIRE(left != nullptr);
  CHECK(left->calls.empty());
  CHECK(c.Answer(1) == absl::StatusCode::kCancelled);
  CHECK(c.requests.unfinished().size() == 1);
  c.Track("b", 2, CallKind::kBucket);
  CHECK(c.requests.Leave(CallId(2), absl::CancelledError("gone")) == nullptr);
  CHECK_FALSE(c.Answer(2).has_value());
  c.requests.CheckInvariants();
}

}  // namespace
}  // namespace refitd::group
