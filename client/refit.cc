#include "client/refit.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <new>
#include <optional>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "client/bucket.h"
#include "client/c_structures.h"
#include "client/engine.h"
#include "client/events.h"
#include "client/packer.h"
#include "client/python.h"
#include "client/refit_python.h"
#include "client/trainer.h"
#include "proto/delivery.h"
#include "transport/base/errors.h"
#include "transport/base/failure.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"
#include "transport/base/unique_fd.h"
#include "transport/base/version.h"
#include "transport/derive/derive.h"
#include "transport/plan/derived.h"

namespace client = refitd::client;
using client::BucketOf;
using client::CheckList;
using client::DimsOf;
using client::Null;
using client::Read;
using client::SpecOf;
using client::SpecsOf;
using client::Write;
using refitd::Error;
using refitd::InvalidField;
using refitd::Version;

struct refit_update {
  std::unique_ptr<client::Update> update;
  client::CommitResult result;  // of a successful commit or refit
};

struct refit_trainer {
  std::unique_ptr<client::Trainer> trainer;
  mutable refitd::Mutex mutex;
  client::CommitResult result ABSL_GUARDED_BY(mutex);  // of the last refit
};

struct refit_engine {
  std::unique_ptr<client::Engine> engine;
  // The memory that the last event's pointers point to. One thread takes events.
  client::Event event;
  std::vector<refit_view> views;
};

struct refit_hold {
  std::shared_ptr<const client::SlotMemory> slots;
};

struct refit_joiner {
  client::PartJoiner joiner;
  // These hold the memory that the pointers of the last add point to.
  std::vector<client::TensorView> whole;
  std::vector<refit_view> views;
};

struct refit_packer {
  std::shared_ptr<client::Packer> packer;  // Python's functions keep it as well
};

