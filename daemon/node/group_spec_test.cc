#include "daemon/node/group_spec.h"

#include <catch2/catch.hpp>
#include <string>
#include <vector>

namespace refitd {
namespace {

using Catch::Contains;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

constexpr SpecLimits kLimits = {
    .default_slot_bytes = 8192, .default_slots = 3, .max_pool_bytes = 1 << 20};

GroupSpec CallersSpec() {
  GroupSpec wanted;
  wanted.trainer_ranks = 2;
  wanted.min_instances = 0;
  return wanted;
}

TEST_CASE("a spec that leaves fields out gets the daemon's defaults") {
  const absl::StatusOr<GroupSpec> spec = CheckSpec(CallersSpec(), kLimits);
  REQUIRE(spec.ok());
  CHECK(spec->trainer_ranks == 2);
  CHECK(spec->min_instances == 1);
  CHECK(spec->slot_bytes == 8192);
  CHECK(spec->slots == 3);
}

TEST_CASE("names of tensors are sorted and come once") {
  GroupSpec wanted = CallersSpec();
  wanted.engine_only_tensors = {"b", "a", "b"};
  wanted.unwanted_tensors = {"b*", "a*", "b*"};
  const absl::StatusOr<GroupSpec> spec = CheckSpec(wanted, kLimits);
  REQUIRE(spec.ok());
  CHECK(spec->engine_only_tensors == std::vector<std::string>{"a", "b"});
  CHECK(spec->unwanted_tensors == std::vector<std::string>{"a*", "b*"});
}

TEST_CASE("a bad field of a spec is named with its value (P10)") {
  const auto refused = [](auto change) {
    GroupSpec wanted = CallersSpec();
    change(&wanted);
    const absl::Status status = CheckSpec(wanted, kLimits).status();
    CHECK(status.code() == kInvalid);
    return std::string(status.message());
  };
  CHECK_THAT(refused([](auto* w) { w->trainer_ranks = 0; }), Contains("spec.trainer_ranks: 0"));
  CHECK_THAT(refused([](auto* w) { w->min_instances = -1; }), Contains("spec.min_instances: -1"));
  CHECK_THAT(refused([](auto* w) { w->slots = 1; }), Contains("spec.slots: 1"));
  CHECK_THAT(refused([](auto* w) { w->slot_bytes = 4097; }), Contains("4097 is not a multiple"));
  CHECK_THAT(refused([](auto* w) { w->slot_bytes = 2 << 20; }),
             Contains("spec.slot_bytes: 2097152"));
  CHECK_THAT(refused([](auto* w) { w->max_lag = -1; }),
             Contains("spec.max_lag: -1 is not in 0..1000000000"));
  CHECK_THAT(refused([](auto* w) { w->max_lag = 1'000'000'001; }), Contains("spec.max_lag"));
  CHECK_THAT(refused([](auto* w) { w->hold_previous_seconds = -1; }),
             Contains("spec.hold_previous_seconds: -1 is not in 0..604800"));
  CHECK_THAT(refused([](auto* w) { w->hold_previous_seconds = 604'801; }),
             Contains("spec.hold_previous_seconds"));
  CHECK_THAT(refused([](auto* w) { w->keep_seconds = -1; }),
             Contains("spec.keep_seconds: -1 is not in 0..86400"));
  CHECK_THAT(refused([](auto* w) { w->keep_seconds = 86'401; }), Contains("spec.keep_seconds"));
  CHECK_THAT(refused([](auto* w) { w->unwanted_tensors = {""}; }),
             Contains("spec.unwanted_tensors: a name is empty"));
  const auto many = [](std::vector<std::string>* names) {
    for (int i = 0; i <= kMaxNamePatterns; ++i) names->push_back(std::to_string(i) + ".*.bias");
  };
  CHECK_THAT(refused([&](auto* w) { many(&w->engine_only_tensors); }),
             Contains("spec.engine_only_tensors: 0 names and 65 patterns"));
  CHECK_THAT(refused([&](auto* w) { many(&w->unwanted_tensors); }), Contains("65 patterns"));
}

TEST_CASE("engine-only and unwanted tensors take exact names, prefixes and globs alike") {
  GroupSpec wanted = CallersSpec();
  wanted.engine_only_tensors = wanted.unwanted_tensors = {"head", "mtp.*", "*.layers.?.bias"};
  const auto spec = CheckSpec(wanted, kLimits);
  REQUIRE(spec.ok());
  CHECK(spec->engine_only_tensors == spec->unwanted_tensors);
}

TEST_CASE("a spec equals the group's where it leaves slots to the default, and only there") {
  GroupSpec known = *CheckSpec(CallersSpec(), kLimits);
  known.slots = 7;
  CHECK(CheckSameSpec("g", CallersSpec(), known, kLimits).ok());
  GroupSpec other = CallersSpec();
  other.slots = 4;
  CHECK(CheckSameSpec("g", other, known, kLimits).message() == "spec: group 'g' has another");

  GroupSpec trainers = known;
  trainers.trainer_ranks = 9;
  CHECK(CheckEqualSpec("g", known, trainers).ok());
  GroupSpec lenient = known;
  lenient.max_lag = 3;
  CHECK_THAT(std::string(CheckEqualSpec("g", known, lenient).message()), Contains("max_lag 0"));
  GroupSpec keeps_nothing = known;
  keeps_nothing.keep_seconds = 0;
  CHECK_THAT(std::string(CheckEqualSpec("g", known, keeps_nothing).message()),
             Contains("keep_seconds 600"));
  trainers.slots = 5;
  CHECK_THAT(std::string(CheckEqualSpec("g", known, trainers).message()),
             Contains("slots 7") && Contains("this one says 1, 8192, 5"));
}

TEST_CASE("a spec that demands encryption is another spec than one that does not") {
  GroupSpec wanted = CallersSpec();
  const GroupSpec clear = *CheckSpec(wanted, kLimits);
  CHECK_FALSE(clear.encrypted_data);
  wanted.encrypted_data = true;
  const GroupSpec encrypted = *CheckSpec(wanted, kLimits);
  CHECK(encrypted.encrypted_data);
  CHECK_THAT(std::string(CheckSameSpec("g", encrypted, clear, kLimits).message()),
             Contains("spec.encrypted_data: group 'g' has false, this one says true"));
  CHECK(CheckEqualSpec("g", encrypted, clear).code() == absl::StatusCode::kFailedPrecondition);
}

TEST_CASE("only a group that demands encryption refuses daemons that have none") {
  GroupSpec spec = *CheckSpec(CallersSpec(), kLimits);
  CHECK(CheckEncryption("g", spec, "a", "no certificates").ok());
  spec.encrypted_data = true;
  CHECK(CheckEncryption("g", spec, "a", "").ok());
  const absl::Status clear = CheckEncryption("g", spec, "a", "no certificates");
  CHECK(clear.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(std::string(clear.message()),
             Contains("group 'g'") && Contains("daemon a is in the clear: no certificates"));
}

TEST_CASE("sizes that a coordinator tells are bounded as an operator's are (P10)") {
  GroupSpec given = *CheckSpec(CallersSpec(), kLimits);
  CHECK(CheckGivenSpec(given, kLimits).ok());
  given.slot_bytes = kLimits.max_pool_bytes + 1;
  CHECK(CheckGivenSpec(given, kLimits).code() == kInvalid);
  given.slot_bytes = 1;
  given.slots = 0;
  CHECK(CheckGivenSpec(given, kLimits).code() == kInvalid);
}

}  // namespace
}  // namespace refitd
