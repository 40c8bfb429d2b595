// tools/bench nodes: two daemons on this host, linked over loopback. Real processes: two refitd,
// this process as the trainer at the first, others of this binary as engines at the second.
//
//   nodes_bench --refitd PATH [--case NAME]... [--model qwen3-0.6b] [--rounds 15] [--tls] [--json]
//   nodes_bench --role engine --socket PATH ...            (started by the former)
//   nodes_bench --role tcp --bytes N                       (likewise; the other end is its stdin)
//
// The baseline is one plain TCP connection between two processes: the same bytes from the same
// memory straight into the receiver's, in the clear, with nothing but large sends and receives.
// Baseline and measured cases take turns. Every round has new random weights and a poisoned
// destination; the engine's process computes a digest that checks the result, outside the measured
// time.
//
// With --tls the daemons have certificates, made for the run, and links and weights cross under
// TLS. The baseline stays in the clear.
//
// The cases "faults" and "chaos" kill and stop real processes (faults.h). They use the daemons of
// this build, take minutes, and run only if they are named.
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <filesystem>

#include "tests/bench/faults.h"
#include "tests/bench/report.h"
#include "tests/bench/session.h"
#include "transport/base/unique_fd.h"
#include "transport/sockets/plain_tcp_testing.h"
#include "transport/tls/test_certificates.h"

namespace refitd::bench {
namespace {

using std::chrono::steady_clock;

// Rank 1 of the baseline: it listens and tells its port on stdin, which is a socket; then, for each
// byte on stdin, it receives the model once and answers a byte.
int RunTcp(int64_t bytes) {
  uint16_t port = 0;
  const UniqueFd listener = Must(ListenOnLoopback(&port), "baseline");
  if (!SendAll(0, &port, sizeof(port))) return 1;
  const UniqueFd tcp = Must(AcceptOne(listener.get()), "baseline");
  const std::shared_ptr<HostRegion> memory = MappedMemfd(bytes);
  char byte = 0;
  while (ReceiveAll(0, &byte, 1)) {
    if (!ReceiveAll(tcp.get(), memory->data(), static_cast<size_t>(bytes))) return 1;
    if (!SendAll(0, &byte, 1)) return 1;
  }
  return 0;
}

// Both ends of the baseline; this process is rank 0.
class TcpPair {
 public:
  TcpPair(const std::string& self, int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    int fds[2] = {-1, -1};
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) std::exit(1);
    control_ = UniqueFd(fds[0]);
    const UniqueFd theirs(fds[1]);
    child_ = std::make_unique<Child>(
        std::vector<std::string>{self, "--role", "tcp", "--bytes", fmt::format("{}", bytes)}, false,
        theirs.get());
    uint16_t port = 0;
    Check(ReceiveAll(control_.get(), &port, sizeof(port)));
    tcp_ = Must(DialLoopback(port), "baseline");
  }

  // Sends the model; returns the seconds until the other process has all bytes.
  double Send(const char* data) {
    char byte = 't';
    const auto start = steady_clock::now();
    Check(SendAll(control_.get(), &byte, 1));
    Check(SendAll(tcp_.get(), data, bytes_));
    Check(ReceiveAll(control_.get(), &byte, 1));
    return SecondsSince(start);
  }

 private:
  static void Check(bool ok) {
    if (ok) return;
    fmt::print(stderr, "bench: the baseline's process ended\n");
    std::exit(1);
  }

