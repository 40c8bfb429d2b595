// Members' layouts: checked against the member's regions, and registered with the group's
// coordinator.
#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "daemon/node/life.h"
#include "daemon/node/member_calls.h"
#include "daemon/node/restore.h"
#include "transport/base/errors.h"
#include "transport/base/status.h"
#include "transport/plan/block_scales.h"

namespace refitd {
namespace {

// The layout, whose bytes count as long as anybody refers to it.
std::shared_ptr<const Layout> Counted(Layout layout, ByteLedger::Hold hold) {
  struct Both {
    Layout layout;
    ByteLedger::Hold hold;
  };
  const auto both = std::make_shared<const Both>(Both{std::move(layout), std::move(hold)});
  return {both, &both->layout};
}

// A digest other than this one and other than 0: it matches no claim.
uint64_t OtherThan(uint64_t digest) { return digest == 1 ? 2 : 1; }

}  // namespace

absl::Status MemberCalls::CheckLease(const Caller& caller, bool engine) {
  const StateLock lock(&state_.mutex);
  return Authenticate(state_, caller, engine).status();
}

// Checking a big layout takes long, so it is done outside the mutex, against a copy of the regions.
absl::StatusOr<std::shared_ptr<const Layout>> MemberCalls::CheckLayout(const Caller& caller,
                                                                       bool engine, Layout layout,
                                                                       ByteLedger::Hold hold,
                                                                       OutsideBytes* outside) {
  // P8: the copy has no mappings, since a region that is released meanwhile must lose its mapping
  // at once.
  struct Region {
    int64_t bytes = 0;
    Access access = Access::kReadOnly;
    bool on_device = false;
    bool has_descriptor = false;
  };
  std::map<RegionId, Region> regions;
  {
    const StateLock lock(&state_.mutex);
    REFITD_ASSIGN_OR_RETURN(const MemberRecord* member, Authenticate(state_, caller, engine));
    for (const auto& [id, region] : member->regions) {
      regions.emplace_hint(regions.end(), id,
                           Region{region.memory.bytes, region.access, region.on_device,
                                  region.descriptor != nullptr});
    }
  }
  const auto region_bytes = [&regions](RegionId id) -> std::optional<int64_t> {
    const auto it = regions.find(id);
    return it == regions.end() ? std::nullopt : std::optional<int64_t>(it->second.bytes);
  };
  if (!engine && !layout.ties.empty()) {
    return InvalidField("layout.tied_tensors",
                        "layout.tied_tensors has {} entries: only engines have tied tensors",
                        layout.ties.size());
  }
  if (!engine && !layout.backs.empty()) {
    return InvalidField("layout.backs", "layout.backs has {} entries: only engines have backs",
                        layout.backs.size());
  }
  if (engine) TieSharedTensors(&layout);
  REFITD_RETURN_IF_ERROR(ValidateLayout(layout, region_bytes, /*destination=*/engine));
  REFITD_RETURN_IF_ERROR(ValidateBacks(layout, region_bytes));
  if (!engine) return Counted(std::move(layout), std::move(hold));
  if (!layout.pushed_tensors.empty()) {
    return InvalidField("layout.pushed_tensors",
                        "layout.pushed_tensors has {} entries: an engine rank pushes none",
                        layout.pushed_tensors.size());
  }
  // A layout that a refit would refuse must not be filled by pushes either.
  REFITD_RETURN_IF_ERROR(CheckFloat8Scales(layout));
  for (const Piece& piece : layout.pieces) {
    if (regions.at(piece.region).access != Access::kReadWrite) {
      return InvalidField("layout.piece_region", "region {} of tensor '{}' is not writable",
                          piece.region, layout.tensors[piece.tensor].name);
    }
  }
  for (const RegionBack& pair : layout.backs) {
    for (const RegionId side : {pair.region, pair.back}) {
      if (regions.at(side).on_device || regions.at(side).has_descriptor) continue;
      return InvalidField("layout.backs",
                          "layout.backs: region {} was registered without keep, which the daemon "
                          "needs to compare an arena's sides",
                          side);
    }
    const bool writable = regions.at(pair.back).access == Access::kReadWrite;
    if (writable && regions.at(pair.back).on_device == regions.at(pair.region).on_device) continue;
    return InvalidField("layout.backs", "layout.backs: region {} can't be the back of region {}",
                        pair.back, pair.region);
  }
  *outside = BytesOutside(layout, region_bytes);
  REFITD_RETURN_IF_ERROR(hold.GrowBy(BytesOf(*outside)));
  return Counted(std::move(layout), std::move(hold));
}

absl::StatusOr<MemberRecord*> MemberCalls::AdmitLayout(const Caller& caller, bool engine,
                                                       const Layout& layout) {
  REFITD_ASSIGN_OR_RETURN(MemberRecord * member, Authenticate(state_, caller, engine));
  REFITD_RETURN_IF_ERROR(state_.calls.Admit());
  for (const Piece& piece : layout.pieces) {
    if (!member->regions.contains(piece.region)) {
      return Error(absl::StatusCode::kNotFound, "region {} was released meanwhile", piece.region);
    }
  }
  for (const RegionBack& pair : layout.backs) {
    if (member->regions.contains(pair.back) && member->regions.contains(pair.region)) continue;
    return Error(absl::StatusCode::kNotFound, "region {} was released meanwhile", pair.back);
  }
  if (!layout.backs.empty() && layout.flips != member->flips) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "layout.flips: {}, but commits have exchanged regions and backs {} times",
                 layout.flips, member->flips);
  }
  // The greatest generation of the registered layout and of those still under way.
  std::optional<uint64_t> greatest;
  if (member->layout != nullptr) greatest = member->layout->binding_generation;
  for (const std::shared_ptr<const Layout>& pending : state_.calls.LayoutsOf(member->id)) {
    greatest = std::max(greatest.value_or(0), pending->binding_generation);
  }
  if (greatest.has_value() && layout.binding_generation <= *greatest) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "binding_generation: {} is not greater than the registered {}",
                 layout.binding_generation, *greatest);
  }
  REFITD_RETURN_IF_ERROR(state_.groups.Of(*member)->machine->CanRegisterLayout(member->id));
  return member;
}

