#include "transport/plan/shared_tensors.h"

#include <catch2/catch.hpp>
#include <string>
#include <thread>
#include <vector>

namespace refitd {
namespace {

Layout Of(std::vector<TensorSpec> tensors) {
  Layout layout;
  layout.tensors = std::move(tensors);
  return layout;
}

Layout Shared(std::vector<TensorSpec> tensors) {
  Layout layout = Of(std::move(tensors));
  ShareTensors(&layout);
  return layout;
}

const std::vector<TensorSpec> kModel = {{"a", DType::kBFloat16, {4, 4}},
                                        {"b", DType::kFloat32, {}}};

TEST_CASE("layouts that declare the same tensors keep one copy of them", "[shared_tensors]") {
  const Layout first = Shared(kModel);
  const Layout second = Shared(kModel);
  CHECK(&first.tensors.get() == &second.tensors.get());
  CHECK(second.tensors == Of(kModel).tensors);
}

TEST_CASE("a list that differs in name, dtype, shape or order is its own", "[shared_tensors]") {
  const Layout first = Shared(kModel);
  for (const std::vector<TensorSpec>& other : {std::vector<TensorSpec>{kModel[1], kModel[0]},
                                               {kModel[0]},
                                               {{"c", DType::kBFloat16, {4, 4}}, kModel[1]},
                                               {{"a", DType::kFloat16, {4, 4}}, kModel[1]},
                                               {{"a", DType::kBFloat16, {16}}, kModel[1]}}) {
    const Layout layout = Shared(other);
    CHECK(&layout.tensors.get() != &first.tensors.get());
    CHECK(layout.tensors == Of(other).tensors);
  }
}

TEST_CASE("an edited list changes no other layout", "[shared_tensors]") {
  const Layout first = Shared(kModel);
  Layout second = Shared(kModel);
  second.tensors.Edit()[0].dtype = DType::kInt8;
  CHECK(second.tensors[0].dtype == DType::kInt8);
  CHECK(first.tensors == Of(kModel).tensors);
}

TEST_CASE("a list comes back after no layout referred to it", "[shared_tensors]") {
  for (int i = 0; i < 100; ++i) {
    const std::vector<TensorSpec> tensors = {{std::to_string(i), DType::kInt8, {8}}};
    CHECK(Shared(tensors).tensors == Of(tensors).tensors);
    CHECK(Shared(tensors).tensors == Of(tensors).tensors);
  }
}

TEST_CASE("threads that register layouts at the same time share them", "[shared_tensors]") {
  std::vector<Layout> layouts(64);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&layouts, t] {
      for (size_t i = t; i < layouts.size(); i += 4) {
        layouts[i] = Shared({{std::to_string(i / 8), DType::kInt8, {8}}});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < layouts.size(); ++i) {
    CHECK(&layouts[i].tensors.get() == &layouts[i / 8 * 8].tensors.get());
  }
}

}  // namespace
}  // namespace refitd