  const size_t bytes_;
  UniqueFd control_;
  std::unique_ptr<Child> child_;
  UniqueFd tcp_;
};

// The daemons, and where their members attach.
struct Nodes {
  std::string self;  // this binary
  std::string socket_a;
  EnginePlace far;  // the second daemon, where the engines attach
};

int64_t WireBytes(const Nodes& nodes) {
  return StatusOf(nodes.socket_a).resources().wire_bytes_sent();
}

void BenchBroadcast(Report* report, const Nodes& nodes, const std::string& model, int rounds) {
  Session session(nodes.self, nodes.socket_a, "broadcast", model, {nodes.far});
  const int64_t bytes = session.model().bytes;
  TcpPair tcp(nodes.self, bytes);
  const std::vector<std::pair<Verification, double>> cases = {
      {Verification::kOff, 0.6}, {Verification::kTransfer, 0.5}, {Verification::kReadback, 0.0}};
  std::vector<std::vector<double>> seconds(cases.size());
  std::vector<double> tcp_seconds;
  const int threads = CopyThreads();
  FillRandom(session.data(), bytes, 1, threads);
  session.Update(Verification::kOff, kBucketBytes);  // makes pools and communicator, maps pages
  tcp.Send(session.data());
  for (int round = 0; round < rounds; ++round) {
    tcp_seconds.push_back(tcp.Send(session.data()));
    for (size_t c = 0; c < cases.size(); ++c) {
      FillRandom(session.data(), bytes, static_cast<uint64_t>(round) * 10 + c + 100, threads);
      seconds[c].push_back(session.Update(cases[c].first, kBucketBytes));
    }
  }
  const auto rate = [bytes](const std::vector<double>& s) {
    return static_cast<double>(bytes) / Median(s) / 1e9;
  };
  const double baseline = rate(tcp_seconds);
  const char* names[] = {"off", "transfer", "readback"};
  for (size_t c = 0; c < cases.size(); ++c) {
    report->Add({fmt::format("{} to the other node, {}, against TCP", model, names[c]),
                 rate(seconds[c]), "GB/s", baseline, rate(seconds[c]) / baseline, cases[c].second,
                 true});
  }
}

void BenchSmallUpdate(Report* report, const Nodes& nodes, int rounds) {
  Session session(nodes.self, nodes.socket_a, "small", "1mib", {nodes.far});
  std::vector<double> seconds;
  for (int i = 0; i < 20 + rounds * 30; ++i) {
    FillRandom(session.data(), session.model().bytes, static_cast<uint64_t>(i) + 1, 1);
    const double s = session.Update(Verification::kReadback, kBucketBytes);
    if (i >= 20) seconds.push_back(s);
  }
  report->Add(
      {"1 MiB model, begin to committed, p50", Median(seconds) * 1e3, "ms", 0, 0, 3.0, false});
}

// The cost of more engines on the far node: no byte on the wire, and about their local copies.
void BenchFanOut(Report* report, const Nodes& nodes, int rounds) {
  constexpr int kMany = 4;
  const std::string model = "256mib";
  Session one(nodes.self, nodes.socket_a, "one", model, {nodes.far});
  Session many(nodes.self, nodes.socket_a, "many", model,
               std::vector<EnginePlace>(kMany, nodes.far));
  const int64_t bytes = one.model().bytes;
  const int threads = CopyThreads();
  const std::shared_ptr<HostRegion> from = MappedMemfd(bytes);
  const std::shared_ptr<HostRegion> to = MappedMemfd(bytes);
  FillRandom(from->data(), bytes, 5, threads);
  std::vector<double> one_seconds;
  std::vector<double> many_seconds;
  std::vector<double> copy_seconds;
  int64_t one_bytes = 0;
  int64_t many_bytes = 0;
  const auto update = [&](Session* session, uint64_t seed, int64_t* wire) {
    FillRandom(session->data(), bytes, seed, threads);
    const int64_t before = WireBytes(nodes);
    const double seconds = session->Update(Verification::kOff, kBucketBytes);
    *wire += WireBytes(nodes) - before;
    return seconds;
  };
  for (int i = 0; i < rounds + 2; ++i) {
    const auto seed = static_cast<uint64_t>(i) * 2 + 1;
    const double one_s = update(&one, seed, &one_bytes);
    const double many_s = update(&many, seed + 1, &many_bytes);
    const auto start = steady_clock::now();
    for (int copy = 1; copy < kMany; ++copy) {
      ParallelMemcpy(to->data(), from->data(), bytes, threads);
    }
    const double copy_s = SecondsSince(start);
    if (i < 2) continue;
    one_seconds.push_back(one_s);
    many_seconds.push_back(many_s);
    copy_seconds.push_back(copy_s);
  }
  const double mib = 1 << 20;
  const double per_one = static_cast<double>(one_bytes) / (rounds + 2) / mib;
  const double per_many = static_cast<double>(many_bytes) / (rounds + 2) / mib;
  report->Add({"wire bytes of an update, 4 far engines against 1", per_many, "MiB", per_one,
               per_many / per_one, 1.0, false, true});
  const double t4 = Median(many_seconds) * 1e3;
  const double due = (Median(one_seconds) + Median(copy_seconds)) * 1e3;
  report->Add({"4 far engines, against 1 and three memcpy more", t4, "ms", due, t4 / due, 1.3,
               false, true});
}

}  // namespace

