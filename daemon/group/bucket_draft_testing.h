// A bucket as tests make it: it can be changed until it is pushed.
#ifndef REFITD_DAEMON_GROUP_BUCKET_DRAFT_TESTING_H_
#define REFITD_DAEMON_GROUP_BUCKET_DRAFT_TESTING_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/group/bucket.h"
#include "daemon/group/group.h"

namespace refitd {

struct BucketDraft : CheckedBucket {
  CallId call;
  MemberId member;
  std::string request_id;
  Version version;
  UpdateId update{};

  void Add(TensorSpec tensor, int64_t start, int64_t count) {
    ranges.push_back({static_cast<uint32_t>(tensors.size()), start, count});
    tensors.push_back(std::move(tensor));
  }
  void LieIn(SlotGrant grant, const std::vector<int64_t>& offsets) {
    source = Source::kSlot;
    slot = grant;
    places.clear();
    for (const int64_t offset : offsets) places.push_back({.byte_offset = offset});
  }
  operator BucketEvent() const {  // NOLINT(google-explicit-constructor)
    CheckedBucket checked = *this;
    checked.bytes = 0;
    for (const TensorRange& range : ranges) checked.bytes += checked.BytesOf(range);
    return {call,
            member,
            request_id,
            version,
            std::make_shared<const CheckedBucket>(std::move(checked)),
            update};
  }
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_BUCKET_DRAFT_TESTING_H_
