#include "daemon/refitctl/render.h"

#include <catch2/catch.hpp>

namespace refitd::refitctl {
namespace {

using Catch::Contains;

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

TEST_CASE("an ended update is told once and leaves the board") {
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

}  // namespace
}  // namespace refitd::refitctl
