// Any bytes as the PEM files of certificates. The first byte chooses: 'f', three files, separated
// by zero bytes; 'i', one certificate whose identity is asked for. Files that are accepted serve
// TLS, and name at most one identity, which is well-formed (P9, P10).
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "transport/base/status.h"
#include "transport/base/temp_folder.h"
#include "transport/base/unique_fd.h"
#include "transport/sockets/tls_context.h"
#include "transport/tls/certificates.h"

namespace refitd {
namespace {

void CheckIdentity(const std::string& identity) {
  if (identity.empty()) return;
  const bool spiffe = identity.starts_with(kSpiffeScheme);
  REFITD_CHECK(spiffe || identity.starts_with(kDnsScheme));
  REFITD_CHECK(!spiffe || identity.size() <= kMaxIdentityBytes);
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

void FuzzFiles(std::string_view rest) {
  static const TempFolder folder;
  const TlsFiles files{folder.path() + "/crt", folder.path() + "/key", folder.path() + "/roots"};
  for (const std::string& path : {files.certificate, files.key, files.roots}) {
    Write(path, Next(&rest));
  }
  const auto now = std::chrono::floor<std::chrono::seconds>(std::chrono::system_clock::now());
  const auto loaded = LoadCertificates(files);
  if (!loaded.ok()) {
    REFITD_CHECK(!loaded.status().message().empty());
    return;
  }
  const Certificates& taken = **loaded;
  CheckIdentity(taken.identity);
  REFITD_CHECK(taken.identity == IdentityOfPem(taken.certificate));
  REFITD_CHECK(taken.root_count > 0);
  REFITD_CHECK(taken.expires >= now);
  std::array<int, 2> ends{};
  REFITD_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) == 0);
  const UniqueFd here(ends[0]);
  const UniqueFd there(ends[1]);
  TlsContexts contexts([&loaded] { return *loaded; });
  REFITD_CHECK(contexts.Accept(here.get()).ok() && contexts.Dial(there.get()).ok());
}

}  // namespace
}  // namespace refitd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] == 'f') refitd::FuzzFiles(rest);
  if (data[0] == 'i') refitd::CheckIdentity(refitd::IdentityOfPem(rest));
  return 0;
}
