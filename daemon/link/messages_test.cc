#include <google/protobuf/text_format.h>

#include <catch2/catch.hpp>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "daemon/group/bucket_draft_testing.h"
#include "daemon/link/commands.h"
#include "daemon/link/hello.h"
#include "daemon/link/limits.h"
#include "daemon/link/order.h"
#include "daemon/link/reports.h"
#include "transport/base/failure.h"
#include "transport/base/status.h"
#include "transport/plan/route_testing.h"

namespace refitd {
namespace {

constexpr int64_t kMessageBytes = 8 << 20;
constexpr PeerBounds kBounds{.slots = 4, .slot_bytes = 1 << 20};

// ---- lists every field of every value, by structured bindings: a value with a new field does not
// compile until the field is counted here; it is then filled, sent and compared ----

#define FIELDS(T, ...)                               \
  template <typename V>                              \
  requires std::is_same_v<std::remove_const_t<V>, T> \
  auto Fields(V& v) {                                \
    auto& [__VA_ARGS__] = v;                         \
    return std::tie(__VA_ARGS__);                    \
  }
FIELDS(SlotGrant, a, b)
FIELDS(TensorSpec, a, b, c, d)
FIELDS(Derivation, a, b, c)
FIELDS(TensorRange, a, b, c)
FIELDS(CheckedBucket, a, b, c, d, e, f, g, h)
FIELDS(PartContent, a, b, c, d)
FIELDS(TrainerIdentity, a, b, c, d, e, f, g)
FIELDS(MemberLost, a, b)
FIELDS(ReadyEvent, a, b, c)
FIELDS(ProcessedEvent, a, b)
FIELDS(EngineFailed, a, b, c, d)
FIELDS(AckEvent, a, b, c)
FIELDS(LeaseSlotEvent, a, b, c, d, e)
FIELDS(ReleaseSlotEvent, a, b, c)
FIELDS(BucketEvent, a, b, c, d, e, f)
FIELDS(CommitEvent, a, b, c, d, e, f, g, h)
FIELDS(AbortEvent, a, b, c, d, e, f)
FIELDS(RefitEvent, a, b, c, d, e, f, g, h, i, j)
FIELDS(ReleasePreviousEvent, a, b)
FIELDS(PeerCall, a)
FIELDS(CallGone, a)
FIELDS(PeerHeaderAck, a, b, c, d, e)
FIELDS(TransferDone, a, b, c, d, e, f, g, h)
FIELDS(VerifyDone, a, b, c, d)
FIELDS(CommunicatorOpened, a, b, c)
FIELDS(CommunicatorUp, a, b)
FIELDS(PeerWireGranted, a)
FIELDS(PeerWireWaits, a, b)
FIELDS(PeerWireWanted, a)
FIELDS(PeerPong, a)
FIELDS(PeerWelcome, a, b, c, d)
FIELDS(RefuseMember, a, b)
FIELDS(BeginReply, a, b, c, d)
FIELDS(LeaseSlotReply, a, b, c)
FIELDS(BucketReply, a, b)
FIELDS(InstanceOutcome, a, b, c, d, e, f, g)
FIELDS(BroadcastTotals, a, b, c)
FIELDS(LeftOut, a, b, c)
FIELDS(CommitReply, a, b, c, d, e, f, g)
FIELDS(Reply, a, b, c)
FIELDS(PeerHeader, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, w, x, y)
FIELDS(PeerIssue, a, b)
FIELDS(SendPart, a, b, c, d, e, f)
FIELDS(SendAborted, a, b, c, d, e)
FIELDS(SendFlip, a, b, c, d, e)
FIELDS(SendStaged, a, b, c, d, e)
FIELDS(SendDraining, a)
FIELDS(VerifyUpdate, a, b)
FIELDS(PlanMember, a, b)
FIELDS(ReplicaShare, a, b, c)
FIELDS(ReplicaFraction, a, b)
FIELDS(StartCompare, a, b)
FIELDS(StartRefit, a, b, c, d, e, f, g, h, i, j)
FIELDS(PeerStream, a, b, c)
FIELDS(PeerProgramBuilt, a, b, c, d)
FIELDS(CompareDone, a, b, c)
FIELDS(PeerWireUse, a, b, c)
FIELDS(RefitDone, a, b, c, d, e, f, g, h, i)
FIELDS(PeerAbandon, a)
FIELDS(PeerUpdateEnded, a, b, c, d, e, f)
FIELDS(OpenCommunicator, a, b, c)
FIELDS(PeerCommunicatorConnect, a, b, c, d)
FIELDS(CloseCommunicator, a)
FIELDS(PeerWireLock, a)
FIELDS(PeerWireUnlock, a)
FIELDS(PeerPing, a)
FIELDS(PeerIncarnation, a)
FIELDS(PeerOwner, a)
FIELDS(InstanceStanding, a, b, c)
FIELDS(PeerReadiness, a, b, c)
FIELDS(GroupSpec, a, b, c, d, e, f, g, h, i, j)
FIELDS(LinkUp, a, b, c, d, e)
#undef FIELDS
// All fields but incarnation and owner, which the member's own daemon sets.
template <typename V>
requires std::is_same_v<std::remove_const_t<V>, SendCommitted>
auto Fields(V& v) {
  auto& [a, b, incarnation, owner, digest, content] = v;
  (void)incarnation;
  (void)owner;
  return std::tie(a, b, digest, content);
}
// All fields but slots_on_devices, which is never true for a joined daemon's ranks.
template <typename V>
requires std::is_same_v<std::remove_const_t<V>, BeginEvent>
auto Fields(V& v) {
  auto& [a, b, c, d, e, f, g, h, i, j, slots_on_devices, k, l, m] = v;
  (void)slots_on_devices;
  return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m);
}
// All fields but the duration, which the coordinator sets.
template <typename V>
requires std::is_same_v<std::remove_const_t<V>, RollbackEvent>
auto Fields(V& v) {
  auto& [a, b, c, d, duration] = v;
  (void)duration;
  return std::tie(a, b, c, d);
}
// All fields but the index, which is made on arrival.
template <typename V>
requires std::is_same_v<std::remove_const_t<V>, PeerPrepare>
auto Fields(V& v) {
  auto& [a, b, c, d, e, f, g, h, i, index] = v;
  (void)index;
  return std::tie(a, b, c, d, e, f, g, h, i);
}
// All fields but what counts the manifest, which is made on arrival, as are room and digest below.
template <typename V>
requires std::is_same_v<std::remove_const_t<V>, EngineIdentity>
auto Fields(V& v) {
  auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, content, counted, staged] = v;
  (void)counted;
  return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, content, staged);
}
template <typename V>
requires std::is_same_v<std::remove_const_t<V>, PeerAttach>
auto Fields(V& v) {
  auto& [a, b, room] = v;
  (void)room;
  return std::tie(a, b);
}
template <typename V>
requires std::is_same_v<std::remove_const_t<V>, PeerLayout>
auto Fields(V& v) {
  auto& [a, b, c, d, digest, content, room, shadowed, backs_differ] = v;
  (void)digest;
  (void)room;
  return std::tie(a, b, c, d, content, shadowed, backs_differ);
}
// All fields but those from which the coordinator makes the plan's part.
template <typename V>
requires std::is_same_v<std::remove_const_t<V>, PeerProgram>
auto Fields(V& v) {
  auto& [a, b, c, d, e, f, g, h, whole, local_layouts] = v;
  (void)whole;
  (void)local_layouts;
  return std::tie(a, b, c, d, e, f, g, h);
}
std::tuple<> Fields(const EmptyReply& /*reply*/) { return {}; }

