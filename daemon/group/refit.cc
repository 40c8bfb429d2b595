// Compiled refit: one call a version with registered layouts.
#include "daemon/group/group_impl.h"

namespace refitd {

void Group::Impl::On(const RefitEvent& e) {
  Refuse(e.call, absl::UnimplementedError("compiled refits are not served yet"));
}
void Group::Impl::On(const ProgramCompiled&) {}
void Group::Impl::On(const CompareDone&) {}
void Group::Impl::On(const RefitDone&) {}

}  // namespace refitd
