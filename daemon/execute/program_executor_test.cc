#include "daemon/execute/program_executor.h"

#include <catch2/catch.hpp>
#include <chrono>
#include <cstring>
#include <future>
#include <map>
#include <string>
#include <thread>

#include "daemon/execute/executor.h"
#include "transport/host/host_transport.h"
#include "transport/plan/node_program.h"
#include "transport/plan/refit_plan.h"
#include "transport/plan/route_testing.h"
#include "transport/unprepared_transport_testing.h"

namespace refitd {
namespace {

constexpr std::chrono::seconds kDeadline{20};
constexpr UpdateId kUpdate(1);

// The memory of members and slots is in strings of this test.
class TestMemory : public MemoryResolver {
 public:
  absl::StatusOr<MemorySpan> Region(MemberId member, RegionId region) const override {
    const auto it = regions.find({member, region});
    if (it == regions.end()) return absl::NotFoundError("no such region");
    const auto origin = origins.find(member);
    return MemorySpan{it->second->data(), static_cast<int64_t>(it->second->size()), it->second,
                      origin == origins.end() ? MemoryOrigin() : origin->second};
  }
  absl::StatusOr<MemorySpan> Slot(SlotIndex slot) const override {
    return MemorySpan{slots.at(slot.value())->data(),
                      static_cast<int64_t>(slots.at(slot.value())->size()), slots.at(slot.value())};
  }
  std::string LabelOf(MemberId member) const override {
    return member == MemberId(1) ? "trainer rank 0" : "engine x rank 0";
  }
  std::map<std::pair<MemberId, RegionId>, std::shared_ptr<std::string>> regions;
  std::map<MemberId, MemoryOrigin> origins;
  std::vector<std::shared_ptr<std::string>> slots;
};

// Makes one byte wrong right after it was stored. (A store of bytes around it may include it, too.)
class WrongByte : public TransferFaults {
 public:
  // The byte at `at` is right at this moment.
  void Aim(char* at) {
    target_ = at;
    wrong_ = static_cast<char>(*at ^ 0x20);
  }
  void Stop() { target_ = nullptr; }
  void AfterStore(char* data, int64_t bytes) override {
    if (target_ >= data && target_ < data + bytes) *target_ = wrong_;
  }

 private:
  char* target_ = nullptr;
  char wrong_ = 0;
};

// Counts what is prepared.
class Counting : public UnpreparedTransport {
 public:
  explicit Counting(Transport* transport) : transport_(transport) {}
  void Submit(Transfer transfer, std::function<void(TransferResult)> done) override {
    transport_->Submit(std::move(transfer), std::move(done));
  }
  void Submit(ReadbackJob job, std::function<void(ReadbackResult)> done) override {
    transport_->Submit(std::move(job), std::move(done));
  }
  absl::StatusOr<std::shared_ptr<const PreparedTransfer>> Prepare(Transfer transfer) override {
    ++prepared;
    return transport_->Prepare(std::move(transfer));
  }
  void Replay(const std::shared_ptr<const PreparedTransfer>& of, Verification verification,
              std::string label, std::function<void(TransferResult)> done) override {
    if (!fails) return transport_->Replay(of, verification, std::move(label), std::move(done));
    TransferResult failed;
    failed.status = absl::ResourceExhaustedError("no memory");
    done(std::move(failed));
  }
  int prepared = 0;
  bool fails = false;  // as a transport does that began nothing: without digests

 private:
  Transport* const transport_;
};

// One daemon: its program and the memory of its members.
struct Daemon {
  explicit Daemon(Transport* transport) : executor(transport) {}
  Executor executor;
  TestMemory memory;
  std::shared_ptr<BoundProgram> bound;

  StartMoves Step(MoveStep step, Verification verification, int64_t round = 0) const {
    StartMoves start;
    start.update = kUpdate;
    start.version = Version(3);
    start.step = step;
    start.round = round;
    start.slot = SlotIndex(step == MoveStep::kUnpack ? 1 : 0);
    start.bound = bound;
    start.verification = verification;
    return start;
  }
  MovesDone Run(const StartMoves& start) {
    std::promise<Executor::Moved> promise;
    auto done = promise.get_future();
    const absl::Status status = executor.Start(
        start, memory, [&promise](Executor::Moved m) { promise.set_value(std::move(m)); });
    INFO(status);
    REQUIRE(status.ok());
    REQUIRE(done.wait_for(kDeadline) == std::future_status::ready);
    Executor::Moved moved = done.get();
    executor.Finished(&moved);
    return moved.done;
  }
  absl::Status Refused(const StartMoves& start) {
    return executor.Start(start, memory, [](const Executor::Moved&) { FAIL("was started"); });
  }
  VerifyDone Verify() {
    std::vector<std::string> labels(bound->destination_layouts.size(), "engine");
    auto index = DestinationIndex::Make(bound->destination_layouts, std::move(labels));
    REQUIRE(index.ok());
    const StartVerify verify{kUpdate, Version(3), *index, bound->destinations, {}};
    std::promise<VerifyDone> promise;
    auto done = promise.get_future();
    REQUIRE(
        executor
            .Start(verify, memory, [&promise](VerifyDone d) { promise.set_value(std::move(d)); })
            .ok());
    REQUIRE(done.wait_for(kDeadline) == std::future_status::ready);
    return done.get();
  }
};

// All daemons of a random world.
class Cluster {
 public:
  // `lag`: of chains; 0: the program has none.
  Cluster(uint64_t seed, Transport* transport, uint32_t lag = 0)
      : rng_(seed), world(RandomRouteWorld(&rng_, lag > 0 ? 7 : 4)) {
    RouteOptions options;
    options.relay_lag = lag;
    options.relay_excess = 0;
    const auto made = CompileRefit(world.source_members, world.destination_members, options);
    INFO(made.status());
    REQUIRE(made.ok());
    plan = *made;
    for (uint32_t n = 0; n < plan->routes.nodes; ++n) AddDaemon(n, transport);
    Bind(0);
  }

