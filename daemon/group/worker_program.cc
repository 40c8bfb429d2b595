// A worker's share of a compiled refit: build and bind the program, compare replicas, run it.
//
//   local moves  at once
//   round r      pack -> exchange (issued, in order) -> unpack
//
// With two pairs of slots one round is packed while the round before is on the wire or is unpacked.
// A round begins when the previous round with the same pair of slots has ended. So a program with
// chains, whose lag is the number of pairs, finds the bytes that it forwards in its own pair: the
// earlier round has received and unpacked them, and the new one has not received yet.
#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "daemon/group/worker.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

absl::Status GivenUp() { return absl::CancelledError("the update was given up"); }

bool SameRanks(const std::vector<LocalMember>& known, const std::vector<PlanMember>& wanted) {
  return std::equal(known.begin(), known.end(), wanted.begin(), wanted.end(),
                    [](const LocalMember& a, const PlanMember& b) { return a.rank == b.rank; });
}

// Digests of the streams that the program sends to, and receives from, each node over the wire.
// Streams count for their source and their receiver, whatever nodes they pass, so that each node of
// a chain agrees with the source and not only with its neighbours. `out(stream)` and `in(stream)`
// give the hash of a stream; nullopt: it counts for nothing.
template <typename Out, typename In>
std::vector<PeerStream> StreamsOf(const NodeProgram& program, const Out& out, const In& in) {
  std::map<uint32_t, PeerStream> streams;
  const auto fold = [&streams](const std::map<uint32_t, std::vector<uint32_t>>& by_peer,
                               const auto& hash_of, uint64_t PeerStream::*end) {
    for (const auto& [peer, list] : by_peer) {
      std::vector<uint64_t> hashes;
      for (const uint32_t stream : list) {
        if (const std::optional<uint64_t> hash = hash_of(stream)) hashes.push_back(*hash);
      }
      if (!hashes.empty()) streams[peer].*end = FoldStreams(hashes);
    }
  };
  fold(program.StreamsByReceiver(), out, &PeerStream::out);
  fold(program.StreamsBySender(), in, &PeerStream::in);
  std::vector<PeerStream> list;
  for (auto& [peer, stream] : streams) {
    stream.peer = peer;
    list.push_back(stream);
  }
  return list;
}

// Adds digests of sections to the sums of their streams.
void Add(const std::vector<SectionDigest>& digests, const std::vector<Stream>& streams,
         std::map<uint32_t, std::vector<uint64_t>>* sums) {
  for (const SectionDigest& section : digests) {
    if (section.stream >= streams.size()) continue;
    std::vector<uint64_t>& of_stream = (*sums)[section.stream];
    if (of_stream.empty()) of_stream.resize(streams[section.stream].sections.size());
    if (section.section < of_stream.size()) of_stream[section.section] += section.digest;
  }
}

}  // namespace

// ---- compiling and binding ----

void Worker::Handle(const PeerProgram& command, TimePoint, const Output& out) {
  Update* update = Find(command.update);
  if (update == nullptr) {
    PeerProgramBuilt built;
    built.update = command.update;
    built.status = absl::FailedPreconditionError("this daemon has no such update");
    out.reports->push_back(std::move(built));
    return;
  }
  if (update->job.has_value()) return;
  update->job.emplace();
  update->job->command = WithItsPart(command);
  PeerProgram& mine = update->job->command;
  if (mine.plan != nullptr && mine.replicas != nullptr) {
    program_.emplace();
    program_->id = command.program;
    program_->node = command.node;
    program_->chunk_bytes = command.chunk_bytes;
    program_->plan = std::move(mine.plan);
    program_->replicas = std::move(mine.replicas);
  }
  // The plan is kept with the program.
  mine.plan = nullptr;
  mine.replicas = nullptr;
  BindOrBuild(update, out);
}

void Worker::BindOrBuild(Update* update, const Output& out) {
  Job& job = *update->job;
  if (!program_.has_value() || program_->id != job.command.program) {
    return ReportBuilt(update, absl::FailedPreconditionError("this daemon has not got the plan"),
                       out);
  }
  if (program_->building != 0) return;
  if (program_->bound == nullptr) return Build(*update, out);
  std::shared_ptr<const BoundProgram> bound = program_->bound;
  const absl::Status status = Bind(*update, bound->program, &bound);
  if (status.code() == absl::StatusCode::kFailedPrecondition) {
    // The pieces may be in another order, for example. So this node's part of the same plan is
    // compiled once more.
    return Build(*update, out);
  }
  if (status.ok()) job.bound = program_->bound = bound;
  ReportBuilt(update, status, out);
}

