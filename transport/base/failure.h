// Failure: what is known about an error beside its code and its text, as data. Programs decide by
// it; a status's message is for people and is never read back.
//
// A Failure travels as a payload of an absl::Status, so that absl::Status stays the type at every
// boundary, and between processes as a message refitd.v1.Failure. Both are the same bytes:
// EncodeFailure writes them and DecodeFailure reads them, in the wire format of Protocol Buffers,
// written out here because transport/ knows no messages. //proto:failure_test compares them with
// the generated code.
//
// Invariants
//  1. What EncodeFailure returns has at most kMaxFailureBytes, whatever the failure holds: so a
//     status with its details fits into gRPC's metadata (8 KiB). Names that do not fit are left
//     out; the counts say how many there were.
//  2. DecodeFailure reads all that EncodeFailure writes, and refuses the rest (P10): more than
//     kMaxFailureBytes, an entry beyond a limit, a text with control characters or no UTF-8.
//  3. Nothing of a failure comes out of a text that a caller gave.
//
// Pure; thread-safe.
#ifndef REFITD_TRANSPORT_BASE_FAILURE_H_
#define REFITD_TRANSPORT_BASE_FAILURE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/status.h"

namespace refitd {

inline constexpr size_t kMaxFailureBytes = 2048;
inline constexpr size_t kMaxSuspects = 8;         // named; more are counted
inline constexpr size_t kMaxDirtyInstances = 16;  // named; more are counted
inline constexpr size_t kMaxFailureRanks = 256;   // the ranks of a communicator
inline constexpr size_t kMaxSuspectNameBytes = 255;
inline constexpr size_t kMaxFailureTensorBytes = 512;
inline constexpr size_t kMaxFailureFieldBytes = 128;

// The numbers are those of v1::SuspectRole.
enum class SuspectRole : uint8_t {
  kUnspecified = 0,
  kTrainer = 1,  // a trainer rank
  kEngine = 2,   // an engine rank; without a rank: a whole instance
  kDaemon = 3,
  kOperator = 4,  // somebody who called service Operator
};

// Who is held to have caused a failure, or was waited for. Empty and absent fields are not known.
struct Suspect {
  SuspectRole role = SuspectRole::kUnspecified;
  std::string daemon;    // its id, else its address: of a member, the daemon that it is attached to
  std::string instance;  // an engine's
  std::optional<int> rank;
  int pid = 0;
  bool operator==(const Suspect&) const = default;
};

// What is known of weights in engines' memory: of one rank, or, in a failure, of all engines that
// the update would have written. The numbers are those of v1::Weights.
enum class Weights : uint8_t {
  kUnknown = 0,  // an outcome was not heard, or the failure is not of an update's end; the rank
                 // counts as dirty
  kClean = 1,    // every engine holds its version, or what was loaded if there is no version yet
  kDirty = 2,    // some engine was written in part, and holds no version until the next commit (P2)
  kPaused = 3,   // of one rank: Prepare came; not resumed yet
};

struct Failure {
  std::vector<Suspect> suspects;
  int64_t suspect_count = 0;  // at least suspects.size()
  Weights weights = Weights::kUnknown;
  std::vector<std::string> dirty_instances;
  int64_t dirty_count = 0;  // at least dirty_instances.size()
  std::string tensor;       // the first tensor that the failure is about
  std::string field;        // the field or argument that was refused
  std::optional<int64_t> version;
  // The same request may succeed when it is made again: what failed may pass.
  bool may_be_retried = false;
  // Ranks of a communicator that may be at fault, which the coordinator knows as daemons.
  // Ascending.
  std::vector<int> ranks;
  bool operator==(const Failure&) const = default;

  void Add(Suspect suspect);            // counts it, and names it if there is room
  void AddDirty(std::string instance);  // counts it, names it if there is room, and says kDirty
};

std::string EncodeFailure(const Failure& failure);
// INVALID_ARGUMENT: see invariant 2.
absl::StatusOr<Failure> DecodeFailure(std::string_view bytes);

// The failure that the status carries; an empty one if it carries none.
Failure FailureOf(const absl::Status& status);
// The status, which is not OK, with this failure instead of what it carried.
absl::Status WithFailure(absl::Status status, const Failure& failure);

// The status with one more thing known about it. A status that is OK stays as it is; what the
// failure says of a tensor or a field already stays, since the first place that knew it is closest.
absl::Status AboutTensor(absl::Status status, std::string_view tensor);
absl::Status AboutField(absl::Status status, std::string_view field);
absl::Status AboutSuspect(absl::Status status, Suspect suspect);
absl::Status AboutRanks(absl::Status status, std::vector<int> ranks);

// A status with another code or text, and the failure of `from`.
absl::Status WithFailureOf(const absl::Status& from, absl::Status status);

// The status with words before its message, and its failure: `Prefixed(status, "{}", name)` says
// "<name>: <message>".
template <typename... Args>
absl::Status Prefixed(const absl::Status& status, fmt::format_string<Args...> format,
                      Args&&... args) {
  return WithFailureOf(
      status, absl::Status(status.code(), fmt::format(format, std::forward<Args>(args)...) + ": " +
                                              std::string(status.message())));
}

}  // namespace refitd

#endif  // REFITD_TRANSPORT_BASE_FAILURE_H_
