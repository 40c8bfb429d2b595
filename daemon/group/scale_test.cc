// Counts work under a daemon's mutex that must not grow with the group (tests/bench/scale_bench
// measures its time).
#include <catch2/catch.hpp>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/group/catalog.h"
#include "daemon/group/coordinator.h"
#include "daemon/group/follower.h"
#include "daemon/group/group_test_util.h"
#include "daemon/group/program_on_nodes.h"
#include "daemon/group/push.h"
#include "daemon/group/tensor_table.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

using coordinator::StreamEnds;
using group::AckClock;
using group::Catalog;
using group::TensorTable;

// ---- streams ----

TEST_CASE("Comparing the ends of a program's streams costs what the nodes tell, not their square") {
  constexpr uint32_t kSources = 8;
  constexpr uint32_t kNodes = 1000;
  const auto digest = [](uint32_t from, uint32_t to) { return uint64_t{from} * kNodes + to + 1; };
  StreamEnds ends;
  int64_t told = 0;
  for (uint32_t node = 0; node < kNodes; ++node) {
    std::vector<PeerStream> streams;
    for (uint32_t peer = 0; peer < kNodes; ++peer) {
      if ((node < kSources) == (peer < kSources)) continue;
      const bool sends = node < kSources;
      streams.push_back({peer, sends ? digest(node, peer) : 0, sends ? 0 : digest(peer, node)});
    }
    told += static_cast<int64_t>(streams.size());
    ends.Add(node, streams);
  }
  CHECK_FALSE(ends.FirstDifference().has_value());
  CHECK(ends.looked_at() <= told);
}

TEST_CASE(
    "A stream whose ends differ is found, whichever end is reported first or lists it at all") {
  using Pair = std::pair<uint32_t, uint32_t>;
  const PeerStream to_two{2, 7, 0};
  const PeerStream from_one{1, 0, 7};
  {
    StreamEnds ends;
    ends.Add(1, {to_two});
    CHECK_FALSE(ends.FirstDifference().has_value());  // the other end was not reported
    ends.Add(2, {from_one});
    CHECK_FALSE(ends.FirstDifference().has_value());
    ends.Add(2, {{1, 0, 8}});
    CHECK(ends.FirstDifference() == Pair(1, 2));
    ends.Forget(2);
    CHECK_FALSE(ends.FirstDifference().has_value());
  }
  {
    StreamEnds ends;
    ends.Add(1, {to_two});
    ends.Add(2, {});
    CHECK(ends.FirstDifference() == Pair(1, 2));
  }
  {
    StreamEnds ends;
    ends.Add(2, {});
    ends.Add(1, {to_two, {3, 5, 5}});
    ends.Add(3, {{1, 5, 5}, {0, 9, 0}});
    CHECK(ends.FirstDifference() == Pair(1, 2));
    ends.Forget(1);
    ends.Add(0, {});
    CHECK(ends.FirstDifference() == Pair(3, 0));
  }
}

// ---- acknowledgements ----

TEST_CASE("An acknowledgement looks at its own reader, however many loader readers there are") {
  constexpr uint64_t kReaders = 4096;
  const TimePoint start{std::chrono::hours(1)};
  AckClock clock;
  for (uint64_t r = 1; r <= kReaders; ++r) {
    clock.Set(MemberId(r), start + std::chrono::milliseconds(r));
  }
  const int64_t before = clock.looked_at();
  clock.Set(MemberId(1), std::nullopt);
  CHECK(clock.First()->second == MemberId(2));
  clock.Set(MemberId(2), start + std::chrono::hours(1));
  CHECK(clock.First()->second == MemberId(3));
  CHECK(clock.looked_at() - before == 4);
  for (uint64_t r = 1; r <= kReaders; ++r) clock.Set(MemberId(r), std::nullopt);
  CHECK(clock.nobody_owes());
}

// ---- catalogues ----

std::vector<TensorSpec> Tensors(int count) {
  std::vector<TensorSpec> tensors;
  for (int t = 0; t < count; ++t) tensors.push_back(Bytes(fmt::format("t{}", t), 8));
  return tensors;
}

// `instances` instances of `layouts.size()` ranks each.
std::vector<Catalog::Rank> Ranks(int instances,
                                 const std::vector<std::shared_ptr<const Layout>>& layouts) {
  std::vector<Catalog::Rank> ranks;
  for (int i = 0; i < instances; ++i) {
    for (const auto& layout : layouts) {
      ranks.push_back({MemberId(ranks.size() + 1), fmt::format("rank {}", ranks.size()),
                       static_cast<uint32_t>(i), DeliveryMode::kInPlace, layout, nullptr});
    }
  }
  return ranks;
}
std::vector<std::string> Names(int count) {
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.push_back(fmt::format("engine-{}", i));
  return names;
}

