// A bfloat16 trainer feeds an FP8 engine: loader delivery, and a loader that quantises tensors in
// blocks of 128 x 128, as engines with block scales do.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "client/engine.h"
#include "client/trainer.h"
#include "tests/e2e/harness.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"

namespace refitd::e2e {
namespace {

constexpr int64_t kBlock = 128;
constexpr float kFloat8Max = 448;
constexpr int64_t kSlotBytes = 65'536;

// ---- numbers ----

// Converts to float8_e4m3fn, to the nearest, ties to even; values that round beyond 448 become NaN,
// as in torch. Exact: the value is divided by a power of two and rounded once.
uint8_t ToFloat8(float value) {
  constexpr int kLeastExponent = -6;
  constexpr int kMantissaBits = 3;
  constexpr uint8_t kNan = 0x7F;
  const auto sign = static_cast<uint8_t>(std::signbit(value) ? 0x80 : 0);
  const float magnitude = std::fabs(value);
  if (!(magnitude < 1024)) return sign | kNan;
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), kLeastExponent);
  const float steps = std::nearbyint(std::ldexp(magnitude, kMantissaBits - exponent));
  // Normal numbers have 8 to 16 steps; step 16 is the first of the next exponent.
  const int code = (exponent - kLeastExponent) * (1 << kMantissaBits) + static_cast<int>(steps);
  return sign | static_cast<uint8_t>(std::min<int>(code, kNan));
}

