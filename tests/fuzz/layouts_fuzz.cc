// Any uploads of layouts, registered and planned: accepted pieces lie inside their regions,
// destinations share neither elements nor bytes, an encoded layout decodes to itself, and a plan
// moves each destination element exactly once, from the source that it names (P1, P10). Over
// several nodes, both ends of every stream agree. The checks count elements one by one, so that
// they share no code with the code that they check; inputs too big for that are only run.
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "proto/convert.h"
#include "tests/fuzz/inputs.pb.h"
#include "tests/fuzz/proto_mutator.h"
#include "transport/base/status.h"
#include "transport/plan/layout.h"
#include "transport/plan/node_program.h"
#include "transport/plan/plan.h"
#include "transport/plan/route.h"

namespace refitd {
namespace {

constexpr int64_t kMaxCounted = 1 << 12;  // elements of one layout, and of one tensor
constexpr int kMaxUploads = 3;            // of sources, and of destinations
constexpr int64_t kChunkBytes = 64;       // a small layout makes several chunks

using Wide = __int128;

// Calls `f(index in the tensor, offset from the piece's first element)`, both in elements, for each
// element of `box`, which lies in `piece`.
template <typename F>
void ForEachElement(const Box& box, const Piece& piece, const Dims& shape, F f) {
  const size_t rank = shape.size();
  if (ElementCount(box) == 0) return;
  Dims at(rank, 0);
  for (;;) {
    int64_t index = 0;
    int64_t offset = 0;
    for (size_t d = 0; d < rank; ++d) {
      index = index * shape[d] + box.offset[d] + at[d];
      offset += (box.offset[d] + at[d] - piece.box.offset[d]) * piece.strides[d];
    }
    f(index, offset);
    size_t d = rank;
    while (d > 0 && ++at[d - 1] == box.extent[d - 1]) at[--d] = 0;
    if (d == 0) return;
  }
}

bool Countable(const Layout& layout) {
  int64_t total = 0;
  for (const TensorSpec& tensor : layout.tensors) {
    if (*ElementCount(tensor.shape) > kMaxCounted) return false;
  }
  for (const Piece& piece : layout.pieces) total += ElementCount(piece.box);
  return total <= kMaxCounted;
}

// Whether no element and no byte is in two pieces.
bool Disjoint(const Layout& layout) {
  std::set<std::pair<uint32_t, int64_t>> elements;
  std::set<std::pair<uint64_t, int64_t>> places;
  bool disjoint = true;
  for (const Piece& piece : layout.pieces) {
    const TensorSpec& tensor = layout.tensors[piece.tensor];
    const int64_t element = ElementBytes(tensor.dtype);
    ForEachElement(piece.box, piece, tensor.shape, [&](int64_t index, int64_t offset) {
      disjoint = elements.emplace(piece.tensor, index).second && disjoint;
      for (int64_t b = 0; b < element; ++b) {
        const int64_t place = piece.byte_offset + offset * element + b;
        disjoint = places.emplace(piece.region.value(), place).second && disjoint;
      }
    });
  }
  return disjoint;
}

void CheckAccepted(const Layout& layout, const RegionBytes& region_bytes) {
  std::set<std::string> names;
  for (const TensorSpec& tensor : layout.tensors) {
    REFITD_CHECK(ValidateTensor(tensor).ok());
    REFITD_CHECK(names.insert(tensor.name).second);
  }
  for (const Piece& piece : layout.pieces) {
    REFITD_CHECK(piece.tensor < layout.tensors.size());
    const TensorSpec& tensor = layout.tensors[piece.tensor];
    REFITD_CHECK(ValidateBox(piece.box, tensor.shape).ok());
    REFITD_CHECK(piece.strides.size() == tensor.shape.size());
    const auto bytes = region_bytes(piece.region);
    REFITD_CHECK(bytes.has_value());
    REFITD_CHECK(piece.byte_offset >= 0);
    REFITD_CHECK(piece.byte_offset % ElementBytes(tensor.dtype) == 0);
    if (ElementCount(piece.box) == 0) continue;
    Wide last = 0;
    for (size_t d = 0; d < tensor.shape.size(); ++d) {
      REFITD_CHECK(piece.strides[d] >= 0);
      last += Wide{piece.box.extent[d] - 1} * piece.strides[d];
    }
    const Wide end = Wide{piece.byte_offset} + (last + 1) * ElementBytes(tensor.dtype);
    REFITD_CHECK(end <= *bytes);
  }
}

absl::StatusOr<Layout> Decode(const std::vector<v1::LayoutChunk>& chunks) {
  LayoutDecoder decoder;
  for (const v1::LayoutChunk& chunk : chunks) REFITD_RETURN_IF_ERROR(decoder.Add(chunk));
  return std::move(decoder).Finish();
}

void CheckRoundTrip(const Layout& layout) {
  std::vector<v1::LayoutChunk> chunks;
  for (const v1::LayoutChunk& chunk : EncodeLayout(layout, v1::Lease(), kChunkBytes)) {
    REFITD_CHECK(chunks.emplace_back().ParseFromString(chunk.SerializeAsString()));
  }
  const auto again = Decode(chunks);
  REFITD_CHECK(again.ok());
  REFITD_CHECK(again->tensors == layout.tensors && again->pieces == layout.pieces);
  REFITD_CHECK(again->binding_generation == layout.binding_generation);
  REFITD_CHECK(again->Digest() == layout.Digest());
  REFITD_CHECK(again->Bytes() == layout.Bytes());
}

using Layouts = std::vector<std::shared_ptr<const Layout>>;

// Null: the upload was refused.
Layouts Register(const google::protobuf::RepeatedPtrField<fuzz::LayoutsInput::Upload>& uploads,
                 const RegionBytes& region_bytes, bool destination) {
  Layouts layouts;
  for (const auto& upload : uploads) {
    if (layouts.size() == kMaxUploads) break;
    auto layout = Decode({upload.chunks().begin(), upload.chunks().end()});
    if (layout.ok()) {
      const absl::Status valid = ValidateLayout(*layout, region_bytes, destination);
      if (valid.ok()) {
        CheckAccepted(*layout, region_bytes);
        CheckRoundTrip(*layout);
        if (destination && Countable(*layout)) REFITD_CHECK(Disjoint(*layout));
        layouts.push_back(std::make_shared<const Layout>(*std::move(layout)));
        continue;
      }
      REFITD_CHECK(!valid.message().empty());
    } else {
      REFITD_CHECK(!layout.status().message().empty());
    }
    layouts.push_back(nullptr);
  }
  return layouts;
}

bool Skipped(const PlanOptions& options, size_t destination) {
  return destination < options.skip_destination.size() && options.skip_destination[destination];
}

void CheckMoves(const MovePlan& program, const Layout& from, const Layouts& destinations,
                const PlanOptions& options) {
  // The written (destination, piece, element).
  std::set<std::tuple<uint32_t, uint32_t, int64_t>> written;
  int64_t bytes = 0;
  for (const CopyMove& move : program.moves) {
    REFITD_CHECK(move.source == 0);
    REFITD_CHECK(move.destination < destinations.size());
    REFITD_CHECK(destinations[move.destination] != nullptr);
    REFITD_CHECK(!Skipped(options, move.destination));
    const Layout& to = *destinations[move.destination];
    REFITD_CHECK(move.source_piece < from.pieces.size());
    REFITD_CHECK(move.destination_piece < to.pieces.size());
    const Piece& source = from.pieces[move.source_piece];
    const Piece& destination = to.pieces[move.destination_piece];
    const TensorSpec& tensor = to.tensors[destination.tensor];
    REFITD_CHECK(from.tensors[source.tensor] == tensor);
    REFITD_CHECK(ElementCount(move.box) > 0);
    REFITD_CHECK(Contains(source.box, move.box));
    REFITD_CHECK(Contains(destination.box, move.box));
    const int64_t element = ElementBytes(tensor.dtype);
    bytes += ElementCount(move.box) * element;
    bool first = true;
    ForEachElement(move.box, source, tensor.shape, [&](int64_t, int64_t offset) {
      if (first) {
        REFITD_CHECK(move.source_byte_offset == source.byte_offset + offset * element);
      }
      first = false;
    });
    first = true;
    ForEachElement(move.box, destination, tensor.shape, [&](int64_t index, int64_t offset) {
      if (first) {
        REFITD_CHECK(move.destination_byte_offset == destination.byte_offset + offset * element);
      }
      first = false;
      REFITD_CHECK(written.emplace(move.destination, move.destination_piece, index).second);
    });
  }
  REFITD_CHECK(bytes == program.bytes);

  // The elements that the source holds, by tensor name.
  std::map<std::string, std::set<int64_t>> held;
  for (const Piece& piece : from.pieces) {
    const TensorSpec& tensor = from.tensors[piece.tensor];
    std::set<int64_t>& elements = held[tensor.name];
    ForEachElement(piece.box, piece, tensor.shape,
                   [&](int64_t index, int64_t) { elements.insert(index); });
  }
  for (uint32_t d = 0; d < destinations.size(); ++d) {
    if (destinations[d] == nullptr || Skipped(options, d)) continue;
    const Layout& to = *destinations[d];
    for (uint32_t p = 0; p < to.pieces.size(); ++p) {
      const Piece& piece = to.pieces[p];
      const TensorSpec& tensor = to.tensors[piece.tensor];
      ForEachElement(piece.box, piece, tensor.shape, [&](int64_t index, int64_t) {
        const bool there = held[tensor.name].contains(index);
        REFITD_CHECK(written.contains({d, p, index}) == there);
      });
    }
  }
}

// Plans a push of all that the source holds.
void CheckPush(const Layout& source, const DestinationIndex& index, const PlanOptions& options) {
  const PlanSource pushed = {source.tensors, source.pieces};
  const auto program = Compile(pushed, index, options);
  if (!program.ok()) {
    REFITD_CHECK(program.status().code() == absl::StatusCode::kFailedPrecondition ||
                 program.status().code() == absl::StatusCode::kResourceExhausted);
    return;
  }
  REFITD_CHECK(static_cast<int64_t>(program->moves.size()) <= options.max_moves);
  const auto again = Compile(pushed, index, options);
  REFITD_CHECK(again.ok() && again->moves == program->moves);
  const Layouts& destinations = index.destinations();
  const auto countable = [](const auto& layout) { return layout == nullptr || Countable(*layout); };
  // The pieces of a bucket share no element.
  if (!Countable(source) || !Disjoint(source)) return;
  if (std::all_of(destinations.begin(), destinations.end(), countable)) {
    CheckMoves(*program, source, destinations, options);
  }
}

// Plans the same layouts over three nodes: the plan is refused with a reason, or every node finds
// its part in it and both ends of every stream agree.
void CheckRoutes(const Layouts& sources, const Layouts& destinations, const PlanOptions& options) {
  std::vector<RouteMember> trainers;
  std::vector<RouteMember> engines;
  for (uint32_t i = 0; i < sources.size(); ++i) {
    trainers.push_back({sources[i], i % 2, 0, "trainer " + std::to_string(i)});
  }
  for (uint32_t i = 0; i < destinations.size(); ++i) {
    engines.push_back({destinations[i], 1 + i % 2, i, "engine " + std::to_string(i)});
  }
  RouteOptions route_options;
  route_options.max_routes = std::min(options.max_moves, kMaxRoutes);
  route_options.split_bytes = 16;
  const auto plan = CompileRoutes(trainers, engines, route_options);
  if (!plan.ok()) {
    REFITD_CHECK(plan.status().code() == absl::StatusCode::kFailedPrecondition ||
                 plan.status().code() == absl::StatusCode::kResourceExhausted);
    return;
  }
  std::map<std::pair<uint32_t, uint32_t>, std::pair<uint64_t, uint64_t>> ends;
  for (uint32_t n = 0; n < plan->nodes; ++n) {
    std::vector<LocalMember> local_sources;
    std::vector<LocalMember> local_destinations;
    for (uint32_t i = 0; i < sources.size(); ++i) {
      if (trainers[i].node == n && sources[i] != nullptr) local_sources.push_back({i, sources[i]});
    }
    for (uint32_t i = 0; i < destinations.size(); ++i) {
      if (engines[i].node != n || plan->destination_skipped[i]) continue;
      local_destinations.push_back({i, destinations[i]});
    }
    const auto program = CompileNode(*plan, n, local_sources, local_destinations, {});
    if (!program.ok()) {
      REFITD_CHECK(program.status().code() == absl::StatusCode::kResourceExhausted);
      return;
    }
    int64_t stored = 0;
    for (const int64_t bytes : program->destination_bytes) stored += bytes;
    REFITD_CHECK(stored == plan->links.node_stores[n]);
    for (const Stream& out : program->outgoing) ends[{n, out.peer}].first = out.Digest();
    for (const Stream& in : program->incoming) ends[{in.peer, n}].second = in.Digest();
  }
  for (const auto& [link, digests] : ends) REFITD_CHECK(digests.first == digests.second);
}

void FuzzOne(const fuzz::LayoutsInput& input) {
  const RegionBytes region_bytes = [&input](RegionId id) -> std::optional<int64_t> {
    const uint64_t i = id.value() - 1;
    if (i >= static_cast<uint64_t>(input.region_bytes_size())) return std::nullopt;
    const int64_t bytes = input.region_bytes(static_cast<int>(i));
    return bytes > 0 ? std::optional(bytes) : std::nullopt;  // as HostRegion::Map requires
  };
  const Layouts sources = Register(input.sources(), region_bytes, /*destination=*/false);
  const Layouts destinations = Register(input.destinations(), region_bytes, /*destination=*/true);

  std::vector<std::string> labels;
  for (size_t i = 0; i < destinations.size(); ++i) labels.push_back("engine " + std::to_string(i));
  const auto index = DestinationIndex::Make(destinations, labels);
  if (!index.ok()) {
    REFITD_CHECK(index.status().code() == absl::StatusCode::kFailedPrecondition);
    return;
  }
  PlanOptions options;
  for (size_t i = 0; i < destinations.size(); ++i) {
    options.skip_destination.push_back(i < static_cast<size_t>(input.skip_destination_size()) &&
                                       input.skip_destination(static_cast<int>(i)));
  }
  if (input.max_moves() > 0) options.max_moves = std::min(input.max_moves(), kMaxMoves);
  CheckRoutes(sources, destinations, options);
  for (const auto& source : sources) {
    if (source != nullptr) CheckPush(*source, **index, options);
  }
}

}  // namespace
}  // namespace refitd

REFITD_PROTO_FUZZ_TARGET(refitd::fuzz::LayoutsInput)
