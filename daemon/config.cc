#include "daemon/config.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/text_format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <limits>
#include <memory>
#include <string_view>
#include <utility>

#include "daemon/config.pb.h"
#include "daemon/process/flag_text.h"
#include "daemon/process/version.h"
#include "transport/base/status.h"
#include "transport/base/unique_fd.h"

namespace refitd {
namespace {

using config::RefitdConfig;
using google::protobuf::EnumValueDescriptor;
using google::protobuf::FieldDescriptor;
using ProtoMessage = google::protobuf::Message;
using google::protobuf::Reflection;
using google::protobuf::TextFormat;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// One setting: its flag `--name`, its variable REFITD_NAME, and its field in the file, whose name
// the flag has.
struct Setting {
  const char* name;
  const char* field;
  const char* help;
  const char* alias = nullptr;  // another name of the flag and of the variable
};

constexpr std::array kSettings = {
    Setting{"listen-unix-path", "listen.unix_path", "path of the control plane's unix socket",
            "listen-unix"},
    Setting{"listen-unix-mode", "listen.unix_mode", "mode of the sockets' files, octal"},
    Setting{"listen-tcp", "listen.tcp", "further listeners, HOST:PORT[,HOST:PORT...]"},
    Setting{"listen-insecure", "listen.insecure",
            "allow TCP without TLS: no encryption, no authentication", "insecure"},
    Setting{"tls-certificate", "tls.certificate", "this daemon's certificate and its chain, PEM"},
    Setting{"tls-key", "tls.key", "the certificate's private key, PEM"},
    Setting{"tls-roots", "tls.roots", "roots that sign the certificates of others, PEM"},
    Setting{"allowed-uids", "allowed_uids", "users who may use the unix sockets, UID[,UID...]"},
    Setting{"allowed-gids", "allowed_gids", "groups whose members may, GID[,GID...]"},
    Setting{"audit-file", "audit.file", "file for the audit log; empty: none"},
    Setting{"audit-journal", "audit.journal", "audit log to journald, true or false"},
    Setting{"log-format", "log.format", "text or json"},
    Setting{"log-level", "log.level", "debug, info, warning or error"},
    Setting{"log-file", "log.file", "file to append to; empty: stderr"},
    Setting{"limits-default-duration-ms", "limits.default_duration_ms",
            "of an update whose Begin says none"},
    Setting{"limits-max-duration-ms", "limits.max_duration_ms", "that Begin may ask for"},
    Setting{"limits-ready-ms", "limits.ready_ms", "Prepare to Ready"},
    Setting{"limits-ack-ms", "limits.ack_ms", "a bucket to its acknowledgement"},
    Setting{"limits-idle-ms", "limits.idle_ms", "an update without any call"},
    Setting{"limits-lease-ms", "limits.lease_ms", "a leased slot not submitted"},
    Setting{"limits-compare-every", "limits.compare_every",
            "versions in which all replicas are compared, a part each"},
    Setting{"limits-outstanding-buckets", "limits.outstanding_buckets",
            "unanswered buckets of a rank"},
    Setting{"limits-inline-bytes", "limits.inline_bytes", "tensor bytes inside one call"},
    Setting{"limits-message-bytes", "limits.message_bytes", "of any gRPC message"},
    Setting{"limits-max-groups", "limits.max_groups", "groups of this daemon"},
    Setting{"limits-max-members", "limits.max_members", "members of all groups"},
    Setting{"limits-per-identity-groups", "limits.per_identity.groups",
            "that an identity made; 0: any"},
    Setting{"limits-per-identity-members", "limits.per_identity.members", "of an identity; 0: any"},
    Setting{"limits-per-identity-regions", "limits.per_identity.regions", "of an identity; 0: any"},
    Setting{"limits-per-identity-pool-bytes", "limits.per_identity.pool_bytes",
            "pools of the groups that an identity made; 0: any"},
    Setting{"limits-per-identity-updates", "limits.per_identity.updates",
            "running updates that an identity began; 0: any"},
    Setting{"limits-per-identity-mapped-bytes", "limits.per_identity.mapped_bytes",
            "host memory of an identity's members, mapped; 0: any"},
    Setting{"limits-per-identity-held-bytes", "limits.per_identity.held_bytes",
            "layouts and inline bytes of an identity's members; 0: any"},
    Setting{"limits-group-idle-ms", "limits.group_idle_ms", "a group without a member is given up"},
    Setting{"limits-max-region-bytes", "limits.max_region_bytes", "of one region"},
    Setting{"limits-mapped-bytes", "limits.mapped_bytes",
            "host memory mapped for members; 0: four times the machine's"},
    Setting{"limits-held-bytes", "limits.held_bytes",
            "layouts and inline bytes of members; 0: a quarter of the machine's memory"},
    Setting{"staging-slot-bytes", "staging.slot_bytes", "of a staging slot where a group says none",
            "slot-bytes"},
    Setting{"staging-slots", "staging.slots", "staging slots where a group says none"},
    Setting{"staging-max-pool-bytes", "staging.max_pool_bytes", "pools of all groups together"},
    Setting{"metrics-listen", "metrics.listen", "HOST:PORT that Prometheus scrapes; empty: off"},
    Setting{"metrics-insecure", "metrics.insecure", "allow metrics without TLS, true or false"},
    Setting{"daemon-id", "daemon_id", "this daemon among others; empty: the host's name"},
    Setting{"peers-advertise", "peers.advertise", "HOST:PORT that other nodes know this daemon by"},
    Setting{"peers-listen", "peers.listen",
            "listeners for links alone, HOST:PORT[,...]; empty: listen.tcp takes links"},
    Setting{
        "peers-identity", "peers.identity",
        "who other daemons are, such as spiffe://DOMAIN/refitd/*; empty: who a rule names PEER"},
    Setting{"peers-interface", "peers.interface",
            "network interface of the data plane: trusted where that is not encrypted",
            "data-interface"},
    Setting{"data-unencrypted", "data.unencrypted",
            "weights in the clear between daemons though there is TLS, true or false"},
    Setting{"data-port", "data.port", "port of the data plane; 0: a free one"},
    Setting{"data-streams", "data.streams",
            "connections of the data plane between two daemons; 0: the daemon chooses"},
    Setting{"peers-silence-ms", "peers.silence_ms", "a daemon that is silent for so long is lost"},
    Setting{"peers-relay-slow-ms", "peers.relay_slow_ms",
            "updates leave a daemon that holds them back for longer to catch-ups; 0: none"},
    Setting{"peers-wire-ms", "peers.wire_ms",
            "one collective, connecting, or waiting for a busy wire"},
    Setting{"peers-readiness-ms", "peers.readiness_ms",
            "instances' last known readiness counts for so long without the coordinator; 0: none"},
    Setting{"host-copy-threads", "host.copy_threads",
            "of the host transport; 0: one a core, at most 16"},
    Setting{"cuda-enabled", "cuda.enabled",
            "serve GPU memory where there is a driver, true or false"},
    Setting{"cuda-copy-blocks", "cuda.copy_blocks", "thread blocks of a copy kernel"},
    Setting{"cuda-device-ms", "cuda.device_ms", "device work that takes longer has failed"},
    Setting{"cuda-engine-bytes", "cuda.engine_bytes",
            "contiguous pieces from this size on go to other GPUs by copy engines; 0: none"},
    Setting{"cuda-library", "cuda.library", "the driver: a name for the loader, or a path"},
    Setting{"cuda-nccl", "cuda.nccl", "load NCCL where there is a GPU, true or false"},
    Setting{"cuda-nccl-library", "cuda.nccl_library", "NCCL: a path; empty: searched for"},
    Setting{"default-verification", "default_verification", "off, transfer or readback"},
    Setting{"catch-ups", "catch_ups",
            "late instances get the version from clean ones, true or false"},
};

constexpr bool IsNamedAsField(const Setting& setting) {
  const std::string_view name = setting.name;
  const std::string_view field = setting.field;
  for (size_t i = 0; i < field.size() && i < name.size(); ++i) {
    const char written = field[i] == '.' || field[i] == '_' ? '-' : field[i];
    if (name[i] != written) return false;
  }
  return name.size() == field.size();
}
static_assert(std::all_of(kSettings.begin(), kSettings.end(), IsNamedAsField));

std::string VariableOf(std::string_view flag) {
  std::string name = fmt::format("REFITD_{}", flag);
  for (char& c : name) c = c == '-' ? '_' : static_cast<char>(std::toupper(c));
  return name;
}

bool IsDuration(const FieldDescriptor& field) {
  return std::string_view(field.name()).ends_with("_ms");
}
bool IsSize(const FieldDescriptor& field) {
  return std::string_view(field.name()).ends_with("_bytes");
}
bool IsMode(const FieldDescriptor& field) { return field.name() == "unix_mode"; }

// ---- text to fields ----

// The message and field that `path` names.
std::pair<ProtoMessage*, const FieldDescriptor*> Resolve(RefitdConfig* config,
                                                         std::string_view path) {
  ProtoMessage* message = config;
  for (;;) {
    const size_t dot = path.find('.');
    const FieldDescriptor* field =
        message->GetDescriptor()->FindFieldByName(std::string(path.substr(0, dot)));
    REFITD_CHECK(field != nullptr);
    if (dot == std::string_view::npos) return {message, field};
    message = message->GetReflection()->MutableMessage(message, field);
    path.remove_prefix(dot + 1);
  }
}

constexpr std::array<std::pair<std::string_view, int>, 4> kSizeUnits = {
    {{"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}}};

// "64MiB" becomes 67108864 if `field` counts bytes, and "30s" 30000 if it counts milliseconds;
// other fields take plain numbers, modes octal ones.
absl::StatusOr<int64_t> ParseNumber(std::string_view text, const FieldDescriptor& field) {
  if (IsDuration(field)) {
    REFITD_ASSIGN_OR_RETURN(const auto duration, ParseDuration(text, std::chrono::milliseconds(1)));
    return duration.count();
  }
  const bool octal = IsMode(field);
  int64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number, octal ? 8 : 10);
  if (text.empty() || error != std::errc()) {
    return Error(kInvalid, "\"{}\" is not {} number", text, octal ? "an octal" : "a");
  }
  const std::string_view unit(rest, static_cast<size_t>(end - rest));
  if (unit.empty()) return number;
  for (const auto& [name, shift] : kSizeUnits) {
    if (unit != name || !IsSize(field)) continue;
    const int64_t most = std::numeric_limits<int64_t>::max() >> shift;
    if (number > most || number < -most) break;
    return number * (int64_t{1} << shift);
  }
  return Error(kInvalid, "\"{}\" is not {} number", text, octal ? "an octal" : "a");
}

absl::StatusOr<bool> ParseBool(std::string_view text) {
  if (text == "true" || text == "1") return true;
  if (text == "false" || text == "0") return false;
  return Error(kInvalid, "\"{}\" is neither true nor false", text);
}

template <typename T>
absl::StatusOr<T> Narrow(int64_t number) {
  if (number < static_cast<int64_t>(std::numeric_limits<T>::min()) ||
      number > static_cast<int64_t>(std::numeric_limits<T>::max())) {
    return Error(kInvalid, "{} is out of range", number);
  }
  return static_cast<T>(number);
}

absl::Status SetEnum(ProtoMessage* message, const FieldDescriptor* field, std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  const EnumValueDescriptor* value = field->enum_type()->FindValueByName(text);
  if (value == nullptr) {
    std::string known;
    for (int i = 0; i < field->enum_type()->value_count(); ++i) {
      known += (i == 0 ? "" : ", ") + field->enum_type()->value(i)->name();
    }
    return Error(kInvalid, "\"{}\" is none of {}", text, known);
  }
  message->GetReflection()->SetEnum(message, field, value);
  return absl::OkStatus();
}

absl::Status SetScalar(ProtoMessage* message, const FieldDescriptor* field,
                       const std::string& text) {
  const Reflection* reflection = message->GetReflection();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      reflection->SetString(message, field, text);
      return absl::OkStatus();
    case FieldDescriptor::CPPTYPE_ENUM:
      return SetEnum(message, field, text);
    case FieldDescriptor::CPPTYPE_BOOL: {
      REFITD_ASSIGN_OR_RETURN(const bool value, ParseBool(text));
      reflection->SetBool(message, field, value);
      return absl::OkStatus();
    }
    default:
      break;
  }
  REFITD_ASSIGN_OR_RETURN(const int64_t number, ParseNumber(text, *field));
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32: {
      REFITD_ASSIGN_OR_RETURN(const int32_t value, Narrow<int32_t>(number));
      reflection->SetInt32(message, field, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_UINT32: {
      REFITD_ASSIGN_OR_RETURN(const uint32_t value, Narrow<uint32_t>(number));
      reflection->SetUInt32(message, field, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_INT64:
      reflection->SetInt64(message, field, number);
      return absl::OkStatus();
    default:
      REFITD_CHECK(false);  // the schema has no other types
  }
}

absl::Status AddElement(ProtoMessage* message, const FieldDescriptor* field,
                        const std::string& text) {
  const Reflection* reflection = message->GetReflection();
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
    reflection->AddString(message, field, text);
    return absl::OkStatus();
  }
  REFITD_CHECK(field->cpp_type() == FieldDescriptor::CPPTYPE_UINT32);
  REFITD_ASSIGN_OR_RETURN(const int64_t number, ParseNumber(text, *field));
  REFITD_ASSIGN_OR_RETURN(const uint32_t value, Narrow<uint32_t>(number));
  reflection->AddUInt32(message, field, value);
  return absl::OkStatus();
}

// Replaces the whole list; empty text makes an empty list.
absl::Status SetList(ProtoMessage* message, const FieldDescriptor* field, std::string_view text) {
  message->GetReflection()->ClearField(message, field);
  while (!text.empty()) {
    const size_t comma = std::min(text.find(','), text.size());
    REFITD_RETURN_IF_ERROR(AddElement(message, field, std::string(text.substr(0, comma))));
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return absl::OkStatus();
}

// `where` names the variable or flag.
absl::Status Apply(const Setting& setting, const std::string& text, std::string_view where,
                   RefitdConfig* config) {
  const auto [message, field] = Resolve(config, setting.field);
  const absl::Status status =
      field->is_repeated() ? SetList(message, field, text) : SetScalar(message, field, text);
  if (status.ok()) return status;
  return Error(kInvalid, "{} ({}): {}", where, setting.field, Message(status));
}

// ---- the file ----

class FirstError : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int line, google::protobuf::io::ColumnNumber column,
                const std::string& message) override {
    if (!text_.empty()) return;
    // Lines and columns count from 0; -1 means the message as a whole.
    text_ =
        line < 0 ? message : fmt::format("line {}, column {}: {}", line + 1, column + 1, message);
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

absl::StatusOr<std::string> ReadConfigFile(const std::string& path) {
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.valid()) return ErrnoError(errno, path);
  std::string text;
  std::array<char, 4096> buffer;
  for (;;) {
    const ssize_t n = read(file.get(), buffer.data(), buffer.size());
    if (n < 0) return ErrnoError(errno, path);
    if (n == 0) return text;
    text.append(buffer.data(), static_cast<size_t>(n));
    if (text.size() > static_cast<size_t>(kMaxConfigFileBytes)) {
      return Error(kInvalid, "{}: more than {} bytes", path, kMaxConfigFileBytes);
    }
  }
}

absl::Status ParseConfigFile(const std::string& path, RefitdConfig* config) {
  REFITD_ASSIGN_OR_RETURN(const std::string text, ReadConfigFile(path));
  FirstError error;
  TextFormat::Parser parser;
  parser.RecordErrorsTo(&error);
  if (!parser.ParseFromString(text, config)) {
    return Error(kInvalid, "{}: {}", path, error.text());
  }
  return absl::OkStatus();
}

// ---- checks ----

absl::Status CheckRange(std::string_view field, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return Error(kInvalid, "{} is {}, must be {} to {}", field, value, least, most);
}

absl::Status CheckDuration(std::string_view field, int64_t ms) {
  constexpr int64_t kMost =
      std::chrono::duration_cast<std::chrono::milliseconds>(kMaxLimitDuration).count();
  return CheckRange(field, ms, 1, kMost);
}

// The kernel and gRPC take these values as C strings, which end at a zero byte: they would use
// another path or address than the checked one.
absl::Status CheckNoZeroByte(std::string_view field, std::string_view value) {
  const size_t at = value.find('\0');
  if (at == std::string_view::npos) return absl::OkStatus();
  return Error(kInvalid, "{} has a zero byte after \"{}\"", field, value.substr(0, at));
}

bool IsNumeric(const std::string& host) {
  in6_addr any{};
  return inet_pton(AF_INET, host.c_str(), &any) == 1 ||
         inet_pton(AF_INET6, host.c_str(), &any) == 1;
}

absl::Status CheckTcpAddress(std::string_view field, const std::string& address) {
  REFITD_RETURN_IF_ERROR(CheckNoZeroByte(field, address));
  const auto malformed = [&] {
    return Error(kInvalid,
                 "{} \"{}\" is not HOST:PORT (HOST: an address, [IPv6] or localhost; PORT: "
                 "0 to 65535)",
                 field, address);
  };
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return malformed();
  std::string host = address.substr(0, colon);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) host = host.substr(1, host.size() - 2);
  if (bracketed != (host.find(':') != std::string::npos)) return malformed();
  if (host != "localhost" && !IsNumeric(host)) return malformed();
  uint16_t port = 0;
  const char* const end = address.data() + address.size();
  const auto [rest, error] = std::from_chars(address.data() + colon + 1, end, port);
  if (error != std::errc() || rest != end) return malformed();
  return absl::OkStatus();
}

// Whether an address that CheckTcpAddress took is one of this host alone.
bool IsLoopback(std::string_view address) {
  return address.starts_with("localhost:") || address.starts_with("127.") ||
         address.starts_with("[::1]:");
}

// P9: TCP needs TLS, or `insecure`, which must be set explicitly.
absl::Status CheckGrpcOverTcp(std::string_view field,
                              const google::protobuf::RepeatedPtrField<std::string>& addresses,
                              const RefitdConfig& config) {
  REFITD_RETURN_IF_ERROR(
      CheckRange(fmt::format("number of {}", field), addresses.size(), 0, kMaxTcpListeners));
  for (const std::string& address : addresses) {
    REFITD_RETURN_IF_ERROR(CheckTcpAddress(field, address));
    if (config.listen().insecure() || !config.tls().certificate().empty()) continue;
    return Error(
        kInvalid,
        "{} \"{}\" has no TLS: anybody who reaches it could read and replace weights. Name "
        "tls.certificate, tls.key and tls.roots, use the unix socket, or accept that with "
        "--insecure (listen.insecure)",
        field, address);
  }
  return absl::OkStatus();
}

TlsFiles FromProto(const RefitdConfig::Tls& tls) {
  return {.certificate = tls.certificate(), .key = tls.key(), .roots = tls.roots()};
}

absl::Status CheckListen(const RefitdConfig::Listen& listen) {
  if (listen.unix_path().empty() || listen.unix_path()[0] != '/') {
    return Error(kInvalid, "listen.unix_path is \"{}\", must be an absolute path",
                 listen.unix_path());
  }
  REFITD_RETURN_IF_ERROR(CheckNoZeroByte("listen.unix_path", listen.unix_path()));
  if (listen.unix_path().size() > kMaxUnixPathBytes) {
    return Error(kInvalid, "listen.unix_path has {} bytes, must be at most {}",
                 listen.unix_path().size(), kMaxUnixPathBytes);
  }
  if (listen.unix_mode() > 0777) {
    return Error(kInvalid, "listen.unix_mode is {:#o}, must be at most 0777 (octal: write 0660)",
                 listen.unix_mode());
  }
  return absl::OkStatus();
}

absl::Status CheckMetrics(const RefitdConfig& config) {
  const std::string& address = config.metrics().listen();
  if (address.empty()) return absl::OkStatus();
  REFITD_RETURN_IF_ERROR(CheckTcpAddress("metrics.listen", address));
  if (config.listen().insecure() || config.metrics().insecure()) return absl::OkStatus();
  if (!FromProto(config.tls()).empty()) return absl::OkStatus();
  return Error(kInvalid,
               "metrics.listen \"{}\" has no TLS: anybody who reaches it could read the names of "
               "groups. Name certificates (tls), or accept that with --metrics-insecure "
               "(metrics.insecure)",
               address);
}

absl::Status CheckTcp(const RefitdConfig& config) {
  REFITD_RETURN_IF_ERROR(
      CheckTlsFiles(FromProto(config.tls()), "tls.certificate", "tls.key", "tls.roots"));
  REFITD_RETURN_IF_ERROR(CheckGrpcOverTcp("listen.tcp", config.listen().tcp(), config));
  REFITD_RETURN_IF_ERROR(CheckGrpcOverTcp("peers.listen", config.peers().listen(), config));
  REFITD_RETURN_IF_ERROR(CheckMetrics(config));
  const std::string& identity = config.peers().identity();
  if (identity.empty()) return absl::OkStatus();
  REFITD_RETURN_IF_ERROR(CheckIdentityPattern(identity, "peers.identity"));
  if (!config.tls().certificate().empty()) return absl::OkStatus();
  return Error(kInvalid, "peers.identity is \"{}\", but without tls nobody has an identity",
               identity);
}

absl::Status CheckPerIdentity(const RefitdConfig::Limits::PerIdentity& limits) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const auto& [field, value] :
       {std::pair("groups", limits.groups()), std::pair("members", limits.members()),
        std::pair("regions", limits.regions()), std::pair("pool_bytes", limits.pool_bytes()),
        std::pair("updates", limits.updates()), std::pair("mapped_bytes", limits.mapped_bytes()),
        std::pair("held_bytes", limits.held_bytes())}) {
    REFITD_RETURN_IF_ERROR(
        CheckRange(fmt::format("limits.per_identity.{}", field), value, 0, kMost));
  }
  return absl::OkStatus();
}

absl::Status CheckAudit(const RefitdConfig::Audit& audit) {
  REFITD_RETURN_IF_ERROR(CheckNoZeroByte("audit.file", audit.file()));
  if (audit.file().empty() || audit.file()[0] == '/') return absl::OkStatus();
  return Error(kInvalid, "audit.file is \"{}\", must be an absolute path", audit.file());
}

absl::Status CheckLimits(const RefitdConfig::Limits& limits) {
  REFITD_RETURN_IF_ERROR(CheckDuration("limits.max_duration_ms", limits.max_duration_ms()));
  REFITD_RETURN_IF_ERROR(CheckRange("limits.default_duration_ms", limits.default_duration_ms(), 1,
                                    limits.max_duration_ms()));
  REFITD_RETURN_IF_ERROR(CheckDuration("limits.ready_ms", limits.ready_ms()));
  REFITD_RETURN_IF_ERROR(CheckDuration("limits.ack_ms", limits.ack_ms()));
  REFITD_RETURN_IF_ERROR(CheckDuration("limits.idle_ms", limits.idle_ms()));
  REFITD_RETURN_IF_ERROR(CheckDuration("limits.lease_ms", limits.lease_ms()));
  REFITD_RETURN_IF_ERROR(CheckDuration("limits.group_idle_ms", limits.group_idle_ms()));
  REFITD_RETURN_IF_ERROR(CheckRange("limits.outstanding_buckets", limits.outstanding_buckets(), 1,
                                    kMaxConfiguredOutstanding));
  REFITD_RETURN_IF_ERROR(
      CheckRange("limits.compare_every", limits.compare_every(), 1, kMaxConfiguredCompareEvery));
  REFITD_RETURN_IF_ERROR(CheckRange("limits.message_bytes", limits.message_bytes(),
                                    kMinMessageBytes + kMessageOverheadBytes, kMaxMessageBytes));
  REFITD_RETURN_IF_ERROR(CheckRange("limits.inline_bytes", limits.inline_bytes(), 1,
                                    limits.message_bytes() - kMessageOverheadBytes));
  REFITD_RETURN_IF_ERROR(
      CheckRange("limits.max_groups", limits.max_groups(), 1, kMaxConfiguredGroups));
  REFITD_RETURN_IF_ERROR(
      CheckRange("limits.max_members", limits.max_members(), 1, kMaxConfiguredMembers));
  REFITD_RETURN_IF_ERROR(CheckRange("limits.max_region_bytes", limits.max_region_bytes(),
                                    kSlotBytesMultiple, kMaxConfiguredRegionBytes));
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  REFITD_RETURN_IF_ERROR(CheckRange("limits.mapped_bytes", limits.mapped_bytes(), 0, kMost));
  REFITD_RETURN_IF_ERROR(CheckRange("limits.held_bytes", limits.held_bytes(), 0, kMost));
  return CheckPerIdentity(limits.per_identity());
}

absl::Status CheckStaging(const RefitdConfig::Staging& staging) {
  REFITD_RETURN_IF_ERROR(
      CheckRange("staging.slot_bytes", staging.slot_bytes(), kMinSlotBytes, kMaxSlotBytes));
  if (staging.slot_bytes() % kSlotBytesMultiple != 0) {
    return Error(kInvalid, "staging.slot_bytes is {}, must be a multiple of {}",
                 staging.slot_bytes(), kSlotBytesMultiple);
  }
  REFITD_RETURN_IF_ERROR(
      CheckRange("staging.slots", staging.slots(), kMinConfiguredSlots, kMaxConfiguredSlots));
  const int64_t one_pool = staging.slot_bytes() * staging.slots();
  if (staging.max_pool_bytes() < one_pool) {
    return Error(kInvalid,
                 "staging.max_pool_bytes is {}, must hold one pool: slot_bytes * slots = {}",
                 staging.max_pool_bytes(), one_pool);
  }
  return absl::OkStatus();
}

// "HOST:PORT" with a host's name or address; nothing is resolved here.
absl::Status CheckAdvertise(const std::string& address) {
  constexpr size_t kMaxBytes = 128;  // other daemons get the address in a message
  const size_t colon = address.rfind(':');
  const bool port = colon != std::string::npos && colon > 0 && colon + 1 < address.size() &&
                    address.find_first_not_of("0123456789", colon + 1) == std::string::npos;
  if (port && address.size() <= kMaxBytes &&
      address.find_first_of(std::string_view("/ \t\n\0", 5)) == std::string::npos) {
    return absl::OkStatus();
  }
  return Error(kInvalid, "peers.advertise is \"{}\", must be HOST:PORT of at most {} bytes",
               address, kMaxBytes);
}

absl::Status CheckPeers(const RefitdConfig& config) {
  constexpr std::string_view kAllowed =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
  if (config.daemon_id().size() > kMaxConfiguredDaemonId ||
      config.daemon_id().find_first_not_of(kAllowed) != std::string::npos) {
    return Error(kInvalid, "daemon_id is \"{}\", must be at most {} characters of [A-Za-z0-9._-]",
                 config.daemon_id(), kMaxConfiguredDaemonId);
  }
  const RefitdConfig::Peers& peers = config.peers();
  if (!peers.advertise().empty()) REFITD_RETURN_IF_ERROR(CheckAdvertise(peers.advertise()));
  constexpr size_t kMaxInterfaceBytes = 15;  // IFNAMSIZ less the end
  if (peers.interface().empty() || peers.interface().size() > kMaxInterfaceBytes ||
      peers.interface().find_first_of(std::string_view("/ \t\n\0", 5)) != std::string::npos) {
    return Error(kInvalid, "peers.interface is \"{}\", must be the name of a network interface",
                 peers.interface());
  }
  REFITD_RETURN_IF_ERROR(CheckDuration("peers.silence_ms", peers.silence_ms()));
  REFITD_RETURN_IF_ERROR(CheckRange("peers.silence_ms", peers.silence_ms(), ToMillis(kMinSilence),
                                    ToMillis(kMaxLimitDuration)));
  REFITD_RETURN_IF_ERROR(
      CheckRange("peers.readiness_ms", peers.readiness_ms(), 0, ToMillis(kMaxLimitDuration)));
  REFITD_RETURN_IF_ERROR(
      CheckRange("peers.relay_slow_ms", peers.relay_slow_ms(), 0, ToMillis(kMaxLimitDuration)));
  return CheckDuration("peers.wire_ms", peers.wire_ms());
}

absl::Status CheckData(const RefitdConfig::Data& data) {
  REFITD_RETURN_IF_ERROR(CheckRange("data.port", data.port(), 0, 65'535));
  return CheckRange("data.streams", data.streams(), 0, kMaxConfiguredStreams);
}

absl::Status CheckCuda(const RefitdConfig::Cuda& cuda) {
  REFITD_RETURN_IF_ERROR(
      CheckRange("cuda.copy_blocks", cuda.copy_blocks(), 1, kMaxConfiguredCopyBlocks));
  REFITD_RETURN_IF_ERROR(CheckDuration("cuda.device_ms", cuda.device_ms()));
  REFITD_RETURN_IF_ERROR(
      CheckRange("cuda.engine_bytes", cuda.engine_bytes(), 0, std::numeric_limits<int64_t>::max()));
  REFITD_RETURN_IF_ERROR(CheckNoZeroByte("cuda.library", cuda.library()));
  REFITD_RETURN_IF_ERROR(CheckNoZeroByte("cuda.nccl_library", cuda.nccl_library()));
  if (cuda.library().empty() || cuda.library().size() > kMaxCudaLibraryBytes) {
    return Error(kInvalid, "cuda.library has {} bytes, must have 1 to {}", cuda.library().size(),
                 kMaxCudaLibraryBytes);
  }
  if (cuda.nccl_library().size() <= kMaxCudaLibraryBytes) return absl::OkStatus();
  return Error(kInvalid, "cuda.nccl_library has {} bytes, must have at most {}",
               cuda.nccl_library().size(), kMaxCudaLibraryBytes);
}

absl::Status CheckConfig(const RefitdConfig& config) {
  REFITD_RETURN_IF_ERROR(CheckCuda(config.cuda()));
  REFITD_RETURN_IF_ERROR(CheckPeers(config));
  REFITD_RETURN_IF_ERROR(CheckData(config.data()));
  REFITD_RETURN_IF_ERROR(CheckListen(config.listen()));
  REFITD_RETURN_IF_ERROR(CheckLimits(config.limits()));
  REFITD_RETURN_IF_ERROR(CheckStaging(config.staging()));
  REFITD_RETURN_IF_ERROR(CheckTcp(config));
  REFITD_RETURN_IF_ERROR(CheckNoZeroByte("log.file", config.log().file()));
  REFITD_RETURN_IF_ERROR(CheckAudit(config.audit()));
  return CheckRange("host.copy_threads", config.host().copy_threads(), 0,
                    kMaxConfiguredCopyThreads);
}

// ---- between the file's message and Config ----

Verification FromProto(RefitdConfig::Verification verification) {
  switch (verification) {
    case RefitdConfig::OFF:
      return Verification::kOff;
    case RefitdConfig::TRANSFER:
      return Verification::kTransfer;
    case RefitdConfig::READBACK:
      return Verification::kReadback;
  }
  return Verification::kReadback;
}

RefitdConfig::Verification ToProto(Verification verification) {
  switch (verification) {
    case Verification::kOff:
      return RefitdConfig::OFF;
    case Verification::kTransfer:
      return RefitdConfig::TRANSFER;
    case Verification::kReadback:
      return RefitdConfig::READBACK;
  }
  return RefitdConfig::READBACK;
}

LimitsConfig FromProto(const RefitdConfig::Limits& limits) {
  using Ms = std::chrono::milliseconds;
  return LimitsConfig{.default_duration = Ms(limits.default_duration_ms()),
                      .max_duration = Ms(limits.max_duration_ms()),
                      .ready = Ms(limits.ready_ms()),
                      .ack = Ms(limits.ack_ms()),
                      .idle = Ms(limits.idle_ms()),
                      .lease = Ms(limits.lease_ms()),
                      .outstanding_buckets = limits.outstanding_buckets(),
                      .compare_every = limits.compare_every(),
                      .inline_bytes = limits.inline_bytes(),
                      .message_bytes = limits.message_bytes(),
                      .max_groups = limits.max_groups(),
                      .max_members = limits.max_members(),
                      .max_region_bytes = limits.max_region_bytes(),
                      .mapped_bytes = limits.mapped_bytes(),
                      .held_bytes = limits.held_bytes(),
                      .group_idle = Ms(limits.group_idle_ms()),
                      .per_identity = {.groups = limits.per_identity().groups(),
                                       .members = limits.per_identity().members(),
                                       .regions = limits.per_identity().regions(),
                                       .pool_bytes = limits.per_identity().pool_bytes(),
                                       .updates = limits.per_identity().updates(),
                                       .mapped_bytes = limits.per_identity().mapped_bytes(),
                                       .held_bytes = limits.per_identity().held_bytes()}};
}

void ToProto(const LimitsConfig& limits, RefitdConfig::Limits* out) {
  const auto ms = [](Duration duration) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(duration).count();
  };
  out->set_default_duration_ms(ms(limits.default_duration));
  out->set_max_duration_ms(ms(limits.max_duration));
  out->set_ready_ms(ms(limits.ready));
  out->set_ack_ms(ms(limits.ack));
  out->set_idle_ms(ms(limits.idle));
  out->set_lease_ms(ms(limits.lease));
  out->set_outstanding_buckets(limits.outstanding_buckets);
  out->set_compare_every(limits.compare_every);
  out->set_inline_bytes(limits.inline_bytes);
  out->set_message_bytes(limits.message_bytes);
  out->set_max_groups(limits.max_groups);
  out->set_max_members(limits.max_members);
  out->set_max_region_bytes(limits.max_region_bytes);
  out->set_mapped_bytes(limits.mapped_bytes);
  out->set_held_bytes(limits.held_bytes);
  out->set_group_idle_ms(ms(limits.group_idle));
  RefitdConfig::Limits::PerIdentity* const each = out->mutable_per_identity();
  each->set_groups(limits.per_identity.groups);
  each->set_members(limits.per_identity.members);
  each->set_regions(limits.per_identity.regions);
  each->set_pool_bytes(limits.per_identity.pool_bytes);
  each->set_updates(limits.per_identity.updates);
  each->set_mapped_bytes(limits.per_identity.mapped_bytes);
  each->set_held_bytes(limits.per_identity.held_bytes);
}

// Role follows the file's enumerators, which begin with 1.
static_assert(static_cast<int>(Role::kTrainer) + 1 == RefitdConfig::Rule::TRAINER);
static_assert(static_cast<int>(Role::kPeer) + 1 == RefitdConfig::Rule::PEER);

PolicyRule FromProto(const RefitdConfig::Rule& in) {
  PolicyRule rule{.who = in.who(),
                  .roles = {},
                  .group = in.group(),
                  .any_owner = in.any_owner(),
                  .owner = in.owner()};
  for (const int role : in.role()) rule.roles.push_back(static_cast<Role>(role - 1));
  return rule;
}

void ToProto(const PolicyRule& rule, RefitdConfig::Rule* out) {
  out->set_who(rule.who);
  for (const Role role : rule.roles) {
    out->add_role(static_cast<RefitdConfig::Rule::Role>(static_cast<int>(role) + 1));
  }
  out->set_group(rule.group);
  out->set_any_owner(rule.any_owner);
  out->set_owner(rule.owner);
}

// The enumerators of LogFormat and LogLevel follow the file's.
static_assert(static_cast<int>(LogFormat::kJson) == RefitdConfig::Log::JSON);
static_assert(static_cast<int>(LogLevel::kError) == RefitdConfig::Log::ERROR);

// The kernel's name of the host, reduced to the characters of a daemon's id.
std::string HostName() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0 || name[0] == 0) return "refitd";
  std::string id(name.data());
  for (char& c : id) {
    const bool allowed = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' || c == '_';
    if (!allowed) c = '-';
  }
  return id.substr(0, kMaxConfiguredDaemonId);
}

Config FromProto(const RefitdConfig& in) {
  Config config;
  config.daemon_id = in.daemon_id().empty() ? HostName() : in.daemon_id();
  config.peers = PeersConfig{.advertise = in.peers().advertise(),
                             .interface = in.peers().interface(),
                             .silence = std::chrono::milliseconds(in.peers().silence_ms()),
                             .wire = std::chrono::milliseconds(in.peers().wire_ms()),
                             .listen = {in.peers().listen().begin(), in.peers().listen().end()},
                             .identity = in.peers().identity(),
                             .readiness = std::chrono::milliseconds(in.peers().readiness_ms()),
                             .relay_slow = std::chrono::milliseconds(in.peers().relay_slow_ms())};
  config.data = DataConfig{.unencrypted = in.data().unencrypted(),
                           .port = static_cast<uint16_t>(in.data().port()),
                           .streams = in.data().streams()};
  config.tls = FromProto(in.tls());
  config.listen = ListenConfig{.unix_path = in.listen().unix_path(),
                               .unix_mode = in.listen().unix_mode(),
                               .tcp = {in.listen().tcp().begin(), in.listen().tcp().end()},
                               .insecure = in.listen().insecure()};
  config.access.uids.assign(in.allowed_uids().begin(), in.allowed_uids().end());
  config.access.gids.assign(in.allowed_gids().begin(), in.allowed_gids().end());
  if (config.access.uids.empty()) {
    config.access.uids = {0};
    if (geteuid() != 0) config.access.uids.push_back(geteuid());
  }
  for (const RefitdConfig::Rule& rule : in.rule()) config.rules.push_back(FromProto(rule));
  config.audit = {.file = in.audit().file(), .journal = in.audit().journal()};
  config.log = LogConfig{.format = static_cast<LogFormat>(in.log().format()),
                         .level = static_cast<LogLevel>(in.log().level()),
                         .file = in.log().file()};
  config.limits = FromProto(in.limits());
  config.staging = StagingConfig{.slot_bytes = in.staging().slot_bytes(),
                                 .slots = in.staging().slots(),
                                 .max_pool_bytes = in.staging().max_pool_bytes()};
  config.metrics = {.listen = in.metrics().listen(), .insecure = in.metrics().insecure()};
  config.copy_threads = in.host().copy_threads();
  config.cuda = CudaConfig{.enabled = in.cuda().enabled(),
                           .copy_blocks = in.cuda().copy_blocks(),
                           .device = std::chrono::milliseconds(in.cuda().device_ms()),
                           .engine_bytes = in.cuda().engine_bytes(),
                           .library = in.cuda().library(),
                           .nccl = in.cuda().nccl(),
                           .nccl_library = in.cuda().nccl_library()};
  config.default_verification = FromProto(in.default_verification());
  config.catch_ups = in.catch_ups();
  return config;
}

RefitdConfig ToProto(const Config& config) {
  RefitdConfig out;
  out.set_daemon_id(config.daemon_id);
  out.mutable_peers()->set_advertise(config.peers.advertise);
  out.mutable_peers()->set_interface(config.peers.interface);
  out.mutable_peers()->set_silence_ms(ToMillis(config.peers.silence));
  out.mutable_peers()->set_wire_ms(ToMillis(config.peers.wire));
  for (const std::string& address : config.peers.listen) out.mutable_peers()->add_listen(address);
  out.mutable_peers()->set_identity(config.peers.identity);
  out.mutable_peers()->set_readiness_ms(ToMillis(config.peers.readiness));
  out.mutable_peers()->set_relay_slow_ms(ToMillis(config.peers.relay_slow));
  out.mutable_data()->set_unencrypted(config.data.unencrypted);
  out.mutable_data()->set_port(config.data.port);
  out.mutable_data()->set_streams(config.data.streams);
  out.mutable_tls()->set_certificate(config.tls.certificate);
  out.mutable_tls()->set_key(config.tls.key);
  out.mutable_tls()->set_roots(config.tls.roots);
  out.mutable_listen()->set_unix_path(config.listen.unix_path);
  out.mutable_listen()->set_unix_mode(config.listen.unix_mode);
  for (const std::string& address : config.listen.tcp) out.mutable_listen()->add_tcp(address);
  out.mutable_listen()->set_insecure(config.listen.insecure);
  for (const uid_t uid : config.access.uids) out.add_allowed_uids(uid);
  for (const gid_t gid : config.access.gids) out.add_allowed_gids(gid);
  for (const PolicyRule& rule : config.rules) ToProto(rule, out.add_rule());
  out.mutable_audit()->set_file(config.audit.file);
  out.mutable_audit()->set_journal(config.audit.journal);
  out.mutable_log()->set_format(static_cast<RefitdConfig::Log::Format>(config.log.format));
  out.mutable_log()->set_level(static_cast<RefitdConfig::Log::Level>(config.log.level));
  out.mutable_log()->set_file(config.log.file);
  ToProto(config.limits, out.mutable_limits());
  out.mutable_staging()->set_slot_bytes(config.staging.slot_bytes);
  out.mutable_staging()->set_slots(config.staging.slots);
  out.mutable_staging()->set_max_pool_bytes(config.staging.max_pool_bytes);
  out.mutable_metrics()->set_listen(config.metrics.listen);
  out.mutable_metrics()->set_insecure(config.metrics.insecure);
  out.mutable_host()->set_copy_threads(config.copy_threads);
  out.mutable_cuda()->set_enabled(config.cuda.enabled);
  out.mutable_cuda()->set_copy_blocks(config.cuda.copy_blocks);
  out.mutable_cuda()->set_device_ms(ToMillis(config.cuda.device));
  out.mutable_cuda()->set_engine_bytes(config.cuda.engine_bytes);
  out.mutable_cuda()->set_library(config.cuda.library);
  out.mutable_cuda()->set_nccl(config.cuda.nccl);
  out.mutable_cuda()->set_nccl_library(config.cuda.nccl_library);
  out.set_default_verification(ToProto(config.default_verification));
  out.set_catch_ups(config.catch_ups);
  return out;
}

class OctalPrinter : public TextFormat::FastFieldValuePrinter {
 public:
  void PrintUInt32(google::protobuf::uint32 value,
                   TextFormat::BaseTextGenerator* generator) const override {
    generator->PrintString(fmt::format("0{:o}", value));
  }
};

// ---- the command line ----

struct CommandLine {
  std::string config_file;
  bool validate = false;
  std::array<std::string, kSettings.size()> values;
  std::array<bool, kSettings.size()> given{};
  std::optional<std::string> help;
};

std::string Lowercase(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

// What the help says of the values that the setting takes.
std::string TypeOf(const FieldDescriptor& field) {
  if (field.is_repeated()) return "LIST";
  if (IsDuration(field)) return "DURATION";
  if (IsSize(field)) return "SIZE";
  if (IsMode(field)) return "OCTAL";
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      return "TEXT";
    case FieldDescriptor::CPPTYPE_BOOL:
      return "BOOL";
    case FieldDescriptor::CPPTYPE_ENUM:
      break;
    default:
      return "INT";
  }
  std::string values;
  for (int i = 0; i < field.enum_type()->value_count(); ++i) {
    values += (i == 0 ? "" : "|") + Lowercase(field.enum_type()->value(i)->name());
  }
  return values;
}

std::string SizeText(int64_t bytes) {
  for (auto unit = kSizeUnits.rbegin(); unit != kSizeUnits.rend(); ++unit) {
    const int64_t size = int64_t{1} << unit->second;
    if (bytes != 0 && bytes % size == 0) return fmt::format("{}{}", bytes / size, unit->first);
  }
  return fmt::format("{}", bytes);
}

// As the flag takes it; empty: there is none, or it is an empty text.
std::string DefaultOf(const FieldDescriptor& field) {
  if (!field.has_default_value()) return "";
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      return field.default_value_string();
    case FieldDescriptor::CPPTYPE_BOOL:
      return field.default_value_bool() ? "true" : "false";
    case FieldDescriptor::CPPTYPE_ENUM:
      return Lowercase(field.default_value_enum()->name());
    case FieldDescriptor::CPPTYPE_UINT32:
      return fmt::format("0{:o}", field.default_value_uint32());  // a mode
    case FieldDescriptor::CPPTYPE_INT32:
      return fmt::format("{}", field.default_value_int32());
    default:
      break;
  }
  const int64_t value = field.default_value_int64();
  if (IsDuration(field)) return FormatDuration(std::chrono::milliseconds(value));
  return IsSize(field) ? SizeText(value) : fmt::format("{}", value);
}

