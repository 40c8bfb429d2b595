#include "daemon/group/slot_ledger.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <deque>
#include <functional>
#include <random>

#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr MemberId kPusher(1);
constexpr MemberId kOther(2);
constexpr MemberId kReader(11);
constexpr MemberId kSlowReader(12);
constexpr TimePoint kStart{};
constexpr TimePoint kExpiry = kStart + std::chrono::seconds(30);

// A pool of two slots: slot 0 is brought into the state, slot 1 stays free.
struct Bench {
  SlotLedger ledger{2};
  SlotGrant grant;  // of slot 0; a grant that has ended, if slot 0 is free

  SlotState state() const { return ledger.slot(grant.slot).state; }
};

Bench In(SlotState state, const std::set<MemberId>& readers = {kReader}) {
  Bench bench;
  if (state == SlotState::kFree) {
    bench.grant = *bench.ledger.Grant();
    REQUIRE(bench.ledger.Release(bench.grant).ok());
    return bench;
  }
  bench.grant = *bench.ledger.Lease(kPusher, 1, kExpiry);
  if (state == SlotState::kLeased) return bench;
  REQUIRE(bench.ledger.Submit(kPusher, bench.grant).ok());
  if (state == SlotState::kFilling) return bench;
  bench.ledger.Publish(bench.grant, readers);
  return bench;
}

constexpr SlotState kStates[] = {SlotState::kFree, SlotState::kLeased, SlotState::kFilling,
                                 SlotState::kReading};

// One operation, and the state into which it brings a slot from each of kStates.
struct Row {
  std::string_view operation;
  std::function<bool(Bench*)> apply;  // true: the operation took effect
  SlotState to[4];
};

std::vector<Row> Table() {
  using S = SlotState;
  return {
      {"Grant",
       [](Bench* b) {
         const auto grant = b->ledger.Grant();
         return grant.has_value() && grant->slot == b->grant.slot;
       },
       {S::kFilling, S::kLeased, S::kFilling, S::kReading}},
      {"Lease",
       [](Bench* b) {
         const auto grant = b->ledger.Lease(kOther, 1, kExpiry);
         return grant.ok() && grant->slot == b->grant.slot;
       },
       {S::kLeased, S::kLeased, S::kFilling, S::kReading}},
      {"Submit",
       [](Bench* b) { return b->ledger.Submit(kPusher, b->grant).ok(); },
       {S::kFree, S::kFilling, S::kFilling, S::kReading}},
      {"Submit by another",
       [](Bench* b) { return b->ledger.Submit(kOther, b->grant).ok(); },
       {S::kFree, S::kLeased, S::kFilling, S::kReading}},
      {"Release",
       [](Bench* b) { return b->ledger.Release(b->grant).ok(); },
       {S::kFree, S::kFree, S::kFree, S::kReading}},
      {"ReleaseLease",
       [](Bench* b) { return b->ledger.ReleaseLease(kPusher, b->grant).ok(); },
       {S::kFree, S::kFree, S::kFilling, S::kReading}},
      {"ReleaseLease by another",
       [](Bench* b) { return b->ledger.ReleaseLease(kOther, b->grant).ok(); },
       {S::kFree, S::kLeased, S::kFilling, S::kReading}},
      {"ReaderDone",
       [](Bench* b) { return b->ledger.ReaderDone(b->grant, kReader); },
       {S::kFree, S::kLeased, S::kFilling, S::kFree}},
      {"ReaderDone by another",
       [](Bench* b) { return b->ledger.ReaderDone(b->grant, kOther); },
       {S::kFree, S::kLeased, S::kFilling, S::kReading}},
      {"Forget the pusher",
       [](Bench* b) { return b->ledger.Forget(kPusher); },
       {S::kFree, S::kFree, S::kFilling, S::kReading}},
      {"Forget the reader",
       [](Bench* b) { return b->ledger.Forget(kReader); },
       {S::kFree, S::kLeased, S::kFilling, S::kFree}},
      {"Forget another",
       [](Bench* b) { return b->ledger.Forget(kOther); },
       {S::kFree, S::kLeased, S::kFilling, S::kReading}},
  };
}

TEST_CASE("Each operation takes each state where the table says and nowhere else") {
  for (const Row& row : Table()) {
    for (size_t i = 0; i < std::size(kStates); ++i) {
      INFO(row.operation << " in " << SlotStateName(kStates[i]));
      Bench bench = In(kStates[i]);
      REQUIRE(bench.state() == kStates[i]);
      const bool took_effect = row.apply(&bench);
      CHECK(SlotStateName(bench.state()) == SlotStateName(row.to[i]));
      CHECK(took_effect == (row.to[i] != kStates[i]));
    }
  }
}

