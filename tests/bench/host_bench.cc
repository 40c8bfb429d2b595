// tools/bench host: one daemon, host memory. Real processes: refitd, this process as the trainer,
// and another of this binary as the engine.
//
//   host_bench --refitd PATH [--model qwen3-0.6b] [--rounds 15] [--json]
//   host_bench --role engine --socket PATH ...      (started by the first form)
//
// Baselines are measured in the same run, in each round beside the measured case, on memory of the
// same kind (mapped, prefaulted memfds), with as many threads as the daemon copies with. Every
// round has new random weights and a poisoned destination; the engine's process computes a digest
// that checks the result, outside the measured time.
#include <sys/socket.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/sockets/connection_guard.h"
#include "tests/bench/refit_session.h"
#include "tests/bench/report.h"
#include "tests/bench/session.h"
#include "tests/e2e/http2_flood.h"
#include "transport/digest/digest.h"

namespace refitd::bench {
namespace {

using std::chrono::steady_clock;

void BenchInPlace(Report* report, const std::string& self, const std::string& socket,
                  const std::string& model_name, int rounds, int threads) {
  Session bench(self, socket, "in_place", model_name, {{socket, ""}});
  const int64_t bytes = bench.model().bytes;
  const std::shared_ptr<HostRegion> from = MappedMemfd(bytes);
  const std::shared_ptr<HostRegion> to = MappedMemfd(bytes);
  FillRandom(from->data(), bytes, 7, threads);

  const std::vector<std::pair<Verification, double>> cases = {
      {Verification::kOff, 0.9}, {Verification::kTransfer, 0.8}, {Verification::kReadback, 0.6}};
  std::vector<std::vector<double>> seconds(cases.size());
  std::vector<double> memcpy_seconds;
  FillRandom(bench.data(), bytes, 1, threads);
  bench.Update(Verification::kOff, kBucketBytes);  // maps pages in all processes
  ParallelMemcpy(to->data(), from->data(), bytes, threads);
  for (int round = 0; round < rounds; ++round) {
    const auto start = steady_clock::now();
    ParallelMemcpy(to->data(), from->data(), bytes, threads);
    memcpy_seconds.push_back(SecondsSince(start));
    for (size_t c = 0; c < cases.size(); ++c) {
      FillRandom(bench.data(), bytes, static_cast<uint64_t>(round) * 10 + c + 100, threads);
      seconds[c].push_back(bench.Update(cases[c].first, kBucketBytes));
    }
  }
  const double baseline = static_cast<double>(bytes) / Median(memcpy_seconds) / 1e9;
  const char* names[] = {"off", "transfer", "readback"};
  for (size_t c = 0; c < cases.size(); ++c) {
    const double rate = static_cast<double>(bytes) / Median(seconds[c]) / 1e9;
    report->Add(
        {fmt::format("registered, {}, verification {}, against memcpy", model_name, names[c]), rate,
         "GB/s", baseline, rate / baseline, cases[c].second, true});
  }
}

// Compares a compiled refit with plain copies of as many bytes as a version writes.
void BenchRefit(Report* report, const std::string& self, const std::string& socket,
                const std::string& model, int rounds, int threads) {
  RefitSession bench(self, socket, "refit", {model, 2, 4});
  const int64_t bytes = bench.engine_bytes();
  const std::shared_ptr<HostRegion> from = MappedMemfd(bytes);
  const std::shared_ptr<HostRegion> to = MappedMemfd(bytes);
  FillRandom(from->data(), bytes, 7, threads);
  const std::vector<std::pair<Verification, double>> cases = {{Verification::kOff, 0.7},
                                                              {Verification::kTransfer, 0.6}};
  std::vector<std::vector<double>> seconds(cases.size());
  std::vector<double> memcpy_seconds;
  bench.Fill(1);
  bench.Refit(Verification::kOff);  // compiles; maps pages in all processes
  ParallelMemcpy(to->data(), from->data(), bytes, threads);
  for (int round = 0; round < rounds; ++round) {
    const auto start = steady_clock::now();
    ParallelMemcpy(to->data(), from->data(), bytes, threads);
    memcpy_seconds.push_back(SecondsSince(start));
    for (size_t c = 0; c < cases.size(); ++c) {
      bench.Fill(static_cast<uint64_t>(round) * 10 + c + 100);
      seconds[c].push_back(bench.Refit(cases[c].first));
    }
  }
  const double baseline = static_cast<double>(bytes) / Median(memcpy_seconds) / 1e9;
  const char* names[] = {"off", "transfer"};
  for (size_t c = 0; c < cases.size(); ++c) {
    const double rate = static_cast<double>(bytes) / Median(seconds[c]) / 1e9;
    report->Add({fmt::format("refit, {} TP2 to TP4 fused, verification {}, against memcpy", model,
                             names[c]),
                 rate, "GB/s", baseline, rate / baseline, cases[c].second, true});
  }
}

// The 99th of a hundred.
double P99(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[(values.size() * 99) / 100];
}

// How long gRPC's reading of a small call takes, in seconds, with and without a guard that watches
// the connection: medians of turns.
std::pair<double, double> ReadingTimes() {
  constexpr int kCalls = 1'000;
  constexpr int kTurns = 51;
  const std::string call =
      Frame(e2e::kHeaders, e2e::kEndHeaders, 1, e2e::Request()) +
      Frame(e2e::kData, e2e::kEndStream, 1, e2e::MessageHead(300) + std::string(300, 'm'));
  ConnectionGuard guard({});
  std::array<std::vector<double>, 2> seconds;
  for (int turn = 0; turn < 2 * kTurns; ++turn) {
    const bool watched = turn % 2 == 0;
    std::array<int, 2> ends{};
    REFITD_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) == 0);
    const UniqueFd server(ends[0]);
    const UniqueFd client(ends[1]);
    if (watched) REFITD_CHECK(guard.Watch(server.get(), "uid:1"));
    const std::string peer = fmt::format("fd:{}", server.get());
    std::string buffer(8192, '\0');
    REFITD_CHECK(send(client.get(), e2e::kPreface.data(), e2e::kPreface.size(), 0) > 0);
    const auto start = steady_clock::now();
    for (int i = 0; i < kCalls; ++i) {
      if (i % 100 == 0) {
        const std::string ack = Frame(e2e::kSettings, e2e::kAck, 0, "");
        REFITD_CHECK(send(client.get(), ack.data(), ack.size(), 0) > 0);
      }
      REFITD_CHECK(send(client.get(), call.data(), call.size(), 0) > 0);
      iovec part{buffer.data(), buffer.size()};
      msghdr message{};
      message.msg_iov = &part;
      message.msg_iovlen = 1;
      REFITD_CHECK(recvmsg(server.get(), &message, 0) > 0);
      if (watched) guard.Allowed(peer, "uid:1");
    }
    seconds[watched ? 1 : 0].push_back(SecondsSince(start) / kCalls);
  }
  return {Median(seconds[0]), Median(seconds[1])};
}

