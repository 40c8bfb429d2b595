#include "daemon/refitctl/command.h"

#include <algorithm>
#include <cstdio>

#include "transport/base/status.h"

namespace refitd::refitctl {
namespace {

void PrintError(std::string message) {
  std::replace(message.begin(), message.end(), '\n', ' ');
  fmt::print(stderr, "refitctl: {}\n", message);
}

}  // namespace

int Fail(const absl::Status& status) {
  PrintError(Message(status));
  return ExitCodeOf(status);
}

int UsageError(const std::string& message) {
  PrintError(message);
  return kExitUsage;
}

void Print(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

}  // namespace refitd::refitctl
