// Shared by the benchmarks of compiled refits: trainer ranks in this process and engine ranks in
// processes of their own, one instance, each rank with its shard of a published model as Megatron
// and vLLM hold it.
//
// A failure prints one line and ends the process. Not thread-safe: one thread.
#ifndef REFITD_TESTS_BENCH_REFIT_SESSION_H_
#define REFITD_TESTS_BENCH_REFIT_SESSION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/trainer.h"
#include "tests/bench/session.h"
#include "transport/plan/layout.h"

namespace refitd::bench {

// A case like "qwen3-0.6b TP2->TP4", which names tensor-parallel sizes; or "nothing": one rank on
// each side and one tensor without elements.
struct RefitCase {
  std::string model;
  int trainers = 1;
  int engines = 1;
  bool replicas = false;  // each trainer rank holds the whole model
};

// The process of an engine rank: registers its parameters; after each commit it prints a digest of
// them and poisons them, as RunEngine does.
int RunRefitEngine(const RefitCase& c, const EnginePlace& place, const std::string& group,
                   int rank);

class RefitSession {
 public:
  RefitSession(const std::string& self, const std::string& socket, const std::string& group,
               const RefitCase& c);

  int64_t trainer_bytes() const;                          // the bytes of all ranks' shards
  int64_t engine_bytes() const { return engine_bytes_; }  // the bytes that a version writes
  // Fills the shards with new random weights; ranks that hold the same elements get the same bytes.
  void Fill(uint64_t seed);
  // Installs one version; returns the seconds from the first call to the last answer. The engines'
  // memory is checked outside that time.
  double Refit(Verification verification);

 private:
  const RefitCase case_;
  std::vector<Layout> trainer_layouts_;
  std::vector<Layout> engine_layouts_;
  int64_t engine_bytes_ = 0;
  std::vector<std::unique_ptr<Child>> engines_;
  std::vector<std::unique_ptr<client::Trainer>> trainers_;
  std::vector<std::shared_ptr<client::Region>> regions_;
  int64_t version_ = 0;
};

}  // namespace refitd::bench

#endif  // REFITD_TESTS_BENCH_REFIT_SESSION_H_
