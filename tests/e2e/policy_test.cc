// Who may do what (P9), through real daemons: every RPC asked by every role, owners of groups,
// policies that change while updates run, limits of an identity, and what the audit log tells.
#include <fmt/format.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/dynamic_message.h>
#include <grpcpp/generic/generic_stub.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "client/engine.h"
#include "client/trainer.h"
#include "daemon/policy/rpcs.h"
#include "grpc/health/v1/health.pb.h"
#include "grpc/reflection/v1alpha/reflection.pb.h"
#include "refitd/v1/peer.pb.h"
#include "tests/e2e/certified.h"
#include "tests/e2e/client_members.h"
#include "tests/e2e/require.h"
#include "transport/tls/grpc_credentials.h"

namespace refitd::e2e {
namespace {

using Catch::Contains;
using google::protobuf::Descriptor;
using google::protobuf::DescriptorPool;
using google::protobuf::MethodDescriptor;
using google::protobuf::ServiceDescriptor;

using Callers = std::set<std::string>;

// Who may call what, by hand and not from the daemon's own table. "owner" is a trainer by the same
// rule as "trainer", and owns the group of the first column; nobody owns that of the second.
struct Expected {
  Callers owned;
  Callers free;
};

const Callers kKnown = {"trainer", "owner", "engine", "reader", "writer", "peer"};

const std::map<std::string, Expected>& Table() {
  static const auto* const table = new std::map<std::string, Expected>{
      {"refitd.v1.Trainer/Attach", {{"owner"}, {"trainer", "owner"}}},
      {"refitd.v1.Trainer/RegisterRegion", {kKnown, kKnown}},
      {"refitd.v1.Trainer/ReleaseRegion", {kKnown, kKnown}},
      {"refitd.v1.Trainer/RegisterLayout", {kKnown, kKnown}},
      {"refitd.v1.Trainer/Begin", {kKnown, kKnown}},
      {"refitd.v1.Trainer/LeaseSlot", {kKnown, kKnown}},
      {"refitd.v1.Trainer/ReleaseSlot", {kKnown, kKnown}},
      {"refitd.v1.Trainer/PushBucket", {kKnown, kKnown}},
      {"refitd.v1.Trainer/Commit", {kKnown, kKnown}},
      {"refitd.v1.Trainer/Abort", {kKnown, kKnown}},
      {"refitd.v1.Trainer/Refit", {kKnown, kKnown}},
      {"refitd.v1.Trainer/Rollback", {kKnown, kKnown}},
      {"refitd.v1.Trainer/ReleasePrevious", {kKnown, kKnown}},
      {"refitd.v1.Trainer/GetUpdate",
       {{"owner", "engine", "reader", "writer"},
        {"trainer", "owner", "engine", "reader", "writer"}}},
      {"refitd.v1.Engine/Attach", {{"owner", "engine"}, {"engine"}}},
      {"refitd.v1.Engine/RegisterRegion", {kKnown, kKnown}},
      {"refitd.v1.Engine/ReleaseRegion", {kKnown, kKnown}},
      {"refitd.v1.Engine/RegisterLayout", {kKnown, kKnown}},
      {"refitd.v1.Operator/CreateGroup", {{"owner", "writer"}, {"writer"}}},
      {"refitd.v1.Operator/DeleteGroup", {{"owner", "writer"}, {"writer"}}},
      {"refitd.v1.Operator/AbortUpdate", {{"owner", "writer"}, {"writer"}}},
      {"refitd.v1.Operator/Rollback", {{"owner", "writer"}, {"writer"}}},
      {"refitd.v1.Operator/ReleasePrevious", {{"owner", "writer"}, {"writer"}}},
      {"refitd.v1.Operator/Drain", {{"owner", "writer"}, {"writer"}}},
      {"refitd.v1.Operator/GetStatus",
       {{"trainer", "owner", "reader", "writer"}, {"trainer", "owner", "reader", "writer"}}},
      {"refitd.v1.Operator/ListGroups",
       {{"trainer", "owner", "reader", "writer"}, {"trainer", "owner", "reader", "writer"}}},
      {"refitd.v1.Operator/GetGroup", {{"owner", "reader", "writer"}, {"reader", "writer"}}},
      {"refitd.v1.Operator/ListMembers", {{"owner", "reader", "writer"}, {"reader", "writer"}}},
      {"refitd.v1.Operator/WatchUpdates", {{"owner", "reader", "writer"}, {"reader", "writer"}}},
      {"refitd.v1.Operator/GetUpdateStatistics",
       {{"owner", "reader", "writer"}, {"reader", "writer"}}},
      {"refitd.v1.Operator/CheckAccess", {{"owner", "reader", "writer"}, {"reader", "writer"}}},
      {"refitd.v1.Peer/Link", {{"peer"}, {"peer"}}},
      {"grpc.health.v1.Health/Check", {kKnown, kKnown}},
      {"grpc.health.v1.Health/Watch", {kKnown, kKnown}},
      {"grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", {kKnown, kKnown}},
  };
  return *table;
}

constexpr char kRoles[] = R"(
rule { who: "spiffe://prod/trainer" role: TRAINER group: "*" }
rule { who: "spiffe://prod/owner" role: TRAINER group: "*" }
rule { who: "spiffe://prod/engine" role: ENGINE group: "*" }
rule { who: "spiffe://prod/reader" role: OPERATOR_READ group: "*" }
rule { who: "spiffe://prod/writer" role: OPERATOR_WRITE group: "*" }
rule { who: "spiffe://prod/peer" role: PEER group: "*" }
)";

std::string NameOf(const MethodDescriptor& method) {
  return method.service()->full_name() + "/" + method.name();
}

// The methods of every service that the daemon can serve.
std::vector<const MethodDescriptor*> Methods() {
  // Naming a message of each file links the file's descriptors.
  const std::vector<const Descriptor*> named = {
      v1::TrainerHello::descriptor(),
      v1::EngineHello::descriptor(),
      v1::GetStatusRequest::descriptor(),
      v1::PeerHello::descriptor(),
      grpc::health::v1::HealthCheckRequest::descriptor(),
      grpc::reflection::v1alpha::ServerReflectionRequest::descriptor()};
  std::vector<const MethodDescriptor*> methods;
  for (const Descriptor* each : named) {
    for (int s = 0; s < each->file()->service_count(); ++s) {
      const ServiceDescriptor* service = each->file()->service(s);
      for (int m = 0; m < service->method_count(); ++m) methods.push_back(service->method(m));
    }
  }
  return methods;
}

// Sets a field of the message, or of its hello if it has one.
void Set(google::protobuf::Message* message, const std::string& name, const std::string& value) {
  const Descriptor* type = message->GetDescriptor();
  if (const auto* hello = type->FindFieldByName("hello"); hello != nullptr) {
    return Set(message->GetReflection()->MutableMessage(message, hello), name, value);
  }
  const auto* field = type->FindFieldByName(name);
  if (field != nullptr && field->cpp_type() == field->CPPTYPE_STRING) {
    message->GetReflection()->SetString(message, field, value);
  }
}

grpc::ByteBuffer RequestOf(const MethodDescriptor& method, const std::string& group) {
  google::protobuf::DynamicMessageFactory factory;
  const std::unique_ptr<google::protobuf::Message> message(
      factory.GetPrototype(method.input_type())->New());
  Set(message.get(), "group", group);
  Set(message.get(), "list_services", "*");
  // A watch that would wait for updates ends at once.
  if (const auto* idle = method.input_type()->FindFieldByName("until_idle"); idle != nullptr) {
    message->GetReflection()->SetBool(message.get(), idle, true);
  }
  if (method.service()->name() == "Peer") {
    Set(message.get(), "daemon_id", "p");
    Set(message.get(), "boot_id", std::string(16, 'b'));
  }
  const std::string bytes = message->SerializeAsString();
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

// Calls a method with one message. OK: it answered with a message, which ends the call.
grpc::Status CallOnce(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                      const grpc::ByteBuffer& request) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  grpc::CompletionQueue queue;
  const auto await = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    REQUIRE(queue.Next(&tag, &ok));
    return ok;
  };
  const auto call = stub.PrepareCall(&context, "/" + method, &queue);
  call->StartCall(nullptr);
  bool answered = false;
  if (await()) {
    grpc::WriteOptions last;
    last.set_last_message();
    call->Write(request, last, nullptr);
    if (await()) {
      grpc::ByteBuffer response;
      call->Read(&response, nullptr);
      answered = await();
    }
  }
  if (answered) context.TryCancel();
  grpc::Status status;
  call->Finish(&status, nullptr);
  await();
  return answered ? grpc::Status::OK : status;
}

