// Tests of the contract in wire.h that every wire over host memory keeps, whatever moves its bytes.
// The test of each such wire compiles this file.
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <thread>

#include "transport/base/failure.h"
#include "transport/wire_testing.h"

namespace refitd {
namespace {

using absl::StatusCode;
using Catch::Matchers::Contains;

TEST_CASE("a broadcast reaches every rank from every root, whatever its size") {
  const int size = GENERATE(1, 2, 3, 4);
  CAPTURE(size);
  Mesh mesh(size);
  mesh.Connect(kCommunicator);
  uint64_t seq = 0;
  int64_t payload = 0;
  for (const size_t bytes : {size_t{1}, size_t{0}, size_t{4097}, (size_t{4} << 20) - 1,
                             size_t{4} << 20, (size_t{9} << 20) + 3}) {
    for (int root = 0; root < size; ++root) {
      CAPTURE(bytes, root);
      const std::vector<char> expected = RandomBytes(bytes, kSeed + seq);
      std::vector<std::vector<char>> memory(size, std::vector<char>(bytes, '\xcd'));
      memory[root] = expected;
      std::vector<Result> results(size);
      for (int rank = 0; rank < size; ++rank) {
        mesh.wires[rank]->Submit(Broadcast(kCommunicator, seq, root, Span(memory[rank])),
                                 Into(&results[rank]));
      }
      for (Result& result : results) REQUIRE(Get(result) == absl::OkStatus());
      for (int rank = 0; rank < size; ++rank) CHECK((memory[rank] == expected));
      ++seq;
      payload += static_cast<int64_t>(bytes) * (size - 1);
    }
  }
  int64_t sent = 0;
  int64_t received = 0;
  for (const auto& wire : mesh.wires) {
    sent += wire->Stats().bytes_sent;
    received += wire->Stats(kCommunicator).bytes_received;
  }
  CHECK(sent == payload);
  CHECK(received == payload);
}

TEST_CASE("a broadcast of one gibibyte arrives") {
  constexpr size_t kUnit = size_t{32} << 20;
  Mesh mesh(2);
  mesh.Connect(kCommunicator);
  RepeatedMemory source(kUnit, 32);
  RepeatedMemory destination(kUnit, 32);
  const std::vector<char> expected = RandomBytes(kUnit, kSeed);
  std::memcpy(source.data(), expected.data(), kUnit);
  std::vector<Result> results(2);
  mesh.wires[0]->Submit(Broadcast(kCommunicator, 1, 0, source.span()), Into(&results[0]));
  mesh.wires[1]->Submit(Broadcast(kCommunicator, 1, 0, destination.span()), Into(&results[1]));
  for (Result& result : results) REQUIRE(Get(result) == absl::OkStatus());
  CHECK(std::memcmp(destination.data(), expected.data(), kUnit) == 0);
  CHECK(mesh.wires[1]->Stats().bytes_received == int64_t{1} << 30);
}

TEST_CASE("an exchange moves every leg, each with its own size") {
  constexpr int kSize = 4;
  Mesh mesh(kSize);
  mesh.Connect(kCommunicator);
  const auto bytes = [](int from, int to) {
    return (from + to) % 5 == 3 ? size_t{0} : size_t(from * 3 + to) * 700'001 + 1;
  };
  for (uint64_t seq = 0; seq < 3; ++seq) {
    std::vector<std::vector<std::vector<char>>> out(kSize), in(kSize);
    std::vector<Result> results(kSize);
    for (int rank = 0; rank < kSize; ++rank) {
      out[rank].resize(kSize);
      in[rank].resize(kSize);
      WireExchange exchange{kCommunicator, WireSeq(seq), {}, {}, kLong};
      for (int peer = 0; peer < kSize; ++peer) {
        if (peer == rank) continue;
        out[rank][peer] = RandomBytes(bytes(rank, peer), seq * 100 + rank * 10 + peer);
        in[rank][peer].assign(bytes(peer, rank), '\xcd');
        exchange.sends.push_back({peer, Span(out[rank][peer])});
        exchange.receives.insert(exchange.receives.begin(), {peer, Span(in[rank][peer])});
      }
      mesh.wires[rank]->Submit(std::move(exchange), Into(&results[rank]));
    }
    for (Result& result : results) REQUIRE(Get(result) == absl::OkStatus());
    for (int rank = 0; rank < kSize; ++rank) {
      for (int peer = 0; peer < kSize; ++peer) {
        if (peer != rank) CHECK((in[rank][peer] == out[peer][rank]));
      }
    }
  }
}

TEST_CASE("an exchange may leave ranks out") {
  Mesh mesh(3);
  mesh.Connect(kCommunicator);
  std::vector<char> out = RandomBytes(100'000, kSeed);
  std::vector<char> in(out.size());
  std::vector<Result> results(3);
  mesh.wires[0]->Submit(WireExchange{kCommunicator, WireSeq(1), {{2, Span(out)}}, {}, kLong},
                        Into(&results[0]));
  mesh.wires[1]->Submit(WireExchange{kCommunicator, WireSeq(1), {}, {}, kLong}, Into(&results[1]));
  mesh.wires[2]->Submit(WireExchange{kCommunicator, WireSeq(1), {}, {{0, Span(in)}}, kLong},
                        Into(&results[2]));
  for (Result& result : results) REQUIRE(Get(result) == absl::OkStatus());
  CHECK((in == out));
}

TEST_CASE(
    "operations run in the order of their submission, also those submitted before the connection") {
  constexpr int kOperations = 60;
  Mesh mesh(3);
  const std::vector<std::string> addresses = mesh.Open(kCommunicator);
  std::vector<Result> connected(3);
  std::vector<std::vector<int>> order(3);
  std::vector<std::vector<Result>> results(3);
  std::vector<std::vector<std::vector<char>>> memory(3);
  for (int rank = 0; rank < 3; ++rank) {
    mesh.wires[rank]->Connect(kCommunicator, addresses, kLong, Into(&connected[rank]));
    results[rank].resize(kOperations);
    memory[rank].resize(kOperations);
    for (int i = 0; i < kOperations; ++i) {
      memory[rank][i] = i % 3 == rank ? RandomBytes(5000, i) : std::vector<char>(5000, 'x');
      auto done = Into(&results[rank][i]);
      mesh.wires[rank]->Submit(Broadcast(kCommunicator, i, i % 3, Span(memory[rank][i])),
                               [&order, rank, i, done](absl::Status status) {
                                 // No mutex: one thread makes all calls of a communicator.
                                 order[rank].push_back(i);
                                 done(std::move(status));
                               });
    }
  }
  for (int rank = 0; rank < 3; ++rank) {
    REQUIRE(Get(connected[rank]) == absl::OkStatus());
    for (Result& result : results[rank]) REQUIRE(Get(result) == absl::OkStatus());
    CHECK(std::is_sorted(order[rank].begin(), order[rank].end()));
    for (int i = 0; i < kOperations; ++i) CHECK((memory[rank][i] == RandomBytes(5000, i)));
  }
}

TEST_CASE(
    "ranks at different operations get an error that names both, and the communicator is lost") {
  struct Case {
    uint64_t seq;
    size_t bytes;
    const char* message;
  };
  const Case c = GENERATE(Case{5, 8 << 20, "seq 5 "}, Case{4, 100, " 100 bytes"},
                          Case{4, 0, " 0 bytes"}, Case{4, 9 << 20, "9437184 bytes"});
  Mesh mesh(2);
  mesh.Connect(kCommunicator);
  std::vector<char> source(8 << 20, 's');
  std::vector<char> destination(c.bytes, '\xcd');
  std::vector<Result> results(2);
  mesh.wires[0]->Submit(Broadcast(kCommunicator, 4, 0, Span(source)), Into(&results[0]));
  mesh.wires[1]->Submit(Broadcast(kCommunicator, c.seq, 0, Span(destination)), Into(&results[1]));
  const absl::Status status = Get(results[1]);
  CHECK(status.code() == StatusCode::kFailedPrecondition);
  CHECK_THAT(Message(status), Contains("rank 0") && Contains("8388608 bytes") &&
                                  Contains("seq 4") && Contains(c.message));
  CHECK(Get(results[0]).code() == StatusCode::kUnavailable);
  CHECK((destination == std::vector<char>(c.bytes, '\xcd')));

  Result later;
  mesh.wires[1]->Submit(Broadcast(kCommunicator, 6, 0, Span(destination)), Into(&later));
  const absl::Status lost = Get(later);
  CHECK(lost.code() == StatusCode::kFailedPrecondition);
  CHECK_THAT(Message(lost), Contains("is lost") && Contains(Message(status)));
}

TEST_CASE("an operation that is malformed is refused and leaves the communicator as it was") {
  Mesh mesh(2);
  mesh.Connect(kCommunicator);
  std::vector<char> memory(10, 'm');
  const auto refused = [&](auto operation) {
    Result result;
    mesh.wires[0]->Submit(std::move(operation), Into(&result));
    return Get(result).code() == StatusCode::kInvalidArgument;
  };
  CHECK(refused(Broadcast(kCommunicator, 1, 2, Span(memory))));
  CHECK(refused(Broadcast(kCommunicator, 1, -1, Span(memory))));
  CHECK(refused(Broadcast(kCommunicator, 1, 0, {memory.data(), -1, nullptr})));
  CHECK(refused(Broadcast(kCommunicator, 1, 0, {nullptr, 1, nullptr})));
  CHECK(refused(WireExchange{kCommunicator, WireSeq(1), {{0, Span(memory)}}, {}, kLong}));
  CHECK(refused(WireExchange{kCommunicator, WireSeq(1), {}, {{2, Span(memory)}}, kLong}));
  CHECK(refused(
      WireExchange{kCommunicator, WireSeq(1), {{1, Span(memory)}, {1, Span(memory)}}, {}, kLong}));
  std::vector<Result> results(2);
  std::vector<char> in(10);
  mesh.wires[0]->Submit(Broadcast(kCommunicator, 1, 0, Span(memory)), Into(&results[0]));
  mesh.wires[1]->Submit(Broadcast(kCommunicator, 1, 0, Span(in)), Into(&results[1]));
  for (Result& result : results) CHECK(Get(result) == absl::OkStatus());
  CHECK((in == memory));
}

TEST_CASE("a rank that does not come to an operation is named when the timeout has passed") {
  Mesh mesh(3);
  mesh.Connect(kCommunicator);
  std::vector<std::vector<char>> memory(3, std::vector<char>(6 << 20, 'a'));
  std::weak_ptr<int> alive;
  std::vector<Result> results(2);
  for (const int rank : {0, 1}) {  // the bytes go from rank 0 to 1 to 2
    auto keep = std::make_shared<int>(1);
    if (rank == 1) alive = keep;
    MemorySpan span = Span(memory[rank]);
    span.keep_alive = std::move(keep);
    mesh.wires[rank]->Submit(
        Broadcast(kCommunicator, 1, 0, std::move(span), rank == 1 ? kMedium : kLong),
        Into(&results[rank]));
  }
  const absl::Status status = Get(results[1]);
  CHECK(status.code() == StatusCode::kDeadlineExceeded);
  CHECK_THAT(Message(status), Contains("3000 ms") && Contains("rank 2"));
  CHECK(Until([&] { return alive.expired(); }));
  // Rank 1 had received all bytes from rank 0, so the operation has ended well on rank 0.
  CHECK(Get(results[0]) == absl::OkStatus());
}

TEST_CASE("Close cancels what runs and what is queued, and the peers learn of it") {
  Mesh mesh(3);
  mesh.Connect(kCommunicator);
  RepeatedMemory source(1 << 20, 64);
  std::vector<Result> results(3);
  for (int i = 0; i < 3; ++i) {
    // Rank 2 never submits its receives, so these sends can't end by themselves.
    mesh.wires[0]->Submit(WireExchange{kCommunicator, WireSeq(i), {{2, source.span()}}, {}, kLong},
                          Into(&results[i]));
  }
  Result peer;
  std::vector<char> in(1 << 20);
  // If `peer_waits`, rank 1 waits for bytes from rank 0 when rank 0 closes the communicator.
  const bool peer_waits = GENERATE(false, true);
  if (peer_waits) {
    mesh.wires[1]->Submit(WireExchange{kCommunicator, WireSeq(9), {{0, Span(in)}}, {}, kLong},
                          Into(&peer));
  }
  mesh.wires[0]->Close(kCommunicator);
  mesh.wires[0]->Close(kCommunicator);
  for (Result& result : results) CHECK(Get(result).code() == StatusCode::kCancelled);
  if (peer_waits) {
    const absl::Status status = Get(peer);
    CHECK(status.code() == StatusCode::kUnavailable);
    CHECK_THAT(Message(status), Contains("rank 0"));
  }
  mesh.wires[1]->Close(kCommunicator);
  mesh.wires[2]->Close(kCommunicator);
  // A new communicator may have the id of the closed one.
  mesh.Connect(kCommunicator);
}

TEST_CASE("Close while bytes move ends both sides soon and lets go of the memory") {
  Mesh mesh(2);
  RepeatedMemory source(1 << 20, 1024);
  RepeatedMemory destination(1 << 20, 1024);
  for (int closer = 0; closer < 2; ++closer) {
    const CommunicatorId communicator(100 + closer);
    mesh.Connect(communicator);
    auto keep = std::make_shared<int>(1);
    const std::weak_ptr<int> alive = keep;
    std::vector<Result> results(2);
    for (int rank = 0; rank < 2; ++rank) {
      MemorySpan span = rank == 0 ? source.span() : destination.span();
      span.keep_alive = keep;
      mesh.wires[rank]->Submit(Broadcast(communicator, 1, 0, std::move(span)),
                               Into(&results[rank]));
    }
    keep.reset();
    REQUIRE(Until([&] { return mesh.wires[1]->Stats(communicator).bytes_received > 0; }));
    mesh.wires[closer]->Close(communicator);
    const StatusCode closed = Get(results[closer]).code();
    const StatusCode other = Get(results[1 - closer]).code();
    // On a fast machine the operation may have ended before Close.
    CHECK((closed == StatusCode::kCancelled || closed == StatusCode::kOk));
    CHECK((other == StatusCode::kUnavailable || other == closed));
    CHECK(Until([&] { return alive.expired(); }));
    mesh.wires[1 - closer]->Close(communicator);
  }
}

TEST_CASE("a rank that closes right after its last operation takes nothing from its peers") {
  Mesh mesh(3);
  for (uint64_t round = 0; round < 30; ++round) {
    const CommunicatorId communicator(1000 + round);
    mesh.Connect(communicator);
    const std::vector<char> expected = RandomBytes(1 << 20, round);
    std::vector<std::vector<char>> memory(3, std::vector<char>(expected.size()));
    memory[0] = expected;
    std::vector<Result> results(3);
    for (int rank = 0; rank < 3; ++rank) {
      Wire* wire = mesh.wires[rank].get();
      auto done = Into(&results[rank]);
      wire->Submit(Broadcast(communicator, 1, 0, Span(memory[rank])),
                   [wire, communicator, done](absl::Status status) {
                     wire->Close(communicator);
                     done(std::move(status));
                   });
    }
    for (Result& result : results) REQUIRE(Get(result) == absl::OkStatus());
    for (int rank = 0; rank < 3; ++rank) CHECK((memory[rank] == expected));
  }
}

TEST_CASE("Connect ends by its timeout and names the rank that did not come") {
  Mesh mesh(2);
  const std::vector<std::string> addresses = mesh.Open(kCommunicator);
  // One of the two ranks listens and waits; the other connects to a socket that listens but never
  // accepts.
  const int rank = GENERATE(0, 1);
  Result result;
  mesh.wires[rank]->Connect(kCommunicator, addresses, kShort, Into(&result));
  const absl::Status status = Get(result);
  CHECK(status.code() == StatusCode::kDeadlineExceeded);
  CHECK_THAT(Message(status), Contains("rank " + std::to_string(1 - rank)));
  Result later;
  std::vector<char> memory(1);
  mesh.wires[rank]->Submit(Broadcast(kCommunicator, 1, 0, Span(memory)), Into(&later));
  CHECK(Get(later).code() == StatusCode::kFailedPrecondition);
}

TEST_CASE("Close interrupts a Connect whose peer never comes") {
  Mesh mesh(2);
  const std::vector<std::string> addresses = mesh.Open(kCommunicator);
  const int rank = GENERATE(0, 1);
  Result result;
  Result queued;
  std::vector<char> memory(1);
  mesh.wires[rank]->Connect(kCommunicator, addresses, kLong, Into(&result));
  mesh.wires[rank]->Submit(Broadcast(kCommunicator, 1, 0, Span(memory)), Into(&queued));
  mesh.wires[rank]->Close(kCommunicator);
  CHECK(Get(result).code() == StatusCode::kCancelled);
  CHECK(Get(queued).code() == StatusCode::kCancelled);
}

TEST_CASE("a peer that is gone before the connection is an error that names it") {
  Mesh mesh(2);
  const std::vector<std::string> addresses = mesh.Open(kCommunicator);
  const int rank = GENERATE(0, 1);
  mesh.wires[1 - rank] = nullptr;
  Result result;
  mesh.wires[rank]->Connect(kCommunicator, addresses, kShort, Into(&result));
  const absl::Status status = Get(result);
  // The connection is refused or times out, depending on which of the two ranks connects.
  CHECK((status.code() == StatusCode::kUnavailable ||
         status.code() == StatusCode::kDeadlineExceeded));
  CHECK_THAT(Message(status), Contains("rank " + std::to_string(1 - rank)));
}

TEST_CASE("a rank that waited itself was blamed beside the one that never connected") {
  constexpr int kRanks = 4;
  Mesh mesh(kRanks);
  const std::vector<std::string> addresses = mesh.Open(kCommunicator);
  const int absent = GENERATE(0, 1, 2, 3);
  std::vector<Result> results(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == absent) continue;
    mesh.wires[rank]->Connect(kCommunicator, addresses, kShort, Into(&results[rank]));
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == absent) continue;
    const absl::Status status = Get(results[rank]);
    const std::vector<int> suspects = FailureOf(status).ranks;
    for (int named = 0; named < kRanks; ++named) {
      CAPTURE(rank, absent, named, Message(status));
      // Connect reaches the neighbours in the ring of ranks only, so the rank opposite does not
      // notice that one is absent.
      const bool reached = (rank + 2) % kRanks != absent;
      CHECK((std::find(suspects.begin(), suspects.end(), named) != suspects.end()) ==
            (named == absent && reached));
    }
  }
}

TEST_CASE("Open refuses what is out of bounds, and a communicator that is open") {
  const auto wire = MakeWire();
  for (const auto& [rank, size] :
       std::vector<std::pair<int, int>>{{0, 0}, {-1, 2}, {2, 2}, {0, kMaxWireRanks + 1}, {0, -1}}) {
    CHECK(wire->Open(kCommunicator, rank, size).status().code() == StatusCode::kInvalidArgument);
  }
  REQUIRE(wire->Open(kCommunicator, 0, 2).ok());
  CHECK(wire->Open(kCommunicator, 0, 2).status().code() == StatusCode::kAlreadyExists);
  for (size_t i = 1; i < kMaxWireCommunicators; ++i)
    REQUIRE(wire->Open(CommunicatorId(100 + i), 0, 1).ok());
  CHECK(wire->Open(CommunicatorId(1), 0, 1).status().code() == StatusCode::kResourceExhausted);
  wire->Close(kCommunicator);
  CHECK(wire->Open(CommunicatorId(1), 0, kMaxWireRanks).value().size() <= kMaxWireAddressBytes);
}

TEST_CASE("an answer never comes inside the call, also when there is no such communicator") {
  const auto wire = MakeWire();
  const auto caller = std::this_thread::get_id();
  std::promise<std::pair<StatusCode, std::thread::id>> promise;
  std::vector<char> memory(1);
  wire->Submit(Broadcast(kCommunicator, 1, 0, Span(memory)), [&](const absl::Status& status) {
    promise.set_value({status.code(), std::this_thread::get_id()});
  });
  auto future = promise.get_future();
  REQUIRE(future.wait_for(kWait) == std::future_status::ready);
  const auto [code, thread] = future.get();
  CHECK(code == StatusCode::kNotFound);
  CHECK(thread != caller);
}

TEST_CASE("an operation before Connect, and a second Connect, are refused") {
  const auto wire = MakeWire();
  const auto address = wire->Open(kCommunicator, 0, 1);
  REQUIRE(address.ok());
  std::vector<char> memory(1);
  std::vector<Result> results(4);
  wire->Submit(Broadcast(kCommunicator, 1, 0, Span(memory)), Into(&results[0]));
  wire->Connect(kCommunicator, {*address}, kLong, Into(&results[1]));
  wire->Connect(kCommunicator, {*address}, kLong, Into(&results[2]));
  wire->Submit(Broadcast(kCommunicator, 1, 0, Span(memory)), Into(&results[3]));
  CHECK(Get(results[0]).code() == StatusCode::kFailedPrecondition);
  CHECK(Get(results[1]).ok());
  CHECK(Get(results[2]).code() == StatusCode::kFailedPrecondition);
  CHECK(Get(results[3]).ok());
}

TEST_CASE("opening and closing leaks no descriptor and no thread") {
  Mesh mesh(2);
  mesh.Connect(CommunicatorId(1));  // makes everything that is made only once
  mesh.wires[0]->Close(CommunicatorId(1));
  mesh.wires[1]->Close(CommunicatorId(1));
  // There must not be more entries than before. There may be fewer, since a thread or descriptor
  // that was counted may have been about to end.
  const auto settled = [](const char* path, int expected) {
    return Until([&] { return CountEntries(path) <= expected; });
  };
  int descriptors = 0;
  int threads = 0;
  REQUIRE(Until([&] {  // the two communicators' threads end
    const int now = CountEntries("/proc/self/task");
    const bool still = now == threads;
    threads = now;
    descriptors = CountEntries("/proc/self/fd");
    poll(nullptr, 0, 30);
    return still;
  }));
  for (uint64_t i = 0; i < 200; ++i) {
    const CommunicatorId communicator(10 + i);
    if (i % 10 == 0) {
      mesh.Connect(communicator);
    } else {
      const std::vector<std::string> addresses = mesh.Open(communicator);
      if (i % 10 == 1) {
        Result result;
        mesh.wires[i % 2]->Connect(communicator, addresses, kLong, Into(&result));
      }
    }
    mesh.wires[0]->Close(communicator);
    mesh.wires[1]->Close(communicator);
  }
  CHECK(settled("/proc/self/fd", descriptors));
  CHECK(settled("/proc/self/task", threads));
}

// ---- Peers that are processes.

// Reads or writes all of `bytes`; false when the other end is gone.
bool Transfer(int fd, char* data, size_t bytes, bool out) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = out ? send(fd, data + done, bytes - done, MSG_NOSIGNAL)
                          : recv(fd, data + done, bytes - done, 0);
    if (n <= 0) return false;
    done += static_cast<size_t>(n);
  }
  return true;
}

