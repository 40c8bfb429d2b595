// Mutual TLS between real daemons, members and operators (P9): who is let in, who is refused and
// hears why at both ends, and certificates that are replaced while updates run.
#include <fmt/format.h>
#include <openssl/ssl.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "client/trainer.h"
#include "daemon/tls_scrape_testing.h"
#include "tests/e2e/certified.h"
#include "tests/e2e/client_members.h"
#include "tests/e2e/require.h"
#include "transport/base/failure.h"
#include "transport/tls/grpc_credentials.h"
#include "transport/tls/probe.h"

namespace refitd::e2e {
namespace {

using Catch::Contains;

client::ConnectOptions Over(const std::string& address, const TlsFiles& files,
                            const std::string& server = kDaemons) {
  client::ConnectOptions connect;
  connect.address = address;
  connect.group = "g";
  connect.spec.emplace();
  connect.wait = std::chrono::seconds(10);
  connect.tls = {
      .certificate = files.certificate, .key = files.key, .roots = files.roots, .server = server};
  return connect;
}

client::ConnectOptions At(const Daemon& daemon, const std::string& coordinator = "") {
  client::ConnectOptions connect;
  connect.socket = daemon.socket();
  connect.group = "g";
  connect.spec.emplace();
  connect.coordinator = coordinator;
  return connect;
}

absl::Status Attaching(const client::ConnectOptions& connect) {
  return client::Trainer::Attach({.connect = connect}).status();
}

// Pushes a version as inline bytes, since nothing else goes over TCP.
absl::Status InstallInline(client::Trainer* trainer, const Model& model, int64_t version) {
  const std::vector<std::string> bytes = BytesOf(model, version);
  std::vector<std::span<const char>> spans;
  for (const std::string& each : bytes) spans.emplace_back(each);
  REFITD_ASSIGN_OR_RETURN(const auto update, trainer->Begin({.version = Version(version)}));
  REFITD_RETURN_IF_ERROR(update->Push(client::Bucket::Inline(model, spans)));
  return update->Commit().status();
}

bool LogHas(Daemon* daemon, const std::string& text) {
  return Eventually([&] { return daemon->log().find(text) != std::string::npos; });
}

// Makes a call as an operator over TCP.
grpc::Status AskOver(const std::string& address,
                     const std::shared_ptr<grpc::ChannelCredentials>& with) {
  const auto stub = v1::Operator::NewStub(grpc::CreateChannel("dns:///" + address, with));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  v1::GetStatusResponse response;
  return stub->GetStatus(&context, v1::GetStatusRequest(), &response);
}

grpc::Status AskOver(const std::string& address, const TlsFiles& files,
                     const std::string& server = kDaemons) {
  const auto own = LoadCertificates(files);
  REQUIRE(own.ok());
  return AskOver(address, TlsChannel(**own, server));
}

TEST_CASE("a trainer over TLS installs a version, and its identity is seen in status and log") {
  Certified certified;
  const Model model = MixedModel();
  Daemon daemon(Flags(certified.Issue("refitd/a"), {"--listen-tcp=127.0.0.1:0"}));
  Rank engine(At(daemon), "i", client::Delivery::kInPlace, model);
  auto trainer =
      client::Trainer::Attach({.connect = Over(daemon.address(), certified.Issue("trainer/t"))});
  INFO(trainer.status());
  REQUIRE(trainer.ok());
  REQUIRE(InstallInline(trainer->get(), model, 1).ok());
  CHECK(engine.Await([](const Rank::Seen& seen) { return seen.committed == Version(1); }));

  const auto members = daemon.Call(&v1::Operator::Stub::ListMembers, v1::ListMembersRequest());
  REQUIRE(members.response.members_size() == 2);
  for (const v1::MemberStatus& member : members.response.members()) {
    CHECK(member.identity() == (member.role() == "trainer" ? "spiffe://prod/trainer/t" : ""));
  }
  CHECK(LogHas(&daemon, "attaches as spiffe://prod/trainer/t"));
  // Memory can be shared on one machine only.
  const auto region = (*trainer)->NewRegion(4096);
  CHECK_THAT(Message(region.status()), Contains("no memory is shared"));
}

TEST_CASE("a lease over TLS works for nobody else") {
  Certified certified;
  Daemon daemon(Flags(certified.Issue("refitd/a"), {"--listen-tcp=127.0.0.1:0"}));
  const auto owner = LoadCertificates(certified.Issue("trainer/t"));
  const auto thief = LoadCertificates(certified.Issue("trainer/u"));
  const auto channel = [&](const Certificates& own) {
    return grpc::CreateChannel("dns:///" + daemon.address(), TlsChannel(own, kDaemons));
  };
  RawTrainer trainer(channel(**owner), RawTrainer::Hello("g"));
  REQUIRE(trainer.attached().ok());
  v1::AbortRequest request;
  *request.mutable_lease() = trainer.welcome().lease();
  request.set_version(1);
  for (const auto& other : {channel(**thief), daemon.Connect()}) {
    const auto stub = v1::Trainer::NewStub(other);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kDeadline);
    v1::AbortResponse response;
    const grpc::Status status = stub->Abort(&context, request, &response);
    CHECK(status.error_code() == grpc::StatusCode::PERMISSION_DENIED);
    CHECK_THAT(status.error_message(), Contains("the lease belongs to 'spiffe://prod/trainer/t'"));
  }
}

TEST_CASE("daemons link over TLS at a listener of their own, which serves nothing else") {
  Certified certified;
  const Model model = MixedModel();
  Daemon a(Flags(certified.Issue("refitd/a"),
                 {"--daemon-id=a", "--listen-tcp=127.0.0.1:0", "--peers-listen=127.0.0.1:0",
                  std::string("--peers-identity=") + kDaemons}));
  Daemon b(Flags(certified.Issue("refitd/b"),
                 {"--daemon-id=b", std::string("--peers-identity=") + kDaemons}));
  Rank far(At(b, a.links()), "far", client::Delivery::kInPlace, model);
  Pusher pusher(At(a), model);
  REQUIRE(pusher.Install(1).ok());
  CHECK(far.Await([](const Rank::Seen& seen) { return seen.committed == Version(1); }));
  CHECK(LogHas(&a, "is spiffe://prod/refitd/b"));

  const TlsFiles member = certified.Issue("member");
  CHECK(AskOver(a.address(), member).ok());
  CHECK(AskOver(a.links(), member).error_code() == grpc::StatusCode::UNIMPLEMENTED);
  // Neither a member's certificate nor its listener makes a daemon.
  Daemon false_one(Flags(member, {"--daemon-id=c", std::string("--peers-identity=") + kDaemons}));
  const absl::Status by_identity = Attaching(At(false_one, a.links()));
  CHECK(absl::IsPermissionDenied(by_identity));
  CHECK_THAT(Message(by_identity), Contains("spiffe://prod/member may not be peer of any group"));
  CHECK(LogHas(&a, "spiffe://prod/member may not be peer of any group"));
  client::ConnectOptions elsewhere = At(b, a.address());
  elsewhere.group = "h";
  CHECK(Attaching(elsewhere).code() == absl::StatusCode::kUnimplemented);
}

TEST_CASE("a group that demands encrypted_data never moves bytes between daemons in the clear") {
  Certified certified;
  const Model model = MixedModel();
  const std::string daemons = std::string("--peers-identity=") + kDaemons;
  Daemon a(
      Flags(certified.Issue("refitd/a"), {"--daemon-id=a", "--peers-listen=127.0.0.1:0", daemons}));
  Daemon b(Flags(certified.Issue("refitd/b"), {"--daemon-id=b", daemons}));
  Daemon clear(
      Flags(certified.Issue("refitd/c"), {"--daemon-id=c", "--data-unencrypted=true", daemons}));
  const auto demanding = [](const Daemon& daemon, const std::string& coordinator = "") {
    client::ConnectOptions connect = At(daemon, coordinator);
    connect.spec->encrypted_data = true;
    return connect;
  };
  Rank far(demanding(b, a.links()), "far", client::Delivery::kInPlace, model);
  Pusher pusher(demanding(a), model);
  REQUIRE(pusher.Install(1).ok());
  CHECK(far.Await([](const Rank::Seen& seen) { return seen.committed == Version(1); }));
  REQUIRE(a.Status().groups_size() == 1);
  CHECK(a.Status().groups(0).spec().encrypted_data());

  client::ConnectOptions unencrypted = At(clear, a.links());
  unencrypted.spec.reset();
  const absl::Status refused = Attaching(unencrypted);
  INFO(refused);
  CHECK(absl::IsFailedPrecondition(refused));
  CHECK_THAT(Message(refused), Contains("spec.encrypted_data: group 'g' demands it") &&
                                   Contains("daemon c is in the clear: data.unencrypted"));
  const absl::Status other_spec = Attaching(At(a));
  CHECK(absl::IsFailedPrecondition(other_spec));
  CHECK_THAT(Message(other_spec), Contains("encrypted_data"));
  REQUIRE(pusher.Install(2).ok());
  CHECK(far.Await([](const Rank::Seen& seen) { return seen.committed == Version(2); }));
}

TEST_CASE("a daemon joins no coordinator that is another") {
  Certified certified;
  Daemon a(Flags(certified.Issue("member"), {"--daemon-id=a", "--listen-tcp=127.0.0.1:0"}));
  Daemon b(Flags(certified.Issue("refitd/b"),
                 {"--daemon-id=b", std::string("--peers-identity=") + kDaemons}));
  client::ConnectOptions connect = At(b, a.address());
  connect.wait = std::chrono::milliseconds(1000);
  const absl::Status refused = Attaching(connect);
  INFO(refused);
  CHECK(absl::IsUnavailable(refused));
  CHECK_THAT(Message(refused), Contains("the server is \"spiffe://prod/member\""));
  const Failure failure = FailureOf(refused);
  REQUIRE(failure.suspects.size() == 1);
  CHECK(failure.suspects[0].daemon == a.address());
  CHECK(
      LogHas(&b, "TLS: coordinator " + a.address() +
                     " is refused: the server is \"spiffe://prod/member\", which does not match"));
  CHECK(a.Status().groups_size() == 0);
}

TEST_CASE("without tls and without insecure a daemon links to nobody") {
  Daemon a({"--listen-tcp=127.0.0.1:0", "--daemon-id=a"});
  Daemon b({"--insecure=false", "--daemon-id=b"});
  const absl::Status refused = Attaching(At(b, a.address()));
  CHECK(absl::IsFailedPrecondition(refused));
  CHECK_THAT(Message(refused), Contains("a link takes tls, or listen.insecure"));
}

struct Refusal {
  std::string name;
  TlsFiles member;
  std::string server;
  std::string at_member;  // what the member's status says
  std::string at_daemon;  // what the daemon's log says; empty: the member hung up
};

TEST_CASE("a certificate that is not good is refused, and both ends hear why") {
  Certified certified;
  Daemon daemon(Flags(certified.Issue("refitd/a"), {"--listen-tcp=127.0.0.1:0"}));
  const TlsFiles good = certified.Issue("member");
  const Refusal refusals[] = {
      {"another root",
       certified.Write("other", certified.stranger.Issue({.uris = {"spiffe://prod/x"}}),
                       certified.authority.root()),
       kDaemons,
       "closed the connection after the handshake, as it does when it refuses a certificate: that "
       "of "
       "spiffe://prod/x (signed by /CN=another root, valid until ",
       "the certificate of spiffe://prod/x, which says it was signed by /CN=another root, is "
       "refused"},
      {"no identity", certified.Issue("nameless", {}), kDaemons,
       "neither a SPIFFE ID (as its only URI) nor a DNS name", ""},
      {"two SPIFFE IDs", certified.Issue("two", {.uris = {"spiffe://prod/a", "spiffe://prod/b"}}),
       kDaemons, "neither a SPIFFE ID (as its only URI) nor a DNS name", ""},
      {"another daemon", good, "spiffe://prod/other/*", "does not match \"spiffe://prod/other/*\"",
       ""},
      {"roots that did not sign the daemon",
       certified.Write("blind", certified.authority.Issue({.uris = {"spiffe://prod/y"}}),
                       certified.stranger.root()),
       kDaemons,
       "the certificate of spiffe://prod/refitd/a at " + daemon.address() + " is refused here", ""},
  };
  for (const Refusal& refusal : refusals) {
    INFO(refusal.name);
    const absl::Status status = Attaching(Over(daemon.address(), refusal.member, refusal.server));
    CHECK(absl::IsUnauthenticated(status));
    CHECK_THAT(Message(status), Contains(refusal.at_member));
    if (!refusal.at_daemon.empty()) CHECK(LogHas(&daemon, refusal.at_daemon));
    CHECK_FALSE(AskOver(daemon.address(), refusal.member, refusal.server).ok());
  }
  CHECK(daemon.Resources().members() == 0);
  CHECK(Attaching(Over(daemon.address(), good)).ok());
}

TEST_CASE("an expired certificate is refused, whichever end has it") {
  Certified certified;
  Daemon daemon(Flags(certified.Issue("refitd/a"), {"--listen-tcp=127.0.0.1:0"}));
  const TlsFiles late = certified.Issue(
      "late", {.uris = {"spiffe://prod/late"}, .from_seconds = -100, .until_seconds = -10});
  const absl::Status own = Attaching(Over(daemon.address(), late));
  CHECK(absl::IsInvalidArgument(own));
  CHECK_THAT(Message(own), Contains(late.certificate + ": the certificate expired at"));

  // This client does not look at its own certificate.
  const IssuedCertificate expired = certified.authority.Issue(
      {.uris = {"spiffe://prod/late"}, .from_seconds = -100, .until_seconds = -10});
  Certificates careless;
  careless.certificate = expired.certificate;
  careless.key = expired.key;
  careless.roots = certified.authority.root();
  careless.identity = "spiffe://prod/late";
  CHECK(AskOver(daemon.address(), TlsChannel(careless, kDaemons)).error_code() ==
        grpc::StatusCode::UNAVAILABLE);
  CHECK(LogHas(&daemon,
               "the certificate of spiffe://prod/late, which says it was signed by "
               "/CN=root, is refused: certificate has expired"));
  const absl::Status why =
      ProbeTls(daemon.address(), careless, kDaemons, std::chrono::steady_clock::now() + kDeadline);
  CHECK_THAT(Message(why), Contains("that of spiffe://prod/late (signed by /CN=root, valid until"));

  // This server stands for a daemon that has outlived its certificate.
  v1::Operator::CallbackService nothing;
  grpc::ServerBuilder builder;
  builder.RegisterService(&nothing);
  const auto own_now = std::make_shared<const Certificates>(careless);
  const auto credentials = TlsServer([own_now] { return own_now; });
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", credentials, &port);
  const std::unique_ptr<grpc::Server> outlived = builder.BuildAndStart();
  REQUIRE(outlived != nullptr);
  const absl::Status refused = Attaching(
      Over(fmt::format("127.0.0.1:{}", port), certified.Issue("member"), "spiffe://prod/*"));
  CHECK(absl::IsUnauthenticated(refused));
  CHECK_THAT(Message(refused), Contains("spiffe://prod/late") && Contains("expired"));
}

TEST_CASE(
    "a certificate is for the host of the address, if no identity of the daemon is asked for") {
  Certified certified;
  const CertificateRequest for_host{
      .uris = {"spiffe://prod/refitd/a"}, .names = {"localhost"}, .addresses = {}};
  Daemon daemon(Flags(certified.Issue("a", for_host), {"--listen-tcp=127.0.0.1:0"}));
  const TlsFiles member = certified.Issue("member");
  const std::string by_name = "localhost" + daemon.address().substr(daemon.address().rfind(':'));
  CHECK(Attaching(Over(by_name, member, "")).ok());
  const absl::Status by_number = Attaching(Over(daemon.address(), member, ""));
  CHECK(absl::IsUnauthenticated(by_number));
  CHECK_THAT(Message(by_number), Contains("it must be for 127.0.0.1"));
}

TEST_CASE("nobody is served in the clear, without a certificate, or by an older TLS") {
  Certified certified;
  Daemon daemon(Flags(certified.Issue("refitd/a"), {"--listen-tcp=127.0.0.1:0"}));
  const TlsFiles member = certified.Issue("member");
  CHECK_FALSE(AskOver(daemon.address(), grpc::InsecureChannelCredentials()).ok());
  grpc::SslCredentialsOptions nothing;
  nothing.pem_root_certs = certified.authority.root();
  CHECK_FALSE(AskOver(daemon.address(), grpc::SslCredentials(nothing)).ok());
  CHECK(LogHas(&daemon, "gRPC: Handshake failed"));

  const auto versions = [&](int version) {
    SSL_CTX* context = SSL_CTX_new(TLS_client_method());
    SSL_CTX_set_min_proto_version(context, version);
    SSL_CTX_set_max_proto_version(context, version);
    SSL_CTX_use_certificate_chain_file(context, member.certificate.c_str());
    SSL_CTX_use_PrivateKey_file(context, member.key.c_str(), SSL_FILETYPE_PEM);
    BIO* bio = BIO_new_ssl_connect(context);
    BIO_set_conn_hostname(bio, daemon.address().c_str());
    SSL* ssl = nullptr;
    BIO_get_ssl(bio, &ssl);
    const unsigned char alpn[] = {2, 'h', '2'};
    SSL_set_alpn_protos(ssl, alpn, sizeof(alpn));
    const bool agreed = BIO_do_handshake(bio) == 1;
    BIO_free_all(bio);
    SSL_CTX_free(context);
    return agreed;
  };
  CHECK(versions(TLS1_3_VERSION));
  CHECK_FALSE(versions(TLS1_2_VERSION));
}

// OpenSSL calls it for each ticket of a session.
std::atomic<int> tickets{0};
int TicketCame(SSL* /*ssl*/, SSL_SESSION* /*session*/) {
  ++tickets;
  return 0;
}

TEST_CASE("TLS sessions were resumed for two hours without a look at the certificate") {
  Certified certified;
  Daemon daemon(Flags(certified.Issue("refitd/a"), {"--listen-tcp=127.0.0.1:0"}));
  const TlsFiles member = certified.Issue("member");
  SSL_CTX* context = SSL_CTX_new(TLS_client_method());
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_CLIENT);
  SSL_CTX_sess_set_new_cb(context, TicketCame);
  SSL_CTX_use_certificate_chain_file(context, member.certificate.c_str());
  SSL_CTX_use_PrivateKey_file(context, member.key.c_str(), SSL_FILETYPE_PEM);
  BIO* bio = BIO_new_ssl_connect(context);
  BIO_set_conn_hostname(bio, daemon.address().c_str());
  SSL* ssl = nullptr;
  BIO_get_ssl(bio, &ssl);
  const unsigned char alpn[] = {2, 'h', '2'};
  SSL_set_alpn_protos(ssl, alpn, sizeof(alpn));
  REQUIRE(BIO_do_handshake(bio) == 1);
  // The server's first frame, behind which its tickets would have come.
  char frame[9];
  CHECK(BIO_read(bio, frame, sizeof(frame)) > 0);
  CHECK(tickets == 0);
  CHECK(SSL_SESSION_is_resumable(SSL_get_session(ssl)) == 0);
  BIO_free_all(bio);
  SSL_CTX_free(context);
}

