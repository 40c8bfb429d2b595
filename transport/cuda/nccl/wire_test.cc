#include "transport/cuda/nccl/wire.h"

#include <catch2/catch.hpp>

#include "transport/base/failure.h"

#if defined(REFITD_CUDA)
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "transport/base/eventually_testing.h"
#include "transport/cuda/fakes/fake_cuda.h"
#include "transport/cuda/fakes/fake_nccl.h"
#include "transport/cuda/nccl/nccl.h"
#endif

namespace refitd {
namespace {

#if !defined(REFITD_CUDA)

TEST_CASE("where CUDA is not compiled in there is no wire over it") {
  CHECK(MakeNcclWire(nullptr, nullptr, {}).status().code() == absl::StatusCode::kUnimplemented);
}

#else

using Catch::Matchers::Contains;
constexpr Duration kPlenty = std::chrono::seconds(20);  // only a failing test reaches it
constexpr Duration kShort = std::chrono::milliseconds(30);
constexpr int64_t kBytes = 1 << 16;
constexpr CommunicatorId kCommunicator(7);
constexpr int kRails = 3;  // devices of a daemon

struct Outcome {
  std::shared_ptr<std::promise<absl::Status>> promise =
      std::make_shared<std::promise<absl::Status>>();
  std::future<absl::Status> future = promise->get_future();
  std::function<void(absl::Status)> done() {
    return [promise = promise](absl::Status status) { promise->set_value(std::move(status)); };
  }
  absl::Status Wait() {
    REQUIRE(future.wait_for(kTestDeadline) == std::future_status::ready);
    return future.get();
  }
};

// One daemon for each rank, with a wire on devices of its own and a slot on the first: daemon r has
// the devices r, r + size() and so on, of which it names as many as `rails` says.
class Daemons {
 public:
  explicit Daemons(int ranks, std::chrono::milliseconds limit = std::chrono::seconds(60),
                   std::chrono::milliseconds opening = std::chrono::seconds(20),
                   int64_t slot_bytes = kBytes) {
    cuda.Devices(ranks * kRails);
    nccl = std::make_unique<FakeNccl>();
    memory_ = CudaMemory::Create(FakeCuda::Path()).value();
    const NcclReport found = FindNccl(FakeNccl::Path());
    REQUIRE(found.api != nullptr);
    for (int rank = 0; rank < ranks; ++rank) {
      NcclWireOptions options;
      options.limit = limit;
      options.opening = opening;
      options.lost = [this](const absl::Status&) { ++losses; };
      wires.push_back(MakeNcclWire(found.api, memory_, options).value());
      rails.push_back(1);
      pools.push_back(memory_->MakePool(rank, slot_bytes).value());
    }
  }
  ~Daemons() {
    pools.clear();
    wires.clear();
  }

  std::vector<std::string> Open(CommunicatorId communicator = kCommunicator) {
    std::vector<std::string> addresses;
    for (int rank = 0; rank < size(); ++rank) {
      auto address =
          wires[static_cast<size_t>(rank)]->OpenOn(DevicesOf(rank), communicator, rank, size());
      REQUIRE(address.ok());
      addresses.push_back(*address);
    }
    return addresses;
  }
  void Connect(CommunicatorId communicator = kCommunicator) {
    const std::vector<std::string> addresses = Open(communicator);
    std::vector<Outcome> outcomes(wires.size());
    for (size_t rank = 0; rank < wires.size(); ++rank) {
      wires[rank]->Connect(communicator, addresses, kPlenty, outcomes[rank].done());
    }
    for (Outcome& outcome : outcomes) REQUIRE(outcome.Wait().ok());
  }

