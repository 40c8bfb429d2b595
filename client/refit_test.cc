#include "client/refit.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string>
#include <thread>

#include "client/refit_python.h"
#include "client/refit_test_util.h"
#include "proto/delivery.h"

namespace {

using refitd::Initialised;

TEST_CASE("the last failure is copied as data into a structure of any size") {
  REQUIRE(refit_trainer_health(nullptr) == REFIT_INVALID_ARGUMENT);
  auto failure = Initialised<refit_failure>();
  REQUIRE(refit_last_failure(&failure) == REFIT_OK);
  CHECK(failure.status == REFIT_INVALID_ARGUMENT);
  CHECK(std::string(failure.what) == refit_last_error());
  CHECK(failure.weights_left == REFIT_WEIGHTS_UNKNOWN);
  CHECK(failure.suspects_named == 0);
  CHECK(failure.suspect_count == 0);
  CHECK(failure.dirty_named == 0);
  CHECK(failure.version == -1);
  CHECK(std::string(failure.tensor).empty());
  auto small = Initialised<refit_failure>();
  small.struct_size = offsetof(refit_failure, suspects);
  small.version = 77;
  REQUIRE(refit_last_failure(&small) == REFIT_OK);
  CHECK(std::string(small.what) == failure.what);
  CHECK(small.version == 77);
  small.struct_size = 0;
  CHECK(refit_last_failure(&small) == REFIT_INVALID_ARGUMENT);
  CHECK(refit_last_failure(nullptr) == REFIT_INVALID_ARGUMENT);
  CHECK(std::string(refit_last_error()) == failure.what);
}

TEST_CASE("null handles give INVALID_ARGUMENT and a message, never a crash") {
  int64_t number = 0;
  int32_t outcome = 0;
  refit_region* region = nullptr;
  refit_slot* slot = nullptr;
  refit_arena* arena = nullptr;
  char* data = nullptr;
  refit_update* update = nullptr;
  auto event = Initialised<refit_event>();
  const refit_status statuses[] = {
      refit_replace_group(nullptr),
      refit_trainer_attach(nullptr, nullptr),
      refit_trainer_health(nullptr),
      refit_trainer_group_version(nullptr, &number),
      refit_trainer_get_update(nullptr, 1, &outcome),
      refit_trainer_new_region(nullptr, 1, &region),
      refit_trainer_add_memfd(nullptr, 0, 1, &region),
      refit_engine_add_memfd(nullptr, 0, 1, &region),
      refit_arena_new(nullptr, 1, REFIT_BACK_DEVICE, &arena),
      refit_arena_map_back(nullptr, &data),
      refit_engine_add_arena(nullptr, arena, &region),
      refit_engine_take_kept(nullptr, 0, &arena),
      refit_trainer_abort(nullptr, 1, nullptr),
      refit_engine_hold(nullptr, nullptr),
      refit_joiner_new(nullptr),
      refit_joiner_add(nullptr, nullptr, nullptr, nullptr),
      refit_trainer_add_cuda_block(nullptr, "", 1, &region),
      refit_trainer_add_cuda_vmm(nullptr, 0, 1, &region),
      refit_trainer_add_cuda_vmm_at(nullptr, 0, 1, 0, &region),
      refit_engine_add_cuda_vmm_at(nullptr, 0, 1, 0, &region),
      refit_engine_add_cuda_block(nullptr, "", 1, &region),
      refit_engine_add_cuda_vmm(nullptr, 0, 1, &region),
      refit_trainer_begin(nullptr, nullptr, &update),
      refit_update_lease_slot(nullptr, 0, &slot),
      refit_update_push(nullptr, nullptr),
      refit_update_push_async(nullptr, nullptr, nullptr, nullptr),
      refit_update_flush(nullptr),
      refit_update_commit(nullptr, 0, nullptr),
      refit_update_outcome(nullptr, 0, nullptr, nullptr, nullptr),
      refit_update_left_out(nullptr, 0, nullptr),
      refit_trainer_left_out(nullptr, 0, nullptr),
      refit_update_abort(nullptr, nullptr),
      refit_update_lost(nullptr),
      refit_trainer_register(nullptr, nullptr, 0, nullptr, 0, nullptr, 0),
      refit_trainer_refit(nullptr, nullptr, nullptr),
      refit_trainer_outcome(nullptr, 0, nullptr, nullptr, nullptr),
      refit_update_refit(nullptr, nullptr),
      refit_engine_attach(nullptr, nullptr),
      refit_engine_new_region(nullptr, 1, &region),
      refit_engine_register(nullptr, nullptr, 0, nullptr, 0, nullptr, 0),
      refit_engine_next(nullptr, 0, &event),
      refit_engine_processed(nullptr, 1),
      refit_engine_ready(nullptr, 1, -1),
      refit_engine_ack(nullptr, 1, 0),
      refit_engine_fail(nullptr, 1, nullptr),
      refit_packer_new(nullptr, nullptr),
      refit_packer_learn(nullptr, nullptr, &number),
      refit_packer_begin(nullptr, nullptr, 1),
      refit_packer_reserve(nullptr, 0, 1, &number),
      refit_packer_add(nullptr, 0, 0, 1, 0),
      refit_packer_push(nullptr, nullptr, nullptr, nullptr, nullptr),
      refit_python_use(nullptr),
      refit_engine_version(nullptr, &number),
  };
  for (size_t i = 0; i < std::size(statuses); ++i) {
    INFO("call " << i);
    CHECK(statuses[i] == REFIT_INVALID_ARGUMENT);
  }
  CHECK(std::string(refit_last_error()) == "engine is NULL");
}

TEST_CASE("null handles can be freed and asked for their values") {
  refit_region_free(nullptr);
  refit_slot_free(nullptr);
  refit_update_free(nullptr);
  refit_trainer_free(nullptr);
  refit_engine_free(nullptr);
  refit_hold_free(nullptr);
  refit_joiner_free(nullptr);
  refit_joiner_reset(nullptr);
  CHECK(refit_joiner_unfinished(nullptr) == 0);
  refit_packer_free(nullptr);
  refit_packer_end(nullptr);
  CHECK(refit_packer_count(nullptr) == 0);
  CHECK(refit_packer_room(nullptr, 0) == -1);
  CHECK(refit_python_pusher(nullptr) == nullptr);
  refit_arena_free(nullptr);
  refit_arena_unmap_back(nullptr);
  CHECK(refit_arena_data(nullptr) == nullptr);
  CHECK(refit_arena_bytes(nullptr) == 0);
  CHECK(refit_arena_back(nullptr) == REFIT_BACK_DEVICE);
  CHECK(refit_region_data(nullptr) == nullptr);
  CHECK(refit_region_bytes(nullptr) == 0);
  CHECK(refit_slot_data(nullptr) == nullptr);
  CHECK(refit_slot_bytes(nullptr) == 0);
  CHECK(refit_update_instances(nullptr) == 0);
  CHECK(refit_update_leasable_slots(nullptr) == 0);
  CHECK(refit_engine_weights(nullptr) == REFIT_WEIGHTS_UNKNOWN);
  CHECK(refit_engine_reattachments(nullptr) == 0);
  CHECK(refit_trainer_reattachments(nullptr) == 0);
}

TEST_CASE("in a process without Python no tensor is read, and memory counts as moved") {
  auto python = Initialised<refit_python>();
  CHECK(refit_python_use(&python) == REFIT_FAILED_PRECONDITION);
  CHECK(std::string(refit_last_error()).find("Py_IncRef") != std::string::npos);
  refit_packer* packer = nullptr;
  REQUIRE(refit_packer_new(nullptr, &packer) == REFIT_OK);
  CHECK(refit_python_pusher(packer) == nullptr);
  refit_packer_free(packer);
  void* tensors[] = {nullptr, nullptr};
  const int64_t addresses[] = {1, 2};
  CHECK(refit_python_first_moved(tensors, addresses, 2) == 0);
  uint64_t marks[] = {1, 2};
  CHECK(refit_python_first_changed(tensors, marks, 2) == 0);
  refit_python_marks(tensors, marks, 2);
  CHECK((marks[0] == 0 && marks[1] == 0));
  const int64_t sizes[] = {0, 0};
  CHECK(refit_python_first_altered(tensors, sizes, nullptr, 2) == 0);
  CHECK(refit_python_first_rebound(tensors, tensors, tensors, 2) == 0);
}

TEST_CASE("a packer refuses what it does not know or has no room for, and says so") {
  refit_packer* packer = nullptr;
  REQUIRE(refit_packer_new(nullptr, &packer) == REFIT_OK);
  const int64_t dims[] = {3};
  const refit_tensor tensor{"w", REFIT_FLOAT32, 1, dims, 0, REFIT_WHOLE};
  int64_t number = -1;
  int64_t offset = -1;
  REQUIRE(refit_packer_learn(packer, &tensor, &number) == REFIT_OK);
  CHECK(refit_packer_room(packer, number) == -1);
  CHECK(refit_packer_begin(packer, nullptr, -5) == REFIT_INVALID_ARGUMENT);
  REQUIRE(refit_packer_begin(packer, nullptr, 8) == REFIT_OK);
  CHECK(refit_packer_room(packer, number) == 8);
  CHECK(refit_packer_room(packer, 1) == -1);
  CHECK(refit_packer_reserve(packer, 1, 1, &offset) == REFIT_INVALID_ARGUMENT);
  CHECK(refit_packer_reserve(packer, number, -1, &offset) == REFIT_INVALID_ARGUMENT);
  CHECK(refit_packer_reserve(packer, number, 12, &offset) == REFIT_RESOURCE_EXHAUSTED);
  CHECK(std::string(refit_last_error()).find("'w'") != std::string::npos);
  REQUIRE(refit_packer_reserve(packer, number, 8, &offset) == REFIT_OK);
  CHECK(refit_packer_add(packer, number, 2, 2, offset) == REFIT_INVALID_ARGUMENT);
  REQUIRE(refit_packer_add(packer, number, 1, 2, offset) == REFIT_OK);
  CHECK(refit_packer_count(packer) == 1);
  const refit_tensor unknown{"v", 99, 1, dims, 0, REFIT_WHOLE};
  CHECK(refit_packer_learn(packer, &unknown, &number) == REFIT_INVALID_ARGUMENT);
  refit_packer_free(packer);
}

TEST_CASE("a structure without struct_size is refused") {
  refit_trainer_options options{};
  refit_trainer* trainer = nullptr;
  CHECK(refit_trainer_attach(&options, &trainer) == REFIT_INVALID_ARGUMENT);
  CHECK(std::string(refit_last_error()).find("struct_size") != std::string::npos);
  CHECK(trainer == nullptr);
}

TEST_CASE("a larger structure is taken only if what is unknown in it is 0") {
  struct Newer {
    refit_connect_options known;
    int64_t unknown;
  };
  Newer newer{};
  newer.known.struct_size = sizeof(newer);
  newer.known.group = "";  // refused, but only after the structure was taken
  auto options = Initialised<refit_trainer_options>();
  options.connect = &newer.known;
  refit_trainer* trainer = nullptr;
  CHECK(refit_trainer_attach(&options, &trainer) == REFIT_INVALID_ARGUMENT);
  CHECK(std::string(refit_last_error()).find("group") != std::string::npos);
  newer.unknown = 1;
  CHECK(refit_trainer_attach(&options, &trainer) == REFIT_INVALID_ARGUMENT);
  CHECK(std::string(refit_last_error()).find("struct_size") != std::string::npos);
}

// A group at a socket where no daemon listens.
refit_connect_options ConnectToNobody() {
  auto connect = Initialised<refit_connect_options>();
  connect.group = "g";
  connect.socket = "/nonexistent/refitd.sock";
  connect.wait_ms = 1;
  return connect;
}

TEST_CASE("a smaller structure is taken with its missing fields 0") {
  auto connect = Initialised<refit_connect_options>();
  connect.group = "g";
  connect.socket = "/nonexistent/refitd.sock";
  connect.wait_ms = -1;  // beyond the size below, so not seen and not refused
  connect.struct_size = offsetof(refit_connect_options, wait_ms);
  auto options = Initialised<refit_engine_options>();
  options.connect = &connect;
  options.instance = "";
  refit_engine* engine = nullptr;
  CHECK(refit_engine_attach(&options, &engine) == REFIT_INVALID_ARGUMENT);
  CHECK(std::string(refit_last_error()).find("instance") != std::string::npos);
}

TEST_CASE("dirty engine options are taken, older ones mean that they are not") {
  const refit_connect_options connect = ConnectToNobody();
  auto options = Initialised<refit_engine_options>();
  options.connect = &connect;
  options.instance = "i";
  options.has_held_version = 1;
  options.held_version = 3;
  options.dirty = 1;
  refit_engine* engine = nullptr;
  CHECK(refit_engine_attach(&options, &engine) == REFIT_INVALID_ARGUMENT);
  CHECK(std::string(refit_last_error()).find("dirty") != std::string::npos);
  options.struct_size = offsetof(refit_engine_options, dirty);
  CHECK(refit_engine_attach(&options, &engine) == REFIT_UNAVAILABLE);
  options.struct_size = sizeof(options);
  options.has_held_version = 0;
  CHECK(refit_engine_attach(&options, &engine) == REFIT_UNAVAILABLE);
}

TEST_CASE("every delivery mode can be chosen, and no other number") {
  CHECK(REFIT_DELIVERY_IN_PLACE + 1 == static_cast<int>(refitd::DeliveryMode::kInPlace));
  CHECK(REFIT_DELIVERY_LOADER + 1 == static_cast<int>(refitd::DeliveryMode::kLoader));
  const refit_connect_options connect = ConnectToNobody();
  auto options = Initialised<refit_engine_options>();
  options.connect = &connect;
  options.instance = "i";
  const auto modes = static_cast<int32_t>(refitd::kDeliveries.size());
  refit_engine* engine = nullptr;
  for (int32_t mode = 0; mode < modes; ++mode) {
    options.delivery = mode;
    CHECK(refit_engine_attach(&options, &engine) == REFIT_UNAVAILABLE);
  }
  for (const int32_t wrong : {-1, modes, INT32_MAX}) {
    options.delivery = wrong;
    CHECK(refit_engine_attach(&options, &engine) == REFIT_INVALID_ARGUMENT);
    CHECK(std::string(refit_last_error()) == "delivery is " + std::to_string(wrong));
  }
}

TEST_CASE("where no daemon listens attaching is UNAVAILABLE after its wait, naming the socket") {
  const refit_connect_options connect = ConnectToNobody();
  auto options = Initialised<refit_trainer_options>();
  options.connect = &connect;
  refit_trainer* trainer = nullptr;
  CHECK(refit_trainer_attach(&options, &trainer) == REFIT_UNAVAILABLE);
  CHECK(std::string(refit_last_error()).find("/nonexistent/refitd.sock") != std::string::npos);
  CHECK(trainer == nullptr);
}

TEST_CASE("a daemon over TCP takes certificates, or a word for being without") {
  auto connect = Initialised<refit_connect_options>();
  connect.group = "g";
  connect.wait_ms = 1;
  connect.address = "127.0.0.1:1";  // nobody listens there
  auto options = Initialised<refit_trainer_options>();
  options.connect = &connect;
  refit_trainer* trainer = nullptr;
  const auto attach = [&](const std::string& part) {
    const int32_t status = refit_trainer_attach(&options, &trainer);
    CAPTURE(refit_last_error());
    CHECK(std::string(refit_last_error()).find(part) != std::string::npos);
    return status;
  };
  CHECK(attach("takes certificates") == REFIT_INVALID_ARGUMENT);
  connect.tls_certificate = "/nonexistent/certificate";
  CHECK(attach("tls_key is empty") == REFIT_INVALID_ARGUMENT);
  connect.tls_key = "/nonexistent/key";
  connect.tls_roots = "/nonexistent/roots";
  CHECK(attach("/nonexistent/certificate") == REFIT_NOT_FOUND);
  connect.tls_server = "prod";
  CHECK(attach("tls_server is \"prod\"") == REFIT_INVALID_ARGUMENT);
  connect.tls_certificate = connect.tls_key = connect.tls_roots = connect.tls_server = nullptr;
  connect.insecure = 1;
  CHECK(attach("127.0.0.1:1") == REFIT_UNAVAILABLE);
}

TEST_CASE(
    "options of older callers mean what they meant: no reattaching, the default for silence") {
  refit_connect_options connect = ConnectToNobody();
  auto options = Initialised<refit_trainer_options>();
  options.connect = &connect;
  refit_trainer* trainer = nullptr;
  const auto attach = [&] { return refit_trainer_attach(&options, &trainer); };
  connect.reattach_ms = -1;
  connect.silence_ms = 1;
  connect.struct_size = offsetof(refit_connect_options, coordinator);
  CHECK(attach() == REFIT_UNAVAILABLE);
  connect.struct_size = sizeof(connect);
  CHECK(attach() == REFIT_INVALID_ARGUMENT);
  CHECK(std::string(refit_last_error()).find("reattach") != std::string::npos);
  connect.reattach_ms = 0;
  CHECK(attach() == REFIT_INVALID_ARGUMENT);
  CHECK(std::string(refit_last_error()).find("silence") != std::string::npos);
  connect.silence_ms = -1;
  CHECK(attach() == REFIT_UNAVAILABLE);
  connect.coordinator = "node-a:7001";
  CHECK(attach() == REFIT_UNAVAILABLE);
  const std::string long_name(300, 'x');
  connect.coordinator = long_name.c_str();
  CHECK(attach() == REFIT_INVALID_ARGUMENT);
  CHECK(std::string(refit_last_error()).find("coordinator") != std::string::npos);
}

TEST_CASE("a box of a derived tensor is computed in host memory") {
  const int64_t dims[] = {2, 4};
  const int64_t scale_dims[] = {2, 1};
  const refit_tensor from{"w", REFIT_FLOAT32, 2, dims, 0, REFIT_WHOLE};
  const refit_tensor values{"q", REFIT_FLOAT8_E4M3FN, 2, dims, 0, REFIT_WHOLE};
  const refit_tensor scales{"s", REFIT_FLOAT32, 2, scale_dims, 0, REFIT_WHOLE};
  refit_derivation as_values{0, &from, REFIT_DERIVED_FP8_CHANNEL, REFIT_DERIVED_VALUES};
  const refit_derivation as_scales{0, &from, REFIT_DERIVED_FP8_CHANNEL, REFIT_DERIVED_SCALES};
  float source[] = {1, 2, 3, 4, 448, -896, 0, 2};
  float scale[2] = {};
  REQUIRE(refit_derive(&scales, &as_scales, source, nullptr, nullptr, scale) == REFIT_OK);
  CHECK(scale[0] == 4.0F / 448);
  CHECK(scale[1] == 2);
  // The second row, without its last column: 224, -448 and 0 as float8_e4m3fn.
  const int64_t offset[] = {1, 0};
  const int64_t extent[] = {1, 3};
  uint8_t row[4] = {0, 0, 0, 77};
  REQUIRE(refit_derive(&values, &as_values, source, offset, extent, row) == REFIT_OK);
  CHECK(row[0] == 0x76);
  CHECK(row[1] == 0xFE);
  CHECK(row[2] == 0);
  CHECK(row[3] == 77);

  const int64_t beyond[] = {2, 3};
  CHECK(refit_derive(&values, &as_values, source, offset, beyond, row) == REFIT_INVALID_ARGUMENT);
  const char* odd = reinterpret_cast<const char*>(source) + 1;
  CHECK(refit_derive(&values, &as_values, odd, offset, extent, row) == REFIT_INVALID_ARGUMENT);
  CHECK_THAT(std::string(refit_last_error()), Catch::Contains("which is not a multiple of"));
  CHECK(refit_derive(&scales, &as_values, source, nullptr, nullptr, scale) ==
        REFIT_INVALID_ARGUMENT);
  CHECK(refit_derive(&values, nullptr, source, nullptr, nullptr, row) == REFIT_INVALID_ARGUMENT);
  source[5] = std::numeric_limits<float>::infinity();
  REQUIRE(refit_derive(&values, &as_values, source, offset, extent, row) ==
          REFIT_FAILED_PRECONDITION);
  auto failure = Initialised<refit_failure>();
  REQUIRE(refit_last_failure(&failure) == REFIT_OK);
  CHECK(std::string(failure.tensor) == "w");
  CHECK(std::string(failure.what).find("element [1, 1]") != std::string::npos);
}

TEST_CASE("the last error is each thread's own") {
  CHECK(refit_trainer_health(nullptr) == REFIT_INVALID_ARGUMENT);
  std::string other = "unset";
  std::thread thread([&] { other = refit_last_error(); });
  thread.join();
  CHECK(other.empty());
  CHECK(std::string(refit_last_error()) == "trainer is NULL");
}

TEST_CASE("statuses have gRPC's names") {
  CHECK(std::string(refit_status_name(REFIT_OK)) == "OK");
  CHECK(std::string(refit_status_name(REFIT_DEADLINE_EXCEEDED)) == "DEADLINE_EXCEEDED");
  CHECK(std::string(refit_status_name(REFIT_ABORTED)) == "ABORTED");
  CHECK(std::string(refit_status_name(REFIT_UNAUTHENTICATED)) == "UNAUTHENTICATED");
  CHECK(std::string(refit_status_name(17)) == "UNKNOWN");
  CHECK(std::string(refit_status_name(-1)) == "UNKNOWN");
}

TEST_CASE("the version has three numbers") {
  const std::string version = refit_version();
  CHECK(std::count(version.begin(), version.end(), '.') == 2);
}

}  // namespace
