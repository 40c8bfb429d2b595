#include "transport/derive/derive.h"

#include <algorithm>
#include <cstring>

#include "transport/derive/matrices.h"

namespace refitd {
namespace {

using derive::BlockScale;
using derive::Matrix;
using derive::Range;
using derive::RowKernels;

struct Element {
  int64_t row = 0;
  int64_t column = 0;
};

// The last two dimensions of a held piece at one index of the others.
class Plane {
 public:
  explicit Plane(const BoundPiece& held)
      : held_(held), element_bytes_(ElementBytes(held.dtype)), first_(derive::MatrixOf(held.box)) {
    const size_t rank = held.strides.size();
    if (rank >= 1) column_bytes_ = held.strides[rank - 1] * element_bytes_;
    if (rank >= 2) row_bytes_ = held.strides[rank - 2] * element_bytes_;
  }
  void MoveTo(const Dims& at) {
    data_ = held_.data + ElementDistance(at, held_.box.offset, held_.strides) * element_bytes_;
  }

  // The elements `columns` of a row, without gaps. The next call may overwrite them.
  const char* Row(int64_t row, Range columns) {
    const char* from = data_ + (row - first_.rows.begin) * row_bytes_ +
                       (columns.begin - first_.columns.begin) * column_bytes_;
    if (column_bytes_ == element_bytes_ || columns.size() <= 1) return from;
    gathered_.resize(static_cast<size_t>(columns.size() * element_bytes_));
    for (int64_t i = 0; i < columns.size(); ++i, from += column_bytes_) {
      std::memcpy(&gathered_[static_cast<size_t>(i * element_bytes_)], from,
                  static_cast<size_t>(element_bytes_));
    }
    return gathered_.data();
  }

 private:
  const BoundPiece& held_;
  const int64_t element_bytes_;
  const Matrix first_;
  const char* data_ = nullptr;  // of the first row and column that are held
  int64_t row_bytes_ = 0;
  int64_t column_bytes_ = 0;
  std::vector<char> gathered_;
};

// Copies `box` of what several shards hold into one piece without gaps, in `memory`.
BoundPiece Gather(const HeldPiece& held, const Box& box, std::vector<char>* memory) {
  const TensorSpec& from = held.derivation->from;
  const int64_t element_bytes = ElementBytes(from.dtype);
  memory->resize(static_cast<size_t>(ElementCount(box) * element_bytes));
  BoundPiece all{from.dtype,     from.shape, box, RowMajorStrides(box.extent),
                 memory->data(), from.name};
  const Matrix whole = derive::MatrixOf(box);
  for (const BoundPiece& shard : held.shards) {
    const std::optional<Box> common = Intersect(shard.box, box);
    if (!common.has_value()) continue;
    Plane plane(shard);
    const Matrix matrix = derive::MatrixOf(*common);
    derive::ForEachMatrix(*common, [&](const Dims& at) {
      plane.MoveTo(at);
      for (int64_t row = matrix.rows.begin; row < matrix.rows.end; ++row) {
        const int64_t to = ElementDistance(at, box.offset, all.strides) +
                           (row - whole.rows.begin) * whole.columns.size() + matrix.columns.begin -
                           whole.columns.begin;
        std::memcpy(all.data + to * element_bytes, plane.Row(row, matrix.columns),
                    static_cast<size_t>(matrix.columns.size() * element_bytes));
      }
      return true;
    });
  }
  return all;
}

// Computes a box plane after plane.
class Computation {
 public:
  // `held` has all blocks that the box meets.
  Computation(const RowKernels& kernels, const Derivation& derivation, const BoundPiece& held,
              DType dtype, const Box& box, char* to)
      : kernels_(kernels),
        derivation_(derivation),
        box_(box),
        element_bytes_(ElementBytes(derivation_.from.dtype)),
        dtype_(dtype),
        block_(derive::MatrixOf(BlockOf(derivation))),
        shape_(derive::MatrixOf(derivation.from.shape)),
        wanted_(derive::MatrixOf(box)),
        plane_(held),
        to_(to) {}

  std::optional<Dims> Run() {
    std::optional<Dims> found;
    derive::ForEachMatrix(box_, [&](const Dims& at) {
      plane_.MoveTo(at);
      const std::optional<Element> fault = RunPlane();
      if (!fault.has_value()) return true;
      found = at;
      if (box_.offset.size() >= 2) found->push_back(fault->row);
      if (!box_.offset.empty()) found->push_back(fault->column);
      return false;
    });
    return found;
  }