std::shared_ptr<grpc::Channel> ChannelOf(const std::string& address, const TlsFiles& files) {
  const auto own = LoadCertificates(files);
  REQUIRE(own.ok());
  return grpc::CreateChannel("dns:///" + address, TlsChannel(**own, kDaemons));
}

client::ConnectOptions Over(const std::string& address, const TlsFiles& files,
                            const std::string& group) {
  client::ConnectOptions connect;
  connect.address = address;
  connect.group = group;
  connect.spec.emplace();
  connect.wait = std::chrono::seconds(10);
  connect.tls = {
      .certificate = files.certificate, .key = files.key, .roots = files.roots, .server = kDaemons};
  return connect;
}

absl::StatusOr<std::unique_ptr<client::Trainer>> Train(const std::string& address,
                                                       const TlsFiles& files,
                                                       const std::string& group) {
  return client::Trainer::Attach({.connect = Over(address, files, group)});
}

void Create(Daemon* daemon, const std::string& group) {
  v1::CreateGroupRequest request;
  request.set_group(group);
  request.mutable_spec()->set_trainer_ranks(1);
  REQUIRE(daemon->Call(&v1::Operator::Stub::CreateGroup, request).ok());
}

bool LogHas(Daemon* daemon, const std::string& text) {
  return Eventually([&] { return daemon->log().find(text) != std::string::npos; });
}

