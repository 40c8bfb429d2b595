#include "daemon/update_meter.h"

#include <catch2/catch.hpp>
#include <map>
#include <string>
#include <vector>

#include "daemon/group/group_test_util.h"

namespace refitd {
namespace {

using std::chrono::milliseconds;

struct Recorder : NodeObserver {
  void UpdateEnded(const UpdateReport& report) override { ended.push_back(report); }
  void BytesMoved(const std::string& /*group*/, MoveKind /*kind*/, int64_t bytes) override {
    moved += bytes;
  }
  void IntegrityFailure(const std::string& /*group*/) override { ++integrity_failures; }
  void GroupGone(const std::string& /*group*/) override {}

  std::vector<UpdateReport> ended;
  int64_t moved = 0;
  int integrity_failures = 0;
};

constexpr int64_t kBytes = 1000;

// A trainer and an engine of a real group, and a clock that each event moves on by 10 ms.
struct Bench {
  Recorder seen;
  UpdateMeter meter{&seen};
  uint64_t updates = 0;
  Group group{"g", 7, TestGroup::DefaultSpec(), {}, [this] { return UpdateId(++updates); }};
  TimePoint now{};
  const MemberId trainer{1};
  const MemberId engine{2};
  GroupActions all;

  explicit Bench(DeliveryMode delivery = DeliveryMode::kRegistered) {
    TrainerAttached t;
    t.member = trainer;
    Do(t);
    EngineAttached e;
    e.member = engine;
    e.identity.instance = "i";
    e.identity.delivery = delivery;
    Do(e);
    if (delivery == DeliveryMode::kRegistered) {
      LayoutRegistered l;
      l.member = engine;
      l.layout = LayoutOf({Bytes("w", kBytes)});
      Do(l);
    }
  }
  void Do(const GroupEvent& event) {
    now += milliseconds(10);
    GroupActions actions;
    group.Handle(event, now, &actions);
    meter.Handled(event, actions, group, now);
    all.insert(all.end(), actions.begin(), actions.end());
  }
  void Begin() {
    BeginEvent begin;
    begin.call = CallId(1);
    begin.member = trainer;
    begin.version = Version(1);
    begin.verification = Verification::kReadback;
    begin.tensor_count = 1;
    Do(begin);
  }
  void BeginAndReady() {
    Begin();
    ReadyEvent ready;
    ready.member = engine;
    ready.update = UpdateId(updates);
    Do(ready);
  }
  void Push() {
    BucketEvent bucket;
    bucket.call = CallId(2);
    bucket.member = trainer;
    bucket.version = Version(1);
    bucket.tensors = {Bytes("w", kBytes)};
    bucket.ranges = {{0, 0, kBytes}};
    Do(bucket);
  }
  void Commit() {
    CommitEvent commit;
    commit.call = CallId(3);
    commit.member = trainer;
    commit.version = Version(1);
    commit.bucket_count = 1;
    Do(commit);
  }
  // Ends the one transfer that was started.
  void Transferred(const absl::Status& status) {
    for (const GroupAction& action : GroupActions(all)) {
      const auto* start = std::get_if<StartTransfer>(&action);
      if (start == nullptr) continue;
      TransferDone done;
      done.update = start->update;
      done.part = start->part;
      done.status = status;
      done.bytes_written.resize(start->destinations.size(), status.ok() ? kBytes : 0);
      Do(done);
      return;
    }
    FAIL("no transfer was started");
  }
  void Verified(const absl::Status& status) {
    VerifyDone done;
    done.update = UpdateId(updates);
    done.status = status;
    if (!status.ok()) done.failed_destinations = {0};
    Do(done);
  }
  const UpdateReport& Ended() {
    REQUIRE(seen.ended.size() == 1);
    CHECK(seen.ended[0].group == "g");
    return seen.ended[0];
  }
};

TEST_CASE("A committed update is told once, with the time of each phase and its bytes") {
  Bench b;
  b.BeginAndReady();
  b.Push();
  b.Transferred(absl::OkStatus());
  CHECK(b.seen.moved == kBytes);
  b.Commit();
  CHECK(b.seen.ended.empty());
  b.Verified(absl::OkStatus());
  const UpdateReport& report = b.Ended();
  CHECK(report.committed);
  CHECK(report.reason == kReasonNone);
  CHECK(report.prepare == milliseconds(10));
  CHECK(report.data == milliseconds(30));
  CHECK(report.verify == milliseconds(10));
  CHECK(report.total == milliseconds(50));
  CHECK(report.bytes == kBytes);
  CHECK(b.seen.integrity_failures == 0);
}

TEST_CASE("Bytes copied into a slot are counted") {
  Bench b(DeliveryMode::kStaged);
  b.BeginAndReady();
  b.Push();
  b.Transferred(absl::OkStatus());
  CHECK(b.seen.moved == kBytes);
}

TEST_CASE("A transfer or a read-back that found other bytes is an integrity failure") {
  const absl::Status differs = absl::DataLossError("tensor 'w' differs");
  Bench transfer;
  transfer.BeginAndReady();
  transfer.Push();
  transfer.Transferred(differs);
  CHECK(transfer.Ended().reason == kReasonVerification);
  CHECK(transfer.seen.integrity_failures == 1);
  CHECK(transfer.seen.moved == 0);

  Bench readback;
  readback.BeginAndReady();
  readback.Push();
  readback.Transferred(absl::OkStatus());
  readback.Commit();
  readback.Verified(differs);
  CHECK(readback.Ended().reason == kReasonVerification);
  CHECK_FALSE(readback.Ended().committed);
  CHECK(readback.seen.integrity_failures == 1);
}

TEST_CASE("A transfer that failed otherwise is none") {
  Bench b;
  b.BeginAndReady();
  b.Push();
  b.Transferred(absl::UnavailableError("unmapped"));
  CHECK(b.Ended().reason == kReasonTransfer);
  CHECK(b.seen.integrity_failures == 0);
}

TEST_CASE("An update that is given up while a transfer runs keeps the cause it was given up for") {
  Bench b;
  b.BeginAndReady();
  b.Push();
  OperatorAbort abort;
  abort.call = CallId(9);
  b.Do(abort);
  CHECK(b.seen.ended.empty());
  b.Transferred(absl::DataLossError("half of it"));
  CHECK(b.Ended().reason == kReasonOperator);
  CHECK(b.seen.integrity_failures == 0);
}

TEST_CASE("The daemon's own abort at its end counts as drain, in the phase that it met") {
  Bench b;
  b.Begin();
  b.meter.DaemonStops();
  OperatorAbort abort;
  abort.call = CallId(9);
  b.Do(abort);
  CHECK(b.Ended().reason == kReasonDrain);
  CHECK(b.Ended().prepare == milliseconds(10));
  CHECK(b.Ended().data == Duration::zero());
}

}  // namespace
}  // namespace refitd
