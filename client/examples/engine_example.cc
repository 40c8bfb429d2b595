// An engine of one rank that takes VERSIONS versions and checks each in its own memory.
//
//   engine_example SOCKET GROUP INSTANCE VERSIONS [staged]
//
// Waits for the group. By default its parameters are registered and the daemon writes them in
// place; with `staged` it loads them itself from the daemon's slots. Exit code 0 after VERSIONS
// commits with the right values, 1 otherwise, 2 for wrong usage.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "client/engine.h"
#include "client/examples/values.h"
#include "transport/base/status.h"

namespace refitd::client {
namespace {

constexpr std::chrono::seconds kPatience(60);  // for the next event

absl::Status RegisterModel(Engine* engine, const Region& weights) {
  Layout layout;
  for (int i = 0; i < kTensors; ++i) {
    const example_tensor& tensor = kModel[i];
    const Dims shape(tensor.dims, tensor.dims + tensor.dim_count);
    layout.tensors.push_back({tensor.name, static_cast<DType>(tensor.dtype), shape});
    layout.pieces.push_back({.tensor = static_cast<uint32_t>(i),
                             .box = WholeBox(shape),
                             .region = weights.id(),
                             .byte_offset = example_offset(i),
                             .strides = RowMajorStrides(shape)});
  }
  return engine->Register(std::move(layout));
}

// Loads whole tensors, as a framework's weight loader does.
absl::Status Load(const std::vector<TensorView>& tensors, char* weights) {
  for (const TensorView& view : tensors) {
    int i = 0;
    while (i < kTensors && view.tensor.name != kModel[i].name) ++i;
    if (i == kTensors || view.count != example_elements(i)) {
      return Error(absl::StatusCode::kInvalidArgument, "unexpected tensor {}", view.tensor.name);
    }
    std::memcpy(weights + example_offset(i), view.data, example_bytes(i));
  }
  return absl::OkStatus();
}

absl::Status Serve(Engine* engine, char* weights, int versions) {
  PartJoiner joiner;
  for (int committed = 0; committed < versions;) {
    REFITD_ASSIGN_OR_RETURN(const Event event, engine->Next(kPatience));
    if (std::holds_alternative<Nothing>(event)) {
      return Error(absl::StatusCode::kDeadlineExceeded, "no event came");
    }
    if (const auto* prepare = std::get_if<Prepare>(&event)) {
      REFITD_RETURN_IF_ERROR(engine->Ready(prepare->version));
    } else if (const auto* part = std::get_if<Part>(&event)) {
      REFITD_ASSIGN_OR_RETURN(const auto tensors, joiner.Add(*part));
      REFITD_RETURN_IF_ERROR(Load(tensors, weights));
      REFITD_RETURN_IF_ERROR(engine->Ack(*part));
    } else if (const auto* done = std::get_if<Committed>(&event)) {
      joiner.Reset();
      if (example_check(done->version.value(), weights) == 0) {
        return Error(absl::StatusCode::kDataLoss, "version {} is wrong", done->version);
      }
      ++committed;
    } else if (const auto* aborted = std::get_if<Aborted>(&event)) {
      joiner.Reset();
      std::fprintf(stderr, "version %lld aborted%s: %s\n",
                   static_cast<long long>(aborted->version.value()),
                   aborted->dirty ? ", dirty" : "", aborted->reason.c_str());
    }
  }
  return absl::OkStatus();
}

absl::Status Run(const char* socket, const char* group, const char* instance, int versions,
                 bool staged) {
  REFITD_ASSIGN_OR_RETURN(
      const std::unique_ptr<Engine> engine,
      Engine::Attach({.connect = {.socket = socket, .group = group, .client = "engine_example"},
                      .instance = instance,
                      .delivery = staged ? Delivery::kLoader : Delivery::kInPlace}));
  if (staged) {
    std::vector<char> weights(example_offset(kTensors));
    return Serve(engine.get(), weights.data(), versions);
  }
  REFITD_ASSIGN_OR_RETURN(const std::shared_ptr<Region> weights,
                          engine->NewRegion(example_offset(kTensors)));
  REFITD_RETURN_IF_ERROR(RegisterModel(engine.get(), *weights));
  return Serve(engine.get(), weights->data(), versions);
}

}  // namespace
}  // namespace refitd::client

int main(int argc, char** argv) {
  if (argc < 5 || argc > 6) {
    std::fprintf(stderr, "usage: engine_example SOCKET GROUP INSTANCE VERSIONS [staged]\n");
    return 2;
  }
  const bool staged = argc == 6 && std::string_view(argv[5]) == "loader";
  const absl::Status status =
      refitd::client::Run(argv[1], argv[2], argv[3], std::atoi(argv[4]), staged);
  if (status.ok()) return 0;
  std::fprintf(stderr, "engine_example: %s\n", status.ToString().c_str());
  return 1;
}
