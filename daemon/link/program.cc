#include "daemon/link/program.h"

#include <utility>

#include "daemon/link/values.h"
#include "proto/convert.h"

namespace refitd {
namespace {

using peer::MemberOf;

constexpr int64_t kVarintBytes = 10;

void PutMembers(const std::vector<PlanMember>& members,
                google::protobuf::RepeatedField<uint64_t>* ids,
                google::protobuf::RepeatedField<uint32_t>* ranks) {
  for (const PlanMember& m : members) {
    ids->Add(m.member.value());
    ranks->Add(m.rank);
  }
}

absl::StatusOr<std::vector<PlanMember>> MembersOf(
    const google::protobuf::RepeatedField<uint64_t>& ids,
    const google::protobuf::RepeatedField<uint32_t>& ranks, std::string_view field) {
  REFITD_RETURN_IF_ERROR(AtMost(ids.size(), kMaxEngineRanks, field));
  if (ids.size() != ranks.size()) {
    return Invalid("{} has {} entries, their ranks {}", field, ids.size(), ranks.size());
  }
  std::vector<PlanMember> members;
  members.reserve(static_cast<size_t>(ids.size()));
  for (int i = 0; i < ids.size(); ++i) {
    REFITD_ASSIGN_OR_RETURN(const MemberId member,
                            MemberOf(ids[i], fmt::format("{}[{}]", field, i)));
    REFITD_RETURN_IF_ERROR(
        InRange(ranks[i], 0, kMaxEngineRanks - 1, fmt::format("{} rank [{}]", field, i)));
    members.push_back({ranks[i], member});
  }
  return members;
}

void PutBox(const Box& box, google::protobuf::RepeatedField<int64_t>* message) {
  for (const int64_t offset : box.offset) message->Add(offset);
  for (const int64_t extent : box.extent) message->Add(extent);
}

// Cuts a plan into messages.
class PlanWriter {
 public:
  PlanWriter(const PeerProgram& program, int64_t chunk_bytes)
      : program_(program), chunk_bytes_(chunk_bytes) {}

  std::vector<v1::PeerAnswer> Run() {
    Next();
    message_->set_program(program_.program.value());
    message_->set_node(program_.node);
    message_->set_chunk_bytes(program_.chunk_bytes);
    PutMembers(program_.sources, message_->mutable_sources(), message_->mutable_source_ranks());
    PutMembers(program_.destinations, message_->mutable_destinations(),
               message_->mutable_destination_ranks());
    if (program_.plan != nullptr) PutPlan(*program_.plan);
    message_->set_last(true);
    return std::move(messages_);
  }

 private:
  void Next() {
    message_ = messages_.emplace_back().mutable_program();
    message_->set_update(program_.update.value());
    bytes_ = 0;
  }

  // Returns the chunk to which an entry of about `bytes` bytes is added.
  v1::PeerPlan* Room(int64_t bytes) {
    if (bytes_ > 0 && bytes_ + bytes > chunk_bytes_) Next();
    bytes_ += bytes;
    return message_->mutable_plan();
  }

