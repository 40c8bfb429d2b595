// Conversions between wire messages and the values of transport/plan/layout.h, for daemon and
// clients alike.
//
// Pure. Decoding trusts nothing (P10): no number is used as a size, an offset or a loop bound
// before it was checked.
#ifndef REFITD_PROTO_CONVERT_H_
#define REFITD_PROTO_CONVERT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "refitd/v1/types.pb.h"
#include "transport/plan/derived.h"
#include "transport/plan/layout.h"
#include "transport/transport.h"

namespace refitd {

// The names of one layout's tensors together: DeepSeek-V3's take 3 MiB.
inline constexpr int64_t kMaxLayoutNameBytes = 32 << 20;

// Puts the LayoutChunks of a client stream together. Not thread-safe.
class LayoutDecoder {
 public:
  absl::Status Add(const v1::LayoutChunk& chunk);
  // About how much memory the layout takes so far. Names are coded, so a chunk may become a hundred
  // times larger.
  int64_t bytes() const { return bytes_; }
  // Returns the layout, whose tensors equal layouts share; ValidateLayout must still check it
  // against the regions.
  absl::StatusOr<Layout> Finish() &&;

 private:
  absl::Status AddTensors(const v1::LayoutChunk& chunk);
  absl::Status AddPieces(const v1::LayoutChunk& chunk);
  absl::Status AddDerived(const v1::LayoutChunk& chunk);
  absl::Status AddPushed(const v1::LayoutChunk& chunk);
  absl::Status AddTies(const v1::LayoutChunk& chunk);
  absl::Status AddBacks(const v1::LayoutChunk& chunk);

  std::vector<TensorSpec> tensors_;
  Layout layout_;  // without its tensors
  int64_t bytes_ = 0;
  int64_t name_bytes_ = 0;
  bool any_ = false;
  bool last_ = false;
};

// Splits a layout into chunks of about `chunk_bytes` at most, for RegisterLayout; the first carries
// the lease. Names are coded (LayoutChunk.name_middles), and a shape refers to a near tensor before
// it that has the same shape (shape_back).
std::vector<v1::LayoutChunk> EncodeLayout(const Layout& layout, const v1::Lease& lease,
                                          int64_t chunk_bytes);

absl::StatusOr<std::vector<TensorSpec>> CheckManifest(
    const google::protobuf::RepeatedPtrField<std::string>& names,
    const google::protobuf::RepeatedField<int>& dtypes,
    const google::protobuf::RepeatedPtrField<v1::Shape>& shapes, std::string_view field,
    int64_t max_tensors);

v1::Derivation ToProto(const Derivation& derivation);
// Sets TensorSpec::derived of tensors[indices[i]]; ValidateLayout must still check it. `field` is
// the message that holds the two lists. INVALID_ARGUMENT: lists of unequal lengths, indices that do
// not ascend, a tensor that is not there, a malformed derivation.
absl::Status SetDerived(const google::protobuf::RepeatedField<uint32_t>& indices,
                        const google::protobuf::RepeatedPtrField<v1::Derivation>& derivations,
                        std::string_view field, std::vector<TensorSpec>* tensors);

v1::Shape ToProto(const Dims& shape);
v1::DType ToProto(DType dtype);
v1::Verification ToProto(Verification verification);
// Returns nullopt for UNSPECIFIED; INVALID_ARGUMENT for an unknown number.
absl::StatusOr<std::optional<Verification>> VerificationFromProto(v1::Verification verification);
// kAuto becomes UNSPECIFIED.
v1::BroadcastMethod ToProto(BroadcastMethod method);
v1::BroadcastTotals BroadcastTotalsToProto(BroadcastMethod method, int64_t bytes, int64_t buckets);
// Returns INVALID_ARGUMENT for an unknown number.
absl::StatusOr<BroadcastMethod> BroadcastFromProto(v1::BroadcastMethod method);

}  // namespace refitd

#endif  // REFITD_PROTO_CONVERT_H_