void MemberCalls::LayoutRefused(const Caller& caller, const absl::Status& why) {
  if (!absl::IsResourceExhausted(why)) return;
  StateLock lock(&state_.mutex);
  const absl::StatusOr<const MemberRecord*> member = Authenticate(state_, caller, /*engine=*/true);
  if (!member.ok()) return;
  const std::string group = (*member)->group;
  lock.Handle(group, EngineFailed{(*member)->id, UpdateId(), Message(why), why});
}

void MemberCalls::RegisterLayout(CallId call, const Caller& caller, bool engine, Layout layout,
                                 LayoutReply reply, ByteLedger::Hold hold) {
  OutsideBytes outside;
  absl::StatusOr<std::shared_ptr<const Layout>> checked =
      CheckLayout(caller, engine, std::move(layout), std::move(hold), &outside);
  if (!checked.ok()) {
    if (engine) LayoutRefused(caller, checked.status());
    return reply(checked.status());
  }
  const RegisteredLayout registered{
      (*checked)->Digest(), static_cast<int64_t>((*checked)->pieces.size()), (*checked)->Bytes()};
  HandLayout(
      {call, caller, engine, *std::move(checked), std::move(reply), registered, std::move(outside)},
      std::nullopt);
}

// The call is answered later: by HandLayout or Refuse. A caller that gives it up meanwhile gets no
// layout.
absl::Status MemberCalls::Park(const MemberRecord& member, Registering* r) {
  REFITD_RETURN_IF_ERROR(state_.calls.BeginOpening(r->call, member.id, Calls::kMaxOpening));
  r->parked = true;
  return absl::OkStatus();
}

void MemberCalls::Refuse(const Registering& parked, const absl::Status& why) {
  StateLock lock(&state_.mutex);
  (void)state_.calls.EndOpening(parked.call);
  lock.Answer([reply = parked.reply, why] { reply(why); });
}

// Copies of an earlier lease of the rank, or of its process, may still write to memory that this
// lease shares as well. They end by themselves (P6).
MemberRecord* MemberCalls::EarlierLeaseOf(const MemberRecord& member) {
  const auto earlier = [&member](const MemberRecord& other) {
    const auto& process = member.peer.credentials;
    const auto& others = other.peer.credentials;
    if (!other.lost || !other.engine) return false;
    const int pid = process.has_value() ? process->pid : 0;
    if (pid > 0 && others.has_value() && others->pid == pid) return true;
    return other.group == member.group && other.instance == member.instance &&
           other.rank == member.rank;
  };
  for (const auto& [id, other] : state_.members.all()) {
    if (earlier(other)) return state_.members.Find(id);
  }
  return nullptr;
}

void MemberCalls::Compare(const Registering& parked, std::vector<ComparedSides> sides,
                          const std::string& label, std::optional<uint64_t> content) {
  state_.data_plane->CompareSides(std::move(sides), label,
                                  [this, parked, content](const absl::Status& equal) {
                                    if (!equal.ok()) return Refuse(parked, equal);
                                    HandLayout(parked, content);
                                  });
}

