#include "daemon/process/process_stats.h"

#include <dirent.h>

#include <cerrno>
#include <charconv>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>

#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr int64_t kKibibyte = 1024;

// Parses "Threads:\t12" to 12. False: another line.
bool NumberAfter(std::string_view key, std::string_view line, int64_t* number) {
  if (!line.starts_with(key)) return false;
  line.remove_prefix(key.size());
  line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
  return std::from_chars(line.data(), line.data() + line.size(), *number).ec == std::errc();
}

absl::StatusOr<int64_t> CountDescriptors() {
  const auto close = [](DIR* dir) { closedir(dir); };
  const std::unique_ptr<DIR, decltype(close)> folder(opendir("/proc/self/fd"), close);
  if (folder == nullptr) return ErrnoError(errno, "/proc/self/fd");
  int64_t count = 0;
  while (const dirent* entry = readdir(folder.get())) {
    if (entry->d_name[0] != '.') ++count;
  }
  return count - 1;  // the folder itself
}

}  // namespace

absl::StatusOr<ProcessStats> ReadProcessStats() {
  ProcessStats stats;
  bool threads = false;
  bool resident = false;
  bool anonymous = false;
  int64_t resident_kib = 0;
  int64_t anonymous_kib = 0;
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    threads |= NumberAfter("Threads:", line, &stats.threads);
    resident |= NumberAfter("VmRSS:", line, &resident_kib);
    anonymous |= NumberAfter("RssAnon:", line, &anonymous_kib);
  }
  if (!threads || !resident || !anonymous) {
    return Error(absl::StatusCode::kUnavailable,
                 "/proc/self/status lacks Threads, VmRSS or RssAnon");
  }
  stats.resident_bytes = resident_kib * kKibibyte;
  stats.anonymous_bytes = anonymous_kib * kKibibyte;
  REFITD_ASSIGN_OR_RETURN(stats.descriptors, CountDescriptors());
  return stats;
}

}  // namespace refitd
