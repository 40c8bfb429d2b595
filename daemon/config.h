// refitd's configuration: defaults, then a textproto file (daemon/config.proto), then environment
// variables, then flags; later wins, setting by setting.
//
// LoadConfig checks everything that it returns (P10): every number is within its named limit, and
// TCP without TLS was explicitly asked for (P9). Pure, except for reading the file and the
// process's own user id.
#ifndef REFITD_DAEMON_CONFIG_H_
#define REFITD_DAEMON_CONFIG_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/config.pb.h"
#include "daemon/policy/policy.h"
#include "transport/tls/certificates.h"

namespace refitd {

// The settings; config.proto has their units and defaults. In those that the functions below
// return, every setting is set: daemon_id is by default the host's name, and allowed_uids are the
// daemon's own user and root.
using Config = config::RefitdConfig;

// The exit codes of refitd.
enum ExitCode : int {
  kExitOk = 0,
  kExitFailure = 1,  // failed while running
  kExitUsage = 2,    // bad flag, variable or file
  kExitInUse = 3,    // socket or port is in use
};

// Limits of the settings.
inline constexpr int64_t kMaxLimitMs = 24 * 3'600'000;  // of any wait
inline constexpr int64_t kSlotBytesMultiple = 4096;     // a page
// Below this size, a part costs more than the copying of its bytes.
inline constexpr int64_t kMinSlotBytes = 64 << 10;
inline constexpr int64_t kMaxSlotBytes = int64_t{16} << 30;
inline constexpr int kMinConfiguredSlots = 2;   // one slot is filled while another is read
inline constexpr int kMaxConfiguredSlots = 64;  // as kMaxSlots of a group
inline constexpr int64_t kMinMessageBytes = 64 << 10;
inline constexpr int64_t kMaxMessageBytes = 1 << 30;        // gRPC buffers a message whole
inline constexpr int64_t kMessageOverheadBytes = 64 << 10;  // room beside inline bytes
inline constexpr int kMaxConfiguredOutstanding = 65'536;
inline constexpr int kMaxConfiguredCompareEvery = 1'000'000;
inline constexpr int kMaxConfiguredGroups = 4096;
inline constexpr int kMaxConfiguredMembers = 65'536;
inline constexpr int kMaxConfiguredCopyThreads = 256;
inline constexpr int kMaxConfiguredStreams = 8;        // between two daemons
inline constexpr int kMaxChosenStreams = 4;            // chosen by the daemon itself
inline constexpr int kMaxConfiguredCopyBlocks = 1024;  // more than a GPU has multiprocessors
inline constexpr int kMaxConfiguredRails = 8;
inline constexpr size_t kMaxCudaLibraryBytes = 4095;                    // a path
inline constexpr int64_t kMaxConfiguredRegionBytes = int64_t{1} << 44;  // as kMaxRegionBytes
inline constexpr size_t kMaxUnixPathBytes = 99;  // 107 bytes of a socket's address, less ".fds.new"
inline constexpr int kMaxTcpListeners = 16;
inline constexpr char kLoopbackInterface[] = "lo";
inline constexpr int64_t kMaxConfigFileBytes = 1 << 20;
inline constexpr size_t kMaxConfiguredDaemonId = 128;  // as kMaxDaemonIdBytes of a group
// The shortest limit of silence that can be set; pings are sent four times within the limit.
inline constexpr int64_t kMinSilenceMs = 100;

// Returns data.streams, or what the daemon chooses in its place. `encrypted`: whether the data
// plane is under TLS, where each stream has a thread. `processors`: of this host; 0: unknown.
int StreamsOf(const Config::Data& data, bool encrypted, unsigned processors);

// A parsed command line.
struct Invocation {
  Config config;
  std::string source;  // the file read; empty: none
  // Settings that are valid and can't serve what they seem to be for, a sentence each.
  std::vector<std::string> warnings;
  // Set by --validate, --version and --help: print it on stdout and exit with kExitOk.
  std::optional<std::string> print;
};

// `argv` does not contain the program's name. Variables that match no setting are ignored, even if
// they begin with REFITD_, because Kubernetes sets such variables for a service of that name.
// INVALID_ARGUMENT names the place (file:line:column, variable or flag), field and value; NOT_FOUND
// and PERMISSION_DENIED say that the file can't be read. For all errors main exits with kExitUsage.
absl::StatusOr<Invocation> LoadConfig(const std::vector<std::string>& argv,
                                      const std::map<std::string, std::string>& environment);

// The same, from main's own arguments.
absl::StatusOr<Invocation> LoadConfig(int argc, const char* const* argv,
                                      const char* const* environ);

// Completes the settings, and checks them as LoadConfig does. INVALID_ARGUMENT names field and
// value.
absl::StatusOr<Config> ConfigOf(Config settings);

// The text of a file of settings or rules, of at most kMaxConfigFileBytes.
absl::StatusOr<std::string> ReadConfigFile(const std::string& path);

TlsFiles TlsFilesOf(const Config& config);

// The settings of the policy. LoadConfig has checked that they make a policy.
PolicySettings PolicySettingsOf(const Config& config);

// The configuration as textproto with every setting in it, as --validate prints it.
std::string FormatConfig(const Config& config);

}  // namespace refitd

#endif  // REFITD_DAEMON_CONFIG_H_
