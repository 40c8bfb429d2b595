// Updates of a group as spans, made of the operator API's messages.
//
// A span is there only if the daemon recorded when it began: phases begin where the update's state
// was seen to change; buckets, daemons and links have a duration and no beginning, so each stands
// at the begin of its update's data phase (kNotRecorded).
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_TRACE_UPDATE_TRACE_H_
#define REFITD_DAEMON_TRACE_UPDATE_TRACE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "refitd/v1/operator.pb.h"

namespace refitd {

bool HasEnded(const v1::UpdateStatus& update);

// The text tells people what the spans do not show.
inline constexpr std::string_view kNotRecorded =
    "phases of an update that was not watched; when a bucket began (the buckets of a rank stand "
    "one after the other, in the order in which they ended); when a daemon or a link began and "
    "paused (each stands at the begin of the data phase; a link takes its sender's time); times of "
    "single ranks, and pauses of engines that were not committed; sends of pushes";

struct UpdateSpan {
  enum class Kind : uint8_t { kUpdate, kPhase, kBucket, kDaemon, kLink, kPause };
  using Attribute = std::pair<std::string, std::variant<std::string, int64_t, double>>;

  Kind kind = Kind::kUpdate;
  // The span is of this trainer's rank, daemon's id, link ("a to b") or instance; empty: of the
  // update itself.
  std::string of;
  std::string name;  // a phase's state; a bucket's number among those of its rank; else empty
  double begin = 0;  // in seconds, by the clock of UpdateTrace::Watch
  double seconds = 0;
  std::vector<Attribute> attributes;
};

struct TracedUpdate {
  v1::UpdateStatus update;
  std::vector<UpdateSpan> spans;  // that of the update first; all others lie within it
};

class UpdateTrace {
 public:
  // Takes an update as a watch reports it, at `seconds` of any clock that grows. Returns true where
  // this report ends an update that ran when it was first seen.
  bool Watch(const v1::UpdateStatus& update, double seconds);
  // Takes the group's last update, with what is recorded of its buckets. Beside updates that were
  // watched it has no place in time, and is left out.
  void Add(const v1::GetUpdateStatisticsResponse& statistics);
  // Takes what each daemon of the group did in the last compiled refit that ended well, which must
  // be that of the update added last. It is of no update that was lost, or that pushed alone.
  void Add(const v1::GroupStatus& group);

  // The updates in the order in which they were first seen.
  std::vector<TracedUpdate> Updates() const;

 private:
  struct Phase {
    std::string state;
    double begin = 0;  // seconds since the update's
  };
  struct Traced {
    double begin = 0;
    std::vector<Phase> phases;
    v1::UpdateStatus update;
    v1::GetUpdateStatisticsResponse statistics;
    std::vector<v1::NodeStatus> nodes;
  };
  Traced* Find(uint64_t update_id);
  static std::vector<UpdateSpan> SpansOf(const Traced& traced);

  std::vector<Traced> traced_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_TRACE_UPDATE_TRACE_H_
