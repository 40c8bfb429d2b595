// Requests become values, or errors that name field and value (P10).
#include <catch2/catch.hpp>
#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "daemon/checks/bucket.h"
#include "daemon/link/trainer_messages.h"
#include "daemon/process/version.h"
#include "daemon/services/member_events.h"
#include "daemon/services/member_requests.h"
#include "daemon/services/status.h"
#include "proto/protocol.h"
#include "transport/base/failure.h"

namespace refitd {
namespace {

using Catch::Contains;

constexpr Duration kLongest = std::chrono::minutes(1);

template <typename Value>
std::string Refusal(const absl::StatusOr<Value>& value) {
  CHECK(value.status().code() == absl::StatusCode::kInvalidArgument);
  INFO(value.status());
  CHECK_FALSE(FailureOf(value.status()).field.empty());
  return std::string(value.status().message());
}

v1::EngineHello Hello() {
  v1::EngineHello hello;
  hello.set_protocol(v1::PROTOCOL_VERSION_1);
  hello.set_group("g");
  hello.set_instance("i");
  hello.set_rank(1);
  hello.set_world_size(2);
  hello.set_delivery(v1::DELIVERY_LOADER);
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
  CHECK_THAT(Refusal(EventOf(begin, kLongest)), Contains("tensor_count: -1 is negative"));
  begin.set_tensor_count(kMaxTensorsPerLayout + 1);
  CHECK(EventOf(begin, kLongest).status().code() == absl::StatusCode::kResourceExhausted);
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

TEST_CASE("members' texts were taken in with what a terminal obeys") {
  v1::AbortRequest abort;
  abort.set_reason("a\x1b[2J");
  CHECK(Refusal(EventOf(abort)) == "reason: a control character at byte 1");
  CHECK(FailureOf(EventOf(abort).status()).field == "reason");
  v1::CommitRequest commit;
  commit.set_request_id("\n");
  CHECK(Refusal(EventOf(commit)) == "request_id: a control character at byte 0");
  v1::EngineHello hello = Hello();
  hello.set_client("c\xc2\x9b");
  CHECK(Refusal(ArrivalOf(hello, Peer{})) == "client: a control character at byte 1");
  hello = Hello();
  hello.mutable_device()->set_name("GPU-\x7f");
  CHECK(Refusal(ArrivalOf(hello, Peer{})) == "device.name: a control character at byte 4");
  hello = Hello();
  hello.set_group("-x");
  CHECK_THAT(Refusal(ArrivalOf(hello, Peer{})), Contains("group is \"-x\""));
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
  CHECK(arrival->record.reads_slots);
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
        "delivery: 0 is neither in_place (1) nor loader (2)");
  CHECK(refused([](auto* h) { h->set_held_origin(5); }) == "held_origin: 5 without a held_version");
  CHECK_THAT(refused([](auto* h) { h->set_restore(true); }), Contains("restore: only in_place"));
  for (const bool dirty : {false, true}) {
    CHECK_THAT(refused([dirty](auto* h) {
                 h->set_delivery(v1::DELIVERY_IN_PLACE);
                 h->set_restore(true);
                 h->set_dirty(dirty);
                 if (!dirty) h->set_held_version(1);
               }),
               Contains("restore: the daemon knows what the kept memory holds"));
  }
}

TEST_CASE("a watcher's interval has a default and bounds") {
  v1::WatchUpdatesRequest request;
  CHECK(FilterOf(request)->interval == std::chrono::milliseconds(200));
  request.set_interval_ms(19);
  CHECK(Refusal(FilterOf(request)) == "interval_ms: 19 is not in 20..3600000");
}

TEST_CASE("a push becomes its event and a bucket whose places are not known yet") {
  v1::PushBucketRequest request;
  request.set_request_id("r");
  request.set_version(7);
  request.set_update_id(9);
  v1::Bucket& bucket = *request.mutable_bucket();
  bucket.set_seq(4);
  bucket.add_names("w");
  bucket.add_dtypes(v1::DTYPE_UINT8);
  bucket.add_shapes()->add_dims(3);
  bucket.mutable_inline_bytes()->add_chunks("abc");
  const absl::StatusOr<ReceivedPush> push = PushOf(request);
  REQUIRE(push.ok());
  CHECK(push->event.request_id == "r");
  CHECK(push->event.version == Version(7));
  CHECK(push->event.update == UpdateId(9));
  CHECK(push->event.bucket == nullptr);
  CHECK(push->received.bucket->seq == 4);
  CHECK(push->received.bucket->bytes == 3);
  CHECK(push->received.bucket->places.empty());
  const auto& chunks = std::get<std::vector<std::string_view>>(push->received.source);
  REQUIRE(chunks.size() == 1);
  CHECK(chunks[0].data() == bucket.inline_bytes().chunks(0).data());

  bucket.clear_source();
  CHECK_THAT(Refusal(PushOf(request)), Contains("bucket.source is missing"));
  request.set_request_id(std::string(kMaxRequestIdBytes + 1, 'r'));
  CHECK_THAT(Refusal(PushOf(request)), Contains("request_id: 65 bytes"));
}

TEST_CASE("a welcome tells both roles the same") {
  WelcomeNews news;
  news.member = MemberId(3);
  news.token = "token";
  news.incarnation = 5;
  news.descriptor_socket = "s";
  news.inline_bytes = 10;
  news.outstanding_buckets = 11;
  news.default_duration = std::chrono::milliseconds(12);
  news.max_duration = std::chrono::milliseconds(13);
  news.message_bytes = 14;
  news.slot_bytes = 15;
  news.slots = 16;
  CHECK_FALSE(MemberEventOf<v1::EngineEvent>(news).welcome().has_group_version());
  news.version = Version(17);
  const v1::Welcome welcome = MemberEventOf<v1::EngineEvent>(news).welcome();
  CHECK(welcome.SerializeAsString() ==
        MemberEventOf<v1::TrainerEvent>(news).welcome().SerializeAsString());
  CHECK(welcome.member_id() == 3);
  CHECK(welcome.lease().token() == "token");
  CHECK(welcome.lease().incarnation() == 5);
  CHECK(welcome.lease().protocol() == v1::PROTOCOL_VERSION_1);
  CHECK(welcome.descriptor_socket() == "s");
  CHECK(welcome.limits().inline_bytes() == 10);
  CHECK(welcome.limits().outstanding_buckets() == 11);
  CHECK(welcome.limits().default_duration_ms() == 12);
  CHECK(welcome.limits().max_duration_ms() == 13);
  CHECK(welcome.limits().message_bytes() == 14);
  CHECK(welcome.slot_bytes() == 15);
  CHECK(welcome.slots() == 16);
  CHECK(welcome.group_version() == 17);
  CHECK(welcome.daemon_version() == kVersion);
  CHECK_FALSE(welcome.has_kept());
  news.kept = KeptNews{{Version(18), 19, "uid:20", 21}, {22, 23}};
  const v1::KeptArenas kept = MemberEventOf<v1::EngineEvent>(news).welcome().kept();
  CHECK(kept.version() == 18);
  CHECK(kept.incarnation() == 19);
  CHECK(kept.owner() == "uid:20");
  CHECK(kept.digest() == 21);
  CHECK(std::vector<int64_t>(kept.region_bytes().begin(), kept.region_bytes().end()) ==
        std::vector<int64_t>{22, 23});
}

TEST_CASE("a part tells a loader engine where in the pool its tensors lie") {
  CheckedBucket bucket;
  bucket.tensors = {{"a", DType::kFloat32, {4}}, {"b", DType::kUint8, {2, 3}}};
  PartContent content;
  content.bucket = std::make_shared<const CheckedBucket>(std::move(bucket));
  content.ranges = {{1, 2, 4}};
  content.byte_offsets = {64};
  content.bytes = 68;
  PartNews news;
  news.part.update = UpdateId(2);
  news.part.version = Version(3);
  news.part.part = PartSeq(4);
  news.part.slot = {SlotIndex(5), GrantId(6)};
  news.part.content = std::make_shared<const PartContent>(std::move(content));
  news.slot_bytes = 4096;
  const v1::BucketReady ready = MemberEventOf<v1::EngineEvent>(news).bucket();
  CHECK(ready.update_id() == 2);
  CHECK(ready.version() == 3);
  CHECK(ready.part() == 4);
  CHECK(ready.slot() == 5);
  CHECK(ready.slot_byte_offset() == 5 * 4096);
  CHECK(ready.bytes() == 68);
  REQUIRE(ready.names_size() == 1);
  CHECK(ready.names(0) == "b");
  CHECK(ready.dtypes(0) == v1::DTYPE_UINT8);
  CHECK(ready.shapes(0).dims_size() == 2);
  CHECK(ready.starts(0) == 2);
  CHECK(ready.sizes(0) == 4);
  CHECK(ready.byte_offsets(0) == 64);
}

TEST_CASE("both roles get the same event for an update's outcome") {
  const auto both = [](const MemberNews& news, auto check) {
    check(MemberEventOf<v1::EngineEvent>(news));
    check(MemberEventOf<v1::TrainerEvent>(news));
  };
  both(SendCommitted{MemberId(1), Version(1), 2}, [](const auto& event) {
    CHECK(event.committed().version() == 1);
    CHECK(event.committed().incarnation() == 2);
  });
  Failure failure;
  failure.Add({SuspectRole::kTrainer, "", "", 2, 9});
  failure.AddDirty("i");
  both(SendAborted{MemberId(1), Version(3), "why", true, failure}, [](const auto& event) {
    CHECK(event.aborted().version() == 3);
    CHECK(event.aborted().reason() == "why");
    CHECK(event.aborted().dirty());
    CHECK(event.aborted().failure().suspects(0).rank() == 2);
    CHECK(event.aborted().failure().dirty_instances(0) == "i");
  });
  both(SendDraining{MemberId(1)}, [](const auto& event) { CHECK(event.has_draining()); });
  SendPrepare prepare{MemberId(1), Version(4), UpdateId(5), std::chrono::milliseconds(6), 7};
  const v1::Prepare told = MemberEventOf<v1::EngineEvent>(prepare).prepare();
  CHECK(told.version() == 4);
  CHECK(told.update_id() == 5);
  CHECK(told.remaining_ms() == 6);
  CHECK(told.tensor_count() == 7);
}

}  // namespace
}  // namespace refitd
