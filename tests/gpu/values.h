// The values that ranks of the GPU tests write and expect: every element of every tensor has a
// value of its own, computed from the tensor, its row-major index in the global shape, the version
// and a seed. Kernels (fill.cu) and the host share this code.
//
// A Task is a piece of a layout with its strides; dimensions that are contiguous with each other
// are merged. A Chunk is a run of a task's elements that one block of threads handles.
#ifndef REFITD_TESTS_GPU_VALUES_H_
#define REFITD_TESTS_GPU_VALUES_H_

#include <cstdint>

#if defined(__CUDACC__)
#define REFITD_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define REFITD_HOST_DEVICE inline
#endif

namespace refitd::gpu {

inline constexpr int64_t kChunkElements = 65'536;
inline constexpr int kTaskDims = 8;

struct Task {
  uint64_t address = 0;      // the address of the box's first element
  uint64_t tensor_hash = 0;  // TensorHash of transport/plan/layout.h
  int64_t elements = 0;
  int64_t first_index = 0;  // the box's first element in the global tensor
  int32_t element_bytes = 0;
  int32_t dims = 0;
  int64_t extent[kTaskDims] = {};
  int64_t stride[kTaskDims] = {};         // elements of storage
  int64_t global_stride[kTaskDims] = {};  // elements of the global tensor
};

struct Chunk {
  int64_t first = 0;  // element of the task's box, row-major
  int64_t count = 0;
  uint64_t task = 0;
};

// The number of wrong elements, and the first of them: the least (task << 40 | element of the box).
struct Wrong {
  unsigned long long count = 0;
  unsigned long long first = ~0ULL;
};

REFITD_HOST_DEVICE uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

REFITD_HOST_DEVICE uint64_t Salt(uint64_t version, uint64_t seed) {
  return Mix(Mix(seed + 0x9e3779b97f4a7c15) ^ version * 0xd1342543de82ef95);
}

// The low `element_bytes` bytes are the element.
REFITD_HOST_DEVICE uint64_t Value(uint64_t tensor_hash, uint64_t salt, int64_t index,
                                  int32_t element_bytes) {
  const uint64_t x = Mix((tensor_hash ^ salt) + static_cast<uint64_t>(index) * 0x9e3779b97f4a7c15);
  return x >> (64 - 8 * element_bytes);
}

struct Place {
  int64_t storage = 0;  // elements from Task::address
  int64_t index = 0;    // the element's index in the global tensor
};

REFITD_HOST_DEVICE Place Locate(const Task& task, int64_t element) {
  Place place{0, task.first_index};
  for (int d = task.dims - 1; d >= 0; --d) {
    int64_t at = element;
    if (d > 0) {
      const int64_t extent = task.extent[d];
      // Divisions of 32 bits are several times faster on a GPU.
      const int64_t rest =
          element < INT64_C(0xffffffff) && extent < INT64_C(0xffffffff)
              ? static_cast<int64_t>(static_cast<uint32_t>(element) / static_cast<uint32_t>(extent))
              : element / extent;
      at = element - rest * extent;
      element = rest;
    }
    place.storage += at * task.stride[d];
    place.index += at * task.global_stride[d];
  }
  return place;
}

REFITD_HOST_DEVICE void StoreElement(const Task& task, int64_t storage, uint64_t value) {
  switch (task.element_bytes) {
    case 1:
      reinterpret_cast<uint8_t*>(task.address)[storage] = static_cast<uint8_t>(value);
      break;
    case 2:
      reinterpret_cast<uint16_t*>(task.address)[storage] = static_cast<uint16_t>(value);
      break;
    case 4:
      reinterpret_cast<uint32_t*>(task.address)[storage] = static_cast<uint32_t>(value);
      break;
    default:
      reinterpret_cast<uint64_t*>(task.address)[storage] = value;
  }
}

REFITD_HOST_DEVICE uint64_t LoadElement(const Task& task, int64_t storage) {
  switch (task.element_bytes) {
    case 1:
      return reinterpret_cast<const uint8_t*>(task.address)[storage];
    case 2:
      return reinterpret_cast<const uint16_t*>(task.address)[storage];
    case 4:
      return reinterpret_cast<const uint32_t*>(task.address)[storage];
    default:
      return reinterpret_cast<const uint64_t*>(task.address)[storage];
  }
}

// Loads the element at `place`, if it is one of the `count` elements from row-major index `start`
// on that lie one after the other at the address `from`.
REFITD_HOST_DEVICE void LoadFrom(const Task& task, const Place& place, uint64_t from, int64_t start,
                                 int64_t count) {
  if (place.index < start || place.index >= start + count) return;
  Task source;
  source.address = from;
  source.element_bytes = task.element_bytes;
  StoreElement(task, place.storage, LoadElement(source, place.index - start));
}

}  // namespace refitd::gpu

#endif  // REFITD_TESTS_GPU_VALUES_H_
