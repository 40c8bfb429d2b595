// The C++ half of `tools/bench python`: engines, and a trainer that does the same as the Python
// trainer, with the same daemon and memory.
//
//   python_peer --role table --model NAME                  prints the model as JSON
//   python_peer --role engine --socket PATH --group NAME --model NAME
//   python_peer --role trainer --socket PATH --group NAME --model NAME --descriptor N
//
// The trainer takes the memfd of the weights as descriptor N, reads commands from its standard
// input, one a line, and answers each with one line:
//
//   fill SEED       writes random weights; answers their digest, as the engines print it
//   register        registers the layout; answers the seconds that it took
//   refit VERSION   answers seconds
//   push VERSION    pushes packed buckets straight from the memory of the weights; answers seconds
//   pack VERSION    copies tensor by tensor into leased slots, and pushes those; answers seconds
#include <CLI/CLI.hpp>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/trainer.h"
#include "fmt/format.h"
#include "nlohmann/json.hpp"
#include "tests/bench/session.h"
#include "transport/plan/layout.h"

namespace refitd::bench {
namespace {

using std::chrono::steady_clock;

int PrintTable(const Model& model) {
  nlohmann::json tensors = nlohmann::json::array();
  for (size_t i = 0; i < model.tensors.size(); ++i) {
    const TensorSpec& tensor = model.tensors[i];
    tensors.push_back(
        {tensor.name, std::string(DTypeName(tensor.dtype)), tensor.shape, model.offsets[i]});
  }
  std::cout << nlohmann::json{{"bytes", model.bytes}, {"tensors", tensors}}.dump() << std::endl;
  return 0;
}

class Peer {
 public:
  Peer(const std::string& socket, const std::string& group, Model model, int descriptor)
      : model_(std::move(model)) {
    client::TrainerOptions options;
    options.connect.socket = socket;
    options.connect.group = group;
    options.connect.spec = client::GroupSpec{};
    options.connect.wait = kWait;
    trainer_ = Must(client::Trainer::Attach(options), "trainer attach");
    region_ = Must(trainer_->AddMemfd(UniqueFd(descriptor), model_.bytes), "trainer region");
  }

  uint64_t Fill(uint64_t seed) {
    FillRandom(region_->data(), model_.bytes, seed, CopyThreads());
    return DigestOf(model_, region_->data());
  }

  double Register() {
    Layout layout;
    layout.tensors = model_.tensors;
    for (uint32_t i = 0; i < model_.tensors.size(); ++i) {
      const Box box = WholeBox(model_.tensors[i].shape);
      layout.pieces.push_back(
          {i, box, region_->id(), model_.offsets[i], RowMajorStrides(box.extent)});
    }
    const auto start = steady_clock::now();
    Must(trainer_->Register(std::move(layout)), "trainer register");
    return SecondsSince(start);
  }

  double Refit(Version version) {
    client::RefitOptions options;
    options.version = version;
    const auto start = steady_clock::now();
    const client::CommitResult result = Must(trainer_->Refit(options), "refit");
    const double seconds = SecondsSince(start);
    CheckCommitted(result);
    return seconds;
  }

  double Push(Version version) {
    const auto start = steady_clock::now();
    auto update = Begin(version);
    size_t i = 0;
    while (i < model_.tensors.size()) {
      const int64_t base = model_.offsets[i];
      std::vector<TensorSpec> tensors;
      std::vector<int64_t> offsets;
      for (; i < model_.tensors.size(); ++i) {
        if (!tensors.empty() && End(i) - base > kBucketBytes) break;
        tensors.push_back(model_.tensors[i]);
        offsets.push_back(model_.offsets[i] - base);
      }
      update->PushAsync(
          client::Bucket::Packed(std::move(tensors), region_, base, std::move(offsets)), nullptr);
    }
    return Commit(std::move(update), start);
  }

