// Writes a checkpoint folder with a real model's tensor table and seeded random weights.
#include <CLI/CLI.hpp>

#include "daemon/refitctl/format.h"
#include "tests/workloads/checkpoint_writer.h"
#include "transport/base/status.h"

namespace refitd::workloads {
namespace {

int Run(int argc, char** argv) {
  CLI::App app("Writes a checkpoint folder with a model's tensor table and seeded random weights.");
  std::string name = "qwen3-0.6b";
  std::string folder;
  uint64_t seed = 1;
  int shards = 2;
  int64_t layers = 0;
  app.add_option("--model", name, "qwen3-0.6b (default), qwen3-4b or tiny");
  app.add_option("--seed", seed, "Every weight follows from it (default 1)");
  app.add_option("--out", folder, "The folder")->required();
  app.add_option("--shards", shards, "Files (default 2)")->check(CLI::Range(1, 4096));
  app.add_option("--layers", layers, "Fewer layers than the model has")->check(CLI::Range(1, 1000));
  CLI11_PARSE(app, argc, argv);
  auto model = FindModel(name);
  if (!model.ok()) {
    fmt::print(stderr, "make_checkpoint: {}\n", Message(model.status()));
    return 2;
  }
  if (layers > 0) model->layers = layers;
  const absl::Status written = WriteModelCheckpoint(*model, seed, folder, shards);
  if (!written.ok()) {
    fmt::print(stderr, "make_checkpoint: {}\n", Message(written));
    return 1;
  }
  const auto tensors = TensorsOf(*model);
  fmt::print("{}: {} tensors, {}\n", folder, tensors.size(), HumanBytes(BytesOf(tensors)));
  return 0;
}

}  // namespace
}  // namespace refitd::workloads

int main(int argc, char** argv) { return refitd::workloads::Run(argc, argv); }