// Measures updates of 1 MiB while somebody attacks the unix socket from one thread, one connection
// after the other, before and after a call that a rule allows, beside the same updates in quiet.
void BenchFlood(Report* report, const std::string& self, const std::string& socket, int rounds) {
  Session bench(self, socket, "flood", "1mib", {{socket, ""}});
  const auto updates = [&] {
    std::vector<double> seconds;
    for (int i = 0; i < 100 * rounds; ++i) {
      FillRandom(bench.data(), bench.model().bytes, static_cast<uint64_t>(i), 1);
      seconds.push_back(bench.Update(Verification::kReadback, kBucketBytes));
    }
    return seconds;
  };
  updates();
  const std::vector<double> quiet = updates();
  const std::vector<std::pair<const char*, bool (*)(e2e::Attacker*)>> attacks = {
      {"headers without an end", e2e::EndlessHeaders},
      {"a growing header", e2e::GrowingHeader},
      {"unfinished messages", e2e::UnfinishedMessages},
      {"rapid resets", e2e::IndexedResets}};
  for (const bool allowed : {false, true}) {
    for (const auto& [name, attack] : attacks) {
      std::atomic<bool> over{false};
      std::thread attacker([&, attack = attack] {
        while (!over) {
          e2e::Attacker connection(socket);
          if (!allowed || connection.BeAllowed()) attack(&connection);
        }
      });
      const double attacked = P99(updates());
      over = true;
      attacker.join();
      report->Add({fmt::format("p99 of 1 MiB, {}{}", name, allowed ? ", allowed" : ""),
                   attacked * 1e3, "ms", P99(quiet) * 1e3, attacked / P99(quiet), 3, false, true});
    }
  }
  // An update is five calls and three messages on streams, of both sides together.
  constexpr int kReads = 8;
  const auto [without, with] = ReadingTimes();
  const double update = Median(quiet);
  const double slower = update + kReads * (with - without);
  report->Add({"update of 1 MiB with the guard, against without", slower * 1e3, "ms", update * 1e3,
               slower / update, 1.03, false, true});
}