TEST_CASE("A catalogue made anew after a membership change looks up no tensor that it knows") {
  constexpr int kTensors = 100;
  constexpr int kRanks = 8;
  std::vector<std::shared_ptr<const Layout>> layouts;
  for (int r = 0; r < kRanks; ++r) layouts.push_back(LayoutOf(Tensors(kTensors), r, kRanks));
  const auto table = std::make_shared<TensorTable>(std::vector<std::string>());
  auto first = Catalog::Make(Ranks(64, layouts), Names(64), table);
  REQUIRE(first.ok());
  CHECK(table->looked_up() == kRanks * kTensors);
  auto second = Catalog::Make(Ranks(63, layouts), Names(63), table);
  REQUIRE(second.ok());
  CHECK(table->looked_up() == kRanks * kTensors);
  // A new layout costs its own tensors only.
  layouts.back() = LayoutOf(Tensors(kTensors), kRanks - 1, kRanks);
  REQUIRE(Catalog::Make(Ranks(63, layouts), Names(63), table).ok());
  CHECK(table->looked_up() == (kRanks + 1) * kTensors);
}

TEST_CASE("A tensor table forgets the layouts that nobody has any more") {
  TensorTable table({});
  for (int i = 0; i < 100; ++i) table.Add(LayoutOf({Bytes(fmt::format("t{}", i), 8)}));
  CHECK(table.tensors().size() <= 2);
  CHECK(table.lists() <= 2);
}

TEST_CASE("A tensor is found by its name when the list whose name it was entered by is gone") {
  TensorTable table({});
  auto first = LayoutOf({Bytes("both", 8), Bytes("first", 8)});
  const auto second = LayoutOf({Bytes("both", 8), Bytes("second", 8)});
  table.Add(first);
  const TensorTable::ListId stays = table.Add(second);
  first.reset();                             // the list's names are freed with it
  table.Add(LayoutOf({Bytes("third", 8)}));  // removes what nobody has any more
  CHECK(table.Find("first") == nullptr);
  const TensorTable::Uses* both = table.Find("both");
  REQUIRE(both != nullptr);
  REQUIRE(both->size() == 1);
  CHECK(both->front().list == stays);
  std::set<std::string> names;
  for (const auto& [name, uses] : table.tensors()) names.emplace(name.data(), name.size());
  CHECK(names == std::set<std::string>{"both", "second", "third"});
  // The key is the name in the list that stayed.
  CHECK(table.tensors().find("both")->first.data() == second->tensors[0].name.data());
}

TEST_CASE("What is derived from a tensor is found while a list has it") {
  const auto derived = [](const std::string& name) {
    TensorSpec tensor = Bytes(name, 8);
    tensor.derived = std::make_shared<const Derivation>(Derivation{Bytes("source", 8)});
    return tensor;
  };
  TensorTable table({});
  auto first = LayoutOf({derived("a"), derived("b")});
  auto second = LayoutOf({derived("b"), derived("c"), Bytes("d", 8)});
  table.Add(first);
  const TensorTable::ListId stays = table.Add(second);
  REQUIRE(table.FindDerived("source") != nullptr);
  CHECK(table.FindDerived("source")->size() == 4);
  first.reset();
  table.Add(LayoutOf({Bytes("e", 8)}));  // removes what nobody has any more
  const TensorTable::Uses* const uses = table.FindDerived("source");
  REQUIRE(uses != nullptr);
  std::vector<std::string> names;
  for (const TensorTable::Use& use : *uses) {
    CHECK(use.list == stays);
    names.push_back(table.spec(use).name);
  }
  CHECK(names == std::vector<std::string>{"b", "c"});
  second.reset();
  table.Add(LayoutOf({Bytes("f", 8)}));
  CHECK(table.FindDerived("source") == nullptr);
  CHECK_FALSE(table.any_derived());
}

TEST_CASE("Names that ranks disagree about were kept once more") {
  TensorTable table({});
  auto first = LayoutOf({Bytes("t", 16)});
  const auto second = LayoutOf({Bytes("t", 8)});
  table.Add(first);
  table.Add(second);
  REQUIRE(table.mixed().size() == 1);
  CHECK(table.mixed().begin()->data() == first->tensors[0].name.data());
  first.reset();
  table.Add(LayoutOf({Bytes("other", 8)}));  // removes what nobody has any more
  REQUIRE(table.mixed().size() == 1);
  CHECK(table.mixed().begin()->data() == second->tensors[0].name.data());
}