  void PutPlan(const RoutePlan& plan) {
    v1::PeerPlan* first = message_->mutable_plan();
    first->set_nodes(plan.nodes);
    first->mutable_source_nodes()->Add(plan.source_nodes.begin(), plan.source_nodes.end());
    first->mutable_source_digests()->Add(plan.source_digests.begin(), plan.source_digests.end());
    first->mutable_destination_nodes()->Add(plan.destination_nodes.begin(),
                                            plan.destination_nodes.end());
    first->mutable_destination_digests()->Add(plan.destination_digests.begin(),
                                              plan.destination_digests.end());
    first->set_longest_stream(plan.longest_stream);
    first->set_wire_bytes(plan.wire_bytes);
    first->set_relay_lag(plan.relay.lag);
    first->set_relay_longest(plan.relay.longest);
    first->set_relay_usual(plan.relay.usual);
    first->set_relay_node_streams(plan.relay.node_streams);
    first->set_relay_node_bytes(plan.relay.node_bytes);
    bytes_ = static_cast<int64_t>(first->ByteSizeLong());
    for (uint32_t i = 0; i < plan.tensors.size(); ++i) {
      const TensorSpec& tensor = plan.tensors[i];
      v1::PeerPlan* message = Room(static_cast<int64_t>(tensor.name.size()) + 8 +
                                   kVarintBytes * static_cast<int64_t>(tensor.shape.size()));
      message->add_names(tensor.name);
      message->add_dtypes(ToProto(tensor.dtype));
      *message->add_shapes() = ToProto(tensor.shape);
      if (tensor.derived == nullptr) continue;
      v1::Derivation derivation = ToProto(*tensor.derived);
      message = Room(static_cast<int64_t>(derivation.ByteSizeLong()) + kVarintBytes);
      message->add_derived_tensors(i);
      *message->add_derivations() = std::move(derivation);
    }
    for (const std::vector<uint32_t>& set : plan.node_sets) {
      v1::PeerPlan* message = Room(5 + 2 * static_cast<int64_t>(set.size()));
      message->add_set_sizes(static_cast<uint32_t>(set.size()));
      message->mutable_set_nodes()->Add(set.begin(), set.end());
    }
    for (const Route& route : plan.routes) {
      const Box box = plan.BoxOf(route);
      v1::PeerPlan* message = Room(15 + 2 * kVarintBytes * static_cast<int64_t>(box.offset.size()));
      message->add_route_tensors(route.tensor);
      message->add_route_sources(route.source);
      message->add_route_sets(route.node_set);
      PutBox(box, message->mutable_route_boxes());
    }
    for (const ReplicaShare& share : *program_.replicas) {
      v1::PeerPlan* message =
          Room(10 + 2 * kVarintBytes * static_cast<int64_t>(share.box.offset.size()));
      message->add_replica_sources(share.source);
      message->add_replica_tensors(share.tensor);
      PutBox(share.box, message->mutable_replica_boxes());
    }
  }

