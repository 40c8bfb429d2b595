#include "daemon/execute/executor.h"

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <catch2/catch.hpp>
#include <chrono>
#include <cstring>
#include <future>
#include <optional>
#include <string>
#include <thread>

#include "transport/cuda/relay_plan.h"
#include "transport/host/host_transport.h"
#include "transport/unprepared_transport_testing.h"

namespace refitd {
namespace {

constexpr std::chrono::seconds kDeadline{20};
constexpr MemberId kTrainer(1);

// All of the bucket as one part, packed at these offsets.
std::shared_ptr<const PartContent> PartOf(const CheckedBucket& bucket, std::vector<int64_t> offsets,
                                          int64_t bytes) {
  return std::make_shared<const PartContent>(PartContent{
      std::make_shared<const CheckedBucket>(bucket), bucket.ranges, std::move(offsets), bytes});
}

// The memory of members and slots is in strings of this test.
class TestMemory : public MemoryResolver {
 public:
  absl::StatusOr<MemorySpan> Region(MemberId member, RegionId region) const override {
    const auto it = regions.find({member, region});
    if (it == regions.end()) return absl::NotFoundError("no such region");
    const auto origin = origins.find(member);
    const auto at = elsewhere.find({member, region});
    return MemorySpan{at == elsewhere.end() ? it->second->data() : at->second,
                      static_cast<int64_t>(it->second->size()), it->second,
                      origin == origins.end() ? MemoryOrigin() : origin->second};
  }
  absl::StatusOr<MemorySpan> Slot(SlotIndex slot) const override {
    return MemorySpan{slots.at(slot.value())->data(),
                      static_cast<int64_t>(slots.at(slot.value())->size()), slots.at(slot.value())};
  }
  absl::StatusOr<MemorySpan> SlotOf(MemberId member, SlotIndex slot) const override {
    const auto it = devices.find(member);
    if (it == devices.end()) return Slot(slot);
    std::string& pool = *device_slots.at(it->second).at(slot.value());
    return MemorySpan{pool.data(), static_cast<int64_t>(pool.size()),
                      device_slots[it->second][slot.value()]};
  }
  std::optional<int> DeviceOf(MemberId member) const override {
    const auto it = devices.find(member);
    return it == devices.end() ? std::nullopt : std::optional<int>(static_cast<int>(it->second));
  }
  // The device of an address; -1: none.
  int Holding(const char* data) const {
    const auto holds = [data](const std::string& bytes) {
      return data >= bytes.data() && data < bytes.data() + bytes.size();
    };
    for (size_t d = 0; d < device_slots.size(); ++d) {
      for (const auto& slot : device_slots[d]) {
        if (holds(*slot)) return static_cast<int>(d);
      }
    }
    for (const auto& [key, bytes] : regions) {
      if (holds(*bytes)) return DeviceOf(key.first).value_or(-1);
    }
    return -1;
  }
  std::map<std::pair<MemberId, RegionId>, std::shared_ptr<std::string>> regions;
  // A region named here lies at this address and not in its string, whose size it has.
  std::map<std::pair<MemberId, RegionId>, char*> elsewhere;
  std::map<MemberId, MemoryOrigin> origins;
  std::vector<std::shared_ptr<std::string>> slots;
  std::map<MemberId, size_t> devices;  // not listed: host memory
  std::vector<std::vector<std::shared_ptr<std::string>>> device_slots;
};

// The host transport with a wrong source offset planted in one move of a program. The offset stays
// inside the source piece, since an offset outside of it would be refused outright.
class WrongOffset : public UnpreparedTransport {
 public:
  explicit WrongOffset(Transport* transport) : transport_(transport) {}
  void Submit(Transfer transfer, std::function<void(TransferResult)> done) override {
    ++submitted;
    if (planted_bytes != 0) transfer.plan.moves.at(move).source_byte_offset += planted_bytes;
    transport_->Submit(std::move(transfer), std::move(done));
  }
  void Submit(ReadbackJob job, std::function<void(ReadbackResult)> done) override {
    transport_->Submit(std::move(job), std::move(done));
  }
  int submitted = 0;
  size_t move = 1;  // moves the right half of the matrix
  int64_t planted_bytes = 0;

