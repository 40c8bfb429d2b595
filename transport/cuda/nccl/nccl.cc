#include "transport/cuda/nccl/nccl.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <glob.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <utility>

#include "transport/base/status.h"
#include "transport/cuda/driver.h"
#if defined(REFITD_CUDA)
#include "transport/cuda/nccl/api.h"
#endif

namespace refitd {
namespace {

constexpr char kLoaderName[] = "libnccl.so.2";
constexpr char kInPackages[] = "/nvidia/nccl/lib/libnccl.so.2";

constexpr std::string_view kPrefix = "NCCL_";
constexpr std::array<std::string_view, 7> kKept = {
    "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_HOSTID",
    "NCCL_NET",   "NCCL_NET_PLUGIN", "NCCL_TOPO_FILE"};
constexpr std::string_view kKeptPrefix = "NCCL_IB_";

bool IsKept(std::string_view name) {
  return name.substr(0, kKeptPrefix.size()) == kKeptPrefix ||
         std::find(kKept.begin(), kKept.end(), name) != kKept.end();
}

// Returns the files that match, those of the newest Python first.
std::vector<std::string> Matches(const std::string& pattern) {
  glob_t found = {};
  std::vector<std::string> files;
  if (glob(pattern.c_str(), GLOB_NOSORT, nullptr, &found) == 0) {
    files.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  }
  globfree(&found);
  std::sort(files.begin(), files.end(), [](const std::string& a, const std::string& b) {
    return strverscmp(a.c_str(), b.c_str()) > 0;
  });
  return files;
}

// A folder's name, escaped for glob.
std::string Literal(std::string_view folder) {
  std::string escaped;
  for (const char c : folder) {
    if (c == '*' || c == '?' || c == '[' || c == '\\') escaped += '\\';
    escaped += c;
  }
  return escaped;
}

std::vector<std::string> PackageFolders(const std::function<const char*(const char*)>& environment,
                                        const std::string& root) {
  std::vector<std::string> patterns;
  for (const char* variable : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
    const char* const folder = environment(variable);
    // A relative path would mean another place in every working directory.
    if (folder == nullptr || folder[0] != '/') continue;
    patterns.push_back(Literal(folder) + "/lib/python3*/site-packages");
  }
  for (const char* folder : {"usr/lib", "usr/local/lib"}) {
    for (const char* packages : {"dist-packages", "site-packages"}) {
      patterns.push_back(fmt::format("{}{}/python3*/{}", Literal(root), folder, packages));
    }
  }
  return patterns;
}

// The names that a file sets, read as NCCL reads it: NAME=VALUE lines, "#" begins a comment.
std::vector<std::string> NamesIn(const std::string& path) {
  // Limits what is logged of a file that anybody may have written.
  constexpr size_t kMaxNames = 1000;
  std::vector<std::string> names;
  std::ifstream file(path);
  std::string line;
  while (names.size() < kMaxNames && std::getline(file, line)) {
    const size_t equals = line.find('=');
    if (line.empty() || line[0] == '#' || equals == std::string::npos) continue;
    names.push_back(line.substr(0, equals));
  }
  return names;
}

// Returns the NCCL_* variables, each as a name and a value.
std::vector<std::pair<std::string, std::string>> NcclVariables() {
  std::vector<std::pair<std::string, std::string>> variables;
  for (char** at = environ; *at != nullptr; ++at) {
    const std::string_view entry = *at;
    const size_t equals = entry.find('=');
    if (entry.substr(0, kPrefix.size()) != kPrefix || equals == std::string_view::npos) continue;
    variables.emplace_back(entry.substr(0, equals), entry.substr(equals + 1));
  }
  return variables;
}

#if defined(REFITD_CUDA)

absl::Status Load(const std::string& library, NcclReport* report) {
  REFITD_ASSIGN_OR_RETURN(NcclApi api, NcclApi::Load(library));
  report->library = api.path;
  report->version = api.version;
  if (api.version < kNcclSymmetricFloor) {
    report->no_symmetric = fmt::format("it needs NCCL {}", NcclVersionText(kNcclSymmetricFloor));
  }
  report->api = std::make_shared<const NcclApi>(std::move(api));
  report->problem.clear();
  return absl::OkStatus();
}

#else

absl::Status Load(const std::string& /*library*/, NcclReport* /*report*/) {
  return absl::UnavailableError(CudaBuild());
}

#endif

}  // namespace

std::vector<std::string> NcclCandidates(const std::function<const char*(const char*)>& environment,
                                        const std::string& root) {
  std::vector<std::string> candidates;
  for (const std::string& pattern : PackageFolders(environment, root)) {
    for (std::string& file : Matches(pattern + kInPackages)) {
      candidates.push_back(std::move(file));
    }
  }
  candidates.push_back(kLoaderName);
  return candidates;
}

NcclReport FindNccl(const std::string& configured) {
  if (!configured.empty()) return FindNcclAmong({configured});
  return FindNcclAmong(NcclCandidates([](const char* name) { return std::getenv(name); }, "/"));
}

NcclReport FindNcclAmong(const std::vector<std::string>& candidates) {
  NcclReport report;
  std::vector<std::string> problems;
  for (const std::string& candidate : candidates) {
    const absl::Status loaded = Load(candidate, &report);
    if (loaded.ok()) return report;
    problems.push_back(Message(loaded));
  }
  report.problem = fmt::format("{}", fmt::join(problems, "; "));
  return report;
}

namespace {

constexpr char kNet[] = "NCCL_NET";
constexpr char kSockets[] = "Socket";

// Whether the variable names a network, set by the operator or the machine's administrator.
bool NamesNetwork(std::string_view variable) {
  return variable.substr(0, 8) == "NCCL_IB_" || variable.substr(0, 8) == kNet;
}

}  // namespace

NcclEnvironment CleanNcclEnvironment(const std::string& interface,
                                     const std::string& machine_file) {
  const std::vector<std::pair<std::string, std::string>> ours = {
      {"NCCL_CONF_FILE", "/dev/null"}, {"NCCL_CUMEM_ENABLE", "1"},
      {"NCCL_ENV_PLUGIN", "none"},     {"NCCL_NVLS_ENABLE", "0"},
      {"NCCL_RAS_ENABLE", "0"},        {"NCCL_SOCKET_IFNAME", "=" + interface},
      {"NCCL_WIN_ENABLE", "1"},
  };
  NcclEnvironment done;
  for (const auto& variable : NcclVariables()) {
    const auto& [name, value] = variable;
    if (std::find(ours.begin(), ours.end(), variable) != ours.end()) continue;
    if (name == kNet && value == kSockets) continue;  // set by an earlier call
    const bool kept = IsKept(name);
    (kept ? done.kept : done.dropped).push_back(fmt::format("{}={}", name, value));
    if (!kept) unsetenv(name.c_str());
  }
  for (const auto& [name, value] : ours) {
    setenv(name.c_str(), value.c_str(), /*overwrite=*/1);
    done.set.push_back(fmt::format("{}={}", name, value));
  }
  std::vector<std::string> machine = NamesIn(machine_file);
  if (std::none_of(done.kept.begin(), done.kept.end(), NamesNetwork) &&
      std::none_of(machine.begin(), machine.end(), NamesNetwork)) {
    setenv(kNet, kSockets, /*overwrite=*/1);
    done.set.push_back(fmt::format("{}={}", kNet, kSockets));
  }
  for (std::string& name : machine) {
    if (std::getenv(name.c_str()) == nullptr) done.machine.push_back(std::move(name));
  }
  std::sort(done.dropped.begin(), done.dropped.end());
  std::sort(done.kept.begin(), done.kept.end());
  return done;
}

std::string NcclVersionText(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
}

CollectivesReport CollectivesOf(const NcclReport& report) {
  return {.library = report.library,
          .version = report.version != 0 ? NcclVersionText(report.version) : "",
          .problem = report.problem,
          .no_symmetric = report.no_symmetric};
}

std::string Describe(const NcclReport& report) {
  if (report.version == 0) return "no NCCL: " + report.problem;
  std::string text =
      fmt::format("NCCL {} from {}", NcclVersionText(report.version), report.library);
  if (!report.no_symmetric.empty()) {
    text += ", without symmetric memory: " + report.no_symmetric;
  }
  return text;
}

}  // namespace refitd
