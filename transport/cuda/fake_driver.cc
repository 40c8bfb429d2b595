// A CUDA driver for tests: version 12.4, two devices. FakeCudaFail makes one call fail.
// Without CUDA's headers it is empty. Not thread-safe.
#if defined(REFITD_CUDA)
#include <cuda.h>

#include <cstring>
#include <string_view>

namespace {

constexpr int kDevices = 2;

// The call that fails: a string of the caller's that outlives its use, or null; for calls about a
// device, on device 1 only.
const char* failing_call = nullptr;
int failing_result = 0;

CUresult Answer(std::string_view call) {
  if (failing_call == nullptr || call != failing_call) return CUDA_SUCCESS;
  return static_cast<CUresult>(failing_result);
}

CUresult Answer(std::string_view call, int device) {
  return device == 1 ? Answer(call) : CUDA_SUCCESS;
}

}  // namespace

extern "C" {

void FakeCudaFail(const char* call, int result) {
  failing_call = call;
  failing_result = result;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  if (error != CUDA_ERROR_NO_DEVICE) return CUDA_ERROR_INVALID_VALUE;
  *text = "no CUDA-capable device is detected";
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
  *version = 12040;
  return Answer("cuDriverGetVersion");
}

CUresult cuInit(unsigned int /*flags*/) { return Answer("cuInit"); }

// Told to fail with 0: succeeds, with no device.
CUresult cuDeviceGetCount(int* count) {
  const bool named =
      failing_call != nullptr && std::string_view(failing_call) == "cuDeviceGetCount";
  *count = named ? 0 : kDevices;
  return Answer("cuDeviceGetCount");
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (ordinal < 0 || ordinal >= kDevices) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return Answer("cuDeviceGet", ordinal);
}

CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  for (int i = 0; i < 16; ++i) uuid->bytes[i] = static_cast<char>(i * 17 + device);
  return Answer("cuDeviceGetUuid_v2", device);
}

// Fills all of `name` on device 1, without the zero at the end.
CUresult cuDeviceGetName(char* name, int bytes, CUdevice device) {
  if (device == 1) {
    std::memset(name, 'x', static_cast<size_t>(bytes));
  } else {
    std::strncpy(name, "Fake GPU", static_cast<size_t>(bytes));
  }
  return Answer("cuDeviceGetName", device);
}

CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
  *bytes = size_t{80 + static_cast<size_t>(device)} << 30;
  return Answer("cuDeviceTotalMem_v2", device);
}

}  // extern "C"
#endif
