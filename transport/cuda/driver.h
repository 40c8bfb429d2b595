// What the machine's CUDA driver says: is there one, of which version, with which devices.
//
// The daemon is one binary with and without GPUs. CUDA's headers decide at build time whether this
// knows the driver's calls (third_party/cuda); the driver itself, libcuda.so.1, is loaded at run
// time, and where it or a device is missing the report says so in words. No context is created: no
// device memory is taken. A driver once loaded stays loaded.
//
// No CUDA type appears here.
//
// Thread-safe. A probe takes up to seconds where the driver has to wake devices.
#ifndef REFITD_TRANSPORT_CUDA_DRIVER_H_
#define REFITD_TRANSPORT_CUDA_DRIVER_H_

#include <cstdint>
#include <string>
#include <vector>

namespace refitd {

struct CudaDevice {
  int ordinal = 0;   // the driver's, in this process: CUDA_VISIBLE_DEVICES changes it
  std::string uuid;  // "GPU-01234567-89ab-cdef-0123-456789abcdef": what refitd names a device by
  std::string name;  // "NVIDIA H200"
  int64_t memory_bytes = 0;
};

// Versions as CUDA counts them: 1000 * major + 10 * minor.
struct CudaReport {
  int compiled_version = 0;  // of the headers; 0: built without CUDA
  int driver_version = 0;    // the newest CUDA that the driver serves; 0: no driver
  // Every device that answered; one that did not is named in `problem`.
  std::vector<CudaDevice> devices;
  // Why there is no driver, no device, or not every device; empty if all is well, and where CUDA is
  // not compiled in.
  std::string problem;
};

// Probes the system's driver, once in the process: callers that come meanwhile wait, later ones get
// the same report.
CudaReport ProbeCuda();

// Probes `library` (as for dlopen), each time.
CudaReport ProbeCudaLibrary(const std::string& library);

// "CUDA 13.0", "CUDA not compiled in".
std::string CudaBuild();

// In one line for people: "CUDA 13.0 headers compiled in; <problem>".
std::string Describe(const CudaReport& report);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_DRIVER_H_
