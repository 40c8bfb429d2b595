// Which users may use the sockets (P9): real processes that changed to another user of this
// machine.
#include <grp.h>
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>

#include "tests/e2e/harness.h"
#include "tests/e2e/require.h"

namespace refitd::e2e {
namespace {

// Whether this process can become another user. A child tries it: that fails without root, or in a
// user namespace (a test sandbox).
bool CanBecomeNobody() {
  const pid_t child = fork();
  if (child == 0) {
    _exit(setgroups(0, nullptr) == 0 && setgid(65534) == 0 && setuid(65534) == 0 ? 0 : 1);
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST_CASE("another user is kept away from the socket, and from leases that are not his") {
  if (!CanBecomeNobody()) {
    WARN("NOT RUN: this process can't become another user (not root, or in a user namespace)");
    return;
  }
  const std::string nobody = "uid=65534";
  {
    Daemon daemon;
    MemberProcess stranger(daemon, "trainer", {nobody});
    // the socket file's mode keeps the stranger from connecting
    REQUIRE_ANSWER(stranger, "attach", "error 14");
  }
  {
    Daemon daemon({"--listen-unix-mode=666"});
    MemberProcess stranger(daemon, "trainer", {nobody});
    const std::string answer = stranger.Do("attach");
    CHECK_THAT(answer, Catch::StartsWith("error 7") && Catch::Contains("65534"));
    MemberProcess engine(daemon, "engine", {nobody});
    CHECK_THAT(engine.Do("attach"), Catch::Contains("65534"));
    CHECK(daemon.Resources().members() == 0);
    RawTrainer friendly(daemon.Connect(), RawTrainer::Hello("g"));
    CHECK(friendly.attached().ok());
  }
  {
    Daemon daemon({"--listen-unix-mode=666", "--allowed-uids=0,65534"});
    MemberProcess owner(daemon, "trainer", {});
    MemberProcess thief(daemon, "trainer", {nobody, "group=other"});
    REQUIRE_ANSWER(owner, "attach", "ok");
    REQUIRE_ANSWER(thief, "attach", "ok");
    const std::string token = owner.Do("token").substr(3);
    REQUIRE_ANSWER(thief, "begin_as " + token + " 1", "error 7");
    CHECK(!daemon.Group("g").has_update());
  }
}

}  // namespace
}  // namespace refitd::e2e