template <typename T>
concept HasFields = requires(T& v) {
  Fields(v);
};

// ---- equal ----

template <typename T>
bool Equal(const std::vector<T>& a, const std::vector<T>& b);
template <typename T>
bool Equal(const std::optional<T>& a, const std::optional<T>& b);
template <typename T>
bool Equal(const std::shared_ptr<T>& a, const std::shared_ptr<T>& b);
bool Equal(const std::shared_ptr<const Layout>& a, const std::shared_ptr<const Layout>& b);
bool Equal(const CheckedBucket::Place& a, const CheckedBucket::Place& b);
bool Equal(const std::shared_ptr<const RoutePlan>& a, const std::shared_ptr<const RoutePlan>& b);
template <typename... T>
bool Equal(const std::variant<T...>& a, const std::variant<T...>& b);

template <typename T>
bool Equal(const T& a, const T& b) {
  if constexpr (HasFields<const T>) {
    const auto fields = Fields(a);
    const auto others = Fields(b);
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return (Equal(std::get<I>(fields), std::get<I>(others)) && ...);
    }
    (std::make_index_sequence<std::tuple_size_v<decltype(fields)>>());
  } else {
    return a == b;
  }
}
template <typename T>
bool Equal(const std::vector<T>& a, const std::vector<T>& b) {
  if constexpr (std::is_same_v<T, bool>) {
    return a == b;
  } else {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const T& x, const T& y) { return Equal(x, y); });
  }
}
template <typename T>
bool Equal(const std::optional<T>& a, const std::optional<T>& b) {
  return a.has_value() == b.has_value() && (!a.has_value() || Equal(*a, *b));
}
template <typename T>
bool Equal(const std::shared_ptr<T>& a, const std::shared_ptr<T>& b) {
  return (a == nullptr) == (b == nullptr) && (a == nullptr || Equal(*a, *b));
}
bool Equal(const std::shared_ptr<const Layout>& a, const std::shared_ptr<const Layout>& b) {
  return a->tensors == b->tensors && a->pieces == b->pieces &&
         a->binding_generation == b->binding_generation && a->pushed_tensors == b->pushed_tensors;
}
// Other daemons know a place only by its offset in a slot, so only that is compared.
bool Equal(const CheckedBucket::Place& a, const CheckedBucket::Place& b) {
  return a.byte_offset == b.byte_offset;
}
bool Equal(const std::shared_ptr<const RoutePlan>& a, const std::shared_ptr<const RoutePlan>& b) {
  if (a == nullptr || b == nullptr) return a == b;
  return DigestOf(*a) == DigestOf(*b) && a->tensors == b->tensors &&
         a->longest_stream == b->longest_stream && a->wire_bytes == b->wire_bytes &&
         a->relay == b->relay;
}
template <typename... T>
bool Equal(const std::variant<T...>& a, const std::variant<T...>& b) {
  return a.index() == b.index() &&
         std::visit([&](const auto& x) { return Equal(x, std::get<std::decay_t<decltype(x)>>(b)); },
                    a);
}

// ---- random values ----

using Rng = std::mt19937_64;

int64_t Between(Rng& rng, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(rng);
}

TensorSpec RandomTensor(Rng& rng) {
  static constexpr DType kDTypes[] = {DType::kFloat64, DType::kBFloat16, DType::kBool};
  static int number = 0;
  TensorSpec tensor{"tensor.\u00e9." + std::to_string(++number), kDTypes[Between(rng, 0, 2)], {}};
  for (int64_t d = Between(rng, 0, 3); d > 0; --d) tensor.shape.push_back(Between(rng, 0, 9));
  return tensor;
}

std::shared_ptr<const CheckedBucket> SomeBucket(Rng& rng, int64_t seq,
                                                const std::optional<SlotGrant>& slot) {
  BucketDraft out;
  out.seq = seq;
  std::vector<int64_t> offsets;
  int64_t end = 0;
  for (int64_t n = Between(rng, 1, 5); n > 0; --n) {
    const TensorSpec tensor = RandomTensor(rng);
    const int64_t count = *ElementCount(tensor.shape);
    const int64_t start = Between(rng, 0, count);
    out.Add(tensor, start, Between(rng, 0, count - start));
    offsets.push_back(AlignUp(end));
    end = offsets.back() + out.BytesOf(out.ranges.back());
  }
  if (slot.has_value()) out.LieIn(*slot, offsets);
  return BucketEvent(out).bucket;
}

template <typename T>
void Fill(Rng& rng, T* value);

