#include "daemon/policy/policy.h"

#include <catch2/catch.hpp>
#include <string>
#include <utility>
#include <vector>

#include "daemon/policy/rpcs.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

using Catch::Contains;

constexpr char kT[] = "spiffe://prod/trainer/t";
constexpr char kU[] = "spiffe://prod/trainer/u";

Principal Certified(const std::string& identity) {
  Principal caller;
  caller.certificate = identity;
  return caller;
}

Principal User(uint32_t uid, std::vector<uint32_t> gids = {}) {
  return {.uid = uid, .gids = std::move(gids), .certificate = ""};
}

PolicySettings OverTls(std::vector<PolicyRule> rules) {
  PolicySettings settings;
  settings.rules = std::move(rules);
  settings.tls = true;
  return settings;
}

std::shared_ptr<const Policy> Made(const PolicySettings& settings) {
  const auto policy = Policy::Make(settings);
  INFO(policy.status());
  REQUIRE(policy.ok());
  return *policy;
}

bool May(const Policy& policy, const Principal& caller, Role role, const std::string& group = "g",
         const std::string& owner = "") {
  return policy.Check(caller, {role}, group, owner).ok();
}

TEST_CASE(
    "Without rules the users of the unix socket may do everything, and nobody else anything") {
  PolicySettings settings;
  settings.uids = {0, 1000};
  settings.tls = true;
  const auto policy = Made(settings);
  for (const Role role :
       {Role::kTrainer, Role::kEngine, Role::kOperatorRead, Role::kOperatorWrite}) {
    INFO(RoleName(role));
    CHECK(May(*policy, User(0), role));
    CHECK(May(*policy, User(1000), role, "g", "uid:0"));
    CHECK_FALSE(May(*policy, User(1001), role));
    CHECK_FALSE(May(*policy, Certified(kT), role));
    CHECK_FALSE(May(*policy, Principal(), role));
  }
  CHECK_FALSE(May(*policy, User(0), Role::kPeer));
  CHECK_FALSE(May(*policy, Certified("spiffe://prod/refitd/a"), Role::kPeer));
}

TEST_CASE("TCP in the clear is open to all as long as no rule names anonymous") {
  PolicySettings settings;
  settings.insecure = true;
  for (const Role role : kAllRoles) CHECK(May(*Made(settings), Principal(), role, "g", "uid:0"));
  settings.rules = {{.who = "anonymous", .roles = {Role::kOperatorRead}, .group = "*"}};
  CHECK(May(*Made(settings), Principal(), Role::kOperatorRead));
  CHECK_FALSE(May(*Made(settings), Principal(), Role::kTrainer));
  settings = {};
  settings.insecure = true;
  settings.tls = true;
  CHECK_FALSE(May(*Made(settings), Principal(), Role::kOperatorRead));
}

TEST_CASE("A rule counts for its callers, its roles and its groups alone") {
  const auto policy = Made(OverTls(
      {{.who = "spiffe://prod/trainer/*", .roles = {Role::kTrainer}, .group = "llama-*"},
       {.who = "dns:*.engines", .roles = {Role::kEngine, Role::kOperatorRead}, .group = "llama-8b"},
       {.who = "gid:44", .roles = {Role::kOperatorWrite}, .group = "*"}}));
  CHECK(May(*policy, Certified(kT), Role::kTrainer, "llama-8b"));
  CHECK_FALSE(May(*policy, Certified(kT), Role::kTrainer, "qwen"));
  CHECK_FALSE(May(*policy, Certified(kT), Role::kEngine, "llama-8b"));
  CHECK_FALSE(May(*policy, Certified("spiffe://prod/other"), Role::kTrainer, "llama-8b"));
  CHECK_FALSE(May(*policy, Certified("spiffe://test/trainer/t"), Role::kTrainer, "llama-8b"));
  CHECK(May(*policy, Certified("dns:a.engines"), Role::kEngine, "llama-8b"));
  CHECK_FALSE(May(*policy, Certified("dns:a.engines"), Role::kEngine, "llama-8bx"));
  CHECK_FALSE(May(*policy, Certified("dns:a.b.engines"), Role::kEngine, "llama-8b"));
  CHECK(May(*policy, User(7, {1, 44}), Role::kOperatorWrite, "any"));
  // A caller who may write may read.
  CHECK(May(*policy, User(7, {1, 44}), Role::kOperatorRead, "any"));
  CHECK_FALSE(May(*policy, User(44), Role::kOperatorWrite, "any"));
}

