#include "daemon/node/memory.h"

#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <utility>

#include "tests/aborts.h"

namespace refitd {
namespace {

struct World {
  Leases leases;
  Calls calls;
  Memory memory{{.of_member = 2, .of_daemon = 3}};

  MemberRecord* Attach(uint64_t id, bool engine = false) {
    MemberRecord record;
    record.id = MemberId(id);
    record.group = "g";
    record.engine = engine;
    return leases.Add(std::move(record));
  }
  RegionId Register(MemberRecord* member, const std::string& identity = "") {
    REQUIRE(memory.Admit(*member, identity).ok());
    RegionRecord region;
    region.identity = identity;
    const RegionId id = memory.Add(member, std::move(region));
    memory.CheckInvariants(leases);
    return id;
  }
};

std::shared_ptr<const Layout> LayoutOn(RegionId region) {
  Layout layout;
  layout.tensors.resize(1);
  layout.tensors[0].name = "w";
  layout.pieces.resize(1);
  layout.pieces[0].region = region;
  return std::make_shared<const Layout>(std::move(layout));
}

TEST_CASE("regions are limited for each member and for the daemon, and come free again") {
  World world;
  MemberRecord* const a = world.Attach(1);
  MemberRecord* const b = world.Attach(2);
  const RegionId first = world.Register(a);
  world.Register(a);
  CHECK(world.memory.Admit(*a, "").message() == "the member has 2 regions already");
  world.Register(b);
  CHECK(world.memory.Admit(*b, "").message() == "the daemon has 3 regions already");
  CHECK(world.memory.Take(a, first, world.calls).ok());
  world.memory.CheckInvariants(world.leases);
  CHECK(world.memory.Admit(*b, "").ok());
}

TEST_CASE("CheckInvariants finds a region that went without being counted (P8)") {
  World world;
  MemberRecord* const member = world.Attach(1);
  world.Register(member);
  CHECK(Aborts([&] {
    member->regions.clear();
    world.memory.CheckInvariants(world.leases);
  }));
}

TEST_CASE("an engine's memory is one region, a trainer's may be several") {
  World world;
  MemberRecord* const engine = world.Attach(1, /*engine=*/true);
  world.Register(engine, "memfd 1 2");
  CHECK(world.memory.Admit(*engine, "memfd 1 2").code() == absl::StatusCode::kAlreadyExists);
  CHECK(world.memory.Admit(*engine, "memfd 1 3").ok());
  MemberRecord* const trainer = world.Attach(2);
  world.Register(trainer, "memfd 1 2");
  CHECK(world.memory.Admit(*trainer, "memfd 1 2").ok());
}

TEST_CASE("a region is not taken while a layout or an unanswered bucket uses it") {
  World world;
  MemberRecord* const member = world.Attach(1);
  const RegionId region = world.Register(member);

  member->layout = LayoutOn(region);
  CHECK(world.memory.Take(member, region, world.calls).status().code() ==
        absl::StatusCode::kFailedPrecondition);
  member->layout = nullptr;

  const ReplyFunction ignore = [](const absl::Status&, const ReplyPayload&) {};
  world.calls.Add(CallId(1),
                  {"g", ignore, nullptr, Calls::PendingLayout{MemberId(1), LayoutOn(region)}});
  CHECK(world.memory.Take(member, region, world.calls).status().code() ==
        absl::StatusCode::kFailedPrecondition);
  world.calls.Take(CallId(1));

  CheckedBucket bucket;
  bucket.source = CheckedBucket::Source::kRegions;
  bucket.places.push_back({.region = region});
  world.calls.Add(CallId(2),
                  {"g", ignore, std::make_shared<const CheckedBucket>(std::move(bucket))});
  CHECK(world.memory.Take(member, region, world.calls).status().code() ==
        absl::StatusCode::kFailedPrecondition);
  world.calls.Take(CallId(2));

  CHECK(world.memory.Take(member, region, world.calls).ok());
  CHECK(world.memory.Take(member, region, world.calls).status().code() ==
        absl::StatusCode::kNotFound);
}

TEST_CASE("all regions of a member go at once, and its ids are not used again") {
  World world;
  MemberRecord* const member = world.Attach(1);
  const RegionId first = world.Register(member);
  const RegionId second = world.Register(member);
  CHECK(world.memory.TakeAll(member).size() == 2);
  world.memory.CheckInvariants(world.leases);
  const RegionId third = world.Register(member);
  CHECK(third != first);
  CHECK(third != second);
}

TEST_CASE("regions that are being opened are limited") {
  World world;
  for (size_t i = 0; i < Calls::kMaxOpening; ++i) REQUIRE(world.memory.BeginOpening().ok());
  CHECK(world.memory.BeginOpening().message() == "4096 regions are being opened already");
  world.memory.EndOpening();
  CHECK(world.memory.BeginOpening().ok());
}

}  // namespace
}  // namespace refitd
