#include "daemon/policy/policy.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <utility>

#include "transport/base/identity.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr std::string_view kUid = kUidScheme;
constexpr std::string_view kGid = "gid:";
constexpr std::string_view kGroupCharacters =
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";

bool IsCertificate(std::string_view who) {
  return who.starts_with(kSpiffeScheme) || who.starts_with(kDnsScheme);
}

absl::Status CheckWho(const PolicyRule& rule, const std::string& field,
                      const PolicySettings& settings) {
  const std::string& who = rule.who;
  if (who.empty()) return Error(kInvalid, "{} is missing", field);
  if (who == kAnonymous) {
    if (settings.insecure && !settings.tls) return absl::OkStatus();
    return Error(kInvalid,
                 "{} is \"{}\": nobody is, since TCP without TLS takes listen.insecure and no tls",
                 field, who);
  }
  if (who.starts_with(kUid) || who.starts_with(kGid)) {
    if (NumberAfter(kUid, who).has_value() || NumberAfter(kGid, who).has_value()) {
      return absl::OkStatus();
    }
    return Error(kInvalid, "{} is \"{}\", must be uid:N or gid:N with a number of 32 bits", field,
                 who);
  }
  if (!IsCertificate(who)) {
    return Error(kInvalid,
                 "{} is \"{}\", must begin with uid:, gid:, spiffe:// or dns:, or be \"{}\"", field,
                 who, kAnonymous);
  }
  REFITD_RETURN_IF_ERROR(CheckIdentityPattern(who, field));
  if (settings.tls) return absl::OkStatus();
  return Error(kInvalid, "{} is \"{}\", but without tls nobody has a certificate", field, who);
}

absl::Status CheckRoles(const PolicyRule& rule, const std::string& field) {
  if (rule.roles.empty()) return Error(kInvalid, "{}.role is missing", field);
  const bool user = rule.who.starts_with(kUid) || rule.who.starts_with(kGid);
  const auto has = [&rule](Role role) {
    return std::find(rule.roles.begin(), rule.roles.end(), role) != rule.roles.end();
  };
  if (user && has(Role::kPeer)) {
    return Error(kInvalid,
                 "{}.role is PEER and {}.who \"{}\", but daemons link over TCP, where nobody has a "
                 "user",
                 field, field, rule.who);
  }
  if (rule.any_owner && !has(Role::kTrainer)) {
    return Error(kInvalid, "{}.any_owner is true, but only the role TRAINER asks for the owner",
                 field);
  }
  if (rule.owner && !has(Role::kTrainer)) {
    return Error(kInvalid, "{}.owner is true, but only a TRAINER owns a group", field);
  }
  if (rule.owner && (rule.who.starts_with(kGid) || rule.who == kAnonymous)) {
    return Error(kInvalid,
                 "{}.owner is true and {}.who \"{}\", but an owner is a user or a certificate",
                 field, field, rule.who);
  }
  return absl::OkStatus();
}

absl::Status CheckGroupPattern(const std::string& pattern, const std::string& field) {
  if (pattern.empty()) return Error(kInvalid, "{} is missing (\"*\": all groups)", field);
  const std::string_view name =
      std::string_view(pattern).substr(0, pattern.size() - (pattern.back() == '*' ? 1 : 0));
  if (pattern.size() <= kMaxGroupPatternBytes &&
      name.find_first_not_of(kGroupCharacters) == std::string_view::npos) {
    return absl::OkStatus();
  }
  return Error(kInvalid,
               "{} is \"{}\", must be at most {} characters of [A-Za-z0-9._-], the last may be *",
               field, pattern, kMaxGroupPatternBytes);
}

absl::Status CheckRule(const PolicyRule& rule, const std::string& field,
                       const PolicySettings& settings) {
  REFITD_RETURN_IF_ERROR(CheckWho(rule, field + ".who", settings));
  REFITD_RETURN_IF_ERROR(CheckRoles(rule, field));
  return CheckGroupPattern(rule.group, field + ".group");
}

