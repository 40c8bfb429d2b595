// Shared by the benchmarks of daemons: models of random weights, engines as processes of their own,
// and a trainer that pushes and checks every version.
//
// A failure prints one line and ends the process, since a benchmark can't go on. Not thread-safe:
// one thread.
#ifndef REFITD_TESTS_BENCH_SESSION_H_
#define REFITD_TESTS_BENCH_SESSION_H_

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "client/trainer.h"
#include "fmt/format.h"
#include "refitd/v1/operator.pb.h"
#include "transport/host/memory.h"

namespace refitd::bench {

inline constexpr int64_t kBucketBytes = int64_t{256} << 20;
inline constexpr std::chrono::seconds kWait{60};

template <typename T>
T Must(absl::StatusOr<T> value, const char* what) {
  if (value.ok()) return *std::move(value);
  fmt::print(stderr, "bench: {}: {}\n", what, value.status().ToString());
  std::exit(1);
}

inline void Must(const absl::Status& status, const char* what) {
  if (status.ok()) return;
  fmt::print(stderr, "bench: {}: {}\n", what, status.ToString());
  std::exit(1);
}

double SecondsSince(std::chrono::steady_clock::time_point start);

// The number of threads with which a daemon copies on this machine.
int CopyThreads();

// A model in one dense region: tensors back to back at kPackAlignment.
struct Model {
  std::vector<TensorSpec> tensors;
  std::vector<int64_t> offsets;
  int64_t bytes = 0;
};
// `name`: of tests/workloads; or "1mib", "256mib", "64kib-buckets"; or like "moonlight-16b-a3b/32":
// a model of tests/workloads/sharding with each dimension divided, so that it has as many tensors,
// but small.
Model MakeModel(const std::string& name);

void FillRandom(char* data, int64_t bytes, uint64_t seed, int threads);
void ForkJoin(int threads, const std::function<void(int)>& work);
void ParallelMemcpy(char* to, const char* from, int64_t bytes, int threads);
std::shared_ptr<HostRegion> MappedMemfd(int64_t bytes);  // prefaulted

// A digest of the whole model at `data`, the same in every process.
uint64_t DigestOf(const Model& model, const char* data);

// A process. It ends with the object, at the latest with this process.
class Child {
 public:
  // `inherit`: a descriptor that becomes its standard input; -1: none.
  Child(const std::vector<std::string>& argv, bool read_output, int inherit = -1);
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  // Waits for the engine's line about its `commit`th commit.
  uint64_t ReadDigest(uint64_t commit);

 private:
  pid_t pid_ = -1;
  FILE* out_ = nullptr;
};

// The daemon to which an engine of a session attaches.
struct EnginePlace {
  std::string socket;
  std::string coordinator;  // "": the daemon at the socket
};

// The command line of an engine's process, and the function that it runs.
struct EngineArgs {
  EnginePlace place;
  std::string group;
  std::string model;
  std::string instance;
};
// Registers the model in one region. After each commit it prints a digest of that memory and
// poisons the memory.
int RunEngine(const EngineArgs& args);

// A trainer at `socket` and its engines, in one group. `self` is the benchmark's binary, which
// takes --role engine --socket --coordinator --group --model --instance.
class Session {
 public:
  Session(const std::string& self, const std::string& socket, const std::string& group,
          const std::string& model_name, const std::vector<EnginePlace>& engines);

  const Model& model() const { return model_; }
  char* data() const { return region_->data(); }

  // Installs one version in buckets of at most `bucket_bytes`; returns the seconds from Begin to
  // committed.
  double Update(Verification verification, int64_t bucket_bytes);

 private:
  std::vector<client::Bucket> Buckets(int64_t bucket_bytes) const;

  const Model model_;
  std::vector<std::unique_ptr<Child>> engines_;
  std::unique_ptr<client::Trainer> trainer_;
  std::shared_ptr<client::Region> region_;
  int64_t version_ = 0;
};

// The status of the daemon at `socket`; waits until it answers.
v1::GetStatusResponse StatusOf(const std::string& socket);

}  // namespace refitd::bench

#endif  // REFITD_TESTS_BENCH_SESSION_H_
