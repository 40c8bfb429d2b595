#include <algorithm>
#include <chrono>
#include <map>
#include <string>
#include <utility>

#include "daemon/checks/bucket.h"
#include "daemon/checks/fields.h"
#include "daemon/link/hello.h"
#include "daemon/link/trainer_messages.h"
#include "daemon/node/operators.h"
#include "daemon/services/common.h"
#include "daemon/services/services.h"
#include "daemon/services/status.h"
#include "daemon/sockets/name_lookup.h"
#include "refitd/v1/operator.grpc.pb.h"

namespace refitd {
namespace {

const std::string& GroupOf(const v1::GroupStatus& group) { return group.name(); }
const std::string& GroupOf(const v1::MemberStatus& member) { return member.group(); }

// Leaves out the groups that the caller may not see, or their members.
template <typename Element>
void KeepShown(const Authorizer& authorizer, const Peer& peer, Rpc rpc,
               google::protobuf::RepeatedPtrField<Element>* all) {
  std::map<std::string, bool> shown;
  const auto hidden = [&](const Element& element) {
    const auto [it, added] = shown.try_emplace(GroupOf(element), false);
    if (added) it->second = authorizer.Shows(peer, rpc, it->first);
    return !it->second;
  };
  all->erase(std::remove_if(all->begin(), all->end(), hidden), all->end());
}

v1::UpdateStatus UpdateStatusOf(const UpdateNews& news) { return ToProto(news.group, news.update); }

// One caller that watches updates.
class WatchReactor final : public WatchReactorBase<v1::UpdateStatus> {
 public:
  using Sink = StreamSink<UpdateNews, UpdateStatusOf, Stream>;

  WatchReactor(Daemon* daemon, grpc::CallbackServerContext* context,
               const absl::StatusOr<Peer>& peer, const v1::WatchUpdatesRequest& request)
      : WatchReactorBase(context), daemon_(daemon) {
    absl::Status admitted = peer.status();
    // The caller must learn that it is watching before anything changes.
    StartSendInitialMetadata();
    if (admitted.ok()) {
      absl::StatusOr<uint64_t> watch = Watch(*peer, request);
      admitted = watch.status();
      if (watch.ok()) watch_ = *watch;
    }
    if (!admitted.ok()) stream()->End(admitted);
  }

 private:
  absl::StatusOr<uint64_t> Watch(const Peer& peer, const v1::WatchUpdatesRequest& request) {
    REFITD_ASSIGN_OR_RETURN(WatchFilter filter, FilterOf(request));
    filter.identity = IdentityOf(peer);
    return daemon_->operators().Watch(std::move(filter), std::make_shared<Sink>(stream()));
  }
  void Stop() override { daemon_->operators().StopWatching(watch_); }

  Daemon* const daemon_;
  uint64_t watch_ = 0;  // 0: not watching
};

absl::StatusOr<v1::CreateGroupResponse> CreateGroupOf(Daemon* daemon,
                                                      const v1::CreateGroupRequest& request,
                                                      const std::string& identity) {
  REFITD_RETURN_IF_ERROR(CheckName(request.group(), "group"));
  REFITD_RETURN_IF_ERROR(CheckLine(request.request_id(), kMaxRequestIdBytes, "request_id"));
  REFITD_ASSIGN_OR_RETURN(
      const Operators::Created made,
      daemon->operators().CreateGroup(request.group(), SpecOf(request.spec()), request.replace(),
                                      request.request_id(), identity));
  v1::CreateGroupResponse response;
  response.set_incarnation(made.incarnation);
  response.set_created(made.created);
  return response;
}

// Thread-safe.
class OperatorService final : public v1::Operator::CallbackService {
 public:
  OperatorService(Daemon* daemon, const Authorizer* authorizer)
      : daemon_(daemon), authorizer_(authorizer) {}

  grpc::ServerUnaryReactor* CreateGroup(grpc::CallbackServerContext* context,
                                        const v1::CreateGroupRequest* request,
                                        v1::CreateGroupResponse* response) noexcept override {
    const Rpc rpc = request->replace() ? Rpc::kOperatorReplaceGroup : Rpc::kOperatorCreateGroup;
    return AnswerNow(
        *authorizer_, context, {rpc, request->group(), request->request_id()}, response,
        [&](const Peer& peer) { return CreateGroupOf(daemon_, *request, IdentityOf(peer)); });
  }

