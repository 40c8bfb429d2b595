// refitd, the daemon. Builds configuration, sockets, the daemon's state and gRPC and joins them;
// see docs/architecture.md.
//
// Exit codes: daemon/config.h, ExitCode.
#include <fmt/ranges.h>
#include <grpc/support/log.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/server_posix.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "daemon/config.h"
#include "daemon/metrics.h"
#include "daemon/metrics_server.h"
#include "daemon/node/daemon.h"
#include "daemon/node/member_memory.h"
#include "daemon/node/operators.h"
#include "daemon/node/peer_server.h"
#include "daemon/page.h"
#include "daemon/policy/policy_store.h"
#include "daemon/process/audit_log.h"
#include "daemon/process/last_words.h"
#include "daemon/process/log.h"
#include "daemon/process/log_limit.h"
#include "daemon/process/service_manager.h"
#include "daemon/process/version.h"
#include "daemon/services/authorizer.h"
#include "daemon/services/health_service.h"
#include "daemon/services/peer_service.h"
#include "daemon/services/reflection_service.h"
#include "daemon/services/services.h"
#include "daemon/services/status.h"
#include "daemon/sockets/accept_loop.h"
#include "daemon/sockets/certificate_store.h"
#include "daemon/sockets/connection_guard.h"
#include "daemon/sockets/descriptor_socket.h"
#include "daemon/sockets/process_watch.h"
#include "daemon/sockets/tcp_listener.h"
#include "daemon/sockets/tls_guard.h"
#include "daemon/trace/span_exporter.h"
#include "refitd/v1/engine.grpc.pb.h"
#include "refitd/v1/operator.grpc.pb.h"
#include "refitd/v1/trainer.grpc.pb.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"
#include "transport/cuda/cuda_transport.h"
#include "transport/cuda/nccl/nccl.h"
#include "transport/cuda/nccl/wire.h"
#include "transport/host/host_transport.h"
#include "transport/sockets/socket_wire.h"
#include "transport/tls/grpc_credentials.h"
#include "transport/tls/refusals.h"
#include "transport/tls/resumption.h"

namespace refitd {
namespace {

// How long clients have to read the end of their streams.
constexpr std::chrono::seconds kShutdownGrace{2};
// How long updates in host memory may go on after the GPUs were lost.
constexpr std::chrono::seconds kLostGrace{2};
// A daemon that lost its GPUs ends after this time, whatever hangs. This is longer than both graces
// and the clean-up of a group (GroupLimits) together.
constexpr std::chrono::seconds kLostLimit{8};
// How long a connection over TCP may take for its handshake (P4).
constexpr Duration kHandshakeLimit = std::chrono::seconds(10);
constexpr Duration kTraceInterval = std::chrono::hours(1);
// How long the spans of the last updates may take to reach the collector.
constexpr Duration kTraceGrace = std::chrono::seconds(2);
// Calls of a connection at a time, beside unanswered buckets of one rank.
constexpr int kOtherStreams = 256;

using Ms = std::chrono::milliseconds;

// Verification, LogFormat and LogLevel have the file's enumerators.
static_assert(static_cast<int>(Verification::kOff) == Config::OFF);
static_assert(static_cast<int>(Verification::kReadback) == Config::READBACK);
static_assert(static_cast<int>(LogFormat::kJson) == Config::Log::JSON);
static_assert(static_cast<int>(LogLevel::kError) == Config::Log::ERROR);

IdentityLimits IdentityLimitsOf(const Config::Limits::PerIdentity& limits) {
  return {.groups = limits.groups(),
          .members = limits.members(),
          .regions = limits.regions(),
          .pool_bytes = limits.pool_bytes(),
          .updates = limits.updates(),
          .mapped_bytes = limits.mapped_bytes(),
          .held_bytes = limits.held_bytes()};
}

DaemonOptions DaemonOptionsOf(const Config& config) {
  const Config::Limits& limits = config.limits();
  DaemonOptions options;
  options.daemon_id = config.daemon_id();
  options.advertise = config.peers().advertise();
  options.peers.peer = Ms(config.peers().silence_ms());
  options.peers.wire = Ms(config.peers().wire_ms());
  // Updates leave out slow daemons only if catch-ups bring these the versions later.
  if (config.catch_ups()) options.peers.slow = Ms(config.peers().relay_slow_ms());
  options.keep_readiness = Ms(config.peers().readiness_ms());
  options.group.default_duration = Ms(limits.default_duration_ms());
  options.group.max_duration = Ms(limits.max_duration_ms());
  options.group.ready_limit = Ms(limits.ready_ms());
  options.group.processing_limit = Ms(limits.processing_ms());
  options.group.ack_limit = Ms(limits.ack_ms());
  options.group.idle_limit = Ms(limits.idle_ms());
  options.group.grant_limit = Ms(limits.lease_ms());
  options.group.outstanding_buckets = limits.outstanding_buckets();
  options.group.compare_every = limits.compare_every();
  options.group.default_verification = static_cast<Verification>(config.default_verification());
  options.group.catch_ups = config.catch_ups();
  options.compare_sides = config.compare_sides();
  options.default_slot_bytes = config.staging().slot_bytes();
  options.default_slots = config.staging().slots();
  options.max_pool_bytes = config.staging().max_pool_bytes();
  options.max_region_bytes = limits.max_region_bytes();
  if (limits.mapped_bytes() > 0) options.max_mapped_bytes = limits.mapped_bytes();
  if (limits.held_bytes() > 0) options.max_held_bytes = limits.held_bytes();
  options.inline_bytes = limits.inline_bytes();
  options.message_bytes = limits.message_bytes();
  options.max_groups = limits.max_groups();
  options.max_members = limits.max_members();
  options.group_idle = Ms(limits.group_idle_ms());
  options.per_identity = IdentityLimitsOf(limits.per_identity());
  options.descriptor_socket = config.listen().unix_path() + std::string(kDescriptorSocketSuffix);
  return options;
}

// Reports the loss of the GPUs from the transport's thread to main's, which waits for signals.
//
// If a GPU hangs, its work does not end, nor do the calls that wait for that work, and no
// destructor gets past a thread that hangs in the driver (P4). Only the end of the process, which
// destroys its contexts, stops the GPU (P6). So those calls are not answered while the process
// lives.
class DeviceLoss {
 public:
  void Tell(const absl::Status& why) {
    {
      MutexLock lock(&mutex_);
      if (!why_.ok()) return;
      why_ = why;
    }
    kill(getpid(), SIGTERM);
    std::thread(EndProcess).detach();
  }
  // OK: the GPUs are not lost.
  absl::Status why() const {
    MutexLock lock(&mutex_);
    return why_;
  }

