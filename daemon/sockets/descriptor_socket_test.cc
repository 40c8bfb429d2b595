#include "daemon/sockets/descriptor_socket.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <catch2/catch.hpp>
#include <cstring>
#include <deque>
#include <optional>
#include <random>

#include "daemon/process/process_stats.h"
#include "daemon/test_util.h"
#include "transport/host/memory.h"

namespace refitd {
namespace {

constexpr int64_t kRegionBytes = 8192;

Token TokenOf(uint8_t fill) {
  Token token;
  token.fill(fill);
  return token;
}

// A handler that knows one token and maps regions as the node does.
class Node : public DescriptorHandler {
 public:
  absl::StatusOr<RegionId> RegisterRegion(const Token& token, const PeerCredentials& peer,
                                          UniqueFd fd, RegionKind kind, int64_t bytes,
                                          uint64_t /*address*/, KeepDescriptor keep) override {
    REFITD_RETURN_IF_ERROR(Check(token, peer));
    if (kind != RegionKind::kMemfd) return Error(absl::StatusCode::kUnimplemented, "no cuda here");
    REFITD_ASSIGN_OR_RETURN(auto region,
                            HostRegion::Map(fd, bytes, Access::kReadWrite, /*populate=*/false));
    MutexLock lock(&mutex_);
    regions_.push_back(std::move(region));
    kept_ += keep == KeepDescriptor::kNo ? 0 : 1;
    return RegionId(regions_.size());
  }
  absl::Status ReleaseRegion(const Token& token, const PeerCredentials& peer,
                             RegionId region) override {
    REFITD_RETURN_IF_ERROR(Check(token, peer));
    MutexLock lock(&mutex_);
    if (region.value() == 0 || region.value() > regions_.size()) {
      return Error(absl::StatusCode::kNotFound, "region {}", region);
    }
    regions_[region.value() - 1] = nullptr;
    return absl::OkStatus();
  }
  absl::StatusOr<PoolHandle> MapPool(const Token& token, const PeerCredentials& peer) override {
    REFITD_RETURN_IF_ERROR(Check(token, peer));
    REFITD_ASSIGN_OR_RETURN(auto pool, CreateSealedMemfd("pool", 4 * kRegionBytes));
    const char mark[] = "pool";
    REFITD_CHECK(pwrite(pool.get(), mark, sizeof(mark), 0) == sizeof(mark));
    return PoolHandle{.fd = std::move(pool), .bytes = 4 * kRegionBytes, .slot_bytes = kRegionBytes};
  }

  absl::StatusOr<SideHandle> TakeKept(const Token& token, const PeerCredentials& peer,
                                      uint64_t side) override {
    REFITD_RETURN_IF_ERROR(Check(token, peer));
    if (side != 1) return Error(absl::StatusCode::kNotFound, "region_id: {}", side);
    REFITD_ASSIGN_OR_RETURN(auto back, CreateSealedMemfd("back", kRegionBytes));
    return SideHandle{.fd = std::move(back), .bytes = kRegionBytes};
  }

  int kept() {
    MutexLock lock(&mutex_);
    return kept_;
  }
  size_t registered() {
    MutexLock lock(&mutex_);
    return regions_.size();
  }
  std::shared_ptr<HostRegion> region(uint64_t id) {
    MutexLock lock(&mutex_);
    return regions_.at(id - 1);
  }

 private:
  static absl::Status Check(const Token& token, const PeerCredentials& peer) {
    if (token != TokenOf(7)) return Error(absl::StatusCode::kUnauthenticated, "no such lease");
    if (peer.pid != getpid()) return Error(absl::StatusCode::kPermissionDenied, "{}", peer.pid);
    return absl::OkStatus();
  }
  Mutex mutex_;
  std::deque<std::shared_ptr<HostRegion>> regions_ ABSL_GUARDED_BY(mutex_);
  int kept_ ABSL_GUARDED_BY(mutex_) = 0;  // regions whose descriptor was to be kept
};

// A client's connection that can send anything.
class Client {
 public:
  explicit Client(const std::string& path) : socket_(ConnectTo(path, SOCK_SEQPACKET)) {
    REQUIRE(socket_.valid());
  }

