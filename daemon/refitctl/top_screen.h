// The screen of `refitctl top`, made from the daemon's answers.
//
// Pure; belongs to one thread.
#ifndef REFITD_DAEMON_REFITCTL_TOP_SCREEN_H_
#define REFITD_DAEMON_REFITCTL_TOP_SCREEN_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "daemon/refitctl/format.h"
#include "refitd/v1/operator.pb.h"

namespace refitd::refitctl {

class TopScreen {
 public:
  // `seconds`: by any clock that grows. Rates of this moment are known from the second call on.
  std::string Render(const v1::GetStatusResponse& status, double seconds);

 private:
  struct Wire {
    uint64_t communicator = 0;  // the counts of another communicator begin at 0 again
    ProgressMeter sent;
    ProgressMeter received;
  };
  std::string Groups(const v1::GetStatusResponse& status);
  void Count(const v1::GroupStatus& group, double seconds);

  std::map<std::string, Wire> wires_;                                  // by group
  std::map<std::pair<std::string, uint64_t>, ProgressMeter> updates_;  // that run
};

}  // namespace refitd::refitctl

#endif  // REFITD_DAEMON_REFITCTL_TOP_SCREEN_H_