 private:
  Transport* const transport_;
};

// Broadcasts through slots like a transport with devices, over this test's memory.
class Relaying : public UnpreparedTransport {
 public:
  Relaying(Transport* transport, const TestMemory* memory)
      : transport_(transport), memory_(memory) {}
  absl::Status CanBroadcast(BroadcastMethod method) const override {
    if (method == BroadcastMethod::kDirect || method == BroadcastMethod::kChain) {
      return absl::OkStatus();
    }
    return absl::UnimplementedError("no such method here");
  }
  void Submit(Transfer transfer, std::function<void(TransferResult)> done) override {
    if (!transfer.broadcast.has_value()) {
      return transport_->Submit(std::move(transfer), std::move(done));
    }
    slots.clear();
    for (const MemorySpan& slot : transfer.broadcast->slots) {
      slots.push_back(slot.data);
      for (size_t i = 0; i < transfer.source.size(); ++i) {
        const BoundPiece& piece = transfer.source[i];
        std::memcpy(slot.data + transfer.broadcast->byte_offsets[i], piece.data,
                    static_cast<size_t>(ElementCount(piece.box) * ElementBytes(piece.dtype)));
      }
    }
    transport_->Submit(
        FromSlots(std::move(transfer), [this](const char* data) { return memory_->Holding(data); }),
        std::move(done));
  }
  void Submit(ReadbackJob job, std::function<void(ReadbackResult)> done) override {
    transport_->Submit(std::move(job), std::move(done));
  }
  std::vector<char*> slots;  // of the last broadcast

 private:
  Transport* const transport_;
  const TestMemory* const memory_;
};

// Flips a bit of one byte right after it was stored.
class FlipByte : public TransferFaults {
 public:
  void AfterStore(char* data, int64_t bytes) override {
    if (target >= data && target < data + bytes) *target = static_cast<char>(*target ^ 0x20);
  }
  char* target = nullptr;
};

// One trainer's region with two tensors, two engine ranks (one holds both whole, the other the
// right half of the matrix and all of the vector), and a slot.
class Bench {
 public:
  Bench() {
    tensors_ = {{"matrix", DType::kBFloat16, {6, 8}}, {"vector", DType::kFloat32, {10}}};
    std::string source(96 + 40 + 16, '\0');  // some bytes follow those that are carried
    for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<char>(i * 7 + 1);
    memory.regions[{kTrainer, RegionId(1)}] = std::make_shared<std::string>(source);
    memory.slots.push_back(std::make_shared<std::string>(4096, '-'));
    AddEngine(Box{{0, 0}, {6, 8}});
    AddEngine(Box{{0, 4}, {6, 4}});
    auto made = DestinationIndex::Make({layouts_.begin(), layouts_.end()}, {"whole", "half"});
    REQUIRE(made.ok());
    index_ = *made;
  }

  // Runs the bucket through the executor, to both engines and into the slot.
  Executor::Done Transfer(Verification verification) {
    std::promise<Executor::Done> promise;
    auto done = promise.get_future();
    int64_t holders = 0;
    REQUIRE(Begin(verification, [&](Executor::Done d) {
              holders = memory.regions.at({kTrainer, RegionId(1)}).use_count();
              promise.set_value(std::move(d));
            }).ok());
    REQUIRE(done.wait_for(kDeadline) == std::future_status::ready);
    Executor::Done result = done.get();
    CHECK(holders == 1);  // P8: its owner alone, so that it closes when the owner lets go
    executor_.Finished(result);
    return result;
  }
  absl::Status Refused() {
    return Begin(Verification::kOff, [](const Executor::Done& /*done*/) {});
  }
  absl::Status Begin(Verification verification, std::function<void(Executor::Done)> done) {
    CheckedBucket bucket;
    bucket.tensors = tensors_;
    bucket.ranges = {{0, 0, 48}, {1, 0, 10}};
    bucket.bytes = 136;
    bucket.source = CheckedBucket::Source::kRegions;
    bucket.places = {{nullptr, RegionId(1), 0}, {nullptr, RegionId(1), 96}};
    StartTransfer start;
    start.update = UpdateId(1);
    start.version = Version(1);
    start.trainer = kTrainer;
    start.bucket_call = CallId(1);
    start.content = PartOf(bucket, {0, 512}, 552);
    start.fill_slot = SlotGrant{SlotIndex(0), GrantId(1)};
    start.index = index_;
    start.destinations = engines_;
    start.skip_destination = {false, false};
    start.verification = verification;
    start.broadcast = broadcast;
    return executor_.Start(start, memory, std::move(done));
  }