 private:
  static void EndProcess() {
    std::this_thread::sleep_for(kLostLimit);
    LogError("ended {} s after the GPUs were lost: work on them had not ended", kLostLimit.count());
    FlushLog();
    _exit(kExitFailure);
  }

  mutable Mutex mutex_;
  absl::Status why_ ABSL_GUARDED_BY(mutex_);
};

// Logs what the daemon removed from its environment, and what it added, for NCCL.
void LogNcclEnvironment(const NcclEnvironment& done) {
  if (!done.dropped.empty()) {
    LogWarning("dropped from the environment: {}", fmt::join(done.dropped, ", "));
  }
  if (!done.kept.empty()) LogInfo("NCCL's environment has {}", fmt::join(done.kept, ", "));
  if (!done.machine.empty()) {
    LogWarning("{} sets {}: NCCL reads it", kNcclMachineFile, fmt::join(done.machine, ", "));
  }
}

NcclReport LoadNccl(const Config::Cuda& config) {
  if (!config.nccl()) {
    NcclReport none;
    none.problem = "cuda.nccl is false";
    return none;
  }
  NcclReport nccl = FindNccl(config.nccl_library());
  if (!nccl.problem.empty() && !config.nccl_library().empty()) {
    LogError("cuda.nccl_library: {}", nccl.problem);
  }
  return nccl;
}

// The transport that moves bytes: the GPUs' transport around the host's if there are a driver, a
// device and a kernel; else the host's, and `cuda` says why. A thread that hangs in the driver may
// report to `loss` even after the transport was destroyed.
std::unique_ptr<Transport> MakeTransport(const Config& config,
                                         const std::shared_ptr<DeviceLoss>& loss,
                                         DeviceOptions* cuda) {
  const HostTransportOptions host{.threads = config.host().copy_threads()};
  if (!config.cuda().enabled()) {
    cuda->detail = "cuda.enabled is false";
    return MakeHostTransport(host);
  }
  cuda->detail = Describe(ProbeCudaLibrary(config.cuda().library()));
  CudaTransportOptions options;
  options.blocks = config.cuda().copy_blocks();
  options.engine_bytes = config.cuda().engine_bytes();
  options.limit = Ms(config.cuda().device_ms());
  options.lost = [loss](const absl::Status& why) { loss->Tell(why); };
  absl::StatusOr<std::shared_ptr<CudaMemory>> memory =
      CudaMemory::Create(config.cuda().library(),
                         {.limit = options.limit, .lost = options.lost, .own_contexts = true});
  if (!memory.ok()) return MakeHostTransport(host);
  const NcclReport nccl = LoadNccl(config.cuda());
  const std::string found = Describe(nccl);
  options.nccl = nccl.api;
  options.no_nccl = found;
  absl::StatusOr<std::unique_ptr<Transport>> transport =
      MakeCudaTransport(*memory, MakeHostTransport(host), options);
  if (!transport.ok()) {
    cuda->detail += "; " + Message(transport.status());
    return MakeHostTransport(host);
  }
  cuda->memory = *memory;
  cuda->detail += "; " + found;
  cuda->collectives = CollectivesOf(nccl);
  cuda->no_wire = found;
  static_assert(kMaxConfiguredRails == kMaxRails);
  cuda->max_rails = static_cast<size_t>(config.cuda().rails());
  if (nccl.api != nullptr) {
    absl::StatusOr<std::unique_ptr<DeviceWire>> wire =
        MakeNcclWire(nccl.api, *memory, {.limit = options.limit, .lost = options.lost});
    if (wire.ok()) {
      cuda->wire = *std::move(wire);
    } else {
      cuda->no_wire = Message(wire.status());
    }
  }
  return *std::move(transport);
}

// Logs what anybody who reaches a port can cause.
void LogLimited(const std::string& line) {
  static auto* const limit = new LogLimit;
  const std::optional<int64_t> left_out = limit->Admit(std::chrono::steady_clock::now());
  if (!left_out.has_value()) return;
  if (*left_out > 0) LogWarning("{} lines about refused connections were left out", *left_out);
  LogWarning("{}", line);
}

// gRPC's errors, most of which are handshakes that failed, go into this log, unless gRPC was asked
// for more by its own variable.
void TakeGrpcLog() {
  if (std::getenv("GRPC_VERBOSITY") != nullptr) return;
  gpr_set_log_function([](gpr_log_func_args* line) {
    const std::string text = fmt::format("gRPC: {}", line->message);
    // gRPC ends the process after this line, so no limit may leave it out.
    if (!std::string_view(line->message).starts_with("assertion failed")) {
      return LogLimited(text);
    }
    LogError("{}", text);
    FlushLog();
  });
}

// Null: the configuration asks for no audit log.
absl::StatusOr<std::unique_ptr<AuditLog>> OpenAudit(const Config& config) {
  const AuditConfig audit{.file = config.audit().file(), .journal = config.audit().journal()};
  if (audit.empty()) return nullptr;
  return AuditLog::Create(audit);
}

// Null: the configuration names no certificates.
absl::StatusOr<std::unique_ptr<CertificateStore>> LoadOwnCertificates(const Config& config,
                                                                      AuditLog* audit) {
  if (TlsFilesOf(config).empty()) return nullptr;
  ObserveTlsRefusals(
      [audit](const std::string& identity, const std::string& issuer, const std::string& why) {
        if (audit != nullptr) {
          // The identity is what the certificate says: nobody has verified it.
          audit->Record({.what = AuditWhat::kRefusal,
                         .subject = fmt::format("certificate that says it is {}", identity),
                         .outcome = "UNAUTHENTICATED",
                         .reason = why});
        }
        LogLimited(fmt::format(
            "TLS: the certificate of {}, which says it was signed by {}, is refused: {}",
            identity.empty() ? "somebody without an identity" : identity, issuer, why));
      });
  const auto note = [audit](const absl::Status& taken, const Certificates& in_force) {
    if (audit == nullptr) return;
    audit->Record({.what = AuditWhat::kCertificates,
                   .subject = Describe(in_force),
                   .outcome = std::string(absl::StatusCodeToString(taken.code())),
                   .reason = Message(taken)});
  };
  REFITD_ASSIGN_OR_RETURN(auto store, CertificateStore::Create(TlsFilesOf(config), note));
  LogInfo("certificates: {}", Describe(*store->Current()));
  return store;
}

// The function by which this daemon dials coordinators (P9); null: it may dial none.
PeerDialer MakeDialer(const Config& config, const CertificateStore* certificates) {
  if (certificates == nullptr && !config.listen().insecure()) return nullptr;
  return [certificates, identity = config.peers().identity()](PeerDial dial,
                                                              PeerLinkCallbacks callbacks) {
    if (certificates == nullptr) {
      dial.credentials = grpc::InsecureChannelCredentials();
    } else {
      const auto refused = [address = dial.address](const std::string& why) {
        LogWarning("TLS: coordinator {} is refused: {} (peers.identity)", address, why);
      };
      dial.credentials = TlsChannel(*certificates->Current(), identity, refused);
    }
    return PeerLink::Dial(std::move(dial), std::move(callbacks));
  };
}

// What the policy of the moment says of an identity as a group's owner. `policies` must outlive the
// result.
std::function<OwnerRule(const std::string&, const std::string&)> OwnerRuleOf(
    const PolicyStore* policies) {
  return [policies](const std::string& group, const std::string& identity) {
    const std::shared_ptr<const Policy> policy = policies->Current();
    if (!policy->NamesOwner(group)) return OwnerRule::kNone;
    if (policy->NamesOwner(group, identity)) return OwnerRule::kNamed;
    const absl::StatusOr<Principal> caller = ParsePrincipal(identity, "identity");
    const bool exempt = caller.ok() && policy->MayJoinOthers(*caller, group);
    return exempt ? OwnerRule::kExempt : OwnerRule::kOther;
  };
}

using TcpAcceptor = grpc::experimental::ExternalConnectionAcceptor;

// A gRPC server, and its way in for connections over TCP. It does not listen: accept loops hand it
// connections.
struct TcpServer {
  std::unique_ptr<TcpAcceptor> tcp;
  std::unique_ptr<grpc::Server> server;  // destroyed first