template <typename Tag, typename T>
void FillOne(Rng& rng, StrongInt<Tag, T>* v) {
  *v = StrongInt<Tag, T>(static_cast<T>(Between(rng, 1, 1'000'000)));
}
void FillOne(Rng& rng, SlotIndex* v) { *v = SlotIndex(static_cast<uint32_t>(Between(rng, 0, 3))); }
void FillOne(Rng& rng, int* v) { *v = static_cast<int>(Between(rng, 0, 60)); }
void FillOne(Rng& rng, uint32_t* v) { *v = static_cast<uint32_t>(Between(rng, 0, 1000)); }
void FillOne(Rng& rng, int64_t* v) { *v = Between(rng, 0, 1'000'000'000'000); }
void FillOne(Rng& rng, uint64_t* v) { *v = rng() | 1; }
void FillOne(Rng& rng, bool* v) { *v = Between(rng, 0, 1) == 1; }
void FillOne(Rng& rng, std::string* v) {
  for (int64_t n = Between(rng, 0, 20); n > 0; --n) *v += Between(rng, 0, 3) == 0 ? "\u20ac" : "x";
}
void FillOne(Rng& rng, Duration* v) { *v = std::chrono::milliseconds(Between(rng, 0, 86'400'000)); }
void FillOne(Rng& rng, Failure* v) {
  for (int64_t n = Between(rng, 0, 3); n > 0; --n) {
    Suspect suspect;
    suspect.role = static_cast<SuspectRole>(Between(rng, 0, 4));
    FillOne(rng, &suspect.daemon);
    FillOne(rng, &suspect.instance);
    if (Between(rng, 0, 1) == 1) FillOne(rng, &suspect.rank.emplace());
    FillOne(rng, &suspect.pid);
    v->Add(std::move(suspect));
  }
  v->weights = static_cast<Weights>(Between(rng, 0, 2));
  for (int64_t n = Between(rng, 0, 3); n > 0; --n) {
    std::string instance;
    FillOne(rng, &instance);
    v->AddDirty(std::move(instance));
  }
  FillOne(rng, &v->tensor);
  FillOne(rng, &v->field);
  if (Between(rng, 0, 1) == 1) FillOne(rng, &v->version.emplace());
  FillOne(rng, &v->may_be_retried);
  for (int64_t n = Between(rng, 0, 5); n > 0; --n) FillOne(rng, &v->ranks.emplace_back());
}
void FillOne(Rng& rng, absl::Status* v) {
  if (Between(rng, 0, 2) == 0) return;
  std::string message;
  FillOne(rng, &message);
  Failure failure;
  FillOne(rng, &failure);
  *v = WithFailure(absl::Status(static_cast<absl::StatusCode>(Between(rng, 1, 16)), message),
                   failure);
}
void FillOne(Rng& rng, Verification* v) { *v = static_cast<Verification>(Between(rng, 1, 3)); }
void FillOne(Rng& rng, BroadcastMethod* v) {
  *v = static_cast<BroadcastMethod>(Between(rng, 0, 4));
}
void FillOne(Rng& rng, DeliveryMode* v) { *v = static_cast<DeliveryMode>(Between(rng, 1, 2)); }
void FillOne(Rng& rng, Standing* v) { *v = static_cast<Standing>(Between(rng, 0, kStandings - 1)); }
void FillOne(Rng& rng, Outcome* v) { *v = static_cast<Outcome>(Between(rng, 0, 3)); }
void FillOne(Rng& rng, TensorSpec* v) { *v = RandomTensor(rng); }
void FillOne(Rng& rng, ReplicaFraction* v) {
  v->first = static_cast<uint64_t>(Between(rng, 0, 1000));
  v->last = v->first + static_cast<uint64_t>(Between(rng, 0, 1000));
}
void FillOne(Rng& /*rng*/, EmptyReply* /*v*/) {}
// Buckets and contents are filled together with the values that contain them (Agree).
void FillOne(Rng& /*rng*/, std::shared_ptr<const CheckedBucket>* /*v*/) {}
void FillOne(Rng& /*rng*/, std::shared_ptr<const PartContent>* /*v*/) {}
void FillOne(Rng& rng, std::shared_ptr<const Layout>* v) {
  Layout layout;
  for (int64_t t = Between(rng, 0, 4); t > 0; --t) {
    layout.tensors.push_back(RandomTensor(rng));
    const auto index = static_cast<uint32_t>(layout.tensors.size() - 1);
    const Box box = WholeBox(layout.tensors.back().shape);
    Dims strides = RowMajorStrides(box.extent);
    for (int64_t& stride : strides) stride *= 2;  // not dense
    layout.pieces.push_back({index, box, RegionId(), 0, strides});
    if (Between(rng, 0, 1) == 1) layout.pushed_tensors.push_back(index);
  }
  *v = std::make_shared<const Layout>(std::move(layout));
}
// Two trainers on two nodes, and engines that each want all rows: two on these nodes, and sometimes
// three on others, which form chains.
void FillOne(Rng& rng, std::shared_ptr<const RoutePlan>* v) {
  std::vector<RouteMember> sources(2);
  const bool chains = Between(rng, 0, 1) == 1;
  std::vector<RouteMember> destinations(chains ? 5 : 2);
  std::vector<Layout> layouts(2 + destinations.size());
  for (int64_t t = Between(rng, 1, 5); t > 0; --t) {
    const int64_t rows = Between(rng, 2, 9);
    const TensorSpec tensor{fmt::format("weights.{}", t), DType::kFloat32, {rows, 3}};
    std::vector<TensorSpec> wanted = {tensor};
    if (Between(rng, 0, 1) == 1) {
      const auto derived = [&tensor](DerivedRole role) {
        return std::make_shared<Derivation>(Derivation{tensor, DerivedKind::kFp8Channel, role});
      };
      wanted = {
          {tensor.name + ".values", DType::kFloat8E4M3FN, {rows, 3}, derived(DerivedRole::kValues)},
          {tensor.name + ".scales", DType::kFloat32, {rows, 1}, derived(DerivedRole::kScales)}};
    }
    const auto add = [](const TensorSpec& held, const Box& box, Layout* layout) {
      const auto index = static_cast<uint32_t>(layout->tensors.size());
      layout->tensors.push_back(held);
      layout->pieces.push_back({index, box, RegionId(), 0, {held.shape.back(), 1}});
    };
    for (uint32_t r = 0; r < layouts.size(); ++r) {
      const Box half{{r == 0 ? 0 : rows / 2, 0}, {r == 0 ? rows / 2 : rows - rows / 2, 3}};
      if (r < 2) {
        add(tensor, half, &layouts[r]);
        continue;
      }
      for (const TensorSpec& each : wanted) add(each, WholeBox(each.shape), &layouts[r]);
    }
  }
  for (uint32_t r = 0; r < 2; ++r) {
    sources[r] = {std::make_shared<const Layout>(layouts[r]), r, 0};
  }
  for (uint32_t r = 0; r < destinations.size(); ++r) {
    destinations[r] = {std::make_shared<const Layout>(layouts[2 + r]), r, r};
  }
  RouteOptions options;
  options.relay_lag = chains ? 2 : 0;
  auto plan = CompileRoutes(sources, destinations, options);
  REQUIRE(plan.ok());
  REQUIRE(plan->relay.lag == options.relay_lag);
  *v = std::make_shared<const RoutePlan>(*std::move(plan));
}
void FillOne(Rng& rng, std::shared_ptr<const std::vector<ReplicaShare>>* v) {
  std::vector<ReplicaShare> shares;
  for (int64_t n = Between(rng, 0, 4); n > 0; --n) {
    shares.push_back({static_cast<uint32_t>(n % 2), 0, Box{{0, 1}, {Between(rng, 1, 2), 2}}});
  }
  *v = std::make_shared<const std::vector<ReplicaShare>>(std::move(shares));
}
void FillOne(Rng& rng, std::shared_ptr<const std::vector<InstanceStanding>>* v) {
  std::vector<InstanceStanding> standings(static_cast<size_t>(Between(rng, 0, 4)));
  for (InstanceStanding& standing : standings) Fill(rng, &standing);
  *v = Shared(std::move(standings));
}
void FillOne(Rng& rng, std::shared_ptr<const std::vector<std::string>>* v) {
  std::vector<std::string> texts(static_cast<size_t>(Between(rng, 0, 4)));
  for (std::string& text : texts) FillOne(rng, &text);
  *v = std::make_shared<const std::vector<std::string>>(std::move(texts));
}
template <typename T>
void FillOne(Rng& rng, std::optional<T>* v) {
  if (Between(rng, 0, 1) == 1) Fill(rng, &v->emplace());
}
template <typename T>
void FillOne(Rng& rng, std::vector<T>* v) {
  for (int64_t n = Between(rng, 0, 4); n > 0; --n) {
    T value{};
    Fill(rng, &value);
    v->push_back(std::move(value));
  }
}
template <typename... T>
void FillOne(Rng& rng, std::variant<T...>* v) {
  const auto index = static_cast<size_t>(Between(rng, 0, sizeof...(T) - 1));
  [&]<size_t... I>(std::index_sequence<I...>) {
    ((I == index ? Fill(rng, &v->template emplace<I>()) : void()), ...);
  }
  (std::index_sequence_for<T...>());
}

