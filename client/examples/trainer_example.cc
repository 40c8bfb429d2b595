// A trainer of one rank that installs VERSIONS versions, one after the other.
//
//   trainer_example SOCKET GROUP VERSIONS [INSTANCES]
//
// Creates the group, waits for INSTANCES engines (default 1), and for each version, counting on
// from the group's: writes new weights into a region, pushes them and commits. Exit code 0 if every
// instance took every version, 1 otherwise, 2 for wrong usage.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "client/examples/values.h"
#include "client/trainer.h"
#include "transport/base/status.h"

namespace refitd::client {
namespace {

std::vector<TensorSpec> Model(int first, int last) {
  std::vector<TensorSpec> tensors;
  for (int i = first; i < last; ++i) {
    const example_tensor& tensor = kModel[i];
    tensors.push_back({tensor.name, static_cast<DType>(tensor.dtype),
                       Dims(tensor.dims, tensor.dims + tensor.dim_count)});
  }
  return tensors;
}

absl::Status Install(Trainer* trainer, const std::shared_ptr<Region>& weights, Version version) {
  for (int i = 0; i < kTensors; ++i) {
    example_fill(version.value(), i, weights->data() + example_offset(i));
  }
  REFITD_ASSIGN_OR_RETURN(
      const std::unique_ptr<Update> update,
      trainer->Begin(
          {.version = version, .duration = std::chrono::seconds(30), .tensor_count = kTensors}));
  // The first three tensors are pushed from where they lie, the last one inline, as small tensors
  // may be.
  update->PushAsync(Bucket::Unpacked(Model(0, 3), weights,
                                     {example_offset(0), example_offset(1), example_offset(2)}),
                    nullptr);
  const std::span<const char> last(weights->data() + example_offset(3), example_bytes(3));
  update->PushAsync(Bucket::Inline(Model(3, 4), {last}), nullptr);
  REFITD_ASSIGN_OR_RETURN(const CommitResult result, update->Commit());
  for (const InstanceOutcome& instance : result.instances) {
    if (!instance.committed) {
      return Error(absl::StatusCode::kAborted, "{}: {}", instance.instance, instance.reason);
    }
  }
  std::printf("version %lld: %zu instances, %lld bytes, %.3f ms\n",
              static_cast<long long>(version.value()), result.instances.size(),
              static_cast<long long>(result.bytes), result.seconds * 1e3);
  return absl::OkStatus();
}

absl::Status Run(const char* socket, const char* group, int versions, int instances) {
  REFITD_ASSIGN_OR_RETURN(
      const std::unique_ptr<Trainer> trainer,
      Trainer::Attach({.connect = {.socket = socket,
                                   .group = group,
                                   .spec = GroupSpec{.min_instances = instances},
                                   .client = "trainer_example"}}));
  REFITD_ASSIGN_OR_RETURN(const std::shared_ptr<Region> weights,
                          trainer->NewRegion(example_offset(kTensors)));
  Version version = trainer->group_version().value_or(Version(0));
  for (int i = 0; i < versions; ++i) {
    version = version.Next();
    REFITD_RETURN_IF_ERROR(Install(trainer.get(), weights, version));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace refitd::client

int main(int argc, char** argv) {
  if (argc < 4 || argc > 5) {
    std::fprintf(stderr, "usage: trainer_example SOCKET GROUP VERSIONS [INSTANCES]\n");
    return 2;
  }
  const int instances = argc == 5 ? std::atoi(argv[4]) : 1;
  const absl::Status status = refitd::client::Run(argv[1], argv[2], std::atoi(argv[3]), instances);
  if (status.ok()) return 0;
  std::fprintf(stderr, "trainer_example: %s\n", status.ToString().c_str());
  return 1;
}
