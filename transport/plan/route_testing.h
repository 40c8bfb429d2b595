// Random worlds of trainers and engines over several nodes, and checks, element by element, of a
// plan for them.
#ifndef REFITD_TRANSPORT_PLAN_ROUTE_TESTING_H_
#define REFITD_TRANSPORT_PLAN_ROUTE_TESTING_H_

#include <cstdint>
#include <string>
#include <vector>

#include "transport/plan/node_program.h"
#include "transport/plan/plan_testing.h"
#include "transport/plan/route.h"

namespace refitd {

struct RouteWorld {
  std::vector<TensorSpec> tensors;
  std::vector<Side> sources;  // their memory holds Bits of the index into `tensors`
  std::vector<Side> destinations;
  std::vector<RouteMember> source_members;  // layouts as in `sources`, equal ones sometimes shared
  std::vector<RouteMember> destination_members;
};

// Makes a world of one to `most` nodes with one to six ranks a side, and as many more engines as
// there may be nodes beyond four. Boxes are regular or not, replicated, overlapping, fused or
// padded, and every element has a holder.
RouteWorld RandomRouteWorld(Rng* rng, int64_t most = 4);

// Returns a layout of the same structure with tensors and pieces in another order; `order`
// receives, for each new piece, the index of the old piece.
LayoutPtr Shuffled(Rng* rng, const Layout& layout, std::vector<uint32_t>* order = nullptr);

// Returns the first fault of a plan, or an empty string. Looks at coverage, suppliers, statistics
// and the bound.
std::string PlanFault(const RouteWorld& world, const RoutePlan& plan, const RouteOptions& options);

// Digests of all that a plan, or a node's program, makes daemons do: two daemons whose plans have
// equal digests derive equal streams.
uint64_t DigestOf(const RoutePlan& plan);
uint64_t DigestOf(const NodeProgram& program);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_ROUTE_TESTING_H_
