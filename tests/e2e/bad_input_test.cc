// Bad input to a real daemon: each is refused with the stated status and a message that names the
// culprit, changes nothing (the same update then commits), and harms no other group.
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <fstream>
#include <functional>
#include <future>
#include <limits>

#include "proto/convert.h"
#include "tests/e2e/harness.h"
#include "tests/e2e/require.h"

namespace refitd::e2e {
namespace {

using grpc::StatusCode;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

// A tiny model, since most buckets here never move a byte.
Model SmallModel() {
  return {{"a", DType::kFloat32, {4, 4}}, {"b", DType::kBFloat16, {8}}, {"c", DType::kUint8, {3}}};
}

// A test's updates stay open as long as the test takes.
std::vector<std::string> WithPatience(std::vector<std::string> flags) {
  flags.insert(flags.end(), {"--limits-idle-ms=600000", "--limits-default-duration-ms=600000"});
  return flags;
}

// A group with one engine and one trainer, and a bystander group that must not be affected.
struct Scene {
  explicit Scene(std::vector<std::string> flags = {}, const v1::GroupSpec& spec = Spec())
      : daemon(WithPatience(std::move(flags))),
        engine(daemon.Connect(), RawEngine::Hello("g", "i", 0, 1, v1::DELIVERY_IN_PLACE, spec),
               HoldWhole(model)),
        trainer(daemon.Connect(), RawTrainer::Hello("g", spec)),
        bystander_engine(daemon.Connect(), RawEngine::Hello("bystander", "i"), HoldWhole(model)),
        bystander(daemon.Connect(), RawTrainer::Hello("bystander")) {
    REQUIRE(trainer.attached().ok());
    REQUIRE(bystander.attached().ok());
    REQUIRE_OK(bystander.Begin(1));
  }

  v1::Bucket Good(int64_t version, int64_t seq = 0, std::vector<int> indices = {}) const {
    return InlineBucket(model, BytesOf(model, version), seq, false, std::move(indices));
  }

  // The update to `version`, which was begun before, still takes its bytes and commits; so does the
  // bystander's update, which was open all the time.
  void RequireUnharmed(int64_t version) {
    REQUIRE_OK(trainer.Push(version, Good(version)));
    REQUIRE_OK(trainer.Commit(version, 1));
    RequireInstalled(version);
  }
  void RequireInstalled(int64_t version) {
    CHECK(engine.Difference(model, BytesOf(model, version)) == "");
    REQUIRE_OK(bystander.Push(1, InlineBucket(model, BytesOf(model, 77), 0, true)));
    REQUIRE_OK(bystander.Commit(1, 1));
    CHECK(bystander_engine.Difference(model, BytesOf(model, 77)) == "");
  }