namespace {

// The failure of this thread's last call, and what the structure of the C interface points to.
struct LastFailure {
  absl::StatusCode code = absl::StatusCode::kOk;
  std::string what;
  refitd::Failure failure;
  std::vector<refit_suspect> suspects;
  std::vector<const char*> dirty;
};
thread_local LastFailure last;

void Note(absl::StatusCode code, std::string what, refitd::Failure failure) {
  last = {code, std::move(what), std::move(failure), {}, {}};
}

refit_status Report(const absl::Status& status) {
  Note(status.code(), refitd::Message(status), refitd::FailureOf(status));
  return static_cast<refit_status>(status.code());
}

// A call that succeeded tells of a failure that ended before.
void NoteOutcome(const std::string& reason, const refitd::Failure& failure) {
  Note(absl::StatusCode::kAborted, reason, failure);
}

refit_failure ShowLast() {
  const refitd::Failure& failure = last.failure;
  last.suspects.clear();
  for (const refitd::Suspect& suspect : failure.suspects) {
    last.suspects.push_back({static_cast<int32_t>(suspect.role), suspect.rank.value_or(-1),
                             suspect.pid, suspect.daemon.c_str(), suspect.instance.c_str()});
  }
  last.dirty.clear();
  for (const std::string& name : failure.dirty_instances) last.dirty.push_back(name.c_str());
  refit_failure shown{};
  shown.status = static_cast<int32_t>(last.code);
  shown.weights_left = static_cast<int32_t>(failure.weights);
  shown.what = last.what.c_str();
  shown.suspects = last.suspects.data();
  shown.suspects_named = static_cast<int64_t>(last.suspects.size());
  shown.suspect_count = failure.suspect_count;
  shown.dirty_instances = last.dirty.data();
  shown.dirty_named = static_cast<int64_t>(last.dirty.size());
  shown.dirty_count = failure.dirty_count;
  shown.tensor = failure.tensor.c_str();
  shown.field = failure.field.c_str();
  shown.version = failure.version.value_or(-1);
  shown.may_be_retried = failure.may_be_retried ? 1 : 0;
  return shown;
}

// Runs `body`, which returns an absl::Status, and lets no exception cross the C boundary.
template <typename Body>
refit_status Guarded(Body body) {
  try {
    return Report(body());
  } catch (const std::bad_alloc&) {
    return Report(Error(absl::StatusCode::kResourceExhausted, "out of memory"));
  } catch (const std::exception& error) {
    return Report(Error(absl::StatusCode::kInternal, "exception: {}", error.what()));
  }
}

struct Argument {
  const void* value;
  const char* name;
};
// The same where the arguments must not be null.
template <typename Body>
refit_status Guarded(std::initializer_list<Argument> needed, Body body) {
  for (const Argument& argument : needed) {
    if (argument.value == nullptr) return Report(Null(argument.name));
  }
  return Guarded(body);
}

std::function<void(absl::Status)> DoneOf(refit_done done, void* argument) {
  return [done, argument](const absl::Status& status) {
    if (done == nullptr) return;
    const refit_status code = Report(status);
    done(argument, code, refitd::Message(status).c_str());
  };
}

// Returns the packer's bucket. It takes the slot out of `slot`; null: the bucket carries the bytes.
absl::StatusOr<client::Bucket> PackedBucket(const client::Packer& packer, refit_slot* slot) {
  client::Bucket bucket;
  if (slot != nullptr) bucket.slot = std::move(slot->slot);
  if (slot != nullptr && bucket.slot == nullptr) {
    return Error(absl::StatusCode::kFailedPrecondition, "slot was pushed before");
  }
  if (packer.room() >= 0) {
    return Error(absl::StatusCode::kFailedPrecondition, "the packer's bucket was not ended");
  }
  bucket.packed = true;
  if (slot == nullptr) bucket.bytes.push_back(packer.bytes());
  bool whole = true;
  for (const client::Packer::Entry& entry : packer.entries()) {
    bucket.ranges.push_back(
        {static_cast<uint32_t>(bucket.tensors.size()), entry.start, entry.count});
    bucket.tensors.push_back(entry.tensor->spec);
    bucket.byte_offsets.push_back(entry.offset);
    whole = whole && entry.count == entry.tensor->elements;
  }
  if (whole) bucket.ranges.clear();
  return bucket;
}

absl::Status CheckNumber(const refit_packer* packer, int64_t number) {
  if (packer == nullptr) return Null("packer");
  if (packer->packer->known()->Has(number)) return absl::OkStatus();
  return InvalidField("number", "number is {}: the packer knows no such tensor", number);
}

std::string Text(const char* text) { return text == nullptr ? std::string() : std::string(text); }

absl::StatusOr<client::GroupSpec> GroupSpecOf(const refit_group_spec* given) {
  REFITD_ASSIGN_OR_RETURN(const refit_group_spec known, Read(given, "spec"));
  REFITD_RETURN_IF_ERROR(
      CheckList(known.engine_only_tensors, known.engine_only_count, "spec.engine_only_tensors"));
  client::GroupSpec spec;
  if (known.trainer_ranks != 0) spec.trainer_ranks = known.trainer_ranks;
  if (known.min_instances != 0) spec.min_instances = known.min_instances;
  spec.slot_bytes = known.slot_bytes;
  spec.slots = known.slots;
  for (int32_t i = 0; i < known.engine_only_count; ++i) {
    spec.engine_only_tensors.push_back(Text(known.engine_only_tensors[i]));
  }
  REFITD_RETURN_IF_ERROR(
      CheckList(known.unwanted_tensors, known.unwanted_count, "spec.unwanted_tensors"));
  for (int32_t i = 0; i < known.unwanted_count; ++i) {
    spec.unwanted_tensors.push_back(Text(known.unwanted_tensors[i]));
  }
  spec.max_lag = known.max_lag;
  spec.encrypted_data = known.encrypted_data != 0;
  spec.hold_previous_seconds = known.hold_previous_seconds;
  if (known.keep_seconds != 0) spec.keep_seconds = std::max(known.keep_seconds, 0);
  return spec;
}

absl::StatusOr<client::ConnectOptions> ConnectOf(const refit_connect_options* given) {
  REFITD_ASSIGN_OR_RETURN(const refit_connect_options known, Read(given, "connect"));
  client::ConnectOptions options;
  options.socket = Text(known.socket);
  options.group = Text(known.group);
  options.client = Text(known.client);
  options.coordinator = Text(known.coordinator);
  options.device = Text(known.device);
  options.address = Text(known.address);
  options.tls = {.certificate = Text(known.tls_certificate),
                 .key = Text(known.tls_key),
                 .roots = Text(known.tls_roots),
                 .server = Text(known.tls_server)};
  options.insecure = known.insecure != 0;
  if (known.cuda_library != nullptr) options.cuda_library = known.cuda_library;
  options.reattach = std::chrono::milliseconds(known.reattach_ms);
  if (known.silence_ms != 0) {
    options.silence = std::chrono::milliseconds(known.silence_ms == -1 ? 0 : known.silence_ms);
  }
  if (known.wait_ms != 0) options.wait = std::chrono::milliseconds(known.wait_ms);
  if (known.call_margin_ms != 0) {
    options.call_margin = std::chrono::milliseconds(known.call_margin_ms);
  }
  if (known.spec != nullptr) {
    REFITD_ASSIGN_OR_RETURN(options.spec, GroupSpecOf(known.spec));
  }
  return options;
}

// Gives a new handle out, only if `made` is a success.
template <typename Handle, typename Value, typename Member>
absl::Status Give(absl::StatusOr<Value> made, Member Handle::*member, Handle** out) {
  if (!made.ok()) return made.status();
  auto handle = std::make_unique<Handle>();
  (*handle).*member = *std::move(made);
  *out = handle.release();
  return absl::OkStatus();
}

template <typename Member>
absl::Status AddCudaBlock(Member* member, const void* ipc_handle, int64_t bytes,
                          refit_region** region) {
  if (ipc_handle == nullptr) return Null("ipc_handle");
  static_assert(REFIT_CUDA_IPC_HANDLE_BYTES == client::kCudaIpcHandleBytes);
  std::string handle(static_cast<const char*>(ipc_handle), client::kCudaIpcHandleBytes);
  return Give(member->AddCudaRegion(client::CudaIpcBlock{std::move(handle), bytes}),
              &refit_region::region, region);
}

// Duplicates a descriptor, because the caller keeps owning its own.
absl::StatusOr<refitd::UniqueFd> DuplicateOf(int descriptor) {
  refitd::UniqueFd own = refitd::Duplicate(descriptor);
  if (own.valid()) return own;
  return InvalidField("descriptor", "descriptor is {}: {}", descriptor, std::strerror(errno));
}

template <typename Member>
absl::Status AddMemfd(Member* member, int descriptor, int64_t bytes, refit_region** region) {
  REFITD_ASSIGN_OR_RETURN(refitd::UniqueFd own, DuplicateOf(descriptor));
  return Give(member->AddMemfd(std::move(own), bytes), &refit_region::region, region);
}

template <typename Member>
absl::Status AddCudaVmm(Member* member, int descriptor, int64_t bytes, uint64_t address,
                        refit_region** region) {
  REFITD_ASSIGN_OR_RETURN(refitd::UniqueFd own, DuplicateOf(descriptor));
  return Give(member->AddCudaRegion(std::move(own), bytes, address), &refit_region::region, region);
}

// The box of a tensor of that shape; null lists are as in refit_piece.
absl::StatusOr<refitd::Box> BoxOf(const int64_t* offset, const int64_t* extent,
                                  const refitd::Dims& shape) {
  const int32_t rank = static_cast<int32_t>(shape.size());
  refitd::Box box = refitd::WholeBox(shape);
  if (offset != nullptr) box.offset = DimsOf(offset, rank);
  if (extent != nullptr) box.extent = DimsOf(extent, rank);
  REFITD_RETURN_IF_ERROR(refitd::ValidateBox(box, shape));
  return box;
}

absl::StatusOr<refitd::Piece> PieceOf(const refit_piece& given,
                                      const std::vector<refitd::TensorSpec>& tensors) {
  if (given.tensor < 0 || given.tensor >= static_cast<int64_t>(tensors.size())) {
    return InvalidField("piece.tensor", "piece.tensor is {} of {} tensors", given.tensor,
                        tensors.size());
  }
  if (given.region == nullptr) return Null("piece.region");
  const refitd::Dims& shape = tensors[given.tensor].shape;
  refitd::Piece piece;
  piece.tensor = static_cast<uint32_t>(given.tensor);
  REFITD_ASSIGN_OR_RETURN(piece.box, BoxOf(given.offset, given.extent, shape));
  piece.strides = given.strides != nullptr
                      ? DimsOf(given.strides, static_cast<int32_t>(shape.size()))
                      : refitd::RowMajorStrides(piece.box.extent);
  piece.region = given.region->region->id();
  piece.byte_offset = given.byte_offset;
  return piece;
}

absl::StatusOr<refitd::Layout> LayoutOf(const refit_tensor* tensors, int64_t tensor_count,
                                        const refit_piece* pieces, int64_t piece_count) {
  refitd::Layout layout;
  REFITD_ASSIGN_OR_RETURN(layout.tensors, SpecsOf(tensors, tensor_count));
  REFITD_RETURN_IF_ERROR(CheckList(pieces, piece_count, "pieces"));
  for (int64_t i = 0; i < piece_count; ++i) {
    REFITD_ASSIGN_OR_RETURN(refitd::Piece piece, PieceOf(pieces[i], layout.tensors));
    layout.pieces.push_back(std::move(piece));
  }
  return layout;
}

absl::Status SetDerived(const refit_derivation* derivations, int64_t count,
                        refitd::Layout* layout) {
  REFITD_RETURN_IF_ERROR(CheckList(derivations, count, "derivations"));
  const auto tensors = static_cast<int64_t>(layout->tensors.size());
  for (int64_t i = 0; i < count; ++i) {
    const refit_derivation& given = derivations[i];
    if (given.tensor < 0 || given.tensor >= tensors ||
        (i > 0 && given.tensor <= derivations[i - 1].tensor)) {
      return InvalidField("derivations",
                          "derivations[{}].tensor is {} of {} tensors: they must ascend", i,
                          given.tensor, tensors);
    }
    if (given.source == nullptr) return Null("derivations.source");
    REFITD_ASSIGN_OR_RETURN(std::vector<refitd::TensorSpec> from, SpecsOf(given.source, 1));
    // The layout's check refuses numbers that are not known.
    const auto number = [](int32_t n) { return static_cast<uint8_t>(n < 0 || n > 255 ? 255 : n); };
    layout->tensors.Edit()[static_cast<size_t>(given.tensor)].derived =
        std::make_shared<refitd::Derivation>(
            refitd::Derivation{std::move(from.front()), refitd::DerivedKind(number(given.kind)),
                               refitd::DerivedRole(number(given.role))});
  }
  return absl::OkStatus();
}

absl::Status CheckAligned(const void* data, refitd::DType dtype, std::string_view field) {
  const auto bytes = static_cast<uintptr_t>(refitd::ElementBytes(dtype));
  if (reinterpret_cast<uintptr_t>(data) % bytes == 0) return absl::OkStatus();
  return InvalidField(field, "{} is {}, which is not a multiple of {} bytes", field, data, bytes);
}

absl::Status DeriveInto(const refit_tensor* tensor, const refit_derivation* derivation,
                        const void* source, const int64_t* offset, const int64_t* extent,
                        void* result) {
  refitd::Layout layout;
  REFITD_ASSIGN_OR_RETURN(layout.tensors, SpecsOf(tensor, 1));
  REFITD_RETURN_IF_ERROR(SetDerived(derivation, 1, &layout));
  const refitd::TensorSpec& derived = layout.tensors[0];
  REFITD_RETURN_IF_ERROR(refitd::ValidateDerived(derived));
  const refitd::TensorSpec& from = derived.derived->from;
  REFITD_RETURN_IF_ERROR(CheckAligned(source, from.dtype, "source"));
  REFITD_RETURN_IF_ERROR(CheckAligned(result, derived.dtype, "result"));
  REFITD_ASSIGN_OR_RETURN(const refitd::Box box, BoxOf(offset, extent, derived.shape));
  if (refitd::NeedsGpu(derived.derived->kind)) {
    return InvalidField("derivation", "kind {} is computed by GPUs only",
                        refitd::NameOf(derived.derived->kind));
  }
  if (refitd::ElementCount(box) == 0) return absl::OkStatus();
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): it is only read
  auto* const data = const_cast<char*>(static_cast<const char*>(source));
  const refitd::HeldPiece held{derived.derived,
                               {{from.dtype, from.shape, refitd::WholeBox(from.shape),
                                 refitd::RowMajorStrides(from.shape), data, from.name}}};
  const std::optional<refitd::Dims> fault =
      refitd::Derive(held, derived.dtype, box, static_cast<char*>(result));
  if (!fault.has_value()) return absl::OkStatus();
  return refitd::NoResult(*derived.derived, fmt::format("element [{}]", fmt::join(*fault, ", ")));
}

