// Strided boxes as loops over the digest's row kernels.
#include "transport/host/box_copy.h"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "transport/base/status.h"
#include "transport/host/host_transport.h"

namespace refitd {
namespace {

// One dimension of a box, or several that are contiguous with each other in memory and in p.
struct Loop {
  int64_t extent = 1;
  int64_t p = 0;     // elements of the global index from one step to the next
  int64_t to = 0;    // bytes
  int64_t from = 0;  // bytes
};

// The loops that together visit a box, the innermost first.
struct Loops {
  std::array<Loop, kMaxDims + 1> loop;
  int count = 0;
  int64_t elements = 1;

  bool Continues(const Loop& next, bool with_p) const {
    const Loop& inner = loop[static_cast<size_t>(count - 1)];
    return next.to == inner.extent * inner.to && next.from == inner.extent * inner.from &&
           (!with_p || next.p == inner.extent * inner.p);
  }
  void Add(const Loop& next, bool with_p) {
    elements *= next.extent;
    if (next.extent == 1) return;
    if (count > 0 && Continues(next, with_p)) {
      loop[static_cast<size_t>(count - 1)].extent *= next.extent;
    } else {
      loop[static_cast<size_t>(count++)] = next;
    }
  }
};

// Makes the loops over a box. Dimensions are joined into one loop where they are contiguous in
// memory and, if `with_p`, in p too.
Loops MakeLoops(const Dims& to_strides, const Dims& from_strides, const Box& box, const Dims& shape,
                int64_t element_bytes, bool with_p) {
  REFITD_CHECK(shape.size() <= kMaxDims);
  Loops loops;
  int64_t p = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    loops.Add({.extent = box.extent[d],
               .p = p,
               .to = to_strides[d] * element_bytes,
               .from = from_strides[d] * element_bytes},
              with_p);
    p *= shape[d];
  }
  return loops;
}

// The work of one step of the outer loops: `rows`, the first of which begins at the step's first
// element.
struct Step {
  DigestRows rows;
  int64_t to_stride = 0;    // bytes between elements of a row
  int64_t from_stride = 0;  // bytes
};

// Makes a step of the innermost loops, at most two; *outer_begin becomes the index of the first
// loop outside the step.
Step MakeStep(const Loops& loops, int64_t element_bytes, int64_t first, int* outer_begin) {
  Step step;
  step.rows.first = first;
  step.to_stride = element_bytes;
  step.from_stride = element_bytes;
  size_t next = 0;
  const auto count = static_cast<size_t>(loops.count);
  if (count > 0 && loops.loop[0].p == 1) {
    step.rows.count = loops.loop[0].extent;
    step.to_stride = loops.loop[0].to;
    step.from_stride = loops.loop[0].from;
    next = 1;
  } else {
    step.rows.count = 1;  // a column, or a single element
  }
  if (next < count) {
    const Loop& loop = loops.loop[next];
    step.rows.rows = loop.extent;
    step.rows.first_stride = loop.p;
    step.rows.to_stride = loop.to;
    step.rows.from_stride = loop.from;
    ++next;
  }
  *outer_begin = static_cast<int>(next);
  return step;
}

// Calls visit(p, to, from) once for each step of the loops from loop `begin` outwards. `p` (in
// elements of the global index), `to` and `from` (in bytes) are the step's distances from the first
// step.
template <typename Visit>
void ForEach(const Loops& loops, int begin, Visit visit) {
  std::array<int64_t, kMaxDims + 1> index = {};
  int64_t p = 0;
  int64_t to = 0;
  int64_t from = 0;
  while (true) {
    visit(p, to, from);
    int at = begin;
    for (; at < loops.count; ++at) {
      const Loop& loop = loops.loop[static_cast<size_t>(at)];
      int64_t& i = index[static_cast<size_t>(at)];
      ++i;
      p += loop.p;
      to += loop.to;
      from += loop.from;
      if (i < loop.extent) break;
      p -= i * loop.p;
      to -= i * loop.to;
      from -= i * loop.from;
      i = 0;
    }
    if (at == loops.count) return;
  }
}

#if defined(__x86_64__)
#define REFITD_NO_THREAD_CHECKS __attribute__((no_sanitize("thread")))

// Copies every second element to contiguous memory. The elements between them, which may belong to
// another piece, are loaded and ignored, even if another thread writes them. Returns how many
// elements it copied: a multiple of 16 bytes' worth that leaves out the last element, so that
// nothing behind it is loaded.
template <int kBytes>
REFITD_NO_THREAD_CHECKS int64_t TakeEverySecond(char* to, const char* from, int64_t count) {
  constexpr int64_t kLanes = 16 / kBytes;
  int64_t done = 0;
  for (; done + kLanes < count; done += kLanes) {
    const auto* const at = reinterpret_cast<const __m128i*>(from + 2 * kBytes * done);
    const __m128i low = _mm_loadu_si128(at);
    const __m128i high = _mm_loadu_si128(at + 1);
    __m128i packed;
    if constexpr (kBytes == 1) {
      const __m128i mask = _mm_set1_epi16(0xff);
      packed = _mm_packus_epi16(_mm_and_si128(low, mask), _mm_and_si128(high, mask));
    } else if constexpr (kBytes == 2) {
      // The elements are widened with their signs, so that packing leaves each of them as it is.
      packed = _mm_packs_epi32(_mm_srai_epi32(_mm_slli_epi32(low, 16), 16),
                               _mm_srai_epi32(_mm_slli_epi32(high, 16), 16));
    } else if constexpr (kBytes == 4) {
      packed = _mm_castps_si128(
          _mm_shuffle_ps(_mm_castsi128_ps(low), _mm_castsi128_ps(high), _MM_SHUFFLE(2, 0, 2, 0)));
    } else {
      packed = _mm_unpacklo_epi64(low, high);
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + kBytes * done), packed);
  }
  return done;
}
#else
template <int kBytes>
int64_t TakeEverySecond(char* /*to*/, const char* /*from*/, int64_t /*count*/) {
  return 0;
}
#endif