// Makes fields agree that depend on each other.
template <typename T>
void Agree(Rng& /*rng*/, T* /*v*/) {}
void Agree(Rng& rng, TrainerIdentity* v) {
  v->world_size = v->rank + static_cast<int>(Between(rng, 1, 5));
  v->node = NodeId();  // the coordinator sets it
  v->daemon.clear();
}
void Agree(Rng& rng, EngineIdentity* v) {
  v->instance = "engine-" + std::to_string(Between(rng, 0, 99));
  v->world_size = v->rank + static_cast<int>(Between(rng, 1, 5));
  v->node = NodeId();
  v->daemon.clear();
  v->on_device = false;  // known to the own daemon only
  v->trainer_identity = Between(rng, 0, 1) == 0 ? "" : "spiffe://prod/trainer/*";
  if (!NeedsLayout(v->delivery)) v->catch_up = false;
}
void Agree(Rng& rng, PeerWelcome* v) { v->trainer_ranks = static_cast<int>(Between(rng, 1, 9)); }
void Agree(Rng& /*rng*/, PeerLayout* v) { v->destination = absl::OkStatus(); }
void Agree(Rng& rng, BucketEvent* v) {
  std::optional<SlotGrant> slot;
  FillOne(rng, &slot);
  auto bucket =
      std::make_shared<CheckedBucket>(*SomeBucket(rng, Between(rng, 0, 1'000'000'000'000), slot));
  for (uint32_t t = 0; t < bucket->tensors.size(); ++t) {
    if (Between(rng, 0, 3) == 0) bucket->unaligned.push_back(t);
  }
  v->bucket = std::move(bucket);
}
void Agree(Rng& rng, TransferDone* v) {
  v->failed_destination = static_cast<int>(Between(rng, -1, 5));
}
void Agree(Rng& rng, RefitDone* v) {
  v->failed_destination = static_cast<int>(Between(rng, -1, 5));
  v->lacks.reset();
  if (Between(rng, 0, 1) == 1) v->lacks = Between(rng, 0, kMaxRounds);
}
void Agree(Rng& rng, PeerProgram* v) {
  v->node = static_cast<uint32_t>(Between(rng, 0, 1));
  v->chunk_bytes = Between(rng, kSectionAlignment, kMaxTensorBytes);
  if (Between(rng, 0, 3) > 0) return;
  v->plan = nullptr;
  v->replicas = nullptr;
}
void Agree(Rng& rng, StartRefit* v) {
  v->resume.reset();
  if (Between(rng, 0, 1) == 1) v->resume = Between(rng, 0, kMaxRounds);
  if (Between(rng, 0, 1) == 1) v->ranks.push_back(kNoRank);
  v->slots.clear();
  const int64_t slots = v->wired ? 2 * Between(rng, 1, 2) : 0;
  for (int64_t s = 0; s < slots; ++s) {
    v->slots.push_back({SlotIndex(static_cast<uint32_t>(s)), GrantId(9)});
  }
}
void Agree(Rng& /*rng*/, RefuseMember* v) {
  if (v->status.ok()) v->status = absl::AbortedError("no");
}
void Agree(Rng& rng, BeginEvent* v) { v->tensor_count = Between(rng, 0, kMaxTensorsPerLayout); }
void Agree(Rng& rng, CommitEvent* v) { v->tensor_count = Between(rng, 0, kMaxTensorsPerLayout); }
void Agree(Rng& rng, LeaseSlotReply* v) { v->slot_bytes = Between(rng, 1, kBounds.slot_bytes); }
void Agree(Rng& rng, BucketReply* v) { v->bytes = Between(rng, 0, kMaxBucketBytes); }
void Agree(Rng& rng, InstanceOutcome* v) { v->instance = "i" + std::to_string(rng() % 9); }
void Agree(Rng& /*rng*/, Reply* v) {
  if (!v->status.ok()) v->payload = EmptyReply();
}
void Agree(Rng& rng, PeerPrepare* v) {
  v->layout_digests.resize(v->destinations.size(), 7);
  v->trainer_ranks = static_cast<int>(Between(rng, 1, 9));
}
// The joined daemon knows the rest by the part's header.
void Agree(Rng& /*rng*/, SendPart* v) { *v = {v->member, v->update, Version(), v->part, {}, {}}; }
void Agree(Rng& rng, PeerHeader* v) {
  v->content = std::make_shared<const PartContent>(WholeBucket(SomeBucket(rng, 0, v->slot)));
  v->leased = v->leased && v->slot.has_value();
  v->wired = v->wired && v->slot.has_value();
  v->fill_slot = v->fill_slot && v->slot.has_value();
  v->again = v->again && v->wired;
  if (!v->slot.has_value()) v->readers.clear();
  v->bucket_ranges.clear();
  for (size_t i = 0; v->is_root && i < v->content->ranges.size(); ++i) {
    v->bucket_ranges.push_back(static_cast<uint32_t>(Between(rng, 0, 9)));
  }
  for (size_t i = 0; i < v->ranks.size(); ++i) v->ranks[i] = static_cast<uint32_t>(7 * i);
}
void Agree(Rng& rng, InstanceStanding* v) { v->instance = "i" + std::to_string(rng() % 9); }
void Agree(Rng& rng, PeerCommunicatorConnect* v) {
  v->addresses = std::make_shared<const std::vector<std::string>>(Between(rng, 1, 4), "here");
  v->coordinator_rank.reset();
  if (Between(rng, 0, 1) == 1) {
    v->coordinator_rank = Between(rng, 0, static_cast<int64_t>(v->addresses->size()) - 1);
  }
}
void Agree(Rng& rng, OpenCommunicator* v) {
  v->size = v->rank + static_cast<int>(Between(rng, 1, 5));
}

template <typename T>
void Fill(Rng& rng, T* value) {
  if constexpr (requires { FillOne(rng, value); }) {
    FillOne(rng, value);
  } else {
    std::apply([&](auto&... field) { (Fill(rng, &field), ...); }, Fields(*value));
    Agree(rng, value);
  }
}

// ---- what arrives at the other end ----

// Encodes the report, sends its messages through serialised bytes, and returns what the other end
// decodes.
PeerReport There(const PeerReport& report, ReportDecoder* decoder) {
  auto messages = ToProto(report, kBounds, kMessageBytes);
  REQUIRE(messages.ok());
  std::optional<PeerReport> out;
  for (const v1::PeerMessage& message : *messages) {
    REQUIRE(!out.has_value());
    v1::PeerMessage read;
    REQUIRE(read.ParseFromString(message.SerializeAsString()));
    auto decoded = decoder->Decode(read);
    INFO(decoded.status().ToString());
    REQUIRE(decoded.ok());
    out = *std::move(decoded);
  }
  REQUIRE(out.has_value());
  return *std::move(out);
}

PeerCommand There(const PeerCommand& command) {
  auto answers = ToProto(command, kMessageBytes);
  REQUIRE(answers.ok());
  CommandDecoder decoder(kBounds);
  std::optional<PeerCommand> out;
  for (const v1::PeerAnswer& answer : *answers) {
    REQUIRE(!out.has_value());
    v1::PeerAnswer read;
    REQUIRE(read.ParseFromString(answer.SerializeAsString()));
    auto decoded = decoder.Decode(read);
    INFO(decoded.status().ToString());
    REQUIRE(decoded.ok());
    out = *std::move(decoded);
  }
  REQUIRE(out.has_value());
  return *std::move(out);
}

template <typename Variant, typename Check>
void ForEachAlternative(Rng& rng, Check check) {
  [&]<size_t... I>(std::index_sequence<I...>) {
    (
        [&] {
          for (int i = 0; i < 50; ++i) {
            const auto value = std::make_unique<std::variant_alternative_t<I, Variant>>();
            Fill(rng, value.get());
            INFO("alternative " << I);
            check(Variant(std::in_place_index<I>, std::move(*value)));
          }
        }(),
        ...);
  }
  (std::make_index_sequence<std::variant_size_v<Variant>>());
}

TEST_CASE("Every report arrives as it was sent") {
  Rng rng(1);
  ReportDecoder decoder(kBounds);
  ForEachAlternative<PeerReport>(
      rng, [&](const PeerReport& report) { CHECK(Equal(There(report, &decoder), report)); });
  // Beside the reports there is the hello; four reports are of one kind, an engine's message.
  CHECK(v1::PeerMessage::descriptor()->FindOneofByName("kind")->field_count() ==
        std::variant_size_v<PeerReport> - 3 + 1);
}

TEST_CASE("Every command arrives as it was sent") {
  Rng rng(2);
  ForEachAlternative<PeerCommand>(
      rng, [&](const PeerCommand& command) { CHECK(Equal(There(command), command)); });
  CHECK(v1::PeerAnswer::descriptor()->FindOneofByName("kind")->field_count() ==
        std::variant_size_v<PeerCommand> + 1);
}

