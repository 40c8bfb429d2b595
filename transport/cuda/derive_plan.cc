#include "transport/cuda/derive_plan.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>

#include "transport/base/status.h"
#include "transport/derive/matrices.h"

namespace refitd {
namespace {

using derive::BlocksOf;
using derive::Common;
using derive::ElementsOf;
using derive::LeadingDistance;
using derive::Matrix;
using derive::MatrixOf;
using derive::Range;

// The most elements of a task, unless one block has more.
constexpr int64_t kTaskElements = 256 << 10;

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
        derivation_(*move.source->held->derivation),
        most_(most),
        tasks_(tasks),
        block_(MatrixOf(BlockOf(derivation_))),
        shape_(MatrixOf(derivation_.from.shape)),
        box_(MatrixOf(*move.box)),
        held_bytes_(ElementBytes(derivation_.from.dtype)),
        element_bytes_(ElementBytes(move.source->dtype)),
        strides_(RowMajorStrides(move.source->shape)),
        zero_(move.source->shape.size(), 0),
        to_(StepsOf(move.destination_strides, element_bytes_)),
        index_(StepsOf(strides_, 1)) {
    for (size_t i = 0; i < move.source->held->parts.size(); ++i) {
      const BoundPiece& part = move.source->held->parts[i];
      parts_.push_back({.piece = &part,
                        .address = move.held_addresses[i],
                        .matrix = MatrixOf(part.box),
                        .steps = StepsOf(part.strides, held_bytes_)});
    }
  }

  absl::Status Run() {
    absl::Status status;
    if (ElementCount(*move_.box) == 0) return status;
    derive::ForEachMatrix(*move_.box, [&](const Dims& at) {
      at_ = at;
      status = CutMatrix();
      return status.ok();
    });
    return status;
  }

 private:
  struct Part {
    const BoundPiece* piece = nullptr;
    uint64_t address = 0;
    Matrix matrix;
    Steps steps;
  };

  absl::Status CutMatrix() {
    if (move_.destination != 0) {
      destination_ =
          move_.destination +
          static_cast<uint64_t>(LeadingDistance(at_, move_.box->offset, move_.destination_strides) *
                                element_bytes_);
    }
    first_index_ = LeadingDistance(at_, zero_, strides_);
    if (derivation_.kind == DerivedKind::kCast) return CutCast();
    const bool scales = derivation_.role == DerivedRole::kScales;
    const Range bands = scales ? box_.rows : BlocksOf(box_.rows, block_.rows.size());
    const Range blocks = scales ? box_.columns : BlocksOf(box_.columns, block_.columns.size());
    for (int64_t band = bands.begin; band < bands.end; ++band) {
      for (int64_t block = blocks.begin; block < blocks.end; ++block) {
        const Matrix all = {
            .rows = ElementsOf(band, block_.rows.size(), shape_.rows.end),
            .columns = ElementsOf(block, block_.columns.size(), shape_.columns.end)};
        REFITD_RETURN_IF_ERROR(
            scales ? AddScale(all, {.rows = {band, band + 1}, .columns = {block, block + 1}})
                   : AddValues(all, Common(all, box_)));
      }
    }
    return absl::OkStatus();
  }

  absl::Status CutCast() {
    const int64_t columns = std::min(box_.columns.size(), kTaskElements);
    const int64_t rows = std::min(kMaxDeriveRows, std::max<int64_t>(1, kTaskElements / columns));
    for (int64_t row = box_.rows.begin; row < box_.rows.end; row += rows) {
      for (int64_t column = box_.columns.begin; column < box_.columns.end; column += columns) {
        const Matrix all = {.rows = {row, std::min(row + rows, box_.rows.end)},
                            .columns = {column, std::min(column + columns, box_.columns.end)}};
        REFITD_RETURN_IF_ERROR(AddValues(all, all));
      }
    }
    return absl::OkStatus();
  }

