#include "transport/derive/row_loops.h"

namespace refitd::derive {

constinit const RowKernels kAvx512Rows = {
    .name = "avx512", .amax = Amax, .quantise = Quantise, .cast = Cast};

}  // namespace refitd::derive