  VerifyDone Verify() {
    StartVerify verify{UpdateId(1), Version(1), index_, engines_, {false, false}};
    std::promise<VerifyDone> promise;
    auto done = promise.get_future();
    REQUIRE(
        executor_
            .Start(verify, memory, [&promise](VerifyDone d) { promise.set_value(std::move(d)); })
            .ok());
    REQUIRE(done.wait_for(kDeadline) == std::future_status::ready);
    return done.get();
  }

  // The digest of what the engine's memory holds, read with the tensors in either order.
  uint64_t Digest(size_t engine, bool reversed = false) {
    auto layout = std::make_shared<Layout>(*layouts_[engine]);
    if (reversed) {
      std::swap(layout->tensors.Edit()[0], layout->tensors.Edit()[1]);
      for (Piece& piece : layout->pieces) piece.tensor = 1 - piece.tensor;
      std::swap(layout->pieces[0], layout->pieces[1]);
    }
    std::promise<uint64_t> promise;
    auto done = promise.get_future();
    const absl::Status started = executor_.Digest(
        engines_[engine], layout, memory,
        [&promise](const absl::StatusOr<uint64_t>& d) { promise.set_value(d.value_or(0)); });
    REQUIRE(started.ok());
    REQUIRE(done.wait_for(kDeadline) == std::future_status::ready);
    return done.get();
  }

  void NextUpdate() { executor_.Forget(UpdateId(1)); }
  void Release(size_t engine) { executor_.Release(engines_[engine]); }
  // Waits until `holders` references hold the engine's memory, its owner included, which happens
  // once the transport's threads let go.
  bool HasHolders(size_t i, int64_t holders) const {
    const auto deadline = std::chrono::steady_clock::now() + kDeadline;
    const auto& held = memory.regions.at({engines_[i], RegionId(10 + i)});
    while (held.use_count() != holders) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }

  std::string& source() { return *memory.regions.at({kTrainer, RegionId(1)}); }
  std::string& engine(size_t i) { return *memory.regions.at({engines_[i], RegionId(10 + i)}); }
  std::string& slot() { return *memory.slots[0]; }

  // Requires that all destinations hold the source's bytes and that nothing around them changed.
  void RequireInstalled() {
    const std::string matrix = source().substr(0, 96);
    const std::string vector = source().substr(96, 40);
    std::string halves;
    for (size_t row = 0; row < 6; ++row) halves += matrix.substr(row * 16 + 8, 8);
    REQUIRE(engine(0) == std::string(64, '.') + matrix + vector + "....");
    REQUIRE(engine(1) == std::string(64, '.') + halves + vector + "....");
    REQUIRE(slot().substr(0, 96) == matrix);
    REQUIRE(slot().substr(96, 416) == std::string(416, '-'));
    REQUIRE(slot().substr(512, 40) == vector);
  }

  // Puts the trainer on device 0 and the engines on 1 and 2, with a slot on each.
  void OnDevices() {
    memory.devices = {{kTrainer, 0}, {engines_[0], 1}, {engines_[1], 2}};
    for (int device = 0; device < 3; ++device) {
      memory.device_slots.push_back({std::make_shared<std::string>(4096, '-')});
    }
  }
  char* slot_on(size_t device) { return memory.device_slots[device][0]->data(); }
  // Requires that both slots and an engine hold the source's bytes.
  void RequireBroadcast() {
    for (const size_t device : {1, 2}) {
      const std::string& filled = *memory.device_slots[device][0];
      REQUIRE(filled.substr(0, 96) == source().substr(0, 96));
      REQUIRE(filled.substr(512, 40) == source().substr(96, 40));
    }
    REQUIRE(engine(0).substr(64, 136) == source().substr(0, 136));
    REQUIRE(engine(1).substr(64, 8) == source().substr(8, 8));
  }

  TestMemory memory;
  FlipByte flip;
  BroadcastMethod broadcast = BroadcastMethod::kDirect;