// Adds the setting's flag under the heading of its message.
CLI::Option* AddFlag(const Setting& setting, std::string* value, CLI::App* app) {
  RefitdConfig schema;
  const FieldDescriptor& field = *Resolve(&schema, setting.field).second;
  const std::string alias = setting.alias == nullptr ? "" : fmt::format(",--{}", setting.alias);
  CLI::Option* const option =
      app->add_option(fmt::format("--{}{}", setting.name, alias), *value, setting.help);
  const std::string_view path = setting.field;
  const size_t dot = path.find('.');
  option->group(dot == std::string_view::npos ? "General" : std::string(path.substr(0, dot)));
  // CLI11 would take a default of its own for the value of a flag that stands alone.
  const std::string standard = DefaultOf(field);
  option->type_name(TypeOf(field) + (standard.empty() ? "" : "=" + standard));
  const bool flag = !field.is_repeated() && field.cpp_type() == FieldDescriptor::CPPTYPE_BOOL;
  if (flag) option->expected(0, 1);  // alone it means true
  return option;
}

// The flag that was likely meant; empty: none is alike.
std::string LikelyFlag(const std::string& word) {
  std::vector<std::string> flags;
  for (const Setting& setting : kSettings) flags.push_back(fmt::format("--{}", setting.name));
  if (!word.starts_with("--")) return "";
  const std::string end = word.substr(1, word.find('=') - 1);  // "-ready-ms" of "--ready-ms=1"
  const auto longer = std::find_if(flags.begin(), flags.end(),
                                   [&end](const std::string& flag) { return flag.ends_with(end); });
  return longer != flags.end() ? *longer : Nearest("-" + end, flags);
}

