#include "transport/plan/node_program.h"

#include <catch2/catch.hpp>
#include <cstring>
#include <functional>
#include <map>
#include <set>

#include "transport/base/status.h"
#include "transport/plan/route_testing.h"

namespace refitd {
namespace {

using Catch::Matchers::Contains;

// One daemon of a simulated set, with its program and with layouts in an order of its own.
struct Node {
  NodeProgram program;
  std::vector<uint32_t> source_of;       // world's index of each local source
  std::vector<uint32_t> destination_of;  // the same
};

struct Cluster {
  RouteWorld world;
  RoutePlan plan;
  std::vector<Node> nodes;
  int64_t round_bytes = 0;  // the most that a node may send in a round, with chains
  // For each destination, how often each byte address was written.
  std::vector<std::map<int64_t, int>> writes;
};

Node MakeNode(Rng* rng, const RouteWorld& world, const RoutePlan& plan, uint32_t n,
              const NodeProgramOptions& options) {
  Node node;
  std::vector<LocalMember> sources;
  std::vector<LocalMember> destinations;
  const auto collect = [&](const std::vector<RouteMember>& members, bool skipping,
                           std::vector<LocalMember>* local, std::vector<uint32_t>* of) {
    for (uint32_t i = 0; i < members.size(); ++i) {
      if (members[i].node != n || (skipping && plan.destination_skipped[i])) continue;
      const int device = static_cast<int>(Below(rng, 4)) - 1;
      local->push_back({i, Shuffled(rng, *members[i].layout), device});
    }
    std::shuffle(local->begin(), local->end(), *rng);
    for (const LocalMember& member : *local) of->push_back(member.rank);
  };
  collect(world.source_members, false, &sources, &node.source_of);
  collect(world.destination_members, true, &destinations, &node.destination_of);
  auto program = CompileNode(plan, n, std::move(sources), std::move(destinations), options);
  INFO(program.status());
  REQUIRE(program.ok());
  node.program = *std::move(program);
  return node;
}

Cluster MakeCluster(Rng* rng, const RouteOptions& options, int64_t chunk_bytes, int64_t most = 4) {
  Cluster cluster;
  cluster.world = RandomRouteWorld(rng, most);
  auto plan =
      CompileRoutes(cluster.world.source_members, cluster.world.destination_members, options);
  INFO(plan.status());
  REQUIRE(plan.ok());
  cluster.plan = *std::move(plan);
  NodeProgramOptions node_options;
  node_options.chunk_bytes =
      cluster.plan.relay.lag > 0
          ? std::max(chunk_bytes, MinRelayRoundBytes(cluster.plan.relay.node_streams))
          : chunk_bytes;
  cluster.round_bytes = node_options.chunk_bytes * (int64_t{cluster.plan.nodes} - 1);
  for (uint32_t n = 0; n < cluster.plan.nodes; ++n) {
    cluster.nodes.push_back(MakeNode(rng, cluster.world, cluster.plan, n, node_options));
  }
  cluster.writes.resize(cluster.world.destinations.size());
  return cluster;
}

// Copies a box element by element; counts writes.
void CopyBox(const Box& box, int64_t element_bytes, const std::string& from, int64_t from_at,
             const Dims& from_strides, std::string* to, int64_t to_at, const Dims& to_strides,
             std::map<int64_t, int>* writes) {
  ForEach(box, [&](const Dims& at) {
    int64_t source = from_at;
    int64_t target = to_at;
    for (size_t d = 0; d < at.size(); ++d) {
      source += (at[d] - box.offset[d]) * from_strides[d] * element_bytes;
      target += (at[d] - box.offset[d]) * to_strides[d] * element_bytes;
    }
    REQUIRE(source >= 0);
    REQUIRE(source + element_bytes <= static_cast<int64_t>(from.size()));
    REQUIRE(target >= 0);
    REQUIRE(target + element_bytes <= static_cast<int64_t>(to->size()));
    std::memcpy(to->data() + target, from.data() + source, static_cast<size_t>(element_bytes));
    if (writes != nullptr) ++(*writes)[target];
  });
}

void RunLocal(Cluster* cluster, const Node& node) {
  for (const CopyMove& move : node.program.local.moves) {
    const uint32_t from = node.source_of[move.source];
    const uint32_t to = node.destination_of[move.destination];
    const Layout& layout = *node.program.sources[move.source].layout;
    const Piece& source = layout.pieces[move.source_piece];
    const Piece& target =
        node.program.destinations[move.destination].layout->pieces[move.destination_piece];
    CopyBox(move.box, ElementBytes(layout.tensors[source.tensor].dtype),
            cluster->world.sources[from].memory, move.source_byte_offset, source.strides,
            &cluster->world.destinations[to].memory, move.destination_byte_offset, target.strides,
            &cluster->writes[to]);
  }
}

// The course of each node of the plan.
using Courses = std::vector<RunCourse>;

// Runs the streams round by round between the nodes; `tamper` may spoil a chunk on its way. Returns
// what is wrong about the exchange itself.
//
// A node has `lag` slots to receive into, which rounds use in turn; what a round forwards is read
// from its slot before the round receives into it. A slot that is received into loses what it had.
std::string RunRounds(
    Cluster* cluster, const std::function<void(std::string*)>& tamper = [](std::string*) {},
    const NodeProgram::Gone& gone = {}, const Courses* courses = nullptr, int64_t end = -1) {
  int64_t wire = 0;
  const auto is_gone = [&gone](uint32_t node) { return node < gone.size() && gone[node]; };
  const size_t slots = std::max<uint32_t>(cluster->nodes[0].program.lag, 1);
  // in_slots[node][slot] has the bytes of a slot.
  std::vector<std::vector<std::string>> in_slots(cluster->nodes.size(),
                                                 std::vector<std::string>(slots));
  const auto course_of = [&](const Node& node) {
    return courses == nullptr ? RunCourse(gone) : (*courses)[node.program.node];
  };
  const int64_t first = courses == nullptr ? 0 : courses->front().first;
  if (end < 0) end = cluster->nodes[0].program.rounds;
  for (int64_t round = first; round < end; ++round) {
    const size_t slot = static_cast<size_t>(round) % slots;
    std::map<std::pair<uint32_t, uint32_t>, std::string> chunks;
    std::vector<std::vector<RoundLeg>> legs;
    for (const Node& node : cluster->nodes) {
      if (is_gone(node.program.node)) {
        legs.emplace_back();
        continue;
      }
      legs.push_back(node.program.Round(round, course_of(node)));
      int64_t in_all = 0;
      for (const RoundLeg& leg : legs.back()) in_all += leg.bytes_out;
      if (cluster->plan.relay.lag > 0 && in_all > cluster->round_bytes) return "a slot overflows";
      for (const RoundLeg& leg : legs.back()) {
        if (leg.bytes_out == 0 || is_gone(leg.peer)) continue;
        std::string& chunk = chunks[{node.program.node, leg.peer}];
        chunk.assign(static_cast<size_t>(leg.bytes_out), '\xee');
        std::map<int64_t, int> packed;
        for (const ChunkMove& move : leg.pack) {
          const uint32_t from = node.source_of[move.member];
          const Piece& piece = node.program.sources[move.member].layout->pieces[move.piece];
          CopyBox(move.box, move.element_bytes, cluster->world.sources[from].memory,
                  move.member_byte_offset, piece.strides, &chunk, move.chunk_byte_offset,
                  move.chunk_strides, &packed);
        }
        const std::string& received = in_slots[node.program.node][slot];
        for (const Forward& forward : leg.forwards) {
          if (forward.slot_byte_offset + forward.bytes > static_cast<int64_t>(received.size())) {
            return "something is forwarded that is not there";
          }
          for (int64_t i = 0; i < forward.bytes; ++i) {
            ++packed[forward.chunk_byte_offset + i];
            chunk[static_cast<size_t>(forward.chunk_byte_offset + i)] =
                received[static_cast<size_t>(forward.slot_byte_offset + i)];
          }
        }
        for (const auto& [at, times] : packed) {
          if (times != 1) return "a chunk is packed twice at one place";
        }
        tamper(&chunk);
      }
    }
    size_t received = 0;
    for (const Node& node : cluster->nodes) {
      if (is_gone(node.program.node)) continue;
      const std::vector<ExchangeLeg> places = node.program.Legs(round, course_of(node));
      std::string& in_slot = in_slots[node.program.node][slot];
      in_slot.assign(places.empty()
                         ? 0
                         : static_cast<size_t>(places.back().in_offset + places.back().bytes_in),
                     '\xdd');
      for (size_t l = 0; l < places.size(); ++l) {
        const RoundLeg& leg = legs[node.program.node][l];
        if (leg.bytes_in == 0 || is_gone(leg.peer)) continue;
        const auto chunk = chunks.find({leg.peer, node.program.node});
        if (chunk == chunks.end()) return "a chunk is expected that nobody sends";
        if (static_cast<int64_t>(chunk->second.size()) != leg.bytes_in) return "sizes disagree";
        ++received;
        in_slot.replace(static_cast<size_t>(places[l].in_offset), chunk->second.size(),
                        chunk->second);
        for (const ChunkBox& box : leg.received) {
          const Stream& stream = node.program.incoming[box.stream];
          wire += ElementCount(box.box) * stream.sections[box.section].element_bytes;
        }
        if (!leg.unpack.empty() && !node.program.Unpacks(round, course_of(node))) {
          return "something is unpacked in a round that unpacks nothing";
        }
        for (const ChunkMove& move : leg.unpack) {
          const uint32_t to = node.destination_of[move.member];
          const Piece& piece = node.program.destinations[move.member].layout->pieces[move.piece];
          CopyBox(move.box, move.element_bytes, chunk->second, move.chunk_byte_offset,
                  move.chunk_strides, &cluster->world.destinations[to].memory,
                  move.member_byte_offset, piece.strides, &cluster->writes[to]);
        }
      }
    }
    if (received != chunks.size()) return "a chunk is sent that nobody expects";
  }
  for (const Node& node : cluster->nodes) {
    if (!node.program.Round(node.program.rounds).empty()) return "there is one more round";
  }
  if (!gone.empty() || courses != nullptr) return "";
  return wire == cluster->plan.wire_bytes ? "" : "the wire carried another number of bytes";
}

// Returns the first fault of the destinations' bytes, or an empty string.
std::string ByteFault(Cluster* cluster, const NodeProgram::Gone& gone = {}) {
  for (size_t d = 0; d < cluster->world.destinations.size(); ++d) {
    const Side& side = cluster->world.destinations[d];
    size_t expected = 0;
    for (const Piece& piece : side.layout.pieces) {
      const uint32_t node = cluster->plan.destination_nodes[d];
      if (cluster->plan.destination_skipped[d] || (node < gone.size() && gone[node])) break;
      const TensorSpec& spec = side.layout.tensors[piece.tensor];
      const int64_t bytes = ElementBytes(spec.dtype);
      std::string fault;
      ForEach(piece.box, [&](const Dims& at) {
        const int64_t address = Address(piece, at, bytes);
        const std::string bits = Bits(piece.tensor, GlobalIndex(at, spec.shape), bytes);
        if (side.memory.compare(static_cast<size_t>(address), bits.size(), bits) != 0) {
          fault = spec.name + " has a wrong byte";
        }
        if (cluster->writes[d][address] != 1) fault = spec.name + " is not written once";
        ++expected;
      });
      if (!fault.empty()) return fault;
    }
    if (cluster->writes[d].size() != expected) return "something else is written";
  }
  return {};
}

// Returns the first difference between a stream's two ends, or an empty string.
std::string StreamFault(const Cluster& cluster) {
  size_t sent = 0;
  size_t expected = 0;
  for (const Node& from : cluster.nodes) {
    if (from.program.rounds != cluster.nodes[0].program.rounds) return "rounds differ";
    expected += from.program.incoming.size();
    for (const auto& [peer, streams] : from.program.StreamsByReceiver()) {
      const NodeProgram& to = cluster.nodes[peer].program;
      const auto ends = to.StreamsBySender();
      const auto end = ends.find(from.program.node);
      if (end == ends.end() || end->second.size() != streams.size()) {
        return "a stream has no receiver";
      }
      for (size_t i = 0; i < streams.size(); ++i) {
        ++sent;
        if (to.incoming[end->second[i]].Digest() != from.program.outgoing[streams[i]].Digest()) {
          return "a stream's ends differ";
        }
      }
    }
    for (const Stream& out : from.program.outgoing) {
      int64_t end = 0;
      for (const Section& section : out.sections) {
        if (section.offset % kSectionAlignment != 0) return "a section is not aligned";
        if (section.offset != end) return "sections are not one after the other";
        end = section.offset + AlignSection(section.bytes);
      }
      if (end != out.bytes) return "a stream does not end where its sections do";
    }
  }
  return sent == expected ? "" : "a stream has no sender";
}

RouteOptions RandomOptions(Rng* rng) {
  RouteOptions options;
  constexpr int64_t kSplits[] = {1, 8, 64, kSplitBytes};
  options.split_bytes = kSplits[Below(rng, 4)];
  if (Below(rng, 4) == 0) options.skip_instance = {true};
  return options;
}

constexpr int64_t kChunks[] = {64, 128, 300, 1 << 20};

TEST_CASE("Every element of every destination is written once with its own bytes") {
  int64_t rounds = 0;
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    INFO("seed " << seed);
    Rng rng(seed);
    const RouteOptions options = RandomOptions(&rng);
    Cluster cluster = MakeCluster(&rng, options, kChunks[Below(&rng, 4)]);
    REQUIRE(StreamFault(cluster) == "");
    for (const Node& node : cluster.nodes) RunLocal(&cluster, node);
    REQUIRE(RunRounds(&cluster) == "");
    REQUIRE(ByteFault(&cluster) == "");
    rounds = std::max(rounds, cluster.nodes[0].program.rounds);
    for (const Node& node : cluster.nodes) {
      for (size_t d = 0; d < node.destination_of.size(); ++d) {
        const auto& member = cluster.world.destinations[node.destination_of[d]];
        REQUIRE(node.program.destination_bytes[d] == member.layout.Bytes());
      }
    }
  }
  CHECK(rounds > 5);
}

RouteOptions RandomChains(Rng* rng) {
  RouteOptions options = RandomOptions(rng);
  options.relay_lag = static_cast<uint32_t>(1 + Below(rng, 2));
  options.relay_excess = 0;
  return options;
}

TEST_CASE("With chains every element of every destination is written once with its own bytes") {
  int64_t chained = 0;
  int64_t rounds = 0;
  for (uint64_t seed = 1; seed <= 1500; ++seed) {
    INFO("seed " << seed);
    Rng rng(seed);
    const RouteOptions options = RandomChains(&rng);
    Cluster cluster = MakeCluster(&rng, options, kChunks[Below(&rng, 4)], 7);
    chained += cluster.plan.relay.lag > 0 ? 1 : 0;
    REQUIRE(StreamFault(cluster) == "");
    for (const Node& node : cluster.nodes) RunLocal(&cluster, node);
    REQUIRE(RunRounds(&cluster) == "");
    REQUIRE(ByteFault(&cluster) == "");
    rounds = std::max(rounds, cluster.nodes[0].program.rounds);
  }
  CHECK(chained > 500);
  CHECK(rounds > 20);
}

// Nodes go away while the program runs. Each survivor has ended some rounds more, or less, than the
// others; all go on from the first step that one of them lacks.
TEST_CASE(
    "A run that goes on from the first step that a survivor lacks writes every element once") {
  int64_t went_on = 0;
  int64_t saved = 0;
  for (uint64_t seed = 1; seed <= 1500; ++seed) {
    INFO("seed " << seed);
    Rng rng(seed);
    const RouteOptions options = RandomChains(&rng);
    Cluster cluster = MakeCluster(&rng, options, kChunks[Below(&rng, 4)], 7);
    const int64_t rounds = cluster.nodes[0].program.rounds;
    if (rounds == 0) continue;
    for (const Node& node : cluster.nodes) RunLocal(&cluster, node);
    Courses courses(cluster.plan.nodes, RunCourse(NodeProgram::Gone(cluster.plan.nodes)));
    for (int losses = 0; losses < 3; ++losses) {
      const int64_t first = courses[0].first;
      const int64_t end = first + static_cast<int64_t>(Below(&rng, rounds - first + 1));
      const NodeProgram::Gone before = courses[0].gone;
      REQUIRE(RunRounds(
                  &cluster, [](std::string*) {}, before, &courses, end) == "");
      NodeProgram::Gone gone = before;
      const auto& sources = cluster.plan.source_nodes;
      for (uint32_t n = 0; n < cluster.plan.nodes; ++n) {
        const bool trainer = std::find(sources.begin(), sources.end(), n) != sources.end();
        gone[n] = gone[n] || (!trainer && Below(&rng, 4) == 0);
      }
      int64_t lacks = rounds;
      for (const Node& node : cluster.nodes) {
        RunCourse& course = courses[node.program.node];
        node.program.Hold(end, &course);
        if (!gone[node.program.node]) lacks = std::min(lacks, node.program.FirstLacking(course));
      }
      for (RunCourse& course : courses) {
        course.gone = gone;
        course.first = lacks;
      }
      ++went_on;
      saved += lacks;
    }
    const NodeProgram::Gone gone = courses[0].gone;
    REQUIRE(RunRounds(
                &cluster, [](std::string*) {}, gone, &courses) == "");
    for (size_t d = 0; d < cluster.writes.size(); ++d) {
      if (gone[cluster.plan.destination_nodes[d]]) cluster.writes[d].clear();
    }
    REQUIRE(ByteFault(&cluster, gone) == "");
  }
  CHECK(went_on > 1500);
  CHECK(saved > went_on);
}

TEST_CASE("Chains are closed over nodes that are gone") {
  int64_t closed = 0;
  for (uint64_t seed = 1; seed <= 1500; ++seed) {
    INFO("seed " << seed);
    Rng rng(seed);
    const RouteOptions options = RandomChains(&rng);
    Cluster cluster = MakeCluster(&rng, options, kChunks[Below(&rng, 4)], 7);
    if (cluster.plan.relay.lag == 0) continue;
    NodeProgram::Gone gone(cluster.plan.nodes);
    for (uint32_t n = 0; n < cluster.plan.nodes; ++n) {
      const auto& sources = cluster.plan.source_nodes;
      const bool trainer = std::find(sources.begin(), sources.end(), n) != sources.end();
      gone[n] = !trainer && Below(&rng, 3) == 0;
    }
    if (std::find(gone.begin(), gone.end(), true) != gone.end()) ++closed;
    for (const Node& node : cluster.nodes) {
      if (!gone[node.program.node]) RunLocal(&cluster, node);
    }
    REQUIRE(RunRounds(
                &cluster, [](std::string*) {}, gone) == "");
    REQUIRE(ByteFault(&cluster, gone) == "");
  }
  CHECK(closed > 200);
}

TEST_CASE("Planted faults of chains are found") {
  // Returns the cluster's first node that forwards in several rounds; null: there is none.
  const auto forwarder = [](const Cluster& cluster) -> const Node* {
    for (const Node& node : cluster.nodes) {
      for (const Stream& stream : node.program.incoming) {
        if (!stream.chain.empty() && stream.chain.back() != node.program.node &&
            stream.Rounds() > 2) {
          return &node;
        }
      }
    }
    return nullptr;
  };
  const auto make = [&forwarder] {
    for (uint64_t seed = 1;; ++seed) {
      Rng rng(seed);
      RouteOptions options;
      options.relay_lag = 2;
      options.relay_excess = 0;
      Cluster cluster = MakeCluster(&rng, options, 64, 7);
      if (cluster.plan.relay.lag > 0 && forwarder(cluster) != nullptr) return cluster;
    }
  };
  const auto fault = [](Cluster cluster) {
    for (const Node& node : cluster.nodes) RunLocal(&cluster, node);
    const std::string of_rounds = RunRounds(&cluster);
    return of_rounds.empty() ? ByteFault(&cluster) : of_rounds;
  };
  REQUIRE(fault(make()).empty());
  Cluster early = make();  // forwarded before it was received
  const uint32_t who = forwarder(early)->program.node;
  early.nodes[who].program.lag = 1;
  CHECK(!fault(std::move(early)).empty());

  Cluster swapped = make();  // the forwarder takes itself for the node after it
  for (Stream& stream : swapped.nodes[who].program.incoming) {
    const auto own = std::find(stream.chain.begin(), stream.chain.end(), who);
    if (own != stream.chain.end() && own + 1 != stream.chain.end()) std::iter_swap(own, own + 1);
  }
  CHECK(StreamFault(swapped) == "a stream's ends differ");
  CHECK(!fault(std::move(swapped)).empty());

  const Cluster cluster = make();
  const auto refused = [&](const auto& change) {
    RoutePlan plan = cluster.plan;
    change(&plan);
    std::vector<LocalMember> sources = cluster.nodes[who].program.sources;
    std::vector<LocalMember> destinations = cluster.nodes[who].program.destinations;
    return CompileNode(plan, who, std::move(sources), std::move(destinations), {}).status().code();
  };
  CHECK(refused([](RoutePlan*) {}) == absl::StatusCode::kOk);
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  CHECK(refused([](RoutePlan* p) { p->relay.lag = kMaxRelayLag + 1; }) == kInvalid);
  CHECK(refused([](RoutePlan* p) { p->relay.longest = p->nodes + 1; }) == kInvalid);
  CHECK(refused([](RoutePlan* p) { p->relay.longest = p->relay.usual = 1; }) == kInvalid);
  CHECK(refused([](RoutePlan* p) { p->relay.node_bytes = 1; }) == kInvalid);
  CHECK(refused([](RoutePlan* p) { p->relay.node_bytes = -1; }) == kInvalid);
  CHECK(refused([](RoutePlan* p) { p->relay.node_streams = 0; }) == kInvalid);
  CHECK(refused([](RoutePlan* p) { p->relay.node_streams = kMaxRelayStreams + 1; }) == kInvalid);
  CHECK(refused([](RoutePlan* p) {
          for (auto& set : p->node_sets) set.push_back(set[0]);
        }) == kInvalid);
  CHECK(refused([](RoutePlan* p) { p->relay = {}; }) != absl::StatusCode::kOk);
  NodeProgramOptions small;
  small.chunk_bytes = 64;
  RoutePlan wide = cluster.plan;
  wide.relay.node_streams = kMaxRelayStreams;
  CHECK(CompileNode(wide, who, cluster.nodes[who].program.sources,
                    cluster.nodes[who].program.destinations, small)
            .status()
            .code() == kInvalid);
}

TEST_CASE("Local moves read the holder on the destination's device where there is one") {
  int64_t near = 0;
  int64_t far = 0;
  for (uint64_t seed = 1; seed <= 600; ++seed) {
    INFO("seed " << seed);
    Rng rng(seed);
    const Cluster cluster = MakeCluster(&rng, RandomOptions(&rng), 1 << 20);
    for (const Node& node : cluster.nodes) {
      const std::vector<LocalMember>& sources = node.program.sources;
      for (const CopyMove& move : node.program.local.moves) {
        const LocalMember& to = node.program.destinations[move.destination];
        const LocalMember& from = sources[move.source];
        if (to.device == LocalMember::kNoDevice) continue;
        if (from.device == to.device) {
          ++near;
          continue;
        }
        ++far;
        const std::string& name =
            from.layout->tensors[from.layout->pieces[move.source_piece].tensor].name;
        for (const LocalMember& other : sources) {
          if (other.device != to.device) continue;
          for (const Piece& piece : other.layout->pieces) {
            const bool holds =
                other.layout->tensors[piece.tensor].name == name && Contains(piece.box, move.box);
            REQUIRE_FALSE(holds);
          }
        }
      }
    }
  }
  CHECK(near > 1000);
  CHECK(far > 1000);
}

TEST_CASE("Planted faults of node programs are found") {
  // Returns the first random cluster whose streams are long enough to spoil.
  const auto make = [] {
    for (uint64_t seed = 1;; ++seed) {
      Rng rng(seed);
      Cluster cluster = MakeCluster(&rng, {}, 128);
      const auto& outgoing = cluster.nodes[0].program.outgoing;
      if (outgoing.empty() || outgoing[0].sections.size() < 2) continue;
      if (outgoing[0].sections[0].bytes < 4 || outgoing[0].sections[1].bytes < 4) continue;
      return cluster;
    }
  };
  const auto fault = [](Cluster cluster, const std::function<void(std::string*)>& tamper) {
    for (const Node& node : cluster.nodes) RunLocal(&cluster, node);
    const std::string of_rounds = RunRounds(&cluster, tamper);
    return of_rounds.empty() ? ByteFault(&cluster) : of_rounds;
  };
  const auto no_tamper = [](std::string*) {};
  REQUIRE(fault(make(), no_tamper).empty());
  CHECK(!fault(make(), [](std::string* chunk) { (*chunk)[0] ^= 1; }).empty());

  Cluster swapped = make();
  auto& sections = swapped.nodes[0].program.outgoing[0].sections;
  std::swap(sections[0].box, sections[1].box);
  std::swap(sections[0].piece, sections[1].piece);
  std::swap(sections[0].member, sections[1].member);
  CHECK(StreamFault(swapped) == "a stream's ends differ");

  Cluster shifted = make();
  shifted.nodes[0].program.outgoing[0].sections[1].offset += kSectionAlignment;
  CHECK(!StreamFault(shifted).empty());

  Cluster retargeted = make();
  const uint32_t peer = retargeted.nodes[0].program.outgoing[0].peer;
  NodeProgram& receiver = retargeted.nodes[peer].program;
  receiver.incoming[0].sections[0].targets -= 1;
  CHECK(!fault(std::move(retargeted), no_tamper).empty());

  Cluster doubled = make();
  Stream& stream = doubled.nodes[doubled.nodes[0].program.outgoing[0].peer].program.incoming[0];
  stream.step += kSectionAlignment;
  CHECK(!StreamFault(doubled).empty());
}

RouteMember Rank(LayoutPtr layout, uint32_t node, uint32_t instance = 0) {
  return {std::move(layout), node, instance, fmt::format("rank on {}", node)};
}

LayoutPtr Rows(int64_t rows, int64_t first, int64_t count) {
  return Make({{"w", DType::kBFloat16, {rows, 64}}}, {Dense(0, {{first, 0}, {count, 64}})});
}

TEST_CASE("Streams of different length end in the same round and those of few bytes early") {
  // Node 0 sends 64 MiB to node 1, 32 MiB to node 2 and 1 KiB to node 3.
  constexpr int64_t kRows = int64_t{1} << 19;
  const LayoutPtr all = Rows(kRows, 0, kRows);
  const LayoutPtr half = Rows(kRows, 0, kRows / 2);
  const LayoutPtr few = Rows(kRows, 0, 8);
  const auto plan =
      CompileRoutes({Rank(all, 0)}, {Rank(all, 1), Rank(half, 2, 1), Rank(few, 3, 2)}, {});
  REQUIRE(plan.ok());
  NodeProgramOptions options;
  options.chunk_bytes = int64_t{4} << 20;
  const auto program = CompileNode(*plan, 0, {{0, all}}, {}, options);
  REQUIRE(program.ok());
  CHECK(program->rounds == 16);
  REQUIRE(program->outgoing.size() == 3);
  CHECK(program->outgoing[0].Rounds() == 16);
  CHECK(program->outgoing[0].step == 4 << 20);
  CHECK(program->outgoing[1].Rounds() == 16);
  CHECK(program->outgoing[1].step == 2 << 20);
  CHECK(program->outgoing[2].Rounds() == 1);
  const auto legs = program->Round(0);
  REQUIRE(legs.size() == 3);
  CHECK(legs[2].bytes_out == 1024);
  CHECK(program->Round(1).size() == 2);
}

TEST_CASE("A round reads from all ranks of the node") {
  constexpr int64_t kTensors = 64;
  const auto layout = [](uint32_t begin, uint32_t end) {
    std::vector<TensorSpec> tensors;
    std::vector<Piece> pieces;
    for (uint32_t t = begin; t < end; ++t) {
      tensors.push_back({fmt::format("t{:03}", t), DType::kUint8, {1 << 16}});
      pieces.push_back(Dense(t - begin, {{0}, {1 << 16}}, int64_t{t - begin} << 16));
    }
    return Make(std::move(tensors), std::move(pieces));
  };
  const LayoutPtr first = layout(0, kTensors / 4);
  const LayoutPtr second = layout(kTensors / 4, kTensors);
  const auto plan =
      CompileRoutes({Rank(first, 0), Rank(second, 0)}, {Rank(layout(0, kTensors), 1)}, {});
  REQUIRE(plan.ok());
  NodeProgramOptions options;
  options.chunk_bytes = 1 << 20;
  const auto program = CompileNode(*plan, 0, {{0, first}, {1, second}}, {}, options);
  REQUIRE(program.ok());
  REQUIRE(program->rounds == 4);
  for (int64_t r = 0; r < 4; ++r) {
    std::map<uint32_t, int> reads;
    const std::vector<RoundLeg> legs = program->Round(r);
    for (const ChunkMove& move : legs[0].pack) ++reads[move.member];
    CHECK(reads[0] == 4);
    CHECK(reads[1] == 12);
  }
}

TEST_CASE("The digest of a node's program depends on its moves and streams") {
  const LayoutPtr all = Rows(64, 0, 64);
  const auto plan = CompileRoutes({Rank(all, 0)}, {Rank(all, 0), Rank(all, 1, 1)}, {});
  REQUIRE(plan.ok());
  const auto program = CompileNode(*plan, 0, {{0, all}}, {{0, all}}, {});
  REQUIRE(program.ok());
  std::set<uint64_t> digests = {DigestOf(*program)};
  const auto changed = [&](const auto& change) {
    NodeProgram copy = *program;
    change(&copy);
    digests.insert(DigestOf(copy));
  };
  changed([](NodeProgram* p) { ++p->node; });
  changed([](NodeProgram* p) { ++p->rounds; });
  changed([](NodeProgram* p) { ++p->local.moves[0].destination_byte_offset; });
  changed([](NodeProgram* p) { ++p->outgoing[0].peer; });
  changed([](NodeProgram* p) { ++p->outgoing[0].step; });
  changed([](NodeProgram* p) { ++p->outgoing[0].sections[0].box.offset[0]; });
  changed([](NodeProgram* p) { ++p->outgoing[0].sections[0].offset; });
  CHECK(digests.size() == 8);
}

TEST_CASE("Members that are not the plan's are refused") {
  const LayoutPtr all = Rows(64, 0, 64);
  const LayoutPtr half = Rows(64, 0, 32);
  const auto plan = CompileRoutes({Rank(all, 0)}, {Rank(all, 1), Rank(half, 1, 1)}, {});
  REQUIRE(plan.ok());
  const auto code = [&](uint32_t node, std::vector<LocalMember> sources,
                        std::vector<LocalMember> destinations, int64_t chunk = 1 << 20) {
    NodeProgramOptions options;
    options.chunk_bytes = chunk;
    return CompileNode(*plan, node, std::move(sources), std::move(destinations), options)
        .status()
        .code();
  };
  CHECK(code(0, {{0, all}}, {}) == absl::StatusCode::kOk);
  CHECK(code(1, {}, {{1, half}, {0, all}}) == absl::StatusCode::kOk);
  CHECK(code(7, {}, {}) == absl::StatusCode::kOk);  // a node without members
  CHECK(code(0, {{0, all}}, {}, 63) == absl::StatusCode::kInvalidArgument);
  CHECK(code(0, {{0, half}}, {}) == absl::StatusCode::kFailedPrecondition);
  CHECK(code(0, {}, {}) == absl::StatusCode::kFailedPrecondition);
  CHECK(code(0, {{1, all}}, {}) == absl::StatusCode::kInvalidArgument);
  CHECK(code(1, {{0, all}}, {{1, half}, {0, all}}) == absl::StatusCode::kInvalidArgument);
  CHECK(code(1, {}, {{1, half}, {1, half}}) == absl::StatusCode::kInvalidArgument);
  CHECK(code(1, {}, {{1, half}, {0, nullptr}}) == absl::StatusCode::kInvalidArgument);
  const auto other = CompileNode(*plan, 1, {}, {{0, half}, {1, half}}, {});
  CHECK_THAT(Message(other.status()), Contains("rank on 1") && Contains("digest"));
  NodeProgramOptions few;
  few.max_moves = 0;
  CHECK(CompileNode(*plan, 1, {}, {{0, all}, {1, half}}, few).status().code() ==
        absl::StatusCode::kResourceExhausted);
}

TEST_CASE("A node's program that nobody wants any more says so") {
  const LayoutPtr all = Rows(64, 0, 64);
  const auto plan = CompileRoutes({Rank(all, 0)}, {Rank(all, 1)}, {});
  REQUIRE(plan.ok());
  NodeProgramOptions options;
  const auto cancelled = std::make_shared<std::atomic<bool>>(false);
  options.cancelled = cancelled;
  CHECK(CompileNode(*plan, 0, {{0, all}}, {}, options).ok());
  cancelled->store(true);
  CHECK(CompileNode(*plan, 0, {{0, all}}, {}, options).status().code() ==
        absl::StatusCode::kCancelled);
}

TEST_CASE("The legs of a round lie one after the other and the chunks say what they carry") {
  for (uint64_t seed = 1; seed <= 600; ++seed) {
    INFO("seed " << seed);
    Rng rng(seed);
    const Cluster cluster = MakeCluster(&rng, RandomOptions(&rng), kChunks[Below(&rng, 4)]);
    for (const Node& node : cluster.nodes) {
      for (int64_t round = 0; round <= node.program.rounds; ++round) {
        const std::vector<RoundLeg> full = node.program.Round(round);
        const std::vector<ExchangeLeg> legs = node.program.Legs(round);
        REQUIRE(legs.size() == full.size());
        int64_t out = 0;
        int64_t in = 0;
        for (size_t i = 0; i < legs.size(); ++i) {
          REQUIRE(legs[i].peer == full[i].peer);
          REQUIRE(legs[i].bytes_out == full[i].bytes_out);
          REQUIRE(legs[i].bytes_in == full[i].bytes_in);
          REQUIRE(legs[i].out_offset == out);
          REQUIRE(legs[i].in_offset == in);
          out += legs[i].bytes_out;
          in += legs[i].bytes_in;
          REQUIRE(full[i].sent.size() == full[i].pack.size());
          for (size_t m = 0; m < full[i].pack.size(); ++m) {
            const ChunkMove& move = full[i].pack[m];
            REQUIRE(move.chunk_box == m);
            REQUIRE(full[i].sent[m].box == move.box);
            REQUIRE(full[i].sent[m].chunk_byte_offset == move.chunk_byte_offset);
          }
          uint32_t before = 0;
          for (const ChunkMove& move : full[i].unpack) {
            REQUIRE(move.chunk_box >= before);
            before = move.chunk_box;
            const ChunkBox& box = full[i].received[move.chunk_box];
            REQUIRE(Contains(box.box, move.box));
            const Stream& stream = node.program.incoming[box.stream];
            REQUIRE(Contains(stream.sections[box.section].box, box.box));
          }
        }
      }
    }
  }
}

TEST_CASE("Layouts of one structure may lie elsewhere") {
  const LayoutPtr rows = Rows(64, 0, 32);
  Layout moved = *rows;
  moved.pieces[0].byte_offset += 64;
  moved.pieces[0].region = RegionId(9);
  moved.binding_generation = 7;
  CHECK(SameStructure(*rows, moved));
  moved.pieces[0].strides[0] += 1;
  CHECK(!SameStructure(*rows, moved));
  CHECK(!SameStructure(*rows, *Rows(64, 0, 31)));
  CHECK(!SameStructure(*rows, *Rows(65, 0, 32)));
}

TEST_CASE("A plan that does not hold together is refused by its field") {
  const LayoutPtr all = Rows(64, 0, 64);
  const LayoutPtr half = Rows(64, 0, 32);
  const auto made =
      CompileRoutes({Rank(half, 0), Rank(all, 1)}, {Rank(all, 0), Rank(all, 2, 1)}, {});
  REQUIRE(made.ok());
  REQUIRE(ValidatePlan(*made).ok());
  const auto refused = [&](const std::string& field, const auto& change) {
    RoutePlan plan = *made;
    change(&plan);
    const auto program = CompileNode(plan, 0, {{0, half}}, {{0, all}}, {});
    REQUIRE(!program.ok());
    INFO(program.status());
    CHECK(program.status().code() != absl::StatusCode::kInternal);
    CHECK_THAT(Message(program.status()), Contains(field));
  };
  refused("nodes", [](RoutePlan* p) { p->nodes = kMaxRouteNodes + 1; });
  refused("source_nodes", [](RoutePlan* p) { p->source_nodes[1] = 3; });
  refused("destination_nodes", [](RoutePlan* p) { p->nodes = 2; });
  refused("source_digests", [](RoutePlan* p) { p->source_digests.pop_back(); });
  refused("destination_digests", [](RoutePlan* p) { p->destination_digests.pop_back(); });
  refused("destination_skipped", [](RoutePlan* p) { p->destination_skipped.clear(); });
  refused("source_labels", [](RoutePlan* p) { p->source_labels.pop_back(); });
  refused("tensors[1]", [](RoutePlan* p) { p->tensors.push_back(p->tensors[0]); });
  refused("node_sets[0]", [](RoutePlan* p) { p->node_sets[0].clear(); });
  refused("node_sets[0]", [](RoutePlan* p) { p->node_sets[0] = {1, 1}; });
  refused("node_sets[0]", [](RoutePlan* p) { p->node_sets[0] = {3}; });
  refused("routes[0]", [](RoutePlan* p) { p->routes[0].tensor = 1; });
  refused("tensor w", [](RoutePlan* p) { p->routes[0].source = 2; });
  refused("node_set", [](RoutePlan* p) { p->routes[0].node_set = 99; });
  refused("box", [](RoutePlan* p) { p->routes[0].box = 0xffff'ffff; });
  refused("box", [](RoutePlan* p) { p->box_numbers.pop_back(); });
  refused("tensor w", [](RoutePlan* p) { p->box_numbers[p->routes[0].box] = -1; });
  refused("is empty", [](RoutePlan* p) { p->box_numbers[p->routes[0].box + 2] = 0; });
  refused("longest_stream", [](RoutePlan* p) { p->longest_stream = -1; });
  refused("longest_stream", [](RoutePlan* p) { p->longest_stream = 64; });
  refused("tensor w", [](RoutePlan* p) { p->tensors[0].name.back() = 'v'; });
  refused("bfloat16 [65, 64]", [](RoutePlan* p) { p->tensors[0].shape[0] = 65; });
  refused("no piece of rank on 0", [](RoutePlan* p) {
    // The destination wants the half that only the other rank has.
    for (Route& route : p->routes) route.source = 0;
  });
  refused("has no layout here", [](RoutePlan* p) {
    p->source_nodes[1] = 0;
    p->source_digests[1] = 0;
  });
}

}  // namespace
}  // namespace refitd