std::shared_ptr<const Layout> worker::Update::DestinationLayout(size_t d) const {
  const auto& prepared = index->destinations();
  return d < prepared.size() ? prepared[d] : nullptr;
}

// `bound` may hold an earlier binding, which stays if no memory moved. FAILED_PRECONDITION: the
// node program was made for layouts of another structure.
absl::Status Worker::Bind(const Update& update, std::shared_ptr<const NodeProgram> node_program,
                          std::shared_ptr<const BoundProgram>* bound) const {
  const Job& job = *update.job;
  auto made = std::make_shared<BoundProgram>();
  made->plan = program_->plan;
  made->replicas = program_->replicas;
  const auto bind = [this, &update](const std::vector<LocalMember>& known,
                                    const std::vector<PlanMember>& wanted, bool destination,
                                    std::vector<MemberId>* members,
                                    std::vector<std::shared_ptr<const Layout>>* layouts) {
    if (!SameRanks(known, wanted)) return absl::FailedPreconditionError("other ranks");
    for (size_t i = 0; i < wanted.size(); ++i) {
      std::shared_ptr<const Layout> layout =
          destination ? update.DestinationLayout(i) : callbacks_.layout(wanted[i].member);
      if (layout == nullptr && destination) layout = known[i].layout;  // lost: it will be skipped
      if (layout == nullptr) {
        return Error(absl::StatusCode::kUnavailable, "member {} left", wanted[i].member);
      }
      if (layout != known[i].layout && !SameStructure(*known[i].layout, *layout)) {
        return absl::FailedPreconditionError("another structure");
      }
      members->push_back(wanted[i].member);
      layouts->push_back(std::move(layout));
    }
    return absl::OkStatus();
  };
  REFITD_RETURN_IF_ERROR(bind(node_program->sources, job.command.sources, false, &made->sources,
                              &made->source_layouts));
  REFITD_RETURN_IF_ERROR(bind(node_program->destinations, job.command.destinations, true,
                              &made->destinations, &made->destination_layouts));
  const BoundProgram* before = bound->get();
  if (before != nullptr && before->program == node_program && before->sources == made->sources &&
      before->destinations == made->destinations &&
      before->source_layouts == made->source_layouts &&
      before->destination_layouts == made->destination_layouts) {
    return absl::OkStatus();
  }
  made->program = std::move(node_program);
  *bound = std::move(made);
  return absl::OkStatus();
}

void Worker::Build(const Update& update, const Output& out) {
  const Job& job = *update.job;
  program_->building_for = update.id();
  BuildProgram build;
  build.program = program_->id;
  build.build = program_->building = next_build_++;
  build.plan = program_->plan;
  build.node = program_->node;
  build.options.chunk_bytes = program_->chunk_bytes;
  build.options.cancelled = program_->cancel.Next();
  for (const PlanMember& m : job.command.sources) {
    build.sources.push_back({.rank = m.rank, .layout = callbacks_.layout(m.member)});
    build.source_members.push_back(m.member);
  }
  for (size_t d = 0; d < job.command.destinations.size(); ++d) {
    const PlanMember& m = job.command.destinations[d];
    build.destinations.push_back({.rank = m.rank, .layout = update.DestinationLayout(d)});
    build.destination_members.push_back(m.member);
  }
  out.actions->push_back(PeerAction(std::move(build)));
}

void Worker::Handle(const ProgramBuilt& built, TimePoint, const Output& out) {
  if (!program_.has_value() || program_->building != built.build) return;
  program_->building = 0;
  for (auto& [id, update] : updates_) {
    if (!update.job.has_value() || update.job->reported ||
        update.job->command.program != program_->id) {
      continue;
    }
    absl::Status status = built.status;
    std::shared_ptr<const BoundProgram> bound;
    if (status.ok()) status = Bind(update, built.node_program, &bound);
    if (!status.ok() && program_->building_for != id) {
      // The program was built for the members of an update that is over.
      Build(update, out);
      return;
    }
    if (status.ok()) update.job->bound = program_->bound = bound;
    ReportBuilt(&update, status, out);
  }
}

// Ends a build that no update waits for any more (P4).
void Worker::CancelBuildIfUnwanted() {
  if (!program_.has_value() || program_->building == 0) return;
  const bool wanted = std::any_of(updates_.begin(), updates_.end(), [this](const auto& u) {
    const std::optional<Job>& job = u.second.job;
    return job.has_value() && !job->reported && job->command.program == program_->id;
  });
  if (!wanted) program_->cancel.Cancel();
}