// Converts by the format's definition.
float FromFloat8(uint8_t code) {
  const int exponent = (code >> 3) & 0xF;
  const int mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

float FromBFloat16(const char* data) {
  uint16_t half = 0;
  std::memcpy(&half, data, sizeof(half));
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Cuts instead of rounding, since any bfloat16 will do.
void AppendBFloat16(float value, std::string* bytes) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  bytes->push_back(static_cast<char>(bits >> 16));
  bytes->push_back(static_cast<char>(bits >> 24));
}

TEST_CASE("the test's own conversion to float8_e4m3fn is exact") {
  const std::pair<float, int> known[] = {
      {0.0F, 0x00},      {-0.0F, 0x80},     {1.0F, 0x38},      {-1.0F, 0xB8},
      {0.5F, 0x30},      {448.0F, 0x7E},    {-448.0F, 0xFE},   {464.0F, 0x7E},
      {464.1F, 0x7F},    {480.0F, 0x7F},    {1e30F, 0x7F},     {0x1p-6F, 0x08},
      {0x1p-9F, 0x01},   {0x1p-10F, 0x00},  {0x1.8p-9F, 0x02}, {0x1.000002p-10F, 0x01},
      {1.0625F, 0x38},   {1.1875F, 0x3A},   {17.0F, 0x58},     {19.0F, 0x5A},
      {0x1.ep-7F, 0x08}, {0x1.fp-1F, 0x38}, {0x1p-140F, 0x00},
  };
  for (const auto& [value, code] : known) {
    INFO(value);
    CHECK(ToFloat8(value) == code);
  }
  CHECK(ToFloat8(std::numeric_limits<float>::quiet_NaN()) == 0x7F);
  CHECK(ToFloat8(-std::numeric_limits<float>::infinity()) == 0xFF);
  for (int code = 0; code < 0x7F; ++code) {
    INFO(code);
    const float value = FromFloat8(static_cast<uint8_t>(code));
    CHECK(ToFloat8(value) == code);
    CHECK(ToFloat8(-value) == (code | 0x80));
    if (code == 0x7E) continue;
    // A value half way to the next one rounds to even; slightly beside it, to the nearer one.
    const float next = FromFloat8(static_cast<uint8_t>(code + 1));
    const float middle = (value + next) / 2;
    CHECK(ToFloat8(middle) == (code % 2 == 0 ? code : code + 1));
    CHECK(ToFloat8(std::nextafter(middle, value)) == code);
    CHECK(ToFloat8(std::nextafter(middle, next)) == code + 1);
  }
}

// ---- the loader ----

using Parameters = std::map<std::string, std::string>;  // bytes by name

// Stores one whole tensor as an FP8 engine does: a matrix as float8 with a scale for each block
// (float32, amax / 448; 1 for a block of zeros), other tensors unchanged.
void Load(const TensorSpec& tensor, const char* data, Parameters* parameters) {
  std::string& weight = (*parameters)[tensor.name];
  if (tensor.shape.size() != 2 || tensor.dtype != DType::kBFloat16) {
    weight.assign(data, static_cast<size_t>(TensorBytes(tensor)));
    return;
  }
  const int64_t rows = tensor.shape[0];
  const int64_t columns = tensor.shape[1];
  weight.assign(static_cast<size_t>(rows * columns), '\0');
  std::string& scales = (*parameters)[tensor.name + "_scale_inv"];
  scales.clear();
  const auto at = [&](int64_t r, int64_t c) {
    return FromBFloat16(data + (r * columns + c) * ElementBytes(tensor.dtype));
  };
  for (int64_t top = 0; top < rows; top += kBlock) {
    for (int64_t left = 0; left < columns; left += kBlock) {
      const int64_t bottom = std::min(rows, top + kBlock);
      const int64_t right = std::min(columns, left + kBlock);
      float amax = 0;
      for (int64_t r = top; r < bottom; ++r) {
        for (int64_t c = left; c < right; ++c) amax = std::max(amax, std::fabs(at(r, c)));
      }
      const float scale = amax == 0 ? 1 : amax / kFloat8Max;
      char bytes[sizeof(scale)];
      std::memcpy(bytes, &scale, sizeof(scale));
      scales.append(bytes, sizeof(bytes));
      for (int64_t r = top; r < bottom; ++r) {
        for (int64_t c = left; c < right; ++c) {
          weight[static_cast<size_t>(r * columns + c)] =
              static_cast<char>(ToFloat8(at(r, c) / scale));
        }
      }
    }
  }
}

// A loader engine whose thread loads delivered tensors. The parameters that it serves change only
// at Committed.
class Fp8Engine {
 public:
  Fp8Engine(const Daemon& daemon, const Model& manifest) {
    client::EngineOptions options;
    options.connect.socket = daemon.socket();
    options.connect.group = "g";
    options.instance = "fp8";
    options.delivery = client::Delivery::kLoader;
    options.manifest = manifest;
    auto engine = client::Engine::Attach(options);
    INFO(engine.status());
    REQUIRE(engine.ok());
    engine_ = *std::move(engine);
    thread_ = std::thread([this] { Serve(); });
  }
  ~Fp8Engine() {
    {
      MutexLock lock(&mutex_);
      stop_ = true;
    }
    thread_.join();
  }

  struct Served {
    std::optional<Version> version;
    Parameters parameters;
    int cut = 0;  // the number of tensors that came in parts
    absl::Status failed;
  };
  Served served() {
    MutexLock lock(&mutex_);
    return served_;
  }

 private:
  void Serve() {
    constexpr std::chrono::milliseconds kPoll{20};
    for (;;) {
      {
        MutexLock lock(&mutex_);
        if (stop_ || !served_.failed.ok()) return;
      }
      auto event = engine_->Next(kPoll);
      const absl::Status status =
          event.ok() ? std::visit([this](const auto& e) { return On(e); }, *event) : event.status();
      MutexLock lock(&mutex_);
      if (served_.failed.ok()) served_.failed = status;
    }
  }

  template <typename Other>
  absl::Status On(const Other&) {
    return absl::OkStatus();
  }
  absl::Status On(const client::Prepare& prepare) { return engine_->Ready(prepare.version); }
  absl::Status On(const client::Part& part) {
    REFITD_ASSIGN_OR_RETURN(const std::vector<client::TensorView> whole, joiner_.Add(part));
    for (const client::TensorView& view : part.tensors) {
      if (view.start == 0 &&
          view.count * ElementBytes(view.tensor.dtype) < TensorBytes(view.tensor))
        ++cut_;
    }
    for (const client::TensorView& view : whole) Load(view.tensor, view.data, &loading_);
    return engine_->Ack(part);
  }
  absl::Status On(const client::Committed& committed) {
    const std::vector<std::string> unfinished = joiner_.Unfinished();
    joiner_.Reset();
    MutexLock lock(&mutex_);
    served_.version = committed.version;
    served_.parameters = std::exchange(loading_, {});
    served_.cut = std::exchange(cut_, 0);
    return unfinished.empty() ? absl::OkStatus() : absl::InternalError(unfinished[0]);
  }

  std::unique_ptr<client::Engine> engine_;
  // The engine's thread alone uses these.
  client::PartJoiner joiner_;
  Parameters loading_;
  int cut_ = 0;

  Mutex mutex_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  Served served_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

// ---- the trainer ----

Model TrainersModel() {
  return {{"embed.weight", DType::kBFloat16, {515, 333}},  // takes more than five slots
          {"up.weight", DType::kBFloat16, {256, 384}},     // takes three slots, has whole blocks
          {"q.weight", DType::kBFloat16, {130, 129}},      // blocks of one row and of one column
          {"tiny.weight", DType::kBFloat16, {3, 5}},      {"norm.weight", DType::kBFloat16, {200}},
          {"router.bias", DType::kFloat32, {7}}};
}

// Values have both signs and, in every block, magnitudes over the whole range of float8; "q" also
// has a block of zeros.
std::vector<std::string> Values(const Model& model, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::string> all;
  for (const TensorSpec& tensor : model) {
    std::string& bytes = all.emplace_back();
    const int64_t columns = tensor.shape.back();
    const int64_t elements = TensorBytes(tensor) / ElementBytes(tensor.dtype);
    for (int64_t i = 0; i < elements; ++i) {
      const uint64_t bits = random();
      const float fraction = static_cast<float>(bits & 0xFFFF) / 65'536 + 1;
      const float magnitude = std::ldexp(fraction, -static_cast<int>((bits >> 16) % 20));
      // Scales differ in every block and version.
      const auto block =
          static_cast<float>(1 + i / columns / kBlock * 4 + i % columns / kBlock + seed * 16);
      float value = ((bits >> 63) != 0 ? -magnitude : magnitude) * block;
      if (tensor.name == "q.weight" && i / columns < kBlock && i % columns < kBlock) value = 0;
      if (tensor.dtype == DType::kBFloat16) {
        AppendBFloat16(value, &bytes);
      } else {
        bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
      }
    }
  }
  return all;
}

TEST_CASE("a bfloat16 trainer feeds an engine that quantises by blocks as it loads") {
  const Model model = TrainersModel();
  Daemon daemon;
  client::TrainerOptions options;
  options.connect.socket = daemon.socket();
  options.connect.group = "g";
  options.connect.spec = client::GroupSpec{
      .trainer_ranks = 1, .min_instances = 1, .slot_bytes = kSlotBytes, .slots = 4};
  auto trainer = client::Trainer::Attach(options);
  INFO(trainer.status());
  REQUIRE(trainer.ok());
  Fp8Engine engine(daemon, model);
  std::vector<int64_t> offsets;
  int64_t end = 0;
  for (const TensorSpec& tensor : model) {
    offsets.push_back(end);
    end = AlignUp(end + TensorBytes(tensor));
  }
  auto region = (*trainer)->NewRegion(end);
  REQUIRE(region.ok());
  Parameters before;
  for (const int64_t version : {1, 2}) {
    INFO("version " << version);
    const std::vector<std::string> values = Values(model, static_cast<uint64_t>(version));
    for (size_t t = 0; t < model.size(); ++t) {
      values[t].copy((*region)->data() + offsets[t], values[t].size());
    }
    auto update = (*trainer)->Begin({.version = Version(version)});
    INFO(update.status());
    REQUIRE(update.ok());
    const absl::Status pushed = (*update)->Push(client::Bucket::Unpacked(model, *region, offsets));
    INFO(pushed);
    REQUIRE(pushed.ok());
    const auto committed = (*update)->Commit();
    INFO(committed.status());
    REQUIRE(committed.ok());

    REQUIRE(Eventually([&] {
      const Fp8Engine::Served served = engine.served();
      return served.version == Version(version) || !served.failed.ok();
    }));
    const Fp8Engine::Served served = engine.served();
    INFO(served.failed);
    REQUIRE(served.failed.ok());
    CHECK(served.cut >= 2);
    Parameters expected;
    for (size_t t = 0; t < model.size(); ++t) Load(model[t], values[t].data(), &expected);
    REQUIRE(served.parameters.size() == expected.size());
    for (const auto& [name, bytes] : expected) {
      INFO(name);
      REQUIRE(served.parameters.contains(name));
      const bool equal = served.parameters.at(name) == bytes;
      CHECK(equal);
      CHECK(bytes != before[name]);
    }
    CHECK(expected.at("embed.weight_scale_inv").size() == size_t{5} * 3 * sizeof(float));
    CHECK(expected.at("q.weight_scale_inv").size() == size_t{2} * 2 * sizeof(float));
    float first = 0;
    std::memcpy(&first, expected.at("q.weight_scale_inv").data(), sizeof(first));
    CHECK(first == 1);
    before = std::move(expected);
  }
}

}  // namespace
}  // namespace refitd::e2e
