#include "transport/cuda/derive_plan.h"

#include <algorithm>
#include <limits>

#include "transport/base/status.h"

namespace refitd {
namespace {

// The most elements of a task, unless one block has more.
constexpr int64_t kTaskElements = 256 << 10;

// A range of indices.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

// The last two dimensions, as rows and columns; a dimension that is not there has one index.
struct Matrix {
  Range rows{0, 1};
  Range columns{0, 1};
};

Matrix MatrixOf(const Box& box) {
  Matrix matrix;
  const size_t rank = box.offset.size();
  if (rank >= 1)
    matrix.columns = {box.offset[rank - 1], box.offset[rank - 1] + box.extent[rank - 1]};
  if (rank >= 2) matrix.rows = {box.offset[rank - 2], box.offset[rank - 2] + box.extent[rank - 2]};
  return matrix;
}

Matrix MatrixOf(const Dims& extent) { return MatrixOf(WholeBox(extent)); }

// Distances from one row, and from one column, to the next.
struct Steps {
  int64_t row = 0;
  int64_t column = 0;
};

Steps StepsOf(const Dims& strides, int64_t element_bytes) {
  const size_t rank = strides.size();
  return {.row = rank >= 2 ? strides[rank - 2] * element_bytes : 0,
          .column = rank >= 1 ? strides[rank - 1] * element_bytes : 0};
}

// Blocks from `first` on, in one dimension, that are cut and windowed alike.
struct Alike {
  int64_t first = 0;
  int64_t count = 0;
  Range all;     // elements of the first block
  Range window;  // those that are derived
};

class Cutter {
 public:
  Cutter(const DeriveMove& move, int64_t most, std::vector<DeriveTask>* tasks)
      : move_(move),
        held_(*move.source->held),
        derivation_(*held_.derivation),
        scales_(derivation_.kind != DerivedKind::kCast && derivation_.role == DerivedRole::kScales),
        most_(most),
        tasks_(tasks),
        block_extents_(BlockOf(derivation_)),
        block_(MatrixOf(block_extents_)),
        shape_(MatrixOf(derivation_.from.shape)),
        held_box_(MatrixOf(held_.box)),
        box_(MatrixOf(*move.box)),
        held_bytes_(ElementBytes(derivation_.from.dtype)),
        element_bytes_(ElementBytes(move.source->dtype)),
        index_strides_(RowMajorStrides(move.source->shape)),
        from_(StepsOf(held_.strides, held_bytes_)),
        to_(StepsOf(move.destination_strides, element_bytes_)),
        index_(StepsOf(index_strides_, 1)) {}

  absl::Status Run() {
    const Box& box = *move_.box;
    if (ElementCount(box) == 0) return absl::OkStatus();
    const size_t leading = box.offset.size() - std::min<size_t>(box.offset.size(), 2);
    at_ = box.offset;
    while (true) {
      const bool whole = derivation_.kind == DerivedKind::kCast || HasSmallBlocks(derivation_.kind);
      REFITD_RETURN_IF_ERROR(whole ? CutRows() : CutBlocks());
      size_t d = leading;
      while (d > 0 && at_[d - 1] + 1 == box.offset[d - 1] + box.extent[d - 1]) {
        at_[d - 1] = box.offset[d - 1];
        --d;
      }
      if (d == 0) return absl::OkStatus();
      ++at_[d - 1];
    }
  }

 private:
  // The sum over the leading dimensions of the distance from `from` to at_ times the stride.
  int64_t Leading(const Dims* from, const Dims& strides) const {
    int64_t sum = 0;
    for (size_t d = 0; d + 2 < at_.size(); ++d) {
      sum += (at_[d] - (from == nullptr ? 0 : (*from)[d])) * strides[d];
    }
    return sum;
  }

  absl::Status CutBlocks() {
    const std::vector<Alike> bands = AlikeIn(box_.rows, block_.rows.size(), shape_.rows.end);
    const std::vector<Alike> blocks =
        AlikeIn(box_.columns, block_.columns.size(), shape_.columns.end);
    // Rows of a matrix that has one block a row are joined; else the blocks of a row.
    if (block_.columns.size() >= shape_.columns.end) {
      for (const Alike& band : bands) {
        REFITD_RETURN_IF_ERROR(Add(band, blocks.front(), band.count, block_.rows.size(), 0));
      }
      return absl::OkStatus();
    }
    for (Alike band : bands) {
      for (; band.count > 0; band = Next(band)) {
        for (const Alike& block : blocks) {
          REFITD_RETURN_IF_ERROR(Add(band, block, block.count, 0, block_.columns.size()));
        }
      }
    }
    return absl::OkStatus();
  }

