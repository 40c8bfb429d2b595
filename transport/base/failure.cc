#include "transport/base/failure.h"

#include <algorithm>

#include "absl/strings/cord.h"
#include "transport/base/errors.h"
#include "transport/base/utf8.h"

namespace refitd {
namespace {

constexpr char kPayload[] = "type.googleapis.com/refitd.v1.Failure";

// Field numbers of v1::Failure and v1::Suspect.
enum FailureField : uint32_t {
  kSuspects = 1,
  kSuspectCount = 2,
  kWeights = 3,
  kDirtyInstances = 4,
  kDirtyCount = 5,
  kTensor = 6,
  kField = 7,
  kVersion = 8,
  kMayBeRetried = 9,
  kRanks = 10,
};
enum SuspectField : uint32_t { kRole = 1, kDaemon = 2, kInstance = 3, kRank = 4, kPid = 5 };

enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

// ---- writing ----

void PutVarint(uint64_t value, std::string* out) {
  while (value >= 0x80) {
    out->push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  out->push_back(static_cast<char>(value));
}

void PutNumber(uint32_t field, uint64_t value, std::string* out) {
  PutVarint(uint64_t{field} << 3 | kVarint, out);
  PutVarint(value, out);
}

void PutBytes(uint32_t field, std::string_view bytes, std::string* out) {
  PutVarint(uint64_t{field} << 3 | kBytes, out);
  PutVarint(bytes.size(), out);
  out->append(bytes);
}

void PutName(uint32_t field, std::string_view name, size_t most, std::string* out) {
  if (!name.empty()) PutBytes(field, Harmless(name, most), out);
}

std::string EncodeSuspect(const Suspect& suspect) {
  std::string out;
  if (suspect.role != SuspectRole::kUnspecified) {
    PutNumber(kRole, static_cast<uint64_t>(suspect.role), &out);
  }
  PutName(kDaemon, suspect.daemon, kMaxSuspectNameBytes, &out);
  PutName(kInstance, suspect.instance, kMaxSuspectNameBytes, &out);
  if (suspect.rank.has_value() && *suspect.rank >= 0) {
    PutNumber(kRank, static_cast<uint64_t>(*suspect.rank), &out);
  }
  if (suspect.pid > 0) PutNumber(kPid, static_cast<uint64_t>(suspect.pid), &out);
  return out;
}

std::string EncodeRanks(const std::vector<int>& ranks) {
  std::string packed;
  for (size_t i = 0; i < std::min(ranks.size(), kMaxFailureRanks); ++i) {
    PutVarint(static_cast<uint64_t>(std::clamp(ranks[i], 0, int{UINT16_MAX})), &packed);
  }
  return packed;
}

// All but the lists of names.
std::string EncodeRest(const Failure& failure) {
  std::string out;
  const int64_t suspects =
      std::max(failure.suspect_count, static_cast<int64_t>(failure.suspects.size()));
  const int64_t dirty =
      std::max(failure.dirty_count, static_cast<int64_t>(failure.dirty_instances.size()));
  if (suspects > 0) PutNumber(kSuspectCount, static_cast<uint64_t>(suspects), &out);
  if (failure.weights != Weights::kUnknown) {
    PutNumber(kWeights, static_cast<uint64_t>(failure.weights), &out);
  }
  if (dirty > 0) PutNumber(kDirtyCount, static_cast<uint64_t>(dirty), &out);
  PutName(kTensor, failure.tensor, kMaxFailureTensorBytes, &out);
  PutName(kField, failure.field, kMaxFailureFieldBytes, &out);
  if (failure.version.has_value() && *failure.version >= 0) {
    PutNumber(kVersion, static_cast<uint64_t>(*failure.version), &out);
  }
  if (failure.may_be_retried) PutNumber(kMayBeRetried, 1, &out);
  if (!failure.ranks.empty()) PutBytes(kRanks, EncodeRanks(failure.ranks), &out);
  return out;
}

// ---- reading ----

class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}
  bool done() const { return rest_.empty(); }

  bool Varint(uint64_t* value) {
    *value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (rest_.empty()) return false;
      const auto byte = static_cast<unsigned char>(rest_.front());
      rest_.remove_prefix(1);
      *value |= uint64_t{byte & 0x7fU} << shift;
      if (byte < 0x80) return true;
    }
    return false;
  }

  bool Bytes(std::string_view* bytes) {
    uint64_t length = 0;
    if (!Varint(&length) || length > rest_.size()) return false;
    *bytes = rest_.substr(0, length);
    rest_.remove_prefix(length);
    return true;
  }

  bool Skip(size_t bytes) {
    if (bytes > rest_.size()) return false;
    rest_.remove_prefix(bytes);
    return true;
  }

 private:
  std::string_view rest_;
};

// One field: a number or bytes, by its wire type.
struct Field {
  uint32_t number = 0;
  uint32_t type = 0;
  uint64_t value = 0;
  std::string_view bytes;
};

