#include "daemon/node/calls.h"

#include <algorithm>
#include <utility>

#include "transport/base/status.h"

namespace refitd {

absl::Status Calls::Admit() const {
  if (calls_.size() < kMaxCalls) return absl::OkStatus();
  return Error(absl::StatusCode::kResourceExhausted, "{} calls are unanswered already",
               calls_.size());
}

void Calls::Add(CallId id, Call call) {
  REFITD_CHECK(call.reply != nullptr);
  REFITD_CHECK(!calls_.contains(id));
  calls_[id] = {std::move(call.group), std::move(call.reply)};
  if (call.bucket != nullptr) buckets_[id] = std::move(call.bucket);
  if (call.layout.has_value()) layouts_[id] = *std::move(call.layout);
}

std::optional<Calls::Call> Calls::Take(CallId id) {
  const auto it = calls_.find(id);
  if (it == calls_.end()) return std::nullopt;
  Call call;
  call.group = std::move(it->second.group);
  call.reply = std::move(it->second.reply);
  if (const auto layout = layouts_.find(id); layout != layouts_.end()) {
    call.layout = std::move(layout->second);
    layouts_.erase(layout);
  }
  buckets_.erase(id);
  calls_.erase(it);
  return call;
}

const std::string* Calls::GroupOf(CallId id) const {
  const auto it = calls_.find(id);
  return it == calls_.end() ? nullptr : &it->second.group;
}

std::vector<std::shared_ptr<const Layout>> Calls::LayoutsOf(MemberId member) const {
  std::vector<std::shared_ptr<const Layout>> layouts;
  for (const auto& [id, pending] : layouts_) {
    if (pending.member == member) layouts.push_back(pending.layout);
  }
  return layouts;
}

bool Calls::IsSource(RegionId region) const {
  return std::any_of(buckets_.begin(), buckets_.end(), [region](const auto& entry) {
    const CheckedBucket& bucket = *entry.second;
    return bucket.source == CheckedBucket::Source::kRegions &&
           std::any_of(bucket.places.begin(), bucket.places.end(),
                       [region](const auto& place) { return place.region == region; });
  });
}

absl::Status Calls::BeginOpening(CallId id, MemberId member, int64_t max_of_member) {
  const auto of_member = std::count_if(opening_.begin(), opening_.end(), [member](const auto& e) {
    return e.second.member == member;
  });
  if (of_member >= max_of_member || opening_.size() >= kMaxOpening) {
    return Error(absl::StatusCode::kResourceExhausted,
                 "{} calls of the member, {} of all, wait for memory already", of_member,
                 opening_.size());
  }
  REFITD_CHECK(opening_.emplace(id, Opening{member, false}).second);
  return absl::OkStatus();
}

absl::StatusOr<MemberId> Calls::OpeningOf(CallId id) const {
  const Opening& opening = opening_.at(id);
  if (opening.caller_left) return absl::CancelledError("the caller went away");
  return opening.member;
}

absl::Status Calls::EndOpening(CallId id) {
  const absl::Status wanted = OpeningOf(id).status();
  opening_.erase(id);
  return wanted;
}

void Calls::NoteCallerLeft(CallId id) {
  const auto it = opening_.find(id);
  if (it != opening_.end()) it->second.caller_left = true;
}

void Calls::CheckInvariants() const {
  REFITD_CHECK(calls_.size() <= kMaxCalls);
  REFITD_CHECK(opening_.size() <= kMaxOpening);
  for (const auto& [id, call] : calls_) {
    REFITD_CHECK(id != CallId());
    REFITD_CHECK(call.reply != nullptr && !call.group.empty());
    REFITD_CHECK(!opening_.contains(id));
  }
  for (const auto& [id, bucket] : buckets_) {
    REFITD_CHECK(calls_.contains(id));
    REFITD_CHECK(bucket != nullptr && bucket->ranges.size() == bucket->tensors.size());
  }
  for (const auto& [id, pending] : layouts_) {
    REFITD_CHECK(calls_.contains(id));
    REFITD_CHECK(pending.layout != nullptr && pending.member != MemberId());
  }
}

}  // namespace refitd