TEST_CASE("A layout that is gone disagrees with nobody") {
  const auto table = std::make_shared<TensorTable>(std::vector<std::string>());
  auto wide = LayoutOf({Bytes("t", 16)});
  const auto narrow = LayoutOf({Bytes("t", 8)});
  std::vector<Catalog::Rank> ranks = Ranks(1, {wide, narrow});
  const absl::Status differ = Catalog::Make(ranks, Names(1), table).status();
  CHECK(differ.code() == absl::StatusCode::kFailedPrecondition);
  CHECK(Message(differ) == "tensor 't': rank 1 declares uint8 [8], but rank 0 declared uint8 [16]");
  // The wide layout is still in the table, but no rank of the catalog has it.
  const auto alone = Catalog::Make(Ranks(1, {narrow}), Names(1), table);
  REQUIRE(alone.ok());
  CHECK((*alone)->Check(Bytes("t", 8), {false}).ok());
  CHECK_FALSE((*alone)->Check(Bytes("t", 16), {false}).ok());
}

TEST_CASE("Counting what an update must bring looks at no tensor that all ranks want") {
  constexpr int kTensors = 100;
  const auto table = std::make_shared<TensorTable>(std::vector<std::string>{"t3", "other"});
  auto layout = std::make_shared<Layout>(*LayoutOf(Tensors(kTensors), 0, 2));
  layout->tensors.push_back(Bytes("tied", 8));  // known by name alone
  std::vector<std::shared_ptr<const Layout>> layouts = {layout, LayoutOf(Tensors(kTensors), 1, 2)};
  const auto all = Catalog::Make(Ranks(2, layouts), Names(2), table);
  REQUIRE(all.ok());
  CHECK((*all)->wanted_count() == kTensors - 1);
  CHECK((*all)->looked_at() == 3);  // "tied", "t3" and "other"
  // The table has a list that no rank of the catalogue has, so every tensor is looked at.
  const auto half = Catalog::Make(Ranks(2, {layouts.back()}), Names(2), table);
  REQUIRE(half.ok());
  CHECK((*half)->wanted_count() == kTensors - 1);
  CHECK((*half)->looked_at() == kTensors + 1);
}

TEST_CASE("Which ranks a part touches is found once for ranks with one layout") {
  const auto table = std::make_shared<TensorTable>(std::vector<std::string>());
  const std::vector<std::shared_ptr<const Layout>> halves = {LayoutOf(Tensors(2), 0, 2),
                                                             LayoutOf(Tensors(2), 1, 2)};
  const auto catalog = Catalog::Make(Ranks(3, halves), Names(3), table);
  REQUIRE(catalog.ok());
  BucketDraft draft;
  draft.Add(Bytes("t1", 8), 5, 3);  // elements 5 to 7, which the upper half has
  const PartContent content = WholeBucket(BucketEvent(draft).bucket);
  CHECK((*catalog)->Touched(content, std::vector<bool>(6)) == std::vector<uint32_t>{1, 3, 5});
  CHECK((*catalog)->Touched(content, {false, true, false, false, false, false}) ==
        std::vector<uint32_t>{3, 5});
}

// ---- a coordinator of many daemons ----

constexpr int kManyNodes = 200;
constexpr MemberId kTrainer{1};

// A trainer rank here, and an instance of one rank on each joined daemon.
class Many {
 public:
  Many() : coordinator_(Options()) {
    Do(GroupEvent(TrainerAttached{kTrainer, {0, 1, 100, {}, ""}}));
    for (int n = 1; n <= kManyNodes; ++n) {
      const NodeId node(static_cast<uint64_t>(n));
      Do(NodeJoined{node, fmt::format("n{}", n), "elsewhere"});
      EngineIdentity engine;
      engine.instance = fmt::format("i{:03}", n);
      Do(ReportReceived{node, PeerAttach{MemberId(7), engine}});
      PeerLayout layout;
      layout.member = MemberId(7);
      layout.layout = LayoutOf(Tensors(3));  // an object of its own
      layout.call = CallId(1);
      Do(ReportReceived{node, std::move(layout)});
    }
  }