  double Pack(Version version) {
    const auto start = steady_clock::now();
    auto update = Begin(version);
    size_t i = 0;
    while (i < model_.tensors.size()) {
      auto slot = Must(update->LeaseSlot(), "slot");
      std::vector<TensorSpec> tensors;
      std::vector<int64_t> offsets;
      int64_t used = 0;
      for (; i < model_.tensors.size(); ++i) {
        const int64_t bytes = End(i) - model_.offsets[i];
        if (used + bytes > slot->bytes()) break;
        std::memcpy(slot->data() + used, region_->data() + model_.offsets[i],
                    static_cast<size_t>(bytes));
        tensors.push_back(model_.tensors[i]);
        offsets.push_back(used);
        used += bytes;
      }
      if (tensors.empty()) {
        fmt::print(stderr, "bench: {} is larger than a slot\n", model_.tensors[i].name);
        std::exit(1);
      }
      update->PushAsync(
          client::Bucket::InSlot(std::move(tensors), std::move(slot), std::move(offsets)), nullptr);
    }
    return Commit(std::move(update), start);
  }

 private:
  // The end of tensor `i`, with padding that aligns the next tensor.
  int64_t End(size_t i) const {
    return i + 1 < model_.offsets.size() ? model_.offsets[i + 1] : model_.bytes;
  }

  std::unique_ptr<client::Update> Begin(Version version) {
    client::BeginOptions options;
    options.version = version;
    options.without_layout = true;
    return Must(trainer_->Begin(options), "begin");
  }

  double Commit(std::unique_ptr<client::Update> update, steady_clock::time_point start) {
    const client::CommitResult result = Must(update->Commit(), "commit");
    const double seconds = SecondsSince(start);
    CheckCommitted(result);
    return seconds;
  }

  void CheckCommitted(const client::CommitResult& result) {
    for (const client::InstanceOutcome& instance : result.instances) {
      if (instance.committed) continue;
      fmt::print(stderr, "bench: not in {}: {}\n", instance.instance, instance.reason);
      std::exit(1);
    }
  }

  const Model model_;
  std::unique_ptr<client::Trainer> trainer_;
  std::shared_ptr<client::Region> region_;
};

int RunTrainer(Peer peer) {
  std::string command;
  while (std::cin >> command) {
    if (command == "register") {
      fmt::print("{:.9f}\n", peer.Register());
    } else if (int64_t number = 0; !(std::cin >> number)) {
      fmt::print(stderr, "bench: '{}' lacks its number\n", command);
      return 1;
    } else if (command == "fill") {
      fmt::print("{}\n", peer.Fill(static_cast<uint64_t>(number)));
    } else if (command == "refit") {
      fmt::print("{:.9f}\n", peer.Refit(Version(number)));
    } else if (command == "push") {
      fmt::print("{:.9f}\n", peer.Push(Version(number)));
    } else if (command == "pack") {
      fmt::print("{:.9f}\n", peer.Pack(Version(number)));
    } else {
      fmt::print(stderr, "bench: no command '{}'\n", command);
      return 1;
    }
    std::fflush(stdout);
  }
  return 0;
}

int Main(int argc, char** argv) {
  CLI::App app("The C++ half of tools/bench python");
  std::string role;
  EngineArgs engine;
  engine.instance = "engine";
  int descriptor = -1;
  app.add_option("--role", role)->required();
  app.add_option("--socket", engine.place.socket);
  app.add_option("--group", engine.group);
  app.add_option("--model", engine.model)->required();
  app.add_option("--descriptor", descriptor);
  CLI11_PARSE(app, argc, argv);
  if (role == "table") return PrintTable(MakeModel(engine.model));
  if (role == "engine") return RunEngine(engine);
  if (role == "trainer") {
    return RunTrainer(Peer(engine.place.socket, engine.group, MakeModel(engine.model), descriptor));
  }
  fmt::print(stderr, "bench: no role '{}'\n", role);
  return 2;
}

}  // namespace
}  // namespace refitd::bench

int main(int argc, char** argv) { return refitd::bench::Main(argc, argv); }