  static MemberId SourceId(uint32_t i) { return MemberId(100 + i); }
  static MemberId DestinationId(uint32_t i) { return MemberId(1000 + i); }

  // Moves all memory `shift` bytes further on, to other regions.
  void Bind(int64_t shift) {
    const RegionId region(7 + static_cast<uint64_t>(shift));
    const auto move = [&](const Layout& layout) {
      auto moved = std::make_shared<Layout>(layout);
      for (Piece& piece : moved->pieces) {
        piece.region = region;
        piece.byte_offset += shift;
      }
      return moved;
    };
    const std::string prefix(static_cast<size_t>(shift), '-');
    for (const auto& daemon : daemons) {
      auto bound = std::make_shared<BoundProgram>(*daemon->bound);
      bound->sources.clear();
      bound->destinations.clear();
      bound->source_layouts.clear();
      bound->destination_layouts.clear();
      daemon->memory.regions.clear();
      for (const LocalMember& member : bound->program->sources) {
        bound->sources.push_back(SourceId(member.rank));
        bound->source_layouts.push_back(move(*member.layout));
        daemon->memory.regions[{SourceId(member.rank), region}] =
            std::make_shared<std::string>(prefix + world.sources[member.rank].memory);
      }
      for (const LocalMember& member : bound->program->destinations) {
        bound->destinations.push_back(DestinationId(member.rank));
        bound->destination_layouts.push_back(move(*member.layout));
        daemon->memory.regions[{DestinationId(member.rank), region}] =
            std::make_shared<std::string>(prefix + world.destinations[member.rank].memory);
      }
      daemon->bound = std::move(bound);
    }
    region_ = region;
    shift_ = shift;
  }

  // Runs every step of a refit and returns what is wrong; empty: nothing. `spoil` may damage the
  // bytes in a slot.
  std::string Refit(Verification verification, bool spoil = false) {
    std::vector<std::vector<int64_t>> written;
    for (const auto& daemon : daemons) {
      MovesDone done = daemon->Run(daemon->Step(MoveStep::kLocal, verification));
      if (!done.status.ok()) return done.status.ToString();
      written.push_back(std::move(done.bytes_written));
    }
    Sums sent;
    Sums received;
    for (int64_t round = 0; round < daemons[0]->bound->program->rounds; ++round) {
      for (uint32_t n = 0; n < daemons.size(); ++n) {
        StartMoves start = daemons[n]->Step(MoveStep::kPack, verification, round);
        start.received = InSlot(round);
        const MovesDone done = daemons[n]->Run(start);
        if (!done.status.ok()) return done.status.ToString();
        for (const auto& [to, streams] : daemons[n]->bound->program->StreamsByReceiver()) {
          Add(done.sections, streams, {n, to}, &sent);
        }
      }
      Exchange(round, spoil);
      for (uint32_t n = 0; n < daemons.size(); ++n) {
        StartMoves start = daemons[n]->Step(MoveStep::kUnpack, verification, round);
        start.slot = InSlot(round);
        const MovesDone done = daemons[n]->Run(start);
        if (!done.status.ok()) return done.status.ToString();
        for (const auto& [from, streams] : daemons[n]->bound->program->StreamsBySender()) {
          Add(done.sections, streams, {from, n}, &received);
        }
        for (size_t d = 0; d < written[n].size(); ++d) written[n][d] += done.bytes_written[d];
      }
      sections_ += verification == Verification::kOff ? 0 : 1;
    }
    if (sent != received) return "a section's digests differ";
    for (uint32_t n = 0; n < daemons.size(); ++n) {
      const auto& program = *daemons[n]->bound->program;
      if (written[n] != program.destination_bytes) return "bytes_written";
    }
    return "";
  }

