#include "transport/cuda/driver.h"

#include <fmt/format.h>

#include "transport/base/failure.h"

#if defined(REFITD_CUDA)
#include <array>

#include "transport/base/status.h"
#include "transport/cuda/api.h"
#endif

namespace refitd {
namespace {

std::string VersionText(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

#if defined(REFITD_CUDA)

constexpr int kCompiledVersion = CUDA_VERSION;
constexpr size_t kMaxNameBytes = 256;  // of a device's name; the driver cuts longer names

std::string UuidText(const CUuuid& uuid) {
  std::string text = "GPU-";
  for (size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += fmt::format("{:02x}", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return text;
}

absl::StatusOr<CudaDevice> ReadDevice(const CudaApi& api, int ordinal) {
  CudaDevice device;
  device.ordinal = ordinal;
  CUdevice handle = 0;
  REFITD_RETURN_IF_ERROR(api.Check("cuDeviceGet", api.cuDeviceGet(&handle, ordinal)));
  CUuuid uuid = {};
  REFITD_RETURN_IF_ERROR(api.Check("cuDeviceGetUuid_v2", api.cuDeviceGetUuid(&uuid, handle)));
  device.uuid = UuidText(uuid);
  std::array<char, kMaxNameBytes + 1> name = {};  // always ends in a zero
  REFITD_RETURN_IF_ERROR(
      api.Check("cuDeviceGetName", api.cuDeviceGetName(name.data(), kMaxNameBytes, handle)));
  device.name = name.data();
  size_t bytes = 0;
  REFITD_RETURN_IF_ERROR(api.Check("cuDeviceTotalMem_v2", api.cuDeviceTotalMem(&bytes, handle)));
  device.memory_bytes = static_cast<int64_t>(bytes);
  return device;
}

absl::Status Probe(const std::string& library, CudaReport* report) {
  REFITD_ASSIGN_OR_RETURN(const CudaApi api, CudaApi::Load(library));
  int version = 0;
  REFITD_RETURN_IF_ERROR(api.Check("cuDriverGetVersion", api.cuDriverGetVersion(&version)));
  report->driver_version = version;
  REFITD_RETURN_IF_ERROR(api.Check("cuInit", api.cuInit(0)));
  int count = 0;
  REFITD_RETURN_IF_ERROR(api.Check("cuDeviceGetCount", api.cuDeviceGetCount(&count)));
  if (count == 0) return absl::NotFoundError("the driver shows no device");
  absl::Status first;  // the first of the devices' problems
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    absl::StatusOr<CudaDevice> device = ReadDevice(api, ordinal);
    if (device.ok()) {
      report->devices.push_back(*std::move(device));
    } else if (first.ok()) {
      first = Prefixed(device.status(), "device {}", ordinal);
    }
  }
  return first;
}

#else

constexpr int kCompiledVersion = 0;

#endif

}  // namespace

CudaReport ProbeCuda() {
  // The report is never destroyed, because threads may ask for it while the process ends.
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
