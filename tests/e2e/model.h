// Small models of known bytes: a version's tensors, and what an engine's memory must hold then,
// computed element by element without any of the code under test.
//
// Values; thread-safe because they share nothing.
#ifndef REFITD_TESTS_E2E_MODEL_H_
#define REFITD_TESTS_E2E_MODEL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "refitd/v1/engine.pb.h"
#include "refitd/v1/types.pb.h"
#include "transport/plan/layout.h"

namespace refitd::e2e {

using Model = std::vector<TensorSpec>;

// A model with every dtype, one to four dimensions, a scalar, and a tensor without elements; about
// 40 KiB.
Model MixedModel();
// `tensors` bfloat16 matrices of `rows` by `columns`.
Model PlainModel(int tensors, int64_t rows, int64_t columns);

int64_t TensorBytes(const TensorSpec& tensor);
int64_t ModelBytes(const Model& model);

// The bytes of one version, one string for each tensor: pseudo-random, different in every version
// and tensor.
std::vector<std::string> BytesOf(const Model& model, int64_t version);

// ---- an engine rank's memory ----

// A layout and the size of its one region; the caller fills in piece.region.
struct Held {
  Layout layout;
  int64_t region_bytes = 0;
};

// Every tensor whole, with `gap_bytes` of foreign storage around each.
Held HoldWhole(const Model& model, int64_t gap_bytes = 24);
// Rank `rank` of `world_size`: each tensor of two or more dimensions is cut along `dimension`
// (ceil(n/world_size) for each rank), others are held whole. Rows are stored with padding between
// them, so that pieces are strided.
Held HoldSlice(const Model& model, int dimension, int rank, int world_size);

// The content of storage before the first update: a pattern that no version has.
std::string EmptyImage(int64_t bytes);
// `image` with every element of the layout's boxes replaced by that of `tensors` (whole tensors'
// bytes, in the model's order); storage outside the boxes stays.
std::string ExpectedImage(std::string image, const Layout& layout, const Model& model,
                          const std::vector<std::string>& tensors);
// Empty: equal. Otherwise the first place where they differ, and its tensor.
std::string Difference(const std::string& expected, const char* memory, const Layout& layout);

// ---- buckets ----

// A bucket with names, dtypes and shapes of the tensors `indices` (all of them if empty), without a
// source.
v1::Bucket Describe(const Model& model, int64_t seq, std::vector<int> indices = {});
// Lists all tensors as an engine with loader delivery announces them.
v1::Manifest ManifestOf(const Model& model);
// Does what Describe does, and puts the bytes inline.
v1::Bucket InlineBucket(const Model& model, const std::vector<std::string>& bytes, int64_t seq,
                        bool packed, std::vector<int> indices = {});

}  // namespace refitd::e2e

#endif  // REFITD_TESTS_E2E_MODEL_H_