  // gRPC 1.51 reads its certificates outside of its lock when a handshake begins, while the
  // beginning of another handshake may replace them. So one connection begins at a time.
  mutable Mutex beginning;

  void Serve(UniqueFd fd) const {
    TcpAcceptor::NewConnectionParameters connection;
    connection.fd = fd.Release();
    MutexLock lock(&beginning);
    const TlsBeginning tls(connection.fd);
    tcp->HandleNewConnection(&connection);
  }
};

// `certificates`: null for TCP without TLS.
void StartServer(const Config& config, const std::vector<grpc::Service*>& services,
                 const CertificateStore* certificates, TcpServer* started) {
  // gRPC's own service does not ask who calls; HealthService does.
  grpc::EnableDefaultHealthCheckService(false);
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(static_cast<int>(config.limits().message_bytes()));
  // Members ping to learn whether the daemon lives; they may do so this often without other
  // traffic.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kFirstWindowBytes);
  // More than a rank's unanswered buckets (limits.outstanding_buckets) and its other calls.
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS,
                             config.limits().outstanding_buckets() + kOtherStreams);
  for (grpc::Service* service : services) builder.RegisterService(service);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
                             static_cast<int>(ToMillis(kHandshakeLimit)));
  started->tcp = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
      certificates == nullptr ? grpc::InsecureServerCredentials()
                              : TlsServer([certificates] { return certificates->Current(); }));
  started->server = builder.BuildAndStart();
}

