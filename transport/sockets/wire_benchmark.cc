// Broadcast of N bytes in slots of S between processes over loopback: the wire in the clear and
// under TLS, each with one connection and with four, as a chain and as an exchange (the root sends
// to each), against memcpy and one plain TCP connection from rank 0 to rank 1.
//
//   wire_benchmark [--bytes=N] [--slot=N] [--ranks=N] [--rounds=N] [--namespace=NAME --address=IP]
//
// Three more cases use the plain connection: 128 KiB again and again, as iperf3 sends, which stay
// in the processor's cache; and MSG_ZEROCOPY, and vmsplice with splice, which spare a copy. With
// --namespace, rank 1 is in that network namespace (of `ip netns add`), where it listens on the
// IPv4 address, and only the plain connections are measured; needs root.
//
// Rank 0 is the root and reports the payload over the time from the first submission to the last
// end. All cases take turns within a round. Each figure is the median of the rounds, and so is each
// ratio, whose two parts are of one round: "of TCP" to the plain connection, "of clear" to the same
// case without TLS.
#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/status.h"
#include "transport/base/unique_fd.h"
#include "transport/sockets/plain_tcp_testing.h"
#include "transport/sockets/socket_wire.h"
#include "transport/tls/test_certificates.h"

namespace refitd {
namespace {

constexpr Duration kTimeout = std::chrono::seconds(60);
constexpr CommunicatorId kCommunicator{1};
constexpr char kPlainTcp[] = "plain TCP, rank 0 to 1";
constexpr size_t kIperfBytes = size_t{128} << 10;

struct Options {
  int64_t bytes = int64_t{1} << 30;
  int64_t slot = int64_t{16} << 20;
  int ranks = 2;
  int rounds = 5;
  std::string network_namespace;  // of rank 1; empty: that of rank 0
  std::string address = "127.0.0.1";
};

void Must(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "wire_benchmark: %s\n", status.ToString().c_str());
  std::_Exit(1);
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
  // The sum over all ranks.
  double Sum(double mine) {
    double sum = 0;
    for (const std::string& one :
         Gather(std::string(reinterpret_cast<char*>(&mine), sizeof(mine)))) {
      std::memcpy(&mine, one.data(), sizeof(mine));
      sum += mine;
    }
    return sum;
  }
  void Barrier() { Gather("b"); }
  int rank() const { return rank_; }
  int ranks() const { return options_.ranks; }
  int64_t bytes() const { return options_.bytes; }
  int64_t slots() const { return options_.bytes / options_.slot; }

 private:
  void Move(int peer, std::string* data, bool out) {
    const int fd = sockets_[rank_ == 0 ? peer : 0];
    if (!(out ? SendAll(fd, data->data(), data->size())
              : ReceiveAll(fd, data->data(), data->size()))) {
      Must(Error(absl::StatusCode::kUnavailable, "rank {}: rank {} is gone", rank_, peer));
    }
  }

