#include "daemon/process/service_manager.h"

#include <stdlib.h>

#include <atomic>
#include <catch2/catch.hpp>

#include "daemon/test_util.h"

namespace refitd {
namespace {

// The service manager's end of NOTIFY_SOCKET.
class Manager {
 public:
  Manager() : socket_(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    const std::string path = folder_ / "notify";
    const sockaddr_un address = UnixAddress(path);
    REQUIRE(bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
    setenv("NOTIFY_SOCKET", path.c_str(), 1);
  }
  ~Manager() {
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
  }
  // The next message; empty: none came before the deadline.
  std::string Next() {
    if (!Readable(socket_)) return "";
    char text[512];
    const ssize_t n = recv(socket_.get(), text, sizeof(text), 0);
    return std::string(text, n > 0 ? static_cast<size_t>(n) : 0);
  }
  // Stops receiving. After that the service must not wait for this manager any more.
  void Close() { socket_.Reset(); }
  bool Silent() {
    char byte;
    return recv(socket_.get(), &byte, 1, MSG_DONTWAIT | MSG_PEEK) < 0;
  }

 private:
  TempFolder folder_;
  UniqueFd socket_;
};

TEST_CASE("Readiness, status and stopping reach the service manager, one line each") {
  Manager manager;
  ServiceManager service([] { return true; });
  service.Ready("serving\nREADY=0");
  CHECK(manager.Next() == "READY=1\nSTATUS=serving READY=0");
  service.Stopping("draining");
  CHECK(manager.Next() == "STOPPING=1\nSTATUS=draining");
}

TEST_CASE("The watchdog is fed while the daemon is alive") {
  Manager manager;
  setenv("WATCHDOG_USEC", "20000", 1);
  ServiceManager service([] { return true; });
  for (int i = 0; i < 3; ++i) CHECK(manager.Next() == "WATCHDOG=1");
  manager.Close();
}

TEST_CASE("The watchdog is not fed while the daemon is not") {
  Manager manager;
  setenv("WATCHDOG_USEC", "2000", 1);
  std::atomic<int> asked = 0;
  ServiceManager service([&] {
    ++asked;
    return false;
  });
  CHECK(Eventually([&] { return asked >= 3; }));
  CHECK(manager.Silent());
}

TEST_CASE("Without a service manager nothing happens") {
  ServiceManager service([] { return true; });
  service.Ready("serving");
  service.Stopping("");
}

}  // namespace
}  // namespace refitd
