#include "daemon/refitctl/tar.h"

#include <fmt/format.h>

#include <numeric>
#include <utility>

#include "transport/base/status.h"

namespace refitd {
namespace {

// The format of a header: POSIX.1-2017, pax, "ustar Interchange Format".
constexpr size_t kBlockBytes = 512;
constexpr size_t kChecksumAt = 148;
constexpr size_t kChecksumBytes = 8;

void Put(std::string* header, size_t at, std::string_view text) {
  text.copy(header->data() + at, text.size());
}

std::string HeaderOf(std::string_view name, size_t bytes, int64_t seconds) {
  std::string header(kBlockBytes, '\0');
  Put(&header, 0, name);
  Put(&header, 100, "0000600");  // mode
  Put(&header, 108, "0000000");  // user
  Put(&header, 116, "0000000");  // group
  Put(&header, 124, fmt::format("{:011o}", bytes));
  Put(&header, 136, fmt::format("{:011o}", seconds));
  Put(&header, 156, "0");  // a regular file
  Put(&header, 257, std::string_view("ustar\00000", 8));
  // The sum counts its own field as blanks.
  Put(&header, kChecksumAt, std::string(kChecksumBytes, ' '));
  const auto add = [](uint32_t sum, char byte) { return sum + static_cast<unsigned char>(byte); };
  const uint32_t sum = std::accumulate(header.begin(), header.end(), uint32_t{0}, add);
  Put(&header, kChecksumAt, fmt::format("{:06o}", sum));
  header[kChecksumAt + 6] = '\0';
  return header;
}

}  // namespace

void Tar::Add(std::string_view name, std::string_view content) {
  REFITD_CHECK(!name.empty() && name.size() <= kMaxTarNameBytes);
  bytes_ += HeaderOf(name, content.size(), seconds_);
  bytes_ += content;
  bytes_.resize((bytes_.size() + kBlockBytes - 1) / kBlockBytes * kBlockBytes);
}

std::string Tar::Finish() && {
  bytes_.resize(bytes_.size() + 2 * kBlockBytes);
  return std::move(bytes_);
}

}  // namespace refitd
