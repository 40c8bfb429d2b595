#include "transport/plan/name_patterns.h"

#include <catch2/catch.hpp>

namespace refitd {
namespace {

TEST_CASE("an exact name, a prefix and a glob are patterns of one syntax") {
  CHECK(MatchesPattern("model.norm.weight", "model.norm.weight"));
  CHECK_FALSE(MatchesPattern("model.norm.weight", "model.norm.weigh"));
  CHECK_FALSE(MatchesPattern("model.norm", "model.norm.weight"));
  CHECK(MatchesPattern("mtp.*", "mtp.layers.0.weight"));
  CHECK_FALSE(MatchesPattern("mtp.*", "mtp"));
  CHECK(MatchesPattern("*.rotary_emb.inv_freq", "model.layers.3.rotary_emb.inv_freq"));
  CHECK(MatchesPattern("*.experts.*.bias", "model.layers.3.experts.17.up.bias"));
  CHECK_FALSE(MatchesPattern("*.experts.*.bias", "model.layers.3.experts.17.up.weight"));
  CHECK(MatchesPattern("layers.?.w", "layers.7.w"));
  CHECK_FALSE(MatchesPattern("layers.?.w", "layers.17.w"));
  CHECK(MatchesPattern("*", ""));
  CHECK(MatchesPattern("**", "a"));
  CHECK(MatchesPattern("", ""));
  CHECK_FALSE(MatchesPattern("", "a"));
  CHECK_FALSE(MatchesPattern("?", ""));
}

TEST_CASE("brackets and dots of a pattern stand for themselves") {
  CHECK(MatchesPattern("layers[1].w", "layers[1].w"));
  CHECK_FALSE(MatchesPattern("layers[1].w", "layers1.w"));
  CHECK_FALSE(MatchesPattern("a.b", "axb"));
}

TEST_CASE("a pattern of many stars takes no more than the product of the lengths") {
  const std::string name(512, 'a');
  std::string pattern;
  for (int i = 0; i < 250; ++i) pattern += "*a";
  CHECK_FALSE(MatchesPattern(pattern + "b", name));
  CHECK(MatchesPattern(pattern, name));
}

TEST_CASE("a sorted list of names and patterns matches what any of them matches") {
  const std::vector<std::string> names = {"*.bias", "head", "mtp.*"};
  for (const char* name : {"x.bias", "head", "mtp.0"}) CHECK(MatchesAny(names, name));
  for (const char* name : {"heads", "bias", "mtp"}) CHECK_FALSE(MatchesAny(names, name));
}

}  // namespace
}  // namespace refitd
