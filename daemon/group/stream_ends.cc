#include "daemon/group/stream_ends.h"

namespace refitd {

void StreamEnds::Add(uint32_t node, const std::vector<PeerStream>& streams) {
  Forget(node);
  PeerEnds& here = reported_[node];
  here.reserve(streams.size());
  for (const PeerStream& stream : streams) {
    // A node has no stream to itself.
    if (stream.peer != node) here[stream.peer] = {stream.out, stream.in};
  }
  for (const auto& [peer, ends] : here) {
    named_by_[peer].insert(node);
    if (const auto there = reported_.find(peer); there != reported_.end()) {
      Compare(node, ends, peer, there->second);
    }
  }
  // Compare streams that only the other end lists.
  const auto named = named_by_.find(node);
  if (named == named_by_.end()) return;
  for (const uint32_t peer : named->second) {
    if (!here.contains(peer)) Compare(node, Ends(), peer, reported_.at(peer));
  }
}

void StreamEnds::Compare(uint32_t node, const Ends& here, uint32_t peer, const PeerEnds& there) {
  ++looked_at_;
  const auto at = there.find(node);
  const Ends ends = at == there.end() ? Ends() : at->second;
  if (here.out != ends.in) different_.insert({node, peer});
  if (here.in != ends.out) different_.insert({peer, node});
}

void StreamEnds::Forget(uint32_t node) {
  const auto it = reported_.find(node);
  if (it == reported_.end()) return;
  for (const auto& [peer, ends] : it->second) {
    if (const auto named = named_by_.find(peer); named != named_by_.end()) {
      named->second.erase(node);
      if (named->second.empty()) named_by_.erase(named);
    }
  }
  reported_.erase(it);
  std::erase_if(different_,
                [node](const auto& ends) { return ends.first == node || ends.second == node; });
}

std::optional<std::pair<uint32_t, uint32_t>> StreamEnds::FirstDifference() const {
  if (different_.empty()) return std::nullopt;
  return *different_.begin();
}

}  // namespace refitd
