#include "tests/workloads/sharding/megatron.h"

#include <utility>
#include <vector>

#include "transport/base/errors.h"
#include "transport/base/status.h"

namespace refitd::sharding {
namespace {

constexpr int64_t kVocabularyMultiple = 128;

// A mesh (pp, `replicas`, middle, inner) over the world; the second dimension takes the ranks that
// are left.
absl::StatusOr<Mesh> MeshOver(const TrainerParallel& parallel, std::string_view replicas,
                              const MeshDim& middle, const MeshDim& inner) {
  int64_t product = 1;
  for (const MeshDim& dim : {MeshDim{"pp", parallel.pp}, middle, inner}) {
    if (dim.size < 1 || dim.size > kMaxMeshRanks) {
      return Invalid("{} is {}, 1 to {} are possible", dim.name, dim.size, kMaxMeshRanks);
    }
    product *= dim.size;
    if (product > kMaxMeshRanks)
      return Invalid("more than {} ranks at {}", kMaxMeshRanks, dim.name);
  }
  if (parallel.world < 1 || parallel.world % product != 0) {
    return Invalid("world {} is not divisible by pp {} * {} {} * {} {}", parallel.world,
                   parallel.pp, middle.name, middle.size, inner.name, inner.size);
  }
  return Mesh::Make(
      {{"pp", parallel.pp}, {std::string(replicas), parallel.world / product}, middle, inner});
}

// A rank's coordinates in both meshes.
struct Place {
  int64_t stage = 0;
  int64_t tp = 0;
  int64_t ep = 0;
  int64_t etp = 0;
};

absl::StatusOr<Place> PlaceOf(const TrainerParallel& parallel, int64_t rank) {
  REFITD_ASSIGN_OR_RETURN(const Mesh dense, DenseMesh(parallel));
  REFITD_ASSIGN_OR_RETURN(const Mesh expert, ExpertMesh(parallel));
  REFITD_ASSIGN_OR_RETURN(const Dims in_dense, dense.Coordinates(rank));
  REFITD_ASSIGN_OR_RETURN(const Dims in_expert, expert.Coordinates(rank));
  return Place{in_dense[0], in_dense[3], in_expert[2], in_expert[3]};
}

absl::Status CheckModel(const ModelConfig& c, const TrainerParallel& p) {
  REFITD_RETURN_IF_ERROR(CheckTensorParallel(c, p.tp));
  REFITD_RETURN_IF_ERROR(CheckDivides(c, "experts", c.experts, "ep", p.ep));
  REFITD_RETURN_IF_ERROR(CheckDivides(c, "moe_ffn", c.moe_ffn, "etp", p.etp));
  if (c.layers < p.pp) return Invalid("{}: {} layers for pp {}", c.name, c.layers, p.pp);
  return absl::OkStatus();
}

class MegatronRank {
 public:
  MegatronRank(const ModelConfig& config, const TrainerParallel& parallel, const Place& place,
               int64_t vocabulary_multiple, ArenaBuilder* arena)
      : config_(config),
        parallel_(parallel),
        place_(place),
        vocabulary_multiple_(vocabulary_multiple),
        arena_(*arena) {}

  void Add() {
    if (place_.stage == 0) AddVocabulary(Role::kEmbedding);
    const ShardRange layers = LayersOfStage(config_.layers, parallel_.pp, place_.stage);
    for (int64_t layer = layers.offset; layer < layers.end(); ++layer) AddLayer(layer);
    if (place_.stage != parallel_.pp - 1) return;
    if (!config_.tied) AddVocabulary(Role::kLmHead);
    AddReplicated(Role::kFinalNorm, 0);
  }

 private:
  TensorSpec Tensor(Role role, int64_t layer, int64_t expert = 0) const {
    return TensorOf(config_, role, layer, expert);
  }
  Part TpRows(Role role, int64_t layer) const {
    return RowShard(Tensor(role, layer), parallel_.tp, place_.tp);
  }

  void AddVocabulary(Role role) {
    const VocabularyShard shard = ShardVocabulary(
        Tensor(role, 0), vocabulary_multiple_ * parallel_.tp, parallel_.tp, place_.tp);
    arena_.AddParameter({&shard.part, 1}, shard.storage_rows);
  }

  void AddReplicated(Role role, int64_t layer) { Add1(Whole(Tensor(role, layer))); }
  void AddTpRows(Role role, int64_t layer) { Add1(TpRows(role, layer)); }
  void AddTpColumns(Role role, int64_t layer) {
    Add1(ColumnShard(Tensor(role, layer), parallel_.tp, place_.tp));
  }
  void Add1(const Part& part) { arena_.AddQuantizable(config_, {&part, 1}); }

  void AddLayer(int64_t layer) {
    AddReplicated(Role::kInputNorm, layer);
    config_.latent() ? AddLatentAttention(layer) : AddAttention(layer);
    AddReplicated(Role::kPostAttentionNorm, layer);
    if (config_.dense(layer)) {
      AddMlp(Role::kGate, Role::kUp, Role::kDown, layer);
    } else {
      AddExperts(layer);
    }
  }