  // The test can read and write device memory because the fake has it in host memory.
  char* slot(int rank) { return pools[static_cast<size_t>(rank)].region->data(); }
  MemorySpan Span(int rank, int64_t offset, int64_t bytes) {
    const auto& region = pools[static_cast<size_t>(rank)].region;
    return {region->data() + offset, bytes, region};
  }
  WireBroadcast Broadcast(int rank, int root, int64_t bytes, uint64_t seq, Duration timeout,
                          CommunicatorId communicator = kCommunicator) {
    return {.communicator = communicator,
            .seq = WireSeq(seq),
            .root = root,
            .memory = Span(rank, 0, bytes),
            .timeout = timeout};
  }
  std::vector<int> DevicesOf(int rank) const {
    std::vector<int> devices;
    for (int i = 0; i < rails.at(static_cast<size_t>(rank)); ++i)
      devices.push_back(rank + i * size());
    return devices;
  }
  int size() const { return static_cast<int>(wires.size()); }

  FakeCuda cuda;
  std::unique_ptr<FakeNccl> nccl;
  std::vector<std::unique_ptr<DeviceWire>> wires;
  std::vector<DevicePool> pools;
  std::vector<int> rails;  // by rank
  std::atomic<int> losses = 0;

 private:
  std::shared_ptr<CudaMemory> memory_;
};

TEST_CASE("broadcasts from every rank bring its bytes to all") {
  std::mt19937_64 random(4711);
  Daemons daemons(3);
  daemons.Connect();
  for (uint64_t seq = 0; seq < 12; ++seq) {
    const int root = static_cast<int>(seq % 3);
    const int64_t bytes = seq == 5 ? 0 : static_cast<int64_t>(random() % kBytes + 1);
    std::vector<char> sent(static_cast<size_t>(bytes));
    for (char& byte : sent) byte = static_cast<char>(random());
    for (int rank = 0; rank < 3; ++rank) std::memset(daemons.slot(rank), 0x5a, kBytes);
    std::copy(sent.begin(), sent.end(), daemons.slot(root));
    std::vector<Outcome> outcomes(3);
    for (int rank = 0; rank < 3; ++rank) {
      daemons.wires[static_cast<size_t>(rank)]->Submit(
          daemons.Broadcast(rank, root, bytes, seq, kPlenty),
          outcomes[static_cast<size_t>(rank)].done());
    }
    for (Outcome& outcome : outcomes) REQUIRE(outcome.Wait().ok());
    for (int rank = 0; rank < 3; ++rank) {
      REQUIRE(std::equal(sent.begin(), sent.end(), daemons.slot(rank)));
      if (bytes < kBytes) REQUIRE(daemons.slot(rank)[bytes] == 0x5a);
    }
  }
  CHECK(daemons.wires[0]->Stats().bytes_sent > 0);
  CHECK(daemons.wires[0]->Stats().bytes_received > 0);
  CHECK(daemons.wires[0]->Stats(kCommunicator).bytes_sent == daemons.wires[0]->Stats().bytes_sent);
}

TEST_CASE("exchanges bring each leg to its peer, all at once") {
  Daemons daemons(3);
  daemons.Connect();
  // Rank r sends 100 * (r + 1) bytes of value r to both others, into the quarter of the sender.
  constexpr int64_t kQuarter = kBytes / 4;
  for (uint64_t seq = 0; seq < 5; ++seq) {
    std::vector<Outcome> outcomes(3);
    for (int rank = 0; rank < 3; ++rank) {
      std::memset(daemons.slot(rank), 0x5a, kBytes);
      std::memset(daemons.slot(rank) + 3 * kQuarter, rank, kQuarter);
    }
    for (int rank = 0; rank < 3; ++rank) {
      WireExchange exchange{.communicator = kCommunicator,
                            .seq = WireSeq(seq),
                            .sends = {},
                            .receives = {},
                            .timeout = kPlenty};
      for (int peer = 0; peer < 3; ++peer) {
        if (peer == rank) continue;
        exchange.sends.push_back({peer, daemons.Span(rank, 3 * kQuarter, 100 * (rank + 1))});
        exchange.receives.push_back({peer, daemons.Span(rank, peer * kQuarter, 100 * (peer + 1))});
      }
      daemons.wires[static_cast<size_t>(rank)]->Submit(std::move(exchange),
                                                       outcomes[static_cast<size_t>(rank)].done());
    }
    for (Outcome& outcome : outcomes) REQUIRE(outcome.Wait().ok());
    for (int rank = 0; rank < 3; ++rank) {
      for (int peer = 0; peer < 3; ++peer) {
        if (peer == rank) continue;
        const char* const from = daemons.slot(rank) + peer * kQuarter;
        CHECK(std::all_of(from, from + 100 * (peer + 1), [peer](char c) { return c == peer; }));
        CHECK(from[100 * (peer + 1)] == 0x5a);
      }
    }
  }
}

TEST_CASE(
    "who waits for a peer that does not come is told by its deadline, and the communicator is "
    "lost") {
  Daemons daemons(2);
  daemons.Connect();
  Outcome late;
  daemons.wires[0]->Submit(daemons.Broadcast(0, 1, 100, 1, kShort), late.done());
  const absl::Status status = late.Wait();
  CHECK(status.code() == absl::StatusCode::kDeadlineExceeded);
  CHECK_THAT(std::string(status.message()), Contains("seq 1: rank 1"));
  Outcome next;
  daemons.wires[0]->Submit(daemons.Broadcast(0, 1, 100, 2, kPlenty), next.done());
  CHECK(next.Wait().code() == absl::StatusCode::kFailedPrecondition);
  daemons.wires[0]->Close(kCommunicator);
  daemons.wires[1]->Close(kCommunicator);
  // A new communicator works.
  daemons.Connect(CommunicatorId(8));
  Outcome outcomes[2];
  for (int rank = 0; rank < 2; ++rank) {
    daemons.wires[static_cast<size_t>(rank)]->Submit(
        daemons.Broadcast(rank, 0, 100, 1, kPlenty, CommunicatorId(8)), outcomes[rank].done());
  }
  CHECK(outcomes[0].Wait().ok());
  CHECK(outcomes[1].Wait().ok());
  CHECK(daemons.losses == 0);
}

TEST_CASE("an exchange that waits too long suspects the ranks that it waited for") {
  Daemons daemons(3);
  daemons.Connect();
  WireExchange exchange{.communicator = kCommunicator,
                        .seq = WireSeq(0),
                        .sends = {},
                        .receives = {},
                        .timeout = kShort};
  exchange.sends.push_back({1, daemons.Span(0, 0, 100)});
  exchange.receives.push_back({1, daemons.Span(0, 200, 100)});
  exchange.receives.push_back({2, daemons.Span(0, 400, 100)});
  Outcome late;
  daemons.wires[0]->Submit(std::move(exchange), late.done());
  const absl::Status status = late.Wait();
  CHECK(status.code() == absl::StatusCode::kDeadlineExceeded);
  CHECK_THAT(std::string(status.message()), Contains("exchange seq 0: ranks 1, 2"));
  CHECK(FailureOf(status).ranks == std::vector<int>{1, 2});
}

TEST_CASE("a rank that never connects costs the others their deadline alone") {
  Daemons daemons(2);
  const std::vector<std::string> addresses = daemons.Open();
  Outcome outcome;
  daemons.wires[0]->Connect(kCommunicator, addresses, kShort, outcome.done());
  CHECK(outcome.Wait().code() == absl::StatusCode::kDeadlineExceeded);
  CHECK(daemons.nccl->Count().comms == 0);
  CHECK(daemons.losses == 0);
}

TEST_CASE(
    "a communicator that is not connected by all leaves nobody listening for its ranks (P8)") {
  Daemons daemons(3);
  // Only the ranks in `comes` connect.
  const std::vector<int> comes = GENERATE(values<std::vector<int>>({{}, {1}, {0, 2}}));
  const std::vector<std::string> addresses = daemons.Open();
  CHECK(daemons.nccl->Count().listeners == 1);
  std::vector<Outcome> outcomes(comes.size());
  for (size_t i = 0; i < comes.size(); ++i) {
    daemons.wires[static_cast<size_t>(comes[i])]->Connect(kCommunicator, addresses, kShort,
                                                          outcomes[i].done());
  }
  for (Outcome& outcome : outcomes) CHECK(!outcome.Wait().ok());
  CHECK(daemons.nccl->Count().listeners == 1);
  CHECK(daemons.wires[0]->Abandoned() == 0);
  for (const auto& wire : daemons.wires) wire->Close(kCommunicator);
  CHECK(Eventually([&] { return daemons.nccl->Count().listeners == 0; }));
  for (const auto& wire : daemons.wires) {
    CHECK(Eventually([&] { return wire->Describe().empty(); }));
  }
  CHECK(daemons.wires[0]->Abandoned() == 1);
  CHECK(daemons.wires[1]->Abandoned() == 0);
  CHECK(daemons.nccl->Count().comms == 0);
  CHECK(daemons.cuda.Count().streams == 0);
  CHECK(daemons.cuda.Count().events == 0);
  // A communicator that all ranks connect leaves no listener behind.
  daemons.Connect(CommunicatorId(8));
  CHECK(daemons.nccl->Count().listeners == 0);
  daemons.wires.clear();
  CHECK(daemons.nccl->Count().comms == 0);
  CHECK(daemons.losses == 0);
}

TEST_CASE("an id that NCCL makes after the limit of its Open leaves nobody listening (P8)") {
  Daemons daemons(1, std::chrono::seconds(60), std::chrono::milliseconds(30));
  daemons.nccl->Block("ncclGetUniqueId");
  const absl::Status late = daemons.wires[0]->OpenOn({0}, kCommunicator, 0, 1).status();
  CHECK(late.code() == absl::StatusCode::kDeadlineExceeded);
  CHECK(daemons.wires[0]->Abandoned() == 0);
  daemons.nccl->Block("");
  CHECK(Eventually([&] { return daemons.wires[0]->Abandoned() == 1; }));
  CHECK(Eventually([&] {
    const FakeNcclCounts counts = daemons.nccl->Count();
    return counts.listeners == 0 && counts.comms == 0;
  }));
  CHECK(daemons.nccl->Count().aborts == 1);
  CHECK(daemons.losses == 0);
}

TEST_CASE("an id that NCCL makes after its wire was destroyed leaves nobody listening (P8)") {
  Daemons daemons(1, std::chrono::milliseconds(30), std::chrono::milliseconds(30));
  daemons.nccl->Block("ncclGetUniqueId");
  CHECK_FALSE(daemons.wires[0]->OpenOn({0}, kCommunicator, 0, 1).ok());
  daemons.wires.clear();  // the destructor waits for the call in vain
  CHECK(daemons.nccl->Count().listeners == 0);
  daemons.nccl->Block("");
  CHECK(Eventually([&] { return daemons.nccl->Count().aborts == 1; }));
  const FakeNcclCounts counts = daemons.nccl->Count();
  CHECK(counts.listeners == 0);
  CHECK(counts.comms == 0);
}

TEST_CASE("closing ends what runs, and gives back all") {
  Daemons daemons(2);
  daemons.Connect();
  const FakeCudaCounts connected = daemons.cuda.Count();
  CHECK(connected.streams == 2);
  Outcome running;
  Outcome queued;
  daemons.wires[0]->Submit(daemons.Broadcast(0, 1, 100, 1, kPlenty), running.done());
  daemons.wires[0]->Submit(daemons.Broadcast(0, 1, 100, 2, kPlenty), queued.done());
  daemons.wires[0]->Close(kCommunicator);
  daemons.wires[1]->Close(kCommunicator);
  CHECK(running.Wait().code() == absl::StatusCode::kCancelled);
  CHECK_FALSE(queued.Wait().ok());
  daemons.wires.clear();
  CHECK(daemons.nccl->Count().comms == 0);
  CHECK(daemons.cuda.Count().streams == 0);
  CHECK(daemons.cuda.Count().events == 0);
}

TEST_CASE("many communicators after one another leave nothing") {
  Daemons daemons(2);
  for (uint64_t communicator = 1; communicator <= 50; ++communicator) {
    daemons.Connect(CommunicatorId(communicator));
    Outcome outcomes[2];
    for (int rank = 0; rank < 2; ++rank) {
      daemons.wires[static_cast<size_t>(rank)]->Submit(
          daemons.Broadcast(rank, 0, 1000, 1, kPlenty, CommunicatorId(communicator)),
          outcomes[rank].done());
    }
    for (Outcome& outcome : outcomes) CHECK(outcome.Wait().ok());
    for (const auto& wire : daemons.wires) wire->Close(CommunicatorId(communicator));
  }
  daemons.wires.clear();
  CHECK(daemons.nccl->Count().comms == 0);
  CHECK(daemons.cuda.Count().streams == 0);
}

// The bytes that each rail of a daemon has carried.
std::vector<int64_t> CarriedBy(const DeviceWire& wire) {
  std::vector<int64_t> bytes;
  const std::vector<DeviceCommunicatorStatus> all = wire.Describe();
  for (const DeviceCommunicatorStatus::Rail& rail : all.at(0).rails)
    bytes.push_back(rail.moved.bytes_sent + rail.moved.bytes_received);
  return bytes;
}

constexpr int64_t kMiB = 1 << 20;

TEST_CASE("each rail carries an equal share, and few bytes cross by the first alone") {
  Daemons daemons(2, std::chrono::seconds(60), std::chrono::seconds(20), 8 * kMiB);
  daemons.rails = {kRails, kRails};
  daemons.Connect();
  CHECK(daemons.nccl->Count().comms == 2 * kRails);
  CHECK(daemons.nccl->Count().listeners == 0);
  std::mt19937_64 random(20261130);
  std::vector<int64_t> before(kRails);
  uint64_t seq = 0;
  for (const int64_t bytes : {int64_t{1}, kMiB, 2 * kMiB - 1, 2 * kMiB, 2 * kMiB + 4097,
                              3 * kMiB - 1, 3 * kMiB, 3 * kMiB + 5, 8 * kMiB}) {
    INFO(bytes);
    const int root = static_cast<int>(seq % 2);
    std::vector<char> sent(static_cast<size_t>(bytes));
    for (char& byte : sent) byte = static_cast<char>(random());
    for (int rank = 0; rank < 2; ++rank) std::memset(daemons.slot(rank), 0x5a, 8 * kMiB);
    std::copy(sent.begin(), sent.end(), daemons.slot(root));
    std::vector<Outcome> outcomes(2);
    for (int rank = 0; rank < 2; ++rank) {
      daemons.wires[static_cast<size_t>(rank)]->Submit(
          daemons.Broadcast(rank, root, bytes, seq, kPlenty),
          outcomes[static_cast<size_t>(rank)].done());
    }
    for (Outcome& outcome : outcomes) REQUIRE(outcome.Wait().ok());
    for (int rank = 0; rank < 2; ++rank) {
      CHECK(std::equal(sent.begin(), sent.end(), daemons.slot(rank)));
      if (bytes < 8 * kMiB) CHECK(daemons.slot(rank)[bytes] == 0x5a);
    }
    const std::vector<int64_t> carried = CarriedBy(*daemons.wires[0]);
    const int64_t rails = std::clamp<int64_t>(bytes / kMiB, 1, kRails);
    int64_t sum = 0;
    for (size_t rail = 0; rail < kRails; ++rail) {
      const int64_t share = carried[rail] - before[rail];
      sum += share;
      // Shares are whole pages but for the last, so the last is up to a page a rail smaller.
      if (static_cast<int64_t>(rail) < rails) {
        CHECK(std::abs(share - bytes / rails) <= 4096 * kRails);
        CHECK(share > 0);
      } else {
        CHECK(share == 0);
      }
    }
    CHECK(sum == bytes);
    before = carried;
    ++seq;
  }
}

TEST_CASE("an exchange's legs of different sizes cross by the rails") {
  Daemons daemons(2, std::chrono::seconds(60), std::chrono::seconds(20), 16 * kMiB);
  daemons.rails = {kRails, kRails};
  daemons.Connect();
  constexpr int64_t kOut = 3 * kMiB + 11;  // from rank 0
  constexpr int64_t kIn = 77;              // from rank 1
  for (int rank = 0; rank < 2; ++rank) {
    std::memset(daemons.slot(rank), 0x5a, 16 * kMiB);
    std::memset(daemons.slot(rank), rank + 1, 8 * kMiB);
    daemons.slot(rank)[kOut - 1] = 'e';
  }
  std::vector<Outcome> outcomes(2);
  for (int rank = 0; rank < 2; ++rank) {
    const int64_t out = rank == 0 ? kOut : kIn;
    const int64_t in = rank == 0 ? kIn : kOut;
    WireExchange exchange{.communicator = kCommunicator,
                          .seq = WireSeq(0),
                          .sends = {{1 - rank, daemons.Span(rank, 0, out)}},
                          .receives = {{1 - rank, daemons.Span(rank, 8 * kMiB, in)}},
                          .timeout = kPlenty};
    daemons.wires[static_cast<size_t>(rank)]->Submit(std::move(exchange),
                                                     outcomes[static_cast<size_t>(rank)].done());
  }
  for (Outcome& outcome : outcomes) REQUIRE(outcome.Wait().ok());
  const char* const received = daemons.slot(1) + 8 * kMiB;
  CHECK(std::all_of(received, received + kOut - 1, [](char c) { return c == 1; }));
  CHECK(received[kOut - 1] == 'e');
  CHECK(received[kOut] == 0x5a);
  const char* const back = daemons.slot(0) + 8 * kMiB;
  CHECK(std::all_of(back, back + kIn, [](char c) { return c == 2; }));
  CHECK(back[kIn] == 0x5a);
  CHECK(daemons.wires[0]->Stats().bytes_sent == kOut);
  CHECK(daemons.wires[0]->Stats().bytes_received == kIn);
  const std::vector<int64_t> carried = CarriedBy(*daemons.wires[1]);
  CHECK(std::all_of(carried.begin(), carried.end(),
                    [](int64_t each) { return each >= kMiB - kRails * 4096; }));
}

TEST_CASE("a communicator has as many rails as the rank with the fewest, and its ids end (P8)") {
  Daemons daemons(2, std::chrono::seconds(60), std::chrono::seconds(20), 8 * kMiB);
  daemons.rails = GENERATE(values<std::vector<int>>({{3, 2}, {2, 3}, {3, 1}}));
  const auto fewest = static_cast<size_t>(std::min(daemons.rails[0], daemons.rails[1]));
  daemons.Connect();
  CHECK(Eventually([&] { return daemons.nccl->Count().listeners == 0; }));
  Outcome outcomes[2];
  for (int rank = 0; rank < 2; ++rank) {
    daemons.wires[static_cast<size_t>(rank)]->Submit(
        daemons.Broadcast(rank, 0, 8 * kMiB, 1, kPlenty), outcomes[rank].done());
  }
  for (Outcome& outcome : outcomes) REQUIRE(outcome.Wait().ok());
  CHECK(daemons.nccl->Count().comms == static_cast<int>(2 * fewest));
  CHECK(CarriedBy(*daemons.wires[0]).size() == fewest);
  CHECK(daemons.wires[0]->Abandoned() == 0);  // the communicator has connected
  daemons.wires.clear();
  CHECK(daemons.nccl->Count().comms == 0);
  CHECK(daemons.cuda.Count().streams == 0);
  CHECK(daemons.cuda.Count().events == 0);
}

TEST_CASE("a rail that fails loses the communicator, and no rail touches memory after that (P6)") {
  Daemons daemons(2, std::chrono::seconds(60), std::chrono::seconds(20), 8 * kMiB);
  daemons.rails = {kRails, kRails};
  daemons.Connect();
  // The second rank comes with too few bytes for the last two rails, which wait for it.
  Outcome outcomes[2];
  daemons.wires[0]->Submit(daemons.Broadcast(0, 1, 8 * kMiB, 1, kShort), outcomes[0].done());
  daemons.wires[1]->Submit(daemons.Broadcast(1, 1, 100, 1, kShort), outcomes[1].done());
  CHECK_FALSE(outcomes[0].Wait().ok());
  (void)outcomes[1].Wait();
  CHECK(daemons.nccl->Count().comms <= kRails);
  std::memset(daemons.slot(0), 0x77, 8 * kMiB);
  daemons.wires[1]->Close(kCommunicator);
  daemons.wires[0]->Close(kCommunicator);
  CHECK(Eventually([&] { return daemons.nccl->Count().comms == 0; }));
  CHECK(std::all_of(daemons.slot(0), daemons.slot(0) + 8 * kMiB, [](char c) { return c == 0x77; }));
  CHECK(daemons.losses == 0);
}

TEST_CASE("a device is a rail once, and only if it reaches the memory") {
  Daemons daemons(1);
  REQUIRE(daemons.wires[0]->OpenOn({0, 1, 1, 0, 2}, kCommunicator, 0, 1).ok());
  CHECK(daemons.wires[0]->Describe().at(0).rails.size() == 3);
  daemons.cuda.Peers(false);
  REQUIRE(daemons.wires[0]->OpenOn({1, 0, 2}, CommunicatorId(8), 0, 1).ok());
  const auto all = daemons.wires[0]->Describe();
  REQUIRE(all.size() == 2);
  REQUIRE(all[1].rails.size() == 1);
  CHECK(all[1].rails[0].device == 1);
  CHECK(daemons.wires[0]->OpenOn({0, 3}, CommunicatorId(9), 0, 1).status().code() ==
        absl::StatusCode::kInvalidArgument);
  CHECK(daemons.wires[0]->OpenOn({}, CommunicatorId(9), 0, 1).status().code() ==
        absl::StatusCode::kInvalidArgument);
}

TEST_CASE("what is told of communicators is what there is") {
  Daemons daemons(2);
  const DeviceWire& wire = *daemons.wires[1];
  CHECK(wire.Describe().empty());
  const auto is = [&wire](std::string_view state) {
    const std::vector<DeviceCommunicatorStatus> all = wire.Describe();
    return all.size() == 1 && all[0].state == state;
  };
  const std::vector<std::string> addresses = daemons.Open();
  REQUIRE(is("open"));
  CHECK(wire.Describe()[0].communicator == kCommunicator);
  REQUIRE(wire.Describe()[0].rails.size() == 1);
  CHECK(wire.Describe()[0].rails[0].device == 1);
  CHECK(wire.Describe()[0].rank == 1);
  CHECK(wire.Describe()[0].size == 2);
  Outcome up[2];
  daemons.wires[1]->Connect(kCommunicator, addresses, kPlenty, up[1].done());
  REQUIRE(Eventually([&] { return is("connecting"); }));
  daemons.wires[0]->Connect(kCommunicator, addresses, kPlenty, up[0].done());
  for (Outcome& outcome : up) REQUIRE(outcome.Wait().ok());
  CHECK(is("connected"));
  Outcome moved[2];
  for (int rank = 0; rank < 2; ++rank) {
    daemons.wires[static_cast<size_t>(rank)]->Submit(daemons.Broadcast(rank, 0, 1000, 1, kPlenty),
                                                     moved[rank].done());
  }
  for (Outcome& outcome : moved) REQUIRE(outcome.Wait().ok());
  CHECK(wire.Describe()[0].rails[0].moved.bytes_received == 1000);
  CHECK(wire.Describe()[0].rails[0].moved.bytes_sent == 0);
  CHECK(wire.Describe()[0].status.ok());

  Outcome late;
  daemons.wires[1]->Submit(daemons.Broadcast(1, 0, 100, 2, kShort), late.done());
  CHECK(!late.Wait().ok());
  REQUIRE(is("lost"));
  CHECK_THAT(std::string(wire.Describe()[0].status.message()), Contains("seq 2: rank 0"));
  // The communicator was given up, but NCCL still works on it.
  daemons.nccl->Block("ncclCommAbort");
  daemons.wires[0]->Close(kCommunicator);
  CHECK(daemons.wires[0]->Describe()[0].state == "closing");
  daemons.nccl->Block("");
  daemons.wires[1]->Close(kCommunicator);
  CHECK(
      Eventually([&] { return wire.Describe().empty() && daemons.wires[0]->Describe().empty(); }));
}

TEST_CASE("bad addresses are refused and change nothing (P10)") {
  Daemons daemons(2);
  std::vector<std::string> addresses = daemons.Open();
  const auto refused = [&](std::vector<std::string> bad, const std::string& why) {
    Outcome outcome;
    daemons.wires[0]->Connect(kCommunicator, std::move(bad), kPlenty, outcome.done());
    const absl::Status status = outcome.Wait();
    INFO(status.ToString());
    CHECK(status.code() == absl::StatusCode::kInvalidArgument);
    CHECK_THAT(std::string(status.message()), Contains(why));
  };
  refused({addresses[0]}, "1 addresses for 2 ranks");
  refused({addresses[1], addresses[0]}, "is of rank 1");
  refused({addresses[0], "RFW1" + addresses[1].substr(4)}, "not an address of NCCL's wire");
  refused({addresses[0], addresses[1].substr(0, 40)}, "40 bytes");
  std::string other = addresses[1];
  other[4] ^= 1;
  refused({addresses[0], other}, "is of communicator");
  for (const char rails : {0, 9}) {
    other = addresses[1];
    other[20] = rails;
    refused({addresses[0], other}, "rails, expected 1 to 8");
  }
  // The communicator is still connecting.
  std::vector<Outcome> outcomes(2);
  for (size_t rank = 0; rank < 2; ++rank) {
    daemons.wires[rank]->Connect(kCommunicator, addresses, kPlenty, outcomes[rank].done());
  }
  for (Outcome& outcome : outcomes) CHECK(outcome.Wait().ok());
  Outcome outcome;
  daemons.wires[0]->Submit(daemons.Broadcast(0, 2, 100, 1, kPlenty), outcome.done());
  CHECK(outcome.Wait().code() == absl::StatusCode::kInvalidArgument);
}

TEST_CASE("what is not open is said so, and not inside the call") {
  Daemons daemons(1);
  std::promise<std::thread::id> promise;
  daemons.wires[0]->Submit(daemons.Broadcast(0, 0, 100, 1, kPlenty), [&](const absl::Status& s) {
    CHECK(s.code() == absl::StatusCode::kNotFound);
    promise.set_value(std::this_thread::get_id());
  });
  auto future = promise.get_future();
  REQUIRE(future.wait_for(kTestDeadline) == std::future_status::ready);
  CHECK(future.get() != std::this_thread::get_id());
  CHECK(daemons.wires[0]->OpenOn({kRails}, kCommunicator, 0, 1).status().code() ==
        absl::StatusCode::kInvalidArgument);
  CHECK(daemons.wires[0]->OpenOn({0}, kCommunicator, 1, 1).status().code() ==
        absl::StatusCode::kInvalidArgument);
  REQUIRE(daemons.wires[0]->OpenOn({0}, kCommunicator, 0, 1).ok());
  CHECK(daemons.wires[0]->OpenOn({0}, kCommunicator, 0, 1).status().code() ==
        absl::StatusCode::kAlreadyExists);
}

TEST_CASE("an abort that hangs is told as a loss of the GPUs (P4)") {
  Daemons daemons(2, std::chrono::milliseconds(100));
  daemons.Connect();
  daemons.nccl->Block("ncclCommAbort");
  Outcome late;
  daemons.wires[0]->Submit(daemons.Broadcast(0, 1, 100, 1, kShort), late.done());
  // The loss was reported, but `done` was not called: NCCL may still touch the memory (P6).
  CHECK(Eventually([&] { return daemons.losses > 0; }));
  CHECK(late.future.wait_for(std::chrono::seconds(0)) == std::future_status::timeout);
  daemons.nccl->Block("");
  CHECK(late.Wait().code() == absl::StatusCode::kDeadlineExceeded);
}

#endif

}  // namespace
}  // namespace refitd
