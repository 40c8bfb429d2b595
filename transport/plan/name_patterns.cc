#include "transport/plan/name_patterns.h"

#include <algorithm>

namespace refitd {

bool MatchesPattern(std::string_view pattern, std::string_view name) {
  size_t p = 0;
  size_t n = 0;
  // The last '*', and how far into the name it stretches.
  size_t star = std::string_view::npos;
  size_t stretched = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      stretched = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p;
      ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++stretched;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

bool MatchesAny(const std::vector<std::string>& names, std::string_view name) {
  return std::binary_search(names.begin(), names.end(), name) ||
         std::any_of(names.begin(), names.end(), [name](const std::string& each) {
           return IsPattern(each) && MatchesPattern(each, name);
         });
}

}  // namespace refitd
