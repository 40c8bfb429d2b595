#include "daemon/config.h"

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

#include "absl/strings/escaping.h"
#include "daemon/process/flag_text.h"
#include "daemon/process/version.h"
#include "daemon/sockets/name_lookup.h"
#include "transport/base/status.h"
#include "transport/base/unique_fd.h"

namespace refitd {
namespace {

using google::protobuf::FieldDescriptor;
using ProtoMessage = google::protobuf::Message;
using google::protobuf::Reflection;
using google::protobuf::TextFormat;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// One setting: its flag `--name`, its variable REFITD_NAME, and its field in the file, whose name
// the flag has. A number must be `least` to `most` (P10).
struct Setting {
  const char* name;
  const char* field;
  const char* help;
  int64_t least = std::numeric_limits<int64_t>::min();
  int64_t most = std::numeric_limits<int64_t>::max();
};

constexpr std::array kSettings = {
    Setting{"listen-unix-path", "listen.unix_path", "path of the control plane's unix socket"},
    Setting{"listen-unix-mode", "listen.unix_mode", "mode of the sockets' files, octal"},
    Setting{"listen-tcp", "listen.tcp", "further listeners, HOST:PORT[,HOST:PORT...]"},
    Setting{"listen-insecure", "listen.insecure",
            "allow TCP without TLS: no encryption, no authentication"},
    Setting{"tls-certificate", "tls.certificate", "this daemon's certificate and its chain, PEM"},
    Setting{"tls-key", "tls.key", "the certificate's private key, PEM"},
    Setting{"tls-roots", "tls.roots", "roots that sign the certificates of others, PEM"},
    Setting{"allowed-uids", "allowed_uids", "users who may use the unix sockets, UID[,UID...]"},
    Setting{"allowed-gids", "allowed_gids", "groups whose members may, GID[,GID...]"},
    Setting{"rules-file", "rules_file", "file of rules, followed while it changes; empty: none"},
    Setting{"audit-file", "audit.file", "file for the audit log; empty: none"},
    Setting{"audit-journal", "audit.journal", "audit log to journald, true or false"},
    Setting{"log-format", "log.format", "text or json"},
    Setting{"log-level", "log.level", "debug, info, warning or error"},
    Setting{"log-file", "log.file", "file to append to; empty: stderr"},
    Setting{"limits-default-duration-ms", "limits.default_duration_ms",
            "of an update whose Begin says none"},
    Setting{"limits-max-duration-ms", "limits.max_duration_ms", "that Begin may ask for", 1,
            kMaxLimitMs},
    Setting{"limits-ready-ms", "limits.ready_ms", "Prepare to Ready", 1, kMaxLimitMs},
    Setting{"limits-processing-ms", "limits.processing_ms",
            "Staged to an engine's answer that it has processed the version", 1, kMaxLimitMs},
    Setting{"limits-ack-ms", "limits.ack_ms", "a bucket to its acknowledgement", 1, kMaxLimitMs},
    Setting{"limits-idle-ms", "limits.idle_ms", "an update without any call", 1, kMaxLimitMs},
    Setting{"limits-lease-ms", "limits.lease_ms", "a leased slot not submitted", 1, kMaxLimitMs},
    Setting{"limits-compare-every", "limits.compare_every",
            "versions in which all replicas are compared, a part each", 1,
            kMaxConfiguredCompareEvery},
    Setting{"limits-outstanding-buckets", "limits.outstanding_buckets",
            "unanswered buckets of a rank", 1, kMaxConfiguredOutstanding},
    Setting{"limits-inline-bytes", "limits.inline_bytes", "tensor bytes inside one call"},
    Setting{"limits-message-bytes", "limits.message_bytes", "of any gRPC message",
            kMinMessageBytes + kMessageOverheadBytes, kMaxMessageBytes},
    Setting{"limits-max-groups", "limits.max_groups", "groups of this daemon", 1,
            kMaxConfiguredGroups},
    Setting{"limits-max-members", "limits.max_members", "members of all groups", 1,
            kMaxConfiguredMembers},
    Setting{"limits-per-identity-groups", "limits.per_identity.groups",
            "that an identity made; 0: any", 0},
    Setting{"limits-per-identity-members", "limits.per_identity.members", "of an identity; 0: any",
            0},
    Setting{"limits-per-identity-regions", "limits.per_identity.regions", "of an identity; 0: any",
            0},
    Setting{"limits-per-identity-pool-bytes", "limits.per_identity.pool_bytes",
            "pools of the groups that an identity made; 0: any", 0},
    Setting{"limits-per-identity-updates", "limits.per_identity.updates",
            "running updates that an identity began; 0: any", 0},
    Setting{"limits-per-identity-mapped-bytes", "limits.per_identity.mapped_bytes",
            "host memory of an identity's members, mapped; 0: any", 0},
    Setting{"limits-per-identity-held-bytes", "limits.per_identity.held_bytes",
            "layouts and inline bytes of an identity's members; 0: any", 0},
    Setting{"limits-group-idle-ms", "limits.group_idle_ms", "a group without a member is given up",
            1, kMaxLimitMs},
    Setting{"limits-max-region-bytes", "limits.max_region_bytes", "of one region",
            kSlotBytesMultiple, kMaxConfiguredRegionBytes},
    Setting{"limits-mapped-bytes", "limits.mapped_bytes",
            "host memory mapped for members; 0: four times the machine's", 0},
    Setting{"limits-held-bytes", "limits.held_bytes",
            "layouts and inline bytes of members; 0: a quarter of the machine's memory", 0},
    Setting{"staging-slot-bytes", "staging.slot_bytes", "of a staging slot where a group says none",
            kMinSlotBytes, kMaxSlotBytes},
    Setting{"staging-slots", "staging.slots", "staging slots where a group says none",
            kMinConfiguredSlots, kMaxConfiguredSlots},
    Setting{"staging-max-pool-bytes", "staging.max_pool_bytes", "pools of all groups together"},
    Setting{"metrics-listen", "metrics.listen", "HOST:PORT that Prometheus scrapes; empty: off"},
    Setting{"metrics-insecure", "metrics.insecure", "allow metrics without TLS, true or false"},
    Setting{"metrics-page", "metrics.page",
            "a page for browsers beside the metrics, true or false"},
    Setting{"traces-collector", "traces.collector",
            "HOST:PORT of OpenTelemetry's collector that gets updates' spans; empty: off"},
    Setting{"traces-insecure", "traces.insecure", "allow traces without TLS, true or false"},
    Setting{"traces-identity", "traces.identity", "pattern of the collector's identity"},
    Setting{"daemon-id", "daemon_id", "this daemon among others; empty: the host's name"},
    Setting{"peers-advertise", "peers.advertise", "HOST:PORT that other nodes know this daemon by"},
    Setting{"peers-listen", "peers.listen",
            "listeners for links alone, HOST:PORT[,...]; empty: listen.tcp takes links"},
    Setting{
        "peers-identity", "peers.identity",
        "who other daemons are, such as spiffe://DOMAIN/refitd/*; empty: who a rule names PEER"},
    Setting{"peers-interface", "peers.interface",
            "network interface of the data plane: trusted where that is not encrypted"},
    Setting{"data-unencrypted", "data.unencrypted",
            "weights in the clear between daemons though there is TLS, true or false"},
    Setting{"data-port", "data.port", "port of the data plane; 0: a free one", 0, 65'535},
    Setting{"data-streams", "data.streams",
            "connections of the data plane between two daemons; 0: the daemon chooses", 0,
            kMaxConfiguredStreams},
    Setting{"peers-silence-ms", "peers.silence_ms", "a daemon that is silent for so long is lost",
            kMinSilenceMs, kMaxLimitMs},
    Setting{"peers-relay-slow-ms", "peers.relay_slow_ms",
            "updates leave a daemon that holds them back for longer to catch-ups; 0: none", 0,
            kMaxLimitMs},
    Setting{"peers-wire-ms", "peers.wire_ms",
            "one collective, connecting, or waiting for a busy wire", 1, kMaxLimitMs},
    Setting{"peers-readiness-ms", "peers.readiness_ms",
            "instances' last known readiness counts for so long without the coordinator; 0: none",
            0, kMaxLimitMs},
    Setting{"host-copy-threads", "host.copy_threads",
            "of the host transport; 0: one a core, at most 16", 0, kMaxConfiguredCopyThreads},
    Setting{"cuda-enabled", "cuda.enabled",
            "serve GPU memory where there is a driver, true or false"},
    Setting{"cuda-copy-blocks", "cuda.copy_blocks", "thread blocks of a copy kernel", 1,
            kMaxConfiguredCopyBlocks},
    Setting{"cuda-device-ms", "cuda.device_ms", "device work that takes longer has failed", 1,
            kMaxLimitMs},
    Setting{"cuda-engine-bytes", "cuda.engine_bytes",
            "contiguous pieces from this size on go to other GPUs by copy engines; 0: none", 0},
    Setting{"cuda-library", "cuda.library", "the driver: a name for the loader, or a path"},
    Setting{"cuda-nccl", "cuda.nccl", "load NCCL where there is a GPU, true or false"},
    Setting{"cuda-nccl-library", "cuda.nccl_library", "NCCL: a path; empty: searched for"},
    Setting{"cuda-rails", "cuda.rails",
            "the most GPUs of a group that carry its bytes to other daemons over NCCL", 1,
            kMaxConfiguredRails},
    Setting{"default-verification", "default_verification", "off, transfer or readback"},
    Setting{"catch-ups", "catch_ups",
            "late instances get the version from clean ones, true or false"},
    Setting{"compare-sides", "compare_sides",
            "arenas' sides are compared behind each read-back, true or false"},
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

// Second names of flags, and so of variables.
constexpr std::array<std::pair<std::string_view, std::string_view>, 4> kAliases = {
    {{"listen-unix-path", "listen-unix"},
     {"listen-insecure", "insecure"},
     {"staging-slot-bytes", "slot-bytes"},
     {"peers-interface", "data-interface"}}};

// The names of the setting's flag; the last one is its field's.
std::vector<std::string> NamesOf(const Setting& setting) {
  std::vector<std::string> names;
  for (const auto& [name, alias] : kAliases) {
    if (name == setting.name) names.emplace_back(alias);
  }
  names.emplace_back(setting.name);
  return names;
}

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
std::pair<ProtoMessage*, const FieldDescriptor*> Resolve(Config* config, std::string_view path) {
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

// `text`, of a flag or variable, as the file would say it.
absl::StatusOr<std::string> InFile(std::string text, const FieldDescriptor& field) {
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
    return fmt::format("\"{}\"", absl::CEscape(text));
  }
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_BOOL) {
    REFITD_ASSIGN_OR_RETURN(const bool value, ParseBool(text));
    return value ? "true" : "false";
  }
  if (field.cpp_type() != FieldDescriptor::CPPTYPE_ENUM) {
    REFITD_ASSIGN_OR_RETURN(const int64_t number, ParseNumber(text, field));
    return std::to_string(number);
  }
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  std::string known;
  for (int i = 0; i < field.enum_type()->value_count(); ++i) {
    if (field.enum_type()->value(i)->name() == text) return text;
    known += (i == 0 ? "" : ", ") + field.enum_type()->value(i)->name();
  }
  return Error(kInvalid, "\"{}\" is none of {}", text, known);
}

// Sets the field, or adds an element to it.
absl::Status Set(ProtoMessage* message, const FieldDescriptor* field, std::string text) {
  REFITD_ASSIGN_OR_RETURN(const std::string value, InFile(std::move(text), *field));
  FirstError error;  // without it, the parser would log
  TextFormat::Parser parser;
  parser.RecordErrorsTo(&error);
  if (parser.ParseFieldValueFromString(value, field, message)) return absl::OkStatus();
  return Error(kInvalid, "{} is out of range", value);
}

// Replaces the whole list; empty text makes an empty list.
absl::Status SetList(ProtoMessage* message, const FieldDescriptor* field, std::string_view text) {
  message->GetReflection()->ClearField(message, field);
  while (!text.empty()) {
    const size_t comma = std::min(text.find(','), text.size());
    REFITD_RETURN_IF_ERROR(Set(message, field, std::string(text.substr(0, comma))));
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return absl::OkStatus();
}

// `where` names the variable or flag.
absl::Status Apply(const Setting& setting, const std::string& text, std::string_view where,
                   Config* config) {
  const auto [message, field] = Resolve(config, setting.field);
  const absl::Status status =
      field->is_repeated() ? SetList(message, field, text) : Set(message, field, text);
  if (status.ok()) return status;
  return Error(kInvalid, "{} ({}): {}", where, setting.field, Message(status));
}

// ---- the file ----

absl::Status ParseConfigFile(const std::string& path, Config* config) {
  REFITD_ASSIGN_OR_RETURN(const std::string text, ReadConfigFile(path));
  FirstError error;
  TextFormat::Parser parser;
  parser.RecordErrorsTo(&error);
  if (!parser.ParseFromString(text, config)) {
    return Error(kInvalid, "{}: {}", path, error.text());
  }
  return absl::OkStatus();
}

// Adds what `rules_file` says, where there is one.
absl::Status AddRulesFile(Config* config) {
  if (config->rules_file().empty()) return absl::OkStatus();
  Config added;
  REFITD_RETURN_IF_ERROR(ParseConfigFile(config->rules_file(), &added));
  Config others = added;
  others.clear_rule();
  others.clear_allowed_uids();
  others.clear_allowed_gids();
  std::vector<const FieldDescriptor*> fields;
  others.GetReflection()->ListFields(others, &fields);
  if (!fields.empty()) {
    return Error(kInvalid, "{}: {} is set, but rules_file may have rules and allowed users alone",
                 config->rules_file(), fields[0]->name());
  }
  config->MergeFrom(added);
  return absl::OkStatus();
}

// ---- checks ----

absl::Status CheckRange(std::string_view field, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return Error(kInvalid, "{} is {}, must be {} to {}", field, value, least, most);
}

absl::Status CheckNumbers(Config* config) {
  for (const Setting& setting : kSettings) {
    const auto [message, field] = Resolve(config, setting.field);
    const Reflection& values = *message->GetReflection();
    const auto check = [&setting = setting](int64_t value) {
      return CheckRange(setting.field, value, setting.least, setting.most);
    };
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_INT64) {
      REFITD_RETURN_IF_ERROR(check(values.GetInt64(*message, field)));
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_INT32) {
      REFITD_RETURN_IF_ERROR(check(values.GetInt32(*message, field)));
    }
  }
  return absl::OkStatus();
}

// The kernel and gRPC take these values as C strings, which end at a zero byte: they would use
// another path or address than the checked one.
absl::Status CheckNoZeroByte(std::string_view field, std::string_view value) {
  const size_t at = value.find('\0');
  if (at == std::string_view::npos) return absl::OkStatus();
  return Error(kInvalid, "{} has a zero byte after \"{}\"", field, value.substr(0, at));
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
  if (host != "localhost" && !IsNumericHost(host)) return malformed();
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
                              const Config& config) {
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

absl::Status CheckListen(const Config::Listen& listen) {
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

absl::Status CheckMetrics(const Config& config) {
  const std::string& address = config.metrics().listen();
  if (address.empty() && config.metrics().page()) {
    return Error(kInvalid, "metrics.page is true, but metrics.listen names no address to serve it");
  }
  if (address.empty()) return absl::OkStatus();
  REFITD_RETURN_IF_ERROR(CheckTcpAddress("metrics.listen", address));
  if (config.listen().insecure() || config.metrics().insecure()) return absl::OkStatus();
  if (!TlsFilesOf(config).empty()) return absl::OkStatus();
  return Error(kInvalid,
               "metrics.listen \"{}\" has no TLS: anybody who reaches it could read the names of "
               "groups. Name certificates (tls), or accept that with --metrics-insecure "
               "(metrics.insecure)",
               address);
}

absl::Status CheckTcp(const Config& config) {
  REFITD_RETURN_IF_ERROR(
      CheckTlsFiles(TlsFilesOf(config), "tls.certificate", "tls.key", "tls.roots"));
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

absl::Status CheckAudit(const Config::Audit& audit) {
  REFITD_RETURN_IF_ERROR(CheckNoZeroByte("audit.file", audit.file()));
  if (audit.file().empty() || audit.file()[0] == '/') return absl::OkStatus();
  return Error(kInvalid, "audit.file is \"{}\", must be an absolute path", audit.file());
}

absl::Status CheckLimits(const Config::Limits& limits) {
  REFITD_RETURN_IF_ERROR(CheckRange("limits.default_duration_ms", limits.default_duration_ms(), 1,
                                    limits.max_duration_ms()));
  return CheckRange("limits.inline_bytes", limits.inline_bytes(), 1,
                    limits.message_bytes() - kMessageOverheadBytes);
}

absl::Status CheckStaging(const Config::Staging& staging) {
  if (staging.slot_bytes() % kSlotBytesMultiple != 0) {
    return Error(kInvalid, "staging.slot_bytes is {}, must be a multiple of {}",
                 staging.slot_bytes(), kSlotBytesMultiple);
  }
  const int64_t one_pool = staging.slot_bytes() * staging.slots();
  if (staging.max_pool_bytes() < one_pool) {
    return Error(kInvalid,
                 "staging.max_pool_bytes is {}, must hold one pool: slot_bytes * slots = {}",
                 staging.max_pool_bytes(), one_pool);
  }
  return absl::OkStatus();
}

// "HOST:PORT" with a host's name or address; nothing is resolved here.
absl::Status CheckHostPort(std::string_view field, const std::string& address) {
  constexpr size_t kMaxBytes = 128;  // other daemons get peers.advertise in a message
  const size_t colon = address.rfind(':');
  const bool port = colon != std::string::npos && colon > 0 && colon + 1 < address.size() &&
                    address.find_first_not_of("0123456789", colon + 1) == std::string::npos;
  if (port && address.size() <= kMaxBytes &&
      address.find_first_of(std::string_view("/ \t\n\0", 5)) == std::string::npos) {
    return absl::OkStatus();
  }
  return Error(kInvalid, "{} is \"{}\", must be HOST:PORT of at most {} bytes", field, address,
               kMaxBytes);
}

absl::Status CheckPeers(const Config& config) {
  constexpr std::string_view kAllowed =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
  if (config.daemon_id().size() > kMaxConfiguredDaemonId ||
      config.daemon_id().find_first_not_of(kAllowed) != std::string::npos) {
    return Error(kInvalid, "daemon_id is \"{}\", must be at most {} characters of [A-Za-z0-9._-]",
                 config.daemon_id(), kMaxConfiguredDaemonId);
  }
  const Config::Peers& peers = config.peers();
  if (!peers.advertise().empty()) {
    REFITD_RETURN_IF_ERROR(CheckHostPort("peers.advertise", peers.advertise()));
  }
  constexpr size_t kMaxInterfaceBytes = 15;  // IFNAMSIZ less the end
  if (peers.interface().empty() || peers.interface().size() > kMaxInterfaceBytes ||
      peers.interface().find_first_of(std::string_view("/ \t\n\0", 5)) != std::string::npos) {
    return Error(kInvalid, "peers.interface is \"{}\", must be the name of a network interface",
                 peers.interface());
  }
  return absl::OkStatus();
}

// P9: names of groups and identities leave this host under TLS, unless somebody said otherwise.
absl::Status CheckTraces(const Config& config) {
  const Config::Traces& traces = config.traces();
  const bool clear = traces.insecure() || config.tls().certificate().empty();
  if (!traces.identity().empty()) {
    REFITD_RETURN_IF_ERROR(CheckIdentityPattern(traces.identity(), "traces.identity"));
    if (clear) {
      return Error(kInvalid, "traces.identity is \"{}\", but without TLS nobody has an identity",
                   traces.identity());
    }
  }
  if (traces.collector().empty()) return absl::OkStatus();
  REFITD_RETURN_IF_ERROR(CheckHostPort("traces.collector", traces.collector()));
  if (!clear || traces.insecure() || config.listen().insecure()) return absl::OkStatus();
  return Error(kInvalid,
               "traces.collector \"{}\" has no TLS: anybody on the way could read the names of "
               "groups. Name certificates (tls), or accept that with --traces-insecure "
               "(traces.insecure)",
               traces.collector());
}

absl::Status CheckCuda(const Config::Cuda& cuda) {
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

absl::Status CheckConfig(Config* config) {
  REFITD_RETURN_IF_ERROR(CheckNumbers(config));
  REFITD_RETURN_IF_ERROR(CheckCuda(config->cuda()));
  REFITD_RETURN_IF_ERROR(CheckPeers(*config));
  REFITD_RETURN_IF_ERROR(CheckTraces(*config));
  REFITD_RETURN_IF_ERROR(CheckListen(config->listen()));
  REFITD_RETURN_IF_ERROR(CheckLimits(config->limits()));
  REFITD_RETURN_IF_ERROR(CheckStaging(config->staging()));
  REFITD_RETURN_IF_ERROR(CheckTcp(*config));
  REFITD_RETURN_IF_ERROR(CheckNoZeroByte("log.file", config->log().file()));
  return CheckAudit(config->audit());
}

// Role follows the file's enumerators, which begin with 1.
static_assert(static_cast<int>(Role::kTrainer) + 1 == Config::Rule::TRAINER);
static_assert(static_cast<int>(Role::kPeer) + 1 == Config::Rule::PEER);

PolicyRule FromProto(const Config::Rule& in) {
  PolicyRule rule{.who = in.who(),
                  .roles = {},
                  .group = in.group(),
                  .any_owner = in.any_owner(),
                  .owner = in.owner()};
  for (const int role : in.role()) rule.roles.push_back(static_cast<Role>(role - 1));
  return rule;
}

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

// Sets every setting that is not set.
void Complete(Config* config) {
  if (config->daemon_id().empty()) config->set_daemon_id(HostName());
  if (config->allowed_uids().empty()) {
    config->add_allowed_uids(0);
    if (geteuid() != 0) config->add_allowed_uids(geteuid());
  }
  for (const Setting& setting : kSettings) {
    const auto [message, field] = Resolve(config, setting.field);
    if (field->is_repeated() || message->GetReflection()->HasField(*message, field)) continue;
    std::string value;
    TextFormat::PrintFieldValueToString(*message, field, /*index=*/-1, &value);
    REFITD_CHECK(TextFormat::ParseFieldValueFromString(value, field, message));
  }
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

// The help names the setting's values by this word.
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

// Returns the default in the form that the flag takes; empty: the setting has none, or an empty
// text.
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
  Config schema;
  const FieldDescriptor& field = *Resolve(&schema, setting.field).second;
  std::string names;
  for (const std::string& name : NamesOf(setting)) {
    names = fmt::format("--{}{}{}", name, names.empty() ? "" : ",", names);
  }
  CLI::Option* const option = app->add_option(names, *value, setting.help);
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
      "Exit codes: 0 done, 1 failed while running, 2 bad flag, variable or file,\n"
      "3 socket or port in use.");
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
  const auto& links =
      config.peers().listen().empty() ? config.listen().tcp() : config.peers().listen();
  const auto beyond = std::find_if_not(links.begin(), links.end(), IsLoopback);
  if (beyond != links.end()) return fmt::format("links are taken on {}", *beyond);
  if (!links.empty() || config.peers().identity().empty()) return "";
  return fmt::format("other daemons are {} (peers.identity)", config.peers().identity());
}

std::vector<std::string> WarningsOf(const Config& config) {
  if (config.peers().interface() != kLoopbackInterface) return {};
  const std::string why = WhyLinked(config);
  if (why.empty()) return {};
  return {
      fmt::format("{}, but the data plane is on loopback (peers.interface is \"{}\"): no "
                  "weights can move to or from other nodes. Name the interface that they reach",
                  why, kLoopbackInterface)};
}

}  // namespace

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

absl::StatusOr<Config> ConfigOf(Config settings) {
  Complete(&settings);
  REFITD_RETURN_IF_ERROR(CheckConfig(&settings));
  REFITD_RETURN_IF_ERROR(Policy::Make(PolicySettingsOf(settings)).status());
  return settings;
}

absl::StatusOr<Invocation> LoadConfig(const std::vector<std::string>& argv,
                                      const std::map<std::string, std::string>& environment) {
  REFITD_ASSIGN_OR_RETURN(CommandLine line, ParseCommandLine(argv));
  Invocation invocation;
  invocation.print = line.help;
  if (invocation.print) return invocation;

  Config config;
  invocation.source = line.config_file;
  if (const auto found = environment.find("REFITD_CONFIG");
      invocation.source.empty() && found != environment.end()) {
    invocation.source = found->second;
  }
  if (!invocation.source.empty()) {
    REFITD_RETURN_IF_ERROR(ParseConfigFile(invocation.source, &config));
  }
  for (const Setting& setting : kSettings) {
    for (const std::string& name : NamesOf(setting)) {  // the field's name wins
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
  REFITD_RETURN_IF_ERROR(AddRulesFile(&config));
  REFITD_ASSIGN_OR_RETURN(invocation.config, ConfigOf(std::move(config)));
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

TlsFiles TlsFilesOf(const Config& config) {
  const Config::Tls& tls = config.tls();
  return {.certificate = tls.certificate(), .key = tls.key(), .roots = tls.roots()};
}

PolicySettings PolicySettingsOf(const Config& config) {
  PolicySettings settings{.rules = {},
                          .uids = {config.allowed_uids().begin(), config.allowed_uids().end()},
                          .gids = {config.allowed_gids().begin(), config.allowed_gids().end()},
                          .peers = config.peers().identity(),
                          .tls = !TlsFilesOf(config).empty(),
                          .insecure = config.listen().insecure()};
  for (const Config::Rule& rule : config.rule()) settings.rules.push_back(FromProto(rule));
  return settings;
}

std::string FormatConfig(const Config& config) {
  TextFormat::Printer printer;
  const FieldDescriptor* mode = Config::Listen::descriptor()->FindFieldByName("unix_mode");
  // The printer takes ownership if registering returns true.
  auto octal = std::make_unique<OctalPrinter>();
  if (printer.RegisterFieldValuePrinter(mode, octal.get())) {
    [[maybe_unused]] const auto* owned = octal.release();
  }
  std::string text;
  printer.PrintToString(config, &text);
  return text;
}

int StreamsOf(const Config::Data& data, bool encrypted, unsigned processors) {
  if (data.streams() != 0) return data.streams();
  if (!encrypted) return 1;
  return static_cast<int>(std::clamp<unsigned>(processors / 2, 1, kMaxChosenStreams));
}

}  // namespace refitd
