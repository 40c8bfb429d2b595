#include "tests/workloads/sharding/oracle.h"

#include <algorithm>
#include <utility>

#include "transport/base/status.h"

namespace refitd::sharding {
namespace {

IdMatrix RowsOf(const IdMatrix& m, int64_t begin, int64_t end) {
  REFITD_CHECK(0 <= begin && begin <= end && end <= m.rows);
  IdMatrix part{end - begin, m.columns, m.element_bytes, {}};
  part.ids.assign(m.ids.begin() + begin * m.columns, m.ids.begin() + end * m.columns);
  return part;
}

IdMatrix ColumnsOf(const IdMatrix& m, int64_t begin, int64_t end) {
  REFITD_CHECK(0 <= begin && begin <= end && end <= m.columns);
  IdMatrix part{m.rows, end - begin, m.element_bytes, {}};
  for (int64_t row = 0; row < m.rows; ++row) {
    const auto at = m.ids.begin() + row * m.columns;
    part.ids.insert(part.ids.end(), at + begin, at + end);
  }
  return part;
}

// Joins matrices as torch.cat does along dimension 0.
IdMatrix Cat(const std::vector<IdMatrix>& parts) {
  IdMatrix whole{0, parts[0].columns, parts[0].element_bytes, {}};
  for (const IdMatrix& part : parts) {
    REFITD_CHECK(part.columns == whole.columns && part.element_bytes == whole.element_bytes);
    whole.rows += part.rows;
    whole.ids.insert(whole.ids.end(), part.ids.begin(), part.ids.end());
  }
  return whole;
}

IdMatrix PadRows(IdMatrix m, int64_t rows) {
  m.rows = rows;
  m.ids.resize(static_cast<size_t>(rows * m.columns), kUntouched);
  return m;
}

int64_t RoundUp(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

class ArenaWriter {
 public:
  void Append(const IdMatrix& parameter) {
    if (parameter.ids.empty()) return;
    arena_.resize(static_cast<size_t>(RoundUp(static_cast<int64_t>(arena_.size()), 512)));
    for (const ElementId id : parameter.ids) {
      arena_.push_back(id);
      arena_.insert(arena_.end(), static_cast<size_t>(parameter.element_bytes - 1), kUntouched);
    }
  }
  Arena Finish() && {
    arena_.resize(static_cast<size_t>(RoundUp(static_cast<int64_t>(arena_.size()), 512)));
    return std::move(arena_);
  }

 private:
  Arena arena_;
};

// ---- what both sides need ----

class Loader {
 public:
  Loader(const GlobalIds& ids, const ModelConfig& config) : ids_(ids), config_(config) {}

  Arena Finish() && { return std::move(writer_).Finish(); }

 protected:
  static std::string LayerName(int64_t layer, const std::string& name) {
    return fmt::format("model.layers.{}.{}", layer, name);
  }
  const IdMatrix& Weight(int64_t layer, const std::string& name) const {
    return ids_.Get(LayerName(layer, name) + ".weight");
  }
  // Appends a parameter that every rank has in full, and its scales.
  void Whole(const std::string& name) {
    writer_.Append(ids_.Get(name + ".weight"));
    if (ids_.Has(name + ".weight_scale_inv")) writer_.Append(ids_.Get(name + ".weight_scale_inv"));
  }
  void WholeOf(int64_t layer, const std::string& name) { Whole(LayerName(layer, name)); }

  // The scales of rows or columns [begin, end) of a weight that is cut between blocks.
  IdMatrix ScaleRows(const std::string& name, int64_t begin, int64_t end) const {
    const int64_t b = config_.scale_block;
    REFITD_CHECK(begin % b == 0 && end % b == 0);
    return RowsOf(ids_.Get(name + ".weight_scale_inv"), begin / b, end / b);
  }
  IdMatrix ScaleColumns(const std::string& name, int64_t begin, int64_t end) const {
    const int64_t b = config_.scale_block;
    REFITD_CHECK(begin % b == 0 && end % b == 0);
    return ColumnsOf(ids_.Get(name + ".weight_scale_inv"), begin / b, end / b);
  }

  // Rows [begin, end) of the weight with that name. FusedRows stacks several slices into one
  // parameter, and FusedScales does the same with their scales.
  struct Slice {
    std::string name;
    int64_t begin;
    int64_t end;
  };
  void FusedRows(const std::vector<Slice>& slices) {
    std::vector<IdMatrix> weights;
    weights.reserve(slices.size());
    for (const Slice& s : slices) {
      weights.push_back(RowsOf(ids_.Get(s.name + ".weight"), s.begin, s.end));
    }
    writer_.Append(Cat(weights));
    FusedScales(slices);
  }
  void FusedScales(const std::vector<Slice>& slices) {
    if (!config_.fp8) return;
    std::vector<IdMatrix> scales;
    scales.reserve(slices.size());
    for (const Slice& s : slices) scales.push_back(ScaleRows(s.name, s.begin, s.end));
    writer_.Append(Cat(scales));
  }
  Slice Share(const std::string& name, int64_t ranks, int64_t rank) const {
    const int64_t rows = ids_.Get(name + ".weight").rows;
    return {name, rows / ranks * rank, rows / ranks * (rank + 1)};
  }
  void ColumnShare(const std::string& name, int64_t ranks, int64_t rank) {
    const IdMatrix& weight = ids_.Get(name + ".weight");
    const int64_t begin = weight.columns / ranks * rank;
    const int64_t end = weight.columns / ranks * (rank + 1);
    writer_.Append(ColumnsOf(weight, begin, end));
    if (config_.fp8) writer_.Append(ScaleColumns(name, begin, end));
  }
  void Vocabulary(const std::string& name, int64_t padded, int64_t ranks, int64_t rank) {
    const IdMatrix all = PadRows(ids_.Get(name + ".weight"), padded);
    writer_.Append(RowsOf(all, padded / ranks * rank, padded / ranks * (rank + 1)));
  }

  const GlobalIds& ids_;
  const ModelConfig& config_;
  ArenaWriter writer_;
};

// ---- Megatron ----

class MegatronLoader : public Loader {
 public:
  using Loader::Loader;

  void Load(const TrainerParallel& p, int64_t rank) {
    // In both meshes tensor parallelism is the innermost dimension and pipeline parallelism the
    // outermost.
    tp_ = p.tp;
    tp_rank_ = rank % p.tp;
    etp_ = p.etp;
    etp_rank_ = rank % p.etp;
    ep_ = p.ep;
    ep_rank_ = rank / p.etp % p.ep;
    const int64_t stage = rank / (p.world / p.pp);
    const int64_t padded = RoundUp(config_.vocabulary, 128 * tp_);
    int64_t first = 0;
    for (int64_t s = 0; s < stage; ++s) first += LayersOn(s, p.pp);
    if (stage == 0) Vocabulary("model.embed_tokens", padded, tp_, tp_rank_);
    for (int64_t layer = first; layer < first + LayersOn(stage, p.pp); ++layer) LoadLayer(layer);
    if (stage != p.pp - 1) return;
    if (!config_.tied) Vocabulary("lm_head", padded, tp_, tp_rank_);
    Whole("model.norm");
  }

 private:
  int64_t LayersOn(int64_t stage, int64_t stages) const {
    return config_.layers / stages + (stage < config_.layers % stages ? 1 : 0);
  }

  void LoadLayer(int64_t layer) {
    WholeOf(layer, "input_layernorm");
    const std::string attention = LayerName(layer, "self_attn.");
    if (config_.mla.kv_lora > 0) {
      LoadLatent(attention);
    } else {
      LoadQkv(attention);
      ColumnShare(attention + "o_proj", tp_, tp_rank_);
      if (config_.qk_norms) {
        Whole(attention + "q_norm");
        Whole(attention + "k_norm");
      }
    }
    WholeOf(layer, "post_attention_layernorm");
    const std::string mlp = LayerName(layer, "mlp.");
    if (config_.experts == 0 || layer < config_.first_dense) {
      LoadMlp(mlp, tp_, tp_rank_);
      return;
    }
    if (config_.shared_experts > 0) LoadMlp(mlp + "shared_experts.", tp_, tp_rank_);
    Whole(mlp + "gate");
    if (config_.router_bias) writer_.Append(ids_.Get(mlp + "gate.e_score_correction_bias"));
    for (int64_t expert = 0; expert < config_.experts; ++expert) {
      if (expert / (config_.experts / ep_) != ep_rank_) continue;
      LoadMlp(fmt::format("{}experts.{}.", mlp, expert), etp_, etp_rank_);
    }
  }

  // Makes the whole interleaved matrix, as Megatron would have it on one rank, then takes this
  // rank's part of it. If there are fewer groups than ranks, each rank has a group of its own, with
  // its share of the q heads.
  void LoadQkv(const std::string& prefix) {
    const int64_t d = config_.head_dim;
    const int64_t groups = std::max(config_.kv_heads, tp_);
    const int64_t heads_a_group = config_.heads / groups;
    std::vector<IdMatrix> interleaved;
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t kv = group / (groups / config_.kv_heads);
      const int64_t head = group * heads_a_group;
      interleaved.push_back(
          RowsOf(ids_.Get(prefix + "q_proj.weight"), head * d, (head + heads_a_group) * d));
      interleaved.push_back(RowsOf(ids_.Get(prefix + "k_proj.weight"), kv * d, (kv + 1) * d));
      interleaved.push_back(RowsOf(ids_.Get(prefix + "v_proj.weight"), kv * d, (kv + 1) * d));
    }
    const IdMatrix all = Cat(interleaved);
    writer_.Append(RowsOf(all, all.rows / tp_ * tp_rank_, all.rows / tp_ * (tp_rank_ + 1)));
    const int64_t kv_heads = std::max<int64_t>(1, config_.kv_heads / tp_);
    const int64_t kv = tp_rank_ * config_.kv_heads / tp_;
    FusedScales({Share(prefix + "q_proj", tp_, tp_rank_),
                 {prefix + "k_proj", kv * d, (kv + kv_heads) * d},
                 {prefix + "v_proj", kv * d, (kv + kv_heads) * d}});
  }

  void LoadLatent(const std::string& prefix) {
    if (config_.mla.q_lora > 0) {
      Whole(prefix + "q_a_proj");
      Whole(prefix + "q_a_layernorm");
      FusedRows({Share(prefix + "q_b_proj", tp_, tp_rank_)});
    } else {
      FusedRows({Share(prefix + "q_proj", tp_, tp_rank_)});
    }
    Whole(prefix + "kv_a_proj_with_mqa");
    Whole(prefix + "kv_a_layernorm");
    FusedRows({Share(prefix + "kv_b_proj", tp_, tp_rank_)});
    ColumnShare(prefix + "o_proj", tp_, tp_rank_);
  }

  void LoadMlp(const std::string& prefix, int64_t ranks, int64_t rank) {
    FusedRows({Share(prefix + "gate_proj", ranks, rank), Share(prefix + "up_proj", ranks, rank)});
    ColumnShare(prefix + "down_proj", ranks, rank);
  }

  int64_t tp_ = 1;
  int64_t tp_rank_ = 0;
  int64_t ep_ = 1;
  int64_t ep_rank_ = 0;
  int64_t etp_ = 1;
  int64_t etp_rank_ = 0;
};

// ---- fully sharded ----

class FsdpLoader : public Loader {
 public:
  using Loader::Loader;