// Gives the layout to the group, once the sides of its arenas were compared where it names nothing.
// If the rank claims a version, its memory was read before: `content`.
void MemberCalls::HandLayout(Registering r, std::optional<uint64_t> content) {
  RegisteredLayout& registered = r.registered;
  StateLock lock(&state_.mutex);
  // P1: an engine that has given up waiting does not exchange these arenas' sides.
  absl::Status status;
  if (std::exchange(r.parked, false)) status = state_.calls.EndOpening(r.call);
  const absl::StatusOr<MemberRecord*> member = AdmitLayout(r.caller, r.engine, *r.layout);
  if (status.ok()) status = member.status();
  if (status.ok() && !r.layout->backs.empty()) {
    if (MemberRecord* const earlier = EarlierLeaseOf(**member); earlier != nullptr) {
      status = Park(**member, &r);
      if (!status.ok()) return lock.Answer([reply = std::move(r.reply), status] { reply(status); });
      earlier->on_erased.push_back([this, r = std::move(r), content] { HandLayout(r, content); });
      return;
    }
    // The rank has no layout, as it asks.
    if (r.layout->backs_differ && (*member)->layout == nullptr &&
        state_.calls.LayoutsOf((*member)->id).empty()) {
      return lock.Answer([reply = std::move(r.reply), registered] { reply(registered); });
    }
    std::vector<ComparedSides> sides;
    if (!r.layout->backs_differ && !std::exchange(r.compared, true)) {
      sides = (*member)->SidesOf(*r.layout, r.outside);
    }
    if (!sides.empty()) status = Park(**member, &r);
    if (!sides.empty() && status.ok()) {
      const auto memory = state_.data_plane->MemoryOf(*state_.groups.Of(**member));
      return lock.Last([this, sides = std::move(sides), label = memory.LabelOf((*member)->id),
                        r = std::move(r), content] { Compare(r, sides, label, content); });
    }
  }
  const bool first = status.ok() && (*member)->claims.has_value() && (*member)->layout == nullptr;
  const bool restores = first && (*member)->kept.has_value();
  // Memory that was not kept holds no version that was.
  if (first && (*member)->restores && !restores) content = OtherThan((*member)->claims->digest);
  const bool other = restores && (*member)->kept->layout_digest != registered.digest;
  if (first && !content.has_value() && !other) {
    status = ReadContent(**member, &r);
    if (status.ok()) return;
  }
  if (status.ok() && restores) {
    const std::string_view differs = DiffersFromKept(**member, registered.digest, content);
    if (!differs.empty()) {
      EndRestore(state_, *member, differs, lock);
      status = Error(absl::StatusCode::kDataLoss,
                     "what is registered is not what was kept, {}: it holds no version", differs);
    }
  }
  if (!status.ok()) {
    lock.Answer([reply = std::move(r.reply), status] { reply(status); });
    return;
  }
  const std::string group = (*member)->group;
  const MemberId id = (*member)->id;
  registered.kept = restores;
  state_.calls.Add(
      r.call, {group,
               [reply = r.reply, registered](const absl::Status& answer, const ReplyPayload&) {
                 if (answer.ok()) return reply(registered);
                 reply(answer);
               },
               nullptr, Calls::PendingLayout{id, r.layout, registered.digest, content, r.outside}});
  lock.Handle(group, LayoutRegistered{id, r.layout, r.call, registered.digest, content.value_or(0),
                                      !r.layout->backs.empty(), r.layout->backs_differ});
}

// In what the rank's first layout is not what was kept; empty: in nothing.
std::string_view MemberCalls::DiffersFromKept(const MemberRecord& member, uint64_t layout_digest,
                                              std::optional<uint64_t> content) const {
  const KeptRank& kept = *member.kept;
  if (kept.layout_digest != layout_digest) return "its layout differs";
  if (content != std::optional(kept.content.digest)) return "its content differs";
  const bool replaced = kept.content.origin != state_.groups.Of(member)->machine->incarnation();
  return replaced ? "the group was replaced" : "";
}

absl::Status MemberCalls::ReadContent(const MemberRecord& member, Registering* r) {
  REFITD_RETURN_IF_ERROR(Park(member, r));
  const GroupRecord& group = *state_.groups.Of(member);
  const absl::Status begun = state_.data_plane->Digest(
      group, member.id, r->layout, [this, r = *r](const absl::StatusOr<uint64_t>& content) {
        if (!content.ok()) return Refuse(r, content.status());
        HandLayout(r, *content);
      });
  if (!begun.ok()) (void)state_.calls.EndOpening(r->call);
  return begun;
}

}  // namespace refitd
