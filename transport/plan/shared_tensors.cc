#include "transport/plan/shared_tensors.h"

#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "transport/base/mutex.h"

namespace refitd {
namespace {

using Shared = std::shared_ptr<const TensorList::List>;

class Lists {
 public:
  // The list that equals `list`, if a layout refers to one; else `list`.
  Shared Find(Shared list, uint64_t hash) {
    const MutexLock lock(&mutex_);
    if (lists_.size() >= room_) {
      absl::erase_if(lists_, [](const auto& entry) { return entry.second.expired(); });
      room_ = 2 * (lists_.size() + 1);
    }
    std::weak_ptr<const TensorList::List>& known = lists_[hash];
    if (Shared before = known.lock(); before != nullptr && *before == *list) return before;
    known = list;
    return list;
  }

 private:
  Mutex mutex_;
  absl::flat_hash_map<uint64_t, std::weak_ptr<const TensorList::List>> lists_
      ABSL_GUARDED_BY(mutex_);
  size_t room_ ABSL_GUARDED_BY(mutex_) = 2;  // at this number of lists, unused ones are removed
};

}  // namespace

void ShareTensors(Layout* layout) {
  static Lists& lists = *new Lists;
  HashChain hash(layout->tensors.size());
  for (const TensorSpec& tensor : layout->tensors) hash.Add(TensorHash(tensor));
  auto list = std::make_shared<const TensorList::List>(std::move(layout->tensors.Edit()));
  layout->tensors = TensorList(lists.Find(std::move(list), hash.hash()));
}

}  // namespace refitd
