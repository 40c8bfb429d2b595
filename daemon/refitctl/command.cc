#include "daemon/refitctl/command.h"

#include <algorithm>
#include <cstdio>

#include "daemon/refitctl/format.h"
#include "transport/base/status.h"
#include "transport/base/utf8.h"

namespace refitd::refitctl {
namespace {

void PrintError(std::string message) {
  std::replace(message.begin(), message.end(), '\n', ' ');
  PrintLine("refitctl: " + message);
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

void Print(const std::string& text) { PrintRaw(EscapedLines(text)); }

void PrintRaw(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

void PrintLine(const std::string& line) { fmt::print(stderr, "{}\n", Escaped(line)); }

}  // namespace refitd::refitctl
