#include "daemon/config.h"

#include <google/protobuf/util/message_differencer.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <fstream>
#include <sstream>

#include "daemon/test_util.h"
#include "proto/peer_defaults.h"

namespace refitd {
namespace {

using Environment = std::map<std::string, std::string>;

absl::StatusOr<Invocation> Load(const std::vector<std::string>& flags,
                                const Environment& environment = {}) {
  return LoadConfig(flags, environment);
}

std::string WriteFile(const TempFolder& folder, const std::string& text) {
  const std::string path = folder / "refitd.textproto";
  std::ofstream(path) << text;
  return path;
}

void RequireInvalid(const absl::StatusOr<Invocation>& loaded, const std::string& named) {
  REQUIRE_FALSE(loaded.ok());
  INFO(loaded.status().ToString());
  CHECK(loaded.status().code() == absl::StatusCode::kInvalidArgument);
  CHECK_THAT(Message(loaded.status()), Catch::Contains(named));
}

TEST_CASE("Without file, variables and flags every setting has its documented default") {
  const auto loaded = Load({});
  REQUIRE(loaded.ok());
  CHECK_FALSE(loaded->print.has_value());
  Config expected;  // whose accessors give the defaults of config.proto
  expected.add_allowed_uids(0);
  if (geteuid() != 0) expected.add_allowed_uids(geteuid());
  // By default the daemon's id is the host's name.
  CHECK_FALSE(loaded->config.daemon_id().empty());
  expected.set_daemon_id(loaded->config.daemon_id());
  CHECK(google::protobuf::util::MessageDifferencer::Equivalent(loaded->config, expected));
  CHECK_THAT(FormatConfig(loaded->config), Catch::Contains("default_duration_ms: 120000") &&
                                               Catch::Contains("default_verification: READBACK"));
  const Config::Peers& peers = loaded->config.peers();
  CHECK(std::chrono::milliseconds(peers.silence_ms()) == kDefaultSilence);
  CHECK(std::chrono::milliseconds(peers.wire_ms()) == kDefaultWireLimit);
  CHECK(std::chrono::milliseconds(peers.readiness_ms()) == kDefaultReadiness);
}

TEST_CASE("By default a lost coordinator is noticed within 6 s") {
  const auto loaded = Load({});
  REQUIRE(loaded.ok());
  CHECK(loaded->config.peers().silence_ms() <= 6000);
}

TEST_CASE("Flags win over variables and variables over the file") {
  const TempFolder folder;
  const std::string file = WriteFile(folder, R"(
    # comment
    listen { unix_path: "/tmp/file.sock" unix_mode: 0600 tcp: "127.0.0.1:1" tcp: "[::1]:2" }
    limits { ready_ms: 1000 ack_ms: 2000 }
    staging { slots: 8 }
    log { format: JSON }
  )");
  const auto loaded =
      Load({"--config", file, "--limits-ready-ms=3000", "--log-level", "debug", "--insecure"},
           {{"REFITD_LIMITS_READY_MS", "9"},
            {"REFITD_LIMITS_ACK_MS", "2500"},
            {"REFITD_LISTEN_TCP", "localhost:7"},
            {"REFITD_SLOT_BYTES", "1MiB"}});
  REQUIRE(loaded.ok());
  const Config& config = loaded->config;
  CHECK(loaded->source == file);
  CHECK(config.listen().unix_path() == "/tmp/file.sock");
  CHECK(config.listen().unix_mode() == 0600);
  REQUIRE(config.listen().tcp_size() == 1);
  CHECK(config.listen().tcp(0) == "localhost:7");
  CHECK(config.limits().ready_ms() == 3000);
  CHECK(config.limits().ack_ms() == 2500);
  CHECK(config.staging().slots() == 8);
  CHECK(config.staging().slot_bytes() == 1 << 20);
  CHECK(config.log().format() == Config::Log::JSON);
  CHECK(config.log().level() == Config::Log::DEBUG);
}

TEST_CASE("A zero byte inside a path or an address is refused, not cut off there") {
  const TempFolder folder;
  for (const auto& [text, field] : std::vector<std::pair<std::string, std::string>>{
           {R"(listen { unix_path: "/tmp/a\000b" })", "listen.unix_path"},
           {R"(listen { tcp: "127.0.0.1\000.example:80" })", "listen.tcp"},
           {R"(log { file: "/tmp/a\000b" })", "log.file"}}) {
    RequireInvalid(Load({"--config", WriteFile(folder, text)}), field + " has a zero byte");
  }
}

TEST_CASE("REFITD_CONFIG names the file unless a flag does") {
  const TempFolder folder;
  const std::string file = WriteFile(folder, "staging { slots: 5 }");
  CHECK(Load({}, {{"REFITD_CONFIG", file}})->config.staging().slots() == 5);
  CHECK(Load({"--config", "/does/not/exist"}, {{"REFITD_CONFIG", file}}).status().code() ==
        absl::StatusCode::kNotFound);
}

TEST_CASE("Main's arguments and environment are taken as they are") {
  const char* argv[] = {"refitd", "--staging-slots", "6"};
  const char* environment[] = {"PATH=/bin", "REFITD_HOST_COPY_THREADS=3",
                               "REFITD_PORT=tcp://10.0.0.1:1", nullptr};
  const auto loaded = LoadConfig(3, argv, environment);
  REQUIRE(loaded.ok());
  CHECK(loaded->config.staging().slots() == 6);
  CHECK(loaded->config.host().copy_threads() == 3);
}

TEST_CASE("An unknown field is refused with its line, column and name") {
  const TempFolder folder;
  const std::string file = WriteFile(folder, "listen {\n  unix_pth: \"/x\"\n}\n");
  const auto loaded = Load({"--config", file});
  RequireInvalid(loaded, "line 2, column 11");
  CHECK_THAT(Message(loaded.status()), Catch::Contains("unix_pth") && Catch::Contains(file));
}

TEST_CASE("A malformed file is refused with its line") {
  const TempFolder folder;
  RequireInvalid(Load({"--config", WriteFile(folder, "log { format: YAML }")}), "\"YAML\"");
  RequireInvalid(Load({"--config", WriteFile(folder, "\nlog { format: ")}), "line 2");
  RequireInvalid(Load({"--config", WriteFile(folder, "limits { ready_ms: 99999999999999999999 }")}),
                 "line 1");
}

TEST_CASE("A file over the limit is refused") {
  const TempFolder folder;
  const std::string text(kMaxConfigFileBytes + 1, '\n');
  RequireInvalid(Load({"--config", WriteFile(folder, text)}), "more than");
}

TEST_CASE("An unknown flag is refused by name, and the flag that was likely meant is named") {
  RequireInvalid(Load({"--staging-slotz", "4"}),
                 "refitd takes no \"--staging-slotz\"; did you mean --staging-slots?");
  // The field's own name, without what it stands in.
  RequireInvalid(Load({"--ready-ms=5"}), "did you mean --limits-ready-ms?");
  RequireInvalid(Load({"--nothing-like-it"}), "takes no \"--nothing-like-it\" (");
  RequireInvalid(Load({"surprise"}), "takes no \"surprise\" (");
}

TEST_CASE("Some flags and variables have a second name, and the field's name wins") {
  const auto loaded = Load(
      {"--listen-unix=/tmp/a.sock", "--insecure", "--slot-bytes=1MiB", "--data-interface=eth0"},
      {{"REFITD_DATA_INTERFACE", "eth1"}});
  REQUIRE(loaded.ok());
  CHECK(loaded->config.listen().unix_path() == "/tmp/a.sock");
  CHECK(loaded->config.listen().insecure());
  CHECK(loaded->config.staging().slot_bytes() == 1 << 20);
  CHECK(loaded->config.peers().interface() == "eth0");
  const auto variables =
      Load({}, {{"REFITD_DATA_INTERFACE", "eth1"}, {"REFITD_PEERS_INTERFACE", "eth2"}});
  CHECK(variables->config.peers().interface() == "eth2");
}

TEST_CASE("Durations of flags and variables take a unit, and count milliseconds without one") {
  const auto loaded =
      Load({"--limits-ready-ms=30s", "--limits-ack-ms", "1.5s", "--peers-wire-ms=7"},
           {{"REFITD_LIMITS_GROUP_IDLE_MS", "2h"}});
  REQUIRE(loaded.ok());
  CHECK(loaded->config.limits().ready_ms() == 30'000);
  CHECK(loaded->config.limits().ack_ms() == 1500);
  CHECK(loaded->config.peers().wire_ms() == 7);
  CHECK(loaded->config.limits().group_idle_ms() == 2 * 3'600'000);
  for (const char* wrong : {"30x", "s", "1e3", "inf", "30 s"}) {
    RequireInvalid(Load({std::string("--limits-ready-ms=") + wrong}),
                   std::string("\"") + wrong + "\" is not a duration");
  }
}

TEST_CASE("Help has each setting's type and default under the heading of its message") {
  const std::string help = *Load({"--help"})->print;
  for (const char* line :
       {"\nlimits:\n", "--limits-ready-ms DURATION=30s",
        "--staging-slot-bytes,--slot-bytes SIZE=64MiB", "--listen-unix-mode OCTAL=0660",
        "--log-level debug|info|warning|error=info", "--cuda-enabled BOOL=true",
        "--allowed-uids LIST ", "--peers-interface,--data-interface TEXT=lo", "\nGeneral:\n"}) {
    CHECK_THAT(help, Catch::Contains(line));
  }
}

TEST_CASE("A bad value is refused with where it stands, field and value") {
  RequireInvalid(Load({"--staging-slots", "four"}), "--staging-slots (staging.slots): \"four\"");
  RequireInvalid(Load({}, {{"REFITD_STAGING_SLOTS", "4KiB"}}),
                 "REFITD_STAGING_SLOTS (staging.slots): \"4KiB\"");
  RequireInvalid(Load({"--staging-slots", "99999999999"}), "99999999999");
  RequireInvalid(Load({"--slot-bytes", "99999999TiB"}), "99999999TiB");
  RequireInvalid(Load({"--listen-unix-mode", "0680"}), "0680");
  RequireInvalid(Load({"--log-level", "loud"}), "\"LOUD\" is none of DEBUG, INFO, WARNING, ERROR");
  RequireInvalid(Load({"--insecure=perhaps"}), "perhaps");
  RequireInvalid(Load({"--allowed-uids", "0,-1"}), "-1");
  RequireInvalid(Load({"--allowed-uids", "0,,1"}), "\"\"");
}

TEST_CASE("Each number is held to its limits by name") {
  const auto refused = [](const std::string& flag, const std::string& field) {
    INFO(flag);
    RequireInvalid(Load({flag}), field);
  };
  refused("--limits-default-duration-ms=0",
          "limits.default_duration_ms is 0, must be 1 to 3600000");
  refused("--limits-default-duration-ms=3600001", "limits.default_duration_ms");
  refused("--limits-max-duration-ms=86400001", "limits.max_duration_ms");
  refused("--limits-ready-ms=0", "limits.ready_ms");
  refused("--limits-ack-ms=-1", "limits.ack_ms is -1");
  refused("--limits-idle-ms=0", "limits.idle_ms");
  refused("--limits-lease-ms=0", "limits.lease_ms");
  refused("--limits-outstanding-buckets=0", "limits.outstanding_buckets");
  refused("--limits-compare-every=0", "limits.compare_every is 0");
  refused("--limits-inline-bytes=8MiB", "limits.inline_bytes is 8388608");
  refused("--limits-message-bytes=1", "limits.message_bytes");
  refused("--limits-message-bytes=2GiB", "limits.message_bytes");
  refused("--limits-max-groups=0", "limits.max_groups");
  refused("--limits-max-members=0", "limits.max_members");
  refused("--limits-max-region-bytes=32TiB", "limits.max_region_bytes");
  refused("--slot-bytes=100000", "staging.slot_bytes is 100000, must be a multiple of 4096");
  refused("--slot-bytes=4096", "staging.slot_bytes");
  refused("--staging-slots=1", "staging.slots is 1, must be 2 to 64");
  refused("--staging-slots=65", "staging.slots");
  refused("--staging-max-pool-bytes=1MiB", "staging.max_pool_bytes is 1048576");
  refused("--host-copy-threads=-1", "host.copy_threads");
  refused("--cuda-copy-blocks=0", "cuda.copy_blocks");
  refused("--cuda-device-ms=0", "cuda.device_ms");
  refused("--cuda-engine-bytes=-1", "cuda.engine_bytes");
  refused("--cuda-rails=0", "cuda.rails");
  refused("--cuda-rails=9", "cuda.rails");
  refused("--cuda-library=" + std::string(kMaxCudaLibraryBytes + 1, 'x'), "cuda.library");
  refused("--cuda-nccl-library=" + std::string(kMaxCudaLibraryBytes + 1, 'x'), "cuda.nccl_library");
  refused("--daemon-id=a b", "daemon_id is \"a b\"");
  refused("--daemon-id=" + std::string(kMaxConfiguredDaemonId + 1, 'x'), "daemon_id");
  refused("--peers-advertise=node-a", "peers.advertise is \"node-a\", must be HOST:PORT");
  refused("--peers-advertise=:7", "peers.advertise");
  refused("--data-interface=a/b", "peers.interface is \"a/b\"");
  refused("--peers-silence-ms=99", "peers.silence_ms");
  refused("--peers-wire-ms=0", "peers.wire_ms");
  refused("--peers-relay-slow-ms=-1", "peers.relay_slow_ms is -1");
  refused("--peers-readiness-ms=-1", "peers.readiness_ms is -1");
  refused("--data-port=65536", "data.port");
  refused("--data-streams=-1", "data.streams");
  refused("--data-streams=9", "data.streams");
  refused("--listen-unix=relative.sock", "listen.unix_path is \"relative.sock\"");
  refused("--listen-unix=/" + std::string(kMaxUnixPathBytes, 'x'),
          "listen.unix_path has 100 bytes");
  refused("--listen-unix-mode=1777", "listen.unix_mode is 01777");
}

TEST_CASE("The data plane is encrypted unless the configuration says otherwise") {
  CHECK_FALSE(Load({})->config.data().unencrypted());
  const auto other = Load({"--data-unencrypted=true", "--data-port=7413", "--data-streams=4"});
  REQUIRE(other.ok());
  CHECK(other->config.data().unencrypted());
  CHECK(other->config.data().port() == 7413);
  CHECK(other->config.data().streams() == 4);
}

TEST_CASE(
    "The daemon chooses several connections under TLS alone, and keeps the number it is told") {
  CHECK(StreamsOf({}, false, 64) == 1);
  CHECK(StreamsOf({}, true, 0) == 1);
  CHECK(StreamsOf({}, true, 1) == 1);
  CHECK(StreamsOf({}, true, 6) == 3);
  CHECK(StreamsOf({}, true, 64) == kMaxChosenStreams);
  for (const bool encrypted : {false, true}) {
    Config::Data data;
    data.set_streams(2);
    CHECK(StreamsOf(data, encrypted, 64) == 2);
    data.set_streams(8);
    CHECK(StreamsOf(data, encrypted, 2) == 8);
  }
}

TEST_CASE("A mode written without its leading zero in the file is refused") {
  const TempFolder folder;
  RequireInvalid(Load({"--config", WriteFile(folder, "listen { unix_mode: 660 }")}), "write 0660");
}

const std::vector<std::string> kTls = {"--tls-certificate=/c", "--tls-key=/k", "--tls-roots=/r"};

std::vector<std::string> With(std::vector<std::string> flags,
                              const std::vector<std::string>& more) {
  flags.insert(flags.end(), more.begin(), more.end());
  return flags;
}

TEST_CASE("TCP without TLS is refused unless insecure is said in so many words, loopback too") {
  const std::string flag = GENERATE("--listen-tcp=", "--peers-listen=");
  for (const char* address : {"0.0.0.0:1", "[::]:1", "10.1.2.3:80", "127.0.0.1:0", "localhost:1"}) {
    INFO(flag << address);
    RequireInvalid(Load({flag + address}), std::string("\"") + address + "\" has no TLS");
    CHECK(Load({"--insecure", flag + address}).ok());
    CHECK(Load({flag + address}, {{"REFITD_INSECURE", "true"}}).ok());
    CHECK_FALSE(Load({"--insecure=false", flag + address}).ok());
    CHECK_FALSE(Load({"--metrics-insecure", flag + address}).ok());
    CHECK(Load(With(kTls, {flag + address})).ok());
  }
}

TEST_CASE("Certificate, key and roots are named together") {
  for (size_t left_out = 0; left_out < kTls.size(); ++left_out) {
    std::vector<std::string> flags = kTls;
    flags.erase(flags.begin() + static_cast<std::ptrdiff_t>(left_out));
    RequireInvalid(Load(flags), "TLS needs all of");
  }
  CHECK(TlsFilesOf(Load(kTls)->config) == TlsFiles{"/c", "/k", "/r"});
}

TEST_CASE("Other daemons' identity is a pattern, and takes TLS") {
  CHECK(Load(With(kTls, {"--peers-identity=spiffe://prod/refitd/*"}))->config.peers().identity() ==
        "spiffe://prod/refitd/*");
  RequireInvalid(Load(With(kTls, {"--peers-identity=prod"})), "peers.identity is \"prod\"");
  RequireInvalid(Load({"--peers-identity=spiffe://prod/refitd/*"}), "without tls");
}

TEST_CASE("Metrics are off by default and take a word for being without TLS") {
  CHECK(Load({})->config.metrics().listen().empty());
  CHECK(Load({}, {{"REFITD_METRICS_LISTEN", ""}})->config.metrics().listen().empty());
  for (const char* address : {"0.0.0.0:9464", "[::]:9464", "10.1.2.3:9464", "[::1]:0"}) {
    INFO(address);
    const std::string flag = std::string("--metrics-listen=") + address;
    RequireInvalid(Load({flag}), std::string("metrics.listen \"") + address + "\" has no TLS");
    CHECK(Load(With(kTls, {flag}))->config.metrics().listen() == address);
    CHECK_FALSE(Load(With(kTls, {flag}))->config.metrics().insecure());
    CHECK(Load({"--insecure", flag})->config.metrics().listen() == address);
    CHECK(Load({"--metrics-insecure", flag})->config.metrics().listen() == address);
  }
  for (const char* address : {"9464", "127.0.0.1", "127.0.0.1:9464,127.0.0.1:9465", "+9464",
                              "127.0.0.1:9464s", "example.org:9464"}) {
    INFO(address);
    RequireInvalid(Load({"--insecure", "--metrics-listen", address}), "is not HOST:PORT");
  }
}

TEST_CASE(
    "Traces are off by default, and go to a collector under TLS or take a word for being without") {
  CHECK(Load({})->config.traces().collector().empty());
  const std::string flag = "--traces-collector=otel.example:4317";
  RequireInvalid(Load({flag}), "traces.collector \"otel.example:4317\" has no TLS");
  for (const char* allowed : {"--insecure", "--traces-insecure"}) {
    CHECK(Load({allowed, flag})->config.traces().collector() == "otel.example:4317");
  }
  CHECK_FALSE(Load(With(kTls, {flag}))->config.traces().insecure());
  for (const char* address : {"otel.example", "otel.example:", ":4317", "http://otel:4317"}) {
    INFO(address);
    RequireInvalid(Load({"--traces-insecure", "--traces-collector", address}),
                   std::string("traces.collector is \"") + address + "\", must be HOST:PORT");
  }
  const std::string identity = "--traces-identity=spiffe://prod/otel";
  CHECK(Load(With(kTls, {flag, identity}))->config.traces().identity() == "spiffe://prod/otel");
  RequireInvalid(Load(With(kTls, {flag, "--traces-identity=otel"})), "traces.identity");
  RequireInvalid(Load({"--insecure", flag, identity}), "without TLS nobody has an identity");
  RequireInvalid(Load(With(kTls, {flag, identity, "--traces-insecure"})),
                 "without TLS nobody has an identity");
}

TEST_CASE("The page is off by default and needs the metrics' address") {
  CHECK_FALSE(Load({"--insecure", "--metrics-listen=[::1]:0"})->config.metrics().page());
  CHECK(
      Load({"--insecure", "--metrics-listen=[::1]:0", "--metrics-page"})->config.metrics().page());
  RequireInvalid(Load({"--metrics-page"}), "metrics.page is true, but metrics.listen");
}

TEST_CASE("An address that is no address is refused even with insecure") {
  for (const char* address : {"", "7070", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "::1:7",
                              "[127.0.0.1]:1", "127.0.0.1:1x", ":1", "example.org:1", "[::1]"}) {
    INFO(address);
    const TempFolder folder;
    const std::string file =
        WriteFile(folder, std::string("listen { insecure: true tcp: \"") + address + "\" }");
    RequireInvalid(Load({"--config", file}), "is not HOST:PORT");
  }
}

TEST_CASE("Allowed users and groups replace the default") {
  const auto loaded = Load({"--allowed-uids=1000,1001", "--allowed-gids=5"});
  REQUIRE(loaded.ok());
  const PolicySettings settings = PolicySettingsOf(loaded->config);
  CHECK(settings.uids == std::vector<uint32_t>{1000, 1001});
  CHECK(settings.gids == std::vector<uint32_t>{5});
}

TEST_CASE("Rules come from the file, load again as the same, and are refused by field and value") {
  const TempFolder folder;
  const std::string rules = R"(
    rule { who: "spiffe://prod/trainer/*" role: TRAINER role: OPERATOR_READ group: "llama-*" }
    rule { who: "gid:7" role: OPERATOR_WRITE group: "*" }
    rule { who: "spiffe://prod/admin" role: TRAINER group: "*" any_owner: true owner: true }
  )";
  const auto loaded = Load(With(kTls, {"--validate", "--config", WriteFile(folder, rules)}));
  INFO(loaded.status());
  REQUIRE(loaded.ok());
  const std::vector<PolicyRule> made = PolicySettingsOf(loaded->config).rules;
  REQUIRE(made.size() == 3);
  CHECK(made[0].roles == std::vector<Role>{Role::kTrainer, Role::kOperatorRead});
  CHECK(made[2].any_owner);
  CHECK(made[2].owner);
  CHECK(FormatConfig(Load({"--config", WriteFile(folder, *loaded->print)})->config) ==
        *loaded->print);
  RequireInvalid(Load({"--config", WriteFile(folder, rules)}),
                 "rule[0].who is \"spiffe://prod/trainer/*\", but without tls");
  RequireInvalid(Load({"--config", WriteFile(folder, "rule { who: \"uid:1\" group: \"*\" }")}),
                 "rule[0].role is missing");
  RequireInvalid(Load({"--config", WriteFile(folder, "rule { role: BOSS }")}), "BOSS");
}

TEST_CASE("A file of rules adds to the rules, and may have nothing else") {
  const TempFolder folder;
  const std::string rules = folder / "rules";
  const auto load = [&](const std::string& text) {
    std::ofstream(rules) << text;
    const std::string own = "rule { who: \"uid:1\" role: ENGINE group: \"*\" } allowed_gids: 7";
    return Load({"--rules-file=" + rules, "--config", WriteFile(folder, own)});
  };
  const auto loaded = load("rule { who: \"uid:2\" role: TRAINER group: \"g\" } allowed_gids: 8");
  REQUIRE(loaded.ok());
  REQUIRE(loaded->config.rule_size() == 2);
  CHECK(loaded->config.rule(1).who() == "uid:2");
  REQUIRE(loaded->config.allowed_gids_size() == 2);
  CHECK(loaded->config.allowed_gids(1) == 8);
  RequireInvalid(load("daemon_id: \"a\""), "daemon_id is set, but rules_file");
  RequireInvalid(load("rule { who: \"nobody\" role: TRAINER group: \"g\" }"), "rule[1].who");
  CHECK(absl::IsNotFound(Load({"--rules-file=" + (folder / "none")}).status()));
}

TEST_CASE("The audit log and the limits of an identity are off by default, and checked") {
  CHECK(Load({})->config.audit().file().empty());
  CHECK_FALSE(Load({})->config.audit().journal());
  CHECK(Load({"--audit-file=/a"})->config.audit().file() == "/a");
  CHECK(Load({"--audit-journal=true"})->config.audit().journal());
  RequireInvalid(Load({"--audit-file=a"}), "audit.file is \"a\"");
  CHECK(Load({"--limits-per-identity-pool-bytes=1GiB"})
            ->config.limits()
            .per_identity()
            .pool_bytes() == 1 << 30);
  RequireInvalid(Load({"--limits-per-identity-groups=-1"}), "limits.per_identity.groups is -1");
  CHECK(Load({"--limits-mapped-bytes=1GiB"})->config.limits().mapped_bytes() == 1 << 30);
  CHECK(Load({"--limits-per-identity-held-bytes=1MiB"})
            ->config.limits()
            .per_identity()
            .held_bytes() == 1 << 20);
  RequireInvalid(Load({"--limits-mapped-bytes=-1"}), "limits.mapped_bytes is -1");
  RequireInvalid(Load({"--limits-held-bytes=-1"}), "limits.held_bytes is -1");
}

TEST_CASE("Validate prints the settings in force, and they load again as the same") {
  const TempFolder folder;
  const auto first =
      Load({"--validate", "--staging-slots=7", "--log-format=json", "--limits-ready-ms=77",
            "--listen-unix-mode=0600", "--listen-tcp=localhost:1,[::1]:2", "--allowed-gids=4",
            "--metrics-listen=127.0.0.1:3", "--metrics-insecure", "--metrics-page", "--insecure",
            "--traces-collector=localhost:4317", "--traces-identity=dns:*.b",
            "--tls-certificate=/c", "--tls-key=/k", "--tls-roots=/r", "--peers-listen=[::1]:4",
            "--peers-identity=dns:*.a", "--default-verification=transfer"});
  REQUIRE(first.ok());
  REQUIRE(first->print.has_value());
  CHECK_THAT(*first->print, Catch::Contains("unix_mode: 0600"));
  const auto second = Load({"--config", WriteFile(folder, *first->print)});
  REQUIRE(second.ok());
  CHECK(FormatConfig(second->config) == *first->print);
}

TEST_CASE(
    "validate said nothing where links came from other nodes and the data plane was loopback") {
  const auto warned = [](const std::vector<std::string>& flags) {
    const auto loaded = Load(With(kTls, flags));
    REQUIRE(loaded.ok());
    return loaded->warnings;
  };
  for (const char* links :
       {"--listen-tcp=0.0.0.0:1", "--peers-listen=[::]:1", "--peers-listen=127.0.0.1:1,10.0.0.1:1",
        "--peers-identity=spiffe://prod/refitd/*"}) {
    INFO(links);
    REQUIRE(warned({links}).size() == 1);
    CHECK_THAT(warned({links}).front(), Catch::Contains("the data plane is on loopback"));
    CHECK(warned({links, "--data-interface=eth0"}).empty());
  }
  // One host, no other daemons, or members alone over TCP.
  CHECK(warned({}).empty());
  CHECK(warned({"--listen-tcp=127.0.0.1:1", "--peers-identity=dns:a"}).empty());
  CHECK(warned({"--listen-tcp=localhost:1,[::1]:1"}).empty());
  CHECK(warned({"--listen-tcp=0.0.0.0:1", "--peers-listen=127.0.0.1:2"}).empty());
}

TEST_CASE("Validate refuses what running would refuse") {
  RequireInvalid(Load({"--validate", "--staging-slots=1"}), "staging.slots");
}

TEST_CASE("Version and help are printed whatever else is wrong") {
  CHECK_THAT(Load({"--version", "--staging-slots=1"})->print.value(),
             Catch::Contains("refitd 0.2.0"));
  const std::string help = Load({"--help"})->print.value();
  CHECK_THAT(help, Catch::Contains("--listen-unix") && Catch::Contains("Exit codes"));
}

// All scalar and list fields below `message`, as in "a.b".
void CollectFields(const google::protobuf::Descriptor* message, const std::string& prefix,
                   std::vector<std::string>* fields) {
  for (int i = 0; i < message->field_count(); ++i) {
    const auto* field = message->field(i);
    if (field->message_type() != nullptr && field->is_repeated()) continue;  // rules
    if (field->message_type() != nullptr) {
      CollectFields(field->message_type(), prefix + field->name() + ".", fields);
    } else {
      fields->push_back(prefix + field->name());
    }
  }
}

TEST_CASE("Every field of the file but those of rules has a flag") {
  std::vector<std::string> fields;
  CollectFields(config::RefitdConfig::descriptor(), "", &fields);
  CHECK(fields.size() >= 27);
  const std::string help = Load({"--help"})->print.value();
  for (const std::string& field : fields) {
    INFO(field);
    std::string flag = "--" + field;
    for (char& c : flag) c = c == '.' || c == '_' ? '-' : c;
    CHECK_THAT(help, Catch::Contains("  " + flag));
  }
}

TEST_CASE("the help said that an empty peers.identity admits any peer") {
  const std::string help = Load({"--help"})->print.value();
  const size_t at = help.find("--peers-identity");
  REQUIRE(at != std::string::npos);
  std::istringstream words(help.substr(at, help.find("--peers-interface") - at));
  std::string said;
  for (std::string word; words >> word;) said += word + " ";
  CHECK_THAT(said, Catch::Contains("empty: who a rule names PEER"));

  const auto loaded = Load({"--tls-certificate=/c", "--tls-key=/k", "--tls-roots=/r"});
  REQUIRE(loaded.ok());
  const auto policy = Policy::Make(PolicySettingsOf(loaded->config));
  REQUIRE(policy.ok());
  Principal daemon;
  daemon.certificate = "spiffe://prod/refitd/a";
  CHECK(absl::IsPermissionDenied((*policy)->Check(daemon, {Role::kPeer}, "g", "")));
}

TEST_CASE("The example configuration says the defaults") {
  const auto loaded = Load({"--config", "deploy/refitd.textproto"});
  INFO(loaded.status().ToString());
  REQUIRE(loaded.ok());
  CHECK(FormatConfig(loaded->config) == FormatConfig(Load({})->config));
}

}  // namespace
}  // namespace refitd