TEST_CASE("where a rule names a group's owner nobody else may be its trainer, whoever holds it") {
  PolicySettings settings =
      OverTls({{.who = kT, .roles = {Role::kTrainer}, .group = "llama-*", .owner = true},
               {.who = "spiffe://prod/trainer/*", .roles = {Role::kTrainer}, .group = "*"},
               {.who = "spiffe://prod/oncall",
                .roles = {Role::kTrainer},
                .group = "*",
                .any_owner = true}});
  settings.uids = {0};
  const auto policy = Made(settings);
  CHECK(policy->NamesOwner("llama-8b"));
  CHECK(policy->NamesOwner("llama-8b", kT));
  CHECK_FALSE(policy->NamesOwner("llama-8b", kU));
  CHECK_FALSE(policy->NamesOwner("qwen"));
  // Nobody owns it yet, or somebody holds it against the rule.
  for (const char* const owner : {"", kU, "uid:0"}) {
    CAPTURE(owner);
    CHECK(May(*policy, Certified(kT), Role::kTrainer, "llama-8b", owner));
    CHECK_FALSE(May(*policy, Certified(kU), Role::kTrainer, "llama-8b", owner));
    CHECK_FALSE(May(*policy, Certified(kU), Role::kOperatorWrite, "llama-8b", owner));
    CHECK_FALSE(May(*policy, User(0), Role::kTrainer, "llama-8b", owner));
    CHECK(May(*policy, User(0), Role::kOperatorWrite, "llama-8b", owner));
    CHECK(May(*policy, Certified("spiffe://prod/oncall"), Role::kTrainer, "llama-8b", owner));
  }
  CHECK(policy->MayJoinOthers(Certified("spiffe://prod/oncall"), "llama-8b"));
  CHECK_FALSE(policy->MayJoinOthers(User(0), "llama-8b"));
  CHECK(policy->MayJoinOthers(User(0), "qwen"));
  CHECK(May(*policy, Certified(kU), Role::kTrainer, "qwen"));
  CHECK_THAT(policy->Why(Certified(kU), Role::kTrainer, "llama-8b", ""),
             Contains("whose owner a rule names"));
  CHECK_THAT(policy->Why(Certified(kT), Role::kTrainer, "llama-8b", ""),
             Contains("and nobody else owns it"));
}

TEST_CASE("A group is its owner's, and other trainers take a rule that says any_owner") {
  const auto policy =
      Made(OverTls({{.who = "spiffe://prod/trainer/*", .roles = {Role::kTrainer}, .group = "*"},
                    {.who = "spiffe://prod/admin",
                     .roles = {Role::kTrainer},
                     .group = "*",
                     .any_owner = true}}));
  for (const Role role : kAllRoles) {
    INFO(RoleName(role));
    CHECK(May(*policy, Certified(kT), role, "g", kT) == (role != Role::kPeer));
    CHECK_FALSE(May(*policy, Certified(kU), role, "g", kT));
  }
  CHECK(May(*policy, Certified("spiffe://prod/admin"), Role::kTrainer, "g", kT));
  CHECK_FALSE(May(*policy, Certified("spiffe://prod/admin"), Role::kOperatorWrite, "g", kT));
  // An owner whom no rule makes a trainer any more has lost the owner's rights.
  const auto without = Made(OverTls({}));
  CHECK_FALSE(May(*without, Certified(kT), Role::kOperatorWrite, "g", kT));
}

TEST_CASE("A refusal names identity, role and group") {
  const auto policy =
      Made(OverTls({{.who = "spiffe://prod/trainer/*", .roles = {Role::kTrainer}, .group = "*"}}));
  const absl::Status no_rule = policy->Check(User(7), {Role::kOperatorWrite}, "llama", "");
  CHECK(absl::IsPermissionDenied(no_rule));
  CHECK_THAT(Message(no_rule), Contains("uid:7 may not be operator write of group 'llama'"));
  const absl::Status owned = policy->Check(Certified(kU), {Role::kTrainer}, "llama", kT);
  CHECK_THAT(Message(owned), Contains(std::string(kU) + " may not be trainer of group 'llama', " +
                                      "which another identity owns"));
  CHECK(Message(owned).find(kT) == std::string::npos);
  CHECK_THAT(Message(policy->CheckAnywhere(User(7), {Role::kOperatorRead})),
             Contains("uid:7 may not be operator read of any group"));
  CHECK_THAT(Message(policy->CheckKnown(Principal())), Contains("anonymous has no role"));
}

