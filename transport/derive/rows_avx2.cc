#include "transport/derive/row_loops.h"

namespace refitd::derive {

constinit const RowKernels kAvx2Rows = {
    .name = "avx2", .amax = Amax, .quantise = Quantise, .cast = Cast};

}  // namespace refitd::derive
