// Networks of a test's own: namespaces, and a star of nodes whose links can be slowed, counted and
// broken. Where the machine allows no namespaces, Make() says why, and tests say so and pass.
//
// Not thread-safe.
#ifndef REFITD_TESTS_E2E_NETWORK_H_
#define REFITD_TESTS_E2E_NETWORK_H_

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/e2e/harness.h"
#include "transport/base/unique_fd.h"

namespace refitd::e2e {

// A network namespace; it ends with its last process and this object.
class Namespace {
 public:
  Namespace() {
    std::thread([this] {
      if (unshare(CLONE_NEWNET) != 0) return;
      fd_.Reset(open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
    }).join();
  }
  bool valid() const { return fd_.valid(); }
  std::string path() const { return fmt::format("/proc/{}/fd/{}", getpid(), fd_.get()); }
  std::vector<std::string> launcher() const { return {"/usr/bin/nsenter", "--net=" + path()}; }

  // Runs iproute2's `command` inside. Empty: it succeeded; else its errors.
  std::string Run(const std::string& command) const {
    std::vector<std::string> argv = launcher();
    argv.insert(argv.end(), {"/bin/sh", "-c", "PATH=$PATH:/usr/sbin:/sbin; exec " + command});
    Process process(argv);
    if (process.WaitExit() == 0) return "";
    return fmt::format("`{}`: {}", command, process.Errors());
  }
  void Must(const std::string& command) const {
    const std::string failed = Run(command);
    INFO(failed);
    REQUIRE(failed.empty());
  }

 private:
  UniqueFd fd_;
};

// The bytes of v0 in the namespace of a process, with all headers.
struct LinkBytes {
  int64_t received = 0;
  int64_t sent = 0;
};
inline LinkBytes LinkBytesOf(pid_t pid) {
  constexpr int kSentColumn = 8;
  std::ifstream devices(fmt::format("/proc/{}/net/dev", pid));
  LinkBytes bytes;
  for (std::string line; std::getline(devices, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos || line.find("v0") > colon) continue;
    std::istringstream values(line.substr(colon + 1));
    values >> bytes.received;
    for (int i = 1; i <= kSentColumn; ++i) values >> bytes.sent;
  }
  return bytes;
}

// Nodes around a bridge, which is in a namespace of its own. Node i is AddressOf(i), on v0.
class Star {
 public:
  explicit Star(int nodes) : nodes_(static_cast<size_t>(nodes)) {}

  // Empty: the network is ready. Else why this machine can have none.
  std::string Make() const {
    const auto all = [](const Namespace& in, const std::vector<std::string>& commands) {
      std::string failed;
      for (const std::string& command : commands) {
        if (failed.empty()) failed = in.Run(command);
      }
      return failed;
    };
    if (!bridge_.valid()) return "network namespaces can't be made here";
    std::string failed = all(bridge_, {"ip link add br0 type bridge", "ip link set br0 up"});
    for (size_t i = 0; i < nodes_.size() && failed.empty(); ++i) {
      if (!nodes_[i].valid()) return "network namespaces can't be made here";
      failed =
          all(nodes_[i],
              {"ip link set lo up",
               fmt::format("ip link add v0 type veth peer name s{} netns {}", i, bridge_.path()),
               fmt::format("ip addr add {}/24 dev v0", AddressOf(i)), "ip link set v0 up"});
      if (!failed.empty()) break;
      failed = all(bridge_, {fmt::format("ip link set s{} master br0", i),
                             fmt::format("ip link set s{} up", i)});
    }
    return failed;
  }

  static std::string AddressOf(size_t node) { return fmt::format("10.79.0.{}", node + 1); }
  const Namespace& operator[](size_t node) const { return nodes_[node]; }

  // Limits what each node sends and receives. Empty: done; else why this kernel can't.
  std::string Slow(int megabits) const {
    const std::string limit = fmt::format("tbf rate {}mbit burst 32kb latency 400ms", megabits);
    std::string failed;
    for (size_t i = 0; i < nodes_.size() && failed.empty(); ++i) {
      failed = nodes_[i].Run("tc qdisc replace dev v0 root " + limit);
      if (!failed.empty()) break;
      failed = bridge_.Run(fmt::format("tc qdisc replace dev s{} root {}", i, limit));
    }
    if (!failed.empty()) Fast();
    return failed;
  }
  void Fast() const {
    for (size_t i = 0; i < nodes_.size(); ++i) {
      nodes_[i].Run("tc qdisc del dev v0 root");
      bridge_.Run(fmt::format("tc qdisc del dev s{} root", i));
    }
  }

  void Cut(size_t node) const { bridge_.Must(fmt::format("ip link set s{} down", node)); }
  // The bridge runs no spanning tree protocol, so the port forwards at once.
  void Join(size_t node) const { bridge_.Must(fmt::format("ip link set s{} up", node)); }

 private:
  Namespace bridge_;
  std::vector<Namespace> nodes_;
};

}  // namespace refitd::e2e

#endif  // REFITD_TESTS_E2E_NETWORK_H_
