#include "daemon/process/process_stats.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <catch2/catch.hpp>
#include <cstring>
#include <thread>

#include "transport/base/mutex.h"
#include "transport/base/unique_fd.h"

namespace refitd {
namespace {

TEST_CASE("An open descriptor and a running thread are counted") {
  const auto before = ReadProcessStats();
  REQUIRE(before.ok());
  CHECK(before->threads >= 1);
  CHECK(before->descriptors >= 3);
  Mutex mutex;
  mutex.Lock();
  std::thread thread([&] { MutexLock lock(&mutex); });
  UniqueFd fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const auto during = ReadProcessStats();
  mutex.Unlock();
  thread.join();
  REQUIRE(during.ok());
  CHECK(during->threads == before->threads + 1);
  CHECK(during->descriptors == before->descriptors + 1);
}

TEST_CASE("Anonymous memory counts once touched; shared mappings do not") {
  constexpr size_t kBytes = 32 << 20;
  const auto touch = [](int flags) {
    const int64_t before = ReadProcessStats()->anonymous_bytes;
    void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    std::memset(memory, 1, kBytes);
    const int64_t after = ReadProcessStats()->anonymous_bytes;
    munmap(memory, kBytes);
    return after - before;
  };
  CHECK(touch(MAP_PRIVATE) > static_cast<int64_t>(kBytes / 2));
  CHECK(touch(MAP_SHARED) < static_cast<int64_t>(kBytes / 2));
}

}  // namespace
}  // namespace refitd