 private:
  void AddEngine(const Box& matrix) {
    const MemberId member(10 + engines_.size());
    const RegionId region(10 + engines_.size());
    auto layout = std::make_shared<Layout>();
    layout->tensors = tensors_;
    const int64_t matrix_bytes = 2 * ElementCount(matrix);
    layout->pieces.push_back({0, matrix, region, 64, RowMajorStrides(matrix.extent)});
    layout->pieces.push_back({1, WholeBox({10}), region, 64 + matrix_bytes, {1}});
    memory.regions[{member, region}] =
        std::make_shared<std::string>(static_cast<size_t>(64 + matrix_bytes + 40 + 4), '.');
    layouts_.push_back(std::move(layout));
    engines_.push_back(member);
  }

  std::vector<TensorSpec> tensors_;
  std::vector<std::shared_ptr<const Layout>> layouts_;
  std::vector<MemberId> engines_;
  std::shared_ptr<const DestinationIndex> index_;
  const std::unique_ptr<Transport> host_ = MakeHostTransport({.threads = 2, .faults = &flip});

 public:
  WrongOffset transport{host_.get()};
  Relaying relays{&transport, &memory};

 private:
  Executor executor_{&relays};
};

TEST_CASE("a transfer writes every destination and the slot, and reads back as written") {
  Bench bench;
  for (const Verification verification :
       {Verification::kOff, Verification::kTransfer, Verification::kReadback}) {
    const Executor::Done done = bench.Transfer(verification);
    REQUIRE(done.status.ok());
    CHECK(done.bytes_written == std::vector<int64_t>{136, 88});
    bench.RequireInstalled();
  }
  const VerifyDone verified = bench.Verify();
  CHECK(verified.status.ok());
  CHECK(verified.failed_destinations.empty());
}

// A page that is mapped at two addresses, as two processes have it.
struct TwiceMapped {
  static constexpr size_t kBytes = 4096;
  TwiceMapped() {
    const int fd = memfd_create("twice", MFD_CLOEXEC);
    REQUIRE(ftruncate(fd, kBytes) == 0);
    for (char*& address : addresses) {
      void* const at = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      REQUIRE(at != MAP_FAILED);
      address = static_cast<char*>(at);
    }
    close(fd);
  }
  TwiceMapped(const TwiceMapped&) = delete;
  TwiceMapped& operator=(const TwiceMapped&) = delete;
  ~TwiceMapped() {
    for (char* const address : addresses) munmap(address, kBytes);
  }
  std::array<char*, 2> addresses{};
};

TEST_CASE(
    "a push from memory that can't be recognised is read before and after it moves, the first "
    "time") {
  const MemoryOrigin exported{MemoryOrigin::Kind::kExported, 0, 77, 1 << 20};
  const auto elsewhere = [&](Bench* bench) {
    bench->memory.origins = {{kTrainer, {MemoryOrigin::Kind::kUnknown, 0, 0, 0}},
                             {MemberId(10), exported}};
  };
  // The engine's matrix begins 64 bytes behind the trainer's, in the same memory, which each of the
  // two has at an address of its own.
  Bench shifted;
  elsewhere(&shifted);
  const TwiceMapped memory;
  shifted.memory.elsewhere = {{{kTrainer, RegionId(1)}, memory.addresses[0]},
                              {{MemberId(10), RegionId(10)}, memory.addresses[1]}};
  for (int update = 0; update < 2; ++update) {  // what changed is looked at again
    for (size_t b = 0; b < 512; ++b) {
      memory.addresses[0][b] = static_cast<char>(b * 7 + b / 64 * 31);
    }
    const absl::Status changed = shifted.Transfer(Verification::kOff).status;
    CHECK(changed.code() == absl::StatusCode::kDataLoss);
    CHECK_THAT(std::string(changed.message()), Catch::Contains("tensor matrix: its bytes changed"));
    shifted.NextUpdate();
  }
  Bench apart;
  elsewhere(&apart);
  CHECK(apart.Transfer(Verification::kReadback).status.ok());
  apart.RequireInstalled();
  CHECK(apart.Verify().status.ok());
  CHECK(apart.transport.submitted == 3);
  apart.NextUpdate();
  CHECK(apart.Transfer(Verification::kOff).status.ok());
  CHECK(apart.transport.submitted == 4);
}

TEST_CASE("a wrong source offset planted in a program is caught by transfer") {
  Bench bench;
  bench.transport.planted_bytes = -2;
  // Without verification the wrong bytes pass: the planted bug works.
  REQUIRE(bench.Transfer(Verification::kOff).status.ok());
  REQUIRE(bench.engine(0).substr(64, 96) == bench.source().substr(0, 96));
  REQUIRE(bench.engine(1).substr(64, 8) == bench.source().substr(6, 8));

  const Executor::Done done = bench.Transfer(Verification::kTransfer);
  CHECK(done.status.code() == absl::StatusCode::kDataLoss);
  CHECK_THAT(std::string(done.status.message()), Catch::Contains("matrix"));
  CHECK(done.failed_destination == 1);
}

TEST_CASE("a wrong source offset planted in a program is caught by readback too") {
  Bench bench;
  bench.transport.planted_bytes = -2;
  REQUIRE(bench.Transfer(Verification::kReadback).status.ok());
  const VerifyDone verified = bench.Verify();
  CHECK(verified.status.code() == absl::StatusCode::kDataLoss);
  CHECK_THAT(std::string(verified.status.message()), Catch::Contains("matrix"));
  CHECK(verified.failed_destinations == std::vector<uint32_t>{1});
}

TEST_CASE("memory that was read back has the digest that came with its version, while it is so") {
  Bench bench;
  REQUIRE(bench.Transfer(Verification::kReadback).status.ok());
  const VerifyDone verified = bench.Verify();
  REQUIRE(verified.content.size() == 2);
  CHECK(verified.content[0] != verified.content[1]);
  for (const size_t engine : {size_t{0}, size_t{1}}) {
    CHECK(verified.content[engine] != 0);
    CHECK(bench.Digest(engine) == verified.content[engine]);
    CHECK(bench.Digest(engine, /*reversed=*/true) == verified.content[engine]);
  }
  // The digests are kept with what was prepared, and are the same for the same bytes.
  bench.NextUpdate();
  REQUIRE(bench.Transfer(Verification::kReadback).status.ok());
  CHECK(bench.Verify().content == verified.content);
  bench.engine(1)[64] ^= 1;  // one bit of the first element
  CHECK(bench.Digest(1) != verified.content[1]);
  CHECK(bench.Digest(0) == verified.content[0]);
}

TEST_CASE("a byte flipped in a destination after the copy is caught by readback, and only by it") {
  Bench bench;
  bench.flip.target = &bench.engine(1)[64 + 48 + 13];  // a byte of the vector
  REQUIRE(bench.Transfer(Verification::kTransfer).status.ok());
  REQUIRE(bench.Transfer(Verification::kReadback).status.ok());
  const VerifyDone verified = bench.Verify();
  CHECK(verified.status.code() == absl::StatusCode::kDataLoss);
  CHECK_THAT(std::string(verified.status.message()), Catch::Contains("vector"));
  CHECK(verified.failed_destinations == std::vector<uint32_t>{1});
}

TEST_CASE("a byte flipped in a slot is caught before any engine could read it") {
  Bench bench;
  bench.flip.target = &bench.slot()[512 + 5];
  const Executor::Done done = bench.Transfer(Verification::kReadback);
  CHECK(done.status.code() == absl::StatusCode::kDataLoss);
  CHECK_THAT(std::string(done.status.message()), Catch::Contains("vector"));
  CHECK(done.failed_destination == -1);  // a slot is no destination of the layouts
}

TEST_CASE("a broadcast fills the slot of each engine's device, and engines take it from there") {
  Bench bench;
  bench.OnDevices();
  bench.broadcast = BroadcastMethod::kChain;
  for (const Verification verification :
       {Verification::kOff, Verification::kTransfer, Verification::kReadback}) {
    for (char& byte : bench.source()) byte = static_cast<char>(byte + 13);
    const Executor::Done done = bench.Transfer(verification);
    INFO(done.status.ToString());
    REQUIRE(done.status.ok());
    CHECK(done.broadcast == BroadcastMethod::kChain);
    CHECK(bench.relays.slots == std::vector<char*>{bench.slot_on(1), bench.slot_on(2)});
    CHECK(done.bytes_written == std::vector<int64_t>{136, 88});
    CHECK(done.slot_bytes == 2 * 552);
    bench.RequireBroadcast();
    CHECK(bench.slot() == std::string(4096, '-'));  // the host's slot
  }
  CHECK(bench.Verify().status.ok());
}

TEST_CASE("a method that is not there is refused, and auto takes what is cheapest") {
  Bench bench;
  bench.OnDevices();
  bench.broadcast = BroadcastMethod::kNccl;
  CHECK(bench.Refused().code() == absl::StatusCode::kUnimplemented);
  // A hundred bytes are not worth a broadcast; the slot stays untouched, since no rank reads it.
  bench.broadcast = BroadcastMethod::kAuto;
  const Executor::Done done = bench.Transfer(Verification::kTransfer);
  REQUIRE(done.status.ok());
  CHECK(done.broadcast == BroadcastMethod::kDirect);
  CHECK(done.slot_bytes == 0);
  CHECK(bench.slot() == std::string(4096, '-'));
  // Host memory is on no device from which to broadcast.
  Bench host;
  host.broadcast = BroadcastMethod::kChain;
  const Executor::Done direct = host.Transfer(Verification::kTransfer);
  REQUIRE(direct.status.ok());
  CHECK(direct.broadcast == BroadcastMethod::kDirect);
}

TEST_CASE("what is read back is kept for the next update, and let go with a member") {
  Bench bench;
  for (int update = 0; update < 3; ++update) {
    for (char& byte : bench.source()) byte = static_cast<char>(byte + 13);
    REQUIRE(bench.Transfer(Verification::kReadback).status.ok());
    bench.RequireInstalled();
    const VerifyDone verified = bench.Verify();
    INFO(verified.status.ToString());
    CHECK(verified.status.ok());
    bench.engine(1)[64 + 48 + 13] ^= 1;
    CHECK(bench.Verify().failed_destinations == std::vector<uint32_t>{1});
    bench.engine(1)[64 + 48 + 13] ^= 1;
    bench.NextUpdate();
  }
  CHECK(bench.HasHolders(0, 2));
  CHECK(bench.HasHolders(1, 2));
  bench.Release(0);
  CHECK(bench.HasHolders(0, 1));
  CHECK(bench.HasHolders(1, 1));
}

// Members 20 and 21 on device 0 and 22 on device 1, all staged; one slot on each device.
class LoaderBench {
 public:
  LoaderBench() {
    memory.devices = {{MemberId(20), 0}, {MemberId(21), 0}, {MemberId(22), 1}};
    for (int device = 0; device < 2; ++device) {
      memory.device_slots.push_back({std::make_shared<std::string>(64, '-')});
    }
    // Slots that cross to other daemons are those of device 1.
    memory.slots = memory.device_slots[1];
    memory.regions[{kTrainer, RegionId(1)}] = std::make_shared<std::string>("12345678");
  }

