#include "transport/tls/grpc_credentials.h"

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_certificate_verifier.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <cstdlib>
#include <utility>
#include <vector>

#include "transport/base/mutex.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

// A server's credentials over gRPC's C interface, whose certificates can be replaced while it runs.
class ReloadingCredentials final : public grpc::ServerCredentials {
 public:
  explicit ReloadingCredentials(CertificateSource current) : current_(std::move(current)) {
    grpc_ssl_server_credentials_options* options =
        grpc_ssl_server_credentials_create_options_using_config_fetcher(
            GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY, &Fetch, this);
    REFITD_CHECK(options != nullptr);
    credentials_ = grpc_ssl_server_credentials_create_with_options(options);
    REFITD_CHECK(credentials_ != nullptr);
  }
  ~ReloadingCredentials() override { grpc_server_credentials_release(credentials_); }

  void SetAuthMetadataProcessor(
      const std::shared_ptr<grpc::AuthMetadataProcessor>& /*processor*/) override {
    REFITD_CHECK(false);  // nobody of this project asks
  }

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }

  // Called at the start of each handshake.
  static grpc_ssl_certificate_config_reload_status Fetch(
      void* self, grpc_ssl_server_certificate_config** config) {
    return static_cast<ReloadingCredentials*>(self)->FetchNow(config);
  }
  grpc_ssl_certificate_config_reload_status FetchNow(grpc_ssl_server_certificate_config** config) {
    const std::shared_ptr<const Certificates> now = current_();
    MutexLock lock(&mutex_);
    if (now == fetched_) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    const grpc_ssl_pem_key_cert_pair pair{now->key.c_str(), now->certificate.c_str()};
    *config = grpc_ssl_server_certificate_config_create(now->roots.c_str(), &pair, 1);
    fetched_ = now;
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }

  const CertificateSource current_;
  grpc_server_credentials* credentials_ = nullptr;
  Mutex mutex_;
  std::shared_ptr<const Certificates> fetched_ ABSL_GUARDED_BY(mutex_);
};

// Compares the identity of a server, whose certificate was verified before, with a pattern.
class IdentityVerifier final : public grpc::experimental::ExternalCertificateVerifier {
 public:
  using Refused = std::function<void(const std::string& why)>;
  IdentityVerifier(std::string pattern, Refused refused)
      : pattern_(std::move(pattern)), refused_(std::move(refused)) {}

  bool Verify(grpc::experimental::TlsCustomVerificationCheckRequest* request,
              std::function<void(grpc::Status)> /*callback*/, grpc::Status* status) override {
    const grpc::string_ref pem = request->peer_cert();
    const std::string identity = IdentityOfPem({pem.data(), pem.size()});
    if (MatchesIdentity(pattern_, identity)) return true;  // done at once
    const std::string why =
        fmt::format("the server is \"{}\", which does not match \"{}\"", identity, pattern_);
    if (refused_ != nullptr) refused_(why);
    *status = grpc::Status(grpc::StatusCode::UNAUTHENTICATED, why);
    return true;
  }
  void Cancel(grpc::experimental::TlsCustomVerificationCheckRequest* /*request*/) override {}

 private:
  const std::string pattern_;
  const Refused refused_;
};

std::vector<std::string> ValuesOf(const grpc::AuthContext& context, const char* property) {
  std::vector<std::string> values;
  for (const grpc::string_ref& value : context.FindPropertyValues(property)) {
    values.emplace_back(value.data(), value.size());
  }
  return values;
}

// The identity of the certificate that the other end of the call showed; empty: it gives none.
std::string IdentityOfPeer(const grpc::AuthContext& peer) {
  return IdentityOf(ValuesOf(peer, GRPC_PEER_URI_PROPERTY_NAME),
                    ValuesOf(peer, GRPC_PEER_DNS_PROPERTY_NAME));
}

}  // namespace

void RequireTls13() {
  // gRPC 1.51 has no setting for the lowest version, but one for the ciphers of TLS 1.2 and older.
  // The only cipher named here needs keys that were shared before, and nobody has any: TLS 1.2
  // can't be agreed. The ciphers of TLS 1.3 are not affected.
  setenv("GRPC_SSL_CIPHER_SUITES", "PSK-AES256-GCM-SHA384", /*overwrite=*/1);
}

std::shared_ptr<grpc::ServerCredentials> TlsServer(CertificateSource current) {
  return std::make_shared<ReloadingCredentials>(std::move(current));
}

std::shared_ptr<grpc::ChannelCredentials> TlsChannel(
    const Certificates& own, const std::string& server,
    std::function<void(const std::string& why)> refused) {
  namespace tls = grpc::experimental;
  tls::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(std::make_shared<tls::StaticDataCertificateProvider>(
      own.roots, std::vector<tls::IdentityKeyCertPair>{{own.key, own.certificate}}));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_verify_server_certs(true);
  if (!server.empty()) {
    options.set_certificate_verifier(
        tls::ExternalCertificateVerifier::Create<IdentityVerifier>(server, std::move(refused)));
    options.set_check_call_host(false);
  }
  return tls::TlsCredentials(options);
}

absl::StatusOr<std::string> CallerIdentity(const grpc::ServerContextBase& context) {
  const std::shared_ptr<const grpc::AuthContext> caller = context.auth_context();
  if (caller == nullptr || !caller->IsPeerAuthenticated()) {
    return absl::UnauthenticatedError("the caller has no certificate");
  }
  std::string identity = IdentityOfPeer(*caller);
  if (!identity.empty()) return identity;
  return absl::UnauthenticatedError(
      "the caller's certificate has neither a SPIFFE ID (as its only URI) nor a DNS name");
}

std::string ServerIdentity(const grpc::ClientContext& context) {
  const std::shared_ptr<const grpc::AuthContext> server = context.auth_context();
  if (server == nullptr || !server->IsPeerAuthenticated()) return "";
  return IdentityOfPeer(*server);
}

}  // namespace refitd