  const Model model = SmallModel();
  Daemon daemon{std::vector<std::string>{"--cuda-enabled=false"}};
  Holder engine;
  RawTrainer trainer;
  Holder bystander_engine;
  RawTrainer bystander;
};

TEST_CASE("a malformed bucket is refused by field and value, and the update goes on") {
  Scene s;
  SharedMemory memory = s.trainer.NewMemory(4096);
  SharedMemory other = s.bystander.NewMemory(4096);
  REQUIRE(memory.region_id != 0);
  REQUIRE_OK(s.trainer.Begin(5));

  struct Bad {
    const char* what;
    std::function<void(v1::Bucket*)> damage;
    StatusCode code;
    std::vector<std::string> words;
  };
  const auto in_region = [&](v1::Bucket* b, std::vector<int64_t> offsets, uint64_t region = 0) {
    for (const int64_t offset : offsets) {
      v1::RegionRef* ref = b->mutable_regions()->add_refs();
      ref->set_region_id(region != 0 ? region : memory.region_id);
      ref->set_byte_offset(offset);
    }
  };
  const auto shape = [](v1::Bucket* b, std::vector<int64_t> dims) {
    b->mutable_shapes(0)->clear_dims();
    for (const int64_t dim : dims) b->mutable_shapes(0)->add_dims(dim);
  };
  const StatusCode kInvalid = StatusCode::INVALID_ARGUMENT;
  const std::vector<Bad> all = {
      {"fewer dtypes than names",
       [](v1::Bucket* b) { b->mutable_dtypes()->RemoveLast(); },
       kInvalid,
       {"dtypes", "2", "3"}},
      {"more shapes than names",
       [](v1::Bucket* b) { b->add_shapes(); },
       kInvalid,
       {"shapes", "4", "3"}},
      {"fewer sizes than names",
       [](v1::Bucket* b) { b->add_sizes(16); },
       kInvalid,
       {"sizes", "1", "3"}},
      {"starts without sizes",
       [](v1::Bucket* b) {
         for (int64_t n : {0, 0, 0}) b->add_starts(n);
       },
       kInvalid,
       {"starts", "sizes"}},
      {"fewer chunks than names",
       [](v1::Bucket* b) { b->mutable_inline_bytes()->mutable_chunks()->RemoveLast(); },
       kInvalid,
       {"chunks", "2", "3"}},
      {"no names", [](v1::Bucket* b) { b->Clear(); }, kInvalid, {"names"}},
      {"no source", [](v1::Bucket* b) { b->clear_source(); }, kInvalid, {"source"}},
      {"negative seq", [](v1::Bucket* b) { b->set_seq(-1); }, kInvalid, {"seq", "-1"}},
      {"a negative dimension",
       [&](v1::Bucket* b) {
         shape(b, {4, -4});
       },
       kInvalid,
       {"shapes[0]", "\"a\"", "-4"}},
      {"a shape that overflows",
       [&](v1::Bucket* b) {
         shape(b, {kMax, kMax});
       },
       kInvalid,
       {"shapes[0]", "\"a\""}},
      {"a shape that overflows beside a zero",
       [&](v1::Bucket* b) {
         shape(b, {0, kMax, kMax});
       },
       kInvalid,
       {"shapes[0]", "\"a\""}},
      {"an absurd shape",
       [&](v1::Bucket* b) { shape(b, {int64_t{1} << 50}); },
       kInvalid,
       {"shapes[0]", "\"a\""}},
      {"nine dimensions",
       [&](v1::Bucket* b) {
         shape(b, {1, 1, 1, 1, 1, 1, 1, 1, 16});
       },
       kInvalid,
       {"shapes[0]", "9"}},
      {"a negative size",
       [](v1::Bucket* b) {
         for (int64_t n : {16, -8, 3}) b->add_sizes(n);
       },
       kInvalid,
       {"sizes[1]", "\"b\"", "-8"}},
      {"a size that disagrees with its shape",
       [](v1::Bucket* b) {
         for (int64_t n : {16, 7, 3}) b->add_sizes(n);
       },
       kInvalid,
       {"sizes[1]", "\"b\"", "7"}},
      {"a size beyond the shape",
       [](v1::Bucket* b) {
         for (int64_t n : {16, 8, 3}) b->add_sizes(n);
         for (int64_t n : {0, 1, 0}) b->add_starts(n);
       },
       kInvalid,
       {"sizes[1]", "\"b\"", "8"}},
      {"a start whose end overflows",
       [](v1::Bucket* b) {
         for (int64_t n : {16, 8, 3}) b->add_sizes(n);
         for (int64_t n : {int64_t{0}, kMax, int64_t{0}}) b->add_starts(n);
       },
       kInvalid,
       {"\"b\"", std::to_string(kMax)}},
      {"a negative start",
       [](v1::Bucket* b) {
         for (int64_t n : {16, 8, 3}) b->add_sizes(n);
         for (int64_t n : {0, -1, 0}) b->add_starts(n);
       },
       kInvalid,
       {"starts[1]", "\"b\"", "-1"}},
      {"an unknown dtype",
       [](v1::Bucket* b) { b->set_dtypes(1, static_cast<v1::DType>(99)); },
       kInvalid,
       {"dtypes[1]", "99", "\"b\""}},
      {"no dtype",
       [](v1::Bucket* b) { b->set_dtypes(1, v1::DTYPE_UNSPECIFIED); },
       kInvalid,
       {"dtypes[1]", "\"b\""}},
      {"a name twice",
       [](v1::Bucket* b) { b->set_names(2, "a"); },
       kInvalid,
       {"names[2]", "\"a\""}},
      {"an empty name", [](v1::Bucket* b) { b->set_names(1, ""); }, kInvalid, {"names[1]"}},
      {"a name of 513 bytes",
       [](v1::Bucket* b) { b->set_names(1, std::string(513, 'x')); },
       kInvalid,
       {"names[1]", "513"}},
      {"a chunk of another size",
       [](v1::Bucket* b) { b->mutable_inline_bytes()->mutable_chunks(1)->push_back('x'); },
       kInvalid,
       {"chunks[1]", "\"b\"", "17", "16"}},
      {"byte offsets where nothing is packed",
       [](v1::Bucket* b) {
         for (int64_t n : {0, 64, 80}) b->add_byte_offsets(n);
       },
       kInvalid,
       {"byte_offsets", "packed"}},
      {"packed with several chunks",
       [](v1::Bucket* b) { b->set_packed(true); },
       kInvalid,
       {"chunks", "3", "1"}},
      {"an unaligned byte offset",
       [&](v1::Bucket* b) {
         b->set_packed(true);
         for (int64_t n : {0, 65, 96}) b->add_byte_offsets(n);
         in_region(b, {0});
       },
       kInvalid,
       {"byte_offsets[1]", "\"b\"", "65"}},
      {"overlapping byte offsets",
       [&](v1::Bucket* b) {
         b->set_packed(true);
         for (int64_t n : {0, 62, 96}) b->add_byte_offsets(n);
         in_region(b, {0});
       },
       kInvalid,
       {"byte_offsets", "62", "\"a\""}},
      {"a negative byte offset",
       [&](v1::Bucket* b) {
         b->set_packed(true);
         for (int64_t n : {0, -64, 96}) b->add_byte_offsets(n);
         in_region(b, {0});
       },
       kInvalid,
       {"byte_offsets[1]", "-64"}},
      {"a region that is too small",
       [&](v1::Bucket* b) {
         in_region(b, {4096 - 32, 0, 64});
       },
       kInvalid,
       {"refs[0]", std::to_string(memory.region_id), "too small"}},
      {"a packed buffer that its region is too small for",
       [&](v1::Bucket* b) {
         b->set_packed(true);
         in_region(b, {4096 - 64});
       },
       kInvalid,
       {"refs[0]", "too small"}},
      {"an offset outside of the region",
       [&](v1::Bucket* b) {
         in_region(b, {0, 5000, 64});
       },
       kInvalid,
       {"refs[1]", "5000", "4096"}},
      {"a negative offset in a region",
       [&](v1::Bucket* b) {
         in_region(b, {0, -2, 64});
       },
       kInvalid,
       {"refs[1]", "-2"}},
      {"an unaligned offset in a region",
       [&](v1::Bucket* b) {
         in_region(b, {2, 64, 80});
       },
       kInvalid,
       {"refs[0]", "\"a\"", "unaligned"}},
      {"a region that is not known",
       [&](v1::Bucket* b) {
         in_region(b, {0, 64, 80}, 987'654);
       },
       StatusCode::NOT_FOUND,
       {"region_id", "987654"}},
      {"another member's region",
       [&](v1::Bucket* b) {
         in_region(b, {0, 64, 80}, other.region_id);
       },
       StatusCode::NOT_FOUND,
       {"region_id", std::to_string(other.region_id)}},
      {"a foreign handle kind",
       [](v1::Bucket* b) { b->mutable_cuda_ipc()->add_handles()->set_gpu_uuid("GPU-1"); },
       StatusCode::UNIMPLEMENTED,
       {"cuda_ipc"}},
      {"an unpacked bucket in a slot",
       [](v1::Bucket* b) { b->mutable_slot()->set_slot(1); },
       kInvalid,
       {"packed", "slot"}},
      {"a slot that was never leased",
       [](v1::Bucket* b) {
         b->set_packed(true);
         b->mutable_slot()->set_slot(1);
         b->mutable_slot()->set_grant(4711);
       },
       StatusCode::NOT_FOUND,
       {"4711"}},
      {"a slot that does not exist",
       [](v1::Bucket* b) {
         b->set_packed(true);
         b->mutable_slot()->set_slot(4'000'000'000u);
         b->mutable_slot()->set_grant(1);
       },
       StatusCode::NOT_FOUND,
       {"4000000000"}},
      {"a tensor that no engine knows",
       [](v1::Bucket* b) { b->set_names(1, "zz.top"); },
       StatusCode::FAILED_PRECONDITION,
       {"zz.top", "instance i"}},
      {"a dtype other than the engine's",
       [](v1::Bucket* b) { b->set_dtypes(1, v1::DTYPE_FLOAT16); },
       StatusCode::FAILED_PRECONDITION,
       {"'b'", "float16", "bfloat16", "engine i rank 0"}},
      {"a shape other than the engine's",
       [&](v1::Bucket* b) {
         shape(b, {2, 8});
       },
       StatusCode::FAILED_PRECONDITION,
       {"'a'", "[2, 8]", "[4, 4]", "engine i rank 0"}},
      {"a seq too far ahead",
       [](v1::Bucket* b) { b->set_seq(100'000); },
       StatusCode::RESOURCE_EXHAUSTED,
       {"seq", "100000"}},
  };
  for (const Bad& bad : all) {
    v1::Bucket bucket = s.Good(5);
    bad.damage(&bucket);
    INFO(bad.what);
    CheckRefused(s.trainer.Push(5, bucket).status, bad.code, bad.words);
  }
  CHECK(s.engine.DifferenceFromEmpty() == "");
  s.RequireUnharmed(5);
}

TEST_CASE("buckets out of their time or order are refused, and the update goes on") {
  Scene s;
  CheckRefused(s.trainer.Push(5, s.Good(5)).status, StatusCode::FAILED_PRECONDITION,
               {"version 5", "begin"});
  CheckRefused(s.trainer.Commit(5, 0).status, StatusCode::FAILED_PRECONDITION, {"version 5"});
  CheckRefused(s.trainer.LeaseSlot(5).status, StatusCode::FAILED_PRECONDITION, {"version 5"});
  CheckRefused(s.trainer.Abort(5, "why not").status, StatusCode::FAILED_PRECONDITION,
               {"version 5"});
  REQUIRE_OK(s.trainer.Begin(5));
  CheckRefused(s.trainer.Push(6, s.Good(6)).status, StatusCode::FAILED_PRECONDITION,
               {"version", "6", "5"});
  CheckRefused(s.trainer.Begin(6).status, StatusCode::FAILED_PRECONDITION, {"version 5"});

  REQUIRE_OK(s.trainer.Push(5, s.Good(5, 0, {0})));
  CheckRefused(s.trainer.Push(5, s.Good(5, 0, {1})).status, StatusCode::ALREADY_EXISTS,
               {"seq", "0"});
  CheckRefused(s.trainer.Push(5, s.Good(5, 1, {0})).status, StatusCode::ALREADY_EXISTS, {"'a'"});
  // Seq 1 is skipped: seq 2 waits for it, and no Commit gets past the gap.
  auto waiting =
      std::async(std::launch::async, [&] { return s.trainer.Push(5, s.Good(5, 2, {2})); });
  REQUIRE(Eventually([&] {  // accepted, though its turn has not come
    return s.trainer.Commit(5, 1).status.error_message().find("2 buckets were pushed") !=
           std::string::npos;
  }));
  CheckRefused(s.trainer.Commit(5, 3).status, StatusCode::FAILED_PRECONDITION,
               {"seq 1", "never pushed"});
  REQUIRE_OK(s.trainer.Push(5, s.Good(5, 1, {1})));
  REQUIRE_OK(waiting.get());
  CheckRefused(s.trainer.Commit(5, 2).status, StatusCode::FAILED_PRECONDITION,
               {"bucket_count", "2", "3"});
  CheckRefused(s.trainer.Commit(5, -1).status, StatusCode::INVALID_ARGUMENT,
               {"bucket_count", "-1"});
  REQUIRE_OK(s.trainer.Commit(5, 3));
  CheckRefused(s.trainer.Push(5, s.Good(5, 3)).status, StatusCode::FAILED_PRECONDITION,
               {"version 5", "committed"});
  CheckRefused(s.trainer.Commit(5, 3).status, StatusCode::FAILED_PRECONDITION,
               {"version 5", "committed"});
  s.RequireInstalled(5);
}

TEST_CASE("a Commit names the tensor that is missing or incomplete, and the update stays open") {
  Scene s;
  REQUIRE_OK(s.trainer.Begin(5));
  CheckRefused(s.trainer.Commit(5, 0).status, StatusCode::FAILED_PRECONDITION,
               {"'a'", "instance i", "never pushed"});
  REQUIRE_OK(s.trainer.Push(5, s.Good(5, 0, {0, 2})));
  CheckRefused(s.trainer.Commit(5, 1).status, StatusCode::FAILED_PRECONDITION,
               {"'b'", "instance i", "never pushed"});
  v1::Bucket part = Describe(s.model, 1, {1});
  part.add_starts(0);
  part.add_sizes(5);
  part.mutable_inline_bytes()->add_chunks(BytesOf(s.model, 5)[1].substr(0, 10));
  REQUIRE_OK(s.trainer.Push(5, part));
  CheckRefused(s.trainer.Commit(5, 2).status, StatusCode::FAILED_PRECONDITION,
               {"'b'", "element 5"});
  v1::Bucket again = Describe(s.model, 2, {1});
  again.add_starts(4);
  again.add_sizes(4);
  again.mutable_inline_bytes()->add_chunks(std::string(8, 'x'));
  CheckRefused(s.trainer.Push(5, again).status, StatusCode::ALREADY_EXISTS, {"'b'", "4"});
  part.set_seq(2);
  part.set_starts(0, 5);
  part.set_sizes(0, 3);
  part.mutable_inline_bytes()->set_chunks(0, BytesOf(s.model, 5)[1].substr(10));
  REQUIRE_OK(s.trainer.Push(5, part));
  REQUIRE_OK(s.trainer.Commit(5, 3));
  s.RequireInstalled(5);
}

TEST_CASE("a Begin out of bounds is refused by field and value, and versions only grow") {
  Scene s;
  const auto refused = [&](const std::function<void(v1::BeginRequest*)>& damage, StatusCode code,
                           const std::vector<std::string>& words) {
    v1::BeginRequest request;
    request.set_version(5);
    damage(&request);
    CheckRefused(s.trainer.Begin(request).status, code, words);
  };
  refused([](auto* r) { r->set_version(-3); }, StatusCode::INVALID_ARGUMENT, {"version", "-3"});
  refused([](auto* r) { r->set_duration_ms(-1); }, StatusCode::INVALID_ARGUMENT,
          {"duration_ms", "-1"});
  refused([](auto* r) { r->set_duration_ms(kMax); }, StatusCode::INVALID_ARGUMENT,
          {"duration_ms", std::to_string(kMax)});
  refused([](auto* r) { r->set_duration_ms(3'600'001); }, StatusCode::INVALID_ARGUMENT,
          {"duration_ms", "3600001"});
  refused([](auto* r) { r->set_verification(static_cast<v1::Verification>(77)); },
          StatusCode::INVALID_ARGUMENT, {"verification", "77"});
  refused([](auto* r) { r->set_tensor_count(-1); }, StatusCode::INVALID_ARGUMENT,
          {"tensor_count", "-1"});
  refused([](auto* r) { r->set_tensor_count(262'145); }, StatusCode::RESOURCE_EXHAUSTED,
          {"tensor_count", "262145", "262144 (kMaxTensorsPerLayout)"});
  refused([](auto* r) { r->set_total_bytes(-1); }, StatusCode::INVALID_ARGUMENT,
          {"total_bytes", "-1"});
  refused([](auto* r) { r->set_request_id(std::string(65, 'x')); }, StatusCode::INVALID_ARGUMENT,
          {"request_id", "65", "64"});

  REQUIRE_OK(s.trainer.Begin(5));
  REQUIRE_OK(s.trainer.Push(5, s.Good(5)));
  REQUIRE_OK(s.trainer.Commit(5, 1));
  refused([](auto* r) { r->set_version(5); }, StatusCode::FAILED_PRECONDITION, {"version", "5"});
  refused([](auto* r) { r->set_version(4); }, StatusCode::FAILED_PRECONDITION,
          {"version", "4", "5"});
  REQUIRE_OK(s.trainer.Begin(6));
  s.RequireUnharmed(6);
}

TEST_CASE("a repeated request id has no second effect and gets the first answer") {
  Scene s;
  v1::BeginRequest begin;
  begin.set_version(5);
  begin.set_request_id("begin-5");
  const auto first = s.trainer.Begin(begin);
  REQUIRE_OK(first);
  const auto second = s.trainer.Begin(begin);
  REQUIRE_OK(second);
  CHECK(second.response.update_id() == first.response.update_id());

  const auto pushed = s.trainer.Push(5, s.Good(5, 0, {0, 1}), "push-0");
  REQUIRE_OK(pushed);
  for (int i = 0; i < 3; ++i) {
    const auto again = s.trainer.Push(5, s.Good(5, 0, {0, 1}), "push-0");
    REQUIRE_OK(again);
    CHECK(again.response.group_seq() == pushed.response.group_seq());
    CHECK(again.response.bytes() == pushed.response.bytes());
  }
  CHECK(s.daemon.Group("g").update().buckets() == 1);
  CheckRefused(s.trainer.Push(5, s.Good(5, 1, {2}), "push-0").status, StatusCode::INVALID_ARGUMENT,
               {"request_id", "push-0"});
  REQUIRE_OK(s.trainer.Push(5, s.Good(5, 1, {2}), "push-1"));

  const auto committed = s.trainer.Commit(5, 2, "commit-5");
  REQUIRE_OK(committed);
  const auto again = s.trainer.Commit(5, 2, "commit-5");
  REQUIRE_OK(again);
  CHECK(again.response.version() == 5);
  CHECK(again.response.seconds() == committed.response.seconds());
  CHECK(s.daemon.Group("g").updates_committed() == 1);
  // A call that is repeated after the commit gets its first answer again, not "committed already".
  REQUIRE_OK(s.trainer.Push(5, s.Good(5, 0, {0, 1}), "push-0"));
  REQUIRE_OK(s.trainer.Begin(begin));
  s.RequireInstalled(5);
}

TEST_CASE("limits on bytes and messages are enforced and named") {
  Scene s({"--limits-inline-bytes=64", "--limits-message-bytes=131072"});
  CHECK(s.trainer.welcome().limits().inline_bytes() == 64);
  CHECK(s.trainer.welcome().limits().message_bytes() == 131'072);
  REQUIRE_OK(s.trainer.Begin(5));
  CheckRefused(s.trainer.Push(5, s.Good(5)).status, StatusCode::RESOURCE_EXHAUSTED,
               {"inline_bytes", "83", "64"});
  v1::Bucket huge = s.Good(5);
  huge.mutable_inline_bytes()->set_chunks(0, std::string(200'000, 'x'));
  CheckRefused(s.trainer.Push(5, huge).status, StatusCode::RESOURCE_EXHAUSTED, {"131072"});
  REQUIRE_OK(s.trainer.Push(5, s.Good(5, 0, {0})));
  REQUIRE_OK(s.trainer.Push(5, s.Good(5, 1, {1, 2})));
  REQUIRE_OK(s.trainer.Commit(5, 2));
  CHECK(s.engine.Difference(s.model, BytesOf(s.model, 5)) == "");
}

TEST_CASE("a hello that is malformed or disagrees is refused by field and value") {
  Scene s;
  const auto trainer = [&](const std::function<void(v1::TrainerHello*)>& damage, StatusCode code,
                           const std::vector<std::string>& words) {
    v1::TrainerHello hello = RawTrainer::Hello("fresh");
    damage(&hello);
    RawTrainer member(s.daemon.Connect(), hello);
    CheckRefused(member.attached(), code, words);
  };
  const StatusCode kInvalid = StatusCode::INVALID_ARGUMENT;
  trainer([](auto* h) { h->set_group(""); }, kInvalid, {"group"});
  trainer([](auto* h) { h->set_group("no spaces"); }, kInvalid, {"group", "0x20"});
  trainer([](auto* h) { h->set_group(std::string(129, 'g')); }, kInvalid, {"group", "129"});
  trainer([](auto* h) { h->set_rank(1); }, kInvalid, {"rank", "1"});
  trainer([](auto* h) { h->set_rank(-1); }, kInvalid, {"rank", "-1"});
  trainer([](auto* h) { h->set_world_size(0); }, kInvalid, {"world_size", "0"});
  trainer([](auto* h) { h->set_pid(-1); }, kInvalid, {"pid", "-1"});
  trainer([](auto* h) { h->set_wait_ms(-5); }, kInvalid, {"wait_ms", "-5"});
  trainer([](auto* h) { h->set_client(std::string(129, 'c')); }, kInvalid, {"client", "129"});
  trainer([](auto* h) { h->mutable_spec()->set_trainer_ranks(0); }, kInvalid,
          {"trainer_ranks", "0"});
  trainer([](auto* h) { h->mutable_spec()->set_slots(1); }, kInvalid, {"slots", "1"});
  trainer([](auto* h) { h->mutable_spec()->set_slots(65); }, kInvalid, {"slots", "65"});
  trainer([](auto* h) { h->mutable_spec()->set_slot_bytes(5000); }, kInvalid,
          {"slot_bytes", "5000"});
  trainer([](auto* h) { h->mutable_spec()->set_slot_bytes(-4096); }, kInvalid,
          {"slot_bytes", "-4096"});
  trainer([](auto* h) { h->mutable_spec()->set_min_instances(-1); }, kInvalid,
          {"min_instances", "-1"});
  trainer([](auto* h) { h->mutable_spec()->set_slot_bytes(int64_t{16} << 30); },
          StatusCode::RESOURCE_EXHAUSTED, {"fresh", "max_pool_bytes"});
  trainer([](auto* h) { h->set_protocol(static_cast<v1::ProtocolVersion>(9)); },
          StatusCode::FAILED_PRECONDITION, {"protocol", "9"});
  trainer([](auto* h) { h->mutable_device()->set_name("GPU-12345678"); },
          StatusCode::FAILED_PRECONDITION, {"device", "GPU-12345678"});
  trainer([](auto* h) { h->clear_spec(); }, StatusCode::NOT_FOUND, {"fresh"});
  trainer(
      [](auto* h) {
        h->clear_spec();
        h->set_wait_ms(20);
      },
      StatusCode::NOT_FOUND, {"fresh"});
  // The group exists, so the spec of another caller must equal the group's. Its only trainer rank
  // is taken.
  trainer(
      [](auto* h) {
        h->set_group("g");
        h->mutable_spec()->set_min_instances(7);
      },
      StatusCode::FAILED_PRECONDITION, {"spec", "'g'", "7"});
  trainer([](auto* h) { h->set_group("g"); }, StatusCode::ALREADY_EXISTS, {"trainer rank 0"});
  trainer(
      [](auto* h) {
        h->set_group("g");
        h->set_world_size(2);
        h->set_rank(1);
      },
      StatusCode::FAILED_PRECONDITION, {"world_size", "2", "1"});

  const auto engine = [&](const std::function<void(v1::EngineHello*)>& damage, StatusCode code,
                          const std::vector<std::string>& words) {
    v1::EngineHello hello = RawEngine::Hello("g", "j");
    damage(&hello);
    RawEngine member(s.daemon.Connect(), hello);
    CheckRefused(member.attached(), code, words);
  };
  engine([](auto* h) { h->set_instance("a/b"); }, kInvalid, {"instance", "0x2f"});
  engine([](auto* h) { h->set_delivery(v1::DELIVERY_UNSPECIFIED); }, kInvalid, {"delivery", "0"});
  engine([](auto* h) { h->set_held_version(-2); }, kInvalid, {"held_version", "-2"});
  engine([](auto* h) { h->mutable_manifest(); }, kInvalid, {"manifest"});
  engine([](auto* h) { h->set_instance("i"); }, StatusCode::ALREADY_EXISTS, {"engine i rank 0"});
  engine(
      [](auto* h) {
        h->set_instance("i");
        h->set_world_size(2);
        h->set_rank(1);
      },
      StatusCode::FAILED_PRECONDITION, {"world_size", "2", "1", "i"});
  engine(
      [](auto* h) {
        h->set_delivery(v1::DELIVERY_LOADER);
        h->mutable_manifest()->add_names("a");
      },
      kInvalid, {"manifest.dtypes", "0", "1"});

  // No hello, two hellos, and answers before any hello.
  {
    RawTrainer twice(s.daemon.Connect(), RawTrainer::Hello("twice"));
    REQUIRE(twice.attached().ok());
    v1::TrainerMessage message;
    *message.mutable_hello() = RawTrainer::Hello("twice");
    twice.events().Write(message);
    CheckRefused(twice.events().WaitEnd().value_or(grpc::Status::OK), kInvalid, {"hello"});
  }
  {
    const auto stub = v1::Engine::NewStub(s.daemon.Connect());
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kDeadline);
    const auto stream = stub->Attach(&context);
    v1::EngineMessage message;
    message.mutable_ready()->set_version(1);
    stream->Write(message);
    v1::EngineEvent event;
    while (stream->Read(&event)) continue;
    CheckRefused(stream->Finish(), kInvalid, {"hello"});
  }
  REQUIRE_OK(s.trainer.Begin(5));
  s.RequireUnharmed(5);
}

TEST_CASE("a group that comes in time is waited for") {
  Daemon daemon;
  v1::TrainerHello hello = RawTrainer::Hello("late", std::nullopt);
  hello.set_wait_ms(std::chrono::milliseconds(kDeadline).count());
  RawTrainer trainer(daemon.Connect(), hello);
  RawEngine engine(daemon.Connect(), RawEngine::Hello("late", "i"));
  REQUIRE(engine.attached().ok());
  CHECK(trainer.attached().ok());
}

TEST_CASE("a group whose coordinator is an address was drained, and its members came back") {
  const Daemon coordinator({"--listen-tcp=127.0.0.1:0", "--daemon-id=a"});
  Daemon daemon({"--listen-tcp=127.0.0.1:0", "--daemon-id=b"});
  v1::TrainerHello hello = RawTrainer::Hello("g");
  hello.set_coordinator(coordinator.address());
  RawTrainer trainer(daemon.Connect(), hello);
  REQUIRE(trainer.attached().ok());
  v1::DrainRequest drain;
  drain.set_group("g");
  CheckRefused(daemon.Call(&v1::Operator::Stub::Drain, drain).status,
               StatusCode::FAILED_PRECONDITION, {"'g'", coordinator.address()});
  drain.clear_group();
  const auto drained = daemon.Call(&v1::Operator::Stub::Drain, drain);
  REQUIRE_OK(drained);
  CHECK(drained.response.drained().empty());
  CHECK_FALSE(trainer.events().ended());
}

TEST_CASE("operators' requests about groups are refused by name") {
  Scene s;
  const auto create = [&](const std::string& group, const v1::GroupSpec& spec,
                          bool replace = false) {
    v1::CreateGroupRequest request;
    request.set_group(group);
    *request.mutable_spec() = spec;
    request.set_replace(replace);
    return s.daemon.Call(&v1::Operator::Stub::CreateGroup, request);
  };
  const auto same = create("g", Spec());
  REQUIRE_OK(same);
  CHECK(!same.response.created());
  CheckRefused(create("g", Spec(2)).status, StatusCode::ALREADY_EXISTS, {"'g'"});
  CheckRefused(create("bad name", Spec()).status, StatusCode::INVALID_ARGUMENT, {"group", "0x20"});
  CheckRefused(create("h", Spec(-1)).status, StatusCode::INVALID_ARGUMENT, {"trainer_ranks", "-1"});
  REQUIRE_OK(s.trainer.Begin(5));
  CheckRefused(create("g", Spec(), true).status, StatusCode::FAILED_PRECONDITION,
               {"g", "version 5"});

  v1::DeleteGroupRequest remove;
  remove.set_group("g");
  CheckRefused(s.daemon.Call(&v1::Operator::Stub::DeleteGroup, remove).status,
               StatusCode::FAILED_PRECONDITION, {"'g'", "2 members"});
  remove.set_group("none");
  CheckRefused(s.daemon.Call(&v1::Operator::Stub::DeleteGroup, remove).status,
               StatusCode::NOT_FOUND, {"'none'"});
  v1::AbortUpdateRequest abort;
  abort.set_group("none");
  CheckRefused(s.daemon.Call(&v1::Operator::Stub::AbortUpdate, abort).status, StatusCode::NOT_FOUND,
               {"'none'"});
  // Its members name this daemon's own address, and would come back.
  v1::DrainRequest drain;
  drain.set_group("none");
  CheckRefused(s.daemon.Call(&v1::Operator::Stub::Drain, drain).status, StatusCode::NOT_FOUND,
               {"'none'"});
  drain.set_group("g");
  CheckRefused(s.daemon.Call(&v1::Operator::Stub::Drain, drain).status,
               StatusCode::FAILED_PRECONDITION, {"'g'", "own address"});
  drain.clear_group();
  const auto drained = s.daemon.Call(&v1::Operator::Stub::Drain, drain);
  REQUIRE_OK(drained);
  CHECK(drained.response.drained_size() + drained.response.running_size() == 0);
  v1::GetGroupRequest get;
  get.set_group("none");
  CheckRefused(s.daemon.Call(&v1::Operator::Stub::GetGroup, get).status, StatusCode::NOT_FOUND,
               {"'none'"});
  CheckRefused(s.trainer.GetUpdate("none", 1).status, StatusCode::NOT_FOUND, {"'none'"});
  s.RequireUnharmed(5);
  abort.set_group("g");
  CheckRefused(s.daemon.Call(&v1::Operator::Stub::AbortUpdate, abort).status,
               StatusCode::FAILED_PRECONDITION, {"g"});
}

TEST_CASE("a lease that is forged, stale or another role's is refused") {
  Scene s;
  const auto begin = [&](const std::function<void(v1::Lease*)>& damage) {
    v1::BeginRequest request;
    *request.mutable_lease() = s.trainer.welcome().lease();
    request.set_version(5);
    damage(request.mutable_lease());
    return s.trainer.Begin(request).status;
  };
  CheckRefused(begin([](auto* l) { l->set_token(std::string(16, 'x')); }),
               StatusCode::UNAUTHENTICATED, {"token"});
  CheckRefused(begin([](auto* l) { l->set_token(""); }), StatusCode::UNAUTHENTICATED, {"token"});
  CheckRefused(begin([](auto* l) { l->set_incarnation(12'345); }), StatusCode::FAILED_PRECONDITION,
               {"incarnation", "3039"});
  CheckRefused(begin([](auto* l) { l->set_protocol(v1::PROTOCOL_VERSION_UNSPECIFIED); }),
               StatusCode::FAILED_PRECONDITION, {"protocol", "0"});
  CheckRefused(begin([&](auto* l) { l->set_token(s.engine.engine().welcome().lease().token()); }),
               StatusCode::FAILED_PRECONDITION, {"trainer rank", "engine rank"});
  std::string old_token;
  {
    RawTrainer gone(s.daemon.Connect(), RawTrainer::Hello("gone"));
    REQUIRE(gone.attached().ok());
    old_token = gone.welcome().lease().token();
  }
  REQUIRE(Eventually([&] {
    return begin([&](auto* l) { l->set_token(old_token); }).error_code() ==
           StatusCode::UNAUTHENTICATED;
  }));
  REQUIRE_OK(s.trainer.Begin(5));
  s.RequireUnharmed(5);
}

TEST_CASE("a layout that is malformed, outside, overlapping or unaligned is refused by tensor") {
  Scene s;
  RawEngine engine(s.daemon.Connect(), RawEngine::Hello("g", "j"));
  REQUIRE(engine.attached().ok());
  SharedMemory memory = engine.NewMemory(4096);
  const auto good = [&] {
    Held held = HoldWhole(s.model, 0);
    for (Piece& piece : held.layout.pieces) piece.region = RegionId(memory.region_id);
    held.layout.binding_generation = 1;
    return held.layout;
  };
  const auto refused = [&](const std::function<void(Layout*)>& damage, StatusCode code,
                           const std::vector<std::string>& words) {
    Layout layout = good();
    damage(&layout);
    CheckRefused(engine.Register(layout).status, code, words);
  };
  const StatusCode kInvalid = StatusCode::INVALID_ARGUMENT;
  refused([](Layout* l) { l->pieces[0].region = RegionId(987'654); }, StatusCode::NOT_FOUND,
          {"a", "987654"});
  refused([](Layout* l) { l->pieces[0].byte_offset = 4096 - 32; }, kInvalid, {"a", "4096"});
  refused([](Layout* l) { l->pieces[0].byte_offset = 5000; }, kInvalid, {"a", "5000"});
  refused([](Layout* l) { l->pieces[0].byte_offset = -64; }, kInvalid, {"a", "-64"});
  refused([](Layout* l) { l->pieces[0].byte_offset = 1026; }, kInvalid, {"a", "1026"});
  refused([](Layout* l) { l->pieces[1].byte_offset = 32; }, kInvalid, {"b", "a"});
  refused([](Layout* l) { l->pieces[0].strides[0] = kMax; }, kInvalid, {"a"});
  refused([](Layout* l) { l->pieces[0].strides[0] = -4; }, kInvalid, {"a", "-4"});
  refused([](Layout* l) { l->pieces[0].strides[0] = 0; }, kInvalid, {"a"});
  refused([](Layout* l) { l->pieces[0].box.offset[0] = 1; }, kInvalid, {"a"});
  refused([](Layout* l) { l->pieces[0].box.extent[1] = kMax; }, kInvalid,
          {"a", std::to_string(kMax)});
  refused([](Layout* l) { l->tensors.Edit()[2].name = "a"; }, kInvalid, {"a"});
  refused(
      [](Layout* l) {
        l->pieces.push_back(l->pieces[0]);  // the same box again, in other memory
        l->pieces.back().byte_offset = 2048;
      },
      kInvalid, {"a"});

  const auto chunks = [&](const std::function<void(v1::LayoutChunk*)>& damage, StatusCode code,
                          const std::vector<std::string>& words) {
    std::vector<v1::LayoutChunk> all = EncodeLayout(good(), engine.welcome().lease(), 1 << 20);
    damage(&all[0]);
    CheckRefused(engine.RegisterChunks(all).status, code, words);
  };
  chunks([](auto* c) { c->mutable_dtypes()->RemoveLast(); }, kInvalid, {"dtypes", "2", "3"});
  chunks([](auto* c) { c->add_shapes(); }, kInvalid, {"shapes", "4", "3"});
  chunks([](auto* c) { c->mutable_piece_region()->RemoveLast(); }, kInvalid,
         {"piece_region", "2", "3"});
  chunks([](auto* c) { c->add_piece_boxes(7); }, kInvalid, {"piece_boxes", "9", "8"});
  chunks([](auto* c) { c->set_piece_tensor(1, 4'000'000'000u); }, kInvalid,
         {"piece_tensor[1]", "4000000000"});
  chunks([](auto* c) { c->set_dtypes(0, static_cast<v1::DType>(55)); }, kInvalid,
         {"dtypes[0]", "55", "\"a\""});
  chunks([](auto* c) { c->mutable_shapes(0)->set_dims(0, -1); }, kInvalid, {"shapes[0]", "-1"});
  chunks([](auto* c) { c->add_pushed_tensors(1); }, kInvalid, {"pushed_tensors", "1", "engine"});
  chunks([](auto* c) { c->mutable_lease()->set_token("nobody"); }, StatusCode::UNAUTHENTICATED,
         {"token"});
  chunks([&](auto* c) { *c->mutable_lease() = s.trainer.welcome().lease(); },
         StatusCode::FAILED_PRECONDITION, {"engine rank"});
  CheckRefused(engine.RegisterChunks({}).status, kInvalid, {"chunk"});

  REQUIRE_OK(engine.Register(good()));
  refused([](Layout*) {}, StatusCode::FAILED_PRECONDITION, {"binding_generation", "1"});
  // While the engine takes part in an update it keeps its layout.
  REQUIRE_OK(s.trainer.Begin(5));
  refused([](Layout* l) { l->binding_generation = 2; }, StatusCode::FAILED_PRECONDITION,
          {"engine j rank 0", "version 5"});
  s.RequireUnharmed(5);
  Layout again = good();
  again.binding_generation = 2;
  REQUIRE_OK(engine.Register(again));

  RawEngine loader(s.daemon.Connect(), RawEngine::Hello("g", "k", 0, 1, v1::DELIVERY_LOADER));
  REQUIRE(loader.attached().ok());
  Layout layout = good();
  SharedMemory own = loader.NewMemory(4096);
  for (Piece& piece : layout.pieces) piece.region = RegionId(own.region_id);
  CheckRefused(loader.Register(layout).status, StatusCode::FAILED_PRECONDITION,
               {"engine k rank 0", "loader"});
}

TEST_CASE("a trainer's layout that is malformed is refused by tensor, field and value") {
  Scene s;
  SharedMemory memory = s.trainer.NewMemory(4096);
  const auto good = [&] {
    Held held = HoldWhole(s.model, 0);
    for (Piece& piece : held.layout.pieces) piece.region = RegionId(memory.region_id);
    held.layout.binding_generation = 7;
    return held.layout;
  };
  const auto with = [&](const std::function<void(Layout*)>& change) {
    Layout layout = good();
    change(&layout);
    return s.trainer.Register(layout).status;
  };
  const StatusCode kInvalid = StatusCode::INVALID_ARGUMENT;
  CheckRefused(with([](Layout* l) { l->pieces[0].region = RegionId(987'654); }),
               StatusCode::NOT_FOUND, {"a", "987654"});
  // A member can't name another member's region.
  CheckRefused(
      with([&](Layout* l) { l->pieces[0].region = RegionId(s.engine.memory().region_id); }),
      StatusCode::NOT_FOUND, {"a", std::to_string(s.engine.memory().region_id)});
  CheckRefused(with([](Layout* l) { l->pieces[0].byte_offset = 4096 - 32; }), kInvalid,
               {"a", "4096"});
  CheckRefused(with([](Layout* l) { l->pieces[0].byte_offset = -64; }), kInvalid, {"a", "-64"});
  CheckRefused(with([](Layout* l) { l->pieces[0].byte_offset = 1026; }), kInvalid, {"a", "1026"});
  CheckRefused(with([](Layout* l) { l->pieces[0].strides[0] = kMax; }), kInvalid, {"a"});
  CheckRefused(with([](Layout* l) { l->pieces[0].strides[0] = -4; }), kInvalid, {"a", "-4"});
  CheckRefused(with([](Layout* l) { l->pieces[0].box.offset[0] = 1; }), kInvalid, {"a"});
  CheckRefused(with([](Layout* l) { l->tensors.Edit()[2].name = "a"; }), kInvalid, {"a"});
  CheckRefused(with([](Layout* l) { l->pushed_tensors = {3}; }), kInvalid,
               {"pushed_tensors[0]", "3"});
  CheckRefused(with([](Layout* l) {
                 l->pushed_tensors = {1, 1};
               }),
               kInvalid, {"pushed_tensors[1]", "1"});
  std::vector<v1::LayoutChunk> chunks =
      EncodeLayout(good(), s.engine.engine().welcome().lease(), 1 << 20);
  CheckRefused(s.trainer.RegisterChunks(chunks).status, StatusCode::FAILED_PRECONDITION,
               {"trainer rank", "engine rank"});
  CheckRefused(s.trainer.RegisterChunks({}).status, kInvalid, {"chunk"});

  // Sources may be read twice, while engines' parameters may be written once only.
  const auto taken = s.trainer.Register([&] {
    Layout layout = good();
    layout.pieces.push_back(layout.pieces[0]);
    layout.pushed_tensors = {2};
    return layout;
  }());
  REQUIRE_OK(taken);
  CHECK(taken.response.pieces() == 4);
  CheckRefused(with([](Layout*) {}), StatusCode::FAILED_PRECONDITION, {"binding_generation: 7"});
  const auto release = [&] {
    DescriptorRequest request =
        s.trainer.descriptors().Request(DescriptorRequestKind::kReleaseRegion);
    request.region_id = memory.region_id;
    return s.trainer.descriptors().Ask(request, {});
  };
  const auto kept = release();
  REQUIRE(kept.has_value());
  CHECK(kept->code == static_cast<uint32_t>(StatusCode::FAILED_PRECONDITION));
  CHECK_THAT(kept->message, Catch::Contains("'a'"));

  // A layout without a piece withdraws the registration.
  Layout none;
  none.binding_generation = 8;
  REQUIRE_OK(s.trainer.Register(none));
  const auto released = release();
  REQUIRE(released.has_value());
  CHECK(released->code == 0);
  REQUIRE_OK(s.trainer.Begin(5));
  none.binding_generation = 9;
  CheckRefused(s.trainer.Register(none).status, StatusCode::FAILED_PRECONDITION,
               {"trainer rank 0", "version 5"});
  s.RequireUnharmed(5);
}

TEST_CASE("a Refit that is malformed, or of no layout or another, is refused and opens nothing") {
  Scene s;
  CheckRefused(s.trainer.Refit(5, 0).status, StatusCode::FAILED_PRECONDITION,
               {"no layout", "RegisterLayout"});
  SharedMemory memory = s.trainer.NewMemory(4096);
  Held held = HoldWhole(s.model, 0);
  for (Piece& piece : held.layout.pieces) piece.region = RegionId(memory.region_id);
  for (const uint64_t generation : {6, 7}) {
    held.layout.binding_generation = generation;
    REQUIRE_OK(s.trainer.Register(held.layout));
  }
  CheckRefused(s.trainer.Refit(5, 6).status, StatusCode::FAILED_PRECONDITION,
               {"binding_generation: 6", "7"});
  CheckRefused(s.trainer.Refit(5, 8).status, StatusCode::FAILED_PRECONDITION,
               {"binding_generation: 8", "7"});
  const auto with = [&](const std::function<void(v1::RefitRequest*)>& change) {
    v1::RefitRequest request;
    request.set_version(5);
    request.set_binding_generation(7);
    change(&request);
    return s.trainer.Refit(request).status;
  };
  const StatusCode kInvalid = StatusCode::INVALID_ARGUMENT;
  CheckRefused(with([](auto* r) { r->set_version(-1); }), kInvalid, {"version", "-1"});
  CheckRefused(with([](auto* r) { r->set_duration_ms(-1); }), kInvalid, {"duration_ms", "-1"});
  CheckRefused(with([](auto* r) { r->set_duration_ms(kMax); }), kInvalid,
               {"duration_ms", std::to_string(kMax)});
  CheckRefused(with([](auto* r) { r->set_duration_ms(3'600'001); }), kInvalid,
               {"duration_ms", "3600001", "3600000"});
  CheckRefused(with([](auto* r) { r->set_bucket_count(-1); }), kInvalid, {"bucket_count", "-1"});
  CheckRefused(with([](auto* r) { r->set_request_id(std::string(65, 'r')); }), kInvalid,
               {"request_id", "65"});
  CheckRefused(with([](auto* r) { r->set_verification(static_cast<v1::Verification>(9)); }),
               kInvalid, {"verification", "9"});
  CheckRefused(with([&](auto* r) { *r->mutable_lease() = s.engine.engine().welcome().lease(); }),
               StatusCode::FAILED_PRECONDITION, {"trainer rank", "engine rank"});
  CheckRefused(with([](auto* r) { r->mutable_lease()->set_token("nobody"); }),
               StatusCode::FAILED_PRECONDITION, {"protocol"});
  Layout none;
  none.binding_generation = 9;
  REQUIRE_OK(s.trainer.Register(none));
  // One rank may have no piece, but not all ranks.
  CheckRefused(s.trainer.Refit(5, 9).status, StatusCode::FAILED_PRECONDITION,
               {"no trainer rank has a piece"});
  REQUIRE_OK(s.trainer.Begin(5));
  s.RequireUnharmed(5);
}

TEST_CASE(
    "instances that disagree about a tensor are named at Begin, a missing tensor count at Commit") {
  Scene s;
  Model other = s.model;
  other[1].dtype = DType::kFloat16;
  {
    Holder engine(s.daemon.Connect(), RawEngine::Hello("g", "z"), HoldWhole(other));
    CheckRefused(s.trainer.Begin(5).status, StatusCode::FAILED_PRECONDITION,
                 {"'b'", "float16", "bfloat16", "engine z rank 0", "engine i rank 0"});
  }
  REQUIRE(Eventually([&] { return s.daemon.Group("g").instances_size() == 1; }));
  {
    RawEngine open(s.daemon.Connect(), RawEngine::Hello("g", "open", 0, 1, v1::DELIVERY_LOADER));
    REQUIRE(open.attached().ok());
    REQUIRE_OK(s.trainer.Begin(6));
    REQUIRE_OK(s.trainer.Push(6, s.Good(6)));
    CheckRefused(s.trainer.Commit(6, 1).status, StatusCode::FAILED_PRECONDITION,
                 {"tensor_count", "engine open rank 0"});
    v1::CommitRequest wrong;
    wrong.set_version(6);
    wrong.set_bucket_count(1);
    for (const auto& [count, code] : {std::pair{int64_t{-1}, StatusCode::INVALID_ARGUMENT},
                                      std::pair{kMax, StatusCode::RESOURCE_EXHAUSTED}}) {
      wrong.set_tensor_count(count);
      CheckRefused(s.trainer.Commit(wrong).status, code, {"tensor_count", std::to_string(count)});
    }
    REQUIRE_OK(s.trainer.Abort(6, "enough"));
  }
  REQUIRE(Eventually([&] { return s.daemon.Group("g").instances_size() == 1; }));
  REQUIRE_OK(s.trainer.Begin(7));
  s.RequireUnharmed(7);
}

TEST_CASE("the descriptor socket refuses what it can't trust, and keeps nothing of it") {
  Scene s;
  Descriptors& descriptors = s.trainer.descriptors();
  const SharedMemory memory = MakeMemory(8192);
  const auto ask = [&](const std::function<void(DescriptorRequest*)>& damage,
                       const std::vector<int>& fds, StatusCode code, const std::string& word) {
    DescriptorRequest request = descriptors.Request(DescriptorRequestKind::kRegisterRegion);
    request.bytes = 8192;
    damage(&request);
    const auto reply = descriptors.Ask(request, fds);
    REQUIRE(reply.has_value());
    INFO(reply->message);
    CHECK(reply->code == static_cast<uint32_t>(code));
    CHECK_THAT(reply->message, Catch::Contains(word));
  };
  const StatusCode kInvalid = StatusCode::INVALID_ARGUMENT;
  const auto as_is = [](DescriptorRequest*) {};
  REQUIRE(descriptors.Register(memory.fd.get(), 8192)->code == 0);
  const int64_t regions = s.daemon.Resources().regions();
  const int64_t opened = s.daemon.Resources().descriptors();
  const int mappings = s.daemon.MemfdMappings();

  const UniqueFd unsealed(memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(ftruncate(unsealed.get(), 8192) == 0);
  ask(as_is, {unsealed.get()}, kInvalid, "seal");
  const UniqueFd file(open("/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  REQUIRE(file.valid());
  REQUIRE(ftruncate(file.get(), 8192) == 0);
  ask(as_is, {file.get()}, kInvalid, "memfd");
  int pipe_ends[2];
  REQUIRE(pipe2(pipe_ends, O_CLOEXEC) == 0);
  const UniqueFd pipe_out(pipe_ends[0]);
  const UniqueFd pipe_in(pipe_ends[1]);
  ask(as_is, {pipe_out.get()}, kInvalid, "memfd");
  ask([](auto* r) { r->bytes = 12'288; }, {memory.fd.get()}, kInvalid, "12288");
  ask([](auto* r) { r->bytes = 0; }, {memory.fd.get()}, kInvalid, "bytes 0");
  ask([](auto* r) { r->bytes = -1; }, {memory.fd.get()}, kInvalid, "-1");
  ask([](auto* r) { r->bytes = kMax; }, {memory.fd.get()}, StatusCode::RESOURCE_EXHAUSTED,
      "max_region_bytes");
  ask(as_is, {}, kInvalid, "descriptors");
  ask(as_is, {memory.fd.get(), memory.fd.get()}, kInvalid, "descriptors");
  ask([](auto* r) { r->region_kind = RegionKind::kDevice; }, {memory.fd.get()},
      StatusCode::UNIMPLEMENTED, "2");
  ask([](auto* r) { r->region_kind = static_cast<RegionKind>(7); }, {memory.fd.get()}, kInvalid,
      "kind 7");
  ask([](auto* r) { r->kind = static_cast<DescriptorRequestKind>(9); }, {memory.fd.get()}, kInvalid,
      "kind 9");
  ask([](auto* r) { r->token[0] ^= 1; }, {memory.fd.get()}, StatusCode::UNAUTHENTICATED, "token");
  ask([](auto* r) { r->reserved[3] = 1; }, {memory.fd.get()}, kInvalid, "reserved");
  ask(
      [](auto* r) {
        r->kind = DescriptorRequestKind::kReleaseRegion;
        r->region_id = 987'654;
      },
      {}, StatusCode::NOT_FOUND, "987654");
  // A region in use stays: the engine's layout names it.
  {
    Descriptors& engine = s.engine.engine().descriptors();
    DescriptorRequest request = engine.Request(DescriptorRequestKind::kReleaseRegion);
    request.region_id = s.engine.memory().region_id;
    const auto reply = engine.Ask(request, {});
    REQUIRE(reply.has_value());
    CHECK(reply->code == static_cast<uint32_t>(StatusCode::FAILED_PRECONDITION));
    CHECK_THAT(reply->message, Catch::Contains("'a'"));
  }
  // A message that is no request ends the connection.
  {
    Descriptors broken(s.trainer.welcome().descriptor_socket(),
                       s.trainer.welcome().lease().token());
    DescriptorRequest request = broken.Request(DescriptorRequestKind::kMapPool);
    request.magic = 1;
    const auto reply = broken.Ask(request, {});
    REQUIRE(reply.has_value());
    CHECK(reply->code == static_cast<uint32_t>(kInvalid));
    CHECK(!broken.Ask(broken.Request(DescriptorRequestKind::kMapPool), {}).has_value());
  }
  CHECK(s.daemon.Resources().regions() == regions);
  CHECK(s.daemon.MemfdMappings() == mappings);
  CHECK(Eventually([&] {
    return s.daemon.Resources().descriptors() <= opened + 1;
  }));  // the engine's connection
  REQUIRE_OK(s.trainer.Begin(5));
  s.RequireUnharmed(5);
}

TEST_CASE(
    "slots beyond a rank's share, and slots that do not come free, are refused by who holds them") {
  Scene s({}, Spec(1, 1, 4096, 3));
  RawEngine loader(s.daemon.Connect(),
                   RawEngine::Hello("g", "slow", 0, 1, v1::DELIVERY_LOADER, Spec(1, 1, 4096, 3)),
                   {.auto_ack = false});
  REQUIRE(loader.attached().ok());
  v1::BeginRequest begin;
  begin.set_version(5);
  begin.set_tensor_count(3);
  const auto begun = s.trainer.Begin(begin);
  REQUIRE_OK(begun);
  REQUIRE(begun.response.leasable_slots() == 2);
  const auto first = s.trainer.LeaseSlot(5);
  const auto second = s.trainer.LeaseSlot(5);
  REQUIRE_OK(first);
  REQUIRE_OK(second);
  CheckRefused(s.trainer.LeaseSlot(5).status, StatusCode::RESOURCE_EXHAUSTED,
               {"trainer rank 0", "2"});
  REQUIRE_OK(s.trainer.ReleaseSlot(second.response.slot(), second.response.grant()));
  REQUIRE_OK(s.trainer.ReleaseSlot(first.response.slot(), first.response.grant()));
  CheckRefused(s.trainer.LeaseSlot(5, -1).status, StatusCode::INVALID_ARGUMENT, {"wait_ms", "-1"});
  // Three parts fill three slots, and the engine acknowledges none of them.
  for (int t = 0; t < 3; ++t) {
    REQUIRE_OK(s.trainer.Push(5, s.Good(5, t, {t})));
    REQUIRE(loader.events().WaitFor(v1::EngineEvent::kBucket).has_value());
  }
  CheckRefused(s.trainer.LeaseSlot(5, 50).status, StatusCode::DEADLINE_EXCEEDED,
               {"engine slow rank 0"});
  for (int64_t part = 0; part < 3; ++part) REQUIRE(loader.Ack(5, part));
  REQUIRE_OK(s.trainer.LeaseSlot(5));
  REQUIRE_OK(s.trainer.Commit(5, 3));
  CHECK(loader.LoadedDifference(s.model, BytesOf(s.model, 5)) == "");
  s.RequireInstalled(5);
}

// ---- the command line ----

struct Exit {
  std::optional<int> code;
  std::string errors;
};

Exit RunDaemon(std::vector<std::string> flags) {
  flags.insert(flags.begin(), BinaryPath("daemon/refitd"));
  Process process(flags);
  Exit exit;
  exit.code = process.WaitExit();
  exit.errors = process.Errors();
  return exit;
}

TEST_CASE("a bad configuration ends with exit code 2 and the place, field and value") {
  TempFolder folder;
  const auto with_file = [&](const std::string& text) {
    std::ofstream(folder / "refitd.textproto") << text;
    return RunDaemon({"--config=" + (folder / "refitd.textproto")});
  };
  Exit exit = with_file("limits { raedy_ms: 5 }");
  CHECK(exit.code == 2);
  CHECK_THAT(exit.errors, Catch::Contains("raedy_ms") && Catch::Contains("line 1") &&
                              Catch::Contains(folder / "refitd.textproto"));
  exit = with_file("staging { slots: 1 }");
  CHECK(exit.code == 2);
  CHECK_THAT(exit.errors, Catch::Contains("staging.slots") && Catch::Contains("1"));
  exit = RunDaemon({"--config=/no/such/file"});
  CHECK(exit.code == 2);
  CHECK_THAT(exit.errors, Catch::Contains("/no/such/file"));
  exit = RunDaemon({"--no-such-flag"});
  CHECK(exit.code == 2);
  CHECK_THAT(exit.errors, Catch::Contains("no-such-flag"));
  exit = RunDaemon({"--limits-ready-ms=soon"});
  CHECK(exit.code == 2);
  CHECK_THAT(exit.errors, Catch::Contains("ready") && Catch::Contains("soon"));
  exit = RunDaemon({"--listen-tcp=0.0.0.0:0"});
  CHECK(exit.code == 2);
  CHECK_THAT(exit.errors, Catch::Contains("0.0.0.0:0") && Catch::Contains("--insecure"));
}

TEST_CASE(
    "a socket or port that is in use ends with exit code 3 and its name, and its owner serves on") {
  const UniqueFd port_holder(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  REQUIRE(bind(port_holder.get(), reinterpret_cast<sockaddr*>(&address), length) == 0);
  REQUIRE(listen(port_holder.get(), 1) == 0);
  REQUIRE(getsockname(port_holder.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0);
  const std::string tcp = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));

  Scene s;
  Exit exit = RunDaemon({"--listen-unix=" + s.daemon.socket()});
  CHECK(exit.code == 3);
  CHECK_THAT(exit.errors,
             Catch::Contains(s.daemon.socket()) && Catch::Contains(std::to_string(s.daemon.pid())));
  TempFolder folder;
  exit = RunDaemon({"--listen-unix=" + (folder / "s"), "--listen-tcp=" + tcp, "--insecure"});
  CHECK(exit.code == 3);
  CHECK_THAT(exit.errors, Catch::Contains(tcp));
  REQUIRE_OK(s.trainer.Begin(5));
  s.RequireUnharmed(5);
  CHECK(s.daemon.Stop() == 0);
}

}  // namespace
}  // namespace refitd::e2e
