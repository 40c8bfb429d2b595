#include "transport/cuda/driver.h"

#include <catch2/catch.hpp>
#include <string>
#include <thread>
#include <vector>

#if defined(REFITD_CUDA)
#include "transport/cuda/fakes/fake_cuda.h"
#endif

namespace refitd {
namespace {

using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

TEST_CASE("where CUDA is not compiled in the report says so") {
  const CudaReport report;
  REQUIRE(Describe(report) == "not compiled in");
}

TEST_CASE("the system's driver is probed without harm, and what is missing has a reason") {
  const CudaReport report = ProbeCuda();
  if (report.compiled_version == 0) {
    REQUIRE(CudaBuild() == "CUDA not compiled in");
    REQUIRE(Describe(report) == "not compiled in");
    REQUIRE(report.driver_version == 0);
  } else {
    REQUIRE_THAT(CudaBuild(), StartsWith("CUDA 1"));
    REQUIRE_THAT(Describe(report), StartsWith(CudaBuild() + " headers compiled in; "));
    REQUIRE(report.devices.empty() <= !report.problem.empty());
  }
}

TEST_CASE("threads that ask together get one report") {
  std::vector<CudaReport> reports(8);
  std::vector<std::thread> threads;
  threads.reserve(reports.size());
  for (CudaReport& report : reports) threads.emplace_back([&] { report = ProbeCuda(); });
  for (std::thread& thread : threads) thread.join();
  for (const CudaReport& report : reports) REQUIRE(Describe(report) == Describe(reports.front()));
}

#if defined(REFITD_CUDA)

TEST_CASE("without a driver the report says what the loader says") {
  const CudaReport report = ProbeCudaLibrary("libcuda_missing.so.1");
  REQUIRE(report.compiled_version >= 11000);
  REQUIRE(report.driver_version == 0);
  REQUIRE(report.devices.empty());
  REQUIRE(report.problem ==
          "libcuda_missing.so.1: cannot open shared object file: No such file or directory");
  REQUIRE(Describe(report) == CudaBuild() + " headers compiled in; " + report.problem);
}

TEST_CASE("a library that is no CUDA driver is named with the call that it lacks") {
  const CudaReport report = ProbeCudaLibrary("libm.so.6");
  REQUIRE(report.driver_version == 0);
  REQUIRE_THAT(report.problem, Contains("libm.so.6: undefined symbol: cuGetErrorString"));
}

TEST_CASE("version and devices are read: UUID, name, memory") {
  const FakeCuda fake;
  const CudaReport report = ProbeCudaLibrary(FakeCuda::Path());
  REQUIRE(report.problem.empty());
  REQUIRE(report.driver_version == 12040);
  REQUIRE(report.devices.size() == 2);
  REQUIRE(report.devices[0].ordinal == 0);
  REQUIRE(report.devices[0].uuid == "GPU-00112233-4455-6677-8899-aabbccddeeff");
  REQUIRE(report.devices[0].name == "Fake GPU");
  REQUIRE(report.devices[0].memory_bytes == int64_t{80} << 30);
  REQUIRE(report.devices[1].ordinal == 1);
  REQUIRE(report.devices[1].uuid == "GPU-01122334-4556-6778-899a-abbccddeef00");
  REQUIRE(report.devices[1].name == std::string(256, 'x'));
  REQUIRE(report.devices[1].memory_bytes == int64_t{81} << 30);
  REQUIRE_THAT(Describe(report),
               StartsWith(CudaBuild() + " headers compiled in; driver for CUDA 12.4; "
                                        "GPU-00112233-4455-6677-8899-aabbccddeeff Fake GPU "
                                        "(80.0 GiB); GPU-01122334-"));
}

TEST_CASE("a call that fails is named with the driver's text") {
  const std::string call = GENERATE("cuDriverGetVersion", "cuInit", "cuDeviceGetCount");
  FakeCuda fake;
  fake.Fail(call.c_str(), 100);
  const CudaReport report = ProbeCudaLibrary(FakeCuda::Path());
  REQUIRE(report.devices.empty());
  REQUIRE(report.problem == call + ": no CUDA-capable device is detected (error 100)");
}

TEST_CASE("an error that the driver has no text for is told by its number") {
  FakeCuda fake;
  fake.Fail("cuInit", 999);
  REQUIRE(ProbeCudaLibrary(FakeCuda::Path()).problem ==
          "cuInit: unknown to the driver (error 999)");
}

TEST_CASE("a driver without devices is told apart from one that fails") {
  FakeCuda fake;
  fake.Fail("cuDeviceGetCount", 0);
  const CudaReport report = ProbeCudaLibrary(FakeCuda::Path());
  REQUIRE(report.driver_version == 12040);
  REQUIRE(report.problem == "the driver shows no device");
}

TEST_CASE("a device that does not answer is named, and the others are listed") {
  const std::string call =
      GENERATE("cuDeviceGet", "cuDeviceGetUuid_v2", "cuDeviceGetName", "cuDeviceTotalMem_v2");
  FakeCuda fake;
  fake.Fail(call.c_str(), 100);
  const CudaReport report = ProbeCudaLibrary(FakeCuda::Path());
  REQUIRE(report.devices.size() == 1);
  REQUIRE(report.devices[0].ordinal == 0);
  REQUIRE(report.problem ==
          "device 1: " + call + ": no CUDA-capable device is detected (error 100)");
}

#endif

}  // namespace
}  // namespace refitd
