// The machine runs out of descriptors, address space or disk for the log, or a daemon's clocks
// differ from its members'. Requests that need the missing resource are refused with a clear
// status, nothing that exists is harmed, and everything works again once there is room.
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <filesystem>
#include <fstream>

#include "tests/e2e/harness.h"
#include "tests/e2e/require.h"

namespace refitd::e2e {
namespace {

using grpc::StatusCode;

// Sets the soft limit of a running process; restores it when destroyed.
class Limited {
 public:
  Limited(pid_t pid, __rlimit_resource resource, rlim_t soft) : pid_(pid), resource_(resource) {
    REQUIRE(prlimit(pid, resource, nullptr, &before_) == 0);
    rlimit limit = before_;
    limit.rlim_cur = soft;
    REQUIRE(prlimit(pid, resource, &limit, nullptr) == 0);
  }
  ~Limited() { Lift(); }
  Limited(const Limited&) = delete;
  Limited& operator=(const Limited&) = delete;
  void Lift() { prlimit(pid_, resource_, &before_, nullptr); }

 private:
  const pid_t pid_;
  const __rlimit_resource resource_;
  rlimit before_{};
};

std::vector<int> OpenDescriptors(pid_t pid) {
  std::vector<int> open;
  for (const auto& entry : std::filesystem::directory_iterator(fmt::format("/proc/{}/fd", pid))) {
    open.push_back(std::stoi(entry.path().filename()));
  }
  std::sort(open.begin(), open.end());
  return open;
}

// Waits until connections that have ended are closed, so that no number becomes free later.
void AwaitQuiet(pid_t pid) {
  constexpr std::chrono::milliseconds kQuiet{200};
  std::vector<int> open = OpenDescriptors(pid);
  auto since = std::chrono::steady_clock::now();
  REQUIRE(Eventually([&] {
    std::vector<int> now = OpenDescriptors(pid);
    if (now != open) since = std::chrono::steady_clock::now();
    open = std::move(now);
    return std::chrono::steady_clock::now() - since >= kQuiet;
  }));
}

// A daemon that can open no descriptor until one is closed, or until this object is destroyed.
class OutOfDescriptors {
 public:
  explicit OutOfDescriptors(const Daemon& daemon)
      : pid_(daemon.pid()),
        socket_(daemon.socket() + ".fds"),
        most_(Most(pid_)),
        limit_(pid_, RLIMIT_NOFILE, static_cast<rlim_t>(most_)) {
    Fill();
  }
  // A connection to the descriptor socket that waits to be accepted, or was accepted.
  UniqueFd Connect() const { return ConnectIdle(socket_); }
  // Takes all numbers below the limit that are free, with idle connections.
  void Fill() {
    for (int left = Free(); left > 0; left = Free()) {
      idle_.push_back(ConnectIdle(socket_));
      REQUIRE(Eventually([&] { return Free() < left; }));
    }
  }