  // Cuts casts, and kinds with small blocks, into parts of whole rows of the box, or of one row.
  absl::Status CutRows() {
    const int64_t block = block_.columns.size();
    const int64_t unit = scales_ ? block : 1;  // elements of the source for an element of the box
    // A multiple of the block, so that no block has two tasks.
    const int64_t columns = std::min(box_.columns.end * unit, kTaskElements);
    const int64_t rows = std::min(
        kMaxDeriveRows, std::max<int64_t>(1, kTaskElements / (box_.columns.size() * unit)));
    for (int64_t row = box_.rows.begin; row < box_.rows.end; row += rows) {
      const Range all_rows = {row, std::min(row + rows, box_.rows.end)};
      for (int64_t column = box_.columns.begin * unit; column < box_.columns.end * unit;) {
        const int64_t end = std::min((column / block * block) + columns, box_.columns.end * unit);
        const Range blocks = {column / block * block,
                              std::min((end + block - 1) / block * block, shape_.columns.end)};
        const Range window = scales_ ? Range{blocks.begin, blocks.begin + (end - column) / unit}
                                     : Range{column, end};
        REFITD_RETURN_IF_ERROR(
            Add({row, 1, all_rows, all_rows}, {column / unit, 1, blocks, window}, 1, 0, 0));
        column = end;
      }
    }
    return absl::OkStatus();
  }

  // Returns the blocks of a range, which is one of blocks if scales are derived, else of elements.
  // Only the first and the last may differ from the others.
  std::vector<Alike> AlikeIn(Range range, int64_t block, int64_t end) const {
    std::vector<Alike> found;
    const int64_t last = scales_ ? range.end : (range.end + block - 1) / block;
    for (int64_t b = scales_ ? range.begin : range.begin / block; b < last; ++b) {
      const Range all = {b * block, std::min((b + 1) * block, end)};
      const Range window = {scales_ ? all.begin : std::max(all.begin, range.begin),
                            scales_ ? all.begin + 1 : std::min(all.end, range.end)};
      found.push_back({b, 1, all, window});
      if (all.size() < block || (!scales_ && window.size() < block)) continue;
      // Whole blocks follow, up to the range's and the tensor's last whole block.
      const int64_t whole = std::min(scales_ ? last : range.end / block, end / block);
      found.back().count = std::max<int64_t>(whole - b, 1);
      b += found.back().count - 1;
    }
    return found;
  }

  // The blocks after the first.
  Alike Next(const Alike& alike) const {
    const int64_t block = block_.rows.size();
    return {alike.first + 1,
            alike.count - 1,
            {alike.all.begin + block, alike.all.end + block},
            {alike.window.begin + block, alike.window.end + block}};
  }

