#include "transport/plan/name_advice.h"

#include <fmt/format.h>

#include <array>

namespace refitd {
namespace {

constexpr std::string_view kCompiled = "_orig_mod.";  // also in the middle: of compiled submodules
constexpr std::string_view kParallel = "module.";
constexpr std::array<std::string_view, 4> kWrappers = {"_orig_mod.", "module.", "module._orig_mod.",
                                                       "_orig_mod.module."};

std::string WithoutWrappers(std::string_view name) {
  std::string plain(name);
  for (size_t at = 0; (at = plain.find(kCompiled, at)) != std::string::npos;) {
    plain.erase(at, kCompiled.size());
  }
  while (plain.starts_with(kParallel)) plain.erase(0, kParallel.size());
  return plain;
}

std::string Hint(std::string_view known) {
  return fmt::format(
      "; '{}' is known: \"_orig_mod.\" (torch.compile) and \"module.\" (DistributedDataParallel) "
      "are no part of a name, so take the names from the model that is wrapped",
      known);
}

}  // namespace

std::string NameAdvice(std::string_view name, const std::function<bool(std::string_view)>& known,
                       std::string_view otherwise) {
  const std::string plain = WithoutWrappers(name);
  if (plain != name && known(plain)) return Hint(plain);
  for (const std::string_view wrapper : kWrappers) {
    const std::string wrapped = fmt::format("{}{}", wrapper, name);
    if (known(wrapped)) return Hint(wrapped);
  }
  return fmt::format("; {}", otherwise);
}

std::string CastAdvice(const TensorSpec& trainers, const TensorSpec& engines) {
  const bool derived = trainers.derived != nullptr || engines.derived != nullptr;
  if (derived || trainers.dtype == engines.dtype || trainers.shape != engines.shape) return "";
  return fmt::format(
      "; a trainer's register(dtype=) casts to {} on the way, and what is pushed by itself is cast "
      "before",
      DTypeName(engines.dtype));
}

}  // namespace refitd