// Measures the cost of comparing replicas: two ranks that both hold the whole model, whose versions
// are compared not at all (one part of a million), by a thirty-second, and in full.
void BenchReplicas(Report* report, const std::string& self, const std::string& refitd,
                   const std::string& dir, const std::string& model, int rounds) {
  struct Case {
    std::string name;
    std::string every;
    std::unique_ptr<Child> daemon{};
    std::unique_ptr<RefitSession> session{};
    std::vector<double> seconds{};
  };
  std::vector<Case> cases;
  cases.push_back({"nothing", "1000000"});
  cases.push_back({"a thirty-second", "32"});
  cases.push_back({"everything", "1"});
  for (Case& c : cases) {
    const std::string socket = dir + "/replicas-" + c.every + ".sock";
    c.daemon = std::make_unique<Child>(
        std::vector<std::string>{refitd, "--listen-unix", socket, "--log-level", "warning",
                                 "--limits-compare-every", c.every},
        false);
    c.session =
        std::make_unique<RefitSession>(self, socket, "replicas", RefitCase{model, 2, 1, true});
    c.session->Fill(1);
    c.session->Refit(Verification::kTransfer);  // compiles, and compares all replicas
  }
  for (int round = 0; round < rounds; ++round) {
    for (Case& c : cases) {
      c.session->Fill(static_cast<uint64_t>(round) + 100);
      c.seconds.push_back(c.session->Refit(Verification::kTransfer));
    }
  }
  const double none = Median(cases[0].seconds) * 1e3;
  for (const Case& c : cases) {
    const double ms = Median(c.seconds) * 1e3;
    report->Add(
        {fmt::format("refit, {} of 2 replicas, verification transfer, {} compared", model, c.name),
         ms, "ms", none, ms / none, 0, true});
  }
}

void BenchReplay(Report* report, const std::string& self, const std::string& socket, int rounds) {
  RefitSession bench(self, socket, "replay", {"nothing", 1, 1});
  std::vector<double> seconds;
  for (int i = 0; i < 20 + rounds * 30; ++i) {
    const double s = bench.Refit(Verification::kReadback);
    if (i >= 20) seconds.push_back(s);
  }
  report->Add({"refit with nothing to move, 1 + 1 ranks, p50", Median(seconds) * 1e6, "us", 0, 0,
               500, false});
}

void BenchDigest(Report* report, int rounds, int threads) {
  const int64_t bytes = int64_t{1} << 30;
  const std::shared_ptr<HostRegion> region = MappedMemfd(bytes);
  FillRandom(region->data(), bytes, 3, threads);
  std::vector<double> digest_seconds;
  std::vector<double> read_seconds;
  std::vector<uint64_t> sink(static_cast<size_t>(threads));
  const int64_t share = bytes / threads;
  for (int round = 0; round < rounds; ++round) {
    auto start = steady_clock::now();
    ForkJoin(threads, [&](int t) {
      const auto* words = reinterpret_cast<const uint64_t*>(region->data() + t * share);
      uint64_t sum = 0;
      for (int64_t i = 0; i < share / 8; ++i) sum += words[i];
      sink[static_cast<size_t>(t)] += sum;
    });
    read_seconds.push_back(SecondsSince(start));
    start = steady_clock::now();
    ForkJoin(threads, [&](int t) {
      sink[static_cast<size_t>(t)] +=
          BestDigestKernels().digest(region->data() + t * share, 2, t * share / 2, share / 2);
    });
    digest_seconds.push_back(SecondsSince(start));
  }
  volatile uint64_t keep = sink[0];
  (void)keep;
  const double baseline = static_cast<double>(bytes) / Median(read_seconds) / 1e9;
  const double rate = static_cast<double>(bytes) / Median(digest_seconds) / 1e9;
  report->Add({fmt::format("digest alone ({}), against reading", BestDigestKernels().name), rate,
               "GB/s", baseline, rate / baseline, 0.7, true});
}

void BenchSmallUpdate(Report* report, const std::string& self, const std::string& socket,
                      int rounds) {
  Session bench(self, socket, "small", "1mib", {{socket, ""}});
  std::vector<double> seconds;
  for (int i = 0; i < 20 + rounds * 30; ++i) {
    FillRandom(bench.data(), bench.model().bytes, static_cast<uint64_t>(i) + 1, 1);
    const double s = bench.Update(Verification::kReadback, kBucketBytes);
    if (i >= 20) seconds.push_back(s);
  }
  report->Add(
      {"1 MiB model, begin to committed, p50", Median(seconds) * 1e3, "ms", 0, 0, 2.0, false});
}

