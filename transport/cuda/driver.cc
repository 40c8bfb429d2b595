#include "transport/cuda/driver.h"

#include <fmt/format.h>

#if defined(REFITD_CUDA)
#include <cuda.h>
#include <dlfcn.h>

#include <array>
#include <string_view>

#include "transport/base/status.h"
#endif

namespace refitd {
namespace {

std::string VersionText(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

#if defined(REFITD_CUDA)

constexpr int kCompiledVersion = CUDA_VERSION;
constexpr size_t kMaxNameBytes = 256;  // of a device; the driver cuts longer ones

// The driver's calls that a probe needs. Names with a version are looked up as the header's macros
// would spell them.
struct Driver {
  decltype(&cuGetErrorString) get_error_string = nullptr;
  decltype(&cuDriverGetVersion) driver_get_version = nullptr;
  decltype(&cuInit) init = nullptr;
  decltype(&cuDeviceGetCount) device_get_count = nullptr;
  decltype(&cuDeviceGet) device_get = nullptr;
  decltype(&cuDeviceGetUuid) device_get_uuid = nullptr;
  decltype(&cuDeviceGetName) device_get_name = nullptr;
  decltype(&cuDeviceTotalMem) device_total_mem = nullptr;
};

std::string LastLoadError() {
  const char* error = dlerror();
  return error != nullptr ? error : "the loader gives no reason";
}

template <typename Function>
absl::Status Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function != nullptr) return absl::OkStatus();
  return absl::NotFoundError(LastLoadError());
}

absl::StatusOr<Driver> LoadDriver(const std::string& path) {
  // NODELETE: the driver starts threads of its own and can't be unloaded safely.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == nullptr) return absl::NotFoundError(LastLoadError());
  Driver driver;
  REFITD_RETURN_IF_ERROR(Find(library, "cuGetErrorString", &driver.get_error_string));
  REFITD_RETURN_IF_ERROR(Find(library, "cuDriverGetVersion", &driver.driver_get_version));
  REFITD_RETURN_IF_ERROR(Find(library, "cuInit", &driver.init));
  REFITD_RETURN_IF_ERROR(Find(library, "cuDeviceGetCount", &driver.device_get_count));
  REFITD_RETURN_IF_ERROR(Find(library, "cuDeviceGet", &driver.device_get));
  REFITD_RETURN_IF_ERROR(Find(library, "cuDeviceGetUuid_v2", &driver.device_get_uuid));
  REFITD_RETURN_IF_ERROR(Find(library, "cuDeviceGetName", &driver.device_get_name));
  REFITD_RETURN_IF_ERROR(Find(library, "cuDeviceTotalMem_v2", &driver.device_total_mem));
  return driver;
}

// "cuInit: no CUDA-capable device is detected (error 100)".
absl::Status Check(const Driver& driver, std::string_view call, CUresult result) {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char* text = nullptr;
  if (driver.get_error_string(result, &text) != CUDA_SUCCESS || text == nullptr) {
    text = "unknown to the driver";
  }
  return Error(absl::StatusCode::kUnavailable, "{}: {} (error {})", call, text,
               static_cast<int>(result));
}

std::string UuidText(const CUuuid& uuid) {
  std::string text = "GPU-";
  for (size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += fmt::format("{:02x}", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return text;
}

absl::StatusOr<CudaDevice> ReadDevice(const Driver& driver, int ordinal) {
  CudaDevice device;
  device.ordinal = ordinal;
  CUdevice handle = 0;
  REFITD_RETURN_IF_ERROR(Check(driver, "cuDeviceGet", driver.device_get(&handle, ordinal)));
  CUuuid uuid = {};
  REFITD_RETURN_IF_ERROR(
      Check(driver, "cuDeviceGetUuid_v2", driver.device_get_uuid(&uuid, handle)));
  device.uuid = UuidText(uuid);
  std::array<char, kMaxNameBytes + 1> name = {};  // ends in a zero, whatever the driver writes
  REFITD_RETURN_IF_ERROR(
      Check(driver, "cuDeviceGetName", driver.device_get_name(name.data(), kMaxNameBytes, handle)));
  device.name = name.data();
  size_t bytes = 0;
  REFITD_RETURN_IF_ERROR(
      Check(driver, "cuDeviceTotalMem_v2", driver.device_total_mem(&bytes, handle)));
  device.memory_bytes = static_cast<int64_t>(bytes);
  return device;
}

absl::Status Probe(const std::string& library, CudaReport* report) {
  REFITD_ASSIGN_OR_RETURN(const Driver driver, LoadDriver(library));
  int version = 0;
  REFITD_RETURN_IF_ERROR(Check(driver, "cuDriverGetVersion", driver.driver_get_version(&version)));
  report->driver_version = version;
  REFITD_RETURN_IF_ERROR(Check(driver, "cuInit", driver.init(0)));
  int count = 0;
  REFITD_RETURN_IF_ERROR(Check(driver, "cuDeviceGetCount", driver.device_get_count(&count)));
  if (count == 0) return absl::NotFoundError("the driver shows no device");
  absl::Status first;  // of the devices' problems
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    absl::StatusOr<CudaDevice> device = ReadDevice(driver, ordinal);
    if (device.ok()) {
      report->devices.push_back(*std::move(device));
    } else if (first.ok()) {
      first = Error(device.status().code(), "device {}: {}", ordinal, Message(device.status()));
    }
  }
  return first;
}

#else

constexpr int kCompiledVersion = 0;

#endif

}  // namespace

CudaReport ProbeCuda() {
  // Never destroyed: threads may ask while the process ends.
  static const CudaReport* const report = new CudaReport(ProbeCudaLibrary("libcuda.so.1"));
  return *report;
}

CudaReport ProbeCudaLibrary([[maybe_unused]] const std::string& library) {
  CudaReport report;
  report.compiled_version = kCompiledVersion;
#if defined(REFITD_CUDA)
  report.problem = Message(Probe(library, &report));
#endif
  return report;
}

std::string CudaBuild() {
  if (kCompiledVersion == 0) return "CUDA not compiled in";
  return "CUDA " + VersionText(kCompiledVersion);
}

std::string Describe(const CudaReport& report) {
  if (report.compiled_version == 0) return "not compiled in";
  std::string text =
      fmt::format("CUDA {} headers compiled in", VersionText(report.compiled_version));
  if (report.driver_version != 0) {
    text += fmt::format("; driver for CUDA {}", VersionText(report.driver_version));
  }
  for (const CudaDevice& device : report.devices) {
    text += fmt::format("; {} {} ({:.1f} GiB)", device.uuid, device.name,
                        static_cast<double>(device.memory_bytes) / (1 << 30));
  }
  if (!report.problem.empty()) text += "; " + report.problem;
  return text;
}

}  // namespace refitd
