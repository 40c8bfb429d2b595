#include "proto/failure.h"

#include <catch2/catch.hpp>
#include <string>

#include "proto/grpc_status.h"
#include "transport/base/errors.h"
#include "transport/base/utf8.h"

namespace refitd {
namespace {

using absl::StatusCode;

Failure Everything() {
  Failure failure;
  failure.Add({SuspectRole::kEngine, "node-a", "blue", 3, 4711});
  failure.Add({SuspectRole::kDaemon, "node-b", "", std::nullopt, 0});
  failure.AddDirty("blue");
  failure.tensor = "model.w";
  failure.field = "bucket.names";
  failure.version = 7;
  failure.may_be_retried = true;
  failure.ranks = {0, 200, 255};
  return failure;
}

TEST_CASE("the bytes of a failure are those that Protocol Buffers write and read") {
  const Failure failure = Everything();
  v1::Failure message;
  ToProto(failure, &message);
  CHECK(message.suspects(0).role() == v1::SUSPECT_ROLE_ENGINE);
  CHECK(message.suspects(0).daemon() == "node-a");
  CHECK(message.suspects(0).instance() == "blue");
  CHECK(message.suspects(0).rank() == 3);
  CHECK(message.suspects(0).pid() == 4711);
  CHECK_FALSE(message.suspects(1).has_rank());
  CHECK(message.suspect_count() == 2);
  CHECK(message.weights() == v1::WEIGHTS_DIRTY);
  CHECK(message.dirty_instances(0) == "blue");
  CHECK(message.dirty_count() == 1);
  CHECK(message.tensor() == "model.w");
  CHECK(message.field() == "bucket.names");
  CHECK(message.version() == 7);
  CHECK(message.may_be_retried());
  CHECK(message.ranks(2) == 255);
  const absl::StatusOr<Failure> read = FailureFromProto(message);
  REQUIRE(read.ok());
  CHECK(*read == failure);
}

TEST_CASE("80 dirty instances of long names made a status that gRPC could not carry") {
  Failure failure;
  for (int i = 0; i < 80; ++i) {
    failure.AddDirty(std::string(128, 'a') + std::to_string(i));
    failure.Add({SuspectRole::kEngine, std::string(128, 'd'), std::string(128, 'i'), i, 1});
  }
  failure.tensor = std::string(4096, 't');
  const absl::Status status =
      WithFailure(absl::AbortedError(std::string(100'000, 'x') + " the end"), failure);
  const std::string details = StatusDetails(status);
  CHECK(details.size() <= kMaxStatusDetailsBytes);
  CHECK(StatusText(status).size() <= kMaxStatusTextBytes);
  CHECK(StatusText(status).ends_with(" the end"));
  const Failure read = FailureOf(WithStatusDetails(absl::AbortedError("lost"), details));
  CHECK(read.weights == Weights::kDirty);
  CHECK(read.dirty_count == 80);
  CHECK(read.suspect_count == 80);
  REQUIRE(!read.dirty_instances.empty());
  REQUIRE(!read.suspects.empty());
  CHECK(read.suspects[0].rank == 0);
}

TEST_CASE("a status without a failure has no details, and malformed details say nothing") {
  CHECK(StatusDetails(absl::AbortedError("lost")).empty());
  for (const std::string details : {"", "\xff\xff", "text", "\x1a\x02\x0a\x7f"}) {
    CHECK(FailureOf(WithStatusDetails(absl::AbortedError("lost"), details)) == Failure());
  }
  const std::string whole = StatusDetails(WithFailure(absl::AbortedError("lost"), Everything()));
  CHECK(FailureOf(WithStatusDetails(absl::AbortedError("lost"), whole)).tensor == "model.w");
  CHECK(FailureOf(WithStatusDetails(absl::AbortedError("lost"), whole + std::string(8192, '\0'))) ==
        Failure());
}

TEST_CASE("ranks of a communicator stay between daemons") {
  const std::string details = StatusDetails(WithFailure(absl::AbortedError("lost"), Everything()));
  CHECK(FailureOf(WithStatusDetails(absl::AbortedError("lost"), details)).ranks.empty());
}

TEST_CASE("a failure with an entry beyond a limit is refused") {
  v1::Failure message;
  message.set_tensor(std::string(kMaxFailureTensorBytes + 1, 't'));
  CHECK(FailureFromProto(message).status().code() == StatusCode::kInvalidArgument);
  message.set_tensor("a\x1b[2J");
  CHECK(FailureFromProto(message).status().code() == StatusCode::kInvalidArgument);
  message.Clear();
  for (size_t i = 0; i <= kMaxSuspects; ++i) message.add_suspects();
  CHECK(FailureFromProto(message).status().code() == StatusCode::kInvalidArgument);
  message.Clear();
  message.add_suspects()->set_rank(-1);
  CHECK(FailureFromProto(message).status().code() == StatusCode::kInvalidArgument);
  message.Clear();
  message.set_version(-1);
  CHECK(FailureFromProto(message).status().code() == StatusCode::kInvalidArgument);
}

TEST_CASE("words before a message leave the failure as it was") {
  const absl::Status status = AboutTensor(Precondition("it is late"), "w");
  const absl::Status told = Prefixed(Prefixed(status, "part {}", 3), "daemon {}", "b");
  CHECK(Message(told) == "daemon b: part 3: it is late");
  CHECK(FailureOf(told).tensor == "w");
  CHECK(FailureOf(AboutTensor(told, "v")).tensor == "w");
}

TEST_CASE("a caller's text is in no field of a failure") {
  const absl::Status status =
      absl::AbortedError("loader died (weights are whole): trainer rank 3, tensor 'w'");
  CHECK(FailureOf(status) == Failure());
  CHECK(FailureOf(AboutField(status, "reason")).weights == Weights::kUnknown);
}

TEST_CASE("names in a failure lose what a terminal would obey") {
  Failure failure;
  failure.tensor = "w\x1b]0;x\x07\xff";
  const absl::StatusOr<Failure> read = DecodeFailure(EncodeFailure(failure));
  REQUIRE(read.ok());
  CHECK(read->tensor == "w?]0;x??");
}

TEST_CASE("a long text is cut at its head, since its end says the outcome") {
  CHECK(CleanText("plain", 10) == "plain");
  CHECK(CleanText("a long text", 7) == "...text");
  CHECK(CleanText("\xC3\xA9\xC3\xA9\xC3\xA9", 5) == "...\xC3\xA9");
  CHECK(CleanText("a\xFF\xC3", 10) == "a??");
  CHECK(CleanText("abcd", 2) == "..");
}

TEST_CASE("control characters and marks of direction are written out") {
  CHECK(Escaped("plain \xC3\xA9") == "plain \xC3\xA9");
  CHECK(Escaped("a\x1b[31m\n\t\r\x7f") == "a\\u001b[31m\\n\\t\\r\\u007f");
  CHECK(Escaped("\xC2\x9B") == "\\u009b");
  CHECK(Escaped("a\xE2\x80\xAE"
                "b") == "a\\u202eb");
  CHECK(Escaped("\xE2\x81\xA6\xE2\x80\x8F\xD8\x9C") == "\\u2066\\u200f\\u061c");
  CHECK(Escaped("\xff") == "\\xff");
}

TEST_CASE("a status of gRPC without a text was printed as nothing") {
  const absl::Status other = FromGrpc({grpc::StatusCode::UNIMPLEMENTED, ""});
  CHECK(other.code() == absl::StatusCode::kUnimplemented);
  CHECK(other.message() == "UNIMPLEMENTED: this listener does not serve the method");
  CHECK(FromGrpc({grpc::StatusCode::UNAVAILABLE, ""}).message() == "UNAVAILABLE");
  CHECK(FromGrpc({grpc::StatusCode::UNAVAILABLE, "gone"}).message() == "gone");
}

}  // namespace
}  // namespace refitd
