#include "transport/plan/overlap.h"

#include <algorithm>
#include <optional>
#include <set>
#include <tuple>

#include "transport/base/errors.h"
#include "transport/base/status.h"
#include "transport/plan/strided_bytes.h"

namespace refitd {
namespace {

using Kind = MemoryOrigin::Kind;

// Comparisons of pieces, and steps of arithmetic over their storage: less than a second.
constexpr int64_t kMaxOverlapSteps = int64_t{1} << 26;

using Object = std::tuple<Kind, uint64_t, uint64_t>;
Object ObjectOf(const MemoryOrigin& origin) { return {origin.kind, origin.space, origin.object}; }

bool IsKnown(const MemoryOrigin& origin) {
  return origin.kind != Kind::kPrivate && origin.kind != Kind::kUnknown;
}

bool IsExported(const MemoryOrigin& origin) {
  return origin.kind == Kind::kExported || origin.kind == Kind::kUnknown;
}

bool Lists(const std::vector<MemoryOrigin>& origins, const MemoryOrigin& origin) {
  return std::any_of(origins.begin(), origins.end(), [&origin](const MemoryOrigin& listed) {
    return ObjectOf(listed) == ObjectOf(origin);
  });
}

// A piece in an object.
struct Placed {
  const TensorSpec* tensor = nullptr;
  const Piece* piece = nullptr;
  StridedBytes bytes;  // from the object's start
  uint32_t member = 0;
  bool destination = false;
};

std::optional<Placed> Place(const TensorSpec& tensor, const Piece& piece, int64_t begin) {
  const absl::StatusOr<int64_t> span = SpanBytes(piece, tensor.dtype);
  if (!span.ok() || *span == 0) return std::nullopt;
  Placed placed;
  placed.tensor = &tensor;
  placed.piece = &piece;
  placed.bytes = MakeStridedBytes(begin + piece.byte_offset, *span, ElementBytes(tensor.dtype),
                                  piece.box.extent, piece.strides);
  return placed;
}

// Whether `small` is a part of `big` with each element at the same place, and `big` has no two
// elements at one place.
bool IsPartOf(const Placed& small, const Placed& big, int64_t* steps) {
  const Piece& s = *small.piece;
  const Piece& b = *big.piece;
  if (!Contains(b.box, s.box)) return false;
  const int64_t element = ElementBytes(small.tensor->dtype);
  int64_t at = big.bytes.begin;
  for (size_t d = 0; d < s.box.extent.size(); ++d) {
    if (s.box.extent[d] > 1 && s.strides[d] != b.strides[d]) return false;
    if (b.box.extent[d] > 1) at += (s.box.offset[d] - b.box.offset[d]) * b.strides[d] * element;
  }
  return at == small.bytes.begin && RepeatsBytes(big.bytes, kMaxOverlapSteps, steps) == false;
}

bool AtSamePlaces(const Placed& a, const Placed& b, int64_t* steps) {
  return *a.tensor == *b.tensor && (IsPartOf(a, b, steps) || IsPartOf(b, a, steps));
}

std::string Name(const Object& object) {
  const auto& [kind, space, number] = object;
  switch (kind) {
    case Kind::kFile:
      return fmt::format("memfd of inode {}", number);
    case Kind::kBlock:
      return "one block of a GPU's memory";
    case Kind::kExported:
      return fmt::format("GPU {}'s memory that process {} exported", space, number);
    case Kind::kPrivate:
    case Kind::kUnknown:
      break;
  }
  return "one memory";
}

absl::Status OverlapError(const Object& object, const Placed& a, std::string_view label_a,
                          const Placed& b, std::string_view label_b) {
  return Precondition(
      "tensor {} of {} and tensor {} of {} overlap in memory ({}: bytes {} to {}, and {} to {}) "
      "and "
      "are not the same elements at the same places, so that writing one would change the other: "
      "give each its own memory",
      a.tensor->name, label_a, b.tensor->name, label_b, Name(object), a.bytes.begin, a.bytes.end,
      b.bytes.begin, b.bytes.end);
}

// Whether sharing bytes spoils neither of the two.
bool Harmless(const Placed& a, const Placed& b, int64_t* steps) {
  if (!a.destination && !b.destination) return true;
  ++*steps;
  if (AtSamePlaces(a, b, steps)) return true;
  return ShareBytes(a.bytes, b.bytes, kMaxOverlapSteps, steps) == false;
}

// Objects in which a destination and at least one other region lie, and the regions in them.
using Shared = std::map<Object, std::vector<std::pair<uint32_t, RegionId>>>;
Shared SharedObjects(const std::vector<PlacedLayout>& members) {
  Shared objects;
  for (uint32_t m = 0; m < members.size(); ++m) {
    for (const auto& [region, origin] : members[m].origins) {
      if (IsKnown(origin)) objects[ObjectOf(origin)].emplace_back(m, region);
    }
  }
  std::erase_if(objects, [&members](const auto& object) {
    const auto& regions = object.second;
    return regions.size() < 2 || std::none_of(regions.begin(), regions.end(), [&](const auto& r) {
             return members[r.first].destination;
           });
  });
  return objects;
}

std::vector<Placed> PiecesIn(const std::vector<std::pair<uint32_t, RegionId>>& regions,
                             const std::vector<PlacedLayout>& members) {
  std::map<uint32_t, std::set<RegionId>> by_member;
  for (const auto& [member, region] : regions) by_member[member].insert(region);
  std::vector<Placed> pieces;
  for (const auto& [m, of_member] : by_member) {
    const PlacedLayout& member = members[m];
    for (const Piece& piece : member.layout->pieces) {
      if (!of_member.contains(piece.region)) continue;
      std::optional<Placed> placed =
          Place(member.layout->tensors[piece.tensor], piece, member.origins.at(piece.region).begin);
      if (!placed.has_value()) continue;
      placed->member = m;
      placed->destination = member.destination;
      pieces.push_back(*std::move(placed));
    }
  }
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const Placed& a, const Placed& b) { return a.bytes.begin < b.bytes.begin; });
  return pieces;
}

}  // namespace

