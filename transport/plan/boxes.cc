#include "transport/plan/boxes.h"

#include <iterator>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

namespace refitd {
namespace {

// Whether `b` continues `a` along dimension `d`.
bool Continues(const Box& a, const Box& b, size_t d) {
  for (size_t e = 0; e < a.offset.size(); ++e) {
    if (e == d) {
      if (a.offset[e] + a.extent[e] != b.offset[e]) return false;
    } else if (a.offset[e] != b.offset[e] || a.extent[e] != b.extent[e]) {
      return false;
    }
  }
  return true;
}

// Orders boxes by all dimensions but `d`, then by the offset in `d`, so that boxes that continue
// each other are neighbours.
bool LineLess(const Box& a, const Box& b, size_t d) {
  for (size_t e = 0; e < a.offset.size(); ++e) {
    if (e == d) continue;
    if (a.offset[e] != b.offset[e]) return a.offset[e] < b.offset[e];
    if (a.extent[e] != b.extent[e]) return a.extent[e] < b.extent[e];
  }
  return a.offset[d] < b.offset[d];
}

// Joins neighbours in the vector that continue each other along `d`; returns whether it joined any.
bool MergeNeighbours(std::vector<Box>* boxes, size_t d) {
  size_t kept = 0;
  for (size_t i = 1; i < boxes->size(); ++i) {
    Box& last = (*boxes)[kept];
    if (Continues(last, (*boxes)[i], d)) {
      last.extent[d] += (*boxes)[i].extent[d];
    } else if (++kept != i) {
      (*boxes)[kept] = std::move((*boxes)[i]);
    }
  }
  const bool merged = kept + 1 < boxes->size();
  boxes->resize(kept + 1);
  return merged;
}

void AddHolders(absl::Span<const uint32_t> holders, OwnedBox* box) {
  for (const uint32_t holder : holders) {
    const auto at = std::lower_bound(box->holders.begin(), box->holders.end(), holder);
    if (at == box->holders.end() || *at != holder) box->holders.insert(at, holder);
  }
}

// Two boxes that meet count as this number of comparisons, because each of them is cut along the
// other. They are counted when they are found, so that a layout with too many such pairs is refused
// before the first cut.
constexpr int64_t kMeetingSteps = 64;

// Joins equal boxes into one that has all their holders. `boxes` must not be empty.
void JoinEqual(std::vector<OwnedBox>* boxes) {
  std::sort(boxes->begin(), boxes->end(), [](const OwnedBox& a, const OwnedBox& b) {
    return std::tie(a.box.offset, a.box.extent, a.holders) <
           std::tie(b.box.offset, b.box.extent, b.holders);
  });
  size_t kept = 0;
  for (size_t i = 1; i < boxes->size(); ++i) {
    if ((*boxes)[i].box == (*boxes)[kept].box) {
      AddHolders((*boxes)[i].holders, &(*boxes)[kept]);
    } else if (++kept != i) {
      (*boxes)[kept] = std::move((*boxes)[i]);
    }
  }
  boxes->resize(kept + 1);
}

// Cuts `boxes` along `by`, and adds the holders of `by` to the parts inside `by`.
void CutBy(const OwnedBox& by, std::vector<OwnedBox>* boxes, PlanWork* work) {
  std::vector<OwnedBox> cut;
  cut.reserve(boxes->size());
  *work += kCutSteps * static_cast<int64_t>(boxes->size());
  for (OwnedBox& held : *boxes) {
    std::optional<Box> common = Intersect(held.box, by.box);
    if (!common.has_value()) {
      cut.push_back(std::move(held));
      continue;
    }
    std::vector<Box> outside;
    Subtract(held.box, *common, &outside);
    for (Box& box : outside) cut.push_back({std::move(box), held.holders});
    OwnedBox both{*std::move(common), std::move(held.holders)};
    AddHolders(by.holders, &both);
    cut.push_back(std::move(both));
  }
  *boxes = std::move(cut);
}

}  // namespace

bool BoxLess(const Box& a, const Box& b) {
  return std::tie(a.offset, a.extent) < std::tie(b.offset, b.extent);
}

bool IsEmpty(const Box& box) {
  return std::any_of(box.extent.begin(), box.extent.end(), [](int64_t n) { return n == 0; });
}

void Subtract(const Box& box, const Box& hole, std::vector<Box>* parts) {
  const std::optional<Box> common = Intersect(box, hole);
  if (!common.has_value()) {
    parts->push_back(box);
    return;
  }
  Box rest = box;
  for (size_t d = 0; d < box.offset.size(); ++d) {
    const int64_t begin = common->offset[d];
    const int64_t end = begin + common->extent[d];
    if (rest.offset[d] < begin) {
      parts->push_back(rest);
      parts->back().extent[d] = begin - rest.offset[d];
    }
    if (end < rest.offset[d] + rest.extent[d]) {
      parts->push_back(rest);
      parts->back().offset[d] = end;
      parts->back().extent[d] = rest.offset[d] + rest.extent[d] - end;
    }
    rest.offset[d] = begin;
    rest.extent[d] = common->extent[d];
  }
}

std::vector<Box> MakeDisjoint(std::vector<Box> boxes, PlanWork* work) {
  std::sort(boxes.begin(), boxes.end(), BoxLess);
  boxes.erase(std::unique(boxes.begin(), boxes.end()), boxes.end());
  if (boxes.size() <= 1) return boxes;
  std::vector<const Box*> pointers;
  pointers.reserve(boxes.size());
  for (const Box& box : boxes) pointers.push_back(&box);
  const BoxIndex index(pointers);
  std::vector<Box> disjoint;
  std::vector<uint32_t> earlier;
  for (uint32_t i = 0; i < boxes.size() && !work->Over(); ++i) {
    earlier.clear();
    *work += index.Query(boxes[i], [&](uint32_t other) {
      if (other < i && Meet(boxes[i], boxes[other])) earlier.push_back(other);
    });
    if (earlier.empty()) {
      disjoint.push_back(boxes[i]);
      continue;
    }
    std::vector<Box> parts = {boxes[i]};
    for (const uint32_t other : earlier) {
      std::vector<Box> rest;
      for (const Box& part : parts) Subtract(part, boxes[other], &rest);
      *work += kCutSteps * static_cast<int64_t>(parts.size());
      parts = std::move(rest);
      if (work->Over()) break;
    }
    disjoint.insert(disjoint.end(), parts.begin(), parts.end());
  }
  return disjoint;
}

void MergeAdjacent(std::vector<Box>* boxes) {
  if (boxes->size() <= 1) return;
  const size_t rank = boxes->front().offset.size();
  // Most often the boxes are slices along one dimension, in order, which need no sorting.
  for (size_t d = 0; d < rank; ++d) {
    if (!Continues((*boxes)[0], (*boxes)[1], d)) continue;
    MergeNeighbours(boxes, d);
    break;
  }
  for (bool merged = boxes->size() > 1; merged;) {
    merged = false;
    for (size_t d = 0; d < rank; ++d) {
      std::sort(boxes->begin(), boxes->end(),
                [d](const Box& a, const Box& b) { return LineLess(a, b, d); });
      merged |= MergeNeighbours(boxes, d);
    }
  }
  std::sort(boxes->begin(), boxes->end(), BoxLess);
}

// Cuts boxes that meet until no two meet, bigger boxes first.
void CutByHolders(std::vector<OwnedBox>* held, PlanWork* work) {
  if (held->size() <= 1) return;
  JoinEqual(held);
  std::stable_sort(held->begin(), held->end(), [](const OwnedBox& a, const OwnedBox& b) {
    return ElementCount(a.box) > ElementCount(b.box);
  });
  std::vector<const Box*> boxes;
  boxes.reserve(held->size());
  for (const OwnedBox& one : *held) boxes.push_back(&one.box);
  const BoxIndex index(boxes);
  std::vector<std::vector<uint32_t>> meeting(held->size());  // earlier boxes that meet each box
  bool any = false;
  for (uint32_t i = 0; i < held->size() && !work->Over(); ++i) {
    *work += index.Query((*held)[i].box, [&](uint32_t other) {
      if (other < i && Meet((*held)[i].box, (*held)[other].box)) {
        meeting[i].push_back(other);
      }
    });
    *work += kMeetingSteps * static_cast<int64_t>(meeting[i].size());
    std::sort(meeting[i].begin(), meeting[i].end());
    any = any || !meeting[i].empty();
  }
  if (!any || work->Over()) return;
  // The parts of each box that no earlier box has.
  std::vector<std::vector<OwnedBox>> cut(held->size());
  for (uint32_t i = 0; i < held->size(); ++i) {
    std::vector<Box> rest = {(*held)[i].box};
    for (const uint32_t earlier : meeting[i]) {
      CutBy((*held)[i], &cut[earlier], work);
      std::vector<Box> outside;
      for (const Box& box : rest) Subtract(box, (*held)[earlier].box, &outside);
      *work += kCutSteps * static_cast<int64_t>(rest.size());
      rest = std::move(outside);
      if (work->Over()) return;
    }
    for (Box& box : rest) cut[i].push_back({std::move(box), (*held)[i].holders});
  }
  held->clear();
  for (std::vector<OwnedBox>& some : cut) {
    std::move(some.begin(), some.end(), std::back_inserter(*held));
  }
}

int64_t ByteOffset(const Piece& piece, const Box& box, int64_t element_bytes) {
  return piece.byte_offset +
         ElementDistance(box.offset, piece.box.offset, piece.strides) * element_bytes;
}

int64_t WaterLevel(std::vector<int64_t> loads, int64_t amount) {
  std::sort(loads.begin(), loads.end());
  int64_t level = 0;
  int64_t sum = amount;
  for (size_t n = 1; n <= loads.size(); ++n) {
    sum += loads[n - 1];
    level = sum / static_cast<int64_t>(n);
    if (n < loads.size() && level <= loads[n]) break;
  }
  return level;
}

BoxIndex::BoxIndex(absl::Span<const Box* const> boxes) : boxes_(boxes) {
  if (boxes.size() <= kLinearBoxes || boxes.front()->offset.empty()) return;
  ChooseDimension();
  order_.resize(boxes.size());
  std::iota(order_.begin(), order_.end(), 0U);
  std::sort(order_.begin(), order_.end(), [this](uint32_t a, uint32_t b) {
    return std::pair(boxes_[a]->offset[dim_], a) < std::pair(boxes_[b]->offset[dim_], b);
  });
  int64_t reach = 0;
  for (const uint32_t i : order_) {
    reach = std::max(reach, boxes_[i]->offset[dim_] + boxes_[i]->extent[dim_]);
    reach_.push_back(reach);
  }
}

// Chooses the dimension with the most distinct offsets, in which fewest boxes meet.
void BoxIndex::ChooseDimension() {
  size_t most = 0;
  std::vector<int64_t> offsets(boxes_.size());
  for (size_t d = 0; d < boxes_.front()->offset.size(); ++d) {
    for (size_t i = 0; i < boxes_.size(); ++i) offsets[i] = boxes_[i]->offset[d];
    std::sort(offsets.begin(), offsets.end());
    const auto distinct =
        static_cast<size_t>(std::unique(offsets.begin(), offsets.end()) - offsets.begin());
    if (distinct <= most) continue;
    most = distinct;
    dim_ = d;
  }
}

}  // namespace refitd