TEST_CASE("A grant that is over has no effect on the slot's next use") {
  for (const Row& row : Table()) {
    if (row.operation == "Grant" || row.operation == "Lease") continue;
    for (const SlotState state : kStates) {
      INFO(row.operation << " in " << SlotStateName(state));
      Bench bench = In(state);
      bench.grant.grant = GrantId(bench.grant.grant.value() + 100);
      if (row.operation.starts_with("Forget")) continue;  // Forget takes no grant
      CHECK(!row.apply(&bench));
      CHECK(bench.state() == state);
      bench.grant.slot = SlotIndex(77);
      CHECK(!row.apply(&bench));
    }
  }
}

TEST_CASE("Publish hands a filled slot to its readers, and frees it where there are none") {
  Bench bench = In(SlotState::kFilling);
  bench.ledger.Publish(bench.grant, {kReader, kSlowReader});
  CHECK(bench.state() == SlotState::kReading);
  CHECK(!bench.ledger.ReaderDone(bench.grant, kReader));
  CHECK(!bench.ledger.ReaderDone(bench.grant, kReader));
  CHECK(bench.state() == SlotState::kReading);
  CHECK(bench.ledger.ReaderDone(bench.grant, kSlowReader));
  CHECK(bench.state() == SlotState::kFree);

  bench = In(SlotState::kFilling);
  bench.ledger.Publish(bench.grant, {});
  CHECK(bench.state() == SlotState::kFree);
}

TEST_CASE("Publishing what is not being filled is a bug that ends the process") {
  for (const SlotState state : {SlotState::kFree, SlotState::kLeased, SlotState::kReading}) {
    Bench bench = In(state);
    const pid_t child = fork();
    if (child == 0) {
      signal(SIGABRT, SIG_DFL);
      close(STDERR_FILENO);
      bench.ledger.Publish(bench.grant, {kReader});
      _exit(0);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status));
    CHECK(WTERMSIG(status) == SIGABRT);
  }
}

TEST_CASE("A pusher may lease its share and the last free slot is kept for staging") {
  SlotLedger ledger(4);
  CHECK(ledger.LeasableBy(1) == 3);
  CHECK(ledger.LeasableBy(2) == 1);
  CHECK(ledger.LeasableBy(3) == 1);
  CHECK(ledger.LeasableBy(4) == 0);
  CHECK(SlotLedger(1).LeasableBy(1) == 0);
  CHECK(SlotLedger(0).LeasableBy(1) == 0);

  CHECK(absl::IsResourceExhausted(ledger.Lease(kPusher, 0, kExpiry).status()));
  REQUIRE(ledger.Lease(kPusher, 1, kExpiry).ok());
  CHECK(absl::IsResourceExhausted(ledger.Lease(kPusher, 1, kExpiry).status()));
  REQUIRE(ledger.Lease(kOther, 2, kExpiry).ok());
  REQUIRE(ledger.Lease(kOther, 2, kExpiry).ok());
  CHECK(absl::IsUnavailable(ledger.Lease(kPusher, 2, kExpiry).status()));
  CHECK(ledger.free() == 1);
  CHECK(ledger.Grant().has_value());
  CHECK(!ledger.Grant().has_value());
}

TEST_CASE("A submitted slot counts against its pusher until it is published") {
  SlotLedger ledger(4);
  const SlotGrant grant = *ledger.Lease(kPusher, 1, kExpiry);
  REQUIRE(ledger.Submit(kPusher, grant).ok());
  CHECK(absl::IsUnavailable(ledger.Lease(kPusher, 1, kExpiry).status()));
  CHECK(ledger.Lease(kOther, 1, kExpiry).ok());
  ledger.Publish(grant, {kReader});
  CHECK(ledger.Lease(kPusher, 1, kExpiry).ok());
}

TEST_CASE("Overdue leases are returned once, and stay their holders'") {
  SlotLedger ledger(4);
  CHECK(!ledger.NextExpiry().has_value());
  const SlotGrant late = *ledger.Lease(kPusher, 3, kExpiry + std::chrono::seconds(5));
  const SlotGrant early = *ledger.Lease(kOther, 3, kExpiry);
  CHECK(ledger.NextExpiry() == kExpiry);
  CHECK(ledger.TakeOverdue(kExpiry - Duration(1)).empty());
  const auto overdue = ledger.TakeOverdue(kExpiry);
  REQUIRE(overdue.size() == 1);
  CHECK(overdue[0] == std::pair(kOther, early));
  CHECK(ledger.TakeOverdue(kExpiry).empty());
  CHECK(ledger.slot(early.slot).state == SlotState::kLeased);
  CHECK(ledger.NextExpiry() == kExpiry + std::chrono::seconds(5));
  REQUIRE(ledger.Submit(kPusher, late).ok());
  CHECK(!ledger.NextExpiry().has_value());
  CHECK(ledger.ReleaseLease(kOther, early).ok());
}