TEST_CASE("What is compared differs where a field differs") {
  Rng rng(3);
  PeerPrepare prepare;
  Fill(rng, &prepare);
  PeerPrepare other = prepare;
  other.engines.push_back(MemberId(9));
  CHECK(Equal(prepare, prepare));
  CHECK_FALSE(Equal(prepare, other));
}

TEST_CASE("Durations that are not whole milliseconds arrive rounded up, never as 0") {
  BeginEvent begin;
  begin.call = CallId(1);
  begin.member = MemberId(1);
  begin.duration = Duration(1);
  ReportDecoder decoder(kBounds);
  const PeerReport report = There(PeerReport(PeerCall{begin}), &decoder);
  CHECK(std::get<BeginEvent>(std::get<PeerCall>(report).event).duration ==
        std::chrono::milliseconds(1));
}

TEST_CASE("A text with bytes that are no UTF-8, or too many, arrives shortened and readable") {
  ReportDecoder decoder(kBounds);
  const std::string reason = "\xff\xc3(" + std::string(1020, 'x') + "\u20ac";
  const PeerReport report = There(PeerReport(MemberLost{MemberId(1), reason}), &decoder);
  CHECK(std::get<MemberLost>(report).reason == "..." + std::string(1018, 'x') + "\u20ac");
}

TEST_CASE("What a group was taken in with arrives as it was sent") {
  Rng rng(4);
  for (int i = 0; i < 50; ++i) {
    LinkUp up;
    Fill(rng, &up.version);
    up.incarnation = rng() | 1;
    up.spec = {2, 1, 1 << 20, 4, {"a", "b.c"}, {}, i, i % 2 == 0, 10 * i};
    up.coordinator_id = "node-0";
    auto there = AcceptedFromProto(AcceptedToProto(up, kMessageBytes));
    REQUIRE(there.ok());
    CHECK(Equal(there->up, up));
    CHECK(there->message_bytes == kMessageBytes);
  }
}

TEST_CASE("The lower version of two neighbours is agreed, and none in common is refused") {
  const auto agree = [](int theirs, int own) { return AgreeProtocol(theirs, "protocol", own); };
  CHECK(*agree(1, 1) == Protocol::kV1);
  CHECK(*agree(2, 1) == Protocol::kV1);
  CHECK(*agree(1, 2) == Protocol::kV1);
  CHECK(static_cast<int>(*agree(3, 2)) == 2);
  for (const auto& [theirs, own] : {std::pair{0, 1}, {-1, 1}, {3, 1}, {1, 3}}) {
    const absl::Status status = agree(theirs, own).status();
    CHECK(status.code() == absl::StatusCode::kFailedPrecondition);
    CHECK(Message(status) == fmt::format("protocol: the sender speaks version {}, this side "
                                         "version {}, each also the one before",
                                         theirs, own));
  }
}

TEST_CASE("A coordinator that agreed to a version that is not spoken here is refused") {
  LinkUp up;
  up.incarnation = 7;
  up.spec = {2, 1, 1 << 20, 4, {}};
  up.coordinator_id = "node-0";
  v1::PeerAnswer answer = AcceptedToProto(up, kMessageBytes);
  CHECK(AcceptedFromProto(answer)->up.protocol == kProtocol);
  for (const int agreed : {0, 2, 7}) {
    answer.mutable_accepted()->set_protocol(static_cast<v1::ProtocolVersion>(agreed));
    CHECK(AcceptedFromProto(answer).status().code() == absl::StatusCode::kFailedPrecondition);
  }
}

// ---- refusals ----

std::string ReportError(const std::string& text) {
  v1::PeerMessage message;
  REQUIRE(google::protobuf::TextFormat::ParseFromString(text, &message));
  ReportDecoder decoder(kBounds);
  const auto decoded = decoder.Decode(message);
  REQUIRE_FALSE(decoded.ok());
  CHECK(decoded.status().code() == absl::StatusCode::kInvalidArgument);
  return Message(decoded.status());
}

std::string CommandError(const std::string& text) {
  v1::PeerAnswer answer;
  REQUIRE(google::protobuf::TextFormat::ParseFromString(text, &answer));
  const auto decoded = FromProto(answer, kBounds);
  REQUIRE_FALSE(decoded.ok());
  CHECK(decoded.status().code() == absl::StatusCode::kInvalidArgument);
  return Message(decoded.status());
}

using Catch::Matchers::Contains;

TEST_CASE("A malformed report is refused with field and value") {
  CHECK_THAT(ReportError(""), Contains("kind is missing"));
  CHECK_THAT(ReportError("hello {}"), Contains("hello was said already"));
  CHECK_THAT(ReportError("attach { trainer { world_size: 1 } }"), Contains("attach.member is 0"));
  CHECK_THAT(ReportError("attach { member: 1 }"), Contains("attach.identity is missing"));
  CHECK_THAT(ReportError("attach { member: 1 trainer { rank: 2 world_size: 2 } }"),
             Contains("attach.trainer.rank is 2"));
  CHECK_THAT(ReportError("attach { member: 1 trainer { world_size: 65537 } }"),
             Contains("attach.trainer.world_size is 65537"));
  CHECK_THAT(ReportError("attach { member: 1 engine { instance: 'a b' world_size: 1 } }"),
             Contains("attach.engine.instance has byte 0x20"));
  CHECK_THAT(ReportError("attach { member: 1 engine { instance: 'a' world_size: 1 } }"),
             Contains("attach.engine.delivery is 0"));
  CHECK_THAT(ReportError("attach { member: 1 engine { instance: 'a' world_size: 1 delivery: "
                         "DELIVERY_LOADER manifest { names: 'x' } } }"),
             Contains("attach.engine.manifest.dtypes has 0 entries"));
  CHECK_THAT(ReportError("engine_message { member: 1 message { ack { part: -1 } } }"),
             Contains("ack.part is -1"));
  CHECK_THAT(ReportError("call { member: 1 commit {} }"), Contains("call.call is 0"));
  CHECK_THAT(ReportError("call { call: 1 member: 1 }"), Contains("call.event is missing"));
  CHECK_THAT(ReportError("call { call: 1 member: 1 begin { duration_ms: 86400001 } }"),
             Contains("call.duration_ms: 86400001 is more than the maximum 86400000"));
  CHECK_THAT(ReportError("call { call: 1 member: 1 begin { verification: 9 } }"),
             Contains("verification is 9"));
  CHECK_THAT(ReportError("call { call: 1 member: 1 release_slot { slot: 4 } }"),
             Contains("release_slot.slot is 4, outside of 0 to 3"));
  CHECK_THAT(ReportError("call { call: 1 member: 1 bucket { tensors {} } }"),
             Contains("names' length is 0"));
  CHECK_THAT(ReportError("call { call: 1 member: 1 bucket { tensors { names: 'w' dtypes: "
                         "DTYPE_FLOAT32 shapes { dims: 4 } starts: 2 sizes: 3 } } }"),
             Contains("bucket.tensors.sizes[0] is 3, outside of 0 to 2"));
  CHECK_THAT(
      ReportError("call { call: 1 member: 1 bucket { tensors { names: 'w' dtypes: "
                  "DTYPE_FLOAT32 shapes { dims: 4 } starts: 0 sizes: 4 byte_offsets: 0 } } }"),
      Contains("there is no slot"));
  CHECK_THAT(ReportError("call { call: 1 member: 1 bucket { tensors { names: 'w' dtypes: "
                         "DTYPE_FLOAT32 shapes { dims: 4 } starts: 0 sizes: 4 byte_offsets: "
                         "1048564 } slot { slot: 1 } } }"),
             Contains("byte_offsets[0] is 1048564"));
  CHECK_THAT(
      ReportError("call { call: 1 member: 1 bucket { tensors { names: 'w' names: 'v' dtypes: "
                  "[DTYPE_BOOL, DTYPE_BOOL] shapes { dims: 4 } shapes { dims: 4 } starts: "
                  "[0, 0] sizes: [4, 4] byte_offsets: [0, 3] } slot { slot: 1 } } }"),
      Contains("overlaps entry 0"));
  CHECK_THAT(ReportError("part_done { status { code: 17 } }"),
             Contains("part_done.status.code is 17"));
  CHECK_THAT(ReportError("part_done { bytes_written: -1 }"),
             Contains("part_done.bytes_written[0] is -1"));
  CHECK_THAT(ReportError("part_done { failed_destination: 65536 }"),
             Contains("part_done.failed_destination is 65536"));
  CHECK_THAT(ReportError("verified { failed_destinations: 65536 }"),
             Contains("verified.failed_destinations[0] is 65536"));
  CHECK_THAT(ReportError("gone { member: 1 reason: '" + std::string(1025, 'x') + "' }"),
             Contains("gone.reason: 1025 bytes are more than 1024"));
  CHECK_THAT(ReportError("communicator_opened { address: '" + std::string(65537, 'x') + "' }"),
             Contains("communicator_opened.address: 65537 bytes are more"));
}