  grpc::ServerUnaryReactor* DeleteGroup(grpc::CallbackServerContext* context,
                                        const v1::DeleteGroupRequest* request,
                                        v1::DeleteGroupResponse* response) noexcept override {
    return AnswerNow(*authorizer_, context, {Rpc::kOperatorDeleteGroup, request->group()}, response,
                     [&](const Peer&) -> absl::StatusOr<v1::DeleteGroupResponse> {
                       if (absl::Status status = daemon_->operators().DeleteGroup(request->group());
                           !status.ok()) {
                         return status;
                       }
                       return v1::DeleteGroupResponse();
                     });
  }

  grpc::ServerUnaryReactor* AbortUpdate(grpc::CallbackServerContext* context,
                                        const v1::AbortUpdateRequest* request,
                                        v1::AbortUpdateResponse* /*response*/) noexcept override {
    return AnswerLater(
        daemon_, *authorizer_, context, {Rpc::kOperatorAbortUpdate, request->group()},
        [&](CallId call, const Peer& /*peer*/, ReplyFunction reply) {
          const absl::Status line = CheckLine(request->reason(), kMaxReasonBytes, "reason");
          if (!line.ok()) return reply(line, EmptyReply{});
          daemon_->operators().Ask(call, request->group(), OperatorAbort{call, request->reason()},
                                   std::move(reply));
        },
        [](const ReplyPayload&) {});
  }

  grpc::ServerUnaryReactor* Rollback(grpc::CallbackServerContext* context,
                                     const v1::RollbackRequest* request,
                                     v1::RollbackResponse* response) noexcept override {
    return AnswerLater(
        daemon_, *authorizer_, context, {Rpc::kOperatorRollback, request->group()},
        [&](CallId call, const Peer& /*peer*/, ReplyFunction reply) {
          RollbackEvent event{.call = call, .member = {}, .request_id = ""};
          if (request->has_version()) event.version = Version(request->version());
          daemon_->operators().Ask(call, request->group(), event, std::move(reply));
        },
        [response](const ReplyPayload& payload) {
          const auto& done = PayloadAs<CommitReply>(payload);
          response->set_version(done.version.value());
          response->set_content_version(done.content.value_or(done.version).value());
          response->set_seconds(std::chrono::duration<double>(done.elapsed).count());
          for (const InstanceOutcome& outcome : done.instances) {
            Fill(outcome, response->add_instances());
          }
        });
  }

  grpc::ServerUnaryReactor* ReleasePrevious(
      grpc::CallbackServerContext* context, const v1::ReleasePreviousRequest* request,
      v1::ReleasePreviousResponse* /*response*/) noexcept override {
    return AnswerLater(
        daemon_, *authorizer_, context, {Rpc::kOperatorReleasePrevious, request->group()},
        [&](CallId call, const Peer& /*peer*/, ReplyFunction reply) {
          daemon_->operators().Ask(call, request->group(), ReleasePreviousEvent{call, {}},
                                   std::move(reply));
        },
        [](const ReplyPayload&) {});
  }

  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context,
                                  const v1::DrainRequest* request,
                                  v1::DrainResponse* response) noexcept override {
    return AnswerNow(*authorizer_, context, {Rpc::kOperatorDrain, request->group()}, response,
                     [&](const Peer&) -> absl::StatusOr<v1::DrainResponse> {
                       REFITD_ASSIGN_OR_RETURN(const Operators::DrainedGroups done,
                                               daemon_->operators().Drain(request->group()));
                       v1::DrainResponse drained;
                       drained.mutable_drained()->Add(done.drained.begin(), done.drained.end());
                       drained.mutable_running()->Add(done.running.begin(), done.running.end());
                       return drained;
                     });
  }

  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* context,
                                      const v1::GetStatusRequest* /*request*/,
                                      v1::GetStatusResponse* response) noexcept override {
    constexpr Rpc kRpc = Rpc::kOperatorGetStatus;
    return AnswerNow(*authorizer_, context, {kRpc}, response,
                     [&](const Peer& peer) -> absl::StatusOr<v1::GetStatusResponse> {
                       v1::GetStatusResponse status = StatusOf(daemon_);
                       ShowMoved(daemon_, &names_, status.mutable_groups());
                       KeepShown(*authorizer_, peer, kRpc, status.mutable_groups());
                       return status;
                     });
  }

