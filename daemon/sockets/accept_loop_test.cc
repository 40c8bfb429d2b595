#include "daemon/sockets/accept_loop.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <fstream>
#include <thread>
#include <vector>

#include "daemon/test_util.h"

namespace refitd {
namespace {

// Keeps the connections that the loop serves, as gRPC would.
class Served {
 public:
  AcceptLoop::Serve Callback() {
    return [this](UniqueFd fd) {
      MutexLock lock(&mutex_);
      connections_.push_back(std::move(fd));
      changed_.NotifyAll();
    };
  }
  // The descriptor number of connection `index`; -1: it did not come before the deadline.
  int Wait(size_t index) {
    const auto deadline = std::chrono::steady_clock::now() + kTestDeadline;
    MutexLock lock(&mutex_);
    while (connections_.size() <= index) {
      if (!changed_.WaitUntil(&mutex_, deadline)) return -1;
    }
    return connections_[index].get();
  }
  void Close(size_t index) {
    MutexLock lock(&mutex_);
    connections_[index].Reset();
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<UniqueFd> connections_ ABSL_GUARDED_BY(mutex_);
};

std::string PeerName(int fd) { return fmt::format("fd:{}", fd); }

struct Fixture {
  TempFolder folder;
  std::string path = folder / "r.sock";
  PeerTable peers;
  Served served;

