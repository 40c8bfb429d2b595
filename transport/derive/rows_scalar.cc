#include "transport/derive/row_loops.h"

namespace refitd::derive {

constinit const RowKernels kScalarRows = {
    .name = "scalar", .amax = Amax, .quantise = Quantise, .cast = Cast};

}  // namespace refitd::derive
