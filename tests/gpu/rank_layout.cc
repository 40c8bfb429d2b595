#include "tests/gpu/rank_layout.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "tests/gpu/values.h"
#include "tests/workloads/sharding/arena.h"
#include "tests/workloads/sharding/megatron.h"
#include "tests/workloads/sharding/model.h"
#include "tests/workloads/sharding/vllm.h"
#include "transport/base/status.h"

namespace refitd::gpu {
namespace {

// ---- random layouts ----

class Random {
 public:
  explicit Random(uint64_t seed) : state_(Mix(seed + 0x9e3779b97f4a7c15)) {}
  // A random number in [low, high].
  int64_t In(int64_t low, int64_t high) {
    state_ += 0x9e3779b97f4a7c15;
    return low + static_cast<int64_t>(Mix(state_) % static_cast<uint64_t>(high - low + 1));
  }
  bool OneIn(int64_t n) { return In(1, n) == 1; }

 private:
  uint64_t state_;
};

constexpr int kRandomTensors = 60;
constexpr DType kDTypes[] = {DType::kFloat64,  DType::kFloat32,      DType::kFloat16,
                             DType::kBFloat16, DType::kFloat8E4M3FN, DType::kInt64,
                             DType::kInt16,    DType::kUint8,        DType::kBool};

TensorSpec RandomTensor(uint64_t seed, int index) {
  Random random(seed * 1000 + static_cast<uint64_t>(index));
  TensorSpec tensor;
  tensor.name = fmt::format("random.{}", index);
  tensor.dtype = kDTypes[random.In(0, std::size(kDTypes) - 1)];
  const int64_t dims = random.In(1, 4);
  const int64_t most = dims == 1 ? 3'000'000 : dims == 2 ? 2'500 : dims == 3 ? 160 : 40;
  for (int64_t d = 0; d < dims; ++d) tensor.shape.push_back(random.In(1, most));
  return tensor;
}

// The rank's boxes: the whole tensor, or a range of one dimension, cut in two along another
// dimension.
std::vector<Box> RandomBoxes(const TensorSpec& tensor, Random* random, int rank, int world) {
  Box box = WholeBox(tensor.shape);
  const int64_t last = static_cast<int64_t>(tensor.shape.size()) - 1;
  const size_t cut = static_cast<size_t>(random->In(0, last));
  const size_t again = static_cast<size_t>(random->In(0, last));
  const bool replicated = random->OneIn(4);
  std::vector<int64_t> cuts = {0, tensor.shape[cut]};
  for (int r = 1; r < world; ++r) cuts.push_back(random->In(0, tensor.shape[cut]));
  std::sort(cuts.begin(), cuts.end());
  const int64_t split = random->In(0, tensor.shape[again]);
  if (!replicated) {
    box.offset[cut] = cuts[static_cast<size_t>(rank)];
    box.extent[cut] = cuts[static_cast<size_t>(rank) + 1] - box.offset[cut];
  }
  if (again == cut) return {box};
  Box first = box;
  Box second = box;
  first.extent[again] = split;
  second.offset[again] = split;
  second.extent[again] -= split;
  return {first, second};
}

// Strides with padded rows, and sometimes with another order of dimensions than the tensor's.
Dims RandomStrides(const Box& box, Random* random) {
  std::vector<size_t> order(box.extent.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (random->OneIn(4)) std::reverse(order.begin(), order.end());
  Dims strides(box.extent.size(), 1);
  int64_t stride = 1;
  for (size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = stride;
    stride *= box.extent[order[i]];
    if (random->OneIn(2)) stride += random->In(0, 9);
  }
  return strides;
}

absl::StatusOr<Layout> RandomLayout(const LayoutOptions& options) {
  Layout layout;
  int64_t end = 0;
  for (int t = 0; t < kRandomTensors; ++t) {
    const TensorSpec tensor = RandomTensor(options.random_seed, t);
    // All ranks of a side use the same random numbers, so that they agree about the cuts.
    Random side(options.random_seed * 2'000'003 + static_cast<uint64_t>(t) * 2 +
                (options.trainer ? 1 : 0));
    bool held = false;
    for (const Box& box : RandomBoxes(tensor, &side, options.rank, options.world)) {
      if (ElementCount(box) == 0) continue;
      Random own(options.random_seed * 31 + static_cast<uint64_t>(t) * 7919 +
                 static_cast<uint64_t>(options.rank));
      if (!held) layout.tensors.push_back(tensor);
      held = true;
      Piece piece{static_cast<uint32_t>(layout.tensors.size() - 1), box, RegionId(1), end,
                  RandomStrides(box, &own)};
      REFITD_ASSIGN_OR_RETURN(const int64_t span, SpanBytes(piece, tensor.dtype));
      end = AlignUp(end + span);
      layout.pieces.push_back(std::move(piece));
    }
  }
  return layout;
}

// ---- models ----

absl::StatusOr<sharding::ModelConfig> Model(const LayoutOptions& options) {
  REFITD_ASSIGN_OR_RETURN(sharding::ModelConfig config, sharding::FindModelConfig(options.model));
  if (options.tiny) config = sharding::ScaledDown(config);
  if (options.layers > 0) config.layers = options.layers;
  if (options.experts > 0) config.experts = options.experts;
  REFITD_RETURN_IF_ERROR(sharding::ValidateModel(config));
  return config;
}

absl::StatusOr<std::vector<TensorSpec>> Tensors(const LayoutOptions& options) {
  const std::vector<std::string> words = absl::StrSplit(options.model, ':');
  if (words[0] != "tensors") {
    REFITD_ASSIGN_OR_RETURN(const sharding::ModelConfig config, Model(options));
    return sharding::HfTensors(config);
  }
  int64_t count = 0;
  int64_t bytes = 0;
  if (words.size() != 3 || !absl::SimpleAtoi(words[1], &count) ||
      !absl::SimpleAtoi(words[2], &bytes) || count < 1 || bytes < 2) {
    return Error(absl::StatusCode::kInvalidArgument, "model {}: not tensors:N:BYTES",
                 options.model);
  }
  std::vector<TensorSpec> tensors;
  for (int64_t i = 0; i < count; ++i) {
    tensors.push_back({fmt::format("tensor.{}", i), DType::kBFloat16, {bytes / 2}});
  }
  return tensors;
}

// Every `ranks`-th tensor, whole.
absl::StatusOr<Layout> WholeTensors(const LayoutOptions& options, int rank, int ranks) {
  REFITD_ASSIGN_OR_RETURN(const std::vector<TensorSpec> tensors, Tensors(options));
  Layout layout;
  int64_t end = 0;
  for (size_t t = static_cast<size_t>(rank); t < tensors.size(); t += static_cast<size_t>(ranks)) {
    const Box box = WholeBox(tensors[t].shape);
    layout.pieces.push_back({static_cast<uint32_t>(layout.tensors.size()), box, RegionId(1), end,
                             RowMajorStrides(box.extent)});
    layout.tensors.push_back(tensors[t]);
    end = AlignUp(end + sharding::TensorBytes(tensors[t]));
  }
  return layout;
}

absl::StatusOr<Layout> Arena(const LayoutOptions& options) {
  if (options.kind == "random") return RandomLayout(options);
  if (options.kind == "push") return WholeTensors(options, options.rank, options.world);
  if (options.model.starts_with("tensors:")) return WholeTensors(options, 0, 1);
  REFITD_ASSIGN_OR_RETURN(const sharding::ModelConfig config, Model(options));
  if (options.kind == "fsdp") return sharding::FsdpLayout(config, options.world, options.rank);
  if (options.kind == "megatron") {
    const sharding::TrainerParallel parallel{.world = options.world,
                                             .pp = options.pp,
                                             .tp = options.tp,
                                             .ep = options.ep,
                                             .etp = options.etp};
    return sharding::MegatronLayout(config, parallel, options.rank);
  }
  if (options.kind == "vllm") {
    const sharding::EngineParallel parallel{.tp = options.tp, .ep = options.ep > 1};
    return sharding::VllmLayout(config, parallel, options.rank);
  }
  return Error(absl::StatusCode::kInvalidArgument, "layout kind {}", options.kind);
}

// ---- blocks ----

// Moves the pieces of an arena into blocks, in their order. Adjacent pieces stay adjacent, unless a
// block ends between them or `odd` wants gaps.
absl::StatusOr<RankLayout> DivideIntoBlocks(Layout layout, const LayoutOptions& options) {
  std::stable_sort(layout.pieces.begin(), layout.pieces.end(),
                   [](const Piece& a, const Piece& b) { return a.byte_offset < b.byte_offset; });
  RankLayout made;
  Random random(options.random_seed + static_cast<uint64_t>(options.rank) * 101);
  int64_t arena_end = 0;  // the end of the piece before, in the arena
  int64_t end = 0;        // the end of the block so far
  for (Piece& piece : layout.pieces) {
    const TensorSpec& tensor = layout.tensors[piece.tensor];
    const int64_t size = ElementBytes(tensor.dtype);
    REFITD_ASSIGN_OR_RETURN(const int64_t span, SpanBytes(piece, tensor.dtype));
    const int64_t gap = options.odd ? random.In(0, 40) * size : piece.byte_offset - arena_end;
    int64_t begin = (end + std::max<int64_t>(gap, 0) + size - 1) / size * size;
    if (made.block_bytes.empty() || begin + span > std::max(options.block_bytes, end)) {
      made.block_bytes.push_back(0);
      begin = options.odd ? random.In(0, 40) * size : 0;
    }
    arena_end = piece.byte_offset + span;
    piece.region = RegionId(made.block_bytes.size());
    piece.byte_offset = begin;
    end = begin + span;
    made.block_bytes.back() = end;
    made.piece_names.push_back(tensor.name);
  }
  // A byte behind the last piece is checked too.
  for (int64_t& bytes : made.block_bytes) bytes = AlignUp(bytes + 1);
  made.layout = std::move(layout);
  return made;
}

}  // namespace

absl::StatusOr<RankLayout> MakeRankLayout(const LayoutOptions& options) {
  REFITD_ASSIGN_OR_RETURN(Layout arena, Arena(options));
  return DivideIntoBlocks(std::move(arena), options);
}

}  // namespace refitd::gpu