// Accept loops over TCP, not started yet, and their names for status and log.
struct TcpLoops {
  std::vector<std::unique_ptr<AcceptLoop>> loops;
  std::vector<std::string> names;

  // `kind`: "tcp" or "peers".
  absl::Status Listen(const std::string& kind,
                      const google::protobuf::RepeatedPtrField<std::string>& addresses,
                      const AcceptLoop::Serve& serve, ConnectionGuard* guard) {
    for (const std::string& address : addresses) {
      REFITD_ASSIGN_OR_RETURN(std::vector<TcpListener> listeners, ListenTcp(address));
      for (TcpListener& listener : listeners) {
        REFITD_ASSIGN_OR_RETURN(auto loop,
                                AcceptLoop::CreateTcp(std::move(listener), serve, guard));
        // Callers need the port in use, where port 0 was asked for.
        const std::string name = kind + ":" + loop->path();
        if (names.empty() || names.back() != name) names.push_back(name);
        loops.push_back(std::move(loop));
      }
    }
    return absl::OkStatus();
  }
};

// The objects that follow files while the daemon runs. All these files are read again on SIGHUP.
struct FollowedFiles {
  CertificateStore* certificates = nullptr;  // null: none
  AuditLog* audit = nullptr;                 // null: none
  PolicyStore* policies = nullptr;
  PolicySettings settings;  // of the policy in force
  std::string rules_file;   // empty: none
  std::function<absl::StatusOr<Invocation>()> load;
  std::string rules_seen = {};   // the text of rules_file at the last look
  std::string rules_taken = {};  // the text that was taken over or refused last

  void Reload() {
    if (audit != nullptr) {
      if (absl::Status status = audit->Reopen(); !status.ok()) LogError("{}", Message(status));
    }
    ReloadPolicy();
  }
  // Takes the file of rules over when two looks in a row have found the same change: at the first
  // look the file may be half written.
  void FollowRules() {
    if (rules_file.empty()) return;
    const std::string text = ReadConfigFile(rules_file).value_or("");
    if (std::exchange(rules_seen, text) != text || text == rules_taken) return;
    rules_taken = text;
    ReloadPolicy();
  }
  void ReloadPolicy() {
    absl::StatusOr<Invocation> loaded = load();
    const absl::Status status = loaded.ok() ? TakePolicy(loaded->config) : loaded.status();
    if (status.ok()) return;
    LogError("policy not taken over: {}; the one before stays in force", Message(status));
    AuditPolicy(status);
  }
  // Takes over the users and rules of `next`; other settings stay as they are.
  absl::Status TakePolicy(const Config& next) {
    const PolicySettings read = PolicySettingsOf(next);
    PolicySettings taken = settings;
    taken.rules = read.rules;
    taken.uids = read.uids;
    taken.gids = read.gids;
    if (taken == settings) return absl::OkStatus();
    REFITD_ASSIGN_OR_RETURN(auto policy, Policy::Make(taken));
    settings = std::move(taken);
    policies->Replace(policy);
    LogInfo("policy changed: {} rules", policy->rules().size());
    AuditPolicy(absl::OkStatus());
    return absl::OkStatus();
  }
  void AuditPolicy(const absl::Status& status) const {
    if (audit == nullptr) return;
    audit->Record({.what = AuditWhat::kPolicy,
                   .subject = fmt::format("{} rules", policies->Current()->rules().size()),
                   .outcome = std::string(absl::StatusCodeToString(status.code())),
                   .reason = Message(status)});
  }
};