std::vector<nlohmann::json> AuditLines(const std::string& path) {
  std::vector<nlohmann::json> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

TEST_CASE("every method of every service has an entry in the daemon's table, and no other does") {
  std::set<std::string> served;
  for (const MethodDescriptor* method : Methods()) served.insert(NameOf(*method));
  std::set<std::string> entries;
  for (const RpcEntry& entry : kRpcs) entries.insert(std::string(entry.method));
  CHECK(served == entries);
  std::set<std::string> expected;
  for (const auto& [method, callers] : Table()) expected.insert(method);
  CHECK(served == expected);
}

TEST_CASE("every RPC, asked by every role, of a group that is owned and of one that is free") {
  Certified certified(kRoles);
  Daemon daemon(Flags(certified.Issue("refitd/a"), {"--listen-tcp=127.0.0.1:0"}));
  const auto owner = Train(daemon.address(), certified.Issue("owner"), "owned");
  INFO(owner.status());
  REQUIRE(owner.ok());
  std::map<std::string, std::shared_ptr<grpc::Channel>> channels;
  for (const char* name : {"stranger", "trainer", "owner", "engine", "reader", "writer", "peer"}) {
    channels[name] = ChannelOf(daemon.address(), certified.Issue(name));
  }
  int count = 0;
  for (const MethodDescriptor* method : Methods()) {
    const Expected& expected = Table().at(NameOf(*method));
    for (const auto& [caller, channel] : channels) {
      for (const bool owned : {true, false}) {
        // A trainer that is let in becomes the owner: each call has a free group of its own.
        const std::string group = owned ? "owned" : fmt::format("free-{}", count++);
        if (!owned) Create(&daemon, group);
        const grpc::Status status = CallOnce(channel, NameOf(*method), RequestOf(*method, group));
        const bool refused = status.error_code() == grpc::StatusCode::PERMISSION_DENIED;
        const Callers& allowed = owned ? expected.owned : expected.free;
        INFO(NameOf(*method) << " by " << caller << " of " << group << ": " << status.error_code()
                             << " " << status.error_message());
        CHECK(refused == !allowed.contains(caller));
        if (refused) CHECK_THAT(status.error_message(), Contains("spiffe://prod/" + caller));
        if (!owned) {
          v1::DeleteGroupRequest request;
          request.set_group(group);
          daemon.Call(&v1::Operator::Stub::DeleteGroup, request);
        }
      }
    }
  }
  CHECK(daemon.Group("owned").trainers() == 1);
}

TEST_CASE(
    "the health of an instance is told to engines and readers of its group, and hides others") {
  Certified certified(kRoles);
  Daemon daemon(Flags(certified.Issue("refitd/a"), {"--listen-tcp=127.0.0.1:0"}));
  const auto owner = Train(daemon.address(), certified.Issue("owner"), "owned");
  REQUIRE(owner.ok());
  Create(&daemon, "free");
  const Expected expected = {{"owner", "engine", "reader", "writer"},
                             {"engine", "reader", "writer"}};
  for (const char* caller :
       {"stranger", "trainer", "owner", "engine", "reader", "writer", "peer"}) {
    const auto channel = ChannelOf(daemon.address(), certified.Issue(caller));
    for (const char* group : {"owned", "free", "no-such-group"}) {
      grpc::health::v1::HealthCheckRequest request;
      request.set_service(fmt::format("refitd.v1.Engine/{}/i", group));
      const std::string bytes = request.SerializeAsString();
      const grpc::Slice slice(bytes);
      const grpc::ByteBuffer message(&slice, 1);
      const bool owned = std::string(group) == "owned";
      const bool allowed = (owned ? expected.owned : expected.free).contains(caller);
      INFO(caller << " asks about " << group);
      // Nobody is attached, so the instance is not known, whether its group exists or not.
      const grpc::Status check = CallOnce(channel, "grpc.health.v1.Health/Check", message);
      CHECK(check.error_code() ==
            (allowed ? grpc::StatusCode::NOT_FOUND : grpc::StatusCode::PERMISSION_DENIED));
      const grpc::Status watch = CallOnce(channel, "grpc.health.v1.Health/Watch", message);
      CHECK(watch.error_code() ==
            (allowed ? grpc::StatusCode::OK : grpc::StatusCode::PERMISSION_DENIED));
    }
  }
}

TEST_CASE("a daemon links to the groups that its rules name, and asks about no others") {
  Certified certified("rule { who: \"spiffe://prod/peer\" role: PEER group: \"llama-*\" }");
  Daemon daemon(Flags(certified.Issue("refitd/a"), {"--listen-tcp=127.0.0.1:0"}));
  Create(&daemon, "llama-8b");
  Create(&daemon, "secret");
  const auto channel = ChannelOf(daemon.address(), certified.Issue("peer"));
  const auto linking = [&](const std::string& group) {
    v1::PeerMessage message;
    v1::PeerHello* hello = message.mutable_hello();
    hello->set_protocol(v1::PROTOCOL_VERSION_1);
    hello->set_group(group);
    hello->set_daemon_id("p");
    hello->set_boot_id(std::string(16, 'b'));
    hello->set_message_bytes(1 << 20);
    const grpc::Slice slice(message.SerializeAsString());
    return CallOnce(channel, "refitd.v1.Peer/Link", grpc::ByteBuffer(&slice, 1));
  };
  for (const grpc::Status& let : {linking("llama-8b")}) {
    INFO(let.error_message());
    CHECK(let.ok());
  }
  for (const grpc::Status& refused : {linking("secret")}) {
    CHECK(refused.error_code() == grpc::StatusCode::PERMISSION_DENIED);
    CHECK_THAT(refused.error_message(), Contains("secret"));
  }
}

TEST_CASE("without rules a certificate lets nobody in, and the unix socket serves its user") {
  Certified certified("");
  Daemon daemon(Flags(certified.Issue("refitd/a"), {"--listen-tcp=127.0.0.1:0"}));
  const absl::Status refused = Train(daemon.address(), certified.Issue("t"), "g").status();
  CHECK(absl::IsPermissionDenied(refused));
  CHECK_THAT(Message(refused), Contains("spiffe://prod/t may not be trainer of any group"));
  RawTrainer own(daemon.Connect(), RawTrainer::Hello("g"));
  CHECK(own.attached().ok());
}

TEST_CASE("answers about the whole daemon leave out the groups that the caller may not see") {
  Certified certified(
      "rule { who: \"spiffe://prod/reader\" role: OPERATOR_READ group: \"llama-*\" }");
  Daemon daemon(Flags(certified.Issue("refitd/a"), {"--listen-tcp=127.0.0.1:0"}));
  Create(&daemon, "llama-8b");
  Create(&daemon, "secret");
  const auto stub = v1::Operator::NewStub(ChannelOf(daemon.address(), certified.Issue("reader")));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  v1::GetStatusResponse status;
  REQUIRE(stub->GetStatus(&context, {}, &status).ok());
  REQUIRE(status.groups_size() == 1);
  CHECK(status.groups(0).name() == "llama-8b");
  grpc::ClientContext watching;
  watching.set_deadline(std::chrono::system_clock::now() + kDeadline);
  v1::WatchUpdatesRequest all;
  all.set_until_idle(true);
  const auto watch = stub->WatchUpdates(&watching, all);
  v1::UpdateStatus update;
  CHECK_FALSE(watch->Read(&update));
  CHECK(watch->Finish().error_code() == grpc::StatusCode::PERMISSION_DENIED);
}

TEST_CASE("a group is its first trainer's, until another identity replaces it") {
  Certified certified(
      "rule { who: \"spiffe://prod/*\" role: TRAINER group: \"*\" }\n"
      "rule { who: \"spiffe://prod/writer\" role: OPERATOR_WRITE group: \"*\" }");
  Daemon daemon(Flags(certified.Issue("refitd/a"), {"--listen-tcp=127.0.0.1:0"}));
  auto first = Train(daemon.address(), certified.Issue("t"), "g");
  REQUIRE(first.ok());
  first->reset();
  const absl::Status refused = Train(daemon.address(), certified.Issue("u"), "g").status();
  CHECK(absl::IsPermissionDenied(refused));
  CHECK_THAT(Message(refused), Contains("spiffe://prod/u may not be trainer of group 'g', which "
                                        "another identity owns"));
  CHECK(Train(daemon.address(), certified.Issue("t"), "g").ok());

  v1::CreateGroupRequest replace;
  replace.set_group("g");
  replace.mutable_spec()->set_trainer_ranks(1);
  replace.set_replace(true);
  const auto as = [&](const std::string& name) {
    const auto stub = v1::Operator::NewStub(ChannelOf(daemon.address(), certified.Issue(name)));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kDeadline);
    v1::CreateGroupResponse response;
    return stub->CreateGroup(&context, replace, &response);
  };
  CHECK(as("u").error_code() == grpc::StatusCode::PERMISSION_DENIED);
  REQUIRE(as("t").ok());
  CHECK_FALSE(Train(daemon.address(), certified.Issue("u"), "g").ok());
  REQUIRE(as("writer").ok());
  CHECK(Train(daemon.address(), certified.Issue("u"), "g").ok());
  CHECK_FALSE(Train(daemon.address(), certified.Issue("t"), "g").ok());
}

