// Any file, environment and command line: a configuration that LoadConfig accepts keeps every limit
// of daemon/config.h, has no zero byte in values that become C strings, and survives being printed
// and read again (P9, P10).
#include <google/protobuf/text_format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cctype>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "daemon/config.h"
#include "tests/fuzz/inputs.pb.h"
#include "tests/fuzz/proto_mutator.h"
#include "transport/base/status.h"
#include "transport/base/unique_fd.h"

namespace refitd {
namespace {

constexpr std::array kSettings = {"listen-unix-path",
                                  "listen-unix-mode",
                                  "listen-tcp",
                                  "listen-insecure",
                                  "allowed-uids",
                                  "allowed-gids",
                                  "log-format",
                                  "log-level",
                                  "log-file",
                                  "limits-default-duration-ms",
                                  "limits-max-duration-ms",
                                  "limits-ready-ms",
                                  "limits-ack-ms",
                                  "limits-idle-ms",
                                  "limits-lease-ms",
                                  "limits-outstanding-buckets",
                                  "limits-compare-every",
                                  "limits-inline-bytes",
                                  "limits-message-bytes",
                                  "limits-max-groups",
                                  "limits-max-members",
                                  "limits-max-region-bytes",
                                  "staging-slot-bytes",
                                  "staging-slots",
                                  "staging-max-pool-bytes",
                                  "host-copy-threads",
                                  "cuda-enabled",
                                  "cuda-copy-blocks",
                                  "cuda-device-ms",
                                  "cuda-engine-bytes",
                                  "cuda-library",
                                  "cuda-nccl",
                                  "cuda-nccl-library",
                                  "metrics-listen",
                                  "metrics-insecure",
                                  "metrics-page",
                                  "tls-certificate",
                                  "tls-key",
                                  "tls-roots",
                                  "peers-listen",
                                  "peers-identity",
                                  "daemon-id",
                                  "peers-advertise",
                                  "peers-interface",
                                  "data-unencrypted",
                                  "data-port",
                                  "data-streams",
                                  "peers-silence-ms",
                                  "peers-relay-slow-ms",
                                  "peers-wire-ms",
                                  "default-verification"};

// A file in memory that lives as long as this object.
class MemoryFile {
 public:
  explicit MemoryFile(const std::string& text) : fd_(memfd_create("config", MFD_CLOEXEC)) {
    REFITD_CHECK(fd_.valid());
    REFITD_CHECK(write(fd_.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  }
  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_.get()); }

