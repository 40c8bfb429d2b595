#include "transport/cuda/derive_plan.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "transport/base/status.h"
#include "transport/derive/matrices.h"

namespace refitd {
namespace {

using derive::Common;
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

// Blocks from `first` on, in one dimension, that are cut and windowed alike.
struct BlockRun {
  int64_t first = 0;
  int64_t count = 0;
  Range all;     // elements of the first block
  Range window;  // those that are derived
};

class Cutter {
 public:
  Cutter(const DeriveMove& move, int64_t most, std::vector<DeriveTask>* tasks)
      : move_(move),
        derivation_(*move.source->held->derivation),
        scales_(derivation_.kind != DerivedKind::kCast && derivation_.role == DerivedRole::kScales),
        most_(most),
        tasks_(tasks),
        block_extents_(BlockOf(derivation_)),
        block_(MatrixOf(block_extents_)),
        shape_(MatrixOf(derivation_.from.shape)),
        box_(MatrixOf(*move.box)),
        held_bytes_(ElementBytes(derivation_.from.dtype)),
        element_bytes_(ElementBytes(move.source->dtype)),
        index_strides_(RowMajorStrides(move.source->shape)),
        zero_(move.source->shape.size(), 0),
        to_(StepsOf(move.destination_strides, element_bytes_)),
        index_(StepsOf(index_strides_, 1)) {
    for (size_t i = 0; i < move.source->held->shards.size(); ++i) {
      const BoundPiece& shard = move.source->held->shards[i];
      shards_.push_back({.piece = &shard,
                         .address = move.held_addresses[i],
                         .box = MatrixOf(shard.box),
                         .steps = StepsOf(shard.strides, held_bytes_)});
    }
  }

  absl::Status Run() {
    absl::Status status;
    if (ElementCount(*move_.box) == 0) return status;
    const Box blocks = ComputedFrom(derivation_, *move_.box);
    const auto whole = std::find_if(shards_.begin(), shards_.end(), [&blocks](const Shard& shard) {
      return Contains(shard.piece->box, blocks);
    });
    if (whole != shards_.end()) shards_ = {*whole};
    const bool by_rows = derivation_.kind == DerivedKind::kCast || HasSmallBlocks(derivation_.kind);
    derive::ForEachMatrix(*move_.box, [&](const Dims& at) {
      at_ = at;
      status = by_rows ? CutRows(shards_.front()) : CutBlocks();
      return status.ok();
    });
    return status;
  }

 private:
  struct Shard {
    const BoundPiece* piece = nullptr;
    uint64_t address = 0;
    Matrix box;
    Steps steps;
  };

  absl::Status CutBlocks() {
    const std::vector<BlockRun> bands = Split(
        RunsIn(box_.rows, block_.rows.size(), shape_.rows.end), block_.rows.size(), &Matrix::rows);
    const std::vector<BlockRun> blocks =
        Split(RunsIn(box_.columns, block_.columns.size(), shape_.columns.end),
              block_.columns.size(), &Matrix::columns);
    // Rows of a matrix that has one block a row are joined; else the blocks of a row.
    const bool joins_rows = block_.columns.size() >= shape_.columns.end;
    for (BlockRun band : bands) {
      std::vector<const Shard*> shards;
      for (const Shard& shard : shards_) {
        if (HasMatrix(*shard.piece) && !Common(shard.box.rows, band.all).empty()) {
          shards.push_back(&shard);
        }
      }
      if (joins_rows) {
        REFITD_RETURN_IF_ERROR(
            Add(shards, band, blocks.front(), band.count, block_.rows.size(), 0));
        continue;
      }
      for (; band.count > 0; band = After(band, 1, block_.rows.size())) {
        for (const BlockRun& block : blocks) {
          REFITD_RETURN_IF_ERROR(Add(shards, band, block, block.count, 0, block_.columns.size()));
        }
      }
    }
    return absl::OkStatus();
  }

  // Ends runs where a shard begins or ends, so that all blocks of a run are cut alike.
  std::vector<BlockRun> Split(const std::vector<BlockRun>& runs, int64_t block,
                              Range Matrix::*dimension) const {
    std::vector<int64_t> ends;  // numbers of the blocks after them
    for (const Shard& shard : shards_) {
      const Range range = shard.box.*dimension;
      for (const int64_t edge : {range.begin, range.end}) {
        ends.push_back(edge / block);
        ends.push_back((edge + block - 1) / block);
      }
    }
    std::sort(ends.begin(), ends.end());
    std::vector<BlockRun> split;
    for (BlockRun run : runs) {
      for (const int64_t end : ends) {
        if (end <= run.first || end >= run.first + run.count) continue;
        split.push_back(run);
        split.back().count = end - run.first;
        run = After(run, split.back().count, block);
      }
      split.push_back(run);
    }
    return split;
  }

