// Tar archives (POSIX ustar) of small files.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_REFITCTL_TAR_H_
#define REFITD_DAEMON_REFITCTL_TAR_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace refitd {

inline constexpr size_t kMaxTarNameBytes = 99;

class Tar {
 public:
  // `seconds`: the time that the files get, since 1970.
  explicit Tar(int64_t seconds) : seconds_(seconds) {}
  // `name`: a path without "..", of at most kMaxTarNameBytes. Files get the mode 0600.
  void Add(std::string_view name, std::string_view content);
  // The archive with its end; nothing may be added afterwards.
  std::string Finish() &&;

 private:
  const int64_t seconds_;
  std::string bytes_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_REFITCTL_TAR_H_
