#include "daemon/node/turn.h"

#include <catch2/catch.hpp>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace refitd {
namespace {

// Records what happens; `on_event` may post further events.
class Host : public TurnHost {
 public:
  void Dispatch(Turn& turn, const std::string& group, MachineEvent& /*event*/) override {
    const bool nested = std::exchange(handling_, true);
    CHECK_FALSE(nested);
    told.push_back(group);
    if (group == "a") {
      turn.Handle("b", Tick{});  // only posted: the turn drains already
      turn.Post("c", Tick{});
      told.push_back("a ends");
    }
    handling_ = false;
  }
  void Drained() override { told.push_back("drained"); }

  std::vector<std::string> told;

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
  Mutex mutex;
  {
    Turn turn(&host, &mutex);
    turn.Handle("a", Tick{});
    CHECK(host.told == std::vector<std::string>{"a", "a ends", "b", "c", "drained"});
    turn.Drain();  // nothing was posted: the host is not called
    CHECK(host.told.size() == 5);
  }
  CHECK(host.told.size() == 5);
}

TEST_CASE("what was posted and not drained is handled at the end of the turn, before effects") {
  Host host;
  Mutex mutex;
  {
    Turn turn(&host, &mutex);
    turn.Answer([&host] { host.told.push_back("answer"); });
    turn.Post("x", Tick{});
    CHECK(host.told.empty());
  }
  CHECK(host.told == std::vector<std::string>{"x", "drained", "answer"});
}

TEST_CASE("effects run in a fixed order, after the mutex was released") {
  Host host;
  Mutex mutex;
  std::vector<std::string>& told = host.told;
  const auto engine = std::make_shared<Sink>("engine", &told);
  const auto trainer = std::make_shared<Sink>("trainer", &told);
  bool free = false;
  {
    Turn turn(&host, &mutex);
    turn.Last([&] { told.push_back("last"); });
    turn.Flush(trainer, /*engine=*/false);
    turn.Answer([&] {
      told.push_back("answer");
      free = Free(&mutex);
    });
    turn.Flush(engine, /*engine=*/true);
    CHECK(told.empty());
  }
  CHECK(free);
  CHECK(told == std::vector<std::string>{"engine", "answer", "trainer", "last"});
}

TEST_CASE("events, which may have every tensor of a model, are destroyed without the mutex") {
  Host host;
  Mutex mutex;
  bool free = false;
  {
    Turn turn(&host, &mutex);
    std::shared_ptr<const Layout> layout(new Layout, [&](const Layout* gone) {
      delete gone;
      free = Free(&mutex);
    });
    turn.Handle("x", LayoutRegistered{MemberId(1), std::move(layout)});
    CHECK_FALSE(free);
  }
  CHECK(free);
}

TEST_CASE("the next push takes its turn while the effects of the one before run") {
  Host host;
  Mutex mutex;
  PushTurns pushes;
  const Turns turns{&host, &mutex, &pushes};
  std::promise<void> began;
  std::thread next;
  bool in_time = false;
  {
    Turn turn(turns, Turn::Order::kPush);
    turn.Answer([&] {
      next = std::thread([&] {
        const Turn push(turns, Turn::Order::kPush);
        began.set_value();
      });
      in_time = began.get_future().wait_for(kDeadline) == std::future_status::ready;
    });
  }
  next.join();
  CHECK(in_time);
}

TEST_CASE("turns of every order exclude each other, and end") {
  Host host;
  Mutex mutex;
  PushTurns pushes;
  int inside = 0;
  std::vector<std::future<void>> threads;
  for (const Turn::Order order : {Turn::Order::kAny, Turn::Order::kAhead, Turn::Order::kPush}) {
    threads.push_back(std::async(std::launch::async, [&, order] {
      for (int i = 0; i < 200; ++i) {
        Turn turn(Turns{&host, &mutex, &pushes}, order);
        REFITD_CHECK(++inside == 1);
        --inside;
      }
    }));
  }
  for (std::future<void>& thread : threads) {
    CHECK(thread.wait_for(kDeadline) == std::future_status::ready);
  }
}

}  // namespace
}  // namespace refitd
