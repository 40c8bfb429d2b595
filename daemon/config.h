// refitd's configuration: defaults, then a textproto file (daemon/config.proto), then environment
// variables, then flags; later wins, setting by setting.
//
// LoadConfig checks everything that it returns (P10): every number is within its named limit, and
// TCP without TLS was explicitly asked for (P9). Pure, except for reading the file and the
// process's own user id. Config is a plain value.
#ifndef REFITD_DAEMON_CONFIG_H_
#define REFITD_DAEMON_CONFIG_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/policy/policy.h"
#include "daemon/policy/quota.h"
#include "daemon/process/audit_log.h"
#include "daemon/process/log.h"
#include "daemon/sockets/peer_credentials.h"
#include "proto/peer_defaults.h"
#include "transport/base/ids.h"
#include "transport/tls/certificates.h"
#include "transport/transport.h"

namespace refitd {

namespace config {
class RefitdConfig;  // the message of daemon/config.proto
}

// The exit codes of refitd.
enum ExitCode : int {
  kExitOk = 0,
  kExitFailure = 1,  // failed while running
  kExitUsage = 2,    // bad flag, variable or file
  kExitInUse = 3,    // socket or port is in use
};

// Limits of the settings.
inline constexpr Duration kMaxLimitDuration = std::chrono::hours(24);  // of any wait
inline constexpr int64_t kSlotBytesMultiple = 4096;                    // a page
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
inline constexpr size_t kMaxCudaLibraryBytes = 4095;   // a path
inline constexpr int64_t kMaxConfiguredRegionBytes = int64_t{1} << 44;  // as kMaxRegionBytes
inline constexpr size_t kMaxUnixPathBytes = 99;  // 107 bytes of a socket's address, less ".fds.new"
inline constexpr int kMaxTcpListeners = 16;
inline constexpr char kLoopbackInterface[] = "lo";
inline constexpr int64_t kMaxConfigFileBytes = 1 << 20;
inline constexpr size_t kMaxConfiguredDaemonId = 128;  // as kMaxDaemonIdBytes of a group
// The shortest limit of silence that can be set; pings are sent four times within the limit.
inline constexpr Duration kMinSilence = std::chrono::milliseconds(100);

struct ListenConfig {
  std::string unix_path = "/run/refitd/refitd.sock";
  mode_t unix_mode = 0660;
  std::vector<std::string> tcp;  // "HOST:PORT", host numeric or "localhost"; IPv6 in brackets
  bool insecure = false;         // TCP without TLS is allowed, links too
  bool operator==(const ListenConfig&) const = default;
};

struct LimitsConfig {
  Duration default_duration = std::chrono::seconds(120);  // if Begin names none
  Duration max_duration = std::chrono::hours(1);
  Duration ready = std::chrono::seconds(30);  // from Prepare to Ready
  Duration ack = std::chrono::seconds(30);    // from bucket to acknowledgement
  Duration idle = std::chrono::seconds(30);   // an update without a call
  Duration lease = std::chrono::seconds(30);  // a leased slot that is not submitted
  int outstanding_buckets = 256;              // per trainer rank
  int compare_every = 32;                     // a full comparison takes this many versions
  int64_t inline_bytes = 4 << 20;             // inside one call
  int64_t message_bytes = 8 << 20;            // of any gRPC message
  int max_groups = 64;
  int max_members = 4096;                       // of all groups
  int64_t max_region_bytes = int64_t{1} << 44;  // of one region
  int64_t mapped_bytes = 0;  // host memory of members, mapped; 0: four times the machine's
  int64_t held_bytes = 0;    // layouts, inline bytes; 0: a quarter of the machine's memory
  Duration group_idle = std::chrono::minutes(10);  // a group without a member
  IdentityLimits per_identity;
  bool operator==(const LimitsConfig&) const = default;
};

struct StagingConfig {
  int64_t slot_bytes = 64 << 20;               // if a group's spec names none
  int slots = 4;                               // if a group's spec names none
  int64_t max_pool_bytes = int64_t{16} << 30;  // of all groups
  bool operator==(const StagingConfig&) const = default;
};

struct MetricsConfig {
  std::string listen;  // "HOST:PORT" as of ListenConfig::tcp; empty: off
  // `listen` has no TLS, even if there are certificates. Without certificates, this or
  // ListenConfig::insecure must be set.
  bool insecure = false;
  bool page = false;  // `listen` also serves the page (page.h)
  bool operator==(const MetricsConfig&) const = default;
};

struct PeersConfig {
  std::string advertise;  // HOST:PORT; empty: the address that the daemon listens on
  std::string interface = kLoopbackInterface;  // of the data plane; trusted (P9)
  Duration silence = kDefaultSilence;
  Duration wire = kDefaultWireLimit;
  std::vector<std::string> listen;  // for links alone; empty: ListenConfig::tcp takes links too
  std::string identity;  // a pattern (CheckIdentityPattern); empty: only rules let daemons join
  // How long the readiness that was known last counts without the coordinator; 0: not at all.
  Duration readiness = kDefaultReadiness;
  Duration relay_slow{};  // a daemon that holds updates back for longer is slow; 0: none is
  bool operator==(const PeersConfig&) const = default;
};

// The data plane over host memory.
struct DataConfig {
  bool unencrypted = false;  // weights go in the clear although there is TLS
  uint16_t port = 0;         // where the data plane listens; 0: a free port
  int streams = 0;           // connections between two daemons; 0: the daemon chooses
  bool operator==(const DataConfig&) const = default;
};

// Returns data.streams, or what the daemon chooses in its place. `encrypted`: whether the data
// plane is under TLS, where each stream has a thread. `processors`: of this host; 0: unknown.
int StreamsOf(const DataConfig& data, bool encrypted, unsigned processors);

struct CudaConfig {
  bool enabled = true;
  int copy_blocks = 64;                        // thread blocks of a copy kernel
  Duration device = std::chrono::seconds(60);  // longer device work counts as failed
  // Pieces of at least this size are moved by copy engines; 0: no piece is.
  int64_t engine_bytes = 2 << 20;
  std::string library = "libcuda.so.1";  // a name or path for dlopen
  bool nccl = true;
  std::string nccl_library;  // a name or path for dlopen; empty: searched for
  bool operator==(const CudaConfig&) const = default;
};

struct Config {
  std::string daemon_id;  // always set; by default the host's name
  ListenConfig listen;
  AccessRule access;  // always set; by default the daemon's own user and root
  LogConfig log;
  LimitsConfig limits;
  StagingConfig staging;
  PeersConfig peers;
  DataConfig data;
  MetricsConfig metrics;
  CudaConfig cuda;
  TlsFiles tls;
  std::vector<PolicyRule> rules;
  AuditConfig audit;
  int copy_threads = 0;  // host transport; 0: one for each core, at most 16
  Verification default_verification = Verification::kReadback;
  bool catch_ups = true;  // late instances get the version from clean ones
  bool operator==(const Config&) const = default;
};

// A parsed command line.
struct Invocation {
  Config config;
  std::string source;  // the file read; empty: none
  // Settings that are valid and can't serve what they seem to be for, a sentence each.
  std::vector<std::string> warnings;
  // Set by --validate, --version and --help: print it on stdout and exit with kExitOk.
  std::optional<std::string> print;
};

// `argv` does not contain the program's name. Variables that are no setting are ignored, whatever
// their prefix, since service discovery makes some. INVALID_ARGUMENT names the place
// (file:line:column, variable or flag), field and value. NOT_FOUND or PERMISSION_DENIED: the file.
// All errors mean kExitUsage.
absl::StatusOr<Invocation> LoadConfig(const std::vector<std::string>& argv,
                                      const std::map<std::string, std::string>& environment);

// The same, from main's own arguments.
absl::StatusOr<Invocation> LoadConfig(int argc, const char* const* argv,
                                      const char* const* environ);

// Checks the settings as LoadConfig does, and converts them. INVALID_ARGUMENT names field and
// value.
absl::StatusOr<Config> ConfigOf(const config::RefitdConfig& settings);

// The settings of the policy. LoadConfig has checked that they make a policy.
PolicySettings PolicySettingsOf(const Config& config);

// The configuration as textproto with every setting in it, as --validate prints it.
std::string FormatConfig(const Config& config);

}  // namespace refitd

#endif  // REFITD_DAEMON_CONFIG_H_