  // Sums of digests: from, to, number of the stream between the two, section.
  using Sums = std::map<std::tuple<uint32_t, uint32_t, size_t, uint32_t>, uint64_t>;
  static void Add(const std::vector<SectionDigest>& digests, const std::vector<uint32_t>& streams,
                  std::pair<uint32_t, uint32_t> ends, Sums* sums) {
    for (const SectionDigest& s : digests) {
      const auto at = std::find(streams.begin(), streams.end(), s.stream);
      if (at == streams.end()) continue;
      const auto number = static_cast<size_t>(at - streams.begin());
      (*sums)[{ends.first, ends.second, number, s.section}] += s.digest;
    }
  }

  // The slot that a round receives into: slots 1 to `lag`, one round after the other, or slot 1 if
  // there are no chains. Slot 0 is sent from.
  SlotIndex InSlot(int64_t round) const {
    const auto lag = static_cast<int64_t>(std::max<uint32_t>(plan->routes.relay.lag, 1));
    return SlotIndex(static_cast<uint32_t>(1 + round % lag));
  }

  // Copies chunks from slot 0 of the sender to the receiver's slot of that round.
  void Exchange(int64_t round, bool spoil) {
    for (uint32_t to = 0; to < daemons.size(); ++to) {
      for (const ExchangeLeg& in : daemons[to]->bound->program->Legs(round)) {
        if (in.bytes_in == 0) continue;
        for (const ExchangeLeg& out : daemons[in.peer]->bound->program->Legs(round)) {
          if (out.peer != to) continue;
          REQUIRE(out.bytes_out == in.bytes_in);
          char* const data =
              daemons[to]->memory.slots[InSlot(round).value()]->data() + in.in_offset;
          std::memcpy(data, daemons[in.peer]->memory.slots[0]->data() + out.out_offset,
                      static_cast<size_t>(in.bytes_in));
          if (spoil) *data = static_cast<char>(*data ^ 1);
        }
      }
    }
  }

  std::string& Memory(MemberId member) const {
    for (const auto& daemon : daemons) {
      const auto it = daemon->memory.regions.find({member, region_});
      if (it != daemon->memory.regions.end()) return *it->second;
    }
    FAIL("no such member");
    return *daemons[0]->memory.slots[0];
  }

  // Names the first fault in the engines' elements or in the bytes around them; empty: there is
  // none.
  std::string ByteFault() const {
    for (uint32_t d = 0; d < world.destinations.size(); ++d) {
      const Side& side = world.destinations[d];
      std::string expected = side.memory;
      for (const Piece& piece : side.layout.pieces) {
        const TensorSpec& spec = side.layout.tensors[piece.tensor];
        const int64_t bytes = ElementBytes(spec.dtype);
        ForEach(piece.box, [&](const Dims& at) {
          const std::string bits = Bits(piece.tensor, GlobalIndex(at, spec.shape), bytes);
          std::memcpy(expected.data() + Address(piece, at, bytes), bits.data(), bits.size());
        });
      }
      const std::string prefix(static_cast<size_t>(shift_), '-');
      if (Memory(DestinationId(d)) != prefix + expected) return "engine " + std::to_string(d);
    }
    return "";
  }

  bool HasLocalMoves() const {
    return std::any_of(daemons.begin(), daemons.end(), [](const auto& daemon) {
      return !daemon->bound->program->local.moves.empty();
    });
  }

 private:
  void AddDaemon(uint32_t n, Transport* transport) {
    std::vector<LocalMember> sources;
    std::vector<LocalMember> destinations;
    std::vector<bool> on_node;
    for (uint32_t i = 0; i < world.source_members.size(); ++i) {
      on_node.push_back(world.source_members[i].node == n);
      if (on_node.back()) sources.push_back({i, world.source_members[i].layout});
    }
    for (uint32_t i = 0; i < world.destination_members.size(); ++i) {
      if (world.destination_members[i].node != n) continue;
      destinations.push_back({i, world.destination_members[i].layout});
    }
    NodeProgramOptions options;
    const RelayShape& relay = plan->routes.relay;
    options.chunk_bytes = 128;
    if (relay.lag > 0) options.chunk_bytes = MinRelayRoundBytes(relay.node_streams);
    auto program =
        CompileNode(plan->routes, n, std::move(sources), std::move(destinations), options);
    REQUIRE(program.ok());
    auto daemon = std::make_unique<Daemon>(transport);
    auto bound = std::make_shared<BoundProgram>();
    bound->program = std::make_shared<const NodeProgram>(*std::move(program));
    bound->replicas =
        std::make_shared<const std::vector<ReplicaShare>>(SharesOf(plan->replicas, on_node));
    bound->plan = {plan, &plan->routes};
    daemon->bound = std::move(bound);
    for (uint32_t slot = 0; slot < 1 + std::max<uint32_t>(relay.lag, 1); ++slot) {
      daemon->memory.slots.push_back(
          std::make_shared<std::string>(relay.lag > 0 ? 1 << 16 : 1024, '-'));
    }
    daemons.push_back(std::move(daemon));
  }

