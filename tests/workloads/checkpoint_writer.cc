#include "tests/workloads/checkpoint_writer.h"

#include <sys/stat.h>

#include <cerrno>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/workloads/safetensors_writer.h"
#include "transport/base/status.h"

namespace refitd::workloads {
namespace {

// The writer generates and writes so many bytes at a time, which fit the cache.
constexpr int64_t kWriteBytes = 4 << 20;

absl::Status WriteConfig(const Qwen3Model& model, const std::string& folder) {
  const nlohmann::json config = {{"architectures", {"Qwen3ForCausalLM"}},
                                 {"model_type", "qwen3"},
                                 {"hidden_size", model.hidden},
                                 {"num_hidden_layers", model.layers},
                                 {"num_attention_heads", model.heads},
                                 {"num_key_value_heads", model.kv_heads},
                                 {"head_dim", model.head_dim},
                                 {"intermediate_size", model.ffn},
                                 {"vocab_size", model.vocabulary},
                                 {"tie_word_embeddings", true},
                                 {"torch_dtype", "bfloat16"}};
  const std::string path = folder + "/config.json";
  std::ofstream file(path);
  file << config.dump(2) << "\n";
  file.close();
  if (!file) return Error(absl::StatusCode::kUnavailable, "{}: can't be written", path);
  return absl::OkStatus();
}

// A run of the model's tensors that goes into one file.
struct Shard {
  std::string file;
  size_t begin = 0;
  size_t end = 0;
};

std::vector<Shard> CutShards(const std::vector<TensorSpec>& tensors, int shards) {
  if (shards == 1) return {{"model.safetensors", 0, tensors.size()}};
  const int64_t total = BytesOf(tensors);
  std::vector<size_t> ends;
  int64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    bytes += BytesOf({tensors[i]});
    const auto wanted = static_cast<int64_t>(ends.size()) + 1;
    if (bytes >= total * wanted / shards || i + 1 == tensors.size()) ends.push_back(i + 1);
  }
  std::vector<Shard> cut;
  for (size_t i = 0; i < ends.size(); ++i) {
    cut.push_back({fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, ends.size()),
                   i == 0 ? 0 : ends[i - 1], ends[i]});
  }
  return cut;
}

absl::Status WriteShard(const std::vector<TensorSpec>& tensors, const Shard& shard, uint64_t seed,
                        const std::string& folder) {
  const std::vector<TensorSpec> mine(tensors.begin() + static_cast<ptrdiff_t>(shard.begin),
                                     tensors.begin() + static_cast<ptrdiff_t>(shard.end));
  REFITD_ASSIGN_OR_RETURN(const auto writer,
                          SafetensorsWriter::Create(folder + "/" + shard.file, mine));
  std::vector<char> buffer(static_cast<size_t>(kWriteBytes));
  for (size_t i = 0; i < mine.size(); ++i) {
    const int64_t bytes = BytesOf({mine[i]});
    for (int64_t at = 0; at < bytes; at += kWriteBytes) {
      const std::span<char> part(buffer.data(),
                                 static_cast<size_t>(std::min(kWriteBytes, bytes - at)));
      FillBFloat16(seed, shard.begin + i, at, part);
      REFITD_RETURN_IF_ERROR(writer->Append(part));
    }
  }
  return writer->Finish();
}

}  // namespace

absl::Status WriteModelCheckpoint(const Qwen3Model& model, uint64_t seed, const std::string& folder,
                                  int shards) {
  if (::mkdir(folder.c_str(), 0755) != 0 && errno != EEXIST) return ErrnoError(errno, folder);
  const std::vector<TensorSpec> tensors = TensorsOf(model);
  std::map<std::string, std::string> shard_of;
  for (const Shard& shard : CutShards(tensors, shards)) {
    REFITD_RETURN_IF_ERROR(WriteShard(tensors, shard, seed, folder));
    for (size_t i = shard.begin; i < shard.end; ++i) shard_of[tensors[i].name] = shard.file;
  }
  if (shards > 1) {
    REFITD_RETURN_IF_ERROR(WriteSafetensorsIndex(folder, shard_of, BytesOf(tensors)));
  }
  return WriteConfig(model, folder);
}

}  // namespace refitd::workloads
