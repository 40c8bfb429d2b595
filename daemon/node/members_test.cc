#include "daemon/node/members.h"

#include <catch2/catch.hpp>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/sockets/descriptor_socket.h"
#include "tests/aborts.h"

namespace refitd {
namespace {

MemberRecord Rank(uint64_t id, std::string group = "g", std::optional<int> ordinal = {}) {
  MemberRecord record;
  record.id = MemberId(id);
  record.group = std::move(group);
  record.ordinal = ordinal;
  return record;
}

Peer OfUser(uid_t uid) {
  Peer peer;
  peer.credentials.emplace();
  peer.credentials->uid = uid;
  return peer;
}

class Sink : public MemberSink {
 public:
  void Send(MemberNews /*news*/) override {}
  void End(absl::Status status) override { ends.push_back(std::move(status)); }
  std::vector<absl::Status> ends;
};

TEST_CASE("a lease's token names its member until the lease ends; the record stays for copies") {
  Members members;
  MemberRecord* const member = members.Add(Rank(1));
  const std::string token = member->token;
  members.CheckInvariants();
  CHECK(token.size() == sizeof(Token));
  REQUIRE(members.OfToken(token, {}).ok());
  CHECK(*members.OfToken(token, {}) == member);

  CHECK(members.Lose(member));
  CHECK_FALSE(members.Lose(member));
  members.CheckInvariants();
  CHECK(members.OfToken(token, {}).status().code() == absl::StatusCode::kUnauthenticated);
  CHECK(members.Find(MemberId(1)) == member);

  CHECK(members.Remove(MemberId(1)).id == MemberId(1));
  CHECK_FALSE(members.Contains(MemberId(1)));
  members.CheckInvariants();
}

TEST_CASE("CheckInvariants finds a lost member whose token lives, and a live one without (P9)") {
  Members members;
  MemberRecord* const member = members.Add(Rank(1));
  CHECK_FALSE(Aborts([&] { members.CheckInvariants(); }));
  CHECK(Aborts([&] {
    member->lost = true;
    members.CheckInvariants();
  }));
  CHECK(Aborts([&] {
    member->token = "another";
    members.CheckInvariants();
  }));
}

TEST_CASE("a member that is removed without being lost leaves no token behind") {
  Members members;
  const std::string token = members.Add(Rank(1))->token;
  members.Remove(MemberId(1));
  CHECK_FALSE(members.OfToken(token, {}).ok());
  CHECK(members.size() == 0);
  members.CheckInvariants();
}

TEST_CASE("no two leases have one token") {
  Members members;
  std::set<std::string> tokens;
  for (uint64_t id = 1; id <= 1000; ++id) tokens.insert(members.Add(Rank(id))->token);
  CHECK(tokens.size() == 1000);
  members.CheckInvariants();
}

TEST_CASE("a lease that was taken over a unix socket works for the same user only") {
  Members members;
  MemberRecord record = Rank(1);
  record.peer = OfUser(1000);
  const std::string token = members.Add(std::move(record))->token;
  CHECK(members.OfToken(token, OfUser(1000)).ok());
  CHECK(members.OfToken(token, OfUser(1001)).status().code() ==
        absl::StatusCode::kPermissionDenied);
  CHECK(members.OfToken(token, {}).status().code() == absl::StatusCode::kPermissionDenied);

  const std::string over_tcp = members.Add(Rank(2))->token;
  CHECK(members.OfToken(over_tcp, {}).ok());
}

TEST_CASE("a lease that was taken with a certificate works for the same identity only") {
  Members members;
  const auto of = [](const std::string& identity) {
    Peer peer;
    peer.identity = identity;
    return peer;
  };
  MemberRecord record = Rank(1);
  record.peer = of("spiffe://prod/a");
  const std::string token = members.Add(std::move(record))->token;
  CHECK(members.OfToken(token, of("spiffe://prod/a")).ok());
  CHECK(members.OfToken(token, of("spiffe://prod/b")).status().code() ==
        absl::StatusCode::kPermissionDenied);
  CHECK(members.OfToken(token, {}).status().code() == absl::StatusCode::kPermissionDenied);
  CHECK(members.OfToken(token, OfUser(0)).status().code() == absl::StatusCode::kPermissionDenied);

  const std::string in_the_clear = members.Add(Rank(2))->token;
  CHECK(members.OfToken(in_the_clear, of("spiffe://prod/a")).status().code() ==
        absl::StatusCode::kPermissionDenied);
}

TEST_CASE("the GPUs of a group are those of its own members alone") {
  Members members;
  members.Add(Rank(1, "a", 3));
  members.Add(Rank(2, "b"));
  CHECK(members.HasDevices("a"));
  CHECK_FALSE(members.HasDevices("b"));
  CHECK(members.OnDevice("a", 3));
  CHECK_FALSE(members.OnDevice("a", 2));
  CHECK_FALSE(members.OnDevice("b", 3));
}

TEST_CASE("a member's stream ends once") {
  const auto sink = std::make_shared<Sink>();
  MemberRecord record = Rank(1);
  record.sink = sink;
  record.End(absl::AbortedError("first"));
  record.End(absl::AbortedError("second"));
  REQUIRE(sink->ends.size() == 1);
  CHECK(sink->ends[0].message() == "first");
}

// ---- regions ----

// Members with few regions.
struct World {
  Calls calls;
  Members members{{.of_member = 2, .of_daemon = 3}};

