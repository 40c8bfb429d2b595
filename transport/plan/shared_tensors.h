// One copy, in this process, of lists of tensors that are equal.
//
// The ranks of a model mostly declare the same names, dtypes and shapes, some 150 bytes a tensor: a
// coordinator of 256 ranks of 18,867 tensors each would keep 700 MB of them, and keeps 3.
#ifndef REFITD_TRANSPORT_PLAN_SHARED_TENSORS_H_
#define REFITD_TRANSPORT_PLAN_SHARED_TENSORS_H_

#include "transport/plan/layout.h"

namespace refitd {

// Makes the layout refer to the list of tensors of an equal one that was given before and to which
// a layout still refers; else keeps its own list for those that come. Reads each tensor once or
// twice. Thread-safe.
void ShareTensors(Layout* layout);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_PLAN_SHARED_TENSORS_H_
