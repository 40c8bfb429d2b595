#include "daemon/process/flag_text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <numeric>
#include <utility>

#include "transport/base/status.h"

namespace refitd {
namespace {

using std::chrono::milliseconds;

constexpr std::array<std::pair<std::string_view, int64_t>, 4> kUnits = {
    {{"h", 3'600'000}, {"m", 60'000}, {"s", 1'000}, {"ms", 1}}};
constexpr double kMostMilliseconds = 1e15;  // far below what an int64_t holds
constexpr size_t kMaxWordBytes = 64;        // of a name that is worth comparing

// How many characters must be put in, taken out or replaced to make one text of the other.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

absl::StatusOr<milliseconds> ParseDuration(std::string_view text, milliseconds bare) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  const std::string_view unit(rest, static_cast<size_t>(end - rest));
  const auto* const known = std::find_if(kUnits.begin(), kUnits.end(),
                                         [unit](const auto& each) { return each.first == unit; });
  const bool takes = unit.empty() || known != kUnits.end();
  const int64_t factor = unit.empty() || !takes ? bare.count() : known->second;
  const double count = number * static_cast<double>(factor);
  if (error != std::errc() || !takes || !(std::abs(count) <= kMostMilliseconds)) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "\"{}\" is not a duration such as 500ms, 30s, 2m or 1h", text);
  }
  return milliseconds(std::llround(count));
}

std::string FormatDuration(milliseconds duration) {
  for (const auto& [unit, factor] : kUnits) {
    if (duration.count() != 0 && duration.count() % factor == 0) {
      return fmt::format("{}{}", duration.count() / factor, unit);
    }
  }
  return "0s";
}

std::string Nearest(std::string_view word, const std::vector<std::string>& names) {
  if (word.size() > kMaxWordBytes) return "";
  std::string nearest;
  size_t least = std::max<size_t>(1, word.size() / 3) + 1;
  for (const std::string& name : names) {
    const size_t distance = EditDistance(word, name);
    if (distance >= least) continue;
    least = distance;
    nearest = name;
  }
  return nearest;
}

}  // namespace refitd