 private:
  const UniqueFd fd_;
};

bool InRange(int64_t value, int64_t least, int64_t most) { return value >= least && value <= most; }
bool IsWait(int64_t ms) { return InRange(ms, 1, kMaxLimitMs); }
bool HasNul(const std::string& text) { return text.find('\0') != std::string::npos; }

void CheckAccepted(const Config& config) {
  const Config::Listen& listen = config.listen();
  const TlsFiles tls = TlsFilesOf(config);
  REFITD_CHECK(!listen.unix_path().empty() && listen.unix_path()[0] == '/');
  REFITD_CHECK(listen.unix_path().size() <= kMaxUnixPathBytes && !HasNul(listen.unix_path()));
  REFITD_CHECK(listen.unix_mode() <= 0777);
  REFITD_CHECK(listen.tcp_size() <= kMaxTcpListeners);
  for (const auto* addresses : {&listen.tcp(), &config.peers().listen()}) {
    for (const std::string& address : *addresses) {
      REFITD_CHECK(!HasNul(address) && (listen.insecure() || !tls.empty()));
    }
  }
  const std::string& metrics = config.metrics().listen();
  REFITD_CHECK(!HasNul(metrics));
  REFITD_CHECK(metrics.empty() || listen.insecure() || config.metrics().insecure() || !tls.empty());
  REFITD_CHECK(tls.empty() || !(tls.certificate.empty() || tls.key.empty() || tls.roots.empty()));
  REFITD_CHECK(config.peers().identity().empty() || !tls.empty());
  REFITD_CHECK(!config.daemon_id().empty() && config.daemon_id().size() <= kMaxConfiguredDaemonId);
  REFITD_CHECK(!HasNul(config.peers().advertise()) && !HasNul(config.peers().interface()));
  REFITD_CHECK(!config.peers().interface().empty() && config.peers().interface().size() < 16);
  REFITD_CHECK(IsWait(config.peers().silence_ms()) && IsWait(config.peers().wire_ms()));
  REFITD_CHECK(!config.allowed_uids().empty());
  REFITD_CHECK(Policy::Make(PolicySettingsOf(config)).ok());
  const std::string& audit = config.audit().file();
  REFITD_CHECK(!HasNul(audit) && (audit.empty() || audit[0] == '/'));
  REFITD_CHECK(!HasNul(config.log().file()));

  const Config::Limits& limits = config.limits();
  REFITD_CHECK(IsWait(limits.max_duration_ms()) && IsWait(limits.default_duration_ms()));
  REFITD_CHECK(limits.default_duration_ms() <= limits.max_duration_ms());
  REFITD_CHECK(IsWait(limits.ready_ms()) && IsWait(limits.ack_ms()));
  REFITD_CHECK(IsWait(limits.processing_ms()));
  REFITD_CHECK(IsWait(limits.idle_ms()) && IsWait(limits.lease_ms()));
  REFITD_CHECK(InRange(limits.outstanding_buckets(), 1, kMaxConfiguredOutstanding));
  REFITD_CHECK(InRange(limits.compare_every(), 1, kMaxConfiguredCompareEvery));
  REFITD_CHECK(InRange(limits.message_bytes(), kMinMessageBytes, kMaxMessageBytes));
  REFITD_CHECK(InRange(limits.inline_bytes(), 1, limits.message_bytes() - kMessageOverheadBytes));
  REFITD_CHECK(InRange(limits.max_groups(), 1, kMaxConfiguredGroups));
  REFITD_CHECK(InRange(limits.max_members(), 1, kMaxConfiguredMembers));
  REFITD_CHECK(InRange(limits.max_region_bytes(), 1, kMaxConfiguredRegionBytes));
  const Config::Staging& staging = config.staging();
  REFITD_CHECK(InRange(staging.slot_bytes(), kMinSlotBytes, kMaxSlotBytes));
  REFITD_CHECK(staging.slot_bytes() % kSlotBytesMultiple == 0);
  REFITD_CHECK(InRange(staging.slots(), kMinConfiguredSlots, kMaxConfiguredSlots));
  REFITD_CHECK(staging.max_pool_bytes() >= staging.slot_bytes() * staging.slots());
  REFITD_CHECK(InRange(config.host().copy_threads(), 0, kMaxConfiguredCopyThreads));
  REFITD_CHECK(InRange(config.data().port(), 0, 65'535));
  REFITD_CHECK(InRange(config.data().streams(), 0, kMaxConfiguredStreams));
  REFITD_CHECK(InRange(config.cuda().copy_blocks(), 1, kMaxConfiguredCopyBlocks));
  REFITD_CHECK(IsWait(config.cuda().device_ms()));
  REFITD_CHECK(config.cuda().engine_bytes() >= 0);
  REFITD_CHECK(!config.cuda().library().empty() && !HasNul(config.cuda().library()));
  REFITD_CHECK(!HasNul(config.cuda().nccl_library()));

  const std::string text = FormatConfig(config);
  const MemoryFile printed(text);
  const auto again = LoadConfig({"--config", printed.path()}, {});
  REFITD_CHECK(again.ok());
  REFITD_CHECK(FormatConfig(again->config) == text);
}

std::string FlagOf(const fuzz::ConfigInput::Variable& variable) {
  return std::string("--") + kSettings[variable.setting() % kSettings.size()];
}

std::string VariableOf(const fuzz::ConfigInput::Variable& variable) {
  std::string name = std::string("REFITD_") + kSettings[variable.setting() % kSettings.size()];
  for (char& c : name) c = c == '-' ? '_' : static_cast<char>(std::toupper(c));
  return name;
}

// The kernel passes the value of a flag or variable as a C string.
std::string CString(const std::string& bytes) { return bytes.c_str(); }

void FuzzOne(const fuzz::ConfigInput& input) {
  std::string text = input.text();
  if (input.has_message()) {
    REFITD_CHECK(google::protobuf::TextFormat::PrintToString(input.message(), &text));
  }
  const MemoryFile file(text);
  std::vector<std::string> argv = {"--config", file.path()};
  for (const auto& flag : input.flags()) argv.push_back(FlagOf(flag) + "=" + CString(flag.value()));
  for (const std::string& argument : input.arguments()) {
    // Another file would make the run depend on more than its input.
    if (argument.find("config") == std::string::npos) argv.push_back(CString(argument));
  }
  std::map<std::string, std::string> environment;
  for (const auto& variable : input.environment()) {
    environment[VariableOf(variable)] = CString(variable.value());
  }
  const auto loaded = LoadConfig(argv, environment);
  if (!loaded.ok()) {
    REFITD_CHECK(loaded.status().code() == absl::StatusCode::kInvalidArgument);
    REFITD_CHECK(!loaded.status().message().empty());
  } else if (!loaded->print.has_value()) {
    CheckAccepted(loaded->config);
  }
}

}  // namespace
}  // namespace refitd

REFITD_PROTO_FUZZ_TARGET(refitd::fuzz::ConfigInput)
