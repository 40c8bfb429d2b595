#include "daemon/sockets/connection_ledger.h"

#include <catch2/catch.hpp>
#include <string>

#include "tests/e2e/http2_frames.h"

namespace refitd {
namespace {

using e2e::Frame;
using e2e::MessageHead;

constexpr char kIdentity[] = "spiffe://prod/trainer";
const std::string kAck = Frame(e2e::kSettings, 1, 0, "");

std::string Opened(uint32_t stream) { return Frame(e2e::kHeaders, e2e::kEndHeaders, stream, "h"); }
std::string Data(uint32_t stream, const std::string& bytes, uint8_t flags = 0) {
  return Frame(e2e::kData, flags, stream, bytes);
}
std::string Reset(uint32_t stream) { return Frame(e2e::kResetStream, 0, stream, "code"); }

struct Fixture {
  // A connection of somebody whom a rule names; `allowed`: a call of it was.
  ConnectionLedger::Id Open(bool allowed = true, const std::string& identity = kIdentity) {
    const ConnectionLedger::Id id = ledger.Open("ipv4:10.0.0.1", now);
    REQUIRE(ledger.TakeClear(id, std::string(e2e::kPreface) + kAck + Opened(1)));
    if (allowed) ledger.Allowed(id, identity);
    return id;
  }
  // Opens streams and resets them at once, with indexed headers; returns how many it could.
  int64_t RapidResets(ConnectionLedger::Id id, int64_t most) {
    for (int64_t i = 0; i < most; ++i) {
      const auto stream = static_cast<uint32_t>(3 + 2 * i);
      if (!ledger.TakeClear(id, Opened(stream) + Reset(stream))) return i;
    }
    return most;
  }
  // Sends the beginning of a message on each of so many streams; returns how many it could.
  int Unfinished(ConnectionLedger::Id id, int most, size_t bytes) {
    const std::string start = MessageHead(8 << 20) + std::string(bytes, 'm');
    for (int i = 0; i < most; ++i) {
      const auto stream = static_cast<uint32_t>(3 + 2 * i);
      if (!ledger.TakeClear(id, Opened(stream) + Data(stream, start))) return i;
      ledger.Allowed(id, kIdentity);
    }
    return most;
  }
  std::string WhyEnded() {
    const auto ended = ledger.TakeEnded();
    return ended.empty() ? "" : ended.back().why;
  }

