// Random transfers over device memory of another process, each with a model: the same transfer over
// plain memory, for the host transport. Tests with the fake driver and tests on a GPU both use
// this.
#ifndef REFITD_TRANSPORT_CUDA_RANDOM_TRANSFER_TESTING_H_
#define REFITD_TRANSPORT_CUDA_RANDOM_TRANSFER_TESTING_H_

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/bound_moves.h"
#include "transport/cuda/memory.h"
#include "transport/transport.h"
#include "transport/transport_testing.h"

namespace refitd {

inline constexpr int kHost = -1;
inline constexpr int64_t kBlockBytes = 1 << 20;

// The process whose memory is mapped.
class Exporter {
 public:
  virtual ~Exporter() = default;
  // A new block with these bytes; returns its legacy handle.
  virtual std::string Export(int device, const std::vector<char>& bytes) = 0;
  // The bytes that the nth exported block holds now.
  virtual std::vector<char> Read(size_t block, size_t bytes) = 0;
};

// One member's memory: of another process on a device, or of this one.
struct Block {
  std::vector<char> model;  // what the memory holds if the host transport does the work
  int device = kHost;
  size_t exported = 0;  // number of the exporter's block
  std::shared_ptr<const DeviceRegion> region;
  int64_t used = 0;

  char* data() { return region != nullptr ? region->data() : model.data(); }
};

// The same transfer over device memory and, as a model, over plain memory.
class World {
 public:
  World(Exporter* exporter, CudaMemory* memory, Rng* random)
      : exporter_(exporter), memory_(memory), random_(random) {
    model.label = "version 3, part 7";
  }

  Block* AddBlock(int device) {
    blocks_.push_back(std::make_unique<Block>());
    Block* const block = blocks_.back().get();
    block->device = device;
    block->model.resize(kBlockBytes);
    for (size_t i = 0; i + 8 <= block->model.size(); i += 8) {
      const uint64_t bits = (*random_)();
      std::memcpy(block->model.data() + i, &bits, 8);
    }
    if (device == kHost) return block;
    const std::string handle = exporter_->Export(device, block->model);
    block->exported = exported_++;
    auto region = memory_->OpenBlock(device, handle);
    REQUIRE(region.ok());
    block->region = *std::move(region);
    return block;
  }

  BoundPiece Place(Block* block, const std::string& name, DType dtype, const Dims& shape,
                   const Box& box, const Dims& strides) {
    const int64_t bytes = ByteSpan(box.extent, strides, ElementBytes(dtype));
    block->used = (block->used + 7) / 8 * 8 + Pick(random_, 0, 2) * 8;
    REQUIRE(block->used + bytes <= kBlockBytes);
    char* const data = block->model.data() + block->used;
    block->used += bytes;
    return {
        .dtype = dtype, .shape = shape, .box = box, .strides = strides, .data = data, .name = name};
  }

  void AddMove(uint32_t source, uint32_t destination, const Box& box) {
    const BoundPiece& from = model.source[source];
    auto& pieces = model.destinations[destination];
    const BoundPiece& to = pieces.back();
    model.plan.moves.push_back(
        {.source = 0,
         .source_piece = source,
         .destination = destination,
         .destination_piece = static_cast<uint32_t>(pieces.size() - 1),
         .box = box,
         .source_byte_offset = ByteDistance(box, from.box, from.strides, ElementBytes(from.dtype)),
         .destination_byte_offset = ByteDistance(box, to.box, to.strides, ElementBytes(to.dtype))});
  }

  // Returns the model's transfer with its pieces in the blocks' device memory.
  Transfer OnDevices() {
    Transfer transfer = model;
    for (BoundPiece& piece : transfer.source) piece.data = Move(piece.data);
    for (auto& pieces : transfer.destinations) {
      for (BoundPiece& piece : pieces) piece.data = Move(piece.data);
    }
    for (const auto& block : blocks_) {
      if (block->region != nullptr) transfer.keep_alive.push_back(block->region);
    }
    return transfer;
  }

