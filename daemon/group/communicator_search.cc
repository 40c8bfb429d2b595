#include "daemon/group/communicator_search.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>
#include <vector>

#include "transport/base/status.h"

namespace refitd {
namespace {

using Instance = CommunicatorSearch::Instance;
using Instances = CommunicatorSearch::Instances;

template <typename Instances>
std::set<NodeId> DaemonsOf(const Instances& instances) {
  std::set<NodeId> daemons;
  for (const Instance& instance : instances) daemons.insert(instance.begin(), instance.end());
  return daemons;
}

bool Within(const Instance& instance, const std::set<NodeId>& daemons) {
  return std::includes(daemons.begin(), daemons.end(), instance.begin(), instance.end());
}

bool Meets(const Instance& instance, const std::set<NodeId>& daemons) {
  return std::any_of(instance.begin(), instance.end(),
                     [&daemons](NodeId daemon) { return daemons.contains(daemon); });
}

}  // namespace

void CommunicatorSearch::Restrict(const Instances& instances) {
  Instances known = Unproven(instances);
  ForgetIf([&known](const Instance& i) { return !known.contains(i); });
  for (const List& list : lists_) {
    for (const Instance& listed : list.instances) known.erase(listed);
  }
  // The next communicator tries the other instances, unless they need daemons that are left out.
  std::erase_if(known, [this, listed = Daemons()](const Instance& i) {
    return !Meets(i, listed) || HasCornered(i);
  });
  if (!known.empty()) lists_.push_back({std::move(known)});
  SplitFirst();
}

std::set<NodeId> CommunicatorSearch::LeftOut() const {
  std::set<NodeId> out = Daemons();
  if (!active() || lists_.front().at_fault) return out;
  for (const NodeId tried : DaemonsOf(lists_.front().instances)) out.erase(tried);
  return out;
}

void CommunicatorSearch::GiveUp() {
  lists_.clear();
  proven_.clear();
  doubted_.clear();
}

std::set<NodeId> CommunicatorSearch::Failed(const Instances& instances) {
  REFITD_CHECK(!instances.empty() && !instances.contains(Instance()));
  Instances tried = Unproven(instances);
  if (!active() || tried.empty()) {
    // The search begins anew, so no daemon counts as proven any more.
    GiveUp();
    tried = instances;
  }
  Drop([&tried](const Instance& i) { return tried.contains(i); });
  RemoveEmpty();
  // If a half fails while no daemon is proven, the other half counts as sound, which is right as
  // long as only one daemon is broken.
  for (List& list : lists_) list.of_fault &= !proven_.empty();
  lists_.push_front({tried, true});
  HalveFirst();
  // The update goes on with what is proven, or else, if the list was halved, with its first half.
  return !proven_.empty() || tried.size() == 1 ? Daemons() : LeftOut();
}

std::set<NodeId> CommunicatorSearch::CameUp(const std::set<NodeId>& daemons) {
  if (!active()) return {};
  proven_.insert(daemons.begin(), daemons.end());
  for (List& list : lists_) list.instances = Unproven(list.instances);
  doubted_ = Unproven(doubted_);
  Tidy();
  std::set<NodeId> broken;
  for (std::set<NodeId> more = Broken(); !more.empty(); more = Broken()) {
    Drop([&more](const Instance& i) { return Meets(i, more); });
    RemoveEmpty();
    broken.merge(more);
  }
  LetWait();
  if (!broken.empty()) JoinLists(/*halves=*/true);
  Tidy();
  if (active() && lists_.front().at_fault) HalveFirst();
  SplitFirst();
  return broken;
}

// Whether an instance that is not known to be at fault may prove some of this instance's daemons,
// and so show that the others are broken.
bool CommunicatorSearch::MustWait(const Instance& at_fault) const {
  if (at_fault.size() == 1) return false;
  return std::any_of(lists_.begin(), lists_.end(), [&at_fault](const List& list) {
    return !list.cornered() &&
           std::any_of(list.instances.begin(), list.instances.end(), [&](const Instance& i) {
             return Meets(i, at_fault) && !Within(at_fault, i);
           });
  });
}

// Puts instances alone at fault behind the others. What needs all daemons of one is at fault too.
void CommunicatorSearch::LetWait() {
  Instances waiting;
  for (List& list : lists_) {
    if (list.cornered()) waiting.merge(std::exchange(list, List()).instances);
  }
  Drop([&waiting](const Instance& i) {
    return std::any_of(waiting.begin(), waiting.end(),
                       [&i](const Instance& alone) { return Within(alone, i); });
  });
  RemoveEmpty();
  for (const Instance& alone : waiting) {
    lists_.push_back({.instances = {alone}, .at_fault = true, .aside = true});
  }
}

bool CommunicatorSearch::HasCornered(const std::set<NodeId>& daemons) const {
  return std::any_of(lists_.begin(), lists_.end(), [&daemons](const List& list) {
    return list.cornered() && Within(*list.instances.begin(), daemons);
  });
}

// A communicator of the first list would fail if it had all daemons of an instance alone at fault.
void CommunicatorSearch::SplitFirst() {
  while (active() && !lists_.front().at_fault && HasCornered(DaemonsOf(lists_.front().instances))) {
    List second = std::move(lists_.front());
    lists_.pop_front();
    List first = second;
    std::tie(first.instances, second.instances) = Halves(second.instances);
    first.half = false;
    lists_.push_front(std::move(second));
    lists_.push_front(std::move(first));
  }
}

std::set<NodeId> CommunicatorSearch::Broken() const {
  std::set<NodeId> broken;
  for (const List& list : lists_) {
    if (!list.cornered()) continue;
    const Instance& instance = *list.instances.begin();
    if (!MustWait(instance)) broken.insert(instance.begin(), instance.end());
  }
  return broken;
}

void CommunicatorSearch::Forget(NodeId daemon) {
  if (proven_.erase(daemon) > 0) {
    // A communicator failed with a list and the proven daemons: the forgotten daemon may have been
    // the cause, so it speaks against no list any more.
    for (List& list : lists_) list.at_fault = list.half = false;
  }
  ForgetIf([daemon](const Instance& i) { return i.contains(daemon); });
}

CommunicatorSearch::Instances CommunicatorSearch::Unproven(const Instances& instances) const {
  Instances unproven;
  for (Instance instance : instances) {
    std::erase_if(instance, [this](NodeId daemon) { return proven_.contains(daemon); });
    if (!instance.empty()) unproven.insert(std::move(instance));
  }
  return unproven;
}

bool CommunicatorSearch::Doubted(const Instance& instance) const {
  return std::any_of(doubted_.begin(), doubted_.end(),
                     [&instance](const Instance& d) { return Within(d, instance); });
}

std::set<NodeId> CommunicatorSearch::Daemons() const {
  std::set<NodeId> all;
  for (const List& list : lists_) all.merge(DaemonsOf(list.instances));
  return all;
}

void CommunicatorSearch::Drop(const std::function<bool(const Instance&)>& gone) {
  List* before = nullptr;
  for (List& list : lists_) {
    if (std::erase_if(list.instances, gone) > 0) {
      // An instance that is taken off may be the one at fault.
      list.at_fault = list.half = false;
      if (before != nullptr) before->half = false;
    }
    before = &list;
  }
}

void CommunicatorSearch::ForgetIf(const std::function<bool(const Instance&)>& gone) {
  Drop(gone);
  Tidy();
}

void CommunicatorSearch::RemoveEmpty() {
  bool next_at_fault = false;
  for (auto list = lists_.begin(); list != lists_.end();) {
    if (list->instances.empty()) {
      if (list != lists_.begin()) std::prev(list)->half = false;
      next_at_fault = list->half;
      list = lists_.erase(list);
      continue;
    }
    list->at_fault |= next_at_fault;
    next_at_fault = false;
    ++list;
  }
}

void CommunicatorSearch::Tidy() {
  RemoveEmpty();
  if (lists_.empty()) GiveUp();
  Check();
}

// Joins the lists that are tried next into one list, and puts it before the others. `halves`: also
// what is left of lists that were at fault.
void CommunicatorSearch::JoinLists(bool halves) {
  List all;
  std::deque<List> others;
  for (List& list : lists_) {
    if (list.aside || (list.of_fault && !halves)) {
      others.push_back(std::move(list));
    } else {
      all.instances.merge(list.instances);
    }
  }
  lists_ = std::move(others);
  if (!all.instances.empty()) lists_.push_front(std::move(all));
}

// Two halves of at least two instances. The first has every instance that its daemons suffice for,
// and never all.
std::pair<Instances, Instances> CommunicatorSearch::Halves(const Instances& whole) const {
  std::vector<Instance> order(whole.begin(), whole.end());
  const auto key = [this, doubted = DaemonsOf(doubted_)](const Instance& i) {
    return std::tuple(Doubted(i), Meets(i, doubted), i.size());
  };
  std::stable_sort(order.begin(), order.end(),
                   [&key](const Instance& a, const Instance& b) { return key(a) < key(b); });
  std::pair<Instances, Instances> halves;
  // The daemons of the first instance in this order suffice for no other.
  for (size_t count = (order.size() + 1) / 2; halves.second.empty(); count /= 2) {
    order.resize(count);
    const std::set<NodeId> daemons = DaemonsOf(order);
    halves.first.clear();
    for (const Instance& instance : whole) {
      (Within(instance, daemons) ? halves.first : halves.second).insert(instance);
    }
  }
  return halves;
}

// The first list is at fault. An instance that is alone in it waits for a communicator without it.
void CommunicatorSearch::HalveFirst() {
  if (lists_.front().instances.size() == 1) {
    if (proven_.empty()) return SetFirstAside();
    lists_.front().aside = true;
    return Check();
  }
  List first;
  List second;
  first.of_fault = second.of_fault = first.half = true;
  std::tie(first.instances, second.instances) = Halves(lists_.front().instances);
  lists_.pop_front();
  lists_.push_front(std::move(second));
  lists_.push_front(std::move(first));
  // Instances that are in no half are probably sound, so they are tried next, all together.
  if (!proven_.empty()) JoinLists(/*halves=*/false);
  Check();
}

// If no daemon is proven, the daemons that every update needs may be at fault, so the instance is
// set aside and tried again after the others, and with it those that need all of its daemons.
void CommunicatorSearch::SetFirstAside() {
  const Instance failed = *lists_.front().instances.begin();
  doubted_.insert(failed);
  const bool all = std::all_of(lists_.begin(), lists_.end(), [this](const List& list) {
    return std::all_of(list.instances.begin(), list.instances.end(),
                       [this](const Instance& i) { return Doubted(i); });
  });
  if (all) doubted_ = {failed};  // a new turn
  List aside;
  aside.aside = true;
  for (const List& list : lists_) {
    for (const Instance& instance : list.instances) {
      if (Within(failed, instance)) aside.instances.insert(instance);
    }
  }
  Drop([&failed](const Instance& i) { return Within(failed, i); });
  RemoveEmpty();
  JoinLists(/*halves=*/true);
  lists_.push_back(std::move(aside));
  Check();
}

void CommunicatorSearch::Check() const {
  for (const List& list : lists_) {
    REFITD_CHECK(!list.instances.empty());
    for (const Instance& i : list.instances) REFITD_CHECK(!i.empty() && !Meets(i, proven_));
  }
}

}  // namespace refitd