TEST_CASE("a file of rules counts within seconds after it changed, without a signal") {
  Certified certified("");  // the settings themselves name nobody over TLS
  const std::string rules = certified / "further";
  std::ofstream(rules) << "";
  Daemon daemon(
      Flags(certified.Issue("refitd/a"), {"--listen-tcp=127.0.0.1:0", "--rules-file=" + rules}));
  const auto train = [&] { return Train(daemon.address(), certified.Issue("t"), "g").status(); };
  CHECK(absl::IsPermissionDenied(train()));
  std::ofstream(rules) << kOpenRules;
  REQUIRE(LogHas(&daemon, "policy changed"));
  CHECK(train().ok());

  std::ofstream(rules) << kOpenRules << "daemon_id: \"other\"";
  REQUIRE(LogHas(&daemon, "daemon_id is set, but rules_file may have rules"));
  CHECK(train().ok());
  std::filesystem::remove(rules);
  REQUIRE(LogHas(&daemon, "policy not taken over: " + rules + ": No such file"));
  CHECK(train().ok());
}

TEST_CASE("a changed policy counts at once and ends no lease, and a bad one is not taken over") {
  Certified certified;
  const std::string audit = certified / "audit";
  const Model model = MixedModel();
  Daemon daemon(
      Flags(certified.Issue("refitd/a"), {"--listen-tcp=127.0.0.1:0", "--audit-file=" + audit}));
  client::ConnectOptions near;
  near.socket = daemon.socket();
  near.group = "g";
  near.spec.emplace();
  Rank engine(near, "i", client::Delivery::kInPlace, model);
  auto trainer = Train(daemon.address(), certified.Issue("t"), "g");
  REQUIRE(trainer.ok());
  const std::vector<std::string> bytes = BytesOf(model, 1);
  std::vector<std::span<const char>> spans(bytes.begin(), bytes.end());
  auto update = (*trainer)->Begin({.version = Version(1)});
  REQUIRE(update.ok());

  certified.WriteRules("");  // from now on no rule names anybody over TLS
  daemon.Signal(SIGHUP);
  REQUIRE(LogHas(&daemon, "policy changed"));
  CHECK(absl::IsPermissionDenied(Train(daemon.address(), certified.Issue("u"), "h").status()));
  REQUIRE((*update)->Push(client::Bucket::Inline(model, spans)).ok());
  REQUIRE((*update)->Commit().ok());
  CHECK(engine.Await([](const Rank::Seen& seen) { return seen.committed == Version(1); }));

  certified.WriteRules("rule { who: \"nobody\" role: TRAINER group: \"*\" }");
  daemon.Signal(SIGHUP);
  REQUIRE(LogHas(&daemon, "policy not taken over: rule[0].who is \"nobody\""));
  CHECK(absl::IsPermissionDenied(Train(daemon.address(), certified.Issue("u"), "h").status()));
  certified.WriteRules(kOpenRules);
  daemon.Signal(SIGHUP);
  CHECK(Eventually([&] { return Train(daemon.address(), certified.Issue("u"), "h").ok(); }));
  const auto outcomes = [&audit] {
    std::vector<std::string> found;
    for (const auto& line : AuditLines(audit)) {
      if (line["what"] == "policy") found.push_back(line["outcome"].get<std::string>());
    }
    return found;
  };
  const std::vector<std::string> expected = {"OK", "OK", "INVALID_ARGUMENT", "OK"};
  CHECK(Eventually([&] { return outcomes() == expected; }));
}

