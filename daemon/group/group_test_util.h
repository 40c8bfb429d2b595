// A group with members that answer as the test says. Carries out actions as a daemon would, and
// checks at each action what must hold whatever the events:
//   P1 committed goes only to instances of which every element was written (registered) or handed
//      over and acknowledged (staged) in this update, once;
//   P2 Aborted says dirty exactly where something was written since the last commit;
//   P3 versions grow, updates don't overlap;
//   P6 a member is released only when no transfer and no verification touches its memory;
//   P1, P11 what flips in a rollback is the content that it names, which nothing has touched since;
//   every call is answered once; nothing is sent to a member that was released or refused.
#ifndef REFITD_DAEMON_GROUP_GROUP_TEST_UTIL_H_
#define REFITD_DAEMON_GROUP_GROUP_TEST_UTIL_H_

#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/group/bucket_draft_testing.h"
#include "daemon/group/group.h"

namespace refitd {

// Tensors of uint8 keep sizes readable, since an element is a byte.
inline TensorSpec Bytes(std::string name, int64_t elements) {
  return {std::move(name), DType::kUint8, {elements}};
}

// A layout with the whole of each tensor, or with the share of rank `rank` of `of` equal shares of
// its first dimension.
inline std::shared_ptr<const Layout> LayoutOf(const std::vector<TensorSpec>& tensors, int rank = 0,
                                              int of = 1) {
  auto layout = std::make_shared<Layout>();
  layout->tensors = tensors;
  for (uint32_t t = 0; t < tensors.size(); ++t) {
    Piece piece;
    piece.tensor = t;
    piece.box = WholeBox(tensors[t].shape);
    if (!tensors[t].shape.empty()) {
      const int64_t rows = tensors[t].shape[0];
      piece.box.offset[0] = rows * rank / of;
      piece.box.extent[0] = rows * (rank + 1) / of - piece.box.offset[0];
    }
    piece.strides = RowMajorStrides(piece.box.extent);
    layout->pieces.push_back(piece);
  }
  return layout;
}

class TestGroup {
 public:
  struct Engine {
    MemberId id;
    std::string instance;
    DeliveryMode delivery;
    std::shared_ptr<const Layout> layout;
    bool shadowed = false;
  };
  struct Running {
    MovePart transfer;
    std::set<MemberId> touches;
  };
  struct Handed {
    MemberId member;
    Version version;
    PartSeq part;
    SlotGrant slot;
    uint64_t update;
    UpdateId id;
  };

  explicit TestGroup(GroupSpec spec = DefaultSpec(), GroupLimits limits = {})
      : group("g", 7, spec, limits, [this] { return UpdateId(++updates_); }) {}

  static GroupSpec DefaultSpec() {
    GroupSpec spec;
    spec.slot_bytes = 4096;
    spec.slots = 4;
    return spec;
  }

  // ---- members ----