  void CheckBytes() const {
    for (const auto& block : blocks_) {
      if (block->device == kHost) continue;
      const std::vector<char> bytes = exporter_->Read(block->exported, block->model.size());
      REQUIRE(std::memcmp(bytes.data(), block->model.data(), bytes.size()) == 0);
    }
  }

  // Lets go of the blocks' regions.
  void DropRegions() {
    for (const auto& block : blocks_) block->region.reset();
  }

  Transfer model;

 private:
  char* Move(char* data) const {
    for (const auto& block : blocks_) {
      const int64_t offset = data - block->model.data();
      if (offset >= 0 && offset < kBlockBytes) return block->data() + offset;
    }
    return data;
  }

  Exporter* const exporter_;
  CudaMemory* const memory_;
  Rng* const random_;
  std::vector<std::unique_ptr<Block>> blocks_;
  size_t exported_ = 0;
};

inline Dims RandomStrides(Rng* random, const Dims& extent, bool transpose) {
  Dims strides(extent.size(), 0);
  std::vector<size_t> order(extent.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  if (transpose) std::shuffle(order.begin(), order.end(), *random);
  int64_t elements = 1;
  for (const int64_t n : extent) elements *= n;
  // The elements of some small tensors lie apart.
  int64_t stride = elements <= 4096 && Pick(random, 0, 4) == 0 ? Pick(random, 2, 3) : 1;
  for (size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = stride;
    stride *= extent[order[i]] + (Pick(random, 0, 2) == 0 ? Pick(random, 1, 5) : 0);
  }
  return strides;
}

inline Box RandomPart(Rng* random, const Box& of) {
  Box box = of;
  for (size_t d = 0; d < of.extent.size(); ++d) {
    if (Pick(random, 0, 1) == 0) continue;
    const int64_t from = Pick(random, 0, of.extent[d] - 1);
    box.offset[d] = of.offset[d] + from;
    box.extent[d] = Pick(random, 1, of.extent[d] - from);
  }
  return box;
}

inline Dims RandomShape(Rng* random) {
  const int64_t rank = Pick(random, 0, 5);
  Dims shape;
  for (int64_t d = 0; d < rank; ++d) shape.push_back(Pick(random, 1, rank > 2 ? 7 : 60));
  return shape;
}

// Fills the world with sources on devices 0 to `devices` - 1 and, if `host_sources`, in host
// memory.
inline void FillRandomly(World* world, Rng* random, bool host_sources, int devices = 2) {
  constexpr DType kTypes[] = {DType::kFloat8E4M3FN, DType::kBFloat16, DType::kFloat32,
                              DType::kInt64};
  std::vector<Block*> sources;
  std::vector<Block*> destinations;
  for (int64_t i = Pick(random, 1, 3); i > 0; --i) {
    const bool on_host = host_sources && Pick(random, 0, 1) == 0;
    sources.push_back(
        world->AddBlock(on_host ? kHost : static_cast<int>(Pick(random, 0, devices - 1))));
  }
  for (int64_t i = Pick(random, 1, 3); i > 0; --i) {
    destinations.push_back(world->AddBlock(static_cast<int>(Pick(random, 0, devices - 1))));
  }
  Transfer& model = world->model;
  model.destinations.resize(destinations.size());
  model.want_source_digests = Pick(random, 0, 2) == 0;
  for (size_t d = 0; d < destinations.size(); ++d) {
    model.readback_now.push_back(Pick(random, 0, 2) == 0);
  }
  const int64_t tensors = Pick(random, 1, 6);
  for (int64_t t = 0; t < tensors; ++t) {
    const std::string name = "tensor." + std::to_string(t);
    const DType dtype = kTypes[Pick(random, 0, 3)];
    const Dims shape = RandomShape(random);
    const Box box = RandomPart(random, WholeBox(shape));
    Block* const block = sources[static_cast<size_t>(Pick(random, 0, sources.size() - 1))];
    model.source.push_back(
        world->Place(block, name, dtype, shape, box,
                     RandomStrides(random, box.extent, Pick(random, 0, 4) == 0)));
    for (uint32_t d = 0; d < destinations.size(); ++d) {
      if (Pick(random, 0, 4) == 0) continue;
      const Box part = RandomPart(random, box);
      model.destinations[d].push_back(
          world->Place(destinations[d], name, dtype, shape, part,
                       RandomStrides(random, part.extent, Pick(random, 0, 4) == 0)));
      world->AddMove(static_cast<uint32_t>(t), d, part);
    }
  }
}

// Fills the world with one dense bf16 tensor, from one device to others.
inline void FillSimply(World* world, int source, const std::vector<int>& destinations,
                       const Dims& shape = {64, 32}) {
  const Box box = WholeBox(shape);
  const Dims strides = RowMajorStrides(shape);
  world->model.source.push_back(
      world->Place(world->AddBlock(source), "weight", DType::kBFloat16, shape, box, strides));
  world->model.destinations.resize(destinations.size());
  for (uint32_t d = 0; d < destinations.size(); ++d) {
    world->model.destinations[d].push_back(world->Place(world->AddBlock(destinations[d]), "weight",
                                                        DType::kBFloat16, shape, box, strides));
    world->AddMove(0, d, box);
  }
}

// The model's transfer on devices, through one slot on each of `slots_on`: pools that stay as long
// as `pools` keeps them. Its sources must be dense and on one device.
struct BroadcastPools {
  std::vector<DevicePool> pools;
  int64_t slot_bytes = 0;
};
inline Transfer Broadcasting(World* world, CudaMemory* memory, Rng* random,
                             const std::vector<int>& slots_on, BroadcastMethod method,
                             BroadcastPools* pools) {
  Transfer transfer = world->OnDevices();
  Broadcast broadcast{.method = method, .slots = {}, .byte_offsets = {}};
  int64_t at = 0;
  for (const BoundPiece& piece : transfer.source) {
    at += Pick(random, 0, 2) * 256;
    broadcast.byte_offsets.push_back(at);
    at += (ElementCount(piece.box) * ElementBytes(piece.dtype) + 255) / 256 * 256;
  }
  pools->slot_bytes = at + 256;
  for (const int device : slots_on) {
    absl::StatusOr<DevicePool> pool = memory->MakePool(device, 2 * pools->slot_bytes);
    REQUIRE(pool.ok());
    const auto& region = pool->region;
    // Use the pool's second slot, so that the slot begins at an offset.
    broadcast.slots.push_back({region->data() + pools->slot_bytes, pools->slot_bytes, region});
    pools->pools.push_back(*std::move(pool));
  }
  transfer.broadcast = std::move(broadcast);
  return transfer;
}

// Fills the world with dense sources on one device, and destinations on any.
inline void FillForBroadcast(World* world, Rng* random, int source, int devices) {
  constexpr DType kTypes[] = {DType::kFloat8E4M3FN, DType::kBFloat16, DType::kFloat32,
                              DType::kInt64};
  Block* const from = world->AddBlock(source);
  Transfer& model = world->model;
  std::vector<Block*> destinations;
  for (int64_t i = Pick(random, 0, 4); i > 0; --i) {
    destinations.push_back(world->AddBlock(static_cast<int>(Pick(random, 0, devices - 1))));
    model.readback_now.push_back(false);
  }
  model.destinations.resize(destinations.size());
  for (int64_t t = Pick(random, 1, 8); t > 0; --t) {
    const std::string name = "tensor." + std::to_string(t);
    const DType dtype = kTypes[Pick(random, 0, 3)];
    const Dims shape = RandomShape(random);
    const Box box = WholeBox(shape);
    const auto piece = static_cast<uint32_t>(model.source.size());
    model.source.push_back(world->Place(from, name, dtype, shape, box, RowMajorStrides(shape)));
    for (uint32_t d = 0; d < destinations.size(); ++d) {
      if (Pick(random, 0, 4) == 0) continue;
      const Box part = RandomPart(random, box);
      model.destinations[d].push_back(
          world->Place(destinations[d], name, dtype, shape, part,
                       RandomStrides(random, part.extent, Pick(random, 0, 4) == 0)));
      world->AddMove(piece, d, part);
    }
  }
}

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_RANDOM_TRANSFER_TESTING_H_