absl::Status Unexpected(const std::string& word) {
  const std::string likely = LikelyFlag(word);
  return Error(kInvalid, "refitd takes no \"{}\"{} (refitd --help lists the flags)", word,
               likely.empty() ? "" : fmt::format("; did you mean {}?", likely));
}

// Only this function sees CLI11's exceptions.
absl::StatusOr<CommandLine> ParseCommandLine(std::vector<std::string> argv) {
  CommandLine line;
  CLI::App app("refitd: keeps inference engines' weights in step with their trainers'.", "refitd");
  app.footer(
      "Each setting is also a field of the file (--staging-slot-bytes: staging.slot_bytes) and a\n"
      "variable (REFITD_STAGING_SLOT_BYTES); flags win over variables, variables over the file.\n"
      "DURATION: 500ms, 30s, 2m, 1h, or milliseconds; SIZE: 64MiB, or bytes; LIST: A,B,C.\n"
      "Exit codes: 0 done, 1 failed while running, 2 bad flag, variable or file, 3 socket or port "
      "in "
      "use.");
  app.add_option("--config", line.config_file, "file of settings, textproto (REFITD_CONFIG)");
  app.add_flag("--validate", line.validate, "check the configuration, print it, and exit");
  bool version = false;
  app.add_flag("--version", version, "print version and build, and exit");
  std::array<CLI::Option*, kSettings.size()> options{};
  for (size_t i = 0; i < kSettings.size(); ++i) {
    options[i] = AddFlag(kSettings[i], &line.values[i], &app);
  }
  try {
    std::reverse(argv.begin(), argv.end());  // CLI11 wants them reversed
    app.parse(std::move(argv));
  } catch (const CLI::CallForHelp&) {
    line.help = app.help();
    return line;
  } catch (const CLI::ParseError& error) {
    if (const auto unexpected = app.remaining(); !unexpected.empty()) {
      return Unexpected(unexpected.front());
    }
    return Error(kInvalid, "{} (refitd --help lists the flags)", error.what());
  }
  for (size_t i = 0; i < kSettings.size(); ++i) {
    line.given[i] = options[i]->count() > 0;
    if (line.given[i] && options[i]->get_expected_min() == 0 && line.values[i].empty()) {
      line.values[i] = "true";
    }
  }
  if (version) line.help = fmt::format("refitd {}\n{}\n", kVersion, BuildInfo());
  return line;
}

