// Links over real TLS: which addresses of the data plane a daemon may give (P9).
#include <fmt/format.h>
#include <grpcpp/grpcpp.h>

#include <catch2/catch.hpp>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "daemon/link/peer_link.h"
#include "daemon/services/peer_service.h"
#include "transport/base/eventually_testing.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"
#include "transport/base/temp_folder_testing.h"
#include "transport/sockets/frames.h"
#include "transport/tls/grpc_credentials.h"
#include "transport/tls/test_certificates.h"

namespace refitd {
namespace {

using Catch::Contains;

constexpr char kAlice[] = "spiffe://prod/refitd/alice";
constexpr char kBob[] = "spiffe://prod/refitd/bob";
constexpr int64_t kMessageBytes = 1 << 20;

std::string AddressOf(const std::string& identity) {
  SocketAddress address;
  address.communicator = 9;
  address.rank = 1;
  address.size = 2;
  address.host.family = AF_INET;
  address.host.ip = {10, 0, 0, 1};
  address.port = 4000;
  address.tls = !identity.empty();
  address.identity = identity;
  return EncodeSocketAddress(address);
}

// Certificates that one root has signed.
class Certified {
 public:
  std::shared_ptr<const Certificates> Issue(const std::string& identity) {
    const TlsFiles files = TlsFilesIn(folder_ / "", fmt::format("{}", ++issued_));
    WriteTlsFiles(files, authority_.Issue({.uris = {identity}}), authority_.root());
    auto loaded = LoadCertificates(files);
    REFITD_CHECK(loaded.ok());
    return *loaded;
  }

 private:
  const TempFolder folder_;
  const TestAuthority authority_{"root"};
  int issued_ = 0;
};

// Records the greetings that links bring to a coordinator, and the reasons for which links are
// refused. `certificates` null: links are in the clear.
class Coordinator : public PeerAcceptor {
 public:
  explicit Coordinator(std::shared_ptr<const Certificates> certificates)
      : service_(this, kMessageBytes,
                 [this, tls = certificates != nullptr](const auto& context) {
                   return Admit(context, tls);
                 }),
        credentials_(certificates == nullptr ? grpc::InsecureServerCredentials()
                                             : TlsServer([certificates] { return certificates; })) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", credentials_, &port_);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    REFITD_CHECK(server_ != nullptr && port_ != 0);
  }
  ~Coordinator() override {
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
  }

  void Hello(PeerGreeting /*hello*/, std::string /*address*/,
             std::shared_ptr<PeerSession> session) override {
    LinkUp up;
    up.incarnation = 77;
    up.spec.slot_bytes = 4096;
    up.spec.slots = 2;
    up.coordinator_id = "node-0";
    {
      MutexLock lock(&mutex_);
      session_ = session;  // before the joined daemon hears that it is up
    }
    session->Accept(up);
  }
  void Report(uint64_t /*session*/, PeerReport report) override {
    MutexLock lock(&mutex_);
    if (const auto* opened = std::get_if<CommunicatorOpened>(&report))
      taken_.push_back(opened->address);
  }
  void Gone(uint64_t /*session*/, std::string /*reason*/) override {}

  // Sends the command over the last link that came up.
  void Say(PeerCommand command) {
    std::shared_ptr<PeerSession> session;
    {
      MutexLock lock(&mutex_);
      session = session_;
    }
    REQUIRE(session->Queue(std::move(command)).ok());
    session->Flush();
  }

  std::string address() const { return fmt::format("127.0.0.1:{}", port_); }
  std::vector<std::string> taken() {
    MutexLock lock(&mutex_);
    return taken_;
  }
  std::vector<std::string> refused() {
    MutexLock lock(&mutex_);
    return refused_;
  }