  MemberId NewMember() { return MemberId(++members_); }
  MemberId AttachTrainer(int rank = 0, int world_size = 1) {
    const MemberId id(++members_);
    Do(TrainerAttached{id, {rank, world_size, 1000 + rank, NodeId(), ""}});
    return id;
  }
  MemberId AttachEngine(EngineIdentity who) {
    const MemberId id(++members_);
    engines[id] = {id, who.instance, who.delivery, nullptr};
    Do(EngineAttached{id, std::move(who)});
    if (refused.contains(id)) engines.erase(id);
    return id;
  }
  MemberId InPlaceRank(const std::string& instance, const std::vector<TensorSpec>& tensors,
                       int rank = 0, int world_size = 1) {
    const MemberId id =
        AttachEngine({instance, rank, world_size, DeliveryMode::kInPlace, 2000 + rank, {}, {}});
    Register(id, LayoutOf(tensors, rank, world_size));
    return id;
  }
  // Does what Registered does, for a rank that takes part in catch-ups.
  MemberId MayCatchUp(const std::string& instance, const std::vector<TensorSpec>& tensors,
                      int rank = 0, int world_size = 1, NodeId node = {}) {
    EngineIdentity who{instance, rank, world_size, DeliveryMode::kInPlace, 2000 + rank, {}, {}};
    who.catch_up = true;
    who.node = node;
    const MemberId id = AttachEngine(std::move(who));
    Register(id, LayoutOf(tensors, rank, world_size));
    return id;
  }
  MemberId LoaderRank(const std::string& instance,
                      std::optional<std::vector<TensorSpec>> manifest = std::nullopt, int rank = 0,
                      int world_size = 1) {
    return AttachEngine(
        {instance, rank, world_size, DeliveryMode::kLoader, 3000 + rank, {}, std::move(manifest)});
  }
  void Register(MemberId id, std::shared_ptr<const Layout> layout) {
    engines[id].layout = layout;
    Do(LayoutRegistered{id, std::move(layout)});
  }
  // An in-place rank whose regions have backs.
  MemberId ShadowedRank(const std::string& instance, const std::vector<TensorSpec>& tensors,
                        int rank = 0, int world_size = 1, bool catch_up = false) {
    EngineIdentity who{instance, rank, world_size, DeliveryMode::kInPlace, 2000 + rank, {}, {}};
    who.catch_up = catch_up;
    return ShadowedRank(std::move(who), LayoutOf(tensors, rank, world_size));
  }
  MemberId ShadowedRank(EngineIdentity who, std::shared_ptr<const Layout> layout) {
    const bool wants_staged = who.wants_staged;
    const MemberId id = AttachEngine(std::move(who));
    if (wants_staged) wanting.insert(id);
    engines[id].shadowed = true;
    LayoutRegistered e{id, std::move(layout)};
    e.shadowed = true;
    engines[id].layout = e.layout;
    Do(std::move(e));
    return id;
  }
  void Lose(MemberId id, const std::string& reason = "killed") {
    // When an instance loses its last rank, the instance is gone, and so is its dirty state.
    lost.insert(id);
    const auto it = engines.find(id);
    if (it != engines.end()) {
      const std::string instance = it->second.instance;
      std::erase_if(handed, [id](const Handed& h) { return h.member == id; });
      engines.erase(it);
      Do(MemberLost{id, reason});
      if (std::none_of(engines.begin(), engines.end(),
                       [&](const auto& e) { return e.second.instance == instance; })) {
        dirty.erase(instance);
      }
      return;
    }
    Do(MemberLost{id, reason});
  }

  // ---- calls ----

  CallId Begin(MemberId member, int64_t version) {
    BeginEvent e;
    e.member = member;
    e.version = Version(version);
    e.tensor_count = tensor_count;
    return Begin(e);
  }
  CallId Begin(BeginEvent e) {
    e.call = NewCall();
    Do(e);
    return e.call;
  }
  // Begins an update and answers Ready for its engines, so that it is open for data.
  void Open(BeginEvent e) {
    Begin(std::move(e));
    ReadyAll();
  }
  void Open(MemberId member, int64_t version) {
    Begin(member, version);
    ReadyAll();
  }
  static BucketDraft MakeBucket(MemberId member, int64_t version, int64_t seq,
                                const std::vector<TensorSpec>& tensors) {
    BucketDraft draft;
    draft.member = member;
    draft.version = Version(version);
    draft.seq = seq;
    for (const TensorSpec& tensor : tensors) draft.Add(tensor, 0, *ElementCount(tensor.shape));
    return draft;
  }
  CallId Push(BucketEvent e) {
    e.call = NewCall();
    bucket_of[e.call] = e.member;
    pushed[e.call] = e.bucket;
    Do(e);
    return e.call;
  }
  CallId Push(MemberId member, int64_t version, int64_t seq,
              const std::vector<TensorSpec>& tensors) {
    return Push(MakeBucket(member, version, seq, tensors));
  }
  CallId Commit(MemberId member, int64_t version, int64_t buckets, std::string request_id = "") {
    const CallId call = NewCall();
    Do(CommitEvent{call, member, std::move(request_id), Version(version), buckets, false});
    return call;
  }
  // Commits, and tells that the update brings so many tensors. `ahead`: buckets are on their way.
  CallId CommitCounted(MemberId member, int64_t version, int64_t buckets, int64_t tensors,
                       bool ahead = false) {
    const CallId call = NewCall();
    Do(CommitEvent{call, member, "", Version(version), buckets, ahead, {}, tensors});
    return call;
  }
  // Pushes the whole model in one bucket to the open update and commits it.
  void PushAndCommit(MemberId member, int64_t version, const std::vector<TensorSpec>& model) {
    Push(member, version, 0, model);
    Settle();
    CHECK(Settled(Commit(member, version, 1)) == absl::StatusCode::kOk);
  }
  // Takes the engines to the version: an update of one trainer, from Begin to Commit.
  void Install(MemberId member, int64_t version, const std::vector<TensorSpec>& model) {
    Open(member, version);
    PushAndCommit(member, version, model);
  }
  // Commits while buckets are on their way.
  CallId CommitAhead(MemberId member, int64_t version, int64_t buckets) {
    const CallId call = NewCall();
    Do(CommitEvent{call, member, "", Version(version), buckets, true});
    return call;
  }
  // Registers a trainer rank's shards: the rank's equal share of each tensor.
  void Shards(MemberId trainer, const std::vector<TensorSpec>& tensors, int rank = 0, int of = 1,
              std::vector<uint32_t> pushed = {}) {
    auto layout = std::make_shared<Layout>(*LayoutOf(tensors, rank, of));
    layout->pushed_tensors = std::move(pushed);
    Do(LayoutRegistered{trainer, std::move(layout)});
  }
  CallId Refit(MemberId member, int64_t version, int64_t buckets = 0, std::string request_id = "") {
    RefitEvent e;
    e.member = member;
    e.version = Version(version);
    e.bucket_count = buckets;
    e.request_id = std::move(request_id);
    return Refit(e);
  }
  CallId Refit(RefitEvent e) {
    e.call = NewCall();
    Do(e);
    return e.call;
  }
  CallId Abort(MemberId member, int64_t version, std::string reason = "changed my mind") {
    const CallId call = NewCall();
    Do(AbortEvent{call, member, "", Version(version), std::move(reason)});
    return call;
  }
  // `member` 0: an operator's call. `version`: what is rolled back, if it is not whichever there
  // is.
  CallId Rollback(MemberId member = {}, std::optional<int64_t> version = {}) {
    RollbackEvent e{.call = NewCall(), .member = member, .request_id = ""};
    if (version.has_value()) e.version = Version(*version);
    Do(e);
    return e.call;
  }
  CallId ReleasePrevious(MemberId member = {}) {
    const CallId call = NewCall();
    Do(ReleasePreviousEvent{call, member});
    return call;
  }
  CallId Lease(MemberId member, int64_t version, Duration wait = {}) {
    const CallId call = NewCall();
    Do(LeaseSlotEvent{call, member, Version(version), wait});
    return call;
  }
  CallId Release(MemberId member, SlotGrant grant) {
    const CallId call = NewCall();
    Do(ReleaseSlotEvent{call, member, grant});
    return call;
  }
  CallId NewCall() {
    const CallId call(++calls_);
    asked.insert(call);
    return call;
  }