  void Do(MachineEvent event) {
    actions.clear();
    coordinator_.Handle(event, now_, &actions);
  }
  template <typename Action>
  std::vector<Action> Local() const {
    std::vector<Action> found;
    for (const MachineAction& outer : actions) {
      if (const auto* group = std::get_if<GroupAction>(&outer)) {
        if (const auto* a = std::get_if<Action>(group)) found.push_back(*a);
      }
    }
    return found;
  }
  template <typename Command>
  std::vector<std::pair<NodeId, Command>> Sent() const {
    std::vector<std::pair<NodeId, Command>> found;
    for (const MachineAction& outer : actions) {
      const auto* peer = std::get_if<PeerAction>(&outer);
      const auto* send = peer == nullptr ? nullptr : std::get_if<SendCommand>(peer);
      if (send == nullptr) continue;
      if (const auto* c = std::get_if<Command>(&send->command)) found.emplace_back(send->node, *c);
    }
    return found;
  }
  // Asks for a plan and compiles it.
  RefitPlanned Compile() {
    Do(GroupEvent(LayoutRegistered{kTrainer, LayoutOf(Tensors(3))}));
    RefitEvent refit;
    refit.call = CallId(1);
    refit.member = kTrainer;
    refit.version = Version(1);
    Do(GroupEvent(refit));
    const PlanRefit compile = Local<PlanRefit>().at(0);
    std::set<const Layout*> layouts;
    for (const RouteMember& member : compile.destinations) layouts.insert(member.layout.get());
    distinct_layouts = layouts.size();
    options = compile.options;
    auto plan = CompileRefit(compile.sources, compile.destinations, compile.options);
    REQUIRE(plan.ok());
    return {compile.program, absl::OkStatus(), *plan};
  }

  const Coordinator& coordinator() const { return coordinator_; }

  MachineActions actions;  // of the last event
  size_t distinct_layouts = 0;
  RouteOptions options;  // of the last plan

 private:
  CoordinatorOptions Options() {
    CoordinatorOptions options;
    options.name = "g";
    options.daemon_id = "b";
    options.incarnation = 7;
    options.spec = TestGroup::DefaultSpec();
    options.next_update = [this] { return UpdateId(++ids_); };
    options.next_member = [this] { return MemberId(1000 + ++ids_); };
    options.next_call = [this] { return CallId(1000 + ++ids_); };
    return options;
  }

  uint64_t ids_ = 0;
  TimePoint now_{std::chrono::hours(1)};
  Coordinator coordinator_;
};

TEST_CASE("A plan is handed out to some daemons at a time, and no part of it made in the event") {
  Many many;
  many.Do(GroupEvent(many.Compile()));
  auto sent = many.Sent<PeerProgram>();
  const size_t at_once = sent.size();
  CHECK(at_once > 0);
  CHECK(at_once <= 64);
  std::set<NodeId> told;
  while (!sent.empty()) {
    const auto [node, program] = sent.back();
    sent.pop_back();
    CHECK(program.plan == nullptr);
    CHECK(program.whole != nullptr);
    CHECK(program.local_layouts.size() == 1);
    CHECK(told.insert(node).second);
    PeerProgramBuilt built;
    built.update = program.update;
    built.rounds = 1;
    many.Do(ReportReceived{node, built});
    for (auto& next : many.Sent<PeerProgram>()) sent.push_back(std::move(next));
    CHECK(sent.size() <= at_once);
  }
  CHECK(told.size() == kManyNodes);
}

TEST_CASE("A daemon that is lost while it has the plan makes room for the next") {
  Many many;
  many.Do(GroupEvent(many.Compile()));
  const auto sent = many.Sent<PeerProgram>();
  many.Do(NodeLost{sent.at(0).first, "gone"});
  CHECK(many.Sent<PeerProgram>().size() == 1);
}

TEST_CASE("Equal layouts of other daemons' engines are one object, and planned as one") {
  Many many;
  many.Compile();
  CHECK(many.distinct_layouts == 1);
}

TEST_CASE("A layout that its daemon found equal to a known one is not compared again") {
  Many many;
  // The reports were handed in as they came.
  CHECK(many.coordinator().layouts_compared() == kManyNodes - 1);
  const NodeId node(5);
  PeerLayout again;
  again.member = MemberId(7);
  again.layout = LayoutOf(Tensors(3));
  again.digest = again.layout->Digest();
  again.call = CallId(2);
  const std::shared_ptr<const Layout> known = many.coordinator().KnownLayout(node, again);
  REQUIRE(known != nullptr);
  CHECK(SameStructure(*known, *again.layout));
  again.layout = known;
  many.Do(ReportReceived{node, again});
  CHECK(many.coordinator().layouts_compared() == kManyNodes - 1);
  // A trainer's layout stays an object of its own: a new registration is known by it.
  many.Do(ReportReceived{node, PeerAttach{MemberId(8), TrainerIdentity{1, 2, 100, {}, ""}}});
  again.member = MemberId(8);
  CHECK(many.coordinator().KnownLayout(node, again) == nullptr);
}