// Waits for a signal that ends the daemon. Meanwhile certificates and the file of rules are
// followed; SIGHUP makes the daemon read the certificates at once, and the policy.
int AwaitEnd(const sigset_t& signals, FollowedFiles* followed) {
  constexpr timespec kLook{1, 0};
  for (;;) {
    const int number = sigtimedwait(&signals, nullptr, &kLook);
    if (number == SIGTERM || number == SIGINT) return number;
    if (number == SIGHUP) followed->Reload();
    if (followed->certificates != nullptr) followed->certificates->Refresh();
    followed->FollowRules();
  }
}

int Fail(const absl::Status& status) {
  LogError("{}", Message(status));
  return absl::IsAlreadyExists(status) ? kExitInUse : kExitFailure;
}

// Blocks the signals that the main thread waits for, for this thread and those that it starts.
sigset_t BlockSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  return signals;
}

absl::StatusOr<std::unique_ptr<Wire>> MakeHostWire(const Config& config,
                                                   const CertificateStore* certificates) {
  SocketWireOptions options;
  options.interface = config.peers().interface();
  options.port = static_cast<uint16_t>(config.data().port());
  options.log = LogLimited;
  if (certificates != nullptr && !config.data().unencrypted()) {
    options.certificates = [certificates] { return certificates->Current(); };
    options.identities = config.peers().identity();
  }
  options.streams = StreamsOf(config.data(), options.certificates != nullptr,
                              std::thread::hardware_concurrency());
  return MakeSocketWire(std::move(options));
}

// Why the wire over host memory does not encrypt, as DaemonOptions::clear_wire wants it.
std::string WhyClear(const Config& config, const CertificateStore* certificates) {
  if (certificates == nullptr) return kNotEncrypted;
  if (config.data().unencrypted()) return "data.unencrypted is true";
  return "";
}

// The wire over host memory; null: there is none.
std::unique_ptr<Wire> HostWireOf(const Config& config, const CertificateStore* certificates) {
  // Without TLS, and without `insecure`, this daemon is linked to no other (P9).
  if (certificates == nullptr && !config.listen().insecure()) return nullptr;
  absl::StatusOr<std::unique_ptr<Wire>> wire = MakeHostWire(config, certificates);
  if (!wire.ok()) {
    // A daemon whose groups have no other node needs no wire.
    LogWarning("no data plane to other daemons: {}", Message(wire.status()));
    return nullptr;
  }
  LogInfo("data plane over host memory: on {}, {}", config.peers().interface(),
          WhyClear(config, certificates).empty() ? "TLS" : "neither encrypted nor authenticated");
  return *std::move(wire);
}

// The daemon's gRPC servers. With listeners of their own, links have a server of their own: callers
// that reach one of the two find none of the other's services.
struct Servers {
  TcpServer members;
  TcpServer links;  // holds no server if links come where members come

  void Shutdown() const {
    const auto patient = std::chrono::system_clock::now() + kShutdownGrace;
    for (const TcpServer* each : {&members, &links}) {
      if (each->server != nullptr) each->server->Shutdown(patient);
    }
  }
};

// The sockets on which callers come. The accept loops hand connections to the gRPC servers.
struct Sockets {
  std::unique_ptr<AcceptLoop> unix_loop;
  std::unique_ptr<DescriptorSocket> descriptors;
  TcpLoops tcp;

  void Start() const {
    unix_loop->Start();
    for (const auto& loop : tcp.loops) loop->Start();
  }
  void Stop() const {
    unix_loop->Stop();
    for (const auto& loop : tcp.loops) loop->Stop();
    descriptors->Stop();
  }
};

// `peers` keeps who is at the other end of each connection of the unix socket. The servers must
// be started before the sockets.
absl::Status Listen(const Config& config, PeerTable* peers, const Servers& servers,
                    const Authorizer* authorizer, ConnectionGuard* guard, Daemon* daemon,
                    Sockets* sockets) {
  // The unix socket comes first: of two daemons with one path only one may start.
  REFITD_ASSIGN_OR_RETURN(sockets->unix_loop,
                          AcceptLoop::Create(
                              {config.listen().unix_path(), config.listen().unix_mode()}, peers,
                              [&servers](UniqueFd fd) {
                                grpc::AddInsecureChannelFromFd(servers.members.server.get(),
                                                               fd.Release());
                              },
                              guard));
  REFITD_ASSIGN_OR_RETURN(
      sockets->descriptors,
      DescriptorSocket::Create(
          {.path = config.listen().unix_path() + std::string(kDescriptorSocketSuffix),
           .mode = config.listen().unix_mode(),
           .admit =
               [authorizer](const PeerCredentials& peer) {
                 return authorizer->AdmitToDescriptors(peer);
               }},
          &daemon->memory()));
  return absl::OkStatus();
}

