// A daemon's worker asks the executor for these steps, and the executor answers.
//
//   PeerHeader  -> StartTransfer -> TransferDone          a part of a bucket
//   VerifyUpdate  -> StartVerify -> VerifyDone              the read-back
// A compiled refit:
//   PeerProgram -> BuildProgram -> ProgramBuilt           structure: once for a set of layouts
//   StartCompare -> StartMoves(kCompare)                   replicas' digests, before data moves
//   StartRefit     -> StartMoves(kLocal)                     within the daemon
//                  StartMoves(kPack) -> StartExchange -> StartMoves(kUnpack)      a round each
//
// With chains, a pack also takes what this daemon forwards, from the slot into which an earlier
// round was received. That is the slot into which the pack's own round is received next.
//
// Values; thread-safe as such.
#ifndef REFITD_DAEMON_GROUP_PROGRAM_H_
#define REFITD_DAEMON_GROUP_PROGRAM_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "daemon/group/bucket.h"
#include "daemon/group/slot_ledger.h"
#include "transport/base/ids.h"
#include "transport/plan/layout.h"
#include "transport/plan/node_program.h"
#include "transport/plan/plan.h"
#include "transport/plan/refit_plan.h"
#include "transport/transport.h"

namespace refitd {

// Copy one part of a bucket on this daemon: into the slot to fill, if there is one (packed as
// `content` says), and into every destination of `index` that is not skipped. Destinations are
// pairs of a member and its layout, in index order.
struct StartTransfer {
  UpdateId update;
  Version version;
  PartSeq part;
  int64_t group_seq = 0;  // of the bucket
  // The call that brought content->bucket: its source bytes stay valid until the call's Reply. 0:
  // another daemon sent the part, which lies in `source_slot` as `content` says.
  CallId bucket_call;
  MemberId trainer;
  std::shared_ptr<const PartContent> content;
  std::optional<SlotGrant> source_slot;  // set: the source is this slot, which the trainer leased
  // The slot to fill: for loader engines, or, with a method other than kDirect, to broadcast
  // through.
  std::optional<SlotGrant> fill_slot;
  std::shared_ptr<const DestinationIndex> index;  // in-place engine ranks of the update
  std::vector<MemberId> destinations;             // in index order
  std::vector<bool> skip_destination;             // true: evicted since
  std::vector<MemberId> readers;                  // ranks that will be handed the slot
  // True: the wire then sends the slot to other daemons, so the executor fills the place of the
  // slot that the wire reads.
  bool wired = false;
  // The method to use. kAuto: the executor chooses. Without a slot the part goes by kDirect,
  // whatever this says.
  BroadcastMethod broadcast = BroadcastMethod::kDirect;
  Verification verification = Verification::kOff;
  // Whether the result must carry digests of the source, by range of `content`.
  bool want_source_digests = false;
};

// Read every written piece of every destination again and compare it with the digests that the
// update's transfers left. Asked for only with kReadback.
struct StartVerify {
  UpdateId update;
  Version version;
  std::shared_ptr<const DestinationIndex> index;
  std::vector<MemberId> destinations;
  std::vector<bool> skip_destination;
};

// Compile this daemon's part. That takes up to seconds, so it must not run on the caller's thread.
// Answered by ProgramBuilt.
struct BuildProgram {
  ProgramId program;
  uint64_t build = 0;  // unique in the daemon's group
  std::shared_ptr<const RoutePlan> plan;
  uint32_t node = 0;
  std::vector<LocalMember> sources;  // the caller fills in each `device`
  std::vector<LocalMember> destinations;
  std::vector<MemberId> source_members;  // the ranks of `sources`, in order
  std::vector<MemberId> destination_members;
  NodeProgramOptions options;
};
struct ProgramBuilt {
  ProgramId program;
  uint64_t build = 0;
  absl::Status status;
  std::shared_ptr<const NodeProgram> node_program;  // if OK
};

// A node program and the memory that it runs on. The layouts have the tensors and pieces that the
// program was compiled for, in the same order (SameStructure in node_program.h); their regions and
// byte offsets may differ, since binding the program to other memory needs no planning.
struct BoundProgram {
  std::shared_ptr<const NodeProgram> program;
  std::shared_ptr<const std::vector<ReplicaShare>> replicas;  // replicas that this node holds
  std::shared_ptr<const RoutePlan> plan;                      // names the tensors of `replicas`
  std::vector<MemberId> sources;                              // by program->sources
  std::vector<MemberId> destinations;                         // by program->destinations
  std::vector<std::shared_ptr<const Layout>> source_layouts;
  std::vector<std::shared_ptr<const Layout>> destination_layouts;
};

enum class MoveStep : uint8_t {
  kCompare,  // digests of `replicas`; moves nothing
  // Before and after a binding's first run: digests of sources of which nothing tells whether they
  // are the memory of a destination. The second time in an update, DATA_LOSS names one that has
  // changed.
  kWitness,
  kLocal,   // program->local
  kPack,    // one round: from the sources and from `received` into `slot`
  kUnpack,  // one round: from `slot` into the destinations
};

// Answered by MovesDone.
struct StartMoves {
  UpdateId update;  // the worker's
  Version version;
  MoveStep step = MoveStep::kLocal;
  int64_t round = 0;           // pack and unpack only
  SlotIndex slot;              // pack and unpack only
  SlotIndex received;          // pack only: has what an earlier round received
  NodeProgram::Course course;  // pack and unpack only
  std::shared_ptr<const BoundProgram> bound;
  std::vector<bool> skip_destination;  // by program->destinations
  Verification verification = Verification::kOff;
  ReplicaFraction part = {};  // compare only: the share of `replicas`
};

// The digest of a section, or of what one round carries of it.
struct SectionDigest {
  uint32_t stream = 0;   // index into the program's outgoing (pack) or incoming streams (unpack)
  uint32_t section = 0;  // index into the stream's sections
  uint64_t digest = 0;
};

// The moves have ended: they read and write nothing any more.
struct MovesDone {
  UpdateId update;
  MoveStep step = MoveStep::kLocal;
  int64_t round = 0;
  absl::Status status;
  std::vector<int64_t> bytes_written;  // local, unpack: by program->destinations
  int failed_destination = -1;         // index as in `bytes_written`; if not OK and known
  std::vector<uint64_t> digests;  // compare: by bound->replicas; only those of the part are set
  // Compare: the run that follows must be between two witness steps.
  bool witness = false;
  // Pack: of the sources' bytes, not of what is forwarded; unpack: of the bytes received. Empty if
  // verification is off.
  std::vector<SectionDigest> sections;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_PROGRAM_H_