bool Next(Reader* reader, Field* field) {
  uint64_t tag = 0;
  if (!reader->Varint(&tag) || tag >> 3 == 0 || tag >> 3 > UINT32_MAX >> 3) return false;
  *field = {static_cast<uint32_t>(tag >> 3), static_cast<uint32_t>(tag & 7), 0, {}};
  switch (field->type) {
    case kVarint:
      return reader->Varint(&field->value);
    case kBytes:
      return reader->Bytes(&field->bytes);
    case kFixed64:
      return reader->Skip(8);
    case kFixed32:
      return reader->Skip(4);
    default:
      return false;
  }
}

absl::Status ReadName(const Field& field, size_t most, std::string_view what, std::string* out) {
  if (field.bytes.size() > most) {
    return Invalid("failure.{}: {} bytes are more than {}", what, field.bytes.size(), most);
  }
  if (!IsHarmless(field.bytes)) {
    return Invalid("failure.{} has a control character or is not UTF-8", what);
  }
  *out = std::string(field.bytes);
  return absl::OkStatus();
}

absl::Status ReadNumber(const Field& field, uint64_t most, std::string_view what) {
  if (field.value <= most) return absl::OkStatus();
  return Invalid("failure.{} is {}, more than {}", what, field.value, most);
}

absl::Status Read(const Field& field, Suspect* suspect) {
  const bool number = field.type == kVarint;
  const bool bytes = field.type == kBytes;
  if (field.number == kRole && number) {
    // A role that a later release added is not known here.
    if (field.value <= static_cast<uint64_t>(SuspectRole::kOperator)) {
      suspect->role = static_cast<SuspectRole>(field.value);
    }
  } else if (field.number == kDaemon && bytes) {
    return ReadName(field, kMaxSuspectNameBytes, "suspects.daemon", &suspect->daemon);
  } else if (field.number == kInstance && bytes) {
    return ReadName(field, kMaxSuspectNameBytes, "suspects.instance", &suspect->instance);
  } else if (field.number == kRank && number) {
    REFITD_RETURN_IF_ERROR(ReadNumber(field, INT32_MAX, "suspects.rank"));
    suspect->rank = static_cast<int>(field.value);
  } else if (field.number == kPid && number) {
    REFITD_RETURN_IF_ERROR(ReadNumber(field, INT32_MAX, "suspects.pid"));
    suspect->pid = static_cast<int>(field.value);
  }
  return absl::OkStatus();
}

template <typename Value>
absl::Status ReadFields(std::string_view bytes, Value* value) {
  for (Reader reader(bytes); !reader.done();) {
    Field field;
    if (!Next(&reader, &field)) return Invalid("failure: the bytes are no message");
    REFITD_RETURN_IF_ERROR(Read(field, value));
  }
  return absl::OkStatus();
}

absl::Status ReadRank(uint64_t rank, std::vector<int>* ranks) {
  if (rank > UINT16_MAX || ranks->size() >= kMaxFailureRanks) {
    return Invalid("failure.ranks: {} is the entry {}", rank, ranks->size());
  }
  ranks->push_back(static_cast<int>(rank));
  return absl::OkStatus();
}

// Packed, or one by one: a reader has to take both.
absl::Status ReadRanks(const Field& field, std::vector<int>* ranks) {
  if (field.type == kVarint) return ReadRank(field.value, ranks);
  for (Reader reader(field.bytes); !reader.done();) {
    uint64_t rank = 0;
    if (!reader.Varint(&rank)) return Invalid("failure.ranks are cut short");
    REFITD_RETURN_IF_ERROR(ReadRank(rank, ranks));
  }
  return absl::OkStatus();
}

absl::Status ReadSuspect(std::string_view bytes, std::vector<Suspect>* suspects) {
  if (suspects->size() == kMaxSuspects) return Invalid("failure.suspects: over {}", kMaxSuspects);
  return ReadFields(bytes, &suspects->emplace_back());
}

absl::Status ReadDirty(const Field& field, std::vector<std::string>* names) {
  if (names->size() == kMaxDirtyInstances) {
    return Invalid("failure.dirty_instances: over {}", kMaxDirtyInstances);
  }
  return ReadName(field, kMaxSuspectNameBytes, "dirty_instances", &names->emplace_back());
}

absl::Status ReadList(const Field& field, Failure* failure) {
  switch (field.number) {
    case kSuspects:
      return ReadSuspect(field.bytes, &failure->suspects);
    case kDirtyInstances:
      return ReadDirty(field, &failure->dirty_instances);
    case kTensor:
      return ReadName(field, kMaxFailureTensorBytes, "tensor", &failure->tensor);
    case kField:
      return ReadName(field, kMaxFailureFieldBytes, "field", &failure->field);
    case kRanks:
      return ReadRanks(field, &failure->ranks);
    default:
      return absl::OkStatus();
  }
}

absl::Status ReadCount(const Field& field, std::string_view what, int64_t* count) {
  REFITD_RETURN_IF_ERROR(ReadNumber(field, INT64_MAX, what));
  *count = static_cast<int64_t>(field.value);
  return absl::OkStatus();
}

