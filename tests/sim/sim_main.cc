// Replays seeds: `sim --seed=N [--trace] [--bug=NAME]`, or runs many: `sim --seeds=FIRST-LAST`.
#include <charconv>
#include <cstdio>
#include <string_view>

#include "tests/sim/bugs.h"
#include "tests/sim/world.h"

namespace refitd::sim {
namespace {

constexpr std::string_view kUsage =
    "usage: sim --seed=N [--trace] [--bug=NAME]\n"
    "       sim --seeds=FIRST-LAST [--bug=NAME]\n"
    "bugs:";

bool ParseNumber(std::string_view text, uint64_t* number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *number);
  return error == std::errc() && end == text.data() + text.size();
}

int Usage() {
  std::fwrite(kUsage.data(), 1, kUsage.size(), stderr);
  for (const Planted& planted : kPlanted) {
    std::fprintf(stderr, " %.*s", static_cast<int>(planted.name.size()), planted.name.data());
  }
  std::fputs("\n", stderr);
  return 2;
}

int Main(int argc, char** argv) {
  Options options;
  uint64_t first = 0;
  uint64_t last = 0;
  bool told = false;
  for (int i = 1; i < argc; ++i) {
    std::string_view arg = argv[i];
    const auto take = [&arg](std::string_view prefix) {
      if (!arg.starts_with(prefix)) return false;
      arg.remove_prefix(prefix.size());
      return true;
    };
    if (arg == "--trace") {
      options.trace = true;
    } else if (take("--seed=")) {
      if (!ParseNumber(arg, &first)) return Usage();
      last = first;
      told = true;
    } else if (take("--seeds=")) {
      const size_t dash = arg.find('-');
      if (dash == std::string_view::npos || !ParseNumber(arg.substr(0, dash), &first) ||
          !ParseNumber(arg.substr(dash + 1), &last)) {
        return Usage();
      }
      told = true;
    } else if (take("--bug=")) {
      for (const Planted& planted : kPlanted) {
        if (planted.name == arg) options.bug = planted.bug;
      }
      if (options.bug == Bug::kNone) return Usage();
    } else {
      return Usage();
    }
  }
  if (!told) return Usage();
  int broken = 0;
  for (uint64_t seed = first; seed <= last; ++seed) {
    options.seed = seed;
    const Result result = RunSeed(options);
    if (!result.ok()) {
      ++broken;
      fmt::print("seed {}: {} broken: {}\n", seed, result.promise, result.what);
    } else if (first == last) {
      fmt::print("seed {}: {} committed, {} aborted, {} events in {} s, trace {:016x}\n", seed,
                 result.committed, result.aborted, result.events,
                 std::chrono::duration<double>(result.virtual_time).count(), result.trace_hash);
    }
    std::fflush(stdout);
  }
  if (first != last) fmt::print("{} of {} seeds broke a promise\n", broken, last - first + 1);
  return broken == 0 ? 0 : 1;
}

}  // namespace
}  // namespace refitd::sim

int main(int argc, char** argv) { return refitd::sim::Main(argc, argv); }