SameMemory Compare(const MemoryOrigin& a, const MemoryOrigin& b) {
  if (IsKnown(a) && ObjectOf(a) == ObjectOf(b)) return SameMemory::kYes;
  if (!IsExported(a) || !IsExported(b) || a.space != b.space) return SameMemory::kNo;
  return SameMemory::kUnknown;
}

absl::Status CheckOverlap(const std::vector<PlacedLayout>& members) {
  int64_t steps = 0;
  for (const auto& [object, regions] : SharedObjects(members)) {
    const std::vector<Placed> pieces = PiecesIn(regions, members);
    for (size_t i = 0; i < pieces.size(); ++i) {
      const Placed& a = pieces[i];
      for (size_t j = i + 1; j < pieces.size() && pieces[j].bytes.begin < a.bytes.end; ++j) {
        const Placed& b = pieces[j];
        // ValidateLayout has compared pieces of one region.
        const bool one_region = a.member == b.member && a.piece->region == b.piece->region;
        if (one_region) continue;
        if (++steps > kMaxOverlapSteps || !Harmless(a, b, &steps)) {
          return OverlapError(object, a, members[a.member].label, b, members[b.member].label);
        }
      }
    }
  }
  return absl::OkStatus();
}

std::vector<std::vector<RegionId>> UnknownSources(const std::vector<PlacedLayout>& members) {
  std::vector<MemoryOrigin> written;
  for (const PlacedLayout& member : members) {
    if (!member.destination) continue;
    for (const auto& [region, origin] : member.origins) written.push_back(origin);
  }
  std::vector<std::vector<RegionId>> unknown(members.size());
  for (size_t m = 0; m < members.size(); ++m) {
    if (members[m].destination) continue;
    for (const auto& [region, origin] : members[m].origins) {
      const MemoryOrigin& source = origin;
      if (std::any_of(written.begin(), written.end(), [&source](const MemoryOrigin& o) {
            return Compare(source, o) == SameMemory::kUnknown;
          })) {
        unknown[m].push_back(region);
      }
    }
  }
  return unknown;
}

DestinationPlaces::DestinationPlaces(std::vector<PlacedLayout> destinations)
    : destinations_(std::move(destinations)) {
  for (uint32_t d = 0; d < destinations_.size(); ++d) {
    for (const auto& [region, origin] : destinations_[d].origins) {
      if (IsExported(origin) && !Lists(exported_, origin)) exported_.push_back(origin);
      if (!IsKnown(origin)) continue;
      std::vector<uint32_t>& list = in_object_[ObjectOf(origin)];
      if (list.empty() || list.back() != d) list.push_back(d);
    }
  }
}

bool DestinationPlaces::Shares(const MemoryOrigin& origin) const {
  return IsKnown(origin) && in_object_.contains(ObjectOf(origin));
}

bool DestinationPlaces::IsUnknown(const MemoryOrigin& origin) const {
  return std::any_of(exported_.begin(), exported_.end(), [&origin](const MemoryOrigin& written) {
    return Compare(origin, written) == SameMemory::kUnknown;
  });
}

absl::Status DestinationPlaces::Check(const TensorSpec& tensor, const Box& box,
                                      const MemoryOrigin& origin, std::string_view label) const {
  const auto found = in_object_.find(ObjectOf(origin));
  if (found == in_object_.end()) return absl::OkStatus();
  Piece piece;
  piece.box = box;
  piece.strides = RowMajorStrides(tensor.shape);
  const std::optional<Placed> source = Place(tensor, piece, origin.begin);
  if (!source.has_value()) return absl::OkStatus();
  int64_t steps = 0;
  for (const uint32_t d : found->second) {
    const PlacedLayout& destination = destinations_[d];
    for (const Piece& other : destination.layout->pieces) {
      const auto region = destination.origins.find(other.region);
      if (region == destination.origins.end() || ObjectOf(region->second) != found->first) continue;
      std::optional<Placed> placed =
          Place(destination.layout->tensors[other.tensor], other, region->second.begin);
      if (!placed.has_value() || placed->bytes.begin >= source->bytes.end ||
          source->bytes.begin >= placed->bytes.end) {
        continue;
      }
      placed->destination = true;
      if (++steps > kMaxOverlapSteps || !Harmless(*source, *placed, &steps)) {
        return OverlapError(found->first, *source, label, *placed, destination.label);
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace refitd