  Rng rng_;
  RegionId region_;
  int64_t shift_ = 0;

 public:
  RouteWorld world;
  std::shared_ptr<const RefitPlan> plan;
  std::vector<std::unique_ptr<Daemon>> daemons;
  int64_t sections_ = 0;
};

constexpr Verification kAll[] = {Verification::kOff, Verification::kTransfer,
                                 Verification::kReadback};

struct Bench {
  WrongByte fault;
  std::unique_ptr<Transport> host = MakeHostTransport({.threads = 2, .faults = &fault});
  Counting transport{host.get()};
};

TEST_CASE("With chains the executors of all daemons move every byte and say what differs") {
  Bench bench;
  int64_t chained = 0;
  for (uint64_t seed = 1; seed <= 120; ++seed) {
    INFO("seed " << seed);
    Cluster cluster(seed, &bench.transport, 1 + static_cast<uint32_t>(seed % 2));
    if (cluster.plan->routes.relay.lag == 0) continue;
    ++chained;
    REQUIRE(cluster.Refit(kAll[seed % 3]) == "");
    REQUIRE(cluster.ByteFault() == "");
    REQUIRE(cluster.Refit(Verification::kTransfer, true) == "a section's digests differ");
  }
  CHECK(chained > 30);
}

// The first world of several daemons that has local moves and rounds.
std::unique_ptr<Cluster> MixedCluster(Transport* transport) {
  for (uint64_t seed = 1;; ++seed) {
    auto cluster = std::make_unique<Cluster>(seed, transport);
    if (cluster->HasLocalMoves() && cluster->daemons[0]->bound->program->rounds > 0) {
      return cluster;
    }
  }
}

// The first world of one daemon that moves anything.
std::unique_ptr<Cluster> AloneCluster(Transport* transport) {
  for (uint64_t seed = 1;; ++seed) {
    auto cluster = std::make_unique<Cluster>(seed, transport);
    if (cluster->daemons.size() == 1 && !cluster->daemons[0]->bound->program->local.moves.empty()) {
      return cluster;
    }
  }
}

TEST_CASE("A compiled refit over daemons gives every engine its bytes, wherever memory lies") {
  Bench bench;
  int64_t sections = 0;
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    INFO("seed " << seed);
    Cluster cluster(seed, &bench.transport);
    const Verification verification = kAll[seed % 3];
    REQUIRE(cluster.Refit(verification) == "");
    REQUIRE(cluster.ByteFault() == "");
    cluster.Bind(64);
    for (const auto& daemon : cluster.daemons) daemon->executor.Forget(kUpdate);
    REQUIRE(cluster.Refit(verification) == "");
    REQUIRE(cluster.ByteFault() == "");
    for (const auto& daemon : cluster.daemons) REQUIRE(daemon->Verify().status.ok());
    sections += cluster.sections_;
  }
  CHECK(sections > 100);
}

TEST_CASE("A wrong offset in a node program is found by transfer and by readback") {
  Bench bench;
  int planted = 0;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    INFO("seed " << seed);
    Cluster cluster(seed, &bench.transport);
    for (const auto& daemon : cluster.daemons) {
      auto wrong = std::make_shared<NodeProgram>(*daemon->bound->program);
      // A move of one element from the middle of a dense run takes its neighbour's bytes.
      CopyMove* move = nullptr;
      for (CopyMove& m : wrong->local.moves) {
        const Piece& piece = wrong->sources[m.source].layout->pieces[m.source_piece];
        if (piece.box.extent.empty() || m.box == piece.box) continue;
        if (m.source_byte_offset > piece.byte_offset) move = &m;
      }
      if (move == nullptr) continue;
      const Layout& layout = *wrong->sources[move->source].layout;
      const Piece& piece = layout.pieces[move->source_piece];
      move->source_byte_offset = piece.byte_offset;
      auto bound = std::make_shared<BoundProgram>(*daemon->bound);
      bound->program = wrong;
      daemon->bound = bound;
      ++planted;
      CHECK(daemon->Run(daemon->Step(MoveStep::kLocal, Verification::kOff)).status.ok());
      const MovesDone done = daemon->Run(daemon->Step(MoveStep::kLocal, Verification::kTransfer));
      CHECK(done.status.code() == absl::StatusCode::kDataLoss);
      CHECK(done.failed_destination >= 0);
      CHECK(daemon->Run(daemon->Step(MoveStep::kLocal, Verification::kReadback)).status.ok());
      CHECK(daemon->Verify().status.code() == absl::StatusCode::kDataLoss);
    }
  }
  CHECK(planted > 10);
}

