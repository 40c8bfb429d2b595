// For tests: the memory of trainers and engines, written from the global tensors as the frameworks
// themselves fill their parameters, without the layouts of this folder.
//
// Arenas hold element ids instead of bytes: every element of every global tensor has its own
// number, so that a test notices any element in a wrong place.
#ifndef REFITD_TESTS_WORKLOADS_SHARDING_ORACLE_H_
#define REFITD_TESTS_WORKLOADS_SHARDING_ORACLE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "tests/workloads/sharding/mappings.h"

namespace refitd::sharding {

using ElementId = uint32_t;
inline constexpr ElementId kUntouched = 0;

// One entry for each byte of the region: the id of the element that begins there, else kUntouched.
using Arena = std::vector<ElementId>;

// A matrix of element ids, row-major; a vector is a matrix of one column.
struct IdMatrix {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t element_bytes = 0;
  std::vector<ElementId> ids;
};

// All tensors of a model, every element with its own id from 1.
class GlobalIds {
 public:
  explicit GlobalIds(const ModelConfig& config);

  bool Has(const std::string& name) const { return tensors_.contains(name); }
  const IdMatrix& Get(const std::string& name) const;
  // Names in the order of the model.
  const std::vector<std::string>& names() const { return names_; }

 private:
  absl::flat_hash_map<std::string, IdMatrix> tensors_;
  std::vector<std::string> names_;
};

// The arenas' contents, in the order that megatron.h and vllm.h state.
Arena ExpectedTrainer(const GlobalIds& ids, const Mapping& mapping, const ModelConfig& config,
                      int64_t rank);
Arena ExpectedEngine(const GlobalIds& ids, const Mapping& mapping, const ModelConfig& config,
                     int64_t rank);

}  // namespace refitd::sharding

#endif  // REFITD_TESTS_WORKLOADS_SHARDING_ORACLE_H_
