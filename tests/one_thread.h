// Tests that start no thread (tests/one_thread.bzl). ThreadSanitizer would find nothing in them, so
// that .ci/run leaves them out under it. Here such a test fails once it starts a thread after all.
#ifndef REFITD_TESTS_ONE_THREAD_H_
#define REFITD_TESTS_ONE_THREAD_H_

#include <sys/single_threaded.h>

#include <cstdio>
#include <string_view>

namespace refitd {

inline constexpr std::string_view kOneThread = "--one-thread";

// Takes the flag, which comes first if it is there, out of the arguments.
inline bool TakeOneThread(int* argc, char** argv) {
  if (*argc < 2 || argv[1] != kOneThread) return false;
  for (int i = 1; i < *argc; ++i) argv[i] = argv[i + 1];  // with the null at the end
  --*argc;
  return true;
}

// The test's exit status, which is `status` unless the test was not to start a thread and did.
inline int OneThread(bool one_thread, int status) {
  // glibc sets this before the first thread of the process begins, and never again.
  if (!one_thread || __libc_single_threaded != 0) return status;
  std::fprintf(stderr, "this test starts a thread: take it out of tests/one_thread.bzl\n");
  return 1;
}

}  // namespace refitd

#endif  // REFITD_TESTS_ONE_THREAD_H_
