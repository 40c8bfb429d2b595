#include "transport/plan/route_testing.h"

#include <fmt/format.h>

#include <map>
#include <set>
#include <tuple>

namespace refitd {
namespace {

// Slices along one dimension, as torch.chunk makes them: the last of them may be smaller or empty.
std::vector<Box> Slices(const Dims& shape, size_t dim, int64_t ways) {
  std::vector<Box> boxes;
  const int64_t step = (shape[dim] + ways - 1) / ways;
  for (int64_t i = 0; i < ways; ++i) {
    Box box = WholeBox(shape);
    box.offset[dim] = std::min(i * step, shape[dim]);
    box.extent[dim] = std::min((i + 1) * step, shape[dim]) - box.offset[dim];
    boxes.push_back(std::move(box));
  }
  return boxes;
}

// One box for each rank: a slice along one dimension, shared by several ranks in a row, or the
// whole tensor.
void AddMesh(Rng* rng, uint32_t tensor, const Dims& shape, std::vector<Side>* sides) {
  const int64_t ways = 1 + Below(rng, static_cast<int64_t>(sides->size()));
  const bool whole = shape.empty() || Below(rng, 4) == 0;
  const size_t dim =
      whole ? 0 : static_cast<size_t>(Below(rng, static_cast<int64_t>(shape.size())));
  const auto boxes = whole ? std::vector<Box>{WholeBox(shape)} : Slices(shape, dim, ways);
  for (size_t i = 0; i < std::max(sides->size(), boxes.size()); ++i) {
    AddPiece(rng, &(*sides)[i % sides->size()], tensor, boxes[i % boxes.size()]);
  }
}

void AddSources(Rng* rng, uint32_t tensor, const Dims& shape, std::vector<Side>* sides) {
  if (Below(rng, 2) == 0) {
    AddMesh(rng, tensor, shape, sides);
    return;
  }
  const auto any = [&] {
    return &(*sides)[static_cast<size_t>(Below(rng, static_cast<int64_t>(sides->size())))];
  };
  for (const Box& box : Partition(rng, shape)) {
    for (int64_t copies = 1 + Below(rng, 3); copies > 0; --copies)
      AddPiece(rng, any(), tensor, box);
  }
  for (int64_t extra = Below(rng, 4); extra > 0; --extra) {
    AddPiece(rng, any(), tensor, RandomBox(rng, shape));
  }
}

void AddDestinations(Rng* rng, uint32_t tensor, const Dims& shape, std::vector<Side>* sides) {
  if (Below(rng, 2) == 0) {
    AddMesh(rng, tensor, shape, sides);
    return;
  }
  for (Side& side : *sides) {
    for (const Box& box : Partition(rng, shape)) {
      if (Below(rng, 4) != 0) AddPiece(rng, &side, tensor, box);
    }
  }
}

std::vector<RouteMember> Members(Rng* rng, const std::vector<Side>& sides, int64_t nodes,
                                 const char* what) {
  std::vector<RouteMember> members;
  const bool scattered = Below(rng, 2) == 0;
  for (size_t i = 0; i < sides.size(); ++i) {
    RouteMember member;
    for (size_t j = 0; j < i && member.layout == nullptr; ++j) {
      if (sides[j].layout.pieces == sides[i].layout.pieces) member.layout = members[j].layout;
    }
    if (member.layout == nullptr || Below(rng, 2) == 0) {
      member.layout = std::make_shared<Layout>(sides[i].layout);
    }
    member.node = static_cast<uint32_t>(scattered ? Below(rng, nodes)
                                                  : static_cast<int64_t>(i) * nodes /
                                                        static_cast<int64_t>(sides.size()));
    member.instance = static_cast<uint32_t>(Below(rng, 2));
    member.label = fmt::format("{} {}", what, i);
    members.push_back(std::move(member));
  }
  return members;
}

using Element = std::tuple<std::string, int64_t>;  // tensor, row-major index

std::map<Element, std::set<uint32_t>> ElementsOf(const std::vector<RouteMember>& members,
                                                 const std::vector<bool>& skipped) {
  std::map<Element, std::set<uint32_t>> elements;
  for (uint32_t m = 0; m < members.size(); ++m) {
    if (members[m].layout == nullptr || (m < skipped.size() && skipped[m])) continue;
    for (const Piece& piece : members[m].layout->pieces) {
      const TensorSpec& spec = members[m].layout->tensors[piece.tensor];
      ForEach(piece.box, [&](const Dims& at) {
        elements[{spec.name, GlobalIndex(at, spec.shape)}].insert(m);
      });
    }
  }
  return elements;
}

int64_t Most(const std::vector<int64_t>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

}  // namespace

RouteWorld RandomRouteWorld(Rng* rng, int64_t most) {
  constexpr DType kTypes[] = {DType::kUint8, DType::kBFloat16, DType::kFloat32, DType::kFloat64};
  RouteWorld world;
  for (int64_t t = 1 + Below(rng, 3); t > 0; --t) {
    Dims shape(static_cast<size_t>(Below(rng, 4)), 0);
    for (int64_t& n : shape) n = Below(rng, 16) == 0 ? 0 : 1 + Below(rng, 6);
    world.tensors.push_back({fmt::format("t{}", t), kTypes[Below(rng, 4)], shape});
  }
  world.sources.resize(static_cast<size_t>(1 + Below(rng, 6)));
  world.destinations.resize(static_cast<size_t>(1 + Below(rng, 6)));
  for (auto* sides : {&world.sources, &world.destinations}) {
    for (Side& side : *sides) side.layout.tensors = world.tensors;
  }
  for (uint32_t t = 0; t < world.tensors.size(); ++t) {
    AddSources(rng, t, world.tensors[t].shape, &world.sources);
    AddDestinations(rng, t, world.tensors[t].shape, &world.destinations);
  }
  // Sometimes ranks have the same layout, as data-parallel ranks have.
  for (auto* sides : {&world.sources, &world.destinations}) {
    if (Below(rng, 3) != 0) continue;
    const Side& any =
        (*sides)[static_cast<size_t>(Below(rng, static_cast<int64_t>(sides->size())))];
    sides->push_back(Side(any));
  }
  for (int64_t more = most > 4 ? Below(rng, most - 4 + 4) : 0; more > 0; --more) {
    const auto engines = static_cast<int64_t>(world.destinations.size());
    const Side& any = world.destinations[static_cast<size_t>(Below(rng, engines))];
    world.destinations.push_back(Side(any));
  }
  for (Side& side : world.sources) Fill(&side);
  const int64_t nodes = 1 + Below(rng, most);
  world.source_members = Members(rng, world.sources, nodes, "trainer");
  world.destination_members = Members(rng, world.destinations, nodes, "engine");
  return world;
}

LayoutPtr Shuffled(Rng* rng, const Layout& layout, std::vector<uint32_t>* order) {
  auto shuffled = std::make_shared<Layout>(layout);
  std::vector<uint32_t> tensors(layout.tensors.size());
  std::iota(tensors.begin(), tensors.end(), 0U);
  std::shuffle(tensors.begin(), tensors.end(), *rng);
  std::vector<uint32_t> now(tensors.size());
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    shuffled->tensors.Edit()[i] = layout.tensors[tensors[i]];
    now[tensors[i]] = i;
  }
  std::vector<uint32_t> pieces(layout.pieces.size());
  std::iota(pieces.begin(), pieces.end(), 0U);
  std::shuffle(pieces.begin(), pieces.end(), *rng);
  for (uint32_t i = 0; i < pieces.size(); ++i) {
    shuffled->pieces[i] = layout.pieces[pieces[i]];
    shuffled->pieces[i].tensor = now[shuffled->pieces[i].tensor];
  }
  if (order != nullptr) *order = std::move(pieces);
  return shuffled;
}

std::string PlanFault(const RouteWorld& world, const RoutePlan& plan, const RouteOptions& options) {
  std::vector<bool> skipped;
  for (const RouteMember& member : world.destination_members) {
    skipped.push_back(member.instance < options.skip_instance.size() &&
                      options.skip_instance[member.instance]);
  }
  const auto held = ElementsOf(world.source_members, {});
  const auto wanted = ElementsOf(world.destination_members, skipped);
  std::map<std::pair<Element, uint32_t>, std::vector<uint32_t>> supplied;
  const size_t nodes = plan.nodes;
  RouteBytes links;
  links.rank_supplies.resize(world.sources.size());
  for (auto* list :
       {&links.node_sends, &links.node_forwards, &links.node_receives, &links.node_stores}) {
    list->resize(nodes);
  }
  links.matrix.resize(nodes * nodes);
  links.stream.resize(nodes * nodes);
  int64_t all_bytes = 0;
  for (const Route& route : plan.routes) {
    const TensorSpec& spec = plan.tensors[route.tensor];
    const Box box = plan.BoxOf(route);
    if (ElementCount(box) == 0) return "an empty box";
    const uint32_t source_node = plan.source_nodes[route.source];
    const int64_t bytes = ElementCount(box) * ElementBytes(spec.dtype);
    uint32_t from = source_node;
    std::set<uint32_t> seen;
    for (const uint32_t to : plan.NodesOf(route)) {
      if (!seen.insert(to).second) return "a node twice in a set";
      ForEach(box, [&](const Dims& at) {
        supplied[{{spec.name, GlobalIndex(at, spec.shape)}, to}].push_back(route.source);
      });
      all_bytes += bytes;
      if (to == source_node) {
        links.rank_supplies[route.source] += bytes;
        links.matrix[to * nodes + to] += bytes;
        continue;
      }
      // The source sends to the first node of a chain only.
      (from == source_node ? links.rank_supplies[route.source] : links.node_forwards[from]) +=
          bytes;
      links.matrix[from * nodes + to] += bytes;
      links.node_sends[from] += bytes;
      links.node_receives[to] += bytes;
      links.stream[from * nodes + to] += AlignSection(bytes);
      if (plan.relay.lag > 0) from = to;
    }
  }
  std::vector<int64_t> rank_alone(world.sources.size());
  std::vector<int64_t> node_alone(nodes);
  std::vector<int64_t> receives(nodes);
  // With chains, the bytes that the sources must send, counted at the first node that wants them.
  std::vector<int64_t> once(nodes);
  size_t expected = 0;
  for (const auto& [element, engines] : wanted) {
    const auto& [name, index] = element;
    const auto spec = std::find_if(world.tensors.begin(), world.tensors.end(),
                                   [&n = name](const TensorSpec& s) { return s.name == n; });
    const int64_t bytes = ElementBytes(spec->dtype);
    const std::set<uint32_t>& holders = held.at(element);
    std::set<uint32_t> holder_nodes;
    for (const uint32_t h : holders) holder_nodes.insert(world.source_members[h].node);
    std::set<uint32_t> wanting;
    for (const uint32_t e : engines) {
      wanting.insert(world.destination_members[e].node);
      links.node_stores[world.destination_members[e].node] += bytes;
    }
    const bool relays = plan.relay.lag > 0;
    std::set<uint32_t> remote;
    for (const uint32_t node : wanting) {
      if (!holder_nodes.contains(node)) remote.insert(node);
    }
    if (relays && !remote.empty()) {
      // The sources send the element once, whatever the number of nodes that want it.
      if (holders.size() == 1) rank_alone[*holders.begin()] += bytes;
      if (holder_nodes.size() == 1) node_alone[*holder_nodes.begin()] += bytes;
      once[*remote.begin()] += bytes;
    }
    for (const uint32_t node : wanting) {
      ++expected;
      const auto by = supplied.find({element, node});
      const std::string where = fmt::format("{} [{}] to node {}", name, index, node);
      if (by == supplied.end()) return where + " is not supplied";
      if (by->second.size() != 1) return where + " is supplied twice";
      if (!holders.contains(by->second[0])) return where + " is supplied by who has it not";
      const bool local = world.source_members[by->second[0]].node == node;
      if (holder_nodes.contains(node) && !local) return where + " crosses though it is there";
      if (!holder_nodes.contains(node)) receives[node] += bytes;
      if (relays && !local) continue;
      if (holders.size() == 1) rank_alone[*holders.begin()] += bytes;
      if (holder_nodes.size() == 1 && !local) node_alone[*holder_nodes.begin()] += bytes;
    }
  }
  if (supplied.size() != expected) return "supplied to a node that does not want it";
  if (plan.links.rank_supplies != links.rank_supplies) return "rank_supplies";
  if (plan.links.node_sends != links.node_sends) return "node_sends";
  if (plan.links.node_forwards != links.node_forwards) return "node_forwards";
  if (plan.links.node_receives != links.node_receives) return "node_receives";
  if (plan.links.node_stores != links.node_stores) return "node_stores";
  if (plan.links.matrix != links.matrix) return "matrix";
  if (plan.links.stream != links.stream) return "stream";
  if (links.node_receives != receives) return "a node receives more than it lacks";
  const auto sum = [](const std::vector<int64_t>& list) {
    return std::accumulate(list.begin(), list.end(), int64_t{0});
  };
  if (plan.bytes != all_bytes) return "bytes";
  if (plan.relay.lag > 0 && sum(links.node_sends) - sum(links.node_forwards) != sum(once)) {
    return "sources send something twice";
  }
  if (plan.wire_bytes != sum(links.node_sends)) return "wire_bytes";
  if (plan.bound.rank_alone != Most(rank_alone)) return "bound of a rank alone";
  if (plan.bound.node_alone != Most(node_alone)) return "bound of a node alone";
  if (plan.bound.node_receives != Most(receives)) return "bound of what a node receives";
  return {};
}

uint64_t DigestOf(const RoutePlan& plan) {
  HashChain chain(0);
  chain.Add(plan.nodes);
  chain.Add(plan.source_nodes.size());
  for (size_t i = 0; i < plan.source_nodes.size(); ++i) {
    chain.Add(plan.source_nodes[i]);
    chain.Add(plan.source_digests[i]);
  }
  chain.Add(plan.destination_nodes.size());
  for (size_t i = 0; i < plan.destination_nodes.size(); ++i) {
    chain.Add(plan.destination_nodes[i]);
    chain.Add(plan.destination_digests[i]);
    chain.Add(plan.destination_skipped[i] ? 1 : 0);
  }
  chain.Add(plan.routes.size());
  for (const Route& route : plan.routes) {
    chain.Add(TensorHash(plan.tensors[route.tensor]));
    chain.Add(route.source);
    const Box box = plan.BoxOf(route);
    chain.Add(box.offset);
    chain.Add(box.extent);
    chain.Add(plan.NodesOf(route).size());
    for (const uint32_t node : plan.NodesOf(route)) chain.Add(node);
  }
  const RelayShape& relay = plan.relay;
  for (const uint32_t n : {relay.lag, relay.longest, relay.usual, relay.node_streams}) {
    chain.Add(n);
  }
  chain.Add(static_cast<uint64_t>(relay.node_bytes));
  return chain.hash();
}

uint64_t DigestOf(const NodeProgram& program) {
  HashChain chain(0);
  chain.Add(program.node);
  chain.Add(static_cast<uint64_t>(program.rounds));
  chain.Add(program.local.moves.size());
  for (const CopyMove& move : program.local.moves) {
    chain.Add(move.source);
    chain.Add(move.source_piece);
    chain.Add(move.destination);
    chain.Add(move.destination_piece);
    chain.Add(move.box.offset);
    chain.Add(move.box.extent);
    chain.Add(static_cast<uint64_t>(move.source_byte_offset));
    chain.Add(static_cast<uint64_t>(move.destination_byte_offset));
  }
  for (const auto* streams : {&program.outgoing, &program.incoming}) {
    for (const Stream& stream : *streams) {
      chain.Add(stream.peer);
      chain.Add(stream.Digest());
    }
  }
  return chain.hash();
}

}  // namespace refitd
