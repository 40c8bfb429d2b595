// Waiting in tests, with a deadline so long that only a failing test reaches it.
#ifndef REFITD_TRANSPORT_BASE_EVENTUALLY_TESTING_H_
#define REFITD_TRANSPORT_BASE_EVENTUALLY_TESTING_H_

#include <chrono>
#include <functional>
#include <thread>

namespace refitd {

inline constexpr std::chrono::seconds kTestDeadline{30};

// Waits until `condition` holds; false if it did not before the deadline.
inline bool Eventually(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + kTestDeadline;
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    // Leave the processor to the threads that are waited for.
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

}  // namespace refitd

#endif  // REFITD_TRANSPORT_BASE_EVENTUALLY_TESTING_H_
