// The coordinator's end of a link for tests, without the link: it keeps what it is told.
//
// Not thread-safe.
#ifndef REFITD_DAEMON_NODE_SESSION_TEST_UTIL_H_
#define REFITD_DAEMON_NODE_SESSION_TEST_UTIL_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/node/peer_sessions.h"

namespace refitd {

// A hello that has these fields alone.
inline PeerGreeting HelloTo(const std::string& group, const std::string& boot_id = "",
                            uint64_t dial = 0) {
  PeerGreeting hello;
  hello.group = group;
  hello.boot_id = boot_id;
  hello.dial = dial;
  return hello;
}

class KeptSession : public PeerSession {
 public:
  explicit KeptSession(uint64_t id) : id_(id) {}
  uint64_t id() const override { return id_; }
  void Accept(const LinkUp& up) override { accepted = up; }
  absl::Status Queue(PeerCommand command) override {
    commands.push_back(std::move(command));
    return absl::OkStatus();
  }
  void Flush() override {}
  void End(absl::Status status) override { ends.push_back(std::move(status)); }

  std::optional<LinkUp> accepted;
  std::vector<PeerCommand> commands;
  std::vector<absl::Status> ends;

 private:
  const uint64_t id_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_SESSION_TEST_UTIL_H_