  // `wired`: the part is sent to other daemons as well.
  Executor::Done Run(CheckedBucket::Source source, const std::vector<MemberId>& readers,
                     bool wired = false) {
    const bool slot = source == CheckedBucket::Source::kSlot;
    StartTransfer start = Part(readers, source);
    start.bucket_call = CallId(1);
    start.trainer = kTrainer;
    (slot ? start.source_slot : start.fill_slot) = kGrant;
    start.wired = wired;
    return Run(start);
  }
  // Runs a part that another daemon sent into the slot of device 1.
  Executor::Done RunCrossed(const std::vector<MemberId>& readers) {
    StartTransfer start = Part(readers, CheckedBucket::Source::kNone);
    start.source_slot = kGrant;
    start.want_source_digests = true;
    return Run(start);
  }
  std::string& slot(size_t device) { return *memory.device_slots[device][0]; }

  TestMemory memory;

 private:
  static constexpr SlotGrant kGrant{SlotIndex(0), GrantId(1)};

  static StartTransfer Part(const std::vector<MemberId>& readers, CheckedBucket::Source source) {
    CheckedBucket bucket;
    bucket.tensors = {{"t", DType::kUint8, {8}}};
    bucket.ranges = {{0, 0, 8}};
    bucket.source = source;
    const bool slot = source == CheckedBucket::Source::kSlot;
    bucket.places = {{nullptr, RegionId(1), slot ? 16 : 0}};
    StartTransfer start;
    start.content = PartOf(bucket, {16}, 24);
    start.readers = readers;
    start.verification = Verification::kReadback;
    return start;
  }
  Executor::Done Run(const StartTransfer& start) {
    std::promise<Executor::Done> promise;
    auto done = promise.get_future();
    REQUIRE(
        executor_
            .Start(start, memory, [&promise](Executor::Done d) { promise.set_value(std::move(d)); })
            .ok());
    REQUIRE(done.wait_for(kDeadline) == std::future_status::ready);
    return done.get();
  }