  // Calls add(part, held) for each part of the block, with the part's elements of it.
  template <typename AddPart>
  absl::Status ForParts(const Matrix& block, const AddPart& add) {
    block_tasks_.clear();
    for (const Part& part : parts_) {
      const Matrix held = Common(block, part.matrix);
      if (held.empty() || !HasPlace(*part.piece)) continue;
      if (std::ssize(block_tasks_) == kMaxDeriveParts) {
        return Error(absl::StatusCode::kResourceExhausted,
                     "\"{}\": a block of {} lies in more than {} pieces", move_.source->name,
                     derivation_.from.name, kMaxDeriveParts);
      }
      block_tasks_.push_back(add(part, held));
    }
    return AddBlock(block);
  }

  bool HasPlace(const BoundPiece& part) const {
    for (size_t d = 0; d < at_.size(); ++d) {
      if (at_[d] < part.box.offset[d] || at_[d] >= part.box.offset[d] + part.box.extent[d]) {
        return false;
      }
    }
    return true;
  }

  // Adds the block, of which the values in `window` are stored.
  absl::Status AddValues(const Matrix& block, const Matrix& window) {
    return ForParts(block, [&](const Part& part, const Matrix& held) {
      const Matrix stored = Common(held, window);
      return stored.empty() ? TaskOf(part, held) : TaskOf(part, held, stored, stored);
    });
  }

  // Adds the block, of which the scale is stored: the element `scale`.
  absl::Status AddScale(const Matrix& block, const Matrix& scale) {
    return ForParts(block, [&](const Part& part, const Matrix& held) {
      if (!block_tasks_.empty()) return TaskOf(part, held);
      DeriveTask task = TaskOf(part, held, held, scale);
      task.role = static_cast<uint8_t>(DerivedRole::kScales);
      return task;
    });
  }

  // Adds block_tasks_, the tasks of a block.
  absl::Status AddBlock(const Matrix& block) {
    DeriveTask& first = block_tasks_.front();
    first.parts = static_cast<uint8_t>(block_tasks_.size());
    first.place = PlaceOf(block);
    if (Joined(block)) return absl::OkStatus();
    if (std::ssize(*tasks_) + std::ssize(block_tasks_) > most_) {
      return Error(absl::StatusCode::kResourceExhausted,
                   "\"{}\" would take more than {} tasks of a device", move_.source->name, most_);
    }
    last_ = tasks_->size();
    tasks_->insert(tasks_->end(), block_tasks_.begin(), block_tasks_.end());
    return absl::OkStatus();
  }

  // A part of a block: `held`, of which nothing is stored.
  DeriveTask TaskOf(const Part& part, const Matrix& held) const {
    DeriveTask task;
    task.source =
        part.address +
        static_cast<uint64_t>(LeadingDistance(at_, part.piece->box.offset, part.piece->strides) *
                                  held_bytes_ +
                              (held.rows.begin - part.matrix.rows.begin) * part.steps.row +
                              (held.columns.begin - part.matrix.columns.begin) * part.steps.column);
    task.source_row = part.steps.row;
    task.source_column = part.steps.column;
    task.destination_row = to_.row;
    task.destination_column = to_.column;
    task.index_row = index_.row;
    task.columns = static_cast<uint32_t>(held.columns.size());
    task.rows = static_cast<uint16_t>(held.rows.size());
    task.parts = 0;
    task.dtype = static_cast<uint8_t>(derivation_.from.dtype);
    task.role = derivation_.kind == DerivedKind::kCast ? static_cast<uint8_t>(move_.source->dtype)
                                                       : static_cast<uint8_t>(DerivedRole::kValues);
    task.element_bytes = static_cast<uint8_t>(element_bytes_);
    task.kind = static_cast<uint8_t>(derivation_.kind);
    task.sum = move_.sum;
    task.proof_sum = move_.proof_sum;
    task.piece = move_.piece;
    return task;
  }

