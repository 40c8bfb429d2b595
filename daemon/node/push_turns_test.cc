#include "daemon/node/push_turns.h"

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace refitd {
namespace {

using Clock = std::chrono::steady_clock;

bool Becomes(const std::function<bool()>& condition) {
  const Clock::time_point deadline = Clock::now() + std::chrono::seconds(30);
  while (!condition()) {
    if (Clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

TEST_CASE("who goes ahead waits for one push at most, however many there are") {
  // The limit is so long that it plays no part, even on a busy machine.
  PushTurns turns(std::chrono::minutes(1));
  Mutex mutex;
  int64_t pushed = 0;  // guarded by mutex
  std::atomic<bool> stop = false;
  std::vector<std::thread> pushers;
  for (int i = 0; i < 4; ++i) {
    pushers.emplace_back([&] {
      while (!stop) {
        const PushTurns::Push push(&turns);
        MutexLock lock(&mutex);
        ++pushed;
        for (const auto until = Clock::now() + std::chrono::microseconds(20);
             Clock::now() < until;) {
        }
      }
    });
  }
  int64_t most = 0;
  bool all_waited = true;
  for (int round = 0; round < 100 && all_waited; ++round) {
    mutex.Lock();
    int64_t before = pushed;
    int64_t after = 0;
    std::thread ahead([&] {
      turns.LockAhead(&mutex);
      after = pushed;
      mutex.Unlock();
    });
    all_waited = Becomes([&] { return turns.AnyAhead(); });
    mutex.Unlock();
    ahead.join();
    most = std::max(most, after - before);
  }
  stop = true;
  for (std::thread& pusher : pushers) pusher.join();
  CHECK(all_waited);
  CHECK(most <= 1);
}

TEST_CASE("pushes go on when nobody is ahead any more, and when somebody always is") {
  PushTurns turns;
  Mutex mutex;
  std::atomic<int> pushed = 0;
  const auto push = [&] {
    const PushTurns::Push push(&turns);
    MutexLock lock(&mutex);
    ++pushed;
  };
  for (int round = 0; round < 20; ++round) {
    pushed = 0;
    mutex.Lock();
    std::thread ahead([&] {
      turns.LockAhead(&mutex);
      mutex.Unlock();
    });
    CHECK(Becomes([&] { return turns.AnyAhead(); }));
    std::thread first(push);
    std::thread second(push);
    mutex.Unlock();
    CHECK(Becomes([&] { return pushed == 2; }));
    ahead.join();
    first.join();
    second.join();
  }

  // At any time at least one caller is ahead.
  std::atomic<bool> stop = false;
  std::vector<std::thread> always;
  for (int i = 0; i < 3; ++i) {
    always.emplace_back([&] {
      while (!stop) {
        turns.LockAhead(&mutex);
        mutex.Unlock();
      }
    });
  }
  pushed = 0;
  std::thread pusher(push);
  CHECK(Becomes([&] { return pushed == 1; }));
  stop = true;
  pusher.join();
  for (std::thread& thread : always) thread.join();
}

}  // namespace
}  // namespace refitd