  void AddAttention(int64_t layer) {
    // If there are fewer KV heads than ranks, the rank has one group, with only a part of the q
    // heads of a KV group.
    const int64_t d = config_.head_dim;
    const int64_t groups = std::max<int64_t>(1, config_.kv_heads / parallel_.tp);
    const int64_t first_group = place_.tp * config_.kv_heads / parallel_.tp;
    const int64_t heads = config_.heads / parallel_.tp;
    const int64_t heads_a_group = heads / groups;
    const TensorSpec q = Tensor(Role::kQ, layer);
    const TensorSpec k = Tensor(Role::kK, layer);
    const TensorSpec v = Tensor(Role::kV, layer);
    std::vector<Part> parts;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first_head = place_.tp * heads + g * heads_a_group;
      parts.push_back(Rows(q, first_head * d, heads_a_group * d));
      parts.push_back(Rows(k, (first_group + g) * d, d));
      parts.push_back(Rows(v, (first_group + g) * d, d));
    }
    arena_.AddParameter(parts);
    const Part held[] = {Rows(q, place_.tp * heads * d, heads * d),
                         Rows(k, first_group * d, groups * d),
                         Rows(v, first_group * d, groups * d)};
    arena_.AddScales(config_, held);
    AddTpColumns(Role::kO, layer);
    if (!config_.qk_norms) return;
    AddReplicated(Role::kQNorm, layer);
    AddReplicated(Role::kKNorm, layer);
  }

  void AddLatentAttention(int64_t layer) {
    if (config_.mla.q_lora > 0) {
      AddReplicated(Role::kQA, layer);
      AddReplicated(Role::kQANorm, layer);
      AddTpRows(Role::kQB, layer);
    } else {
      AddTpRows(Role::kQ, layer);
    }
    AddReplicated(Role::kKvA, layer);
    AddReplicated(Role::kKvANorm, layer);
    AddTpRows(Role::kKvB, layer);
    AddTpColumns(Role::kO, layer);
  }

  void AddMlp(Role gate, Role up, Role down, int64_t layer) {
    const Part fc1[] = {TpRows(gate, layer), TpRows(up, layer)};
    arena_.AddQuantizable(config_, fc1);
    AddTpColumns(down, layer);
  }

  void AddExperts(int64_t layer) {
    if (config_.shared_experts > 0) {
      AddMlp(Role::kSharedGate, Role::kSharedUp, Role::kSharedDown, layer);
    }
    AddReplicated(Role::kRouter, layer);
    if (config_.router_bias) AddReplicated(Role::kRouterBias, layer);
    const int64_t local = config_.experts / parallel_.ep;
    for (int64_t i = 0; i < local; ++i) {
      const int64_t expert = i + place_.ep * local;
      const auto rows = [&](Role role) {
        return RowShard(Tensor(role, layer, expert), parallel_.etp, place_.etp);
      };
      const Part fc1[] = {rows(Role::kExpertGate), rows(Role::kExpertUp)};
      arena_.AddQuantizable(config_, fc1);
      Add1(ColumnShard(Tensor(Role::kExpertDown, layer, expert), parallel_.etp, place_.etp));
    }
  }

  const ModelConfig& config_;
  const TrainerParallel& parallel_;
  const Place& place_;
  const int64_t vocabulary_multiple_;
  ArenaBuilder& arena_;
};

}  // namespace

absl::StatusOr<Mesh> DenseMesh(const TrainerParallel& parallel) {
  return MeshOver(parallel, "dp", {"cp", parallel.cp}, {"tp", parallel.tp});
}

absl::StatusOr<Mesh> ExpertMesh(const TrainerParallel& parallel) {
  return MeshOver(parallel, "edp", {"ep", parallel.ep}, {"etp", parallel.etp});
}

ShardRange LayersOfStage(int64_t layers, int64_t pp, int64_t stage) {
  return ShardOf(layers, pp, stage, ShardRule::kBalanced);
}

absl::StatusOr<Layout> MegatronLayout(const ModelConfig& config, const TrainerParallel& parallel,
                                      int64_t rank, const LayoutOptions& options) {
  REFITD_ASSIGN_OR_RETURN(const Place place, PlaceOf(parallel, rank));
  REFITD_RETURN_IF_ERROR(CheckModel(config, parallel));
  REFITD_ASSIGN_OR_RETURN(ArenaBuilder arena, ArenaBuilder::Make(options));
  const int64_t multiple =
      options.vocabulary_multiple == 0 ? kVocabularyMultiple : options.vocabulary_multiple;
  MegatronRank(config, parallel, place, multiple, &arena).Add();
  return std::move(arena).Finish();
}

absl::StatusOr<Layout> FsdpLayout(const ModelConfig& config, int64_t world, int64_t rank,
                                  const LayoutOptions& options) {
  REFITD_RETURN_IF_ERROR(ValidateModel(config));
  REFITD_ASSIGN_OR_RETURN(const Mesh mesh, Mesh::Make({{"dp", world}}));
  REFITD_ASSIGN_OR_RETURN(ArenaBuilder arena, ArenaBuilder::Make(options));
  const Placement placements[] = {Placement::Shard(0)};
  for (TensorSpec& tensor : HfTensors(config)) {
    Part part;
    REFITD_ASSIGN_OR_RETURN(part.box, ShardBox(tensor.shape, mesh, placements, rank));
    part.tensor = std::move(tensor);
    arena.AddParameter({&part, 1});
  }
  return std::move(arena).Finish();
}

}  // namespace refitd::sharding