  // ---- answers of engines and of the data plane ----

  // Answers the member's last Prepare of the version.
  void Ready(MemberId member, int64_t version) {
    const auto prepare = std::find_if(
        prepares.rbegin(), prepares.rend(),
        [&](const SendPrepare& p) { return p.member == member && p.version == Version(version); });
    REQUIRE(prepare != prepares.rend());
    AnswerReady(member, prepare->update);
  }
  // The member has flipped for the running update. `stopped`: as ReadyEvent.
  void Flipped(MemberId member, std::optional<Duration> stopped = {}) {
    std::erase_if(prepared, [&](const auto& p) { return p.first == member; });
    AnswerReady(member, assembled->id, stopped);
  }
  // The member has processed the staged version.
  void Processed(MemberId member) {
    std::erase(processing, member);
    Do(ProcessedEvent{member, assembled->id});
  }
  // A rank that is ready for an update reads no slots of earlier updates.
  void AnswerReady(MemberId member, UpdateId update, std::optional<Duration> stopped = {}) {
    std::erase_if(handed, [&](const Handed& h) { return h.member == member && h.id < update; });
    if (engines.contains(member) && engines[member].shadowed) flipped_.insert({member, update});
    Do(ReadyEvent{member, update, stopped});
  }
  // All engine ranks that were prepared and have not answered answer Ready.
  void ReadyAll() {
    for (const auto& [member, update] : std::exchange(prepared, {})) {
      if (!lost.contains(member)) AnswerReady(member, update);
    }
  }
  // The engine fails the update, which may have committed already.
  void Fail(MemberId member, UpdateId update, std::string reason) {
    dirty.insert(engines.at(member).instance);
    Do(EngineFailed{member, update, std::move(reason)});
  }
  // The method that an executor might choose with kAuto: every other part goes by the chain.
  static BroadcastMethod MethodOf(const MovePart& t) {
    if (t.broadcast != BroadcastMethod::kAuto) return t.broadcast;
    return t.part.value() % 2 == 0 ? BroadcastMethod::kChain : BroadcastMethod::kDirect;
  }
  void Finish(size_t index, absl::Status status = absl::OkStatus(), int failed = -1) {
    const Running done = running.at(index);
    running.erase(running.begin() + static_cast<int64_t>(index));
    TransferDone e{done.transfer.update, done.transfer.part, status, {}, failed, {}};
    for (size_t i = 0; done.transfer.digests && i < done.transfer.content->ranges.size(); ++i) {
      e.digests.push_back(digests[done.transfer.content->tensor(i).name]);
    }
    e.broadcast = MethodOf(done.transfer);
    e.bytes_written = BytesInto(done.transfer);
    if (status.ok()) RecordWritten(done.transfer);
    Do(e);
  }
  void FinishAll() {
    while (!running.empty()) Finish(0);
  }
  void AckOne(size_t index) {
    const Handed h = handed.at(index);
    handed.erase(handed.begin() + static_cast<int64_t>(index));
    acked_[{h.member, h.update}].insert(h.part);
    Do(AckEvent{h.member, h.id, h.part});
  }
  // The plan has only the fields that the group reads.
  void FinishCompile(absl::Status status = absl::OkStatus(), bool replicas = false,
                     int64_t wire_bytes = 0) {
    REQUIRE(compiling.has_value());
    auto plan = std::make_shared<RefitPlan>();
    plan->routes.tensors = Moved(*compiling);
    plan->content = ContentOf(compiling->sources, compiling->destinations, compiling->options);
    plan->routes.wire_bytes = wire_bytes;
    // So many tensors that a version compares a part of them.
    for (uint64_t i = 0; replicas && i < 300; ++i) {
      plan->replicas.boxes.emplace_back().hash = i << 32;
      plan->replicas.by_hash.emplace_back(i << 32, static_cast<int64_t>(i + 1));
      plan->replicas.tensors = 300;
    }
    const ProgramId id = compiling->program;
    compiling.reset();
    Do(RefitPlanned{id, status, status.ok() ? plan : nullptr});
  }
  void FinishCompare(absl::Status status = absl::OkStatus()) {
    REQUIRE(comparing.has_value());
    const UpdateId update = comparing->update;
    comparing.reset();
    Do(CompareDone{update, std::move(status)});
  }
  void FinishRefit(absl::Status status = absl::OkStatus(), int failed = -1) {
    REQUIRE(refitting.has_value());
    RefitDone done{refitting->update, status, {}, failed};
    done.bytes_written.resize(assembled->destinations.size());
    for (size_t d = 0; d < assembled->destinations.size() && status.ok(); ++d) {
      const auto engine = engines.find(assembled->destinations[d]);
      if (refitting->skip[d] || engine == engines.end()) continue;
      for (const TensorSpec& tensor : assembled->use->plan->routes.tensors) {
        for (const Piece& piece : engine->second.layout->pieces) {
          if (engine->second.layout->tensors[piece.tensor].name != tensor.name) continue;
          done.bytes_written[d] += ElementCount(piece.box) * ElementBytes(tensor.dtype);
        }
        CHECK(written_[engine->first][tensor.name].Add(0, *ElementCount(tensor.shape)));
      }
    }
    refitting.reset();
    Do(std::move(done));
  }
  void FinishVerify(absl::Status status = absl::OkStatus(), std::vector<uint32_t> failed = {},
                    std::vector<uint64_t> content = {}) {
    REQUIRE(verifying.has_value());
    const UpdateId update = verifying->update;
    verifying.reset();
    verify_touches.clear();
    Do(VerifyDone{update, std::move(status), std::move(failed), std::move(content)});
  }
  // Answers until nothing is left to answer.
  void Settle() {
    for (bool busy = true; busy;) {
      busy = false;
      if (!prepared.empty()) ReadyAll();
      while (!running.empty() || !handed.empty() || verifying.has_value()) {
        busy = true;
        if (!running.empty()) {
          Finish(0);
        } else if (!handed.empty()) {
          AckOne(0);
        } else {
          FinishVerify();
        }
      }
    }
  }
  // The code of a call's answer, once nothing is left to answer.
  absl::StatusCode Settled(CallId call) {
    Settle();
    return Code(call);
  }
  void Advance(Duration by) {
    now += by;
    Do(Tick{});
  }
  // Time passes to the next deadline.
  void Expire() {
    const auto due = group.NextDeadline();
    REQUIRE(due.has_value());
    now = std::max(now, *due);
    Do(Tick{});
    const auto after = group.NextDeadline();
    if (after.has_value()) CHECK(*after > now);  // all that was due is done
  }