TEST_CASE("an identity has limits of its own, and the error names identity, limit and value") {
  Certified certified;
  Daemon daemon(Flags(certified.Issue("refitd/a"),
                      {"--listen-tcp=127.0.0.1:0", "--limits-per-identity-groups=1",
                       "--limits-per-identity-members=2", "--limits-per-identity-pool-bytes=512MiB",
                       "--limits-per-identity-regions=1", "--limits-per-identity-updates=1"}));
  const TlsFiles t = certified.Issue("t");
  const auto first = Train(daemon.address(), t, "g");
  REQUIRE(first.ok());
  const absl::Status group = Train(daemon.address(), t, "h").status();
  CHECK(absl::IsResourceExhausted(group));
  CHECK_THAT(Message(group), Contains("limits.per_identity.groups: spiffe://prod/t has 1 at this "
                                      "daemon, asks for 1 more, and may have 1"));
  // Another identity has a share of its own.
  CHECK(Train(daemon.address(), certified.Issue("u"), "h").ok());

  client::ConnectOptions near;
  near.socket = daemon.socket();
  near.group = "k";
  near.spec.emplace();
  const auto trainer = client::Trainer::Attach({.connect = near});
  REQUIRE(trainer.ok());
  const auto engine = client::Engine::Attach({.connect = near, .instance = "i"});
  REQUIRE(engine.ok());
  const absl::Status member = client::Engine::Attach({.connect = near, .instance = "j"}).status();
  CHECK(absl::IsResourceExhausted(member));
  CHECK_THAT(Message(member),
             Contains("limits.per_identity.members: uid:") && Contains("has 2 at this daemon"));
  const auto region = (*trainer)->NewRegion(4096);
  REQUIRE(region.ok());
  const absl::Status more = (*engine)->NewRegion(4096).status();
  CHECK(absl::IsResourceExhausted(more));
  CHECK_THAT(Message(more), Contains("limits.per_identity.regions: uid:"));
}

