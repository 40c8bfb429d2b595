// Messages about a tensor that one side lacks end with this advice.
#ifndef REFITD_TRANSPORT_PLAN_NAME_ADVICE_H_
#define REFITD_TRANSPORT_PLAN_NAME_ADVICE_H_

#include <string_view>

namespace refitd {

// No engine knows the trainers' tensor.
inline constexpr std::string_view kAdviceUnwanted =
    "if no engine wants it, list it in the group's unwanted_tensors";
// No trainer has the engine's tensor.
inline constexpr std::string_view kAdviceEngineOnly =
    "if the engine keeps it itself, list it in the group's engine_only_tensors; if it shares "
    "another tensor's memory, register it with tied=";

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_NAME_ADVICE_H_
