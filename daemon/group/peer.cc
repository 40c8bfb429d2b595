#include "daemon/group/peer.h"

namespace refitd {

uint64_t HeaderDigest(const BucketHeader& header) {
  HashChain chain(header.update.value());
  const auto add = [&chain](auto number) { chain.Add(static_cast<uint64_t>(number)); };
  add(header.version.value());
  add(header.part.value());
  add(header.group_seq);
  add(header.root.value());
  const PartContent& content = *header.content;
  add(content.tensors.size());
  for (const TensorSpec& tensor : content.tensors) add(TensorHash(tensor));
  add(content.ranges.size());
  for (const TensorRange& range : content.ranges) {
    add(range.tensor);
    add(range.start);
    add(range.count);
  }
  add(content.byte_offsets.size());
  for (const int64_t offset : content.byte_offsets) add(offset);
  add(content.bytes);
  add(header.slot.has_value());
  if (header.slot.has_value()) {
    add(header.slot->slot.value());
    add(header.slot->grant.value());
  }
  add(header.leased);
  add(header.verification);
  return chain.hash();
}

}  // namespace refitd
