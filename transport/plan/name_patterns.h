// Patterns of tensors' names, in one syntax everywhere: '*' stands for any characters, '?' for any
// one character, and every other character for itself. So an exact name and a prefix with '*' at
// its end are patterns too. `compiled` in client/python/refitd/layout/__init__.py is the same in
// Python.
//
// Pure functions; thread-safe. Time: at most the product of both lengths (P10).
#ifndef REFITD_TRANSPORT_PLAN_NAME_PATTERNS_H_
#define REFITD_TRANSPORT_PLAN_NAME_PATTERNS_H_

#include <string>
#include <string_view>
#include <vector>

namespace refitd {

// Whether the text is more than an exact name.
inline bool IsPattern(std::string_view text) {
  return text.find_first_of("*?") != std::string_view::npos;
}

bool MatchesPattern(std::string_view pattern, std::string_view name);

// Whether the name is one of `names`, which are sorted, or matches a pattern among them.
bool MatchesAny(const std::vector<std::string>& names, std::string_view name);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_NAME_PATTERNS_H_
