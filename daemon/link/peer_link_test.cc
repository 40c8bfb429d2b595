#include "daemon/link/peer_link.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "daemon/link/hello.h"
#include "daemon/process/process_stats.h"
#include "daemon/services/peer_service.h"
#include "daemon/test_util.h"
#include "refitd/v1/peer.grpc.pb.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"
#include "transport/base/unique_fd.h"

namespace refitd {
namespace {

constexpr int64_t kMessageBytes = 1 << 20;

// A log of events, in order, that a test can wait for.
template <typename Item>
class Log {
 public:
  void Add(Item item) {
    MutexLock lock(&mutex_);
    items_.push_back(std::move(item));
    cond_.NotifyAll();
  }
  // The next item; fails the test after kTestDeadline.
  Item Next() {
    const auto deadline = std::chrono::steady_clock::now() + kTestDeadline;
    MutexLock lock(&mutex_);
    while (items_.empty()) {
      const bool woken = cond_.WaitUntil(&mutex_, deadline);
      if (!woken && items_.empty()) throw std::runtime_error("nothing happened in time");
    }
    Item item = std::move(items_.front());
    items_.pop_front();
    return item;
  }
  size_t size() {
    MutexLock lock(&mutex_);
    return items_.size();
  }

 private:
  Mutex mutex_;
  CondVar cond_;
  std::deque<Item> items_ ABSL_GUARDED_BY(mutex_);
};

LinkUp Up() {
  LinkUp up;
  up.incarnation = 77;
  up.spec = {1, 1, 1 << 20, 4, {"rope"}};
  up.version = Version(3);
  up.coordinator_id = "node-0";
  return up;
}

// A coordinator, as far as links need one.
class Coordinator : public PeerAcceptor {
 public:
  explicit Coordinator(bool accepts = true) : accepts_(accepts), service_(this, kMessageBytes) {
    grpc::ServerBuilder builder;
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.SetMaxReceiveMessageSize(kMessageBytes);
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    REFITD_CHECK(server_ != nullptr && port_ != 0);
  }
  ~Coordinator() override {
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
  }

  void Hello(PeerGreeting hello, std::string /*address*/,
             std::shared_ptr<PeerSession> session) override {
    hellos.Add(std::move(hello));
    if (accepts_) session->Accept(Up());
    sessions.Add(std::move(session));
  }
  void Report(uint64_t /*session*/, PeerReport report) override { reports.Add(std::move(report)); }
  void Gone(uint64_t session, std::string reason) override { gone.Add({session, reason}); }

  std::string address() const { return fmt::format("127.0.0.1:{}", port_); }
  int port() const { return port_; }

  Log<PeerGreeting> hellos;
  Log<std::shared_ptr<PeerSession>> sessions;
  Log<PeerReport> reports;
  Log<std::pair<uint64_t, std::string>> gone;