TEST_CASE("A byte damaged in an engine, in a slot or on the way is found") {
  Bench bench;
  const auto cluster = MixedCluster(&bench.transport);
  const auto first_local =
      std::find_if(cluster->daemons.begin(), cluster->daemons.end(),
                   [](const auto& d) { return !d->bound->program->local.moves.empty(); });
  Daemon& local = **first_local;
  const CopyMove& move = local.bound->program->local.moves[0];
  std::string& engine = cluster->Memory(local.bound->destinations[move.destination]);
  REQUIRE(cluster->Refit(Verification::kOff) == "");
  bench.fault.Aim(engine.data() + move.destination_byte_offset);
  REQUIRE(cluster->Refit(Verification::kTransfer) == "");
  REQUIRE(cluster->Refit(Verification::kReadback) == "");
  const VerifyDone verified = local.Verify();
  CHECK(verified.status.code() == absl::StatusCode::kDataLoss);
  CHECK(verified.failed_destinations == std::vector<uint32_t>{move.destination});

  const auto sender =
      std::find_if(cluster->daemons.begin(), cluster->daemons.end(),
                   [](const auto& d) { return !d->bound->program->outgoing.empty(); });
  const StartMoves pack = (*sender)->Step(MoveStep::kPack, Verification::kOff);
  REQUIRE((*sender)->Run(pack).status.ok());
  bench.fault.Aim((*sender)->memory.slots[0]->data());
  const MovesDone packed =
      (*sender)->Run((*sender)->Step(MoveStep::kPack, Verification::kReadback));
  CHECK(packed.status.code() == absl::StatusCode::kDataLoss);
  CHECK(packed.failed_destination == -1);

  bench.fault.Stop();
  CHECK(cluster->Refit(Verification::kOff, true) == "");
  CHECK(cluster->ByteFault() != "");
  CHECK(cluster->Refit(Verification::kTransfer, true) == "a section's digests differ");
}

TEST_CASE("Replayed moves are read back against their own version's digests") {
  Bench bench;
  const auto cluster = AloneCluster(&bench.transport);
  Daemon& daemon = *cluster->daemons[0];
  const StartMoves moves = daemon.Step(MoveStep::kLocal, Verification::kReadback);
  for (int version = 0; version < 3; ++version) {
    for (auto& [name, region] : daemon.memory.regions) {
      for (char& c : *region) c = static_cast<char>(c * 5 + version + 1);
    }
    CHECK(daemon.Run(moves).status.ok());
    // Verifying may be repeated.
    for (int time = 0; time < 2; ++time) {
      const VerifyDone same = daemon.Verify();
      INFO(same.status);
      CHECK(same.status.ok());
    }
    daemon.executor.Forget(kUpdate);
  }
  // Run twice in one update: the digests add up and no longer match the version.
  CHECK(daemon.Run(moves).status.ok());
  CHECK(daemon.Run(moves).status.ok());
  CHECK(daemon.Verify().status.code() == absl::StatusCode::kDataLoss);
  daemon.executor.Forget(kUpdate);
  CHECK(daemon.Run(moves).status.ok());
  CHECK(daemon.Verify().status.ok());
}

TEST_CASE("Replicas' digests are equal until one holder's byte differs") {
  Bench bench;
  int compared = 0;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    INFO("seed " << seed);
    Cluster cluster(seed, &bench.transport);
    cluster.Bind(32);
    const auto compare = [&] {
      std::vector<std::vector<uint64_t>> digests;
      for (const auto& daemon : cluster.daemons) {
        MovesDone done = daemon->Run(daemon->Step(MoveStep::kCompare, Verification::kOff));
        REQUIRE(done.status.ok());
        REQUIRE(done.digests.size() == daemon->bound->replicas->size());
        digests.push_back(std::move(done.digests));
      }
      return CompareReplicas(*cluster.plan, digests);
    };
    REQUIRE(compare().ok());
    const Replicas& replicas = cluster.plan->replicas;
    if (replicas.boxes.empty()) continue;
    const uint32_t holder = replicas.HoldersOf(replicas.boxes[0])[0];
    std::string& memory = cluster.Memory(Cluster::SourceId(holder));
    for (char& byte : memory) byte = static_cast<char>(byte ^ 1);
    const absl::Status differs = compare();
    REQUIRE(differs.code() == absl::StatusCode::kDataLoss);
    CHECK_THAT(std::string(differs.message()),
               Catch::Contains(cluster.world.source_members[holder].label));
    ++compared;
  }
  CHECK(compared > 100);
}

TEST_CASE("A step that the transport could not begin fails with the transport's error") {
  Bench bench;
  const auto cluster = MixedCluster(&bench.transport);
  bench.transport.fails = true;
  for (const auto& daemon : cluster->daemons) {
    for (const MoveStep step :
         {MoveStep::kCompare, MoveStep::kLocal, MoveStep::kPack, MoveStep::kUnpack}) {
      for (const Verification verification : kAll) {
        CHECK(daemon->Run(daemon->Step(step, verification)).status.code() ==
              absl::StatusCode::kResourceExhausted);
      }
    }
  }
}