 private:
  static int Most(pid_t pid) {
    AwaitQuiet(pid);
    return OpenDescriptors(pid).back() + 1;
  }
  static UniqueFd ConnectIdle(const std::string& path) {
    UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    REQUIRE(connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    return fd;
  }
  int Free() const { return most_ - static_cast<int>(OpenDescriptors(pid_).size()); }

  const pid_t pid_;
  const std::string socket_;
  const int most_;
  Limited limit_;
  std::vector<UniqueFd> idle_;
};

// Whether a new connection is closed instead of left waiting. Before that, one may still get a
// descriptor that became free late.
bool RefusesNewcomers(const Daemon& daemon, OutOfDescriptors* out) {
  return Eventually([&] {
    out->Fill();
    RawTrainer newcomer(daemon.Connect(), RawTrainer::Hello("newcomer"));
    return newcomer.attached().error_code() == StatusCode::UNAVAILABLE;
  });
}

int64_t AddressSpace(pid_t pid) {
  std::ifstream statm(fmt::format("/proc/{}/statm", pid));
  int64_t pages = 0;
  statm >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

// A trainer and an in-place engine of one group.
struct Pair {
  Pair(const Daemon& trainer_at, const Daemon& engine_at, const std::string& name,
       const std::string& coordinator = "", const v1::GroupSpec& spec = Spec())
      : trainer(trainer_at.Connect(), RawTrainer::Hello(name, spec)),
        engine(engine_at.Connect(), Hello(name, coordinator), HoldWhole(model)) {
    REQUIRE(trainer.attached().ok());
  }
  static v1::EngineHello Hello(const std::string& name, const std::string& coordinator) {
    v1::EngineHello hello = RawEngine::Hello(name, "i", 0, 1, v1::DELIVERY_IN_PLACE, std::nullopt);
    hello.set_coordinator(coordinator);
    hello.set_wait_ms(20'000);
    return hello;
  }
  // Returns the first status that is not OK.
  grpc::Status Install(int64_t version) {
    if (auto begun = trainer.Begin(version); !begun.ok()) return begun.status;
    const auto bytes = BytesOf(model, version);
    if (auto pushed = trainer.Push(version, InlineBucket(model, bytes, 0, true)); !pushed.ok()) {
      trainer.Abort(version, "the push was refused");
      return pushed.status;
    }
    return trainer.Commit(version, 1).status;
  }
  void Installed(int64_t version) {
    const grpc::Status status = Install(version);
    INFO(status.error_message());
    REQUIRE(status.ok());
    REQUIRE(engine.engine().events().WaitFor(v1::EngineEvent::kCommitted).has_value());
    CHECK(engine.Difference(model, BytesOf(model, version)) == "");
  }

  const Model model = MixedModel();
  RawTrainer trainer;
  Holder engine;
};

TEST_CASE("a daemon out of descriptors refuses what needs one, harms nobody, and recovers") {
  Daemon daemon;
  Pair old(daemon, daemon, "g");
  Pair fresh(daemon, daemon, "fresh");  // this group has no pool yet
  old.Installed(1);
  REQUIRE(old.trainer.MapPool(Access::kReadWrite) != nullptr);
  SharedMemory memory = MakeMemory(4096);
  REQUIRE(fresh.trainer.NewMemory(4096).region_id != 0);  // connects to the descriptor socket
  {
    OutOfDescriptors out(daemon);
    CHECK(RefusesNewcomers(daemon, &out));
    out.Fill();
    // A region's descriptor can't be received.
    const auto reply = old.trainer.descriptors().Register(memory.fd.get(), 4096);
    REQUIRE(reply.has_value());
    INFO(reply->message);
    CHECK(reply->code == static_cast<uint32_t>(StatusCode::RESOURCE_EXHAUSTED));
    CHECK_THAT(reply->message, Catch::Contains("descriptor"));
    // A pool can't be made either.
    const auto pool = fresh.trainer.descriptors().Ask(
        fresh.trainer.descriptors().Request(DescriptorRequestKind::kMapPool), {});
    REQUIRE(pool.has_value());
    INFO(pool->message);
    CHECK(pool->code == static_cast<uint32_t>(StatusCode::RESOURCE_EXHAUSTED));
    // Earlier members go on, update after update.
    old.Installed(2);
    old.Installed(3);
    CHECK(daemon.Status().serving());
  }
  fresh.Installed(1);
  REQUIRE(old.trainer.descriptors().Register(memory.fd.get(), 4096)->code == 0);
  Pair newcomer(daemon, daemon, "newcomer");
  newcomer.Installed(1);
  old.Installed(4);
  CHECK(daemon.Stop() == 0);
}

// A message on a connection that asked for nothing; nullopt: none came for a while, or the
// connection ended.
std::optional<DescriptorReply> Unasked(const UniqueFd& connection) {
  const timeval wait{.tv_sec = 1, .tv_usec = 0};
  REQUIRE(setsockopt(connection.get(), SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait)) == 0);
  DescriptorReply reply;
  const ssize_t got = recv(connection.get(), &reply, sizeof(reply), 0);
  if (got != static_cast<ssize_t>(sizeof(reply))) return std::nullopt;
  return reply;
}

TEST_CASE("a new connection to the descriptor socket waited where descriptors had run out") {
  Daemon daemon;
  Pair old(daemon, daemon, "g");
  old.Installed(1);
  {
    OutOfDescriptors out(daemon);
    std::optional<DescriptorReply> refusal;
    // If a descriptor becomes free meanwhile, an attempt is served after all.
    CHECK(Eventually([&] {
      refusal = Unasked(out.Connect());
      return refusal.has_value();
    }));
    REQUIRE(refusal.has_value());
    CHECK(refusal->code == static_cast<uint32_t>(StatusCode::RESOURCE_EXHAUSTED));
    CHECK_THAT(refusal->message, Catch::Contains("out of file descriptors"));
    // Logged after the refusal was sent.
    CHECK(Eventually(
        [&] { return daemon.log().find("refused 1 connections") != std::string::npos; }));
    old.Installed(2);
  }
  SharedMemory memory = MakeMemory(4096);
  Descriptors fresh(old.trainer.welcome().descriptor_socket(),
                    old.trainer.welcome().lease().token());
  const auto reply = fresh.Register(memory.fd.get(), 4096);
  REQUIRE(reply.has_value());
  CHECK(reply->code == 0);
}

// Sends one HTTP request for the metrics; "": no answer.
std::string ScrapeMetrics(const std::string& address) {
  const size_t colon = address.rfind(':');
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const timeval wait{.tv_sec = 1, .tv_usec = 0};
  setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(colon + 1))));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd.get(), reinterpret_cast<sockaddr*>(&to), sizeof(to)) != 0) return "";
  const std::string request = "GET /metrics HTTP/1.0\r\n\r\n";
  if (send(fd.get(), request.data(), request.size(), MSG_NOSIGNAL) < 0) return "";
  std::string answer;
  char piece[4096];
  for (ssize_t got = 0; (got = recv(fd.get(), piece, sizeof(piece), 0)) > 0;) {
    answer.append(piece, static_cast<size_t>(got));
  }
  return answer;
}