  const Reply* Answer(CallId call) const {
    const auto it = replies.find(call);
    return it == replies.end() ? nullptr : &it->second;
  }
  absl::StatusCode Code(CallId call) const {
    const Reply* reply = Answer(call);
    REQUIRE(reply != nullptr);
    return reply->status.code();
  }
  std::string Text(CallId call) const {
    const Reply* reply = Answer(call);
    REQUIRE(reply != nullptr);
    return std::string(reply->status.message());
  }
  template <typename Payload>
  Payload Get(CallId call) const {
    const Reply* reply = Answer(call);
    REQUIRE(reply != nullptr);
    INFO(reply->status.ToString());
    REQUIRE(reply->status.ok());
    return std::get<Payload>(reply->payload);
  }
  InstanceView Instance(const std::string& name) const {
    for (InstanceView& view : group.View(now).instances) {
      if (view.name == name) return view;
    }
    FAIL("no instance " << name);
    return {};
  }
  int FreeSlots() const {
    int free = 0;
    for (const SlotView& slot : group.View(now).slots) free += slot.state == SlotState::kFree;
    return free;
  }

  void Do(GroupEvent event) {
    if (const auto* e = std::get_if<LayoutRegistered>(&event)) sides_.erase(e->member);
    GroupActions actions;
    group.Handle(event, now, &actions);
    group.CheckInvariants();
    for (const GroupAction& action : actions) {
      std::visit([this](const auto& a) { On(a); }, action);
    }
    // Daemons are asked before a binding's first run, also where there are no replicas.
    if (comparing.has_value() && assembled->use->plan->replicas.boxes.empty()) FinishCompare();
    // The coordinator feeds this event once it has sent the update to every node.
    if (announces && std::exchange(unannounced_, false)) Do(UpdateAnnounced{assembled->id});
  }