TEST_CASE(
    "A comparison of a part is prepared once, has the digests of its replicas, and is let go") {
  Bench bench;
  int tried = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    INFO("seed " << seed);
    Cluster cluster(seed, &bench.transport);
    cluster.Bind(32);
    Daemon& daemon = *cluster.daemons[0];
    const std::vector<ReplicaShare>& shares = *daemon.bound->replicas;
    if (shares.size() < 2) continue;
    ++tried;
    const auto compare = [&](ReplicaFraction part) {
      StartMoves start = daemon.Step(MoveStep::kCompare, Verification::kOff);
      start.part = part;
      const MovesDone done = daemon.Run(start);
      REQUIRE(done.status.ok());
      return done.digests;
    };
    const std::vector<uint64_t> whole = compare({});
    REQUIRE(whole.size() == shares.size());
    std::vector<uint64_t> hashes;
    for (const ReplicaShare& share : shares) {
      hashes.push_back(
          ReplicaHash(TensorHash(daemon.bound->plan->tensors[share.tensor]), share.box));
    }
    const uint64_t middle = hashes[hashes.size() / 2];
    const std::vector<ReplicaFraction> parts = {{0, middle}, {middle + 1, UINT64_MAX}};
    const auto check = [&](const ReplicaFraction& part) {
      std::vector<uint64_t> wanted;
      for (size_t i = 0; i < shares.size(); ++i) {
        if (part.Has(hashes[i])) wanted.push_back(whole[i]);
      }
      CHECK(compare(part) == wanted);
    };
    bench.transport.prepared = 0;
    for (int round = 0; round < 3; ++round) {
      for (const ReplicaFraction& part : parts) check(part);
    }
    CHECK(bench.transport.prepared == 2);
    // The comparison of all has replicas in common with both, and takes their place.
    CHECK(compare({}) == whole);
    CHECK(compare({}) == whole);
    CHECK(bench.transport.prepared == 3);
    check(parts[0]);
    CHECK(bench.transport.prepared == 4);
    // P8: nothing of the member's memory is kept.
    daemon.executor.Release(daemon.bound->sources[0]);
    check(parts[0]);
    CHECK(bench.transport.prepared == 5);
  }
  CHECK(tried > 20);
}

