// Push through a real daemon: every source of bytes, both deliveries, every verification. The
// engines' memory is compared byte for byte, with the storage around it.
#include <catch2/catch.hpp>
#include <future>

#include "tests/e2e/harness.h"
#include "tests/e2e/require.h"

namespace refitd::e2e {
namespace {

v1::EngineHello LoaderHello(const std::string& instance, const std::optional<v1::GroupSpec>& spec,
                            const Model* manifest = nullptr) {
  v1::EngineHello hello = RawEngine::Hello("g", instance, 0, 1, v1::DELIVERY_LOADER, spec);
  if (manifest != nullptr) *hello.mutable_manifest() = ManifestOf(*manifest);
  return hello;
}

v1::RegionRef Ref(uint64_t region, int64_t offset) {
  v1::RegionRef ref;
  ref.set_region_id(region);
  ref.set_byte_offset(offset);
  return ref;
}

// Writes tensors into `memory` one after the other, each at a multiple of 8; returns their offsets.
std::vector<int64_t> Write(const std::vector<std::string>& tensors, SharedMemory* memory) {
  std::vector<int64_t> offsets;
  int64_t at = 0;
  for (const std::string& bytes : tensors) {
    offsets.push_back(at);
    std::copy(bytes.begin(), bytes.end(), memory->data() + at);
    at += (static_cast<int64_t>(bytes.size()) + 7) / 8 * 8;
  }
  return offsets;
}

TEST_CASE(
    "every source of a bucket's bytes installs exactly the tensors and leaves what lies around "
    "them") {
  const Model model = MixedModel();
  Daemon daemon;
  Holder registered(daemon.Connect(), RawEngine::Hello("g", "in_place"), HoldWhole(model));
  RawEngine loader(daemon.Connect(), LoaderHello("loader", Spec(), &model));
  REQUIRE(loader.attached().ok());
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g"));
  REQUIRE(trainer.attached().ok());
  const int64_t room = ModelBytes(model) + 8 * static_cast<int64_t>(model.size());

  int64_t version = 0;
  const auto install = [&](const std::function<int64_t(const std::vector<std::string>&)>& push) {
    ++version;
    const std::vector<std::string> bytes = BytesOf(model, version);
    REQUIRE_OK(trainer.Begin(version));
    const int64_t buckets = push(bytes);
    const auto committed = trainer.Commit(version, buckets);
    REQUIRE_OK(committed);
    CHECK(committed.response.version() == version);
    CHECK(committed.response.bytes() == ModelBytes(model));
    REQUIRE(committed.response.instances_size() == 2);
    for (const v1::InstanceResult& instance : committed.response.instances())
      CHECK(instance.committed());
    for (RawEngine* engine : {&registered.engine(), &loader}) {
      const auto event = engine->events().WaitFor(v1::EngineEvent::kCommitted);
      REQUIRE(event.has_value());
      CHECK(event->committed().version() == version);
    }
    CHECK(registered.Difference(model, bytes) == "");
    CHECK(loader.LoadedDifference(model, bytes) == "");
  };

  SECTION("inline, unpacked") {
    install([&](const auto& bytes) {
      REQUIRE_OK(trainer.Push(version, InlineBucket(model, bytes, 0, false)));
      return 1;
    });
  }
  SECTION("inline, packed") {
    install([&](const auto& bytes) {
      REQUIRE_OK(trainer.Push(version, InlineBucket(model, bytes, 0, true)));
      return 1;
    });
  }
  SECTION("own regions, unpacked, several of them") {
    SharedMemory even = trainer.NewMemory(room);
    SharedMemory odd = trainer.NewMemory(room);
    REQUIRE(even.region_id != 0);
    REQUIRE(odd.region_id != 0);
    for (int round = 0; round < 2; ++round) {
      install([&](const auto& bytes) {
        const std::vector<int64_t> offsets = Write(bytes, &even);
        Write(bytes, &odd);
        v1::Bucket bucket = Describe(model, 0);
        for (size_t t = 0; t < model.size(); ++t) {
          *bucket.mutable_regions()->add_refs() =
              Ref(t % 2 == 0 ? even.region_id : odd.region_id, offsets[t]);
        }
        REQUIRE_OK(trainer.Push(version, bucket));
        return 1;
      });
    }
  }
  SECTION("own region, packed, explicit offsets") {
    SharedMemory memory = trainer.NewMemory(room + 64);
    install([&](const auto& bytes) {
      v1::Bucket bucket = Describe(model, 0);
      bucket.set_packed(true);
      for (const int64_t offset : Write(bytes, &memory)) bucket.add_byte_offsets(offset);
      *bucket.mutable_regions()->add_refs() = Ref(memory.region_id, 0);
      REQUIRE_OK(trainer.Push(version, bucket));
      return 1;
    });
  }
  SECTION("own region, packed back to back, also where that is unaligned") {
    SharedMemory memory = trainer.NewMemory(room + 64);
    install([&](const auto& bytes) {
      v1::Bucket bucket = Describe(model, 0);
      bucket.set_packed(true);
      int64_t at = 64;
      for (const std::string& tensor : bytes) {
        std::copy(tensor.begin(), tensor.end(), memory.data() + at);
        at += static_cast<int64_t>(tensor.size());
      }
      *bucket.mutable_regions()->add_refs() = Ref(memory.region_id, 64);
      REQUIRE_OK(trainer.Push(version, bucket));
      return 1;
    });
  }
  SECTION("leased slots") {
    const std::shared_ptr<HostRegion> pool = trainer.MapPool(Access::kReadWrite);
    REQUIRE(pool != nullptr);
    for (int round = 0; round < 3; ++round) {
      install([&](const auto& bytes) {
        for (size_t t = 0; t < model.size(); ++t) {
          const auto slot = trainer.LeaseSlot(version);
          REQUIRE_OK(slot);
          REQUIRE(slot.response.bytes() == 65'536);
          v1::Bucket bucket = Describe(model, static_cast<int64_t>(t), {static_cast<int>(t)});
          bucket.set_packed(true);
          bucket.add_byte_offsets(512);
          std::copy(bytes[t].begin(), bytes[t].end(),
                    pool->data() + slot.response.byte_offset() + 512);
          bucket.mutable_slot()->set_slot(slot.response.slot());
          bucket.mutable_slot()->set_grant(slot.response.grant());
          REQUIRE_OK(trainer.Push(version, bucket));
        }
        return static_cast<int64_t>(model.size());
      });
    }
    // A slot that is released unsubmitted leaves no trace.
    ++version;
    REQUIRE_OK(trainer.Begin(version));
    const auto slot = trainer.LeaseSlot(version);
    REQUIRE_OK(slot);
    REQUIRE_OK(trainer.ReleaseSlot(slot.response.slot(), slot.response.grant()));
    CHECK(trainer.ReleaseSlot(slot.response.slot(), slot.response.grant()).status.error_code() ==
          grpc::StatusCode::NOT_FOUND);
    REQUIRE_OK(trainer.Abort(version, "enough"));
  }
  SECTION("a mixture, in parts, out of order") {
    install([&](const auto& bytes) {
      // The first tensor comes in three parts of uneven length, the others whole; calls arrive in
      // reverse order.
      const int64_t elements = 257 * 24;
      const int64_t cuts[] = {0, 1, 3000, elements};
      std::vector<v1::Bucket> buckets;
      for (int part = 0; part < 3; ++part) {
        v1::Bucket bucket = Describe(model, part, {0});
        bucket.add_starts(cuts[part]);
        bucket.add_sizes(cuts[part + 1] - cuts[part]);
        bucket.mutable_inline_bytes()->add_chunks(bytes[0].substr(
            static_cast<size_t>(2 * cuts[part]), static_cast<size_t>(2 * bucket.sizes(0))));
        buckets.push_back(std::move(bucket));
      }
      std::vector<int> rest;
      for (size_t t = 1; t < model.size(); ++t) rest.push_back(static_cast<int>(t));
      v1::Bucket whole = InlineBucket(model, bytes, 3, false, rest);
      for (const int t : rest)
        whole.add_sizes(TensorBytes(model[t]) / ElementBytes(model[t].dtype));
      buckets.push_back(std::move(whole));
      std::vector<std::future<Outcome<v1::PushBucketResponse>>> calls;
      for (auto bucket = buckets.rbegin(); bucket != buckets.rend(); ++bucket) {
        calls.push_back(
            std::async(std::launch::async, [&, b = *bucket] { return trainer.Push(version, b); }));
      }
      for (auto& call : calls) REQUIRE_OK(call.get());
      return 4;
    });
  }
}

TEST_CASE("version after version is installed under every verification") {
  const Model model = MixedModel();
  Daemon daemon;
  Holder registered(daemon.Connect(), RawEngine::Hello("g", "in_place"), HoldWhole(model));
  RawEngine loader(daemon.Connect(), LoaderHello("loader", Spec()));
  REQUIRE(loader.attached().ok());
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g"));
  REQUIRE(trainer.attached().ok());
  int64_t version = 10;
  for (const v1::Verification verification :
       {v1::VERIFICATION_OFF, v1::VERIFICATION_TRANSFER, v1::VERIFICATION_READBACK,
        v1::VERIFICATION_UNSPECIFIED}) {
    for (int round = 0; round < 2; ++round) {
      version += 3;
      INFO("version " << version << ", verification " << verification);
      const std::vector<std::string> bytes = BytesOf(model, version);
      v1::BeginRequest begin;
      begin.set_version(version);
      begin.set_verification(verification);
      begin.set_tensor_count(static_cast<int64_t>(model.size()));
      begin.set_total_bytes(ModelBytes(model));
      REQUIRE_OK(trainer.Begin(begin));
      REQUIRE_OK(trainer.Push(version, InlineBucket(model, bytes, 0, false)));
      const auto committed = trainer.Commit(version, 1);
      REQUIRE_OK(committed);
      REQUIRE(committed.response.pushed_size() == 1);
      CHECK(committed.response.pushed(0).method() == v1::BROADCAST_METHOD_DIRECT);
      CHECK(committed.response.pushed(0).bytes() == ModelBytes(model));
      REQUIRE(loader.events().WaitFor(v1::EngineEvent::kCommitted).has_value());
      CHECK(registered.Difference(model, bytes) == "");
      CHECK(loader.LoadedDifference(model, bytes) == "");
      const v1::GroupStatus group = daemon.Group("g");
      CHECK(group.version() == version);
      CHECK(group.update().tensors() == static_cast<int64_t>(model.size()));
      CHECK(group.update().bytes() == ModelBytes(model));
      CHECK(trainer.GetUpdate("g", version).response.outcome() == v1::UPDATE_OUTCOME_COMMITTED);
    }
  }
  CHECK(trainer.GetUpdate("g", 11).response.outcome() == v1::UPDATE_OUTCOME_UNKNOWN);
  v1::GetUpdateStatisticsRequest request;
  request.set_group("g");
  const auto statistics = daemon.Call(&v1::Operator::Stub::GetUpdateStatistics, request);
  REQUIRE_OK(statistics);
  CHECK(statistics.response.update().version() == version);
  REQUIRE(statistics.response.buckets_size() == 1);
  CHECK(statistics.response.buckets(0).tensors() == static_cast<int64_t>(model.size()));
  CHECK(statistics.response.buckets(0).bytes() == ModelBytes(model));
  CHECK(statistics.response.buckets(0).parts() >= 1);
  request.set_group("other");
  CheckRefused(daemon.Call(&v1::Operator::Stub::GetUpdateStatistics, request).status,
               grpc::StatusCode::NOT_FOUND, {"'other'"});
}

TEST_CASE("a count that Commit tells commits all tensors to a loader engine, or nothing (P1)") {
  const Model model = MixedModel();
  Daemon daemon;
  RawEngine loader(daemon.Connect(), LoaderHello("loader", Spec()));
  REQUIRE(loader.attached().ok());
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g"));
  REQUIRE(trainer.attached().ok());
  const std::vector<std::string> bytes = BytesOf(model, 1);
  v1::CommitRequest commit;
  commit.set_version(1);
  commit.set_bucket_count(1);
  REQUIRE_OK(trainer.Begin(1));
  REQUIRE_OK(trainer.Push(1, InlineBucket(model, bytes, 0, false)));
  commit.set_tensor_count(static_cast<int64_t>(model.size()) + 1);
  CheckRefused(trainer.Commit(commit).status, grpc::StatusCode::FAILED_PRECONDITION,
               {"tensor_count", std::to_string(model.size() + 1)});
  CHECK(daemon.Group("g").update().outcome() == v1::UPDATE_OUTCOME_RUNNING);
  commit.set_tensor_count(static_cast<int64_t>(model.size()));
  REQUIRE_OK(trainer.Commit(commit));
  REQUIRE(loader.events().WaitFor(v1::EngineEvent::kCommitted).has_value());
  CHECK(loader.LoadedDifference(model, bytes) == "");
}

TEST_CASE("several trainer ranks feed several instances of several ranks with strided slices") {
  const Model model = MixedModel();
  constexpr int kTrainers = 3;
  const v1::GroupSpec spec = Spec(kTrainers, 4);
  Daemon daemon;
  // There is one instance of one rank that holds all, one of two ranks cut along dimension 0, one
  // of three ranks cut along dimension 1, and a loader one.
  std::vector<std::unique_ptr<Holder>> holders;
  const auto add = [&](const std::string& instance, int rank, int world, const Held& held) {
    holders.push_back(std::make_unique<Holder>(
        daemon.Connect(), RawEngine::Hello("g", instance, rank, world, v1::DELIVERY_IN_PLACE, spec),
        held));
  };
  add("whole", 0, 1, HoldWhole(model));
  for (int rank = 0; rank < 2; ++rank) add("rows", rank, 2, HoldSlice(model, 0, rank, 2));
  for (int rank = 0; rank < 3; ++rank) add("columns", rank, 3, HoldSlice(model, 1, rank, 3));
  RawEngine loader(daemon.Connect(), LoaderHello("loader", spec, &model));
  REQUIRE(loader.attached().ok());
  std::vector<std::unique_ptr<RawTrainer>> trainers;
  for (int rank = 0; rank < kTrainers; ++rank) {
    trainers.push_back(std::make_unique<RawTrainer>(daemon.Connect(),
                                                    RawTrainer::Hello("g", spec, rank, kTrainers)));
    REQUIRE(trainers.back()->attached().ok());
  }
  for (int64_t version = 1; version <= 3; ++version) {
    const std::vector<std::string> bytes = BytesOf(model, version);
    std::vector<std::future<grpc::Status>> ranks;
    for (int rank = 0; rank < kTrainers; ++rank) {
      ranks.push_back(std::async(std::launch::async, [&, rank]() -> grpc::Status {
        RawTrainer& trainer = *trainers[static_cast<size_t>(rank)];
        if (auto begun = trainer.Begin(version); !begun.ok()) return begun.status;
        int64_t seq = 0;
        for (int t = rank; t < static_cast<int>(model.size()); t += kTrainers) {
          auto pushed = trainer.Push(version, InlineBucket(model, bytes, seq, seq % 2 == 0, {t}));
          if (!pushed.ok()) return pushed.status;
          ++seq;
        }
        return trainer.Commit(version, seq).status;
      }));
    }
    for (auto& rank : ranks) {
      const grpc::Status status = rank.get();
      INFO(status.error_message());
      REQUIRE(status.ok());
    }
    REQUIRE(loader.events().WaitFor(v1::EngineEvent::kCommitted).has_value());
    for (const auto& holder : holders) CHECK(holder->Difference(model, bytes) == "");
    CHECK(loader.LoadedDifference(model, bytes) == "");
  }
  for (const std::string instance : {"whole", "rows", "columns", "loader"}) {
    CHECK(daemon.InstanceState("g", instance) == "clean");
  }
}

TEST_CASE("tensors larger than a slot reach loader engines in parts") {
  const Model model = {{"big", DType::kFloat32, {7, 1000}},
                       {"small", DType::kInt8, {3}},
                       {"odd", DType::kInt64, {1025}},
                       {"last", DType::kBool, {1}}};
  const v1::GroupSpec spec = Spec(1, 2, 4096, 2);
  Daemon daemon;
  RawEngine loader(daemon.Connect(), LoaderHello("loader", spec, &model));
  REQUIRE(loader.attached().ok());
  Holder registered(daemon.Connect(),
                    RawEngine::Hello("g", "in_place", 0, 1, v1::DELIVERY_IN_PLACE, spec),
                    HoldSlice(model, 1, 0, 1));
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g", spec));
  REQUIRE(trainer.attached().ok());
  SharedMemory memory = trainer.NewMemory(ModelBytes(model) + 64);
  for (int64_t version = 1; version <= 3; ++version) {
    const std::vector<std::string> bytes = BytesOf(model, version);
    REQUIRE_OK(trainer.Begin(version, v1::VERIFICATION_READBACK));
    v1::Bucket bucket = Describe(model, 0);
    for (const int64_t offset : Write(bytes, &memory)) {
      *bucket.mutable_regions()->add_refs() = Ref(memory.region_id, offset);
    }
    REQUIRE_OK(trainer.Push(version, bucket));
    REQUIRE_OK(trainer.Commit(version, 1));
    REQUIRE(loader.events().WaitFor(v1::EngineEvent::kCommitted).has_value());
    CHECK(loader.parts_seen() >= 9);
    CHECK(loader.LoadedDifference(model, bytes) == "");
    CHECK(registered.Difference(model, bytes) == "");
  }
}

TEST_CASE("tensors that engines register and trainers never push are left alone") {
  Model held = PlainModel(2, 8, 8);
  held.push_back({"rotary.cache", DType::kFloat32, {16}});
  const Model pushed(held.begin(), held.begin() + 2);
  v1::GroupSpec spec = Spec();
  spec.add_engine_only_tensors("rotary.cache");
  Daemon daemon;
  Holder engine(daemon.Connect(), RawEngine::Hello("g", "i", 0, 1, v1::DELIVERY_IN_PLACE, spec),
                HoldWhole(held));
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g", spec));
  REQUIRE(trainer.attached().ok());
  const std::vector<std::string> bytes = BytesOf(pushed, 1);
  REQUIRE_OK(trainer.Begin(1));
  REQUIRE_OK(trainer.Push(1, InlineBucket(pushed, bytes, 0, false)));
  REQUIRE_OK(trainer.Commit(1, 1));
  CHECK(engine.Difference(pushed, bytes) == "");
}

TEST_CASE("groups update side by side and do not mix") {
  constexpr int kGroups = 4;
  constexpr int64_t kVersions = 5;
  const Model model = MixedModel();
  Daemon daemon;
  std::vector<std::future<std::string>> groups;
  for (int g = 0; g < kGroups; ++g) {
    groups.push_back(std::async(std::launch::async, [&, g]() -> std::string {
      const std::string name = "group-" + std::to_string(g);
      Holder registered(daemon.Connect(), RawEngine::Hello(name, "in_place"),
                        HoldSlice(model, g % 2, 0, 1));
      v1::EngineHello hello = LoaderHello("loader", Spec(), &model);
      hello.set_group(name);
      RawEngine loader(daemon.Connect(), hello);
      RawTrainer trainer(daemon.Connect(), RawTrainer::Hello(name));
      if (!loader.attached().ok() || !trainer.attached().ok()) return "not attached";
      for (int64_t v = 1; v <= kVersions; ++v) {
        const int64_t version = v * (g + 1);
        const std::vector<std::string> bytes = BytesOf(model, 1000 * g + version);
        if (auto s = trainer.Begin(version).status; !s.ok()) return s.error_message();
        if (auto s = trainer.Push(version, InlineBucket(model, bytes, 0, true)).status; !s.ok()) {
          return s.error_message();
        }
        if (auto s = trainer.Commit(version, 1).status; !s.ok()) return s.error_message();
        if (!loader.events().WaitFor(v1::EngineEvent::kCommitted).has_value())
          return "no Committed";
        if (auto d = registered.Difference(model, bytes); !d.empty()) return d;
        if (auto d = loader.LoadedDifference(model, bytes); !d.empty()) return d;
      }
      return "";
    }));
  }
  for (auto& group : groups) CHECK(group.get() == "");
  CHECK(daemon.Status().groups_size() == kGroups);
}

TEST_CASE(
    "a planted corruption of the engine's memory is caught by readback, and the tensor named") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = Spec(1, 2);
  Daemon daemon;
  Holder victim(daemon.Connect(),
                RawEngine::Hello("g", "victim", 0, 1, v1::DELIVERY_IN_PLACE, spec),
                HoldWhole(model));
  Holder other(daemon.Connect(), RawEngine::Hello("g", "other", 0, 1, v1::DELIVERY_IN_PLACE, spec),
               HoldWhole(model));
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g", spec));
  REQUIRE(trainer.attached().ok());
  const auto push = [&](int64_t version, v1::Verification verification) {
    REQUIRE_OK(trainer.Begin(version, verification));
    REQUIRE_OK(trainer.Push(version, InlineBucket(model, BytesOf(model, version), 0, false)));
  };
  push(1, v1::VERIFICATION_READBACK);
  REQUIRE_OK(trainer.Commit(1, 1));

  // The bytes are pushed, so they are in place; there is no commit yet, so they were not read back.
  push(2, v1::VERIFICATION_READBACK);
  REQUIRE(victim.Difference(model, BytesOf(model, 2)) == "");
  char* element = victim.Tensor("layers.0.o.weight") + 1;
  *element = static_cast<char>(*element ^ 0x10);
  const auto lost = trainer.Commit(2, 1);
  CHECK(lost.status.error_code() == grpc::StatusCode::ABORTED);
  CHECK_THAT(lost.status.error_message(),
             Catch::Contains("layers.0.o.weight") && Catch::Contains("victim"));
  for (Holder* holder : {&victim, &other}) {
    const auto aborted = holder->engine().events().WaitFor(v1::EngineEvent::kAborted);
    REQUIRE(aborted.has_value());
    CHECK(aborted->aborted().dirty());
    CHECK_THAT(aborted->aborted().reason(), Catch::Contains("layers.0.o.weight"));
  }
  CHECK(daemon.InstanceState("g", "victim") == "dirty");
  CHECK(daemon.Group("g").updates_aborted() == 1);

  push(3, v1::VERIFICATION_READBACK);
  REQUIRE_OK(trainer.Commit(3, 1));
  CHECK(victim.Difference(model, BytesOf(model, 3)) == "");
  CHECK(other.Difference(model, BytesOf(model, 3)) == "");
  CHECK(daemon.InstanceState("g", "victim") == "clean");

  // Without readback nothing is read back, so the planted fault passes.
  push(4, v1::VERIFICATION_TRANSFER);
  *element = static_cast<char>(*element ^ 0x10);
  REQUIRE_OK(trainer.Commit(4, 1));
  CHECK(victim.Difference(model, BytesOf(model, 4)) != "");
}

TEST_CASE("a trainer on loopback TCP pushes inline bytes to an engine on the unix socket") {
  const Model model = MixedModel();
  Daemon daemon({"--listen-tcp=127.0.0.1:0"});
  const v1::GetStatusResponse status = daemon.Status();
  REQUIRE(status.listeners_size() == 2);
  const std::string address = status.listeners(1).substr(std::string("tcp:").size());
  CHECK_THAT(address, Catch::StartsWith("127.0.0.1:") && !Catch::EndsWith(":0"));
  Holder engine(daemon.Connect(), RawEngine::Hello("g", "a"), HoldWhole(model));
  RawTrainer trainer(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()),
                     RawTrainer::Hello("g"));
  REQUIRE(trainer.attached().ok());
  const std::vector<std::string> bytes = BytesOf(model, 1);
  REQUIRE_OK(trainer.Begin(1));
  REQUIRE_OK(trainer.Push(1, InlineBucket(model, bytes, 0, true)));
  REQUIRE_OK(trainer.Commit(1, 1));
  CHECK(engine.Difference(model, bytes) == "");
}

}  // namespace
}  // namespace refitd::e2e
