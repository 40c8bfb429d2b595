#include "daemon/node/turn.h"

#include <catch2/catch.hpp>
#include <future>
#include <memory>
#include <string>
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

bool Free(Mutex* mutex) {
  return std::async(std::launch::async, [mutex] {
           MutexLock lock(mutex);
           return true;
         }).wait_for(std::chrono::seconds(30)) == std::future_status::ready;
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
    CHECK(thread.wait_for(std::chrono::seconds(30)) == std::future_status::ready);
  }
}

}  // namespace
}  // namespace refitd