  Group group;
  TimePoint now{std::chrono::hours(1)};
  int64_t tensor_count = 0;  // the count that Begin names
  std::map<std::string, uint64_t>
      digests;  // by tensor: what transfers tell of it if they are asked

  std::map<MemberId, Engine> engines;  // attached
  std::set<CallId> asked;
  std::map<CallId, Reply> replies;
  std::map<CallId, MemberId> bucket_of;
  std::map<CallId, std::shared_ptr<const CheckedBucket>> pushed;
  std::vector<std::pair<MemberId, UpdateId>> prepared;  // unanswered
  std::vector<SendPrepare> prepares;                    // all
  std::vector<SendFlip> flips;                          // all
  std::vector<SendStaged> staged;                       // all
  std::vector<MemberId> processing;  // were sent Staged, and neither answered nor got more
  bool announces = true;             // the group gets an event when every node was sent the update
  std::vector<Running> running;
  std::vector<Handed> handed;  // unacknowledged
  std::vector<SendPart> parts;
  std::shared_ptr<const UpdateRecord> assembled;  // the last one
  std::optional<PlanRefit> compiling;
  int compiled = 0;  // how many compilations were asked for
  std::optional<StartCompare> comparing;
  int compares = 0;  // how many were asked for
  bool puts_out =
      false;  // trainers that were welcome may be refused: another identity owns the group now
  std::optional<StartRefit> refitting;
  std::optional<VerifyUpdate> verifying;
  std::set<MemberId> verify_touches;
  std::vector<SendCommitted> committed;
  std::vector<SendAborted> aborted;
  std::vector<SendDraining> draining;
  std::vector<UpdateId> overdue;
  std::vector<UpdateId> ended;
  std::vector<UpdateEnded> catch_ups;
  std::set<MemberId> wanting;  // engine ranks that asked for Staged
  std::set<MemberId> welcome;
  std::map<MemberId, absl::Status> refused;
  std::set<MemberId> lost;
  std::set<MemberId> released;
  std::set<std::string> dirty;  // instances written since their last commit
  std::vector<LogLine> log;

 private:
  using Written = std::map<std::string, IntervalSet>;
  // The versions whose content lies in a shadowed rank's memory; nullopt: of none in full.
  struct Sides {
    std::optional<Version> front;
    std::optional<Version> back;
  };

