#include "transport/cuda/nccl/nccl.h"

#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "transport/base/temp_folder_testing.h"

#if defined(REFITD_CUDA)
#include "transport/cuda/nccl/api.h"
#endif

namespace refitd {
namespace {

using Catch::Matchers::Contains;
using Strings = std::vector<std::string>;

struct Folder : TempFolder {
  std::string Write(const std::string& name, const std::string& text) const {
    const std::filesystem::path file = *this / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
    return file;
  }
};

Strings Candidates(const std::map<std::string, std::string>& variables, const std::string& root) {
  return NcclCandidates(
      [&variables](const char* name) {
        const auto it = variables.find(name);
        return it == variables.end() ? nullptr : it->second.c_str();
      },
      root + "/");
}

TEST_CASE("where Python has no NCCL the loader's is the only candidate") {
  const Folder root;
  REQUIRE(Candidates({}, root.path()) == Strings{"libnccl.so.2"});
  REQUIRE(Candidates({{"VIRTUAL_ENV", root.path() + "/none"}, {"CONDA_PREFIX", "."}},
                     root.path()) == Strings{"libnccl.so.2"});
}

TEST_CASE("wheels of environments come first, newest Python first, then the system's") {
  const Folder root;
  const std::string wheel = "-packages/nvidia/nccl/lib/libnccl.so.2";
  const std::string usr = root.Write("usr/lib/python3/dist" + wheel, "");
  const std::string local = root.Write("usr/local/lib/python3.11/dist" + wheel, "");
  const std::string conda = root.Write("conda/lib/python3.10/site" + wheel, "");
  const std::string old = root.Write("env[1]/lib/python3.9/site" + wheel, "");
  const std::string young = root.Write("env[1]/lib/python3.12/site" + wheel, "");
  root.Write("env[1]/lib/python2.7/site" + wheel, "");
  REQUIRE(Candidates(
              {{"VIRTUAL_ENV", root.path() + "/env[1]"}, {"CONDA_PREFIX", root.path() + "/conda"}},
              root.path()) == Strings{young, old, conda, usr, local, "libnccl.so.2"});
}

// ---- the environment ----

// The NCCL_* variables of this process's environment.
std::map<std::string, std::string> Variables() {
  std::map<std::string, std::string> variables;
  for (char** at = environ; *at != nullptr; ++at) {
    const std::string entry = *at;
    if (entry.rfind("NCCL_", 0) != 0) continue;
    variables[entry.substr(0, entry.find('='))] = entry.substr(entry.find('=') + 1);
  }
  return variables;
}

const std::map<std::string, std::string> kSet = {
    {"NCCL_CONF_FILE", "/dev/null"}, {"NCCL_CUMEM_ENABLE", "1"}, {"NCCL_ENV_PLUGIN", "none"},
    {"NCCL_NET", "Socket"},          {"NCCL_NVLS_ENABLE", "0"},  {"NCCL_RAS_ENABLE", "0"},
    {"NCCL_SOCKET_IFNAME", "=eth7"}, {"NCCL_WIN_ENABLE", "1"}};

void Export(const std::map<std::string, std::string>& variables) {
  for (const auto& [name, value] : Variables()) unsetenv(name.c_str());
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
}

TEST_CASE("what a launcher exported is dropped or overruled, and said; the operator's is kept") {
  const Folder folder;
  Export({{"NCCL_ALGO", "Ring"},
          {"NCCL_CONF_FILE", "/tmp/x"},
          {"NCCL_CUMEM_ENABLE", "0"},
          {"NCCL_DEBUG", "INFO"},
          {"NCCL_DEBUG_FILE", "/tmp/log"},
          {"NCCL_DEBUGGER", "1"},
          {"NCCL_HOSTID", "a"},
          {"NCCL_IB_HCA", "mlx5_0"},
          {"NCCL_NVLS_ENABLE", "1"},
          {"NCCL_SOCKET_IFNAME", "eth0"},
          {"NCCL_WIN_ENABLE", "1"}});
  const NcclEnvironment done = CleanNcclEnvironment("eth7", folder.path() + "/none");
  CHECK(done.dropped == Strings{"NCCL_ALGO=Ring", "NCCL_CONF_FILE=/tmp/x", "NCCL_CUMEM_ENABLE=0",
                                "NCCL_DEBUGGER=1", "NCCL_NVLS_ENABLE=1",
                                "NCCL_SOCKET_IFNAME=eth0"});
  CHECK(done.kept == Strings{"NCCL_DEBUG=INFO", "NCCL_DEBUG_FILE=/tmp/log", "NCCL_HOSTID=a",
                             "NCCL_IB_HCA=mlx5_0"});
  CHECK(done.machine.empty());
  std::map<std::string, std::string> want = kSet;
  want.erase("NCCL_NET");  // the operator named an adapter
  want.insert({{"NCCL_DEBUG", "INFO"},
               {"NCCL_DEBUG_FILE", "/tmp/log"},
               {"NCCL_HOSTID", "a"},
               {"NCCL_IB_HCA", "mlx5_0"}});
  CHECK(Variables() == want);
  Export({});
}

TEST_CASE("a clean environment is cleaned without a word") {
  const Folder folder;
  Export({});
  NcclEnvironment done = CleanNcclEnvironment("eth7", folder.path() + "/none");
  CHECK(done.dropped.empty());
  CHECK(Variables() == kSet);
  done = CleanNcclEnvironment("eth7", folder.path() + "/none");
  CHECK(done.dropped.empty());
  CHECK(done.kept.empty());
  CHECK(Variables() == kSet);
  Export({});
}

TEST_CASE("names of the machine's file that nothing overrules are said") {
  const Folder folder;
  Export({{"NCCL_DEBUG", "WARN"}});
  const std::string file = folder.Write(
      "nccl.conf", "# NCCL_PROTO=LL\nNCCL_ALGO=Tree\nNCCL_DEBUG=INFO\nNCCL_NVLS_ENABLE=1\nx\n\n");
  CHECK(CleanNcclEnvironment("lo", file).machine == Strings{"NCCL_ALGO"});
  CHECK(Variables().at("NCCL_NET") == "Socket");
  const std::string adapters = folder.Write("adapters.conf", "NCCL_IB_HCA=mlx5_0\n");
  Export({});
  CHECK(CleanNcclEnvironment("lo", adapters).machine == Strings{"NCCL_IB_HCA"});
  CHECK(Variables().count("NCCL_NET") == 0);
  Export({});
}

// ---- loading ----

#if defined(REFITD_CUDA)

std::string Fake() {
  const std::filesystem::path folder =
      std::filesystem::read_symlink("/proc/self/exe").parent_path();
  return folder.parent_path() / "fakes" / "libnccl_fake.so";
}

struct Version {
  explicit Version(const char* version) { setenv("REFITD_FAKE_NCCL_VERSION", version, 1); }
  ~Version() { unsetenv("REFITD_FAKE_NCCL_VERSION"); }
};

TEST_CASE("versions are as NCCL counts them") {
  CHECK(NcclVersionText(22809) == "2.28.9");
  CHECK(NcclVersionText(21801) == "2.18.1");
}

TEST_CASE("a configured library is loaded, with its version and file") {
  const NcclReport report = FindNccl(Fake());
  INFO(report.problem);
  REQUIRE(report.api != nullptr);
  CHECK(report.version == 22809);
  CHECK(report.library == Fake());
  CHECK(report.problem.empty());
  CHECK(report.no_symmetric.empty());
  CHECK(report.api->ncclCommWindowRegister != nullptr);
  CHECK(Describe(report) == "NCCL 2.28.9 from " + Fake());
}

TEST_CASE("a configured library that fails is the answer: no other is tried") {
  const NcclReport report = FindNccl("/nowhere/libnccl.so.2");
  CHECK(report.api == nullptr);
  CHECK(report.version == 0);
  CHECK_THAT(report.problem, Contains("/nowhere/libnccl.so.2"));
  CHECK_THAT(Describe(report), Contains("no NCCL: /nowhere/libnccl.so.2"));
}

TEST_CASE("of the candidates the first that loads is taken; where none does all are named") {
  const Folder folder;
  const std::string broken = folder.Write("libnccl.so.2", "not a library");
  CHECK(FindNcclAmong({broken, Fake(), "/nowhere"}).library == Fake());
  const NcclReport none = FindNcclAmong({broken, "/nowhere"});
  CHECK(none.api == nullptr);
  CHECK_THAT(none.problem, Contains(broken) && Contains("/nowhere"));
}

TEST_CASE("before 2.28.7 NCCL has no symmetric memory, before 2.18.1 it is refused") {
  {
    const Version version("22806");
    const NcclReport report = FindNccl(Fake());
    REQUIRE(report.api != nullptr);
    CHECK(report.api->ncclCommWindowRegister == nullptr);
    CHECK(report.no_symmetric == "it needs NCCL 2.28.7");
    CHECK(Describe(report) ==
          "NCCL 2.28.6 from " + Fake() + ", without symmetric memory: it needs NCCL 2.28.7");
  }
  {
    const Version version("22807");
    CHECK(FindNccl(Fake()).no_symmetric.empty());
  }
  {
    const Version version("21800");
    const NcclReport report = FindNccl(Fake());
    CHECK(report.api == nullptr);
    CHECK_THAT(report.problem, Contains("is NCCL 2.18.0, older than 2.18.1"));
  }
}

TEST_CASE("results become statuses, and work in progress is no error") {
  const NcclReport report = FindNccl(Fake());
  REQUIRE(report.api != nullptr);
  CHECK(report.api->Check("call", NcclResult::kSuccess).ok());
  CHECK(report.api->Check("call", NcclResult::kInProgress).ok());
  const absl::Status cuda = report.api->Check("ncclX", NcclResult::kUnhandledCudaError);
  CHECK(cuda.code() == absl::StatusCode::kUnavailable);
  CHECK(cuda.message() == "ncclX: unhandled cuda error (result 1)");
  CHECK(report.api->Check("call", NcclResult::kInvalidUsage).code() ==
        absl::StatusCode::kFailedPrecondition);
  CHECK(report.api->Check("call", NcclResult::kInternalError).code() ==
        absl::StatusCode::kInternal);
}

#else

TEST_CASE("where CUDA is not compiled in there is no NCCL, and that is said") {
  const NcclReport report = FindNccl("libnccl.so.2");
  REQUIRE(report.api == nullptr);
  REQUIRE(Describe(report) == "no NCCL: CUDA not compiled in");
}

#endif

}  // namespace
}  // namespace refitd
