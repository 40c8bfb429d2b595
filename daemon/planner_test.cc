#include "daemon/planner.h"

#include <catch2/catch.hpp>
#include <chrono>
#include <future>
#include <memory>
#include <vector>

namespace refitd {
namespace {

constexpr std::chrono::seconds kDeadline{20};

TEST_CASE("Jobs run one after the other in the order of submission") {
  Planner planner("planner-test");
  std::vector<int> order;  // of the planner's thread
  std::promise<void> last;
  auto done = last.get_future();
  for (int i = 0; i < 100; ++i) planner.Submit([&order, i] { order.push_back(i); });
  planner.Submit([&last] { last.set_value(); });
  REQUIRE(done.wait_for(kDeadline) == std::future_status::ready);
  REQUIRE(order.size() == 100);
  for (int i = 0; i < 100; ++i) CHECK(order[static_cast<size_t>(i)] == i);
}

TEST_CASE("Stop waits for the job that runs and lets go of the others") {
  std::promise<void> started;
  std::promise<void> release;
  auto may_end = release.get_future();
  auto held = std::make_shared<int>(1);
  bool ended = false;
  bool ran = false;
  {
    Planner planner("planner-test");
    planner.Submit([&] {
      started.set_value();
      ended = may_end.wait_for(kDeadline) == std::future_status::ready;
    });
    planner.Submit([&ran, held] { ran = true; });
    REQUIRE(started.get_future().wait_for(kDeadline) == std::future_status::ready);
    auto stopped = std::async(std::launch::async, [&planner] { planner.Stop(); });
    release.set_value();
    REQUIRE(stopped.wait_for(kDeadline) == std::future_status::ready);
    planner.Submit([&ran] { ran = true; });
  }
  CHECK(ended);
  // The second job may have been next before Stop was: then it ran, once.
  CHECK(held.use_count() == 1);
  static_cast<void>(ran);
}

}  // namespace
}  // namespace refitd