// Issues certificates for the daemon `id`, writes them into `dir`, and returns the flags that name
// them. Without an authority the flag is --insecure.
std::vector<std::string> TrustFlags(const TestAuthority* authority, const std::string& dir,
                                    const std::string& id) {
  if (authority == nullptr) return {"--insecure"};
  const TlsFiles files = TlsFilesIn(dir, id);
  WriteTlsFiles(files, authority->Issue({.uris = {"spiffe://bench/refitd/" + id}}),
                authority->root());
  return {"--tls-certificate", files.certificate, "--tls-key",        files.key,
          "--tls-roots",       files.roots,       "--peers-identity", "spiffe://bench/refitd/*"};
}

std::vector<std::string> With(std::vector<std::string> command,
                              const std::vector<std::string>& more) {
  command.insert(command.end(), more.begin(), more.end());
  return command;
}

int Main(int argc, char** argv) {
  CLI::App app("refitd's benchmark of two daemons on one host");
  std::string role;
  std::string refitd;
  EngineArgs engine;
  std::string model = "qwen3-0.6b";
  int rounds = 15;
  int64_t bytes = 0;
  bool json = false;
  bool tls = false;
  std::vector<std::string> cases;
  int faults = 500;
  uint64_t seed = 1;
  app.add_option("--role", role);
  app.add_option("--refitd", refitd);
  app.add_option("--socket", engine.place.socket);
  app.add_option("--coordinator", engine.place.coordinator);
  app.add_option("--group", engine.group);
  app.add_option("--instance", engine.instance);
  app.add_option("--bytes", bytes);
  app.add_option("--model", model, "qwen3-0.6b, qwen3-4b");
  app.add_option("--rounds", rounds, "measured rounds a case")->check(CLI::Range(1, 1000));
  app.add_option("--case", cases,
                 "of broadcast, small, fan-out (these are the default), faults, chaos")
      ->check(CLI::IsMember({"broadcast", "small", "fan-out", "faults", "chaos"}));
  app.add_option("--faults", faults, "of chaos: each in one update, with one update after it")
      ->check(CLI::Range(1, 100'000));
  app.add_option("--seed", seed, "of chaos");
  app.add_flag("--tls", tls, "links and weights cross under TLS");
  app.add_flag("--json", json, "one object a line");
  CLI11_PARSE(app, argc, argv);
  if (role == "engine") {
    engine.model = model;
    return RunEngine(engine);
  }
  if (role == "tcp") return RunTcp(bytes);

  signal(SIGPIPE, SIG_IGN);  // a process at the other end may die
  if (cases.empty()) cases = {"broadcast", "small", "fan-out"};
  const auto wanted = [&cases](const char* name) {
    return std::find(cases.begin(), cases.end(), name) != cases.end();
  };
  Report report("nodes", json);
  if (wanted("faults")) BenchFaults(&report);
  if (wanted("chaos")) BenchChaos(&report, seed, faults);
  if (!wanted("broadcast") && !wanted("small") && !wanted("fan-out")) {
    return report.all_reached() ? 0 : 1;
  }
  Nodes nodes;
  nodes.self = std::filesystem::read_symlink("/proc/self/exe");
  std::string dir = (std::filesystem::temp_directory_path() / "refitd-bench-XXXXXX").string();
  if (mkdtemp(dir.data()) == nullptr) return 1;
  nodes.socket_a = dir + "/a.sock";
  nodes.far.socket = dir + "/b.sock";
  {
    std::unique_ptr<const TestAuthority> authority;
    if (tls) authority = std::make_unique<TestAuthority>("bench");
    Child a(With({refitd, "--listen-unix", nodes.socket_a, "--listen-tcp", "127.0.0.1:0",
                  "--daemon-id", "a", "--log-level", "warning"},
                 TrustFlags(authority.get(), dir, "a")),
            false);
    Child b(With({refitd, "--listen-unix", nodes.far.socket, "--daemon-id", "b", "--log-level",
                  "warning"},
                 TrustFlags(authority.get(), dir, "b")),
            false);
    constexpr std::string_view kTcp = "tcp:";
    const v1::GetStatusResponse answer = StatusOf(nodes.socket_a);
    for (const std::string& listener : answer.listeners()) {
      if (listener.starts_with(kTcp)) nodes.far.coordinator = listener.substr(kTcp.size());
    }
    StatusOf(nodes.far.socket);  // waits until it serves
    if (wanted("broadcast")) BenchBroadcast(&report, nodes, model, rounds);
    if (wanted("small")) BenchSmallUpdate(&report, nodes, rounds);
    if (wanted("fan-out")) BenchFanOut(&report, nodes, rounds);
  }
  std::filesystem::remove_all(dir);
  return report.all_reached() ? 0 : 1;
}

}  // namespace refitd::bench

int main(int argc, char** argv) { return refitd::bench::Main(argc, argv); }
