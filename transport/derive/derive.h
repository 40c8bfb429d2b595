// Computes boxes of derived tensors in host memory (transport/plan/derived.h).
//
// Pure functions, thread-safe; the instruction set is chosen once at run time.
#ifndef REFITD_TRANSPORT_DERIVE_DERIVE_H_
#define REFITD_TRANSPORT_DERIVE_DERIVE_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "transport/derive/rows.h"
#include "transport/plan/layout.h"
#include "transport/transport.h"

namespace refitd {

// Computes `box` of the derived tensor, all of whose blocks must be held, and stores it row-major
// without gaps at `to`. `dtype`: of the derived tensor; `to` is aligned to its size. The box has at
// least one element. Reads the blocks that the box meets as a whole; blocks of several shards are
// copied together first, for the calling thread, so that each element is read once. Returns the
// indices in the held tensor of an element for which the kind has no result (an infinity, NaN, or a
// number whose block has no finite scale); what is stored then is not defined. Casts have results
// for all elements.
std::optional<Dims> Derive(const HeldPiece& held, DType dtype, const Box& box, char* to);

// As Derive, with the given kernels; for tests.
std::optional<Dims> DeriveBy(const derive::RowKernels& kernels, const HeldPiece& held, DType dtype,
                             const Box& box, char* to);

// The kernels that this CPU can run, scalar first; tests compare each with the others.
std::vector<const derive::RowKernels*> AllRowKernels();

}  // namespace refitd

#endif  // REFITD_TRANSPORT_DERIVE_DERIVE_H_