absl::Status SetPushed(const int64_t* pushed, int64_t count, refitd::Layout* layout) {
  REFITD_RETURN_IF_ERROR(CheckList(pushed, count, "pushed"));
  const auto tensors = static_cast<int64_t>(layout->tensors.size());
  for (int64_t i = 0; i < count; ++i) {
    if (pushed[i] < 0 || pushed[i] >= tensors) {
      return InvalidField("pushed", "pushed[{}] is {} of {} tensors", i, pushed[i], tensors);
    }
    layout->pushed_tensors.push_back(static_cast<uint32_t>(pushed[i]));
  }
  std::sort(layout->pushed_tensors.begin(), layout->pushed_tensors.end());
  return absl::OkStatus();
}

absl::StatusOr<std::optional<refitd::Verification>> VerificationOf(int32_t given) {
  if (given < REFIT_VERIFICATION_DEFAULT || given > REFIT_VERIFICATION_READBACK) {
    return InvalidField("verification", "verification is {}", given);
  }
  if (given == REFIT_VERIFICATION_DEFAULT) return std::nullopt;
  return static_cast<refitd::Verification>(given);
}

absl::StatusOr<client::RefitOptions> RefitOptionsOf(const refit_refit_options* raw) {
  REFITD_ASSIGN_OR_RETURN(const refit_refit_options given, Read(raw, "options"));
  client::RefitOptions options;
  options.version = Version(given.version);
  options.duration = std::chrono::milliseconds(given.duration_ms);
  REFITD_ASSIGN_OR_RETURN(options.verification, VerificationOf(given.verification));
  options.evict_late = given.evict_late != 0;
  options.hold = given.hold != 0;
  return options;
}

// Writes the result of a commit or a refit, if the caller asked for it.
absl::Status Show(const client::CommitResult& committed, refit_commit_result* result) {
  if (result == nullptr) return absl::OkStatus();
  refit_commit_result shown{};
  shown.version = committed.version.value();
  shown.bytes = committed.bytes;
  shown.seconds = committed.seconds;
  shown.instances = static_cast<int32_t>(committed.instances.size());
  for (const client::InstanceOutcome& outcome : committed.instances) {
    shown.committed += outcome.committed ? 1 : 0;
  }
  for (const client::BroadcastTotals& totals : committed.pushed) {
    const auto method = static_cast<size_t>(totals.method);
    if (method < std::size(shown.pushed_bytes)) shown.pushed_bytes[method] = totals.bytes;
  }
  shown.left_out_tensors = committed.left_out_tensors;
  shown.left_out_bytes = committed.left_out_bytes;
  return Write(shown, result, "result");
}

