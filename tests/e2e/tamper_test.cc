// Somebody between two daemons changes the bytes of the data plane (P1, P9). Each daemon has a
// network namespace, and between them lie two more, from which the attacker answers each daemon
// with the other's address. Links of the control plane pass unchanged.
//
// Whatever the attacker does, the update aborts, or goes on without the daemon whose wire failed,
// and names a daemon. No engine takes what arrived for good (Rank checks), and an update that the
// attacker leaves alone commits everywhere. If the machine allows no namespaces, the tests say so
// and pass.
#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <list>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/e2e/certified.h"
#include "tests/e2e/client_members.h"
#include "tests/e2e/network.h"
#include "transport/base/mutex.h"
#include "transport/base/unique_fd.h"

namespace refitd::e2e {
namespace {

constexpr char kAlpha[] = "10.78.0.1";
constexpr char kBeta[] = "10.78.0.2";
constexpr uint16_t kLinkPort = 7411;
constexpr uint16_t kDataPort = 7412;
// How many bytes of the data plane pass unchanged once the attacker is told to act.
constexpr int64_t kUntouchedBytes = 100'000;

// The ways to change one record of TLS. All but kFlip leave every record whole, so that only what
// TLS says about the records' order and end can tell.
enum class Tamper { kFlip, kDrop, kReplay, kTruncate, kReorder };
constexpr Tamper kTampers[] = {Tamper::kFlip, Tamper::kDrop, Tamper::kReplay, Tamper::kTruncate,
                               Tamper::kReorder};
std::string Name(Tamper tamper) {
  switch (tamper) {
    case Tamper::kFlip:
      return "a bit of a record is flipped";
    case Tamper::kDrop:
      return "a record is dropped";
    case Tamper::kReplay:
      return "a record comes twice";
    case Tamper::kTruncate:
      return "the connection ends before a record";
    case Tamper::kReorder:
      return "a record comes after the next one";
  }
  return "";
}

// Says which record is to be tampered with, and how. Thread-safe.
class Attacker {
 public:
  // Tampers once, in one direction: the dialling side's bytes, or with `answers` the other side's.
  void Attack(Tamper tamper, bool answers) {
    MutexLock lock(&mutex_);
    plan_ = {tamper, answers};
    untouched_ = kUntouchedBytes;
  }
  // How to change the next record of that direction, which has `bytes` bytes; nullopt: not at all.
  std::optional<Tamper> Next(bool answers, size_t bytes) {
    MutexLock lock(&mutex_);
    passed_ += static_cast<int64_t>(bytes);
    if (!plan_.has_value() || plan_->answers != answers) return std::nullopt;
    untouched_ -= static_cast<int64_t>(bytes);
    if (untouched_ > 0) return std::nullopt;
    ++attacks_;
    const Tamper now = plan_->tamper;
    plan_.reset();
    return now;
  }
  int attacks() const {
    MutexLock lock(&mutex_);
    return attacks_;
  }
  // Bytes of all records that came, in both directions.
  int64_t passed() const {
    MutexLock lock(&mutex_);
    return passed_;
  }

 private:
  struct Plan {
    Tamper tamper;
    bool answers;
  };
  mutable Mutex mutex_;
  std::optional<Plan> plan_ ABSL_GUARDED_BY(mutex_);
  int64_t untouched_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t passed_ ABSL_GUARDED_BY(mutex_) = 0;
  int attacks_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Passes one direction of a connection on, as the attacker wants it; used by one thread.
class Direction {
 public:
  Direction(Attacker* attacker, bool answers) : attacker_(attacker), answers_(answers) {}

  // Passes bytes on until one end of the connection closes.
  void Pass(int from, int to) {
    std::string bytes(1 << 16, '\0');
    while (true) {
      const ssize_t n = recv(from, bytes.data(), bytes.size(), 0);
      if (n <= 0) break;
      std::string out(bytes, 0, static_cast<size_t>(n));
      if (attacker_ != nullptr) out = ByRecord(out);
      size_t sent = 0;
      while (sent < out.size()) {
        const ssize_t m = send(to, out.data() + sent, out.size() - sent, MSG_NOSIGNAL);
        if (m <= 0) break;
        sent += static_cast<size_t>(m);
      }
      if (sent < out.size() || ended_) break;
    }
    shutdown(to, SHUT_WR);
    shutdown(from, SHUT_RD);
  }

