#include "tests/workloads/sharding/vllm.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "transport/base/errors.h"
#include "transport/base/status.h"

namespace refitd::sharding {
namespace {

constexpr int64_t kVocabularyMultiple = 64;

absl::Status CheckModel(const ModelConfig& c, const EngineParallel& p, int64_t multiple) {
  REFITD_RETURN_IF_ERROR(CheckTensorParallel(c, p.tp));
  if (!p.ep) REFITD_RETURN_IF_ERROR(CheckDivides(c, "moe_ffn", c.moe_ffn, "tp", p.tp));
  if (p.ep && c.experts < p.tp) {
    return Invalid("{}: {} experts for expert parallelism over tp {}", c.name, c.experts, p.tp);
  }
  const int64_t padded = (c.vocabulary + multiple - 1) / multiple * multiple;
  return CheckDivides(c, "padded vocabulary", padded, "tp", p.tp);
}

class VllmRank {
 public:
  VllmRank(const ModelConfig& config, const EngineParallel& parallel, int64_t rank,
           int64_t vocabulary_multiple, ArenaBuilder* arena)
      : config_(config),
        tp_(parallel.tp),
        ep_(parallel.ep),
        rank_(rank),
        vocabulary_multiple_(vocabulary_multiple),
        arena_(*arena) {}

  void Add() {
    AddVocabulary(Role::kEmbedding);
    for (int64_t layer = 0; layer < config_.layers; ++layer) AddLayer(layer);
    if (!config_.tied) AddVocabulary(Role::kLmHead);
    AddWhole({Role::kFinalNorm}, 0);
  }

 private:
  Part Column(Role role, int64_t layer) const {  // column parallel: rows of the matrix
    return RowShard(TensorOf(config_, role, layer), tp_, rank_);
  }

  void AddVocabulary(Role role) {
    const VocabularyShard shard =
        ShardVocabulary(TensorOf(config_, role), vocabulary_multiple_, tp_, rank_);
    arena_.AddParameter({&shard.part, 1}, shard.storage_rows);
  }

  // Adds one parameter of whole tensors.
  void AddWhole(std::initializer_list<Role> roles, int64_t layer) {
    std::vector<Part> parts;
    for (const Role role : roles) parts.push_back(Whole(TensorOf(config_, role, layer)));
    arena_.AddQuantizable(config_, parts);
  }
  // Adds one parameter that stacks this rank's rows of each tensor.
  void AddColumnParallel(std::initializer_list<Role> roles, int64_t layer) {
    std::vector<Part> parts;
    for (const Role role : roles) parts.push_back(Column(role, layer));
    arena_.AddQuantizable(config_, parts);
  }
  void AddRowParallel(Role role, int64_t layer) {
    const Part part = ColumnShard(TensorOf(config_, role, layer), tp_, rank_);
    arena_.AddQuantizable(config_, {&part, 1});
  }

  void AddLayer(int64_t layer) {
    AddWhole({Role::kInputNorm}, layer);
    config_.latent() ? AddLatentAttention(layer) : AddAttention(layer);
    AddWhole({Role::kPostAttentionNorm}, layer);
    if (config_.dense(layer)) {
      AddColumnParallel({Role::kGate, Role::kUp}, layer);
      AddRowParallel(Role::kDown, layer);
    } else {
      AddExperts(layer);
    }
  }

  void AddAttention(int64_t layer) {
    const int64_t kv_heads = std::max<int64_t>(1, config_.kv_heads / tp_);
    const int64_t first = rank_ * config_.kv_heads / tp_;
    const auto kv = [&](Role role) {
      return Rows(TensorOf(config_, role, layer), first * config_.head_dim,
                  kv_heads * config_.head_dim);
    };
    const Part qkv[] = {Column(Role::kQ, layer), kv(Role::kK), kv(Role::kV)};
    arena_.AddQuantizable(config_, qkv);
    AddRowParallel(Role::kO, layer);
    if (!config_.qk_norms) return;
    AddWhole({Role::kQNorm}, layer);
    AddWhole({Role::kKNorm}, layer);
  }

  void AddLatentAttention(int64_t layer) {
    if (config_.mla.q_lora > 0) {
      AddWhole({Role::kQA, Role::kKvA}, layer);
      AddWhole({Role::kQANorm}, layer);
      AddColumnParallel({Role::kQB}, layer);
    } else {
      AddColumnParallel({Role::kQ}, layer);
      AddWhole({Role::kKvA}, layer);
    }
    AddWhole({Role::kKvANorm}, layer);
    AddColumnParallel({Role::kKvB}, layer);
    AddRowParallel(Role::kO, layer);
  }

  void AddExperts(int64_t layer) {
    if (config_.shared_experts > 0) {
      AddColumnParallel({Role::kSharedGate, Role::kSharedUp}, layer);
      AddRowParallel(Role::kSharedDown, layer);
    }
    AddWhole({Role::kRouter}, layer);
    if (config_.router_bias) AddWhole({Role::kRouterBias}, layer);
    const ShardRange experts = ep_ ? ShardOf(config_.experts, tp_, rank_, ShardRule::kBalanced)
                                   : ShardRange{0, config_.experts};
    const int64_t shards = ep_ ? 1 : tp_;
    const int64_t shard = ep_ ? 0 : rank_;
    std::vector<Part> w13;
    std::vector<Part> w2;
    for (int64_t expert = experts.offset; expert < experts.end(); ++expert) {
      for (const Role role : {Role::kExpertGate, Role::kExpertUp}) {
        w13.push_back(RowShard(TensorOf(config_, role, layer, expert), shards, shard));
      }
      w2.push_back(ColumnShard(TensorOf(config_, Role::kExpertDown, layer, expert), shards, shard));
    }
    arena_.AddQuantizable(config_, w13);
    arena_.AddQuantizable(config_, w2);
  }

  const ModelConfig& config_;
  const int64_t tp_;
  const bool ep_;
  const int64_t rank_;  // within tp
  const int64_t vocabulary_multiple_;
  ArenaBuilder& arena_;
};

}  // namespace

absl::StatusOr<Layout> VllmLayout(const ModelConfig& config, const EngineParallel& parallel,
                                  int64_t rank, const LayoutOptions& options) {
  REFITD_ASSIGN_OR_RETURN(const Mesh mesh,
                          Mesh::Make({{"instances", parallel.instances}, {"tp", parallel.tp}}));
  REFITD_ASSIGN_OR_RETURN(const Dims at, mesh.Coordinates(rank));
  REFITD_ASSIGN_OR_RETURN(ArenaBuilder arena, ArenaBuilder::Make(options));
  const int64_t multiple =
      options.vocabulary_multiple == 0 ? kVocabularyMultiple : options.vocabulary_multiple;
  REFITD_RETURN_IF_ERROR(CheckModel(config, parallel, multiple));
  VllmRank(config, parallel, at[1], multiple, &arena).Add();
  return std::move(arena).Finish();
}

}  // namespace refitd::sharding