  bool SendRaw(const void* data, size_t bytes, const std::vector<int>& fds = {}) {
    iovec part{.iov_base = const_cast<void*>(data), .iov_len = bytes};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    std::vector<char> control(CMSG_SPACE(fds.size() * sizeof(int)));
    if (!fds.empty()) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
      std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
    }
    return sendmsg(socket_.get(), &message, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
  }
  bool SendRequest(const DescriptorRequest& request, const std::vector<int>& fds = {}) {
    return SendRaw(&request, sizeof(request), fds);
  }

  // nullopt: the connection ended instead. `fd` gets the descriptor that came with the reply.
  std::optional<DescriptorReply> Receive(UniqueFd* fd = nullptr) {
    if (!Readable(socket_)) return std::nullopt;
    DescriptorReply reply;
    iovec part{.iov_base = &reply, .iov_len = sizeof(reply)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    if (recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC) != sizeof(reply)) return std::nullopt;
    if (const cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr) {
      int received = -1;
      std::memcpy(&received, CMSG_DATA(header), sizeof(received));
      UniqueFd owned(received);
      if (fd != nullptr) *fd = std::move(owned);
    }
    CHECK(reply.magic == kDescriptorMagic);
    CHECK(reply.version == kDescriptorWireVersion);
    CHECK(reply.message[sizeof(reply.message) - 1] == 0);
    CHECK((reply.code == 0) == (reply.message[0] == 0));
    return reply;
  }

  std::optional<DescriptorReply> Ask(const DescriptorRequest& request,
                                     const std::vector<int>& fds = {}, UniqueFd* fd = nullptr) {
    if (!SendRequest(request, fds)) return std::nullopt;
    return Receive(fd);
  }
  bool Ended() {
    char byte;
    return Readable(socket_) && recv(socket_.get(), &byte, 1, MSG_DONTWAIT) <= 0;
  }

 private:
  UniqueFd socket_;
};

DescriptorRequest Request(DescriptorRequestKind kind, const Token& token = TokenOf(7)) {
  DescriptorRequest request;
  request.kind = kind;
  std::copy(token.begin(), token.end(), request.token);
  return request;
}
DescriptorRequest RegisterRequest(int64_t bytes = kRegionBytes) {
  DescriptorRequest request = Request(DescriptorRequestKind::kRegisterRegion);
  request.bytes = bytes;
  return request;
}

uint32_t Code(absl::StatusCode code) { return static_cast<uint32_t>(code); }

// OK: the peer is that user.
absl::Status Only(uid_t uid, const PeerCredentials& peer) {
  if (peer.uid == uid) return absl::OkStatus();
  return absl::PermissionDeniedError(fmt::format("uid {} is refused", peer.uid));
}

struct Fixture {
  TempFolder folder;
  std::string path = folder / "r.sock.fds";
  Node node;
  DescriptorSocketOptions options{
      .path = path, .mode = 0600, .admit = [](const PeerCredentials& peer) {
        return Only(getuid(), peer);
      }};
  UniqueFd memfd = CreateSealedMemfd("test", kRegionBytes).value();