// Swaps addresses over `fd`.
std::string Swap(int fd, std::string mine) {
  std::string theirs(mine.size(), '\0');
  if (!Transfer(fd, mine.data(), mine.size(), true)) return "";
  if (!Transfer(fd, theirs.data(), theirs.size(), false)) return "";
  return theirs;
}

// Rank 1 of 2 in a process of its own: it takes part in one broadcast of `bytes` from `root`, then
// it waits forever. A Peer must be made before this process has threads.
class Peer {
 public:
  Peer(int root, size_t unit, size_t times) {
    int fds[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    pid_ = fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      close(fds[0]);
      alarm(120);  // the process ends by itself
      Child(fds[1], root, unit, times);
      _exit(1);
    }
    close(fds[1]);
    fd_.Reset(fds[0]);
  }
  ~Peer() {
    Signal(SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  void Signal(int signal) { kill(pid_, signal); }
  int fd() const { return fd_.get(); }

 private:
  static void Child(int fd, int root, size_t unit, size_t times) {
    auto wire = Tested().make();
    if (!wire.ok()) return;
    auto mine = (*wire)->Open(kCommunicator, 1, 2);
    if (!mine.ok()) return;
    const std::string theirs = Swap(fd, *mine);
    Result connected;
    (*wire)->Connect(kCommunicator, {theirs, *mine}, kLong, Into(&connected));
    if (!Get(connected).ok()) return;
    RepeatedMemory memory(unit, times);
    Result result;
    (*wire)->Submit(Broadcast(kCommunicator, 1, root, memory.span()), Into(&result));
    char byte = 0;
    Transfer(fd, &byte, 1, false);  // waits until the parent is gone
  }

  pid_t pid_ = -1;
  UniqueFd fd_;
};

void ConnectTo(Wire* wire, const Peer& peer) {
  const auto mine = wire->Open(kCommunicator, 0, 2);
  REQUIRE(mine.ok());
  const std::string theirs = Swap(peer.fd(), *mine);
  Result connected;
  wire->Connect(kCommunicator, {*mine, theirs}, kLong, Into(&connected));
  REQUIRE(Get(connected) == absl::OkStatus());
}

// A broadcast to or from a peer, so long that it never ends in a test's time.
struct Endless {
  static constexpr size_t kUnit = 1 << 20;
  static constexpr size_t kTimes = 16 << 10;  // 16 GiB

  // Returns when more than `moved` bytes have crossed.
  Endless(int root, int64_t moved, Duration timeout = kLong) : peer(root, kUnit, kTimes) {
    ConnectTo(wire.get(), peer);
    wire->Submit(Broadcast(kCommunicator, 1, root, memory.span(), timeout), Into(&result));
    REQUIRE(Until([&] {
      const WireStats stats = wire->Stats(kCommunicator);
      return stats.bytes_sent + stats.bytes_received > moved;
    }));
  }

  Peer peer;
  std::unique_ptr<Wire> wire = MakeWire();
  RepeatedMemory memory{kUnit, kTimes};
  Result result;
};

TEST_CASE(
    "a peer that is killed in the middle of a broadcast is named at once, by sender and receiver") {
  Endless endless(GENERATE(0, 1), 16 << 20);
  endless.peer.Signal(SIGKILL);
  const absl::Status status = Get(endless.result);
  CHECK(status.code() == StatusCode::kUnavailable);
  CHECK_THAT(Message(status), Contains("rank 1"));
}

TEST_CASE(
    "a peer that is stopped in the middle of a broadcast is named when the timeout has passed") {
  Endless endless(GENERATE(0, 1), 0, std::chrono::seconds(2));
  endless.peer.Signal(SIGSTOP);
  const absl::Status status = Get(endless.result);
  CHECK(status.code() == StatusCode::kDeadlineExceeded);
  CHECK_THAT(Message(status), Contains("rank 1"));
}

TEST_CASE("Close interrupts a broadcast to a stopped peer") {
  Endless endless(GENERATE(0, 1), 0);
  endless.peer.Signal(SIGSTOP);
  endless.wire->Close(kCommunicator);
  CHECK(Get(endless.result).code() == StatusCode::kCancelled);
}

}  // namespace
}  // namespace refitd
