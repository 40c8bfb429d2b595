// Formats for people: sizes, rates, times, aligned tables, progress bars.
//
// Pure and thread-safe, except ProgressMeter, which belongs to one thread.
#ifndef REFITD_DAEMON_REFITCTL_FORMAT_H_
#define REFITD_DAEMON_REFITCTL_FORMAT_H_

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace refitd {

std::string HumanBytes(int64_t bytes);           // "512 B", "1.11 GiB"
std::string HumanRate(double bytes_per_second);  // "2.31 GiB/s"
std::string HumanSeconds(double seconds);        // "2.80 ms", "85 ms", "4.20 s", "2m05s", "3h07m"

// The text as a terminal may show it, whoever wrote parts of it: Escaped (transport/base/utf8.h),
// except that lines stay lines.
std::string EscapedLines(std::string_view text);

// Cells are Escaped. Columns as wide as their widest cell, two blanks between; `right` columns are
// right-aligned. Every row has as many cells as the header; lines end without blanks.
class Table {
 public:
  explicit Table(std::vector<std::string> header, std::vector<bool> right = {});
  void Add(std::vector<std::string> row);
  std::string ToString() const;

 private:
  std::vector<std::vector<std::string>> rows_;
  std::vector<bool> right_;
};

// Progress and rate of an update, from observed pairs of elapsed time and bytes.
class ProgressMeter {
 public:
  void Add(double elapsed_seconds, int64_t bytes);
  // The rate of the last seconds, or since the start; 0 until bytes have moved.
  double bytes_per_second() const;
  // Time until `total_bytes` at that rate; nullopt: the total is unknown, or no bytes move.
  std::optional<double> SecondsLeft(int64_t total_bytes) const;

 private:
  struct Sample {
    double seconds = 0;
    int64_t bytes = 0;
  };
  static constexpr double kWindowSeconds = 2;
  std::deque<Sample> samples_;
};

// 0 to 1; nullopt: the total is unknown.
std::optional<double> Fraction(int64_t bytes, int64_t total_bytes);
// "[=====>    ]" of `width` characters inside the brackets.
std::string Bar(double fraction, int width);
// One line of a running transfer: bar, percentage, sizes, rate, time left, as far as known.
std::string ProgressLine(std::string_view label, int64_t bytes, int64_t total_bytes,
                         const ProgressMeter& meter);

// Redraws a block of lines at the bottom of a terminal, cutting lines to the terminal's width.
class LiveBlock {
 public:
  explicit LiveBlock(int columns) : columns_(columns) {}
  // The text to write so that the block shows `lines` below `finished`, which stay on the screen.
  // Lines are Escaped; what surrounds them moves the terminal's cursor.
  std::string Redraw(const std::vector<std::string>& finished,
                     const std::vector<std::string>& lines);

 private:
  const int columns_;
  size_t shown_ = 0;
};

struct TerminalSize {
  int columns = 80;
  int rows = 24;
};
// The size of the terminal that `fd` is; nullopt: it is no terminal.
std::optional<TerminalSize> TerminalSizeOf(int fd);
// The text to write so that a terminal shows the lines of `text`, and nothing else, from its first
// row on. Lines are Escaped, and cut to the terminal's size.
std::string FullScreen(std::string_view text, const TerminalSize& size);

}  // namespace refitd

#endif  // REFITD_DAEMON_REFITCTL_FORMAT_H_
