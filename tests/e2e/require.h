// Catch2 assertions about the outcomes of calls.
#ifndef REFITD_TESTS_E2E_REQUIRE_H_
#define REFITD_TESTS_E2E_REQUIRE_H_

#include <grpcpp/grpcpp.h>

#include <catch2/catch.hpp>
#include <string>
#include <vector>

// Requires that the call succeeded; shows its message if not.
#define REQUIRE_OK(outcome)                                              \
  do {                                                                   \
    const auto& refitd_outcome = (outcome);                              \
    INFO(refitd_outcome.status.error_message());                         \
    REQUIRE(refitd_outcome.status.error_code() == grpc::StatusCode::OK); \
  } while (false)

// Requires that a MemberProcess answers the command with a line that begins with `answer`.
#define REQUIRE_ANSWER(member, command, answer)             \
  do {                                                      \
    const std::string refitd_answer = (member).Do(command); \
    INFO((command) << ": " << refitd_answer);               \
    REQUIRE_THAT(refitd_answer, Catch::StartsWith(answer)); \
  } while (false)

namespace refitd::e2e {

// Checks that the call was refused with exactly this code, and that the message has each of
// `words`: the culprit.
inline void CheckRefused(const grpc::Status& status, grpc::StatusCode code,
                         const std::vector<std::string>& words) {
  INFO("code " << status.error_code() << ": " << status.error_message());
  CHECK(status.error_code() == code);
  for (const std::string& word : words) CHECK_THAT(status.error_message(), Catch::Contains(word));
}

}  // namespace refitd::e2e

#endif  // REFITD_TESTS_E2E_REQUIRE_H_
