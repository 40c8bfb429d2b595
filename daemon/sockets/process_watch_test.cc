#include "daemon/sockets/process_watch.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <map>
#include <memory>
#include <thread>

#include "daemon/sockets/peer_credentials.h"
#include "daemon/test_util.h"

namespace refitd {
namespace {

// Counts callbacks by name.
class Deaths {
 public:
  ProcessWatch::Callback Callback(int name) {
    return [this, name] {
      MutexLock lock(&mutex_);
      ++counts_[name];
      changed_.NotifyAll();
    };
  }
  bool Wait(int name) {
    const auto deadline = std::chrono::steady_clock::now() + kTestDeadline;
    MutexLock lock(&mutex_);
    while (counts_[name] == 0) {
      if (!changed_.WaitUntil(&mutex_, deadline)) return false;
    }
    return true;
  }
  int count(int name) {
    MutexLock lock(&mutex_);
    return counts_[name];
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::map<int, int> counts_ ABSL_GUARDED_BY(mutex_);
};

std::unique_ptr<ProcessWatch> NewWatch() {
  auto watch = ProcessWatch::Create();
  REQUIRE(watch.ok());
  return std::move(*watch);
}

// Process returns the same credentials as PeerOf: they lack a pidfd if the process has ended.
PeerCredentials Process(pid_t pid) {
  PeerCredentials process;
  process.pid = pid;
  UniqueFd pidfd = OpenPidfd(pid);
  if (pidfd.valid()) process.pidfd = std::make_shared<const UniqueFd>(std::move(pidfd));
  return process;
}

TEST_CASE("A killed process is reported once, before it is reaped") {
  Deaths deaths;
  const auto watch = NewWatch();
  const ChildProcess child([] {});
  REQUIRE(watch->Watch(Process(child.pid()), deaths.Callback(1)).ok());
  CHECK(watch->watched() == 1);
  child.Signal(SIGKILL);
  CHECK(deaths.Wait(1));
  CHECK(watch->watched() == 0);
  // A callback that fires later has passed the queue after the cancelled one.
  const ChildProcess other([] {});
  REQUIRE(watch->Watch(Process(other.pid()), deaths.Callback(2)).ok());
  other.Signal(SIGKILL);
  CHECK(deaths.Wait(2));
  CHECK(deaths.count(1) == 1);
}

TEST_CASE("A stopped process is not reported") {
  Deaths deaths;
  const auto watch = NewWatch();
  const ChildProcess stopped([] {});
  REQUIRE(watch->Watch(Process(stopped.pid()), deaths.Callback(1)).ok());
  stopped.Signal(SIGSTOP);
  const ChildProcess killed([] {});
  REQUIRE(watch->Watch(Process(killed.pid()), deaths.Callback(2)).ok());
  killed.Signal(SIGKILL);
  CHECK(deaths.Wait(2));
  CHECK(deaths.count(1) == 0);
}

TEST_CASE("A process that is gone already fires at once") {
  Deaths deaths;
  const auto watch = NewWatch();
  ChildProcess child([] {});
  const pid_t pid = child.pid();
  child.Kill();
  REQUIRE(watch->Watch(Process(pid), deaths.Callback(1)).ok());
  CHECK(deaths.Wait(1));
}

TEST_CASE("A cancelled watch never fires") {
  Deaths deaths;
  const auto watch = NewWatch();
  const ChildProcess child([] {});
  const auto first = watch->Watch(Process(child.pid()), deaths.Callback(1));
  REQUIRE(watch->Watch(Process(child.pid()), deaths.Callback(2)).ok());
  REQUIRE(first.ok());
  CHECK(watch->Cancel(*first));
  CHECK_FALSE(watch->Cancel(*first));
  child.Signal(SIGKILL);
  CHECK(deaths.Wait(2));
  CHECK(deaths.count(1) == 0);
}

TEST_CASE("Cancelling after it fired, or what never was, says so") {
  Deaths deaths;
  const auto watch = NewWatch();
  const ChildProcess child([] {});
  const auto handle = watch->Watch(Process(child.pid()), deaths.Callback(1));
  child.Signal(SIGKILL);
  REQUIRE(deaths.Wait(1));
  CHECK_FALSE(watch->Cancel(*handle));
  CHECK_FALSE(watch->Cancel(WatchHandle()));
}

TEST_CASE("Credentials are watched by the pidfd taken at accept, however often") {
  int ends[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  const UniqueFd a(ends[0]);
  const UniqueFd b(ends[1]);
  const TempFolder folder;
  const std::string path = folder / "s";
  UniqueFd server(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_un address = UnixAddress(path);
  REQUIRE(bind(server.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
  REQUIRE(listen(server.get(), 1) == 0);
  ChildProcess child([&] { [[maybe_unused]] int fd = ConnectTo(path, SOCK_STREAM).Release(); });
  REQUIRE(Readable(server));
  const UniqueFd accepted(accept4(server.get(), nullptr, nullptr, SOCK_CLOEXEC));
  const auto peer = PeerOf(accepted.get(), true);
  REQUIRE(peer.ok());
  CHECK(peer->pid == child.pid());
  REQUIRE(peer->pidfd != nullptr);

  Deaths deaths;
  const auto watch = NewWatch();
  REQUIRE(watch->Watch(*peer, deaths.Callback(1)).ok());
  REQUIRE(watch->Watch(*peer, deaths.Callback(2)).ok());
  child.Kill();
  CHECK(deaths.Wait(1));
  CHECK(deaths.Wait(2));
  // The process was reaped: its number may be reused now, but the descriptor still names the dead
  // process.
  REQUIRE(watch->Watch(*peer, deaths.Callback(3)).ok());
  CHECK(deaths.Wait(3));
}

TEST_CASE(
    "A peer without pidfd was gone at accept and fires at once; one without pid can't be watched") {
  Deaths deaths;
  const auto watch = NewWatch();
  PeerCredentials peer{.pid = 1, .uid = 0, .gid = 0, .groups = {}, .pidfd = nullptr};
  REQUIRE(watch->Watch(peer, deaths.Callback(1)).ok());
  CHECK(deaths.Wait(1));
  peer.pid = 0;
  CHECK(watch->Watch(peer, deaths.Callback(2)).status().code() ==
        absl::StatusCode::kInvalidArgument);
  CHECK(watch->Watch(Process(-1), deaths.Callback(2)).status().code() ==
        absl::StatusCode::kInvalidArgument);
  CHECK(watch->watched() == 0);
}

TEST_CASE("A callback may watch and cancel") {
  Deaths deaths;
  const auto watch = NewWatch();
  const ChildProcess survivor([] {});
  const ChildProcess child([] {});
  const auto other = watch->Watch(Process(survivor.pid()), deaths.Callback(1));
  REQUIRE(watch
              ->Watch(Process(child.pid()),
                      [&] {
                        if (watch->Cancel(*other) &&
                            watch->Watch(Process(child.pid()), deaths.Callback(2)).ok()) {
                          deaths.Callback(3)();
                        }
                      })
              .ok());
  child.Signal(SIGKILL);
  CHECK(deaths.Wait(2));
  CHECK(deaths.Wait(3));
  CHECK(deaths.count(1) == 0);
}

TEST_CASE("What a callback uses may go once the watch was cancelled and awaited") {
  Deaths deaths;
  const auto watch = NewWatch();
  const ChildProcess child([] {});
  auto used = std::make_unique<std::atomic<int>>(0);
  const auto handle = watch->Watch(Process(child.pid()), [&deaths, used = used.get()] {
    deaths.Callback(1)();
    for (int i = 0; i < 1'000; ++i) {
      std::this_thread::yield();
      ++*used;
    }
  });
  child.Signal(SIGKILL);
  REQUIRE(deaths.Wait(1));
  CHECK_FALSE(watch->Cancel(*handle));
  watch->AwaitCallback();
  CHECK(*used == 1'000);
  used.reset();
}

TEST_CASE("Ending the watch drops what did not fire") {
  Deaths deaths;
  const ChildProcess child([] {});
  {
    const auto watch = NewWatch();
    REQUIRE(watch->Watch(Process(child.pid()), deaths.Callback(1)).ok());
  }
  child.Signal(SIGKILL);
  CHECK(deaths.count(1) == 0);
}

}  // namespace
}  // namespace refitd