  // Adds `count` blocks, of which each lies so many rows and columns of elements behind the last.
  absl::Status Add(const Alike& band, const Alike& block, int64_t count, int64_t rows,
                   int64_t columns) {
    // In elements of the derived tensor.
    const int64_t row = scales_ ? band.first : band.window.begin;
    const int64_t column = scales_ ? block.first : block.window.begin;
    const int64_t derived_rows = scales_ ? rows / block_.rows.size() : rows;
    const int64_t derived_columns = scales_ ? columns / block_.columns.size() : columns;
    DeriveTask task;
    task.source = move_.held_address +
                  static_cast<uint64_t>(Leading(&held_.box.offset, held_.strides) * held_bytes_ +
                                        (band.all.begin - held_box_.rows.begin) * from_.row +
                                        (block.all.begin - held_box_.columns.begin) * from_.column);
    if (move_.destination != 0) {
      task.destination =
          move_.destination +
          static_cast<uint64_t>(
              Leading(&move_.box->offset, move_.destination_strides) * element_bytes_ +
              (row - box_.rows.begin) * to_.row + (column - box_.columns.begin) * to_.column);
    }
    task.index = static_cast<uint64_t>(Leading(nullptr, index_strides_) + row * index_.row +
                                       column * index_.column);
    task.source_row = from_.row;
    task.source_column = from_.column;
    task.source_block = HasSmallBlocks(derivation_.kind)
                            ? shape_.columns.size() / block_.columns.size()
                            : rows * from_.row + columns * from_.column;
    task.destination_row = to_.row;
    task.destination_column = to_.column;
    task.destination_block = derived_rows * to_.row + derived_columns * to_.column;
    task.index_row = index_.row;
    task.index_block = derived_rows * index_.row + derived_columns * index_.column;
    task.columns = static_cast<uint32_t>(block.all.size());
    task.first_column = static_cast<uint32_t>(block.window.begin - block.all.begin);
    task.window_columns = static_cast<uint32_t>(block.window.size());
    task.rows = static_cast<uint16_t>(band.all.size());
    task.first_row = static_cast<uint16_t>(band.window.begin - band.all.begin);
    task.window_rows = static_cast<uint16_t>(band.window.size());
    task.place = PlaceOf(band.all.begin, block.all.begin);
    task.dtype = static_cast<uint8_t>(derivation_.from.dtype);
    task.role = derivation_.kind == DerivedKind::kCast ? static_cast<uint8_t>(move_.source->dtype)
                                                       : static_cast<uint8_t>(derivation_.role);
    task.element_bytes = static_cast<uint8_t>(element_bytes_);
    task.kind = static_cast<uint8_t>(derivation_.kind);
    task.sum = move_.sum;
    task.proof_sum = move_.proof_sum;
    task.piece = move_.piece;
    const int64_t fit = kTaskElements / (int64_t{task.rows} * task.columns);
    const int64_t step = std::clamp<int64_t>(fit, 1, kMaxDeriveBlocks);
    for (int64_t done = 0; done < count; done += step) {
      if (static_cast<int64_t>(tasks_->size()) >= most_) {
        return Error(absl::StatusCode::kResourceExhausted,
                     "\"{}\" would take more than {} tasks of a device", move_.source->name, most_);
      }
      task.blocks = static_cast<uint16_t>(std::min(step, count - done));
      tasks_->push_back(task);
      task.source += static_cast<uint64_t>(step * task.source_block);
      if (task.destination != 0) {
        task.destination += static_cast<uint64_t>(step * task.destination_block);
      }
      task.index += static_cast<uint64_t>(step * task.index_block);
      task.place = Saturated(int64_t{task.place} + step);
    }
    return absl::OkStatus();
  }

  static uint32_t Saturated(int64_t place) {
    return static_cast<uint32_t>(std::min<int64_t>(place, std::numeric_limits<uint32_t>::max()));
  }

  // The number of the block in which the element is (DeriveTask::place).
  uint32_t PlaceOf(int64_t row, int64_t column) const {
    const Dims& shape = derivation_.from.shape;
    int64_t place = 0;
    for (size_t d = 0; d < shape.size(); ++d) {
      const int64_t at = d + 2 < shape.size() ? at_[d] : d + 1 < shape.size() ? row : column;
      const int64_t block = block_extents_[d];
      place = place * ((shape[d] + block - 1) / block) + at / block;
    }
    return Saturated(place);
  }

  const DeriveMove& move_;
  const HeldPiece& held_;
  const Derivation& derivation_;
  const bool scales_;
  const int64_t most_;
  std::vector<DeriveTask>* const tasks_;
  const Dims block_extents_;
  const Matrix block_;
  const Matrix shape_;  // of derivation_.from
  const Matrix held_box_;
  const Matrix box_;             // of the derived tensor
  const int64_t held_bytes_;     // of an element
  const int64_t element_bytes_;  // of the derived tensor
  const Dims index_strides_;
  const Steps from_;
  const Steps to_;
  const Steps index_;
  Dims at_;  // the leading dimensions' indices
};

}  // namespace

absl::Status AddDeriveTasks(const DeriveMove& move, int64_t most, std::vector<DeriveTask>* tasks) {
  return Cutter(move, most, tasks).Run();
}

Dims ElementAt(const Derivation& derivation, uint32_t place) {
  const Dims& shape = derivation.from.shape;
  const Dims block = BlockOf(derivation);
  Dims element(shape.size(), 0);
  int64_t rest = place;
  for (size_t d = shape.size(); d-- > 0;) {
    const int64_t blocks = (shape[d] + block[d] - 1) / block[d];
    element[d] = rest % blocks * block[d];
    rest /= blocks;
  }
  return element;
}

}  // namespace refitd
