// Turns a step of a compiled refit (StartMoves) into a transfer: finds the memory, takes the moves
// from the node program and their addresses from the layouts in force.
//
// P1: a move keeps its offset inside its piece as the program has it; where the piece lies comes
// from the layout in force. So a wrong program shows in the digests. P6: the transfer holds every
// mapping that it touches. P10: pieces are compared with the program's own, and with the bounds of
// their regions, before an address is made.
//
// Functions share nothing; BindStep needs no mutex.
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

// Memory by name, from whoever owns the mappings. An error is our own bug or a member that
// vanished: the transfer fails.
class MemoryResolver {
 public:
  virtual ~MemoryResolver() = default;
  virtual absl::StatusOr<MemorySpan> Region(MemberId member, RegionId region) const = 0;
  // Where slots are that cross daemons: in host memory, or on one GPU of this daemon.
  virtual absl::StatusOr<MemorySpan> Slot(SlotIndex slot) const = 0;
  // On the device of a member of this daemon; of another daemon's: as Slot.
  virtual absl::StatusOr<MemorySpan> SlotOf(MemberId /*member*/, SlotIndex slot) const {
    return Slot(slot);
  }
  // Where a member's memory is: a device's ordinal; nullopt: the host, or another daemon.
  virtual std::optional<int> DeviceOf(MemberId /*member*/) const { return std::nullopt; }
};

// What a step may touch.
struct ProgramMemory {
  std::vector<std::map<RegionId, MemorySpan>> sources;       // by program->sources
  std::vector<std::map<RegionId, MemorySpan>> destinations;  // by program->destinations
  MemorySpan slot;
};

struct BoundStep {
  Transfer transfer;
  // Of each destination, for each of its bound pieces: its index in the layout.
  std::vector<std::vector<uint32_t>> originals;
  // Pack and unpack: digests not filled in; and whose part each source piece is.
  std::vector<SectionDigest> sections;
  std::vector<uint32_t> section_of_piece;
};

// INTERNAL: lists of the bound program that disagree in length, or a member or region that is gone.
absl::StatusOr<ProgramMemory> ResolveMemory(const StartMoves& start, const MemoryResolver& memory);

// FAILED_PRECONDITION: a layout in force has another structure than the program's, or a rank does
// not hold a replica. INVALID_ARGUMENT: a round that the program does not have, or a slot that is
// too small. INTERNAL: a piece outside its region.
absl::StatusOr<BoundStep> BindStep(const StartMoves& start, const ProgramMemory& memory);

}  // namespace refitd

#endif  // REFITD_DAEMON_EXECUTE_PROGRAM_EXECUTOR_H_