void Worker::ReportBuilt(Update* update, const absl::Status& status, const Output& out) {
  Job& job = *update->job;
  job.reported = true;
  PeerProgramBuilt built;
  built.update = update->id();
  built.status = status;
  if (status.ok()) {
    const NodeProgram& program = *job.bound->program;
    built.rounds = program.rounds;
    const auto digests = [](const std::vector<Stream>& list) {
      return [&list](uint32_t stream) { return std::optional(list[stream].Digest()); };
    };
    built.streams = StreamsOf(program, digests(program.outgoing), digests(program.incoming));
  }
  out.reports->push_back(std::move(built));
}

// ---- comparing ----

void Worker::Handle(const StartCompare& command, TimePoint, const Output& out) {
  Update* update = Find(command.update);
  if (update == nullptr || !update->job.has_value() || update->job->bound == nullptr ||
      update->job->comparing || update->abandoned) {
    const bool given_up = update != nullptr && update->abandoned;
    out.reports->push_back(CompareDone{
        command.update,
        given_up ? GivenUp() : absl::FailedPreconditionError("the program is not built here"),
        {}});
    return;
  }
  update->job->comparing = true;
  update->job->part = command.part;
  StartStep(update, MoveStep::kCompare, 0, out);
}

// ---- running ----

void Worker::Handle(const StartRefit& command, TimePoint now, const Output& out) {
  Update* update = Find(command.update);
  const bool ran = update != nullptr && update->job.has_value() && update->job->run.has_value();
  // The command of an attempt that began already, or that comes before this attempt has ended,
  // changes nothing.
  if (ran && (command.attempt <= update->job->run->attempt || !update->job->done)) return;
  if (update == nullptr || !update->job.has_value() || update->job->bound == nullptr) {
    RefitDone done;
    done.update = command.update;
    done.attempt = command.attempt;
    done.status = absl::FailedPreconditionError("the program is not built here");
    out.reports->push_back(std::move(done));
    return;
  }
  // Before BeginRun: a daemon that has not run yet lacks all rounds, also those that bring it
  // nothing.
  const absl::Status resume = update->job->CheckResume(command);
  // The run begins also where a check fails: it then ends at once, and its report names the
  // attempt.
  BeginRun(update, command);
  Job& job = *update->job;
  if (update->abandoned) {
    job.Stop(GivenUp());
  } else if (!resume.ok()) {
    // The run's first round is now one that this daemon can't begin with, so that the rounds before
    // it would count as stored (NoteHeldSteps). After other failures the program can go on.
    job.broken = true;
    job.Stop(resume);
  } else if (absl::Status status = job.CheckSlots(); !status.ok()) {
    job.Stop(status);
  }
  AdvanceRun(update, now, out);
}

absl::Status worker::Job::CheckResume(const StartRefit& command) const {
  if (!command.resume.has_value()) return absl::OkStatus();
  const int64_t lacks = run.has_value() ? bound->program->FirstLacking(course) : 0;
  if (!broken && *command.resume >= 0 && *command.resume <= lacks) return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition,
               "the program can't go on from round {}: this daemon lacks round {}{}",
               *command.resume, lacks, broken ? ", and its moves failed" : "");
}

void worker::Job::Resume(const StartRefit& command) {
  issued = stopped = done = false;
  rounds.clear();
  first_round = *command.resume;
  uses.clear();
  course.gone.clear();
  course.first = *command.resume;
  RefitDone next;
  next.bytes_written = std::move(result.bytes_written);
  result = std::move(next);
}

// A run after the first goes on from a round (`resume`) or begins anew. If it begins anew, the
// update gets a new local id, so that the executor's digests for the read-back are those of this
// run alone (P1).
void Worker::BeginRun(Update* update, const StartRefit& command) {
  Job& job = *update->job;
  if (job.run.has_value()) {
    REFITD_CHECK(job.done && !job.running() && !update->verifying);
  }
  if (job.run.has_value() && command.resume.has_value()) {
    job.Resume(command);
  } else if (job.run.has_value()) {
    Job again;
    again.command = std::move(job.command);
    again.reported = job.reported;
    again.bound = std::move(job.bound);
    again.part = job.part;
    again.witness = job.witness;
    job = std::move(again);
    update->earlier_locals.push_back(update->local);
    update->local = callbacks_.next_update();
  }
  if (job.witness != Job::Witness::kNone) job.witness = Job::Witness::kDue;
  job.run = command;
  job.result.update = update->id();
  job.result.attempt = command.attempt;
  job.result.bytes_written.resize(update->destinations.size());
  for (const uint32_t rank : command.ranks) job.course.gone.push_back(rank == kNoRank);
}