  std::vector<int64_t> BytesInto(const MovePart& t) const {
    std::vector<int64_t> bytes(assembled->destinations.size());
    for (size_t d = 0; d < bytes.size(); ++d) {
      if (t.skip[d]) continue;
      ForEachCommon(t, d, [&](const TensorSpec& tensor, const Box& box) {
        bytes[d] += ElementCount(box) * ElementBytes(tensor.dtype);
      });
    }
    return bytes;
  }
  template <typename F>
  void ForEachCommon(const MovePart& t, size_t d, F f) const {
    const Layout& layout = *assembled->index->destinations()[d];
    for (const TensorRange& range : t.content->ranges) {
      const TensorSpec& tensor = t.content->bucket->tensors[range.tensor];
      for (const Box& box : BoxesOfRange(tensor.shape, range.start, range.count)) {
        for (const Piece& piece : layout.pieces) {
          if (layout.tensors[piece.tensor].name != tensor.name) continue;
          const auto common = Intersect(box, piece.box);
          if (common.has_value()) f(tensor, *common);
        }
      }
    }
  }
  void RecordWritten(const MovePart& t) {
    for (size_t d = 0; d < assembled->destinations.size(); ++d) {
      if (t.skip[d]) continue;
      for (const TensorRange& range : t.content->ranges) {
        const std::string& name = t.content->bucket->tensors[range.tensor].name;
        CHECK(
            written_[assembled->destinations[d]][name].Add(range.start, range.start + range.count));
      }
    }
  }
  // Whether the running update or catch-up, or else the last one, shows the member as evicted.
  bool Evicted(MemberId member) const {
    const std::optional<UpdateView> view = group.ViewLatest(now);
    const auto engine = engines.find(member);
    if (!view.has_value() || engine == engines.end()) return true;
    return std::any_of(view->instances.begin(), view->instances.end(),
                       [&](const InstanceOutcome& o) {
                         return o.instance == engine->second.instance && !o.committed &&
                                !o.reason.empty() && o.reason != view->reason;
                       });
  }
  void CheckAlive(MemberId member) const {
    CHECK(welcome.contains(member));
    CHECK_FALSE(refused.contains(member));
    CHECK_FALSE(released.contains(member));
  }

  void CheckWritten(const Engine& engine) {
    for (uint32_t t = 0; t < engine.layout->tensors.size(); ++t) {
      const TensorSpec& tensor = engine.layout->tensors[t];
      const auto& only = group.spec().engine_only_tensors;
      if (std::find(only.begin(), only.end(), tensor.name) != only.end()) continue;
      const auto& pieces = engine.layout->pieces;
      if (std::none_of(pieces.begin(), pieces.end(),
                       [t](const Piece& piece) { return piece.tensor == t; })) {
        continue;  // the tensor's bytes are another tensor's
      }
      CAPTURE(tensor.name, engine.instance);
      CHECK(written_[engine.id][tensor.name].total() == *ElementCount(tensor.shape));
    }
  }
  // P2: the instance serves what the update writes, or it has backs.
  void NoteWrite(MemberId member) {
    const auto engine = engines.find(member);
    if (engine == engines.end()) return;
    if (engine->second.shadowed) {
      sides_[member].back.reset();
    } else {
      dirty.insert(engine->second.instance);
    }
  }
  // Fronts and backs have changed places. A rollback has written nothing, so that its content must
  // have been in the backs.
  void NoteFlip(const SendCommitted& a) {
    Sides& sides = sides_[a.member];
    std::swap(sides.front, sides.back);
    if (assembled->content.has_value()) {
      CHECK(a.content == assembled->content);
      CHECK(sides.front == a.content);
    } else {
      sides.front = a.content.value_or(a.version);
    }
  }

