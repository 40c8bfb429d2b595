// Any bytes as a failure, as the details of a status, as a name and as a text: what is read is
// within its limits, is written as it was read, fits into gRPC's metadata with any text, and shows
// nothing that a terminal would obey (P10).
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "daemon/checks/bucket.h"
#include "daemon/checks/fields.h"
#include "proto/failure.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"
#include "transport/base/utf8.h"

namespace refitd {
namespace {

constexpr size_t kMaxMetadataBytes = 8192;

// What gRPC sends of a status: the message with most bytes as "%E2", the details in base64, and the
// names of both.
size_t MetadataBytes(const absl::Status& status) {
  return 3 * StatusText(status).size() + (StatusDetails(status).size() + 2) / 3 * 4 + 512;
}

void CheckHarmless(const Failure& failure) {
  for (const Suspect& suspect : failure.suspects) {
    REFITD_CHECK(IsHarmless(suspect.daemon) && IsHarmless(suspect.instance));
  }
  for (const std::string& name : failure.dirty_instances) REFITD_CHECK(IsHarmless(name));
  REFITD_CHECK(IsHarmless(failure.tensor) && IsHarmless(failure.field));
}

void FuzzFailure(std::string_view bytes) {
  const absl::StatusOr<Failure> failure = DecodeFailure(bytes);
  v1::Failure message;
  if (!failure.ok()) {
    REFITD_CHECK(failure.status().code() == absl::StatusCode::kInvalidArgument);
    return;
  }
  REFITD_CHECK(failure->suspects.size() <= kMaxSuspects);
  REFITD_CHECK(failure->dirty_instances.size() <= kMaxDirtyInstances);
  REFITD_CHECK(failure->ranks.size() <= kMaxFailureRanks);
  REFITD_CHECK(failure->suspect_count >= static_cast<int64_t>(failure->suspects.size()));
  CheckHarmless(*failure);
  const std::string encoded = EncodeFailure(*failure);
  REFITD_CHECK(encoded.size() <= kMaxFailureBytes);
  // What was read in at most kMaxFailureBytes is written again in full, unless the reader's bytes
  // were shorter than the canonical ones.
  const absl::StatusOr<Failure> again = DecodeFailure(encoded);
  REFITD_CHECK(again.ok() && EncodeFailure(*again) == encoded);
  REFITD_CHECK(message.ParseFromString(encoded));
  REFITD_CHECK(FailureFromProto(message).ok());
  const absl::Status status = WithFailure(absl::AbortedError(std::string(bytes)), *failure);
  REFITD_CHECK(MetadataBytes(status) <= kMaxMetadataBytes);
  const Failure told = FailureOf(WithStatusDetails(absl::AbortedError(""), StatusDetails(status)));
  REFITD_CHECK(told.weights == again->weights && told.tensor == again->tensor);
}

// A failure made of names of any kind, as the daemon makes it.
void FuzzNames(std::string_view text) {
  Failure failure;
  for (size_t i = 0; i < 40; ++i) {
    const std::string part(text.substr(i * text.size() / 40));
    failure.Add({SuspectRole::kEngine, part, part, static_cast<int>(i), 0});
    failure.AddDirty(part);
  }
  failure.tensor = failure.field = std::string(text);
  const absl::StatusOr<Failure> read = DecodeFailure(EncodeFailure(failure));
  REFITD_CHECK(read.ok() && read->dirty_count == 40);
  CheckHarmless(*read);
  REFITD_CHECK(MetadataBytes(WithFailure(absl::AbortedError(std::string(text)), failure)) <=
               kMaxMetadataBytes);
}

void FuzzText(std::string_view text) {
  for (const size_t most : {size_t{0}, size_t{2}, size_t{5}, size_t{64}}) {
    REFITD_CHECK(CleanText(text, most).size() <= most);
    REFITD_CHECK(Harmless(text, most).size() <= most && IsHarmless(Harmless(text, most)));
  }
  REFITD_CHECK(IsHarmless(Escaped(text)));
  REFITD_CHECK(Escaped(Escaped(text)) == Escaped(text));
  REFITD_CHECK(CleanText(CleanText(text, 64), 64) == CleanText(text, 64));
  if (!CheckLine(text, text.size(), "text").ok()) return;
  for (const char c : text) REFITD_CHECK(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f);
}

void FuzzName(std::string_view name) {
  if (!CheckName(name, "group").ok()) return;
  REFITD_CHECK(!name.empty() && name.size() <= 128);
  REFITD_CHECK(name != "." && name != ".." && name.front() != '-');
  REFITD_CHECK(Escaped(name) == name && name.find('/') == std::string_view::npos);
}

}  // namespace
}  // namespace refitd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  refitd::FuzzFailure(bytes);
  refitd::FuzzNames(bytes);
  refitd::FuzzText(bytes);
  refitd::FuzzName(bytes);
  (void)refitd::WithStatusDetails(absl::AbortedError(""), bytes);
  return 0;
}