 private:
  absl::StatusOr<LinkCaller> Admit(const grpc::ServerContextBase& context, bool tls) {
    LinkCaller caller;
    if (tls) {
      REFITD_ASSIGN_OR_RETURN(caller.identity, CallerIdentity(context));
    }
    caller.refused = [this](const std::string& group, const absl::Status& why) {
      MutexLock lock(&mutex_);
      refused_.push_back(group + ": " + Message(why));
    };
    return caller;
  }

  PeerService service_;
  const std::shared_ptr<grpc::ServerCredentials> credentials_;  // the server's handshakes ask it
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
  Mutex mutex_;
  std::shared_ptr<PeerSession> session_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> taken_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> refused_ ABSL_GUARDED_BY(mutex_);
};

// A daemon that links as `own` (null: in the clear), and what its link told it.
class Joined {
 public:
  Joined(const Coordinator& coordinator, const std::shared_ptr<const Certificates>& own) {
    PeerDial dial;
    dial.address = coordinator.address();
    dial.group = "policy";
    dial.daemon_id = "node-1";
    dial.boot_id = "0123456789abcdef";
    dial.credentials =
        own == nullptr ? grpc::InsecureChannelCredentials() : TlsChannel(*own, kAlice);
    dial.limits.message_bytes = kMessageBytes;
    link_ = PeerLink::Dial(std::move(dial), {[seen = seen_](LinkUp /*up*/) {
                                               MutexLock lock(&seen->mutex);
                                               seen->up = true;
                                             },
                                             [seen = seen_](PeerCommand /*command*/) {
                                               MutexLock lock(&seen->mutex);
                                               ++seen->commands;
                                             },
                                             [seen = seen_](absl::Status why) {
                                               MutexLock lock(&seen->mutex);
                                               seen->lost = std::move(why);
                                             }});
    REQUIRE(Eventually([&] {
      MutexLock lock(&seen_->mutex);
      return seen_->up || !seen_->lost.ok();
    }));
    REQUIRE(ended().ok());
  }

  PeerLink& link() { return *link_; }
  // How the link ended; OK: it is up.
  absl::Status ended() const {
    MutexLock lock(&seen_->mutex);
    return seen_->lost;
  }
  int commands() const {
    MutexLock lock(&seen_->mutex);
    return seen_->commands;
  }

