#include "daemon/refitctl/format.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "transport/base/status.h"
#include "transport/base/utf8.h"

namespace refitd {
namespace {

constexpr int kBarWidth = 24;

std::string Scaled(double value, std::string_view suffix) {
  static constexpr std::array<std::string_view, 6> kUnits = {"B",   "KiB", "MiB",
                                                             "GiB", "TiB", "PiB"};
  size_t unit = 0;
  while (value >= 1023.995 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  if (unit == 0) return fmt::format("{:.0f} {}{}", value, kUnits[unit], suffix);
  return fmt::format("{:.2f} {}{}", value, kUnits[unit], suffix);
}

// The first `columns` characters of UTF-8 text, each of which is taken to be one column wide.
std::string_view Cut(std::string_view text, int columns) {
  for (size_t i = 0; i < text.size(); ++i) {
    const bool begins = (static_cast<unsigned char>(text[i]) & 0xc0) != 0x80;
    if (begins && columns-- == 0) return text.substr(0, i);
  }
  return text;
}

}  // namespace

std::string HumanBytes(int64_t bytes) { return Scaled(static_cast<double>(bytes), ""); }

std::string HumanRate(double bytes_per_second) { return Scaled(bytes_per_second, "/s"); }

std::string HumanSeconds(double seconds) {
  if (seconds > 0 && seconds < 0.00995) return fmt::format("{:.2f} ms", seconds * 1000);
  if (seconds < 0.9995) return fmt::format("{:.0f} ms", seconds * 1000);
  if (seconds < 59.995) return fmt::format("{:.2f} s", seconds);
  const auto whole = static_cast<int64_t>(std::llround(seconds));
  if (whole < 3600) return fmt::format("{}m{:02}s", whole / 60, whole % 60);
  return fmt::format("{}h{:02}m", whole / 3600, whole % 3600 / 60);
}

std::string EscapedLines(std::string_view text) {
  std::string shown;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    shown += Escaped(text.substr(begin, end - begin));
    if (end < text.size()) shown += '\n';
    begin = end + 1;
  }
  return shown;
}

Table::Table(std::vector<std::string> header, std::vector<bool> right)
    : rows_{std::move(header)}, right_(std::move(right)) {
  right_.resize(rows_[0].size());
}

void Table::Add(std::vector<std::string> row) {
  REFITD_CHECK(row.size() == rows_[0].size());
  for (std::string& cell : row) cell = Escaped(cell);
  rows_.push_back(std::move(row));
}

std::string Table::ToString() const {
  std::vector<size_t> widths(rows_[0].size());
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      if (i > 0) line += "  ";
      line += right_[i] ? fmt::format("{:>{}}", row[i], widths[i])
                        : fmt::format("{:<{}}", row[i], widths[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

void ProgressMeter::Add(double elapsed_seconds, int64_t bytes) {
  // Several reports may carry the same time; the largest number of bytes is kept, since it only
  // grows.
  if (!samples_.empty() && elapsed_seconds <= samples_.back().seconds) {
    samples_.back().bytes = std::max(samples_.back().bytes, bytes);
    return;
  }
  samples_.push_back({elapsed_seconds, bytes});
  while (samples_.size() > 2 && elapsed_seconds - samples_[1].seconds >= kWindowSeconds) {
    samples_.pop_front();
  }
}

double ProgressMeter::bytes_per_second() const {
  if (samples_.size() < 2) return 0;
  const double seconds = samples_.back().seconds - samples_.front().seconds;
  const auto bytes = static_cast<double>(samples_.back().bytes - samples_.front().bytes);
  return seconds > 0 ? bytes / seconds : 0;
}

std::optional<double> ProgressMeter::SecondsLeft(int64_t total_bytes) const {
  const double rate = bytes_per_second();
  if (total_bytes <= 0 || rate <= 0) return std::nullopt;
  return static_cast<double>(std::max<int64_t>(total_bytes - samples_.back().bytes, 0)) / rate;
}

std::optional<double> Fraction(int64_t bytes, int64_t total_bytes) {
  if (total_bytes <= 0) return std::nullopt;
  return std::clamp(static_cast<double>(bytes) / static_cast<double>(total_bytes), 0.0, 1.0);
}

std::string Bar(double fraction, int width) {
  const int filled = static_cast<int>(std::clamp(fraction, 0.0, 1.0) * width);
  std::string bar(static_cast<size_t>(filled), '=');
  if (filled > 0 && filled < width) bar.back() = '>';
  return fmt::format("[{:<{}}]", bar, width);
}

std::string ProgressLine(std::string_view label, int64_t bytes, int64_t total_bytes,
                         const ProgressMeter& meter) {
  std::string line(label);
  if (const auto fraction = Fraction(bytes, total_bytes)) {
    // The percentage is rounded down: 100 only when all bytes are there.
    line +=
        fmt::format(" {} {:3d}%  {} of {}", Bar(*fraction, kBarWidth),
                    static_cast<int>(*fraction * 100), HumanBytes(bytes), HumanBytes(total_bytes));
  } else {
    line += fmt::format(" {}", HumanBytes(bytes));
  }
  if (total_bytes > 0 && bytes >= total_bytes) return line;  // the rate falls while no byte moves
  if (meter.bytes_per_second() > 0) line += "  " + HumanRate(meter.bytes_per_second());
  if (const auto left = meter.SecondsLeft(total_bytes)) {
    line += fmt::format("  {} left", HumanSeconds(*left));
  }
  return line;
}

std::string LiveBlock::Redraw(const std::vector<std::string>& finished,
                              const std::vector<std::string>& lines) {
  std::string text;
  if (shown_ > 0) text += fmt::format("\x1b[{}F", shown_);  // to the block's first line
  text += "\x1b[J";                                         // erase to the end of the screen
  for (const std::string& line : finished) text += Escaped(line) + "\n";
  for (const std::string& line : lines) {
    text += fmt::format("{}\n", Cut(Escaped(line), columns_ - 1));
  }
  shown_ = lines.size();
  return text;
}

std::optional<TerminalSize> TerminalSizeOf(int fd) {
  if (::isatty(fd) == 0) return std::nullopt;
  winsize size{};
  if (::ioctl(fd, TIOCGWINSZ, &size) != 0 || size.ws_col < 20 || size.ws_row < 2) {
    return TerminalSize{};
  }
  return TerminalSize{size.ws_col, size.ws_row};
}

std::string FullScreen(std::string_view text, const TerminalSize& size) {
  std::string screen = "\x1b[H";  // to the first row
  for (int row = 1; row < size.rows && !text.empty(); ++row) {
    const size_t end = std::min(text.find('\n'), text.size());
    // Erases what an earlier screen left in the row.
    screen += fmt::format("{}\x1b[K\n", Cut(Escaped(text.substr(0, end)), size.columns - 1));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return screen + "\x1b[J";  // erases the rows below
}

}  // namespace refitd
