// A group with two shadowed instances, for tests of staging, flips and rollbacks.
#ifndef REFITD_DAEMON_GROUP_SHADOWED_TEST_UTIL_H_
#define REFITD_DAEMON_GROUP_SHADOWED_TEST_UTIL_H_

#include <vector>

#include "daemon/group/group_test_util.h"

namespace refitd {

constexpr auto kOk = absl::StatusCode::kOk;
constexpr auto kAborted = absl::StatusCode::kAborted;
constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;

inline const std::vector<TensorSpec> kModel = {Bytes("a", 1000), Bytes("b", 500)};

// A trainer, and shadowed instances "a" and "b" of one rank each.
struct ShadowedPair : TestGroup {
  explicit ShadowedPair(GroupSpec spec = DefaultSpec(), GroupLimits limits = {})
      : TestGroup(spec, limits) {
    trainer = AttachTrainer();
    a = ShadowedRank("a", kModel, 0, 1, /*catch_up=*/true);
    b = ShadowedRank("b", kModel, 0, 1, /*catch_up=*/true);
  }
  MemberId trainer;
  MemberId a;
  MemberId b;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_SHADOWED_TEST_UTIL_H_
