// Describes events and actions: as numbers for the trace's hash and as text for people. Common
// fields come with their names, values inside follow.
#ifndef REFITD_TESTS_SIM_DESCRIBE_H_
#define REFITD_TESTS_SIM_DESCRIBE_H_

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

#include "daemon/group/machine.h"

namespace refitd::sim {

// The name of a type, as in "SendCommand", from the compiler's own name of this function.
template <typename T>
constexpr std::string_view TypeName() {
  std::string_view name = __PRETTY_FUNCTION__;
  const size_t start = name.find("T = ");
  name.remove_prefix(start + 4);
  name = name.substr(0, name.find_first_of(";]"));
  const size_t scope = name.rfind("::");
  return scope == std::string_view::npos ? name : name.substr(scope + 2);
}

class Describer {
 public:
  // With `text`, words are collected as well.
  Describer(uint64_t* hash, std::string* text) : hash_(hash), text_(text) {}

  template <typename... Ts>
  void Add(const std::variant<Ts...>& v) {
    Number(v.index());
    std::visit([this](const auto& x) { Add(x); }, v);
  }
  template <typename T>
  void Add(const T& x) {
    if (text_ != nullptr) fmt::format_to(std::back_inserter(*text_), " {}", TypeName<T>());
#define REFITD_SIM_FIELD(field) \
  if constexpr (requires { x.field; }) Field(#field, x.field)
    REFITD_SIM_FIELD(node);
    REFITD_SIM_FIELD(member);
    REFITD_SIM_FIELD(call);
    REFITD_SIM_FIELD(update);
    REFITD_SIM_FIELD(version);
    REFITD_SIM_FIELD(part);
    REFITD_SIM_FIELD(communicator);
    REFITD_SIM_FIELD(seq);
    REFITD_SIM_FIELD(wire_seq);
    REFITD_SIM_FIELD(rank);
    REFITD_SIM_FIELD(slot);
    REFITD_SIM_FIELD(grant);
    REFITD_SIM_FIELD(fill_slot);
    REFITD_SIM_FIELD(source_slot);
    REFITD_SIM_FIELD(wired);
    REFITD_SIM_FIELD(is_root);
    REFITD_SIM_FIELD(digest);
    REFITD_SIM_FIELD(number);
    REFITD_SIM_FIELD(dirty);
    REFITD_SIM_FIELD(outcome);
    REFITD_SIM_FIELD(wire_failed);
    REFITD_SIM_FIELD(status);
    REFITD_SIM_FIELD(reason);
    REFITD_SIM_FIELD(holder);
    REFITD_SIM_FIELD(text);
    REFITD_SIM_FIELD(request_id);
    REFITD_SIM_FIELD(program);
    REFITD_SIM_FIELD(build);
    REFITD_SIM_FIELD(step);
    REFITD_SIM_FIELD(round);
    REFITD_SIM_FIELD(rounds);
#undef REFITD_SIM_FIELD
    if constexpr (requires { x.event; }) Add(x.event);
    if constexpr (requires { x.report; }) Add(x.report);
    if constexpr (requires { x.command; }) Add(x.command);
    if constexpr (requires { x.header; }) Add(x.header);
  }

 private:
  void Number(uint64_t n) { *hash_ = (*hash_ ^ n) * 0x100000001b3; }
  template <typename T>
  void Field(std::string_view name, const T& value) {
    if constexpr (requires { value.has_value(); }) {  // an optional id, grant or number
      if (value.has_value()) Field(name, *value);
    } else if constexpr (std::is_same_v<T, SlotGrant>) {
      Field(name, value.slot);
      Field("grant", value.grant);
    } else if constexpr (requires { static_cast<uint64_t>(value.value()); }) {
      Number(static_cast<uint64_t>(value.value()));
      Text(name, value.value());
    } else if constexpr (std::is_same_v<T, absl::Status>) {
      Number(static_cast<uint64_t>(value.code()));
      if (!value.ok()) Text(name, value.ToString());
    } else if constexpr (std::is_same_v<T, std::string>) {
      if (!value.empty()) Text(name, value);
    } else if constexpr (std::is_enum_v<T>) {
      Number(static_cast<uint64_t>(value));
      Text(name, static_cast<int>(value));
    } else if constexpr (std::is_integral_v<T>) {
      Number(static_cast<uint64_t>(value));
      Text(name, value);
    }
  }
  template <typename T>
  void Text(std::string_view name, const T& value) {
    if (text_ != nullptr) fmt::format_to(std::back_inserter(*text_), " {}={}", name, value);
  }

  uint64_t* const hash_;
  std::string* const text_;
};

}  // namespace refitd::sim

#endif  // REFITD_TESTS_SIM_DESCRIBE_H_
