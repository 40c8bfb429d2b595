// What a connection brings is counted right, whatever it is and in whatever pieces it comes: the
// scanner is compared with a parser that has all bytes at once. Connections that come, bring bytes,
// are proven, refused, swept and closed stay within the limits of the ledger, by a model of its
// budgets (P9, P10). All in memory.
//
// The first byte of an input chooses: bytes of one connection, or a list of two bytes each (what
// happens to which connection, and how much).
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "daemon/sockets/connection_ledger.h"
#include "daemon/sockets/frame_scanner.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

uint32_t Big(std::string_view bytes) {
  uint32_t value = 0;
  for (const char c : bytes) value = value << 8 | static_cast<uint8_t>(c);
  return value;
}

// What a connection has brought, by a parser that sees all of it.
struct Whole {
  explicit Whole(std::string_view bytes) {
    for (bytes.remove_prefix(std::min<size_t>(24, bytes.size())); bytes.size() >= 9;) {
      const uint8_t type = static_cast<uint8_t>(bytes[3]);
      const uint8_t flags = static_cast<uint8_t>(bytes[4]);
      const size_t length = Big(bytes.substr(0, 3));
      const std::string_view payload = bytes.substr(9, length);
      const bool complete = payload.size() == length;
      const uint32_t stream = Big(bytes.substr(5, 4));
      if (type == 1) ++opened;
      if (type == 1 || type == 9) {
        headers += 9 + static_cast<int64_t>(payload.size());
        if (complete && (flags & 4) != 0) headers = 0;
      }
      if (type == 0) Add(&data[stream], payload);
      if (complete && (type == 3 || (type == 0 && (flags & 1) != 0))) data.erase(stream);
      if (complete && type == 4 && (flags & 1) != 0) confirmed = true;
      bytes.remove_prefix(9 + payload.size());
    }
  }
  // Keeps of a stream what is no whole message.
  static void Add(std::string* rest, std::string_view more) {
    rest->append(more);
    while (rest->size() >= 5 && rest->size() - 5 >= Big(rest->substr(1, 4))) {
      rest->erase(0, size_t{5} + Big(rest->substr(1, 4)));
    }
  }
  int64_t message_bytes() const {
    int64_t sum = 0;
    for (const auto& [stream, rest] : data) {
      if (!rest.empty()) sum += static_cast<int64_t>(rest.size()) + kMessageOverhead;
    }
    return sum;
  }

  int64_t opened = 0;
  int64_t headers = 0;
  bool confirmed = false;
  std::map<uint32_t, std::string> data;
};

void FuzzBytes(std::string_view bytes) {
  const size_t piece = bytes.empty() ? 1 : 1 + static_cast<uint8_t>(bytes.front()) % 40;
  FrameScanner scanner;
  const TimePoint now{std::chrono::seconds(1)};
  for (size_t at = 0; at < bytes.size(); at += piece) scanner.Read(bytes.substr(at, piece), now);
  const Whole whole(bytes);
  REFITD_CHECK(scanner.opened() == whole.opened);
  REFITD_CHECK(scanner.header_bytes() == whole.headers);
  REFITD_CHECK(scanner.confirmed() == whole.confirmed);
  REFITD_CHECK(scanner.message_bytes() == whole.message_bytes());
  const bool unfinished = whole.headers > 0 || whole.message_bytes() > 0;
  REFITD_CHECK(scanner.oldest().has_value() == unfinished);
}

// The preface, and the confirmation of the server's settings.
constexpr std::string_view kBeginning("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\1\0\0\0\0", 33);
constexpr size_t kSlots = 8;
constexpr size_t kMaxSteps = 64;
constexpr int64_t kPiece = 512;  // a step brings up to 255 of these

// A connection, and what may still be read of it.
struct Slot {
  ConnectionLedger::Id id = 0;  // 0: closed
  int64_t left = 0;
  int64_t streams = 0;  // unexplained
  bool proven = false;
  bool ended = false;
};

class World {
 public:
  void Step(uint8_t what, uint8_t how_much) {
    Slot& slot = slots_[what % kSlots];
    switch (what / kSlots % 8) {
      case 0:
        return Come(&slot);
      case 1:
        ledger_.Close(slot.id);
        slot = Slot();
        return;
      case 2:
        return Bring(&slot, kPiece * how_much);
      case 3:
        return OpenStreams(&slot, how_much);
      case 4:
        return Allow(&slot);
      case 5:
        return Refuse(&slot, how_much % 2 == 1);
      case 6:
        return Sweep(how_much % 4 == 1);
      case 7:  // of nobody
        ledger_.Allowed(1'000'000 + how_much, "uid:1");
        ledger_.Refused(0, false);
        REFITD_CHECK(!ledger_.Take(1'000'000, 1) && !ledger_.TakeClear(0, "x"));
        return;
    }
  }
  void Check() {
    size_t unproven = 0;
    size_t open = 0;
    for (const Slot& slot : slots_) {
      open += slot.id != 0 ? 1 : 0;
      unproven += slot.id != 0 && !slot.proven && !slot.ended ? 1 : 0;
    }
    REFITD_CHECK(ledger_.open() == open && ledger_.unproven() == unproven);
  }

