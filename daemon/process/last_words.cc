#include "daemon/process/last_words.h"

#include <execinfo.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "daemon/process/log.h"

namespace refitd {
namespace {

constexpr int kMaxFrames = 64;

thread_local const char* at_work = nullptr;

// The current exception as text, which it keeps alive; null: there is none.
const char* WhatOf(const std::exception_ptr& thrown) {
  if (thrown == nullptr) return nullptr;
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "something that is no std::exception";
  }
}

// Has SIGALRM end the process after kLastWordsSeconds, in case writing the last words hangs: a
// signal with its default action needs no thread to handle it.
void EndSoon() {
  signal(SIGALRM, SIG_DFL);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGALRM);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  alarm(kLastWordsSeconds);
}

[[noreturn]] void SayAndAbort() {
  EndSoon();
  const std::exception_ptr thrown = std::current_exception();
  const char* const what = WhatOf(thrown);
  // Takes no memory, of which there may be none.
  std::array<char, 512> line{};
  const int size =
      std::snprintf(line.data(), line.size(), "refitd ends: %s, thrown in %s; from\n",
                    what == nullptr ? "std::terminate" : what, at_work == nullptr ? "?" : at_work);
  const size_t length =
      static_cast<size_t>(size) < line.size() ? static_cast<size_t>(size) : line.size() - 1;
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), length);
  std::array<void*, kMaxFrames> frames{};
  backtrace_symbols_fd(frames.data(), backtrace(frames.data(), kMaxFrames), STDERR_FILENO);
  FlushLog();
  std::abort();
}

}  // namespace

void InstallLastWords() {
  // The first call loads a library, for which there may be no memory later.
  std::array<void*, 1> frame{};
  backtrace(frame.data(), 1);
  std::set_terminate(SayAndAbort);
}

void NoteWork(const char* what) { at_work = what; }

}  // namespace refitd
