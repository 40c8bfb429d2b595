#include "daemon/metrics.h"

#include <prometheus/metric_family.h>

#include <catch2/catch.hpp>
#include <sstream>
#include <thread>

#include "daemon/test_util.h"

namespace refitd {
namespace {

using Catch::Contains;
using std::chrono::milliseconds;
using std::chrono::seconds;

v1::GetStatusResponse NoStatus() { return {}; }

// The text that a scrape gets.
std::string TextOf(const Metrics& metrics,
                   const std::function<v1::GetStatusResponse()>& status = NoStatus) {
  return metrics.Text(status);
}

// The value of the series with this text; "": there is none.
std::string ValueOf(const std::string& text, const std::string& series) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(series + " ")) return line.substr(series.size() + 1);
  }
  return "";
}

size_t SeriesNaming(const std::string& text, const std::string& part) {
  std::istringstream lines(text);
  size_t count = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line[0] != '#' && line.find(part) != std::string::npos) ++count;
  }
  return count;
}

UpdateReport Committed(const std::string& group) {
  return {.group = group,
          .committed = true,
          .reason = kReasonNone,
          .prepare = milliseconds(2),
          .data = milliseconds(300),
          .verify = seconds(4),
          .total = milliseconds(4303),
          .bytes = 1'000};
}

UpdateReport Aborted(const std::string& group, std::string_view reason) {
  return {.group = group, .reason = reason, .prepare = seconds(30), .total = seconds(30)};
}

TEST_CASE("What the node reports is shown by group, outcome, reason, phase and move") {
  Metrics metrics(8);
  metrics.UpdateEnded(Committed("policy"));
  UpdateReport chained = Committed("policy");
  chained.pushed_bytes = {1, 999, 0, 0};
  chained.flip = std::chrono::milliseconds(3);
  chained.rollback = true;
  metrics.UpdateEnded(chained);
  UpdateReport flipped = Committed("policy");
  flipped.flip = std::chrono::milliseconds(3);
  metrics.UpdateEnded(flipped);
  for (const FlipEnd end : {FlipEnd::kBack, FlipEnd::kCommitted, FlipEnd::kNone, FlipEnd::kBack,
                            FlipEnd::kCommitted, FlipEnd::kCommitted}) {
    metrics.InstanceReleased("policy", "a", milliseconds(3), end);
  }
  UpdateReport failed = Aborted("policy", kReasonDeadline);
  failed.rollback = true;
  metrics.UpdateEnded(failed);
  metrics.BytesMoved("policy", MoveKind::kCopy, 5'000'000'000);
  metrics.BytesMoved("policy", MoveKind::kExchange, 7);
  metrics.IntegrityFailure("policy");
  metrics.CatchUpEnded("policy", CatchUpEnd::kCommitted, 300, seconds(2));
  metrics.CatchUpEnded("policy", CatchUpEnd::kGaveWay, 0, seconds(1));
  for (const bool unchanged : {true, false, true}) metrics.Restored("policy", unchanged);
  const std::string text = TextOf(metrics);
  INFO(text);
  const auto value = [&](const std::string& series) { return ValueOf(text, series); };
  const std::string updates = R"(refitd_updates_total{group="policy",result=)";
  CHECK(value(updates + R"("committed",reason=""})") == "3");
  CHECK(value(updates + R"("aborted",reason="deadline"})") == "1");
  CHECK(value(updates + R"("aborted",reason="verification"})") == "0");
  CHECK(value(R"(refitd_update_bytes_total{group="policy"})") == "3000");
  CHECK(value(R"(refitd_pushed_bytes_total{group="policy",broadcast="direct"})") == "1");
  CHECK(value(R"(refitd_pushed_bytes_total{group="policy",broadcast="chain"})") == "999");
  CHECK(value(R"(refitd_pushed_bytes_total{group="policy",broadcast="nccl"})") == "0");
  CHECK(value(R"(refitd_moved_bytes_total{group="policy",move="copy"})") == "5000000000");
  CHECK(value(R"(refitd_moved_bytes_total{group="policy",move="broadcast"})") == "0");
  CHECK(value(R"(refitd_moved_bytes_total{group="policy",move="exchange"})") == "7");
  CHECK(value(R"(refitd_integrity_failures_total{group="policy"})") == "1");
  CHECK(value(R"(refitd_rollbacks_total{group="policy"})") == "1");
  CHECK(value(R"(refitd_flip_backs_total{group="policy"})") == "2");
  CHECK(value(R"(refitd_flips_total{group="policy"})") == "3");
  // The rollback staged nothing.
  CHECK(value(R"(refitd_staging_seconds_count{group="policy"})") == "1");
  CHECK(std::stod(value(R"(refitd_staging_seconds_sum{group="policy"})")) == Approx(4.3));
  CHECK(value(R"(refitd_restores_total{group="policy",result="unchanged"})") == "2");
  CHECK(value(R"(refitd_restores_total{group="policy",result="changed"})") == "1");
  CHECK(value(R"(refitd_catch_ups_total{group="policy",result="committed"})") == "1");
  CHECK(value(R"(refitd_catch_ups_total{group="policy",result="gave_way"})") == "1");
  CHECK(value(R"(refitd_catch_ups_total{group="policy",result="failed"})") == "0");
  CHECK(value(R"(refitd_catch_up_bytes_total{group="policy"})") == "300");
  CHECK(value(R"(refitd_catch_up_seconds_count{group="policy"})") == "1");
  CHECK(value(R"(refitd_update_seconds_count{group="policy"})") == "4");
  CHECK(std::stod(value(R"(refitd_update_seconds_sum{group="policy"})")) == Approx(42.909));
  CHECK(value(R"(refitd_update_seconds_bucket{group="policy",le="5"})") == "3");
  const std::string phase = R"({group="policy",phase=)";
  CHECK(value("refitd_update_phase_seconds_count" + phase + R"("prepare"})") == "4");
  // The aborted update did not reach this phase.
  CHECK(value("refitd_update_phase_seconds_count" + phase + R"("data"})") == "3");
  CHECK(std::stod(value("refitd_update_phase_seconds_sum" + phase + R"("verify"})")) ==
        Approx(12.0));
  CHECK(value("refitd_update_phase_seconds_count" + phase + R"("flip"})") == "2");
  CHECK_THAT(text, Contains("# TYPE refitd_update_phase_seconds histogram") &&
                       Contains("# HELP refitd_updates_total ") &&
                       Contains("# TYPE refitd_updates_total counter"));
}

TEST_CASE("A duration equal to a bucket's bound is in it, and one beyond all in the last") {
  Metrics metrics(8);
  for (const Duration total : {Duration(milliseconds(1)), Duration(seconds(3600)),
                               Duration(seconds(3601)), Duration::zero()}) {
    UpdateReport report = Aborted("g", kReasonDrain);
    report.total = total;
    metrics.UpdateEnded(report);
  }
  const std::string text = TextOf(metrics);
  INFO(text);
  const std::string bucket = R"(refitd_update_seconds_bucket{group="g",le=)";
  CHECK(ValueOf(text, bucket + R"("0.001"})") == "2");
  CHECK(ValueOf(text, bucket + R"("900"})") == "2");
  CHECK(ValueOf(text, bucket + R"("3600"})") == "3");
  CHECK(ValueOf(text, bucket + R"("+Inf"})") == "4");
}

TEST_CASE("A reason that is none of the set counts as other, and makes no series of its own") {
  Metrics metrics(8);
  metrics.UpdateEnded(Aborted("g", "trainer rank 0 (pid 4711) died"));
  metrics.UpdateEnded(Aborted("g", ""));
  UpdateReport odd = Committed("g");
  odd.reason = "deadline";
  metrics.UpdateEnded(odd);
  const std::string text = TextOf(metrics);
  INFO(text);
  CHECK(ValueOf(text, R"(refitd_updates_total{group="g",result="aborted",reason="other"})") == "2");
  CHECK(ValueOf(text, R"(refitd_updates_total{group="g",result="committed",reason=""})") == "1");
  CHECK(SeriesNaming(text, "refitd_updates_total") == kUpdateReasons.size());
}

TEST_CASE("A deleted group's series are gone, and begin at zero if it is created again") {
  Metrics metrics(8);
  metrics.UpdateEnded(Committed("gone"));
  metrics.UpdateEnded(Committed("kept"));
  metrics.GroupGone("gone");
  metrics.GroupGone("never seen");
  CHECK(SeriesNaming(TextOf(metrics), R"(group="gone")") == 0);
  CHECK(SeriesNaming(TextOf(metrics), R"(group="kept")") > 0);
  metrics.IntegrityFailure("gone");
  const std::string committed =
      R"(refitd_updates_total{group="gone",result="committed",reason=""})";
  CHECK(ValueOf(TextOf(metrics), committed) == "0");
}

TEST_CASE("The number of series is bounded whatever groups are named") {
  constexpr size_t kGroups = 3;
  Metrics metrics(kGroups);
  for (int i = 0; i < 100; ++i) metrics.UpdateEnded(Committed("group" + std::to_string(i)));
  const std::string text = TextOf(metrics);
  CHECK(SeriesNaming(text, "refitd_update_bytes_total{") == kGroups);
  CHECK(ValueOf(text, "refitd_dropped_reports_total") == "97");
  metrics.GroupGone("group0");
  metrics.UpdateEnded(Committed("group99"));
  CHECK(ValueOf(TextOf(metrics), R"(refitd_update_bytes_total{group="group99"})") == "1000");
}

v1::GetStatusResponse SomeStatus() {
  v1::GetStatusResponse status;
  status.set_daemon_version("9.8.7");
  status.set_uptime_seconds(12.5);
  status.set_serving(true);
  status.mutable_resources()->set_region_bytes(4096);
  v1::GroupStatus* group = status.add_groups();
  group->set_name("policy");
  group->set_version(41);
  group->set_trainers(2);
  group->mutable_update()->set_outcome(v1::UPDATE_OUTCOME_RUNNING);
  for (const char* state : {"clean", "dirty", "clean"}) {
    v1::InstanceStatus* instance = group->add_instances();
    instance->set_state(state);
    instance->set_attached(4);
  }
  for (const char* state : {"free", "free", "leased"}) group->add_slots()->set_state(state);
  v1::GroupStatus* fresh = status.add_groups();
  fresh->set_name("fresh");
  for (const bool kept : {false, true, true}) {
    v1::ArenaStatus* arena = status.add_arenas();
    arena->set_group("policy");
    arena->set_front_bytes(100);
    arena->set_back_bytes(102);
    arena->set_kept(kept);
  }
  return status;
}

TEST_CASE("A scrape shows the peers of a group and the communicator of its communicator") {
  const auto status = [] {
    v1::GetStatusResponse status;
    v1::GroupStatus* group = status.add_groups();
    group->set_name("policy");
    group->set_communicator(7);
    const auto add = [&](const std::string& id, const std::string& state) {
      v1::NodeStatus* node = group->add_nodes();
      node->set_daemon_id(id);
      node->set_address("10.0.0.1:7411");
      node->set_state(state);
    };
    add("self-id", "self");
    add("b", "joined");
    add("c", "lost");
    group->mutable_nodes(2)->set_kept_out("its data plane did not come up");
    group->mutable_nodes(1)->set_slow("it held the others back");
    add("twice", "joined");  // the loss of its earlier process is not noticed yet
    add("twice", "lost");
    add("", "joining");
    status.add_groups()->set_name("alone");
    return status;
  };
  const std::string text = TextOf(Metrics(8), status);
  INFO(text);
  const auto up = [&](const std::string& peer) {
    return ValueOf(text, R"(refitd_peer_up{group="policy",peer=")" + peer + R"("})");
  };
  CHECK(up("b") == "1");
  CHECK(up("c") == "0");
  CHECK(up("twice") == "1");
  CHECK(up("10.0.0.1:7411") == "0");  // the daemon there has not told its id
  CHECK(SeriesNaming(text, "refitd_peer_up") == 4);
  CHECK(ValueOf(text, R"(refitd_daemon_kept_out{group="policy",daemon="b"})") == "0");
  CHECK(ValueOf(text, R"(refitd_daemon_kept_out{group="policy",daemon="c"})") == "1");
  CHECK(ValueOf(text, R"(refitd_daemon_slow{group="policy",daemon="b"})") == "1");
  CHECK(ValueOf(text, R"(refitd_daemon_slow{group="policy",daemon="c"})") == "0");
  CHECK(ValueOf(text, R"(refitd_communicator{group="policy"})") == "7");
  CHECK(SeriesNaming(text, "refitd_communicator") == 1);
}

// A group with this many instances that are ready, and "odd", which is 3 versions behind.
v1::GetStatusResponse WithInstances(size_t ready) {
  v1::GetStatusResponse status;
  v1::GroupStatus* group = status.add_groups();
  group->set_name("policy");
  group->set_chain_daemons(5);
  for (size_t i = 0; i < ready; ++i) {
    v1::InstanceStatus* instance = group->add_instances();
    instance->set_name("i" + std::to_string(i));
    instance->set_ready(true);
    instance->set_lag(0);
  }
  v1::InstanceStatus* odd = group->add_instances();
  odd->set_name("odd");
  odd->set_lag(3);
  group->add_instances()->set_name("unknown");  // a version that can't be compared has no lag
  return status;
}

TEST_CASE("A scrape shows which instances are ready, by how much they lag, and the longest chain") {
  const std::string text = TextOf(Metrics(8), [] { return WithInstances(2); });
  INFO(text);
  const auto of = [&](const std::string& metric, const std::string& engine) {
    return ValueOf(text, metric + R"({group="policy",engine=")" + engine + R"("})");
  };
  CHECK(of("refitd_instance_ready", "i0") == "1");
  CHECK(of("refitd_instance_ready", "odd") == "0");
  CHECK(of("refitd_instance_ready", "unknown") == "0");
  CHECK(of("refitd_instance_lag", "i0") == "0");
  CHECK(of("refitd_instance_lag", "odd") == "3");
  CHECK(of("refitd_instance_lag", "unknown").empty());
  CHECK(ValueOf(text, R"(refitd_instances_ready{group="policy"})") == "2");
  CHECK(ValueOf(text, R"(refitd_chain_daemons{group="policy"})") == "5");
}

TEST_CASE("Instances beyond the limit have no series, and those that are not ready come first") {
  const std::string text = TextOf(Metrics(8), [] { return WithInstances(1000); });
  CHECK(SeriesNaming(text, "refitd_instance_ready{") == kMaxShownInstances);
  CHECK(ValueOf(text, R"(refitd_instance_ready{group="policy",engine="odd"})") == "0");
  CHECK(ValueOf(text, R"(refitd_instances_ready{group="policy"})") == "1000");
}

// Every instance that is named is paused once, for 3 ms, in an update that is committed.
void Update(Metrics* metrics, const std::vector<std::string>& instances) {
  for (const std::string& instance : instances) {
    metrics->InstanceReleased("policy", instance, milliseconds(3), FlipEnd::kNone);
  }
  metrics->UpdateEnded(Committed("policy"));
}

TEST_CASE("Pauses are shown by instance, as long as the group has the instance") {
  Metrics metrics(8);
  Update(&metrics, {"i0", "i1", "odd"});
  Update(&metrics, {"i0"});
  const std::string text = TextOf(metrics, [] { return WithInstances(1); });
  INFO(text);
  const std::string of = R"(refitd_pause_seconds_bucket{group="policy",engine=)";
  CHECK(ValueOf(text, of + R"("i0",le="0.0025"})") == "0");
  CHECK(ValueOf(text, of + R"("i0",le="0.005"})") == "2");
  CHECK(ValueOf(text, of + R"("odd",le="+Inf"})") == "1");
  CHECK(SeriesNaming(text, R"(engine="i1")") == 0);
  CHECK(SeriesNaming(text, R"(refitd_pause_seconds_sum{group="policy",engine="unknown")") == 0);
}

TEST_CASE("Pauses of instances beyond the limit have no series until others are gone") {
  const auto shown = [](const Metrics& metrics) {
    const std::string text = TextOf(metrics, [] { return WithInstances(1000); });
    return std::pair(
        SeriesNaming(text, "refitd_pause_seconds_count{"),
        SeriesNaming(text, R"(refitd_pause_seconds_count{group="policy",engine="odd")"));
  };
  Metrics metrics(8);
  std::vector<std::string> instances;
  for (size_t i = 0; i < kMaxShownInstances; ++i) instances.push_back("i" + std::to_string(i));
  instances.emplace_back("odd");
  Update(&metrics, instances);
  CHECK(shown(metrics) == std::pair<size_t, size_t>(kMaxShownInstances, 0));
  for (int update = 0; update < 10; ++update) Update(&metrics, {"i1", "odd"});
  CHECK(shown(metrics) == std::pair<size_t, size_t>(2, 1));
  for (int update = 0; update < 100; ++update) metrics.UpdateEnded(Aborted("policy", kReasonDrain));
  CHECK(shown(metrics) == std::pair<size_t, size_t>(2, 1));
}

TEST_CASE("A joined daemon, which does not know the instances, shows none") {
  const std::string text = TextOf(Metrics(8), [] {
    v1::GetStatusResponse status = WithInstances(0);
    status.mutable_groups(0)->set_coordinator("10.0.0.1:7411");
    return status;
  });
  CHECK(SeriesNaming(text, "refitd_instance_") == 0);
  CHECK(SeriesNaming(text, "refitd_instances_ready") == 0);
}

TEST_CASE("Updates whose spans were exported and dropped are counted") {
  Metrics metrics(8);
  CHECK_THAT(TextOf(metrics), Contains("refitd_traced_updates_total{result=\"dropped\"} 0\n"));
  for (const bool exported : {true, false, true}) metrics.SpansEnded(exported);
  CHECK_THAT(TextOf(metrics), Contains("refitd_traced_updates_total{result=\"dropped\"} 1\n") &&
                                  Contains("refitd_traced_updates_total{result=\"exported\"} 2\n"));
}

TEST_CASE("Evictions are counted by cause") {
  Metrics metrics(8);
  metrics.InstanceEvicted("policy", kReasonDeadline);
  metrics.InstanceEvicted("policy", kReasonDeadline);
  metrics.InstanceEvicted("policy", "because");
  const std::string text = TextOf(metrics);
  const std::string evictions = R"(refitd_evictions_total{group="policy",reason=)";
  CHECK(ValueOf(text, evictions + R"("deadline"})") == "2");
  CHECK(ValueOf(text, evictions + R"("other"})") == "1");
  CHECK(ValueOf(text, evictions + R"("member_lost"})") == "0");
  CHECK(SeriesNaming(text, "refitd_evictions_total") == kUpdateReasons.size() - 1);
}

TEST_CASE("A scrape shows the node's state and the process's use") {
  const std::string text = TextOf(Metrics(8), SomeStatus);
  INFO(text);
  const auto value = [&](const std::string& series) { return ValueOf(text, series); };
  CHECK_THAT(text, Contains(R"(refitd_build_info{version="9.8.7",cuda="CUDA )"));
  CHECK(value("refitd_uptime_seconds") == "12.5");
  CHECK(value("refitd_serving") == "1");
  CHECK(value("refitd_region_bytes") == "4096");
  const std::string arenas = R"(refitd_arena_bytes{group="policy",owner=)";
  CHECK(value(arenas + R"("attached",side="front"})") == "100");
  CHECK(value(arenas + R"("kept",side="front"})") == "200");
  CHECK(value(arenas + R"("kept",side="back"})") == "204");
  CHECK(value(R"(refitd_arena_bytes{group="fresh",owner="kept",side="back"})") == "0");
  CHECK(value(R"(refitd_committed_version{group="policy"})") == "41");
  CHECK(value(R"(refitd_update_running{group="policy"})") == "1");
  CHECK(value(R"(refitd_leases{group="policy",role="trainer"})") == "2");
  CHECK(value(R"(refitd_leases{group="policy",role="engine"})") == "12");
  CHECK(value(R"(refitd_instances{group="policy",state="clean"})") == "2");
  CHECK(value(R"(refitd_instances{group="policy",state="dirty"})") == "1");
  CHECK(value(R"(refitd_slots{group="policy",state="free"})") == "2");
  CHECK(value(R"(refitd_slots{group="policy",state="leased"})") == "1");
  // Nothing was committed, so there is no version.
  CHECK(value(R"(refitd_committed_version{group="fresh"})").empty());
  CHECK(value(R"(refitd_update_running{group="fresh"})") == "0");
  // Nothing was reported, so there are zeros, from which rates can be taken.
  CHECK(value(R"(refitd_updates_total{group="fresh",result="committed",reason=""})") == "0");
  CHECK(value(R"(refitd_update_seconds_count{group="fresh"})") == "0");
  CHECK(std::stod(value("process_open_fds")) >= 3);
  CHECK(std::stod(value("process_resident_memory_bytes")) > 1e6);
}

TEST_CASE("Reports from many threads are all counted while scrapes run") {
  constexpr int kThreads = 4;
  constexpr int kReports = 2'000;
  Metrics metrics(8);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&metrics, t] {
      for (int i = 0; i < kReports; ++i) {
        metrics.UpdateEnded(Committed("g" + std::to_string(t % 2)));
        metrics.GroupGone("other");
        metrics.BytesMoved("other", MoveKind::kCopy, 1);
      }
    });
  }
  for (int i = 0; i < 20; ++i) TextOf(metrics);
  for (std::thread& thread : threads) thread.join();
  const std::string text = TextOf(metrics);
  for (const char* group : {"g0", "g1"}) {
    const std::string series = std::string("refitd_update_seconds_count{group=\"") + group + "\"}";
    CHECK(ValueOf(text, series) == std::to_string(kReports * kThreads / 2));
  }
}

}  // namespace
}  // namespace refitd