  MemberRecord* Attach(uint64_t id, bool engine = false) {
    MemberRecord record;
    record.id = MemberId(id);
    record.group = "g";
    record.engine = engine;
    return members.Add(std::move(record));
  }
  RegionId Register(MemberRecord* member, const std::string& identity = "") {
    REQUIRE(members.AdmitRegion(*member, identity).ok());
    RegionRecord region;
    region.identity = identity;
    const RegionId id = members.AddRegion(member, std::move(region));
    members.CheckInvariants();
    return id;
  }
};

std::shared_ptr<const Layout> LayoutOn(RegionId region) {
  Layout layout;
  layout.tensors = {{"w", DType::kUint8, {}}};
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
  CHECK(world.members.AdmitRegion(*a, "").message() == "the member has 2 regions already");
  world.Register(b);
  CHECK(world.members.AdmitRegion(*b, "").message() == "the daemon has 3 regions already");
  CHECK(world.members.TakeRegion(a, first, world.calls).ok());
  world.members.CheckInvariants();
  CHECK(world.members.AdmitRegion(*b, "").ok());
}

TEST_CASE("CheckInvariants finds a region that went without being counted (P8)") {
  World world;
  MemberRecord* const member = world.Attach(1);
  world.Register(member);
  CHECK(Aborts([&] {
    member->regions.clear();
    world.members.CheckInvariants();
  }));
}

TEST_CASE("an engine's memory is one region, a trainer's may be several") {
  World world;
  MemberRecord* const engine = world.Attach(1, /*engine=*/true);
  world.Register(engine, "memfd 1 2");
  CHECK(world.members.AdmitRegion(*engine, "memfd 1 2").code() == absl::StatusCode::kAlreadyExists);
  CHECK(world.members.AdmitRegion(*engine, "memfd 1 3").ok());
  MemberRecord* const trainer = world.Attach(2);
  world.Register(trainer, "memfd 1 2");
  CHECK(world.members.AdmitRegion(*trainer, "memfd 1 2").ok());
}

TEST_CASE("a region is not taken while a layout or an unanswered bucket uses it") {
  World world;
  MemberRecord* const member = world.Attach(1);
  const RegionId region = world.Register(member);

  member->layout = LayoutOn(region);
  CHECK(world.members.TakeRegion(member, region, world.calls).status().code() ==
        absl::StatusCode::kFailedPrecondition);
  member->layout = nullptr;

  const ReplyFunction ignore = [](const absl::Status&, const ReplyPayload&) {};
  world.calls.Add(CallId(1),
                  {"g", ignore, nullptr, Calls::PendingLayout{MemberId(1), LayoutOn(region)}});
  CHECK(world.members.TakeRegion(member, region, world.calls).status().code() ==
        absl::StatusCode::kFailedPrecondition);
  world.calls.Take(CallId(1));

  CheckedBucket bucket;
  bucket.source = CheckedBucket::Source::kRegions;
  bucket.places.push_back({.region = region});
  world.calls.Add(CallId(2),
                  {"g", ignore, std::make_shared<const CheckedBucket>(std::move(bucket))});
  CHECK(world.members.TakeRegion(member, region, world.calls).status().code() ==
        absl::StatusCode::kFailedPrecondition);
  world.calls.Take(CallId(2));

  CHECK(world.members.TakeRegion(member, region, world.calls).ok());
  CHECK(world.members.TakeRegion(member, region, world.calls).status().code() ==
        absl::StatusCode::kNotFound);
}

TEST_CASE("all regions of a member go with its record, and their ids are not used again") {
  World world;
  MemberRecord* member = world.Attach(1);
  const RegionId first = world.Register(member);
  const RegionId second = world.Register(member);
  CHECK(world.members.Remove(MemberId(1)).regions.size() == 2);
  world.members.CheckInvariants();
  member = world.Attach(2);
  const RegionId third = world.Register(member);
  CHECK(third != first);
  CHECK(third != second);
}

TEST_CASE("regions that are being opened are limited") {
  World world;
  for (size_t i = 0; i < Calls::kMaxOpening; ++i) REQUIRE(world.members.BeginOpening().ok());
  CHECK(world.members.BeginOpening().message() == "4096 regions are being opened already");
  world.members.EndOpening();
  CHECK(world.members.BeginOpening().ok());
}

}  // namespace
}  // namespace refitd
