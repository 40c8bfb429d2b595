#include "daemon/sockets/certificate_store.h"

#include <array>
#include <ctime>
#include <utility>

#include "daemon/process/log.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

absl::StatusOr<std::shared_ptr<const Certificates>> Load(const TlsFiles& files) {
  REFITD_ASSIGN_OR_RETURN(auto loaded, LoadCertificates(files));
  if (!loaded->identity.empty()) return loaded;
  return Error(absl::StatusCode::kInvalidArgument,
               "{}: the certificate has neither a SPIFFE ID (as its only URI) nor a DNS name",
               files.certificate);
}

}  // namespace

std::string Describe(const Certificates& certificates) {
  const std::time_t expires = certificates.expires.time_since_epoch().count();
  std::tm parts{};
  gmtime_r(&expires, &parts);
  std::array<char, 32> until{};
  std::strftime(until.data(), until.size(), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return fmt::format("{}, valid until {}, {} roots", certificates.identity, until.data(),
                     certificates.root_count);
}

absl::StatusOr<std::unique_ptr<CertificateStore>> CertificateStore::Create(const TlsFiles& files,
                                                                           OnReload on_reload) {
  REFITD_ASSIGN_OR_RETURN(auto first, Load(files));
  return std::unique_ptr<CertificateStore>(
      new CertificateStore(files, std::move(on_reload), std::move(first)));
}

CertificateStore::CertificateStore(TlsFiles files, OnReload on_reload,
                                   std::shared_ptr<const Certificates> first)
    : files_(std::move(files)), on_reload_(std::move(on_reload)), current_(std::move(first)) {}

std::shared_ptr<const Certificates> CertificateStore::Current() const {
  MutexLock lock(&mutex_);
  return current_;
}

void CertificateStore::Refresh() {
  const auto loaded = Load(files_);
  if (loaded.ok()) {
    {
      MutexLock lock(&mutex_);
      problem_.clear();
      logged_.clear();
      if (**loaded == *current_) return;
      current_ = *loaded;
    }
    // The log may stall, so it is written without the mutex, for which handshakes wait.
    LogInfo("certificates changed: {}", Describe(**loaded));
    if (on_reload_ != nullptr) on_reload_(absl::OkStatus(), **loaded);
    return;
  }
  const std::string problem = Message(loaded.status());
  std::shared_ptr<const Certificates> in_force;
  {
    MutexLock lock(&mutex_);
    if (std::exchange(problem_, problem) != problem || logged_ == problem) return;
    logged_ = problem;
    in_force = current_;
  }
  LogError("certificates not taken over: {}; still in force: {}", problem, Describe(*in_force));
  if (on_reload_ != nullptr) on_reload_(loaded.status(), *in_force);
}

}  // namespace refitd
