// Links over real TLS: whose address of the data plane a daemon may give (P9).
#include <fmt/format.h>
#include <grpcpp/grpcpp.h>

#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "daemon/link/peer_link.h"
#include "daemon/services/peer_service.h"
#include "transport/base/eventually.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"
#include "transport/base/temp_folder.h"
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
  address.epoch = 9;
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
    session->Accept(up);
  }
  void Report(uint64_t /*session*/, PeerReport report) override {
    MutexLock lock(&mutex_);
    if (const auto* opened = std::get_if<EpochOpened>(&report)) taken_.push_back(opened->address);
  }
  void Gone(uint64_t /*session*/, std::string /*reason*/) override {}
  absl::StatusOr<uint64_t> Probe(const PeerQuestion& /*question*/) override { return 0; }

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
  std::vector<std::string> taken_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> refused_ ABSL_GUARDED_BY(mutex_);
};

// A daemon that links as `own` (null: in the clear) and sends one address. The answer says how the
// link ended; OK: the coordinator took the address.
absl::Status Sending(Coordinator* coordinator, const std::shared_ptr<const Certificates>& own,
                     const std::string& address) {
  struct Seen {
    Mutex mutex;
    bool up ABSL_GUARDED_BY(mutex) = false;
    absl::Status lost ABSL_GUARDED_BY(mutex);
  };
  auto seen = std::make_shared<Seen>();
  PeerDial dial;
  dial.address = coordinator->address();
  dial.group = "policy";
  dial.daemon_id = "node-1";
  dial.boot_id = "0123456789abcdef";
  dial.credentials = own == nullptr ? grpc::InsecureChannelCredentials() : TlsChannel(*own, kAlice);
  dial.limits.message_bytes = kMessageBytes;
  const auto link = PeerLink::Dial(std::move(dial), {[seen](LinkUp /*up*/) {
                                                       MutexLock lock(&seen->mutex);
                                                       seen->up = true;
                                                     },
                                                     [](PeerCommand /*command*/) {},
                                                     [seen](absl::Status why) {
                                                       MutexLock lock(&seen->mutex);
                                                       seen->lost = std::move(why);
                                                     }});
  const auto ended = [&] {
    MutexLock lock(&seen->mutex);
    return seen->lost;
  };
  REQUIRE(Eventually([&] {
    MutexLock lock(&seen->mutex);
    return seen->up || !seen->lost.ok();
  }));
  REQUIRE(ended().ok());
  const size_t before = coordinator->taken().size();
  REQUIRE(link->Queue(EpochOpened{EpochId(9), absl::OkStatus(), address}).ok());
  link->Flush();
  REQUIRE(Eventually([&] { return coordinator->taken().size() > before || !ended().ok(); }));
  return ended();
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

}  // namespace
}  // namespace refitd