// Checks `result` before the commit, so that a bad structure is refused before anything happens.
absl::Status CheckResult(refit_commit_result* result) {
  return result == nullptr ? absl::OkStatus() : Write(refit_commit_result{}, result, "result");
}

absl::Status GiveOutcome(const std::vector<client::InstanceOutcome>& outcomes, int32_t index,
                         const char** instance, int32_t* committed, const char** reason) {
  if (index < 0 || index >= static_cast<int32_t>(outcomes.size())) {
    return Error(absl::StatusCode::kOutOfRange, "instance {} of {}", index, outcomes.size());
  }
  const client::InstanceOutcome& outcome = outcomes[index];
  if (instance != nullptr) *instance = outcome.instance.c_str();
  if (committed != nullptr) *committed = outcome.committed ? 1 : 0;
  if (reason != nullptr) *reason = outcome.reason.c_str();
  return absl::OkStatus();
}

void NoteIfLost(const client::InstanceOutcome& outcome) {
  if (!outcome.committed) NoteOutcome(outcome.reason, outcome.failure);
}

absl::Status GiveLeftOut(const std::vector<std::string>& names, int32_t index, const char** name) {
  if (name == nullptr) return Null("name");
  if (index < 0 || index >= static_cast<int32_t>(names.size())) {
    return Error(absl::StatusCode::kOutOfRange, "name {} of {}", index, names.size());
  }
  *name = names[index].c_str();
  return absl::OkStatus();
}

absl::StatusOr<client::EngineOptions> EngineOptionsOf(const refit_engine_options* raw) {
  REFITD_ASSIGN_OR_RETURN(const refit_engine_options given, Read(raw, "options"));
  client::EngineOptions options;
  REFITD_ASSIGN_OR_RETURN(options.connect, ConnectOf(given.connect));
  options.instance = Text(given.instance);
  options.rank = given.rank;
  if (given.world_size != 0) options.world_size = given.world_size;
  // The C interface counts from 0, so that the default is the first.
  const std::optional<refitd::DeliveryMode> delivery =
      refitd::DeliveryOf(int64_t{given.delivery} + 1);
  if (!delivery.has_value()) {
    return InvalidField("delivery", "delivery is {}", given.delivery);
  }
  options.delivery = *delivery;
  if (given.has_manifest != 0) {
    REFITD_ASSIGN_OR_RETURN(options.manifest, SpecsOf(given.manifest, given.manifest_count));
  }
  if (given.has_held_version != 0) {
    options.held_version = Version(given.held_version);
    options.held_origin = given.held_origin;
    options.held_digest = given.held_digest;
    if (given.has_held_content != 0) options.held_content = Version(given.held_content);
  }
  options.held_owner = Text(given.held_owner);
  options.trainer_identity = Text(given.trainer_identity);
  options.dirty = given.dirty != 0;
  options.restore = given.restore != 0;
  options.wants_staged = given.wants_staged != 0;
  if (given.catch_up != REFIT_CATCH_UP_DEFAULT && given.catch_up != REFIT_CATCH_UP_NEVER) {
    return InvalidField("catch_up", "catch_up is {}", given.catch_up);
  }
  // Callers that were compiled before the field `catch_up` existed take no part in catch-ups.
  constexpr size_t kWithCatchUp = offsetof(refit_engine_options, catch_up) + sizeof(given.catch_up);
  options.catch_up = given.struct_size >= kWithCatchUp && given.catch_up == REFIT_CATCH_UP_DEFAULT;
  return options;
}

absl::StatusOr<refitd::BroadcastMethod> BroadcastOf(int32_t given) {
  if (given < REFIT_BROADCAST_AUTO || given > REFIT_BROADCAST_NCCL) {
    return InvalidField("broadcast", "broadcast is {}", given);
  }
  return static_cast<refitd::BroadcastMethod>(given);
}

absl::StatusOr<client::BeginOptions> BeginOptionsOf(const refit_begin_options* raw) {
  REFITD_ASSIGN_OR_RETURN(const refit_begin_options given, Read(raw, "options"));
  client::BeginOptions options;
  options.version = Version(given.version);
  options.duration = std::chrono::milliseconds(given.duration_ms);
  REFITD_ASSIGN_OR_RETURN(options.verification, VerificationOf(given.verification));
  options.evict_late = given.evict_late != 0;
  options.hold = given.hold != 0;
  options.tensor_count = given.tensor_count;
  options.total_bytes = given.total_bytes;
  REFITD_ASSIGN_OR_RETURN(options.broadcast, BroadcastOf(given.broadcast));
  options.without_layout = given.without_layout != 0;
  if (given.note != nullptr) options.note = given.note;
  return options;
}

absl::Status GiveVersion(std::optional<Version> version, int64_t* out) {
  if (!version) return Error(absl::StatusCode::kNotFound, "there is no version");
  *out = version->value();
  return absl::OkStatus();
}

}  // namespace

