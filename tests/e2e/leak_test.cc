// Nothing is left behind by members that come and die, nor by thousands of updates.
#include <catch2/catch.hpp>

#include "tests/e2e/harness.h"
#include "tests/e2e/require.h"

namespace refitd::e2e {
namespace {

TEST_CASE("200 attach-kill cycles leave no mapping, descriptor, thread, region or member behind") {
  constexpr int kCycles = 200;
  constexpr int kAtATime = 8;
  // gRPC's own threads come and go with load; a leak of one for each cycle would be 200.
  constexpr int64_t kSpareThreads = 8;
  constexpr int64_t kSpareDescriptors = 4;
  Daemon daemon;
  const Model model = MixedModel();
  Holder bystander(daemon.Connect(),
                   RawEngine::Hello("g", "bystander", 0, 1, v1::DELIVERY_IN_PLACE, Spec(2)),
                   HoldWhole(model));
  const auto batch = [&] {
    std::vector<std::unique_ptr<MemberProcess>> members;
    for (int i = 0; i < kAtATime; ++i) {
      const std::string n = std::to_string(i);
      // A batch is two trainers with a region each, four in-place engines (two of them one
      // instance), and two loader engines.
      if (i < 2) {
        members.push_back(std::make_unique<MemberProcess>(
            daemon, "trainer", std::vector<std::string>{"trainers=2", "rank=" + n}));
      } else if (i < 4) {
        members.push_back(std::make_unique<MemberProcess>(
            daemon, "engine",
            std::vector<std::string>{"trainers=2", "instance=pair", "world=2",
                                     "rank=" + std::to_string(i - 2)}));
      } else {
        members.push_back(std::make_unique<MemberProcess>(
            daemon, "engine",
            std::vector<std::string>{"trainers=2", "instance=e" + n,
                                     i < 6 ? "delivery=in_place" : "delivery=loader"}));
      }
      members.back()->Send("attach");
    }
    for (const auto& member : members) REQUIRE_THAT(member->Answer(), Catch::StartsWith("ok"));
    // The members are in an update, in which they die.
    members[0]->Send("begin 1000000");
    members[1]->Send("begin 1000000");
    REQUIRE_THAT(members[2]->Do("prepare"), Catch::StartsWith("ok"));
    CHECK(daemon.Resources().members() == kAtATime + 1);
    for (const auto& member : members) member->Kill();
    REQUIRE(Eventually([&] { return daemon.Resources().members() == 1; }));
    REQUIRE(Eventually([&] { return daemon.Resources().regions() == 1; }));
  };
  batch();  // in this batch the daemon makes what it makes only once
  const auto settled = [&](const v1::ResourceStatus& baseline, int mappings) {
    const v1::ResourceStatus now = daemon.Resources();
    return now.descriptors() <= baseline.descriptors() + kSpareDescriptors &&
           now.threads() <= baseline.threads() + kSpareThreads &&
           now.region_bytes() == baseline.region_bytes() && daemon.MemfdMappings() <= mappings;
  };
  v1::ResourceStatus baseline = daemon.Resources();
  // Sockets of the first batch may still be closing: the baseline is taken when the count is
  // stable.
  REQUIRE(Eventually([&] {
    const v1::ResourceStatus now = daemon.Resources();
    const bool stays = now.descriptors() == baseline.descriptors();
    baseline = now;
    return stays;
  }));
  const int mappings = daemon.MemfdMappings();
  CHECK(mappings == 1);  // the region of the bystander
  for (int done = kAtATime; done < kCycles; done += kAtATime) batch();
  const bool clean = Eventually([&] { return settled(baseline, mappings); });
  const v1::ResourceStatus now = daemon.Resources();
  INFO("descriptors " << baseline.descriptors() << " -> " << now.descriptors() << ", mappings "
                      << mappings << " -> " << daemon.MemfdMappings() << ", threads "
                      << baseline.threads() << " -> " << now.threads());
  CHECK(clean);
  CHECK(now.members() == 1);
  CHECK(daemon.Group("g").instances_size() == 1);
  CHECK(bystander.DifferenceFromEmpty() == "");
  CHECK(daemon.Stop() == 0);
}

TEST_CASE("1,000 updates of a small model do not grow the daemon") {
  // Allocators keep some memory; a leak of one bucket's metadata for each update would be several
  // times this.
  constexpr int64_t kSpareBytes = int64_t{1} << 20;
  const Model model = MixedModel();
  Daemon daemon;
  Holder registered(daemon.Connect(), RawEngine::Hello("g", "in_place"), HoldWhole(model));
  v1::EngineHello hello = RawEngine::Hello("g", "loader", 0, 1, v1::DELIVERY_LOADER);
  RawEngine loader(daemon.Connect(), hello);
  REQUIRE(loader.attached().ok());
  RawTrainer trainer(daemon.Connect(), RawTrainer::Hello("g"));
  REQUIRE(trainer.attached().ok());
  const std::vector<std::string> bytes = BytesOf(model, 1);
  const v1::Bucket bucket = InlineBucket(model, bytes, 0, true);
  int64_t version = 0;
  const auto update_until = [&](int64_t last) {
    while (version < last) {
      ++version;
      v1::BeginRequest begin;
      begin.set_version(version);
      begin.set_request_id("begin-" + std::to_string(version));
      begin.set_tensor_count(static_cast<int64_t>(model.size()));
      REQUIRE_OK(trainer.Begin(begin));
      // Every tenth update is aborted after half of its bytes.
      if (version % 10 == 0) {
        REQUIRE_OK(trainer.Push(version, InlineBucket(model, bytes, 0, true, {0, 1})));
        REQUIRE_OK(trainer.Abort(version, "for a change"));
        continue;
      }
      REQUIRE_OK(trainer.Push(version, bucket, "push-" + std::to_string(version)));
      REQUIRE_OK(trainer.Commit(version, 1, "commit-" + std::to_string(version)));
    }
    return daemon.Resources().anonymous_bytes();
  };
  const int64_t warm = update_until(300);
  const v1::ResourceStatus before = daemon.Resources();
  const int64_t after = update_until(1000);
  INFO("anonymous bytes " << warm << " after 300 updates, " << after << " after 1,000");
  CHECK(after <= warm + kSpareBytes);
  CHECK(after <= int64_t{64} << 20);
  CHECK(Eventually([&] { return daemon.Resources().descriptors() <= before.descriptors(); }));
  CHECK(daemon.Resources().regions() == 1);
  CHECK(daemon.Group("g").updates_committed() == 900);
  CHECK(daemon.Group("g").updates_aborted() == 100);
}

}  // namespace
}  // namespace refitd::e2e
