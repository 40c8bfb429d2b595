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

class Cutter {
 public:
  Cutter(const DeriveMove& move, int64_t most, std::vector<DeriveTask>* tasks)
      : move_(move),
        held_(*move.source->held),
        derivation_(*held_.derivation),
        most_(most),
        tasks_(tasks),
        begin_(tasks->size()),
        block_(MatrixOf(BlockOf(derivation_))),
        held_bytes_(ElementBytes(derivation_.from.dtype)),
        element_bytes_(ElementBytes(move.source->dtype)),
        from_(StepsOf(held_.strides, held_bytes_)),
        to_(StepsOf(move.destination_strides, element_bytes_)),
        index_(StepsOf(RowMajorStrides(move.source->shape), 1)) {}

  absl::Status Run() {
    const Box& box = *move_.box;
    if (ElementCount(box) == 0) return absl::OkStatus();
    const size_t leading = box.offset.size() - std::min<size_t>(box.offset.size(), 2);
    at_ = box.offset;
    while (true) {
      REFITD_RETURN_IF_ERROR(CutMatrix(MatrixOf(box)));
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
  int64_t Leading(const Dims& from, const Dims& strides) const {
    int64_t sum = 0;
    for (size_t d = 0; d + 2 < at_.size(); ++d) sum += (at_[d] - from[d]) * strides[d];
    return sum;
  }

  absl::Status CutMatrix(const Matrix& box) {
    if (derivation_.kind == DerivedKind::kCast) return CutCast(box);
    const bool scales = derivation_.role == DerivedRole::kScales;
    const Range bands = scales ? box.rows : BlocksOf(box.rows, block_.rows.size());
    const Range blocks = scales ? box.columns : BlocksOf(box.columns, block_.columns.size());
    const Matrix shape = MatrixOf(derivation_.from.shape);
    for (int64_t band = bands.begin; band < bands.end; ++band) {
      for (int64_t block = blocks.begin; block < blocks.end; ++block) {
        const Matrix all = {.rows = Part(band, block_.rows.size(), shape.rows.end),
                            .columns = Part(block, block_.columns.size(), shape.columns.end)};
        const Matrix window = {.rows = Common(all.rows, box.rows),
                               .columns = Common(all.columns, box.columns)};
        REFITD_RETURN_IF_ERROR(scales ? Add(all,
                                            {{all.rows.begin, all.rows.begin + 1},
                                             {all.columns.begin, all.columns.begin + 1}},
                                            {{band, band + 1}, {block, block + 1}})
                                      : Add(all, window, window));
      }
    }
    return absl::OkStatus();
  }

  absl::Status CutCast(const Matrix& box) {
    const int64_t columns = std::min(box.columns.size(), kTaskElements);
    const int64_t rows = std::min(kMaxDeriveRows, std::max<int64_t>(1, kTaskElements / columns));
    for (int64_t row = box.rows.begin; row < box.rows.end; row += rows) {
      for (int64_t column = box.columns.begin; column < box.columns.end; column += columns) {
        const Matrix all = {.rows = {row, std::min(row + rows, box.rows.end)},
                            .columns = {column, std::min(column + columns, box.columns.end)}};
        REFITD_RETURN_IF_ERROR(Add(all, all, all));
      }
    }
    return absl::OkStatus();
  }

  static Range BlocksOf(Range elements, int64_t block) {
    return {elements.begin / block, (elements.end + block - 1) / block};
  }
  static Range Part(int64_t number, int64_t block, int64_t end) {
    return {number * block, std::min((number + 1) * block, end)};
  }
  static Range Common(Range a, Range b) {
    return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
  }

  // Adds the block `all`, of which `window` is stored as `derived`, in elements of the derived
  // tensor.
  absl::Status Add(const Matrix& all, const Matrix& window, const Matrix& derived) {
    const Matrix held = MatrixOf(held_.box);
    const Matrix box = MatrixOf(*move_.box);
    DeriveTask task;
    task.source = move_.held_address +
                  static_cast<uint64_t>(Leading(held_.box.offset, held_.strides) * held_bytes_ +
                                        (all.rows.begin - held.rows.begin) * from_.row +
                                        (all.columns.begin - held.columns.begin) * from_.column);
    if (move_.destination != 0) {
      task.destination =
          move_.destination +
          static_cast<uint64_t>(Leading(move_.box->offset, move_.destination_strides) *
                                    element_bytes_ +
                                (derived.rows.begin - box.rows.begin) * to_.row +
                                (derived.columns.begin - box.columns.begin) * to_.column);
    }
    const Dims zero(at_.size(), 0);
    task.index = static_cast<uint64_t>(Leading(zero, RowMajorStrides(move_.source->shape)) +
                                       derived.rows.begin * index_.row +
                                       derived.columns.begin * index_.column);
    task.source_row = from_.row;
    task.source_column = from_.column;
    task.destination_row = to_.row;
    task.destination_column = to_.column;
    task.index_row = index_.row;
    task.columns = static_cast<uint32_t>(all.columns.size());
    task.first_column = static_cast<uint32_t>(window.columns.begin - all.columns.begin);
    task.window_columns = static_cast<uint32_t>(window.columns.size());
    task.rows = static_cast<uint16_t>(all.rows.size());
    task.first_row = static_cast<uint16_t>(window.rows.begin - all.rows.begin);
    task.window_rows = static_cast<uint16_t>(window.rows.size());
    task.place = PlaceOf(all);
    task.dtype = static_cast<uint8_t>(derivation_.from.dtype);
    task.role = derivation_.kind == DerivedKind::kCast ? static_cast<uint8_t>(move_.source->dtype)
                                                       : static_cast<uint8_t>(derivation_.role);
    task.element_bytes = static_cast<uint8_t>(element_bytes_);
    task.kind = static_cast<uint8_t>(derivation_.kind);
    task.sum = move_.sum;
    task.proof_sum = move_.proof_sum;
    task.piece = move_.piece;
    if (Joined(task)) return absl::OkStatus();
    if (static_cast<int64_t>(tasks_->size()) >= most_) {
      return Error(absl::StatusCode::kResourceExhausted,
                   "\"{}\" would take more than {} tasks of a device", move_.source->name, most_);
    }
    tasks_->push_back(task);
    return absl::OkStatus();
  }

  // Adds the block to the task before it, if it follows the blocks there at the same distances.
  bool Joined(const DeriveTask& task) {
    if (derivation_.kind == DerivedKind::kCast || tasks_->size() == begin_) return false;
    DeriveTask& last = tasks_->back();
    const auto elements = int64_t{last.blocks + 1} * last.rows * last.columns;
    if (last.blocks >= kMaxDeriveBlocks || elements > kTaskElements || last.rows != task.rows ||
        last.columns != task.columns || last.first_row != task.first_row ||
        last.first_column != task.first_column || last.window_rows != task.window_rows ||
        last.window_columns != task.window_columns || task.place != last.place + last.blocks) {
      return false;
    }
    const auto step = [&](uint64_t DeriveTask::*field) {
      return static_cast<int64_t>(task.*field - last.*field);
    };
    const int64_t source = step(&DeriveTask::source);
    const int64_t destination = step(&DeriveTask::destination);
    const int64_t index = step(&DeriveTask::index);
    if (last.blocks == 1) {
      last.source_block = source;
      last.destination_block = destination;
      last.index_block = index;
    } else if (source != last.blocks * last.source_block ||
               destination != last.blocks * last.destination_block ||
               index != last.blocks * last.index_block) {
      return false;
    }
    ++last.blocks;
    return true;
  }

  uint32_t PlaceOf(const Matrix& all) const {
    const Dims& shape = derivation_.from.shape;
    const Dims block = BlockOf(derivation_);
    int64_t place = 0;
    for (size_t d = 0; d < shape.size(); ++d) {
      const int64_t at = d + 2 < shape.size()   ? at_[d]
                         : d + 1 < shape.size() ? all.rows.begin
                                                : all.columns.begin;
      place = place * ((shape[d] + block[d] - 1) / block[d]) + at / block[d];
    }
    return static_cast<uint32_t>(std::min<int64_t>(place, std::numeric_limits<uint32_t>::max()));
  }

  const DeriveMove& move_;
  const HeldPiece& held_;
  const Derivation& derivation_;
  const int64_t most_;
  std::vector<DeriveTask>* const tasks_;
  const size_t begin_;  // of the move's tasks
  const Matrix block_;
  const int64_t held_bytes_;     // of an element
  const int64_t element_bytes_;  // of the derived tensor
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
