#include "transport/derive/derive.h"

#include <algorithm>
#include <cstring>

namespace refitd {
namespace {

using derive::BlockScale;
using derive::RowKernels;

// A range of indices of one dimension.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
};

struct Place {
  int64_t row = 0;
  int64_t column = 0;
};

// The last two dimensions of a held piece at one place of the others: a matrix. Fewer dimensions
// count as a matrix of one row, or of one element.
class Plane {
 public:
  Plane(const HeldPiece& held, int64_t element_bytes) : element_bytes_(element_bytes) {
    const size_t rank = held.strides.size();
    if (rank >= 1) {
      column_bytes_ = held.strides[rank - 1] * element_bytes;
      first_column_ = held.box.offset[rank - 1];
    }
    if (rank >= 2) {
      row_bytes_ = held.strides[rank - 2] * element_bytes;
      first_row_ = held.box.offset[rank - 2];
    }
  }
  void MoveTo(const char* data) { data_ = data; }

  // The elements `columns` of a row, without gaps. The next call may overwrite them.
  const char* Row(int64_t row, Range columns) {
    const char* from =
        data_ + (row - first_row_) * row_bytes_ + (columns.begin - first_column_) * column_bytes_;
    const int64_t count = columns.end - columns.begin;
    if (column_bytes_ == element_bytes_ || count <= 1) return from;
    gathered_.resize(static_cast<size_t>(count * element_bytes_));
    for (int64_t i = 0; i < count; ++i, from += column_bytes_) {
      std::memcpy(&gathered_[static_cast<size_t>(i * element_bytes_)], from,
                  static_cast<size_t>(element_bytes_));
    }
    return gathered_.data();
  }

 private:
  const int64_t element_bytes_;
  const char* data_ = nullptr;  // of the first row and column that are held
  int64_t row_bytes_ = 0;
  int64_t column_bytes_ = 0;
  int64_t first_row_ = 0;
  int64_t first_column_ = 0;
  std::vector<char> gathered_;
};

// Computes a box plane after plane.
class Computation {
 public:
  Computation(const RowKernels& kernels, const HeldPiece& held, DType dtype, const Box& box,
              char* to)
      : kernels_(kernels),
        held_(held),
        derivation_(*held.derivation),
        box_(box),
        element_bytes_(ElementBytes(derivation_.from.dtype)),
        dtype_(dtype),
        plane_(held, element_bytes_),
        to_(to) {
    const Dims block = BlockOf(derivation_);
    const Dims& shape = derivation_.from.shape;
    const size_t rank = shape.size();
    if (rank >= 1) {
      block_columns_ = block[rank - 1];
      shape_columns_ = shape[rank - 1];
      columns_ = RangeOf(rank - 1);
    }
    if (rank >= 2) {
      block_rows_ = block[rank - 2];
      shape_rows_ = shape[rank - 2];
      rows_ = RangeOf(rank - 2);
    }
  }

  std::optional<Dims> Run() {
    const size_t leading = box_.offset.size() - std::min<size_t>(box_.offset.size(), 2);
    Dims at(box_.offset.begin(), box_.offset.begin() + static_cast<int64_t>(leading));
    while (true) {
      const char* data = held_.data;
      for (size_t d = 0; d < leading; ++d) {
        data += (at[d] - held_.box.offset[d]) * held_.strides[d] * element_bytes_;
      }
      plane_.MoveTo(data);
      if (const std::optional<Place> fault = RunPlane(); fault.has_value()) {
        if (box_.offset.size() >= 2) at.push_back(fault->row);
        if (!box_.offset.empty()) at.push_back(fault->column);
        return at;
      }
      size_t d = leading;
      while (d > 0 && at[d - 1] + 1 == box_.offset[d - 1] + box_.extent[d - 1]) {
        at[d - 1] = box_.offset[d - 1];
        --d;
      }
      if (d == 0) return std::nullopt;
      ++at[d - 1];
    }
  }

