// One daemon's share of a group's updates: packs the parts of its trainers, runs its end of the
// collectives, unpacks into its engines' memory, reads back. Takes the coordinator's commands,
// gives local actions and reports. The coordinator's own daemon has one as well.
//
// A part on the root:  header -> pack (slot, own engines) -> issued: collective -> done
//      on the others:  header -> issued: collective -> unpack (own engines) -> done
// Packing needs no agreement: it stays inside the daemon. Collectives start in the order of Issue
// (P7), so that the part on the wire, the one being packed and the one being unpacked overlap.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_GROUP_WORKER_H_
#define REFITD_DAEMON_GROUP_WORKER_H_

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "daemon/group/machine.h"

namespace refitd {

class Worker {
 public:
  struct Callbacks {
    // For the executor; unique in the daemon.
    std::function<UpdateId()> next_update;
    // Null: not of this daemon, lost, or staged.
    std::function<std::shared_ptr<const Layout>(MemberId)> layout;
    // The trainer's bucket, by its call; null if it is gone.
    std::function<const BucketEvent*(CallId)> bucket;
  };
  Worker(Callbacks callbacks, Duration wire_limit);

  // Where actions and reports of the following calls go.
  struct Output {
    MachineActions* actions = nullptr;
    std::vector<PeerReport>* reports = nullptr;
  };

  void Handle(const PeerPrepare& command, TimePoint now, const Output& out);
  void Handle(const PeerHeader& command, TimePoint now, const Output& out);
  void Handle(const PeerIssue& command, TimePoint now, const Output& out);
  void Handle(const PeerVerify& command, TimePoint now, const Output& out);
  void Handle(const PeerAbandon& command, TimePoint now, const Output& out);
  void Handle(const PeerUpdateEnded& command, TimePoint now, const Output& out);
  void Handle(const PeerEpochOpen& command, TimePoint now, const Output& out);
  void Handle(const PeerEpochConnect& command, TimePoint now, const Output& out);
  void Handle(const PeerEpochClose& command, TimePoint now, const Output& out);
  void Handle(const PeerWireLock& command, TimePoint now, const Output& out);
  void Handle(const PeerWireUnlock& command, TimePoint now, const Output& out);

  // False: not something that this worker asked for.
  bool Handle(const TransferDone& done, TimePoint now, const Output& out);
  bool Handle(const VerifyDone& done, TimePoint now, const Output& out);
  void Handle(const WireDone& done, TimePoint now, const Output& out);
  void Handle(const EpochOpened& event, const Output& out);
  void Handle(const EpochUp& event, const Output& out);
  void Handle(const WireGranted& event, const Output& out);
  void Handle(const WireWaits& event, const Output& out);
  void Handle(const WireWanted& event, const Output& out);

  // Nothing new touches its memory; what runs holds its mappings.
  void MemberLost(MemberId member) { lost_.insert(member); }
  // The coordinator is lost: nothing new is started, epochs are closed, the wire is given back.
  void AbandonAll(TimePoint now, const Output& out);

  // nullopt: its header never came, or the update is over.
  std::optional<BucketHeader> Header(UpdateId update, PartSeq part) const;
  bool Participates() const { return !updates_.empty(); }
  // Nothing of it runs: no transfer, collective or read-back.
  bool quiet() const;
  // A transfer reads that bucket's source.
  bool Reads(CallId bucket_call) const;
  std::optional<EpochId> epoch() const { return epoch_; }
  std::string_view epoch_state() const { return epoch_state_; }

 private:
  struct Part {
    PeerHeader header;
    bool issued = false;
    bool transferring = false;
    bool transferred = false;  // root: packed; others: unpacked
    bool on_wire = false;
    PeerPartDone result;
  };
  struct Update {
    UpdateId id;
    UpdateId local;
    Version version;
    Verification verification = Verification::kOff;
    TimePoint deadline;
    std::vector<MemberId> destinations;
    std::shared_ptr<const DestinationIndex> index;
    std::map<PartSeq, Part> parts;  // not reported yet
    std::map<PartSeq, BucketHeader> headers;
    std::deque<PartSeq> to_wire;  // issued, in order, not started
    bool abandoned = false;
    bool ended = false;
    std::optional<PeerVerify> to_verify;  // once no part is left
    bool verifying = false;
  };

  Update* Find(UpdateId id);
  Update* FindLocal(UpdateId local);
  std::string Disagreement(const Update& update, const PeerHeader& command) const;
  std::vector<bool> Skip(const Update& update, const std::vector<bool>& skip) const;
  bool AnyTouched(const Update& update, const PartContent& content,
                  const std::vector<bool>& skip) const;
  void Transfer(Update* update, Part* part, const Output& out);
  void VerifyIfWritten(Update* update, const Output& out);
  void PumpWire(Update* update, TimePoint now, const Output& out);
  void Finish(Update* update, PartSeq part, const absl::Status& status, const Output& out);
  void DropIfOver(UpdateId id, const Output& out);
  void GiveWireBackIfQuiet(const Output& out);
  static bool Running(const Part& part) { return part.transferring || part.on_wire; }

  const Callbacks callbacks_;
  const Duration wire_limit_;
  std::map<UpdateId, Update> updates_;
  std::set<MemberId> lost_;
  std::optional<EpochId> epoch_;
  std::string_view epoch_state_;
  int epoch_rank_ = 0;
  int epoch_size_ = 0;
  std::optional<UpdateId> wire_update_;  // whose lock was asked for
  bool wire_held_ = false;
  bool giving_back_ = false;
  // Of the last prepared update, kept while layouts stay the same.
  std::vector<std::shared_ptr<const Layout>> index_layouts_;
  std::vector<uint64_t> index_digests_;
  std::shared_ptr<const DestinationIndex> index_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_WORKER_H_
