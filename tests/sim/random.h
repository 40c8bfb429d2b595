// The simulator's only source of chance: one splitmix64 generator for each run. Std distributions
// are not used: their results differ between standard libraries, and a seed must give the same run
// everywhere.
#ifndef REFITD_TESTS_SIM_RANDOM_H_
#define REFITD_TESTS_SIM_RANDOM_H_

#include <cstddef>
#include <cstdint>

#include "transport/base/ids.h"

namespace refitd::sim {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15 + 0x632be59bd9b4e019) {}

  uint64_t Next() {
    state_ += 0x9e3779b97f4a7c15;
    uint64_t x = state_;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }
  // A number from `low` to `high`, both included.
  int64_t Between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(Next() % static_cast<uint64_t>(high - low + 1));
  }
  int Int(int low, int high) { return static_cast<int>(Between(low, high)); }
  size_t Index(size_t size) { return static_cast<size_t>(Next() % size); }
  bool PerMille(int chance) { return Between(1, 1000) <= chance; }
  bool Percent(int chance) { return Between(1, 100) <= chance; }
  Duration Micros(int64_t low, int64_t high) {
    return std::chrono::microseconds(Between(low, high));
  }
  Duration Millis(int64_t low, int64_t high) { return Micros(low * 1000, high * 1000); }

 private:
  uint64_t state_;
};

}  // namespace refitd::sim

#endif  // REFITD_TESTS_SIM_RANDOM_H_