// Why daemons of other nodes are taken to have a part in this daemon's groups; empty: they have
// none.
std::string WhyLinked(const Config& config) {
  const std::vector<std::string>& links =
      config.peers.listen.empty() ? config.listen.tcp : config.peers.listen;
  const auto beyond = std::find_if_not(links.begin(), links.end(), IsLoopback);
  if (beyond != links.end()) return fmt::format("links are taken on {}", *beyond);
  if (!links.empty() || config.peers.identity.empty()) return "";
  return fmt::format("other daemons are {} (peers.identity)", config.peers.identity);
}

std::vector<std::string> WarningsOf(const Config& config) {
  if (config.peers.interface != kLoopbackInterface) return {};
  const std::string why = WhyLinked(config);
  if (why.empty()) return {};
  return {
      fmt::format("{}, but the data plane is on loopback (peers.interface is \"{}\"): no "
                  "weights can move to or from other nodes. Name the interface that they reach",
                  why, kLoopbackInterface)};
}

}  // namespace

absl::StatusOr<Config> ConfigOf(const RefitdConfig& settings) {
  REFITD_RETURN_IF_ERROR(CheckConfig(settings));
  Config config = FromProto(settings);
  REFITD_RETURN_IF_ERROR(Policy::Make(PolicySettingsOf(config)).status());
  return config;
}