TEST_CASE("Local moves are prepared once and let go with the program or a member") {
  Bench bench;
  const auto cluster = MixedCluster(&bench.transport);
  Daemon& daemon =
      **std::find_if(cluster->daemons.begin(), cluster->daemons.end(),
                     [](const auto& d) { return !d->bound->program->local.moves.empty(); });
  const auto run = [&](Verification verification) {
    CHECK(daemon.Run(daemon.Step(MoveStep::kLocal, verification)).status.ok());
  };
  bench.transport.prepared = 0;
  for (const Verification verification : kAll) run(verification);
  CHECK(bench.transport.prepared == 1);

  // If other ranks are skipped, the transfer is another one.
  StartMoves fewer = daemon.Step(MoveStep::kLocal, Verification::kOff);
  fewer.skip_destination.assign(daemon.bound->destinations.size(), true);
  const MovesDone none = daemon.Run(fewer);
  CHECK(none.status.ok());
  CHECK(none.bytes_written == std::vector<int64_t>(daemon.bound->destinations.size(), 0));
  CHECK(bench.transport.prepared == 2);
  run(Verification::kTransfer);
  CHECK(bench.transport.prepared == 3);

  const uint32_t source = daemon.bound->program->local.moves[0].source;
  const MemberId member = daemon.bound->sources[source];
  std::vector<std::weak_ptr<std::string>> memory;
  const auto forget_memory = [&] {
    memory.clear();
    for (auto& [name, region] : daemon.memory.regions) memory.push_back(region);
    daemon.memory.regions.clear();
  };
  const auto gone = [&] {
    return std::all_of(memory.begin(), memory.end(), [](const auto& m) { return m.expired(); });
  };
  // The transport destroys a transfer just after it has told its caller.
  const auto soon_gone = [&] {
    const auto deadline = std::chrono::steady_clock::now() + kDeadline;
    while (!gone() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    return gone();
  };
  daemon.executor.Release(MemberId(5));  // another member
  auto kept = daemon.memory.regions;
  forget_memory();
  run(Verification::kOff);  // needs no look-up of memory
  kept.clear();
  CHECK(!gone());
  daemon.executor.Release(member);
  CHECK(soon_gone());

  cluster->Bind(64);
  run(Verification::kOff);

  // Moves that were bound ahead serve a step that was resolved meanwhile, unless a member was
  // released since.
  for (const bool released : {false, true}) {
    cluster->Bind(released ? 192 : 128);
    const StartMoves start = daemon.Step(MoveStep::kLocal, Verification::kOff);
    auto ahead = daemon.executor.Resolve(start, daemon.memory);
    auto later = daemon.executor.Resolve(start, daemon.memory);
    REQUIRE(ahead.ok());
    REQUIRE(later.ok());
    REQUIRE(!Executor::IsBound(**later));
    if (released) daemon.executor.Release(daemon.bound->sources[source]);
    REQUIRE(Executor::Bind(&bench.transport, ahead->get()).ok());
    daemon.executor.Keep(**ahead);
    daemon.executor.TakeKept(later->get());
    CHECK(Executor::IsBound(**later) == !released);
    bench.transport.prepared = 0;
    run(Verification::kOff);
    CHECK(bench.transport.prepared == (released ? 1 : 0));
  }
  forget_memory();
  daemon.bound = nullptr;
  daemon.executor.Forget(kUpdate);
  CHECK(soon_gone());
}

TEST_CASE("Engines and peers that are gone are left out") {
  Bench bench;
  const auto cluster = MixedCluster(&bench.transport);
  for (const auto& daemon : cluster->daemons) {
    const auto before = daemon->memory.regions;
    std::map<std::pair<MemberId, RegionId>, std::string> bytes;
    for (const auto& [name, region] : before) bytes[name] = *region;
    for (const MoveStep step : {MoveStep::kLocal, MoveStep::kUnpack}) {
      if (step == MoveStep::kUnpack && daemon->bound->program->rounds == 0) continue;
      StartMoves start = daemon->Step(step, Verification::kTransfer);
      start.skip_destination.assign(daemon->bound->destinations.size(), true);
      CHECK(daemon->Run(start).status.ok());
    }
    for (const MoveStep step : {MoveStep::kPack, MoveStep::kUnpack}) {
      StartMoves start = daemon->Step(step, Verification::kTransfer);
      start.course.gone.assign(cluster->daemons.size(), true);
      const MovesDone done = daemon->Run(start);
      CHECK(done.status.ok());
      CHECK(done.sections.empty());
    }
    for (const auto& [name, region] : before) CHECK(*region == bytes[name]);
    CHECK(*daemon->memory.slots[0] == std::string(1024, '-'));
  }
}

// A trainer and an engine of one daemon, whose tensor "w" of 64 bytes lies in one string: the
// trainer's at byte 0, the engine's at byte `shift`.
struct OneMemory {
  OneMemory(Bench* bench, int64_t shift, MemoryOrigin trainer, MemoryOrigin engine)
      : daemon(&bench->transport) {
    const auto layout = [](int64_t byte_offset) {
      auto made = std::make_shared<Layout>();
      made->tensors = {{"w", DType::kUint8, {64}}};
      made->pieces = {{0, {{0}, {64}}, RegionId(1), byte_offset, {1}}};
      return made;
    };
    const LayoutPtr source = layout(0);
    const LayoutPtr destination = layout(shift);
    const auto plan =
        CompileRefit({{source, 0, 0, "trainer"}}, {{destination, 0, 0, "engine"}}, {});
    REQUIRE(plan.ok());
    auto program = CompileNode((*plan)->routes, 0, {{0, source}}, {{0, destination}}, {});
    REQUIRE(program.ok());
    auto bound = std::make_shared<BoundProgram>();
    bound->program = std::make_shared<const NodeProgram>(*std::move(program));
    bound->replicas = std::make_shared<const std::vector<ReplicaShare>>();
    bound->plan = {*plan, &(*plan)->routes};
    bound->sources = {MemberId(1)};
    bound->destinations = {MemberId(2)};
    bound->source_layouts = {source};
    bound->destination_layouts = {destination};
    daemon.bound = std::move(bound);
    for (size_t i = 0; i < memory->size(); ++i) (*memory)[i] = static_cast<char>('A' + i % 50);
    for (const MemberId member : {MemberId(1), MemberId(2)}) {
      daemon.memory.regions[{member, RegionId(1)}] = memory;
    }
    daemon.memory.origins = {{MemberId(1), trainer}, {MemberId(2), engine}};
  }
  MovesDone Run(MoveStep step) { return daemon.Run(daemon.Step(step, Verification::kReadback)); }
  std::shared_ptr<std::string> memory = std::make_shared<std::string>(256, '-');
  Daemon daemon;
};

TEST_CASE(
    "a source and a destination shifted in one memory are refused before anything is written") {
  Bench bench;
  using Kind = MemoryOrigin::Kind;
  const MemoryOrigin file{Kind::kFile, 1, 7, 0};
  const MemoryOrigin block{Kind::kBlock, 0, 4096, 0};
  const MemoryOrigin exported{Kind::kExported, 0, 77, 1 << 20};
  for (const MemoryOrigin& origin : {file, block, exported}) {
    OneMemory shifted(&bench, 8, origin, origin);
    const std::string before = *shifted.memory;
    for (const MoveStep step : {MoveStep::kCompare, MoveStep::kLocal}) {
      const absl::Status refused =
          shifted.daemon.Refused(shifted.daemon.Step(step, Verification::kReadback));
      CHECK(refused.code() == absl::StatusCode::kFailedPrecondition);
      CHECK_THAT(std::string(refused.message()),
                 Catch::Contains("tensor w of trainer rank 0") &&
                     Catch::Contains("tensor w of engine x rank 0"));
    }
    CHECK(*shifted.memory == before);
    OneMemory same(&bench, 0, origin, origin);
    CHECK(same.Run(MoveStep::kCompare).status.ok());
    CHECK(same.Run(MoveStep::kLocal).status.ok());
    CHECK_FALSE(same.Run(MoveStep::kCompare).witness);
    OneMemory apart(&bench, 64, origin, origin);
    CHECK(apart.Run(MoveStep::kLocal).status.ok());
  }
}

TEST_CASE(
    "sources in memory that can't be recognised are looked at before and after the first run") {
  Bench bench;
  const MemoryOrigin unknown{MemoryOrigin::Kind::kUnknown, 0, 0, 0};
  OneMemory shifted(&bench, 8, unknown, unknown);
  CHECK(shifted.Run(MoveStep::kCompare).witness);
  CHECK(shifted.Run(MoveStep::kWitness).status.ok());
  CHECK(shifted.Run(MoveStep::kLocal).status.ok());
  const absl::Status changed = shifted.Run(MoveStep::kWitness).status;
  CHECK(changed.code() == absl::StatusCode::kDataLoss);
  CHECK_THAT(std::string(changed.message()),
             Catch::Contains("tensor w of trainer rank 0: its bytes changed"));
  // The next update begins anew, and the binding is still to be looked at.
  shifted.daemon.executor.Forget(kUpdate);
  CHECK(shifted.Run(MoveStep::kCompare).witness);
  CHECK(shifted.Run(MoveStep::kWitness).status.ok());

  OneMemory apart(&bench, 64, unknown, unknown);
  CHECK(apart.Run(MoveStep::kCompare).witness);
  for (const MoveStep step : {MoveStep::kWitness, MoveStep::kLocal, MoveStep::kWitness}) {
    CHECK(apart.Run(step).status.ok());
  }
  apart.daemon.executor.Forget(kUpdate);
  CHECK_FALSE(apart.Run(MoveStep::kCompare).witness);
}

TEST_CASE("Memory and layouts that don't fit the program are refused before anything moves") {
  Bench bench;
  const auto cluster = MixedCluster(&bench.transport);
  Daemon& daemon =
      **std::find_if(cluster->daemons.begin(), cluster->daemons.end(),
                     [](const auto& d) { return !d->bound->program->local.moves.empty(); });
  const auto good = daemon.bound;
  const CopyMove& move = good->program->local.moves[0];
  const auto change = [&](const auto& edit) {
    auto bound = std::make_shared<BoundProgram>(*good);
    auto layout = std::make_shared<Layout>(*good->source_layouts[move.source]);
    edit(bound.get(), layout.get());
    bound->source_layouts[move.source] = layout;
    daemon.bound = bound;
    const absl::Status status = daemon.Refused(daemon.Step(MoveStep::kLocal, Verification::kOff));
    daemon.bound = good;
    return status.code();
  };
  CHECK(change([&](BoundProgram*, Layout* l) { l->pieces.clear(); }) ==
        absl::StatusCode::kFailedPrecondition);
  CHECK(change([&](BoundProgram*, Layout* l) {
          l->tensors.Edit()[l->pieces[move.source_piece].tensor].name += "x";
        }) == absl::StatusCode::kFailedPrecondition);
  CHECK(change([&](BoundProgram*, Layout* l) {
          l->pieces[move.source_piece].byte_offset += 1 << 20;
        }) == absl::StatusCode::kInternal);
  CHECK(change([&](BoundProgram*, Layout* l) { l->pieces[move.source_piece].byte_offset = -8; }) ==
        absl::StatusCode::kInternal);
  CHECK(change([&](BoundProgram* b, Layout*) { b->destinations.pop_back(); }) ==
        absl::StatusCode::kInternal);
  CHECK(change([&](BoundProgram* b, Layout*) { b->sources[move.source] = MemberId(5); }) ==
        absl::StatusCode::kNotFound);

  const auto sender =
      std::find_if(cluster->daemons.begin(), cluster->daemons.end(),
                   [](const auto& d) { return !d->bound->program->outgoing.empty(); });
  StartMoves pack = (*sender)->Step(MoveStep::kPack, Verification::kOff);
  pack.round = (*sender)->bound->program->rounds;
  CHECK((*sender)->Refused(pack).code() == absl::StatusCode::kInvalidArgument);
  pack.round = -1;
  CHECK((*sender)->Refused(pack).code() == absl::StatusCode::kInvalidArgument);
  pack.round = 0;
  (*sender)->memory.slots[0]->resize(32);
  CHECK((*sender)->Refused(pack).code() == absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace refitd
