#include "transport/tls/certificates.h"

#include <catch2/catch.hpp>
#include <chrono>
#include <ctime>
#include <fstream>

#include "transport/base/status.h"
#include "transport/base/temp_folder_testing.h"
#include "transport/tls/test_certificates.h"

namespace refitd {
namespace {

constexpr char kTrainer[] = "spiffe://prod/trainer/a";

void Write(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

void RequireRefused(const TlsFiles& files, const std::string& part) {
  const auto loaded = LoadCertificates(files);
  REQUIRE_FALSE(loaded.ok());
  CHECK_THAT(Message(loaded.status()), Catch::Contains(part));
}

TEST_CASE("Files that fit together give the certificate's identity, its end and all roots") {
  const TempFolder folder;
  const TestAuthority first("first");
  const TestAuthority second("second");
  const TlsFiles files = TlsFilesIn(folder / "", "own");
  WriteTlsFiles(files, first.Issue({.uris = {kTrainer}, .names = {"a.example"}}),
                first.root() + second.root());
  const auto loaded = LoadCertificates(files);
  REQUIRE(loaded.ok());
  CHECK((*loaded)->identity == kTrainer);
  CHECK((*loaded)->root_count == 2);
  const auto left = (*loaded)->expires - std::chrono::system_clock::now();
  CHECK(left > std::chrono::minutes(58));
  CHECK(left <= std::chrono::minutes(60));
}

TEST_CASE("Files that do not fit together are refused, and the message names the file") {
  const TempFolder folder;
  const TestAuthority authority("root");
  const TlsFiles files = TlsFilesIn(folder / "", "own");
  const IssuedCertificate good = authority.Issue({.uris = {kTrainer}});
  WriteTlsFiles(files, good, authority.root());
  REQUIRE(LoadCertificates(files).ok());

  Write(files.key, authority.Issue({}).key);
  RequireRefused(files, files.key + ": not the key of the certificate in " + files.certificate);
  Write(files.key, "no key");
  RequireRefused(files, files.key + ": no private key");
  Write(files.key, good.key);
  Write(files.roots, "");
  RequireRefused(files, files.roots + ": no certificate");
  Write(files.roots, authority.root() + "-----BEGIN CERTIFICATE-----\nAAAA\n");
  RequireRefused(files, files.roots + ": no certificate");
  Write(files.roots, std::string(kMaxPemFileBytes + 1, 'a'));
  RequireRefused(files, files.roots + ": more than");
  Write(files.roots, authority.root());
  Write(files.certificate, good.certificate.substr(0, good.certificate.size() / 2));
  RequireRefused(files, files.certificate + ": no certificate");
  CHECK(absl::IsNotFound(LoadCertificates({folder / "none", files.key, files.roots}).status()));
}

TEST_CASE("A key that handshakes would refuse is refused when it is read") {
  const TempFolder folder;
  const TestAuthority authority("root");
  const TlsFiles files = TlsFilesIn(folder / "", "own");
  WriteTlsFiles(files, authority.Issue({.uris = {kTrainer}, .weak_key = true}), authority.root());
  RequireRefused(files, files.certificate + ": OpenSSL does not take it: ");
}

TEST_CASE("A certificate that is not valid now is refused") {
  const TempFolder folder;
  const TestAuthority authority("root");
  const TlsFiles files = TlsFilesIn(folder / "", "own");
  WriteTlsFiles(files, authority.Issue({.from_seconds = -100, .until_seconds = -10}),
                authority.root());
  RequireRefused(files, files.certificate + ": the certificate expired at 20");
  WriteTlsFiles(files, authority.Issue({.from_seconds = 100, .until_seconds = 200}),
                authority.root());
  RequireRefused(files, files.certificate + ": the certificate is not valid before 20");
}

// A certificate without an end has the year 9999 (RFC 5280, 4.1.2.5).
TEST_CASE("The end of a certificate beyond the year 2262 overflowed to a date in the past") {
  const TempFolder folder;
  const TestAuthority authority("root");
  const TlsFiles files = TlsFilesIn(folder / "", "own");
  constexpr long kYear9999 = 253'370'764'800;  // its first second
  const long ahead = kYear9999 - std::time(nullptr);
  WriteTlsFiles(files, authority.Issue({.uris = {kTrainer}, .until_seconds = ahead}),
                authority.root());
  const auto loaded = LoadCertificates(files);
  REQUIRE(loaded.ok());
  const std::chrono::sys_seconds year_9999{std::chrono::seconds(kYear9999)};
  CHECK((*loaded)->expires >= year_9999);
  CHECK((*loaded)->expires < year_9999 + std::chrono::hours(1));
}

// OpenSSL compares such a date with the current time as neither earlier nor later.
TEST_CASE("A certificate whose date is no date was taken as valid") {
  const TempFolder folder;
  const TestAuthority authority("root");
  const TlsFiles files = TlsFilesIn(folder / "", "own");
  WriteTlsFiles(files, authority.Issue({.uris = {kTrainer}, .until_text = "20269999999999Z"}),
                authority.root());
  RequireRefused(files, files.certificate + ": the certificate's dates are malformed");
}

TEST_CASE("All three files are named, or none") {
  const auto check = [](const TlsFiles& files) { return CheckTlsFiles(files, "c", "k", "r"); };
  CHECK(check({}).ok());
  CHECK(check({"a", "b", "c"}).ok());
  CHECK_THAT(Message(check({"a", "", "c"})), Catch::StartsWith("k is empty"));
  CHECK_THAT(Message(check({"a", "b", ""})), Catch::StartsWith("r is empty"));
  CHECK_THAT(Message(check({std::string("a\0b", 3), "b", "c"})), Catch::StartsWith("c has a zero"));
}

TEST_CASE("An identity is the only URI if that is a SPIFFE ID, else the first DNS name") {
  CHECK(IdentityOf({kTrainer}, {"a.example"}) == kTrainer);
  CHECK(IdentityOf({}, {"A.Example", "b.example"}) == "dns:a.example");
  CHECK(IdentityOf({"https://a.example/"}, {"a.example"}) == "dns:a.example");
  CHECK(IdentityOf({}, {}).empty());
  CHECK(IdentityOf({}, {"*.example"}).empty());
  CHECK(IdentityOf({}, {std::string("a.example\0.b", 12)}).empty());
  // A certificate with a SPIFFE ID that is none must not fall back to another name.
  CHECK(IdentityOf({kTrainer, "spiffe://prod/b"}, {"a.example"}).empty());
  CHECK(IdentityOf({"spiffe://prod"}, {"a.example"}).empty());
  CHECK(IdentityOf({"spiffe://prod/"}, {"a.example"}).empty());
  CHECK(IdentityOf({"spiffe:///a"}, {"a.example"}).empty());
  CHECK(IdentityOf({"spiffe://prod/*"}, {"a.example"}).empty());
  CHECK(IdentityOf({"spiffe://prod/a b"}, {}).empty());
  CHECK(IdentityOf({"spiffe://prod/a/../b"}, {"a.example"}).empty());
  CHECK(IdentityOf({"spiffe://prod/a?b"}, {"a.example"}).empty());
  CHECK(IdentityOf({"spiffe://prod/%61"}, {"a.example"}).empty());
  CHECK(IdentityOf({"spiffe://prod/" + std::string(kMaxIdentityBytes, 'a')}, {}).empty());
}

}  // namespace
}  // namespace refitd
