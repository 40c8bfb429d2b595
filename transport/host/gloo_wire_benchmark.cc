// Broadcast of N bytes in slots of S between processes over loopback: the wires (sockets in the
// clear, with four connections, and under TLS; Gloo) as a chain and as an exchange (the root sends
// to each), against gloo::broadcast, memcpy, and, between two ranks, one plain TCP connection.
//
//   gloo_wire_benchmark [--bytes=N] [--slot=N] [--ranks=N] [--rounds=N]
//
// Rank 0 is the root and reports the payload over the time from the first submission to the last
// end. Each figure is the median of the rounds.
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/status.h"
#include "transport/base/unique_fd.h"
#include "transport/host/gloo_baseline.h"
#include "transport/host/gloo_wire.h"
#include "transport/sockets/socket_wire.h"
#include "transport/tls/test_certificates.h"

namespace refitd {
namespace {

constexpr Duration kTimeout = std::chrono::seconds(60);
constexpr EpochId kEpoch{1};

struct Options {
  int64_t bytes = int64_t{1} << 30;
  int64_t slot = int64_t{16} << 20;
  int ranks = 2;
  int rounds = 5;
};

void Must(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "gloo_wire_benchmark: %s\n", status.ToString().c_str());
  std::_Exit(1);
}

bool Transfer(int fd, void* data, size_t bytes, bool out) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = out ? write(fd, static_cast<char*>(data) + done, bytes - done)
                          : read(fd, static_cast<char*>(data) + done, bytes - done);
    if (n <= 0) return false;
    done += static_cast<size_t>(n);
  }
  return true;
}

// Rank 0 has a socket to each rank, every other rank a socket to rank 0.
class Rank {
 public:
  Rank(int rank, const Options& options, std::vector<int> sockets)
      : rank_(rank), options_(options), sockets_(std::move(sockets)) {}

  std::vector<std::string> Gather(const std::string& mine) {
    std::vector<std::string> all(options_.ranks, std::string(mine.size(), '\0'));
    all[rank_] = mine;
    if (rank_ == 0) {
      for (int peer = 1; peer < options_.ranks; ++peer) Move(peer, &all[peer], false);
      for (int peer = 1; peer < options_.ranks; ++peer) {
        for (std::string& one : all) Move(peer, &one, true);
      }
    } else {
      std::string copy = mine;
      Move(0, &copy, true);
      for (std::string& one : all) Move(0, &one, false);
    }
    return all;
  }
  void Barrier() { Gather("b"); }
  int rank() const { return rank_; }
  int ranks() const { return options_.ranks; }
  int64_t slots() const { return options_.bytes / options_.slot; }

  // Median GB/s of `round`, which moves all bytes once; printed by rank 0. The time ends when the
  // last rank is done.
  template <typename F>
  void Measure(const char* name, F round) {
    std::vector<double> rates;
    round();  // pages, connections
    for (int i = 0; i < options_.rounds; ++i) {
      Barrier();
      const auto start = std::chrono::steady_clock::now();
      round();
      Barrier();
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      rates.push_back(static_cast<double>(options_.bytes) / seconds.count() / 1e9);
    }
    std::sort(rates.begin(), rates.end());
    if (rank_ != 0) return;
    std::printf("%-34s %6.2f GB/s  (%.2f to %.2f)\n", name, rates[rates.size() / 2], rates.front(),
                rates.back());
    std::fflush(stdout);
  }

 private:
  void Move(int peer, std::string* data, bool out) {
    const int fd = sockets_[rank_ == 0 ? peer : 0];
    if (!Transfer(fd, data->data(), data->size(), out)) {
      Must(Error(absl::StatusCode::kUnavailable, "rank {}: rank {} is gone", rank_, peer));
    }
  }

  const int rank_;
  const Options options_;
  const std::vector<int> sockets_;
};