TEST_CASE("What a plan moves and leaves out is counted by the planner, not in an event") {
  Many many;
  const RefitPlanned compiled = many.Compile();
  CHECK(compiled.plan->content.tensors == 3);
  CHECK(compiled.plan->content.bytes == 24);
  CHECK(compiled.plan->content.unwanted.empty());
  // The action names what the spec allows, and no tensor of the trainers.
  CHECK(many.options.unwanted_allowed.empty());
}

// ---- a joined daemon ----

TEST_CASE("A joined daemon makes no index of its ranks' tensors under its mutex") {
  FollowerOptions options;
  options.name = "g";
  uint64_t updates = 0;
  options.next_update = [&updates] { return UpdateId(++updates); };
  Follower follower(std::move(options));
  const TimePoint now{std::chrono::hours(1)};
  MachineActions actions;
  const auto take = [&](PeerCommand command) {
    actions.clear();
    follower.Handle(CommandReceived{std::move(command)}, now, &actions);
  };
  LinkUp up;
  up.spec = TestGroup::DefaultSpec();
  follower.Handle(up, now, &actions);
  PeerPrepare prepare;
  prepare.update = UpdateId(1);
  prepare.remaining = std::chrono::seconds(60);
  const auto layout = LayoutOf(Tensors(3));
  for (uint64_t m = 1; m <= 4; ++m) {
    EngineIdentity engine;
    engine.instance = fmt::format("i{}", m);
    follower.Handle(GroupEvent(EngineAttached{MemberId(m), engine}), now, &actions);
    follower.Handle(GroupEvent(LayoutRegistered{MemberId(m), layout, CallId(m)}), now, &actions);
    take(Reply{CallId(m), absl::OkStatus(), EmptyReply{}});
    prepare.engines.push_back(MemberId(m));
    prepare.destinations.push_back(MemberId(m));
    prepare.layout_digests.push_back(layout->Digest());
  }
  const auto layouts = follower.LayoutsToIndex(prepare);
  REQUIRE(layouts.size() == 4);
  const auto index = Follower::MakeIndex(prepare.destinations, layouts);
  REQUIRE(index.ok());
  prepare.index = *index;
  take(prepare);
  CHECK(follower.indices_made() == 0);
  CHECK(index->use_count() > 2);  // the follower kept it
  // No index has to be made while the layouts stay the same.
  PeerUpdateEnded ended;
  ended.update = UpdateId(1);
  take(ended);
  prepare.update = UpdateId(2);
  prepare.index = nullptr;
  CHECK(follower.LayoutsToIndex(prepare).empty());
  take(prepare);
  CHECK(follower.indices_made() == 0);
  ended.update = UpdateId(2);
  take(ended);
  // A rank registered anew after the index was made, so the follower makes an index of its own.
  take(SendCommitted{MemberId(4), Version(1)});
  follower.Handle(GroupEvent(LayoutRegistered{MemberId(4), LayoutOf(Tensors(3)), CallId(9)}), now,
                  &actions);
  take(Reply{CallId(9), absl::OkStatus(), EmptyReply{}});
  prepare.update = UpdateId(3);
  prepare.index = *index;
  take(prepare);
  CHECK(follower.indices_made() == 1);
}

// ---- a coordinator of many daemons, once more ----

TEST_CASE("All daemons are sent one list of a communicator's addresses, not each a copy") {
  Many many;
  many.Do(GroupEvent(many.Compile()));
  CommunicatorId communicator;
  std::vector<NodeId> nodes;
  for (const auto& [node, open] : many.Sent<OpenCommunicator>()) {
    communicator = open.communicator;
    nodes.push_back(node);
  }
  many.Do(CommunicatorOpened{communicator, absl::OkStatus(), "here"});
  for (const NodeId node : nodes) {
    many.Do(ReportReceived{node, CommunicatorOpened{communicator, absl::OkStatus(), "there"}});
  }
  std::set<const void*> lists;
  const auto connects = many.Sent<PeerCommunicatorConnect>();
  for (const auto& [node, connect] : connects) {
    lists.insert(connect.addresses.get());
    REQUIRE(connect.coordinator_rank.has_value());
    CHECK(connect.addresses->at(*connect.coordinator_rank) == "here");
  }
  CHECK(connects.size() == kManyNodes);
  CHECK(lists.size() == 1);
}

}  // namespace
}  // namespace refitd