 private:
  // Computes the plane at which plane_ is, and stores it at to_. Returns an element of the plane
  // that has no result.
  std::optional<Element> RunPlane() {
    if (derivation_.kind == DerivedKind::kCast) {
      for (int64_t row = wanted_.rows.begin; row < wanted_.rows.end; ++row) {
        kernels_.cast(plane_.Row(row, wanted_.columns), derivation_.from.dtype,
                      wanted_.columns.size(), dtype_, to_);
        to_ += wanted_.columns.size() * ElementBytes(dtype_);
      }
      return std::nullopt;
    }
    const bool scales = derivation_.role == DerivedRole::kScales;
    // In blocks.
    const Range bands = scales ? wanted_.rows : BlocksOf(wanted_.rows, block_.rows.size());
    const Range blocks =
        scales ? wanted_.columns : BlocksOf(wanted_.columns, block_.columns.size());
    for (int64_t band = bands.begin; band < bands.end; ++band) {
      if (const auto fault = FindScales(band, blocks); fault.has_value()) return fault;
      if (!scales) {
        QuantiseBand(band, blocks);
        continue;
      }
      for (const BlockScale& scale : scales_) {
        const uint32_t bits = derive::StoredBits(derivation_.kind, scale);
        std::memcpy(to_, &bits, static_cast<size_t>(ElementBytes(dtype_)));
        to_ += ElementBytes(dtype_);
      }
    }
    return std::nullopt;
  }

  Range RowsOf(int64_t band) const {
    return derive::ElementsOf(band, block_.rows.size(), shape_.rows.end);
  }
  Range ColumnsOf(int64_t block) const {
    return derive::ElementsOf(block, block_.columns.size(), shape_.columns.end);
  }

  // Fills scales_, by block.
  std::optional<Element> FindScales(int64_t band, Range blocks) {
    amax_.assign(static_cast<size_t>(blocks.size()), 0);
    const Range rows = RowsOf(band);
    const Range columns = {ColumnsOf(blocks.begin).begin, ColumnsOf(blocks.end - 1).end};
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const char* elements = plane_.Row(row, columns);
      for (int64_t block = blocks.begin; block < blocks.end; ++block) {
        const Range of = ColumnsOf(block);
        uint32_t& amax = amax_[static_cast<size_t>(block - blocks.begin)];
        amax = std::max(amax, kernels_.amax(elements, derivation_.from.dtype, of.size()));
        elements += of.size() * element_bytes_;
      }
    }
    scales_.clear();
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
      const uint32_t amax = amax_[static_cast<size_t>(block - blocks.begin)];
      BlockScale scale;
      if (!derive::FindScale(derivation_.kind, amax, &scale)) {
        return ElementOf(amax, rows, ColumnsOf(block));
      }
      scales_.push_back(scale);
    }
    return std::nullopt;
  }

  // The first element with that magnitude.
  Element ElementOf(uint32_t amax, Range rows, Range columns) {
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const char* elements = plane_.Row(row, columns);
      for (int64_t column = columns.begin; column < columns.end; ++column) {
        if (kernels_.amax(elements, derivation_.from.dtype, 1) == amax) return {row, column};
        elements += element_bytes_;
      }
    }
    return {rows.begin, columns.begin};  // the memory has changed meanwhile
  }

  // Stores the values of the band that are in the box.
  void QuantiseBand(int64_t band, Range blocks) {
    const Range rows = Common(RowsOf(band), wanted_.rows);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const char* elements = plane_.Row(row, wanted_.columns);
      for (int64_t block = blocks.begin; block < blocks.end; ++block) {
        const int64_t count = Common(ColumnsOf(block), wanted_.columns).size();
        kernels_.quantise(elements, derivation_.from.dtype, count,
                          scales_[static_cast<size_t>(block - blocks.begin)], to_);
        elements += count * element_bytes_;
        to_ += count;
      }
    }
  }

  const RowKernels& kernels_;
  const Derivation& derivation_;
  const Box& box_;
  const int64_t element_bytes_;  // of the held tensor
  const DType dtype_;
  const Matrix block_;
  const Matrix shape_;
  const Matrix wanted_;
  Plane plane_;
  char* to_;
  std::vector<uint32_t> amax_;
  std::vector<BlockScale> scales_;
};

}  // namespace

std::vector<const RowKernels*> AllRowKernels() {
  std::vector<const RowKernels*> kernels = {&derive::kScalarRows};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) kernels.push_back(&derive::kAvx2Rows);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    kernels.push_back(&derive::kAvx512Rows);
  }
#endif
  return kernels;
}

std::optional<Dims> DeriveBy(const RowKernels& kernels, const HeldPiece& held, DType dtype,
                             const Box& box, char* to) {
  const Box blocks = ComputedFrom(*held.derivation, box);
  for (const BoundPiece& shard : held.shards) {
    if (!Contains(shard.box, blocks)) continue;
    return Computation(kernels, *held.derivation, shard, dtype, box, to).Run();
  }
  thread_local std::vector<char> memory;
  const BoundPiece all = Gather(held, blocks, &memory);
  return Computation(kernels, *held.derivation, all, dtype, box, to).Run();
}

std::optional<Dims> Derive(const HeldPiece& held, DType dtype, const Box& box, char* to) {
  static const RowKernels& best = *AllRowKernels().back();
  return DeriveBy(best, held, dtype, box, to);
}

}  // namespace refitd