 private:
  Range RangeOf(size_t d) const { return {box_.offset[d], box_.offset[d] + box_.extent[d]}; }

  // Returns an element that has no result.
  std::optional<Place> RunPlane() {
    if (derivation_.kind == DerivedKind::kCast) {
      for (int64_t row = rows_.begin; row < rows_.end; ++row) {
        kernels_.cast(plane_.Row(row, columns_), derivation_.from.dtype,
                      columns_.end - columns_.begin, dtype_, to_);
        to_ += (columns_.end - columns_.begin) * ElementBytes(dtype_);
      }
      return std::nullopt;
    }
    const bool scales = derivation_.role == DerivedRole::kScales;
    // In blocks.
    const Range bands = scales ? rows_ : Blocks(rows_, block_rows_);
    const Range blocks = scales ? columns_ : Blocks(columns_, block_columns_);
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

  static Range Blocks(Range elements, int64_t block) {
    return {elements.begin / block, (elements.end + block - 1) / block};
  }
  Range RowsOf(int64_t band) const {
    return {band * block_rows_, std::min((band + 1) * block_rows_, shape_rows_)};
  }
  Range ColumnsOf(int64_t block) const {
    return {block * block_columns_, std::min((block + 1) * block_columns_, shape_columns_)};
  }

  // Fills scales_, by block.
  std::optional<Place> FindScales(int64_t band, Range blocks) {
    amax_.assign(static_cast<size_t>(blocks.end - blocks.begin), 0);
    const Range rows = RowsOf(band);
    const Range columns = {ColumnsOf(blocks.begin).begin, ColumnsOf(blocks.end - 1).end};
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const char* elements = plane_.Row(row, columns);
      for (int64_t block = blocks.begin; block < blocks.end; ++block) {
        const Range of = ColumnsOf(block);
        uint32_t& amax = amax_[static_cast<size_t>(block - blocks.begin)];
        amax = std::max(amax, kernels_.amax(elements, derivation_.from.dtype, of.end - of.begin));
        elements += (of.end - of.begin) * element_bytes_;
      }
    }
    scales_.clear();
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
      const uint32_t amax = amax_[static_cast<size_t>(block - blocks.begin)];
      BlockScale scale;
      if (!derive::FindScale(derivation_.kind, amax, &scale)) {
        return PlaceOf(amax, rows, ColumnsOf(block));
      }
      scales_.push_back(scale);
    }
    return std::nullopt;
  }

  // The first element with that magnitude.
  Place PlaceOf(uint32_t amax, Range rows, Range columns) {
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
    const Range rows = RowsOf(band);
    const int64_t end = std::min(rows.end, rows_.end);
    for (int64_t row = std::max(rows.begin, rows_.begin); row < end; ++row) {
      const char* elements = plane_.Row(row, columns_);
      for (int64_t block = blocks.begin; block < blocks.end; ++block) {
        const Range of = ColumnsOf(block);
        const int64_t count = std::min(of.end, columns_.end) - std::max(of.begin, columns_.begin);
        kernels_.quantise(elements, derivation_.from.dtype, count,
                          scales_[static_cast<size_t>(block - blocks.begin)], to_);
        elements += count * element_bytes_;
        to_ += count;
      }
    }
  }

  const RowKernels& kernels_;
  const HeldPiece& held_;
  const Derivation& derivation_;
  const Box& box_;
  const int64_t element_bytes_;  // of the held tensor
  const DType dtype_;
  int64_t block_rows_ = 1;
  int64_t block_columns_ = 1;
  int64_t shape_rows_ = 1;
  int64_t shape_columns_ = 1;
  Range rows_ = {0, 1};
  Range columns_ = {0, 1};
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
  return Computation(kernels, held, dtype, box, to).Run();
}

std::optional<Dims> Derive(const HeldPiece& held, DType dtype, const Box& box, char* to) {
  static const RowKernels& best = *AllRowKernels().back();
  return DeriveBy(best, held, dtype, box, to);
}

}  // namespace refitd
