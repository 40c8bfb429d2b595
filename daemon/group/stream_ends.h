// Compares the two ends of every stream of a compiled refit, as the nodes report them.
//
// A node reports all its streams at once; a stream that it does not list has digest 0. The two ends
// of a stream are compared when the second of them is reported, so that a report costs only its own
// length, whatever the number of nodes. An end that was not reported is not compared.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_STREAM_ENDS_H_
#define REFITD_DAEMON_GROUP_STREAM_ENDS_H_

#include <cstdint>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "daemon/group/peer.h"

namespace refitd {

class StreamEnds {
 public:
  // Takes a node's report in place of its earlier report. Nodes and peers have the plan's numbers.
  void Add(uint32_t node, const std::vector<PeerStream>& streams);
  // The node is lost: its report no longer counts.
  void Forget(uint32_t node);
  // The first stream, by sender and then receiver, whose reported ends differ.
  std::optional<std::pair<uint32_t, uint32_t>> FirstDifference() const;

  // How many ends were looked at so far, which tests use to check the cost.
  int64_t looked_at() const { return looked_at_; }

 private:
  struct Ends {
    uint64_t out = 0;
    uint64_t in = 0;
  };
  using PeerEnds = absl::flat_hash_map<uint32_t, Ends>;  // by peer

  void Compare(uint32_t node, const Ends& here, uint32_t peer, const PeerEnds& there);

  // These are hash tables because they are freed quickly: the end of an update, under the mutex,
  // waits for that.
  absl::flat_hash_map<uint32_t, PeerEnds> reported_;
  // By peer: the nodes that reported a stream to or from it.
  absl::flat_hash_map<uint32_t, absl::flat_hash_set<uint32_t>> named_by_;
  std::set<std::pair<uint32_t, uint32_t>> different_;  // sender, receiver
  int64_t looked_at_ = 0;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_STREAM_ENDS_H_