// Copies contiguous elements to places that lie apart. They are loaded eight bytes at a time, and
// stored one by one, because the bytes between them belong to others.
template <int kBytes>
int64_t SpreadOut(char* to, int64_t to_stride, const char* from, int64_t count) {
  constexpr int64_t kInWord = 8 / kBytes;
  int64_t done = 0;
  for (; done + kInWord <= count; done += kInWord) {
    uint64_t word = 0;
    std::memcpy(&word, from + kBytes * done, sizeof(word));
    char* at = to + to_stride * done;
#pragma GCC unroll 8
    for (int64_t i = 0; i < kInWord; ++i) {
      std::memcpy(at, &word, kBytes);  // little-endian (digest.h)
      if constexpr (kBytes < 8) word >>= 8 * kBytes;
      at += to_stride;
    }
  }
  return done;
}

template <int kBytes>
void MoveElements(char* to, int64_t to_stride, const char* from, int64_t from_stride,
                  int64_t count) {
  int64_t done = 0;
  if (to_stride == kBytes && from_stride == kBytes) {
    std::memcpy(to, from, static_cast<size_t>(kBytes * count));
    return;
  }
  if (to_stride == kBytes && from_stride == 2 * kBytes) {
    done = TakeEverySecond<kBytes>(to, from, count);
  } else if (from_stride == kBytes) {
    done = SpreadOut<kBytes>(to, to_stride, from, count);
  }
  for (; done < count; ++done) {
    std::memcpy(to + done * to_stride, from + done * from_stride, kBytes);
  }
}

void MoveElements(char* to, int64_t to_stride, const char* from, int64_t from_stride, int64_t count,
                  int element_bytes) {
  switch (element_bytes) {
    case 1:
      return MoveElements<1>(to, to_stride, from, from_stride, count);
    case 2:
      return MoveElements<2>(to, to_stride, from, from_stride, count);
    case 4:
      return MoveElements<4>(to, to_stride, from, from_stride, count);
    default:
      return MoveElements<8>(to, to_stride, from, from_stride, count);
  }
}