TEST_CASE("pools and running updates are limited for each identity too") {
  Daemon daemon({"--limits-per-identity-updates=1", "--limits-per-identity-pool-bytes=384MiB"});
  const Model model = MixedModel();
  client::ConnectOptions near;
  near.socket = daemon.socket();
  near.spec.emplace();
  near.group = "g";
  near.spec->slots = 2;
  Rank of_g(near, "i", client::Delivery::kInPlace, model);
  const auto first = client::Trainer::Attach({.connect = near});
  REQUIRE(first.ok());
  near.group = "h";
  Rank of_h(near, "i", client::Delivery::kInPlace, model);
  const auto second = client::Trainer::Attach({.connect = near});
  REQUIRE(second.ok());
  near.group = "k";
  near.spec->slots = 4;
  CHECK_THAT(Message(client::Trainer::Attach({.connect = near}).status()),
             Contains("limits.per_identity.pool_bytes: uid:"));
  auto running = (*first)->Begin({.version = Version(1)});
  INFO(running.status());
  REQUIRE(running.ok());
  const absl::Status refused = (*second)->Begin({.version = Version(1)}).status();
  CHECK(absl::IsResourceExhausted(refused));
  CHECK_THAT(Message(refused), Contains("limits.per_identity.updates: uid:"));
  REQUIRE((*running)->Abort("enough").ok());
  CHECK((*second)->Begin({.version = Version(1)}).ok());
}