absl::Status ListenOnTcp(const Config& config, const Servers& servers, ConnectionGuard* guard,
                         Sockets* sockets) {
  REFITD_RETURN_IF_ERROR(sockets->tcp.Listen(
      "tcp", config.listen().tcp(),
      [&servers](UniqueFd fd) { servers.members.Serve(std::move(fd)); }, guard));
  return sockets->tcp.Listen(
      "peers", config.peers().listen(),
      [&servers](UniqueFd fd) { servers.links.Serve(std::move(fd)); }, guard);
}

// The addresses that callers can use, as "unix:PATH" and "tcp:HOST:PORT".
std::vector<std::string> ListenersOf(const Config& config, const Sockets& sockets) {
  std::vector<std::string> listeners = {"unix:" + config.listen().unix_path()};
  listeners.insert(listeners.end(), sockets.tcp.names.begin(), sockets.tcp.names.end());
  return listeners;
}

// Null: the configuration asks for no metrics.
absl::StatusOr<std::unique_ptr<MetricsServer>> StartMetrics(const Config& config,
                                                            const CertificateStore* certificates,
                                                            const Authorizer* authorizer,
                                                            const Metrics* metrics,
                                                            Daemon* daemon) {
  if (config.metrics().listen().empty()) return nullptr;
  MetricsServerOptions options;
  options.address = config.metrics().listen();
  options.collect = [metrics, daemon] {
    return metrics->Text([daemon] { return StatusOf(daemon); });
  };
  options.log = LogLimited;
  if (certificates != nullptr && !config.metrics().insecure()) {
    options.certificates = [certificates] { return certificates->Current(); };
    options.admit = [authorizer](const std::string& identity) {
      return authorizer->AdmitToMetrics(identity);
    };
  }
  if (config.metrics().page()) {
    REFITD_ASSIGN_OR_RETURN(options.page, MakePage(daemon));
  }
  return MetricsServer::Start(std::move(options));
}

// Null: the configuration names no collector of traces. `metrics` and `daemon` must outlive the
// exporter's thread, which StopTraces ends.
absl::StatusOr<std::shared_ptr<SpanExporter>> StartTraces(const Config& config,
                                                          const CertificateStore* certificates,
                                                          Metrics* metrics, Daemon* daemon) {
  const Config::Traces& traces = config.traces();
  if (traces.collector().empty()) return nullptr;
  SpanExporterOptions options;
  options.collector = traces.collector();
  options.daemon_id = config.daemon_id();
  options.dial = [traces, certificates] {
    const bool clear = traces.insecure() || certificates == nullptr;
    return grpc::CreateChannel(traces.collector(),
                               clear ? grpc::InsecureChannelCredentials()
                                     : TlsChannel(*certificates->Current(), traces.identity()));
  };
  options.complete = [daemon](const std::string& group, UpdateTrace* trace) {
    v1::GetUpdateStatisticsRequest statistics;
    statistics.set_group(group);
    v1::GetGroupRequest details;
    details.set_group(group);
    // The group may be deleted by now.
    const auto buckets = GetUpdateStatistics(daemon, statistics);
    if (buckets.ok()) trace->Add(*buckets);
    const auto nodes = GetGroup(daemon, details);
    if (nodes.ok()) trace->Add(nodes->group());
  };
  options.count = [metrics](bool exported) { metrics->SpansEnded(exported); };
  options.log = [](const std::string& line) { LogWarning("{}", line); };
  options.now_ns = [] {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  };
  auto exporter = std::make_shared<SpanExporter>(std::move(options));
  // Changes of state come at once; the interval is that of progress, which spans do not have.
  REFITD_RETURN_IF_ERROR(
      daemon->operators().Watch({.group = "", .interval = kTraceInterval}, exporter).status());
  LogInfo("traces: to {}", traces.collector());
  return exporter;
}

struct StopTraces {
  std::shared_ptr<SpanExporter> exporter;
  ~StopTraces() {
    if (exporter != nullptr) exporter->Stop(kTraceGrace);
  }
};

// The services of the daemon.
struct Services {
  Services(const Config& config, const Authorizer* authorizer, Daemon* daemon)
      : members{MakeTrainerService(daemon, authorizer), MakeEngineService(daemon, authorizer),
                MakeOperatorService(daemon, authorizer)},
        links(&daemon->peer_server(), config.limits().message_bytes(),
              LinkAuthorizerOf(authorizer)),
        health(daemon, authorizer),
        reflection(authorizer, Names(/*members=*/true, /*links=*/config.peers().listen().empty())),
        reflection_of_links(authorizer, Names(/*members=*/false, /*links=*/true)) {}

