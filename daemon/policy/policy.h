// The policy: which identity may act in which role in which groups (P9).
//
// A policy is a list of rules. A rule names callers (`who`), the roles that they get, and a pattern
// of groups. What no rule allows is refused. Beside the rules there is ownership: the identity of
// the first trainer of a group owns the group. Rules let other identities be trainers of an owned
// group only if they say `any_owner`, and the owner may be engine and operator of its group without
// a rule of its own for that. A rule may also name the owner of groups (`owner`): then nobody else
// owns such a group or makes it, and only a written rule with `any_owner` lets anybody else in.
//
// Pure: no gRPC, no files, no clock. Policies are immutable, and thread-safe.
#ifndef REFITD_DAEMON_POLICY_POLICY_H_
#define REFITD_DAEMON_POLICY_POLICY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/identity.h"

namespace refitd {

// Limits of a policy (P10). Each Attach looks at every rule.
inline constexpr size_t kMaxPolicyRules = 1024;
inline constexpr size_t kMaxGroupPatternBytes = 128;  // as a group's name

enum class Role : uint8_t { kTrainer, kEngine, kOperatorRead, kOperatorWrite, kPeer };
inline constexpr std::array kAllRoles = {Role::kTrainer, Role::kEngine, Role::kOperatorRead,
                                         Role::kOperatorWrite, Role::kPeer};
// "trainer", "engine", "operator read", "operator write", "peer".
std::string_view RoleName(Role role);
// Reads a role as people write it: RoleName with a space, '-' or '_', in any case.
absl::StatusOr<Role> ParseRole(std::string_view text);

// A set of roles, any of which will do.
class RoleSet {
 public:
  constexpr RoleSet() = default;
  constexpr RoleSet(std::initializer_list<Role> roles) {
    for (const Role role : roles) bits_ |= Bit(role);
  }
  constexpr bool Contains(Role role) const { return (bits_ & Bit(role)) != 0; }
  constexpr bool empty() const { return bits_ == 0; }
  constexpr bool operator==(const RoleSet&) const = default;

 private:
  static constexpr unsigned Bit(Role role) { return 1U << static_cast<unsigned>(role); }
  unsigned bits_ = 0;
};

// The process at the other end of a connection, as a policy sees it. A principal has either a user
// or a certificate, or neither: then it came over TCP without TLS.
struct Principal {
  std::optional<uint32_t> uid{};
  std::vector<uint32_t> gids{};  // the first and the further groups of the user
  std::string certificate{};     // the identity in it: "spiffe://..." or "dns:..."

  // "uid:1000", "spiffe://prod/trainer/t", "dns:host" or kAnonymous.
  std::string identity() const;
};

// Reads a principal as people write it: "uid:1000", "uid:1000,gid:44", "spiffe://...", "dns:..." or
// "anonymous". INVALID_ARGUMENT names `field`.
absl::StatusOr<Principal> ParsePrincipal(std::string_view text, std::string_view field);

// `who` is "uid:N", "gid:N", "spiffe://DOMAIN/PATH", "spiffe://DOMAIN/PATH/*", "dns:NAME",
// "dns:*.DOMAIN" or "anonymous".
bool MatchesPrincipal(std::string_view who, const Principal& caller);
// `pattern` is a group's name, or the beginning of names with '*' at its end.
bool MatchesGroup(std::string_view pattern, std::string_view group);

struct PolicyRule {
  std::string who;
  std::vector<Role> roles;
  std::string group;
  bool any_owner = false;   // trainers: also of groups that another identity owns
  bool owner = false;       // trainers: nobody else owns these groups
  bool implied = false;     // by another setting; set by Make
  std::string origin = {};  // the setting that the rule comes from, for people: "rule[2]"
  bool operator==(const PolicyRule&) const = default;
};

// "rule[2]: spiffe://prod/trainer/* may be trainer of groups llama-*, if no other identity owns
// them"
std::string Explain(const PolicyRule& rule);

// The settings that a policy is made of.
struct PolicySettings {
  std::vector<PolicyRule> rules;  // as they were written; `origin` is set by Make
  // Users, and members of groups, who may do everything over the unix socket.
  std::vector<uint32_t> uids;
  std::vector<uint32_t> gids;
  std::string peers;      // a pattern of identities that are peers of all groups; empty: none
  bool tls = false;       // TCP is served with TLS
  bool insecure = false;  // TCP without TLS is allowed
  bool operator==(const PolicySettings&) const = default;
};

class Policy {
 public:
  // INVALID_ARGUMENT names field and value of a rule that is malformed or can't have an effect.
  static absl::StatusOr<std::shared_ptr<const Policy>> Make(const PolicySettings& settings);

  // OK: the caller may act in one of these roles in the group. `owner` is the identity that owns
  // the group; empty: nobody does, or there is no such group. PERMISSION_DENIED names identity,
  // roles and group.
  absl::Status Check(const Principal& caller, RoleSet roles, std::string_view group,
                     std::string_view owner) const;
  // OK: the caller may act in one of these roles in some group.
  absl::Status CheckAnywhere(const Principal& caller, RoleSet roles) const;
  // OK: the caller may act in one of these roles in every group, whatever its name.
  absl::Status CheckEverywhere(const Principal& caller, RoleSet roles) const;
  // OK: some rule names the caller.
  absl::Status CheckKnown(const Principal& caller) const;
  // Whether a rule names the group's owner, and whether it is this identity.
  bool NamesOwner(std::string_view group) const;
  bool NamesOwner(std::string_view group, std::string_view identity) const;
  // Whether the caller may be a trainer of the group though another identity owns the group.
  bool MayJoinOthers(const Principal& caller, std::string_view group) const;
  // The words for the answer to Check: which rule allows it, or why nothing does.
  std::string Why(const Principal& caller, Role role, std::string_view group,
                  std::string_view owner) const;

  const std::vector<PolicyRule>& rules() const { return rules_; }

 private:
  explicit Policy(std::vector<PolicyRule> rules) : rules_(std::move(rules)) {}
  // The rule that lets the caller act in the role. Null: there is none.
  const PolicyRule* Find(const Principal& caller, Role role, std::string_view group,
                         std::string_view owner) const;

  const std::vector<PolicyRule> rules_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_POLICY_POLICY_H_