absl::Status worker::Job::CheckSlots() const {
  if (!run->wired) return absl::OkStatus();
  const size_t slots = run->slots.size();
  if (slots < 2 || slots % 2 != 0) return absl::InternalError("slots do not come in pairs");
  const uint32_t lag = bound->program->lag;
  if (lag == 0 || slots == 2 * size_t{lag}) return absl::OkStatus();
  return Error(absl::StatusCode::kInternal, "{} slots, but chains forward after {} rounds", slots,
               lag);
}

void Worker::AdvanceRun(Update* update, TimePoint now, const Output& out) {
  Job& job = *update->job;
  if (!job.run.has_value() || job.done) return;
  if (WitnessBefore(update, out)) return EndRunIfQuiet(update, out);
  if (!job.local_begun && !job.stopped) {
    job.local_begun = true;
    if (!job.bound->program->local.moves.empty()) {
      job.local_running = true;
      StartStep(update, MoveStep::kLocal, 0, out);
    }
  }
  do {
    while (!job.rounds.empty() && job.rounds.begin()->second.over) {
      job.rounds.erase(job.rounds.begin());
      ++job.first_round;
    }
    BeginRounds(update, out);
    // Rounds go on the wire after the parts that were issued before (P7). A round in which no node
    // is left to exchange bytes with ends at once, so the loop may have to look again.
    for (auto& [number, round] : job.rounds) {
      if (job.stopped || !job.issued || !update->to_wire.empty() || !round.packed) break;
      if (!round.out) StartRoundOnWire(update, number, now, out);
    }
  } while (!job.rounds.empty() && job.rounds.begin()->second.over);
  EndRunIfQuiet(update, out);
}

RunProgress Worker::ProgressOf(UpdateId id) const {
  RunProgress made;
  const auto it = updates_.find(id);
  if (it == updates_.end() || !it->second.job.has_value()) return made;
  const Job& job = *it->second.job;
  if (!job.run.has_value()) return made;
  for (const int64_t bytes : job.result.bytes_written) made.bytes += bytes;
  const NodeProgram& program = *job.bound->program;
  const bool on_wire = !program.outgoing.empty() || !program.incoming.empty();
  if (job.run->wired && on_wire && program.rounds > 0) {
    made.rounds = static_cast<double>(job.first_round) / static_cast<double>(program.rounds);
  }
  return made;
}

bool Worker::WitnessBefore(Update* update, const Output& out) {
  Job& job = *update->job;
  if (job.stopped) return false;
  if (job.witness == Job::Witness::kDue) {
    job.witness = Job::Witness::kBefore;
    StartStep(update, MoveStep::kWitness, 0, out);
  }
  return job.witness == Job::Witness::kBefore;
}

bool Worker::WitnessAfter(Update* update, const Output& out) {
  Job& job = *update->job;
  if (job.stopped || job.witness != Job::Witness::kRun) return false;
  job.witness = Job::Witness::kAfter;
  StartStep(update, MoveStep::kWitness, 0, out);
  return true;
}

void Worker::BeginRounds(Update* update, const Output& out) {
  Job& job = *update->job;
  const NodeProgram& program = *job.bound->program;
  const auto pairs = static_cast<int64_t>(job.run->slots.size() / 2);
  const int64_t end = job.run->wired ? program.rounds : 0;
  while (!job.stopped && job.first_round + static_cast<int64_t>(job.rounds.size()) <
                             std::min(end, job.first_round + pairs)) {
    const int64_t number = job.first_round + static_cast<int64_t>(job.rounds.size());
    Round& round = job.rounds[number];
    const std::vector<ExchangeLeg> legs = program.Legs(number, job.course);
    const bool sends = std::any_of(legs.begin(), legs.end(),
                                   [](const ExchangeLeg& leg) { return leg.bytes_out > 0; });
    if (!sends) {
      // There is nothing to pack.
      round.packed = true;
      continue;
    }
    round.packing = true;
    StartStep(update, MoveStep::kPack, number, out);
  }
}