TEST_CASE("Rules that make no sense are refused with field and value") {
  const auto trainer = [](std::string who) {
    return PolicyRule{.who = std::move(who), .roles = {Role::kTrainer}, .group = "*"};
  };
  PolicyRule no_role = trainer("uid:1");
  no_role.roles.clear();
  PolicyRule no_group = trainer("uid:1");
  no_group.group.clear();
  PolicyRule group = trainer("uid:1");
  group.group = "a*b";
  PolicyRule user_peer = trainer("gid:5");
  user_peer.roles = {Role::kPeer};
  PolicyRule owner = trainer("uid:1");
  owner.roles = {Role::kEngine};
  owner.any_owner = true;
  const std::vector<std::pair<PolicyRule, std::string>> bad = {
      {trainer(""), "rule[0].who is missing"},
      {trainer("root"), "rule[0].who is \"root\""},
      {trainer("uid:-1"), "rule[0].who is \"uid:-1\""},
      {trainer("uid:4294967296"), "rule[0].who is \"uid:4294967296\""},
      {trainer("gid:"), "rule[0].who is \"gid:\""},
      {trainer("spiffe://prod"), "rule[0].who"},
      {trainer("dns:a*"), "rule[0].who"},
      {trainer("anonymous"), "rule[0].who is \"anonymous\": nobody is"},
      {no_role, "rule[0].role is missing"},
      {no_group, "rule[0].group is missing"},
      {group, "rule[0].group is \"a*b\""},
      {user_peer, "rule[0].role is PEER and rule[0].who \"gid:5\""},
      {owner, "rule[0].any_owner is true"},
      {{.who = kT, .roles = {Role::kEngine}, .group = "g", .owner = true}, "rule[0].owner is true"},
      {{.who = "gid:7", .roles = {Role::kTrainer}, .group = "g", .owner = true},
       "an owner is a user or a certificate"},
  };
  for (const auto& [rule, named] : bad) {
    const auto made = Policy::Make(OverTls({rule}));
    INFO(named);
    CHECK(absl::IsInvalidArgument(made.status()));
    CHECK_THAT(Message(made.status()), Contains(named));
  }
  PolicySettings clear;
  clear.rules = {trainer("spiffe://prod/a")};
  CHECK_THAT(Message(Policy::Make(clear).status()), Contains("without tls nobody"));
  CHECK_THAT(Message(Policy::Make(OverTls({trainer("uid:1"), trainer("uid:1")})).status()),
             Contains("rule[1] repeats rule[0]"));
  const std::vector<PolicyRule> many(kMaxPolicyRules + 1, trainer("uid:1"));
  CHECK_THAT(Message(Policy::Make(OverTls(many)).status()), Contains("1025 entries"));
}

TEST_CASE("Rules explain themselves, and answers name the rule that decided") {
  const auto policy = Made(OverTls(
      {{.who = "uid:7", .roles = {Role::kTrainer, Role::kOperatorRead}, .group = "llama-*"}}));
  CHECK(Explain(policy->rules()[0]) ==
        "rule[0]: uid:7 may be trainer, operator read of groups whose names begin with 'llama-' "
        "(trainer: unless another identity owns it)");
  CHECK_THAT(policy->Why(User(7), Role::kTrainer, "llama-8b", ""), Contains("by rule[0]: uid:7"));
  CHECK_THAT(policy->Why(User(7), Role::kEngine, "llama-8b", ""), Contains("uid:7 may not be"));
}

TEST_CASE("Callers and roles are read as people write them") {
  const auto user = ParsePrincipal("uid:7,gid:1,gid:44", "--as");
  REQUIRE(user.ok());
  CHECK(user->uid == 7);
  CHECK(user->gids == std::vector<uint32_t>{1, 44});
  CHECK(ParsePrincipal(kT, "--as")->identity() == kT);
  CHECK(ParsePrincipal("anonymous", "--as")->identity() == "anonymous");
  for (const char* bad : {"", "uid:", "gid:7", "uid:1,uid:2", "uid:1,x", "spiffe://prod/*", "me"}) {
    INFO(bad);
    CHECK_THAT(Message(ParsePrincipal(bad, "--as").status()), Contains("--as"));
  }
  for (const Role role : kAllRoles) CHECK(*ParseRole(RoleName(role)) == role);
  CHECK(*ParseRole("OPERATOR_READ") == Role::kOperatorRead);
  CHECK(*ParseRole("operator-write") == Role::kOperatorWrite);
  CHECK_THAT(Message(ParseRole("boss").status()), Contains("'boss'"));
}

}  // namespace
}  // namespace refitd
