/* The model of the examples: four tensors of mixed types, whose bits follow from the version.
 * Trainer and engine compute them apart, so that an engine can check its memory by itself. C11 and
 * C++. */
#ifndef REFITD_CLIENT_EXAMPLES_VALUES_H_
#define REFITD_CLIENT_EXAMPLES_VALUES_H_

#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { kTensors = 4 };

typedef struct example_tensor {
  const char* name;
  int32_t dtype; /* number of refitd.v1.DType */
  int32_t dim_count;
  int64_t dims[2];
  int64_t element_bytes;
} example_tensor;

static const example_tensor kModel[kTensors] = {
    {"embed.weight", 2 /* float32 */, 2, {640, 48}, 4},
    {"layer.weight", 4 /* bfloat16 */, 2, {96, 80}, 2},
    {"layer.bias", 2 /* float32 */, 1, {96, 0}, 4},
    {"steps", 7 /* int64 */, 1, {3, 0}, 8},
};

static inline int64_t example_elements(int tensor) {
  int64_t count = 1;
  for (int32_t i = 0; i < kModel[tensor].dim_count; ++i) count *= kModel[tensor].dims[i];
  return count;
}

static inline int64_t example_bytes(int tensor) {
  return example_elements(tensor) * kModel[tensor].element_bytes;
}

/* Where the examples put a tensor in their memory: one after the other, 512 bytes apart. */
static inline int64_t example_offset(int tensor) {
  int64_t offset = 0;
  for (int i = 0; i < tensor; ++i) offset += (example_bytes(i) + 511) / 512 * 512;
  return offset;
}

/* The bits of element `index`. A tensor stores the low element_bytes of them. */
static inline uint64_t example_bits(int64_t version, int tensor, int64_t index) {
  uint64_t x = (uint64_t)version * 0x9E3779B97F4A7C15u +
               (uint64_t)(tensor + 1) * 0xD1342543DE82EF95u + (uint64_t)index * 0x2545F4914F6CDD1Du;
  x ^= x >> 32;
  x *= 0xDA942042E4DD58B5u;
  return x ^ (x >> 29);
}

static inline void example_fill(int64_t version, int tensor, char* data) {
  const int64_t size = kModel[tensor].element_bytes;
  for (int64_t i = 0; i < example_elements(tensor); ++i) {
    const uint64_t bits = example_bits(version, tensor, i); /* little endian, as the wire is */
    memcpy(data + i * size, &bits, (size_t)size);
  }
}

/* Returns 1 if all tensors, laid out by example_offset, hold `version`; else says which tensor does
 * not. */
static inline int example_check(int64_t version, const char* data) {
  for (int tensor = 0; tensor < kTensors; ++tensor) {
    const int64_t size = kModel[tensor].element_bytes;
    for (int64_t i = 0; i < example_elements(tensor); ++i) {
      const uint64_t bits = example_bits(version, tensor, i);
      if (memcmp(data + example_offset(tensor) + i * size, &bits, (size_t)size) != 0) {
        fprintf(stderr, "version %lld: %s[%lld] is wrong\n", (long long)version,
                kModel[tensor].name, (long long)i);
        return 0;
      }
    }
  }
  return 1;
}

#endif /* REFITD_CLIENT_EXAMPLES_VALUES_H_ */