 private:
  void Come(Slot* slot) {
    ledger_.Close(slot->id);
    *slot = Slot();
    slot->id = ledger_.Open("uid:1", now_);
    if (slot->id == 0) {  // its source is kept out for a while
      REFITD_CHECK(ends_ >= kFloods);
      return;
    }
    slot->left = kUnprovenBytes;
    REFITD_CHECK(ledger_.TakeClear(slot->id, kBeginning));
    NoteEnds();
  }
  void Bring(Slot* slot, int64_t bytes) {
    if (slot->id == 0) return;
    if (!slot->proven) {
      slot->left -= bytes;
      if (slot->left <= 0) End(slot);
    }
    REFITD_CHECK(ledger_.Take(slot->id, bytes) == !slot->ended);
  }
  void OpenStreams(Slot* slot, size_t count) {
    if (slot->id == 0 || count == 0) return;
    if (!slot->ended) slot->streams += static_cast<int64_t>(count);
    if (!slot->proven && slot->streams > kUnprovenStreams) End(slot);
    // The model has no limit of all connections together, so it takes note of that.
    const bool taken = ledger_.TakeClear(slot->id, HeadersOf(count));
    NoteEnds();
    REFITD_CHECK(taken == !slot->ended);
  }
  void NoteEnds() {
    for (const ConnectionLedger::Ended& each : ledger_.TakeEnded()) NoteEnd(each.id);
  }
  void NoteEnd(ConnectionLedger::Id id) {
    const auto slot = std::find_if(slots_.begin(), slots_.end(),
                                   [id](const Slot& each) { return each.id == id; });
    if (slot == slots_.end() || slot->ended) return;
    int64_t all = 0;
    for (const Slot& each : slots_) {
      if (each.id != 0 && !each.ended) all += each.streams;
    }
    REFITD_CHECK(all > kFloodedStreams);
    End(&*slot);
  }
  void End(Slot* slot) {
    if (!slot->ended) ++ends_;
    slot->ended = true;
  }
  void Allow(Slot* slot) {
    ledger_.Allowed(slot->id, "uid:1");
    if (slot->id == 0 || slot->ended) return;
    slot->proven = true;
    slot->streams = std::max<int64_t>(slot->streams - 1, 0);
  }
  void Refuse(Slot* slot, bool known) {
    ledger_.Refused(slot->id, known);
    if (slot->id == 0 || slot->ended) return;
    slot->streams = std::max<int64_t>(slot->streams - 1, 0);
    if (!known && !slot->proven) slot->left = std::min(slot->left, kUnknownBytes);
  }
  void Sweep(bool late) {
    now_ += late ? kUnprovenLimit : Duration(0);
    ledger_.Sweep(now_);
    for (Slot& slot : slots_) {
      if (slot.id == 0 || slot.ended) continue;
      if (!slot.proven) {
        if (late) End(&slot);
      } else if (late || !swept_) {
        slot.streams = std::max<int64_t>(slot.streams - 1, 0);
      }
    }
    swept_ = true;
  }

  // The frames that open so many streams, at most 255.
  static std::string_view HeadersOf(size_t count) {
    static const std::string* const all = [] {
      auto* frames = new std::string;
      for (int i = 0; i < 255; ++i) frames->append("\0\0\0\1\4\0\0\0\1", 9);
      return frames;
    }();
    return std::string_view(*all).substr(0, 9 * count);
  }

  TimePoint now_{std::chrono::hours(1)};
  ConnectionLedger ledger_{8 << 20};
  std::array<Slot, kSlots> slots_;
  int ends_ = 0;  // of connections that the ledger ended
  bool swept_ = false;
};

void FuzzSteps(std::string_view steps) {
  World world;
  for (size_t i = 0; i + 1 < steps.size() && i < 2 * kMaxSteps; i += 2) {
    world.Step(static_cast<uint8_t>(steps[i]), static_cast<uint8_t>(steps[i + 1]));
    world.Check();
  }
}

}  // namespace
}  // namespace refitd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] % 2 == 0) {
    refitd::FuzzSteps(rest);
  } else {
    refitd::FuzzBytes(rest);
  }
  return 0;
}