// Whether the lines have one with these values.
bool Has(const std::vector<nlohmann::json>& lines, const nlohmann::json& wanted) {
  return std::any_of(lines.begin(), lines.end(), [&](const nlohmann::json& line) {
    return std::all_of(wanted.items().begin(), wanted.items().end(), [&](const auto& item) {
      return line.contains(item.key()) && line[item.key()] == item.value();
    });
  });
}

TEST_CASE("the audit log tells who did what, survives rotation, and has no token and no weights") {
  Certified certified;
  const std::string audit = certified / "audit";
  const Model model = MixedModel();
  Daemon daemon(
      Flags(certified.Issue("refitd/a"), {"--listen-tcp=127.0.0.1:0", "--audit-file=" + audit}));
  client::ConnectOptions near;
  near.socket = daemon.socket();
  near.group = "g";
  near.spec.emplace();
  auto engine = std::make_unique<Rank>(near, "i", client::Delivery::kInPlace, model);
  auto trainer = Train(daemon.address(), certified.Issue("t"), "g");
  REQUIRE(trainer.ok());
  const std::vector<std::string> bytes = BytesOf(model, 812);
  std::vector<std::span<const char>> spans(bytes.begin(), bytes.end());
  auto update = (*trainer)->Begin({.version = Version(812)});
  REQUIRE(update.ok());
  REQUIRE((*update)->Push(client::Bucket::Inline(model, spans)).ok());
  REQUIRE((*update)->Commit().ok());
  auto lost = (*trainer)->Begin({.version = Version(813)});
  REQUIRE(lost.ok());
  REQUIRE((*lost)->Abort("enough").ok());
  const std::string t = "spiffe://prod/t";
  const auto has = [&](const nlohmann::json& wanted) {
    return Eventually([&] { return Has(AuditLines(audit), wanted); });
  };
  CHECK(has({{"what", "attach"}, {"identity", t}, {"group", "g"}, {"outcome", "OK"}}));
  CHECK(has({{"what", "begin"}, {"identity", t}, {"version", 812}, {"outcome", "OK"}}));
  CHECK(has({{"what", "commit"}, {"identity", t}, {"version", 812}, {"outcome", "OK"}}));
  CHECK(has({{"what", "update"}, {"identity", t}, {"version", 812}, {"outcome", "committed"}}));
  CHECK(has({{"what", "abort"}, {"identity", t}, {"version", 813}, {"outcome", "OK"}}));
  CHECK(has({{"what", "update"}, {"version", 813}, {"outcome", "aborted"}}));

  auto other = std::make_unique<Rank>(near, "j", client::Delivery::kInPlace, model);
  auto evicting = (*trainer)->Begin({.version = Version(814)});
  REQUIRE(evicting.ok());
  other.reset();
  CHECK(has({{"what", "evict"}, {"group", "g"}, {"subject", "j"}, {"version", 814}}));
  v1::AbortUpdateRequest abort;
  abort.set_group("g");
  CHECK(daemon.Call(&v1::Operator::Stub::AbortUpdate, abort).ok());
  CHECK(has({{"what", "abort"}, {"rpc", "refitd.v1.Operator/AbortUpdate"}, {"outcome", "OK"}}));
  v1::CreateGroupRequest replace;
  replace.set_group("g");
  replace.mutable_spec()->set_trainer_ranks(1);
  replace.set_replace(true);
  replace.set_request_id("r-1");
  CHECK(daemon.Call(&v1::Operator::Stub::CreateGroup, replace).ok());
  CHECK(has({{"what", "replace"}, {"group", "g"}, {"request_id", "r-1"}, {"outcome", "OK"}}));
  certified.Issue("refitd/a");
  daemon.Signal(SIGHUP);
  CHECK(has({{"what", "certificates"}, {"outcome", "OK"}}));

  std::filesystem::rename(audit, audit + ".1");
  daemon.Signal(SIGHUP);
  REQUIRE(Eventually([&] { return std::filesystem::exists(audit); }));
  certified.WriteRules("");
  daemon.Signal(SIGHUP);
  REQUIRE(LogHas(&daemon, "policy changed"));
  CHECK(absl::IsPermissionDenied(Train(daemon.address(), certified.Issue("u"), "g").status()));
  CHECK(has(
      {{"what", "refusal"}, {"identity", "spiffe://prod/u"}, {"outcome", "PERMISSION_DENIED"}}));
  trainer->reset();
  engine.reset();
  RawTrainer raw(daemon.Connect(), RawTrainer::Hello("h"));
  REQUIRE(raw.attached().ok());
  const std::string token = raw.welcome().lease().token();
  CHECK(has({{"what", "attach"}, {"group", "h"}, {"pid", getpid()}}));
  v1::DeleteGroupRequest request;
  request.set_group("g");
  REQUIRE(Eventually([&] { return daemon.Call(&v1::Operator::Stub::DeleteGroup, request).ok(); }));
  CHECK(has({{"what", "delete"}, {"group", "g"}, {"outcome", "OK"}, {"pid", getpid()}}));

  std::string all;
  for (const std::string& path : {audit, audit + ".1"}) {
    std::ifstream file(path);
    all.append(std::istreambuf_iterator<char>(file), {});
  }
  REQUIRE(token.size() == 16);
  std::string hex;
  for (const char c : token) hex += fmt::format("{:02x}", static_cast<unsigned char>(c));
  CHECK(all.find(token) == std::string::npos);
  CHECK(all.find(hex) == std::string::npos);
  CHECK(all.find("token") == std::string::npos);
  all += daemon.log();
  CHECK(all.find(token) == std::string::npos);
  CHECK(all.find(hex) == std::string::npos);
  for (const std::string& tensor : bytes) {
    if (tensor.size() >= 16) CHECK(all.find(tensor.substr(0, 16)) == std::string::npos);
  }
}

}  // namespace
}  // namespace refitd::e2e
