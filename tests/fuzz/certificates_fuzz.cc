// Any bytes as certificates in PEM. The first byte chooses: 'f', the texts of three files,
// separated by zero bytes; 'i', one certificate whose identity is asked for. Texts that are
// accepted serve TLS, and name at most one identity, which is well-formed (P9, P10).
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "tests/fuzz/one_in.h"
#include "transport/base/status.h"
#include "transport/base/temp_folder_testing.h"
#include "transport/base/unique_fd.h"
#include "transport/sockets/tls_context.h"
#include "transport/tls/certificates.h"

namespace refitd {
namespace {

void CheckIdentity(const std::string& identity) {
  if (identity.empty()) return;
  const bool spiffe = identity.starts_with(kSpiffeScheme);
  REFITD_CHECK(spiffe || identity.starts_with(kDnsScheme));
  REFITD_CHECK(!spiffe || IsSpiffeId(identity));
  REFITD_CHECK(identity.find('\0') == std::string::npos);
}

void Write(const std::string& path, std::string_view text) {
  const UniqueFd file(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  REFITD_CHECK(file.valid());
  REFITD_CHECK(write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()));
}

std::string_view Next(std::string_view* rest) {
  const size_t end = std::min(rest->find('\0'), rest->size());
  const std::string_view next = rest->substr(0, end);
  rest->remove_prefix(std::min(end + 1, rest->size()));
  return next;
}

// The same from files.
void CheckFiles(const std::array<std::string, 3>& texts,
                const absl::StatusOr<std::shared_ptr<const Certificates>>& parsed) {
  static const TempFolder folder;
  const TlsFiles files{folder.path() + "/crt", folder.path() + "/key", folder.path() + "/roots"};
  Write(files.certificate, texts[0]);
  Write(files.key, texts[1]);
  Write(files.roots, texts[2]);
  const auto loaded = LoadCertificates(files);
  REFITD_CHECK(loaded.status().code() == parsed.status().code());
  REFITD_CHECK(!loaded.ok() || **loaded == **parsed);
}

void FuzzTexts(std::string_view in) {
  std::string_view rest = in;
  std::array<std::string, 3> texts;
  for (std::string& text : texts) text = Next(&rest);
  const auto now = std::chrono::floor<std::chrono::seconds>(std::chrono::system_clock::now());
  const auto parsed = ParseCertificates(texts[0], texts[1], texts[2], {"crt", "key", "roots"});
  if (OneIn(64, in)) CheckFiles(texts, parsed);
  if (!parsed.ok()) {
    REFITD_CHECK(!parsed.status().message().empty());
    return;
  }
  const Certificates& taken = **parsed;
  CheckIdentity(taken.identity);
  REFITD_CHECK(taken.identity == IdentityOfPem(taken.certificate));
  REFITD_CHECK(taken.root_count > 0);
  REFITD_CHECK(taken.expires >= now);
  std::array<int, 2> ends{};
  REFITD_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) == 0);
  const UniqueFd here(ends[0]);
  const UniqueFd there(ends[1]);
  TlsContexts contexts([&parsed] { return *parsed; });
  REFITD_CHECK(contexts.Accept(here.get()).ok() && contexts.Dial(there.get()).ok());
}

}  // namespace
}  // namespace refitd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] == 'f') refitd::FuzzTexts(rest);
  if (data[0] == 'i') refitd::CheckIdentity(refitd::IdentityOfPem(rest));
  return 0;
}