 private:
  std::string ByRecord(const std::string& bytes) {
    constexpr size_t kHeader = 5;  // type, version (2), length of the rest (2, big endian)
    std::string out;
    partial_ += bytes;
    while (partial_.size() >= kHeader && !ended_) {
      const size_t size =
          kHeader + static_cast<uint8_t>(partial_[3]) * 256U + static_cast<uint8_t>(partial_[4]);
      if (partial_.size() < size) break;
      Take(partial_.substr(0, size), &out);
      partial_.erase(0, size);
    }
    return out;
  }

  void Take(std::string record, std::string* out) {
    const std::optional<Tamper> tamper = attacker_->Next(answers_, record.size());
    if (tamper == Tamper::kTruncate) {
      ended_ = true;
    } else if (tamper == Tamper::kReorder) {
      held_ = record;
    } else if (tamper != Tamper::kDrop) {
      if (tamper == Tamper::kFlip) record[record.size() / 2] ^= 0x10;
      *out += record;
      if (tamper == Tamper::kReplay) *out += record;
      *out += held_;
      held_.clear();
    }
  }

  Attacker* const attacker_;  // null: all bytes pass unchanged
  const bool answers_;
  std::string partial_;  // the start of a record whose end has not arrived
  std::string held_;     // the record that goes after the next one
  bool ended_ = false;
};

sockaddr_in AddressOf(const std::string& ip, uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  REQUIRE(inet_pton(AF_INET, ip.c_str(), &address.sin_addr) == 1);
  return address;
}

// A socket of that namespace; an invalid one if it can't be made.
UniqueFd SocketIn(const Namespace& where) {
  UniqueFd made;
  std::thread([&] {
    const UniqueFd network(open(where.path().c_str(), O_RDONLY | O_CLOEXEC));
    if (setns(network.get(), CLONE_NEWNET) != 0) return;
    made.Reset(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  }).join();
  return made;
}

// Takes connections to an address in `near`, and passes each on to the same address in `far`.
class Relay {
 public:
  Relay(const Namespace& near, const Namespace& far, const std::string& ip, uint16_t port,
        Attacker* attacker)
      : far_(far), address_(AddressOf(ip, port)), attacker_(attacker), listener_(SocketIn(near)) {
    REQUIRE(listener_.valid());
    REQUIRE(bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address_), sizeof(address_)) ==
            0);
    REQUIRE(listen(listener_.get(), 64) == 0);
    thread_ = std::thread([this] { Run(); });
  }
  ~Relay() {
    shutdown(listener_.get(), SHUT_RDWR);  // from now on accept fails
    thread_.join();
    for (Connection& connection : connections_) {
      shutdown(connection.near.get(), SHUT_RDWR);
      shutdown(connection.far.get(), SHUT_RDWR);
      connection.there.join();
      connection.back.join();
    }
  }
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

 private:
  struct Connection {
    UniqueFd near;
    UniqueFd far;
    std::thread there;
    std::thread back;
  };

  void Run() {
    while (true) {
      UniqueFd near(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!near.valid()) return;
      UniqueFd far = SocketIn(far_);
      if (connect(far.get(), reinterpret_cast<const sockaddr*>(&address_), sizeof(address_)) != 0) {
        continue;  // nobody listens there, so the caller's connection ends too
      }
      Connection& connection = connections_.emplace_back();
      connection.near = std::move(near);
      connection.far = std::move(far);
      const int a = connection.near.get();
      const int b = connection.far.get();
      connection.there = std::thread([=, this] { Direction(attacker_, false).Pass(a, b); });
      connection.back = std::thread([=, this] { Direction(attacker_, true).Pass(b, a); });
    }
  }