// One TCP connection from rank 0 to rank 1, as large sends and receives of a slot.
void MeasurePlain(std::vector<char>* slot, Rank* self) {
  const UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in local{};
  local.sin_family = AF_INET;
  local.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(local);
  auto* const address = reinterpret_cast<sockaddr*>(&local);
  if (bind(listener.get(), address, length) != 0 || listen(listener.get(), 1) != 0 ||
      getsockname(listener.get(), address, &length) != 0) {
    Must(ErrnoError(errno, "listen"));
  }
  std::string mine(reinterpret_cast<const char*>(&local), sizeof(local));
  const std::vector<std::string> all = self->Gather(mine);
  UniqueFd fd;
  if (self->rank() == 0) {
    std::memcpy(&local, all[1].data(), sizeof(local));
    fd.Reset(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (connect(fd.get(), address, length) != 0) Must(ErrnoError(errno, "connect"));
  } else if (self->rank() == 1) {
    fd.Reset(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  }
  self->Measure("plain TCP, rank 0 to 1", [&] {
    for (int64_t i = 0; fd.valid() && i < self->slots(); ++i) {
      if (!Transfer(fd.get(), slot->data(), slot->size(), self->rank() == 0)) std::_Exit(1);
    }
  });
}

// Broadcasts and exchanges of all bytes by one wire. The broadcast's name gets the wire's.
void MeasureWire(const std::string& name, absl::StatusOr<std::unique_ptr<Wire>> wire,
                 std::vector<char>* slot, Rank* self) {
  Must(wire.status());
  const auto mine = (*wire)->Open(kEpoch, self->rank(), self->ranks());
  Must(mine.status());
  const auto wait = [](auto submit) {
    std::promise<absl::Status> promise;
    auto future = promise.get_future();
    submit([&promise](absl::Status status) { promise.set_value(std::move(status)); });
    Must(future.get());
  };
  const std::vector<std::string> addresses = self->Gather(*mine);
  wait([&](auto done) { (*wire)->Connect(kEpoch, addresses, kTimeout, std::move(done)); });
  const MemorySpan span{slot->data(), static_cast<int64_t>(slot->size()), nullptr};
  uint64_t seq = 0;
  const auto measure = [&](const std::string& what, auto make) {
    self->Measure(what.c_str(), [&] {
      for (int64_t i = 0; i + 1 < self->slots(); ++i) {
        (*wire)->Submit(make(), [](const absl::Status& status) { Must(status); });
        ++seq;
      }
      wait([&](auto done) { (*wire)->Submit(make(), std::move(done)); });
      ++seq;
    });
  };
  measure(name + ": broadcast", [&] {
    return WireBroadcast{kEpoch, WireSeq(seq), 0, span, kTimeout};
  });
  measure(name + ": exchange, root to each", [&] {
    WireExchange exchange{kEpoch, WireSeq(seq), {}, {}, kTimeout};
    if (self->rank() != 0) exchange.receives.push_back({0, span});
    for (int peer = 1; self->rank() == 0 && peer < self->ranks(); ++peer) {
      exchange.sends.push_back({peer, span});
    }
    return exchange;
  });
  self->Barrier();
}

void Run(int rank, const Options& options, const WireCertificates& certificates,
         std::vector<int> sockets) {
  Rank self(rank, options, std::move(sockets));
  std::vector<char> slot(static_cast<size_t>(options.slot), static_cast<char>(rank));
  const int64_t slots = options.bytes / options.slot;

  if (rank == 0) {
    std::printf("%d ranks, %lld bytes in slots of %lld\n", options.ranks,
                static_cast<long long>(options.bytes), static_cast<long long>(options.slot));
  }
  std::vector<char> copy(rank == 0 ? slot.size() : 0);
  self.Measure("memcpy (rank 0 alone)", [&] {
    if (rank != 0) return;
    for (int64_t i = 0; i < slots; ++i) {
      std::memcpy(copy.data(), slot.data(), slot.size());
      asm volatile("" : : "r"(copy.data()) : "memory");
    }
  });

  MeasurePlain(&slot, &self);

  auto baseline = GlooBaseline::Connect(
      "127.0.0.1", rank, options.ranks,
      [&](const std::string& mine) -> absl::StatusOr<std::vector<std::string>> {
        return self.Gather(mine);
      },
      kTimeout);
  Must(baseline.status());
  self.Measure("gloo::broadcast", [&] {
    for (int64_t i = 0; i < slots; ++i) {
      Must((*baseline)->Broadcast(slot.data(), options.slot, 0, kTimeout));
    }
  });
  self.Barrier();
  baseline->reset();

  MeasureWire("Gloo", MakeGlooWire({}), &slot, &self);
  MeasureWire("sockets", MakeSocketWire({}), &slot, &self);
  MeasureWire("sockets x 4", MakeSocketWire({.streams = 4}), &slot, &self);
  MeasureWire("sockets, TLS", MakeSocketWire({.certificates = certificates}), &slot, &self);
}

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    const size_t equals = argument.find('=');
    const std::string_view name = argument.substr(0, equals);
    const long long value =
        equals == std::string_view::npos ? 0 : std::atoll(argument.data() + equals + 1);
    if (name == "--bytes") options.bytes = value;
    if (name == "--slot") options.slot = value;
    if (name == "--ranks") options.ranks = static_cast<int>(value);
    if (name == "--rounds") options.rounds = static_cast<int>(value);
    if (value <= 0 ||
        (name != "--bytes" && name != "--slot" && name != "--ranks" && name != "--rounds")) {
      std::fprintf(stderr, "usage: %s [--bytes=N] [--slot=N] [--ranks=N] [--rounds=N]\n", argv[0]);
      return 2;
    }
  }
  if (options.ranks < 2 || options.ranks > 16 || options.slot > options.bytes) {
    std::fprintf(stderr, "want 2 to 16 ranks and a slot within the bytes\n");
    return 2;
  }
  const TestAuthority root("benchmark");  // made before fork, so that all ranks share it
  CertificateRequest request;
  request.uris = {"spiffe://benchmark/daemon"};
  const IssuedCertificate issued = root.Issue(request);
  auto own = std::make_shared<Certificates>();
  own->certificate = issued.certificate;
  own->key = issued.key;
  own->roots = root.root();
  own->identity = request.uris.front();
  const WireCertificates certificates = [own] { return own; };
  std::vector<int> sockets(options.ranks, -1);
  std::vector<pid_t> children;
  for (int rank = 1; rank < options.ranks; ++rank) {
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) return 1;
    const pid_t pid = fork();
    if (pid < 0) return 1;
    if (pid == 0) {
      for (const int fd : sockets) {
        if (fd >= 0) close(fd);
      }
      close(fds[0]);
      Run(rank, options, certificates, {fds[1]});
      _exit(0);
    }
    close(fds[1]);
    sockets[rank] = fds[0];
    children.push_back(pid);
  }
  Run(0, options, certificates, sockets);
  int result = 0;
  for (const pid_t pid : children) {
    int status = 0;
    waitpid(pid, &status, 0);
    if (status != 0) result = 1;
  }
  return result;
}

}  // namespace
}  // namespace refitd

int main(int argc, char** argv) { return refitd::Main(argc, argv); }