 private:
  const bool accepts_;
  PeerService service_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

PeerDial DialTo(const std::string& address) {
  PeerDial dial;
  dial.address = address;
  dial.group = "policy";
  dial.daemon_id = "node-1";
  dial.boot_id = "0123456789abcdef";
  dial.credentials = grpc::InsecureChannelCredentials();
  dial.limits.message_bytes = kMessageBytes;
  return dial;
}

// A joined daemon, as far as links need one. Its logs are shared with the callbacks.
struct Joined {
  struct Logs {
    Log<LinkUp> up;
    Log<PeerCommand> commands;
    Log<absl::Status> lost;
  };
  explicit Joined(PeerDial dial) {
    link = PeerLink::Dial(std::move(dial),
                          {[logs = logs](LinkUp up) { logs->up.Add(std::move(up)); },
                           [logs = logs](PeerCommand c) { logs->commands.Add(std::move(c)); },
                           [logs = logs](absl::Status s) { logs->lost.Add(std::move(s)); }});
  }
  std::shared_ptr<Logs> logs = std::make_shared<Logs>();
  std::unique_ptr<PeerLink> link;
};

PeerReport Pong(uint64_t number) { return PeerPong{number}; }

// Queues a message on either end of a link and flushes it.
template <typename Message, typename End>
absl::Status Send(End& end, Message message) {
  REFITD_RETURN_IF_ERROR(end.Queue(std::move(message)));
  end.Flush();
  return absl::OkStatus();
}

// Commands and reports that are too large for a message of kMessageBytes.
PeerCommand TooLargeConnect() {
  PeerCommunicatorConnect connect;
  connect.addresses = std::make_shared<const std::vector<std::string>>(
      64, std::string(kMaxCommunicatorAddressBytes, 'a'));
  return connect;
}
PeerReport TooLargeAttach(MemberId member) {
  PeerAttach attach;
  attach.member = member;
  EngineIdentity engine;
  engine.instance = "i";
  engine.manifest.emplace();
  for (int i = 0; i < 4000; ++i) {
    engine.manifest->push_back({std::string(400, 'x') + std::to_string(i), DType::kUint8, {1}});
  }
  attach.identity = engine;
  return attach;
}

TEST_CASE("A daemon joins: hello, acceptance, then both sides talk in order") {
  Coordinator coordinator;
  PeerDial dial = DialTo(coordinator.address());
  dial.spec.emplace().trainer_ranks = 1;
  Joined joined(std::move(dial));
  const LinkUp up = joined.logs->up.Next();
  CHECK(up.incarnation == 77);
  CHECK(up.spec == Up().spec);
  CHECK(up.version == Version(3));
  CHECK(up.coordinator_id == "node-0");
  const PeerGreeting hello = coordinator.hellos.Next();
  CHECK(hello.group == "policy");
  CHECK(hello.daemon_id == "node-1");
  REQUIRE(hello.spec.has_value());
  CHECK(hello.spec->trainer_ranks == 1);

  const auto session = coordinator.sessions.Next();
  for (uint64_t i = 0; i < 2000; ++i) {
    REQUIRE(Send(*joined.link, Pong(i)).ok());
    REQUIRE(Send(*session, PeerPing{i}).ok());
  }
  for (uint64_t i = 0; i < 2000; ++i) {
    REQUIRE(std::get<PeerPong>(coordinator.reports.Next()).number == i);
    REQUIRE(std::get<PeerPing>(joined.logs->commands.Next()).number == i);
  }

  joined.link->Close();
  CHECK(joined.logs->lost.Next().code() == absl::StatusCode::kCancelled);
  CHECK(coordinator.gone.Next().first == session->id());
  CHECK(Send(*joined.link, Pong(1)).code() == absl::StatusCode::kUnavailable);
  CHECK(Send(*session, PeerPing{1}).code() == absl::StatusCode::kUnavailable);
}

TEST_CASE("A refused daemon hears why, and nothing else") {
  Coordinator coordinator(/*accepts=*/false);
  Joined joined(DialTo(coordinator.address()));
  coordinator.sessions.Next()->End(absl::NotFoundError("no group policy"));
  const absl::Status lost = joined.logs->lost.Next();
  CHECK(lost.code() == absl::StatusCode::kNotFound);
  CHECK_THAT(Message(lost), Catch::Matchers::Contains("no group policy"));
  coordinator.gone.Next();
  CHECK(joined.logs->up.size() == 0);
}

TEST_CASE("Where nobody listens, joining fails at once, and says so") {
  // A bound port on which nobody listens refuses connections, and no other process can get it.
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  REQUIRE(bind(fd.get(), reinterpret_cast<sockaddr*>(&address), length) == 0);
  REQUIRE(getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0);
  PeerDial dial = DialTo(fmt::format("127.0.0.1:{}", ntohs(address.sin_port)));
  for (const Duration wait : {Duration(0), Duration(std::chrono::hours(1))}) {
    dial.wait = wait;
    Joined joined(dial);
    const absl::Status lost = joined.logs->lost.Next();
    CHECK(lost.code() == absl::StatusCode::kUnavailable);
    CHECK_THAT(Message(lost), Catch::Matchers::Contains("Connection refused"));
  }
}

TEST_CASE("A coordinator that does not answer the hello is given up after wait and limit") {
  Coordinator coordinator(/*accepts=*/false);
  PeerDial dial = DialTo(coordinator.address());
  dial.limits.join = std::chrono::milliseconds(2'000);  // the hello comes in time
  Joined joined(dial);
  const absl::Status lost = joined.logs->lost.Next();
  CHECK(lost.code() == absl::StatusCode::kDeadlineExceeded);
  CHECK_THAT(Message(lost), Catch::Matchers::Contains("within 2000 ms"));
  coordinator.gone.Next();
}

TEST_CASE("After the group was replaced messages have the new incarnation, and none is lost") {
  Coordinator coordinator;
  Joined joined(DialTo(coordinator.address()));
  joined.logs->up.Next();
  const auto session = coordinator.sessions.Next();
  for (uint64_t i = 0; i < 50; ++i) {
    REQUIRE(Send(*joined.link, Pong(i)).ok());
    REQUIRE(Send(*session, PeerIncarnation{100 + i}).ok());
    REQUIRE(Send(*session, PeerPing{i}).ok());
  }
  for (uint64_t i = 0; i < 50; ++i) {
    CHECK(std::get<PeerPong>(coordinator.reports.Next()).number == i);
    CHECK(std::get<PeerIncarnation>(joined.logs->commands.Next()).incarnation == 100 + i);
    CHECK(std::get<PeerPing>(joined.logs->commands.Next()).number == i);
  }
}

TEST_CASE("A layout of 20,000 pieces arrives whole, with a ping behind it") {
  Coordinator coordinator;
  Joined joined(DialTo(coordinator.address()));
  joined.logs->up.Next();
  Layout layout;
  layout.tensors.push_back({"w", DType::kFloat32, {20'000, 8}});
  for (int64_t r = 0; r < 20'000; ++r) {
    layout.pieces.push_back({0, {{r, 0}, {1, 8}}, RegionId(7), r * 64, {16, 1}});
  }
  const auto sent = std::make_shared<const Layout>(std::move(layout));
  REQUIRE(Send(*joined.link, PeerLayout{MemberId(4), sent, CallId(2)}).ok());
  REQUIRE(Send(*joined.link, Pong(1)).ok());
  const PeerReport report = coordinator.reports.Next();
  REQUIRE(std::holds_alternative<PeerLayout>(report));
  CHECK(std::get<PeerLayout>(report).layout->Digest() == sent->Digest());
  CHECK(std::get<PeerPong>(coordinator.reports.Next()).number == 1);
}

TEST_CASE("What is queued is encoded and written by Flush, in order, whoever flushes") {
  Coordinator coordinator;
  Joined joined(DialTo(coordinator.address()));
  joined.logs->up.Next();
  const auto session = coordinator.sessions.Next();
  constexpr uint64_t kCommands = 500;
  // Two threads use the session as a node does: Queue under its mutex, Flush without it.
  Mutex mutex;
  uint64_t next = 0;
  const auto send = [&] {
    for (uint64_t i = 0; i < kCommands; ++i) {
      {
        MutexLock lock(&mutex);
        REFITD_CHECK(session->Queue(PeerPing{next++}).ok());
      }
      session->Flush();
    }
  };
  std::thread other(send);
  send();
  other.join();
  for (uint64_t i = 0; i < 2 * kCommands; ++i) {
    REQUIRE(std::get<PeerPing>(joined.logs->commands.Next()).number == i);
  }
}

TEST_CASE("What was queued before the end of a link arrives before it, though flushed after it") {
  Coordinator coordinator;
  Joined joined(DialTo(coordinator.address()));
  joined.logs->up.Next();
  const auto session = coordinator.sessions.Next();
  REQUIRE(session->Queue(PeerPing{1}).ok());
  session->End(absl::AbortedError("enough"));
  CHECK(session->Queue(PeerPing{2}).code() == absl::StatusCode::kUnavailable);
  session->Flush();
  CHECK(std::get<PeerPing>(joined.logs->commands.Next()).number == 1);
  CHECK(joined.logs->lost.Next().code() == absl::StatusCode::kAborted);
}

TEST_CASE("A queued command that is too large for a message ends the link and says so") {
  Coordinator coordinator;
  Joined joined(DialTo(coordinator.address()));
  joined.logs->up.Next();
  const auto session = coordinator.sessions.Next();
  REQUIRE(session->Queue(TooLargeConnect()).ok());
  session->Flush();
  CHECK(joined.logs->lost.Next().code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(coordinator.gone.Next().second, Catch::Matchers::Contains("message_bytes"));
}

TEST_CASE("Nothing can be queued before a link is up") {
  Coordinator silent(/*accepts=*/false);
  Joined joined(DialTo(silent.address()));
  CHECK(joined.link->Queue(Pong(0)).code() == absl::StatusCode::kUnavailable);
  CHECK(joined.link->Flush().empty());
  CHECK(silent.sessions.Next()->Queue(PeerPing{1}).code() == absl::StatusCode::kUnavailable);
}

TEST_CASE(
    "Reports that are queued are encoded by Flush, in order, also if the link is closed first") {
  Coordinator coordinator;
  Joined joined(DialTo(coordinator.address()));
  joined.logs->up.Next();
  constexpr uint64_t kReports = 500;
  Mutex mutex;
  uint64_t next = 0;
  const auto send = [&] {
    for (uint64_t i = 0; i < kReports; ++i) {
      {
        MutexLock lock(&mutex);
        REFITD_CHECK(joined.link->Queue(Pong(next++)).ok());
      }
      REFITD_CHECK(joined.link->Flush().empty());
    }
  };
  std::thread other(send);
  send();
  other.join();
  REQUIRE(joined.link->Queue(Pong(next)).ok());
  joined.link->Close();
  CHECK(joined.link->Queue(Pong(0)).code() == absl::StatusCode::kUnavailable);
  CHECK(joined.link->Flush().empty());
  for (uint64_t i = 0; i <= 2 * kReports; ++i) {
    REQUIRE(std::get<PeerPong>(coordinator.reports.Next()).number == i);
  }
  CHECK(joined.logs->lost.Next().code() == absl::StatusCode::kCancelled);
}

TEST_CASE("A queued report that is too large for a message comes back, and the link goes on") {
  Coordinator coordinator;
  Joined joined(DialTo(coordinator.address()));
  joined.logs->up.Next();
  REQUIRE(joined.link->Queue(Pong(1)).ok());
  REQUIRE(joined.link->Queue(TooLargeAttach(MemberId(7))).ok());
  REQUIRE(joined.link->Queue(Pong(2)).ok());
  const std::vector<PeerLink::Refused> refused = joined.link->Flush();
  REQUIRE(refused.size() == 1);
  CHECK(refused[0].status.code() == absl::StatusCode::kResourceExhausted);
  CHECK(std::get<PeerAttach>(refused[0].report).member == MemberId(7));
  CHECK(std::get<PeerPong>(coordinator.reports.Next()).number == 1);
  CHECK(std::get<PeerPong>(coordinator.reports.Next()).number == 2);
}

TEST_CASE(
    "A report that can't be sent comes back once, from the Flush of whichever thread encodes") {
  Coordinator coordinator;
  Joined joined(DialTo(coordinator.address()));
  joined.logs->up.Next();
  constexpr uint64_t kReports = 40;
  const auto send = [&joined](uint64_t first, std::vector<MemberId>* refused) {
    for (uint64_t i = 0; i < kReports; ++i) {
      REFITD_CHECK(joined.link->Queue(TooLargeAttach(MemberId(first + i))).ok());
      REFITD_CHECK(joined.link->Queue(Pong(i)).ok());
      for (const PeerLink::Refused& report : joined.link->Flush()) {
        refused->push_back(std::get<PeerAttach>(report.report).member);
      }
    }
  };
  std::vector<MemberId> here;
  std::vector<MemberId> there;
  std::thread other([&] { send(1, &there); });
  send(1 + kReports, &here);
  other.join();
  std::vector<MemberId> all = here;
  all.insert(all.end(), there.begin(), there.end());
  std::sort(all.begin(), all.end());
  REQUIRE(all.size() == 2 * kReports);
  for (uint64_t i = 0; i < all.size(); ++i) CHECK(all[i] == MemberId(1 + i));
  for (uint64_t i = 0; i < 2 * kReports; ++i) {
    CHECK(std::holds_alternative<PeerPong>(coordinator.reports.Next()));
  }
}

// ---- a peer that does not read ----

// Sends until a message does not fit any more.
template <typename Send>
void FillUp(Send send) {
  const auto deadline = std::chrono::steady_clock::now() + kTestDeadline;
  while (send().ok()) REQUIRE(std::chrono::steady_clock::now() < deadline);
}

TEST_CASE("A coordinator that does not read costs a bounded queue, then its link") {
  // A coordinator whose gRPC thread is held in Report until the link is lost.
  class Stuck : public Coordinator {
   public:
    using Coordinator::Coordinator;
    void Report(uint64_t session, PeerReport report) override {
      while (!released) std::this_thread::yield();
      Coordinator::Report(session, std::move(report));
    }
    std::atomic<bool> released{false};
  };
  Stuck coordinator;
  Joined joined(DialTo(coordinator.address()));
  joined.logs->up.Next();
  const CommunicatorOpened big{CommunicatorId(1), absl::OkStatus(),
                               std::string(kMaxCommunicatorAddressBytes, 'a')};
  FillUp([&] { return Send(*joined.link, big); });
  const absl::Status lost = joined.logs->lost.Next();
  CHECK(lost.code() == absl::StatusCode::kResourceExhausted);
  coordinator.released = true;
  coordinator.gone.Next();
}

TEST_CASE("A daemon that does not read costs a bounded queue, then its link") {
  Coordinator coordinator;
  auto logs = std::make_shared<Joined::Logs>();
  auto released = std::make_shared<std::atomic<bool>>(false);
  auto link = PeerLink::Dial(DialTo(coordinator.address()),
                             {[logs](LinkUp up) { logs->up.Add(std::move(up)); },
                              [released](PeerCommand) {
                                while (!*released) std::this_thread::yield();
                              },
                              [logs](absl::Status s) { logs->lost.Add(std::move(s)); }});
  logs->up.Next();
  const auto session = coordinator.sessions.Next();
  PeerCommunicatorConnect big;
  big.addresses = std::make_shared<const std::vector<std::string>>(
      1, std::string(kMaxCommunicatorAddressBytes, 'a'));
  FillUp([&] { return Send(*session, big); });
  const auto [id, reason] = coordinator.gone.Next();
  CHECK(id == session->id());
  CHECK_THAT(reason, Catch::Matchers::Contains("does not read"));
  *released = true;
  CHECK_FALSE(logs->lost.Next().ok());
}

// ---- messages as another program might send them ----

class Raw {
 public:
  explicit Raw(const Coordinator& coordinator)
      : stub_(v1::Peer::NewStub(
            grpc::CreateChannel(coordinator.address(), grpc::InsecureChannelCredentials()))),
        stream_(stub_->Link(&context_)) {
    context_.set_deadline(std::chrono::system_clock::now() + kTestDeadline);
  }
  void Write(const v1::PeerMessage& message) { stream_->Write(message); }
  v1::PeerAnswer Read() {
    v1::PeerAnswer answer;
    stream_->Read(&answer);
    return answer;
  }
  grpc::Status End() {
    v1::PeerAnswer answer;
    while (stream_->Read(&answer)) {
    }
    return stream_->Finish();
  }
  void Hello() {
    v1::PeerMessage message;
    v1::PeerHello* hello = message.mutable_hello();
    hello->set_protocol(v1::PROTOCOL_VERSION_1);
    hello->set_group("policy");
    hello->set_daemon_id("node-1");
    hello->set_boot_id("0123456789abcdef");
    hello->set_message_bytes(kMessageBytes);
    Write(message);
    CHECK(Read().has_accepted());
  }
  void Pong(uint64_t sequence, uint64_t incarnation) {
    v1::PeerMessage message;
    message.set_sequence(sequence);
    message.set_incarnation(incarnation);
    message.set_pong(sequence);
    Write(message);
  }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<v1::Peer::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::PeerMessage, v1::PeerAnswer>> stream_;
};

TEST_CASE(
    "A report that comes twice counts once; a gap, another incarnation or nonsense end the "
    "link with a reason") {
  Coordinator coordinator;
  {
    Raw raw(coordinator);
    raw.Hello();
    raw.Pong(1, 77);
    raw.Pong(1, 77);
    raw.Pong(2, 77);
    CHECK(std::get<PeerPong>(coordinator.reports.Next()).number == 1);
    CHECK(std::get<PeerPong>(coordinator.reports.Next()).number == 2);
    raw.Pong(4, 77);
    const grpc::Status status = raw.End();
    CHECK(status.error_code() == grpc::StatusCode::ABORTED);
    CHECK_THAT(status.error_message(), Catch::Matchers::Contains("sequence is 4 where 3"));
    CHECK_THAT(coordinator.gone.Next().second, Catch::Matchers::Contains("sequence is 4"));
  }
  {
    Raw raw(coordinator);
    raw.Hello();
    raw.Pong(1, 78);
    CHECK(raw.End().error_code() == grpc::StatusCode::FAILED_PRECONDITION);
    coordinator.gone.Next();
  }
  {
    Raw raw(coordinator);
    raw.Hello();
    v1::PeerMessage nonsense;
    nonsense.set_sequence(1);
    nonsense.set_incarnation(77);
    nonsense.mutable_engine_message()->mutable_message()->mutable_ack()->set_part(-1);
    raw.Write(nonsense);
    CHECK(raw.End().error_code() == grpc::StatusCode::INVALID_ARGUMENT);
    coordinator.gone.Next();
  }
  {
    Raw raw(coordinator);
    raw.Pong(1, 77);
    const grpc::Status status = raw.End();
    CHECK(status.error_code() == grpc::StatusCode::INVALID_ARGUMENT);
    CHECK_THAT(status.error_message(), Catch::Matchers::Contains("must be hello"));
  }
  CHECK(coordinator.reports.size() == 0);
  CHECK(coordinator.gone.size() == 0);  // nobody was told of the link without a hello
}

// A message of a kind that this build does not know.
template <typename Message>
Message OfTheFuture(uint64_t sequence) {
  constexpr int kNoField = 1000;
  Message message;
  message.set_sequence(sequence);
  message.set_incarnation(77);
  message.GetReflection()->MutableUnknownFields(&message)->AddLengthDelimited(kNoField, "news");
  return message;
}

TEST_CASE("A report of a kind that this build does not know ends the link") {
  Coordinator coordinator;
  Raw raw(coordinator);
  raw.Hello();
  raw.Write(OfTheFuture<v1::PeerMessage>(1));
  CHECK(raw.End().error_code() == grpc::StatusCode::INVALID_ARGUMENT);
  coordinator.gone.Next();
  CHECK(coordinator.reports.size() == 0);
}

// A coordinator that sends the answers that the test gives it.
class RawCoordinator final : public v1::Peer::Service {
 public:
  explicit RawCoordinator(std::vector<v1::PeerAnswer> answers) : answers_(std::move(answers)) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~RawCoordinator() override {
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
  }
  grpc::Status Link(grpc::ServerContext* context,
                    grpc::ServerReaderWriter<v1::PeerAnswer, v1::PeerMessage>* stream) override {
    for (const v1::PeerAnswer& answer : answers_) stream->Write(answer);
    v1::PeerMessage message;
    while (stream->Read(&message)) {
    }
    cancelled.Add(context->IsCancelled());
    return grpc::Status::OK;
  }
  std::string address() const { return fmt::format("127.0.0.1:{}", port_); }

  Log<bool> cancelled;  // by link: whether the daemon cancelled it instead of closing it

 private:
  const std::vector<v1::PeerAnswer> answers_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

v1::PeerAnswer Ping(uint64_t sequence, uint64_t incarnation = 77) {
  v1::PeerAnswer answer;
  answer.set_sequence(sequence);
  answer.set_incarnation(incarnation);
  answer.set_ping(sequence);
  return answer;
}

TEST_CASE(
    "A link whose last report is refused after it was closed ends in order, not by its limit") {
  RawCoordinator coordinator({AcceptedToProto(Up(), kMessageBytes)});
  Joined joined(DialTo(coordinator.address()));
  joined.logs->up.Next();
  REQUIRE(joined.link->Queue(Pong(1)).ok());
  REQUIRE(joined.link->Queue(TooLargeAttach(MemberId(7))).ok());
  joined.link->Close();
  CHECK(joined.link->Flush().size() == 1);
  CHECK(joined.logs->lost.Next().code() == absl::StatusCode::kCancelled);
  CHECK_FALSE(coordinator.cancelled.Next());
}

TEST_CASE("A command that comes twice counts once; a gap or another incarnation ends the link") {
  const v1::PeerAnswer accepted = AcceptedToProto(Up(), kMessageBytes);
  {
    RawCoordinator coordinator({accepted, Ping(1), Ping(1), Ping(2), Ping(4)});
    Joined joined(DialTo(coordinator.address()));
    CHECK(std::get<PeerPing>(joined.logs->commands.Next()).number == 1);
    CHECK(std::get<PeerPing>(joined.logs->commands.Next()).number == 2);
    CHECK(joined.logs->lost.Next().code() == absl::StatusCode::kAborted);
    CHECK(joined.logs->commands.size() == 0);
  }
  {
    RawCoordinator coordinator({accepted, Ping(1, 78)});
    Joined joined(DialTo(coordinator.address()));
    CHECK(joined.logs->lost.Next().code() == absl::StatusCode::kFailedPrecondition);
  }
  {
    RawCoordinator coordinator({Ping(1)});
    Joined joined(DialTo(coordinator.address()));
    CHECK(joined.logs->lost.Next().code() == absl::StatusCode::kInvalidArgument);
    CHECK(joined.logs->up.size() == 0);
  }
}

TEST_CASE("A command of a kind that this build does not know ends the link") {
  RawCoordinator coordinator(
      {AcceptedToProto(Up(), kMessageBytes), OfTheFuture<v1::PeerAnswer>(1), Ping(2)});
  Joined joined(DialTo(coordinator.address()));
  CHECK(joined.logs->lost.Next().code() == absl::StatusCode::kInvalidArgument);
  CHECK(joined.logs->commands.size() == 0);
}

// ---- death ----

// Another process of this test's program, which runs one of the hidden tests below. Line returns
// the lines that it writes to its stdout.
class Process {
 public:
  Process(const std::string& test, const std::string& argument) {
    int fds[2];
    REFITD_CHECK(pipe2(fds, O_CLOEXEC) == 0);
    read_.Reset(fds[0]);
    const UniqueFd write(fds[1]);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, write.get(), STDOUT_FILENO);
    const std::string variable = "PEER_LINK_TEST=" + argument;
    std::string program = "/proc/self/exe";
    std::string name = test;
    char* argv[] = {program.data(), name.data(), nullptr};
    std::string env = variable;
    char* envp[] = {env.data(), nullptr};
    REFITD_CHECK(posix_spawn(&pid_, program.c_str(), &actions, nullptr, argv, envp) == 0);
    posix_spawn_file_actions_destroy(&actions);
  }
  ~Process() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  std::string Line() {
    std::string line;
    char c = 0;
    while (read(read_.get(), &c, 1) == 1 && c != '\n') line += c;
    return line;
  }
  void Kill() const { kill(pid_, SIGKILL); }

 private:
  pid_t pid_ = -1;
  UniqueFd read_;
};

void Say(const std::string& line) {
  const std::string text = line + "\n";
  REFITD_CHECK(write(STDOUT_FILENO, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
}

TEST_CASE("child: a coordinator until it is killed", "[.child]") {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  Coordinator coordinator;
  Say(coordinator.address());
  for (;;) pause();
}

TEST_CASE("child: a joined daemon until it is killed", "[.child]") {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  Joined joined(DialTo(std::getenv("PEER_LINK_TEST")));
  joined.logs->up.Next();
  Say("up");
  for (;;) pause();
}

TEST_CASE("The death of the coordinator's process is noticed at once") {
  Process process("child: a coordinator until it is killed", "");
  Joined joined(DialTo(process.Line()));
  joined.logs->up.Next();
  process.Kill();
  CHECK(joined.logs->lost.Next().code() == absl::StatusCode::kUnavailable);
}

TEST_CASE("The death of a joined daemon's process is noticed at once") {
  Coordinator coordinator;
  Process process("child: a joined daemon until it is killed", coordinator.address());
  REQUIRE(process.Line() == "up");
  const auto session = coordinator.sessions.Next();
  process.Kill();
  CHECK(coordinator.gone.Next().first == session->id());
}

// More messages than one write takes; even a busy machine writes them within kPeerEndLimit.
constexpr size_t kSentBefore = 100;

TEST_CASE("Ending a link says why, after what was sent before") {
  Coordinator coordinator;
  Joined joined(DialTo(coordinator.address()));
  joined.logs->up.Next();
  const auto session = coordinator.sessions.Next();
  for (uint64_t i = 0; i < kSentBefore; ++i) REQUIRE(Send(*session, PeerPing{i}).ok());
  session->End(absl::AbortedError("silent for 10 s"));
  const absl::Status lost = joined.logs->lost.Next();
  CHECK(lost.code() == absl::StatusCode::kAborted);
  CHECK_THAT(Message(lost), Catch::Matchers::Contains("silent for 10 s"));
  CHECK(joined.logs->commands.size() == kSentBefore);
  CHECK(coordinator.gone.Next().second == "silent for 10 s");
  session->End(absl::OkStatus());  // nothing more happens
}

TEST_CASE("What was sent before a link is closed still arrives") {
  Coordinator coordinator;
  Joined joined(DialTo(coordinator.address()));
  joined.logs->up.Next();
  for (uint64_t i = 0; i < kSentBefore; ++i) REQUIRE(Send(*joined.link, Pong(i)).ok());
  joined.link.reset();
  CHECK(joined.logs->lost.Next().code() == absl::StatusCode::kCancelled);
  coordinator.gone.Next();
  CHECK(coordinator.reports.size() == kSentBefore);
}

TEST_CASE("A link may be closed while others send") {
  Coordinator coordinator;
  for (int round = 0; round < 20; ++round) {
    Joined joined(DialTo(coordinator.address()));
    joined.logs->up.Next();
    const auto session = coordinator.sessions.Next();
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; ++t) {
      threads.emplace_back([&] {
        while (Send(*joined.link, Pong(1)).ok()) {
        }
      });
    }
    threads.emplace_back([&] {
      while (Send(*session, PeerPing{1}).ok()) std::this_thread::yield();
    });
    coordinator.reports.Next();
    if (round % 2 == 0) {
      joined.link->Close();
    } else {
      session->End(absl::OkStatus());
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_FALSE(joined.logs->lost.Next().ok());
    coordinator.gone.Next();
  }
}

// ---- resources ----

void OpenAndClose(Coordinator* coordinator, int cycles) {
  for (int i = 0; i < cycles; ++i) {
    Joined joined(DialTo(coordinator->address()));
    joined.logs->up.Next();
    joined.link.reset();
    CHECK_FALSE(joined.logs->lost.Next().ok());
    coordinator->gone.Next();
  }
}

TEST_CASE("200 links that come and go leave neither descriptors nor threads") {
  Coordinator coordinator;
  OpenAndClose(&coordinator, 20);  // starts gRPC's own threads
  const ProcessStats before = *ReadProcessStats();
  OpenAndClose(&coordinator, 200);
  constexpr int kSlack = 8;  // timers' and pollers' threads that come and go
  CHECK(Eventually([&] {
    const ProcessStats now = *ReadProcessStats();
    return now.descriptors <= before.descriptors + kSlack && now.threads <= before.threads + kSlack;
  }));
}

TEST_CASE("Both ends of a link's connection have a TCP_USER_TIMEOUT") {
  Coordinator coordinator;
  Joined joined(DialTo(coordinator.address()));
  joined.logs->up.Next();
  int ends = 0;
  for (int fd = 0; fd < 1024; ++fd) {
    sockaddr_in peer{};
    socklen_t length = sizeof(peer);
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0) continue;
    sockaddr_in self{};
    length = sizeof(self);
    getsockname(fd, reinterpret_cast<sockaddr*>(&self), &length);
    if (ntohs(peer.sin_port) != coordinator.port() && ntohs(self.sin_port) != coordinator.port()) {
      continue;
    }
    unsigned timeout_ms = 0;
    length = sizeof(timeout_ms);
    REQUIRE(getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, &length) == 0);
    CHECK(timeout_ms > 0);
    CHECK(timeout_ms <= 20'000);
    ++ends;
  }
  CHECK(ends == 2);
}

TEST_CASE("a hello names the dial") {
  Coordinator coordinator;
  PeerDial dial = DialTo(coordinator.address());
  dial.number = 7;
  const Joined joined(std::move(dial));
  CHECK(coordinator.hellos.Next().dial == 7);
}

}  // namespace
}  // namespace refitd
