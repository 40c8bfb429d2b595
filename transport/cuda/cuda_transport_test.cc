#include "transport/cuda/cuda_transport.h"

#include <catch2/catch.hpp>

#if defined(REFITD_CUDA)
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "transport/base/eventually_testing.h"
#include "transport/base/status.h"
#include "transport/cuda/fakes/fake_cuda.h"
#include "transport/cuda/fakes/fake_nccl.h"
#include "transport/cuda/nccl/nccl.h"
#include "transport/cuda/random_transfer_testing.h"
#include "transport/host/host_transport.h"
#include "transport/transport_testing.h"
#endif

namespace refitd {
namespace {

#if !defined(REFITD_CUDA)

TEST_CASE("where CUDA is not compiled in there is no transport for it, and that is said") {
  const auto transport = MakeCudaTransport(nullptr, nullptr, {});
  REQUIRE(transport.status().code() == absl::StatusCode::kUnimplemented);
}

#else

using Catch::Matchers::Contains;
constexpr uint64_t kSeed = 4711;

// Blocks of another process, which the fake simulates.
class FakeExporter : public Exporter {
 public:
  explicit FakeExporter(FakeCuda* fake) : fake_(fake) {}
  std::string Export(int device, const std::vector<char>& bytes) override {
    std::string handle;
    blocks_.push_back(fake_->Export(device, static_cast<int64_t>(bytes.size()), &handle));
    std::memcpy(blocks_.back(), bytes.data(), bytes.size());
    return handle;
  }
  std::vector<char> Read(size_t block, size_t bytes) override {
    return {blocks_[block], blocks_[block] + bytes};
  }

 private:
  FakeCuda* const fake_;
  std::vector<char*> blocks_;
};

// A transport over the fake.
struct Setup {
  explicit Setup(CudaTransportOptions options = {}, int devices = 2, bool with_nccl = false) {
    fake.Devices(devices);
    memory = *CudaMemory::Create(FakeCuda::Path());
    if (with_nccl) {
      nccl = std::make_unique<FakeNccl>();
      options.nccl = FindNccl(FakeNccl::Path()).api;
      REQUIRE(options.nccl != nullptr);
    }
    auto lost = std::move(options.lost);
    options.lost = [this, lost](const absl::Status& status) {
      ++losses;
      if (lost) lost(status);
    };
    auto made = MakeCudaTransport(memory, MakeHostTransport({.threads = 1}), options, "an image");
    REQUIRE(made.ok());
    transport = *std::move(made);
  }

  // Makes an exporter. Each world needs its own, because an exporter counts the blocks.
  Exporter* exporter() {
    exporters.push_back(std::make_unique<FakeExporter>(&fake));
    return exporters.back().get();
  }