  const Namespace& far_;
  const sockaddr_in address_;
  Attacker* const attacker_;
  const UniqueFd listener_;
  std::thread thread_;
  std::list<Connection> connections_;  // used by `thread_`, and after its end
};

// alpha 10.78.0.1 -- 10.78.0.2 attacker | attacker 10.78.0.1 -- 10.78.0.2 beta
class Network {
 public:
  // Empty: the network is ready. Else why this machine can have none.
  std::string Make() {
    for (const Namespace* each : {&alpha, &beta, &by_alpha, &by_beta}) {
      if (!each->valid()) return "network namespaces can't be made here";
      if (std::string failed = each->Run("ip link set lo up"); !failed.empty()) return failed;
    }
    std::string failed = Join(alpha, kAlpha, by_alpha, kBeta);
    if (failed.empty()) failed = Join(beta, kBeta, by_beta, kAlpha);
    return failed;
  }

  Namespace alpha;
  Namespace beta;
  Namespace by_alpha;  // the attacker stands for beta here
  Namespace by_beta;   // the attacker stands for alpha here

 private:
  static std::string Join(const Namespace& one, const std::string& ip_of_one,
                          const Namespace& other, const std::string& ip_of_other) {
    for (const std::string& command :
         {"ip link add v0 type veth peer name v0 netns " + other.path(),
          "ip addr add " + ip_of_one + "/24 dev v0", std::string("ip link set v0 up")}) {
      if (std::string failed = one.Run(command); !failed.empty()) return failed;
    }
    for (const std::string& command :
         {"ip addr add " + ip_of_other + "/24 dev v0", std::string("ip link set v0 up")}) {
      if (std::string failed = other.Run(command); !failed.empty()) return failed;
    }
    return "";
  }
};

// The daemons make no catch-ups, so that an instance that an update left dirty is seen to be dirty.
std::vector<std::string> FlagsOf(const TlsFiles& files, const std::string& id,
                                 std::vector<std::string> more) {
  more.insert(more.end(), {"--daemon-id=" + id, std::string("--peers-identity=") + kDaemons,
                           "--catch-ups=false", "--data-interface=v0",
                           fmt::format("--data-port={}", kDataPort), "--peers-silence-ms=30000"});
  return Flags(files, std::move(more));
}

// Whether each byte of the rank's tensors is that of one of the two versions, not all of the same
// one.
bool EachByteIsOfEither(const Rank& rank, const Model& model, int64_t one, int64_t other) {
  const std::vector<std::string> ones = BytesOf(model, one);
  const std::vector<std::string> others = BytesOf(model, other);
  const Layout& layout = rank.layout();
  return std::all_of(layout.pieces.begin(), layout.pieces.end(), [&](const Piece& piece) {
    const char* const held = rank.memory() + piece.byte_offset;
    for (size_t i = 0; i < ones[piece.tensor].size(); ++i) {
      if (held[i] != ones[piece.tensor][i] && held[i] != others[piece.tensor][i]) return false;
    }
    return true;
  });
}

enum class Side { kAlpha, kBeta };

bool NamesADaemon(const std::string& text) {
  return text.find("daemon alpha") != std::string::npos ||
         text.find("daemon beta") != std::string::npos;
}

// Checks that the update from version `good` to `version` was aborted, that all know it, and that
// what the daemons say is what each engine knows (P2).
void CheckAborted(Daemon& alpha, const std::vector<Rank*>& ranks, const Model& model, int64_t good,
                  int64_t version) {
  for (Rank* rank : ranks) {
    const std::string name = rank == ranks.front() ? "near" : "far";
    INFO(name);
    REQUIRE(rank->Await([&](const Rank::Seen& s) {
      return s.aborts > 0 && s.aborted.version == Version(version);
    }));
    const client::Aborted aborted = rank->seen().aborted;
    CHECK(NamesADaemon(aborted.reason));
    CHECK(rank->engine().version() ==
          (aborted.dirty ? std::nullopt : std::optional(Version(good))));
    CHECK(alpha.InstanceState("g", name) == (aborted.dirty ? "dirty" : "clean"));
    CHECK(EachByteIsOfEither(*rank, model, good, version));
  }
}

// Attacks updates of a group with engines on both sides and the trainer on one; alpha coordinates,
// and dials beta's data plane.
void AttackUpdates(Side side) {
  Network net;
  if (const std::string why = net.Make(); !why.empty()) {
    WARN("SKIPPED: " << why);
    return;
  }
  Attacker attacker;
  const Relay links(net.by_beta, net.by_alpha, kAlpha, kLinkPort, nullptr);
  const Relay data(net.by_alpha, net.by_beta, kBeta, kDataPort, &attacker);
  const std::string coordinator = fmt::format("{}:{}", kAlpha, kLinkPort);
  Certified certified;
  Daemon alpha(FlagsOf(certified.Issue("refitd/a"), "alpha", {"--listen-tcp=" + coordinator}),
               net.alpha.launcher());
  Daemon beta(FlagsOf(certified.Issue("refitd/b"), "beta", {}), net.beta.launcher());
  const auto at = [&](Side where) {
    client::ConnectOptions connect;
    connect.socket = where == Side::kAlpha ? alpha.socket() : beta.socket();
    connect.group = "g";
    if (where == Side::kBeta) connect.coordinator = coordinator;
    connect.spec = client::GroupSpec{
        .trainer_ranks = 1, .min_instances = 2, .slot_bytes = int64_t{256} << 10, .slots = 4};
    return connect;
  };
  const Model model = PlainModel(8, 512, 256);  // 2 MiB
  Pusher pusher(at(side), model);
  const auto engine_at = [&](Side where) {
    client::ConnectOptions connect = at(where);
    connect.reattach = std::chrono::minutes(1);
    return connect;
  };
  Rank near(engine_at(Side::kAlpha), "near", client::Delivery::kInPlace, model);
  Rank far(engine_at(Side::kBeta), "far", client::Delivery::kInPlace, model);
  const auto installed = [&](int64_t version) {
    const absl::Status status = pusher.Install(version);
    INFO(status << "\nalpha:\n" << alpha.log() << "\nbeta:\n" << beta.log());
    REQUIRE(status.ok());
    for (Rank* rank : {&near, &far}) {
      REQUIRE(rank->Await([&](const Rank::Seen& s) { return s.committed == Version(version); }));
    }
  };
  installed(1);
  REQUIRE(attacker.passed() > ModelBytes(model));

  int64_t good = 1;
  for (const Tamper tamper : kTampers) {
    INFO(Name(tamper));
    const int attacks = attacker.attacks();
    const int64_t version = good + 1;
    attacker.Attack(tamper, side == Side::kBeta);
    const int losses = far.seen().losses;
    const absl::Status status = pusher.Install(version);
    INFO(status << "\nalpha:\n" << alpha.log() << "\nbeta:\n" << beta.log());
    REQUIRE(attacker.attacks() == attacks + 1);
    if (status.ok()) {
      // Beta has no trainer, so the update went on without it.
      CHECK(side == Side::kAlpha);
      REQUIRE(near.Await([&](const Rank::Seen& s) { return s.committed == Version(version); }));
      REQUIRE(far.Await([&](const Rank::Seen& s) { return s.losses == losses + 1; }));
      CHECK(NamesADaemon(far.seen().reason));
      CHECK(EachByteIsOfEither(far, model, good, version));
      REQUIRE(far.Await([&](const Rank::Seen& s) { return s.reattached == losses + 1; }));
      CHECK(far.seen().held.value_or(Version(good)) == Version(good));
      CHECK(alpha.Group("g").version() == version);
    } else {
      CHECK(absl::IsAborted(status));
      CHECK(NamesADaemon(Message(status)));
      CheckAborted(alpha, {&near, &far}, model, good, version);
      CHECK(far.seen().losses == losses);
      CHECK(alpha.Group("g").version() == good);
    }
    good = version + 1;
    installed(good);
    CHECK(near.seen().losses == 0);
  }
}

TEST_CASE(
    "whoever tampers between daemons takes one from an update at most, and no byte is wrong") {
  AttackUpdates(Side::kAlpha);
}

TEST_CASE("whoever tampers between daemons ends the update that another daemon's trainer pushes") {
  AttackUpdates(Side::kBeta);
}

}  // namespace
}  // namespace refitd::e2e
