// Requests become values, or errors that name field and value (P10).
#include <catch2/catch.hpp>
#include <chrono>
#include <string>

#include "daemon/checks/bucket.h"
#include "daemon/services/hello.h"
#include "daemon/services/status.h"
#include "daemon/services/trainer_events.h"
#include "proto/protocol.h"

namespace refitd {
namespace {

using Catch::Contains;

constexpr Duration kLongest = std::chrono::minutes(1);

template <typename Value>
std::string Refusal(const absl::StatusOr<Value>& value) {
  CHECK(value.status().code() == absl::StatusCode::kInvalidArgument);
  return std::string(value.status().message());
}

v1::EngineHello Hello() {
  v1::EngineHello hello;
  SayProtocol(&hello);
  hello.set_group("g");
  hello.set_instance("i");
  hello.set_rank(1);
  hello.set_world_size(2);
  hello.set_delivery(v1::DELIVERY_STAGED);
  return hello;
}

TEST_CASE("a Begin becomes its event, without call and member") {
  v1::BeginRequest request;
  request.set_request_id("r");
  request.set_version(7);
  request.set_duration_ms(60'000);
  request.set_tensor_count(3);
  request.set_note("n");
  const absl::StatusOr<BeginEvent> event = EventOf(request, kLongest);
  REQUIRE(event.ok());
  CHECK(event->call == CallId());
  CHECK(event->member == MemberId());
  CHECK(event->request_id == "r");
  CHECK(event->version == Version(7));
  CHECK(event->duration == kLongest);
  CHECK(event->tensor_count == 3);
  CHECK(event->note == "n");
}

TEST_CASE("a bad field of a trainer's request is named with its value") {
  v1::BeginRequest begin;
  begin.set_duration_ms(60'001);
  CHECK(Refusal(EventOf(begin, kLongest)) == "duration_ms: 60001 is more than the maximum 60000");
  begin.set_duration_ms(0);
  begin.set_version(-1);
  CHECK(Refusal(EventOf(begin, kLongest)) == "version: -1 is negative");
  begin.set_version(1);
  begin.set_tensor_count(-1);
  CHECK_THAT(Refusal(EventOf(begin, kLongest)), Contains("tensor_count: -1 is not in 0.."));
  v1::RefitRequest refit;
  refit.set_bucket_count(-1);
  CHECK(Refusal(EventOf(refit, kLongest)) == "bucket_count: -1 is negative");
  v1::LeaseSlotRequest lease;
  lease.set_wait_ms(-1);
  CHECK_THAT(Refusal(EventOf(lease)), Contains("wait_ms: -1 is not in 0.."));
  v1::CommitRequest commit;
  commit.set_request_id(std::string(kMaxRequestIdBytes + 1, 'r'));
  CHECK(Refusal(EventOf(commit)) == "request_id: 65 bytes are more than 64");
  v1::AbortRequest abort;
  abort.set_reason(std::string(kMaxReasonBytes + 1, 'r'));
  CHECK(Refusal(EventOf(abort)) == "reason: 513 bytes are more than 512");
}

TEST_CASE("an engine's hello becomes an arrival, with the process that the kernel names") {
  PeerCredentials self;
  self.pid = 42;
  v1::EngineHello hello = Hello();
  hello.set_pid(7);
  hello.mutable_spec()->set_trainer_ranks(3);
  const absl::StatusOr<Arrival> arrival = ArrivalOf(hello, Peer{self});
  REQUIRE(arrival.ok());
  const auto& identity = std::get<EngineIdentity>(arrival->identity);
  CHECK(identity.pid == 42);
  CHECK(identity.rank == 1);
  CHECK(arrival->record.staged);
  CHECK(arrival->record.device == "host");
  CHECK(arrival->spec->trainer_ranks == 3);
  CHECK(arrival->wait == Duration(0));
  CHECK(std::get<EngineIdentity>(ArrivalOf(hello, Peer{})->identity).pid == 7);
}

TEST_CASE("a bad field of a hello is named with its value") {
  const auto refused = [](auto change) {
    v1::EngineHello hello = Hello();
    change(&hello);
    return Refusal(ArrivalOf(hello, Peer{}));
  };
  CHECK(refused([](auto* h) { h->set_rank(2); }) == "rank: 2 is not in 0..1");
  CHECK(refused([](auto* h) { h->set_pid(-1); }) == "pid: -1 is negative");
  CHECK(refused([](auto* h) { h->set_coordinator("b"); }) == "coordinator: 'b' is not HOST:PORT");
  CHECK(refused([](auto* h) { h->set_delivery(v1::DELIVERY_UNSPECIFIED); }) ==
        "delivery: 0 is neither registered (1) nor staged (2)");
  CHECK(refused([](auto* h) { h->set_held_origin(5); }) == "held_origin: 5 without a held_version");
}

TEST_CASE("a watcher's interval has a default and bounds") {
  v1::WatchUpdatesRequest request;
  CHECK(WishOf(request)->interval == std::chrono::milliseconds(200));
  request.set_interval_ms(19);
  CHECK(Refusal(WishOf(request)) == "interval_ms: 19 is not in 20..3600000");
}

}  // namespace
}  // namespace refitd
