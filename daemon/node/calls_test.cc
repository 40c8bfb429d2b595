#include "daemon/node/calls.h"

#include <catch2/catch.hpp>
#include <memory>
#include <utility>

namespace refitd {
namespace {

ReplyFunction Ignore() {
  return [](const absl::Status&, const ReplyPayload&) {};
}

std::shared_ptr<const CheckedBucket> FromRegion(
    RegionId region, CheckedBucket::Source source = CheckedBucket::Source::kRegions) {
  CheckedBucket bucket;
  bucket.source = source;
  bucket.tensors.resize(1);
  bucket.ranges.resize(1);
  bucket.places.push_back({.region = region});
  return std::make_shared<const CheckedBucket>(std::move(bucket));
}

std::shared_ptr<const Layout> LayoutOf(uint64_t generation) {
  Layout layout;
  layout.binding_generation = generation;
  return std::make_shared<const Layout>(std::move(layout));
}

TEST_CASE("a call is answered once, and what it brought goes with its answer") {
  Calls calls;
  int answers = 0;
  calls.Add(CallId(1), {"g", [&answers](const absl::Status&, const ReplyPayload&) { ++answers; },
                        FromRegion(RegionId(7)), Calls::PendingLayout{MemberId(3), LayoutOf(5)}});
  calls.CheckInvariants();
  REQUIRE(calls.GroupOf(CallId(1)) != nullptr);
  CHECK(*calls.GroupOf(CallId(1)) == "g");
  REQUIRE(calls.HasBucket(CallId(1)));
  CHECK(calls.IsSource(RegionId(7)));
  CHECK_FALSE(calls.IsSource(RegionId(8)));
  REQUIRE(calls.LayoutsOf(MemberId(3)).size() == 1);
  CHECK(calls.LayoutsOf(MemberId(3)).front()->binding_generation == 5);
  CHECK(calls.LayoutsOf(MemberId(4)).empty());

  std::optional<Calls::Call> taken = calls.Take(CallId(1));
  REQUIRE(taken.has_value());
  CHECK(taken->group == "g");
  REQUIRE(taken->layout.has_value());
  CHECK(taken->layout->member == MemberId(3));
  taken->reply(absl::OkStatus(), EmptyReply{});
  CHECK(answers == 1);

  CHECK_FALSE(calls.Take(CallId(1)).has_value());
  CHECK(calls.GroupOf(CallId(1)) == nullptr);
  CHECK_FALSE(calls.HasBucket(CallId(1)));
  CHECK_FALSE(calls.IsSource(RegionId(7)));
  CHECK(calls.LayoutsOf(MemberId(3)).empty());
  calls.CheckInvariants();
}

TEST_CASE("a bucket that brings its bytes with the call holds no region") {
  Calls calls;
  calls.Add(CallId(1), {"g", Ignore(), FromRegion(RegionId(0), CheckedBucket::Source::kInline)});
  CHECK_FALSE(calls.IsSource(RegionId(0)));
}

TEST_CASE("calls beyond the limit are refused, and admitted again after an answer") {
  Calls calls;
  for (uint64_t id = 1; id <= Calls::kMaxCalls; ++id) {
    REQUIRE(calls.Admit().ok());
    calls.Add(CallId(id), {"g", Ignore()});
  }
  calls.CheckInvariants();
  const absl::Status refused = calls.Admit();
  CHECK(refused.code() == absl::StatusCode::kResourceExhausted);
  CHECK(refused.message() == "65536 calls are unanswered already");
  CHECK(calls.Take(CallId(9)).has_value());
  CHECK(calls.Admit().ok());
}

TEST_CASE("calls that wait for device memory are limited for each member") {
  Calls calls;
  REQUIRE(calls.BeginOpening(CallId(1), MemberId(1), 2).ok());
  REQUIRE(calls.BeginOpening(CallId(2), MemberId(1), 2).ok());
  CHECK(calls.BeginOpening(CallId(3), MemberId(1), 2).code() ==
        absl::StatusCode::kResourceExhausted);
  CHECK(calls.BeginOpening(CallId(3), MemberId(2), 2).ok());
  CHECK(calls.EndOpening(CallId(1)).ok());
  CHECK(calls.BeginOpening(CallId(4), MemberId(1), 2).ok());
  calls.CheckInvariants();
}

TEST_CASE("calls that wait for device memory are limited for all members together (P10)") {
  Calls calls;
  uint64_t id = 0;
  while (id < Calls::kMaxOpening) {
    ++id;
    REQUIRE(calls.BeginOpening(CallId(id), MemberId(id), 1).ok());
  }
  const auto next = [&] { return calls.BeginOpening(CallId(id + 1), MemberId(id + 1), 1); };
  CHECK(next().code() == absl::StatusCode::kResourceExhausted);
  CHECK(calls.EndOpening(CallId(1)).ok());
  CHECK(next().ok());
  calls.CheckInvariants();
}

TEST_CASE("a caller that goes away while its call waits for device memory is noticed") {
  Calls calls;
  REQUIRE(calls.BeginOpening(CallId(1), MemberId(5), 2).ok());
  REQUIRE(calls.OpeningOf(CallId(1)).ok());
  CHECK(*calls.OpeningOf(CallId(1)) == MemberId(5));
  calls.NoteCallerLeft(CallId(1));
  calls.NoteCallerLeft(CallId(2));  // does not wait for memory
  CHECK(calls.OpeningOf(CallId(1)).status().code() == absl::StatusCode::kCancelled);
  CHECK(calls.EndOpening(CallId(1)).code() == absl::StatusCode::kCancelled);
}

}  // namespace
}  // namespace refitd
