// What to do about a tensor's name that one side knows and another does not, for messages.
//
// Pure; thread-safe.
#ifndef REFITD_TRANSPORT_PLAN_NAME_HINT_H_
#define REFITD_TRANSPORT_PLAN_NAME_HINT_H_

#include <functional>
#include <string>
#include <string_view>

namespace refitd {

// If the other side knows the tensor with or without the names of modules that wrap a model
// ("_orig_mod." of torch.compile, "module." of DistributedDataParallel): the name that is known and
// that the wrapper is no part of it. Else `otherwise`, the advice for a name that is really
// unknown. Begins with "; ". `known`: whether the other side knows a name.
std::string NameHint(std::string_view name, const std::function<bool(std::string_view)>& known,
                     std::string_view otherwise);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_NAME_HINT_H_