  static std::vector<std::string> Names(bool members, bool links) {
    std::vector<std::string> names = {
        grpc::health::v1::Health::service_full_name(),
        grpc::reflection::v1alpha::ServerReflection::service_full_name()};
    if (members) {
      names.insert(names.end(), {v1::Trainer::service_full_name(), v1::Engine::service_full_name(),
                                 v1::Operator::service_full_name()});
    }
    if (links) names.emplace_back(v1::Peer::service_full_name());
    return names;
  }

  std::array<std::unique_ptr<grpc::Service>, 3> members;  // and operators
  PeerService links;
  HealthService health;
  ReflectionService reflection;
  ReflectionService reflection_of_links;  // of a server for links alone
};

// False: gRPC refuses to start a server.
bool StartServers(const Config& config, const CertificateStore* certificates, Services* services,
                  Servers* servers) {
  const bool apart = !config.peers().listen().empty();
  std::vector<grpc::Service*> all = {&services->health, &services->reflection};
  for (const auto& service : services->members) all.push_back(service.get());
  if (!apart) all.push_back(&services->links);
  StartServer(config, all, certificates, &servers->members);
  if (apart) {
    StartServer(config, {&services->links, &services->health, &services->reflection_of_links},
                certificates, &servers->links);
  }
  return servers->members.server != nullptr && (!apart || servers->links.server != nullptr);
}

// Ends the daemon after its running updates. An update ends or meets its own deadline, which
// max_duration bounds; a second signal aborts it.
void DrainDaemon(const Config& config, sigset_t signals, bool devices_lost, Daemon* daemon) {
  sigdelset(&signals, SIGHUP);  // ends nothing, so it is no second signal
  daemon->Drain();
  std::atomic<bool> finished{false};
  std::thread second([&] {
    constexpr timespec kLook{0, 100'000'000};
    while (!finished && sigtimedwait(&signals, nullptr, &kLook) < 0) {
    }
    if (!finished) LogInfo("second signal: aborting what still runs");
    daemon->Hurry();
  });
  const Duration patience =
      devices_lost ? Duration(kLostGrace) : Ms(config.limits().max_duration_ms());
  daemon->Finish(std::chrono::steady_clock::now() + patience);
  finished = true;
  second.join();
}

// Serves until a signal or the loss of the GPUs, then drains.
void ServeUntilSignal(const Config& config, const sigset_t& signals, const DeviceLoss& loss,
                      const std::vector<std::string>& listeners, FollowedFiles* followed,
                      const Sockets& sockets, const Servers& servers, HealthService* health,
                      Daemon* daemon) {
  sockets.Start();
  ServiceManager manager([daemon] { return daemon->Alive(); });
  LogInfo("refitd {} listening on {}, pid {}", kVersion, fmt::join(listeners, ", "), getpid());
  manager.Ready("serving");
  const int signal_number = AwaitEnd(signals, followed);
  // A process never gets a lost context back, and work that hangs on a GPU may go on while the
  // process lives; a new process has neither problem. Run exits as failed, so that the service
  // manager starts one.
  const bool lost = !loss.why().ok();
  if (lost) {
    daemon->DevicesLost(loss.why());
  } else {
    LogInfo("{}: draining", signal_number == SIGTERM ? "SIGTERM" : "SIGINT");
  }
  manager.Stopping("draining");
  health->StopServing();
  DrainDaemon(config, signals, lost, daemon);
  sockets.Stop();
  servers.Shutdown();
  LogInfo("drained");
}