extern "C" {

const char* refit_version(void) { return refitd::kVersion; }

const char* refit_last_error(void) { return last.what.c_str(); }

refit_status refit_last_failure(refit_failure* failure) {
  if (failure == nullptr) return REFIT_INVALID_ARGUMENT;
  return static_cast<refit_status>(Write(ShowLast(), failure, "failure").code());
}

const char* refit_status_name(int32_t status) {
  static constexpr const char* kNames[] = {"OK",
                                           "CANCELLED",
                                           "UNKNOWN",
                                           "INVALID_ARGUMENT",
                                           "DEADLINE_EXCEEDED",
                                           "NOT_FOUND",
                                           "ALREADY_EXISTS",
                                           "PERMISSION_DENIED",
                                           "RESOURCE_EXHAUSTED",
                                           "FAILED_PRECONDITION",
                                           "ABORTED",
                                           "OUT_OF_RANGE",
                                           "UNIMPLEMENTED",
                                           "INTERNAL",
                                           "UNAVAILABLE",
                                           "DATA_LOSS",
                                           "UNAUTHENTICATED"};
  const bool known = status >= 0 && status < static_cast<int32_t>(std::size(kNames));
  return known ? kNames[status] : "UNKNOWN";
}

char* refit_region_data(const refit_region* region) {
  return region == nullptr ? nullptr : region->region->data();
}

int64_t refit_region_bytes(const refit_region* region) {
  return region == nullptr ? 0 : region->region->bytes();
}

void refit_region_free(refit_region* region) { delete region; }

refit_status refit_derive(const refit_tensor* tensor, const refit_derivation* derivation,
                          const void* source, const int64_t* offset, const int64_t* extent,
                          void* result) {
  return Guarded(
      {{tensor, "tensor"}, {derivation, "derivation"}, {source, "source"}, {result, "result"}},
      [&] { return DeriveInto(tensor, derivation, source, offset, extent, result); });
}

refit_status refit_arena_new(const refit_connect_options* connect, int64_t bytes, int32_t back,
                             refit_arena** arena) {
  return Guarded({{connect, "connect"}, {arena, "arena"}}, [&]() -> absl::Status {
    REFITD_ASSIGN_OR_RETURN(const client::ConnectOptions options, ConnectOf(connect));
    if (back != REFIT_BACK_DEVICE && back != REFIT_BACK_HOST) {
      return InvalidField("back", "back is {}", back);
    }
    const refitd::SidesIn in =
        back == REFIT_BACK_HOST ? refitd::SidesIn::kHost : refitd::SidesIn::kDevice;
    return Give(client::Arena::Make(bytes, options, in), &refit_arena::arena, arena);
  });
}

char* refit_arena_data(const refit_arena* arena) {
  return arena == nullptr ? nullptr : arena->arena->data();
}

int64_t refit_arena_bytes(const refit_arena* arena) {
  return arena == nullptr ? 0 : arena->arena->bytes();
}

int32_t refit_arena_back(const refit_arena* arena) {
  const bool host = arena != nullptr && arena->arena->sides_in() == refitd::SidesIn::kHost;
  return host ? REFIT_BACK_HOST : REFIT_BACK_DEVICE;
}

refit_status refit_arena_map_back(const refit_arena* arena, char** data) {
  return Guarded({{arena, "arena"}, {data, "data"}}, [&]() -> absl::Status {
    REFITD_ASSIGN_OR_RETURN(*data, arena->arena->MapBack());
    return absl::OkStatus();
  });
}

void refit_arena_unmap_back(const refit_arena* arena) {
  if (arena != nullptr) arena->arena->UnmapBack();
}

void refit_arena_free(refit_arena* arena) { delete arena; }

refit_status refit_replace_group(const refit_connect_options* options) {
  return Guarded([&]() -> absl::Status {
    REFITD_ASSIGN_OR_RETURN(const client::ConnectOptions connect, ConnectOf(options));
    return client::ReplaceGroup(connect).status();
  });
}

refit_status refit_trainer_attach(const refit_trainer_options* options, refit_trainer** trainer) {
  return Guarded({{trainer, "trainer"}}, [&]() -> absl::Status {
    REFITD_ASSIGN_OR_RETURN(const refit_trainer_options given, Read(options, "options"));
    client::TrainerOptions wanted;
    REFITD_ASSIGN_OR_RETURN(wanted.connect, ConnectOf(given.connect));
    wanted.rank = given.rank;
    if (given.world_size != 0) wanted.world_size = given.world_size;
    return Give(client::Trainer::Attach(wanted), &refit_trainer::trainer, trainer);
  });
}

void refit_trainer_free(refit_trainer* trainer) { delete trainer; }

refit_status refit_trainer_health(const refit_trainer* trainer) {
  return Guarded([&] { return trainer == nullptr ? Null("trainer") : trainer->trainer->health(); });
}

int32_t refit_trainer_reattachments(const refit_trainer* trainer) {
  return trainer == nullptr ? 0 : trainer->trainer->reattachments();
}

refit_status refit_trainer_group_version(const refit_trainer* trainer, int64_t* version) {
  return Guarded({{trainer, "trainer"}, {version, "version"}},
                 [&] { return GiveVersion(trainer->trainer->group_version(), version); });
}

refit_status refit_trainer_get_update(refit_trainer* trainer, int64_t version, int32_t* outcome) {
  client::UpdateOutcome found;
  const refit_status status =
      Guarded({{trainer, "trainer"}, {outcome, "outcome"}}, [&]() -> absl::Status {
        REFITD_ASSIGN_OR_RETURN(found, trainer->trainer->GetUpdate(Version(version)));
        *outcome = found.kind;
        return absl::OkStatus();
      });
  if (found.kind == client::UpdateOutcome::kAborted) NoteOutcome(found.reason, found.failure);
  return status;
}

refit_status refit_trainer_abort(refit_trainer* trainer, int64_t version, const char* reason) {
  return Guarded({{trainer, "trainer"}},
                 [&] { return trainer->trainer->Abort(Version(version), Text(reason)); });
}

refit_status refit_trainer_rollback(refit_trainer* trainer, int64_t undone, int64_t* version) {
  return Guarded({{trainer, "trainer"}, {version, "version"}}, [&]() -> absl::Status {
    std::optional<Version> wanted;
    if (undone != -1) wanted = Version(undone);
    REFITD_ASSIGN_OR_RETURN(client::CommitResult committed, trainer->trainer->Rollback(wanted));
    *version = committed.version.value();
    return absl::OkStatus();
  });
}

refit_status refit_trainer_release_previous(refit_trainer* trainer) {
  return Guarded({{trainer, "trainer"}}, [&] { return trainer->trainer->ReleasePrevious(); });
}

refit_status refit_trainer_new_region(refit_trainer* trainer, int64_t bytes,
                                      refit_region** region) {
  return Guarded({{trainer, "trainer"}, {region, "region"}}, [&] {
    return Give(trainer->trainer->NewRegion(bytes), &refit_region::region, region);
  });
}

refit_status refit_trainer_add_memfd(refit_trainer* trainer, int descriptor, int64_t bytes,
                                     refit_region** region) {
  return Guarded({{trainer, "trainer"}, {region, "region"}},
                 [&] { return AddMemfd(trainer->trainer.get(), descriptor, bytes, region); });
}

refit_status refit_trainer_add_cuda_block(refit_trainer* trainer, const void* ipc_handle,
                                          int64_t bytes, refit_region** region) {
  return Guarded({{trainer, "trainer"}, {region, "region"}},
                 [&] { return AddCudaBlock(trainer->trainer.get(), ipc_handle, bytes, region); });
}

refit_status refit_trainer_add_cuda_vmm(refit_trainer* trainer, int descriptor, int64_t bytes,
                                        refit_region** region) {
  return Guarded({{trainer, "trainer"}, {region, "region"}},
                 [&] { return AddCudaVmm(trainer->trainer.get(), descriptor, bytes, 0, region); });
}

refit_status refit_trainer_add_cuda_vmm_at(refit_trainer* trainer, int descriptor, int64_t bytes,
                                           uint64_t address, refit_region** region) {
  return Guarded({{trainer, "trainer"}, {region, "region"}}, [&] {
    return AddCudaVmm(trainer->trainer.get(), descriptor, bytes, address, region);
  });
}

refit_status refit_trainer_begin(refit_trainer* trainer, const refit_begin_options* options,
                                 refit_update** update) {
  return Guarded({{trainer, "trainer"}, {update, "update"}}, [&]() -> absl::Status {
    REFITD_ASSIGN_OR_RETURN(const client::BeginOptions wanted, BeginOptionsOf(options));
    return Give(trainer->trainer->Begin(wanted), &refit_update::update, update);
  });
}

void refit_update_free(refit_update* update) { delete update; }

int32_t refit_update_instances(const refit_update* update) {
  return update == nullptr ? 0 : update->update->instances();
}

int32_t refit_update_leasable_slots(const refit_update* update) {
  return update == nullptr ? 0 : update->update->leasable_slots();
}

refit_status refit_update_lease_slot(refit_update* update, int64_t wait_ms, refit_slot** slot) {
  return Guarded({{update, "update"}, {slot, "slot"}}, [&] {
    return Give(update->update->LeaseSlot(std::chrono::milliseconds(wait_ms)), &refit_slot::slot,
                slot);
  });
}

char* refit_slot_data(const refit_slot* slot) {
  return slot == nullptr || slot->slot == nullptr ? nullptr : slot->slot->data();
}

int64_t refit_slot_bytes(const refit_slot* slot) {
  return slot == nullptr || slot->slot == nullptr ? 0 : slot->slot->bytes();
}

void refit_slot_free(refit_slot* slot) { delete slot; }

refit_status refit_update_push(refit_update* update, const refit_bucket* bucket) {
  return Guarded({{update, "update"}}, [&]() -> absl::Status {
    REFITD_ASSIGN_OR_RETURN(client::Bucket wanted, BucketOf(bucket));
    return update->update->Push(std::move(wanted));
  });
}

refit_status refit_update_push_async(refit_update* update, const refit_bucket* bucket,
                                     refit_done done, void* argument) {
  return Guarded({{update, "update"}}, [&]() -> absl::Status {
    REFITD_ASSIGN_OR_RETURN(client::Bucket wanted, BucketOf(bucket));
    update->update->PushAsync(std::move(wanted), DoneOf(done, argument));
    return absl::OkStatus();
  });
}

refit_status refit_update_flush(refit_update* update) {
  return Guarded([&] { return update == nullptr ? Null("update") : update->update->Flush(); });
}

refit_status refit_update_commit(refit_update* update, int64_t tensor_count,
                                 refit_commit_result* result) {
  return Guarded({{update, "update"}}, [&]() -> absl::Status {
    REFITD_RETURN_IF_ERROR(CheckResult(result));
    REFITD_ASSIGN_OR_RETURN(client::CommitResult committed, update->update->Commit(tensor_count));
    const absl::Status shown = Show(committed, result);
    update->result = std::move(committed);
    return shown;
  });
}

refit_status refit_update_refit(refit_update* update, refit_commit_result* result) {
  return Guarded({{update, "update"}}, [&]() -> absl::Status {
    REFITD_RETURN_IF_ERROR(CheckResult(result));
    REFITD_ASSIGN_OR_RETURN(client::CommitResult committed, update->update->Refit());
    const absl::Status shown = Show(committed, result);
    update->result = std::move(committed);
    return shown;
  });
}

refit_status refit_update_outcome(const refit_update* update, int32_t index, const char** instance,
                                  int32_t* committed, const char** reason) {
  const refit_status status = Guarded({{update, "update"}}, [&] {
    return GiveOutcome(update->result.instances, index, instance, committed, reason);
  });
  if (status == REFIT_OK) NoteIfLost(update->result.instances[static_cast<size_t>(index)]);
  return status;
}

refit_status refit_trainer_register(refit_trainer* trainer, const refit_tensor* tensors,
                                    int64_t tensor_count, const refit_piece* pieces,
                                    int64_t piece_count, const int64_t* pushed,
                                    int64_t pushed_count) {
  return Guarded({{trainer, "trainer"}}, [&]() -> absl::Status {
    REFITD_ASSIGN_OR_RETURN(refitd::Layout layout,
                            LayoutOf(tensors, tensor_count, pieces, piece_count));
    REFITD_RETURN_IF_ERROR(SetPushed(pushed, pushed_count, &layout));
    return trainer->trainer->Register(std::move(layout));
  });
}

refit_status refit_trainer_refit(refit_trainer* trainer, const refit_refit_options* options,
                                 refit_commit_result* result) {
  return Guarded({{trainer, "trainer"}}, [&]() -> absl::Status {
    REFITD_RETURN_IF_ERROR(CheckResult(result));
    REFITD_ASSIGN_OR_RETURN(const client::RefitOptions wanted, RefitOptionsOf(options));
    REFITD_ASSIGN_OR_RETURN(client::CommitResult committed, trainer->trainer->Refit(wanted));
    const absl::Status shown = Show(committed, result);
    refitd::MutexLock lock(&trainer->mutex);
    trainer->result = std::move(committed);
    return shown;
  });
}

refit_status refit_trainer_outcome(const refit_trainer* trainer, int32_t index,
                                   const char** instance, int32_t* committed, const char** reason) {
  client::InstanceOutcome found{"", true, ""};
  const refit_status status = Guarded({{trainer, "trainer"}}, [&]() -> absl::Status {
    refitd::MutexLock lock(&trainer->mutex);
    REFITD_RETURN_IF_ERROR(
        GiveOutcome(trainer->result.instances, index, instance, committed, reason));
    found = trainer->result.instances[static_cast<size_t>(index)];
    return absl::OkStatus();
  });
  NoteIfLost(found);
  return status;
}

refit_status refit_update_left_out(const refit_update* update, int32_t index, const char** name) {
  return Guarded({{update, "update"}},
                 [&] { return GiveLeftOut(update->result.left_out, index, name); });
}

refit_status refit_trainer_left_out(const refit_trainer* trainer, int32_t index,
                                    const char** name) {
  return Guarded({{trainer, "trainer"}}, [&]() -> absl::Status {
    refitd::MutexLock lock(&trainer->mutex);
    return GiveLeftOut(trainer->result.left_out, index, name);
  });
}

refit_status refit_update_abort(refit_update* update, const char* reason) {
  return Guarded(
      [&] { return update == nullptr ? Null("update") : update->update->Abort(Text(reason)); });
}

refit_status refit_update_lost(refit_update* update) {
  return Guarded([&] { return update == nullptr ? Null("update") : update->update->Lost(); });
}

refit_status refit_engine_attach(const refit_engine_options* options, refit_engine** engine) {
  return Guarded({{engine, "engine"}}, [&]() -> absl::Status {
    REFITD_ASSIGN_OR_RETURN(const client::EngineOptions wanted, EngineOptionsOf(options));
    return Give(client::Engine::Attach(wanted), &refit_engine::engine, engine);
  });
}

void refit_engine_free(refit_engine* engine) { delete engine; }

refit_status refit_engine_new_region(refit_engine* engine, int64_t bytes, refit_region** region) {
  return Guarded({{engine, "engine"}, {region, "region"}}, [&] {
    return Give(engine->engine->NewRegion(bytes), &refit_region::region, region);
  });
}

refit_status refit_engine_take_kept(refit_engine* engine, int32_t index, refit_arena** arena) {
  return Guarded({{engine, "engine"}, {arena, "arena"}},
                 [&] { return Give(engine->engine->TakeKept(index), &refit_arena::arena, arena); });
}

refit_status refit_engine_add_arena(refit_engine* engine, const refit_arena* arena,
                                    refit_region** region) {
  return Guarded({{engine, "engine"}, {arena, "arena"}, {region, "region"}}, [&] {
    return Give(engine->engine->AddArena(arena->arena), &refit_region::region, region);
  });
}

refit_status refit_engine_add_memfd(refit_engine* engine, int descriptor, int64_t bytes,
                                    refit_region** region) {
  return Guarded({{engine, "engine"}, {region, "region"}},
                 [&] { return AddMemfd(engine->engine.get(), descriptor, bytes, region); });
}

refit_status refit_engine_add_cuda_block(refit_engine* engine, const void* ipc_handle,
                                         int64_t bytes, refit_region** region) {
  return Guarded({{engine, "engine"}, {region, "region"}},
                 [&] { return AddCudaBlock(engine->engine.get(), ipc_handle, bytes, region); });
}

refit_status refit_engine_add_cuda_vmm(refit_engine* engine, int descriptor, int64_t bytes,
                                       refit_region** region) {
  return Guarded({{engine, "engine"}, {region, "region"}},
                 [&] { return AddCudaVmm(engine->engine.get(), descriptor, bytes, 0, region); });
}

refit_status refit_engine_add_cuda_vmm_at(refit_engine* engine, int descriptor, int64_t bytes,
                                          uint64_t address, refit_region** region) {
  return Guarded({{engine, "engine"}, {region, "region"}}, [&] {
    return AddCudaVmm(engine->engine.get(), descriptor, bytes, address, region);
  });
}

refit_status refit_engine_register(refit_engine* engine, const refit_tensor* tensors,
                                   int64_t tensor_count, const refit_piece* pieces,
                                   int64_t piece_count, const refit_derivation* derivations,
                                   int64_t derivation_count) {
  return Guarded({{engine, "engine"}}, [&]() -> absl::Status {
    REFITD_ASSIGN_OR_RETURN(refitd::Layout layout,
                            LayoutOf(tensors, tensor_count, pieces, piece_count));
    REFITD_RETURN_IF_ERROR(SetDerived(derivations, derivation_count, &layout));
    return engine->engine->Register(std::move(layout));
  });
}

refit_status refit_engine_next(refit_engine* engine, int64_t timeout_ms, refit_event* event) {
  const refit_status status =
      Guarded({{engine, "engine"}, {event, "event"}}, [&]() -> absl::Status {
        // A bad structure is refused before an event is taken.
        REFITD_RETURN_IF_ERROR(Write(refit_event{}, event, "event"));
        REFITD_ASSIGN_OR_RETURN(engine->event,
                                engine->engine->Next(std::chrono::milliseconds(timeout_ms)));
        return Write(client::Show(engine->event, &engine->views), event, "event");
      });
  if (status != REFIT_OK) return status;
  const auto* aborted = std::get_if<client::Aborted>(&engine->event);
  if (aborted != nullptr) NoteOutcome(aborted->reason, aborted->failure);
  return status;
}

refit_status refit_engine_processed(refit_engine* engine, uint64_t update_id) {
  return Guarded({{engine, "engine"}},
                 [&] { return engine->engine->Processed(refitd::UpdateId(update_id)); });
}

refit_status refit_engine_ready(refit_engine* engine, int64_t version, int64_t stopped_us) {
  return Guarded({{engine, "engine"}}, [&] {
    // An update takes no day (limits of daemon/config.cc), and the sum with a time must not
    // overflow.
    constexpr std::chrono::microseconds kLongest = std::chrono::hours(24);
    std::optional<refitd::Duration> stopped;
    if (stopped_us >= 0) stopped = std::min(std::chrono::microseconds(stopped_us), kLongest);
    return engine->engine->Ready(Version(version), stopped);
  });
}

refit_status refit_engine_ack(refit_engine* engine, uint64_t update_id, int64_t part) {
  return Guarded({{engine, "engine"}}, [&] {
    client::Part acknowledged;
    acknowledged.update = refitd::UpdateId(update_id);
    acknowledged.part = refitd::PartSeq(part);
    return engine->engine->Ack(acknowledged);
  });
}

refit_status refit_engine_fail(refit_engine* engine, int64_t version, const char* reason) {
  return Guarded({{engine, "engine"}},
                 [&] { return engine->engine->Fail(Version(version), Text(reason)); });
}

refit_status refit_engine_hold(const refit_engine* engine, refit_hold** hold) {
  return Guarded({{engine, "engine"}, {hold, "hold"}}, [&]() -> absl::Status {
    const auto* part = std::get_if<client::Part>(&engine->event);
    if (part == nullptr) {
      return Error(absl::StatusCode::kFailedPrecondition, "the engine's last event is no part");
    }
    auto made = std::make_unique<refit_hold>();
    made->slots = part->slots;
    *hold = made.release();
    return absl::OkStatus();
  });
}

void refit_hold_free(refit_hold* hold) { delete hold; }

refit_status refit_joiner_new(refit_joiner** joiner) {
  return Guarded({{joiner, "joiner"}}, [&]() -> absl::Status {
    *joiner = std::make_unique<refit_joiner>().release();
    return absl::OkStatus();
  });
}

void refit_joiner_free(refit_joiner* joiner) { delete joiner; }

refit_status refit_joiner_add(refit_joiner* joiner, const refit_engine* engine,
                              const refit_view** views, int64_t* view_count) {
  return Guarded(
      {{joiner, "joiner"}, {engine, "engine"}, {views, "views"}, {view_count, "view_count"}},
      [&]() -> absl::Status {
        const auto* part = std::get_if<client::Part>(&engine->event);
        if (part == nullptr) {
          return Error(absl::StatusCode::kFailedPrecondition, "the engine's last event is no part");
        }
        REFITD_ASSIGN_OR_RETURN(joiner->whole, joiner->joiner.Add(*part));
        client::Show(joiner->whole, &joiner->views);
        *views = joiner->views.data();
        *view_count = static_cast<int64_t>(joiner->views.size());
        return absl::OkStatus();
      });
}

void refit_joiner_reset(refit_joiner* joiner) {
  if (joiner != nullptr) joiner->joiner.Reset();
}

int64_t refit_joiner_unfinished(const refit_joiner* joiner) {
  return joiner == nullptr ? 0 : static_cast<int64_t>(joiner->joiner.Unfinished().size());
}

int32_t refit_engine_weights(const refit_engine* engine) {
  if (engine == nullptr) return REFIT_WEIGHTS_UNKNOWN;
  return static_cast<int32_t>(engine->engine->weights());
}

int32_t refit_engine_reattachments(const refit_engine* engine) {
  return engine == nullptr ? 0 : engine->engine->reattachments();
}

refit_status refit_engine_version(const refit_engine* engine, int64_t* version) {
  return Guarded({{engine, "engine"}, {version, "version"}},
                 [&] { return GiveVersion(engine->engine->version(), version); });
}

}  // extern "C"

