#include "daemon/node/group_spec.h"

#include <catch2/catch.hpp>
#include <string>

#include "refitd/v1/types.pb.h"

namespace refitd {
namespace {

using Catch::Contains;
constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

constexpr SpecLimits kLimits = {
    .default_slot_bytes = 8192, .default_slots = 3, .max_pool_bytes = 1 << 20};

v1::GroupSpec Message() {
  v1::GroupSpec message;
  message.set_trainer_ranks(2);
  return message;
}

TEST_CASE("a spec that leaves fields out gets the daemon's defaults") {
  const absl::StatusOr<GroupSpec> spec = CheckSpec(SpecOf(Message()), kLimits);
  REQUIRE(spec.ok());
  CHECK(spec->trainer_ranks == 2);
  CHECK(spec->min_instances == 1);
  CHECK(spec->slot_bytes == 8192);
  CHECK(spec->slots == 3);
}

TEST_CASE("names of tensors are sorted and come once") {
  v1::GroupSpec message = Message();
  for (const char* name : {"b", "a", "b"}) {
    message.add_engine_only_tensors(name);
    message.add_unwanted_tensors(name + std::string("*"));
  }
  const absl::StatusOr<GroupSpec> spec = CheckSpec(SpecOf(message), kLimits);
  REQUIRE(spec.ok());
  CHECK(spec->engine_only_tensors == std::vector<std::string>{"a", "b"});
  CHECK(spec->unwanted_tensors == std::vector<std::string>{"a*", "b*"});
}

TEST_CASE("a bad field of a spec is named with its value (P10)") {
  const auto refused = [](auto change) {
    v1::GroupSpec message = Message();
    change(&message);
    const absl::Status status = CheckSpec(SpecOf(message), kLimits).status();
    CHECK(status.code() == kInvalid);
    return std::string(status.message());
  };
  CHECK_THAT(refused([](auto* m) { m->set_trainer_ranks(0); }), Contains("spec.trainer_ranks: 0"));
  CHECK_THAT(refused([](auto* m) { m->set_min_instances(-1); }),
             Contains("spec.min_instances: -1"));
  CHECK_THAT(refused([](auto* m) { m->set_slots(1); }), Contains("spec.slots: 1"));
  CHECK_THAT(refused([](auto* m) { m->set_slot_bytes(4097); }), Contains("4097 is not a multiple"));
  CHECK_THAT(refused([](auto* m) { m->set_slot_bytes(2 << 20); }),
             Contains("spec.slot_bytes: 2097152"));
  CHECK_THAT(refused([](auto* m) { m->set_max_lag(-1); }),
             Contains("spec.max_lag: -1 is not in 0..1000000000"));
  CHECK_THAT(refused([](auto* m) { m->set_max_lag(1'000'000'001); }), Contains("spec.max_lag"));
  CHECK_THAT(refused([](auto* m) { m->add_unwanted_tensors("a*b"); }),
             Contains("'a*b' is neither a name nor a prefix"));
}

TEST_CASE("a spec equals the group's where it leaves slots to the default, and only there") {
  GroupSpec known = *CheckSpec(SpecOf(Message()), kLimits);
  known.slots = 7;
  CHECK(CheckSameSpec("g", SpecOf(Message()), known, kLimits).ok());
  v1::GroupSpec other = Message();
  other.set_slots(4);
  CHECK(CheckSameSpec("g", SpecOf(other), known, kLimits).message() ==
        "spec: group 'g' has another");

  GroupSpec trainers = known;
  trainers.trainer_ranks = 9;
  CHECK(CheckEqualSpec("g", known, trainers).ok());
  GroupSpec lenient = known;
  lenient.max_lag = 3;
  CHECK_THAT(std::string(CheckEqualSpec("g", known, lenient).message()), Contains("max_lag 0"));
  trainers.slots = 5;
  CHECK_THAT(std::string(CheckEqualSpec("g", known, trainers).message()),
             Contains("slots 7") && Contains("this one says 1, 8192, 5"));
}

TEST_CASE("sizes that a coordinator tells are bounded as an operator's are (P10)") {
  GroupSpec told = *CheckSpec(SpecOf(Message()), kLimits);
  CHECK(CheckToldSpec(told, kLimits).ok());
  told.slot_bytes = kLimits.max_pool_bytes + 1;
  CHECK(CheckToldSpec(told, kLimits).code() == kInvalid);
  told.slot_bytes = 1;
  told.slots = 0;
  CHECK(CheckToldSpec(told, kLimits).code() == kInvalid);
}

}  // namespace
}  // namespace refitd
