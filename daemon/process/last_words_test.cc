#include "daemon/process/last_words.h"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <catch2/catch.hpp>
#include <csignal>
#include <new>
#include <string>

#include "transport/base/unique_fd.h"

namespace refitd {
namespace {

void GetNoMemory() { throw std::bad_alloc(); }
// Handlers of calls are noexcept.
void Handle(void (*work)()) noexcept { work(); }

// What a child says on stderr while it ends by a failing allocation.
std::string WordsOfChild() {
  std::array<int, 2> ends{};
  REQUIRE(pipe(ends.data()) == 0);
  const UniqueFd reading(ends[0]);
  UniqueFd writing(ends[1]);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    dup2(writing.get(), STDERR_FILENO);
    std::signal(SIGABRT, SIG_DFL);
    InstallLastWords();
    NoteWork("refitd.v1.Trainer/PushBucket");
    Handle(GetNoMemory);
    _exit(0);
  }
  writing.Reset();
  std::string words;
  std::array<char, 4096> piece{};
  for (ssize_t n = 0; (n = read(reading.get(), piece.data(), piece.size())) > 0;) {
    words.append(piece.data(), static_cast<size_t>(n));
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status));
  return words;
}

TEST_CASE("A failed allocation ended the process without a word of what had asked") {
  const std::string words = WordsOfChild();
  CHECK_THAT(words, Catch::Contains("refitd ends: std::bad_alloc") &&
                        Catch::Contains("thrown in refitd.v1.Trainer/PushBucket"));
}

}  // namespace
}  // namespace refitd