TEST_CASE("Leases without a limit of time are never overdue, and stay their holders'") {
  SlotLedger ledger(4);
  const SlotGrant kept = *ledger.Lease(kPusher, 3, kExpiry);
  ledger.EndLimits();
  CHECK(!ledger.NextExpiry().has_value());
  const SlotGrant later = *ledger.Lease(kPusher, 3, kExpiry);
  const auto overdue = ledger.TakeOverdue(kExpiry);
  REQUIRE(overdue.size() == 1);
  CHECK(overdue[0] == std::pair(kPusher, later));
  CHECK(ledger.Submit(kPusher, kept).ok());
}

TEST_CASE("A grant is never used twice") {
  SlotLedger ledger(3);
  std::set<GrantId> seen;
  for (int i = 0; i < 100; ++i) {
    const SlotGrant grant = i % 2 == 0 ? *ledger.Grant() : *ledger.Lease(kPusher, 1, kExpiry);
    CHECK(seen.insert(grant.grant).second);
    REQUIRE(ledger.Release(grant).ok());
  }
}

// ---- schedules ----

// Simulates pushers whose buckets are delivered in one order, each from a leased slot or staged by
// the daemon; slow readers; deaths of both; and leases that are never used. A schedule is a random
// choice among all that can happen next. No bytes are moved.
class Schedule {
 public:
  explicit Schedule(uint64_t seed)
      : rng_(seed),
        ledger_(1 + static_cast<int>(Below(6))),
        pushers_(1 + Below(4)),
        readers_(1 + Below(3)) {
    limit_ = ledger_.LeasableBy(static_cast<int>(pushers_.size()));
    for (size_t i = 0; i < pushers_.size(); ++i) pushers_[i].id = MemberId(1 + i);
    for (size_t i = 0; i < readers_.size(); ++i) readers_[i] = MemberId(100 + i);
    const uint64_t buckets = Below(30);
    for (uint64_t i = 0; i < buckets; ++i) order_.push_back(Below(pushers_.size()));
    for (const size_t pusher : order_) ++pushers_[pusher].left;
  }

  // Runs one schedule; false if nothing can happen although buckets are left.
  bool Run() {
    while (!order_.empty() || !readings_.empty()) {
      std::vector<std::function<void()>> possible;
      for (Pusher& pusher : pushers_) AddSteps(&pusher, &possible);
      AddDelivery(&possible);
      AddReaderSteps(&possible);
      if (possible.empty()) {
        // Time passes: a pusher that leased and never pushed is given up, and gives its slot back.
        now_ += std::chrono::seconds(31);
        if (!TakeBackExpired()) return false;
        continue;
      }
      possible[Below(possible.size())]();
      if (Below(40) == 0) KillSomeone();
      CheckInvariants();
    }
    return true;
  }

  // Checks after a schedule that ran to its end.
  bool Leaked() {
    for (const Pusher& pusher : pushers_) ledger_.Forget(pusher.id);
    for (const Pusher& pusher : pushers_) {
      for (const SlotGrant& grant : pusher.submitted) REQUIRE(ledger_.Release(grant).ok());
    }
    return ledger_.free() != ledger_.slots();
  }

 private:
  struct Pusher {
    MemberId id;
    bool dead = false;
    uint64_t left = 0;                // buckets not handed in
    std::deque<SlotGrant> leases;     // not submitted
    std::deque<SlotGrant> submitted;  // pushed in a slot, before their turn
    std::deque<bool> handed_in;       // buckets handed in, in order; true: in a slot
  };
  struct Reading {
    SlotGrant grant;
    MemberId reader;
  };

  uint64_t Below(uint64_t n) { return rng_() % n; }

