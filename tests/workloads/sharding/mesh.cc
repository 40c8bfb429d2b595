#include "tests/workloads/sharding/mesh.h"

#include <algorithm>
#include <utility>

#include "transport/base/errors.h"
#include "transport/base/status.h"

namespace refitd::sharding {

absl::StatusOr<Mesh> Mesh::Make(std::vector<MeshDim> dims) {
  if (dims.empty() || dims.size() > kMaxMeshDims) {
    return Invalid("mesh has {} dimensions, 1 to {} are possible", dims.size(), kMaxMeshDims);
  }
  int64_t ranks = 1;
  for (size_t i = 0; i < dims.size(); ++i) {
    const MeshDim& dim = dims[i];
    if (dim.name.empty()) return Invalid("mesh dimension {} has no name", i);
    for (size_t j = 0; j < i; ++j) {
      if (dims[j].name == dim.name) return Invalid("mesh dimension {} is there twice", dim.name);
    }
    if (dim.size < 1) return Invalid("mesh dimension {} has size {}", dim.name, dim.size);
    if (dim.size > kMaxMeshRanks / ranks) {
      return Invalid("mesh has more than {} ranks at dimension {} of size {}", kMaxMeshRanks,
                     dim.name, dim.size);
    }
    ranks *= dim.size;
  }
  return Mesh(std::move(dims), ranks);
}

absl::StatusOr<Dims> Mesh::Coordinates(int64_t rank) const {
  if (rank < 0 || rank >= ranks_) {
    return Invalid("rank {} is not in a mesh of {} ranks", rank, ranks_);
  }
  Dims coordinates(dims_.size(), 0);
  for (size_t i = dims_.size(); i-- > 0;) {
    coordinates[i] = rank % dims_[i].size;
    rank /= dims_[i].size;
  }
  return coordinates;
}

absl::StatusOr<int64_t> Mesh::Coordinate(std::string_view dim, int64_t rank) const {
  REFITD_ASSIGN_OR_RETURN(const Dims coordinates, Coordinates(rank));
  for (size_t i = 0; i < dims_.size(); ++i) {
    if (dims_[i].name == dim) return coordinates[i];
  }
  return Invalid("mesh has no dimension {}", dim);
}

absl::StatusOr<int64_t> Mesh::RankOf(const Dims& coordinates) const {
  if (coordinates.size() != dims_.size()) {
    return Invalid("{} coordinates for a mesh of {} dimensions", coordinates.size(), dims_.size());
  }
  int64_t rank = 0;
  for (size_t i = 0; i < dims_.size(); ++i) {
    if (coordinates[i] < 0 || coordinates[i] >= dims_[i].size) {
      return Invalid("coordinate {} is not in mesh dimension {} of size {}", coordinates[i],
                     dims_[i].name, dims_[i].size);
    }
    rank = rank * dims_[i].size + coordinates[i];
  }
  return rank;
}

ShardRange ShardOf(int64_t n, int64_t shards, int64_t index, ShardRule rule) {
  REFITD_CHECK(n >= 0 && index >= 0 && index < shards);
  if (rule == ShardRule::kBalanced) {
    const int64_t larger = n % shards;
    const int64_t size = n / shards;
    return {index * size + std::min(index, larger), size + (index < larger ? 1 : 0)};
  }
  const int64_t chunk = n / shards + (n % shards == 0 ? 0 : 1);
  const int64_t begin = chunk == 0 || index > n / chunk ? n : index * chunk;
  return {begin, std::min(chunk, n - begin)};
}

absl::StatusOr<Box> ShardBox(const Dims& shape, const Mesh& mesh,
                             std::span<const Placement> placements, int64_t rank) {
  REFITD_RETURN_IF_ERROR(ElementCount(shape).status());
  if (placements.size() != mesh.dims().size()) {
    return Invalid("{} placements for a mesh of {} dimensions", placements.size(),
                   mesh.dims().size());
  }
  REFITD_ASSIGN_OR_RETURN(const Dims coordinates, mesh.Coordinates(rank));
  Box box = WholeBox(shape);
  for (size_t i = 0; i < placements.size(); ++i) {
    const Placement& placement = placements[i];
    if (placement.kind == Placement::Kind::kReplicate) continue;
    if (placement.dim < 0 || static_cast<size_t>(placement.dim) >= shape.size()) {
      return Invalid("mesh dimension {} shards dimension {} of a tensor of rank {}",
                     mesh.dims()[i].name, placement.dim, shape.size());
    }
    const auto d = static_cast<size_t>(placement.dim);
    const ShardRange range =
        ShardOf(box.extent[d], mesh.dims()[i].size, coordinates[i], placement.rule);
    box.offset[d] += range.offset;
    box.extent[d] = range.extent;
  }
  return box;
}

}  // namespace refitd::sharding