PolicyRule AllRolesEverywhere(std::string who, std::string origin) {
  return {.who = std::move(who),
          .roles = {Role::kTrainer, Role::kEngine, Role::kOperatorRead, Role::kOperatorWrite},
          .group = "*",
          .any_owner = true,
          .implied = true,
          .origin = std::move(origin)};
}

bool HasRole(const PolicyRule& rule, Role role) {
  return std::any_of(rule.roles.begin(), rule.roles.end(), [role](Role each) {
    return each == role || (role == Role::kOperatorRead && each == Role::kOperatorWrite);
  });
}

std::string Names(RoleSet roles) {
  std::string names;
  for (const Role role : kAllRoles) {
    if (!roles.Contains(role)) continue;
    names += (names.empty() ? "" : " or ") + std::string(RoleName(role));
  }
  return names;
}

}  // namespace

std::string_view RoleName(Role role) {
  switch (role) {
    case Role::kTrainer:
      return "trainer";
    case Role::kEngine:
      return "engine";
    case Role::kOperatorRead:
      return "operator read";
    case Role::kOperatorWrite:
      return "operator write";
    case Role::kPeer:
      return "peer";
  }
  REFITD_CHECK(false);
}

absl::StatusOr<Role> ParseRole(std::string_view text) {
  std::string plain(text);
  for (char& c : plain) {
    c = c == '-' || c == '_' ? ' ' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  for (const Role role : kAllRoles) {
    if (plain == RoleName(role)) return role;
  }
  return Error(kInvalid,
               "role: '{}' is none of trainer, engine, operator-read, operator-write, peer", text);
}

std::string Principal::identity() const {
  if (uid.has_value()) return fmt::format("{}{}", kUid, *uid);
  return certificate.empty() ? std::string(kAnonymous) : certificate;
}

absl::StatusOr<Principal> ParsePrincipal(std::string_view text, std::string_view field) {
  Principal caller;
  if (text == kAnonymous) return caller;
  if (IsCertificate(text)) {
    if (text.find('*') != std::string_view::npos) {
      return Error(kInvalid, "{}: '{}' is a pattern, not an identity", field, text);
    }
    REFITD_RETURN_IF_ERROR(CheckIdentityPattern(text, field));
    caller.certificate = text;
    return caller;
  }
  for (std::string_view rest = text; !rest.empty();) {
    const size_t comma = std::min(rest.find(','), rest.size());
    const std::string_view part = rest.substr(0, comma);
    const std::optional<uint32_t> uid = NumberAfter(kUid, part);
    const std::optional<uint32_t> gid = NumberAfter(kGid, part);
    if (uid.has_value() && !caller.uid.has_value()) {
      caller.uid = uid;
    } else if (gid.has_value()) {
      caller.gids.push_back(*gid);
    } else {
      caller.uid.reset();
      break;
    }
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
  if (caller.uid.has_value()) return caller;
  return Error(kInvalid,
               "{}: '{}' is no identity: uid:N (and ,gid:N for each of its groups), spiffe://..., "
               "dns:NAME or {}",
               field, text, kAnonymous);
}

bool MatchesPrincipal(std::string_view who, const Principal& caller) {
  if (who == kAnonymous) return !caller.uid.has_value() && caller.certificate.empty();
  if (IsCertificate(who)) {
    return !caller.certificate.empty() && MatchesIdentity(who, caller.certificate);
  }
  if (!caller.uid.has_value()) return false;
  if (const auto uid = NumberAfter(kUid, who); uid.has_value()) return *uid == *caller.uid;
  const auto gid = NumberAfter(kGid, who);
  return gid.has_value() &&
         std::find(caller.gids.begin(), caller.gids.end(), *gid) != caller.gids.end();
}

bool MatchesGroup(std::string_view pattern, std::string_view group) {
  if (pattern.empty() || pattern.back() != '*') return pattern == group;
  return group.starts_with(pattern.substr(0, pattern.size() - 1));
}

std::string Explain(const PolicyRule& rule) {
  std::string text = fmt::format("{}: {} may be ", rule.origin, rule.who);
  for (size_t i = 0; i < rule.roles.size(); ++i) {
    text += std::string(i == 0 ? "" : ", ") + std::string(RoleName(rule.roles[i]));
  }
  text += rule.group == "*"          ? " of every group"
          : rule.group.back() == '*' ? fmt::format(" of groups whose names begin with '{}'",
                                                   rule.group.substr(0, rule.group.size() - 1))
                                     : fmt::format(" of group '{}'", rule.group);
  const bool trainer =
      std::find(rule.roles.begin(), rule.roles.end(), Role::kTrainer) != rule.roles.end();
  if (trainer && rule.owner) text += ", and nobody else owns it";
  if (trainer && rule.any_owner) text += ", whoever owns it";
  if (trainer && !rule.any_owner && !rule.owner)
    text += " (trainer: unless another identity owns it)";
  return text;
}

absl::StatusOr<std::shared_ptr<const Policy>> Policy::Make(const PolicySettings& settings) {
  if (settings.rules.size() > kMaxPolicyRules) {
    return Error(kInvalid, "rule has {} entries, must have at most {}", settings.rules.size(),
                 kMaxPolicyRules);
  }
  std::vector<PolicyRule> rules;
  bool names_anonymous = false;
  for (size_t i = 0; i < settings.rules.size(); ++i) {
    const std::string field = fmt::format("rule[{}]", i);
    PolicyRule rule = settings.rules[i];
    REFITD_RETURN_IF_ERROR(CheckRule(rule, field, settings));
    rule.origin.clear();
    for (size_t j = 0; j < i; ++j) {
      PolicyRule other = rules[j];
      other.origin.clear();
      if (other == rule) return Error(kInvalid, "{} repeats rule[{}]: {}", field, j, rule.who);
    }
    rule.origin = field;
    names_anonymous = names_anonymous || rule.who == kAnonymous;
    rules.push_back(std::move(rule));
  }
  for (const uint32_t uid : settings.uids) {
    rules.push_back(AllRolesEverywhere(fmt::format("{}{}", kUid, uid), "allowed_uids"));
  }
  for (const uint32_t gid : settings.gids) {
    rules.push_back(AllRolesEverywhere(fmt::format("{}{}", kGid, gid), "allowed_gids"));
  }
  if (!settings.peers.empty()) {
    rules.push_back(
        {.who = settings.peers, .roles = {Role::kPeer}, .group = "*", .origin = "peers.identity"});
  }
  if (settings.insecure && !settings.tls && !names_anonymous) {
    rules.push_back(AllRolesEverywhere(std::string(kAnonymous), "listen.insecure"));
    rules.back().roles.push_back(Role::kPeer);
  }
  return std::shared_ptr<const Policy>(new Policy(std::move(rules)));
}

const PolicyRule* Policy::Find(const Principal& caller, Role role, std::string_view group,
                               std::string_view owner) const {
  const std::string identity = caller.identity();
  // A rule with `owner` names who may own the group. An identity that holds the group against such
  // a rule counts as no owner.
  const bool named = NamesOwner(group);
  const bool is_named = named && NamesOwner(group, identity);
  const bool counts = !owner.empty() && (!named || NamesOwner(group, owner));
  const bool owns = counts && owner == identity;
  const bool of_another = (counts && !owns) || (named && !is_named);
  for (const PolicyRule& rule : rules_) {
    if (!MatchesGroup(rule.group, group) || !MatchesPrincipal(rule.who, caller)) continue;
    // An implied rule (allowed_uids, allowed_gids, listen.insecure) makes no other identity a
    // trainer of a group whose owner a rule names.
    const bool any_owner = rule.any_owner && !(named && rule.implied);
    const bool trainer = HasRole(rule, Role::kTrainer) && (any_owner || !of_another);
    if (role == Role::kTrainer ? trainer : HasRole(rule, role)) return &rule;
    // The identity that owns the group and may be its trainer may act in every role but peer.
    if (owns && trainer && role != Role::kPeer) return &rule;
  }
  return nullptr;
}

absl::Status Policy::Check(const Principal& caller, RoleSet roles, std::string_view group,
                           std::string_view owner) const {
  for (const Role role : kAllRoles) {
    if (roles.Contains(role) && Find(caller, role, group, owner) != nullptr) {
      return absl::OkStatus();
    }
  }
  const bool trainer = roles.Contains(Role::kTrainer);
  const bool of_another = !owner.empty() && owner != caller.identity();
  const bool named = NamesOwner(group) && !NamesOwner(group, caller.identity());
  return Error(absl::StatusCode::kPermissionDenied, "{} may not be {} of group '{}'{}",
               caller.identity(), Names(roles), group.substr(0, kMaxGroupPatternBytes),
               trainer && named        ? ", whose owner a rule names"
               : trainer && of_another ? ", which another identity owns"
                                       : ": no rule of the daemon's configuration says so");
}

bool Policy::NamesOwner(std::string_view group) const {
  return std::any_of(rules_.begin(), rules_.end(), [group](const PolicyRule& rule) {
    return rule.owner && MatchesGroup(rule.group, group);
  });
}

bool Policy::NamesOwner(std::string_view group, std::string_view identity) const {
  return std::any_of(rules_.begin(), rules_.end(), [&](const PolicyRule& rule) {
    return rule.owner && MatchesGroup(rule.group, group) && MatchesOwner(rule.who, identity);
  });
}

absl::Status Policy::CheckAnywhere(const Principal& caller, RoleSet roles) const {
  for (const PolicyRule& rule : rules_) {
    if (!MatchesPrincipal(rule.who, caller)) continue;
    for (const Role role : kAllRoles) {
      // A caller whom a rule makes a trainer may own a group, and its owner may act in all roles
      // but peer.
      const bool as_owner = role != Role::kPeer && HasRole(rule, Role::kTrainer);
      if (roles.Contains(role) && (as_owner || HasRole(rule, role))) return absl::OkStatus();
    }
  }
  return Error(absl::StatusCode::kPermissionDenied,
               "{} may not be {} of any group: no rule of the daemon's configuration says so",
               caller.identity(), Names(roles));
}

absl::Status Policy::CheckEverywhere(const Principal& caller, RoleSet roles) const {
  for (const PolicyRule& rule : rules_) {
    if (rule.group != "*" || !MatchesPrincipal(rule.who, caller)) continue;
    for (const Role role : kAllRoles) {
      if (roles.Contains(role) && HasRole(rule, role)) return absl::OkStatus();
    }
  }
  return Error(absl::StatusCode::kPermissionDenied,
               "{} may not be {} of every group: no rule of the daemon's configuration says so; "
               "name a group",
               caller.identity(), Names(roles));
}

absl::Status Policy::CheckKnown(const Principal& caller) const {
  if (std::any_of(rules_.begin(), rules_.end(),
                  [&](const PolicyRule& rule) { return MatchesPrincipal(rule.who, caller); })) {
    return absl::OkStatus();
  }
  return Error(absl::StatusCode::kPermissionDenied,
               "{} has no role in any group: no rule of the daemon's configuration names it",
               caller.identity());
}

bool Policy::MayJoinOthers(const Principal& caller, std::string_view group) const {
  const bool named = NamesOwner(group);
  return std::any_of(rules_.begin(), rules_.end(), [&](const PolicyRule& rule) {
    return rule.any_owner && !(named && rule.implied) && HasRole(rule, Role::kTrainer) &&
           MatchesGroup(rule.group, group) && MatchesPrincipal(rule.who, caller);
  });
}

std::string Policy::Why(const Principal& caller, Role role, std::string_view group,
                        std::string_view owner) const {
  const PolicyRule* const rule = Find(caller, role, group, owner);
  if (rule == nullptr) return Message(Check(caller, {role}, group, owner));
  return fmt::format("{} may be {} of group '{}' by {}", caller.identity(), RoleName(role), group,
                     Explain(*rule));
}

}  // namespace refitd