  // Cuts casts, and kinds with small blocks, into bands of whole rows of the box, or pieces of one
  // row.
  absl::Status CutRows(const Shard& shard) {
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
        REFITD_RETURN_IF_ERROR(Add({&shard}, {row, 1, all_rows, all_rows},
                                   {column / unit, 1, blocks, window}, 1, 0, 0));
        column = end;
      }
    }
    return absl::OkStatus();
  }

  // Returns the blocks that meet `range`, whose ends are numbers of blocks where scales are
  // derived, else of elements. `end`: of the tensor. Only the first and the last block may differ
  // from the others.
  std::vector<BlockRun> RunsIn(Range range, int64_t block, int64_t end) const {
    std::vector<BlockRun> found;
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

  // The blocks, of `block` elements each, after the first `count`.
  static BlockRun After(const BlockRun& run, int64_t count, int64_t block) {
    const int64_t step = count * block;
    return {run.first + count,
            run.count - count,
            {run.all.begin + step, run.all.end + step},
            {run.window.begin + step, run.window.end + step}};
  }

  // Makes the task of the first block. `rows` and `columns` are the distance from a block to the
  // next, in elements of the source.
  DeriveTask TaskOf(const Shard& shard, const BlockRun& band, const BlockRun& block, int64_t rows,
                    int64_t columns) const {
    // In elements of the derived tensor.
    const int64_t row = scales_ ? band.first : band.window.begin;
    const int64_t column = scales_ ? block.first : block.window.begin;
    const int64_t derived_rows = scales_ ? rows / block_.rows.size() : rows;
    const int64_t derived_columns = scales_ ? columns / block_.columns.size() : columns;
    DeriveTask task;
    task.source =
        shard.address +
        static_cast<uint64_t>(ElementDistance(at_, shard.piece->box.offset, shard.piece->strides) *
                                  held_bytes_ +
                              (band.all.begin - shard.box.rows.begin) * shard.steps.row +
                              (block.all.begin - shard.box.columns.begin) * shard.steps.column);
    if (move_.destination != 0) {
      task.destination =
          move_.destination +
          static_cast<uint64_t>(
              ElementDistance(at_, move_.box->offset, move_.destination_strides) * element_bytes_ +
              (row - box_.rows.begin) * to_.row + (column - box_.columns.begin) * to_.column);
    }
    task.index = static_cast<uint64_t>(ElementDistance(at_, zero_, index_strides_) +
                                       row * index_.row + column * index_.column);
    task.source_row = shard.steps.row;
    task.source_column = shard.steps.column;
    task.source_block = HasSmallBlocks(derivation_.kind)
                            ? shape_.columns.size() / block_.columns.size()
                            : rows * shard.steps.row + columns * shard.steps.column;
    task.destination_row = to_.row;
    task.destination_column = to_.column;
    if (move_.destination != 0) {
      task.destination_block = derived_rows * to_.row + derived_columns * to_.column;
    }
    task.index_row = index_.row;
    task.index_block = derived_rows * index_.row + derived_columns * index_.column;
    task.columns = static_cast<uint32_t>(block.all.size());
    task.first_column = static_cast<uint32_t>(block.window.begin - block.all.begin);
    task.window_columns = static_cast<uint32_t>(block.window.size());
    task.rows = static_cast<uint16_t>(band.all.size());
    task.first_row = static_cast<uint16_t>(band.window.begin - band.all.begin);
    task.window_rows = static_cast<uint16_t>(band.window.size());
    task.dtype = static_cast<uint8_t>(derivation_.from.dtype);
    task.role = derivation_.kind == DerivedKind::kCast ? static_cast<uint8_t>(move_.source->dtype)
                                                       : static_cast<uint8_t>(derivation_.role);
    task.element_bytes = static_cast<uint8_t>(element_bytes_);
    task.kind = static_cast<uint8_t>(derivation_.kind);
    task.sum = move_.sum;
    task.proof_sum = move_.proof_sum;
    task.piece = move_.piece;
    return task;
  }

  // Adds `count` blocks from the first of both runs on, with a task for each of the shards that has
  // elements of them. From a block to the next it is `rows` and `columns` elements of the source.
  absl::Status Add(const std::vector<const Shard*>& shards, const BlockRun& band,
                   const BlockRun& block, int64_t count, int64_t rows, int64_t columns) {
    std::vector<DeriveTask>& tasks = block_tasks_;
    tasks.clear();
    for (const Shard* shard : shards) {
      const Matrix held = Common(shard->box, {.rows = band.all, .columns = block.all});
      if (held.empty()) continue;
      if (std::ssize(tasks) == kMaxDeriveParts) {
        return Error(absl::StatusCode::kResourceExhausted,
                     "\"{}\": a block of {} lies in more than {} pieces", move_.source->name,
                     derivation_.from.name, kMaxDeriveParts);
      }
      tasks.push_back(PartOf(*shard, held, band, block, rows, columns, tasks.empty()));
    }
    if (tasks.empty()) {
      return Error(absl::StatusCode::kInternal, "\"{}\": no shard has a block of {}",
                   move_.source->name, derivation_.from.name);
    }
    tasks.front().parts = static_cast<uint8_t>(tasks.size());
    const int64_t fit = kTaskElements / (band.all.size() * block.all.size());
    const int64_t step = std::clamp<int64_t>(fit, 1, kMaxDeriveBlocks);
    for (int64_t done = 0; done < count; done += step) {
      REFITD_RETURN_IF_ERROR(CheckRoom(std::ssize(tasks)));
      for (DeriveTask& task : tasks) {
        task.blocks = static_cast<uint16_t>(std::min(step, count - done));
        tasks_->push_back(task);
        task.source += static_cast<uint64_t>(step * task.source_block);
        task.destination += static_cast<uint64_t>(step * task.destination_block);
        task.index += static_cast<uint64_t>(step * task.index_block);
        task.place = Saturated(int64_t{task.place} + step);
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckRoom(int64_t tasks) const {
    if (std::ssize(*tasks_) + tasks <= most_) return absl::OkStatus();
    return Error(absl::StatusCode::kResourceExhausted,
                 "\"{}\" would take more than {} tasks of a device", move_.source->name, most_);
  }

  // Whether the shard has elements of the matrix that is cut.
  bool HasMatrix(const BoundPiece& shard) const {
    for (size_t d = 0; d < at_.size(); ++d) {
      if (at_[d] < shard.box.offset[d] || at_[d] >= shard.box.offset[d] + shard.box.extent[d]) {
        return false;
      }
    }
    return true;
  }

  // The task for the elements `held` of the first block. `first`: it is the first task of the
  // block.
  DeriveTask PartOf(const Shard& shard, const Matrix& held, const BlockRun& band,
                    const BlockRun& block, int64_t rows, int64_t columns, bool first) const {
    const Matrix all = {.rows = band.window, .columns = block.window};
    const Matrix stored = Common(held, all);
    // A block has one scale, which its first task stores.
    const bool stores = scales_ ? first : !stored.empty();
    // Where the task stores no window, the window is what the task reads, so that its columns are
    // as aligned as these.
    const Matrix window = HasSmallBlocks(derivation_.kind) ? all
                          : scales_ || !stores             ? held
                                                           : stored;
    DeriveTask task = TaskOf(shard, {band.first, 1, held.rows, window.rows},
                             {block.first, 1, held.columns, window.columns}, rows, columns);
    task.place = PlaceOf(band.all.begin, block.all.begin);
    task.parts = 0;
    if (!stores) StoreNothing(&task);
    return task;
  }

  // Leaves a part of a quantised block to the search for the block's maximum. The kernel stores all
  // parts of the block alike: a part of scales would store the scale again, so the part becomes one
  // of values, which are FP8 of one byte, with a window without rows. The window keeps its columns,
  // by which the kernel divides. Addresses and distances that nothing is stored at are 0, which is
  // aligned: one unaligned part would take the fast loads from all parts (IsWhole).
  static void StoreNothing(DeriveTask* task) {
    task->role = static_cast<uint8_t>(DerivedRole::kValues);
    task->element_bytes = 1;
    task->window_rows = 0;
    task->destination = task->index = 0;
    task->destination_row = task->destination_column = task->destination_block = 0;
    task->index_row = task->index_block = 0;
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
  const Derivation& derivation_;
  const bool scales_;
  const int64_t most_;
  std::vector<DeriveTask>* const tasks_;
  const Dims block_extents_;
  const Matrix block_;
  const Matrix shape_;           // of derivation_.from
  const Matrix box_;             // of the derived tensor
  const int64_t held_bytes_;     // of an element
  const int64_t element_bytes_;  // of the derived tensor
  const Dims index_strides_;
  const Dims zero_;
  const Steps to_;
  const Steps index_;
  std::vector<Shard> shards_;
  Dims at_;                              // the leading dimensions' indices
  std::vector<DeriveTask> block_tasks_;  // of the blocks that are added
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
