// The C interface against a real daemon: promises of refit.h that a scripted peer can't show.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "client/refit.h"
#include "client/refit_test_util.h"
#include "tests/e2e/harness.h"

namespace refitd::e2e {
namespace {

constexpr int64_t kDeadlineMs = std::chrono::milliseconds(kDeadline).count();
constexpr int64_t kSlotBytes = 65'536;
// A tensor of so many floats is larger than three slots.
constexpr int64_t kElements = 50'000;
constexpr int64_t kBytes = kElements * static_cast<int64_t>(sizeof(float));

template <typename Handle, void (*Free)(Handle*)>
struct Freed {
  void operator()(Handle* handle) const { Free(handle); }
};
using Trainer = std::unique_ptr<refit_trainer, Freed<refit_trainer, refit_trainer_free>>;
using Engine = std::unique_ptr<refit_engine, Freed<refit_engine, refit_engine_free>>;
using Region = std::unique_ptr<refit_region, Freed<refit_region, refit_region_free>>;
using Update = std::unique_ptr<refit_update, Freed<refit_update, refit_update_free>>;
using Joiner = std::unique_ptr<refit_joiner, Freed<refit_joiner, refit_joiner_free>>;

// Must be called on the thread that made the call.
void Ok(refit_status status) {
  INFO(refit_status_name(status) << ": " << refit_last_error());
  REQUIRE(status == REFIT_OK);
}

refit_connect_options Connect(const Daemon& daemon) {
  auto connect = Initialised<refit_connect_options>();
  connect.socket = daemon.socket().c_str();
  connect.group = "g";
  return connect;
}

Trainer AttachTrainer(const Daemon& daemon) {
  auto spec = Initialised<refit_group_spec>();
  spec.slot_bytes = kSlotBytes;
  spec.slots = 4;
  refit_connect_options connect = Connect(daemon);
  connect.spec = &spec;
  auto options = Initialised<refit_trainer_options>();
  options.connect = &connect;
  refit_trainer* trainer = nullptr;
  Ok(refit_trainer_attach(&options, &trainer));
  return Trainer(trainer);
}

Engine AttachEngine(const Daemon& daemon, int32_t delivery, bool dirty = false) {
  const refit_connect_options connect = Connect(daemon);
  auto options = Initialised<refit_engine_options>();
  options.connect = &connect;
  options.instance = "i";
  options.delivery = delivery;
  options.dirty = dirty ? 1 : 0;
  refit_engine* engine = nullptr;
  Ok(refit_engine_attach(&options, &engine));
  return Engine(engine);
}

const int64_t kDims[] = {kElements};
const refit_tensor kTensor = {"w", REFIT_FLOAT32, 1, kDims, 0, REFIT_WHOLE};

void Register(refit_engine* engine, const refit_region* memory) {
  const refit_piece piece = {0, nullptr, nullptr, nullptr, memory, 0};
  Ok(refit_engine_register(engine, &kTensor, 1, &piece, 1, nullptr, 0));
}

std::vector<float> ValuesOf(int64_t version) {
  std::vector<float> values(kElements);
  for (int64_t i = 0; i < kElements; ++i) values[i] = static_cast<float>(version * kElements + i);
  return values;
}

refit_event Next(refit_engine* engine) {
  auto event = Initialised<refit_event>();
  Ok(refit_engine_next(engine, kDeadlineMs, &event));
  return event;
}

refit_begin_options BeginOf(int64_t version) {
  auto options = Initialised<refit_begin_options>();
  options.version = version;
  options.tensor_count = 1;
  return options;
}

// Begins while the engine answers Ready.
Update Begin(refit_trainer* trainer, refit_engine* engine, int64_t version) {
  auto begun = std::async(std::launch::async, [&] {
    const refit_begin_options options = BeginOf(version);
    refit_update* update = nullptr;
    const refit_status status = refit_trainer_begin(trainer, &options, &update);
    return std::pair(status, update);
  });
  const refit_event prepare = Next(engine);
  REQUIRE(prepare.kind == REFIT_EVENT_PREPARE);
  Ok(refit_engine_ready(engine, version, -1));
  const auto [status, update] = begun.get();
  REQUIRE(status == REFIT_OK);
  return Update(update);
}

// Pushes one packed chunk, with `padding` bytes after the tensor.
refit_status PushInline(refit_update* update, int64_t version, int64_t padding = 0) {
  const std::vector<float> values = ValuesOf(version);
  std::string bytes(static_cast<size_t>(kBytes + padding), 'p');
  std::memcpy(bytes.data(), values.data(), static_cast<size_t>(kBytes));
  const void* const chunk = bytes.data();
  const auto chunk_bytes = static_cast<int64_t>(bytes.size());
  auto bucket = Initialised<refit_bucket>();
  bucket.tensors = &kTensor;
  bucket.tensor_count = 1;
  bucket.packed = 1;
  bucket.chunk_count = 1;
  bucket.chunks = &chunk;
  bucket.chunk_bytes = &chunk_bytes;
  return refit_update_push(update, &bucket);
}

Region NewRegion(refit_engine* engine) {
  refit_region* region = nullptr;
  Ok(refit_engine_new_region(engine, kBytes, &region));
  return Region(region);
}

TEST_CASE(
    "an engine that lost its lease after Ready and attaches anew as dirty is told that it is") {
  Daemon daemon;
  {
    const Trainer trainer = AttachTrainer(daemon);
    const Engine engine = AttachEngine(daemon, REFIT_DELIVERY_IN_PLACE);
    const Region memory = NewRegion(engine.get());
    Register(engine.get(), memory.get());
    const Update update = Begin(trainer.get(), engine.get(), 1);
    daemon.Kill();
    auto event = Initialised<refit_event>();
    CHECK(refit_engine_next(engine.get(), kDeadlineMs, &event) == REFIT_UNAVAILABLE);
    CHECK(refit_engine_weights(engine.get()) == REFIT_WEIGHTS_UNKNOWN);
  }
  daemon.Restart();
  const Trainer trainer = AttachTrainer(daemon);
  const Engine engine = AttachEngine(daemon, REFIT_DELIVERY_IN_PLACE, /*dirty=*/true);
  CHECK(refit_engine_weights(engine.get()) == REFIT_WEIGHTS_DIRTY);
  const Region memory = NewRegion(engine.get());
  Register(engine.get(), memory.get());
  CHECK(daemon.InstanceState("g", "i") == "dirty");
  {
    const Update update = Begin(trainer.get(), engine.get(), 2);
    Ok(refit_update_abort(update.get(), "nothing was written"));
  }
  const refit_event aborted = Next(engine.get());
  REQUIRE(aborted.kind == REFIT_EVENT_ABORTED);
  CHECK(aborted.dirty == 1);
  CHECK(refit_engine_weights(engine.get()) == REFIT_WEIGHTS_DIRTY);
  int64_t version = 0;
  CHECK(refit_engine_version(engine.get(), &version) == REFIT_NOT_FOUND);
  {
    const Update update = Begin(trainer.get(), engine.get(), 3);
    Ok(PushInline(update.get(), 3));
    Ok(refit_update_commit(update.get(), 0, nullptr));
  }
  REQUIRE(Next(engine.get()).kind == REFIT_EVENT_COMMITTED);
  CHECK(refit_engine_weights(engine.get()) == REFIT_WEIGHTS_CLEAN);
}

UniqueFd NewMemfd(int64_t bytes, unsigned seals) {
  UniqueFd fd(::memfd_create("weights", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(fd.valid());
  REQUIRE(::ftruncate(fd.get(), bytes) == 0);
  REQUIRE((seals == 0 || ::fcntl(fd.get(), F_ADD_SEALS, seals) == 0));
  return fd;
}

TEST_CASE("memory that exists already is registered by its memfd, and stays the caller's") {
  Daemon daemon;
  const Trainer trainer = AttachTrainer(daemon);
  const Engine engine = AttachEngine(daemon, REFIT_DELIVERY_IN_PLACE);
  UniqueFd sealed = NewMemfd(kBytes, F_SEAL_SHRINK);
  auto* const mine =
      static_cast<const float*>(::mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, sealed.get(), 0));
  REQUIRE(mine != MAP_FAILED);
  refit_region* region = nullptr;
  Ok(refit_engine_add_memfd(engine.get(), sealed.get(), kBytes, &region));
  const Region memory(region);
  CHECK(refit_region_bytes(region) == kBytes);
  CHECK(refit_region_data(region) != nullptr);
  CHECK(::fcntl(sealed.get(), F_GETFD) >= 0);
  sealed.Reset();
  Register(engine.get(), region);
  {
    const Update update = Begin(trainer.get(), engine.get(), 1);
    Ok(PushInline(update.get(), 1));
    Ok(refit_update_commit(update.get(), 0, nullptr));
  }
  REQUIRE(Next(engine.get()).kind == REFIT_EVENT_COMMITTED);
  const std::vector<float> values = ValuesOf(1);
  CHECK(std::equal(values.begin(), values.end(), mine));
  ::munmap(const_cast<float*>(mine), kBytes);
}

TEST_CASE("memory that can't be registered is refused, saying what is wrong with it") {
  Daemon daemon;
  const Trainer trainer = AttachTrainer(daemon);
  refit_region* region = nullptr;
  const auto refused = [&](int fd, int64_t bytes) {
    CHECK(refit_trainer_add_memfd(trainer.get(), fd, bytes, &region) != REFIT_OK);
    CHECK(region == nullptr);
    return std::string(refit_last_error());
  };
  const UniqueFd loose = NewMemfd(kBytes, 0);
  CHECK_THAT(refused(loose.get(), kBytes), Catch::Contains("not sealed against shrinking"));
  const UniqueFd sealed = NewMemfd(kBytes, F_SEAL_SHRINK);
  CHECK_THAT(refused(sealed.get(), kBytes + 1), Catch::Contains(std::to_string(kBytes)));
  CHECK_THAT(refused(sealed.get(), 0), Catch::Contains("0 bytes"));
  const UniqueFd file(::open("/dev/null", O_RDWR | O_CLOEXEC));
  CHECK_THAT(refused(file.get(), kBytes), Catch::Contains("not a memfd"));
  CHECK_THAT(refused(-1, kBytes), Catch::Contains("descriptor is -1"));
  CHECK(daemon.Resources().regions() == 0);
}

TEST_CASE("a version that is begun twice has one handle, and freeing nothing aborts nothing") {
  Daemon daemon;
  const Trainer trainer = AttachTrainer(daemon);
  const Engine engine = AttachEngine(daemon, REFIT_DELIVERY_IN_PLACE);
  const Region memory = NewRegion(engine.get());
  Register(engine.get(), memory.get());
  const Update first = Begin(trainer.get(), engine.get(), 1);
  const refit_begin_options options = BeginOf(1);
  refit_update* second = nullptr;
  CHECK(refit_trainer_begin(trainer.get(), &options, &second) == REFIT_ALREADY_EXISTS);
  CHECK(second == nullptr);
  refit_update_free(second);
  // Padding after a packed bucket's last tensor is ignored.
  Ok(PushInline(first.get(), 1, /*padding=*/100));
  auto result = Initialised<refit_commit_result>();
  Ok(refit_update_commit(first.get(), 0, &result));
  CHECK(result.committed == 1);
  CHECK(result.bytes == kBytes);
}

TEST_CASE("freeing the handle of an update that is over leaves the next one to its version alone") {
  Daemon daemon;
  const Trainer trainer = AttachTrainer(daemon);
  const Engine engine = AttachEngine(daemon, REFIT_DELIVERY_IN_PLACE);
  const Region memory = NewRegion(engine.get());
  Register(engine.get(), memory.get());
  Update first = Begin(trainer.get(), engine.get(), 1);
  // The update is lost, and this handle is not told.
  Ok(refit_engine_fail(engine.get(), 1, "the loader failed"));
  REQUIRE(Next(engine.get()).kind == REFIT_EVENT_ABORTED);
  const Update second = Begin(trainer.get(), engine.get(), 1);
  first.reset();
  Ok(PushInline(second.get(), 1));
  Ok(refit_update_commit(second.get(), 0, nullptr));
  REQUIRE(Next(engine.get()).kind == REFIT_EVENT_COMMITTED);
}

TEST_CASE("a tensor larger than a slot is joined for a loader engine") {
  Daemon daemon;
  const Trainer trainer = AttachTrainer(daemon);
  const Engine engine = AttachEngine(daemon, REFIT_DELIVERY_LOADER);
  refit_joiner* made = nullptr;
  Ok(refit_joiner_new(&made));
  const Joiner joiner(made);
  const refit_view* views = nullptr;
  int64_t view_count = -1;
  CHECK(refit_joiner_add(joiner.get(), engine.get(), &views, &view_count) ==
        REFIT_FAILED_PRECONDITION);
  CHECK(view_count == -1);
  const Update update = Begin(trainer.get(), engine.get(), 1);
  auto committed = std::async(std::launch::async, [&] {
    const refit_status pushed = PushInline(update.get(), 1);
    return pushed == REFIT_OK ? refit_update_commit(update.get(), 0, nullptr) : pushed;
  });
  std::vector<float> loaded;
  int parts = 0;
  while (true) {
    const refit_event event = Next(engine.get());
    if (event.kind == REFIT_EVENT_COMMITTED) break;
    REQUIRE(event.kind == REFIT_EVENT_PART);
    ++parts;
    Ok(refit_joiner_add(joiner.get(), engine.get(), &views, &view_count));
    CHECK(refit_joiner_unfinished(joiner.get()) == (view_count == 0 ? 1 : 0));
    if (view_count == 1) {
      CHECK(std::string(views[0].tensor.name) == "w");
      CHECK(views[0].tensor.start == 0);
      REQUIRE(views[0].tensor.count == kElements);
      const auto* data = reinterpret_cast<const float*>(views[0].data);
      loaded.assign(data, data + kElements);
    }
    Ok(refit_engine_ack(engine.get(), event.update_id, event.part));
  }
  CHECK(committed.get() == REFIT_OK);
  CHECK(parts > 3);
  CHECK(loaded == ValuesOf(1));
  refit_joiner_reset(joiner.get());
}

}  // namespace
}  // namespace refitd::e2e
