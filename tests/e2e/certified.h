// Certificates and rules for tests of daemons over TLS.
#ifndef REFITD_TESTS_E2E_CERTIFIED_H_
#define REFITD_TESTS_E2E_CERTIFIED_H_

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/e2e/harness.h"
#include "transport/tls/test_certificates.h"

namespace refitd::e2e {

inline constexpr char kDaemons[] = "spiffe://prod/refitd/*";

// Lets everybody of the domain do everything, as tests that are not about rules want it.
inline constexpr char kOpenRules[] =
    "rule { who: \"spiffe://prod/*\" role: TRAINER role: ENGINE role: OPERATOR_WRITE group: \"*\" "
    "any_owner: true }\n";

// A folder of certificates, signed by one root unless a test says otherwise, and of a file of
// rules.
class Certified {
 public:
  explicit Certified(const std::string& rules = kOpenRules) { WriteRules(rules); }

  TlsFiles Files(const std::string& name) const { return TlsFilesIn(folder_ / "", name); }
  // Makes files for "spiffe://prod/NAME".
  TlsFiles Issue(const std::string& name) {
    return Issue(name, {.uris = {"spiffe://prod/" + name}});
  }
  TlsFiles Issue(const std::string& name, const CertificateRequest& request) {
    return Write(name, authority.Issue(request), authority.root());
  }
  TlsFiles Write(const std::string& name, const IssuedCertificate& own, const std::string& roots) {
    std::string base = name;
    std::replace(base.begin(), base.end(), '/', '-');
    WriteTlsFiles(Files(base), own, roots);
    return Files(base);
  }

  // The path of a configuration file, which has settings besides those that Flags gives.
  std::string rules() const { return folder_ / "rules.textproto"; }
  void WriteRules(const std::string& text) const {
    std::ofstream(rules() + ".new") << text;
    std::filesystem::rename(rules() + ".new", rules());
  }
  std::string operator/(const std::string& name) const { return folder_ / name; }

  const TestAuthority authority{"root"};
  const TestAuthority stranger{"another root"};

 private:
  const TempFolder folder_;
};

// A daemon's flags: its certificates, the rules beside them, and `more`.
inline std::vector<std::string> Flags(const TlsFiles& files, std::vector<std::string> more) {
  const std::filesystem::path folder = std::filesystem::path(files.certificate).parent_path();
  more.insert(more.end(),
              {"--tls-certificate=" + files.certificate, "--tls-key=" + files.key,
               "--tls-roots=" + files.roots, "--config=" + (folder / "rules.textproto").string()});
  return more;
}

}  // namespace refitd::e2e

#endif  // REFITD_TESTS_E2E_CERTIFIED_H_