 private:
  struct Seen {
    Mutex mutex;
    bool up ABSL_GUARDED_BY(mutex) = false;
    int commands ABSL_GUARDED_BY(mutex) = 0;
    absl::Status lost ABSL_GUARDED_BY(mutex);
  };
  const std::shared_ptr<Seen> seen_ = std::make_shared<Seen>();
  std::unique_ptr<PeerLink> link_;
};

// A daemon that links as `own` (null: in the clear) and sends one address. The answer says how the
// link ended; OK: the coordinator took the address.
absl::Status Sending(Coordinator* coordinator, const std::shared_ptr<const Certificates>& own,
                     const std::string& address) {
  Joined joined(*coordinator, own);
  const size_t before = coordinator->taken().size();
  REQUIRE(
      joined.link().Queue(CommunicatorOpened{CommunicatorId(9), absl::OkStatus(), address}).ok());
  joined.link().Flush();
  REQUIRE(Eventually([&] { return coordinator->taken().size() > before || !joined.ended().ok(); }));
  return joined.ended();
}

// A daemon that links as `own` (null: in the clear) and is told `addresses`, of which the one at
// `coordinator_rank` is the coordinator's. The answer says how the link ended; OK: the daemon took
// the addresses.
absl::Status BeingTold(Coordinator* coordinator, const std::shared_ptr<const Certificates>& own,
                       std::vector<std::string> addresses,
                       std::optional<uint32_t> coordinator_rank) {
  Joined joined(*coordinator, own);
  PeerCommunicatorConnect connect;
  connect.communicator = CommunicatorId(9);
  connect.addresses = std::make_shared<const std::vector<std::string>>(std::move(addresses));
  connect.coordinator_rank = coordinator_rank;
  coordinator->Say(std::move(connect));
  REQUIRE(Eventually([&] { return joined.commands() > 0 || !joined.ended().ok(); }));
  CHECK((joined.commands() > 0) == joined.ended().ok());
  return joined.ended();
}

TEST_CASE("a joined daemon could name another's identity in its address of the data plane") {
  Certified certified;
  const auto alice = certified.Issue(kAlice);
  Coordinator coordinator(alice);
  CHECK(Sending(&coordinator, alice, AddressOf(kAlice)).ok());
  CHECK(coordinator.taken() == std::vector<std::string>{AddressOf(kAlice)});

  const absl::Status refused = Sending(&coordinator, alice, AddressOf(kBob));
  CHECK(refused.code() == absl::StatusCode::kPermissionDenied);
  CHECK_THAT(Message(refused), Contains(kAlice) && Contains(kBob));
  CHECK(coordinator.taken().size() == 1);
  REQUIRE(coordinator.refused().size() == 1);
  CHECK_THAT(coordinator.refused()[0], Contains("policy: ") && Contains(kBob));
}

TEST_CASE("a link over TLS may give addresses that are not encrypted, and of other wires") {
  Certified certified;
  const auto alice = certified.Issue(kAlice);
  Coordinator coordinator(alice);
  CHECK(Sending(&coordinator, alice, AddressOf("")).ok());
  CHECK(Sending(&coordinator, alice, "an address of NCCL").ok());
}

TEST_CASE("a link in the clear proves no identity, so that its addresses may name none") {
  Coordinator coordinator(nullptr);
  CHECK(Sending(&coordinator, nullptr, AddressOf("")).ok());
  const absl::Status refused = Sending(&coordinator, nullptr, AddressOf(kBob));
  CHECK(refused.code() == absl::StatusCode::kPermissionDenied);
  CHECK_THAT(Message(refused), Contains(kBob) && Contains("in the clear"));
}

TEST_CASE("a coordinator could name another's identity in its own address of the data plane") {
  Certified certified;
  const auto alice = certified.Issue(kAlice);
  Coordinator coordinator(alice);
  const std::vector<std::string> honest = {AddressOf(kBob), AddressOf(kAlice)};
  CHECK(BeingTold(&coordinator, alice, honest, 1).ok());

  const absl::Status refused =
      BeingTold(&coordinator, alice, {AddressOf(kAlice), AddressOf(kBob)}, 1);
  CHECK(refused.code() == absl::StatusCode::kPermissionDenied);
  CHECK_THAT(Message(refused), Contains("coordinator " + coordinator.address()) &&
                                   Contains(kAlice) && Contains(kBob));
}

TEST_CASE("a coordinator may give addresses that are not encrypted, and of other wires") {
  Certified certified;
  const auto alice = certified.Issue(kAlice);
  Coordinator coordinator(alice);
  CHECK(BeingTold(&coordinator, alice, {AddressOf("")}, 0).ok());
  CHECK(BeingTold(&coordinator, alice, {"an address of NCCL"}, 0).ok());
}

TEST_CASE("nothing is compared for a coordinator that does not say its rank") {
  Certified certified;
  const auto alice = certified.Issue(kAlice);
  Coordinator coordinator(alice);
  CHECK(BeingTold(&coordinator, alice, {AddressOf(kBob)}, std::nullopt).ok());
}

TEST_CASE("a coordinator whose link is in the clear may name no identity in its address") {
  Coordinator coordinator(nullptr);
  CHECK(BeingTold(&coordinator, nullptr, {AddressOf("")}, 0).ok());
  const absl::Status refused = BeingTold(&coordinator, nullptr, {AddressOf(kBob)}, 0);
  CHECK(refused.code() == absl::StatusCode::kPermissionDenied);
  CHECK_THAT(Message(refused), Contains(kBob) && Contains("in the clear"));
}

}  // namespace
}  // namespace refitd
