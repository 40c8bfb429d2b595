// Compares the table of RPCs with the services in the protos when it is compiled.
#include "daemon/policy/rpcs.h"

#include <algorithm>

namespace refitd {
namespace {

constexpr bool HasEntry(std::string_view method) {
  return std::any_of(kRpcs.begin(), kRpcs.end(),
                     [method](const RpcEntry& entry) { return entry.method == method; });
}

#define REFITD_RPC_METHOD(method) static_assert(HasEntry(method), method " has no entry in kRpcs");
#include "proto/rpc_methods.inc"
#undef REFITD_RPC_METHOD

#define REFITD_RPC_METHOD(method) std::string_view(method),
constexpr std::array kServed = {
#include "proto/rpc_methods.inc"
};
#undef REFITD_RPC_METHOD

static_assert(std::all_of(kRpcs.begin(), kRpcs.end(),
                          [](const RpcEntry& entry) {
                            return std::find(kServed.begin(), kServed.end(), entry.method) !=
                                   kServed.end();
                          }),
              "an entry of kRpcs names a method that no service has");

}  // namespace
}  // namespace refitd
