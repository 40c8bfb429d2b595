// A model that engines serve in another form: trainers' tensors, the engines' tensors that are
// derived from them, and the bytes of both.
#ifndef REFITD_TESTS_E2E_DERIVED_MODEL_H_
#define REFITD_TESTS_E2E_DERIVED_MODEL_H_

#include <catch2/catch.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/e2e/model.h"
#include "transport/derive/derive.h"
#include "transport/derive/held_testing.h"

namespace refitd::e2e {

struct DerivedModel {
  DerivedModel() {
    const auto derive = [this](const std::string& name, size_t from, DerivedKind kind,
                               DerivedRole role, DType dtype) {
      auto derivation = std::make_shared<Derivation>(Derivation{trained[from], kind, role});
      const Dims shape = ComputableBox(*derivation, WholeBox(trained[from].shape))->extent;
      served.push_back({name, dtype, shape, std::move(derivation)});
    };
    constexpr auto kValues = DerivedRole::kValues;
    constexpr auto kScales = DerivedRole::kScales;
    derive("w.q", 0, DerivedKind::kFp8Block, kValues, DType::kFloat8E4M3FN);
    derive("w.s", 0, DerivedKind::kFp8Block, kScales, DType::kFloat32);
    derive("rows.q", 1, DerivedKind::kFp8Channel, kValues, DType::kFloat8E4M3FN);
    derive("rows.s", 1, DerivedKind::kFp8Channel, kScales, DType::kFloat32);
    derive("cast", 2, DerivedKind::kCast, kValues, DType::kBFloat16);
    served.push_back(trained[3]);
  }

  // A version's bytes of the trainers' tensors: random numbers of magnitudes below 2, since bit 6
  // of the last byte of each element is 0.
  std::vector<std::string> Trained(int64_t version) const {
    std::vector<std::string> tensors = BytesOf(trained, version);
    for (size_t t = 0; t < trained.size(); ++t) {
      const auto element = static_cast<size_t>(ElementBytes(trained[t].dtype));
      for (size_t i = element - 1; i < tensors[t].size(); i += element) {
        tensors[t][i] = static_cast<char>(tensors[t][i] & 0xbf);
      }
    }
    return tensors;
  }

  // The bytes of the engines' tensors, computed of the whole trainers' tensors.
  std::vector<std::string> Served(const std::vector<std::string>& from) const {
    std::vector<std::string> tensors;
    for (const TensorSpec& tensor : served) {
      size_t t = 0;
      while (trained[t].name != NameAtSource(tensor)) ++t;
      if (tensor.derived == nullptr) {
        tensors.push_back(from[t]);
        continue;
      }
      const HeldPiece whole = HoldOne(tensor.derived, WholeBox(trained[t].shape),
                                      RowMajorStrides(trained[t].shape), from[t].data());
      std::string& to = tensors.emplace_back(static_cast<size_t>(TensorBytes(tensor)), '\0');
      REQUIRE_FALSE(Derive(whole, tensor.dtype, WholeBox(tensor.shape), to.data()).has_value());
    }
    return tensors;
  }

  const Model trained = {{"w", DType::kBFloat16, {512, 384}},
                         {"rows", DType::kFloat32, {96, 40}},
                         {"master", DType::kFloat32, {64, 48}},
                         {"norm", DType::kFloat32, {64}}};
  Model served;
};

}  // namespace refitd::e2e

#endif  // REFITD_TESTS_E2E_DERIVED_MODEL_H_
