// Groups over two and three real daemons: every source, delivery and verification, with trainers
// and engines on every side. The engines' memory is compared byte for byte, and the daemons'
// resources are counted afterwards.
#include <fmt/format.h>
#include <sys/resource.h>

#include <catch2/catch.hpp>
#include <future>

#include "tests/e2e/harness.h"
#include "tests/e2e/require.h"

namespace refitd::e2e {
namespace {

using grpc::StatusCode;

std::vector<std::string> Flags(const std::string& daemon_id) {
  return {"--listen-tcp=127.0.0.1:0", "--daemon-id=" + daemon_id};
}

template <typename Hello>
Hello In(Hello hello, const Daemon& coordinator) {
  hello.set_coordinator(coordinator.address());
  return hello;
}

v1::EngineHello InPlaceRank(const std::string& instance, const v1::GroupSpec& spec, int rank = 0,
                            int world_size = 1, const std::string& group = "g") {
  return RawEngine::Hello(group, instance, rank, world_size, v1::DELIVERY_IN_PLACE, spec);
}

v1::EngineHello LoaderRank(const std::string& instance, const v1::GroupSpec& spec,
                           const Model* manifest = nullptr) {
  v1::EngineHello hello = RawEngine::Hello("g", instance, 0, 1, v1::DELIVERY_LOADER, spec);
  if (manifest != nullptr) *hello.mutable_manifest() = ManifestOf(*manifest);
  return hello;
}

// A daemon's resources without members. Descriptors and threads are those at the object's
// construction.
class Baseline {
 public:
  explicit Baseline(Daemon* daemon) : daemon_(daemon), before_(daemon->Resources()) {}

  // Names the resources that are left beyond the baseline; empty: there are none.
  std::string Left() {
    std::string left;
    Eventually([&] { return (left = Look()).empty(); });
    return left;
  }

 private:
  // gRPC keeps a poller or two more after several connections were busy at a time.
  static constexpr int64_t kSpareThreads = 8;
  static constexpr int64_t kSpareDescriptors = 4;

  std::string Look() {
    const v1::GetStatusResponse status = daemon_->Status();
    const v1::ResourceStatus& now = status.resources();
    std::string left;
    const auto check = [&left](const char* what, int64_t is, int64_t may) {
      if (is > may) left += fmt::format("{} {} (not more than {}); ", what, is, may);
    };
    check("members", now.members(), 0);
    check("regions", now.regions(), 0);
    check("descriptors", now.descriptors(), before_.descriptors() + kSpareDescriptors);
    check("threads", now.threads(), before_.threads() + kSpareThreads);
    int64_t pools = 0;
    for (const v1::GroupStatus& group : status.groups()) {
      // A joined daemon forgets the group with its last member.
      if (!group.coordinator().empty()) left += "group of another daemon; ";
      if (now.pool_bytes() > 0) ++pools;
      check("nodes", group.nodes_size(), 1);
      for (const v1::SlotStatus& slot : group.slots()) {
        if (slot.state() != "free") left += fmt::format("slot {} {}; ", slot.slot(), slot.state());
      }
    }
    check("mappings", daemon_->MemfdMappings(), pools);
    return left;
  }

  Daemon* const daemon_;
  const v1::ResourceStatus before_;
};

enum class Source { kInline, kInlinePacked, kRegion, kRegionPacked, kSlot };

std::string NameOf(Source source) {
  switch (source) {
    case Source::kInline:
      return "inline";
    case Source::kInlinePacked:
      return "inline, packed";
    case Source::kRegion:
      return "a region";
    case Source::kRegionPacked:
      return "a region, packed";
    case Source::kSlot:
      return "leased slots";
  }
  return "";
}

// A trainer rank that pushes its share of the tensors (every n-th) from any kind of source.
class Pusher {
 public:
  Pusher(const Daemon& daemon, const v1::TrainerHello& hello, const Model& model)
      : trainer(daemon.Connect(), hello),
        rank_(hello.rank()),
        ranks_(hello.world_size()),
        model_(model) {}

  grpc::Status Install(int64_t version, const std::vector<std::string>& bytes, Source source,
                       v1::Verification verification = v1::VERIFICATION_UNSPECIFIED) {
    if (auto begun = trainer.Begin(version, verification); !begun.ok()) return begun.status;
    std::vector<int> share;
    for (int t = rank_; t < static_cast<int>(model_.size()); t += ranks_) share.push_back(t);
    int64_t seq = 0;
    const auto push = [&](v1::Bucket bucket) {
      bucket.set_seq(seq++);
      return trainer.Push(version, std::move(bucket)).status;
    };
    grpc::Status status;
    switch (source) {
      case Source::kInline:
      case Source::kInlinePacked:
        // Two buckets, of which one waits for the other.
        for (size_t half = 0; half < 2 && status.ok(); ++half) {
          const auto middle = share.begin() + static_cast<ptrdiff_t>(share.size() / 2);
          const std::vector<int> part(half == 0 ? share.begin() : middle,
                                      half == 0 ? middle : share.end());
          if (part.empty()) continue;
          status = push(InlineBucket(model_, bytes, 0, source == Source::kInlinePacked, part));
        }
        break;
      case Source::kRegion:
      case Source::kRegionPacked:
        status = push(RegionBucket(bytes, share, source == Source::kRegionPacked));
        break;
      case Source::kSlot:
        for (const int t : share) {
          if (!status.ok()) break;
          status = PushBySlots(version, bytes, t, push);
        }
        break;
    }
    if (!status.ok()) return status;
    auto committed = trainer.Commit(version, seq);
    result = committed.response;
    return committed.status;
  }

  RawTrainer trainer;
  v1::CommitResponse result;