// ---- packing ----

refit_status refit_packer_new(const refit_packer* like, refit_packer** packer) {
  return Guarded({{packer, "packer"}}, [&]() -> absl::Status {
    auto made = std::make_unique<refit_packer>();
    made->packer = std::make_shared<client::Packer>(
        like == nullptr ? std::make_shared<client::TensorTable>() : like->packer->known());
    *packer = made.release();
    return absl::OkStatus();
  });
}

void refit_packer_free(refit_packer* packer) { delete packer; }

refit_status refit_packer_learn(refit_packer* packer, const refit_tensor* tensor, int64_t* number) {
  return Guarded(
      {{packer, "packer"}, {tensor, "tensor"}, {number, "number"}}, [&]() -> absl::Status {
        REFITD_ASSIGN_OR_RETURN(refitd::TensorSpec spec, SpecOf(*tensor));
        REFITD_ASSIGN_OR_RETURN(*number, packer->packer->known()->Learn(std::move(spec)));
        return absl::OkStatus();
      });
}

refit_status refit_packer_begin(refit_packer* packer, void* data, int64_t bytes) {
  return Guarded({{packer, "packer"}}, [&]() -> absl::Status {
    if (bytes < 0) {
      return InvalidField("bytes", "bytes is {}: it is negative", bytes);
    }
    packer->packer->Begin(static_cast<char*>(data), bytes);
    return absl::OkStatus();
  });
}