void Worker::StartRoundOnWire(Update* update, int64_t number, TimePoint now, const Output& out) {
  Job& job = *update->job;
  const StartRefit& run = *job.run;
  Round& round = job.rounds.at(number);
  StartExchange start;
  start.communicator = run.communicator;
  start.seq = WireSeq(run.wire_seq.value() + static_cast<uint64_t>(number - job.course.first));
  for (const ExchangeLeg& leg : job.bound->program->Legs(number, job.course)) {
    const uint32_t rank = leg.peer < run.ranks.size() ? run.ranks[leg.peer] : kNoRank;
    if (rank == kNoRank) continue;
    start.legs.push_back({rank, leg.bytes_out, leg.out_offset, leg.bytes_in, leg.in_offset});
  }
  round.out = true;
  if (start.legs.empty()) {
    round.over = true;
    return;
  }
  if (wire_.communicator() != run.communicator) {
    job.result.wire_failed = true;
    job.Stop(absl::CancelledError("the data plane of the update was closed"));
    return;
  }
  const size_t pair = static_cast<size_t>(number) % (run.slots.size() / 2);
  start.out = run.slots[2 * pair].slot;
  start.in = run.slots[2 * pair + 1].slot;
  start.timeout = wire_.TimeoutFor(update->deadline, now);
  round.on_wire = true;
  out.actions->push_back(PeerAction(std::move(start)));
}

void Worker::StartStep(Update* update, MoveStep step, int64_t number, const Output& out) {
  const Job& job = *update->job;
  StartMoves start;
  start.update = update->local;
  start.version = update->version;
  start.step = step;
  start.round = number;
  start.bound = job.bound;
  start.verification = update->verification;
  start.part = job.part;
  // The destinations to skip are needed before the run, too: its local moves are bound while
  // replicas are compared.
  start.skip_destination = Skip(*update, job.run.has_value() ? job.run->skip : std::vector<bool>());
  if (job.run.has_value()) {
    if (!job.run->slots.empty()) {
      const size_t pair = static_cast<size_t>(number) % (job.run->slots.size() / 2);
      start.slot = job.run->slots[2 * pair + (step == MoveStep::kUnpack ? 1 : 0)].slot;
      start.received = job.run->slots[2 * pair + 1].slot;
    }
    start.course = job.course;
  }
  out.actions->push_back(PeerAction(std::move(start)));
}

void Worker::Handle(const MovesDone& done, TimePoint now, const Output& out) {
  Update* update = FindLocal(done.update);
  if (update == nullptr || !update->job.has_value()) return;
  Job& job = *update->job;
  const UpdateId id = update->id();
  if (done.step == MoveStep::kCompare) {
    if (!job.comparing) return;
    job.comparing = false;
    if (done.witness) job.witness = Job::Witness::kDue;
    out.reports->push_back(
        CompareDone{id, update->abandoned ? GivenUp() : done.status, done.digests});
    return DropIfOver(id, out);
  }
  for (size_t d = 0; d < std::min(done.bytes_written.size(), job.result.bytes_written.size());
       ++d) {
    job.result.bytes_written[d] += done.bytes_written[d];
  }
  if (!done.status.ok()) {
    job.broken = true;
    if (job.result.failed_destination < 0 && !job.stopped) {
      job.result.failed_destination = done.failed_destination;
    }
    job.Stop(done.status);
  }
  const NodeProgram& program = *job.bound->program;
  const auto round = job.rounds.find(done.round);
  switch (done.step) {
    case MoveStep::kLocal:
      job.local_running = false;
      break;
    case MoveStep::kPack:
      if (round == job.rounds.end()) return;
      round->second.packing = false;
      round->second.packed = true;
      // The sums have the digests of a round that was packed before already.
      if (done.round >= job.packed_before) Add(done.sections, program.outgoing, &job.sent);
      break;
    case MoveStep::kUnpack:
      if (round == job.rounds.end()) return;
      round->second.unpacking = false;
      round->second.over = round->second.unpacked = true;
      Add(done.sections, program.incoming, &job.received);
      break;
    case MoveStep::kWitness:
      job.witness = job.witness == Job::Witness::kBefore ? Job::Witness::kRun : Job::Witness::kDone;
      break;
    case MoveStep::kCompare:
      break;
  }
  AdvanceRun(update, now, out);
  DropIfOver(id, out);
}

