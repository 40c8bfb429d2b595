// Asks the machine's CUDA driver: whether there is one, its version, its devices.
//
// The daemon is one binary with and without GPUs. Whether this code knows the driver's calls is
// decided at build time by CUDA's headers (third_party/cuda). The driver itself, libcuda.so.1, is
// loaded at run time; if it or a device is missing, the report says so in words. No context is
// created, so no device memory is used. A driver once loaded stays loaded.
//
// No CUDA type appears here.
//
// Thread-safe. A probe takes up to seconds if the driver has to wake devices.
#ifndef REFITD_TRANSPORT_CUDA_DRIVER_H_
#define REFITD_TRANSPORT_CUDA_DRIVER_H_

#include <cstdint>
#include <string>
#include <vector>

namespace refitd {

struct CudaDevice {
  int ordinal = 0;   // the driver's, in this process: CUDA_VISIBLE_DEVICES changes it
  std::string uuid;  // "GPU-01234567-89ab-cdef-0123-456789abcdef": refitd's name for the device
  std::string name;  // "NVIDIA H200"
  int64_t memory_bytes = 0;
};

// Versions as CUDA counts them: 1000 * major + 10 * minor.
struct CudaReport {
  int compiled_version = 0;  // of the headers; 0: built without CUDA
  int driver_version = 0;    // the newest CUDA that the driver serves; 0: no driver
  // Every device that answered; `problem` names a device that did not.
  std::vector<CudaDevice> devices;
  // Why there is no driver, no device, or not every device; empty if there is no problem, and if
  // CUDA is not compiled in.
  std::string problem;
};

// Probes the system's driver, once in the process: callers during the probe wait, later callers get
// the same report.
CudaReport ProbeCuda();

// Probes `library` (as for dlopen), each time.
CudaReport ProbeCudaLibrary(const std::string& library);

// Returns a text such as "CUDA 13.0", or "CUDA not compiled in".
std::string CudaBuild();

// Describes the report in one line for people: "CUDA 13.0 headers compiled in; <problem>".
std::string Describe(const CudaReport& report);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_DRIVER_H_
