#include "daemon/node/timer.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <string>

#include "transport/base/eventually.h"

namespace refitd {
namespace {

using std::chrono::hours;
using std::chrono::steady_clock;

class Host : public TimerHost, public TurnHost {
 public:
  TimePoint NextWake() override {
    ++asked;
    return next;
  }
  void Ring(Turn& turn, TimePoint now) override {
    early = early || now < next;
    next = steady_clock::now() + hours(1);
    turn.Answer([this] { ++rings; });
  }
  void Dispatch(Turn& /*turn*/, const std::string& /*group*/, MachineEvent& /*event*/) override {}
  void Drained() override {}

  Mutex mutex;
  TimePoint next = steady_clock::now() + hours(1);  // guarded by mutex
  bool early = false;                               // guarded by mutex
  std::atomic<int> asked{0};
  std::atomic<int> rings{0};
};

TEST_CASE(
    "the timer takes a turn when a deadline has come, and its effects run without the mutex") {
  Host host;
  host.next = steady_clock::now();
  Timer timer(&host, &host, &host.mutex);
  timer.Start();
  REQUIRE(Eventually([&] { return host.rings == 1; }));
  timer.Stop();
  CHECK_FALSE(host.early);
  CHECK(host.rings == 1);
}

TEST_CASE("an earlier deadline wakes the timer, a later one does not") {
  Host host;
  Timer timer(&host, &host, &host.mutex);
  timer.Start();
  REQUIRE(Eventually([&] { return host.asked > 0; }));
  {
    MutexLock lock(&host.mutex);
    host.next = steady_clock::now() + hours(2);
    timer.Wake();
  }
  CHECK(host.rings == 0);
  {
    MutexLock lock(&host.mutex);
    host.next = steady_clock::now();
    timer.Wake();
  }
  REQUIRE(Eventually([&] { return host.rings == 1; }));
  timer.Stop();
  CHECK_FALSE(host.early);
}

}  // namespace
}  // namespace refitd
