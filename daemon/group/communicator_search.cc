#include "daemon/group/communicator_search.h"

#include <algorithm>
#include <utility>

#include "transport/base/status.h"

namespace refitd {
namespace {

using Instance = CommunicatorSearch::Instance;
using Instances = CommunicatorSearch::Instances;
using Daemons = std::set<NodeId>;

Daemons DaemonsOf(const Instances& instances) {
  Daemons daemons;
  for (const Instance& instance : instances) daemons.insert(instance.begin(), instance.end());
  return daemons;
}

bool Within(const Daemons& some, const Daemons& all) {
  return std::includes(all.begin(), all.end(), some.begin(), some.end());
}

bool Meets(const Daemons& a, const Daemons& b) {
  return std::any_of(a.begin(), a.end(), [&b](NodeId daemon) { return b.contains(daemon); });
}

}  // namespace

void CommunicatorSearch::Restrict(const Instances& instances) {
  if (!active()) return;
  instances_ = Unproven(instances);
  Tidy();
}

std::set<NodeId> CommunicatorSearch::LeftOut() const { return Without(Tried(instances_)); }

void CommunicatorSearch::GiveUp() {
  instances_.clear();
  failed_.clear();
  proven_.clear();
}

std::set<NodeId> CommunicatorSearch::Failed(const Instances& instances) {
  REFITD_CHECK(!instances.empty() && !instances.contains(Instance()));
  Instances tried = Unproven(instances);
  if (!active() || tried.empty()) {
    // The search begins anew, so no daemon counts as proven any more.
    GiveUp();
    tried = instances;
  }
  instances_.insert(tried.begin(), tried.end());
  Daemons failed = DaemonsOf(tried);
  if (!WouldFail(failed)) {
    std::erase_if(failed_, [&failed](const Daemons& more) { return Within(failed, more); });
    failed_.push_back(std::move(failed));
  }
  Tidy();
  const Daemons out = Without(proven_.empty() ? Tried(tried) : Instances());
  const auto fails = [this](const Instance& i) { return WouldFail(i); };
  if (proven_.empty() && std::all_of(instances_.begin(), instances_.end(), fails)) failed_.clear();
  return out;
}

std::set<NodeId> CommunicatorSearch::CameUp(const std::set<NodeId>& daemons) {
  if (!active()) return {};
  proven_.insert(daemons.begin(), daemons.end());
  instances_ = Unproven(instances_);
  const Instances failed = Unproven({failed_.begin(), failed_.end()});
  failed_.assign(failed.begin(), failed.end());
  Daemons broken;
  for (const Daemons& set : failed_) {
    if (!Within(set, DaemonsOf(instances_))) continue;  // an instance of it is not there
    const bool all_fail = std::all_of(instances_.begin(), instances_.end(), [&](const Instance& i) {
      return !Meets(i, set) || WouldFail(i);
    });
    if (all_fail) broken.insert(set.begin(), set.end());
  }
  const auto meets = [&broken](const Daemons& some) { return Meets(some, broken); };
  std::erase_if(instances_, meets);
  std::erase_if(failed_, meets);
  Tidy();
  return broken;
}

void CommunicatorSearch::Forget(NodeId daemon) {
  const auto has = [daemon](const Daemons& some) { return some.contains(daemon); };
  // A communicator failed with a set and the proven daemons, so the forgotten daemon may have been
  // the cause.
  const bool proven = proven_.erase(daemon) > 0;
  std::erase_if(failed_, [&](const Daemons& set) { return proven || has(set); });
  std::erase_if(instances_, has);
  Tidy();
}

CommunicatorSearch::Instances CommunicatorSearch::Unproven(const Instances& instances) const {
  Instances unproven;
  for (Instance instance : instances) {
    std::erase_if(instance, [this](NodeId daemon) { return proven_.contains(daemon); });
    if (!instance.empty()) unproven.insert(std::move(instance));
  }
  return unproven;
}

bool CommunicatorSearch::WouldFail(const std::set<NodeId>& daemons) const {
  return std::any_of(failed_.begin(), failed_.end(),
                     [&daemons](const Daemons& set) { return Within(set, daemons); });
}

CommunicatorSearch::Instances CommunicatorSearch::Tried(const Instances& instances) const {
  Instances hopeful = instances;
  std::erase_if(hopeful, [this](const Instance& i) { return WouldFail(i); });
  Instances outside = hopeful;
  std::erase_if(outside, [this](const Instance& i) {
    return std::any_of(failed_.begin(), failed_.end(),
                       [&i](const Daemons& set) { return Meets(i, set); });
  });
  if (!outside.empty()) return outside;
  const Daemons all = DaemonsOf(hopeful);
  const Daemons* smallest = nullptr;
  for (const Daemons& set : failed_) {
    if (!Within(set, all) || (smallest != nullptr && smallest->size() <= set.size())) continue;
    smallest = &set;
  }
  return smallest == nullptr ? hopeful : Half(hopeful, *smallest);
}

// The instances of about half of the set's daemons, of which together no failed set is a part. The
// half has every instance that its daemons suffice for.
CommunicatorSearch::Instances CommunicatorSearch::Half(const Instances& instances,
                                                       const std::set<NodeId>& failed) const {
  std::vector<Instance> order(instances.begin(), instances.end());
  std::stable_sort(order.begin(), order.end(),
                   [](const Instance& a, const Instance& b) { return a.size() < b.size(); });
  Daemons half;
  size_t covered = 0;  // of `failed`
  for (const Instance& instance : order) {
    if (covered >= (failed.size() + 1) / 2) break;
    if (!Meets(instance, failed)) continue;
    Daemons more;
    for (const NodeId daemon : instance) {
      if (half.insert(daemon).second) more.insert(daemon);
    }
    if (WouldFail(half)) {
      for (const NodeId daemon : more) half.erase(daemon);
    } else {
      for (const NodeId daemon : more) covered += failed.contains(daemon) ? 1 : 0;
    }
  }
  Instances tried = instances;
  std::erase_if(tried, [&half](const Instance& i) { return !Within(i, half); });
  return tried;
}

std::set<NodeId> CommunicatorSearch::Without(const Instances& tried) const {
  Daemons out = DaemonsOf(instances_);
  for (const NodeId daemon : DaemonsOf(tried)) out.erase(daemon);
  return out;
}

void CommunicatorSearch::Tidy() {
  if (instances_.empty()) GiveUp();
  const auto sound = [this](const Daemons& some) { return !some.empty() && !Meets(some, proven_); };
  REFITD_CHECK(std::all_of(instances_.begin(), instances_.end(), sound));
  REFITD_CHECK(std::all_of(failed_.begin(), failed_.end(), sound));
}

}  // namespace refitd
