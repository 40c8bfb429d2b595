// The index of the destinations of the last update that a daemon prepared, kept while their layouts
// stay the same, since making it takes as long as there are tensors in all of them.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_WORKER_INDEX_H_
#define REFITD_DAEMON_GROUP_WORKER_INDEX_H_

#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/group/worker_wire.h"

namespace refitd::worker {

class IndexCache {
 public:
  using Layouts = std::vector<std::shared_ptr<const Layout>>;
  // These functions give a member's layout, or null, and the digest of a layout that is not null.
  IndexCache(std::function<std::shared_ptr<const Layout>(MemberId)> layout,
             std::function<uint64_t(MemberId)> digest)
      : layout_(std::move(layout)), digest_(std::move(digest)) {}

  // As the functions of Worker with these names.
  void MemberLost(MemberId member, std::shared_ptr<const Layout> layout);
  Layouts LayoutsToIndex(const PeerPrepare& command) const;
  static absl::StatusOr<std::shared_ptr<const DestinationIndex>> MakeIndex(
      const std::vector<MemberId>& destinations, Layouts layouts);
  int64_t made() const { return made_; }

  // The index of the command's destinations. Reports those that can't take part: all of them, if
  // there is no such index, and those whose layout is another than the coordinator knows.
  std::shared_ptr<const DestinationIndex> Prepare(const PeerPrepare& command, const Output& out);

  void CheckInvariants() const;

 private:
  Layouts LayoutsOf(const PeerPrepare& command) const;
  void Make(const PeerPrepare& command, Layouts layouts, const Output& out);

  const std::function<std::shared_ptr<const Layout>(MemberId)> layout_;
  const std::function<uint64_t(MemberId)> digest_;
  std::map<MemberId, std::shared_ptr<const Layout>> lost_;  // since the last Prepare
  Layouts layouts_;                                         // of the index
  std::vector<uint64_t> digests_;
  std::shared_ptr<const DestinationIndex> index_;
  int64_t made_ = 0;
};

}  // namespace refitd::worker

#endif  // REFITD_DAEMON_GROUP_WORKER_INDEX_H_