  void Load(int64_t world, int64_t rank) {
    for (const std::string& name : ids_.names()) {
      // torch.chunk makes full chunks until nothing is left.
      const IdMatrix& tensor = ids_.Get(name);
      const int64_t chunk = (tensor.rows + world - 1) / world;
      std::vector<IdMatrix> chunks;
      for (int64_t row = 0; row < tensor.rows; row += chunk) {
        chunks.push_back(RowsOf(tensor, row, std::min(row + chunk, tensor.rows)));
      }
      if (rank < static_cast<int64_t>(chunks.size())) writer_.Append(chunks[rank]);
    }
  }
};

// ---- vLLM ----

class VllmLoader : public Loader {
 public:
  using Loader::Loader;

  void Load(const EngineParallel& p, int64_t rank) {
    tp_ = p.tp;
    rank_ = rank % p.tp;
    ep_ = p.ep;
    const int64_t padded = RoundUp(config_.vocabulary, 64);
    Vocabulary("model.embed_tokens", padded, tp_, rank_);
    for (int64_t layer = 0; layer < config_.layers; ++layer) LoadLayer(layer);
    if (!config_.tied) Vocabulary("lm_head", padded, tp_, rank_);
    Whole("model.norm");
  }

 private:
  void LoadLayer(int64_t layer) {
    WholeOf(layer, "input_layernorm");
    const std::string attention = LayerName(layer, "self_attn.");
    if (config_.mla.kv_lora > 0) {
      LoadLatent(attention);
    } else {
      LoadQkv(attention);
    }
    ColumnShare(attention + "o_proj", tp_, rank_);
    if (config_.mla.kv_lora == 0 && config_.qk_norms) {
      Whole(attention + "q_norm");
      Whole(attention + "k_norm");
    }
    WholeOf(layer, "post_attention_layernorm");
    const std::string mlp = LayerName(layer, "mlp.");
    if (config_.experts == 0 || layer < config_.first_dense) {
      LoadMlp(mlp);
      return;
    }
    if (config_.shared_experts > 0) LoadMlp(mlp + "shared_experts.");
    Whole(mlp + "gate");
    if (config_.router_bias) writer_.Append(ids_.Get(mlp + "gate.e_score_correction_bias"));
    LoadExperts(mlp + "experts.");
  }

