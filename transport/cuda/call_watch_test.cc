#include "transport/cuda/call_watch.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <memory>
#include <string>

#include "transport/base/eventually_testing.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

using Catch::Contains;

// A watch that looks every 2.5 ms.
struct Watched {
  // Waits until the calls that are under way have had `looks` looks.
  void Look(int looks) {
    const int until = looked + looks;
    REQUIRE(Eventually([&] { return looked >= until; }));
  }

  std::atomic<int> looked{0};
  const std::shared_ptr<LostContext> lost = std::make_shared<LostContext>(nullptr);
  CallWatch watch{std::chrono::milliseconds(20), lost,
                  [](int device) { return "GPU-" + std::to_string(device); }, [this] { ++looked; }};
};

TEST_CASE("a call that does not return within the limit loses the GPUs (P4)") {
  Watched watched;
  { const CallWatch::Call call(&watched.watch, 3, "waiting"); }
  watched.Look(20);
  CHECK(watched.lost->status().ok());
  const CallWatch::Call call(&watched.watch, 3, "waiting");
  REQUIRE(Eventually([&] { return !watched.lost->status().ok(); }));
  CHECK_THAT(Message(watched.lost->status()),
             Contains("device GPU-3: waiting: the driver did not return within 20 ms"));
}

TEST_CASE("pinning an arena of hundreds of gigabytes was taken for a GPU that hangs") {
  Watched watched;
  const CallWatch::Call large(&watched.watch, 0, "pinning host memory", int64_t{1} << 40);
  watched.Look(40);
  CHECK(watched.lost->status().ok());
  const CallWatch::Call small(&watched.watch, 0, "pinning host memory", 1 << 20);
  REQUIRE(Eventually([&] { return !watched.lost->status().ok(); }));
}

}  // namespace
}  // namespace refitd
