#include "transport/host/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdlib>
#include <cstring>

namespace refitd {
namespace {

using absl::StatusCode;

// Whether this process has a mapping at that address.
bool Mapped(const void* address) {
  unsigned char residency;
  const auto page = reinterpret_cast<uintptr_t>(address) / 4096 * 4096;
  return mincore(reinterpret_cast<void*>(page), 1, &residency) == 0;
}

UniqueFd Unsealed(int64_t bytes) {
  UniqueFd fd(memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(ftruncate(fd.get(), bytes) == 0);
  return fd;
}

StatusCode MapCode(const UniqueFd& fd, int64_t bytes, Access access = Access::kReadOnly) {
  return HostRegion::Map(fd, bytes, access, false).status().code();
}

TEST_CASE("Two mappings of a sealed memfd show the same bytes") {
  auto fd = CreateSealedMemfd("test", 10'000);
  REQUIRE(fd.ok());
  auto writer = HostRegion::Map(*fd, 10'000, Access::kReadWrite, true);
  auto reader = HostRegion::Map(*fd, 9'000, Access::kReadOnly, false);
  REQUIRE(writer.ok());
  REQUIRE(reader.ok());
  CHECK((*writer)->bytes() == 10'000);
  CHECK((*reader)->bytes() == 9'000);
  CHECK((*reader)->access() == Access::kReadOnly);
  std::memcpy((*writer)->data() + 8'000, "weights", 8);
  CHECK(std::string((*reader)->data() + 8'000) == "weights");
}

TEST_CASE("A created memfd can neither shrink nor grow nor be sealed further and closes on exec") {
  auto fd = CreateSealedMemfd("test", 8192);
  REQUIRE(fd.ok());
  CHECK(ftruncate(fd->get(), 4096) != 0);
  CHECK(ftruncate(fd->get(), 16'384) != 0);
  CHECK(fcntl(fd->get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE) != 0);
  CHECK((fcntl(fd->get(), F_GETFD) & FD_CLOEXEC) != 0);
}

TEST_CASE("Absurd sizes are refused before anything is allocated") {
  for (const int64_t bytes : {int64_t{0}, int64_t{-1}, kMaxRegionBytes + 1, INT64_MAX, INT64_MIN}) {
    INFO(bytes);
    const auto fd = CreateSealedMemfd("test", bytes);
    CHECK(fd.status().code() == StatusCode::kInvalidArgument);
    CHECK(std::string(fd.status().message()).find(std::to_string(bytes)) != std::string::npos);
    auto good = CreateSealedMemfd("test", 4096);
    REQUIRE(good.ok());
    CHECK(MapCode(*good, bytes) == StatusCode::kInvalidArgument);
  }
  CHECK(CreateSealedMemfd(std::string(300, 'n'), 4096).status().code() ==
        StatusCode::kInvalidArgument);
}

TEST_CASE("A memfd that is smaller than the region claims is refused, with both sizes") {
  auto fd = CreateSealedMemfd("test", 4096);
  REQUIRE(fd.ok());
  const auto region = HostRegion::Map(*fd, 4097, Access::kReadOnly, false);
  REQUIRE(region.status().code() == StatusCode::kInvalidArgument);
  const std::string message(region.status().message());
  CHECK(message.find("4096") != std::string::npos);
  CHECK(message.find("4097") != std::string::npos);
}

TEST_CASE("A memfd that may still shrink is refused") {
  const UniqueFd fd = Unsealed(4096);
  CHECK(MapCode(fd, 4096) == StatusCode::kInvalidArgument);
  REQUIRE(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_GROW) == 0);
  CHECK(MapCode(fd, 4096) == StatusCode::kInvalidArgument);
  REQUIRE(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  CHECK(MapCode(fd, 4096) == StatusCode::kOk);
}

TEST_CASE("Descriptors that are no memfd are refused") {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const UniqueFd read_end(ends[0]);
  const UniqueFd write_end(ends[1]);
  CHECK(MapCode(read_end, 4096) == StatusCode::kInvalidArgument);
  CHECK(MapCode(write_end, 4096) == StatusCode::kInvalidArgument);

  const UniqueFd socket_end(socket(AF_UNIX, SOCK_STREAM, 0));
  CHECK(MapCode(socket_end, 4096) == StatusCode::kInvalidArgument);

  const char* const directory = std::getenv("TEST_TMPDIR");
  std::string path = std::string(directory != nullptr ? directory : "/tmp") + "/regionXXXXXX";
  const UniqueFd file(mkstemp(path.data()));
  REQUIRE(file.valid());
  REQUIRE(unlink(path.c_str()) == 0);
  REQUIRE(ftruncate(file.get(), 4096) == 0);
  CHECK(MapCode(file, 4096) == StatusCode::kInvalidArgument);

  CHECK_FALSE(HostRegion::Map(UniqueFd(), 4096, Access::kReadOnly, false).ok());
}

TEST_CASE("A read-only duplicate can be read but not mapped writable") {
  auto fd = CreateSealedMemfd("test", 4096);
  REQUIRE(fd.ok());
  auto duplicate = ReadOnlyDuplicate(*fd);
  REQUIRE(duplicate.ok());
  CHECK((fcntl(duplicate->get(), F_GETFD) & FD_CLOEXEC) != 0);
  CHECK(MapCode(*duplicate, 4096, Access::kReadWrite) == StatusCode::kPermissionDenied);
  CHECK(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, duplicate->get(), 0) == MAP_FAILED);
  auto writer = HostRegion::Map(*fd, 4096, Access::kReadWrite, false);
  auto reader = HostRegion::Map(*duplicate, 4096, Access::kReadOnly, true);
  REQUIRE(writer.ok());
  REQUIRE(reader.ok());
  (*writer)->data()[17] = 'x';
  CHECK((*reader)->data()[17] == 'x');
}

TEST_CASE("A memfd sealed against writes is refused for writing") {
  const UniqueFd fd = Unsealed(4096);
  REQUIRE(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_WRITE) == 0);
  CHECK(MapCode(fd, 4096, Access::kReadWrite) == StatusCode::kPermissionDenied);
}

TEST_CASE("A region outlives its descriptors and ends with its last owner") {
  auto fd = CreateSealedMemfd("test", 4096);
  REQUIRE(fd.ok());
  auto region = HostRegion::Map(*fd, 4096, Access::kReadWrite, false);
  REQUIRE(region.ok());
  fd->Reset();
  std::shared_ptr<HostRegion> last = *region;
  region->reset();
  last->data()[0] = 1;
  const char* const data = last->data();
  CHECK(Mapped(data));
  last.reset();
  CHECK_FALSE(Mapped(data));
}

}  // namespace
}  // namespace refitd
