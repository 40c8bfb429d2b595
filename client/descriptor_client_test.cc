#include "client/descriptor_client.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <catch2/catch.hpp>
#include <cstring>
#include <string>

#include "client/call.h"
#include "client/descriptor_test_util.h"

namespace refitd::client {
namespace {

constexpr std::chrono::seconds kPatience(20);
constexpr char kToken[] = "0123456789abcdef";

TEST_CASE("a request carries the token and its descriptor, and gets its reply") {
  DescriptorRequest seen;
  bool got_fd = false;
  const DescriptorPeer listener([&](int fd, int) {
    while (ReadRequest(fd, &seen, &got_fd)) {
      DescriptorReply reply;
      reply.region_id = 42;
      Reply(fd, reply);
    }
  });
  DescriptorClient client(listener.path(), kToken);
  const UniqueFd file(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  DescriptorRequest request;
  request.kind = DescriptorRequestKind::kRegisterRegion;
  request.bytes = 4'096;
  const auto answer = client.Ask(request, file.get(), After(kPatience));
  INFO(answer.status());
  REQUIRE(answer.ok());
  CHECK(answer->reply.region_id == 42);
  CHECK_FALSE(answer->fd.valid());
  CHECK(got_fd);
  CHECK(seen.bytes == 4'096);
  CHECK(std::memcmp(seen.token, kToken, sizeof(seen.token)) == 0);
}

TEST_CASE("the daemon's error comes back with its code and words, and the connection goes on") {
  const DescriptorPeer listener([](int fd, int connection) {
    DescriptorRequest request;
    bool got_fd = false;
    for (int i = 0; ReadRequest(fd, &request, &got_fd); ++i) {
      DescriptorReply reply;
      reply.region_id = static_cast<uint64_t>(connection);
      if (i == 0) {
        reply.code = static_cast<uint32_t>(absl::StatusCode::kNotFound);
        std::strcpy(reply.message, "region 5");
      }
      Reply(fd, reply);
    }
  });
  DescriptorClient client(listener.path(), kToken);
  CHECK(client.Ask({}, -1, After(kPatience)).status() ==
        absl::Status(absl::StatusCode::kNotFound, "region 5"));
  const auto second = client.Ask({}, -1, After(kPatience));
  REQUIRE(second.ok());
  CHECK(second->reply.region_id == 0);
}

TEST_CASE("a daemon that does not answer costs the deadline, and its late reply is never taken") {
  const DescriptorPeer listener([](int fd, int connection) {
    DescriptorRequest request;
    bool got_fd = false;
    while (ReadRequest(fd, &request, &got_fd)) {
      DescriptorReply reply;
      reply.region_id = static_cast<uint64_t>(connection);
      if (connection > 0) Reply(fd, reply);
    }
  });
  DescriptorClient client(listener.path(), kToken);
  CHECK(absl::IsDeadlineExceeded(client.Ask({}, -1, After(std::chrono::milliseconds(1))).status()));
  const auto second = client.Ask({}, -1, After(kPatience));
  REQUIRE(second.ok());
  CHECK(second->reply.region_id == 1);
}

TEST_CASE("a reply of the wrong size or magic is refused") {
  const DescriptorPeer listener([](int fd, int connection) {
    DescriptorRequest request;
    bool got_fd = false;
    while (ReadRequest(fd, &request, &got_fd)) {
      DescriptorReply reply;
      reply.magic = 1;
      if (connection == 0) {
        (void)::send(fd, &reply, 10, MSG_NOSIGNAL);
      } else {
        Reply(fd, reply);
      }
    }
  });
  DescriptorClient client(listener.path(), kToken);
  CHECK(absl::IsInternal(client.Ask({}, -1, After(kPatience)).status()));
  CHECK(absl::IsInternal(client.Ask({}, -1, After(kPatience)).status()));
}

TEST_CASE("a socket that is not there is named") {
  DescriptorClient client("/nonexistent/descriptors.sock", kToken);
  const absl::Status status = client.Ask({}, -1, After(kPatience)).status();
  CHECK(absl::IsNotFound(status));
  CHECK(std::string(status.message()).find("/nonexistent/descriptors.sock") != std::string::npos);
}

TEST_CASE("text is made valid UTF-8 and cut at a character") {
  CHECK(CleanText("plain", 10) == "plain");
  CHECK(CleanText("plain", 4) == "...n");
  CHECK(CleanText("\xC3\xA9\xC3\xA9\xC3\xA9", 5) == "...\xC3\xA9");
  CHECK(CleanText("a\xFF\xC3", 10) == "a??");
  CHECK(CleanText("\xED\xA0\x80", 10) == "???");
  CHECK(CleanText("\xC0\x80", 10) == "??");
}

}  // namespace
}  // namespace refitd::client
