#include "client/reattach.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "client/call.h"
#include "transport/base/status.h"

namespace refitd::client {
namespace {

using std::chrono::milliseconds;
constexpr std::chrono::seconds kPatience(30);  // only a failing test waits this long

TEST_CASE("pauses double up to the longest, and differ by at most a half") {
  Backoff backoff(7);
  Duration full = kFirstPause;
  for (int i = 0; i < 20; ++i) {
    const Duration pause = backoff.Next();
    CHECK(pause >= full / 2);
    CHECK(pause <= full);
    full = std::min<Duration>(2 * full, kLongestPause);
  }
}

TEST_CASE("equal seeds give equal pauses, other members other ones") {
  const auto pauses = [](uint64_t seed) {
    Backoff backoff(seed);
    std::vector<Duration> all(10);
    std::generate(all.begin(), all.end(), [&] { return backoff.Next(); });
    return all;
  };
  CHECK(pauses(SeedOf("g", "i", 0)) == pauses(SeedOf("g", "i", 0)));
  CHECK(pauses(SeedOf("g", "i", 0)) != pauses(SeedOf("g", "i", 1)));
  CHECK(pauses(SeedOf("g", "i", 0)) != pauses(SeedOf("g", "j", 0)));
}

TEST_CASE("a lease is followed by another where the daemon went away, not where it said no") {
  CHECK(DaemonGone(absl::UnavailableError("")));
  CHECK(DaemonGone(absl::CancelledError("")));
  CHECK_FALSE(DaemonGone(absl::AbortedError("the group was replaced")));
  CHECK_FALSE(DaemonGone(absl::ResourceExhaustedError("events left unread")));
  CHECK_FALSE(DaemonGone(absl::PermissionDeniedError("")));
  CHECK(RefusedForGood(absl::FailedPreconditionError("spec differs")));
  CHECK_FALSE(RefusedForGood(absl::PermissionDeniedError("another identity came first")));
  CHECK_FALSE(RefusedForGood(absl::AlreadyExistsError("the old lease is not noticed yet")));
  CHECK_FALSE(RefusedForGood(absl::NotFoundError("no group yet")));
  CHECK_FALSE(RefusedForGood(absl::UnavailableError("")));
}

// A member that can be lost, and whose attempts end as told.
class Member {
 public:
  Reattacher::Hooks hooks() {
    Reattacher::Hooks hooks;
    hooks.lost = [this]() -> std::optional<absl::Status> {
      MutexLock lock(&mutex_);
      if (lost_.ok() || !ended_.ok()) return std::nullopt;
      return lost_;
    };
    hooks.attach = [this](TimePoint, const std::stop_token&) {
      MutexLock lock(&mutex_);
      ++attempts_;
      absl::Status result = results_.empty() ? absl::OkStatus() : results_.front();
      if (results_.size() > 1 || result.ok()) {
        if (!results_.empty()) results_.erase(results_.begin());
      }
      if (result.ok()) lost_ = absl::OkStatus();
      changed_.NotifyAll();
      return result;
    };
    hooks.give_up = [this](absl::Status why) {
      MutexLock lock(&mutex_);
      ended_ = std::move(why);
      changed_.NotifyAll();
    };
    return hooks;
  }
  // The last result repeats, unless it is OK.
  void Lose(absl::Status why, std::vector<absl::Status> results) {
    MutexLock lock(&mutex_);
    lost_ = std::move(why);
    results_ = std::move(results);
  }
  bool Await(const std::function<bool(Member*)>& condition) {
    const TimePoint deadline = After(kPatience);
    MutexLock lock(&mutex_);
    while (!condition(this)) {
      if (!changed_.WaitUntil(&mutex_, deadline)) return condition(this);
    }
    return true;
  }
  static bool Back(Member* m) ABSL_NO_THREAD_SAFETY_ANALYSIS { return m->lost_.ok(); }
  static bool Ended(Member* m) ABSL_NO_THREAD_SAFETY_ANALYSIS { return !m->ended_.ok(); }
  static bool Tried(Member* m) ABSL_NO_THREAD_SAFETY_ANALYSIS { return m->attempts_ > 0; }
  int attempts() {
    MutexLock lock(&mutex_);
    return attempts_;
  }
  absl::Status ended() {
    MutexLock lock(&mutex_);
    return ended_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
  std::vector<absl::Status> results_ ABSL_GUARDED_BY(mutex_);
  int attempts_ ABSL_GUARDED_BY(mutex_) = 0;
};

TEST_CASE("attempts go on until one succeeds, for every loss anew") {
  Member member;
  Reattacher reattacher("/s", kPatience, milliseconds(10), 1, member.hooks());
  const auto no = absl::UnavailableError("no");
  for (int loss = 1; loss <= 3; ++loss) {
    member.Lose(no, {no, absl::NotFoundError("no group"), absl::OkStatus()});
    reattacher.Waker()();
    REQUIRE(member.Await(Member::Back));
    CHECK(member.attempts() == 3 * loss);
  }
  CHECK(member.ended().ok());
}

TEST_CASE("when the limit has passed the member ends, naming daemon, limit and last reason") {
  Member member;
  Reattacher reattacher("/s", milliseconds(1'200), milliseconds(10), 1, member.hooks());
  member.Lose(absl::UnavailableError("gone"), {absl::UnavailableError("nobody listens")});
  reattacher.Waker()();
  REQUIRE(member.Await(Member::Ended));
  CHECK(absl::IsUnavailable(member.ended()));
  for (const std::string word : {"/s", "1200 ms", "reattach", "nobody listens"}) {
    CHECK_THAT(Message(member.ended()), Catch::Contains(word));
  }
  CHECK(member.attempts() >= 2);
}

TEST_CASE("what the daemon refuses for good is not tried again") {
  Member member;
  Reattacher reattacher("/s", kPatience, milliseconds(10), 1, member.hooks());
  member.Lose(absl::UnavailableError("gone"), {absl::FailedPreconditionError("spec differs")});
  reattacher.Waker()();
  REQUIRE(member.Await(Member::Ended));
  CHECK(absl::IsFailedPrecondition(member.ended()));
  CHECK_THAT(Message(member.ended()), Catch::Contains("spec differs"));
  CHECK(member.attempts() == 1);
}

TEST_CASE("a lease that ended otherwise is not followed by another") {
  Member member;
  Reattacher reattacher("/s", kPatience, milliseconds(10), 1, member.hooks());
  member.Lose(absl::AbortedError("the group was replaced"), {});
  reattacher.Waker()();
  REQUIRE(member.Await(Member::Ended));
  CHECK(member.ended() == absl::AbortedError("the group was replaced"));
  CHECK(member.attempts() == 0);
}

TEST_CASE("a member that goes while it is tried waits for no pause") {
  Member member;
  const auto start = std::chrono::steady_clock::now();
  {
    Reattacher reattacher("/s", std::chrono::hours(1), milliseconds(10), 1, member.hooks());
    member.Lose(absl::UnavailableError("gone"), {absl::UnavailableError("no")});
    reattacher.Waker()();
    REQUIRE(member.Await(Member::Tried));
  }
  CHECK(std::chrono::steady_clock::now() - start < kPatience);
  CHECK(member.ended().ok());
}

}  // namespace
}  // namespace refitd::client