  const std::unique_ptr<Transport> host_ = MakeHostTransport({.threads = 1});
  Executor executor_{host_.get()};
};

const std::string kPacked = std::string(16, '-') + "12345678" + std::string(40, '-');

TEST_CASE("a part is packed once on each device that has loader readers") {
  LoaderBench bench;
  const auto readers = {MemberId(20), MemberId(21), MemberId(22)};
  const Executor::Done done = bench.Run(CheckedBucket::Source::kRegions, readers);
  REQUIRE(done.status.ok());
  CHECK(done.slot_bytes == 48);
  CHECK(bench.slot(0) == kPacked);
  CHECK(bench.slot(1) == kPacked);

  LoaderBench one;
  CHECK(one.Run(CheckedBucket::Source::kRegions, {MemberId(21)}).slot_bytes == 24);
  CHECK(one.slot(0) == kPacked);
  CHECK(one.slot(1) == std::string(64, '-'));
}

TEST_CASE("a leased slot is copied to the other devices of its readers, and not to its own") {
  LoaderBench bench;
  bench.memory.devices[kTrainer] = 1;
  bench.slot(1) = kPacked;
  const auto readers = {MemberId(20), MemberId(21), MemberId(22)};
  const Executor::Done done = bench.Run(CheckedBucket::Source::kSlot, readers);
  REQUIRE(done.status.ok());
  CHECK(done.slot_bytes == 24);
  CHECK(bench.slot(0) == kPacked);

  LoaderBench own;
  own.memory.devices[kTrainer] = 1;
  CHECK(own.Run(CheckedBucket::Source::kSlot, {MemberId(22)}).slot_bytes == 0);
  CHECK(own.slot(0) == std::string(64, '-'));
}

TEST_CASE(
    "a part that is sent to other daemons is packed for readers here as well, once a device") {
  LoaderBench other;
  CHECK(other.Run(CheckedBucket::Source::kRegions, {MemberId(20)}, true).slot_bytes == 48);
  CHECK(other.slot(0) == kPacked);
  CHECK(other.slot(1) == kPacked);

  LoaderBench same;
  CHECK(same.Run(CheckedBucket::Source::kRegions, {MemberId(22)}, true).slot_bytes == 24);
  CHECK(same.slot(0) == std::string(64, '-'));
  CHECK(same.slot(1) == kPacked);

  LoaderBench leased;
  leased.memory.devices[kTrainer] = 0;
  leased.slot(0) = kPacked;
  const auto readers = {MemberId(20), MemberId(22)};
  CHECK(leased.Run(CheckedBucket::Source::kSlot, readers, true).slot_bytes == 24);
  CHECK(leased.slot(1) == kPacked);
}

TEST_CASE("what came from another daemon is packed on the other devices of its readers") {
  LoaderBench bench;
  bench.slot(1) = kPacked;
  const auto readers = {MemberId(20), MemberId(21), MemberId(22)};
  const Executor::Done done = bench.RunCrossed(readers);
  REQUIRE(done.status.ok());
  CHECK(done.slot_bytes == 24);
  CHECK(bench.slot(0) == kPacked);
  REQUIRE(done.digests.size() == 1);

  // If the readers' device has the slot already, the slot is read only for its digest.
  LoaderBench own;
  own.slot(1) = kPacked;
  const Executor::Done same = own.RunCrossed({MemberId(22)});
  REQUIRE(same.status.ok());
  CHECK(same.slot_bytes == 0);
  CHECK(own.slot(0) == std::string(64, '-'));
  CHECK(same.digests == done.digests);
}

TEST_CASE("memory that is gone fails the transfer before it starts") {
  Bench bench;
  bench.memory.regions.clear();
  Executor executor(&bench.transport);
  CheckedBucket bucket;
  bucket.tensors = {{"t", DType::kUint8, {4}}};
  bucket.ranges = {{0, 0, 4}};
  bucket.source = CheckedBucket::Source::kRegions;
  bucket.places = {{nullptr, RegionId(1), 0}};
  StartTransfer start;
  start.trainer = kTrainer;
  start.bucket_call = CallId(1);
  start.content = PartOf(bucket, {0}, 4);
  bool called = false;
  CHECK(executor.Start(start, bench.memory, [&](const Executor::Done&) { called = true; }).code() ==
        absl::StatusCode::kNotFound);
  CHECK(!called);
}

}  // namespace
}  // namespace refitd