TEST_CASE("A malformed command is refused with field and value") {
  const std::string content =
      "content { names: 'w' dtypes: DTYPE_FLOAT32 shapes { dims: 4 } starts: 0 sizes: 4 } ";
  CHECK_THAT(CommandError(""), Contains("kind is missing"));
  CHECK_THAT(CommandError("accepted {}"), Contains("accepted was said already"));
  CHECK_THAT(CommandError("refuse { member: 1 }"), Contains("refuse.status.code is 0"));
  CHECK_THAT(CommandError("reply { call: 1 status { code: 1 } taken {} }"),
             Contains("reply.payload is there"));
  CHECK_THAT(CommandError("reply { call: 1 leased { bytes: 1048577 } }"),
             Contains("reply.leased.bytes is 1048577"));
  CHECK_THAT(CommandError("reply { call: 1 begun { leasable_slots: -1 } }"),
             Contains("reply.begun.leasable_slots is -1"));
  CHECK_THAT(CommandError("prepare { verification: VERIFICATION_OFF engines: 0 }"),
             Contains("prepare.engines[0] is 0"));
  CHECK_THAT(CommandError("prepare {}"), Contains("prepare.verification is not said"));
  CHECK_THAT(CommandError("prepare { verification: VERIFICATION_OFF destinations: 1 }"),
             Contains("prepare.layout_digests has 0 entries"));
  CHECK_THAT(CommandError("header { version: -1 }"), Contains("header.version is -1"));
  CHECK_THAT(CommandError("header { " + content + "bytes: 15 verification: VERIFICATION_OFF }"),
             Contains("header.bytes is 15 where the content has 16"));
  CHECK_THAT(CommandError("header { " + content +
                          "bytes: 16 verification: VERIFICATION_OFF wired: true }"),
             Contains("header.wired is true where there is no slot"));
  CHECK_THAT(CommandError("header { " + content +
                          "bytes: 16 verification: VERIFICATION_OFF readers: [3, 4] }"),
             Contains("header.readers has 2 entries where there is no slot"));
  std::string placed = content;
  placed.insert(placed.rfind('}'), "byte_offsets: 0 ");
  CHECK_THAT(
      CommandError("header { " + placed +
                   "bytes: 16 verification: VERIFICATION_OFF slot { slot: 1 } readers: [3, 0] }"),
      Contains("header.readers[1] is 0"));
  CHECK_THAT(CommandError("header { " + content +
                          "bytes: 16 verification: VERIFICATION_OFF ranks: [1, 1] }"),
             Contains("header.ranks has 2 entries, 1 of them different"));
  CHECK_THAT(CommandError("header { " + content +
                          "bytes: 16 verification: VERIFICATION_OFF ranks: 1024 }"),
             Contains("header.ranks[0] is 1024"));
  CHECK_THAT(CommandError("header { " + content +
                          "bytes: 16 verification: VERIFICATION_OFF is_root: true }"),
             Contains("header.bucket_call is 0"));
  CHECK_THAT(CommandError("header { " + content +
                          "bytes: 16 verification: VERIFICATION_OFF is_root: true bucket_call: 1 "
                          "trainer: 1 }"),
             Contains("header.bucket_ranges has 0 entries"));
  CHECK_THAT(CommandError("communicator_connect { addresses: 'here' coordinator_rank: 1 }"),
             Contains("communicator_connect.coordinator_rank is 1"));
  CHECK_THAT(CommandError("communicator_connect { coordinator_rank: 0 }"),
             Contains("communicator_connect.coordinator_rank is 0"));
  CHECK_THAT(CommandError("update_ended { outcome: 4 }"), Contains("update_ended.outcome is 4"));
  CHECK_THAT(CommandError("communicator_open { rank: 2 size: 2 }"),
             Contains("communicator_open.rank is 2"));
  CHECK_THAT(CommandError("communicator_open { size: 1025 }"),
             Contains("communicator_open.size is 1025"));
  CHECK_THAT(CommandError("new_incarnation: 0"), Contains("new_incarnation is 0"));
}

TEST_CASE("Statistics of methods that only a later version knows cost no answer and no report") {
  constexpr auto kLater = static_cast<v1::BroadcastMethod>(v1::BroadcastMethod_MAX + 3);
  v1::PeerAnswer answer;
  answer.mutable_reply()->set_call(1);
  v1::CommitResponse* const done = answer.mutable_reply()->mutable_done();
  done->set_version(7);
  for (const auto method : {v1::BROADCAST_METHOD_CHAIN, kLater, v1::BROADCAST_METHOD_NCCL}) {
    v1::BroadcastTotals* const totals = done->add_pushed();
    totals->set_method(method);
    totals->set_bytes(100 + done->pushed_size());
    totals->set_buckets(1);
  }
  const auto read = [](const auto& message) {
    std::remove_cvref_t<decltype(message)> parsed;
    REQUIRE(parsed.ParseFromString(message.SerializeAsString()));
    return parsed;
  };
  const auto command = FromProto(read(answer), kBounds);
  INFO(command.status().ToString());
  REQUIRE(command.ok());
  const auto& committed = std::get<CommitReply>(std::get<Reply>(*command).payload);
  CHECK(committed.version == Version(7));
  REQUIRE(committed.pushed.size() == 2);
  CHECK(committed.pushed[0].method == BroadcastMethod::kChain);
  CHECK(committed.pushed[0].bytes == 101);
  CHECK(committed.pushed[1].method == BroadcastMethod::kNccl);
  CHECK(committed.pushed[1].bytes == 103);
  for (int i = done->pushed_size(); i < 65; ++i) done->add_pushed();
  CHECK_THAT(Message(FromProto(answer, kBounds).status()), Contains("reply.done.pushed has 65"));

  v1::PeerMessage message;
  message.mutable_part_done()->set_broadcast(kLater);
  ReportDecoder decoder(kBounds);
  const auto report = decoder.Decode(read(message));
  INFO(report.status().ToString());
  REQUIRE(report.ok());
  CHECK(std::get<TransferDone>(**report).broadcast == BroadcastMethod::kDirect);
}

