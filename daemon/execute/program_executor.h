// Turns a step of a compiled refit (StartMoves) into a transfer: finds the memory, takes the moves
// from the node program and their addresses from the layouts in force.
//
// P1: a move keeps the offset inside its piece that the program has, while the layout in force says
// where the piece lies, so that a wrong program shows in the digests. P6: the transfer holds every
// mapping that it touches. P10: pieces are compared with the program's own, and with the bounds of
// their regions, before an address is made.
//
// Functions share no state; BindStep needs no mutex.
#ifndef REFITD_DAEMON_EXECUTE_PROGRAM_EXECUTOR_H_
#define REFITD_DAEMON_EXECUTE_PROGRAM_EXECUTOR_H_

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/group/program.h"
#include "transport/transport.h"

namespace refitd {

// Finds memory by name; implemented by the owner of the mappings. An error means a bug of the
// daemon or a member that vanished: the transfer fails.
class MemoryResolver {
 public:
  virtual ~MemoryResolver() = default;
  // The memory that the member reads as the region.
  virtual absl::StatusOr<MemorySpan> Region(MemberId member, RegionId region) const = 0;
  // The memory that updates write for the region: its back, if it has one (Layout::backs).
  virtual absl::StatusOr<MemorySpan> Destination(MemberId member, RegionId region) const {
    return Region(member, region);
  }
  // Whether the member's regions and their backs have changed places. What is bound to the member's
  // memory holds for one of the two.
  virtual bool Flipped(MemberId /*member*/) const { return false; }
  // A slot in the place whose slots cross to other daemons: host memory, or one GPU of this daemon.
  virtual absl::StatusOr<MemorySpan> Slot(SlotIndex slot) const = 0;
  // A slot on the device of this daemon's member; for members of other daemons: as Slot.
  virtual absl::StatusOr<MemorySpan> SlotOf(MemberId /*member*/, SlotIndex slot) const {
    return Slot(slot);
  }
  // What messages call a member of this daemon.
  virtual std::string LabelOf(MemberId member) const;
  // The device of a member's memory, by ordinal; nullopt: the host, or a member of another daemon.
  virtual std::optional<int> DeviceOf(MemberId /*member*/) const { return std::nullopt; }
};

// One of BoundProgram::replicas, and the piece that holds it.
struct HeldReplica {
  uint64_t hash = 0;    // ReplicaHash
  uint32_t share = 0;   // index into BoundProgram::replicas
  uint32_t member = 0;  // by program->sources
  uint32_t piece = 0;   // of the member's layout in force
};
// Finds the piece of each replica; sorted by hash, then by share. It looks up every tensor's name:
// call it once for a bound program, not for each version. FAILED_PRECONDITION: a rank does not hold
// a replica.
absl::StatusOr<std::vector<HeldReplica>> FindReplicas(const BoundProgram& bound);

// The memory that a step may touch.
struct ProgramMemory {
  std::vector<std::map<RegionId, MemorySpan>> sources;       // by program->sources
  std::vector<std::map<RegionId, MemorySpan>> destinations;  // by program->destinations
  MemorySpan slot;
  MemorySpan received;  // pack with chains: the slot that is forwarded from
  // The sources, then the destinations, that are attached; empty: they need not be checked.
  std::vector<PlacedLayout> places;
};

// A member's layout, and where its regions come from. A member that has left shares nothing.
PlacedLayout PlaceOf(MemberId member, const std::shared_ptr<const Layout>& layout, bool destination,
                     const MemoryResolver& memory);

// The layouts of the program's members that are attached, and where their regions come from.
std::vector<PlacedLayout> PlacesOf(const BoundProgram& bound, const MemoryResolver& memory);

struct BoundStep {
  Transfer transfer;
  // For each destination and each of its bound pieces: the piece's index in the layout.
  std::vector<std::vector<uint32_t>> originals;
  // Pack and unpack: the sections whose digests are to be filled in, and for each source piece the
  // section that it is part of.
  std::vector<SectionDigest> sections;
  std::vector<uint32_t> section_of_piece;
};

// `replicas`: from FindReplicas; only the pieces in start.part are resolved. Null: all pieces.
// INTERNAL: lists of the bound program differ in length, or a member or region is
// gone.
absl::StatusOr<ProgramMemory> ResolveMemory(const StartMoves& start, const MemoryResolver& memory,
                                            const std::vector<HeldReplica>* replicas = nullptr);

// `replicas`: from FindReplicas; null but for a comparison. FAILED_PRECONDITION: a layout in
// force has another structure than the program's, or members' memory overlaps (CheckOverlap of
// memory.places). INVALID_ARGUMENT: a round that the program does not have, or a slot that is too
// small. INTERNAL: a piece outside its region.
absl::StatusOr<BoundStep> BindStep(const StartMoves& start, const ProgramMemory& memory,
                                   const std::vector<HeldReplica>* replicas = nullptr);

}  // namespace refitd

#endif  // REFITD_DAEMON_EXECUTE_PROGRAM_EXECUTOR_H_
