#include "daemon/sockets/frame_scanner.h"

#include <algorithm>

namespace refitd {
namespace {

constexpr size_t kMessageHead = 5;

enum Type : uint8_t { kData = 0, kHeaders = 1, kReset = 3, kSettings = 4, kContinuation = 9 };
constexpr uint8_t kAck = 1;
constexpr uint8_t kEndStream = 1;
constexpr uint8_t kEndHeaders = 4;

uint32_t StreamOf(const std::array<uint8_t, 9>& head) {
  return uint32_t{head[5]} << 24 | uint32_t{head[6]} << 16 | uint32_t{head[7]} << 8 | head[8];
}

}  // namespace

void FrameScanner::Read(std::string_view bytes, TimePoint now) {
  now_ = now;
  const size_t skipped = std::min(preface_, bytes.size());
  preface_ -= skipped;
  bytes.remove_prefix(skipped);
  while (!bytes.empty()) {
    if (in_frame_) {
      bytes.remove_prefix(TakePayload(bytes));
      continue;
    }
    head_[head_bytes_++] = static_cast<uint8_t>(bytes.front());
    bytes.remove_prefix(1);
    if (head_bytes_ == head_.size()) BeginFrame();
  }
}

void FrameScanner::BeginFrame() {
  head_bytes_ = 0;
  in_frame_ = true;
  payload_ = uint32_t{head_[0]} << 16 | uint32_t{head_[1]} << 8 | head_[2];
  const uint8_t type = head_[3];
  if (type == kHeaders) ++opened_;
  if (type == kHeaders || type == kContinuation) {
    if (header_bytes_ == 0) headers_since_ = now_;
    header_bytes_ += static_cast<int64_t>(head_.size());
  }
  if (payload_ == 0) EndFrame();
}

size_t FrameScanner::TakePayload(std::string_view bytes) {
  const size_t taken = std::min<size_t>(payload_, bytes.size());
  payload_ -= static_cast<uint32_t>(taken);
  if (head_[3] == kData) TakeData(bytes.substr(0, taken));
  if (head_[3] == kHeaders || head_[3] == kContinuation) {
    header_bytes_ += static_cast<int64_t>(taken);
  }
  if (payload_ == 0) EndFrame();
  return taken;
}

void FrameScanner::EndFrame() {
  in_frame_ = false;
  const uint8_t type = head_[3];
  const uint8_t flags = head_[4];
  const bool headers = type == kHeaders || type == kContinuation;
  if (headers && (flags & kEndHeaders) != 0) header_bytes_ = 0;
  if (type == kSettings && (flags & kAck) != 0) confirmed_ = true;
  if (type == kReset || (type == kData && (flags & kEndStream) != 0)) {
    if (const auto message = messages_.find(StreamOf(head_)); message != messages_.end()) {
      Drop(message);
    }
  }
}

void FrameScanner::TakeData(std::string_view data) {
  auto found = messages_.find(StreamOf(head_));
  while (!data.empty()) {
    if (found == messages_.end()) {
      found = messages_.emplace(StreamOf(head_), Message{.since = now_}).first;
      found->second.counted = kMessageOverhead;
      message_bytes_ += kMessageOverhead;
    }
    Message& message = found->second;
    size_t taken = 1;
    if (message.head < kMessageHead) {
      // The head's first byte is of flags.
      if (message.head > 0) message.left = message.left << 8 | static_cast<uint8_t>(data.front());
      ++message.head;
    } else {
      taken = std::min<size_t>(message.left, data.size());
      message.left -= static_cast<uint32_t>(taken);
    }
    message.counted += static_cast<int64_t>(taken);
    message_bytes_ += static_cast<int64_t>(taken);
    data.remove_prefix(taken);
    if (message.head == kMessageHead && message.left == 0) {
      Drop(found);
      found = messages_.end();
    }
  }
}

void FrameScanner::Drop(Messages::iterator message) {
  message_bytes_ -= message->second.counted;
  messages_.erase(message);
}

std::optional<TimePoint> FrameScanner::oldest() const {
  std::optional<TimePoint> oldest;
  if (header_bytes_ > 0) oldest = headers_since_;
  for (const auto& [stream, message] : messages_) {
    if (!oldest.has_value() || message.since < *oldest) oldest = message.since;
  }
  return oldest;
}

}  // namespace refitd
