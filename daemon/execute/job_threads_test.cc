#include "daemon/execute/job_threads.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <vector>

namespace refitd {
namespace {

constexpr std::chrono::seconds kDeadline{20};

TEST_CASE("Jobs run one after the other in the order of submission") {
  JobThreads planner("planner-test");
  std::vector<int> order;  // written by the planner's thread
  std::promise<void> last;
  auto done = last.get_future();
  for (int i = 0; i < 100; ++i) planner.Submit([&order, i] { order.push_back(i); });
  planner.Submit([&last] { last.set_value(); });
  REQUIRE(done.wait_for(kDeadline) == std::future_status::ready);
  REQUIRE(order.size() == 100);
  for (int i = 0; i < 100; ++i) CHECK(order[static_cast<size_t>(i)] == i);
}

// A job that runs until the test releases it.
class HeldJob {
 public:
  std::function<void()> Job() {
    return [this] {
      started_.set_value();
      ended_ = release_.get_future().wait_for(kDeadline) == std::future_status::ready;
    };
  }
  bool AwaitStart() {
    return started_.get_future().wait_for(kDeadline) == std::future_status::ready;
  }
  void Release() { release_.set_value(); }
  bool ended() const { return ended_; }

 private:
  std::promise<void> started_;
  std::promise<void> release_;
  bool ended_ = false;
};

TEST_CASE("A job behind all others runs once, when the jobs of every owner have run") {
  std::atomic<int> ran = 0;
  HeldJob held;
  JobThreads threads("planner-test", 2);
  threads.Submit(7, held.Job());
  REQUIRE(held.AwaitStart());
  for (uint64_t owner = 1; owner <= 3; ++owner) threads.Submit(owner, [&ran] { ++ran; });
  std::promise<int> behind;  // a second call of set_value would throw
  auto seen = behind.get_future();
  threads.SubmitBehindAll([&] { behind.set_value(ran); });
  std::promise<void> later;
  threads.Submit(4, [&later] { later.set_value(); });
  REQUIRE(later.get_future().wait_for(kDeadline) == std::future_status::ready);
  CHECK(seen.wait_for(std::chrono::seconds(0)) == std::future_status::timeout);
  held.Release();
  REQUIRE(seen.wait_for(kDeadline) == std::future_status::ready);
  CHECK(seen.get() == 3);
  std::promise<int> alone;
  auto idle = alone.get_future();
  threads.SubmitBehindAll([&alone] { alone.set_value(1); });
  CHECK(idle.wait_for(kDeadline) == std::future_status::ready);
}

TEST_CASE("Owners take turns, however many jobs one of them has submitted first") {
  std::vector<int> order;  // written by the planner's thread
  HeldJob held;
  JobThreads planner("planner-test");
  planner.Submit(7, held.Job());
  REQUIRE(held.AwaitStart());
  for (int i = 0; i < 5; ++i) planner.Submit(1, [&order, i] { order.push_back(10 + i); });
  for (int i = 0; i < 2; ++i) planner.Submit(2, [&order, i] { order.push_back(20 + i); });
  planner.Submit(3, [&order] { order.push_back(30); });
  std::promise<void> last;
  planner.Submit(1, [&last] { last.set_value(); });
  held.Release();
  REQUIRE(last.get_future().wait_for(kDeadline) == std::future_status::ready);
  CHECK(order == std::vector<int>{10, 20, 30, 11, 21, 12, 13, 14});
}

TEST_CASE("An owner whose job takes long keeps no other waiting, and its own next job waits") {
  HeldJob held;
  bool second_ran_early = false;
  std::promise<void> second;
  JobThreads planner("planner-test", 2);
  planner.Submit(1, held.Job());
  REQUIRE(held.AwaitStart());
  planner.Submit(1, [&] {
    second_ran_early = !held.ended();
    second.set_value();
  });
  for (uint64_t owner = 2; owner < 20; ++owner) {
    std::promise<void> ran;
    planner.Submit(owner, [&ran] { ran.set_value(); });
    REQUIRE(ran.get_future().wait_for(kDeadline) == std::future_status::ready);
  }
  held.Release();
  REQUIRE(second.get_future().wait_for(kDeadline) == std::future_status::ready);
  CHECK_FALSE(second_ran_early);
}

TEST_CASE("Stop waits for the job that runs and lets go of the others") {
  std::promise<void> started;
  std::promise<void> release;
  auto may_end = release.get_future();
  auto held = std::make_shared<int>(1);
  bool ended = false;
  bool ran = false;
  {
    JobThreads planner("planner-test");
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
  // The second job may have run before Stop, once.
  CHECK(held.use_count() == 1);
  static_cast<void>(ran);
}

}  // namespace
}  // namespace refitd
