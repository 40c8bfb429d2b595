#include "daemon/group/tensor_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/string_view.h"
#include "transport/plan/derived.h"

namespace refitd::group {
namespace {

// How many unused lists are removed when a list is added: more than one, so that the table shrinks.
constexpr int kRemovedAtOnce = 2;

absl::string_view Key(std::string_view name) { return {name.data(), name.size()}; }
std::string_view View(absl::string_view name) { return {name.data(), name.size()}; }

const std::string& NameOfTensor(const TensorSpec& tensor) { return tensor.name; }

// Lets the set refer to another copy of a name that it may have.
void Move(std::set<std::string_view>* names, std::string_view to) {
  if (names->erase(to) > 0) names->insert(to);
}

}  // namespace

int64_t MemoryOf(const Manifest& manifest) {
  size_t bytes = 0;
  for (const TensorSpec& tensor : manifest) {
    bytes += sizeof(tensor) + tensor.name.capacity() + tensor.shape.capacity() * sizeof(int64_t);
  }
  return static_cast<int64_t>(bytes);
}

TensorTable::TensorTable(const std::vector<std::string>& engine_only,
                         std::vector<std::string> unwanted)
    : unwanted_(std::move(unwanted)) {
  for (const std::string& name : engine_only) {
    if (IsPattern(name)) {
      engine_only_patterns_.push_back(name);
    } else {
      engine_only_.insert(name);
    }
  }
}

bool TensorTable::engine_only(std::string_view name) const {
  return (!engine_only_.empty() && engine_only_.contains(Key(name))) ||
         (!engine_only_patterns_.empty() && MatchesAny(engine_only_patterns_, name));
}

std::vector<std::string> TensorTable::EngineOnlyNames() const {
  std::vector<std::string> names(engine_only_.begin(), engine_only_.end());
  for (const std::string& name : matched_) {
    if (!engine_only_.contains(name)) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

const TensorTable::Uses* TensorTable::Find(std::string_view name) const {
  const auto it = tensors_.find(Key(name));
  return it == tensors_.end() ? nullptr : &it->second;
}

const TensorTable::Uses* TensorTable::FindDerived(std::string_view source) const {
  if (derived_.empty()) return nullptr;  // as in most groups, whose pushes pay for no hash
  const auto it = derived_.find(Key(source));
  return it == derived_.end() ? nullptr : &it->second;
}

const TensorSpec& TensorTable::spec(const Use& use) const {
  return lists_[use.list].tensors()[use.tensor];
}

absl::Span<const uint32_t> TensorTable::PiecesOf(const Use& use) const {
  const List& list = lists_[use.list];
  if (list.layout == nullptr) return {};
  const uint32_t begin = list.first_piece[use.tensor];
  return absl::MakeSpan(list.pieces).subspan(begin, list.first_piece[use.tensor + 1] - begin);
}

TensorTable::ListId TensorTable::Add(const std::shared_ptr<const Layout>& layout) {
  if (const auto known = ids_.find(layout.get()); known != ids_.end()) return known->second;
  List list;
  list.layout = layout;
  SortPieces(&list);
  return AddList(layout.get(), std::move(list));
}

TensorTable::ListId TensorTable::Add(const std::shared_ptr<const Manifest>& manifest) {
  if (const auto known = ids_.find(manifest.get()); known != ids_.end()) return known->second;
  List list;
  list.manifest = manifest;
  for (const TensorSpec& tensor : *manifest) {
    const Dims& shape = tensor.shape;
    list.wanted.push_back(std::find(shape.begin(), shape.end(), 0) == shape.end());
  }
  return AddList(manifest.get(), std::move(list));
}

std::shared_ptr<const Manifest> TensorTable::Shared(Manifest manifest) const {
  for (const List& list : lists_) {
    if (list.manifest != nullptr && *list.manifest == manifest) return list.manifest;
  }
  return std::make_shared<const Manifest>(std::move(manifest));
}

void TensorTable::SortPieces(List* list) const {
  const Layout& layout = *list->layout;
  list->first_piece.resize(layout.tensors.size() + 1);
  list->wanted.resize(layout.tensors.size());
  for (const Piece& piece : layout.pieces) ++list->first_piece[piece.tensor + 1];
  for (size_t t = 0; t < layout.tensors.size(); ++t) {
    list->first_piece[t + 1] += list->first_piece[t];
  }
  std::vector<uint32_t> next(list->first_piece.begin(), list->first_piece.end() - 1);
  list->pieces.resize(layout.pieces.size());
  for (uint32_t p = 0; p < layout.pieces.size(); ++p) {
    const Piece& piece = layout.pieces[p];
    list->pieces[next[piece.tensor]++] = p;
    const int64_t elements = ElementCount(piece.box);
    if (elements > 0) list->wanted[piece.tensor] = true;
    const TensorSpec& tensor = layout.tensors[piece.tensor];
    if (!engine_only(tensor.name)) list->bytes += elements * ElementBytes(tensor.dtype);
  }
}

TensorTable::ListId TensorTable::AddList(const void* key, List list) {
  RemoveUnused();
  const auto free =
      std::find_if(lists_.begin(), lists_.end(), [](const List& l) { return l.free(); });
  const auto id = static_cast<ListId>(free - lists_.begin());
  if (free == lists_.end()) lists_.emplace_back();
  lists_[id] = std::move(list);
  ids_[key] = id;
  const std::vector<TensorSpec>& tensors = lists_[id].tensors();
  if (tensors_.empty()) tensors_.reserve(tensors.size());
  looked_up_ += static_cast<int64_t>(tensors.size());
  for (uint32_t t = 0; t < tensors.size(); ++t) {
    const auto entry = tensors_.try_emplace(Key(tensors[t].name)).first;
    Uses& uses = entry->second;
    if (!uses.empty()) {
      if (spec(uses.front()) != tensors[t]) mixed_.insert(View(entry->first));
    }
    if (!lists_[id].wanted[t]) partly_unwanted_.insert(View(entry->first));
    if (uses.empty() && MatchesAny(engine_only_patterns_, tensors[t].name)) {
      matched_.insert(tensors[t].name);
    }
    uses.push_back({id, t});
    if (tensors[t].derived != nullptr) derived_[Key(NameAtSource(tensors[t]))].push_back({id, t});
  }
  return id;
}

void TensorTable::RemoveUnused() {
  int removed = 0;
  for (ListId id = 0; id < lists_.size() && removed < kRemovedAtOnce; ++id) {
    if (!lists_[id].unused()) continue;
    Remove(id);
    ++removed;
  }
}

void TensorTable::Remove(ListId id) {
  List list = std::exchange(lists_[id], List());
  ids_.erase(list.layout != nullptr ? static_cast<const void*>(list.layout.get())
                                    : list.manifest.get());
  looked_up_ += static_cast<int64_t>(list.tensors().size());
  for (const TensorSpec& tensor : list.tensors()) {
    if (tensor.derived != nullptr) RemoveUses(&derived_, NameAtSource(tensor), NameAtSource, id);
    RemoveUses(&tensors_, tensor.name, NameOfTensor, id);
    if (const auto it = tensors_.find(Key(tensor.name)); it != tensors_.end()) {
      Move(&mixed_, View(it->first));
      Move(&partly_unwanted_, View(it->first));
    } else {
      mixed_.erase(tensor.name);
      partly_unwanted_.erase(tensor.name);
      matched_.erase(tensor.name);
    }
  }
}

void TensorTable::RemoveUses(UsesByName* names, const std::string& name, NameOf name_of,
                             ListId id) {
  const auto it = names->find(Key(name));
  if (it == names->end()) return;  // taken out already: a list may have a name twice
  Uses& uses = it->second;
  uses.erase(std::remove_if(uses.begin(), uses.end(), [id](const Use& u) { return u.list == id; }),
             uses.end());
  if (uses.empty()) {
    names->erase(it);
  } else if (it->first.data() == name.data()) {
    // The key goes with the list; a list that stays has the name too.
    Uses left = std::move(uses);
    names->erase(it);
    const absl::string_view kept = Key(name_of(spec(left.front())));
    names->emplace(kept, std::move(left));
  }
}

}  // namespace refitd::group
