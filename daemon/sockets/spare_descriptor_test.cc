#include "daemon/sockets/spare_descriptor.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <optional>
#include <vector>

#include "catch2/catch.hpp"
#include "daemon/test_util.h"
#include "transport/base/temp_folder_testing.h"

namespace refitd {
namespace {

// A socket that listens, and a process whose descriptors are all taken while Exhausted lives.
class Exhausted {
 public:
  Exhausted() {
    REQUIRE(getrlimit(RLIMIT_NOFILE, &before_) == 0);
    const rlimit tight{.rlim_cur = 64, .rlim_max = before_.rlim_max};
    REQUIRE(setrlimit(RLIMIT_NOFILE, &tight) == 0);
    for (UniqueFd next = Open(); next.valid(); next = Open()) filler_.push_back(std::move(next));
  }
  ~Exhausted() {
    filler_.clear();
    setrlimit(RLIMIT_NOFILE, &before_);
  }
  static UniqueFd Open() { return UniqueFd(open("/dev/null", O_RDONLY | O_CLOEXEC)); }

 private:
  rlimit before_{};
  std::vector<UniqueFd> filler_;
};

struct Listening {
  Listening() {
    REQUIRE(socket.valid());
    REQUIRE(bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
    REQUIRE(listen(socket.get(), 8) == 0);
  }
  TempFolder folder;
  sockaddr_un address = UnixAddress(folder.path() + "/socket");
  UniqueFd socket{::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
};

using Outcome = SpareDescriptor::Outcome;

TEST_CASE("without a waiting connection the reserve is taken back") {
  const Listening listening;
  SpareDescriptor spare("test");
  REQUIRE(spare.valid());
  int refused = 0;
  int accepted = 0;
  int error = 0;
  Outcome outcome{};
  bool kept = false;
  {
    const Exhausted exhausted;
    accepted = accept4(listening.socket.get(), nullptr, nullptr, SOCK_CLOEXEC);
    error = errno;
    outcome = spare.Shed(listening.socket.get(), [&](const UniqueFd&) { ++refused; });
    kept = spare.valid() && !Exhausted::Open().valid();
  }
  CHECK(accepted < 0);
  CHECK(error == EMFILE);  // though no connection waits
  CHECK(outcome == Outcome::kNoneWaits);
  CHECK(refused == 0);
  CHECK(kept);
}

TEST_CASE("a waiting connection is refused with the reserve, which is taken back") {
  const Listening listening;
  SpareDescriptor spare("test");
  const UniqueFd client(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  Outcome outcome{};
  bool kept = false;
  int connected = -1;
  {
    const Exhausted exhausted;
    connected = connect(client.get(), reinterpret_cast<const sockaddr*>(&listening.address),
                        sizeof(listening.address));
    outcome = spare.Shed(listening.socket.get(), [](const UniqueFd& waiting) {
      [[maybe_unused]] const ssize_t sent = send(waiting.get(), "no", 2, MSG_NOSIGNAL);
    });
    kept = spare.valid() && !Exhausted::Open().valid();
  }
  CHECK(connected == 0);
  CHECK(outcome == Outcome::kRefused);
  CHECK(kept);
  char text[8];
  CHECK(recv(client.get(), text, sizeof(text), 0) == 2);
  CHECK(recv(client.get(), text, sizeof(text), 0) == 0);
}

TEST_CASE("a reserve that could not be taken is restored once a descriptor is free") {
  bool taken = true;
  std::optional<SpareDescriptor> spare;
  {
    const Exhausted exhausted;
    spare.emplace("test");
    spare->Restore();
    taken = spare->valid();
  }
  CHECK(!taken);
  spare->Restore();
  CHECK(spare->valid());
}

}  // namespace
}  // namespace refitd
