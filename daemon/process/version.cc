#include "daemon/process/version.h"

#include <fmt/format.h>
#include <google/protobuf/stubs/common.h>
#include <grpcpp/grpcpp.h>

#include <string_view>

#include "transport/cuda/driver.h"

namespace refitd {
namespace {

#if defined(__clang__)
constexpr std::string_view kCompiler = "clang " __clang_version__;
#else
constexpr std::string_view kCompiler = "gcc " __VERSION__;
#endif

}  // namespace

std::vector<std::pair<std::string, std::string>> DeviceBuilds() { return {{"cuda", CudaBuild()}}; }

std::string BuildInfo() {
  std::string info = fmt::format(
      "{}, C++{}, gRPC {}, Protobuf {}", kCompiler, (__cplusplus / 100) % 100, grpc::Version(),
      google::protobuf::internal::VersionString(GOOGLE_PROTOBUF_VERSION));
  for (const auto& [transport, build] : DeviceBuilds()) info += ", " + build;
  return info;
}

}  // namespace refitd