// Builds the daemon from the outside in and serves until a signal, or until the GPUs are lost.
// Returns the exit code. The order matters: environment and signal mask before any thread;
// listeners before gRPC starts.
int Run(const Invocation& invocation, std::function<absl::StatusOr<Invocation>()> reload) {
  const Config& config = invocation.config;
  // These change the environment, so they must come before any thread.
  const NcclEnvironment nccl = CleanNcclEnvironment(config.peers().interface());
  RequireTls13();
  TurnOffTlsResumption();
  GuardTls();
  // Comes before any thread: all threads inherit the mask, and only this one waits for the signals.
  const sigset_t signals = BlockSignals();
  if (absl::Status status = SetLogging({.format = static_cast<LogFormat>(config.log().format()),
                                        .level = static_cast<LogLevel>(config.log().level()),
                                        .file = config.log().file()});
      !status.ok())
    return Fail(status);
  for (const std::string& warning : invocation.warnings) LogWarning("{}", warning);
  LogNcclEnvironment(nccl);
  TakeGrpcLog();

  absl::StatusOr<std::unique_ptr<ProcessWatch>> processes = ProcessWatch::Create();
  if (!processes.ok()) return Fail(processes.status());
  Metrics metrics(static_cast<size_t>(config.limits().max_groups()));
  DaemonOptions options = DaemonOptionsOf(config);
  options.observer = &metrics;
  const absl::StatusOr<std::unique_ptr<AuditLog>> audit = OpenAudit(config);
  if (!audit.ok()) return Fail(audit.status());
  options.audit = audit->get();
  PolicyStore policies(*Policy::Make(PolicySettingsOf(config)));  // LoadConfig has checked it
  options.owner_rule = OwnerRuleOf(&policies);
  const auto certificates = LoadOwnCertificates(config, audit->get());
  if (!certificates.ok()) {
    // The tool that issues the certificates may not have written them yet. The service manager
    // starts the daemon again.
    LogError("tls: {}", Message(certificates.status()));
    return kExitFailure;
  }
  std::unique_ptr<Wire> wire = HostWireOf(config, certificates->get());
  options.clear_wire = WhyClear(config, certificates->get());
  const auto loss = std::make_shared<DeviceLoss>();
  std::unique_ptr<Transport> transport = MakeTransport(config, loss, &options.devices);
  LogInfo("cuda: {}", options.devices.detail);
  Daemon daemon(std::move(options), std::move(transport), processes->get(), std::move(wire),
                MakeDialer(config, certificates->get()));

  PeerTable peers;
  ConnectionGuard guard({.tls = *certificates != nullptr,
                         .message_bytes = config.limits().message_bytes(),
                         .ended = [](const std::string& source, const std::string& why) {
                           LogLimited(fmt::format("a connection of {} is ended: {}", source, why));
                         }});
  Operators& operators = daemon.operators();
  const Authorizer authorizer(
      {.peers = &peers,
       .policies = &policies,
       .owner = [&operators](const std::string& group) { return operators.OwnerOf(group); },
       .has_lease = [&operators](const std::string& who) { return operators.HasLease(who); },
       .audit = audit->get(),
       .guard = &guard,
       .tls = *certificates != nullptr});
  Services services(config, &authorizer, &daemon);
  FollowedFiles followed{.certificates = certificates->get(),
                         .audit = audit->get(),
                         .policies = &policies,
                         .settings = PolicySettingsOf(config),
                         .rules_file = config.rules_file(),
                         .load = std::move(reload)};
  followed.AuditPolicy(absl::OkStatus());

  Servers servers;
  Sockets sockets;
  if (absl::Status status = Listen(config, &peers, servers, &authorizer, &guard, &daemon, &sockets);
      !status.ok()) {
    return Fail(status);
  }
  if (absl::Status status = ListenOnTcp(config, servers, &guard, &sockets); !status.ok()) {
    LogError("can't listen on {}", Message(status));
    return kExitInUse;
  }
  absl::StatusOr<std::unique_ptr<MetricsServer>> metrics_server =
      StartMetrics(config, certificates->get(), &authorizer, &metrics, &daemon);
  if (!metrics_server.ok()) return Fail(metrics_server.status());
  const auto traces = StartTraces(config, certificates->get(), &metrics, &daemon);
  if (!traces.ok()) return Fail(traces.status());
  const StopTraces stop_traces{*traces};
  if (!StartServers(config, certificates->get(), &services, &servers)) {
    return Fail(absl::InternalError("the gRPC server does not start"));
  }
  std::vector<std::string> listeners = ListenersOf(config, sockets);
  if (*metrics_server != nullptr) listeners.push_back("metrics:" + (*metrics_server)->address());
  daemon.SetListeners(listeners);
  ServeUntilSignal(config, signals, *loss, listeners, &followed, sockets, servers, &services.health,
                   &daemon);
  return loss->why().ok() ? kExitOk : kExitFailure;
}

}  // namespace
}  // namespace refitd

int main(int argc, char** argv) {
  // Debian builds Abseil with its deadlock detector, which takes a process-wide lock at each lock
  // and unlock in gRPC. That would cost a fifth of the instructions of an update.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  refitd::InstallLastWords();
  absl::StatusOr<refitd::Invocation> invocation = refitd::LoadConfig(argc, argv, environ);
  if (!invocation.ok()) {
    std::fprintf(stderr, "refitd: %s\n", refitd::Message(invocation.status()).c_str());
    return refitd::kExitUsage;
  }
  if (invocation->print.has_value()) {
    for (const std::string& warning : invocation->warnings) {
      std::fprintf(stderr, "refitd: warning: %s\n", warning.c_str());
    }
    std::fputs(invocation->print->c_str(), stdout);
    return refitd::kExitOk;
  }
  const int code =
      refitd::Run(*invocation, [argc, argv] { return refitd::LoadConfig(argc, argv, environ); });
  // A log that takes no lines must not hold up the end (P4).
  if (!refitd::FlushLog()) _exit(code);
  return code;
}