  FakeCuda fake;
  std::unique_ptr<FakeNccl> nccl;
  std::vector<std::unique_ptr<FakeExporter>> exporters;
  std::shared_ptr<CudaMemory> memory;
  std::atomic<int> losses = 0;
  std::unique_ptr<Transport> transport;
  std::unique_ptr<Transport> host = MakeHostTransport({.threads = 1});
};

TransferResult Replay(Transport* transport, const std::shared_ptr<const PreparedTransfer>& prepared,
                      Verification verification) {
  Outcome<TransferResult> outcome;
  transport->Replay(prepared, verification, "replay", outcome.done());
  return outcome.Wait();
}

void CheckNothingOpen(const FakeCuda& fake) {
  const FakeCudaCounts counts = fake.Count();
  CHECK(counts.opened_handles == 0);
  CHECK(counts.allocations == 0);
  CHECK(counts.host_allocations == 0);
  CHECK(counts.streams == 0);
  CHECK(counts.events == 0);
  CHECK(counts.modules == 0);
}

void CheckSame(const TransferResult& result, const TransferResult& want) {
  INFO(result.status.ToString());
  REQUIRE(result.status.ok());
  REQUIRE(want.status.ok());
  CHECK(result.failed_destination == -1);
  CHECK(result.bytes_written == want.bytes_written);
  CHECK(result.source_digests == want.source_digests);
  REQUIRE(result.expected.size() == want.expected.size());
  for (size_t i = 0; i < want.expected.size(); ++i) {
    CHECK(result.expected[i].destination == want.expected[i].destination);
    CHECK(result.expected[i].piece == want.expected[i].piece);
    CHECK(result.expected[i].digest == want.expected[i].digest);
  }
}

// ---- equality with the host transport ----

TEST_CASE("random transfers leave the host transport's bytes, digests and counts") {
  Rng random(kSeed);
  for (int round = 0; round < 60; ++round) {
    INFO("seed " << kSeed << ", round " << round);
    const int most = 1 + round % 5;
    Setup setup({.blocks = 1 + round % 2,
                 .local_blocks = most,
                 .engine_bytes = round % 2 * 64,
                 .lost = {}});
    World world(setup.exporter(), setup.memory.get(), &random);
    FillRandomly(&world, &random, round % 3 == 0);
    world.model.verification = static_cast<Verification>(round / 2 % 3 + 1);
    const Transfer transfer = world.OnDevices();
    const TransferResult result = Run(setup.transport.get(), transfer);
    CheckSame(result, Run(setup.host.get(), world.model));
    world.CheckBytes();
    CHECK(setup.fake.Count().largest_grid <= std::max(most, 1 + round % 2));
    const ReadbackResult readback = Run(setup.transport.get(), JobOf(transfer, result));
    INFO(readback.status.ToString());
    CHECK(readback.status.ok());
    CHECK(setup.losses == 0);
  }
}

TEST_CASE("a block is computed of parts in host memory and on two devices") {
  Setup setup;
  const Dims shape = {256, 128};
  const auto derivation = std::make_shared<Derivation>(
      Derivation{{"w", DType::kFloat32, shape}, DerivedKind::kFp8Block, DerivedRole::kValues});
  std::vector<float> numbers(256 * 128);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(i % 1013) - 500;
  const auto bytes_of = [&numbers](int64_t first, int64_t rows) {
    std::vector<char> bytes(static_cast<size_t>(rows * 128 * 4));
    std::memcpy(bytes.data(), &numbers[static_cast<size_t>(first * 128)], bytes.size());
    return bytes;
  };
  std::vector<std::shared_ptr<const DeviceRegion>> regions;
  Exporter* const exporter = setup.exporter();
  const auto open = [&](int device, const std::vector<char>& bytes) {
    regions.push_back(*setup.memory->OpenBlock(device, exporter->Export(device, bytes)));
    return regions.back()->data();
  };
  std::vector<char> on_host = bytes_of(0, 100);
  const auto part = [&](int64_t first, int64_t rows, char* data) {
    return BoundPiece{DType::kFloat32, shape, {{first, 0}, {rows, 128}}, {128, 1}, data, "w"};
  };
  std::vector<BoundPiece> parts = {part(0, 100, on_host.data()),
                                   part(100, 100, open(0, bytes_of(100, 100))),
                                   part(200, 56, open(1, bytes_of(200, 56)))};
  // The part that decides where the task runs may lie anywhere.
  std::rotate(parts.begin(), parts.begin() + GENERATE(0, 1, 2), parts.end());
  const std::vector<char> empty(256 * 128);
  BoundPiece piece{DType::kFloat8E4M3FN, shape, WholeBox(shape), {128, 1}, parts[0].data, "w.q"};
  Transfer transfer;
  transfer.destinations = {{piece}};
  transfer.destinations[0][0].data = open(1, empty);
  piece.held = std::make_shared<HeldPiece>(HeldPiece{derivation, parts});
  transfer.source = {piece};
  transfer.plan.moves.push_back({.box = WholeBox(shape)});
  transfer.verification = Verification::kTransfer;
  const TransferResult result = Run(setup.transport.get(), transfer);
  INFO(result.status);
  REQUIRE(result.status.ok());

  // The host must make the same of one part.
  std::vector<char> whole = bytes_of(0, 256);
  std::vector<char> expected = empty;
  piece.held = std::make_shared<HeldPiece>(HeldPiece{derivation, {part(0, 256, whole.data())}});
  transfer.source = {piece};
  transfer.destinations[0][0].data = expected.data();
  REQUIRE(Run(setup.host.get(), transfer).status.ok());
  CHECK(exporter->Read(2, expected.size()) == expected);

  // A program whose parts lack a row would compute with what is not there.
  parts.back().box.extent[0] -= 1;
  piece.held = std::make_shared<HeldPiece>(HeldPiece{derivation, parts});
  transfer.source = {piece};
  CHECK(Run(setup.host.get(), transfer).status.code() == absl::StatusCode::kInternal);
}

TEST_CASE("copy engines move large pieces to other devices, but not what the kernel digests") {
  Rng random(kSeed + 30);
  for (const Verification verification :
       {Verification::kOff, Verification::kTransfer, Verification::kReadback}) {
    for (const int to : {0, 1}) {
      INFO("verification " << static_cast<int>(verification) << ", to device " << to);
      Setup setup({.engine_bytes = 64, .lost = {}});
      World world(setup.exporter(), setup.memory.get(), &random);
      FillSimply(&world, 0, {to});
      world.model.verification = verification;
      const Transfer transfer = world.OnDevices();
      const TransferResult result = Run(setup.transport.get(), transfer);
      CheckSame(result, Run(setup.host.get(), world.model));
      world.CheckBytes();
      CHECK((setup.fake.Count().engine_copies > 0) ==
            (to == 1 && verification != Verification::kTransfer));
      CHECK(Run(setup.transport.get(), JobOf(transfer, result)).status.ok());
    }
  }
}

TEST_CASE("a batch of copies that fails costs its transfer alone") {
  Rng random(kSeed + 31);
  Setup setup({.engine_bytes = 64, .lost = {}});
  World world(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&world, 0, {1});
  world.model.verification = Verification::kOff;
  setup.fake.FailAt("cuMemcpyBatchAsync", 1, 2);
  const TransferResult result = Run(setup.transport.get(), world.OnDevices());
  CHECK(result.status.code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(std::string(result.status.message()), Contains("cuMemcpyBatchAsync: out of memory"));
  CheckSame(Run(setup.transport.get(), world.OnDevices()), Run(setup.host.get(), world.model));
  world.CheckBytes();
  CHECK(setup.losses == 0);
  setup.transport.reset();
  world.DropRegions();
  CheckNothingOpen(setup.fake);
}

TEST_CASE("prepared transfers are replayed under every verification, over new bytes") {
  Rng random(kSeed + 1);
  for (int round = 0; round < 12; ++round) {
    INFO("seed " << kSeed + 1 << ", round " << round);
    Setup setup;
    World world(setup.exporter(), setup.memory.get(), &random);
    FillRandomly(&world, &random, round % 2 == 0);
    const auto prepared = setup.transport->Prepare(world.OnDevices());
    const auto model = setup.host->Prepare(world.model);
    REQUIRE(prepared.ok());
    REQUIRE(model.ok());
    for (int version = 0; version < 6; ++version) {
      const auto verification = static_cast<Verification>(version % 3 + 1);
      const TransferResult result = Replay(setup.transport.get(), *prepared, verification);
      CheckSame(result, Replay(setup.host.get(), *model, verification));
      world.CheckBytes();
      const Transfer bound = world.OnDevices();
      for (size_t i = 0; i < bound.source.size(); ++i) {
        char* const real = bound.source[i].data;
        char* const modelled = world.model.source[i].data;
        *real ^= 1;
        if (modelled != real) *modelled ^= 1;  // model and world share host memory
      }
    }
  }
}

TEST_CASE("several transfers at once each end exactly once and leave the right bytes") {
  Rng random(kSeed + 2);
  Setup setup;
  std::vector<std::unique_ptr<World>> worlds;
  std::vector<Outcome<TransferResult>> outcomes(30);
  for (auto& outcome : outcomes) {
    worlds.push_back(std::make_unique<World>(setup.exporter(), setup.memory.get(), &random));
    FillRandomly(worlds.back().get(), &random, true);
    worlds.back()->model.verification = Verification::kTransfer;
    setup.transport->Submit(worlds.back()->OnDevices(), outcome.done());
  }
  for (size_t i = 0; i < worlds.size(); ++i) {
    CheckSame(outcomes[i].Wait(), Run(setup.host.get(), worlds[i]->model));
    worlds[i]->CheckBytes();
  }
}

// ---- broadcasts through slots ----

// A broadcast of a random transfer from one of `devices`, through slots on those of `slots_on`.
struct BroadcastCase {
  BroadcastCase(Setup* setup, Rng* random, int source, int devices, Verification verification,
                BroadcastMethod method = BroadcastMethod::kChain)
      : world(setup->exporter(), setup->memory.get(), random) {
    FillForBroadcast(&world, random, source, devices);
    world.model.want_source_digests = Pick(random, 0, 1) == 0;
    world.model.verification = verification;
    std::vector<int> slots_on;
    for (int device = 0; device < devices; ++device) {
      if (Pick(random, 0, 2) > 0) slots_on.push_back(device);
    }
    std::shuffle(slots_on.begin(), slots_on.end(), *random);
    transfer = Broadcasting(&world, setup->memory.get(), random, slots_on, method, &pools);
  }

  void GiveBack(CudaMemory* memory) {
    transfer = {};
    for (DevicePool& pool : pools.pools) memory->GiveBack(std::move(pool));
  }

  // Compares the slots with the source. The test can read device memory because the fake has it in
  // host memory.
  void CheckSlots() const {
    for (const MemorySpan& slot : transfer.broadcast->slots) {
      for (size_t i = 0; i < transfer.source.size(); ++i) {
        const BoundPiece& piece = world.model.source[i];
        const auto bytes = static_cast<size_t>(ElementCount(piece.box) * ElementBytes(piece.dtype));
        REQUIRE(std::memcmp(slot.data + transfer.broadcast->byte_offsets[i], piece.data, bytes) ==
                0);
      }
    }
  }

  World world;
  BroadcastPools pools;
  Transfer transfer;
};

TEST_CASE("random broadcasts fill every slot and leave the host transport's bytes and digests") {
  Rng random(kSeed + 40);
  for (int round = 0; round < 90; ++round) {
    INFO("seed " << kSeed + 40 << ", round " << round);
    const int devices = 2 + round % 4;
    Setup setup({.relay_chunk_bytes = round % 2 == 0 ? 100 : 1 << 20, .lost = {}}, devices);
    const auto source = static_cast<int>(Pick(&random, 0, devices - 1));
    BroadcastCase broadcast(&setup, &random, source, devices,
                            static_cast<Verification>(round / 2 % 3 + 1));
    const TransferResult result = Run(setup.transport.get(), broadcast.transfer);
    CheckSame(result, Run(setup.host.get(), broadcast.world.model));
    broadcast.world.CheckBytes();
    broadcast.CheckSlots();
    CHECK(Run(setup.transport.get(), JobOf(broadcast.transfer, result)).status.ok());
    CHECK(setup.losses == 0);
  }
}

TEST_CASE("broadcasts from several devices at once end once each and leave the right bytes") {
  Rng random(kSeed + 41);
  Setup setup({.relay_chunk_bytes = 4096, .lost = {}}, 4);
  std::vector<std::unique_ptr<BroadcastCase>> cases;
  std::vector<Outcome<TransferResult>> outcomes(24);
  for (size_t i = 0; i < outcomes.size(); ++i) {
    cases.push_back(std::make_unique<BroadcastCase>(&setup, &random, static_cast<int>(i % 4), 4,
                                                    Verification::kTransfer));
    setup.transport->Submit(cases.back()->transfer, outcomes[i].done());
  }
  for (size_t i = 0; i < outcomes.size(); ++i) {
    CheckSame(outcomes[i].Wait(), Run(setup.host.get(), cases[i]->world.model));
    cases[i]->world.CheckBytes();
    cases[i]->CheckSlots();
  }
}

// One tensor from device 0 to destinations and slots on other devices.
struct SimpleBroadcast {
  SimpleBroadcast(Setup* setup, Rng* random, BroadcastMethod method = BroadcastMethod::kChain,
                  const std::vector<int>& receivers = {1, 2})
      : world(setup->exporter(), setup->memory.get(), random) {
    FillSimply(&world, 0, receivers);
    world.model.verification = Verification::kTransfer;
    transfer = Broadcasting(&world, setup->memory.get(), random, receivers, method, &pools);
  }
  World world;
  BroadcastPools pools;
  Transfer transfer;
};

TEST_CASE("random broadcasts by NCCL leave the host transport's bytes, and give back all") {
  Rng random(kSeed + 46);
  for (const BroadcastMethod method : {BroadcastMethod::kNccl, BroadcastMethod::kSymmetric}) {
    FakeNcclCounts most;
    for (int round = 0; round < 24; ++round) {
      INFO("seed " << kSeed + 46 << ", round " << round << ", method " << static_cast<int>(method));
      const int devices = 2 + round % 3;
      Setup setup({.symmetric_copy_engines = round % 2 == 0, .lost = {}}, devices, true);
      for (int version = 0; version < 3; ++version) {
        const auto source = static_cast<int>(Pick(&random, 0, devices - 1));
        BroadcastCase broadcast(&setup, &random, source, devices,
                                static_cast<Verification>(round / 2 % 3 + 1), method);
        const TransferResult result = Run(setup.transport.get(), broadcast.transfer);
        CheckSame(result, Run(setup.host.get(), broadcast.world.model));
        broadcast.world.CheckBytes();
        broadcast.CheckSlots();
        broadcast.GiveBack(setup.memory.get());
        CHECK(Eventually([&] { return setup.fake.Count().created == 0; }));
        CHECK(setup.nccl->Count().windows == 0);
      }
      const FakeNcclCounts counts = setup.nccl->Count();
      most.broadcasts = std::max(most.broadcasts, counts.broadcasts);
      most.symmetric_all_gathers =
          std::max(most.symmetric_all_gathers, counts.symmetric_all_gathers);
      most.engine_all_gathers = std::max(most.engine_all_gathers, counts.engine_all_gathers);
      // All all-gathers but at most one a communicator ran over windows.
      CHECK(counts.all_gathers - counts.symmetric_all_gathers - counts.engine_all_gathers <=
            counts.comms);
      CHECK(setup.losses == 0);
      setup.transport.reset();
      CHECK(setup.nccl->Count().comms == 0);
      CHECK(setup.nccl->Count().lost_windows == 0);
      CheckNothingOpen(setup.fake);
    }
    if (method == BroadcastMethod::kNccl) {
      CHECK(most.broadcasts > 0);
    } else {
      CHECK(most.symmetric_all_gathers > 0);
      CHECK(most.engine_all_gathers > 0);
    }
  }
}

TEST_CASE("a broadcast whose communicator fails costs itself alone; the next has another") {
  Rng random(kSeed + 47);
  Setup setup({.lost = {}}, 3, true);
  SimpleBroadcast broadcast(&setup, &random, BroadcastMethod::kNccl);
  const auto communicators = [&setup] {
    return dynamic_cast<const CommunicatorsOwner&>(*setup.transport).Communicators();
  };
  CHECK(communicators().empty());
  CheckSame(Run(setup.transport.get(), broadcast.transfer),
            Run(setup.host.get(), broadcast.world.model));
  REQUIRE(communicators().size() == 1);
  CHECK(communicators()[0].number == 1);
  CHECK(communicators()[0].devices.size() > 1);
  CHECK(communicators()[0].status.ok());
  setup.nccl->FailAt("ncclBroadcast", 1, 3);
  const TransferResult failed = Run(setup.transport.get(), broadcast.transfer);
  CHECK_FALSE(failed.status.ok());
  CHECK_THAT(std::string(failed.status.message()), Contains("ncclBroadcast"));
  CheckSame(Run(setup.transport.get(), broadcast.transfer),
            Run(setup.host.get(), broadcast.world.model));
  broadcast.world.CheckBytes();
  REQUIRE(!communicators().empty());
  CHECK(communicators().back().number == 2);
  CHECK(communicators().back().status.ok());
  CHECK(setup.losses == 0);
}

// Tensors from one device to a slot and a destination on another, by NCCL.
struct PairBroadcast {
  PairBroadcast(Setup* setup, Rng* random, int from, int to, int tensors = 1)
      : world(setup->exporter(), setup->memory.get(), random) {
    for (int i = 0; i < tensors; ++i) FillSimply(&world, from, {to});
    transfer =
        Broadcasting(&world, setup->memory.get(), random, {to}, BroadcastMethod::kNccl, &pools);
  }
  void GiveBack(CudaMemory* memory) {
    transfer = {};
    for (DevicePool& pool : pools.pools) memory->GiveBack(std::move(pool));
  }
  World world;
  BroadcastPools pools;
  Transfer transfer;
};

TEST_CASE("a broadcast that NCCL never began costs itself alone, and no GPU") {
  Rng random(kSeed + 49);
  Setup setup({.limit = std::chrono::seconds(8), .lost = {}}, 3, true);
  const PairBroadcast broadcast(&setup, &random, 0, 1);
  const PairBroadcast other(&setup, &random, 0, 2);
  CheckSame(Run(setup.transport.get(), broadcast.transfer),
            Run(setup.host.get(), broadcast.world.model));
  REQUIRE(Run(setup.transport.get(), other.transfer).status.ok());
  // The other broadcast's communicator is poisoned, and freeing it takes a while.
  setup.nccl->FailAt("ncclBroadcast", 1, 3);
  setup.nccl->Block("ncclCommAbort");
  CHECK_FALSE(Run(setup.transport.get(), other.transfer).status.ok());
  REQUIRE(Eventually([&] { return setup.nccl->Count().blocked_calls == 1; }));
  const TransferResult behind = Run(setup.transport.get(), broadcast.transfer);
  setup.nccl->Block("");
  CHECK(behind.status.code() == absl::StatusCode::kDeadlineExceeded);
  CHECK_THAT(std::string(behind.status.message()), Contains("waits for another call of NCCL"));
  CHECK(setup.losses == 0);
  // The communicator is still usable.
  CheckSame(Run(setup.transport.get(), broadcast.transfer),
            Run(setup.host.get(), broadcast.world.model));
  broadcast.world.CheckBytes();
  CHECK(setup.nccl->Count().comms == 2);
}

TEST_CASE("scratch that the driver does not free holds nobody up, and goes when it does (P8)") {
  Rng random(kSeed + 50);
  Setup setup({.limit = std::chrono::seconds(2),
               .kept_device_bytes = 0,
               .kept_pinned_bytes = 0,
               .lost = {}},
              2, true);
  {
    // Two tensors that lie apart are packed into scratch memory.
    PairBroadcast broadcast(&setup, &random, 0, 1, 2);
    CheckSame(Run(setup.transport.get(), broadcast.transfer),
              Run(setup.host.get(), broadcast.world.model));
    REQUIRE(Eventually([&] { return setup.fake.Count().allocations == 1; }));
    setup.fake.Block("cuMemFree");
    const bool idle = GENERATE(false, true);
    std::atomic<bool> gone = false;
    std::thread end([&] {
      if (idle) broadcast.GiveBack(setup.memory.get());
      setup.transport.reset();
      gone = true;
    });
    CHECK(Eventually([&] { return gone.load(); }));
    CHECK(setup.fake.Count().blocked_calls == 1);
    setup.fake.Block("");
    end.join();
  }
  CHECK(Eventually([&] { return setup.fake.Count().allocations == 0; }));
}

TEST_CASE("of too many sets of devices that NCCL broadcasts to, idle ones make room (P10)") {
  Rng random(kSeed + 48);
  constexpr int kDevices = 7;
  constexpr size_t kMostSets = 16;  // nccl/broadcast.h
  Setup setup({.lost = {}}, kDevices, true);
  const auto communicators = [&setup] {
    return dynamic_cast<const CommunicatorsOwner&>(*setup.transport).Communicators().size();
  };
  std::vector<std::pair<int, int>> all;
  for (int from = 0; from < kDevices; ++from) {
    for (int to = from + 1; to < kDevices; ++to) all.emplace_back(from, to);
  }
  REQUIRE(all.size() > kMostSets);
  for (const auto& [from, to] : all) {
    PairBroadcast pair(&setup, &random, from, to);
    CheckSame(Run(setup.transport.get(), pair.transfer), Run(setup.host.get(), pair.world.model));
    pair.world.CheckBytes();
    pair.GiveBack(setup.memory.get());
  }
  CHECK(Eventually([&] { return communicators() == kMostSets; }));

  // Communicators whose pools exist stay.
  std::vector<std::unique_ptr<PairBroadcast>> held;
  for (const auto& [from, to] : all) {
    held.push_back(std::make_unique<PairBroadcast>(&setup, &random, from, to));
    const absl::Status status = Run(setup.transport.get(), held.back()->transfer).status;
    if (held.size() <= kMostSets) {
      REQUIRE(status.ok());
    } else {
      CHECK(status.code() == absl::StatusCode::kResourceExhausted);
    }
  }
  held[3]->GiveBack(setup.memory.get());
  REQUIRE(Run(setup.transport.get(), held.back()->transfer).status.ok());
  CHECK(Eventually([&] { return communicators() == kMostSets; }));
  CHECK(setup.losses == 0);
}

TEST_CASE("a wrong byte in a slot is caught, whichever slot it is (P1)") {
  Rng random(kSeed + 42);
  // The source changes between the relay and its digest, which looks like a slot that differs.
  for (int slot = 0; slot < 2; ++slot) {
    Setup setup({.lost = {}}, 3);
    SimpleBroadcast broadcast(&setup, &random);
    // The second transfer is stopped while the slot is spoilt.
    setup.fake.Block("cuLaunchKernel");
    Outcome<TransferResult> outcome;
    setup.transport->Submit(broadcast.transfer, outcome.done());
    REQUIRE(Eventually(
        [&] { return setup.fake.Count().blocked_calls > 0 && setup.fake.RunStreams() == 0; }));
    char* const spoilt = broadcast.transfer.broadcast->slots[static_cast<size_t>(slot)].data +
                         broadcast.transfer.broadcast->byte_offsets[0];
    *spoilt ^= 1;
    setup.fake.Block("");
    const TransferResult result = outcome.Wait();
    REQUIRE(result.status.code() == absl::StatusCode::kDataLoss);
    CHECK_THAT(std::string(result.status.message()),
               Contains("verification of \"weight\" in slot " + std::to_string(slot)));
  }
}

TEST_CASE("a broadcast whose calls fail costs itself alone, and nothing is left open") {
  Rng random(kSeed + 43);
  for (const char* call :
       {"cuStreamCreate", "cuEventCreate", "cuMemcpyDtoDAsync", "cuLaunchKernel", "cuMemAlloc"}) {
    for (int nth = 1; nth <= 3; ++nth) {
      INFO(call << " " << nth);
      Setup setup({.lost = {}}, 3);
      {
        SimpleBroadcast broadcast(&setup, &random);
        setup.fake.FailAt(call, nth, 2);
        // The nth call may be of the second broadcast.
        int failed = 0;
        TransferResult result = Run(setup.transport.get(), broadcast.transfer);
        for (int more = 0; more < 2; ++more) {
          if (!result.status.ok()) {
            ++failed;
            CHECK(result.status.code() == absl::StatusCode::kResourceExhausted);
            CHECK_THAT(std::string(result.status.message()), Contains(call));
          }
          result = Run(setup.transport.get(), broadcast.transfer);
        }
        CHECK(failed == 1);
        CheckSame(result, Run(setup.host.get(), broadcast.world.model));
        broadcast.world.CheckBytes();
        CHECK(setup.losses == 0);
      }
      setup.transport.reset();
      CheckNothingOpen(setup.fake);
    }
  }
}

TEST_CASE("a broadcast whose end nothing would tell is a loss of the GPUs (P6)") {
  Rng random(kSeed + 45);
  Setup setup({.lost = {}}, 3);
  SimpleBroadcast broadcast(&setup, &random);
  setup.fake.FailAt("cuStreamWaitEvent", 2, 2);  // the first is the chain's
  CHECK(Run(setup.transport.get(), broadcast.transfer).status.code() ==
        absl::StatusCode::kInternal);
  CHECK(setup.losses == 1);
}

TEST_CASE("a device that hangs holds a broadcast up to its end, and is told as a loss") {
  Rng random(kSeed + 44);
  Setup setup({.limit = std::chrono::milliseconds(100), .lost = {}}, 3);
  SimpleBroadcast broadcast(&setup, &random);
  setup.fake.Hold(1U << 1);
  Outcome<TransferResult> outcome;
  setup.transport->Submit(broadcast.transfer, outcome.done());
  REQUIRE(Eventually([&] { return setup.losses > 0; }));
  CHECK_FALSE(outcome.ended());
  setup.fake.Hold(0);
  CHECK(outcome.Wait().status.code() == absl::StatusCode::kDeadlineExceeded);
}

TEST_CASE("a device unpacks its slot while the chain goes on") {
  Rng random(kSeed + 47);
  Setup setup({.lost = {}}, 4);
  SimpleBroadcast broadcast(&setup, &random, BroadcastMethod::kChain, {1, 2, 3});
  broadcast.world.model.verification = broadcast.transfer.verification = Verification::kOff;
  setup.fake.Hold(1U << 2);  // so device 3 gets nothing
  Outcome<TransferResult> outcome;
  setup.transport->Submit(broadcast.transfer, outcome.done());
  constexpr int kReceivers = 3;  // each launches once
  REQUIRE(Eventually([&] { return setup.fake.Count().launch_calls == kReceivers; }));
  (void)setup.fake.RunStreams();  // so that nothing is written below
  const BoundPiece& source = broadcast.world.model.source[0];
  const auto bytes = static_cast<size_t>(ElementCount(source.box) * ElementBytes(source.dtype));
  const auto arrived = [&](size_t receiver) {
    const BoundPiece& to = broadcast.transfer.destinations[receiver][0];
    return std::memcmp(to.data, source.data, bytes) == 0;
  };
  CHECK(arrived(0));
  CHECK_FALSE(arrived(1));
  CHECK_FALSE(arrived(2));
  CHECK_FALSE(outcome.ended());
  setup.fake.Hold(0);
  CheckSame(outcome.Wait(), Run(setup.host.get(), broadcast.world.model));
  broadcast.world.CheckBytes();
}

TEST_CASE("methods that are not there are said so") {
  constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
  for (const bool with_nccl : {false, true}) {
    const Setup setup({.lost = {}}, 2, with_nccl);
    const auto can = [&](BroadcastMethod method) { return setup.transport->CanBroadcast(method); };
    CHECK(can(BroadcastMethod::kDirect).ok());
    CHECK(can(BroadcastMethod::kChain).ok());
    CHECK(can(BroadcastMethod::kNccl).ok() == with_nccl);
    CHECK(can(BroadcastMethod::kSymmetric).ok() == with_nccl);
    CHECK(with_nccl == (can(BroadcastMethod::kNccl).code() != kUnimplemented));
    CHECK(setup.host->CanBroadcast(BroadcastMethod::kChain).code() == kUnimplemented);
  }
}

// ---- verification (P1) ----

TEST_CASE("a wrong bit in what was stored is caught by transfer verification") {
  Rng random(kSeed + 3);
  Setup setup;
  World world(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&world, 0, {1});
  world.model.verification = Verification::kTransfer;
  setup.fake.Corrupt(1);
  const TransferResult result = Run(setup.transport.get(), world.OnDevices());
  REQUIRE(result.status.code() == absl::StatusCode::kDataLoss);
  CHECK(result.failed_destination == 0);
  CHECK_THAT(std::string(result.status.message()),
             Contains("version 3, part 7: verification of \"weight\" at destination 0 failed") &&
                 Contains("what was stored"));
}

TEST_CASE("a wrong bit in a destination is caught by readback, inside the transfer or after") {
  Rng random(kSeed + 4);
  for (const bool now : {true, false}) {
    Setup setup;
    World world(setup.exporter(), setup.memory.get(), &random);
    FillSimply(&world, 0, {1});
    world.model.verification = Verification::kReadback;
    world.model.readback_now = {now};
    setup.fake.Corrupt(1);
    const Transfer transfer = world.OnDevices();
    const TransferResult result = Run(setup.transport.get(), transfer);
    if (now) {
      REQUIRE(result.status.code() == absl::StatusCode::kDataLoss);
      CHECK(result.failed_destination == 0);
      CHECK_THAT(std::string(result.status.message()),
                 Contains("\"weight\" at destination 0") && Contains("read back"));
      continue;
    }
    REQUIRE(result.status.ok());
    const ReadbackResult readback = Run(setup.transport.get(), JobOf(transfer, result));
    REQUIRE(readback.status.code() == absl::StatusCode::kDataLoss);
    CHECK(readback.failed_destinations == std::vector<uint32_t>{0});
    CHECK_THAT(std::string(readback.status.message()),
               Contains("verification of \"weight\" at destination 0 failed"));
  }
}

TEST_CASE("a wrong offset in a program is caught on its destination only") {
  Rng random(kSeed + 5);
  Setup setup;
  for (const Verification verification : {Verification::kTransfer, Verification::kReadback}) {
    World world(setup.exporter(), setup.memory.get(), &random);
    FillSimply(&world, 0, {0, 1});
    CopyMove& move = world.model.plan.moves[1];
    move.box = {{0, 0}, {40, 32}};
    move.source_byte_offset += 64;
    world.model.verification = verification;
    world.model.readback_now = {true, true};
    const TransferResult result = Run(setup.transport.get(), world.OnDevices());
    CHECK(result.status.code() == absl::StatusCode::kDataLoss);
    CHECK(result.failed_destination == 1);
  }
}

TEST_CASE("readbacks over host and device memory are split, and both halves' failures told") {
  Rng random(kSeed + 6);
  Setup setup;
  World world(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&world, 0, {1});
  world.model.verification = Verification::kReadback;
  const Transfer transfer = world.OnDevices();
  const TransferResult result = Run(setup.transport.get(), transfer);
  ReadbackJob job = JobOf(transfer, result);
  const TransferResult on_host = Run(setup.transport.get(), world.model);
  ReadbackPiece host_piece = JobOf(world.model, on_host).pieces[0];
  host_piece.destination = 7;
  job.pieces.push_back(host_piece);
  CHECK(Run(setup.transport.get(), job).status.ok());
  job.pieces[1].expected ^= 1;
  ReadbackResult readback = Run(setup.transport.get(), job);
  CHECK(readback.status.code() == absl::StatusCode::kDataLoss);
  CHECK(readback.failed_destinations == std::vector<uint32_t>{7});
  job.pieces[0].expected ^= 1;
  readback = Run(setup.transport.get(), job);
  CHECK(readback.failed_destinations == std::vector<uint32_t>{0, 7});
}

TEST_CASE("a prepared readback reads again each time, and counts pieces as the job does") {
  Rng random(kSeed + 8);
  Setup setup;
  World world(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&world, 0, {1});
  world.model.verification = Verification::kReadback;
  const Transfer transfer = world.OnDevices();
  ReadbackJob job = JobOf(transfer, Run(setup.transport.get(), transfer));
  ReadbackPiece host_piece = JobOf(world.model, Run(setup.transport.get(), world.model)).pieces[0];
  host_piece.destination = 7;
  job.pieces.insert(job.pieces.begin(), host_piece);
  std::vector<uint64_t> expected;
  for (const ReadbackPiece& piece : job.pieces) expected.push_back(piece.expected);
  char* const on_device = job.pieces.back().piece.data;
  const auto prepared = setup.transport->Prepare(std::move(job));
  const auto replay = [&](const std::vector<uint64_t>& of) {
    Outcome<ReadbackResult> outcome;
    setup.transport->Replay(prepared, of, outcome.done());
    return outcome.Wait();
  };
  const int calls = setup.fake.Count().allocation_calls;
  CHECK(replay(expected).status.ok());
  const int first = setup.fake.Count().allocation_calls - calls;
  CHECK(replay(expected).status.ok());
  CHECK(setup.fake.Count().allocation_calls - calls == first);
  for (size_t i = 0; i < expected.size(); ++i) {
    std::vector<uint64_t> other = expected;
    other[i] ^= 1;
    const ReadbackResult readback = replay(other);
    CHECK(readback.status.code() == absl::StatusCode::kDataLoss);
    CHECK(readback.failed_destinations == std::vector<uint32_t>{i == 0 ? 7U : 0U});
  }
  *on_device = static_cast<char>(*on_device ^ 1);
  CHECK(replay(expected).failed_destinations == std::vector<uint32_t>{0});
}

// ---- what is refused ----

TEST_CASE("without a kernel there is no transport") {
  const FakeCuda fake;
  const auto transport =
      MakeCudaTransport(*CudaMemory::Create(FakeCuda::Path()), MakeHostTransport({}), {}, {});
  CHECK(transport.status().code() == absl::StatusCode::kUnimplemented);
}

TEST_CASE("transfers within host memory never touch a device") {
  Rng random(kSeed + 7);
  Setup setup;
  World world(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&world, kHost, {kHost});
  CHECK(Run(setup.transport.get(), world.model).status.ok());
  const auto prepared = setup.transport->Prepare(world.model);
  REQUIRE(prepared.ok());
  CHECK(Replay(setup.transport.get(), *prepared, Verification::kTransfer).status.ok());
  CHECK(setup.fake.Count() == FakeCudaCounts());
}

TEST_CASE("what would be written to host memory from a device is refused by name") {
  Rng random(kSeed + 8);
  Setup setup;
  World world(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&world, 0, {kHost});
  const TransferResult result = Run(setup.transport.get(), world.OnDevices());
  CHECK(result.status.code() == absl::StatusCode::kUnimplemented);
  CHECK_THAT(std::string(result.status.message()), Contains("weight"));
  CHECK(result.bytes_written == std::vector<int64_t>{0});
}

TEST_CASE("wrong programs are refused and nothing is launched") {
  Rng random(kSeed + 9);
  Setup setup;
  World world(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&world, 0, {1});
  world.model.plan.moves[0].destination_byte_offset = 2;
  const Transfer transfer = world.OnDevices();
  const TransferResult result = Run(setup.transport.get(), transfer);
  CHECK(result.status.code() == absl::StatusCode::kInternal);
  CHECK(result.bytes_written == std::vector<int64_t>{0});
  CHECK(setup.transport->Prepare(transfer).status().code() == absl::StatusCode::kInternal);
  CHECK(setup.fake.Count().launch_calls == 0);
  CHECK(setup.losses == 0);
}

TEST_CASE("a device that can't reach the destination is named") {
  Rng random(kSeed + 10);
  Setup setup;
  World world(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&world, 0, {1});
  setup.fake.Peers(false);
  const TransferResult result = Run(setup.transport.get(), world.OnDevices());
  CHECK(result.status.code() == absl::StatusCode::kUnavailable);
  CHECK_THAT(std::string(result.status.message()),
             Contains("device 0 can't reach memory of device 1") && Contains("weight"));
}

TEST_CASE("a transfer without moves still ends") {
  Rng random(kSeed + 11);
  Setup setup;
  World world(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&world, 0, {1});
  world.model.plan.moves.clear();
  world.model.verification = Verification::kReadback;
  CHECK(Run(setup.transport.get(), world.OnDevices()).status.ok());
  CHECK(Run(setup.transport.get(), ReadbackJob()).status.ok());
}

// ---- limits, errors, ends (P4, P6, P8) ----

constexpr auto kShort = std::chrono::milliseconds(30);

void CheckLate(const TransferResult& result) {
  CHECK(result.status.code() == absl::StatusCode::kDeadlineExceeded);
  CHECK_THAT(std::string(result.status.message()),
             Contains("version 3, part 7: ") &&
                 Contains("lost the use of its GPUs: device 0 (GPU-") && Contains("within 30 ms"));
}

TEST_CASE("a device that hangs is told as a loss after the limit; its transfers end when it does") {
  Rng random(kSeed + 12);
  Setup setup({.limit = kShort, .lost = {}});
  World world(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&world, 0, {1});
  CHECK(Run(setup.transport.get(), world.OnDevices()).status.ok());
  setup.fake.Hold(1);
  Outcome<TransferResult> first;
  Outcome<TransferResult> behind;
  setup.transport->Submit(world.OnDevices(), first.done());
  setup.transport->Submit(world.OnDevices(), behind.done());
  CHECK(Eventually([&] { return setup.fake.Count().launch_calls == 3; }));
  CHECK(Eventually([&] { return setup.losses == 1; }));
  // New transfers are refused and nothing is begun; running transfers may still store.
  CheckLate(Run(setup.transport.get(), world.OnDevices()));
  CHECK(setup.fake.Count().launch_calls == 3);
  CHECK(!first.ended());
  CHECK(!behind.ended());
  world.DropRegions();
  CHECK(setup.fake.Count().opened_handles == 3);  // the source's, the destination's on both
  setup.fake.Hold(0);
  CheckLate(first.Wait());
  CheckLate(behind.Wait());
  CHECK(Eventually([&] { return setup.fake.Count().opened_handles == 0; }));
  CHECK(setup.losses == 1);
}

TEST_CASE("a transfer ends when all of its devices are done, also if one of them was late") {
  Rng random(kSeed + 22);
  Setup setup({.limit = kShort, .lost = {}});
  World world(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&world, 0, {1});
  World other(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&other, 1, {1});
  Transfer both = world.OnDevices();
  {
    Transfer second = other.OnDevices();
    both.source.push_back(second.source[0]);
    both.destinations.push_back(second.destinations[0]);
    CopyMove move = second.plan.moves[0];
    move.source_piece = 1;
    move.destination = 1;
    both.plan.moves.push_back(move);
    both.keep_alive.insert(both.keep_alive.end(), second.keep_alive.begin(),
                           second.keep_alive.end());
  }
  for (const unsigned stays : {1U, 2U}) {
    INFO("held to the end: " << stays);
    Setup* const at = &setup;
    at->transport.reset();
    at->losses = 0;
    CudaTransportOptions options;
    options.limit = kShort;
    options.lost = [at](const absl::Status&) { ++at->losses; };
    at->transport =
        *MakeCudaTransport(at->memory, MakeHostTransport({.threads = 1}), options, "an image");
    setup.fake.Hold(3);
    Outcome<TransferResult> outcome;
    setup.transport->Submit(both, outcome.done());
    CHECK(Eventually([&] { return setup.losses == 1; }));
    setup.fake.Hold(stays);
    // The other device's part ends, and more than a limit passes.
    const auto until = std::chrono::steady_clock::now() + 2 * kShort;
    CHECK(Eventually([&] { return std::chrono::steady_clock::now() > until; }));
    CHECK(!outcome.ended());
    setup.fake.Hold(0);
    CHECK(outcome.Wait().status.code() == absl::StatusCode::kDeadlineExceeded);
  }
}

TEST_CASE("a transfer whose launch hangs in the driver ends when that returns") {
  Rng random(kSeed + 23);
  Setup setup({.limit = kShort, .lost = {}});
  World world(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&world, kHost, {0});  // its bytes are the caller's until `done`
  const Transfer transfer = world.OnDevices();
  const auto prepared = setup.transport->Prepare(transfer);
  REQUIRE(prepared.ok());
  setup.fake.Block("cuMemcpyHtoDAsync");
  Outcome<TransferResult> hangs;
  Outcome<TransferResult> behind;
  for (auto* outcome : {&hangs, &behind}) {
    setup.transport->Replay(*prepared, Verification::kOff, "version 3, part 7", outcome->done());
  }
  CheckLate(behind.Wait());  // it was not begun
  CHECK(setup.fake.Count().blocked_calls == 1);
  CHECK(!hangs.ended());
  CHECK(setup.losses == 1);
  setup.fake.Block("");
  CheckLate(hangs.Wait());
}

TEST_CASE("work that has ended is not late, however long nobody looked") {
  Rng random(kSeed + 24);
  constexpr auto kLimit = std::chrono::milliseconds(200);
  Setup setup({.limit = kLimit, .lost = {}});
  World world(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&world, 0, {1});
  const Transfer transfer = world.OnDevices();
  Outcome<TransferResult> second;
  // Stops the thread that waits for the device, as a stopped process would.
  setup.transport->Submit(transfer, [&](const TransferResult& first) {
    CHECK(first.status.ok());
    CHECK(Eventually([&] { return setup.fake.Count().launch_calls == 2; }));
    const auto until = std::chrono::steady_clock::now() + 2 * kLimit;
    CHECK(Eventually([&] { return std::chrono::steady_clock::now() > until; }));
  });
  setup.transport->Submit(transfer, second.done());
  const TransferResult result = second.Wait();
  INFO(result.status.ToString());
  CHECK(result.status.ok());
  CHECK(setup.losses == 0);
}

TEST_CASE("a call of the driver that hangs while planning is a loss, and stops nobody for ever") {
  // cuMemAlloc makes room for a call's bytes on the device; cuIpcOpenMemHandle opens the
  // destination for a peer.
  const std::string call = GENERATE("cuMemAlloc", "cuIpcOpenMemHandle");
  INFO(call);
  Rng random(kSeed + 25);
  Setup setup({.limit = kShort, .lost = {}});
  World world(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&world, call == "cuMemAlloc" ? kHost : 0, {call == "cuMemAlloc" ? 0 : 1});
  const Transfer transfer = world.OnDevices();
  setup.fake.Block(call.c_str());
  Outcome<TransferResult> hangs;
  Outcome<TransferResult> behind;
  Outcome<ReadbackResult> readback;
  setup.transport->Submit(transfer, hangs.done());
  setup.transport->Submit(transfer, behind.done());
  ReadbackJob job;
  job.pieces.push_back({.piece = transfer.destinations[0][0]});
  setup.transport->Submit(job, readback.done());
  CheckLate(behind.Wait());
  CHECK(readback.Wait().status.code() == absl::StatusCode::kDeadlineExceeded);
  CheckLate(Run(setup.transport.get(), transfer));  // later transfers do not wait either
  CHECK(setup.losses == 1);
  CHECK(setup.fake.Count().blocked_calls == 1);
  CHECK(!hangs.ended());
  SECTION("until it returns") {
    setup.fake.Block("");
    CheckLate(hangs.Wait());
    CHECK(setup.fake.Count().launch_calls == 0);
  }
  SECTION("until the transport ends") {
    setup.transport.reset();
    CHECK(hangs.Wait().status.code() == absl::StatusCode::kUnavailable);
    setup.fake.Block("");
    CHECK(Eventually([&] { return setup.fake.Count().blocked_calls == 0; }));
  }
}

TEST_CASE("a call of the driver that hangs in Prepare is a loss too") {
  Rng random(kSeed + 26);
  Setup setup({.limit = kShort, .lost = {}});
  World world(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&world, kHost, {0});
  const Transfer transfer = world.OnDevices();
  setup.fake.Block("cuMemAlloc");
  std::thread prepares([&] { (void)setup.transport->Prepare(transfer); });
  CHECK(Eventually([&] { return setup.losses == 1; }));
  setup.fake.Block("");
  prepares.join();
}

TEST_CASE("memory beyond what is kept goes back also while the device has nothing to do") {
  Rng random(kSeed + 27);
  constexpr int64_t kKept = 4096;
  Setup setup({.kept_device_bytes = kKept, .kept_pinned_bytes = 0, .lost = {}});
  World world(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&world, kHost, {0}, {128, 128});
  Outcome<TransferResult> outcome;
  setup.transport->Submit(world.OnDevices(), outcome.done());
  CHECK(outcome.Wait().status.ok());
  CHECK(Eventually([&] { return setup.fake.Count().allocations <= 1; }));
  CHECK(Eventually([&] { return setup.fake.Count().host_allocations == 0; }));
}

TEST_CASE("many transfers that each end in time are not late because they wait for one another") {
  Rng random(kSeed + 13);
  Setup setup({.limit = kTestDeadline, .lost = {}});
  World world(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&world, 0, {1});
  const Transfer transfer = world.OnDevices();
  setup.fake.Hold(1);
  std::vector<Outcome<TransferResult>> outcomes(50);
  for (auto& outcome : outcomes) setup.transport->Submit(transfer, outcome.done());
  CHECK(Eventually([&] { return setup.fake.Count().launch_calls > 1; }));
  CHECK(setup.fake.Count().launch_calls <= 16);  // several at once, but not all
  setup.fake.Hold(0);
  for (auto& outcome : outcomes) CHECK(outcome.Wait().status.ok());
}

TEST_CASE("a transport whose device hangs for ever is destroyed all the same") {
  Rng random(kSeed + 14);
  Outcome<TransferResult> outcome;
  {
    Setup setup({.limit = kShort, .lost = {}});
    World world(setup.exporter(), setup.memory.get(), &random);
    FillSimply(&world, 0, {1});
    setup.fake.Hold(1);
    setup.transport->Submit(world.OnDevices(), outcome.done());
    setup.transport.reset();
    CHECK(outcome.Wait().status.code() == absl::StatusCode::kDeadlineExceeded);
    world.DropRegions();
    CHECK(setup.fake.Count().opened_handles == 3);
  }
}

TEST_CASE("an error that costs the context fails every transfer and is told once") {
  const std::string call = GENERATE("kernel", "cuLaunchKernel", "cuMemcpyHtoDAsync", "cuEventQuery",
                                    "cuEventRecord", "cuStreamCreate");
  INFO(call);
  Rng random(kSeed + 15);
  std::string told;
  Setup setup({.lost = [&told](const absl::Status& status) { told = Message(status); }});
  World world(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&world, 0, {1});
  World other(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&other, 1, {1});
  setup.fake.FailAt(call.c_str(), 1, 700);
  for (World* one : {&world, &world, &other}) {
    const TransferResult result = Run(setup.transport.get(), one->OnDevices());
    CHECK(result.status.code() == absl::StatusCode::kInternal);
    CHECK_THAT(std::string(result.status.message()), Contains("an illegal memory access"));
  }
  CHECK(setup.losses == 1);
  CHECK_THAT(told, Contains("lost the use of its GPUs") && Contains("error 700"));
}

TEST_CASE("transfers on other devices that still run fail too when the context is lost") {
  Rng random(kSeed + 16);
  Setup setup;
  World hanging(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&hanging, 1, {1});
  World world(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&world, 0, {0});
  setup.fake.Hold(2);
  Outcome<TransferResult> outcome;
  setup.transport->Submit(hanging.OnDevices(), outcome.done());
  CHECK(Eventually([&] { return setup.fake.Count().launch_calls == 1; }));
  setup.fake.FailAt("kernel", 1, 719);
  CHECK(Run(setup.transport.get(), world.OnDevices()).status.code() == absl::StatusCode::kInternal);
  CHECK(outcome.Wait().status.code() == absl::StatusCode::kInternal);
  CHECK(setup.losses == 1);
}

TEST_CASE("calls that fail cost their transfer alone, and nothing is left open") {
  Rng random(kSeed + 17);
  for (const char* call :
       {"cuModuleLoadData", "cuModuleGetFunction", "cuStreamCreate", "cuEventCreate", "cuMemAlloc",
        "cuMemHostAlloc", "cuMemcpyHtoDAsync", "cuMemsetD8Async", "cuLaunchKernel",
        "cuMemcpyDtoHAsync", "cuCtxPushCurrent"}) {
    INFO(call);
    Setup setup;
    World world(setup.exporter(), setup.memory.get(), &random);
    FillSimply(&world, 0, {0});
    world.model.verification = Verification::kTransfer;
    const std::string name = call;
    setup.fake.FailAt(call, 1, 2);
    const TransferResult result = Run(setup.transport.get(), world.OnDevices());
    CHECK(result.status.code() == absl::StatusCode::kResourceExhausted);
    CHECK_THAT(std::string(result.status.message()), Contains(name + ": out of memory"));
    const TransferResult again = Run(setup.transport.get(), world.OnDevices());
    INFO(again.status.ToString());
    CHECK(again.status.ok());
    CHECK(setup.losses == 0);
    setup.transport.reset();
    world.DropRegions();
    CheckNothingOpen(setup.fake);
  }
}

TEST_CASE("regions are closed when the last transfer ended, not before") {
  Rng random(kSeed + 18);
  Setup setup;
  World world(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&world, 0, {1});
  setup.fake.Hold(1);
  Outcome<TransferResult> outcome;
  setup.transport->Submit(world.OnDevices(), outcome.done());
  world.DropRegions();
  CHECK(Eventually([&] { return setup.fake.Count().launch_calls == 1; }));
  CHECK(setup.fake.Count().opened_handles == 3);
  setup.fake.Hold(0);
  CHECK(outcome.Wait().status.ok());
  CHECK(Eventually([&] { return setup.fake.Count().opened_handles == 0; }));
}

TEST_CASE("the same transfers again allocate nothing more") {
  Rng random(kSeed + 19);
  Setup setup;
  World world(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&world, kHost, {0, 1});
  world.model.verification = Verification::kTransfer;
  const auto run = [&] { CHECK(Run(setup.transport.get(), world.OnDevices()).status.ok()); };
  for (int i = 0; i < 8; ++i) run();
  // Buffers come back a moment after `done`.
  const int after_some = setup.fake.Count().allocation_calls;
  for (int i = 0; i < 50; ++i) run();
  CHECK(setup.fake.Count().allocation_calls <= after_some + 8);
}

TEST_CASE("everything is given back at the end") {
  Rng random(kSeed + 20);
  Setup setup;
  {
    World world(setup.exporter(), setup.memory.get(), &random);
    FillRandomly(&world, &random, true);
    std::shared_ptr<const PreparedTransfer> prepared = *setup.transport->Prepare(world.OnDevices());
    for (const auto verification :
         {Verification::kOff, Verification::kTransfer, Verification::kReadback}) {
      CHECK(Replay(setup.transport.get(), prepared, verification).status.ok());
    }
    setup.transport.reset();
    world.DropRegions();
    // A prepared transfer may outlive its transport, and holds its regions until then.
    CHECK(setup.fake.Count().opened_handles > 0);
  }
  CheckNothingOpen(setup.fake);
}

TEST_CASE("a done callback may submit more work, also while the transport ends") {
  Rng random(kSeed + 21);
  Setup setup;
  World world(setup.exporter(), setup.memory.get(), &random);
  FillSimply(&world, 0, {1});
  world.model.verification = Verification::kReadback;
  const Transfer transfer = world.OnDevices();
  Transport* const transport = setup.transport.get();
  Outcome<ReadbackResult> outcome;
  transport->Submit(transfer, [&, transport](const TransferResult& result) {
    transport->Submit(JobOf(transfer, result), outcome.done());
  });
  setup.transport.reset();
  CHECK(outcome.Wait().status.ok());
}

#endif

}  // namespace
}  // namespace refitd