  grpc::ServerUnaryReactor* ListGroups(grpc::CallbackServerContext* context,
                                       const v1::ListGroupsRequest* /*request*/,
                                       v1::ListGroupsResponse* response) noexcept override {
    constexpr Rpc kRpc = Rpc::kOperatorListGroups;
    return AnswerNow(*authorizer_, context, {kRpc}, response,
                     [&](const Peer& peer) -> absl::StatusOr<v1::ListGroupsResponse> {
                       v1::ListGroupsResponse list = refitd::ListGroups(daemon_);
                       ShowMoved(daemon_, &names_, list.mutable_groups());
                       KeepShown(*authorizer_, peer, kRpc, list.mutable_groups());
                       return list;
                     });
  }

  grpc::ServerUnaryReactor* GetGroup(grpc::CallbackServerContext* context,
                                     const v1::GetGroupRequest* request,
                                     v1::GetGroupResponse* response) noexcept override {
    return AnswerNow(*authorizer_, context, {Rpc::kOperatorGetGroup, request->group()}, response,
                     [&](const Peer&) { return refitd::GetGroup(daemon_, *request); });
  }

  grpc::ServerUnaryReactor* ListMembers(grpc::CallbackServerContext* context,
                                        const v1::ListMembersRequest* request,
                                        v1::ListMembersResponse* response) noexcept override {
    constexpr Rpc kRpc = Rpc::kOperatorListMembers;
    return AnswerNow(*authorizer_, context, {kRpc, request->group()}, response,
                     [&](const Peer& peer) -> absl::StatusOr<v1::ListMembersResponse> {
                       REFITD_ASSIGN_OR_RETURN(v1::ListMembersResponse list,
                                               refitd::ListMembers(daemon_, *request));
                       KeepShown(*authorizer_, peer, kRpc, list.mutable_members());
                       return list;
                     });
  }

  grpc::ServerUnaryReactor* GetUpdateStatistics(
      grpc::CallbackServerContext* context, const v1::GetUpdateStatisticsRequest* request,
      v1::GetUpdateStatisticsResponse* response) noexcept override {
    return AnswerNow(*authorizer_, context, {Rpc::kOperatorGetUpdateStatistics, request->group()},
                     response,
                     [&](const Peer&) { return refitd::GetUpdateStatistics(daemon_, *request); });
  }

  grpc::ServerUnaryReactor* CheckAccess(grpc::CallbackServerContext* context,
                                        const v1::CheckAccessRequest* request,
                                        v1::CheckAccessResponse* response) noexcept override {
    return AnswerNow(*authorizer_, context, {Rpc::kOperatorCheckAccess, request->group()}, response,
                     [&](const Peer&) { return authorizer_->CheckAccess(*request); });
  }

  grpc::ServerWriteReactor<v1::UpdateStatus>* WatchUpdates(
      grpc::CallbackServerContext* context,
      const v1::WatchUpdatesRequest* request) noexcept override {
    return new WatchReactor(
        daemon_, context,
        authorizer_->Admit(*context, {Rpc::kOperatorWatchUpdates, request->group()}), *request);
  }

 private:
  Daemon* const daemon_;
  const Authorizer* const authorizer_;
  NameLookup names_;
};

static_assert(AreNoexcept(&OperatorService::CreateGroup, &OperatorService::DeleteGroup,
                          &OperatorService::AbortUpdate, &OperatorService::Rollback,
                          &OperatorService::ReleasePrevious, &OperatorService::Drain,
                          &OperatorService::GetStatus, &OperatorService::ListGroups,
                          &OperatorService::GetGroup, &OperatorService::ListMembers,
                          &OperatorService::GetUpdateStatistics, &OperatorService::CheckAccess,
                          &OperatorService::WatchUpdates));

}  // namespace

std::unique_ptr<grpc::Service> MakeOperatorService(Daemon* daemon, const Authorizer* authorizer) {
  return std::make_unique<OperatorService>(daemon, authorizer);
}

}  // namespace refitd