// False: the collective is not a round of a program.
bool Worker::FinishRound(const WireDone& done, TimePoint now, const Output& out) {
  for (auto& [id, update] : updates_) {
    if (!update.job.has_value() || !update.job->run.has_value()) continue;
    Job& job = *update.job;
    if (job.run->communicator != done.communicator || done.seq < job.run->wire_seq) continue;
    const auto number =
        job.course.first + static_cast<int64_t>(done.seq.value() - job.run->wire_seq.value());
    const auto round = job.rounds.find(number);
    if (round == job.rounds.end() || !round->second.on_wire) continue;
    const UpdateId update_id = id;
    round->second.on_wire = false;
    job.CountLinks(done);
    if (!done.status.ok()) {
      job.result.wire_failed = true;
      job.Stop(done.status);
    } else if (!job.stopped) {
      if (job.bound->program->Unpacks(number, job.course)) {
        round->second.unpacking = true;
        StartStep(&update, MoveStep::kUnpack, number, out);
      } else {
        round->second.over = true;
      }
    }
    AdvanceRun(&update, now, out);
    GiveWireBackIfQuiet(out);
    DropIfOver(update_id, out);
    return true;
  }
  return false;
}

void worker::Job::CountLinks(const WireDone& done_round) {
  const std::vector<WireUse> before = std::exchange(uses, done_round.uses);
  if (before.size() != uses.size()) return;
  for (uint32_t peer = 0; peer < run->ranks.size(); ++peer) {
    const uint32_t rank = run->ranks[peer];
    if (rank >= before.size() || uses[rank] == before[rank]) continue;
    std::vector<PeerWireUse>& links = result.links;
    auto link = std::lower_bound(links.begin(), links.end(), peer,
                                 [](const PeerWireUse& l, uint32_t p) { return l.peer < p; });
    if (link == links.end() || link->peer != peer) link = links.insert(link, {peer, 0, {}});
    link->bytes += uses[rank].bytes - before[rank].bytes;
    link->busy += uses[rank].busy - before[rank].busy;
  }
}

void worker::Job::Stop(const absl::Status& status) {
  if (result.status.ok()) result.status = status;
  stopped = true;
}

bool worker::Job::on_wire() const {
  return std::any_of(rounds.begin(), rounds.end(), [](const auto& r) { return r.second.on_wire; });
}

bool worker::Job::running() const {
  if (comparing || local_running || witness == Witness::kBefore || witness == Witness::kAfter) {
    return true;
  }
  return std::any_of(rounds.begin(), rounds.end(), [](const auto& r) {
    return r.second.packing || r.second.on_wire || r.second.unpacking;
  });
}

void Worker::EndRunIfQuiet(Update* update, const Output& out) {
  Job& job = *update->job;
  if (job.done || job.running()) return;
  const NodeProgram& program = *job.bound->program;
  const int64_t rounds = job.run->wired ? program.rounds : 0;
  if (!job.stopped && (!job.local_begun || job.first_round < rounds)) return;
  if (WitnessAfter(update, out)) return;
  job.done = true;
  job.NoteHeldSteps();
  if (!job.broken) job.result.lacks = program.FirstLacking(job.course);
  job.rounds.clear();
  if (job.result.status.ok() && update->verification != Verification::kOff) {
    const auto fold = [](const std::map<uint32_t, std::vector<uint64_t>>& all) {
      return [&all](uint32_t stream) -> std::optional<uint64_t> {
        const auto sums = all.find(stream);
        if (sums == all.end()) return std::nullopt;
        HashChain chain(0);
        for (const uint64_t sum : sums->second) chain.Add(sum);
        return chain.hash();
      };
    };
    job.result.streams = StreamsOf(program, fold(job.sent), fold(job.received));
  }
  out.reports->push_back(job.result);
  VerifyIfWritten(update, out);
}

void worker::Job::NoteHeldSteps() {
  if (!run->wired) return;
  bound->program->Hold(first_round, &course);
  packed_before = std::max(packed_before, first_round + static_cast<int64_t>(rounds.size()));
  // A round that was unpacked out of order had its digests counted, and would be stored once more.
  broken |=
      std::any_of(rounds.begin(), rounds.end(), [](const auto& r) { return r.second.unpacked; });
}

void worker::Job::CheckInvariants() const {
  REFITD_CHECK(!done || !running());
  for (const auto& [number, round] : rounds) {
    REFITD_CHECK(number >= first_round && run.has_value());
    if (round.on_wire) REFITD_CHECK(round.out && issued);  // P5
    REFITD_CHECK(!round.unpacking || (round.out && !round.on_wire));
    REFITD_CHECK(!round.packing || !round.packed);
  }
}

}  // namespace refitd