void BenchBucketCost(Report* report, const std::string& self, const std::string& socket,
                     int rounds) {
  Session bench(self, socket, "buckets", "64kib-buckets", {{socket, ""}});
  const auto count = static_cast<double>(bench.model().tensors.size());
  std::vector<double> one;
  std::vector<double> many;
  for (int i = 0; i < rounds + 2; ++i) {
    FillRandom(bench.data(), bench.model().bytes, static_cast<uint64_t>(i) + 1, 1);
    const double whole = bench.Update(Verification::kReadback, kBucketBytes);
    FillRandom(bench.data(), bench.model().bytes, static_cast<uint64_t>(i) + 100, 1);
    const double cut = bench.Update(Verification::kReadback, 64 << 10);
    if (i < 2) continue;
    one.push_back(whole);
    many.push_back(cut);
  }
  report->Add({fmt::format("cost added per 64 KiB bucket, {} pipelined", count),
               (Median(many) - Median(one)) / count * 1e6, "us", 0, 0, 200, false});
}

int64_t AnonymousBytes(const std::string& socket) {
  return StatusOf(socket).resources().anonymous_bytes();
}

void BenchMemory(Report* report, const std::string& self, const std::string& socket) {
  Session bench(self, socket, "memory", "1mib", {{socket, ""}});
  const auto updates = [&](int n) {
    for (int i = 0; i < n; ++i) {
      FillRandom(bench.data(), bench.model().bytes, static_cast<uint64_t>(i) + 1, 1);
      bench.Update(Verification::kReadback, 128 << 10);
    }
  };
  updates(100);
  const double before = static_cast<double>(AnonymousBytes(socket)) / (1 << 20);
  updates(1000);
  const double after = static_cast<double>(AnonymousBytes(socket)) / (1 << 20);
  report->Add({"daemon's anonymous memory after all of the above", before, "MiB", 0, 0, 64, false});
  report->Add({"the same, grown by 1,000 updates", after - before, "MiB", 0, 0, 1, false});
}

}  // namespace

int Main(int argc, char** argv) {
  CLI::App app("refitd's benchmark of one daemon on host memory");
  std::string role;
  std::string refitd;
  std::string socket;
  EngineArgs engine;
  std::string model = "qwen3-0.6b";
  RefitCase refit;
  int rank = 0;
  int rounds = 15;
  bool json = false;
  std::string only;
  app.add_option("--role", role);
  app.add_option("--refitd", refitd);
  app.add_option("--socket", socket);
  app.add_option("--coordinator", engine.place.coordinator);
  app.add_option("--group", engine.group);
  app.add_option("--instance", engine.instance);
  app.add_option("--model", model, "qwen3-0.6b, qwen3-4b");
  app.add_option("--trainers", refit.trainers);
  app.add_option("--engines", refit.engines);
  app.add_flag("--replicas,!--no-replicas", refit.replicas);
  app.add_option(
         "--case", only,
         "small: calls that move little, alone; replicas: what comparing them costs; flood: "
         "updates during an attack; the last two are not run without this")
      ->check(CLI::IsMember({"small", "replicas", "flood"}));
  app.add_option("--rank", rank);
  app.add_option("--rounds", rounds, "measured rounds a case")->check(CLI::Range(1, 1000));
  app.add_flag("--json", json, "one object a line");
  CLI11_PARSE(app, argc, argv);
  if (role == "engine") {
    engine.place.socket = socket;
    engine.model = model;
    return RunEngine(engine);
  }
  if (role == "refit-engine") {
    refit.model = model;
    return RunRefitEngine(refit, {socket, engine.place.coordinator}, engine.group, rank);
  }

  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  std::string dir = (std::filesystem::temp_directory_path() / "refitd-bench-XXXXXX").string();
  if (mkdtemp(dir.data()) == nullptr) return 1;
  socket = dir + "/refitd.sock";
  const int threads = CopyThreads();
  bool reached = false;
  if (only == "replicas") {
    Report report("host", json);
    BenchReplicas(&report, self, refitd, dir, model, rounds);
    reached = report.all_reached();
  } else if (only == "flood") {
    Child daemon({refitd, "--listen-unix", socket, "--log-level", "error"}, false);
    Report report("host", json);
    BenchFlood(&report, self, socket, std::min(rounds, 5));
    reached = report.all_reached();
  } else {
    Child daemon({refitd, "--listen-unix", socket, "--log-level", "warning"}, false);
    Report report("host", json);
    if (only.empty()) {
      BenchDigest(&report, rounds, threads);
      BenchInPlace(&report, self, socket, model, rounds, threads);
      BenchRefit(&report, self, socket, model, rounds, threads);
    }
    BenchReplay(&report, self, socket, rounds);
    BenchSmallUpdate(&report, self, socket, rounds);
    BenchBucketCost(&report, self, socket, rounds);
    if (only.empty()) BenchMemory(&report, self, socket);
    reached = report.all_reached();
  }
  std::filesystem::remove_all(dir);
  return reached ? 0 : 1;
}

}  // namespace refitd::bench

int main(int argc, char** argv) { return refitd::bench::Main(argc, argv); }
