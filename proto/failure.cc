#include "proto/failure.h"

#include <algorithm>
#include <utility>

#include "transport/base/status.h"
#include "transport/base/utf8.h"

namespace refitd {
namespace {

constexpr char kTypeUrl[] = "type.googleapis.com/refitd.v1.Failure";
constexpr int kMaxDetails = 8;  // entries that are looked at; this release writes one

}  // namespace

void ToProto(const Failure& failure, v1::Failure* message) {
  REFITD_CHECK(message->ParseFromString(EncodeFailure(failure)));
}

absl::StatusOr<Failure> FailureFromProto(const v1::Failure& message) {
  return DecodeFailure(message.SerializeAsString());
}

std::string StatusText(const absl::Status& status) {
  return CleanText(Message(status), kMaxStatusTextBytes);
}

std::string StatusDetails(const absl::Status& status) {
  Failure failure = FailureOf(status);
  failure.ranks.clear();
  if (failure == Failure()) return "";
  v1::StatusDetails details;
  details.set_code(static_cast<int>(status.code()));
  details.set_message(StatusText(status));
  v1::StatusDetails::Detail* detail = details.add_details();
  detail->set_type_url(kTypeUrl);
  detail->set_value(EncodeFailure(failure));
  return details.SerializeAsString();
}

absl::Status WithStatusDetails(absl::Status status, std::string_view details) {
  if (status.ok() || details.empty() || details.size() > kMaxStatusDetailsBytes) return status;
  v1::StatusDetails message;
  if (!message.ParseFromArray(details.data(), static_cast<int>(details.size()))) return status;
  for (int i = 0; i < std::min(message.details_size(), kMaxDetails); ++i) {
    if (message.details(i).type_url() != kTypeUrl) continue;
    const absl::StatusOr<Failure> failure = DecodeFailure(message.details(i).value());
    if (failure.ok()) return WithFailure(std::move(status), *failure);
  }
  return status;
}

}  // namespace refitd