absl::StatusOr<Invocation> LoadConfig(const std::vector<std::string>& argv,
                                      const std::map<std::string, std::string>& environment) {
  REFITD_ASSIGN_OR_RETURN(CommandLine line, ParseCommandLine(argv));
  Invocation invocation;
  invocation.print = line.help;
  if (invocation.print) return invocation;

  RefitdConfig config;
  invocation.source = line.config_file;
  if (const auto found = environment.find("REFITD_CONFIG");
      invocation.source.empty() && found != environment.end()) {
    invocation.source = found->second;
  }
  if (!invocation.source.empty()) {
    REFITD_RETURN_IF_ERROR(ParseConfigFile(invocation.source, &config));
  }
  for (const Setting& setting : kSettings) {
    for (const char* name : {setting.alias, setting.name}) {  // the field's name wins
      if (name == nullptr) continue;
      const auto found = environment.find(VariableOf(name));
      if (found == environment.end()) continue;
      REFITD_RETURN_IF_ERROR(Apply(setting, found->second, found->first, &config));
    }
  }
  for (size_t i = 0; i < kSettings.size(); ++i) {
    if (!line.given[i]) continue;
    REFITD_RETURN_IF_ERROR(
        Apply(kSettings[i], line.values[i], std::string("--") + kSettings[i].name, &config));
  }
  REFITD_ASSIGN_OR_RETURN(invocation.config, ConfigOf(config));
  invocation.warnings = WarningsOf(invocation.config);
  if (line.validate) invocation.print = FormatConfig(invocation.config);
  return invocation;
}

