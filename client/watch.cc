#include "client/watch.h"

#include <algorithm>
#include <utility>

namespace refitd::client {
namespace {

thread_local const Watch* watching = nullptr;

}  // namespace

Watch::Watch(std::function<bool()> look) : look_(std::move(look)) { watching = this; }

Watch::~Watch() { watching = nullptr; }

bool WaitWatched(CondVar* cond, Mutex* mutex, std::chrono::steady_clock::time_point deadline) {
  const Watch* const watch = watching;
  if (watch == nullptr) return cond->WaitUntil(mutex, deadline);
  const auto now = std::chrono::steady_clock::now();
  if (deadline <= now) return false;
  if (cond->WaitUntil(mutex, std::min(deadline, now + Watch::kEvery))) return true;
  mutex->Unlock();
  watching = nullptr;  // waits inside `look` are not watched
  const bool go_on = watch->look_();
  watching = watch;
  mutex->Lock();
  return go_on;
}

}  // namespace refitd::client