  // The same; `window` of it is stored as `derived`, in elements of the derived tensor.
  DeriveTask TaskOf(const Part& part, const Matrix& held, const Matrix& window,
                    const Matrix& derived) const {
    DeriveTask task = TaskOf(part, held);
    if (move_.destination != 0) {
      task.destination =
          destination_ +
          static_cast<uint64_t>((derived.rows.begin - box_.rows.begin) * to_.row +
                                (derived.columns.begin - box_.columns.begin) * to_.column);
    }
    task.index = static_cast<uint64_t>(first_index_ + derived.rows.begin * index_.row +
                                       derived.columns.begin * index_.column);
    task.first_column = static_cast<uint32_t>(window.columns.begin - held.columns.begin);
    task.window_columns = static_cast<uint32_t>(window.columns.size());
    task.first_row = static_cast<uint16_t>(window.rows.begin - held.rows.begin);
    task.window_rows = static_cast<uint16_t>(window.rows.size());
    return task;
  }

  // Adds the block to the tasks before it, if it follows the blocks there at the same distances.
  bool Joined(const Matrix& block) {
    if (derivation_.kind == DerivedKind::kCast || !last_.has_value()) return false;
    const auto last = tasks_->begin() + static_cast<std::ptrdiff_t>(*last_);
    const DeriveTask& first = block_tasks_.front();
    if (last->blocks >= kMaxDeriveBlocks ||
        (last->blocks + 1) * block.rows.size() * block.columns.size() > kTaskElements ||
        first.parts != last->parts || first.place != last->place + last->blocks) {
      return false;
    }
    if (!std::equal(block_tasks_.begin(), block_tasks_.end(), last, Follows)) return false;
    for (size_t i = 0; i < block_tasks_.size(); ++i) {
      DeriveTask& task = last[static_cast<std::ptrdiff_t>(i)];
      if (task.blocks == 1) {
        task.source_block = Step(task, block_tasks_[i], &DeriveTask::source);
        task.destination_block = Step(task, block_tasks_[i], &DeriveTask::destination);
        task.index_block = Step(task, block_tasks_[i], &DeriveTask::index);
      }
      ++task.blocks;
    }
    return true;
  }

  static int64_t Step(const DeriveTask& from, const DeriveTask& to, uint64_t DeriveTask::*field) {
    return static_cast<int64_t>(to.*field - from.*field);
  }

  // Whether the block of `task` has the form of those of `last`, and their distance.
  static bool Follows(const DeriveTask& task, const DeriveTask& last) {
    if (last.rows != task.rows || last.columns != task.columns ||
        last.first_row != task.first_row || last.first_column != task.first_column ||
        last.window_rows != task.window_rows || last.window_columns != task.window_columns) {
      return false;
    }
    return last.blocks == 1 ||
           (Step(last, task, &DeriveTask::source) == last.blocks * last.source_block &&
            Step(last, task, &DeriveTask::destination) == last.blocks * last.destination_block &&
            Step(last, task, &DeriveTask::index) == last.blocks * last.index_block);
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
  const Derivation& derivation_;
  const int64_t most_;
  std::vector<DeriveTask>* const tasks_;
  std::optional<size_t> last_;  // the tasks of the blocks before begin there
  const Matrix block_;
  const Matrix shape_;
  const Matrix box_;
  const int64_t held_bytes_;     // of an element
  const int64_t element_bytes_;  // of the derived tensor
  const Dims strides_;           // of the whole derived tensor
  const Dims zero_;
  const Steps to_;
  const Steps index_;
  std::vector<Part> parts_;
  std::vector<DeriveTask> block_tasks_;
  // Of the matrix that is cut: the leading dimensions' indices, and the first element's place at
  // the destination and in the whole derived tensor.
  Dims at_;
  uint64_t destination_ = 0;
  int64_t first_index_ = 0;
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
