#include "daemon/node/state_lock.h"

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace refitd {
namespace {

// Records what happens; `on_event` may post further events.
class Host {
 public:
  void Dispatch(StateLock& lock, const std::string& group) {
    const bool nested = std::exchange(handling_, true);
    CHECK_FALSE(nested);
    told.push_back(group);
    if (group == "a") {
      lock.Handle("b", Tick{});  // only posted: the lock drains already
      lock.Post("c", Tick{});
      told.push_back("a ends");
    }
    handling_ = false;
  }

  std::vector<std::string> told;
  StateMutex mutex{
      {[this](StateLock& lock, const std::string& group, MachineEvent&) { Dispatch(lock, group); },
       [this] { told.push_back("changed"); }}};

 private:
  bool handling_ = false;
};

class Sink : public MemberSink {
 public:
  Sink(std::string name, std::vector<std::string>* told) : name_(std::move(name)), told_(told) {}
  void Send(MemberNews /*news*/) override {}
  void End(absl::Status /*status*/) override {}
  void Flush() override { told_->push_back(name_); }

 private:
  const std::string name_;
  std::vector<std::string>* const told_;
};

constexpr std::chrono::seconds kDeadline{60};

// Whether another thread can take the mutex.
bool Free(Mutex* mutex) {
  std::promise<void> taken;
  std::future<void> wait = taken.get_future();
  std::thread([mutex, taken = std::move(taken)]() mutable {
    { MutexLock lock(mutex); }
    taken.set_value();  // the mutex may be gone from here on
  }).detach();
  return wait.wait_for(kDeadline) == std::future_status::ready;
}

TEST_CASE("events that come of an event are handled after it, in the order of posting") {
  Host host;
  {
    StateLock lock(&host.mutex);
    lock.Handle("a", Tick{});
    CHECK(host.told == std::vector<std::string>{"a", "a ends", "b", "c", "changed"});
    lock.Drain();  // nothing was posted: the host is not called
    CHECK(host.told.size() == 5);
  }
  CHECK(host.told.size() == 5);
}

TEST_CASE("what was posted and not drained is handled at the end of the lock, before effects") {
  Host host;
  {
    StateLock lock(&host.mutex);
    lock.Answer([&host] { host.told.push_back("answer"); });
    lock.Post("x", Tick{});
    CHECK(host.told.empty());
  }
  CHECK(host.told == std::vector<std::string>{"x", "changed", "answer"});
}

TEST_CASE("effects run in a fixed order, after the mutex was released") {
  Host host;
  std::vector<std::string>& told = host.told;
  const auto engine = std::make_shared<Sink>("engine", &told);
  const auto trainer = std::make_shared<Sink>("trainer", &told);
  bool free = false;
  {
    StateLock lock(&host.mutex);
    lock.Last([&] { told.push_back("last"); });
    lock.Flush(trainer, /*engine=*/false);
    lock.Answer([&] {
      told.push_back("answer");
      free = Free(host.mutex.raw());
    });
    lock.Flush(engine, /*engine=*/true);
    CHECK(told.empty());
  }
  CHECK(free);
  CHECK(told == std::vector<std::string>{"engine", "answer", "trainer", "last"});
}

TEST_CASE("events, which may have every tensor of a model, are destroyed without the mutex") {
  Host host;
  bool free = false;
  {
    StateLock lock(&host.mutex);
    std::shared_ptr<const Layout> layout(new Layout, [&](const Layout* gone) {
      delete gone;
      free = Free(host.mutex.raw());
    });
    lock.Handle("x", LayoutRegistered{MemberId(1), std::move(layout)});
    CHECK_FALSE(free);
  }
  CHECK(free);
}

TEST_CASE("a deadline that moved without an event is noted once, under the mutex") {
  Host host;
  {
    StateLock lock(&host.mutex);
    lock.DeadlineMoved();
    lock.DeadlineMoved();
    lock.Answer([&host] { host.told.push_back("answer"); });
    CHECK(host.told.empty());
  }
  CHECK(host.told == std::vector<std::string>{"changed", "answer"});
}

// ---- the order of callers ----

using Clock = std::chrono::steady_clock;

StateMutex::Handlers Nothing() {
  return {[](StateLock&, const std::string&, MachineEvent&) {}, [] {}};
}

bool Becomes(const std::function<bool()>& condition) {
  const Clock::time_point deadline = Clock::now() + kDeadline;
  while (!condition()) {
    if (Clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

TEST_CASE("the next push takes the mutex while the effects of the one before run") {
  StateMutex mutex(Nothing());
  std::promise<void> began;
  std::thread next;
  bool in_time = false;
  {
    StateLock lock(&mutex, StateLock::Order::kPush);
    lock.Answer([&] {
      next = std::thread([&] {
        const StateLock push(&mutex, StateLock::Order::kPush);
        began.set_value();
      });
      in_time = began.get_future().wait_for(kDeadline) == std::future_status::ready;
    });
  }
  next.join();
  CHECK(in_time);
}

TEST_CASE("holders of every order exclude each other, and end") {
  StateMutex mutex(Nothing());
  int inside = 0;
  std::vector<std::future<void>> threads;
  for (const auto order :
       {StateLock::Order::kAny, StateLock::Order::kAhead, StateLock::Order::kPush}) {
    threads.push_back(std::async(std::launch::async, [&, order] {
      for (int i = 0; i < 200; ++i) {
        const StateLock lock(&mutex, order);
        REFITD_CHECK(++inside == 1);
        --inside;
      }
    }));
  }
  for (std::future<void>& thread : threads) {
    CHECK(thread.wait_for(kDeadline) == std::future_status::ready);
  }
}

TEST_CASE("who goes ahead waits for one push at most, however many there are") {
  // The limit is so long that it plays no part, even on a busy machine.
  StateMutex mutex(Nothing(), std::chrono::minutes(1));
  int64_t pushed = 0;  // guarded by mutex
  std::atomic<bool> stop = false;
  std::vector<std::thread> pushers;
  for (int i = 0; i < 4; ++i) {
    pushers.emplace_back([&] {
      while (!stop) {
        const StateLock push(&mutex, StateLock::Order::kPush);
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
    mutex.raw()->Lock();
    int64_t before = pushed;
    int64_t after = 0;
    std::thread ahead([&] {
      const StateLock lock(&mutex, StateLock::Order::kAhead);
      after = pushed;
    });
    all_waited = Becomes([&] { return mutex.AnyAhead(); });
    mutex.raw()->Unlock();
    ahead.join();
    most = std::max(most, after - before);
  }
  stop = true;
  for (std::thread& pusher : pushers) pusher.join();
  CHECK(all_waited);
  CHECK(most <= 1);
}

TEST_CASE("pushes go on when nobody is ahead any more, and when somebody always is") {
  StateMutex mutex(Nothing());
  std::atomic<int> pushed = 0;
  const auto push = [&] {
    const StateLock lock(&mutex, StateLock::Order::kPush);
    ++pushed;
  };
  const auto go_ahead = [&] { const StateLock lock(&mutex, StateLock::Order::kAhead); };
  for (int round = 0; round < 20; ++round) {
    pushed = 0;
    mutex.raw()->Lock();
    std::thread ahead(go_ahead);
    CHECK(Becomes([&] { return mutex.AnyAhead(); }));
    std::thread first(push);
    std::thread second(push);
    mutex.raw()->Unlock();
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
      while (!stop) go_ahead();
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