  void AddSteps(Pusher* pusher, std::vector<std::function<void()>>* possible) {
    if (pusher->dead || pusher->left == 0) return;
    if (pusher->leases.size() < pusher->left) {
      // A lease is possible if a copy of the ledger grants it.
      SlotLedger copy = ledger_;
      if (copy.Lease(pusher->id, limit_, now_).ok()) {
        possible->push_back([this, pusher] {
          pusher->leases.push_back(
              *ledger_.Lease(pusher->id, limit_, now_ + std::chrono::seconds(30)));
        });
      }
    }
    if (!pusher->leases.empty()) {
      possible->push_back([this, pusher] {
        const SlotGrant grant = pusher->leases.front();
        pusher->leases.pop_front();
        REQUIRE(ledger_.Submit(pusher->id, grant).ok());
        pusher->submitted.push_back(grant);
        pusher->handed_in.push_back(true);
        --pusher->left;
      });
    }
    // If leasing is possible at all, half of the pushers insist on it, which is the harder case.
    const bool insists = limit_ > 0 && pusher->id.value() % 2 == 0;
    if (!insists) {
      possible->push_back([pusher] {
        pusher->handed_in.push_back(false);
        --pusher->left;
      });
    }
  }

  // Delivers the bucket whose turn it is; no other may be delivered.
  void AddDelivery(std::vector<std::function<void()>>* possible) {
    if (order_.empty()) return;
    Pusher* pusher = &pushers_[order_.front()];
    if (pusher->handed_in.empty()) {
      // A dead pusher's bucket never comes, so its turn is skipped.
      if (pusher->dead) possible->push_back([this] { order_.pop_front(); });
      return;
    }
    if (!pusher->handed_in.front() && ledger_.free() == 0) return;
    possible->push_back([this, pusher] {
      SlotGrant grant;
      if (pusher->handed_in.front()) {
        grant = pusher->submitted.front();
        pusher->submitted.pop_front();
      } else {
        grant = *ledger_.Grant();
      }
      pusher->handed_in.pop_front();
      order_.pop_front();
      ledger_.Publish(grant, std::set<MemberId>(readers_.begin(), readers_.end()));
      for (const MemberId reader : readers_) readings_.push_back({grant, reader});
    });
  }

  void AddReaderSteps(std::vector<std::function<void()>>* possible) {
    for (size_t i = 0; i < readings_.size(); ++i) {
      possible->push_back([this, i] {
        ledger_.ReaderDone(readings_[i].grant, readings_[i].reader);
        readings_.erase(readings_.begin() + static_cast<std::ptrdiff_t>(i));
      });
    }
  }

  bool TakeBackExpired() {
    const auto expired = ledger_.TakeOverdue(now_);
    for (const auto& [holder, grant] : expired) {
      CHECK(ledger_.ReleaseLease(holder, grant).ok());
      auto& leases = pushers_[holder.value() - 1].leases;
      leases.erase(std::find(leases.begin(), leases.end(), grant));
    }
    return !expired.empty();
  }

  void KillSomeone() {
    if (Below(2) == 0 && !readers_.empty()) {
      const MemberId victim = readers_.back();
      readers_.pop_back();
      ledger_.Forget(victim);
      std::erase_if(readings_, [&](const Reading& r) { return r.reader == victim; });
      return;
    }
    Pusher& pusher = pushers_[Below(pushers_.size())];
    ledger_.Forget(pusher.id);
    pusher.dead = true;
    pusher.leases.clear();
  }

  void CheckInvariants() {
    ledger_.CheckInvariants();
    int leased = 0;
    int submitted = 0;
    for (const Pusher& pusher : pushers_) {
      REQUIRE(static_cast<int>(pusher.leases.size() + pusher.submitted.size()) <= limit_);
      leased += static_cast<int>(pusher.leases.size());
      submitted += static_cast<int>(pusher.submitted.size());
    }
    std::set<GrantId> reading;
    for (const Reading& r : readings_) reading.insert(r.grant.grant);
    const int busy = leased + submitted + static_cast<int>(reading.size());
    REQUIRE(ledger_.slots() - ledger_.free() == busy);
  }

  std::mt19937_64 rng_;
  SlotLedger ledger_;
  int limit_ = 0;
  std::vector<Pusher> pushers_;
  std::vector<MemberId> readers_;
  std::deque<size_t> order_;  // the pushers in the order in which buckets are delivered
  std::vector<Reading> readings_;
  TimePoint now_ = kStart;
};

TEST_CASE("No schedule of pushers, slow readers and deaths deadlocks or leaks a slot") {
  for (uint64_t seed = 1; seed <= 5000; ++seed) {
    INFO("seed " << seed);
    Schedule schedule(seed);
    REQUIRE(schedule.Run());
    REQUIRE(!schedule.Leaked());
  }
}

}  // namespace
}  // namespace refitd