  // Loads the shards of QKVParallelLinear: this rank's shard of q, and the shards of k and v that
  // `replicas` ranks share.
  void LoadQkv(const std::string& prefix) {
    const int64_t replicas = std::max<int64_t>(1, tp_ / config_.kv_heads);
    const int64_t kv_ranks = tp_ / replicas;
    FusedRows({Share(prefix + "q_proj", tp_, rank_),
               Share(prefix + "k_proj", kv_ranks, rank_ / replicas),
               Share(prefix + "v_proj", kv_ranks, rank_ / replicas)});
  }

  void LoadLatent(const std::string& prefix) {
    if (config_.mla.q_lora > 0) {
      // The two projections are merged into one replicated parameter.
      FusedWhole({prefix + "q_a_proj", prefix + "kv_a_proj_with_mqa"});
      Whole(prefix + "q_a_layernorm");
      FusedRows({Share(prefix + "q_b_proj", tp_, rank_)});
    } else {
      FusedRows({Share(prefix + "q_proj", tp_, rank_)});
      Whole(prefix + "kv_a_proj_with_mqa");
    }
    Whole(prefix + "kv_a_layernorm");
    FusedRows({Share(prefix + "kv_b_proj", tp_, rank_)});
  }

  void FusedWhole(const std::vector<std::string>& names) {
    for (const std::string suffix : {".weight", ".weight_scale_inv"}) {
      std::vector<IdMatrix> parts;
      for (const std::string& name : names) {
        if (ids_.Has(name + suffix)) parts.push_back(ids_.Get(name + suffix));
      }
      if (!parts.empty()) writer_.Append(Cat(parts));
    }
  }

