// Any sequence of connections that come, bring bytes, are proven, found to be unknown, swept and
// closed, and whose numbers are used again: a connection reads what a model of the budgets says,
// and no more (P9, P10). The input is a list of two bytes each: what happens to which connection,
// and how much.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "daemon/sockets/connection_guard.h"
#include "transport/base/status.h"
#include "transport/base/unique_fd.h"

namespace refitd {
namespace {

constexpr size_t kSlots = 8;
constexpr int64_t kPiece = 512;  // a step brings up to 255 of these

// A connection, and what may still be read of it.
struct Slot {
  UniqueFd server;
  UniqueFd client;
  std::optional<int64_t> left;  // nullopt: any number
  bool spent = false;
  bool watched = false;  // the guard knows of it

  std::string peer() const { return "fd:" + std::to_string(server.get()); }
  void Open() {
    std::array<int, 2> ends{};
    REFITD_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends.data()) ==
                 0);
    server = UniqueFd(ends[0]);
    client = UniqueFd(ends[1]);
    left.reset();
    spent = watched = false;
  }
  void Close() {
    if (server.valid()) shutdown(server.get(), SHUT_RDWR);  // as gRPC does
    server.Reset();
    client.Reset();
  }
};

class World {
 public:
  void Step(uint8_t what, uint8_t how_much) {
    Slot& slot = slots_[what % kSlots];
    switch (what / kSlots % 8) {
      case 0:
        return Come(&slot);
      case 1:
        slot.Close();
        return;
      case 2:
      case 3:
        return Bring(&slot, kPiece * how_much);
      case 4:
        return Prove(&slot);
      case 5:
        return FindUnknown(&slot);
      case 6:
        return Sweep(how_much % 2 == 1);
      case 7:  // a name of any kind is nobody's
        guard_.Prove("ipv6:" + std::string(how_much % 5, '%') + std::string(1, how_much));
        guard_.Unknown(std::string(1, how_much) + ":");
        return;
    }
  }

 private:
  void Come(Slot* slot) {
    slot->Close();
    slot->Open();
    REFITD_CHECK(guard_.Watch(slot->server.get(), "uid:1"));
    slot->left = kUnprovenBytes;
    slot->watched = true;
  }
  void Prove(Slot* slot) {
    if (!slot->server.valid()) return;
    guard_.Prove(slot->peer());
    if (!slot->spent) slot->left.reset();
    slot->watched = false;
  }
  void FindUnknown(Slot* slot) {
    if (!slot->server.valid()) return;
    guard_.Unknown(slot->peer());
    if (slot->watched && slot->left.has_value()) slot->left = std::min(*slot->left, kUnknownBytes);
  }
  void Sweep(bool late) {
    guard_.Sweep(std::chrono::steady_clock::now() + (late ? 2 * kUnprovenLimit : Duration(0)));
    for (Slot& slot : slots_) {
      if (!slot.watched || (!late && !slot.spent)) continue;
      slot.spent = true;
      slot.watched = false;
    }
  }
  void Bring(Slot* slot, int64_t bytes) {
    if (!slot->server.valid() || bytes == 0) return;
    if (slot->left.has_value() && !slot->spent) {
      slot->spent = *slot->left <= bytes;
      *slot->left -= bytes;
    }
    REFITD_CHECK(Passes(*slot, static_cast<size_t>(bytes)) == !slot->spent);
  }
  bool Passes(const Slot& slot, size_t bytes) {
    if (send(slot.client.get(), buffer_.data(), bytes, MSG_NOSIGNAL) !=
        static_cast<ssize_t>(bytes)) {
      return false;
    }
    iovec part{buffer_.data(), bytes};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    const ssize_t n = recvmsg(slot.server.get(), &message, 0);
    REFITD_CHECK(n == static_cast<ssize_t>(bytes) || (n < 0 && errno == ECONNRESET));
    return n >= 0;
  }

  ConnectionGuard guard_;
  std::array<Slot, kSlots> slots_;
  std::string buffer_ = std::string(kPiece * 256, 'x');
};

}  // namespace
}  // namespace refitd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  refitd::World world;
  for (size_t i = 0; i + 1 < size && i < 200; i += 2) world.Step(data[i], data[i + 1]);
  return 0;
}