  const PeerProgram& program_;
  const int64_t chunk_bytes_;
  std::vector<v1::PeerAnswer> messages_;
  v1::PeerProgram* message_ = nullptr;
  int64_t bytes_ = 0;
};

absl::Status Below(uint32_t value, size_t bound, std::string_view field, int64_t index) {
  if (value < bound) return absl::OkStatus();
  return Invalid("program.plan.{}[{}] is {}, not below {}", field, index, value, bound);
}

}  // namespace

std::vector<v1::PeerAnswer> ProgramToProto(const PeerProgram& program, int64_t chunk_bytes) {
  return PlanWriter(program, chunk_bytes).Run();
}

absl::StatusOr<std::optional<PeerCommand>> ProgramDecoder::Add(const v1::PeerProgram& message) {
  if (!program_.has_value()) {
    REFITD_RETURN_IF_ERROR(Begin(message));
  } else if (message.update() != program_->update.value()) {
    return Invalid("program.update is {} where the last chunk of update {}'s is to come",
                   message.update(), program_->update);
  }
  if (message.has_plan()) REFITD_RETURN_IF_ERROR(AddPlan(message.plan()));
  if (!message.last()) return std::nullopt;
  if (plan_ != nullptr) {
    REFITD_RETURN_IF_ERROR(CheckWhole());
    program_->plan = std::move(plan_);
    program_->replicas = std::move(replicas_);
  }
  PeerProgram whole = std::move(*program_);
  *this = ProgramDecoder();
  return PeerCommand(std::move(whole));
}

absl::Status ProgramDecoder::Begin(const v1::PeerProgram& message) {
  PeerProgram out;
  out.update = UpdateId(message.update());
  out.program = ProgramId(message.program());
  REFITD_RETURN_IF_ERROR(InRange(message.node(), 0, kMaxNodes - 1, "program.node"));
  out.node = message.node();
  REFITD_RETURN_IF_ERROR(
      InRange(message.chunk_bytes(), kSectionAlignment, kMaxTensorBytes, "program.chunk_bytes"));
  out.chunk_bytes = message.chunk_bytes();
  REFITD_ASSIGN_OR_RETURN(out.sources,
                          MembersOf(message.sources(), message.source_ranks(), "program.sources"));
  REFITD_ASSIGN_OR_RETURN(
      out.destinations,
      MembersOf(message.destinations(), message.destination_ranks(), "program.destinations"));
  program_ = std::move(out);
  return absl::OkStatus();
}

absl::Status ProgramDecoder::AddPlan(const v1::PeerPlan& message) {
  if (plan_ == nullptr) {
    plan_ = std::make_shared<RoutePlan>();
    replicas_ = std::make_shared<std::vector<ReplicaShare>>();
    REFITD_RETURN_IF_ERROR(InRange(message.nodes(), 1, kMaxNodes, "program.plan.nodes"));
    plan_->nodes = message.nodes();
    REFITD_RETURN_IF_ERROR(
        AtMost(message.source_nodes_size(), kMaxTrainerRanks, "program.plan.source_nodes"));
    REFITD_RETURN_IF_ERROR(AtMost(message.destination_nodes_size(), kMaxEngineRanks,
                                  "program.plan.destination_nodes"));
    plan_->source_nodes.assign(message.source_nodes().begin(), message.source_nodes().end());
    plan_->source_digests.assign(message.source_digests().begin(), message.source_digests().end());
    plan_->destination_nodes.assign(message.destination_nodes().begin(),
                                    message.destination_nodes().end());
    plan_->destination_digests.assign(message.destination_digests().begin(),
                                      message.destination_digests().end());
    plan_->source_labels.resize(plan_->source_nodes.size());
    plan_->destination_labels.resize(plan_->destination_nodes.size());
    plan_->destination_skipped.resize(plan_->destination_nodes.size());
    REFITD_RETURN_IF_ERROR(
        InRange(message.longest_stream(), 0, INT64_MAX, "program.plan.longest_stream"));
    plan_->longest_stream = message.longest_stream();
    REFITD_RETURN_IF_ERROR(InRange(message.wire_bytes(), 0, INT64_MAX, "program.plan.wire_bytes"));
    plan_->wire_bytes = message.wire_bytes();
    // ValidatePlan checks these numbers when the plan is whole.
    plan_->relay = {message.relay_lag(), message.relay_longest(), message.relay_usual(),
                    message.relay_node_streams(), message.relay_node_bytes()};
  }
  REFITD_RETURN_IF_ERROR(AddTensors(message));
  REFITD_RETURN_IF_ERROR(AddSets(message));
  REFITD_RETURN_IF_ERROR(AddRoutes(message));
  return AddReplicas(message);
}

absl::Status ProgramDecoder::AddTensors(const v1::PeerPlan& message) {
  if (message.names_size() > 0 || message.dtypes_size() > 0 || message.shapes_size() > 0) {
    REFITD_RETURN_IF_ERROR(AddNamed(message));
  }
  REFITD_RETURN_IF_ERROR(SetDerived(message.derived_tensors(), message.derivations(),
                                    "program.plan", &plan_->tensors));
  for (const uint32_t tensor : message.derived_tensors()) {
    REFITD_RETURN_IF_ERROR(ValidateDerived(plan_->tensors[tensor]));
  }
  return absl::OkStatus();
}

absl::Status ProgramDecoder::AddNamed(const v1::PeerPlan& message) {
  REFITD_ASSIGN_OR_RETURN(
      std::vector<TensorSpec> tensors,
      CheckManifest(message.names(), message.dtypes(), message.shapes(), "program.plan",
                    kMaxTensorsPerLayout - static_cast<int64_t>(plan_->tensors.size())));
  for (TensorSpec& tensor : tensors) {
    if (!plan_->tensors.empty() && tensor.name <= plan_->tensors.back().name) {
      return Invalid("program.plan.names: '{}' is not after '{}'", tensor.name,
                     plan_->tensors.back().name);
    }
    plan_->tensors.push_back(std::move(tensor));
  }
  return absl::OkStatus();
}

absl::Status ProgramDecoder::AddSets(const v1::PeerPlan& message) {
  int at = 0;
  for (int i = 0; i < message.set_sizes_size(); ++i) {
    const int64_t size = message.set_sizes(i);
    REFITD_RETURN_IF_ERROR(
        InRange(size, 1, plan_->nodes, fmt::format("program.plan.set_sizes[{}]", i)));
    if (size > message.set_nodes_size() - at) {
      return Invalid("program.plan.set_nodes has {} entries, set {} ends at {}",
                     message.set_nodes_size(), i, at + size);
    }
    set_nodes_ += size;
    REFITD_RETURN_IF_ERROR(InRange(set_nodes_, 0, kMaxPlanSetNodes, "program.plan.set_nodes"));
    std::vector<uint32_t>& set = plan_->node_sets.emplace_back();
    for (int64_t n = 0; n < size; ++n, ++at) {
      const uint32_t node = message.set_nodes(at);
      REFITD_RETURN_IF_ERROR(Below(node, plan_->nodes, "set_nodes", at));
      // ValidatePlan finds a node that is twice in a chain.
      if (plan_->relay.lag == 0 && !set.empty() && node <= set.back()) {
        return Invalid("program.plan.set_nodes[{}] is {}, not ascending", at, node);
      }
      set.push_back(node);
    }
  }
  if (at != message.set_nodes_size()) {
    return Invalid("program.plan.set_nodes has {} entries, the sets have {}",
                   message.set_nodes_size(), at);
  }
  return absl::OkStatus();
}

absl::Status ProgramDecoder::AddRoutes(const v1::PeerPlan& message) {
  const int routes = message.route_tensors_size();
  if (message.route_sources_size() != routes || message.route_sets_size() != routes) {
    return Invalid("program.plan has {} route_tensors, {} route_sources, {} route_sets", routes,
                   message.route_sources_size(), message.route_sets_size());
  }
  REFITD_RETURN_IF_ERROR(AtMost(static_cast<int64_t>(plan_->routes.size()) + routes, kMaxRoutes,
                                "program.plan.route_tensors"));
  int at = 0;
  for (int i = 0; i < routes; ++i) {
    Route route;
    route.tensor = message.route_tensors(i);
    route.source = message.route_sources(i);
    route.node_set = message.route_sets(i);
    REFITD_RETURN_IF_ERROR(Below(route.tensor, plan_->tensors.size(), "route_tensors", i));
    REFITD_RETURN_IF_ERROR(Below(route.source, plan_->source_nodes.size(), "route_sources", i));
    REFITD_RETURN_IF_ERROR(Below(route.node_set, plan_->node_sets.size(), "route_sets", i));
    const auto numbers = static_cast<int>(2 * plan_->tensors[route.tensor].shape.size());
    if (numbers > message.route_boxes_size() - at) {
      return Invalid("program.plan.route_boxes has {} numbers, route {} ends at {}",
                     message.route_boxes_size(), i, at + numbers);
    }
    route.box = static_cast<uint32_t>(plan_->box_numbers.size());
    for (int n = 0; n < numbers; ++n) plan_->box_numbers.push_back(message.route_boxes(at++));
    plan_->routes.push_back(route);
  }
  if (at != message.route_boxes_size()) {
    return Invalid("program.plan.route_boxes has {} numbers, the routes have {}",
                   message.route_boxes_size(), at);
  }
  return absl::OkStatus();
}

absl::Status ProgramDecoder::AddReplicas(const v1::PeerPlan& message) {
  const int shares = message.replica_sources_size();
  if (message.replica_tensors_size() != shares) {
    return Invalid("program.plan has {} replica_sources, {} replica_tensors", shares,
                   message.replica_tensors_size());
  }
  REFITD_RETURN_IF_ERROR(AtMost(static_cast<int64_t>(replicas_->size()) + shares, kMaxReplicaShares,
                                "program.plan.replica_sources"));
  int at = 0;
  for (int i = 0; i < shares; ++i) {
    ReplicaShare share;
    share.source = message.replica_sources(i);
    share.tensor = message.replica_tensors(i);
    REFITD_RETURN_IF_ERROR(Below(share.source, plan_->source_nodes.size(), "replica_sources", i));
    REFITD_RETURN_IF_ERROR(Below(share.tensor, plan_->tensors.size(), "replica_tensors", i));
    const TensorSpec& tensor = plan_->tensors[share.tensor];
    const auto rank = static_cast<int>(tensor.shape.size());
    if (2 * rank > message.replica_boxes_size() - at) {
      return Invalid("program.plan.replica_boxes has {} numbers, replica {} ends at {}",
                     message.replica_boxes_size(), i, at + 2 * rank);
    }
    for (int d = 0; d < rank; ++d) share.box.offset.push_back(message.replica_boxes(at++));
    for (int d = 0; d < rank; ++d) share.box.extent.push_back(message.replica_boxes(at++));
    if (absl::Status status = ValidateBox(share.box, tensor.shape); !status.ok()) {
      return Invalid("program.plan.replica_boxes of '{}': {}", tensor.name, Message(status));
    }
    replicas_->push_back(std::move(share));
  }
  if (at != message.replica_boxes_size()) {
    return Invalid("program.plan.replica_boxes has {} numbers, the replicas have {}",
                   message.replica_boxes_size(), at);
  }
  return absl::OkStatus();
}

absl::Status ProgramDecoder::CheckWhole() const {
  if (absl::Status status = ValidatePlan(*plan_); !status.ok()) {
    return Invalid("program.plan: {}", Message(status));
  }
  if (program_->node >= plan_->nodes) {
    return Invalid("program.node is {}, the plan has {}", program_->node, plan_->nodes);
  }
  return absl::OkStatus();
}

}  // namespace refitd
