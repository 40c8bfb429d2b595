#include "daemon/sockets/certificate_store.h"

#include <catch2/catch.hpp>
#include <fstream>

#include "daemon/test_util.h"
#include "transport/base/status.h"
#include "transport/tls/test_certificates.h"

namespace refitd {
namespace {

TEST_CASE("Replaced files are taken over whole, and a half-way set is not") {
  const TempFolder folder;
  const TestAuthority authority("root");
  const TlsFiles files = TlsFilesIn(folder / "", "own");
  const auto issue = [&](const std::string& uri) { return authority.Issue({.uris = {uri}}); };
  WriteTlsFiles(files, issue("spiffe://prod/a"), authority.root());
  auto store = CertificateStore::Create(files);
  REQUIRE(store.ok());
  const auto first = (*store)->Current();
  CHECK(first->identity == "spiffe://prod/a");
  (*store)->Refresh();
  CHECK((*store)->Current() == first);

  const IssuedCertificate second = issue("spiffe://prod/b");
  std::ofstream(files.certificate) << second.certificate;
  (*store)->Refresh();
  CHECK((*store)->Current() == first);  // the key is still the old one
  std::ofstream(files.key) << second.key;
  (*store)->Refresh();
  CHECK((*store)->Current()->identity == "spiffe://prod/b");
  // Handshakes that began go on with the old certificates.
  CHECK(first->identity == "spiffe://prod/a");

  std::filesystem::remove(files.roots);
  (*store)->Refresh();
  CHECK((*store)->Current()->identity == "spiffe://prod/b");
}

TEST_CASE("A certificate without an identity is refused") {
  const TempFolder folder;
  const TestAuthority authority("root");
  const TlsFiles files = TlsFilesIn(folder / "", "own");
  WriteTlsFiles(files, authority.Issue({}), authority.root());
  CHECK_THAT(Message(CertificateStore::Create(files).status()),
             Catch::Contains("neither a SPIFFE ID"));
}

TEST_CASE("Certificates are described by who, until when, and how many roots") {
  Certificates some;
  some.identity = "dns:a.example";
  some.root_count = 2;
  some.expires = std::chrono::sys_seconds(std::chrono::seconds(86'400));
  CHECK(Describe(some) == "dns:a.example, valid until 1970-01-02T00:00:00Z, 2 roots");
  some.expires = std::chrono::sys_seconds(std::chrono::seconds(253'402'300'799));
  CHECK(Describe(some) == "dns:a.example, valid until 9999-12-31T23:59:59Z, 2 roots");
}

}  // namespace
}  // namespace refitd