  std::unique_ptr<DescriptorSocket> Start() {
    auto socket = DescriptorSocket::Create(options, &node);
    INFO(socket.status().ToString());
    REQUIRE(socket.ok());
    return std::move(*socket);
  }
  // The answer to a request on a fresh connection.
  DescriptorReply AskOnce(const DescriptorRequest& request, const std::vector<int>& fds = {}) {
    Client client(path);
    const auto reply = client.Ask(request, fds);
    REQUIRE(reply.has_value());
    return *reply;
  }
  void RequireRefused(const DescriptorRequest& request, const std::vector<int>& fds,
                      absl::StatusCode code, const std::string& named) {
    const DescriptorReply reply = AskOnce(request, fds);
    INFO(reply.message);
    CHECK(reply.code == Code(code));
    CHECK_THAT(std::string(reply.message), Catch::Contains(named));
  }
};

// Whether this process has `expected` descriptors before the deadline passes.
bool DescriptorsSettleAt(int64_t expected) {
  return Eventually([&] { return ReadProcessStats()->descriptors == expected; });
}

TEST_CASE_METHOD(Fixture, "A registered memfd is the same memory on both sides") {
  const auto socket = Start();
  Client client(path);
  const auto mine = HostRegion::Map(memfd, kRegionBytes, Access::kReadWrite, false).value();
  std::strcpy(mine->data(), "hello");
  const auto reply = client.Ask(RegisterRequest(), {memfd.get()});
  REQUIRE(reply.has_value());
  REQUIRE(reply->code == 0);
  const auto theirs = node.region(reply->region_id);
  CHECK(std::string(theirs->data()) == "hello");
  std::strcpy(theirs->data() + 100, "back");
  CHECK(std::string(mine->data() + 100) == "back");

  DescriptorRequest release = Request(DescriptorRequestKind::kReleaseRegion);
  release.region_id = reply->region_id;
  CHECK(client.Ask(release)->code == 0);
  CHECK(node.region(reply->region_id) == nullptr);
}

TEST_CASE_METHOD(Fixture, "The pool's descriptor comes beside the reply") {
  const auto socket = Start();
  Client client(path);
  UniqueFd pool;
  const auto reply = client.Ask(Request(DescriptorRequestKind::kMapPool), {}, &pool);
  REQUIRE(reply.has_value());
  CHECK(reply->code == 0);
  CHECK(reply->bytes == 4 * kRegionBytes);
  CHECK(reply->slot_bytes == kRegionBytes);
  REQUIRE(pool.valid());
  CHECK(
      std::string(HostRegion::Map(pool, reply->bytes, Access::kReadOnly, false).value()->data()) ==
      "pool");
}

TEST_CASE_METHOD(Fixture, "A descriptor is kept where the request says so, and a side is given") {
  const auto socket = Start();
  Client client(path);
  DescriptorRequest request = RegisterRequest();
  CHECK(client.Ask(request, {memfd.get()})->code == 0);
  CHECK(node.kept() == 0);
  using enum KeepDescriptor;
  for (const KeepDescriptor keep : {kWithRegion, kForNextRank}) {
    request.keep = keep;
    CHECK(client.Ask(request, {memfd.get()})->code == 0);
    CHECK(node.kept() == static_cast<int>(keep));
  }

  DescriptorRequest take = Request(DescriptorRequestKind::kTakeKept);
  take.region_id = 1;
  UniqueFd side;
  const auto reply = client.Ask(take, {}, &side);
  REQUIRE(reply.has_value());
  CHECK(reply->code == 0);
  CHECK(reply->bytes == kRegionBytes);
  CHECK(HostRegion::Map(side, kRegionBytes, Access::kReadWrite, false).ok());
  take.region_id = 2;
  RequireRefused(take, {}, absl::StatusCode::kNotFound, "region_id: 2");
}

TEST_CASE_METHOD(Fixture, "The handler's status becomes code and message") {
  const auto socket = Start();
  RequireRefused(Request(DescriptorRequestKind::kMapPool, TokenOf(8)), {},
                 absl::StatusCode::kUnauthenticated, "no such lease");
  DescriptorRequest release = Request(DescriptorRequestKind::kReleaseRegion);
  release.region_id = 99;
  RequireRefused(release, {}, absl::StatusCode::kNotFound, "region 99");
  DescriptorRequest cuda = RegisterRequest();
  cuda.region_kind = RegionKind::kDevice;
  RequireRefused(cuda, {memfd.get()}, absl::StatusCode::kUnimplemented, "cuda");
  RequireRefused(RegisterRequest(kRegionBytes + 1), {memfd.get()},
                 absl::StatusCode::kInvalidArgument, "");
}

TEST_CASE_METHOD(Fixture, "A well-framed request that is refused leaves the connection usable") {
  const auto socket = Start();
  Client client(path);
  CHECK(client.Ask(RegisterRequest(0), {memfd.get()})->code ==
        Code(absl::StatusCode::kInvalidArgument));
  CHECK(client.Ask(RegisterRequest())->code == Code(absl::StatusCode::kInvalidArgument));
  CHECK(client.Ask(RegisterRequest(), {memfd.get()})->code == 0);
}

TEST_CASE_METHOD(Fixture, "Malformed fields are refused by name") {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  const auto socket = Start();
  RequireRefused(RegisterRequest(-1), {memfd.get()}, kInvalid, "bytes -1");
  RequireRefused(RegisterRequest(), {}, kInvalid, "0 descriptors");
  RequireRefused(RegisterRequest(), {memfd.get(), memfd.get()}, kInvalid, "2 descriptors");
  RequireRefused(RegisterRequest(), std::vector<int>(200, memfd.get()), kInvalid, "more than");
  RequireRefused(Request(DescriptorRequestKind::kMapPool), {memfd.get()}, kInvalid,
                 "1 descriptors");
  RequireRefused(Request(DescriptorRequestKind::kReleaseRegion), {memfd.get()}, kInvalid,
                 "1 descriptors");
  RequireRefused(Request(static_cast<DescriptorRequestKind>(99)), {memfd.get()}, kInvalid,
                 "kind 99");
  DescriptorRequest request = RegisterRequest();
  request.region_kind = static_cast<RegionKind>(9);
  RequireRefused(request, {memfd.get()}, kInvalid, "region kind 9");
  request = RegisterRequest();
  request.reserved[11] = 1;
  RequireRefused(request, {memfd.get()}, kInvalid, "reserved");
  request = RegisterRequest();
  request.keep = static_cast<KeepDescriptor>(3);
  RequireRefused(request, {memfd.get()}, kInvalid, "keep 3");
  request = Request(DescriptorRequestKind::kTakeKept);
  RequireRefused(request, {memfd.get()}, kInvalid, "1 descriptors");
  request.keep = KeepDescriptor::kWithRegion;
  RequireRefused(request, {}, kInvalid, "keep 1");
}

TEST_CASE_METHOD(Fixture, "Wrong framing is answered and ends the connection") {
  const auto socket = Start();
  const auto refused = [&](const void* data, size_t bytes, const std::string& named) {
    Client client(path);
    REQUIRE(client.SendRaw(data, bytes, {memfd.get()}));
    const auto reply = client.Receive();
    REQUIRE(reply.has_value());
    CHECK(reply->code == Code(absl::StatusCode::kInvalidArgument));
    CHECK_THAT(std::string(reply->message), Catch::Contains(named));
    CHECK(client.Ended());
  };
  DescriptorRequest request = RegisterRequest();
  refused(&request, sizeof(request) - 1, "request of 63 bytes");
  refused(&request, 1, "request of 1 bytes");
  const std::vector<char> huge(65'536);
  refused(huge.data(), huge.size(), "64 bytes or more");
  request.magic = 0xDEAD;
  refused(&request, sizeof(request), "magic 0xdead");
  request = RegisterRequest();
  request.version = 2;
  refused(&request, sizeof(request), "version 2");
  Client empty(path);
  REQUIRE(empty.SendRaw("", 0, {memfd.get()}));
  CHECK(empty.Ended());
}

TEST_CASE_METHOD(Fixture,
                 "No descriptor is leaked by anything a client sends or by how it leaves") {
  const auto socket = Start();
  const int64_t before = ReadProcessStats()->descriptors;
  constexpr uint64_t kSeed = 20240229;
  CAPTURE(kSeed);
  std::mt19937_64 random(kSeed);
  for (int i = 0; i < 400; ++i) {
    Client client(path);
    const uint64_t requests = random() % 3;
    for (uint64_t j = 0; j < requests; ++j) {
      DescriptorRequest request =
          Request(static_cast<DescriptorRequestKind>(random() % 5), TokenOf(random() % 2 ? 7 : 8));
      request.bytes = random() % 2 ? kRegionBytes : static_cast<int64_t>(random());
      request.region_id = random() % 4;
      if (random() % 4 == 0) reinterpret_cast<char*>(&request)[random() % sizeof(request)] ^= 1;
      const size_t bytes = random() % 4 == 0 ? random() % (2 * sizeof(request)) : sizeof(request);
      std::vector<char> raw(2 * sizeof(request));
      std::memcpy(raw.data(), &request, sizeof(request));
      client.SendRaw(raw.data(), bytes, std::vector<int>(random() % 20, memfd.get()));
    }
    if (requests > 0 && random() % 2) client.Receive();
  }
  CHECK(Eventually([&] { return socket->connections() == 0; }));
  CHECK(DescriptorsSettleAt(before));
  CHECK(AskOnce(RegisterRequest(), {memfd.get()}).code == 0);
}

TEST_CASE_METHOD(Fixture, "A killed client's connection is closed") {
  const auto socket = Start();
  ChildProcess child(
      [this] { [[maybe_unused]] int fd = ConnectTo(path, SOCK_SEQPACKET).Release(); });
  CHECK(Eventually([&] { return socket->connections() == 1; }));
  child.Kill();
  CHECK(Eventually([&] { return socket->connections() == 0; }));
}

TEST_CASE_METHOD(Fixture, "Another process's request carries its own credentials") {
  const auto socket = Start();
  int ends[2];
  REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
  const UniqueFd reading(ends[0]);
  const UniqueFd writing(ends[1]);
  const ChildProcess child([&] {
    Client client(path);
    const auto reply = client.Ask(Request(DescriptorRequestKind::kMapPool));
    const uint32_t code = reply ? reply->code : 0;
    REFITD_CHECK(write(writing.get(), &code, sizeof(code)) == sizeof(code));
  });
  REQUIRE(Readable(reading));
  uint32_t code = 0;
  REQUIRE(read(reading.get(), &code, sizeof(code)) == sizeof(code));
  CHECK(code == Code(absl::StatusCode::kPermissionDenied));
}

TEST_CASE_METHOD(
    Fixture,
    "A connection that the daemon refuses gets an error and is closed, whatever its token") {
  options.admit = [](const PeerCredentials& peer) { return Only(getuid() + 1, peer); };
  const auto socket = Start();
  Client stranger(path);
  const auto reply = stranger.Receive();
  REQUIRE(reply.has_value());
  CHECK(reply->code == Code(absl::StatusCode::kPermissionDenied));
  CHECK_THAT(reply->message, Catch::Contains(std::to_string(getuid())));
  CHECK(stranger.Ended());
  // A client that sends before it reads: its request is not served and its descriptor not kept.
  for (int i = 0; i < 20; ++i) {
    Client hasty(path);
    const auto refused = hasty.Ask(RegisterRequest(), {memfd.get()});
    if (refused.has_value()) CHECK(refused->code == Code(absl::StatusCode::kPermissionDenied));
  }
  CHECK(node.registered() == 0);
  CHECK(Eventually([&] { return socket->connections() == 0; }));
}

TEST_CASE_METHOD(Fixture, "Connections over the limit get an error and are closed; others go on") {
  options.max_connections = 4;  // of which one user has at most half
  const auto socket = Start();
  Client first(path);
  auto second = std::make_unique<Client>(path);
  CHECK(first.Ask(RegisterRequest(), {memfd.get()})->code == 0);
  CHECK(second->Ask(RegisterRequest(), {memfd.get()})->code == 0);
  Client third(path);
  const auto reply = third.Receive();
  REQUIRE(reply.has_value());
  CHECK(reply->code == Code(absl::StatusCode::kResourceExhausted));
  CHECK_THAT(reply->message, Catch::Contains("has 2 connections"));
  CHECK(third.Ended());
  CHECK(first.Ask(RegisterRequest(), {memfd.get()})->code == 0);
  second.reset();
  CHECK(Eventually([&] { return socket->connections() == 1; }));
  CHECK(AskOnce(RegisterRequest(), {memfd.get()}).code == 0);
}

TEST_CASE_METHOD(Fixture, "A connection without requests is closed after the idle limit") {
  options.idle_limit = std::chrono::milliseconds(20);
  const auto socket = Start();
  Client client(path);
  CHECK(client.Ended());
  CHECK(Eventually([&] { return socket->connections() == 0; }));
}

TEST_CASE_METHOD(Fixture,
                 "A client that leaves replies unread loses its connection, not the daemon") {
  const auto socket = Start();
  Client deaf(path);
  const DescriptorRequest request = Request(DescriptorRequestKind::kReleaseRegion);
  // Far more requests than both queues hold: sending fails once the daemon has closed.
  CHECK(Eventually([&] { return !deaf.SendRequest(request); }));
  CHECK(AskOnce(RegisterRequest(), {memfd.get()}).code == 0);
}

TEST_CASE_METHOD(Fixture, "A slow request does not hold up others") {
  struct Slow : Node {
    absl::StatusOr<PoolHandle> MapPool(const Token&, const PeerCredentials&) override {
      MutexLock lock(&mutex);
      waiting = true;
      changed.NotifyAll();
      const auto deadline = std::chrono::steady_clock::now() + kTestDeadline;
      while (!go) {
        if (!changed.WaitUntil(&mutex, deadline)) break;
      }
      return absl::Status(absl::StatusCode::kUnavailable, go ? "went on" : "stuck");
    }
    Mutex mutex;
    CondVar changed;
    bool waiting = false;
    bool go = false;
  } slow;
  const auto socket = DescriptorSocket::Create(options, &slow).value();
  Client first(path);
  REQUIRE(first.SendRequest(Request(DescriptorRequestKind::kMapPool)));
  CHECK(AskOnce(RegisterRequest(), {memfd.get()}).code == 0);
  {
    MutexLock lock(&slow.mutex);
    slow.go = true;
  }
  slow.changed.NotifyAll();
  CHECK(std::string(first.Receive()->message) == "went on");
}

TEST_CASE_METHOD(Fixture, "A long message is cut between characters") {
  struct Wordy : Node {
    absl::Status ReleaseRegion(const Token&, const PeerCredentials&, RegionId) override {
      std::string text = "x";
      while (text.size() < 400) text += "\u00e9";
      return absl::Status(absl::StatusCode::kInternal, text);
    }
  } wordy;
  const auto socket = DescriptorSocket::Create(options, &wordy).value();
  const std::string message = AskOnce(Request(DescriptorRequestKind::kReleaseRegion)).message;
  CHECK(message.size() == 215);
  CHECK(message.substr(213) == "\u00e9");
}

TEST_CASE_METHOD(Fixture, "Stopping closes connections and removes the socket") {
  const int64_t before = ReadProcessStats()->descriptors;
  const int64_t threads = ReadProcessStats()->threads;
  {
    auto socket = Start();
    Client client(path);
    CHECK(client.Ask(RegisterRequest(), {memfd.get()})->code == 0);
    socket->Stop();
    socket->Stop();
    CHECK(client.Ended());
    CHECK_FALSE(std::filesystem::exists(path));
  }
  CHECK(DescriptorsSettleAt(before));
  CHECK(Eventually([&] { return ReadProcessStats()->threads == threads; }));
}

}  // namespace
}  // namespace refitd
