#include "daemon/group/worker_index.h"

#include <string>

#include "transport/base/status.h"

namespace refitd::worker {
namespace {

// A limit, since layouts are large and many engines may die while no update begins.
constexpr size_t kMaxLostLayouts = 16;

}  // namespace

void IndexCache::MemberLost(MemberId member, std::shared_ptr<const Layout> layout) {
  if (layout != nullptr && lost_.size() < kMaxLostLayouts) lost_.emplace(member, std::move(layout));
}

// The layouts of the command's destinations. The coordinator may have sent Prepare before it was
// sent the loss of a member: the plan counts on that member's layout until its instance is evicted.
IndexCache::Layouts IndexCache::LayoutsOf(const PeerPrepare& command) const {
  Layouts layouts;
  for (const MemberId member : command.destinations) {
    const auto lost = lost_.find(member);
    layouts.push_back(lost == lost_.end() ? layout_(member) : lost->second);
  }
  return layouts;
}

IndexCache::Layouts IndexCache::LayoutsToIndex(const PeerPrepare& command) const {
  Layouts layouts = LayoutsOf(command);
  if (index_ != nullptr && layouts_ == layouts) return {};
  return layouts;
}

absl::StatusOr<std::shared_ptr<const DestinationIndex>> IndexCache::MakeIndex(
    const std::vector<MemberId>& destinations, Layouts layouts) {
  std::vector<std::string> labels;
  labels.reserve(destinations.size());
  for (const MemberId member : destinations) labels.push_back(fmt::format("member {}", member));
  return DestinationIndex::Make(std::move(layouts), std::move(labels));
}

void IndexCache::Make(const PeerPrepare& command, Layouts layouts, const Output& out) {
  if (command.index != nullptr && command.index->destinations() == layouts) {
    index_ = command.index;
  } else {
    ++made_;
    absl::StatusOr<std::shared_ptr<const DestinationIndex>> index =
        MakeIndex(command.destinations, layouts);
    if (!index.ok()) {
      for (const MemberId member : command.destinations) {
        out.reports->push_back(EngineFailed{member, command.update, Message(index.status())});
      }
      index = DestinationIndex::Make({}, {});
    }
    index_ = *std::move(index);
  }
  layouts_ = std::move(layouts);
  digests_.clear();
  for (size_t d = 0; d < layouts_.size(); ++d) {
    const MemberId member = command.destinations[d];
    digests_.push_back(layouts_[d] == nullptr   ? 0
                       : lost_.contains(member) ? layouts_[d]->Digest()
                                                : digest_(member));
  }
}

std::shared_ptr<const DestinationIndex> IndexCache::Prepare(const PeerPrepare& command,
                                                            const Output& out) {
  Layouts layouts = LayoutsOf(command);
  if (index_ == nullptr || layouts_ != layouts) Make(command, std::move(layouts), out);
  for (size_t d = 0; d < command.destinations.size(); ++d) {
    const bool same = d < command.layout_digests.size() && command.layout_digests[d] == digests_[d];
    if (same || layouts_[d] == nullptr) continue;
    out.reports->push_back(EngineFailed{command.destinations[d], command.update,
                                        "its layout changed while the update was being prepared"});
  }
  lost_.clear();
  return index_;
}

void IndexCache::CheckInvariants() const {
  REFITD_CHECK(layouts_.size() == digests_.size());
  REFITD_CHECK(lost_.size() <= kMaxLostLayouts);
}

}  // namespace refitd::worker