  std::unique_ptr<AcceptLoop> Start() {
    auto loop = AcceptLoop::Create({.path = path, .mode = 0600}, &peers, served.Callback());
    INFO(loop.status().ToString());
    REQUIRE(loop.ok());
    (*loop)->Start();
    return std::move(*loop);
  }
};

TEST_CASE_METHOD(Fixture, "An accepted connection is looked up by gRPC's name for it") {
  const auto loop = Start();
  const UniqueFd client = ConnectTo(path, SOCK_STREAM);
  REQUIRE(client.valid());
  const int fd = served.Wait(0);
  REQUIRE(fd >= 0);
  const auto peer = peers.Lookup(PeerName(fd));
  REQUIRE(peer.has_value());
  CHECK(peer->pid == getpid());
  CHECK(peer->uid == geteuid());
  CHECK(peer->gid == getegid());
  CHECK(peer->pidfd != nullptr);
  CHECK((fcntl(fd, F_GETFL) & O_NONBLOCK) != 0);
  CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
}

TEST_CASE_METHOD(Fixture, "Names that are no recorded descriptor have no credentials") {
  const auto loop = Start();
  const UniqueFd client = ConnectTo(path, SOCK_STREAM);
  REQUIRE(served.Wait(0) >= 0);
  for (const char* name : {"", "fd:", "fd:x", "fd:-1", "fd:1x", "fd:99999999999999",
                           "unix:", "ipv4:127.0.0.1:1", "fd:0"}) {
    INFO(name);
    CHECK_FALSE(peers.Lookup(name).has_value());
  }
}

TEST_CASE_METHOD(Fixture, "A connecting child is known by its own pid") {
  const auto loop = Start();
  const ChildProcess child(
      [this] { [[maybe_unused]] int fd = ConnectTo(path, SOCK_STREAM).Release(); });
  const int fd = served.Wait(0);
  REQUIRE(fd >= 0);
  CHECK(peers.Lookup(PeerName(fd))->pid == child.pid());
}

TEST_CASE_METHOD(Fixture, "A closed connection's number no longer answers, even when taken again") {
  const auto loop = Start();
  const UniqueFd client = ConnectTo(path, SOCK_STREAM);
  const int fd = served.Wait(0);
  REQUIRE(peers.Lookup(PeerName(fd)).has_value());
  served.Close(0);
  CHECK_FALSE(peers.Lookup(PeerName(fd)).has_value());
  // Another socket with the same number is not the recorded peer.
  UniqueFd other(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const UniqueFd same(dup2(other.get(), fd));
  CHECK_FALSE(peers.Lookup(PeerName(fd)).has_value());
}

TEST_CASE_METHOD(Fixture,
                 "Entries and pidfds of closed connections are dropped without a new one") {
  const auto loop = Start();
  for (size_t i = 0; i < 2; ++i) {
    UniqueFd client = ConnectTo(path, SOCK_STREAM);
    const int fd = served.Wait(i);
    REQUIRE(fd >= 0);
    std::weak_ptr<const UniqueFd> pidfd = peers.Lookup(PeerName(fd))->pidfd;
    CHECK_FALSE(pidfd.expired());
    client.Reset();
    served.Close(i);
    CHECK(Eventually([&] { return peers.size() == 0; }));
    CHECK(Eventually([&] { return pidfd.expired(); }));
  }
}

TEST_CASE_METHOD(Fixture,
                 "A peer that hung up is remembered while its connection is being served") {
  const auto loop = Start();
  UniqueFd client = ConnectTo(path, SOCK_STREAM);
  const int fd = served.Wait(0);
  REQUIRE(fd >= 0);
  client.Reset();
  peers.Sweep();
  CHECK(peers.Lookup(PeerName(fd)).has_value());
}

TEST_CASE_METHOD(Fixture, "The socket has the mode that was asked for whatever the umask") {
  const mode_t before = umask(0);
  auto open_to_all = AcceptLoop::Create({.path = path, .mode = 0640}, &peers, served.Callback());
  umask(0777);
  const std::string second = folder / "s.sock";
  auto closed = AcceptLoop::Create({.path = second, .mode = 0660}, &peers, served.Callback());
  umask(before);
  REQUIRE(open_to_all.ok());
  REQUIRE(closed.ok());
  struct stat found {};
  REQUIRE(stat(path.c_str(), &found) == 0);
  CHECK((found.st_mode & 0777) == 0640);
  REQUIRE(stat(second.c_str(), &found) == 0);
  CHECK((found.st_mode & 0777) == 0660);
}

TEST_CASE_METHOD(Fixture,
                 "Two daemons can't serve one path, and the second learns the first's pid") {
  const auto loop = Start();
  const auto second = AcceptLoop::Create({.path = path, .mode = 0600}, &peers, served.Callback());
  REQUIRE_FALSE(second.ok());
  CHECK(second.status().code() == absl::StatusCode::kAlreadyExists);
  CHECK_THAT(Message(second.status()),
             Catch::Contains(fmt::format("in use by pid {}", getpid())) && Catch::Contains(path));
  CHECK(ConnectTo(path, SOCK_STREAM).valid());
}

TEST_CASE_METHOD(Fixture, "A live server that holds no lock is not replaced either") {
  UniqueFd server(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_un address = UnixAddress(path);
  REQUIRE(bind(server.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  REQUIRE(listen(server.get(), 1) == 0);
  const auto loop = AcceptLoop::Create({.path = path, .mode = 0600}, &peers, served.Callback());
  CHECK(loop.status().code() == absl::StatusCode::kAlreadyExists);
  CHECK_THAT(Message(loop.status()), Catch::Contains(fmt::format("in use by pid {}", getpid())));
  CHECK_FALSE(std::filesystem::exists(path + ".lock"));
  CHECK(ConnectTo(path, SOCK_STREAM).valid());
}

TEST_CASE_METHOD(Fixture, "A killed daemon's socket is replaced") {
  {
    ChildProcess killed([this] {
      const sockaddr_un address = UnixAddress(path);
      const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
      REFITD_CHECK(bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
      REFITD_CHECK(listen(fd, 1) == 0);
    });
    REQUIRE(Eventually([&] { return ConnectTo(path, SOCK_STREAM).valid(); }));
    killed.Kill();
  }
  REQUIRE(std::filesystem::exists(path));
  const auto loop = Start();
  CHECK(ConnectTo(path, SOCK_STREAM).valid());
}

TEST_CASE_METHOD(Fixture, "Whoever finds the path can connect: never refused while it starts") {
  std::atomic<bool> stop{false};
  std::atomic<int> refused{0};
  int started = 0;
  std::thread looker([&] {
    const sockaddr_un address = UnixAddress(path);
    while (!stop) {
      // One that waited for a place in the listener would be refused when that ends.
      const UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      const int result =
          connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
      if (result != 0 && errno == ECONNREFUSED) ++refused;
    }
  });
  // Each loop's path is removed while its socket still listens, so that a refused connection can
  // only come from the way in which a path appears.
  for (int i = 0; i < 300; ++i) {
    // Nobody accepts: connections wait in the listener and end with it.
    const auto loop = AcceptLoop::Create({.path = path, .mode = 0600}, &peers, [](UniqueFd) {});
    if (!loop.ok()) break;
    ++started;
    std::filesystem::remove(path);
  }
  stop = true;
  looker.join();
  CHECK(started == 300);
  CHECK(refused == 0);
  CHECK_FALSE(std::filesystem::exists(path + ".new"));
}

TEST_CASE_METHOD(Fixture, "A path that is no socket is left alone") {
  std::ofstream(path) << "precious";
  const auto loop = AcceptLoop::Create({.path = path, .mode = 0600}, &peers, served.Callback());
  CHECK(loop.status().code() == absl::StatusCode::kAlreadyExists);
  CHECK_THAT(Message(loop.status()), Catch::Contains("is not a socket"));
  CHECK(std::filesystem::file_size(path) == 8);
}

TEST_CASE_METHOD(Fixture, "A path that can't be an address is refused") {
  const auto create = [this](const std::string& bad) {
    return AcceptLoop::Create({.path = bad, .mode = 0600}, &peers, served.Callback()).status();
  };
  CHECK(create("").code() == absl::StatusCode::kInvalidArgument);
  CHECK(create("relative.sock").code() == absl::StatusCode::kInvalidArgument);
  CHECK(create("/" + std::string(108, 'x')).code() == absl::StatusCode::kInvalidArgument);
  CHECK(create(folder / "missing/r.sock").code() == absl::StatusCode::kNotFound);
}

TEST_CASE_METHOD(Fixture,
                 "Stopping removes the socket and its lock, and leaves connections alone") {
  auto loop = Start();
  const UniqueFd client = ConnectTo(path, SOCK_STREAM);
  const int fd = served.Wait(0);
  REQUIRE(fd >= 0);
  loop->Stop();
  loop->Stop();
  CHECK_FALSE(std::filesystem::exists(path));
  CHECK_FALSE(std::filesystem::exists(path + ".lock"));
  CHECK(peers.Lookup(PeerName(fd)).has_value());
  CHECK(send(fd, "x", 1, MSG_NOSIGNAL) == 1);
  const auto again = Start();
  CHECK(ConnectTo(path, SOCK_STREAM).valid());
}

TEST_CASE_METHOD(Fixture, "A socket that took the path over is not removed at the end") {
  auto loop = Start();
  REQUIRE(unlink(path.c_str()) == 0);
  UniqueFd other(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_un address = UnixAddress(path);
  REQUIRE(bind(other.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  loop->Stop();
  CHECK(std::filesystem::exists(path));
}

TEST_CASE_METHOD(Fixture, "Out of descriptors, a connection is closed rather than left waiting") {
  const auto loop = Start();
  REQUIRE(ConnectTo(path, SOCK_STREAM).valid());
  REQUIRE(served.Wait(0) >= 0);
  UniqueFd client(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_un address = UnixAddress(path);

  // No number below the limit is left. The spare's number is freed and taken back for each
  // connection that is shed.
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
  std::vector<UniqueFd> filler;
  const rlimit tight{.rlim_cur = 64, .rlim_max = before.rlim_max};
  REQUIRE(setrlimit(RLIMIT_NOFILE, &tight) == 0);
  for (;;) {
    UniqueFd next(open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!next.valid()) break;
    filler.push_back(std::move(next));
  }
  const bool connected =
      connect(client.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  const bool told = Readable(client);
  char byte = 0;
  const ssize_t end = recv(client.get(), &byte, 1, MSG_DONTWAIT);
  filler.clear();
  REQUIRE(setrlimit(RLIMIT_NOFILE, &before) == 0);
  CHECK(connected);
  CHECK(told);
  CHECK(end == 0);

  // The loop goes on accepting.
  const UniqueFd later = ConnectTo(path, SOCK_STREAM);
  CHECK(later.valid());
  CHECK(served.Wait(1) >= 0);
}

TEST_CASE("Credentials of a socket that has no unix peer are an error") {
  const UniqueFd tcp(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECK(PeerOf(tcp.get(), true).status().code() == absl::StatusCode::kUnavailable);
  const UniqueFd unconnected(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECK(PeerOf(unconnected.get(), true).status().code() == absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace refitd