absl::Status Read(const Field& field, Failure* failure) {
  if (field.type == kBytes) return ReadList(field, failure);
  if (field.type != kVarint) return absl::OkStatus();
  switch (field.number) {
    case kSuspectCount:
      return ReadCount(field, "suspect_count", &failure->suspect_count);
    case kWeights:
      if (field.value <= static_cast<uint64_t>(Weights::kDirty)) {
        failure->weights = static_cast<Weights>(field.value);
      }
      return absl::OkStatus();
    case kDirtyCount:
      return ReadCount(field, "dirty_count", &failure->dirty_count);
    case kVersion:
      return ReadCount(field, "version", &failure->version.emplace());
    case kMayBeRetried:
      failure->may_be_retried = field.value != 0;
      return absl::OkStatus();
    case kRanks:
      return ReadRanks(field, &failure->ranks);
    default:
      return absl::OkStatus();
  }
}

}  // namespace

void Failure::Add(Suspect suspect) {
  if (std::find(suspects.begin(), suspects.end(), suspect) != suspects.end()) return;
  ++suspect_count;
  if (suspects.size() < kMaxSuspects) suspects.push_back(std::move(suspect));
}

void Failure::AddDirty(std::string instance) {
  weights = Weights::kDirty;
  ++dirty_count;
  if (dirty_instances.size() < kMaxDirtyInstances) dirty_instances.push_back(std::move(instance));
}

// The first suspect goes in first, then instances and suspects in turn, so that long names of the
// one kind leave room for the other.
std::string EncodeFailure(const Failure& failure) {
  std::string out = EncodeRest(failure);
  const size_t suspects = std::min(failure.suspects.size(), kMaxSuspects);
  const size_t dirty = std::min(failure.dirty_instances.size(), kMaxDirtyInstances);
  const auto put = [&out](const std::string& entry) {
    const bool fits = out.size() + entry.size() <= kMaxFailureBytes;
    if (fits) out += entry;
    return fits;
  };
  for (size_t i = 0; i < std::max(suspects, dirty); ++i) {
    std::string entry;
    if (i < suspects) PutBytes(kSuspects, EncodeSuspect(failure.suspects[i]), &entry);
    if (!put(entry)) break;
    entry.clear();
    if (i < dirty) {
      PutBytes(kDirtyInstances, Harmless(failure.dirty_instances[i], kMaxSuspectNameBytes), &entry);
    }
    if (!put(entry)) break;
  }
  return out;
}

absl::StatusOr<Failure> DecodeFailure(std::string_view bytes) {
  if (bytes.size() > kMaxFailureBytes) {
    return Invalid("failure: {} bytes are more than {}", bytes.size(), kMaxFailureBytes);
  }
  Failure failure;
  REFITD_RETURN_IF_ERROR(ReadFields(bytes, &failure));
  failure.suspect_count =
      std::max(failure.suspect_count, static_cast<int64_t>(failure.suspects.size()));
  failure.dirty_count =
      std::max(failure.dirty_count, static_cast<int64_t>(failure.dirty_instances.size()));
  return failure;
}

Failure FailureOf(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kPayload);
  if (!payload.has_value()) return {};
  absl::StatusOr<Failure> failure = DecodeFailure(std::string(*payload));
  return failure.ok() ? *std::move(failure) : Failure();
}

absl::Status WithFailure(absl::Status status, const Failure& failure) {
  if (failure == Failure()) {
    status.ErasePayload(kPayload);
  } else {
    status.SetPayload(kPayload, absl::Cord(EncodeFailure(failure)));
  }
  return status;
}

absl::Status AboutTensor(absl::Status status, std::string_view tensor) {
  if (status.ok()) return status;
  Failure failure = FailureOf(status);
  if (failure.tensor.empty()) failure.tensor = std::string(tensor);
  return WithFailure(std::move(status), failure);
}

absl::Status AboutField(absl::Status status, std::string_view field) {
  if (status.ok()) return status;
  Failure failure = FailureOf(status);
  if (failure.field.empty()) failure.field = std::string(field);
  return WithFailure(std::move(status), failure);
}

absl::Status AboutSuspect(absl::Status status, Suspect suspect) {
  if (status.ok()) return status;
  Failure failure = FailureOf(status);
  failure.Add(std::move(suspect));
  return WithFailure(std::move(status), failure);
}

absl::Status AboutRanks(absl::Status status, std::vector<int> ranks) {
  if (status.ok()) return status;
  Failure failure = FailureOf(status);
  failure.ranks = std::move(ranks);
  return WithFailure(std::move(status), failure);
}

absl::Status WithFailureOf(const absl::Status& from, absl::Status status) {
  if (status.ok()) return status;
  if (absl::optional<absl::Cord> payload = from.GetPayload(kPayload); payload.has_value()) {
    status.SetPayload(kPayload, *std::move(payload));
  }
  return status;
}

}  // namespace refitd