  ConnectionLedger ledger{8 << 20};
  TimePoint now{std::chrono::hours(1)};
};

TEST_CASE_METHOD(Fixture, "An identity that a rule names sent headers without an end") {
  const auto id = Open();
  REQUIRE(ledger.TakeClear(id, Frame(e2e::kHeaders, 0, 3, "h")));
  int frames = 0;
  while (ledger.TakeClear(id, Frame(e2e::kContinuation, 0, 3, std::string(100, 'h')))) ++frames;
  CHECK(frames * 109 <= kMaxHeaderBlock);
  CHECK_THAT(WhyEnded(), Catch::Contains("headers of more than 16384 bytes"));
  CHECK_FALSE(ledger.TakeClear(id, "more"));
}

TEST_CASE_METHOD(Fixture, "Frames without bytes are a header block without an end, too") {
  const auto id = Open();
  REQUIRE(ledger.TakeClear(id, Frame(e2e::kHeaders, 0, 3, "")));
  int frames = 0;
  while (ledger.TakeClear(id, Frame(e2e::kContinuation, 0, 3, ""))) ++frames;
  CHECK(frames * 9 <= kMaxHeaderBlock);
}

TEST_CASE_METHOD(Fixture, "Header blocks that end are not counted together") {
  const auto id = Open();
  for (uint32_t stream = 3; stream < 403; stream += 2) {
    REQUIRE(ledger.TakeClear(id, Frame(e2e::kHeaders, 0, stream, std::string(8000, 'h')) +
                                     Frame(e2e::kContinuation, e2e::kEndHeaders, stream, "h")));
    ledger.Allowed(id, kIdentity);
  }
}

TEST_CASE_METHOD(Fixture, "An identity that a rule names opened streams and reset them at once") {
  const auto victim = Open();
  const auto first = Open();
  const auto second = Open();
  CHECK(RapidResets(first, kIdentityStreams / 2) == kIdentityStreams / 2);
  const int64_t more = RapidResets(second, kIdentityStreams);
  CHECK(more <= kIdentityStreams / 2 + 1);
  CHECK_THAT(WhyEnded(),
             Catch::Contains("more than 1024 streams that no call explains, of spiffe"));
  CHECK(ledger.TakeClear(victim, Opened(3)));  // had fewer than the attacker
}

TEST_CASE_METHOD(Fixture, "Streams that a handler saw, and some that it did not, are forgiven") {
  const auto id = Open();
  for (uint32_t stream = 3; stream < 3 * kIdentityStreams; stream += 2) {
    REQUIRE(ledger.TakeClear(id, Opened(stream) + Reset(stream)));
    if (stream % 4 == 3) {
      ledger.Allowed(id, kIdentity);
    } else {
      ledger.Refused(id, true);
    }
  }
  CHECK(RapidResets(id, kIdentityStreams) == kIdentityStreams);
  now += 2 * kForgiveInterval;
  ledger.Sweep(now);
  CHECK(RapidResets(id, 2) == 1);
}

TEST_CASE_METHOD(Fixture, "Before an allowed call a connection opens few streams") {
  const auto id = Open(/*allowed=*/false);
  CHECK(RapidResets(id, 100) == kUnprovenStreams - 1);
  CHECK_THAT(WhyEnded(), Catch::Contains("before a call that a rule allows"));
}

TEST_CASE_METHOD(Fixture, "Who does not confirm the settings opens a limited number of streams") {
  const auto id = ledger.Open("ipv4:10.0.0.1", now);
  REQUIRE(ledger.TakeClear(id, std::string(e2e::kPreface) + Opened(1)));
  ledger.Allowed(id, kIdentity);
  int64_t opened = 1;
  for (uint32_t stream = 3; ledger.TakeClear(id, Opened(stream)); stream += 2, ++opened) {
    ledger.Allowed(id, kIdentity);
  }
  CHECK(opened == kUnconfirmedStreams);
}

TEST_CASE_METHOD(Fixture, "An identity that a rule names left messages unfinished") {
  const auto victim = Open();
  const auto first = Open();
  const auto second = Open();
  CHECK(Unfinished(first, 100, 60'000) == 100);
  const int more = Unfinished(second, 600, 60'000);
  CHECK((100 + more) * (60'000 + 5 + kMessageOverhead) <= kIdentityMessageBytes);
  CHECK_THAT(WhyEnded(), Catch::Contains("bytes of unfinished messages"));
  CHECK_FALSE(ledger.TakeClear(second, "more"));  // which had more than the first
  CHECK(ledger.TakeClear(victim, Opened(3)));
  ledger.Close(second);
  CHECK(Unfinished(Open(), 300, 60'000) * 60'000 < kIdentityMessageBytes / 4);  // for a while
  now += kFloodPause;
  ledger.Sweep(now);
  CHECK(Unfinished(Open(), 300, 60'000) == 300);
}

TEST_CASE_METHOD(Fixture, "Messages that end, in pieces of any size, are not counted") {
  const auto id = Open();
  for (uint32_t stream = 3; stream < 103; stream += 2) {
    std::string bytes = Opened(stream);
    const std::string message = MessageHead(1 << 20) + std::string(1 << 20, 'm') + MessageHead(0) +
                                MessageHead(10) + "0123456789";
    const size_t piece = stream * 97;
    for (size_t at = 0; at < message.size(); at += piece) {
      bytes += Data(stream, message.substr(at, piece));
    }
    for (size_t at = 0; at < bytes.size(); at += 4097) {
      REQUIRE(ledger.TakeClear(id, std::string_view(bytes).substr(at, 4097)));
    }
    ledger.Allowed(id, kIdentity);
  }
}

TEST_CASE_METHOD(Fixture, "A message of a stream that was reset, or has ended, is forgotten") {
  const auto id = Open();
  for (uint32_t stream = 3; stream < 3003; stream += 2) {
    const std::string start = MessageHead(8 << 20) + std::string(60'000, 'm');
    REQUIRE(ledger.TakeClear(id, Opened(stream) + Data(stream, start)));
    ledger.Allowed(id, kIdentity);
    REQUIRE(ledger.TakeClear(id, stream % 4 == 3 ? Reset(stream) : Data(stream, "m", 1)));
  }
}

TEST_CASE_METHOD(Fixture, "A message, and headers, that do not end for long end the connection") {
  const auto message = Open();
  const auto headers = Open();
  const auto idle = Open();
  REQUIRE(ledger.TakeClear(message, Opened(3) + Data(3, MessageHead(100) + "some")));
  REQUIRE(ledger.TakeClear(headers, Frame(e2e::kHeaders, 0, 3, "h")));
  ledger.Sweep(now + kUnfinishedLimit / 2);
  CHECK(ledger.TakeEnded().empty());
  ledger.Sweep(now + kUnfinishedLimit);
  CHECK_FALSE(ledger.TakeClear(message, Data(3, "more")));
  CHECK_FALSE(ledger.TakeClear(headers, Frame(e2e::kContinuation, e2e::kEndHeaders, 3, "h")));
  CHECK(ledger.TakeClear(idle, Opened(3)));
}

TEST_CASE_METHOD(Fixture, "A source that flooded again and again is kept out for a while") {
  for (int i = 0; i < kFloods; ++i) CHECK(RapidResets(Open(false), 100) == kUnprovenStreams - 1);
  CHECK(ledger.Open("ipv4:10.0.0.1", now) == 0);
  CHECK(ledger.Open("ipv4:10.0.0.2", now) != 0);
  now += kFloodPause;
  CHECK(Open() != 0);
}

TEST_CASE_METHOD(Fixture, "Who has a wrong rule, and tries without an end, is not kept out") {
  for (int i = 0; i < 10 * kFloods; ++i) {
    const auto id = Open(false);
    ledger.Refused(id, false);
    CHECK_FALSE(ledger.Take(id, kUnknownBytes));
  }
}

TEST_CASE_METHOD(Fixture, "An identity has a limited number of connections") {
  for (int64_t i = 0; i < kIdentityConnections; ++i) {
    REQUIRE(ledger.Take(Open(), 1));
  }
  const auto last = ledger.Open("ipv4:10.0.0.1", now);
  ledger.Allowed(last, kIdentity);
  CHECK_FALSE(ledger.Take(last, 1));
  CHECK_THAT(WhyEnded(), Catch::Contains("has 1024 connections already"));
  CHECK(ledger.Take(Open(true, "spiffe://prod/engine"), 1));
}

}  // namespace
}  // namespace refitd