  void On(const Reply& a) {
    CHECK(asked.contains(a.call));
    CHECK(replies.emplace(a.call, a).second);  // once
    if (bucket_of.contains(a.call)) {
      // The bucket's source is not read any more.
      for (const Running& r : running) CHECK(r.transfer.bucket_call != a.call);
    }
  }
  void On(const SendPrepare& a) {
    CheckAlive(a.member);
    CHECK(a.remaining > Duration(0));
    prepared.emplace_back(a.member, a.update);
    prepares.push_back(a);
    written_.erase(a.member);
    delivered_.erase(a.member);
    next_part_.erase(a.member);
  }
  void On(const SendStaged& a) {
    CheckAlive(a.member);
    CHECK(a.remaining > Duration(0));
    CHECK(wanting.contains(a.member));
    CHECK(engines.at(a.member).shadowed);
    for (const auto& [id, update] : prepared) {
      CHECK((lost.contains(id) || Evicted(id)));  // nobody else is paused meanwhile
    }
    CHECK(running.empty());
    CHECK_FALSE(verifying.has_value());
    // P1: what is processed is the version, in full.
    if (a.content.has_value()) {
      CHECK(sides_[a.member].back == a.content);
    } else {
      CheckWritten(engines.at(a.member));
    }
    processing.push_back(a.member);
    staged.push_back(a);
  }
  void On(const SendFlip& a) {
    std::erase(processing, a.member);
    CheckAlive(a.member);
    CHECK(a.remaining > Duration(0));
    CHECK(a.remaining <= std::chrono::seconds(30));  // limits.ready_ms
    CHECK(engines.at(a.member).shadowed);
    CHECK(running.empty());
    CHECK_FALSE(verifying.has_value());
    CHECK_FALSE(refitting.has_value());
    // P1: before it is put into place.
    if (a.content.has_value()) {
      CHECK(sides_[a.member].back == a.content);
    } else {
      CheckWritten(engines.at(a.member));
    }
    prepared.emplace_back(a.member, a.update);
    flips.push_back(a);
  }
  void On(const SendPart& a) {
    CheckAlive(a.member);
    CHECK(a.part == PartSeq(next_part_[a.member]++));
    CHECK(a.content->bytes <= group.spec().slot_bytes);
    for (const TensorRange& range : a.content->ranges) {
      const TensorSpec& tensor = a.content->bucket->tensors[range.tensor];
      CHECK(delivered_[a.member][tensor.name].Add(range.start, range.start + range.count));
    }
    for (const Handed& h : handed) {
      // A slot that a rank still reads is not handed out again, unless that rank was evicted.
      CHECK((h.slot.slot != a.slot.slot || h.slot == a.slot || Evicted(h.member)));
    }
    if (engines.contains(a.member)) dirty.insert(engines[a.member].instance);
    handed.push_back({a.member, a.version, a.part, a.slot, updates_, a.update});
    parts.push_back(a);
  }
  void On(const SendCommitted& a) {
    CheckAlive(a.member);
    CHECK(running.empty());
    CHECK_FALSE(verifying.has_value());
    CHECK_FALSE(refitting.has_value());
    CHECK((a.version > last_committed_ || a.version == group.version()));
    last_committed_ = a.version;
    committed.push_back(a);
    const auto it = engines.find(a.member);
    if (it == engines.end()) return;
    const Engine& engine = it->second;
    dirty.erase(engine.instance);
    if (engine.shadowed) NoteFlip(a);
    if (engine.shadowed) CHECK(flipped_.contains({a.member, UpdateId(updates_)}));
    if (assembled->content.has_value()) {
      CHECK(engine.shadowed);
    } else if (engine.delivery == DeliveryMode::kInPlace) {
      CheckWritten(engine);
    } else {
      CHECK(static_cast<int64_t>(acked_[{a.member, updates_}].size()) == next_part_[a.member]);
      for (const Handed& h : handed) CHECK((h.member != a.member || h.update != updates_));
    }
  }
  void On(const SendAborted& a) {
    std::erase(processing, a.member);
    CheckAlive(a.member);
    for (const Running& r : running) CHECK_FALSE(r.touches.contains(a.member));
    CHECK_FALSE(verify_touches.contains(a.member));
    CHECK_FALSE((engines.contains(a.member) && RefitTouches(a.member)));
    std::erase_if(prepared, [&](const auto& p) { return p.first == a.member; });
    aborted.push_back(a);
    // A rank that was evicted holds up nobody by the slots that it still reads.
    if (Evicted(a.member)) {
      std::erase_if(handed, [&](const Handed& h) { return h.member == a.member; });
    }
    const auto it = engines.find(a.member);
    CHECK(a.dirty == (it != engines.end() && dirty.contains(it->second.instance)));
  }
  void On(const SendDraining& a) {
    CheckAlive(a.member);
    draining.push_back(a);
  }
  void On(const MovePart& a) {
    CHECK(a.update == UpdateId(updates_));
    CHECK(bucket_of.contains(a.bucket_call));
    // The call is unanswered, so the bucket's source is still there.
    CHECK(Answer(a.bucket_call) == nullptr);
    // The bucket that was checked is moved itself: no list of tensors was copied on the way.
    CHECK(a.content->bucket == pushed[a.bucket_call]);
    CheckAlive(a.trainer);
    CHECK((a.slot.has_value() || a.broadcast == BroadcastMethod::kDirect));
    for (const Running& other : running) {
      // A slot serves one part at a time.
      CHECK((!a.slot.has_value() || other.transfer.slot != a.slot));
    }
    Running r{a, {a.trainer}};
    for (size_t d = 0; d < assembled->destinations.size(); ++d) {
      if (a.skip[d]) continue;
      const MemberId to = assembled->destinations[d];
      bool any = false;
      ForEachCommon(a, d, [&](const TensorSpec&, const Box&) { any = true; });
      if (!any) continue;
      CheckAlive(to);
      r.touches.insert(to);
      NoteWrite(to);
    }
    running.push_back(std::move(r));
  }
  void On(const VerifyUpdate& a) {
    CHECK(running.empty());
    CHECK_FALSE(verifying.has_value());
    for (size_t d = 0; d < assembled->destinations.size(); ++d) {
      if (!a.skip[d]) verify_touches.insert(assembled->destinations[d]);
    }
    verifying = a;
  }
  void On(const ReleaseMember& a) {
    CHECK(lost.contains(a.member));
    for (const Running& r : running) CHECK_FALSE(r.touches.contains(a.member));
    CHECK_FALSE(verify_touches.contains(a.member));
    CHECK_FALSE(RefitTouches(a.member));
    CHECK(released.insert(a.member).second);
  }
  void On(const UpdateAssembled& a) {
    assembled = a.update;
    unannounced_ = true;
    for (size_t d = 0; d < assembled->destinations.size(); ++d) {
      written_.erase(assembled->destinations[d]);
    }
  }
  void On(const NodeOutOfUpdate&) {}
  void On(const UpdateAbandoned&) {}
  void On(const CleanUpOverdue& a) { overdue.push_back(a.update); }
  void On(const UpdateEnded& a) {
    CHECK(running.empty());
    CHECK_FALSE(verifying.has_value());
    CHECK_FALSE(refitting.has_value());
    CHECK_FALSE(comparing.has_value());
    ended.push_back(a.update);
    if (a.catch_up) catch_ups.push_back(a);
  }
  void On(const RefuseMember& a) {
    if (!puts_out) CHECK_FALSE(welcome.contains(a.member));
    CHECK(refused.emplace(a.member, a.status).second);
  }
  void On(const WelcomeMember& a) {
    CHECK_FALSE(refused.contains(a.member));
    CHECK(welcome.insert(a.member).second);
  }
  void On(const StateChanged&) {}
  void On(const PlanRefit& a) {
    CHECK_FALSE(compiling.has_value());  // one compilation at a time
    compiling = a;
    ++compiled;
  }
  void On(const StartCompare& a) {
    CHECK(a.update == UpdateId(updates_));
    CHECK_FALSE(comparing.has_value());
    CHECK_FALSE(refitting.has_value());
    comparing = a;
    ++compares;
  }
  void On(const StartRefit& a) {
    CHECK(a.update == UpdateId(updates_));
    CHECK_FALSE(refitting.has_value());
    CHECK_FALSE(comparing.has_value());
    for (const MemberId source : assembled->use->sources) {
      CheckAlive(source);
      // P1: an instance that gives is clean.
      if (assembled->use->catch_up) CHECK_FALSE(dirty.contains(engines.at(source).instance));
    }
    for (size_t d = 0; d < assembled->destinations.size(); ++d) {
      if (a.skip[d]) continue;
      CheckAlive(assembled->destinations[d]);
      NoteWrite(assembled->destinations[d]);
    }
    refitting = a;
  }
  // A program moves the tensors of the trainers' layouts, except pushed tensors.
  static std::vector<TensorSpec> Moved(const PlanRefit& compile) {
    std::map<std::string, TensorSpec> moved;
    for (const RouteMember& source : compile.sources) {
      for (const TensorSpec& tensor : source.layout->tensors) moved[tensor.name] = tensor;
    }
    for (const std::string& name : compile.options.skip_tensors) moved.erase(name);
    for (const std::string& name : compile.options.engine_only) moved.erase(name);
    std::vector<TensorSpec> list;
    for (const auto& [name, tensor] : moved) list.push_back(tensor);
    return list;
  }
  bool RefitTouches(MemberId member) const {
    if (comparing.has_value() || refitting.has_value()) {
      const auto& sources = assembled->use->sources;
      if (std::find(sources.begin(), sources.end(), member) != sources.end()) return true;
    }
    if (!refitting.has_value()) return false;
    for (size_t d = 0; d < assembled->destinations.size(); ++d) {
      if (assembled->destinations[d] == member && !refitting->skip[d]) return true;
    }
    return false;
  }
  void On(const LogLine& a) { log.push_back(a); }

  uint64_t members_ = 0;
  uint64_t calls_ = 0;
  uint64_t updates_ = 0;
  Version last_committed_{-1};
  std::map<MemberId, Written> written_;    // of the running update
  std::map<MemberId, Written> delivered_;  // of the running update
  std::map<std::pair<MemberId, uint64_t>, std::set<PartSeq>> acked_;
  std::map<MemberId, int64_t> next_part_;
  std::map<MemberId, Sides> sides_;
  std::set<std::pair<MemberId, UpdateId>> flipped_;  // that answered Ready
  bool unannounced_ = false;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_GROUP_TEST_UTIL_H_