int64_t refit_packer_count(const refit_packer* packer) {
  return packer == nullptr ? 0 : packer->packer->count();
}

int64_t refit_packer_room(const refit_packer* packer, int64_t number) {
  return CheckNumber(packer, number).ok() ? packer->packer->RoomFor(number) : -1;
}

refit_status refit_packer_reserve(refit_packer* packer, int64_t number, int64_t bytes,
                                  int64_t* byte_offset) {
  return Guarded([&]() -> absl::Status {
    REFITD_RETURN_IF_ERROR(CheckNumber(packer, number));
    if (byte_offset == nullptr) return Null("byte_offset");
    if (bytes < 0) {
      return InvalidField("bytes", "bytes is {}: it is negative", bytes);
    }
    const std::optional<int64_t> offset = packer->packer->Reserve(number, bytes);
    if (!offset.has_value()) {
      return refitd::AboutTensor(Error(absl::StatusCode::kResourceExhausted,
                                       "tensor '{}': {} bytes, of which the bucket has room for {}",
                                       packer->packer->known()->At(number).spec.name, bytes,
                                       packer->packer->RoomFor(number)),
                                 packer->packer->known()->At(number).spec.name);
    }
    *byte_offset = *offset;
    return absl::OkStatus();
  });
}

refit_status refit_packer_add(refit_packer* packer, int64_t number, int64_t start, int64_t count,
                              int64_t byte_offset) {
  return Guarded([&]() -> absl::Status {
    REFITD_RETURN_IF_ERROR(CheckNumber(packer, number));
    return packer->packer->Add(number, start, count, byte_offset);
  });
}

void refit_packer_end(refit_packer* packer) {
  if (packer != nullptr) packer->packer->End();
}

refit_status refit_packer_push(const refit_packer* packer, refit_update* update, refit_slot* slot,
                               refit_done done, void* argument) {
  return Guarded({{packer, "packer"}, {update, "update"}}, [&]() -> absl::Status {
    REFITD_ASSIGN_OR_RETURN(client::Bucket packed, PackedBucket(*packer->packer, slot));
    update->update->PushAsync(std::move(packed), DoneOf(done, argument));
    return absl::OkStatus();
  });
}

// ---- Python ----

refit_status refit_python_use(const refit_python* python) {
  return Guarded([&]() -> absl::Status {
    REFITD_ASSIGN_OR_RETURN(const refit_python known, Read(python, "python"));
    return client::UsePython(known);
  });
}

void* refit_python_pusher(const refit_packer* packer) {
  return packer == nullptr ? nullptr : client::MakePusher(packer->packer);
}
