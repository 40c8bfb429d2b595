// Messages about a tensor that one side lacks, or has in another dtype, end with this advice. Pure;
// thread-safe.
#ifndef REFITD_TRANSPORT_PLAN_NAME_ADVICE_H_
#define REFITD_TRANSPORT_PLAN_NAME_ADVICE_H_

#include <functional>
#include <string>
#include <string_view>

#include "transport/plan/layout.h"

namespace refitd {

// No engine knows the trainers' tensor.
inline constexpr std::string_view kAdviceUnwanted =
    "if no engine wants it, list it in the group's unwanted_tensors";
// No trainer has the engine's tensor.
inline constexpr std::string_view kAdviceEngineOnly =
    "if the engine keeps it itself, list it in the group's engine_only_tensors; if it shares "
    "another tensor's memory, register it with tied=";

// Returns the end of a message, "; ...", about a name that one side lacks. If the other side knows
// the name with or without the names of modules that wrap a model ("_orig_mod.", "module."), that
// is said; else `otherwise`, the advice for a name that is really unknown.
std::string NameAdvice(std::string_view name, const std::function<bool(std::string_view)>& known,
                       std::string_view otherwise);

// Returns the end of a message, "; ...", that names what casts, where a trainer's tensor and an
// engine's differ in their dtypes alone; else "".
std::string CastAdvice(const TensorSpec& trainers, const TensorSpec& engines);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_NAME_ADVICE_H_