TEST_CASE("a client sends in the clear only what its options allow") {
  Daemon daemon({"--listen-tcp=127.0.0.1:0"});
  client::ConnectOptions connect;
  connect.address = daemon.address();
  connect.group = "g";
  connect.spec.emplace();
  CHECK_THAT(Message(Attaching(connect)), Contains("or insecure in so many words"));
  connect.insecure = true;
  CHECK(Attaching(connect).ok());
}

TEST_CASE("metrics over TLS are for identities that may read every group") {
  Certified certified(
      "rule { who: \"spiffe://prod/prometheus\" role: OPERATOR_READ group: \"*\" }\n"
      "rule { who: \"spiffe://prod/some\" role: OPERATOR_READ group: \"llama-*\" }\n");
  const TlsFiles files = certified.Issue("refitd/a");
  const std::string audit = certified / "audit.log";
  Daemon daemon(
      Flags(files, {"--metrics-listen=127.0.0.1:0", "--insecure=false", "--audit-file=" + audit}));
  std::string address;
  const v1::GetStatusResponse status = daemon.Status();
  for (const std::string& listener : status.listeners()) {
    if (listener.starts_with("metrics:")) address = listener.substr(8);
  }
  REQUIRE(!address.empty());
  const auto scrape = [&](const std::string& name, std::string* presented = nullptr) {
    const auto own = LoadCertificates(certified.Issue(name));
    REQUIRE(own.ok());
    return ScrapeOverTls(address, *own, presented);
  };
  std::string presented;
  CHECK_THAT(scrape("prometheus", &presented),
             Contains("HTTP/1.1 200 OK") && Contains("process_open_fds"));
  CHECK(presented == "spiffe://prod/refitd/a");
  for (const char* name : {"some", "trainer/t"}) {
    const std::string answer = scrape(name);
    CHECK_THAT(answer, Contains("HTTP/1.1 403") && Contains(std::string("spiffe://prod/") + name) &&
                           !Contains("process_open_fds"));
  }
  CHECK(Eventually([&] {
    std::ifstream in(audit);
    const std::string lines((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    return lines.find("spiffe://prod/trainer/t") != std::string::npos;
  }));
  // Renewed files count for the next scrape.
  certified.Write("refitd/a", certified.authority.Issue({.uris = {"spiffe://prod/refitd/renewed"}}),
                  certified.authority.root());
  CHECK(Eventually([&] {
    scrape("prometheus", &presented);
    return presented == "spiffe://prod/refitd/renewed";
  }));
}

TEST_CASE("a root that was removed lets nobody in any more, and costs no lease of others") {
  Certified certified;
  const Model model = MixedModel();
  const TlsFiles own =
      certified.Write("a", certified.authority.Issue({.uris = {"spiffe://prod/refitd/a"}}),
                      certified.authority.root() + certified.stranger.root());
  Daemon daemon(Flags(own, {"--listen-tcp=127.0.0.1:0"}));
  const TlsFiles other = certified.Write(
      "other", certified.stranger.Issue({.uris = {"spiffe://prod/x"}}), certified.authority.root());
  CHECK(Attaching(Over(daemon.address(), other)).ok());
  Rank engine(At(daemon), "i", client::Delivery::kInPlace, model);
  auto trainer =
      client::Trainer::Attach({.connect = Over(daemon.address(), certified.Issue("trainer"))});
  REQUIRE(trainer.ok());

  WriteTlsFiles(own, certified.authority.Issue({.uris = {"spiffe://prod/refitd/a"}}),
                certified.authority.root());
  daemon.Signal(SIGHUP);
  REQUIRE(LogHas(&daemon, "certificates changed: spiffe://prod/refitd/a, valid until"));
  const absl::Status refused = Attaching(Over(daemon.address(), other));
  CHECK(absl::IsUnauthenticated(refused));
  CHECK_THAT(Message(refused), Contains("that of spiffe://prod/x (signed by /CN=another root"));
  CHECK(LogHas(&daemon,
               "the certificate of spiffe://prod/x, which says it was signed by "
               "/CN=another root, is refused"));
  REQUIRE(InstallInline(trainer->get(), model, 1).ok());
}

TEST_CASE("files that do not fit are not taken over, and the log says so") {
  Certified certified;
  const TlsFiles own = certified.Issue("refitd/a");
  Daemon daemon(Flags(own, {"--listen-tcp=127.0.0.1:0"}));
  std::filesystem::remove(own.key);
  for (int i = 0; i < 2; ++i) daemon.Signal(SIGHUP);
  REQUIRE(LogHas(&daemon, "certificates not taken over: " + own.key));
  CHECK(Attaching(Over(daemon.address(), certified.Issue("member"))).ok());
}

// How many updates, each with new certificates; TLS_UPDATES in the environment asks for more.
int Updates() {
  constexpr int kUpdates = 30;
  const char* asked = std::getenv("TLS_UPDATES");
  return asked == nullptr ? kUpdates : std::max(4, std::atoi(asked));
}

TEST_CASE("certificates are replaced under load: no update is lost, nobody is refused") {
  Certified certified;
  const Model model = MixedModel();
  const TlsFiles of_a = certified.Issue("refitd/a");
  const TlsFiles of_b = certified.Issue("refitd/b");
  Daemon a(Flags(of_a, {"--daemon-id=a", "--listen-tcp=127.0.0.1:0",
                        std::string("--peers-identity=") + kDaemons}));
  Daemon b(Flags(of_b, {"--daemon-id=b", std::string("--peers-identity=") + kDaemons}));
  Rank near(At(a), "near", client::Delivery::kInPlace, model);
  Rank far(At(b, a.address()), "far", client::Delivery::kInPlace, model);
  auto trainer =
      client::Trainer::Attach({.connect = Over(a.address(), certified.Issue("trainer"))});
  REQUIRE(trainer.ok());

  // The roots change as well: the old one alone, then both, then the new one alone, as when a root
  // is replaced.
  const TestAuthority next{"next root"};
  const std::string bundles[] = {certified.authority.root(),
                                 certified.authority.root() + next.root(),
                                 next.root() + certified.authority.root(), next.root()};
  const int updates = Updates();
  for (int version = 1; version <= updates; ++version) {
    const auto step = static_cast<size_t>(std::min(3, version * 4 / updates));
    const TestAuthority& signer = step >= 2 ? next : certified.authority;
    const auto renew = [&](const TlsFiles& files, const std::string& who) {
      WriteTlsFiles(files, signer.Issue({.uris = {"spiffe://prod/" + who}}), bundles[step]);
    };
    renew(of_a, "refitd/a");
    renew(of_b, "refitd/b");
    const std::string before = a.log();
    a.Signal(SIGHUP);
    b.Signal(SIGHUP);
    INFO("version " << version);
    REQUIRE(InstallInline(trainer->get(), model, version).ok());
    REQUIRE(Eventually([&] { return a.log().size() > before.size(); }));
    // A client that comes with a certificate of the moment is let in, in the middle of all this.
    TlsFiles comer =
        certified.Write("comer", signer.Issue({.uris = {"spiffe://prod/comer"}}), bundles[step]);
    REQUIRE(AskOver(a.address(), comer).ok());
  }
  const auto done = [updates](const Rank::Seen& seen) {
    return seen.committed == Version(updates);
  };
  CHECK(near.Await(done));
  CHECK(far.Await(done));
  CHECK(near.seen().losses + far.seen().losses == 0);
}

TEST_CASE("certificates that are missing or nameless keep a daemon from starting") {
  Certified certified;
  const TlsFiles nameless = certified.Issue("nameless", {});
  for (const auto& [files, why] :
       {std::pair(nameless, nameless.certificate + ": the certificate has neither"),
        {certified.Files("none"), std::string("none.crt")}}) {
    std::vector<std::string> argv = {BinaryPath("daemon/refitd"),
                                     "--listen-unix=/tmp/refitd_e2e_no"};
    for (const std::string& flag : Flags(files, {})) argv.push_back(flag);
    Process refused(argv);
    CHECK(refused.WaitExit() == 1);
    CHECK_THAT(refused.Errors(), Contains(why));
  }
}

}  // namespace
}  // namespace refitd::e2e