TEST_CASE("metrics of a daemon that was out of descriptors are served again") {
  Daemon daemon({"--metrics-listen=127.0.0.1:0"});
  Pair old(daemon, daemon, "g");
  const v1::GetStatusResponse status = daemon.Status();
  std::string address;
  for (const std::string& listener : status.listeners()) {
    if (listener.rfind("metrics:", 0) == 0) address = listener.substr(8);
  }
  REQUIRE(address != "");
  REQUIRE_THAT(ScrapeMetrics(address), Catch::Contains("refitd_"));
  {
    OutOfDescriptors out(daemon);
    ScrapeMetrics(address);  // most likely gets no answer
    old.Installed(1);
    CHECK(daemon.Status().serving());
  }
  CHECK(Eventually(
      [&] { return ScrapeMetrics(address).find("process_open_fds") != std::string::npos; }));
  old.Installed(2);
}

TEST_CASE("descriptors that come free are enough: no limit has to be raised") {
  Daemon daemon;
  Pair old(daemon, daemon, "g");
  old.Installed(1);
  auto leaver = std::make_unique<Pair>(daemon, daemon, "leaver");
  leaver->Installed(1);
  OutOfDescriptors out(daemon);
  CHECK(RefusesNewcomers(daemon, &out));
  leaver.reset();
  CHECK(Eventually([&] {
    RawTrainer newcomer(daemon.Connect(), RawTrainer::Hello("newcomer"));
    return newcomer.attached().ok();
  }));
  old.Installed(2);
}

std::string TcpAddress(Daemon* daemon) {
  const v1::GetStatusResponse status = daemon->Status();
  for (const std::string& listener : status.listeners()) {
    if (listener.rfind("tcp:", 0) == 0) return listener.substr(4);
  }
  return "";
}

TEST_CASE("a data plane that finds no descriptors fails the update by name; the next one commits") {
  Daemon alpha({"--listen-tcp=127.0.0.1:0", "--daemon-id=alpha", "--peers-wire-ms=3000"});
  Daemon beta({"--daemon-id=beta", "--peers-wire-ms=3000"});
  const std::string coordinator = TcpAddress(&alpha);
  Pair local(alpha, alpha, "local");
  local.Installed(1);
  Pair spread(alpha, beta, "g", coordinator);
  std::string who;
  {
    Daemon* victim = nullptr;
    SECTION("at the coordinator") { victim = &alpha; }
    SECTION("at the other daemon") { victim = &beta; }
    who = victim == &alpha ? "alpha" : "beta";
    OutOfDescriptors out(*victim);
    const grpc::Status failed = spread.Install(1);
    INFO(failed.error_message());
    CHECK_FALSE(failed.ok());
    CHECK_THAT(failed.error_message(), Catch::Contains(who));
    local.Installed(2);
    CHECK(victim->Status().serving());
  }
  spread.Installed(2);
}