  const int rank_;
  const Options options_;
  const std::vector<int> sockets_;
};

// One way of moving all bytes once.
struct Case {
  std::string name;
  std::function<void()> round;
  std::string clear;          // the name of the case without TLS; empty: this one has none
  std::vector<double> rates;  // GB/s, by round
  // Processor seconds per GB, of all ranks together, with the kernel's work for them.
  std::vector<double> seconds;
};

double ProcessorSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// The time ends when the last rank is done.
void Measure(Case* which, Rank* self) {
  self->Barrier();
  const double used = ProcessorSeconds();
  const auto start = std::chrono::steady_clock::now();
  which->round();
  self->Barrier();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  const double gigabytes = static_cast<double>(self->bytes()) / 1e9;
  which->rates.push_back(gigabytes / seconds.count());
  which->seconds.push_back(self->Sum(ProcessorSeconds() - used) / gigabytes);
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// The median over the rounds of one case's rate to another's.
double RatioOf(const Case& a, const Case& b) {
  std::vector<double> ratios;
  for (size_t i = 0; i < a.rates.size(); ++i) ratios.push_back(a.rates[i] / b.rates[i]);
  return Median(ratios);
}

void Print(const std::vector<Case>& cases) {
  const auto named = [&cases](const std::string& name) {
    return std::find_if(cases.begin(), cases.end(),
                        [&name](const Case& one) { return one.name == name; });
  };
  const auto tcp = named(kPlainTcp);
  std::printf("%-36s %6s %18s %8s %9s %9s\n", "", "GB/s", "(least to most)", "of TCP", "of clear",
              "CPU s/GB");
  for (const Case& one : cases) {
    const auto [least, most] = std::minmax_element(one.rates.begin(), one.rates.end());
    const auto clear = named(one.clear);
    char of_clear[16] = "";
    if (clear != cases.end()) {
      std::snprintf(of_clear, sizeof(of_clear), "%.2f", RatioOf(one, *clear));
    }
    std::printf("%-36s %6.2f     (%5.2f to %5.2f) %8.2f %9s %9.2f\n", one.name.c_str(),
                Median(one.rates), *least, *most, RatioOf(one, *tcp), of_clear,
                Median(one.seconds));
  }
  std::fflush(stdout);
}

void EnterNamespace(const std::string& name) {
  const UniqueFd fd(open(("/run/netns/" + name).c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.valid() && setns(fd.get(), CLONE_NEWNET) == 0) return;
  Must(ErrnoError(errno, "network namespace " + name));
}

// One connection from rank 0 to rank 1.
UniqueFd ConnectPlain(const std::string& address, Rank* self) {
  UniqueFd listener;
  uint16_t port = 0;
  if (self->rank() == 1) {
    auto made = ListenOn(address, &port);
    Must(made.status());
    listener = *std::move(made);
  }
  const auto all = self->Gather(std::string(reinterpret_cast<char*>(&port), sizeof(port)));
  if (self->rank() > 1) return UniqueFd();
  std::memcpy(&port, all[1].data(), sizeof(port));
  auto fd = self->rank() == 0 ? DialPlain(address, port) : AcceptOne(listener.get());
  Must(fd.status());
  return *std::move(fd);
}

// A wire that is connected to those of the other ranks.
class ConnectedWire {
 public:
  ConnectedWire(absl::StatusOr<std::unique_ptr<Wire>> wire, Rank* self) {
    Must(wire.status());
    wire_ = *std::move(wire);
    const auto mine = wire_->Open(kCommunicator, self->rank(), self->ranks());
    Must(mine.status());
    const std::vector<std::string> addresses = self->Gather(*mine);
    Wait([&](auto done) { wire_->Connect(kCommunicator, addresses, kTimeout, std::move(done)); });
  }

  // Runs `count` operations, which `make` makes of their sequence numbers.
  template <typename F>
  void Run(int64_t count, F make) {
    for (int64_t i = 0; i + 1 < count; ++i) {
      wire_->Submit(make(seq_++), [](const absl::Status& status) { Must(status); });
    }
    Wait([&](auto done) { wire_->Submit(make(seq_++), std::move(done)); });
  }

 private:
  template <typename F>
  static void Wait(F submit) {
    std::promise<absl::Status> promise;
    auto future = promise.get_future();
    submit([&promise](absl::Status status) { promise.set_value(std::move(status)); });
    Must(future.get());
  }

  std::unique_ptr<Wire> wire_;
  uint64_t seq_ = 0;
};

// Adds broadcasts and exchanges of all bytes by one wire. `clear`: the name of the wire without
// TLS, or empty.
void AddWire(const std::string& name, const std::string& clear, SocketWireOptions options,
             const MemorySpan& slot, Rank* self, std::vector<Case>* cases) {
  auto wire = std::make_shared<ConnectedWire>(MakeSocketWire(std::move(options)), self);
  const auto add = [&](const std::string& what, auto make) {
    cases->push_back({name + what,
                      [wire, self, make] { wire->Run(self->slots(), make); },
                      clear.empty() ? "" : clear + what,
                      {},
                      {}});
  };
  add(": broadcast", [slot](uint64_t seq) {
    return WireBroadcast{kCommunicator, WireSeq(seq), 0, slot, kTimeout};
  });
  add(": exchange, root to each", [slot, self](uint64_t seq) {
    WireExchange exchange{kCommunicator, WireSeq(seq), {}, {}, kTimeout};
    if (self->rank() != 0) exchange.receives.push_back({0, slot});
    for (int peer = 1; self->rank() == 0 && peer < self->ranks(); ++peer) {
      exchange.sends.push_back({peer, slot});
    }
    return exchange;
  });
}

void AddWires(const WireCertificates& certificates, const MemorySpan& span, Rank* self,
              std::vector<Case>* cases) {
  AddWire("clear", "", {}, span, self, cases);
  AddWire("clear x 4", "", {.streams = 4}, span, self, cases);
  AddWire("TLS", "clear", {.certificates = certificates}, span, self, cases);
  AddWire("TLS x 4", "clear x 4", {.streams = 4, .certificates = certificates}, span, self, cases);
}

void Run(int rank, const Options& options, const WireCertificates& certificates,
         std::vector<int> sockets) {
  Rank self(rank, options, std::move(sockets));
  std::vector<char> slot(static_cast<size_t>(options.slot), static_cast<char>(rank));
  std::vector<char> copy(rank == 0 ? slot.size() : 0);
  const MemorySpan span{slot.data(), static_cast<int64_t>(slot.size()), nullptr};
  const bool apart = !options.network_namespace.empty();
  if (apart && rank == 1) EnterNamespace(options.network_namespace);
  const UniqueFd tcp = ConnectPlain(options.address, &self);
  bool copied = false;  // by the kernel, in spite of MSG_ZEROCOPY

  std::vector<Case> cases;
  const auto each_slot = [&self](auto move) {
    return [&self, move] {
      for (int64_t i = 0; i < self.slots(); ++i) move();
    };
  };
  cases.push_back({"memcpy (rank 0 alone)",
                   each_slot([&] {
                     if (copy.empty()) return;
                     std::memcpy(copy.data(), slot.data(), slot.size());
                     asm volatile("" : : "r"(copy.data()) : "memory");
                   }),
                   "",
                   {},
                   {}});
  // `piece`: bytes that one call moves, from and to the start of the slot.
  const auto add_plain = [&](const std::string& name, size_t piece, auto send) {
    const auto move = [&, piece, send] {
      for (size_t left = tcp.valid() ? slot.size() : 0; left > 0;) {
        const size_t bytes = std::min(left, piece);
        const bool ok = rank == 0 ? send(tcp.get(), slot.data(), bytes)
                                  : ReceiveAll(tcp.get(), slot.data(), bytes);
        if (!ok) std::_Exit(1);
        left -= bytes;
      }
    };
    cases.push_back({name, each_slot(move), "", {}, {}});
  };
  add_plain(kPlainTcp, slot.size(), SendAll);
  add_plain("the same, 128 KiB again and again", kIperfBytes, SendAll);
  add_plain("the same, MSG_ZEROCOPY", slot.size(),
            [&copied](int fd, const void* data, size_t bytes) {
              return SendAllZeroCopy(fd, data, bytes, &copied);
            });
  add_plain("the same, vmsplice and splice", slot.size(), SendAllSpliced);
  if (!apart) AddWires(certificates, span, &self, &cases);

  for (Case& one : cases) one.round();  // touches pages, makes connections
  for (int round = 0; round < options.rounds; ++round) {
    for (Case& one : cases) Measure(&one, &self);
  }
  self.Barrier();
  if (rank != 0) return;
  std::printf("%d ranks, %lld bytes in slots of %lld, %d rounds\n", options.ranks,
              static_cast<long long>(options.bytes), static_cast<long long>(options.slot),
              options.rounds);
  Print(cases);
  std::printf("MSG_ZEROCOPY: the kernel %s\n", copied ? "copied nevertheless" : "did not copy");
}

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    const size_t equals = std::min(argument.find('='), argument.size());
    const std::string_view name = argument.substr(0, equals);
    const std::string value(argument.substr(std::min(equals + 1, argument.size())));
    const long long number = std::atoll(value.c_str());
    bool known = true;
    if (name == "--bytes") {
      options.bytes = number;
    } else if (name == "--slot") {
      options.slot = number;
    } else if (name == "--ranks") {
      options.ranks = static_cast<int>(number);
    } else if (name == "--rounds") {
      options.rounds = static_cast<int>(number);
    } else if (name == "--namespace") {
      options.network_namespace = value;
    } else if (name == "--address") {
      options.address = value;
    } else {
      known = false;
    }
    if (!known || value.empty()) {
      std::fprintf(stderr,
                   "usage: %s [--bytes=N] [--slot=N] [--ranks=N] [--rounds=N] [--namespace=NAME "
                   "--address=IP]\n",
                   argv[0]);
      return 2;
    }
  }
  if (options.ranks < 2 || options.ranks > 16 || options.slot <= 0 ||
      options.slot > options.bytes || options.rounds < 1) {
    std::fprintf(stderr, "want 2 to 16 ranks, rounds, and a slot within the bytes\n");
    return 2;
  }
  const TestAuthority root("benchmark");  // made before fork, so that all ranks share it
  const WireCertificates certificates =
      [own = IssueCertificates(root, "spiffe://benchmark/daemon", root)] { return own; };
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