 private:
  v1::Bucket RegionBucket(const std::vector<std::string>& bytes, const std::vector<int>& share,
                          bool packed) {
    if (memory_.region_id == 0) {
      memory_ = trainer.NewMemory(ModelBytes(model_) + 8 * static_cast<int64_t>(model_.size()));
    }
    v1::Bucket bucket = Describe(model_, 0, share);
    if (packed) {
      bucket.set_packed(true);
      bucket.mutable_regions()->add_refs()->set_region_id(memory_.region_id);
    }
    int64_t at = 0;
    for (const int t : share) {
      const std::string& tensor = bytes[static_cast<size_t>(t)];
      std::copy(tensor.begin(), tensor.end(), memory_.data() + at);
      if (packed) {
        bucket.add_byte_offsets(at);
      } else {
        v1::RegionRef* ref = bucket.mutable_regions()->add_refs();
        ref->set_region_id(memory_.region_id);
        ref->set_byte_offset(at);
      }
      at += (static_cast<int64_t>(tensor.size()) + 7) / 8 * 8;
    }
    return bucket;
  }

  // Pushes a tensor by slots, as many as it takes.
  grpc::Status PushBySlots(int64_t version, const std::vector<std::string>& bytes, int t,
                           const std::function<grpc::Status(v1::Bucket)>& push) {
    if (pool_ == nullptr) pool_ = trainer.MapPool(Access::kReadWrite);
    if (pool_ == nullptr) return {StatusCode::INTERNAL, "the pool can't be mapped"};
    const std::string& tensor = bytes[static_cast<size_t>(t)];
    const int64_t element = ElementBytes(model_[static_cast<size_t>(t)].dtype);
    const int64_t elements = static_cast<int64_t>(tensor.size()) / element;
    int64_t start = 0;
    do {
      const auto slot = trainer.LeaseSlot(version);
      if (!slot.ok()) return slot.status;
      const int64_t count = std::min(slot.response.bytes() / element, elements - start);
      v1::Bucket bucket = Describe(model_, 0, {t});
      bucket.set_packed(true);
      bucket.add_byte_offsets(0);
      bucket.add_starts(start);
      bucket.add_sizes(count);
      bucket.mutable_slot()->set_slot(slot.response.slot());
      bucket.mutable_slot()->set_grant(slot.response.grant());
      std::copy_n(tensor.data() + start * element, count * element,
                  pool_->data() + slot.response.byte_offset());
      if (grpc::Status pushed = push(std::move(bucket)); !pushed.ok()) return pushed;
      start += count;
    } while (start < elements);
    return grpc::Status::OK;
  }