TEST_CASE("A hello arrives as a value, with the agreed version") {
  v1::PeerMessage message;
  v1::PeerHello* const hello = message.mutable_hello();
  hello->set_protocol(v1::PROTOCOL_VERSION_1);
  hello->set_group("g");
  hello->set_wait_ms(1500);
  hello->set_daemon_id("d");
  hello->set_boot_id("0123456789abcdef");
  hello->set_message_bytes(65'536);
  CHECK_FALSE(GreetingOf(message)->spec.has_value());
  const GroupSpec spec = {2, 3, 1 << 20, 4, {"a", "b.c"}, {"d*"}};
  *hello->mutable_spec() = SpecToProto(spec);
  const absl::StatusOr<PeerGreeting> greeting = GreetingOf(message);
  REQUIRE(greeting.ok());
  CHECK(greeting->group == "g");
  CHECK(greeting->spec == spec);
  CHECK(greeting->wait == std::chrono::milliseconds(1500));
  CHECK(greeting->daemon_id == "d");
  CHECK(greeting->boot_id == "0123456789abcdef");
  CHECK(greeting->protocol == kProtocol);
  CHECK(greeting->message_bytes == 65'536);
}

TEST_CASE("A malformed hello is refused with field and value") {
  const std::string rest = "wait_ms: 1 boot_id: '0123456789abcdef' message_bytes: 65536 ";
  const auto error = [](const std::string& text) {
    v1::PeerMessage message;
    REQUIRE(google::protobuf::TextFormat::ParseFromString(text, &message));
    return Message(GreetingOf(message).status());
  };
  const std::string good = "protocol: PROTOCOL_VERSION_1 group: 'g' daemon_id: 'd' ";
  CHECK(error("hello { " + good + rest + "}").empty());
  CHECK_THAT(error("pong: 1"), Contains("must be hello"));
  CHECK_THAT(error("hello { group: 'g' }"),
             Contains("hello.protocol: the sender speaks version 0, this side version 1"));
  CHECK_THAT(error("sequence: 1 hello { " + good + rest + "}"), Contains("sequence is 1"));
  CHECK_THAT(error("hello { protocol: PROTOCOL_VERSION_1 daemon_id: 'd' " + rest + "}"),
             Contains("hello.group has 0 characters"));
  CHECK_THAT(error("hello { protocol: PROTOCOL_VERSION_1 group: 'g' " + rest + "}"),
             Contains("hello.daemon_id has 0 characters"));
  CHECK_THAT(error("hello { " + good + "message_bytes: 65536 }"), Contains("boot_id has 0 bytes"));
  CHECK_THAT(error("hello { " + good + "boot_id: '0123456789abcdef' }"),
             Contains("hello.message_bytes is 0"));
}

// ---- sizes ----

std::vector<TensorSpec> ManyTensors(size_t count, size_t name_bytes) {
  std::vector<TensorSpec> tensors;
  for (size_t i = 0; i < count; ++i) {
    std::string name = std::to_string(i) + ".";
    name.resize(name_bytes, 'x');
    tensors.push_back({std::move(name), DType::kBFloat16, {2}});
  }
  return tensors;
}

TEST_CASE("A message that the other daemon would not take is an error that names the limit") {
  PeerHeader header;
  BucketDraft draft;
  draft.call = CallId(1);
  draft.member = MemberId(1);
  for (TensorSpec& tensor : ManyTensors(kMaxTensorsPerBucket, 200)) {
    draft.Add(std::move(tensor), 0, 2);
  }
  const BucketEvent bucket = draft;
  header.content = std::make_shared<const PartContent>(WholeBucket(bucket.bucket));
  const auto answer = ToProto(PeerCommand(header), kMessageBytes);
  CHECK(answer.status().code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(Message(answer.status()), Contains("more than message_bytes of 8388608"));

  const auto report = ToProto(PeerReport(PeerCall{bucket}), kBounds, kMessageBytes);
  CHECK(report.status().code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(Message(report.status()), Contains("message_bytes"));
}

TEST_CASE("A bucket that passes CheckHeaderFits never makes a header that is too large") {
  Rng rng(5);
  for (int i = 0; i < 300; ++i) {
    PeerHeader header;
    Fill(rng, &header);
    const auto answer = ToProto(PeerCommand(header), kMessageBytes);
    REQUIRE(answer.ok());
    const auto bytes = static_cast<int64_t>(answer->at(0).ByteSizeLong());
    CHECK(CheckHeaderFits(header.content->bucket->tensors, bytes).code() ==
          absl::StatusCode::kResourceExhausted);
  }
  CHECK(CheckHeaderFits(ManyTensors(100, 100), kMinPeerMessageBytes).ok());
}

TEST_CASE("A call that makes no sense is refused before it is sent") {
  LeaseSlotEvent lease{CallId(1), MemberId(1), Version(1), Duration(-1'000'000'000)};
  const auto message = ToProto(PeerReport(PeerCall{lease}), kBounds, kMessageBytes);
  CHECK(message.status().code() == absl::StatusCode::kInvalidArgument);
  CHECK_THAT(Message(message.status()), Contains("wait_ms is -1000"));
}

// If such a report were sent, the link would end, and with it the leases of all members of this
// daemon.
TEST_CASE("What a client says that the group's bounds forbid is refused before it is sent") {
  const auto error = [](const PeerReport& report) {
    const auto message = ToProto(report, kBounds, kMessageBytes);
    CHECK(message.status().code() == absl::StatusCode::kInvalidArgument);
    return Message(message.status());
  };
  const auto last = static_cast<uint32_t>(kBounds.slots - 1);
  const auto release = [](uint32_t slot) {
    return PeerReport(
        PeerCall{ReleaseSlotEvent{CallId(1), MemberId(1), SlotGrant{SlotIndex(slot), GrantId(1)}}});
  };
  CHECK(ToProto(release(last), kBounds, kMessageBytes).ok());
  CHECK_THAT(error(release(last + 1)), Contains("slot is 4"));
  TrainerIdentity trainer;
  trainer.world_size = 1;
  CHECK(ToProto(PeerReport(PeerAttach{MemberId(1), trainer}), kBounds, kMessageBytes).ok());
  trainer.pid = -1;
  CHECK_THAT(error(PeerAttach{MemberId(1), trainer}), Contains("pid is -1"));
  trainer.pid = 0;
  trainer.world_size = kMaxTrainerRanks + 1;
  CHECK_THAT(error(PeerAttach{MemberId(1), trainer}), Contains("world_size is"));
}

// ---- layouts ----

PeerLayout Rows(MemberId member, int64_t rows) {
  Layout layout;
  layout.binding_generation = 3;
  layout.tensors.push_back({"w", DType::kFloat32, {rows, 8}});
  for (int64_t r = 0; r < rows; ++r) {
    layout.pieces.push_back({0, {{r, 0}, {1, 8}}, RegionId(7), r * 64, {8, 1}});
  }
  return {member, std::make_shared<const Layout>(std::move(layout)), CallId(11)};
}

TEST_CASE("A layout of 20,000 pieces arrives in chunks, without its addresses") {
  const PeerLayout layout = Rows(MemberId(5), 20'000);
  const auto messages = ToProto(PeerReport(layout), kBounds, kMinPeerMessageBytes);
  REQUIRE(messages.ok());
  CHECK(messages->size() > 4);
  ReportDecoder decoder(kBounds);
  for (size_t i = 0; i < messages->size(); ++i) {
    CHECK((*messages)[i].ByteSizeLong() < kMinPeerMessageBytes);
    const auto report = decoder.Decode((*messages)[i]);
    REQUIRE(report.ok());
    REQUIRE(report->has_value() == (i + 1 == messages->size()));
    if (!report->has_value()) continue;
    const auto& got = std::get<PeerLayout>(**report);
    CHECK(got.member == MemberId(5));
    CHECK(got.call == CallId(11));
    CHECK(got.layout->Digest() == layout.layout->Digest());
    CHECK(got.layout->pieces.size() == 20'000);
    CHECK(got.layout->pieces[9].region == RegionId());
    CHECK(got.layout->binding_generation == 0);
  }
}

// Room for so many bytes, shared by all that comes over the link.
struct Rooms {
  std::function<Room()> maker() {
    return [this] {
      const auto mine = std::shared_ptr<int64_t>(new int64_t(0), [this](const int64_t* taken) {
        held -= *taken;
        delete taken;
      });
      return [this, mine](int64_t bytes) {
        if (held + bytes - *mine > most) return absl::ResourceExhaustedError("no room");
        held += bytes - std::exchange(*mine, bytes);
        return absl::OkStatus();
      };
    };
  }
  int64_t most = 0;
  int64_t held = 0;
};

TEST_CASE("Layouts and manifests that came over a link were counted nowhere") {
  Rooms rooms{.most = 4 << 20};
  ReportDecoder decoder(kBounds, rooms.maker());
  const auto decode = [&decoder](const PeerReport& report) {
    std::optional<PeerReport> last;
    const auto messages = ToProto(report, kBounds, kMinPeerMessageBytes);
    REQUIRE(messages.ok());
    for (const v1::PeerMessage& message : *messages) {
      auto decoded = decoder.Decode(message);
      REQUIRE(decoded.ok());
      last = *std::move(decoded);
    }
    REQUIRE(last.has_value());
    return *std::move(last);
  };
  {
    const PeerReport kept = decode(Rows(MemberId(1), 10'000));
    CHECK(std::get<PeerLayout>(kept).room.ok());
    CHECK(rooms.held > 10'000 * static_cast<int64_t>(sizeof(Piece)));

    const PeerReport refused = decode(Rows(MemberId(2), 20'000));
    CHECK(absl::IsResourceExhausted(std::get<PeerLayout>(refused).room));
    CHECK(std::get<PeerLayout>(refused).layout == nullptr);
    CHECK(std::get<PeerLayout>(refused).call == CallId(11));
  }
  CHECK(rooms.held == 0);

  EngineIdentity engine;
  engine.instance = "i";
  engine.delivery = DeliveryMode::kLoader;
  engine.manifest.emplace(100, TensorSpec{std::string(400, 'x'), DType::kUint8, {1}});
  for (size_t i = 0; i < engine.manifest->size(); ++i) {
    (*engine.manifest)[i].name += std::to_string(i);
  }
  {
    const PeerReport kept = decode(PeerAttach{MemberId(3), engine});
    CHECK(std::get<PeerAttach>(kept).room.ok());
    CHECK(rooms.held > 100 * 400);
    rooms.most = rooms.held;
    const PeerReport refused = decode(PeerAttach{MemberId(4), engine});
    CHECK(absl::IsResourceExhausted(std::get<PeerAttach>(refused).room));
  }
  CHECK(rooms.held == 0);
}

TEST_CASE(
    "Chunks of another member's layout in between are refused; a member that goes takes its "
    "chunks along") {
  const auto one = ToProto(PeerReport(Rows(MemberId(1), 20'000)), kBounds, kMinPeerMessageBytes);
  const auto two = ToProto(PeerReport(Rows(MemberId(2), 20'000)), kBounds, kMinPeerMessageBytes);
  const auto gone =
      ToProto(PeerReport(MemberLost{MemberId(1), "died"}), kBounds, kMinPeerMessageBytes);
  ReportDecoder decoder(kBounds);
  REQUIRE(decoder.Decode(one->front()).ok());
  CHECK_THAT(Message(decoder.Decode(two->front()).status()), Contains("layout.member is 2"));
  REQUIRE(decoder.Decode(gone->front()).ok());
  CHECK(decoder.Decode(two->front()).ok());
}

TEST_CASE("A layout whose structure is wrong is refused") {
  const auto error = [](Layout layout) {
    const auto messages =
        ToProto(PeerReport(PeerLayout{
                    MemberId(1), std::make_shared<const Layout>(std::move(layout)), CallId(2)}),
                kBounds, kMessageBytes);
    ReportDecoder decoder(kBounds);
    const auto decoded = decoder.Decode(messages->front());
    CHECK(decoded.status().code() == absl::StatusCode::kInvalidArgument);
    return Message(decoded.status());
  };
  Layout twice = *Rows(MemberId(1), 2).layout;
  twice.tensors.push_back(twice.tensors[0]);
  CHECK_THAT(error(twice), Contains("layout of member 1"));
  Layout negative = *Rows(MemberId(1), 2).layout;
  negative.pieces[0].strides[1] = -1;
  CHECK_THAT(error(negative), Contains("is -1"));
  Layout huge = *Rows(MemberId(1), 2).layout;
  huge.tensors.Edit()[0].shape = {2, 8};
  huge.pieces = {{0, {{0, 0}, {2, 8}}, RegionId(), 0, {INT64_MAX / 8, 1}}};
  CHECK_THAT(error(huge), Contains("layout"));
}

TEST_CASE("A layout that names an element twice arrives as one that no destination can have") {
  Layout overlap = *Rows(MemberId(1), 2).layout;
  overlap.pieces[1].box.offset[0] = 0;
  const auto messages = ToProto(
      PeerReport(PeerLayout{MemberId(1), std::make_shared<const Layout>(overlap), CallId(2)}),
      kBounds, kMessageBytes);
  ReportDecoder decoder(kBounds);
  const auto decoded = decoder.Decode(messages->front());
  REQUIRE(decoded.ok());
  const auto& got = std::get<PeerLayout>(**decoded);
  CHECK(got.layout->pieces[1].box == overlap.pieces[1].box);
  CHECK(absl::IsInvalidArgument(got.destination));
  CHECK_THAT(Message(got.destination), Contains("w"));
}

// ---- order ----

TEST_CASE("A repeated sequence is dropped, a gap ends the link, and so does another incarnation") {
  PeerOrder order(10);
  CHECK(*order.Check(1, 10));
  CHECK(*order.Check(2, 10));
  CHECK_FALSE(*order.Check(2, 10));
  CHECK_FALSE(*order.Check(1, 99));
  CHECK(order.Check(4, 10).status().code() == absl::StatusCode::kAborted);
  CHECK(order.Check(0, 10).status().code() == absl::StatusCode::kAborted);
  CHECK(order.Check(3, 11).status().code() == absl::StatusCode::kFailedPrecondition);
  CHECK(*order.Check(3, 10));
}

TEST_CASE("What was under way when the group was replaced still counts, and nothing after it") {
  PeerOrder order(10);
  REQUIRE(order.Announce(11).ok());
  REQUIRE(order.Announce(12).ok());
  CHECK(*order.Check(1, 10));
  CHECK(*order.Check(2, 12));
  CHECK(order.Check(3, 11).status().code() == absl::StatusCode::kFailedPrecondition);
  for (size_t i = 0; i < kMaxIncarnationsAhead; ++i) REQUIRE(order.Announce(100 + i).ok());
  CHECK(order.Announce(1).code() == absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace refitd