// Copies rows whose elements don't lie side by side (a transposed tensor, or gate and up that
// alternate). Elements are gathered into a small buffer, which is then digested and stored, so that
// the digest is of the stored bytes even if the source changes meanwhile. If `to` is null, nothing
// is stored.
uint64_t ScatteredRows(char* to, const char* from, int element_bytes, const Step& step,
                       bool with_digest) {
  constexpr int64_t kBufferBytes = 4096;
  alignas(64) char buffer[kBufferBytes];
  const int64_t most = kBufferBytes / element_bytes;
  const DigestKernels& kernels = BestDigestKernels();
  uint64_t digest = 0;
  for (int64_t row = 0; row < step.rows.rows; ++row) {
    if (!with_digest) {
      MoveElements(to + row * step.rows.to_stride, step.to_stride,
                   from + row * step.rows.from_stride, step.from_stride, step.rows.count,
                   element_bytes);
      continue;
    }
    for (int64_t done = 0; done < step.rows.count; done += most) {
      const int64_t now = std::min(most, step.rows.count - done);
      MoveElements(buffer, element_bytes,
                   from + row * step.rows.from_stride + done * step.from_stride, step.from_stride,
                   now, element_bytes);
      digest += kernels.digest(buffer, element_bytes,
                               step.rows.first + row * step.rows.first_stride + done, now);
      if (to == nullptr) continue;
      MoveElements(to + row * step.rows.to_stride + done * step.to_stride, step.to_stride, buffer,
                   element_bytes, now, element_bytes);
    }
  }
  return digest;
}

}  // namespace

uint64_t DigestBox(const char* data, const Dims& strides, const Box& box, const Dims& shape,
                   int element_bytes) {
  const Loops loops = MakeLoops(strides, strides, box, shape, element_bytes, true);
  if (loops.elements == 0) return 0;
  int outer = 0;
  const int64_t first = FirstIndex(box, shape);
  Step step = MakeStep(loops, element_bytes, first, &outer);
  const bool dense = step.from_stride == element_bytes;
  const DigestKernels& kernels = BestDigestKernels();
  uint64_t digest = 0;
  ForEach(loops, outer, [&](int64_t p, int64_t /*to*/, int64_t from) {
    step.rows.first = first + p;
    digest += dense ? kernels.digest_rows(data + from, element_bytes, step.rows)
                    : ScatteredRows(nullptr, data + from, element_bytes, step, true);
  });
  return digest;
}

uint64_t CopyBoxUnfenced(char* to, const Dims& to_strides, const char* from,
                         const Dims& from_strides, const Box& box, const Dims& shape,
                         int element_bytes, const BoxCopyOptions& options) {
  const bool with_digest = options.with_digest;
  const Loops loops = MakeLoops(to_strides, from_strides, box, shape, element_bytes, with_digest);
  if (loops.elements == 0) return 0;
  int outer = 0;
  const int64_t first = FirstIndex(box, shape);
  Step step = MakeStep(loops, element_bytes, first, &outer);
  step.rows.prefetch = options.prefetch;
  const bool dense = step.from_stride == element_bytes && step.to_stride == element_bytes;
  const DigestKernels& kernels = BestDigestKernels();
  uint64_t digest = 0;
  ForEach(loops, outer, [&](int64_t p, int64_t to_at, int64_t from_at) {
    step.rows.first = first + p;
    if (!dense) {
      digest += ScatteredRows(to + to_at, from + from_at, element_bytes, step, with_digest);
    } else if (with_digest) {
      digest += kernels.copy_and_digest_rows(to + to_at, from + from_at, element_bytes, step.rows,
                                             options.mode);
    } else {
      kernels.copy_rows(to + to_at, from + from_at, element_bytes, step.rows, options.mode);
    }
  });
  return digest;
}

}  // namespace refitd