TEST_CASE("a coordinator that was out of descriptors takes daemons over TCP again") {
  Daemon alpha({"--listen-tcp=127.0.0.1:0", "--daemon-id=alpha"});
  std::unique_ptr<Daemon> beta;
  const std::string coordinator = TcpAddress(&alpha);
  RawTrainer trainer(alpha.Connect(), RawTrainer::Hello("g"));
  REQUIRE(trainer.attached().ok());
  {
    OutOfDescriptors out(alpha);
    // A descriptor that becomes free late lets a daemon in. Then another daemon tries, since the
    // first one has its link.
    CHECK(Eventually([&] {
      out.Fill();
      beta = std::make_unique<Daemon>(std::vector<std::string>{"--daemon-id=beta"});
      v1::EngineHello hello = Pair::Hello("g", coordinator);
      hello.set_wait_ms(1'000);
      RawEngine refused(beta->Connect(), hello);
      const grpc::Status status = refused.attached();
      return !status.ok() && status.error_message().find(coordinator) != std::string::npos;
    }));
  }
  RawEngine engine(beta->Connect(), Pair::Hello("g", coordinator));
  const grpc::Status status = engine.attached();
  INFO(status.error_message() << "\n" << alpha.log());
  CHECK(status.ok());
}

TEST_CASE("a TCP connection whose other end went unseen is closed") {
  Daemon daemon({"--listen-tcp=127.0.0.1:0"});
  const std::string address = TcpAddress(&daemon);
  AwaitQuiet(daemon.pid());
  const int64_t before = daemon.Resources().descriptors();
  UniqueFd peer(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  to.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  REQUIRE(connect(peer.get(), reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0);
  REQUIRE(Eventually([&] { return daemon.Resources().descriptors() > before; }));
  // A socket in repair mode closes without a packet, like one whose last packets are lost.
  constexpr int kOn = 1;
  if (setsockopt(peer.get(), IPPROTO_TCP, TCP_REPAIR, &kOn, sizeof(kOn)) != 0) {
    WARN("SKIPPED: a connection can't be dropped silently here");
    return;
  }
  peer.Reset();
  CHECK(Eventually([&] { return daemon.Resources().descriptors() <= before; }));
}

TEST_CASE("memory that can't be had is refused; what is there goes on") {
  constexpr int64_t kRoom = int64_t{256} << 20;  // room for the daemon's own threads and messages
  Daemon daemon;
  Pair old(daemon, daemon, "g");
  old.Installed(1);
  Pair large(daemon, daemon, "large", "", Spec(1, 1, int64_t{512} << 20, 4));
  {
    Limited out(daemon.pid(), RLIMIT_AS, static_cast<rlim_t>(AddressSpace(daemon.pid()) + kRoom));
    const auto pool = large.trainer.descriptors().Ask(
        large.trainer.descriptors().Request(DescriptorRequestKind::kMapPool), {});
    REQUIRE(pool.has_value());
    INFO(pool->message);
    CHECK(pool->code == static_cast<uint32_t>(StatusCode::RESOURCE_EXHAUSTED));
    CHECK_THAT(pool->message, Catch::Contains("mapping"));
    CHECK(large.trainer.LeaseSlot(1).status.error_code() != StatusCode::OK);
    // A sparse region takes only address space.
    constexpr int64_t kHuge = int64_t{1} << 30;
    SharedMemory memory;
    memory.fd = CreateSealedMemfd("huge", kHuge).value();
    const auto region = old.trainer.descriptors().Register(memory.fd.get(), kHuge);
    REQUIRE(region.has_value());
    CHECK(region->code == static_cast<uint32_t>(StatusCode::RESOURCE_EXHAUSTED));
    CHECK(old.trainer.NewMemory(4096).region_id != 0);
    old.Installed(2);
    const v1::ResourceStatus resources = daemon.Resources();
    CHECK(resources.members() == 4);
  }
  large.Installed(1);
  old.Installed(3);
  CHECK(daemon.Stop() == 0);
}

// A FIFO that has a reader, is full, and is not read.
class FullFifo {
 public:
  explicit FullFifo(std::string path) : path_(std::move(path)) {
    REQUIRE(mkfifo(path_.c_str(), 0600) == 0);
    reader_ = UniqueFd(open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
    const UniqueFd writer(open(path_.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC));
    const std::string filling(4096, '\n');
    while (write(writer.get(), filling.data(), filling.size()) > 0) {
    }
  }
  const std::string& path() const { return path_; }

 private:
  const std::string path_;
  UniqueFd reader_;
};

TEST_CASE("a full pipe that nobody reads, as log or as audit log, stopped the daemon") {
  TempFolder folder;
  const FullFifo log(folder / "log");
  const FullFifo audit(folder / "audit");
  Daemon daemon({"--log-level=debug", "--log-file=" + log.path(), "--audit-file=" + audit.path()});
  Pair pair(daemon, daemon, "g");
  pair.Installed(1);
  RawTrainer stranger(daemon.Connect(), RawTrainer::Hello("g"));  // refused, and audited
  CHECK_FALSE(stranger.attached().ok());
  daemon.Signal(SIGHUP);  // opens the audit log again
  pair.Installed(2);
  CHECK(daemon.Status().serving());
  CHECK(daemon.Stop() == 0);
}

TEST_CASE("a log that takes no more does not stop the daemon") {
  std::vector<std::string> launcher;
  std::string file = "/dev/full";
  TempFolder folder;
  SECTION("from the first line") {}
  SECTION("after some lines: its file system is full") {
    // A child tries this first, since only root can do it.
    const pid_t child = fork();
    if (child == 0) _exit(unshare(CLONE_NEWNS) == 0 ? 0 : 1);
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    if (status != 0) {
      WARN("SKIPPED in part: mount namespaces can't be made here");
      return;
    }
    std::filesystem::create_directory(folder / "log");
    launcher = {
        "/usr/bin/unshare", "--mount", "--propagation=private",
        "/bin/sh",          "-c",      "mount -t tmpfs -o size=4k tmpfs \"$0\" && exec \"$@\"",
        folder / "log"};
    file = folder / "log/refitd.log";
  }
  Daemon daemon({"--log-file=" + file, "--log-level=debug"}, launcher);
  for (int i = 0; i < 40; ++i) {
    Pair pair(daemon, daemon, fmt::format("group-{}", i));
    pair.Installed(1);
  }
  if (!launcher.empty()) {
    // The size as the daemon sees it.
    std::error_code error;
    const auto bytes =
        std::filesystem::file_size(fmt::format("/proc/{}/root{}", daemon.pid(), file), error);
    CHECK(error.value() == 0);
    CHECK(bytes == 4096);
  }
  CHECK(daemon.Status().serving());
  CHECK(daemon.Stop() == 0);
}

TEST_CASE("the daemon's clocks are its own: one that is years ahead of its members' serves alike") {
  // The daemon's clock has twenty years of uptime, which the members do not see.
  const std::vector<std::string> launcher = {"/usr/bin/unshare", "--time", "--monotonic=630720000",
                                             "--boottime=630720000"};
  {
    std::vector<std::string> argv = launcher;
    argv.push_back("/bin/true");
    Process probe(argv);
    if (probe.WaitExit() != 0) {
      WARN("SKIPPED: time namespaces can't be made here: " << probe.Errors());
      return;
    }
  }
  Daemon ahead({"--listen-tcp=127.0.0.1:0", "--daemon-id=ahead"}, launcher);
  Daemon daemon({"--daemon-id=other"});
  Pair pair(ahead, ahead, "g");
  pair.Installed(1);
  Pair spread(ahead, daemon, "spread", TcpAddress(&ahead));
  spread.Installed(1);
  // Limits last as long as elsewhere: they neither pass at once nor never.
  v1::BeginRequest begin;
  begin.set_version(2);
  begin.set_duration_ms(3'000);
  REQUIRE_OK(pair.trainer.Begin(begin));
  const auto aborted = pair.engine.engine().events().WaitFor(v1::EngineEvent::kAborted);
  REQUIRE(aborted.has_value());
  CHECK_THAT(aborted->aborted().reason(), Catch::Contains("deadline"));
  pair.Installed(3);
  CHECK(ahead.Stop() == 0);
}

}  // namespace
}  // namespace refitd::e2e