  const int rank_;
  const int ranks_;
  const Model& model_;
  SharedMemory memory_;
  std::shared_ptr<HostRegion> pool_;
};

// All ranks install their shares at once; each must be told committed.
void InstallTogether(const std::vector<Pusher*>& ranks, int64_t version,
                     const std::vector<std::string>& bytes, Source source,
                     v1::Verification verification = v1::VERIFICATION_UNSPECIFIED) {
  std::vector<std::future<grpc::Status>> calls;
  for (Pusher* rank : ranks) {
    calls.push_back(std::async(std::launch::async, [&bytes, version, source, verification, rank] {
      return rank->Install(version, bytes, source, verification);
    }));
  }
  for (auto& call : calls) {
    const grpc::Status status = call.get();
    INFO("version " << version << ": " << status.error_message());
    REQUIRE(status.ok());
  }
}

void RequireCommitted(RawEngine* engine, int64_t version) {
  const auto event =
      engine->events().WaitForAny({v1::EngineEvent::kCommitted, v1::EngineEvent::kAborted});
  REQUIRE(event.has_value());
  INFO(event->ShortDebugString());
  REQUIRE(event->has_committed());
  CHECK(event->committed().version() == version);
}

TEST_CASE(
    "trainers on two daemons install every version on engines of both, from every source and "
    "under every verification") {
  const Model model = MixedModel();
  // With the smaller slots one tensor takes four slots, and every bucket several.
  const int slot_bytes = GENERATE(4096, 65'536);
  const v1::GroupSpec spec = Spec(2, 5, slot_bytes, 4);
  Daemon a(Flags("a"));
  Daemon b(Flags("b"));
  Baseline at_a(&a);
  Baseline at_b(&b);
  {
    Holder near(a.Connect(), InPlaceRank("near", spec), HoldWhole(model));
    Holder far(b.Connect(), In(InPlaceRank("far", spec), a), HoldWhole(model));
    // An instance with a rank on each daemon.
    Holder left(a.Connect(), InPlaceRank("wide", spec, 0, 2), HoldSlice(model, 0, 0, 2));
    Holder right(b.Connect(), In(InPlaceRank("wide", spec, 1, 2), a), HoldSlice(model, 0, 1, 2));
    RawEngine near_staged(a.Connect(), LoaderRank("near-loader", spec, &model));
    RawEngine far_staged(b.Connect(), In(LoaderRank("far-loader", spec, &model), a));
    REQUIRE(near_staged.attached().ok());
    REQUIRE(far_staged.attached().ok());
    Pusher first(a, RawTrainer::Hello("g", spec, 0, 2), model);
    Pusher second(b, In(RawTrainer::Hello("g", spec, 1, 2), a), model);
    REQUIRE(first.trainer.attached().ok());
    REQUIRE(second.trainer.attached().ok());
    CHECK(second.trainer.welcome().slot_bytes() == slot_bytes);

    int64_t version = 0;
    for (const Source source : {Source::kInline, Source::kInlinePacked, Source::kRegion,
                                Source::kRegionPacked, Source::kSlot}) {
      for (const v1::Verification verification :
           {v1::VERIFICATION_OFF, v1::VERIFICATION_TRANSFER, v1::VERIFICATION_READBACK}) {
        ++version;
        INFO("from " << NameOf(source) << ", verification " << verification << ", slots of "
                     << slot_bytes);
        const std::vector<std::string> bytes = BytesOf(model, version);
        InstallTogether({&first, &second}, version, bytes, source, verification);
        for (const Pusher* rank : {&first, &second}) {
          CHECK(rank->result.version() == version);
          CHECK(rank->result.bytes() == ModelBytes(model));
          CHECK(rank->result.instances_size() == 5);
          for (const v1::InstanceResult& i : rank->result.instances()) CHECK(i.committed());
        }
        for (Holder* holder : {&near, &far, &left, &right}) {
          RequireCommitted(&holder->engine(), version);
          CHECK(holder->Difference(model, bytes) == "");
        }
        for (RawEngine* engine : {&near_staged, &far_staged}) {
          RequireCommitted(engine, version);
          CHECK(engine->LoadedDifference(model, bytes) == "");
        }
      }
    }
    const v1::GroupStatus there = b.Group("g");
    CHECK(there.coordinator() == a.address());
    CHECK(there.version() == version);
    CHECK(there.wire_bytes_received() > 0);
    const v1::GroupStatus here = a.Group("g");
    CHECK(here.coordinator().empty());
    CHECK(here.updates_committed() == version);
    CHECK(here.updates_aborted() == 0);
    REQUIRE(here.nodes_size() == 2);
    CHECK(here.nodes(1).daemon_id() == "b");
    CHECK(here.nodes(1).state() == "joined");
    for (const std::string instance : {"near", "far", "wide", "near-loader", "far-loader"}) {
      CHECK(a.InstanceState("g", instance) == "clean");
    }
  }
  CHECK(at_a.Left() == "");
  CHECK(at_b.Left() == "");
  CHECK(b.Stop() == 0);
  CHECK(a.Stop() == 0);
}

TEST_CASE("a count that Commit tells on a joined daemon commits all tensors on both, or nothing") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = Spec(1, 2);
  Daemon a(Flags("a"));
  Daemon b(Flags("b"));
  RawEngine near(a.Connect(), LoaderRank("near", spec));
  RawEngine far(b.Connect(), In(LoaderRank("far", spec), a));
  REQUIRE(near.attached().ok());
  REQUIRE(far.attached().ok());
  RawTrainer trainer(b.Connect(), In(RawTrainer::Hello("g", spec), a));
  REQUIRE(trainer.attached().ok());
  const std::vector<std::string> bytes = BytesOf(model, 1);
  v1::CommitRequest commit;
  commit.set_version(1);
  commit.set_bucket_count(1);
  REQUIRE_OK(trainer.Begin(1));
  REQUIRE_OK(trainer.Push(1, InlineBucket(model, bytes, 0, false)));
  CheckRefused(trainer.Commit(commit).status, grpc::StatusCode::FAILED_PRECONDITION,
               {"tensor_count: 0", "rank 0"});
  commit.set_tensor_count(static_cast<int64_t>(model.size()) + 1);
  CheckRefused(trainer.Commit(commit).status, grpc::StatusCode::FAILED_PRECONDITION,
               {"tensor_count", std::to_string(model.size() + 1)});
  commit.set_tensor_count(static_cast<int64_t>(model.size()));
  REQUIRE_OK(trainer.Commit(commit));
  for (RawEngine* engine : {&near, &far}) {
    RequireCommitted(engine, 1);
    CHECK(engine->LoadedDifference(model, bytes) == "");
  }
}

TEST_CASE("three daemons share one group, with trainers on two of them and engines on all") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = Spec(2, 4, 8192, 3);
  Daemon a(Flags("a"));
  Daemon b(Flags("b"));
  Daemon c(Flags("c"));
  Baseline at_a(&a);
  Baseline at_b(&b);
  Baseline at_c(&c);
  {
    Pusher first(b, In(RawTrainer::Hello("g", spec, 0, 2), a), model);
    Pusher second(c, In(RawTrainer::Hello("g", spec, 1, 2), a), model);
    REQUIRE(first.trainer.attached().ok());
    REQUIRE(second.trainer.attached().ok());
    std::vector<std::unique_ptr<Holder>> holders;
    const auto add = [&](const v1::EngineHello& hello, const Daemon& daemon, const Held& held) {
      holders.push_back(std::make_unique<Holder>(daemon.Connect(), hello, held));
    };
    // This instance has a rank on each of the three daemons.
    add(InPlaceRank("wide", spec, 0, 3), a, HoldSlice(model, 1, 0, 3));
    add(In(InPlaceRank("wide", spec, 1, 3), a), b, HoldSlice(model, 1, 1, 3));
    add(In(InPlaceRank("wide", spec, 2, 3), a), c, HoldSlice(model, 1, 2, 3));
    add(In(InPlaceRank("on-b", spec), a), b, HoldWhole(model));
    add(In(InPlaceRank("on-c", spec), a), c, HoldWhole(model));
    RawEngine loader(c.Connect(), In(LoaderRank("loader", spec, &model), a));
    REQUIRE(loader.attached().ok());
    int64_t version = 0;
    for (int round = 0; round < 2; ++round) {
      for (const Source source : {Source::kInline, Source::kRegion, Source::kSlot}) {
        ++version;
        INFO("from " << NameOf(source));
        const std::vector<std::string> bytes = BytesOf(model, version);
        InstallTogether({&first, &second}, version, bytes, source);
        for (const auto& holder : holders) {
          RequireCommitted(&holder->engine(), version);
          CHECK(holder->Difference(model, bytes) == "");
        }
        RequireCommitted(&loader, version);
        CHECK(loader.LoadedDifference(model, bytes) == "");
      }
      // A daemon leaves with its last member; the others get a new communicator.
      if (round == 0) {
        const uint64_t communicator = a.Group("g").communicator();
        Daemon d(Flags("d"));
        Holder late(d.Connect(), In(InPlaceRank("late", spec), a), HoldWhole(model));
        ++version;
        const std::vector<std::string> bytes = BytesOf(model, version);
        InstallTogether({&first, &second}, version, bytes, Source::kInline);
        CHECK(late.Difference(model, bytes) == "");
        for (const auto& holder : holders) RequireCommitted(&holder->engine(), version);
        RequireCommitted(&loader, version);
        CHECK(a.Group("g").communicator() > communicator);
      }
      REQUIRE(Eventually([&] { return a.Group("g").nodes_size() == 3; }));
    }
    CHECK(a.Group("g").updates_aborted() == 0);
  }
  CHECK(at_a.Left() == "");
  CHECK(at_b.Left() == "");
  CHECK(at_c.Left() == "");
}

TEST_CASE("an engine registered on a joined daemon was left out of an update that began at once") {
  // The layout is big, so the coordinator has it later than the joined daemon.
  Model model;
  for (int t = 0; t < 2000; ++t) model.push_back({fmt::format("t{}", t), DType::kUint8, {4}});
  const v1::GroupSpec spec = Spec();
  Daemon a(Flags("a"));
  Daemon b(Flags("b"));
  Holder near(a.Connect(), InPlaceRank("near", spec), HoldWhole(model));
  RawTrainer trainer(a.Connect(), RawTrainer::Hello("g", spec));
  REQUIRE(trainer.attached().ok());
  for (int64_t version = 1; version <= 30; ++version) {
    Holder far(b.Connect(), In(InPlaceRank(fmt::format("far{}", version), spec), a),
               HoldWhole(model));
    const auto begun = trainer.Begin(version);
    REQUIRE_OK(begun);
    CHECK(begun.response.instances() == 2);
    REQUIRE_OK(trainer.Abort(version, "done"));
  }
}

TEST_CASE("a bucket crosses the wire once a daemon, however many engines are there") {
  const Model model = PlainModel(6, 64, 128);
  const v1::GroupSpec spec = Spec(1, 1, 65'536, 4);
  std::vector<int64_t> sent;
  for (const int engines : {1, 4}) {
    Daemon a(Flags("a"));
    Daemon b(Flags("b"));
    std::vector<std::unique_ptr<Holder>> holders;
    for (int i = 0; i < engines; ++i) {
      holders.push_back(std::make_unique<Holder>(
          b.Connect(), In(InPlaceRank("i" + std::to_string(i), spec), a), HoldWhole(model)));
    }
    Pusher pusher(a, RawTrainer::Hello("g", spec), model);
    REQUIRE(pusher.trainer.attached().ok());
    for (int64_t version = 1; version <= 2; ++version) {
      InstallTogether({&pusher}, version, BytesOf(model, version), Source::kRegion);
      for (const auto& holder : holders) {
        CHECK(holder->Difference(model, BytesOf(model, version)) == "");
      }
    }
    const v1::GroupStatus group = a.Group("g");
    CHECK(group.wire_bytes_sent() == a.Resources().wire_bytes_sent());
    CHECK(group.wire_bytes_sent() == b.Group("g").wire_bytes_received());
    CHECK(b.Resources().wire_bytes_received() == group.wire_bytes_sent());
    CHECK(b.Resources().wire_bytes_sent() == a.Resources().wire_bytes_received());
    sent.push_back(group.wire_bytes_sent());
  }
  CHECK(sent[0] == sent[1]);
  // These tensors fill slots without padding between them.
  CHECK(sent[0] == 2 * ModelBytes(model));
}

TEST_CASE("joins that can't be are refused, saying why, and change nothing") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = Spec(1, 1, 65'536, 4);
  Daemon a(Flags("a"));
  Daemon b(Flags("b"));
  Holder near(a.Connect(), InPlaceRank("near", spec), HoldWhole(model));
  Holder far(b.Connect(), In(InPlaceRank("far", spec), a), HoldWhole(model));

  const auto attach = [](const Daemon& daemon, const v1::EngineHello& hello) {
    return RawEngine(daemon.Connect(), hello).attached();
  };
  SECTION("a daemon that names itself by its own address is its own coordinator") {
    CHECK(attach(a, In(InPlaceRank("self", spec), a)).ok());
  }
  SECTION("a daemon that answers to another name itself coordinates the group") {
    const std::string port = a.address().substr(a.address().rfind(':'));
    v1::EngineHello hello = InPlaceRank("self", spec, 0, 1, "other");
    hello.set_coordinator("localhost" + port);
    CHECK(attach(a, hello).ok());
    CHECK(a.Group("other").coordinator().empty());
  }
  SECTION("the coordinator's own id") {
    Daemon twin(Flags("a"));
    CheckRefused(attach(twin, In(InPlaceRank("twin", spec), a)), StatusCode::FAILED_PRECONDITION,
                 {"daemon_id", "'a'"});
  }
  SECTION("another spec") {
    Daemon c(Flags("c"));
    CheckRefused(attach(c, In(InPlaceRank("x", Spec(1, 7, 65'536, 4)), a)),
                 StatusCode::FAILED_PRECONDITION, {"spec", "'g'"});
    CheckRefused(attach(b, In(InPlaceRank("x", Spec(1, 7, 65'536, 4)), a)),
                 StatusCode::FAILED_PRECONDITION, {"spec", "'g'"});
  }
  SECTION("an unknown group") {
    v1::EngineHello hello = In(InPlaceRank("x", spec, 0, 1, "nobody"), a);
    hello.clear_spec();
    CheckRefused(attach(b, hello), StatusCode::NOT_FOUND, {"nobody"});
    hello.set_wait_ms(50);
    CheckRefused(attach(b, hello), StatusCode::NOT_FOUND, {"nobody"});
  }
  SECTION("nobody listens there") {
    Daemon gone(Flags("gone"));
    const v1::EngineHello hello = In(InPlaceRank("x", spec, 0, 1, "other"), gone);
    gone.Kill();
    CheckRefused(attach(b, hello), StatusCode::UNAVAILABLE, {gone.address()});
  }
  SECTION("a group that this daemon follows, without its coordinator's name or with another") {
    CheckRefused(attach(b, InPlaceRank("x", spec)), StatusCode::FAILED_PRECONDITION, {a.address()});
    CheckRefused(attach(b, In(InPlaceRank("x", spec), b)), StatusCode::FAILED_PRECONDITION,
                 {a.address()});
    Daemon c(Flags("c"));
    CheckRefused(attach(b, In(InPlaceRank("x", spec), c)), StatusCode::FAILED_PRECONDITION,
                 {a.address(), c.address()});
    // A daemon that itself follows another is no coordinator either.
    CheckRefused(attach(c, In(InPlaceRank("x", spec), b)), StatusCode::FAILED_PRECONDITION,
                 {a.address()});
  }
  SECTION("a rank that is attached already, on another daemon or on this one") {
    CheckRefused(attach(b, In(InPlaceRank("near", spec), a)), StatusCode::ALREADY_EXISTS,
                 {"engine near rank 0"});
    CheckRefused(attach(b, In(InPlaceRank("far", spec), a)), StatusCode::ALREADY_EXISTS,
                 {"engine far rank 0"});
    CheckRefused(attach(a, InPlaceRank("far", spec)), StatusCode::ALREADY_EXISTS,
                 {"engine far rank 0"});
  }
  SECTION("a world size that the instance does not have") {
    CHECK_FALSE(attach(b, In(InPlaceRank("near", spec, 1, 2), a)).ok());
  }
  SECTION("an acknowledgement that means nothing") {
    RawEngine odd(b.Connect(), In(InPlaceRank("odd", spec), a));
    REQUIRE(odd.attached().ok());
    REQUIRE(odd.Ack(1, -1));
    REQUIRE(odd.Ack(1, 7));
    REQUIRE(Eventually([&] { return a.Group("g").instances_size() == 3; }));
  }
  // Everything is as before, and works.
  REQUIRE(Eventually([&] { return a.Group("g").instances_size() == 2; }));
  Pusher pusher(b, In(RawTrainer::Hello("g", spec), a), model);
  REQUIRE(pusher.trainer.attached().ok());
  // Slot 4, which other groups may have.
  CheckRefused(pusher.trainer.ReleaseSlot(spec.slots(), 1).status, StatusCode::INVALID_ARGUMENT,
               {"slot is 4"});
  InstallTogether({&pusher}, 1, BytesOf(model, 1), Source::kRegion);
  for (Holder* holder : {&near, &far}) {
    RequireCommitted(&holder->engine(), 1);
    CHECK(holder->Difference(model, BytesOf(model, 1)) == "");
  }
}

TEST_CASE("a daemon started anew under the id of one that was killed takes its place") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = Spec(1, 1, 65'536, 4);
  Daemon a(Flags("a"));
  Daemon old(Flags("b"));
  Daemon anew(Flags("b"));
  Holder near(a.Connect(), InPlaceRank("near", spec), HoldWhole(model));
  Holder before(old.Connect(), In(InPlaceRank("far", spec), a), HoldWhole(model));
  // While the old daemon lives it keeps its place.
  RawEngine refused(anew.Connect(), In(InPlaceRank("far", spec), a));
  CheckRefused(refused.attached(), StatusCode::ALREADY_EXISTS, {"daemon_id", "'b'", "try again"});
  CHECK(!before.engine().events().ended());
  v1::EngineHello waits = In(InPlaceRank("far", spec), a);
  waits.set_wait_ms(20'000);
  old.Kill();
  Holder after(anew.Connect(), waits, HoldWhole(model));
  CHECK(a.Group("g").nodes_size() == 2);
  Pusher pusher(anew, In(RawTrainer::Hello("g", spec), a), model);
  REQUIRE(pusher.trainer.attached().ok());
  InstallTogether({&pusher}, 1, BytesOf(model, 1), Source::kInline);
  for (Holder* holder : {&near, &after}) {
    RequireCommitted(&holder->engine(), 1);
    CHECK(holder->Difference(model, BytesOf(model, 1)) == "");
  }
  CHECK(before.DifferenceFromEmpty() == "");
}

TEST_CASE("members that wait on another daemon are admitted when the group is created") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = Spec(1, 1, 65'536, 4);
  Daemon a(Flags("a"));
  Daemon b(Flags("b"));
  v1::EngineHello waits = In(LoaderRank("far", spec, &model), a);
  waits.clear_spec();
  waits.set_wait_ms(20'000);
  RawEngine far(b.Connect(), waits);
  REQUIRE(Eventually([&] { return b.Group("g").state() == "joining"; }));
  v1::CreateGroupRequest create;
  create.set_group("g");
  *create.mutable_spec() = spec;
  REQUIRE_OK(a.Call(&v1::Operator::Stub::CreateGroup, create));
  REQUIRE(far.attached().ok());
  CHECK(far.welcome().slot_bytes() == 65'536);
  Pusher pusher(a, RawTrainer::Hello("g", spec), model);
  REQUIRE(pusher.trainer.attached().ok());
  InstallTogether({&pusher}, 1, BytesOf(model, 1), Source::kRegion);
  RequireCommitted(&far, 1);
  CHECK(far.LoadedDifference(model, BytesOf(model, 1)) == "");
}

TEST_CASE("a member that waits for a group here gets none that another daemon coordinates") {
  const v1::GroupSpec spec = Spec(1, 1, 65'536, 4);
  Daemon b(Flags("b"));
  v1::EngineHello waits = InPlaceRank("waits", spec);
  waits.clear_spec();
  waits.set_wait_ms(2'000);
  RawEngine waiting(b.Connect(), waits);  // waits by the time that the other daemons have started
  Daemon a(Flags("a"));
  Daemon c(Flags("c"));
  RawEngine joins(b.Connect(), In(InPlaceRank("joins", spec), a));
  REQUIRE(joins.attached().ok());
  v1::EngineHello lost = In(InPlaceRank("lost", spec), b);
  lost.clear_spec();
  RawEngine refused(c.Connect(), lost);
  CheckRefused(refused.attached(), StatusCode::FAILED_PRECONDITION, {a.address()});
  const grpc::Status ended = waiting.attached();
  INFO(ended.error_message());
  CHECK(!ended.ok());
  CHECK(a.Group("g").instances_size() == 1);
}

TEST_CASE("a loader engine that dies with parts waiting for its slots costs its daemon no link") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = Spec(1, 1, 4096, 2);
  Daemon a(Flags("a"));
  Daemon b(Flags("b"));
  Holder far(b.Connect(), In(InPlaceRank("far", spec), a), HoldWhole(model));
  auto loader = std::make_unique<RawEngine>(b.Connect(), In(LoaderRank("loader", spec, &model), a));
  REQUIRE(loader->attached().ok());
  loader->Hold(/*ready=*/false, /*ack=*/true);
  RawTrainer trainer(b.Connect(), In(RawTrainer::Hello("g", spec), a));
  REQUIRE(trainer.attached().ok());
  REQUIRE_OK(trainer.Begin(1));
  const std::vector<std::string> bytes = BytesOf(model, 1);
  auto pushed = std::async(std::launch::async, [&] {
    return trainer.Push(1, InlineBucket(model, bytes, 0, true)).status;
  });
  REQUIRE(loader->AwaitPart(1));
  loader.reset();
  REQUIRE(pushed.get().ok());
  const auto committed = trainer.Commit(1, 1);
  REQUIRE_OK(committed);
  for (const v1::InstanceResult& instance : committed.response.instances()) {
    CHECK(instance.committed() == (instance.instance() == "far"));
  }
  RequireCommitted(&far.engine(), 1);
  CHECK(far.Difference(model, bytes) == "");
}

TEST_CASE("the death of a daemon's only engine aborted the update for the others") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = Spec(1, 1, 4096, 4);
  Daemon a(Flags("a"));
  Daemon b(Flags("b"));
  Daemon c(Flags("c"));
  Holder stays(b.Connect(), In(InPlaceRank("stays", spec), a), HoldWhole(model));
  auto dies =
      std::make_unique<Holder>(c.Connect(), In(InPlaceRank("dies", spec), a), HoldWhole(model));
  RawTrainer trainer(a.Connect(), RawTrainer::Hello("g", spec));
  REQUIRE(trainer.attached().ok());
  const auto gone = [&] { return Eventually([&] { return a.Group("g").instances_size() == 1; }); };
  const std::vector<std::string> bytes = BytesOf(model, 1);
  std::vector<int> halves[2];
  for (int t = 0; t < static_cast<int>(model.size()); ++t) halves[t % 2].push_back(t);
  SECTION("while it prepares") {
    dies->engine().Hold(/*ready=*/true, /*ack=*/false);
    auto begun = std::async(std::launch::async, [&] { return trainer.Begin(1); });
    REQUIRE(dies->engine().AwaitPrepare(1));
    dies.reset();
    REQUIRE_OK(begun.get());
    REQUIRE_OK(trainer.Push(1, InlineBucket(model, bytes, 0, true, halves[0])));
  }
  SECTION("between two buckets") {
    REQUIRE_OK(trainer.Begin(1));
    REQUIRE_OK(trainer.Push(1, InlineBucket(model, bytes, 0, true, halves[0])));
    dies.reset();
    REQUIRE(gone());
  }
  REQUIRE_OK(trainer.Push(1, InlineBucket(model, bytes, 1, true, halves[1])));
  const auto committed = trainer.Commit(1, 2);
  REQUIRE_OK(committed);
  for (const v1::InstanceResult& instance : committed.response.instances()) {
    CHECK(instance.committed() == (instance.instance() == "stays"));
  }
  RequireCommitted(&stays.engine(), 1);
  CHECK(stays.Difference(model, bytes) == "");
  // The daemon of the lost instance leaves the group.
  CHECK(Eventually([&] { return c.Status().groups_size() == 0; }));
  CHECK(Eventually([&] { return a.Group("g").nodes_size() == 2; }));
}

TEST_CASE("a daemon with a broken data plane starved every instance") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = Spec(1, 1, 4096, 4);
  Daemon a(Flags("a"));
  Daemon b(Flags("b"));
  Daemon c(Flags("c"));
  Holder sound(b.Connect(), In(InPlaceRank("sound", spec), a), HoldWhole(model));
  auto broken =
      std::make_unique<Holder>(c.Connect(), In(InPlaceRank("broken", spec), a), HoldWhole(model));
  RawTrainer trainer(a.Connect(), RawTrainer::Hello("g", spec));
  REQUIRE(trainer.attached().ok());
  // Runs the update to `version`; returns with how many instances it began and committed.
  const auto install = [&](int64_t version) {
    const auto begun = trainer.Begin(version);
    REQUIRE_OK(begun);
    REQUIRE_OK(trainer.Push(version, InlineBucket(model, BytesOf(model, version), 0, true)));
    const auto committed = trainer.Commit(version, 1);
    REQUIRE_OK(committed);
    RequireCommitted(&sound.engine(), version);
    CHECK(sound.Difference(model, BytesOf(model, version)) == "");
    return begun.response.instances();
  };
  const auto kept_out = [&] {
    std::string why;
    const v1::GroupStatus group = a.Group("g");
    for (const v1::NodeStatus& node : group.nodes()) {
      CHECK((node.kept_out().empty() || node.daemon_id() == "c"));
      why += node.kept_out();
    }
    return why;
  };
  // From here on daemon c can't open a socket.
  rlimit before{};
  REQUIRE(prlimit(c.pid(), RLIMIT_NOFILE, nullptr, &before) == 0);
  const rlimit none{0, before.rlim_max};
  REQUIRE(prlimit(c.pid(), RLIMIT_NOFILE, &none, nullptr) == 0);
  CHECK(install(1) == 1);
  const Belief belief = broken->engine().AwaitBelief(1);
  CHECK(belief.good);  // no byte of the version was written there
  CHECK(belief.version == 0);
  CHECK(broken->DifferenceFromEmpty() == "");
  CHECK_THAT(kept_out(), Catch::Contains("daemon c is kept out until it attaches anew"));
  REQUIRE(prlimit(c.pid(), RLIMIT_NOFILE, &before, nullptr) == 0);
  CHECK(install(2) == 1);
  broken.reset();
  REQUIRE(Eventually(
      [&] { return a.Group("g").instances_size() == 1 && c.Status().groups_size() == 0; }));
  broken =
      std::make_unique<Holder>(c.Connect(), In(InPlaceRank("broken", spec), a), HoldWhole(model));
  CHECK(kept_out().empty());
  CHECK(install(3) == 2);
  RequireCommitted(&broken->engine(), 3);
  CHECK(broken->Difference(model, BytesOf(model, 3)) == "");
}

TEST_CASE("a joined daemon answers for updates it took part in and sends operators on") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = Spec(1, 1, 65'536, 4);
  Daemon a(Flags("a"));
  Daemon b(Flags("b"));
  Holder far(b.Connect(), In(InPlaceRank("far", spec), a), HoldWhole(model));
  RawTrainer trainer(b.Connect(), In(RawTrainer::Hello("g", spec), a));
  REQUIRE(trainer.attached().ok());
  REQUIRE_OK(trainer.Begin(1));
  REQUIRE_OK(trainer.Push(1, InlineBucket(model, BytesOf(model, 1), 0, true)));
  const auto committed = trainer.Commit(1, 1);
  REQUIRE_OK(committed);
  REQUIRE(committed.response.pushed_size() == 1);
  CHECK(committed.response.pushed(0).method() == v1::BROADCAST_METHOD_DIRECT);
  CHECK(committed.response.pushed(0).buckets() == 1);
  v1::BeginRequest chain;
  chain.set_version(2);
  chain.set_broadcast(v1::BROADCAST_METHOD_CHAIN);
  CheckRefused(trainer.Begin(chain).status, StatusCode::FAILED_PRECONDITION,
               {"broadcast", "chain", "spans daemons"});
  REQUIRE_OK(trainer.Begin(2));
  REQUIRE_OK(trainer.Abort(2, "on second thought"));
  for (const Daemon* daemon : {&a, &b}) {
    INFO("daemon " << (daemon == &a ? "a" : "b"));
    RawTrainer asks(daemon->Connect(), RawTrainer::Hello("elsewhere"));
    REQUIRE(asks.attached().ok());
    const auto outcome = [&](int64_t version) {
      const auto update = asks.GetUpdate("g", version);
      REQUIRE_OK(update);
      return update.response.outcome();
    };
    CHECK(outcome(1) == v1::UPDATE_OUTCOME_COMMITTED);
    REQUIRE(Eventually([&] { return outcome(2) == v1::UPDATE_OUTCOME_ABORTED; }));
    CHECK_THAT(asks.GetUpdate("g", 2).response.reason(), Catch::Contains("on second thought"));
    CHECK(outcome(7) == v1::UPDATE_OUTCOME_UNKNOWN);
  }

  v1::AbortUpdateRequest abort;
  abort.set_group("g");
  CheckRefused(b.Call(&v1::Operator::Stub::AbortUpdate, abort).status,
               StatusCode::FAILED_PRECONDITION, {a.address()});
  v1::RollbackRequest rollback;
  rollback.set_group("g");
  CheckRefused(b.Call(&v1::Operator::Stub::Rollback, rollback).status,
               StatusCode::FAILED_PRECONDITION, {a.address()});
  v1::ReleasePreviousRequest release;
  release.set_group("g");
  CheckRefused(b.Call(&v1::Operator::Stub::ReleasePrevious, release).status,
               StatusCode::FAILED_PRECONDITION, {a.address()});
  v1::CreateGroupRequest create;
  create.set_group("g");
  *create.mutable_spec() = spec;
  create.set_replace(true);
  CheckRefused(b.Call(&v1::Operator::Stub::CreateGroup, create).status,
               StatusCode::FAILED_PRECONDITION, {a.address()});
  v1::DeleteGroupRequest remove;
  remove.set_group("g");
  CheckRefused(b.Call(&v1::Operator::Stub::DeleteGroup, remove).status,
               StatusCode::FAILED_PRECONDITION, {a.address()});
  v1::GetUpdateStatisticsRequest statistics;
  statistics.set_group("g");
  CheckRefused(b.Call(&v1::Operator::Stub::GetUpdateStatistics, statistics).status,
               StatusCode::FAILED_PRECONDITION, {a.address()});
  REQUIRE_OK(a.Call(&v1::Operator::Stub::GetUpdateStatistics, statistics));
  CHECK(far.Difference(model, BytesOf(model, 1)) == "");
}

TEST_CASE("a repeated request id through a joined daemon has no second effect") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = Spec(1, 1, 65'536, 4);
  Daemon a(Flags("a"));
  Daemon b(Flags("b"));
  Holder near(a.Connect(), InPlaceRank("near", spec), HoldWhole(model));
  RawTrainer trainer(b.Connect(), In(RawTrainer::Hello("g", spec), a));
  REQUIRE(trainer.attached().ok());
  v1::BeginRequest begin;
  begin.set_version(1);
  begin.set_request_id("begin");
  const auto first = trainer.Begin(begin);
  REQUIRE_OK(first);
  const auto again = trainer.Begin(begin);
  REQUIRE_OK(again);
  CHECK(again.response.update_id() == first.response.update_id());
  const std::vector<std::string> bytes = BytesOf(model, 1);
  for (int i = 0; i < 3; ++i) {
    const auto pushed = trainer.Push(1, InlineBucket(model, bytes, 0, true, {0, 1, 2}), "push-0");
    REQUIRE_OK(pushed);
    CHECK(pushed.response.group_seq() == 0);
  }
  CheckRefused(trainer.Push(1, InlineBucket(model, bytes, 1, true, {3}), "push-0").status,
               StatusCode::INVALID_ARGUMENT, {"push-0"});
  REQUIRE_OK(trainer.Push(
      1, InlineBucket(model, bytes, 1, true, {3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14})));
  for (int i = 0; i < 2; ++i) {
    const auto committed = trainer.Commit(1, 2, "commit");
    REQUIRE_OK(committed);
    CHECK(committed.response.bytes() == ModelBytes(model));
  }
  RequireCommitted(&near.engine(), 1);
  CHECK(near.Difference(model, bytes) == "");
  CHECK(a.Group("g").updates_committed() == 1);
}

TEST_CASE("a group that is replaced ends trainers' leases on every daemon and begins anew") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = Spec(2, 1, 65'536, 4);
  Daemon a(Flags("a"));
  Daemon b(Flags("b"));
  Holder near(a.Connect(), InPlaceRank("near", spec), HoldWhole(model));
  Holder far(b.Connect(), In(InPlaceRank("far", spec), a), HoldWhole(model));
  const auto attach = [&](std::unique_ptr<Pusher>* first, std::unique_ptr<Pusher>* second) {
    *first = std::make_unique<Pusher>(a, RawTrainer::Hello("g", spec, 0, 2), model);
    *second = std::make_unique<Pusher>(b, In(RawTrainer::Hello("g", spec, 1, 2), a), model);
    REQUIRE((*first)->trainer.attached().ok());
    REQUIRE((*second)->trainer.attached().ok());
  };
  std::unique_ptr<Pusher> first;
  std::unique_ptr<Pusher> second;
  attach(&first, &second);
  InstallTogether({first.get(), second.get()}, 9, BytesOf(model, 9), Source::kRegion);

  v1::CreateGroupRequest create;
  create.set_group("g");
  *create.mutable_spec() = spec;
  create.set_replace(true);
  REQUIRE_OK(a.Call(&v1::Operator::Stub::CreateGroup, create));
  for (Pusher* rank : {first.get(), second.get()}) {
    const auto end = rank->trainer.events().WaitEnd();
    REQUIRE(end.has_value());
    CheckRefused(*end, StatusCode::ABORTED, {"replaced"});
  }
  for (const std::string instance : {"near", "far"}) {
    CHECK(a.InstanceState("g", instance) == "dirty");
  }
  // The leases of the old trainers are not valid any more.
  CHECK_FALSE(second->trainer.Begin(1).ok());
  REQUIRE(Eventually([&] { return a.Group("g").trainers() == 0; }));
  attach(&first, &second);
  // Versions begin anew, too.
  InstallTogether({first.get(), second.get()}, 1, BytesOf(model, 1), Source::kRegion);
  for (Holder* holder : {&near, &far}) {
    RequireCommitted(&holder->engine(), 9);
    RequireCommitted(&holder->engine(), 1);
    CHECK(holder->Difference(model, BytesOf(model, 1)) == "");
  }
  CHECK(b.Group("g").incarnation() == a.Group("g").incarnation());
}

TEST_CASE("two groups of different coordinators update at once over the same two daemons") {
  constexpr int64_t kVersions = 12;
  const Model model = MixedModel();
  const v1::GroupSpec spec = Spec(1, 2, 4096, 4);
  Daemon a(Flags("a"));
  Daemon b(Flags("b"));
  Baseline at_a(&a);
  Baseline at_b(&b);
  {
    struct Side {
      std::unique_ptr<Holder> near;
      std::unique_ptr<Holder> far;
      std::unique_ptr<Pusher> pusher;
    };
    const auto make = [&](const std::string& group, const Daemon& own, const Daemon& other) {
      Side side;
      side.near = std::make_unique<Holder>(own.Connect(), InPlaceRank("near", spec, 0, 1, group),
                                           HoldWhole(model));
      side.far = std::make_unique<Holder>(
          other.Connect(), In(InPlaceRank("far", spec, 0, 1, group), own), HoldWhole(model));
      side.pusher = std::make_unique<Pusher>(own, RawTrainer::Hello(group, spec), model);
      REQUIRE(side.pusher->trainer.attached().ok());
      return side;
    };
    Side of_a = make("of-a", a, b);
    Side of_b = make("of-b", b, a);
    // Each group installs at its own pace; a deadlock between them would stop both.
    const auto run = [&model](Side* side) -> std::string {
      for (int64_t version = 1; version <= kVersions; ++version) {
        const std::vector<std::string> bytes = BytesOf(model, version);
        const grpc::Status status = side->pusher->Install(version, bytes, Source::kRegion);
        if (!status.ok()) return status.error_message();
        for (Holder* holder : {side->near.get(), side->far.get()}) {
          if (!holder->engine().events().WaitFor(v1::EngineEvent::kCommitted).has_value()) {
            return "not told committed";
          }
          if (std::string d = holder->Difference(model, bytes); !d.empty()) return d;
        }
      }
      return "";
    };
    auto other = std::async(std::launch::async, [&] { return run(&of_b); });
    CHECK(run(&of_a) == "");
    CHECK(other.get() == "");
    CHECK(a.Group("of-a").updates_committed() == kVersions);
    CHECK(b.Group("of-b").updates_committed() == kVersions);
  }
  CHECK(at_a.Left() == "");
  CHECK(at_b.Left() == "");
}

TEST_CASE("metadata that engines of another daemon don't share is refused by the tensor's name") {
  const Model model = MixedModel();
  const v1::GroupSpec spec = Spec(1, 1, 65'536, 4);
  Daemon a(Flags("a"));
  Daemon b(Flags("b"));
  Holder far(b.Connect(), In(InPlaceRank("far", spec), a), HoldWhole(model));
  const Daemon& trainers_daemon = GENERATE(true, false) ? a : b;
  RawTrainer trainer(trainers_daemon.Connect(), In(RawTrainer::Hello("g", spec), a));
  REQUIRE(trainer.attached().ok());
  Model other = model;
  other[2].shape = {48, 40};  // another shape with as many elements
  int64_t version = 1;
  REQUIRE_OK(trainer.Begin(version));
  CheckRefused(trainer.Push(version, InlineBucket(other, BytesOf(model, 1), 0, true)).status,
               StatusCode::FAILED_PRECONDITION, {"layers.0.o.weight"});
  (void)trainer.Abort(version, "refused");
  CHECK(far.DifferenceFromEmpty() == "");

  // Two engines contradict each other, so the update can't begin.
  {
    Holder contrary(a.Connect(), InPlaceRank("contrary", spec), HoldWhole(other));
    const auto begun = trainer.Begin(++version);
    CHECK_FALSE(begun.ok());
    CHECK_THAT(begun.status.error_message(), Catch::Contains("layers.0.o.weight"));
  }
  REQUIRE(Eventually([&] { return a.Group("g").instances_size() == 1; }));
  REQUIRE_OK(trainer.Begin(++version));
  REQUIRE_OK(trainer.Push(version, InlineBucket(model, BytesOf(model, version), 0, true)));
  REQUIRE_OK(trainer.Commit(version, 1));
  CHECK(far.Difference(model, BytesOf(model, version)) == "");
}

}  // namespace
}  // namespace refitd::e2e
