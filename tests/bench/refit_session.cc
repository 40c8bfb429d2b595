#include "tests/bench/refit_session.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <thread>

#include "client/engine.h"
#include "tests/workloads/sharding/arena.h"
#include "tests/workloads/sharding/megatron.h"
#include "tests/workloads/sharding/model.h"
#include "tests/workloads/sharding/vllm.h"
#include "transport/host/host_transport.h"

namespace refitd::bench {
namespace {

using std::chrono::steady_clock;

Layout Nothing() {
  Layout layout;
  layout.tensors.push_back({"empty", DType::kBFloat16, {0}});
  layout.pieces.push_back({0, Box{{0}, {0}}, RegionId(1), 0, {1}});
  return layout;
}

std::vector<Layout> TrainerLayouts(const RefitCase& c) {
  if (c.model == "nothing") return {Nothing()};
  const sharding::ModelConfig config = Must(sharding::FindModelConfig(c.model), "model");
  sharding::TrainerParallel parallel;
  parallel.world = c.trainers;
  parallel.tp = c.replicas ? 1 : c.trainers;
  std::vector<Layout> layouts;
  for (int r = 0; r < c.trainers; ++r) {
    layouts.push_back(Must(sharding::MegatronLayout(config, parallel, r), "trainer layout"));
  }
  return layouts;
}

std::vector<Layout> EngineLayouts(const RefitCase& c) {
  if (c.model == "nothing") return {Nothing()};
  const sharding::ModelConfig config = Must(sharding::FindModelConfig(c.model), "model");
  sharding::EngineParallel parallel;
  parallel.tp = c.engines;
  std::vector<Layout> layouts;
  for (int r = 0; r < c.engines; ++r) {
    layouts.push_back(Must(sharding::VllmLayout(config, parallel, r), "engine layout"));
  }
  return layouts;
}

int64_t RegionBytes(const Layout& layout) {
  return std::max<int64_t>(sharding::ArenaBytes(layout), 4096);
}

// How many ranks hold each tensor; all elements of a tensor are held by the same number of ranks.
std::map<std::string, uint64_t> Holders(const std::vector<Layout>& layouts) {
  std::map<std::string, int64_t> held;
  std::map<std::string, int64_t> whole;
  for (const Layout& layout : layouts) {
    for (const Piece& piece : layout.pieces) {
      const TensorSpec& tensor = layout.tensors[piece.tensor];
      held[tensor.name] += ElementCount(piece.box);
      whole[tensor.name] = *ElementCount(tensor.shape);
    }
  }
  std::map<std::string, uint64_t> holders;
  for (const auto& [name, elements] : held) {
    holders[name] = whole[name] == 0 ? 0 : static_cast<uint64_t>(elements / whole[name]);
  }
  return holders;
}

// Sums the digests of the layout's pieces, each with its tensor's hash and multiplied by `times` of
// its name. Digests add up over disjoint covers, so the sums of both sides are equal if they count
// each element equally often.
uint64_t DigestOf(const Layout& layout, const char* data,
                  const std::map<std::string, uint64_t>& times) {
  uint64_t sum = 0;
  for (const Piece& piece : layout.pieces) {
    const TensorSpec& tensor = layout.tensors[piece.tensor];
    sum += TensorHash(tensor) * times.at(tensor.name) *
           DigestBox(data + piece.byte_offset, piece.strides, piece.box, tensor.shape,
                     static_cast<int>(ElementBytes(tensor.dtype)));
  }
  return sum;
}

Layout InRegion(Layout layout, RegionId region) {
  for (Piece& piece : layout.pieces) piece.region = region;
  return layout;
}

}  // namespace

int RunRefitEngine(const RefitCase& c, const EnginePlace& place, const std::string& group,
                   int rank) {
  const Layout layout = EngineLayouts(c)[static_cast<size_t>(rank)];
  const std::map<std::string, uint64_t> times = Holders(TrainerLayouts(c));
  client::EngineOptions options;
  options.connect.socket = place.socket;
  options.connect.coordinator = place.coordinator;
  options.connect.group = group;
  options.connect.wait = kWait;
  options.instance = "engine";
  options.rank = rank;
  options.world_size = c.engines;
  auto engine = Must(client::Engine::Attach(options), "engine attach");
  auto region = Must(engine->NewRegion(RegionBytes(layout)), "engine region");
  std::memset(region->data(), 0x5A, static_cast<size_t>(region->bytes()));
  Must(engine->Register(InRegion(layout, region->id())), "engine register");
  uint64_t commits = 0;
  while (true) {
    absl::StatusOr<client::Event> event = engine->Next(kWait);
    if (!event.ok()) return 0;  // the daemon is gone: the benchmark has ended
    if (const auto* prepare = std::get_if<client::Prepare>(&*event)) {
      Must(engine->Ready(prepare->version), "engine ready");
    } else if (std::get_if<client::Committed>(&*event) != nullptr) {
      ++commits;
      fmt::print("{} {}\n", commits, DigestOf(layout, region->data(), times));
      std::memset(region->data(), 0x5A, static_cast<size_t>(region->bytes()));
      std::fflush(stdout);
    }
  }
}

RefitSession::RefitSession(const std::string& self, const std::string& socket,
                           const std::string& group, const RefitCase& c)
    : case_(c), trainer_layouts_(TrainerLayouts(c)), engine_layouts_(EngineLayouts(c)) {
  for (const Layout& layout : engine_layouts_) engine_bytes_ += layout.Bytes();
  for (int r = 0; r < c.engines; ++r) {
    engines_.push_back(std::make_unique<Child>(
        std::vector<std::string>{self, "--role", "refit-engine", "--socket", socket, "--group",
                                 group, "--model", c.model, "--trainers",
                                 std::to_string(c.trainers), "--engines", std::to_string(c.engines),
                                 "--rank", std::to_string(r),
                                 c.replicas ? "--replicas" : "--no-replicas"},
        true));
  }
  for (int r = 0; r < c.trainers; ++r) {
    client::TrainerOptions options;
    options.connect.socket = socket;
    options.connect.group = group;
    options.connect.spec.emplace().trainer_ranks = c.trainers;
    options.connect.wait = kWait;
    options.rank = r;
    options.world_size = c.trainers;
    trainers_.push_back(Must(client::Trainer::Attach(options), "trainer attach"));
    const Layout& layout = trainer_layouts_[static_cast<size_t>(r)];
    regions_.push_back(Must(trainers_.back()->NewRegion(RegionBytes(layout)), "trainer region"));
    Must(trainers_.back()->Register(InRegion(layout, regions_.back()->id())), "trainer register");
  }
}

int64_t RefitSession::trainer_bytes() const {
  int64_t bytes = 0;
  for (const Layout& layout : trainer_layouts_) bytes += layout.Bytes();
  return bytes;
}

void RefitSession::Fill(uint64_t seed) {
  for (size_t r = 0; r < regions_.size(); ++r) {
    FillRandom(regions_[r]->data(), regions_[r]->bytes(), seed * 16 + r, CopyThreads());
  }
  // Tensors that every rank holds whole are dense.
  const std::map<std::string, uint64_t> holders = Holders(trainer_layouts_);
  std::map<std::string, const char*> first;
  for (size_t r = 0; r < regions_.size(); ++r) {
    const Layout& layout = trainer_layouts_[r];
    for (const Piece& piece : layout.pieces) {
      const TensorSpec& tensor = layout.tensors[piece.tensor];
      if (holders.at(tensor.name) < 2) continue;
      char* data = regions_[r]->data() + piece.byte_offset;
      const auto [at, added] = first.emplace(tensor.name, data);
      if (added) continue;
      std::memcpy(data, at->second,
                  static_cast<size_t>(ElementCount(piece.box) * ElementBytes(tensor.dtype)));
    }
  }
}

double RefitSession::Refit(Verification verification) {
  client::RefitOptions options;
  options.version = Version(++version_);
  options.verification = verification;
  std::vector<absl::StatusOr<client::CommitResult>> results(trainers_.size(),
                                                            absl::UnknownError(""));
  const auto start = steady_clock::now();
  if (trainers_.size() == 1) {
    results[0] = trainers_[0]->Refit(options);
  } else {
    std::vector<std::thread> threads;
    for (size_t r = 0; r < trainers_.size(); ++r) {
      threads.emplace_back([&, r] { results[r] = trainers_[r]->Refit(options); });
    }
    for (std::thread& thread : threads) thread.join();
  }
  const double seconds = SecondsSince(start);
  for (const auto& result : results) {
    for (const client::InstanceOutcome& instance : Must(result, "refit").instances) {
      if (instance.committed) continue;
      fmt::print(stderr, "bench: version {} is not in {}: {}\n", version_, instance.instance,
                 instance.reason);
      std::exit(1);
    }
  }
  const std::map<std::string, uint64_t> times = Holders(engine_layouts_);
  uint64_t sent = 0;
  for (size_t r = 0; r < trainers_.size(); ++r) {
    sent += DigestOf(trainer_layouts_[r], regions_[r]->data(), times);
  }
  uint64_t got = 0;
  for (const auto& engine : engines_) got += engine->ReadDigest(static_cast<uint64_t>(version_));
  if (sent != got) {
    fmt::print(stderr, "bench: version {} differs in the engines\n", version_);
    std::exit(1);
  }
  return seconds;
}

}  // namespace refitd::bench
