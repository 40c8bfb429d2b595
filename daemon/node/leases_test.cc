#include "daemon/node/leases.h"

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
  Leases leases;
  MemberRecord* const member = leases.Add(Rank(1));
  const std::string token = member->token;
  leases.CheckInvariants();
  CHECK(token.size() == sizeof(Token));
  REQUIRE(leases.Authenticate(token, {}).ok());
  CHECK(*leases.Authenticate(token, {}) == member);

  CHECK(leases.Lose(member));
  CHECK_FALSE(leases.Lose(member));
  leases.CheckInvariants();
  CHECK(leases.Authenticate(token, {}).status().code() == absl::StatusCode::kUnauthenticated);
  CHECK(leases.Find(MemberId(1)) == member);

  CHECK(leases.Remove(MemberId(1)).id == MemberId(1));
  CHECK_FALSE(leases.Contains(MemberId(1)));
  leases.CheckInvariants();
}

TEST_CASE("CheckInvariants finds a lost member whose token lives, and a live one without (P9)") {
  Leases leases;
  MemberRecord* const member = leases.Add(Rank(1));
  CHECK_FALSE(Aborts([&] { leases.CheckInvariants(); }));
  CHECK(Aborts([&] {
    member->lost = true;
    leases.CheckInvariants();
  }));
  CHECK(Aborts([&] {
    member->token = "another";
    leases.CheckInvariants();
  }));
}

TEST_CASE("a member that is removed without being lost leaves no token behind") {
  Leases leases;
  const std::string token = leases.Add(Rank(1))->token;
  leases.Remove(MemberId(1));
  CHECK_FALSE(leases.Authenticate(token, {}).ok());
  CHECK(leases.size() == 0);
  leases.CheckInvariants();
}

TEST_CASE("no two leases have one token") {
  Leases leases;
  std::set<std::string> tokens;
  for (uint64_t id = 1; id <= 1000; ++id) tokens.insert(leases.Add(Rank(id))->token);
  CHECK(tokens.size() == 1000);
  leases.CheckInvariants();
}

TEST_CASE("a lease that was taken over a unix socket works for the same user only") {
  Leases leases;
  MemberRecord record = Rank(1);
  record.peer = OfUser(1000);
  const std::string token = leases.Add(std::move(record))->token;
  CHECK(leases.Authenticate(token, OfUser(1000)).ok());
  CHECK(leases.Authenticate(token, OfUser(1001)).status().code() ==
        absl::StatusCode::kPermissionDenied);
  CHECK(leases.Authenticate(token, {}).status().code() == absl::StatusCode::kPermissionDenied);

  const std::string over_tcp = leases.Add(Rank(2))->token;
  CHECK(leases.Authenticate(over_tcp, {}).ok());
}

TEST_CASE("a lease that was taken with a certificate works for the same identity only") {
  Leases leases;
  const auto of = [](const std::string& identity) {
    Peer peer;
    peer.identity = identity;
    return peer;
  };
  MemberRecord record = Rank(1);
  record.peer = of("spiffe://prod/a");
  const std::string token = leases.Add(std::move(record))->token;
  CHECK(leases.Authenticate(token, of("spiffe://prod/a")).ok());
  CHECK(leases.Authenticate(token, of("spiffe://prod/b")).status().code() ==
        absl::StatusCode::kPermissionDenied);
  CHECK(leases.Authenticate(token, {}).status().code() == absl::StatusCode::kPermissionDenied);
  CHECK(leases.Authenticate(token, OfUser(0)).status().code() ==
        absl::StatusCode::kPermissionDenied);

  const std::string in_the_clear = leases.Add(Rank(2))->token;
  CHECK(leases.Authenticate(in_the_clear, of("spiffe://prod/a")).status().code() ==
        absl::StatusCode::kPermissionDenied);
}

TEST_CASE("which GPUs a group has members on is told of that group alone") {
  Leases leases;
  leases.Add(Rank(1, "a", 3));
  leases.Add(Rank(2, "b"));
  CHECK(leases.HasDevices("a"));
  CHECK_FALSE(leases.HasDevices("b"));
  CHECK(leases.OnDevice("a", 3));
  CHECK_FALSE(leases.OnDevice("a", 2));
  CHECK_FALSE(leases.OnDevice("b", 3));
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

}  // namespace
}  // namespace refitd
