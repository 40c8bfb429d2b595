// Prints benchmarks: as a table with the goal beside each figure, or with --json as one object a
// line.
//
// A figure is a ratio to something measured in the same run, or an absolute value with its goal;
// figures are medians of several rounds.
#ifndef REFITD_TESTS_BENCH_REPORT_H_
#define REFITD_TESTS_BENCH_REPORT_H_

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "nlohmann/json.hpp"

namespace refitd::bench {

struct Figure {
  std::string name;  // names the case
  double value = 0;
  std::string unit;
  double baseline = 0;  // has the unit of `value`; 0: there is none
  double ratio = 0;     // value / baseline
  double goal = 0;
  // True: the goal is a floor of `ratio`. False: it is a ceiling.
  bool at_least = true;
  // If the goal is a ceiling: whether it is one of `ratio` (true) or of `value` (false).
  bool ceiling_of_ratio = false;
  bool reached() const {
    return at_least ? ratio >= goal : (ceiling_of_ratio ? ratio : value) <= goal;
  }
};

inline double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n == 0 ? 0 : n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

class Report {
 public:
  Report(std::string bench, bool json) : bench_(std::move(bench)), json_(json) {
    if (json_) return;
    fmt::print("{:<58} {:>12} {:<6} {:>12} {:>7}  {:>10}  {}\n", "case", "value", "unit",
               "baseline", "ratio", "goal", "reached");
  }

  void Add(const Figure& f) {
    all_reached_ = all_reached_ && f.reached();
    if (json_) {
      const nlohmann::json line = {{"bench", bench_}, {"case", f.name},         {"value", f.value},
                                   {"unit", f.unit},  {"baseline", f.baseline}, {"ratio", f.ratio},
                                   {"goal", f.goal},  {"reached", f.reached()}};
      fmt::print("{}\n", line.dump());
    } else {
      const std::string goal = fmt::format("{} {:g}", f.at_least ? ">=" : "<=", f.goal);
      const std::string baseline = f.baseline == 0 ? "" : fmt::format("{:.3f}", f.baseline);
      const std::string ratio = f.ratio == 0 ? "" : fmt::format("{:.2f}", f.ratio);
      fmt::print("{:<58} {:>12.3f} {:<6} {:>12} {:>7}  {:>10}  {}\n", f.name, f.value, f.unit,
                 baseline, ratio, goal, f.reached() ? "yes" : "NO");
    }
    std::fflush(stdout);
  }

  bool all_reached() const { return all_reached_; }

 private:
  const std::string bench_;
  const bool json_;
  bool all_reached_ = true;
};

}  // namespace refitd::bench

#endif  // REFITD_TESTS_BENCH_REPORT_H_