absl::StatusOr<Invocation> LoadConfig(int argc, const char* const* argv,
                                      const char* const* environ) {
  std::map<std::string, std::string> environment;
  for (; environ != nullptr && *environ != nullptr; ++environ) {
    const std::string_view entry(*environ);
    const size_t equals = entry.find('=');
    if (!entry.starts_with("REFITD_") || equals == std::string_view::npos) continue;
    environment.emplace(entry.substr(0, equals), entry.substr(equals + 1));
  }
  return LoadConfig(std::vector<std::string>(argv + std::min(argc, 1), argv + argc), environment);
}

PolicySettings PolicySettingsOf(const Config& config) {
  return {.rules = config.rules,
          .uids = config.access.uids,
          .gids = config.access.gids,
          .peers = config.peers.identity,
          .tls = !config.tls.empty(),
          .insecure = config.listen.insecure};
}

std::string FormatConfig(const Config& config) {
  TextFormat::Printer printer;
  const FieldDescriptor* mode = RefitdConfig::Listen::descriptor()->FindFieldByName("unix_mode");
  // The printer takes ownership if registering returns true.
  auto octal = std::make_unique<OctalPrinter>();
  if (printer.RegisterFieldValuePrinter(mode, octal.get())) {
    [[maybe_unused]] const auto* owned = octal.release();
  }
  std::string text;
  printer.PrintToString(ToProto(config), &text);
  return text;
}

int StreamsOf(const DataConfig& data, bool encrypted, unsigned processors) {
  if (data.streams != 0) return data.streams;
  if (!encrypted) return 1;
  return static_cast<int>(std::clamp<unsigned>(processors / 2, 1, kMaxChosenStreams));
}

}  // namespace refitd
