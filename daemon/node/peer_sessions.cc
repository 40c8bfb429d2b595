#include "daemon/node/peer_sessions.h"

#include <algorithm>
#include <set>

#include "transport/base/status.h"

namespace refitd {

absl::Status PeerSessions::CheckLatest(const PeerGreeting& hello) const {
  const auto later = [&hello](const std::string& group, const std::string& boot_id, uint64_t dial) {
    return dial > hello.dial && group == hello.group && boot_id == hello.boot_id;
  };
  const bool waits = std::any_of(waiting_.begin(), waiting_.end(), [&later](const Waiting& peer) {
    return later(peer.hello.group, peer.hello.boot_id, peer.hello.dial);
  });
  const bool joined = std::any_of(joined_.begin(), joined_.end(), [&later](const auto& each) {
    return later(each.second.group, each.second.boot_id, each.second.dial);
  });
  if (!waits && !joined) return absl::OkStatus();
  return Error(absl::StatusCode::kAborted, "dial {}: daemon {} has dialled anew since", hello.dial,
               hello.daemon_id);
}

absl::Status PeerSessions::AdmitWaiting() const {
  if (waiting_.size() < kMaxWaiting) return absl::OkStatus();
  return Error(absl::StatusCode::kResourceExhausted, "{} daemons wait for groups already",
               waiting_.size());
}

void PeerSessions::ForgetEarlier(const Waiting& peer) {
  std::erase_if(waiting_, [&peer](const Waiting& earlier) {
    if (earlier.hello.group != peer.hello.group || earlier.hello.boot_id != peer.hello.boot_id) {
      return false;
    }
    earlier.session->End(absl::AbortedError("the daemon joins anew"));
    return true;
  });
}

std::vector<PeerSessions::Waiting> PeerSessions::TakeWaiting(const std::string& group) {
  std::vector<Waiting> taken;
  std::vector<Waiting> kept;
  for (Waiting& peer : waiting_) {
    (peer.hello.group == group ? taken : kept).push_back(std::move(peer));
  }
  waiting_ = std::move(kept);
  return taken;
}

void PeerSessions::RefuseLate(TimePoint now) {
  std::erase_if(waiting_, [now](const Waiting& peer) {
    if (peer.deadline > now) return false;
    peer.session->End(
        Error(absl::StatusCode::kNotFound, "group '{}' was not created in time", peer.hello.group));
    return true;
  });
}

void PeerSessions::RefuseAllWaiting(const absl::Status& status) {
  for (const Waiting& peer : waiting_) peer.session->End(status);
  waiting_.clear();
}

std::optional<TimePoint> PeerSessions::NextDeadline() const {
  std::optional<TimePoint> next;
  for (const Waiting& peer : waiting_) next = std::min(next.value_or(peer.deadline), peer.deadline);
  return next;
}

NodeId PeerSessions::Join(const PeerGreeting& hello, std::shared_ptr<PeerSession> session) {
  const NodeId node(next_++);
  Joined joined{hello.group, node, hello.boot_id, hello.dial};
  REFITD_CHECK(joined_.emplace(session->id(), std::move(joined)).second);
  sessions_[hello.group][node] = std::move(session);
  return node;
}

std::optional<PeerSessions::Joined> PeerSessions::Find(uint64_t session) const {
  const auto it = joined_.find(session);
  if (it == joined_.end()) return std::nullopt;
  return it->second;
}

std::shared_ptr<PeerSession> PeerSessions::SessionOf(const std::string& group, NodeId node) const {
  const auto sessions = sessions_.find(group);
  if (sessions == sessions_.end()) return nullptr;
  const auto it = sessions->second.find(node);
  return it == sessions->second.end() ? nullptr : it->second;
}

bool PeerSessions::Any(const std::string& group) const { return sessions_.contains(group); }

void PeerSessions::End(const std::string& group, NodeId node, const absl::Status& status) {
  const std::shared_ptr<PeerSession> session = SessionOf(group, node);
  if (session == nullptr) return;
  Remove(session->id());
  session->End(status);
}

void PeerSessions::EndGroup(const std::string& group, const absl::Status& status) {
  while (Any(group)) End(group, sessions_.at(group).begin()->first, status);
}

std::optional<PeerSessions::Joined> PeerSessions::Remove(uint64_t session) {
  std::erase_if(waiting_, [session](const Waiting& peer) { return peer.session->id() == session; });
  const auto it = joined_.find(session);
  if (it == joined_.end()) return std::nullopt;
  Joined joined = std::move(it->second);
  joined_.erase(it);
  Sessions& sessions = sessions_.at(joined.group);
  REFITD_CHECK(sessions.erase(joined.node) == 1);
  if (sessions.empty()) sessions_.erase(joined.group);
  return joined;
}

void PeerSessions::EndAll(const absl::Status& status) {
  const std::map<std::string, Sessions> all = std::exchange(sessions_, {});
  joined_.clear();
  for (const auto& [group, sessions] : all) {
    for (const auto& [node, session] : sessions) session->End(status);
  }
  RefuseAllWaiting(status);
}

void PeerSessions::CheckInvariants() const {
  REFITD_CHECK(waiting_.size() <= kMaxWaiting);
  for (const Waiting& peer : waiting_) {
    REFITD_CHECK(peer.session != nullptr && !joined_.contains(peer.session->id()));
  }
  size_t sessions = 0;
  std::set<NodeId> nodes;
  for (const auto& [group, of_group] : sessions_) {
    REFITD_CHECK(!of_group.empty());
    for (const auto& [node, session] : of_group) {
      REFITD_CHECK(node.value() < next_ && nodes.insert(node).second);
      const auto joined = joined_.find(session->id());
      REFITD_CHECK(joined != joined_.end());
      REFITD_CHECK(joined->second.group == group && joined->second.node == node);
      ++sessions;
    }
  }
  REFITD_CHECK(sessions == joined_.size());
}

}  // namespace refitd
