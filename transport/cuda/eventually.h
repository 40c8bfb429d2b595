// Waiting in tests, with a deadline that no run comes near. Private to transport/cuda/.
#ifndef REFITD_TRANSPORT_CUDA_EVENTUALLY_H_
#define REFITD_TRANSPORT_CUDA_EVENTUALLY_H_

#include <chrono>
#include <functional>
#include <thread>

namespace refitd {

inline constexpr std::chrono::seconds kWait{30};

// Looks until `condition` holds; false: not within kWait.
inline bool Eventually(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + kWait;
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    // The processor is for those who are waited for.
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_EVENTUALLY_H_
