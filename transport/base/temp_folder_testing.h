// A folder for tests.
#ifndef REFITD_TRANSPORT_BASE_TEMP_FOLDER_TESTING_H_
#define REFITD_TRANSPORT_BASE_TEMP_FOLDER_TESTING_H_

#include <stdlib.h>

#include <filesystem>
#include <string>

#include "transport/base/status.h"

namespace refitd {

// A new folder under /tmp (since socket paths are short), removed at the end.
class TempFolder {
 public:
  TempFolder() {
    char name[] = "/tmp/refitd_test.XXXXXX";
    REFITD_CHECK(mkdtemp(name) != nullptr);
    path_ = name;
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_BASE_TEMP_FOLDER_TESTING_H_