  void LoadMlp(const std::string& prefix) {
    FusedRows({Share(prefix + "gate_proj", tp_, rank_), Share(prefix + "up_proj", tp_, rank_)});
    ColumnShare(prefix + "down_proj", tp_, rank_);
  }

  // Fills w13 [E_local, 2P, H] and w2 [E_local, H, P] expert by expert, by the rank's map from
  // global to local experts, and then the scales in the same way, block by block.
  void LoadExperts(const std::string& prefix) {
    std::vector<int64_t> local;
    for (int64_t rank = 0, next = 0; rank < tp_; ++rank) {
      int64_t count = config_.experts / tp_ + (rank < config_.experts % tp_ ? 1 : 0);
      for (; count > 0; --count, ++next) {
        if (!ep_ || rank == rank_) local.push_back(next);
      }
    }
    const int64_t ranks = ep_ ? 1 : tp_;
    const int64_t rank = ep_ ? 0 : rank_;
    const int64_t p = config_.moe_ffn / ranks;
    std::vector<IdMatrix> w13;
    std::vector<IdMatrix> w2;
    std::vector<IdMatrix> w13_scales;
    std::vector<IdMatrix> w2_scales;
    for (const int64_t expert : local) {
      const std::string name = fmt::format("{}{}.", prefix, expert);
      for (const std::string half : {"gate_proj", "up_proj"}) {
        w13.push_back(RowsOf(ids_.Get(name + half + ".weight"), rank * p, (rank + 1) * p));
        if (config_.fp8) w13_scales.push_back(ScaleRows(name + half, rank * p, (rank + 1) * p));
      }
      w2.push_back(ColumnsOf(ids_.Get(name + "down_proj.weight"), rank * p, (rank + 1) * p));
      if (config_.fp8) {
        w2_scales.push_back(ScaleColumns(name + "down_proj", rank * p, (rank + 1) * p));
      }
    }
    writer_.Append(Cat(w13));
    if (config_.fp8) writer_.Append(Cat(w13_scales));
    writer_.Append(Cat(w2));
    if (config_.fp8) writer_.Append(Cat(w2_scales));
  }

  int64_t tp_ = 1;
  int64_t rank_ = 0;
  bool ep_ = false;
};

}  // namespace

GlobalIds::GlobalIds(const ModelConfig& config) {
  ElementId next = 1;
  for (const TensorSpec& tensor : HfTensors(config)) {
    IdMatrix m;
    m.rows = tensor.shape[0];
    m.columns = tensor.shape.size() == 1 ? 1 : tensor.shape[1];
    m.element_bytes = ElementBytes(tensor.dtype);
    m.ids.resize(static_cast<size_t>(m.rows * m.columns));
    for (ElementId& id : m.ids) id = next++;
    names_.push_back(tensor.name);
    tensors_.emplace(tensor.name, std::move(m));
  }
}

const IdMatrix& GlobalIds::Get(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) fmt::print(stderr, "no tensor {}\n", name);
  REFITD_CHECK(found != tensors_.end());
  return found->second;
}

Arena ExpectedTrainer(const GlobalIds& ids, const Mapping& mapping, const ModelConfig& config,
                      int64_t rank) {
  if (mapping.fsdp) {
    FsdpLoader loader(ids, config);
    loader.Load(mapping.trainer.world, rank);
    return std::move(loader).Finish();
  }
  MegatronLoader loader(ids, config);
  loader.Load(mapping.trainer, rank);
  return std::move(loader).Finish();
}

Arena ExpectedEngine(const GlobalIds& ids, const Mapping& mapping, const ModelConfig& config,
                     int64_t rank) {
  VllmLoader loader(ids, config);
  loader.Load(mapping.engine, rank);
  return std::move(loader).Finish();
}

}  // namespace refitd::sharding
