// Any rules and questions: the policy's answers are those of an oracle that matches one rule after
// the other, and do not contradict each other (P9, P10).
#include <google/protobuf/text_format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "daemon/config.h"
#include "daemon/policy/policy.h"
#include "tests/fuzz/inputs.pb.h"
#include "tests/fuzz/one_in.h"
#include "tests/fuzz/proto_mutator.h"
#include "transport/base/status.h"
#include "transport/base/unique_fd.h"

namespace refitd {
namespace {

struct Question {
  Principal caller;
  Role role;
  std::string group;
  std::string owner;
};

// Decides one rule as the page on rules tells. An operator who may write may read; a group's owner
// that a rule lets be trainer there may do all but be a peer; nobody else may be trainer of an
// owned group without any_owner.
bool Allows(const PolicyRule& rule, const Question& q) {
  if (!MatchesPrincipal(rule.who, q.caller) || !MatchesGroup(rule.group, q.group)) return false;
  const auto has = [&rule](Role role) {
    return std::find(rule.roles.begin(), rule.roles.end(), role) != rule.roles.end();
  };
  const bool owner = q.owner == q.caller.identity();
  const bool trainer = has(Role::kTrainer) && (q.owner.empty() || owner || rule.any_owner);
  if (q.role == Role::kTrainer) return trainer;
  if (has(q.role) || (q.role == Role::kOperatorRead && has(Role::kOperatorWrite))) return true;
  return !q.owner.empty() && owner && trainer && q.role != Role::kPeer;
}

void Ask(const Policy& policy, const Question& q) {
  const bool expected = std::any_of(policy.rules().begin(), policy.rules().end(),
                                    [&q](const PolicyRule& rule) { return Allows(rule, q); });
  const absl::Status answer = policy.Check(q.caller, {q.role}, q.group, q.owner);
  REFITD_CHECK(answer.ok() == expected);
  REFITD_CHECK(answer.ok() || absl::IsPermissionDenied(answer));
  REFITD_CHECK(!policy.Why(q.caller, q.role, q.group, q.owner).empty());
  const bool anywhere = policy.CheckAnywhere(q.caller, {q.role}).ok();
  REFITD_CHECK(!expected || anywhere);
  REFITD_CHECK(!anywhere || policy.CheckKnown(q.caller).ok());
  if (policy.CheckEverywhere(q.caller, {q.role}).ok()) {
    REFITD_CHECK(policy.Check(q.caller, {q.role}, q.group, /*owner=*/"").ok());
  }
}

// Writes the settings as a file and reads that. Parsing a command line takes many times as long as
// the rest, so only some inputs come here.
absl::StatusOr<Config> ThroughFile(const Config& settings) {
  std::string text;
  REFITD_CHECK(google::protobuf::TextFormat::PrintToString(settings, &text));
  const UniqueFd file(memfd_create("config", MFD_CLOEXEC));
  REFITD_CHECK(file.valid());
  REFITD_CHECK(write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  REFITD_ASSIGN_OR_RETURN(
      const Invocation loaded,
      LoadConfig({"--config", "/proc/self/fd/" + std::to_string(file.get())}, /*environment=*/{}));
  return loaded.config;
}

void FuzzOne(const fuzz::PolicyInput& input) {
  const absl::StatusOr<Config> config = ConfigOf(input.config());
  if (OneIn(64, input.SerializeAsString())) {
    // The file can't say enumerators that the settings don't have.
    const absl::StatusOr<Config> read = ThroughFile(input.config());
    REFITD_CHECK(!read.ok() || (config.ok() && FormatConfig(*read) == FormatConfig(*config)));
  }
  if (!config.ok()) return;
  const auto policy = Policy::Make(PolicySettingsOf(*config));
  REFITD_CHECK(policy.ok());  // ConfigOf has checked it
  for (const PolicyRule& rule : (*policy)->rules()) REFITD_CHECK(!Explain(rule).empty());
  for (const auto& question : input.questions()) {
    const auto caller = ParsePrincipal(question.who(), "identity");
    const auto role = ParseRole(question.role());
    if (!caller.ok() || !role.ok()) continue;
    Ask(**policy, {*caller, *role, question.group(), question.owner()});
  }
}

}  // namespace
}  // namespace refitd

REFITD_PROTO_FUZZ_TARGET(refitd::fuzz::PolicyInput)
