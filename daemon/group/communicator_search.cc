#include "daemon/group/communicator_search.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "transport/base/status.h"

namespace refitd {

void CommunicatorSearch::Restrict(const std::set<NodeId>& daemons) {
  ForgetIf([&daemons](NodeId d) { return !daemons.contains(d); });
}

std::set<NodeId> CommunicatorSearch::LeftOut() const {
  std::set<NodeId> out;
  for (const List& list : lists_) {
    if (&list == &lists_.front() && !list.at_fault) continue;
    out.insert(list.daemons.begin(), list.daemons.end());
  }
  return out;
}

std::set<NodeId> CommunicatorSearch::Failed(const std::set<NodeId>& daemons) {
  REFITD_CHECK(!daemons.empty());
  std::set<NodeId> tried;
  std::set_difference(daemons.begin(), daemons.end(), proven_.begin(), proven_.end(),
                      std::inserter(tried, tried.end()));
  if (!active() || tried.empty()) {
    // The search begins anew, so no daemon counts as proven any more.
    lists_.clear();
    proven_.clear();
    tried = daemons;
  }
  for (List& list : lists_) {
    std::erase_if(list.daemons, [&tried](NodeId d) { return tried.contains(d); });
  }
  std::erase_if(lists_, [](const List& list) { return list.daemons.empty(); });
  // If a half fails while no daemon is proven, the other half counts as sound, which is right as
  // long as only one daemon is broken.
  for (List& list : lists_) list.of_fault &= !proven_.empty();
  lists_.push_front({tried, true, false});
  HalveFirst();
  std::set<NodeId> out = LeftOut();
  // The update goes on with what is proven, or else, if the list was halved, with its first half.
  if (!proven_.empty() || tried.size() == 1) {
    for (const List& list : lists_) out.insert(list.daemons.begin(), list.daemons.end());
  }
  return out;
}

std::set<NodeId> CommunicatorSearch::CameUp(const std::set<NodeId>& daemons) {
  if (!active()) return {};
  proven_.insert(daemons.begin(), daemons.end());
  for (List& list : lists_) {
    std::erase_if(list.daemons, [&daemons](NodeId d) { return daemons.contains(d); });
  }
  Tidy();
  std::set<NodeId> broken;
  while (active() && lists_.front().at_fault && lists_.front().daemons.size() == 1) {
    broken.insert(*lists_.front().daemons.begin());
    lists_.pop_front();
  }
  if (!broken.empty()) JoinLists(/*halves=*/true);
  Tidy();
  if (active() && lists_.front().at_fault) HalveFirst();
  return broken;
}

void CommunicatorSearch::Forget(NodeId daemon) {
  if (proven_.erase(daemon) > 0) {
    // A communicator failed with a list and the proven daemons: the forgotten daemon may have been
    // the cause, so it speaks against no list any more.
    for (List& list : lists_) list.at_fault = list.half = false;
  }
  ForgetIf([daemon](NodeId d) { return d == daemon; });
}

void CommunicatorSearch::ForgetIf(const std::function<bool(NodeId)>& gone) {
  List* before = nullptr;
  for (List& list : lists_) {
    if (std::erase_if(list.daemons, gone) > 0) {
      // A daemon that is forgotten may be the one at fault.
      list.at_fault = list.half = false;
      if (before != nullptr) before->half = false;
    }
    before = &list;
  }
  Tidy();
}

void CommunicatorSearch::Tidy() {
  bool next_at_fault = false;
  for (auto list = lists_.begin(); list != lists_.end();) {
    if (list->daemons.empty()) {
      next_at_fault = list->half;
      list = lists_.erase(list);
      continue;
    }
    list->at_fault |= next_at_fault;
    next_at_fault = false;
    ++list;
  }
  if (lists_.empty()) proven_.clear();
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
      all.daemons.insert(list.daemons.begin(), list.daemons.end());
    }
  }
  lists_ = std::move(others);
  if (!all.daemons.empty()) lists_.push_front(std::move(all));
}

// The first list is at fault. A daemon that is alone in it waits for a communicator without it. If
// no daemon is proven, the daemons that every update needs may be at fault instead, so the daemon
// is set aside and tried again after the others.
void CommunicatorSearch::HalveFirst() {
  List whole = std::move(lists_.front());
  lists_.pop_front();
  if (whole.daemons.size() > 1) {
    const auto middle =
        std::next(whole.daemons.begin(), static_cast<ptrdiff_t>((whole.daemons.size() + 1) / 2));
    List first{{whole.daemons.begin(), middle}};
    List second{{middle, whole.daemons.end()}};
    first.of_fault = second.of_fault = first.half = true;
    lists_.push_front(std::move(second));
    lists_.push_front(std::move(first));
    // Daemons that are in no half are probably sound, so they are tried next, all together.
    if (!proven_.empty()) JoinLists(/*halves=*/false);
  } else if (!proven_.empty()) {
    lists_.push_front(std::move(whole));
  } else {
    JoinLists(/*halves=*/true);
    whole.at_fault = false;
    whole.aside = true;
    lists_.push_back(std::move(whole));
  }
  Check();
}

void CommunicatorSearch::Check() const {
  std::set<NodeId> seen = proven_;
  for (const List& list : lists_) {
    REFITD_CHECK(!list.daemons.empty());
    for (const NodeId daemon : list.daemons) REFITD_CHECK(seen.insert(daemon).second);
  }
}

}  // namespace refitd
