#include "daemon/refitctl/render.h"

#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <map>
#include <nlohmann/json.hpp>

#include "daemon/refitctl/top_screen.h"
#include "daemon/refitctl/trace_events.h"

namespace refitd::refitctl {
namespace {

using Catch::Contains;
using Catch::EndsWith;

v1::UpdateStatus Update(uint64_t id, int64_t version, int64_t bytes, double elapsed) {
  v1::UpdateStatus update;
  update.set_group("policy");
  update.set_update_id(id);
  update.set_version(version);
  update.set_state("transferring");
  update.set_outcome(v1::UPDATE_OUTCOME_RUNNING);
  update.set_bytes(bytes);
  update.set_total_bytes(100 << 20);
  update.set_elapsed_seconds(elapsed);
  return update;
}

v1::UpdateStatus Ended(v1::UpdateStatus update, bool committed) {
  update.set_state(committed ? "committed" : "aborted");
  update.set_outcome(committed ? v1::UPDATE_OUTCOME_COMMITTED : v1::UPDATE_OUTCOME_ABORTED);
  if (!committed) update.set_reason("trainer rank 0: died");
  return update;
}

TEST_CASE("an update's note is shown with its version, while it runs and when it ended") {
  v1::UpdateStatus update = Update(9, 5, 50 << 20, 1);
  update.set_note("step 1200");
  CHECK_THAT(RenderUpdate(update, ProgressMeter()),
             Contains("policy v5 transferring") && EndsWith("  (step 1200)"));
  CHECK_THAT(RenderUpdate(Ended(update, true), ProgressMeter()),
             Contains("policy v5 (step 1200) committed"));
}

TEST_CASE(
    "a catch-up is shown with its source instances, and a late instance with what it waits for") {
  v1::UpdateStatus catch_up = Update(9, 5, 50 << 20, 1);
  catch_up.set_catch_up(true);
  catch_up.add_source_instances("vllm-0");
  catch_up.add_source_instances("vllm-1");
  CHECK_THAT(RenderUpdate(catch_up, ProgressMeter()),
             Contains("policy v5 catch-up from vllm-0, vllm-1 transferring"));
  v1::GetStatusResponse status;
  auto* group = status.add_groups();
  group->set_name("policy");
  *group->mutable_catch_up() = Ended(catch_up, true);
  auto* instance = group->add_instances();
  instance->set_name("late");
  instance->set_state("dirty");
  instance->set_reason("rank 1: died");
  instance->set_catch_up("waits for a catch-up");
  const std::string text = RenderStatus(status);
  CHECK_THAT(text, Contains("rank 1: died; waits for a catch-up"));
  CHECK_THAT(text, Contains("last catch-up: policy v5 catch-up from vllm-0, vllm-1 committed"));
}

v1::InstanceResult* Add(v1::UpdateStatus* update, const std::string& name, bool shadowed) {
  v1::InstanceResult* const instance = update->add_instances();
  instance->set_instance(name);
  instance->set_shadowed(shadowed);
  return instance;
}

TEST_CASE("an update that stages shows who serves and who is paused; one that waits, for whom") {
  v1::UpdateStatus update = Update(9, 5, 50 << 20, 1);
  update.set_state("opening");
  update.set_waits_for("version 4, which is held for 3 s more, to be released");
  CHECK_THAT(RenderUpdate(update, ProgressMeter()),
             Contains("policy v5 opening ") &&
                 EndsWith("; waits for version 4, which is held for 3 s more, to be released"));
  update.clear_waits_for();
  update.set_state("data");
  for (const char* name : {"a", "b", "c", "d", "e", "f"}) Add(&update, name, true);
  update.mutable_instances(1)->set_reason("its rank 0 died");
  CHECK_THAT(RenderUpdate(update, ProgressMeter()),
             Contains("policy v5 staging ") && Contains("50.00 MiB of 100.00 MiB") &&
                 EndsWith("; serving: a, c, d, e and 1 others"));
  Add(&update, "in-place", false);
  CHECK_THAT(RenderUpdate(update, ProgressMeter()), EndsWith(" others; paused: in-place"));
  update.set_state("flipping");
  CHECK_THAT(RenderUpdate(update, ProgressMeter()),
             Contains("policy v5 flipping ") && !Contains("serving"));
}

TEST_CASE("an update that ended shows the shortest and the longest pause, and who flipped back") {
  v1::UpdateStatus update = Ended(Update(9, 5, 50 << 20, 1), true);
  v1::InstanceResult* const a = Add(&update, "a", true);
  a->set_committed(true);
  CHECK_THAT(RenderUpdate(update, ProgressMeter()), EndsWith("1 of 1 instances"));
  a->set_pause_seconds(0.0028);
  CHECK_THAT(RenderUpdate(update, ProgressMeter()), EndsWith("1 of 1 instances; paused 2.80 ms"));
  v1::InstanceResult* const b = Add(&update, "b", false);
  b->set_committed(true);
  b->set_pause_seconds(0.085);
  CHECK_THAT(RenderUpdate(update, ProgressMeter()),
             EndsWith("2 of 2 instances; paused 2.80 ms (a) to 85 ms (b)"));
  update = Ended(update, false);
  update.mutable_instances(0)->set_flipped_back(true);
  CHECK_THAT(RenderUpdate(update, ProgressMeter()),
             EndsWith("died; paused 2.80 ms (a) to 85 ms (b); flipped back: a"));
  update.set_content_version(3);
  CHECK_THAT(RenderUpdate(Ended(update, true), ProgressMeter()),
             Contains("policy v5 rollback to v3 committed in 1.00 s, 2 of 2 instances; paused "));
}

TEST_CASE("the version before is shown, with what is in the way of a rollback") {
  v1::GetStatusResponse status;
  auto* group = status.add_groups();
  group->set_name("policy");
  group->set_version(5);
  group->set_content_version(3);
  v1::UpdateStatus rollback = Update(9, 5, 0, 1);
  rollback.set_content_version(3);
  *group->mutable_update() = Ended(rollback, true);
  std::string text = RenderStatus(status);
  CHECK_THAT(text, Contains("version 5 has the content of version 3"));
  CHECK_THAT(text, Contains("policy v5 rollback to v3 committed"));
  auto* previous = group->mutable_previous();
  previous->set_version(4);
  CHECK_THAT(RenderStatus(status),
             Contains("version before: 4, `refitctl rollback` serves it again\n"));
  previous->set_held(true);
  CHECK_THAT(RenderStatus(status), Contains("; held until it is released\n"));
  previous->set_held_ms(1500);
  previous->set_refused("instance p is behind");
  CHECK_THAT(RenderStatus(status),
             Contains("version before: 4, instance p is behind; held for 1.50 s\n"));
}

TEST_CASE("the status page shows groups, instances, slots and the running update") {
  v1::GetStatusResponse status;
  status.set_daemon_version("1.2.3");
  status.set_serving(true);
  status.set_uptime_seconds(125);
  status.add_listeners("unix:/run/x.sock");
  auto* group = status.add_groups();
  group->set_name("policy");
  group->set_state("updating");
  group->set_version(4);
  group->mutable_spec()->set_trainer_ranks(2);
  group->set_trainers(1);
  auto* instance = group->add_instances();
  instance->set_name("vllm-0");
  instance->set_state("dirty");
  instance->set_world_size(2);
  instance->set_attached(1);
  instance->set_reason("rank 1: died");
  auto* slot = group->add_slots();
  slot->set_slot(3);
  slot->set_state("reading");
  slot->set_holder("engine vllm-0 rank 0");
  *group->mutable_update() = Update(9, 5, 50 << 20, 1);

  const std::string text = RenderStatus(status);
  CHECK_THAT(text, Contains("refitd 1.2.3 serving, up 2m05s"));
  CHECK_THAT(text, Contains("policy  updating        4       1/2"));
  CHECK_THAT(text, Contains("vllm-0    dirty        -    1/2  rank 1: died"));
  CHECK_THAT(text, Contains("3  reading  engine vllm-0 rank 0"));
  CHECK_THAT(text, Contains("policy v5 transferring"));
  CHECK_THAT(text, Contains(" 50%  50.00 MiB of 100.00 MiB"));
}

v1::GroupStatus OnTwoDaemons() {
  v1::GroupStatus group;
  group.set_name("policy");
  auto* self = group.add_nodes();
  self->set_daemon_id("node-a");
  self->set_state("self");
  self->set_members(2);
  auto* other = group.add_nodes();
  other->set_daemon_id("node-b");
  other->set_address("10.0.0.2:40000");
  other->set_state("joined");
  other->set_members(3);
  other->set_silent_seconds(0.5);
  group.set_communicator(7);
  group.set_communicator_state("up");
  group.set_wire_bytes_sent(3 << 20);
  group.set_wire_bytes_received(1 << 10);
  return group;
}

TEST_CASE("the status page shows what arenas' flips do, and arenas that are kept") {
  v1::GetStatusResponse status;
  v1::ArenaStatus* arena = status.add_arenas();
  arena->set_group("policy");
  arena->set_instance("vllm-0");
  arena->set_rank(3);
  arena->set_device("host");
  arena->set_front_bytes(1 << 20);
  arena->set_back_bytes(1 << 20);
  arena->set_flip("remap");
  CHECK_THAT(RenderStatus(status),
             Contains("\narenas     of group policy instance vllm-0 rank 3: ") &&
                 Contains(", flip: remap\n"));
  arena->set_flip("host");
  CHECK_THAT(RenderStatus(status), Contains(", flip: host (a copy from host memory)\n"));
  arena->set_kept(true);
  arena->set_version(7);
  arena->set_seconds_left(599);
  CHECK_THAT(RenderStatus(status),
             Contains("\nkept       arenas of group policy instance vllm-0 rank 3, version 7: "
                      "2.00 MiB on host, for "));
}

TEST_CASE("the status page shows the daemon's id, a group's nodes and its link") {
  v1::GetStatusResponse status;
  status.set_daemon_id("node-a");
  status.mutable_resources()->set_wire_bytes_sent(5 << 20);
  *status.add_groups() = OnTwoDaemons();
  const std::string text = RenderStatus(status);
  INFO(text);
  CHECK_THAT(text, Contains("\ndaemon     node-a\n"));
  CHECK_THAT(text, Contains("\nwire       5.00 MiB sent, 0 B received between daemons\n"));
  CHECK_THAT(text, Contains("\n  coordinator: this daemon\n"));
  CHECK_THAT(text, !Contains("encrypted"));
  status.mutable_groups(0)->mutable_spec()->set_encrypted_data(true);
  CHECK_THAT(RenderStatus(status),
             Contains("\n  between daemons: encrypted or not at all (encrypted_data)\n"));
  CHECK_THAT(text, Contains("\n  communicator: 7 up, 3.00 MiB sent, 1.00 KiB received\n"));
  CHECK_THAT(text, Contains("\n  node-a  -               self          2       -\n"));
  CHECK_THAT(text, Contains("\n  node-b  10.0.0.2:40000  joined        3  500 ms\n"));
}

TEST_CASE("the status page shows NCCL's communicators, and why one is no longer usable") {
  v1::GetStatusResponse status;
  auto* cuda = status.add_transports();
  cuda->set_name("cuda");
  cuda->set_available(true);
  cuda->set_detail("NCCL 2.28.9 from PATH");
  auto* good = cuda->mutable_nccl()->add_communicators();
  good->set_number(3);
  good->add_gpu_uuids("GPU-a");
  good->add_gpu_uuids("GPU-b");
  good->set_copy_engines(true);
  good->set_windows(2);
  good->set_window_bytes(3 << 20);
  auto* bad = cuda->mutable_nccl()->add_communicators();
  bad->set_number(4);
  bad->add_gpu_uuids("GPU-a");
  bad->set_error("a device hangs");
  auto* communicator = cuda->mutable_nccl()->add_wire_communicators();
  communicator->set_group("policy");
  communicator->set_number(7);
  auto* rail = communicator->add_rails();
  rail->set_gpu_uuid("GPU-b");
  rail->set_bytes_sent(3 << 20);
  communicator->add_rails()->set_gpu_uuid("GPU-c");
  communicator->set_rank(1);
  communicator->set_ranks(3);
  communicator->set_state("connected");
  auto* lost = cuda->mutable_nccl()->add_wire_communicators();
  lost->add_rails()->set_gpu_uuid("GPU-a");
  lost->set_ranks(2);
  lost->set_state("lost");
  lost->set_error("rank 1 went");
  cuda->mutable_nccl()->set_abandoned_communicators(3);
  const std::string text = RenderStatus(status);
  INFO(text);
  CHECK_THAT(text, Contains("\ntransport  cuda: NCCL 2.28.9 from PATH\n"));
  CHECK_THAT(text, Contains("\nnccl       communicator 3 of GPU-a, GPU-b, by copy engines; "
                            "windows: 2, 3.00 MiB on each GPU\n"));
  CHECK_THAT(text, Contains("\nnccl       communicator 4 of GPU-a; a device hangs\n"));
  CHECK_THAT(
      text, Contains("\nnccl       communicator 7 of group policy: rank 1 of 3 daemons, connected; "
                     "GPU-b: 3.00 MiB sent, 0 B received; GPU-c: 0 B sent, 0 B received\n"));
  CHECK_THAT(text, Contains("\nnccl       communicator of no group: rank 0 of 2 daemons, lost; "
                            "GPU-a: 0 B sent, 0 B received; rank 1 went\n"));
  CHECK_THAT(text, Contains("\nnccl       3 communicators never connected\n"));
}

TEST_CASE("a group of another daemon says where it is coordinated") {
  v1::GetStatusResponse status;
  auto* group = status.add_groups();
  group->set_name("policy");
  group->set_coordinator("10.0.0.1:7411");
  auto* node = group->add_nodes();
  node->set_address("10.0.0.1:7411");
  node->set_state("joining");
  const std::string text = RenderStatus(status);
  INFO(text);
  CHECK_THAT(text, Contains("\n  coordinator: 10.0.0.1:7411\n  communicator: none\n"));
  CHECK_THAT(text, Contains("\n  -     10.0.0.1:7411  joining"));
}

TEST_CASE("a group of one daemon says nothing of nodes") {
  v1::GetStatusResponse status;
  auto* group = status.add_groups();
  group->set_name("policy");
  group->add_nodes()->set_state("self");
  CHECK_THAT(RenderStatus(status), !Contains("coordinator") && !Contains("NODE"));
}

TEST_CASE("the nodes page lists every node of every group, and every link") {
  v1::ListGroupsResponse groups;
  *groups.add_groups() = OnTwoDaemons();
  auto* alone = groups.add_groups();
  alone->set_name("alone");
  alone->set_coordinator("10.0.0.9:7411");
  const std::string text = RenderNodes(groups.groups());
  INFO(text);
  CHECK_THAT(text, Contains("GROUP   NODE    ADDRESS         STATE   MEMBERS  SILENT\n"));
  CHECK_THAT(text, Contains("policy  node-b  10.0.0.2:40000  joined        3  500 ms\n"));
  CHECK_THAT(text, Contains("\npolicy  this daemon               7  up     3.00 MiB  1.00 KiB\n"));
  CHECK_THAT(text, Contains("\nalone   10.0.0.9:7411             -  -           0 B       0 B\n"));
}

TEST_CASE("the nodes page shows who sent to whom in the last refit, and at what rates") {
  v1::ListGroupsResponse groups;
  v1::GroupStatus* const group = groups.add_groups();
  *group = OnTwoDaemons();
  CHECK_THAT(RenderNodes(groups.groups()), !Contains("SENDS TO"));
  v1::NodeStatus* const self = group->mutable_nodes(0);
  v1::NodeSend* const send = self->add_sends();
  send->set_daemon_id("node-b");
  send->set_bytes(64 << 20);
  self->set_bytes_sent(64 << 20);
  self->set_data_seconds(0.5);
  v1::NodeStatus* const other = group->mutable_nodes(1);
  other->set_bytes_received(64 << 20);
  other->set_data_seconds(0.25);
  const std::string text = RenderNodes(groups.groups());
  INFO(text);
  CHECK_THAT(text, Contains("policy  node-a  node-b (64.00 MiB)  64.00 MiB        0 B        0 B  "
                            "500 ms  128.00 MiB         0 B\n"));
  CHECK_THAT(text, Contains("policy  node-b  -                         0 B        0 B  64.00 MiB  "
                            "250 ms         0 B  256.00 MiB\n"));
  CHECK_THAT(text, !Contains("slow"));
  other->set_slow("it held the others back by 3 s");
  CHECK_THAT(
      RenderNodes(groups.groups()),
      Contains("\ngroup policy: node-b is slow, so updates leave its instances to catch-ups: it "
               "held the others back by 3 s\n"));
}

TEST_CASE("the buckets page says what went by each method, then every bucket") {
  v1::GetUpdateStatisticsResponse statistics;
  CHECK(RenderBuckets(statistics) == "no update yet\n");
  *statistics.mutable_update() = Ended(Update(3, 7, 100 << 20, 2), true);
  auto* chain = statistics.add_pushed();
  chain->set_method(v1::BROADCAST_METHOD_CHAIN);
  chain->set_bytes(96 << 20);
  chain->set_buckets(2);
  auto* bucket = statistics.add_buckets();
  bucket->set_group_seq(41);
  bucket->set_trainer_rank(1);
  bucket->set_seq(20);
  bucket->set_tensors(9);
  bucket->set_bytes(64 << 20);
  bucket->set_parts(4);
  bucket->set_broadcast(v1::BROADCAST_METHOD_CHAIN);
  bucket->set_seconds(0.5);
  // A method of a newer daemon, and a bucket that took no time.
  statistics.add_buckets()->set_broadcast(static_cast<v1::BroadcastMethod>(77));
  statistics.set_buckets_left_out(12);
  const std::string text = RenderBuckets(statistics);
  INFO(text);
  CHECK_THAT(text, Contains("policy v7") && Contains("chain: 96.00 MiB in 2 buckets"));
  CHECK_THAT(text, Contains("41") && Contains("64.00 MiB") && Contains("500 ms") &&
                       Contains("128.00 MiB/s") && Contains("method 77"));
  CHECK_THAT(text, Contains("12 earlier buckets"));
}

TEST_CASE("a coordinator's name that leads elsewhere is shown, with what to do") {
  v1::GetStatusResponse status;
  status.set_serving(true);
  v1::GroupStatus* const group = status.add_groups();
  group->set_name("policy");
  CHECK_THAT(RenderStatus(status), !Contains("drain"));
  group->mutable_coordinator_moved()->set_name("refitd.example:7412");
  group->mutable_coordinator_moved()->add_addresses("10.0.0.1");
  group->mutable_coordinator_moved()->add_addresses("10.0.0.2");
  CHECK_THAT(RenderStatus(status),
             Contains("\n  refitd.example:7412 leads to 10.0.0.1, 10.0.0.2 now: `refitctl drain`"));
}

TEST_CASE("a daemon without groups says so, and a draining one says that") {
  v1::GetStatusResponse status;
  CHECK_THAT(RenderStatus(status), Contains("no groups"));
  CHECK_THAT(RenderStatus(status), Contains("draining"));
}

TEST_CASE("a running update has one line, redrawn as it goes, with rate and time left") {
  UpdateBoard board;
  CHECK(board.Apply(Update(1, 7, 0, 0)).changed);
  CHECK(board.Apply(Update(1, 7, 25 << 20, 1)).changed);
  REQUIRE(board.Lines().size() == 1);
  CHECK_THAT(board.Lines()[0], Contains("policy v7") && Contains("25%") &&
                                   Contains("25.00 MiB/s") && Contains("3.00 s left"));
  CHECK_FALSE(board.Apply(Update(1, 7, 25 << 20, 1)).changed);
}

TEST_CASE("an ended update is shown once and leaves the board") {
  UpdateBoard board;
  board.Apply(Update(1, 7, 0, 0));
  board.Apply(Update(2, 3, 0, 0));
  auto ended = Ended(Update(1, 7, 100 << 20, 2), true);
  ended.add_instances()->set_committed(true);
  auto* lost = ended.add_instances();
  lost->set_instance("staged-0");
  lost->set_reason("rank 0 died");
  const auto change = board.Apply(ended);
  REQUIRE(change.finished.size() == 1);
  CHECK_THAT(change.finished[0], Contains("policy v7 committed") && Contains("1 of 2 instances") &&
                                     Contains("staged-0: rank 0 died"));
  CHECK(board.Lines().size() == 1);
  CHECK_FALSE(board.Apply(ended).changed);
  CHECK(board.aborted() == 0);
}

TEST_CASE("aborted updates are counted and their reason shown") {
  UpdateBoard board;
  const auto change = board.Apply(Ended(Update(5, 7, 1, 0.5), false));
  REQUIRE(change.finished.size() == 1);
  CHECK_THAT(change.finished[0], Contains("policy v7 aborted after 500 ms: trainer rank 0: died"));
  CHECK(board.aborted() == 1);
}

TEST_CASE("the screen of top names groups, instances, versions, links and who is waited for") {
  v1::GetStatusResponse status;
  status.set_daemon_id("node-a");
  status.set_serving(true);
  v1::GroupStatus& group = *status.add_groups();
  group = OnTwoDaemons();
  group.set_state("updating");
  group.set_version(4);
  group.mutable_spec()->set_trainer_ranks(1);
  group.set_trainers(1);
  auto* send = group.mutable_nodes(0)->add_sends();
  send->set_daemon_id("node-b");
  send->set_bytes(1 << 30);
  group.mutable_nodes(0)->set_data_seconds(0.5);
  auto* instance = group.add_instances();
  instance->set_name("vllm-0");
  instance->set_state("clean_preparing");
  instance->set_version(4);
  instance->set_lag(0);
  instance->set_ready(true);
  instance->set_world_size(2);
  instance->set_attached(2);
  *group.mutable_update() = Update(9, 5, 0, 1);
  group.mutable_update()->set_state("preparing");
  group.mutable_update()->set_waits_for("engine vllm-0 rank 1 to be ready");

  TopScreen screen;
  const std::string text = screen.Render(status, 10);
  INFO(text);
  CHECK_THAT(text, Contains("node-a refitd  serving, up "));
  CHECK_THAT(text, Contains("policy  updating        4       1/1    1/1"));
  CHECK_THAT(text, Contains("policy  vllm-0    clean_preparing        4    0  yes      2/2  -"));
  CHECK_THAT(text, Contains("policy v5 preparing ") &&
                       Contains("; waits for engine vllm-0 rank 1 to be ready\n"));
  CHECK_THAT(text, Contains("policy  node-a  node-b    1.00 GiB  500 ms  2.00 GiB/s"));

  // Rates of the moment come from the counts of two screens.
  group.set_wire_bytes_sent(group.wire_bytes_sent() + (8 << 20));
  CHECK_THAT(screen.Render(status, 12), Contains("  4.00 MiB/s"));
}

// The spans of a trace as "row: name begin+duration", in milliseconds.
std::vector<std::string> SpansOf(const std::string& trace) {
  const auto json = nlohmann::json::parse(trace);
  std::map<std::pair<int, int>, std::string> rows;
  std::vector<std::string> spans;
  for (const auto& event : json.at("traceEvents")) {
    const std::pair<int, int> row(event.at("pid").get<int>(), event.at("tid").get<int>());
    if (event.at("name") == "thread_name") {
      rows[row] = event.at("args").at("name").get<std::string>();
    }
    if (event.at("ph") != "X") continue;
    spans.push_back(
        fmt::format("{}: {} {:.0f}+{:.0f}", rows.at(row), event.at("name").get<std::string>(),
                    event.at("ts").get<double>() / 1000, event.at("dur").get<double>() / 1000));
  }
  CHECK_FALSE(json.at("otherData").at("not_recorded").get<std::string>().empty());
  return spans;
}

TEST_CASE(
    "a trace of watched updates has phases, and what is recorded of ranks, daemons and links") {
  UpdateTrace trace;
  v1::UpdateStatus update = Update(9, 5, 1 << 20, 0);
  update.set_state("preparing");
  CHECK_FALSE(trace.Watch(update, 100));
  update.set_state("data");
  update.set_elapsed_seconds(0.1);
  CHECK_FALSE(trace.Watch(update, 100.2));
  update.set_elapsed_seconds(0.2);
  CHECK_FALSE(trace.Watch(update, 100.3));
  update = Ended(update, true);
  update.set_elapsed_seconds(0.5);
  for (const bool committed : {true, false}) {
    v1::InstanceResult* const instance = Add(&update, committed ? "a" : "evicted", true);
    instance->set_committed(committed);
    instance->set_pause_seconds(0.003);
  }
  CHECK(trace.Watch(update, 100.6));
  CHECK_FALSE(trace.Watch(update, 100.7));                         // it has ended before
  CHECK_FALSE(trace.Watch(Ended(Update(8, 4, 0, 1), true), 101));  // nobody saw it run

  v1::GetUpdateStatisticsResponse statistics;
  *statistics.mutable_update() = update;
  for (const double seconds : {0.1, 0.2}) {
    auto* bucket = statistics.add_buckets();
    bucket->set_trainer_rank(1);
    bucket->set_seq(statistics.buckets_size() - 1);
    bucket->set_seconds(seconds);
  }
  trace.Add(statistics);
  v1::GroupStatus group = OnTwoDaemons();
  *group.mutable_update() = update;
  group.mutable_nodes(0)->set_data_seconds(0.25);
  auto* send = group.mutable_nodes(0)->add_sends();
  send->set_daemon_id("node-b");
  send->set_bytes(1 << 20);
  trace.Add(group);

  CHECK(SpansOf(ChromeTrace(trace.Updates())) ==
        std::vector<std::string>{"updates: v5 committed 0+500", "phases: preparing 0+100",
                                 "phases: data 100+400", "a: paused 497+3",
                                 "rank 1: bucket 0 100+100", "rank 1: bucket 1 200+200",
                                 "node-a: node-a 100+250", "node-a to node-b: 1.00 MiB 100+250"});
}

TEST_CASE("a trace of an update that was not watched has no phases") {
  UpdateTrace trace;
  v1::GetUpdateStatisticsResponse statistics;
  trace.Add(statistics);  // there was no update yet
  CHECK(SpansOf(ChromeTrace(trace.Updates())).empty());
  *statistics.mutable_update() = Ended(Update(9, 5, 0, 0.5), true);
  trace.Add(statistics);
  CHECK(SpansOf(ChromeTrace(trace.Updates())) ==
        std::vector<std::string>{"updates: v5 committed 0+500"});
}

}  // namespace
}  // namespace refitd::refitctl
